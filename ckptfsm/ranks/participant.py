"""This rank's side of the protocol: rounds with the other ranks, and the news that come back.

All ranks run a round at the same points: one tiny exchange ("has any rank news?"), then a full one
if so. In the full exchange all reports go to the coordinator, and all news come back, the same on
every rank and in the same order.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar, cast

from ckptfsm.adapters.notices import say, warn_caller
from ckptfsm.adapters.signals import OneCall
from ckptfsm.coordinator.coordinator import Coordinator
from ckptfsm.core.backoff import pauses
from ckptfsm.core.config import CheckpointConfig
from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.errors import (
    CkptFsmError,
    ConfigError,
    DeadlineExceeded,
    ManagerClosed,
    NoRoom,
    PollMissingWarning,
    RankFailed,
    RecoveryWarning,
    SaveFailed,
    SaveFailedWarning,
    SaveRefused,
    ShardMissing,
    WriterDied,
)
from ckptfsm.core.events import UNUSABLE
from ckptfsm.core.lifecycle import IN_FLIGHT, State
from ckptfsm.core.notes import Meter, Note, Refused, Stalled, Unpolled
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.core.ports import Draft, Ports, Storage
from ckptfsm.core.requests import (
    Accepted,
    Blocked,
    FinalizersDue,
    News,
    NothingInFlight,
    NumberedNews,
)
from ckptfsm.ranks.allocation import Allocation
from ckptfsm.ranks.coordinator_client import Answer, CoordinatorClient, Update
from ckptfsm.ranks.handle import SaveHandle, View, facts_of, named
from ckptfsm.ranks.progress import ProgressDisplay
from ckptfsm.ranks.reports import RankReports
from ckptfsm.ranks.share import Share

log = logging.getLogger("ckptfsm")
P = ParamSpec("P")
T = TypeVar("T")
Hook = Callable[[TransitionRecord], None]
_NEWS, _SAVE_DUE, _PREEMPTED, _ENDING, _OTHERS = range(5)
_KEPT = (State.SHARDS_WRITTEN, State.FINALIZED, State.TRACKED)  # a restart completes these
_LEAVE_S = 0.5  # the least time for the disk to answer, after any wait for the writer


class Participant:
    """A participant, see the module. ``view`` is the root as every rank sees it.

    Attributes: ``save_due`` and ``preempted`` are agreed in an exchange, ``save_asked`` is this
    rank's wish. ``raise_failures`` will raise ``failures``.
    """

    def __init__(
        self,
        ports: Ports,
        config: CheckpointConfig,
        client: CoordinatorClient,
        calls: OneCall,
        hooks: Sequence[Hook],
        share: Share,
        writers: int,
    ) -> None:
        self.calls = calls
        self.view = View()
        self._closed = False
        self._process = os.getpid()
        self.save_due = False
        self.save_asked = False
        self.preempted = False
        self.failures: dict[AttemptId | None, CkptFsmError] = {}
        self.retry_error: CkptFsmError | None = None  # of a save that is to be retried
        self._warnings: list[Warning] = []
        self.reports = RankReports(ports.transport, config, share, writers)
        self.display = ProgressDisplay(config.progress, ports.transport.rank, ports.clock)
        self.allocation = Allocation(ports.clock, config.end_of_allocation)
        self._share = share
        self._ports = ports
        self._config = config
        self._client = client
        self._hooks = tuple(hooks)
        self._meters = tuple(hook for hook in hooks if isinstance(hook, Meter))
        self._rank, self._writers = ports.transport.rank, writers
        self._alone = ports.transport.world_size == 1
        self._untaken: list[NumberedNews] = []
        self._handles: dict[AttemptId, SaveHandle] = {}
        # Attempts that failed, and steps without room for a save, since the last tracked save.
        self._lost: set[AttemptId | int] = set()
        self._interval_s, self._next_timed_save = config.save_interval_s, 0.0
        self._unpolled_since: int | None = None  # the step of the save without a poll
        # Parts whose make runs on other ranks only, in the newest save.
        self._lone_makes: list[tuple[AttemptId, PartSpec]] = []

    @property
    def is_copy(self) -> bool:
        """True in any process that the trainer's code forks."""
        return os.getpid() != self._process

    @property
    def closed(self) -> bool:
        """True once the root was given back, and in any process that the trainer's code forks."""
        return self._closed or self.is_copy

    def end(self) -> None:
        """Note that the root was given back."""
        self._closed = self.calls.left = True
        if self._share.agent is not None:
            self._share.agent.end()
        self.display.leave()

    def take_opening(self, view: View, update: Update) -> None:
        """Note the content of an opened root, and take the news of the opening."""
        self.view = view
        self._next_timed_save = self._ports.clock.monotonic() + (self._interval_s or 0)
        self._client.took(update)
        for number, news in update.news:
            self._client.taken = number + 1
            if isinstance(news, TransitionRecord):
                self._call_hooks(news)

    def abandon(self) -> str:
        """Wait for this rank's writer, without the other ranks, then let its save be finished.

        Bounded by ``exit_timeout_s``. Returns a description of the lost save, or "".
        """
        busy, began = self.view.in_flight, self._ports.clock.monotonic()
        timeout_s = self._config.exit_timeout_s
        problem = self.reports.await_writer(timeout_s)
        if busy is not None and self._rank == 0 and not problem:
            left_s = max(0.0, began + timeout_s - self._ports.clock.monotonic())
            known, state = self._client.complete_from_receipts(busy, max(left_s, _LEAVE_S))
            if not known:
                problem = "whether it was finished is not known: the next start decides"
            elif state not in _KEPT:
                problem = "is lost: not all of its shards were durable"
        self._share.forget()
        if busy is None or not problem:
            return ""
        return f"step {busy.step} was in flight when its manager was left, and {problem}"

    # ------------------------------------------------------------------------------------- rounds

    def drive(
        self,
        finished: Callable[[View], bool],
        timeout_s: float,
        waiting_for: str,
        *,
        since: float | None = None,
    ) -> None:
        """Run rounds until ``finished``.

        The deadline is agreed, so all ranks stop waiting together. A wait that was begun earlier gives
        the monotonic seconds of its beginning as ``since``.

        An interrupt is agreed too: its rank raises it, the others ``RankInterrupted``. Raises
        ``ManagerClosed`` if the root was given back before that.
        """
        self.refuse_inside_a_hook()
        began = self._ports.clock.monotonic() if since is None else since
        deadline, during = began + timeout_s, f"waited for {waiting_for}"
        for pause in pauses():
            if finished(self.view):
                return
            if self.closed:
                raise ManagerClosed(f"the manager was closed before {waiting_for} finished")
            late = self._ports.clock.monotonic() >= deadline
            if any(self.calls.agree(self.exchange, [late], during)):
                raise self._too_late(timeout_s, waiting_for)
            self._client.work_in_background()
            self._ports.clock.sleep(pause)

    def _caught_up(self, view: View) -> bool:
        orphans = (self.reports.is_orphan(of, state, view) for of, state in view.unfinished.items())
        return not any(orphans) and not self._client.unanswered

    def _too_late(self, timeout_s: float, waiting_for: str) -> DeadlineExceeded:
        """The error of a wait that ran out, with the disk's error if that blocks a save."""
        text, facts = f"{waiting_for} did not finish in time", {}
        of = max(self.view.blocked, default=None)
        if of is not None:
            reason = self.view.blocked[of]
            text, facts = f"{text}: step {of.step} is blocked: {named(reason)}", facts_of(reason)
        return DeadlineExceeded(text, timeout_s=timeout_s, waiting_for=waiting_for, **facts)

    def settle(self, handle: SaveHandle, timeout_s: float | None = None) -> None:
        """Run rounds until a save is tracked or has failed."""
        limit = timeout_s if timeout_s is not None else self._config.busy_timeout_s
        self.drive(partial(handle_done, handle), limit, f"the save of step {handle.step}")

    def wait_for(self, handle: SaveHandle, timeout_s: float | None) -> None:
        """Wait until a save is done; its error is left for the caller, in the handle."""
        with self.calls.running():
            self.settle(handle, timeout_s)
            if handle.exception() is not None:
                raised = handle.exception()  # raised by the handle
                self.failures = {
                    of: error
                    for of, error in self.failures.items()
                    if error is not raised and of != handle.attempt
                }

    def exchange(self, others: Sequence[bool] = ()) -> Sequence[bool]:
        """Make a cheap exchange, and a full one if any rank has news (collective).

        ``others``: more flags of this rank. Returns which of them any rank has set.
        """
        now = self._ports.clock.monotonic()
        self._client.catch_up()
        self.reports.note_due(self.view)
        flags = [
            bool(self.reports.outbox) or self._client.has_news,
            self._rank == 0 and self._interval_s is not None and now >= self._next_timed_save,
            self.save_asked,
            self.allocation.ends_soon(idle=self.view.quiet),
            *others,
        ]
        agreed = self._agree_on(flags)
        if agreed[_PREEMPTED]:
            self.save_asked, self.preempted = False, True
        if agreed[_ENDING]:
            self.allocation.agreed()
            self.preempted = True
        if agreed[_SAVE_DUE] or agreed[_PREEMPTED] or agreed[_ENDING]:
            self.save_due = True
            self._next_timed_save = now + (self._interval_s or 0)
        if agreed[_NEWS]:
            sent = list(self.reports.outbox)
            update = self._client.exchange(sent)
            self.reports.taken(sent)
            self.take_update(update)
        self.display.look()
        return agreed[_OTHERS:]

    def poll(self, *, due: bool) -> None:
        """Make an exchange if one is ``due`` or needed, and raise failures (collective)."""
        self._unpolled_since = None
        # A lone rank may have the remains of an interrupted call.
        left = self._alone and (self._client.has_news or self._client.unanswered)
        if due or left or not self.view.quiet:
            with self.calls.running():
                self.exchange()
        self._client.work_in_background()
        self.raise_failures()

    def ask(
        self,
        work: Callable[Concatenate[Coordinator, P], T],
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> T:
        """Call ``work`` of the coordinator (collective): take the news, then raise on every rank."""
        return cast("T", self.together(partial(self._client.ask, work, *arguments, **keywords)))

    def together(self, question: Callable[[], object]) -> object:
        """The answer to a question of rank 0, asked on its thread (collective). See ``ask``."""
        answer = Answer()
        with self.calls.running():
            try:
                answer = self._client.together(question)
                self.take_update(answer.update)
                if answer.problem is not None:
                    raise answer.problem
            except BaseException:  # a Ctrl-C
                self._client.give_back(answer.value)
                raise
            return answer.value

    def _agree_on(self, flags: Sequence[bool]) -> list[bool]:
        """Agree. A rank that does not answer may be in a function of the trainer's: name that."""
        try:
            return self._ports.transport.any_flags(flags)
        except RankFailed as error:
            waits = [
                f"rank {spec.first_rank} may be in make of part {spec.name!r}"
                for of, spec in self._lone_makes
                if self.view.unfinished.get(of) is State.REQUESTED
            ]
            if not waits:
                raise
            said = f"{error.message}; {', '.join(waits)}: one that waits for other ranks needs"
            raise RankFailed(f"{said} FileTree(make, every_rank=True)", **error.facts) from error

    def take_update(self, update: Update) -> None:
        """Act on the news. An interrupt leaves the rest for later; one of them may be taken twice."""
        known = self._untaken[-1][0] if self._untaken else self._client.taken - 1
        self._untaken += [item for item in update.news if item[0] > known]
        self.calls.taking_news = True
        try:
            while self._untaken:
                number, news = self._untaken[0]
                if number >= self._client.taken:
                    self._take(news, ended=update.fatal is not None)
                    self._client.taken = number + 1
                del self._untaken[0]
                if isinstance(news, TransitionRecord):
                    self._call_hooks(news)
            self.view.awaiting = update.awaiting
            if update.fatal is not None and not self._client.fatal_taken:
                self._end(update.fatal)
            self._client.took(update)
        finally:
            self.calls.taking_news = False

    def refuse_inside_a_hook(self) -> None:
        """Raise ``ConfigError`` in a call from a hook or a finalizer."""
        if self.calls.in_hook:  # it would wait for news that only the hook's caller can take
            raise ConfigError("a hook or a finalizer may not call its manager: do it after poll()")

    def _take(self, news: News, *, ended: bool) -> None:
        """Act on a piece of news; again after an interrupt. ``ended``: the coordinator is gone."""
        if isinstance(news, FinalizersDue):
            if not ended:  # for example fenced
                self.reports.run_finalizers(news.of)
            return
        if isinstance(news, NothingInFlight):
            self.view.retention_due = False
            return
        if isinstance(news, Blocked):
            self._on_blocked(news)
            return
        self.view.apply(news)
        self.display.take(news)
        handle = self._handles.get(news.of)
        if handle is not None:
            handle.move(news.dest)
        if news.source in (State.TRACKED, State.PRUNABLE) and news.reason in UNUSABLE:
            text = f"step {news.step} is {news.reason}, and out of use now: {news.detail}"
            say(log.warning, "checkpoint_damaged", text, step=news.step, what=news.detail)
            self.warn_later(RecoveryWarning(text))
        if news.dest is State.FAILED:
            self.reports.end_writer(news.of)
            self._end_failed(news)
        elif news.dest is State.QUARANTINED and handle is not None:
            self._share.forget()  # withdrawn before it was tracked
            self._end_failed(news)
        elif news.acknowledges:
            self._on_tracked(news)

    def _end(self, fatal: CkptFsmError) -> None:
        """Note that the coordinator is gone: no more news will come."""
        self.failures[None] = fatal
        self.display.leave()
        for handle in self._handles.values():
            handle.fail(fatal)
        self._share.drop()
        self.view = View(self.view.steps)

    def _on_blocked(self, news: Blocked) -> None:
        """Keep the reason of a block. Warn of a save in flight: a person may repair the disk in time."""
        self.view.blocked[news.of] = news.error
        handle = self._handles.get(news.of)
        if handle is not None:
            handle.blocked_by = news.error
        if self.view.unfinished.get(news.of) in IN_FLIGHT:
            text = f"step {news.of.step} is published, and waits for the disk: {named(news.error)}"
            self.warn_later(SaveFailedWarning(f"{text}; it is retried"))

    def _on_tracked(self, record: TransitionRecord) -> None:
        self.allocation.save_tracked()
        self.retry_error = None
        self._lost.clear()
        self._share.forget()
        self._handles.pop(record.of, None)

    def _end_failed(self, record: TransitionRecord) -> None:
        """Fail the handle, and apply ``on_failure``."""
        error = failure_of(record)
        handle = self._handles.get(record.of)
        if handle is None:
            return
        handle.fail(error)
        if not self._goes_on(record.of, error):
            self.failures[record.of] = error
        self._handles.pop(record.of, None)

    def _goes_on(self, lost: AttemptId | int, error: CkptFsmError) -> bool:
        """Apply ``on_failure`` to a lost save. False if its error is to be raised."""
        self._lost.add(lost)
        if len(self._lost) <= self._config.saves_again:
            self.save_due, self.retry_error = True, error
            said = f"{error}: it is tried again (try {len(self._lost)})"
            say(log.warning, "save_failed", said, error=str(error), again=len(self._lost))
            return True
        if self._config.on_failure == "warn":
            self.warn_later(SaveFailedWarning(str(error)))
            return True
        return False

    def take_refusal(self, refused: BaseException) -> None:
        """Raise the refusal of a save, unless it has no room and ``on_failure`` lets training go on."""
        if isinstance(refused, CkptFsmError):
            self.notify_meters(Refused(refused.kind))
        if not isinstance(refused, NoRoom):
            raise refused
        if not self._goes_on(refused.facts["step"], refused):
            raise refused
        self.save_due = self.retry_error is refused
        self.emit_warnings()

    def _call_hooks(self, record: TransitionRecord) -> None:
        for hook in self._hooks:
            try:
                hook(record)
            except Exception:  # a user's hook: training goes on (F24)
                dest = record.dest.value
                said = f"step {record.step}: a hook failed at {dest}"
                say(log.exception, "hook_failed", said, step=record.step, dest=dest)

    def notify_meters(self, note: Note) -> None:
        """Give a note to the hooks that take notes (local)."""
        if self.closed:
            return
        in_hook, self.calls.taking_news = self.calls.taking_news, True
        try:
            for meter in self._meters:
                try:
                    meter.note(note)
                except Exception:  # as of a record: training goes on
                    name = type(note).__name__
                    say(log.exception, "hook_failed", f"a hook failed at {note}", note=name)
        finally:
            self.calls.taking_news = in_hook

    def warn_later(self, note: Warning) -> None:
        """Keep a warning for the next point that every rank reaches."""
        self._warnings.append(note)

    def raise_failures(self) -> None:
        """Warn, then raise the first failure, at a point that every rank reaches."""
        self.emit_warnings()
        if self.failures:
            error = next(iter(self.failures.values()))
            self.failures.clear()
            raise error

    def emit_warnings(self) -> None:
        """Emit the kept warnings. No collective may follow: a filter may turn one into an error."""
        warnings, self._warnings = self._warnings, []
        for warning in warnings:
            warn_caller(warning)

    # -------------------------------------------------------------------------------------- a save

    def await_previous_save(self, step: int) -> bool:
        """Wait for the save in flight, or refuse; False: skip this one. The same on every rank."""
        self.watch_polls(step)
        if self._alone and not self._caught_up(self.view):  # the remains of an interrupted call
            effect_s = self._config.effect_timeout_s
            self.drive(self._caught_up, effect_s, "an earlier answer of the disk")
        self.raise_failures()
        busy = self.view.in_flight
        if busy is None:
            return True
        if self._config.on_busy == "skip":
            said = f"step {step}: not saved, because step {busy.step} is still in flight"
            say(log.warning, "save_skipped", said, step=step, in_flight=busy.step)
            return False
        if self._config.on_busy == "raise":
            raise self._refusal(step, busy)
        self.wait_unless_blocked(_no_save_in_flight, f"the save of step {busy.step}")
        self.raise_failures()
        busy = self.view.in_flight
        if busy is None:
            return True
        if self._config.on_failure != "warn":
            raise self._refusal(step, busy)
        said = f"the save of step {step} was skipped: {self._refusal(step, busy).message}"
        say(log.warning, "save_skipped", said, step=step, in_flight=busy.step)
        warn_caller(SaveFailedWarning(said))
        return False

    def wait_unless_blocked(self, finished: Callable[[View], bool], waiting_for: str) -> None:
        """Wait for a save. If the disk blocks it, retry once, then wait no longer."""
        over, limit = partial(_finished_or_blocked, finished), self._config.busy_timeout_s
        self.wait_and_retry(over, finished, limit, waiting_for)

    def wait_and_retry(
        self,
        over: Callable[[View], bool],
        finished: Callable[[View], bool],
        timeout_s: float,
        waiting_for: str,
    ) -> None:
        """Wait until ``over``; unless ``finished`` then, retry and wait again, by the same deadline."""
        began = self._ports.clock.monotonic()
        self.drive(over, timeout_s, waiting_for)
        if not finished(self.view):
            self.ask(Coordinator.retry)
            self.drive(over, timeout_s, waiting_for, since=began)

    def _refusal(self, step: int, busy: AttemptId) -> SaveRefused:
        """The refusal of a save while another one is in flight, and perhaps blocked."""
        reason, text = self.view.blocked_by, f"step {busy.step} is still in flight"
        if reason is None:
            return SaveRefused(text, step=step, in_flight=busy.step)
        text = f"{text}, and blocked: {named(reason)}"
        return SaveRefused(text, step=step, in_flight=busy.step, **facts_of(reason))

    @contextlib.contextmanager
    def stalling(self, step: int) -> Iterator[None]:
        """A block in which the trainer waits for the save of ``step``: meters are told how long."""
        began = self._ports.clock.monotonic()
        try:
            yield
        finally:
            self.notify_meters(Stalled(step, self._ports.clock.monotonic() - began))

    def watch_polls(self, step: int) -> None:
        """Warn of a save without polls, which never gets tracked, with its step (F28)."""
        since, busy = self._unpolled_since, self.view.in_flight
        if since is None or busy is None or not isinstance(step, int):
            return
        if step - since >= self._config.poll_warning_steps:
            self._unpolled_since = step
            agent = self._share.agent
            lost = (
                "its failure would not be seen, and foreign requests wait"
                if agent is not None and agent.alive
                else "it cannot be tracked without"
            )
            self.notify_meters(Unpolled())
            warn_caller(
                PollMissingWarning(
                    f"the save of step {busy.step} is in flight and poll() was not called for "
                    f"{step - since} steps: {lost}"
                )
            )

    def request(self, question: Callable[[], Accepted]) -> Accepted | None:
        """Ask for a save at rank 0, for all ranks (collective). None if it is to be skipped.

        Raises its refusal.
        """
        answer = self._client.together(question)
        accepted: Accepted | None = answer.value
        if accepted is not None:
            self.expect(accepted.of)
        self.take_update(answer.update)
        if answer.problem is not None:
            self.take_refusal(answer.problem)
        return accepted

    def start_save(self, storage: Storage, accepted: Accepted, draft: Draft) -> SaveHandle:
        """Stage this rank's share of an accepted save, and launch its writer."""
        self.save_due, self._unpolled_since = False, accepted.of.step
        handle = self.expect(accepted.of)
        self._lone_makes = [
            (accepted.of, spec)
            for spec in accepted.parts
            if spec.format.by_path and spec.ranks is not None and self._rank not in spec.ranks
        ]
        self.display.start(accepted, self._writers, self._share.progress)
        self.reports.launch_share(storage, accepted, draft, self.calls.check_exit)
        return handle

    def expect(self, of: AttemptId) -> SaveHandle:
        """The handle of an accepted save: from now on every rank raises its failure."""
        handle = self._handles.get(of)
        if handle is None:
            handle = SaveHandle(
                of.step, State.REQUESTED, of, _wait=self.wait_for, _progress=self._share.progress
            )
            self._handles[of] = handle
        return handle


def handle_done(handle: SaveHandle, view: View) -> bool:
    """True once the save is done and retention was applied, if no other attempt is cleaned up."""
    failed = handle.exception() is not None
    return handle.done and (failed or not view.retention_due or bool(view.unfinished))


def _finished_or_blocked(finished: Callable[[View], bool], view: View) -> bool:
    return finished(view) or view.blocked_by is not None


def _no_save_in_flight(view: View) -> bool:
    return view.in_flight is None


def nothing_unfinished(view: View) -> bool:
    return view.quiet


def failure_of(record: TransitionRecord) -> CkptFsmError:
    """The error that a ``failed`` record stands for; ``SaveRefused`` if it is about a value."""
    kinds: dict[str, type[CkptFsmError]] = {
        WriterDied.kind: WriterDied,
        ShardMissing.kind: ShardMissing,
        SaveRefused.kind: SaveRefused,
    }
    return kinds.get(record.reason, SaveFailed)(
        f"the save of step {record.step} failed ({record.reason}): {record.detail}",
        step=record.step,
        attempt=str(record.of),
        reason=record.reason,
        rank=record.rank,
    )
