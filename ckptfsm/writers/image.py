"""The pass that writes an image (``core/images.py``).

The data of tensors is memory of the trainer that a ``MemoryReader`` reads, or a copy. The pass reads
an image in file order, in chunks of ``CHUNK_BYTES``. For each chunk, it fills a buffer, sums it (CRC-32
of each blob, digest of the file), and writes it past the page cache. A ``ChunkSource`` fills the
buffers: when it is asked to, or by threads that run ahead.

Rules: a file has its full size from the first moment, so its size proves nothing. The digest in the
receipt is that of the bytes which were given to the disk. A file is durable when ``write`` returns.
"""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Protocol

import xxhash

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
from ckptfsm.core.parts import Sent
from ckptfsm.core.ports import DIRECT_ALIGNMENT, PartJob, Storage, Written
from ckptfsm.disk.durable import make_dirs, write_all

try:
    from isal.isal_zlib import crc32
except ImportError:  # wheels exist for x86_64 and aarch64; zlib is slower, and right
    from zlib import crc32

_HOT_BYTES = 1 << 20  # summed twice (CRC and digest) while the piece is in the processor's cache
_STREAMS = 2  # writes of one file in flight


class MemoryReader(Protocol):
    """Reads the trainer's memory. Raises ``OSError`` if an address is not readable."""

    def read(self, address: int, into: memoryview) -> None: ...


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

    def give_up(self, images: Sequence[Image], error: BaseException) -> None:
        """Nothing is filled that is not asked for."""


def _nothing() -> None:
    """Nothing is given back: the next chunk uses the same buffer."""


class Sums:
    """The checksums of an image, in file order: CRC-32 per blob, and the digest of the file."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()
        self._crc = 0
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
                    self._tail = piece.patch.applied(piece.data, self._crc)
                part[:] = self._tail[start : start + length]
            self._digest.update(part)

    def _add_data(self, part: memoryview, *, first: bool) -> None:
        crc = 0 if first else self._crc
        for start in range(0, len(part), _HOT_BYTES):
            hot = part[start : start + _HOT_BYTES]
            crc = crc32(hot, crc)
            self._digest.update(hot)
        self._crc = crc

    def digest(self) -> str:
        return DIGEST_PREFIX + self._digest.hexdigest()


class ImageFile(AbstractContextManager["ImageFile"]):
    """The file of an image on its way to the disk, past the page cache where that is possible."""

    def __init__(self, storage: Storage, path: str, size: int) -> None:
        self._storage, self._size = storage, size
        self._handle = storage.open_exclusive(path, direct=True)
        self._open = True

    def __enter__(self) -> ImageFile:
        try:
            self._storage.allocate(self._handle, self._size)
        except BaseException:
            self._storage.close(self._handle)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._open:
            self._open = False
            self._storage.close(self._handle)

    def put(self, view: memoryview, length: int, offset: int) -> None:
        """Write a chunk; the last one is padded to a whole block."""
        padded = -(-length // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
        if padded > length:
            view[length:padded] = bytes(padded - length)
        write_all(self._storage, self._handle, view[:padded], offset)

    def close_durably(self) -> None:
        """Cut the padding off, fsync, close."""
        self._storage.truncate(self._handle, self._size)
        self._storage.fsync(self._handle)
        self.__exit__(None, None, None)


class _PutAtOnce(AbstractContextManager["_PutAtOnce"]):
    """Writes each chunk before the next one is filled."""

    def __init__(self, file: ImageFile) -> None:
        self._file = file

    def __exit__(self, *_: object) -> None:
        """Nothing is in flight."""

    def put(self, chunk: Chunk, length: int, offset: int) -> None:
        self._file.put(chunk.view, length, offset)
        chunk.give_back()


class _Puts(AbstractContextManager["_Puts"]):
    """Writes chunks on a few threads, so that the disk works while the next chunk is summed.

    The first error is raised by the next ``put``, or at the end. Later chunks are given back
    unwritten then, so that no thread waits for their buffers.
    """

    def __init__(self, file: ImageFile) -> None:
        self._file = file
        self._todo: queue.Queue[tuple[Chunk, int, int] | None] = queue.Queue(_STREAMS)
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, daemon=True, name="ckptfsm-put")
            for _ in range(_STREAMS)
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
        if self._error is not None:
            chunk.give_back()
            raise self._error
        self._todo.put((chunk, length, offset))

    def _work(self) -> None:
        while (item := self._todo.get()) is not None:
            chunk, length, offset = item
            try:
                if self._error is None:
                    self._file.put(chunk.view, length, offset)
            except BaseException as error:  # raised on the thread that fills
                self._error = self._error or error
            chunk.give_back()


def write_image(storage: Storage, location: str, image: Image, source: ChunkSource) -> FileEntry:
    """Write one image below ``location``; durable when this returns."""
    sums = Sums()
    with ImageFile(storage, join(location, image.name), image.size) as file:
        with _Puts(file) if source.concurrent else _PutAtOnce(file) as puts:
            for offset, length, slices in image.chunks():
                chunk = source.take(image, slices)
                sums.add(chunk.view, slices)
                puts.put(chunk, length, offset)
        file.close_durably()
    return FileEntry(name=image.name, bytes=image.size, digest=sums.digest())


@dataclass(frozen=True, slots=True)
class ImagePart(Sent, PartJob):
    """The share of a rank in a part, as images.

    ``made`` are directories below the step's that the images need besides the part's. ``source`` is
    set by the process that writes: the trainer's addresses mean nothing elsewhere. ``owner`` keeps the
    memory of the images alive, in the trainer. ``copying``: copies into some of that memory, which may
    be on their way.
    """

    name: str
    directory: str
    images: tuple[Image, ...]
    rows: tuple[tuple[object, ...], ...] = ()
    made: tuple[str, ...] = ()
    source: ChunkSource | None = None
    owner: object = None
    copying: Copying | None = None

    @property
    def portable(self) -> bool:
        return True

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(image.name for image in self.images)

    @property
    def turns(self) -> tuple[tuple[Image, ...], ...]:
        return (self.images,)

    def bound(self, source: ChunkSource | None) -> ImagePart:
        return replace(self, source=source, owner=None, copying=None)

    def give_up(self, error: BaseException) -> None:
        if self.source is not None:
            self.source.give_up(self.images, error)

    def write(self, storage: Storage, location: str) -> Written:
        """Write the images, side by side if the source is concurrent."""
        source = self.source
        if source is None:
            raise AssertionError(f"part {self.name!r} was not bound to a source of its bytes")
        for directory in self.made:
            make_dirs(storage, directory, base=location)
        files = self._write(storage, location, source)
        for directory in self.made:
            storage.fsync_dir(join(location, directory))
        return Written(files, self.rows)

    def _write(self, storage: Storage, location: str, source: ChunkSource) -> tuple[FileEntry, ...]:
        write = partial(self._write_one, storage, location, source)
        if not source.concurrent or len(self.images) < 2:
            return tuple(map(write, self.images))
        with ThreadPoolExecutor(len(self.images), "ckptfsm-file") as threads:
            try:
                return tuple(threads.map(write, self.images))
            except BaseException as error:  # no thread for a file: the others need its buffers
                source.give_up(self.images, error)
                raise

    def _write_one(
        self, storage: Storage, location: str, source: ChunkSource, image: Image
    ) -> FileEntry:
        try:
            return write_image(storage, location, image, source)
        except BaseException as error:  # the other files of the part, and later parts, need buffers
            source.give_up(self.images, error)
            raise
