"""The intent to roll back a root or to start afresh: journaled first, as many moves follow. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, Protocol

from ckptfsm.core.documents import (
    Record,
    RollbackFinished,
    RollbackStarted,
    SegmentOpened,
    TransitionRecord,
)
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId


class Standing(Protocol):
    """A checkpoint, as far as an intent looks at it."""

    @property
    def step(self) -> int: ...

    @property
    def state(self) -> State: ...


@dataclass(frozen=True, slots=True)
class Intent:
    """A rollback or a fresh start, as far as the journal has recorded it.

    - ``rolling_back``: the rollback to ``target`` is unfinished; ``target`` None is a fresh start.
    - ``lowered``: a checkpoint was withdrawn for the rollback, so the tracker durably named the
      target. False again once the checkpoint at the target was lost and withdrawn too.
    - ``begun_afresh``: a fresh start was begun, and no checkpoint was tracked since its completion.
    """

    rolling_back: bool = False
    target: int | None = None
    lowered: bool = False
    begun_afresh: bool = False

    @classmethod
    def carried_by(cls, opened: SegmentOpened) -> Intent:
        """The intent that a new segment carries over from the earlier ones."""
        return cls(
            opened.rolling_back,
            opened.rolling_back_to,
            opened.rolling_back_lowered,
            opened.begun_afresh,
        )

    def after(self, record: Record, checkpoints: Mapping[AttemptId, Standing]) -> Intent:
        """The intent after ``record`` is journaled; ``checkpoints`` are those before ``record``."""
        match record:
            case RollbackStarted(to_step=target):
                afresh = self.begun_afresh or target is None
                return Intent(rolling_back=True, target=target, begun_afresh=afresh)
            case RollbackFinished():
                return Intent(begun_afresh=self.begun_afresh)
            case TransitionRecord(event="withdrawn", reason="rollback"):
                return replace(self, lowered=True)
            case TransitionRecord(event="withdrawn") if record.step == self._reached(checkpoints):
                return replace(self, lowered=False)
            case TransitionRecord(dest=State.TRACKED) if not self.rolling_back:
                return NO_INTENT
        return self

    def _reached(self, checkpoints: Mapping[AttemptId, Standing]) -> int | None:
        """The step that the rollback leaves the tracker at."""
        if self.target is None:
            return None
        tracked = (c.step for c in checkpoints.values() if c.state is State.TRACKED)
        return max((step for step in tracked if step <= self.target), default=None)

    @property
    def unfinished(self) -> Literal["", "rollback", "fresh"]:
        """The kind of intent that an opening has to complete, "" for none."""
        if not self.rolling_back:
            return ""
        return "fresh" if self.target is None else "rollback"


NO_INTENT: Final = Intent()
