"""The metadata of DCP: planned by all ranks together, and completed with where each item lies."""

from __future__ import annotations

import enum
import io
import pickle
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import chain, islice
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


def completed(planned: bytes, location: str) -> Metadata:
    """The planned metadata of a part at ``location``. ``dumped`` adds where its items lie."""
    metadata = read_planned(planned)
    metadata.storage_meta = StorageMeta(checkpoint_id=location, save_id=uuid.uuid4().hex)
    metadata.version = _DCP_VERSION
    return metadata


@collection_paused()
def finish_dcp(
    planned: bytes, results: Sequence[Sequence[Any]], location: str
) -> Mapping[str, bytes]:
    """``.metadata`` of a part in DCP's own format, see ``ports.PartFinisher``.

    Raises ``DamagedRoot`` unless as many items were written as were planned.
    """
    metadata = completed(planned, location)
    wanted = sum(len(getattr(m, "chunks", (m,))) for m in metadata.state_dict_metadata.values())
    written = sum(map(len, results))
    if written != wanted:
        raise DamagedRoot(f"{written} items were written, and {wanted} are planned", file=location)
    return {".metadata": dumped(metadata, results)}


def finish_torch_dist(
    planned: bytes, results: Sequence[Sequence[Any]], location: str
) -> Mapping[str, bytes]:
    """The same for megatron-core's format, which only megatron-core knows."""
    finish = import_module("ckptfsm.megatron.torch_dist").finish_part
    finished: Mapping[str, bytes] = finish(planned, results, location)
    return finished


# ------------------------------------------------------------------------------- where the items lie


def dumped(metadata: Metadata, results: Sequence[Sequence[Any]]) -> bytes:
    """The pickle of ``metadata`` with the places of all items, from the rows of all ranks.

    A row makes two objects, for which pickle takes 6 us, and there may be a million of rows. So they are
    put together here, of the opcodes that pickle writes, in a tenth of that time.
    """
    pieces = _PickledPieces()
    made = pieces.of(type(metadata)) + _EMPTY
    fields = vars(metadata) | {"storage_data": None}
    state = (
        pieces.of(name) + (_places(results, pieces) if name == "storage_data" else pieces.of(each))
        for name, each in fields.items()
    )
    return b"".join((_PROTOCOL, made, *state, _STATE_SET, pickle.STOP))


_PROTOCOL = pickle.PROTO + b"\x03"  # the last one without frames around the pieces
_EMPTY = (
    pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.EMPTY_DICT + pickle.MARK
)  # an object, its state
_STATE_SET = pickle.SETITEMS + pickle.BUILD


class _PickledPieces:
    """Pieces of one pickle, in order. A constant that was in an earlier piece is referred to."""

    def __init__(self) -> None:
        self._file = io.BytesIO()
        self._pickler = pickle.Pickler(self._file, 3)

    def of(self, value: Any) -> bytes:
        """The opcodes that push a value."""
        self._file.seek(0)
        self._file.truncate()
        self._pickler.dump(value)
        return self._file.getvalue()[len(_PROTOCOL) : -len(pickle.STOP)]


class _Constants(dict[Any, bytes]):
    """The piece of each value: at first what ``make`` returns for it, later what refers to that.

    It stands between the opcodes ``before`` and ``after``.
    """

    def __init__(
        self,
        pieces: _PickledPieces,
        make: Callable[[Any], Any],
        before: bytes = b"",
        after: bytes = b"",
    ) -> None:
        super().__init__()
        self._pieces, self._make, self._before, self._after = pieces, make, before, after
        self._once: dict[Any, Any] = {}  # many a file is in one row only

    def __missing__(self, value: Any) -> bytes:
        if value not in self._once:
            made = self._once[value] = self._make(value)
            return self._before + self._pieces.of(made) + self._after
        made = self._once.pop(value)
        piece = self[value] = self._before + self._pieces.of(made) + self._after
        return piece


def _places(results: Sequence[Sequence[Any]], pieces: _PickledPieces) -> bytes:
    """The dict of the places: a ``MetadataIndex`` and a ``_StorageInfo`` for each row."""
    rows = chain.from_iterable(results)
    made = [pickle.EMPTY_DICT]
    for key, offset, hint, file, start, length in islice(rows, 1):  # by pickle: names for the memo
        index = MetadataIndex(key, None if offset is None else torch.Size(offset), hint)
        made += pieces.of(index), pieces.of(_StorageInfo(file, start, length)), pickle.SETITEM
    of, at = pieces.of, pieces.of("offset")
    begin = of(MetadataIndex) + _EMPTY + of("fqn")
    lies_in = _STATE_SET + of(_StorageInfo) + _EMPTY + of("relative_path")
    names = _Constants(pieces, str, begin, of("index"))
    sizes = _Constants(pieces, torch.Size, at)
    files = _Constants(pieces, str, lies_in, at)
    numbers = _Constants(pieces, lambda value: value)
    lengths = _Constants(pieces, int, of("length"), _STATE_SET + pickle.SETITEM)
    for key, offset, hint, file, start, length in rows:
        made += names[key], numbers[hint]
        if offset is not None:
            made.append(sizes[tuple(offset)])
        made += files[file], numbers[start], lengths[length]
    return b"".join(made)
