"""The workers of a job's groups, called without waiting for one that is busy.

A worker answers its calls in order, and may be in a training step. A call that is not answered in
time is left with it, and a later ``take`` takes the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ckptfsm.adapters.notices import say
from ckptfsm.core.errors import DeadlineExceeded, WriterDied, describe, shorten
from ckptfsm.core.events import Event, Failed
from ckptfsm.ranks.tickets import Ticket

log = logging.getLogger("ckptfsm")
Lost = Callable[[str, list[int], str], None]
Question = tuple[Any, ...]  # a function, and its arguments behind the worker


class OutOfReach(Exception):
    """A worker cannot be called now. It may be alive, and may still make the call."""


class Calls(Protocol):
    """Calls of functions in a worker: ``function(worker, *arguments)``."""

    def submit(self, worker: Any, function: Any, *arguments: Any) -> Any:
        """Begin a call; what it returns can be a key. One worker answers its calls in their order."""
        ...

    def done(self, calls: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        """The answered calls; waits for all of ``calls``, at most ``timeout_s``."""
        ...

    def result(self, call: Any) -> Any:
        """The result of an answered call, or its error raised.

        ``WriterDied`` only if its worker is dead for good; after any other error it is called
        again.
        """
        ...


class RayCalls:
    """Calls to Ray actors. A function may be the name of one of their methods."""

    def submit(self, worker: Any, function: Any, *arguments: Any) -> Any:
        if isinstance(function, str):
            return getattr(worker, function).remote(*arguments)
        return worker.__ray_call__.remote(function, *arguments)

    def done(self, calls: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        import ray

        ready: Sequence[Any] = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)[0]
        return ready

    def result(self, call: Any) -> Any:
        import ray

        try:
            return ray.get(call)
        except ray.exceptions.ActorUnavailableError as error:  # a RayActorError too
            raise OutOfReach(describe(error)) from error
        except ray.exceptions.RayActorError as error:
            raise WriterDied(describe(error)) from error
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None


class _OpenCall(NamedTuple):
    """An unanswered call. ``ticket``: the share that it begins, None for a poll."""

    group: str
    rank: int
    ticket: Ticket | None


class WorkerCalls:
    """The calls to the workers of ``groups``, which are in the order of their ranks."""

    def __init__(self, groups: Mapping[str, Sequence[Any]], calls: Calls) -> None:
        self.groups = {name: list(workers) for name, workers in groups.items()}
        self._calls = calls
        self._open: dict[Any, _OpenCall] = {}
        self._dead: set[tuple[str, int]] = set()

    @property
    def sizes(self) -> dict[str, int]:
        return {name: len(workers) for name, workers in self.groups.items()}

    def call_all(self, questions: Mapping[str, Question], timeout_s: float) -> None:
        """Call every worker, and wait. Raises a worker's error, or ``DeadlineExceeded``."""
        begun = [
            self._calls.submit(worker, *question)
            for name, question in questions.items()
            for worker in self.groups[name]
        ]
        if len(self._calls.done(begun, timeout_s)) < len(begun):
            raise DeadlineExceeded("the workers did not answer in time", timeout_s=timeout_s)
        for call in begun:
            self._calls.result(call)

    def begin(self, group: str, rank: int, ticket: Ticket | None, *question: Any) -> Any:
        """Begin a call, which fails the share of ``ticket`` if it raises. Returns it for ``take``."""
        call = self._calls.submit(self.groups[group][rank], *question)
        self._open[call] = _OpenCall(group, rank, ticket)
        self._dead.discard((group, rank))  # Ray may have started it again
        return call

    def poll(
        self, questions: Mapping[str, Question], timeout_s: float, lost: Lost
    ) -> Iterator[Event]:
        """Ask all workers that have answered before; one deadline for all answers together."""
        yield from self.take(list(self._open), 0.0, lost)
        silent = {(group, rank) for group, rank, _ in self._open.values()} | self._dead
        for group, question in questions.items():
            for rank in range(len(self.groups[group])):
                if (group, rank) not in silent:
                    try:
                        self.begin(group, rank, None, *question)
                    except Exception as error:  # one worker's: the others are asked all the same
                        _say_raised(group, rank, error)
        yield from self.take(list(self._open), timeout_s, lost)

    def take(self, calls: Collection[Any], timeout_s: float, lost: Lost) -> Iterator[Event]:
        """The events that workers return in time. ``lost`` is told of each dead one, once."""
        ready = self._calls.done(list(calls), timeout_s) if calls else ()
        for call in calls if timeout_s else ():
            if call not in ready:
                group, rank, _ = self._open[call]
                said = f"worker {rank} of {group!r} does not answer yet"
                say(log.warning, "worker_silent", said, group=group, rank=rank)
        for call in ready:
            group, rank, ticket = self._open.pop(call)
            try:
                yield from self._calls.result(call)
            except WriterDied as error:
                self._dead.add((group, rank))
                lost(group, [rank], error.message)
            except Exception as error:  # one worker's: the others' reports count
                why = _say_raised(group, rank, error)
                if ticket is not None and not isinstance(error, OutOfReach):
                    yield Failed(ticket.of, "fork_failed", why, ticket.first_rank + rank)

    def replace(self, group: str, workers: Sequence[Any]) -> None:
        """Forget the calls to the workers of a group, which ``workers`` replace."""
        self._open = {call: of for call, of in self._open.items() if of.group != group}
        self._dead = {dead for dead in self._dead if dead[0] != group}
        self.groups[group] = list(workers)


def _say_raised(group: str, rank: int, error: Exception) -> str:
    """Log the error of one worker. Returns it in words."""
    why = shorten(f"worker {rank} of {group!r}: {describe(error)}")
    say(log.warning, "worker_raised", why, group=group, rank=rank, why=why)
    return why
