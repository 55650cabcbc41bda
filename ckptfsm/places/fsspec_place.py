"""A place for copies in any file system of fsspec. The only module with fsspec.

Credentials and other settings are those of fsspec's configuration. An object is written under another
name and moved, as a file that is closed after an error may be there in part. A file system with an
exclusive mode creates with it: of two that create an object, one is told of the other's. Others are
refused by the probe, see ``carrying``, unless one job alone writes there.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import fsspec  # type: ignore[import-untyped]

from ckptfsm.core.errors import CkptFsmError, ConfigError, PlaceFailed, describe
from ckptfsm.disk.durable import parent_of
from ckptfsm.places.streamed import StreamedPlace, temporary_of

_PIECE_BYTES = 4 << 20
_TRIES = 5
_PAUSE_S = 0.1
_EXCLUSIVE = {"sftp": "wxb", "ssh": "wxb"}  # paramiko opens "xb" for nothing


class FsspecPlace(StreamedPlace):
    """See ``place.CopyPlace``. Raises ``ConfigError`` for a scheme that fsspec does not have here."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._scheme = url.partition("://")[0].lower()
        self.where = re.sub("//[^/@]*@", "//", url).rstrip("/")  # without a password
        try:
            fsspec.get_filesystem_class(self._scheme)
        except ImportError as error:
            raise ConfigError(f"copies at {self.where}: {error}", key="copies") from error
        except ValueError as error:
            raise ConfigError(
                f"no place for copies is known at {self.where}: file://, hdfs://, s3://, gs://, az://, "
                "and the schemes of fsspec",
                key="copies",
            ) from error
        self._making = threading.Lock()
        self._made: set[str] = set()  # directories

    @property
    def _opened(self) -> tuple[Any, str]:
        """The file system, and the place's path in it. fsspec keeps one for each thread: paramiko's
        connections hang when two threads use one."""
        with self._named("", "connect"):
            system, path = fsspec.url_to_fs(self._url)
            return system, path.rstrip("/")

    def names(self) -> list[str]:
        rows = self._rows("")
        if rows is None:
            raise PlaceFailed(f"{self.where} is not there", place=self.where, call="ls")
        return [name for name, row in rows.items() if row["type"] == "directory"]

    def listed(self, directory: str) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for name, row in (self._rows(directory) or {}).items():
            if row["type"] == "directory":
                below = self.listed(f"{directory}/{name}")
                found |= {f"{name}/{each}": size for each, size in below.items()}
            else:
                found[name] = row["size"]
        return found

    def _rows(self, directory: str) -> dict[str, Any] | None:
        """What a directory has, by name; None if it is not there. ``find`` passes errors over."""
        system, path = self._opened[0], self._path(directory)
        with self._named(directory, "ls"):
            system.invalidate_cache()
            try:
                rows = system.ls(path, detail=True)
            except FileNotFoundError:
                return None
        own = path.strip("/")  # some list the directory itself, too
        names = ((row["name"].strip("/"), row) for row in rows)
        return {name.rpartition("/")[2]: row for name, row in names if name != own}

    def stream(self, name: str) -> Generator[bytes, None, None]:
        with (
            self._named(name, "read", missing=True),
            self._opened[0].open(self._path(name), "rb", block_size=_PIECE_BYTES) as file,
        ):
            while piece := file.read(_PIECE_BYTES):
                yield piece

    def create(self, name: str, data: bytes) -> bytes:
        self._make_parent(name)
        mode = _EXCLUSIVE.get(self._scheme, "xb")
        with self._named(name, "create"):
            try:
                with self._opened[0].open(self._path(name), mode) as file:
                    file.write(data)
            except (NotImplementedError, ValueError):  # no such mode
                self.put(name, iter([data]), len(data), "")
            except OSError:
                if self.read(name) is None:
                    raise
                # Another was first, whatever the error: a server of SFTP just tells "Failure".
        for number in range(_TRIES):
            if found := self.read(name):
                return found
            time.sleep(_PAUSE_S * number)  # the other one is about to write it
        said = f"{self.where}/{name} is empty: a copy was killed when it made it. Remove it"
        raise PlaceFailed(said, place=self.where, object=name)

    def put(self, name: str, pieces: Iterator[bytes], size: int, digest: str) -> None:
        self._make_parent(name)
        system, temporary = self._opened[0], temporary_of(name)
        try:
            with self._named(name, "write"):
                file = system.open(self._path(temporary), "wb", block_size=_PIECE_BYTES)
            try:
                for piece in pieces:
                    with self._named(name, "write"):
                        file.write(piece)
            finally:
                with self._named(name, "write"):
                    file.close()
            self._move(temporary, name)
        except BaseException:
            with suppress(PlaceFailed):  # the caller has the reason; the next copy sweeps
                self.remove(temporary)
            raise

    def _move(self, temporary: str, name: str) -> None:
        """Move an object to its name. One of that name goes only if they do not move over a file."""
        system, old, new = self._opened[0], self._path(temporary), self._path(name)
        with self._named(name, "move"):
            try:
                system.mv(old, new)
            except Exception:  # some have errors of their own
                # Another carrier of the attempt may have swept the temporary: its object stays.
                if not (system.exists(old) and system.exists(new)):
                    raise
                self.remove(name)
                system.mv(old, new)

    def remove(self, name: str) -> None:
        with self._named(name, "remove"), suppress(FileNotFoundError):
            self._opened[0].rm_file(self._path(name))

    def remove_empty(self, directory: str) -> None:
        rows = self._rows(directory)
        if rows is None or any(row["type"] != "directory" for row in rows.values()):
            return
        for name in rows:
            self.remove_empty(f"{directory}/{name}")
        self._made.discard(self._path(directory))
        with self._named(directory, "rmdir"):
            try:
                self._opened[0].rmdir(self._path(directory))
            except OSError:
                if self._rows(directory):  # another process has written there
                    return
                raise

    def _path(self, name: str) -> str:
        base = self._opened[1]
        return f"{base}/{name}" if name else base

    def _make_parent(self, name: str) -> None:
        parent = self._path(parent_of(name))
        with self._making:  # some look and then make, and fail beside another thread
            if parent not in self._made:
                with self._named(name, "mkdir"):
                    self._opened[0].makedirs(parent, exist_ok=True)
                self._made.add(parent)

    @contextmanager
    def _named(self, name: str, call: str, *, missing: bool = False) -> Iterator[None]:
        """Name place and object in errors of the file system, whose package may have its own.

        ``missing``: that an object is not there is the caller's to tell.
        """
        try:
            yield
        except CkptFsmError:
            raise
        except Exception as error:
            if missing and isinstance(error, FileNotFoundError):
                raise
            said = f"{self.where}/{name}: {call}: {describe(error)}"
            raise PlaceFailed(said, place=self.where, object=name, call=call) from error
