"""The ports of a real process: the system's clock, its threads, forked writers."""

from __future__ import annotations

from collections.abc import Callable

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.executor import ThreadExecutor
from ckptfsm.adapters.identity import this_process
from ckptfsm.adapters.signals import PosixDeferredSignals
from ckptfsm.core.ports import (
    Driver,
    Mailbox,
    Ports,
    Storage,
    Transport,
    no_mailbox,
    no_writers,
)
from ckptfsm.writers.rank_writer import launch_forked
from ckptfsm.writers.write_engine import WriteEngine


def system_ports(
    transport: Transport,
    driver: Driver,
    open_storage: Callable[[bool], Storage],
    engine: WriteEngine | None = None,
    mailbox: Callable[[], Mailbox | None] = no_mailbox,
) -> Ports:
    """The ports of a real process, given its transport, driver and storage.

    Writers are forked, or run by ``engine``.
    """
    return Ports(
        transport,
        driver,
        SystemClock(),
        ThreadExecutor,
        open_storage,
        this_process,
        launch_forked if engine is None else engine,
        PosixDeferredSignals,
        no_writers if engine is None else engine.close,
        mailbox,
    )
