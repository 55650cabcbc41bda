"""``OneByOne``: the calls of the storage port that look at many files, by the calls for one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ckptfsm.core.ports import FileKind, FileStat


class OneByOne:
    """The base of a storage that counts, replaces or fails the calls for one file."""

    def entries(self: Any, path: str) -> Iterator[tuple[str, FileStat]]:
        for name in self.listdir(path):
            try:
                stat = self.stat(_inside(path, name))
            except FileNotFoundError:
                continue
            yield name, stat

    def kinds(self: Any, path: str) -> Iterator[tuple[str, FileKind]]:
        return ((name, stat.kind) for name, stat in self.entries(path))

    def read_each(
        self: Any, directory: str, names: Iterable[str], limit: int
    ) -> Iterator[tuple[str, bytes]]:
        for name in names:
            try:
                content = self.read(_inside(directory, name), limit)
            except FileNotFoundError:
                continue
            yield name, content


def _inside(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
