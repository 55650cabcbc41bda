"""Fault injection: ``FaultStorage`` wraps any storage and lets a hook act around each change.

Rules: only changing calls are counted, so that "crash before call i, for every i" is a complete
sweep. Nothing here sleeps. A hook may do four things:

- Raise ``OSError``: the call fails.
- Raise ``ProcessDead``: the process is gone. Every later call raises it too, so that no ``finally``
  of the dead process cleans up.
- Kill the process for real.
- Block on a FIFO.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from ckptfsm.core.ports import FileKind, FileStat, Storage
from ckptfsm.testing.one_by_one import contents_of, entries_of, kinds_of
from ckptfsm.testing.simfs import ProcessDead

Hook = Callable[[int, str, str], None]
"""Called with the index of the call (from 0), the method, and the path (``src -> dst`` for two)."""

_T = TypeVar("_T")


class FaultStorage:
    """``Storage`` that counts every changing call of ``inner`` and calls hooks around it.

    Attributes: ``calls`` is the list of (method, path) so far. A hook gets the index of its call in
    that list. ``before`` runs before the call, ``after`` once it succeeded. An ``OSError`` from
    ``before`` at a ``fsync`` also drops the unsynced data of a simulated file, as a disk would.
    """

    root: str

    def __init__(
        self, inner: Storage, *, before: Hook | None = None, after: Hook | None = None
    ) -> None:
        self.root = inner.root
        self.inner = inner
        self.before = before
        self.after = after
        self.calls: list[tuple[str, str]] = []
        self._paths: dict[int, str] = {}
        self._reading: set[int] = set()
        self._dead: ProcessDead | None = None

    # -- changing calls ------------------------------------------------------------------------

    def open_exclusive(self, path: str, *, direct: bool = False) -> int:
        def create() -> int:
            return self.inner.open_exclusive(path, direct=direct)

        handle = self._do("open_exclusive", path, create)
        self._paths[handle] = path
        return handle

    def open_existing(self, path: str) -> int:
        handle = self._do("open_existing", path, lambda: self.inner.open_existing(path))
        self._paths[handle] = path
        return handle

    def write(self, handle: int, data: bytes | memoryview) -> int:
        path = self._path_of(handle)
        return self._do("write", path, lambda: self.inner.write(handle, data))

    def pwrite(self, handle: int, data: bytes | memoryview, offset: int) -> int:
        path = self._path_of(handle)
        return self._do("pwrite", path, lambda: self.inner.pwrite(handle, data, offset))

    def allocate(self, handle: int, size: int) -> bool:
        path = self._path_of(handle)
        return self._do("allocate", path, lambda: self.inner.allocate(handle, size))

    def truncate(self, handle: int, size: int) -> None:
        path = self._path_of(handle)
        self._do("truncate", path, lambda: self.inner.truncate(handle, size))

    def fsync(self, handle: int) -> None:
        lose = getattr(self.inner, "lose_dirty", None)  # only a simulated disk has it
        failed = (lambda: lose(handle)) if lose is not None else None
        self._do("fsync", self._path_of(handle), lambda: self.inner.fsync(handle), failed)

    def close(self, handle: int) -> None:
        def close() -> None:
            self.inner.close(handle)

        if handle in self._reading:
            self._alive()
            self._reading.discard(handle)
            self.inner.close(handle)
            return
        # A close that reports an error has still released the descriptor.
        self._do("close", self._path_of(handle), close, close)
        self._paths.pop(handle, None)

    def rename(self, src: str, dst: str) -> None:
        self._do("rename", f"{src} -> {dst}", lambda: self.inner.rename(src, dst))

    def link(self, src: str, dst: str) -> None:
        self._do("link", f"{src} -> {dst}", lambda: self.inner.link(src, dst))

    def mkdir(self, path: str) -> None:
        self._do("mkdir", path, lambda: self.inner.mkdir(path))

    def rmdir(self, path: str) -> None:
        self._do("rmdir", path, lambda: self.inner.rmdir(path))

    def unlink(self, path: str) -> None:
        self._do("unlink", path, lambda: self.inner.unlink(path))

    def touch(self, path: str) -> None:
        self._do("touch", path, lambda: self.inner.touch(path))

    def fsync_dir(self, path: str) -> None:
        self._do("fsync_dir", path, lambda: self.inner.fsync_dir(path))

    # -- the others: not counted ---------------------------------------------------------------

    def listdir(self, path: str) -> list[str]:
        self._alive()
        return self.inner.listdir(path)

    def entries(self, path: str) -> Iterator[tuple[str, FileStat]]:
        return entries_of(self, path)

    def kinds(self, path: str) -> Iterator[tuple[str, FileKind]]:
        return kinds_of(self, path)

    def stat(self, path: str) -> FileStat:
        self._alive()
        return self.inner.stat(path)

    def open_reading(self, path: str, *, direct: bool = False) -> int:
        self._alive()
        handle = self.inner.open_reading(path, direct=direct)
        self._reading.add(handle)
        return handle

    def pread(self, handle: int, into: memoryview, offset: int) -> int:
        self._alive()
        return self.inner.pread(handle, into, offset)

    def read(self, path: str, limit: int, offset: int = 0) -> bytes:
        self._alive()
        return self.inner.read(path, limit, offset)

    def read_each(
        self, directory: str, names: Iterable[str], limit: int
    ) -> Iterator[tuple[str, bytes]]:
        return contents_of(self, directory, names, limit)

    def free_bytes(self) -> int:
        self._alive()
        return self.inner.free_bytes()

    def digest(self, path: str) -> str:
        self._alive()
        return self.inner.digest(path)

    def try_lock(self, path: str) -> int | None:
        self._alive()
        return self.inner.try_lock(path)

    def unlock(self, handle: int) -> None:
        self._alive()
        self.inner.unlock(handle)

    def close_root(self) -> None:
        self.inner.close_root()

    def absolute(self, path: str) -> str:
        self._alive()
        return self.inner.absolute(path)

    def descriptors(self) -> tuple[int, ...]:
        return self.inner.descriptors()

    # -- inside --------------------------------------------------------------------------------

    def _alive(self) -> None:
        if self._dead is not None:
            raise self._dead

    def _path_of(self, handle: int) -> str:
        return self._paths.get(handle, f"#{handle}")

    def _do(
        self,
        method: str,
        path: str,
        call: Callable[[], _T],
        failed: Callable[[], object] | None = None,
    ) -> _T:
        """Count a call and run the hooks around it.

        ``failed`` runs even if an error is injected before.
        """
        self._alive()
        index = len(self.calls)
        self.calls.append((method, path))
        try:
            if self.before is not None:
                try:
                    self.before(index, method, path)
                except OSError:
                    if failed is not None:
                        failed()
                    raise
            result = call()
            if self.after is not None:
                self.after(index, method, path)
        except ProcessDead as dead:
            self._dead = dead
            raise
        return result


def fail_at(index: int, code: int) -> Hook:
    """Fail call ``index`` with errno ``code``.

    As an ``after`` hook: the call takes effect, then fails.
    """

    def hook(at: int, method: str, path: str) -> None:
        if at == index:
            raise OSError(code, os.strerror(code), path)

    return hook


def crash_at(index: int) -> Hook:
    """Kill the simulated process at call ``index`` (follow with ``SimDisk.kill`` or ``crash``)."""

    def hook(at: int, method: str, path: str) -> None:
        if at == index:
            raise ProcessDead(f"before call {index}: {method} {path}")

    return hook


def pause_at(predicate: Callable[[int, str, str], bool], reached_fifo: str, go_fifo: str) -> Hook:
    """Pause wherever ``predicate`` holds: one byte into ``reached_fifo``, one out of ``go_fifo``.

    Both are paths of FIFOs outside the store; the test reads and writes the other ends. They are
    opened at the pause, so it works across a fork. If the other end goes away, the pause ends.
    """

    def hook(at: int, method: str, path: str) -> None:
        if predicate(at, method, path):
            with Path(reached_fifo).open("wb", buffering=0) as reached:
                reached.write(b".")
            with Path(go_fifo).open("rb", buffering=0) as go:
                go.read(1)

    return hook
