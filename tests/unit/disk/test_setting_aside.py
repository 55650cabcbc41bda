"""Looks and moves: every reason to keep a checkpoint is seen before its move, after it, and after a
crash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as changed

import pytest
from roots import ONE, TWO, names, replace, saved, staged

from ckptfsm.core.errors import DamagedRoot, Fenced
from ckptfsm.core.layout import PINS, QUARANTINE, READERS, TRACKER, TRASH, quarantine_dir, trash_dir
from ckptfsm.core.lifecycle import Checkpoint
from ckptfsm.disk.durable import make_dirs
from ckptfsm.disk.setting_aside import Mover, Pruned
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.testing.harness import FakeJob
from ckptfsm.testing.simfs import SimDisk, SimStorage

ASIDE = f"{TRASH}/1.e1.a1"
Meddling = Callable[[SimDisk], None]


def vandal(disk: SimDisk) -> SimStorage:
    return SimStorage(disk, "vandal")


def is_pinned(disk: SimDisk) -> None:
    disk.plant_file(f"{PINS}/1.json", b"torn")


def is_leased(disk: SimDisk) -> None:
    disk.plant_file(f"{READERS}/1.nonce.json", b"torn")


def tracker_names_it(disk: SimDisk) -> None:
    replace(disk, TRACKER, b"1\n")


def tracker_is_torn(disk: SimDisk) -> None:
    replace(disk, TRACKER, b"")


def newer_is_gone(disk: SimDisk) -> None:
    vandal(disk).rename(TWO, "elsewhere")


HOLDS: list[tuple[Meddling, str]] = [
    (is_pinned, "pin"),
    (is_leased, "reader"),
    (tracker_names_it, "the tracker says 1"),
    (tracker_is_torn, "the tracker says None"),
]
IDS = ["pinned", "leased", "named by the tracker", "tracker torn"]


@pytest.fixture
def disk() -> SimDisk:
    return SimDisk()


@pytest.fixture
def job(disk: SimDisk) -> FakeJob:
    """A job that has saved steps 1 and 2."""
    return saved(disk, 1, 2)


def mover_of(job: FakeJob) -> Mover:
    return job.coordinator._applier.mover


def checkpoint(job: FakeJob, step: int) -> Checkpoint:
    found = job.coordinator.ledger.at(step)
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------- prune


def test_I7_a_checkpoint_that_nothing_keeps_is_moved_to_the_trash(disk, job):
    """Catches: a look that finds a hold where there is none, so that the disk fills up."""
    assert mover_of(job).prune(checkpoint(job, 1), 2) == Pruned(aside=ASIDE)
    assert ONE not in names(disk) and names(disk, TRASH) == ["1.e1.a1"]


@pytest.mark.parametrize(
    ("meddle", "why"),
    [*HOLDS, (newer_is_gone, "step 2 is not there")],
    ids=[*IDS, "newer gone"],
)
def test_I7_each_hold_is_seen_before_the_move(disk, job, meddle, why):
    """Catches: a hold that is decided well and never looked at."""
    meddle(disk)
    assert mover_of(job).prune(checkpoint(job, 1), 2) == Pruned(kept=why)
    assert ONE in names(disk) and names(disk, TRASH) == []


@pytest.mark.parametrize(("meddle", "why"), HOLDS, ids=IDS)
def test_F27_each_hold_that_comes_during_the_move_brings_it_back(disk, job, meddle, why):
    """Catches: facts from before the move that are taken for those after it."""
    assert isinstance(job.storage, FaultStorage)

    def after(index: int, method: str, path: str) -> None:
        if method == "rename" and path == f"{ONE} -> {ASIDE}":
            meddle(disk)

    job.storage.after = after
    assert mover_of(job).prune(checkpoint(job, 1), 2) == Pruned(kept=why)
    assert ONE in names(disk) and names(disk, TRASH) == []


@pytest.mark.parametrize(
    ("meddle", "why"),
    [
        (is_pinned, "pin"),
        (is_leased, "reader"),
        (tracker_names_it, "the tracker names it"),
        (newer_is_gone, "step 2 is not there"),
    ],
)
def test_F27_I10_a_crash_after_the_move_leaves_each_hold_to_the_next_start(disk, job, meddle, why):
    """Catches: a checkpoint that is held, and stays in the trash for a process that was killed; a prune
    that is undone, or waits for ever, as a crash came in the middle."""
    vandal(disk).rename(ONE, ASIDE)
    assert mover_of(job).prune(checkpoint(job, 1), 2) == Pruned()
    assert ONE not in names(disk) and names(disk, TRASH) == ["1.e1.a1"]
    meddle(disk)
    assert mover_of(job).prune(checkpoint(job, 1), 2) == Pruned(kept=why)
    assert ONE in names(disk) and names(disk, TRASH) == []


def test_I7_a_held_checkpoint_whose_name_is_taken_is_told_of(disk, job):
    """Catches: a stranger's directory that is moved away, or taken for the checkpoint that was there."""
    vandal(disk).rename(ONE, ASIDE)
    make_dirs(vandal(disk), ONE)
    is_pinned(disk)
    with pytest.raises(
        DamagedRoot, match="something else has its name, and it cannot come back: pin"
    ):
        mover_of(job).prune(checkpoint(job, 1), 2)
    assert names(disk, ONE) == [] and names(disk, TRASH) == ["1.e1.a1"]


# -------------------------------------------------------------------------------- tried once more


def test_I10_each_move_may_be_tried_again(disk, job):
    """Catches: a second try after an error that fails on what the first one did, or does it twice."""
    of, directory = staged(job, 3)
    failed = job.coordinator.ledger.checkpoints[of]
    mover, one, two = mover_of(job), checkpoint(job, 1), checkpoint(job, 2)
    tries = (
        lambda: mover.prune(one, 2),
        lambda: mover.clean_up(failed, alone=True, held=False),
        lambda: mover.quarantine(two, alone=True, earlier=frozenset()),
        mover.set_aside_tracker,
    )
    for tried in tries:
        tried()
        once = disk.snapshot()
        tried()
        assert disk.snapshot() == once
    assert names(disk, TRASH) == ["1.e1.a1", f"gone-{of}"]
    assert names(disk, QUARANTINE) == ["2.e1.a2", f"tracker.{mover.tag}"]
    assert directory not in disk.snapshot()


# ------------------------------------------------------------------------------------------ fenced


def refuse() -> None:
    raise Fenced("a newer manager took this root over")


def test_I9_a_fenced_owner_changes_nothing(disk, job, monkeypatch):
    """Catches: a method that looks at the epoch after its first change, or not at all."""
    of, _ = staged(job, 3)
    unfinished = job.coordinator.ledger.checkpoints[of]
    one = checkpoint(job, 1)
    vandal(disk).rename(TWO, ASIDE)
    applier = job.coordinator._applier
    mover = changed(applier.mover, check_epoch=refuse)
    publisher = changed(applier.publisher, check_epoch=refuse)
    monkeypatch.setattr(applier, "check_epoch", refuse)
    before = disk.snapshot()
    for change in (
        lambda: mover.set_aside(ONE, "one"),
        mover.set_aside_tracker,
        lambda: mover.prune(one, 2),
        lambda: mover.resume_prune(one, 2),
        lambda: mover.clean_up(unfinished, alone=True, held=False),
        lambda: mover.quarantine(one, alone=True, earlier=frozenset()),
        lambda: publisher.create_staging(unfinished),
        lambda: publisher.finalize(unfinished),
        lambda: publisher.write_tracker(1),
        lambda: applier.pin(1, "kept"),
    ):
        with pytest.raises(Fenced):
            change()
        assert disk.snapshot() == before


# ----------------------------------------------------------------------------------------- a name


def test_I1_a_second_directory_is_put_beside_the_first(disk, job):
    """Catches: a move onto a directory that a power loss left at both of its names."""
    make_dirs(vandal(disk), trash_dir(checkpoint(job, 1).id))
    assert mover_of(job).prune(checkpoint(job, 1), 2) == Pruned(aside=f"{ASIDE}.1")
    assert names(disk, TRASH) == ["1.e1.a1", "1.e1.a1.1"]
    make_dirs(vandal(disk), quarantine_dir(checkpoint(job, 2).id))
    earlier = mover_of(job).lies_in(QUARANTINE, checkpoint(job, 2))
    mover_of(job).quarantine(checkpoint(job, 2), alone=True, earlier=earlier)
    assert names(disk, QUARANTINE) == ["2.e1.a2", "2.e1.a2.1"]
