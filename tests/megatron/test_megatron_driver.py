"""What ranks send each other of their plans, and what rank 0 remembers of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor

from ckptfsm.megatron.driver import MegatronDriver

pytestmark = pytest.mark.megatron


def state(rank: int, extra: str) -> dict[str, Any]:
    """Half of a tensor, and one more, named ``extra``, that only this rank has."""
    made = {"x": ShardedTensor.from_rank_offsets("x", torch.ones(4), (0, rank, 2))}
    if extra:
        made["extra"] = ShardedTensor.from_rank_offsets(f"{extra}{rank}", torch.ones(2))
    return made


def test_a_refused_save_takes_no_plans_from_rank_0() -> None:
    """Catches: a good save that is refused because rank 0 forgot what another rank refers to."""
    ranks = [MegatronDriver(0, 1), MegatronDriver(1, 1)]
    for accepted, extras in (
        (True, ("", "")),
        (False, ("", "y")),  # refused by the coordinator: the disk is full, say
        (True, ("", "y")),
        (True, ("", "y")),
        (True, ("z", "y")),
    ):
        drafts = [
            driver.draft({"state": state(rank, extras[rank])}) for rank, driver in enumerate(ranks)
        ]
        merged = ranks[0].merge([draft.summary for draft in drafts])
        assert set(merged) == {"state"}
        for driver in ranks:
            if accepted:
                driver.accept()
            else:
                driver.refuse()
    assert [draft.summary.plans is None for draft in drafts] == [False, True]
