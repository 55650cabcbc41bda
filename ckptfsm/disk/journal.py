"""The journal: one segment per epoch, one checksummed line per record.

A line is ``{"crc":"xxxxxxxx","record":{...}}``; the crc32 covers the bytes of the record. A segment
is allocated ahead in blocks of newlines, so that a failure can be journaled on a full disk. Records
overwrite this padding in place and are fsynced one by one.

Only the epoch of a segment adds records to it. The next one writes the same bytes anew, and its own
segment begins with the whole ledger and the seals (length, crc) of the newest older ones. Bytes after
a seal come from a zombie and do not count. A segment is removed only when neither the newest segment
nor the one before names it: if the newest is unreadable, the one before counts.

A damaged line is a torn tail, left by a crash, unless a valid record comes after it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import ValidationError

from ckptfsm.adapters.garbage import collection_paused
from ckptfsm.core.documents import (
    MAX_SEGMENT_BYTES,
    RECORD,
    CheckpointRecord,
    MetricsRecorded,
    Record,
    Seal,
    SegmentClosed,
    SegmentOpened,
    TransitionRecord,
    checkpoint_of,
    encode,
    first_problem,
    part_specs,
    raise_newer,
)
from ckptfsm.core.errors import IllegalTransition, JournalCorrupt, OutcomeUnknown, StorageError
from ckptfsm.core.events import UNUSABLE, Withdrawn
from ckptfsm.core.layout import JOURNAL, parse_segment, segment_name
from ckptfsm.core.ledger import KnownCheckpoints, Ledger, with_metrics
from ckptfsm.core.lifecycle import FORGOTTEN, TABLE, Checkpoint, State, writers_of
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Storage
from ckptfsm.core.retention import PolicyRecord
from ckptfsm.core.rollback import NO_INTENT, Intent
from ckptfsm.disk.durable import list_names, write_all

BLOCK_BYTES = 16 * 1024
RESERVE_BYTES = 4 * 1024  # kept free in the last block for records that must fit on a full disk
_HEAD = b'{"crc":"%08x","record":'
_HEAD_BYTES = len(_HEAD % 0)
_ENDS_OF_SAVES = frozenset({State.TRACKED, State.FAILED})
_LEGAL = frozenset((row.source, row.event.name, row.dest) for row in TABLE)


def encode_line(record: Record) -> bytes:
    """A record as its line, newline included."""
    body = encode(record)
    return _HEAD % zlib.crc32(body) + body + b"}\n"


def decode_line(line: bytes) -> bytes | None:
    """The record bytes of a line without its newline, or None if it is not an intact line."""
    body = line[_HEAD_BYTES:-1]
    whole = line.startswith(_HEAD % zlib.crc32(body)) and line.endswith(b"}")
    return body if whole else None


class Segment(NamedTuple):
    """A parsed segment: its records, and the length up to and including the last one."""

    epoch: int
    records: tuple[Record, ...]
    end: int
    crc32: int


@collection_paused()
def parse_segment_bytes(epoch: int, data: bytes, file: str) -> Segment:
    """Parse a segment. Raises ``JournalCorrupt`` with the offset of damage before its end."""
    found = list(_records_in(data, file))
    end = min(found[-1][1], len(data)) if found else 0
    return Segment(epoch, tuple(record for record, _ in found), end, zlib.crc32(data[:end]))


def _records_in(data: bytes, file: str) -> Iterator[tuple[Record, int]]:
    """The records of a segment, each with the length up to and including it and a newline.

    One after the other: 100,000 at once would cost the garbage collector more than their parsing.
    """
    offset = 0
    torn_at: int | None = None
    for line in data.rstrip(b"\n").split(b"\n"):  # thousands of blank lines are padding
        body = decode_line(line) if line else None
        if body is not None:
            if torn_at is not None:
                raise JournalCorrupt(
                    "journal damaged before its last record", file=file, offset=torn_at
                )
            yield _decode_record(body, file, offset), offset + len(line) + 1
        elif line and torn_at is None:
            torn_at = offset
        offset += len(line) + 1


def _decode_record(body: bytes, file: str, offset: int) -> Record:
    try:
        record: Record = RECORD.validator.validate_json(body)
        return record
    except ValidationError as error:
        raise_newer(body, file, error)
        raise JournalCorrupt(
            f"journal record is not one of ours: {first_problem(error)}", file=file, offset=offset
        ) from error


@dataclass(frozen=True, slots=True)
class History:
    """The content of a root's journal.

    - ``layout``: the name of the layout, "" if there is no journal.
    - ``lost``: the attempts that were withdrawn as damaged or missing. Empty if a checkpoint is
      tracked or a fresh start was begun.
    - ``known``: all attempts that the newest segment names.
    - ``since``: the time when an attempt entered its state, as journaled. For display. Empty for an
      attempt that has not moved since the snapshot of the newest segment.
    - ``retention``: the record of the newest owner's policy; empty if there is none.
    - ``holds``: the ``every`` of each of its jobs that hold their checkpoints, by name.
    - ``failed``: the saves of the newest run that failed since it tracked one, in words. For display.
      Those that a start gave up for a dead run are not among them.
    - ``missing``: the files of sealed segments that are gone. Nothing that decides is in them.
    """

    ledger: Ledger
    run_seconds: float
    seals: tuple[Seal, ...]
    newest_epoch: int
    intent: Intent = NO_INTENT
    known: frozenset[AttemptId] = frozenset()
    layout: str = ""
    lost: frozenset[AttemptId] = frozenset()
    since: Mapping[AttemptId, str] = field(default_factory=dict)
    retention: PolicyRecord = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    holds: Mapping[str, int] = field(default_factory=dict)

    @property
    def discarded(self) -> frozenset[AttemptId]:
        """The attempts in the newest segment that were pruned, or failed and were cleaned up."""
        return self.known.difference(self.ledger.checkpoints)


def _segment_epochs(storage: Storage) -> list[int]:
    epochs = (parse_segment(name) for name in list_names(storage, JOURNAL))
    return sorted(epoch for epoch in epochs if epoch is not None)


def newest_segment(storage: Storage) -> int:
    """The greatest epoch that has a segment, begun or not; 0 if none."""
    return max(_segment_epochs(storage), default=0)


def read_segment(storage: Storage, epoch: int) -> Segment:
    """A segment as found on disk, without regard to seals.

    Raises ``JournalCorrupt`` if the segment is damaged, or larger than any segment can be. The size
    rules out a torn tail without a search for valid records.
    """
    return parse_segment_bytes(epoch, _checked_bytes(storage, epoch), _file_of(epoch))


def _checked_bytes(storage: Storage, epoch: int) -> bytes:
    """The bytes of a segment. Raises ``JournalCorrupt`` as ``read_segment`` does for its size."""
    file = _file_of(epoch)
    size = storage.stat(file).size
    if size > MAX_SEGMENT_BYTES:
        raise JournalCorrupt(
            f"a segment of {size} bytes, more than the {MAX_SEGMENT_BYTES} it can have",
            file=file,
            offset=MAX_SEGMENT_BYTES,
        )
    return _bytes_of(storage, epoch)


def read_history(storage: Storage, known: History | None = None) -> History:
    """Rebuild the ledger: the newest segment that began, its snapshot, then its transitions.

    ``known``: what an earlier call returned. It is returned again if the journal has not changed.

    Raises ``JournalCorrupt`` if a record is damaged before the end, a seal does not match, or a
    transition is not a row of the table. Only a tracked checkpoint may have got metrics. A sealed
    segment may be gone: a purge by age takes the oldest first, and the snapshot has all it told.
    """
    try:
        return known if known is not None and _is_current(storage, known) else _read(storage)
    except (JournalCorrupt, FileNotFoundError):  # perhaps its owner wrote or folded it just now
        return _read(storage)


def _read(storage: Storage) -> History:
    epochs = _segment_epochs(storage)
    for epoch in reversed(epochs):
        data = _checked_bytes(storage, epoch)
        records = _records_in(data, _file_of(epoch))
        with collection_paused():  # it has the whole ledger
            first = next(records, None)
        if first is not None:
            opened = _opening_of(epoch, first[0])
            there = _check_seals(storage, opened.seals)
            missing = tuple(_file_of(seal.epoch) for seal in opened.seals if seal not in there)
            replayed = _ReplayedSegment(_file_of(epoch), opened, first[1])
            replayed.take(records)
            end = min(replayed.end, len(data))
            newest = Seal(epoch=epoch, bytes=end, crc32=zlib.crc32(memoryview(data)[:end]))
            return replayed.history((*there, newest), epochs[-1], missing)
    return History(Ledger(), 0.0, (), max(epochs, default=0))


def _newest_begun(storage: Storage, epochs: Sequence[int]) -> Segment | None:
    """The newest segment with a record; None if there is none."""
    segments = (read_segment(storage, epoch) for epoch in reversed(epochs))
    return next((segment for segment in segments if segment.records), None)


def _opening_of(epoch: int, first: Record) -> SegmentOpened:
    if not isinstance(first, SegmentOpened) or first.epoch != epoch:
        raise JournalCorrupt(
            "a segment does not begin with its own opening", file=_file_of(epoch), offset=0
        )
    return first


def sealed_segments(storage: Storage) -> list[Segment]:
    """The segments that began, oldest first, each of the older ones cut at its seal.

    An older one without a seal never began, or was left behind by many restarts.
    """
    newest = _newest_begun(storage, _segment_epochs(storage))
    if newest is None:
        return []
    sealed = [
        parse_segment_bytes(seal.epoch, data, _file_of(seal.epoch))
        for seal, data in _sealed(storage, _opening_of(newest.epoch, newest.records[0]).seals)
    ]
    return [*(segment for segment in sealed if segment.records), newest]


def _is_current(storage: Storage, known: History) -> bool:
    """True if the journal has not changed since ``known`` was read. Parses nothing."""
    epochs = _segment_epochs(storage)
    if not known.seals or not epochs or epochs[-1] != known.seals[-1].epoch:
        return False
    *older, newest = known.seals
    data = _bytes_of(storage, newest.epoch)
    if len(data) < newest.bytes or data[newest.bytes :].strip(b"\n"):
        return False
    same = zlib.crc32(memoryview(data)[: newest.bytes]) == newest.crc32
    return same and _check_seals(storage, older) == older


def _check_seals(storage: Storage, seals: Sequence[Seal]) -> list[Seal]:
    """Compare sealed segments with their seals. Returns the seals of those that are there."""
    return [seal for seal, _ in _sealed(storage, seals)]


def _sealed(storage: Storage, seals: Sequence[Seal]) -> Iterator[tuple[Seal, bytes]]:
    """The sealed bytes of the segments that are there, each compared with its seal."""
    for seal in seals:
        file = _file_of(seal.epoch)
        try:
            data = storage.read(file, seal.bytes)
        except FileNotFoundError:  # an owner has folded it, or a purge has taken it
            continue
        if len(data) < seal.bytes or zlib.crc32(data[: seal.bytes]) != seal.crc32:
            raise JournalCorrupt("a sealed segment has changed", file=file, offset=0)
        yield seal, data[: seal.bytes]


def _file_of(epoch: int) -> str:
    return f"{JOURNAL}/{segment_name(epoch)}"


def folded(storage: Storage, seals: Sequence[Seal]) -> list[str]:
    """The files that become removable with a new segment that seals ``seals``, oldest first.

    These are the segments that the oldest sealed segment itself sealed. A segment that no other one
    sealed is left to people.
    """
    if not seals:
        return []
    data = storage.read(_file_of(seals[0].epoch), seals[0].bytes)
    try:
        opened = RECORD.validate_json(decode_line(data.partition(b"\n")[0]) or b"")
    except ValidationError:
        return []  # written by another version: its seals are unknown
    older = opened.seals if isinstance(opened, SegmentOpened) else ()
    there = _segment_epochs(storage)
    return [_file_of(seal.epoch) for seal in older if seal.epoch in there]


def saved_since(storage: Storage, epoch: int) -> set[AttemptId]:
    """The attempts that the journal acknowledged from ``epoch`` on, also those that are gone since."""
    segments = (_bytes_of(storage, each) for each in _segment_epochs(storage) if each >= epoch)
    moves = (move for data in segments for move in _moves_to(data, {State.TRACKED}))
    return {of for of, record in moves if record["source"] == State.FINALIZED.value}


def entered_at(storage: Storage, history: History) -> dict[AttemptId, str]:
    """When each checkpoint entered its state, as journaled; without those that no record tells."""
    found = dict(history.since)
    wanted = {of: c.state for of, c in history.ledger.checkpoints.items() if of not in found}
    for seal in history.seals[:-1] if wanted else ():  # the last one is of the newest segment
        with contextlib.suppress(FileNotFoundError):  # removed by an owner meanwhile
            data = storage.read(_file_of(seal.epoch), seal.bytes)
            for of, record in _moves_to(data, set(wanted.values())):
                if of in wanted and record["dest"] == wanted[of].value:
                    found[of] = record["at"]
    return found


def _bytes_of(storage: Storage, epoch: int) -> bytes:
    return storage.read(_file_of(epoch), MAX_SEGMENT_BYTES)


def _moves_to(data: bytes, states: Collection[State]) -> Iterator[tuple[AttemptId, dict[str, Any]]]:
    """The moves to these states in the bytes of a segment. Parses only their lines, judges nothing."""
    marks = [b'"dest":"%s"' % state.value.encode() for state in states]
    for line in data.split(b"\n"):
        if any(mark in line for mark in marks) and (body := decode_line(line)) is not None:
            record = json.loads(body)
            if record.get("type") == "transition":
                yield AttemptId(record["step"], record["epoch"], record["attempt"]), record


def lost_without(ledger: Ledger, intent: Intent) -> frozenset[AttemptId]:
    """See ``History.lost``."""
    if intent.begun_afresh or ledger.latest() is not None:
        return frozenset()
    gone = ledger.in_state(State.QUARANTINED)
    return frozenset(c.id for c in gone if c.reason in UNUSABLE)


class Replayed:
    """A checkpoint while its records are replayed: ``finish`` builds it once, after the last one.

    ``at``: the time of its last move, "" if that came before this segment.
    """

    __slots__ = ("_base", "_told", "at", "state", "step")

    def __init__(self, base: Checkpoint | CheckpointRecord, at: str = "") -> None:
        self.step, self.state, self.at = base.step, base.state, at
        self._base = base
        self._told: dict[str, Any] = {}  # by its moves

    def move(self, record: TransitionRecord) -> None:
        """Take a legal move of this checkpoint."""
        self.state, self.at, told = record.dest, record.at, self._told
        told["state"] = record.dest
        if record.shard_bytes:
            told["shard_bytes"] = record.shard_bytes
        if record.manifest_crc:
            told["manifest_crc"] = record.manifest_crc
        if record.reason:
            told["reason"] = record.reason
        if record.detail:
            told["detail"] = record.detail

    def finish(self) -> Checkpoint:
        """The checkpoint after all records that were taken."""
        base, told = self._base, self._told
        forked = self.state is not State.REQUESTED  # every writer has its copy
        if isinstance(base, Checkpoint):
            if not told:
                return base
            return replace(base, forked=base.writers if forked else base.forked, **told)
        if not told:
            return checkpoint_of(base)
        parts = part_specs(base)
        ranks = writers_of(parts, base.world_size) if forked else frozenset()
        return checkpoint_of(base, parts=parts, forked=ranks, **told)


class _ReplayedSegment:
    """The replay of a segment, record by record. ``end``: as ``_records_in`` told with the last one."""

    def __init__(self, file: str, opened: SegmentOpened, end: int) -> None:
        self.end = end
        self._file, self._opened = file, opened
        self._checkpoints = {c.of: Replayed(c) for c in opened.checkpoints}
        if len(self._checkpoints) != len(opened.checkpoints):
            raise JournalCorrupt("a snapshot names an attempt twice", file=file, offset=0)
        self._known = set(self._checkpoints)
        self._run_seconds = opened.run_seconds
        carried = Intent.carried_by(opened)
        self._intent = NO_INTENT if carried == NO_INTENT else carried
        self._failed: dict[AttemptId, str] = {}

    @collection_paused()
    def take(self, records: Iterator[tuple[Record, int]]) -> None:
        """Replay the records after the opening."""
        checkpoints = self._checkpoints
        for index, (record, self.end) in enumerate(records, start=1):
            # Nearly all records are moves, and nearly none of them has to do with a rollback.
            if isinstance(record, TransitionRecord):
                if self._intent is not NO_INTENT or record.event == Withdrawn.name:
                    self._intent = self._intent.after(record, checkpoints)
                of = replay_transition(checkpoints, record, self._file, index)
                if record.created is not None:
                    self._known.add(of)
                if record.dest in _ENDS_OF_SAVES:
                    _note_failure(self._failed, record)
                if record.run_seconds > self._run_seconds:
                    self._run_seconds = record.run_seconds
                continue
            self._intent = self._intent.after(record, checkpoints)
            match record:
                case MetricsRecorded():
                    replay_metrics(checkpoints, record, self._file, index)
                case SegmentClosed():
                    self._run_seconds = max(self._run_seconds, record.run_seconds)
                case SegmentOpened():
                    raise JournalCorrupt(
                        "a segment is opened twice", file=self._file, offset=0, record=index
                    )

    @collection_paused()
    def history(self, seals: tuple[Seal, ...], newest: int, missing: tuple[str, ...]) -> History:
        """What the records say. ``newest``: the greatest epoch that has a segment."""
        opened, checkpoints = self._opened, self._checkpoints
        ledger = Ledger(KnownCheckpoints({of: c.finish() for of, c in checkpoints.items()}))
        return History(
            ledger,
            self._run_seconds,
            seals,
            newest,
            self._intent,
            frozenset(self._known),
            opened.layout,
            lost_without(ledger, self._intent),
            MappingProxyType({of: c.at for of, c in checkpoints.items() if c.at}),
            opened.retention,
            missing,
            tuple(self._failed.values()),
            opened.holds,
        )


def _note_failure(failed: dict[AttemptId, str], record: TransitionRecord) -> None:
    """Keep ``failed``, the failures since the last tracked checkpoint, up to this record."""
    if record.dest is State.TRACKED:
        failed.clear()
    elif record.dest is State.FAILED and record.reason != "process_lost":
        why = record.reason + (f" ({record.detail})" if record.detail else "")
        failed[record.of] = f"step {record.of.step}: {why}"


def replay_transition(
    checkpoints: dict[AttemptId, Replayed], record: TransitionRecord, file: str, index: int
) -> AttemptId:
    """Replay one transition at the journal's level: the move must be a row of the table (I11).

    Returns its attempt.
    """
    of, said, dest = record.of, record.source, record.dest
    current = checkpoints.get(of)
    source = current.state if current is not None else State.ABSENT
    legal = said is source and (said, record.event, dest) in _LEGAL
    created = said is State.ABSENT
    if not legal or created != (record.created is not None):
        raise JournalCorrupt(
            f"record {index}: {said.value} -{record.event}-> {dest.value} of {of} is not a legal "
            f"move from {source.value}",
            file=file,
            offset=0,
            step=record.step,
        )
    if dest in FORGOTTEN:
        checkpoints.pop(of, None)
        return of
    if record.created is not None:
        current = checkpoints[of] = Replayed(record.created)
    assert current is not None
    current.move(record)
    return of


def replay_metrics(
    checkpoints: dict[AttemptId, Replayed], record: MetricsRecorded, file: str, index: int
) -> None:
    """Replay metrics that came after the save: only a tracked checkpoint gets any."""
    of, current = record.of, checkpoints.get(record.of)
    known = current.finish() if current is not None else None
    try:
        measured = with_metrics(of, known, record.metrics)
    except IllegalTransition as error:
        raise JournalCorrupt(
            f"record {index}: {error.message}", file=file, offset=0, step=record.step
        ) from error
    checkpoints[of] = Replayed(measured, at=current.at if current is not None else "")


class JournalWriter:
    """Appends records to this epoch's segment. Not thread-safe: the coordinator's thread only."""

    def __init__(self, storage: Storage, epoch: int) -> None:
        self.file = _file_of(epoch)
        self._storage = storage
        self._handle: int | None = None
        self._end = 0
        self._allocated = 0

    def open(self, opened: SegmentOpened) -> None:
        """Create the segment with its first record, padded and durable."""
        self._handle = self._storage.open_exclusive(self.file)
        line = encode_line(opened)
        try:
            self._extend(len(line))
            self._write(line)
            self._storage.fsync(self._handle)
            self._storage.fsync_dir(JOURNAL)
        except OSError:
            self._stop_writing()
            raise

    def append(self, record: Record, *, essential: bool = False) -> None:
        """Append durably. ``essential`` records may use the reserve of a full disk.

        Raises ``OSError`` if the record cannot be written, and ``OutcomeUnknown`` if its fsync
        failed. After a failed fsync every later call raises ``StorageError``.
        """
        if self._handle is None:
            raise StorageError("the journal segment is lost or closed", file=self.file)
        line = encode_line(record)
        needed = len(line) if essential else len(line) + RESERVE_BYTES
        if self._end + needed > self._allocated:
            try:
                self._extend(len(line))
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
                if not (full and essential and self._end + len(line) <= self._allocated):
                    raise
        self._write(line)
        try:
            self._storage.fsync(self._handle)
        except OSError as error:
            self._stop_writing()  # the content on disk is unknown: never write to this segment again
            raise OutcomeUnknown(
                f"the journal could not be made durable: {error}", file=self.file
            ) from error

    def close(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._storage.close(handle)

    def _extend(self, length: int) -> None:
        """Allocate blocks of padding until ``length`` and the reserve fit."""
        assert self._handle is not None
        while self._end + length + RESERVE_BYTES > self._allocated:
            if self._allocated + BLOCK_BYTES > MAX_SEGMENT_BYTES:
                raise OSError(errno.EFBIG, "no reader takes a larger segment: restart", self.file)
            write_all(self._storage, self._handle, b"\n" * BLOCK_BYTES, self._allocated)
            self._allocated += BLOCK_BYTES

    def _write(self, line: bytes) -> None:
        assert self._handle is not None
        write_all(self._storage, self._handle, line, self._end)
        self._end += len(line)

    def _stop_writing(self) -> None:
        with contextlib.suppress(OSError):  # the failure that leads here is reported already
            self.close()
