"""The writer process of the engine: it serves one trainer, and writes one job at a time.

Started by ``adapters.spawn`` with no torch and nothing of the trainer; ``writers.write_engine`` is the
trainer's side. A job that fails ends the process, so that no thread and no file of it is left behind.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import pickle
import threading
from dataclasses import dataclass
from functools import partial
from importlib import import_module

from ckptfsm.adapters.fork import told_of
from ckptfsm.adapters.memory import MADV_POPULATE_WRITE, NO_SUCH_CALL, MemoryOf
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.adapters.segments import Descriptors, Span, SpanReader
from ckptfsm.adapters.shared_count import SharedCount
from ckptfsm.adapters.spawn import TrainersEnd, be_considerate
from ckptfsm.core.errors import describe
from ckptfsm.core.images import CHUNK_BYTES
from ckptfsm.core.layout import join
from ckptfsm.core.ports import ChildError, RankJob, Storage
from ckptfsm.disk.trash import remove_staged
from ckptfsm.writers.prefetch import Buffers, Prefetch
from ckptfsm.writers.rank_writer import write_rank


@dataclass(frozen=True, slots=True)
class ProbeMemory:
    """Asks whether the process serves, first of all and before a job: ``content`` lies at ``address``.

    ``imports`` are modules that jobs need beside this package's.
    """

    address: int
    content: bytes
    imports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Hello:
    """The answer to ``ProbeMemory``: "", or the reason why the trainer's memory cannot be read."""

    problem: str


@dataclass(slots=True)
class WriteOrder:
    """A job for the process, sent with the descriptor of ``root``, then those of ``segments``.

    If the written bytes are ``counted``, the descriptor of their count comes last.

    ``job`` is a pickled ``RankJob``, read once the order was accepted: a share of a group may import
    torch then, which takes seconds.
    ``spans`` is the trainer's memory that is read through the segments, by the number of each.
    ``again``: a process that had this order is dead, and may have left files.
    ``buffer_bytes`` is the memory to use for it, ``threads`` the number that read the trainer's.
    ``twice``: read everything again before the trainer may change it.
    """

    root: str
    job: bytes
    buffer_bytes: int
    threads: int
    nice: int
    twice: bool
    segments: int
    spans: tuple[Span, ...]
    counted: bool
    again: bool = False


@dataclass(frozen=True, slots=True)
class OrderAccepted:
    """The answer to ``WriteOrder``: the job begins now."""


@dataclass(frozen=True, slots=True)
class Taken:
    """All bytes of the trainer's memory are read: the trainer may change it."""


@dataclass(frozen=True, slots=True)
class Confirm:
    """The trainer's memory did not change while it was read: receipts may be written."""


@dataclass(frozen=True, slots=True)
class Done:
    """The job is durable: (part, bytes, payload) for each part.

    ``inconsiderate``: "", or the reason why the process takes its full share of the processor.
    """

    payload: list[tuple[str, int, object]]
    inconsiderate: str = ""


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job failed, and the process ends."""

    error: ChildError


class Server:
    """Takes orders until the trainer lets go of the socket."""

    def __init__(self) -> None:
        self._trainer = TrainersEnd()
        self._storages: dict[str, PosixStorage] = {}
        self._confirmed = threading.Event()
        self._mapping: mmap.mmap | None = None
        self._inconsiderate = ""

    def serve(self) -> None:
        channel = self._trainer.channel
        listening = True
        while listening:
            listening, messages = channel.receive(None)
            for message in messages:
                if isinstance(message, ProbeMemory):
                    channel.send(Hello(self._problem_of(message)))
                    threading.Thread(
                        target=_import_all, args=(message.imports,), daemon=True
                    ).start()
                elif isinstance(message, WriteOrder):
                    channel.send(OrderAccepted())
                    self._begin(message, channel.take_fds())
                elif isinstance(message, Confirm):
                    self._confirmed.set()

    def _problem_of(self, probe: ProbeMemory) -> str:
        """Try to read the trainer's memory. Yama, seccomp or another user may forbid it."""
        found = bytearray(len(probe.content))
        try:
            MemoryOf(self._trainer.pid).read(probe.address, memoryview(found))
        except OSError as error:
            return describe(error)
        return "" if found == probe.content else "another process was read"

    def _begin(self, order: WriteOrder, fds: list[int]) -> None:
        count = SharedCount.of_descriptor(fds.pop()) if order.counted else None
        roots = len(fds) - order.segments
        for fd in fds[:roots]:
            if order.root in self._storages:
                os.close(fd)
            else:
                self._storages[order.root] = PosixStorage.of_descriptor(order.root, fd)
        segments = Descriptors(fds[roots:])
        self._confirmed = confirmed = threading.Event()  # here: the confirmation may be next
        work = partial(self._run, order, segments, confirmed, count)
        threading.Thread(target=work, daemon=True, name="ckptfsm-job").start()

    def _run(
        self,
        order: WriteOrder,
        segments: Descriptors,
        confirmed: threading.Event,
        count: SharedCount | None,
    ) -> None:
        try:
            payload = self._write(order, segments, confirmed, count)
            segments.close()
            if count is not None:
                count.close()
        except BaseException as error:  # the trainer must hear of every error
            self._trainer.channel.send(JobEnded(told_of(error)))
            os._exit(1)
        self._trainer.channel.send(Done(payload, self._inconsiderate))

    def _write(
        self,
        order: WriteOrder,
        segments: Descriptors,
        confirmed: threading.Event,
        count: SharedCount | None,
    ) -> list[tuple[str, int, object]]:
        job: RankJob = pickle.loads(order.job)
        order.job = b""  # a part of bytes may be large
        source = Prefetch(
            [share.images for share in job.shares if share.images],
            SpanReader(order.spans, segments.take, MemoryOf(self._trainer.pid)),
            Buffers(self._memory(order.buffer_bytes)),
            partial(self._trainer.channel.send, Taken()),
            threads=order.threads,
            twice=order.twice,
        )
        self._inconsiderate = be_considerate(order.nice)
        source.start()
        await_word = partial(_await_word, source, confirmed)
        storage = self._storages[order.root]
        if order.again:
            remove_files(storage, job)
            if count is not None:
                count.reset()
        return write_rank(storage, job, source, await_word=await_word, count=count)

    def _memory(self, size: int) -> memoryview:
        """At least ``size`` bytes of memory, present, and kept for the next job."""
        size = -(-size // CHUNK_BYTES) * CHUNK_BYTES
        if self._mapping is None or len(self._mapping) < size:
            self._mapping = None  # first: else both are there for a moment
            self._mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            populate(self._mapping)
        return memoryview(self._mapping)[:size]


def _import_all(modules: tuple[str, ...]) -> None:
    """Import ahead of the first job, which would wait for it, while orders are taken."""
    for module in modules:
        import_module(module)


def remove_files(storage: Storage, job: RankJob) -> None:
    """Remove the files of a dead writer of this job: each file is created exclusively."""
    for part in job.parts:
        for name in part.files or ():
            remove_staged(storage, join(job.location, name))


def _await_word(source: Prefetch, confirmed: threading.Event) -> None:
    """Wait for the end of the reads, and for the trainer's word that nothing changed meanwhile.

    The trainer ends a process that waits too long.
    """
    source.join()
    confirmed.wait()


def populate(mapping: mmap.mmap) -> None:
    """Take the pages of a mapping now: a page that is first touched by a copy slows it threefold.

    Large pages, where the kernel has them, save an eighth of the processor time of a gated save.
    """
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    try:
        mapping.madvise(MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno not in NO_SUCH_CALL:  # Linux before 5.14, or a seccomp profile
            raise
        for start in range(0, len(mapping), mmap.PAGESIZE):
            mapping[start] = 0


def main() -> None:
    """Serve the trainer: the command line names the socket."""
    logging.disable()  # its output goes to /dev/null; errors go to the trainer
    Server().serve()
