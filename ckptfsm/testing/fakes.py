"""``FifoGate``: holds another process at a point, for a test that chooses what happens meanwhile."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

_WAIT_S = 20.0


class FifoGate:
    """Holds another process at a point until the test opens the gate, by a FIFO without sleeps.

    The child calls ``hold``, the test ``open``; an ``open`` without a waiting child is an error.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        os.mkfifo(self.path)

    def hold(self, *ignored: object) -> None:
        with Path(self.path).open("rb", buffering=0) as fifo:
            fifo.read(1)

    def open(self, timeout_s: float = _WAIT_S) -> None:
        descriptor = self.reached(timeout_s)
        try:
            os.write(descriptor, b".")
        finally:
            os.close(descriptor)

    def reached(self, timeout_s: float = _WAIT_S) -> int:
        """Wait until the child holds, and return a descriptor.

        The child holds as long as it is open.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return os.open(self.path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                if error.errno != errno.ENXIO or time.monotonic() > deadline:
                    raise
                time.sleep(0.001)  # bounded by the deadline: the child is on its way to hold()
