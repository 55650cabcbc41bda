"""One rank's end of the library: what a trainer calls, in lockstep with the other ranks.

Every public method is collective unless it says otherwise: all ranks call it at the same point. The
coordinator lives in rank 0; other ranks own a writer and report what it did.

Rules:
* A local error is never raised between collectives: it is carried to the next exchange and comes out
  on every rank, so nobody is left waiting (I10).
* ``save`` begins with one exchange: every rank's draft goes to the coordinator, an accepted attempt or
  a refusal comes back. ``poll`` costs one tiny exchange while something is in flight, none when idle.
* The training thread never touches the coordinator's disk work: it asks, with a deadline.
* What was requested is frozen at the call: nothing later reads a live step.
"""

from __future__ import annotations

import logging
import operator
import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ckptfsm.config import CheckpointConfig
from ckptfsm.coordinator import Coordinator, CoordinatorOptions, RecoveryReport
from ckptfsm.documents import TransitionRecord
from ckptfsm.engine import FinalizersDue, Settled
from ckptfsm.errors import (
    CkptFsmError,
    ConfigError,
    DeadlineExceeded,
    Fenced,
    ManagerClosed,
    OutcomeUnknown,
    RankFailed,
    SaveFailed,
    SaveRefused,
    ShardMissing,
    WriterDied,
    describe,
)
from ckptfsm.handle import Restored, SaveHandle, View
from ckptfsm.layout import working_dir
from ckptfsm.lifecycle import UNSETTLED, State
from ckptfsm.link import Answer, Link, Update, typed
from ckptfsm.messages import AttemptId, Event, Failed, FinalizersRan, WriterForked, WriterGone
from ckptfsm.ports import Clock, Draft, Driver, Executor, Identity, Storage, Transport
from ckptfsm.proposal import Proposal, agree, propose
from ckptfsm.restoring import Restorer
from ckptfsm.writer import RankJob, RankWriter

log = logging.getLogger("ckptfsm")
Hook = Callable[[TransitionRecord], None]
_NEWS, _SAVE_DUE, _PREEMPTED, _EXPIRED = range(4)
_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.05
_LET_GO_S = 0.1


@dataclass(frozen=True, slots=True)
class Ports:
    """What a manager is built from: ``open_storage(create)`` gives this rank's storage."""

    transport: Transport
    driver: Driver
    clock: Clock
    executor: Callable[[], Executor]
    open_storage: Callable[[bool], Storage]
    identity: Callable[[], Identity]


class Manager:
    """The life of the checkpoints of one root, from one rank. See the module for its rules."""

    def __init__(self, ports: Ports, config: CheckpointConfig, hooks: Sequence[Hook] = ()) -> None:
        self.config = config
        self.recovery: RecoveryReport | None = None
        self.preempted = False
        self._ports = ports
        self._hooks = tuple(hooks)
        self._view = View()
        self._outbox: list[Event] = []
        self._handles: dict[AttemptId, SaveHandle] = {}
        self._writer: RankWriter | None = None
        self._dying: list[RankWriter] = []
        self._draft: Draft | None = None
        self._failures: list[CkptFsmError] = []
        self._notes: list[Warning] = []
        self._closed = False
        self._retries = 0
        self._save_due = False
        self._save_asked = False
        self._polls = 0
        self._unpolled_since: int | None = None
        self._next_timed_save = 0.0
        self._signals: dict[int, Any] = {}
        self._link = Link(ports.transport, config.effect_timeout_s)
        self._storage: Storage
        self._open()

    # ------------------------------------------------------------------------------ open and close

    def _open(self) -> None:
        """Open the root at rank 0, tell everyone what it holds, or raise on every rank."""
        answer = Answer()
        if self.rank == 0:
            try:
                self._storage = self._ports.open_storage(True)
                self._link.start(self._make_coordinator(self._storage), self._ports.executor())
                report = self._link.ask(Coordinator.open)
                answer = Answer((report, self._link.ask(_view_of)), update=self._link.collect())
            except Exception as error:  # the other ranks wait for the broadcast
                answer = Answer(error=typed(error))
        answer = self._ports.transport.broadcast(answer)
        problem = answer.error or self._open_locally()
        failed = self._ports.transport.any_flags([problem is not None])[0]
        if failed:
            self._let_go(idle=self._link.abandon(_LET_GO_S))
            raise problem or RankFailed("another rank could not open the root")
        self.recovery, self._view = answer.value
        for record in answer.update.news:
            if isinstance(record, TransitionRecord):
                self._call_hooks(record)
        self._next_timed_save = self._ports.clock.monotonic() + (self.config.save_interval_s or 0)
        self._note_recovery()

    def _open_locally(self) -> CkptFsmError | None:
        """This rank's own part: its storage and the signals it was asked to watch."""
        try:
            if self.rank != 0:
                self._storage = self._ports.open_storage(False)
            for name in self.config.preemption_signals:
                number = signal.Signals[name]
                self._signals[number] = signal.signal(number, self._on_signal)
        except Exception as error:  # the other ranks must not believe that the manager is open
            return typed(error)
        return None

    def _note_recovery(self) -> None:
        """What a person should know before hours of training go by; said at the first step."""
        assert self.recovery is not None
        reported = [d for d in self.recovery.decisions if d.result == "reported"]
        notes = [f"{d.subject} is left alone: {d.why}" for d in reported]
        for note in (*self.recovery.warnings, *notes):
            self._notes.append(RecoveryWarning(note))

    def _make_coordinator(self, storage: Storage) -> Coordinator:
        config, driver = self.config, self._ports.driver
        return Coordinator(
            storage,
            clock=self._ports.clock,
            identity=self._ports.identity(),
            options=CoordinatorOptions(
                config.retention,
                config.resume,
                config.takeover,
                config.visibility_timeout_s,
                config.reader_timeout_s,
            ),
            finishers=driver.finishers,
            provenance=driver.provenance(),
        )

    def __enter__(self) -> Manager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def close(self) -> None:
        """Drain what is in flight, journal the end, give the root back (collective).

        Raises ``DeadlineExceeded`` after ``close_timeout_s``; the root is given back all the same.
        """
        if self._closed:
            return
        try:
            self.wait_until_finished(self.config.close_timeout_s)
        except BaseException:
            self.abandon()
            raise
        idle = False
        try:
            self._agree(Coordinator.close)
            idle = True
        finally:
            self._let_go(idle=idle)

    def abandon(self) -> None:
        """Leave without the other ranks: a bounded wait for the own writer, then only local work.

        What was not tracked by then is decided by recovery at the next start.
        """
        if self._closed:
            return
        if self._writer is not None and not self._writer.wait(self.config.exit_timeout_s):
            self._writer.kill(self.config.exit_timeout_s)
        self._writer = None
        self._let_go(idle=self._link.abandon(self.config.exit_timeout_s))

    def _let_go(self, *, idle: bool) -> None:
        """Let go of signals, transport and root. ``idle``: nothing works on the root any more."""
        for number, handler in self._signals.items():
            signal.signal(number, handler)
        self._signals.clear()
        self._closed = True
        self._link.stop()
        self._ports.transport.close()
        if idle and hasattr(self, "_storage"):
            self._storage.close_root()

    # ----------------------------------------------------------------------------------- questions

    @property
    def rank(self) -> int:
        return self._ports.transport.rank

    @property
    def world_size(self) -> int:
        return self._ports.transport.world_size

    def latest_step(self) -> int | None:
        """The newest tracked step (not collective)."""
        return self._view.latest

    def all_steps(self) -> list[int]:
        """Every tracked step, ascending (not collective)."""
        return sorted(self._view.steps)

    def should_save(self, step: int) -> bool:
        """True if a save is due at ``step`` (not collective: the same on every rank).

        Due by interval or step list, because the coordinator's timer or a preemption was agreed in
        an earlier ``poll``, or because a failed save is to be tried again.
        """
        self._watch_polls(step)
        latest = self._view.latest
        if latest is not None and step <= latest:
            return False
        interval = self.config.save_interval_steps
        return (
            self._save_due
            or step in self.config.save_steps
            or (interval is not None and step > 0 and step % interval == 0)
        )

    def request_save(self) -> None:
        """Ask for a save at the next step that all ranks agree on (one rank is enough).

        Raises ``ConfigError`` if the ranks do not agree on anything while nothing is in flight:
        configure ``agree_when_idle``, ``save_interval_s`` or ``preemption_signals``.
        """
        if not self.config.needs_agreement:
            raise ConfigError("request_save() needs agree_when_idle=True")
        self._save_asked = True

    def _on_signal(self, number: int, frame: object) -> None:
        self._save_asked = True

    # ----------------------------------------------------------------------------------- save

    def save(
        self,
        step: int,
        state: Any = None,
        *,
        parts: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveHandle:
        """Begin a checkpoint of ``step`` (collective).

        ``state`` is a Megatron sharded state dict, saved as the one part ``state`` at the root of the
        step's directory; ``parts`` maps names to several of them, to ``bytes`` (a plain file), or to
        foreign requests. Returns once this rank's data is owned by its writer: tensors may change
        from then on. With ``sync`` it returns when the checkpoint is tracked.

        Raises ``SaveRefused`` (on every rank) if it was not accepted, ``SaveFailed`` for an earlier
        save that failed under ``on_failure="raise"``, ``DeadlineExceeded`` if another save stays in
        flight.
        """
        self._require_open()
        whole = hasattr(step, "__index__") and not isinstance(step, bool)
        step = operator.index(step) if whole else step
        self._watch_polls(step)
        if not self._make_way(step):
            return SaveHandle(step)
        call = (state, parts)
        draft, proposal = propose(self._ports.driver, self.world_size, step, call, metrics)
        gathered = self._ports.transport.gather(proposal)
        planned: Mapping[str, bytes] = {}
        answer = Answer()
        if gathered is not None:
            answer, planned = self._judge(gathered)
        answer = self._ports.transport.broadcast(answer)
        self._take_update(answer.update)
        if answer.error is not None:
            self._ports.driver.refuse()
            raise answer.error
        assert draft is not None
        self._save_due = False
        handle = self._begin_writing(answer.value, draft, planned)
        self._unpolled_since = step
        if self.config.sync:
            done = _HandleDone(handle)
            self._drive(done, self.config.busy_timeout_s, f"the save of step {step}")
            self._raise_failures()
        return handle

    def _make_way(self, step: int) -> bool:
        """One in flight per root: wait, skip or refuse. The same decision on every rank."""
        self._raise_failures()
        busy = self._view.in_flight
        if busy is None:
            return True
        if self.config.on_busy == "skip":
            log.warning("save_skipped", extra={"step": step, "in_flight": busy.step})
            return False
        if self.config.on_busy == "raise":
            raise SaveRefused(
                f"step {busy.step} is still in flight", step=step, in_flight=busy.step
            )
        self._drive(_no_save_in_flight, self.config.busy_timeout_s, f"the save of step {busy.step}")
        self._raise_failures()
        return True

    def _judge(self, proposals: list[Proposal]) -> tuple[Answer, Mapping[str, bytes]]:
        """At rank 0: accept or refuse for everyone. Returns the answer and the planned metadata."""
        step = proposals[0].step
        planned: Mapping[str, bytes] = {}
        accepted: tuple[AttemptId, bool] | None = None
        refused: CkptFsmError | None = None
        try:
            request = agree(proposals)
            planned = self._ports.driver.merge([p.summary for p in proposals])
            accepted = (self._link.ask(Coordinator.request, request), request.in_place)
        except DeadlineExceeded as error:
            self._link.forget_request()
            refused = error
        except (SaveRefused, Fenced, OutcomeUnknown) as error:
            refused = error
        except Exception as error:  # a bad state dict must not strand the other ranks
            log.exception("save_refused", extra={"step": step})
            refused = SaveRefused(f"the save cannot begin: {describe(error)}", step=step)
        return Answer(accepted, refused, self._link.collect()), planned

    def _begin_writing(
        self, accepted: tuple[AttemptId, bool], draft: Draft, planned: Mapping[str, bytes]
    ) -> SaveHandle:
        """Stage and fork. An error here is carried: the attempt fails at the next exchange."""
        of, in_place = accepted
        location = working_dir(of, in_place)
        try:
            parts = draft.stage(f"{self._storage.root}/{location}", planned)
            job = RankJob(of, self.rank, self.world_size, location, parts)
            self._writer = RankWriter(
                self._storage,
                job,
                keep=self._storage.descriptors(),
                deadline=self._ports.clock.monotonic() + self.config.writer_timeout_s,
            )
            draft.let_go()
            self._draft = draft
            self._ports.driver.accept()
            self._outbox.append(WriterForked(of, self.rank, self.world_size))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # also torch's; the others must not wait for this rank
            self._ports.driver.refuse()
            log.exception("fork_failed", extra={"step": of.step, "rank": self.rank})
            detail = f"rank {self.rank}: {describe(error)}"
            self._outbox.append(Failed(of, "fork_failed", detail, self.rank))
        handle = SaveHandle(of.step, State.REQUESTED, of, None, self._wait_for)
        self._handles[of] = handle
        return handle

    # ----------------------------------------------------------------------------------- poll

    def poll(self) -> None:
        """Drive the machine; call it every step (collective).

        Raises what a save failed with, on every rank, under ``on_failure="raise"``.
        """
        self._require_open()
        self._unpolled_since = None
        self._polls += 1
        due = self._polls % self.config.exchange_every == 0
        if not self._view.quiet or (due and self.config.needs_agreement):
            self._pump(expired=False)
        self._link.work_in_background()
        self._raise_failures()

    def wait_until_finished(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is in flight (collective). Raises failures and ``DeadlineExceeded``."""
        limit = timeout_s if timeout_s is not None else self.config.busy_timeout_s
        self._drive(_nothing_unsettled, limit, "the saves in flight")
        self._raise_failures()

    def _wait_for(self, handle: SaveHandle, timeout_s: float | None) -> None:
        limit = timeout_s if timeout_s is not None else self.config.busy_timeout_s
        self._drive(_HandleDone(handle), limit, f"the save of step {handle.step}")
        if handle.exception() is not None:
            raised = handle.exception()  # the caller gets it from the handle
            self._failures = [f for f in self._failures if f is not raised]

    def _drive(self, finished: Callable[[View], bool], timeout_s: float, waiting_for: str) -> None:
        """Pump until ``finished``. The deadline is agreed, so all ranks stop waiting together."""
        deadline = self._ports.clock.monotonic() + timeout_s
        pause = _PAUSE_S
        while not finished(self._view):
            expired = self._ports.clock.monotonic() >= deadline
            if self._pump(expired=expired):
                raise DeadlineExceeded(
                    f"{waiting_for} did not finish in time",
                    timeout_s=timeout_s,
                    waiting_for=waiting_for,
                )
            self._link.work_in_background()
            self._ports.clock.sleep(pause)
            pause = min(pause * 1.2, _LONGEST_PAUSE_S)

    def _pump(self, *, expired: bool) -> bool:
        """One cheap exchange; a full one if any rank has news. Returns the agreed ``expired``."""
        now = self._ports.clock.monotonic()
        self._bury()
        if self._writer is not None:
            self._outbox += self._writer.poll(now)
        flags = [
            bool(self._outbox) or self._link.has_news,
            self._timed_save_due(now),
            self._save_asked,
            expired,
        ]
        agreed = self._ports.transport.any_flags(flags)
        if agreed[_PREEMPTED]:
            self._save_asked, self.preempted = False, True
        if agreed[_SAVE_DUE] or agreed[_PREEMPTED]:
            self._save_due = True
            self._next_timed_save = now + (self.config.save_interval_s or 0)
        if agreed[_NEWS]:
            outbox, self._outbox = self._outbox, []
            self._take_update(self._link.exchange(outbox))
        return agreed[_EXPIRED]

    def _timed_save_due(self, now: float) -> bool:
        timed = self.rank == 0 and self.config.save_interval_s is not None
        return timed and now >= self._next_timed_save

    def _take_update(self, update: Update) -> None:
        """What happened, on every rank in the same order."""
        for news in update.news:
            if isinstance(news, FinalizersDue):
                self._run_finalizers(news.of)
                continue
            if isinstance(news, Settled):
                self._view.settling = False
                continue
            self._view.apply(news)
            handle = self._handles.get(news.of)
            if handle is not None:
                handle.state = news.dest
            if news.dest is State.FAILED:
                self._on_failed(news)
            elif news.dest is State.TRACKED and news.source is State.FINALIZED:
                self._on_tracked(news)
            self._call_hooks(news)
        if update.fatal is not None:
            self._failures.append(update.fatal)
            for handle in self._handles.values():
                handle._error = handle._error or update.fatal
            if self._writer is not None:
                self._dying.append(self._writer)
                self._writer = self._draft = None
                self._bury()
            self._view = View(self._view.steps)  # the coordinator is gone: nothing more will come

    def _on_tracked(self, record: TransitionRecord) -> None:
        self._retries = 0
        self._writer = self._draft = None
        self._handles.pop(record.of, None)

    def _on_failed(self, record: TransitionRecord) -> None:
        """End our own writer, tell the coordinator so, and do what ``on_failure`` says."""
        if self._writer is not None and self._writer.of == record.of:
            self._dying.append(self._writer)
            self._writer = self._draft = None
        else:
            self._outbox.append(WriterGone(record.of, self.rank))
        self._bury()
        error = failure_of(record)
        handle = self._handles.pop(record.of, None)
        if handle is None:
            return
        handle._error = error
        if self._retries < self.config.saves_again:
            self._retries += 1
            self._save_due = True
            log.warning("save_failed", extra={"error": str(error), "again": self._retries})
        elif self.config.on_failure == "warn":
            self._notes.append(SaveFailedWarning(str(error)))
        else:
            self._failures.append(error)

    def _bury(self) -> None:
        """Kill writers of failed attempts; only one that is certainly gone is reported so."""
        for writer in list(self._dying):
            if writer.kill(timeout_s=0.0):
                self._dying.remove(writer)
                self._outbox.append(WriterGone(writer.of, self.rank))

    def _run_finalizers(self, of: AttemptId) -> None:
        """Foreign finalizers hold collectives: here all ranks run them at the same point, once."""
        error = ""
        draft, writer = self._draft, self._writer
        if draft is None or writer is None or writer.of != of:
            self._outbox.append(FinalizersRan(of, self.rank, "this rank has no such save"))
            return
        for name, finalize in draft.finalizers():
            try:
                finalize(writer.payloads.get(name))
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as problem:  # torch's CheckpointException is one
                error = f"{name}: {describe(problem)}"
            if self._ports.transport.any_flags([bool(error)])[0]:
                break  # or the other ranks would wait in the next part's collectives
        self._outbox.append(FinalizersRan(of, self.rank, error))

    def _call_hooks(self, record: TransitionRecord) -> None:
        for hook in self._hooks:
            try:
                hook(record)
            except Exception:  # a user's hook: training and the machine go on (F24)
                log.exception("hook_failed", extra={"step": record.step, "dest": record.dest.value})

    def _raise_failures(self) -> None:
        """At a point that every rank reaches: what there is to say, then what there is to raise."""
        self._say_notes()
        if self._failures:
            failures, self._failures = self._failures, []
            raise failures[0]

    def _say_notes(self) -> None:
        """Warnings wait for a point without collectives after it: they may be made errors."""
        notes, self._notes = self._notes, []
        for note in notes:
            warnings.warn(note, stacklevel=4)

    def _require_open(self) -> None:
        if self._closed:
            raise ManagerClosed("the manager is closed", file=self._storage.root)

    def _watch_polls(self, step: int) -> None:
        """A save that nobody polls never gets tracked: say so, with its step (F28)."""
        since = self._unpolled_since
        if since is None or not isinstance(step, int):
            return
        if step - since >= self.config.poll_warning_steps:
            self._unpolled_since = step
            warnings.warn(
                f"the save of step {since} is in flight and poll() was not called for "
                f"{step - since} steps: it cannot be tracked without",
                PollMissingWarning,
                stacklevel=3,
            )

    # ----------------------------------------------------------------------------------- restore

    def restore(
        self,
        state: Any = None,
        *,
        parts: Mapping[str, Any] | None = None,
        step: int | None = None,
    ) -> Restored | None:
        """Load the latest checkpoint, or that of ``step``, into the shape of ``state`` (collective).

        Verifies first (``verify``), holds a lease on what it reads, and falls back to the newest valid
        one under ``resume="fallback"`` if the latest is damaged. Loads under another tensor-parallel
        or world size; sharded objects in ``reshard_drops`` that do not reshard are left out with a
        warning. Returns None only when there is no evidence of any checkpoint.

        Raises ``StepNotFoundError``, ``DamagedRoot``, or what the load raised.
        """
        self._require_open()
        restorer = Restorer(
            self._ports.transport, self._storage, self._ports.driver, self.config, self._agree
        )
        restored = restorer.restore(state, parts, step)
        self._say_notes()
        if restored is not None and restored.dropped and self.rank == 0:
            warnings.warn(
                f"step {restored.step} was saved under another sharding: "
                f"{', '.join(restored.dropped)} cannot be resharded and is left out; the run is not "
                "bit-for-bit the same",
                ReshardWarning,
                stacklevel=2,
            )
        return restored

    # --------------------------------------------------------------------- what people ask for

    def pin(self, step: int, reason: str = "") -> None:
        """Keep ``step`` from retention until ``unpin`` (collective). ``StepNotFoundError``."""
        self._agree(Coordinator.pin, step, reason)

    def unpin(self, step: int) -> None:
        """Release a pin, also that of an adopted checkpoint (collective)."""
        self._agree(Coordinator.unpin, step)

    def delete(self, step: int) -> None:
        """Delete a checkpoint (collective). ``SaveRefused`` if anything keeps it (I7)."""
        self._agree(Coordinator.delete, step)

    def rollback(self, step: int) -> None:
        """Go back to ``step``; later ones are moved to quarantine (collective)."""
        self._agree(Coordinator.rollback, step)

    def _agree(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Ask the coordinator together; its news first, then its error on every rank."""
        self._require_open()
        answer = self._link.together(work, *arguments)
        self._take_update(answer.update)
        if answer.error is not None:
            raise answer.error
        return answer.value


class SaveFailedWarning(UserWarning):
    """A save failed and ``on_failure`` is ``warn``."""


class ReshardWarning(UserWarning):
    """Part of a checkpoint cannot be loaded under another sharding and was left out."""


class RecoveryWarning(UserWarning):
    """Opening the root found something that a person should know."""


class PollMissingWarning(UserWarning):
    """A save is in flight and ``poll`` is not called."""


@dataclass(frozen=True, slots=True)
class _HandleDone:
    handle: SaveHandle

    def __call__(self, view: View) -> bool:
        """Also let retention have its turn, unless another attempt is still being cleaned up."""
        failed = self.handle.exception() is not None
        return self.handle.done and (failed or not view.settling or bool(view.unsettled))


def _no_save_in_flight(view: View) -> bool:
    return view.in_flight is None


def _nothing_unsettled(view: View) -> bool:
    return view.quiet


def _view_of(coordinator: Coordinator) -> View:
    ledger = coordinator.ledger
    steps = {c.step for c in ledger.in_state(State.TRACKED)}
    return View(steps, {c.id: c.state for c in ledger.in_state(*UNSETTLED)})


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
