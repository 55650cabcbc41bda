"""The same state through stock and through ckptfsm, in alternating pairs with a sync in between.

Measured for each side:

- The time in ``save()``.
- The time from the beginning of ``save()`` until the checkpoint is loadable, polled at the same
  interval.
- How much longer than usual the first in-place update after ``save()`` takes. That update pays for
  the pages that the fork write-protected.

The order in a pair alternates (stock ours, ours stock, ...), because the side that goes first was
seen to take up to a fifth longer in ``save()``. So the number of pairs is even. Beside the ratio of
each pair stands the geometric mean of two neighbours, in which the order cancels out.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from benchmarks.measure import MS, Figure, Options, balanced, difference, in_unit, ratio, timed
from benchmarks.sides import Side, both_sides
from benchmarks.state import TrainingState

_SAVE_TARGET = 1.05
_LOADABLE_TARGET = 1.10
_USUAL_UPDATES = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """The times of a save, in seconds."""

    save_s: float
    loadable_s: float
    excess_s: float


def run(options: Options) -> list[Figure]:
    """``save()``, time until loadable, excess of the next update: both sides (ms) and ratios."""
    state = TrainingState(options.state_bytes)
    samples: dict[str, list[Sample]] = {"stock": [], "ckptfsm": []}
    with both_sides(options.work) as sides:
        for pair in range(options.warm_up_rounds + options.pairs + options.pairs % 2):
            for side in sides if pair % 2 == 0 else reversed(sides):
                sample = save_once(side, pair + 1, state, options.poll_interval_s)
                side.clear()
                if pair >= options.warm_up_rounds:
                    samples[side.name].append(sample)
    return _figures(samples["ckptfsm"], samples["stock"])


def save_once(side: Side, step: int, state: TrainingState, poll_interval_s: float) -> Sample:
    """Save once, from call to loadable, with an in-place update right behind the call."""
    usual_s = statistics.median(timed(state.update) for _ in range(_USUAL_UPDATES))
    sharded = state.sharded(step)
    began = time.perf_counter()
    side.save(step, sharded)
    save_s = time.perf_counter() - began
    update_s = timed(state.update)
    while not side.poll():
        time.sleep(poll_interval_s)
    return Sample(save_s, time.perf_counter() - began, update_s - usual_s)


def _figures(ours: list[Sample], stock: list[Sample]) -> list[Figure]:
    save, save_stock = [s.save_s for s in ours], [s.save_s for s in stock]
    loadable, loadable_stock = [s.loadable_s for s in ours], [s.loadable_s for s in stock]
    excess, excess_stock = [s.excess_s for s in ours], [s.excess_s for s in stock]
    figures = [
        in_unit("save(), stock", "ms", MS, save_stock),
        in_unit("save(), ckptfsm", "ms", MS, save),
        ratio("save(), ckptfsm / stock", save, save_stock, _SAVE_TARGET),
        balanced("save(), ratio in both orders", save, save_stock),
        in_unit("until loadable, stock", "ms", MS, loadable_stock),
        in_unit("until loadable, ckptfsm", "ms", MS, loadable),
        ratio("until loadable, ckptfsm / stock", loadable, loadable_stock, _LOADABLE_TARGET),
        balanced("until loadable, ratio in both orders", loadable, loadable_stock),
        in_unit("excess of the next update, stock", "ms", MS, excess_stock),
        in_unit("excess of the next update, ckptfsm", "ms", MS, excess),
        difference("excess, ckptfsm - stock", "ms", MS, excess, excess_stock),
    ]
    if min(excess_stock) > 0:  # a small state may be updated as fast as usual
        figures.append(ratio("excess, ckptfsm / stock", excess, excess_stock))
    return figures
