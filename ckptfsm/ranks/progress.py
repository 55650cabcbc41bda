"""The progress of a rank's share of a save, and the display of the save in flight at rank 0.

A rank knows the bytes of its own writer only. Rank 0 sees in the reports which ranks are durable. The
agent's thread draws while the trainer computes, and so do the rounds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from ckptfsm.adapters.notices import say
from ckptfsm.adapters.progress_line import ProgressLine, open_line
from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.errors import describe
from ckptfsm.core.events import Event, ShardReported
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Clock
from ckptfsm.core.progress import (
    Progress,
    WritingRanks,
    ended_text,
    line_of,
    progress_of,
    tracked_text,
)
from ckptfsm.core.requests import Accepted
from ckptfsm.writers.rank_writer import RankWriter

log = logging.getLogger("ckptfsm")
_DRAW_S = 0.1  # between two pictures


class ShareProgress:
    """The progress of this rank's share of a save that begins now; may be asked from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._began = clock, clock.monotonic()
        self._writer: RankWriter | None = None
        self._total: int | None = None
        self._last: Progress | None = None

    def follow(self, writer: RankWriter, total: int | None) -> None:
        """Tell of this writer from now on; ``total`` is the size of the share, if that is known."""
        self._total, self._writer = total, writer

    def __call__(self) -> Progress | None:
        """The progress now, or as it was at the end; None while there is no writer."""
        writer, last = self._writer, self._last
        if last is not None or writer is None:
            return last
        end = writer.ended_at
        elapsed = (self._clock.monotonic() if end is None else end) - self._began
        durable = writer.durable_bytes
        if durable is not None:
            return progress_of(durable, durable, elapsed, durable=True)
        return progress_of(writer.process.written_bytes(), self._total, elapsed)

    def end(self) -> None:
        """Keep the progress as it is, and let go of the writer."""
        self._last = self()
        self._writer = None  # after the progress is kept: another thread may ask meanwhile


class ProgressDisplay:
    """Shows the save in flight: a line on a terminal, or one log line when it has ended.

    ``mode`` is that of the configuration. Rank 0 shows, and every other rank is silent.
    """

    def __init__(
        self,
        mode: str,
        rank: int,
        clock: Clock,
        opened: Callable[[], ProgressLine | None] = open_line,
    ) -> None:
        self._on = mode != "off" and rank == 0
        self._open = opened if mode == "auto" else _no_line
        self._clock = clock
        self._lock = threading.Lock()  # the agent's thread draws
        self._of: AttemptId | None = None
        self._line: ProgressLine | None = None

    def start(self, accepted: Accepted, ranks: int, share: Callable[[], Progress | None]) -> None:
        """Show this save of a job with ``ranks`` ranks from now on.

        Called before the writers begin: reports may come soon. ``share`` tells rank 0's progress.
        """
        if not self._on:
            return
        self.leave()
        with self._lock:
            self._counted: set[ShardReported] = set()
            self._done: set[int] = set()
            writing: set[int] = set()
            for part in accepted.parts:
                writing.update(range(ranks) if part.ranks is None else part.ranks)
            self._ranks, self._share = WritingRanks(len(writing)), share
            self._began = self._next_s = self._clock.monotonic()
            self._line, self._of = self._open(), accepted.of

    def note_reports(self, events: Sequence[Event]) -> None:
        """Take note of reports, of any rank and on any thread. Repeated ones count once."""
        if not self._on:
            return
        with self._lock:
            for event in events:
                if isinstance(event, ShardReported) and event.of == self._of:
                    self._note(event)

    def _note(self, event: ShardReported) -> None:
        if event in self._counted:
            return
        self._counted.add(event)
        self._done.add(event.rank)
        self._ranks = WritingRanks(
            self._ranks.count,
            len(self._done),
            self._ranks.durable_bytes + event.shard_bytes,
            event.rank,
            self._clock.monotonic() - self._began,
        )

    def look(self) -> None:
        """Draw the line anew, at most ten times a second."""
        if self._line is None:
            return
        with self._lock:
            now = self._clock.monotonic()
            if self._line is None or self._of is None or now < self._next_s:
                return
            self._next_s = now + _DRAW_S
            text = line_of(self._of.step, self._share(), self._ranks, self._line.width)
            self._write(self._line.draw, text)

    def take(self, record: TransitionRecord) -> None:
        """End the display when the save was tracked, or is lost."""
        if not self._on or record.of != self._of:
            return
        if record.acknowledges:
            self._end(tracked_text(record.step, self._ranks), tracked=True)
        elif record.dest is State.FAILED:
            self._end_without(record.step, "failed")
        elif record.dest is State.QUARANTINED:
            self._end_without(record.step, "was withdrawn")

    def leave(self) -> None:
        """End the display of a save that is left in flight."""
        if self._of is not None:
            self._end_without(self._of.step, "was left in flight")

    def _end_without(self, step: int, how: str) -> None:
        self._end(ended_text(step, how, self._share(), self._ranks))

    def _end(self, text: str, *, tracked: bool = False) -> None:
        with self._lock:
            of, line, ranks = self._of, self._line, self._ranks
            self._of = self._line = None
        if of is None:
            return
        if line is not None:
            self._write(line.end, text)
            return
        facts = {"step": of.step, "tracked": tracked, "bytes": ranks.durable_bytes}
        rate = ranks.durable_bytes / ranks.last_s if ranks.last_s > 0 else 0.0
        more = {"seconds": ranks.last_s, "bytes_per_s": rate, "slowest_rank": ranks.last}
        say(log.info, "save_progress", text, **facts, **more)

    def _write(self, draw: Callable[[str], None], text: str) -> None:
        try:
            draw(text)
        except (OSError, ValueError) as error:  # the terminal is gone, or the stream was closed
            self._line, self._open = None, _no_line
            said = f"progress is logged from now on: {describe(error)}"
            say(log.warning, "no_progress_line", said, error=describe(error))


def _no_line() -> None:
    """No terminal."""
