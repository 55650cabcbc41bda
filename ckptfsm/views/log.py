"""The journal as sentences, and its new records as they come, for ``ckptfsm log``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ckptfsm.core.documents import (
    MetricsRecorded,
    Record,
    RollbackFinished,
    RollbackStarted,
    SegmentClosed,
    SegmentOpened,
    TransitionRecord,
)
from ckptfsm.core.lifecycle import State
from ckptfsm.core.ports import Storage
from ckptfsm.core.units import bytes_text
from ckptfsm.disk.journal import sealed_segments
from ckptfsm.views.timeline import clean

_NO_TIME = "-" * 23
_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "save_requested": "was requested",
        "shard_reported": "had a shard reported",
        "writer_forked": "is held by every rank's writer: the trainer may change its state",
        "published": "is complete at its name",
        "tracker_written": "is tracked: a start resumes from it",
        "superseded": "may be removed: a newer one is tracked, and nothing keeps it",
        "reprieved": "is kept after all",
        "removed": "was pruned",
        "failed": "failed",
        "writer_gone": "has no living writer",
        "writers_lost": "has no living writer",
        "cleaned": "was given up, and its files were moved out of the way",
        "found_published": "was found complete at its name by a restart",
        "adopted": "was adopted: complete, and of no journal here",
        "withdrawn": "was withdrawn",
    }
)


class JournalTail:
    """Gives each record of a journal once, oldest first. ``step``: only this step's."""

    def __init__(self, storage: Storage, step: int | None = None) -> None:
        self._storage = storage
        self._step = step
        self._epoch = self._given = 0  # records of the newest epoch that were given

    def new_lines(self) -> list[str]:
        """The records since the last call, as lines.

        Raises ``JournalCorrupt`` and ``NewerSchema`` like ``read_lives``.
        """
        lines = []
        for segment in sealed_segments(self._storage):
            if segment.epoch < self._epoch:
                continue
            start = self._given if segment.epoch == self._epoch else 0
            lines += [_line(r) for r in segment.records[start:] if self._is_wanted(r)]
            self._epoch, self._given = segment.epoch, len(segment.records)
        return lines

    def _is_wanted(self, record: Record) -> bool:
        if self._step is None:
            return True
        return isinstance(record, (TransitionRecord, MetricsRecorded)) and record.step == self._step


def _line(record: Record) -> str:
    """A record with its time, safe to print on a terminal."""
    return clean(f"{record.at or _NO_TIME}  {_sentence_of(record)}")


def _sentence_of(record: Record) -> str:
    match record:
        case SegmentOpened():
            count = len(record.checkpoints)
            words = f"epoch {record.epoch} begins: pid {record.pid} on {record.host} owns the root"
            return f"{words}, with {count} checkpoint{'s' * (count != 1)}"
        case SegmentClosed():
            return "the owner closed the root in order"
        case RollbackStarted(to_step=None):
            return "a fresh start begins: every checkpoint goes to quarantine"
        case RollbackStarted():
            return f"a rollback to step {record.to_step} begins"
        case RollbackFinished():
            return "the rollback is complete"
        case MetricsRecorded():
            told = ", ".join(f"{n} {value:g}" for n, value in sorted(record.metrics.items()))
            return f"step {record.step} ({record.of}) was measured: {told}"
        case TransitionRecord():
            move = f"{record.source.value} -> {record.dest.value}"
            return f"step {record.step} ({record.of}) {_words_of(record)} [{move}]"


def _words_of(record: TransitionRecord) -> str:
    if record.event == "shard_reported" and record.dest is State.SHARDS_WRITTEN:
        return f"has all its shards on disk, {bytes_text(record.shard_bytes)}"
    words = _WORDS.get(record.event, f"had the event {record.event}")
    if record.created is not None and record.event == "save_requested":
        parts = ", ".join(part.name for part in record.created.parts)
        ranks = record.created.world_size
        words += f" by {ranks} rank{'s' * (ranks != 1)}: {parts}"
    rank = f" on rank {record.rank}" if record.rank is not None else ""
    reason = f": {record.reason}{rank}" if record.reason else rank
    return words + reason + (f" ({record.detail})" if record.detail else "")
