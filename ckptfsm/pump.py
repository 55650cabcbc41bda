"""One rank's share of the saves in flight: its writer, its reports, and the news that come back.

Every rank pumps at the same points. A round is one tiny exchange ("has anybody news?"), and a full one
if so: all reports go to the coordinator, all news come back, the same on every rank in the same order.

Rules:
* A local error is never raised between collectives: it is a report, and comes back to every rank.
* What there is to raise or to warn of waits for a point that every rank reaches.
* News are taken one after the other: what is called meanwhile (a hook) cannot take any.
* The writer of a failed attempt is killed; only one that is certainly gone is reported gone.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptfsm.clock import pauses
from ckptfsm.config import CheckpointConfig
from ckptfsm.documents import TransitionRecord
from ckptfsm.engine import FinalizersDue, News, Settled
from ckptfsm.errors import (
    CkptFsmError,
    ConfigError,
    DeadlineExceeded,
    ManagerClosed,
    RecoveryWarning,
    SaveFailed,
    SaveFailedWarning,
    ShardMissing,
    WriterDied,
    describe,
)
from ckptfsm.files import around, at_path
from ckptfsm.handle import SaveHandle, View
from ckptfsm.interrupts import HandlersWait
from ckptfsm.layout import LAYOUTS
from ckptfsm.lifecycle import State
from ckptfsm.link import Answer, Link, Update
from ckptfsm.messages import (
    UNUSABLE,
    AttemptId,
    Event,
    Failed,
    FinalizersRan,
    WriterForked,
    WriterGone,
)
from ckptfsm.notices import say, warn_caller
from ckptfsm.ports import Draft, Ports, RankJob, Storage
from ckptfsm.proposal import Accepted
from ckptfsm.writer import RankWriter

log = logging.getLogger("ckptfsm")
Hook = Callable[[TransitionRecord], None]
_NEWS, _SAVE_DUE, _PREEMPTED, _EXPIRED = range(4)


class Pump:
    """See the module. ``view`` is the root as every rank sees it.

    Attributes: ``save_due`` and ``preempted`` are agreed in an
    exchange, ``save_asked`` is this rank's wish; ``failures`` and ``notes`` are what ``raise_failures``
    will raise and warn of.
    """

    def __init__(
        self,
        ports: Ports,
        config: CheckpointConfig,
        link: Link,
        hooks: Sequence[Hook],
        writers: int,
    ) -> None:
        self.view = View()
        self._closed = False
        self._process = os.getpid()
        self.save_due = False
        self.save_asked = False
        self.preempted = False
        self.failures: list[CkptFsmError] = []
        self.owed: SaveFailed | None = None  # of a save that is to be tried again
        self.notes: list[Warning] = []
        self.writer: RankWriter | None = None
        self.source: Callable[[], None] | None = None  # where reports of workers come from
        self._ports = ports
        self._config = config
        self._link = link
        self._hooks = tuple(hooks)
        self._rank, self._world_size = ports.transport.rank, writers
        self._inbox: deque[News] = deque()
        self._fatal: CkptFsmError | None = None
        self._taking = False
        self._outbox: list[Event] = []
        self._handles: dict[AttemptId, SaveHandle] = {}
        self._dying: list[RankWriter] = []
        self._draft: Draft | None = None
        self._bystander: AttemptId | None = None  # an attempt that this rank writes nothing of
        self._retries = 0
        self._next_timed_save = 0.0

    @property
    def closed(self) -> bool:
        """True once the root was given back, and in any process that the trainer's code forks."""
        return self._closed or os.getpid() != self._process

    def end(self) -> None:
        """The root was given back."""
        self._closed = True

    def begin(self, view: View, records: Sequence[TransitionRecord]) -> None:
        """The root is open: what it holds, and what opening it did."""
        self.view = view
        self._next_timed_save = self._ports.clock.monotonic() + (self._config.save_interval_s or 0)
        for record in records:
            self._call_hooks(record)

    def abandon(self) -> None:
        """A bounded wait for the own writer, without the other ranks."""
        timeout_s = self._config.exit_timeout_s
        if self.writer is not None and not self.writer.wait(timeout_s):
            self.writer.kill(timeout_s)
        self.writer = None

    # ------------------------------------------------------------------------------------- rounds

    def drive(self, finished: Callable[[View], bool], timeout_s: float, waiting_for: str) -> None:
        """Pump until ``finished``. The deadline is agreed, so all ranks stop waiting together.

        Raises ``ManagerClosed`` if the root was given back before that.
        """
        self.refuse_inside_a_hook()
        deadline = self._ports.clock.monotonic() + timeout_s
        pause = pauses()
        while not finished(self.view):
            if self.closed:
                raise ManagerClosed(f"the manager was closed before {waiting_for} finished")
            expired = self._ports.clock.monotonic() >= deadline
            if self.exchange(expired=expired):
                raise DeadlineExceeded(
                    f"{waiting_for} did not finish in time",
                    timeout_s=timeout_s,
                    waiting_for=waiting_for,
                )
            self._link.work_in_background()
            self._ports.clock.sleep(next(pause))

    def settle(self, handle: SaveHandle, timeout_s: float | None = None) -> None:
        """Pump until a save is tracked or has failed."""
        limit = timeout_s if timeout_s is not None else self._config.busy_timeout_s
        self.drive(HandleDone(handle), limit, f"the save of step {handle.step}")

    def wait_for(self, handle: SaveHandle, timeout_s: float | None) -> None:
        self.settle(handle, timeout_s)
        if handle.exception() is not None:
            raised = handle.exception()  # the caller gets it from the handle
            self.failures = [f for f in self.failures if f is not raised]

    def exchange(self, *, expired: bool) -> bool:
        """One cheap exchange; a full one if any rank has news. Returns the agreed ``expired``."""
        now = self._ports.clock.monotonic()
        self._bury()
        if self.source is not None:
            self.source()
        if self.writer is not None:
            self._outbox += self.writer.poll(now)
        flags = [
            bool(self._outbox) or self._link.has_news,
            self._timed_save_due(now),
            self.save_asked,
            expired,
        ]
        agreed = self._ports.transport.any_flags(flags)
        if agreed[_PREEMPTED]:
            self.save_asked, self.preempted = False, True
        if agreed[_SAVE_DUE] or agreed[_PREEMPTED]:
            self.save_due = True
            self._next_timed_save = now + (self._config.save_interval_s or 0)
        if agreed[_NEWS]:
            outbox, self._outbox = self._outbox, []
            try:
                update = self._link.exchange(outbox)
            except BaseException:  # sent again: the ledger takes a report once
                self._outbox = outbox + self._outbox
                raise
            self.take_update(update)
        return agreed[_EXPIRED]

    def report(self, event: Event) -> None:
        """Take the report of another process to the next exchange."""
        self._outbox.append(event)

    def _timed_save_due(self, now: float) -> bool:
        timed = self._rank == 0 and self._config.save_interval_s is not None
        return timed and now >= self._next_timed_save

    def take_update(self, update: Update) -> None:
        """What happened, on every rank in the same order. What an interrupt leaves comes next time."""
        self._inbox += update.news
        self._fatal = self._fatal or update.fatal
        self.view.awaiting = self.view.awaiting and not update.answered
        self._taking = True
        try:
            while self._inbox:
                self._take(self._inbox.popleft())
            if self._fatal is not None:
                fatal, self._fatal = self._fatal, None
                self._end(fatal)
        finally:
            self._taking = False

    def take_answer(self, answer: Answer) -> None:
        """The news that come with an answer. One that is late has its own, which must not be missed."""
        if isinstance(answer.error, DeadlineExceeded):
            self.view.awaiting = True
        self.take_update(answer.update)

    def refuse_inside_a_hook(self) -> None:
        """Raise ``ConfigError`` in a call that comes from a hook or a finalizer: it would wait for
        news that only the caller of the hook can take."""
        if self._taking:
            raise ConfigError("a hook or a finalizer may not call its manager: do it after poll()")

    def _take(self, news: News) -> None:
        if isinstance(news, FinalizersDue):
            if self._fatal is None:  # fenced, for one
                self._run_finalizers(news.of)
            return
        if isinstance(news, Settled):
            self.view.settling = False
            return
        self.view.apply(news)
        handle = self._handles.get(news.of)
        if handle is not None:
            handle.state = news.dest
        used = news.source in (State.TRACKED, State.PRUNABLE)
        if used and news.reason in UNUSABLE:
            self._say_unusable(news)
        if news.dest is State.FAILED:
            self._on_failed(news)
        elif news.dest is State.QUARANTINED and handle is not None:
            self._on_withdrawn(news)
        elif news.acknowledges:
            self._on_tracked(news)
        self._call_hooks(news)

    def _end(self, fatal: CkptFsmError) -> None:
        """The coordinator is gone: nothing more will come."""
        self.failures.append(fatal)
        for handle in self._handles.values():
            handle._error = handle._error or fatal
        if self.writer is not None:
            self._dying.append(self.writer)
            self.writer = self._draft = None
            self._bury()
        self.view = View(self.view.steps)

    def _say_unusable(self, record: TransitionRecord) -> None:
        """A person should know that an older step is used instead."""
        text = f"step {record.step} is {record.reason}, and out of use now: {record.detail}"
        say(log.warning, "checkpoint_damaged", text, step=record.step, what=record.detail)
        self.notes.append(RecoveryWarning(text))

    def _on_tracked(self, record: TransitionRecord) -> None:
        self._retries, self.owed = 0, None
        self.writer = self._draft = None
        self._handles.pop(record.of, None)

    def _on_failed(self, record: TransitionRecord) -> None:
        """End our own writer, and tell the coordinator so."""
        if self.writer is not None and self.writer.of == record.of:
            self._dying.append(self.writer)
            self.writer = self._draft = None
        elif record.of != self._bystander:
            self._outbox.append(WriterGone(record.of, self._rank))
        self._bury()
        self._settle_failure(record)

    def _on_withdrawn(self, record: TransitionRecord) -> None:
        """It was published, and not tracked after all: for the trainer it failed."""
        self.writer = self._draft = None
        self._settle_failure(record)

    def _settle_failure(self, record: TransitionRecord) -> None:
        """Tell the handle, and do what ``on_failure`` says."""
        error = failure_of(record)
        handle = self._handles.pop(record.of, None)
        if handle is None:
            return
        handle._error = error
        if self._retries < self._config.saves_again:
            self._retries += 1
            self.save_due, self.owed = True, error
            said = f"{error}: it is tried again (try {self._retries})"
            say(log.warning, "save_failed", said, error=str(error), again=self._retries)
        elif self._config.on_failure == "warn":
            self.notes.append(SaveFailedWarning(str(error)))
        else:
            self.failures.append(error)

    def _bury(self) -> None:
        """Kill writers of failed attempts; only one that is certainly gone is reported so."""
        for writer in list(self._dying):
            if writer.kill(timeout_s=0.0):
                self._dying.remove(writer)
                self._outbox.append(WriterGone(writer.of, self._rank))

    def _run_finalizers(self, of: AttemptId) -> None:
        """Foreign finalizers hold collectives: here all ranks run them at the same point, once."""
        error = ""
        draft, writer = self._draft, self.writer
        if draft is None or writer is None or writer.of != of:
            self._outbox.append(FinalizersRan(of, self._rank, "this rank has no such save"))
            return
        for name, finalize in draft.finalizers():
            try:
                finalize(writer.payloads.get(name))
            except (KeyboardInterrupt, SystemExit):
                self._outbox.append(FinalizersRan(of, self._rank, f"{name}: interrupted"))
                raise
            except BaseException as problem:  # torch's CheckpointException is one
                error = f"{name}: {describe(problem)}"
            if self._ports.transport.any_flags([bool(error)])[0]:
                break  # or the other ranks would wait in the next part's collectives
        self._outbox.append(FinalizersRan(of, self._rank, error))

    def _call_hooks(self, record: TransitionRecord) -> None:
        for hook in self._hooks:
            try:
                hook(record)
            except Exception:  # a user's hook: training and the machine go on (F24)
                dest = record.dest.value
                said = f"step {record.step}: a hook failed at {dest}"
                say(log.exception, "hook_failed", said, step=record.step, dest=dest)

    def raise_failures(self) -> None:
        """At a point that every rank reaches: what there is to say, then what there is to raise."""
        self.say_notes()
        if self.failures:
            failures, self.failures = self.failures, []
            raise failures[0]

    def say_notes(self) -> None:
        """Warnings wait for a point without collectives after it: they may be made errors."""
        notes, self.notes = self.notes, []
        for note in notes:
            warn_caller(note)

    # -------------------------------------------------------------------------------------- a save

    def begin_writing(
        self,
        storage: Storage,
        accepted: Accepted,
        draft: Draft,
    ) -> SaveHandle:
        """Stage and fork. An error here is carried: the attempt fails at the next exchange.

        A rank that writes none of the parts has no writer.
        """
        of, specs = accepted.of, accepted.of_rank(self._rank)
        self.save_due = False
        location = LAYOUTS[self._config.layout].working_dir(of, accepted.in_place)
        self._bystander = None if specs else of
        if not specs:
            self._ports.driver.accept()
            return self._handle_of(of)
        try:
            with at_path(storage, location, specs) as path:
                staged = draft.stage(path, specs, accepted.planned)
            parts = tuple(around(job, accepted.parts) for job in staged)
            optional = frozenset(spec.name for spec in specs if spec.optional)
            job = RankJob(of, self._rank, self._world_size, location, parts, optional)
            deadline = self._ports.clock.monotonic() + self._config.writer_timeout_s
            with HandlersWait():
                self.writer = RankWriter(storage, job, launch=self._ports.launch, deadline=deadline)
            draft.let_go()
            self._draft = draft
            self._ports.driver.accept()
            self._outbox.append(WriterForked(of, self._rank, self._world_size))
        except BaseException as error:  # also torch's; the others must not wait for this rank
            self._ports.driver.refuse()
            draft.let_go()
            self.give_up(of, error)
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
        return self._handle_of(of)

    def _handle_of(self, of: AttemptId) -> SaveHandle:
        fresh = SaveHandle(of.step, State.REQUESTED, of, None, self.wait_for)
        return self._handles.setdefault(of, fresh)

    def give_up(self, of: AttemptId, error: BaseException) -> None:
        """This rank will not write what was accepted: the attempt fails at the next exchange."""
        self._handle_of(of)  # its failure comes out here as on the other ranks
        detail = f"rank {self._rank}: {describe(error)}"
        said = f"step {of.step}: the writer cannot start: {detail}"
        say(log.error, "fork_failed", said, exc_info=error, step=of.step, rank=self._rank)
        self._outbox.append(Failed(of, "fork_failed", detail, self._rank))


@dataclass(frozen=True, slots=True)
class HandleDone:
    handle: SaveHandle

    def __call__(self, view: View) -> bool:
        """Also let retention have its turn, unless another attempt is still being cleaned up."""
        failed = self.handle.exception() is not None
        return self.handle.done and (failed or not view.settling or bool(view.unsettled))


def failure_of(record: TransitionRecord) -> SaveFailed:
    """The error that a ``failed`` record stands for."""
    kinds: dict[str, type[SaveFailed]] = {
        WriterDied.kind: WriterDied,
        ShardMissing.kind: ShardMissing,
    }
    return kinds.get(record.reason, SaveFailed)(
        f"the save of step {record.step} failed ({record.reason}): {record.detail}",
        step=record.step,
        attempt=str(record.of),
        reason=record.reason,
        rank=record.rank,
    )
