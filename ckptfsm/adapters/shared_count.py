"""A count of bytes that some processes add to and another one reads, in memory that all have.

Reading it takes no message and no system call. A cell has one process that adds to it, so no lock is
held across processes: one that is killed while it counts makes no other one wait.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol, cast

from ckptfsm.adapters.segments import SharedSegment
from ckptfsm.core.ports import Storage

CELLS = 128  # for a writer and its worker processes
COUNT_BYTES = CELLS * 8


class Count(Protocol):
    """A count of written bytes, see ``SharedCount``."""

    def adder(self, number: int = 0) -> Callable[[int], object]:
        """A function that adds bytes, for the process ``number`` of a writer."""
        ...


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


class _Counted:
    """A storage that counts the bytes of shards on their way to the disk, of whatever part.

    Files that other code writes by path are not counted: those of a ``FileTree`` and of requests.
    """

    def __init__(self, storage: Storage, count: Count, number: int) -> None:
        self.uncounted, self.count = storage, count
        self._add = count.adder(number)
        self._sizes: dict[int, int] = {}  # of files that were allocated: the rest is padding

    def __getattr__(self, name: str) -> Any:
        return getattr(self.uncounted, name)

    def write(self, handle: int, data: bytes | memoryview) -> int:
        taken = self.uncounted.write(handle, data)
        self._add(taken)
        return taken

    def pwrite(self, handle: int, data: bytes | memoryview, offset: int) -> int:
        taken = self.uncounted.pwrite(handle, data, offset)
        end = self._sizes.get(handle, offset + taken)
        self._add(max(0, min(taken, end - offset)))
        return taken

    def allocate(self, handle: int, size: int) -> bool:
        self._sizes[handle] = size
        return self.uncounted.allocate(handle, size)

    def close(self, handle: int) -> None:
        self._sizes.pop(handle, None)
        self.uncounted.close(handle)


def counted(storage: Storage, count: Count | None) -> Storage:
    """``storage``, with all bytes that it writes added to ``count``."""
    return storage if count is None else cast(Storage, _Counted(storage, count, 0))


def for_worker(storage: Storage, number: int) -> Storage:
    """The storage for worker process ``number`` (from 0) of a writer: each counts by itself."""
    if not isinstance(storage, _Counted):
        return storage
    return cast(Storage, _Counted(storage.uncounted, storage.count, number + 1))
