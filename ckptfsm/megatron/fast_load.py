"""What of a torch_dist checkpoint is read straight from its files, and stock's load of the rest."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess

from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import RestoreFailed
from ckptfsm.core.layout import join
from ckptfsm.core.parts import PerRank
from ckptfsm.core.ports import Storage
from ckptfsm.dcp.fast_load import (
    Filled,
    Target,
    Wanted,
    apart_in_memory,
    is_plain,
    memory_of,
    metadata_of,
    stored_items,
    targets_by_file,
)
from ckptfsm.dcp.nested import WHOLE
from ckptfsm.dcp.read_back import reason_of
from ckptfsm.megatron.compat import cpu_devices, process_group
from ckptfsm.megatron.per_rank import with_objects

_METADATA = ".metadata"


def filled_of(shard: ShardedTensor) -> Filled:
    """The name of a shard, which has memory."""
    data = shard.data
    offset, shape = tuple(shard.global_offset), tuple(data.shape)
    return Filled(shard.key, offset, shape, data.dtype, data.device, data.data_ptr())


# -------------------------------------------------------------------------------------- planning


def targets_in(
    storage: Storage,
    location: str,
    directory: str,
    state: Any,
    entries: Mapping[str, FileEntry],
) -> Mapping[FileEntry, Sequence[Target]]:
    """The items of which this rank's shards are made, by file."""
    metadata = metadata_of(storage, location, entries.get(join(directory, _METADATA)))
    if metadata is None:
        return {}
    odd = getattr(metadata, "mcore_data", None) or {}
    wanted = [_wanted(shard) for shard in _plain_shards(state) if not odd.get(shard.key)]
    found = chain.from_iterable(stored_items(metadata, each) for each in wanted)
    return targets_by_file(found, directory, entries)


def _plain_shards(state: Any) -> Iterator[ShardedTensor]:
    """The shards of a state with data that can be filled byte by byte, and share no memory."""
    prepared, _, _ = load_preprocess(state)
    shards = [v for v in nested_values(prepared) if isinstance(v, ShardedTensor) and _is_plain(v)]
    return apart_in_memory((shard, shard.data) for shard in shards)


def _is_plain(shard: ShardedTensor) -> bool:
    """True for a tensor whose values are its bytes, and which stock fills in place."""
    return (
        is_plain(shard.data)
        and not shard.allow_shape_mismatch
        and getattr(shard, "flattened_range", None) is None
    )


def _wanted(shard: ShardedTensor) -> Wanted:
    """A shard with its shape and place in the file, where axes of one may come before its own."""
    data = memory_of(shard.data, (1,) * shard.prepend_axis_num + tuple(shard.data.shape))
    return Wanted(filled_of(shard), tuple(shard.global_shape), data)


# --------------------------------------------------------------------------------- stock's load


def load_part(
    name: str, state: Any, directory: str, drop: set[str], full: Collection[Filled] = ()
) -> Any:
    """See ``StateFormat.load``. Overlaps were ruled out before, see ``ports.Driver.check``."""
    with cpu_devices(), process_group():
        return _load_part(name, state, directory, drop, full)


def _load_part(
    name: str, state: Any, directory: str, drop: set[str], full: Collection[Filled]
) -> Any:
    if isinstance(state, PerRank):
        return _load_part(name, with_objects(state), directory, drop, full).get(WHOLE)
    state = with_objects(state)
    strategy = LoadTheRest(get_default_load_sharded_strategy(directory), full) if full else None
    try:
        return dist_checkpointing.load(
            _without(state, drop),
            directory,
            sharded_strategy=strategy,
            validate_access_integrity=False,
        )
    except pickle.UnpicklingError as error:  # of a save before such values were refused
        raise RestoreFailed(
            f"part {name!r} has plain values that torch's loader refuses: {reason_of(error)}. If you "
            "trust who wrote it, start once with TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 in the "
            "environment, and put plain numbers, text, lists or tensors in their place",
            part=name,
            file=directory,
        ) from error


def _without(state: Any, drop: set[str]) -> Any:
    """A copy of a nested state dict without the sharded objects of these keys."""
    if isinstance(state, dict):
        return {
            key: _without(value, drop)
            for key, value in state.items()
            if not (isinstance(value, ShardedObject) and value.key in drop)
        }
    if isinstance(state, list):
        kept = [v for v in state if not (isinstance(v, ShardedObject) and v.key in drop)]
        return [_without(value, drop) for value in kept]
    return state


class LoadTheRest:
    """Megatron-core's ``LoadShardedStrategy`` for the values that are not filled yet.

    Everything but ``load`` is the strategy ``base``'s. The state is loaded as a flat dict, so that
    no place in a list moves, and put together again.
    """

    def __init__(self, base: Any, full: Collection[Filled]) -> None:
        self._base, self._full = base, full

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any, *more: Any) -> Any:
        """Load the rest (collective, as ``base.load`` is)."""
        rest: dict[str, Any] = {}
        state = self._split(sharded_state_dict, rest)
        return _put_together(state, self._base.load(rest, checkpoint_dir, *more))

    def _split(self, value: Any, rest: dict[str, Any]) -> Any:
        """The value with filled tensors, and with a name in ``rest`` for everything else."""
        if isinstance(value, dict):
            return {key: self._split(each, rest) for key, each in value.items()}
        if isinstance(value, list):
            return [self._split(each, rest) for each in value]
        if isinstance(value, ShardedTensor) and self._is_full(value):
            return value.data.detach()
        name = str(len(rest))
        rest[name] = value
        return _Later(name)

    def _is_full(self, shard: ShardedTensor) -> bool:
        return shard.data is not None and filled_of(shard) in self._full


class _Later(NamedTuple):
    """Stands for the value with this name in the flat dict."""

    name: str


def _put_together(value: Any, loaded: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        return {key: _put_together(each, loaded) for key, each in value.items()}
    if isinstance(value, list):
        return [_put_together(each, loaded) for each in value]
    return loaded[value.name] if isinstance(value, _Later) else value
