"""What the commands do to the disk: the place where a checkpoint's directory changes its name.

Rules: every effect checks the epoch first (I9), is idempotent, and either happened durably when it
returns or raises. Deletion is not here but in ``trash``; here things are only renamed aside.
``OutcomeUnknown`` says that the disk may or may not show the effect: the coordinator stops then, and
a restart decides from what is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ckptfsm.adapters.notices import say
from ckptfsm.core.documents import (
    Pin,
    encode,
    encode_sealed,
)
from ckptfsm.core.errors import (
    DamagedRoot,
    OutcomeUnknown,
    SaveFailed,
    StorageError,
)
from ckptfsm.core.evidence import PublishedEvidence, is_its_own, is_whole, went_on, why_not_whole
from ckptfsm.core.layout import (
    MANIFEST,
    OLD_READERS,
    PINS,
    PLANNED,
    PRIVATE,
    QUARANTINE,
    READERS,
    STAGING,
    TRACKER,
    TRASH,
    Layout,
    begun_name,
    gone_dir,
    join,
    left_out_name,
    parse_pin,
    parse_reader,
    pin_name,
    quarantine_dir,
    staging_dir,
    tracker_text,
    trash_dir,
)
from ckptfsm.core.lifecycle import Checkpoint
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.core.ports import FileStat, Storage
from ckptfsm.disk.assembly import Assembly
from ckptfsm.disk.durable import (
    fsync_existing,
    fsync_tree_dirs,
    list_names,
    lookup,
    make_dirs,
    move,
    parent_of,
    put,
    walk_files,
)
from ckptfsm.disk.inspection import (
    inspect_published,
    is_bare,
    is_cut_short,
    is_marked,
    moved_aside,
    read_manifest,
    read_tracker,
    which_comes_back,
)
from ckptfsm.disk.trash import sweep_attempt, sweep_temporaries

log = logging.getLogger("ckptfsm")
_NAMES = 100


class Pruned(NamedTuple):
    """How a prune ended: what keeps it after all, or where this very call has moved it, or neither."""

    kept: str = ""
    aside: str = ""


@dataclass(frozen=True, slots=True)
class Effects:
    """The effects of one epoch. ``check_epoch`` raises ``Fenced``; ``tag`` names our temporaries."""

    storage: Storage
    tag: str
    check_epoch: Callable[[], None]
    assembly: Assembly
    layout: Layout

    # ----------------------------------------------------------------------------------- staging

    def create_staging(self, checkpoint: Checkpoint) -> None:
        """Make the attempt's directory. In place, a stock trainer may have made it already.

        There it gets a mark, as its name does not say whose it is: without one nothing is taken for it.
        """
        self.check_epoch()
        directory = self.layout.working_dir(checkpoint.id, checkpoint.in_place)
        if not (checkpoint.in_place and lookup(self.storage, directory) is not None):
            self.storage.mkdir(directory)
        self.storage.fsync_dir(directory.rpartition("/")[0])  # whoever made it
        if checkpoint.in_place:
            make_dirs(self.storage, begun_name(checkpoint.id), base=directory)

    # ---------------------------------------------------------------------------------- finalize

    def finalize(self, checkpoint: Checkpoint) -> None:
        """Check every receipt, write metadata and manifest, publish by one rename (I3, I4)."""
        self.check_epoch()
        target = self.layout.published_name(checkpoint.step)
        directory = self.layout.working_dir(checkpoint.id, checkpoint.in_place)
        if checkpoint.in_place:
            if self._is_committed(checkpoint, directory):
                return
        elif self._is_published(checkpoint, target):
            self._fsync_names(checkpoint, target)
            return
        shares = self.assembly.shares(checkpoint, directory)
        files = self.assembly.listed(checkpoint, directory, shares)
        sweep_attempt(self.storage, directory, {entry.name for entry in files})
        for part in checkpoint.parts:
            if part.name not in shares.dropped:
                files += self.assembly.finish(checkpoint, part, directory, shares)
            else:
                why, step = shares.dropped[part.name], checkpoint.step
                said = f"step {step}: part {part.name!r} is left out: {why}"
                say(log.warning, "part_left_out", said, step=step, part=part.name, why=why)
                self._leave_out(checkpoint, part, directory)
        manifest = self.assembly.manifest(checkpoint, directory, shares, files)
        fsync_tree_dirs(self.storage, directory)
        self.check_epoch()
        if checkpoint.in_place:
            self._commit_in_place(checkpoint, directory, encode_sealed(manifest))
        else:
            put(self.storage, f"{directory}/{MANIFEST}", encode_sealed(manifest), tag=self.tag)
            self._publish(checkpoint, directory, target)

    def _commit_in_place(self, checkpoint: Checkpoint, directory: str, manifest: bytes) -> None:
        """In place the manifest is the commit: once it may be seen, an error cannot be undone."""
        path = f"{directory}/{MANIFEST}"
        try:
            put(self.storage, path, manifest, tag=self.tag, check=self.check_epoch)
        except OSError as error:
            if lookup(self.storage, path) is None:
                raise  # it certainly did not happen
            raise OutcomeUnknown(
                f"the manifest is there but not known to be durable: {error}",
                file=path,
                step=checkpoint.step,
            ) from error

    def _is_committed(self, checkpoint: Checkpoint, directory: str) -> bool:
        """True if this attempt's manifest is there already, in place: then it is made durable again."""
        manifest = read_manifest(self.storage, directory)
        if manifest is None or manifest.of != checkpoint.id:
            return False
        self.storage.fsync_dir(parent_of(f"{directory}/{MANIFEST}"))
        return True

    def _is_published(self, checkpoint: Checkpoint, target: str) -> bool:
        """True if this very attempt has its name already; another one there is an error."""
        found = lookup(self.storage, target)
        if found is None:
            return False
        manifest = read_manifest(self.storage, target) if found.kind == "dir" else None
        if manifest is not None and manifest.of == checkpoint.id:
            return True
        raise SaveFailed(f"{target} is taken by something else", file=target, step=checkpoint.step)

    def _publish(self, checkpoint: Checkpoint, directory: str, target: str) -> None:
        self.check_epoch()
        try:
            self.storage.rename(directory, target)
        except OSError:
            if lookup(self.storage, directory) is not None:
                raise  # it certainly did not happen; something else may stand at the name
        self._fsync_names(checkpoint, target)

    def _fsync_names(self, checkpoint: Checkpoint, target: str) -> None:
        """The rename is done: from here an error leaves an outcome that only a restart decides."""
        try:
            self.storage.fsync_dir("")
            self.storage.fsync_dir(staging_dir(checkpoint.id).rpartition("/")[0])
            manifest = read_manifest(self.storage, target)
            if manifest is None or manifest.of != checkpoint.id:
                raise StorageError("the published name is not this attempt's", file=target)
        except (OSError, DamagedRoot) as error:
            raise OutcomeUnknown(
                f"{target} was renamed but is not known to be durable: {error}",
                file=target,
                step=checkpoint.step,
            ) from error

    def make_published_durable(self, step: int) -> None:
        """What another process published may have names that are not durable yet.

        Also the old one: a fenced one's rename may have come after the opening settled ``staging``.
        """
        fsync_tree_dirs(self.storage, self.layout.published_name(step))
        self.storage.fsync_dir("")
        self.storage.fsync_dir(STAGING)

    def _settle(self, *directories: str) -> None:
        """What was found moved stays there. Directories that it may have come to are first."""
        for directory in directories:
            self.storage.fsync_dir(directory)

    def make_adopted_durable(self, step: int) -> None:
        """What somebody else wrote may be in the page cache only: nothing is given up for that."""
        name = self.layout.published_name(step)
        for file, stat in walk_files(self.storage, name):
            if stat.kind == "file":  # a link of somebody's is never followed (F16)
                fsync_existing(self.storage, f"{name}/{file}")
        self.make_published_durable(step)

    def _leave_out(self, checkpoint: Checkpoint, part: PartSpec, directory: str) -> None:
        """Take an optional part that was not written everywhere out of the unpublished attempt.

        In place it is kept: a fenced manager's late rename takes what somebody has saved there since.
        """
        planned = list_names(self.storage, f"{directory}/{PLANNED}")
        own = [f"{PLANNED}/{name}" for name in planned if _plans(name, part)]
        for path in (join(directory, part.directory), *(f"{directory}/{name}" for name in own)):
            if lookup(self.storage, path) is not None:
                self.check_epoch()
                place = QUARANTINE if checkpoint.in_place else TRASH
                aside = f"{place}/{left_out_name(checkpoint.id)}-{path.rpartition('/')[2]}"
                self._move_aside(path, aside)

    # ----------------------------------------------------------------------------------- tracker

    def write_tracker(self, step: int) -> None:
        """Make the tracker name ``step``, durably, and read it back (I2)."""
        self.check_epoch()
        put(self.storage, TRACKER, tracker_text(step), tag=self.tag, check=self.check_epoch)
        seen = read_tracker(self.storage)
        if seen.step != step:
            raise OutcomeUnknown(
                f"the tracker was written as {step} but reads as {seen.step}", file=TRACKER
            )

    def set_aside(self, name: str) -> str:
        """Move what is partial, and in the way of a save, to quarantine. Returns its name there."""
        self.check_epoch()
        return self._move_aside(name, f"{QUARANTINE}/{name}.{self.tag}")

    def set_aside_tracker(self) -> None:
        """Move the tracker to quarantine: only a fresh start does this."""
        self.check_epoch()
        if lookup(self.storage, TRACKER) is not None:
            self._move_aside(TRACKER, f"{QUARANTINE}/tracker.{self.tag}")

    # ------------------------------------------------------------------------------ out of the way

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
        aside = self._move_aside(source, trash_dir(checkpoint.id))
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
        if step in self.pinned_steps():
            return "pin"
        return "reader" if step in self.reader_leases().values() else ""

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
            self._move_aside(name, quarantine_dir(checkpoint.id))
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
            self._move_aside(directory, gone_dir(checkpoint.id))
            return ""
        marked = is_marked(self.storage, directory, checkpoint.id)
        if not marked and is_bare(self.storage, directory):
            return ""  # somebody made it anew, or the mark could not be made: another may begin
        worthless = alone and marked and there is not None and there.found == "unexplained"
        given_up = worthless and is_cut_short(self.storage, directory, checkpoint)
        aside = trash_dir if given_up else quarantine_dir  # it may be of value to somebody
        moved = self._move_aside(directory, aside(checkpoint.id))
        still = given_up and is_cut_short(self.storage, moved, checkpoint)
        return moved if still else ""

    def give_up(self, of: AttemptId, path: str) -> None:
        """Let what lies in the trash be deleted: it gets a name that no other's late rename aims at."""
        self.check_epoch()
        self._move_aside(path, gone_dir(of))

    def keep_for_a_person(self, of: AttemptId, path: str) -> None:
        """Move to quarantine what lies in the trash and nobody gave up."""
        self.check_epoch()
        self._move_aside(path, quarantine_dir(of))

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
            self._move_aside(path, quarantine_dir(checkpoint.id))
        moved = self.lies_in(QUARANTINE, checkpoint) - earlier
        there = self._look(checkpoint.step) if alone else None
        if there is None or not is_its_own(checkpoint, there, bool(moved)):
            self._settle(QUARANTINE, "", TRASH)
            return
        source = self.layout.published_name(checkpoint.step)
        if self._is_somebody_elses(self.storage.stat(source)):
            _say_left(checkpoint.step, source)
            return
        self._move_aside(source, quarantine_dir(checkpoint.id))

    def _is_somebody_elses(self, found: FileStat) -> bool:
        """True for a link, a file or a mount at a step's name: it is never followed nor moved."""
        return found.kind != "dir" or found.device != self.storage.stat(QUARANTINE).device

    def _move_aside(self, source: str, target: str) -> str:
        """Move to ``target``, or beside it: a power loss can leave a rename at both of its names.

        What makes this one dispensable, the tracker above all, is made durable under its name first.
        """
        self.storage.fsync_dir("")
        for suffix in ("", *(f".{n}" for n in range(1, _NAMES))):
            if lookup(self.storage, target + suffix) is None:
                move(self.storage, source, target + suffix)
                return target + suffix
        raise StorageError(f"{_NAMES} directories stand at {target}", file=target)

    # ------------------------------------------------------------------------------ pins and leases

    def pinned_steps(self) -> set[int]:
        names = list_names(self.storage, PINS)
        return {step for name in names if (step := parse_pin(name)) is not None}

    def reader_leases(self) -> dict[str, int]:
        """The step that each reader lease holds, by the path of the lease."""
        return {
            f"{directory}/{name}": step
            for directory in (READERS, OLD_READERS)
            for name in list_names(self.storage, directory)
            if (step := parse_reader(name)) is not None
        }

    def pin(self, step: int, reason: str) -> None:
        self.check_epoch()
        put(self.storage, pin_name(step), encode(Pin(step=step, reason=reason)), tag=self.tag)


def _plans(name: str, part: PartSpec) -> bool:
    """True if a file of planned metadata is of this part: of a group's, there is one for each share."""
    if part.kind != "report":
        return name == f"{part.name}.bin"
    share = name.removeprefix(f"{part.name}.").removesuffix(".bin")
    return share.isdigit() and name == f"{part.name}.{share}.bin"


def _say_left(step: int, path: str) -> None:
    said = f"step {step}: {path} is left where it is: somebody else wrote it"
    say(log.warning, "left_at_its_name", said, step=step, file=path)
