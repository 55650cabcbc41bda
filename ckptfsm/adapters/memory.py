"""Memory by address, of another process of this user or of this one. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from typing import Protocol

_LIBC = ctypes.CDLL(None, use_errno=True)
NO_SUCH_CALL = frozenset({errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EACCES})
"""Errors of a call that an older kernel does not have, or that a seccomp profile refuses."""


class IoVec(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_READV = _LIBC.process_vm_readv
_READV.restype = ctypes.c_ssize_t
_READV.argtypes = (
    ctypes.c_int,
    ctypes.POINTER(IoVec),
    ctypes.c_ulong,
    ctypes.POINTER(IoVec),
    ctypes.c_ulong,
    ctypes.c_ulong,
)


class MemoryReader(Protocol):
    """Reads memory by address, without changing it."""

    def read(self, address: int, into: memoryview) -> None:
        """Fill ``into`` whole from ``address``. Raises ``OSError`` if that is not readable."""
        ...


class MemoryOf:
    """The memory of another process of this user, read with ``process_vm_readv``."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def read(self, address: int, into: memoryview) -> None:
        target = ctypes.addressof(ctypes.c_char.from_buffer(into))
        done, size = 0, len(into)
        while done < size:
            local = IoVec(target + done, size - done)
            remote = IoVec(address + done, size - done)
            taken = _READV(self._pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
            if taken <= 0:
                number = ctypes.get_errno()
                raise OSError(number, f"process_vm_readv of {self._pid}: {os.strerror(number)}")
            done += taken


class OwnMemory:
    """The memory of this process. An address that is not mapped kills the process."""

    def read(self, address: int, into: memoryview) -> None:
        ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(into)), address, len(into))


_MMAP, _MUNMAP, _MADVISE = _LIBC.mmap, _LIBC.munmap, _LIBC.madvise
_MMAP.restype = ctypes.c_void_p
_MMAP.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong)
_MUNMAP.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MADVISE.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
MADV_POPULATE_WRITE = 23  # from Linux 5.14 on
_MADV_REMOVE = 9
_MAP_FAILED = ctypes.c_void_p(-1).value


def take_pages(size: int) -> ctypes.Array[ctypes.c_char]:
    """Fresh memory that no forked child gets, until the last reference goes. Raises ``OSError``."""
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    found = _MMAP(None, size, protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if found == _MAP_FAILED:
        raise _error_of(f"mmap of {size} bytes")
    pages = (ctypes.c_char * size).from_address(found)
    weakref.finalize(pages, _unmap, found, size, os.getpid()).atexit = False
    _advise(pages, mmap.MADV_DONTFORK)
    return pages


def large_pages(size: int) -> mmap.mmap:
    """Fresh memory, in pages of 2 MiB where the kernel has them: a disk is asked in fewer requests."""
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # such as a container that forbids to ask for them
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def take_now(address: int, size: int) -> None:
    """Take the pages of a mapping now. Raises ``OSError``, where a write would end the process.

    Linux before 5.14 takes them when they are written, and so does a kernel that refuses the call.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    if _MADVISE(start, address + size - start, MADV_POPULATE_WRITE):
        number = ctypes.get_errno()
        if number == errno.EFAULT:  # "bad address" would tell nothing
            number = errno.ENOMEM
        if number not in NO_SUCH_CALL:
            raise OSError(number, f"{size} bytes of shared memory: {os.strerror(number)}")


def give_back(address: int, size: int) -> None:
    """Give the pages of a shared mapping back, which begins with a page: all who have it find zeros.

    Without the GIL. Where the kernel refuses, the last process that has the mapping gives them back.
    """
    _MADVISE(address, size, _MADV_REMOVE)


def give_to_children(pages: ctypes.Array[ctypes.c_char]) -> None:
    """Let children that are forked from now on get these pages."""
    _advise(pages, mmap.MADV_DOFORK)


def _advise(pages: ctypes.Array[ctypes.c_char], advice: int) -> None:
    if _MADVISE(ctypes.addressof(pages), len(pages), advice):
        raise _error_of(f"madvise({advice})")


def _unmap(address: int, size: int, owner: int) -> None:
    if os.getpid() == owner:  # in a child something else may lie there
        _MUNMAP(address, size)


def _error_of(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
