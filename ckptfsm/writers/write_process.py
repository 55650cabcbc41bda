"""The writer process of the engine: it serves one trainer, and writes one job at a time.

Started by ``adapters.spawn`` with no torch and nothing of the trainer; ``writers.write_engine`` is the
trainer's side. A job that fails ends the process, so that no thread and no file of it is left behind.
"""

from __future__ import annotations

import logging
import os
import pickle
import threading
from array import array
from dataclasses import dataclass
from functools import partial
from importlib import import_module

from ckptfsm.adapters.fork import child_error
from ckptfsm.adapters.memory import MemoryOf
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.adapters.segments import SpanReader, read_segment, sent_spans
from ckptfsm.adapters.shared_count import SharedCount
from ckptfsm.adapters.spawn import TrainersEnd, be_considerate
from ckptfsm.core.errors import describe
from ckptfsm.core.layout import join
from ckptfsm.core.ports import ChildError, RankJob, Storage
from ckptfsm.disk.trash import remove_staged
from ckptfsm.writers.prefetch import Buffers, Prefetch
from ckptfsm.writers.rank_writer import write_rank

_THREADS = 2  # that read the trainer's memory


@dataclass(frozen=True, slots=True)
class ProbeMemory:
    """Asks whether the process serves, first of all and before a job: ``content`` lies at ``address``.

    ``imports`` are modules that jobs need besides.
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

    If the written bytes are ``counted``, the descriptor of their count comes last. ``job`` is a pickled
    ``RankJob``. ``spans`` is the trainer's memory that is read through the segments, see ``sent_spans``.
    ``twice``: read all of it a second time before the trainer may change it. ``again``: a process that
    had this order is dead, and may have left files.
    """

    root: str
    job: bytes
    buffer_bytes: int
    nice: int
    twice: bool
    segments: int
    spans: array[int]
    counted: bool
    again: bool = False


@dataclass(frozen=True, slots=True)
class OrderAccepted:
    """The answer to ``WriteOrder``: the job begins now."""


@dataclass(frozen=True, slots=True)
class MemoryRead:
    """All bytes of the trainer's memory are read: the trainer may change it."""


@dataclass(frozen=True, slots=True)
class Confirm:
    """The trainer's memory did not change while it was read: receipts may be written."""


@dataclass(frozen=True, slots=True)
class Done:
    """The job is durable: (part, bytes, payload) for each part.

    ``nice_refused``: "", or the reason why the process takes its full share of the processor.
    ``buffer_bytes``: the memory that it keeps for the next job.
    """

    payload: list[tuple[str, int, object]]
    nice_refused: str = ""
    buffer_bytes: int = 0


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
        self._buffers = Buffers()
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
                    # Before the job is unpickled: a share of a group imports torch, for seconds.
                    channel.send(OrderAccepted())
                    self._start_job(message, channel.take_fds())
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

    def _start_job(self, order: WriteOrder, fds: list[int]) -> None:
        count = SharedCount.of_descriptor(fds.pop()) if order.counted else None
        roots = len(fds) - order.segments
        for fd in fds[:roots]:
            if order.root in self._storages:
                os.close(fd)
            else:
                self._storages[order.root] = PosixStorage.of_descriptor(order.root, fd)
        self._confirmed = confirmed = threading.Event()  # here: the confirmation may be next
        work = partial(self._run, order, fds[roots:], confirmed, count)
        threading.Thread(target=work, daemon=True, name="ckptfsm-job").start()

    def _run(
        self,
        order: WriteOrder,
        segments: list[int],
        confirmed: threading.Event,
        count: SharedCount | None,
    ) -> None:
        try:
            job: RankJob = pickle.loads(order.job)
            order.job = b""  # a part of bytes may be large
            self._buffers.allow(order.buffer_bytes)
            source = Prefetch(
                [part_job.images for part_job in job.part_jobs if part_job.images],
                SpanReader(
                    sent_spans(order.spans),
                    partial(read_segment, segments),
                    MemoryOf(self._trainer.pid),
                ),
                self._buffers,
                partial(self._trainer.channel.send, MemoryRead()),
                threads=_THREADS,
                twice=order.twice,
            )
            self._inconsiderate = be_considerate(order.nice)
            source.start()
            storage = self._storages[order.root]
            if order.again:
                remove_files(storage, job)
                if count is not None:
                    count.reset()
            await_confirmation = partial(_await_confirmation, source, confirmed)
            payload = write_rank(
                storage, job, source, await_confirmation=await_confirmation, count=count
            )
            for fd in segments:
                os.close(fd)
            if count is not None:
                count.close()
        except BaseException as error:  # the trainer must learn of every error
            self._trainer.channel.send(JobEnded(child_error(error)))
            os._exit(1)
        self._trainer.channel.send(Done(payload, self._inconsiderate, self._buffers.size))


def _import_all(modules: tuple[str, ...]) -> None:
    """Import ahead of the first job, which would wait for it, while orders are taken."""
    for module in modules:
        import_module(module)


def remove_files(storage: Storage, job: RankJob) -> None:
    """Remove the files of a dead writer of this job: each file is created exclusively."""
    for part in job.parts:
        for name in part.files or ():
            remove_staged(storage, join(job.location, name))


def _await_confirmation(source: Prefetch, confirmed: threading.Event) -> None:
    """Wait for the end of the reads, and for the trainer's word that nothing changed meanwhile.

    The trainer ends a process that waits too long.
    """
    source.join()
    confirmed.wait()


def main() -> None:
    """Serve the trainer: the command line names the socket."""
    logging.disable()  # its output goes to /dev/null; errors go to the trainer
    Server().serve()
