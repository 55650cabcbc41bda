"""The coordinator's thread: work runs in order, off the training thread.

Rules:

- The thread is a daemon, so that a hanging file system hangs neither training nor the exit.
- The queue is bounded, so that work cannot pile up without end behind a hanging file system.
- The two threads share no ``Condition``: a Ctrl-C in the training thread could leave one locked for
  good, and then both threads hang.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Generic, TypeVar

from ckptfsm.core.ports import Settable

T = TypeVar("T")
_LIMIT = 10_000


class Promise(Generic[T]):
    """The outcome of submitted work, see ``ports.Pending``. Set by one thread, awaited by another."""

    def __init__(self) -> None:
        self._outcome: tuple[Any, BaseException | None] | None = None
        self._running = threading.Lock()
        self._running.acquire()

    def set_result(self, result: T) -> None:
        self._end(result, None)

    def set_exception(self, error: BaseException) -> None:
        self._end(None, error)

    def _end(self, result: Any, error: BaseException | None) -> None:
        self._outcome = (result, error)
        self._running.release()

    def done(self) -> bool:
        return self._outcome is not None

    def result(self, timeout: float | None = None) -> T:
        result, error = self._wait(timeout)
        if error is not None:
            raise error
        made: T = result
        return made

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._wait(timeout)[1]

    def _wait(self, timeout: float | None) -> tuple[Any, BaseException | None]:
        """Wait for the outcome, at most ``timeout`` seconds.

        An interrupt here leaves the lock taken at worst when the outcome is there already.
        """
        if self._outcome is None and self._running.acquire(
            timeout=-1 if timeout is None else timeout
        ):
            self._running.release()
        if self._outcome is None:
            raise FutureTimeout
        return self._outcome


class ThreadExecutor:
    """Runs submitted work in order on a separate thread."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], Promise[Any]] | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="ckptfsm", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Promise[T]:
        """Queue ``work``; its result or exception is in the promise. Raises ``queue.Full``."""
        if self._queue.qsize() >= _LIMIT:
            raise queue.Full
        promise: Promise[T] = Promise()
        self._queue.put((work, promise))
        return promise

    def shutdown(self) -> None:
        """Stop after the queued work; returns at once."""
        self._queue.put(None)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            work, promise = item
            try:
                run_into(work, promise)
            except BaseException as error:  # such as torch's CheckpointException
                promise.set_exception(error)


class InlineExecutor:
    """Runs work at once on the caller's thread, for simulations."""

    def submit(self, work: Callable[[], T]) -> Promise[T]:
        promise: Promise[T] = Promise()
        run_into(work, promise)
        return promise

    def shutdown(self) -> None:
        """Nothing to stop."""


def run_into(work: Callable[[], T], promise: Settable[T]) -> None:
    """Run ``work`` and put its result or its ``Exception`` into ``promise``; let others pass."""
    try:
        result = work()
    except Exception as error:  # kept for the thread that waits
        promise.set_exception(error)
    else:
        promise.set_result(result)
