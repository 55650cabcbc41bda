"""The two durable operations behind everything on disk: ``put`` a file, ``move`` a directory.

A crash before the rename of a ``put`` leaves the old content and a temporary file; after it, the new
content. A reader never sees a partial file. After a failed fsync a file is lost and never fsynced again;
a retry writes a new one. A rename whose outcome is unknown (``ESTALE`` on a network file system) is
decided by looking, never by assuming.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import attrgetter
from typing import TypeVar

from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import DamagedRoot, NotPermitted, StorageError
from ckptfsm.core.layout import DIRECTORIES, join
from ckptfsm.core.ports import FileKind, FileStat, Storage

T = TypeVar("T")
TEMPORARY = ".tmp-"
_TEMPORARIES = 100
SMALL_BYTES = 64 << 10
_MOST_ENTRIES = 5_000_000  # below a directory


def parent_of(path: str) -> str:
    """The directory of ``path``; "" is the root."""
    return path.rpartition("/")[0]


def is_temporary(path: str) -> bool:
    """True for the name of a file that ``put`` renames once it is whole."""
    return TEMPORARY in path.rpartition("/")[2]


def write_all(
    storage: Storage, handle: int, data: bytes | memoryview, offset: int | None = None
) -> None:
    """Write every byte of ``data``, at the handle's position or at ``offset``: a write may be short."""
    view = memoryview(data)
    while len(view):
        if offset is None:
            taken = storage.write(handle, view)
        else:
            taken = storage.pwrite(handle, view, offset)
            offset += taken
        if taken <= 0:
            raise OSError(errno.EIO, f"a write took {taken} of {len(view)} bytes")
        view = view[taken:]


def write_new(storage: Storage, path: str, data: bytes) -> None:
    """Create ``path`` with ``data`` and fsync it. The name itself is not durable yet."""
    handle = storage.open_exclusive(path)
    try:
        write_all(storage, handle, data)
        storage.fsync(handle)
    finally:
        storage.close(handle)


def put(
    storage: Storage, path: str, data: bytes, *, tag: str, check: Callable[[], None] | None = None
) -> None:
    """Make ``path`` hold ``data``, atomically and durably. ``check`` runs just before the rename.

    ``tag`` is unique to the writing process (epoch, pid, nonce), so that two processes never share
    a temporary name. A temporary file left by an error or a crash is never used again, as its fsync
    may have failed. Opening the root removes such files at its top, in the journal,
    and among pins and epochs. Leases expire, and an attempt is swept before it is published.
    """
    temporary = _write_temporary(storage, f"{path}{TEMPORARY}{tag}", data)
    if check is not None:
        check()
    try:
        storage.rename(temporary, path)
    except OSError:  # an unknown outcome is decided by looking at both names
        if lookup(storage, temporary) is not None or not content_is(storage, path, data):
            raise
    storage.fsync_dir(parent_of(path))


def _write_temporary(storage: Storage, base: str, data: bytes) -> str:
    for number in range(_TEMPORARIES):
        try:
            write = partial(write_new, storage, f"{base}.{number}", data)
            in_directory(storage, parent_of(base), write)
        except FileExistsError:
            continue
        return f"{base}.{number}"
    raise StorageError(f"{_TEMPORARIES} temporary files are left at {base}", file=base)


def in_directory(storage: Storage, directory: str, call: Callable[[], None]) -> None:
    """Make a call that needs ``directory``, maybe a private one.

    An empty private directory may have been purged. Then it is made anew, and the call made again.
    """
    try:
        call()
    except FileNotFoundError:
        if directory not in DIRECTORIES or lookup(storage, directory) is not None:
            raise
        make_dir(storage, directory)  # never its parent: that is not empty, so the root is gone
        storage.fsync_dir(parent_of(directory))
        call()


def fsync_private(storage: Storage, directory: str) -> None:
    """fsync a directory that may have been purged, because it was empty."""
    in_directory(storage, directory, partial(storage.fsync_dir, directory))


def fsync_existing(storage: Storage, path: str) -> None:
    """Make a file durable that another program wrote."""
    handle = storage.open_existing(path)
    try:
        storage.fsync(handle)
    finally:
        storage.close(handle)


def move(storage: Storage, src: str, dst: str) -> None:
    """Rename a directory (or file) durably. If it was renamed already, only make that durable."""
    try:
        in_directory(storage, parent_of(dst), partial(storage.rename, src, dst))
    except OSError:
        if lookup(storage, src) is not None or lookup(storage, dst) is None:
            raise
    if lookup(storage, src) is not None or lookup(storage, dst) is None:
        raise StorageError(f"rename of {src} to {dst} did not happen", file=src, call="rename")
    storage.fsync_dir(parent_of(dst))
    storage.fsync_dir(parent_of(src))


def is_about_content(error: OSError) -> bool:
    """True if an error describes the disk's content, not the disk's health.

    ``EIO`` or ``ESTALE`` describe the health: never conclude damage from them.
    """
    return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.EISDIR)


def lookup(storage: Storage, path: str) -> FileStat | None:
    """``stat``, or None if the name does not exist."""
    try:
        return storage.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_document(storage: Storage, path: str, limit: int) -> bytes:
    """The content of a file. Raises ``DamagedRoot`` for one of more than ``limit`` bytes.

    Nothing but the beginning of such a file is read. A small one costs a single call.
    """
    beginning = storage.read(path, SMALL_BYTES)
    if len(beginning) < min(SMALL_BYTES, limit):
        return beginning
    size = storage.stat(path).size
    if size > limit:
        raise DamagedRoot(
            f"a file of {size} bytes, more than the {limit} it can have", file=path, bytes=size
        )
    return storage.read(path, limit)


def make_dirs(storage: Storage, path: str, *, base: str = "") -> None:
    """Create ``path`` below ``base``, each directory made durable in its parent.

    ``base`` must exist: a late writer must not recreate a directory that was moved away.
    """
    made = base
    for piece in path.split("/"):
        parent, made = made, f"{made}/{piece}" if made else piece
        make_dir(storage, made)
        storage.fsync_dir(parent)  # also when it was there: a crash may have come before its fsync


def make_dir(storage: Storage, path: str) -> None:
    """Create one directory unless it is there. Its name is not durable yet."""
    try:
        storage.mkdir(path)
    except FileExistsError:
        if storage.stat(path).kind != "dir":
            raise


def list_names(storage: Storage, path: str) -> list[str]:
    """Names in a directory; empty if there is no directory."""
    try:
        return storage.listdir(path)
    except FileNotFoundError:
        return []


def walk_files(storage: Storage, directory: str) -> list[tuple[str, FileStat]]:
    """All entries below ``directory`` except directories, sorted. See ``each_file``."""
    return sorted(each_file(storage, directory))


def each_file(
    storage: Storage, directory: str, *, besides: str | None = None
) -> Iterator[tuple[str, FileStat]]:
    """All entries below ``directory`` except directories: (name relative to ``directory``, stat).

    ``besides`` is a directory in it that is left out. Nothing below ``directory`` may be changed
    meanwhile.
    """
    return _walk(storage.entries, attrgetter("kind"), directory, besides)


def each_kind(storage: Storage, directory: str) -> Iterator[tuple[str, FileKind]]:
    """As ``each_file``, with the kind alone: the files themselves are not looked at."""
    return _walk(storage.kinds, str, directory, None)


def _walk(
    look: Callable[[str], Iterator[tuple[str, T]]],
    kind_of: Callable[[T], str],
    directory: str,
    besides: str | None,
) -> Iterator[tuple[str, T]]:
    pending, count = [""], 0
    while pending:
        inner = pending.pop()
        base, prefix = (f"{directory}/{inner}", f"{inner}/") if inner else (directory, "")
        for name, found in look(base):
            if kind_of(found) != "dir":
                yield prefix + name, found
            elif prefix + name != besides:
                pending.append(prefix + name)
            count += 1
            if count > _MOST_ENTRIES:
                raise StorageError("more files than can be right", file=directory)


def fsync_tree_files(storage: Storage, directory: str) -> None:
    """Make the files below ``directory`` durable that another program wrote. No link is followed."""
    for name, stat in walk_files(storage, directory):
        if stat.kind == "file":
            fsync_existing(storage, f"{directory}/{name}")


def fsync_dirs_of(storage: Storage, directory: str, files: Iterable[FileEntry]) -> None:
    """fsync ``directory`` and the directories below it in which ``files`` lie, deepest first.

    Nothing is listed: a shared directory may have the files of thousands of ranks.
    """
    found = {""}
    for entry in files:
        inner = parent_of(entry.name)
        while inner not in found:
            found.add(inner)
            inner = parent_of(inner)
    for inner in sorted(found, reverse=True):
        storage.fsync_dir(join(directory, inner))


def fsync_tree_dirs(storage: Storage, directory: str) -> None:
    """fsync ``directory`` and every directory below it, deepest first."""
    for name, kind in storage.kinds(directory):
        if kind == "dir":
            fsync_tree_dirs(storage, f"{directory}/{name}")
    storage.fsync_dir(directory)


def is_refused(error: OSError) -> bool:
    """True if a user, or all users of a read-only mount, may not do it."""
    return isinstance(error, PermissionError) or error.errno == errno.EROFS


def storage_error(error: OSError, what: str, path: str | None = None) -> StorageError:
    """``error`` as a ``StorageError`` that names the file, the call and the errno."""
    if isinstance(error, StorageError):
        return error
    name = errno.errorcode.get(error.errno or 0)
    reason = os.strerror(error.errno) if error.errno else str(error)
    file = path or error.filename
    if is_refused(error):
        reason = error.strerror or reason  # the storage tells whose the file is
        user = os.geteuid()
        return NotPermitted(
            f"{what}: user {user} may not: {reason}",
            file=file,
            errno_name=name,
            call=what,
            user=user,
        )
    return StorageError(f"{what}: {reason}", file=file, errno_name=name, call=what)


def content_is(storage: Storage, path: str, data: bytes) -> bool:
    """True if ``path`` is a regular file that holds exactly ``data``."""
    found = lookup(storage, path)
    return found is not None and found.kind == "file" and storage.read(path, len(data) + 1) == data
