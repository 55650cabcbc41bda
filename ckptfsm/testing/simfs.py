"""An adversarial file system in memory: the ``Storage`` port with power that can fail at any call.

``SimDisk`` is the disk, shared by several ``SimStorage``, one per simulated process. It is as weak as
POSIX and Linux file systems allow:

- What was written is volatile until *its file* is fsynced. A power loss keeps it, loses it, cuts it
  short, or zeroes some 512-byte blocks. So it does with reserved bytes: a size proves nothing.
- A name is volatile until *its directory* is fsynced. A power loss shows any of its states since then,
  each name by itself. A rename may show at both names, never at neither if the entry was durable.
- A failed fsync drops the unsynced data and calls the file clean ("fsyncgate"). With
  ``keeps_lost_data`` readers see the dropped data until the power fails.

A chooser decides; 0 always is the mildest choice, so that a shrunk counterexample loses only the
necessary. Not for threads.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ckptfsm.adapters.posix_storage import digest_of, split_entry, split_path
from ckptfsm.core.ports import FileStat
from ckptfsm.testing.one_by_one import OneByOne

BLOCK_BYTES = 512  # the unit that a disk writes at once
_DEVICE = 1
_NAME_BYTES = 255
_UNLIMITED_BYTES = 1 << 50


class ProcessDead(BaseException):
    """The simulated process is gone. Not an ``Exception``: no handler may outlive its process."""


class Chooser(Protocol):
    """Decides which data a power loss keeps; ``random.Random`` is an implementation."""

    def randrange(self, stop: int, /) -> int:
        """A number from 0 (the mildest choice) to ``stop - 1``."""


Crash = Chooser | Literal["all_lost", "all_kept"]


_Change = tuple[int, bytes | None]
"""Data written at an offset; None for a file that was cut, or extended, to end at the offset."""


class _File:
    """A file. ``base`` is the durable content while there are ``writes`` since the last fsync.

    ``ghost``: a failed fsync has dropped some of ``data`` for good, and reads still show it.
    """

    __slots__ = ("anchored", "base", "data", "ghost", "links", "opens", "writes")

    def __init__(self, data: bytes | bytearray = b"") -> None:
        self.data = bytearray(data)
        self.base: bytes | None = None
        self.writes: list[_Change] = []
        self.ghost = False
        self.links = 0
        self.opens = 0
        self.anchored = False

    def put(self, offset: int, data: bytes | None) -> None:
        if self.base is None:
            self.base = bytes(self.data)
        self.writes.append((offset, data))
        _overlay(self.data, offset, data)

    def settle(self) -> None:
        """Make the content durable, except data dropped before."""
        if self.ghost:
            durable = bytearray(self.base or b"")
            for offset, data in self.writes:
                _overlay(durable, offset, data)
            self.base = bytes(durable)
        else:
            self.base = None
        self.writes.clear()

    def drop_unsynced(self) -> None:
        """Drop the unsynced data, as a failed fsync does, while readers still see it."""
        self.ghost = self.ghost or self.base is not None
        self.writes.clear()

    def revert(self) -> None:
        """Remove all unsynced data."""
        if self.base is not None:
            self.data[:] = self.base
            self.ghost = False
            self.settle()

    def lose_power(self, choose: Chooser) -> None:
        if self.base is None:
            return
        survived = bytearray(self.base)
        for offset, data in self.writes:
            _survive(survived, offset, data, choose)
        self.data[:] = survived
        self.ghost = False
        self.settle()


class _Dir:
    """A directory. ``history`` has the states of each name since its last fsync, oldest first."""

    __slots__ = ("anchored", "device", "entries", "history", "links")

    def __init__(self, device: int = _DEVICE) -> None:
        self.entries: dict[str, _Node] = {}
        self.history: dict[str, list[_Node | None]] = {}
        self.device = device
        self.links = 0
        self.anchored = False  # ever durable under a durable name

    def durable_entries(self) -> Iterator[_Node]:
        for name, node in self.entries.items():
            if name not in self.history:
                yield node
        for states in self.history.values():
            if states[0] is not None:
                yield states[0]


@dataclass(slots=True, eq=False)
class _Symlink:
    target: str
    links: int = 0
    anchored: bool = False


_Node = _File | _Dir | _Symlink


@dataclass(slots=True, eq=False)
class _Handle:
    node: _File
    path: str
    writable: bool
    position: int = 0


@dataclass(slots=True, eq=False)
class _Process:
    alive: bool = True
    handles: dict[int, _Handle] = field(default_factory=dict)
    locks: dict[int, _File] = field(default_factory=dict)


class SimDisk:
    """A disk with volatile and durable state. See the module's rules.

    ``capacity`` and ``used`` are in bytes of content. ``short_writes``: the most bytes that one write
    takes. ``allocates``: False for a disk that cannot reserve blocks.
    """

    def __init__(
        self,
        *,
        capacity: int | None = None,
        short_writes: int | None = None,
        allocates: bool = True,
        keeps_lost_data: bool = False,
    ) -> None:
        self.capacity = capacity
        self.short_writes = short_writes
        self.allocates = allocates
        self.keeps_lost_data = keeps_lost_data
        self.used = 0
        self.root = _Dir()
        self.root.anchored = True
        self.processes: dict[str, _Process] = {}
        self.locked: dict[_File, _Process] = {}
        self._dirty_dirs: dict[_Dir, None] = {}  # in the order they became dirty
        self._dirty_files: dict[_File, None] = {}
        self._next_handle = 3
        self._failing_fsync: tuple[str | None, int, int] | None = None

    # -- for tests -----------------------------------------------------------------------------

    def crash(self, choose: Crash) -> None:
        """Power loss: every process dies; unsynced writes and names survive as chosen."""
        chooser: Chooser = _Always(choose) if isinstance(choose, str) else choose
        for process in list(self.processes):
            self.kill(process)
        for file in self._dirty_files:
            file.lose_power(chooser)
        self._dirty_files.clear()
        if self._dirty_dirs:
            _lose_names(self.root, list(self._dirty_dirs), chooser)
            self._dirty_dirs.clear()
        self._recount()

    def kill(self, process: str) -> None:
        """SIGKILL of one process: its handles and locks go, its changes stay."""
        found = self.processes.pop(process, None)
        if found is None:
            return
        found.alive = False
        for handle in found.handles.values():
            self.release(handle.node)
        for lock in found.locks.values():
            self.locked.pop(lock, None)
        found.handles.clear()
        found.locks.clear()

    def fail_fsync(self, code: int = errno.EIO, *, path: str | None = None, count: int = 1) -> None:
        """Make the next ``count`` fsyncs of files (of ``path`` only, if given) fail with ``code``."""
        self._failing_fsync = (path, code, count)

    def plant_symlink(self, path: str, target: str) -> None:
        """Plant a durable symbolic link, made by another program. Its directory must exist."""
        self._plant(path, _Symlink(target))

    def plant_file(self, path: str, data: bytes) -> None:
        """Plant a durable file, made by another program. Its directory must exist."""
        self._plant(path, _File(data))
        self.used += len(data)

    def overwrite(self, path: str, data: bytes) -> None:
        """Overwrite a file durably, as another program; make it if it is missing."""
        found = self.find(path)
        if not isinstance(found, _File):
            self.plant_file(path, data)
            return
        self.used += len(data) - len(found.data)
        found.data[:] = data
        found.ghost = False
        found.settle()
        self._dirty_files.pop(found, None)

    def uproot(self, path: str) -> None:
        """Delete a file or a whole directory durably, as another program."""
        parent, _, name = path.rpartition("/")
        directory = self.find(parent)
        assert isinstance(directory, _Dir) and name in directory.entries, f"no {path}"
        node = directory.entries.pop(name)
        directory.history.pop(name, None)
        node.links -= 1
        for inner in (node, *(n for _, n in _walk(node))) if isinstance(node, _Dir) else (node,):
            if isinstance(inner, _File):
                self.used -= len(inner.data)

    def plant_mount(self, path: str, device: int = 2) -> None:
        """Plant a mount point: an empty directory on another device. Its parent must exist."""
        self._plant(path, _Dir(device))

    def snapshot(self) -> dict[str, bytes | str | None]:
        """The view of a reader: path -> content, ``-> target`` of a link, None for a directory."""
        return {path: _shown(node) for path, node in _walk(self.root)}

    def fork(self) -> SimDisk:
        """An independent copy, volatile state included, on which no process runs."""
        other = SimDisk(
            capacity=self.capacity,
            short_writes=self.short_writes,
            allocates=self.allocates,
            keeps_lost_data=self.keeps_lost_data,
        )
        copies: dict[_Node, _Node] = {}
        root = _copy(self.root, copies)
        assert isinstance(root, _Dir)
        other.root = root
        other._dirty_dirs = dict.fromkeys(
            copy for d in self._dirty_dirs if isinstance(copy := copies.get(d), _Dir)
        )
        other._dirty_files = dict.fromkeys(
            copy for f in self._dirty_files if isinstance(copy := copies.get(f), _File)
        )
        other._recount()
        return other

    # -- for judges ----------------------------------------------------------------------------

    def find(self, path: str) -> object | None:
        """The file or directory at ``path``, as a token that stays the same as long as that exists.

        No link is followed; None if the path does not exist.
        """
        here: _Node = self.root
        for piece in split_path(path):
            node = here.entries.get(piece) if isinstance(here, _Dir) else None
            if node is None:
                return None
            here = node
        return here

    def possible(self, path: str) -> list[object | None]:
        """The tokens that a power loss right now could leave at ``path`` in its directory."""
        parent, _, name = path.rpartition("/")
        directory = self.find(parent)
        if not isinstance(directory, _Dir):
            return [None]
        return list(directory.history.get(name) or [directory.entries.get(name)])

    def content(self, token: object | None) -> bytes | None:
        """The content of a file from ``find`` or ``possible``; None for any other token."""
        return bytes(token.data) if isinstance(token, _File) else None

    def listed(self, path: str) -> list[str]:
        """The names in a directory, sorted; none if there is no such directory."""
        found = self.find(path)
        return sorted(found.entries) if isinstance(found, _Dir) else []

    def files_below(self, path: str) -> list[object]:
        """The files below a directory, as tokens."""
        found = self.find(path)
        inner = _walk(found) if isinstance(found, _Dir) else iter(())
        return [node for _, node in inner if isinstance(node, _File)]

    def unsettled(self, path: str) -> list[str]:
        """The names and files at or below ``path`` that a power loss right now could change.

        The name of ``path`` itself is not included: it belongs to the parent.
        """
        found = self.find(path)
        if not isinstance(found, _Dir):
            return [path] if isinstance(found, _File) and found.base is not None else []
        problems = [f"{path}/{name} (name)" for name in found.history]
        for inner, node in _walk(found):
            if isinstance(node, _Dir):
                problems += [f"{path}/{inner}/{name} (name)" for name in node.history]
            elif isinstance(node, _File) and node.base is not None:
                problems.append(f"{path}/{inner} (data)")
        return problems

    # -- for SimStorage ------------------------------------------------------------------------

    def new_handle(self) -> int:
        self._next_handle += 1  # never reused: a stale handle is EBADF
        return self._next_handle

    def assign(self, directory: _Dir, name: str, node: _Node | None) -> None:
        """Set ``name`` to ``node`` (None: absent), volatile."""
        old = directory.entries.get(name)
        states = directory.history.get(name)
        if states is None:
            directory.history[name] = [old, node]
            self._dirty_dirs[directory] = None
        else:
            states.append(node)
        if node is None:
            del directory.entries[name]
        else:
            directory.entries[name] = node
            node.links += 1
        if old is not None:
            old.links -= 1
            if isinstance(old, _File):
                self._free_if_orphan(old)

    def write(self, handle: _Handle, data: bytes, offset: int) -> int:
        """Write as many bytes as ``short_writes`` and ``capacity`` allow; ENOSPC if none fit."""
        file = handle.node
        taken = len(data) if self.short_writes is None else min(len(data), self.short_writes)
        if not taken:
            return 0
        end = self._fitting(file, offset + taken)
        if end <= offset:
            raise _error(errno.ENOSPC, handle.path)
        self._put(file, offset, data[: end - offset])
        return end - offset

    def allocate(self, handle: _Handle, size: int) -> bool:
        """Reserve as much of ``size`` as fits; ENOSPC if that is not all."""
        if not self.allocates or not size:
            return False
        file, before = handle.node, len(handle.node.data)
        if size > before:
            end = self._fitting(file, size)
            if end > before:
                self._put(file, before, bytes(end - before))
            if end < size:
                raise _error(errno.ENOSPC, handle.path)
        return True

    def truncate(self, handle: _Handle, size: int) -> None:
        """Set the size. A hole takes space here, as it does where a write leaves one."""
        if size > max(len(handle.node.data), self._fitting(handle.node, size)):
            raise _error(errno.ENOSPC, handle.path)
        self._put(handle.node, size, None)

    def sync_file(self, handle: _Handle) -> None:
        failing = self._failing_fsync
        if failing is not None and failing[0] in (None, handle.path):
            path, code, count = failing
            self._failing_fsync = (path, code, count - 1) if count > 1 else None
            self.lose_dirty(handle.node)
            raise _error(code, handle.path)
        handle.node.settle()
        if not handle.node.ghost:
            self._dirty_files.pop(handle.node, None)

    def lose_dirty(self, file: _File) -> None:
        """Drop the unsynced data, as a failed fsync does; the file counts as clean."""
        if self.keeps_lost_data:
            file.drop_unsynced()
            return
        before = len(file.data)
        file.revert()
        self.used += len(file.data) - before
        self._dirty_files.pop(file, None)

    def sync_dir(self, directory: _Dir) -> None:
        directory.history.clear()
        self._dirty_dirs.pop(directory, None)
        if directory.anchored:
            _anchor(directory)

    # -- inside --------------------------------------------------------------------------------

    def _fitting(self, file: _File, end: int) -> int:
        """The end that the file can have, at most ``end``. Overwriting and reserved bytes are free."""
        if self.capacity is None:
            return end
        return min(end, len(file.data) + self.capacity - self.used)

    def _put(self, file: _File, offset: int, data: bytes | None) -> None:
        before = len(file.data)
        file.put(offset, data)
        self.used += len(file.data) - before
        self._dirty_files[file] = None

    def release(self, file: _File) -> None:
        file.opens -= 1
        self._free_if_orphan(file)

    def _free_if_orphan(self, file: _File) -> None:
        if file.links == 0 and file.opens == 0:
            self.used -= len(file.data)

    def _plant(self, path: str, node: _Node) -> None:
        pieces = split_entry(path)
        directory = self.root
        for piece in pieces[:-1]:
            inner = directory.entries[piece]
            assert isinstance(inner, _Dir), f"no directory above {path}"
            directory = inner
        assert pieces[-1] not in directory.entries, f"{path} exists"
        directory.entries[pieces[-1]] = node
        node.links = 1
        node.anchored = directory.anchored

    def _recount(self) -> None:
        """Count links and used space anew after a crash or a copy; all nodes are durable or dirty."""
        found = {self.root: 0} | dict.fromkeys((node for _, node in _walk(self.root)), 0)
        for node in found:
            if isinstance(node, _Dir):
                for inner in node.entries.values():
                    found[inner] += 1
        for node, links in found.items():
            node.links = links
            if isinstance(node, _File):
                node.opens = 0
        self.used = sum(len(node.data) for node in found if isinstance(node, _File))


class SimStorage(OneByOne):
    """``Storage`` of one simulated process on a ``SimDisk``.

    Two instances with the same process name are the same process. Once it was killed (or the power
    failed), every call of an older instance raises ``ProcessDead``; a new instance is a new process.
    """

    root: str

    def __init__(self, disk: SimDisk, process: str = "p1") -> None:
        self.root = "/sim"
        self.disk = disk
        self.process = process
        self._process = disk.processes.setdefault(process, _Process())

    # -- files ---------------------------------------------------------------------------------

    def open_exclusive(self, path: str, *, direct: bool = False) -> int:
        directory, name = self._entry(path, changes=True)
        if name in directory.entries:
            raise _error(errno.EEXIST, path)
        file = _File()
        self.disk.assign(directory, name, file)
        return self._opened(file, path, writable=True)

    def open_existing(self, path: str) -> int:
        return self._opened(self._regular(path), path, writable=False)

    def open_reading(self, path: str, *, direct: bool = False) -> int:
        return self._opened(self._regular(path), path, writable=False)

    def pread(self, handle: int, into: memoryview, offset: int) -> int:
        found = self._handle(handle)
        if offset < 0 or found.writable:  # a real one says EBADF for a handle of open_exclusive
            raise _error(errno.EINVAL if offset < 0 else errno.EBADF, found.path)
        data = found.node.data[offset : offset + len(into)]
        into[: len(data)] = data
        return len(data)

    def write(self, handle: int, data: bytes | memoryview) -> int:
        found = self._handle(handle, writable=True)
        taken = self.disk.write(found, bytes(data), found.position)
        found.position += taken
        return taken

    def pwrite(self, handle: int, data: bytes | memoryview, offset: int) -> int:
        if offset < 0:
            raise OSError(errno.EINVAL, "negative offset")
        return self.disk.write(self._handle(handle, writable=True), bytes(data), offset)

    def allocate(self, handle: int, size: int) -> bool:
        found = self._handle(handle, writable=True)
        if size < 0:
            raise _error(errno.EINVAL, found.path)
        return self.disk.allocate(found, size)

    def truncate(self, handle: int, size: int) -> None:
        found = self._handle(handle)
        if size < 0 or not found.writable:  # a real one says EINVAL here, not EBADF
            raise _error(errno.EINVAL, found.path)
        self.disk.truncate(found, size)

    def fsync(self, handle: int) -> None:
        self.disk.sync_file(self._handle(handle))

    def lose_dirty(self, handle: int) -> None:
        """Drop unsynced data as a failed fsync does. Not in the port: ``FaultStorage`` calls it."""
        self.disk.lose_dirty(self._handle(handle).node)

    def close(self, handle: int) -> None:
        found = self._handle(handle)
        del self._process.handles[handle]
        self.disk.release(found.node)

    def read(self, path: str, limit: int, offset: int = 0) -> bytes:
        return bytes(self._regular(path).data[offset : offset + max(limit, 0)])

    def digest(self, path: str) -> str:
        return digest_of(self._regular(path).data)

    # -- names ---------------------------------------------------------------------------------

    def rename(self, src: str, dst: str) -> None:
        src_dir, src_name = self._entry(src, changes=True)
        dst_dir, dst_name = self._entry(dst, changes=True)
        node = src_dir.entries.get(src_name)
        if node is None:
            raise _error(errno.ENOENT, src, dst)
        if isinstance(node, _Dir) and dst_dir in _inside(node):
            raise _error(errno.EINVAL, src, dst)
        old = dst_dir.entries.get(dst_name)
        if old is node:
            return
        if isinstance(old, _Dir) and src_dir in _inside(old):
            raise _error(errno.ENOTEMPTY, src, dst)
        if old is not None and (code := _replace_error(node, old)):
            raise _error(code, src, dst)
        if _is_mount(node) or _is_mount(old):
            raise _error(errno.EBUSY, src, dst)
        self.disk.assign(dst_dir, dst_name, node)
        self.disk.assign(src_dir, src_name, None)

    def link(self, src: str, dst: str) -> None:
        src_dir, src_name = self._entry(src, changes=True)
        dst_dir, dst_name = self._entry(dst, changes=True)
        node = src_dir.entries.get(src_name)
        if node is None:
            raise _error(errno.ENOENT, src, dst)
        if dst_name in dst_dir.entries:
            raise _error(errno.EEXIST, src, dst)
        if isinstance(node, _Dir):
            raise _error(errno.EPERM, src, dst)
        self.disk.assign(dst_dir, dst_name, node)

    def mkdir(self, path: str) -> None:
        directory, name = self._entry(path, changes=True)
        if name in directory.entries:
            raise _error(errno.EEXIST, path)
        self.disk.assign(directory, name, _Dir())

    def rmdir(self, path: str) -> None:
        directory, name = self._entry(path, changes=True)
        node = _existing(directory, name, path)
        if not isinstance(node, _Dir):
            raise _error(errno.ENOTDIR, path)
        if _is_mount(node):
            raise _error(errno.EBUSY, path)
        if node.entries:
            raise _error(errno.ENOTEMPTY, path)
        self.disk.assign(directory, name, None)

    def unlink(self, path: str) -> None:
        directory, name = self._entry(path, changes=True)
        if isinstance(_existing(directory, name, path), _Dir):
            raise _error(errno.EISDIR, path)
        self.disk.assign(directory, name, None)

    def touch(self, path: str) -> None:
        directory, name = self._entry(path, changes=True)
        _existing(directory, name, path)  # this disk keeps no times

    def fsync_dir(self, path: str) -> None:
        self.disk.sync_dir(self._directory(path, split_path(path)))

    def listdir(self, path: str) -> list[str]:
        return sorted(self._directory(path, split_path(path)).entries)

    def stat(self, path: str) -> FileStat:
        if not split_path(path):
            return _file_stat(self._directory(path, ()))
        directory, name = self._entry(path)
        return _file_stat(_existing(directory, name, path))

    def free_bytes(self) -> int:
        self._directory("", ())
        capacity = self.disk.capacity
        return _UNLIMITED_BYTES if capacity is None else max(capacity - self.disk.used, 0)

    # -- the liveness lock ---------------------------------------------------------------------

    def try_lock(self, path: str) -> int | None:
        directory, name = self._entry(path, changes=True)
        if name not in directory.entries:
            self.disk.assign(directory, name, _File())
        node = _existing(directory, name, path)
        if not isinstance(node, _File):
            raise _error(_not_regular(node), path)
        if node in self.disk.locked:
            return None
        self.disk.locked[node] = self._process
        handle = self.disk.new_handle()
        self._process.locks[handle] = node
        return handle

    def unlock(self, handle: int) -> None:
        self._alive()
        file = self._process.locks.pop(handle, None)
        if file is None:
            raise _error(errno.EBADF)
        self.disk.locked.pop(file, None)

    def absolute(self, path: str) -> str:
        return "/".join((self.root, *split_path(path)))

    def close_root(self) -> None:
        """Nothing to close: there is no descriptor."""

    def descriptors(self) -> tuple[int, ...]:
        return ()

    # -- the walk ------------------------------------------------------------------------------

    def _alive(self) -> None:
        if not self._process.alive:
            raise ProcessDead(self.process)

    def _entry(self, path: str, *, changes: bool = False) -> tuple[_Dir, str]:
        pieces = split_entry(path)
        return self._directory(path, pieces[:-1], changes=changes), _checked_name(pieces[-1])

    def _directory(self, path: str, pieces: tuple[str, ...], *, changes: bool = False) -> _Dir:
        self._alive()
        here = root = self.disk.root
        for piece in pieces:
            node = here.entries.get(piece)
            if not isinstance(node, _Dir):
                _checked_name(piece)
                raise _error(_not_a_directory(node), path)
            if changes and node.device != root.device:
                raise _error(errno.EXDEV, path)
            here = node
        return here

    def _regular(self, path: str) -> _File:
        directory, name = self._entry(path)
        node = _existing(directory, name, path)
        if not isinstance(node, _File):
            raise _error(_not_regular(node), path)
        if self.disk.locked.get(node) is self._process:
            raise _error(errno.EBUSY, path)  # as in PosixStorage, where a close would drop the lock
        return node

    def _opened(self, file: _File, path: str, *, writable: bool) -> int:
        file.opens += 1
        handle = self.disk.new_handle()
        self._process.handles[handle] = _Handle(file, path, writable)
        return handle

    def _handle(self, handle: int, *, writable: bool = False) -> _Handle:
        self._alive()
        found = self._process.handles.get(handle)
        if found is None or (writable and not found.writable):
            raise _error(errno.EBADF)
        return found


class _Always:
    """The two extreme choosers: all lost, or all kept."""

    def __init__(self, mode: str) -> None:
        if mode not in ("all_lost", "all_kept"):
            raise ValueError(f"unknown crash mode {mode!r}")
        self._kept = mode == "all_kept"

    def randrange(self, stop: int, /) -> int:
        return 0 if self._kept else stop - 1


# -- power loss ------------------------------------------------------------------------------------


def _overlay(content: bytearray, offset: int, data: bytes | None) -> None:
    if offset > len(content):
        content.extend(bytes(offset - len(content)))
    if data is None:
        del content[offset:]
    else:
        content[offset : offset + len(data)] = data


def _survive(content: bytearray, offset: int, data: bytes | None, choose: Chooser) -> None:
    """Apply one unsynced write: kept, zeroed in part, cut short, or lost. A cut is kept or lost."""
    if data is None:
        if choose.randrange(2) == 0:
            _overlay(content, offset, None)
        return
    fate = choose.randrange(4)
    if fate == 0:
        _overlay(content, offset, data)
    elif fate == 1:
        zeroed = bytearray(data)
        blocks = -(-len(data) // BLOCK_BYTES)
        first = choose.randrange(blocks)
        last = first + choose.randrange(blocks - first)
        until = min((last + 1) * BLOCK_BYTES, len(data))
        zeroed[first * BLOCK_BYTES : until] = bytes(until - first * BLOCK_BYTES)
        _overlay(content, offset, bytes(zeroed))
    elif fate == 2:
        _overlay(content, offset, data[: len(data) - 1 - choose.randrange(len(data))])


def _lose_names(root: _Dir, dirty: list[_Dir], choose: Chooser) -> None:
    """Give every name of a dirty directory one of its states.

    Then keep the promise about renames: a durable node that was not removed is found at one place.
    """
    places = _places(root)  # the present places, before any choice
    current = {directory: directory.entries for directory in dirty}
    for directory in dirty:
        chosen = dict(directory.entries)
        for name, states in directory.history.items():
            _let(chosen, name, states[len(states) - 1 - choose.randrange(len(states))])
        directory.entries = chosen
    while lost := _lost(root, places):
        node = lost
        while node is not root:  # its present name, and those of the directories above it
            parent, name = places[node]
            _let(parent.entries, name, current.get(parent, parent.entries)[name])
            node = parent
    for directory in dirty:
        directory.history.clear()
    _separate(root, set(), ())
    for _, node in _walk(root):
        node.anchored = True


def _let(entries: dict[str, _Node], name: str, node: _Node | None) -> None:
    if node is None:
        entries.pop(name, None)
    else:
        entries[name] = node


def _places(root: _Dir) -> dict[_Node, tuple[_Dir, str]]:
    """The places of all nodes below ``root``: a directory that holds the node, and the name there."""
    places: dict[_Node, tuple[_Dir, str]] = {}
    pending = [root]
    while pending:
        directory = pending.pop()
        for name, node in directory.entries.items():
            if node not in places:
                places[node] = (directory, name)
                if isinstance(node, _Dir):
                    pending.append(node)
    return places


def _lost(root: _Dir, places: dict[_Node, tuple[_Dir, str]]) -> _Node | None:
    """A node that was durable, was never removed, and cannot be reached; None if there is none."""
    reachable = _places(root)
    return next((n for n in places if n.anchored and n not in reachable), None)


def _separate(directory: _Dir, seen: set[_Dir], above: tuple[_Dir, ...]) -> None:
    """Replace a directory that is reached twice by a copy at the second place; cut cycles."""
    for name, node in list(directory.entries.items()):
        if not isinstance(node, _Dir):
            continue
        if node is directory or node in above:
            del directory.entries[name]
            continue
        if node in seen:
            copy = _Dir(node.device)
            copy.entries = dict(node.entries)
            directory.entries[name] = node = copy
        seen.add(node)
        _separate(node, seen, (*above, directory))


def _anchor(directory: _Dir) -> None:
    """Mark the durable nodes below a durable directory as durable."""
    directory.anchored = True
    for node in directory.durable_entries():
        if not node.anchored:
            node.anchored = True
            if isinstance(node, _Dir):
                _anchor(node)


# -- small things ----------------------------------------------------------------------------------


def _error(code: int, path: str | None = None, other: str | None = None) -> OSError:
    return OSError(code, os.strerror(code), path, None, other)


@functools.lru_cache(maxsize=4096)
def _checked_name(name: str) -> str:
    if len(os.fsencode(name)) > _NAME_BYTES:
        raise _error(errno.ENAMETOOLONG, name)
    return name


def _existing(directory: _Dir, name: str, path: str) -> _Node:
    node = directory.entries.get(name)
    if node is None:
        raise _error(errno.ENOENT, path)
    return node


def _not_a_directory(node: _Node | None) -> int:
    if node is None:
        return errno.ENOENT
    return errno.ELOOP if isinstance(node, _Symlink) else errno.ENOTDIR


def _not_regular(node: _Node) -> int:
    return errno.ELOOP if isinstance(node, _Symlink) else errno.EINVAL


def _replace_error(node: _Node, old: _Node) -> int:
    """The errno that forbids ``node`` to replace ``old`` in a rename; 0 if it may."""
    if not isinstance(old, _Dir):
        return errno.ENOTDIR if isinstance(node, _Dir) else 0
    if not isinstance(node, _Dir):
        return errno.EISDIR
    return errno.ENOTEMPTY if old.entries else 0


def _is_mount(node: _Node | None) -> bool:
    return isinstance(node, _Dir) and node.device != _DEVICE


def _inside(directory: _Dir) -> set[_Dir]:
    """``directory`` and every directory below it."""
    return {directory} | {node for _, node in _walk(directory) if isinstance(node, _Dir)}


def _walk(directory: _Dir, prefix: str = "") -> Iterator[tuple[str, _Node]]:
    for name, node in directory.entries.items():
        yield prefix + name, node
        if isinstance(node, _Dir):
            yield from _walk(node, f"{prefix}{name}/")


def _shown(node: _Node) -> bytes | str | None:
    if isinstance(node, _File):
        return bytes(node.data)
    return f"-> {node.target}" if isinstance(node, _Symlink) else None


def _file_stat(node: _Node) -> FileStat:
    if isinstance(node, _File):
        return FileStat("file", len(node.data), _DEVICE)
    if isinstance(node, _Dir):
        return FileStat("dir", 0, node.device)
    return FileStat("symlink", len(os.fsencode(node.target)), _DEVICE)


def _copy(node: _Node, copies: dict[_Node, _Node]) -> _Node:
    """A deep copy that keeps hard links, histories and unsynced writes."""
    if node in copies:
        return copies[node]
    copy: _Node
    if isinstance(node, _Symlink):
        copy = copies[node] = _Symlink(node.target)
    elif isinstance(node, _File):
        copy = copies[node] = _File(node.data)
        copy.base, copy.writes, copy.ghost = node.base, list(node.writes), node.ghost
    else:
        copy = copies[node] = _Dir(node.device)
        copy.entries = {name: _copy(inner, copies) for name, inner in node.entries.items()}
        copy.history = {
            name: [state and _copy(state, copies) for state in states]
            for name, states in node.history.items()
        }
    copy.anchored = node.anchored
    return copy
