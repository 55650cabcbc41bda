"""The port to a place for copies, and the choice of its implementation by a URL.

Names are relative to the place, as on disk: ``iter_0000100/.ckptfsm/manifest.json``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from importlib.util import find_spec
from typing import Protocol

from ckptfsm.core.errors import ConfigError
from ckptfsm.places.directory import DirectoryPlace
from ckptfsm.places.hdfs import HdfsPlace

OBJECT_STORES = ("s3", "s3a", "gs", "az", "abfs", "abfss")


class CopyPlace(Protocol):
    """A place for copies. Usable from several threads.

    Every call raises ``PlaceFailed`` if the place cannot be reached or refuses, and never takes that
    for "nothing is there". An object is there whole, or not at all.
    """

    @property
    def where(self) -> str:
        """The URL or path, for messages."""
        ...

    def names(self) -> list[str]:
        """The names of directories at the top of the place."""
        ...

    def listed(self, directory: str) -> Mapping[str, int]:
        """The bytes of each object below ``directory``, by its name relative to that."""
        ...

    def digest(self, name: str) -> str | None:
        """The digest of an object, as ``FileEntry`` has it; None if it has none or is not there."""
        ...

    def read(self, name: str) -> bytes | None:
        """A small object, None if there is none. Raises ``DamagedRoot`` for one that is too large."""
        ...

    def stream(self, name: str) -> Generator[bytes, None, None]:
        """The content of an object in pieces. Raises ``FileNotFoundError`` if there is none."""
        ...

    def create(self, name: str, data: bytes) -> bytes:
        """Create a small object unless it exists. Returns what is there then."""
        ...

    def replace(self, name: str, data: bytes, expected: bytes) -> bool:
        """Replace a small object that has the content ``expected``. False if it has another."""
        ...

    def put(self, name: str, pieces: Iterator[bytes], size: int, digest: str) -> None:
        """Make or replace an object of ``size`` bytes. If ``pieces`` raises, that is raised, and
        nothing appears."""
        ...

    def remove(self, name: str) -> None:
        """Remove an object, if it exists."""
        ...

    def remove_empty(self, directory: str) -> None:
        """Remove a directory with no object below it, where a place has directories. Others stay."""
        ...


def scheme_of(url: str) -> str:
    """The scheme of a URL in lower case; "" for a path."""
    scheme, slashes, _ = url.partition("://")
    return scheme.lower() if slashes else ""


def place_at(url: str) -> CopyPlace:
    """The place at a URL, such as ``s3://bucket/run``, ``hdfs://host/run``, or a path.

    Nothing is asked of a server yet. Raises ``ConfigError`` for a scheme that is not known, or if what
    it needs is not installed, and for a directory as ``DirectoryPlace``.
    """
    scheme = scheme_of(url)
    if scheme in ("", "file"):
        path = url[len("file://") :] if scheme else url
        if scheme and not path.startswith("/"):
            raise ConfigError(f"{url} names no path: write file:///path", key="copies", url=url)
        return DirectoryPlace(path)
    if scheme == "hdfs":
        return HdfsPlace(url)
    if scheme in OBJECT_STORES:
        _require("obstore", "'ckptfsm[s3]', with Python 3.11 or newer", url)
        from ckptfsm.places.object_store import ObjectPlace, store_at

        return ObjectPlace(store_at(url), url)
    _require("fsspec", "fsspec", url)
    from ckptfsm.places.fsspec_place import FsspecPlace

    return FsspecPlace(url)


def _require(package: str, what: str, url: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(
            f"copies at {url} need {package}: pip install {what}", key="copies", url=url
        )
