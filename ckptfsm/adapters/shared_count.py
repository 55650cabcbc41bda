"""A count of bytes that some processes add to and another one reads, in memory that all have. No torch.

Reading it takes no message and no system call, so a trainer may look as often as it likes.

Rule: a cell has one process that adds to it. No lock is held across processes: a process that is
killed while it counts makes no other one wait.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable

from ckptfsm.adapters.segments import SharedSegment

CELLS = 128  # for a writer and its worker processes
COUNT_BYTES = CELLS * 8


class SharedCount:
    """The sum of ``CELLS`` cells in ``memory``, of ``COUNT_BYTES`` bytes, zeros at first."""

    def __init__(self, memory: memoryview, mapping: mmap.mmap | None = None) -> None:
        """``mapping`` is closed with this count."""
        self._memory, self._mapping = memory, mapping
        self._cells = memory.cast("Q")

    @classmethod
    def for_children(cls) -> SharedCount:
        """A new count, shared with the children that are forked from now on."""
        mapping = mmap.mmap(-1, COUNT_BYTES)
        return cls(memoryview(mapping), mapping)

    @classmethod
    def of_segment(cls, segment: SharedSegment) -> SharedCount:
        """The count in a segment, which may be closed: the memory stays."""
        return cls(segment.view(0, COUNT_BYTES))

    @classmethod
    def of_descriptor(cls, fd: int) -> SharedCount:
        """The count in another process's segment, by its descriptor, which is closed."""
        try:
            mapping = mmap.mmap(fd, COUNT_BYTES)
        finally:
            os.close(fd)
        return cls(memoryview(mapping), mapping)

    @property
    def value(self) -> int:
        """The count so far, from any process."""
        return sum(self._cells)

    def reset(self) -> None:
        """Begin at 0 again. No process may add meanwhile."""
        for number in range(CELLS):
            self._cells[number] = 0

    def close(self) -> None:
        """Let go of the memory and of its descriptor. Nothing may be added or read afterwards."""
        self._cells.release()
        self._memory.release()
        if self._mapping is not None:
            self._mapping.close()

    def adder(self, number: int = 0) -> Callable[[int], None]:
        """A function that adds to cell ``number``, from any thread of the process that has the cell.

        All processes above the last cell share that one, whose count may then fall short.
        """
        cells, cell, lock = self._cells, min(number, CELLS - 1), threading.Lock()

        def add(count: int) -> None:
            with lock:
                cells[cell] += count

        return add
