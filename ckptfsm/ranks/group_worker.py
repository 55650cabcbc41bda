"""A worker of a group, in a job with one controller: writes its share of a part. No torch.

``write`` is collective in the group. All later calls are local, so that a dead worker never leaves
another one waiting. An error is a report, not an exception: the controller decides. A controller
without torch cannot complete the group's part: the writer of the group's first rank does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from ckptfsm.adapters.notices import say
from ckptfsm.adapters.signals import OneCall
from ckptfsm.core.config import CheckpointConfig
from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import ConfigError, SaveFailed, SaveRefused, describe
from ckptfsm.core.events import Event, WriterGone
from ckptfsm.core.formats import GROUP
from ckptfsm.core.layout import join, planned_name
from ckptfsm.core.parts import AttemptId, PartSpec, check_parts, is_part_name
from ckptfsm.core.ports import Clock, Draft, PartFinisher, PartJob, Ports, RankJob, Storage, Written
from ckptfsm.core.progress import Progress
from ckptfsm.core.requests import Accepted, Located
from ckptfsm.disk.durable import make_dirs, read_document
from ckptfsm.disk.receipts import Receipts
from ckptfsm.disk.stock import MAX_METADATA_BYTES
from ckptfsm.disk.visibility import Visibility
from ckptfsm.ranks.coordinator_client import Answer, share_answer
from ckptfsm.ranks.handle import Restored
from ckptfsm.ranks.proposal import ProposedCall, message_of
from ckptfsm.ranks.restoring import Restorer, refuse_unknown_parts, warn_of_rest
from ckptfsm.ranks.share import INTERRUPTED, Proposed, Share, not_begun, reason_of
from ckptfsm.ranks.shared_root import open_when_visible
from ckptfsm.ranks.tickets import Reading, Ticket
from ckptfsm.writers.plain_files import LeftOutPart, TreePart, file_spec, is_file
from ckptfsm.writers.shard_file import ShardFile

log = logging.getLogger("ckptfsm")
Parts = Mapping[str, Any]
_KILL_WAIT_S = 1.0


class BaseGroupWorker:
    """A rank of a group of workers: ``ports.transport`` connects the group.

    ``open_storage`` of the ports opens the root of a ticket. ``config`` is used for restoring.
    """

    def __init__(self, ports: Ports, config: CheckpointConfig | None = None) -> None:
        self._ports = ports
        self._one_call = OneCall(ports.defer_signals)
        self._config = config or CheckpointConfig()
        self._share = Share(ports, self._config)
        self._newest: AttemptId | None = None  # of the newest ticket
        self._begun = False  # its writer was launched, or its failure reported
        self._reports: list[Event] = []  # of the newest ticket, without its writer's
        self._number = 0
        self._storage: Storage | None = None

    # ----------------------------------------------------------------------------------- writing

    def write(
        self, ticket: Ticket, state: Any = None, *, parts: Parts | Callable[[], Parts] | None = None
    ) -> list[Event]:
        """Begin to write this rank's share (collective in the group). Returns reports.

        ``state`` is a sharded state dict for the part's directory itself. ``parts`` maps inner
        directories to several of them, to a ``FileTree``, or to None if other ranks write it. It
        maps names of files in the part's directory to bytes or to a ``TorchFile``: such a file is
        this rank's own, and other ranks do not name it. ``parts`` may be a function that returns them.

        When it returns, the tensors may change. A second call with the same ticket does nothing and
        returns the ticket's reports. Raises ``RankFailed`` if a rank of the group is gone.
        """
        with self._one_call.running():
            if not self._is_newer(ticket.of):  # a retried call counts once
                return self.poll() if ticket.of == self._newest else []
            self._share.drop(_KILL_WAIT_S)  # of a failed attempt, before the next one takes memory
            self._share.clear()
            self._number = ticket.first_rank + self._ports.transport.rank
            self._begun, self._reports, self._newest = False, [], ticket.of
            self._write(ticket, GroupParts.of(ticket.part, state, _parts_of(parts)))
            return self.poll()

    def _is_newer(self, of: AttemptId) -> bool:
        newest = self._newest
        return newest is None or (of.epoch, of.attempt) > (newest.epoch, newest.attempt)

    def _write(self, ticket: Ticket, shares: GroupParts) -> None:
        """Plan with the group, stage and fork; an error becomes a report."""
        call, step = ProposedCall(parts=shares.values, own=shares.own), ticket.of.step
        directories = tuple(shares.keys.values())
        proposed = self._share.propose(step, call, directories=directories)
        draft, answer = proposed.draft, Answer()
        if proposed.by_rank is not None:
            answer = self._agree_on_plan(ticket, shares, proposed)
        answer = share_answer(self._ports.transport, answer)
        try:
            if answer.error is not None:
                raise answer.error
            assert draft is not None
            self._stage_and_launch(ticket, draft, answer.value, shares)
        except BaseException as error:  # also torch's: the controller must learn of it
            self._share.undo(draft)
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            if error is not answer.error:
                said = f"step {ticket.of.step}: rank {self._number} cannot start its writer"
                say(log.exception, "fork_failed", said, step=ticket.of.step, rank=self._number)
            self._fail_or_leave_out(ticket, error)

    def _fail_or_leave_out(self, ticket: Ticket, error: BaseException) -> None:
        """Report a failure; for an optional part, make a receipt that leaves the part out."""
        if not ticket.part.optional:
            self._fail(ticket.of, message_of(error), reason_of(error))
            return
        try:
            left_out = LeftOutPart(ticket.part.name, ticket.part.directory, message_of(error))
            self._launch(ticket, left_out, None)
        except Exception as second:  # without that receipt the checkpoint fails
            self._share.undo(None)
            self._fail(ticket.of, f"{message_of(error)}; {describe(second)}")

    def _agree_on_plan(self, ticket: Ticket, shares: GroupParts, proposed: Proposed) -> Answer:
        """At the group's first rank: the plan of all ranks, or what is wrong with it."""
        ranks = len(proposed.by_rank or ())
        if proposed.differences:
            self._share.comparison.warn_of(ticket.of.step, proposed.differences)
        try:
            if ticket.size != ranks:
                raise ConfigError(
                    f"the controller counts {ticket.size} ranks in this group, it has {ranks}"
                )
            request, planned = self._share.agree(proposed)
            _refuse_other_parts(request.parts)
            check_parts(tuple(map(shares.place, request.parts)), ranks)
            return Answer(Accepted(ticket.of, False, request.parts, planned))
        except SaveRefused as error:
            return Answer(error=error)
        except Exception as error:  # the others wait
            return Answer(error=SaveRefused(message_of(error)))

    def _stage_and_launch(
        self, ticket: Ticket, draft: Draft, accepted: Accepted, shares: GroupParts
    ) -> None:
        """Stage, and launch the writer, as a rank of an SPMD job does."""
        storage, directory = self._open(ticket.root), ticket.part.directory
        if directory:
            visibility = Visibility(self._ports.clock, self._config.visibility_timeout_s)
            visibility.require(storage, ticket.location)
            make_dirs(visibility.of_directories(storage), directory, base=ticket.location)
        placed = replace(accepted, parts=tuple(map(shares.place, accepted.parts)))
        jobs = self._share.stage(storage, ticket.location, placed, draft)
        if not ticket.alone and any(isinstance(j, TreePart) and not j.directory for j in jobs):
            raise ConfigError("a FileTree needs a directory of its own", part=ticket.part.name)
        first, finishers = self._ports.transport.rank == 0, self._ports.driver.finishers
        unfinished = tuple(
            Unfinished(spec.name, spec.directory, finishers[spec.kind])
            for spec in placed.parts
            if first and spec.kind in finishers
        )
        name, clock = ticket.part.name, self._ports.clock
        share = GroupShare(name, directory, ticket, self._number, jobs, unfinished, clock)
        self._launch(ticket, share, draft)

    def before_update(self) -> None:
        """Wait until this rank's writer has read the state (local): call before changing it.

        Needed with ``engine="gated"``; otherwise returns at once. A state that changes earlier
        fails its save. An interrupt ends the wait: the state may not change yet.
        """
        writer = self._share.writer
        if writer is None or writer.has_copy:
            return
        with self._one_call.running():
            writer.before_update(self._ports.clock, self._one_call.hear)

    def _launch(self, ticket: Ticket, share: PartJob, draft: Draft | None) -> None:
        """Let a writer write the share; ``draft`` has its data."""
        optional = frozenset({ticket.part.name} if ticket.part.optional else ())
        job = RankJob(
            ticket.of,
            self._number,
            ticket.world_size,
            ticket.location,
            (share,),
            optional,
            self._config.visibility_timeout_s,
        )
        check_signals = self._one_call.check_exit
        self._share.write(self._open(ticket.root), job, ticket.timeout_s, draft, check_signals)
        self._begun = True

    def _open(self, root: str) -> Storage:
        if self._storage is None:
            late_s = self._config.visibility_timeout_s
            self._storage = open_when_visible(self._ports, late_s)
        if self._storage.root != root:
            raise ConfigError(f"this worker works on {self._storage.root}, not on {root}")
        return self._storage

    def _fail(self, of: AttemptId, *why: str) -> None:
        self._reports.append(not_begun(of, self._number, *why))
        self._begun = True

    @property
    def progress(self) -> Progress | None:
        """The progress of the newest ticket's share on this rank, see ``SaveHandle`` (local)."""
        return self._share.progress()

    # ----------------------------------------------------------------------------------- reports

    def poll(self, failed: Sequence[AttemptId] = ()) -> list[Event]:
        """Every report of the newest ticket (local), again at every call: answers may be lost.

        ``failed``: attempts that have failed. Their writers are killed; only a writer that is
        certainly gone is reported gone.
        """
        with self._one_call.running():
            newest, writer = self._newest, self._share.writer
            if newest is not None and writer is None and not self._begun and newest not in failed:
                self._fail(newest, INTERRUPTED)
            reports = [*self._reports, *self._share.reports()]
            if writer is not None and writer.of in failed:
                self._reports = reports
                self._share.drop()
            list(self._share.exited())
            alive = self._share.exiting
            gone = [of for of in failed if of not in alive and self._number]
            return [*reports, *(WriterGone(of, self._number) for of in gone)]

    def close(self, timeout_s: float = 10.0) -> None:
        """Wait for this rank's writer, at most ``timeout_s``, then end it (local)."""
        with self._one_call.running():
            self._share.await_end(timeout_s)
            self._share.forget()
            self._ports.transport.close()
            self._ports.close_writers()
            if self._storage is not None:
                self._storage.close_root()

    # ----------------------------------------------------------------------------------- reading

    def restore(
        self,
        found: Reading,
        part: str,
        state: Any = None,
        *,
        parts: Mapping[str, Any] | None = None,
        partial: bool = False,
    ) -> Restored:
        """Load this rank's share of ``part`` from the controller's ``found`` (collective in the
        group).

        The shapes are those of ``write``. Objects in ``reshard_drops`` that do not reshard are left
        out with a ``ReshardWarning``. Keys that no rank of the group asks for are left out with an
        ``UnusedKeysWarning``, unless ``partial``. Raises the error of the load, ``RestoreFailed`` on
        other ranks.
        """
        known = {spec.name: spec for spec in found.parts}
        refuse_unknown_parts(found.step, [part], known)
        spec = known.get(part, PartSpec(part, GROUP.name, part))
        shares = GroupParts.of(spec, state, parts)
        root, _, name = found.directory.rpartition("/")
        specs = (file_spec(n, v) or PartSpec(n) for n, v in shares.values.items())
        inner = tuple(map(shares.place, specs))
        with self._one_call.running():
            storage, calls = self._open(root), self._one_call
            restorer = Restorer(self._ports, storage, self._config, _no_coordinator, calls)
            restored = restorer.load(Located(found.step, name, "", (), inner), shares.values)
        if self._ports.transport.rank == 0:
            warn_of_rest(restored, partial=partial)
        by_key = {shares.keys.get(n, n): value for n, value in restored.parts.items()}
        return replace(restored, parts=by_key)


def _parts_of(parts: Parts | Callable[[], Parts] | None) -> Parts | None:
    """The parts that a function returns. An error is raised later, within the plan."""
    if parts is None:
        return None
    try:
        made = parts() if callable(parts) else parts
        if not isinstance(made, Mapping) or not all(isinstance(key, str) for key in made):
            raise ConfigError(f"parts maps directories to what is in them, it is no {made!r:.80}")
        return made
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # also Megatron's; the other ranks will plan
        return {"": partial(_raise, error)}


def _raise(error: BaseException) -> None:
    raise error


def _refuse_other_parts(parts: Sequence[PartSpec]) -> None:
    for spec in parts:
        if spec.format.foreign or spec.optional:
            raise ConfigError(
                f"{spec.name!r}: a worker writes sharded state dicts, FileTrees and files, and it is "
                "the whole part that may be optional"
            )


def _no_coordinator(*arguments: Any) -> None:
    raise AssertionError("a worker has no coordinator to ask")


@dataclass(frozen=True, slots=True)
class GroupParts:
    """The parts that the ranks of a group write.

    A directory's name is unique in the checkpoint. ``keys`` has the directories inside the part's,
    by name. Files are this rank's ``own``, under the names that they have in the part's directory.
    """

    part: PartSpec
    keys: Mapping[str, str]
    values: Mapping[str, Any]

    @classmethod
    def of(cls, part: PartSpec, state: Any, parts: Mapping[str, Any] | None) -> GroupParts:
        given = {"": state} if parts is None else parts
        files = {key: value for key, value in given.items() if is_file(value)}
        named = {key: value for key, value in given.items() if key not in files}
        keys = {f"{part.name}.{index}": key for index, key in enumerate(sorted(named))}
        for key in files:
            if key in keys or not is_part_name(key):
                error = ConfigError(f"{key!r} cannot be the name of a rank's file", part=part.name)
                files[key] = partial(_raise, error)  # within the plan: the other ranks wait there
        return cls(part, keys, {name: named[key] for name, key in keys.items()} | files)

    @property
    def own(self) -> frozenset[str]:
        return frozenset(self.values).difference(self.keys)

    def place(self, spec: PartSpec) -> PartSpec:
        """The spec of a share, with its directory relative to the step's."""
        return replace(spec, directory=join(self.part.directory, self.keys.get(spec.name, "")))


class Unfinished(NamedTuple):
    """A part that the group's first rank completes once all its ranks have written."""

    name: str
    directory: str
    finisher: PartFinisher


@dataclass(frozen=True, slots=True)
class GroupShare(PartJob):
    """The share of one rank in the group's part, of several jobs that are written in turn."""

    name: str
    directory: str
    ticket: Ticket
    rank: int
    jobs: tuple[PartJob, ...]
    unfinished: tuple[Unfinished, ...]
    clock: Clock

    @property
    def part_jobs(self) -> tuple[PartJob, ...]:
        return tuple(each for job in self.jobs for each in job.part_jobs)

    @property
    def portable(self) -> bool:
        return all(job.portable for job in self.jobs)

    def write(self, storage: Storage, location: str) -> Written:
        files: list[FileEntry] = []
        rows: list[tuple[Any, ...]] = []
        for job in self.jobs:
            if job.directory:
                make_dirs(storage, job.directory, base=location)
            written = job.write(storage, location)
            files += written.files
            rows += [(job.name, *row) for row in written.results]
        if self.unfinished:
            results = [rows, *self._of_others(storage, location)]
            for part in self.unfinished:  # only then this rank puts its own receipt
                files += self._finish(storage, location, part, results)
        return Written(tuple(files), tuple(rows))

    def _of_others(self, storage: Storage, location: str) -> list[tuple[tuple[Any, ...], ...]]:
        """The results of the group's other ranks.

        Raises ``ShardMissing`` when the time is up, and ``SaveFailed`` as soon as another rank left
        the part out.
        """
        ticket = self.ticket
        ranks = range(ticket.first_rank, ticket.first_rank + ticket.size)
        others = [(self.name, rank) for rank in ranks if rank != self.rank]
        receipts = Receipts(storage, location, ticket.of, ticket.world_size)
        results = {}
        deadline = self.clock.monotonic() + ticket.timeout_s
        for receipt in receipts.arriving(others, self.clock, deadline):
            if receipt.dropped:
                raise SaveFailed(
                    f"rank {receipt.rank} left it out: {receipt.dropped}", rank=receipt.rank
                )
            results[receipt.rank] = receipt.results
        return [results[rank] for rank in sorted(results)]

    def _finish(
        self,
        storage: Storage,
        location: str,
        part: Unfinished,
        results: Sequence[Sequence[tuple[Any, ...]]],
    ) -> list[FileEntry]:
        rows = [[row[1:] for row in rank if row[0] == part.name] for rank in results]
        path = f"{location}/{planned_name(part.name)}"
        planned = read_document(storage, path, MAX_METADATA_BYTES)
        final = join(self.ticket.published, part.directory)
        entries = []
        for name, content in part.finisher(planned, rows, final).items():
            relative = join(part.directory, name)
            shard = ShardFile(storage, join(location, relative))
            shard.write(content)
            entries.append(shard.close_durably(relative))
        return entries
