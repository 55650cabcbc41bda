"""Base class of ``CheckpointManager`` and ``Controller``: open, poll, pin, roll back, close.

Every public method is collective unless it says otherwise: all ranks of the transport call it at the
same point, on one thread at a time. Signal handlers wait for the end of a call, or for a place in it
that all ranks reach together.
"""

from __future__ import annotations

import logging
import operator
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

from ckptfsm.adapters.notices import say, warn_at_end, warn_caller
from ckptfsm.adapters.signals import OneCall
from ckptfsm.coordinator.bringing_back import bring_back_if_empty
from ckptfsm.coordinator.coordinator import ROOT_WAIT_S, Coordinator, CoordinatorOptions
from ckptfsm.core.config import CheckpointConfig
from ckptfsm.core.errors import (
    CkptFsmError,
    ConfigError,
    ManagerClosed,
    RankFailed,
    RecoveryWarning,
    SaveFailedWarning,
    StepNotFoundError,
    UnsavedStepsWarning,
    describe,
)
from ckptfsm.core.layout import LAYOUTS
from ckptfsm.core.lifecycle import UNFINISHED, State
from ckptfsm.core.ports import Identity, Ports, Storage
from ckptfsm.core.recorded_metrics import check_metrics
from ckptfsm.core.recovery_rules import Result
from ckptfsm.core.requests import RecoveryReport
from ckptfsm.follow.beside import JobsBeside, require_commands
from ckptfsm.places.place import place_at
from ckptfsm.ranks.agent import Agent
from ckptfsm.ranks.coordinator_client import (
    Answer,
    CoordinatorClient,
    answer_of,
    carried,
    first_problem,
    share_answer,
)
from ckptfsm.ranks.first_fetch import FirstFetch, StillFetching
from ckptfsm.ranks.handle import SaveHandle, View
from ckptfsm.ranks.participant import Hook, Participant, handle_done, nothing_unfinished
from ckptfsm.ranks.restoring import Restorer
from ckptfsm.ranks.share import Share
from ckptfsm.ranks.shared_root import OpenedRoot, open_shared

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("ckptfsm")
P = ParamSpec("P")
T = TypeVar("T")
_LET_GO_S = 0.1


class Session:
    """The life of the checkpoints of one root, from one process of its job."""

    def __init__(
        self,
        ports: Ports,
        config: CheckpointConfig,
        hooks: Sequence[Hook] = (),
        *,
        writers: int | None = None,
    ) -> None:
        """``writers``: the number of ranks of a checkpoint, if not those of the transport."""
        self.config = config
        self.writers = writers or ports.transport.world_size
        self._recovery: RecoveryReport | None = None
        self._ports = ports
        self._polls = 0
        self._reached: int | None = None  # the step that the trainer asked for last
        self._signals: dict[int, Any] = {}
        self._one_call = OneCall(ports.defer_signals)
        self._client = CoordinatorClient(
            ports.transport, config.effect_timeout_s, self._one_call.hear
        )
        self._share = Share(ports, config)
        self._participant = Participant(
            ports, config, self._client, self._one_call, hooks, self._share, self.writers
        )
        self._client.on_reports = self._participant.display.note_reports
        self._gone = False
        self._jobs: JobsBeside | None = None
        self._storage: Storage
        try:
            problem = carried(self._watch_signals)
            with self._one_call.running():
                self._open(problem)
        except BaseException:  # a Ctrl-C too: the root must be given back
            self._let_go(_LET_GO_S)
            self._unwatch_signals()
            raise
        if self.rank == 0:
            warn_at_end(self, _left_in_flight, self._participant)

    def undisturbed(self) -> AbstractContextManager[None]:
        """A block in which signal handlers wait, for calls that belong together (local).

        Raises ``ConfigError`` if another thread is in a call.
        """
        return self._one_call.running()

    # ------------------------------------------------------------------------------ open and close

    def _open(self, problem: CkptFsmError | None) -> None:
        """Open the root at rank 0 and share its content, or raise on every rank, as for ``problem``."""
        answer, warning = Answer(), ""
        if self.rank == 0:
            try:
                require_commands(self.config.jobs)
                for copy in self.config.copies:
                    place_at(copy.to)  # what it needs is installed, and its directory is there
                self._storage = self._ports.open_storage(True)
                warning = self._fetch_first()
                identity = self._ports.identity()
                coordinator = self._make_coordinator(self._storage, identity)
                self._client.start(coordinator, self._ports.executor())
                report = self._client.ask(Coordinator.open)
                view = self._client.ask(_view_of)
                if self.config.jobs:
                    job_ended = self._client.job_ended
                    self._jobs = JobsBeside(self.config, self._storage, report.epoch, job_ended)
                root = OpenedRoot(self._storage.root, report.epoch, identity)
                shared = (report, view, root, self.config.of_all_ranks())
                answer = Answer(shared, update=self._client.collect())
            except BaseException as error:  # a Ctrl-C too: the other ranks wait for the broadcast
                answer = answer_of(error)
        answer = share_answer(self._ports.transport, answer)
        while isinstance(answer.value, StillFetching):
            answer = share_answer(self._ports.transport, answer)
        raised = answer.problem or problem or carried(self._open_at_another_rank, answer)
        said = "" if raised is None else f"rank {self.rank}: {describe(raised)}"
        first = first_problem(self._ports.transport, said)
        if first:
            raise raised or RankFailed(f"another rank could not open the root: {first}")
        self._recovery, view, _, _ = answer.value
        self._participant.take_opening(view, answer.update)
        mailbox = self._ports.mailbox()
        if mailbox is not None:
            draw = self._participant.display.look
            reports_to = self._client.report if self.rank == 0 else None
            agent = Agent(self._ports.clock, mailbox, reports_to, draw)
            agent.start()
            self._share.agent = agent
        self._note_recovery()
        if warning:
            self._participant.warn_later(RecoveryWarning(warning))

    def _fetch_first(self) -> str:
        """Bring a copy back into a root that has no checkpoint, as ``fetch_from`` asks. A warning."""
        config = self.config
        if config.fetch_from is None or config.resume == "fresh":
            return ""
        identity = self._ports.identity()
        fetch = partial(
            bring_back_if_empty,
            self._storage,
            identity,
            config.fetch_from,
            partial(self._make_coordinator, self._storage, identity),
            LAYOUTS[config.layout],
        )
        tell_s = config.exchange_timeout_s / 4
        return FirstFetch(self._ports.transport, self._one_call.hear).run(fetch, tell_s)

    def _open_at_another_rank(self, answer: Answer) -> None:
        """Open this rank's storage, unless its settings differ: the ranks' exchanges would not meet."""
        if self.rank == 0:
            return
        _, _, root, settings = answer.value
        for name, own in self.config.of_all_ranks().items():
            if own != settings[name]:
                raise ConfigError(
                    f"{name} is {own!r} on rank {self.rank}, and {settings[name]!r} on rank 0: give all "
                    "ranks the same",
                    key=name,
                    rank=self.rank,
                )
        self._storage = open_shared(self._ports, root, self.config.visibility_timeout_s)

    def _watch_signals(self) -> None:
        """Watch the configured signals. Raises outside of the main thread, for example."""
        for name in self.config.preemption_signals:
            number = signal.Signals[name]
            self._signals[number] = signal.getsignal(number)
            signal.signal(number, self._on_signal)

    def _unwatch_signals(self) -> None:
        """Restore the previous handlers."""
        for number, previous in self._signals.items():
            # A newer handler stays: it may call ours, which calls the previous one.
            if signal.getsignal(number) == self._on_signal and previous is not None:
                signal.signal(number, previous)

    def _note_recovery(self) -> None:
        """Collect the warnings about recovery, shown at the first step, before hours of training."""
        assert self._recovery is not None
        decisions = self._recovery.decisions
        words = {
            Result.REPORTED: "is left alone",
            Result.QUARANTINED: "goes to quarantine",
            Result.FAILED: "was in flight ({}) when the last run ended, and is lost",
        }
        notes = [
            f"{each.subject} {said.format(each.last)}: {each.why}"
            for result, said in words.items()
            for each in decisions
            if each.result is result
        ]
        for note in (*self._recovery.warnings, *notes):
            self._participant.warn_later(RecoveryWarning(note))

    def _make_coordinator(self, storage: Storage, identity: Identity) -> Coordinator:
        config, driver = self.config, self._ports.driver
        return Coordinator(
            storage,
            clock=self._ports.clock,
            identity=identity,
            options=CoordinatorOptions(
                config.retention,
                config.resume,
                config.takeover,
                config.visibility_timeout_s,
                config.reader_timeout_s,
                layout=LAYOUTS[config.layout],
                root_wait_s=min(ROOT_WAIT_S, config.effect_timeout_s / 2),
                holds=config.holds,
            ),
            finishers=driver.finishers,
            provenance=driver.provenance(),
        )

    def __enter__(self) -> Self:
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
        """Finish the saves in flight, journal the end, give the root back (collective).

        Raises ``DeadlineExceeded`` after ``close_timeout_s``, or the error of a failed save. That
        includes a save that was to be retried and was not. The root is given back all the same.
        """
        if self._gone or self._participant.is_copy:
            return
        self._participant.refuse_inside_a_hook()
        left = ""
        try:
            with self._one_call.running():
                if not self._participant.closed:  # else an earlier close was interrupted
                    limit, what = self.config.close_timeout_s, "the saves in flight"
                    self._participant.wait_and_retry(_may_close, nothing_unfinished, limit, what)
                    self._participant.raise_failures()
                    # A command that finds no owner takes the root, and so ends the jobs.
                    self._agree(Coordinator.close if self._jobs is None else Coordinator.nothing)
                    if self._jobs is not None:
                        self._jobs.drain(self.config.jobs_drain_s, self._one_call.hear)
                        left = self._jobs.left(self._client.ask(attrgetter("ledger")))
                        self._client.ask(Coordinator.close)  # the other ranks have left
                self._let_go(self.config.exit_timeout_s)
        except BaseException:
            self.abandon()
            raise
        finally:
            self._unwatch_signals()
        if self._participant.retry_error is not None:
            raise self._participant.retry_error
        if left:
            say(log.warning, "jobs_left", left)
            warn_caller(UserWarning(left))
        self._warn_of_unsaved()

    def _warn_of_unsaved(self) -> None:
        """Warn at rank 0 of steps behind the newest checkpoint, in a run that ends in order."""
        reached, latest = self._reached, self.latest_step()
        if self.rank != 0 or reached is None or (latest is not None and reached <= latest):
            return
        newest = (
            "there is no checkpoint"
            if latest is None
            else f"the newest checkpoint is that of step {latest} (steps not saved: {reached - latest})"
        )
        said = f"the run ended at step {reached}, and {newest}: save the last step, with last=True"
        say(log.warning, "steps_not_saved", said, reached=reached, latest=latest)
        warn_caller(UnsavedStepsWarning(said))

    def abandon(self) -> None:
        """Leave without the other ranks: a bounded wait for this rank's writer, then local work.

        If all shards of a save are durable by then and the journal can be written, the save is
        finished here or by the next start. A ``SaveFailedWarning`` reports a lost save.
        """
        if self._gone or self._participant.is_copy:
            return
        self._participant.refuse_inside_a_hook()
        lost = ""
        try:
            with self._one_call.running():
                if not self._participant.closed:
                    lost = self._participant.abandon()
                self._let_go(self.config.exit_timeout_s)
        finally:
            self._unwatch_signals()
        if lost:
            say(log.warning, "save_lost", lost)
            self._warn_of_loss(lost)

    def _warn_of_loss(self, lost: str) -> None:
        """Warn, but under ``-W error`` do not hide the error that the manager is left with."""
        leaving = sys.exc_info()[1] is not None
        try:
            warn_caller(SaveFailedWarning(lost))
        except SaveFailedWarning:
            if not leaving:  # else the error on its way out matters more
                raise

    def _let_go(self, timeout_s: float) -> None:
        """Let go of root and transport. After an interrupt, call again."""
        self._participant.end()
        if self._jobs is not None:
            self._jobs.stop()
        idle = self._client.abandon(timeout_s)
        self._client.stop()
        self._ports.close_writers()
        self._ports.transport.close()
        if idle and hasattr(self, "_storage"):  # else the coordinator still works on it
            self._storage.close_root()
        self._gone = True

    # ----------------------------------------------------------------------------------- questions

    @property
    def recovery(self) -> RecoveryReport | None:
        """The findings and decisions of opening the root. None until it is open."""
        return self._recovery

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self._ports.transport.rank

    @property
    def world_size(self) -> int:
        """The number of processes that make these calls together."""
        return self._ports.transport.world_size

    @property
    def preempted(self) -> bool:
        """True once the ranks agreed that one of them was asked to end, or that the allocation ends."""
        return self._participant.preempted

    def latest_step(self) -> int | None:
        """The newest tracked step (not collective)."""
        return self._participant.view.latest

    def step_in_flight(self) -> int | None:
        """The step of the save in flight, neither tracked nor failed, or None (not collective)."""
        busy = self._participant.view.in_flight
        return busy.step if busy is not None else None

    def all_steps(self) -> list[int]:
        """Every tracked step, ascending (not collective)."""
        return sorted(self._participant.view.steps)

    def path(self, step: int) -> Path:
        """The absolute directory of a tracked step (not collective). No lease keeps it.

        Raises ``StepNotFoundError``, and ``StorageError`` if the root was moved.
        """
        steps, whole = self.all_steps(), whole_step(step)
        if whole not in steps:
            raise StepNotFoundError(
                f"there is no checkpoint of step {step}", step=step, available=tuple(steps[-20:])
            )
        name = LAYOUTS[self.config.layout].published_name(whole)
        return Path(self._storage.absolute(name))

    def explain(self, step: int) -> str:
        """The state of ``step`` as this rank knows it, and any block, in words (not collective)."""
        return self._participant.view.explain(whole_step(step))

    def should_save(self, step: int, *, last: bool = False) -> bool:
        """True if a save is due at ``step`` (not collective: the same on every rank).

        The reasons are the interval, the list of steps, or a failed save that is to be retried. The
        coordinator's timer or a preemption are reasons too, agreed in an earlier ``poll``. With
        ``last``, the same on every rank, a save is due because the training ends at this step.

        An ``UnsavedStepsWarning`` comes with the first call if no setting makes a save due.
        """
        self._participant.watch_polls(step)
        first, self._reached = self._reached is None, step
        if first and not last:
            self._warn_of_no_schedule()
        latest = self._participant.view.latest
        if latest is not None and step <= latest:
            return False
        interval = self.config.save_interval_steps
        return (
            last
            or self._participant.save_due
            or step in self.config.save_steps
            or (interval is not None and step > 0 and step % interval == 0)
        )

    def _warn_of_no_schedule(self) -> None:
        if self.config.makes_saves_due or self.rank != 0:
            return
        said = (
            "should_save is true at the last step only (last=True), for no setting makes a save due: "
            "set save_interval_steps, save_steps or save_interval_s"
        )
        say(log.warning, "no_save_due", said)
        warn_caller(UnsavedStepsWarning(said))

    def request_save(self) -> None:
        """Ask for a save at the next step that all ranks agree on (one rank is enough).

        Raises ``ConfigError`` if the ranks do not agree on anything while nothing is in flight:
        configure ``agree_when_idle``, ``save_interval_s``, ``preemption_signals`` or
        ``end_of_allocation``.
        """
        if not self.config.needs_agreement:
            raise ConfigError("request_save() needs agree_when_idle=True")
        self._participant.save_asked = True

    def _on_signal(self, number: int, frame: object) -> None:
        """Ask for a save; once closed, call the previous handler: a later manager's calls this one."""
        if not self._participant.closed:
            self._participant.save_asked = True
            return
        previous = self._signals[number]
        if callable(previous):
            previous(number, frame)
        elif previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    # ----------------------------------------------------------------------------------- poll

    def poll(self) -> None:
        """Drive the saves in flight; call at every step (collective).

        Raises the error of a failed save, on every rank, under ``on_failure="raise"``.
        """
        self._require_open()
        self._polls += 1
        due = self.config.needs_agreement and self._polls % self.config.exchange_every == 0
        self._participant.poll(due=due)

    def wait_until_finished(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is in flight (collective). Raises failures and ``DeadlineExceeded``.

        ``ManagerClosed`` if the manager was left with a save in flight.
        """
        limit = timeout_s if timeout_s is not None else self.config.busy_timeout_s
        with self._one_call.running():
            self._participant.drive(nothing_unfinished, limit, "the saves in flight")
            self._participant.raise_failures()

    def wait_for(self, handle: SaveHandle) -> None:
        """Wait until one save is tracked or has failed (collective). Raises the errors of ``poll``.

        ``SaveHandle.wait`` raises its failure under ``on_failure="warn"`` too. ``DeadlineExceeded``
        after ``busy_timeout_s``; under ``"warn"`` a save that the disk blocks is not waited for.
        """
        with self._one_call.running():
            if self.config.on_failure == "warn":
                done = partial(handle_done, handle)
                self._participant.wait_unless_blocked(done, f"the save of step {handle.step}")
            else:
                self._participant.settle(handle)
            self._participant.raise_failures()

    def _require_open(self) -> None:
        if self._participant.closed:
            why = "the manager is closed, or another process's that forked this one"
            raise ManagerClosed(why, file=self._storage.root)
        self._participant.refuse_inside_a_hook()

    # --------------------------------------------------------------------- operator requests

    def pin(self, step: int, reason: str = "") -> None:
        """Keep ``step`` from retention until ``unpin`` (collective). ``StepNotFoundError``."""
        self._agree(Coordinator.pin, step, reason)

    def unpin(self, step: int) -> None:
        """Release a pin, also that of an adopted checkpoint (collective)."""
        self._agree(Coordinator.unpin, step)

    def delete(self, step: int) -> None:
        """Delete a checkpoint (collective). ``SaveRefused`` if anything keeps it (I7)."""
        self._agree(Coordinator.delete, step)

    def record_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to a tracked checkpoint, say of an evaluation (collective).

        Retention decides anew. Rank 0's values count. Each replaces a metric of the same name.
        Raises ``StepNotFoundError``, or ``ConfigError`` for a value that is not a finite number.
        """
        self._require_open()
        self._participant.together(partial(self._record_metrics, step, metrics))

    def _record_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """At rank 0: a value may be a tensor, which only this thread's stream may read."""
        self._client.ask(Coordinator.record_metrics, whole_step(step), check_metrics(metrics))

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics of a tracked checkpoint by name (collective).

        Those of its save, and those of ``record_metrics``. Raises ``StepNotFoundError``.
        """
        return self._agree(Coordinator.metrics, whole_step(step))

    def best_step(self, metric: str, mode: Literal["min", "max"] = "min") -> int | None:
        """The best tracked step by a metric, as ``BestN`` decides (collective).

        Ties go to the newer step, and a NaN is never the best. None if no tracked step has the metric.
        Rank 0's arguments count. Raises ``ConfigError`` for another ``mode``.
        """
        return self._agree(Coordinator.best_step, metric, mode)

    def rollback(self, step: int) -> None:
        """Go back to ``step``; later ones are moved to quarantine (collective)."""
        self._agree(Coordinator.rollback, step)

    def _restorer(self, config: CheckpointConfig) -> Restorer:
        return Restorer(self._ports, self._storage, config, self._agree, self._one_call)

    def _agree(
        self,
        work: Callable[Concatenate[Coordinator, P], T],
        *arguments: P.args,
        **keywords: P.kwargs,
    ) -> T:
        self._require_open()
        return self._participant.ask(work, *arguments, **keywords)


def whole_step(step: Any) -> Any:
    """``step`` as an ``int`` if it is a whole number of any type; anything else as it is.

    The ledger refuses it then, for all ranks. A rank that raised here alone would leave the others
    waiting.
    """
    whole = hasattr(step, "__index__") and not isinstance(step, bool)
    return operator.index(step) if whole else step


def _may_close(view: View) -> bool:
    """True if nothing is left to do, or only clean-ups that the disk refuses: a start makes them."""
    refused = not view.awaiting and view.in_flight is None and view.unfinished
    return view.quiet or bool(refused and view.unfinished.keys() <= view.blocked.keys())


def _left_in_flight(participant: Participant) -> str:
    """The warning at the end of a manager that was never closed, or "" (F28)."""
    busy = None if participant.closed else participant.view.in_flight
    if busy is None:
        return ""
    return (
        f"the save of step {busy.step} is in flight, and its manager ends without close(): "
        "nothing tracks it any more, the next start decides"
    )


def _view_of(coordinator: Coordinator) -> View:
    ledger = coordinator.ledger
    steps = {c.step for c in ledger.in_state(State.TRACKED)}
    unfinished = {c.id: c.state for c in ledger.in_state(*UNFINISHED)}
    return View(steps, unfinished, blocked=coordinator.blocked)
