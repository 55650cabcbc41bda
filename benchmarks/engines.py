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
    full_figures,
    over,
    short_figures,
    time_in_states,
    times_of,
)
from benchmarks.measure import Figure, Options
from benchmarks.one_save import save_in_turns
from benchmarks.sides import ManagerSide, Side, StockSide
from benchmarks.state import Kind, TrainingState
from ckptfsm import CheckpointManager, LatestN
from ckptfsm.megatron.compat import cpu_devices, process_group

ENGINES = ("fork", "eager", "gated")
WORK_S = (0.0, 0.25, 0.5, 1.0)  # per GiB of state
KINDS: tuple[Kind, ...] = ("large", "mixed")
DEFAULTS = (Workload(0.0), Workload(0.5))
_TARGET_OF_RAW = 1 / 0.9  # at least 0.9 of the raw device's rate

OpenSides = Callable[[Path], AbstractContextManager[list[Side]]]


def run(options: Options) -> list[Figure]:
    """Stall and time until loadable of each engine (ms), and ratios to stock's fast mode."""
    figures = limits.run(options)
    for kind in KINDS:
        figures += compare(options, _sides, [Workload(work_s, kind) for work_s in WORK_S])
    figures += compare(options, _sides, [Workload(0.0, "small")])
    [raw] = [figure.median for figure in figures if figure.name == limits.RAW]
    for name in WITH_TARGETS:
        title = f"until loadable, 0 s of work, {name}"
        [until] = [figure.samples for figure in figures if figure.name == title]
        figures.append(over(f"{title} / raw write", until, raw, _TARGET_OF_RAW))
    return figures


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
            samples = save_in_turns(sides, state, workload.work_s, options)
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
    """Stock, and a manager for each engine until ``stack`` is closed."""
    sides: list[Side] = [StockSide(work / "stock")]
    for engine in engines:
        root = work / engine
        manager = CheckpointManager(root, retention=LatestN(1), engine=engine)
        sides.append(ManagerSide(root, stack.enter_context(manager), engine))
    return sides
