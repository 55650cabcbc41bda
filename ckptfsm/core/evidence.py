"""The findings on disk that recovery and ``keeping`` decide from. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Literal

from ckptfsm.core.layout import MEGATRON, Layout
from ckptfsm.core.lifecycle import Checkpoint
from ckptfsm.core.parts import AttemptId

ANOTHER_MANIFEST: Final = (
    "its manifest is not the one that the journal recorded: another run's, or changed since"
)


@dataclass(frozen=True, slots=True)
class PublishedEvidence:
    """A directory under a published name, and how it was recognised (``found``).

    - ``manifest``: it carries our manifest and every file listed there.
    - ``stock``: it has no manifest, but a stock loader would accept it.
    - ``damaged``: our manifest does not match the files.
    - ``unexplained``: none of these.
    - ``no_directory``: the name is a link or a file, which this library never makes.

    ``manifest_crc`` is the checksum that its manifest begins with.
    """

    step: int
    found: Literal["manifest", "stock", "damaged", "unexplained", "no_directory"]
    of: AttemptId | None = None
    run_seconds: float = 0.0
    detail: str = ""
    metrics: tuple[tuple[str, float], ...] = ()
    manifest_crc: str = ""


@dataclass(frozen=True, slots=True)
class StagingEvidence:
    """An attempt's staging directory; ``complete`` if it could be finalized as it is."""

    complete: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TrackerEvidence:
    """The content of the tracker file: a step, ``release``, no file, or torn (any other content).

    ``by_us``: the text ends with a newline, as this library writes it and trainers do not.
    """

    found: Literal["missing", "step", "release", "torn"]
    step: int | None = None
    by_us: bool = False


class Ownership(Enum):
    """The state of a root's owner, in words."""

    NEVER = "no manager has opened it"
    LIVES = "its owner lives"
    RELEASED = "its owner gave it back"
    ENDED = "its owner has ended without giving it back"
    ELSEWHERE = "its owner is on another host"
    UNREADABLE = "the file that names its owner cannot be read"


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that took the root last, as far as the root and this host tell.

    ``in_container``: it is elsewhere, but on a host of the same name, as another container of a pod.
    ``stopped``: it lives, and does nothing until somebody lets it go on.
    """

    ownership: Ownership
    epoch: int
    host: str = ""
    pid: int = 0
    in_container: bool = False
    stopped: bool = False

    @property
    def may_live(self) -> bool:
        """True if the owner lives here, or took the root on a host that cannot be seen from here."""
        return self.ownership in (Ownership.LIVES, Ownership.ELSEWHERE)

    def __str__(self) -> str:
        named = f" (pid {self.pid} on {self.host}, epoch {self.epoch})" if self.host else ""
        where = "its owner is in another container" if self.in_container else self.ownership.value
        return where + named + (" and is stopped" if self.stopped else "")


@dataclass(frozen=True, slots=True)
class Evidence:
    """All findings on disk that recovery looks at.

    - ``strays``: unexplained names in staging, and directories that a save has only begun.
    - ``aside``: the attempts with a directory in quarantine.
    - ``trashed``: the attempts with a directory in the trash.
    - ``restorable``: the prunable attempts with a whole directory in the trash.
    - ``mounts``: published names on another file system.
    - ``unnamed``: in words, what has a state and no step's name; looked for if no step is known.
    """

    tracker: TrackerEvidence
    published: Mapping[int, PublishedEvidence] = field(default_factory=dict)
    staging: Mapping[AttemptId, StagingEvidence] = field(default_factory=dict)
    strays: tuple[str, ...] = ()
    release: bool = False
    layout: Layout = MEGATRON
    aside: frozenset[AttemptId] = frozenset()
    trashed: frozenset[AttemptId] = frozenset()
    restorable: frozenset[AttemptId] = frozenset()
    mounts: tuple[str, ...] = ()
    unnamed: tuple[str, ...] = ()


def is_whole(checkpoint: Checkpoint, there: PublishedEvidence) -> bool:
    """True if the directory at the checkpoint's name is this very checkpoint, with all its files."""
    if there.found == "stock":
        return checkpoint.provenance == "adopted"
    return there.found == "manifest" and is_published_as(checkpoint, there.of, there.manifest_crc)


def is_published_as(checkpoint: Checkpoint, of: AttemptId | None, manifest_crc: str) -> bool:
    """True if a manifest with this attempt and checksum is the one that the checkpoint was given.

    Two runs with one schedule have attempts of the same names. Old journals have no checksum.
    """
    return of == checkpoint.id and checkpoint.manifest_crc in ("", manifest_crc)


def is_its_own(checkpoint: Checkpoint, there: PublishedEvidence, moved: bool) -> bool:
    """True if the directory at a checkpoint's name belongs to that checkpoint, whole or damaged.

    ``moved``: the checkpoint's directory lies in the trash or in quarantine.
    """
    if checkpoint.reason == "missing":  # it was not there when it was withdrawn
        return False
    if there.of is not None:  # maybe of another run: damaged, so neither resumed from nor deleted
        return there.of == checkpoint.id
    # It names no attempt: an adopted one has no manifest, and one may be torn.
    return not moved and there.found != "no_directory"


def went_on(checkpoint: Checkpoint, tracker: TrackerEvidence) -> bool:
    """True if another trainer resumed from the directory of an attempt in place, by its tracker."""
    if tracker.step is None or tracker.step < checkpoint.step:
        return False
    # Our tracker never names an unfinished attempt.
    return tracker.step == checkpoint.step or not tracker.by_us


def why_not_whole(checkpoint: Checkpoint, there: PublishedEvidence | None) -> str:
    """The reason in words why a checkpoint is not whole."""
    if there is None:
        return "its directory is missing"
    if there.found == "stock":
        return "it has no manifest"
    if there.found == "manifest" and there.of == checkpoint.id:
        return ANOTHER_MANIFEST
    return there.detail or "another checkpoint stands at its name"
