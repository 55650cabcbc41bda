"""Checks of a part's shards by key: of a save before it begins, of a load before its collectives.

Megatron-core names no key, or finds the same faults while the other ranks wait.
"""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    is_main_replica,
)
from megatron.core.dist_checkpointing.serialization import load_tensors_metadata
from megatron.core.dist_checkpointing.validation import validate_sharding_integrity
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckptfsm.core.errors import CkptFsmError, RestoreFailed, describe, name_ranks
from ckptfsm.dcp.loading import keeps_values
from ckptfsm.disk.stock import COMMON_KEY

_SHOWN = 20  # keys that an error names
_RESERVED = COMMON_KEY.partition("/")[0]
_SCALAR = "shard__"  # an object without dimensions


def check_shards(part: str, ranks: Sequence[Sequence[Any]], error: type[CkptFsmError]) -> None:
    """Check that the shards of all ranks make whole tensors. Raises ``error``, which names the key."""
    check_keys(part, [shard for shards in ranks for shard in shards], error)
    by_key: dict[str, list[tuple[int, Any]]] = defaultdict(list)
    for rank, shards in enumerate(ranks):
        for shard in shards:
            by_key[shard.key].append((rank, shard))
    for key, placed in by_key.items():
        shards = [shard for _, shard in placed]
        check_not_empty(part, shards, error)
        try:
            validate_sharding_integrity([shards])
        except Exception as found:
            words = f"part {part!r}: key {key!r}: {_fault_of(placed) or describe(found)}"
            raise error(words, part=part, key=key) from found


def _fault_of(placed: Sequence[tuple[int, Any]]) -> str:
    """The fault of the shards of one key, each with its rank, and the way out; "" if not known."""
    mains: dict[Any, list[int]] = {}
    for rank, shard in placed:
        place = (tuple(shard.global_offset), str(getattr(shard, "flattened_range", None)))
        mains.setdefault(place, [])
        if is_main_replica(shard.replica_id):
            mains[place].append(rank)
    for (offset, _), ranks in mains.items():
        where = f"its shard at {offset}" if any(offset) else "it"
        twice = [rank for rank in ranks if ranks.count(rank) > 1]
        if twice:
            return f"rank {twice[0]} has {where} twice: give each tensor a key of its own"
        if len(ranks) > 1:
            return (
                f"ranks {name_ranks(ranks)} each have {where} with the replica_id 0. If their tensors "
                "are equal, as under data parallel, give replica_id=rank; if each has another part, "
                "give rank_offsets"
            )
        if not ranks:
            return f"no rank has {where} with the replica_id 0: one of its copies needs that number"
    grid = getattr(placed[0][1], "axis_fragmentations", None)
    if grid and len(mains) < math.prod(grid):
        return (
            f"{len(mains)} of its {math.prod(grid)} shards are in the states of the ranks: give all"
        )
    return ""


def check_keys(part: str, shards: Sequence[Any], error: type[CkptFsmError]) -> None:
    """Refuse keys that a checkpoint cannot have, and a tensor and an object under one name."""
    kinds: dict[str, bool] = {}  # by keys, and by names in the metadata: True for an object
    for shard in shards:
        key, said = shard.key, ""
        is_object = isinstance(shard, ShardedObject)
        if not isinstance(key, str):
            said = "is not text: give a str"
        elif not _is_unicode(key):
            said = "cannot be written in UTF-8: name it otherwise"
        elif key == _RESERVED or _name_of(shard) == COMMON_KEY:
            said = "is megatron-core's own: name yours otherwise"
        elif any(kinds.setdefault(n, is_object) != is_object for n in (key, _name_of(shard))):
            said = "is that of a tensor and of an object: give each a key of its own"
        if said:
            named = key if isinstance(key, str) and _is_unicode(key) else ascii(key)
            raise error(f"part {part!r}: the key {key!a} {said}", part=part, key=named)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _name_of(shard: Any) -> str:
    """The name in the metadata."""
    return str(shard.unique_key if isinstance(shard, ShardedObject) else shard.key)


def check_not_empty(part: str, shards: Sequence[Any], error: type[CkptFsmError]) -> None:
    """Refuse an empty shard of a regular grid: megatron-core divides by the shard's sizes."""
    for shard in shards:
        # ``has_regular_grid`` says the same, from megatron-core 0.14 on.
        regular = isinstance(shard, ShardedTensor) and shard.axis_fragmentations is not None
        if regular and 0 in shard.local_shape:
            raise error(
                f"part {part!r}: key {shard.key!r}: a shard of shape {tuple(shard.local_shape)} is "
                "empty, and megatron-core cannot place it; leave the key out, or give the ShardedTensor "
                "axis_fragmentations=None",
                part=part,
                key=shard.key,
            )


def metadata_of(directory: str) -> Mapping[str, Any]:
    """The tensors and objects of a checkpoint, by name, without data.

    megatron-core's ``load_sharded_metadata`` gives the same, but fails for an object whose key has a
    "/". Up to 0.19.2 it also fails with torch 2.15: tensor properties have a new field that
    ``torch.empty`` does not take. Tensors that an older megatron-core reformulated are still read
    by its function.
    """
    metadata = FileSystemReader(directory).read_metadata()
    stored = metadata.state_dict_metadata
    tensors = {n: value for n, value in stored.items() if isinstance(value, TensorStorageMetadata)}
    objects = [_object_of(name) for name in stored if name not in tensors]
    found: dict[str, Any] = {made.unique_key: made for made in objects}
    if getattr(metadata, "mcore_data", None):
        return found | load_tensors_metadata(directory)
    return found | {key: _without_data(key, value) for key, value in tensors.items()}


def _without_data(key: str, value: TensorStorageMetadata) -> Any:
    empty = torch.empty(value.size, dtype=value.properties.dtype, device="meta")
    return ShardedTensor.from_rank_offsets(key, empty).without_data()


def _object_of(name: str) -> ShardedObject:
    """The object of a name such as ``rng/shard_0.1_1.2``. Its key may have a "/" too."""
    key, _, place = name.rpartition("/")
    if place == _SCALAR:  # which megatron-core writes, and cannot take apart
        return ShardedObject(key, None, (), ())
    return replace(ShardedObject.empty_from_unique_key(f"{_RESERVED}/{place}"), key=key)


def keys_of(have: Mapping[str, Any]) -> frozenset[str]:
    """The keys of sharded metadata as a trainer names them, without megatron-core's own."""
    return frozenset(found.key for name, found in have.items() if name != COMMON_KEY)


def check_fit(
    part: str, wanted: Sequence[Any], have: Mapping[str, Any], droppable: Collection[str]
) -> set[str]:
    """Check that a checkpoint fits the shards that one rank wants. Returns the droppable missing keys.

    ``have`` is the checkpoint's sharded metadata. Raises ``RestoreFailed``, which names the other keys.
    """
    known = {found.key: found for found in have.values()}
    misfits: dict[str, Any] = {}
    for shard in wanted:
        found = have.get(shard.key, known.get(shard.key))
        if not _fits(shard, found, have):
            misfits.setdefault(shard.key, (shard, found))
    lacks = {k for k, (v, _) in misfits.items() if k in droppable and isinstance(v, ShardedObject)}
    rest = [misfit for key, misfit in misfits.items() if key not in lacks]
    if rest:
        shard, found = rest[0]
        more = f" ({_name([each.key for each, _ in rest])} do not fit)" if len(rest) > 1 else ""
        raise RestoreFailed(
            f"part {part!r}: {_explain(shard, found, known)}{more}",
            part=part,
            key=shard.key,
            wanted=tuple(shard.global_shape),
            found=None if found is None else tuple(found.global_shape),
        )
    return lacks


def _fits(shard: Any, found: Any, have: Mapping[str, Any]) -> bool:
    """True if a stored tensor or object fits ``shard``.

    Megatron-core compares no types, and no shapes that may differ or that it flattened.
    """
    if isinstance(shard, ShardedObject):
        return shard.unique_key in have
    if not isinstance(found, ShardedTensor):
        return False
    free = shard.allow_shape_mismatch or getattr(shard, "flattened_range", None) is not None
    same = free or tuple(shard.global_shape) == tuple(found.global_shape)
    return same and keeps_values(found.dtype, shard.dtype)


def _explain(shard: Any, found: Any, known: Collection[str]) -> str:
    if found is None:
        near = difflib.get_close_matches(shard.key, known, n=1)
        hint = f"; nearest: {near[0]!r}" if near else ""
        return f"the checkpoint has no key {shard.key!r}{hint}: name it as it was saved, or leave it out"
    both = isinstance(shard, ShardedTensor) and isinstance(found, ShardedTensor)
    if both and not keeps_values(found.dtype, shard.dtype):
        return (
            f"key {shard.key!r}: wanted {shard.dtype}, the checkpoint has {found.dtype}, whose values "
            f"would change: load it into a tensor of {found.dtype}, and convert that"
        )
    said = f"key {shard.key!r}: wanted {_form(shard)}, the checkpoint has {_form(found)}"
    if isinstance(shard, ShardedObject):
        return (
            f"{said}; a key in reshard_drops is left out under another number of ranks: name all such "
            "keys there, for a value replaces the default ('rng_state',)"
        )
    return f"{said}: build the model with the checkpoint's sizes, or leave the key out"


def _name(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"{len(keys)} keys: {', '.join(map(repr, keys[:_SHOWN]))}{more}"


def _form(shard: Any) -> str:
    if isinstance(shard, ShardedObject):
        return f"object {tuple(shard.global_offset)} of {tuple(shard.global_shape)}"
    return f"shape {tuple(shard.global_shape)}"
