"""The objects that a trainer holds: a save's handle, a restore's result, and the mirrored view."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.errors import CkptFsmError
from ckptfsm.core.lifecycle import IN_FLIGHT, UNFINISHED, State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.progress import Progress


@dataclass(slots=True)
class SaveHandle:
    """A requested save, or one that was skipped: another was in flight, or there was no room.

    ``state`` is the checkpoint's state as this rank knows it; None for a skipped save. A save is
    acknowledged when ``state`` is ``tracked``, not before. ``blocked_by`` is the error of the disk
    that blocks the next effect, which is retried; None if nothing does.

    ``progress`` tells how far this rank's shards are on their way to the disk. The call is local and
    cheap. Other ranks have their own. None for a skipped save, and at a rank that writes no part.
    """

    step: int
    state: State | None = None
    attempt: AttemptId | None = None
    _error: CkptFsmError | None = None
    _wait: Callable[[SaveHandle, float | None], None] | None = field(default=None, repr=False)
    blocked_by: CkptFsmError | None = None
    _progress: Callable[[], Progress | None] | None = field(default=None, repr=False, compare=False)

    @property
    def progress(self) -> Progress | None:
        """The progress of this rank's share now; after the save, as it was at its end."""
        return self._progress() if self._progress is not None else None

    def move(self, state: State) -> None:
        """Note the checkpoint's next state (called by the manager)."""
        self.state, self.blocked_by = state, None

    def fail(self, error: CkptFsmError) -> None:
        """Note the failure; the first one stays (called by the manager)."""
        self._error = self._error or error

    @property
    def skipped(self) -> bool:
        return self.attempt is None

    @property
    def done(self) -> bool:
        """True once it was tracked, failed or skipped."""
        return self.skipped or self._error is not None or self.state not in UNFINISHED

    def exception(self) -> CkptFsmError | None:
        """The error of a failed save; None while it runs and when it did not fail."""
        return self._error

    def wait(self, timeout_s: float | None = None) -> SaveHandle:
        """Wait until the save is tracked and retention has been applied (collective).

        Raises the error of a failed save, ``DeadlineExceeded`` (default: ``busy_timeout_s``), or
        ``ManagerClosed`` if the manager was left meanwhile.
        """
        if not self.skipped and self._wait is not None:
            self._wait(self, timeout_s)
        if self._error is not None:
            raise self._error
        return self


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of ``restore``: ``state`` for a single part, or by name in ``parts``.

    ``dropped`` are the keys of sharded objects that this sharding cannot load (RNG state).
    ``unused`` are the keys of the restored parts that no rank asked for. A part that was not named
    is not among them. ``directory`` is the absolute path that was read.
    """

    step: int
    state: Any
    parts: dict[str, Any]
    dropped: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    directory: str = ""


@dataclass(slots=True)
class View:
    """The root as every rank sees it, from the transitions alone.

    ``awaiting``: the coordinator still works on a question that timed out; news of it will come.
    ``blocked``: the disk's errors that block an attempt's next effect, until the attempt moves on.
    """

    steps: set[int] = field(default_factory=set)
    unfinished: dict[AttemptId, State] = field(default_factory=dict)
    retention_due: bool = False
    awaiting: bool = False
    blocked: dict[AttemptId, CkptFsmError] = field(default_factory=dict)

    def apply(self, record: TransitionRecord) -> None:
        self.retention_due = True  # until the coordinator says that nothing more follows
        self.blocked.pop(record.of, None)
        if record.dest in UNFINISHED:
            self.unfinished[record.of] = record.dest
        else:
            self.unfinished.pop(record.of, None)
        if record.dest is State.TRACKED:
            self.steps.add(record.step)
        elif record.source is State.TRACKED:
            self.steps.discard(record.step)

    @property
    def quiet(self) -> bool:
        """True while nothing is in flight, being cleaned up, being pruned, or answered late."""
        return not self.unfinished and not self.retention_due and not self.awaiting

    @property
    def latest(self) -> int | None:
        return max(self.steps, default=None)

    @property
    def in_flight(self) -> AttemptId | None:
        return next((of for of, state in self.unfinished.items() if state in IN_FLIGHT), None)

    @property
    def blocked_by(self) -> CkptFsmError | None:
        """The error of the disk that blocks the save in flight, or None."""
        busy = self.in_flight
        return self.blocked.get(busy) if busy is not None else None

    def explain(self, step: int) -> str:
        """The state of ``step`` in one or two sentences."""
        if step in self.steps:
            latest = " and is the latest" if step == self.latest else ""
            return f"Step {step} is tracked{latest}."
        of = max((of for of in self.unfinished if of.step == step), default=None)
        if of is None:
            return f"Step {step} is neither tracked nor in flight."
        state = self.unfinished[of]
        words = "has failed and is not cleaned up yet" if state is State.FAILED else "is in flight"
        said = f"Step {step} {words} (state {state.value})."
        reason = self.blocked.get(of)
        if reason is None:
            return said
        return f"{said[:-1]}, and blocked: {named(reason)}. It is retried until the disk takes it."


def named(reason: CkptFsmError) -> str:
    """The reason of a block, for display: the call, its file, the name of the error."""
    facts = (reason.facts.get("file"), reason.facts.get("errno_name"))
    details = ", ".join(str(fact) for fact in facts if fact is not None)
    return f"{reason.message} ({details})" if details else reason.message


def facts_of(reason: CkptFsmError) -> dict[str, Any]:
    """The reason of a block, as attributes of an error."""
    return {
        "reason": reason.facts.get("call") or reason.kind,
        "file": reason.facts.get("file"),
        "errno_name": reason.facts.get("errno_name"),
    }
