"""The journal as lines of text, and its new records as they come."""

from __future__ import annotations

from ckptfsm.core.documents import MetricsRecorded, Record, TransitionRecord
from ckptfsm.core.ports import Storage
from ckptfsm.disk.journal import sealed_segments
from ckptfsm.views.sentences import sentence_of
from ckptfsm.views.timeline import clean

_NO_TIME = "-" * 23


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
        if isinstance(record, (TransitionRecord, MetricsRecorded)):
            return record.step == self._step
        return False


def _line(record: Record) -> str:
    return f"{clean(record.at) or _NO_TIME}  {sentence_of(record)}"
