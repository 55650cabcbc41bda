"""What the machine is told and what it asks for: events (past tense) and commands (imperative).

Rules: plain frozen data, no behaviour beyond validation of itself. Every event names the attempt it
belongs to (epoch, step, attempt), so that a completion can count only for its own attempt (I5).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from ckptfsm.errors import ConfigError

MAX_STEP = 10**15
_PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
PartKind = Literal["torch_dist", "foreign", "file", "tree", "report"]
FINISHED_BY_US = frozenset({"torch_dist"})
"""Kinds of parts that the coordinator completes, from what their ranks wrote."""
RESERVED = frozenset({".ckptfsm", ".metadata", "metadata.json", "common.pt"})
"""Names that the library or megatron-core writes itself, in the directory of a torch_dist part."""


@dataclass(frozen=True, slots=True, order=True)
class AttemptId:
    """One attempt at one step: ``epoch`` is the run generation that asked for it."""

    step: int
    epoch: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.step}.e{self.epoch}.a{self.attempt}"


@dataclass(frozen=True, slots=True)
class PartSpec:
    """A declared part of a checkpoint.

    ``directory`` is relative to the step's directory ("" is its root). ``ranks`` are the ranks that
    write it; None means every rank of the job. The checkpoint goes on without an ``optional`` part
    that a rank could not write.
    """

    name: str
    kind: PartKind = "torch_dist"
    directory: str = ""
    ranks: tuple[int, ...] | None = None
    optional: bool = False

    @property
    def first_rank(self) -> int:
        """The rank that writes what is common to all ranks of the part."""
        return 0 if self.ranks is None else self.ranks[0]


def check_parts(parts: tuple[PartSpec, ...], world_size: int) -> None:
    """Raise ``ConfigError`` unless the declared parts can live together in one checkpoint."""
    if not parts:
        raise ConfigError("a checkpoint needs at least one part")
    names: set[str] = set()
    owners: dict[str, str] = {}
    for part in parts:
        if not _PART_NAME.match(part.name):
            raise ConfigError(f"part name {part.name!r} is not a plain name", part=part.name)
        if part.name in names:
            raise ConfigError(f"part {part.name!r} is declared twice", part=part.name)
        names.add(part.name)
        if ".tmp-" in part.name or ".tmp-" in part.directory:
            raise ConfigError("'.tmp-' marks our temporary files", part=part.name)
        if part.kind == "file" and (part.name in RESERVED or part.name.endswith(".distcp")):
            raise ConfigError(
                f"a plain file cannot be named {part.name!r}: a torch_dist save writes such a file "
                "itself",
                part=part.name,
            )
        pieces = part.directory.split("/") if part.directory else []
        if any(p in ("", ".", "..") or p.startswith(".ckptfsm") for p in pieces):
            raise ConfigError(f"part directory {part.directory!r} is not allowed", part=part.name)
        if part.ranks is not None and not part.ranks:
            raise ConfigError(f"part {part.name!r} is written by no rank", part=part.name)
        if part.ranks is not None and not all(0 <= r < world_size for r in part.ranks):
            raise ConfigError("a part names ranks outside the job", part=part.name)
        own = part.kind in ("torch_dist", "foreign", "tree") or bool(part.directory)
        if own and part.kind != "file":
            other = owners.setdefault(part.directory, part.name)
            if other != part.name:
                raise ConfigError(
                    f"parts {other!r} and {part.name!r} share directory {part.directory!r}: two "
                    "torch_dist saves into one directory destroy each other's .metadata",
                    part=part.name,
                )
    for part in parts:
        if part.optional:
            _check_optional(part, parts)


def _check_optional(part: PartSpec, parts: tuple[PartSpec, ...]) -> None:
    """What is left out goes with its whole directory: nothing else may live there."""
    if not part.directory or part.kind in ("foreign", "file"):
        raise ConfigError(
            f"part {part.name!r} cannot be optional: it needs a directory of its own, and a plain file "
            "or a foreign request has none",
            part=part.name,
        )
    for other in parts:
        shared = f"{other.directory}/".startswith(f"{part.directory}/")
        if other is not part and shared:
            raise ConfigError(
                f"part {other.name!r} lies in the directory of the optional part {part.name!r}",
                part=part.name,
            )


# --------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Event:
    """Something that has happened to an attempt."""

    name: ClassVar[str] = "event"
    of: AttemptId


@dataclass(frozen=True, slots=True)
class SaveRequested(Event):
    """The coordinator accepted a save. Everything later steps need is frozen here."""

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
class Published(Event):
    """Metadata and manifest are durable and the directory has its published name."""

    name: ClassVar[str] = "published"


@dataclass(frozen=True, slots=True)
class FoundPublished(Event):
    """Recovery found the attempt published, with a valid manifest of its own."""

    name: ClassVar[str] = "found_published"


@dataclass(frozen=True, slots=True)
class TrackerWritten(Event):
    """The tracker names the step, durably, and was read back."""

    name: ClassVar[str] = "tracker_written"


@dataclass(frozen=True, slots=True)
class Superseded(Event):
    """A newer checkpoint is tracked; ``kept_by`` names everything that still keeps this one."""

    name: ClassVar[str] = "superseded"
    newer_step: int | None
    kept_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reprieved(Event):
    """Something keeps a prunable checkpoint after all."""

    name: ClassVar[str] = "reprieved"
    reason: str


@dataclass(frozen=True, slots=True)
class Removed(Event):
    """The directory has left its published name for the trash, durably."""

    name: ClassVar[str] = "removed"


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """The attempt cannot become a checkpoint.

    ``reason`` is a stable word, ``detail`` for people, ``rank`` the one that failed if it was one.
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


@dataclass(frozen=True, slots=True)
class WritersLost(Event):
    """No writer of the attempt can be asked any more: its whole generation of processes ended."""

    name: ClassVar[str] = "writers_lost"


@dataclass(frozen=True, slots=True)
class Cleaned(Event):
    """A failed attempt's files are out of the way; ``published`` if its final name was found."""

    name: ClassVar[str] = "cleaned"
    published: bool = False


UNUSABLE: Final = frozenset({"damaged", "missing"})
"""Why one is withdrawn that nobody asked to withdraw."""


@dataclass(frozen=True, slots=True)
class Withdrawn(Event):
    """A tracked checkpoint is no longer one to resume from."""

    name: ClassVar[str] = "withdrawn"
    reason: Literal["rollback", "damaged", "missing", "fresh"]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Adopted(Event):
    """A complete stock directory that no journal explains is taken over, in place."""

    name: ClassVar[str] = "adopted"
    run_seconds: float = 0.0
    metrics: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class FinalizersRan(Event):
    """A rank ran the foreign finalizers of an attempt, once; ``error`` is "" if they all returned.

    Not an event of the table: it completes the command ``Finalize`` where a part is foreign (I6).
    """

    name: ClassVar[str] = "finalizers_ran"
    rank: int
    error: str = ""


# ------------------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Command:
    """An effect the machine asks for. All are idempotent: recovery may emit them again."""

    of: AttemptId


@dataclass(frozen=True, slots=True)
class CreateStaging(Command):
    """Make the directory the attempt is written in."""


@dataclass(frozen=True, slots=True)
class Finalize(Command):
    """Check receipts, write metadata and manifest, publish."""


@dataclass(frozen=True, slots=True)
class WriteTracker(Command):
    """Make the tracker name the step, durably."""


@dataclass(frozen=True, slots=True)
class Prune(Command):
    """Move the published directory to the trash, after looking at every guard again."""


@dataclass(frozen=True, slots=True)
class CleanUp(Command):
    """Move a failed attempt's files to the trash."""


@dataclass(frozen=True, slots=True)
class Quarantine(Command):
    """Move a withdrawn checkpoint aside; never delete it."""
