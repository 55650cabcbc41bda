"""Handlers of signals that wait while a child gets an owner. No torch here.

CPython runs a handler between two instructions of the main thread, and the usual one for Ctrl-C
raises. Between a fork and the line that stores the child it would leave a writer that nobody knows of.
Inside ``os.fork``, out of what is called before and after it, the error is printed and forgotten, and
logging's lock may stay held.

Rules:
* Handlers are put off, not lost: each runs at the end of the block, and may raise there.
* Only handlers written in Python, and only in the main thread: nothing else is ever run in between.
* The block is short: a fork, and storing what it returned.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]


class HandlersWait:
    """``with HandlersWait(): self.child = fork_child(...)``: a Ctrl-C meanwhile is raised at its end.

    Not to be entered twice.
    """

    def __init__(self) -> None:
        self._put_off: dict[int, Handler] = {}
        self._arrived: list[tuple[int, FrameType | None]] = []
        self._waiting = True

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    self._put_off[number] = handler
                    signal.signal(number, self._arrives)
        except BaseException:  # one that arrived before its turn
            self._put_back()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._put_back()
        finally:
            with contextlib.ExitStack() as calls:  # each of them, whatever the others raise
                for number, frame in reversed(self._arrived):
                    calls.callback(self._put_off[number], number, frame)

    def _put_back(self) -> None:
        self._waiting = False  # from now on one that was not put back yet is called at once
        for number, handler in self._put_off.items():
            signal.signal(number, handler)

    def _arrives(self, number: int, frame: FrameType | None) -> None:
        if self._waiting:
            self._arrived.append((number, frame))
        else:
            self._put_off[number](number, frame)
