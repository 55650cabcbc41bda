"""The plan of a part in DCP's own format: the items that DCP makes of each value.

Every rank plans all of its items. Rank 0 decides which rank writes an item that several have, see
``global_plan``, and every rank is told what it leaves to others. Making the items takes longer than
everything else in a save, so they are used again for a state of the same structure.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.filesystem import _split_by_size_and_type
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map

from ckptfsm.adapters.garbage import collection_paused
from ckptfsm.core.errors import SaveRefused
from ckptfsm.core.images import SMALL_BYTES
from ckptfsm.core.parts import PerRank, Planned
from ckptfsm.core.ports import Finalizer, PartJob
from ckptfsm.dcp.global_plan import DcpSummary, summary_of
from ckptfsm.dcp.images import Bucket, Held, counts_steps, saved, to_host, without_grad
from ckptfsm.dcp.nested import Flat, fits_its_mesh
from ckptfsm.dcp.plain_values import digests_of
from ckptfsm.dcp.read_back import PLAIN_KINDS
from ckptfsm.dcp.shared_memory import local_of
from ckptfsm.dcp.state_format import Staging, stage_images

_SAMPLE_BYTES = 1 << 10  # of a DTensor that is compared


@dataclass(slots=True)
class _Share:
    """Which of a part's items are this rank's, as rank 0 last said: a number for each, 0 or 1.

    Rank 0 says it again only when the plan of some rank has changed.
    """

    mask: bytes = b""

    def of(self, rank: int, planned: Planned) -> bytes:
        if planned.shares:
            self.mask = zlib.decompress(pickle.loads(planned.shares)[rank])
        return self.mask


@dataclass(slots=True)
class _Split:
    """The items that this rank writes, by file, as they were split the last time."""

    files: int
    mask: bytes = b""
    buckets: Sequence[Sequence[WriteItem]] = ()

    def of(self, items: Sequence[WriteItem], mask: bytes) -> Sequence[Sequence[WriteItem]]:
        """``mask`` tells for each item whether it is this rank's."""
        if self.mask != mask:
            own = [item for item, is_own in zip(items, mask, strict=True) if is_own]
            self.buckets = [each for each in _split_by_size_and_type(self.files, own) if each]
            self.mask = mask
        return self.buckets


@dataclass(slots=True)
class Known:
    """What follows from the structure of a part's state alone, and is used again for its next save.

    ``expected_bytes``: about what this rank will write: it does not know yet what others have too.
    ``telling``: the keys of tensors that tell of changes which torch does not count.
    """

    structure: list[Any]
    items: Sequence[WriteItem]
    summary: DcpSummary
    share: _Share
    split: _Split
    expected_bytes: int
    telling: frozenset[str]


@dataclass(slots=True)
class DcpPlan:
    """A part as one rank planned it, see ``PartPlan``."""

    known: Known
    flat: Flat
    ranks: int
    in_place: bool = field(default=False, init=False)

    @property
    def summary(self) -> DcpSummary:
        return self.known.summary

    @property
    def expected_bytes(self) -> int:
        return self.known.expected_bytes

    def digests(self) -> Mapping[str, int]:
        """Of values that are pickled, and of small tensors in host memory.

        Larger ones are not looked at: under data parallel all ranks have the model. Of a DTensor on
        a mesh of some of the ranks, the first bytes are: others may give the same key for another.
        """
        found: dict[str, int] = {}
        objects: dict[str, Any] = {}
        for key, value in self.flat.values.items():
            if not self.flat.is_tensor(key):
                if key not in self.flat.per_rank:
                    objects[key] = value
            elif _is_small(value):
                found[key] = _digest_of(value, SMALL_BYTES)
        for item in self.known.items:
            value = self.flat.values[item.index.fqn]
            if isinstance(value, DTensor) and value.device_mesh.size() < self.ranks:
                offset, local = tuple(item.index.offset or ()), value._local_tensor
                if local.device.type == "cpu" and local.is_contiguous():
                    found[f"{item.index.fqn} at {offset}"] = _digest_of(local, _SAMPLE_BYTES)
        return found | digests_of(objects)

    def buckets(self, rank: int, planned: Planned) -> tuple[Bucket, ...]:
        split = self.known.split.of(self.known.items, self.known.share.of(rank, planned))
        return tuple(tuple((item, self._data_of(item)) for item in bucket) for bucket in split)

    def _data_of(self, item: WriteItem) -> Any:
        """The data of an item: the trainer's tensor itself or a view of it; bytes as a file."""
        value = self.flat.values[item.index.fqn]
        if item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(_pickled(value.value if isinstance(value, PerRank) else value))
        return _part_of(value, item)

    def stage(self, staging: Staging) -> PartJob:
        job = stage_images(staging)
        if self.known.telling:
            for bucket in staging.buckets:
                for item, _ in bucket:
                    if item.index.fqn in self.known.telling:
                        self._watch(item.index.fqn, staging.held)
        return job

    def _watch(self, key: str, held: Held) -> None:
        """Watch what tells of a change that torch does not count.

        An optimizer with ``foreach=True`` changes DTensors without a count, but not its own numbers of
        steps. With ``foreach=False`` torch counts for the DTensor, and not for this rank's part of it.
        """
        value = self.flat.values[key]
        held.watch(key, value, local_of(value))

    def let_go(self) -> None:
        self.flat = Flat({}, {}, {}, {})

    def finalizers(self) -> list[Finalizer]:
        return []


class DcpPlans:
    """The plans of one rank by the names of their parts."""

    def __init__(self, files: int) -> None:
        self._files = files
        self._known: dict[str, Known] = {}
        self._shares: dict[str, _Share] = defaultdict(_Share)

    @collection_paused()
    def of(self, part: str, state: Flat, ranks: int) -> Known:
        """The plan of a state (local)."""
        paths = state.paths  # that of a ``PerRank`` is no other value's with its key
        structure = [(key, paths[key], _form_of(value)) for key, value in state.values.items()]
        known = self._known.get(part)
        if known is None or known.structure != structure:
            known = self._known[part] = self._made(part, state, structure, ranks)
        return known

    def _made(self, part: str, state: Flat, structure: list[Any], ranks: int) -> Known:
        items = [item for key in state.values for item in _items_of(key, state)]
        _check_parts(part, state, items)
        tensors = {key: each for key, each in state.values.items() if state.is_tensor(key)}
        return Known(
            structure,
            items,
            summary_of(items, state),
            self._shares[part],
            _Split(self._files),
            sum(_share_of(value, ranks) for value in tensors.values()),
            frozenset(k for k, v in tensors.items() if isinstance(v, DTensor) or counts_steps(v)),
        )


def _form_of(value: Any) -> object:
    """What the items of a value depend on.

    Of a tensor that says itself what its items are, a form that equals no other.
    """
    if type(value) not in PLAIN_KINDS:
        if not isinstance(value, torch.Tensor):
            return None
        local = local_of(value)
        if hasattr(local, "__create_write_items__") or hasattr(local, "local_shards"):
            return object()
    form = (type(value), value.shape, value.dtype, value.requires_grad, value.is_cpu)
    if isinstance(value, DTensor):
        return form, value.placements, value.device_mesh, value._local_tensor.shape
    return form, value.layout, value.is_contiguous(), value.is_cpu and value.is_pinned()


def _items_of(key: str, state: Flat) -> Sequence[WriteItem]:
    value = state.values[key]
    if not state.is_tensor(key):
        return _create_write_items(key, None)
    if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
        return ()  # on a mesh of other ranks
    found: Sequence[WriteItem] = _create_write_items(key, value)
    return found


def _part_of(value: torch.Tensor, item: WriteItem) -> torch.Tensor:
    if type(value) in PLAIN_KINDS:
        return without_grad(value)
    if isinstance(value, DTensor) and not hasattr(value._local_tensor, "__get_tensor_shard__"):
        return value._local_tensor.detach()
    found: torch.Tensor = find_tensor_shard(value, item.index)
    return found.detach()


def _check_parts(part: str, state: Flat, items: Sequence[WriteItem]) -> None:
    """Refuse a DTensor whose part here is not what its mesh and placements say."""
    for item in items:
        value, data = state.values[item.index.fqn], item.tensor_data
        if data is not None and not fits_its_mesh(value, data.chunk.sizes):
            raise SaveRefused(
                f"part {part!r}: key {item.index.fqn!r}: this rank has "
                f"{tuple(value._local_tensor.shape)} of a DTensor, and by its mesh and placements "
                f"{tuple(data.chunk.sizes)}: divide it evenly, as distribute_tensor does",
                part=part,
                key=item.index.fqn,
            )


def _pickled(value: Any) -> bytes:
    """The bytes of a value, as it is unless a tensor in it is on an accelerator: another machine may
    have none.
    """
    try:
        found = tree_leaves(value)
    except RecursionError:  # it contains itself, which pickle can write
        found = []
    away = any(isinstance(each, torch.Tensor) and each.device.type != "cpu" for each in found)
    return saved(tree_map(to_host, value) if away else value)


def _is_small(value: torch.Tensor) -> bool:
    """True for a tensor of which ranks compare the values."""
    return (
        type(value) in PLAIN_KINDS
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and value.numel() * value.itemsize < SMALL_BYTES
        and value.is_contiguous()
    )


def _share_of(value: torch.Tensor, ranks: int) -> int:
    """The bytes of a rank's part of a tensor, divided by the number of ranks that have the same."""
    if not isinstance(value, DTensor):
        shards = getattr(value, "local_shards", None)
        if shards is not None:
            tensors = [getattr(each, "tensor", each) for each in shards()]
            return sum(each.numel() * each.itemsize for each in tensors)
        return value.numel() * value.itemsize // ranks
    same = 1
    for dimension, placement in enumerate(value.placements):
        if isinstance(placement, Replicate):
            same *= value.device_mesh.size(dimension)
    return value._local_tensor.numel() * value.itemsize // same


def _digest_of(value: torch.Tensor, most_bytes: int) -> int:
    data = ctypes.string_at(value.data_ptr(), min(value.numel() * value.itemsize, most_bytes))
    return xxhash.xxh3_64_intdigest(data)
