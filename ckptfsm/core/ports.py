"""The ports: protocols for the disk, the clock, other ranks and the format of a part.

Beside them stand the values that cross a port: a rank's job, and what its writer answers. The same
production code runs on the real ports and on those of ``ckptfsm.testing``.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import CkptFsmError
from ckptfsm.core.events import Event
from ckptfsm.core.images import ChunkSource, Copying, Image, Memory
from ckptfsm.core.parts import AttemptId, PartSpec, Planned

FileKind = Literal["file", "dir", "symlink", "other"]

DIRECT_ALIGNMENT = 4096
"""Offsets, lengths and memory addresses of direct reads and writes are multiples of it, in bytes."""


class FileStat(NamedTuple):
    """The result of ``lstat``: the kind, the size in bytes, and the device the entry is on."""

    kind: FileKind
    size: int
    device: int


class Storage(Protocol):
    """System calls on one store: a simulation can crash between any two. Each may raise ``OSError``.

    Paths are relative to the root, "" is the root itself. Their components are joined by ``/``, and
    none is empty, ``.`` or ``..``. No call follows a symbolic link, in any of them. ``root`` is the
    absolute path of the store, for foreign code and for messages.
    """

    root: str

    def open_exclusive(self, path: str, *, direct: bool = False) -> int:
        """Create ``path`` for writing; ``FileExistsError`` if there is anything at that name.

        With ``direct``, writes go past the page cache where the file system can, and the ordinary
        way elsewhere. Each ``pwrite`` has an offset, a length and a memory address that are multiples
        of ``DIRECT_ALIGNMENT``; pad the end of the file, and cut it with ``truncate``. After a short
        write, pass the rest on even if it is not aligned. ``fsync`` is needed all the same.
        """

    def open_existing(self, path: str) -> int:
        """Open a regular file that another program wrote, to fsync it."""

    def open_reading(self, path: str, *, direct: bool = False) -> int:
        """Open a regular file for ``pread``.

        With ``direct``, reads whose offset, length and memory address are multiples of
        ``DIRECT_ALIGNMENT`` go past the page cache where the file system can.
        """

    def pread(self, handle: int, into: memoryview, offset: int) -> int:
        """Read from ``offset`` on; returns how many bytes came (maybe fewer), 0 behind the end."""

    def write(self, handle: int, data: bytes | memoryview) -> int:
        """Write at the handle's position; returns how many bytes were taken (maybe fewer)."""

    def pwrite(self, handle: int, data: bytes | memoryview, offset: int) -> int:
        """Write at ``offset`` without moving the position; may be short too."""

    def allocate(self, handle: int, size: int) -> bool:
        """Reserve the blocks of the first ``size`` bytes; the file then has at least that size.

        New bytes read as zeros. Returns False, without effect, where the file system cannot, and for a
        size of 0. After an error the file may keep a part of the space until it is cut or removed.
        """

    def truncate(self, handle: int, size: int) -> None:
        """Cut the file to ``size`` bytes, or extend it with zeros."""

    def fsync(self, handle: int) -> None: ...

    def close(self, handle: int) -> None: ...

    def rename(self, src: str, dst: str) -> None:
        """Rename; replaces a file at ``dst``, fails on a non-empty directory there."""

    def link(self, src: str, dst: str) -> None:
        """Hard link; ``FileExistsError`` if ``dst`` exists. The only atomic test-and-set in use."""

    def mkdir(self, path: str) -> None: ...

    def rmdir(self, path: str) -> None: ...

    def unlink(self, path: str) -> None: ...

    def touch(self, path: str) -> None:
        """Set the times of an existing file to now; the content stays."""

    def fsync_dir(self, path: str) -> None: ...

    def listdir(self, path: str) -> list[str]:
        """Names in a directory, sorted."""

    def entries(self, path: str) -> Iterator[tuple[str, FileStat]]:
        """Names in a directory, in any order, each with its ``stat``.

        The directory may not be changed meanwhile; a name that another program removes is left out.
        """

    def kinds(self, path: str) -> Iterator[tuple[str, FileKind]]:
        """As ``entries``, with the kind alone: files that are gone by now may be told too."""

    def stat(self, path: str) -> FileStat: ...

    def read(self, path: str, limit: int, offset: int = 0) -> bytes:
        """The content of a regular file from byte ``offset`` on, at most ``limit`` bytes of it."""

    def read_each(
        self, directory: str, names: Iterable[str], limit: int
    ) -> Iterator[tuple[str, bytes]]:
        """As ``read``, for files in one directory, in order. Files that do not exist are left out."""

    def free_bytes(self) -> int:
        """Free space for this user, in bytes."""

    def digest(self, path: str) -> str:
        """Digest of a regular file's whole content, as ``xxh3_128:<32 hex digits>``."""

    def try_lock(self, path: str) -> int | None:
        """Take the liveness lock. Returns a handle, or None if a living process holds the lock.

        The lock ends with the process, and a forked child does not have it.
        """

    def unlock(self, handle: int) -> None: ...

    def close_root(self) -> None:
        """Let go of the root; every later call fails with ``EBADF``. A second call has no effect."""

    def absolute(self, path: str) -> str:
        """The absolute path of ``path``, for code that takes no storage.

        ``StorageError`` if the root's path no longer leads to the directory that was opened.
        """

    def descriptors(self) -> tuple[int, ...]:
        """File descriptors that a forked writer must keep to use this storage."""


class Clock(Protocol):
    """Clock that is passed in. No decision may use ``wall``: it is for display."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary origin; never goes back."""

    def wall(self) -> str:
        """UTC time in ISO 8601, for journals and tables."""

    def unix(self) -> float:
        """Seconds since 1970 on this host: only to compare with a time that a person gave."""

    def sleep(self, seconds: float) -> None: ...


class Identity(NamedTuple):
    """A process, as no later one with the same pid has it.

    ``namespace`` is the number of its pid namespace, "" if the kernel does not tell: containers of one
    pod have the same host name, and each has a process 1.
    """

    host: str
    pid: int
    started: str
    nonce: str
    namespace: str = ""


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """The outcome of submitted work; ``concurrent.futures.Future`` is an implementation.

    ``result`` and ``exception`` wait, and raise ``concurrent.futures.TimeoutError`` after
    ``timeout`` seconds; ``result`` raises the exception of the work.
    """

    def done(self) -> bool: ...

    def result(self, timeout: float | None = None) -> T_co: ...

    def exception(self, timeout: float | None = None) -> BaseException | None: ...


class Executor(Protocol):
    """Runs the coordinator's work in order, on one thread (or inline in a simulation)."""

    def submit(self, work: Callable[[], T]) -> Pending[T]: ...

    def repeat(self, work: Callable[[], object], every_s: float) -> None:
        """Run ``work`` on the thread now and then, while no other work waits; never in a simulation."""

    def shutdown(self) -> None: ...


class Transport(Protocol):
    """Talks to the other ranks. Every call is collective and may raise ``RankFailed``."""

    rank: int
    world_size: int

    def any_flags(self, flags: Sequence[bool]) -> list[bool]:
        """Element-wise OR over all ranks: the only exchange that is cheap enough for every poll."""

    def gather(self, item: Any) -> list[Any] | None:
        """Every rank's item at rank 0, in rank order; None elsewhere."""

    def broadcast(self, item: Any) -> Any:
        """Rank 0's item on every rank."""

    def close(self) -> None: ...


class PartFinisher(Protocol):
    """Completes a ``planned`` part from the results of its ranks; pure: a restart can do it too.

    Args: the content of the part's planned file, the ``Written.results`` of each rank, in the order of
    ranks, and the absolute path that the part will have. Results were JSON meanwhile, so tuples inside
    a row are lists. Returns the files to put into the part's directory, in writing order.
    """

    def __call__(
        self, planned: bytes, results: Sequence[Sequence[Any]], location: str
    ) -> Mapping[str, bytes]: ...


class Written(NamedTuple):
    """The output of a share; its receipt has the files and the results.

    - ``files``: every file that it wrote, relative to the step's directory and fsynced. A file that no
      receipt lists fails the checkpoint. ``writers.shard_file.ShardFile`` makes file and entry.
    - ``results``: rows of JSON values for the finisher, such as where each value lies.
    - ``payload`` goes back to the rank that forked the writer (foreign parts need it to finalize).
    - ``dropped`` says why an optional part was left out.

    The first rank of a ``planned`` part also writes its metadata of ``Driver.merge``, empty or not, as
    ``layout.planned_name(part)``, which is ``.ckptfsm/planned/<part>.bin``, and lists it in ``files``.
    Without it a restart cannot complete the part.
    """

    files: tuple[FileEntry, ...]
    results: tuple[tuple[Any, ...], ...] = ()
    payload: Any = None
    dropped: str = ""


class PartJob:
    """The share of a rank in a part, ready to be written. Subclass it, and write a file at least.

    The defaults are those of a share that only a fork of the trainer can write. A ``portable`` one
    is pickled for the writer, so it must not refer to objects of the trainer.
    """

    __slots__ = ()
    name: str
    directory: str
    images: tuple[Image, ...] = ()
    """The files of this share whose bytes the writer reads. They are written side by side."""
    copying: Copying | None = None
    """The copies that fill memory of the images; None if it has the state already."""

    def write(self, storage: Storage, location: str) -> Written:
        """Write the part below ``location``, the step's directory; every file fsynced.

        ``directory`` is there; the names in it become durable afterwards. A directory outside of it
        is the share's to make and to fsync.
        """
        raise NotImplementedError

    @property
    def portable(self) -> bool:
        """True if a process without torch and without the trainer's memory can write the share."""
        return False

    @property
    def files(self) -> tuple[str, ...] | None:
        """The files that ``write`` makes, relative to the step's directory; None if not known."""
        return None

    @property
    def part_jobs(self) -> tuple[PartJob, ...]:
        """The jobs that it consists of, in writing order."""
        return (self,)

    def read_from(self, source: ChunkSource) -> None:
        """Take the chunks of the images from there: called in the process that writes."""


@dataclass(frozen=True, slots=True)
class RankJob:
    """All parts of one rank for one attempt. ``location`` is where the attempt is written.

    ``optional`` are the names of the parts that it may leave out if they cannot be written. Names
    that other processes made are waited for, at most ``visibility_timeout_s`` seconds.
    """

    of: AttemptId
    rank: int
    world_size: int
    location: str
    parts: tuple[PartJob, ...]
    optional: frozenset[str] = frozenset()
    visibility_timeout_s: float = 0.0

    @property
    def portable(self) -> bool:
        """True if a process without torch can write all of it."""
        return all(part.portable for part in self.parts)

    @property
    def restartable(self) -> bool:
        """True if another process can begin it anew: all files that it makes are known."""
        return all(part.files is not None for part in self.parts)

    @property
    def part_jobs(self) -> tuple[PartJob, ...]:
        """The jobs of all parts, in writing order."""
        return tuple(part_job for part in self.parts for part_job in part.part_jobs)

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple(image for part_job in self.part_jobs for image in part_job.images)

    @property
    def memory(self) -> Iterator[Memory]:
        """The memory of the trainer that the images name."""
        for image in self.images:
            yield from (piece for piece in image.pieces if isinstance(piece, Memory))

    @property
    def mutable(self) -> bool:
        """True if the trainer can change memory that the images name."""
        return any(memory.mutable for memory in self.memory)

    @property
    def copying(self) -> Copying | None:
        """The copies that the writer waits for: one object for all parts of a save."""
        return next((s.copying for s in self.part_jobs if s.copying is not None), None)


class Unfit(Exception):
    """The work can never be done for this checkpoint, which is missed: the message says why."""


@dataclass(frozen=True, slots=True)
class ChildError:
    """Why a child failed, as far as it could say.

    ``os_error`` is the first real one, if any; ``kind`` is that of an error of ours.
    """

    text: str
    os_error: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a child. ``exitcode`` is negative for a signal, None if it could not be learned."""

    exitcode: int | None
    payload: Any = None
    error: ChildError | None = None
    complete: bool = False

    @property
    def succeeded(self) -> bool:
        return self.exitcode == 0 and self.complete and self.error is None

    def explain(self) -> str:
        """A line to print: the child's error message, or else its exit status."""
        if self.error is not None:
            first = f" (first system error: {self.error.os_error})" if self.error.os_error else ""
            return f"{self.error.text}{first}"
        if self.exitcode is None:
            return "its exit status is unknown: SIGCHLD is ignored, or other code reaped it"
        if self.exitcode < 0:
            return f"killed by {signal_name(-self.exitcode)}"
        return f"exit code {self.exitcode} without a complete result"


def signal_name(number: int) -> str:
    """The name of a signal, or its number: signals for real time have no names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class WriterProcess(Protocol):
    """A process that writes a ``RankJob`` from its copy of the data, seen from its trainer."""

    def poll(self) -> Outcome | None:
        """The outcome, or None while the process runs. Never blocks."""

    @property
    def holds_copy(self) -> bool:
        """True once the process has a copy of the data, and the trainer may change its own."""

    @property
    def must_wait(self) -> bool:
        """True if ``save`` has to wait for the copy: the trainer promised no other wait."""

    def await_copy(self, timeout_s: float) -> None:
        """Wait until the process holds a copy or has ended, at most ``timeout_s``."""

    def confirm(self) -> None:
        """Let the process write its receipts: the data did not change while it was copied."""

    def wait(self, timeout_s: float) -> Outcome | None:
        """Wait for the process to end, at most ``timeout_s``; None if it still runs then."""

    def kill(self, timeout_s: float) -> bool:
        """Kill the process and everything it started. True once it is certainly gone."""

    def whereabouts(self) -> str:
        """Where the process hangs, for display; "" if that cannot be told."""

    def written_bytes(self) -> int:
        """Bytes of shards that it gave to the disk so far; 0 if that cannot be told. Never waits."""


Launch = Callable[[Storage, RankJob], WriterProcess]
"""Starts a rank's writer. The data may change once the writer ``holds_copy``.

Raises ``LaunchInterrupted`` if the launch is broken off while a process has the job, and cannot be
ended in time. After any other error no process has it.
"""


class LaunchInterrupted(Exception):
    """A launch was broken off by ``reason``, and ``process`` may still write.

    Kill it until it is gone.
    """

    def __init__(self, process: WriterProcess, reason: BaseException) -> None:
        super().__init__(str(reason))
        self.process, self.reason = process, reason


class Draft(Protocol):
    """A save as one rank prepared it, before anything was accepted or copied.

    ``digests`` has the values of which a checkpoint keeps one for all ranks, by part and key. A part
    without keys has "".
    """

    specs: tuple[PartSpec, ...]
    in_place: bool
    summary: Any
    expected_bytes: int
    digests: Mapping[str, Mapping[str, int]]

    def stage(
        self, location: str, specs: Sequence[PartSpec], planned: Mapping[str, Planned]
    ) -> tuple[PartJob, ...]:
        """Bring the data of these parts, in order, to memory that the writer gets.

        ``specs`` are this rank's parts as all ranks agreed on them, ``location`` is absolute.
        ``planned`` is the result of ``Driver.merge``; its metadata is there for parts whose first rank
        this is.
        """

    def changed(self) -> str:
        """The part of the data that was changed since ``stage``, in words; "" if nothing was."""

    def let_go(self) -> None:
        """Drop all references to the trainer's data and its copies: the writer has its copy now."""

    def finalizers(self) -> list[Finalizer]:
        """The finalizers of the foreign parts, in the order in which every rank runs them."""


class Finalizer(NamedTuple):
    """The call that finishes the foreign part ``name``, once.

    ``problem`` returns the reason that forbids it on this rank (local); ``run`` gets the part's
    payload (collective).
    """

    name: str
    problem: Callable[[], CkptFsmError | None]
    run: Callable[[Any], None]


class Survey(NamedTuple):
    """The comparison of the state that one rank wants to load with the checkpoint.

    - ``missing``: keys that this rank asks for and cannot load in its sharding, all of them droppable.
    - ``shardings``: for each part, what this rank asks for, as ``Driver.check`` takes it.
    - ``stored``: for each part, the keys that the checkpoint has. The same on every rank, so only
      rank 0 fills it.
    """

    missing: set[str]
    shardings: Mapping[str, Any]
    stored: Mapping[str, frozenset[str]]


class VerifiedReading(Protocol):
    """Files of a checkpoint that one rank reads whole, verified while their data go into its state.

    ``files`` are their names, relative to the step's directory.
    """

    files: frozenset[str]

    def run(self, alone: Collection[str]) -> str:
        """Read the files; the fault of the first bad one in words, or "". Local.

        ``alone`` are the files that no other rank reads. The state is changed also by a bad file.
        """

    def stop(self) -> None:
        """Let ``run`` end early, from another thread."""

    def load(
        self, parts: Mapping[str, Any], directories: Mapping[str, str], drop: set[str]
    ) -> Mapping[str, Any]:
        """Load the rest, see ``Driver.load`` (collective)."""


class Driver(Protocol):
    """Turns a trainer's state into parts that can be written, and back. Only dcp/ and above have torch.

    A save calls ``draft``, ``merge``, ``Draft.stage`` and ``PartJob.write``. A restore calls
    ``plan_reading``, ``survey``, ``check`` and ``load``. ``finishers`` has the one of each ``planned``
    format, by its name. CONTRIBUTING.md has a recipe.
    """

    finishers: Mapping[str, PartFinisher]

    def provenance(self) -> Mapping[str, str]:
        """Versions of the libraries that write, for the manifest."""

    def draft(self, parts: Mapping[str, Any]) -> Draft:
        """Plan a save of named parts. Local: no collective, no effect; may raise.

        A value of None means that other ranks write the part.
        """

    def merge(self, summaries: Sequence[Any]) -> Mapping[str, Planned]:
        """At rank 0: check the drafts of all ranks together. Returns what follows for each part.

        A rank's summary covers only the parts that the rank writes.
        """

    def accept(self) -> None:
        """The last draft was accepted, and this rank writes it: its plan may be reused."""

    def refuse(self) -> None:
        """The last draft was refused: plan and send everything anew next time."""

    def survey(
        self, parts: Mapping[str, Any], directories: Mapping[str, str], droppable: Collection[str]
    ) -> Survey:
        """Compare the state that this rank wants to load with the checkpoint in ``directories``.

        Local. ``droppable`` are the keys that the user allows to leave out (``reshard_drops``). Raises
        ``RestoreFailed`` for a key that does not fit and is not droppable.
        """

    def check(self, surveys: Sequence[Survey], drop: set[str]) -> set[str]:
        """At rank 0: raise if the ranks' states do not fit together, apart from the keys to drop.

        ``drop``: the keys that some rank cannot load. Every rank leaves them out. Returns the keys of
        the checkpoint that no rank asks for.
        """

    def plan_reading(
        self,
        storage: Storage,
        location: str,
        parts: Mapping[str, tuple[str, Any]],
        files: Sequence[FileEntry],
    ) -> VerifiedReading | None:
        """Plan to read whole files into the state that this rank wants. Local, changes nothing.

        ``location`` is the step's directory; ``parts`` are directories below it, and states. None
        where no file can be read so: a damaged checkpoint is found by those who verify it.
        """

    def load(
        self, parts: Mapping[str, Any], directories: Mapping[str, str], drop: set[str]
    ) -> Mapping[str, Any]:
        """Load each part from its absolute directory, without the keys to drop (collective).

        Returns the loaded state of each part. It may fill the tensors of ``parts`` or return new ones:
        the caller goes on with what is returned.
        """


class DeferredSignals(Protocol):
    """A block of code in which signal handlers wait; not to be entered twice."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def hear(self) -> BaseException | None:
        """Run the handlers of the signals that have arrived. Returns the exception of one."""


class Mailbox(Protocol):
    """A way for reports to rank 0, beside the transport: not collective, and not on its thread.

    A report may be lost, as the ranks send all reports through the transport as well.
    """

    def post(self, events: Sequence[Event]) -> None:
        """Send reports to rank 0. Raises an error if that is not possible any more."""

    def collect(self) -> list[Event]:
        """At rank 0: the reports that have arrived since the last call; never waits for one."""

    def close(self) -> None:
        """Take no more reports. Called by the last thread that uses it."""


def no_mailbox() -> None:
    """Reports wait for the next round."""


class OneRank:
    """The mailbox of a job with one rank, which reports to itself."""

    def post(self, events: Sequence[Event]) -> None:
        raise AssertionError("no other rank takes reports")

    def collect(self) -> list[Event]:
        return []

    def close(self) -> None:
        """Nothing is open."""


def no_writers() -> None:
    """Nothing is left to close: every writer ends with its job."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The dependencies of a manager. ``open_storage(create)`` gives this rank's storage.

    ``close_writers`` ends the processes that ``launch`` keeps for later jobs. ``mailbox()`` is
    collective; without a mailbox, reports wait for the next round.
    """

    transport: Transport
    driver: Driver
    clock: Clock
    executor: Callable[[], Executor]
    open_storage: Callable[[bool], Storage]
    identity: Callable[[], Identity]
    launch: Launch
    defer_signals: Callable[[], DeferredSignals]
    close_writers: Callable[[], None] = no_writers
    mailbox: Callable[[], Mailbox | None] = no_mailbox
