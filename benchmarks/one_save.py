"""A save with a pass and an update behind it: its stall, time until loadable, and CPU time.

The stall of a save is everything that it costs the trainer: the time in our calls, and how much
longer than usual the pass and the update take.
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import psutil
import torch
import torch.distributed as dist

from benchmarks.measure import Options, timed
from benchmarks.sides import Side
from benchmarks.state import TrainingState, await_stream

PLACES = ("save()", "the pass", "before_update()", "the update")
_USUAL = 3
_AT_ONCE = 5  # products that are timed together
_WIDTH = MappingProxyType({"cpu": 512, "cuda": 4096})  # of a matrix


@dataclass(frozen=True, slots=True)
class Sample:
    """A save, in seconds; ``cpu_s`` of the trainer and its writers.

    The stall has four places: ``save``, the pass, ``before_update`` and the update. Only the
    excess of the pass and of the update counts. An excess within the noise of the machine can be
    negative for one sample.
    """

    places_s: tuple[float, float, float, float]
    loadable_s: float
    cpu_s: float

    @property
    def stall_s(self) -> float:
        return max(0.0, sum(self.places_s))


class Pass:
    """A forward and backward pass that takes about ``seconds``: products of two matrices.

    It returns once they are made. On a device it does not wait for copies on other streams.
    """

    def __init__(self, seconds: float, device: str = "cpu") -> None:
        self._matrix = torch.rand(_WIDTH[device], _WIDTH[device], device=device)
        one = min(timed(partial(self._make, _AT_ONCE)) for _ in range(20)) / _AT_ONCE
        self._products = round(seconds / one)

    def __call__(self) -> None:
        self._make(self._products)

    def _make(self, products: int) -> None:
        for _ in range(products):
            torch.mm(self._matrix, self._matrix)
        await_stream(self._matrix)


def save_in_turns(
    sides: Sequence[Side], state: TrainingState, work_s: float, options: Options
) -> dict[str, list[Sample]]:
    """All samples of each side, see ``settled``. All ranks call it together; the order alternates.

    ``work_s`` is the time of the pass for each GiB of the state.
    """
    between = Pass(work_s * options.state_bytes / (1 << 30), state.tensors[0].device.type)
    end = time.monotonic() + options.within_s
    samples: dict[str, list[Sample]] = {side.name: [] for side in sides}
    for number in range(options.warm_up_rounds + options.pairs):
        if number > options.warm_up_rounds and time.monotonic() > end:
            break
        for side in sides if number % 2 == 0 else reversed(sides):
            sample = save_once(side, number + 1, state, between, options.poll_interval_s)
            _clear(side)
            samples[side.name].append(sample)
    return samples


def settled(samples: dict[str, list[Sample]], options: Options) -> dict[str, list[Sample]]:
    """The samples without those of the first rounds."""
    return {name: each[options.warm_up_rounds :] for name, each in samples.items()}


def save_once(
    side: Side, step: int, state: TrainingState, between: Pass, poll_interval_s: float
) -> Sample:
    """A save from call to loadable, with a pass and an update behind it. All ranks begin together."""
    usual_pass_s, usual_update_s = _usual(between), _usual(state.update)
    sharded = state.sharded(step)
    dist.barrier()
    cpu_s = _cpu_s()
    began = time.perf_counter()
    places_s = (
        timed(partial(side.save, step, sharded)),
        timed(between) - usual_pass_s,
        timed(side.before_update),
        timed(state.update) - usual_update_s,
    )
    while not side.poll():
        time.sleep(poll_interval_s)
    loadable = time.perf_counter()
    return Sample(places_s, loadable - began, _cpu_s() - cpu_s - usual_pass_s - usual_update_s)


def _clear(side: Side) -> None:
    """Delete once all ranks have ended their save, and wait for the rank that deletes."""
    dist.barrier()
    side.clear()
    dist.barrier()


def _usual(work: Callable[[], object]) -> float:
    """The median time of ``work`` without a save.

    An excess over it that is within the noise of the machine can be negative for one sample.
    """
    return statistics.median(timed(work) for _ in range(_USUAL))


def _cpu_s() -> float:
    """CPU time of this process and all below it, living or ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for child in psutil.Process(os.getpid()).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system
    return total
