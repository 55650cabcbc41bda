"""What there is on disk, as recovery and the effects see it, and whose it is. Pure.

Rules: whose a directory is, one function answers, for the plan and for the effects; a directory is taken
for a checkpoint's only on evidence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckptfsm.core.layout import MEGATRON, Layout
from ckptfsm.core.lifecycle import Checkpoint
from ckptfsm.core.parts import AttemptId


@dataclass(frozen=True, slots=True)
class PublishedEvidence:
    """A directory under a published name.

    ``manifest``: carries our manifest and every file of it; ``stock``: none, but a stock loader would
    accept it; ``damaged``: our manifest does not hold; ``unexplained``: neither; ``no_directory``: a
    link or a file, which is somebody else's.
    """

    step: int
    found: Literal["manifest", "stock", "damaged", "unexplained", "no_directory"]
    of: AttemptId | None = None
    run_seconds: float = 0.0
    detail: str = ""
    metrics: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StagingEvidence:
    """An attempt's staging directory; ``complete`` if it could be finalized as it is."""

    complete: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TrackerEvidence:
    """What the tracker file says: a step, ``release``, nothing, or something else (torn).

    ``by_us``: it is written as we write it, and as trainers do not.
    """

    found: Literal["missing", "step", "release", "torn"]
    step: int | None = None
    by_us: bool = False


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything on disk that recovery looks at.

    ``strays`` are names it cannot explain and that are no checkpoint: in staging, or a directory that a
    save has only begun. ``aside`` are the attempts of which a directory lies in quarantine, ``trashed``
    those of which one lies in the trash, ``restorable`` the prunable ones that lie there whole.
    ``mounts`` are published names on another file system.
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


def is_whole(checkpoint: Checkpoint, there: PublishedEvidence) -> bool:
    """True if what stands at its name is this very checkpoint, with all its files."""
    if there.found == "stock":
        return checkpoint.provenance == "adopted"
    return there.found == "manifest" and there.of == checkpoint.id


def is_its_own(checkpoint: Checkpoint, there: PublishedEvidence, moved: bool) -> bool:
    """True if what stands at a checkpoint's name is its own, whole or damaged, and not a stranger's.

    A directory that names no attempt (what was adopted has no manifest, and one may be torn or gone) is
    taken for its own, unless that was ``moved`` to the trash or to quarantine.
    """
    if checkpoint.reason == "missing":  # it was not there when it was withdrawn
        return False
    if there.of is not None:
        return there.of == checkpoint.id
    return not moved and there.found != "no_directory"


def went_on(checkpoint: Checkpoint, tracker: TrackerEvidence) -> bool:
    """True if another trainer went on from what stands at the name of an attempt in place.

    It wrote the tracker then, at that step or at a newer one. Our own names nothing unfinished.
    """
    if tracker.step is None or tracker.step < checkpoint.step:
        return False
    return tracker.step == checkpoint.step or not tracker.by_us


def why_not_whole(there: PublishedEvidence | None) -> str:
    """What to tell people of a checkpoint that is not."""
    if there is None:
        return "its directory is missing"
    if there.found == "stock":
        return "it has no manifest"
    return there.detail or "another checkpoint stands at its name"
