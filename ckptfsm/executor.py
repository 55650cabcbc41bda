"""The coordinator's thread: work runs in order, off the training thread.

Rules: one daemon thread, so that a hanging file system hangs neither training nor the exit of the
process; a bounded queue, so that a hanging one cannot pile up work without end.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_LIMIT = 10_000


class ThreadExecutor:
    """Runs submitted work one by one on its own thread."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[Callable[[], Any], Future[Any]] | None] = queue.Queue(_LIMIT)
        self._thread = threading.Thread(target=self._work, name="ckptfsm", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue ``work``; its result or exception is in the future."""
        future: Future[T] = Future()
        self._queue.put_nowait((work, future))
        return future

    def shutdown(self) -> None:
        """No more work; what is queued still runs, nobody waits for it."""
        self._queue.put_nowait(None)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            work, future = item
            try:
                run_into(work, future)
            except BaseException as error:  # torch's CheckpointException is one; the next must run
                future.set_exception(error)


class InlineExecutor:
    """Runs work at once on the caller's thread, for simulations."""

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        run_into(work, future)
        return future

    def shutdown(self) -> None:
        """Nothing to stop."""


def run_into(work: Callable[[], T], future: Future[T]) -> None:
    """Run ``work`` and put what comes of it into ``future``. Only an Exception is kept."""
    try:
        result = work()
    except Exception as error:  # it belongs to whoever asks the future
        future.set_exception(error)
    else:
        future.set_result(result)
