"""The engines of ckptfsm beside stock: visible stall, time until loadable, CPU time.

All sides save the same state in turns, in one run, with a sync in between. Each save is followed by a
forward and backward pass of ``WORK_S`` per GiB (or none), and by an update in place. The state is a
few large tensors, many mixed ones, or thousands of small ones. torch computes on one thread, as under
torchrun.

All figures are shown for ``DEFAULTS``: large tensors, with a pass of 0.5 s per GiB and without any.
The other workloads have the stall, its ratio to stock's, and the time until loadable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from benchmarks import limits
from benchmarks.comparison import (
    WITH_TARGETS,
    Workload,
    first_figures,
    full_figures,
    over,
    short_figures,
    time_in_states,
    times_of,
)
from benchmarks.measure import MS, Figure, Options, ratio
from benchmarks.one_save import save_in_turns, settled
from benchmarks.sides import ManagerSide, Side, StockSide
from benchmarks.state import SMALL_BYTES, Kind, TrainingState
from ckptfsm import CheckpointManager, LatestN
from ckptfsm.megatron.compat import cpu_devices, process_group

ENGINES = ("fork", "eager", "gated", "auto")
WORK_S = (0.0, 0.25, 0.5, 1.0)  # per GiB of state
KINDS: tuple[Kind, ...] = ("large", "mixed")
DEFAULTS = (Workload(0.0), Workload(0.5))
_TARGET_OF_RAW = 1 / 0.95  # at least 0.95 of the raw device's rate

_OF_LARGE, _EACH_S = 1.5, 15e-6  # of the stall of 16 tensors, and for each small one
_LEAST_MS = 1.0  # a stall within the noise

OpenSides = Callable[[Path], AbstractContextManager[list[Side]]]


def run(options: Options) -> list[Figure]:
    """Stall and time until loadable of each engine (ms), and ratios to stock's fast mode."""
    figures = limits.run(options)
    for kind in KINDS:
        figures += compare(options, _sides, [Workload(work_s, kind) for work_s in WORK_S])
    figures += compare(options, _sides, [Workload(0.0, "small")])
    raw = _of(figures, limits.RAW).median
    figures += [_small_over_large(figures, options), *_auto_over_eager(figures)]
    for name in WITH_TARGETS:
        title = f"until loadable, 0 s of work, {name}"
        until = _of(figures, title).samples
        figures.append(over(f"{title} / raw write", until, raw, _TARGET_OF_RAW))
    return figures


def _small_over_large(figures: Sequence[Figure], options: Options) -> Figure:
    """The stall of an eager save of small tensors, over the most that it may be."""
    small, large = Workload(0.0, "small"), Workload(0.0)
    allowed_s = _OF_LARGE * _of(figures, f"stall, {large.title}, eager").median / MS
    allowed_s += _EACH_S * options.state_bytes / SMALL_BYTES
    stalls = [stall / MS for stall in _of(figures, f"stall, {small.title}, eager").samples]
    return over(
        f"stall, {small.title}, eager / (1.5 x 16 tensors + 15 us each)", stalls, allowed_s, 1.0
    )


def _auto_over_eager(figures: Sequence[Figure]) -> list[Figure]:
    """The stall of ``auto`` with a gate, over that of ``eager``, pair by pair."""
    found = []
    for workload in DEFAULTS:
        auto, eager = (
            [
                max(stall, _LEAST_MS)
                for stall in _of(figures, f"stall, {workload.title}, {name}").samples
            ]
            for name in ("auto", "eager")
        )
        found.append(ratio(f"stall, {workload.title}, auto / eager", auto, eager, 1.0))
    return found


def _of(figures: Sequence[Figure], name: str) -> Figure:
    [found] = [figure for figure in figures if figure.name == name]
    return found


def compare(
    options: Options, open_sides: OpenSides, workloads: Sequence[Workload] = DEFAULTS
) -> list[Figure]:
    """The figures of all sides, of which the first is stock, with workloads of a single kind."""
    torch.set_num_threads(1)
    [kind] = {workload.kind for workload in workloads}
    state = TrainingState(options.state_bytes, kind)
    figures: list[Figure] = []
    for workload in workloads:
        work = options.work / f"{kind}-{workload.work_s:g}"
        work.mkdir()
        with open_sides(work) as sides:
            rounds = save_in_turns(sides, state, workload.work_s, options)
            if not workload.work_s:
                firsts = {name: each[0] for name, each in rounds.items()}
                figures += first_figures(workload, firsts)
            samples = settled(rounds, options)
            if workload not in DEFAULTS:
                times = {name: times_of(each) for name, each in samples.items()}
                figures += short_figures(workload, times)
                continue
            figures += full_figures(workload, samples)
            for side in sides:
                if isinstance(side, ManagerSide):
                    figures += time_in_states(workload, side, options.warm_up_rounds)
    return figures


@contextlib.contextmanager
def _sides(work: Path) -> Iterator[list[Side]]:
    """Stock, and a manager for each engine."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(cpu_devices())
        stack.enter_context(process_group())
        yield manager_sides(work, ENGINES, stack)


def manager_sides(work: Path, engines: Sequence[str], stack: contextlib.ExitStack) -> list[Side]:
    """Stock, and a manager for each engine until ``stack`` is closed; ``auto`` is promised a gate."""
    sides: list[Side] = [StockSide(work / "stock")]
    for engine in engines:
        root = work / engine
        manager = CheckpointManager(root, retention=LatestN(1), engine=engine)
        opened = stack.enter_context(manager)
        sides.append(ManagerSide(root, opened, engine, gate=engine == "auto"))
    return sides
