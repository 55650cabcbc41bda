"""Owning a root for the time of one command, as any trainer would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.identity import this_process
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.coordinator.coordinator import Coordinator, CoordinatorOptions
from ckptfsm.core.requests import RecoveryReport
from ckptfsm.disk.overview import look


@contextmanager
def owned(root: Path) -> Iterator[tuple[Coordinator, RecoveryReport]]:
    """Open a root with recovery, and close it in order. Retention keeps everything meanwhile.

    Raises ``RootBusy`` if the owner lives, and ``ConfigError`` if only a trainer can complete a save.
    """
    storage = PosixStorage(root, create=False)
    try:
        coordinator = Coordinator(
            storage,
            clock=SystemClock(),
            identity=this_process(),
            options=CoordinatorOptions(layout=look(storage).layout),
            finishers={},
            provenance={},
        )
        report = coordinator.open()
        try:
            yield coordinator, report
        finally:
            coordinator.close()
    finally:
        storage.close_root()
