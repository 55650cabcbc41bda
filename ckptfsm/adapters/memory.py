"""Memory by address: of another process of this user, and of this one. No torch.

Rules: reading never changes the memory. ``into`` is filled whole, or an error is raised.
"""

from __future__ import annotations

import ctypes
import os

_LIBC = ctypes.CDLL(None, use_errno=True)


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


class MemoryOf:
    """The memory of another process of this user, read with ``process_vm_readv``."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def read(self, address: int, into: memoryview) -> None:
        """Fill ``into`` from ``address``. Raises ``OSError``: EFAULT, EPERM, ESRCH."""
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
        """Fill ``into`` from ``address``."""
        ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(into)), address, len(into))
