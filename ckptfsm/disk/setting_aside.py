"""Setting aside: a directory leaves its name for the trash or for quarantine, and may come back.

A prune, a clean-up and a quarantine look at the disk, let ``core.keeping`` decide, and move. Each checks
the epoch first (I9), is durable when it returns, and may be tried again after any error. A link, a file
or a mount at a step's name is neither followed nor moved (F16).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckptfsm.adapters.notices import say
from ckptfsm.core.errors import DamagedRoot, StorageError
from ckptfsm.core.evidence import PublishedEvidence, is_whole, went_on, why_not_whole
from ckptfsm.core.keeping import (
    AtName,
    CleanUpDecision,
    CleanUpFacts,
    Holds,
    InPlaceDecision,
    InPlaceFacts,
    Place,
    PruneDecision,
    PruneFacts,
    QuarantineDecision,
    QuarantineFacts,
    at_name,
    decide_clean_up,
    decide_in_place,
    decide_left,
    decide_prune,
    decide_quarantine,
    is_taken,
    place_of,
    why_kept,
)
from ckptfsm.core.layout import (
    GONE,
    PRIVATE,
    QUARANTINE,
    TRACKER,
    TRASH,
    Layout,
    gone_dir,
    quarantine_dir,
    trash_dir,
)
from ckptfsm.core.lifecycle import Checkpoint
from ckptfsm.core.ports import FileStat, Storage
from ckptfsm.disk.durable import fsync_private, lookup, move, parent_of
from ckptfsm.disk.inspection import (
    contents_of,
    inspect_published,
    is_marked,
    moved_aside,
    pinned_steps,
    read_tracker,
    reader_leases,
    which_comes_back,
)
from ckptfsm.disk.trash import sweep_temporaries

log = logging.getLogger("ckptfsm")
_NAMES = 100


class Pruned(NamedTuple):
    """How a prune ended: the reason why it stays after all, or where this call moved it, or neither."""

    kept: str = ""
    aside: str = ""


@dataclass(frozen=True, slots=True)
class Mover:
    """Moves directories of one epoch. ``check_epoch`` raises ``Fenced``; ``tag`` is in new names."""

    storage: Storage
    tag: str
    check_epoch: Callable[[], None]
    layout: Layout

    def set_aside(self, path: str, name: str, *, discard: bool = False) -> str:
        """Move a directory to ``name`` in quarantine, or beside it. Returns its path there.

        ``discard``: let it be deleted, under a name in the trash that no other's late rename aims at.
        """
        self.check_epoch()
        place = f"{TRASH}/{GONE}" if discard else f"{QUARANTINE}/"
        return move_aside(self.storage, path, place + name)

    def set_aside_tracker(self) -> None:
        """Move the tracker to quarantine: only a fresh start does this."""
        if lookup(self.storage, TRACKER) is not None:
            self.set_aside(TRACKER, f"tracker.{self.tag}")

    # ------------------------------------------------------------------------------------- prune

    def prune(self, checkpoint: Checkpoint, newer_step: int) -> Pruned:
        """Move a prunable checkpoint to the trash, unless something keeps it after all (I7).

        Everything that may keep it is looked at on disk: also the newer one, for which it may go. Raises
        ``DamagedRoot`` if the directory that stands at its name then is not whole.
        """
        self.check_epoch()
        if not self._is_at_its_name(checkpoint):
            return self._prune_left(checkpoint, newer_step)
        facts = self._look_at_prunable(checkpoint, newer_step)
        decision = decide_prune(facts)
        if decision is not PruneDecision.MOVE:
            return self._stay(checkpoint, why_kept(decision, facts))
        source = self.layout.published_name(checkpoint.step)
        aside = move_aside(self.storage, source, trash_dir(checkpoint.id))
        # A pin, a lease or a tracker that came between look and move brings it back (F27). If a crash
        # comes first, ``_prune_left`` does so: the journal has it as prunable until then.
        facts = replace(facts, holds=self._look_at_holds(checkpoint.step))
        decision = decide_prune(facts)
        if decision is not PruneDecision.MOVE:
            return self._bring_back(checkpoint, aside, why_kept(decision, facts))
        return Pruned(aside=aside)

    def resume_prune(self, checkpoint: Checkpoint, newer_step: int) -> Pruned:
        """Decide a prune that a rollback finds undecided: a directory at its name stays.

        Raises ``DamagedRoot`` as ``prune`` does.
        """
        self.check_epoch()
        if self._is_at_its_name(checkpoint):
            return self._stay(checkpoint, "rollback")
        return self._prune_left(checkpoint, newer_step)

    def _is_at_its_name(self, checkpoint: Checkpoint) -> bool:
        """False if it left its name before. Raises ``DamagedRoot`` if neither is certain."""
        _, there = self._look(checkpoint.step)
        moved = self.lies_in(TRASH, checkpoint) | self.lies_in(QUARANTINE, checkpoint)
        place = place_of(checkpoint, there, bool(moved))
        if place is Place.DAMAGED:
            raise self._not_whole(checkpoint, there)
        return place is Place.AT_ITS_NAME

    def _look(self, step: int) -> tuple[FileStat | None, PublishedEvidence | None]:
        """Look at a step's name: the kind of file there, and its checkpoint; None for nothing."""
        found = lookup(self.storage, self.layout.published_name(step))
        if found is None:
            return None, None
        return found, inspect_published(self.storage, self.layout, step, files=False)

    def lies_in(self, directory: str, checkpoint: Checkpoint) -> frozenset[str]:
        """The paths in trash or quarantine to which directories of this checkpoint were moved."""
        return frozenset(moved_aside(self.storage, directory).get(checkpoint.id, ()))

    def _look_at_prunable(self, checkpoint: Checkpoint, newer_step: int) -> PruneFacts:
        """Look at the newer one, for which a checkpoint may go, and then at all that may keep it."""
        newer = lookup(self.storage, self.layout.published_name(newer_step))
        return PruneFacts(
            step=checkpoint.step,
            newer_step=newer_step,
            newer_is_there=newer is not None and newer.kind == "dir",
            holds=self._look_at_holds(checkpoint.step),
        )

    def _look_at_holds(self, step: int) -> Holds:
        """Look at pins, leases, the tracker and the name of a step, in this order."""
        pinned = step in pinned_steps(self.storage)
        leased = step in reader_leases(self.storage).values()
        tracker = read_tracker(self.storage)
        found = lookup(self.storage, self.layout.published_name(step))
        foreign = found is not None and self._is_not_ours(found)
        return Holds(pinned, leased, tracker.step, foreign)

    def _prune_left(self, checkpoint: Checkpoint, newer_step: int) -> Pruned:
        """Decide the prune of a checkpoint that left its name before: an error or a crash came then.

        Raises ``DamagedRoot`` if it is needed and another directory has its name: it stays in the trash.
        """
        self._make_durable(TRASH, "")  # else a power loss undoes the move of a killed process
        paths = sorted(self.lies_in(TRASH, checkpoint))
        if not paths:
            return Pruned()
        name = self.layout.published_name(checkpoint.step)
        taken = lookup(self.storage, name) is not None
        facts = self._look_at_prunable(checkpoint, newer_step)
        left = decide_left(facts, taken)
        if left is PruneDecision.MOVE:  # nothing keeps it
            return Pruned()
        why = why_kept(left, facts)
        if taken:
            problem = f"something else has its name, and it cannot come back: {why}"
            raise DamagedRoot(problem, file=name, step=checkpoint.step)
        back = which_comes_back(self.storage, self.layout, checkpoint, paths) or paths[0]
        return self._bring_back(checkpoint, back, why)

    def _bring_back(self, checkpoint: Checkpoint, aside: str, why: str) -> Pruned:
        """Move it back to its name, after another look at the epoch.

        A successor may be emptying the trash by now (I9).
        """
        self.check_epoch()
        move(self.storage, aside, self.layout.published_name(checkpoint.step))
        return self._stay(checkpoint, why)

    def _stay(self, checkpoint: Checkpoint, why: str) -> Pruned:
        """Make its name durable, also if it had left it. Raises ``DamagedRoot`` if it is not whole."""
        # Else a power loss puts a checkpoint in use back into the trash.
        self._make_durable("", TRASH)
        there = inspect_published(self.storage, self.layout, checkpoint.step)
        if not is_whole(checkpoint, there):
            raise self._not_whole(checkpoint, there)
        return Pruned(kept=why)

    def _not_whole(self, checkpoint: Checkpoint, there: PublishedEvidence | None) -> DamagedRoot:
        why, name = why_not_whole(checkpoint, there), self.layout.published_name(checkpoint.step)
        return DamagedRoot(why, file=name, step=checkpoint.step)

    # ---------------------------------------------------------------------------------- clean up

    def clean_up(self, checkpoint: Checkpoint, *, alone: bool, held: bool) -> str:
        """Move a failed attempt's directory aside. Returns its path if it is to be discarded from there.

        ``alone``: no other attempt may stand at its name; ``held``: another one has it in use. If it
        stands at its published name (a fenced trainer's rename can land late), it is kept (I1).
        """
        self.check_epoch()
        directory = self.layout.working_dir(checkpoint.id, checkpoint.in_place)
        name = self.layout.published_name(checkpoint.step)
        facts = self._look_at_failed(checkpoint, alone=alone, held=held)
        match decide_clean_up(facts):
            case CleanUpDecision.LEAVE_NOT_OURS:
                _say_left(checkpoint.step, name)
            case CleanUpDecision.QUARANTINE_PUBLISHED:
                move_aside(self.storage, name, quarantine_dir(checkpoint.id))
            case CleanUpDecision.LEAVE_TO_OTHERS:
                # A late rename of the process that failed would put our manifest over their files (I9).
                sweep_temporaries(self.storage, (f"{name}/{PRIVATE}",))
            case CleanUpDecision.NOTHING_LEFT:
                # Else a power loss brings it back, at the name that an earlier try moved it from.
                self._make_durable(QUARANTINE, TRASH, parent_of(directory), "")
            case CleanUpDecision.DISCARD:
                move_aside(self.storage, directory, gone_dir(checkpoint.id))
            case CleanUpDecision.LOOK_INSIDE:
                return self._clean_up_in_place(checkpoint, alone, facts.at_name)
        return ""

    def _look_at_failed(self, checkpoint: Checkpoint, *, alone: bool, held: bool) -> CleanUpFacts:
        """Look at a failed attempt's published name, and at its working directory."""
        found = lookup(self.storage, self.layout.published_name(checkpoint.step))
        if found is None:
            whose = AtName.NOTHING
        elif self._is_not_ours(found):
            whose = AtName.NOT_OURS
        else:
            there = inspect_published(self.storage, self.layout, checkpoint.step, files=False)
            whose = at_name(checkpoint, there)
        tracker_tells = checkpoint.in_place and went_on(checkpoint, read_tracker(self.storage))
        directory = self.layout.working_dir(checkpoint.id, checkpoint.in_place)
        return CleanUpFacts(
            in_place=checkpoint.in_place,
            at_name=whose,
            working_dir=lookup(self.storage, directory) is not None,
            alone=alone,
            held=held,
            went_on=tracker_tells,
        )

    def _clean_up_in_place(self, checkpoint: Checkpoint, alone: bool, whose: AtName) -> str:
        """Move a directory in place aside. Returns its path if it is to be discarded from there."""
        directory = self.layout.published_name(checkpoint.step)
        marked = is_marked(self.storage, directory, checkpoint.id)
        contents = contents_of(self.storage, directory, checkpoint)
        facts = InPlaceFacts(alone, whose, marked, contents)
        match decide_in_place(facts):
            case InPlaceDecision.LEAVE:
                return ""
            case InPlaceDecision.QUARANTINE:
                move_aside(self.storage, directory, quarantine_dir(checkpoint.id))
                return ""
            case InPlaceDecision.DISCARD:
                # Not to a name that may be deleted: a power loss during the deletion would restore
                # it gutted, under its published name (I4).
                aside = move_aside(self.storage, directory, trash_dir(checkpoint.id))
                # A stock trainer may have completed it between look and move (I1).
                contents = contents_of(self.storage, aside, checkpoint)
                still = decide_in_place(replace(facts, contents=contents))
                return aside if still is InPlaceDecision.DISCARD else ""

    # -------------------------------------------------------------------------------- quarantine

    def is_taken(self, checkpoint: Checkpoint, earlier: frozenset[str]) -> bool:
        """True if a complete checkpoint of another program stands at its name. See ``quarantine``."""
        there = inspect_published(self.storage, self.layout, checkpoint.step)
        in_trash = self.lies_in(TRASH, checkpoint)
        moved = in_trash | (self.lies_in(QUARANTINE, checkpoint) - earlier)
        return is_taken(checkpoint, there, bool(moved))

    def quarantine(self, checkpoint: Checkpoint, *, alone: bool, earlier: frozenset[str]) -> None:
        """Move a withdrawn checkpoint aside, for a person to look at.

        Only directories of this checkpoint are moved: its step may have been saved again meanwhile.
        ``alone``: no other attempt has a right to its name. ``earlier``: the paths in quarantine at
        the first try; newer paths were moved there by an earlier try of this command.
        """
        self.check_epoch()
        for path in sorted(self.lies_in(TRASH, checkpoint)):
            move_aside(self.storage, path, quarantine_dir(checkpoint.id))
        moved = self.lies_in(QUARANTINE, checkpoint) - earlier
        found, there = self._look(checkpoint.step) if alone else (None, None)
        foreign = found is not None and self._is_not_ours(found)
        source = self.layout.published_name(checkpoint.step)
        facts = QuarantineFacts(alone, there, bool(moved), foreign)
        match decide_quarantine(checkpoint, facts):
            case QuarantineDecision.NOTHING_TO_MOVE:
                # Else a power loss undoes an earlier move.
                self._make_durable(QUARANTINE, "", TRASH)
            case QuarantineDecision.LEAVE_NOT_OURS:
                _say_left(checkpoint.step, source)
            case QuarantineDecision.MOVE:
                move_aside(self.storage, source, quarantine_dir(checkpoint.id))

    # ------------------------------------------------------------------------------------ common

    def _is_not_ours(self, found: FileStat) -> bool:
        """True for a link, a file or a mount at a step's name."""
        return found.kind != "dir" or found.device != self.storage.stat(PRIVATE).device

    def _make_durable(self, *directories: str) -> None:
        """Make moves durable that were found done: first where they lead to, then where they begin."""
        for directory in directories:
            fsync_private(self.storage, directory)


def move_aside(storage: Storage, source: str, target: str) -> str:
    """Move to ``target``, or beside it: a power loss can leave a rename at both of its names."""
    storage.fsync_dir("")  # else a power loss may undo the tracker that makes this one dispensable
    for suffix in ("", *(f".{n}" for n in range(1, _NAMES))):
        if lookup(storage, target + suffix) is None:
            move(storage, source, target + suffix)
            return target + suffix
    raise StorageError(f"{_NAMES} directories stand at {target}", file=target)


def _say_left(step: int, path: str) -> None:
    said = f"step {step}: {path} is left where it is: another program wrote it"
    say(log.warning, "left_at_its_name", said, step=step, file=path)
