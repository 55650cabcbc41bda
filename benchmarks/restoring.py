"""The same checkpoint through stock's load and through ``restore``, in turns, with a cold page cache.

Both load the same files into the same tensors, in the same sharding. Stock verifies nothing; ours
compares the digest of every file. Before each sample the files are dropped from the page cache, so
both read from the disk, and the tensors are changed, so both have to fill them. Afterwards they are
compared with those that were saved.

Ratios are pair by pair. The order in a pair alternates.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from megatron.core import dist_checkpointing

from benchmarks.measure import MS, Figure, Options, balanced, in_unit, ratio, timed
from benchmarks.state import TrainingState
from ckptfsm import CheckpointManager
from ckptfsm.core.layout import MEGATRON
from ckptfsm.megatron.compat import cpu_devices, process_group

_TARGET = 0.8
_WARM_UP_PAIRS = 1
_STEP = 1


def run(options: Options) -> list[Figure]:
    """Time of a load with a cold page cache: both sides (ms), and ratios."""
    torch.set_num_threads(1)
    state = TrainingState(options.state_bytes)
    saved = [tensor.clone() for tensor in state.tensors]
    root = options.work / "root"
    samples: dict[str, list[float]] = {"stock": [], "ckptfsm": []}
    with cpu_devices(), process_group(), CheckpointManager(root) as manager:
        manager.save(_STEP, state.sharded(_STEP)).wait()
        directory = root / MEGATRON.published_name(_STEP)

        def stock() -> None:
            dist_checkpointing.load(
                state.sharded(0), str(directory), validate_access_integrity=False
            )

        def ours() -> None:
            manager.restore(state.sharded(0))

        sides = [("stock", stock), ("ckptfsm", ours)]
        for pair in range(_WARM_UP_PAIRS + options.pairs + options.pairs % 2):
            for name, load in sides if pair % 2 == 0 else reversed(sides):
                seconds = load_once(load, directory, state, saved)
                if pair >= _WARM_UP_PAIRS:
                    samples[name].append(seconds)
    return _figures(samples["ckptfsm"], samples["stock"])


def load_once(
    load: Callable[[], None], directory: Path, state: TrainingState, saved: list[torch.Tensor]
) -> float:
    """Seconds of a load from the disk into tensors with other values."""
    state.update()
    drop_cache(directory)
    seconds = timed(load)
    for found, wanted in zip(state.tensors, saved, strict=True):
        if not torch.equal(found, wanted):
            raise AssertionError("the loaded tensors are not those that were saved")
    return seconds


def drop_cache(directory: Path) -> None:
    """Drop the files below a directory from the page cache."""
    os.sync()  # pages that are not on the disk yet stay
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def _figures(ours: list[float], stock: list[float]) -> list[Figure]:
    fastest = [min(stock)] * len(ours)
    return [
        in_unit("cold load, stock, not verified", "ms", MS, stock),
        in_unit("cold load, ckptfsm, verified", "ms", MS, ours),
        ratio("cold load, ckptfsm / stock", ours, stock, _TARGET),
        balanced("cold load, ratio in both orders", ours, stock),
        ratio("cold load, ckptfsm / stock's fastest", ours, fastest),
    ]
