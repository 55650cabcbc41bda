"""Processes that may be killed at any moment: each has separate mounts and a pipe, and no locks.

Rules: a worker does one task at a time and is sent the next when it has answered. Leaving ends them all
at once, whatever they do; what they mounted ends with them. A worker that died or does not answer is
an error, never waited for.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, TypeVar

from proof.powerloss_disk import enter_private_mounts

T = TypeVar("T")
R = TypeVar("R")
_TASK_TIMEOUT_S = 300.0
_END_S = 30.0


class Workers:
    """``processes`` workers; ``work`` is a directory that each of them has for itself, in memory."""

    def __init__(self, work: str, processes: int) -> None:
        self._context = multiprocessing.get_context("spawn")  # no threads or locks of ours in them
        self._started: dict[Connection, SpawnProcess] = {}
        self._work = work
        self._processes = processes

    def __enter__(self) -> Workers:
        try:
            for _ in range(self._processes):
                ours, theirs = self._context.Pipe()
                process = self._context.Process(target=_serve, args=(theirs, self._work))
                process.start()
                theirs.close()
                self._started[ours] = process
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        for connection, process in self._started.items():
            process.kill()
            process.join(_END_S)
            connection.close()

    def map(self, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[R]:
        """The results as they come. Raises what a task raised, ``TimeoutError``, or ``EOFError``."""
        pending, idle = deque(tasks), list(self._started)
        busy: list[Connection] = []
        while pending or busy:
            while pending and idle:
                connection = idle.pop()
                connection.send((function, pending.popleft()))
                busy.append(connection)
            ready = wait(busy, _TASK_TIMEOUT_S)
            if not ready:
                raise TimeoutError(f"a worker did not answer within {_TASK_TIMEOUT_S} s")
            for connection in busy[:]:
                if connection in ready:
                    busy.remove(connection)
                    idle.append(connection)
                    yield _result(connection.recv())


def _result(answer: tuple[Any, BaseException | None]) -> Any:
    value, error = answer
    if error is not None:
        raise error
    return value


def _serve(tasks: Connection, work: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the parent, which ends us
    refused: BaseException | None = None
    try:
        enter_private_mounts(work)
    except OSError as error:
        refused = error
    while True:
        function, task = tasks.recv()
        if refused is not None:
            tasks.send((None, refused))
            continue
        answer: tuple[Any, BaseException | None]
        try:
            answer = (function(task), None)
        except Exception as error:  # the parent decides what it means
            answer = (None, error)
        tasks.send(answer)
