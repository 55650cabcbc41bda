"""Setting aside: a directory leaves its name for the trash or for quarantine, and may come back.

Rules: every method checks the epoch first (I9), is idempotent, and either happened durably when it
returns or raises. Nothing is deleted here (that is done in ``trash``): everything is only renamed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ckptfsm.adapters.notices import say
from ckptfsm.core.errors import DamagedRoot, StorageError
from ckptfsm.core.evidence import PublishedEvidence, is_its_own, is_whole, went_on, why_not_whole
from ckptfsm.core.layout import (
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
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import FileStat, Storage
from ckptfsm.disk.durable import lookup, move, parent_of
from ckptfsm.disk.inspection import (
    inspect_published,
    is_bare,
    is_cut_short,
    is_marked,
    moved_aside,
    read_tracker,
    which_comes_back,
)
from ckptfsm.disk.protection import Protection
from ckptfsm.disk.trash import sweep_temporaries

log = logging.getLogger("ckptfsm")
_NAMES = 100


class Pruned(NamedTuple):
    """How a prune ended: what keeps it after all, or where this very call has moved it, or neither."""

    kept: str = ""
    aside: str = ""


@dataclass(frozen=True, slots=True)
class Mover:
    """Moves directories of one epoch. ``check_epoch`` raises ``Fenced``; ``tag`` is in new names."""

    storage: Storage
    tag: str
    check_epoch: Callable[[], None]
    layout: Layout
    protection: Protection

    def set_aside(self, name: str) -> str:
        """Move what is partial, and in the way of a save, to quarantine. Returns its name there."""
        self.check_epoch()
        return move_aside(self.storage, name, f"{QUARANTINE}/{name}.{self.tag}")

    def set_aside_tracker(self) -> None:
        """Move the tracker to quarantine: only a fresh start does this."""
        self.check_epoch()
        if lookup(self.storage, TRACKER) is not None:
            move_aside(self.storage, TRACKER, f"{QUARANTINE}/tracker.{self.tag}")

    def prune(self, checkpoint: Checkpoint, newer_step: int) -> Pruned:
        """Move a prunable checkpoint to the trash, unless something keeps it after all (I7).

        Every guard is looked at again on disk: pins, leases, the tracker, and that the newer one,
        which makes this one removable, is really there. Pins, leases and the tracker are looked at
        once more after the move: what was taken in between brings the directory back (F27), also if a
        crash came between the two. Raises ``DamagedRoot`` if what stands at its name then is not whole.
        """
        self.check_epoch()
        source = self.layout.published_name(checkpoint.step)
        if not self._is_at_its_name(checkpoint):
            return self._prune_moved(checkpoint, newer_step)
        kept = (
            self._kept_for_want(checkpoint, newer_step)
            or self._kept_by_people(checkpoint.step)
            or self._kept_by_tracker(checkpoint)
        )
        if kept:
            return self._stay(checkpoint, kept)
        aside = move_aside(self.storage, source, trash_dir(checkpoint.id))
        kept = self._kept_by_people(checkpoint.step) or self._kept_by_tracker(checkpoint)
        return self._bring_back(checkpoint, aside, kept) if kept else Pruned(aside=aside)

    def resume_prune(self, checkpoint: Checkpoint, newer_step: int) -> Pruned:
        """Decide a prune that a rollback finds open: what is at its name stays.

        Raises ``DamagedRoot`` as ``prune`` does.
        """
        self.check_epoch()
        if self._is_at_its_name(checkpoint):
            return self._stay(checkpoint, "rollback")
        return self._prune_moved(checkpoint, newer_step)

    def _is_at_its_name(self, checkpoint: Checkpoint) -> bool:
        """False if it left: nothing is there, or what is a stranger's.

        Raises ``DamagedRoot`` if it did not leave, and what is there does not say that it is its own.
        """
        there = self._look(checkpoint.step)
        if there is None:
            return False
        moved = bool(self.lies_in(TRASH, checkpoint) | self.lies_in(QUARANTINE, checkpoint))
        own = is_its_own(checkpoint, there, moved)
        if own and (there.of is not None or is_whole(checkpoint, there)):
            return True
        if not own and (moved or there.of is not None):
            return False
        name = self.layout.published_name(checkpoint.step)
        raise DamagedRoot(why_not_whole(there), file=name, step=checkpoint.step)

    def _look(self, step: int) -> PublishedEvidence | None:
        """Whose is what stands at a step's name? None if nothing does."""
        if lookup(self.storage, self.layout.published_name(step)) is None:
            return None
        return inspect_published(self.storage, self.layout, step, files=False)

    def lies_in(self, directory: str, checkpoint: Checkpoint) -> frozenset[str]:
        """Where its own directories were moved to in trash or quarantine."""
        return frozenset(moved_aside(self.storage, directory).get(checkpoint.id, ()))

    def _prune_moved(self, checkpoint: Checkpoint, newer_step: int) -> Pruned:
        """It left its name before. Bring it back, if it is needed after all.

        Raises ``DamagedRoot`` if something else has its name by now: it is kept elsewhere then.
        """
        self._settle(TRASH, "")
        own = sorted(self.lies_in(TRASH, checkpoint))
        if not own:
            return Pruned()
        name = self.layout.published_name(checkpoint.step)
        taken = lookup(self.storage, name) is not None
        kept = self._kept_for_want(checkpoint, newer_step) or self._kept_by_people(checkpoint.step)
        if not taken and read_tracker(self.storage).step == checkpoint.step:
            kept = kept or "the tracker names it"  # what somebody has saved over it since
        if not kept:
            return Pruned()
        if taken:
            problem = f"something else has its name, and it cannot come back: {kept}"
            raise DamagedRoot(problem, file=name, step=checkpoint.step)
        back = which_comes_back(self.storage, self.layout, checkpoint, own) or own[0]
        return self._bring_back(checkpoint, back, kept)

    def _bring_back(self, checkpoint: Checkpoint, aside: str, why: str) -> Pruned:
        """An effect of its own: a successor may be emptying the trash by now (I9)."""
        self.check_epoch()
        move(self.storage, aside, self.layout.published_name(checkpoint.step))
        return self._stay(checkpoint, why)

    def _stay(self, checkpoint: Checkpoint, why: str) -> Pruned:
        """It is not pruned: it is at its name, durably, also if it had left it.

        Raises ``DamagedRoot`` if it is not whole: somebody may have been at it before.
        """
        self._settle("", TRASH)
        there = inspect_published(self.storage, self.layout, checkpoint.step)
        if not is_whole(checkpoint, there):
            name = self.layout.published_name(checkpoint.step)
            raise DamagedRoot(why_not_whole(there), file=name, step=checkpoint.step)
        return Pruned(kept=why)

    def _kept_for_want(self, checkpoint: Checkpoint, newer_step: int) -> str:
        """The newer one, or another attempt at its step, must really be there."""
        if newer_step < checkpoint.step:
            return "nothing newer is tracked any more"
        newer = lookup(self.storage, self.layout.published_name(newer_step))
        if newer is None or newer.kind != "dir":
            return f"step {newer_step} is not there"
        return ""

    def _kept_by_tracker(self, checkpoint: Checkpoint) -> str:
        tracker = read_tracker(self.storage)
        if tracker.step is None or tracker.step <= checkpoint.step:
            return f"the tracker says {tracker.step}"
        found = lookup(self.storage, self.layout.published_name(checkpoint.step))
        if found is not None and self._is_somebody_elses(found):
            return "not a directory of this file system"
        return ""

    def _kept_by_people(self, step: int) -> str:
        if step in self.protection.pinned_steps():
            return "pin"
        return "reader" if step in self.protection.reader_leases().values() else ""

    def clean_up(self, checkpoint: Checkpoint, *, alone: bool, held: bool) -> str:
        """Move a failed attempt's files aside. Returns where to if it was in place and may be deleted.

        What was staged may be deleted: nobody else writes there. What stands at its published name after
        all (a fenced trainer's rename can land late) is moved to quarantine: what was published is never
        deleted from here (I1), nor what somebody completes while it is moved. ``alone``: what stands
        there can be no other attempt's; ``held``: it is one's.
        """
        self.check_epoch()
        directory = self.layout.working_dir(checkpoint.id, checkpoint.in_place)
        name = self.layout.published_name(checkpoint.step)
        found = lookup(self.storage, name)
        there = None
        if found is not None and not self._is_somebody_elses(found):
            there = self._look(checkpoint.step)
        elif found is not None and checkpoint.in_place:
            _say_left(checkpoint.step, name)
            return ""
        owner = there.of if there is not None else None
        torn = there is not None and there.found == "damaged" and owner is None
        # of what is torn, only the missing staging directory tells whose it was
        gone = checkpoint.in_place or lookup(self.storage, directory) is None
        if owner == checkpoint.id or (torn and alone and gone):
            move_aside(self.storage, name, quarantine_dir(checkpoint.id))
            return ""
        others = owner is not None or held
        if checkpoint.in_place and (others or went_on(checkpoint, read_tracker(self.storage))):
            # and no manifest of ours may land there
            sweep_temporaries(self.storage, (f"{name}/{PRIVATE}",))
            return ""
        if lookup(self.storage, directory) is None:
            self._settle(QUARANTINE, TRASH, parent_of(directory), "")
            return ""
        if not checkpoint.in_place:
            move_aside(self.storage, directory, gone_dir(checkpoint.id))
            return ""
        marked = is_marked(self.storage, directory, checkpoint.id)
        if not marked and is_bare(self.storage, directory):
            return ""  # somebody made it anew, or the mark could not be made: another may begin
        worthless = alone and marked and there is not None and there.found == "unexplained"
        given_up = worthless and is_cut_short(self.storage, directory, checkpoint)
        aside = trash_dir if given_up else quarantine_dir  # it may be of value to somebody
        moved = move_aside(self.storage, directory, aside(checkpoint.id))
        still = given_up and is_cut_short(self.storage, moved, checkpoint)
        return moved if still else ""

    def give_up(self, of: AttemptId, path: str) -> None:
        """Let what lies in the trash be deleted: it gets a name that no other's late rename aims at."""
        self.check_epoch()
        move_aside(self.storage, path, gone_dir(of))

    def keep_for_a_person(self, of: AttemptId, path: str) -> None:
        """Move to quarantine what lies in the trash and nobody gave up."""
        self.check_epoch()
        move_aside(self.storage, path, quarantine_dir(of))

    def is_taken(self, checkpoint: Checkpoint, earlier: frozenset[str]) -> bool:
        """True if a complete checkpoint of somebody else stands at its name. See ``quarantine``."""
        there = inspect_published(self.storage, self.layout, checkpoint.step)
        moved = self.lies_in(TRASH, checkpoint) | (self.lies_in(QUARANTINE, checkpoint) - earlier)
        complete = there.found in ("manifest", "stock")
        return complete and not is_its_own(checkpoint, there, bool(moved))

    def quarantine(self, checkpoint: Checkpoint, *, alone: bool, earlier: frozenset[str]) -> None:
        """Move a withdrawn checkpoint aside, for a person to look at. It is never deleted.

        Only what is its own is moved, wherever it lies: its step may have been saved again meanwhile.
        ``alone``: no other attempt has a right to its name. ``earlier``: what lay in quarantine when
        this was tried first. What came since is what was to be moved.
        """
        self.check_epoch()
        for path in sorted(self.lies_in(TRASH, checkpoint)):
            move_aside(self.storage, path, quarantine_dir(checkpoint.id))
        moved = self.lies_in(QUARANTINE, checkpoint) - earlier
        there = self._look(checkpoint.step) if alone else None
        if there is None or not is_its_own(checkpoint, there, bool(moved)):
            self._settle(QUARANTINE, "", TRASH)
            return
        source = self.layout.published_name(checkpoint.step)
        if self._is_somebody_elses(self.storage.stat(source)):
            _say_left(checkpoint.step, source)
            return
        move_aside(self.storage, source, quarantine_dir(checkpoint.id))

    def _is_somebody_elses(self, found: FileStat) -> bool:
        """True for a link, a file or a mount at a step's name: it is never followed nor moved."""
        return found.kind != "dir" or found.device != self.storage.stat(QUARANTINE).device

    def _settle(self, *directories: str) -> None:
        """What was found moved stays there. Directories that it may have come to are first."""
        for directory in directories:
            self.storage.fsync_dir(directory)


def move_aside(storage: Storage, source: str, target: str) -> str:
    """Move to ``target``, or beside it: a power loss can leave a rename at both of its names.

    What makes this one dispensable, the tracker above all, is made durable under its name first.
    """
    storage.fsync_dir("")
    for suffix in ("", *(f".{n}" for n in range(1, _NAMES))):
        if lookup(storage, target + suffix) is None:
            move(storage, source, target + suffix)
            return target + suffix
    raise StorageError(f"{_NAMES} directories stand at {target}", file=target)


def _say_left(step: int, path: str) -> None:
    said = f"step {step}: {path} is left where it is: somebody else wrote it"
    say(log.warning, "left_at_its_name", said, step=step, file=path)
