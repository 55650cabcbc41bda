"""Whether the newest versions still behave as reported: here stock code is tested, and none of ours.

The marker of a test names the rows of ``docs/field-bugs.md`` that it is about. A test that fails
says that the installed version behaves otherwise: then ``tests/fieldbugs/today.py`` has to say so
as well.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from stock_today import (
    KEEP_ONE,
    STRATEGIES,
    TRACKER,
    WAIT_S,
    Held,
    answer,
    finalize,
    fsdp,
    held_writers,
    kill_at,
    left,
    loaded,
    megatron,
    no_space,
    outcome_of,
    process_of,
    save_steps,
    trainer,
)
from torch.distributed.checkpoint.api import CheckpointException

from ckptfsm.testing.fakes import FifoGate

pytest_plugins = ("stock_today",)  # its fixtures
GONE = "gone: mend tests/fieldbugs/today.py"


def needs(package: str) -> pytest.MarkDecorator:
    parent = package.rpartition(".")[0]
    missing = bool(parent) and find_spec(parent) is None or find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


needs_core = needs("megatron.core")  # `megatron` alone may be a folder of these tests
needs_nvrx = needs("nvidia_resiliency_ext")
needs_verl = needs("verl")
needs_titan = needs("torchtitan")
needs_lightning = needs("lightning")
needs_trainer = pytest.mark.skipif(
    not find_spec("transformers") or find_spec("verl") is not None,
    reason="transformers is not installed, or an older one beside verl",
)
BOTH = pytest.mark.parametrize("maker", ["mcore", pytest.param("nvrx", marks=needs_nvrx)])


# -------------------------------------------------- megatron-core and nvidia-resiliency-ext


@needs_core
@BOTH
@pytest.mark.field_bug("megatron-results")
def test_requests_in_flight_together_swap_their_results(
    made_by: Any, tmp_path: Path, maker: str
) -> None:
    """Catches: a release in which results find their request (megatron-results). Today, if the
    second of two requests is written first, both are finalized, and neither can be loaded."""
    of, gate = made_by(maker), FifoGate(tmp_path / "gate")
    queue = of.queue()
    first, second = of.request(tmp_path / "1", 1), of.request(tmp_path / "2", 2, rows=8)
    queue.schedule_async_request(first._replace(async_fn=Held(first.async_fn, gate)))
    queue.schedule_async_request(second)
    process_of(queue, 1).join(WAIT_S)
    gate.open()
    assert len(queue.maybe_finalize_async_calls(blocking=True)) == 2, GONE
    assert all((tmp_path / name / ".metadata").exists() for name in "12"), GONE
    for name, rows in (("1", 4), ("2", 8)):
        assert isinstance(outcome_of(loaded, tmp_path / name, rows), CheckpointException), GONE


@needs_core
@BOTH
@pytest.mark.field_bug("megatron-temporal")
def test_a_killed_temporal_writer_counts_as_done(made_by: Any, tmp_path: Path, maker: str) -> None:
    """Catches: a release in which the queue looks at exit codes (megatron-temporal). Today the
    finalizers of a bare request run after a SIGKILL; those of a real save fail at the first, for
    want of a result."""
    of, gate, ran = made_by(maker), FifoGate(tmp_path / "gate"), []
    queue = of.queue()
    queue.schedule_async_request(of.bare(Held(None, gate), partial(ran.append, "finalized")))
    kill_at(gate, process_of(queue))
    assert (outcome_of(queue.maybe_finalize_async_calls), ran) == ([0], ["finalized"]), GONE
    request = of.request(tmp_path / "1", 1)
    queue.schedule_async_request(request._replace(async_fn=Held(request.async_fn, gate)))
    kill_at(gate, process_of(queue))
    error = outcome_of(queue.maybe_finalize_async_calls)
    assert "results_queue should not be empty" in str(error), GONE
    assert queue.get_num_unfinalized_calls() == 0 and not list((tmp_path / "1").iterdir()), GONE


class StillWaiting(Exception):
    """Raised where a test has waited long enough."""


@needs_core
@BOTH
@pytest.mark.field_bug("megatron-6970")
def test_a_killed_persistent_worker_is_polled_without_an_end(
    made_by: Any, tmp_path: Path, maker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a release in which the queue sees that its worker is gone (megatron-6970). Today
    a poll finds the call in flight. A poll that blocks has not ended after 1000 looks, which are
    100 s."""
    of, gate, looks = made_by(maker), FifoGate(tmp_path / "gate"), iter(range(1000))
    queue = of.queue(persistent=True)
    queue.schedule_async_request(of.bare(Held(None, gate)))
    kill_at(gate, process_of(queue))

    def sleep(seconds: float) -> None:
        if next(looks, None) is None:
            raise StillWaiting

    monkeypatch.setattr(of.queues, "sleep", sleep)
    for _ in range(3):
        assert outcome_of(queue.maybe_finalize_async_calls) == [], GONE
    waited = outcome_of(queue.maybe_finalize_async_calls, blocking=True)
    assert isinstance(waited, StillWaiting), GONE
    assert queue.get_num_unfinalized_calls() == 1, GONE


@needs_core
@pytest.mark.field_bug("bridge-5117")
def test_untold_results_of_an_abandoned_queue_finalize_a_call_of_the_next(
    made_by: Any, tmp_path: Path
) -> None:
    """Catches: a release in which completions name their queue (bridge-5117). Today all queues
    share worker and answers. The next queue takes the answer to an older call for that to its
    first call, which is still being written."""
    of, ran = made_by("mcore"), []
    before, now = FifoGate(tmp_path / "before"), FifoGate(tmp_path / "now")
    of.queue(persistent=True).schedule_async_request(of.bare(Held(None, before)))
    queue = of.queue(persistent=True)
    queue.schedule_async_request(of.bare(Held(None, now), partial(ran.append, "finalized")))
    before.open()
    held, deadline = now.reached(WAIT_S), time.monotonic() + 5
    while not (told := queue.maybe_finalize_async_calls()) and time.monotonic() < deadline:
        """The answer is on its way, through a pipe."""
    os.close(held)
    assert (told, ran) == ([0], ["finalized"]), GONE


@needs_core
@pytest.mark.field_bug("verl-4638-memory")
def test_the_trainer_holds_the_staged_copy_while_the_writer_runs(
    made_by: Any, tmp_path: Path
) -> None:
    """Catches: a release in which the trainer gives its copy back once it has forked
    (verl-4638-memory). Today the first to give the copy back is the poll that finds the writer
    done."""
    of, gate, staged = made_by("mcore"), FifoGate(tmp_path / "gate"), [torch.zeros(4)]
    copy, queue = weakref.ref(staged[0]), of.queue()
    request = of.bare(Held(None, gate), arguments=(0, None, None))
    queue.schedule_async_request(request._replace(preload_fn=staged.pop))
    gc.collect()
    assert copy() is not None, GONE
    gate.open()
    process_of(queue).join(WAIT_S)
    gc.collect()
    assert copy() is not None, GONE
    queue.maybe_finalize_async_calls()
    gc.collect()
    assert copy() is None


@needs_core
@needs_nvrx
@pytest.mark.field_bug("nvrx-staging")
@pytest.mark.parametrize("how", ["temporal", "with a second queue", "alone"])
def test_staging_memory_is_used_again_under_a_slow_writer(
    made_by: Any, tmp_path: Path, how: str
) -> None:
    """Catches: a release with separate staging memory for each save (nvrx-staging). Today a
    request is staged into memory that the writer before it still reads. A queue in
    ``cpu_shm_mode`` is drained first, if it is the newest."""
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    of, gate = made_by("nvrx"), FifoGate(tmp_path / "gate")
    queue = of.queue(persistent=how != "temporal")
    if how == "with a second queue":
        of.queue(persistent=True)
    queue.schedule_async_request(of.bare(os.getpid))  # its worker starts
    queue.maybe_finalize_async_calls(blocking=True)
    saver = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True, cpu_shm_mode=True)
    first = of.request(tmp_path / "1", 1, saver=saver)
    if how != "alone":
        first = first._replace(async_fn=Held(first.async_fn, gate))
    queue.schedule_async_request(first)
    second = of.request(tmp_path / "2", 2, saver=saver)
    in_flight = queue.get_num_unfinalized_calls()
    if how != "alone":
        gate.open()
    if how == "temporal":
        process_of(queue).join(WAIT_S)  # or their results would be swapped
    queue.schedule_async_request(second)
    queue.maybe_finalize_async_calls(blocking=True)
    expected = (0, [1.0]) if how == "alone" else (1, [2.0])
    assert (in_flight, loaded(tmp_path / "1")) == expected, GONE
    assert loaded(tmp_path / "2") == [2.0]


@needs_core
@pytest.mark.field_bug("megatron-tracker")
@pytest.mark.parametrize("torn", ["", "1\n00", "\0\0\0"])
def test_a_torn_tracker_ends_the_trainer_with_status_0(tmp_path: Path, torn: str) -> None:
    """Catches: a release in which a restart fails, or resumes, where the tracker is torn
    (megatron-tracker). Today the run ends as if all were done."""
    checkpointing = pytest.importorskip("megatron.training.checkpointing", exc_type=ImportError)
    (tmp_path / TRACKER).write_text(torn)
    error = outcome_of(checkpointing.read_metadata, str(tmp_path / TRACKER))
    assert isinstance(error, SystemExit) and not error.code, GONE


@needs_core
@pytest.mark.field_bug("megatron-non-persistent")
def test_cleanup_keeps_a_partial_directory_and_deletes_the_tracked_one(tmp_path: Path) -> None:
    """Catches: a release in which the clean-up asks the tracker, or whether the directory that
    it keeps is whole (megatron-non-persistent). Today a partial directory is kept, and the
    tracked one is deleted."""
    checkpointing = pytest.importorskip("megatron.training.checkpointing", exc_type=ImportError)
    for step in (100, 200):
        (tmp_path / f"iter_{step:07d}").mkdir()
    (tmp_path / "iter_0000100/.metadata").touch()
    (tmp_path / TRACKER).write_text("100")
    checkpointing.cleanup_old_non_persistent_checkpoint(str(tmp_path))
    assert [p.name for p in tmp_path.glob("iter_*")] == ["iter_0000200"], GONE


# ------------------------------------------------------------------------------------------- verl


@needs_verl
@pytest.mark.field_bug("verl-4638-tracker", "verl-4638-prune")
def test_the_actor_is_tracked_and_pruned_for_before_the_critic_is_written(
    rank: None, tmp_path: Path
) -> None:
    """Catches: a release that ends a step as a whole (verl-4638-tracker, verl-4638-prune). Today
    the request no longer tracks or deletes. The finalizer of the actor does both, whatever the
    critic's writers do."""
    idle = SimpleNamespace(save_checkpoint=partial(answer, None))
    save_steps(trainer(tmp_path, idle, idle, async_save=True, **KEEP_ONE), 1)
    assert left(tmp_path) == {"1": ["data.pt"], "tracker": None}, GONE
    finalize(megatron(async_save=True), tmp_path, 1, 2)
    assert left(tmp_path) == {"1": ["data.pt"], "2": ["actor"], "tracker": "2"}, GONE


@needs_verl
@pytest.mark.field_bug("verl-4873")
def test_the_old_actor_is_deleted_before_the_critic_is_saved(
    rank: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a release in which keep=1 waits for the whole step (verl-4873). Today a single
    role waits for its save. With a critic, and the disk full at its save, no step is whole, and
    the next run ends in an assertion."""
    alone = trainer(tmp_path / "alone", fsdp(), **KEEP_ONE)
    save_steps(alone, 1)
    with monkeypatch.context() as full:
        full.setattr(torch, "save", no_space)
        assert isinstance(outcome_of(save_steps, alone, 2), OSError)
    assert left(tmp_path / "alone")["1"] == ["actor", "data.pt"], GONE
    both = trainer(tmp_path / "both", megatron(), megatron(), **KEEP_ONE)
    save_steps(both, 1)
    both.critic_wg = SimpleNamespace(save_checkpoint=no_space)
    assert isinstance(outcome_of(save_steps, both, 2), OSError)
    kept = {"1": ["critic", "data.pt"], "2": ["actor"], "tracker": "1"}
    assert left(tmp_path / "both") == kept, GONE
    error = outcome_of(trainer(tmp_path / "both", megatron())._load_checkpoint)
    assert isinstance(error, AssertionError) and "does not exist" in str(error), GONE


@needs_verl
@pytest.mark.field_bug("verl-5016")
def test_rank_0_writes_the_tracker(rank: None, tmp_path: Path) -> None:
    """Catches: a release that guesses the rank (verl-5016, mended). Today rank 0 of a role writes
    the tracker, and no other.
    """
    finalize(megatron(async_save=True, rank=1), tmp_path, 1)
    assert left(tmp_path) == {"1": ["actor"], "tracker": None}, GONE
    finalize(megatron(async_save=True), tmp_path, 1)
    assert left(tmp_path)["tracker"] == "1", GONE


@needs_verl
@pytest.mark.field_bug("verl-ranks-delete")
def test_another_rank_deletes_the_tracked_step(rank: None, tmp_path: Path) -> None:
    """Catches: a release in which ranks leave deletion to rank 0 (verl-ranks-delete). Today, if
    rank 1 comes to its finalizer first, the step that the tracker names is gone."""
    finalize(megatron(async_save=True), tmp_path, 1)
    finalize(megatron(async_save=True, rank=1), tmp_path, 1, 2)
    assert left(tmp_path) == {"1": [], "2": ["actor"], "tracker": "1"}, GONE


@needs_verl
@pytest.mark.field_bug("verl-gutted")
def test_a_gutted_step_is_found_after_a_kill(rank: None, tmp_path: Path) -> None:
    """Catches: a release that deletes a step as a whole, or looks into it (verl-gutted). Today,
    after a SIGKILL between clean-up and tracker, the directory that is found has no actor. The
    next run cannot load it."""
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    command = [sys.executable, str(Path(__file__).with_name("stock_today.py")), str(tmp_path)]
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    driver = subprocess.run(command, env={**os.environ, **path}, timeout=300)
    assert driver.returncode == -signal.SIGKILL
    assert left(tmp_path) == {"1": ["data.pt"], "2": ["actor"], "tracker": "1"}, GONE
    assert find_latest_ckpt_path(str(tmp_path)) == str(tmp_path / "global_step_1"), GONE
    error = outcome_of(trainer(tmp_path, fsdp())._load_checkpoint)
    assert "model_world_size_1_rank_0.pt" in str(error), GONE


@needs_verl
@pytest.mark.field_bug("verl-forgets")
def test_a_restart_forgets_the_deletions(rank: None, tmp_path: Path) -> None:
    """Catches: a release in which the list of steps to delete outlives its process (verl-forgets).
    Today two stay, not one.
    """
    for step in (1, 2):
        save_steps(trainer(tmp_path, megatron(), **KEEP_ONE), step)
    both = dict.fromkeys("12", ["actor", "data.pt"])
    assert left(tmp_path) == {**both, "tracker": "2"}, GONE


@needs_verl
@pytest.mark.field_bug("verl-same-step")
@pytest.mark.parametrize("manager", [megatron, fsdp])
def test_a_step_that_is_saved_again_deletes_itself(
    rank: None, tmp_path: Path, manager: Any
) -> None:
    """Catches: a release that registers each path once (verl-same-step). Today the tracked step is
    gone.
    """
    save_steps(trainer(tmp_path, manager(), **KEEP_ONE), 1, 1)
    assert left(tmp_path) == {"1": ["data.pt"], "tracker": "1"}, GONE


@needs_verl
@pytest.mark.field_bug("verl-4253", "verl-8000")
def test_an_asynchronous_save_cannot_be_scheduled(rank: None, tmp_path: Path) -> None:
    """Catches: a release in which the queue is there (verl-8000), and so schedules requests
    (verl-4253). Today verl imports the queue from a module that megatron-core has no more: the
    save ends the training."""
    queues, ran = import_module(f"{STRATEGIES}.async_utils"), []
    manager = megatron(async_save=True)
    request = queues.AsyncRequest(None, (), [])
    error = outcome_of(manager._dispatch_finalize, [request], partial(ran.append, "finalized"))
    assert isinstance(error, ModuleNotFoundError) and error.name == f"{STRATEGIES}.base", GONE
    error = outcome_of(save_steps, trainer(tmp_path, manager, async_save=True), 1)
    assert isinstance(error, ModuleNotFoundError), GONE
    assert (left(tmp_path), ran) == ({"1": ["actor"], "tracker": None}, []), GONE


@needs_verl
@pytest.mark.field_bug("verl-6067")
def test_the_trainer_polls_workers_that_have_nothing_to_poll() -> None:
    """Catches: workers with the method that the trainer looks for, to finalize (verl-6067). Today
    they lack it.
    """
    from verl.single_controller.ray.base import RayWorkerGroup, func_generator
    from verl.workers.engine_workers import ActorRolloutRefWorker

    group = RayWorkerGroup.__new__(RayWorkerGroup)
    bound = group._bind_worker_method(ActorRolloutRefWorker, func_generator)
    assert "save_checkpoint" in bound and hasattr(group, "save_checkpoint")
    assert not hasattr(group, "async_calls_finalize_fn_exec"), GONE


@needs_verl
@pytest.mark.field_bug("verl-7952")
def test_a_backend_without_a_writer_of_the_tracker(rank: None, tmp_path: Path) -> None:
    """Catches: a release that writes a tracker for every backend (verl-7952). Today, with FSDP
    and ``async_save``, the step is whole, and the next run starts from 0."""
    settings: dict[str, Any] = {"async_save": True}
    save_steps(trainer(tmp_path, fsdp(**settings), **settings), 1)
    assert left(tmp_path) == {"1": ["actor", "data.pt"], "tracker": None}, GONE
    assert (tmp_path / "global_step_1/actor/model_world_size_1_rank_0.pt").exists()
    assert trainer(tmp_path, fsdp(**settings), **settings)._load_checkpoint() == 0, GONE


@needs_verl
@pytest.mark.field_bug("verl-7401")
def test_a_used_up_loader_skips_the_next_epoch(rank: None, tmp_path: Path) -> None:
    """Catches: a release with verl-7401 mended in the SFT trainer's handler. Today the state
    that it loads yields no batch of the next epoch. The PPO trainer does not load such a state
    any more."""
    from torchdata.stateful_dataloader import StatefulDataLoader
    from verl.utils.checkpoint.checkpoint_handler import CheckpointHandler, OrchestrationMode

    engine = SimpleNamespace(save_checkpoint=partial(answer, 0), load_checkpoint=partial(answer, 0))
    settings = {"default_local_dir": str(tmp_path), "mode": OrchestrationMode.RAY}
    before, after = StatefulDataLoader([0, 1]), StatefulDataLoader([0, 1])
    handler = CheckpointHandler(engine, before, **settings)
    for step, _ in enumerate(before, 1):
        handler.save_checkpoint(step)
    assert CheckpointHandler(engine, after, **settings).load_checkpoint() == 2
    assert list(after) == [], GONE
    ppo, position = trainer(tmp_path, engine), before.state_dict()
    ppo.train_dataloader = StatefulDataLoader([0, 1])
    torch.save(position, tmp_path / "global_step_2/data.pt")
    ppo._load_checkpoint()
    assert len(list(ppo.train_dataloader)) == 2


# -------------------------------------------------------------------------------- torchtitan


@needs_titan
@pytest.mark.field_bug("titan-4197")
def test_half_checkpoints_take_the_places_of_a_whole_one(titan: Any, tmp_path: Path) -> None:
    """Catches: a release that counts whole checkpoints (titan-4197). Today, behind two that killed runs
    left half, the whole one is deleted before the next is written."""
    titan.save(1)
    titan.maybe_wait_for_saving()
    assert titan._find_load_step() == 1
    for step in (3, 4):
        (tmp_path / f"step-{step}").mkdir()
    with held_writers():
        titan.save(2)
        titan.close()  # the end of the thread that purges
        assert not (tmp_path / "step-1").exists(), GONE
        assert titan._find_load_step() == -1, GONE


@needs_titan
@pytest.mark.field_bug("titan-4270")
def test_close_leaves_a_save_in_flight(titan: Any, tmp_path: Path) -> None:
    """Catches: a release whose ``close`` waits (titan-4270). Today the process group is destroyed next,
    beside a writer that needs it."""
    with held_writers():
        titan.save(1)
        titan.close()
        assert not titan.save_future.done(), GONE


# --------------------------------------------------------------------------------------- lightning


@needs_lightning
@pytest.mark.field_bug("lightning-1150")
def test_lightning_deletes_before_its_thread_has_written(tmp_path: Path) -> None:
    """Catches: a release that keeps the previous file until the next one is there (lightning-1150).
    Today no file is there while the thread of ``AsyncCheckpointIO`` writes the second."""
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins import AsyncCheckpointIO
    from lightning_job import Run

    first, looked, left = threading.Event(), threading.Event(), []

    class Slow(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            assert not first.is_set() or looked.wait(WAIT_S)
            super().save_checkpoint(checkpoint, path, storage_options)
            first.set()

    class Look(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step > 0:
                assert first.wait(WAIT_S)
                left.append([each.name for each in tmp_path.iterdir()])
            if trainer.global_step == 2:
                looked.set()

    keeps = [Look(), ModelCheckpoint(tmp_path, every_n_train_steps=1)]
    plugins = {"plugins": [AsyncCheckpointIO(Slow())]}
    Run(epochs=1, stop=3, callbacks=keeps, trainer=plugins).fit()
    assert left[:2] == [["epoch=0-step=1.ckpt"], []], GONE


# ------------------------------------------------------------------- Accelerate and transformers


@needs_trainer
@pytest.mark.field_bug("accelerate-total-limit")
def test_accelerate_deletes_before_it_saves(tmp_path: Path) -> None:
    """Catches: a release that deletes after the save. Today a SIGKILL in the save leaves nothing
    whole: the registered object, which is saved last, is missing, and ``load_state`` refuses."""
    from accelerate_ranks import start

    arguments = {"project": str(tmp_path / "project"), "ours": False, "total_limit": 1}
    job = "accelerate_job.train"
    killed = start(tmp_path / "1", job, 1, last=2, killed_in=2, **arguments)
    assert killed.codes() == [-signal.SIGKILL]
    [left_there] = (tmp_path / "project/checkpoints").iterdir()
    assert left_there.name == "checkpoint_1", GONE
    assert not (left_there / "custom_checkpoint_0.pkl").exists()
    again = start(tmp_path / "2", job, 1, last=3, **arguments)
    assert again.codes() == [1]
    assert "Found checkpoints: 0" in again.words(), GONE


@needs_trainer
@pytest.mark.field_bug("transformers-35782")
def test_trainer_resumes_from_a_half_written_directory(tmp_path: Path) -> None:
    """Catches: a release that passes it over. Today every restart fails, beside a whole one."""
    from accelerate_ranks import start

    arguments = {"root": str(tmp_path / "out"), "ours": False}
    job = "transformers_job.train"
    killed = start(tmp_path / "1", job, 1, last=2, killed_in=2, resume=False, **arguments)
    assert killed.codes() == [-signal.SIGKILL]
    assert (tmp_path / "out/checkpoint-1/trainer_state.json").exists()
    again = start(tmp_path / "2", job, 1, last=3, **arguments)
    assert again.codes() == [1]
    assert "checkpoint-2/trainer_state.json" in again.words(), GONE
