"""The writer of one rank, which writes all parts of the rank, and a receipt for each.

A receipt lists every file that the rank wrote of a part, and is durable before the writer reports. Every
shard is created exclusively, so that two writers never share one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.fork import Child, fork_child
from ckptfsm.adapters.memory import MemoryReader
from ckptfsm.adapters.segments import is_in_segment
from ckptfsm.adapters.shared_count import Count, SharedCount, counted
from ckptfsm.core.documents import Receipt, encode_sealed
from ckptfsm.core.errors import StorageError, WriterDied, describe, printable
from ckptfsm.core.events import Event, Failed, ShardReported, WriterForked
from ckptfsm.core.images import ChunkSource
from ckptfsm.core.layout import RECEIPTS, STAGING, begun_name, join, receipt_name
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import (
    Clock,
    Draft,
    Launch,
    LaunchInterrupted,
    Outcome,
    PartJob,
    RankJob,
    Storage,
    WriterProcess,
    Written,
)
from ckptfsm.disk.durable import fsync_dirs_of, lookup, make_dirs, put, storage_error
from ckptfsm.disk.visibility import Visibility
from ckptfsm.writers.image import InlineChunks
from ckptfsm.writers.shard_file import ShardFile
from ckptfsm.writers.trainers_memory import frozen, ranges_of

_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class FilePart(PartJob):
    """A part that is one plain file, from bytes in memory."""

    name: str
    file: str
    data: bytes
    directory: str = ""
    portable = True

    def write(self, storage: Storage, location: str) -> Written:
        relative = join(self.directory, self.file)
        shard = ShardFile(storage, join(location, relative))
        shard.write(self.data)
        return Written((shard.close_durably(relative),))

    @property
    def files(self) -> tuple[str, ...]:
        return (join(self.directory, self.file),)


def write_rank(
    storage: Storage,
    job: RankJob,
    source: ChunkSource | None = None,
    *,
    await_confirmation: Callable[[], object] | None = None,
    count: Count | None = None,
    clock: Clock | None = None,
) -> list[tuple[str, int, Any]]:
    """Write every part of a rank, then the receipts in order: (part, bytes, payload) for each.

    ``source`` reads the images. ``await_confirmation`` returns when the receipts may be written,
    which must not vouch for a torn copy; nothing tears that of a forked child. ``count`` is told
    the bytes of the shards while they are written.
    """
    if source is not None:
        for part_job in job.part_jobs:
            part_job.read_from(source)
    visibility = Visibility(clock or SystemClock(), job.visibility_timeout_s)
    visibility.require(storage, _made_by_coordinator(job.of, job.location))
    storage = visibility.of_directories(storage)
    written = []
    shards = counted(storage, count)
    for part in job.parts:
        _require_mark(storage, job.of, job.location)
        if part.name in job.optional:
            result = _try_part(shards, job, part, source)
        else:
            result = _write_part(shards, job, part)
        written.append((part, result))
    if await_confirmation is not None:
        await_confirmation()
    told = []
    for part, result in written:
        put_receipt(storage, job, part, result)
        told.append((part.name, sum(f.bytes for f in result.files), result.payload))
    return told


def _write_part(storage: Storage, job: RankJob, part: PartJob) -> Written:
    if part.directory:  # below the attempt's, which nothing makes anew if it was moved away
        make_dirs(storage, part.directory, base=job.location)
    return part.write(storage, job.location)


def _try_part(storage: Storage, job: RankJob, part: PartJob, source: ChunkSource | None) -> Written:
    """Write an optional part. If that fails, the part is left out, and its receipt says why."""
    try:
        return _write_part(storage, job, part)
    except BaseException as error:  # also torch's; nothing above catches in this child
        if source is not None:  # the next part needs the buffers
            source.cancel(
                [image for part_job in part.part_jobs for image in part_job.images], error
            )
        return Written((), dropped=describe(error) or type(error).__name__)


def put_receipt(storage: Storage, job: RankJob, part: PartJob, result: Written) -> None:
    """Make the part's names durable, then its receipt: from here on the shard counts (I3).

    Raises ``StorageError`` if the directory now belongs to another attempt: this job is fenced.
    """
    fsync_dirs_of(storage, job.location, result.files)
    make_dirs(storage, f"{RECEIPTS}/{part.name}", base=job.location)
    receipt = Receipt(
        step=job.of.step,
        epoch=job.of.epoch,
        attempt=job.of.attempt,
        part=part.name,
        rank=job.rank,
        world_size=job.world_size,
        files=result.files,
        results=result.results,
        dropped=printable(result.dropped),
    )
    path = f"{job.location}/{receipt_name(part.name, job.rank)}"
    own = partial(_require_mark, storage, job.of, job.location)
    put(storage, path, encode_sealed(receipt), tag=str(job.of), check=own)


def _made_by_coordinator(of: AttemptId, location: str) -> str:
    """The name that shows that an attempt may be written: its directory, or its mark in place."""
    return location if location.startswith(f"{STAGING}/") else f"{location}/{begun_name(of)}"


def _require_mark(storage: Storage, of: AttemptId, location: str) -> None:
    """Raise ``StorageError`` unless the directory in place still belongs to attempt ``of``.

    A later attempt uses the same file names there: the mark of an attempt tells them apart.
    """
    mark = _made_by_coordinator(of, location)
    if mark != location and lookup(storage, mark) is None:
        raise StorageError(f"{of} has no right to {location} any more", file=location)


def no_signal() -> None:
    """No check for signals: their handlers wait for the end of the call."""


class RankWriter:
    """A rank's writer as its trainer sees it: launched once, polled, killed at its deadline.

    Keep it before ``check_launch``, which may raise: until ``kill`` returns True, its process may write.
    ``draft`` holds the data of the job, until the writer ``has_copy``; None if it has none. ``ended_at``
    is when the writer's end was seen, ``durable_bytes`` the size of its shards if all are durable then.
    """

    def __init__(
        self,
        storage: Storage,
        job: RankJob,
        *,
        launch: Launch,
        deadline: float,
        draft: Draft | None = None,
    ) -> None:
        self.of = job.of
        self.payloads: dict[str, Any] = {}
        self.ended_at: float | None = None
        self.durable_bytes: int | None = None
        self._storage = storage
        self._rank, self._world_size, self._location = job.rank, job.world_size, job.location
        self._names = tuple(part.name for part in job.parts)  # not the parts: they hold the data
        self._deadline = deadline
        self._end: tuple[Event, ...] | None = None
        self._draft = draft
        self._copying = job.copying
        self._mutable = job.mutable
        self._lock = threading.RLock()  # an agent's thread looks too
        self.has_copy = False
        self._broken_off: BaseException | None = None
        self.process: WriterProcess
        try:
            self.process = launch(storage, job)
        except LaunchInterrupted as error:
            self.process, self._broken_off = error.process, error.reason

    def check_launch(self) -> None:
        """Look at the copy for the first time. Raises the error that broke the launch off."""
        if self._broken_off is not None:
            raise self._broken_off
        if self._copying is not None and self._copying.host_copied:
            self._is_intact()  # the trainer may change that part of its data from now on
        self.look_at_copy()

    def poll(self, now: float) -> list[Event]:
        """Every report so far, again at every call: the copy, then the shards or why there are none."""
        with self._lock:
            if self._end is None:
                self.look_at_copy()
            if self._end is None:
                self._end = self._ended(now)
                self.ended_at = None if self._end is None else now
        forked = [WriterForked(self.of, self._rank, self._world_size)] if self.has_copy else []
        return [*forked, *(self._end or ())]

    def look_at_copy(self) -> None:
        """Once the writer holds a copy, let it go on, or fail if the data changed meanwhile."""
        if self.has_copy or self._end is not None or not self.process.holds_copy:
            return
        if not self._is_intact():
            return
        self.process.confirm()
        self.has_copy = True
        if self._draft is not None:
            self._draft.let_go()
        self._draft = self._copying = None

    def _is_intact(self) -> bool:
        """Fail if the data changed before the writer had it."""
        problem = self._draft.changed() if self._draft is not None else ""
        if problem:
            self.process.kill(timeout_s=0.0)
            detail = f"rank {self._rank}: {problem}"
            self._end = (Failed(self.of, "state_changed", detail, self._rank),)
        return not problem

    @property
    def must_wait(self) -> bool:
        return self.process.must_wait

    def before_update(
        self, clock: Clock, check_signals: Callable[[], BaseException | None] = no_signal
    ) -> None:
        """Return when the trainer may change its data, or the writer failed.

        An accelerator's need no wait: the later work of the current stream runs behind their copies.
        """
        with self._lock:
            copying = self._copying
            if copying is not None and not self.has_copy:
                copying.order_updates()
        if copying is None or (self._mutable and not copying.host_copied):
            self.await_copy(clock, check_signals)

    def await_copy(
        self, clock: Clock, check_signals: Callable[[], BaseException | None] = no_signal
    ) -> None:
        """Wait until the trainer may change its data, or the writer failed; its deadline bounds it.

        ``check_signals`` runs the signal handlers that wait. The exception of one ends the wait.
        """
        while not self.has_copy:
            with self._lock:
                self.process.await_copy(_LOOK_S)
            self.poll(clock.monotonic())
            if self._end is not None:
                return
            interruption = check_signals()
            if interruption is not None:
                raise interruption

    def _ended(self, now: float) -> tuple[Event, ...] | None:
        """The last reports of a writer that ended or missed its deadline, else None."""
        outcome = self.process.poll()
        if outcome is not None:
            return self._reports_of(outcome)
        if now < self._deadline:
            return None
        where = self.process.whereabouts()
        self.process.kill(timeout_s=0.0)
        detail = f"rank {self._rank}: {missed_deadline(where)}"
        return (Failed(self.of, "writer_hung", detail, self._rank),)

    def wait(self, clock: Clock, timeout_s: float) -> bool:
        """Wait for the writer's copy and its end, at most ``timeout_s``; True if it ended."""
        deadline = clock.monotonic() + timeout_s
        with self._lock:
            self.process.await_copy(timeout_s)
            self.look_at_copy()
            return self.process.wait(max(0.0, deadline - clock.monotonic())) is not None

    def kill(self, timeout_s: float) -> bool:
        """End the writer, which reports nothing further; True once it is certainly gone."""
        with self._lock:
            self._end = self._end or ()
            return self.process.kill(timeout_s)

    def require_mark(self) -> None:
        """Raise ``StorageError`` if the directory, where finalizers write, is another attempt's."""
        _require_mark(self._storage, self.of, self._location)

    def _reports_of(self, outcome: Outcome) -> tuple[Event, ...]:
        """The reports of a writer that ended: a success needs exit code, payload and all receipts."""
        rank, size = self._rank, self._world_size
        if not outcome.succeeded:
            said = outcome.error.kind if outcome.error is not None else WriterDied.kind
            reason = WriterDied.kind if said == WriterDied.kind else "writer_failed"
            return (Failed(self.of, reason, f"rank {rank}: {outcome.explain()}", rank),)
        problem = self._missing_receipt()
        if tuple(name for name, _, _ in outcome.payload) != self._names:
            problem = "its result is not of its parts"
        if problem:
            return (Failed(self.of, "receipt_missing", f"rank {rank}: {problem}", rank),)
        self.payloads = {name: payload for name, _, payload in outcome.payload}
        self.durable_bytes = sum(count for _, count, _ in outcome.payload)
        return tuple(
            ShardReported(self.of, name, rank, size, count) for name, count, _ in outcome.payload
        )

    def _missing_receipt(self) -> str:
        for name in self._names:
            path = f"{self._location}/{receipt_name(name, self._rank)}"
            try:
                if lookup(self._storage, path) is None:
                    return f"no receipt {path}"
            except OSError as error:  # the disk fails: the other ranks must not wait for this one
                return f"{path}: {describe(error)}"
        return ""


def missed_deadline(whereabouts: str) -> str:
    """The reason of a missed deadline, with the place of the hang: a disk, or a lock."""
    return "its writer missed its deadline" + (f" at {whereabouts}" if whereabouts else "")


def launch_forked(storage: Storage, job: RankJob) -> Child:
    """Start the writer as a forked child: the fork freezes the data (``ports.Launch``)."""
    # What lies in a segment is copied: a fork does not freeze that.
    memory = frozen([each for each in ranges_of(job.memory) if is_in_segment(each.address)])
    if job.copying is not None:
        job.copying.give_to_child()
    count = SharedCount.for_children()
    write = partial(_write_in_child, storage, job, memory, count)
    return fork_child(write, keep=storage.descriptors(), count=count)


def _write_in_child(
    storage: Storage, job: RankJob, memory: MemoryReader, count: SharedCount
) -> list[tuple[str, int, Any]]:
    try:
        return write_rank(storage, job, InlineChunks(memory), count=count)
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(error, "write", error.filename) from error
