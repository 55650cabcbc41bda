"""Decides which directory leaves its name, and which stays; in doubt it is kept. Pure.

``disk.setting_aside`` looks at the disk, asks here, and moves. If a fact may change during the move,
it asks again with newer facts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ckptfsm.core.evidence import PublishedEvidence, is_its_own, is_published_as, is_whole
from ckptfsm.core.lifecycle import Checkpoint

# ------------------------------------------------------------------------------------------- prune


class Place(Enum):
    """The place of a prunable checkpoint's directory."""

    AT_ITS_NAME = "its directory stands at its name"
    LEFT = "its name is free, or another directory has it: its directory was moved before"
    DAMAGED = "the directory at its name names no checkpoint, or has the manifest of another run"


class PruneDecision(Enum):
    """The decision to move a prunable checkpoint to the trash, or the reason to keep it, in words."""

    MOVE = ""
    KEEP_NOTHING_NEWER = "nothing newer is tracked any more"  # it may be the last one
    KEEP_NEWER_MISSING = "step {newer_step} is not there"  # for which it may go
    KEEP_PINNED = "pin"
    KEEP_READER = "reader"
    KEEP_TRACKER = "the tracker says {tracker_step}"  # its step, an older one, or none
    KEEP_NOT_OURS = "not a directory of this file system"  # a link, a file or a mount
    KEEP_NAMED = "the tracker names it"  # it was set back to its step, and its name is free


@dataclass(frozen=True, slots=True)
class Holds:
    """The facts that may keep a checkpoint, read before its move and after.

    ``not_ours``: a link, a file or a mount has its name.
    """

    pinned: bool
    leased: bool
    tracker_step: int | None
    not_ours: bool


@dataclass(frozen=True, slots=True)
class PruneFacts:
    """The facts that decide whether a prunable checkpoint of ``step`` goes.

    ``newer_step`` is the newest tracked step, -1 if there is none, ``newer_is_there``: at its name.
    """

    step: int
    newer_step: int
    newer_is_there: bool
    holds: Holds


def place_of(checkpoint: Checkpoint, there: PublishedEvidence | None, moved: bool) -> Place:
    """See ``Place``. ``there`` is the directory at the checkpoint's name.

    ``moved``: a directory of the checkpoint lies in trash or quarantine.
    """
    if there is None:
        return Place.LEFT
    if not is_its_own(checkpoint, there, moved):
        return Place.LEFT if moved or there.of is not None else Place.DAMAGED
    named = is_published_as(checkpoint, there.of, there.manifest_crc)
    return Place.AT_ITS_NAME if named or is_whole(checkpoint, there) else Place.DAMAGED


def decide_prune(facts: PruneFacts) -> PruneDecision:
    """Decide whether a directory goes to the trash (I7); asked again after that move."""
    if kept := _kept_wherever_it_lies(facts):
        return kept
    tracked = facts.holds.tracker_step
    if tracked is None or tracked <= facts.step:
        return PruneDecision.KEEP_TRACKER
    return PruneDecision.KEEP_NOT_OURS if facts.holds.not_ours else PruneDecision.MOVE


def decide_left(facts: PruneFacts, name_taken: bool) -> PruneDecision:
    """Decide whether a checkpoint that left its name before is kept; ``MOVE`` if nothing keeps it.

    The tracker counts only while the name is free: otherwise it names a checkpoint saved there
    since.
    """
    named = not name_taken and facts.holds.tracker_step == facts.step
    nothing_else = PruneDecision.KEEP_NAMED if named else PruneDecision.MOVE
    return _kept_wherever_it_lies(facts) or nothing_else


def _kept_wherever_it_lies(facts: PruneFacts) -> PruneDecision | None:
    """Keep the last checkpoint of a step: the newer one may be another attempt at the same step."""
    if facts.newer_step < facts.step:
        return PruneDecision.KEEP_NOTHING_NEWER
    if not facts.newer_is_there:
        return PruneDecision.KEEP_NEWER_MISSING
    if facts.holds.pinned:
        return PruneDecision.KEEP_PINNED
    return PruneDecision.KEEP_READER if facts.holds.leased else None


def why_kept(decision: PruneDecision, facts: PruneFacts) -> str:
    """The reason that the journal records; "" for ``MOVE``."""
    return decision.value.format(newer_step=facts.newer_step, tracker_step=facts.holds.tracker_step)


# ---------------------------------------------------------------------------------------- clean up


class AtName(Enum):
    """The kind of directory at the name of a failed attempt's step."""

    NOTHING = "nothing stands there"
    NOT_OURS = "a link, a file or a mount stands there"
    ITS_OWN = "its manifest names this attempt"
    OTHER_ATTEMPT = "its manifest names another attempt"
    TORN = "its manifest cannot be read, so it names no checkpoint"
    STOCK = "it has no manifest, and a stock loader accepts it"
    UNFINISHED = "it has no manifest, and no stock loader accepts it"


class Contents(Enum):
    """The progress of a save in place, by the names of its files."""

    BARE = "there is only what a stock save leaves before its writers begin"
    CUT_SHORT = "there is only what this attempt leaves before its metadata"
    MORE = "there are files that tell of more: of a metadata file, or of another's work"


class CleanUpDecision(Enum):
    """The decision about a failed attempt's directory."""

    LEAVE_NOT_OURS = "in place, a link, a file or a mount has its name"
    QUARANTINE_PUBLISHED = "it stands at its published name after all, and may be complete"
    LEAVE_TO_OTHERS = "in place, another attempt or another trainer has its name"
    NOTHING_LEFT = "its directory is not there: an earlier try has moved it"
    DISCARD = "it lies in staging, where no other program writes: it may be deleted"
    LOOK_INSIDE = "it was written in place: its contents decide"


class InPlaceDecision(Enum):
    """The decision about a directory in place that no other attempt or trainer uses."""

    LEAVE = "it is bare and unmarked: the trainer that made it anew has only begun"
    DISCARD = "this attempt began there, alone, and was cut short: it may be deleted"
    QUARANTINE = "it may be of value"


@dataclass(frozen=True, slots=True)
class CleanUpFacts:
    """The facts that decide about a failed attempt.

    - ``working_dir``: its directory, in staging or in place, exists.
    - ``alone``: no other attempt may use its name.
    - ``held``: another attempt uses its name.
    - ``went_on``: the tracker shows that another trainer resumed from its directory.
    """

    in_place: bool
    at_name: AtName
    working_dir: bool
    alone: bool
    held: bool
    went_on: bool


@dataclass(frozen=True, slots=True)
class InPlaceFacts:
    """The facts that decide about a directory in place. ``marked``: this attempt began in it."""

    alone: bool
    at_name: AtName
    marked: bool
    contents: Contents


def at_name(checkpoint: Checkpoint, there: PublishedEvidence) -> AtName:
    """What stands at the name of ``checkpoint``; links, files and mounts are ruled out before."""
    if there.found == "no_directory":
        return AtName.NOTHING
    if there.of is not None:
        return AtName.ITS_OWN if there.of == checkpoint.id else AtName.OTHER_ATTEMPT
    if there.found == "damaged":
        return AtName.TORN
    return AtName.STOCK if there.found == "stock" else AtName.UNFINISHED


def decide_clean_up(facts: CleanUpFacts) -> CleanUpDecision:
    """Decide about a failed attempt's directory. A published directory is never discarded (I1)."""
    if facts.in_place and facts.at_name is AtName.NOT_OURS:
        return CleanUpDecision.LEAVE_NOT_OURS
    # A torn manifest names no attempt: only the missing staging directory shows that this is its
    # directory.
    may_be_published = facts.in_place or not facts.working_dir
    torn = facts.at_name is AtName.TORN and facts.alone and may_be_published
    if facts.at_name is AtName.ITS_OWN or torn:
        return CleanUpDecision.QUARANTINE_PUBLISHED
    others = facts.at_name is AtName.OTHER_ATTEMPT or facts.held or facts.went_on
    if facts.in_place and others:
        return CleanUpDecision.LEAVE_TO_OTHERS
    if not facts.working_dir:
        return CleanUpDecision.NOTHING_LEFT
    return CleanUpDecision.LOOK_INSIDE if facts.in_place else CleanUpDecision.DISCARD


def decide_in_place(facts: InPlaceFacts) -> InPlaceDecision:
    """Decide about a directory in place; asked again after its move to the trash."""
    if not facts.marked and facts.contents is Contents.BARE:
        return InPlaceDecision.LEAVE
    begun_here = facts.alone and facts.marked and facts.at_name is AtName.UNFINISHED
    if begun_here and facts.contents is not Contents.MORE:
        return InPlaceDecision.DISCARD
    return InPlaceDecision.QUARANTINE


# -------------------------------------------------------------------------------------- quarantine


class QuarantineDecision(Enum):
    """Whether the directory at a withdrawn checkpoint's name goes to quarantine."""

    NOTHING_TO_MOVE = "nothing of it stands there: its step was saved again, or it was moved before"
    LEAVE_NOT_OURS = "a link, a file or a mount has its name"
    MOVE = "its directory stands there, and no other attempt has a right to the name"


@dataclass(frozen=True, slots=True)
class QuarantineFacts:
    """The facts that decide about a withdrawn checkpoint's directory. ``alone`` as in ``CleanUpFacts``.

    ``there`` is the directory at its name; ``moved``: one came to quarantine since the first try.
    """

    alone: bool
    there: PublishedEvidence | None
    moved: bool
    not_ours: bool


def decide_quarantine(checkpoint: Checkpoint, facts: QuarantineFacts) -> QuarantineDecision:
    """Decide whether the directory at a withdrawn checkpoint's name goes to quarantine."""
    if not facts.alone or facts.there is None:
        return QuarantineDecision.NOTHING_TO_MOVE
    if not is_its_own(checkpoint, facts.there, facts.moved):
        return QuarantineDecision.NOTHING_TO_MOVE
    return QuarantineDecision.LEAVE_NOT_OURS if facts.not_ours else QuarantineDecision.MOVE


def is_taken(checkpoint: Checkpoint, there: PublishedEvidence, moved: bool) -> bool:
    """True if a complete checkpoint of another trainer has a withdrawn one's name."""
    complete = there.found in ("manifest", "stock")
    return complete and not is_its_own(checkpoint, there, moved)
