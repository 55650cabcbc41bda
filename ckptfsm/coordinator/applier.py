"""Applies events: through the ledger into the journal, then their commands are run.

It lives for one epoch of one root, on the coordinator's thread. If the journal cannot take a move, the
move has not happened. A command that fails is retried until the disk takes it. Two errors are never
retried, and end the coordinator: ``Fenced`` and ``OutcomeUnknown``.
"""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import TypeVar

from ckptfsm.adapters.garbage import collection_paused
from ckptfsm.adapters.notices import say
from ckptfsm.core.documents import (
    KEPT_SEGMENTS,
    CheckpointRecord,
    MetricsRecorded,
    Pin,
    Record,
    Seal,
    SegmentOpened,
    TransitionRecord,
    checkpoint_record,
    encode,
)
from ckptfsm.core.errors import (
    CkptFsmError,
    DamagedRoot,
    Fenced,
    IllegalTransition,
    NewerSchema,
    OutcomeUnknown,
    ShardMissing,
    StepNotFoundError,
    StorageError,
    describe,
    printable,
)
from ckptfsm.core.events import (
    Cleaned,
    CleanUp,
    Command,
    CreateStaging,
    Event,
    Failed,
    Finalize,
    Prune,
    Published,
    PublishedOnDisk,
    Quarantine,
    Removed,
    Reprieved,
    RunFinalizers,
    Superseded,
    TrackerWritten,
    Withdrawn,
    WriteTracker,
)
from ckptfsm.core.layout import JOURNAL, QUARANTINE, TRACKER, TRASH, Layout, pin_name, segment_name
from ckptfsm.core.ledger import Ledger, Rejected, Transition
from ckptfsm.core.lifecycle import FORGOTTEN, UNFINISHED, UNPUBLISHED, Checkpoint, State, find_row
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Clock, Identity, Storage
from ckptfsm.core.requests import Blocked, FinalizersDue, News, NumberedNews
from ckptfsm.core.retention import KeepAll, Policy, describe_tracked, record_of
from ckptfsm.core.units import bytes_text
from ckptfsm.disk.assembly import Assembly
from ckptfsm.disk.durable import TEMPORARY, lookup, put, storage_error
from ckptfsm.disk.inspection import (
    is_manifest_of,
    moved_aside,
    pinned_steps,
    read_tracker,
    reader_leases,
)
from ckptfsm.disk.job_records import JobHolds
from ckptfsm.disk.journal import History, JournalWriter, folded
from ckptfsm.disk.ownership import RootOwnership
from ckptfsm.disk.publishing import Publisher
from ckptfsm.disk.setting_aside import Mover, Pruned
from ckptfsm.disk.trash import remove_marker, remove_some

log = logging.getLogger("ckptfsm")
T = TypeVar("T")


class NewsQueue:
    """News in order, numbered from zero, kept until their reader has taken them.

    The coordinator's thread appends; another one reads and forgets.
    """

    def __init__(self) -> None:
        self._items: deque[NumberedNews] = deque()
        self._count = 0

    def append(self, news: News) -> None:
        self._items.append((self._count, news))
        self._count += 1

    def since(self, number: int) -> tuple[NumberedNews, ...]:
        """The news with ``number`` or a higher one."""
        return tuple(item for item in tuple(self._items) if item[0] >= number)

    def has(self, number: int) -> bool:
        """True if there is any with ``number`` or a higher one. Nearly free: every poll asks."""
        return self._count > number and bool(self._items)

    def forget(self, number: int) -> None:
        """Drop the news below ``number``: their reader has taken them."""
        while self._items and self._items[0][0] < number:
            self._items.popleft()


class Applier:
    """See the module. ``open_journal`` first; ``close_journal`` last. ``holds`` and ``records_policy``:
    see ``CoordinatorOptions``.
    """

    def __init__(
        self,
        storage: Storage,
        clock: Clock,
        ownership: RootOwnership,
        assembly_of: Callable[[Checkpoint, str], Assembly],
        layout: Layout,
        news: NewsQueue,
        retention: Policy,
        *,
        holds: Mapping[str, int] = MappingProxyType({}),
        records_policy: bool = True,
    ) -> None:
        self.ledger = Ledger()
        self.moves = 0
        self.news = news
        self.layout = layout
        self.check_epoch = ownership.check  # raises ``Fenced`` if a newer manager owns the root
        self.publisher = Publisher(storage, ownership.tag, ownership.check, assembly_of, layout)
        self.mover = Mover(storage, ownership.tag, ownership.check, layout)
        self._storage = storage
        self._clock = clock
        self._ownership = ownership
        self._retention = retention
        self._records_policy = records_policy
        self._holds = holds
        self._jobs = JobHolds(storage, holds)
        self._journal = JournalWriter(storage, ownership.epoch)
        self._run_base = 0.0
        self._opened_at = 0.0
        self.pending: tuple[Command, ...] = ()  # failed, to be tried again at the next tick
        # The unfinished attempts that wait for the disk, with the reported reason.
        self.blocked: dict[AttemptId, CkptFsmError] = {}
        # Set while an opening carries out its plan. A disk error does not fail the only attempt
        # that could be resumed from, and nothing is pruned.
        self.only_resumable: AttemptId | None = None
        self.keep_all = False
        self.retention_due = False  # the disk refused it
        self._set_aside: dict[AttemptId, frozenset[str]] = {}  # paths there at the first try

    @property
    def epoch(self) -> int:
        return self._ownership.epoch

    def open_journal(self, history: History, identity: Identity) -> None:
        """Open this epoch's segment: seals of the newest older ones and the ledger as it stands."""
        if history.newest_epoch >= self._ownership.epoch:  # alive: never touch its segment
            raise Fenced(
                "a newer manager took this root over",
                epoch=self._ownership.epoch,
                newer_epoch=history.newest_epoch,
            )
        if history.seals:  # first: a killed process may have left its last record unsynced
            self._make_durable(history.seals[-1])
        self.ledger = history.ledger
        if not self._records_policy:  # nobody but the trainer says what its jobs hold
            self._holds = history.holds
            self._jobs = JobHolds(self._storage, self._holds)
        self._run_base, self._opened_at = history.run_seconds, self._clock.monotonic()
        self._journal.open(
            SegmentOpened(
                epoch=self._ownership.epoch,
                host=identity.host,
                pid=identity.pid,
                at=self._clock.wall(),
                seals=history.seals[-KEPT_SEGMENTS:],
                run_seconds=history.run_seconds,
                rolling_back=history.intent.rolling_back,
                rolling_back_to=history.intent.target,
                rolling_back_lowered=history.intent.lowered,
                begun_afresh=history.intent.begun_afresh,
                layout=self.layout.name,
                retention=record_of(self._retention) if self._records_policy else history.retention,
                holds=dict(self._holds),
                checkpoints=_snapshot(self.ledger),
            )
        )

    def _make_durable(self, seal: Seal) -> None:
        """Write the sealed bytes anew, and no others: their fsync may have failed (F6).

        After a failed fsync the page cache shows content that no later fsync writes any more.
        """
        file = f"{JOURNAL}/{segment_name(seal.epoch)}"
        try:
            data = self._storage.read(file, seal.bytes)
            if len(data) != seal.bytes or zlib.crc32(data) != seal.crc32:  # a page was dropped
                raise StorageError("the journal reads otherwise than a moment ago", file=file)
            put(self._storage, file, data, tag=self._ownership.tag, check=self._ownership.check)
        except OSError as error:
            self._ownership.check()  # raises if a successor swept our temporary file
            if isinstance(error, StorageError):
                raise
            raise storage_error(error, "journal", file) from error

    def fold(self, history: History) -> None:
        """Remove the segments that neither this one nor the one before it names: nothing needs them."""
        try:
            for file in folded(self._storage, history.seals):
                self.check_epoch()
                remove_marker(self._storage, file)
        except OSError as error:
            why = describe(error)
            said = f"{JOURNAL}: old segments stay for now: {why}"
            say(log.warning, "journal_not_folded", said, file=JOURNAL, error=why)

    def close_journal(self) -> None:
        """Close the journal."""
        self._journal.close()

    def retry_pending(self) -> None:
        """Retry each pending command once. One that fails again is pending again."""
        pending, self.pending = self.pending, ()
        for command in pending:
            self.run(command)

    def forget(self, kind: type[Command], of: AttemptId | None = None) -> None:
        """Drop pending commands, of all attempts or one: they must not come after a rollback."""
        self.pending = tuple(
            c for c in self.pending if not (isinstance(c, kind) and of in (None, c.of))
        )

    def run_seconds(self) -> float:
        """Training time accumulated over all runs on this root, in seconds."""
        return self._run_base + (self._clock.monotonic() - self._opened_at)

    def continue_from(self, run_seconds: float) -> None:
        """Count the run time of a checkpoint that the journal did not know."""
        self._run_base = max(self._run_base, run_seconds)

    def post(self, event: Event) -> None:
        """Make a move by an event of the coordinator. Raises ``IllegalTransition``, ``StorageError``."""
        self.commit(*self.ledger.post(event))

    def commit(self, ledger: Ledger, moved: Transition, command: Command | None) -> None:
        """Journal a move, apply it, then run its command. Moves within a state are not journaled."""
        if moved.source is not moved.dest:
            record = self._record(moved)
            self.append(record, essential=moved.dest in (*FORGOTTEN, State.FAILED))
            self.moves += 1
            self.blocked.pop(moved.of, None)
            self.news.append(record)
            say(log.info, "transition", _transition_text(record), record=record)
        self.ledger = ledger
        if command is not None:
            self.run(command)

    def record_metrics(self, checkpoint: Checkpoint, metrics: Mapping[str, float]) -> None:
        """Journal metrics that came after the save, then apply them."""
        of = checkpoint.id
        ledger = self.ledger.measured(of, metrics)
        self.append(
            MetricsRecorded(
                step=of.step,
                epoch=of.epoch,
                attempt=of.attempt,
                metrics=dict(metrics),
                at=self._clock.wall(),
            )
        )
        self.ledger = ledger

    def give_space_back(self, limit: int) -> int:
        """Delete up to ``limit`` entries of discarded files. See ``trash.remove_some``."""
        return remove_some(self._storage, limit, self.check_epoch)

    def sort_trash(self, discarded: Collection[AttemptId]) -> None:
        """Sort the trash at an opening: entries are deleted, or kept in quarantine (I1).

        A fenced manager's late rename takes whatever directory then has the name. So an entry is
        deleted only if its manifest names an attempt that the journal shows as pruned, or as failed and
        cleaned up (``discarded``). Attempts that the ledger knows are decided elsewhere.
        """
        for of, paths in self._in_trash().items():
            if of not in self.ledger.checkpoints:
                for path in paths:
                    self._sort(of, path, discarded=of in discarded)

    def _discard(self, of: AttemptId, aside: str) -> None:
        """Discard the directory just moved ``aside``, and all that have the attempt's manifest."""
        for path in self._in_trash().get(of, []):
            self._sort(of, path, discarded=True, sure=path == aside)

    def _in_trash(self) -> dict[AttemptId, list[str]]:
        """The paths in the trash by attempt; empty if the disk cannot be read."""
        try:
            return moved_aside(self._storage, TRASH)
        except OSError as error:
            _say_not_sorted(TRASH, error)
            return {}

    def _sort(self, of: AttemptId, path: str, *, discarded: bool, sure: bool = False) -> None:
        """Discard a directory in the trash, or keep it. A failure is left to the next opening."""
        try:
            if sure or (discarded and is_manifest_of(self._storage, self.layout, of, path)):
                self.mover.set_aside(path, str(of), discard=True)
                return
            self.mover.set_aside(path, str(of))
        except (Fenced, OutcomeUnknown):
            raise
        except (NewerSchema, OSError) as error:
            _say_not_sorted(path, error)
            return
        said = f"step {of.step}: {path} is taken out of the trash, for a person to look at"
        say(log.warning, "taken_out_of_the_trash", said, step=of.step, file=path)

    def _record(self, moved: Transition) -> TransitionRecord:
        checkpoint = moved.checkpoint
        creates = moved.source is State.ABSENT
        return TransitionRecord(
            seq=self.moves,
            step=moved.of.step,
            epoch=moved.of.epoch,
            attempt=moved.of.attempt,
            event=moved.event.name,
            source=moved.source,
            dest=moved.dest,
            reason=printable(getattr(moved.event, "reason", "")),
            detail=printable(getattr(moved.event, "detail", "")),
            rank=getattr(moved.event, "rank", None) if moved.dest is State.FAILED else None,
            shard_bytes=checkpoint.shard_bytes,
            manifest_crc=checkpoint.manifest_crc,
            run_seconds=self.run_seconds(),
            at=self._clock.wall(),
            created=checkpoint_record(checkpoint) if creates else None,
        )

    def run(self, command: Command) -> None:
        """Run a command. One that fails is pending; ``Finalize`` before publishing fails the attempt."""
        checkpoint = self.ledger.checkpoints.get(command.of)
        if checkpoint is None:
            return
        match command:
            case CreateStaging():
                self.publisher.create_staging(checkpoint)
            case RunFinalizers():
                self._ask_for_finalizers(checkpoint)
            case Finalize():
                self._run_finalize(checkpoint)
            case WriteTracker():
                self._retriable(command, self._run_tracker, checkpoint)
            case Prune():
                self._retriable(command, self._run_prune, checkpoint)
            case CleanUp():
                self._retriable(command, self._run_clean_up, checkpoint)
            case Quarantine():
                self._retriable(command, self._run_quarantine, checkpoint)

    def _retriable(self, command: Command, run: Callable[[T], None], subject: T) -> None:
        try:
            run(subject)
        except (Fenced, OutcomeUnknown, IllegalTransition):
            raise
        except (CkptFsmError, OSError) as error:
            self._put_off(command, error)

    def _put_off(self, command: Command, error: CkptFsmError | OSError) -> None:
        """Keep a command for a retry at every tick; report why, once per reason."""
        self.pending = (*self.pending, command)
        name, why = type(command).__name__, describe(error)
        said = f"step {command.of.step}: {name} failed, and is tried again: {why}"
        say(log.warning, "command_pending", said, command=name, error=why)
        checkpoint = self.ledger.checkpoints.get(command.of)
        if checkpoint is None or checkpoint.state not in UNFINISHED:
            return
        reason, told = self._reason(command, checkpoint, error), self.blocked.get(command.of)
        if told is None or told.summary() != reason.summary():
            self.blocked[command.of] = reason
            self.news.append(Blocked(command.of, reason))
            step, file = command.of.step, reason.facts.get("file")
            said = f"step {step} is {checkpoint.state.value}, and blocked: {reason.summary()}"
            say(log.warning, "blocked", said, step=step, file=file)

    def _reason(
        self, command: Command, checkpoint: Checkpoint, error: CkptFsmError | OSError
    ) -> CkptFsmError:
        """``error`` with its file; a temporary file is named by its target."""
        if isinstance(error, CkptFsmError):
            return error
        working = self.layout.working_dir(checkpoint.id, checkpoint.in_place)
        what, file = {
            WriteTracker: ("tracker", TRACKER),
            Finalize: ("finalize", self.layout.published_name(checkpoint.step)),
        }.get(type(command), ("clean_up", working))
        named = (error.filename or file).partition(TEMPORARY)[0]
        reason = storage_error(error, what, named)
        reason.__cause__ = error  # an opening that is refused for it looks for a full disk
        return reason

    def _ask_for_finalizers(self, checkpoint: Checkpoint) -> None:
        try:
            self.check_epoch()  # finalizers write by the published name
        except OutcomeUnknown:
            raise
        except OSError as error:
            self.post(Failed(checkpoint.id, "finalize", describe(error)))
            return
        self.news.append(FinalizersDue(checkpoint.id))

    def _run_finalize(self, checkpoint: Checkpoint) -> None:
        """Publish an attempt, then journal that. A published one is retried, and cannot fail (I1)."""
        try:
            manifest_crc = self.publisher.finalize(checkpoint)
        except (Fenced, OutcomeUnknown):
            raise
        except (CkptFsmError, OSError) as error:
            self.raise_if_fenced(error)
            if checkpoint.published:
                self._put_off(Finalize(checkpoint.id), error)
                return
            if checkpoint.id == self.only_resumable and isinstance(error, OSError):
                if isinstance(error, CkptFsmError):  # a working disk can still finish it
                    raise
                raise storage_error(error, "finalize") from error
            reason = error.kind if isinstance(error, ShardMissing) else "finalize"
            self.post(Failed(checkpoint.id, reason, describe(error)))
            return
        if not checkpoint.published:
            self.post(PublishedOnDisk(checkpoint.id, manifest_crc))
        self._retriable(Finalize(checkpoint.id), self.post, Published(checkpoint.id))

    def _run_tracker(self, checkpoint: Checkpoint) -> None:
        latest = self.ledger.latest()
        if checkpoint.state is not State.FINALIZED and checkpoint != latest:
            return  # a late retry: the tracker never goes back
        if latest is not None and latest.step > checkpoint.step:  # one brought back meanwhile
            self.post(Withdrawn(checkpoint.id, "damaged", "not newer than the tracked one"))
            return
        self.publisher.write_tracker(checkpoint.step)
        if checkpoint.state is State.FINALIZED:
            self.post(TrackerWritten(checkpoint.id))
            if not self.keep_all:
                self.try_retention()

    def _run_prune(self, checkpoint: Checkpoint) -> None:
        if checkpoint.state is not State.PRUNABLE:
            return
        effect = partial(self.mover.prune, checkpoint, self.newest_step())
        kept = self.conclude_prune(checkpoint, effect)
        latest = self.ledger.latest()
        if kept and latest is not None and latest.id == checkpoint.id:
            self.run(WriteTracker(checkpoint.id))  # the newest again: the newer ones are gone

    def newest_step(self) -> int:
        """The step that the tracker is to name; -1 if there is none."""
        latest = self.ledger.latest_step()
        return -1 if latest is None else latest

    def conclude_prune(self, checkpoint: Checkpoint, effect: Callable[[], Pruned]) -> str:
        """Journal the end of a prune. Returns "" if the checkpoint is gone, else why it stays."""
        try:
            kept, aside = effect()
        except NewerSchema:
            raise
        except DamagedRoot as error:  # for a person to look at, as recovery does
            self.withdraw(checkpoint, describe(error))
            return "withdrawn"
        if kept:
            self.post(Reprieved(checkpoint.id, kept))
            return kept
        self.post(Removed(checkpoint.id))
        self._discard(checkpoint.id, aside)
        return ""

    def withdraw(self, checkpoint: Checkpoint, detail: str) -> None:
        """Withdraw a checkpoint that is not whole; its directory is moved aside."""
        name = self.layout.published_name(checkpoint.step)
        missing = lookup(self._storage, name) is None
        self.post(Withdrawn(checkpoint.id, "missing" if missing else "damaged", detail))

    def _run_clean_up(self, checkpoint: Checkpoint) -> None:
        states = (State.FINALIZED, State.TRACKED, State.PRUNABLE, State.QUARANTINED)
        same = [c for c in self.ledger.in_state(*states) if c.step == checkpoint.step]
        others = [c for c in same if c.state is not State.QUARANTINED or self._may_be_there(c)]
        held = any(self._has_its_name(other) for other in others)
        aside = self.mover.clean_up(checkpoint, alone=not others, held=held)
        self.post(Cleaned(checkpoint.id))
        self._discard(checkpoint.id, aside)

    def _may_be_there(self, withdrawn: Checkpoint) -> bool:
        """True if a withdrawn checkpoint may still be at its name: adopted, and not moved."""
        adopted = withdrawn.provenance == "adopted"
        return adopted and not self.mover.lies_in(QUARANTINE, withdrawn)

    def _has_its_name(self, other: Checkpoint) -> bool:
        """True of a checkpoint in use, or with a prune that has not begun."""
        if other.state is State.PRUNABLE:
            return not self.mover.lies_in(TRASH, other)
        return other.state is not State.QUARANTINED

    def _run_quarantine(self, checkpoint: Checkpoint) -> None:
        """Move a withdrawn checkpoint; first the tracker, if it names that one (I2)."""
        living = self.ledger.in_state(State.FINALIZED, State.TRACKED)
        living += [c for c in self.ledger.in_state(*UNPUBLISHED, State.FAILED) if c.in_place]
        alone = not any(other.step == checkpoint.step for other in living)
        latest = self.ledger.latest()
        if checkpoint.id not in self._set_aside:
            self._set_aside[checkpoint.id] = self.mover.lies_in(QUARANTINE, checkpoint)
        earlier = self._set_aside[checkpoint.id]
        named = alone and read_tracker(self._storage).step == checkpoint.step
        if latest is not None and named and not self.mover.is_taken(checkpoint, earlier):
            self.publisher.write_tracker(latest.step)
        undecided = self.ledger.in_state(State.PRUNABLE)
        if any(other.step == checkpoint.step for other in undecided):
            raise StorageError("an earlier attempt's prune is undecided", step=checkpoint.step)
        self.mover.quarantine(checkpoint, alone=alone, earlier=earlier)

    def try_retention(self) -> None:
        """Apply retention. If the disk refuses, again at the next tick."""
        self.retention_due = True
        try:
            self.apply_retention()
        except (Fenced, OutcomeUnknown):
            raise
        except OSError as error:
            said = f"retention is put off: {describe(error)}"
            say(log.warning, "retention_put_off", said, error=describe(error))
            return
        self.retention_due = False

    def apply_retention(self) -> None:
        """Prune what retention no longer keeps. Raises the error of the disk."""
        for offer in self.to_prune():
            self.post(offer)

    def to_prune(self) -> list[Superseded]:
        """The pruning events of the checkpoints that no policy, pin, reader or job keeps."""
        if type(self._retention) is KeepAll:  # there may be thousands: none is looked at
            self.reread_protection()
            return []
        preserved = self._preserved()  # first: it reads the ledger's protection anew
        return self.ledger.to_prune(preserved)

    def held_alone(self) -> list[Superseded]:
        """The offers of the checkpoints that would be pruned, if no job held them."""
        preserved = self._preserved()
        return [o for o in self.ledger.offers(preserved) if o.kept_by == ("job",)]

    def _preserved(self) -> Collection[int]:
        """The steps that the policy keeps. All that protects others is read anew."""
        self.reread_protection()
        try:
            preserved: Collection[int] = self._retention.preserve(describe_tracked(self.ledger))
            preserved = frozenset(preserved)
        except Exception as error:  # a user's policy failed: nothing is deleted
            said = f"the retention policy failed, and all is kept: {describe(error)}"
            say(log.exception, "retention_policy_failed", said, error=describe(error))
            return {c.step for c in self.ledger.in_state(State.TRACKED)}
        return preserved

    def reread_protection(self) -> None:
        """Read pins, readers' leases and the records of jobs anew from disk."""
        leases = reader_leases(self._storage)
        held = self._jobs.of_steps(self.ledger)
        self.ledger = self.ledger.protected(pinned_steps(self._storage), leases.values(), held)

    def pin(self, step: int, reason: str) -> None:
        """Keep ``step`` until its pin is removed, durably."""
        self.check_epoch()
        pin = encode(Pin(step=step, reason=reason))
        put(self._storage, pin_name(step), pin, tag=self._ownership.tag)
        self.reread_protection()

    def tracked(self, step: int) -> Checkpoint:
        """The tracked checkpoint of ``step``. Raises ``StepNotFoundError``."""
        checkpoint = self.ledger.at(step)
        if checkpoint is None:
            available = tuple(c.step for c in self.ledger.in_state(State.TRACKED))
            raise StepNotFoundError(
                f"there is no checkpoint of step {step}", step=step, available=available[-20:]
            )
        return checkpoint

    def raise_if_fenced(self, error: Exception) -> None:
        """Raise ``Fenced`` if ``error`` comes from files that a newer manager moved away."""
        try:
            self.check_epoch()
        except Fenced as fenced:
            raise fenced from error
        except (OSError, CkptFsmError):
            return  # the disk does not say

    def append(self, record: Record, *, essential: bool = False) -> None:
        """Journal a record durably. Raises ``StorageError``."""
        try:
            self._journal.append(record, essential=essential)
        except StorageError:
            raise
        except OSError as error:
            raise storage_error(error, "journal", self._journal.file) from error

    def report(self, event: Event) -> None:
        """Take a rank's report: move its checkpoint, or drop the report."""
        outcome = self.ledger.report(event)
        if isinstance(outcome, Rejected):
            self._reject(outcome)
            return
        try:
            self.commit(*outcome)
        except OutcomeUnknown:
            raise
        except StorageError as error:  # the journal's reserve has room for the attempt's failure
            failed = Failed(event.of, "journal", describe(error))
            checkpoint = self.ledger.checkpoints.get(event.of)
            if checkpoint is None or find_row(checkpoint, failed) is None:
                raise
            self.post(failed)

    def _reject(self, rejected: Rejected) -> None:
        """Drop a report that does not count; another world size fails its attempt."""
        name, why = rejected.event.name, rejected.why
        said = f"step {rejected.event.of.step}: a report is rejected: {name}: {why}"
        write = log.debug if rejected.late else log.warning
        say(write, "report_rejected", said, report=name, why=why)
        if rejected.wrong_world_size:
            self.post(Failed(rejected.event.of, "wrong_world_size", rejected.why))


@collection_paused()
def _snapshot(ledger: Ledger) -> tuple[CheckpointRecord, ...]:
    checkpoints = sorted(ledger.checkpoints.values(), key=attrgetter("id"))
    return tuple(checkpoint_record(c) for c in checkpoints)


def _transition_text(record: TransitionRecord) -> str:
    """A transition in one line, for display."""
    text = f"step {record.step}: {record.source.value} -> {record.dest.value}"
    if record.reason:
        text += f" ({record.reason})"
    elif record.dest is State.FINALIZED:
        text += f" ({bytes_text(record.shard_bytes)})"
    return f"{text}: {record.detail}" if record.detail else text


def _say_not_sorted(path: str, error: Exception) -> None:
    said = f"{path} could not be looked at, and is left as it is: {describe(error)}"
    say(log.warning, "trash_not_sorted", said, file=path, error=describe(error))
