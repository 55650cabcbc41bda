"""A rank's link to the coordinator: questions asked together, reports sent, news taken.

The coordinator and its thread exist at rank 0 only; every other rank reaches them through the
transport. What comes back is the same on every rank.

Rules: the training thread never waits for the disk without a deadline. An error of the coordinator
is part of an answer or an update, so that it comes out on every rank at the same point.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from ckptfsm.coordinator import Coordinator, Located
from ckptfsm.durable import storage_error
from ckptfsm.engine import News
from ckptfsm.errors import CkptFsmError, DeadlineExceeded, describe
from ckptfsm.messages import Event
from ckptfsm.notices import say
from ckptfsm.ports import Executor, Pending, Transport

log = logging.getLogger("ckptfsm")
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Update:
    """What the coordinator tells every rank. ``fatal`` ends it: nothing more will come.

    ``answered``: it is done with the last question that ran into its deadline.
    """

    news: tuple[News, ...] = ()
    fatal: CkptFsmError | None = None
    answered: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """The coordinator's answer to a question that all ranks asked together."""

    value: Any = None
    error: CkptFsmError | None = None
    update: Update = Update()


class Link:
    """See the module. ``start`` gives rank 0 its coordinator; ``stop`` ends its thread."""

    def __init__(self, transport: Transport, effect_timeout_s: float) -> None:
        self.transport = transport
        self._effect_timeout_s = effect_timeout_s
        self._coordinator: Coordinator | None = None
        self._executor: Executor | None = None
        self._submitted: list[Pending[Any]] = []
        self._late: Pending[Any] | None = None
        self._fatal_told = False

    def start(self, coordinator: Coordinator, executor: Executor) -> None:
        self._coordinator, self._executor = coordinator, executor

    def stop(self) -> None:
        """No more work for the coordinator's thread; what is queued is not waited for."""
        if self._executor is not None:
            self._executor.shutdown()
        self._coordinator = self._executor = None

    def abandon(self, timeout_s: float) -> bool:
        """Give the root back without the other ranks. True if that was done within ``timeout_s``.

        Otherwise the coordinator's thread still works, and does it when the disk answers.
        """
        if self._coordinator is None or self._executor is None:
            return True
        future = self._executor.submit(self._coordinator.abandon)
        try:
            future.result(timeout_s)
        except FutureTimeout:
            say(
                log.warning,
                "root_given_back_later",
                "the disk is slow: the root is given back later",
            )
            return False
        except (CkptFsmError, OSError) as error:
            why = describe(error)
            said = f"the root could not be given back: {why}"
            say(log.warning, "root_not_given_back", said, error=why)
        return True

    def ask(
        self,
        work: Callable[Concatenate[Coordinator, P], T],
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> T:
        """At rank 0: run a coordinator's method on its thread and wait, with a deadline."""
        assert self._coordinator is not None and self._executor is not None
        call = _Call(work, (self._coordinator, *arguments), keywords)
        future: Pending[T] = self._executor.submit(call)
        try:
            error = future.exception(self._effect_timeout_s)
        except FutureTimeout:
            self._late = future
            self._submitted.append(future)
            self._submit(Coordinator.disown, future)
            raise DeadlineExceeded(
                f"the disk did not answer within {self._effect_timeout_s} s",
                timeout_s=self._effect_timeout_s,
                waiting_for=getattr(work, "__name__", "the coordinator"),
            ) from None
        except BaseException:  # a Ctrl-C
            self._submit(Coordinator.disown, future)
            raise
        if error is not None and not isinstance(error, Exception):
            raise typed(error) from error  # torch's, say: the other ranks must hear of it
        return future.result()

    def together(
        self,
        work: Callable[Concatenate[Coordinator, P], Any],
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> Answer:
        """Ask once at rank 0; every rank gets the answer and the news (collective)."""
        answer = Answer()
        if self._coordinator is not None:
            try:
                value = self.ask(work, *arguments, **keywords)
                answer = Answer(value, update=self.collect())
            except Exception as error:  # the other ranks wait for the broadcast
                answer = Answer(error=typed(error), update=self.collect())
        shared: Answer = self.transport.broadcast(answer)
        return shared

    def exchange(self, outbox: Sequence[Event]) -> Update:
        """Every rank's reports to the coordinator, its news to every rank (collective)."""
        gathered = self.transport.gather(list(outbox))
        update = Update()
        if gathered is not None:
            events = [event for events in gathered for event in events]
            if events:
                self._submit(Coordinator.report, events)
            update = self.collect()
        shared: Update = self.transport.broadcast(update)
        return shared

    def forget_request(self) -> None:
        """Fail, when the disk answers again, a request that nobody waited for."""
        self._submit(Coordinator.forget_request)

    def give_back(self, value: Any) -> None:
        """At rank 0: give back the lease in an answer that its asker will not see."""
        if self._coordinator is not None and isinstance(value, Located):
            self._submit(Coordinator.release, value.lease)

    def work_in_background(self) -> None:
        """Let the coordinator retry, expire and empty the trash while it has nothing else to do."""
        coordinator = self._coordinator
        self._submitted = [f for f in self._submitted if not f.done()]
        if coordinator is None or self._submitted or coordinator.fatal is not None:
            return
        if coordinator.wants_tick():
            self._submit(Coordinator.tick)

    @property
    def has_news(self) -> bool:
        """True at rank 0 if an exchange would tell something."""
        if self._coordinator is None:
            return False
        ended = self._coordinator.fatal is not None and not self._fatal_told
        return ended or self._has_answered or self._coordinator.has_news

    @property
    def _has_answered(self) -> bool:
        return self._late is not None and self._late.done()

    def collect(self) -> Update:
        """At rank 0: the coordinator's news, and the error that ended it, if one did."""
        assert self._coordinator is not None
        for future in [f for f in self._submitted if f.done()]:
            self._submitted.remove(future)
            error = future.exception()
            if error is not None:
                said = f"the coordinator failed: {describe(error)}"
                say(log.error, "coordinator_error", said, error=describe(error))
        fatal = self._coordinator.fatal if not self._fatal_told else None
        self._fatal_told = self._fatal_told or fatal is not None
        answered = self._has_answered  # asked before the news are taken: these are all there then
        if answered:
            self._late = None
        return Update(tuple(self._coordinator.take_news()), fatal, answered)

    def _submit(
        self,
        work: Callable[Concatenate[Coordinator, P], None],
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> None:
        assert self._coordinator is not None and self._executor is not None
        call = _Call(work, (self._coordinator, *arguments), keywords)
        self._submitted.append(self._executor.submit(call))


@dataclass(frozen=True, slots=True)
class _Call:
    work: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def __call__(self) -> Any:
        return self.work(*self.arguments, **self.keywords)


def typed(error: BaseException) -> CkptFsmError:
    """``error`` as one of ours, so that it can be sent to every rank."""
    if isinstance(error, CkptFsmError):
        return error
    if isinstance(error, OSError):
        return storage_error(error, "open")
    return CkptFsmError(describe(error))
