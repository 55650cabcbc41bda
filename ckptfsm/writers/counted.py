"""A storage that counts the bytes of shards on their way to the disk.

All shards pass here, of whatever part, by images or by ``torch.save``. The count is per buffer: a lock
and an addition for each call of ``write`` or ``pwrite``. Files that other code writes by path are not
counted: those of a ``FileTree`` and of foreign requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

from ckptfsm.core.ports import Storage


class Count(Protocol):
    """A count of written bytes, see ``adapters.shared_count``."""

    def adder(self, number: int = 0) -> Callable[[int], object]:
        """A function that adds bytes, for the process ``number`` of a writer."""
        ...


class _Counted:
    """See ``counted``. Every other call goes straight to the storage."""

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
