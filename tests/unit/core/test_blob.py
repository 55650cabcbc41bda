"""The end of a blob: each field that depends on the data, at its place."""

from __future__ import annotations

import struct
import zlib

from ckptfsm.core.images import Patch, SerializationId, combined

ID = SerializationId(20, b"1" * 20, (14, 64), (7, None, 9, None))
PATCH = Patch(((2, 1), (8, 2)), ID)
TAIL = bytes(range(70))
OTHERS, FIRST, LAST = 0x11111111, 0x01020304, 0x05060708


def test_every_field_that_depends_on_the_data_is_filled_in():
    """Catches: a checksum of an earlier save, or of another record; a field in the place of another."""
    made = PATCH.applied(TAIL, [OTHERS, FIRST, LAST])
    digits = b"1" * 20 + b"%020d" % combined((7, FIRST, 9, LAST), [])
    of_id = struct.pack("<I", zlib.crc32(digits))
    assert (made[2:6], made[8:12]) == (struct.pack("<I", LAST), struct.pack("<I", FIRST))
    assert (made[14:18], made[64:68]) == (of_id, of_id)
    assert made[20:60] == digits
    untouched = [*range(2), *range(6, 8), *range(12, 14), *range(18, 20), *range(60, 64), 68, 69]
    assert [made[i] for i in untouched] == untouched
    assert len(made) == len(TAIL)


def test_a_piece_without_the_id_has_only_checksums():
    """Catches: the digits of an id between two records."""
    made = Patch(((4, 1),)).applied(TAIL, [FIRST, LAST])
    assert made == TAIL[:4] + struct.pack("<I", LAST) + TAIL[8:]


def test_the_hash_depends_on_every_checksum_and_their_order():
    """Catches: a hash that leaves out a record, or takes the data in another order."""
    assert combined((1, None), [2]) == combined((1, 2), []) != combined((2, 1), [])
    assert combined((None, 1, None), [9, 2, 3]) == combined((2, 1, 3), [])
    assert combined((), [5]) == 0
    assert combined((None,), [0]) == 0x9E3779B9
    assert all(0 <= combined((2**32 - 1,) * n, []) < 2**64 for n in range(5))
