"""A rank's training under transformers' ``Trainer``: a tiny GPT-2 with dropout, and random tokens."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate_job import TIMES, digest, shard_on_cpus
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from ckptfsm.integrations.transformers import install

torch.cuda.is_current_stream_capturing = bool  # False: the question ends a torch without CUDA
STEPS = 8  # of the schedule of the learning rate


class Watch(TrainerCallback):
    """Notes the parameters after each step, and ends the training after step ``last``."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.begin = -1
        self.digests: dict[int, str] = {}
        self.saved: list[list[str]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.begin = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.digests[state.global_step] = digest(more["model"])
        control.should_training_stop |= state.global_step >= self.last

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.saved.append(sorted(p.name for p in Path(args.output_dir).glob("checkpoint-*")))


def tokens(count: int) -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(5)
    made = [torch.randint(0, 32, (8,), generator=random) for _ in range(count)]
    return [{"input_ids": each, "labels": each} for each in made]


def make(root: str, last: int, kind: str, arguments: dict[str, Any]) -> tuple[Trainer, Watch]:
    config = GPT2Config(
        vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(1)
    watch = Watch(last)
    trainer = Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(
            output_dir=root,
            use_cpu=True,
            per_device_train_batch_size=1,
            max_steps=STEPS,
            save_steps=1,
            logging_steps=100,
            learning_rate=0.01,
            report_to="none",
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=tokens(6),
        eval_dataset=tokens(2),
        callbacks=[watch],
    )
    if kind == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            state_dict_type="SHARDED_STATE_DICT",
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["GPT2Block"],
        )
        shard_on_cpus(plugin)
        trainer.is_fsdp_enabled = True
    return trainer, watch


def train(
    rank: int,
    *,
    root: str,
    last: int,
    kind: str = "ddp",
    ours: bool = True,
    resume: bool | str = True,
    late: bool = False,
    killed_in: int = 0,
    fails_in: int = 0,
    best_at: float = 0,
    sync: bool = True,
    **arguments: Any,
) -> dict[str, Any]:
    """Train to step ``last`` and save after each step.

    ``killed_in``: rank 0 dies by SIGKILL in the save after that step, before its last two files.
    ``fails_in``: that save fails, in the background without ``sync``, and training goes on.
    ``late``: only rank 0 asks to resume. ``best_at``: the loss is the least after this step.
    """
    trainer, watch = make(root, last, kind, arguments)
    if ours:
        install(trainer, sync=sync, on_failure="warn" if fails_in else "raise", **TIMES)
    stock_save_rng, stock_evaluate = trainer._save_rng_state, trainer.evaluate

    def die(directory: str) -> None:
        if rank == 0 and trainer.state.global_step == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.state.global_step == fails_in and sync:
            raise OSError(errno.ENOSPC, "No space left on device")
        if trainer.state.global_step == fails_in:
            Path(directory, "link").symlink_to("/")  # which the writer refuses
        stock_save_rng(directory)

    def judged(*some: Any, **more: Any) -> dict[str, float]:
        found = stock_evaluate(*some, **more)
        found["eval_loss"] = abs(trainer.state.global_step - best_at) + 1 / best_at
        return found

    trainer._save_rng_state = die
    if best_at:
        trainer.evaluate = judged
    trainer.train(resume_from_checkpoint=(resume and not (late and rank)) or None)
    state = trainer.state
    return {
        "begin": watch.begin,
        "digests": watch.digests,
        "saved": watch.saved,
        "best": state.best_model_checkpoint,
        "end": digest(trainer.model),
        "limit": trainer.args.save_total_limit,
    }
