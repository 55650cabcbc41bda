"""Turns the records and notes of a job into metrics. Pure: no clock, no I/O.

The training thread puts records in, and another thread may ask for ``metrics`` at any time: each
attribute that ``metrics`` reads is replaced whole, never changed in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from ckptfsm.core import metrics as names
from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.lifecycle import IN_FLIGHT, State
from ckptfsm.core.metrics import Family, Metric
from ckptfsm.core.notes import Note, Refused, Stalled, Unpolled
from ckptfsm.core.parts import AttemptId

_Counts = Mapping[Family, Mapping[str, float]]  # the inner key is a label's value, or ""


@dataclass(slots=True)
class _SaveInFlight:
    """A save in flight: the states that it entered, with the times in seconds since 1970."""

    entered: list[tuple[State, float]]
    stall_s: float | None = None


@dataclass(frozen=True, slots=True)
class EndedSave:
    """A save that ``record`` ended: tracked, failed or withdrawn.

    ``states`` has each state of its flight, and when that was entered and left. ``stall_s`` is None
    if the save ended inside the trainer's call: a later note tells it. ``metrics`` are those of a
    point in a plot.
    """

    record: TransitionRecord
    states: tuple[tuple[State, float, float], ...]
    stall_s: float | None
    metrics: tuple[Metric, ...]


class Measurements:
    """The metrics of one process since ``began``, in seconds since 1970."""

    def __init__(self, began: float) -> None:
        self._flights: dict[AttemptId, _SaveInFlight] = {}
        self._counts: _Counts = {f: {"": 0.0} for f in (names.STALL, names.TRACKED, names.UNPOLLED)}
        self._latest_step: int | None = None
        self._latest: tuple[Metric, ...] = ()
        self._stall: tuple[Metric, ...] = ()
        self._tracked_at: float | None = None
        self._began = began

    def take(self, record: TransitionRecord) -> EndedSave | None:
        """Take a record. Returns the save that it ends, if any."""
        at = _seconds(record.at)
        if record.dest is State.REQUESTED and at is not None:
            self._flights[record.of] = _SaveInFlight([(State.REQUESTED, at)])
            return None
        flight = self._flights.get(record.of)
        if flight is not None:  # a clock that was set back gives no negative time
            flight.entered.append((record.dest, max(at or 0.0, flight.entered[-1][1])))
        if record.dest in IN_FLIGHT:
            return None
        if record.source in IN_FLIGHT:
            self._flights.pop(record.of, None)
            return self._ended(record, flight, at)
        if record.dest is State.QUARANTINED and record.step == self._latest_step:
            self._latest_step, self._latest = None, ()  # rolled back: an older one is the latest
        return None

    def note(self, note: Note) -> tuple[Metric, ...]:
        """Take a note. Returns the metrics of a stall that belongs to no save in flight."""
        match note:
            case Stalled(step, seconds):
                return self._stalled(step, seconds)
            case Refused(kind):
                self._count(names.REFUSED, kind)
            case Unpolled():
                self._count(names.UNPOLLED)
        return ()

    def metrics(self, now: float) -> list[Metric]:
        """All metrics, as of ``now``. The age begins with this process if it tracked no save."""
        tracked_at, step = self._tracked_at, self._latest_step
        found = [*self._counters(), *self._latest, *self._stall]
        if step is not None:
            found.append(names.LATEST_STEP.of(step))
        if tracked_at is not None:
            found.append(names.LATEST_TRACKED.of(tracked_at))
        since = self._began if tracked_at is None else tracked_at
        return [*found, names.LATEST_AGE.of(max(0.0, now - since))]

    def _ended(
        self, record: TransitionRecord, flight: _SaveInFlight | None, at: float | None
    ) -> EndedSave:
        entered = flight.entered if flight is not None else []
        spans = tuple((state, start, stop) for (state, start), (_, stop) in pairwise(entered))
        latest: tuple[Metric, ...] = ()
        if record.acknowledges:
            self._count(names.TRACKED)
            self._tracked_at = entered[-1][1] if entered else at
            self._latest_step = record.step
            self._latest = latest = tuple(_of_tracked(record.shard_bytes, spans))
        elif record.dest is State.FAILED:
            self._count(names.FAILURES, record.reason)
        stall_s = flight.stall_s if flight is not None else None
        if stall_s is not None:
            self._stall = (names.LATEST_STALL.of(stall_s),)
            latest = (*latest, *self._stall)
        return EndedSave(record, spans, stall_s, (*self._counters(), *latest))

    def _stalled(self, step: int, seconds: float) -> tuple[Metric, ...]:
        self._count(names.STALL, by=seconds)
        flight = next((f for of, f in self._flights.items() if of.step == step), None)
        if flight is not None:
            flight.stall_s = (flight.stall_s or 0.0) + seconds
            return ()
        self._stall = (names.LATEST_STALL.of(seconds),)
        return (names.STALL.of(self._counts[names.STALL][""]), *self._stall)

    def _count(self, family: Family, label: str = "", by: float = 1.0) -> None:
        counted = self._counts.get(family, {})
        counted = {**counted, label: counted.get(label, 0.0) + by}
        self._counts = {**self._counts, family: counted}

    def _counters(self) -> Iterator[Metric]:
        for family, counted in self._counts.items():
            yield family.each(counted) if family.label else family.of(counted[""])


def _of_tracked(
    shard_bytes: int, spans: tuple[tuple[State, float, float], ...]
) -> Iterator[Metric]:
    """The metrics of the latest checkpoint, as far as its times are known."""
    yield names.LATEST_BYTES.of(shard_bytes)
    lasted = {state: stop - start for state, start, stop in spans}
    if lasted:
        yield names.LATEST_STATES.each({state.value: s for state, s in lasted.items()})
    writing = names.seconds_of_writing(lasted)
    if writing > 0:
        yield names.LATEST_RATE.of(shard_bytes / writing)


def _seconds(at: str) -> float | None:
    """The time of a record in seconds since 1970, or None if the record has none."""
    try:
        return datetime.fromisoformat(at).timestamp()
    except ValueError:
        return None
