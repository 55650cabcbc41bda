"""The plan of a part: which item of a state goes to which file, made by megatron-core's planner.

The planner takes longer than everything else in a save. So a plan is used again for a state of the same
structure, if each of its items is certainly the data of one value, or a view.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.filesystem_async import _split_by_size_and_type
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from ckptfsm.adapters.garbage import collection_paused
from ckptfsm.core.errors import SaveRefused
from ckptfsm.core.parts import Planned
from ckptfsm.dcp.images import Bucket, without_grad
from ckptfsm.megatron.read_back import Places, ReadBack, check_places, places_of
from ckptfsm.megatron.shardings import check_keys, check_not_empty, check_shards

Values = Mapping[str, Sequence[ShardedBase]]


@dataclass(frozen=True, slots=True)
class PartSummary:
    """A rank's draft of a part for rank 0: its plan, its shardings and places, without data."""

    plan: SavePlan
    shardings: list[Any]
    places: Places


@dataclass(frozen=True, slots=True)
class PartDraft:
    """A part as one rank planned it. ``buckets`` still refer to the trainer's tensors."""

    buckets: tuple[Bucket, ...]
    common: Any
    summary: PartSummary
    expected_bytes: int


class _Source(NamedTuple):
    """The tensor of an item: a value under a key, as a view of ``shape``."""

    key: str
    number: int
    shape: torch.Size


Sources = tuple[tuple[tuple[WriteItem, _Source | None], ...], ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    """A plan that may be used again. An item without a source is a key's objects as bytes."""

    structure: list[Any]
    buckets: Sources
    summary: PartSummary

    def draft(self, values: Values, common: Any) -> PartDraft:
        """The plan, with the data of ``values``."""
        objects = {
            item.index.fqn for bucket in self.buckets for item, source in bucket if not source
        }
        written = mcore_to_pyt_state_dict({key: list(values[key]) for key in objects}, False)
        buckets = tuple(
            tuple(
                (item, _data_of(values, source) if source else written[item.index.fqn])
                for item, source in bucket
            )
            for bucket in self.buckets
        )
        return _draft(buckets, common, self.summary)


class Plans:
    """Plans of one rank by the names of their parts. ``files`` is the number of files of a part.

    ``read_back`` judges the values of all of them.
    """

    def __init__(self, files: int, common_in_shard: bool = False) -> None:
        self._files = files
        self.read_back = ReadBack(common_in_shard)
        self._known: dict[str, _Plan] = {}

    @collection_paused()
    def draft(self, part: str, state: Any) -> PartDraft:
        """Plan one sharded state dict. May raise megatron-core's error for a bad one.

        Raises ``SaveRefused`` for values that no restore could load.
        """
        sharded, common = save_preprocess(state, validate_access_integrity=False)
        self.read_back.check(part, state, common)
        places = places_of(state, sharded, common)
        structure = [_structure_of(value) for value in nested_values(sharded)]
        known = self._known.pop(part, None)
        if known is None or known.structure != structure:
            draft, sources = _make(part, sharded, common, places, self._files)
            known = None if sources is None else _Plan(structure, sources, draft.summary)
        else:
            if known.summary.places != places:
                known = replace(known, summary=replace(known.summary, places=places))
            values, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
            draft = known.draft(values, common)
        if known is not None:
            self._known[part] = known
        return draft


def _structure_of(value: ShardedBase) -> list[Any]:
    """Everything that a plan depends on: the value without its data, and the form of its data."""
    kind: Any = type(value)
    found = [kind, _all_but_data(kind)(value)]
    data = value.data
    if isinstance(data, torch.Tensor):
        found += [data.dtype, data.shape, data.stride() if data.layout is torch.strided else None]
    return found


@cache
def _all_but_data(kind: Any) -> Callable[[ShardedBase], Any]:
    return attrgetter(*(each.name for each in fields(kind) if each.name != "data"))


def _make(
    part: str, sharded: Any, common: Any, places: Places, files: int
) -> tuple[PartDraft, Sources | None]:
    """Make a plan. Returns its sources too, or None if it holds only for this state."""
    shardings = [value.without_data() for value in nested_values(sharded)]
    check_keys(part, shardings, SaveRefused)
    check_not_empty(part, shardings, SaveRefused)
    values, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    planner.set_up_planner(mcore_to_pyt_state_dict(dict(values), False), is_coordinator=False)
    plan = planner.finish_plan(
        planner.create_decentralized_global_plan(planner.create_local_plan())
    )
    split = [bucket for bucket in _split_by_size_and_type(files, plan.items) if bucket]
    buckets = tuple(tuple((item, _resolve(planner, item)) for item in bucket) for bucket in split)
    summary = PartSummary(plan, shardings, places)
    draft = _draft(buckets, common, summary)
    try:
        sources = tuple(
            tuple((item, _source_of(item, data, values)) for item, data in bucket)
            for bucket in buckets
        )
    except LookupError:
        return draft, None
    return draft, sources


def _draft(buckets: tuple[Bucket, ...], common: Any, summary: PartSummary) -> PartDraft:
    size = sum(_size_of(value) for bucket in buckets for _, value in bucket)
    return PartDraft(buckets, common, summary, size)


def _resolve(planner: MCoreSavePlanner, item: WriteItem) -> Any:
    """The data of an item: the trainer's tensor itself, or a view of it."""
    value = planner.resolve_data(item)
    return value if item.type == WriteItemType.BYTE_IO else value.detach()


def _source_of(item: WriteItem, data: Any, values: Values) -> _Source | None:
    """The only value that is the data of an item. Raises ``LookupError`` if that is not certain."""
    key = item.index.fqn
    if item.type == WriteItemType.BYTE_IO:
        values[key]
        return None
    sources = [_Source(key, number, data.shape) for number in range(len(values[key]))]
    found = [each for each in sources if _is(data, values, each)]
    if len(found) != 1:
        raise LookupError(key)
    return found[0]


def _is(data: torch.Tensor, values: Values, source: _Source) -> bool:
    """True if ``data`` is the memory of a source, in the same form."""
    value = values[source.key][source.number]
    if not isinstance(value, ShardedTensor) or value.data.layout is not torch.strided:
        return False
    try:
        found = _data_of(values, source)
    except RuntimeError:  # no view of this shape
        return False
    return (found.data_ptr(), found.stride(), found.dtype) == (
        data.data_ptr(),
        data.stride(),
        data.dtype,
    )


def _data_of(values: Values, source: _Source) -> torch.Tensor:
    data = without_grad(values[source.key][source.number].data)
    return data if data.shape == source.shape else data.view(source.shape)


def _size_of(value: Any) -> int:
    if isinstance(value, io.BytesIO):
        return value.getbuffer().nbytes
    return int(value.numel() * value.itemsize)


def merge_part(name: str, summaries: Mapping[int, PartSummary]) -> Planned:
    """At rank 0: the planned metadata of the ranks' ``summaries``.

    Raises ``SaveRefused`` if shards overlap, do not cover a tensor, or clash with plain values.
    """
    check_places(name, {rank: s.places for rank, s in summaries.items()})
    check_shards(name, [s.shardings for s in summaries.values()], SaveRefused)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    _, metadata = planner.create_global_plan([s.plan for s in summaries.values()])
    return Planned(pickle.dumps(metadata))
