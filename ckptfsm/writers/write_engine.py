"""The engine: one persistent writer process per rank, seen from its trainer.

A ``gated`` save costs the trainer a message: the process reads the trainer's memory while the trainer
goes on. For an ``eager`` save the trainer first copies its state into an arena. No page is
write-protected, as a fork would do. The trainer may change its state once ``holds_copy`` says so. The
process writes no receipt before ``confirm``, so that none vouches for a torn copy.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from ckptfsm.adapters.garbage import collection_paused
from ckptfsm.adapters.host import affordable_bytes, available_bytes
from ckptfsm.adapters.notices import say
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.adapters.segments import SharedSegment, Span, spans_to_send
from ckptfsm.adapters.shared_count import COUNT_BYTES
from ckptfsm.adapters.spawn import Spawned
from ckptfsm.core.errors import describe
from ckptfsm.core.images import CHUNK_BYTES, SMALL_BYTES
from ckptfsm.core.layout import STAGING, receipt_name
from ckptfsm.core.ports import LaunchInterrupted, Outcome, RankJob, Storage, WriterProcess
from ckptfsm.disk.durable import lookup
from ckptfsm.writers.rank_writer import launch_forked, no_signal
from ckptfsm.writers.trainers_memory import Arena, Range, arena_bytes, early_of, ranges_of
from ckptfsm.writers.write_job import LISTEN_S, SERVE_S, MemoryRoute, WriteJob
from ckptfsm.writers.write_process import (
    Done,
    Hello,
    OrderAccepted,
    ProbeMemory,
    WriteOrder,
    remove_files,
)

log = logging.getLogger("ckptfsm")

Mode = Literal["auto", "eager", "gated"]
_PROBE_BYTES = 64
_ARENA_BUFFER_BYTES = 20 << 20  # no trainer waits until an arena was read
_KILL_WAIT_S = 5.0
_MOST_SEGMENTS = 200


@dataclass(frozen=True, slots=True)
class WriteEngineSettings:
    """The settings of an engine. ``buffer_bytes``: memory of the writer for a ``gated`` copy.

    ``twice``: read gated copies a second time, and compare. ``free_bytes`` tells the free memory, which
    limits a copy in the mode ``auto``. ``imports`` are modules that jobs need besides.
    """

    mode: Mode = "auto"
    buffer_bytes: int = 64 << 20
    free_bytes: Callable[[], int] = available_bytes
    imports: tuple[str, ...] = ()
    nice: int = 10
    twice: bool = False


class WriteEngine:
    """``ports.Launch`` with a persistent process. ``close`` it with its manager.

    ``check_signals`` runs the signal handlers that wait. If it returns an exception, a launch ends
    its process and raises it.
    """

    check_signals: Callable[[], BaseException | None]

    def __init__(self, settings: WriteEngineSettings) -> None:
        self.check_signals = no_signal
        self._settings = settings
        self._process: Spawned | None = None
        self._kept_bytes = 0  # by a process, for its buffers
        self._greeted = False
        self._refused = ""
        self._gate = False
        self._segments: list[SharedSegment] = []
        self._arena: Arena | None = None  # with no copy that is still read
        self._taking = threading.Lock()  # of the arena: agents end jobs on their threads
        self._running: weakref.WeakSet[WriteJob] = weakref.WeakSet()
        self._said: set[str] = set()
        self._probe = ctypes.create_string_buffer(os.urandom(_PROBE_BYTES), _PROBE_BYTES)
        at = ctypes.addressof(self._probe)
        self._question = ProbeMemory(at, self._probe.raw, settings.imports)

    def start(self) -> None:
        """Start the process, if none waits for a job; it gets ready in the background."""
        if self._process is not None and self._process.exitcode() is None:
            if self._process.is_of_this_user:
                return
            self._process.close()
        self._process, self._greeted = None, False
        self._process = self._spawned()

    def _spawned(self) -> Spawned:
        process = Spawned("ckptfsm.writers.write_process", "main")
        self._kept_bytes = 0
        try:
            process.send(self._question)
        except BaseException:
            process.kill()
            raise
        return process

    def warm_up(self) -> None:
        """Start the process ahead of the first save."""
        try:
            self.start()
        except OSError as error:  # the next save tries again
            said = f"the writer process cannot be started yet: {describe(error)}"
            say(log.warning, "writer_not_started", said)

    def expect_gate(self) -> None:
        """The trainer waits before it changes its state: read it while writing (``auto``, ``gated``)."""
        self._gate = self._settings.mode != "eager"

    @property
    def may_add_segment(self) -> bool:
        """True if another segment can be added: a message has room for so many descriptors."""
        return len(self._segments) < _MOST_SEGMENTS

    def add_segment(self, segment: SharedSegment) -> None:
        """Read the state in this segment through its descriptor, and close it with the engine."""
        self._segments.append(segment)

    def __call__(self, storage: Storage, job: RankJob) -> WriterProcess:
        """Start a rank's writer. Copies the state first, if the trainer may change it from then on."""
        copying = job.copying
        # For all processes that are tried; then the writer is forked.
        deadline = time.monotonic() + SERVE_S
        # A subclass of the adapter has calls that would not be made in another process.
        portable = type(storage) is PosixStorage and job.portable
        if not portable or not self._greet(deadline):
            return launch_forked(storage, job)
        left = deadline - time.monotonic()  # a copy into the arena does not count
        reading = self._reading(job)
        if reading is None:
            return launch_forked(storage, job)
        reading = replace(reading, count=self._new_count())
        process: Spawned | None = None
        broken_off: BaseException | None = None
        try:
            reading.descriptors()  # a closed segment fails the save, and no process
            give = partial(_give, self._order(storage, job, reading), storage, reading)
            deadline = time.monotonic() + left
            if copying is not None:  # it gets its order once the copies are made
                process = self._take_process()
            else:
                process, broken_off = self._ordered(give, storage, job, deadline)
        finally:
            if process is None and reading.arena is not None:  # also after a Ctrl-C
                reading.arena.close()
        if process is None:
            return launch_forked(storage, job)
        receipts = [f"{job.location}/{receipt_name(p.name, job.rank)}" for p in job.parts]
        again = partial(self._restart, give, storage, receipts)
        running = WriteJob(
            process,
            job,
            reading,
            reuse_process=self.reuse_process,
            reuse_arena=self.reuse_arena,
            later=partial(give, process) if copying is not None else None,
            again=again if _may_restart(job) else None,
        )
        self._running.add(running)
        if broken_off is not None:
            running.kill(0.0)
            raise LaunchInterrupted(running, broken_off)
        try:
            if copying is not None:
                copying.host_copied = not reading.mutable
                if not self._gate:
                    copying.order_updates()
        except BaseException:  # of the accelerator, so the process has no order yet
            running.kill(_KILL_WAIT_S)
            raise
        return running

    @collection_paused()
    def _reading(self, job: RankJob) -> MemoryRoute | None:
        """The way to the memory of a job; None if only a fork is left."""
        memory = list(job.memory)
        ranges = ranges_of(memory)
        all_mutable = all(piece.mutable for piece in memory)
        mutable = ranges if all_mutable else ranges_of(memory, mutable_only=True)
        # Memory that the trainer may change at any time is copied, or read before ``save`` returns. No
        # check afterwards finds every change: many are not counted, or end before the first reading.
        early = early_of(memory, mutable) if self._gate else mutable
        small = all(each.size < SMALL_BYTES for each in early)  # nobody waits for those
        copied = early if self._gate or self._settings.mode != "gated" or small else []
        if self._refused:
            if job.copying is not None:  # a fork waits for an accelerator's copies
                return None
            changing = set(early)
            copied = [
                each
                for each in ranges
                if each in changing or not any(s.holds(*each) for s in self._segments)
            ]
        arena, copies = self._copied(copied) if copied else (None, [])
        if arena is None and self._refused and copied:
            return None
        if early and not copied:
            said = (
                "save waits until the writer has read the state: attach(optimizer), or expect_gate(), "
                "promises that the state does not change before before_update() returns"
            )
            self._say_once("gate_not_promised", said)
        taken = set() if arena is None else set(copied)
        others = [each for each in ranges if each not in taken]
        needed = sum(image.chunk_count for image in job.images) * CHUNK_BYTES
        return MemoryRoute(
            self._buffer_bytes(needed) if others else min(needed, _ARENA_BUFFER_BYTES),
            mutable=not taken.issuperset(mutable),
            segments=tuple(s for s in self._segments if any(s.holds(*each) for each in others)),
            arena=arena,
            whole=not others,
            must_wait=bool(early) and arena is None,
            copies=copies,
        )

    def _buffer_bytes(self, needed: int) -> int:
        """The memory for reads ahead of the disk, for which the trainer waits before its update."""
        most = self._settings.buffer_bytes
        if self._settings.mode == "auto" and needed > most:
            # What its process keeps is free for this save, of which it gets the same half.
            free = affordable_bytes(self._settings.free_bytes) + self._kept_bytes // 2
            most = max(most, free)
        return min(needed, most)

    def _new_count(self) -> SharedSegment | None:
        """A segment for the count of written bytes. A save goes on without one."""
        try:
            return SharedSegment(COUNT_BYTES)
        except OSError as error:
            said = f"the bytes that are written are not counted: {describe(error)}"
            self._say_once("no_progress", said, error=describe(error))
            return None

    def _copied(self, ranges: Sequence[Range]) -> tuple[Arena | None, list[Span]]:
        """Copy the ranges into an arena; None if there is no memory for one."""
        size = arena_bytes(ranges)
        for killed in [each for each in self._running if each.killed]:
            killed.give_arena_back()
        arena = self._take_arena()  # not used again if an error comes now
        if arena is not None and arena.is_inherited:
            arena = None
        held = 0 if arena is None else arena.size
        if held < size and not self._affords(size - held):
            if arena is not None:
                self.reuse_arena(arena)
            return None, []
        if arena is not None and held < size:
            arena.close()  # first: else both are there for a moment
            arena = None
        try:
            arena = arena or Arena(size)
            spans = arena.take(ranges)
        except BaseException as error:
            if arena is not None:
                arena.close()
            if not isinstance(error, OSError):
                raise
            said = f"{self._without_copy}: there is no shared memory: {describe(error)}"
            self._say_once("no_shared_memory", said, error=describe(error))
            return None, []
        if self._refused:
            said = f"no other process can read this one's memory, so saves copy it: {self._refused}"
            self._say_once("engine_refused", said, reason=self._refused)
        return arena, spans

    def _ordered(
        self, give: Callable[..., None], storage: Storage, job: RankJob, deadline: float
    ) -> tuple[Spawned | None, BaseException | None]:
        """A process that has begun the job; None if neither this one nor another serves.

        With it, the interrupt that broke the launch off, if the process was not gone in time.
        """
        again = False
        for last in (False, True):
            if last and not self._greet(deadline):
                break
            process = self._take_process()
            try:
                order = partial(give, process, again=again)
                problem = self._begun(process, order, _deadline_of_try(deadline, last=last))
            except BaseException as error:  # a Ctrl-C
                if process.kill():
                    raise
                return process, error
            # If it hangs in the kernel, its job learns of its end, and begins again.
            if not problem or not process.kill():
                return process, None
            process.close()
            self._say_unserved(problem, last=last)
            again = _may_restart(job)
        if again:
            remove_files(storage, job)  # the fork creates them exclusively, too
        return None, None

    def _begun(self, process: Spawned, order: Callable[[], None], deadline: float) -> str:
        """Let the process begin the job. Returns the reason why it did not, or ""."""
        try:
            order()
            answer, problem = self._answer(process, deadline)
        except OSError as error:
            return describe(error)
        return "" if isinstance(answer, OrderAccepted) else problem or f"it answered {answer}"

    @collection_paused()
    def _order(self, storage: Storage, job: RankJob, reading: MemoryRoute) -> WriteOrder:
        return WriteOrder(
            storage.root,
            pickle.dumps(job),  # now: the order must not keep the trainer's objects
            reading.buffer_bytes,
            self._settings.nice,
            twice=self._settings.twice and reading.mutable,
            segments=len(reading.sources),
            spans=spans_to_send(reading.spans),
            counted=reading.count is not None,
        )

    def _restart(
        self, give: Callable[..., None], storage: Storage, receipts: Sequence[str]
    ) -> Spawned | None:
        """Another process with the job of one that is dead; None if that has put a receipt.

        Waits for nothing. Raises ``OSError``.
        """
        if any(lookup(storage, receipt) is not None for receipt in receipts):
            return None
        process = self._spawned()
        try:
            give(process, again=True)
        except BaseException:  # it has no whole order
            process.kill()
            raise
        return process

    def _take_process(self) -> Spawned:
        """The process, for the caller alone: not used again if an error comes now."""
        process, self._process = self._process, None
        assert process is not None
        return process

    def _greet(self, deadline: float) -> bool:
        """Learn whether the process serves, and can read our memory. False if there is no process."""
        for last in (False, True):
            try:
                self.start()
            except OSError as error:
                self._say_unserved(describe(error), last=True)
                return False
            process = self._take_process()
            last = last or not self._greeted  # a new process takes its time
            problem = self._greeting(process, _deadline_of_try(deadline, last=last))
            if not problem:
                self._process = process
                return True
            process.kill(0.0)  # it has no order
            process.close()
            if last:
                break
            self._say_unserved(problem, last=False)
        self.warm_up()  # a slow host has it ready for the next save
        self._say_unserved(f"its process did not start: {problem}", last=True)
        return False

    def _greeting(self, process: Spawned, deadline: float) -> str:
        """Wait for the process's hello. Returns the reason why there is none, or ""."""
        try:
            if self._greeted:  # by an earlier one; it may have been stopped since
                process.send(self._question)
            answer, problem = self._answer(process, deadline)
        except OSError as error:
            return describe(error)
        except BaseException:  # a Ctrl-C; it has no order
            process.kill()
            raise
        if isinstance(answer, Hello):
            self._greeted, self._refused = True, answer.problem
            return ""
        return problem or f"it answered {answer}"

    def _answer(self, process: Spawned, deadline: float) -> tuple[object, str]:
        """The next message of the process; or None, and the reason why there is none."""
        left = deadline - time.monotonic()
        while True:
            exitcode = process.exitcode()  # first: all that it said is there once it has ended
            message = process.next_message(0.0 if exitcode is not None else LISTEN_S)
            if message is not None:
                return message, ""
            if exitcode is not None:
                return None, Outcome(exitcode).explain()
            # a large order takes longer
            if time.monotonic() > max(deadline, process.sent_at + left):
                return None, f"it does not answer, at {process.whereabouts()}"
            interruption = self.check_signals()
            if interruption is not None:
                raise interruption

    def _say_unserved(self, problem: str, *, last: bool) -> None:
        """Say that a process does not serve, and what the save does now."""
        if last:
            say(log.warning, "writer_not_started", f"the writer is forked: {problem}")
        else:
            said = f"a writer process was given up, another one takes its place: {problem}"
            say(log.warning, "writer_restarted", said)

    def _affords(self, more: int) -> bool:
        """False if a copy would take too much of the free memory; not asked in the mode ``eager``."""
        if self._settings.mode == "eager" or more <= 0:
            return True
        limit = affordable_bytes(self._settings.free_bytes)
        if more <= limit:
            return True
        said = f"{self._without_copy}: a copy takes {more} bytes, and at most {limit} may be taken"
        self._say_once("copy_not_affordable", said, needed=more, limit=limit)
        return False

    def _say_once(self, event: str, said: str, **facts: object) -> None:
        """Log a warning, unless the same event was logged: the next saves meet the same."""
        if event not in self._said:
            self._said.add(event)
            say(log.warning, event, said, **facts)

    @property
    def _without_copy(self) -> str:
        """The way of a save that gets no memory for a copy, for display."""
        if self._refused:
            return "the writer is forked"
        return "save waits until the writer has read the state"

    def reuse_process(self, process: Spawned, done: Done) -> None:
        """Use a process again: its job is done."""
        if done.nice_refused:
            said = f"writer_nice={self._settings.nice} has no effect: {done.nice_refused}"
            self._say_once("nice_refused", said, error=done.nice_refused)
        if self._process is None and process.is_of_this_user:
            self._process, self._greeted, self._kept_bytes = process, True, done.buffer_bytes
        else:
            process.kill(0.0)

    def reuse_arena(self, arena: Arena) -> None:
        """Use an arena again: the process that read it is done, or dead."""
        with self._taking:
            kept, self._arena = self._arena, arena
            if kept is not None and kept.size >= arena.size:
                kept, self._arena = arena, kept
        if kept is not None:
            kept.close()

    def _take_arena(self) -> Arena | None:
        """The arena, for the caller alone."""
        with self._taking:
            arena, self._arena = self._arena, None
        return arena

    def close(self, timeout_s: float = _KILL_WAIT_S) -> None:
        """End all processes, and close the segments."""
        for running in list(self._running):
            running.kill(timeout_s)
        for segment in self._segments:
            segment.close()
        arena = self._take_arena()
        if arena is not None:
            arena.close()
        self._segments = []
        process, self._process = self._process, None
        if process is not None:
            process.close()
            process.kill(timeout_s)


def _deadline_of_try(deadline: float, *, last: bool) -> float:
    """The time until which a process may answer: the first leaves most of it for another's start."""
    now = time.monotonic()
    return deadline if last else now + (deadline - now) / 3


def _give(
    order: WriteOrder, storage: Storage, reading: MemoryRoute, process: Spawned, again: bool = False
) -> None:
    """Send a process its order, with the descriptors. Raises ``OSError``."""
    fds = [*storage.descriptors(), *reading.descriptors()]
    process.send(replace(order, again=again), fds)


def _may_restart(job: RankJob) -> bool:
    """True if all files that the job makes are known, and no other attempt can have them."""
    return job.location.startswith(f"{STAGING}/") and job.restartable
