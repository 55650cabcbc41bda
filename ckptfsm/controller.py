"""The owner of a root in a job with one controller: a Ray driver, say, and groups of workers. No torch.

Workers write their part of a checkpoint (``ckptfsm.worker``) and hand their reports to the controller,
by whatever call the job has; the controller feeds them to the same coordinator that an SPMD job has in
its rank 0. The same ledger, the same journal, the same recovery.

Rules:
* Every process that may write has a number of its own in the checkpoint: 0 is the controller, each
  group follows with its ranks. A group writes exactly one part, of its own name or another.
* A report counts for its own attempt only; it may come late, twice, or never. What never comes ends
  with the attempt's deadline.
* Workers are told which attempt has failed when they are polled: that ends their writers.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptfsm.clock import SystemClock
from ckptfsm.config import CheckpointConfig, config_of
from ckptfsm.coordinator import Coordinator, SaveRequest
from ckptfsm.errors import ConfigError, DeadlineExceeded, WriterDied, name_ranks
from ckptfsm.executor import ThreadExecutor
from ckptfsm.files import FilesDriver
from ckptfsm.handle import SaveHandle
from ckptfsm.layout import LAYOUTS
from ckptfsm.lease import this_process
from ckptfsm.lifecycle import State
from ckptfsm.messages import (
    AttemptId,
    Event,
    Failed,
    PartSpec,
    ShardReported,
    WriterForked,
    WriterGone,
    WritersLost,
)
from ckptfsm.owner import Owner, whole_step
from ckptfsm.ports import Ports
from ckptfsm.proposal import Accepted
from ckptfsm.pump import Hook
from ckptfsm.restoring import Restorer
from ckptfsm.storage import OpenPosix
from ckptfsm.transport import LocalTransport
from ckptfsm.writer import launch_forked

log = logging.getLogger("ckptfsm")
_ASK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class GroupPart:
    """A part that a group of workers writes. ``directory`` is the part's; by default its name."""

    group: str
    directory: str | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a group's workers need to know of a save that was accepted. Can be pickled.

    ``first_rank`` is the number of the group's rank 0 in the checkpoint, ``size`` how many ranks it
    has; ``published`` the absolute directory that the checkpoint will have.
    """

    of: AttemptId
    root: str
    location: str
    published: str
    part: PartSpec
    first_rank: int
    size: int
    world_size: int
    timeout_s: float

    @property
    def directory(self) -> str:
        """Absolute directory of the part, while it is being written."""
        base = f"{self.root}/{self.location}"
        return f"{base}/{self.part.directory}" if self.part.directory else base


@dataclass(frozen=True, slots=True)
class Reading:
    """A checkpoint that is being read: ``directory`` is absolute; no ``parts`` if it was adopted."""

    step: int
    directory: str
    parts: tuple[PartSpec, ...]


AskWorkers = Callable[[tuple[AttemptId, ...]], Iterable[Event]]


@dataclass(frozen=True, slots=True)
class GroupSave:
    """A save that was begun: its handle, and for each group what its workers need to know.

    There are no tickets if the save was skipped, because another one was in flight.
    """

    handle: SaveHandle
    tickets: Mapping[str, Ticket]


class Controller(Owner):
    """The life of the checkpoints below ``root``, for a job of one controller and ``groups`` of workers.

    ``groups`` says how many ranks each group has. ``ask_workers(doomed)`` asks every worker that can
    be asked for its reports (see ``GroupWorker.poll``) and returns them; it is called while a save is
    in flight, also where the controller waits. ``config`` or keyword arguments as for
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
        **settings: Any,
    ) -> None:
        self._first_rank = _number(groups)
        self._groups = dict(groups)
        self._ask_workers = ask_workers
        self._deadlines: dict[AttemptId, float] = {}
        self._written: set[int] = (
            set()
        )  # ranks of the newest attempt that have nothing left to write
        self._dying: set[AttemptId] = set()
        self._asked_at = 0.0
        if ports is None:
            ports = _ports(os.fspath(root), sum(groups.values()) + 1)
        super().__init__(ports, config_of(config, settings), hooks)
        self._pump.source = self._collect

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
        writes itself. Raises ``SaveRefused``, ``SaveFailed`` for an earlier save that failed,
        ``ConfigError``.
        """
        self._require_open()
        step = whole_step(step)
        self._watch_polls(step)
        if not self._make_way(step):
            return GroupSave(SaveHandle(step), {})
        own = {n: v for n, v in parts.items() if not isinstance(v, GroupPart)}
        draft = self._ports.driver.draft(own)
        written = {n: self._spec_of(n, v) for n, v in parts.items() if isinstance(v, GroupPart)}
        specs = (*draft.specs, *written.values())
        measured = tuple(sorted((str(k), float(v)) for k, v in (metrics or {}).items()))
        request = SaveRequest(
            step, specs, self.world_size, metrics=measured, expected_bytes=draft.expected_bytes
        )
        of = self._accepted(request)
        self._deadlines[of] = self._ports.clock.monotonic() + self.config.writer_timeout_s
        self._written = set()
        handle = self._pump.begin_writing(self._storage, Accepted(of, False, specs), draft)
        self._unpolled_since = step
        tickets = {
            v.group: self._ticket(of, v.group, written[n])
            for n, v in parts.items()
            if isinstance(v, GroupPart)
        }
        return GroupSave(handle, tickets)

    def _spec_of(self, name: str, part: GroupPart) -> PartSpec:
        first = self._first_rank.get(part.group)
        if first is None:
            raise ConfigError(f"there is no group {part.group!r}", part=name)
        directory = name if part.directory is None else part.directory
        ranks = tuple(range(first, first + self._groups[part.group]))
        return PartSpec(name, "report", directory, ranks, part.optional)

    def _accepted(self, request: SaveRequest) -> AttemptId:
        try:
            answer = self._link.together(Coordinator.request, request)
        except BaseException:  # a Ctrl-C: nobody will write it
            self._link.forget_request()
            raise
        if isinstance(answer.error, DeadlineExceeded):
            self._link.forget_request()
        self._pump.take_answer(answer)
        if answer.error is not None:
            raise answer.error
        of: AttemptId = answer.value
        return of

    def _ticket(self, of: AttemptId, group: str, part: PartSpec) -> Ticket:
        layout = LAYOUTS[self.config.layout]
        return Ticket(
            of,
            self._storage.root,
            layout.working_dir(of, False),
            f"{self._storage.root}/{layout.published_name(of.step)}",
            part,
            self._first_rank[group],
            self._groups[group],
            self.world_size,
            self.config.writer_timeout_s,
        )

    # ----------------------------------------------------------------------------------- reports

    @property
    def doomed(self) -> tuple[AttemptId, ...]:
        """The attempts that have failed: their writers are to be ended."""
        unsettled = self._pump.view.unsettled
        return tuple(of for of, state in unsettled.items() if state is State.FAILED)

    def feed(self, reports: Iterable[Event]) -> None:
        """Take what workers reported. It counts at the next ``poll``."""
        for event in reports:
            if not isinstance(event, (WriterForked, ShardReported, Failed, WriterGone)):
                raise ConfigError(f"{type(event).__name__} is not a worker's report")
            if isinstance(event, ShardReported) and event.of in self._deadlines:
                self._written.add(event.rank)
            self._pump.report(event)

    def lost(self, group: str, ranks: Iterable[int] | None = None, detail: str = "") -> None:
        """Say that workers of a group are dead, and their writers with them.

        ``ranks`` are the group's own, by default all. What such a worker had not finished fails.
        """
        first, size = self._first_rank[group], self._groups[group]
        for rank in range(size) if ranks is None else ranks:
            number = first + rank
            for of, state in self._pump.view.unsettled.items():
                writing = state in (State.REQUESTED, State.FORKED) and number not in self._written
                if writing:
                    why = (
                        f"worker {rank} of group {group!r} is dead{': ' if detail else ''}{detail}"
                    )
                    self._pump.report(Failed(of, WriterDied.kind, why, number))
                if writing or state is State.FAILED:
                    self._pump.report(WriterGone(of, number))

    def _collect(self) -> None:
        """Ask the workers, not too often, and end what nobody reports on in time."""
        view, now = self._pump.view, self._ports.clock.monotonic()
        if view.unsettled and now - self._asked_at >= _ASK_EVERY_S:
            self._asked_at = now
            self.feed(self._ask_workers(self.doomed))
        self._end_in_time(now)

    def _end_in_time(self, now: float) -> None:
        """Fail an attempt whose reports do not come, and clean up after writers that nobody confirms.

        It was written aside, where a late writer harms nothing.
        """
        unsettled = self._pump.view.unsettled
        self._deadlines = {of: at for of, at in self._deadlines.items() if of in unsettled}
        self._dying &= set(unsettled)
        for of, state in unsettled.items():
            if state is State.FAILED and of not in self._dying:
                self._dying.add(of)
                self._deadlines[of] = now + self.config.exit_timeout_s
            if of not in self._deadlines or now < self._deadlines[of]:
                continue
            self._deadlines[of] = now + self.config.exit_timeout_s
            if state is State.FAILED:
                log.warning("workers_not_awaited", extra={"step": of.step})
                self._pump.report(WritersLost(of))
            elif state in (State.REQUESTED, State.FORKED):
                missing = sorted(set(range(1, self.world_size)) - self._written)
                why = f"no report in time from rank {name_ranks(missing)}"
                self._pump.report(Failed(of, "writer_hung", why))

    # ----------------------------------------------------------------------------------- reading

    @contextlib.contextmanager
    def reading(self, step: int | None = None) -> Iterator[Reading | None]:
        """The latest checkpoint, or that of ``step``, verified and kept from retention meanwhile.

        None if there is no evidence of any checkpoint. Raises ``StepNotFoundError``, ``DamagedRoot``.
        """
        self._require_open()
        restorer = Restorer(self._ports, self._storage, self.config, self._agree)
        located = restorer.choose(step)
        self._pump.say_notes()
        if located is None:
            yield None
            return
        try:
            yield Reading(located.step, f"{self._storage.root}/{located.directory}", located.parts)
        finally:
            self._agree(Coordinator.release, located.lease)


def _number(groups: Mapping[str, int]) -> dict[str, int]:
    """The number in a checkpoint of each group's first rank: the controller is 0."""
    numbers: dict[str, int] = {}
    following = 1
    for name, size in groups.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"group {name!r} needs at least one rank, not {size!r}")
        numbers[name] = following
        following += size
    return numbers


def _ports(root: str, world_size: int) -> Ports:
    return Ports(
        LocalTransport(world_size),
        FilesDriver(),
        SystemClock(),
        ThreadExecutor,
        OpenPosix(root),
        this_process,
        launch_forked,
    )
