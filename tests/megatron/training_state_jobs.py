"""The jobs of trainers in plain torch, DistributedDataParallel and FSDP2. See ``jobs.py``; its rules
hold here."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from jobs import Here, Told, managed, told
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ckptfsm import TrainingState
from ckptfsm.core.errors import CkptFsmError
from ckptfsm.dcp.plain_values import digests_of

SAVED_AT = 3
WIDTH = 256  # a matrix of a rank is large enough to be read behind the save


class Net(torch.nn.Module):
    """Has dropout, and a tied and a frozen parameter. The buffers of ``norm`` differ by rank."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(12, WIDTH)
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.BatchNorm1d(WIDTH) if norm else torch.nn.Identity()
        self.drop = torch.nn.Dropout(0.3)
        self.frozen = torch.nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.out = torch.nn.Linear(WIDTH, 12, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(self.norm(self.frozen(self.inner(self.embed(x))))))


class Loader:
    def __init__(self, rank: int) -> None:
        self.place = 100 * rank

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.place = state["place"]


class Trainer:
    def __init__(self, here: Here, wrapped: str, norm: bool, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed + here.rank)
        self.loader = Loader(here.rank)
        self.model: Any = Net(norm=norm)
        if wrapped == "ddp":
            self.model = DistributedDataParallel(self.model)
        elif wrapped == "fsdp2":
            fully_shard(self.model.inner)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5])
        torch.manual_seed(seed + here.rank)
        self.state = TrainingState(
            self.model, self.optimizer, scheduler=self.scheduler, loader=self.loader
        )

    def step(self) -> None:
        self.loader.place += 1
        noise = random.random() + self.loader.place
        loss = self.model(torch.randint(0, 12, (5,))).square().mean() * noise
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()

    def common(self) -> dict[str, int]:
        """Digests of what no sharding changes."""
        whole = StateDictOptions(full_state_dict=True)
        state = {
            "model": get_model_state_dict(self.model, options=whole),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=whole),
            "scheduler": self.scheduler.state_dict(),
        }
        return digests_of(state)

    def own(self) -> list[Any]:
        """This rank's place in the data, and what it draws next."""
        return [self.loader.place, random.random(), torch.rand(2).tolist()]


def train(
    here: Here,
    root: str,
    until: int,
    seed: int,
    wrapped: str = "",
    norm: bool = False,
    **settings: Any,
) -> Told:
    """Resume, train, save on the way and tell what there is at the end, and at the save."""
    here.join()
    trainer = Trainer(here, wrapped, norm, seed)
    said: Told = {"error": None, "at": {}}
    with managed(here, root, **settings) as ckpts:
        ckpts.attach(trainer.optimizer)
        try:
            said["start"] = trainer.state.restore(ckpts)
        except CkptFsmError as error:
            said["error"] = told(error)
            return said
        if said["start"]:
            said["at"] = trainer.common()
        for step in range(said["start"] + 1, until + 1):
            trainer.step()
            if step == SAVED_AT:
                ckpts.save(step, trainer.state.state_dict())
                said["at"] = trainer.common()
            ckpts.poll()
    said["end"], said["own"] = trainer.common(), trainer.own()
    if dist.is_initialized():
        dist.barrier()
    return said
