"""transformers' real ``Trainer`` on two CPU ranks over gloo, with the drop-in and without.

Every run must go through the very parameters of a run of stock code that never stopped.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if not find_spec("transformers") or not find_spec("accelerate"):
    pytest.skip("transformers is not installed", allow_module_level=True)

import torch  # noqa: E402
from accelerate_ranks import Jobs, run  # noqa: E402
from transformers_job import make  # noqa: E402

from ckptfsm.core.errors import ConfigError, RecoveryWarning, ReshardWarning  # noqa: E402
from ckptfsm.core.retention import CheckpointInfo  # noqa: E402
from ckptfsm.integrations.transformers import (  # noqa: E402
    BEST,
    SaveTotalLimit,
    TrainerCheckpoints,
    install,
)
from ckptfsm.ranks.handle import Restored  # noqa: E402

pytestmark = pytest.mark.integration
JOB = "transformers_job.train"
LAST = 4


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """The root of a run of stock code, and what each rank went through; made once for each kind."""
    made: dict[str, tuple[Path, Any]] = {}

    def of(kind: str) -> tuple[Path, Any]:
        if kind not in made:
            place = tmp_path_factory.mktemp(kind)
            arguments = {"root": str(place / "out"), "last": LAST, "kind": kind}
            whole = run(place / "job", JOB, 2, ours=False, resume=False, **arguments)
            made[kind] = place / "out", whole
        return made[kind]

    return of


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("checkpoint-*"))


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_stock_and_ours_resume_each_other_bit_for_bit(
    tmp_path: Path, stock: Callable[[str], tuple[Path, Any]], kind: str
) -> None:
    before, whole = stock(kind)
    root = tmp_path / "out"
    shutil.copytree(before / "checkpoint-1", root / "checkpoint-1")
    jobs = Jobs(tmp_path, JOB, {"root": str(root), "kind": kind}, whole)
    jobs(begin=1, last=3)  # adopts what stock wrote
    jobs(begin=3, last=LAST, ours=False)
    assert names(root) == [f"checkpoint-{step}" for step in range(1, LAST + 1)]


def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before(
    tmp_path: Path, stock: Callable[[str], tuple[Path, Any]]
) -> None:
    root = tmp_path / "out"
    jobs = Jobs(tmp_path, JOB, {"root": str(root), "save_total_limit": 1}, stock("ddp")[1])
    jobs.killed_in(2)  # it asks to resume, and nothing is there
    assert names(root) == ["checkpoint-1"]
    [first, _] = jobs(begin=1, last=3, late=True)
    assert first["saved"] == [["checkpoint-2"], ["checkpoint-3"]]
    assert first["limit"] == 1


def test_the_best_checkpoint_stays_and_is_loaded_at_the_end(tmp_path: Path) -> None:
    """``load_best_model_at_end`` with a limit of one; stock deletes the newest at the end."""
    arguments = {
        "root": str(tmp_path / "out"),
        "best_at": 2,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "loss",
        "load_best_model_at_end": True,
        "save_total_limit": 1,
    }
    [found] = run(tmp_path / "job1", JOB, 1, last=3, resume=False, **arguments)
    assert found["best"] == str(tmp_path / "out/checkpoint-2")
    assert found["end"] == found["digests"]["2"]  # the model of step 2
    assert found["saved"][-1] == ["checkpoint-2", "checkpoint-3"]
    saved = torch.load(tmp_path / "out/checkpoint-2/training_args.bin", weights_only=False)
    assert saved.save_total_limit == 1
    state = json.loads((tmp_path / "out/checkpoint-2/trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == found["best"]  # not a path of the attempt
    arguments |= {"best_at": 5, "sync": False}  # the best is still in flight at the end
    [again] = run(tmp_path / "job2", JOB, 1, last=5, **arguments)
    assert (again["begin"], again["best"]) == (3, str(tmp_path / "out/checkpoint-5"))
    assert names(tmp_path / "out") == ["checkpoint-5"]


@pytest.mark.parametrize(("sync", "best_at", "best"), [(True, 3.4, 4), (False, 3, 2)])
def test_a_best_checkpoint_that_was_not_saved_does_not_count(
    tmp_path: Path, sync: bool, best_at: float, best: int
) -> None:
    arguments = {
        "root": str(tmp_path / "out"),
        "best_at": best_at,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "loss",
        "load_best_model_at_end": True,
        "save_total_limit": 2,
    }
    [found] = run(tmp_path / "job", JOB, 1, last=5, fails_in=3, sync=sync, **arguments)
    assert found["best"] == str(tmp_path / f"out/checkpoint-{best}")
    assert found["end"] == found["digests"][str(best)]
    assert names(tmp_path / "out") == [f"checkpoint-{best}", "checkpoint-5"]


# ------------------------------------------------------------------------------------- one process


def test_a_half_written_newest_directory_is_passed_over(tmp_path: Path) -> None:
    root = str(tmp_path / "out")
    [found] = run(tmp_path / "job1", JOB, 1, root=root, last=2, resume=False, ours=False)
    Path(root, "checkpoint-2/trainer_state.json").unlink()
    [again] = run(tmp_path / "job2", JOB, 1, root=root, last=2)
    assert again["begin"] == 1
    assert again["digests"]["2"] == found["digests"]["2"]
    assert Path(root, "checkpoint-2/trainer_state.json").exists()


def test_what_a_checkpoint_lacks_is_said(tmp_path: Path) -> None:
    """Catches: an optimizer, or random numbers, that begin anew without a word, as in stock code."""
    made = object.__new__(TrainerCheckpoints)
    made._trainer = SimpleNamespace(args=SimpleNamespace(world_size=2, process_index=1))
    found = Restored(1, None, {}, (), (), str(tmp_path))
    with (
        pytest.warns(ReshardWarning, match="rng_state_1.pth"),
        pytest.warns(RecoveryWarning, match="no optimizer"),
    ):
        made._looked_into(found)
    for name in ("rng_state_1.pth", "optimizer.pt"):
        (tmp_path / name).touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert made._looked_into(found) == str(tmp_path)


def test_a_start_that_would_save_the_same_steps_again_is_refused(tmp_path: Path) -> None:
    root = str(tmp_path / "out")
    trainer, _ = make(root, 2, "ddp", {"save_only_model": True})
    install(trainer)
    trainer.train()
    assert not Path(root, "checkpoint-2/optimizer.pt").exists()
    for asked in (None, str(Path(root, "checkpoint-1"))):
        with pytest.raises(ConfigError, match="resume_from_checkpoint") as refused:
            trainer.train(resume_from_checkpoint=asked)
        assert refused.value.facts["step"] == 2


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint"),
        ({"save_on_each_node": True}, "save_on_each_node"),
        ({"push_to_hub": True}, "push_to_hub"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    tmp_path: Path, arguments: dict[str, Any], key: str
) -> None:
    trainer, _ = make(str(tmp_path), 1, "ddp", {})
    for name, value in arguments.items():
        setattr(trainer.args, name, value)
    with pytest.raises(ConfigError) as refused:
        install(trainer)
    assert refused.value.facts["key"] == key


def test_the_limit_counts_the_newest_and_the_best() -> None:
    def kept(limit: int, best: int | None) -> set[int]:
        metrics = {} if best is None else {BEST: float(best)}
        infos = [CheckpointInfo(step, 0.0) for step in (1, 2, 3, 4)]
        return SaveTotalLimit(limit).preserve([*infos, CheckpointInfo(5, 0.0, metrics)])

    assert kept(1, None) == {5}
    assert kept(2, None) == {4, 5}
    assert kept(1, 2) == kept(2, 2) == {2, 5}
    assert kept(3, 2) == {2, 4, 5}
    assert kept(2, 9) == {4, 5}  # the best was never saved
    assert kept(9, 2) == {1, 2, 3, 4, 5}
