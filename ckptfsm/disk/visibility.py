"""Waits for names that another process made: a network file system may show them late (F9)."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import Any, cast

from ckptfsm.core.backoff import pauses
from ckptfsm.core.errors import StorageError
from ckptfsm.core.ports import Clock, FileStat, Storage
from ckptfsm.disk.durable import lookup

VISIBILITY_S = 10.0  # the default, as of ``CheckpointConfig.visibility_timeout_s``


@dataclass(frozen=True, slots=True)
class Visibility:
    """How long a name is waited for: ``timeout_s`` seconds of ``clock``, 0 for a single look."""

    clock: Clock
    timeout_s: float

    def look(self, storage: Storage, path: str) -> FileStat | None:
        """``stat`` as soon as the name is there; None if it is not there in time."""
        deadline, pause = self.clock.monotonic() + self.timeout_s, pauses()
        while (found := lookup(storage, path)) is None and self.clock.monotonic() < deadline:
            self.clock.sleep(next(pause))
        return found

    def require(self, storage: Storage, path: str) -> None:
        """Return once the name is there. Raises ``StorageError`` if it is not there in time."""
        if self.look(storage, path) is None:
            raise StorageError(
                f"{path} is not visible on this host: another process made it, or has moved it away",
                file=path,
                call="stat",
                errno_name=errno.errorcode[errno.ENOENT],
                timeout_s=self.timeout_s,
            )

    def of_directories(self, storage: Storage) -> Storage:
        """``storage``; a directory that was made by another host meanwhile is there when ``mkdir``
        says so.
        """
        return cast(Storage, _Awaited(storage, self))


class _Awaited:
    """See ``Visibility.of_directories``. Every other call goes straight to the storage."""

    def __init__(self, storage: Storage, visibility: Visibility) -> None:
        self._storage, self._visibility = storage, visibility
        self._made_elsewhere: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def mkdir(self, path: str) -> None:
        try:
            self._storage.mkdir(path)
        except FileExistsError:
            self._made_elsewhere.add(path)  # costs no call: its maker looks at the kind anyway
            raise

    def stat(self, path: str) -> FileStat:
        if path not in self._made_elsewhere:
            return self._storage.stat(path)
        self._made_elsewhere.discard(path)
        found = self._visibility.look(self._storage, path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found
