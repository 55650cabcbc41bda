"""Loads a checkpoint with stock code alone: nothing of ckptfsm's manager is used here."""

from __future__ import annotations

import sys
import warnings

warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")

import torch.distributed as dist  # noqa: E402  torch and megatron-core warn while they are imported

from ckptfsm.demo.trainers import AnyTrainer, check_imports, make_trainer  # noqa: E402


def load_by_megatron_core(trainer: AnyTrainer, directory: str) -> str:
    """Load into the trainer. Returns the name of the loader."""
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load(trainer.sharded_state_dict(), directory)
    trainer.load_state_dict(loaded)
    return "dist_checkpointing.load"


def load_by_dcp(trainer: AnyTrainer, directory: str) -> str:
    """Load into the trainer, without the generators. Returns the name of the loader."""
    from torch.distributed.checkpoint.state_dict_loader import load

    state = trainer.sharded_state_dict()
    del state["rng_state"]  # torch knows no ``PerRank``
    load(state, checkpoint_id=directory)
    trainer.load_state_dict(state)
    return "torch.distributed.checkpoint.load"


def main(argv: list[str]) -> int:
    directory, name, tensor_parallel = argv[0], argv[1], int(argv[2])
    dist.init_process_group("gloo")
    trainer = make_trainer(name, tensor_parallel, "cpu")
    load = load_by_megatron_core if name == "megatron" else load_by_dcp
    loader = load(trainer, directory)
    if dist.get_rank() == 0:
        print(f"  stock {loader}: {directory} is iteration {trainer.iteration}")
    check_imports(name)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
