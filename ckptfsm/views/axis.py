"""Axes that map seconds to pixels: for the whole run without idle time, and for a single save."""

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

    def ticks(self) -> list[tuple[float, str]]:
        """(pixel, label) of round times, none in a break, none too close to the one before."""
        step = _nice_step(self.rate() * _TICK_GAP)
        digits = max(0, -math.floor(math.log10(step)))
        found: list[tuple[float, str]] = []
        t0, t1 = self.seconds[0], self.seconds[-1]
        edges = [t0, *(t for pair in self.breaks for t in pair), t1]
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            first, last = math.ceil(start / step - 1e-9), math.floor(stop / step + 1e-9)
            for n in range(first, min(last, first + 200) + 1):
                x = self.at(n * step)
                if not found or x - found[-1][0] >= _TICK_GAP * 0.7:
                    found.append((x, f"{n * step:.{digits}f}"))
        return found


_TICK_GAP = 62.0  # pixels between ticks, about
_BREAK = 60.0  # pixels of a compressed idle time
_MAX_BREAKS = 6


def _nice_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9))


def overview_axis(placed: Placed, left: float, right: float) -> Axis:
    """The axis of the whole run.

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
