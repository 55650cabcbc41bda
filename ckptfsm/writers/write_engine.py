"""The engine: one persistent writer process per rank, seen from its trainer.

A save costs the trainer a message. The process reads the trainer's memory (``process_vm_readv``), while
the trainer goes on or waits. No page is write-protected, as a fork would do, and no tensor is cloned.
The process is started once, in the background, and holds nothing of its trainer.

Rules:

- ``forked`` keeps its meaning: the trainer may change its state. After an ``eager`` copy that is so when
  the launch returns; after a ``gated`` one, when ``holds_copy`` says so.
- Memory that the trainer cannot change (host copies of an accelerator's) needs no gate. The job keeps
  that memory alive until the process has read it.
- The process writes no receipt before ``confirm``: the trainer first looks whether its state changed
  while it was read. So a receipt on disk never vouches for a torn copy, also if a process dies.
- Success is the message that all is durable, and a receipt for each part; the caller looks for them.
- Memory in a segment (``lend``) is read through its descriptor, which travels with each order. Other
  memory is read with ``process_vm_readv``. No fork freezes a segment, so it is copied before one.
- A process that failed, was killed or missed its deadline is never used again.
- A job is forked if its parts need torch or a copy of the whole process (foreign requests), or if the
  storage is not the library's adapter. In the mode ``auto`` also if the host has no memory for an
  eager copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ckptfsm.adapters.memory import available_bytes
from ckptfsm.adapters.notices import say
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.adapters.segments import Segment, Span
from ckptfsm.adapters.spawn import Spawned
from ckptfsm.core.errors import describe
from ckptfsm.core.ports import Outcome, RankJob, Storage, WriterProcess
from ckptfsm.writers.image import CHUNK_BYTES, FromImages
from ckptfsm.writers.plain_files import PLAIN_PARTS
from ckptfsm.writers.rank_writer import launch_forked
from ckptfsm.writers.trainers_memory import Range, frozen, ranges_of
from ckptfsm.writers.write_process import Confirm, Done, Ended, Order, Probe, Taken

log = logging.getLogger("ckptfsm")

Mode = Literal["auto", "eager", "gated"]
_LISTEN_S = 0.05
_HELLO_S = 60.0
_PROBE_BYTES = 64
_KILL_WAIT_S = 5.0
_FREE_SHARE = 0.5  # of the free memory, for eager copies: the trainer, and other ranks, need some


@dataclass(frozen=True, slots=True)
class WriteEngineSettings:
    """The settings of an engine. ``buffer_bytes``: memory of the writer for a ``gated`` copy.

    ``twice``: read gated copies a second time, and compare. ``free_bytes`` tells the free memory, which
    limits an eager copy in the mode ``auto``. ``imports`` are modules that jobs need beside this
    package's.
    """

    mode: Mode = "auto"
    buffer_bytes: int = 64 << 20
    free_bytes: Callable[[], int] = available_bytes
    imports: tuple[str, ...] = ()
    threads: int = 2
    nice: int = 10
    copy_timeout_s: float = 1800.0
    twice: bool = False


class WriteEngine:
    """``ports.Launch`` with a persistent process. ``close`` it with its manager.

    Where the kernel does not let the process read the trainer's memory, writers are forked.
    """

    def __init__(self, settings: WriteEngineSettings) -> None:
        self._settings = settings
        self._process: Spawned | None = None
        self._greeted = False
        self._refused = ""
        self._gate = settings.mode == "gated"
        self._held_bytes = 0  # the process's memory for copies
        self._lent: list[Segment] = []
        self._probe = ctypes.create_string_buffer(os.urandom(_PROBE_BYTES), _PROBE_BYTES)

    def start(self) -> None:
        """Start the process, if none waits for a job; it gets ready in the background."""
        if self._process is not None and self._process.exitcode() is None:
            return
        self._greeted = False
        self._held_bytes = 0
        self._process = Spawned("ckptfsm.writers.write_process", "main")
        at = ctypes.addressof(self._probe)
        self._process.send(Probe(at, self._probe.raw, self._settings.imports))

    def warm_up(self) -> None:
        """Start the process ahead of the first save."""
        try:
            self.start()
        except OSError as error:  # the first save tries again, and fails by itself
            said = f"the writer process cannot be started yet: {describe(error)}"
            say(log.warning, "writer_not_started", said, error=describe(error))

    def expect_gate(self) -> None:
        """In the mode ``auto``: the trainer waits before it changes its state, so copy while writing."""
        self._gate = self._gate or self._settings.mode == "auto"

    def lend(self, segment: Segment) -> None:
        """Read the state that lies in this segment through its descriptor.

        The segment belongs to the engine now, and is closed with it.
        """
        self._lent.append(segment)

    def __call__(self, storage: Storage, job: RankJob) -> WriterProcess:
        """Start a rank's writer. Waits until an eager writer holds a copy."""
        parts = [part for part in job.parts if isinstance(part, FromImages)]
        lent = any(part.lent for part in parts)
        eager = lent and not self._gate
        needed = sum(i.chunk_count for part in parts for i in part.images) * CHUNK_BYTES
        ranges = ranges_of(parts)
        if not _is_portable(storage, job) or (eager and not self._affords(needed)):
            return self._forked(storage, job, ranges)
        buffers = needed if eager else min(needed, self._settings.buffer_bytes)
        segments = [segment for segment in self._lent if _some_in(segment, ranges)]
        order = self._order(storage, job, buffers, eager, segments)
        process = self._ordered(order, storage, segments)
        if process is None:
            return self._forked(storage, job, ranges)
        running = WriteJob(self, process, parts, lent=lent)
        try:
            if eager:
                running.await_copy(self._settings.copy_timeout_s)
                if not running.holds_copy and running.poll() is None:
                    raise TimeoutError(errno.ETIMEDOUT, "the writer did not read the state in time")
        except BaseException:  # a Ctrl-C: the caller will not get this writer
            process.kill()
            raise
        return running

    def _forked(self, storage: Storage, job: RankJob, ranges: Sequence[Range]) -> WriterProcess:
        """A forked writer, with copies of all memory that the fork would not freeze."""
        return launch_forked(
            storage, job, frozen([r for r in ranges if any(s.holds(*r) for s in self._lent)])
        )

    def _ordered(
        self, order: Order, storage: Storage, segments: Sequence[Segment]
    ) -> Spawned | None:
        """A process that has the order; another one if the first died while it waited for it."""
        for last in (False, True):
            process = self._ready()
            if process is None:
                return None
            try:
                process.send(order, [*storage.descriptors(), *(s.fileno() for s in segments)])
            except BaseException as error:
                process.kill()
                if last or not isinstance(error, ConnectionError):
                    raise
            else:
                self._held_bytes = max(self._held_bytes, order.buffer_bytes)
                return process
        return None

    def _ready(self) -> Spawned | None:
        """A process that can read our memory, for the caller alone; None if there cannot be one."""
        if self._refused:
            return None
        self.start()
        process, self._process = self._process, None  # not used again if an error comes now
        assert process is not None
        deadline = time.monotonic() + _HELLO_S
        while not self._greeted:
            for message in process.listen(_LISTEN_S):
                self._greeted, self._refused = True, message.problem
            if not self._greeted and (
                process.exitcode() is not None or time.monotonic() > deadline
            ):
                said = f"the writer is forked: its process did not start ({process.exitcode()})"
                say(log.warning, "writer_not_started", said)
                process.kill()
                return None
        if not self._refused:
            return process
        process.kill()
        said = f"writers are forked: no other process can read this one's memory: {self._refused}"
        say(log.warning, "engine_refused", said, reason=self._refused)
        return None

    def _affords(self, needed: int) -> bool:
        """False if, in the mode ``auto``, an eager copy would take too much of the free memory."""
        more = needed - self._held_bytes
        if self._settings.mode != "auto" or more <= 0:
            return True
        limit = int(self._settings.free_bytes() * _FREE_SHARE)
        if more <= limit:
            return True
        said = f"the writer is forked: a copy takes {more} bytes, and at most {limit} may be taken"
        say(log.warning, "copy_not_affordable", said, needed=more, limit=limit)
        return False

    def _order(
        self,
        storage: Storage,
        job: RankJob,
        buffer_bytes: int,
        eager: bool,
        segments: Sequence[Segment],
    ) -> Order:
        parts = tuple(p.bound(None) if isinstance(p, FromImages) else p for p in job.parts)
        job, memory = replace(job, parts=parts), max(buffer_bytes, CHUNK_BYTES)
        settings = self._settings
        twice = settings.twice and not eager
        return Order(
            storage.root,
            job,
            memory,
            settings.threads,
            settings.nice,
            awaited=eager,
            twice=twice,
            segments=len(segments),
            spans=tuple(Span(s.address, s.size, n, 0) for n, s in enumerate(segments)),
        )

    def take_back(self, process: Spawned) -> None:
        """Use a process again: its job is done."""
        if self._process is None:
            self._process = process
        else:
            process.kill(0.0)

    def close(self, timeout_s: float = _KILL_WAIT_S) -> None:
        """End the process, and close the segments."""
        for segment in self._lent:
            segment.close()
        self._lent = []
        process, self._process = self._process, None
        if process is not None:
            process.close()
            process.kill(timeout_s)


def _some_in(segment: Segment, ranges: Sequence[Range]) -> bool:
    return any(segment.holds(*each) for each in ranges)


def _is_portable(storage: Storage, job: RankJob) -> bool:
    """True if a process without torch can write the job, through an adapter of its root.

    A subclass of the adapter has calls that would not be made there.
    """
    return type(storage) is PosixStorage and all(
        part.portable if isinstance(part, FromImages) else isinstance(part, PLAIN_PARTS)
        for part in job.parts
    )


class WriteJob:
    """A job of the engine's process. See ``ports.WriterProcess``."""

    def __init__(
        self, engine: WriteEngine, process: Spawned, parts: Sequence[FromImages], *, lent: bool
    ) -> None:
        self._engine = engine
        self._process = process
        self._kept = tuple(parts)  # with their memory, until it was read
        self._lent = lent
        self._taken = False
        self._failure: Outcome | None = None
        self._outcome: Outcome | None = None

    @property
    def holds_copy(self) -> bool:
        """True once the trainer can change nothing that the process still has to read."""
        self._listen(0.0)
        return self._taken or not self._lent

    def await_copy(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.holds_copy and self._outcome is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self._listen(min(left, _LISTEN_S))

    def confirm(self) -> None:
        """Let the process write its receipts; without this message it waits for ever."""
        if self._outcome is None:
            with contextlib.suppress(ConnectionError):  # it has ended: ``poll`` tells
                self._process.send(Confirm())

    def poll(self) -> Outcome | None:
        self._listen(0.0)
        return self._outcome

    def wait(self, timeout_s: float) -> Outcome | None:
        deadline = time.monotonic() + timeout_s
        while self._outcome is None and (left := deadline - time.monotonic()) > 0:
            self._listen(min(left, _LISTEN_S))
        return self.poll()

    def kill(self, timeout_s: float) -> bool:
        """End the process, unless the job is done: then nothing of it is left."""
        if self._outcome is not None:
            return True
        if not self._process.kill(timeout_s):
            return False
        self._outcome = Outcome(self._process.exitcode())
        return True

    def whereabouts(self) -> str:
        return self._process.whereabouts()

    def _listen(self, timeout_s: float) -> None:
        """Take what the process said, and learn of its end."""
        if self._outcome is not None:
            return
        exitcode = self._process.exitcode()  # first: all that it said is there once it has ended
        for message in self._process.listen(0.0 if exitcode is not None else timeout_s):
            if isinstance(message, Taken):
                self._taken, self._kept = True, ()
            elif isinstance(message, Done):
                self._outcome = Outcome(0, message.payload, complete=True)
                self._engine.take_back(self._process)
            elif isinstance(message, Ended):
                self._failure = Outcome(1, error=message.error)
        if self._outcome is None and exitcode is not None:
            self._outcome = self._failure or Outcome(exitcode)
