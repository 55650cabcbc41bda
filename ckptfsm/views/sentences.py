"""The records of a journal as sentences, for ``ckptfsm log``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from ckptfsm.core.units import bytes_text
from ckptfsm.views.timeline import clean


def sentence_of(record: Record) -> str:
    """A record in words, without its time. Safe to print on a terminal."""
    match record:
        case SegmentOpened():
            count = len(record.checkpoints)
            words = f"epoch {record.epoch} begins: pid {record.pid} on {record.host} owns the root"
            return clean(f"{words}, with {count} checkpoint{'s' * (count != 1)}")
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
            return clean(f"step {record.step} ({record.of}) was measured: {told}")
        case TransitionRecord():
            move = f"{record.source.value} -> {record.dest.value}"
            return clean(f"step {record.step} ({record.of}) {_words(record)} [{move}]")


def _words(record: TransitionRecord) -> str:
    made = WORDS.get(record.event, _unknown)
    return made(record)


def _requested(record: TransitionRecord) -> str:
    if record.created is None:
        return "was requested"
    parts = ", ".join(part.name for part in record.created.parts)
    ranks = record.created.world_size
    return f"was requested by {ranks} rank{'s' * (ranks != 1)}: {parts}"


def _written(record: TransitionRecord) -> str:
    if record.dest is not State.SHARDS_WRITTEN:
        return "had a shard reported"
    return f"has all its shards on disk, {bytes_text(record.shard_bytes)}"


def _because(words: str) -> Callable[[TransitionRecord], str]:
    return lambda record: words + _reason(record)


def _reason(record: TransitionRecord) -> str:
    rank = f" on rank {record.rank}" if record.rank is not None else ""
    reason = f": {record.reason}{rank}" if record.reason else rank
    return reason + (f" ({record.detail})" if record.detail else "")


def _unknown(record: TransitionRecord) -> str:
    return f"had the event {record.event}{_reason(record)}"


WORDS: Mapping[str, Callable[[TransitionRecord], str]] = MappingProxyType(
    {
        "save_requested": _requested,
        "writer_forked": _because(
            "is held by every rank's writer: the trainer may change its state"
        ),
        "shard_reported": _written,
        "published": _because("is complete at its name"),
        "tracker_written": _because("is tracked: a start resumes from it"),
        "superseded": _because("may be removed: a newer one is tracked, and nothing keeps it"),
        "reprieved": _because("is kept after all"),
        "removed": _because("was pruned"),
        "failed": _because("failed"),
        "writer_gone": _because("has no living writer"),
        "writers_lost": _because("has no living writer"),
        "cleaned": _because("was given up, and its files were moved out of the way"),
        "found_published": _because("was found complete at its name by a restart"),
        "adopted": _because("was adopted as another program wrote it, and pinned"),
        "withdrawn": _because("was withdrawn"),
    }
)
