"""The reports of this rank to the coordinator: each is sent until an exchange took it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from ckptfsm.adapters.notices import say
from ckptfsm.core.config import CheckpointConfig
from ckptfsm.core.errors import describe
from ckptfsm.core.events import Event, Failed, FinalizersRan, WriterGone
from ckptfsm.core.layout import LAYOUTS
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Draft, Finalizer, RankJob, Storage, Transport
from ckptfsm.core.requests import Accepted
from ckptfsm.ranks.handle import View
from ckptfsm.ranks.proposal import message_of
from ckptfsm.ranks.share import INTERRUPTED, CheckSignals, Share, not_begun, reason_of
from ckptfsm.writers.rank_writer import RankWriter

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
    """The reports of this rank and its ``share``. ``outbox`` holds the reports to be sent.

    ``writers`` is the number of ranks of a checkpoint. ``source`` is called before each exchange,
    and adds the reports of other processes.
    """

    def __init__(
        self, transport: Transport, config: CheckpointConfig, share: Share, writers: int
    ) -> None:
        self.source: Callable[[], None] | None = None
        self.outbox: list[Event] = []
        self._transport = transport
        self._config = config
        self._share = share
        self._rank, self._world_size = transport.rank, writers
        self._sent: set[Event] = set()  # reports of this rank that an exchange took
        self._bystander: AttemptId | None = None  # an attempt without a share of this rank
        self._failed_here: AttemptId | None = None
        self._finalizing: AttemptId | None = None  # the attempt with finalizers begun here

    def launch_share(
        self, storage: Storage, accepted: Accepted, draft: Draft, check_signals: CheckSignals
    ) -> None:
        """Stage, and launch the writer. An error is carried: the attempt fails at the next exchange.

        A rank that writes none of the parts has no writer. ``check_signals``: see ``Share.write``.
        """
        of, specs = accepted.of, accepted.of_rank(self._rank)
        self._bystander = None if specs else of
        if not specs:
            self._share.stand_by()
            return
        try:
            location = LAYOUTS[self._config.layout].working_dir(of, accepted.in_place)
            parts = self._share.stage(storage, location, accepted, draft)
            optional = frozenset(spec.name for spec in specs if spec.optional)
            late_s = self._config.visibility_timeout_s
            job = RankJob(of, self._rank, self._world_size, location, parts, optional, late_s)
            timeout_s = self._config.writer_timeout_s
            self._share.write(storage, job, timeout_s, draft, check_signals)
        except BaseException as error:  # also torch's; the others must not wait for this rank
            self._share.undo(draft)
            self.fail_share(of, error)
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise

    def fail_share(self, of: AttemptId, error: BaseException) -> None:
        """Fail an accepted share: the attempt fails at the next exchange."""
        failed = not_begun(of, self._rank, message_of(error), reason_of(error))
        said = f"step {of.step}: the writer cannot start: {failed.detail}"
        say(log.error, "fork_failed", said, exc_info=error, step=of.step, rank=self._rank)
        self.report_once(failed)
        self._failed_here = of

    def note_due(self, view: View) -> None:
        """Put all reports that are due into the outbox, anew in each round: an interrupt loses none."""
        self._sent = {event for event in self._sent if event.of in view.unfinished}
        if self.source is not None:
            self.source()
        for event in self._share.reports():
            self.report_once(event)
        for of, state in view.unfinished.items():
            if self.is_orphan(of, state, view):
                self.report_once(not_begun(of, self._rank, INTERRUPTED))
                self._failed_here = of
        self._report_exits()  # last: an attempt's failure comes before the end of its writer

    def is_orphan(self, of: AttemptId, state: State, view: View) -> bool:
        """True of an accepted attempt that this rank neither writes nor has failed."""
        writer = self._share.writer
        known = (writer.of if writer is not None else None, self._bystander, self._failed_here)
        return state in _BEGINNING and of not in known and not view.awaiting

    def report(self, event: Event) -> None:
        """Send an event with the next exchange."""
        self.outbox.append(event)

    def report_once(self, event: Event) -> None:
        """Report an event of this rank until an exchange takes it."""
        if event not in self._sent and event not in self.outbox:
            self.outbox.append(event)

    def end_writer(self, of: AttemptId) -> None:
        """Kill the writer of a failed attempt. Without one, report at once that it cannot write."""
        writer = self._share.writer
        if writer is not None and writer.of == of:
            self._share.drop()
        elif of not in (*self._share.exiting, self._bystander):
            self.report_once(WriterGone(of, self._rank))
        self._report_exits()

    def _report_exits(self) -> None:
        for of in self._share.exited():
            self.report_once(WriterGone(of, self._rank))

    def taken(self, events: Sequence[Event]) -> None:
        """Note that an exchange took these reports, the first of the outbox."""
        self._sent.update(events)
        del self.outbox[: len(events)]  # after an interrupt here, the ledger ignores the repeats

    def await_writer(self, timeout_s: float) -> str:
        """Wait for the writer without the other ranks. Returns its fault in words, or ""."""
        if not self._share.await_end(timeout_s):
            return f"is lost: its writer had not ended after {timeout_s} s"
        ends = self._share.reports()
        return next((f"is lost: {end.detail}" for end in ends if isinstance(end, Failed)), "")

    def run_finalizers(self, of: AttemptId) -> None:
        """Run the foreign finalizers, once: they hold collectives, so all ranks run them here."""
        writer = self._share.writer
        if writer is None or writer.of != of:
            self._fail_finalizers(of, "this rank has no such save")
            return
        if self._finalizing == of:  # an interrupted run may not be repeated (I6)
            self._fail_finalizers(of, "interrupted")
            return
        self._finalizing = of
        ran = _Ran("", None, False)
        for part in self._share.finalizers:
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
            self.report_once(FinalizersRan(of, self._rank))
        if ran.leaving is not None:
            raise ran.leaving

    def _fail_finalizers(self, of: AttemptId, error: str) -> None:
        self.report_once(Failed(of, "finalizers", f"rank {self._rank}: {error}", self._rank))

    def _run_together(self, name: str, work: Callable[[], None]) -> _Ran:
        """Run ``work`` and agree whether all ranks could: else some would wait in later
        collectives.
        """
        error, leaving = "", None
        try:
            work()
        except (KeyboardInterrupt, SystemExit) as problem:  # raised once the others know of it
            error, leaving = "interrupted", problem
        except BaseException as problem:  # torch's CheckpointException is one
            error = f"{name}: {describe(problem)}"
            said = f"the finalizers of {name} failed"  # the others may wait in a collective
            say(log.exception, "finalizers_failed", said, part=name)
        return _Ran(error, leaving, self._transport.any_flags([bool(error)])[0])
