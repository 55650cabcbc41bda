"""Owning a root for the time of one command, as any trainer would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.identity import this_process
from ckptfsm.adapters.posix_storage import OpenPosix
from ckptfsm.coordinator.coordinator import Coordinator, CoordinatorOptions
from ckptfsm.core.errors import RootBusy
from ckptfsm.core.evidence import Ownership
from ckptfsm.core.layout import Layout
from ckptfsm.core.requests import RecoveryReport
from ckptfsm.disk.overview import look, owner_of

OwnerEnded = Annotated[
    bool, typer.Option("--owner-ended", help="The owner, on another host, has ended for certain.")
]


@contextmanager
def owned(
    root: Path, *, ended: bool = False, layout: Layout | None = None
) -> Iterator[tuple[Coordinator, RecoveryReport]]:
    """Open a root with recovery, and close it in order. Retention keeps everything meanwhile.

    ``ended``: a person knows that an owner on another host has ended. Where the disk has no locks, a
    living one would be fenced. ``layout``: that of a root to be made in an empty directory.

    Raises ``RootBusy`` if the owner lives, or may live on another host, and ``ConfigError`` if only a
    trainer can complete a save.
    """
    storage = OpenPosix(str(root))(create=False)
    try:
        owner = owner_of(storage)
        if owner.ownership is Ownership.ELSEWHERE and not ended:
            raise RootBusy(
                f"{owner}: if it has ended for certain, give --owner-ended",
                root=storage.root,
                host=owner.host,
                pid=owner.pid,
            )
        coordinator = Coordinator(
            storage,
            clock=SystemClock(),
            identity=this_process(),
            options=CoordinatorOptions(
                layout=layout or look(storage).layout, root_wait_s=0.0, records_policy=False
            ),
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
