"""A count of bytes that a writer adds to and its trainer reads, in memory that both have.

No lock is held across processes: a writer that is killed while it counts makes nobody wait.
"""

from __future__ import annotations

import mmap
import os
import threading
from typing import Any, Protocol, cast

from ckptfsm.core.ports import Storage

COUNT_BYTES = 8


class Count(Protocol):
    """A count of written bytes, see ``SharedCount``."""

    def add(self, count: int) -> None: ...


class SharedCount:
    """A count in ``memory``, of ``COUNT_BYTES`` bytes, 0 at first. One process adds, on any thread."""

    def __init__(self, memory: memoryview | mmap.mmap) -> None:
        self._cell = memoryview(memory).cast("Q")
        self._lock = threading.Lock()

    @classmethod
    def for_children(cls) -> SharedCount:
        """A new count, shared with the children that are forked from now on."""
        return cls(mmap.mmap(-1, COUNT_BYTES))

    @classmethod
    def of_descriptor(cls, fd: int) -> SharedCount:
        """The count in another process's segment, by its descriptor, which is closed."""
        try:
            return cls(mmap.mmap(fd, COUNT_BYTES))
        finally:
            os.close(fd)

    @property
    def value(self) -> int:
        """The count so far, from any process."""
        return self._cell[0]

    def reset(self) -> None:
        """Begin at 0 again. No process may add meanwhile."""
        self._cell[0] = 0

    def close(self) -> None:
        """Let go of the memory. Nothing may be added or read afterwards."""
        self._cell.release()

    def add(self, count: int) -> None:
        with self._lock:
            self._cell[0] += count


class _Counted:
    """A storage that counts the bytes of shards on their way to the disk, of whatever part.

    Files that other code writes by path are not counted: those of a ``FileTree`` and of requests.
    """

    def __init__(self, storage: Storage, count: Count) -> None:
        self._storage, self._add = storage, count.add
        self._sizes: dict[int, int] = {}  # of files that were allocated: the rest is padding

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def write(self, handle: int, data: bytes | memoryview) -> int:
        taken = self._storage.write(handle, data)
        self._add(taken)
        return taken

    def pwrite(self, handle: int, data: bytes | memoryview, offset: int) -> int:
        taken = self._storage.pwrite(handle, data, offset)
        end = self._sizes.get(handle, offset + taken)
        self._add(max(0, min(taken, end - offset)))
        return taken

    def allocate(self, handle: int, size: int) -> bool:
        self._sizes[handle] = size
        return self._storage.allocate(handle, size)

    def close(self, handle: int) -> None:
        self._sizes.pop(handle, None)
        self._storage.close(handle)


def counted(storage: Storage, count: Count | None) -> Storage:
    """``storage``, with all bytes that it writes added to ``count``."""
    return storage if count is None else cast(Storage, _Counted(storage, count))
