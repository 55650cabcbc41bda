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
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from ckptfsm import CheckpointManager, LatestN, SaveHandle
from ckptfsm.core.layout import MEGATRON, TRASH
from ckptfsm.megatron.compat import cpu_devices, process_group

_TENSORS = 16
_FLOAT_BYTES = 4
_CLEAR_S = 60.0

_ASKED = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters  # from 0.17 on
_HOW: dict[str, Any] = {"async_strategy": "mcore"} if _ASKED else {}


class TrainingState:
    """``state_bytes`` of float32 tensors that a training step updates in place."""

    def __init__(self, state_bytes: int, device: str = "cpu") -> None:
        length = max(1, state_bytes // _TENSORS // _FLOAT_BYTES)
        self.tensors = [torch.rand(length, device=device) for _ in range(_TENSORS)]

    def sharded(self, step: int) -> dict[str, Any]:
        """The sharded state dict of ``step``, with a little common state."""
        named = {f"layer.{i}.weight": tensor for i, tensor in enumerate(self.tensors)}
        shards = {k: ShardedTensor.from_rank_offsets(k, v) for k, v in named.items()}
        return {**shards, "step": step, "args": {"lr": 1e-3, "seed": 1234}}

    def update(self) -> None:
        """Update every tensor in place, as an optimizer does."""
        for tensor in self.tensors:
            tensor.add_(1)


class Side(Protocol):
    """A way to save. ``poll`` returns True once the last save is loadable."""

    name: str

    def save(self, step: int, state: dict[str, Any]) -> None: ...

    def before_update(self) -> None:
        """Wait until the state may change."""
        ...

    def poll(self) -> bool: ...

    def clear(self) -> None:
        """Delete everything that can be deleted and sync, outside of the timed part."""
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
        root.mkdir()
        self.name = name
        self._root = root
        self._queue = queue or AsyncCallsQueue(persistent=False)
        self._how = dict(how)

    def save(self, step: int, state: dict[str, Any]) -> None:
        directory = self._root / MEGATRON.published_name(step)
        directory.mkdir()
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
        for directory in self._root.iterdir():
            shutil.rmtree(directory)
        os.sync()

    def close(self) -> None:
        """End the queue's process."""
        self._queue.close()


class ManagerSide:
    """``CheckpointManager`` with everything on: journal, receipts, digests, tracker, retention."""

    def __init__(self, root: Path, manager: CheckpointManager, name: str = "ckptfsm") -> None:
        self.name = name
        self.root = root
        self._manager = manager
        self._handle: SaveHandle | None = None

    def save(self, step: int, state: dict[str, Any]) -> None:
        self._handle = self._manager.save(step, state)

    def before_update(self) -> None:
        self._manager.before_update()

    def poll(self) -> bool:
        self._manager.poll()
        return self._handle is None or self._handle.done

    def clear(self) -> None:
        """Let retention finish; empty the trash by hand, since the manager does it at leisure."""
        deadline = time.monotonic() + _CLEAR_S
        while len(list(self.root.glob("iter_*"))) > 1 and time.monotonic() < deadline:
            self._manager.poll()
            time.sleep(0.001)
        for directory in (self.root / TRASH).iterdir():
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
