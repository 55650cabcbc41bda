"""Items of a state as images, for a writer without torch: where each byte of a rank's files lies.

The head and tail of an item's ``torch.save`` blob come from a template. Its data stays in the trainer's
memory until the writer reads it. An accelerator's tensor is read from its copy in host memory.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import WriteItem

from ckptfsm.core.images import SMALL_BYTES, Image, Literal, Memory, Piece, image_of
from ckptfsm.core.layout import join
from ckptfsm.dcp.blobs import Templates
from ckptfsm.dcp.device_copies import StateCopy, version_of
from ckptfsm.dcp.shared_memory import extent_of, local_of, span_of, storage_of

Bucket = Sequence[tuple[WriteItem, Any]]
Row = tuple[object, ...]


class Owners:
    """Tensors that stay as they are until the gate. Others may lie in the same storage, and may not."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._alone: dict[int, list[torch.Tensor]] = {}  # those with all of a storage: nearly all
        self._parts: dict[int, list[tuple[int, int, torch.Tensor]]] = {}  # the bytes that each has
        for tensor in tensors:
            place, local = storage_of(tensor), local_of(tensor)
            if not place:  # an empty tensor has no memory
                continue
            if local.is_contiguous() and local.nbytes == local.untyped_storage().nbytes():
                self._alone[place] = [tensor]
            else:
                self._parts.setdefault(place, []).append((*span_of(local), tensor))
        for owners in self._parts.values():
            owners.sort(key=itemgetter(0))

    def __bool__(self) -> bool:
        return bool(self._alone or self._parts)

    def of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Those in whose memory all of ``tensor`` lies; none if nobody promised all of that."""
        place = storage_of(tensor) or 0
        alone = self._alone.get(place)
        if alone is not None or place not in self._parts:
            return alone or []
        owners, found = self._parts[place], []
        first, last = extent_of(local_of(tensor))
        at = bisect_right(owners, first, key=itemgetter(0)) - 1
        while 0 <= at < len(owners) and owners[at][0] <= first < last:
            _, end, owner = owners[at]
            if first < end:
                first = end
                found.append(owner)
            at += 1
        return found if first >= last else []


@dataclass(slots=True)
class Held:
    """Tensors with memory that is read after staging, their names, addresses and versions.

    ``owners`` are tensors that stay as they are until the gate. ``promises_all``: so do all others.
    ``watched`` are tensors that are not read later, and whose versions tell of a change of others.
    """

    owners: Owners = field(default_factory=Owners)
    promises_all: bool = True
    tensors: list[tuple[str, torch.Tensor, int, int]] = field(default_factory=list)
    watched: list[tuple[str, torch.Tensor, int]] = field(default_factory=list)
    copies: list[torch.Tensor] = field(default_factory=list)
    device: StateCopy | None = None
    gone: bool = False

    def may_change(self, tensor: torch.Tensor) -> bool:
        """True if nobody promised that this tensor of the trainer stays until the gate."""
        if self.promises_all or not self.owners:
            return not self.promises_all
        return not self.owners.of(tensor)

    def add(self, name: str, trainers: torch.Tensor, read: torch.Tensor) -> bool:
        """Keep ``read``. True if the trainer's tensor has its memory; what is promised is watched."""
        memory = trainers.untyped_storage()
        mutable = trainers.device.type == "cpu" and (
            memory.data_ptr() <= read.data_ptr() < memory.data_ptr() + memory.nbytes()
        )
        if mutable and not self.may_change(trainers):
            self.tensors.append((name, trainers, trainers.data_ptr(), version_of(trainers)))
        self.copies.append(read)
        return mutable

    def watch(self, name: str, tensor: torch.Tensor, memory: torch.Tensor) -> None:
        """Watch the versions of all that has ``memory``, if that is promised: they change together.

        Torch counts a change for a DTensor or for its local part, and not for other DTensors.
        """
        if not self.may_change(memory):
            owners = [owner for owner in self.owners.of(memory) if owner is not tensor]
            # The host's copies end before those of an accelerator, of which these tensors tell, too.
            watched = self.watched if self.device is None else self.device.watched
            for each in (tensor, *owners):
                watched.append((name, each, version_of(each)))
                if (local := local_of(each)) is not each:
                    watched.append((name, local, version_of(local)))

    def changed(self) -> str:
        """The first tensor that was changed since it was added, in words; "" if none was."""
        if self.gone:
            return "the state was let go of before the writer had read it"
        for name, tensor, address, version in self.tensors:
            if tensor.data_ptr() != address:
                return f"{name} was moved before the writer had read it"
            if version_of(tensor) != version:
                return f"{name} was changed before the writer had read it"
        for name, tensor, version in self.watched:
            if version_of(tensor) != version:
                return f"{name} was changed before the writer had read the state"
        if self.device is None:
            return ""
        if self.device.host_copied:  # this was the last look: they may change
            self.tensors = []
        return self.device.changed()

    def clear(self) -> None:
        if self.device is not None:
            self.device.let_go()
        self.tensors, self.watched, self.copies = [], [], []
        self.owners, self.device, self.gone = Owners(), None, True


class _Staged(NamedTuple):
    """An item as it was staged last: its pieces hold as long as its tensor has the same memory.

    ``place``: key, offset and index of its row; ``size``: of its blob, in bytes.
    """

    item: WriteItem
    place: Row
    size: int
    head: Piece
    data: Memory
    tail: Piece

    def data_now(self, value: Any, held: Held) -> Memory | None:
        """The data of ``value`` for another save; None if it is to be staged from the start.

        The plan holds, so its shape and dtype are the same.
        """
        if type(value) is not torch.Tensor or value.data_ptr() != self.data.address:
            return None
        if value.nbytes != self.data.size or not _lies_plainly(value):
            return None
        if self.data.size < SMALL_BYTES:
            held.copies.append(value)
            return self.data
        early = held.may_change(value)
        held.add(self.item.index.fqn, value, value)
        return self.data if self.data.early == early else replace(self.data, early=early)


def shards_of(
    rank: int, directory: str, buckets: Iterable[Bucket], templates: Templates, held: Held
) -> tuple[list[Image], list[Row]]:
    """The files of a rank, a bucket in each, and a row for each item: where it lies in which file.

    Of thousands of tensors, most have the memory of the last save: their pieces are used again.
    """
    images: list[Image] = []
    rows: list[Row] = []
    for number, bucket in enumerate(buckets):
        name = f"__{rank}_{number}.distcp"
        path = join(directory, name)
        before = templates.staged.get(path, ()) if held.device is None else ()
        staged: list[_Staged | None] = []
        pieces: list[Piece] = []
        start = 0
        for (item, value), last in zip_longest(bucket, before[: len(bucket)]):
            data = last.data_now(value, held) if last is not None and last.item is item else None
            if last is None or data is None:
                blob = blob_of(item.index.fqn, value, templates, held)
                size, place = sum(piece.size for piece in blob), _place_of(item)
                last = _staged(item, value, place, size, blob) if held.device is None else None
                pieces += blob
            else:
                size, place = last.size, last.place
                pieces += last.head, data, last.tail
            staged.append(last)
            rows.append((*place, name, start, size))
            start += size
        templates.staged[path] = staged
        images.append(image_of(path, pieces))
    return images, rows


def _lies_plainly(value: torch.Tensor) -> bool:
    """True if the memory of a tensor on the CPU has its values in order, and a fork freezes it."""
    if not value.is_contiguous() or value.is_conj() or value.is_neg():
        return False
    return not (value.untyped_storage().is_shared() or value.is_pinned())


def _place_of(item: WriteItem) -> Row:
    index = item.index
    return index.fqn, None if index.offset is None else list(index.offset), index.index


def _staged(
    item: WriteItem, value: Any, place: Row, size: int, blob: Sequence[Piece]
) -> _Staged | None:
    """What the next save may use of an item; None unless its data are the value's own."""
    if type(value) is not torch.Tensor or len(blob) != 3:
        return None
    head, data, tail = blob
    if not isinstance(data, Memory) or value.data_ptr() != data.address or not _lies_plainly(value):
        return None
    return _Staged(item, place, size, head, data, tail)


def blob_of(name: str, value: Any, templates: Templates, held: Held) -> list[Piece]:
    """The pieces of one item."""
    if isinstance(value, io.BytesIO):
        return [Literal(value.getvalue())]
    slot = held.device.slot_for(value) if held.device is not None else None
    host = exact(to_host(value)) if slot is None else slot
    template = templates.of(host)
    if template is None:
        return [Literal(saved(host if slot is None else exact(to_host(value))))]
    return template.pieces([data_of(name, value, host, held, copying=slot is not None)])


def data_of(
    name: str,
    value: torch.Tensor,
    host: torch.Tensor,
    held: Held,
    *,
    copying: bool,
) -> Memory:
    """The data of a tensor of the trainer, as it lies in the storage of ``host``.

    ``copying``: an accelerator's copies fill ``host``.
    """
    memory = host.untyped_storage()
    address, size = memory.data_ptr(), memory.nbytes()
    if held.device is not None and copying:
        held.device.add(name, value, host, first=size < SMALL_BYTES or held.may_change(value))
        return Memory(address, size, mutable=False)
    if size < SMALL_BYTES:
        held.copies.append(host)
        return Memory(address, size, early=True)
    mutable = held.add(name, value, host)
    return Memory(address, size, mutable=mutable, early=mutable and held.may_change(value))


def counts_steps(tensor: torch.Tensor) -> bool:
    """True for a number of an optimizer: it tells of changes of DTensors that torch does not count."""
    return tensor.dim() == 0 and tensor.is_floating_point()


def without_grad(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor; itself, if it is plain: of thousands, most are."""
    plain = type(tensor) is torch.Tensor and not tensor.requires_grad
    return tensor if plain else tensor.detach()


def saved(value: Any) -> bytes:
    """The bytes of ``torch.save``."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


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
