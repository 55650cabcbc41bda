"""From durable shards to the tracker, while both ranks of a job compute and call nothing.

Two processes save together, then compute for a while without a call of the manager. Measured on
disk: from the last receipt, which follows the shards, to the tracker.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor

from benchmarks.measure import MS, Figure, Options, in_unit
from benchmarks.real_ranks import RANKS, report, run_ranks
from ckptfsm import CheckpointManager, LatestN
from ckptfsm.core.layout import MEGATRON, TRACKER, receipt_name
from ckptfsm.megatron.compat import cpu_devices

_TARGET_MS = 50.0
_STATE_BYTES = 256 << 20  # at most, of both ranks: it must be written while they compute
_FLOAT_BYTES = 4


def run(options: Options) -> list[Figure]:
    """The delay of each save (ms)."""
    size = min(options.state_bytes, _STATE_BYTES) // RANKS
    saves = max(2, options.pairs // 3)
    samples = run_ranks(__name__, options.work, size, saves, options.busy_s)
    name = f"shards durable to tracked, {RANKS} ranks, busy for {options.busy_s:g} s"
    return [in_unit(name, "ms", MS, samples, _TARGET_MS)]


def rank_main(work: Path, size: int, saves: int, busy_s: float) -> None:
    """A rank: save and compute. Rank 0 reports the delays in seconds."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    root, rank, delays = work / "root", dist.get_rank(), []
    tensor = torch.rand(size // _FLOAT_BYTES)
    state = {"w": ShardedTensor.from_rank_offsets("w", tensor, (0, rank, RANKS))}
    with cpu_devices(), CheckpointManager(root, retention=LatestN(2)) as manager:
        for step in range(1, saves + 2):  # the first is a warm-up
            manager.save(step, state)
            _compute(busy_s)
            if step > 1:
                delays.append(_delay(root, step, busy_s))
            manager.wait_until_finished()
    dist.destroy_process_group()
    if rank == 0:
        report(work, delays)


def _compute(seconds: float) -> None:
    matrix, end = torch.rand(256, 256), time.monotonic() + seconds
    while time.monotonic() < end:
        torch.mm(matrix, matrix)


def _delay(root: Path, step: int, otherwise: float) -> float:
    """Seconds from the last receipt of a step to its tracker; ``otherwise`` if it is not tracked."""
    directory = root / MEGATRON.published_name(step)
    tracker = root / TRACKER
    if not directory.exists() or int(tracker.read_text()) != step:
        return otherwise
    receipts = [directory / receipt_name("state", rank) for rank in range(RANKS)]
    last = max(receipt.stat().st_mtime_ns for receipt in receipts)
    return (tracker.stat().st_mtime_ns - last) / 1e9


if __name__ == "__main__":
    rank_main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
