"""``GroupWorker``: a group's worker wired to torch.distributed, megatron-core and a real disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ckptfsm.core.config import CheckpointConfig, Settings, config_of
from ckptfsm.core.ports import OffloadHook, Storage
from ckptfsm.megatron.checkpoint_manager import wire
from ckptfsm.megatron.gate import Gate
from ckptfsm.ranks.group_worker import BaseGroupWorker

if TYPE_CHECKING:
    from typing_extensions import Unpack


class GroupWorker(BaseGroupWorker, Gate):
    """A rank of a group of workers that writes below the ``root`` of its controller.

    Construction is collective in the group. Its ranks are those of the default process group
    (initialise it first); without ``torch.distributed``, a group of one. ``config`` (a model or a
    dict) or keyword arguments: ``writer_files``, ``engine``, ``writer_nice``, ``common_state``,
    ``exchange_timeout_s``, ``verify`` and ``reshard_drops`` are used here. ``open_storage(create)``
    replaces the storage adapter, for tests and fault injection. ``staging`` loads offloaded state
    around each ``write``, see ``OffloadHook``.

    Raises ``ConfigError``.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        config: CheckpointConfig | Mapping[str, Any] | None = None,
        *,
        open_storage: Callable[[bool], Storage] | None = None,
        staging: OffloadHook | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        config = config_of(config, settings)
        wired = wire(root, config, open_storage, staging, group=True)
        self._engine, self._promise = wired.engine, wired.promise
        super().__init__(wired.ports, config)
        if wired.engine is not None:
            wired.engine.hear = self._one_call.hear_exit
