"""The plans of all ranks as one: DCP's metadata, and which rank writes an item that several have.

The result is that of torch's ``create_global_plan``, which takes 11 s for 256 ranks with 2,500 items
each. So a rank does not send torch's plan, but the names of its items, the same on most ranks, and
the few forms that they have. Torch looks at one of the tensors that are divided alike.
"""

from __future__ import annotations

import pickle
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ckptfsm.core.errors import SaveRefused, describe, name_ranks
from ckptfsm.core.images import SMALL_BYTES
from ckptfsm.core.parts import Planned
from ckptfsm.dcp.nested import Flat

Index = tuple[str, tuple[int, ...] | None]  # key and offset, as DCP tells items apart


class Form(NamedTuple):
    """An item without its key; without ``data`` that of a value which is pickled.

    ``data`` has the size of the whole tensor, offset and size of the part, and torch's properties.
    """

    shard: bool = False
    offset: tuple[int, ...] | None = None
    data: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[Any, ...]] | None = None


_PICKLED = Form()


@dataclass(frozen=True, slots=True)
class DcpSummary:
    """A rank's plan of a part for rank 0.

    ``names``: a compressed ``_Names``. ``forms``: those of its items, by number. ``per_rank``: the
    names of its ``PerRank`` values.
    """

    names: bytes
    forms: tuple[Form, ...]
    per_rank: frozenset[str]


class _Names(NamedTuple):
    """What ranks with the same structure have in common, in the order of their items.

    ``forms`` has the number of each item's form. A ``PerRank`` is in ``keys`` without its rank, at the
    numbers ``own_at``, and its place in ``own``; the places of all other values are in ``places``.
    """

    keys: list[str]
    forms: array[int]
    places: dict[str, tuple[Any, ...]]
    own: dict[str, tuple[Any, ...]]
    own_at: array[int]


def summary_of(items: Sequence[WriteItem], state: Flat) -> DcpSummary:
    """What rank 0 has to know of a rank's items."""
    per_rank = state.per_rank
    numbers: dict[Form, int] = {}
    keys = [per_rank.get(item.index.fqn, item.index.fqn) for item in items]
    forms = array("I", (numbers.setdefault(_form_of(item), len(numbers)) for item in items))
    places = state.mappings()
    own = {name: places.pop(key)[:-1] for key, name in per_rank.items()}
    own_at = array("I", (n for n, item in enumerate(items) if item.index.fqn in per_rank))
    names = pickle.dumps(tuple(_Names(keys, forms, places, own, own_at)))
    return DcpSummary(zlib.compress(names, 1), tuple(numbers), frozenset(own))


def _form_of(item: WriteItem) -> Form:
    data, offset = item.tensor_data, item.index.offset
    if data is None:
        return _PICKLED
    chunk = data.chunk
    return Form(
        item.type == WriteItemType.SHARD,
        None if offset is None else tuple(offset),
        (
            tuple(data.size),
            tuple(chunk.offsets),
            tuple(chunk.sizes),
            data.properties.__getstate__(),
        ),
    )


# ---------------------------------------------------------------------------------------- at rank 0


class _Item:
    """A form at rank 0, where ranks with the same form have one of these. Compared by identity.

    ``is_compared``: ranks compare the value, and that of the first is kept. ``is_lone``: no other rank
    has a part of a tensor of that size at that offset, so none has the item. ``weight`` is what torch
    counts as bytes when it divides the work. ``kind``: None for what is pickled.
    """

    __slots__ = ("data", "is_compared", "is_lone", "kind", "offset", "type", "weight")

    def __init__(self, form: Form) -> None:
        self.offset, self.is_lone = form.offset, False
        self.data: TensorWriteData | None = None
        self.kind: tuple[tuple[int, ...], torch.dtype] | None = None
        self.type, self.weight, self.is_compared = WriteItemType.BYTE_IO, 1, True
        if form.data is not None:
            size, offsets, sizes, state = form.data
            properties = _properties(state)
            chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            self.data = TensorWriteData(chunk, properties, torch.Size(size))
            self.kind = (size, properties.dtype)
            self.type = WriteItemType.SHARD if form.shard else WriteItemType.TENSOR
            bytes_there = self.data.size.numel() * properties.dtype.itemsize
            self.weight = bytes_there or 1
            self.is_compared = not form.shard and bytes_there < SMALL_BYTES

    def under(self, key: str) -> WriteItem:
        return WriteItem(MetadataIndex(key, self.offset), self.type, tensor_data=self.data)


def _properties(state: tuple[Any, ...]) -> TensorProperties:
    made = TensorProperties()
    made.__setstate__(state)
    return made


class _RankPlan(NamedTuple):
    """The items of a rank. ``common`` are the names that it shares with others."""

    common: _Names
    forms: tuple[_Item, ...]
    keys: Sequence[str]

    def items(self) -> Iterator[tuple[str, _Item]]:
        return zip(self.keys, map(self.forms.__getitem__, self.common.forms), strict=True)


def _read(summaries: Mapping[int, DcpSummary]) -> dict[int, _RankPlan]:
    """The plans by rank. Equal names and forms are read once."""
    names_of = cache(lambda data: _Names(*pickle.loads(zlib.decompress(data))))
    item_of = cache(_Item)
    plans = {}
    there: dict[Any, set[int]] = defaultdict(set)
    for rank, summary in sorted(summaries.items()):
        common = names_of(summary.names)
        keys = common.keys
        if common.own_at:
            keys = keys.copy()
            for number in common.own_at:
                keys[number] = _own_key(keys[number], rank)
        items = tuple(map(item_of, summary.forms))
        plans[rank] = _RankPlan(common, items, keys)
        for item in items:
            there[item.kind and item.kind[0], item.offset].add(rank)
    for plan in plans.values():
        for item in plan.forms:
            item.is_lone = item.kind is not None and len(there[item.kind[0], item.offset]) == 1
    return plans


def _own_key(name: str, rank: int) -> str:
    """The key of a rank's ``PerRank``, as ``nested.flat`` gives it."""
    return f"{name}.rank_{rank}"


def merge_plans(part: str, summaries: Mapping[int, DcpSummary], ranks_saving: int) -> Planned:
    """DCP's metadata of all ranks' plans, and which of its items each rank writes.

    ``ranks_saving``: also those that do not give the part. Raises ``SaveRefused`` if the ranks' values
    do not make whole tensors.
    """
    plans = _read(summaries)
    _check_kinds(part, plans, summaries)
    _check_per_rank(part, summaries, ranks_saving)
    masks, kept = _divide(plans)
    try:
        _let_torch_judge(kept)
    except Exception as error:  # a plain ValueError of torch names no rank
        raise _refusal(part, plans, error) from error
    metadata = Metadata({key: _stored(items) for key, items in kept.items()}, _places(plans))
    shares = {rank: zlib.compress(mask, 1) for rank, mask in masks.items()}
    return Planned(pickle.dumps(metadata), pickle.dumps(shares))


def _divide(
    plans: Mapping[int, _RankPlan],
) -> tuple[dict[int, bytearray], dict[str, list[_Item]]]:
    """Divide the work: for each rank, which of its items it writes; and those of each key, by rank.

    An item goes to the rank with the least to write of those that have it. That is counted as torch
    does: in the order of the items, with the size of the whole tensor.
    """
    having = _having(plans)
    written = dict.fromkeys(plans, 0)
    keepers: dict[Index, int] = {}
    masks: dict[int, bytearray] = {}
    kept: dict[str, list[_Item]] = defaultdict(list)
    for rank, plan in plans.items():
        mask = masks[rank] = bytearray(len(plan.keys))
        for number, (key, item) in enumerate(plan.items()):
            if item.is_lone:
                written[rank] += item.weight
            else:
                index = key, item.offset
                keeper = keepers.get(index)
                if keeper is None:
                    keeper = keepers[index] = min(having[index], key=written.__getitem__)
                    written[keeper] += item.weight
                if keeper != rank:
                    continue
            mask[number] = True
            kept[key].append(item)
    return masks, kept


def _having(plans: Mapping[int, _RankPlan]) -> dict[Index, list[int]]:
    """The ranks that may write an item, but for those that only one rank has.

    What ranks compare is the first one's, where torch would keep any rank's.
    """
    having: dict[Index, list[int]] = defaultdict(list)
    compared: set[str] = set()
    for rank, plan in plans.items():
        shared = [(key, item) for key, item in plan.items() if not item.is_lone]
        for key, item in shared:
            if not item.is_compared or key not in compared:
                having[key, item.offset].append(rank)
        compared.update(key for key, item in shared if item.is_compared)
    return having


def _let_torch_judge(kept: Mapping[str, Sequence[_Item]]) -> None:
    """Let torch plan the tensors, one of those that are divided alike. Raises torch's error.

    Torch asks only of several plans whether they cover their tensors, so the second one is empty.
    """
    alike: dict[tuple[int, ...], str] = {}
    for key, parts in kept.items():
        alike.setdefault(tuple(sorted(map(id, parts))), key)
    items = [item.under(key) for key in alike.values() for item in kept[key]]
    plans = [SavePlan(items, planner_data={}), SavePlan([], planner_data={})]
    DefaultSavePlanner().create_global_plan(plans)


def _stored(items: Sequence[_Item]) -> TensorStorageMetadata | BytesStorageMetadata:
    first = items[0].data
    if first is None:
        return BytesStorageMetadata()
    chunks = [item.data.chunk for item in items if item.data is not None]
    return TensorStorageMetadata(first.properties, first.size, chunks)


def _places(plans: Mapping[int, _RankPlan]) -> dict[str, tuple[Any, ...]]:
    """The places of all ranks' values in the nested state; the first rank's count."""
    places: dict[str, tuple[Any, ...]] = {}
    different = {id(plan.common): plan.common for plan in plans.values()}
    for common in reversed(different.values()):
        places |= common.places
    for rank, plan in plans.items():
        for name, place in plan.common.own.items():
            places[_own_key(name, rank)] = (*place, f"rank_{rank}")
    return places


# ------------------------------------------------------------------------------------ what is refused


def _check_kinds(
    part: str, plans: Mapping[int, _RankPlan], summaries: Mapping[int, DcpSummary]
) -> None:
    """Refuse a key of several kinds, sizes or dtypes, and one of another rank's ``PerRank``.

    Ranks with the same names, whose forms have the same kinds, are looked at once.
    """
    own = {_own_key(name, rank): rank for name in _names_per_rank(summaries) for rank in plans}
    kinds: dict[str, dict[Any, int]] = defaultdict(dict)  # the first rank of each
    alike: set[Any] = set()
    for rank, plan in plans.items():
        looked = id(plan.common), tuple(form.kind for form in plan.forms)
        if looked in alike:
            continue
        alike.add(looked)
        for key, item in plan.items():
            if own.get(key, rank) != rank:
                raise SaveRefused(
                    f"part {part!r}: rank {rank} has the key {key!r}, which is that of a PerRank "
                    f"of rank {own[key]}: rename one of them",
                    part=part,
                    key=key,
                    rank=rank,
                )
            kinds[key].setdefault(item.kind, rank)
    for key, found in kinds.items():
        if len(found) > 1:
            (one, first), (other, second) = list(found.items())[:2]
            raise SaveRefused(
                f"part {part!r}: key {key!r} is {_named(one)} on rank {first} and {_named(other)} on "
                f"rank {second}: give it a name of its own on each, or the same value",
                part=part,
                key=key,
                ranks=(first, second),
            )


def _named(kind: tuple[Any, ...] | None) -> str:
    if kind is None:
        return "no tensor"
    size, dtype = kind
    return f"a tensor of shape {size} and {dtype}"


def _names_per_rank(summaries: Mapping[int, DcpSummary]) -> list[str]:
    return sorted(frozenset().union(*(each.per_rank for each in summaries.values())))


def _check_per_rank(part: str, summaries: Mapping[int, DcpSummary], ranks_saving: int) -> None:
    """Refuse a ``PerRank`` that not every rank gives."""
    for name in _names_per_rank(summaries):
        lacking = tuple(
            rank
            for rank in range(ranks_saving)
            if rank not in summaries or name not in summaries[rank].per_rank
        )
        if lacking:
            raise SaveRefused(
                f"part {part!r}: {name!r} is a PerRank, and rank {name_ranks(lacking)} gives none: give "
                "one on every rank, PerRank(None) where there is nothing to keep",
                part=part,
                key=name,
                ranks=lacking,
            )


def _refusal(part: str, plans: Mapping[int, _RankPlan], error: Exception) -> SaveRefused:
    """Names the first tensor whose parts overlap, or do not cover it."""
    chunks: dict[str, set[Any]] = defaultdict(set)
    owners: dict[str, list[int]] = defaultdict(list)
    sizes: dict[str, int] = {}
    for rank, plan in plans.items():
        for key, item in plan.items():
            if item.data is not None:
                chunk = item.data.chunk
                chunks[key].add((tuple(chunk.offsets), tuple(chunk.sizes)))
                owners[key].append(rank)
                sizes[key] = item.data.size.numel()
    for key, found in chunks.items():
        there = sum(torch.Size(each).numel() for _, each in found)
        if there != sizes[key]:
            said = "only" if there < sizes[key] else "more than once, or"
            return SaveRefused(
                f"part {part!r}: key {key!r} has {sizes[key]} elements, and the parts of rank "
                f"{name_ranks(tuple(owners[key]))} are {said} {there} of them: its mesh has to be made "
                "of the ranks that save",
                part=part,
                key=key,
                ranks=tuple(owners[key]),
            )
    return SaveRefused(f"part {part!r}: torch makes no plan of it: {describe(error)}", part=part)
