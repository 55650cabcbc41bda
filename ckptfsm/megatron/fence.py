"""Keeps a late writer of a ready-made request out of a directory that is another attempt's by now.

Such a request is written in place, by foreign code. A writer that was stopped, or outlived its job on
another rank, would overwrite the next job's save of the same step. So an audit hook looks for the mark
of the attempt before each file is opened. A process that is stopped in between opens one file late.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptfsm.core.errors import StorageError
from ckptfsm.core.layout import BEGUN, PRIVATE, STAGING, join
from ckptfsm.core.ports import Storage
from ckptfsm.disk.durable import list_names

_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_WATCHED = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"})


def stay_out_once_fenced(storage: Storage, location: str) -> None:
    """Forbid this writer process all changes below ``location`` once its mark is gone from there.

    No hook is needed in a staging directory, whose name is unique to the attempt. A hook cannot be
    removed: it lives as long as the writer.
    """
    if location.startswith(f"{STAGING}/"):
        return
    names = list_names(storage, join(location, PRIVATE))
    directory = Path(storage.absolute(location)).resolve()
    marks = [directory / PRIVATE / name for name in names if name.startswith(BEGUN)]
    sys.addaudithook(_Fence(directory, tuple(marks)))


@dataclass(frozen=True, slots=True)
class _Fence:
    """An audit hook. While all ``marks`` exist, the directory belongs to the writer."""

    directory: Path
    marks: tuple[Path, ...]

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _WATCHED or not isinstance(arguments[0], (str, bytes, os.PathLike)):
            return
        if event == "open" and not _changes(arguments[1], arguments[2]):
            return
        for path in arguments[: 2 if event == "os.rename" else 1]:
            self._look(Path(os.fsdecode(path)).resolve())

    def _look(self, path: Path) -> None:
        if not path.is_relative_to(self.directory):
            return
        if not self.marks or not all(mark.exists() for mark in self.marks):
            raise StorageError(
                f"{self.directory} is another attempt's by now: this old writer stays out",
                file=str(path),
            )


def _changes(mode: str | None, flags: int) -> bool:
    return bool(flags & _CHANGES) or any(letter in "wax+" for letter in mode or "")
