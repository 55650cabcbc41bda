"""The controller of a root, in a job with one controller process and groups of workers. No torch.

Workers write their part of a checkpoint (``ckptfsm.ranks.group_worker``) and return their reports to
the controller, by any call that the job has: late, twice, or never. Every process that may write has
a number in the checkpoint: 0 is the controller, each group follows with its ranks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptfsm.adapters.local_transport import LocalTransport
from ckptfsm.adapters.notices import say
from ckptfsm.adapters.posix_storage import OpenPosix, path_of
from ckptfsm.core.config import CheckpointConfig, Settings, Verify, config_of
from ckptfsm.core.errors import ConfigError, WriterDied, name_ranks, shorten
from ckptfsm.core.events import (
    Event,
    Failed,
    Report,
    ShardReported,
    WriterForked,
    WriterGone,
    WritersLost,
    is_plausible,
)
from ckptfsm.core.formats import GROUP
from ckptfsm.core.layout import LAYOUTS
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.core.ports import Ports
from ckptfsm.core.recorded_metrics import measured
from ckptfsm.core.requests import Accepted, Located, SaveRequest
from ckptfsm.ranks.handle import SaveHandle
from ckptfsm.ranks.participant import Hook
from ckptfsm.ranks.session import Session, whole_step
from ckptfsm.ranks.tickets import GroupPart, GroupSave, Reading, Ticket
from ckptfsm.ranks.wiring import system_ports
from ckptfsm.writers.plain_files import FilesDriver

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("ckptfsm")
_ASK_EVERY_S = 0.1
_REMEMBERED = 8  # attempts given up before their workers confirmed


AskWorkers = Callable[[tuple[AttemptId, ...]], Iterable[Event]]


@dataclass(slots=True)
class _Flight:
    """An unfinished attempt: its deadline, the workers' ranks, and those that have written.

    ``taken`` are the reports that came: workers repeat them.
    """

    deadline: float
    ranks: frozenset[int]
    written: set[int] = field(default_factory=set)
    taken: set[Event] = field(default_factory=set)
    failed: bool = False


def controller_config(
    config: CheckpointConfig | Mapping[str, Any] | None, settings: Mapping[str, Any]
) -> CheckpointConfig:
    """The configuration of a controller. Raises ``ConfigError``."""
    read = config_of(config, settings)
    if read.sync:
        raise ConfigError("a controller cannot save synchronously: wait for the handle", key="sync")
    return read


class Controller(Session):
    """The life of the checkpoints below ``root``, for a job with one controller and ``groups`` of
    workers.

    ``groups`` has the number of ranks of each group. ``ask_workers(failed)`` asks every reachable
    worker for its reports (see ``GroupWorker.poll``) and returns them. The controller calls it
    while a save is in flight, also inside its waits. ``config`` or keyword arguments as for
    ``CheckpointManager``.

    Raises ``ConfigError``, ``RootBusy``, ``DamagedRoot``, ``StorageError``.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        groups: Mapping[str, int],
        ask_workers: AskWorkers,
        config: CheckpointConfig | Mapping[str, Any] | None = None,
        *,
        hooks: Sequence[Hook] = (),
        ports: Ports | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        self._first_rank = _number(groups)
        self._groups = dict(groups)
        self._ask_workers = ask_workers
        self._flights: dict[AttemptId, _Flight] = {}
        self._unconfirmed: dict[AttemptId, set[int]] = {}  # given up: ranks that may live
        self._asked_at = 0.0
        config = controller_config(config, settings)
        if ports is None:
            ports = system_ports(LocalTransport(), FilesDriver(), OpenPosix(path_of(root)))
        super().__init__(ports, config, hooks, writers=sum(groups.values()) + 1)
        self._reports = self._participant.reports
        self._reports.source = self._collect

    # ----------------------------------------------------------------------------------- save

    def begin(
        self,
        step: int,
        parts: Mapping[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> GroupSave:
        """Begin a checkpoint of ``step``. Hand each ticket to all workers of its group afterwards.

        ``parts`` maps names to a ``GroupPart``, or to bytes or a ``FileTree`` that the controller
        writes itself; a group without a part is not saved. A skipped save has no tickets, see
        ``CheckpointManager.save``. Raises ``SaveRefused``, ``ConfigError``, and ``SaveFailed`` for
        an earlier save that failed.
        """
        step = whole_step(step)
        groups = {n: v for n, v in parts.items() if isinstance(v, GroupPart)}
        silent = self._groups.keys() - {part.group for part in groups.values()}
        mixed = [name for name in parts if name in silent]
        if mixed:
            raise ConfigError(f"{mixed[0]!r} is a group: give a GroupPart", part=mixed[0])
        before = set(self._flights)
        try:
            with self._one_call.running(), self._participant.stalling(step):
                return self._request_and_write(step, parts, groups, metrics)
        except BaseException as error:  # the tickets of the accepted save are lost
            for of in self._flights.keys() - before:
                self._participant.expect(of)
                self._reports.fail_share(of, error)
            raise

    def _request_and_write(
        self,
        step: int,
        parts: Mapping[str, Any],
        groups: Mapping[str, GroupPart],
        metrics: Mapping[str, float] | None,
    ) -> GroupSave:
        """Ask for the save, write the controller's parts, and make a ticket for each group."""
        self._require_open()
        if not self._participant.await_previous_save(step):
            return GroupSave(SaveHandle(step), {})
        self._participant.allocation.save_begins()
        self._share.clear()
        draft = self._ports.driver.draft({n: v for n, v in parts.items() if n not in groups})
        written = self._specs_of(groups)
        specs = (*draft.specs, *written.values())
        request = SaveRequest(
            step,
            specs,
            self.writers,
            metrics=measured(metrics),
            expected_bytes=draft.expected_bytes,
        )
        accepted = self._participant.request(partial(self._accept, request))
        if accepted is None:
            return GroupSave(SaveHandle(step), {})
        of, grouped = accepted.of, (spec.ranks or () for spec in written.values())
        self._flights[of] = self._flight(rank for ranks in grouped for rank in ranks)
        handle = self._participant.start_save(self._storage, accepted, draft)
        # Then no other part has files in the checkpoint's directory itself.
        alone = all(isinstance(part, GroupPart) and part.directory == "" for part in parts.values())
        tickets = {v.group: self._ticket(of, v.group, written[n], alone) for n, v in groups.items()}
        return GroupSave(handle, tickets)

    def give_up(self, step: int, why: str) -> None:
        """Fail a save in flight whose tickets are not used, at the next ``poll`` (local).

        After a Ctrl-C behind ``begin``, say: it would be left to its deadline.
        """
        unfinished = self._participant.view.unfinished
        for of, state in unfinished.items():
            if of.step == step and state in (State.REQUESTED, State.FORKED):
                self._reports.report(Failed(of, "fork_failed", shorten(why)))

    def _specs_of(self, parts: Mapping[str, GroupPart]) -> dict[str, PartSpec]:
        """The groups' parts as declared. Raises ``ConfigError``."""
        specs: dict[str, PartSpec] = {}
        for name, part in parts.items():
            first = self._first_rank.get(part.group)
            if first is None:
                raise ConfigError(f"there is no group {part.group!r}", part=name)
            if [p.group for p in parts.values()].count(part.group) > 1:
                raise ConfigError(f"group {part.group!r} is to write two parts", part=name)
            directory = name if part.directory is None else part.directory
            ranks = tuple(range(first, first + self._groups[part.group]))
            specs[name] = PartSpec(name, GROUP.name, directory, ranks, part.optional)
        return specs

    def _accept(self, request: SaveRequest) -> Accepted:
        return Accepted(self._client.request(request), request.in_place, request.parts)

    def _flight(self, ranks: Iterable[int]) -> _Flight:
        deadline = self._ports.clock.monotonic() + self.config.writer_timeout_s
        return _Flight(deadline, frozenset(ranks))

    def _ticket(self, of: AttemptId, group: str, part: PartSpec, alone: bool) -> Ticket:
        layout = LAYOUTS[self.config.layout]
        return Ticket(
            of,
            self._storage.root,
            layout.working_dir(of, False),
            f"{self._storage.root}/{layout.published_name(of.step)}",
            part,
            self._first_rank[group],
            self._groups[group],
            self.writers,
            self.config.writer_timeout_s,
            alone,
        )

    # ----------------------------------------------------------------------------------- reports

    @property
    def failed(self) -> tuple[AttemptId, ...]:
        """The attempts that have failed or were given up: their writers are to be ended."""
        unfinished = self._participant.view.unfinished
        found = (of for of, state in unfinished.items() if state is State.FAILED)
        return (*found, *self._unconfirmed)

    def feed(self, reports: Iterable[Event]) -> None:
        """Take reports of workers. They take effect at the next ``poll``.

        Reports for no living save of this controller are dropped. Raises ``ConfigError`` for an
        object that is no report.
        """
        for event in reports:
            if not isinstance(event, Report):
                raise ConfigError(f"{type(event).__name__} is not a worker's report")
            self._take(event)

    def _take(self, event: Report) -> None:
        if not is_plausible(event):
            self._drop(event)
            return
        flight = self._flights.get(event.of)
        if isinstance(event, WriterGone) and event.of in self._unconfirmed:
            self._unconfirmed[event.of].discard(event.rank)
            if not self._unconfirmed[event.of]:  # then its workers need not be told any more
                del self._unconfirmed[event.of]
            return
        if flight is None:  # it has ended, or belongs to another controller
            said = f"step {event.of.step}: a late report is dropped: {event.name}"
            say(log.debug, "late_report_dropped", said, report=event.name, of=str(event.of))
            return
        if event.rank not in flight.ranks:
            self._drop(event)
            return
        if event in flight.taken:
            return
        if isinstance(event, ShardReported):
            flight.written.add(event.rank)
            # A written shard implies a fork, in any order of the reports.
            self._take(WriterForked(event.of, event.rank, event.world_size))
        if isinstance(event, Failed):
            self._reports.report(replace(event, detail=shorten(event.detail)))
        else:
            self._reports.report(event)
        if not isinstance(event, WriterGone):  # may come before its failure
            flight.taken.add(event)

    def _drop(self, event: Report) -> None:
        said = f"an implausible report is dropped: {event.name} of {shorten(str(event.of))}"
        say(log.warning, "report_dropped", said, report=event.name, of=str(event.of))

    def lost(self, group: str, ranks: Iterable[int] | None = None, detail: str = "") -> None:
        """Report workers of a group as dead, and their writers with them.

        ``ranks`` are numbered within the group, by default all. The unfinished shares of a dead
        worker fail. Raises ``ConfigError`` if there is no such rank.
        """
        if group not in self._groups:
            raise ConfigError(f"there is no group {group!r}")
        first, size = self._first_rank[group], self._groups[group]
        for rank in range(size) if ranks is None else ranks:
            if not 0 <= rank < size:
                raise ConfigError(f"group {group!r} has {size} ranks, and no rank {rank}")
            why = f"worker {rank} of group {group!r} is dead{': ' if detail else ''}{detail}"
            for of, flight in self._flights.items():
                self._lose(of, flight, first + rank, why)

    def _lose(self, of: AttemptId, flight: _Flight, number: int, why: str) -> None:
        state = self._participant.view.unfinished.get(of)
        if number not in flight.ranks or state is None:
            return
        if state is State.FAILED:
            self._reports.report(WriterGone(of, number))
        elif number not in flight.written:
            self._reports.report(Failed(of, WriterDied.kind, why, number))
            self._reports.report(WriterGone(of, number))

    def _collect(self) -> None:
        """Poll the workers, not too often, and end attempts without reports in time."""
        now = self._ports.clock.monotonic()
        try:
            if self._participant.view.unfinished and now - self._asked_at >= _ASK_EVERY_S:
                self._asked_at = now
                self.feed(self._ask_workers(self.failed))
        finally:
            self._end_in_time(self._ports.clock.monotonic())

    def _end_in_time(self, now: float) -> None:
        """Fail an attempt without reports in time, and clean up after unconfirmed writers.

        Its files were written in staging, where a late writer harms nothing. While a few later
        attempts go on, its workers are still told to end it. Recovery may leave attempts of an
        earlier controller unfinished; their late reports count no more.
        """
        unfinished = self._participant.view.unfinished
        begun = [of for of in unfinished if self.recovery and of.epoch == self.recovery.epoch]
        # The request of an attempt without a flight was interrupted: any worker may be told to end it.
        everyone = range(1, self.writers)
        self._flights = {of: self._flights.get(of) or self._flight(everyone) for of in begun}
        for of, flight in self._flights.items():
            if unfinished[of] is State.FAILED and not flight.failed:
                flight.failed, flight.deadline = True, now + self.config.exit_timeout_s
            if now < flight.deadline:
                continue
            flight.deadline = now + self.config.exit_timeout_s
            if unfinished[of] is State.FAILED:
                said = (
                    f"step {of.step}: workers of a failed save do not answer, and are not awaited"
                )
                say(log.warning, "workers_not_awaited", said, step=of.step)
                self._unconfirmed[of] = set(flight.ranks)
                while len(self._unconfirmed) > _REMEMBERED:
                    del self._unconfirmed[next(iter(self._unconfirmed))]
                self._reports.report(WritersLost(of))
            elif unfinished[of] in (State.REQUESTED, State.FORKED):
                missing = name_ranks(sorted(flight.ranks - flight.written))
                why = f"no report in time from rank {missing or '0'}"
                self._reports.report(Failed(of, "writer_hung", why))

    # ----------------------------------------------------------------------------------- reading

    @contextlib.contextmanager
    def reading(
        self, step: int | None = None, *, verify: Verify | None = None
    ) -> Iterator[Reading | None]:
        """Keep and verify the latest checkpoint, or that of ``step``, inside the block.

        ``verify`` overrides the configuration's. None if there is no evidence of any checkpoint.
        Raises ``StepNotFoundError``, ``DamagedRoot``.
        """
        self._require_open()
        config = self.config.model_copy(update={"verify": verify or self.config.verify})
        restorer = self._restorer(config)
        located: Located | None = None
        try:
            with self._one_call.running():
                located = restorer.choose(step)
            self._participant.emit_warnings()
            if located is None:
                yield None
            else:
                directory = self._storage.absolute(located.directory)
                yield Reading(located.step, directory, located.parts, located.of)
        finally:
            # Else the lease expires. At the program's end, the coordinator's thread no longer runs.
            if located is not None and not self._participant.closed and not sys.is_finalizing():
                restorer.release(located)


def _number(groups: Mapping[str, int]) -> dict[str, int]:
    """The number in a checkpoint of each group's first rank; the controller is 0."""
    numbers: dict[str, int] = {}
    following = 1
    for name, size in groups.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"group {name!r} needs at least one rank, not {size!r}")
        numbers[name] = following
        following += size
    return numbers
