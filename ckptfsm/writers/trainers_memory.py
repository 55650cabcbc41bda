"""The memory that a job's images name, and copies of it. No torch."""

from __future__ import annotations

import ctypes
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ckptfsm.adapters.host import processors, ranks_of_this_host
from ckptfsm.adapters.memory import OwnMemory, take_now
from ckptfsm.adapters.segments import SharedSegment, Span, SpanReader
from ckptfsm.adapters.shared_work import SharedWork
from ckptfsm.core.images import Memory

_PIECE_BYTES = 16 << 20  # of a copy by one of the threads
_FEW_THREADS, _MANY_THREADS = 2, 8
_ALIGNMENT = 64  # of a copy: a line of the processor's cache


class Range(NamedTuple):
    """``size`` bytes of this process at ``address``."""

    address: int
    size: int


def ranges_of(memory: Iterable[Memory], *, mutable_only: bool = False) -> list[Range]:
    """These pieces of memory, each byte once, in the order of addresses.

    ``mutable_only``: without memory that the trainer cannot change.
    """
    found: list[Range] = []
    for address, size in sorted(
        (m.address, m.size) for m in memory if m.mutable or not mutable_only
    ):
        start, end = address, address + size
        if found and start < found[-1].address + found[-1].size:  # tensors that share memory
            start, before = found.pop()
            end = max(end, start + before)
        found.append(Range(start, end - start))
    return found


def early_of(memory: Iterable[Memory], ranges: Sequence[Range]) -> list[Range]:
    """Those of the ``ranges``, sorted, with memory that may change before a gate."""
    starts = [each.address for each in ranges]
    early = (piece for piece in memory if piece.early)
    return sorted({ranges[bisect_right(starts, piece.address) - 1] for piece in early})


class Arena:
    """A segment for one copy of a job's memory. Raises ``OSError`` if it cannot be had.

    Nothing is copied into it, and nothing given back, while a process may read an earlier copy. Only
    the process that made it does so: a forked child shares the memory.
    """

    def __init__(self, size: int) -> None:
        self.segment = SharedSegment(size)
        self._owner = os.getpid()
        self._present = 0  # the bytes with pages

    @property
    def size(self) -> int:
        return self.segment.size

    @property
    def is_inherited(self) -> bool:
        """True if this process was forked, and its parent uses the arena."""
        return os.getpid() != self._owner

    def close(self) -> None:
        """Give the memory back, also if a forked child still has it."""
        if self.is_inherited:
            self.segment.close()
        else:
            self.segment.give_back()

    def take(self, ranges: Sequence[Range]) -> list[Span]:
        """Copy the ranges, and return where each of them is now.

        Raises ``ValueError`` if they do not fit, see ``arena_bytes``, and ``OSError`` if the kernel has
        no pages for them.
        """
        if arena_bytes(ranges) > self.size:
            raise ValueError(f"{arena_bytes(ranges)} bytes do not fit into {self.size}")
        spans, offset = [], 0
        for address, size in ranges:
            spans.append(Span(address, size, 0, offset))
            offset += _aligned(size)
        # With the caller: its rank has this share of the processors.
        threads = max(_FEW_THREADS, min(processors() // ranks_of_this_host(), _MANY_THREADS))
        SharedWork(self._copy, list(_pieces(spans))).run(threads - 1)
        self._present = max(self._present, offset)
        return spans

    def _copy(self, piece: Span) -> None:
        address, size, _, offset = piece
        target = self.segment.address + offset
        if offset + size > self._present:
            take_now(target, size)
        ctypes.memmove(target, address, size)  # without the GIL


def arena_bytes(ranges: Iterable[Range]) -> int:
    """The size of an arena for these ranges."""
    return sum(_aligned(size) for _, size in ranges)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _pieces(spans: Iterable[Span]) -> Iterator[Span]:
    for span in spans:
        if span.size <= _PIECE_BYTES:
            yield span
            continue
        address, size, number, offset = span
        for start in range(0, size, _PIECE_BYTES):
            yield Span(address + start, min(_PIECE_BYTES, size - start), number, offset + start)


def frozen(ranges: Sequence[Range]) -> SpanReader:
    """A reader of this process's memory, with copies of ``ranges`` as they are now."""
    copies = [ctypes.string_at(address, size) for address, size in ranges]

    def take(number: int, offset: int, into: memoryview) -> None:
        into[:] = memoryview(copies[number])[offset : offset + len(into)]

    spans = [Span(address, size, number, 0) for number, (address, size) in enumerate(ranges)]
    return SpanReader(spans, take, OwnMemory())
