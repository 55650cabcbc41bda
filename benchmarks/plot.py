"""A picture of the writers beside each other: ``python -m benchmarks.plot peers.json docs/peers.svg``.

Reads the JSON of ``python -m benchmarks --only peers --json``. Bars are medians, lines reach from the
fastest to the slowest sample.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

_PANELS = (
    ("stall, 0 s of work", "stall, update at once"),
    ("stall, 0.5 s of work", "stall, 0.5 s of work before the update"),
    ("until loadable, 0 s of work", "until loadable, update at once"),
)
_OURS = "ckptfsm"
_LABELS, _WIDTH, _ROW, _BAR, _HEAD = 130, 720, 18, 11, 30
_VALUES = 70  # pixels to the right of the longest bar, for its number


class Bar(NamedTuple):
    """A writer's samples in milliseconds."""

    name: str
    least: float
    median: float
    most: float


def bars_of(figures: Sequence[dict[str, Any]], start: str) -> list[Bar]:
    """The bars of a panel, in the order of the figures."""
    found = []
    for figure in figures:
        name = figure["name"]
        if name.startswith(f"{start}, ") and figure["unit"] == "ms":
            samples = figure["samples"]
            title = name.removeprefix(f"{start}, ")
            found.append(Bar(title, min(samples), figure["median"], max(samples)))
    return found


def drawn(figures: Sequence[dict[str, Any]], about: str) -> str:
    """The picture as SVG."""
    pieces: list[str] = []
    top = 4
    for start, title in _PANELS:
        bars = bars_of(figures, start)
        pieces.append(f'<text x="4" y="{top + 14}" class="t">{escape(title)}, ms</text>')
        top += _HEAD
        scale = (_WIDTH - _LABELS - _VALUES) / max(bar.most for bar in bars)
        for bar in bars:
            pieces += _row(bar, top, scale)
            top += _ROW
        top += 8
    pieces.append(f'<text x="4" y="{top + 12}" class="s">{escape(about)}</text>')
    style = (
        "text{font:12px sans-serif;fill:#333}.t{font-weight:bold}.s{font-size:10px}"
        ".o{fill:#0072b2}.p{fill:#b0b0b0}line{stroke:#555}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}line{stroke:#bbb}}"
    )
    body = "\n".join(pieces)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top + 20}" role="img">\n'
        f"<title>Stall and time until loadable of several writers</title>\n<style>{style}</style>\n"
        f"{body}\n</svg>\n"
    )


def _row(bar: Bar, top: float, scale: float) -> list[str]:
    kind = "o" if bar.name.startswith(_OURS) else "p"
    middle = top + _BAR / 2
    end = _LABELS + bar.median * scale
    left, right = _LABELS + bar.least * scale, _LABELS + bar.most * scale
    return [
        f'<text x="{_LABELS - 6}" y="{top + _BAR - 1}" text-anchor="end">{escape(bar.name)}</text>',
        f'<rect class="{kind}" x="{_LABELS}" y="{top}" width="{end - _LABELS:.1f}" height="{_BAR}"/>',
        f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{middle}" y2="{middle}"/>',
        f'<text x="{right + 6:.1f}" y="{top + _BAR - 1}">{bar.median:.0f}</text>',
    ]


def main(source: str, target: str) -> None:
    """Draw the figures of ``source`` into ``target``."""
    report = json.loads(Path(source).read_text(encoding="utf-8"))
    about = report["environment"]
    size = about["state_bytes"] / (1 << 30)
    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "megatron-core"))
    said = f"{size:g} GiB on the CPU, {about['pairs']} rounds, {about['cores']} cores, {versions}"
    Path(target).write_text(drawn(report["figures"], said), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
