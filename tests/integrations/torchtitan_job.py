"""torchtitan's trainer on a CPU: its debug model of Llama 3 with FSDP2, stock checkpoints or ours.

Everything is torchtitan's: model, optimizer, schedule, loop, the order of calls in its ``main``. The job
brings numbers for words. A server imports everything once and forks the ranks of a job. The notes of
a rank are in ``rank-N.json`` of the job.

Run as a script: ``torchtitan_job.py ADDRESS`` serves until its parent is gone.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchtitan_cpu  # noqa: F401  (the device)
from servers import die_with_parent, serve_for_ever
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TrainingConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

import ckptfsm.integrations.torchtitan  # noqa: F401  once, and not in each rank
from ckptfsm.writers import rank_writer

WORDS, LENGTH = 2048, 16
OURS = "ckptfsm.integrations.torchtitan.checkpoints"


class Numbers(IterableDataset, Stateful):
    """Each sample depends on its number and its rank. After ``end`` samples there are no more."""

    def __init__(self, rank: int, end: int) -> None:
        self.rank, self.end, self.place = rank, end, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while self.place < self.end:
            number = torch.Generator().manual_seed(1000 * self.rank + self.place)
            self.place += 1
            words = torch.randint(0, WORDS, (LENGTH + 1,), generator=number)
            yield {"input": words[:-1], "positions": torch.arange(LENGTH)}, words[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Loader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        end: int = 1000

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        local_batch_size: int,
        tokenizer: Any,
        seq_len: int,
        **keywords: Any,
    ) -> None:
        numbers = Numbers(dp_rank, config.end)
        super().__init__(numbers, dp_rank, dp_world_size, batch_size=local_batch_size, **keywords)


class NoWords(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return WORDS


def config_of(what: dict[str, Any]) -> Trainer.Config:
    """The configuration of a run; with ``ours``, by the line of the documentation."""
    spec = model_registry("debugmodel", attn_backend="flex")
    del spec.model.layers[1:]
    optimizer = default_adamw(lr=8e-4)
    optimizer.implementation = "foreach"
    checkpoint = {"enable": True, "interval": 2, "last_save_model_only": False}
    config = Trainer.Config(
        model_spec=spec,
        dump_folder=what["place"],
        loss=CrossEntropyLoss.Config(global_vocab_size=WORDS),
        optimizer=optimizer,
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=20),
        training=TrainingConfig(
            local_batch_size=2, seq_len=LENGTH, steps=what["steps"], disable_cuda_graphs=True
        ),
        tokenizer=NoWords.Config(),
        dataloader=Loader.Config(end=what.get("end", 1000)),
        checkpoint=CheckpointManager.Config(**{**checkpoint, **what.get("checkpoint", {})}),
        metrics=MetricsProcessor.Config(log_freq=1),
        activation_checkpoint=None,
    )
    config.comm.train_timeout_seconds = (
        600  # nothing here ends because others were waited for too long
    )
    config.debug.seed, config.debug.enable_structured_logging = 1, False
    if what["ours"] is not None:
        config.override.imports = [(OURS, what["ours"])]
    return config


class Rank:
    """A rank: its run and its notes."""

    def __init__(self, what: dict[str, Any], rank: int) -> None:
        self.what, self.rank = what, rank
        self.notes: dict[str, Any] = {"losses": {}, "from": None}

    def run(self) -> None:
        """What torchtitan's ``main`` does."""
        what = self.what
        os.environ.update({"RANK": str(self.rank), "LOCAL_RANK": str(self.rank)})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(what["port"])})
        os.environ.update({"WORLD_SIZE": str(what["size"]), "LOCAL_WORLD_SIZE": str(what["size"])})
        torch.set_num_threads(1)
        init_logger()
        if what.get("hold"):
            hold_writers(Path(what["hold"]), self.rank, what["hold_at"])
        trainer: Any = None
        try:
            trainer = config_of(what).build()
            self.look_on(trainer)
            if what.get("checkpoint", {}).get("create_seed_checkpoint"):
                trainer.checkpointer.save(curr_step=0, last_step=True)
            else:
                trainer.train()
        except Exception:
            if trainer:
                trainer.close()
            raise
        trainer.close()
        dist.destroy_process_group()

    def look_on(self, trainer: Any) -> None:
        """Note every loss, and from which step the run goes on."""
        stock_log, stock_step, notes = trainer.metrics_processor.log, trainer.train_step, self.notes

        def log(step: int, loss: float, *rest: Any, **more: Any) -> None:
            notes["losses"][step] = loss
            stock_log(step, loss, *rest, **more)

        def train_step(batches: Any) -> None:
            if notes["from"] is None:
                notes["from"] = trainer.step - 1
            if self.rank == 0 and trainer.step == self.what.get("fails_at"):
                raise ArithmeticError("the trainer fails")
            stock_step(batches)

        trainer.metrics_processor.log, trainer.train_step = log, train_step


def hold_writers(gate: Path, rank: int, step: int) -> None:
    """Forked writers of a step wait until the file ``gate`` exists; at most 60 s.

    A file beside it, ``held-N``, tells that the writer of rank N waits.
    """
    stock = rank_writer.write_rank

    def write(storage: Any, job: Any, *rest: Any, **named: Any) -> Any:
        deadline = time.monotonic() + 60
        while job.of.step == step and not gate.exists() and time.monotonic() < deadline:
            (gate.parent / f"held-{rank}").touch()
            time.sleep(0.01)
        return stock(storage, job, *rest, **named)

    rank_writer.write_rank = write


# --------------------------------------------------------------------------------------- serving


def life(what: dict[str, Any], number: int) -> int:
    """A rank's process; its exit status."""
    place = Path(what["place"])
    log = os.open(place / f"rank-{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    die_with_parent()
    rank, status = Rank(what, number), 0
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            rank.run()
        except BaseException as error:
            traceback.print_exc()
            rank.notes["raised"], status = f"{type(error).__name__}: {error}", 1
        rank.notes["warned"] = [
            str(w.message) for w in said if w.category.__module__.startswith("ck")
        ]
    (place / f"rank-{number}.json").write_text(json.dumps(rank.notes))
    return status


def serve(connection: Connection) -> None:
    """Fork the ranks of one job, send their pids, and at the end their exit statuses."""
    what = connection.recv()
    pids = []
    for number in range(what["size"]):
        pid = os.fork()
        if pid == 0:
            connection.close()
            os._exit(life(what, number))
        pids.append(pid)
    connection.send(pids)
    connection.send([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])


if __name__ == "__main__":
    serve_for_ever(sys.argv[1], serve)
