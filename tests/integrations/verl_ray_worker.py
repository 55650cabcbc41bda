"""A worker of verl's ``RayWorkerGroup`` around the installed verl's checkpoint manager, on a CPU."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl_worker import VerlWorker, fingerprint, train


class RoleWorker(Worker):
    """A rank of a role, with the calls of verl's ``ActorRolloutRefWorker``."""

    def __init__(self, role: str, checkpoint: dict[str, Any]) -> None:
        super().__init__()
        dist.init_process_group("gloo")  # verl's group has put the address into the environment
        self.engine = VerlWorker(role, self.world_size, checkpoint, bridge=False)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self,
        local_path: Any,
        hdfs_path: Any = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        self.engine.save_checkpoint(
            local_path, hdfs_path, global_step, max_ckpt_to_keep=max_ckpt_to_keep
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, local_path: Any, hdfs_path: Any = None, del_local_after_load: bool = False
    ) -> None:
        self.engine.load_checkpoint(local_path, del_local_after_load=del_local_after_load)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, steps: int) -> None:
        train(self.engine, steps)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fingerprint(self) -> list[float]:
        return fingerprint(self.engine)
