"""The ranks' part: Megatron-LM's ``pretrain`` of a small GPT, with or without the drop-in.

Everything is Megatron-LM's: arguments, initialization, model, data-parallel wrapper, optimizer, the
loop, saving and loading. The job brings a few tokens and looks on. Replacements for a machine
without CUDA are in ``megatron_lm_cpu.py``. Run as a script, this file is the process that imports
all of this once and forks ranks, see ``tests/megatron/forkserver.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forkserver
import megatron.core
import megatron_lm_model
import torch
from jobs import TIMES, Here, Told, meet, told
from megatron.core import mpu
from megatron.training import async_utils, checkpointing, get_args
from megatron_lm_cpu import without_cuda
from training_jobs import let_writers_stand

from ckptfsm.core.errors import CkptFsmError
from ckptfsm.core.jobs import Copy
from ckptfsm.integrations.megatron_lm import (
    _IN_ASYNC_UTILS,
    _IN_CHECKPOINTING,
    REPORTS,
    install,
)
from ckptfsm.integrations.queue import AsyncCallsQueue
from ckptfsm.integrations.queue import install as install_queue

LENGTH = 16  # tokens of a sample
FLAGS = f"""
--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length {LENGTH}
--max-position-embeddings {LENGTH} --micro-batch-size 1 --global-batch-size 2 --lr 0.01
--lr-decay-iters 100 --override-opt_param-scheduler --tokenizer-type NullTokenizer --vocab-size 63
--dataloader-type external --eval-iters 0 --eval-interval 100 --log-interval 100
--distributed-backend gloo --transformer-impl local --use-cpu-initialization
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
--no-bias-dropout-fusion --no-persist-layer-norm --no-rope-fusion --no-one-logger
--no-create-attention-mask-in-dataloader --ckpt-format torch_dist --save-interval 2
"""


@dataclass
class Watched:
    """Hands tokens out, and looks on before each step.

    ``gate``: the writer of iteration ``gated_at`` waits there. ``trained``: every rank waits there
    before iteration ``trained_at``.
    """

    gate: str = ""
    gated_at: int = 0
    trained: str = ""
    trained_at: int = 0
    start: int | None = None
    digests: dict[int, str] = field(default_factory=dict)  # of the parameters after an iteration
    tracked: dict[int, str] = field(default_factory=dict)  # the tracker's content then
    model: Any = None

    def build(self, *arguments: Any, **keywords: Any) -> Any:
        self.model = megatron_lm_model.build(*arguments, **keywords)
        return self.model

    def data(self, sizes: Any, **keywords: Any) -> tuple[Any, None, None]:
        return samples(get_args().consumed_train_samples), None, None

    data.is_distributed = True  # every rank calls it

    def step(self, iterator: Any, model: Any) -> Any:
        args = get_args()
        if self.start is None:
            self.start = args.iteration
        self.note(args.curr_iteration)
        iteration = args.curr_iteration + 1
        if self.gate:
            let_writers_stand(self.gate if iteration == self.gated_at else "")
        if self.trained and iteration == self.trained_at:
            meet(self.trained)
        return megatron_lm_model.forward(iterator, model)

    def note(self, iteration: int) -> None:
        """Every bit of the parameters after this iteration, and the tracker."""
        found = hashlib.sha256()
        for name, value in sorted(self.model.named_parameters()):
            found.update(name.encode() + value.detach().numpy().tobytes())
        self.digests[iteration] = found.hexdigest()
        tracker = Path(checkpointing.get_checkpoint_tracker_filename(get_args().save))
        self.tracked[iteration] = tracker.read_text().strip() if tracker.exists() else ""


def samples(consumed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Each sample depends on its number; ``consumed`` were given out before, to all replicas."""
    while True:
        number = torch.Generator().manual_seed(consumed + mpu.get_data_parallel_rank())
        tokens = torch.randint(0, 63, (1, LENGTH + 1), generator=number)
        yield {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "position_ids": torch.arange(LENGTH)[None],
            "attention_mask": torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool(),  # of hidden tokens
        }
        consumed += mpu.get_data_parallel_world_size()


def train(
    here: Here,
    root: str,
    flags: str,
    installed: bool = True,
    queue: bool = False,
    place: str = "",
    **watch: Any,
) -> Told:
    """Run ``pretrain`` once: load from ``root``, train, and save into it.

    ``queue``: only the queue is ours. ``writers`` of the outcome: the number of writers of that
    queue. ``place``: has the copies, and is begun from.

    The process group and megatron-core's queue of results are made before; ``pretrain`` finds them.
    """
    here.join_with_queue()
    if megatron.core.__version__ < "0.17":  # one strategy, and no option for it
        flags = re.sub("--async-strategy [a-z]+", "", flags)
    sys.argv = ["pretrain_gpt.py", *f"{FLAGS} --save {root} --load {root} {flags}".split()]
    watched = Watched(**watch)
    outcome: Told = {"error": None, "exit": None}
    with without_cuda():
        settings: Told = {**TIMES}
        if watched.gate:
            settings["engine"] = "fork"  # a forked writer waits at the gate
        if place:
            settings |= {"copies": (Copy(place),), "fetch_from": place, "jobs_drain_s": 60}
        owner = install(**settings) if installed else contextlib.nullcontext()
        calls = AsyncCallsQueue(**TIMES)
        if queue:
            owner = install_queue(calls)
        try:
            with owner:
                megatron_lm_model.run(watched.data, watched.build, watched.step)
            watched.note(get_args().train_iters)
        except CkptFsmError as error:
            outcome["error"] = told(error)
        except SystemExit as ending:
            outcome["exit"] = ending.code or 0
    seen = {"digests": watched.digests, "tracked": watched.tracked}
    return {**outcome, "start": watched.start, "writers": calls._last + 1, **seen}


def names(here: Here) -> Told:
    """The names that the drop-in relies on, and those of them that are missing here."""
    inner = checkpointing.save_checkpoint.__code__.co_consts
    closures = {code.co_name for code in inner if hasattr(code, "co_name")}
    there = {*vars(checkpointing), *vars(async_utils)}
    wanted = {*_IN_CHECKPOINTING, *_IN_ASYNC_UTILS, "dist_checkpointing", "get_args"}
    return {
        "core": megatron.core.__file__,
        "version": megatron.core.__version__,
        "training": checkpointing.__file__,
        "missing": sorted((wanted - there) | (REPORTS - closures)),
    }


def content_metadata(here: Here, root: str, steps: list[int]) -> list[Told | None]:
    """Metadata about the content of checkpoints that Megatron-LM stores, as its loader finds it."""
    places = [checkpointing.get_checkpoint_name(root, s, return_base_dir=True) for s in steps]
    found = map(checkpointing.dist_checkpointing.load_content_metadata, places)
    return list(found)


if __name__ == "__main__":
    forkserver.main()
elif __name__ == "__mp_main__":  # stock's persistent worker: spawned, it imports this module anew
    _worker = without_cuda()
    _worker.__enter__()
