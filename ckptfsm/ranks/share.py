"""This process's share of a save: planned with the other ranks, then written by a writer, to its end.

A rank of a job has one such object, and so has a worker of a group. They differ in who is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckptfsm.core.config import CheckpointConfig
from ckptfsm.core.errors import SaveRefused, describe
from ckptfsm.core.events import Event, Failed
from ckptfsm.core.parts import AttemptId, Planned
from ckptfsm.core.ports import Draft, Finalizer, PartJob, Ports, RankJob, Storage
from ckptfsm.core.requests import Accepted, SaveRequest
from ckptfsm.disk.visibility import Visibility
from ckptfsm.ranks.agent import Agent
from ckptfsm.ranks.comparing import Comparison, Difference
from ckptfsm.ranks.progress import ShareProgress
from ckptfsm.ranks.proposal import Proposal, ProposedCall, agree, is_about_a_value, propose
from ckptfsm.writers.plain_files import at_path, planned_bytes, without_inner_parts
from ckptfsm.writers.rank_writer import RankWriter

INTERRUPTED = "the call that was to write it was interrupted"
CheckSignals = Callable[[], BaseException | None]


class Proposed(NamedTuple):
    """The draft of this rank, if it could make one, and the proposals ``by_rank``, at the first rank."""

    draft: Draft | None
    by_rank: list[Proposal] | None
    differences: Sequence[Difference]


class Share:
    """The share, see the module. ``writer`` and ``finalizers`` are those of the save in flight.

    ``progress`` tells that of the newest save, from any thread. ``agent`` carries reports
    between the rounds, if there is one.
    """

    def __init__(self, ports: Ports, config: CheckpointConfig) -> None:
        self.writer: RankWriter | None = None
        self.finalizers: list[Finalizer] = []
        self.progress = ShareProgress(ports.clock)
        self.agent: Agent | None = None
        self._ports = ports
        self._config = config
        self.comparison = Comparison(ports.transport, config.ranks_disagree)
        self._exiting: list[RankWriter] = []

    # ------------------------------------------------------------------------------------- the plan

    def propose(
        self,
        step: int,
        call: ProposedCall,
        metrics: Mapping[str, float] | None = None,
        directories: tuple[str, ...] = (),
    ) -> Proposed:
        """Plan a save, and send the plan, or its error, to the first rank (collective)."""
        ranks = self._ports.transport.world_size
        draft, proposal = propose(self._ports.driver, ranks, step, call, metrics)
        digests = self.comparison.digests_of(draft) if draft is not None else ()
        proposal = replace(proposal, digests=digests, directories=directories)
        gathered = self._ports.transport.gather(proposal)
        return Proposed(draft, gathered, self.comparison.differences(gathered, draft))

    def agree(self, proposed: Proposed) -> tuple[SaveRequest, Mapping[str, Planned]]:
        """At the first rank: the request that all proposals make, and its planned metadata.

        Raises ``SaveRefused``, and what the driver raises.
        """
        proposals = proposed.by_rank or []
        request = agree(proposals)
        if proposed.differences:
            self.comparison.refuse(request.step, proposed.differences)
        try:
            return request, self._ports.driver.merge([p.summary for p in proposals])
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # torch's CheckpointException is one: the others wait
            said = f"the save cannot begin: {describe(error)}"
            raise SaveRefused(said, step=request.step) from error

    # ----------------------------------------------------------------------------------- the writer

    def clear(self) -> None:
        """Note that a new save begins, of which nothing is written yet."""
        self.progress = ShareProgress(self._ports.clock)

    def stage(
        self, storage: Storage, location: str, accepted: Accepted, draft: Draft
    ) -> tuple[PartJob, ...]:
        """Bring the data of this rank's parts to where the writer finds it. Returns the jobs."""
        specs = accepted.of_rank(self._ports.transport.rank)
        visibility = Visibility(self._ports.clock, self._config.visibility_timeout_s)
        with at_path(storage, location, specs, visibility) as path:
            staged = draft.stage(path, specs, accepted.planned)
        return tuple(without_inner_parts(job, accepted.parts) for job in staged)

    def write(
        self,
        storage: Storage,
        job: RankJob,
        timeout_s: float,
        draft: Draft | None,
        check_signals: CheckSignals,
    ) -> None:
        """Launch the writer, and return when the trainer's next call may be made.

        ``timeout_s`` is the writer's time. ``draft`` holds the data of the job; None if it has none.
        ``check_signals`` runs the signal handlers that wait. The exception of one ends the wait
        for the copy.
        """
        self.finalizers = [] if draft is None else draft.finalizers()
        deadline = self._ports.clock.monotonic() + timeout_s
        launch = self._ports.launch
        self.writer = RankWriter(storage, job, launch=launch, deadline=deadline, draft=draft)
        self.writer.check_launch()
        total = planned_bytes(job.parts) or (draft.expected_bytes if draft is not None else None)
        self.progress.follow(self.writer, total or None)
        if self.agent is not None:
            self.agent.watch(self.writer)
        if draft is None:
            return
        if self.writer.must_wait:
            self.await_copy(check_signals)
        self._ports.driver.accept()

    def stand_by(self) -> None:
        """Take part in a save of which this rank writes nothing."""
        if self.agent is not None:
            self.agent.watch(None)
        self._ports.driver.accept()

    def undo(self, draft: Draft | None) -> None:
        """Let go of a save that was refused, or that could not begin here."""
        self.drop()  # first: it reads what is let go of
        self._ports.driver.refuse()
        if draft is not None:
            draft.let_go()

    def await_copy(self, check_signals: CheckSignals) -> None:
        """Wait until the writer needs the trainer's data no more; its deadline bounds the wait."""
        if self.writer is not None:
            self.writer.await_copy(self._ports.clock, check_signals)

    def reports(self) -> list[Event]:
        """The writer's reports so far, again at every call."""
        return [] if self.writer is None else self.writer.poll(self._ports.clock.monotonic())

    # -------------------------------------------------------------------------------------- its end

    def await_end(self, timeout_s: float) -> bool:
        """Wait for the writer, then end it. True if it ended in time, or there is none."""
        ended = self.writer is None or self.writer.wait(self._ports.clock, timeout_s)
        if self.writer is not None and not ended:
            self.writer.kill(timeout_s)
        return ended

    def forget(self) -> None:
        """Drop the writer: the save is over for this rank."""
        if self.agent is not None:
            self.agent.pause()
        self.progress.end()
        self.writer, self.finalizers = None, []

    def drop(self, timeout_s: float = 0.0) -> None:
        """End the writer, if there is one, and look after it until it is gone: see ``exited``.

        ``timeout_s`` is the time to wait for that here.
        """
        writer = self.writer
        if writer is None:
            return
        if writer not in self._exiting:  # first: an interrupt here must not lose it
            self._exiting.append(writer)
        self.forget()
        writer.kill(timeout_s)

    def exited(self) -> Iterator[AttemptId]:
        """The attempts whose dropped writers are certainly gone by now, each once.

        One that the caller did not get to take is given again.
        """
        for writer in list(self._exiting):
            if writer.kill(timeout_s=0.0):
                yield writer.of
                self._exiting.remove(writer)

    @property
    def exiting(self) -> tuple[AttemptId, ...]:
        """The attempts of dropped writers that may still write."""
        return tuple(writer.of for writer in self._exiting)


def not_begun(of: AttemptId, rank: int, why: str, reason: str = "fork_failed") -> Failed:
    """The report of a share that cannot begin."""
    return Failed(of, reason, f"rank {rank}: {why}", rank)


def reason_of(error: BaseException) -> str:
    """The reason of a save that failed because a share could not begin."""
    return SaveRefused.kind if is_about_a_value(error) else "fork_failed"
