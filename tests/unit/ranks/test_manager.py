"""The view of a trainer: one manager (or one per rank, as threads) with forked writers on a real
disk.

Each test names the bugs that it would catch. Only the state is made up: see
``fakes``.
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fakes import (
    FakeDraft,
    FakeDriver,
    FakeRequest,
    ShiftedClock,
    ThreadTransport,
    environment,
    fake_ports,
    run_ranks,
)
from inline import InlineExecutor
from managers import (
    QUICK,
    TEMPLATE,
    Elastic,
    Lingering,
    ReadLate,
    Struck,
    Unread,
    UnreadWithoutGate,
    handler_that_raises,
    weights,
)

import ckptfsm.disk.inspection as evidence_module
from ckptfsm.adapters.fork import fork_child
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.coordinator.coordinator import Coordinator
from ckptfsm.core.config import make_config
from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.errors import (
    CkptFsmError,
    ConfigError,
    DamagedRoot,
    DeadlineExceeded,
    Fenced,
    ManagerClosed,
    NoRoom,
    PollMissingWarning,
    RankFailed,
    RecoveryWarning,
    RestoreFailed,
    RootBusy,
    SaveFailed,
    SaveFailedWarning,
    SaveRefused,
    StepExistsError,
    StepNotFoundError,
    StorageError,
    UnsavedStepsWarning,
    WriterDied,
)
from ckptfsm.core.events import Event, ShardReported
from ckptfsm.core.layout import STAGING
from ckptfsm.core.lifecycle import State
from ckptfsm.core.ports import Outcome
from ckptfsm.core.retention import BestN, EveryNSeconds, LatestN, Policy
from ckptfsm.disk.journal import read_history
from ckptfsm.disk.stock import StockVerdict
from ckptfsm.ranks.coordinator_client import CoordinatorClient, Update
from ckptfsm.ranks.handle import SaveHandle, View
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.fakes import FifoGate
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.testing.simfs import ProcessDead
from ckptfsm.writers.rank_writer import launch_forked

TRACKER = "latest_checkpointed_iteration.txt"
SHARD = "__0_0.distcp"
# The life of a saved checkpoint, as hooks see it.
LIFE = ["requested", "forked", "shards_written", "finalized", "tracked"]


class Run:
    """Managers of one test: opens them, and leaves whichever the test left open."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.driver = FakeDriver()
        self.clock = ShiftedClock()
        self.records: list[TransitionRecord] = []
        self.open_managers: list[Manager] = []

    def open(
        self, storage=None, hooks=None, driver=None, launch=launch_forked, **settings
    ) -> Manager:
        where = self.root if storage is None else (lambda create: storage)
        ports = fake_ports(where, driver=driver or self.driver, clock=self.clock, launch=launch)
        hooks = (self.records.append,) if hooks is None else hooks
        manager = Manager(ports, make_config({**QUICK, **settings}), hooks)
        self.open_managers.append(manager)
        return manager

    def saved(self, *steps: int, **settings) -> Manager:
        """A manager with these steps tracked."""
        manager = self.open(**settings)
        for step in steps:
            manager.save(step, weights(step)).wait()
        manager.wait_until_finished()
        return manager

    def restarted(self, manager: Manager, **settings) -> Manager:
        manager.close()
        return self.open(**settings)

    def steps_on_disk(self) -> list[int]:
        return sorted(int(p.name[5:]) for p in self.root.glob("iter_*"))

    def tracker(self) -> str:
        return (self.root / TRACKER).read_text().strip()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "root")
    yield made
    for manager in made.open_managers:
        manager.abandon()


def until(manager: Manager, condition, limit: int = 20_000) -> None:
    """Poll as a training loop does, until ``condition``."""
    for _ in range(limit):
        if condition():
            return
        manager.poll()
        manager._ports.clock.sleep(0.001)
    raise AssertionError("it never came true")


def die(part: str, rank: int) -> None:
    """A writer that is killed, as the kernel's out-of-memory killer does it."""
    os.kill(os.getpid(), signal.SIGKILL)


def disk_full(part: str, rank: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "shard")


# ------------------------------------------------------------------------------- save, poll, wait


def test_a_save_is_acknowledged_only_once_it_is_tracked(run: Run):
    """I2. Catches: ``latest_step`` or a handle that counts a save before its tracker is durable."""
    gate = FifoGate(run.root.parent / "gate")
    run.driver.before_write = gate.hold
    manager = run.open()
    handle = manager.save(5, weights(5))
    for _ in range(5):
        manager.poll()
    assert (handle.done, manager.latest_step(), manager.all_steps()) == (False, None, [])
    assert handle.state in (State.REQUESTED, State.FORKED)
    assert not (run.root / TRACKER).exists()
    gate.open()
    until(manager, lambda: handle.done)
    assert handle.state is State.TRACKED
    assert handle.exception() is None and not handle.skipped
    assert (manager.latest_step(), manager.all_steps()) == (5, [5])
    assert run.tracker() == "5"
    assert [r.dest.value for r in run.records] == LIFE


def test_the_state_is_frozen_by_the_fork(run: Run):
    """Catches: a writer that sees what training changed after ``save`` returned."""
    gate = FifoGate(run.root.parent / "gate")
    run.driver.before_write = gate.hold
    manager = run.open()
    state = weights(1)
    handle = manager.save(1, state)
    state["weights"] = b"the next step's"
    gate.open()
    handle.wait()
    assert manager.restore(TEMPLATE).state == {"weights": b"w1"}


def test_metrics_and_step_are_frozen_at_the_call(run: Run):
    """Catches: retention or the manifest reading a live metrics dict or step counter."""
    manager = run.open()
    metrics, step = {"loss": 1.5}, 3
    handle = manager.save(step, weights(step), metrics=metrics)
    metrics["loss"] = 99.0
    step += 1
    handle.wait()
    assert (handle.step, run.records[0].created.metrics) == (3, {"loss": 1.5})
    assert b'"loss":1.5' in (run.root / "iter_0000003/.ckptfsm/manifest.json").read_bytes()


def test_metrics_that_are_not_numbers_are_refused(run: Run):
    """Catches: an exception between two collectives instead of a refusal on all ranks."""
    manager = run.open()
    with pytest.raises(SaveRefused, match="cannot prepare"):
        manager.save(1, weights(1), metrics={"loss": "low"})
    manager.save(1, weights(1)).wait()


def test_state_or_parts_but_not_both_or_neither(run: Run):
    """Catches: a state that is silently ignored beside parts, or parts beside a state."""
    manager = run.open()
    for given in ({}, {"state": weights(1), "parts": {"a": weights(1)}}):
        with pytest.raises((SaveRefused, ConfigError)):
            manager.save(1, **given)
    assert manager.latest_step() is None


def test_F23_named_parts_come_back_by_name(run: Run):
    """Catches: two parts in one directory, or a part that is published but not restorable."""
    manager = run.open()
    parts = {"actor": weights(1), "critic": {"weights": b"c"}, "notes.txt": b"hello"}
    manager.save(1, parts=parts).wait()
    found = manager.restore(parts={"actor": TEMPLATE, "critic": TEMPLATE, "notes.txt": b""})
    assert found.state is None
    assert found.parts == {
        "actor": {"weights": b"w1"},
        "critic": {"weights": b"c"},
        "notes.txt": b"hello",
    }
    with pytest.raises(ConfigError, match="has no part 'reward'"):
        manager.restore(parts={"reward": TEMPLATE})


def test_F23_one_failed_part_fails_the_checkpoint(run: Run):
    """Catches: a checkpoint tracked although one of its parts is not there."""

    def only_critic(part: str, rank: int) -> None:
        if part == "critic":
            raise RuntimeError("no critic")

    run.driver.before_write = only_critic
    manager = run.open()
    handle = manager.save(1, parts={"actor": weights(1), "critic": weights(1)})
    with pytest.raises(SaveFailed, match="no critic"):
        handle.wait()
    manager.wait_until_finished()
    assert manager.latest_step() is None and run.steps_on_disk() == []


@pytest.mark.parametrize("action", ["rollback", "delete", "pin", "unpin", "measure", "restore"])
def test_the_manager_is_quiet_again_after(run: Run, action: str):
    """Catches: ``close`` that waits half an hour for something that has long happened."""
    manager = run.saved(1, 2)
    {
        "rollback": lambda: manager.rollback(1),
        "delete": lambda: manager.delete(1),
        "pin": lambda: manager.pin(1),
        "unpin": lambda: manager.unpin(1),
        "measure": lambda: manager.record_metrics(1, {"loss": 1.0}),
        "restore": lambda: manager.restore(TEMPLATE),
    }[action]()
    manager.wait_until_finished(2.0)
    manager.close()


def test_the_manager_is_quiet_again_after_falling_back(run: Run):
    """Catches: ``close`` that waits half an hour, because a restore withdrew a damaged
    checkpoint."""
    manager = run.saved(1, 2)
    (run.root / "iter_0000002" / SHARD).write_bytes(b"flipped")
    assert manager.restore(TEMPLATE).step == 1
    manager.wait_until_finished(2.0)
    manager.close()


def test_a_view_is_quiet_only_when_the_coordinator_says_so(run: Run):
    """Catches: a wait that ends between the tracker and the prunes that follow it."""
    run.saved(1)
    view = View()
    for record in run.records:
        view.apply(record)
        assert not view.quiet
    assert (view.latest, view.in_flight) == (1, None)
    view.retention_due = False
    assert view.quiet


# ------------------------------------------------------------------------------------ on_busy


def held(run: Run, **settings) -> tuple[Manager, FifoGate]:
    """A manager with a save of step 1 that stays in flight until the gate is opened."""
    gate = FifoGate(run.root.parent / "gate")
    run.driver.before_write = gate.hold
    manager = run.open(**settings)
    manager.save(1, weights(1))
    run.driver.before_write = None
    return manager, gate


def test_F22_on_busy_skip(run: Run):
    """Catches: a skipped save that looks saved, or one that disturbs the save in flight."""
    manager, gate = held(run, on_busy="skip")
    skipped = manager.save(2, weights(2))
    assert skipped.skipped and skipped.done and skipped.state is None
    assert skipped.wait() is skipped and skipped.exception() is None
    gate.open()
    manager.wait_until_finished()
    assert manager.all_steps() == [1]
    manager.save(3, weights(3)).wait()
    assert manager.all_steps() == [1, 3]


def test_F22_on_busy_raise(run: Run):
    """Catches: a refusal that fails the save in flight."""
    manager, gate = held(run, on_busy="raise")
    with pytest.raises(SaveRefused) as caught:
        manager.save(2, weights(2))
    assert (caught.value.step, caught.value.in_flight) == (2, 1)
    gate.open()
    manager.wait_until_finished()
    assert manager.all_steps() == [1]


def test_F22_on_busy_wait(run: Run):
    """Catches: two saves in flight at once, or results of one taken for the other's."""
    manager, gate = held(run, on_busy="wait")
    opener = threading.Thread(target=gate.open)
    opener.start()
    second = manager.save(2, weights(2))
    opener.join()
    assert manager.all_steps() == [1], "step 2 was begun before step 1 was tracked"
    second.wait()
    assert [(r.step, r.dest.value) for r in run.records] == [(s, d) for s in (1, 2) for d in LIFE]
    assert manager.restore(TEMPLATE, step=1).state == {"weights": b"w1"}


def test_F22_on_busy_wait_is_bounded(run: Run):
    """I10. Catches: a trainer that waits for ever for a save that hangs."""
    manager, gate = held(run, busy_timeout_s=0.05)
    with pytest.raises(DeadlineExceeded) as caught:
        manager.save(2, weights(2))
    assert caught.value.timeout_s == 0.05
    gate.open()
    manager.wait_until_finished(20.0)
    assert manager.all_steps() == [1]


# ------------------------------------------------------------------------ on_busy: blocked saves


class Broken:
    """The disk has no space for the tracker until ``mend``.

    The next retry in the background is seconds away, unless a test puts the clock forward.
    """

    facts = (TRACKER, "ENOSPC")

    def __init__(self, run: Run) -> None:
        self.run, self.full = run, False
        self.storage = self.disk()

    def disk(self) -> FaultStorage:
        return FaultStorage(PosixStorage(self.run.root), before=self.before)

    def before(self, index: int, method: str, path: str) -> None:
        if self.full and method == "open_exclusive" and TRACKER in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def break_it(self) -> None:
        self.full = True

    def mend(self) -> None:
        self.full = False


def facts(error: CkptFsmError) -> tuple[str, str]:
    return error.file, error.errno_name


@pytest.fixture
def broken(run: Run) -> Broken:
    return Broken(run)


def blocked(broken: Broken, **settings) -> tuple[Manager, SaveHandle]:
    """A manager: step 1 is tracked, and step 2 is published and cannot be tracked."""
    manager = broken.run.saved(1, storage=broken.storage, **settings)
    broken.break_it()
    handle = manager.save(2, weights(2))
    with pytest.warns(SaveFailedWarning, match="step 2 is published, and waits for the disk"):
        until(manager, lambda: handle.blocked_by is not None)
    return manager, handle


def tick_on(run: Run, manager: Manager, condition) -> None:
    """Poll while time goes by, until ``condition``."""

    def later() -> bool:
        run.clock.advance(10)
        return condition()

    until(manager, later, limit=300)


def test_F5_training_goes_on_while_the_tracker_is_blocked(broken: Broken):
    """Catches: a save that waits for ``busy_timeout_s`` for an attempt that is known to be stuck. A
    published step that is given up for it, or never tracked once the disk is mended."""
    run = broken.run
    manager, handle = blocked(broken, on_failure="warn")
    for step in (3, 4):
        with pytest.warns(SaveFailedWarning, match=f"step 2 .*{TRACKER}, {broken.facts[1]}"):
            skipped = manager.save(step, weights(step))
        assert skipped.skipped and skipped.done and skipped.blocked_by is None
        manager.poll()
    assert (handle.state, handle.done) == (State.FINALIZED, False)
    assert facts(handle.blocked_by) == broken.facts
    broken.mend()
    tick_on(run, manager, lambda: handle.done)
    assert (handle.state, handle.blocked_by, run.tracker()) == (State.TRACKED, None, "2")
    manager.save(5, weights(5)).wait()
    assert manager.all_steps() == [1, 2, 5]


@pytest.mark.parametrize("on_failure", ["raise", 2])
def test_F5_a_save_is_refused_while_the_tracker_is_blocked(broken: Broken, on_failure):
    """Catches: a ``DeadlineExceeded`` after half an hour that names neither the file nor the error."""
    manager, handle = blocked(broken, on_failure=on_failure)
    with pytest.raises(SaveRefused, match="step 2 is still in flight, and blocked") as caught:
        manager.save(3, weights(3))
    assert facts(caught.value) == broken.facts
    assert (caught.value.step, caught.value.in_flight, caught.value.reason) == (3, 2, "tracker")
    broken.mend()
    manager.save(3, weights(3)).wait()
    assert manager.all_steps() == [1, 2, 3] and handle.state is State.TRACKED


def test_F5_a_mended_disk_is_used_at_once(broken: Broken):
    """Catches: a save that is skipped because the next retry is seconds away."""
    manager, handle = blocked(broken, on_failure="warn")
    broken.mend()
    third = manager.save(3, weights(3))
    assert (handle.state, third.skipped, manager.latest_step()) == (State.TRACKED, False, 2)
    third.wait()


def test_F5_a_retry_uses_the_space_of_the_trash(run: Run):
    """Catches: a save that is skipped although the retry itself gave the space back that was missing."""
    junk = run.root / ".ckptfsm/trash/gone-1.e1.a1"

    class Full(Broken):
        def before(self, index: int, method: str, path: str) -> None:
            if junk.exists():
                super().before(index, method, path)

    full = Full(run)
    manager = run.saved(1, storage=full.storage)
    full.break_it()
    junk.touch()
    handle = manager.save(2, weights(2))
    with pytest.warns(SaveFailedWarning):
        until(manager, lambda: handle.blocked_by is not None)
    assert not manager.save(3, weights(3)).skipped
    assert (handle.state, junk.exists()) == (State.TRACKED, False)


def test_F22_on_busy_skip_and_raise_of_a_blocked_save(broken: Broken):
    """Catches: a refusal without its reason; a skip that tries the disk."""
    manager, handle = blocked(broken, on_busy="raise")
    with pytest.raises(SaveRefused) as caught:
        manager.save(3, weights(3))
    assert facts(caught.value) == broken.facts
    assert (caught.value.in_flight, caught.value.reason) == (2, "tracker")
    skipping = manager.config.model_copy(update={"on_busy": "skip"})
    manager._participant._config, tries = skipping, len(broken.storage.calls)
    assert manager.save(3, weights(3)).skipped
    assert len(broken.storage.calls) == tries and not handle.done
    broken.mend()


def test_F5_a_save_becomes_blocked_while_another_waits(broken: Broken):
    """Catches: a wait for ``busy_timeout_s``, where the tracker is found blocked only once the wait
    has begun."""
    run = broken.run
    manager = run.saved(1, storage=broken.storage, on_failure="warn")
    gate = FifoGate(run.root.parent / "gate")
    run.driver.before_write = gate.hold
    second = manager.save(2, weights(2))
    run.driver.before_write = None
    broken.break_it()
    opener = threading.Thread(target=gate.open)
    opener.start()
    with pytest.warns(SaveFailedWarning, match="was skipped: step 2 is still in flight"):
        assert manager.save(3, weights(3)).skipped
    opener.join()
    assert second.state is State.FINALIZED
    broken.mend()
    run.clock.advance(10)
    manager.wait_until_finished()
    assert manager.all_steps() == [1, 2]


def test_F5_a_synchronous_save_that_becomes_blocked(broken: Broken):
    """Catches: a synchronous save that waits for ``busy_timeout_s`` for its blocked tracker, or
    that gives up at the first error of a disk."""
    manager = broken.run.saved(1, storage=broken.storage, on_failure="warn", sync=True)
    broken.break_it()
    with pytest.warns(SaveFailedWarning, match="step 2 is published, and waits for the disk"):
        handle = manager.save(2, weights(2))
    assert (handle.state, facts(handle.blocked_by)) == (State.FINALIZED, broken.facts)
    broken.mend()
    assert manager.save(3, weights(3)).state is State.TRACKED
    assert manager.all_steps() == [1, 2, 3]


@pytest.mark.parametrize("wait", ["handle", "all", "close"])
def test_F5_a_deadline_names_the_blocked_save(broken: Broken, wait: str):
    """Catches: a wait that ends without a word on the disk."""
    manager, handle = blocked(broken, close_timeout_s=0.05)
    waits = {
        "handle": partial(handle.wait, 0.05),
        "all": partial(manager.wait_until_finished, 0.05),
        "close": manager.close,
    }
    with pytest.raises(DeadlineExceeded, match="step 2 is blocked: tracker: ") as caught:
        waits[wait]()
    assert facts(caught.value) == broken.facts and caught.value.reason == "tracker"
    assert caught.value.timeout_s == 0.05
    broken.mend()


def test_F5_a_blocked_tracker_is_said_once(broken: Broken, caplog):
    """Catches: a warning at every retry, or none; a line of the log without file and error."""
    manager, handle = blocked(broken)
    tries = len(broken.storage.calls)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tick_on(broken.run, manager, lambda: len(broken.storage.calls) > tries + 8)
    assert said == []
    lines = [r.getMessage() for r in caplog.records if "blocked" in r.getMessage()]
    assert len(lines) == 1 and "step 2 is finalized" in lines[0]
    assert all(fact in lines[0] for fact in broken.facts)
    broken.mend()


def test_explain_says_where_a_step_is(broken: Broken):
    """Catches: a person who has to read the journal to learn why a step is not tracked."""
    manager, handle = blocked(broken)
    assert manager.explain(1) == "Step 1 is tracked and is the latest."
    assert manager.explain(7) == "Step 7 is neither tracked nor in flight."
    said = manager.explain(2)
    assert said.startswith("Step 2 is in flight (state finalized), and blocked: tracker: ")
    assert said.endswith("It is retried until the disk takes it.")
    assert all(fact in said for fact in broken.facts)
    broken.mend()
    broken.run.clock.advance(10)
    handle.wait()
    assert manager.explain(1) == "Step 1 is tracked."
    assert manager.explain(2) == "Step 2 is tracked and is the latest."


def test_I8_a_restart_between_a_blocked_tracker_and_its_mending(broken: Broken):
    """Catches: a published step that a restart passes over."""
    run = broken.run
    manager, _ = blocked(broken)
    manager.abandon()
    with pytest.raises(StorageError, match="step 2 is finalized") as caught:
        run.open(broken.disk())
    assert caught.value.file == TRACKER
    broken.mend()
    again = run.open(broken.disk())
    assert (again.latest_step(), run.tracker()) == (2, "2")
    again.save(3, weights(3)).wait()


def test_F5_a_journal_that_cannot_take_the_published_step(run: Run):
    """Catches: a save that waits for ``busy_timeout_s``, where the disk does not let the journal
    grow."""
    full = threading.Event()

    def before(index: int, method: str, path: str) -> None:
        published = (run.root / "iter_0000002").exists()
        if full.is_set() and method == "pwrite" and published:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), path)

    storage = FaultStorage(PosixStorage(run.root), before=before)
    manager = run.saved(1, storage=storage, on_failure="warn")
    full.set()
    handle = manager.save(2, weights(2))
    with pytest.warns(SaveFailedWarning, match="EDQUOT"):
        until(manager, lambda: handle.blocked_by is not None)
        assert manager.save(3, weights(3)).skipped
    assert handle.state is State.SHARDS_WRITTEN
    assert handle.blocked_by.file.startswith(".ckptfsm/journal/")
    full.clear()
    manager.save(4, weights(4)).wait()
    assert manager.all_steps() == [1, 2, 4]


# ---------------------------------------------------------------------------------- on_failure


def test_F1_a_killed_writer_fails_the_save(run: Run):
    """I10. Catches: "not alive" taken for "succeeded"; a failed attempt that leaves files."""
    run.driver.before_write = die
    manager = run.open()
    handle = manager.save(1, weights(1))
    with pytest.raises(WriterDied, match="rank 0: killed by SIGKILL") as caught:
        handle.wait()
    assert handle.exception() is caught.value and handle.done
    assert (caught.value.step, caught.value.reason) == (1, "writer_died")
    manager.wait_until_finished()
    assert list((run.root / ".ckptfsm/staging").iterdir()) == []
    run.driver.before_write = None
    manager.save(1, weights(1)).wait()
    assert manager.latest_step() == 1


def test_on_failure_raise_comes_out_of_poll_once(run: Run):
    """Catches: a failure that is never told, or one that is raised at every step from then on."""
    run.driver.before_write = die
    manager = run.open()
    handle = manager.save(1, weights(1))
    with pytest.raises(WriterDied):
        until(manager, lambda: False)
    assert handle.done
    manager.wait_until_finished()
    for _ in range(3):
        manager.poll()


def test_on_failure_raise_comes_out_of_the_next_save(run: Run):
    """Catches: a failure lost when the trainer only saves."""
    run.driver.before_write = die
    manager = run.open()
    manager.save(1, weights(1))
    with pytest.raises(WriterDied):
        manager.save(2, weights(2))


@pytest.mark.parametrize("sync", [False, True])
def test_on_failure_warn(run: Run, sync: bool):
    """Catches: a failed save that ends a training which asked only to be warned."""
    run.driver.before_write = disk_full
    manager = run.open(on_failure="warn", sync=sync)
    with pytest.warns(SaveFailedWarning, match="No space left"):
        handle = manager.save(1, weights(1))
        manager.wait_until_finished()
    assert isinstance(handle.exception(), SaveFailed)
    assert manager.latest_step() is None


def test_F5_the_first_system_error_is_named(run: Run):
    """Catches: a full disk that is reported as something else."""
    run.driver.before_write = disk_full
    manager = run.open()
    with pytest.raises(SaveFailed, match="No space left on device") as caught:
        manager.save(1, weights(1)).wait()
    assert caught.value.reason == "writer_failed"
    manager.wait_until_finished()
    assert list((run.root / ".ckptfsm/staging").iterdir()) == []


def test_on_failure_save_again_at_most_n_times(run: Run):
    """Catches: a save that is never tried again, and one that is tried for ever."""
    run.driver.before_write = die
    manager = run.open(on_failure=2, save_interval_steps=100)
    tried = []
    with pytest.raises(WriterDied):
        for step in range(100, 120):
            if manager.should_save(step):
                tried.append(step)
                manager.save(step, weights(step))
                manager.wait_until_finished()
    assert tried == [100, 101, 102]
    assert not manager.should_save(103)


def test_on_failure_counts_anew_after_a_success(run: Run):
    """Catches: failures of last week that use up the tries of today."""
    manager = run.open(on_failure=1, save_interval_steps=10)
    for step in (10, 20):
        run.driver.before_write = die
        manager.save(step, weights(step))
        manager.wait_until_finished()
        run.driver.before_write = None
        assert manager.should_save(step + 1)
        manager.save(step + 1, weights(step + 1)).wait()
        assert not manager.should_save(step + 2)
    assert manager.all_steps() == [11, 21]


# --------------------------------------------------------------------------------------- hooks


def test_F24_a_raising_hook_stops_nothing(run: Run, caplog):
    """Catches: a user's hook that fails a save, training, or the hooks after it."""
    heard = []

    def bad(record: TransitionRecord) -> None:
        raise RuntimeError("a user's bug")

    manager = run.open(hooks=(bad, heard.append))
    with caplog.at_level(logging.ERROR, "ckptfsm"):
        manager.save(1, weights(1)).wait()
    assert [r.dest.value for r in heard] == LIFE
    assert sum(r.event == "hook_failed" for r in caplog.records) == len(LIFE)


def test_a_log_tells_each_transition_in_one_line(run: Run, caplog):
    """Catches: a log with one word for every step: a plain formatter does not show its facts."""
    manager = run.open()
    with caplog.at_level(logging.INFO, "ckptfsm"):
        manager.save(1, weights(1)).wait()
        run.driver.before_write = die
        with pytest.raises(WriterDied):
            manager.save(2, weights(2)).wait()
    moves = [r for r in caplog.records if r.event == "transition"]
    assert [r.record for r in moves] == run.records
    lines = [r.getMessage() for r in moves]
    assert "step 1: shards_written -> finalized (208 B)" in lines
    assert "step 1: finalized -> tracked" in lines
    (failed,) = [line for line in lines if "step 2: forked -> failed" in line]
    words = "step 2: forked -> failed (writer_died): rank 0: killed by SIGKILL"
    assert failed.startswith(words), failed


def test_hooks_hear_of_recovery(run: Run):
    """Catches: a mirror or metric that never learns of a save that a restart completed."""
    crash_at_rename_to(run, TRACKER)
    run.records.clear()
    run.open()
    assert [r.dest.value for r in run.records] == ["finalized", "tracked"] or [
        r.dest.value for r in run.records
    ] == ["tracked"]


# --------------------------------------------------------------------------------- should_save


def test_should_save_by_interval_and_list(run: Run):
    """Catches: step 0, steps already saved, or the explicit steps handled wrong."""
    manager = run.open(save_interval_steps=5, save_steps=[0, 7, 8])
    assert [s for s in range(12) if manager.should_save(s)] == [0, 5, 7, 8, 10]
    manager.save(7, weights(7)).wait()
    assert [s for s in range(12) if manager.should_save(s)] == [8, 10]


def test_should_save_every_n_seconds_of_the_coordinators_clock(run: Run):
    """F14. Catches: a save that is due by wall time, or one rank's clock deciding alone."""
    manager = run.open(save_interval_s=60.0, exchange_every=1)
    manager.poll()
    assert not manager.should_save(1)
    run.clock.advance(61)
    assert not manager.should_save(1), "it was not agreed in a poll yet"
    manager.poll()
    assert manager.should_save(1)
    manager.save(1, weights(1)).wait()
    manager.poll()
    assert not manager.should_save(2)
    run.clock.advance(61)
    manager.poll()
    assert manager.should_save(2)


def test_a_manager_that_makes_no_save_due_says_so_at_once(run: Run):
    """Catches: a run of days without a save, as no interval was set, that is told at its end."""
    manager = run.open()
    with pytest.warns(UnsavedStepsWarning, match="set save_interval_steps"):
        assert not manager.should_save(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not manager.should_save(2)
    manager.abandon()


@pytest.mark.parametrize(
    "due",
    [{"save_steps": {9}}, {"save_interval_s": 9.0}, {"on_failure": 1}, {"agree_when_idle": True}],
)
def test_a_manager_with_a_schedule_does_not_warn_of_none(run: Run, due):
    manager = run.open(**due)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not manager.should_save(1)
    manager.abandon()


def test_the_last_step_is_due_off_the_schedule(run: Run):
    """Catches: the last steps of a run that ends in order, in no checkpoint; a warning all the same."""
    manager = run.open(save_interval_steps=2)
    assert manager.should_save(3, last=True)
    manager.save(3, weights(3)).wait()
    assert not manager.should_save(3, last=True), "it is saved"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.close()


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (2, r"at step 5, and the newest checkpoint is that of step 2 \(steps not saved: 3\)"),
        (None, "at step 5, and there is no checkpoint"),
    ],
)
def test_steps_that_are_in_no_checkpoint_are_told_at_the_end(run: Run, saved, said):
    """Catches: hours of training that are lost without a word, because nobody saved the last step."""
    manager = run.open(save_interval_steps=100)
    if saved is not None:
        manager.save(saved, weights(saved)).wait()
    assert not manager.should_save(5)
    with pytest.warns(UnsavedStepsWarning, match=said):
        manager.close()


def test_request_save_is_agreed_in_a_poll(run: Run):
    """Catches: a preemption notice that one rank keeps to itself, or that is never acted on."""
    manager = run.open(preemption_signals=["SIGUSR1"], exchange_every=1)
    assert not manager.preempted
    os.kill(os.getpid(), signal.SIGUSR1)
    manager.poll()
    assert manager.preempted and manager.should_save(3)
    manager.save(3, weights(3)).wait()
    assert not manager.should_save(4)
    manager.close()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_the_end_of_the_allocation_makes_a_save_due(run: Run):
    """Catches: a job that is cut off although its end was known, and a save at every step before it."""
    end = run.clock.unix() + 10_000
    manager = run.open(end_of_allocation=end, exchange_every=1)
    manager.save(1, weights(1)).wait()
    manager.poll()
    assert (manager.should_save(2), manager.preempted) == (False, False)
    run.clock.advance(9990)  # the look was so long ago that the next one may be too late
    manager.poll()
    assert (manager.should_save(2), manager.preempted) == (True, True)
    manager.save(2, weights(2)).wait()
    manager.poll()
    assert not manager.should_save(3), "there is one last save"


def test_the_end_is_found_by_the_saves_of_this_run(run: Run):
    """Catches: durations that nobody notes, so that a default decides for ever."""
    manager = run.open(end_of_allocation=run.clock.unix() + 86_400, exchange_every=1)
    for step in (1, 2):
        handle = manager.save(step, weights(step))
        run.clock.advance(40)  # the time that each save takes
        handle.wait()
    for _ in range(40):
        manager.poll()
    run.clock.advance(86_400 - 80 - 300)  # a single long look
    manager.poll()
    assert not manager.preempted, "a save takes 40 seconds, not ten minutes"
    run.clock.advance(250)
    manager.poll()
    assert manager.preempted


def test_the_end_counts_after_a_save_that_was_asked_for(run: Run):
    """Catches: a save on request in the morning that hides the end of the allocation at night."""
    manager = run.open(end_of_allocation=run.clock.unix() + 10_000, exchange_every=1)
    manager.request_save()
    manager.poll()
    manager.save(1, weights(1)).wait()
    assert not manager.should_save(2)
    run.clock.advance(9999)
    manager.poll()
    assert manager.should_save(2)


def test_no_signal_handler_is_installed_unasked(run: Run):
    """Catches: the library taking SIGTERM away from the trainer."""
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)}
    run.saved(1)
    assert before == {n: signal.getsignal(n) for n in before}


# ------------------------------------------------------------------- pins, deletion, rollback


def test_metrics_that_are_refused(run: Run):
    """Catches: a typing error that is kept for ever, or an error that a caller cannot tell."""
    manager = run.saved(1)
    with pytest.raises(StepNotFoundError) as caught:
        manager.record_metrics(2, {"val": 0.5})
    assert caught.value.available == (1,)
    for metrics in ({"val": float("nan")}, {"val": "good"}, {}):
        with pytest.raises(ConfigError):
            manager.record_metrics(1, metrics)
    manager.record_metrics(1, {"val": 0.5})


def test_the_best_step_is_the_one_that_retention_keeps(run: Run):
    """Catches: an export of another step than ``BestN`` keeps, or metrics that a restart forgets."""
    policy = LatestN(1) | BestN("acc", 1, "max")
    manager = run.open(retention=policy)
    for step, acc in ((1, 0.9), (2, 0.9), (3, float("nan")), (4, 0.1)):
        manager.save(step, weights(step), metrics={"acc": acc}).wait()
    assert manager.all_steps() == [2, 4] and manager.best_step("acc", "max") == 2
    manager.record_metrics(2, {"val": 0.5})
    again = run.restarted(manager, retention=policy)
    assert again.metrics(2) == {"acc": 0.9, "val": 0.5} and again.metrics(4) == {"acc": 0.1}
    assert (again.best_step("acc"), again.best_step("val"), again.best_step("none")) == (4, 2, None)
    with pytest.raises(ConfigError, match="'min' or 'max'"):
        again.best_step("acc", "most")


def test_the_path_of_a_step_is_where_its_files_are(run: Run):
    """Catches: a path of a step that is not tracked, which another run may have left there."""
    manager = run.saved(1)
    (run.root / "iter_0000002").mkdir()
    assert manager.path(1) == run.root / "iter_0000001" and manager.path(1).is_dir()
    for ask in (manager.path, manager.metrics):
        with pytest.raises(StepNotFoundError) as caught:
            ask(2)
        assert caught.value.available == (1,)


def test_I10_rank_0_alone_gives_the_metrics(run: Run):
    """Catches: a bad value on another rank, which raises there and leaves the others waiting."""

    def work(transport: ThreadTransport) -> list[str]:
        manager = rank_manager(run, transport)
        manager.save(1, weights(1)).wait()
        said = []
        for value in (0.5, float("nan")):
            mine = {"val": value if transport.rank == 0 else 1.0 - value}
            given = mine if value == 0.5 or transport.rank == 0 else None
            try:
                manager.record_metrics(1, given)
                said.append("taken")
            except ConfigError as error:
                said.append(error.metric)
        manager.close()
        return said

    assert run_ranks(2, work) == [["taken", "val"]] * 2
    history = read_history(PosixStorage(run.root))
    assert dict(history.ledger.at(1).metrics) == {"val": 0.5}


def test_pin_of_nothing(run: Run):
    """Catches: a pin on a step that is not there, which would protect nothing."""
    manager = run.saved(1)
    with pytest.raises(StepNotFoundError) as caught:
        manager.pin(2)
    assert caught.value.available == (1,) and isinstance(caught.value, FileNotFoundError)
    manager.unpin(2)


def test_I7_delete_refuses_a_step_in_use(run: Run):
    """Catches: a person's command that removes the latest, a pinned, or a checkpoint in use."""
    manager = run.saved(1, 2, 3)
    manager.pin(2)
    with pytest.raises(SaveRefused, match="latest"):
        manager.delete(3)
    with pytest.raises(SaveRefused, match="pin"):
        manager.delete(2)
    with pytest.raises(StepNotFoundError):
        manager.delete(9)
    manager.delete(1)
    assert manager.all_steps() == [2, 3] and run.steps_on_disk() == [2, 3]


def test_I7_a_policy_that_raises_keeps_everything(run: Run):
    """Catches: a bug in a user's policy that deletes checkpoints or fails saves."""

    class Broken(Policy):
        def preserve(self, checkpoints):
            raise RuntimeError("a user's bug")

    assert run.saved(1, 2, 3, retention=Broken()).all_steps() == [1, 2, 3]


def test_rollback_refusals(run: Run):
    """Catches: going back to nothing, or while a save is in flight."""
    gate = FifoGate(run.root.parent / "gate")
    manager = run.saved(1, 2)
    with pytest.raises(StepNotFoundError):
        manager.rollback(7)
    run.driver.before_write = gate.hold
    manager.save(3, weights(3))
    with pytest.raises(SaveRefused, match="in flight"):
        manager.rollback(1)
    gate.open()
    manager.wait_until_finished()
    assert manager.all_steps() == [1, 2, 3]


# ------------------------------------------------------------------------------------- restore


def test_restore_is_none_only_without_evidence(run: Run):
    """I8. Catches: a restart from scratch without a request."""
    manager = run.open()
    assert manager.restore(TEMPLATE) is None and manager.latest_step() is None
    manager.save(1, weights(1)).wait()
    assert manager.restore(TEMPLATE).step == 1


def test_restore_a_given_step(run: Run):
    """Catches: the latest loaded instead of the step asked for."""
    manager = run.saved(1, 2)
    found = manager.restore(TEMPLATE, step=1)
    assert (found.step, found.state, found.dropped) == (1, {"weights": b"w1"}, ())
    with pytest.raises(StepNotFoundError) as caught:
        manager.restore(TEMPLATE, step=7)
    assert caught.value.available == (1, 2)


def test_a_failed_load_is_typed_and_harms_nothing(run: Run):
    """Catches: a wrong state dict taken for damage, which would withdraw a good checkpoint."""
    manager = run.saved(1, 2)
    with pytest.raises(RestoreFailed, match="KeyError") as caught:
        manager.restore({"weights": None, "renamed": None})
    assert caught.value.step == 2
    assert manager.all_steps() == [1, 2]
    assert list((run.root / ".ckptfsm/readers").iterdir()) == [], (
        "the reader's lease is still there"
    )


def test_objects_that_do_not_reshard_are_left_out(run: Run):
    """Catches: a load that fails because of the RNG state, or one that drops more than allowed."""
    manager = run.saved(1, reshard_drops=("rng_state",))
    with pytest.warns(UserWarning, match="rng_state"):
        found = manager.restore({"weights": None, "rng_state": None})
    assert found.dropped == ("rng_state",) and found.state == {"weights": b"w1"}


@pytest.mark.parametrize(
    ("verify", "damage", "found"),
    [
        ("digests", "flip", 1),
        ("sizes", "flip", 2),
        ("sizes", "truncate", 1),
        ("sizes", "missing", 1),
        ("sizes", "extra", 1),
        ("sizes", "unlisted", 1),
        ("digests", "extra", 1),
        ("digests", "none", 2),
    ],
)
def test_F21_damage_is_found_before_restore(
    run: Run, verify: str, damage: str, found: int, monkeypatch: pytest.MonkeyPatch
):
    """Catches: a damaged shard that is loaded, and a whole one that is refused."""
    manager = run.saved(1, 2, verify=verify)
    shard = run.root / "iter_0000002" / SHARD
    content = bytearray(shard.read_bytes())
    if damage == "flip":
        shard.write_bytes(bytes(content[:4] + bytes([content[4] ^ 1]) + content[5:]))
        if found == 2:  # sizes cannot see it, and the check of the format must not find it
            shard.write_bytes(bytes(content))
            monkeypatch.setattr(PosixStorage, "digest", lambda self, path: "another")
    elif damage == "truncate":
        shard.write_bytes(content[:-1])
    elif damage == "missing":
        shard.unlink()
    elif damage == "unlisted":
        (run.root / "iter_0000002/.ckptfsm/manifest.json").unlink()
    elif damage == "extra":
        (run.root / "iter_0000002/__7_0.distcp").write_bytes(content)
    assert manager.restore(TEMPLATE).step == found
    assert manager.all_steps() == ([1] if found == 1 else [1, 2])


def test_I2_a_restore_that_falls_back_says_so_on_every_rank(run: Run, caplog):
    """Catches: hours of training from an older step, without a word."""

    def work(transport: ThreadTransport) -> None:
        manager = rank_manager(run, transport)
        for step in (1, 2):
            manager.save(step, weights(step)).wait()
        if transport.rank == 0:
            (run.root / "iter_0000002" / SHARD).write_bytes(b"x")
        assert manager.restore(TEMPLATE).step == 1
        manager.close()

    with pytest.warns(RecoveryWarning, match=f"step 2 is damaged.*{SHARD}") as caught:
        assert run_ranks(2, work) == [None, None]
    said = [w for w in caught if w.filename == __file__]
    assert len(said) == 2
    logged = [r for r in caplog.records if r.event == "checkpoint_damaged"]
    assert [(r.levelname, r.step) for r in logged] == [("WARNING", 2)] * 2


def test_F21_a_given_step_that_is_damaged_is_never_replaced(run: Run):
    """Catches: another step loaded than the one asked for."""
    manager = run.saved(1, 2)
    (run.root / "iter_0000001" / SHARD).write_bytes(b"x")
    with pytest.raises(DamagedRoot) as caught:
        manager.restore(TEMPLATE, step=1)
    assert caught.value.step == 1
    assert manager.all_steps() == [1, 2]


def test_F19_nothing_valid_is_left(run: Run):
    """I8. Catches: a start from scratch because the only checkpoint is damaged."""
    manager = run.saved(1)
    (run.root / "iter_0000001" / SHARD).write_bytes(b"x")
    with pytest.raises(DamagedRoot):
        manager.restore(TEMPLATE)
    manager.close()
    with pytest.raises(DamagedRoot, match="none to resume from"):
        run.open()
    assert run.steps_on_disk() == [1]


def test_resume_strict(run: Run):
    """Catches: ``strict`` that falls back all the same, at restore or at open."""
    manager = run.saved(1, 2, resume="strict")
    (run.root / "iter_0000002" / SHARD).write_bytes(b"x")
    with pytest.raises(DamagedRoot, match="strict"):
        manager.restore(TEMPLATE)
    assert manager.all_steps() == [1, 2]
    manager.close()
    with pytest.raises(DamagedRoot, match="strict"):
        run.open(resume="strict")
    assert run.open(resume="fallback").latest_step() == 1


def test_resume_fresh(run: Run):
    """Catches: ``fresh`` that deletes what was there, or finds it again at the next start."""
    manager = run.saved(1, 2)
    fresh = run.restarted(manager, resume="fresh")
    assert (fresh.latest_step(), fresh.restore(TEMPLATE)) == (None, None)
    assert run.steps_on_disk() == [] and not (run.root / TRACKER).exists()
    aside = list((run.root / ".ckptfsm/quarantine").rglob(SHARD))
    assert len(aside) == 2
    fresh.save(1, weights(1)).wait()
    assert run.restarted(fresh).all_steps() == [1]


# -------------------------------------------------------------------- adoption, restart, readers


class Moments(dict[str, Any]):
    """A state that can be asked whether any object still holds it."""


class PassingDraft(FakeDraft):
    """A draft that holds the state until the writer owns it."""

    def changed(self) -> str:
        return ""

    def let_go(self) -> None:
        self.values = {}


class PassingDriver(FakeDriver):
    """As that of Megatron: a draft holds the trainer's tensors, or copies of them."""

    def draft(self, parts: Mapping[str, Any]) -> FakeDraft:
        made = super().draft(parts)
        return PassingDraft(
            made.specs, made.in_place, made.summary, made.expected_bytes, self, made.values
        )


def test_nothing_of_the_state_is_held_once_a_writer_has_it(run: Run):
    """Catches: memory of the trainer, or a copy of it, that stays while the writer writes: a trainer
    that lets go of its state after a save needs that memory."""
    manager = run.open(driver=PassingDriver())
    state = Moments(weights(1))
    held = weakref.ref(state)
    handle = manager.save(1, state)
    del state
    gc.collect()
    assert not handle.done and held() is None
    handle.wait()


def test_adopt_a_manifest_without_a_journal(run: Run):
    """Catches: checkpoints that are lost, or pruned, because their journal is not there."""
    manager = run.saved(1, 2)
    manager.close()
    for segment in (run.root / ".ckptfsm/journal").iterdir():
        segment.unlink()
    again = run.open(retention=LatestN(1))
    assert again.all_steps() == [1, 2]
    for step in (3, 4):
        again.save(step, weights(step)).wait()
    assert again.all_steps() == [1, 2, 4], "what was adopted is pinned until it is released"
    again.unpin(1)
    until(again, lambda: again.all_steps() == [2, 4])


def test_adopt_a_stock_directory(run: Run, monkeypatch):
    """Catches: a run that was started without this library and would begin again from zero."""
    for step in (10, 20, 30):
        directory = run.root / f"iter_{step:07d}"
        directory.mkdir(parents=True)
        (directory / SHARD).write_bytes(b"stock")
    (run.root / TRACKER).write_text("20")
    acceptable = StockVerdict(True, "")
    monkeypatch.setattr(evidence_module, "inspect_unlisted", lambda *arguments: acceptable)
    manager = run.open()
    assert manager.all_steps() == [10, 20], "30 is newer than the tracker: reported, not used"
    reported = [d for d in manager.recovery.decisions if d.result == "reported"]
    assert [d.subject for d in reported] == ["iter_0000030"]
    assert (run.root / "iter_0000030").is_dir()
    with pytest.raises(StepExistsError):
        manager.save(30, weights(30))
    manager.save(40, weights(40)).wait()
    again = run.restarted(manager, retention=LatestN(1))
    assert again.all_steps() == [10, 20, 30, 40], "30 is older now; what is adopted is pinned"


def test_F26_run_time_goes_on_over_a_restart(run: Run):
    """F14. Catches: ``EveryNSeconds`` that counts from zero, or the time the job was down."""
    manager = run.open(retention=EveryNSeconds(100))
    manager.save(1, weights(1)).wait()
    run.clock.advance(60)
    manager.close()
    run.clock.advance(10_000)
    manager = run.open(retention=EveryNSeconds(100))
    manager.save(2, weights(2)).wait()  # 60 s of training after step 1: not one to keep
    run.clock.advance(60)
    manager.save(3, weights(3)).wait()
    manager.save(4, weights(4)).wait()
    manager.wait_until_finished()
    assert manager.all_steps() == [1, 3, 4]


def test_F27_restore_holds_a_lease_while_it_loads(run: Run):
    """Catches: a restore that is not seen by a prune."""
    seen = []

    class Looking(FakeDriver):
        def load(self, parts, directories, drop):
            seen.extend(p.name for p in (run.root / ".ckptfsm/readers").iterdir())
            return super().load(parts, directories, drop)

    manager = run.saved(1, driver=Looking())
    manager.restore(TEMPLATE)
    assert len(seen) == 1 and seen[0].startswith("1.")
    assert list((run.root / ".ckptfsm/readers").iterdir()) == []


def test_F28_a_save_without_polls(run: Run):
    """Catches: a save that can never be tracked, without a word."""
    manager = run.open(poll_warning_steps=5)
    manager.save(10, weights(10))
    for step in range(11, 15):
        manager.should_save(step)
    for step in (15, 20):  # the same save, named again
        with pytest.warns(PollMissingWarning, match="save of step 10 .* 5 steps"):
            manager.should_save(step)


LEFT = """
import sys, threading
from pathlib import Path
from ckptfsm.core.config import make_config
from ckptfsm.ranks.manager import Manager
from ckptfsm.adapters.fork import fork_child
from fakes import fake_ports
def hang(storage, job):
    return fork_child(threading.Event().wait, keep=())
def train(step):
    ports = fake_ports(f"{sys.argv[1]}/{step}", launch=hang)
    manager = Manager(ports, make_config({"exit_timeout_s": 0.1}))
    manager.save(step, parts={"x": b"data"})
    return manager
train(10)  # dropped
train(20).abandon()
kept = train(30)
"""


def test_F28_a_program_that_ends_with_a_save_in_flight_is_told(run: Run):
    """Catches: the last save of a job that is never closed, lost without a word."""
    command = [sys.executable, "-c", LEFT, str(run.root)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = (
        "PollMissingWarning: the save of step {} is in flight, and its manager ends without close()"
    )
    told = [step for step in (10, 20, 30) if said.format(step) in done.stderr]
    assert told == [10, 30], "the manager of step 20 was left in order"


def test_F28_polling_is_not_warned_about(run: Run):
    """Catches: a warning at every step of a trainer that does everything right."""
    manager = run.open(poll_warning_steps=3, save_interval_steps=100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.save(1, weights(1))
        for step in range(2, 20):
            manager.should_save(step)
            manager.poll()
        manager.wait_until_finished()
        manager.should_save(40)


# ----------------------------------------------------------------------------- exit, deadlines


def test_F25_leaving_in_order_drains(run: Run):
    """Catches: the last save of a job that is lost because the job ended well."""
    with run.open() as manager:
        handle = manager.save(1, weights(1))
    assert handle.state is State.TRACKED and run.tracker() == "1"
    assert run.open().latest_step() == 1


def test_F25_leaving_with_an_exception_abandons(run: Run):
    """Catches: an exit that hangs in a collective, hides the error, or leaves the writer behind."""
    gate = FifoGate(run.root.parent / "gate")
    run.driver.before_write = gate.hold
    with pytest.raises(KeyError, match="the trainer's own"), run.open() as manager:
        handle = manager.save(1, weights(1))
        child = manager._share.writer.process
        raise KeyError("the trainer's own")
    assert child.poll() is not None and not child.poll().succeeded
    assert not handle.done
    for wait in (handle.wait, partial(manager.wait_for, handle), manager.wait_until_finished):
        with pytest.raises(ManagerClosed, match="before .* finished"):
            wait()
    run.driver.before_write = None
    again = run.open()
    assert again.latest_step() is None and "failed" in {d.result for d in again.recovery.decisions}
    assert run.records[-1].dest is State.DISCARDED
    assert list((run.root / ".ckptfsm/staging").iterdir()) == []
    again.save(1, weights(1)).wait()


def test_F25_a_save_that_was_durable_when_its_manager_was_left_is_finished(run: Run):
    """I2. Catches: ``sys.exit(0)`` after a save with a durable receipt, and a next start that
    resumes from the step before without a word."""
    with pytest.raises(SystemExit), run.open() as manager:
        manager.save(1, weights(1)).wait()
        manager.save(2, weights(2))
        raise SystemExit(0)
    again = run.open()
    restored = again.restore(TEMPLATE)
    assert restored is not None and (restored.step, restored.state["weights"]) == (2, b"w2")
    again.close()


def test_F25_every_rank_leaves_and_the_save_is_finished(run: Run):
    """I2. Catches: a save of two ranks that both left at once, thrown away though every shard was
    durable: rank 0 has not heard of the other's."""

    def leave(transport: ThreadTransport) -> None:
        with rank_manager(run, transport, exit_timeout_s=10.0) as manager:
            manager.save(1, weights(1))
            raise SystemExit(0)

    assert [type(end) for end in run_ranks(2, leave)] == [SystemExit, SystemExit]

    def look(transport: ThreadTransport) -> int | None:
        with rank_manager(run, transport) as manager:
            return manager.latest_step()

    assert run_ranks(2, look) == [1, 1]


def test_F25_a_loss_is_said_when_leaving_and_when_starting(run: Run):
    """Catches: a save that was thrown away without a word."""
    run.saved(1).close()
    gate = FifoGate(run.root.parent / "gate")
    run.driver.before_write = gate.hold
    said = "step 2 was in flight when its manager was left, and is lost: its writer had not ended"
    with (
        pytest.warns(SaveFailedWarning, match=said),
        pytest.raises(KeyError),
        run.open() as manager,
    ):
        manager.save(2, weights(2))
        raise KeyError
    run.driver.before_write = None
    again = run.open()
    with pytest.warns(RecoveryWarning, match=r"step 2 .* in flight \(requested\) .* is lost"):
        again.poll()
    assert again.latest_step() == 1


def test_F25_a_writer_that_failed_as_its_manager_was_left_is_told(run: Run):
    """Catches: an exit that hides why the last save is not there."""
    run.driver.before_write = die
    with (
        pytest.warns(SaveFailedWarning, match="SIGKILL"),
        pytest.raises(KeyError),
        run.open(exit_timeout_s=20.0) as manager,
    ):
        manager.save(1, weights(1))
        raise KeyError


def test_a_handler_that_leaves_inside_a_wait_is_heard(run: Run):
    """Found by review. Catches: an AssertionError in place of the SystemExit of a handler that leaves
    the manager, where the wait goes on to ask a coordinator that is gone."""

    def leave(number: int, frame: object) -> None:
        manager.abandon()
        raise SystemExit(143)

    manager, gate = held(run)
    before = signal.signal(signal.SIGTERM, leave)
    try:
        manager._ports.clock.sleep = lambda seconds: signal.raise_signal(signal.SIGTERM)
        with (
            pytest.raises(SystemExit, match="143"),
            pytest.warns(SaveFailedWarning, match="is lost"),
        ):
            manager.wait_until_finished()
    finally:
        signal.signal(signal.SIGTERM, before)
        del manager._ports.clock.sleep
    assert run.open().latest_step() is None
    assert gate.path


def test_F25_a_disk_that_does_not_say_is_no_loss(run: Run):
    """Found by review. Catches: a warning that a save is lost, which is tracked a moment later."""
    stuck = Stuck("rename", TRACKER)
    manager = run.open(FaultStorage(PosixStorage(run.root), before=stuck), exit_timeout_s=0.6)
    stuck.armed = True
    said = "whether it was finished is not known: the next start decides"
    with pytest.warns(SaveFailedWarning, match=said), pytest.raises(KeyError), manager:
        manager.save(1, weights(1))
        assert manager._share.writer.process.wait(20.0)
        raise KeyError
    stuck.go.set()


def test_F6_an_answer_of_the_disk_is_awaited_as_long_as_one_may_take(run: Run):
    """Found by review. Catches: a rank that is alone, and waits for ``busy_timeout_s`` for the
    earlier request, whatever ``on_busy`` says."""
    stuck = Stuck("mkdir", "staging")
    storage = FaultStorage(PosixStorage(run.root), before=stuck)
    manager = run.open(storage, effect_timeout_s=0.3, busy_timeout_s=20.0, on_busy="skip")
    stuck.armed = True
    for _ in range(2):
        with pytest.raises(DeadlineExceeded) as late:
            manager.save(1, weights(1))
        assert late.value.timeout_s == 0.3
    stuck.go.set()


def test_calls_from_two_threads_are_refused(run: Run):
    """Catches: two threads in one writer's pipe: a bare OSError(9), or a save that counts twice."""
    manager, gate = held(run)
    inside, told = threading.Event(), []

    def wait() -> None:
        manager._ports.clock.sleep = lambda seconds: inside.set()
        manager.wait_until_finished()

    waiting = threading.Thread(target=wait, name="waiting")
    waiting.start()
    assert inside.wait(20.0)
    for call in (manager.poll, partial(manager.save, 9, weights(9)), manager.close):
        with pytest.raises(ConfigError, match="'waiting' is in a call of it") as refused:
            call()
        told.append(refused.value.busy_thread)
    gate.open()
    waiting.join(20.0)
    assert told == ["waiting"] * 3 and not waiting.is_alive()
    manager.poll()
    manager.close()


def test_F7_a_dead_disk_that_was_mended_is_opened_again_by_the_same_process(run: Run):
    """Catches: RootBusy against the caller's pid for good: a root that could not be given back on
    the disk that died, with the advice to stop the other job."""
    dead: list[str] = []

    def fails(index: int, method: str, path: str) -> None:
        if dead:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    class Dying(FaultStorage):
        def listdir(self, path: str) -> list[str]:
            fails(0, "listdir", path)
            return super().listdir(path)

    manager = run.open(Dying(PosixStorage(run.root), before=fails))
    manager.save(1, weights(1)).wait()
    dead.append("dead")
    manager.abandon()
    dead.clear()
    again = run.open()
    assert again.latest_step() == 1
    with pytest.raises(RootBusy, match="another manager of this process: close it or abandon it"):
        run.open()


def test_F25_close_is_bounded(run: Run):
    """I10. Catches: a job that never ends because its last save hangs."""
    manager, _ = held(run, close_timeout_s=0.05)
    with pytest.raises(DeadlineExceeded):
        manager.close()
    assert run.open().latest_step() is None, "the root was given back all the same"


def test_F25_a_wait_that_retries_has_one_deadline(run: Run, monkeypatch):
    """Catches: a close that takes ``close_timeout_s`` once more, after the disk was asked again."""
    manager, over = run.open(), iter([True])
    began = run.clock.monotonic()
    monkeypatch.setattr(Coordinator, "retry", lambda coordinator: run.clock.advance(10.0))
    with pytest.raises(DeadlineExceeded) as caught:
        wait = manager._participant.wait_and_retry
        wait(lambda _: next(over, False), lambda _: False, 10.0, "the disk")
    assert run.clock.monotonic() - began < 20.0 and caught.value.timeout_s == 10.0


def test_I10_a_writer_that_hangs_fails_at_its_deadline(run: Run):
    """Catches: training that goes on for ever without a checkpoint."""
    gate = FifoGate(run.root.parent / "gate")
    run.driver.before_write = gate.hold
    manager = run.open(writer_timeout_s=100.0)
    handle = manager.save(1, weights(1))
    child = manager._share.writer.process
    manager.poll()
    assert not handle.done
    run.clock.advance(101)
    with pytest.raises(SaveFailed, match=f"missed its deadline at {child.pid} "):
        handle.wait()
    assert handle.exception().reason == "writer_hung"
    assert child.wait(30).exitcode == -signal.SIGKILL  # killed, but its end was not waited for


class Stuck:
    """A ``before`` hook of ``FaultStorage`` that blocks one call until it is let go."""

    def __init__(self, method: str, path: str) -> None:
        self.method, self.path = method, path
        self.armed = False
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, index: int, method: str, path: str) -> None:
        if self.armed and method == self.method and self.path in path:
            self.armed = False
            self.reached.set()
            assert self.go.wait(30)


def test_I10_a_disk_that_hangs_does_not_hang_the_training_thread(run: Run):
    """Catches: a save that waits for a dead file system, and one that is forgotten afterwards."""
    stuck = Stuck("mkdir", "staging")
    storage = FaultStorage(PosixStorage(run.root), before=stuck)
    manager = run.open(storage, effect_timeout_s=0.5)
    stuck.armed = True
    with pytest.raises(DeadlineExceeded) as caught:
        manager.save(1, weights(1))
    assert caught.value.timeout_s == 0.5 and stuck.reached.is_set()
    for _ in range(5):
        manager.poll()
    stuck.go.set()
    # The disk came back: a save that was accepted meanwhile is failed and cleaned, a new save
    # works.
    until(manager, lambda: any(r.dest is State.DISCARDED for r in run.records))
    manager.wait_until_finished()
    manager.save(2, weights(2)).wait()
    assert manager.all_steps() == [2]


def test_I10_an_opening_that_was_too_slow_gives_the_root_back(run: Run):
    """Catches: RootBusy against the caller's pid for ever, after a disk that hung while opening."""
    run.saved(1).close()
    stuck = Stuck("fsync_dir", "epochs")
    stuck.armed = True
    storage = FaultStorage(PosixStorage(run.root), before=stuck)
    with pytest.raises(DeadlineExceeded):
        run.open(storage, effect_timeout_s=0.5)
    assert stuck.reached.is_set()
    stuck.go.set()
    deadline = time.monotonic() + 30
    while True:  # the other thread lets go later
        try:
            again = run.open()
            break
        except RootBusy:
            assert time.monotonic() < deadline
    assert again.all_steps() == [1]


def test_I10_a_tracker_write_that_hangs_is_bounded(run: Run):
    """Catches: a wait without end where only the coordinator's thread is stuck."""
    stuck = Stuck("rename", TRACKER)
    storage = FaultStorage(PosixStorage(run.root), before=stuck)
    manager = run.open(storage)
    stuck.armed = True
    handle = manager.save(1, weights(1))
    with pytest.raises(DeadlineExceeded):
        handle.wait(0.2)
    assert not handle.done and manager.latest_step() is None
    stuck.go.set()
    handle.wait()
    assert manager.latest_step() == 1


# ------------------------------------------------------------------ the same step, space, tracker


def test_F5_training_goes_on_without_a_save_that_has_no_room(run: Run):
    """Catches: a full disk that ends a job which asked to be warned, or a save that is then due at every
    step."""
    manager = run.saved(1, on_failure="warn")
    run.driver.expected_bytes = 1 << 60
    with pytest.warns(SaveFailedWarning, match=r"no_room.*bytes_needed=1152921504606846976"):
        handle = manager.save(2, weights(2))
    assert (handle.skipped, handle.done, manager.step_in_flight()) == (True, True, None)
    assert not manager.should_save(3)
    run.driver.expected_bytes = None
    manager.save(3, weights(3)).wait()
    assert manager.all_steps() == [1, 3]


def test_F5_a_save_without_room_is_tried_again_as_often_as_asked(run: Run):
    """Catches: ``save_again`` that raises at once, that never raises, or that ``close`` forgets."""
    manager = run.saved(1, on_failure=2)
    run.driver.expected_bytes = 1 << 60
    for step in (2, 3):
        assert manager.save(step, weights(step)).skipped
        assert manager.should_save(step + 1)
    with pytest.raises(NoRoom):
        manager.save(4, weights(4))
    run.driver.expected_bytes = None
    manager.save(5, weights(5)).wait()
    run.driver.expected_bytes = 1 << 60
    assert manager.save(6, weights(6)).skipped, "a tracked save begins the count anew"
    with pytest.raises(NoRoom):
        manager.close()


@pytest.mark.parametrize("on_failure", ["raise", "warn"])
def test_F5_every_rank_hears_that_there_is_no_room(run: Run, on_failure: str):
    """I10. Catches: a rank that raises alone, or that waits for a save which was refused."""

    def work(transport: ThreadTransport):
        manager = rank_manager(run, transport, on_failure=on_failure)
        manager.save(1, weights(1)).wait()
        manager._ports.driver.expected_bytes = 1 << 60
        try:
            handle = manager.save(2, weights(2))
        finally:
            manager._ports.driver.expected_bytes = None
            manager.save(3, weights(3)).wait()
            manager.close()
        return handle.skipped, manager.all_steps()

    found = run_ranks(2, work)
    if on_failure == "warn":
        assert found == [(True, [1, 3])] * 2
        return
    assert [type(error) for error in found] == [NoRoom, NoRoom]
    assert {error.bytes_needed for error in found} == {1 << 61}
    assert run.steps_on_disk() == [1, 3]


@pytest.mark.parametrize("verify", ["sizes", "digests"])
def test_F5_a_restart_that_keeps_fewer_makes_room_once_it_has_restored(run: Run, verify: str):
    """Catches: a job that can never save again, although its new policy gives checkpoints up. And I2:
    an older one that goes for a newest one of which only the sizes were compared."""
    manager = run.restarted(run.saved(1, 2), retention=LatestN(1), verify=verify)
    manager._storage.free_bytes = lambda: 1 << 40 if run.steps_on_disk() == [2] else 100
    with pytest.raises(NoRoom):
        manager.save(3, weights(3))
    assert run.steps_on_disk() == [1, 2], "nothing goes before the newest was verified"
    manager.restore(TEMPLATE)
    if verify == "sizes":
        with pytest.raises(NoRoom):
            manager.save(3, weights(3))
        assert run.steps_on_disk() == [1, 2]
        return
    manager.save(3, weights(3)).wait()
    assert manager.all_steps() == [3]


def crash_at_rename_to(run: Run, name: str) -> None:
    """Save step 1 in a process that dies right before the rename to ``name``."""

    def job() -> None:
        def before(index: int, method: str, path: str) -> None:
            if method == "rename" and path.endswith(f"-> {name}"):
                os._exit(7)

        storage = FaultStorage(PosixStorage(run.root), before=before)
        ports = fake_ports(lambda create: storage)
        manager = Manager(ports, make_config(QUICK))
        manager.save(1, weights(1)).wait()

    assert fork_child(job, keep=()).wait(30).exitcode == 7


# ------------------------------------------------------------------------------ two on one root


def test_F12_a_takeover_fences_the_first(run: Run):
    """I9. Catches: the older manager going on to save, prune or track."""
    first = run.saved(1, hooks=())
    second = run.open(takeover=True)
    for _ in range(2):  # a fatal error stays
        with pytest.raises(Fenced):
            first.save(2, weights(2))
    second.save(2, {"weights": b"second"}).wait()
    with pytest.raises(Fenced):
        first.pin(1)
    assert run.tracker() == "2" and second.restore(TEMPLATE).state == {"weights": b"second"}
    first.abandon()
    second.save(3, weights(3)).wait()


# ---------------------------------------------------------------------------- foreign requests


def test_I6_foreign_finalizers_run_once_with_their_payload(run: Run):
    """Catches: finalizers run twice, not at all, or with another save's results."""
    manager = run.open()
    for step in (1, 2):
        content = b"x" * step
        handle = manager.save(step, parts={"state": FakeRequest(content)})
        manager.wait_until_finished()
        assert handle.state is State.TRACKED
        assert (run.root / f"iter_{step:07d}" / SHARD).read_bytes() == content
    assert run.driver.finalized == [{"state": {"bucket": 1}}, {"state": {"bucket": 2}}]
    assert run.restarted(manager).all_steps() == [1, 2]


@pytest.mark.parametrize(
    "error", [RuntimeError("queue empty"), BaseException("CheckpointException")]
)
def test_I6_a_finalizer_that_raises_fails_the_save(run: Run, error: BaseException):
    """Catches: an error in a finalizer that is swallowed, retried, or that ends training."""
    run.driver.failures["finalize"] = error
    manager = run.open()
    handle = manager.save(1, parts={"state": FakeRequest(b"x")})
    with pytest.raises(SaveFailed, match=str(error)):
        handle.wait()
    assert len(run.driver.finalized) == 1 and handle.exception().reason == "finalizers"
    manager.wait_until_finished()
    run.driver.failures.clear()
    manager.save(2, weights(2)).wait()
    assert manager.all_steps() == [2]


def test_I10_an_interrupted_finalizer_fails_the_save(run: Run):
    """Catches: a Ctrl-C after which everything waits for a save that never goes on."""
    run.driver.failures["finalize"] = KeyboardInterrupt()
    manager = run.open()
    handle = manager.save(1, parts={"state": FakeRequest(b"x")})
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    with pytest.raises(SaveFailed, match="interrupted"):
        handle.wait()
    manager.wait_until_finished()
    run.driver.failures.clear()
    manager.save(2, weights(2)).wait()


def test_I10_reports_survive_an_interrupt(run: Run, monkeypatch):
    """Catches: a shard that was written and is awaited until the save's deadline."""
    manager = run.open()
    handle = manager.save(1, weights(1))
    exchange, interrupted = CoordinatorClient.exchange, []

    def interrupt(self: CoordinatorClient, outbox: Sequence[Event]) -> Update:
        if any(isinstance(event, ShardReported) for event in outbox) and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return exchange(self, outbox)

    monkeypatch.setattr(CoordinatorClient, "exchange", interrupt)
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    handle.wait()
    assert manager.latest_step() == 1


def test_I10_a_ctrl_c_is_heard_at_the_gate(run: Run):
    """Catches: a Ctrl-C that waits for the deadline of a writer whose disk does not answer."""
    manager = run.open(launch=Unread)
    manager.save(1, weights(1))
    process = manager._share.writer.process
    with pytest.raises(KeyboardInterrupt):
        manager.before_update()
    assert (process.looks, process.outcome) == (1, None)
    process.kill(0.0)
    with pytest.raises(SaveFailed, match="killed by SIGKILL"):
        manager.wait_until_finished()
    manager.close()


def test_a_save_without_memory_for_a_copy_waits_for_its_reader(run: Run):
    """Catches: a trainer that changes its state while a writer reads it, and knows of no gate."""
    manager = run.open(launch=ReadLate)
    handle = manager.save(1, weights(1))
    assert manager._share.writer.has_copy
    handle.wait()
    manager.close()


def test_I10_a_ctrl_c_is_heard_in_a_save_that_waits(run: Run):
    """Catches: a Ctrl-C that waits until a slow disk has the whole state; a writer that reads on
    while the state changes."""
    manager = run.open(launch=UnreadWithoutGate)
    with pytest.raises(KeyboardInterrupt):
        manager.save(1, weights(1))
    (writer,) = manager._share._exiting
    assert (writer.process.looks, writer.process.outcome) == (1, Outcome(-9))
    with pytest.raises(SaveFailed, match="KeyboardInterrupt"):
        manager.wait_until_finished()
    manager.close()


def test_I10_another_exception_of_a_handler_does_not_fail_a_save_that_waits(run: Run):
    """Found by review. Catches: an exception of a user's handler that is taken for an error of the
    writer: the save is lost, and the trainer never hears of it."""
    manager = run.open(launch=Struck)
    with handler_that_raises(), pytest.raises(Elastic):
        manager.save(1, weights(1))
    manager.wait_until_finished()
    assert manager.latest_step() == 1
    manager.close()


def test_a_finalizer_that_leaves_nothing_fails_the_save(run: Run):
    """Catches: a checkpoint without ``.metadata`` that is tracked."""
    manager = run.open()
    handle = manager.save(1, parts={"state": FakeRequest(b"x", lambda where, payload: None)})
    with pytest.raises(SaveFailed, match=r"no \.metadata"):
        handle.wait()
    assert not (run.root / TRACKER).exists()


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ({"tokenizer/merges.txt": ""}, ""),  # some tokenizers have nothing to say there
        ({"integrity.json": "{}", "tokenizer/v": "{}"}, ""),
        ({"integrity.json": ""}, "an empty integrity.json"),
        ({".metadata": ""}, "an empty .metadata"),
        ({"integrity.json.part": "{}"}, "integrity.json.part"),
        ({"notes.txt": "mine"}, "notes.txt"),
    ],
)
def test_files_of_finalizers_beside_the_shards(run: Run, left: dict[str, str], said: str):
    """Catches: a save that fails for a tokenizer's empty file; a torn file of hashes in the manifest."""

    def finalize(where: Path, payload: Any) -> None:
        for name, text in {".metadata": "m", "metadata.json": "{}", **left}.items():
            (where / name).parent.mkdir(exist_ok=True)
            (where / name).write_text(text)

    manager = run.open()
    handle = manager.save(1, parts={"state": FakeRequest(b"x", finalize)})
    if said:
        with pytest.raises(SaveFailed, match=said):
            handle.wait()
    else:
        handle.wait()
        manifest = json.loads((run.root / "iter_0000001/.ckptfsm/manifest.json").read_text())
        assert left.keys() <= {file["name"] for file in manifest["files"]}
    manager.close()


# --------------------------------------------------------------------------------- several ranks


def rank_manager(run: Run, transport: ThreadTransport, driver=None, **settings) -> Manager:
    driver = driver or FakeDriver(transport.rank)
    driver.rank = transport.rank
    ports = fake_ports(run.root, driver=driver, transport=transport, clock=run.clock)
    return Manager(ports, make_config({**QUICK, **settings}))


@pytest.mark.parametrize("call", ["draft", "stage", "merge"])
def test_F31_one_rank_fails_inside_save(run: Run, call: str):
    """I10. Catches: one rank's error that leaves the others in a collective."""
    culprit = 0 if call == "merge" else 1

    def work(transport: ThreadTransport):
        driver = FakeDriver(transport.rank)
        manager = rank_manager(run, transport, driver)
        if transport.rank == culprit:
            driver.failures[call] = OSError(errno.ENOSPC, "No space left on device")
        try:
            manager.save(1, weights(1)).wait()
            outcome = "saved"
        except CkptFsmError as error:
            outcome = f"{error.kind}: {error.message}"
        driver.failures.clear()
        manager.wait_until_finished()
        manager.save(2, weights(2)).wait()
        steps = manager.all_steps()
        manager.close()
        return outcome, steps

    results = run_ranks(2, work)
    assert results[0] == results[1]
    outcome, steps = results[0]
    assert "No space left on device" in outcome and steps == [2]
    assert outcome.startswith("save_failed" if call == "stage" else "save_refused")
    assert call == "merge" or "rank 1" in outcome


def test_F1_one_ranks_writer_is_killed(run: Run):
    """I10. Catches: ranks that disagree on whether a save failed."""

    def work(transport: ThreadTransport):
        driver = FakeDriver(before_write=die if transport.rank == 1 else None)
        manager = rank_manager(run, transport, driver)
        with pytest.raises(WriterDied, match="rank 1: killed by SIGKILL"):
            manager.save(1, weights(1)).wait()
        driver.before_write = None
        manager.wait_until_finished()
        manager.save(1, weights(1)).wait()
        manager.close()
        return manager.latest_step()

    assert run_ranks(2, work) == [1, 1]


def test_I10_ranks_decide_the_same_of_a_blocked_save(run: Run):
    """Catches: ranks of which one skips a save, and the others wait for it in its first exchange."""

    def work(transport: ThreadTransport):
        manager = rank_manager(run, transport, on_failure="warn")
        manager.save(1, weights(1)).wait()
        if transport.rank == 0:
            (run.root / TRACKER).unlink()
            (run.root / TRACKER).mkdir()
        handle = manager.save(2, weights(2))
        seen = [manager.save(3, weights(3)).skipped, manager.explain(2), str(handle.blocked_by)]
        with pytest.raises(DeadlineExceeded) as caught:
            manager.wait_until_finished(0.05)
        seen += [str(caught.value), handle.state]
        if transport.rank == 0:
            (run.root / TRACKER).rmdir()
        manager.save(4, weights(4)).wait()
        manager.close()
        return [*seen, handle.state, manager.all_steps()]

    with pytest.warns(SaveFailedWarning):
        first, second = run_ranks(2, work)
    assert first == second
    assert first[0] is True and first[4:] == [State.FINALIZED, State.TRACKED, [1, 2, 4]]
    assert all(TRACKER in said and "EISDIR" in said for said in first[1:4])


def test_I10_a_rank_that_may_not_finalize_is_heard_before_any_rank_does(run: Run):
    """Catches: finalizers that begin on one rank, and wait in its collectives for the other. That
    rank may not begin: two queues are in use at once, or the results queue is gone."""

    def work(transport: ThreadTransport):
        driver = FakeDriver(transport.rank)
        manager = rank_manager(run, transport, driver)
        if transport.rank == 1:
            driver.failures["before finalize"] = SaveFailed("results of another queue")
        with pytest.raises(SaveFailed, match="rank 1: .*results of another queue"):
            manager.save(1, parts={"state": FakeRequest(b"x")}).wait()
        ran = list(driver.finalized)
        manager.wait_until_finished()
        driver.failures.clear()
        manager.save(2, weights(2)).wait()
        manager.close()
        return ran, manager.all_steps()

    assert run_ranks(2, work) == [([], [2])] * 2


def test_restore_failed_on_every_rank(run: Run):
    """Catches: a rank that trains on while another could not load."""
    run.saved(1).close()

    def work(transport: ThreadTransport):
        manager = rank_manager(run, transport)
        manager.save(2, weights(2)).wait()
        if transport.rank == 1:
            manager._ports.driver.failures["load"] = MemoryError("too large")
        with pytest.raises(RestoreFailed, match="rank 1: MemoryError") as caught:
            manager.restore(TEMPLATE)
        manager.close()
        return caught.value.step

    assert run_ranks(2, work) == [2, 2]


def test_ranks_that_ask_for_different_checkpoints_are_refused(run: Run):
    """F10. Catches: a checkpoint made of shards of two steps, or of different parts."""

    def work(transport: ThreadTransport):
        manager = rank_manager(run, transport)
        with pytest.raises(SaveRefused, match="rank 1 asks for step 2"):
            manager.save(1 + transport.rank, weights(1))
        name = "ab"[transport.rank]
        with pytest.raises(SaveRefused, match="parts that rank 0 does not ask for|other parts"):
            manager.save(5, parts={"x": weights(1), name: weights(1)})
        manager.close()
        return manager.latest_step()

    assert run_ranks(2, work) == [None, None]


def test_a_root_that_cannot_be_opened_raises_on_every_rank(run: Run):
    """Catches: ranks that wait for a coordinator that never was."""
    run.saved(1)

    def work(transport: ThreadTransport):
        rank_manager(run, transport)

    results = run_ranks(2, work)
    assert [type(r) for r in results] == [RootBusy, RootBusy]


def test_preemption_of_one_rank_is_agreed(run: Run):
    """Catches: one rank that saves alone, which would leave it waiting for the others."""

    def work(transport: ThreadTransport):
        manager = rank_manager(run, transport, exchange_every=2, save_interval_s=1e6)
        manager.save(1, weights(1))
        if transport.rank == 1:
            manager.request_save()
        manager.wait_until_finished()
        due = manager.should_save(2), manager.preempted
        manager.save(2, weights(2)).wait()
        manager.close()
        return due

    assert run_ranks(2, work) == [(True, True)] * 2


def test_the_end_that_one_rank_knows_of_is_agreed(run: Run):
    """I10. Catches: a rank that saves alone because its node is taken away, or an end that one rank
    tells again after the others have saved for it."""

    def work(transport: ThreadTransport):
        known = transport.rank == 1
        end = run.clock.unix()
        settings = {"end_of_allocation": lambda: end if known else None}
        manager = rank_manager(run, transport, exchange_every=1, **settings)
        manager.poll()
        due = manager.should_save(1), manager.preempted
        manager.save(1, weights(1)).wait()
        known = True
        manager.poll()
        again = manager.should_save(2)
        manager.close()
        return *due, again

    assert run_ranks(2, work) == [(True, True, False)] * 2


def test_an_idle_poll_costs_no_exchange(run: Run):
    """Catches: a collective in every training step while nothing is in flight."""

    def work(transport: ThreadTransport):
        manager = rank_manager(run, transport)
        manager.save(1, weights(1))
        manager.wait_until_finished()
        before = transport.exchanges
        for _ in range(50):
            manager.poll()
        used = transport.exchanges - before
        manager.close()
        return used

    assert run_ranks(2, work) == [0, 0]


def test_I10_a_rank_that_left_fails_the_others(run: Run):
    """Catches: ranks that wait for one that is gone."""

    def work(transport: ThreadTransport):
        manager = rank_manager(run, transport)
        if transport.rank == 1:
            raise KeyError("the trainer's own")
        try:
            manager.save(1, weights(1))
        finally:
            manager.abandon()

    first, second = run_ranks(2, work)
    assert isinstance(first, RankFailed) and first.ranks == (1,)
    assert isinstance(second, KeyError)
    assert run.open().latest_step() is None


def test_F2_a_simulated_death_is_no_error_to_be_handled(run: Run):
    """Catches: a broad ``except`` around the coordinator's work that survives its death."""

    def before(index: int, method: str, path: str) -> None:
        if "staging" in path and method == "mkdir" and "staging/" in path:
            raise ProcessDead("before mkdir")

    storage = FaultStorage(PosixStorage(run.root), before=before)
    ports = fake_ports(lambda create: storage, executor=InlineExecutor)
    manager = Manager(ports, make_config(QUICK))
    with pytest.raises(ProcessDead):
        manager.save(1, weights(1))


def test_open_storage_is_called_once_per_rank_with_its_role(run: Run):
    """Catches: a rank other than the coordinator that creates another root."""
    asked: list[tuple[int, bool]] = []

    def work(transport: ThreadTransport):
        def open_storage(create: bool) -> PosixStorage:
            asked.append((transport.rank, create))
            return PosixStorage(run.root, create=create)

        ports = fake_ports(open_storage, transport=transport)
        Manager(ports, make_config(QUICK)).close()

    assert run_ranks(2, partial(work)) == [None, None]
    assert sorted(asked) == [(0, True), (1, False)]


def test_an_error_behind_the_launch_ends_the_writer(run: Run, monkeypatch: pytest.MonkeyPatch):
    """Catches: a writer that lives on with a state which its trainer let go of, and that is taken for
    good when the manager is left."""
    gate = FifoGate(run.root.parent / "gate")
    run.driver.before_write = gate.hold
    manager = run.open()

    def fail() -> None:
        raise MemoryError("behind the launch")

    monkeypatch.setattr(run.driver, "accept", fail)
    manager.save(1, weights(1))
    (writer,) = manager._share._exiting
    outcome = writer.process.wait(10.0)
    assert outcome is not None and outcome.exitcode == -signal.SIGKILL
    with pytest.raises(SaveFailed, match="behind the launch"):
        manager.wait_until_finished()


@pytest.mark.parametrize("error", [MemoryError("no memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("at_launch", [True, False])
def test_F13_a_writer_that_outlives_its_broken_launch_keeps_its_space(run: Run, error, at_launch):
    """Catches: space that is given back while a process may still write there, as a Ctrl-C broke off
    the launch, or the first look at the writer failed."""
    writer = Lingering(error, at_launch=at_launch)
    manager = run.open(launch=writer.launch)
    struck = isinstance(error, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt) if struck else nullcontext():
        manager.save(1, weights(1))
    with pytest.raises(DeadlineExceeded):  # it waits for the writer
        manager.wait_until_finished(timeout_s=0.3)
    assert [*(run.root / STAGING).iterdir()] != []
    writer.gone = True
    with pytest.raises(SaveFailed):
        manager.wait_until_finished()
    assert [*(run.root / STAGING).iterdir()] == []
