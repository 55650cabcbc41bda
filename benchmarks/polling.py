"""The cost of asking: ``poll()`` of ckptfsm and ``maybe_finalize_async_calls`` of stock.

Measured: one call while nothing is in flight, one call while a save is in flight, and the slowest
call of a save. The slowest call holds the finalization for stock, and the hand-over of news for
ckptfsm. Calls are spaced out, as a trainer's are, so caches are as cold as they would be in
training.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import MappingProxyType

from benchmarks.measure import MS, US, Figure, Options, in_unit, timed
from benchmarks.sides import Side, both_sides
from benchmarks.state import TrainingState

_IDLE_CALLS = 500
_TARGETS_US: Mapping[str, float] = MappingProxyType({"idle": 5.0, "busy": 20.0})
_STATE_BYTES = 64 << 20  # at most: enough for some hundred calls while it is written


def run(options: Options) -> list[Figure]:
    """Idle and in-flight calls (us), the slowest call of a save (ms), for both sides."""
    state = TrainingState(min(options.state_bytes, _STATE_BYTES))
    figures: list[Figure] = []
    with both_sides(options.work) as sides:
        for side in sides:
            _poll_through(side, 1, state, options.poll_interval_s)  # warm, not counted
            idle = [_spaced(side, options.poll_interval_s)[0] for _ in range(_IDLE_CALLS)]
            saves = [
                _poll_through(side, step, state, options.poll_interval_s)
                for step in range(2, 2 + options.pairs)
            ]
            in_flight = [call for save in saves for call in save[:-1]] or [s[-1] for s in saves]
            targets = _TARGETS_US if side.name == "ckptfsm" else {}
            slowest = [max(save) for save in saves]
            figures += [
                in_unit(f"poll idle, {side.name}", "us", US, idle, targets.get("idle")),
                in_unit(f"poll in flight, {side.name}", "us", US, in_flight, targets.get("busy")),
                in_unit(f"slowest poll of a save, {side.name}", "ms", MS, slowest),
            ]
    return figures


def _poll_through(
    side: Side, step: int, state: TrainingState, poll_interval_s: float
) -> list[float]:
    """Seconds of every call from a save until it is loadable."""
    calls: list[float] = []
    done = False
    side.save(step, state.sharded(step))
    while not done:
        seconds, done = _spaced(side, poll_interval_s)
        calls.append(seconds)
    side.clear()
    return calls


def _spaced(side: Side, poll_interval_s: float) -> tuple[float, bool]:
    """Seconds of one call after a pause, and its answer."""
    said: list[bool] = []
    time.sleep(poll_interval_s)
    seconds = timed(lambda: said.append(side.poll()))
    return seconds, said[0]
