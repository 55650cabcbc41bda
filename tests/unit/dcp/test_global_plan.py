"""The plan of all ranks is that of torch, and metadata is what pickle writes of it."""

from __future__ import annotations

import gc
import pickle
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ckptfsm.core.errors import DamagedRoot, SaveRefused
from ckptfsm.core.images import SMALL_BYTES
from ckptfsm.core.parts import PerRank, Planned
from ckptfsm.dcp.dcp_states import DcpStates
from ckptfsm.dcp.global_plan import DcpSummary, merge_plans, summary_of
from ckptfsm.dcp.metadata import completed, dumped, finish_dcp, read_planned
from ckptfsm.dcp.nested import Flat, flat
from ckptfsm.dcp.plan_exchange import PlanExchange
from ckptfsm.dcp.state_format import DriverOptions
from ckptfsm.disk.pickle_stubs import load_metadata_stub

Part = tuple[tuple[int, ...], tuple[int, ...]]  # offset and size
BIG, TINY = (SMALL_BYTES // 4 + 1,), (3,)


def item(key: str, size: Sequence[int], part: Part | None, *, grad: bool = False) -> WriteItem:
    """An item as torch makes it: of a part of a tensor, or of a whole one."""
    offset, sizes = part or ((0,) * len(size), tuple(size))
    data = TensorWriteData(
        ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)),
        TensorProperties(torch.float32, requires_grad=grad),
        torch.Size(size),
    )
    kind = WriteItemType.TENSOR if part is None else WriteItemType.SHARD
    return WriteItem(MetadataIndex(key, offset), kind, tensor_data=data)


def rows(length: int, parts: int, number: int) -> Part:
    """A part of a matrix, as DTensor divides its rows: the last ones may be smaller, or empty."""
    each = -(-length // parts)
    first, last = min(number * each, length), min((number + 1) * each, length)
    return (first, 0), (last - first, 4)


def tiles(number: int) -> Part:
    """A quarter of a matrix of 4 by 4."""
    return (number // 2 * 2, number % 2 * 2), (2, 2)


VALUES = (  # what a rank of four has under a key; None: nothing
    lambda key, rank: item(key, (9, 4), rows(9, 4, rank), grad=True),
    lambda key, rank: item(key, (9, 4), rows(9, 2, rank % 2)),
    lambda key, rank: item(key, (3, 4), rows(3, 4, rank)),
    lambda key, rank: item(key, (4, 4), tiles(rank)),
    lambda key, rank: item(key, (4, 4), tiles(rank) if rank < 3 else tiles(2)),  # with a hole
    lambda key, rank: item(key, (9, 4), rows(9, 1, 0) if rank > 1 else rows(9, 2, rank)),  # twice
    lambda key, rank: item(key, BIG, None),
    lambda key, rank: item(key, BIG, None) if rank else None,
    lambda key, rank: item(key, BIG, ((0,), BIG) if rank else None),  # plain there, a DTensor here
    lambda key, rank: item(key, TINY, None, grad=rank > 1) if rank != 1 else None,
    lambda key, rank: WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO),
    lambda key, rank: WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) if rank % 2 else None,
    PerRank,
)


def plans_of(values: Sequence[int]) -> dict[int, tuple[list[WriteItem], Flat]]:
    """The items of four ranks, with their states."""
    plans = {}
    for rank in range(4):
        items: dict[str, WriteItem | None] = {}
        for number, value in enumerate(values):
            if VALUES[value] is PerRank:
                key = f"k{number}.rank_{rank}"
                items[key] = WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
            else:
                items[f"k{number}"] = VALUES[value](f"k{number}", rank)
        state = {
            f"k{number}": PerRank(0) if VALUES[value] is PerRank else rank
            for number, value in enumerate(values)
        }
        plans[rank] = [each for each in items.values() if each], flat("s", state, rank, SaveRefused)
    return plans


def by_torch(plans: Mapping[int, tuple[list[WriteItem], Flat]]) -> tuple[list[SavePlan], Metadata]:
    """Torch's plan, with what ranks compare in that of the first rank alone which gives it."""
    seen: set[str] = set()
    given = []
    for items, state in plans.values():
        kept = []
        for each in items:
            data = each.tensor_data
            whole = each.type != WriteItemType.SHARD
            if whole and (data is None or data.size.numel() * 4 < SMALL_BYTES):
                if each.index.fqn in seen:
                    continue
                seen.add(each.index.fqn)
            kept.append(each)
        given.append(SavePlan(kept, planner_data=state.mappings()))
    return DefaultSavePlanner().create_global_plan(given)


def summaries_of(plans: Mapping[int, tuple[list[WriteItem], Flat]]) -> dict[int, DcpSummary]:
    sent = {rank: pickle.dumps(summary_of(*plan)) for rank, plan in plans.items()}
    return {rank: pickle.loads(data) for rank, data in sent.items()}


@given(st.lists(st.integers(0, len(VALUES) - 1), min_size=1, max_size=6))
def test_the_plan_is_that_of_torch(values: list[int]) -> None:
    """Catches: another rank than torch's that writes an item; a chunk, place or property that is lost; a
    tensor with a hole or a double part that is not refused."""
    plans = plans_of(values)
    try:
        wanted, metadata = by_torch(plans)
    except (ValueError, AssertionError):
        with pytest.raises(SaveRefused):
            merge_plans("s", summaries_of(plans), 4)
        return
    planned = merge_plans("s", summaries_of(plans), 4)
    assert read_planned(planned.metadata) == metadata
    for rank, (items, _) in plans.items():
        mask = zlib.decompress(pickle.loads(planned.shares)[rank])
        kept = [each for each, is_own in zip(items, mask, strict=True) if is_own]
        assert kept == wanted[rank].items


def test_a_share_is_told_again_once_a_plan_has_changed() -> None:
    """Catches: a message that grows with the ranks in every save; a rank that keeps to an old share."""
    exchanges = [PlanExchange() for _ in range(2)]
    states = [DcpStates(DriverOptions(rank, ranks=2)) for rank in range(2)]
    big = {f"w{number}": torch.ones(BIG) for number in range(4)}

    def save(*given: Any, interrupted: int | None = None) -> tuple[bool, list[set[str]]]:
        """Whether the shares were told, and the keys that each rank writes, or all but one do."""
        plans = [each.plan("s", state) for each, state in zip(states, given, strict=True)]
        sent = [each.summary_of({"s": p.summary}) for each, p in zip(exchanges, plans, strict=True)]
        planned = exchanges[0].merge(sent, states[0].merge)["s"]
        going_on = [number for number in range(2) if number != interrupted]
        for number in going_on:
            exchanges[number].accept()
        buckets = [plans[number].buckets(number, planned) for number in going_on]
        keys = [{item.index.fqn for bucket in each for item, _ in bucket} for each in buckets]
        return bool(planned.shares), keys

    divided = [{"w0", "w2"}, {"w1", "w3"}]
    less = {"w1": big["w1"]}
    assert save(big, big) == (True, divided)
    assert save(big, big) == (False, divided)
    assert save(big, less) == (True, [{"w0", "w2", "w3"}, {"w1"}])
    assert save(big, less) == (False, [{"w0", "w2", "w3"}, {"w1"}])
    assert save(big, big) == (True, divided)
    exchanges[1].refuse()
    assert save(big, big) == (True, divided)
    assert save(big, less, interrupted=0) == (True, [{"w1"}])
    assert save(big, less) == (True, [{"w0", "w2", "w3"}, {"w1"}])


def test_a_value_of_each_rank_may_have_the_key_of_another() -> None:
    """Catches: a state that is refused, as two values have one key but for the rank."""
    plans = {}
    for rank in range(2):
        state = flat("s", {"x": {"y": PerRank(rank)}, "x.y": 5}, rank, SaveRefused)
        kind = WriteItemType.BYTE_IO
        plans[rank] = [WriteItem(MetadataIndex(key), kind) for key in state.values], state
    planned = merge_plans("s", summaries_of(plans), 2)
    assert read_planned(planned.metadata).planner_data == {
        "x.y": ("x.y",),
        "x.y.rank_0": ("x", "y", "rank_0"),
        "x.y.rank_1": ("x", "y", "rank_1"),
    }
    masks = {r: sum(zlib.decompress(m)) for r, m in pickle.loads(planned.shares).items()}
    assert masks == {0: 2, 1: 1}


@pytest.mark.parametrize("written", [3, 5])
def test_metadata_is_not_made_of_more_or_fewer_items_than_were_planned(written: int) -> None:
    """Catches: a tensor that no rank has written, in a checkpoint that is tracked."""
    planned = merge_plans("s", summaries_of(plans_of([0])), 4).metadata
    rows = [("k0", [3 * number, 0], None, f"__{number}_0.distcp", 0, 10) for number in range(5)]
    assert finish_dcp(planned, [rows[:3], rows[3:4]], "/x")
    with pytest.raises(DamagedRoot, match=f"{written} items were written, and 4 are planned"):
        finish_dcp(planned, [rows[:written]], "/x")


ROWS = st.tuples(
    st.sampled_from(["a", "b", "é" * 200]),
    st.one_of(st.none(), st.lists(st.integers(0, 1 << 40), max_size=2)),
    st.one_of(st.none(), st.integers(0, 300)),
    st.sampled_from(["__0_0.distcp", "__1_0.distcp"]),
    *[st.integers(0, 1 << 40)] * 2,
)


@given(st.lists(st.lists(ROWS, max_size=4), max_size=3))
def test_metadata_is_what_pickle_makes_of_it(results: list[list[Any]]) -> None:
    """Catches: an item at another's place; a file that stock code, or ``ckptfsm adopt``, cannot read."""
    plan = merge_plans("s", summaries_of(plans_of([0, 10])), 4).metadata
    metadata = completed(plan, "/x")
    data = dumped(metadata, results)
    assert load_metadata_stub(data).get("storage_data") is not None
    found = pickle.loads(data)
    metadata.storage_data = {
        MetadataIndex(key, offset, hint): _StorageInfo(file, start, length)
        for rows in results
        for key, offset, hint, file, start, length in rows
    }
    assert found == metadata and type(found) is Metadata
    hints = [each.index for each in found.storage_data]
    assert hints == [each.index for each in metadata.storage_data]
    assert pickle.loads(pickle.dumps(metadata)) == found


class Watching:
    """A plan that notes whether objects can start a collection of garbage while it is pickled."""

    noted: ClassVar[list[int]] = []

    def __reduce__(self) -> tuple[type[Watching], tuple[()]]:
        self.noted.append(gc.get_threshold()[0])
        return Watching, ()


def test_plans_start_no_collection_of_garbage() -> None:
    """Catches: a first save that looks at all objects of the trainer, for a quarter of its time."""

    def merge_part(name: str, plans: Mapping[int, Any]) -> Planned:
        Watching.noted.append(gc.get_threshold()[0])
        return Planned(b"", b"")

    Watching.noted.clear()
    exchange = PlanExchange()
    exchange.merge([exchange.summary_of({"s": Watching()})], merge_part)
    assert Watching.noted == [0, 0]
