"""``PerRank`` values, and the ``make`` of a lone rank, in a made-up group of two ranks."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptfsm import PerRank
from ckptfsm.core.errors import ConfigError, SaveFailed
from ckptfsm.core.parts import PartSpec
from ckptfsm.dcp.lone_make import no_collective
from ckptfsm.megatron.per_rank import with_objects

LONE = PartSpec("export", "tree", "export", (0,))


@pytest.fixture
def _group() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_group")
def test_a_value_of_each_rank_is_an_object_with_a_place_for_each():
    """Catches: a value that stays plain, of which one rank's is kept; a key that stock's metadata
    cannot hold."""
    state = {"loader": {"a/b": PerRank(5)}, "plain": {"x": [1]}}
    placed = with_objects(state)
    assert placed["loader"]["a/b"] == ShardedObject("loader.a.b", 5, (2,), (1,))
    assert placed["plain"] is state["plain"]
    assert with_objects(PerRank(7)) == {"per_rank": ShardedObject("per_rank", 7, (2,), (1,))}
    assert with_objects(placed) is placed


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("state", [{"a": [PerRank(1), 2]}, {"a": ({"b": PerRank(1)},)}])
def test_a_value_of_each_rank_in_a_list_is_refused(state):
    """Catches: a checkpoint that cannot be loaded: megatron-core loses the places in such a list."""
    with pytest.raises(ConfigError, match="'a' is a (list|tuple) with a PerRank"):
        with_objects(state)


def test_a_value_of_each_rank_inside_an_object_is_refused():
    """Catches: rank 0's value for all, wrapped into something that no trainer expects."""
    with pytest.raises(ConfigError, match="a PerRank has its place"):
        pickle.dumps({1: PerRank(1)})


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize(
    "collective",
    [
        dist.barrier,
        lambda: dist.all_reduce(torch.zeros(1)),
        lambda: dist.broadcast_object_list([1], src=0),
        lambda: dist.send(torch.zeros(1), 0),
        lambda: torch.ops._c10d_functional.all_reduce(torch.zeros(1), "sum", "0"),
    ],
)
def test_I10_a_collective_of_a_lone_rank_is_refused_before_it_begins(collective):
    """Catches: a ``make`` that waits for ranks which never call it, until they count as gone."""
    alone = r"part 'export'.*rank 1 alone.*every_rank=True"
    with pytest.raises(SaveFailed, match=alone) as caught, no_collective(LONE, 1):
        collective()
    assert caught.value.facts == {"part": "export", "rank": 1}


@pytest.mark.usefixtures("_group")
def test_a_lone_rank_may_compute_and_write(tmp_path: Path):
    """Catches: a ``make`` that cannot use torch, or a group of its own."""
    alone = dist.new_group([1])
    with no_collective(LONE, 1):
        torch.save({"w": torch.ones(3) * 2}, tmp_path / "w.pt")
        dist.all_reduce(torch.zeros(1), group=alone)
    assert torch.load(tmp_path / "w.pt")["w"].tolist() == [2.0] * 3
    for spec in (PartSpec("export", "tree", "export"), PartSpec("export", "file")):
        with no_collective(spec, 1):
            dist.barrier()
