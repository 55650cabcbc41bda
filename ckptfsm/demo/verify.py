"""Loads a checkpoint with stock megatron-core alone: nothing of ckptfsm's manager is used here."""

from __future__ import annotations

import sys
import warnings

warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")

import torch.distributed as dist  # noqa: E402  megatron-core warns while it is imported
from megatron.core import dist_checkpointing  # noqa: E402

from ckptfsm.demo.model import ModelSpec, Trainer, initialize_parallel  # noqa: E402


def main(argv: list[str]) -> int:
    directory, tensor_parallel = argv[0], int(argv[1])
    dist.init_process_group("gloo")
    initialize_parallel(tensor_parallel)
    trainer = Trainer(ModelSpec(), tensor_parallel, "cpu")
    loaded = dist_checkpointing.load(trainer.sharded_state_dict(), directory)
    trainer.load_state_dict(loaded)
    if dist.get_rank() == 0:
        print(f"  stock dist_checkpointing.load: {directory} is iteration {trainer.iteration}")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
