"""The limits of the machine: raw writes past the page cache, and copies of memory."""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from benchmarks.measure import MS, Figure, Options, in_unit, timed
from ckptfsm.adapters.posix_storage import PosixStorage

RAW = "raw write, 2 files"
_CHUNK_BYTES = 4 << 20
_FILES = 2
_FLOAT_BYTES = 4
_THREADS = {1: "1 thread", 2: "2 threads"}


def run(options: Options) -> list[Figure]:
    """A preallocated direct write of the state, fsynced, and copies of it in memory (ms)."""
    raw = [_raw(options.work / "raw", options.state_bytes) for _ in range(options.pairs)]
    return [in_unit(RAW, "ms", MS, raw), *_copies(options)]


def _copies(options: Options) -> list[Figure]:
    """A copy of the state by each number of torch's threads (ms)."""
    source = torch.rand(max(1, options.state_bytes // _FLOAT_BYTES))
    target = torch.empty_like(source)
    before = torch.get_num_threads()
    figures = []
    for threads, name in _THREADS.items():
        torch.set_num_threads(threads)
        target.copy_(source)
        copied = [timed(partial(target.copy_, source)) for _ in range(options.pairs)]
        figures.append(in_unit(f"copy of memory, {name}", "ms", MS, copied))
    torch.set_num_threads(before)
    return figures


def _raw(place: Path, size: int) -> float:
    """Seconds to write and fsync ``size`` bytes to two files at once."""
    place.mkdir(exist_ok=True)
    storage = PosixStorage(place)
    share = max(_CHUNK_BYTES, size // _FILES // _CHUNK_BYTES * _CHUNK_BYTES)
    buffers = []
    for _ in range(_FILES):
        buffer = mmap.mmap(-1, _CHUNK_BYTES)
        buffer.write(b"x" * _CHUNK_BYTES)
        buffers.append(memoryview(buffer))
    write = partial(_write, storage, share)
    with ThreadPoolExecutor(_FILES) as threads:
        seconds = timed(lambda: list(threads.map(write, range(_FILES), buffers)))
    for number in range(_FILES):
        (place / str(number)).unlink()
    storage.close_root()
    return seconds


def _write(storage: PosixStorage, size: int, number: int, buffer: memoryview) -> None:
    handle = storage.open_exclusive(str(number), direct=True)
    storage.allocate(handle, size)
    for offset in range(0, size, _CHUNK_BYTES):
        storage.pwrite(handle, buffer, offset)
    storage.fsync(handle)
    storage.close(handle)
