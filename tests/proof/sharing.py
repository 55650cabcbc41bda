"""Shares work out among processes, so that a process that dies is told and never waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")
_AHEAD = 4  # how many items per process are handed out before the first result is taken


class WorkerDied(Exception, Generic[T]):
    """A worker process was killed (no memory?). ``lost``: the items that were handed out and have
    no result."""

    def __init__(self, lost: Sequence[T]) -> None:
        super().__init__("a worker process died, and what it had is lost")
        self.lost = lost


def share_out(work: Callable[[T], R], items: Iterable[T], processes: int) -> Iterator[R]:
    """The results in the order of the items, which may be endless.

    The processes are forked before any of it runs. A caller that leaves early waits for the running
    items. Raises ``WorkerDied`` after the results of those that were done by then.
    """
    if processes <= 1:
        yield from map(work, items)
        return
    waiting: deque[tuple[T, Future[R]]] = deque()
    pool = ProcessPoolExecutor(processes, get_context("fork"))
    try:
        for item in items:
            waiting.append((item, pool.submit(work, item)))
            if len(waiting) == _AHEAD * processes:
                yield waiting[0][1].result()
                waiting.popleft()
        while waiting:
            yield waiting[0][1].result()
            waiting.popleft()
    except BrokenProcessPool as error:
        done = [future.exception() is None for _, future in waiting]
        yield from (
            future.result() for (_, future), fine in zip(waiting, done, strict=True) if fine
        )
        raise WorkerDied(
            [i for (i, _), fine in zip(waiting, done, strict=True) if not fine]
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
