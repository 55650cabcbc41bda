"""verl's SFT trainer has no driver: all ranks run one program. Here rank 0 drives, and calls the others.

Rules:
* ``together`` is collective. Rank 0 does the work, and broadcasts what it has to call in the ranks;
  the others answer until they hear that the work is over. Its result, or its error, is everyone's.
* A rank that is gone is a ``RankFailed`` on the others. One whose call raised answers with that error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckptfsm.errors import CkptFsmError, RankFailed, SaveFailed, describe
from ckptfsm.link import interrupted_rank, typed
from ckptfsm.ports import Transport

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Order:
    """A call that rank 0 makes in one rank: ``function(rank's worker, *arguments)``."""

    rank: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Over:
    """The work of rank 0 has ended."""

    value: Any = None
    error: CkptFsmError | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The end of one call in a rank."""

    value: Any = None
    error: str = ""


@dataclass(eq=False, slots=True)
class Call:
    """A call that was begun at rank 0; ``answer`` comes with the next exchange."""

    order: Order
    answer: Answer | None = None


@dataclass(slots=True)
class Ranks:
    """All ranks of the job as workers of rank 0, numbered. Rank 0 calls them as ``Calls`` says.

    ``here`` is the worker of this rank, the first argument of every function that is called.
    """

    transport: Transport
    here: Any
    _begun: list[Call] = field(default_factory=list)

    @property
    def workers(self) -> Sequence[int]:
        return range(self.transport.world_size)

    def together(self, work: Callable[[], T]) -> T:
        """What ``work`` returns at rank 0, or raises there, on every rank (collective)."""
        if self.transport.rank != 0:
            return self._follow()
        try:
            value = work()
        except RankFailed:  # nobody can be told any more
            raise
        except Exception as error:
            self.transport.broadcast(Over(error=typed(error)))
            raise
        except BaseException as error:  # a Ctrl-C: the others must not wait
            self.transport.broadcast(Over(error=interrupted_rank(error)))
            raise
        self.transport.broadcast(Over(value))
        return value

    def _follow(self) -> Any:
        """Answer the calls of rank 0 until its work is over."""
        while True:
            told = self.transport.broadcast(None)
            if isinstance(told, Over):
                if told.error is not None:
                    raise told.error
                return told.value
            self.transport.gather(self._answers(told))

    def _answers(self, orders: Sequence[Order]) -> list[Answer]:
        """Make the calls that are for this rank, in their order."""
        mine = [order for order in orders if order.rank == self.transport.rank]
        return [_answered(order, self.here) for order in mine]

    # ---------------------------------------------------------------------- at rank 0: see ``Calls``

    def submit(self, worker: int, function: Callable[..., Any], *arguments: Any) -> Call:
        """Begin a call: it is made at the next ``done``."""
        call = Call(Order(worker, function, arguments))
        self._begun.append(call)
        return call

    def done(self, calls: Sequence[Call], timeout_s: float) -> list[Call]:
        """Make what was begun, in all ranks at once; the transport's timeout counts."""
        begun, self._begun = self._begun, []
        if begun:
            orders = [call.order for call in begun]
            self.transport.broadcast(orders)
            everyone = self.transport.gather(self._answers(orders))
            answers = [iter(answers) for answers in everyone or ()]
            for call in begun:
                call.answer = next(answers[call.order.rank])
        return [call for call in calls if call.answer is not None]

    def result(self, call: Call) -> Any:
        answer = call.answer
        if answer is None:
            raise AssertionError("a call that was not made has no result")
        if answer.error:
            raise SaveFailed(answer.error, rank=call.order.rank)
        return answer.value

    def everywhere(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function in every rank at once, and return what each returned."""
        begun = [self.submit(rank, function, *arguments) for rank in self.workers]
        self.done(begun, 0.0)
        return [self.result(call) for call in begun]


def _answered(order: Order, worker: Any) -> Answer:
    try:
        return Answer(order.function(worker, *order.arguments))
    except RankFailed:  # there is nobody to answer
        raise
    except Exception as error:  # rank 0 decides
        return Answer(error=describe(error))
