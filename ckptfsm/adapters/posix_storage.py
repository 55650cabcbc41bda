"""The real disk: ``PosixStorage``, the ``Storage`` port on Linux system calls.

Every call is relative to a descriptor of the root, and follows no symbolic link, not even one that was
swapped in a moment ago. So nothing outside the root can be touched. Nothing is changed on another device
than the root's: ``EXDEV``. Only regular files are opened, so that a FIFO or a device hangs nothing.
Errors are ``OSError`` with ``errno``; ``filename`` is the path relative to the root.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import grp
import os
import pwd
import re
import stat as modes
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import xxhash

from ckptfsm.adapters.abilities import required
from ckptfsm.adapters.memory import NO_SUCH_CALL
from ckptfsm.core.errors import ConfigError, NotPermitted, StorageError, describe
from ckptfsm.core.layout import LAYOUTS, MANIFEST, PRIVATE, TRACKER
from ckptfsm.core.ports import FileKind, FileStat

DIGEST_PREFIX = "xxh3_128:"

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_EXCLUSIVE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_REGULAR = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_READ_BYTES = 1 << 20  # one read; the limit of a document may be far larger than the document
_DIGEST_BYTES = 4 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_long,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
)
_LIBC.syscall.restype = ctypes.c_long
_OPENAT2 = 437  # on every architecture
_CANNOT_ALLOCATE = NO_SUCH_CALL | {errno.EOPNOTSUPP}

# A single slash is enough: ``str(Path("s3://bucket"))`` is "s3:/bucket".
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_NO_NAMES = frozenset({"", ".", ".."})
_KINDS: Mapping[int, FileKind] = MappingProxyType(
    {modes.S_IFREG: "file", modes.S_IFDIR: "dir", modes.S_IFLNK: "symlink"}
)


# ``struct open_how`` of openat2(2): flags, mode and resolve, which is RESOLVE_NO_XDEV,
# RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS and RESOLVE_BENEATH.
_BENEATH = struct.pack("QQQ", _DIRECTORY, 0, 0x01 | 0x02 | 0x04 | 0x08)

T = TypeVar("T")
_Inode = tuple[int, int]  # st_dev, st_ino


class _ProcessLocks:
    """The inodes this process holds a record lock on. Process-wide, because the locks are.

    They are not opened again: closing *any* descriptor of a locked file drops the lock.
    """

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.held: set[_Inode] = set()

    def forget(self) -> None:
        """Reset in a forked child, which holds none of the locks; the mutex may be locked for good."""
        self.mutex = threading.Lock()
        self.held = set()


_locks = _ProcessLocks()
os.register_at_fork(after_in_child=_locks.forget)


@functools.lru_cache(maxsize=4096)
def split_path(path: str) -> tuple[str, ...]:
    """The components of a path relative to the root; none for the root itself.

    Raises ``ConfigError`` for an absolute path, an empty, ``.`` or ``..`` component, or a NUL.
    """
    if path == "":
        return ()
    pieces = tuple(path.split("/"))
    if "\0" in path or not _NO_NAMES.isdisjoint(pieces):
        raise ConfigError("not a path inside the store", path=path)
    return pieces


def split_entry(path: str) -> tuple[str, ...]:
    """As ``split_path``, for calls that cannot be made on the root itself."""
    pieces = split_path(path)
    if not pieces:
        raise ConfigError("the root itself is not an entry of the store", path=path)
    return pieces


class PosixStorage:
    """``Storage`` on a directory of a Linux file system. Usable from several threads.

    Handles are file descriptors, all close-on-exec. A forked writer keeps using the instance (it
    must not close ``fileno_of_root()``), but it does not have the locks.
    """

    root: str

    def __init__(self, root: str | os.PathLike[str], *, create: bool = True) -> None:
        """Open ``root``; with ``create``, make it and its missing parents, durably.

        Raises ``ConfigError`` (``root``, ``reason``) where the root is a symbolic link, is not a
        directory, or is missing and ``create`` is False. A URL is refused, and so is a path that
        only a shell would expand.
        """
        text = os.fspath(root)
        _require_local_path(text)
        self.root = _absolute(text)
        if create:
            _make_durable_dirs(self.root)
        self._use(_open_root(self.root))

    @classmethod
    def of_descriptor(cls, root: str, descriptor: int) -> PosixStorage:
        """A storage on an opened directory, which is the storage's from now on: also if it was moved."""
        storage = cls.__new__(cls)
        storage.root = root
        storage._use(descriptor)
        return storage

    def _use(self, root_fd: int) -> None:
        self._root_fd = root_fd
        self._device = os.fstat(root_fd).st_dev
        self._open: dict[int, str] = {}  # handle -> path, for messages
        self._direct: set[int] = set()  # handles that were opened so; some are ordinary by now
        self._lock_inodes: dict[int, _Inode] = {}

    def fileno_of_root(self) -> int:
        """The descriptor every call is relative to; -1 once closed."""
        return self._root_fd

    def descriptors(self) -> tuple[int, ...]:
        """The root's alone: a forked writer opens its files anew and does not have the locks."""
        return () if self._root_fd < 0 else (self._root_fd,)

    def absolute(self, path: str) -> str:
        """See ``ports.Storage``. All other calls go to the opened directory, even if it was moved."""
        try:
            found, problem = _inode(os.stat(self.root, follow_symlinks=False)), ""
        except OSError as error:
            found, problem = None, f" ({describe(error)})"
        if found != _inode(os.fstat(self._root_fd)):
            raise StorageError(
                f"{self.root} is not the directory that was opened any more{problem}: it was "
                "moved or mounted anew, or a link above it was changed",
                file=self.root,
            )
        return "/".join((self.root, *split_path(path)))

    def close_root(self) -> None:
        """Close the root's descriptor; every later call fails with ``EBADF``. Idempotent."""
        fd, self._root_fd = self._root_fd, -1
        if fd >= 0:
            os.close(fd)

    # -- files ---------------------------------------------------------------------------------

    def open_exclusive(self, path: str, *, direct: bool = False) -> int:
        with self._place(path, changes=True) as (parent, name):
            # Set to direct afterwards: with both flags, it may be created and fail all the same.
            fd = os.open(name, _EXCLUSIVE, 0o666, dir_fd=parent)
            return self._opened(fd, path, direct)

    def open_existing(self, path: str) -> int:
        return self.open_reading(path)

    def open_reading(self, path: str, *, direct: bool = False) -> int:
        with self._place(path) as (parent, name):
            return self._opened(_open_regular(parent, name), path, direct)

    def _opened(self, fd: int, path: str, direct: bool) -> int:
        """Note a new handle; with ``direct``, set it so where the file system can."""
        if direct:
            try:
                _make_direct(fd)
            except BaseException:
                os.close(fd)
                raise
            self._direct.add(fd)
        self._open[fd] = path
        return fd

    def write(self, handle: int, data: bytes | memoryview) -> int:
        return self._transfer(handle, os.write, data)

    def pwrite(self, handle: int, data: bytes | memoryview, offset: int) -> int:
        return self._transfer(handle, os.pwrite, data, offset)

    def pread(self, handle: int, into: memoryview, offset: int) -> int:
        return self._transfer(handle, _pread, into, offset)

    def _transfer(self, handle: int, call: Callable[..., int], *arguments: Any) -> int:
        """Read or write; where that is refused directly, make the handle ordinary and try again."""
        try:
            return self._call(handle, call, *arguments)
        except OSError as error:
            # No look at the flag: another thread's refused call may have cleared it meanwhile.
            if error.errno != errno.EINVAL or handle not in self._direct:
                raise
        _make_ordinary(handle)
        return self._call(handle, call, *arguments)

    def _call(self, handle: int, call: Callable[..., T], *arguments: Any) -> T:
        """Make a system call on an open handle."""
        path = self._open.get(handle)
        if path is None:
            raise OSError(errno.EBADF, "not an open handle of this storage")
        try:
            return call(handle, *arguments)
        except OSError as error:
            error.filename = path
            raise

    def allocate(self, handle: int, size: int) -> bool:
        return self._call(handle, _allocate, size)

    def truncate(self, handle: int, size: int) -> None:
        self._call(handle, os.ftruncate, size)

    def fsync(self, handle: int) -> None:
        self._call(handle, os.fsync)

    def close(self, handle: int) -> None:
        self._call(handle, self._close)

    def _close(self, handle: int) -> None:
        # Forgotten first: Linux releases the descriptor even when close fails, and a second
        # close could hit a file that another thread opened in between.
        del self._open[handle]
        self._direct.discard(handle)
        os.close(handle)

    def read(self, path: str, limit: int, offset: int = 0) -> bytes:
        with self._place(path) as (parent, name), _regular(parent, name) as fd:
            return _read_up_to(fd, limit, offset)

    def read_each(
        self, directory: str, names: Iterable[str], limit: int
    ) -> Iterator[tuple[str, bytes]]:
        with (
            contextlib.suppress(FileNotFoundError),  # the directory does not exist
            self._directory(directory) as (parent, _),
        ):
            for name in names:
                if "/" in name or "\0" in name or name in _NO_NAMES:
                    raise ConfigError("not a name in a directory", path=name)
                try:
                    with _regular(parent, name) as fd:
                        content = _read_up_to(fd, limit, 0)
                except FileNotFoundError:
                    continue
                yield name, content

    def digest(self, path: str) -> str:
        with self._place(path) as (parent, name), _regular(parent, name) as fd:
            return _digest(fd)

    # -- names ---------------------------------------------------------------------------------

    def rename(self, src: str, dst: str) -> None:
        with self._two_places(src, dst) as (at, old, to, new):
            os.rename(old, new, src_dir_fd=at, dst_dir_fd=to)

    def link(self, src: str, dst: str) -> None:
        with self._two_places(src, dst) as (at, old, to, new):
            os.link(old, new, src_dir_fd=at, dst_dir_fd=to, follow_symlinks=False)

    def mkdir(self, path: str) -> None:
        with self._place(path, changes=True) as (parent, name):
            os.mkdir(name, 0o777, dir_fd=parent)
            if path.rpartition("/")[0] == PRIVATE:
                _let_group_write(parent, name)

    def rmdir(self, path: str) -> None:
        with self._place(path, changes=True) as (parent, name):
            os.rmdir(name, dir_fd=parent)

    def unlink(self, path: str) -> None:
        with self._place(path, changes=True) as (parent, name):
            os.unlink(name, dir_fd=parent)

    def touch(self, path: str) -> None:
        with self._place(path, changes=True) as (parent, name):
            os.utime(name, dir_fd=parent, follow_symlinks=False)

    def fsync_dir(self, path: str) -> None:
        with self._directory(path) as (fd, _):
            os.fsync(fd)

    def listdir(self, path: str) -> list[str]:
        with self._listing(path) as found:
            return sorted(entry.name for entry in found)

    def entries(self, path: str) -> Iterator[tuple[str, FileStat]]:
        with self._listing(path) as found:
            yield from _with_stats(found)

    def kinds(self, path: str) -> Iterator[tuple[str, FileKind]]:
        with self._listing(path) as found:
            for entry in found:
                if entry.is_file(follow_symlinks=False):
                    yield entry.name, "file"
                elif entry.is_dir(follow_symlinks=False):
                    yield entry.name, "dir"
                else:
                    yield from ((name, stat.kind) for name, stat in _with_stats((entry,)))

    @contextmanager
    def _listing(self, path: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        """A new description of a directory: the root's has one position for all threads and forks.

        Through the root's, btrfs shows only the names of the previous listing.
        """
        with self._directory(path) as (fd, _):
            if path:  # opened just now, for this alone
                with os.scandir(fd) as found:
                    yield found
                return
            own = os.open(".", _DIRECTORY, dir_fd=fd)
            try:
                with os.scandir(own) as found:
                    yield found
            finally:
                os.close(own)

    def stat(self, path: str) -> FileStat:
        if not path:
            with self._directory(path) as (fd, _):
                return _file_stat(os.fstat(fd))
        with self._place(path) as (parent, name):
            return _file_stat(os.stat(name, dir_fd=parent, follow_symlinks=False))

    def free_bytes(self) -> int:
        found = os.fstatvfs(self._root_fd)
        return found.f_bavail * found.f_frsize

    # -- the liveness lock ---------------------------------------------------------------------

    def try_lock(self, path: str) -> int | None:
        with self._place(path, changes=True) as (parent, name), _locks.mutex:
            if _regular_inode(parent, name) in _locks.held:
                return None  # opening the file and closing it again would drop the lock we have
            fd = os.open(name, _LOCK, 0o666, dir_fd=parent)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                inode = _inode(os.fstat(fd))
                if _regular_inode(parent, name) != inode:  # else two could each lock "the" file
                    raise OSError(errno.ESTALE, "the lock file was replaced")
            except BaseException as error:
                os.close(fd)
                if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EAGAIN):
                    return None
                raise
            _locks.held.add(inode)
            self._lock_inodes[fd] = inode
            return fd

    def unlock(self, handle: int) -> None:
        with _locks.mutex:
            inode = self._lock_inodes.pop(handle, None)
            if inode is None:
                raise OSError(errno.EBADF, "not a lock of this storage")
            _locks.held.discard(inode)
            os.close(handle)  # releases the lock; in a forked child only the copy is closed

    # -- the walk ------------------------------------------------------------------------------

    def _place(self, path: str, *, changes: bool = False) -> _OpenDirectory:
        """The directory of an entry, and its name there."""
        pieces = split_entry(path)
        return _OpenDirectory(self, path, pieces[:-1], pieces[-1], changes)

    def _directory(self, path: str) -> _OpenDirectory:
        """A directory, to look into."""
        return _OpenDirectory(self, path, split_path(path), "", False)

    @contextmanager
    def _two_places(self, src: str, dst: str) -> Iterator[tuple[int, str, int, str]]:
        """The places of both names of a rename or link."""
        try:
            with (
                self._place(src, changes=True) as (at, old),
                self._place(dst, changes=True) as (to, new),
            ):
                yield at, old, to, new
        except OSError as error:
            error.filename, error.filename2 = src, dst
            raise

    def reach(self, pieces: tuple[str, ...], changes: bool) -> int:
        """Open the directory ``pieces``: in one call where the kernel can, else piece by piece.

        The walk alone decides about errors. The root itself is given as it is: nobody closes it.
        """
        root = self._root_fd
        if root < 0:  # os.listdir(-1) would list the working directory
            raise OSError(errno.EBADF, "the storage is closed")
        found = _open_beneath(root, pieces) if pieces else root
        if found is None:
            return self._walk(root, pieces, changes)
        if changes and pieces and os.fstat(found).st_dev != self._device:
            os.close(found)
            return self._walk(root, pieces, changes)
        return found

    def _walk(self, root: int, pieces: tuple[str, ...], changes: bool) -> int:
        """Open the directory ``pieces``, one piece after the other."""
        fd = root
        try:
            for piece in pieces:
                outer, fd = fd, _open_directory(fd, piece)
                if outer != root:
                    os.close(outer)
                if changes and os.fstat(fd).st_dev != self._device:
                    raise OSError(errno.EXDEV, "on another device than the root")
        except BaseException:
            if fd != root:
                os.close(fd)
            raise
        return fd

    def explain(self, error: OSError, path: str) -> None:
        """Name the path in an error; where rights decided, also whose the file and its directory are."""
        error.filename = path
        plain = error.errno is not None and error.strerror == os.strerror(error.errno)
        if error.errno not in (errno.EACCES, errno.EPERM) or not plain:
            return
        places = [each for each in (path.rpartition("/")[0], path) if each]
        told = [words for each in places or [""] if (words := self._described(each))]
        error.strerror = f"{error.strerror} ({', '.join(told)})"

    def _described(self, path: str) -> str:
        """The owner, group and mode of a file; "" if that cannot be seen."""
        try:
            found = os.stat(path or ".", dir_fd=self._root_fd, follow_symlinks=False)
        except OSError:
            return ""
        place = f"{self.root}/{path}" if path else self.root
        return f"{place}: {_whose(found)}"


class _OpenDirectory:
    """A directory of a storage that is open in a block, and a name in it.

    Not a ``contextmanager``: ten looks are made for every checkpoint, and this costs half as much.
    """

    __slots__ = ("_changes", "_fd", "_name", "_path", "_pieces", "_storage")

    def __init__(
        self, storage: PosixStorage, path: str, pieces: tuple[str, ...], name: str, changes: bool
    ) -> None:
        self._storage, self._path, self._pieces = storage, path, pieces
        self._name, self._changes = name, changes

    def __enter__(self) -> tuple[int, str]:
        try:
            self._fd = self._storage.reach(self._pieces, self._changes)
        except OSError as error:
            self._storage.explain(error, self._path)
            raise
        return self._fd, self._name

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._pieces:
            os.close(self._fd)
        if isinstance(error, OSError):
            self._storage.explain(error, self._path)


def _open_beneath(root: int, pieces: tuple[str, ...]) -> int | None:
    """Open a directory below ``root`` by openat2(2); None if that fails for any reason.

    The kernel refuses links and mount points on the way.
    """
    path = os.fsencode("/".join(pieces))
    fd: int = _LIBC.syscall(_OPENAT2, root, path, _BENEATH, len(_BENEATH))
    return fd if fd >= 0 else None


def _open_directory(parent: int, name: str) -> int:
    """Open a subdirectory, never through a symbolic link."""
    try:
        return os.open(name, _DIRECTORY, dir_fd=parent)
    except NotADirectoryError:
        # The kernel says ENOTDIR for a link too, and callers take that for "nothing there".
        if modes.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
        raise


def _let_group_write(parent: int, name: str) -> None:
    """Let the group write into a new directory if it may write into ``parent``: for requests."""
    if not os.fstat(parent).st_mode & modes.S_IWGRP:
        return
    fd = _open_directory(parent, name)
    try:
        os.fchmod(fd, modes.S_IMODE(os.fstat(fd).st_mode) | modes.S_IRWXG)
    finally:
        os.close(fd)


def _whose(found: os.stat_result) -> str:
    """The owner, group and mode of a file, in words."""
    try:
        user = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        user = str(found.st_uid)
    try:
        group = grp.getgrgid(found.st_gid).gr_name
    except KeyError:
        group = str(found.st_gid)
    return f"user {user}, group {group}, mode {modes.filemode(found.st_mode)}"


def _inode(found: os.stat_result) -> _Inode:
    return (found.st_dev, found.st_ino)


def _regular_inode(parent: int, name: str) -> _Inode | None:
    """The inode at ``name``, None where there is nothing; raises if it is no regular file."""
    try:
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if modes.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if not modes.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    return _inode(found)


def _open_regular(parent: int, name: str) -> int:
    """Open a regular file for reading. Looks first: opening some devices has effects."""
    if _regular_inode(parent, name) in _locks.held:
        raise OSError(errno.EBUSY, "locked by this process: closing it again would drop the lock")
    fd = os.open(name, _REGULAR, dir_fd=parent)
    if not modes.S_ISREG(os.fstat(fd).st_mode):  # swapped since we looked
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file")
    return fd


@contextmanager
def _regular(parent: int, name: str) -> Iterator[int]:
    """A regular file, open for reading in a block."""
    fd = _open_regular(parent, name)
    try:
        yield fd
    finally:
        os.close(fd)


def _make_direct(fd: int) -> None:
    """Let reads and writes go past the page cache, where the file system can."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def _make_ordinary(fd: int) -> None:
    """Let reads and writes go through the page cache again."""
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)


def _pread(fd: int, into: memoryview, offset: int) -> int:
    if offset < 0:  # preadv takes -1 for the handle's position
        raise OSError(errno.EINVAL, "negative offset")
    return os.preadv(fd, [into], offset)


def _allocate(fd: int, size: int) -> bool:
    """Call fallocate(2), which never writes as ``posix_fallocate`` may. False where there is none."""
    if size < 0:
        raise OSError(errno.EINVAL, "negative size")
    while _LIBC.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
        code = ctypes.get_errno()
        if code in _CANNOT_ALLOCATE:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


def _read_up_to(fd: int, limit: int, offset: int) -> bytes:
    chunks: list[bytes] = []
    left = limit
    while left > 0 and (chunk := os.pread(fd, min(left, _READ_BYTES), offset)):
        chunks.append(chunk)
        offset += len(chunk)
        left -= len(chunk)
    return b"".join(chunks)


def digest_of(data: bytes | bytearray) -> str:
    """The digest of a file that holds exactly ``data``."""
    return DIGEST_PREFIX + xxhash.xxh3_128_hexdigest(data)


def _digest(fd: int) -> str:
    """Digest by reading, not by mmap: a file truncated under an mmap kills the process (SIGBUS)."""
    size = os.fstat(fd).st_size
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(max(1, min(size + 1, _DIGEST_BYTES))))
    total = 0
    while taken := os.preadv(fd, [buffer], total):
        total += taken
        if total > size:
            raise OSError(errno.EBUSY, "the file grows while it is digested")
        hasher.update(buffer[:taken])
    return DIGEST_PREFIX + hasher.hexdigest()


def _with_stats(found: Iterable[os.DirEntry[str]]) -> Iterator[tuple[str, FileStat]]:
    for entry in found:
        try:
            yield entry.name, _file_stat(entry.stat(follow_symlinks=False))
        except FileNotFoundError:
            continue  # it went since it was listed


def _file_stat(found: os.stat_result) -> FileStat:
    kind = _KINDS.get(modes.S_IFMT(found.st_mode), "other")
    return FileStat(kind, found.st_size, found.st_dev)


def _require_local_path(root: str) -> None:
    """Refuse text that means another place than the directory of that name."""
    if not root or "\0" in root:
        raise ConfigError("the root is not a path", root=root, reason="not_a_path")
    if _URL.match(root):
        raise ConfigError(
            f"the root {root} is a URL, and checkpoints are kept in a directory that all hosts mount: "
            f"give its path, or {os.path.abspath(root)} if a directory has that name",
            root=root,
            reason="url",
        )
    if root[0] in "~$":
        raise ConfigError(
            f"nothing expands {root[0]} in the root {root}: pass it through os.path.expanduser or "
            f"os.path.expandvars, or give {os.path.abspath(root)} if a directory has that name",
            root=root,
            reason="not_expanded",
        )


def refuse_checkpoint(root: str) -> None:
    """Refuse a root in a checkpoint or a private directory: it would go with the checkpoint.

    Raises ``ConfigError``.
    """
    _require_local_path(root)
    place = os.path.realpath(_absolute(root))
    while (above := os.path.dirname(place)) != place:
        name = os.path.basename(place)
        marks = [f"{place}/{MANIFEST}"]
        if any(layout.is_published(name) for layout in LAYOUTS.values()):
            marks += [f"{above}/{TRACKER}", f"{above}/{PRIVATE}"]
        if name == PRIVATE or any(map(os.path.lexists, marks)):
            raise ConfigError(
                f"the root {root} is a checkpoint of the root {above}, or lies in one: give that root, "
                f"or a directory outside {place}",
                root=root,
                reason="in_a_checkpoint",
            )
        place = above


def _absolute(root: str) -> str:
    try:
        return os.path.abspath(root)
    except FileNotFoundError:
        raise ConfigError(
            f"the working directory of this process was deleted, so the root {root} is nowhere: give an "
            "absolute path, or start in a directory that is there",
            root=root,
            reason="no_working_directory",
        ) from None


def _make_durable_dirs(root: str) -> None:
    """Create ``root`` and its missing parents, each fsynced in its parent."""
    missing: list[str] = []
    path = root
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for made in reversed(missing):
        try:
            os.mkdir(made, 0o777)
        except FileExistsError:
            pass  # another process was first; the directory may not be durable yet
        except NotADirectoryError:
            raise ConfigError(
                "a parent of the root is not a directory", root=root, reason="not_a_directory"
            ) from None
        with required("fsync of directories", os.path.dirname(made)):
            _fsync_path(os.path.dirname(made))


def _fsync_path(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _not_permitted(root: str, error: PermissionError) -> NotPermitted:
    """The error for a root that this user may not open."""
    try:
        whose = f" ({root}: {_whose(os.stat(root))})"
    except OSError:  # a directory above it keeps this user out
        whose = ""
    user, name = os.geteuid(), errno.errorcode[error.errno or errno.EACCES]
    said = f"open: user {user} may not: {os.strerror(error.errno or errno.EACCES)}{whose}"
    return NotPermitted(said, file=root, errno_name=name, call="open", user=user)


def _open_root(root: str) -> int:
    """Open the root itself; only its parents may be symbolic links."""
    try:
        return os.open(root, _DIRECTORY)
    except FileNotFoundError:
        raise ConfigError("the root does not exist", root=root, reason="missing") from None
    except PermissionError as error:
        raise _not_permitted(root, error) from error
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
    if os.path.islink(root):
        target = os.path.realpath(root)
        raise ConfigError(
            f"the root is a symbolic link; pass its target {target!r} instead",
            root=root,
            reason="symlink",
        )
    raise ConfigError("the root is not a directory", root=root, reason="not_a_directory")


def path_of(root: Any) -> str:
    """The path of a root, as text. Raises ``ConfigError`` for anything that is no path."""
    path = os.fspath(root) if isinstance(root, os.PathLike) else root
    if not isinstance(path, str):
        said = f"the root is a path, not {root!r}: give the directory of the checkpoints"
        raise ConfigError(said, reason="not_a_path")
    return path


@dataclass(frozen=True, slots=True)
class OpenPosix:
    """``Ports.open_storage`` on a real disk."""

    root: str

    def __call__(self, create: bool) -> PosixStorage:
        refuse_checkpoint(self.root)
        return PosixStorage(self.root, create=create)


@contextmanager
def opened_storage(place: str | os.PathLike[str]) -> Iterator[PosixStorage]:
    """The storage of a directory that exists, closed after the block."""
    storage = PosixStorage(place, create=False)
    try:
        yield storage
    finally:
        storage.close_root()
