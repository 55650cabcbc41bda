"""The lives as a page: one lane per checkpoint, coloured by state. All text is escaped in ``_tag``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from html import escape
from itertools import pairwise

from ckptfsm.core.lifecycle import State
from ckptfsm.core.units import bytes_text
from ckptfsm.views.axis import Axis, overview_axis, zoom_axis
from ckptfsm.views.reading import Entry, Life
from ckptfsm.views.timeline import (
    Lane,
    Placed,
    clean,
    clip,
    describe_end,
    format_duration,
    parse_time,
    place,
)

S = State

_MAX_LANES = 1000
_WIDTH, _ROW, _BAR, _TOP = 1380, 26, 14, 74
_BELOW = 34  # under the lanes: the time of day, the date
_DATE = 66.0  # pixels from date to date, at least
_STEP_X, _NAME_X = 96, 104  # right of the steps, left of the attempts' names
_OVER = (188.0, 766.0)  # left and right of the panel with all attempts in time
_ZOOM = (806.0, 1140.0)  # left and right of the panel with the single saves
_AGAIN_X = 796  # right of the steps, where they stand again
_END_X = 1160
# Of the two halves, which stand in a column on narrow screens.
_LEFT, _RIGHT = (0, 786), (720, _WIDTH)
_LEAST = 3.0  # pixels of the shortest state in the overview

_COLOURS: Mapping[
    State, str
] = {  # Okabe and Ito's palette: told apart by colour-blind readers; outlined for contrast
    S.REQUESTED: "#f0e442",
    S.FORKED: "#e69f00",
    S.SHARDS_WRITTEN: "#009e73",
    S.FINALIZED: "#56b4e9",
    S.TRACKED: "#0072b2",
    S.PRUNABLE: "#cc79a7",
    S.FAILED: "#d55e00",
}
_MARKS: Mapping[State, str] = {
    S.PRUNED: "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
    S.DISCARDED: "M-4.5,-4.5L4.5,4.5M-4.5,4.5L4.5,-4.5",
    S.QUARANTINED: "M0,-5.5L5.5,0L0,5.5L-5.5,0z",
}
_GOES_ON = "M0,-5L6,0L0,5z"

_STYLE = """
:root{color-scheme:light dark;--bg:#fff;--fg:#1b1f24;--dim:#57606a;--grid:#d9dee4;--stripe:#f5f7f9;
--edge:#1b1f24;--down:#e4e8ec;--bad:#b3261e}
@media (prefers-color-scheme:dark){:root{--bg:#12161b;--fg:#e8ebee;--dim:#a4adb7;--grid:#303841;
--stripe:#181d23;--edge:#e8ebee;--down:#2a323a;--bad:#ff8a80}}
body{margin:20px auto;padding:0 16px;max-width:1480px;background:var(--bg);color:var(--fg);
font:14px/1.5 system-ui,sans-serif}
h1{font-size:19px;margin:0 0 4px}
p{margin:0 0 10px;color:var(--dim);max-width:1150px}
ul{display:flex;flex-wrap:wrap;gap:4px 18px;list-style:none;margin:0 0 10px;padding:0}
li svg{vertical-align:-3px;margin-right:6px}
@media (max-width:1100px){body{margin:8px auto;padding:0 8px}h1{overflow-wrap:anywhere}}
.halves{display:flex;flex-wrap:wrap;align-items:flex-start}
.chart{display:block;min-width:0;height:auto}
.left{flex:786 1 610px}.right{flex:660 1 512px}
text{fill:var(--fg);font:12px system-ui,sans-serif;font-variant-numeric:tabular-nums}
.dim{fill:var(--dim);font-size:11px}.head{font-weight:600}.bad{fill:var(--bad)}
.end{text-anchor:end}
.mid{text-anchor:middle;stroke:var(--bg);stroke-width:6;paint-order:stroke}
.stripe{fill:var(--stripe)}.down{fill:var(--down)}.grid{stroke:var(--grid)}
.epoch{stroke:var(--dim);stroke-dasharray:4 3}
.break{stroke:var(--dim);stroke-width:1.5;fill:none}
.bar{stroke:var(--edge);stroke-width:.7}.bar:hover{stroke-width:2}
.mark{stroke:var(--fg);stroke-width:2;fill:var(--bg)}.mark.bad{stroke:var(--bad)}
.more{fill:var(--edge)}
"""


def _tag(name: str, *children: str, text: str = "", **attributes: object) -> str:
    """An element. The only place where text becomes markup: ``text`` and attributes are escaped."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_attribute(value))}"'
        for key, value in attributes.items()
    )
    shown = escape("\n".join(map(clean, text.split("\n"))))
    return f"<{name}{written}>{shown}{''.join(children)}</{name}>"


def _attribute(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def render_html(lives: Sequence[Life], root: str = "") -> str:
    """A complete HTML page: no scripts, no other files. Shows the newest ``_MAX_LANES`` attempts.

    ``root`` is the path of the root, for the heading.
    """
    older = max(0, len(lives) - _MAX_LANES)
    heading = f"Lives of the checkpoints of {root}" if root else "Lives of the checkpoints"
    body = [_tag("h1", text=heading)]
    if lives:
        body += [_explain(older), _legend(), _chart(place(lives, older))]
    else:
        body.append(_tag("p", text="There are no checkpoints in the journal."))
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return "\n".join(
        (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            _tag("title", text=heading) + f"\n<style>{_STYLE}</style>\n</head>\n<body>",
            *body,
            "</body>\n</html>\n",
        )
    )


def _explain(older: int) -> str:
    said = (
        "One lane per attempt, in order of request. Left: attempts in time; states too short to see "
        "are widened, long idle times are cut (//). Right, or below: the save alone, from its request. "
        "Hover over a bar for times."
    )
    return _tag("p", text=said + (f" {older:,} older attempts are not drawn." if older else ""))


def _legend() -> str:
    items = []
    for state, colour in _COLOURS.items():
        swatch = _tag("rect", class_="bar", x=1, y=1, width=18, height=12, fill=colour)
        items.append((swatch, state.value))
    for state, path in _MARKS.items():
        name = "discarded, or above: crash" if state is S.DISCARDED else state.value
        items.append((_mark(path, 10, 7, "mark" if state is S.PRUNED else "mark bad"), name))
    items.append((_mark(_GOES_ON, 7, 7, "more"), "still so at the last record"))
    items.append((_tag("rect", class_="down", width=20, height=14), "no manager running"))
    return _tag(
        "ul",
        *(
            _tag(
                "li",
                _tag("svg", drawing, width=20, height=14, aria_hidden="true"),
                _tag("span", text=name),
            )
            for drawing, name in items
        ),
    )


def _mark(path: str, x: float, y: float, class_: str, title: str = "") -> str:
    inner = [_tag("title", text=title)] if title else []
    place = f"translate({_attribute(float(x))},{_attribute(float(y))})"
    return _tag("path", *inner, class_=class_, d=path, transform=place)


def _chart(placed: Placed) -> str:
    over = overview_axis(placed, *_OVER)
    zoom = zoom_axis(placed, *_ZOOM)
    bottom = _TOP + _ROW * len(placed.lanes)
    rows = range(_TOP, bottom, 2 * _ROW)
    left = [_tag("rect", class_="stripe", y=y, width=_WIDTH, height=_ROW) for y in rows]
    right = list(left)
    left += _downtimes(placed, over, bottom)
    left += _epochs(placed, over, bottom)
    left += _grid(over, bottom, f"time since {placed.origin or 'the first record'}")
    right += _grid(zoom, bottom, "the save alone, time since its request")
    left += _wall_clock(over, placed, bottom)
    left += _breaks(over, bottom)
    for row, lane in enumerate(placed.lanes):
        left += _left_lane(lane, row, over)
        right += _right_lane(lane, row, zoom)
    left.append(_tag("text", class_="head end", x=_STEP_X, y=16, text="step"))
    right.append(_tag("text", class_="head", x=_END_X, y=16, text="end"))
    name = f"Timeline of {len(placed.lanes)} checkpoint attempts"
    halves = (("left", _LEFT, left, name), ("right", _RIGHT, right, f"{name}: each save alone"))
    return _tag(
        "div",
        *(
            _tag(
                "svg",
                *parts,
                class_=f"chart {side}",
                viewBox=f"{start} 0 {stop - start} {bottom + _BELOW}",
                role="img",
                aria_label=said,
            )
            for side, (start, stop), parts, said in halves
        ),
        class_="halves",
    )


def _grid(axis: Axis, bottom: int, heading: str) -> Iterable[str]:
    yield _tag("text", class_="head", x=axis.pixels[0], y=16, text=heading)
    for x, label, _ in axis.ticks():
        yield _tag("line", class_="grid", x1=x, x2=x, y1=_TOP - 4, y2=bottom)
        yield _tag("text", class_="dim mid", x=x, y=_TOP - 9, text=label)


def _wall_clock(axis: Axis, placed: Placed, bottom: int) -> Iterable[str]:
    """The time of day below each tick, in UTC as in the journal; the date where it is another one."""
    zero, date, free = parse_time(placed.origin), "", -math.inf
    if zero is None:
        return
    for x, _, seconds in axis.ticks():
        if x < free:  # two ticks beside a break
            continue
        free = x + _DATE
        when = datetime.fromtimestamp(zero + seconds, timezone.utc)
        title = _tag("title", text=when.isoformat(timespec="seconds"))
        told = when.strftime("%H:%M:%S")
        yield _tag("text", title, class_="dim mid", x=x, y=bottom + 14, text=told)
        if date != (date := when.strftime("%Y-%m-%d")):
            yield _tag("text", class_="dim mid", x=x, y=bottom + 28, text=date)


def _breaks(axis: Axis, bottom: int) -> Iterable[str]:
    for start, stop in axis.breaks:
        x = (axis.at(start) + axis.at(stop)) / 2
        for y in (_TOP - 2, bottom + 2):
            slashes = f"M{x - 6:.1f},{y + 5}l6,-10M{x:.1f},{y + 5}l6,-10"
            yield _tag("path", class_="break", d=slashes)
        label = format_duration(stop - start)
        yield _tag("text", class_="dim mid", x=x, y=_TOP - 9, text=label)


def _downtimes(placed: Placed, axis: Axis, bottom: int) -> Iterable[str]:
    """The pauses between two epochs, marked as a crash if the earlier one was not closed."""
    for (run, _, last), (_, opened, _) in pairwise(placed.runs):
        how = "was closed" if run.closed else "ended without closing: a crash or a kill"
        said = f"epoch {run.epoch} {how}; {format_duration(opened - last)} until the next"
        x, width = axis.at(last), axis.at(opened) - axis.at(last)
        title = _tag("title", text=said)
        height = bottom - _TOP + 4
        width = max(width, 1.0)
        yield _tag("rect", title, class_="down", x=x, y=_TOP - 4, width=width, height=height)
        if not run.closed:
            yield _mark(_MARKS[S.DISCARDED], x, 46, "mark bad", said)


def _epochs(placed: Placed, axis: Axis, bottom: int) -> Iterable[str]:
    free = -math.inf
    for run, opened, _ in placed.runs:
        x = axis.at(opened)
        title = _tag("title", text=f"epoch {run.epoch} began at {run.opened}")
        yield _tag("line", title, class_="epoch", x1=x, x2=x, y1=28, y2=bottom)
        label = f"epoch {run.epoch}"
        if x >= free:  # a crowded label is left to the line's tooltip
            yield _tag("text", class_="dim", x=x + 8, y=36, text=label)
            free = x + 6 * len(label) + 12


def _left_lane(lane: Lane, row: int, over: Axis) -> Iterable[str]:
    """The attempt among all others in time."""
    life, middle = lane.life, _TOP + row * _ROW + _ROW / 2
    yield _tag("text", class_="end", x=_STEP_X, y=middle + 4, text=f"step {life.step}")
    short = life.attempt.partition(".")[2]
    title = _tag("title", text=f"attempt {life.attempt}, {bytes_text(life.shard_bytes)}")
    yield _tag("text", title, class_="dim", x=_NAME_X, y=middle + 4, text=short)
    yield from _overview_bars(lane, middle, over)


def _right_lane(lane: Lane, row: int, zoom: Axis) -> Iterable[str]:
    """The save alone, and its end."""
    life, middle = lane.life, _TOP + row * _ROW + _ROW / 2
    yield _tag("text", class_="dim end", x=_AGAIN_X, y=middle + 4, text=f"{life.step}")
    if not life.adopted:
        yield from _zoom_bars(lane, middle, zoom)
    bad = "bad" if life.reason or life.end is S.FAILED else ""
    said = clip(describe_end(life), 34)
    full = _tag("title", text=clip(f"{life.reason} {life.detail}".strip(), 500))
    yield _tag("text", full, class_=bad, x=_END_X, y=middle + 4, text=said)


def _overview_bars(lane: Lane, middle: float, axis: Axis) -> Iterable[str]:
    spans = list(lane.spans())
    edges: list[float] = []
    for t in (*(start for _, start, _ in spans), lane.until):
        edges.append(max(axis.at(t), edges[-1] + _LEAST if edges else -math.inf))
    for index in range(len(edges)):  # push bars back that widening pushed out of the panel
        room = axis.pixels[-1] - _LEAST * (len(edges) - 1 - index)
        edges[index] = min(edges[index], room)
    for (entry, start, stop), (x0, x1) in zip(spans, pairwise(edges), strict=True):
        yield _bar(lane, (entry, start, stop), (x0, x1), middle)
    yield _end_mark(lane, edges[-1], middle)


def _zoom_bars(lane: Lane, middle: float, axis: Axis) -> Iterable[str]:
    """The bars of the states up to tracked, cut at the end of the panel."""
    zero, limit = lane.times[0], axis.seconds[-1]
    for entry, start, stop in lane.spans():
        if start - zero >= limit:
            yield _mark(_GOES_ON, axis.pixels[-1] + 2, middle, "more", "goes on")
            return
        x0 = axis.at(start - zero)
        if entry.state is S.TRACKED:
            x1 = min(x0 + 10, axis.pixels[-1])
            yield _bar(lane, (entry, start, stop), (x0, x1), middle)
            return
        x1 = axis.at(min(stop - zero, limit))
        yield _bar(lane, (entry, start, stop), (x0, max(x1, x0 + 1)), middle)
    if lane.until - zero < limit:
        yield _end_mark(lane, axis.at(lane.until - zero), middle)
    else:
        yield _mark(_GOES_ON, axis.pixels[-1] + 2, middle, "more", "goes on")


def _bar(
    lane: Lane, span: tuple[Entry, float, float], edges: tuple[float, float], middle: float
) -> str:
    entry, start, stop = span
    lines = [
        f"{entry.state.value} (step {lane.life.step}, attempt {lane.life.attempt})",
        f"from {start:+.3f} s ({entry.at}, epoch {entry.epoch})",
        f"for {format_duration(stop - start)}" + (" so far" if _goes_on(lane, entry) else ""),
    ]
    if entry.state is S.FAILED:
        lines.append(clip(f"{lane.life.reason}: {lane.life.detail}", 300))
    return _tag(
        "rect",
        _tag("title", text="\n".join(lines)),
        class_="bar",
        x=edges[0],
        y=middle - _BAR / 2,
        width=edges[1] - edges[0],
        height=_BAR,
        fill=_COLOURS[entry.state],
    )


def _goes_on(lane: Lane, entry: Entry) -> bool:
    return entry is lane.life.entered[-1] and not lane.life.left


def _end_mark(lane: Lane, x: float, middle: float) -> str:
    life = lane.life
    title = f"{describe_end(life)} at {lane.until:+.3f} s"
    if life.left:
        return _mark(_MARKS[S.QUARANTINED], x + 6, middle, "mark bad", title)
    if life.end is S.PRUNED:
        return _mark(_MARKS[life.end], x + 4, middle, "mark", title)
    if life.end in _MARKS:
        return _mark(_MARKS[life.end], x + 7, middle, "mark bad", title)
    return _mark(_GOES_ON, x + 1, middle, "more", title)
