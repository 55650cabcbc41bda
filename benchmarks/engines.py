"""The engines of ckptfsm beside stock: visible stall, time until loadable, CPU time.

All sides save the same state in turns, in one run, with a sync in between. Each save is followed by a
forward and backward pass of ``WORK_S`` per GiB (or none), and by an update in place. The stall of a
save is everything that it costs the trainer: the time in our calls, and how much longer than usual the
pass and the update take. Ratios are to stock's fast mode: forks are slow in two ways on such machines,
so each sample is divided by the fastest of stock's saves. torch computes on one thread, as under
torchrun.
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch

from benchmarks import limits
from benchmarks.measure import MS, Figure, Options, in_unit, timed
from benchmarks.sides import ManagerSide, Side, StockSide, TrainingState
from ckptfsm import CheckpointManager, LatestN
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.lifecycle import State
from ckptfsm.megatron.compat import cpu_devices, process_group
from ckptfsm.views.reading import read_lives
from ckptfsm.views.timeline import place

ENGINES = ("fork", "eager", "gated")
WORK_S = (0.0, 0.5)  # per GiB of state
_STALL_TARGETS = {("eager", 0.0): 0.15, ("gated", 0.5): 0.03}
_LOADABLE_TARGET = 0.5
_WITH_TARGETS = ("eager", "gated")
_STATES = (State.REQUESTED, State.FORKED, State.SHARDS_WRITTEN, State.FINALIZED)
_PLACES = ("save()", "the pass", "before_update()", "the update")
_CPU_TARGET = 0.5
_RAW_TARGET = 1 / 0.9  # at least 0.9 of the raw device's rate
_WARM_UP_ROUNDS = 2
_USUAL = 3
_LEAST_S = 1e-6  # a small state may be saved for nothing


@dataclass(frozen=True, slots=True)
class Sample:
    """A save, in seconds; ``cpu_s`` of the trainer and its writers.

    The stall has four places: ``save``, the pass, ``before_update`` and the update. Only the
    excess of the pass and of the update counts.
    """

    places_s: tuple[float, float, float, float]
    loadable_s: float
    cpu_s: float

    @property
    def stall_s(self) -> float:
        return max(0.0, sum(self.places_s))


class Pass:
    """A forward and backward pass that takes about ``seconds``: products of two matrices."""

    def __init__(self, seconds: float) -> None:
        self._matrix = torch.rand(512, 512)
        one = min(timed(self._product) for _ in range(20))
        self._products = round(seconds / one)

    def __call__(self) -> None:
        for _ in range(self._products):
            self._product()

    def _product(self) -> None:
        torch.mm(self._matrix, self._matrix)


OpenSides = Callable[[Path], AbstractContextManager[list[Side]]]


def run(options: Options) -> list[Figure]:
    """Stall and time until loadable of each engine (ms), and ratios to stock's fast mode."""
    figures = [*limits.run(options), *compare(options, _sides)]
    [raw] = [figure.median for figure in figures if figure.name == limits.RAW]
    for name in _WITH_TARGETS:
        title = f"until loadable, 0 s of work, {name}"
        [until] = [figure.samples for figure in figures if figure.name == title]
        figures.append(_over(f"{title} / raw write", until, raw, _RAW_TARGET))
    return figures


def compare(options: Options, open_sides: OpenSides) -> list[Figure]:
    """The figures of all sides, of which the first is stock, with and without work behind a save."""
    torch.set_num_threads(1)
    state = TrainingState(options.state_bytes)
    figures: list[Figure] = []
    for work_s in WORK_S:
        work = options.work / f"after-{work_s}"
        work.mkdir()
        between = Pass(work_s * options.state_bytes / (1 << 30))
        samples: dict[str, list[Sample]] = {}
        with open_sides(work) as sides:
            rounds = _WARM_UP_ROUNDS + options.pairs
            for number in range(rounds):
                for side in sides if number % 2 == 0 else reversed(sides):
                    sample = save_once(side, number + 1, state, between, options.poll_interval_s)
                    side.clear()
                    if number >= _WARM_UP_ROUNDS:
                        samples.setdefault(side.name, []).append(sample)
            figures += _figures(samples, work_s)
            for side in sides:
                if isinstance(side, ManagerSide):
                    figures += _states(side, work_s)
    return figures


@contextlib.contextmanager
def _sides(work: Path) -> Iterator[list[Side]]:
    """Stock, and a manager for each engine."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(cpu_devices())
        stack.enter_context(process_group())
        sides: list[Side] = [StockSide(work / "stock")]
        for engine in ENGINES:
            root = work / engine
            manager = CheckpointManager(root, retention=LatestN(1), engine=engine)
            sides.append(ManagerSide(root, stack.enter_context(manager), engine))
        yield sides


def save_once(
    side: Side, step: int, state: TrainingState, between: Pass, poll_interval_s: float
) -> Sample:
    """A save from call to loadable, with a pass and an update behind it."""
    usual_pass_s, usual_update_s = _usual(between), _usual(state.update)
    sharded = state.sharded(step)
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


def _usual(work: Callable[[], object]) -> float:
    return min(timed(work) for _ in range(_USUAL))


def _cpu_s() -> float:
    """CPU time of this process and all below it, living or ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for child in psutil.Process(os.getpid()).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            total += times.user + times.system
    return total


def _figures(samples: dict[str, list[Sample]], work_s: float) -> list[Figure]:
    stock = samples["stock"]
    fastest_stall_s = min(s.stall_s for s in stock)
    fastest_s, least_cpu_s = min(s.loadable_s for s in stock), min(s.cpu_s for s in stock)
    after = f"{work_s:g} s of work"
    figures = []
    for name, each in samples.items():
        stalls, loadable = [s.stall_s for s in each], [s.loadable_s for s in each]
        figures.append(in_unit(f"stall, {after}, {name}", "ms", MS, stalls))
        for where, spent in zip(
            _PLACES, zip(*(s.places_s for s in each), strict=True), strict=True
        ):
            figures.append(
                in_unit(f"share of the stall, {after}, {name}: {where}", "ms", MS, spent)
            )
        if name == "stock":
            figures.append(in_unit(f"until loadable, {after}, {name}", "ms", MS, loadable))
            continue
        target = _STALL_TARGETS.get((name, work_s))
        figures.append(_over(f"stall, {after}, {name} / stock", stalls, fastest_stall_s, target))
        figures.append(in_unit(f"until loadable, {after}, {name}", "ms", MS, loadable))
        ours = name in _WITH_TARGETS
        wanted = _LOADABLE_TARGET if ours else None
        title = f"until loadable, {after}, {name} / stock"
        figures.append(_over(title, loadable, fastest_s, wanted))
        title, used = f"CPU time, {after}, {name} / stock", [s.cpu_s for s in each]
        wanted = _CPU_TARGET if ours else None
        figures.append(_over(title, used, least_cpu_s, wanted))
    return figures


def _states(side: ManagerSide, work_s: float) -> list[Figure]:
    """The time in each state from ``save`` to tracked, as the journal tells it."""
    storage = PosixStorage(side.root, create=False)
    lasted: dict[State, list[float]] = {state: [] for state in _STATES}
    try:
        for lane in place(read_lives(storage)).lanes[_WARM_UP_ROUNDS:]:
            for entry, start, stop in lane.spans():
                if entry.state in lasted:
                    lasted[entry.state].append(stop - start)
    finally:
        storage.close_root()
    after = f"{work_s:g} s of work, {side.name}"
    return [in_unit(f"in {s.value}, {after}", "ms", MS, each) for s, each in lasted.items()]


def _over(name: str, samples: Sequence[float], one: float, target: float | None) -> Figure:
    return Figure(name, "ratio", tuple(sample / max(one, _LEAST_S) for sample in samples), target)
