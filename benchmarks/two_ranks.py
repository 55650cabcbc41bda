"""The engines of ckptfsm beside stock when both ranks of a job save at once on this machine.

Two processes save in turns, as in ``engines``, and begin each save together. Each rank has a state of
the given size. The stall of a save is the larger one of both ranks, and so is the time until loadable.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.comparison import Times, Workload, short_figures, times_of
from benchmarks.engines import manager_sides
from benchmarks.measure import Figure, Options
from benchmarks.one_save import save_in_turns, settled
from benchmarks.real_ranks import RANKS, report, run_ranks
from benchmarks.state import TrainingState
from ckptfsm.megatron.compat import cpu_devices

ENGINES = ("eager", "gated", "auto")
WORKLOADS = tuple(Workload(work_s, ranks=RANKS) for work_s in (0.0, 0.5))


def run(options: Options) -> list[Figure]:
    """Stall and time until loadable of each side (ms), and the ratio of stalls to stock's."""
    measured = run_ranks(__name__, options.work, options.state_bytes, options.pairs)
    pairs = zip(WORKLOADS, measured, strict=True)
    return [figure for workload, times in pairs for figure in short_figures(workload, times)]


def rank_main(options: Options) -> None:
    """A rank: save in turns. Rank 0 reports the times of both, for each workload."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    state = TrainingState(options.state_bytes, offsets=((0, rank, RANKS),))
    with cpu_devices():
        measured = [_times(options, workload, state) for workload in WORKLOADS]
    dist.destroy_process_group()
    if rank == 0:
        report(options.work, measured)


def _times(options: Options, workload: Workload, state: TrainingState) -> dict[str, Times]:
    """The times of each side, of both ranks together."""
    work = options.work / f"after-{workload.work_s:g}"
    work.mkdir(exist_ok=True)  # every rank makes it
    with contextlib.ExitStack() as stack:
        sides = manager_sides(work, ENGINES, stack)
        samples = settled(save_in_turns(sides, state, workload.work_s, options), options)
        times = {name: times_of(each) for name, each in samples.items()}
        of_all: list[dict[str, Times]] = [{} for _ in range(RANKS)]
        dist.all_gather_object(of_all, times)
    return {name: larger(*(each[name] for each in of_all)) for name in times}


def larger(*ranks: Times) -> Times:
    """The times of each save, with the larger one of all ranks for the stall and for loadable."""
    saves = zip(*ranks, strict=True)
    return [(max(s for s, _ in each), max(until for _, until in each)) for each in saves]


if __name__ == "__main__":  # stock spawns a manager process, which imports this module again
    work, size, pairs = sys.argv[1:]
    rank_main(Options(Path(work), int(size), int(pairs)))
