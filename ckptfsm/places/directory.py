"""A place for copies in a directory, such as a mounted file system of another machine.

An object is written under another name, fsynced, and renamed. One that may not exist yet is linked to
its name: of two that create it, one is told of the other's.
"""

from __future__ import annotations

import errno
import weakref
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.documents import MAX_DOCUMENT_BYTES
from ckptfsm.core.errors import CkptFsmError, ConfigError, PlaceFailed, describe
from ckptfsm.core.layout import JOURNAL
from ckptfsm.core.ports import Storage
from ckptfsm.disk.durable import (
    each_file,
    lookup,
    make_dirs,
    parent_of,
    read_document,
    write_all,
    write_new,
)
from ckptfsm.disk.trash import remove_empty, remove_marker
from ckptfsm.places.streamed import StreamedPlace, temporary_of

_PIECE_BYTES = 4 << 20
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)


class DirectoryPlace(StreamedPlace):
    """See ``place.CopyPlace``. The directory is never made: one that is not mounted is missing, too.

    Raises ``PlaceFailed`` if it is missing, and ``ConfigError`` if it lies in the root of a job.
    """

    def __init__(self, path: str) -> None:
        self.where = str(Path(path).expanduser().absolute())
        self._storage = self._opened()
        weakref.finalize(self, self._storage.close_root)

    def _opened(self) -> PosixStorage:
        try:
            storage = PosixStorage(self.where, create=False)
        except ConfigError as error:
            missing = error.facts.get("reason") == "missing"
            said = "there is no such directory" if missing else error.message
            raise PlaceFailed(
                f"{said}: is {self.where} mounted on this host? Before the first copy, make it",
                place=self.where,
            ) from error
        there = Path(storage.root).resolve()
        for above in (there, *there.parents):
            if (above / JOURNAL).exists():
                raise ConfigError(
                    f"{self.where} lies in {above}, the root of a job: copies need another directory",
                    key="copies",
                    url=self.where,
                )
        return storage

    def names(self) -> list[str]:
        with self._named(""):
            # A link too: nothing is read through it, which is told, and not passed over.
            return [name for name, kind in self._storage.kinds("") if kind != "file"]

    def listed(self, directory: str) -> Mapping[str, int]:
        with self._named(directory):
            if lookup(self._storage, directory) is None:
                return {}
            found = each_file(self._storage, directory)
            return {name: stat.size for name, stat in found if stat.kind == "file"}

    def digest(self, name: str) -> str | None:
        with self._named(name):
            found = lookup(self._storage, name)
            return self._storage.digest(name) if found and found.kind == "file" else None

    def stream(self, name: str) -> Generator[bytes, None, None]:
        with self._named(name, missing=True):
            handle = self._storage.open_reading(name)
            try:
                buffer, offset = memoryview(bytearray(_PIECE_BYTES)), 0
                while taken := self._storage.pread(handle, buffer, offset):
                    offset += taken
                    yield bytes(buffer[:taken])
            finally:
                self._storage.close(handle)

    def create(self, name: str, data: bytes) -> bytes:
        with self._named(name):
            self._make_parent(name)
            create_once(self._storage, name, data)
            return read_document(self._storage, name, MAX_DOCUMENT_BYTES)

    def put(self, name: str, pieces: Iterator[bytes], size: int, digest: str) -> None:
        with self._named(name):
            self._make_parent(name)
            temporary = temporary_of(name)
            handle = self._storage.open_exclusive(temporary)
            try:
                try:
                    for piece in pieces:
                        write_all(self._storage, handle, piece)
                    self._storage.fsync(handle)
                finally:
                    self._storage.close(handle)
                self._storage.rename(temporary, name)
            except BaseException:
                remove_marker(self._storage, temporary)
                raise
            self._storage.fsync_dir(parent_of(name))

    def remove(self, name: str) -> None:
        with self._named(name):
            remove_marker(self._storage, name)

    def remove_empty(self, directory: str) -> None:
        with self._named(directory):
            try:
                remove_empty(self._storage, directory)
            except OSError as error:
                if error.errno not in _NOT_EMPTY:
                    raise

    def _make_parent(self, name: str) -> None:
        if parent := parent_of(name):
            make_dirs(self._storage, parent)

    @contextmanager
    def _named(self, name: str, *, missing: bool = False) -> Iterator[None]:
        """Name place and object in errors of the system.

        ``missing``: that an object is not there is the caller's to tell.
        """
        try:
            yield
        except CkptFsmError:
            raise
        except OSError as error:
            if missing and isinstance(error, FileNotFoundError):
                raise
            said = f"{self.where}/{name}: {describe(error)}; is it mounted on this host?"
            raise PlaceFailed(said, place=self.where, object=name) from error


def create_once(storage: Storage, name: str, data: bytes) -> None:
    """Create a durable file, unless there is one: of several that try, one succeeds."""
    temporary = temporary_of(name)
    write_new(storage, temporary, data)
    try:
        storage.link(temporary, name)
    except FileExistsError:  # another was first
        pass
    finally:
        remove_marker(storage, temporary)
