"""Images: the files of a part as lists of pieces, which a process without torch can write."""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ckptfsm.core.parts import Sent

CHUNK_BYTES = 4 << 20
SMALL_BYTES = 64 << 10
"""Smaller data is copied before ``save`` returns: a forward pass may change it, as the buffers of a
BatchNorm."""
_MEMORY_KINDS = 4  # of memory that is mutable or not, early or not
_CRC = struct.Struct("<I")
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class _Known(Sent):
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)


class Literal(_Known):
    """Bytes that are known when the save is planned."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Memory(Sent):
    """``size`` bytes of the trainer at ``address``: the data of one tensor.

    ``mutable``: the trainer can change them, as they are no copy. ``early``: as soon as ``save``
    returns.
    """

    address: int
    size: int
    mutable: bool = True
    early: bool = False


class Copied(_Known):
    """The data of one tensor, as it was when the save was staged."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class SerializationId(Sent):
    """The fields of the last record of a file of ``torch.save``. Positions are those of a ``Patch``.

    Its content has 40 digits: a hash of the records' names, then a hash of their CRC-32s.

    - ``at``: the place of the digits; ``names`` are the first 20 of them.
    - ``crcs_at``: the places of the CRC-32 of the digits.
    - ``crcs``: the CRC-32 of every record before that has bytes, in file order; None for data.
    """

    at: int
    names: bytes
    crcs_at: tuple[int, ...]
    crcs: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Patch(Sent):
    """The fields of a piece that depend on data before it. Positions count from its first byte.

    A file of ``torch.save`` is a zip archive. A record's CRC-32 stands behind it (data descriptor), and
    in the central directory at the end of the file. The serialization id depends on those of all
    records. Source: ``PyTorchStreamWriter`` of torch 2.x (caffe2/serialize/inline_container.cc).

    ``data_crcs``: the places of CRC-32s of data, each with a number: 1 for the last data before the
    piece, 2 for those before that. ``id`` is None in a piece without the id.
    """

    data_crcs: tuple[tuple[int, int], ...]
    id: SerializationId | None = None

    def applied(self, tail: bytes, crcs: Sequence[int]) -> bytes:
        """``tail`` behind data with these CRC-32s, which may begin before the file's own."""
        made = bytearray(tail)
        for position, before in self.data_crcs:
            _CRC.pack_into(made, position, crcs[-before])
        if self.id is not None:
            digits = self.id.names + b"%020d" % combined(self.id.crcs, crcs)
            made[self.id.at : self.id.at + len(digits)] = digits
            for position in self.id.crcs_at:
                _CRC.pack_into(made, position, zlib.crc32(digits))
        return bytes(made)


def combined(records: Sequence[int | None], crcs: Sequence[int]) -> int:
    """The hash of the records' CRC-32s, as torch combines them; the last of ``crcs`` are the Nones'."""
    value, before = 0, records.count(None)
    for each in records:
        if each is None:
            each, before = crcs[-before], before - 1
        added = each + 0x9E3779B9 + (value << 6) + (value >> 2)
        value = (value ^ added) & _MASK
    return value


@dataclass(frozen=True, slots=True)
class BlobTail(_Known):
    """What follows data in a blob. ``patch`` fills in the fields that depend on the data before it."""

    patch: Patch


Piece = Literal | Memory | Copied | BlobTail


class Slice(NamedTuple):
    """A part of a piece: ``at`` counts from the chunk's start, ``start`` from the piece's."""

    piece: Piece
    at: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Image:
    """A file as it will be. ``name`` is relative to the step's directory, ``size`` in bytes.

    It is sent in columns: thousands of small objects take longer.
    """

    name: str
    size: int
    pieces: tuple[Piece, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        kinds, memory = array("I"), array("Q")
        others: list[Piece] = []
        numbers: dict[int, int] = {}  # by identity: many blobs have the same head and tail
        for piece in self.pieces:
            if type(piece) is Memory:
                kinds.append(piece.mutable + 2 * piece.early)
                memory.append(piece.address)
                memory.append(piece.size)
                continue
            number = numbers.setdefault(id(piece), len(others))
            if number == len(others):
                others.append(piece)
            kinds.append(_MEMORY_KINDS + number)
        return _received, (self.name, self.size, kinds, memory, others)

    @property
    def chunk_count(self) -> int:
        return max(1, -(-self.size // CHUNK_BYTES))

    def chunks(self) -> Iterator[tuple[int, int, list[Slice]]]:
        """Each chunk in file order: its offset, its length, and its slices."""
        slices: list[Slice] = []
        filled = offset = 0
        for piece in self.pieces:
            start = 0
            while start < piece.size:
                length = min(piece.size - start, CHUNK_BYTES - filled)
                slices.append(Slice(piece, filled, start, length))
                start, filled = start + length, filled + length
                if filled == CHUNK_BYTES:
                    yield offset, filled, slices
                    offset, filled, slices = offset + filled, 0, []
        if slices or not offset:
            yield offset, filled, slices


def _received(
    name: str, size: int, kinds: array[int], memory: array[int], others: list[Piece]
) -> Image:
    """An image that was sent."""
    numbers = iter(memory)
    pieces: list[Piece] = []
    for kind in kinds:
        if kind < _MEMORY_KINDS:
            pieces.append(Memory(next(numbers), next(numbers), bool(kind & 1), bool(kind & 2)))
        else:
            pieces.append(others[kind - _MEMORY_KINDS])
    return Image(name, size, tuple(pieces))


def image_of(name: str, pieces: Sequence[Piece]) -> Image:
    """The image of these pieces; its size is the sum of theirs."""
    return Image(name, sum(piece.size for piece in pieces), tuple(pieces))


class Chunk(NamedTuple):
    """A filled buffer: ``view`` has the chunk's bytes and room for the alignment behind them."""

    view: memoryview
    give_back: Callable[[], None]


class ChunkSource(Protocol):
    """Fills the chunks of images, each image's in file order."""

    concurrent: bool
    """True if several threads may take chunks, and should, so that the disk is kept busy."""

    def take(self, image: Image, slices: Sequence[Slice]) -> Chunk:
        """The next chunk of ``image``; waits for it. Raises the error of the read."""

    def cancel(self, images: Sequence[Image], error: BaseException) -> None:
        """Keep no more chunks of these images, and raise ``error`` where one is awaited."""


class Copying(Protocol):
    """Copies of an accelerator's state into memory of the images, which may be on their way."""

    host_copied: bool
    """True once the host's state is copied, too: the trainer may change it."""

    def done(self) -> bool:
        """True once the memory has the state. Raises the error of the copies; never waits."""

    def order_updates(self) -> None:
        """Let the accelerator run all later work of the trainer behind the copies; never waits."""

    def give_to_child(self) -> None:
        """Wait for the copies, and let a child that is forked next have their memory."""
