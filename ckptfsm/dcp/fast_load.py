"""Loads the tensors of a checkpoint of ours straight from its files, and verifies these.

Stock's load opens each item with ``torch.load``, one after the other, and copies it twice. Here each
file is read once, whole, past the page cache, with several reads in flight (``disk.pieces``). Where a
rank wants a tensor as it is stored, its bytes lie in the file as they do in memory. Under another
sharding, parts of an item are copied to the tensors that want them. Stock's load does the rest:
objects, other dtypes, files of which less than half is wanted.

The place of the data in a blob is never taken from the disk. Torch makes the head for the wanted
structure, as for a save, and the stored head has to be the same. Metadata is read only after its digest
was compared. A tensor whose place is odd in any way is left to stock's load.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import prod
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from ckptfsm.adapters.posix_storage import DIGEST_PREFIX
from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import DamagedRoot
from ckptfsm.core.layout import join
from ckptfsm.core.ports import Storage
from ckptfsm.dcp.blobs import make_template
from ckptfsm.dcp.metadata import read_planned
from ckptfsm.disk.pieces import Piece, ToRead, first_bad_file

T = TypeVar("T")
_WORTH_IT = 0.5  # of a file's bytes are wanted, or stock's load reads less
_NOWHERE = ""


class Filled(NamedTuple):
    """Names a shard and its memory. A ``FastLoad`` keeps its tensors, so no address is used again."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    address: int


class Blob(NamedTuple):
    """The form of the blob of a contiguous tensor: its first bytes, and its size."""

    head: bytes
    size: int


class Region(NamedTuple):
    """The values that a wanted tensor and a stored item have in common: ``data[into]``, ``item[of]``.

    ``shard`` names the wanted tensor, ``data`` is its memory.
    """

    shard: Filled
    data: torch.Tensor
    into: tuple[slice, ...]
    of: tuple[slice, ...]

    @property
    def numel(self) -> int:
        return prod(each.stop - each.start for each in self.into)


@dataclass(slots=True)
class Target:
    """A stored item of ``shape``, to be read from its blob in a file into the tensors of ``regions``.

    If it is all of a single tensor, the bytes are read into this tensor's memory. Else the item has
    memory of its own until it is whole. ``filled`` counts the bytes so far. ``same`` turns False at
    a byte of the head that differs.
    """

    regions: list[Region]
    shape: tuple[int, ...]
    blob: Blob
    start: int
    filled: int = 0
    same: bool = True
    _bytes: torch.Tensor | None = None

    @property
    def end(self) -> int:
        """The end of the blob in its file."""
        return self.start + self.blob.size

    @property
    def length(self) -> int:
        """The bytes of the item."""
        return prod(self.shape) * self.regions[0].data.itemsize

    @property
    def is_full(self) -> bool:
        return self.same and self.filled == self.length

    def take(self, offset: int, view: memoryview, data: torch.Tensor) -> None:
        """Compare or copy the part of a piece that is this item's. Pieces come in order."""
        head, at = self.blob.head, self.start - offset  # places count from the piece's start
        low, high = max(at, 0), min(at + len(head), len(view))
        if low < high and view[low:high] != head[low - at : high - at]:
            self.same = False
        at += len(head)
        low, high = max(at, 0), min(at + self.length, len(view))
        if self.same and low < high:
            self._memory()[low - at : high - at].copy_(data[low:high])
            self.filled += high - low
            if self.is_full:
                self._place()

    @property
    def _is_whole(self) -> bool:
        """True if the item is all of the only tensor that wants it."""
        if len(self.regions) != 1 or tuple(self.regions[0].data.shape) != self.shape:
            return False
        return self.regions[0].numel == prod(self.shape)  # else it lies at another offset

    def _memory(self) -> torch.Tensor:
        if self._bytes is None:
            self._bytes = (
                self.regions[0].data.reshape(-1).view(torch.uint8)
                if self._is_whole
                else torch.empty(self.length, dtype=torch.uint8)
            )
        return self._bytes

    def _place(self) -> None:
        """Copy the whole item to the tensors that want a part of it."""
        if not self._is_whole:
            item = self._memory().view(self.regions[0].data.dtype).reshape(self.shape)
            for region in self.regions:
                region.data[region.into].copy_(item[region.of])
        self._bytes = None


class FastLoad:
    """The files that a rank reads whole, see ``ports.VerifiedReading``. ``targets`` are by file.

    ``load_rest`` loads what is not in the set of shards that are filled.
    """

    def __init__(
        self,
        storage: Storage,
        location: str,
        targets: Mapping[FileEntry, Sequence[Target]],
        load_rest: LoadRest,
    ) -> None:
        self._storage, self._location, self._load_rest = storage, location, load_rest
        self._entries = list(targets)
        self._targets = [sorted(targets[e], key=attrgetter("start")) for e in self._entries]
        self._stopped = threading.Event()
        self._waiting: list[list[Target]] = []
        self.files = frozenset(entry.name for entry in self._entries)

    def run(self, alone: Collection[str]) -> str:
        """See ``ports.VerifiedReading``. A file that several ranks read comes through the page cache."""
        files = [
            ToRead(join(self._location, e.name), e.bytes, e.digest or "", e.name in alone)
            for e in self._entries
        ]
        self._waiting = [list(reversed(targets)) for targets in self._targets]
        self._await_devices()
        bad = first_bad_file(self._storage, files, self._take, self._stopped.is_set)
        self._await_devices()
        if bad is None:
            return ""
        return f"{self._entries[bad].name} has another content than was written"

    def stop(self) -> None:
        self._stopped.set()

    def load(
        self, parts: Mapping[str, Any], directories: Mapping[str, str], drop: set[str]
    ) -> Mapping[str, Any]:
        return self._load_rest(parts, directories, drop, self.full())

    def full(self) -> frozenset[Filled]:
        """The shards that are filled."""
        found: Counter[Filled] = Counter()
        for target in chain.from_iterable(self._targets):
            if target.is_full:
                found.update({region.shard: region.numel for region in target.regions})
        return frozenset(shard for shard, count in found.items() if count == prod(shard.shape))

    def _take(self, piece: Piece) -> None:
        """Give a piece to the targets that it overlaps. Those before it need nothing more."""
        waiting, end = self._waiting[piece.file], piece.offset + len(piece.view)
        data = torch.frombuffer(piece.view, dtype=torch.uint8) if piece.view else _NO_BYTES
        while waiting and waiting[-1].end <= piece.offset:
            waiting.pop()
        for target in reversed(waiting):
            if target.start >= end:
                break
            target.take(piece.offset, piece.view, data)

    def _await_devices(self) -> None:
        """Wait for accelerators: this thread's copies are not in order with the trainer's work."""
        targets = chain.from_iterable(self._targets)
        devices = {region.data.device for each in targets for region in each.regions}
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


_NO_BYTES = torch.empty(0, dtype=torch.uint8)


LoadRest = Callable[
    [Mapping[str, Any], Mapping[str, str], set[str], Collection[Filled]], Mapping[str, Any]
]

# -------------------------------------------------------------------------------------- planning


class Wanted(NamedTuple):
    """A tensor of a rank that is to be loaded: the part of ``data``'s shape at the shard's offset.

    ``size`` is the shape of all parts together.
    """

    shard: Filled
    size: tuple[int, ...]
    data: torch.Tensor


class Stored(NamedTuple):
    """An item of ``shape`` with values of a wanted tensor. Its blob is at ``start`` of ``file``."""

    region: Region
    shape: tuple[int, ...]
    file: str
    start: int
    length: int


def stored_items(metadata: Metadata, wanted: Wanted) -> list[Stored]:
    """The items that make up a wanted tensor; none if that cannot be told without doubt."""
    (key, offset, *_), data = wanted.shard, wanted.data
    about = metadata.state_dict_metadata.get(key)
    if not isinstance(about, TensorStorageMetadata) or about.properties.dtype != data.dtype:
        return []
    if tuple(about.size) != wanted.size or len(offset) != data.dim():
        return []
    found, shape = [], tuple(data.shape)
    # Mostly one is all of it. A region of each of 256 chunks takes 0.6 s for 2,500 tensors.
    same = [each for each in about.chunks if each.offsets == offset and each.sizes == shape]
    for chunk in same or about.chunks:
        region = _region(wanted, chunk)
        if region is None:
            continue
        info = (metadata.storage_data or {}).get(MetadataIndex(key, chunk.offsets))
        if info is None or getattr(info, "transform_descriptors", None):
            return []
        place = info.relative_path, info.offset, info.length
        found.append(Stored(region, tuple(chunk.sizes), *place))
    places = {tuple(each.start for each in stored.region.into) for stored in found}
    whole = sum(stored.region.numel for stored in found) == data.numel()
    return found if whole and len(places) == len(found) else []


def _region(wanted: Wanted, chunk: ChunkStorageMetadata) -> Region | None:
    """What a wanted tensor and a stored chunk have in common; None if that is nothing."""
    offset = wanted.shard.offset
    if len(chunk.offsets) != len(offset):
        return None
    into, of = [], []
    for first, count, low, length in zip(
        offset, wanted.data.shape, chunk.offsets, chunk.sizes, strict=True
    ):
        start, stop = max(first, low), min(first + count, low + length)
        if start >= stop:
            return None
        into.append(slice(start - first, stop - first))
        of.append(slice(start - low, stop - low))
    return Region(wanted.shard, wanted.data, tuple(into), tuple(of))


def targets_by_file(
    found: Iterable[Stored], directory: str, entries: Mapping[str, FileEntry]
) -> dict[FileEntry, list[Target]]:
    """The items that can be read straight from files with a digest. Anything odd is left out."""
    targets: dict[FileEntry, dict[int, Target]] = defaultdict(dict)
    form = cache(form_of)
    for region, shape, file, start, length in found:
        entry, blob = entries.get(join(directory, file)), form(region.data.dtype, shape)
        if entry is None or entry.digest is None or blob is None or blob.size != length:
            continue
        if 0 <= start <= entry.bytes - length:
            target = targets[entry].setdefault(start, Target([], shape, blob, start))
            if target.shape == shape:
                target.regions.append(region)
    return {entry: list(each.values()) for entry, each in targets.items()}


def worth_reading(
    targets: Mapping[FileEntry, Sequence[Target]],
) -> dict[FileEntry, Sequence[Target]]:
    """The files of which enough is wanted: of the others, stock's load reads less."""
    return {
        entry: found
        for entry, found in targets.items()
        if sum(map(_wanted_bytes, found)) >= _WORTH_IT * entry.bytes
    }


def _wanted_bytes(target: Target) -> int:
    wanted = sum(region.numel * region.data.itemsize for region in target.regions)
    return min(target.length, wanted)


def apart_in_memory(found: Iterable[tuple[T, torch.Tensor]]) -> Iterator[T]:
    """Those whose tensors share no memory with another's."""
    places = sorted(
        ((_place_in_memory(data), each, data) for each, data in found), key=itemgetter(0)
    )
    groups: list[list[T]] = []
    end = (_NOWHERE, 0)
    for place, each, data in places:
        if place < end:
            groups[-1].append(each)
        else:
            groups.append([each])
        end = max(end, (place[0], place[1] + data.numel() * data.itemsize))
    return (group[0] for group in groups if len(group) == 1)


def _place_in_memory(data: torch.Tensor) -> tuple[str, int]:
    return str(data.device), data.data_ptr()


def is_plain(data: Any) -> bool:
    """True for a contiguous tensor whose values are its bytes."""
    return (
        type(data) in (torch.Tensor, torch.nn.Parameter)
        and data.layout is torch.strided
        and data.device.type in ("cpu", "cuda")
        and data.numel() > 0
        and data.is_contiguous()
        and not data.is_quantized
        and not data.is_conj()
        and not data.is_neg()
        and not data.is_inference()
    )


def metadata_of(storage: Storage, location: str, entry: FileEntry | None) -> Metadata | None:
    """The metadata of a part; None if it is not ours, or damaged: those who verify it will tell."""
    if entry is None or entry.digest is None:
        return None
    try:
        data = storage.read(join(location, entry.name), entry.bytes + 1)
    except FileNotFoundError:
        return None
    if DIGEST_PREFIX + xxhash.xxh3_128_hexdigest(data) != entry.digest:
        return None
    try:
        return read_planned(data)
    except DamagedRoot:  # a class of a later torch or megatron-core
        return None


def form_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Blob | None:
    """The blob of such a tensor as torch writes it now; None if that is in an unknown way."""
    try:
        made = make_template(torch.empty(shape, dtype=dtype))  # untouched, so it costs nothing
        return Blob(made.head, made.size)
    except Exception:  # any surprise in the format of a new torch
        return None


def memory_of(data: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A plain tensor's memory in this shape, for the thread that fills it."""
    with torch.inference_mode(False):  # that thread is not in the caller's mode
        return data.detach().view(shape)
