"""The pass that writes an image (``core/images.py``) in file order, chunk by chunk.

A ``ChunkSource`` fills a buffer. The pass sums it (CRC-32 of each blob, digest of the file), and writes
it past the page cache.
"""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import xxhash

from ckptfsm.adapters.memory import MemoryReader
from ckptfsm.adapters.posix_storage import DIGEST_PREFIX
from ckptfsm.core.documents import FileEntry
from ckptfsm.core.images import (
    CHUNK_BYTES,
    BlobTail,
    Chunk,
    ChunkSource,
    Copied,
    Copying,
    Image,
    Memory,
    Slice,
)
from ckptfsm.core.layout import join
from ckptfsm.core.ports import DIRECT_ALIGNMENT, PartJob, Storage, Written
from ckptfsm.disk.durable import make_dirs, write_all

try:
    from isal.isal_zlib import crc32
except ImportError:  # wheels exist for x86_64 and aarch64; zlib is slower, and right
    from zlib import crc32

_HOT_BYTES = 1 << 20  # summed twice (CRC and digest) while the piece is in the processor's cache
_STREAMS = 2  # writes of one file in flight


def fill(view: memoryview, slices: Sequence[Slice], memory: MemoryReader) -> None:
    """Put the bytes of a chunk into ``view``, tails without their checksums."""
    for piece, at, start, length in slices:
        if isinstance(piece, Memory):
            memory.read(piece.address + start, view[at : at + length])
        else:
            view[at : at + length] = piece.data[start : start + length]


class InlineChunks:
    """Fills each chunk when it is asked for, into a single buffer."""

    concurrent = False

    def __init__(self, memory: MemoryReader) -> None:
        self._memory = memory
        self._view = memoryview(mmap.mmap(-1, CHUNK_BYTES))

    def take(self, image: Image, slices: Sequence[Slice]) -> Chunk:
        fill(self._view, slices, self._memory)
        return Chunk(self._view, _nothing)

    def cancel(self, images: Sequence[Image], error: BaseException) -> None:
        """Nothing is filled that is not asked for."""


def _nothing() -> None:
    """Nothing is given back: the next chunk uses the same buffer."""


class Sums:
    """The checksums of an image, in file order: the CRC-32 of each data, and the digest of the file."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self._crcs: list[int] = []
        self._tail = b""

    def add(self, view: memoryview, slices: Sequence[Slice]) -> None:
        """Sum a filled chunk, and put the checksums into the tails in it."""
        for piece, at, start, length in slices:
            part = view[at : at + length]
            if isinstance(piece, (Memory, Copied)):
                self._add_data(part, first=start == 0)
                continue
            if isinstance(piece, BlobTail):
                if start == 0:
                    self._tail = piece.patch.applied(piece.data, self._crcs)
                part[:] = self._tail[start : start + length]
            self._digest.update(part)

    def _add_data(self, part: memoryview, *, first: bool) -> None:
        if first:
            self._crcs.append(0)
        crc = self._crcs[-1]
        for start in range(0, len(part), _HOT_BYTES):
            hot = part[start : start + _HOT_BYTES]
            crc = crc32(hot, crc)
            self._digest.update(hot)
        self._crcs[-1] = crc

    def digest(self) -> str:
        return DIGEST_PREFIX + self._digest.hexdigest()


class _Puts(AbstractContextManager["_Puts"]):
    """Writes chunks on a few threads, so that the disk works while the next chunk is summed.

    The first error is raised by the next ``put``, or at the end. Later chunks are given back
    unwritten then, so that no thread waits for their buffers. Without threads, ``put`` writes.
    """

    def __init__(self, storage: Storage, handle: int, *, streams: int) -> None:
        self._storage, self._handle = storage, handle
        self._todo: queue.Queue[tuple[Chunk, int, int] | None] = queue.Queue(streams)
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, daemon=True, name="ckptfsm-put")
            for _ in range(streams)
        ]
        for thread in self._threads:
            thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for _ in self._threads:
            self._todo.put(None)
        for thread in self._threads:
            thread.join()
        if kind is None and self._error is not None:
            raise self._error

    def put(self, chunk: Chunk, length: int, offset: int) -> None:
        if self._threads and self._error is None:
            self._todo.put((chunk, length, offset))
            return
        self._write(chunk, length, offset)
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (item := self._todo.get()) is not None:
            self._write(*item)

    def _write(self, chunk: Chunk, length: int, offset: int) -> None:
        """Write a chunk, unless an earlier one failed; the last is padded to a whole block."""
        padded = -(-length // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
        try:
            if self._error is None:
                chunk.view[length:padded] = bytes(padded - length)
                write_all(self._storage, self._handle, chunk.view[:padded], offset)
        except BaseException as error:  # raised on the thread that fills
            self._error = self._error or error
        chunk.give_back()


def write_image(storage: Storage, location: str, image: Image, source: ChunkSource) -> FileEntry:
    """Write one image below ``location``; durable when this returns."""
    sums = Sums()
    handle = storage.open_exclusive(join(location, image.name), direct=True)
    try:
        storage.allocate(handle, image.size)  # from here on its size proves nothing
        with _Puts(storage, handle, streams=_STREAMS if source.concurrent else 0) as puts:
            for offset, length, slices in image.chunks():
                chunk = source.take(image, slices)
                sums.add(chunk.view, slices)
                puts.put(chunk, length, offset)
        storage.truncate(handle, image.size)  # the padding
        storage.fsync(handle)
    finally:
        storage.close(handle)
    return FileEntry(name=image.name, bytes=image.size, digest=sums.digest())


@dataclass(slots=True)
class ImagePart(PartJob):
    """The share of a rank in a part, as images.

    ``made`` are directories below the step's that the images need besides the part's. ``owner`` keeps
    the memory of the images alive, and stays in the trainer as ``copying`` does.
    """

    name: str
    directory: str
    images: tuple[Image, ...]
    rows: tuple[tuple[object, ...], ...] = ()
    made: tuple[str, ...] = ()
    owner: object = None
    copying: Copying | None = None
    _source: ChunkSource | None = None
    portable = True

    def __reduce__(self) -> tuple[Any, ...]:
        return ImagePart, (self.name, self.directory, self.images, self.rows, self.made)

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(image.name for image in self.images)

    def read_from(self, source: ChunkSource) -> None:
        self._source = source

    def write(self, storage: Storage, location: str) -> Written:
        """Write the images, side by side if the source is concurrent."""
        source = self._source
        if source is None:
            raise AssertionError(f"part {self.name!r} has no source of its bytes")
        for directory in self.made:
            make_dirs(storage, directory, base=location)
        write = partial(self._write_one, storage, location, source)
        if not source.concurrent or len(self.images) < 2:
            files = tuple(map(write, self.images))
        else:
            with ThreadPoolExecutor(len(self.images), "ckptfsm-file") as threads:
                try:
                    files = tuple(threads.map(write, self.images))
                except BaseException as error:  # no thread for a file: the others need its buffers
                    source.cancel(self.images, error)
                    raise
        return Written(files, self.rows)

    def _write_one(
        self, storage: Storage, location: str, source: ChunkSource, image: Image
    ) -> FileEntry:
        try:
            return write_image(storage, location, image, source)
        except BaseException as error:  # the other files of the part, and later parts, need buffers
            source.cancel(self.images, error)
            raise
