"""The ports of a real process: the system's clock, its threads, forked writers."""

from __future__ import annotations

from collections.abc import Callable

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.executor import ThreadExecutor
from ckptfsm.adapters.identity import this_process
from ckptfsm.adapters.signals import PosixDeferredSignals
from ckptfsm.core.ports import Driver, OffloadHook, Ports, Storage, Transport
from ckptfsm.writers.rank_writer import launch_forked


def system_ports(
    transport: Transport,
    driver: Driver,
    open_storage: Callable[[bool], Storage],
    staging: OffloadHook | None = None,
) -> Ports:
    """The ports of a real process, given its transport, driver and storage."""
    return Ports(
        transport,
        driver,
        SystemClock(),
        ThreadExecutor,
        open_storage,
        this_process,
        launch_forked,
        PosixDeferredSignals,
        staging,
    )
