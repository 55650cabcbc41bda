"""The memory of a job's images: each byte once, and copies of it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
from collections.abc import Callable
from functools import partial

import pytest

from ckptfsm.adapters.segments import Span
from ckptfsm.writers import trainers_memory
from ckptfsm.writers.image import ImagePart, Literal, Memory, image_of
from ckptfsm.writers.trainers_memory import (
    Arena,
    Range,
    SharedWork,
    arena_bytes,
    frozen,
    ranges_of,
)


def part(*ranges: tuple[int, int]) -> ImagePart:
    pieces = [Literal(b"head"), *(Memory(*each) for each in ranges)]
    return ImagePart("state", "", (image_of("__0_0.distcp", pieces),))


def test_memory_that_several_tensors_share_counts_once():
    """Catches: tied weights that are copied twice; a tensor that lies in no range as a whole."""
    found = ranges_of([part((5000, 100), (1000, 50)), part((1000, 80), (1040, 70), (1110, 10))])
    assert found == [Range(1000, 110), Range(1110, 10), Range(5000, 100)]
    assert ranges_of([]) == []


def test_frozen_memory_is_read_as_it_was():
    """Catches: a later change in a checkpoint; bytes of another place."""
    memory = ctypes.create_string_buffer(b"0123456789", 10)
    address, found = ctypes.addressof(memory), bytearray(3)
    reader = frozen([Range(address + 2, 5)])
    ctypes.memset(memory, ord("x"), 10)
    reader.read(address + 3, memoryview(found))
    assert found == b"345"
    reader.read(address + 7, memoryview(found))
    assert found == b"xxx"


def test_an_arena_has_the_bytes_of_its_ranges():
    """Catches: a copy at another place than its span says; a piece that is left out."""
    sizes = (1, 100, 9 << 20, 70)
    memory = [
        ctypes.create_string_buffer(bytes([65 + i]) * size, size) for i, size in enumerate(sizes)
    ]
    ranges = [Range(ctypes.addressof(each), len(each)) for each in memory]
    arena = Arena(arena_bytes(ranges))
    spans = arena.take(ranges)
    assert [(s.address, s.size, s.number) for s in spans] == [(*each, 0) for each in ranges]
    for each, span in zip(memory, spans, strict=True):
        assert arena.segment.view(span.offset, span.size) == each.raw
    with pytest.raises(ValueError, match="do not fit"):
        arena.take([*ranges, ranges[0]])


class Threads:
    """A kernel that begins threads when the test says so, on the thread of the test."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], object]] = []

    def start(self, function: Callable[..., object], arguments: tuple[object, ...]) -> int:
        self.calls.append(partial(function, *arguments))
        return len(self.calls)


@pytest.fixture
def threads(monkeypatch) -> Threads:
    made = Threads()
    monkeypatch.setattr(trainers_memory, "start_new_thread", made.start)
    return made


PIECES = [Span(number, 1, 0, number) for number in range(3)]


def test_a_thread_that_begins_late_does_nothing(threads):
    """Catches: a copy into memory that was given back after an error."""
    seen: list[Span] = []

    def work(piece: Span) -> None:
        seen.append(piece)
        raise OSError(errno.ENOMEM, "no pages")

    with pytest.raises(OSError, match="no pages"):
        SharedWork(work, PIECES).run(2)
    for call in threads.calls:
        call()
    assert (seen, len(threads.calls)) == (PIECES[:1], 2)


def test_each_piece_is_done_once_whichever_thread_does_it(threads):
    """Catches: a piece of the state that no thread, or more than one, has copied."""
    seen: list[Span] = []

    def work(piece: Span) -> None:
        seen.append(piece)
        if len(seen) == 1:
            threads.calls.pop()()

    SharedWork(work, PIECES).run(1)
    assert seen == PIECES


@pytest.mark.parametrize("helps", [False, True])
def test_an_error_of_a_copy_is_raised_by_the_thread_that_waits(threads, helps):
    """Catches: a checkpoint with memory that was not copied."""

    def work(piece: Span) -> None:
        if piece is PIECES[0] and helps:
            threads.calls.pop()()
        elif piece is PIECES[1]:
            raise OSError(errno.ENOMEM, "no pages")

    with pytest.raises(OSError, match="no pages"):
        SharedWork(work, PIECES).run(1)


def test_a_thread_that_is_lost_with_its_piece_is_an_error(threads):
    """Catches: a piece of an older state in a checkpoint, of a thread that had no memory to say so."""

    class Full(list):
        def append(self, error: object) -> None:
            raise MemoryError

    def work(piece: Span) -> None:
        if piece is PIECES[0]:
            with contextlib.suppress(MemoryError):  # as the thread ends
                threads.calls.pop()()
        elif piece is PIECES[1]:
            raise MemoryError

    shared = SharedWork(work, PIECES)
    shared._errors = Full()
    with pytest.raises(OSError, match="ended early"):
        shared.run(1)


def test_a_copy_lets_other_threads_run():
    """Catches: two copying threads that take turns, and a trainer whose threads wait for them."""
    assert not ctypes.memmove._flags_ & ctypes._FUNCFLAG_PYTHONAPI
