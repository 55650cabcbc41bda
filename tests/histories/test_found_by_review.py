"""Faults that a review and an attack of the finished library found, each as a short history.

As in ``test_found_by_attack``: production code on a simulated disk, and one test for each fault, which
says what it would catch.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
from roots import (
    ONE,
    TWO,
    Strike,
    below,
    content,
    fails_to_look,
    identity,
    in_place,
    names,
    older_format,
    replace,
    saved,
    saved_by_another,
    start,
    start_with,
    ticks,
    tracked,
)
from strangers import SHARD, stock_saves

from ckptfsm.core import events as m
from ckptfsm.core.documents import Pin, encode
from ckptfsm.core.errors import (
    CkptFsmError,
    DamagedRoot,
    Fenced,
    OutcomeUnknown,
    RootBusy,
    StepNotFoundError,
    StorageError,
)
from ckptfsm.core.events import ShardReported
from ckptfsm.core.layout import MANIFEST, MEGATRON, QUARANTINE, TRACKER, TRASH, left_out_name
from ckptfsm.core.lifecycle import State, absent, apply
from ckptfsm.core.parts import PartSpec
from ckptfsm.core.ports import RankJob, Written
from ckptfsm.core.retention import LatestN
from ckptfsm.disk.durable import put
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.testing.harness import FakeJob, FakePart, check_root, fake_content
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage
from ckptfsm.writers.rank_writer import write_rank
from ckptfsm.writers.shard_file import ShardFile


def leave_written(disk: SimDisk, step: int) -> None:
    """A job that dies with all its shards of ``step`` written, before it could publish them."""
    storage = FaultStorage(SimStorage(disk, "dies"))
    job = start_with(storage, "dies")
    of = job.request(step)
    job.fork(of)
    job.write(of, 0)
    storage.before = Strike("open_exclusive", ".metadata", ProcessDead("dies"))
    with pytest.raises(ProcessDead):
        job.write(of, 1)
    disk.kill("dies")


class TakesOver(FaultStorage):
    """Between the move to the trash and the way back: a reader asks, and a successor takes over."""

    def __init__(self, disk: SimDisk) -> None:
        super().__init__(SimStorage(disk, "first"))
        self.after = self.ask
        self.disk = disk
        self.lease = ReaderLease("/sim", 1, storage=SimStorage(disk, "reader"), nonce="r")
        self.successor: FakeJob | None = None

    def ask(self, index: int, method: str, path: str) -> None:
        if method == "rename" and path.startswith(f"iter_0000001 -> {TRASH}"):
            mark = Pin(step=1, reason="reader", nonce="r-1")
            put(self.lease._storage, self.lease._file, encode(mark), tag="r")

    def listdir(self, path: str) -> list[str]:
        """The pruner sees the lease in its second look, and is paused right there."""
        found = super().listdir(path)
        if self.successor is None and path == ".ckptfsm/readers" and found:
            with pytest.raises(StepNotFoundError):
                self.lease.renew()
            self.lease._let_go()
            storage = SimStorage(self.disk, "next")
            self.successor = start_with(storage, "next", takeover=True, retention=LatestN(1))
            assert self.successor.coordinator._engine.give_space_back(3)
        return found


def test_I9_a_fenced_pruner_brings_nothing_back():
    """Catches: half a checkpoint at its published name, because its way back from the trash had no
    check of the epoch, and the successor was emptying the trash."""
    disk = SimDisk()
    storage = TakesOver(disk)
    job = start_with(storage, "first", retention=LatestN(1))
    job.save(1)
    with pytest.raises(Fenced):
        job.save(2)
    assert storage.successor is not None
    check_root(SimStorage(disk, "judge"), 2)


def test_I8_the_last_hope_is_not_failed_by_a_full_disk():
    """Catches: a start from scratch, and the shards in the trash, because the disk was full while the
    only checkpoint that is left was rolled forward."""
    disk = SimDisk()
    saved(disk, 1)
    disk.kill("first")
    leave_written(disk, 2)
    disk.uproot(f"iter_0000001/{SHARD}")
    full = Strike("write", ".metadata", OSError(errno.ENOSPC, "full"))
    job = FakeJob(FaultStorage(SimStorage(disk, "full"), before=full), identity=identity("full"))
    with pytest.raises(StorageError):
        job.open()
    disk.kill("full")
    assert start(disk, "again").coordinator.ledger.latest().step == 2


def test_I2_a_directory_that_the_trainer_made_is_durable_before_the_tracker_names_it():
    """Catches: a tracker that names a directory whose name a power loss takes away."""
    for seed in range(60):
        disk = SimDisk()
        storage = FaultStorage(SimStorage(disk, "first"))
        job = start_with(storage, "first", ranks=1)
        job.save(1)
        SimStorage(disk, "trainer").mkdir("iter_0000002")
        of = in_place(job, 2)
        part = FakePart("state", "", 0, fake_content(of, 0))
        written = write_rank(storage, RankJob(of, 0, 1, MEGATRON.working_dir(of, True), (part,)))
        storage.before = DiesAfterTracker()
        with pytest.raises(ProcessDead):
            job.coordinator.report([ShardReported(of, n, 0, 1, s) for n, s, _ in written])
        disk.crash(random.Random(seed))
        snapshot = disk.snapshot()
        assert int(snapshot[TRACKER]) == 1 or "iter_0000002/.ckptfsm/manifest.json" in snapshot, (
            seed
        )


class DiesAfterTracker:
    """Dies at the fsync that makes the tracker's name durable."""

    def __init__(self) -> None:
        self.renamed = False

    def __call__(self, index: int, method: str, path: str) -> None:
        self.renamed = self.renamed or (method == "rename" and path.endswith(f"-> {TRACKER}"))
        if self.renamed and method == "fsync_dir" and path == "":
            raise ProcessDead("first")


def test_I2_what_is_adopted_is_durable_before_anything_is_pruned_for_it():
    """Catches: our own checkpoint pruned for one that a stock trainer left in the page cache."""
    disk = SimDisk()
    saved(disk, 1)
    disk.kill("first")
    stock_saves(disk, 2)
    job = start(disk, "second", retention=LatestN(1))
    assert tracked(job)[-1] == 2
    disk.crash("all_lost")
    assert tracked(start(disk, "third"))[-1] == 2
    assert content(disk, TRACKER) == b"2\n"


@pytest.mark.parametrize("damage", ["gone", "gutted"])
def test_I2_a_rollback_looks_at_its_target(damage: str):
    """Catches: every good checkpoint moved to quarantine for one that is not whole."""
    disk = SimDisk()
    job = saved(disk, 1, 2, 3)
    disk.uproot("iter_0000001" if damage == "gone" else f"iter_0000001/{SHARD}")
    with pytest.raises(DamagedRoot, match="nothing was rolled back"):
        job.coordinator.rollback(1)
    assert tracked(job) == [1, 2, 3] and content(disk, TRACKER) == b"3\n"
    job.coordinator.rollback(2)
    assert content(disk, TRACKER) == b"2\n"


def test_F16_a_link_inside_an_old_checkpoint_is_damage_of_that_one():
    """Catches: a root that cannot be opened at all for a link in an old checkpoint's directory."""
    disk = SimDisk()
    job = start(disk, "first")
    parts = (PartSpec("state"), PartSpec("actor", directory="actor"))
    for step in (1, 2):
        job.save(step, parts)
    job.close()
    disk.uproot("iter_0000001/actor")
    disk.plant_symlink("iter_0000001/actor", "elsewhere")
    assert tracked(start(disk, "second")) == [2]


def test_I10_an_unexpected_error_stops_the_coordinator():
    """Catches: an attempt that nobody ends, because its report was lost with a bug or the memory."""
    disk = SimDisk()
    job = start(disk, "first")
    of = job.request(1)
    job.fork(of)
    job.write(of, 0)
    job.storage.before = Strike("rename", "iter_0000001", MemoryError("no memory"))
    with pytest.raises(OutcomeUnknown, match="MemoryError"):
        job.write(of, 1)
    assert isinstance(job.coordinator.fatal, OutcomeUnknown)
    with pytest.raises(OutcomeUnknown):
        job.request(2)


def test_F5_a_damaged_manifest_does_not_stop_space_from_coming_back():
    """Catches: a prune that is pending for ever, and a trash that is never emptied beside it."""
    disk = SimDisk()
    job = start(disk, "first", retention=LatestN(2))
    for step in (1, 2):
        job.save(step)
    disk.overwrite("iter_0000001/.ckptfsm/manifest.json", b"{")
    for step in range(3, 8):
        job.save(step)
        job.clock.now += 60
        job.coordinator.tick()
        job.coordinator.tick()
    assert tracked(job) == [6, 7] and not job.coordinator.busy
    left = {path.split("/")[2] for path in disk.snapshot() if path.startswith(f"{TRASH}/")}
    assert not left, "what was pruned is deleted"
    assert any("quarantine/1.e1.a1" in path for path in disk.snapshot())


def test_F5_an_entry_of_the_trash_that_stays_does_not_keep_the_others():
    """Catches: a disk that fills up behind one file that cannot be deleted."""
    disk = SimDisk()
    stuck = Strike("unlink", f"{TRASH}/gone-1.e1.a1/{SHARD}", OSError(errno.EPERM, "immutable"))
    job = start_with(
        FaultStorage(SimStorage(disk, "first"), before=stuck), "first", retention=LatestN(1)
    )
    for step in range(1, 5):
        job.save(step)
        for _ in range(4):
            job.clock.now += 60
            job.coordinator.tick()
    left = {path.split("/")[2] for path in disk.snapshot() if path.startswith(f"{TRASH}/")}
    assert left == {"gone-1.e1.a1"}


def test_F5_a_close_that_fails_gives_the_root_back():
    """Catches: a process that is in its own way, and in its successor's, for a last record on a full
    disk."""
    disk = SimDisk()
    storage = FaultStorage(SimStorage(disk, "first"))
    job = start_with(storage, "first")
    job.save(1)
    storage.before = Strike("pwrite", ".ckptfsm/journal", OSError(errno.ENOSPC, "full"))
    with pytest.raises(StorageError):
        job.close()
    assert tracked(start(disk, "second")) == [1]


def test_I2_nothing_is_pruned_before_the_latest_was_read():
    """Catches: the last good checkpoint pruned at a restart with a smaller keep, before restore found
    that the newest one is damaged."""
    disk = SimDisk()
    saved(disk, 1, 2)
    disk.kill("first")
    path = f"iter_0000002/{SHARD}"
    disk.overwrite(path, content(disk, path)[:-1] + b"?")
    job = start(disk, "second", retention=LatestN(1))
    located = job.coordinator.locate(None)
    assert located is not None and located.step == 2
    job.coordinator.release(located.lease)
    job.coordinator.withdraw_damaged(2, "another content")
    assert tracked(job) == [1]


def test_I1_what_a_stock_trainer_completed_is_not_our_failed_attempts():
    """Catches: a complete checkpoint that the tracker names, moved to the trash, because an attempt in
    place at its step had been killed."""
    disk = SimDisk()
    job = saved(disk, 1)
    in_place(job, 2)
    disk.kill("first")
    stock_saves(disk, 2)
    job = start(disk, "second")
    assert tracked(job) == [1, 2]
    job.close()
    assert f"iter_0000002/{SHARD}" in disk.snapshot() and content(disk, TRACKER) == b"2\n"


def test_I1_a_loadable_directory_in_place_is_never_deleted():
    """Catches: the trash for what foreign finalizers had completed when their job was killed."""
    disk = SimDisk()
    job = saved(disk, 1)
    in_place(job, 2)
    disk.kill("first")
    stock_saves(disk, 2)
    disk.overwrite(TRACKER, b"1")
    start(disk, "second").close()
    assert any(path.startswith(".ckptfsm/quarantine/2.") for path in disk.snapshot())


def test_I2_a_roll_forward_never_takes_the_tracker_back():
    """Catches: a kill in the middle of opening that leaves the tracker below what a stock trainer had
    reached, so that its checkpoints are newer than the tracker for ever."""
    base = SimDisk()
    saved(base, 1)
    base.kill("first")
    leave_written(base, 2)
    for step in (3, 4):
        stock_saves(base, step)
    calls = FaultStorage(SimStorage(base.fork(), "count"))
    start_with(calls, "count")
    for index in range(len(calls.calls)):
        disk = base.fork()
        storage = FaultStorage(SimStorage(disk, "killed"), before=DiesAt(index))
        with pytest.raises(ProcessDead):
            start_with(storage, "killed")
        assert int(content(disk, TRACKER)) == 4, index
        disk.kill("killed")
        assert start(disk, "again").coordinator.ledger.latest().step == 4, index


class FailsAt:
    def __init__(self, index: int, error: BaseException) -> None:
        self.index, self.error = index, error
        self.struck = False

    def __call__(self, index: int, method: str, path: str) -> None:
        if index == self.index:
            self.struck = True
            raise self.error


class DiesAt(FailsAt):
    def __init__(self, index: int) -> None:
        super().__init__(index, ProcessDead("dies"))


def test_I8_what_a_person_puts_back_is_evidence():
    """Catches: a start from scratch without a word, beside a whole checkpoint at its name."""
    disk = SimDisk()
    saved(disk, 1, 2)
    disk.kill("first")
    start(disk, "fresh", resume="fresh").close()
    storage = SimStorage(disk, "person")
    storage.rename(".ckptfsm/quarantine/2.e1.a2", "iter_0000002")
    with pytest.raises(DamagedRoot, match="withdrawn before"):
        start(disk, "second")
    disk.plant_file(TRACKER, b"2")
    assert tracked(start(disk, "third")) == [2]


def test_I4_a_listed_file_is_never_swept():
    """Catches: a part's own file deleted for its name, after its receipt was believed."""
    disk = SimDisk()
    job = start(disk, "first", ranks=1)
    of = job.request(1, (PartSpec("vocab", "file", ranks=(0,)),))
    job.fork(of)
    written = write_rank(
        job.storage, RankJob(of, 0, 1, MEGATRON.working_dir(of, False), (Vocabulary(),))
    )
    job.coordinator.report([ShardReported(of, n, 0, 1, s) for n, s, _ in written])
    assert tracked(job) == [1]
    assert "iter_0000001/bpe.tmp-final.json" in disk.snapshot()


class Vocabulary:
    name, directory = "vocab", ""

    def write(self, storage: Any, location: str) -> Written:
        shard = ShardFile(storage, f"{location}/bpe.tmp-final.json")
        shard.write(b"{}")
        return Written((shard.close_durably("bpe.tmp-final.json"),))


def test_I1_a_pending_quarantine_leaves_an_attempt_in_place_alone():
    """Catches: the directory that a save is being written into, moved aside for an earlier one."""
    disk = SimDisk()
    storage = FaultStorage(SimStorage(disk, "first"))
    job = start_with(storage, "first")
    for step in (1, 2):
        job.save(step)
    storage.after = Strike("fsync_dir", ".ckptfsm/quarantine", OSError(errno.EIO, "sick"))
    job.coordinator.rollback(1)
    storage.after = None
    assert job.coordinator.busy
    of = in_place(job, 2)
    job.clock.now += 60
    job.coordinator.tick()
    assert f"iter_{of.step:07d}" in SimStorage(disk, "judge").listdir("")


def test_F32_a_taken_over_root_is_locked_once_the_one_before_is_dead():
    """Catches: a stray job that opens the root of a living one, because that had taken it over from a
    process that died later, and held no lock since."""
    disk = SimDisk()
    start(disk, "first")
    job = start(disk, "second", takeover=True)
    disk.kill("first")
    job.clock.now += 60
    job.coordinator.tick()
    with pytest.raises(RootBusy):
        start(disk, "stray")
    job.save(1)
    assert tracked(job) == [1]


def test_I10_a_link_at_the_published_name_does_not_stay_in_the_way():
    """Catches: a failed attempt that can never be cleaned up, so that every close takes its deadline."""
    disk = SimDisk()
    job = start(disk, "first")
    of = job.request(1)
    job.fork(of)
    disk.plant_symlink("iter_0000001", "elsewhere")
    job.write(of, 0)
    job.write(of, 1)
    for rank in (0, 1):
        job.coordinator.report([m.WriterGone(of, rank)])
    assert not job.coordinator.busy and of not in job.coordinator.ledger.checkpoints
    assert disk.snapshot()["iter_0000001"] == "-> elsewhere"


def test_F20_what_is_adopted_brings_its_time_and_metrics():
    """Catches: policies that prune the wrong ones after the journal was moved away: run time begins at
    zero again, and the best checkpoint has no metric."""
    disk = SimDisk()
    job = start(disk, "first")
    job.clock.now += 7200
    job.save(1)
    of = job.coordinator.ledger.latest().id
    job.close()
    for name in SimStorage(disk, "person").listdir(".ckptfsm/journal"):
        SimStorage(disk, "person").unlink(f".ckptfsm/journal/{name}")
    again = start(disk, "second")
    adopted = again.coordinator.ledger.checkpoints[of]
    assert adopted.provenance == "adopted" and adopted.run_seconds >= 7200
    again.save(2)
    assert again.coordinator.ledger.latest().run_seconds >= adopted.run_seconds
    metrics = (("loss", 1.5),)
    assert apply(absent(of), m.Adopted(of, 1.0, metrics))[0].metrics == metrics


def test_F16_a_link_in_an_adopted_directory_is_not_followed():
    """Catches: a root that cannot be opened, because a stock run's directory holds a link."""
    disk = SimDisk()
    saved(disk, 1)
    disk.kill("first")
    stock_saves(disk, 2)
    disk.plant_symlink("iter_0000002/tokenizer", "elsewhere")
    assert tracked(start(disk, "second")) == [1, 2]
    assert disk.snapshot()["iter_0000002/tokenizer"] == "-> elsewhere"


# -------------------------------------------------------- what comes back, and what stands at a name


def came_back(disk: SimDisk, fault: int, *, gutted: bool = False) -> FakeJob:
    """Step 1 is deleted, its reader brings it back, and the disk fails one call after the move."""
    job = saved(disk, 1, 2)
    if gutted:
        replace(disk, f"{ONE}/{SHARD}", b"")
    lease = ReaderLease("/sim", 1, storage=SimStorage(disk, "reader"))
    back: list[str] = []

    def before(index: int, method: str, path: str) -> None:
        if method == "rename" and path.startswith(f"{ONE} ->"):
            lease.__enter__()
        if back and method in ("fsync_dir", "pwrite"):
            back.append(path)
            if len(back) == fault + 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        if method == "rename" and path.endswith(f"-> {ONE}"):
            back.append(path)

    job.storage.before = before
    with suppress(CkptFsmError):
        job.coordinator.delete(1)
    return job


@pytest.mark.parametrize("fault", range(1, 8))
@pytest.mark.parametrize("how", ["tick", "rollback"])
def test_I2_what_came_back_gutted_is_looked_at_again_after_an_error(fault: int, how: str):
    """Catches: a look that only the call which moved it takes: the retry finds it at its name."""
    disk = SimDisk()
    job = came_back(disk, fault, gutted=True)
    if how == "rollback":
        job.coordinator.rollback(2)
    ticks(job)
    assert tracked(job) == [2] and not job.coordinator.busy
    assert names(disk, QUARANTINE) == ["1.e1.a1"]


def test_I1_what_came_back_is_durably_there_before_it_counts_again():
    """Catches: a retry that calls it tracked while a power loss can put it into the trash again."""
    disk = SimDisk()
    job = came_back(disk, fault=1)
    ticks(job)
    assert tracked(job) == [1, 2]
    disk.crash("all_lost")
    job = start(disk, "second")
    ticks(job)
    assert tracked(job) == [1, 2] and ONE in names(disk)


def test_F16_a_link_inside_a_step_holds_nothing_up():
    """Catches: a prune or a withdrawal that is tried for ever; a trash that is never emptied."""
    disk = SimDisk()
    job = saved(disk, 1, 2, 3)
    thief = SimStorage(disk, "thief")
    thief.rename(f"{ONE}/.ckptfsm", "elsewhere")
    disk.plant_symlink(f"{ONE}/.ckptfsm", "../elsewhere")
    with suppress(CkptFsmError):
        job.coordinator.delete(1)
    job.coordinator.delete(2)
    ticks(job)
    assert tracked(job) == [3] and not job.coordinator.busy
    assert names(disk, TRASH) == [] and names(disk, QUARANTINE) == ["1.e1.a1"]
    job.coordinator.rollback(3)
    disk.kill("first")
    job = start(disk, "second")
    ticks(job)
    assert tracked(job) == [3] and not job.coordinator.busy


def test_F16_a_mount_at_a_withdrawn_step_stays():
    """Catches: a rename across devices that is tried for ever."""
    disk = SimDisk()
    job = saved(disk, 1, 2)
    SimStorage(disk, "thief").rename(ONE, "elsewhere")
    disk.plant_mount(ONE)
    job.coordinator.withdraw_damaged(1, "a mount")
    ticks(job)
    assert tracked(job) == [2] and not job.coordinator.busy and ONE in names(disk)


def test_I8_a_strangers_directory_at_the_name_of_what_was_moved_aside_is_left_alone():
    """Catches: a save that somebody else has begun, moved to quarantine under an attempt's name."""
    disk = SimDisk()
    for step in (1, 2):
        stock_saves(disk, step)
    job = start(disk)
    job.coordinator.rollback(1)
    aside = names(disk, QUARANTINE)
    assert len(aside) == 1
    disk.kill("first")
    SimStorage(disk, "stock").mkdir(TWO)
    disk.plant_file(f"{TWO}/common.pt", b"a stock save has begun here")
    job = start(disk, "second")
    assert tracked(job) == [1]
    assert TWO in names(disk) and names(disk, QUARANTINE) == aside


def test_I8_a_fresh_start_leaves_no_name_that_the_next_one_stumbles_over():
    """Catches: a link at a tracked step's name that the first fresh start passes over."""
    disk = SimDisk()
    saved(disk, 1).close()
    disk.kill("first")
    SimStorage(disk, "thief").rename(ONE, "elsewhere")
    disk.plant_symlink(ONE, "elsewhere")
    with pytest.raises(DamagedRoot, match="would leave"):
        start(disk, "second", resume="fresh")
    SimStorage(disk, "thief").unlink(ONE)
    assert tracked(start(disk, "third", resume="fresh")) == []


def test_I8_a_torn_manifest_on_its_way_to_quarantine_gets_there():
    """Catches: a fresh start that is killed before the move, after which no start is possible."""
    disk = SimDisk()
    saved(disk, 1).close()
    disk.kill("first")
    replace(disk, f"{ONE}/{MANIFEST}", b"{")
    job = start(disk, "second", opened=False, resume="fresh")

    def before(index: int, method: str, path: str) -> None:
        if method == "rename" and path.startswith(ONE):
            raise ProcessDead(path)

    job.storage.before = before
    with pytest.raises(ProcessDead):
        job.open()
    disk.kill("second")
    assert tracked(start(disk, "third", resume="fresh")) == []
    assert ONE not in names(disk) and names(disk, QUARANTINE)[0] == "1.e1.a1"


@pytest.mark.parametrize("what", ["no manifest", "both names"])
def test_I8_a_fresh_start_that_was_killed_is_completed(what: str):
    """Catches: a directory that a killed fresh start was about to move, taken for a stranger's by the
    next one; the same after a power loss that shows the move at both of its names."""
    disk = SimDisk()
    if what == "both names":
        stock_saves(disk, 1)
        start(disk).close()
        disk.uproot(f"{ONE}/.metadata")
    else:
        saved(disk, 1).close()
        disk.uproot(f"{ONE}/{MANIFEST}")
    disk.kill("first")
    job = start(disk, "second", opened=False, resume="fresh")
    moving: list[str] = []

    def before(index: int, method: str, path: str) -> None:
        if moving or (what == "no manifest" and method == "rename" and path.startswith(ONE)):
            raise ProcessDead(path)
        if method == "rename" and path.startswith(ONE):
            moving.append(path)

    job.storage.before = before
    with pytest.raises(ProcessDead):
        job.open()
    disk.kill("second")
    disk.crash("all_lost")
    assert tracked(start(disk, "third", resume="fresh")) == []
    assert ONE not in names(disk) and "1.e1.a1" in names(disk, QUARANTINE)


def test_I1_a_strangers_directory_at_the_name_of_what_is_in_the_trash_is_left_alone():
    """Catches: what a stock save has begun there, moved to the trash and deleted in its place."""
    disk = SimDisk()
    for step in (1, 2):
        stock_saves(disk, step)
    job = start(disk)
    for step in (1, 2):
        job.coordinator.unpin(step)
    failed: list[str] = []

    def before(index: int, method: str, path: str) -> None:
        if method == "pwrite" and ONE not in names(disk) and not failed:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    job.storage.before = before
    with suppress(CkptFsmError):
        job.coordinator.delete(1)
    assert failed
    SimStorage(disk, "stock").mkdir(ONE)
    disk.plant_file(f"{ONE}/common.pt", b"a stock save has begun here")
    ticks(job)
    assert disk.snapshot()[f"{ONE}/common.pt"] == b"a stock save has begun here"
    assert tracked(job) == [2] and not job.coordinator.busy and names(disk, TRASH) == []


def test_I1_a_prune_of_what_lost_its_manifest_is_not_journaled_as_done():
    """Catches: a directory that is called pruned and stays: the next start adopts it."""
    disk = SimDisk()
    job = saved(disk, 1, 2)
    disk.uproot(f"{ONE}/{MANIFEST}")
    with suppress(CkptFsmError):
        job.coordinator.delete(1)
    ticks(job)
    assert tracked(job) == [2] and not job.coordinator.busy
    assert ONE not in names(disk) and names(disk, QUARANTINE) == ["1.e1.a1"]


@pytest.mark.parametrize("what", ["file", "link", "mount"])
def test_F16_what_stands_at_the_name_of_a_failed_attempt_in_place_stays(what: str):
    """Catches: somebody's file deleted as if it were the attempt; a move that is tried for ever."""
    disk = SimDisk()
    job = saved(disk, 1)
    of = in_place(job, 2)
    disk.uproot(TWO)
    if what == "file":
        disk.plant_file(TWO, b"somebody's")
    elif what == "link":
        disk.plant_symlink(TWO, "elsewhere")
    else:
        disk.plant_mount(TWO)
    job.fail(of)
    ticks(job)
    assert TWO in names(disk) and names(disk, TRASH) == [] and not job.coordinator.busy


def dies_pruning(job: FakeJob, *, leased: bool) -> None:
    """Killed with step 1 moved to the trash; ``leased``: a reader was just told that it is there."""
    disk = job.storage.inner.disk
    lease = ReaderLease("/sim", 1, storage=SimStorage(disk, "reader"))

    def before(index: int, method: str, path: str) -> None:
        if ONE not in names(disk):
            raise ProcessDead(path)
        if leased and method == "rename" and path.startswith(ONE):
            lease.__enter__()

    job.storage.before = before
    with pytest.raises(ProcessDead):
        job.coordinator.delete(1)
    disk.kill("first")


def left_for_the_trash(disk: SimDisk) -> None:
    """Step 1 is in the trash, a reader holds it, and a person made a directory at its name."""
    dies_pruning(saved(disk, 1, 2), leased=True)
    SimStorage(disk, "thief").mkdir(ONE)
    disk.plant_file(f"{ONE}/notes.txt", b"a person's")


@pytest.mark.parametrize("stumbles", ["", "rename", "fsync_dir"])
def test_I7_what_a_reader_holds_is_not_deleted_for_a_strangers_directory(stumbles: str):
    """Catches: recovery that withdraws what somebody made at the name of a checkpoint in the trash, and
    empties the trash; the same while the move to quarantine has failed, or is not durable, and waits."""
    disk = SimDisk()
    left_for_the_trash(disk)
    held = below(disk, TRASH)
    job = start(disk, "second", opened=False)
    failed: list[str] = []
    moving: list[str] = []

    def before(index: int, method: str, path: str) -> None:
        if not moving and method == "rename" and QUARANTINE in path:
            moving.append(path)
        if moving and method == stumbles and len(failed) < 3:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    job.storage.before = before
    job.open()
    ticks(job)
    assert len(failed) == (3 if stumbles else 0)
    assert tracked(job) == [2] and names(disk, TRASH) == [] and not job.coordinator.busy
    assert disk.snapshot()[f"{ONE}/notes.txt"] == b"a person's"
    assert held and below(disk, QUARANTINE) == held


@pytest.mark.parametrize("stays", [True, False])
def test_I7_a_withdrawn_one_that_is_still_in_the_trash_is_not_deleted(stays: bool):
    """Catches: a crash between the record and the move, after which the trash is emptied."""
    disk = SimDisk()
    left_for_the_trash(disk)
    job = start(disk, "second", opened=False)

    def before(index: int, method: str, path: str) -> None:
        if method == "rename" and QUARANTINE in path:
            raise ProcessDead(path)

    job.storage.before = before
    with pytest.raises(ProcessDead):
        job.open()
    disk.kill("second")
    held = below(disk, TRASH)
    assert names(disk, TRASH) == ["1.e1.a1"] and names(disk, QUARANTINE) == []
    if not stays:
        disk.uproot(ONE)
    job = start(disk, "third")
    ticks(job)
    assert names(disk, TRASH) == [] and below(disk, QUARANTINE) == held
    assert tracked(job) == [2] and (f"{ONE}/notes.txt" in disk.snapshot()) == stays


def test_F16_a_fresh_start_refuses_a_mount():
    """Catches: a fresh start that reports success, after which no start but a fresh one is possible."""
    disk = SimDisk()
    saved(disk, 1).close()
    disk.kill("first")
    SimStorage(disk, "thief").rename(ONE, "elsewhere")
    disk.plant_mount(ONE)
    with pytest.raises(DamagedRoot, match=f"would leave.*{ONE}"):
        start(disk, "second", resume="fresh")


def test_I2_a_step_that_was_missing_and_is_saved_again_is_kept():
    """Catches: a stock trainer's save that goes to quarantine, because an adopted checkpoint of its
    step was missing before."""
    disk = SimDisk()
    for step in (1, 2):
        stock_saves(disk, step)
    start(disk).close()
    disk.kill("first")
    disk.uproot(TWO)
    job = start(disk, "second")
    assert tracked(job) == [1] and job.coordinator is not None
    job.close()
    disk.kill("second")
    stock_saves(disk, 2)
    job = start(disk, "third")
    assert tracked(job) == [1, 2] and names(disk, QUARANTINE) == []


def test_I1_what_a_person_moved_to_quarantine_is_not_taken_for_what_stands_at_its_name():
    """Catches: a plan that adopts a stock save, while the prune takes it for the adopted one that it was
    to remove, and moves it to the trash."""
    disk = SimDisk()
    for step in (1, 2):
        stock_saves(disk, step)
    job = start(disk)
    for step in (1, 2):
        job.coordinator.unpin(step)
    first = str(job.coordinator.ledger.in_state(State.TRACKED)[0].id)

    def before(index: int, method: str, path: str) -> None:
        if method == "rename" and path.startswith(ONE):
            raise ProcessDead(path)

    job.storage.before = before
    with pytest.raises(ProcessDead):
        job.coordinator.delete(1)
    disk.kill("first")
    SimStorage(disk, "person").rename(ONE, f"{QUARANTINE}/{first}")
    stock_saves(disk, 1)
    disk.overwrite(TRACKER, b"2")
    job = start(disk, "second")
    ticks(job)
    assert tracked(job) == [1, 2] and names(disk, TRASH) == []
    assert f"{ONE}/{SHARD}" in disk.snapshot() and names(disk, QUARANTINE) == [first]


@pytest.mark.parametrize("what", ["missing", "damaged"])
def test_I2_a_withdrawal_that_is_tried_again_leaves_what_was_saved_meanwhile(what: str):
    """Catches: a move to quarantine whose fsync failed: the second try takes whatever has the name."""
    disk = SimDisk()
    job = saved(disk, 1, 2)
    if what == "missing":
        disk.uproot(TWO)
    failed: list[str] = []

    def before(index: int, method: str, path: str) -> None:
        if method == "fsync_dir" and path == QUARANTINE and not failed:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    job.storage.before = before
    job.coordinator.withdraw_damaged(2, "a reader says so")
    assert failed and TWO not in names(disk) and job.coordinator.busy
    aside = names(disk, QUARANTINE)
    stock_saves(disk, 2)
    ticks(job)
    assert f"{TWO}/{SHARD}" in disk.snapshot() and names(disk, QUARANTINE) == aside
    assert not job.coordinator.busy


@pytest.mark.parametrize("how", ["restart", "fresh", "leased", "taken"])
def test_I1_what_lies_in_the_trash_comes_back_if_nothing_newer_is_whole(how: str):
    """Catches: the only whole checkpoint, deleted because it was to be pruned before the newer one was
    damaged; a start that is refused although it could be brought back."""
    disk = SimDisk()
    dies_pruning(saved(disk, 1, 2), leased=how == "leased")
    held = below(disk, f"{TRASH}/1.e1.a1")
    disk.uproot(f"{TWO}/{SHARD}")
    if how == "taken":
        stock_saves(disk, 1)
    job = start(disk, "second", resume="fresh" if how == "fresh" else "fallback")
    ticks(job)
    assert names(disk, TRASH) == [] and held
    if how in ("fresh", "taken"):
        assert below(disk, f"{QUARANTINE}/1.e1.a1") == held
        assert tracked(job) == ([1] if how == "taken" else [])
    else:
        assert tracked(job) == [1] and content(disk, TRACKER) == b"1\n" and below(disk, ONE) == held


def test_I1_a_prune_tried_again_comes_back_if_the_newer_one_was_withdrawn():
    """Catches: a retry that remembers which newer one made it removable."""
    disk = SimDisk()
    job = saved(disk, 1, 2, 3)
    failed: list[str] = []

    def before(index: int, method: str, path: str) -> None:
        if method == "fsync_dir" and path == TRASH and not failed:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    job.storage.before = before
    with suppress(CkptFsmError):
        job.coordinator.delete(2)
    assert failed and TWO not in names(disk)
    job.coordinator.withdraw_damaged(3, "bit rot")
    ticks(job)
    assert tracked(job) == [1, 2] and content(disk, TRACKER) == b"2\n" and names(disk, TRASH) == []


def test_F27_a_part_that_was_left_out_is_not_taken_for_its_checkpoint():
    """Catches: half a checkpoint that is brought back to its name for a reader."""
    disk = SimDisk()
    job = saved(disk, 1, 2)
    part = f"{TRASH}/{left_out_name(m.AttemptId(1, 1, 1))}"
    SimStorage(disk, "first").mkdir(part)
    disk.plant_file(f"{part}/{SHARD}", b"half")
    dies_pruning(job, leased=True)
    held = below(disk, f"{TRASH}/1.e1.a1")
    job = start(disk, "second")
    ticks(job)
    assert tracked(job) == [1, 2] and below(disk, ONE) == held and names(disk, TRASH) == []


@pytest.mark.parametrize("dies", [*range(0, 60, 3), 1000])
def test_I8_what_another_run_saved_at_a_step_that_was_deleted_is_adopted(dies: int):
    """Catches: a save that is moved to quarantine at one start, and adopted if a crash came between."""
    disk = SimDisk()
    saved(disk, 1, 2).close()
    disk.kill("first")
    saved_by_another(disk)
    job = start(disk, "second", opened=False)
    calls: list[str] = []

    def before(index: int, method: str, path: str) -> None:
        calls.append(path)
        if len(calls) > dies:
            raise ProcessDead(path)

    job.storage.before = before
    with suppress(ProcessDead):
        job.open()
    disk.kill("second")
    assert tracked(start(disk, "third")) == [1, 2] and names(disk, QUARANTINE) == []


@pytest.mark.parametrize("trouble", ["full", "torn plan"])
def test_I8_a_start_that_was_refused_is_refused_again(trouble: str):
    """Catches: a second start that finds the record of the lost checkpoint in order, and begins from
    zero because what was to be rolled forward cannot be."""
    disk = SimDisk()
    saved(disk, 1)
    disk.kill("first")
    leave_written(disk, 2)
    disk.uproot(ONE)
    disk.uproot(TRACKER)
    if trouble == "torn plan":
        planned = next(p for p in disk.snapshot() if "/planned/" in p and p.endswith(".bin"))
        replace(disk, planned, b"?" * len(content(disk, planned)))
    for who in ("second", "third", "fourth", "fifth"):
        job = start(disk, who, opened=False)
        if trouble == "full":
            job.storage.before = Strike("write", ".metadata", OSError(errno.ENOSPC, "full"))
        with pytest.raises((StorageError, DamagedRoot)):
            job.open()
        disk.kill(who)


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize(
    ("when", "what"), [("moved", "notes.txt"), ("moved", SHARD), ("never there", "notes.txt")]
)
def test_I1_a_persons_directory_at_the_name_of_a_failed_attempt_is_not_deleted(restart, when, what):
    """Catches: a clean-up that is tried again, or finds what the attempt never made, and deletes
    whatever has the name."""
    disk = SimDisk()
    job = saved(disk, 1)
    of = in_place(job, 2)
    if when == "moved":
        job.storage.before = Strike("fsync_dir", TRASH, OSError(errno.EIO, "io"))
        job.fail(of)
        job.storage.before = None
    else:
        disk.uproot(TWO)
    if restart:
        disk.kill("first")
    SimStorage(disk, "person").mkdir(TWO)
    disk.plant_file(f"{TWO}/{what}", b"a person's")
    if restart:
        job = start(disk, "second")
    elif when == "never there":
        job.fail(of)
    ticks(job)
    assert b"a person's" in disk.snapshot().values() and not job.coordinator.busy


def test_I1_a_persons_directory_at_the_name_of_an_adopted_one_is_not_pruned():
    """Catches: a prune of what has no manifest, which deletes whatever has the name."""
    disk = SimDisk()
    for step in (1, 2):
        stock_saves(disk, step)
    job = start(disk, retention=LatestN(1))
    job.coordinator.unpin(2)
    person = SimStorage(disk, "person")
    person.rename(ONE, "elsewhere")
    person.mkdir(ONE)
    disk.plant_file(f"{ONE}/notes.txt", b"a person's")
    job.coordinator.unpin(1)
    ticks(job)
    assert b"a person's" in disk.snapshot().values() and tracked(job) == [2]


def test_I1_what_is_in_the_way_of_a_save_is_put_beside_what_was():
    """Catches: a second file that replaces the first in quarantine, as the save between was refused."""
    disk = SimDisk()
    job = saved(disk, 1)
    disk.capacity = disk.used + 50
    for text in (b"first", b"second"):
        disk.plant_file(TWO, text)
        with pytest.raises(CkptFsmError):
            job.request(2)
    assert {b"first", b"second"} <= set(disk.snapshot().values())


def test_I2_a_roll_forward_never_takes_the_tracker_below_a_step_that_was_rolled_back_before():
    """Catches: an adoption that waits for nothing, because a withdrawn attempt had its step."""
    base = SimDisk()
    job = saved(base, 1, 2, 3, 4)
    job.coordinator.rollback(1)
    of = job.request(2)
    job.fork(of)
    job.write(of, 0)
    job.storage.before = Strike("open_exclusive", ".metadata", ProcessDead("dies"))
    with suppress(ProcessDead):
        job.write(of, 1)
    base.kill("first")
    for step in (3, 4):
        stock_saves(base, step)
    for index in range(0, 200, 4):
        disk = base.fork()
        job = start(disk, "killed", opened=False)
        job.storage.before = DiesAt(index)
        with suppress(ProcessDead):
            job.open()
        disk.kill("killed")
        assert tracked(start(disk, "again"))[-1] == 4, index


def test_I2_what_was_rolled_back_does_not_come_back_with_the_next_save():
    """Catches: a step put back by a person, concluded from a tracker that our own save explains."""
    disk = SimDisk()
    job = saved(disk, 1, 2)
    moved: list[str] = []

    def before(index: int, method: str, path: str) -> None:
        if method == "rename" and path.startswith(f"{TWO} -> {QUARANTINE}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        if moved and method == "pwrite":
            raise ProcessDead(path)
        if saving and method == "rename" and path.endswith(f"-> {TRACKER}"):
            moved.append(path)

    saving: list[int] = []
    job.storage.before = before
    job.coordinator.rollback(1)
    ticks(job)
    saving.append(3)
    with pytest.raises(ProcessDead):
        job.save(3)
    disk.kill("first")
    assert tracked(start(disk, "second")) == [1, 3]


def test_I8_an_interrupted_fresh_start_refuses_before_it_changes_anything():
    """Catches: a start that goes on with it, then refuses a newer stock save, so that the next start
    resumes from what this one would not."""
    disk = SimDisk()
    saved(disk, 1, 2)
    disk.kill("first")
    job = start(disk, "fresh", opened=False, resume="fresh")
    job.storage.before = Strike("rename", QUARANTINE, ProcessDead("x"))
    with pytest.raises(ProcessDead):
        job.open()
    disk.kill("fresh")
    stock_saves(disk, 3)
    disk.uproot(TRACKER)
    disk.uproot(f"iter_0000003/{SHARD}")
    for who in ("a", "b"):
        with pytest.raises(DamagedRoot, match="would leave iter_0000003"):
            start(disk, who)
        disk.kill(who)
    SimStorage(disk, "person").rename("iter_0000003", "elsewhere")
    assert tracked(start(disk, "c")) == []


def dies_after_move(job: FakeJob, move: str) -> None:
    """Killed when a move is durable where it went, and not where it was: a power loss shows both."""
    seen: list[str] = []

    def before(index: int, method: str, path: str) -> None:
        if seen and method == "fsync_dir" and path == "":
            raise ProcessDead(path)
        if method == "rename" and move in path:
            seen.append(path)

    job.storage.before = before


def fails_once(job: FakeJob, method: str, start_of: str) -> None:
    failed: list[str] = []

    def before(index: int, called: str, path: str) -> None:
        if called == method and path.startswith(start_of) and not failed:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    job.storage.before = before


@pytest.mark.parametrize("older", [(), (0,)])
@pytest.mark.parametrize("trouble", ["rename", "read"])
def test_I8_a_root_is_not_opened_while_its_newest_checkpoint_is_in_the_trash(trouble, older):
    """Catches: one start of many that begins from zero, after which the trash is emptied, or from an
    older one, or from what is newer than all that was in use; advice to begin afresh because of a disk
    that cannot be read for a moment."""
    disk = SimDisk()
    dies_pruning(saved(disk, *older, 1, 2), leased=False)
    disk.uproot(f"{TWO}/{SHARD}")
    disk.uproot(TRACKER)
    stock_saves(disk, 9, tracked=False, synced=True)  # nobody acknowledged it
    for who in "bcde":
        job = start(disk, who, opened=False)
        if trouble == "rename":
            job.storage.before = Strike("rename", f"-> {ONE}", OSError(errno.EIO, "x"))
        else:
            sick = (TRASH, ONE)  # wherever it lies
            fails_to_look(job, "read", lambda p: p.startswith(sick), errno.EIO, times=99)  # noqa: B023
        named = f"{TRASH}/1" if trouble == "rename" else f"{TRASH}/1|{ONE}"
        with pytest.raises(OSError, match=named):  # and not DamagedRoot
            job.open()
        disk.kill(who)
    by_hand = disk.fork()
    for attempt in SimStorage(by_hand, "person").listdir(TRASH):  # what docs/starts.md says
        SimStorage(by_hand, "person").rename(f"{TRASH}/{attempt}", ONE)
    for there in (disk, by_hand):
        job = start(there, "f")
        ticks(job)
        assert tracked(job) == [*older, 1] and content(there, TRACKER) == b"1\n"


def test_I2_a_prune_that_comes_back_does_not_lower_the_tracker():
    """Catches: a stock save that is newer than the tracker for a moment: for ever if a crash comes."""
    base = SimDisk()
    dies_pruning(saved(base, 1, 2), leased=False)
    saved_by_another(base)
    for index in range(90):
        disk = base.fork()
        job = start(disk, "killed", opened=False)
        job.storage.before = DiesAt(index)
        with suppress(ProcessDead):
            job.open()
        disk.kill("killed")
        assert tracked(start(disk, "again"))[-1] == 2, index


def test_I8_a_failed_save_in_place_that_a_power_loss_shows_twice_leaves_its_name():
    """Catches: a leftover that no start explains, and a fresh one refuses to leave."""
    disk = SimDisk()
    job = start(disk)
    of = in_place(job, 1)
    disk.plant_file(f"{ONE}/{SHARD}", b"x")
    dies_after_move(job, TRASH)
    with pytest.raises(ProcessDead):
        job.fail(of)
    disk.crash("all_lost")
    ticks(start(disk, "second"))
    assert ONE not in names(disk)
    disk.kill("second")
    assert tracked(start(disk, "third")) == []


def test_I1_a_clean_up_that_went_to_quarantine_is_not_tried_again_on_a_strangers_save():
    """Catches: a stock save that is deleted because what was at its name before is in quarantine."""
    disk = SimDisk()
    job = saved(disk, 1)
    of = in_place(job, 2)
    disk.plant_file(f"{TWO}/notes.txt", b"notes")
    fails_once(job, "fsync_dir", QUARANTINE)
    job.fail(of)
    SimStorage(disk, "stranger").mkdir(TWO)
    disk.plant_file(f"{TWO}/{SHARD}", b"a stranger's")
    ticks(job)
    assert {b"notes", b"a stranger's"} <= set(disk.snapshot().values()) and not job.coordinator.busy


def test_I2_a_withdrawal_tried_again_leaves_the_tracker_that_names_what_was_saved_meanwhile():
    """Catches: a stock save that the retry makes newer than the tracker: never resumed from."""
    disk = SimDisk()
    for step in (1, 2):
        stock_saves(disk, step)
    job = start(disk)
    fails_once(job, "fsync_dir", QUARANTINE)
    job.coordinator.withdraw_damaged(2, "bad")
    stock_saves(disk, 2)
    ticks(job)
    assert content(disk, TRACKER) == b"2"
    disk.kill("first")
    assert tracked(start(disk, "second")) == [1, 2]


def test_I2_a_move_that_a_power_loss_shows_twice_is_done_again_after_an_error():
    """Catches: a copy in quarantine, taken for the move that has just failed: the fresh start comes to
    nothing, and the next one resumes."""
    disk = SimDisk()
    stock_saves(disk, 1)
    start(disk).close()
    disk.kill("first")
    job = start(disk, "fresh", opened=False, resume="fresh")
    dies_after_move(job, f"{ONE} ->")
    with pytest.raises(ProcessDead):
        job.open()
    disk.crash("all_lost")
    assert ONE in names(disk)
    job = start(disk, "second", opened=False)
    fails_once(job, "rename", ONE)
    job.open()
    ticks(job)
    assert ONE not in names(disk) and not job.coordinator.busy
    disk.kill("second")
    assert tracked(start(disk, "third")) == []


def test_I8_after_a_fresh_start_a_run_that_saved_nothing_can_be_started_again():
    """Catches: what was lost before the fresh start, held against the runs after it."""
    disk = SimDisk()
    saved(disk, 1, 2).close()
    disk.kill("first")
    for path in (ONE, TWO, TRACKER):
        disk.uproot(path)
    start(disk, "fresh", resume="fresh").close()
    disk.kill("fresh")
    assert tracked(start(disk, "third")) == []


def dies_once_published(disk: SimDisk, job: FakeJob) -> None:
    """Step 1 has its published name; the job dies before it can journal that."""
    of = job.request(1)
    job.fork(of)
    job.write(of, 0)
    published: list[str] = []

    def before(index: int, method: str, path: str) -> None:
        if published and method == "pwrite":
            raise ProcessDead(path)
        if method == "rename" and path.endswith(f"-> {ONE}"):
            published.append(path)

    job.storage.before = before
    with pytest.raises(ProcessDead):
        job.write(of, 1)
    disk.kill("first")


@pytest.mark.parametrize("what", ["published", "link"])
def test_I8_a_fresh_start_deals_with_what_a_failed_attempt_left(what: str):
    """Catches: a directory that its own clean-up would move, refused; a link in the way of a failed save
    in place, passed over: no start is possible after either."""
    disk = SimDisk()
    job = start(disk)
    if what == "link":
        in_place(job, 1)
        disk.kill("first")
        disk.uproot(ONE)
        disk.plant_symlink(ONE, "elsewhere")
        with pytest.raises(DamagedRoot, match=f"would leave {ONE} behind"):
            start(disk, "fresh", resume="fresh")
        return
    dies_once_published(disk, job)
    disk.uproot(f"{ONE}/{SHARD}")
    assert tracked(start(disk, "fresh", resume="fresh")) == []
    assert ONE not in names(disk) and names(disk, QUARANTINE)


def test_I2_what_another_attempt_left_gutted_is_not_what_the_tracker_may_name():
    """Catches: a withdrawal that leaves the tracker on a directory whose manifest does not hold."""
    disk = SimDisk()
    job = saved(disk, 1, 2)
    saved_by_another(disk)
    disk.uproot(f"{TWO}/{SHARD}")
    job.coordinator.withdraw_damaged(2, "gone")
    assert content(disk, TRACKER) == b"1\n"


def test_I8_a_fresh_start_moves_what_no_journal_and_no_tracker_explains():
    """Catches: a fresh start that adopts a stock save, and resumes from it."""
    disk = SimDisk()
    stock_saves(disk, 1)
    disk.uproot(TRACKER)
    job = start(disk, "fresh", resume="fresh")
    assert tracked(job) == [] and ONE not in names(disk) and len(names(disk, QUARANTINE)) == 1


@pytest.mark.parametrize("trouble", ["error", "killed"])
def test_I8_what_was_lost_before_a_fresh_start_is_not_held_against_the_next(trouble: str):
    """Catches: a damaged checkpoint whose way to quarantine took longer than the fresh start."""
    disk = SimDisk()
    saved(disk, 1).close()
    disk.kill("first")
    disk.uproot(f"{ONE}/{SHARD}")
    job = start(disk, "fresh", opened=False, resume="fresh")
    if trouble == "error":
        fails_once(job, "rename", ONE)
        job.open()
    else:
        dies_after_move(job, f"{TRACKER} -> {QUARANTINE}")
        with pytest.raises(ProcessDead):
            job.open()
    disk.kill("fresh")
    for who in ("second", "third", "fourth"):
        assert tracked(start(disk, who)) == []
        disk.kill(who)


def test_I8_a_fresh_start_refuses_a_failed_attempts_directory_at_another_name():
    """Catches: a name that no clean-up looks at, left behind: no start is possible any more."""
    disk = SimDisk()
    job = start(disk)
    dies_once_published(disk, job)
    SimStorage(disk, "person").rename(ONE, "iter_0000005")
    with pytest.raises(DamagedRoot, match="would leave iter_0000005 behind"):
        start(disk, "fresh", resume="fresh")


def fresh_with_a_move_left() -> SimDisk:
    """Step 1 was damaged; a fresh start could not move it, and its process is gone."""
    disk = SimDisk()
    saved(disk, 1).close()
    disk.kill("first")
    disk.uproot(f"{ONE}/{SHARD}")
    job = start(disk, "fresh", opened=False, resume="fresh")
    fails_once(job, "rename", ONE)
    job.open()
    disk.kill("fresh")
    return disk


def test_I2_what_was_saved_after_a_fresh_start_is_not_moved_by_what_is_left_of_it():
    """Catches: a fresh start that is said again over a checkpoint that is in use by now."""
    disk = fresh_with_a_move_left()
    stock_saves(disk, 2)
    assert tracked(start(disk, "second")) == [2] and TWO in names(disk)


def test_I8_what_was_damaged_comes_back_once_a_person_has_repaired_it():
    """Catches: advice to repair a checkpoint, and a start that moves what was repaired away again."""
    disk = SimDisk()
    saved(disk, 1)
    disk.kill("first")
    good = content(disk, f"{ONE}/{SHARD}")
    leave_written(disk, 2)
    replace(disk, f"{ONE}/{SHARD}", good[:-1])
    job = start(disk, "second", opened=False)
    job.storage.before = Strike("write", ".metadata", OSError(errno.ENOSPC, "full"))
    with pytest.raises(StorageError):
        job.open()
    disk.kill("second")
    person = SimStorage(disk, "person")
    (aside,) = person.listdir(QUARANTINE)
    person.rename(f"{QUARANTINE}/{aside}", ONE)
    replace(disk, f"{ONE}/{SHARD}", good)
    job = start(disk, "third", opened=False)
    job.storage.before = Strike("write", ".metadata", OSError(errno.ENOSPC, "full"))
    job.open()
    assert tracked(job) == [1]


def kill_at_every_call_of(disk_of: Callable[[], SimDisk], **options: Any) -> Iterator[SimDisk]:
    """The disk after a start that dies before its first call, before its second, and so on."""
    for index in count():
        disk = disk_of()
        storage = FaultStorage(SimStorage(disk, "dies"))
        storage.before = DiesAt(index)
        with suppress(ProcessDead):
            start_with(storage, "dies", **options)
            return
        disk.kill("dies")
        yield disk


def two_saved() -> SimDisk:
    disk = SimDisk()
    saved(disk, 1, 3).close()
    disk.kill("first")
    return disk


@pytest.mark.parametrize("step", [1, 2, 3])
def test_I8_what_was_saved_after_a_fresh_start_that_died_is_not_moved_unasked(step: int):
    """Catches: a fresh start that is completed over a checkpoint that somebody saved since, and begins
    from zero."""
    refused = 0
    for disk in kill_at_every_call_of(two_saved, resume="fresh"):
        name = f"iter_{step:07d}"
        taken = name in names(disk)
        if taken:  # a stock trainer writes over it
            disk.uproot(name)
        stock_saves(disk, step)
        job = start(disk, "second", opened=False)
        try:
            job.open()
        except DamagedRoot as error:
            refused += 1
            assert f"interrupted, and the tracker says {step}" in str(error)
            assert name in names(disk)
            disk.kill("second")
            assert tracked(start(disk, "third", resume="fresh")) == []
        else:
            assert tracked(job) and (name in names(disk) or taken)
    assert refused > 5


def test_a_fresh_start_over_a_rollback_that_died_begins_afresh():
    """Catches: a fresh start that completes the rollback instead, and resumes from its target."""
    for index in count():
        disk = two_saved()
        storage = FaultStorage(SimStorage(disk, "dies"))
        job = start_with(storage, "dies")
        storage.before = DiesAt(len(storage.calls) + index)
        with suppress(ProcessDead):
            job.coordinator.rollback(1)
            break
        disk.kill("dies")
        assert tracked(start(disk, "fresh", resume="fresh")) == []
        assert not {ONE, "iter_0000003"} & set(names(disk))
    assert index > 5


def test_I8_a_release_that_is_used_after_a_fresh_start_stays_in_use():
    """Catches: what a fresh start left to do, done over what somebody put in use meanwhile."""
    disk = SimDisk()
    saved(disk, 1).close()
    disk.kill("first")
    disk.uproot(f"{ONE}/{SHARD}")
    start(disk, "fresh", resume="fresh").close()
    disk.kill("fresh")
    stock_saves(disk, 5)
    SimStorage(disk, "person").rename("iter_0000005", "release")
    disk.overwrite(TRACKER, b"release")
    assert tracked(start(disk, "second")) == []
    assert content(disk, TRACKER) == b"release"


def test_I8_what_a_run_published_after_a_fresh_start_is_not_moved_by_the_next():
    """Catches: a fresh start that is said again, at an opening that a full disk and a kill cut short."""
    base = SimDisk()
    saved(base, 1).close()
    base.kill("first")
    base.uproot(f"{ONE}/{SHARD}")
    dies_once_published(base, start(base, "first", resume="fresh"))
    for index in count():
        disk = base.fork()
        job = start(disk, "full", opened=False)
        full = Strike("write", TRACKER, OSError(errno.ENOSPC, "full"))
        job.storage.before = Both(full, DiesAt(index))
        with suppress(StorageError, ProcessDead):
            job.open()
        disk.kill("full")
        assert tracked(start(disk, "third")) == [1]
        if len(job.storage.calls) < index:
            break
    assert index > 5


class Both:
    def __init__(self, *hooks: Any) -> None:
        self.hooks = hooks

    def __call__(self, index: int, method: str, path: str) -> None:
        for hook in self.hooks:
            hook(index, method, path)


def test_I8_a_fresh_start_is_not_forgotten_by_a_start_that_dies():
    """Catches: a damaged checkpoint, moved aside by a fresh start at last, held against a later run."""
    kills = 0
    for disk in kill_at_every_call_of(fresh_with_a_move_left):
        assert tracked(start(disk, "third")) == []
        kills += 1
    assert kills > 5


class SickTrash:
    """A trash that cannot be made durable any more, once the journal is begun."""

    def __init__(self) -> None:
        self.begun = False

    def __call__(self, index: int, method: str, path: str) -> None:
        self.begun = self.begun or (method == "open_exclusive" and "/journal/" in path)
        if self.begun and method == "fsync_dir" and path == TRASH:
            raise OSError(errno.EIO, "sick", path)


def test_I8_two_prunes_of_one_step_and_a_stock_save_there_are_decided_once():
    """Catches: an adoption that is decided once for each of them."""
    disk = SimDisk()
    saved(disk, 1, 2).close()
    disk.kill("first")
    for who in ("second", "third"):
        job = start(disk, who, opened=False)
        job.storage.before = SickTrash()
        job.open()
        if who == "third":
            job.coordinator.unpin(1)
        with suppress(StorageError, OutcomeUnknown):
            job.coordinator.delete(1)
        disk.kill(who)
        if ONE in names(disk):
            disk.uproot(ONE)
        stock_saves(disk, 1)
        disk.overwrite(TRACKER, b"2")
    assert tracked(start(disk, "fourth")) == [1, 2]


@pytest.mark.parametrize("resume", ["fallback", "strict"])
@pytest.mark.parametrize("step", [2, 3, 4])
def test_I8_what_was_saved_after_a_rollback_that_died_is_not_moved_unasked(step: int, resume: str):
    """Catches: a rollback that is completed over a checkpoint that a stock trainer saved since."""
    disk = SimDisk()
    job = saved(disk, 1, 3)
    job.storage.before = Strike("rename", "iter_0000003 ->", ProcessDead("dies"))
    with pytest.raises(ProcessDead):
        job.coordinator.rollback(1)
    disk.kill("first")
    name = f"iter_{step:07d}"
    if step == 3:
        disk.uproot(name)
    stock_saves(disk, step)
    with pytest.raises(DamagedRoot, match=f"rollback was interrupted, and the tracker says {step}"):
        start(disk, "second", resume=resume)
    disk.kill("second")
    person = SimStorage(disk, "person")
    person.rename(name, "elsewhere")
    person.rename(TRACKER, "tracker")
    assert tracked(start(disk, "third")) == [1]
    disk.kill("third")
    person.rename("elsewhere", name)
    disk.overwrite(TRACKER, b"%d" % step)
    assert tracked(start(disk, "fourth")) == [1, step]


def test_I8_a_fresh_start_does_not_leave_what_waits_to_be_tracked():
    """Catches: a fresh start that is refused, and done all the same but for the newest checkpoint, which
    the next start resumes from."""
    base = SimDisk()
    job = saved(base, 1)
    of = job.request(2)
    job.fork(of)
    job.write(of, 0)
    job.storage.before = Strike("open_exclusive", TRACKER, ProcessDead("dies"))
    with pytest.raises(ProcessDead):
        job.write(of, 1)
    base.kill("first")
    job = start(base, "fresh", opened=False, resume="fresh")
    fails_once(job, "open_exclusive", TRACKER)
    with pytest.raises(StorageError):
        job.open()
    base.kill("fresh")
    assert tracked(start(base, "third")) == []
    assert not {ONE, TWO} & set(names(base))


def saved_and_one_above() -> SimDisk:
    disk = two_saved()
    stock_saves(disk, 9)
    disk.overwrite(TRACKER, b"3")
    return disk


def test_I8_what_a_fresh_start_adopted_is_not_resumed_from_if_it_died():
    """Catches: a step above the tracker, adopted only to be moved away with the others, which the next
    start resumes from."""
    seen = []
    for disk in kill_at_every_call_of(saved_and_one_above, resume="fresh"):
        try:
            seen.append(tracked(start(disk, "second")))
        except DamagedRoot as error:
            assert "a fresh start was interrupted, and the tracker says 3" in str(error)
            disk.kill("second")
            assert tracked(start(disk, "third", resume="fresh")) == []
            seen.append([0])
    assert seen == sorted(seen, reverse=True)  # as it was, then refused, then begun afresh
    assert [found for found in ([1, 3], [0], []) if found in seen] == [[1, 3], [0], []]


def rolling_back(target: int, *steps: int, at: str) -> SimDisk:
    """These steps are saved, and a rollback dies: ``at`` the first call that touches that."""
    disk = SimDisk()
    job = saved(disk, *steps)
    job.storage.before = Strike(
        "open_exclusive" if at == TRACKER else "rename", at, ProcessDead("x")
    )
    with pytest.raises(ProcessDead):
        job.coordinator.rollback(target)
    disk.kill("first")
    return disk


def rolled_back_and_one_above() -> SimDisk:
    disk = rolling_back(1, 1, 3, at="iter_0000003 ->")
    stock_saves(disk, 9)
    disk.overwrite(TRACKER, b"1")
    disk.uproot(f"{ONE}/{SHARD}")
    return disk


def rolled_back_and_gone_on() -> SimDisk:
    disk = rolling_back(1, 1, 3, at="iter_0000003 ->")
    stock_saves(disk, 4)
    return disk


@pytest.mark.parametrize("base", [rolled_back_and_one_above, rolled_back_and_gone_on])
def test_I8_a_fresh_start_over_a_rollback_resumes_from_nothing_if_it_dies(base: Any):
    """Catches: a fresh start that goes on under the rollback's name until it is done: what it adopted is
    resumed from, or what a root was refused for is moved away."""
    with pytest.raises(DamagedRoot):
        start(base(), "before")
    refused = 0
    for disk in kill_at_every_call_of(base, resume="fresh"):
        try:
            assert tracked(start(disk, "second")) == []
        except DamagedRoot:
            refused += 1
            disk.kill("second")
            assert tracked(start(disk, "third", resume="fresh")) == []
    assert refused > 5


@pytest.mark.parametrize("fault", [errno.EIO, errno.ENOSPC])
def test_I2_the_tracker_names_nothing_that_a_fresh_start_adopted(fault: int):
    """Catches: a fresh start that the disk refuses half-way, and that puts the tracker right before it
    leaves: to a step that nobody had put in use."""
    for index in count():
        disk = two_saved()
        leave_written(disk, 4)
        stock_saves(disk, 9)
        disk.overwrite(TRACKER, b"3")
        job = start(disk, "fresh", opened=False, resume="fresh")
        strike = FailsAt(index, OSError(fault, "sick"))
        job.storage.before = strike
        with suppress(CkptFsmError, OSError):
            job.open()
        assert (disk.snapshot().get(TRACKER) or b"").strip() != b"9"
        if not strike.struck:
            break
    assert index > 20


@pytest.mark.parametrize("at", ["iter_0000004 ->", "iter_0000003 ->"])
@pytest.mark.parametrize("resume", ["fallback", "strict"])
def test_I8_what_was_saved_again_during_a_rollback_that_died_is_not_moved_unasked(
    at: str, resume: str
):
    """Catches: a rollback that is completed over a stock trainer's save of a step which it had not come
    to yet, as the tracker names the newest one that is left."""
    disk = rolling_back(1, 1, 3, 4, at=at)
    disk.uproot("iter_0000003")
    stock_saves(disk, 3)
    with pytest.raises(DamagedRoot, match="rollback was interrupted, and the tracker says 3"):
        start(disk, "second", resume=resume)
    disk.kill("second")
    person = SimStorage(disk, "person")
    person.rename("iter_0000003", "elsewhere")
    person.rename(TRACKER, "tracker")
    assert tracked(start(disk, "third")) == [1]


def half_rolled_back_to_a_damaged_one() -> SimDisk:
    disk = rolling_back(1, 1, 3, 4, at="iter_0000004 ->")
    disk.uproot(f"{ONE}/{SHARD}")
    return disk


def test_I8_our_own_tracker_above_a_damaged_target_is_no_newcomers():
    """Catches: a rollback that nobody can complete any more, as a start that died had lifted the tracker
    from the damaged target to what is left."""
    lifted = 0
    for disk in kill_at_every_call_of(half_rolled_back_to_a_damaged_one):
        lifted += content(disk, TRACKER) == b"3\n"
        assert tracked(start(disk, "second")) == [3]
    assert lifted > 5


@pytest.mark.parametrize("deaths", range(4))
def test_I8_a_rollback_goes_on_if_what_the_tracker_named_is_missing(deaths: int):
    """Catches: what was lost while a rollback waits, forgotten by the second start that dies."""
    disk = rolling_back(1, 1, 2, at=TRACKER)
    disk.uproot(TWO)
    for number in range(deaths):
        job = start(disk, f"dies{number}", opened=False)
        job.storage.before = Strike("open_exclusive", TRACKER, ProcessDead("dies"))
        with pytest.raises(ProcessDead):
            job.open()
        disk.kill(f"dies{number}")
    assert tracked(start(disk, "last")) == [1]


def test_I8_a_rollback_goes_on_if_what_the_tracker_named_was_damaged_meanwhile():
    """Catches: a rollback that no start completes, as the tracker names neither its target nor the
    newest one. The exhaustive search found it."""
    disk = SimDisk()
    job = saved(disk, 1, 2)
    dies = Strike("open_exclusive", TRACKER, ProcessDead("dies"))
    job.storage.before = dies
    with pytest.raises(ProcessDead):
        job.coordinator.rollback(1)
    disk.kill("first")
    disk.uproot(f"{TWO}/{SHARD}")
    job = start(disk, "second", opened=False)
    job.storage.before = dies
    with pytest.raises(ProcessDead):
        job.open()
    disk.kill("second")
    assert content(disk, TRACKER) == b"2\n"
    assert tracked(start(disk, "third")) == [1]


def test_I8_a_target_that_is_put_back_makes_our_own_tracker_no_newcomers():
    """Catches: a rollback that every start refuses, as its lost target is there again and the tracker,
    which a start had lifted from it, is still above."""
    base = rolling_back(1, 1, 3, 4, at="iter_0000004 ->")
    SimStorage(base, "person").rename(ONE, "elsewhere")
    job = start(base, "lifts", opened=False)
    job.storage.before = Once("rename", f"-> {TRACKER}")
    with pytest.raises(ProcessDead):
        job.open()
    base.kill("lifts")
    assert content(base, TRACKER) == b"3\n"
    SimStorage(base, "person").rename("elsewhere", ONE)
    for disk in kill_at_every_call_of(base.fork):
        assert tracked(start(disk, "third"))[0] == 1


class Once:
    """Dies at the first write after a call of a method on a path."""

    def __init__(self, method: str, path: str) -> None:
        self.method, self.path, self.seen = method, path, False

    def __call__(self, index: int, method: str, path: str) -> None:
        if self.seen and method in ("write", "pwrite"):
            raise ProcessDead("dies")
        self.seen = self.seen or (method == self.method and self.path in path)


def target_saved_twice() -> SimDisk:
    disk = SimDisk()
    saved(disk, 1, 2)
    disk.uproot(f"{TWO}/{SHARD}")
    disk.kill("first")
    job = start(disk, "second")
    for step in (2, 3, 4):
        job.save(step)
    job.storage.before = Strike("rename", "iter_0000004 ->", ProcessDead("dies"))
    with pytest.raises(ProcessDead):
        job.coordinator.rollback(2)
    disk.kill("second")
    return disk


def target_lost_and_gone_lower() -> SimDisk:
    disk = rolling_back(2, 1, 2, 3, 4, 5, at="iter_0000005 ->")
    disk.uproot(f"{TWO}/{SHARD}")
    job = start(disk, "lower", opened=False)
    job.storage.before = Strike("rename", "iter_0000004 ->", ProcessDead("dies"))
    with pytest.raises(ProcessDead):
        job.open()
    disk.kill("lower")
    return disk


@pytest.mark.parametrize("base", [target_saved_twice, target_lost_and_gone_lower])
def test_I8_a_target_that_was_lost_once_does_not_hide_a_newcomer(base: Any):
    """Catches: a stock trainer's save of a step that a rollback had not come to, moved away unasked."""
    disk = base()
    disk.uproot("iter_0000003")
    stock_saves(disk, 3)
    with pytest.raises(DamagedRoot, match="rollback was interrupted, and the tracker says 3"):
        start(disk, "third")
    assert "iter_0000003" in names(disk)


@pytest.mark.parametrize("resume", ["fallback", "strict"])
def test_F19_a_rollback_goes_on_if_the_tracker_names_what_is_not_there(resume: str):
    """Catches: a rollback that is refused because somebody wrote nonsense into the tracker."""
    disk = rolling_back(1, 1, 3, at="iter_0000003 ->")
    disk.overwrite(TRACKER, b"77\n")
    assert tracked(start(disk, "second", resume=resume)) == [1]
    assert content(disk, TRACKER) == b"1\n"


def taken_over_by_a_stock_trainer() -> SimDisk:
    disk = SimDisk()
    in_place(saved(disk, 1), 5)
    disk.kill("first")
    stock_saves(disk, 5)
    return disk


def test_I10_a_fresh_start_is_planned_as_it_is_carried_out():
    """Catches: what is adopted as the tracker reached it, and cleaned up as there is none any more."""
    for disk in kill_at_every_call_of(taken_over_by_a_stock_trainer, resume="fresh"):
        with suppress(DamagedRoot):
            assert tracked(start(disk, "second")) in ([], [1, 5])
        disk.kill("second")
        assert tracked(start(disk, "third", resume="fresh")) == []
        assert "iter_0000005" not in names(disk)
        assert len([n for n in names(disk, QUARANTINE) if not n.startswith("tracker")]) == 2


def test_I7_a_fresh_start_deletes_nothing():
    """Catches: what a roll forward supersedes, given to the trash by a start that is to keep it all."""
    disk = two_saved()
    leave_written(disk, 4)
    job = start(disk, "fresh", resume="fresh", retention=LatestN(1))
    ticks(job)
    assert names(disk, TRASH) == []
    assert len([n for n in names(disk, QUARANTINE) if not n.startswith("tracker")]) == 3
    for step in (5, 6):
        job.save(step)
        ticks(job)
    assert tracked(job) == [6]  # retention has its turn again, once it began


@pytest.mark.parametrize("damaged", [1, 2])
def test_I8_only_the_loss_of_what_it_names_lifts_the_tracker(damaged: int):
    """Catches: a stock trainer's save, moved away unasked, as some old checkpoint was damaged."""
    disk = rolling_back(2, 1, 2, 3, 4, 5, at="iter_0000005 ->")
    disk.uproot(f"iter_{damaged:07d}/{SHARD}")
    job = start(disk, "second", opened=False)
    job.storage.before = Strike("rename", f"iter_{damaged:07d} ->", ProcessDead("dies"))
    with pytest.raises(ProcessDead):
        job.open()
    disk.kill("second")
    assert content(disk, TRACKER) == (b"2\n" if damaged == 1 else b"4\n")
    if damaged == 2:  # the tracker is where we lifted it to
        assert tracked(start(disk, "third")) == [1]
        return
    disk.uproot("iter_0000004")
    stock_saves(disk, 4)
    with pytest.raises(DamagedRoot, match="rollback was interrupted, and the tracker says 4"):
        start(disk, "third")
    disk.uproot("iter_0000004")
    disk.uproot(TRACKER)
    assert tracked(start(disk, "fourth")) == [2]


def test_I8_a_target_lost_twice_lifts_the_tracker_twice():
    """Catches: a root that is refused for ever, as the second target is not known as one."""
    disk = rolling_back(3, 1, 2, 3, 4, 5, 6, at="iter_0000006 ->")
    for number, (rots, dies_at, lifted) in enumerate(
        ((3, 3, b"5\n"), (None, 5, b"2\n"), (2, 2, b"4\n"))
    ):
        if rots:
            disk.uproot(f"iter_{rots:07d}/{SHARD}")
        job = start(disk, f"run{number}", opened=False)
        job.storage.before = Strike("rename", f"iter_{dies_at:07d} ->", ProcessDead("dies"))
        with pytest.raises(ProcessDead):
            job.open()
        disk.kill(f"run{number}")
        assert content(disk, TRACKER) == lifted
    assert tracked(start(disk, "last")) == [1]


@pytest.mark.parametrize("resume", ["fallback", "strict"])
def test_I8_a_save_of_another_format_where_an_earlier_rollback_left(resume: str):
    """Catches: a rollback that is completed over it, as what it withdrew before had that step."""
    disk = SimDisk()
    job = saved(disk, 1, 2, 3)
    job.coordinator.rollback(2)
    job.storage.before = Strike("open_exclusive", TRACKER, ProcessDead("x"))
    with pytest.raises(ProcessDead):
        job.coordinator.rollback(1)
    disk.kill("first")
    older_format(disk, 3)
    with pytest.raises(DamagedRoot, match="rollback was interrupted, and the tracker says 3"):
        start(disk, "second", resume=resume)


@pytest.mark.parametrize("resume", ["fallback", "strict"])
@pytest.mark.parametrize("step", [3, 4, 9])
def test_I8_a_save_of_another_format_may_be_in_use(step: int, resume: str):
    """Catches: a rollback that is completed over what the tracker names, at a step that it left too."""
    disk = rolling_back(1, 1, 3, 4, at="iter_0000003 ->")
    older_format(disk, step)
    with pytest.raises(DamagedRoot, match=f"rollback was interrupted, and the tracker says {step}"):
        start(disk, "second", resume=resume)
    disk.uproot(f"iter_{step:07d}")
    disk.uproot(TRACKER)
    assert tracked(start(disk, "third", resume=resume)) == [1]


def failed_at_the_step_before(disk: SimDisk) -> None:
    job = start(disk)
    job.coordinator.report([m.Failed(job.request(1), "writer_died")])  # its writers may still live
    job.save(2)
    disk.kill("first")
    stock_saves(disk, 1, tracked=False, synced=True)


def tracked_at_the_step_before(disk: SimDisk) -> None:
    saved(disk, 1, 2)
    disk.kill("first")


def unknown_before_and_after(disk: SimDisk) -> None:
    saved(disk, 2)
    disk.kill("first")
    stock_saves(disk, 1, tracked=False, synced=True)
    stock_saves(disk, 4, tracked=False, synced=True)


def pruned_below_a_damaged_one(disk: SimDisk) -> None:
    job = saved(disk, 1, 2, 3)
    job.storage.before = Strike("rename", "iter_0000002 ->", ProcessDead("dies"))
    with pytest.raises(ProcessDead):
        job.coordinator.delete(2)
    disk.kill("first")
    SimStorage(disk, "late").rename(TWO, f"{TRASH}/2.e1.a2")
    disk.uproot(f"iter_0000003/{SHARD}")


def withdrawn_and_still_there(disk: SimDisk) -> None:
    job = saved(disk, 2, 3)
    job.storage.before = Strike("rename", "iter_0000003 ->", ProcessDead("dies"))
    with pytest.raises(ProcessDead):
        job.coordinator.withdraw_damaged(3, "bit rot")
    disk.kill("first")


def dies_while_opening(disk: SimDisk, index: int, name: str) -> bool:
    """True if it did not come to that call."""
    job = start(disk, name, opened=False)
    job.storage.before = dies = DiesAt(index)
    with suppress(ProcessDead):
        job.open()
    disk.kill(name)
    return not dies.struck


@pytest.mark.parametrize("tracker", [b"\0\0", b"", b"release", b"2", b"3"])
@pytest.mark.parametrize(
    "before",
    [
        failed_at_the_step_before,
        tracked_at_the_step_before,
        unknown_before_and_after,
        pruned_below_a_damaged_one,
        withdrawn_and_still_there,
    ],
)
def test_I8_what_has_the_name_of_the_newest_is_resumed_from_wherever_the_start_dies(
    before, tracker
):
    """Catches: a start that withdraws ours, dies before it has adopted what stands there instead, and
    leaves something older as the newest that the journal knows; or newer, which nobody acknowledged."""
    base = SimDisk()
    before(base)
    saved_by_another(base)
    base.overwrite(TRACKER, tracker)
    if tracker == b"release":
        stock_saves(base, 9, tracked=False, synced=True)
        SimStorage(base, "person").rename("iter_0000009", "release")
    if not tracker:
        base.uproot(TRACKER)
    done, calls = False, count()
    while not done:
        disk, index = base.fork(), next(calls)
        done = dies_while_opening(disk, index, "killed")
        assert tracked(start(disk.fork(), "again"))[-1] == 2, index
        dies_while_opening(disk, index, "killed again")
        assert tracked(start(disk, "once more"))[-1] == 2, index
    assert next(calls) > 40


def test_I2_what_the_tracker_falls_back_to_is_durable_first():
    """Catches: a tracker that survives a power loss, and names a stock save that does not."""
    base = SimDisk()
    saved(base, 1, 2)
    base.kill("first")
    late = SimStorage(base, "late")
    late.rename(TWO, f"{TRASH}/2.e1.a2")
    late.fsync_dir("")
    late.fsync_dir(TRASH)
    base.uproot(TRACKER)
    stock_saves(base, 2, tracked=False)
    named = 0
    for index in range(120):
        disk = base.fork()
        dies_while_opening(disk, index, "killed")
        disk.crash("all_lost")
        if TRACKER in names(disk) and content(disk, TRACKER) == b"2\n":
            named += 1
            assert tracked(start(disk, "again"))[-1] == 2, index
    assert named


def test_I8_what_was_lost_is_the_limit_until_something_is_tracked():
    """Catches: a start that dies, or meets a full disk, between the withdrawal of the only checkpoint
    and a roll forward; the next one resumes from what nobody acknowledged."""
    base = SimDisk()
    saved(base, 1)
    base.kill("first")
    leave_written(base, 3)
    base.uproot(f"{ONE}/{SHARD}")
    base.uproot(TRACKER)
    stock_saves(base, 9, tracked=False, synced=True)
    done, calls = False, count()
    while not done:
        disk, index = base.fork(), next(calls)
        done = dies_while_opening(disk, index, "killed")
        assert tracked(start(disk, "again")) == [3], index
    assert next(calls) > 40


@pytest.mark.parametrize("torn", [False, True])
def test_I2_the_tracker_does_not_fall_back_below_what_a_prune_had_not_moved(torn: bool):
    """Catches: a tracker at an older step, for ever to a stock reader if the start dies then, while a
    newer acknowledged one stands whole at its name."""
    base = SimDisk()
    job = saved(base, 1, 2, 3)
    job.storage.before = Strike("rename", f"{TWO} ->", ProcessDead("dies"))
    with pytest.raises(ProcessDead):
        job.coordinator.delete(2)
    base.kill("first")
    base.uproot(f"iter_0000003/{SHARD}")
    before = b"\0\0" if torn else b"3\n"
    base.overwrite(TRACKER, before)
    done, calls = False, count()
    while not done:
        disk, index = base.fork(), next(calls)
        done = dies_while_opening(disk, index, "killed")
        assert content(disk, TRACKER) in (before, b"2\n"), index
        assert tracked(start(disk, "again"))[-1] == 2, index
    assert next(calls) > 30


@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
def test_I8_a_start_that_cannot_move_the_tracker_names_it(call: str):
    """Catches: a bare error of the disk; a start that goes on with a tracker at what was withdrawn."""
    disk = SimDisk()
    saved(disk, 1, 2)
    disk.kill("first")
    disk.uproot(f"{TWO}/{SHARD}")
    job = start(disk, "second", opened=False)
    job.storage.before = Strike(call, TRACKER, OSError(errno.ENOSPC, "full"))
    with pytest.raises(StorageError, match=f"tracker: .*{TRACKER}.*ENOSPC"):
        job.open()
    disk.kill("second")
    assert tracked(start(disk, "third")) == [1] and content(disk, TRACKER) == b"1\n"
