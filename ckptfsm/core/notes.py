"""Facts about saves that no record tells, and the base class of the hooks that take them."""

from __future__ import annotations

from dataclasses import dataclass

from ckptfsm.core.documents import TransitionRecord


@dataclass(frozen=True, slots=True)
class Stalled:
    """A call for the save of ``step`` kept this rank's trainer waiting, from its begin to its end."""

    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Refused:
    """A save was not accepted. ``kind`` is that of the error."""

    kind: str


@dataclass(frozen=True, slots=True)
class Unpolled:
    """The trainer was warned that a save is in flight and ``poll`` is not called."""


Note = Stalled | Refused | Unpolled


class Meter:
    """Base class of hooks that take notes beside records.

    Both calls come on the training thread: they may not wait, and may not call the manager. An
    exception is logged.
    """

    def __call__(self, record: TransitionRecord) -> None:
        raise NotImplementedError

    def note(self, note: Note) -> None:
        raise NotImplementedError
