"""Faults that the layers of proof found in the library, each kept as a short history.

The layers print such histories as traces and seeds; here they are written out for a reader, on a
simulated disk and production code. Each test says which layer found it, and what it would catch.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress

import pytest
from roots import (
    FOUR,
    ONE,
    TWO,
    Matches,
    content,
    fails,
    fails_after,
    foreign_attempt,
    in_journal,
    is_root,
    judge,
    left,
    makes,
    moves,
    names,
    replace,
    restarted,
    saved,
    staged,
    start,
    states,
    stop,
    tracked,
)
from strangers import stock_saves

from ckptfsm.core.errors import Fenced, SaveRefused, StepNotFoundError, StorageError
from ckptfsm.core.events import Event, Failed, FinalizersRan, WriterForked
from ckptfsm.core.layout import (
    MANIFEST,
    QUARANTINE,
    STAGING,
    TRACKER,
    TRASH,
    planned_name,
)
from ckptfsm.core.lifecycle import UNFINISHED, State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.retention import LatestN
from ckptfsm.disk import inspection as evidence_module
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.disk.stock import StockVerdict
from ckptfsm.testing.harness import FakeJob
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage


def dies_at(job: FakeJob, method: str, matches: Matches, step: int) -> None:
    """Save ``step``; the process dies right before that call."""

    def before(index: int, called: str, path: str) -> None:
        if called == method and matches(path):
            raise ProcessDead(path)

    job.storage.before = before
    with pytest.raises(ProcessDead):
        job.save(step)


def once_before_listing(job: FakeJob, directory: str, happens: Callable[[], object]) -> None:
    """Let something happen at the very moment when the job is about to list a directory."""
    original, waiting = job.storage.listdir, [happens]

    def listdir(path: str) -> list[str]:
        if path == directory and waiting:
            waiting.pop()()
        return original(path)

    job.storage.listdir = listdir


def is_settled(job: FakeJob) -> bool:
    return not job.coordinator.busy and not job.coordinator.ledger.in_state(*UNFINISHED)


# ---------------------------------------------------------------------- I8: what a restart resumes


def test_I8_a_start_that_cannot_write_the_tracker_does_not_begin_from_scratch():
    """Found by exhaustive search. Catches: a full disk at a restart that lets it pass over the only
    checkpoint, because the tracker of what is finalized could not be written."""
    disk = SimDisk()
    dies_at(start(disk), "open_exclusive", lambda p: p.startswith(TRACKER), 1)
    disk.kill("first")
    full = start(disk, "full", opened=False)
    full.storage.before = fails("open_exclusive", lambda p: p.startswith(TRACKER), errno.ENOSPC)
    with pytest.raises(StorageError, match="step 1 is finalized"):
        full.open()
    disk.kill("full")
    assert tracked(restarted(disk, latest=1)) == [1]


def test_I2_a_start_that_cannot_journal_does_not_write_the_tracker_back():
    """Found by simulation. Catches: the tracker, which names the newest checkpoint already, set back
    to an older one because the journal had no room to say so."""
    disk = SimDisk()
    first = saved(disk, 1)
    killed: list[str] = []

    def after(index: int, method: str, path: str) -> None:
        if method == "rename" and makes(TRACKER)(path):
            killed.append(path)
            raise ProcessDead(path)

    first.storage.after = after
    with pytest.raises(ProcessDead):
        first.save(2)
    assert killed and content(disk, TRACKER) == b"2\n"
    disk.kill("first")
    full = start(disk, "full", opened=False)
    failed = fails_after(full, makes(TRACKER), "pwrite", in_journal)
    with suppress(StorageError):
        full.open()
    assert failed and content(disk, TRACKER) == b"2\n"
    disk.kill("full")
    assert tracked(restarted(disk, latest=2)) == [1, 2]


def test_I8_a_torn_tracker_does_not_make_a_strangers_newer_step_the_latest(monkeypatch):
    """Found by exhaustive search. Catches: a complete directory of somebody else, newer than all that
    was in use, adopted and resumed from because the tracker could not be read."""
    accepted = StockVerdict(True, "")
    monkeypatch.setattr(evidence_module, "inspect_stock", lambda *arguments: accepted)
    disk = SimDisk()
    left(disk, 1)
    SimStorage(disk, "stranger").mkdir("iter_0000009")
    replace(disk, TRACKER, b"")
    job = start(disk, "second", opened=False)
    report = job.open()
    assert report.latest_step == 1 and tracked(job) == [1]
    assert [(d.subject, d.result) for d in report.decisions if not d.actions] == [
        ("iter_0000009", "reported")
    ]
    assert content(disk, TRACKER) == b"1\n" and "iter_0000009" in names(disk)


def test_F19_a_fresh_start_leaves_no_tracker_that_names_what_it_put_aside():
    """Found by the inductive invariant. Catches: a root that the next ordinary start refuses, as the
    tracker still names the damaged checkpoint that a fresh start moved to quarantine."""
    disk = SimDisk()
    left(disk, 1)
    replace(disk, f"{ONE}/__0_0.distcp", b"gutted")
    fresh = start(disk, "fresh", opened=False, resume="fresh")
    assert fresh.open().latest_step is None
    assert TRACKER not in names(disk) and "1.e1.a1" in names(disk, QUARANTINE)
    disk.kill("fresh")
    again = start(disk, "again", opened=False)
    assert again.open().latest_step is None
    again.save(1)
    assert judge(disk, 1) == 1


# ---------------------------------------------------------- I4: published, and the journal lags


LATE_NEWS: dict[str, Callable[[AttemptId], Event]] = {
    "failure": lambda of: Failed(of, "late"),
    "wrong_world_size": lambda of: WriterForked(of, 0, 3),
}


@pytest.mark.parametrize("news", LATE_NEWS)
def test_I4_what_is_published_can_no_longer_fail(news: str):
    """Found by exhaustive search. Catches: a late report that fails an attempt whose directory has its
    name already, so that journaling ``published`` is illegal and stops the coordinator."""
    disk = SimDisk()
    job = start(disk)
    failed = fails_after(job, makes(ONE), "pwrite", in_journal)
    of = job.save(1)
    assert failed and states(job) == {"1.e1.a1": "shards_written"} and ONE in names(disk)
    job.coordinator.report([LATE_NEWS[news](of)])
    job.coordinator.tick()
    assert tracked(job) == [1] and judge(disk, 1) == 1


def test_I1_a_damaged_attempt_that_was_published_ends_in_quarantine():
    """Found by exhaustive search. Catches: an attempt that was published and damaged before its
    journal knew, which stays failed for ever: nothing settles, and it keeps its name."""
    disk = SimDisk()
    dies_at(saved(disk, 1), "pwrite", lambda p: in_journal(p) and TWO in names(disk), 2)
    disk.kill("first")
    replace(disk, f"{TWO}/__0_0.distcp", b"gutted")
    job = start(disk, "second")
    assert tracked(job) == [1] and is_settled(job), states(job)
    assert judge(disk, 1) == 1, "what does not hold is not left at a published name"
    assert names(disk, QUARANTINE) == ["2.e1.a2"] and names(disk, TRASH) == []


def test_F13_a_publish_that_lands_late_is_cleaned_up():
    """Found by simulation. Catches: the rename of a fenced trainer that takes effect while its
    successor looks around: the attempt failed, is published all the same, and nothing settles."""
    disk = SimDisk()
    dies_at(saved(disk, 1), "rename", makes(TWO), 2)
    disk.kill("first")
    (staging,) = names(disk, STAGING)
    job = start(disk, "second", opened=False)
    server = SimStorage(disk, "server")
    once_before_listing(job, STAGING, lambda: server.rename(f"{STAGING}/{staging}", TWO))
    assert job.open().latest_step == 1
    assert is_settled(job), states(job)
    assert names(disk, QUARANTINE) == ["2.e1.a2"] and judge(disk, 1) == 1
    job.save(2)
    assert judge(disk, 2) == 2


def test_I4_a_publish_that_lands_late_does_not_come_back_in_staging():
    """Found by simulation. Catches: the rename of a fenced trainer that lands after its successor has
    settled ``staging``: a power loss shows the checkpoint at both of its names."""
    disk = SimDisk()
    dies_at(saved(disk, 1), "rename", makes(TWO), 2)
    disk.kill("first")
    (staging,) = names(disk, STAGING)
    job = start(disk, "second", opened=False)
    server = SimStorage(disk, "server")
    once_before_listing(job, "", lambda: server.rename(f"{STAGING}/{staging}", TWO))
    assert job.open().latest_step == 2
    assert disk.possible(f"{STAGING}/{staging}") == [None]


# ------------------------------------------------------------------------ attempts that must end


def test_F5_a_failed_roll_forward_waits_for_no_dead_writer():
    """Found by simulation. Catches: an attempt whose roll forward failed at a restart, and that waits
    for the end of writers that died with the run before: nothing ever settles."""
    disk = SimDisk()
    dies_at(start(disk), "open_exclusive", lambda p: "metadata" in p, 1)
    disk.kill("first")
    job = start(disk, "second", opened=False)
    job.storage.before = fails("open_exclusive", lambda p: "metadata" in p)
    job.open()
    assert is_settled(job) and states(job) == {}, states(job)
    assert names(disk, STAGING) == [], "out of the way"
    job.save(1)
    assert judge(disk, 1) == 1


def test_I6_finalizers_that_end_after_their_attempt_failed_finalize_nothing():
    """Found by simulation. Catches: an attempt that was condemned while its foreign finalizers ran,
    and is committed once the last rank reports that they are done."""
    disk = SimDisk()
    job = start(disk)
    of = foreign_attempt(job)
    disk.plant_file(f"{ONE}/.metadata", b"m")
    disk.plant_file(f"{ONE}/metadata.json", b"{}")
    job.coordinator.report([FinalizersRan(of, 0), WriterForked(of, 1, 3), FinalizersRan(of, 1)])
    failed = job.coordinator.ledger.checkpoints[of]
    assert (failed.state, failed.reason) == (State.FAILED, "wrong_world_size")
    assert f"{ONE}/{MANIFEST}" not in disk.snapshot() and TRACKER not in disk.snapshot()


def test_F30_a_finisher_that_raises_fails_its_attempt():
    """Found by corruption. Catches: an error of a part's own code that escapes, so that its attempt is
    in flight until the deadline and no other save can begin."""
    disk = SimDisk()
    job = start(disk)
    of, directory = staged(job, 1)
    job.write(of, 0)
    planned = f"{directory}/{planned_name('state')}"
    replace(disk, planned, bytes(len(content(disk, planned))))
    job.write(of, 1)
    failed = job.coordinator.ledger.checkpoints[of]
    assert (failed.state, failed.reason) == (State.FAILED, "finalize")
    assert "planned metadata is torn" in failed.detail
    job.fail(of)
    job.save(1)
    assert job.acknowledged == [1] and judge(disk, 1) == 1


# ------------------------------------------------------------------- prunes, tried again or undone


def test_F27_a_rollback_brings_a_pruned_directory_back_for_its_reader():
    """Found by the inductive invariant. Catches: a rollback that takes a prune for done whose way back
    failed, after which a reader's checkpoint is deleted under it."""
    disk = SimDisk()
    job = saved(disk, 1, retention=LatestN(1))
    lease = ReaderLease("/sim", 1, storage=SimStorage(disk, "reader"))
    failed = []

    def before(index: int, method: str, path: str) -> None:
        if method == "rename" and moves(ONE)(path):
            lease.__enter__()
        if method == "rename" and makes(ONE)(path) and not failed:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    job.storage.before = before
    job.save(2)
    assert failed and states(job)["1.e1.a1"] == "prunable" and ONE not in names(disk)
    job.coordinator.rollback(2)
    job.coordinator.tick()
    assert ONE in names(disk) and tracked(job) == [1, 2]
    assert judge(disk, 2) == 2


@pytest.mark.parametrize("when", ["in one go", "restart", "rollback"])
def test_I2_a_pruned_directory_that_was_gutted_does_not_count_once_it_is_back(when: str):
    """Found by the exhaustive search. Catches: a reader's lease brings back what somebody had gutted
    before it was pruned, and it is tracked again: one to be resumed from, though not whole."""
    disk = SimDisk()
    job = saved(disk, 1, 2)
    replace(disk, f"{ONE}/__0_0.distcp", b"")
    lease = ReaderLease("/sim", 1, storage=SimStorage(disk, "reader"))
    failed = []

    def before(index: int, method: str, path: str) -> None:
        if method == "rename" and moves(ONE)(path):
            lease.__enter__()
        elif method == "rename" and makes(ONE)(path) and not failed and when != "in one go":
            failed.append(path)
            if when == "restart":
                raise ProcessDead(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    job.storage.before = before
    if when == "restart":
        with pytest.raises(ProcessDead):
            job.coordinator.delete(1)
        disk.kill("first")
        job = restarted(disk, latest=2)
    else:
        with suppress(SaveRefused):
            job.coordinator.delete(1)
    if when == "rollback":
        assert states(job)["1.e1.a1"] == "prunable"
        job.coordinator.rollback(2)
    assert tracked(job) == [2] and judge(disk, 2) == 2
    assert names(disk, QUARANTINE) == ["1.e1.a1"] and names(disk, TRASH) == []


def test_F27_a_rollback_takes_a_step_from_its_reader_to_quarantine_and_the_reader_is_told():
    """Found by the Hypothesis suites. Catches: a reader that goes on as if its step were there; a
    checkpoint that is deleted under its lease, once a rollback has taken it."""
    disk = SimDisk()
    job = saved(disk, 1, 2)
    with ReaderLease("/sim", 2, storage=SimStorage(disk, "reader")) as lease:
        whole = {p.removeprefix(TWO) for p in disk.snapshot() if p.startswith(TWO)}
        job.coordinator.rollback(1)
        with pytest.raises(StepNotFoundError, match="step 2 is not at"):
            lease.renew()
        for _ in range(3):
            job.coordinator.tick()
        aside = f"{QUARANTINE}/2.e1.a2"
        assert {p.removeprefix(aside) for p in disk.snapshot() if p.startswith(aside)} == whole


def test_I5_a_rollback_does_not_take_a_newer_attempt_for_a_pending_prunes():
    """Found by the inductive invariant. Catches: a prune that was tried again by the name of its step
    only: the rollback brings two attempts back for one directory, and the step is never free again."""
    disk = SimDisk()
    job = saved(disk, 1, retention=LatestN(1))
    job.coordinator.pin(1, "keep")
    job.save(2)
    failed = fails_after(job, moves(TWO), "fsync_dir", is_root)
    job.save(3)
    assert failed and states(job)["2.e1.a2"] == "prunable" and TWO not in names(disk)
    job.coordinator.withdraw_damaged(3, "bit rot")
    job.save(2)
    job.coordinator.rollback(1)
    assert TWO not in names(disk) and names(disk, QUARANTINE) == ["2.e1.a4", "3.e1.a3"]
    assert "2.e1.a2" not in states(job)
    job.save(2)
    assert tracked(job) == [1, 2] and judge(disk, 2) == 2


def test_I2_the_tracker_is_durable_before_what_it_named_is_moved_away():
    """Found by the inductive invariant. Catches: a withdrawal tried again after the root's fsync
    failed: a power loss can leave a tracker that names what was moved away."""
    disk = SimDisk()
    job = saved(disk, 1, 2)
    failed = fails_after(job, makes(TRACKER), "fsync_dir", is_root)
    job.coordinator.withdraw_damaged(2, "bit rot")
    assert failed and TWO in names(disk)
    survivors = []

    def before(index: int, method: str, path: str) -> None:
        if method == "rename" and moves(TWO)(path):
            survivors.extend(disk.content(kept) for kept in disk.possible(TRACKER))

    job.storage.before = before
    job.coordinator.tick()
    assert survivors == [b"1\n"], "what a power loss could leave of the tracker at that moment"
    assert names(disk, QUARANTINE) == ["2.e1.a2"] and judge(disk, 1) == 1


def test_I2_a_checkpoint_older_than_one_brought_back_is_not_tracked():
    """Found by the inductive invariant. Catches: the tracker written back below the latest, when a
    checkpoint that waited to be pruned came back while an older step was being saved."""
    disk = SimDisk()
    job = saved(disk, 1, retention=LatestN(1))
    job.coordinator.pin(1, "keep")
    job.save(4)
    job.storage.before = fails("rename", moves(FOUR))
    job.save(6)
    assert states(job)["4.e1.a2"] == "prunable"
    job.coordinator.withdraw_damaged(6, "bit rot")
    of = job.request(2)
    job.fork(of)
    job.coordinator.tick()
    assert tracked(job) == [1, 4], "the prune was not done, and nothing newer is left"
    for rank in range(job.ranks):
        job.write(of, rank)
    assert job.acknowledged == [1, 4, 6] and content(disk, TRACKER).strip() != b"2"
    assert job.coordinator.ledger.checkpoints[of].state is State.QUARANTINED
    assert names(disk, QUARANTINE) == [str(of), "6.e1.a3"]
    stop(disk, job)
    assert tracked(restarted(disk, latest=4)) == [1, 4]


def test_I8_a_fresh_start_leaves_nothing_at_the_name_of_what_lies_in_the_trash():
    """Found by the recovery machine. Catches: a step that a stock trainer saved anew after ours had
    gone to the trash (a fenced trainer's rename landed late), taken for ours and left at its name."""
    disk = SimDisk()
    job = saved(disk, 1)
    job.save(2)
    stop(disk, job)
    SimStorage(disk, "late").rename(ONE, f"{TRASH}/1.e1.a1")
    stock_saves(disk, 1, tracked=False)
    afresh = start(disk, "afresh", resume="fresh")
    assert tracked(afresh) == [] and not [n for n in names(disk) if n.startswith("iter_")]
    assert {"1.e1.a1", "1.e2.a1", "2.e1.a2"} <= set(names(disk, QUARANTINE))


# ------------------------------------------------------------------------------------ I9: fencing


def test_I9_a_fenced_trainer_deletes_nothing_that_its_successor_put_in_the_trash():
    """Found by the model of races. Catches: a paused trainer whose check of the epoch was long ago,
    and that deletes a directory which its successor may still bring back for a reader."""
    disk = SimDisk()
    first = saved(disk, 1)
    successors = []

    def take_over() -> None:
        second = start(disk, "second", takeover=True, retention=LatestN(1))
        second.save(2)
        successors.append(second)

    once_before_listing(first, TRASH, take_over)
    with suppress(Fenced):
        first.coordinator.tick()
    assert tracked(successors[0]) == [2] and names(disk, TRASH) == ["gone-1.e1.a1"]
    shards = [p for p in disk.snapshot() if p.startswith(TRASH) and p.endswith(".distcp")]
    assert len(shards) == 2, "whole"
    assert isinstance(first.coordinator.fatal, Fenced)


def test_I4_the_trash_waits_until_a_failed_attempt_in_place_is_durably_there():
    """Found by simulation. Catches: files deleted from the trash while the move that took their
    directory from its published name is not durable: a power loss brings it back, gutted."""
    disk = SimDisk()
    job = start(disk)
    of = foreign_attempt(job)
    failed: list[str] = []

    def before(index: int, called: str, path: str) -> None:
        moved = ONE not in names(disk)
        if called == "fsync_dir" and is_root(path) and moved and not failed:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    job.storage.before = before
    job.fail(of)
    engine = job.coordinator._engine
    assert failed and engine.pending and engine.give_space_back(99) == 0
    job.coordinator.tick()
    assert not engine.pending
    assert job.storage.listdir(TRASH) == [], "now its space is given back"
