"""Megatron's torch_dist format, which stock loaders read: tensors as it needs them, and its metadata.

The files are ``__<rank>_<n>.distcp`` with one ``torch.save`` per item, ``.metadata``, ``metadata.json``,
and the state common to all ranks. That is a file ``common.pt`` up to megatron-core 0.18. From 0.19 on it
is an object in a shard, which older versions cannot read.
"""

from __future__ import annotations

import enum
import io
import json
import pickle
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import megatron.core
import torch
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)

from ckptfsm.adapters.garbage import collection_paused
from ckptfsm.adapters.versions import series_of
from ckptfsm.core.errors import DamagedRoot
from ckptfsm.disk.pickle_stubs import GETATTR, METADATA_GLOBALS
from ckptfsm.disk.stock import COMMON_KEY

_DCP_VERSION = "1.0.0"  # written by FileSystemWriter of torch 2.x, ignored by its reader
COMMON_IN_SHARD = (0, 19)  # the first megatron-core with the common state in a shard


def keeps_common_in_shard() -> bool:
    """True if the installed megatron-core keeps the common state as an object in a shard."""
    series = series_of(str(megatron.core.__version__))
    if series is None:  # the reader of older files came with the new format
        return hasattr(serialization, "_legacy_common_state_exists")
    return series >= COMMON_IN_SHARD


def to_host(value: Any) -> Any:
    """A copy in pageable memory, which a fork freezes; a CPU tensor in pageable memory as it is.

    A tensor in a segment stays there too: a launch knows of it.
    """
    if not isinstance(value, torch.Tensor):
        return value
    strided = value.layout is torch.strided  # a sparse tensor cannot be asked
    if value.device.type == "cpu" and (
        not strided or value.untyped_storage().is_shared() or value.is_pinned()
    ):
        return value.detach().clone()
    # Not ``non_blocking``: torch would stage into pinned memory. A child may share that, and torch
    # reuses it as soon as the draft is dropped.
    return value.detach().to("cpu")


def exact(value: torch.Tensor) -> torch.Tensor:
    """The same values in a storage of exactly their size.

    For a view, ``torch.save`` would write the whole storage. Copies only values that are not
    contiguous in memory.
    """
    storage, size = value.untyped_storage(), value.numel() * value.itemsize
    if storage.size() == size:
        return value
    span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
    plain = type(value) is torch.Tensor and not value.is_conj() and not value.is_neg()
    if size == 0 or span != value.numel() or not plain:
        return value.clone()
    start = value.storage_offset() * value.itemsize
    piece = storage[start : start + size]
    return torch.empty(0, dtype=value.dtype).set_(piece, 0, value.shape, value.stride())


# ------------------------------------------------------------------------------------- finishing


_PLANNED_GLOBALS = METADATA_GLOBALS | {("collections", "OrderedDict")}


def _member(enumeration: Any, name: Any) -> enum.Enum:
    """``getattr``, but for a member of an enumeration only."""
    if not isinstance(enumeration, enum.EnumMeta) or name not in enumeration.__members__:
        raise DamagedRoot("planned metadata calls builtins.getattr, which is not allowed")
    return enumeration.__members__[name]


class _PlannedUnpickler(pickle.Unpickler):
    """Reads metadata back, planned or published, and allows only the classes in it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in GETATTR:
            return _member
        plain_name = "." not in name  # a dotted name would reach other modules
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if plain_name and (dtype or (module, name) in _PLANNED_GLOBALS):
            return super().find_class(module, name)
        raise DamagedRoot(f"planned metadata names {module}.{name}, which is not allowed")


def read_planned(data: bytes) -> Metadata:
    """The planned metadata of a part. Raises ``DamagedRoot`` for anything else."""
    try:
        metadata = _PlannedUnpickler(io.BytesIO(data)).load()
    except DamagedRoot:
        raise
    except Exception as error:  # pickle raises almost any error on damaged input
        raise DamagedRoot(f"planned metadata is damaged: {error}") from error
    if not isinstance(metadata, Metadata):
        raise DamagedRoot("planned metadata is not metadata")
    return metadata


@collection_paused()
def finish_part(
    planned: bytes, results: Sequence[Sequence[Any]], location: str
) -> Mapping[str, bytes]:
    """``.metadata`` and ``metadata.json`` of a part, see ``ports.PartFinisher``."""
    metadata = read_planned(planned)
    metadata.storage_data = {
        MetadataIndex(key, torch.Size(offset) if offset is not None else None, index): (
            _StorageInfo(file, start, length)
        )
        for rows in results
        for key, offset, index, file, start, length in rows
    }
    if any(row[0] == COMMON_KEY for rows in results for row in rows):
        metadata.state_dict_metadata[COMMON_KEY] = BytesStorageMetadata()
    metadata.storage_meta = StorageMeta(checkpoint_id=location, save_id=uuid.uuid4().hex)
    metadata.version = _DCP_VERSION
    config = CheckpointingConfig("torch_dist", 1)
    return {
        ".metadata": pickle.dumps(metadata),
        "metadata.json": json.dumps(asdict(config)).encode(),
    }
