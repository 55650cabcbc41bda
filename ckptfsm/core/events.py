"""Events (past tense) that move a checkpoint, and commands (imperative) that the state machine emits.

Every event names its attempt (epoch, step, attempt), so that a completion counts only for that
attempt (I5).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from ckptfsm.core.parts import MAX_STEP, AttemptId, PartSpec, Sent, is_part_name

_REASON = re.compile(r"[a-z_]{1,40}\Z")
_MOST_BYTES = 1 << 62

# --------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Event(Sent):
    """A fact about an attempt."""

    name: ClassVar[str] = "event"
    of: AttemptId


@dataclass(frozen=True, slots=True)
class SaveRequested(Event):
    """The coordinator accepted a save. The event carries all facts that later transitions need."""

    name: ClassVar[str] = "save_requested"
    parts: tuple[PartSpec, ...]
    world_size: int
    in_place: bool = False
    metrics: tuple[tuple[str, float], ...] = ()
    run_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WriterForked(Event):
    """A rank's writer owns an immutable copy of all its parts."""

    name: ClassVar[str] = "writer_forked"
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class ShardReported(Event):
    """A rank's shard of a part is durable and has a receipt (``shard_bytes`` in bytes)."""

    name: ClassVar[str] = "shard_reported"
    part: str
    rank: int
    world_size: int
    shard_bytes: int


@dataclass(frozen=True, slots=True)
class FinalizersRan(Event):
    """A rank ran the foreign finalizers of an attempt, once, and all of them returned (I6)."""

    name: ClassVar[str] = "finalizers_ran"
    rank: int


@dataclass(frozen=True, slots=True)
class PublishedOnDisk(Event):
    """Metadata and manifest are durable and the directory has its published name.

    ``manifest_crc`` is the checksum that the manifest begins with.
    """

    name: ClassVar[str] = "published_on_disk"
    manifest_crc: str = ""


@dataclass(frozen=True, slots=True)
class Published(Event):
    """The journal says that the directory has its published name."""

    name: ClassVar[str] = "published"


@dataclass(frozen=True, slots=True)
class FoundPublished(Event):
    """Recovery found the attempt published, with a valid manifest that names the attempt."""

    name: ClassVar[str] = "found_published"
    manifest_crc: str = ""


@dataclass(frozen=True, slots=True)
class TrackerWritten(Event):
    """The tracker names the step, durably, and was read back."""

    name: ClassVar[str] = "tracker_written"


@dataclass(frozen=True, slots=True)
class Superseded(Event):
    """Offered for pruning: a newer one is tracked. ``kept_by`` names what still keeps this one."""

    name: ClassVar[str] = "superseded"
    newer_step: int | None
    kept_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reprieved(Event):
    """A prunable checkpoint has to stay after all: a reader, a pin or a rule keeps it."""

    name: ClassVar[str] = "reprieved"
    reason: str


@dataclass(frozen=True, slots=True)
class Removed(Event):
    """The directory has left its published name for the trash, durably."""

    name: ClassVar[str] = "removed"


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """The attempt cannot become a checkpoint.

    ``reason`` is a stable word, ``detail`` is for display, ``rank`` is the rank that failed, if any.
    """

    name: ClassVar[str] = "failed"
    reason: str
    detail: str = ""
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class WriterGone(Event):
    """A rank's writer of a failed attempt has ended, or was never there; it cannot write again."""

    name: ClassVar[str] = "writer_gone"
    rank: int


Report = WriterForked | ShardReported | Failed | WriterGone
"""Events that come from another process, and are looked at before they count."""


def is_plausible(report: Report) -> bool:
    """True if a report of another process has types and values that the journal can take."""
    of = report.of
    if not isinstance(of, AttemptId) or not _is_number(report.rank):
        return False
    if not all(_is_number(number) for number in (of.step, of.epoch, of.attempt)):
        return False
    if isinstance(report, Failed):
        texts = isinstance(report.reason, str) and isinstance(report.detail, str)
        return texts and bool(_REASON.match(report.reason))
    if isinstance(report, ShardReported):
        named = isinstance(report.part, str) and is_part_name(report.part)
        sized = _is_number(report.shard_bytes, _MOST_BYTES)
        return named and sized and _is_number(report.world_size)
    return isinstance(report, WriterGone) or _is_number(report.world_size)


def _is_number(value: object, most: int = MAX_STEP) -> bool:
    return type(value) is int and 0 <= value <= most


@dataclass(frozen=True, slots=True)
class WritersLost(Event):
    """No writer of the attempt can be asked any more: its whole generation of processes ended."""

    name: ClassVar[str] = "writers_lost"


@dataclass(frozen=True, slots=True)
class Cleaned(Event):
    """A failed attempt's files are out of the way. A directory found at its name is in quarantine."""

    name: ClassVar[str] = "cleaned"


UNUSABLE: Final = frozenset({"damaged", "missing"})
"""Reasons for a withdrawal that nobody asked for."""


@dataclass(frozen=True, slots=True)
class Withdrawn(Event):
    """A checkpoint is taken out of use: nothing may resume from it any more."""

    name: ClassVar[str] = "withdrawn"
    reason: Literal["rollback", "damaged", "missing", "fresh"]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Adopted(Event):
    """A stock trainer's complete directory, unknown to the journal, becomes a checkpoint in place."""

    name: ClassVar[str] = "adopted"
    run_seconds: float = 0.0
    metrics: tuple[tuple[str, float], ...] = ()
    manifest_crc: str = ""


# ------------------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Command:
    """An effect the state machine asks for. Recovery may emit most of them again.

    ``RunFinalizers`` is asked for once (I6), and ``CreateStaging`` makes a new directory.
    """

    of: AttemptId


@dataclass(frozen=True, slots=True)
class CreateStaging(Command):
    """Make the directory the attempt is written in."""


@dataclass(frozen=True, slots=True)
class RunFinalizers(Command):
    """Ask every rank to run the foreign finalizers, on its training thread."""


@dataclass(frozen=True, slots=True)
class Finalize(Command):
    """Check receipts, write metadata and manifest, publish."""


@dataclass(frozen=True, slots=True)
class WriteTracker(Command):
    """Make the tracker name the step, durably."""


@dataclass(frozen=True, slots=True)
class Prune(Command):
    """Move the published directory to the trash, unless pins, leases or the tracker now keep it."""


@dataclass(frozen=True, slots=True)
class CleanUp(Command):
    """Move a failed attempt's files out of the way; in place, those that others use stay."""


@dataclass(frozen=True, slots=True)
class Quarantine(Command):
    """Move a withdrawn checkpoint's directory to quarantine; nothing deletes it unasked."""
