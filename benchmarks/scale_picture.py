"""Draw the figures of the group ``scale``: seconds and memory against the number of ranks.

The third panel has the seconds of rank 0 for a plan in DCP's own format, and those of torch's plan.

    python -m benchmarks --only scale --json | python -m benchmarks.scale_picture > docs/scale.svg

Both axes are logarithmic, so that a cost that grows with the ranks is a straight line with the
slope of the dashed one.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _TOP, _SIDE = 1070, 330, 64, 40, 250
_LINES = (  # figure, words, colour (Okabe and Ito)
    ("coordinator", "whole save", "#0072b2"),
    ("of it: finish and publish", "finish and publish", "#009e73"),
    ("of it: take the reports", "take the reports", "#d55e00"),
    ("of it: agree on the proposals", "agree", "#cc79a7"),
)
_PLANS = (
    ("torch's plan", "torch's create_global_plan", "#d55e00"),
    ("DCP .metadata", "make .metadata", "#009e73"),
    ("DCP plan", "plan of a first save", "#0072b2"),
    ("DCP plan, next save", "of the next saves", "#cc79a7"),
)
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """A square with two logarithmic axes. ``left`` is its place; the others are exponents of 10."""

    left: float
    x: tuple[int, int]
    y: tuple[int, int]

    def at(self, x: float, y: float) -> tuple[float, float]:
        (x0, x1), (y0, y1) = self.x, self.y
        across = (math.log10(x) - x0) / (x1 - x0)
        up = (math.log10(y) - y0) / (y1 - y0)
        return self.left + _SIDE * across, _TOP + _SIDE * (1 - up)

    def axes(self, title: str) -> Iterator[str]:
        yield _text(self.left, _TOP - 14, title, "start")
        for exponent in range(self.x[0], self.x[1] + 1):
            x, bottom = self.at(10.0**exponent, 10.0 ** self.y[0])
            yield _path([(x, _TOP), (x, bottom)], "#d9dee4")
            yield _text(x, bottom + 16, f"{10**exponent:,}", "middle")
        for exponent in range(self.y[0], self.y[1] + 1):
            left, y = self.at(10.0 ** self.x[0], 10.0**exponent)
            yield _path([(left, y), (left + _SIDE, y)], "#d9dee4")
            yield _text(left - 6, y + 4, f"{10.0**exponent:g}", "end")

    def line(self, points: Points, colour: str) -> Iterator[str]:
        places = [self.at(x, y) for x, y in points]
        yield _path(places, colour, width=2)
        for x, y in places:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'

    def slope(self, points: Points) -> str:
        """The dashed line of a cost that doubles with the ranks, through the last point."""
        (x0, _), (x1, y1) = points[0], points[-1]
        return _path([self.at(x0, y1 * x0 / x1), self.at(x1, y1)], "#57606a", dash="5 4")


def _path(points: Points, colour: str, width: float = 1, dash: str = "") -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<polyline points="{places}" fill="none" stroke="{colour}" '
        f'stroke-width="{width:g}"{dashes}/>'
    )


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#1b1f24") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def points_of(report: Mapping[str, Any], name: str) -> list[tuple[float, float]]:
    """A figure by the number of ranks, in growing order."""
    ending = f" ranks, {name}"
    found = [
        (float(figure["name"].removesuffix(ending)), float(figure["median"]))
        for figure in report["figures"]
        if figure["name"].endswith(ending)
    ]
    return sorted(found)


def draw(report: Mapping[str, Any]) -> str:
    """The picture as SVG."""
    lines = [(points_of(report, name), words, colour) for name, words, colour in _LINES]
    start = points_of(report, "RSS before the save")
    peak = points_of(report, "peak RSS")
    grown = [
        (ranks, max(mib - before, 0.1))
        for (ranks, mib), (_, before) in zip(peak, start, strict=True)
    ]
    ranks = [number for number, _ in peak]
    across = math.floor(math.log10(ranks[0])), math.ceil(math.log10(ranks[-1]))
    seconds = Panel(_LEFT, across, _range([y for points, _, _ in lines for _, y in points]))
    memory = Panel(_LEFT + _SIDE + 110, across, _range([y for _, y in grown]))
    shapes = [*seconds.axes("processor time of one save, s"), seconds.slope(lines[0][0])]
    for row, (points, words, colour) in enumerate(lines):
        shapes += seconds.line(points, colour)
        shapes.append(_text(_LEFT + 8, _TOP + 16 + 15 * row, words, "start", colour))
    shapes += [*memory.axes("memory beyond that before the save, MiB"), memory.slope(grown)]
    shapes += memory.line(grown, _LINES[0][2])
    plans = [(points_of(report, name), words, colour) for name, words, colour in _PLANS]
    across = 1, math.ceil(math.log10(plans[0][0][-1][0]))
    planning = Panel(
        memory.left + _SIDE + 90, across, _range([y for p, _, _ in plans for _, y in p])
    )
    shapes += planning.axes("processor time of a DCP plan, 2,500 items a rank, s")
    for row, (points, words, colour) in enumerate(plans):
        shapes += planning.line(points, colour)
        shapes.append(_text(planning.left + 8, _TOP + 16 + 15 * row, words, "start", colour))
    for panel in (seconds, memory, planning):
        shapes.append(_text(panel.left + _SIDE / 2, _TOP + _SIDE + 34, "ranks", "middle"))
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="system-ui,sans-serif" font-size="12">'
    )
    ground = f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>'
    return "\n".join((opening, ground, *shapes, "</svg>\n"))


def _range(values: Sequence[float]) -> tuple[int, int]:
    """The exponents of 10 around positive values."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


if __name__ == "__main__":
    sys.stdout.write(draw(json.load(sys.stdin)))
