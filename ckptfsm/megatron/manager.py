"""``CheckpointManager``: the manager wired to torch.distributed, megatron-core and a real disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ckptfsm.clock import SystemClock
from ckptfsm.config import CheckpointConfig, make_config
from ckptfsm.errors import ConfigError
from ckptfsm.executor import ThreadExecutor
from ckptfsm.lease import this_process
from ckptfsm.manager import Manager
from ckptfsm.megatron.driver import MegatronDriver
from ckptfsm.megatron.transport import GlooTransport
from ckptfsm.ports import Ports, Storage, Transport
from ckptfsm.pump import Hook
from ckptfsm.storage import PosixStorage
from ckptfsm.transport import LocalTransport
from ckptfsm.writer import launch_forked


class CheckpointManager(Manager):
    """The life of the checkpoints below ``root``, for one job.

    Construction is collective under torch.distributed (initialise it first); without it, a job of
    one process. ``config`` (a model or a dict) or keyword arguments configure it, see
    ``CheckpointConfig``. ``hooks`` are called with one frozen ``TransitionRecord`` per transition, on
    every rank that registers them, at most once after a crash; what they raise is logged.
    ``open_storage(create)`` replaces the storage adapter of this rank (``root`` is then only a name),
    for tests and fault injection.

    Raises ``ConfigError``, ``RootBusy``, ``DamagedRoot``, ``StorageError``, on every rank.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        config: CheckpointConfig | Mapping[str, Any] | None = None,
        *,
        hooks: Sequence[Hook] = (),
        open_storage: Callable[[bool], Storage] | None = None,
        **settings: Any,
    ) -> None:
        if config is not None and settings:
            raise ConfigError("give either a config or keyword arguments")
        if not isinstance(config, CheckpointConfig):
            config = make_config(settings if config is None else config)
        transport = _transport(config)
        ports = Ports(
            transport,
            MegatronDriver(transport.rank, config.writer_files),
            SystemClock(),
            ThreadExecutor,
            open_storage or _OpenStorage(os.fspath(root)),
            this_process,
            launch_forked,
        )
        super().__init__(ports, config, hooks)


def _transport(config: CheckpointConfig) -> Transport:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return GlooTransport(config.exchange_timeout_s)
    return LocalTransport()


@dataclass(frozen=True, slots=True)
class _OpenStorage:
    root: str

    def __call__(self, create: bool) -> PosixStorage:
        return PosixStorage(self.root, create=create)
