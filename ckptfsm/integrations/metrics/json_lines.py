"""A hook that appends a line of JSON to a file at the end of each save."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ckptfsm.adapters.clock import SYSTEM
from ckptfsm.adapters.notices import say
from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.errors import describe
from ckptfsm.core.metrics import Metric
from ckptfsm.core.notes import Meter, Note, Stalled
from ckptfsm.core.ports import Clock
from ckptfsm.integrations.metrics.measurements import Measurements

log = logging.getLogger("ckptfsm")
_EXIT_S = 1.0


class JsonLines(Meter):
    """Hook: a line for each save that ended, and for a call that no save is in flight for.

    A thread writes the file, so a slow disk does not keep the trainer waiting. While ``most_lines``
    wait, further ones are dropped, with a log line. The end of the program waits a second for the
    thread.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, most_lines: int = 1000, clock: Clock = SYSTEM
    ) -> None:
        self._measurements = Measurements(0.0)
        self._clock = clock
        self._lines: queue.Queue[str | None] = queue.Queue(most_lines)
        self._full = False
        thread = threading.Thread(
            target=_write_lines,
            args=(Path(path), self._lines),
            name="ckptfsm-json-lines",
            daemon=True,
        )
        thread.start()
        self._thread = thread
        weakref.finalize(self, _end, self._lines, thread, _EXIT_S)

    def __call__(self, record: TransitionRecord) -> None:
        ended = self._measurements.take(record)
        if ended is None:
            return
        facts: dict[str, Any] = {
            "at": record.at,
            "step": record.step,
            "attempt": str(record.of),
            "state": record.dest.value,
        }
        if record.reason:
            facts |= {"reason": record.reason, "detail": record.detail, "rank": record.rank}
        self._put(facts, ended.metrics)

    def note(self, note: Note) -> None:
        metrics = self._measurements.note(note)
        if metrics and isinstance(note, Stalled):
            self._put({"at": self._clock.wall(), "step": note.step}, metrics)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Wait until the lines are written. False if they are not by then."""
        return _end(self._lines, self._thread, timeout_s)

    def _put(self, facts: dict[str, Any], metrics: Iterable[Metric]) -> None:
        values = {metric.shown: _value(metric) for metric in metrics}
        try:
            self._lines.put_nowait(json.dumps({**facts, "metrics": values}) + "\n")
            self._full = False
        except queue.Full:
            if not self._full:
                said = (
                    f"step {facts['step']}: a line of metrics is dropped: the disk does not answer"
                )
                say(log.warning, "metrics_dropped", said, step=facts["step"])
            self._full = True


def _value(metric: Metric) -> float | dict[str, float]:
    """The value of a metric, or its values by the values of its label."""
    if metric.values and not metric.values[0][0]:
        return metric.values[0][1]
    return {"/".join(labels.values()): value for labels, value in metric.values}


def _write_lines(path: Path, lines: queue.Queue[str | None]) -> None:
    """Append each line, until None comes. The file is opened for each, and may be moved away."""
    while (line := lines.get()) is not None:
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:  # the next line may find a disk that is repaired
            said = f"a line of metrics is not written: {describe(error)}"
            say(log.warning, "metrics_not_written", said, file=str(path), error=describe(error))


def _end(lines: queue.Queue[str | None], thread: threading.Thread, timeout_s: float) -> bool:
    """Let the thread end after the lines that wait, and wait for that."""
    deadline = SYSTEM.monotonic() + timeout_s
    if thread.is_alive():
        try:
            lines.put(None, timeout=timeout_s)
        except queue.Full:
            return False
        thread.join(max(0.0, deadline - SYSTEM.monotonic()))
    return not thread.is_alive()
