"""The writers of this rank, and the reports that it owes the coordinator.

Rules:
* A local error is a report: it is never raised between collectives, and comes back to every rank.
* The writer of a failed attempt is killed; a writer is reported gone only when that is certain.
* An interrupt loses no report. Each round of ``note_due`` asks anew what this rank owes: an attempt in
  flight that this rank has no share of is given up, and a report is sent until an exchange took it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from ckptfsm.adapters.notices import say
from ckptfsm.core.config import CheckpointConfig
from ckptfsm.core.errors import describe
from ckptfsm.core.events import Event, Failed, FinalizersRan, WriterGone
from ckptfsm.core.layout import LAYOUTS
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Draft, Finalizer, Ports, RankJob, Storage
from ckptfsm.core.requests import Accepted
from ckptfsm.ranks.handle import View
from ckptfsm.writers.plain_files import around, at_path
from ckptfsm.writers.rank_writer import RankWriter

log = logging.getLogger("ckptfsm")
_BEGINNING = (State.REQUESTED, State.FORKED)  # each rank that writes has a writer of these


class _Ran(NamedTuple):
    """What became of a step of the finalizers here; ``failed``: on some rank."""

    error: str
    leaving: BaseException | None
    failed: bool


def _may_finalize(writer: RankWriter, part: Finalizer) -> None:
    writer.refuse_anothers_place()
    problem = part.problem()
    if problem is not None:
        raise problem


class RankReports:
    """``writers`` is the number of ranks of a checkpoint. ``outbox`` holds the reports to be sent.

    ``source`` is called before each exchange, and adds the reports of other processes.
    """

    def __init__(self, ports: Ports, config: CheckpointConfig, writers: int) -> None:
        self.writer: RankWriter | None = None
        self.source: Callable[[], None] | None = None
        self.outbox: list[Event] = []
        self._ports = ports
        self._config = config
        self._rank, self._world_size = ports.transport.rank, writers
        self._sent: set[Event] = set()  # reports of this rank that an exchange took
        self._dying: list[RankWriter] = []
        self._draft: Draft | None = None
        self._bystander: AttemptId | None = None  # an attempt that this rank writes nothing of
        self._given_up: AttemptId | None = None
        self._finalizing: AttemptId | None = None  # its finalizers were begun here

    def begin_writing(
        self,
        storage: Storage,
        accepted: Accepted,
        draft: Draft,
    ) -> None:
        """Stage and fork. An error here is carried: the attempt fails at the next exchange.

        A rank that writes none of the parts has no writer.
        """
        of, specs = accepted.of, accepted.of_rank(self._rank)
        location = LAYOUTS[self._config.layout].working_dir(of, accepted.in_place)
        self._bystander = None if specs else of
        if not specs:
            self._ports.driver.accept()
            return
        try:
            with at_path(storage, location, specs) as path:
                staged = draft.stage(path, specs, accepted.planned)
            parts = tuple(around(job, accepted.parts) for job in staged)
            optional = frozenset(spec.name for spec in specs if spec.optional)
            job = RankJob(of, self._rank, self._world_size, location, parts, optional)
            deadline = self._ports.clock.monotonic() + self._config.writer_timeout_s
            self._draft = draft
            self.writer = RankWriter(storage, job, launch=self._ports.launch, deadline=deadline)
            draft.let_go()
            self._ports.driver.accept()
        except BaseException as error:  # also torch's; the others must not wait for this rank
            self.give_up(of, error)
            self._ports.driver.refuse()
            draft.let_go()
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise

    def give_up(self, of: AttemptId, error: BaseException) -> None:
        """This rank will not write what was accepted: the attempt fails at the next exchange."""
        detail = f"rank {self._rank}: {describe(error)}"
        said = f"step {of.step}: the writer cannot start: {detail}"
        say(log.error, "fork_failed", said, exc_info=error, step=of.step, rank=self._rank)
        self.owe(Failed(of, "fork_failed", detail, self._rank))
        self._given_up = of

    def note_due(self, now: float, view: View) -> None:
        """Put everything that this rank has to report into the outbox."""
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
        """The coordinator is gone: kill the writer, whatever it writes."""
        if self.writer is not None:
            self._dying.append(self.writer)
            self.forget()
            self.bury()

    def forget(self) -> None:
        """The save is over for this rank: it needs neither its writer nor its draft any more."""
        self.writer = self._draft = None

    def taken(self, events: Sequence[Event]) -> None:
        """An exchange took these reports, the first of the outbox."""
        self._sent.update(events)
        del self.outbox[: len(events)]  # an interrupt before this: the ledger takes each once

    def forget_sent(self, unfinished: Collection[AttemptId]) -> None:
        """Keep what was sent of unfinished attempts only."""
        self._sent = {event for event in self._sent if event.of in unfinished}

    def await_writer(self, timeout_s: float) -> str:
        """Wait for the writer without the other ranks. Returns what is wrong with it, in words."""
        writer = self.writer
        if writer is None:
            return ""
        if not writer.wait(timeout_s):
            writer.kill(timeout_s)
            return f"is lost: its writer had not ended after {timeout_s} s"
        ends = writer.poll(self._ports.clock.monotonic())
        return next((f"is lost: {end.detail}" for end in ends if isinstance(end, Failed)), "")

    def bury(self) -> None:
        """Kill writers of failed attempts; only one that is certainly gone is reported so."""
        for writer in list(self._dying):
            if writer.kill(timeout_s=0.0):
                self.owe(WriterGone(writer.of, self._rank))
                self._dying.remove(writer)

    def run_finalizers(self, of: AttemptId) -> None:
        """Foreign finalizers hold collectives: here all ranks run them at the same point, once."""
        draft, writer = self._draft, self.writer
        if draft is None or writer is None or writer.of != of:
            self._fail_finalizers(of, "this rank has no such save")
            return
        if self._finalizing == of:  # nobody knows how far they came (I6)
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
        """Do it, and hear whether all could: else some would wait in the next collectives for ever."""
        error, leaving = "", None
        try:
            work()
        except (KeyboardInterrupt, SystemExit) as problem:  # raised once the others have heard
            error, leaving = "interrupted", problem
        except BaseException as problem:  # torch's CheckpointException is one
            error = f"{name}: {describe(problem)}"
            said = f"the finalizers of {name} failed"  # the others may wait in their collectives
            say(log.exception, "finalizers_failed", said, part=name)
        return _Ran(error, leaving, self._ports.transport.any_flags([bool(error)])[0])
