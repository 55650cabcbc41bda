"""The coordinator's thread: work runs in order, off the training thread.

The two threads share no ``Condition``: a Ctrl-C in the training thread could leave one locked for
good, and then both threads hang.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any, Generic, TypeVar

from ckptfsm.adapters.notices import say
from ckptfsm.core.errors import describe

log = logging.getLogger("ckptfsm")
T = TypeVar("T")
_LIMIT = 10_000  # work must not pile up without end behind a hanging file system


class WorkResult(Generic[T]):
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
        # An interrupt here leaves the lock taken at worst when the outcome is there already.
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
        self._queue: queue.SimpleQueue[tuple[Callable[[], Any], WorkResult[Any]] | None]
        self._queue = queue.SimpleQueue()
        self._repeated: Callable[[], object] | None = None
        self._every_s = 0.0
        self._thread = threading.Thread(target=self._work, name="ckptfsm", daemon=True)
        # A daemon: a hanging file system hangs neither training nor the exit.
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> WorkResult[T]:
        """Queue ``work``; its result or exception is in the promise. Raises ``queue.Full``."""
        if self._queue.qsize() >= _LIMIT:
            raise queue.Full
        promise: WorkResult[T] = WorkResult()
        self._queue.put((work, promise))
        return promise

    def repeat(self, work: Callable[[], object], every_s: float) -> None:
        """Run ``work`` each time that no other work came for ``every_s`` seconds.

        An exception of ``work`` is logged, and ends the repetition.
        """
        self.submit(partial(self._begin_to_repeat, work, every_s))

    def shutdown(self) -> None:
        """Stop after the queued work; returns at once."""
        self._queue.put(None)

    def _begin_to_repeat(self, work: Callable[[], object], every_s: float) -> None:
        self._repeated, self._every_s = work, every_s

    def _next(self) -> tuple[Callable[[], Any], WorkResult[Any]] | None:
        """Wait for submitted work; None to stop."""
        while self._repeated is not None:
            try:
                return self._queue.get(timeout=self._every_s)
            except queue.Empty:
                self._run_repeated(self._repeated)
        return self._queue.get()

    def _run_repeated(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # submitted work must run all the same
            self._repeated = None
            said = f"repeated work has ended: {describe(error)}"
            say(log.error, "repeated_work_ended", said, exc_info=error, error=describe(error))

    def _work(self) -> None:
        while (item := self._next()) is not None:
            work, promise = item
            try:
                promise.set_result(work())
            except BaseException as error:  # such as torch's CheckpointException
                promise.set_exception(error)
