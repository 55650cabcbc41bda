"""States in DCP's own format: their keys, the plan of several ranks, and what fits at a restore."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fakes import fake_ports
from hypothesis import assume, example, given
from hypothesis import strategies as st
from managers import QUICK
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptfsm import CheckpointManager
from ckptfsm.core.config import make_config
from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import (
    ConfigError,
    DamagedRoot,
    RecoveryWarning,
    RestoreFailed,
    SaveRefused,
)
from ckptfsm.core.images import SMALL_BYTES
from ckptfsm.core.parts import PerRank
from ckptfsm.dcp import fast_load, loading
from ckptfsm.dcp.dcp_states import DcpStates
from ckptfsm.dcp.driver import StateDriver
from ckptfsm.dcp.loading import DcpReading, keeps_values
from ckptfsm.dcp.metadata import read_planned
from ckptfsm.dcp.nested import flat
from ckptfsm.dcp.planning import DcpPlan
from ckptfsm.dcp.state_format import DriverOptions
from ckptfsm.ranks.manager import Manager

# ------------------------------------------------------------------------------------------ keys

NAMES = st.one_of(st.sampled_from(["a", "b", "a.b", "0", "1"]), st.integers(-1, 3), st.booleans())
VALUES = st.one_of(
    st.integers(), st.just("text"), st.builds(torch.ones, st.integers(0, 2)), st.none()
)
NESTS = st.recursive(
    VALUES,
    lambda inner: st.one_of(
        st.dictionaries(NAMES, inner, max_size=3),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=2).map(tuple),
    ),
    max_leaves=8,
)
STATES = st.dictionaries(NAMES, NESTS, max_size=4)


def is_same(one: Any, other: Any) -> bool:
    """True for nests with the same keys, types and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        kinds = [list(map(type, each)) for each in (one, other)]
        return (
            kinds[0] == kinds[1]
            and list(one) == list(other)
            and all(is_same(one[key], other[key]) for key in one)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


@given(STATES)
@example({"state": {0: {"exp_avg": torch.ones(1)}, 2: {"step": 1}}, "groups": [{"params": [0, 2]}]})
@example({"a": {}, "b": [], "c": [{}], "d": [[torch.ones(1)], 3], "e": (torch.ones(1),)})
def test_keys_and_places_are_those_of_torch(state):
    """Catches: a key that stock code does not find; a dict of numbers that stock reads as a list."""
    try:
        wanted, places = flatten_state_dict(state)
    except ValueError:
        with pytest.raises(SaveRefused, match="two values have the key"):
            flat("state", state, 0, SaveRefused)
        return
    found = flat("state", state, 0, SaveRefused)
    assert list(found.values) == list(wanted)
    assert all(found.values[key] is wanted[key] for key in wanted)
    assert found.mappings() == places
    assert [list(map(type, each)) for each in found.mappings().values()] == [
        list(map(type, each)) for each in places.values()
    ]


def emptied(value: Any) -> Any:
    """A nest to fill: its tensors are zeros, its other values None."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: emptied(each) for key, each in value.items()}
    taken = isinstance(value, list) and any(
        isinstance(e, (torch.Tensor, dict, list)) for e in value
    )
    return [emptied(each) for each in value] if taken else None


@given(STATES)
def test_values_are_put_back_where_they_were(state):
    """Catches: a value under the text of its number, beside the old one; a value in another's place."""
    try:
        there = flat("state", state, 0, SaveRefused)
    except SaveRefused:
        assume(False)
    empty = emptied(state)
    template = flat("state", empty, 0, RestoreFailed)
    assume(list(there.values) == list(template.values))
    for key, value in there.values.items():
        if not there.is_tensor(key):
            template.put(key, value)
    for key, value in template.values.items():
        if template.is_tensor(key):
            value.copy_(there.values[key])
    assert is_same(template.state, state)


# ------------------------------------------------------------------------------- plans of several ranks


@contextmanager
def as_rank(rank: int, ranks: int) -> Iterator[None]:
    """This process as a rank of a group that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def placed(
    local: torch.Tensor, mesh: Any, placements: Sequence[Placement], shape: tuple[int, ...]
) -> DTensor:
    """A distributed tensor of which this rank has ``local``."""
    stride = torch.empty(shape, device="meta").stride()
    of = DeviceMesh("cpu", mesh, _init_backend=False)
    return DTensor.from_local(
        local, of, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


@dataclass
class Group:
    """The plans of all ranks of a part, and what rank 0 made of them."""

    plans: list[DcpPlan]
    metadata: Metadata
    written: list[list[tuple[str, tuple[int, ...] | None]]]

    def owners_of(self, key: str) -> list[int]:
        return [rank for rank, keys in enumerate(self.written) for name, _ in keys if name == key]


StateOf = Callable[[int], Any]


def group(state_of: StateOf, ranks: int = 2, having: Sequence[int] | None = None) -> Group:
    """Plan a state on every rank, or on those ``having`` the part, and share the work."""
    plans, states = {}, {}
    for rank in range(ranks) if having is None else having:
        with as_rank(rank, ranks):
            states[rank] = DcpStates(DriverOptions(rank, ranks=ranks))
            plans[rank] = states[rank].plan("state", state_of(rank))
    planned = states[min(states)].merge("state", {r: plan.summary for r, plan in plans.items()})
    written = []
    for rank, plan in plans.items():
        items = [item for bucket in plan.buckets(rank, planned) for item, _ in bucket]
        written.append([(i.index.fqn, tuple(i.index.offset or ()) or None) for i in items])
    return Group(list(plans.values()), read_planned(planned.metadata), written)


def test_each_item_is_written_by_one_rank_and_the_work_is_shared():
    """Catches: a tensor that no rank writes; one that all ranks write; rank 0 that writes everything."""
    big = torch.ones(SMALL_BYTES)
    seen = group(lambda _: {"model": {f"w{n}": big for n in range(8)}, "step": 3}, 4)
    keys = [f"model.w{n}" for n in range(8)]
    assert all(len(seen.owners_of(key)) == 1 for key in [*keys, "step"])
    assert [sum(key in keys for key, _ in each) for each in seen.written] == [2, 2, 2, 2]
    assert sorted(seen.metadata.state_dict_metadata) == sorted([*keys, "step"])


def test_a_plan_that_is_known_has_the_shares_of_each_save():
    """Catches: items that no rank writes, as the ranks divided them otherwise the time before."""
    states, state = [], {f"w{n}": torch.ones(SMALL_BYTES) for n in range(4)}
    for rank in range(2):
        with as_rank(rank, 2):
            states.append(DcpStates(DriverOptions(rank, ranks=2)))
    for having, wanted in (((0, 1), 2), ((0,), 4)):
        plans = {rank: states[rank].plan("state", state) for rank in having}
        planned = states[0].merge("state", {rank: plan.summary for rank, plan in plans.items()})
        assert sum(map(len, plans[0].buckets(0, planned))) == wanted


def test_many_tensors_are_planned_and_staged_without_a_collection():
    """Catches: a full look at all objects of the trainer in each save, longer than the save itself."""
    driver = StateDriver(DriverOptions(0))
    draft = driver.draft({"state": {f"w{n}": torch.ones(1) for n in range(1000)}})
    planned = driver.merge([draft.summary])
    gc.collect()  # else the next one may be of an older generation
    seen = Mock()
    gc.callbacks.append(seen)
    try:
        draft.stage("", draft.specs, planned)
    finally:
        gc.callbacks.remove(seen)
    assert {each.args[1]["generation"] for each in seen.call_args_list} <= {0}
    assert seen.call_count <= 2  # one begins and ends, for all that was made meanwhile


def test_what_ranks_compare_is_kept_of_the_first_that_gives_it():
    """Catches: a value that differs, kept of a rank that nobody named."""

    def state(rank: int) -> Any:
        own = {"late": 1, "small": torch.ones(2)} if rank else {}
        return {"big": torch.ones(SMALL_BYTES), "best": rank, **own}

    seen = group(state, 3)
    assert [seen.owners_of(key) for key in ("best", "late", "small")] == [[0], [1], [1]]


def test_a_dtensor_that_is_divided_otherwise_than_its_mesh_says_is_refused(tmp_path: Path):
    """Catches: rows that are lost in silence, at a save or at a restore."""

    def uneven(rank: int) -> Any:
        return {"x": placed(torch.ones(5 - 2 * rank), [0, 1], [Shard(0)], (8,))}

    with pytest.raises(SaveRefused, match="this rank has") as caught:
        group(uneven)
    assert caught.value.key == "x"
    dcp.save({"x": torch.ones(8)}, checkpoint_id=tmp_path, no_dist=True)
    with as_rank(0, 2), pytest.raises(RestoreFailed, match="is not what its mesh"):
        DcpStates(DriverOptions(0, ranks=2)).survey("state", uneven(0), str(tmp_path), ())


def test_parts_on_meshes_of_some_ranks_are_compared_by_their_place():
    """Catches: the weights of one pipeline stage kept for another one's, without a word."""

    def digests(rank: int, value: float) -> Mapping[str, int]:
        with as_rank(rank, 4):
            mesh = [0, 1] if rank < 2 else [2, 3]
            state = {"x": placed(torch.full((4,), value), mesh, [Shard(0)], (8,))}
            return DcpStates(DriverOptions(rank, ranks=4)).plan("state", state).digests()

    first, second, other = digests(0, 1.0), digests(1, 1.0), digests(2, 2.0)
    assert list(first) == list(other) == ["x at (0,)"] and first != other
    assert not first.keys() & second.keys()


@pytest.mark.parametrize(
    ("state", "having", "words"),
    [
        (lambda rank: {"a": PerRank(1), f"a.rank_{1 - rank}": 2}, [0, 1], "that of a PerRank"),
        (lambda rank: {"a": PerRank(1)}, [1], "rank 0 gives none"),
    ],
)
def test_a_per_rank_that_is_not_each_ranks_is_refused(state, having, words):
    """Catches: a value under the key of another rank's; a PerRank that no restore could give back."""
    with pytest.raises(SaveRefused, match=words):
        group(state, having=having)


@pytest.mark.parametrize("where", [lambda m: {"app": {"model": m}}, lambda m: {"models": [m]}])
def test_an_object_with_a_state_dict_below_the_top_is_refused(where):
    """Catches: a module that is pickled whole, and the trainer's own left as it was by a restore."""
    with pytest.raises(SaveRefused, match="give its state_dict"):
        flat("state", where(torch.nn.Linear(2, 2)), 0, SaveRefused)


def test_a_pickled_value_keeps_its_types():
    """Catches: a size that comes back as a tuple, a parameter as a tensor; a value that contains itself
    and fails in the middle of a save."""
    loop: list[Any] = [1]
    loop.append(loop)
    states = DcpStates(DriverOptions(0))
    plan = states.plan(
        "state", {"x": (torch.nn.Parameter(torch.ones(2)), torch.Size([3])), "loop": (loop,)}
    )
    planned = states.merge("state", {0: plan.summary})
    found = {
        item.index.fqn: torch.load(data, weights_only=False)
        for bucket in plan.buckets(0, planned)
        for item, data in bucket
    }
    assert [type(each) for each in found["x"]] == [torch.nn.Parameter, torch.Size]
    assert found["loop"][0][1] is found["loop"][0]


def test_a_sharded_tensor_of_torch_has_a_plan():
    """Catches: a kind of tensor that is accepted, and fails in the middle of a save."""
    with as_rank(0, 1):
        one = sharded_tensor.ones(ChunkShardingSpec(0, ["rank:0/cpu"]), 4)
        plan = DcpStates(DriverOptions(0)).plan("state", {"x": one})
        assert (plan.expected_bytes, plan.digests()) == (16, {})


def test_parts_of_a_tensor_are_those_of_their_ranks():
    """Catches: a part that another rank writes, or none does; uneven parts at the wrong offset."""

    def state(rank: int) -> Any:
        rows = torch.full((4 - rank, 3), float(rank))  # 7 rows on two ranks
        return {
            "uneven": placed(rows, [0, 1], [Shard(0)], (7, 3)),
            "copied": placed(torch.ones(5), [0, 1], [Replicate()], (5,)),
            f"own.{rank}": torch.ones(2),
        }

    seen = group(state)
    for rank, keys in enumerate(seen.written):
        assert [offset for key, offset in keys if key == "uneven"] == [(4 * rank, 0)]
        assert (f"own.{rank}", (0,)) in keys
    assert len(seen.owners_of("copied")) == 1
    chunks = seen.metadata.state_dict_metadata["uneven"].chunks
    assert sorted((tuple(c.offsets), tuple(c.sizes)) for c in chunks) == [
        ((0, 0), (4, 3)),
        ((4, 0), (3, 3)),
    ]


def test_the_data_of_an_item_are_those_of_its_rank():
    """Catches: the data of another key or rank under an item."""
    plans = {}
    for rank in range(2):
        with as_rank(rank, 2):
            local = torch.full((4 - rank,), float(rank))
            state = {"x": placed(local, [0, 1], [Shard(0)], (7,)), "y": torch.ones(3)}
            states = DcpStates(DriverOptions(rank, ranks=2))
            plans[rank] = states.plan("state", state), local
    planned = states.merge("state", {rank: plan.summary for rank, (plan, _) in plans.items()})
    for rank, (plan, local) in plans.items():
        data = {item.index.fqn: d for bucket in plan.buckets(rank, planned) for item, d in bucket}
        assert data["x"].data_ptr() == local.data_ptr()


HALF = torch.ones(2, 3)
REFUSED: Mapping[str, tuple[StateOf, tuple[str, ...]]] = {
    "kind": (lambda r: {"a": torch.ones(1) if r else 5}, ("'a' is no tensor", "rank 0", "rank 1")),
    "size": (lambda r: {"a": torch.ones(r + 1)}, ("shape (1,)", "shape (2,)")),
    "dtype": (
        lambda r: {"a": torch.ones(2, dtype=(torch.float32, torch.float64)[r])},
        ("torch.float32 on rank 0", "torch.float64 on rank 1"),
    ),
    "half": (
        lambda r: {"a": placed(HALF, [0, 1], [Shard(0)], (4, 3))} if r else {"b": torch.ones(1)},
        ("has 12 elements", "only 6"),
    ),
    "twice": (
        lambda r: {"a": placed(HALF[r:], [0, 1][: r + 1], [Shard(0)], (2, 3))},
        ("'a' has 6 elements", "9 of them"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_ranks_whose_values_make_no_whole_are_refused(case):
    """Catches: a checkpoint with a hole, or with one rank's value in the place of another's."""
    state_of, said = REFUSED[case]
    with pytest.raises(SaveRefused) as caught:
        group(state_of)
    assert all(words in caught.value.message for words in said), caught.value.message
    assert caught.value.part == "state" and caught.value.key in {"a", "b"}


@pytest.mark.parametrize("having", [[0], [1]])
def test_a_part_of_one_rank_has_whole_tensors(having):
    """Catches: torch asks whether a tensor is covered only if several ranks have it."""
    with pytest.raises(SaveRefused, match="has 12 elements.*rank [01] are only 6"):
        group(lambda _: {"a": placed(HALF, [0, 1], [Shard(0)], (4, 3))}, having=having)


def test_tensors_of_another_mesh_are_left_to_its_ranks():
    """Catches: a rank outside of a mesh that fails, or writes a part that it does not have."""

    def state(rank: int) -> Any:
        local = HALF if rank == 1 else torch.empty(0)
        return {"a": placed(local, [1], [Shard(0)], (2, 3)), "b": torch.ones(1)}

    assert group(state).owners_of("a") == [1]


# ------------------------------------------------------------------------------------- PerRank


def test_a_value_of_each_rank_is_kept_for_each():
    """Catches: one rank's position of a loader for all; a rank without one, noticed at the restore."""
    seen = group(lambda rank: {"loader": {"at": PerRank(rank)}})
    assert seen.written == [[("loader.at.rank_0", None)], [("loader.at.rank_1", None)]]
    assert group(PerRank).written == [[("per_rank.rank_0", None)], [("per_rank.rank_1", None)]]
    with pytest.raises(SaveRefused, match="'loader' is a PerRank, and rank 1 gives none") as caught:
        group(lambda rank: {"loader": PerRank(0)} if rank == 0 else {"step": 1})
    assert (caught.value.key, caught.value.ranks) == ("loader", (1,))


def test_a_value_that_becomes_one_of_each_rank_is_planned_anew():
    """Catches: a plan of the same keys, used again, which does not know that it has such values."""
    states = DcpStates(DriverOptions(0))
    states.plan("state", {"loader": {"rank_0": 1}})
    assert states.plan("state", {"loader": PerRank(1)}).summary.per_rank == {"loader"}


def test_a_list_that_becomes_a_dict_of_numbers_is_planned_anew():
    """Catches: metadata by which a stock loader makes a list of it."""
    states, tensor = DcpStates(DriverOptions(0)), torch.ones(2)
    states.plan("state", {"x": [tensor]})
    summary = states.plan("state", {"x": {0: tensor}}).summary
    planned = read_planned(states.merge("state", {0: summary}).metadata)
    assert planned.planner_data == {"x.0": ("x", "0")}


# ------------------------------------------------------------------------------------- restoring


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """What stock DCP saved of ``stored``."""
    dcp.save(stored(1), checkpoint_id=tmp_path / "there", no_dist=True)
    return tmp_path / "there"


class Counter:
    """A trainer's object with a state of its own, made anew at each call."""

    def __init__(self, value: int = 0) -> None:
        self.value, self.data = value, torch.full((4,), float(value))

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "data": self.data.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.data = state["value"], state["data"]


def stored(seed: int) -> dict[str, Any]:
    """A state with values of every kind; ``seed=0``: to fill."""
    fill = torch.full((4, 3), float(seed))
    return {
        "model": {"w": fill, "steps": torch.full((2,), 300 * seed, dtype=torch.int32)},
        "optimizer": {"state": {0: {"at": seed, "m": fill * 2}, 3: {"at": seed + 1}}, "lr": [seed]},
        "counter": Counter(seed),
        "loader": {"rank_0": seed * 10, "rank_1": seed * 11},
    }


def restored(directory: Path, state: Any, rank: int = 0, ranks: int = 1, **how: Any) -> Any:
    """What the driver of a rank loads, and the keys that nobody asked for."""
    options = DriverOptions(rank, ranks=ranks)
    with as_rank(rank, ranks):
        driver, droppable = StateDriver(options), how.get("droppable", ())
        parts, places = {"state": state}, {"state": str(directory)}
        survey = driver.survey(parts, places, droppable)
        unused = driver.check([survey], survey.missing) if rank == 0 else set()
        return driver.load(parts, places, survey.missing)["state"], unused


def test_a_state_is_filled_in_place(directory):
    """Catches: values under the text of their numbers; tensors that are new; objects left as they
    were; a key that nobody asked for, and nobody hears of."""
    template = stored(0)
    kept, counter, states = (
        template["model"]["w"],
        template["counter"],
        template["optimizer"]["state"],
    )
    found, unused = restored(directory, template)
    assert found is template and found["model"]["w"] is kept and found["counter"] is counter
    assert found["optimizer"]["state"] is states
    whole = stored(1)
    assert (counter.value, counter.data.tolist()) == (1, [1.0] * 4)
    del found["counter"], whole["counter"]
    assert is_same(found, whole) and unused == set()
    del template["model"]["steps"]
    assert restored(directory, template)[1] == {"model.steps", "counter.value", "counter.data"}


def test_a_tensor_that_was_not_filled_is_loaded(directory):
    """Catches: a tensor that could be read straight from its file, and was not, left as it was; one
    that was, and is read once more."""
    template = {"model": {"w": torch.zeros(4, 3)}}
    (file,) = directory.glob("*.distcp")
    entry = FileEntry(name=file.name, bytes=file.stat().st_size, digest="of it")
    reading = DcpReading("state", template, str(directory), 0)
    [[target]] = reading.targets("", {file.name: entry}).values()
    reading.load((), {target.regions[0].shard})
    assert template["model"]["w"].unique().tolist() == [0.0]
    reading.load((), ())
    assert template["model"]["w"].unique().tolist() == [1.0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_value_of_each_rank_is_that_of_the_rank(directory, rank):
    """Catches: another rank's position of the loader."""
    found, _ = restored(directory, {"loader": PerRank(None)}, rank, 2)
    assert found == {"loader": (10, 11)[rank]}


@pytest.mark.parametrize("ranks", [1, 3])
def test_values_of_each_rank_are_not_divided_anew(directory, ranks):
    """Catches: ranks that go on with no position, or with another's, though nobody said so."""
    for droppable in ((), ("other",)):
        with pytest.raises(RestoreFailed, match="2 ranks.*reshard_drops=\\('loader'") as caught:
            restored(directory, {"loader": PerRank(None)}, 0, ranks, droppable=droppable)
        assert caught.value.key == "loader"
    template = {"loader": PerRank(None), "model": {"w": torch.zeros(4, 3)}}
    found, unused = restored(directory, template, 0, ranks, droppable=("loader",))
    assert "loader" not in found and found["model"]["w"].unique().tolist() == [1.0]
    assert not [key for key in unused if key.startswith("loader")]


def test_a_value_of_each_rank_that_is_not_there_is_named(directory):
    """Catches: a typing error without the name that was meant; "no key 'a'; nearest: 'a'"."""
    with pytest.raises(RestoreFailed, match="no key 'laoder'; nearest: 'loader'"):
        restored(directory, {"laoder": PerRank(None)})
    with pytest.raises(RestoreFailed, match="'counter.value' is one value for all ranks"):
        restored(directory, {"counter": {"value": PerRank(None)}})


def test_a_part_of_each_rank(tmp_path):
    """Catches: a whole part of ``PerRank`` that is found under another key than it was saved."""
    dcp.save({"per_rank": {"rank_0": 1}}, checkpoint_id=tmp_path / "there", no_dist=True)
    assert restored(tmp_path / "there", PerRank(None))[0] == 1
    assert restored(tmp_path / "there", PerRank(0), 0, 2, droppable=("per_rank",))[0] is None


UNFIT: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    "missing": ({"model": {"ww": torch.zeros(4, 3)}}, ("no key 'model.ww'", "nearest: 'model.w'")),
    "shape": ({"model": {"w": torch.zeros(3, 4)}}, ("wanted shape (3, 4)", "has shape (4, 3)")),
    "dtype": (
        {"model": {"w": torch.zeros(4, 3, dtype=torch.int64)}},
        ("wanted torch.int64", "has torch.float32"),
    ),
    "narrow": ({"model": {"steps": torch.zeros(2, dtype=torch.int8)}}, ("wanted torch.int8",)),
    "a tensor": ({"model": {"w": 0}}, ("'model.w' is a tensor", "given to fill, a int")),
    "read-only": (
        {"optimizer": MappingProxyType({"lr": None})},
        ("'optimizer.lr' is in a mappingproxy", "give a dict"),
    ),
    "no tensor": ({"optimizer": {"lr": torch.zeros(1)}}, ("'optimizer.lr' is no tensor",)),
    "meta": ({"model": {"w": torch.zeros(4, 3, device="meta")}}, ("cannot be filled", "meta")),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_state_that_does_not_fit_is_refused_by_key(directory, case):
    """Catches: values that change on the way; torch's own error, which names no part; a value that is
    left as it was."""
    template, said = UNFIT[case]
    with pytest.raises(RestoreFailed) as caught:
        restored(directory, template)
    assert caught.value.part == "state" and "Nothing was changed" in caught.value.message
    assert all(words in caught.value.message for words in said), caught.value.message


def test_what_keeps_its_values_is_loaded(directory):
    """Catches: a model in another floating point type that nobody can load."""
    template = {"model": {"w": torch.zeros(4, 3, dtype=torch.bfloat16), "steps": torch.zeros(2)}}
    found, _ = restored(directory, template)
    assert found["model"]["w"].unique().tolist() == [1.0]
    assert found["model"]["steps"].tolist() == [300.0] * 2


@pytest.mark.parametrize("name", ["/etc/passwd", "../other/__0_0.distcp", "a/../../x"])
def test_metadata_that_name_files_outside_are_damage(directory, name):
    """Catches: a checkpoint that makes a restore read files of others."""
    path = directory / ".metadata"
    whole = path.read_bytes()
    at = whole.index(b"__0_0.distcp")
    short = whole[at - 1 : at] == b"\x0c" and whole[at - 2 : at - 1] == b"\x8c"
    assert short, "pickled as a short text"
    changed = whole[: at - 1] + bytes([len(name)]) + name.encode() + whole[at + 12 :]
    path.write_bytes(_unframed(changed))
    with pytest.raises(DamagedRoot, match="names a file outside"):
        restored(directory, {"model": {"w": torch.zeros(4, 3)}})


def _unframed(pickled: bytes) -> bytes:
    """A pickle of one frame whose length was changed."""
    return pickled[:3] + (len(pickled) - 11).to_bytes(8, "little") + pickled[11:]


@pytest.mark.parametrize("verify", ["sizes", "none", "digests"])
def test_F21_damaged_metadata_are_passed_over_for_the_step_before(tmp_path, verify):
    """Catches: a restore that stops at metadata whose content nobody had compared; an error that
    names neither the file nor the step."""
    ports = fake_ports(tmp_path, driver=StateDriver(DriverOptions(0)))
    with Manager(ports, make_config({**QUICK, "verify": verify})) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.full((2,), float(step))}).wait()
        for step, file in ((2, "iter_0000002/.metadata"), (1, "iter_0000001/.metadata")):
            path = tmp_path / file
            path.write_bytes(bytes(path.stat().st_size))
            if step == 2:
                with pytest.warns(RecoveryWarning, match=r"step 2 .*: \.metadata has another"):
                    found = manager.restore({"w": torch.zeros(2)})
                assert found.step == 1 and found.state["w"].tolist() == [1.0] * 2
        with pytest.raises(DamagedRoot, match="step 1 .*metadata has another"):
            manager.restore({"w": torch.zeros(2)})


@pytest.mark.parametrize("verify", ["digests", "none"])
def test_a_restore_takes_the_state_and_the_metadata_apart_once(tmp_path, verify):
    """Catches: metadata of many ranks that are read three times; an object that is asked for its state
    three times; and a reading that outlives its restore, though the trainer's dict has changed."""
    ports = fake_ports(tmp_path, driver=StateDriver(DriverOptions(0)))
    with Manager(ports, make_config({**QUICK, "verify": verify})) as manager:
        manager.save(1, {"counter": Counter(3), "w": torch.ones(1 << 14)}).wait()
        state = {"counter": Counter(), "w": torch.zeros(1 << 14)}
        asked, reads = Mock(side_effect=state["counter"].state_dict), Mock(side_effect=read_planned)
        state["counter"].state_dict = asked
        with (
            patch.object(loading, "read_planned", reads),
            patch.object(fast_load, "read_planned", reads),
        ):
            manager.restore(state)
        assert (asked.call_count, reads.call_count) == (1, 1) and state["counter"].value == 3
        state["w"] = torch.zeros(1 << 14)
        manager.restore(state)
        assert state["w"].sum() == 1 << 14


def test_metadata_that_this_torch_cannot_read_are_no_damage(tmp_path):
    """Catches: checkpoints of a newer torch that are withdrawn one by one."""
    ports = fake_ports(tmp_path, driver=StateDriver(DriverOptions(0)))
    with Manager(ports, make_config({**QUICK, "verify": "sizes"})) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.ones(2)}).wait()
        newer = patch.object(loading, "read_planned", side_effect=DamagedRoot("names torch.New"))
        with newer, pytest.raises(DamagedRoot, match=r"part 'state': .*torch\.New") as caught:
            manager.restore({"w": torch.zeros(2)})
        assert manager.all_steps() == [1, 2] and caught.value.step == 2
        assert caught.value.file == str(tmp_path / "iter_0000002/.metadata")


def test_a_part_without_metadata_is_no_state(tmp_path):
    """Catches: torch's own error for a directory with nothing in it."""
    with pytest.raises(RestoreFailed, match=r"has no \.metadata"):
        restored(tmp_path, {"a": torch.ones(1)})


def test_a_part_of_megatron_core_asks_for_it(directory, monkeypatch):
    """Catches: an ``ImportError`` for a checkpoint of megatron-core where that is not installed."""
    for name in [name for name in sys.modules if name.startswith(("megatron", "ckptfsm.megatron"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron", None)
    (directory / "metadata.json").write_text('{"sharded_backend":"torch_dist"}')
    (directory / "common.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"pip install 'ckptfsm\[megatron\]'"):
        restored(directory, {"model": {"w": torch.zeros(4, 3)}})


def test_values_of_megatron_core_do_not_fit_a_part_of_torch(directory):
    """Catches: a template of sharded tensors that is filled with nothing."""
    mapping = pytest.importorskip("megatron.core.dist_checkpointing")
    template = {
        "model": {"w": mapping.ShardedTensor.from_rank_offsets("model.w", torch.zeros(4, 3))}
    }
    with pytest.raises(RestoreFailed, match="'model.w' is a tensor.*a ShardedTensor"):
        restored(directory, template)


@pytest.mark.parametrize(
    ("stored", "wanted", "keeps"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.float32, torch.float16, True),
        (torch.float32, torch.float8_e4m3fn, False),
        (torch.int64, torch.float16, False),
        (torch.int64, torch.float32, True),
        (torch.int16, torch.float16, True),
        (torch.float64, torch.int64, False),
        (torch.int32, torch.int64, True),
        (torch.bool, torch.float8_e5m2, True),
    ],
)
def test_a_dtype_that_does_not_hold_the_values_is_told_from_one_that_rounds(stored, wanted, keeps):
    """Catches: a counter that becomes infinite in silence."""
    assert keeps_values(stored, wanted) is keeps


def test_a_target_whose_places_share_memory_is_refused_before_anything_is_filled(tmp_path: Path):
    """Catches: a state that is half overwritten when torch finds it."""
    dcp.save({"x": torch.ones(3, 2)}, checkpoint_id=tmp_path, no_dist=True)
    states = DcpStates(DriverOptions(0))
    with pytest.raises(RestoreFailed, match="share memory"):
        states.survey("state", {"x": torch.zeros(3, 1).expand(3, 2)}, str(tmp_path), ())


@pytest.mark.parametrize("verify", ["digests", "sizes"])
def test_a_dict_that_is_changed_after_a_failed_restore_is_looked_at_anew(tmp_path, verify):
    """Catches: values that are read into the tensors of the call before."""
    with CheckpointManager(tmp_path, verify=verify, sync=True) as manager:
        manager.save(1, {"w": torch.arange(4.0)})
        state = {"w": torch.zeros(4), "x": torch.zeros(2)}
        with pytest.raises(RestoreFailed, match="no key 'x'"):
            manager.restore(state)
        del state["x"]
        new = state["w"] = torch.zeros(4)
        assert manager.restore(state) is not None
        assert torch.equal(new, torch.arange(4.0))
