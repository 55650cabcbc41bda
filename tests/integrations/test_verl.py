"""verl as released, driven by ckptfsm: real managers of verl in real processes, gloo, forked writers.

Runs only where verl is installed. verl's code loads every checkpoint, from the path that its
``find_latest_ckpt_path`` finds.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from cli_runs import said

pytest.importorskip("verl")
pytest.importorskip("ray")

from megatron.core import __version__ as core_version
from servers import Server
from snapshots import files_of
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path
from verl_groups import LIMIT_S, PipeCalls, WorkerGroup, config_of
from verl_job import TRACKER, Job, restarted, save, state_of, train
from verl_loops import calls_in_every_step

from ckptfsm.core.errors import (
    ConfigError,
    PollMissingWarning,
    SaveFailedWarning,
    StepExistsError,
)
from ckptfsm.core.retention import KeepAll, LatestN
from ckptfsm.integrations.verl import install, install_in_verl, retention_of
from ckptfsm.integrations.verl import trainer as trainer_module
from ckptfsm.testing.fakes import FifoGate

pytestmark = pytest.mark.megatron
NEW = tuple(map(int, version("verl").split(".")[:2])) >= (0, 9)  # three trees, not one
CORE = tuple(map(int, core_version.split(".")[:2]))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("verl"))
    yield server
    server.close()


@pytest.fixture
def job(server: Server, tmp_path: Path) -> Iterator[Job]:
    job = Job(server, tmp_path)
    yield job
    job.end()


@pytest.mark.parametrize("async_save", [False, True])
def test_stock_verl_loads_the_saved_state(job: Job, async_save: bool) -> None:
    """Catches: a checkpoint that only we can read; a missing part; a lost moment or generator."""
    trainer = job.start(async_save=async_save)
    trainer._load_checkpoint()
    train(trainer, 2)
    saved = state_of(trainer)
    trainer._save_checkpoint()
    if async_save:
        train(trainer, 1)
    trainer.checkpoints.close()
    assert job.tracked() == 2
    again = job.start(stock=True)
    train(again, 5)
    again._load_checkpoint()
    assert again.global_steps == 2
    assert state_of(again) == saved


def polled_until(trainer: Any, done: Any) -> None:
    """Poll until ``done()``, as the loop does: in every step."""
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, "nothing happens"
        trainer._start_profiling(False)


@pytest.mark.parametrize("bridge", [False, True])
def test_both_layouts_of_verl(job: Job, bridge: bool) -> None:
    """Catches: another layout than that of the installed verl; its manifest or its HF files missing."""
    save(job.start(async_save=False, bridge=bridge))
    step = job.root / "global_step_1"
    found = {str(p.relative_to(step)) for p in step.rglob("*") if p.is_file()}
    trees = {str(Path(name).parent) for name in found if name.endswith("/.metadata")}
    top = {n for n in found if "dist_ckpt" not in n and ".ckptfsm" not in n}
    if not NEW:
        assert trees == {"actor/dist_ckpt", "critic/dist_ckpt"}
        files = ("huggingface/config.json", "transformer_config.json")
    else:
        trees_of = ["optimizer", "extra"] if bridge else ["model", "optimizer", "extra"]
        roles = ("actor", "critic")
        assert trees == {f"{role}/{tree}/dist_ckpt" for role in roles for tree in trees_of}
        files = ("transformer_config.json", "ckpt_contents.json")
        if bridge:
            files += ("model/huggingface/config.json", "model/huggingface/model-0.bin")
            assert "actor/model/huggingface/model-1.bin" in top, "a file that another rank wrote"
        told = json.loads((step / "actor/ckpt_contents.json").read_text())
        assert (told["global_step"], told["world_size"], told["role"]) == (1, 2, "actor")
    assert {f"{role}/{name}" for role in ("actor", "critic") for name in files} <= top
    manifest = (step / ".ckptfsm/manifest.json").read_text()
    assert all(name in json.dumps(_receipts(step)) for name in top), "not in any receipt"
    assert '"data.pt"' in manifest


def _receipts(step: Path) -> list[str]:
    return [p.read_text() for p in (step / ".ckptfsm/receipts").rglob("*.json")]


def test_only_some_contents(job: Job) -> None:
    """Catches: save_contents that are not asked for, or asked for and missing."""
    contents = ["model", "optimizer"]
    trainer = job.start(checkpoint={"save_contents": contents, "load_contents": contents})
    save(trainer)
    step = job.root / "global_step_1"
    assert not (step / "actor/transformer_config.json").exists()
    assert not list(step.glob("actor/extra/dist_ckpt/*"))
    trainer.checkpoints.close()
    stock = job.start(stock=True, checkpoint={"save_contents": contents, "load_contents": contents})
    stock._load_checkpoint()
    assert stock.global_steps == 1


KEEP_ONE = {"max_actor_ckpt_to_keep": 1, "max_critic_ckpt_to_keep": 1}


@pytest.mark.parametrize("keep", [KEEP_ONE, {"remove_previous_ckpt_in_save": True}])
def test_the_old_checkpoint_stays_until_the_new_one_is_tracked(
    job: Job, keep: dict[str, Any]
) -> None:
    """Catches: keep=1 that deletes first (verl #4873), a tracker before the save is durable (#4638).

    Also: a step of which only a part is deleted, ranks that delete without being told.
    """
    gate = job.place / "go"
    trainer = job.start(async_save=True, **keep)
    save(trainer)
    trainer.checkpoints.poll(wait=True)
    trainer.critic_wg.call("verl_worker:hold_writers", str(gate))
    save(trainer)
    for _ in range(50):
        trainer._start_profiling(False)
        assert job.tracked() == 1
        assert (job.root / "global_step_1/actor/transformer_config.json").exists()
        assert job.steps() == ["global_step_1"]
    gate.touch()
    polled_until(trainer, lambda: job.steps() == ["global_step_2"])
    assert job.tracked() == 2


@pytest.mark.parametrize("late", [0, 1])
def test_the_tracker_waits_for_every_rank_and_is_the_drivers(job: Job, late: int) -> None:
    """Catches: verl #5016: a rank that takes itself for the one that tracks, and is done first."""
    gate = job.place / "go"
    trainer = job.start(async_save=True, critic=False)
    trainer._load_checkpoint()
    group = trainer.actor_rollout_wg
    group.results([group.workers[late].submit("verl_worker:hold_writers", str(gate))])
    save(trainer)
    for _ in range(50):
        trainer._start_profiling(False)
        assert not list(job.place.rglob(TRACKER)) and not job.steps()
    gate.touch()
    polled_until(trainer, lambda: job.steps() == ["global_step_1"])
    trainer.checkpoints.poll(wait=True)
    assert list(job.place.rglob(TRACKER)) == [job.root / TRACKER]
    assert job.tracked() == 1


def test_the_worker_keeps_no_copy_and_a_killed_writer_fails_its_save_alone(job: Job) -> None:
    """Catches: verl #4638 with an offloaded optimizer: staged tensors that live on in the worker
    while its writer runs. Also: a writer killed for memory that takes the job or the only
    checkpoint along."""
    trainer = job.start(async_save=True, on_failure="warn", engine="fork", **KEEP_ONE)
    save(trainer)
    trainer.checkpoints.poll(wait=True)
    group = trainer.actor_rollout_wg
    group.call("verl_worker:hold_writers", str(job.place / "never"))
    save(trainer)
    assert group.call("verl_worker:sharded_tensors") == [0, 0]
    writers = group.call("verl_worker:children")
    assert all(len(pids) == 1 for pids in writers), writers
    os.kill(writers[1][0], signal.SIGKILL)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.checkpoints.poll(wait=True)
    assert any("step 2 failed" in str(w.message) for w in said)
    assert (job.steps(), job.tracked()) == (["global_step_1"], 1)
    group.call("verl_worker:hold_writers", str(job.root))  # is there: no writer waits
    save(trainer)
    trainer.checkpoints.poll(wait=True)
    assert (job.steps(), job.tracked()) == (["global_step_3"], 3)


@pytest.mark.skipif(CORE < (0, 17), reason="megatron-core before 0.17 has the module stock imports")
@pytest.mark.skipif(not NEW, reason="verl 0.9 schedules through megatron-core's module")
def test_a_stock_async_save_cannot_be_scheduled(job: Job) -> None:
    """Catches: a stock verl in which async saves work again, although the page says that they do
    not. With ours the same setting saves (``test_stock_verl_loads_the_saved_state``)."""
    trainer = job.start(stock=True, async_save=True, critic=False)
    train(trainer, 1)
    with pytest.raises(RuntimeError, match="async_calls|strategies.base|nvidia-resiliency-ext"):
        trainer.actor_rollout_wg.save_checkpoint(str(job.root / "global_step_1/actor"), None, 1)
    assert not (job.root / TRACKER).exists()


def test_the_same_step_twice_is_refused_and_stays(job: Job) -> None:
    """Catches: with keep=1, a step that is registered a second time and deletes itself."""
    trainer = job.start(**KEEP_ONE)
    save(trainer)
    for again in (trainer, None):
        if again is None:
            trainer.checkpoints.close()
            again = restarted(job, **KEEP_ONE)
        with pytest.raises(StepExistsError):
            again._save_checkpoint()
        assert (job.steps(), job.tracked()) == (["global_step_1"], 1)
    again.checkpoints.abandon()
    stock = job.start(stock=True)
    stock._load_checkpoint()
    assert stock.global_steps == 1


def test_a_gutted_step_is_not_resumed_from(job: Job) -> None:
    """Catches: a directory without ``actor/`` that passes the existence check all the same."""
    trainer = job.start()
    save(trainer)
    before = state_of(trainer)
    save(trainer)
    trainer.checkpoints.close()
    shutil.rmtree(job.root / "global_step_2/actor")
    again = restarted(job)
    assert again.global_steps == 1
    assert state_of(again) == before


def test_a_backend_for_which_verl_writes_no_tracker(job: Job) -> None:
    """Catches: verl #7952, rllm #897: a kind of backend that is saved and never tracked."""
    trainer = job.start(async_save=True, critic=False)
    trainer.actor_rollout_wg.call("verl_worker:use_plain_files")
    trainer._load_checkpoint()
    save(trainer, 3)
    before = state_of(trainer)
    trainer.checkpoints.close()
    assert job.tracked() == 3
    stock = job.start(stock=True, critic=False)
    stock.actor_rollout_wg.call("verl_worker:use_plain_files")
    train(stock, 5)
    stock._load_checkpoint()
    assert stock.global_steps == 3
    assert state_of(stock) == before


@pytest.mark.parametrize("fsdp", [1, 2])
def test_shards_of_fsdp_are_written_while_training_goes_on(job: Job, fsdp: int) -> None:
    """Catches: shards that are written while the save is called, or from a state that has moved on;
    a file that is not byte for byte that of verl, or that stock verl does not resume from."""
    gate = job.place / "go"
    trainer = job.start(async_save=True, critic=False)
    group = trainer.actor_rollout_wg
    group.call("verl_worker:use_fsdp", fsdp)
    train(trainer, 2)
    saved = state_of(trainer)
    group.save_checkpoint(str(job.place / "stock"), None, 2)
    assert trainer.checkpoints.groups, "our managers are put in"
    group.call("verl_worker:hold_writers", str(gate))
    trainer._save_checkpoint()
    train(trainer, 1)
    trainer._start_profiling(False)
    assert not list(job.root.rglob("*_rank_?.pt")) and not job.steps()
    gate.touch()
    polled_until(trainer, lambda: job.steps() == ["global_step_2"])
    trainer.checkpoints.close()
    ours, stocks = job.root / "global_step_2/actor", job.place / "stock"
    names = {str(p.relative_to(stocks)) for p in stocks.rglob("*") if p.is_file()}
    assert names == {str(p.relative_to(ours)) for p in ours.rglob("*") if p.is_file()}
    for kind in ("model", "optim", "extra_state"):
        assert {f"{kind}_world_size_2_rank_{rank}.pt" for rank in (0, 1)} < names
    assert all((ours / n).read_bytes() == (stocks / n).read_bytes() for n in names)
    stock = job.start(stock=True, critic=False)
    stock.actor_rollout_wg.call("verl_worker:use_fsdp", fsdp)
    train(stock, 5)
    stock._load_checkpoint()
    assert (stock.global_steps, state_of(stock)) == (2, saved)


def test_a_restart_remembers_the_prunes(job: Job) -> None:
    """Catches: retention in an in-memory list: every restart leaves one more checkpoint behind."""
    keep = {"max_actor_ckpt_to_keep": 2, "max_critic_ckpt_to_keep": 2}
    trainer = job.start(**keep)
    save(trainer)
    save(trainer)
    trainer.checkpoints.abandon()
    trainer = restarted(job, **keep)
    assert trainer.global_steps == 2
    save(trainer)
    assert job.steps() == ["global_step_2", "global_step_3"]


def test_a_worker_killed_between_actor_and_critic(job: Job) -> None:
    """Catches: a half that passes for a checkpoint; a job that waits for the dead; a lost old step."""
    trainer = job.start(async_save=True, on_failure="warn")
    save(trainer)
    trainer.checkpoints.poll(wait=True)
    trainer.critic_wg.call("verl_worker:die_in_save")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        save(trainer)
        trainer.checkpoints.poll(wait=True)
    assert any("step 2 failed" in str(w.message) for w in said)
    assert trainer.checkpoints.controller.latest_step() == 1
    trainer.checkpoints.abandon()
    stock = job.start(stock=True)
    stock._load_checkpoint()
    assert (stock.global_steps, job.steps()) == (1, ["global_step_1"])


@contextlib.contextmanager
def another_driver(job: Job, *gates: FifoGate) -> Iterator[subprocess.Popen[str]]:
    """A driver in a separate process, made to be killed: see ``verl_job``."""
    here = str(Path(__file__).parent)
    words = [job.server.directory, job.place, *(gate.path for gate in gates)]
    with (job.place / "driver.log").open("w") as log:
        driver = subprocess.Popen(
            [sys.executable, str(Path(here, "verl_job.py")), *map(str, words)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, here])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    with driver:
        try:
            yield driver
        finally:
            driver.kill()


def ended(descriptor: int) -> bool:
    """Whether the process of a pidfd is gone, or goes within a minute."""
    watch = select.poll()
    watch.register(descriptor, select.POLLIN)
    return bool(watch.poll(60_000))


def test_a_killed_driver_is_followed_by_one_that_goes_on(job: Job) -> None:
    """Catches: a SIGKILL after which a run begins from zero, or from the save that was in
    flight. Also: a root that the dead driver's workers and writers hold; a writer that outlived
    the driver and is counted as ours."""
    at_writer, at_step = FifoGate(job.place / "at-writer"), FifoGate(job.place / "at-step")
    with contextlib.ExitStack() as opened:
        driver = opened.enter_context(another_driver(job, at_writer, at_step))
        writing = at_writer.reached(LIMIT_S)
        opened.callback(os.close, writing)
        opened.callback(os.close, at_step.reached(LIMIT_S))
        driver.kill()
        said = json.loads(driver.communicate(timeout=LIMIT_S)[0].splitlines()[-1])
        assert driver.returncode == -signal.SIGKILL
        (pid,) = said["writers"][0]
        writer = os.pidfd_open(pid)
        opened.callback(os.close, writer)
        assert find_latest_ckpt_path(str(job.root)) == str(job.root / "global_step_1")
        left = os.listdir(job.root / ".ckptfsm/staging")
        assert len(left) == 1 and left[0].startswith("2."), "a save was in flight"

        again = restarted(job, async_save=True)
        assert (again.global_steps, state_of(again)) == (1, said["saved"])
        again.critic_wg.call("verl_worker:train", 1)  # not the step 2 that was in flight
        save(again)
        saved = state_of(again)
        os.write(writing, b"." * 64)  # the dead driver's writer writes on
        assert ended(writer)
        again.checkpoints.poll(wait=True)
        assert again.checkpoints.controller.all_steps() == [1, 2]
        assert os.listdir(job.root / ".ckptfsm/staging") == []
        again.checkpoints.close()
    assert find_latest_ckpt_path(str(job.root)) == str(job.root / "global_step_2")
    stock = job.start(stock=True)
    stock._load_checkpoint()
    assert (stock.global_steps, state_of(stock)) == (2, saved)


def test_a_full_disk_in_verls_code_fails_the_save_alone(job: Job) -> None:
    """Catches: the ranks of a group left in a collective; training that ends; a tracker that moves."""
    trainer = job.start(on_failure="warn")
    save(trainer)
    trainer.actor_rollout_wg.call("verl_worker:fail_in_save")
    with pytest.warns(SaveFailedWarning, match="No space left"):
        save(trainer)
    assert job.tracked() == 1
    assert trainer.checkpoints.controller.latest_step() == 1


@pytest.mark.parametrize("tracker", ["", "1\n2", "9", None])
def test_a_torn_tracker_is_not_a_start_from_zero(job: Job, tracker: str | None) -> None:
    """Catches: "training from scratch" over a run, or a job that ends as if it had trained."""
    trainer = job.start()
    save(trainer, 2)
    trainer.checkpoints.close()
    if tracker is None:
        (job.root / TRACKER).unlink()
    else:
        (job.root / TRACKER).write_text(tracker)
    again = restarted(job)
    assert again.global_steps == 2


def test_steps_of_stock_verl_are_resumed_from(job: Job) -> None:
    """Catches: an earlier run that is not seen: a silent restart from zero. Also: a file of that
    run, except the tracker, that adoption or the next save writes, moves, copies, links or
    touches."""
    stock = job.start(stock=True, critic=False)
    stock.actor_rollout_wg.save_checkpoint = _without_hdfs(stock.actor_rollout_wg)
    os.makedirs(job.root)
    save(stock, 3)
    assert job.tracked() == 3
    trained, files = state_of(stock), files_of(job.root)
    assert "global_step_3/data.pt" in files and len(files) > 5
    again = restarted(job, critic=False)
    assert again.global_steps == 3
    assert state_of(again) == trained
    assert files_of(job.root) == files
    save(again)
    again.checkpoints.close()
    assert job.steps() == ["global_step_3", "global_step_4"], "an adopted one is pinned"
    new = {name for name in files_of(job.root) if name.startswith("global_step_4/")}
    assert {n: f for n, f in files_of(job.root).items() if n not in new} == files


def _without_hdfs(group: WorkerGroup) -> Any:
    return partial(group.call, "method:save_checkpoint")


def test_a_save_is_never_polled(job: Job) -> None:
    """Catches: verl #4253, #6067, #7363: a finalizer that is never called, without any warning."""
    trainer = job.start(async_save=True)
    save(trainer)
    train(trainer, 1)
    with pytest.warns(PollMissingWarning, match="poll\\(\\) was not called"):
        trainer._save_checkpoint()
    trainer.checkpoints.poll(wait=True)
    assert trainer.checkpoints.controller.all_steps() == [1, 2], "tracked all the same"


class Loop:
    """The smallest loop of verl: the calls of every step, and those at its end."""

    def fit(self) -> str:
        self._load_checkpoint()  # type: ignore[attr-defined]
        for _ in range(4):
            self._start_profiling(False)  # type: ignore[attr-defined]
            save(self)
        return "done"


def test_the_loop_polls_and_its_end_waits(job: Job) -> None:
    """Catches: verl #7952: a last save of a run, or every save, that is never tracked."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    loop = install(type("LoopTrainer", (Loop, RayPPOTrainer), {}), calls=PipeCalls())
    trainer = job.start(loop, async_save=True, max_actor_ckpt_to_keep=2, critic=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PollMissingWarning)
        assert trainer.fit() == "done"
    assert job.tracked() == 4
    assert job.steps() == ["global_step_3", "global_step_4"]


LOOPS = [
    "verl.trainer.ppo.ray_trainer:RayPPOTrainer",
    "verl.experimental.separation.ray_trainer:SeparateRayPPOTrainer",
    "verl.experimental.one_step_off_policy.ray_trainer:OneStepOffRayTrainer",  # not in 0.7.1
    "verl.trainer.ppo.v1.trainer_sync:PPOTrainerSync",
    "verl.trainer.ppo.v1.trainer_colocate_async:PPOTrainerColocateAsync",
    "verl.trainer.ppo.v1.trainer_separate_async:PPOTrainerSeparateAsync",
]


@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop_of_verls_passes_where_ours_polls(loop: str) -> None:
    """Catches: a loop of a verl release that no longer calls the method where our trainer polls."""
    module, _, name = loop.partition(":")
    kind = getattr(pytest.importorskip(module), name)
    assert calls_in_every_step(kind, "fit", trainer_module._EVERY_STEP)
    assert not calls_in_every_step(kind, "fit", "_save_checkpoint"), "that one is under a condition"
    assert not calls_in_every_step(kind, "fit", "_load_checkpoint"), "and that one before the loop"


def test_the_lines_of_the_documentation(tmp_path: Path) -> None:
    """Catches: lines on the page that no longer work as it says, in a process that only names the
    module.
    """
    page = Path(__file__).parents[2] / "docs/verl.md"
    lines = page.read_text().partition("```python\n")[2].partition("```")[0]
    assert "install_in_verl()" in lines
    (tmp_path / "my_ckptfsm.py").write_text(lines)
    asked = """
        import verl
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer
        assert hasattr(RayPPOTrainer, "checkpoints"), "not ours"
        try:
            from verl.trainer.ppo.v1 import get_trainer_cls
        except ImportError:  # before 0.9
            pass
        else:
            for name in ("sync", "colocate_async", "separate_async"):
                assert hasattr(get_trainer_cls(name), "checkpoints"), name
    """
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(asked)],
        env={**os.environ, "VERL_USE_EXTERNAL_MODULES": "my_ckptfsm", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_save_that_no_driver_began_is_refused(job: Job) -> None:
    """Catches: verl's trainer code calling our manager: a save that would never be finalized."""
    trainer = job.start(critic=False)
    save(trainer)
    with pytest.raises(RuntimeError, match="was not begun by a trainer that ckptfsm drives"):
        trainer.actor_rollout_wg.save_checkpoint(str(job.place / "else"), None, 2)


def test_resuming_in_a_way_that_would_end_in_refused_saves(job: Job) -> None:
    """Catches: hours of training before the first save is refused."""
    trainer = job.start()
    save(trainer)
    save(trainer)
    trainer.checkpoints.close()
    trainer = job.start(resume_mode="disable")
    with pytest.raises(ConfigError, match="give another directory"):
        trainer._load_checkpoint()
    trainer.checkpoints.abandon()
    path = str(job.root / "global_step_1")
    trainer = job.start(resume_mode="resume_path", resume_from_path=path)
    with pytest.raises(ConfigError, match=r"rollback\(1\)"):
        trainer._load_checkpoint()
    trainer.checkpoints.controller.rollback(1)
    trainer._load_checkpoint()
    assert trainer.global_steps == 1
    save(trainer)
    assert job.tracked() == 2


def test_verls_remote_directory_and_a_new_machine(job: Job, capsys: Any) -> None:
    """Catches: ``default_hdfs_dir`` without a copy; a step that is pruned before it has one; a fetched
    one that verl does not load; a load that verl refuses, or after which a worker deletes the step."""
    there = str(job.place / "there")
    Path(there).mkdir()
    remote = {"default_hdfs_dir": there, "critic": False}
    trainer = job.start(**remote, max_actor_ckpt_to_keep=1)
    save(trainer)
    save(trainer)
    saved = state_of(trainer)
    trainer.checkpoints.close()
    assert job.steps() == ["global_step_2"], "the first was copied"
    for step in (1, 2):
        assert f"step {step}: good" in said(capsys, "verify", str(step), f"file://{there}")
    new = Job(job.server, job.place / "new")
    said(capsys, "fetch", f"file://{there}", new.root)
    stock = new.start(stock=True, critic=False)
    stock._load_checkpoint()
    assert (stock.global_steps, state_of(stock)) == (2, saved)
    new.end()
    new = Job(job.server, job.place / "new")
    with pytest.warns(UserWarning, match="del_local_ckpt_after_load"):
        again = restarted(new, **remote, del_local_ckpt_after_load=True)
    assert (again.global_steps, state_of(again)) == (2, saved)
    assert again.config.trainer.default_hdfs_dir == there
    save(again)
    again.checkpoints.close()
    new.end()
    assert {"global_step_1", "global_step_2", "global_step_3"} <= set(os.listdir(there))


@pytest.mark.skipif(not NEW, reason="verl 0.9 has them")
def test_the_newer_trainers_of_verl(job: Job) -> None:
    """Catches: an install that works for one trainer class of verl only."""
    pytest.importorskip("transfer_queue")
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    unused = {"on_sample_end": None, "on_step_end": None}  # abstract there
    kind = type("SomeTrainer", (PPOTrainer,), {**unused, "trainer_mode": "sync"})
    trainer = job.start(kind, async_save=True, critic=False)
    trainer._load_checkpoint()
    save(trainer)
    before = state_of(trainer)
    trainer.checkpoints.poll(wait=True)
    trainer.checkpoints.close()
    again = restarted(job, base=kind, critic=False)
    assert again.global_steps == 1
    assert state_of(again) == before


class Queue:
    """verl's TransferQueue in little: it is saved and loaded as a directory."""

    __version__ = "0.1.11"

    def __init__(self) -> None:
        self.prompts = {"a": {"is_prompt": True, "status": "finished"}}

    def save_checkpoint(self, checkpoint_dir: str, *, metadata: dict[str, Any]) -> None:
        saved = {**metadata, "prompts": self.prompts}
        Path(checkpoint_dir, "metadata.json").write_text(json.dumps(saved))

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.prompts = json.loads(Path(checkpoint_dir, "metadata.json").read_text())["prompts"]

    def kv_list(self, partition: str) -> dict[str, Any]:
        return {partition: self.prompts}


def an_asynchronous_trainer() -> Any:
    """A class of the newer trainers; its abstract methods are not called here."""
    pytest.importorskip("transfer_queue")
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    unused = {"on_sample_end": None, "on_step_end": None}
    return type("SomeTrainer", (PPOTrainer,), {**unused, "trainer_mode": "colocate_async"})


@pytest.mark.skipif(not NEW, reason="verl 0.9 has it")
def test_the_queue_of_prompts_in_flight_is_in_the_checkpoint(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: prompts that were fetched and not trained, lost by a restart; a queue of a later step."""
    kind, queue = an_asynchronous_trainer(), Queue()
    from verl.trainer.ppo.v1 import trainer_base

    monkeypatch.setattr(trainer_base, "tq", queue)
    trainer = job.start(kind, async_save=True, critic=False)
    save(trainer)
    saved, queue.prompts = queue.prompts, {}
    trainer.checkpoints.close()
    there = json.loads((job.root / "global_step_1/transfer_queue/metadata.json").read_text())
    assert (there["global_steps"], there["prompts"]) == (1, saved)
    assert any("transfer_queue/metadata.json" in r for r in _receipts(job.root / "global_step_1"))
    again = job.start(kind, stock=True, critic=False)
    again._load_checkpoint()
    assert (again.global_steps, queue.prompts) == (1, saved)


def test_verls_callback_is_told_once_the_step_is_tracked(job: Job) -> None:
    """Catches: a callback of verl's configuration never called, or called before there is a
    checkpoint.
    """
    stock = pytest.importorskip("verl.trainer.ppo.checkpoint_callback", reason="verl 0.9.1 has it")
    trainer = job.start(an_asynchronous_trainer(), async_save=True, critic=False)
    trainer.trainer_mode = "sync"
    named = {"checkpoint_callback_class": "verl_groups.Callback"}
    trainer.checkpoint_callback = stock.build_checkpoint_callback(config_of(job.root, **named))
    save(trainer)
    told = trainer.checkpoint_callback.told
    trainer.checkpoints.poll(wait=True)
    assert len(told) == 1
    save(trainer)
    trainer.checkpoints.close()
    folders = [str(job.root / f"global_step_{step}") for step in (1, 2)]
    assert told == [(1, folders[0], False, "1"), (2, folders[1], False, "2")]


class OwnWay:
    """A trainer that overrides the save, and has no method that every step calls."""

    def _save_checkpoint(self) -> None:
        """Saves in a way unknown to us."""


def test_refusals_and_warnings_of_install() -> None:
    """Catches: extra state of a recipe that silently is not saved any more; a loop that never polls."""
    with pytest.raises(ConfigError, match="saves in its own way"):
        install(OwnWay)
    with pytest.warns(PollMissingWarning, match="calls in every step"):
        ours = install(OwnWay, extra_parts=dict)
    with pytest.raises(ConfigError, match="already"):
        install(ours)


def test_a_verl_without_the_imports_of_its_newer_trainers() -> None:
    """Catches: a first line that fails where verl itself, with ``trainer.use_v1=False``, would train."""
    lines = """
        import sys
        sys.modules["transfer_queue"] = None  # verl names it in an extra only
        from ckptfsm.core.errors import ConfigError
        from ckptfsm.integrations.verl import install_in_verl
        assert install_in_verl() == ["RayPPOTrainer"]
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer as ours
        assert install_in_verl() == ["RayPPOTrainer"], "named by a page and by a main, say"
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer as still
        assert still is ours
        try:
            install_in_verl(on_failure="warn")
        except ConfigError:
            pass
        else:
            raise AssertionError("other options were ignored")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(lines)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_sft_trainer_with_a_driver_is_refused() -> None:
    """Catches: a trainer of verl's that saves by its handler, taken for one that saves by itself."""
    module = pytest.importorskip("verl.trainer.sft_trainer_ray", exc_type=ImportError)
    with pytest.raises(ConfigError, match="-m ckptfsm.integrations.verl.sft"):
        install(module.SFTTrainer)


@pytest.mark.skipif(not NEW, reason="verl 0.9 has it")
def test_the_fully_asynchronous_trainer_is_refused_when_it_is_made() -> None:
    """Catches: a trainer that is defined later, saves its rollouter too, and is taken over silently."""
    lines = """
        from ckptfsm.core.errors import ConfigError
        from ckptfsm.integrations.verl import install_in_verl
        install_in_verl()
        from verl.experimental.fully_async_policy.fully_async_trainer import FullyAsyncTrainer
        from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer
        kind = FullyAsyncTrainer.__ray_metadata__.modified_class  # what Ray makes in its actor
        try:
            kind.__new__(kind)
        except ConfigError as error:
            assert "FullyAsyncTrainer saves in its own way" in str(error), error
        else:
            raise AssertionError("it was made")
        known = SeparateRayPPOTrainer.__new__(SeparateRayPPOTrainer)
        assert known._save_checkpoint.__self__ is known.checkpoints
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(lines)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]


COUNTS = [
    ((1, 3, True), 3),
    ((2, 2, True), 2),
    ((2, None, True), None),
    ((2, None, False), 2),
    ((0, 2, True), None),
    ((None, None, True), None),
]


@pytest.mark.parametrize(("given", "kept"), COUNTS)
def test_counts_of_actor_and_critic_count_steps(
    given: tuple[int | None, int | None, bool], kept: int | None
) -> None:
    """Catches: half of a step deleted; a count that deletes more than either role asked for."""
    actor, critic, has_critic = given
    counts = {"max_actor_ckpt_to_keep": actor, "max_critic_ckpt_to_keep": critic}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        policy = retention_of(config_of(Path("x"), **counts), critic=has_critic)
    assert policy == (KeepAll() if kept is None else LatestN(kept))
    assert bool(said) == (has_critic and actor != critic)
    only = config_of(Path("x"), **counts, remove_previous_ckpt_in_save=True)
    assert retention_of(only, critic=has_critic) == LatestN(1)


def test_every_trainer_that_verl_may_make_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a trainer of verl's registry that saves as ever, without a word."""
    from verl.trainer.ppo import ray_trainer

    stock = ray_trainer.RayPPOTrainer
    monkeypatch.setattr(ray_trainer, "RayPPOTrainer", stock)  # put back at the end
    made = {"RayPPOTrainer": lambda: ray_trainer.RayPPOTrainer}
    if version("verl") >= "0.9":
        from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base

        for name, trainer in trainer_base.TRAINER_REGISTRY.items():
            monkeypatch.setitem(trainer_base.TRAINER_REGISTRY, name, trainer)
            made[name] = partial(get_trainer_cls, name)
    assert sorted(install_in_verl()) == sorted(made)
    for trainer in made.values():
        assert hasattr(trainer(), "checkpoints")
    assert ray_trainer.RayPPOTrainer.__module__ == stock.__module__
    assert issubclass(ray_trainer.RayPPOTrainer, stock)
