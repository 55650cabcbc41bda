"""Reads the lives of a root's checkpoints back from its journal. Changes nothing.

Rules: of an older segment, only the bytes sealed by the newest one are read. An older segment
without a seal never began, or was left behind by many restarts. Lines that a zombie appended later
are not shown.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from ckptfsm.core.documents import Seal, SegmentClosed, SegmentOpened, TransitionRecord
from ckptfsm.core.errors import JournalCorrupt
from ckptfsm.core.layout import JOURNAL, parse_segment, segment_name
from ckptfsm.core.lifecycle import ENDED, State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Storage
from ckptfsm.disk.durable import list_names
from ckptfsm.disk.journal import (
    History,
    Segment,
    decode_line,
    parse_segment_bytes,
    read_segment,
)

S = State


@dataclass(frozen=True, slots=True)
class Entry:
    """A state, when it was entered (ISO text as journaled, may be empty), in which epoch.

    ``record``: the number of its record in that epoch's segment; 0 is the snapshot at its beginning.
    """

    state: State
    at: str
    epoch: int
    record: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """An epoch: its ``SegmentOpened``, its last record, and whether it was closed in order."""

    epoch: int
    opened: str
    last: str
    closed: bool


@dataclass(frozen=True, slots=True)
class Life:
    """An attempt at a checkpoint. ``entered`` is never empty and in order.

    ``left``: the time when a segment no longer listed the attempt though it had not ended, or "". A
    person moved its directory away then. ``resumed``: every epoch of the root, the same in each
    life. ``manifest_crc`` is the checksum of its manifest, as far as the journal still tells.
    """

    step: int
    attempt: str
    entered: tuple[Entry, ...]
    shard_bytes: int
    reason: str
    detail: str
    adopted: bool
    left: str
    resumed: tuple[Run, ...]
    manifest_crc: str = ""

    @property
    def end(self) -> State:
        """The current state, or the last one."""
        return self.entered[-1].state


# --------------------------------------------------------------------------------------- reading


@dataclass(slots=True)
class _Draft:
    of: AttemptId
    adopted: bool
    entered: list[Entry] = field(default_factory=list)
    shard_bytes: int = 0
    reason: str = ""
    detail: str = ""
    left: str = ""
    manifest_crc: str = ""

    def enter(self, state: State, at: str, epoch: int, number: int = 0) -> None:
        if not self.entered or self.entered[-1].state is not state:
            self.entered.append(Entry(state, at, epoch, number))

    def finish(self, runs: tuple[Run, ...]) -> Life:
        return Life(
            step=self.of.step,
            attempt=str(self.of),
            entered=tuple(self.entered),
            shard_bytes=self.shard_bytes,
            reason=self.reason,
            detail=self.detail,
            adopted=self.adopted,
            left=self.left,
            resumed=runs,
            manifest_crc=self.manifest_crc,
        )


def read_lives(storage: Storage) -> tuple[Life, ...]:
    """The lives of all attempts, in order of request.

    Raises ``JournalCorrupt`` and ``NewerSchema`` like ``journal.read_history``.
    """
    drafts: dict[AttemptId, _Draft] = {}
    runs: list[Run] = []
    for segment in sealed_segments(storage):
        runs.append(_read_run(segment))
        for number, record in enumerate(segment.records):
            match record:
                case SegmentOpened():
                    _take_snapshot(drafts, record)
                case TransitionRecord():
                    _take_transition(drafts, record, segment.epoch, number)
                case _:
                    pass
    shared = tuple(runs)
    return tuple(draft.finish(shared) for draft in drafts.values())


def sealed_segments(storage: Storage) -> list[Segment]:
    """The segments that began, oldest first, each of the older ones cut at its seal."""
    names = (parse_segment(name) for name in list_names(storage, JOURNAL))
    for epoch in sorted((n for n in names if n is not None), reverse=True):
        newest = read_segment(storage, epoch)
        if not newest.records:
            continue
        opened = newest.records[0]
        if not isinstance(opened, SegmentOpened) or opened.epoch != epoch:
            raise JournalCorrupt(
                "a segment does not begin with its own opening", file=_file_of(epoch), offset=0
            )
        sealed = []
        for seal in sorted(opened.seals, key=lambda seal: seal.epoch):
            segment = _read_sealed(storage, seal.epoch, seal.bytes)
            if segment is None:
                continue
            if (segment.end, segment.crc32) != (seal.bytes, seal.crc32):
                raise JournalCorrupt(
                    "a sealed segment has changed", file=_file_of(seal.epoch), offset=0
                )
            sealed.append(segment)
        return [*(segment for segment in sealed if segment.records), newest]
    return []


def entered_at(storage: Storage, history: History) -> dict[AttemptId, str]:
    """When each checkpoint entered its state, as journaled; without those that no record tells.

    Only lines of these states are read in the older segments, and nothing is judged: for lists, where
    a time is a remark.
    """
    found = dict(history.since)
    wanted = {of: c.state for of, c in history.ledger.checkpoints.items() if of not in found}
    if not wanted:
        return found
    marks = [b'"dest":"%s"' % state.value.encode() for state in set(wanted.values())]
    for seal in history.seals[:-1]:  # the last one is of the newest segment
        for line in _lines_of(storage, seal):
            if not any(mark in line for mark in marks) or (body := decode_line(line)) is None:
                continue
            record = json.loads(body)
            if record.get("type") != "transition":
                continue
            of = AttemptId(record["step"], record["epoch"], record["attempt"])
            if of in wanted and record["dest"] == wanted[of].value:
                found[of] = record["at"]
    return found


def _lines_of(storage: Storage, seal: Seal) -> list[bytes]:
    """The lines of a sealed segment; none if an owner has removed it meanwhile."""
    try:
        return storage.read(_file_of(seal.epoch), seal.bytes).split(b"\n")
    except FileNotFoundError:
        return []


def _file_of(epoch: int) -> str:
    return f"{JOURNAL}/{segment_name(epoch)}"


def _read_sealed(storage: Storage, epoch: int, limit: int) -> Segment | None:
    """A sealed segment; None if it is gone, as an owner has folded it or a purge has taken it."""
    file = _file_of(epoch)
    try:
        data = storage.read(file, limit)
    except FileNotFoundError:
        return None
    return parse_segment_bytes(epoch, data[:limit], file)


def _read_run(segment: Segment) -> Run:
    times = [record.at for record in segment.records if record.at]
    opened = times[0] if times else ""
    closed = isinstance(segment.records[-1], SegmentClosed)
    return Run(segment.epoch, opened, times[-1] if times else "", closed)


def _take_snapshot(drafts: dict[AttemptId, _Draft], opened: SegmentOpened) -> None:
    """Take the snapshot that opens a segment: a missing attempt that had not ended was moved away."""
    present: set[AttemptId] = set()
    for record in opened.checkpoints:
        of = AttemptId(record.step, record.epoch, record.attempt)
        present.add(of)
        draft = drafts.setdefault(of, _Draft(of, record.provenance == "adopted"))
        draft.enter(record.state, opened.at, opened.epoch)
        draft.shard_bytes = draft.shard_bytes or record.shard_bytes
        draft.reason, draft.detail = record.reason, record.detail
        draft.manifest_crc = record.manifest_crc or draft.manifest_crc
    for of, draft in drafts.items():
        ended = draft.entered[-1].state in ENDED
        if of not in present and not ended and not draft.left:
            draft.left = opened.at


def _take_transition(
    drafts: dict[AttemptId, _Draft], record: TransitionRecord, epoch: int, number: int
) -> None:
    adopted = record.created is not None and record.created.provenance == "adopted"
    draft = drafts.setdefault(record.of, _Draft(record.of, adopted))
    draft.enter(record.dest, record.at, epoch, number)
    draft.shard_bytes = record.shard_bytes or draft.shard_bytes
    draft.reason = record.reason or draft.reason
    draft.detail = record.detail or draft.detail
    draft.manifest_crc = record.manifest_crc or draft.manifest_crc
    draft.left = ""
