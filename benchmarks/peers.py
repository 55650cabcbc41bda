"""Other writers beside stock and ckptfsm: torch's DCP, megatron-core's persistent queue, and NVRx.

Each saves the same state, measured as in ``engines``. ``nvidia-resiliency-ext`` is measured where it is
installed, which ``make bench-peers`` sees to.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

from benchmarks.engines import compare
from benchmarks.measure import Figure, Options
from benchmarks.sides import ManagerSide, Side, StockSide
from ckptfsm import CheckpointManager, LatestN
from ckptfsm.megatron.compat import cpu_devices, process_group

_NVRX = "nvidia_resiliency_ext"
_PERSISTENT = torch.cuda.is_available()  # the process of a persistent queue chooses a GPU, or ends


def run(options: Options) -> list[Figure]:
    """Stall and time until loadable of each peer (ms), and ratios to stock's fast mode."""
    return compare(options, _sides)


class DcpSide:
    """``dcp.save``, or ``dcp.async_save`` by a thread or a process, of the plain tensors."""

    def __init__(self, root: Path, how: str) -> None:
        root.mkdir()
        self.name = f"DCP {how}"
        self._root, self._how = root, how
        self._future: Future[Any] | None = None

    def save(self, step: int, state: dict[str, Any]) -> None:
        plain = {key: getattr(value, "data", value) for key, value in state.items()}
        place = str(self._root / str(step))
        if self._how == "save":
            dcp.save(plain, checkpoint_id=place)
            return
        kind = dcp.state_dict_saver.AsyncCheckpointerType(self._how)
        self._future = dcp.async_save(plain, checkpoint_id=place, async_checkpointer_type=kind)

    def before_update(self) -> None:
        """The tensors were copied."""

    def poll(self) -> bool:
        if self._future is not None and self._future.done():
            self._future.result()
            self._future = None
        return self._future is None

    def clear(self) -> None:
        for directory in self._root.iterdir():
            shutil.rmtree(directory)
        os.sync()


@contextlib.contextmanager
def _sides(work: Path) -> Iterator[list[Side]]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(cpu_devices())
        stack.enter_context(process_group())
        sides: list[Side] = [StockSide(work / "stock")]
        if _PERSISTENT:
            queue = AsyncCallsQueue(persistent=True)
            sides.append(StockSide(work / "persistent", "stock persistent", queue))
            stack.callback(queue.close)
        sides += [DcpSide(work / f"dcp-{how}", how) for how in ("save", "thread", "process")]
        if find_spec(_NVRX):
            sides += _nvrx_sides(work, stack)
        for engine in ("eager", "gated"):
            root = work / engine
            manager = CheckpointManager(root, retention=LatestN(1), engine=engine)
            sides.append(ManagerSide(root, stack.enter_context(manager), f"ckptfsm {engine}"))
        yield sides


def _nvrx_sides(work: Path, stack: contextlib.ExitStack) -> list[Side]:
    """megatron-core's requests by nvidia-resiliency-ext, in its queues."""
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue as NvrxQueue

    sides: list[Side] = []
    for persistent in (False, True) if _PERSISTENT else (False,):
        name = f"NVRx {'persistent' if persistent else 'temporal'}"
        queue = NvrxQueue(persistent=persistent)
        side = StockSide(work / name.replace(" ", "-"), name, queue, {"async_strategy": "nvrx"})
        stack.callback(side.close)
        sides.append(side)
    return sides
