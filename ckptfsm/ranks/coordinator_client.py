"""A rank's connection to the coordinator: questions asked together, reports sent, news taken.

The coordinator and its thread exist at rank 0 only; every other rank reaches them through the
transport. News stay with the coordinator until rank 0 has taken them, and an interrupted question
counts as unanswered. So the next exchange tells everything that an interrupt delayed.
"""

from __future__ import annotations

import logging
import queue
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from ckptfsm.adapters.notices import say
from ckptfsm.coordinator.coordinator import Coordinator
from ckptfsm.core.errors import CkptFsmError, DeadlineExceeded, RankInterrupted, describe
from ckptfsm.core.events import Event
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Executor, Pending, Transport
from ckptfsm.core.requests import Accepted, Located, NumberedNews, SaveRequest
from ckptfsm.disk.durable import storage_error

log = logging.getLogger("ckptfsm")
P = ParamSpec("P")
T = TypeVar("T")
_LISTEN_S = 0.2  # between two looks for a Ctrl-C, while the disk does not answer
_INBOX_S = 1.0  # between two looks for operator requests


@dataclass(frozen=True, slots=True)
class Update:
    """The news of the coordinator for every rank. ``fatal`` ends it: no more news will come.

    ``awaiting``: the coordinator still works on a question that timed out or was interrupted.
    """

    news: tuple[NumberedNews, ...] = ()
    fatal: CkptFsmError | None = None
    awaiting: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """The coordinator's answer to a question that all ranks asked together.

    ``interruption`` is never sent: the interrupted rank raises it instead of ``error``.
    """

    value: Any = None
    error: CkptFsmError | None = None
    update: Update = Update()
    interruption: BaseException | None = None

    @property
    def problem(self) -> BaseException | None:
        """What this rank raises."""
        return self.interruption or self.error


class CoordinatorClient:
    """The client, see the module. ``start`` gives rank 0 its coordinator; ``stop`` ends its thread.

    ``check_signals`` runs the signal handlers that wait, and returns the exception of one.
    ``taken`` is the number of news that this rank has taken. ``on_reports`` is called with all
    reports, at rank 0, on the thread that brings them.
    """

    def __init__(
        self,
        transport: Transport,
        effect_timeout_s: float,
        check_signals: Callable[[], BaseException | None],
    ) -> None:
        self.transport = transport
        self.taken = 0
        self.on_reports: Callable[[Sequence[Event]], object] = _no_display
        self._effect_timeout_s = effect_timeout_s
        self._check_signals = check_signals
        self._coordinator: Coordinator | None = None
        self._executor: Executor | None = None
        self._submitted: list[Pending[Any]] = []
        self._asking = False  # until the answer is taken
        self._late: Pending[Any] | None = None
        self.fatal_taken = False  # the error that ended the coordinator

    def start(self, coordinator: Coordinator, executor: Executor) -> None:
        self._coordinator, self._executor = coordinator, executor
        executor.repeat(partial(_serve_requests_of, weakref.ref(coordinator)), _INBOX_S)

    def stop(self) -> None:
        """End the coordinator's thread after its queued work, without waiting for that."""
        if self._executor is not None:
            self._executor.shutdown()
        self._coordinator = self._executor = None

    def complete_from_receipts(self, of: AttemptId, timeout_s: float) -> tuple[bool, State | None]:
        """At rank 0: see ``Coordinator.complete_from_receipts``. Returns whether it answered in
        time, and its answer.
        """
        if self._coordinator is None or self._executor is None:
            return False, None
        call = partial(self._coordinator.complete_from_receipts, of, timeout_s)
        try:
            return True, self._executor.submit(call).result(timeout_s)
        except FutureTimeout:
            why = f"the disk did not answer in {timeout_s} s"
        except (CkptFsmError, OSError) as error:
            why = describe(error)
        say(log.warning, "left_in_flight", f"left with a save in flight: {why}", error=why)
        return False, None

    def abandon(self, timeout_s: float) -> bool:
        """Give the root back without the other ranks. True if that was done within ``timeout_s``."""
        if self._coordinator is None or self._executor is None:
            return True
        future = self._executor.submit(self._coordinator.abandon)
        try:
            future.result(timeout_s)
        except FutureTimeout:
            said = "the disk is slow: the root is given back later"
            say(log.warning, "root_given_back_later", said)
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
        call = partial(work, self._coordinator, *arguments, **keywords)
        self._asking = True
        future: Pending[T] = self._executor.submit(call)
        try:
            error = self._outcome(future)
        except FutureTimeout:
            self._leave_late(future)
            raise DeadlineExceeded(
                f"the disk did not answer within {self._effect_timeout_s} s",
                timeout_s=self._effect_timeout_s,
                waiting_for=getattr(work, "__name__", "the coordinator"),
            ) from None
        except BaseException:  # a Ctrl-C
            self._leave_late(future)
            raise
        if error is not None and not isinstance(error, Exception):
            raise typed(error) from error  # such as torch's: the other ranks must learn of it
        return future.result()

    def _outcome(self, future: Pending[T]) -> BaseException | None:
        """Wait for the end of a question. Returns its error, if any. A Ctrl-C ends the wait."""
        left = self._effect_timeout_s
        while True:
            slice_s = min(left, _LISTEN_S)
            try:
                return future.exception(slice_s)
            except FutureTimeout:
                left -= slice_s
                if left <= 0:
                    raise
            interruption = self._check_signals()
            if interruption is not None:
                raise interruption

    def _leave_late(self, future: Pending[Any]) -> None:
        """Leave an answer that comes too late: a lease in it is given back when it comes."""
        if self._coordinator is None:  # a handler has left the manager
            return
        self._late = future
        self._submitted.append(future)
        self._submit(Coordinator.release_late, future)

    def together(self, question: Callable[[], Any]) -> Answer:
        """Call ``question`` at rank 0; every rank gets the answer and the news (collective)."""
        answer = Answer()
        if self._coordinator is not None:
            try:
                answer = Answer(question(), update=self.collect())
            except BaseException as error:  # the other ranks wait for the broadcast
                if self._coordinator is None:  # a handler has left the manager
                    raise
                answer = replace(answer_of(error), update=self.collect())
        return share_answer(self.transport, answer)

    def request(self, request: SaveRequest) -> AttemptId:
        """At rank 0: ask for a save. One whose answer is not taken fails once the disk answers."""
        try:
            return self.ask(Coordinator.request, request)
        except BaseException as error:
            taken = isinstance(error, Exception) and not isinstance(error, DeadlineExceeded)
            if not taken and self._coordinator is not None:  # else a handler has left the manager
                self._late = self._submit(Coordinator.forget_request)
            raise

    def exchange(self, outbox: Sequence[Event]) -> Update:
        """Send every rank's reports to the coordinator, and its news to every rank (collective)."""
        gathered = self.transport.gather(list(outbox))
        events = [event for events in gathered or () for event in events]
        update = Update()
        if gathered is not None:
            if events:
                self.on_reports(events)
                self._submit(Coordinator.report, events)
            update = self.collect()
        shared: Update = self.transport.broadcast(update)
        return shared

    def report(self, events: Sequence[Event]) -> None:
        """At rank 0: report, from any thread. An error ends the coordinator, and ``poll`` raises it."""
        coordinator, executor = self._coordinator, self._executor
        if coordinator is not None and executor is not None:
            self.on_reports(events)
            executor.submit(partial(coordinator.report, events))

    def job_ended(self) -> None:
        """At rank 0: tell that a job has ended, for which a step may have stayed; from any thread."""
        coordinator, executor = self._coordinator, self._executor
        if coordinator is not None and executor is not None:
            with suppress(queue.Full):  # the next save applies retention
                executor.submit(coordinator.job_ended)

    def give_back(self, value: Any) -> None:
        """At rank 0: give back the lease in an answer that its asker will not see."""
        if self._coordinator is not None and isinstance(value, Located):
            self._submit(Coordinator.release, value.lease)

    def work_in_background(self) -> None:
        """Let the idle coordinator retry commands, expire leases and empty the trash."""
        coordinator = self._coordinator
        if self._submitted:
            self._submitted = [f for f in self._submitted if not f.done()]
        if coordinator is None or self._submitted or coordinator.fatal is not None:
            return
        if coordinator.wants_tick():
            self._submit(Coordinator.tick)

    @property
    def unanswered(self) -> bool:
        """True at rank 0 if the answer to a question has not been taken."""
        return self._asking or self._late is not None

    @property
    def has_news(self) -> bool:
        """True at rank 0 if there is news for an exchange."""
        if self._coordinator is None:
            return False
        ended = self._coordinator.fatal is not None and not self.fatal_taken
        answered = self._late is not None and self._late.done()
        return ended or answered or self._coordinator.news.has(self.taken)

    def collect(self) -> Update:
        """At rank 0: the coordinator's untaken news, and the error that ended it."""
        assert self._coordinator is not None
        for future in [f for f in self._submitted if f.done()]:
            self._submitted.remove(future)
            error = future.exception()
            if error is not None:
                said = f"the coordinator failed: {describe(error)}"
                say(log.error, "coordinator_error", said, error=describe(error))
        late = self._late  # checked before the news are read, which include its news then
        awaiting = late is not None and not late.done()
        self._coordinator.news.forget(self.taken)
        return Update(self._coordinator.news.since(self.taken), self._coordinator.fatal, awaiting)

    def catch_up(self) -> None:
        """At rank 0: treat an interrupted question as one that is answered late."""
        if self._coordinator is not None and self._asking and self._late is None:
            self._late = self._submit(Coordinator.nothing)
        self._asking = False

    def took(self, update: Update) -> None:
        """Note that this rank has taken an update, and the answer that it came with."""
        self.fatal_taken = self.fatal_taken or update.fatal is not None
        if not update.awaiting:
            self._late = None
        self._asking = False

    def _submit(
        self,
        work: Callable[Concatenate[Coordinator, P], None],
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> Pending[None]:
        assert self._coordinator is not None and self._executor is not None
        call = partial(work, self._coordinator, *arguments, **keywords)
        future = self._executor.submit(call)
        self._submitted.append(future)
        return future


def _no_display(events: Sequence[Event]) -> None:
    """Nothing is shown of them."""


def _serve_requests_of(coordinator: weakref.ref[Coordinator]) -> None:
    """Serve operator requests on the coordinator's thread, also while the trainer computes."""
    served = coordinator()
    if served is not None:
        served.serve_requests()


def share_answer(transport: Transport, answer: Answer) -> Answer:
    """Give the first rank's answer to every rank, and return it (collective)."""
    value = answer.value.for_others() if isinstance(answer.value, Accepted) else answer.value
    shared: Answer = transport.broadcast(replace(answer, value=value, interruption=None))
    return shared if transport.rank else answer


def first_problem(transport: Transport, problem: str) -> str:
    """The first rank's problem that is not "", the same on every rank (collective)."""
    gathered = transport.gather(problem)
    return str(transport.broadcast(next((p for p in gathered or () if p), "")))


def answer_of(error: BaseException) -> Answer:
    """The answer to a question that raised ``error``: an interrupt is one of the first rank."""
    if isinstance(error, Exception):
        return Answer(error=typed(error))
    interrupted = RankInterrupted(f"rank 0 was interrupted: {describe(error)}", rank=0)
    return Answer(error=interrupted, interruption=error)


def carried(
    work: Callable[P, object], *arguments: P.args, **keywords: P.kwargs
) -> CkptFsmError | None:
    """Call ``work``. Returns its error for the next exchange: the other ranks must not wait."""
    try:
        work(*arguments, **keywords)
    except Exception as error:
        return typed(error)
    return None


def typed(error: BaseException) -> CkptFsmError:
    """``error`` as a ``CkptFsmError``, so that it can be sent to every rank."""
    if isinstance(error, CkptFsmError):
        return error
    if isinstance(error, OSError):
        return storage_error(error, "open")
    return CkptFsmError(describe(error))
