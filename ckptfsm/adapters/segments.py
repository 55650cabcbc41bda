"""Memory of this process that another one reads through a descriptor: memfd segments. No torch.

It needs no permission, which some containers refuse. A forked child sees later changes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from ckptfsm.adapters.memory import MemoryReader, give_back

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LIVING: weakref.WeakKeyDictionary[mmap.mmap, range] = weakref.WeakKeyDictionary()


class SharedSegment:
    """``size`` bytes of new memory, from ``address`` on, until it is closed and the last view is gone.

    Raises ``OSError`` if the kernel has no memfd, or refuses the size.
    """

    def __init__(self, size: int) -> None:
        fd = os.memfd_create("ckptfsm", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, fd)
        self._fd, self.size = fd, size
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # of that size for ever: no read of it can fail
        self._mapping: mmap.mmap | None = mmap.mmap(fd, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        _LIVING[self._mapping] = range(self.address, self.address + size)

    def fileno(self) -> int:
        """The descriptor. Raises ``OSError`` (EBADF) once the segment is closed."""
        self._mapped()
        return self._fd

    def view(self, start: int, size: int) -> memoryview:
        """Writable bytes of the segment. Raises ``OSError`` (EBADF) once it is closed."""
        return memoryview(self._mapped())[start : start + size]

    def holds(self, address: int, size: int) -> bool:
        """True if these bytes of the trainer lie in the segment."""
        return self.address <= address and address + size <= self.address + self.size

    def _mapped(self) -> mmap.mmap:
        if self._mapping is None:
            raise OSError(errno.EBADF, f"the segment at {self.address:#x} was closed")
        return self._mapping

    def give_back(self) -> None:
        """Close it, and give the pages back at once: all processes that have it find zeros.

        A forked child keeps a descriptor and a mapping, and with these the pages of a segment that is
        closed only.
        """
        if self._mapping is not None:
            give_back(self.address, self.size)
        self.close()

    def close(self) -> None:
        """Let go of the descriptor and the mapping. A second call has no effect."""
        self._mapping = None  # views keep the memory until they are gone
        self._close()


def is_in_segment(address: int) -> bool:
    """True if a segment of this process is mapped there, also a closed one that has a view."""
    return any(address in found for found in _LIVING.values())


class Span(NamedTuple):
    """Bytes at ``address`` of the trainer, and their place: a number of a source, and an offset."""

    address: int
    size: int
    number: int
    offset: int


def spans_to_send(spans: Iterable[Span]) -> array[int]:
    """Spans as an array of all their numbers, which is sent faster than thousands of objects."""
    return array("Q", chain.from_iterable(spans))


def sent_spans(numbers: array[int]) -> Iterator[Span]:
    """The spans of an array."""
    found = iter(numbers)
    return map(Span, found, found, found, found)


class SpanReader:
    """Reads spans with ``take(number, offset, into)``, and all other addresses with ``beyond``."""

    def __init__(
        self,
        spans: Iterable[Span],
        take: Callable[[int, int, memoryview], None],
        beyond: MemoryReader,
    ) -> None:
        self._spans = sorted(spans)
        self._starts = list(map(attrgetter("address"), self._spans))
        self._take, self._beyond = take, beyond

    def read(self, address: int, into: memoryview) -> None:
        """Fill ``into`` from ``address``. Raises ``OSError``: EFAULT if a span ends before that."""
        index = bisect_right(self._starts, address) - 1
        start, size, number, offset = self._spans[index] if index >= 0 else Span(0, 0, 0, 0)
        if address >= start + size:
            self._beyond.read(address, into)
        elif address + len(into) > start + size:
            raise OSError(errno.EFAULT, f"{len(into)} bytes at {address:#x} leave their segment")
        else:
            self._take(number, offset + address - start, into)


def read_segment(fds: Sequence[int], number: int, offset: int, into: memoryview) -> None:
    """Fill ``into`` from another process's segment, one of the descriptors that it sent.

    Raises ``OSError``: EFAULT if the segment ends before that.
    """
    done = 0
    while done < len(into):
        taken = os.preadv(fds[number], [into[done:]], offset + done)
        if taken == 0:
            raise OSError(errno.EFAULT, f"segment {number} ends before {offset + len(into)}")
        done += taken
