"""Lives placed in time, and their ends in words.

If a time of the journal is missing or steps back, the time before is used: no state has a negative
duration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from ckptfsm.core.lifecycle import ENDED, IN_FLIGHT, State
from ckptfsm.views.reading import Entry, Life, Run

S = State


@dataclass(frozen=True, slots=True)
class Lane:
    """A life with the entry times of its states in seconds, and the end of the last one."""

    life: Life
    times: tuple[float, ...]
    until: float

    def spans(self) -> Iterator[tuple[Entry, float, float]]:
        """The triple (entry, from, to) of every state that lasts; an end state does not."""
        stops = (*self.times[1:], self.until)
        for entry, start, stop in zip(self.life.entered, self.times, stops, strict=True):
            if entry.state not in ENDED:
                yield entry, start, stop


@dataclass(frozen=True, slots=True)
class Placed:
    """Lives in seconds since a record; ``origin`` is that record's wall-clock text."""

    lanes: tuple[Lane, ...]
    runs: tuple[tuple[Run, float, float], ...]
    origin: str

    def moments(self) -> list[float]:
        """All times of known events, ascending, without repeats."""
        moments = {t for _, opened, last in self.runs for t in (opened, last)}
        for lane in self.lanes:
            moments.update(lane.times)
        return sorted(moments)


def parse_time(text: str) -> float | None:
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=timezone.utc)
    return when.timestamp()


def place(lives: Sequence[Life], older: int = 0) -> Placed:
    """The lives in time, but not the first ``older`` ones: time then begins with the next one."""
    runs, lives = lives[0].resumed if lives else (), lives[older:]
    known = [e.at for life in lives for e in life.entered]
    if older:
        runs = tuple(run for run in runs if run.epoch >= lives[0].entered[0].epoch)
    else:
        known = [run.opened for run in runs] + known
    origin = next((text for text in known if parse_time(text) is not None), "")
    zero = parse_time(origin) or 0.0

    def seconds(text: str, before: float) -> float:
        when = parse_time(text)
        return before if when is None else max(before, round(when - zero, 6))

    placed_runs: list[tuple[Run, float, float]] = []
    floor = 0.0
    for run in runs:
        opened = seconds(run.opened, floor)
        floor = seconds(run.last, opened)
        placed_runs.append((run, opened, floor))
    began = {run.epoch: opened for run, opened, _ in placed_runs}
    timed: list[list[float]] = []
    for life in lives:
        times: list[float] = []
        for entry in life.entered:
            times.append(seconds(entry.at, times[-1] if times else began.get(entry.epoch, 0.0)))
        timed.append(times)
    horizon = max([floor, *(times[-1] for times in timed)])
    lanes = []
    for life, times in zip(lives, timed, strict=True):
        until = seconds(life.left, times[-1]) if life.left else horizon
        lanes.append(Lane(life, tuple(times), times[-1] if life.end in ENDED else until))
    return Placed(tuple(lanes), tuple(placed_runs), origin)


def describe_end(life: Life) -> str:
    """The end or the state of a life, in a few words: ``discarded: process_lost``."""
    adopted = ", adopted" if life.adopted else ""
    if life.left:
        return f"{life.end.value}, then moved away{adopted}"
    if life.end is S.TRACKED:
        return f"tracked (kept{adopted})"
    if life.end in IN_FLIGHT:
        return f"{life.end.value} (in flight)"
    if life.end is S.PRUNABLE:
        return f"prunable (not yet removed{adopted})"
    if life.end is S.PRUNED or not life.reason:
        return f"{life.end.value}{adopted}"
    return f"{life.end.value}: {life.reason}{adopted}"


def clean(text: str) -> str:
    """``text`` without characters that move a terminal's cursor or that HTML does not allow."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def clip(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def format_duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 86400:.1f} d"
