"""Jobs of Lightning for ``test_lightning``: a small module, its data, and the ranks of two processes.

A run gives the loss and the data of each step, so that two runs can be compared.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

from ckptfsm.integrations.lightning import LightningCheckpoints

BATCHES = 5  # of an epoch and a rank
Losses = dict[int, list[float]]


class Stopped(Exception):
    """Raised where a test ends a run."""


class Rows(Dataset[torch.Tensor]):
    def __init__(self, ranks: int) -> None:
        self.rows = torch.randn(4 * BATCHES * ranks, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


class Small(pl.LightningModule):
    """``losses``: of each step, the loss and the sum of the data."""

    def __init__(self, *, sharded: bool = False) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(), torch.nn.Linear(16, 8)
        )
        self.losses: Losses = {}
        self._sharded = sharded

    def configure_model(self) -> None:
        if self._sharded:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch) - batch).square().mean()
        self.losses[self.trainer.global_step + 1] = [loss.item(), batch.sum().item()]
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        loss = (self.net(batch) - batch).square().mean()
        self.log("val", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Stop(pl.Callback):
    """Ends the run after ``last`` steps: by an exception, or by a signal to the last rank alone.

    ``batch`` is given instead of ``last`` for a signal after that batch of the first epoch."""

    def __init__(self, last: int, number: int = 0, batch: int | None = None) -> None:
        self.last, self.number, self.batch = last, number, batch

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.last and not self.number:
            raise Stopped

    def on_train_batch_end(self, trainer: Any, *of: Any) -> None:
        there = trainer.global_step == self.last if self.batch is None else of[-1] == self.batch
        own = trainer.global_rank == trainer.world_size - 1
        if there and own and self.number == signal.SIGTERM:
            signal.raise_signal(self.number)


class KillAfter(LightningCheckpoints):
    """Checkpoints of a process that is killed while the save of step ``last`` is in flight."""

    last = 0

    def _save(self, trainer: Any, found: Any) -> None:
        super()._save(trainer, found)
        if trainer.global_step == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Run:
    """What a run is made of. ``root`` "" trains without our checkpoints.

    ``load`` is ``ckpt_path``; ``validates`` the ``val_check_interval``; ``trainer`` and ``own`` are
    further arguments of the ``Trainer`` and of the checkpoints.
    """

    root: str = ""
    load: str | None = "last"
    every: int | None = 1
    epochs: int = 3
    stop: int | None = None
    signal: int = 0
    kill: int = 0
    seed: int = 1
    validates: Any = None
    strategy: str = ""
    stateful: bool = False
    held: int | None = None  # rows to validate with, instead of all
    trainer: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    callbacks: list[Any] = field(default_factory=list)

    def checkpoints(self) -> list[LightningCheckpoints]:
        if not self.root:
            return []
        kind = KillAfter if self.kill else LightningCheckpoints
        made = kind(self.root, every_n_train_steps=self.every, **self.own)
        if isinstance(made, KillAfter):
            made.last = self.kill
        return [made]

    def make(self, ranks: int) -> tuple[pl.Trainer, Small, Any, Any]:
        """The trainer, its module, and the two loaders."""
        pl.seed_everything(self.seed, verbose=False)
        strategy: Any = self.strategy or "auto"
        if strategy == "fsdp2":
            strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
        more = {} if self.validates is None else {"val_check_interval": self.validates}
        own = self.checkpoints()
        stop = [] if self.stop is None else [Stop(self.stop, self.signal)]
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=strategy,
            max_epochs=self.epochs,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"enable_checkpointing": bool(own or self.callbacks), **more, **self.trainer},
            callbacks=[*self.callbacks, *stop, *own],
        )
        return trainer, Small(sharded=self.strategy == "fsdp2"), *self._loaders(ranks)

    def _loaders(self, ranks: int) -> tuple[Any, Any]:
        kind: Any = DataLoader
        if self.stateful:
            from torchdata.stateful_dataloader import StatefulDataLoader as kind  # noqa: N813
        rows = Rows(ranks)
        some = rows if self.held is None else rows.rows[: self.held]
        held = None if self.validates is None else DataLoader(some, batch_size=4)
        return kind(rows, batch_size=4, shuffle=True), held

    def fit(self, ranks: int = 1) -> tuple[Losses, pl.Trainer]:
        """Train, until the end or the stop."""
        trainer, module, rows, held = self.make(ranks)
        load = None if self.load == "last" and not self.root else self.load
        try:
            trainer.fit(module, rows, held, ckpt_path=load)
        except Stopped:
            pass
        return module.losses, trainer


def losses(**how: Any) -> Losses:
    return Run(**how).fit()[0]


def rank(number: int, port: int, result: str, how: dict[str, Any]) -> None:
    """One of two ranks, in a process of its own: writes its losses, or its error, as JSON."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    os.environ |= {
        "LOCAL_RANK": str(number),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    Path(result).write_text(json.dumps(Run(**how).fit(ranks=2)[0]))
