"""The ranks of verl's SFT trainer, which has no driver: rank 0 drives, and calls the others.

``together`` is collective. Rank 0 does the work, and broadcasts the calls to make in the ranks, which
answer until the work is over. Every rank returns its result, or raises its error. Signal handlers wait
for an exchange that all ranks reach. An interrupt is raised on its rank once all have heard of it, and
elsewhere is ``RankInterrupted``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from ckptfsm.adapters.signals import OneCall, PosixDeferredSignals
from ckptfsm.core.errors import CkptFsmError, RankFailed, RankInterrupted, SaveFailed, describe
from ckptfsm.core.ports import Transport
from ckptfsm.ranks.coordinator_client import Answer, answer_of, share_answer

T = TypeVar("T")


class RemoteOrder(NamedTuple):
    """A call that rank 0 makes in one rank: ``function(rank's worker, *arguments)``."""

    rank: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Answers(NamedTuple):
    """The answers of a rank to its calls, in order, and its interrupt in words, if any."""

    calls: tuple[Answer, ...]
    interrupted: str = ""


@dataclass(eq=False, slots=True)
class RemoteCall:
    """A call that was begun at rank 0; ``answer`` comes with the next exchange."""

    order: RemoteOrder
    answer: Answer | None = None


class InsideCall:
    """``DeferredSignals`` for calls inside ``together``: handlers wait for the end of that.

    While rank 0's controller waits, it runs the handlers that the ranks would run in their
    exchanges.
    """

    def __init__(self, calls: OneCall) -> None:
        self._calls = calls
        self._running = calls.running()

    def __enter__(self) -> None:
        self._running.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._running.__exit__(*raised)

    def hear(self) -> BaseException | None:
        return self._calls.hear()


@dataclass(slots=True)
class Ranks:
    """All ranks of the job as numbered workers of rank 0, which calls them by ``Calls``.

    ``here`` is the worker of this rank, the first argument of every called function. ``calls``
    defers signal handlers.
    """

    transport: Transport
    here: Any
    calls: OneCall = field(default_factory=partial(OneCall, PosixDeferredSignals))
    _begun: list[RemoteCall] = field(default_factory=list)
    _leaving: BaseException | None = None  # an interrupt to raise at the end

    @property
    def workers(self) -> Sequence[int]:
        return range(self.transport.world_size)

    def together(self, work: Callable[[], T]) -> T:
        """Run ``work`` at rank 0; every rank returns its result or raises its error (collective)."""
        with self.calls.running():
            self._leaving = None
            return self._lead(work) if self.transport.rank == 0 else self._follow()

    def _lead(self, work: Callable[[], T]) -> T:
        try:
            answer = Answer(work())
        except RankFailed:  # no rank can be told any more
            raise
        except BaseException as error:  # a Ctrl-C too: the others must not wait
            share_answer(self.transport, answer_of(error))
            raise
        return cast("T", share_answer(self.transport, answer).value)

    def _follow(self) -> Any:
        """Answer the calls of rank 0 until its work is over."""
        while True:
            told = self.transport.broadcast(None)
            if isinstance(told, Answer):  # of the work itself
                break
            self.transport.gather(self._answers(told))
        error = self._leaving or told.error
        if error is not None:
            raise error
        return told.value

    def _answers(self, orders: Sequence[RemoteOrder]) -> Answers:
        """Make the calls for this rank, in order. Keep an interrupt for the end."""
        mine = [order for order in orders if order.rank == self.transport.rank]
        answers = tuple(self._answered(order) for order in mine)
        self._leaving = self._leaving or self.calls.hear()
        return Answers(answers, describe(self._leaving) if self._leaving is not None else "")

    def _answered(self, order: RemoteOrder) -> Answer:
        try:
            return Answer(order.function(self.here, *order.arguments))
        except RankFailed:  # no rank waits for an answer
            raise
        except CkptFsmError as error:  # rank 0 decides
            error.facts = {"rank": order.rank} | error.facts
            return Answer(error=error)
        except BaseException as error:  # torch's CheckpointException is one; the others wait
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                self._leaving = self._leaving or error
            return Answer(error=SaveFailed(describe(error), rank=order.rank))

    # ---------------------------------------------------------------------- at rank 0: see ``Calls``

    def submit(self, worker: int, function: Callable[..., Any], *arguments: Any) -> RemoteCall:
        """Queue a call for the next ``done``."""
        call = RemoteCall(RemoteOrder(worker, function, arguments))
        self._begun.append(call)
        return call

    def done(self, calls: Sequence[RemoteCall], timeout_s: float) -> list[RemoteCall]:
        """Make the queued calls, in all ranks at once, within the transport's timeout.

        Raises an interrupt of this rank, and ``RankInterrupted`` for one of another.
        """
        begun, self._begun = self._begun, []
        if begun:
            orders = [call.order for call in begun]
            self.transport.broadcast(orders)
            everyone = self.transport.gather(self._answers(orders)) or ()
            answers = [iter(answers.calls) for answers in everyone]
            for call in begun:
                call.answer = next(answers[call.order.rank])
            self._raise_interrupt(everyone)
        return [call for call in calls if call.answer is not None]

    def _raise_interrupt(self, everyone: Sequence[Answers]) -> None:
        if self._leaving is not None:
            raise self._leaving
        for rank, answers in enumerate(everyone):
            if answers.interrupted:
                raise RankInterrupted(
                    f"rank {rank} was interrupted: {answers.interrupted}", rank=rank
                )

    def result(self, call: RemoteCall) -> Any:
        assert call.answer is not None, "a call that was not made has no result"
        if call.answer.error is not None:
            raise call.answer.error
        return call.answer.value

    def everywhere(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function in every rank at once, and return all results."""
        begun = [self.submit(rank, function, *arguments) for rank in self.workers]
        self.done(begun, 0.0)
        return [self.result(call) for call in begun]


def is_within_an_epoch(step: int, batches: int) -> bool:
    """True if an epoch of ``batches`` steps has batches left after ``step``.

    If not, the saved state of the data loader is used up. A run that loads it trains nothing in the
    next epoch and continues with the one after (verl #7401).
    """
    return batches > 0 and step % batches != 0
