"""Faults that an attacker of the library found after the layers of proof, each as a short history.

As in ``test_found_by_proof``: production code, and one test for each fault, which says what it would
catch. Those of a trainer's calls are on a real disk, the others on a simulated one.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
from managers import QUICK, TEMPLATE, weights
from roots import (
    FOREIGN,
    FOUR,
    LATER,
    ONE,
    PRECIOUS,
    TWO,
    Strike,
    content,
    fails,
    fails_after,
    in_place,
    is_root,
    judge,
    makes,
    moves,
    names,
    older_format,
    replace,
    saved,
    start,
    start_with,
    states,
    stop,
    ticks,
    tracked,
    write_in_place,
)
from strangers import SHARD, stock_saves

from ckptfsm.adapters.executor import ThreadExecutor
from ckptfsm.adapters.fork import Child, fork_child
from ckptfsm.adapters.local_transport import LocalTransport
from ckptfsm.adapters.posix_storage import OpenPosix, PosixStorage
from ckptfsm.coordinator.coordinator import Coordinator
from ckptfsm.core.config import make_config
from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.errors import (
    CkptFsmError,
    ConfigError,
    DamagedRoot,
    DeadlineExceeded,
    ManagerClosed,
    RecoveryWarning,
    RestoreFailed,
    RootBusy,
    SaveFailed,
    SaveRefused,
    StorageError,
)
from ckptfsm.core.events import Failed, WriterForked, WriterGone
from ckptfsm.core.layout import MANIFEST, QUARANTINE, STAGING, TRACKER, TRASH
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.core.ports import RankJob, Storage
from ckptfsm.core.requests import NothingInFlight, SaveRequest
from ckptfsm.core.retention import LatestN
from ckptfsm.demo.run import DemoOptions, _fresh_root
from ckptfsm.disk import durable
from ckptfsm.disk import inspection as evidence_module
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.disk.stock import StockVerdict
from ckptfsm.ranks.coordinator_client import Update
from ckptfsm.ranks.handle import SaveHandle
from ckptfsm.ranks.manager import Manager
from ckptfsm.ranks.wiring import system_ports
from ckptfsm.testing.fakes import FakeDriver, Gate, ThreadTransport, fake_ports, run_ranks
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.testing.harness import FakeJob, check_root, fake_content
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage
from ckptfsm.writers.plain_files import FilesDriver, FileTree
from ckptfsm.writers.rank_writer import launch_forked


def test_F8_a_file_of_the_same_content_does_not_excuse_a_failed_rename():
    """Found by attack. Catches: a rename that did not happen taken for done, as the old file says the
    same: what is trusted is then a file that was never fsynced, and a power loss takes it."""
    disk = SimDisk()
    storage = FaultStorage(SimStorage(disk, "first"))
    handle = storage.open_exclusive("f")
    durable.write_all(storage, handle, b"content")  # never fsynced
    storage.close(handle)
    storage.before = fails("rename", makes("f"))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        durable.put(storage, "f", b"content", tag="1")
    storage.before, storage.after = None, fails("rename", makes("f"))
    durable.put(storage, "f", b"content", tag="2")  # it happened, and reported an error
    assert [path for method, path in storage.calls if method == "rename"] == [
        "f.tmp-1.0 -> f",
        "f.tmp-2.0 -> f",
    ]
    disk.crash("all_lost")
    assert content(disk, "f") == b"content"


def test_I2_a_pending_prune_does_not_outlive_what_superseded_it():
    """Found by attack. Catches: a prune tried again after the newer checkpoint was withdrawn, while the
    tracker could not be written yet: the latest checkpoint is deleted, and the tracker goes back."""
    disk = SimDisk()
    job = saved(disk, 1, retention=LatestN(1))
    job.coordinator.pin(1, "keep")
    job.save(4)
    job.storage.before = fails("rename", moves(FOUR))
    job.save(6)
    assert states(job)["4.e1.a2"] == "prunable" and FOUR in names(disk)
    job.storage.before = fails("open_exclusive", lambda p: p.startswith(TRACKER), errno.ENOSPC)
    job.coordinator.withdraw_damaged(6, "bit rot")
    assert content(disk, TRACKER) == b"6\n", "it lags"
    job.coordinator.tick()
    assert tracked(job) == [1, 4] and FOUR in names(disk)
    assert content(disk, TRACKER) == b"4\n"


def test_I2_a_withdrawn_step_leaves_the_tracker_though_an_older_prune_is_undecided():
    """Found by attack. Catches: a withdrawal taken for done because an older attempt of the step has
    not left yet: the damaged directory keeps its name and the tracker, and the step is never free."""
    disk = SimDisk()
    job = saved(disk, 1, retention=LatestN(1))
    job.coordinator.pin(1, "keep")
    job.save(2)
    failed = fails_after(job, moves(TWO), "fsync_dir", is_root)
    job.save(3)
    job.storage.after = None

    def before(index: int, method: str, path: str) -> None:
        if method == "fsync_dir" and path == TRASH:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    job.storage.before = before
    job.coordinator.withdraw_damaged(3, "bit rot")
    job.save(2)
    assert failed and states(job)["2.e1.a2"] == "prunable" and content(disk, TRACKER) == b"2\n"
    job.coordinator.withdraw_damaged(2, "bit rot again")
    job.storage.before = None
    job.coordinator.tick()
    assert content(disk, TRACKER) == b"1\n" and TWO not in names(disk)
    older = "2.e1.a2"  # nothing newer is whole any more, and its name was taken
    assert names(disk, QUARANTINE) == [older, "2.e1.a4", "3.e1.a3"]
    job.save(2)
    assert tracked(job) == [1, 2] and judge(disk, 2) == 2


@pytest.mark.parametrize("trouble", ["error", "crash"])
def test_F27_an_adopted_checkpoint_comes_back_for_its_reader(trouble: str, monkeypatch):
    """Found by attack. Catches: an adopted directory, which has no manifest, not known again in the
    trash after its way back failed: it is deleted under the reader that holds a lease on it."""
    accepted = StockVerdict(True, "")
    monkeypatch.setattr(evidence_module, "inspect_stock", lambda *arguments: accepted)
    disk = SimDisk()
    SimStorage(disk, "stranger").mkdir(ONE)
    disk.plant_file(f"{ONE}/__0_0.distcp", b"stock")
    disk.plant_file(TRACKER, b"1")
    job = saved(disk, 2, retention=LatestN(1))
    assert tracked(job) == [1, 2], "what is adopted is pinned"
    lease = ReaderLease("/sim", 1, storage=SimStorage(disk, "reader"))
    failed = []

    def before(index: int, method: str, path: str) -> None:
        if method == "rename" and moves(ONE)(path):
            lease.__enter__()
        if method == "rename" and makes(ONE)(path) and not failed:
            failed.append(path)
            raise ProcessDead(path) if trouble == "crash" else OSError(errno.EIO, "", path)

    job.storage.before = before
    if trouble == "crash":
        with pytest.raises(ProcessDead):
            job.coordinator.unpin(1)
        disk.kill("first")
        job = start(disk, "second", retention=LatestN(1))
    else:
        job.coordinator.unpin(1)
    job.clock.sleep(LATER)
    job.coordinator.tick()
    assert failed and tracked(job) == [1, 2]
    assert content(disk, f"{ONE}/__0_0.distcp") == b"stock"


def test_I3_a_step_waits_for_the_writers_of_its_failed_attempt_in_place():
    """Found by attack. Catches: a save published where a writer of a failed attempt in place may still
    write: that one opens its files by the published name, and overwrites a tracked checkpoint."""
    disk = SimDisk()
    job = start(disk)
    request = SaveRequest(1, FOREIGN, 2, in_place=True, expected_bytes=100)
    of = job.coordinator.request(request)
    job.coordinator.report([WriterForked(of, 0, 2), WriterForked(of, 1, 2)])
    late = f"{ONE}/__1_0.distcp"
    disk.plant_file(late, b"stock")
    job.coordinator.report([Failed(of, "writer_hung"), WriterGone(of, 0)])
    with pytest.raises(SaveRefused, match="old writers"):
        job.save(1)
    replace(disk, late, b"late stock bytes")
    job.coordinator.report([WriterGone(of, 1)])
    job.save(1)
    assert job.acknowledged == [1] and judge(disk, 1) == 1


def test_F31_a_rank_that_cannot_verify_fails_the_restore_on_every_rank(tmp_path: Path):
    """Found by attack. Catches: an error raised between two exchanges of a restore, by a rank that has
    no thread left: the others wait for it, or take its next exchange for the one they are in."""

    def work(transport: ThreadTransport) -> str:
        exhausted: list[bool] = []

        def executor() -> ThreadExecutor:
            if exhausted:
                raise RuntimeError("can't start new thread")
            return ThreadExecutor()

        driver = FakeDriver(transport.rank)
        ports = fake_ports(tmp_path / "root", driver=driver, transport=transport, executor=executor)
        manager = Manager(ports, make_config(QUICK))
        try:
            manager.save(1, weights(1)).wait()
            if transport.rank == 1:
                exhausted.append(True)
            with pytest.raises(RestoreFailed, match="rank 1: RuntimeError: can't start") as caught:
                manager.restore(TEMPLATE)
            exhausted.clear()
            restored = manager.restore(TEMPLATE)
            manager.close()
        finally:
            manager.abandon()
        return f"{caught.value.step}, then {restored.step}"

    assert run_ranks(2, work) == ["1, then 1", "1, then 1"]


def test_F21_a_link_in_place_of_a_directory_is_damage(tmp_path: Path):
    """Found by attack. Catches: a part's directory that became a link (somebody saved space) taken for
    a sick disk: no restart resumes, though an older checkpoint is whole."""
    parts = {"state": {"weights": b"w"}, "actor": {"weights": b"a"}}
    manager = Manager(fake_ports(tmp_path / "root"), make_config(QUICK))
    for step in (1, 2):
        manager.save(step, parts=parts).wait()
    actor = tmp_path / "root/iter_0000002/actor"
    actor.rename(tmp_path / "elsewhere")
    actor.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(RecoveryWarning, match="step 2 is damaged"):
        assert manager.restore(parts={"state": TEMPLATE, "actor": TEMPLATE}).step == 1
    assert manager.all_steps() == [1]
    manager.close()


def test_F27_a_lease_that_cannot_be_given_back_does_not_undo_a_restore(tmp_path: Path, caplog):
    """Found by attack. Catches: a restore that has loaded everything, and raises because its own lease
    cannot be removed; it also hid why a load failed."""
    sick: list[bool] = []

    def before(index: int, method: str, path: str) -> None:
        if sick and method == "unlink" and "/readers/" in path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    driver = FakeDriver()
    storage = FaultStorage(PosixStorage(tmp_path / "root"), before=before)
    manager = Manager(fake_ports(lambda create: storage, driver=driver), make_config(QUICK))
    manager.save(1, weights(1)).wait()
    sick.append(True)
    assert manager.restore(TEMPLATE).step == 1
    assert "lease_not_removed" in [record.event for record in caplog.records]
    driver.failures["load"] = ValueError("another shape")
    with pytest.raises(RestoreFailed, match="another shape"):
        manager.restore(TEMPLATE)
    sick.clear()
    manager.close()


def test_I10_torchs_exception_of_a_question_reaches_every_rank(tmp_path: Path, monkeypatch):
    """Found by attack. Catches: an error that is no ``Exception``, raised by rank 0 alone, between two
    exchanges: the other ranks wait for its answer."""

    class CheckpointException(BaseException):
        pass

    def pin(coordinator: Coordinator, step: int, reason: str) -> None:
        raise CheckpointException("of torch")

    monkeypatch.setattr(Coordinator, "pin", pin)

    def work(transport: ThreadTransport) -> int:
        ports = fake_ports(
            tmp_path / "root", driver=FakeDriver(transport.rank), transport=transport
        )
        manager = Manager(ports, make_config(QUICK))
        with pytest.raises(CkptFsmError, match="of torch"):
            manager.pin(1)
        manager.save(1, weights(1)).wait()
        manager.close()
        return manager.latest_step()

    assert run_ranks(2, work) == [1, 1]


class CtrlC:
    """Interrupts the training thread at a call of the coordinator's thread, once it is armed."""

    def __init__(self, method: str, path: str) -> None:
        self.method, self.path = method, path
        self.armed = False

    def __call__(self, index: int, method: str, path: str) -> None:
        if self.armed and method == self.method and self.path in path:
            self.armed = False
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A job in the background ignores Ctrl-C, and its tests with it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("where", ["asking", "told", "staging", "forking"])
def test_I10_a_save_interrupted_before_its_fork_is_not_in_flight_for_ever(
    where: str, tmp_path: Path
):
    """Found by attack. Catches: a Ctrl-C, which a notebook survives, in the middle of ``save``: the
    attempt waits for a writer that nobody forks, and every later save runs into its deadline."""
    ctrl_c = CtrlC("mkdir", ".ckptfsm/staging/2.")
    storage = FaultStorage(PosixStorage(tmp_path / "root"), before=ctrl_c)
    driver = FakeDriver()

    def hook(record: TransitionRecord) -> None:
        if where == "told" and (record.step, record.dest) == (2, State.REQUESTED):
            raise KeyboardInterrupt

    def launch(storage: Storage, job: RankJob) -> Child:
        if where == "forking" and job.of.step == 2:
            raise KeyboardInterrupt
        return launch_forked(storage, job)

    ports = fake_ports(lambda create: storage, driver=driver, launch=launch)
    manager = Manager(ports, make_config({**QUICK, "busy_timeout_s": 5.0}), (hook,))
    manager.save(1, weights(1)).wait()
    ctrl_c.armed = where == "asking"
    if where == "staging":
        driver.failures["stage"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        manager.save(2, weights(2))
    driver.failures.clear()
    if where != "asking":  # its failure comes out here as on every other rank
        with pytest.raises(SaveFailed, match="interrupted|KeyboardInterrupt"):
            manager.wait_until_finished()
    manager.save(3, weights(3)).wait()
    # A handler waits for the end of the call: what was asked for was begun, and goes on.
    assert manager.all_steps() == ([1, 2, 3] if where == "asking" else [1, 3])
    manager.close()


@pytest.mark.usefixtures("interruptible")
def test_I5_a_writer_whose_fork_was_interrupted_is_not_forgotten(tmp_path: Path):
    """Found by review. Catches: a Ctrl-C between the fork and the line that stores the writer: its
    attempt is cleaned up, and its files may be given to the next one, while it writes."""
    children: list[Child] = []

    def launch(storage: Storage, job: RankJob) -> Child:
        if children:
            return launch_forked(storage, job)
        children.append(fork_child(threading.Event().wait, keep=(), group=True))
        signal.raise_signal(signal.SIGINT)
        return children[0]

    manager = Manager(fake_ports(tmp_path / "root", launch=launch), make_config(QUICK))
    with pytest.raises(KeyboardInterrupt):
        manager.save(1, weights(1))
    manager.poll()
    assert manager.step_in_flight() == 1, "the save goes on"
    os.kill(children[0].pid, signal.SIGKILL)
    with pytest.raises(SaveFailed, match="SIGKILL"):
        manager.wait_until_finished()
    manager.save(1, weights(1)).wait()
    manager.close()


@pytest.mark.usefixtures("interruptible")
def test_I10_an_opening_that_is_interrupted_gives_the_root_back(tmp_path: Path):
    """Found by attack. Catches: a Ctrl-C while the root is opened: the process that survives it finds
    the root owned by itself."""
    ctrl_c = CtrlC("open_exclusive", "journal")
    ctrl_c.armed = True
    storage = FaultStorage(PosixStorage(tmp_path / "root"), before=ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        Manager(fake_ports(lambda create: storage), make_config(QUICK))
    deadline = time.monotonic() + 30
    while True:  # the other thread lets go in its own time
        try:
            Manager(fake_ports(tmp_path / "root"), make_config(QUICK)).close()
            break
        except RootBusy:
            assert time.monotonic() < deadline


SIGNALS = """
import os, signal, sys
from ckptfsm.core.config import make_config
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.fakes import fake_ports

def opened(name):
    ports = fake_ports(f"{sys.argv[1]}/{name}")
    return Manager(ports, make_config({"preemption_signals": ("SIGTERM",)}))

if sys.argv[2] == "handler":
    signal.signal(signal.SIGTERM, lambda number, frame: print("the trainer's", flush=True))
a, b = opened("a"), opened("b")
a.close()
os.kill(os.getpid(), signal.SIGTERM)
for _ in range(10):
    b.poll()
print(b.preempted, flush=True)
b.close()
os.kill(os.getpid(), signal.SIGTERM)
print("alive")
"""


@pytest.mark.parametrize(
    ("trainers", "ends"),
    [
        ("default", (-signal.SIGTERM, ["True"])),
        ("handler", (0, ["True", "the trainer's", "alive"])),
    ],
)
def test_F25_managers_closed_in_the_order_they_were_opened_leave_signals_alone(
    trainers: str, ends: tuple[int, list[str]], tmp_path: Path
):
    """Found by attack. Catches: the first manager taking the second one's handler away, and the second
    putting back the dead first one's: no scheduler can end the process any more."""
    command = [sys.executable, "-c", SIGNALS, str(tmp_path), trainers]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()) == ends


CALLS = {
    "pin": lambda manager: manager.pin(2),
    "wait": lambda manager: manager.wait_until_finished(3),
    "save": lambda manager: manager.save(9, weights(9)),
    "poll": lambda manager: manager.poll(),
    "restore": lambda manager: manager.restore(TEMPLATE),
    "close": lambda manager: manager.close(),
    "abandon": lambda manager: manager.abandon(),
}


@pytest.mark.parametrize("call", CALLS)
def test_F24_a_hook_that_calls_its_manager_is_refused(call: str, tmp_path: Path):
    """Found by attack. Catches: news taken by a call from inside a hook, before those that the hook was
    called for: the manager waits for ever for the end of what has ended."""
    managers: list[Manager] = []
    refused: list[str] = []

    def hook(record: TransitionRecord) -> None:
        if managers and (record.step, record.dest) == (2, State.TRACKED):
            with pytest.raises(ConfigError, match="a hook"):
                CALLS[call](managers[0])
            refused.append(call)

    ports = fake_ports(tmp_path / "root")
    manager = Manager(ports, make_config({**QUICK, "retention": LatestN(1)}), (hook,))
    managers.append(manager)
    for step in (1, 2, 3):
        manager.save(step, weights(step))
        manager.wait_until_finished()
    assert refused == [call] and manager.all_steps() == [3]
    manager.close()


def test_F24_an_interrupted_hook_loses_no_news(tmp_path: Path):
    """Found by attack. Catches: what was told together with the record of an interrupted hook, and is
    never told again: the save stays in flight for this rank."""

    def hook(record: TransitionRecord) -> None:
        if record.dest is State.REQUESTED and record.step == 1:
            raise KeyboardInterrupt

    manager = Manager(fake_ports(tmp_path / "root"), make_config(QUICK))
    of = AttemptId(1, 1, 1)
    manager._participant._hooks = (hook,)
    ends = [(State.ABSENT, State.REQUESTED), (State.REQUESTED, State.FAILED)]
    ends.append((State.FAILED, State.DISCARDED))
    news = [told(of, source, dest) for source, dest in ends]
    numbered = tuple(enumerate((*news, NothingInFlight()), manager._client.taken))
    with pytest.raises(KeyboardInterrupt):
        manager._participant.take_update(Update(numbered))
    assert not manager._participant.view.quiet
    manager._participant.take_update(Update())
    assert manager._participant.view.quiet
    manager.close()


def told(of: AttemptId, source: State, dest: State) -> TransitionRecord:
    return TransitionRecord(
        seq=0,
        step=of.step,
        epoch=of.epoch,
        attempt=of.attempt,
        event="made up",
        source=source,
        dest=dest,
        run_seconds=0.0,
        at="now",
    )


class Stuck:
    """Holds the coordinator's thread at a call, once it is armed, until it is let go."""

    def __init__(self, method: str, path: str) -> None:
        self.method, self.path = method, path
        self.armed = False
        self.go = threading.Event()

    def __call__(self, index: int, method: str, path: str) -> None:
        if self.armed and method == self.method and self.path in path:
            self.armed = False
            assert self.go.wait(30)


@pytest.mark.parametrize("call", ["rollback", "pin"])
def test_I2_a_rollback_that_was_too_slow_is_seen_once_it_is_done(call: str, tmp_path: Path):
    """Found by attack. Catches: ranks that see the steps of before a rollback, for ever, because it was
    done only after its deadline: they do not save where it is due. After a slow ``pin``, of
    which there is no news, they are quiet again."""
    go = threading.Event()

    def work(transport: ThreadTransport) -> list[object]:
        stuck = Stuck("open_exclusive", TRACKER if call == "rollback" else "pins/")
        stuck.go = go
        storage = FaultStorage(PosixStorage(tmp_path / "root"), before=stuck)
        where = (lambda create: storage) if transport.rank == 0 else tmp_path / "root"
        ports = fake_ports(where, driver=FakeDriver(transport.rank), transport=transport)
        settings = {"effect_timeout_s": 0.5, "save_interval_steps": 10, **QUICK}
        manager = Manager(ports, make_config(settings))
        for step in (10, 20, 30):
            manager.save(step, weights(step)).wait()
        manager.wait_until_finished()
        stuck.armed = True
        with pytest.raises(DeadlineExceeded):
            getattr(manager, call)(10)
        manager.poll()
        seen = [manager.all_steps()]
        if transport.rank == 0:
            go.set()
        manager.wait_until_finished()
        seen += [manager.all_steps(), manager.should_save(20), manager._participant.view.quiet]
        idle = transport.exchanges
        manager.poll()
        assert transport.exchanges == idle, "it costs nothing any more"
        manager.close()
        return seen

    after = [[10], True, True] if call == "rollback" else [[10, 20, 30], False, True]
    assert run_ranks(2, work) == [[[10, 20, 30], *after]] * 2


def test_I1_the_demo_leaves_a_living_jobs_root_alone(tmp_path: Path, monkeypatch):
    """Found by attack. Catches: `ckptfsm demo`, started in a directory where a job writes to
    ``runs/demo``, deleting that job's checkpoints."""
    monkeypatch.chdir(tmp_path)
    options = DemoOptions()
    root = _fresh_root(options)
    manager = Manager(fake_ports(root), make_config(QUICK))
    manager.save(1, weights(1)).wait()
    with pytest.raises(RootBusy):
        _fresh_root(options)
    manager.save(2, weights(2)).wait()
    manager.close()
    assert _fresh_root(options) == root and not root.exists()
    root.mkdir()
    (root / "something").write_text("of an earlier demo that did not get far")
    assert _fresh_root(options) == root and not root.exists()


Then = Callable[[SimDisk, FakeJob], FakeJob | None]


class TakenOver:
    """A prune of ``step`` that stops between its check of the epoch and its rename, while a successor
    goes back to 1, and ``then`` something happens."""

    def __init__(self, disk: SimDisk, step: int, then: Then | None = None) -> None:
        self.disk, self.step, self.then = disk, step, then
        self.successor: FakeJob | None = None
        self.stopped = False

    def __call__(self, index: int, method: str, path: str) -> None:
        pruning = path.startswith(f"iter_{self.step:07d} -> ")
        if method == "rename" and pruning and not self.stopped:
            self.stopped = True
            self.successor = start(self.disk, "second", takeover=True)
            self.successor.coordinator.rollback(1)
            if self.then is not None:
                self.successor = self.then(self.disk, self.successor)


def saves_two(disk: SimDisk, successor: FakeJob) -> FakeJob:
    successor.save(2)
    return successor


def pruned_by_a_fenced_one(then: Then | None) -> TakenOver:
    """1, 2, 3 and 4 are saved; 2 is to be pruned, and what stands at its name by then is."""
    disk = SimDisk()
    job = saved(disk, 1, retention=LatestN(2))
    job.coordinator.pin(1, "kept")
    job.save(2)
    job.save(3)
    job.storage.before = taken = TakenOver(disk, 2, then)
    with suppress(CkptFsmError):
        job.save(4)
    disk.kill("first")
    return taken


def test_I1_what_a_fenced_prune_takes_of_a_newer_attempt_is_not_deleted_by_its_successor():
    """Catches: the newest checkpoint, emptied with the trash under an older attempt's name."""
    taken = pruned_by_a_fenced_one(saves_two)
    disk, later = taken.disk, taken.successor
    assert later is not None and tracked(later) == [1, 2]
    ticks(later)
    disk.kill("second")
    assert names(disk, TRASH) == ["2.e1.a2"]
    assert tracked(start(disk, "third")) == [1]
    person = SimStorage(disk, "person")
    person.rename(f"{QUARANTINE}/2.e1.a2.1", "iter_0000002")
    check_root(person, 1)  # it is whole
    disk.kill("person")


def ends_before_stock_saves_two(disk: SimDisk, successor: FakeJob) -> FakeJob | None:
    """The journal's newest segment does not name 2.e1.a2 any more: it lies in quarantine."""
    stop(disk, successor, "second")
    stop(disk, start(disk, "between", takeover=True), "between")
    stock_saves(disk, 2, synced=True)
    return None


def ends_before_another_saves_two(disk: SimDisk, successor: FakeJob) -> FakeJob | None:
    stop(disk, successor, "second")
    stop(disk, start(disk, "between", takeover=True), "between")
    stop(disk, saved(disk, 2, name="another", takeover=True), "another")
    return None


def ends_before_another_format_has_two(disk: SimDisk, successor: FakeJob) -> FakeJob | None:
    stop(disk, successor, "second")
    stop(disk, start(disk, "between", takeover=True), "between")
    older_format(disk, 2)
    return None


def adopts_what_stock_saved(disk: SimDisk, successor: FakeJob) -> FakeJob | None:
    stop(disk, successor, "second")
    stock_saves(disk, 2, synced=True)
    return start(disk, "later", takeover=True)


@pytest.mark.parametrize(
    "then",
    [
        ends_before_stock_saves_two,
        ends_before_another_saves_two,
        ends_before_another_format_has_two,
        adopts_what_stock_saved,
    ],
)
def test_I1_what_a_fenced_prune_takes_of_whoever_came_since_is_kept(then: Then):
    """Catches: the newest checkpoint, tracked or not known yet, emptied with the trash under the name
    of an attempt that nobody knows of any more."""
    taken = pruned_by_a_fenced_one(then)
    disk, later = taken.disk, taken.successor or start(taken.disk, "later")
    ticks(later)
    disk.kill("later")
    ticks(start(disk, "last"))
    kept = names(disk, f"{QUARANTINE}/2.e1.a2.1")
    assert kept and kept[-1] in (SHARD, "__1_0.distcp", "metadata.json", "mp_rank_00")
    assert names(disk, TRASH) == []


def test_F5_a_full_disk_gets_the_space_of_a_failed_save_back():
    """Catches: a disk that stays full for good, as there is no room to journal that the failed save's
    files are in the trash: the journal's block was full, wherever that happens."""
    for earlier in range(30):
        disk = SimDisk()
        job = saved(disk, 1)
        for _ in range(earlier):
            job.fail(job.request(2))
        ticks(job)
        of = job.request(2)
        job.fork(of)
        job.write(of, 0)
        disk.capacity = disk.used
        job.fail(of)
        ticks(job)
        assert names(disk, TRASH) == [], f"after {earlier} failed saves"
        assert disk.capacity is not None and disk.used < disk.capacity


def test_I1_what_takes_the_place_of_an_empty_directory_is_not_deleted():
    """Catches: the newest checkpoint, emptied with the trash: a failed attempt in place was an empty
    directory there, and a fenced clean-up's late rename takes the place of one."""
    disk = SimDisk()
    job = saved(disk, 1)
    request = SaveRequest(2, FOREIGN, 2, expected_bytes=100, in_place=True)
    of = job.coordinator.request(request)
    job.storage.before = Strike("rename", "iter_0000002 ->", ProcessDead("paused"))
    with suppress(ProcessDead, CkptFsmError):
        job.fail(of)
    disk.kill("first")
    late = SimStorage(disk, "late")
    later = start(disk, "second")
    later.save(2)
    with suppress(OSError):  # nothing may be there any more that gives way
        late.rename("iter_0000002", f"{TRASH}/2.e1.a2")
    ticks(later)
    disk.kill("second")
    disk.kill("late")
    start(disk, "third")
    places = [f"{QUARANTINE}/{name}" for name in names(disk, QUARANTINE)]
    whole = [p for p in ("iter_0000002", *places) if SHARD in disk.listed(p)]
    assert whole, "the newest checkpoint is somewhere"


class LandsBetween(FaultStorage):
    """``land`` is called while a rollback looks for 2 in quarantine, and has looked in the trash."""

    def __init__(self, disk: SimDisk, land: Callable[[], None]) -> None:
        super().__init__(SimStorage(disk, "second"))
        self.land, self.last, self.landed = land, "", False

    def listdir(self, path: str) -> list[str]:
        found = super().listdir(path)
        looking = path == QUARANTINE and self.last == TRASH and "3.e1.a3" in found
        if looking and not self.landed:
            self.landed = True
            self.land()
        self.last = path
        return found


def test_I1_what_comes_to_the_trash_behind_a_rollbacks_back_is_kept():
    """Catches: what a rollback promised to keep, deleted, as a fenced prune took it meanwhile."""
    disk = SimDisk()
    job = saved(disk, 1, retention=LatestN(2))
    job.coordinator.pin(1, "kept")
    job.save(2)
    job.save(3)
    job.storage.before = Strike("rename", "iter_0000002 ->", ProcessDead("paused"))
    with suppress(ProcessDead):
        job.save(4)
    disk.kill("first")
    late = partial(SimStorage(disk, "late").rename, "iter_0000002", f"{TRASH}/2.e1.a2")
    storage = LandsBetween(disk, late)
    later = start_with(storage, "second", takeover=True)
    later.coordinator.rollback(1)
    assert storage.landed and names(disk, TRASH) == ["2.e1.a2"]
    ticks(later)
    disk.kill("second")
    disk.kill("late")
    start(disk, "third")
    assert "2.e1.a2" in names(disk, QUARANTINE) and names(disk, TRASH) == []


@pytest.mark.parametrize("starts", [1, 2, 3])
@pytest.mark.parametrize("dies", [False, True])
def test_what_was_pruned_before_a_crash_is_deleted_after_it(starts: int, dies: bool):
    """Catches: space that never comes back. ``dies``: between the record and the last rename."""
    disk = SimDisk()
    job = saved(disk, 1, retention=LatestN(1))
    if dies:
        job.storage.before = Strike("rename", f"{TRASH}/1.e1.a1 ->", ProcessDead("dead"))
        with suppress(ProcessDead):
            job.save(2)
    else:
        job.save(2)
    assert names(disk, TRASH) == ["1.e1.a1" if dies else "gone-1.e1.a1"]
    disk.kill("first")
    for index in range(starts):
        job = start(disk, f"later{index}")
        if index + 1 < starts:
            disk.kill(f"later{index}")
    ticks(job)
    assert names(disk, TRASH) == [] and names(disk, QUARANTINE) == []


def test_I1_what_a_fenced_prune_takes_is_not_deleted_by_its_successor():
    """Catches: the only checkpoint, emptied with the trash by the job that holds it as tracked."""
    disk = SimDisk()
    job = saved(disk, 1, 2, retention=LatestN(2))
    job.storage.before = taken = TakenOver(disk, 1)
    with suppress(CkptFsmError):
        job.save(3)
    disk.kill("first")
    later = taken.successor
    assert later is not None and tracked(later) == [1]
    ticks(later)
    assert names(disk, TRASH) == ["1.e1.a1"]
    disk.kill("second")
    with pytest.raises(DamagedRoot, match="missing; look in .ckptfsm/trash"):
        start(disk, "third")
    person = SimStorage(disk, "person")
    person.rename(f"{TRASH}/1.e1.a1", "iter_0000001")
    disk.kill("person")
    assert tracked(start(disk, "fourth")) == [1]


@pytest.mark.parametrize("how", ["fresh", "rollback"])
def test_I8_an_older_attempt_that_is_put_back_over_a_newer_one_leaves_its_name(how: str):
    """Catches: a start that leaves a name which the next one refuses, or at which no save is taken."""
    disk = SimDisk()
    job = saved(disk, 1, 2)
    if how == "fresh":
        disk.kill("first")
        job = start(disk, "afresh", resume="fresh")
    else:
        job.coordinator.rollback(1)
    job.save(2)
    disk.kill("afresh" if how == "fresh" else "first")
    disk.uproot("iter_0000002")
    person = SimStorage(disk, "person")
    older = next(n for n in names(disk, QUARANTINE) if n.startswith("2."))
    person.rename(f"{QUARANTINE}/{older}", "iter_0000002")
    disk.kill("person")
    later = start(disk, "second", resume="fresh" if how == "fresh" else "fallback")
    assert tracked(later) == ([] if how == "fresh" else [1])
    assert "iter_0000002" not in names(disk)
    later.save(2)
    disk.kill("second")
    assert tracked(start(disk, "third"))[-1] == 2


# --------------------------------------------------------------- what a late rename takes to the trash


def dies_before(job: FakeJob, source: str, work: Callable[[], object]) -> Callable[[], None]:
    """The job pauses right before it renames ``source`` to the trash. Returns that rename."""
    aimed: list[str] = []

    def before(index: int, method: str, path: str) -> None:
        if method == "rename" and path.startswith(f"{source} ->"):
            aimed.append(path)
            raise ProcessDead("paused")

    job.storage.before = before
    with suppress(ProcessDead, CkptFsmError):
        work()
    disk = job.storage.inner.disk
    disk.kill("first")
    _, _, target = aimed[0].partition(" -> ")
    return partial(SimStorage(disk, "late").rename, source, target)


@pytest.mark.parametrize("before_the_successor", [True, False])
def test_I1_what_somebody_saved_over_a_failed_attempt_in_place_is_not_deleted(before_the_successor):
    """Catches: a checkpoint, tracked and pinned, deleted as the left-over of the failed attempt whose
    directory it was saved into, receipts and all."""
    disk = SimDisk()
    job = saved(disk, 1)
    of = in_place(job, 2)
    write_in_place(job, of, 1)
    late = dies_before(job, TWO, partial(job.fail, of))
    stock_saves(disk, 2, PRECIOUS, synced=True)
    if before_the_successor:
        late()
    later = start(disk, "second")
    if not before_the_successor:
        assert tracked(later) == [1, 2]
        late()
    ticks(later)
    disk.kill("second")
    ticks(start(disk, "third"))
    assert content(disk, f"{QUARANTINE}/2.e1.a2/{SHARD}") == PRECIOUS


def test_I1_what_is_pruned_is_not_what_somebody_saved_at_its_name():
    """Catches: what a late rename took to the trash deleted with an adopted one, which has no manifest,
    and which a person had moved away and put back meanwhile."""
    disk = SimDisk()
    stock_saves(disk, 1, synced=True)
    job = start(disk, retention=LatestN(1))
    job.coordinator.unpin(1)
    late = dies_before(job, ONE, partial(job.save, 2))
    person = SimStorage(disk, "person")
    person.rename(ONE, "backup")
    stock_saves(disk, 1, PRECIOUS, tracked=False, synced=True)
    late()
    person.rename("backup", ONE)
    ticks(start(disk, "second", retention=LatestN(1)))
    assert content(disk, f"{QUARANTINE}/1.e1.a1/{SHARD}") == PRECIOUS


@pytest.mark.parametrize("stock", [True, False])
def test_I1_what_is_saved_after_a_prune_is_not_what_was_pruned(stock: bool):
    """Catches: the newest checkpoint deleted under the name of a pruned attempt, as the journal shows
    that as given up."""
    disk = SimDisk()
    job = saved(disk, 1, 2, retention=LatestN(2))
    job.coordinator.pin(1, "kept")
    job.save(3)
    late = dies_before(job, TWO, partial(job.save, 4))
    later = start(disk, "second", retention=LatestN(2))
    later.save(5)
    ticks(later)
    assert tracked(later) == [1, 4, 5]
    later.coordinator.rollback(1)
    if stock:
        stop(disk, later, "second")
        stock_saves(disk, 2, synced=True)
    else:
        later.save(2)
        stop(disk, later, "second")
    late()
    ticks(start(disk, "third"))
    assert [n for n in names(disk, f"{QUARANTINE}/2.e1.a2") if n.endswith(".distcp")]


def gone_back_to_two() -> SimDisk:
    """1, 2 and 3, with a prune of 2 half done: somebody has gone back to 2, and saved it again, before
    a fenced trainer's rename took it to the trash."""
    disk = SimDisk()
    stock_saves(disk, 1, synced=True)
    stock_saves(disk, 2, synced=True)
    job = start(disk, retention=LatestN(1))
    job.coordinator.unpin(2)
    late = dies_before(job, TWO, partial(job.save, 3))
    disk.overwrite(f"{TWO}/{SHARD}", PRECIOUS)
    disk.overwrite(TRACKER, b"2")
    late()
    return disk


def test_I2_what_the_tracker_names_comes_back_from_the_trash():
    """Catches: a prune that a restart finds half done, of a step that somebody has gone back to and
    saved again in the meantime: the tracker names what is deleted."""
    disk = gone_back_to_two()
    later = start(disk, "second", retention=LatestN(1))
    assert content(disk, f"{TWO}/{SHARD}") == PRECIOUS and 2 in tracked(later)


def test_I1_what_a_clean_up_leaves_out_in_place_is_kept():
    """Catches: a part of a later save, complete, deleted in the place of an optional one that an attempt
    in place could not write."""
    disk = SimDisk()
    parts = (PartSpec("state"), PartSpec("extra", "torch_dist", "extra", None, True))
    job = saved(disk, 1)
    of = job.coordinator.request(SaveRequest(2, parts, 2, True, expected_bytes=1))
    job.fork(of)
    job.cannot = frozenset({"extra"})

    def write() -> None:
        for rank in range(2):
            write_in_place(job, of, rank, parts)

    late = dies_before(job, f"{TWO}/extra", write)
    later = start(disk, "second")
    ticks(later)
    later.coordinator.rollback(1)
    new = later.save(2, parts)
    with suppress(OSError):  # what was left out may have its name
        late()
    ticks(later)
    kept = [path for path, data in disk.snapshot().items() if data == fake_content(new, 0)]
    assert any(path.endswith(f"extra/{SHARD}") for path in kept), kept


def test_F6_a_staging_directory_that_left_does_not_come_back():
    """Catches: a failed attempt that a power loss brings back to staging, where nobody ever looks after
    it: the move's fsync had failed, and the second try made another directory durable."""
    disk = SimDisk()
    job = saved(disk, 1)
    of = job.request(2)
    job.fork(of)
    job.write(of, 0)
    failed = fails_after(job, lambda path: path.startswith(STAGING), "fsync_dir", STAGING.__eq__)
    job.fail(of)
    assert failed and job.coordinator.busy
    ticks(job)
    disk.crash("all_lost")
    ticks(start(disk, "second"))
    assert names(disk, STAGING) == []


def test_F5_what_fails_in_place_before_its_first_receipt_is_given_back():
    """Catches: the space of every save in place whose writers died early, kept in quarantine."""
    disk = SimDisk()
    job = saved(disk, 1)
    for _ in range(3):
        of = in_place(job, 2)
        disk.plant_file(f"{TWO}/{SHARD}", bytes(10_000))
        job.fail(of)
        ticks(job)
    assert names(disk, TRASH) == [] and names(disk, QUARANTINE) == [] and TWO not in names(disk)


def test_F16_a_link_in_the_trash_is_put_aside(tmp_path: Path):
    """Catches: a link under an attempt's name, which every opening stumbles over, and never sorts."""
    root = tmp_path / "root"
    with Manager(fake_ports(lambda create: PosixStorage(root)), make_config(QUICK)) as manager:
        manager.save(1, weights(1)).wait()
    (tmp_path / "outside").mkdir()
    (root / TRASH / "7.e1.a9").symlink_to(tmp_path / "outside")
    Manager(fake_ports(lambda create: PosixStorage(root)), make_config(QUICK)).close()
    assert (root / QUARANTINE / "7.e1.a9").is_symlink() and (tmp_path / "outside").is_dir()


def older_format_over_a_failed_one(disk: SimDisk) -> None:
    """A save in place is cut short; a stock trainer saves that step there, in a format nobody judges."""
    job = saved(disk, 1)
    write_in_place(job, in_place(job, 2), 1)
    disk.kill("first")
    SimStorage(disk, "stock").mkdir(f"{TWO}/mp_rank_00")
    disk.kill("stock")
    disk.plant_file(f"{TWO}/mp_rank_00/model_optim_rng.pt", PRECIOUS)
    disk.overwrite(TRACKER, b"2")


@pytest.mark.parametrize("resume", ["fresh", "fallback"])
@pytest.mark.parametrize("tracker", [b"2", b"", b"1"])
def test_I1_what_a_stock_trainer_added_to_a_failed_attempt_is_not_deleted(resume, tracker):
    """Catches: a stock trainer's save deleted as the left-over of an attempt, where the tracker does not
    reach it: a fresh start takes that away first."""
    disk = SimDisk()
    older_format_over_a_failed_one(disk)
    disk.overwrite(TRACKER, tracker)
    ticks(start(disk, "second", resume=resume))
    assert PRECIOUS in disk.snapshot().values()


@pytest.mark.parametrize("failing", [QUARANTINE, ""])
def test_F6_what_a_clean_up_has_moved_to_quarantine_stays_there(failing: str):
    """Catches: a late publish that a clean-up moved aside, and that a power loss brings back for good:
    the move's fsync had failed, and the second try made other directories durable."""
    disk = SimDisk()
    job = saved(disk, 1)
    of = job.request(2)
    job.fork(of)
    job.write(of, 0)
    SimStorage(disk, "late").rename(f"{STAGING}/{of}", TWO)
    disk.plant_file(f"{TWO}/{MANIFEST}", b"torn")
    disk.kill("late")
    failed = fails_after(job, moves(TWO), "fsync_dir", failing.__eq__)
    job.fail(of)
    assert failed and job.coordinator.busy
    ticks(job)
    assert not job.coordinator.busy
    assert [type(each).__name__ for each in disk.possible(TWO)] == ["NoneType"], disk.possible(TWO)
    assert None not in disk.possible(f"{QUARANTINE}/{of}")


def test_I2_strict_says_that_the_tracker_names_what_comes_back():
    """Catches: a warning that a checkpoint is not complete, which is brought back from the trash."""
    disk = gone_back_to_two()
    later = start(disk, "second", opened=False)
    report = later.open()
    assert tracked(later) == [1, 2, 3]
    assert not [warning for warning in report.warnings if "not a complete" in warning]


def test_F5_an_empty_directory_of_a_failed_attempt_in_place_is_removed():
    """Catches: one more directory in quarantine, for good, for every save that could not even begin."""
    disk = SimDisk()
    job = saved(disk, 1)
    for _ in range(3):
        job.fail(in_place(job, 2))
        ticks(job)
    disk.crash("all_lost")
    ticks(start(disk, "second"))
    assert TWO not in names(disk) and names(disk, QUARANTINE) == [] and names(disk, TRASH) == []


def test_I1_what_a_person_renamed_in_the_trash_is_kept():
    """Catches: ``1.e1.a1.bak`` taken for what was moved aside as a second one, and deleted."""
    disk = SimDisk()
    saved(disk, 1, 2, retention=LatestN(1))
    assert names(disk, TRASH) == ["gone-1.e1.a1"]
    disk.kill("first")
    SimStorage(disk, "person").rename(f"{TRASH}/gone-1.e1.a1", f"{TRASH}/1.e1.a1.bak")
    disk.kill("person")
    ticks(start(disk, "second"))
    assert names(disk, TRASH) == ["1.e1.a1.bak"]


def test_F27_of_two_in_the_trash_the_attempts_own_comes_back():
    """Catches: a stranger's save moved to a step's name, and the step itself, which a reader holds,
    withdrawn: a late rename had taken the stranger's to the trash under its name."""
    disk = SimDisk()
    job = saved(disk, 1, retention=LatestN(1))
    job.coordinator.pin(1, "keep")
    job.save(2)
    late = dies_before(job, TWO, partial(job.save, 3))
    person = SimStorage(disk, "person")
    later = start(disk, "second")  # keeps all: step 2 is tracked again
    assert tracked(later) == [1, 2, 3]
    person.rename(TWO, "backup")
    stock_saves(disk, 2, PRECIOUS, tracked=False, synced=True)
    late()
    person.rename("backup", TWO)
    disk.kill("person")
    disk.kill("late")
    lease = ReaderLease("/sim", 2, storage=SimStorage(disk, "reader"))

    def before(index: int, method: str, path: str) -> None:
        if method == "rename" and moves(TWO)(path):
            lease.__enter__()
        if method == "rename" and path.endswith(f"-> {TWO}"):
            raise ProcessDead("dies")

    later.storage.before = before
    with suppress(ProcessDead):
        later.coordinator.delete(2)
    assert len(names(disk, TRASH)) == 2
    disk.kill("second")
    third = start(disk, "third")
    ticks(third)
    assert 2 in tracked(third) and PRECIOUS in disk.snapshot().values()


# ------------------------------------------------------------------- what lies above the root, or beside


def files_manager(root: Path) -> Manager:
    ports = system_ports(LocalTransport(), FilesDriver(), OpenPosix(str(root)))
    return Manager(ports, make_config(QUICK))


def tree(content: str) -> FileTree:
    return FileTree(lambda where: Path(where, "tokenizer.json").write_text(content) and None)


@pytest.mark.parametrize("when", ["before the save", "while its files are made"])
def test_I3_files_never_land_in_the_root_of_another_run(when: str, tmp_path: Path):
    """Found by attack. Catches: a link above the root that is put to another run's while the job goes on
    (``current`` of a deployment): one run's files in the other's checkpoint, which is acknowledged."""
    current = tmp_path / "current"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    current.symlink_to(tmp_path / "a")

    def moves() -> None:
        current.unlink()
        current.symlink_to(tmp_path / "b")

    def make(where: str) -> None:
        moves()
        Path(where).mkdir(parents=True)  # the other run's attempt has the same number
        Path(where, "tokenizer.json").write_text("of run a")

    ours = files_manager(current / "gpt")
    ours.save(1, parts={"t": tree("of run a")}).wait()
    wanted = FileTree(make) if when != "before the save" else tree("of run a")
    if when == "before the save":
        moves()
        theirs = files_manager(current / "gpt")
        theirs.save(1, parts={"t": tree("of run b")}).wait()
        theirs.close()
    with pytest.raises(SaveFailed, match="gpt is not the directory that was opened any more"):
        ours.save(2, parts={"t": wanted}).wait()
    assert (ours.latest_step(), ours.all_steps()) == (1, [1])
    ours.close()


def test_a_job_goes_on_in_the_directory_that_it_opened(tmp_path: Path):
    """Catches: saves that hand out no path, refused or written elsewhere as their root was moved."""
    ours = files_manager(tmp_path / "gpt")
    (tmp_path / "gpt").rename(tmp_path / "old")
    ours.save(1, parts={"x": b"data"}).wait()
    assert (tmp_path / "old/iter_0000001/x").read_bytes() == b"data"
    assert not (tmp_path / "gpt").exists()
    with pytest.raises(SaveFailed, match=r"any more \(FileNotFoundError"):
        ours.save(2, parts={"t": tree("made by path")}).wait()
    ours.close()


def link_to_one_of_two_runs(place: Path) -> Path:
    """``current`` leads to ``a``; ``a`` and ``b`` have a step 1 each, in the root ``gpt``."""
    for name in ("a", "b"):
        (place / name).mkdir()
        run = files_manager(place / name / "gpt")
        run.save(1, parts={"t": tree(f"of run {name}")}).wait()
        run.close()
    current = place / "current"
    current.symlink_to(place / "a")
    return current


@pytest.mark.parametrize("how", ["link", "rename"])
def test_I2_a_restore_does_not_read_another_runs_checkpoint(how: str, tmp_path: Path):
    """Found by attack. Catches: files that are verified in the root that was opened, and loaded from
    what has its path by now."""
    current = link_to_one_of_two_runs(tmp_path)
    ours = files_manager(current / "gpt")
    assert Path(ours.restore(parts={"t": tree("")}).parts["t"], "tokenizer.json").read_text() == (
        "of run a"
    )
    if how == "link":
        current.unlink()
        current.symlink_to(tmp_path / "b")
    else:
        (tmp_path / "a/gpt").rename(tmp_path / "a/gpt.old")
        (tmp_path / "b/gpt").rename(tmp_path / "a/gpt")
    with pytest.raises(StorageError, match="is not the directory that was opened any more"):
        ours.restore(parts={"t": tree("")})
    ours.close()


@pytest.mark.parametrize("when", ["before it is entered", "before it is renewed"])
def test_I7_a_lease_does_not_hand_out_another_runs_path(when: str, tmp_path: Path):
    """Found by review. Catches: an evaluator that reads what no lease keeps, in another run's root."""
    current = link_to_one_of_two_runs(tmp_path)
    lease = ReaderLease(current / "gpt", 1)
    if when == "before it is renewed":
        with lease:
            assert Path(lease.path, "t/tokenizer.json").read_text() == "of run a"
            current.unlink()
            current.symlink_to(tmp_path / "b")
            with pytest.raises(StorageError, match="is not the directory that was opened any more"):
                lease.renew()
        return
    current.unlink()
    current.symlink_to(tmp_path / "b")
    with pytest.raises(StorageError, match="is not the directory that was opened any more"), lease:
        pytest.fail("entered")
    assert [p.name for p in (tmp_path / "a/gpt/.ckptfsm/readers").rglob("*.json")] == []


@pytest.mark.parametrize("does", ["exit", "raise", "close", "abandon", "poll", "save", "wait"])
def test_F13_a_process_that_the_trainer_forks_leaves_its_saves_alone(does: str, tmp_path: Path):
    """Found by attack. Catches: a child of the trainer's own that leaves through the ``with`` block, and
    kills its parent's writer, or hangs there."""
    gate = Gate(tmp_path / "gate")
    driver = FakeDriver()
    driver.before_write = gate.hold
    manager = Manager(fake_ports(tmp_path / "root", driver=driver), make_config(QUICK))
    handle = manager.save(1, weights(1))
    pid = os.fork()
    if pid == 0:
        os._exit(leaves(manager, handle, does))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    gate.open()
    handle.wait()
    assert manager.latest_step() == 1
    manager.close()


def leaves(manager: Manager, handle: SaveHandle, does: str) -> int:
    """In the child: 0 if it was let go at once, and told where it asked for something."""
    calls = {
        "poll": manager.poll,
        "save": partial(manager.save, 2, weights(2)),
        "wait": handle.wait,
    }
    began = time.monotonic()
    try:
        with manager:
            if does in calls:
                calls[does]()
            elif does in ("close", "abandon"):
                getattr(manager, does)()
            else:
                raise {"exit": SystemExit, "raise": ZeroDivisionError}[does]
    except (SystemExit, ZeroDivisionError):
        pass
    except ManagerClosed:
        return 0 if does in calls else 1
    late = time.monotonic() - began >= QUICK["exit_timeout_s"]
    return 2 if late or does in calls else 0


COPIES = """
import shutil, sys, time
from ckptfsm.core.config import make_config
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.fakes import fake_ports
manager = Manager(fake_ports(sys.argv[1]), make_config({}))
manager.save(1, parts={"x": b"data"}).wait()
shutil.copytree(sys.argv[1], sys.argv[1] + ".backup")
print("copied", flush=True)
sys.stdin.read(1)
"""


@contextmanager
def owner_that_copied(root: Path) -> Iterator[subprocess.Popen[str]]:
    """A trainer on the root, which has made a copy of it beside it. It is killed at the end."""
    command = [sys.executable, "-c", COPIES, str(root)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "copied\n"
        yield owner
        owner.kill()


def test_F32_a_root_whose_owner_copied_it_is_busy(tmp_path: Path):
    """Found by attack. Catches: a trainer that reads the file of its lock, to copy the root, and has
    lost the lock by that: a stray start fences it."""
    root = tmp_path / "root"
    with owner_that_copied(root) as owner:
        with pytest.raises(RootBusy) as busy:
            Manager(fake_ports(root), make_config(QUICK))
        assert busy.value.pid == owner.pid
        backup = Manager(fake_ports(f"{root}.backup"), make_config(QUICK))
        assert backup.latest_step() == 1, "the copy names the same owner, who does not have it"
        backup.close()
        taker = Manager(fake_ports(root), make_config({**QUICK, "takeover": True}))
        assert taker.latest_step() == 1
        taker.close()


def test_F2_an_owner_that_was_killed_and_not_reaped_is_dead(tmp_path: Path):
    """Catches: a restart that waits for a zombie, whose parent (a launcher, a container) never reaps."""
    root = tmp_path / "root"
    with owner_that_copied(root) as owner:
        owner.kill()
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
        manager = Manager(fake_ports(root), make_config(QUICK))
        assert manager.latest_step() == 1
        manager.close()
