"""The coordinator: it owns the journal, the tracker and all names of a root.

Its methods are called in order on one thread (an executor), and may block on the disk. The applier
handles the table, the journal and the commands; this module moves a checkpoint only by posting an event.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from ckptfsm.adapters.garbage import collection_paused
from ckptfsm.adapters.notices import say
from ckptfsm.coordinator.accepting import TRASH_SLICE, clear_name_and_space
from ckptfsm.coordinator.applier import Applier, NewsQueue
from ckptfsm.coordinator.opening import refuse_other_layout, refuse_unfinishable, take_root
from ckptfsm.coordinator.operator_requests import carry_out
from ckptfsm.coordinator.plan_run import PlanRun, roll_back
from ckptfsm.core.documents import Asked, RollbackStarted, SegmentClosed
from ckptfsm.core.errors import (
    CkptFsmError,
    ConfigError,
    DamagedRoot,
    Fenced,
    IllegalTransition,
    NewerSchema,
    OutcomeUnknown,
    SaveRefused,
    ShardMissing,
    StorageError,
    describe,
    first_os_error,
)
from ckptfsm.core.events import (
    Event,
    Failed,
    SaveRequested,
    ShardReported,
    WriterForked,
    WritersLost,
)
from ckptfsm.core.evidence import ANOTHER_MANIFEST, is_published_as, is_whole, why_not_whole
from ckptfsm.core.layout import INBOX, JOURNAL, MEGATRON, QUARANTINE, RECEIPTS, Layout, pin_name
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.lifecycle import UNFINISHED, Checkpoint, State, has_finalizers
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Clock, Identity, PartFinisher, Pending, Storage
from ckptfsm.core.recorded_metrics import check_metrics
from ckptfsm.core.recovery import Resume, forget_moved
from ckptfsm.core.requests import Located, NothingInFlight, RecoveryReport, SaveRequest
from ckptfsm.core.retention import BestN, KeepAll, Policy, describe_tracked
from ckptfsm.disk.assembly import Assembly
from ckptfsm.disk.durable import list_names, lookup, storage_error
from ckptfsm.disk.inbox import Inbox
from ckptfsm.disk.inspection import gather_evidence, inspect_published, read_commit, read_tracker
from ckptfsm.disk.journal import History, read_history
from ckptfsm.disk.ownership import RootOwnership
from ckptfsm.disk.reader_lease import ReaderLeases
from ckptfsm.disk.receipts import Receipts
from ckptfsm.disk.situation import plan_start
from ckptfsm.disk.trash import remove_marker, remove_some, require_rename, sweep_temporaries
from ckptfsm.disk.visibility import Visibility

log = logging.getLogger("ckptfsm")
_YOUNG_S = 24 * 3600.0  # sites purge what was not changed for weeks
_RETRY_S = 5.0
_YOUNG_AGAIN_S = 3600.0  # after the opening, and after an error
_LOST = "the history before it is shorter, and no checkpoint depends on it"
ROOT_WAIT_S = 8.0  # a command may empty the trash for 5 s before it gives the root back


@dataclass(frozen=True)
class CoordinatorOptions:
    """The settings of a coordinator. Times are in seconds of monotonic time.

    ``root_wait_s``: the longest wait for a root that another process holds. ``records_policy``: False
    for a command, whose policy is not the trainer's. ``holds``: the ``every`` of each job that holds its
    checkpoints, by name; a command has those that the last trainer recorded.
    """

    retention: Policy = field(default_factory=KeepAll)
    resume: Resume = "fallback"
    takeover: bool = False
    visibility_timeout_s: float = 10.0
    reader_timeout_s: float = 600.0
    layout: Layout = MEGATRON
    root_wait_s: float = ROOT_WAIT_S
    records_policy: bool = True
    holds: Mapping[str, int] = field(default_factory=dict)


class Coordinator:
    """See the module. ``open`` first; ``close`` or ``abandon`` last."""

    def __init__(
        self,
        storage: Storage,
        *,
        clock: Clock,
        identity: Identity,
        options: CoordinatorOptions,
        finishers: Mapping[str, PartFinisher],
        provenance: Mapping[str, str],
    ) -> None:
        self.fatal: CkptFsmError | None = None
        self.news = NewsQueue()
        # A directory may be that of an earlier job on another host.
        visibility = Visibility(clock, options.visibility_timeout_s)
        self._storage = storage = visibility.of_directories(storage)
        self._clock = clock
        self._identity = identity
        self._options = options
        self._layout = options.layout
        self._finishers = finishers
        self._provenance = provenance
        self._ownership: RootOwnership | None = None
        self._opened: Applier | None = None
        self._requests = 0  # of this epoch; each has its number
        self._verified: AttemptId | None = None
        self._inbox: Inbox | None = None
        self._readers = ReaderLeases(storage, clock, options.reader_timeout_s)
        self._tick_at = self._inbox_at = 0.0
        self._old_at = clock.monotonic() + _YOUNG_AGAIN_S
        self._idle_at_last_tick = True

    @property
    def _applier(self) -> Applier:
        if self._opened is None:
            raise StorageError("the coordinator is not open", file=self._storage.root)
        return self._opened

    # ------------------------------------------------------------------------------ open and close

    def open(self) -> RecoveryReport:
        """Take the root, decide from disk, carry the decisions out. See ``recovery``.

        A damaged journal is refused before anything is touched. On a full disk, files that earlier
        runs gave up are deleted first: any owner of the root would delete them.
        """
        try:
            return self._open()
        except OSError as error:
            cause = first_os_error(error)
            full = cause is not None and cause.errno in (errno.ENOSPC, errno.EDQUOT)
            if not full or not remove_some(self._storage, TRASH_SLICE):
                raise
        return self._open()

    def _open(self) -> RecoveryReport:
        began = self._clock.monotonic()
        ownership, before = take_root(
            self._storage,
            self._clock,
            self._identity,
            self._layout,
            takeover=self._options.takeover,
            wait_s=self._options.root_wait_s,
        )
        self._ownership = ownership
        self._inbox = Inbox(self._storage, ownership.epoch, ownership.tag, self._clock)
        try:
            # The only ability that taking the root has not shown: publishing needs it, hours later.
            require_rename(self._storage, ownership.tag)
            report = self._recover(ownership, before, began)
        except BaseException:
            self.abandon()
            raise
        return report

    def _recover(self, ownership: RootOwnership, before: History, began: float) -> RecoveryReport:
        sweep_temporaries(self._storage, (JOURNAL,))  # a fenced manager could rename one over it
        history = read_history(self._storage, before)
        refuse_other_layout(self._storage, self._layout, history)
        refuse_unfinishable(self._storage, self._layout, history.ledger, self._finishers)
        evidence = gather_evidence(self._storage, self._layout, history.ledger)
        decided = plan_start(history, evidence, ownership.epoch, self._options.resume)
        self.news = NewsQueue()  # an opening that is tried again tells its moves anew
        options = self._options
        assembly_of = partial(
            Assembly,
            self._storage,
            self._clock,
            ownership.tag,
            self._finishers,
            self._provenance,
            options.visibility_timeout_s,
            self._layout,
        )
        self._opened = Applier(
            self._storage,
            self._clock,
            ownership,
            assembly_of,
            self._layout,
            self.news,
            options.retention,
            holds=options.holds,
            records_policy=options.records_policy,
        )
        ledger = forget_moved(history.ledger, decided.decisions, history.lost)
        self._applier.open_journal(replace(history, ledger=ledger), self._identity)
        PlanRun(self._storage, self._clock, self._applier, options.resume).run(history, decided)
        adopted = (of.attempt for of in self.ledger.checkpoints if of.epoch == self.epoch)
        self._requests = max(adopted, default=0)
        warnings = (*decided.warnings, *(f"{file} is lost: {_LOST}" for file in history.missing))
        for warning in warnings:
            said, root = f"recovery: {warning}", self._storage.root
            say(log.warning, "recovery_warning", said, root=root, what=warning)
        return RecoveryReport(
            ownership.epoch,
            self._applier.ledger.latest_step(),
            decided.decisions,
            warnings,
            self._clock.monotonic() - began,
        )

    def close(self) -> None:
        """Journal the end and give the root back, even if journaling fails."""
        try:
            if self._ownership is not None and self.fatal is None:
                self._empty_trash()
                run_seconds = self._applier.run_seconds()
                self._applier.append(SegmentClosed(run_seconds=run_seconds, at=self._clock.wall()))
        finally:
            self.abandon()

    def _empty_trash(self) -> None:
        """Use a few seconds to free space; the next run continues from there."""
        deadline = self._clock.monotonic() + _RETRY_S
        try:
            while self._applier.give_space_back(TRASH_SLICE):
                if self._clock.monotonic() >= deadline:
                    return
        except OSError as error:
            said = f"the trash could not be emptied: {describe(error)}"
            say(log.warning, "trash_not_emptied", said, error=describe(error))

    def abandon(self) -> None:
        """Give the root back without journaling an end: recovery decides at the next open."""
        ownership, self._ownership = self._ownership, None
        if ownership is None:
            return
        if self._opened is None:  # refused: nothing was repaired
            ownership.release(as_found=True)
            return
        try:
            self._opened.close_journal()
        finally:
            ownership.release()

    # ----------------------------------------------------------------------------------- questions

    @property
    def ledger(self) -> Ledger:
        """The checkpoints as the coordinator knows them."""
        return self._applier.ledger

    @property
    def epoch(self) -> int:
        assert self._ownership is not None
        return self._ownership.epoch

    @property
    def busy(self) -> bool:
        """True while a command waits to be retried."""
        return bool(self._applier.pending)

    def nothing(self) -> None:
        """Do nothing: a call is finished once all earlier calls are."""

    @property
    def blocked(self) -> dict[AttemptId, CkptFsmError]:
        """The unfinished attempts that wait for the disk, and why."""
        return dict(self._applier.blocked)

    def wants_tick(self) -> bool:
        """True if ``tick`` would have something to do by now. Safe from another thread."""
        return self._clock.monotonic() >= self._tick_at

    # ----------------------------------------------------------------------------------- a save

    def request(self, request: SaveRequest) -> AttemptId:
        """Accept a save: journal it, make its directory. Raises ``SaveRefused`` or a fatal error."""
        with self._guarded("request"):
            self._applier.check_epoch()
            of = AttemptId(request.step, self.epoch, self._requests + 1)
            event = SaveRequested(
                of,
                request.parts,
                request.world_size,
                request.in_place,
                request.metrics,
                self._applier.run_seconds(),
            )
            self._applier.ledger.refuse(event)
            proven = self._is_proven(self._applier.ledger.latest())
            clear_name_and_space(self._applier, self._storage, request, proven=proven)
            self._requests = of.attempt
            try:
                self._applier.post(event)
            except OutcomeUnknown:
                raise
            except StorageError as error:
                raise SaveRefused(f"cannot journal the save: {error}", step=request.step) from error
            except OSError as error:
                self._fail_unstarted(Failed(of, "staging", describe(error)))
                raise SaveRefused(
                    f"cannot make the staging directory: {storage_error(error, 'mkdir')}",
                    step=request.step,
                ) from error
            return of

    def _is_proven(self, latest: Checkpoint | None) -> bool:
        """True if this run wrote ``latest``, or has verified its digests."""
        if latest is None:
            return False
        written = latest.provenance == "saved" and latest.id.epoch == self.epoch
        return written or latest.id == self._verified

    def forget_request(self) -> None:
        """Fail a request that was accepted after the question for it had timed out."""
        busy = self._applier.ledger.in_flight()
        if busy is not None and busy.state is State.REQUESTED:
            with self._guarded("forget_request"):
                self._fail_unstarted(Failed(busy.id, "request_timed_out"))

    def _fail_unstarted(self, failed: Failed) -> None:
        """Fail an attempt that no rank was asked to write. If even that cannot be journaled, stop."""
        try:
            self._applier.post(failed)
            self._applier.post(WritersLost(failed.of))
        except StorageError as error:
            self.fatal = self.fatal or error
            raise

    def complete_from_receipts(self, of: AttemptId, wait_s: float) -> State | None:
        """Complete the save in flight from its receipts on disk, before ``abandon``.

        The receipts are awaited for at most ``wait_s``, without asking the ranks. With all of them,
        the save goes on as if they had been reported. Returns the state of ``of`` then, which may
        have been completed before; None if it is gone, or not known.
        """
        if self.fatal is not None:
            return None
        busy = self.ledger.in_flight()
        if busy is None:
            ended = self.ledger.checkpoints.get(of)
            return ended.state if ended is not None else None
        foreign = has_finalizers(busy)
        if busy.state in (State.REQUESTED, State.FORKED) and not foreign:
            deadline = self._clock.monotonic() + wait_s
            found = self._from_receipts(busy, deadline)
            self.report(found)
        after = self.ledger.checkpoints.get(busy.id)
        if foreign and after is not None and after.state is State.SHARDS_WRITTEN:
            return State.FAILED  # no rank runs its finalizers: a restart gives it up
        return after.state if after is not None else None

    def _from_receipts(self, busy: Checkpoint, deadline: float) -> list[Event]:
        """The reports that the receipts of an attempt stand for: all of them, or none."""
        of, size = busy.id, busy.world_size
        location = self._layout.working_dir(of, busy.in_place)
        receipts = Receipts(self._storage, location, of, size)
        try:
            found = list(receipts.arriving(busy.expected, self._clock, deadline))
            for part in sorted({r.part for r in found}):  # a writer may have died before that
                self._storage.fsync_dir(f"{location}/{RECEIPTS}/{part}")
        except (ShardMissing, DamagedRoot) as error:
            why = describe(error)
            said = f"step {busy.step} is left in flight: {why}"
            say(log.warning, "left_in_flight", said, step=busy.step, error=why)
            return []
        forked = sorted(busy.writers - busy.forked)
        shards = [
            ShardReported(of, r.part, r.rank, size, sum(f.bytes for f in r.files))
            for r in found
            if (r.part, r.rank) not in busy.reported
        ]
        return [*(WriterForked(of, rank, size) for rank in forked), *shards]

    def report(self, events: Sequence[Event]) -> None:
        """Take the reports of the ranks. Reports for no living attempt are logged and dropped."""
        try:
            with self._guarded("report"):
                at = 0
                while at < len(events):
                    with collection_paused():
                        self._applier.ledger, taken = self._applier.ledger.absorb(events, at)
                    at += taken
                    if at < len(events):
                        self._applier.report(events[at])
                        at += 1
        except StorageError as error:  # the journal has no room even for a failure: stop
            self.fatal = self.fatal or error
            raise

    def tick(self) -> None:
        """Retry pending commands, expire readers' leases, delete a slice of the trash, serve
        operator requests.
        """
        with self._guarded("tick"):
            self._applier.check_epoch()
            self._tick_at = self._clock.monotonic() + _RETRY_S
            try:
                if self._applier.pending:  # each try at the tracker may leave a temporary file
                    sweep_temporaries(self._storage, ("",))
            except OSError as error:
                _put_off(error)
            self._applier.retry_pending()
            if self._applier.retention_due:
                self._applier.try_retention()
            removed = 0
            idle = self._applier.ledger.in_flight() is None
            # While a save is being written, nothing is deleted; but a job may always be saving.
            if idle or self._applier.pending or not self._idle_at_last_tick:
                try:
                    if self._ownership is not None:
                        self._ownership.claim_lock()
                        self._keep_young(self._ownership)
                    self._readers.expire()
                    removed = self._applier.give_space_back(TRASH_SLICE)
                except OSError as error:
                    _put_off(error)
            self._idle_at_last_tick = idle
            self._tick_at = self._clock.monotonic() + (0.0 if removed else _RETRY_S)
        self._carry_out_requests()

    def _keep_young(self, ownership: RootOwnership) -> None:
        """Once a day, and an hour after the opening: a chain of jobs has old files too."""
        now = self._clock.monotonic()
        if now >= self._old_at:
            self._old_at = now + _YOUNG_AGAIN_S  # in case of an error
            ownership.keep_young()
            self._old_at = now + _YOUNG_S

    def retry(self) -> None:
        """Retry pending commands now, and again if the trash freed space. Raises fatal errors only."""
        try:
            self.tick()
            if self.busy and self.wants_tick():
                self.tick()
        except StorageError as error:  # the disk is no better
            if self.fatal is not None:
                raise
            why = describe(error)
            say(log.warning, "retry_put_off", f"the disk is no better: {why}", error=why)

    # ------------------------------------------------------------------------- operator requests

    def pin(self, step: int, reason: str) -> None:
        """Keep ``step`` from retention until ``unpin``. Raises ``StepNotFoundError``."""
        with self._guarded("pin"):
            self._applier.tracked(step)
            self._applier.pin(step, reason)
            self._applier.tracked(step)

    def unpin(self, step: int) -> None:
        """Release a pin. Retention decides anew, unless it waits: see ``retention_waits``."""
        with self._guarded("unpin"):
            self._applier.check_epoch()
            remove_marker(self._storage, pin_name(step))
            if self.retention_waits():
                self._applier.reread_protection()
            else:
                self._applier.apply_retention()

    def record_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to a tracked checkpoint, durably. See ``retention_waits``."""
        with self._guarded("record_metrics"):
            figures = check_metrics(metrics)
            checkpoint = self._applier.tracked(step)
            self._applier.check_epoch()
            self._applier.record_metrics(checkpoint, figures)
            if not self.retention_waits():
                self._applier.try_retention()

    def job_ended(self) -> None:
        """Learn that a job has ended, for which a step may have stayed. See ``retention_waits``."""
        with self._guarded("job_ended"):
            self._applier.check_epoch()
            if not self.retention_waits():
                self._applier.try_retention()

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics of a tracked checkpoint: those of its save, and those that came later."""
        with self._guarded("metrics"):
            return dict(self._applier.tracked(step).metrics)

    def best_step(self, metric: str, mode: Literal["min", "max"]) -> int | None:
        """The step that ``BestN(metric, 1, mode)`` keeps; None if no step has the metric."""
        with self._guarded("best_step"):
            best = BestN(metric, 1, mode).preserve(describe_tracked(self._applier.ledger))
            return next(iter(best), None)

    def read_here(self) -> frozenset[int]:
        """The steps that this job reads now, each under a lease."""
        return self._readers.steps

    def steps_to_prune(self) -> list[int]:
        """The steps that no policy, pin, reader or job keeps: the next pruning takes them."""
        with self._guarded("steps_to_prune"):
            return [offer.of.step for offer in self._applier.to_prune()]

    def apply_retention(self) -> None:
        """Apply retention now. Raises ``SaveRefused`` if it waits: see ``retention_waits``."""
        with self._guarded("apply_retention"):
            self._applier.check_epoch()
            if why := self.retention_waits():
                raise SaveRefused(why, step=self._applier.ledger.latest_step())
            self._applier.apply_retention()

    def retention_waits(self) -> str:
        """The reason why retention waits for the next save, in words; "" if it decides at once.

        Until this run has written or verified the latest, a restore may fall back to an older one.
        """
        unproven = self._unproven()
        return f"retention waits for the next save, because {unproven}" if unproven else ""

    def _unproven(self) -> str:
        latest = self._applier.ledger.latest()
        if latest is None or self._is_proven(latest):
            return ""
        return f"this run has neither written nor verified the latest, step {latest.step}"

    def kept_by(self, step: int) -> tuple[str, ...]:
        """The reasons that forbid ``delete``. Raises ``StepNotFoundError``."""
        with self._guarded("kept_by"):
            self._applier.reread_protection()
            return self._applier.ledger.superseded(self._applier.tracked(step), ()).kept_by

    def discard_quarantined(self, name: str) -> None:
        """Delete a directory in quarantine. Raises ``ConfigError`` for a name that is not there."""
        with self._guarded("discard_quarantined"):
            if name not in list_names(self._storage, QUARANTINE):
                raise ConfigError(f"{name!r} is not in quarantine", file=f"{QUARANTINE}/{name}")
            self._applier.mover.set_aside(f"{QUARANTINE}/{name}", name, discard=True)

    def serve_requests(self) -> None:
        """Serve operator requests between two ticks, unless this job reads a checkpoint: that must
        stay in place.

        Raises nothing: a fatal error is told with the next exchange. After another error, waits for
        ``_RETRY_S``.
        """
        closed = self._ownership is None or self.fatal is not None
        if closed or self._readers.held or self._clock.monotonic() < self._inbox_at:
            return
        try:
            if list_names(self._storage, INBOX):
                with self._guarded("inbox"):
                    self._applier.check_epoch()
                self._carry_out_requests()
        except (CkptFsmError, OSError) as error:
            if self.fatal is None:
                self._inbox_at = self._clock.monotonic() + _RETRY_S
                _put_off(error)

    def _carry_out_requests(self) -> None:
        """Carry out the operator requests, and answer each. A fatal error ends this."""
        if self._inbox is None:
            return
        requests = self._inbox.requests()
        while (asked := _next_of(requests)) is not None:
            said = f"{asked.by} asks: {asked.errand} {asked.step if asked.step is not None else ''}"
            say(log.warning, "asked", said, errand=asked.errand, step=asked.step, by=asked.by)
            try:
                words, kind = carry_out(self, asked), ""
            except CkptFsmError as error:
                words, kind = error.summary(), error.kind
            self._inbox.answer(asked.nonce, words, kind)
            if self.fatal is not None:
                raise self.fatal

    def delete(self, step: int) -> None:
        """Delete ``step`` through the machine. Raises ``SaveRefused`` if anything keeps it (I7).

        See also ``retention_waits``.
        """
        with self._guarded("delete"):
            self._applier.reread_protection()
            checkpoint = self._applier.tracked(step)
            offer = self._applier.ledger.superseded(checkpoint, ())
            if offer.kept_by or offer.newer_step is None:
                raise SaveRefused(
                    f"step {step} is kept by: {', '.join(offer.kept_by)}",
                    step=step,
                    kept_by=offer.kept_by,
                )
            if unproven := self._unproven():
                raise SaveRefused(f"step {step} is not deleted, because {unproven}", step=step)
            self._applier.post(offer)
            if self._applier.ledger.at(step) is not None:
                raise SaveRefused(f"step {step} was taken into use meanwhile", step=step)

    def rollback(self, step: int) -> None:
        """Make ``step`` the latest again; later steps go to quarantine. Journaled intent first."""
        with self._guarded("rollback"):
            busy = self._applier.ledger.in_flight()
            if busy is not None:
                raise SaveRefused(
                    f"step {busy.step} is in flight; wait for it before going back", step=step
                )
            self._refuse_broken_target(self._applier.tracked(step))
            self._applier.check_epoch()
            self._applier.append(RollbackStarted(to_step=step, at=self._clock.wall()))
            try:
                roll_back(self._applier, step, self._clock.wall())
            except OSError as error:
                raise OutcomeUnknown(
                    f"the rollback to step {step} is not finished, a restart goes on with it: {error}",
                    step=step,
                ) from error

    def _refuse_broken_target(self, checkpoint: Checkpoint) -> None:
        """Raise ``DamagedRoot`` for a broken target: each newer step leaves its name for it (I2)."""
        there = inspect_published(self._storage, self._layout, checkpoint.step)
        if not is_whole(checkpoint, there):
            raise DamagedRoot(
                f"step {checkpoint.step} is not whole, so nothing was rolled back: "
                f"{why_not_whole(checkpoint, there)}",
                step=checkpoint.step,
                file=self._layout.published_name(checkpoint.step),
            )

    # ------------------------------------------------------------------------------------- readers

    def locate(self, step: int | None) -> Located | None:
        """Choose the checkpoint to restore and take a lease on it; None if there is none at all.

        Raises ``StepNotFoundError`` if ``step`` is given and not tracked.
        """
        with self._guarded("locate"):
            latest = self._applier.ledger.latest()
            if step is None and latest is None:
                named = read_tracker(self._storage).found == "release"
                released = named and lookup(self._storage, "release") is not None
                return Located(0, "release", "", (), ()) if released else None
            checkpoint = self._applier.tracked(step) if step is not None else latest
            assert checkpoint is not None
            self._applier.check_epoch()
            tag = self._applier.publisher.tag
            lease = self._readers.take(checkpoint.step, tag, self._identity.nonce)
            try:
                self._applier.reread_protection()
                return self._look_at(checkpoint, lease)
            except BaseException:
                self.release(lease)
                raise

    def _look_at(self, checkpoint: Checkpoint, lease: str) -> Located:
        directory, problem, commit = self._layout.published_name(checkpoint.step), "", None
        try:
            commit = read_commit(self._storage, directory)
        except NewerSchema:
            raise
        except DamagedRoot as error:
            problem = describe(error)
        manifest = commit.manifest if commit is not None else None
        if commit is None and not problem and checkpoint.provenance == "saved":
            problem = "it has no manifest"
        if commit is not None and not is_published_as(checkpoint, commit.manifest.of, commit.crc):
            problem = ANOTHER_MANIFEST
        return Located(
            checkpoint.step,
            directory,
            lease,
            manifest.files if manifest else (),
            tuple(p.spec() for p in manifest.parts) if manifest else (),
            problem,
            manifest.of if manifest else None,
        )

    def release(self, lease: str, verified: int | None = None) -> None:
        """Give a reader's lease back. ``verified``: its step, if all digests were compared under it."""
        if not lease:
            return
        whole = self._applier.ledger.at(verified) if verified is not None else None
        if whole is not None:  # else rolled back meanwhile
            self._verified = whole.id
        self._readers.give_back(lease)
        try:
            self._applier.reread_protection()
        except OSError as error:  # the protected step is kept until the next look
            said = f"the leases of readers could not be read: {describe(error)}"
            say(log.warning, "leases_not_read", said, file=lease, error=describe(error))

    def release_late(self, late: Pending[Any]) -> None:
        """Give back the lease that ``late`` took, a question that timed out: nobody else knows it."""
        if late.exception() is None and isinstance(found := late.result(), Located):
            self.release(found.lease)

    def withdraw_damaged(self, step: int, detail: str) -> None:
        """Take a damaged checkpoint out of service. Raises ``DamagedRoot`` if none would be left."""
        with self._guarded("withdraw_damaged"):
            checkpoint = self._applier.tracked(step)
            others = [c for c in self._applier.ledger.in_state(State.TRACKED) if c.step != step]
            if not others or self._options.resume == "strict":
                raise DamagedRoot(
                    f"step {step} is damaged ({detail}) and "
                    + ("resume='strict'" if others else "there is no other checkpoint"),
                    step=step,
                    file=self._layout.published_name(step),
                )
            self._applier.withdraw(checkpoint, detail)

    @contextmanager
    def _guarded(self, call: str) -> Iterator[None]:
        """Run a call's body; a fatal error stops this coordinator for good: every later call raises it.

        ``Fenced`` and an unknown outcome (a lost journal too) are fatal.
        """
        if self.fatal is not None:
            raise self.fatal
        if self._ownership is None:
            raise StorageError("the coordinator is not open", file=self._storage.root)
        before = self._applier.moves
        try:
            yield
        except (Fenced, IllegalTransition) as error:
            self.fatal = error
            raise
        except (CkptFsmError, OSError) as error:
            try:
                self._applier.raise_if_fenced(error)
            except Fenced as fenced:
                self.fatal = fenced
                raise
            if isinstance(error, OutcomeUnknown):
                self.fatal = error
            if isinstance(error, CkptFsmError):
                raise
            raise storage_error(error, call) from error
        except Exception as error:  # only a restart can decide half-done work
            self.fatal = OutcomeUnknown(f"an unexpected error: {describe(error)}")
            raise self.fatal from error
        except BaseException as error:  # sys.exit in a user's policy: no rank may wait for us
            self.fatal = OutcomeUnknown(f"interrupted: {describe(error)}")
            raise
        finally:
            if self._applier.moves != before and not self._applier.ledger.in_state(*UNFINISHED):
                self.news.append(NothingInFlight())


def _next_of(requests: Iterator[Asked]) -> Asked | None:
    """The next operator request; None if there is none, or the disk does not give it."""
    try:
        return next(requests, None)
    except OSError as error:
        _put_off(error)
        return None


def _put_off(error: Exception) -> None:
    said = f"housekeeping is put off: {describe(error)}"
    say(log.warning, "housekeeping_put_off", said, error=describe(error))
