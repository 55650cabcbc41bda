"""The end of this job's allocation as one rank knows it, and the durations of the job's saves."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from ckptfsm.adapters.notices import say
from ckptfsm.core.errors import describe
from ckptfsm.core.ports import Clock
from ckptfsm.core.preemption import lead_s, unix_time

log = logging.getLogger("ckptfsm")
_REMEMBERED = 100  # saves, and looks
End = float | Callable[[], float | None] | None


class Allocation:
    """See the module. ``told``: the setting ``end_of_allocation``."""

    def __init__(self, clock: Clock, told: End) -> None:
        self._clock = clock
        self._told = told
        self._opened_at = clock.monotonic()
        self._end: tuple[float, float] | None = None  # as it was told, and in monotonic time
        self._problem = ""
        self._began: float | None = None
        self._saves: deque[float] = deque(maxlen=_REMEMBERED)
        self._looks: deque[float] = deque(maxlen=_REMEMBERED)
        self._looked_at: float | None = None
        self._over = False

    def save_begins(self) -> None:
        """Note the begin of a save."""
        self._began = self._clock.monotonic()

    def save_tracked(self) -> None:
        """Note the end of the save that began last. That of an earlier run is not measured."""
        if self._began is not None:
            self._saves.append(self._clock.monotonic() - self._began)
            self._began = None

    def ends_soon(self, *, idle: bool) -> bool:
        """True if the last save must begin now, until ``agreed`` is called.

        ``idle``: nothing is in flight, so that ranks look only at every few polls.
        """
        now = self._clock.monotonic()
        if idle and self._looked_at is not None:
            self._looks.append(now - self._looked_at)
        self._looked_at = now
        end = None if self._over else self._current()
        if end is None:
            return False
        left, lead = end - now, lead_s(end - self._opened_at, self._saves, self._looks)
        if left > lead:
            return False
        said = f"the allocation ends in {left:.0f} s, and the last save needs up to {lead:.0f} s: "
        say(log.warning, "allocation_ends", f"{said}it is due now", left_s=left, lead_s=lead)
        return True

    def agreed(self) -> None:
        """Note that all ranks know of the end."""
        self._over = True

    def _current(self) -> float | None:
        """The end as it is told now, in monotonic time."""
        try:
            told = self._told() if callable(self._told) else self._told
            end = None if told is None else unix_time(told)
        except Exception as error:  # a user's function: training goes on
            self._say(f"end_of_allocation is not known: {describe(error)}")
            return None
        if end is None:
            return None
        if self._end is None or self._end[0] != end:
            self._end = (end, self._clock.monotonic() + end - self._clock.unix())
        return self._end[1]

    def _say(self, problem: str) -> None:
        """Log a problem, once."""
        if problem != self._problem:
            self._problem = problem
            say(log.warning, "end_not_known", problem, exc_info=True)
