"""``PerRank`` values of a state, in a made-up group of two ranks."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptfsm import PerRank
from ckptfsm.core.errors import ConfigError
from ckptfsm.megatron.per_rank import with_objects


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
    placed = with_objects("state", state)
    assert placed["loader"]["a/b"] == ShardedObject("loader.a.b", 5, (2,), (1,))
    assert placed["plain"] is state["plain"]
    assert with_objects("gen", PerRank(7)) == {"gen": ShardedObject("gen", 7, (2,), (1,))}
    assert with_objects("state", placed) is placed


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("state", [{"a": [PerRank(1), 2]}, {"a": ({"b": PerRank(1)},)}])
def test_a_value_of_each_rank_in_a_list_is_refused(state):
    """Catches: a checkpoint that cannot be loaded: megatron-core loses the places in such a list."""
    with pytest.raises(ConfigError, match="'a' is a (list|tuple) with a PerRank"):
        with_objects("state", state)


def test_a_value_of_each_rank_inside_an_object_is_refused():
    """Catches: rank 0's value for all, wrapped into something that no trainer expects."""
    with pytest.raises(ConfigError, match="a PerRank has its place"):
        pickle.dumps({1: PerRank(1)})
