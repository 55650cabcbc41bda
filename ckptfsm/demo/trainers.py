"""What the demo asks of a trainer, and the choice of one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ckptfsm.core.errors import CkptFsmError
from ckptfsm.demo.spec import ModelSpec, use_deterministic_kernels


class AnyTrainer(Protocol):
    """Trains a byte-level language model. It knows nothing about checkpoints on disk.

    ``iteration`` is the number of steps so far, equal on all ranks.
    """

    iteration: int

    def train_step(self) -> float:
        """Do an optimizer step (collective). Returns the mean loss, equal bit for bit on all ranks."""

    def sharded_state_dict(self) -> dict[str, Any]:
        """The complete training state, to save or to load into. Nothing is copied.

        It has the key ``rng_state``, which only the same number of ranks can load.
        """

    def load_state_dict(self, loaded: Mapping[str, Any]) -> None:
        """Take over the loaded state. Without ``rng_state`` the generators keep theirs."""


def make_trainer(name: str, tensor_parallel: int, device: torch.device | str) -> AnyTrainer:
    """The trainer ``name``, "megatron" or "fsdp2"; a collective of the default process group.

    Only "megatron" imports megatron-core.
    """
    if name == "megatron":
        from ckptfsm.demo.model import Trainer, initialize_parallel

        initialize_parallel(tensor_parallel)
        return Trainer(ModelSpec(), tensor_parallel, device)
    from ckptfsm.demo.fsdp2 import FsdpTrainer

    use_deterministic_kernels()
    return FsdpTrainer(ModelSpec(), device)


def check_imports(name: str) -> None:
    """Raise ``CkptFsmError`` if a process that trains without megatron-core has imported it."""
    found = sorted(module for module in sys.modules if module.partition(".")[0] == "megatron")
    if name != "megatron" and found:
        raise CkptFsmError(f"--trainer {name} has imported {', '.join(found[:5])}")
