"""Changes of the state behind a save, by a trainer that has promised no gate, and by one that has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402

from ckptfsm import CheckpointManager  # noqa: E402

pytestmark = pytest.mark.megatron

SIZE = 4 << 20  # numbers of four bytes: the writer cannot have read them when ``save`` returns


def fused_step(weight: torch.Tensor) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.Adam([weight], lr=0.5, fused=True).step()


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda weight: weight.data.add_(1),
    "numpy": lambda weight: weight.detach().numpy().__iadd__(1),
    "storage": lambda weight: weight.untyped_storage().copy_(torch.rand(SIZE).untyped_storage()),
    "fused optimizer": fused_step,
}


def state(weight: torch.Tensor) -> dict[str, ShardedTensor]:
    return {"w": ShardedTensor.from_rank_offsets("w", weight.detach())}


@pytest.mark.parametrize("engine", ["auto", "eager", "gated"])
def test_without_a_promise_no_change_behind_a_save_is_in_the_checkpoint(tmp_path: Path, engine):
    """Catches: a torn checkpoint of a trainer that never heard of a gate, through changes that torch
    does not count."""
    with CheckpointManager(tmp_path / "root", engine=engine) as manager:
        for step, change in enumerate(CHANGES.values(), start=1):
            weight = torch.nn.Parameter(torch.rand(SIZE))
            wanted = weight.detach().clone()
            handle = manager.save(step, state(weight))
            change(weight)
            assert not torch.equal(weight, wanted)
            handle.wait()
            found = manager.restore(state(torch.empty(SIZE)), step=step)
            assert torch.equal(found.state["w"], wanted)


def test_a_gated_save_without_a_promise_says_so_once(tmp_path: Path, caplog):
    """Catches: saves that keep the trainer waiting, and nobody tells how to avoid that."""
    weight = torch.nn.Parameter(torch.rand(SIZE))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with CheckpointManager(tmp_path / "root", engine="gated") as manager:
        for step in (1, 2):
            manager.save(step, state(weight)).wait()
        told = [record for record in caplog.records if record.event == "gate_not_promised"]
        assert len(told) == 1
        manager.attach(optimizer)
        manager.save(3, state(weight))
        assert not manager._participant.reports.writer.must_wait
