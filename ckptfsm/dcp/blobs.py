"""Templates of ``torch.save`` blobs: all bytes of a tensor's blob but its data.

Head and tail of a blob depend on the tensor's structure only, but for checksums of the data, see
``core.images``. Torch itself makes a template, with ``skip_data``, into a file with a hole for the data.
A template is trusted only for a dtype for which template and ``torch.save`` gave the same bytes once in
this process. If they ever differ, every blob is written by ``torch.save`` from then on.
"""

from __future__ import annotations

import io
import logging
import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import IO, Any, cast

import torch
from torch.utils.serialization import config

from ckptfsm.adapters.notices import say
from ckptfsm.core.errors import describe
from ckptfsm.core.images import Patch

log = logging.getLogger("ckptfsm")

_DATA = "data/0"
_ID = ".data/serialization_id"
_LOCAL_BYTES = 30  # fixed part of a local header; the lengths of name and extra field end it
_CENTRAL_BYTES = 46
_CENTRAL_CRC = 16
_ID_DIGITS = 40
_DESCRIPTOR = b"PK\x07\x08"
_DESCRIPTOR_CRC = 4
_PROBED = 3  # elements of a dtype's probe


@dataclass(frozen=True, slots=True)
class Template:
    """A blob is ``head``, ``data_bytes`` of data, and ``tail`` after ``patch``."""

    head: bytes
    data_bytes: int
    tail: bytes
    patch: Patch

    def filled(self, data: bytes | memoryview, crc: int) -> bytes:
        """The blob of ``data``, with this CRC-32."""
        return self.head + bytes(data) + self.patch.applied(self.tail, crc)


class Templates:
    """Templates by structure, of the tensors of one process."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Template] = {}
        self._trusted: set[torch.dtype] = set()
        self._refused = ""
        self._alignment: int | None = None  # of torch's settings; None while it writes no CRC-32s
        self.look()

    def look(self) -> None:
        """Take torch's settings, which hold for all templates until the next look."""
        self._alignment = config.save.storage_alignment if config.save.compute_crc32 else None

    def of(self, tensor: torch.Tensor) -> Template | None:
        """The template of a tensor on the CPU that fills its storage; None if there is none.

        There is none while torch is set to write no CRC-32s: the tails would have wrong ones.
        """
        if self._refused or self._alignment is None or not _is_plain(tensor):
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
                if tensor.dtype not in self._trusted:
                    self._probe(tensor.dtype)
                found = self._made[key] = make_template(tensor)
            except Exception as error:  # any surprise in the format of a new torch
                self._refused = describe(error)
                said = f"state is written by torch.save, which takes longer: {self._refused}"
                say(log.warning, "no_templates", said, reason=self._refused)
        return found

    def _probe(self, dtype: torch.dtype) -> None:
        """Compare template and ``torch.save`` for a small tensor. Raises ``ValueError``."""
        size = _PROBED * dtype.itemsize
        storage = torch.arange(1, size + 1, dtype=torch.uint8).untyped_storage()
        probe = torch.empty(0, dtype=dtype).set_(storage, 0, (_PROBED,), (1,))
        data = bytes(storage.tolist())
        file = io.BytesIO()
        torch.save(probe, file)
        if make_template(probe).filled(data, zlib.crc32(data)) != file.getvalue():
            raise ValueError(f"the template of {dtype} is not what torch.save writes")
        self._trusted.add(dtype)


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
    with zipfile.ZipFile(cast(IO[bytes], file)) as archive:
        records = {each.filename.partition("/")[2]: each for each in archive.infolist()}
        directory = archive.start_dir
    data_bytes = tensor.untyped_storage().nbytes()
    if records[_DATA].file_size != data_bytes or list(records)[-1] != _ID:
        raise ValueError(f"torch.save made records {list(records)}")
    start = _content_of(file, records[_DATA])
    end = start + data_bytes
    tail = file.at(end, file.size - end)
    id_at = _content_of(file, records[_ID]) - end
    central = _central_crcs(file, directory, list(records))
    for descriptor in (0, id_at + _ID_DIGITS):
        if tail[descriptor : descriptor + len(_DESCRIPTOR)] != _DESCRIPTOR:
            raise ValueError("torch.save made a record without a data descriptor")
    patch = Patch(
        (_DESCRIPTOR_CRC, central[_DATA] - end),
        id_at,
        tail[id_at : id_at + _ID_DIGITS // 2],
        (id_at + _ID_DIGITS + _DESCRIPTOR_CRC, central[_ID] - end),
        tuple(None if n == _DATA else each.CRC for n, each in records.items() if n != _ID),
    )
    return Template(file.at(0, start), data_bytes, tail, patch)


def _content_of(file: Holes, record: zipfile.ZipInfo) -> int:
    """The place of a record's content."""
    lengths = file.at(record.header_offset + _LOCAL_BYTES - 4, 4)
    return record.header_offset + _LOCAL_BYTES + sum(struct.unpack("<HH", lengths))


def _central_crcs(file: Holes, directory: int, names: list[str]) -> dict[str, int]:
    """The place of each record's CRC-32 in the central directory."""
    places, position = {}, directory
    for name in names:
        places[name] = position + _CENTRAL_CRC
        lengths = struct.unpack("<HHH", file.at(position + 28, 6))
        position += _CENTRAL_BYTES + sum(lengths)
    return places
