"""Templates of files of ``torch.save``: all their bytes but the data of tensors.

These depend on the saved object's structure and plain values only, but for checksums of the data, see
``core.images``. Torch itself makes a template, with ``skip_data``, into a file with holes for the data.
A tensor's template is trusted only for a dtype for which template and ``torch.save`` gave the same bytes
once in this process. If they ever differ, every blob is written by ``torch.save`` from then on.
"""

from __future__ import annotations

import io
import logging
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any, NamedTuple, cast

import torch
from torch.utils.serialization import config

from ckptfsm.adapters.notices import say
from ckptfsm.core.errors import describe
from ckptfsm.core.images import BlobTail, Literal, Patch, Piece, SerializationId

log = logging.getLogger("ckptfsm")

DATA = "data/"
_ID = ".data/serialization_id"
_LOCAL_BYTES = 30  # fixed part of a local header; the lengths of name and extra field end it
_CENTRAL_BYTES = 46
_CENTRAL_CRC = 16
_ID_DIGITS = 40
_DESCRIPTOR = b"PK\x07\x08"
_DESCRIPTOR_CRC = 4
_DESCRIBED = ((_DESCRIPTOR_CRC, 1),)  # the CRC-32 of the data right before
_PROBED = 3  # elements of a dtype's probe


class Record(NamedTuple):
    """A record with data: its name in the archive, its size in bytes, and what follows its data."""

    name: str
    size: int
    tail: BlobTail


@dataclass(frozen=True, slots=True)
class Template:
    """A file is ``head``, then the data of each record and its tail, after its patch."""

    head: bytes
    records: tuple[Record, ...]
    first: Literal = field(init=False)
    """The head as a piece: one for all blobs of this template, so it is sent once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "first", Literal(self.head))

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return len(self.head) + sum(record.size + record.tail.size for record in self.records)

    def pieces(self, data: Sequence[Piece]) -> list[Piece]:
        """The pieces of the file with these data, one for each record."""
        pieces: list[Piece] = [self.first]
        for each, record in zip(data, self.records, strict=True):
            pieces += each, record.tail
        return pieces

    def filled(self, data: Sequence[bytes | memoryview]) -> bytes:
        """The file with these data."""
        made, crcs = [self.head], []
        for each, record in zip(data, self.records, strict=True):
            crcs.append(zlib.crc32(each))
            made += bytes(each), record.tail.patch.applied(record.tail.data, crcs)
        return b"".join(made)


class Templates:
    """Templates by structure, of the tensors of one process."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Template] = {}
        self._trusted: set[Any] = set()
        self._refused = ""
        self._alignment: int | None = None  # of torch's settings; None while it writes no CRC-32s
        self.staged: dict[str, Sequence[Any]] = {}  # by file, see ``images.shards_of``
        self.look()

    def look(self) -> None:
        """Take torch's settings, which hold for all templates until the next look."""
        before = self._alignment
        self._alignment = config.save.storage_alignment if config.save.compute_crc32 else None
        if self._alignment != before:
            self.staged.clear()

    def of(self, tensor: torch.Tensor) -> Template | None:
        """The template of a tensor on the CPU that fills its storage; None if there is none.

        There is none while torch is set to write no CRC-32s: the tails would have wrong ones.
        """
        if not _is_plain(tensor) or not self.trusts(tensor.dtype, partial(_probe, tensor.dtype)):
            return None
        key = (
            type(tensor),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.storage_offset(),  # an expanded view may begin anywhere in a storage of its size
            tensor.requires_grad,
            self._alignment,
        )
        found = self._made.get(key)
        if found is None:
            try:
                found = self._made[key] = make_template(tensor)
            except Exception as error:  # any surprise in the format of a new torch
                self._refuse(error)
        return found

    def trusts(self, kind: Any, probe: Callable[[], None]) -> bool:
        """True if templates of this kind may be used.

        ``probe`` raises if template and ``torch.save`` differ; it is called once for a kind.
        """
        if self._refused or self._alignment is None:
            return False
        if kind not in self._trusted:
            try:
                probe()
            except Exception as error:  # any surprise in the format of a new torch
                self._refuse(error)
                return False
            self._trusted.add(kind)
        return True

    def _refuse(self, error: Exception) -> None:
        self._refused = describe(error)
        self.staged.clear()
        said = f"state is written by torch.save, which takes longer: {self._refused}"
        say(log.warning, "no_templates", said, reason=self._refused)


def _probe(dtype: torch.dtype) -> None:
    """Compare template and ``torch.save`` for a small tensor. Raises ``ValueError``."""
    size = _PROBED * dtype.itemsize
    storage = torch.arange(1, size + 1, dtype=torch.uint8).untyped_storage()
    probe = torch.empty(0, dtype=dtype).set_(storage, 0, (_PROBED,), (1,))
    file = io.BytesIO()
    torch.save(probe, file)
    if make_template(probe).filled([bytes(storage.tolist())]) != file.getvalue():
        raise ValueError(f"the template of {dtype} is not what torch.save writes")


def _is_plain(tensor: torch.Tensor) -> bool:
    """True if the pickle of a tensor names its structure and one storage, and nothing else."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.__dict__
        and not tensor._backward_hooks
        and 0 < tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
    )


class Holes(io.RawIOBase):
    """A file in memory that keeps what is written. Bytes that were jumped over read as zeros."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, bytes]] = []
        self.size = self._position = 0

    def write(self, data: Any) -> int:
        piece = bytes(memoryview(data).cast("B"))
        self.pieces.append((self._position, piece))
        self._position += len(piece)
        self.size = max(self.size, self._position)
        return len(piece)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {0: 0, 1: self._position, 2: self.size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        found = self.at(self._position, min(len(buffer), self.size - self._position))
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)

    def at(self, start: int, size: int) -> bytes:
        """``size`` bytes from ``start`` on."""
        found = bytearray(size)
        for position, piece in self.pieces:
            low, high = max(position, start), min(position + len(piece), start + size)
            if low < high:
                found[low - start : high - start] = piece[low - position : high - position]
        return bytes(found)


def make_template(tensor: torch.Tensor) -> Template:
    """The template of a tensor that fills its storage. Raises ``ValueError`` if torch surprises."""
    file = Holes()
    with torch.serialization.skip_data():
        torch.save(tensor, cast(IO[bytes], file))
    template = template_of(cast(IO[bytes], file))
    found = [(record.name, record.size) for record in template.records]
    if found != [("data/0", tensor.untyped_storage().nbytes())]:
        raise ValueError(f"torch.save made records {found}")
    return template


def template_of(file: IO[bytes]) -> Template:
    """The template of a file that torch made with ``skip_data``.

    Records without bytes belong to its literal bytes. Raises ``ValueError`` if torch surprises.
    """
    with zipfile.ZipFile(file) as archive:
        infos = {each.filename.partition("/")[2]: each for each in archive.infolist()}
        directory = archive.start_dir
    names = {name: None for name in infos if name.startswith(DATA) and infos[name].file_size}
    if list(infos)[-1] != _ID:
        raise ValueError(f"torch.save made records {list(infos)}")
    central = _central_crcs(file, directory, list(infos))
    starts = [_content_of(file, infos[name]) for name in names]
    size = file.seek(0, io.SEEK_END)
    records: list[Record] = []
    for name, start, following in zip(names, starts, [*starts[1:], size], strict=False):
        end = start + infos[name].file_size
        tail = _at(file, end, following - end)
        _require_descriptor(tail, 0)
        records.append(Record(name, infos[name].file_size, BlobTail(tail, Patch(_DESCRIBED))))
    if records:
        end = size - records[-1].tail.size
        crcs = ((central[name] - end, len(names) - n) for n, name in enumerate(names))
        tail = records[-1].tail.data
        id_at = _content_of(file, infos[_ID]) - end
        _require_descriptor(tail, id_at + _ID_DIGITS)
        # torch combines no CRC-32 of a record without bytes
        combined = (name for name, info in infos.items() if info.file_size and name != _ID)
        known = (None if name in names else infos[name].CRC for name in combined)
        serialization_id = SerializationId(
            id_at,
            tail[id_at : id_at + _ID_DIGITS // 2],
            (id_at + _ID_DIGITS + _DESCRIPTOR_CRC, central[_ID] - end),
            tuple(known),
        )
        patch = Patch((*_DESCRIBED, *crcs), serialization_id)
        records[-1] = records[-1]._replace(tail=BlobTail(tail, patch))
    return Template(_at(file, 0, starts[0] if starts else size), tuple(records))


def _at(file: IO[bytes], start: int, size: int) -> bytes:
    file.seek(start)
    return file.read(size)


def _require_descriptor(tail: bytes, position: int) -> None:
    if tail[position : position + len(_DESCRIPTOR)] != _DESCRIPTOR:
        raise ValueError("torch.save made a record without a data descriptor")


def _content_of(file: IO[bytes], record: zipfile.ZipInfo) -> int:
    """The place of a record's content."""
    lengths = _at(file, record.header_offset + _LOCAL_BYTES - 4, 4)
    return record.header_offset + _LOCAL_BYTES + sum(struct.unpack("<HH", lengths))


def _central_crcs(file: IO[bytes], directory: int, names: list[str]) -> dict[str, int]:
    """The place of each record's CRC-32 in the central directory."""
    places, position = {}, directory
    for name in names:
        places[name] = position + _CENTRAL_CRC
        lengths = struct.unpack("<HHH", _at(file, position + 28, 6))
        position += _CENTRAL_BYTES + sum(lengths)
    return places
