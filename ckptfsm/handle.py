"""What a trainer holds: the handle of a save, the result of a restore, and the mirrored view.

Rules: every rank sees the same transitions in the same order (they are broadcast), so every rank's
view is the same at the same point, and decisions taken from it need no further exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ckptfsm.documents import TransitionRecord
from ckptfsm.errors import CkptFsmError
from ckptfsm.lifecycle import IN_FLIGHT, UNSETTLED, State
from ckptfsm.messages import AttemptId


@dataclass(slots=True)
class SaveHandle:
    """A requested save, or one that was skipped because another was in flight.

    ``state`` is the checkpoint's state as this rank knows it; None for a skipped save. A save is
    acknowledged when ``state`` is ``tracked``, not before.
    """

    step: int
    state: State | None = None
    attempt: AttemptId | None = None
    _error: CkptFsmError | None = None
    _wait: Callable[[SaveHandle, float | None], None] | None = field(default=None, repr=False)

    @property
    def skipped(self) -> bool:
        return self.attempt is None

    @property
    def done(self) -> bool:
        """True once it was tracked, failed or skipped."""
        return self.skipped or self._error is not None or self.state not in UNSETTLED

    def exception(self) -> CkptFsmError | None:
        """Why the save failed; None while it runs and when it did not fail."""
        return self._error

    def wait(self, timeout_s: float | None = None) -> SaveHandle:
        """Wait until the save is tracked and retention has had its turn (collective).

        Raises what made it fail, ``DeadlineExceeded`` (default: ``busy_timeout_s``), or
        ``ManagerClosed`` if the manager was left meanwhile.
        """
        if not self.skipped and self._wait is not None:
            self._wait(self, timeout_s)
        if self._error is not None:
            raise self._error
        return self


@dataclass(frozen=True, slots=True)
class Restored:
    """What ``restore`` loaded: ``state`` for the single part, or by name in ``parts``.

    ``dropped`` are the keys of sharded objects that this sharding cannot load (RNG state).
    """

    step: int
    state: Any
    parts: dict[str, Any]
    dropped: tuple[str, ...] = ()


@dataclass(slots=True)
class View:
    """The root as every rank sees it, from the transitions alone.

    ``awaiting``: the coordinator is still at work on what nobody waited for; news of it will come.
    """

    steps: set[int] = field(default_factory=set)
    unsettled: dict[AttemptId, State] = field(default_factory=dict)
    settling: bool = False
    awaiting: bool = False

    def apply(self, record: TransitionRecord) -> None:
        self.settling = True  # until the coordinator says that nothing more follows
        if record.dest in UNSETTLED:
            self.unsettled[record.of] = record.dest
        else:
            self.unsettled.pop(record.of, None)
        if record.dest is State.TRACKED:
            self.steps.add(record.step)
        elif record.source is State.TRACKED:
            self.steps.discard(record.step)

    @property
    def quiet(self) -> bool:
        """True while nothing is in flight, being cleaned up, being pruned, or answered late."""
        return not self.unsettled and not self.settling and not self.awaiting

    @property
    def latest(self) -> int | None:
        return max(self.steps, default=None)

    @property
    def in_flight(self) -> AttemptId | None:
        return next((of for of, state in self.unsettled.items() if state in IN_FLIGHT), None)


def only(values: Iterable[Any]) -> Any:
    """The one value, or None when there are more or none."""
    found = list(values)
    return found[0] if len(found) == 1 else None
