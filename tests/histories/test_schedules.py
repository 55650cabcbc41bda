"""Schedules that a random search hits too rarely: one call at one moment, and what must not follow.

Each test is the shortest history on which one planted bug (``mutants``) shows; it says which.
"""

from __future__ import annotations

import errno
import os

import pytest
from roots import saved, start, tracked

from ckptfsm.adapters.executor import InlineExecutor
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.config import make_config
from ckptfsm.core.errors import Fenced, OutcomeUnknown, SaveRefused
from ckptfsm.core.events import ShardReported
from ckptfsm.core.layout import MANIFEST, MEGATRON, READERS, TRACKER, TRASH, staging_dir
from ckptfsm.core.lifecycle import State
from ckptfsm.core.ports import FileStat, Identity, RankJob
from ckptfsm.core.requests import SaveRequest
from ckptfsm.core.retention import LatestN
from ckptfsm.disk.durable import lookup
from ckptfsm.disk.journal import read_history
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.fakes import fake_ports
from ckptfsm.testing.faults import FaultStorage, Hook, crash_at
from ckptfsm.testing.harness import (
    FINISHERS,
    PARTS,
    FakeJob,
    FakePart,
    SimClock,
    check_root,
    fake_content,
)
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage
from ckptfsm.testing.writers import SimWriters
from ckptfsm.writers.rank_writer import write_rank

ONE, TWO = "iter_0000001", "iter_0000002"


def look(disk: SimDisk) -> SimStorage:
    return SimStorage(disk, "look")


def test_I2_nothing_is_pruned_while_the_newer_one_is_away():
    """``prune-does-not-look-at-the-newer-one``: somebody moved the newer directory meanwhile."""
    disk = SimDisk()
    job = saved(disk, 1, 2)
    look(disk).rename(TWO, "elsewhere")
    with pytest.raises(SaveRefused, match="taken into use"):
        job.coordinator.delete(1)
    assert ONE in look(disk).listdir("")


def test_I2_a_late_retry_does_not_take_the_tracker_back():
    """``late-retry-takes-the-tracker-back``: repairing it fails, a newer one is saved, then a tick."""
    disk = SimDisk()
    saved(disk, 1).close()
    look(disk).unlink(TRACKER)
    job = start(disk, opened=False)
    job.storage.before = failing_once(TRACKER)
    job.open()
    assert job.coordinator.busy, "the repair is pending"
    job.save(2)
    job.coordinator.tick()
    assert check_root(look(disk), 2) == 2
    assert tracked(job) == [1, 2], "nor takes it anything out of service"


def failing_once(path: str, *, method: str = "open_exclusive") -> Hook:
    """Fails the first call of ``method`` on ``path``, or on what begins with it."""
    failed: list[str] = []

    def hook(index: int, called: str, at: str) -> None:
        if not failed and called == method and at.startswith(path):
            failed.append(at)
            raise OSError(errno.EIO, os.strerror(errno.EIO), at)

    return hook


def test_I2_a_tracker_that_reads_back_as_another_is_not_acknowledged():
    """``tracker-not-read-back``: somebody else writes it in the same moment."""
    disk = SimDisk()
    job = saved(disk, 1)

    def after(index: int, method: str, path: str) -> None:
        if method == "rename" and path.endswith(f"-> {TRACKER}"):
            other = look(disk)
            other.unlink(TRACKER)
            handle = other.open_exclusive(TRACKER)
            other.write(handle, b"1")
            other.close(handle)

    job.storage.after = after
    with pytest.raises(OutcomeUnknown):
        job.save(2)
    assert job.acknowledged == [1]


def test_I2_the_tracker_moves_before_what_it_names_goes_to_quarantine():
    """``tracker-after-the-move-to-quarantine``: a kill at any call of a withdrawal."""
    index = 0
    while True:
        disk = SimDisk()
        job = saved(disk, 1, 2)
        calls = len(job.storage.calls)
        job.storage.before = crash_at(calls + index)
        try:
            job.coordinator.withdraw_damaged(2, "a test says so")
        except ProcessDead:
            assert check_root(look(disk), 1) in (1, 2)
            index += 1
            continue
        break
    assert index > 5 and check_root(look(disk), 1) == 1


def test_I3_a_shard_that_is_not_whole_any_more_is_not_committed():
    """``sizes-are-not-compared-at-finalize``: it is cut between its receipt and the publishing."""
    disk = SimDisk()
    job = saved(disk, 1)
    of = job.request(2)
    job.fork(of)
    job.write(of, 0)
    shard = f"{staging_dir(of)}/__0_0.distcp"
    other = look(disk)
    other.unlink(shard)
    other.close(other.open_exclusive(shard))
    job.write(of, 1)
    assert [c.reason for c in job.coordinator.ledger.in_state(State.FAILED)] == ["shard_missing"]
    assert check_root(look(disk), 1) == 1


def test_I3_what_a_restart_calls_published_is_durable():
    """``found-published-without-fsync``: committed in place, killed before the manifest's name is
    durable; then the restart loses power at any call."""
    disk = SimDisk()
    job = saved(disk, 1, ranks=1)
    of = job.coordinator.request(SaveRequest(2, PARTS, 1, in_place=True))
    job.fork(of)
    part = FakePart("state", "", 0, fake_content(of, 0))
    [(name, size, _)] = write_rank(job.storage, RankJob(of, 0, 1, TWO, (part,)))
    job.storage.after = die_after(f"-> {TWO}/{MANIFEST}")
    with pytest.raises(ProcessDead):
        job.coordinator.report([ShardReported(of, name, 0, 1, size)])
    disk.kill("first")
    index, finished = 0, False
    while not finished:
        again = disk.fork()
        storage = FaultStorage(SimStorage(again, "second"), before=crash_at(index))
        try:
            FakeJob(storage, identity=Identity("sim", 2, "second", "second")).open()
            finished = True
        except ProcessDead:
            index += 1
        again.crash("all_lost")
        for c in read_history(look(again)).ledger.in_state(State.FINALIZED, State.TRACKED):
            manifest = lookup(look(again), f"{MEGATRON.published_name(c.step)}/{MANIFEST}")
            assert manifest is not None, f"call {index}: step {c.step}"
    assert index > 20


def die_after(end: str) -> Hook:
    """Kills the process right after the first call whose path ends so."""

    def hook(index: int, method: str, path: str) -> None:
        if path.endswith(end):
            raise ProcessDead(path)

    return hook


def test_F8_a_rename_that_did_not_happen_publishes_nothing():
    """``published-name-not-read-back``: the error is looked into, not believed and not ignored."""
    disk = SimDisk()
    job = saved(disk, 1)

    def before(index: int, method: str, path: str) -> None:
        if method == "rename" and path.endswith(f"-> {TWO}"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

    job.storage.before = before
    job.save(2)
    assert [c.step for c in job.coordinator.ledger.in_state(State.FAILED)] == [2]
    assert check_root(look(disk), 1) == 1


def test_I1_a_prune_that_did_not_happen_is_not_journaled():
    """``move-does-not-look``: an error of the rename that is neither believed nor looked into."""
    disk = SimDisk()
    job = saved(disk, 1, retention=LatestN(1))
    job.storage.before = failing_once(f"{ONE} ->", method="rename")
    job.save(2)
    assert ONE in look(disk).listdir("")
    assert [c.step for c in job.coordinator.ledger.in_state(State.PRUNABLE)] == [1]
    job.coordinator.tick()
    assert ONE not in look(disk).listdir("") and tracked(job) == [2]


def test_F27_a_leased_step_never_leaves_its_name():
    """``prune-does-not-look-first``: the lease comes after retention looked, before the prune does."""
    disk = SimDisk()
    job = saved(disk, 1, retention=LatestN(1))
    reader = ReaderLease("/sim", 1, storage=SimStorage(disk, "reader"))

    def after(index: int, method: str, path: str) -> None:
        if method == "rename" and path.endswith(f"-> {TRACKER}"):
            job.storage.after = on_prunable

    def on_prunable(index: int, method: str, path: str) -> None:
        written = look(disk).read(path, 1 << 20) if method == "pwrite" else b""
        if b'"dest":"prunable"' in written:
            job.storage.after = None
            reader.__enter__()

    job.storage.after = after
    job.save(2)
    assert job.storage.after is None and tracked(job) == [1, 2]
    moved = [path for method, path in job.storage.calls if method == "rename" and ONE in path]
    assert [path for path in moved if path.startswith(ONE)] == []


def test_I9_a_fenced_one_leaves_the_trash_alone():
    """``emptying-the-trash-is-not-fenced``: what lies there is the successor's to decide about."""
    disk = SimDisk()
    job = saved(disk, 1, 2, retention=LatestN(1))
    trash = look(disk).listdir(TRASH)
    assert trash
    start(disk, "successor", takeover=True)
    with pytest.raises(Fenced):
        job.coordinator.tick()
    assert look(disk).listdir(TRASH) == trash


def test_F27_the_trash_waits_for_a_prune_that_is_undecided():
    """``trash-emptied-before-a-prune-is-decided``: the way back of a reader's step fails at first."""
    disk = SimDisk()
    job = saved(disk, 1, retention=LatestN(1))
    reader = ReaderLease("/sim", 1, storage=SimStorage(disk, "reader"))

    def before(index: int, method: str, path: str) -> None:
        if method == "rename" and path.startswith(f"{ONE} ->"):
            reader.__enter__()
        if method == "rename" and path.endswith(f"-> {ONE}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    job.storage.before = before
    job.save(2)
    assert [c.step for c in job.coordinator.ledger.in_state(State.PRUNABLE)] == [1]
    assert SimStorage(disk, "look").listdir(READERS)
    job.close()  # empties the trash, if nothing in it may still be wanted
    start(disk, "again", retention=LatestN(1))
    assert ONE in look(disk).listdir("") and check_root(look(disk), 2) == 2


def test_I1_what_was_found_moved_stays_moved_after_a_power_loss():
    """``what-was-moved-is-not-settled``: a prune is renamed, its fsync fails, a tick ends it."""
    disk = SimDisk()
    job = saved(disk, 1, retention=LatestN(1))
    job.storage.before = failing_once(TRASH, method="fsync_dir")
    job.save(2)
    job.coordinator.tick()
    assert tracked(job) == [2] and not job.coordinator.ledger.in_state(State.PRUNABLE)
    disk.crash("all_lost")
    assert ONE not in look(disk).listdir("")


def test_I8_a_name_that_cannot_be_read_is_not_a_missing_one():
    """``an-unreadable-name-is-a-missing-one``: EIO for one name, once, while a root is opened."""
    disk = SimDisk()
    saved(disk, 1, 2).close()
    job = start(disk, opened=False)
    stat, sick = job.storage.stat, [TWO]

    def failing(path: str) -> FileStat:
        if path in sick:
            sick.remove(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return stat(path)

    job.storage.stat = failing
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        job.open()
    assert tracked(start(disk, "again")) == [1, 2]


def test_F4_the_real_disk_is_really_asked(tmp_path, monkeypatch):
    """``posix-fsync-...-does-nothing``: only a power loss would show it, and that is not at hand."""
    synced: list[str] = []
    fsync = os.fsync

    def spy(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    storage = PosixStorage(tmp_path)
    monkeypatch.setattr(os, "fsync", spy)
    handle = storage.open_exclusive("file")
    storage.fsync(handle)
    storage.close(handle)
    storage.mkdir("inner")
    storage.fsync_dir("inner")
    storage.fsync_dir("")
    assert synced == [str(tmp_path / "file"), str(tmp_path / "inner"), str(tmp_path)]
    storage.close_root()


def test_I1_nothing_is_cleaned_up_under_a_writer_that_may_live():
    """``gone-is-said-of-the-living``: a writer in an uninterruptible wait survives its SIGKILL."""
    disk, clock = SimDisk(), SimClock()
    writers = Immortal(disk)
    ports = fake_ports(
        lambda create: FaultStorage(SimStorage(disk, "trainer")),
        clock=clock,
        executor=InlineExecutor,
        identity=lambda: Identity("sim", 1, "boot:1", "nonce"),
        launch=writers,
    )
    ports.driver.finishers = FINISHERS
    manager = Manager(ports, make_config({"on_failure": "warn", "writer_timeout_s": 5.0}))
    manager.save(1, {"x": 1})
    clock.now += 10.0
    with pytest.warns(UserWarning):
        for _ in range(5):
            manager.poll()
    staging = look(disk).listdir(".ckptfsm/staging")
    assert len(staging) == 1, "its files were taken from under a writer that may live"
    writers.mortal = True
    for _ in range(5):
        manager.poll()
    assert look(disk).listdir(".ckptfsm/staging") == []


class Immortal(SimWriters):
    """Writers that no kill ends, until ``mortal``."""

    mortal = False

    def __call__(self, storage, job):
        writer = super().__call__(storage, job)
        kill = writer.kill
        writer.kill = lambda timeout_s: self.mortal and kill(timeout_s)
        return writer
