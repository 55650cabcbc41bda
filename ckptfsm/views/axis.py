"""Axes that map seconds to pixels: for all attempts without idle time, and for a single save."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ckptfsm.core.lifecycle import State
from ckptfsm.views.timeline import Placed


@dataclass(frozen=True, slots=True)
class Axis:
    """Seconds to pixels, linear between knots. ``breaks`` are idle times drawn short."""

    seconds: tuple[float, ...]
    pixels: tuple[float, ...]
    breaks: tuple[tuple[float, float], ...] = ()

    def at(self, t: float) -> float:
        right = min(max(bisect_right(self.seconds, t), 1), len(self.seconds) - 1)
        t0, t1 = self.seconds[right - 1 : right + 1]
        x0, x1 = self.pixels[right - 1 : right + 1]
        return x0 + (x1 - x0) * (t - t0) / (t1 - t0)

    def rate(self) -> float:
        """Seconds per pixel outside the breaks."""
        idle = sum(stop - start for start, stop in self.breaks)
        drawn = sum(self.at(stop) - self.at(start) for start, stop in self.breaks)
        span = self.seconds[-1] - self.seconds[0]
        return max(span - idle, 1e-9) / max(self.pixels[-1] - self.pixels[0] - drawn, 1.0)

    def ticks(self) -> list[tuple[float, str, float]]:
        """(pixel, label, seconds) of round times; no label overlaps another or that of a break."""
        least = self.rate() * _TICK_GAP * (1 - 1e-9)
        count, size, unit = next(step for step in _STEPS if step[0] * step[1] >= least)
        step = count * size
        found: list[tuple[float, str, float]] = []
        taken = [(self.at(start) + 6, self.at(stop) - 6) for start, stop in self.breaks]
        t0, t1 = self.seconds[0], self.seconds[-1]
        edges = [t0, *(t for pair in self.breaks for t in pair), t1]
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            for n in range(math.ceil(start / step - 1e-9), math.floor(stop / step + 1e-9) + 1):
                x, label = self.at(n * step), f"{n * count:.10g} {unit}"
                half = len(label) * _LETTER / 2
                if all(x + half < left or x - half > right for left, right in taken):
                    taken.append((x - half - _LETTER, x + half + _LETTER))
                    found.append((x, label, n * step))
        return found


_TICK_GAP = 62.0  # pixels between ticks, at least
_LETTER = 6.2  # pixels of a character of a label, about
_STEPS = (  # (count, seconds of the unit, unit) from tick to tick
    *((m * 10.0**power, 1, "s") for power in range(-4, 0) for m in (1, 2, 5)),
    *(
        (count, size, unit)
        for size, unit in ((1, "s"), (60, "min"))
        for count in (1, 2, 5, 10, 15, 30)
    ),
    *((count, 3600, "h") for count in (1, 2, 3, 6, 12)),
    *((m * 10**power, 86400, "d") for power in range(7) for m in (1, 2, 5)),
)
_BREAK = 60.0  # pixels of a compressed idle time
_MAX_BREAKS = 6


def overview_axis(placed: Placed, left: float, right: float) -> Axis:
    """The axis of all attempts.

    Idle times of more than ten usual distances of saves are drawn short.
    """
    moments = placed.moments()
    if moments[-1] <= moments[0]:
        moments = [moments[0], moments[0] + 1.0]
    starts = sorted(lane.times[0] for lane in placed.lanes)
    distances = [b - a for a, b in pairwise(starts) if b > a]
    limit = 10 * median(distances) if distances else math.inf
    idle = [pair for pair in pairwise(moments) if pair[1] - pair[0] > limit]
    idle = sorted(sorted(idle, key=lambda p: p[0] - p[1])[:_MAX_BREAKS])
    busy = moments[-1] - moments[0] - sum(b - a for a, b in idle)
    scale = (right - left - _BREAK * len(idle)) / max(busy, 1e-9)
    seconds, pixels = [moments[0]], [left]
    for start, stop in idle:
        if start > seconds[-1]:
            pixels.append(pixels[-1] + (start - seconds[-1]) * scale)
            seconds.append(start)
        pixels.append(pixels[-1] + _BREAK)
        seconds.append(stop)
    if moments[-1] > seconds[-1]:
        pixels.append(right)
        seconds.append(moments[-1])
    return Axis(tuple(seconds), tuple(pixels), tuple(idle))


def zoom_axis(placed: Placed, left: float, right: float) -> Axis:
    """The axis of a single save, from its request on.

    Wide enough for every successful save, unless one took far longer than usual.
    """
    good, all_ = [], []
    for lane in placed.lanes:
        if lane.life.adopted:
            continue
        for entry, t in zip(lane.life.entered, lane.times, strict=True):
            all_.append(t - lane.times[0])
            if entry.state is State.TRACKED:
                good.append(t - lane.times[0])
                break
    lengths = [length for length in good or all_ if length > 0] or [1.0]
    return Axis((0.0, min(max(lengths), 4 * median(lengths)) * 1.12), (left, right))
