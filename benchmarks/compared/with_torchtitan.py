"""torchtitan's own manager, as its trainer makes it from the settings of a user."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.checkpoint import CheckpointManager
from training import EVERY, KEPT, arguments, make, update


class Step:
    """The part of torchtitan's trainer that is a state."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Optimizer:
    """torchtitan's container of an optimizer, as far as a save needs it."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

        set_optimizer_state_dict(self.model, self.optimizer, state)


def main() -> None:
    root, last = arguments()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    model, optimizer = make()
    trainer = Step()
    settings = CheckpointManager.Config(
        enable=True,
        interval=EVERY,
        async_mode="async",
        keep_latest_k=KEPT,
        last_save_model_only=False,
    )
    ckpts = CheckpointManager(
        settings,
        dataloader=Step(),
        model_parts=[model],
        optimizers=Optimizer(model, optimizer),
        lr_schedulers=Step(),
        states={"train_state": trainer},
        sd_adapter=None,
        base_folder=root,
    )
    ckpts.load()
    for step in range(trainer.step + 1, last + 1):
        ckpts.maybe_wait_for_staging()
        update(model, optimizer, step)
        trainer.step = step
        ckpts.save(step, last_step=step == last)
    ckpts.maybe_wait_for_saving()
    ckpts.close()


if __name__ == "__main__":
    main()
