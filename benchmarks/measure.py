"""Options, samples and figures that all groups share, and how they are shown.

A figure is the median of its samples with its spread. A ratio is taken pair by pair, never between
two medians, so that a disturbance of both sides of a pair cancels out.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

from ckptfsm.adapters.abilities import file_system_of

RANKS = (1_000, 3_000, 10_000, 30_000, 100_000)
MS, US = 1e3, 1e6  # from seconds
_COLUMNS = ("figure", "median", "p25", "p75", "min", "max", "n", "unit", "target", "met")


@dataclass(frozen=True, slots=True)
class Options:
    """``state_bytes``: the saved state; ``pairs``: samples per side; ``work``: where to write.

    ``ranks``: the simulated ranks of each save of the group ``scale``, in growing order. ``busy_s``: how
    long the ranks of the group ``finishing`` compute without a call. ``device``: where the group
    ``device`` has its state; ``alone``: without peers. ``within_s``: no round of saves in turns begins
    later.
    """

    work: Path
    state_bytes: int = 1 << 30
    pairs: int = 16
    checkpoints: int = 10_000
    ranks: tuple[int, ...] = RANKS
    busy_s: float = 5.0
    poll_interval_s: float = 0.002
    device: str = "cuda"
    alone: bool = False
    within_s: float = math.inf

    @property
    def warm_up_rounds(self) -> int:
        """Rounds that are not measured: two, but none before a few samples."""
        return min(2, self.pairs // 4)


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured quantity. ``target`` is the greatest median that is still good enough."""

    name: str
    unit: str
    samples: tuple[float, ...] = field(repr=False)
    target: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.median <= self.target

    def quartiles(self) -> tuple[float, float]:
        """The first and the third quartile of the samples."""
        if len(self.samples) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low, high


def in_unit(
    name: str, unit: str, scale: float, seconds: Sequence[float], target: float | None = None
) -> Figure:
    """A figure from samples in seconds, shown in ``unit`` (``scale`` of them make a second)."""
    return Figure(name, unit, tuple(s * scale for s in seconds), target)


def ratio(
    name: str, ours: Sequence[float], stock: Sequence[float], target: float | None = None
) -> Figure:
    """Ours / stock, pair by pair. For times that are above zero."""
    return Figure(name, "ratio", tuple(a / b for a, b in zip(ours, stock, strict=True)), target)


def balanced(name: str, ours: Sequence[float], stock: Sequence[float]) -> Figure:
    """Geometric means of the ratios of two neighbouring pairs, which ran in opposite order."""
    pairs = ratio(name, ours, stock).samples
    means = (math.sqrt(a * b) for a, b in zip(pairs[::2], pairs[1::2], strict=True))
    return Figure(name, "ratio", tuple(means))


def difference(
    name: str, unit: str, scale: float, a: Sequence[float], b: Sequence[float]
) -> Figure:
    """``a - b``, pair by pair, both in seconds: for differences that may be zero."""
    return in_unit(name, unit, scale, [x - y for x, y in zip(a, b, strict=True)])


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def environment(options: Options) -> dict[str, object]:
    """Versions, machine and options that the figures depend on, to be shown beside them."""
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "megatron-core": version("megatron-core"),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "huge_pages": huge_pages.read_text().strip() if huge_pages.exists() else "unknown",
        # On a tmpfs an fsync costs nothing.
        "file_system": file_system_of(str(options.work.resolve())),
        "state_bytes": options.state_bytes,
        "pairs": options.pairs,
        "checkpoints": options.checkpoints,
        "ranks": options.ranks,
    }


def as_json(about: dict[str, object], groups: dict[str, list[Figure]]) -> str:
    """Environment and figures as JSON, samples included."""
    figures = [
        {"group": group, "median": figure.median, "met": figure.met, **asdict(figure)}
        for group, measured in groups.items()
        for figure in measured
    ]
    return json.dumps({"environment": about, "figures": figures}, indent=1)


def as_table(about: dict[str, object], groups: dict[str, list[Figure]]) -> str:
    """A line per figure, to print."""
    rows: list[Sequence[str]] = [_COLUMNS]
    for group, figures in groups.items():
        rows.append((f"[{group}]", *[""] * (len(_COLUMNS) - 1)))
        rows += [_row(figure) for figure in figures]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = [f"{key}: {value}" for key, value in about.items()] + [""]
    for row in rows:
        name, *cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join((name, *cells)).rstrip())
    return "\n".join(lines)


def _row(figure: Figure) -> Sequence[str]:
    low, high = figure.quartiles()
    numbers = (figure.median, low, high, min(figure.samples), max(figure.samples))
    return (
        figure.name,
        *(f"{number:.3f}" if abs(number) < 10 else f"{number:.1f}" for number in numbers),
        str(len(figure.samples)),
        figure.unit,
        "" if figure.target is None else f"{figure.target:g}",
        {None: "", True: "yes", False: "NO"}[figure.met],
    )
