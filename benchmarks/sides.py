"""The two sides of a comparison: the same state through megatron-core's queue and through ckptfsm.

Both run in one process, in a gloo group of one, with the same number of files per rank. A checkpoint
counts as loadable when stock's finalizers have returned, and when ours is tracked; stock does not
fsync ``common.pt``, ``.metadata`` and ``metadata.json``, ours does and has them digested too.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from ckptfsm import CheckpointManager, LatestN, SaveHandle
from ckptfsm.core.layout import MEGATRON, TRASH
from ckptfsm.megatron.compat import cpu_devices, process_group

_ASKED = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters  # from 0.17 on
_HOW: dict[str, Any] = {"async_strategy": "mcore"} if _ASKED else {}


class Side(Protocol):
    """A way to save. ``poll`` returns True once the last save is loadable."""

    name: str

    def save(self, step: int, state: dict[str, Any]) -> None: ...

    def before_update(self) -> None:
        """Wait until the state may change."""
        ...

    def poll(self) -> bool: ...

    def clear(self) -> None:
        """Delete everything that can be deleted and sync, outside of the timed part (collective)."""
        ...


class StockSide:
    """``dist_checkpointing.save`` and a queue: by default ``AsyncCallsQueue(persistent=False)``."""

    def __init__(
        self,
        root: Path,
        name: str = "stock",
        queue: Any = None,
        how: Mapping[str, Any] = MappingProxyType(_HOW),
    ) -> None:
        root.mkdir(exist_ok=True)  # every rank makes it
        self.name = name
        self._root = root
        self._queue = queue or AsyncCallsQueue(persistent=False)
        self._how = dict(how)

    def save(self, step: int, state: dict[str, Any]) -> None:
        directory = self._root / MEGATRON.published_name(step)
        directory.mkdir(exist_ok=True)
        request = dist_checkpointing.save(
            state, str(directory), async_sharded_save=True, **self._how
        )
        self._queue.schedule_async_request(request)

    def before_update(self) -> None:
        """The fork has a copy."""

    def poll(self) -> bool:
        self._queue.maybe_finalize_async_calls(blocking=False)
        return self._queue.get_num_unfinalized_calls() == 0

    def clear(self) -> None:
        if dist.get_rank() == 0:
            for directory in self._root.iterdir():
                shutil.rmtree(directory)
            os.sync()

    def close(self) -> None:
        """End the queue's process."""
        self._queue.close()


class ManagerSide:
    """``CheckpointManager`` with everything on: journal, receipts, digests, tracker, retention."""

    def __init__(
        self, root: Path, manager: CheckpointManager, name: str = "ckptfsm", *, gate: bool = False
    ) -> None:
        self.name = name
        self.root = root
        self._manager = manager
        self._handle: SaveHandle | None = None
        if gate or manager.config.engine == "gated":
            manager.expect_gate()

    def save(self, step: int, state: dict[str, Any]) -> None:
        self._handle = self._manager.save(step, state)

    def before_update(self) -> None:
        self._manager.before_update()

    def poll(self) -> bool:
        self._manager.poll()
        return self._handle is None or self._handle.done

    def clear(self) -> None:
        """Let retention finish; empty the trash by hand, since the manager does it at leisure."""
        self._manager.wait_until_finished()  # on every rank, as each poll
        if dist.get_rank() == 0:
            _empty(self.root / TRASH)


def _empty(trash: Path) -> None:
    for directory in trash.iterdir():
        try:
            shutil.rmtree(directory)
        except FileNotFoundError:
            continue  # the manager was removing the same directory
    os.sync()


@contextlib.contextmanager
def both_sides(work: Path, engine: str = "auto") -> Iterator[tuple[StockSide, ManagerSide]]:
    """Both sides below ``work``, in a process group of one, until the context ends."""
    root = work / "ckptfsm"
    with (
        cpu_devices(),
        process_group(),
        CheckpointManager(root, retention=LatestN(1), engine=engine) as manager,
    ):
        yield StockSide(work / "stock"), ManagerSide(root, manager)
