"""Changes of the state behind a save, by a trainer that has promised no gate, and by one that has."""

from __future__ import annotations

import time
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
        assert not manager._share.writer.must_wait


def wait_for_process(manager: CheckpointManager) -> None:
    """On a slow machine, a save that does not wait is forked."""
    assert manager._engine._greet(time.monotonic() + 60)


def is_lent(manager: CheckpointManager) -> bool:
    """True if the process of the save in flight reads memory of the trainer behind ``save``."""
    return manager._share.writer.process._mutable


@pytest.mark.parametrize("engine", ["auto", "gated"])
@pytest.mark.parametrize("flat", [False, True])
def test_what_no_optimizer_owns_may_change_behind_a_save(tmp_path: Path, engine, flat):
    """Catches: an average of the weights, or a buffer of a BatchNorm, that is torn by a change before
    the optimizer's next step, also where it lies in one storage with the weights; a save that fails for
    a change which nobody promised to hold back."""
    changes = {name: change for name, change in CHANGES.items() if not flat or name != "storage"}
    weight, ema = torch.nn.Parameter(torch.rand(SIZE)), torch.nn.Parameter(torch.rand(SIZE))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def both() -> dict[str, ShardedTensor]:
        return state(weight) | {"ema": ShardedTensor.from_rank_offsets("ema", ema.detach())}

    with CheckpointManager(tmp_path / "root", engine=engine) as manager:
        wait_for_process(manager)
        hook = manager.attach(optimizer)
        for step, change in enumerate(changes.values(), start=1):
            if flat:
                weight.data, ema.data = torch.cat([weight.detach(), ema.detach()]).split(SIZE)
            wanted = [each.detach().clone() for each in (weight, ema)]
            handle = manager.save(step, both())
            assert is_lent(manager)  # the weight
            change(ema)
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            handle.wait()
            kept = (weight.detach().clone(), ema.detach().clone())
            found = manager.restore(both(), step=step).state
            assert torch.equal(found["w"], wanted[0]) and torch.equal(found["ema"], wanted[1])
            weight.data, ema.data = kept

        hook.remove()
        manager.save(step + 1, both())
        assert not is_lent(manager)
        manager.wait_until_finished()


def test_a_trainer_that_promises_all_of_its_state_has_nothing_copied(tmp_path: Path):
    """Catches: a copy of the whole state for a trainer that calls ``before_update`` itself."""
    weight, other = torch.nn.Parameter(torch.rand(SIZE)), torch.rand(SIZE)
    with CheckpointManager(tmp_path / "root") as manager:
        wait_for_process(manager)
        manager.attach(torch.optim.SGD([weight], lr=0.1))  # the optimizer is gone at once
        manager.save(1, state(other))
        assert not is_lent(manager)
        manager.before_update()
        manager.expect_gate()
        manager.save(2, state(other))
        assert is_lent(manager)
        manager.before_update()
        manager.wait_until_finished()
