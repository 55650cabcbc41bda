"""The model's sizes, and settings of a process that trains: for both trainers of the demo."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

DROPOUT = 0.1  # above zero, so that a lost generator state shows in the very next loss


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Sizes of the model and its training; the defaults suit two CPU cores.

    ``batch_size`` is in sequences per data-parallel rank, ``sequence_length`` in tokens (bytes).
    """

    hidden_size: int = 320
    layers: int = 2
    heads: int = 4
    sequence_length: int = 128
    batch_size: int = 8
    learning_rate: float = 1e-3
    seed: int = 1234


def use_deterministic_kernels() -> None:
    """One thread and deterministic kernels, so that equal steps give equal bits."""
    # cuBLAS refuses to run under deterministic algorithms without a fixed workspace.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_num_threads(1)  # more threads change the order of sums, and fight over the cores
    torch.use_deterministic_algorithms(mode=True)
