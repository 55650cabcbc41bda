"""Loads the tensors of a checkpoint of ours straight from its files, and verifies these.

Stock's load opens each item with ``torch.load``, one after the other, and copies it twice. Where a
rank wants a tensor exactly as it is stored, its bytes lie in a file as they do in memory. Then the
file is read whole, past the page cache, with several reads in flight (``disk.pieces``). Stock's load
does the rest: objects, other shardings or dtypes, files of which less than half is wanted.

The place of the data in a blob is never taken from the disk. Torch makes the head for the wanted
structure, as for a save, and the stored head has to be the same. Metadata is read only after its digest
was compared. A tensor whose place is odd in any way is left to stock's load.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
import xxhash
from torch.distributed.checkpoint.metadata import Metadata

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


@dataclass(slots=True)
class Target:
    """A tensor to be filled: its bytes in memory, and the place of its blob in a file.

    ``filled`` counts the bytes so far. ``same`` turns False at a byte of the head that differs.
    """

    shard: Filled | None
    bytes: torch.Tensor
    blob: Blob
    start: int
    filled: int = 0
    same: bool = True

    @property
    def end(self) -> int:
        """The end of the blob in its file."""
        return self.start + self.blob.size

    @property
    def is_full(self) -> bool:
        return self.same and self.filled == len(self.bytes)

    def take(self, offset: int, view: memoryview, data: torch.Tensor) -> None:
        """Compare or copy the part of a piece that is this tensor's. Pieces come in order."""
        head, at = self.blob.head, self.start - offset  # places count from the piece's start
        low, high = max(at, 0), min(at + len(head), len(view))
        if low < high and view[low:high] != head[low - at : high - at]:
            self.same = False
        at += len(head)
        low, high = max(at, 0), min(at + len(self.bytes), len(view))
        if self.same and low < high:
            self.bytes[low - at : high - at].copy_(data[low:high])
            self.filled += high - low


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

    def full(self) -> frozenset[Filled | None]:
        """The shards that are filled."""
        return frozenset(t.shard for targets in self._targets for t in targets if t.is_full)

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
        devices = {t.bytes.device for targets in self._targets for t in targets}
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


_NO_BYTES = torch.empty(0, dtype=torch.uint8)


LoadRest = Callable[
    [Mapping[str, Any], Mapping[str, str], set[str], Collection[Filled | None]], Mapping[str, Any]
]

# -------------------------------------------------------------------------------------- planning


class Stored(NamedTuple):
    """A wanted tensor that is exactly an item of a checkpoint.

    ``data`` is its memory, ``shape`` that of the item. The blob lies in ``file``, from ``start`` on.
    """

    shard: Filled | None
    data: torch.Tensor
    shape: tuple[int, ...]
    file: str
    start: int
    length: int


def targets_by_file(
    found: Iterable[Stored | None], directory: str, entries: Mapping[str, FileEntry]
) -> dict[FileEntry, list[Target]]:
    """The items that can be read straight from files with a digest. Anything odd is left out."""
    targets: dict[FileEntry, list[Target]] = defaultdict(list)
    form = cache(form_of)
    for each in filter(None, found):
        entry, blob = entries.get(join(directory, each.file)), form(each.data.dtype, each.shape)
        if entry is None or entry.digest is None or blob is None or blob.size != each.length:
            continue
        if 0 <= each.start <= entry.bytes - each.length:
            targets[entry].append(Target(each.shard, bytes_in(each.data), blob, each.start))
    return targets


def worth_reading(
    targets: Mapping[FileEntry, Sequence[Target]],
) -> dict[FileEntry, Sequence[Target]]:
    """The files of which enough is wanted: of the others, stock's load reads less."""
    worth = {}
    for entry, found in targets.items():
        wanted = {target.start: len(target.bytes) for target in found}
        if sum(wanted.values()) >= _WORTH_IT * entry.bytes:
            worth[entry] = found
    return worth


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


def bytes_in(data: torch.Tensor) -> torch.Tensor:
    """The memory of a plain tensor as bytes, for the thread that fills it."""
    with torch.inference_mode(False):  # that thread is not in the caller's mode
        return data.detach().reshape(-1).view(torch.uint8)
