"""Loads a part in DCP's own format: what fits, what is read straight from its files, and the rest.

Each rank reads the metadata itself, and then its own values: no collective is needed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import DamagedRoot, RestoreFailed, describe
from ckptfsm.core.parts import PerRank
from ckptfsm.dcp.fast_load import (
    Filled,
    Target,
    Wanted,
    apart_in_memory,
    is_plain,
    memory_of,
    stored_items,
    targets_by_file,
)
from ckptfsm.dcp.metadata import read_planned
from ckptfsm.dcp.nested import WHOLE, Flat, fits_its_mesh, flat
from ckptfsm.dcp.read_back import misfit_of_tensor
from ckptfsm.dcp.shared_memory import local_of
from ckptfsm.dcp.state_format import Surveyed

METADATA = ".metadata"


def keeps_values(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """True if values of one type become those of the other one, but for the rounding of floats.

    Torch copies between any two types, without a word. Floats may become larger than those of 16 bits
    hold: whoever loads into these means it.
    """
    if stored == wanted or stored == torch.bool:
        return True
    if wanted.is_complex or (wanted.is_floating_point and not stored.is_complex):
        return wanted.itemsize > 1 and (stored.is_floating_point or _holds(wanted, stored))
    if stored.is_complex or stored.is_floating_point or wanted == torch.bool:
        return False
    try:
        one, other = torch.iinfo(stored), torch.iinfo(wanted)
    except TypeError:  # quantized, or bits: unknown to us
        return True
    return other.min <= one.min and one.max <= other.max


def _holds(wanted: torch.dtype, stored: torch.dtype) -> bool:
    """True if a float or complex type holds all integers of another one, rounded."""
    try:
        return torch.finfo(wanted).max >= torch.iinfo(stored).max
    except TypeError:  # complex, quantized, or bits
        return True


# ----------------------------------------------------------------------------------- what fits


def stored_in(part: str, directory: str, metadata: Metadata | None = None) -> Metadata:
    """The metadata of a part, read if they are not given, with files inside of it only.

    Raises ``DamagedRoot`` for metadata that are damaged, or name other files.
    """
    path = Path(directory, METADATA)
    try:
        metadata = metadata or read_planned(path.read_bytes())
    except DamagedRoot as error:
        said = f"part {part!r}: {METADATA}: {error.message}"
        raise DamagedRoot(said, part=part, file=str(path)) from error
    for info in (metadata.storage_data or {}).values():
        name = info.relative_path
        if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
            said = (
                f"part {part!r}: {METADATA} names a file outside of the checkpoint: {name!r:.200}"
            )
            raise DamagedRoot(said, part=part, file=str(path))
    return metadata


def _ranks_of(name: str, known: Collection[str]) -> dict[int, str]:
    """The stored keys of a ``PerRank``, by rank."""
    matches = (re.fullmatch(rf"{re.escape(name)}\.rank_(\d+)", key) for key in known)
    return {int(match[1]): match[0] for match in matches if match}


def _other_ranks(name: str, known: Collection[str], ranks: int) -> str:
    stored = _ranks_of(name, known)
    if stored.keys() == set(range(ranks)):
        return ""
    if name in known:
        return (
            f"key {name!r} is one value for all ranks in the checkpoint: give it without a PerRank"
        )
    if not stored:
        return _lacks(name, {key.rpartition(".rank_")[0] or key for key in known})
    return (
        f"key {name!r} has one value for each of {len(stored)} ranks, and nobody can divide these among "
        f"{ranks}: reshard_drops=({name!r}, ...) leaves it out; name all such keys there, for a value "
        "replaces the default ('rng_state',)"
    )


def _misfit(key: str, wanted: Flat, stored: Mapping[str, Any]) -> str:
    """Why a stored value does not fit the wanted one, and the way out; "" if it fits."""
    found, value = stored.get(key), wanted.values[key]
    if found is None:
        return _lacks(key, stored)
    is_stored_tensor = isinstance(found, TensorStorageMetadata)
    if wanted.is_tensor(key) != is_stored_tensor:
        one, other = ("a tensor", "none") if is_stored_tensor else ("no tensor", "one")
        return (
            f"key {key!r} is {one} in the checkpoint, and {other} is given to fill, a "
            f"{type(value).__name__}: give the same kind of value"
        )
    if not is_stored_tensor:
        return ""
    odd = misfit_of_tensor(value)
    if odd:
        return f"key {key!r}, of type {type(value).__name__}, cannot be filled: {odd}"
    local = local_of(value)
    if any(
        stride == 0 and size > 1 for size, stride in zip(local.shape, local.stride(), strict=True)
    ):
        return f"key {key!r} has places that share memory, as of x.expand(...): give x.contiguous()"
    if any(not fits_its_mesh(value, chunk.sizes) for chunk in _create_chunk_list(value)):
        return (
            f"key {key!r}: this rank's part of the DTensor, {tuple(local.shape)}, is not what its mesh "
            "and placements say: divide it evenly, as distribute_tensor does"
        )
    if tuple(value.size()) != tuple(found.size):
        return (
            f"key {key!r}: wanted shape {tuple(value.size())}, the checkpoint has "
            f"shape {tuple(found.size)}: build the model with the checkpoint's sizes, or leave the key "
            "out"
        )
    if not keeps_values(found.properties.dtype, value.dtype):
        return (
            f"key {key!r}: wanted {value.dtype}, the checkpoint has {found.properties.dtype}, whose "
            f"values would change: load it into a tensor of {found.properties.dtype}, and convert that"
        )
    return ""


def _lacks(key: str, stored: Collection[str]) -> str:
    near = difflib.get_close_matches(key, stored, n=1)
    hint = f"; nearest: {near[0]!r}" if near else ""
    return f"the checkpoint has no key {key!r}{hint}: name it as it was saved, or leave it out"


# --------------------------------------------------------------------------- straight from files


def _wanted(key: str, value: torch.Tensor, data: torch.Tensor) -> Wanted | None:
    """This rank's part of a tensor; None if it is in several."""
    chunks = _create_chunk_list(value)
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(data.shape):
        return None
    offset, shape = tuple(chunks[0].offsets), tuple(data.shape)
    shard = Filled(key, offset, shape, data.dtype, data.device, data.data_ptr())
    return Wanted(shard, tuple(value.size()), memory_of(data, shape))


# ---------------------------------------------------------------------------------- stock's load


class _Reader(FileSystemReader):
    """Torch's reader, with metadata that were read and checked before."""

    def __init__(self, directory: str, metadata: Metadata) -> None:
        super().__init__(directory)
        self._checked = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._checked


def read_tensor(part: str, directory: str, metadata: Metadata, key: str) -> torch.Tensor:
    """A whole tensor in host memory, without a process group. Raises ``RestoreFailed``."""
    about = metadata.state_dict_metadata[key]
    assert isinstance(about, TensorStorageMetadata)
    value = torch.empty(about.size, dtype=about.properties.dtype, device="cpu")
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = _Reader(directory, metadata)
    try:
        _load_state_dict({key: value}, reader, no_dist=True, planner=planner)
    except (Exception, CheckpointException) as error:
        said = f"part {part!r}: key {key!r} cannot be read: {describe(error)}"
        raise RestoreFailed(said, part=part, key=key, file=directory) from error
    return value


def _given_back(state: dict[Any, Any], filled: Mapping[Any, Any]) -> dict[Any, Any]:
    """The caller's own dict with what was loaded; objects with a ``load_state_dict`` get theirs."""
    for key in list(state):
        if key not in filled:
            del state[key]
        elif isinstance(state[key], Stateful):
            state[key].load_state_dict(filled[key])
        else:
            state[key] = filled[key]
    return state


# ------------------------------------------------------------------------------------- all of it


class DcpReading:
    """A part that is restored: its state is taken apart, and its metadata are read, only once.

    Raises ``RestoreFailed`` for a state that cannot be taken apart, and what ``stored_in`` raises.
    """

    def __init__(
        self, part: str, state: Any, directory: str, rank: int, metadata: Metadata | None = None
    ) -> None:
        self.state, self._directory = state, directory
        self._wanted = flat(part, state, rank, RestoreFailed)
        self._stored = stored_in(part, directory, metadata)
        self._straight: dict[str, Filled] = {}  # what may be filled straight from its file

    def survey(self, part: str, droppable: Collection[str], ranks: int) -> Surveyed:
        """See ``StateFormat.survey``."""
        wanted, known, missing = self._wanted, self._stored.state_dict_metadata, set()
        for key in wanted.values:
            name, is_tensor = wanted.per_rank.get(key, key), wanted.is_tensor(key)
            holder = type(wanted.holder(key))
            fixed = not is_tensor and not hasattr(holder, "__setitem__")
            if fixed:
                said = (
                    f"key {key!r} is in a {holder.__name__}, which takes no new value: give a dict"
                )
            elif name != key:
                said = _other_ranks(name, known, ranks)
            else:
                said = _misfit(key, wanted, known)
            if said and not fixed and name in droppable and not is_tensor:
                missing.add(name)
            elif said:
                raise RestoreFailed(
                    f"part {part!r}: {said}. Nothing was changed", part=part, key=name
                )
        asked = frozenset(wanted.values)
        others = {
            key for name in wanted.per_rank.values() for key in _ranks_of(name, known).values()
        }
        return Surveyed(missing, asked | others, frozenset(known))

    def targets(
        self, directory: str, entries: Mapping[str, FileEntry]
    ) -> Mapping[FileEntry, Sequence[Target]]:
        """The items of which the local tensors are made, by file."""
        values = {
            key: (value, data)
            for key, value in self._wanted.values.items()
            if self._wanted.is_tensor(key) and is_plain(data := local_of(value))
        }
        apart = apart_in_memory((key, data) for key, (_, data) in values.items())
        wanted = [each for key in apart if (each := _wanted(key, *values[key])) is not None]
        self._straight = {each.shard.key: each.shard for each in wanted}
        found = chain.from_iterable(stored_items(self._stored, each) for each in wanted)
        return targets_by_file(found, directory, entries)

    def load(self, drop: Collection[str], full: Collection[Filled]) -> Any:
        """Fill the state in place, and return it (local)."""
        wanted, state = self._wanted, self.state
        dropped = {key for key in wanted.values if wanted.per_rank.get(key, key) in drop}
        done = dropped | {key for key, shard in self._straight.items() if shard in full}
        values = {
            key: value if wanted.is_tensor(key) else None
            for key, value in wanted.values.items()
            if key not in done
        }
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        reader = _Reader(self._directory, self._stored)
        _load_state_dict(values, reader, no_dist=True, planner=planner)
        for key, value in values.items():
            if not wanted.is_tensor(key):
                wanted.put(key, value)
        for key in reversed(wanted.values):  # so that no place in a list moves
            if key in dropped:
                wanted.remove(key)
        if isinstance(state, PerRank):
            return wanted.state.get(WHOLE)
        return _given_back(state, wanted.state)
