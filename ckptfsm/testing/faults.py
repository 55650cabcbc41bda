"""Fault injection: ``FaultStorage`` wraps any storage and lets a hook act around each change.

Only changing calls are counted, so that "crash before call i, for every i" is a complete sweep. If a
hook raises ``OSError``, the call fails. If it raises ``ProcessDead``, every later call raises it too, so
that no ``finally`` of the dead process cleans up.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ckptfsm.core.ports import Storage
from ckptfsm.testing.one_by_one import OneByOne
from ckptfsm.testing.simfs import ProcessDead

Hook = Callable[[int, str, str], None]
"""Called with the index of the call (from 0), the method, and the path (``src -> dst`` for two)."""


def _counted(method: str) -> Any:
    """A changing call of the port, with hooks around it."""

    def call(self: FaultStorage, first: Any, *others: Any, **options: Any) -> Any:
        path = first if isinstance(first, str) else self._path_of(first)
        if method in ("rename", "link"):
            path = f"{path} -> {others[0]}"
        made = self._do(
            method, path, partial(getattr(self.inner, method), first, *others, **options)
        )
        if method in ("open_exclusive", "open_existing"):
            self._paths[made] = path
        return made

    return call


def _passed_on(method: str) -> Any:
    """A call of the port that changes nothing."""

    def call(self: FaultStorage, *arguments: Any, **options: Any) -> Any:
        self._alive()
        return getattr(self.inner, method)(*arguments, **options)

    return call


class FaultStorage(OneByOne):
    """``Storage`` that counts every changing call of ``inner`` and calls hooks around it.

    ``calls`` has (method, path) of each so far. ``before`` runs before a call, ``after`` once it
    succeeded. An ``OSError`` from ``before`` at a ``fsync`` also drops the unsynced data of a simulated
    file, as a disk would.
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

    open_exclusive = _counted("open_exclusive")
    open_existing = _counted("open_existing")
    write = _counted("write")
    pwrite = _counted("pwrite")
    allocate = _counted("allocate")
    truncate = _counted("truncate")
    fsync = _counted("fsync")
    rename = _counted("rename")
    link = _counted("link")
    mkdir = _counted("mkdir")
    rmdir = _counted("rmdir")
    unlink = _counted("unlink")
    touch = _counted("touch")
    fsync_dir = _counted("fsync_dir")

    listdir = _passed_on("listdir")
    stat = _passed_on("stat")
    pread = _passed_on("pread")
    read = _passed_on("read")
    free_bytes = _passed_on("free_bytes")
    digest = _passed_on("digest")
    try_lock = _passed_on("try_lock")
    unlock = _passed_on("unlock")
    absolute = _passed_on("absolute")

    def close(self, handle: int) -> None:
        if handle in self._reading:
            self._alive()
            self._reading.discard(handle)
            self.inner.close(handle)
            return
        self._do("close", self._path_of(handle), partial(self.inner.close, handle))
        self._paths.pop(handle, None)

    def open_reading(self, path: str, *, direct: bool = False) -> int:
        self._alive()
        handle = self.inner.open_reading(path, direct=direct)
        self._reading.add(handle)
        return handle

    def close_root(self) -> None:
        self.inner.close_root()

    def descriptors(self) -> tuple[int, ...]:
        return self.inner.descriptors()

    def _alive(self) -> None:
        if self._dead is not None:
            raise self._dead

    def _path_of(self, handle: int) -> str:
        return self._paths.get(handle, f"#{handle}")

    def _do(self, method: str, path: str, call: partial[Any]) -> Any:
        """Count a call and run the hooks around it."""
        self._alive()
        index = len(self.calls)
        self.calls.append((method, path))
        try:
            if self.before is not None:
                try:
                    self.before(index, method, path)
                except OSError:
                    self._fail(method, call)
                    raise
            result = call()
            if self.after is not None:
                self.after(index, method, path)
        except ProcessDead as dead:
            self._dead = dead
            raise
        return result

    def _fail(self, method: str, call: partial[Any]) -> None:
        if method == "close":  # one that reports an error has still released the descriptor
            call()
        elif method == "fsync" and hasattr(self.inner, "lose_dirty"):  # a simulated disk has it
            self.inner.lose_dirty(*call.args)


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
