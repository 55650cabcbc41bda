"""Calls of the storage port that look at many files, by the calls for one.

For storages that count, replace or fail the calls for one file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ckptfsm.core.ports import FileKind, FileStat


def entries_of(storage: Any, path: str) -> Iterator[tuple[str, FileStat]]:
    """``Storage.entries``, by ``listdir`` and ``stat``."""
    for name in storage.listdir(path):
        try:
            stat = storage.stat(_inside(path, name))
        except FileNotFoundError:
            continue
        yield name, stat


def kinds_of(storage: Any, path: str) -> Iterator[tuple[str, FileKind]]:
    """``Storage.kinds``, by ``listdir`` and ``stat``."""
    return ((name, stat.kind) for name, stat in entries_of(storage, path))


def contents_of(
    storage: Any, directory: str, names: Iterable[str], limit: int
) -> Iterator[tuple[str, bytes]]:
    """``Storage.read_each``, by ``read``."""
    for name in names:
        try:
            content = storage.read(_inside(directory, name), limit)
        except FileNotFoundError:
            continue
        yield name, content


def _inside(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory else name
