"""The metadata of DCP: planned by all ranks together, and completed with where each item lies."""

from __future__ import annotations

import enum
import io
import pickle
import uuid
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta

from ckptfsm.adapters.garbage import collection_paused
from ckptfsm.core.errors import DamagedRoot
from ckptfsm.disk.pickle_stubs import GETATTR, METADATA_GLOBALS

_DCP_VERSION = "1.0.0"  # written by FileSystemWriter of torch 2.x, ignored by its reader
_PLANNED_GLOBALS = METADATA_GLOBALS | {("collections", "OrderedDict")}
# Stock's save records the path that it was given, perhaps with another version of Python.
_PATHS = frozenset([("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")])


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
        if (module, name) in _PATHS:
            return PurePosixPath
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


def completed(planned: bytes, results: Sequence[Sequence[Any]], location: str) -> Metadata:
    """The planned metadata with the places of all items, from the rows of all ranks."""
    metadata = read_planned(planned)
    metadata.storage_data = {
        MetadataIndex(key, torch.Size(offset) if offset is not None else None, index): (
            _StorageInfo(file, start, length)
        )
        for rows in results
        for key, offset, index, file, start, length in rows
    }
    metadata.storage_meta = StorageMeta(checkpoint_id=location, save_id=uuid.uuid4().hex)
    metadata.version = _DCP_VERSION
    return metadata


@collection_paused()
def finish_dcp(
    planned: bytes, results: Sequence[Sequence[Any]], location: str
) -> Mapping[str, bytes]:
    """``.metadata`` of a part in DCP's own format, see ``ports.PartFinisher``."""
    return {".metadata": pickle.dumps(completed(planned, results, location))}


def finish_torch_dist(
    planned: bytes, results: Sequence[Sequence[Any]], location: str
) -> Mapping[str, bytes]:
    """The same for megatron-core's format, which only megatron-core knows."""
    finish = import_module("ckptfsm.megatron.torch_dist").finish_part
    finished: Mapping[str, bytes] = finish(planned, results, location)
    return finished
