"""The storage of a simulated process: every call may be interleaved, struck by a fault, and is judged.

Before a call others may run; a fault may make it fail, half-succeed, last, or be the last one of its
process; after a call that changed something the ``Watch`` looks. Every call is a line of the trace.

Rules: an error of a call says nothing about whether it happened. A ``close`` that reports an error
has closed; a failed ``fsync`` has dropped bytes that were not durable. On another host, reads may
see names late (F9), changes never: a new name is not there yet, and one that was removed or renamed
away is still listed. A host that changes a name, or below it, has seen it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from ckptfsm.testing.simfs import ProcessDead, SimStorage
from proof.sim.faults import READS, errno_for
from proof.sim.late import ancestry
from proof.sim.site import Site
from proof.sim.world import Process

T = TypeVar("T")
_CREATES = frozenset({"open_exclusive", "mkdir", "rename", "link"})
_REMOVES = frozenset({"unlink", "rmdir", "rename"})


def _call(method: str, *, names: bool = False) -> Any:
    """A call of the port. ``names``: it needs a name that this host sees."""

    def call(self: WorldStorage, *arguments: Any, **options: Any) -> Any:
        if names:
            self._check_visible(arguments[0])
        return self._call(method, partial(getattr(SimStorage, method), self, **options), *arguments)

    return call


class WorldStorage(SimStorage):
    """``Storage`` of one process of a ``Site``."""

    def __init__(self, site: Site, owner: Process) -> None:
        super().__init__(site.world.disk, owner.name)
        self.site = site
        self.owner = owner

    open_exclusive = _call("open_exclusive")
    open_existing = _call("open_existing", names=True)
    fsync = _call("fsync")
    close = _call("close")
    rename = _call("rename")
    link = _call("link")
    mkdir = _call("mkdir")
    rmdir = _call("rmdir")
    unlink = _call("unlink")
    touch = _call("touch")
    fsync_dir = _call("fsync_dir")
    try_lock = _call("try_lock")
    unlock = _call("unlock")
    stat = _call("stat", names=True)
    open_reading = _call("open_reading", names=True)
    pread = _call("pread")
    read = _call("read", names=True)
    digest = _call("digest", names=True)
    free_bytes = _call("free_bytes")

    def write(self, handle: int, data: bytes | memoryview) -> int:
        return self._write("write", handle, data, None)

    def pwrite(self, handle: int, data: bytes | memoryview, offset: int) -> int:
        return self._write("pwrite", handle, data, offset)

    def allocate(self, handle: int, size: int) -> bool:
        allocate = super().allocate
        return self._judged(handle, lambda: self._call("allocate", allocate, handle, size))

    def truncate(self, handle: int, size: int) -> None:
        truncate = super().truncate
        self._judged(handle, lambda: self._call("truncate", truncate, handle, size))

    def listdir(self, path: str) -> list[str]:
        names = self._call("listdir", super().listdir, path)
        if path == ".ckptfsm/epochs":
            self.site.watch.looked(self.owner.name)
        return self._as_seen(path, names) if self.site.lag_s else names

    # -- one call ------------------------------------------------------------------------------

    def _call(self, method: str, call: Callable[..., T], *arguments: Any) -> T:
        """Make a call: others may run, a fault may strike, the trace and the judges see it."""
        site, owner = self.site, self.owner
        first = arguments[0] if arguments else ""
        path = first if isinstance(first, str) else self._path_of(first)
        other = arguments[1] if len(arguments) > 1 and method in ("rename", "link") else ""
        fault = site.before_call(owner, method, path)
        if not owner.alive:
            raise ProcessDead(owner.name)
        name = site.world.current.name
        if fault in ("full", "error", "read"):
            self._fail_instead(method, arguments)
            site.world.history.append((name, method, path, f"{fault}!"))
            raise self._error(fault, path)
        if method == "unlink":
            site.judge_deletion(self.disk.find(path), path)
        if site.lag_s and method not in READS:
            site.hidden.seen(path, owner.host)
        try:
            result = call(*arguments)
        except OSError as error:
            site.world.history.append((name, method, path, f"errno {error.errno}"))
            self._die_after(fault)
            raise
        site.world.history.append((name, method, path, other))
        if method not in READS:
            self._after(method, path, other, fault)
        self._die_after(fault)
        return result

    def _after(self, method: str, path: str, other: str, fault: str) -> None:
        site = self.site
        site.judge(self.owner, method, path, other)
        if site.lag_s:
            gone = path if method in _REMOVES else ""
            made = (other or path) if method in _CREATES else ""
            site.lag(self.owner, gone, made)
        if fault == "unknown":
            site.struck(fault, method)
            site.world.note(site.world.current.name, method, path, "unknown outcome")
            raise self._error(fault, path)

    def _die_after(self, fault: str) -> None:
        """The call was the last one of its process, whether it read, changed something or failed."""
        if fault in ("kill_after", "power_after"):
            self.site.strike_dead(self.owner, fault)

    def _write(self, method: str, handle: int, data: bytes | memoryview, offset: int | None) -> int:
        """A write may be short; what it hits is judged by the file, not only by the name."""
        arguments: tuple[Any, ...] = (handle, data) if offset is None else (handle, data, offset)
        short = len(data) > 1 and self.site.chance(self.site.faults.short)
        if short:
            cut = data[: 1 + self.site.world.random.randrange(len(data) - 1)]
            arguments = (handle, cut, *arguments[2:])
        call = super().write if offset is None else super().pwrite
        taken = self._judged(handle, lambda: self._call(method, call, *arguments))
        if short:
            self.site.struck("short", method)
        return taken

    def _judged(self, handle: int, call: Callable[[], T]) -> T:
        """A change of an open file: the file that it hit is judged after it."""
        found = self._process.handles.get(handle)
        result = call()
        if found is not None:
            self.site.judge_token(found.node, found.path)
        return result

    def _path_of(self, handle: int) -> str:
        found = self._process.handles.get(handle)
        return found.path if found is not None else f"#{handle}"

    def _fail_instead(self, method: str, arguments: tuple[Any, ...]) -> None:
        if method == "fsync" and arguments[0] in self._process.handles:
            self.lose_dirty(arguments[0])
        elif method == "close" and arguments[0] in self._process.handles:
            super().close(arguments[0])

    def _error(self, fault: str, path: str) -> OSError:
        code = errno_for(fault, self.site.world.random)
        return OSError(code, os.strerror(code), path)

    # -- late names ----------------------------------------------------------------------------

    def _as_seen(self, path: str, names: list[str]) -> list[str]:
        """A listing as this host sees it: without new names, with names that have gone a moment
        ago."""
        site, host = self.site, self.owner.host
        hidden = site.hidden.names_in(path, host).intersection(names)
        gone = site.gone.names_in(path, host).difference(names)
        if not hidden and not gone:
            return names
        site.count("F9")
        return sorted(gone.union(names) - hidden)

    def _check_visible(self, path: str) -> None:
        site, host = self.site, self.owner.host
        if site.lag_s and any(site.hidden.is_late(each, host) for each in ancestry(path)):
            site.count("F9")
            raise FileNotFoundError(2, os.strerror(2), path)
