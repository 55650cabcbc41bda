"""The lives as a trace for Perfetto or ``chrome://tracing``: one thread per attempt, a slice per state.

Format: the JSON of Chrome's trace event format. Times are in microseconds since the first record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ckptfsm.views.reading import Life
from ckptfsm.views.timeline import Lane, clean, describe_end, place

_PROCESS = 1


def chrome_trace(lives: Sequence[Life]) -> dict[str, Any]:
    """The trace of these lives, ready for ``json.dumps``."""
    placed = place(lives)
    events: list[dict[str, Any]] = [_about("process_name", 0, name="checkpoints")]
    for thread, lane in enumerate(placed.lanes, start=1):
        name = clean(f"step {lane.life.step} ({lane.life.attempt})")
        events.append(_about("thread_name", thread, name=name))
        events.append(_about("thread_sort_index", thread, sort_index=thread))
        events += _slices(lane, thread)
    for run, opened, last in placed.runs:
        events.append(_slice(f"epoch {run.epoch}", opened, last, 0, {"closed": run.closed}))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"zero": placed.origin}}


def _about(kind: str, thread: int, **facts: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": thread, "args": facts}


def _slices(lane: Lane, thread: int) -> Iterator[dict[str, Any]]:
    life = lane.life
    for entry, start, stop in lane.spans():
        facts = {"step": life.step, "attempt": life.attempt, "epoch": entry.epoch, "at": entry.at}
        yield _slice(entry.state.value, start, stop, thread, facts)
    end = {
        "end": clean(describe_end(life)),
        "bytes": life.shard_bytes,
        "detail": clean(life.detail),
    }
    yield _slice(life.end.value, lane.until, lane.until, thread, end)


def _slice(
    name: str, start: float, stop: float, thread: int, facts: dict[str, Any]
) -> dict[str, Any]:
    at, lasted = round(start * 1e6), round((stop - start) * 1e6)
    return {
        "ph": "X",
        "name": name,
        "pid": _PROCESS,
        "tid": thread,
        "ts": at,
        "dur": lasted,
        "args": facts,
    }
