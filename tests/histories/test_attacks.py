"""Faults that an attacker of the library found, each kept as a test on a simulated disk.

The attacks: one call fails at a bad moment, somebody else changes the root meanwhile, or a step gets
a second life. Each test says what it would catch.
"""

from __future__ import annotations

import errno
import os

import pytest
from roots import (
    FOREIGN,
    LATER,
    ONE,
    TWO,
    destinations,
    fails,
    fails_to_look,
    judge,
    left,
    names,
    replace,
    restarted,
    saved,
    start,
    states,
    stop,
    tracked,
)

from ckptfsm.adapters.executor import InlineExecutor
from ckptfsm.adapters.local_transport import LocalTransport
from ckptfsm.adapters.signals import NoDeferredSignals
from ckptfsm.core.errors import ConfigError, OutcomeUnknown, StepExistsError, StorageError
from ckptfsm.core.layout import EPOCHS, MANIFEST, PINS, PRIVATE, QUARANTINE, READERS, TRACKER, TRASH
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import PartSpec
from ckptfsm.core.requests import SaveRequest
from ckptfsm.core.retention import LatestN
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.ranks.coordinator_client import CoordinatorClient
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage


def forget_everything(disk: SimDisk) -> None:
    """Somebody deletes the private directory of the root; the checkpoints stay."""
    person = SimStorage(disk, "person")
    for path in sorted(disk.snapshot(), key=len, reverse=True):
        if path.startswith(f"{PRIVATE}/"):
            (person.rmdir if person.stat(path).kind == "dir" else person.unlink)(path)
    person.rmdir(PRIVATE)


# --------------------------------------------------------------------------------- I2: the tracker


def test_I2_an_unfinished_rollback_stops_the_coordinator():
    """Catches: saves that are acknowledged after a rollback failed half way, and that a restart
    undoes when it finishes the rollback."""
    disk = SimDisk()
    job = saved(disk, 1, 2, 3)
    job.storage.before = fails("open_exclusive", lambda p: p.startswith(TRACKER), errno.ENOSPC)
    with pytest.raises(OutcomeUnknown):
        job.coordinator.rollback(1)
    with pytest.raises(OutcomeUnknown):
        job.save(4)
    assert job.acknowledged == [1, 2, 3] and judge(disk, 3) == 3
    again = restarted(disk, latest=1)
    assert tracked(again) == [1] and names(disk, QUARANTINE) == ["2.e1.a2", "3.e1.a3"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_I2_what_is_saved_after_a_failed_rollback_stays(code: int):
    """Catches: any one failed call of a rollback that costs a checkpoint saved later."""
    for index in range(1000):
        disk = SimDisk()
        job = saved(disk, 1, 2, 3)
        done = len(job.storage.calls)

        def before(at: int, method: str, path: str, fault: int = done + index) -> None:
            if at == fault:
                raise OSError(code, os.strerror(code), path)

        job.storage.before = before
        try:
            job.coordinator.rollback(1)
        except StorageError:
            pass  # an OutcomeUnknown is one, and fatal
        swept = len(job.storage.calls) <= done + index
        job.storage.before = None
        if job.coordinator.fatal is not None:
            disk.kill("first")
            job = start(disk, "second")
        job.save(9)
        job.coordinator.tick()
        assert judge(disk, 9) == 9
        job.close()
        disk.kill("second")
        restarted(disk, "third", latest=9)
        if swept:
            return
    raise AssertionError("the sweep never came to an end")


@pytest.mark.parametrize("then", ["save", "rollback"])
def test_I2_a_retried_tracker_write_never_goes_back(then: str):
    """Catches: a tracker write, put off by an error after it was done, that is tried again once the
    tracker names something else."""
    disk = SimDisk()
    job = saved(disk, 1, retention=LatestN(5))
    failed = fails_to_look(job, "listdir", lambda p: p == PINS, errno.EIO)
    job.save(2)
    assert failed
    if then == "save":
        job.save(3)
        expected = 3
    else:
        job.coordinator.rollback(1)
        expected = 1
    job.coordinator.tick()
    assert judge(disk, expected) == expected
    restarted(disk, latest=expected)


def test_I2_a_pending_quarantine_leaves_a_newer_attempt_alone():
    """Catches: a quarantine that is tried again by the name of the step, and takes away the
    checkpoint that was saved there meanwhile."""
    disk = SimDisk()
    job = saved(disk, 1, 2)
    job.storage.before = fails("fsync_dir", lambda p: p == QUARANTINE)
    job.coordinator.rollback(1)
    job.save(2)
    job.coordinator.tick()
    assert job.acknowledged == [1, 2, 2] and judge(disk, 2) == 2
    assert names(disk, QUARANTINE) == ["2.e1.a2"]
    restarted(disk, latest=2)


def test_I2_a_pending_prune_leaves_a_newer_attempt_alone():
    """Catches: a prune that is tried again by the name of the step, or a restart that takes the
    first attempt at a step for the second."""
    disk = SimDisk()
    job = saved(disk, 1, retention=LatestN(1))
    job.coordinator.pin(1, "keep")
    job.save(2)
    job.storage.before = fails("fsync_dir", lambda p: p == TRASH)
    job.save(3)
    assert states(job)["2.e1.a2"] == "prunable"
    job.coordinator.withdraw_damaged(3, "bit rot")
    job.save(2)
    job.coordinator.tick()
    assert states(job) == {"1.e1.a1": "tracked", "3.e1.a3": "quarantined", "2.e1.a4": "tracked"}
    assert judge(disk, 2) == 2
    assert tracked(restarted(disk, latest=2)) == [1, 2]


def test_I2_a_strangers_directory_at_the_published_name_is_not_ours():
    """I4. Catches: a rename refused because the name is taken, read as a publish that was done."""
    disk = SimDisk()
    job = saved(disk, 1)

    def before(index: int, method: str, path: str) -> None:
        if method == "rename" and path.endswith(f"-> {TWO}") and TWO not in disk.snapshot():
            SimStorage(disk, "stranger").mkdir(TWO)
            disk.plant_file(f"{TWO}/x", b"junk")

    job.storage.before = before
    of = job.save(2)
    assert job.acknowledged == [1] and disk.snapshot()[TRACKER] == b"1\n"
    assert job.coordinator.ledger.checkpoints[of].state is not State.TRACKED
    assert names(disk, TWO) == ["x"], "what is not ours is left as it is"


# -------------------------------------------------------------------- I8, F21: what cannot be read


def test_I8_a_published_attempt_survives_a_manifest_that_cannot_be_read():
    """Catches: an attempt that is published and not yet journaled, failed and deleted because its
    manifest could not be read back once."""
    disk = SimDisk()
    job = start(disk)
    published = []

    def after(index: int, method: str, path: str) -> None:
        if method == "rename" and path.endswith(f"-> {ONE}"):
            published.append(path)

    def before(index: int, method: str, path: str) -> None:
        if published and method == "pwrite":
            job.storage.before = None
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    job.storage.before, job.storage.after = before, after
    job.save(1)
    assert published and job.storage.before is None and job.acknowledged == []
    failed = fails_to_look(job, "read", lambda p: p == f"{ONE}/{MANIFEST}", errno.EIO, 10)
    job.coordinator.tick()
    assert failed and "failed" not in destinations(job)
    assert tracked(restarted(disk, latest=1)) == [1]


def test_F21_a_manifest_that_cannot_be_read_at_a_restart_is_no_damage():
    """Catches: a good checkpoint sent to quarantine for one error of the file system."""
    disk = SimDisk()
    left(disk, 1, 2)
    before = disk.snapshot()
    job = start(disk, "second", opened=False)
    failed = fails_to_look(job, "read", lambda p: p == f"{TWO}/{MANIFEST}", errno.ESTALE)
    with pytest.raises(OSError) as raised:
        job.open()
    assert failed and raised.value.errno == errno.ESTALE
    disk.kill("second")
    assert {p: v for p, v in before.items() if not p.startswith(PRIVATE)}.items() <= (
        disk.snapshot().items()
    )
    assert names(disk, QUARANTINE) == []
    assert tracked(restarted(disk, "third", latest=2)) == [1, 2]


def test_F21_a_manifest_that_cannot_be_read_at_a_restore_is_no_damage():
    """Catches: a restore that reports a problem with the checkpoint, which then is withdrawn, where
    this process only had no descriptor left."""
    disk = SimDisk()
    job = saved(disk, 1, 2)
    fails_to_look(job, "read", lambda p: p == f"{TWO}/{MANIFEST}", errno.EMFILE)
    with pytest.raises(StorageError):
        job.coordinator.locate(None)
    found = job.coordinator.locate(None)
    assert (found.step, found.problem) == (2, "")
    assert tracked(job) == [1, 2] and judge(disk, 2) == 2


def test_F9_a_stale_listing_in_the_background_stops_nobody():
    """Catches: one error of the file system in housekeeping that is told to every rank as the end of
    the coordinator, or after which nothing is done in the background any more."""
    disk = SimDisk()
    job = saved(disk, 1)
    link = CoordinatorClient(LocalTransport(), 60.0, NoDeferredSignals().hear)
    link.start(job.coordinator, InlineExecutor())
    failed = fails_to_look(job, "listdir", lambda p: p == EPOCHS, errno.ESTALE)
    job.clock.sleep(LATER)
    link.work_in_background()
    assert failed and not link.has_news
    assert link.exchange(()).fatal is None and job.coordinator.fatal is None
    job.save(2)
    job.clock.sleep(LATER)
    assert job.coordinator.wants_tick()
    link.work_in_background()
    assert not job.coordinator.wants_tick(), "the next tick was made"
    assert job.acknowledged == [1, 2] and judge(disk, 2) == 2


# ------------------------------------------------------------------------------- F27, F4: pruning


@pytest.mark.parametrize("trouble", ["error", "crash"])
def test_F27_a_pruned_directory_comes_back_for_a_reader(trouble: str):
    """Catches: a reader that was told that the step is there right before the prune's rename, and
    whose checkpoint is deleted because the way back failed, or because the job died before it."""
    disk = SimDisk()
    job = saved(disk, 1, retention=LatestN(1))
    lease = ReaderLease("/sim", 1, storage=SimStorage(disk, "reader"))

    def before(index: int, method: str, path: str) -> None:
        if method == "rename" and path.startswith(f"{ONE} ->"):
            lease.__enter__()
        if method == "rename" and path.endswith(f"-> {ONE}"):
            job.storage.before = None
            raise OSError(errno.EIO, "x", path) if trouble == "error" else ProcessDead(path)

    job.storage.before = before
    if trouble == "error":
        job.save(2)
        assert states(job)["1.e1.a1"] == "prunable" and ONE not in names(disk)
    else:
        with pytest.raises(ProcessDead):
            job.save(2)
        job = restarted(disk, latest=2, retention=LatestN(1))
    job.coordinator.tick()
    assert ONE in names(disk) and judge(disk, 2) == 2
    assert tracked(job) == [1, 2]
    lease.__exit__(None, None, None)
    job.save(3)
    assert tracked(job) == [3], "nobody reads it any more"


def test_F27_a_lease_that_ends_while_a_tick_reads_it():
    """Catches: a reader that finishes between the listing and the read, and stops the job."""
    disk = SimDisk()
    job = saved(disk, 1)
    lease = ReaderLease("/sim", 1, storage=SimStorage(disk, "reader")).__enter__()
    original, raced = job.storage.read, []

    def read(path: str, limit: int) -> bytes:
        if path.startswith(READERS) and not raced:
            raced.append(path)
            lease.__exit__(None, None, None)
        return original(path, limit)

    job.storage.read = read
    job.coordinator.tick()
    assert raced and job.coordinator.fatal is None
    job.save(2)
    assert judge(disk, 2) == 2


def test_F4_a_retried_prune_is_durable_before_anything_is_deleted():
    """Catches: a prune tried again after the fsync of the root failed, that takes the missing name
    for a durable one: after a power loss the checkpoint is back, and nobody's."""
    disk = SimDisk()
    job = saved(disk, 1, retention=LatestN(1))
    moved = []

    def after(index: int, method: str, path: str) -> None:
        if method == "rename" and path.startswith(f"{ONE} ->"):
            moved.append(path)

    def before(index: int, method: str, path: str) -> None:
        if moved and (method, path) == ("fsync_dir", ""):
            job.storage.before = None
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    job.storage.before, job.storage.after = before, after
    job.save(2)
    assert states(job)["1.e1.a1"] == "prunable"
    job.coordinator.tick()
    assert states(job) == {"2.e1.a2": "tracked"}
    disk.crash("all_lost")
    assert ONE not in names(disk)
    assert tracked(restarted(disk, latest=2, retention=LatestN(1))) == [2]


# ------------------------------------------------------------------------------- a step's second life


@pytest.mark.parametrize("how", ["rollback", "damage"])
def test_I8_a_step_saved_again_after_its_adopted_checkpoint_went(how: str):
    """Catches: adopted checkpoints that went to quarantine and share their names or ids with what is
    saved next, so that a restart quarantines the acknowledged ones."""
    disk = SimDisk()
    left(disk, 1, 2)
    forget_everything(disk)
    job = start(disk)
    assert tracked(job) == [1, 2]
    if how == "rollback":
        job.coordinator.rollback(1)
    else:
        stop(disk, job)
        replace(disk, f"{TWO}/__0_0.distcp", b"gutted")
        job = start(disk)
    assert tracked(job) == [1]
    for step in (2, 3):
        job.save(step)
    assert judge(disk, 3) == 3
    stop(disk, job)
    assert tracked(restarted(disk, latest=3)) == [1, 2, 3]
    assert {ONE, TWO, "iter_0000003"} <= set(names(disk))
    assert len(names(disk, QUARANTINE)) == 1


# --------------------------------------------------------------------- F15, F28, F30: names and files


@pytest.mark.parametrize("file", ["precious.bin", ".metadata"])
def test_F15_an_in_place_save_takes_over_no_files(file: str):
    """Catches: a failed in-place save that deletes what stood in its directory before it."""
    disk = SimDisk()
    job = saved(disk, 1)
    SimStorage(disk, "person").mkdir(TWO)
    disk.plant_file(f"{TWO}/{file}", b"x" * 100)
    with pytest.raises(StepExistsError):
        job.coordinator.request(SaveRequest(2, FOREIGN, job.ranks, in_place=True))
    job.coordinator.tick()
    disk.kill("first")
    start(disk, "second").coordinator.tick()
    kept = [v for v in disk.snapshot().values() if v == b"x" * 100]
    assert len(kept) == 1, "moved aside at most, and not deleted"


def test_F28_a_part_directory_named_like_a_temporary_file_is_refused():
    """I4. Catches: a part's directory that is swept as a leftover out of an acknowledged step."""
    disk = SimDisk()
    job = saved(disk, 1)
    with pytest.raises(ConfigError):
        job.save(2, (PartSpec("model", directory="m.tmp-1"),))
    job.save(2, (PartSpec("model", directory="m"),))
    assert judge(disk, 2) == 2


def test_F30_a_file_name_that_is_no_text_does_not_lock_the_root():
    """Catches: a stray file whose name cannot be journaled, and which no restart gets past."""
    disk = SimDisk()
    left(disk, 1, 2)
    disk.plant_file(f"{TWO}/stray-\udcff.distcp", b"")
    job = restarted(disk, latest=1)
    assert len(names(disk, QUARANTINE)) == 1, "put aside, and not deleted"
    job.save(2)
    stop(disk, job, "second")
    assert tracked(restarted(disk, "third", latest=2)) == [1, 2]
