"""Other writers beside stock and ckptfsm: torch's DCP, megatron-core's persistent queue, and others.

Each saves the same state, measured as in ``engines``. ``nvidia-resiliency-ext`` and
``torch_checkpointing`` are measured where they are installed, which ``make bench-peers`` sees to.
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
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from benchmarks.comparison import OURS, WITH_TARGETS
from benchmarks.engines import compare
from benchmarks.measure import Figure, Options
from benchmarks.sides import ManagerSide, Side, StockSide
from ckptfsm import CheckpointManager, LatestN
from ckptfsm.adapters.versions import series_of
from ckptfsm.megatron.compat import cpu_devices, process_group

_NVRX, _TORCH_CHECKPOINTING = "nvidia_resiliency_ext", "torch_checkpointing"
_STAGES_ONCE = (series_of(torch.__version__) or (0, 0)) < (2, 13)  # so it is in 2.11
_PERSISTENT = torch.cuda.is_available()  # the process of a persistent queue chooses a GPU, or ends


def run(options: Options) -> list[Figure]:
    """Stall and time until loadable of each peer (ms), and ratios to stock's fast mode."""
    return compare(options, _sides)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a sharded state dict, by their names."""
    return {key: getattr(value, "data", value) for key, value in state.items()}


class FutureSide:
    """A writer below ``root`` whose save gives a future."""

    def __init__(self, root: Path) -> None:
        root.mkdir(exist_ok=True)  # every rank makes it
        self._root = root
        self._future: Future[Any] | None = None

    def poll(self) -> bool:
        if self._future is not None and self._future.done():
            self._future.result()
            self._future = None
        return self._future is None

    def clear(self) -> None:
        for directory in self._root.iterdir():
            shutil.rmtree(directory)
        os.sync()


class DcpSide(FutureSide):
    """``dcp.save``, or ``dcp.async_save`` by a thread or a process, of the plain tensors."""

    def __init__(self, root: Path, how: str) -> None:
        super().__init__(root)
        self.name = f"DCP {how}"
        self._how = how

    def save(self, step: int, state: dict[str, Any]) -> None:
        plain = _plain(state)
        place = str(self._root / str(step))
        if self._how == "save":
            dcp.save(plain, checkpoint_id=place)
            return
        kind = dcp.state_dict_saver.AsyncCheckpointerType(self._how)
        self._future = dcp.async_save(plain, checkpoint_id=place, async_checkpointer_type=kind)

    def before_update(self) -> None:
        """The tensors were copied."""


class PinnedDcpSide(FutureSide):
    """``dcp.async_save`` by a thread, which stages a device's state in pinned memory meanwhile.

    It keeps that memory, except where torch lets a stager stage only once.
    """

    name = "DCP pinned"

    def __init__(self, root: Path, device: str) -> None:
        super().__init__(root)
        on_gpu = device != "cpu"  # elsewhere torch offers none of this
        self._options = StagingOptions(on_gpu, False, on_gpu, on_gpu)
        self._stager = DefaultStager(self._options)
        self._staged: Future[Any] | None = None

    def save(self, step: int, state: dict[str, Any]) -> None:
        place = str(self._root / str(step))
        if _STAGES_ONCE:
            self._stager.close()
            self._stager = DefaultStager(self._options)
        begun = dcp.async_save(_plain(state), checkpoint_id=place, async_stager=self._stager)
        if isinstance(begun, Future):
            self._future = begun
        else:
            self._staged, self._future = begun.staging_completion, begun.upload_completion

    def before_update(self) -> None:
        if self._staged is not None:
            self._staged.result()

    def close(self) -> None:
        self._stager.close()


class TorchCheckpointingSide(FutureSide):
    """``torch_checkpointing``: staged by a thread, written by a process.

    Without ``use_direct_io``, its default: ext4 refuses the writes that are not aligned.
    """

    name = _TORCH_CHECKPOINTING

    def __init__(self, root: Path) -> None:
        from torch_checkpointing import CheckpointManager as TheirManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        super().__init__(root)
        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager = TheirManager(TheirManager.Config(storage_config=storage))

    def save(self, step: int, state: dict[str, Any]) -> None:
        self._future = self._manager.save(str(self._root / str(step)), {"model": _plain(state)})

    def before_update(self) -> None:
        with self._manager.lock():
            pass  # the tensors were copied

    def close(self) -> None:
        self._manager.close()


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
        if find_spec(_TORCH_CHECKPOINTING):
            theirs = TorchCheckpointingSide(work / "torch_checkpointing")
            stack.callback(theirs.close)
            sides.append(theirs)
        for engine in WITH_TARGETS:
            root = work / engine
            manager = CheckpointManager(root, retention=LatestN(1), engine=engine)
            opened, gate = stack.enter_context(manager), engine == "auto"
            sides.append(ManagerSide(root, opened, f"{OURS}{engine}", gate=gate))
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
