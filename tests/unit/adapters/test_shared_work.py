"""Work that is shared with threads which may never begin."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from functools import partial

import pytest

from ckptfsm.adapters import shared_work
from ckptfsm.adapters.shared_work import SharedWork


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
    monkeypatch.setattr(shared_work, "start_new_thread", made.start)
    return made


PIECES = ["a", "b", "c"]


def test_a_thread_that_begins_late_does_nothing(threads):
    """Catches: a copy into memory that was given back after an error."""
    seen: list[str] = []

    def work(piece: str) -> None:
        seen.append(piece)
        raise OSError(errno.ENOMEM, "no pages")

    with pytest.raises(OSError, match="no pages"):
        SharedWork(work, PIECES).run(2)
    for call in threads.calls:
        call()
    assert (seen, len(threads.calls)) == (PIECES[:1], 2)


def test_each_piece_is_done_once_whichever_thread_does_it(threads):
    """Catches: a piece of the state that no thread, or more than one, has copied."""
    seen: list[str] = []

    def work(piece: str) -> None:
        seen.append(piece)
        if len(seen) == 1:
            threads.calls.pop()()

    SharedWork(work, PIECES).run(1)
    assert seen == PIECES


@pytest.mark.parametrize("helps", [False, True])
def test_an_error_of_a_copy_is_raised_by_the_thread_that_waits(threads, helps):
    """Catches: a checkpoint with memory that was not copied."""

    def work(piece: str) -> None:
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

    def work(piece: str) -> None:
        if piece is PIECES[0]:
            with contextlib.suppress(MemoryError):  # as the thread ends
                threads.calls.pop()()
        elif piece is PIECES[1]:
            raise MemoryError

    shared = SharedWork(work, PIECES)
    shared._errors = Full()
    with pytest.raises(OSError, match="ended early"):
        shared.run(1)
