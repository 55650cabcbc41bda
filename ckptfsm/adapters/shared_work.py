"""Work that the calling thread shares with others, on a host that may have no memory for a thread."""

from __future__ import annotations

import contextlib
import errno
from _thread import LockType, allocate_lock, start_new_thread
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedWork(Generic[T]):
    """``work`` for each of ``pieces``, by this thread and by others that help."""

    def __init__(self, work: Callable[[T], object], pieces: Sequence[T]) -> None:
        self._work = work
        self._todo = deque(enumerate(pieces))
        self._done = bytearray(len(pieces))
        self._errors: list[BaseException] = []

    def run(self, helpers: int) -> None:
        """Return when all is done. Raises the first error; ``OSError`` for a thread that got lost."""
        turns = [allocate_lock() for _ in range(helpers)]
        try:
            with contextlib.suppress(RuntimeError):  # no more threads, or the interpreter ends
                for turn in turns:
                    # Without memory a thread ends before its first line: ``Thread.start`` would wait.
                    start_new_thread(self._help, (turn,))
            self._take_pieces()
        finally:
            for turn in turns:  # also after an error: the memory may be given back then
                turn.acquire()
        if self._errors:
            raise self._errors[0]
        if not all(self._done):
            raise OSError(errno.ENOMEM, "a thread that copied has ended early")

    def _help(self, turn: LockType) -> None:
        if turn.acquire(blocking=False):  # else all is done
            try:
                self._take_pieces()
            finally:
                turn.release()

    def _take_pieces(self) -> None:
        try:
            while (found := self._next()) is not None:
                number, piece = found
                self._work(piece)
                self._done[number] = True
        except BaseException as error:  # raised by the thread that waits
            self._errors.append(error)

    def _next(self) -> tuple[int, T] | None:
        try:
            return self._todo.popleft()
        except IndexError:
            return None
