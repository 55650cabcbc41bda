"""The coordinator's work and a call's signals in simulated processes: one thread, and no handler."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ckptfsm.adapters.executor import WorkResult

T = TypeVar("T")


class InlineExecutor:
    """Runs work at once on the caller's thread."""

    def submit(self, work: Callable[[], T]) -> WorkResult[T]:
        promise: WorkResult[T] = WorkResult()
        run_into(work, promise)
        return promise

    def repeat(self, work: Callable[[], object], every_s: float) -> None:
        """Nothing: there is no thread."""

    def shutdown(self) -> None:
        """Nothing to stop."""


def run_into(work: Callable[[], T], promise: WorkResult[T] | Future[T]) -> None:
    """Run ``work`` and put its result or its ``Exception`` into ``promise``.

    The simulated death of a process is none, and passes.
    """
    try:
        result = work()
    except Exception as error:  # kept for the thread that waits
        promise.set_exception(error)
    else:
        promise.set_result(result)


class NoDeferredSignals:
    """``ports.DeferredSignals`` where no handler ever runs."""

    def __enter__(self) -> None:
        """Nothing to defer."""

    def __exit__(self, *_: object) -> None:
        """Nothing to restore."""

    def hear(self) -> BaseException | None:
        return None
