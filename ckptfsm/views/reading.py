"""Reads the lives of a root's checkpoints back from its journal. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ckptfsm.core.documents import SegmentClosed, SegmentOpened, TransitionRecord
from ckptfsm.core.lifecycle import ENDED, State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Storage
from ckptfsm.disk.journal import Segment, sealed_segments


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


@dataclass(slots=True)
class Life:
    """An attempt at a checkpoint. ``entered`` is in order, and not empty once it was read.

    ``left``: the time when a segment no longer listed the attempt though it had not ended, or "". A
    person moved its directory away then. ``resumed``: every epoch of the root, the same in each
    life. ``manifest_crc`` is the checksum of its manifest, as far as the journal still tells.
    """

    step: int
    attempt: str
    adopted: bool
    resumed: Sequence[Run]
    entered: list[Entry] = field(default_factory=list)
    shard_bytes: int = 0
    reason: str = ""
    detail: str = ""
    left: str = ""
    manifest_crc: str = ""

    @property
    def end(self) -> State:
        """The current state, or the last one."""
        return self.entered[-1].state

    def enter(self, state: State, at: str, epoch: int, number: int = 0) -> None:
        if not self.entered or self.end is not state:
            self.entered.append(Entry(state, at, epoch, number))


def read_lives(storage: Storage) -> tuple[Life, ...]:
    """The lives of all attempts, in order of request.

    Raises ``JournalCorrupt`` and ``NewerSchema`` like ``journal.read_history``.
    """
    lives: dict[AttemptId, Life] = {}
    runs: list[Run] = []
    for segment in sealed_segments(storage):
        runs.append(_read_run(segment))
        for number, record in enumerate(segment.records):
            match record:
                case SegmentOpened():
                    _take_snapshot(lives, record, runs)
                case TransitionRecord():
                    _take_transition(lives, record, runs, number)
    return tuple(lives.values())


def _read_run(segment: Segment) -> Run:
    times = [record.at for record in segment.records if record.at] or [""]
    closed = isinstance(segment.records[-1], SegmentClosed)
    return Run(segment.epoch, times[0], times[-1], closed)


def _take_snapshot(
    lives: dict[AttemptId, Life], opened: SegmentOpened, runs: Sequence[Run]
) -> None:
    """Take the snapshot that opens a segment: a missing attempt that had not ended was moved away."""
    present: set[AttemptId] = set()
    for record in opened.checkpoints:
        of = AttemptId(record.step, record.epoch, record.attempt)
        present.add(of)
        life = lives.setdefault(of, Life(of.step, str(of), record.provenance == "adopted", runs))
        life.enter(record.state, opened.at, opened.epoch)
        life.shard_bytes = life.shard_bytes or record.shard_bytes
        life.reason, life.detail = record.reason, record.detail
        life.manifest_crc = record.manifest_crc or life.manifest_crc
    for of, life in lives.items():
        if of not in present and life.end not in ENDED and not life.left:
            life.left = opened.at


def _take_transition(
    lives: dict[AttemptId, Life], record: TransitionRecord, runs: Sequence[Run], number: int
) -> None:
    adopted = record.created is not None and record.created.provenance == "adopted"
    life = lives.setdefault(record.of, Life(record.step, str(record.of), adopted, runs))
    life.enter(record.dest, record.at, runs[-1].epoch, number)
    life.shard_bytes = record.shard_bytes or life.shard_bytes
    life.reason = record.reason or life.reason
    life.detail = record.detail or life.detail
    life.manifest_crc = record.manifest_crc or life.manifest_crc
    life.left = ""
