"""Attempts in place: their name says a step and not whose it is, and stock trainers write there too."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from roots import (
    PRECIOUS,
    TWO,
    ForeignPart,
    Strike,
    content,
    fails,
    fails_after,
    fails_to_look,
    foreign_attempt,
    in_journal,
    in_place,
    is_root,
    moves,
    names,
    saved,
    saved_by_another,
    start,
    states,
    ticks,
    tracked,
    write_in_place,
)
from strangers import SHARD, stock_saves

from ckptfsm.adapters.fork import fork_child
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.documents import Pin, encode
from ckptfsm.core.errors import CkptFsmError, DamagedRoot, StepExistsError, StorageError
from ckptfsm.core.events import Failed, FinalizersRan, ShardReported, WriterGone
from ckptfsm.core.layout import EPOCHS, MANIFEST, PRIVATE, QUARANTINE, TRACKER, TRASH, begun_name
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.core.ports import RankJob
from ckptfsm.core.requests import SaveRequest
from ckptfsm.core.retention import LatestN
from ckptfsm.disk.inspection import check_digests, read_manifest
from ckptfsm.megatron.fence import stay_out_once_it_is_anothers
from ckptfsm.testing.fakes import Gate
from ckptfsm.testing.harness import FakeJob, fake_content
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage
from ckptfsm.writers.rank_writer import write_rank

THREE = "iter_0000003"


def stock_begins(disk: SimDisk) -> None:
    """A stock trainer's save of step 2, as far as its first shard."""
    SimStorage(disk, "stock").mkdir(TWO)
    disk.plant_file(f"{TWO}/{SHARD}", PRECIOUS)


@pytest.mark.parametrize("left", ["shards", "nothing", "gone"])
def test_I1_a_clean_up_tried_again_takes_no_save_of_another_trainer(left: str):
    """Catches: a stock trainer's save, which is being written, deleted as the left-over of a failed
    attempt: the attempt's own directory had left, and only an fsync had failed."""
    disk = SimDisk()
    job = saved(disk, 1)
    of = in_place(job, 2)
    if left == "shards":
        write_in_place(job, of, 0)
    if left == "gone":
        disk.uproot(TWO)  # a person tidied up
        job.storage.before = fails("fsync_dir", QUARANTINE.__eq__)
    else:
        fails_after(job, moves(TWO), "fsync_dir", TRASH.__eq__)
    job.fail(of)
    assert job.coordinator.busy and TWO not in names(disk)
    stock_begins(disk)
    ticks(job)
    assert not job.coordinator.busy
    assert PRECIOUS in disk.snapshot().values()


def test_I1_a_clean_up_after_a_kill_takes_no_save_of_another_trainer():
    """Catches: the same, where the process died between the move and its record."""
    disk = SimDisk()
    job = saved(disk, 1)
    of = in_place(job, 2)
    job.storage.before = Strike("fsync_dir", TRASH, ProcessDead("dies"))
    with suppress(ProcessDead):
        job.fail(of)
    assert TWO not in names(disk)
    disk.kill("first")
    stock_begins(disk)
    ticks(start(disk, "second"))
    assert PRECIOUS in disk.snapshot().values()


def test_I5_the_manifest_of_another_attempt_is_not_our_commit():
    """Catches: a manifest of another attempt at the step (a fenced job's, that landed late) taken for
    ours: what is tracked is not what was written."""
    other = SimDisk()
    job = start(other)
    job.fail(in_place(job, 2))
    theirs = in_place(job, 2)
    for rank in (0, 1):
        write_in_place(job, theirs, rank)
    disk = SimDisk()
    job = start(disk)
    ours = in_place(job, 2)
    assert ours != theirs
    write_in_place(job, ours, 0)
    disk.plant_file(f"{TWO}/{MANIFEST}", content(other, f"{TWO}/{MANIFEST}"))
    write_in_place(job, ours, 1)
    assert tracked(job) == [2]
    assert read_manifest(SimStorage(disk, "look"), TWO).of == ours


def dies_before_its_metadata(disk: SimDisk) -> AttemptId:
    """All shards of step 2 have receipts, and recovery would roll it forward."""
    job = saved(disk, 1)
    of = in_place(job, 2)
    write_in_place(job, of, 0)
    job.storage.before = Strike("open_exclusive", ".metadata", ProcessDead("dies"))
    with suppress(ProcessDead):
        write_in_place(job, of, 1)
    assert job.coordinator.ledger.checkpoints[of].state is State.SHARDS_WRITTEN
    disk.kill("first")
    return of


@pytest.mark.parametrize(
    ("resume", "tracker"),
    [("fresh", b"2"), ("fallback", b""), ("fallback", None), ("fallback", b"1")],
)
def test_I1_a_roll_forward_writes_over_nobody_elses_metadata(resume, tracker: bytes | None):
    """Catches: our metadata put over a stock trainer's, where the tracker does not tell of it."""
    disk = SimDisk()
    of = dies_before_its_metadata(disk)
    disk.uproot(f"{TWO}/{SHARD}")
    stock_saves(disk, 2, PRECIOUS.ljust(len(fake_content(of, 0))), synced=True)
    if tracker is None:
        disk.uproot(TRACKER)
    else:
        disk.overwrite(TRACKER, tracker)
    theirs = content(disk, f"{TWO}/.metadata")
    ticks(start(disk, "second", resume=resume))
    assert theirs in disk.snapshot().values()


def test_I8_a_roll_forward_in_place_stops_where_another_trainer_went_on():
    """Catches: our metadata written over a stock trainer's checkpoint, which is in use."""
    disk = SimDisk()
    of = dies_before_its_metadata(disk)
    disk.uproot(f"{TWO}/{SHARD}")
    stock_saves(disk, 2, PRECIOUS.ljust(len(fake_content(of, 0))), synced=True)
    before = content(disk, f"{TWO}/.metadata")
    later = start(disk, "second")
    assert tracked(later) == [1, 2]
    ticks(later)
    assert content(disk, f"{TWO}/.metadata") == before


def dies_before_its_manifest(disk: SimDisk) -> AttemptId:
    """Step 2 has all its metadata, and only the manifest is missing."""
    job = saved(disk, 1)
    of = in_place(job, 2)
    write_in_place(job, of, 0)
    job.storage.before = Strike("open_exclusive", MANIFEST, ProcessDead("dies"))
    with suppress(ProcessDead):
        write_in_place(job, of, 1)
    assert f"{TWO}/.metadata" in disk.snapshot()
    disk.kill("first")
    return of


def test_I8_a_roll_forward_stops_where_a_stock_trainer_saved_the_same_shapes():
    """Catches: our manifest over a stock trainer's shards, in use, with metadata like ours."""
    disk = SimDisk()
    of = dies_before_its_manifest(disk)
    disk.overwrite(f"{TWO}/{SHARD}", PRECIOUS.ljust(len(fake_content(of, 0))))
    disk.overwrite(TRACKER, b"2")
    ticks(start(disk, "second"))
    assert f"{TWO}/{MANIFEST}" not in disk.snapshot()


def test_I4_what_died_while_it_wrote_its_metadata_is_rolled_forward():
    """Catches: our own metadata, there already, taken for another trainer's."""
    disk = SimDisk()
    dies_before_its_manifest(disk)
    assert tracked(start(disk, "second")) == [1, 2]


def test_I1_a_torn_manifest_beside_an_undecided_prune_is_kept():
    """Catches: a checkpoint that was published, deleted as what a save leaves that was cut short."""
    disk = SimDisk()
    job = saved(disk, 1, retention=LatestN(1))
    job.coordinator.pin(1, "keep")
    job.save(2)
    fails_after(job, moves(TWO), "fsync_dir", is_root)
    job.save(3)
    job.storage.after = None
    published: list[str] = []

    def before(index: int, method: str, path: str) -> None:
        if method == "fsync_dir" and path == TRASH:
            raise OSError(errno.EIO, "", path)
        if method == "rename" and path.endswith(f"{TWO}/{MANIFEST}"):
            published.append(path)
        if published and method == "pwrite" and "journal" in path:
            raise ProcessDead("dies")

    job.storage.before = before
    job.coordinator.withdraw_damaged(3, "bit rot")
    parts = (PartSpec("state", "foreign"),)
    of = job.coordinator.request(SaveRequest(2, parts, 2, True, expected_bytes=1))
    job.fork(of)
    for rank in range(2):
        share = ForeignPart("state", "", rank, fake_content(of, rank))
        write_rank(job.storage, RankJob(of, rank, 2, TWO, (share,)))
    job.coordinator.report([ShardReported(of, "state", rank, 2, 10) for rank in range(2)])
    disk.plant_file(f"{TWO}/.metadata", b"m")
    disk.plant_file(f"{TWO}/metadata.json", b"{}")
    with suppress(ProcessDead, CkptFsmError):
        job.coordinator.report([FinalizersRan(of, 0), FinalizersRan(of, 1)])
    disk.kill("first")
    disk.overwrite(f"{TWO}/{MANIFEST}", b"torn")
    for lost in (".metadata", "metadata.json"):
        disk.uproot(f"{TWO}/{lost}")
    ticks(start(disk, "second", retention=LatestN(1)))
    assert fake_content(of, 0) in disk.snapshot().values()


def hung_until_the_next_save(disk: SimDisk) -> FakeJob:
    """A writer of step 2 hangs, and step 3 is tracked meanwhile."""
    job = saved(disk, 1)
    of = in_place(job, 2)
    write_in_place(job, of, 0)
    job.coordinator.report([Failed(of, "writer_hung"), WriterGone(of, 0)])
    job.save(3)
    return job


def test_F5_a_writer_that_ends_after_the_next_save_leaves_nothing_behind():
    """Catches: a failed attempt left at its name for good, as our own later save moved the tracker."""
    disk = SimDisk()
    job = hung_until_the_next_save(disk)
    (failed,) = job.coordinator.ledger.in_state(State.FAILED)
    job.coordinator.report([WriterGone(failed.id, 1)])
    ticks(job)
    assert TWO not in names(disk) and names(disk, QUARANTINE) == []


def test_F5_a_writer_that_died_with_its_job_after_the_next_save_leaves_nothing_behind():
    """Catches: the same, at the next start."""
    disk = SimDisk()
    hung_until_the_next_save(disk)
    disk.kill("first")
    job = start(disk, "second")
    ticks(job)
    assert tracked(job) == [1, 3] and TWO not in names(disk) and names(disk, QUARANTINE) == []


def test_F5_a_clean_up_tried_again_after_the_next_save_leaves_nothing_behind():
    """Catches: the same, where the move had failed at first."""
    disk = SimDisk()
    job = saved(disk, 1)
    of = in_place(job, 2)
    write_in_place(job, of, 0)
    job.storage.before = fails("rename", moves(TWO))
    job.fail(of)
    assert job.coordinator.busy
    job.save(3)
    ticks(job)
    assert not job.coordinator.busy
    assert TWO not in names(disk) and names(disk, QUARANTINE) == []


def test_I2_a_failed_attempt_is_not_adopted_after_our_own_later_save():
    """Catches: what the journal says has failed, adopted and pinned as a stock trainer's checkpoint."""
    disk = SimDisk()
    job = saved(disk, 1)
    of = in_place(job, 2)
    stock_saves(disk, 2, tracked=False, synced=True)  # as its own finalizers leave it
    job.coordinator.report([Failed(of, "finalizers"), WriterGone(of, 0)])
    job.save(3)
    disk.kill("first")
    assert tracked(start(disk, "second")) == [1, 3]


def test_F5_a_metadata_file_that_a_full_disk_cut_short_is_given_back():
    """Catches: the whole attempt kept in quarantine for a temporary file of our own."""
    disk = SimDisk()
    job = saved(disk, 1)
    of = in_place(job, 2)
    write_in_place(job, of, 0)
    job.storage.before = fails("write", lambda p: f"{TWO}/.metadata.tmp-" in p, errno.ENOSPC)
    write_in_place(job, of, 1)
    job.coordinator.report([WriterGone(of, 0), WriterGone(of, 1)])
    ticks(job)
    assert TWO not in names(disk) and names(disk, QUARANTINE) == []


def test_F5_a_plain_file_of_a_failed_attempt_is_given_back():
    """Catches: the same, for a file that the attempt itself has declared."""
    disk = SimDisk()
    job = saved(disk, 1)
    parts = (PartSpec("state"), PartSpec("data.pt", "file"))
    of = job.coordinator.request(SaveRequest(2, parts, job.ranks, True, expected_bytes=1))
    job.fork(of)
    disk.plant_file(f"{TWO}/{SHARD}", bytes(1000))
    disk.plant_file(f"{TWO}/data.pt", bytes(1000))
    job.fail(of)
    ticks(job)
    assert TWO not in names(disk) and names(disk, QUARANTINE) == []


def test_I9_no_late_manifest_lands_in_an_adopted_checkpoint():
    """Catches: a stock trainer's checkpoint, in use, that a fenced trainer's manifest makes its own."""
    disk = SimDisk()
    job = saved(disk, 1)
    of = in_place(job, 2)
    write_in_place(job, of, 0)
    late: list[str] = []

    def before(index: int, method: str, path: str) -> None:
        if method == "rename" and path.endswith(f"-> {TWO}/{MANIFEST}"):
            late.extend(path.split(" -> "))
            raise ProcessDead("paused")

    job.storage.before = before
    with suppress(ProcessDead, CkptFsmError):
        write_in_place(job, of, 1)
    disk.kill("first")
    for name in (SHARD, ".metadata", "metadata.json"):
        disk.uproot(f"{TWO}/{name}")
    stock_saves(disk, 2, PRECIOUS, synced=True)
    second = start(disk, "second")
    ticks(second)
    with suppress(FileNotFoundError):
        SimStorage(disk, "late").rename(*late)
    disk.kill("second")
    disk.kill("late")
    assert tracked(start(disk, "third")) == [1, 2]


def went_on(disk: SimDisk) -> None:
    """Our job dies with step 2 half-written, and a stock trainer completes and uses that step."""
    in_place(saved(disk, 1), 2)
    disk.kill("first")
    stock_saves(disk, 2, PRECIOUS, synced=True)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("gutted", [False, True])
def test_I1_a_clean_up_tried_again_leaves_what_was_adopted(restart: bool, gutted: bool):
    """Catches: a tracked, pinned checkpoint moved away, or deleted if it lost its metadata, since the
    tracker has become our own before a clean-up was tried again."""
    disk = SimDisk()
    went_on(disk)
    job = start(disk, "second", opened=False)
    fails_to_look(job, "listdir", f"{TWO}/.ckptfsm".__eq__, errno.EIO)
    job.open()
    assert tracked(job) == [1, 2] and job.coordinator.busy
    job.save(3)
    for name in (".metadata", "metadata.json") if gutted else ():
        disk.uproot(f"{TWO}/{name}")
    if restart:
        disk.kill("second")
        job = start(disk, "third")
    ticks(job)
    assert PRECIOUS in disk.snapshot().values()
    assert gutted or (TWO in names(disk) and tracked(job) == [1, 2, 3])


def tracked_and_in_place(disk: SimDisk, loadable: bool) -> tuple[FakeJob, AttemptId]:
    """Step 1 tracked; step 2 written in place: in part, or whole, as a stock loader sees it."""
    job = saved(disk, 1)
    of = in_place(job, 2)
    if loadable:
        stock_saves(disk, 2, tracked=False, synced=True)
    else:
        write_in_place(job, of, 0)
    return job, of


class DiesAfterItsTracker:
    """A process's death between its tracker and the next record of its journal."""

    def __init__(self) -> None:
        self.written = False

    def __call__(self, index: int, method: str, path: str) -> None:
        if method == "rename" and path.endswith(f"-> {TRACKER}"):
            self.written = True
        elif self.written and in_journal(path) and method == "pwrite":
            raise ProcessDead("dies")


def dies_after_its_tracker(disk: SimDisk, loadable: bool) -> None:
    """Step 2 failed; step 3 is saved, and killed between the tracker and its record."""
    job, of = tracked_and_in_place(disk, loadable)
    job.coordinator.report([Failed(of, "finalizers"), WriterGone(of, 0)])
    job.storage.before = DiesAfterItsTracker()
    with suppress(ProcessDead, CkptFsmError):
        job.save(3)
    assert content(disk, TRACKER) == b"3\n"
    disk.kill("first")


@pytest.mark.parametrize("loadable", [False, True])
def test_I2_our_own_tracker_is_ours_before_it_is_journaled(loadable: bool):
    """Catches: a failed attempt adopted, or left for good, for a tracker that we wrote ourselves."""
    disk = SimDisk()
    dies_after_its_tracker(disk, loadable)
    job = start(disk, "second")
    ticks(job)
    assert tracked(job) == [1, 3] and TWO not in names(disk)


@pytest.mark.parametrize("loadable", [False, True])
@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("waits", ["a newer one", "what was withdrawn"])
def test_I2_our_own_tracker_is_ours_while_another_write_waits(
    waits: str, dies: bool, loadable: bool
):
    """Catches: a failed attempt adopted, resumed from, or left for good, for a tracker of our own that
    is not at our newest: that is not in it yet, or it was withdrawn."""
    disk = SimDisk()
    job, of = tracked_and_in_place(disk, loadable)
    job.coordinator.report([Failed(of, "writer_hung")])
    job.save(3)
    error = ProcessDead("dies") if dies else OSError(errno.ENOSPC, "full")
    job.storage.before = Strike("open_exclusive", TRACKER, error)
    with suppress(ProcessDead, CkptFsmError):
        if waits == "a newer one":
            job.save(4)
        else:
            job.coordinator.withdraw_damaged(3, "bit rot")
    if dies:
        disk.kill("first")
        job = start(disk, "second")
    else:
        job.coordinator.report([WriterGone(of, 0), WriterGone(of, 1)])
        job.storage.before = None
    ticks(job)
    assert tracked(job) == ([1, 3, 4] if waits == "a newer one" else [1])
    assert TWO not in names(disk) and names(disk, ".ckptfsm/pins") == []


@pytest.mark.parametrize("judged", [True, False])
def test_I8_what_has_failed_is_cleaned_up_while_the_tracker_tells_who_went_on(judged: bool):
    """Catches: a stock trainer's checkpoint moved away, which the same plan adopts, or which is in a
    format that is not judged: a step below was rolled forward first, and the tracker went there."""
    disk = SimDisk()
    job = saved(disk, 1)
    of = in_place(job, 3)
    job.coordinator.report([Failed(of, "writer_hung"), WriterGone(of, 0)])
    two = job.request(2)
    job.fork(two)
    job.write(two, 0)
    job.storage.before = Strike("open_exclusive", TRACKER, ProcessDead("dies"))
    with suppress(ProcessDead):
        job.write(two, 1)
    disk.kill("first")
    stock_saves(disk, 3, PRECIOUS, synced=True)
    if not judged:
        for name in (".metadata", "metadata.json"):
            disk.uproot(f"iter_0000003/{name}")
    job = start(disk, "second")
    ticks(job)
    assert tracked(job)[-1] == (3 if judged else 2) and "iter_0000003" in names(disk)


def test_I8_what_has_failed_is_cleaned_up_before_the_tracker_falls_back():
    """Catches: a stock trainer's checkpoint moved away, in a format that is not judged: the tracker told
    that somebody went on from it, and was put to what stays, as what it named was damaged."""
    disk = SimDisk()
    job = saved(disk, 1)
    of = in_place(job, 2)
    job.coordinator.report([Failed(of, "writer_hung"), WriterGone(of, 0)])
    job.save(3)
    disk.kill("first")
    stock_saves(disk, 2, PRECIOUS, tracked=False, synced=True)
    for name in (".metadata", "metadata.json"):
        disk.uproot(f"{TWO}/{name}")
    disk.overwrite(TRACKER, b"3")  # not by us
    disk.uproot(f"iter_0000003/{SHARD}")
    job = start(disk, "second")
    ticks(job)
    assert tracked(job) == [1] and TWO in names(disk)


def test_I8_what_another_run_left_damaged_at_a_failed_attempts_name_is_evidence():
    """Catches: one start that begins from zero without a word, beside a checkpoint of another run."""
    disk = SimDisk()
    in_place(start(disk), 2)
    disk.kill("first")
    saved_by_another(disk)
    disk.uproot(f"{TWO}/{SHARD}")
    for who in ("second", "third"):
        with pytest.raises(DamagedRoot, match="iter_0000002"):
            start(disk, who)
        disk.kill(who)


@pytest.mark.parametrize("made", ["by us", "by the trainer"])
@pytest.mark.parametrize("at", [".ckptfsm", ".ckptfsm/begun"])
def test_F5_a_mark_that_cannot_be_made_costs_nothing(made: str, at: str):
    """Catches: a trainer's first file moved to quarantine with every save that a full disk refuses."""
    disk = SimDisk()
    job = saved(disk, 1)
    if made == "by the trainer":
        SimStorage(disk, "trainer").mkdir(TWO)
        disk.plant_file(f"{TWO}/common.pt", bytes(1000))
    job.storage.before = fails("mkdir", lambda p: p.startswith(f"{TWO}/{at}"), errno.ENOSPC)
    with pytest.raises(CkptFsmError):
        in_place(job, 2)
    ticks(job)
    assert not job.coordinator.busy and names(disk, QUARANTINE) == []
    write_in_place(job, in_place(job, 2), 0)


def test_F5_the_trees_of_a_failed_attempt_are_given_back():
    """Catches: all shards kept in quarantine for a directory of files that the attempt has declared."""
    disk = SimDisk()
    job = saved(disk, 1)
    parts = (PartSpec("state"), PartSpec("hf", "tree", "hf"))
    of = job.coordinator.request(SaveRequest(2, parts, job.ranks, True, expected_bytes=1))
    job.fork(of)
    disk.plant_file(f"{TWO}/{SHARD}", bytes(1000))
    SimStorage(disk, "trainer").mkdir(f"{TWO}/hf")
    disk.plant_file(f"{TWO}/hf/config.json", bytes(1000))
    job.fail(of)
    ticks(job)
    assert TWO not in names(disk) and names(disk, QUARANTINE) == []


def test_I1_what_is_completed_while_it_is_moved_is_not_deleted():
    """Catches: a stock trainer's checkpoint deleted with a failed attempt, in whose directory it got
    its metadata between the look and the move."""
    disk = SimDisk()
    job = saved(disk, 1)
    of = in_place(job, 2)
    disk.plant_file(f"{TWO}/{SHARD}", PRECIOUS)

    def before(index: int, method: str, path: str) -> None:
        if method == "rename" and path.startswith(f"{TWO} -> "):
            job.storage.before = None
            disk.uproot(f"{TWO}/{SHARD}")
            stock_saves(disk, 2, PRECIOUS, synced=True)

    job.storage.before = before
    job.fail(of)
    ticks(job)
    assert job.storage.before is None
    assert PRECIOUS in disk.snapshot().values()


def test_I1_what_is_put_in_use_while_it_is_pruned_is_not_deleted():
    """Catches: a stock trainer's save over one of ours, deleted with it: it came, with its tracker,
    between the look and the move."""
    disk = SimDisk()
    job = saved(disk, 1, 2, retention=LatestN(1))
    theirs = PRECIOUS.ljust(len(content(disk, f"{TWO}/{SHARD}")))

    def before(index: int, method: str, path: str) -> None:
        if method == "rename" and path.startswith(f"{TWO} -> "):
            job.storage.before = None
            disk.overwrite(f"{TWO}/{SHARD}", theirs)
            disk.overwrite(TRACKER, b"2")

    job.storage.before = before
    job.save(3)
    ticks(job)
    assert job.storage.before is None
    assert theirs in disk.snapshot().values()


@pytest.mark.parametrize("restart", [False, True])
def test_I1_what_was_adopted_and_withdrawn_is_not_given_up_with_a_failed_attempt(restart: bool):
    """Catches: what was taken out of service deleted, as a failed attempt has its name, too."""
    disk = SimDisk()
    went_on(disk)
    job = start(disk, "second", opened=False)
    fails_to_look(job, "listdir", f"{TWO}/.ckptfsm".__eq__, errno.EIO)
    job.open()
    job.save(3)
    for name in (".metadata", "metadata.json"):
        disk.uproot(f"{TWO}/{name}")
    if restart:
        disk.kill("second")
        job = start(disk, "third", opened=False)
        fails_to_look(job, "listdir", f"{TWO}/.ckptfsm".__eq__, errno.EIO)
        job.open()
    else:
        job.coordinator.withdraw_damaged(2, "its metadata is gone")
    ticks(job)
    assert not job.coordinator.busy
    assert PRECIOUS in disk.snapshot().values()


def test_F27_a_clean_up_tried_again_leaves_what_a_reader_holds():
    """Catches: a checkpoint that a reader uses moved away, as it has been offered to retention."""
    disk = SimDisk()
    went_on(disk)
    job = start(disk, "second", opened=False, retention=LatestN(1))
    fails_to_look(job, "listdir", f"{TWO}/.ckptfsm".__eq__, errno.EIO)
    job.open()
    job.coordinator.unpin(2)
    job.storage.before = fails("rename", moves(TWO))
    job.save(3)
    assert tracked(job) == [3]
    disk.plant_file(".ckptfsm/readers/2.r-1.json", encode(Pin(step=2, reason="reader", nonce="r")))
    ticks(job)
    assert tracked(job) == [2, 3] and TWO in names(disk)


@pytest.mark.parametrize("resume", ["fallback", "fresh"])
def test_I8_a_save_that_has_only_begun_is_no_evidence_for_what_was_staged(resume):
    """Catches: every start refused, as an attempt of ours that never had its name has the same step."""
    disk = SimDisk()
    job = start(disk, "first")
    job.fork(job.request(2))
    disk.kill("first")
    SimStorage(disk, "stock").mkdir(TWO)
    disk.plant_file(f"{TWO}/common.pt", b"x")
    assert tracked(start(disk, "second", resume=resume)) == []
    assert f"{TWO}/common.pt" in disk.snapshot()


def left_for_the_first(disk: SimDisk, how: str) -> None:
    """What was saved after step 1 is left, step 2 is begun in place, and the job is killed."""
    job = saved(disk, 1)
    if how == "by hand":
        job.coordinator.report([Failed(in_place(job, 2), "writer_hung")])
    job.save(3)
    if how == "rolled back":
        job.coordinator.rollback(1)
    elif how == "not moved":
        job.storage.before = Strike("rename", f"{THREE} -> ", OSError(errno.EIO, "sick"))
        job.coordinator.rollback(1)
    elif how == "withdrawn":
        job.coordinator.withdraw_damaged(3, "bit rot")
    elif how == "fresh":
        disk.kill("first")
        job = start(disk, "second", resume="fresh")
    else:
        job.save(4)
    if how != "by hand":
        in_place(job, 2)
    for name in ("first", "second"):
        disk.kill(name)
    if how == "by hand":
        disk.uproot(THREE)
        disk.uproot("iter_0000004")
        disk.overwrite(TRACKER, b"1")


LEFT = ("rolled back", "not moved", "withdrawn", "fresh", "by hand")


@pytest.mark.parametrize("gutted", [False, True])
@pytest.mark.parametrize("third", ["whole", "torn", "gone"])
@pytest.mark.parametrize("how", LEFT)
def test_I1_a_tracker_at_a_step_that_was_left_tells_of_another_trainer(
    how: str, third: str, gutted: bool
):
    """Catches: a stock trainer's save moved away, or deleted, as our own tracker once named the step
    that its newest has now."""
    disk = SimDisk()
    left_for_the_first(disk, how)
    for name in names(disk, THREE) if THREE in names(disk) else ():
        if name != ".ckptfsm":
            disk.uproot(f"{THREE}/{name}")
    stock_saves(disk, 2, PRECIOUS, synced=True)
    stock_saves(disk, 3, b"three" * 20, synced=True)
    if third != "whole":
        disk.uproot(f"{THREE}/{SHARD}" if third == "torn" else THREE)
    for name in (".metadata", "metadata.json") if gutted else ():
        disk.uproot(f"{TWO}/{name}")
    if gutted and how == "fresh" and third != "whole":
        with pytest.raises(DamagedRoot):
            start(disk, "third")
    else:
        job = start(disk, "third")
        ticks(job)
        assert gutted or 2 in tracked(job)
    assert disk.snapshot()[f"{TWO}/{SHARD}"] == PRECIOUS


def test_I1_what_a_person_puts_in_use_is_no_failed_attempts():
    """Catches: a stock trainer's save moved away, where a person sets the tracker as we write it."""
    disk = SimDisk()
    went_on(disk)
    disk.overwrite(TRACKER, b"2\n")
    job = start(disk, "second")
    ticks(job)
    assert tracked(job) == [1, 2] and disk.snapshot()[f"{TWO}/{SHARD}"] == PRECIOUS


@pytest.mark.parametrize("loadable", [False, True])
def test_I10_our_tracker_at_what_is_missing_keeps_no_failed_one(loadable: bool):
    """Catches: an attempt left at its name for good, as what was withdrawn explains no tracker once it
    is forgotten."""
    disk = SimDisk()
    job, of = tracked_and_in_place(disk, loadable)
    job.coordinator.report([Failed(of, "writer_hung")])
    job.save(3)
    disk.uproot(THREE)
    job.storage.before = Strike("open_exclusive", TRACKER, OSError(errno.ENOSPC, "full"))
    job.coordinator.withdraw_damaged(3, "missing")
    disk.kill("first")
    job = start(disk, "second")
    ticks(job)
    assert tracked(job) == [1] and TWO not in names(disk)


def test_I2_nothing_is_written_in_place_where_the_tracker_is():
    """Catches: what fails in place resumed from, as a full disk kept the tracker at its step."""
    disk = SimDisk()
    job = saved(disk, 1, 2)
    disk.uproot(TWO)
    job.storage.before = Strike("open_exclusive", TRACKER, OSError(errno.ENOSPC, "full"))
    job.coordinator.withdraw_damaged(2, "missing")
    with pytest.raises(StepExistsError, match="the tracker still names iter_0000002"):
        in_place(job, 2)
    job.storage.before = None
    ticks(job)
    in_place(job, 2)


def test_F5_a_failed_one_where_an_adopted_one_was_gives_space_back():
    """Catches: what fails again and again kept in quarantine, as an adopted one once had its step."""
    disk = SimDisk()
    went_on(disk)
    job = start(disk, "second")
    job.coordinator.rollback(1)
    ticks(job)
    used = disk.used
    of = in_place(job, 2)
    write_in_place(job, of, 0)
    job.fail(of)
    ticks(job)
    assert disk.used == used and TWO not in names(disk)


def failed_below_three(disk: SimDisk) -> FakeJob:
    """Steps 1 and 3 tracked; step 2 failed in place, whole as a stock loader sees it."""
    job, of = tracked_and_in_place(disk, loadable=True)
    job.coordinator.report([Failed(of, "writer_hung")])
    job.save(3)
    return job


def put_back(disk: SimDisk, kept: dict[str, bytes | str | None]) -> None:
    """A person copies step 3 to its name again, and sets the tracker (``echo 3 >``)."""
    for path, data in kept.items():
        if path.startswith(THREE) and isinstance(data, bytes):
            disk.overwrite(path, data)
        elif path.startswith(THREE):
            SimStorage(disk, "person").mkdir(path)
    disk.overwrite(TRACKER, b"3\n")


def damage_three(disk: SimDisk, lost: str) -> None:
    """Step 3 loses what tells whose it is."""
    inside = {"manifest": [MANIFEST], "private": [PRIVATE], "most": [PRIVATE, SHARD, ".metadata"]}
    for name in inside.get(lost, ()):
        disk.uproot(f"{THREE}/{name}")
    if lost == "a link":
        disk.uproot(THREE)
        disk.plant_symlink(THREE, "elsewhere")


@pytest.mark.parametrize("lost", ["manifest", "private", "most", "a link", "put back"])
def test_I2_our_tracker_is_ours_though_what_it_names_is_damaged(lost: str):
    """Catches: a failed attempt adopted, and resumed from, as our newest above it names nobody now, or
    was put back by a person."""
    disk = SimDisk()
    job = failed_below_three(disk)
    kept = disk.snapshot()
    if lost == "put back":
        job.coordinator.withdraw_damaged(3, "bit rot")
    disk.kill("first")
    if lost == "put back":
        put_back(disk, kept)
    else:
        damage_three(disk, lost)
    job = start(disk, "second")
    ticks(job)
    assert tracked(job) == [1] and TWO not in names(disk)


@pytest.mark.parametrize("lost", ["manifest", "most", "a link"])
def test_I2_a_rollback_cut_short_resumes_from_no_failed_attempt(lost: str):
    """Catches: a failed attempt resumed from, as the tracker is at the target of a rollback already,
    and the target names nobody now."""
    disk = SimDisk()
    job = failed_below_three(disk)
    job.save(4)
    job.storage.before = DiesAfterItsTracker()
    with suppress(ProcessDead, CkptFsmError):
        job.coordinator.rollback(3)
    assert content(disk, TRACKER) == b"3\n"
    disk.kill("first")
    damage_three(disk, lost)
    job = start(disk, "second")
    ticks(job)
    assert tracked(job) == [1] and TWO not in names(disk)


def test_I8_what_is_adopted_first_does_not_change_whose_the_tracker_is():
    """Catches: a stock trainer's save moved away, and an opening that fails, as what it saved over ours
    is adopted under our id before the clean-up asks."""
    disk = SimDisk()
    left_for_the_first(disk, "not moved")
    stock_saves(disk, 2, PRECIOUS, synced=True)
    disk.overwrite(f"{THREE}/{SHARD}", b"T" * len(content(disk, f"{THREE}/{SHARD}")))
    disk.overwrite(TRACKER, b"3")
    job = start(disk, "second")
    ticks(job)
    assert 3 in tracked(job) and disk.snapshot()[f"{TWO}/{SHARD}"] == PRECIOUS


def test_I9_a_writer_that_was_paused_leaves_a_successors_receipts():
    """Catches: a tracked checkpoint whose receipt is replaced by that of a fenced job's writer, which
    slept between its shards and its receipt while another job took the root over and saved the step."""
    disk = SimDisk()
    job = saved(disk, 1)
    of = in_place(job, 2)
    heirs: list[FakeJob] = []

    def before(index: int, method: str, path: str) -> None:
        if method == "open_exclusive" and "0.json.tmp" in path and not heirs:
            heirs.append(start(disk, "second", takeover=True))
            ticks(heirs[0])
            again = in_place(heirs[0], 2)
            for rank in (0, 1):
                write_in_place(heirs[0], again, rank)

    job.storage.before = before
    with pytest.raises(StorageError, match="no right to iter_0000002"):
        write_in_place(job, of, 0)
    assert tracked(heirs[0]) == [1, 2]
    manifest = read_manifest(heirs[0].storage, TWO)
    assert manifest is not None and check_digests(heirs[0].storage, TWO, manifest.files) == ""


def test_F7_an_error_of_the_look_before_the_finalizers_fails_the_attempt_alone():
    """Catches: a coordinator that ends for a directory that could not be listed for a moment."""
    disk = SimDisk()
    job = start(disk)
    sick = partial(fails_to_look, job, "listdir", EPOCHS.__eq__, errno.EIO)
    of = foreign_attempt(job, between=sick)
    assert job.coordinator.fatal is None and states(job)[str(of)] == "failed"
    job.save(2)
    assert tracked(job) == [2]


def test_I4_an_old_writer_stays_out_of_a_directory_that_is_anothers(tmp_path: Path):
    """Found by attack. Catches: a foreign writer that was stopped, or outlived its job, and wakes up
    after the next job has saved the same step: it opens its files by path, and writes over them."""
    directory = tmp_path / "iter_0000006"
    begin(directory, 1)
    gate, storage = Gate(tmp_path / "gate"), PosixStorage(tmp_path)

    def write() -> None:
        stay_out_once_it_is_anothers(storage, "iter_0000006")
        (directory / "first").write_text("the old job's")
        (tmp_path / "elsewhere").write_text("not ours to judge")
        gate.hold()
        assert (directory / "first").read_text() == "the new job's"
        for late in (partial((directory / "first").write_text, "late"), (directory / "new").mkdir):
            with suppress(StorageError):
                late()
                raise AssertionError("an old writer changed what is another's")
        (directory / "second").open("ab").close()

    child = fork_child(write, keep=storage.descriptors(), group=True)
    held = gate.reached()
    directory.rename(tmp_path / "aside")
    begin(directory, 2)
    (directory / "first").write_text("the new job's")
    os.write(held, b".")
    os.close(held)
    outcome = child.wait(20.0)
    assert outcome is not None and outcome.error is not None
    assert "is another attempt's by now: this old writer stays out" in outcome.explain()
    assert sorted(p.name for p in directory.iterdir()) == [PRIVATE, "first"]
    assert (directory / "first").read_text() == "the new job's"
    storage.close_root()


def begin(directory: Path, attempt: int) -> None:
    """What the coordinator makes of a directory in place."""
    (directory / begun_name(AttemptId(6, attempt, 1))).mkdir(parents=True)
