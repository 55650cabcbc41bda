"""Threads that read the trainer's memory ahead of the pass that writes it.

The chunks of all images of a job are filled in the order in which they are written, as far as there
are free buffers. With buffers for all of them, the trainer may change its memory before the disk has a
byte. All chunks of a turn are filled before the first of the next one: a later turn never holds the
buffers that an earlier one waits for.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import xxhash

from ckptfsm.adapters.memory import MemoryReader, large_pages, take_now
from ckptfsm.core.images import CHUNK_BYTES, Chunk, Image, Memory, Slice
from ckptfsm.writers.image import fill

_BLOCK_BYTES = 64 << 20  # that are mapped at once


class Buffers:
    """Chunk-sized buffers, aligned for direct writes. If none is free, one is made, up to a limit.

    All are kept for the next job: fresh memory is slow.
    """

    def __init__(self) -> None:
        self._made: list[memoryview] = []
        self._mapped: list[memoryview] = []  # that nobody has used: no page of it is there
        self._more = 0  # that may be made
        self._lock = threading.Lock()  # of all three
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()

    @property
    def size(self) -> int:
        """The bytes that are kept."""
        return len(self._made) * CHUNK_BYTES

    def allow(self, size: int) -> None:
        """Let the next job, which runs alone, have ``size`` bytes; give back what is more."""
        most = max(1, -(-size // CHUNK_BYTES))
        self._made = self._made[:most]
        self._more = most - len(self._made)
        self._free = queue.SimpleQueue()
        for view in self._made:
            self._free.put(view)

    def take(self) -> Chunk:
        """A free buffer; waits for one. Raises ``OSError`` if there is no memory for any."""
        free = self._free
        view = (self._fresh() if free.empty() else None) or free.get()
        return Chunk(view, partial(free.put, view))

    def _fresh(self) -> memoryview | None:
        """A buffer in fresh memory. None if there may be no more, or the kernel has no memory."""
        with self._lock:
            if not self._more:
                return None
            try:
                if not self._mapped:
                    self._mapped = list(_chunks(large_pages(_BLOCK_BYTES)))
                view = self._mapped[-1]
                # A page that a copy touches first slows it threefold; Linux before 5.14 cannot help.
                take_now(ctypes.addressof(ctypes.c_char.from_buffer(view)), len(view))
            except OSError:
                if not self._made:
                    raise
                self._more = 0  # the reads wait for the disk
                return None
            self._more -= 1
            self._made.append(self._mapped.pop())
            return view


def _chunks(mapping: mmap.mmap) -> Iterator[memoryview]:
    view = memoryview(mapping)
    return (view[at : at + CHUNK_BYTES] for at in range(0, len(view), CHUNK_BYTES))


class Prefetch:
    """A ``ChunkSource`` that runs ahead. ``turns`` are the images of each turn, in writing order.

    ``on_taken`` is called once, when the last byte of the trainer's memory has been read. ``join`` waits
    for that, and raises the error of a read. With ``twice``, all memory is read a second time before
    ``on_taken``, and compared: an error for a job whose trainer changed it between the two readings.
    """

    concurrent = True

    def __init__(
        self,
        turns: Sequence[Sequence[Image]],
        memory: MemoryReader,
        buffers: Buffers,
        on_taken: Callable[[], None],
        *,
        threads: int,
        twice: bool = False,
    ) -> None:
        self._turns = turns
        self._memory = memory
        self._buffers = buffers
        self._on_taken = on_taken
        self._threads = threads
        self._filled: dict[str, queue.SimpleQueue[Chunk | BaseException]] = {
            image.name: queue.SimpleQueue() for images in turns for image in images
        }
        self._error: BaseException | None = None
        self._twice = twice
        self._first: list[tuple[int, int, int]] = []  # address, length, digest: of each read
        self._cancelled: set[str] = set()
        self._lock = threading.Lock()  # of a look at the cancelled names and what follows
        self._thread = threading.Thread(target=self._run, daemon=True, name="ckptfsm-prefetch")

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error

    def take(self, image: Image, slices: Sequence[Slice]) -> Chunk:
        found = self._filled[image.name].get()
        if isinstance(found, BaseException):
            raise found
        return found

    def cancel(self, images: Sequence[Image], error: BaseException) -> None:
        with self._lock:
            self._cancelled |= {image.name for image in images}
            for image in images:
                filled = self._filled[image.name]
                with contextlib.suppress(queue.Empty):  # another thread may take the last one
                    while True:
                        chunk = filled.get_nowait()
                        if not isinstance(chunk, BaseException):
                            chunk.give_back()
                filled.put(error)

    def _run(self) -> None:
        try:
            for images in self._turns:
                self._fill_turn(images)
            if self._error is None and self._twice:
                self._read_again()
            if self._error is None:
                self._on_taken()
        except BaseException as error:  # no memory for a thread: who takes chunks must not wait
            self._fail(error)

    def _fill_turn(self, images: Sequence[Image]) -> None:
        lanes = [images[lane :: self._threads] for lane in range(self._threads)]
        others = [threading.Thread(target=self._fill, args=(lane,)) for lane in lanes[1:]]
        for thread in others:
            thread.start()
        self._fill(lanes[0])
        for thread in others:
            thread.join()

    def _fill(self, images: Sequence[Image]) -> None:
        """Fill the chunks of some images, one of each in rotation: they are written side by side."""
        left = [(image, image.chunks()) for image in images]
        try:
            while left and self._error is None:
                left = [each for each in left if self._fill_next(*each)]
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Raise the error where the chunks are taken, in every file."""
        self._error = error
        for filled in self._filled.values():
            filled.put(error)

    def _read_again(self) -> None:
        """Compare all memory with the first reading."""
        again = memoryview(bytearray(CHUNK_BYTES))  # no buffer: those may all wait for this
        try:
            for address, length, digest in self._first:
                self._memory.read(address, again[:length])
                if xxhash.xxh3_64_intdigest(again[:length]) != digest:
                    raise ValueError("the state was changed before the writer had read it")
        except BaseException as error:
            self._fail(error)

    def _fill_next(self, image: Image, chunks: Iterator[tuple[int, int, list[Slice]]]) -> bool:
        found = next(chunks, None)
        if found is None:
            return False
        chunk = self._buffers.take()
        fill(chunk.view, found[2], self._memory)
        if self._twice:
            for piece, at, start, length in found[2]:
                if isinstance(piece, Memory):
                    digest = xxhash.xxh3_64_intdigest(chunk.view[at : at + length])
                    self._first.append((piece.address + start, length, digest))
        with self._lock:
            if image.name in self._cancelled:
                chunk.give_back()
            else:
                self._filled[image.name].put(chunk)
        return True
