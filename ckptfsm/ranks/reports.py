"""The writers of this rank, and the reports that it owes the coordinator.

Rules:

- A local error is a report: it is never raised between collectives, and every rank hears of it.
- The writer of a failed attempt is killed; a writer is reported gone only when that is certain.
- An interrupt loses no report: each round of ``note_due`` computes anew which reports this rank
  owes. An attempt in flight without a share of this rank's is given up. A report is sent until an
  exchange took it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from ckptfsm.adapters.notices import say
from ckptfsm.core.config import CheckpointConfig
from ckptfsm.core.errors import SaveRefused, describe
from ckptfsm.core.events import Event, Failed, FinalizersRan, WriterGone
from ckptfsm.core.layout import LAYOUTS
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Draft, Finalizer, Ports, RankJob, Storage
from ckptfsm.core.progress import Progress
from ckptfsm.core.requests import Accepted
from ckptfsm.disk.visibility import Visibility
from ckptfsm.ranks.agent import Agent
from ckptfsm.ranks.handle import View
from ckptfsm.ranks.progress import ShareProgress
from ckptfsm.ranks.proposal import is_about_a_value, words_of
from ckptfsm.writers.plain_files import around, at_path, planned_bytes
from ckptfsm.writers.rank_writer import RankWriter, no_signal

log = logging.getLogger("ckptfsm")
_BEGINNING = (State.REQUESTED, State.FORKED)  # each rank that writes has a writer of these


class _Ran(NamedTuple):
    """The result of a step of the finalizers on this rank; ``failed``: on some rank."""

    error: str
    leaving: BaseException | None
    failed: bool


def _may_finalize(writer: RankWriter, part: Finalizer) -> None:
    writer.require_mark()
    problem = part.problem()
    if problem is not None:
        raise problem


class RankReports:
    """The writers and reports of this rank. ``outbox`` holds the reports to be sent.

    ``progress`` tells that of the newest share; None if there is none.
    ``writers`` is the number of ranks of a checkpoint. ``source`` is called before each exchange,
    and adds the reports of other processes.
    """

    def __init__(self, ports: Ports, config: CheckpointConfig, writers: int) -> None:
        self.writer: RankWriter | None = None
        self.source: Callable[[], None] | None = None
        self.agent: Agent | None = None
        self.outbox: list[Event] = []
        self.progress: ShareProgress | None = None
        self._ports = ports
        self._config = config
        self._rank, self._world_size = ports.transport.rank, writers
        self._sent: set[Event] = set()  # reports of this rank that an exchange took
        self._dying: list[RankWriter] = []
        self._draft: Draft | None = None
        self._bystander: AttemptId | None = None  # an attempt without a share of this rank
        self._given_up: AttemptId | None = None
        self._finalizing: AttemptId | None = None  # the attempt with finalizers begun here

    def employ(self, agent: Agent) -> None:
        """Let an agent carry reports between the rounds."""
        agent.start()
        self.agent = agent

    def let_agent_go(self) -> None:
        """End the agent, if there is one."""
        if self.agent is not None:
            self.agent.end()

    def progress_now(self) -> Progress | None:
        """The progress of the newest share, from any thread."""
        share = self.progress
        return None if share is None else share()

    def begin_writing(
        self,
        storage: Storage,
        accepted: Accepted,
        draft: Draft,
        hear: Callable[[], BaseException | None],
    ) -> None:
        """Stage and fork. An error here is carried: the attempt fails at the next exchange.

        A rank that writes none of the parts has no writer. ``hear``: see ``await_copy``.
        """
        of, specs = accepted.of, accepted.of_rank(self._rank)
        location = LAYOUTS[self._config.layout].working_dir(of, accepted.in_place)
        self._bystander = None if specs else of
        self.progress, began = None, self._now()
        if not specs and self.agent is not None:
            self.agent.begin(None)
        if not specs:
            self._ports.driver.accept()
            return
        try:
            late_s = self._config.visibility_timeout_s
            visibility = Visibility(self._ports.clock, late_s)
            with at_path(storage, location, specs, visibility) as path:
                staged = draft.stage(path, specs, accepted.planned)
            parts = tuple(around(job, accepted.parts) for job in staged)
            optional = frozenset(spec.name for spec in specs if spec.optional)
            job = RankJob(of, self._rank, self._world_size, location, parts, optional, late_s)
            deadline = self._now() + self._config.writer_timeout_s
            self._draft = draft
            self.writer = RankWriter(
                storage,
                job,
                launch=self._ports.launch,
                deadline=deadline,
                changed=draft.changed,
                let_go=draft.let_go,
            )
            self.writer.begin()
            total = planned_bytes(parts) or draft.expected_bytes or None
            self.progress = ShareProgress(self.writer, self._ports.clock, began, total)
            if self.agent is not None:
                self.agent.begin(self.writer)
            if self.writer.must_wait or self._ports.staging is not None:  # which moves the state
                self.await_copy(hear)
            self._ports.driver.accept()
        except BaseException as error:  # also torch's; the others must not wait for this rank
            if self.writer is not None and self.writer.of == of:
                self.writer.kill(timeout_s=0.0)  # first: it reads what is let go of
            self.give_up(of, error)
            self._ports.driver.refuse()
            draft.let_go()
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise

    def give_up(self, of: AttemptId, error: BaseException) -> None:
        """Give up an accepted share: the attempt fails at the next exchange."""
        detail = f"rank {self._rank}: {words_of(error)}"
        said = f"step {of.step}: the writer cannot start: {detail}"
        say(log.error, "fork_failed", said, exc_info=error, step=of.step, rank=self._rank)
        reason = SaveRefused.kind if is_about_a_value(error) else "fork_failed"
        self.owe(Failed(of, reason, detail, self._rank))
        self._given_up = of

    def note_due(self, now: float, view: View) -> None:
        """Put all reports that this rank owes into the outbox."""
        self.bury()
        if self.source is not None:
            self.source()
        if self.writer is not None:
            for event in self.writer.poll(now):
                self.owe(event)
        for of, state in view.unfinished.items():
            if self.is_orphan(of, state, view):
                detail = f"rank {self._rank}: the call that was to write it was interrupted"
                self.owe(Failed(of, "fork_failed", detail, self._rank))
                self._given_up = of

    def await_copy(self, hear: Callable[[], BaseException | None] = no_signal) -> None:
        """Wait until the writer needs the trainer's data no more; its deadline bounds the wait.

        ``hear`` runs the signal handlers that wait. The exception of one ends the wait.
        """
        if self.writer is not None:
            self.writer.await_copy(self._ports.clock, hear)

    def before_update(self, hear: Callable[[], BaseException | None]) -> None:
        """Return when the trainer may change its data, see ``RankWriter.before_update``."""
        if self.writer is not None:
            self.writer.before_update(self._ports.clock, hear)

    def _now(self) -> float:
        return self._ports.clock.monotonic()

    def is_orphan(self, of: AttemptId, state: State, view: View) -> bool:
        """True of an accepted attempt that this rank neither writes nor has given up."""
        shares = [writer.of for writer in (self.writer, *self._dying) if writer is not None]
        known = (*shares, self._bystander, self._given_up)
        return state in _BEGINNING and of not in known and not view.awaiting

    def owe(self, event: Event) -> None:
        """Report an event of this rank until an exchange takes it."""
        if event not in self._sent and event not in self.outbox:
            self.outbox.append(event)

    def end_writer(self, of: AttemptId) -> None:
        """Kill the writer of a failed attempt. Without one, report at once that it cannot write."""
        if self.writer is not None and self.writer.of == of:
            if self.writer not in self._dying:
                self._dying.append(self.writer)
            self.forget()
        elif of not in (*(writer.of for writer in self._dying), self._bystander):
            self.owe(WriterGone(of, self._rank))
        self.bury()

    def end(self) -> None:
        """Kill the writer, as the coordinator is gone."""
        if self.writer is not None:
            self._dying.append(self.writer)
            self.forget()
            self.bury()

    def forget(self) -> None:
        """Drop writer and draft: the save is over for this rank."""
        if self.agent is not None:
            self.agent.rest()
        if self.progress is not None:
            self.progress.end()
        self.writer = self._draft = None

    def taken(self, events: Sequence[Event]) -> None:
        """Note that an exchange took these reports, the first of the outbox."""
        self._sent.update(events)
        del self.outbox[: len(events)]  # after an interrupt here, the ledger ignores the repeats

    def forget_sent(self, unfinished: Collection[AttemptId]) -> None:
        """Keep only the sent reports of unfinished attempts."""
        self._sent = {event for event in self._sent if event.of in unfinished}

    def await_writer(self, timeout_s: float) -> str:
        """Wait for the writer without the other ranks. Returns its fault in words, or ""."""
        writer = self.writer
        if writer is None:
            return ""
        if not writer.wait(self._ports.clock, timeout_s):
            writer.kill(timeout_s)
            return f"is lost: its writer had not ended after {timeout_s} s"
        ends = writer.poll(self._now())
        return next((f"is lost: {end.detail}" for end in ends if isinstance(end, Failed)), "")

    def bury(self) -> None:
        """Kill writers of failed attempts; only one that is certainly gone is reported gone."""
        for writer in list(self._dying):
            if writer.kill(timeout_s=0.0):
                self.owe(WriterGone(writer.of, self._rank))
                self._dying.remove(writer)

    def run_finalizers(self, of: AttemptId) -> None:
        """Run the foreign finalizers, once: they hold collectives, so all ranks run them here."""
        draft, writer = self._draft, self.writer
        if draft is None or writer is None or writer.of != of:
            self._fail_finalizers(of, "this rank has no such save")
            return
        if self._finalizing == of:  # an interrupted run may not be repeated (I6)
            self._fail_finalizers(of, "interrupted")
            return
        self._finalizing = of
        ran = _Ran("", None, False)
        for part in draft.finalizers():
            ran = self._run_together(part.name, partial(_may_finalize, writer, part))
            if not ran.failed:
                ran = self._run_together(
                    part.name, partial(part.run, writer.payloads.get(part.name))
                )
            if ran.failed:
                break
        if ran.error:
            self._fail_finalizers(of, ran.error)
        else:
            self.owe(FinalizersRan(of, self._rank))
        if ran.leaving is not None:
            raise ran.leaving

    def _fail_finalizers(self, of: AttemptId, error: str) -> None:
        self.owe(Failed(of, "finalizers", f"rank {self._rank}: {error}", self._rank))

    def _run_together(self, name: str, work: Callable[[], None]) -> _Ran:
        """Run ``work`` and agree whether all ranks could: else some would wait in later
        collectives.
        """
        error, leaving = "", None
        try:
            work()
        except (KeyboardInterrupt, SystemExit) as problem:  # raised once the others have heard
            error, leaving = "interrupted", problem
        except BaseException as problem:  # torch's CheckpointException is one
            error = f"{name}: {describe(problem)}"
            said = f"the finalizers of {name} failed"  # the others may wait in a collective
            say(log.exception, "finalizers_failed", said, part=name)
        return _Ran(error, leaving, self._ports.transport.any_flags([bool(error)])[0])
