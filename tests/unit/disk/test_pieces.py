"""Files read whole by several threads: every byte once and in order, verified, and nothing left over."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import xxhash

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.ports import DIRECT_ALIGNMENT, Storage
from ckptfsm.disk.durable import write_new
from ckptfsm.disk.pieces import BUFFERS, PIECE_BYTES, STREAMS, Piece, ToRead, first_bad_file
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.testing.simfs import SimDisk, SimStorage

SIZES = (
    0,
    1,
    DIRECT_ALIGNMENT,
    PIECE_BYTES - 1,
    PIECE_BYTES,
    PIECE_BYTES + 1,
    (BUFFERS + 2) * PIECE_BYTES + 5,
)


@pytest.fixture(params=["posix", "sim"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "sim":
        yield SimStorage(SimDisk())
        return
    real = PosixStorage(tmp_path / "root")
    yield real
    real.close_root()


def made(storage: Storage, sizes: Sequence[int] = SIZES) -> tuple[list[ToRead], list[bytes]]:
    """Files of these sizes, every other one to be read past the page cache."""
    files, contents = [], []
    for number, size in enumerate(sizes):
        data = random.Random(number).randbytes(size)
        path = f"f{number}"
        write_new(storage, path, data)
        digest = f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"
        files.append(ToRead(path, size, digest, direct=number % 2 == 0))
        contents.append(data)
    return files, contents


class Gathered:
    """Takes pieces; the bytes by file, and the places in order."""

    def __init__(self, count: int) -> None:
        self.contents = [bytearray() for _ in range(count)]
        self.places: list[tuple[int, int]] = []

    def __call__(self, piece: Piece) -> None:
        assert piece.offset == len(self.contents[piece.file])
        self.contents[piece.file] += piece.view
        self.places.append((piece.file, piece.offset))


def never() -> bool:
    return False


def test_every_byte_is_handed_out_once_and_in_order(storage: Storage) -> None:
    """Catches: a buffer that is filled again while it is read, a lost end, pieces out of order."""
    files, contents = made(storage)
    gathered = Gathered(len(files))
    assert first_bad_file(storage, files, gathered, never) is None
    assert [bytes(found) for found in gathered.contents] == contents
    assert gathered.places == sorted(gathered.places)


@pytest.mark.parametrize("place", [0, PIECE_BYTES, -1])
@pytest.mark.parametrize("bad", range(1, len(SIZES)))
def test_F21_a_flipped_byte_is_found_and_ends_the_reading(
    storage: Storage, bad: int, place: int
) -> None:
    files, contents = made(storage, [*SIZES[bad - 1 : bad + 1], 1])
    data = bytearray(contents[1])
    data[place if place < len(data) else 0] ^= 1
    storage.unlink("f1")
    write_new(storage, "f1", bytes(data))
    gathered = Gathered(3)
    assert first_bad_file(storage, files, gathered, never) == 1
    assert gathered.places[-1][0] == 1


@pytest.mark.parametrize(
    ("size", "there"),
    [(size, kept) for size in SIZES[1:] for kept in (0.0, 0.5, 1.0)]
    + [(size, more) for size in SIZES for more in ("x", "x" * DIRECT_ALIGNMENT)],
)
def test_F21_a_file_that_was_cut_or_has_grown_is_bad(
    storage: Storage, size: int, there: float | str
) -> None:
    """Catches: a missing end that is waited for, and bytes at the wrong place behind a gap."""
    files, (data,) = made(storage, [size])
    changed = data + there.encode() if isinstance(there, str) else data[: int((size - 1) * there)]
    storage.unlink("f0")
    write_new(storage, "f0", changed)
    assert first_bad_file(storage, files, Gathered(1), never) == 0


class Watched(FaultStorage):
    """Counts open handles and reads in flight. ``fails_at`` is an offset that cannot be read."""

    def __init__(self, inner: Storage, fails_at: int = -1) -> None:
        super().__init__(inner)
        self.fails_at = fails_at
        self.asked_for: list[tuple[str, bool]] = []
        self.asked = 0
        self.opened: list[int] = []
        self.closed: list[int] = []

    def open_reading(self, path: str, *, direct: bool = False) -> int:
        self.asked_for.append((path, direct))
        self.opened.append(super().open_reading(path, direct=direct))
        return self.opened[-1]

    def close(self, handle: int) -> None:
        self.closed.append(handle)
        super().close(handle)

    def pread(self, handle: int, into: memoryview, offset: int) -> int:
        self.asked += 1
        if offset == self.fails_at:
            raise OSError(errno.EIO, "unreadable")
        return super().pread(handle, into, offset)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ckptfsm-read"]


def test_every_file_is_opened_once_as_it_asks_and_closed(storage: Storage) -> None:
    files, _ = made(storage)
    watched = Watched(storage)
    assert first_bad_file(watched, files, Gathered(len(files)), never) is None
    asked = [(f"f{number}", file.direct) for number, file in enumerate(files)]
    assert sorted(watched.asked_for) == sorted(asked), "in any order: several threads open them"
    assert sorted(watched.opened) == sorted(watched.closed)
    assert readers() == []


def test_a_read_that_fails_is_raised_at_its_place_and_ends_all_threads(storage: Storage) -> None:
    """Catches: an error that is lost, one that hangs the consumer, and handles that stay open."""
    files, contents = made(storage, [(BUFFERS * 3) * PIECE_BYTES, 10])
    watched = Watched(storage, fails_at=BUFFERS * PIECE_BYTES)
    gathered = Gathered(2)
    with pytest.raises(OSError, match="unreadable"):
        first_bad_file(watched, files, gathered, never)
    assert bytes(gathered.contents[0]) == contents[0][: BUFFERS * PIECE_BYTES]
    assert sorted(watched.opened) == sorted(watched.closed)
    assert readers() == []


def test_a_missing_file_is_raised(storage: Storage) -> None:
    files, _ = made(storage, [10, 10])
    storage.unlink("f1")
    with pytest.raises(FileNotFoundError):
        first_bad_file(storage, files, Gathered(2), never)
    assert readers() == []


def test_a_consumer_that_raises_or_stops_ends_the_reading(storage: Storage) -> None:
    files, _ = made(storage, [BUFFERS * 3 * PIECE_BYTES])
    watched = Watched(storage)

    def refuse(piece: Piece) -> None:
        raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        first_bad_file(watched, files, refuse, never)
    gathered = Gathered(1)
    assert first_bad_file(watched, files, gathered, lambda: len(gathered.places) == 2) is None
    assert gathered.places == [(0, 0), (0, PIECE_BYTES)]
    assert watched.opened == watched.closed
    assert readers() == []


def test_no_more_is_read_ahead_than_there_are_buffers(storage: Storage) -> None:
    """Catches: memory that grows with the file where the consumer is slower than the disk."""
    count = BUFFERS * 4
    files, _ = made(storage, [count * PIECE_BYTES])
    watched = Watched(storage)
    ahead = []

    def look(piece: Piece) -> None:
        ahead.append(watched.asked - piece.offset // PIECE_BYTES)

    assert first_bad_file(watched, files, look, never) is None
    assert len(ahead) == count
    assert max(ahead) <= BUFFERS
    assert STREAMS <= BUFFERS
