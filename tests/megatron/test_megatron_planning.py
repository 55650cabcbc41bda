"""Plans that are used again: only for the same structure, and always with the data of this save."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from ckptfsm.megatron import planning
from ckptfsm.megatron.compat import process_group
from ckptfsm.megatron.planning import PartDraft, Plans

pytestmark = pytest.mark.megatron


def state_of(seed: int) -> dict[str, Any]:
    """Tensors of all forms, objects and common values, whose bits depend on ``seed``."""
    make = torch.Generator().manual_seed(seed)
    base = torch.randn(40, 30, generator=make)
    halves = [torch.randn(4, 6, generator=make) for _ in range(2)]

    def split(key: str, data: torch.Tensor, *rest: Any) -> dict[str, Any]:
        return {
            str(i): ShardedTensor.from_rank_offsets(f"{key}.{i}", part)
            for i, part in enumerate(data.chunk(2))
        }

    return {
        "whole": ShardedTensor.from_rank_offsets("whole", base),
        "tied": ShardedTensor.from_rank_offsets("tied", base),
        "view": ShardedTensor.from_rank_offsets("view", base[3:9]),
        "columns": ShardedTensor.from_rank_offsets("columns", base.t()),
        "layers": ShardedTensor.from_rank_offsets(
            "layers", torch.randn(5, generator=make), (0, 0, 1), prepend_axis_num=1
        ),
        "shards": [
            ShardedTensor.from_rank_offsets("shards", half, (0, i, 2))
            for i, half in enumerate(halves)
        ],
        "made": ShardedTensorFactory("made", torch.randn(6, 2, generator=make), split, dict),
        "rng": ShardedObject("rng", {"seed": seed}, (1,), (0,)),
        "step": seed,
    }


def content_of(draft: PartDraft) -> list[Any]:
    """The items of a draft in order, with their bits."""
    found = []
    for bucket in draft.buckets:
        for item, value in bucket:
            bits = (
                value.getvalue()
                if isinstance(value, io.BytesIO)
                else (value.shape, value.stride(), value.tolist())
            )
            found.append((item, bits))
    return [found, draft.common, draft.expected_bytes, draft.summary]


def drafted(plans: Plans, state: dict[str, Any]) -> PartDraft:
    with process_group():
        return plans.draft("state", state)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows with each plan that is made."""
    calls: list[object] = []
    inner = planning._make

    def make(*arguments: Any) -> Any:
        calls.append(arguments[0])
        return inner(*arguments)

    monkeypatch.setattr(planning, "_make", make)
    return calls


def test_a_plan_that_is_used_again_has_the_data_of_its_save(made):
    """Catches: a checkpoint with the data of the save before, under the keys of this one."""
    plans = Plans(2)
    drafted(plans, state_of(1))
    again = drafted(plans, state_of(2))
    assert len(made) == 1
    assert content_of(again) == content_of(drafted(Plans(2), state_of(2)))


CHANGES = {
    "key": lambda s: s.update(other=ShardedTensor.from_rank_offsets("other", torch.ones(3))),
    "less": lambda s: s.pop("tied"),
    "shape": lambda s: s.update(view=ShardedTensor.from_rank_offsets("view", torch.ones(7, 30))),
    "dtype": lambda s: s.update(
        view=ShardedTensor.from_rank_offsets("view", torch.ones(6, 30, dtype=torch.float64))
    ),
    "stride": lambda s: s.update(
        view=ShardedTensor.from_rank_offsets("view", torch.ones(30, 6).t())
    ),
    "place": lambda s: s["shards"].reverse(),
    "replica": lambda s: s.update(
        tied=ShardedTensor.from_rank_offsets("tied", s["whole"].data, replica_id=1)
    ),
    "kind": lambda s: s.update(tied=ShardedObject("tied", 5, (1,), (0,))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_structure_is_planned_anew(made, change):
    """Catches: a plan of other shapes, places or replicas, with data that does not belong there."""
    plans = Plans(2)
    drafted(plans, state_of(1))
    changed, same = state_of(2), state_of(2)
    CHANGES[change](changed)
    CHANGES[change](same)
    assert content_of(drafted(plans, changed)) == content_of(drafted(Plans(2), same))
    assert len(made) == 3


def test_a_plan_of_uncertain_data_is_made_for_each_save(made, monkeypatch):
    """Catches: a future planner's copy of a tensor that is taken for the tensor."""
    inner = planning._resolve

    def copied(planner: Any, item: Any) -> Any:
        value = inner(planner, item)
        return value.clone() if isinstance(value, torch.Tensor) else value

    monkeypatch.setattr(planning, "_resolve", copied)
    plans = Plans(2)
    for _ in range(2):
        drafted(plans, state_of(1))
    assert len(made) == 2
