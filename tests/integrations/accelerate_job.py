"""A rank's training under Accelerate: a small model with dropout, with and without the library."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
)

from ckptfsm.core.errors import CkptFsmError
from ckptfsm.integrations.accelerate import install

torch.set_num_threads(1)
TIMES = {
    "effect_timeout_s": 20.0,
    "exchange_timeout_s": 40.0,
    "busy_timeout_s": 30.0,
    "close_timeout_s": 30.0,
    "writer_timeout_s": 30.0,
    "exit_timeout_s": 5.0,
}


class Progress:
    """A registered object: the number of steps that were made. Accelerate saves it last.

    ``dies``: the save ends with a SIGKILL of this process. ``fails``: the next save fails.
    """

    step, dies, fails = 0, False, False

    def state_dict(self) -> dict[str, int]:
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fails:
            self.fails = False
            raise OSError(errno.ENOSPC, "No space left on device")
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def make(kind: str, project: str, total_limit: int | None) -> tuple[Accelerator, Any]:
    """An accelerator that names its checkpoints, and what it trains."""
    torch.manual_seed(1)
    plugin = None
    if kind == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            state_dict_type="SHARDED_STATE_DICT",
            auto_wrap_policy="size_based_wrap",
            min_num_params=100,
        )
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=plugin,
        project_config=ProjectConfiguration(
            project_dir=project, automatic_checkpoint_naming=True, total_limit=total_limit
        ),
    )
    if plugin is not None:
        shard_on_cpus(plugin)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(), torch.nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    torch.manual_seed(7 + accelerator.process_index)
    return accelerator, (model, optimizer, scheduler, progress)


def shard_on_cpus(plugin: FullyShardedDataParallelPlugin) -> None:
    """Let Accelerate shard, which it does only where it finds accelerators."""
    for state in (PartialState(), AcceleratorState()):
        state.distributed_type = DistributedType.FSDP
    AcceleratorState().fsdp_plugin = plugin


def digest(model: torch.nn.Module) -> str:
    """Of this rank's parameters."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        found.update(local.detach().numpy().tobytes())
    return found.hexdigest()[:16]


def train(
    rank: int,
    *,
    project: str,
    last: int,
    kind: str = "ddp",
    ours: bool = True,
    resume: bool = True,
    total_limit: int | None = None,
    killed_in: int = 0,
    fails_in: int = 0,
) -> dict[str, Any]:
    """Train to step ``last`` and save after each step. Stock code resumes by the newest path.

    ``killed_in``: rank 0 dies by SIGKILL in the save after that step, before its last file.
    ``fails_in``: rank 0's first try to save that step fails, and every rank tries again.
    """
    accelerator, (model, optimizer, scheduler, progress) = make(kind, project, total_limit)
    checkpoints = install(accelerator, **TIMES) if ours else None
    if resume and checkpoints is not None:
        accelerator.load_state()
    elif resume and (newest := newest_of(project)) is not None:
        accelerator.load_state(str(newest))
        accelerator.project_configuration.iteration = int(newest.name.rpartition("_")[2]) + 1
    digests, begin = {progress.step: digest(model)}, progress.step
    while progress.step < last:
        x = torch.randn(4, 8)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        progress.step += 1
        digests[progress.step] = digest(model)
        progress.dies = progress.step == killed_in and rank == 0
        if progress.step == fails_in:
            progress.fails = rank == 0
            with pytest.raises(CkptFsmError, match="No space left"):
                accelerator.save_state()
        accelerator.save_state()
    accelerator.end_training()
    return {"begin": begin, "digests": digests}


def newest_of(project: str) -> Path | None:
    found = Path(project, "checkpoints").glob("checkpoint_*")
    return max(found, key=lambda path: int(path.name.rpartition("_")[2]), default=None)
