"""The lives as a text table."""

from __future__ import annotations

from collections.abc import Sequence

from ckptfsm.core.lifecycle import ENDED, State
from ckptfsm.core.units import bytes_text
from ckptfsm.views.reading import Life
from ckptfsm.views.timeline import Lane, clean, clip, describe_end, place

S = State

_COLUMNS: tuple[tuple[str, str, frozenset[State]], ...] = (
    ("", "requested", frozenset({S.REQUESTED})),
    ("", "forked", frozenset({S.FORKED})),
    ("shards_", "written", frozenset({S.SHARDS_WRITTEN})),
    ("", "finalized", frozenset({S.FINALIZED})),
    ("", "tracked", frozenset({S.TRACKED})),
    ("prunable", "or failed", frozenset({S.PRUNABLE, S.FAILED})),
    ("pruned or", "put away", ENDED),
)
_MAX_END = 36  # characters of the last column
_MAX_LINE = 130  # characters; columns are one space apart if two do not fit


def render_table(lives: Sequence[Life]) -> str:
    """A monospaced table, one row per attempt. Each time is the first entry into a state.

    "put away" is discarded or quarantined; the last column says which.
    """
    if not lives:
        return "no checkpoints in the journal"
    placed = place(lives)
    rows = [
        ["", "", *(top for top, _, _ in _COLUMNS), "", ""],
        ["step", "attempt", *(name for _, name, _ in _COLUMNS), "bytes", "end"],
    ]
    rows += [_table_row(lane) for lane in placed.lanes]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= _MAX_LINE else " "
    lines = [f"seconds since {placed.origin or 'the first record'}"]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[1], cells[-1] = row[1].ljust(widths[1]), row[-1]
        lines.append(gap.join(cells).rstrip())
    lines.insert(3, gap.join("-" * width for width in widths))
    return "\n".join(lines)


def _table_row(lane: Lane) -> list[str]:
    life = lane.life
    cells = []
    for _, _, states in _COLUMNS:
        entered = zip(life.entered, lane.times, strict=True)
        first = next((t for entry, t in entered if entry.state in states), None)
        cells.append("-" if first is None else f"{first:+.2f}")
    end = clip(clean(describe_end(life)), _MAX_END)
    return [str(life.step), life.attempt, *cells, bytes_text(life.shard_bytes), end]
