"""Waits for names that another process made: a network file system may show them late (F9)."""

from __future__ import annotations

from dataclasses import dataclass

from ckptfsm.core.backoff import pauses
from ckptfsm.core.ports import Clock, FileStat, Storage
from ckptfsm.disk.durable import lookup


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
