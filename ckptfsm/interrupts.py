"""Handlers of signals that wait while a child gets an owner. No torch here.

CPython runs a handler between two instructions of the main thread, and the usual one for Ctrl-C
raises. Between a fork and the line that stores the child it would leave a writer that nobody knows of.
Inside ``os.fork``, out of what is called before and after it, the error is printed and forgotten, and
logging's lock may stay held.

Rules:
* Handlers are put off, not lost: each runs at the end of the block, and may raise there.
* Only handlers written in Python, and only in the main thread: nothing else is ever run in between.
* What stood there comes back as it was for the kernel, too: the flags, or a handler in C above ours.
* In the block: a fork, the wait until its child runs, and storing it. Nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]
_LIBC = ctypes.CDLL(None, use_errno=True)
_SIGACTION_BYTES = 1024  # more than any struct sigaction


class HandlersWait:
    """``with HandlersWait(): self.child = fork_child(...)``: a Ctrl-C meanwhile is raised at its end.

    Not to be entered twice.
    """

    def __init__(self) -> None:
        self._put_off: dict[int, tuple[Handler, ctypes.Array[ctypes.c_char]]] = {}
        self._arrived: list[tuple[int, FrameType | None]] = []
        self._waiting = True

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    self._wait_with(number, handler)
        except ValueError:  # the interpreter calls another thread its main one
            self._put_off.clear()
        except BaseException:  # one that arrived before its turn
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            with contextlib.ExitStack() as last_first:  # each of them, whatever the others raise
                for number in self._put_off:
                    last_first.callback(self._put_back, number)
        finally:
            self._hand_on()

    def _hand_on(self) -> None:
        """Run what was put off, in order. What could not be put back is called at once from now on."""
        self._waiting = False
        with contextlib.ExitStack() as last_first:
            for number, frame in reversed(self._arrived):
                last_first.callback(self._put_off[number][0], number, frame)

    def _wait_with(self, number: int, handler: Handler) -> None:
        found = ctypes.create_string_buffer(_SIGACTION_BYTES)
        _LIBC.sigaction(number, None, found)
        self._put_off[number] = handler, found
        signal.signal(number, self._arrives)

    def _put_back(self, number: int) -> None:
        handler, found = self._put_off[number]
        try:
            signal.signal(number, handler)
        finally:  # it raises what another handler raises
            _LIBC.sigaction(number, found, None)

    def _arrives(self, number: int, frame: FrameType | None) -> None:
        if self._waiting:
            self._arrived.append((number, frame))
        else:
            self._put_off[number][0](number, frame)
