"""What the compared trainers share: a model, an update, and a line for each step."""

from __future__ import annotations

import json
import sys

import torch

WIDTH = 2048  # 50 MB of state
EVERY = 5  # steps between two saves
KEPT = 2


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(WIDTH, WIDTH)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One step of training, and its line."""
    x = batch(step)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    tell(step, loss.item())


def tell(step: int, loss: float) -> None:
    print(json.dumps([step, loss]), flush=True)


def arguments() -> tuple[str, int]:
    """The directory of the checkpoints, and the last step."""
    return sys.argv[1], int(sys.argv[2])
