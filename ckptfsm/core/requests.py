"""Plain data between a trainer's side and the coordinator: requests, answers, and news of a save."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter

from ckptfsm.core.documents import FileEntry, TransitionRecord
from ckptfsm.core.errors import CkptFsmError
from ckptfsm.core.parts import AttemptId, PartSpec, Planned
from ckptfsm.core.recovery_rules import Decision


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """The findings and decisions of opening a root. ``seconds`` is the duration of the opening."""

    epoch: int
    latest_step: int | None
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A proposed save: ``expected_bytes`` is the size that its ranks will write, as far as known."""

    step: int
    parts: tuple[PartSpec, ...]
    world_size: int
    in_place: bool = False
    metrics: tuple[tuple[str, float], ...] = ()
    expected_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Located:
    """A checkpoint to read, held by a reader's lease named ``lease`` until ``release``.

    ``files`` is empty if the checkpoint has no manifest (adopted from a stock run). ``problem``
    describes the fault of a bad manifest; ``of`` is the attempt that the manifest names.
    """

    step: int
    directory: str
    lease: str
    files: tuple[FileEntry, ...]
    parts: tuple[PartSpec, ...]
    problem: str = ""
    of: AttemptId | None = None


@dataclass(frozen=True, slots=True)
class FinalizersDue:
    """Asks every rank to run the foreign finalizers of an attempt now, on its training thread."""

    of: AttemptId


@dataclass(frozen=True, slots=True)
class NothingInFlight:
    """Nothing is in flight any more and retention has been applied."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """The disk refuses the next effect of an attempt, which is retried. Sent once per reason."""

    of: AttemptId
    error: CkptFsmError


News = TransitionRecord | FinalizersDue | NothingInFlight | Blocked
NumberedNews = tuple[int, News]


@dataclass(frozen=True, slots=True)
class Accepted:
    """A save that may begin, the same on every rank.

    ``planned`` is by part.
    """

    of: AttemptId
    in_place: bool
    parts: tuple[PartSpec, ...]
    planned: Mapping[str, Planned] = field(default_factory=dict)

    def for_others(self) -> Accepted:
        """The copy for the other ranks, without the metadata that only rank 0 needs."""
        far = {p.name for p in self.parts if p.ranks is not None and 0 not in p.ranks}
        planned = {
            name: plan if name in far else plan._replace(metadata=b"")
            for name, plan in self.planned.items()
        }
        return replace(self, planned=planned)

    def of_rank(self, rank: int) -> tuple[PartSpec, ...]:
        """The parts that ``rank`` writes, the required ones first."""
        own = [p for p in self.parts if p.ranks is None or rank in p.ranks]
        return tuple(sorted(own, key=attrgetter("optional")))
