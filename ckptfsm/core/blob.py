"""The end of a ``torch.save`` blob of one tensor: its checksums depend on the tensor's data.

A blob is a zip archive: ``head | data | tail``. The CRC-32 of the data stands behind the data (data
descriptor) and in the central directory. The last record, the serialization id, has 40 digits: a hash
of the records' names, then a hash of their CRC-32s. So the id and its CRC-32 depend on the data too.

Source: ``PyTorchStreamWriter`` of torch 2.x (caffe2/serialize/inline_container.cc).
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from ckptfsm.core.parts import Sent

_CRC = struct.Struct("<I")
_MASK = (1 << 64) - 1
_HASH_DIGITS = 20


@dataclass(frozen=True, slots=True)
class Patch(Sent):
    """The fields of a tail that depend on the data. Positions count from the tail's first byte.

    - ``data_crcs``, ``id_crcs``: the places of the CRC-32 of the data, and of the id record.
    - ``id_at``: the place of the id's 40 digits; ``id_names`` are the first 20 of them.
    - ``crcs``: the CRC-32 of every record before the id, in file order; None for the data.
    """

    data_crcs: tuple[int, ...]
    id_at: int
    id_names: bytes
    id_crcs: tuple[int, ...]
    crcs: tuple[int | None, ...]

    def applied(self, tail: bytes, crc: int) -> bytes:
        """``tail`` for data with this CRC-32."""
        made = bytearray(tail)
        for position in self.data_crcs:
            _CRC.pack_into(made, position, crc)
        digits = self.id_names + b"%020d" % combined(self.crcs, crc)
        made[self.id_at : self.id_at + len(digits)] = digits
        id_crc = zlib.crc32(digits)
        for position in self.id_crcs:
            _CRC.pack_into(made, position, id_crc)
        return bytes(made)


def combined(crcs: tuple[int | None, ...], crc: int) -> int:
    """The hash of the records' CRC-32s, as torch combines them; None stands for ``crc``."""
    value = 0
    for each in crcs:
        added = (crc if each is None else each) + 0x9E3779B9 + (value << 6) + (value >> 2)
        value = (value ^ added) & _MASK
    return value
