"""verl's SFT trainer as released, on two CPU ranks: the real program, with our checkpoints and without.

The FSDP engine is verl's, with FSDP 2: torch's FSDP 1 wants a GPU. With Megatron the engine is a
small one, see ``verl_sft_job``; its checkpoint manager and its ``save_checkpoint`` are verl's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip(
    "verl.plugin.platform", reason="verl 0.9.1 has it: a CPU can be its accelerator"
)

from verl_sft_runs import STEPS_PER_EPOCH, Run, SftServer

from ckptfsm.core.errors import ConfigError
from ckptfsm.integrations.verl import install

pytestmark = pytest.mark.megatron
TRACKER = "latest_checkpointed_iteration.txt"
BOTH = pytest.mark.parametrize("engine", ["fsdp2", "megatron"])


@pytest.fixture(scope="session")
def sft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SftServer]:
    server = SftServer(tmp_path_factory.mktemp("sft"))
    yield server
    server.close()


def steps(place: Path) -> list[str]:
    return sorted(p.name for p in (place / "root").glob("global_step_*"))


def tracked(place: Path) -> str:
    return (place / "root" / TRACKER).read_text().strip()


def listed_in(step: Path) -> list[str]:
    """The files that the ranks have said to have written."""
    receipts = [p.read_text() for p in (step / ".ckptfsm/receipts").rglob("*.json")]
    return [file["name"] for text in receipts for file in json.loads(text)["files"]]


def torch_files(step: Path) -> dict[str, bytes]:
    """The files of ``torch.save`` at the top of a step's directory."""
    return {path.name: path.read_bytes() for path in step.glob("*.pt")}


def states(notes: list[dict[str, Any]]) -> list[Any]:
    return [rank["state"] for rank in notes]


def seen(notes: list[dict[str, Any]]) -> list[Any]:
    return [rank["seen"] for rank in notes]


@pytest.mark.parametrize(
    ("engine", "async_save"),
    [("fsdp2", True), ("fsdp2", False), ("megatron", True), ("megatron", False)],
)
def test_stock_resumes_our_steps_as_if_nothing_had_been(
    sft: SftServer, tmp_path: Path, engine: str, async_save: bool
) -> None:
    """Catches: verl #7952: an engine with saves that are never tracked; a file that only we can
    read. Also: a lost moment, generator or position in the data; retention that deletes another
    step; a file of a rank, written while training goes on, that is not byte for byte verl's."""
    whole_place = tmp_path / "whole"
    whole = Run(sft, whole_place, engine, stock=True, async_save=False).done()
    first = {"total_training_steps": 6, "max_ckpt_to_keep": 2, "save_freq": 2}
    ours = Run(sft, tmp_path / "ours", engine, trainer=first, async_save=async_save)
    saved = ours.done()
    assert [len(rank["seen"]) for rank in saved] == [6, 6]
    assert (steps(ours.place), tracked(ours.place)) == (["global_step_4", "global_step_6"], "6")
    assert not os.listdir(ours.place / "root/.ckptfsm/staging")
    for name in steps(ours.place) if engine == "fsdp2" else ():
        found, stocks = (torch_files(place / "root" / name) for place in (ours.place, whole_place))
        assert sorted(found) == sorted(stocks) and len(found) == 8
        same = {file for file in found if found[file] == stocks[file]}
        # Nobody seeds the generators of Python and numpy.
        assert all(file.startswith("extra_state") for file in found.keys() - same)
    again = Run(sft, tmp_path / "ours", engine, stock=True, async_save=False).done()
    assert [rank["resumed"] for rank in again] == [6, 6]
    assert [rank["began"] for rank in again] == states(saved)
    assert seen(again) == [batches[6:] for batches in seen(whole)]
    assert states(again) == states(whole)


@BOTH
def test_a_run_that_was_killed_goes_on_from_the_last_tracked_step(
    sft: SftServer, tmp_path: Path, engine: str
) -> None:
    """Catches: a tracker, a directory or a deletion before every rank has written (verl #4638).
    Also: a run that begins from zero, or from a save in flight; remains of a killed run in the
    way of the next; shards that are written while the save is called."""
    whole = Run(sft, tmp_path / "whole", engine, stock=True, async_save=False).done()
    gate = tmp_path / "gate"
    keep = {"max_ckpt_to_keep": 1, "save_freq": 3}
    first = {**keep, "total_training_steps": 3}
    Run(sft, tmp_path / "ours", engine, trainer=first).done()
    killed = Run(sft, tmp_path / "ours", engine, trainer=keep, hold=str(gate), wait_at=5)
    for rank in (0, 1):
        until_there(killed, killed.place / f"waits-{rank}")
    assert [at for rank in killed.notes() for at in rank["at"]] == [["3", ["global_step_3"]]] * 10
    killed.kill()
    (staged,) = (killed.place / "root/.ckptfsm/staging").iterdir()  # step 6 was in flight
    assert all(name.startswith("data_") for name in torch_files(staged)), "others come later"
    gate.touch()  # the writers left behind may write
    again = Run(sft, tmp_path / "ours", engine, trainer=keep).done()
    assert [rank["resumed"] for rank in again] == [3, 3]
    assert states(again) == states(whole)
    assert (steps(killed.place), tracked(killed.place)) == (["global_step_8"], "8")
    assert not os.listdir(killed.place / "root/.ckptfsm/staging")


def until_there(run: Run, path: Path) -> None:
    deadline = time.monotonic() + 120
    while not glob(str(path)):
        assert time.monotonic() < deadline, run.logs()
        time.sleep(0.02)


def test_a_killed_writer_fails_its_save_on_all_ranks_and_training_goes_on(
    sft: SftServer, tmp_path: Path
) -> None:
    """Catches: a writer of FSDP shards, killed for memory say, that takes the trainer along, is
    waited for, or leaves a step that is tracked all the same."""
    gate, options = tmp_path / "gate", {"on_failure": "warn"}
    run = Run(sft, tmp_path / "ours", "fsdp2", options=options, hold=str(gate))
    for rank in (0, 1):
        until_there(run, tmp_path / f"held-{rank}")
    os.kill(int((tmp_path / "held-1").read_text()), signal.SIGKILL)
    gate.touch()
    notes = run.done()
    assert any("step 2 failed (writer_died)" in text for text in notes[0]["warned"])
    assert [len(rank["seen"]) for rank in notes] == [8, 8]
    assert steps(run.place) == ["global_step_4", "global_step_6", "global_step_8"]
    assert tracked(run.place) == "8"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_ctrl_c_at_one_rank_ends_a_wait_on_all(sft: SftServer, tmp_path: Path, rank: int) -> None:
    """Catches: ranks that wait for an interrupted rank, or only see that it is gone; a Ctrl-C
    that is put off until the writers have ended."""
    gate = tmp_path / "gate"
    run = Run(sft, tmp_path / "ours", "megatron", async_save=False, hold=str(gate))
    until_there(run, tmp_path / f"held-{rank}")  # so that rank is inside the save
    os.kill(run.pids[rank], signal.SIGINT)
    assert run.ended() == [1, 1]
    gate.touch()  # the writers left behind may write
    raised = [notes["raised"] for notes in run.notes()]
    assert raised[rank].startswith("KeyboardInterrupt")
    assert raised[1 - rank].startswith(f"RankInterrupted: rank {rank} was interrupted")


@BOTH
def test_the_loop_polls(sft: SftServer, tmp_path: Path, engine: str) -> None:
    """Catches: a trainer that never polls: a save that is tracked at the next one, or at the end."""
    gate = tmp_path / "gate"
    long = {"save_freq": 30, "total_training_steps": 59, "total_epochs": 15}
    run = Run(sft, tmp_path / "ours", engine, trainer=long, hold=str(gate), open_at=32)
    notes = run.done()
    named = [at[0] for at in notes[0]["at"]]
    assert named[:32] == [""] * 32, "step 30 is in flight, and nothing tracks it"
    assert named[-1] == "30", "it was tracked while training went on"
    assert all(not rank["warned"] for rank in notes)
    assert tracked(run.place) == "59"


@BOTH
def test_an_epoch_that_is_over_is_not_skipped_by_the_next_run(
    sft: SftServer, tmp_path: Path, engine: str
) -> None:
    """Catches: verl #7401: a run that resumes at the end of an epoch and trains nothing."""
    whole = Run(sft, tmp_path / "whole", engine, stock=True, async_save=False).done()
    first = {"save_freq": STEPS_PER_EPOCH, "total_epochs": 1}
    Run(sft, tmp_path / "ours", engine, trainer=first).done()
    shutil.copytree(tmp_path / "ours", tmp_path / "stock")
    again = Run(sft, tmp_path / "ours", engine).done()
    assert [rank["resumed"] for rank in again] == [STEPS_PER_EPOCH] * 2
    assert seen(again) == [batches[STEPS_PER_EPOCH:] for batches in seen(whole)]
    assert states(again) == states(whole)
    stock = Run(sft, tmp_path / "stock", engine, stock=True, async_save=False).done()
    assert seen(stock) == [[], []], "verl has mended it: so need not we"


@pytest.mark.parametrize("torn", ["", "4\n2", "9", None])
def test_a_torn_tracker_is_mended(sft: SftServer, tmp_path: Path, torn: str | None) -> None:
    """Catches: a run from zero over the old one, or one that ends with ``ValueError``."""
    first = {"total_training_steps": 3, "save_freq": 3}
    Run(sft, tmp_path / "ours", "fsdp2", trainer=first).done()
    tracker = tmp_path / "ours/root" / TRACKER
    tracker.unlink() if torn is None else tracker.write_text(torn)
    again = Run(sft, tmp_path / "ours", "fsdp2", trainer={"save_freq": 5}).done()
    assert [rank["resumed"] for rank in again] == [3, 3]
    assert tracked(tmp_path / "ours") == "8"


@BOTH
def test_a_checkpoint_that_takes_long_to_verify(
    sft: SftServer, tmp_path: Path, engine: str
) -> None:
    """Catches: a large checkpoint that one rank alone reads, while the others wait for longer
    than they may. Also: a damaged file in another rank's share that is loaded all the same."""
    Run(sft, tmp_path / "ours", engine, trainer={"total_training_steps": 4}).done()
    step = tmp_path / "ours/root/global_step_4"
    listed = listed_in(step)
    with (step / max(name for name in listed if name.startswith("data_"))).open("r+b") as file:
        file.write(b"?")
    again = Run(sft, tmp_path / "ours", engine, verify_slowly=True).done()
    assert [rank["resumed"] for rank in again] == [2, 2]
    assert any("step 4 is damaged" in text for text in again[0]["warned"])
    assert tracked(tmp_path / "ours") == "8"
    shares = [
        {name for name in rank["verified"] if name.startswith("global_step_4/")} for rank in again
    ]
    assert all(shares) and not shares[0] & shares[1]
    assert {f"global_step_4/{name}" for name in listed} <= shares[0] | shares[1]


@BOTH
@pytest.mark.parametrize("on_failure", ["warn", "raise"])
def test_a_full_disk_at_one_rank(
    sft: SftServer, tmp_path: Path, engine: str, on_failure: str
) -> None:
    """Catches: ranks that wait for the one that failed; a failed save that is tracked. Also:
    training that ends although it was to go on, or goes on although it was to end."""
    options = {"on_failure": on_failure, "exchange_timeout_s": 60, "effect_timeout_s": 30}
    run = Run(sft, tmp_path / "ours", engine, options=options, failing=1)
    if on_failure == "raise":
        assert run.ended() == [1, 1]
        assert all("No space left on device" in rank["raised"] for rank in run.notes())
        assert all(rank["raised"].startswith("SaveFailed") for rank in run.notes())
        assert not (run.place / "root" / TRACKER).exists()
        return
    notes = run.done()
    assert any("No space left on device" in text for text in notes[0]["warned"])
    assert steps(run.place) == ["global_step_4", "global_step_6", "global_step_8"]
    assert tracked(run.place) == "8"


def test_resuming_in_a_way_that_would_end_in_refused_saves(sft: SftServer, tmp_path: Path) -> None:
    """Catches: hours of training before the first save is refused."""
    first = {"total_training_steps": 4, "save_freq": 2}
    Run(sft, tmp_path / "ours", "fsdp2", trainer=first).done()
    run = Run(sft, tmp_path / "ours", "fsdp2", trainer={"resume_mode": "disable"})
    assert run.ended() == [1, 1]
    assert all("give another directory" in rank["raised"] for rank in run.notes())
    older = {"resume_from_path": f"{tmp_path}/ours/root/global_step_2"}
    run = Run(sft, tmp_path / "ours", "fsdp2", trainer=older)
    assert run.ended() == [1, 1]
    assert all("resume_from_path is step 2" in rank["raised"] for rank in run.notes())


def test_verls_remote_directory_gets_the_files_of_every_rank(
    sft: SftServer, tmp_path: Path
) -> None:
    """Catches: a setting that this trainer does not heed; an end before the last copy."""
    there = tmp_path / "there"
    there.mkdir()
    run = Run(sft, tmp_path / "ours", "fsdp2", trainer={"default_hdfs_dir": str(there)})
    run.done()
    assert steps(run.place)[-1] == "global_step_8"
    files = {p.name for p in (there / "global_step_8").iterdir()}
    assert {"data_0.pt", "data_1.pt", "optim_world_size_2_rank_1.pt", "huggingface"} <= files
    assert (there / "global_step_8/.ckptfsm/manifest.json").exists()


def test_steps_of_stock_are_not_passed_over(sft: SftServer, tmp_path: Path) -> None:
    """Catches: an earlier run that is not seen: a silent restart from zero over it."""
    first, more = {"total_training_steps": 3, "save_freq": 3}, {"save_freq": 5}
    for engine in ("fsdp2", "megatron"):
        Run(sft, tmp_path / engine, engine, stock=True, async_save=False, trainer=first).done()
    again = Run(sft, tmp_path / "megatron", "megatron", trainer=more).done()
    assert [rank["resumed"] for rank in again] == [3, 3]
    assert steps(tmp_path / "megatron") == ["global_step_3", "global_step_5", "global_step_8"]
    refused = Run(sft, tmp_path / "fsdp2", "fsdp2", trainer=more)
    assert refused.ended() == [1, 1]
    way_out = f"trainer.resume_from_path={tmp_path}/fsdp2/root/global_step_3"
    assert all(way_out in rank["raised"] for rank in refused.notes())
    assert steps(tmp_path / "fsdp2") == ["global_step_3"]
    from_there = {**more, "resume_from_path": f"{tmp_path}/fsdp2/root/global_step_3"}
    elsewhere = Run(sft, tmp_path / "elsewhere", "fsdp2", trainer=from_there).done()
    assert [rank["resumed"] for rank in elsewhere] == [3, 3]
    assert steps(tmp_path / "elsewhere") == ["global_step_5", "global_step_8"]


def test_the_manifest_lists_every_file_of_every_rank(sft: SftServer, tmp_path: Path) -> None:
    """Catches: a file at the top of a step that verl wrote and that was not made durable; a
    setting that does not reach the ranks."""
    for engine in ("fsdp2", "megatron"):
        first = {"total_training_steps": 2}
        options = {"common_state": "file"}
        run = Run(sft, tmp_path / engine, engine, trainer=first, options=options)
        run.done()
        step = run.place / "root/global_step_2"
        files = {str(p.relative_to(step)) for p in step.rglob("*") if p.is_file()}
        listed = listed_in(step)
        assert len(listed) == len(set(listed))
        ours = {name for name in files | set(listed) if name.startswith(".ckptfsm/")}
        assert set(listed) - ours == files - ours
        assert engine != "megatron" or any(name.endswith("/common.pt") for name in listed)


def test_refusals_of_install() -> None:
    """Catches: an object with a checkpoint loaded already; parts that would not be saved."""
    from verl.trainer import sft_trainer

    with pytest.raises(ConfigError, match="install its class"):
        install(sft_trainer.SFTTrainer.__new__(sft_trainer.SFTTrainer))
    with pytest.raises(ConfigError, match="no extra_parts"):
        install(sft_trainer.SFTTrainer, extra_parts=dict)
    ours = install(sft_trainer.SFTTrainer)
    with pytest.raises(ConfigError, match="already"):
        install(ours)
