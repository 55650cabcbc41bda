"""A job of the engine's process, seen from its trainer."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ckptfsm.adapters.notices import say
from ckptfsm.adapters.segments import SharedSegment, Span
from ckptfsm.adapters.shared_count import COUNT_BYTES, SharedCount
from ckptfsm.adapters.spawn import Spawned
from ckptfsm.core.errors import WriterDied, describe
from ckptfsm.core.ports import ChildError, Outcome, RankJob
from ckptfsm.writers.trainers_memory import Arena
from ckptfsm.writers.write_process import Confirm, Done, JobEnded, MemoryRead, OrderAccepted

log = logging.getLogger("ckptfsm")

SERVE_S = 10.0  # until a process that has an order must answer
LISTEN_S = 0.05  # a look for messages
_COPY_LOOK_S = 0.001  # between two looks at an accelerator's copies


@dataclass(frozen=True, slots=True)
class MemoryRoute:
    """The way in which the process gets the memory of a job.

    ``mutable``: the trainer can change some of the memory that the process reads. ``copies`` tell the
    places of memory in the ``arena``. ``whole``: all memory is there. ``must_wait``: the trainer knows
    no gate, and the process reads its memory all the same. ``count`` has the bytes written so far; None
    if the kernel gives no memory for that.
    """

    buffer_bytes: int
    mutable: bool
    segments: tuple[SharedSegment, ...] = ()
    arena: Arena | None = None
    whole: bool = False
    must_wait: bool = False
    copies: Sequence[Span] = ()
    count: SharedSegment | None = None

    @property
    def sources(self) -> tuple[SharedSegment, ...]:
        """The segments that the process needs."""
        return self.segments if self.arena is None else (self.arena.segment, *self.segments)

    def descriptors(self) -> list[int]:
        """Those of the sources, and of the count. Raises ``OSError`` (EBADF) if one was closed."""
        counts = () if self.count is None else (self.count,)
        return [each.fileno() for each in (*self.sources, *counts)]

    @property
    def spans(self) -> tuple[Span, ...]:
        """The places of all memory that is read through ``sources``."""
        first = len(self.sources) - len(self.segments)
        direct = (each for n, s in enumerate(self.segments) for each in self._around(s, first + n))
        return (*self.copies, *direct)

    def _around(self, segment: SharedSegment, number: int) -> Iterator[Span]:
        """The spans of a segment, without the places of which there are copies."""
        start, end = segment.address, segment.address + segment.size
        for copy in sorted(self.copies):
            if start <= copy.address < end:
                if copy.address > start:
                    yield Span(start, copy.address - start, number, start - segment.address)
                start = copy.address + copy.size
        if start < end:
            yield Span(start, end - start, number, start - segment.address)


class WriteJob:
    """``ports.WriterProcess``, by the engine's process.

    ``reuse_process`` and ``reuse_arena`` get the process of a job that is done, and its copy. ``again``
    starts another process, once. ``later`` gives the process its order, once an accelerator's copies
    are made: no fork replaces it, as the state is the trainer's again by then. ``killed``: the trainer
    ended the process, though it may not be gone yet.
    """

    def __init__(
        self,
        process: Spawned,
        job: RankJob,
        reading: MemoryRoute,
        *,
        reuse_process: Callable[[Spawned, Done], None],
        reuse_arena: Callable[[Arena], None],
        later: Callable[[], object] | None = None,
        again: Callable[[], Spawned | None] | None = None,
    ) -> None:
        self._reuse_process, self._reuse_arena = reuse_process, reuse_arena
        self._process = process
        self._kept: RankJob | None = job  # with its memory, until it was read
        self._mutable, self._arena, self._whole = reading.mutable, reading.arena, reading.whole
        self._counting = reading.count  # open as long as another process may need it
        self._count: SharedCount | None = None
        if reading.count is not None:
            self._count = SharedCount(reading.count.view(0, COUNT_BYTES))
        self.must_wait = reading.must_wait
        self._later = later
        self._ordered = later is None
        self._again = again
        self._copied = later is not None
        self._begun = later is None
        self._begin_by: float | None = None
        self._taken = self._confirmed = self.killed = False
        self._failure: Outcome | None = None
        self._outcome: Outcome | None = None

    @property
    def holds_copy(self) -> bool:
        """True once the trainer can change nothing that the process still has to read."""
        self._listen(0.0)
        return self._taken or (self._ordered and not self._mutable)

    def await_copy(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.holds_copy and self._outcome is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._listen(min(left, LISTEN_S))

    def confirm(self) -> None:
        if self._outcome is None:
            self._confirmed = True
            with contextlib.suppress(ConnectionError):  # it has ended: ``poll`` tells
                self._process.send(Confirm())

    def poll(self) -> Outcome | None:
        self._listen(0.0)
        return self._outcome

    def wait(self, timeout_s: float) -> Outcome | None:
        deadline = time.monotonic() + timeout_s
        while self._outcome is None and (left := deadline - time.monotonic()) > 0:
            self._listen(min(left, LISTEN_S))
        return self.poll()

    def kill(self, timeout_s: float) -> bool:
        """End the process, unless the job is done: then nothing of it is left."""
        if self._outcome is not None:
            return True
        self._again = None
        self.killed = True
        if not self._process.kill(timeout_s):
            return False
        self._end(Outcome(self._process.exitcode()))
        return True

    def give_arena_back(self) -> None:
        """After ``kill``: give the copy back. A process that still reads it writes no receipt."""
        self._listen(0.0)
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()

    def whereabouts(self) -> str:
        if self._later is not None:
            return "the copy of the accelerator's state"
        return self._process.whereabouts()

    def written_bytes(self) -> int:
        return 0 if self._count is None else self._count.value

    def _order_when_copied(self) -> None:
        """Give the process its order if the copies are made. An error of them ends the job."""
        if self._later is None:
            return
        copying = None if self._kept is None else self._kept.copying
        try:
            if copying is not None and not copying.done():
                return
        except Exception as error:  # of the accelerator: the save fails
            self._fail(Outcome(1, error=ChildError(describe(error))))
            self._again = None
        else:
            self._order(self._later)
        self._later = None

    def _order(self, give: Callable[[], object]) -> None:
        """Give the process its order, which it has to answer in time."""
        self._begun = False
        try:
            give()
        except ConnectionError:  # the process's exit code tells
            self._process.kill(0.0)
        except OSError as error:
            self._fail(_not_begun(describe(error)))
        else:
            self._ordered, self._begin_by = True, time.monotonic() + SERVE_S

    def _fail(self, failure: Outcome) -> None:
        """End the process, and the job with ``failure`` unless another process begins again."""
        self._failure, self._begin_by = failure, None
        self._process.kill(0.0)

    def _listen(self, timeout_s: float) -> None:
        """Take what the process said, and learn of its end."""
        if self._outcome is not None:
            return
        self._order_when_copied()
        if self._later is not None:
            timeout_s = min(timeout_s, _COPY_LOOK_S)
        exitcode = self._process.exitcode()  # first: all that it said is there once it has ended
        if exitcode is not None and self._later is not None and not self.killed:
            time.sleep(timeout_s)  # it cannot have the order, and another process gets that
            return
        for message in self._process.listen(0.0 if exitcode is not None else timeout_s):
            if isinstance(message, MemoryRead):
                self._taken, self._kept = True, None
            elif isinstance(message, Done):
                self._end(Outcome(0, message.payload, complete=True))
                self._reuse_process(self._process, message)
            elif isinstance(message, JobEnded):
                self._failure = Outcome(1, error=message.error)
            elif isinstance(message, OrderAccepted):
                self._begun, self._begin_by = True, None
        # After it was listened to: that sends the rest of an order to a process that reads.
        late = self._begin_by is not None and time.monotonic() > max(
            self._begin_by, self._process.sent_at + SERVE_S
        )
        if late:
            self._fail(_not_begun(f"it did not begin in {SERVE_S:g} s, at {self.whereabouts()}"))
        if self._outcome is None and exitcode is not None and not self._restarted(exitcode):
            self._end(self._failure or Outcome(exitcode))

    def _restarted(self, exitcode: int) -> bool:
        """Let another process begin again, if this one was killed and all memory is as it was."""
        again, self._again = self._again, None
        intact = not self._taken or self._whole
        if self._copied and self._begun:
            return False  # the accelerator's copies may have been let go
        if again is None or exitcode >= 0 or not intact:
            return False
        died = f"the writer ended: {(self._failure or Outcome(exitcode)).explain()}"
        try:
            process = again()
        except OSError as error:
            said = f"{died}; another one cannot begin: {describe(error)}"
            say(log.warning, "writer_not_started", said, error=describe(error))
            return False
        if process is None:
            return False
        self._process, self._failure = process, None
        self._ordered, self._begun, self._begin_by = True, False, time.monotonic() + SERVE_S
        if self.killed:  # meanwhile, by the engine's end; it has the order
            process.kill(0.0)
            return True
        say(log.warning, "writer_restarted", f"{died}; another one begins again")
        if self._confirmed:
            self.confirm()
        return True

    def _end(self, outcome: Outcome) -> None:
        self._outcome, self._kept = outcome, None
        arena, self._arena = self._arena, None
        if arena is not None:
            self._reuse_arena(arena)
        if self._counting is not None:
            self._counting.close()


def _not_begun(why: str) -> Outcome:
    return Outcome(1, error=ChildError(f"its process was killed: {why}", kind=WriterDied.kind))
