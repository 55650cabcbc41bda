"""``CheckpointManager`` and ``GroupWorker``, wired to torch.distributed and a disk."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptfsm.adapters.posix_storage import OpenPosix, path_of
from ckptfsm.core.config import CheckpointConfig, Settings, config_of
from ckptfsm.core.ports import Driver, Ports, Storage
from ckptfsm.dcp.device_copies import DeviceCopies
from ckptfsm.dcp.driver import MEGATRON_CORE, StateDriver
from ckptfsm.dcp.gate import Gate, GatedMemory
from ckptfsm.dcp.mailbox import mailbox_of
from ckptfsm.dcp.state_format import DriverOptions
from ckptfsm.dcp.transport import transport_of
from ckptfsm.ranks.group_worker import BaseGroupWorker
from ckptfsm.ranks.manager import Manager
from ckptfsm.ranks.participant import Hook
from ckptfsm.ranks.wiring import system_ports
from ckptfsm.writers.write_engine import WriteEngine, WriteEngineSettings

if TYPE_CHECKING:
    from typing_extensions import Unpack


MakeDriver = Callable[[DriverOptions], Driver]

_FINISHERS = ("ckptfsm.dcp.metadata",)  # a group's first rank completes the part
_MEGATRONS = ("ckptfsm.megatron.torch_dist",)


class CheckpointManager(Manager, Gate):
    """The life of the checkpoints below ``root``, for one job.

    Construction is collective under torch.distributed (initialise it first); without it, a job of
    one process, and ``WORLD_SIZE`` must not be above 1. ``config`` (a model or a dict) or keyword
    arguments configure it, see ``CheckpointConfig``.

    - ``hooks`` are called with one frozen ``TransitionRecord`` per transition, on every rank that
      registers them. A crash may lose a call, but never repeats one. Exceptions of hooks are
      logged. A hook that is a ``Meter`` (``ckptfsm.core.notes``) also takes notes, such as stalls.
    - ``open_storage(create)`` replaces the storage adapter of this rank (``root`` is then only a
      name), for tests and fault injection.
    - ``driver(options)`` makes the ``Driver`` of this rank, for another kind of state than torch's
      and megatron-core's. It is read from a fork, unless its parts are ``portable``.

    Raises ``ConfigError``, ``RootBusy``, ``DamagedRoot``, ``StorageError``, on every rank.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        config: CheckpointConfig | Mapping[str, Any] | None = None,
        *,
        hooks: Sequence[Hook] = (),
        open_storage: Callable[[bool], Storage] | None = None,
        driver: MakeDriver | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        config = config_of(config, settings)
        wired = wire(root, config, open_storage, driver)
        super().__init__(wired.ports, config, hooks)
        self._wait_with(wired.engine, wired.promise, self._one_call)


class GroupWorker(BaseGroupWorker, Gate):
    """A rank of a group of workers that writes below the ``root`` of its controller.

    Construction is collective in the group. Its ranks are those of the default process group
    (initialise it first); without ``torch.distributed``, a group of one. ``config`` (a model or a
    dict) or keyword arguments: ``writer_files``, ``engine``, ``writer_nice``, ``common_state``,
    ``exchange_timeout_s``, ``verify`` and ``reshard_drops`` are used here. ``open_storage(create)``
    replaces the storage adapter, for tests and fault injection.

    Raises ``ConfigError``.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        config: CheckpointConfig | Mapping[str, Any] | None = None,
        *,
        open_storage: Callable[[bool], Storage] | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        config = config_of(config, settings)
        wired = wire(root, config, open_storage, group=True)
        super().__init__(wired.ports, config)
        self._wait_with(wired.engine, wired.promise, self._one_call)


class Wired(NamedTuple):
    """The real ports of one rank. Without an ``engine``, writers are forked.

    ``promise``: what waits for ``before_update``.
    """

    ports: Ports
    engine: WriteEngine | None
    promise: GatedMemory


def wire(
    root: str | os.PathLike[str],
    config: CheckpointConfig,
    open_storage: Callable[[bool], Storage] | None,
    make_driver: MakeDriver | None = None,
    *,
    group: bool = False,
) -> Wired:
    """Wire one rank, of a job or of a ``group``, to torch.distributed, its driver, and a writer.

    Collective. The engine's process is started before the root is opened: a Ctrl-C here would keep it
    busy.
    """
    opener = open_storage or OpenPosix(path_of(root))
    promise = GatedMemory()
    transport = transport_of(config)
    mode, engine = config.engine, None
    if mode != "fork" and (mode != "auto" or open_storage is None):
        imports: tuple[str, ...] = _FINISHERS if group and transport.rank == 0 else ()
        imports += _MEGATRONS if imports and MEGATRON_CORE in sys.modules else ()
        engine = WriteEngine(
            WriteEngineSettings(
                mode=mode, nice=config.writer_nice, twice=config.read_twice, imports=imports
            )
        )
        engine.warm_up()
    copies = None if engine is None else DeviceCopies()
    options = DriverOptions(
        transport.rank,
        config.writer_files,
        transport.world_size,
        copies,
        promise,
        config.common_state,
    )
    driver: Driver = (make_driver or StateDriver)(options)
    mailbox = partial(mailbox_of, transport, config.exchange_timeout_s)
    ports = system_ports(transport, driver, opener, engine, mailbox)
    ports = replace(ports, close_writers=partial(_close, ports.close_writers, copies))
    return Wired(ports, engine, promise)


def _close(close_writers: Callable[[], None], copies: DeviceCopies | None) -> None:
    """End the writers, then give back the memory that they read."""
    close_writers()
    if copies is not None:
        copies.close()
