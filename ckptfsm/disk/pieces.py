"""Whole files, read ahead in large pieces by threads, handed out in order, digested in the same pass.

A disk needs several reads in flight to be busy, but a digest needs the bytes in order. Files are read
past the page cache where the file system can. No size on disk is trusted: a file is read for as long
as its entry says, and a byte more.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple

import xxhash

from ckptfsm.adapters.memory import large_pages
from ckptfsm.adapters.posix_storage import DIGEST_PREFIX
from ckptfsm.core.ports import DIRECT_ALIGNMENT, Storage

PIECE_BYTES = 1 << 21
STREAMS = 4  # reads in flight
BUFFERS = 8


class ToRead(NamedTuple):
    """A file to read. ``size`` and ``digest`` are those that it must have."""

    path: str
    size: int
    digest: str
    direct: bool = True


class Piece(NamedTuple):
    """Consecutive bytes of the file with this index. ``view`` is valid until the next piece is taken."""

    file: int
    offset: int
    view: memoryview
    last: bool


class _Place(NamedTuple):
    """The place of a piece, and the number of bytes to ask for."""

    file: int
    offset: int
    length: int
    last: bool


def first_bad_file(
    storage: Storage,
    files: Sequence[ToRead],
    take: Callable[[Piece], None],
    stopped: Callable[[], bool],
) -> int | None:
    """Read the files and hand each piece to ``take``; the first file with another content, or None.

    Pieces are handed out before their file's digest is known. Ends early at a bad file, and when
    ``stopped()`` is true. Raises ``OSError``.
    """
    digest = xxhash.xxh3_128()
    with closing(Pieces(storage, files)) as pieces:
        for piece in pieces.in_order():
            if stopped():
                return None
            wanted = files[piece.file]
            end = wanted.size if piece.last else piece.offset + PIECE_BYTES
            if piece.offset + len(piece.view) != end:
                return piece.file  # cut, or grown
            digest.update(piece.view)
            take(piece)
            if piece.last:
                if DIGEST_PREFIX + digest.hexdigest() != wanted.digest:
                    return piece.file
                digest.reset()
    return None


class Pieces:
    """The pieces of files, read ahead by threads. Close it, or the threads stay."""

    def __init__(self, storage: Storage, files: Sequence[ToRead]) -> None:
        self._storage, self._files = storage, files
        self._count = sum(map(_piece_count, files))
        self._places = enumerate(_places(files))
        self._handles: dict[int, int] = {}
        self._turn = threading.Lock()  # of the two before
        self._free: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._done: dict[int, tuple[Piece, memoryview] | BaseException] = {}
        self._arrived = threading.Condition()
        each = PIECE_BYTES + DIRECT_ALIGNMENT
        memory = memoryview(large_pages(BUFFERS * each))
        for start in range(0, len(memory), each):
            self._free.put(memory[start : start + each])
        self._threads = [
            threading.Thread(target=self._work, daemon=True, name="ckptfsm-read")
            for _ in range(STREAMS)
        ]
        for thread in self._threads:
            thread.start()

    def in_order(self) -> Iterator[Piece]:
        """Every piece, file by file. Raises the error of a read at the place of its piece."""
        for number in range(self._count):
            with self._arrived:
                self._arrived.wait_for(partial(self._done.__contains__, number))
                found = self._done.pop(number)
            if isinstance(found, BaseException):
                raise found
            piece, buffer = found
            yield piece
            if piece.last:
                self._storage.close(self._handles.pop(piece.file))
            self._free.put(buffer)

    def close(self) -> None:
        """End the threads, each after the read that it is in, and close all files."""
        with self._turn:
            self._places = enumerate(())
        for _ in self._threads:
            self._free.put(None)
        for thread in self._threads:
            thread.join()
        while self._handles:
            self._storage.close(self._handles.popitem()[1])

    def _work(self) -> None:
        while (buffer := self._free.get()) is not None:
            with self._turn:
                number, place = next(self._places, (0, None))
            if place is None:
                return
            found: tuple[Piece, memoryview] | BaseException
            try:
                found = self._fill(place, buffer), buffer
            except BaseException as error:  # raised where the pieces are taken
                found = error
            with self._arrived:
                self._done[number] = found
                self._arrived.notify()

    def _fill(self, place: _Place, buffer: memoryview) -> Piece:
        handle = self._handle_of(place.file)
        expected = min(place.length, self._files[place.file].size - place.offset)
        filled = taken = 0
        while filled < place.length:
            view = buffer[filled : place.length]
            taken = self._storage.pread(handle, view, place.offset + filled)
            filled += taken
            if not taken or (place.last and filled >= expected):
                break
        return Piece(place.file, place.offset, buffer[:filled], place.last)

    def _handle_of(self, file: int) -> int:
        with self._turn:
            if file not in self._handles:
                path, _, _, direct = self._files[file]
                self._handles[file] = self._storage.open_reading(path, direct=direct)
            return self._handles[file]


def _piece_count(file: ToRead) -> int:
    return max(1, -(-file.size // PIECE_BYTES))


def _places(files: Sequence[ToRead]) -> Iterator[_Place]:
    """The places of all pieces. The last one of a file asks for more than the file should have."""
    for number, file in enumerate(files):
        count = _piece_count(file)
        for turn in range(count):
            offset = turn * PIECE_BYTES
            if turn < count - 1:
                yield _Place(number, offset, PIECE_BYTES, False)
            else:
                blocks = (file.size - offset) // DIRECT_ALIGNMENT + 1
                yield _Place(number, offset, blocks * DIRECT_ALIGNMENT, True)
