"""The same checkpoint through stock's load and through ``restore``, in turns, with a cold page cache.

Both load the same files into the same tensors, in the same sharding. Stock verifies nothing; ours
compares the digest of every file. Before each sample the files are dropped from the page cache, so
both read from the disk, and the tensors are changed, so both have to fill them. Afterwards they are
compared with those that were saved.

The same is done with another sharding: each tensor is loaded in two halves. Beside it, the files are
read with as many reads in flight, and nothing is done with them.

Ratios are pair by pair. The order in a pair alternates.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

from benchmarks.measure import MS, Figure, Options, balanced, in_unit, ratio, timed
from benchmarks.state import TrainingState
from ckptfsm import CheckpointManager
from ckptfsm.adapters.memory import large_pages
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.layout import MEGATRON
from ckptfsm.disk.pieces import PIECE_BYTES, STREAMS
from ckptfsm.megatron.compat import cpu_devices, process_group

_TARGET, _RESHARDED_TARGET = 0.8, 1.0
_TARGET_OF_RAW = 1 / 0.9  # at least 0.9 of the rate of reads alone
_WARM_UP_PAIRS = 1
_STEP = 1


class Halves:
    """The tensors of a state, each in two halves."""

    def __init__(self, state: TrainingState) -> None:
        pairs = [tensor.clone().chunk(2) for tensor in state.tensors]
        self.tensors = [half.clone() for pair in pairs for half in pair]

    def sharded(self, step: int) -> dict[str, Any]:
        named = {
            f"{number}": ShardedTensor.from_rank_offsets(
                f"layer.{number // 2}.weight", half, (0, number % 2, 2)
            )
            for number, half in enumerate(self.tensors)
        }
        return {**named, "step": step, "args": {"lr": 1e-3, "seed": 1234}}

    def update(self) -> None:
        for tensor in self.tensors:
            tensor.add_(1)


def run(options: Options) -> list[Figure]:
    """Time of a load with a cold page cache: both sides (ms), and ratios."""
    torch.set_num_threads(1)
    state = TrainingState(options.state_bytes)
    root = options.work / "root"
    with cpu_devices(), process_group(), CheckpointManager(root) as manager:
        manager.save(_STEP, state.sharded(_STEP)).wait()
        directory = root / MEGATRON.published_name(_STEP)
        same = _in_turns(options, manager, directory, state)
        halves = _in_turns(options, manager, directory, Halves(state))
    return _figures(same) + _resharded_figures(halves)


def _in_turns(
    options: Options, manager: CheckpointManager, directory: Path, state: TrainingState | Halves
) -> dict[str, list[float]]:
    """Seconds of each side, and of reads alone."""
    saved = [tensor.clone() for tensor in state.tensors]

    def stock() -> None:
        dist_checkpointing.load(state.sharded(0), str(directory), validate_access_integrity=False)

    def ours() -> None:
        manager.restore(state.sharded(0))

    samples: dict[str, list[float]] = {"stock": [], "ckptfsm": [], "reads": []}
    sides = [("stock", stock), ("ckptfsm", ours)]
    for pair in range(_WARM_UP_PAIRS + options.pairs + options.pairs % 2):
        for name, load in sides if pair % 2 == 0 else reversed(sides):
            samples[name].append(load_once(load, directory, state, saved))
        samples["reads"].append(read_once(directory))
    return {name: each[_WARM_UP_PAIRS:] for name, each in samples.items()}


def load_once(
    load: Callable[[], None],
    directory: Path,
    state: TrainingState | Halves,
    saved: list[torch.Tensor],
) -> float:
    """Seconds of a load from the disk into tensors with other values."""
    state.update()
    drop_cache(directory)
    seconds = timed(load)
    for found, wanted in zip(state.tensors, saved, strict=True):
        if not torch.equal(found, wanted):
            raise AssertionError("the loaded tensors are not those that were saved")
    return seconds


def read_once(directory: Path) -> float:
    """Seconds of reads of all shards past the page cache, as many in flight as a restore has."""
    storage = PosixStorage(directory, create=False)
    places: deque[tuple[int, int]] = deque()
    for path in sorted(directory.glob("*.distcp")):
        handle = storage.open_reading(path.name, direct=True)
        places += [(handle, at) for at in range(0, path.stat().st_size, PIECE_BYTES)]

    def read(_: int) -> None:
        buffer = memoryview(large_pages(PIECE_BYTES))
        with contextlib.suppress(IndexError):
            while True:
                handle, at = places.popleft()
                storage.pread(handle, buffer, at)

    handles = {handle for handle, _ in places}
    with ThreadPoolExecutor(STREAMS) as threads:
        seconds = timed(lambda: list(threads.map(read, range(STREAMS))))
    for handle in handles:
        storage.close(handle)
    storage.close_root()
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


def _figures(seconds: dict[str, list[float]]) -> list[Figure]:
    ours, stock, reads = seconds["ckptfsm"], seconds["stock"], seconds["reads"]
    fastest = [min(stock)] * len(ours)
    return [
        in_unit("cold load, stock, not verified", "ms", MS, stock),
        in_unit("cold load, ckptfsm, verified", "ms", MS, ours),
        ratio("cold load, ckptfsm / stock", ours, stock, _TARGET),
        balanced("cold load, ratio in both orders", ours, stock),
        ratio("cold load, ckptfsm / stock's fastest", ours, fastest),
        in_unit("cold reads alone", "ms", MS, reads),
        ratio("cold load, ckptfsm / reads alone", ours, reads, _TARGET_OF_RAW),
    ]


def _resharded_figures(seconds: dict[str, list[float]]) -> list[Figure]:
    ours, stock = seconds["ckptfsm"], seconds["stock"]
    return [
        in_unit("cold load, another sharding, stock, not verified", "ms", MS, stock),
        in_unit("cold load, another sharding, ckptfsm, verified", "ms", MS, ours),
        ratio("cold load, another sharding, ckptfsm / stock", ours, stock, _RESHARDED_TARGET),
    ]
