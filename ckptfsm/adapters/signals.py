"""Defers Python signal handlers during a public call, or while a child is forked and stored.

CPython runs a handler between two instructions of the main thread, and the usual one for Ctrl-C
raises. Between two collectives that would leave the other ranks waiting in the second one. Between
a fork and the line that stores the child, it would leave an unknown writer. Inside ``os.fork`` the error
is lost, and logging's lock may stay held.
"""

from __future__ import annotations

# ``signal`` itself makes an enum of each answer: 40 us to look at all signals, not 3.
import _signal  # type: ignore[import-not-found]
import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from ckptfsm.core.errors import ConfigError, RankInterrupted
from ckptfsm.core.ports import DeferredSignals

Handler = Callable[[int, FrameType | None], Any]
_LIBC = ctypes.CDLL(None, use_errno=True)
_SIGACTION_BYTES = 1024  # more than any struct sigaction
_NUMBERS = tuple(int(number) for number in signal.valid_signals())
_NOTICES = (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)  # beside SIGTERM


def shield_worker(worker_id: int = 0) -> None:
    """Ignore the signals that announce the end of a job, in a data loader's worker.

    Pass it to ``torch.utils.data.DataLoader`` as ``worker_init_fn``, or call it in yours. A notice to
    all processes of a job (``torchrun``, ``scancel``, a Ctrl-C) then leaves the workers alive until
    the trainer has made its last save. The signals are SIGTERM, SIGINT, SIGUSR1 and SIGUSR2.

    A SIGTERM of the trainer itself ends a worker. Torch and multiprocessing send one to workers that
    hang or are left when the trainer exits, and would wait for ever. Programs that a worker starts
    ignore the signals too.
    """
    del worker_id  # the loader's argument
    for number in _NOTICES:
        signal.signal(number, signal.SIG_IGN)
    # Blocked, not ignored: only so the thread learns who sent it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    trainer = multiprocessing.parent_process()  # not the fork server
    pid = os.getppid() if trainer is None or trainer.pid is None else trainer.pid
    threading.Thread(target=_end_with, args=(pid,), daemon=True).start()


def _end_with(trainer: int) -> None:
    """End this worker at a SIGTERM of its trainer."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != trainer:
        pass
    os._exit(0)  # as torch's own handler does


class PosixDeferredSignals:
    """``with PosixDeferredSignals(): self.child = fork_child(...)``: a Ctrl-C is raised at the end.

    For handlers written in Python, in the main thread. Each runs at the end of the block, or where the
    block calls ``hear``. The kernel's setting of each is restored: its flags, or a handler in C above
    ours. Only one that was newly set inside stays. Not to be entered twice.
    """

    def __init__(self) -> None:
        self._put_off: dict[int, tuple[Handler, ctypes.Array[ctypes.c_char]]] = {}
        self._arrived: dict[int, FrameType | None] = {}  # one per signal, as in the kernel
        self._waiting = True

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in _NUMBERS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    found = ctypes.create_string_buffer(_SIGACTION_BYTES)
                    _LIBC.sigaction(number, None, found)
                    self._put_off[number] = handler, found
                    _signal.signal(number, self._arrives)
        except ValueError:  # the interpreter calls another thread its main one
            self._put_off.clear()
        except BaseException:  # a handler that ran before its signal was deferred
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._put_back(list(self._put_off))
        finally:
            self._waiting = False  # an unrestored handler is called at once from now on
            first = self.hear()
            while self._arrived:  # all of them run, and the first exception is raised
                self.hear()
            if first is not None:
                raise first

    def hear(self) -> BaseException | None:
        """Run the handlers that have arrived so far. Returns the exception of the first that raises."""
        while self._arrived:
            number = next(iter(self._arrived))
            try:
                self._put_off[number][0](number, self._arrived.pop(number))
            except BaseException as error:  # a Ctrl-C: the caller decides where to raise it
                return error
        return None

    def _put_back(self, numbers: list[int]) -> None:
        """Restore each handler, the last one first, even if restoring another one raises."""
        if not numbers:
            return
        number = numbers.pop()
        handler, found = self._put_off[number]
        try:
            if _signal.getsignal(number) == self._arrives:  # else a handler has set another
                try:
                    _signal.signal(number, handler)
                finally:  # also if a handler that runs now raises
                    _LIBC.sigaction(number, found, None)
        finally:
            self._put_back(numbers)

    def _arrives(self, number: int, frame: FrameType | None) -> None:
        if self._waiting:
            self._arrived.setdefault(number, frame)
        else:
            self._put_off[number][0](number, frame)


class OneCall:
    """Allows one thread at a time into the public calls of a manager, and defers signal handlers.

    ``taking_news`` is set by the participant while hooks run, which may call nothing. ``left``: the
    manager was left, so there are no more agreements with other ranks.
    """

    def __init__(self, defer: Callable[[], DeferredSignals]) -> None:
        self._defer = defer
        self._signals: DeferredSignals | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._kept: BaseException | None = None
        self.taking_news = False
        self.left = False

    @property
    def in_hook(self) -> bool:
        """True in a hook or a finalizer, which a call of this thread runs."""
        return self.taking_news and self._thread is threading.current_thread()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run a call, or a call inside it. ``ConfigError`` if another thread is inside a call."""
        if self._thread is threading.current_thread():
            yield
            return
        signals = self._defer()
        with signals:
            if not self._lock.acquire(blocking=False):
                raise _second_thread(self._thread)
            self._thread, self._signals = threading.current_thread(), signals
            self.taking_news = False  # of an interrupted call
            try:
                yield
            finally:
                self._thread = self._signals = None
                kept, self._kept = self._kept, None
                self._lock.release()
                if kept is not None:
                    raise kept

    def hear(self) -> BaseException | None:
        """Run the handlers that wait for the end of the call. Returns the exception of a handler.

        If a handler left the manager, raises that exception at once.
        """
        interruption = self._next_interruption()
        if interruption is not None and self.left:
            raise interruption
        return interruption

    def agree(
        self, exchange: Callable[[list[bool]], Sequence[bool]], flags: Sequence[bool], during: str
    ) -> list[bool]:
        """One turn of a wait of all ranks: agree on ``flags``, and on an interrupt (collective).

        ``exchange`` tells which of its flags any rank has set. An interrupted rank raises the
        exception of its handler, every other one ``RankInterrupted`` with ``during``: no rank waits on.
        """
        interruption = self.hear()
        *agreed, interrupted = exchange([*flags, interruption is not None])
        if interruption is not None:
            raise interruption
        if interrupted:
            raise RankInterrupted(f"another rank was interrupted while all {during}")
        return agreed

    def check_exit(self) -> BaseException | None:
        """Run the handlers that wait, where other exceptions would count as errors of the save.

        Returns a ``KeyboardInterrupt`` or ``SystemExit``. Another exception of a handler is kept: the
        next ``hear`` returns it, or the end of the call raises it.
        """
        interruption = self._next_interruption()
        if interruption is None or isinstance(interruption, (KeyboardInterrupt, SystemExit)):
            return interruption
        self._kept = interruption
        if self.left:
            raise interruption
        return None

    def _next_interruption(self) -> BaseException | None:
        kept, self._kept = self._kept, None
        if kept is not None or self._signals is None:
            return kept
        return self._signals.hear()


def _second_thread(first: threading.Thread | None) -> ConfigError:
    here, there = threading.current_thread().name, first.name if first is not None else "unknown"
    return ConfigError(
        f"thread {here!r} calls a manager while thread {there!r} is in a call of it: call it from one "
        "thread",
        thread=here,
        busy_thread=there,
    )
