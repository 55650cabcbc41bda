"""``CheckpointManager``: the manager wired to torch.distributed, megatron-core and a real disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptfsm.adapters.posix_storage import OpenPosix, path_of
from ckptfsm.core.config import CheckpointConfig, Settings, config_of
from ckptfsm.core.ports import OffloadHook, Ports, Storage
from ckptfsm.megatron.device_copies import DeviceCopies
from ckptfsm.megatron.driver import MegatronDriver
from ckptfsm.megatron.gate import Gate, GatedMemory
from ckptfsm.megatron.mailbox import mailbox_of
from ckptfsm.megatron.torch_dist import keeps_common_in_shard
from ckptfsm.megatron.transport import transport_of
from ckptfsm.ranks.manager import Manager
from ckptfsm.ranks.participant import Hook
from ckptfsm.ranks.wiring import system_ports
from ckptfsm.writers.write_engine import WriteEngine, WriteEngineSettings

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
    - ``staging`` loads offloaded state around each save, see ``OffloadHook``.

    Raises ``ConfigError``, ``RootBusy``, ``DamagedRoot``, ``StorageError``, on every rank.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        config: CheckpointConfig | Mapping[str, Any] | None = None,
        *,
        hooks: Sequence[Hook] = (),
        open_storage: Callable[[bool], Storage] | None = None,
        staging: OffloadHook | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        config = config_of(config, settings)
        opener = open_storage or OpenPosix(path_of(root))
        given = open_storage is not None and config.engine == "auto"
        self._engine = engine = None if given else engine_of(config)
        self._promise = GatedMemory()
        ports = ports_of(config, opener, staging, engine, self._promise)
        if engine is not None:
            engine.warm_up()  # before the root is opened: a Ctrl-C here would keep it busy
        super().__init__(ports, config, hooks)
        if engine is not None:
            engine.hear = self._one_call.hear_exit


def ports_of(
    config: CheckpointConfig,
    open_storage: Callable[[bool], Storage],
    staging: OffloadHook | None = None,
    engine: WriteEngine | None = None,
    promise: GatedMemory | None = None,
) -> Ports:
    """The real ports of one rank: torch.distributed, megatron-core, and a writer.

    Without an ``engine``, writers are forked. ``promise``: what waits for ``before_update``.
    """
    transport = transport_of(config)
    in_shard = config.common_state == "auto" and keeps_common_in_shard()
    copies = DeviceCopies()
    driver = MegatronDriver(
        transport.rank,
        config.writer_files,
        ranks=transport.world_size,
        common_in_shard=in_shard,
        images=engine is not None,
        copies=copies,
        promise=promise,
    )
    mailbox = partial(mailbox_of, transport, config.exchange_timeout_s)
    ports = system_ports(transport, driver, open_storage, staging, engine, mailbox)
    return replace(ports, close_writers=partial(_close, ports.close_writers, copies))


def _close(close_writers: Callable[[], None], copies: DeviceCopies) -> None:
    """End the writers, then give back the memory that they read."""
    close_writers()
    copies.close()


def engine_of(config: CheckpointConfig, imports: tuple[str, ...] = ()) -> WriteEngine | None:
    """The engine that the configuration asks for; None where writers are forked.

    ``imports`` are modules that its jobs need beside ``ckptfsm.writers``.
    """
    if config.engine == "fork":
        return None
    return WriteEngine(
        WriteEngineSettings(
            mode=config.engine,
            nice=config.writer_nice,
            twice=config.read_twice,
            imports=imports,
        )
    )
