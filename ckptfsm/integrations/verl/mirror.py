"""Copies of checkpoints in a remote place: copied under another name, checked there, then renamed.

*before*: the upload is a part of the checkpoint, a group of one writer. It waits for the receipts of all
others, uploads what they list, and gives its own receipt only then. Without it nothing is tracked.
*after*: a child uploads what was tracked; a reader's lease keeps the step meanwhile. A run that ended in
between uploads its latest step at the next start.

Rules:
* Uploaded is what receipts list (before) or the manifest (after), and every file is checked against
  them: its size, and its digest where the place can be read.
* Nothing is ever deleted in the remote place. What is unfinished there begins with a dot.
* A copy carries its attempt and its content: that of an abandoned branch, or of another run into the
  same place, does not count.
* Errors are ``StorageError``, and name the remote place, the command, and what to try by hand.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.fork import Child, fork_child
from ckptfsm.adapters.local_transport import LocalTransport
from ckptfsm.adapters.posix_storage import OpenPosix, PosixStorage
from ckptfsm.core.documents import FileEntry, Manifest
from ckptfsm.core.errors import SaveFailed, StorageError, describe
from ckptfsm.core.layout import PRIVATE, VERL
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.core.ports import Clock, PartJob, Storage, Written
from ckptfsm.disk.durable import fsync_tree_dirs, lookup, move
from ckptfsm.disk.inspection import read_manifest
from ckptfsm.disk.receipts import Receipts
from ckptfsm.ranks.group_worker import BaseGroupWorker
from ckptfsm.ranks.tickets import Ticket
from ckptfsm.ranks.wiring import system_ports
from ckptfsm.writers.plain_files import FilesDraft, FilesDriver, FileTree

NAME = "mirror"
When = Literal["before", "after"]
_KILL_S = 10.0
_LOOK_S = 60.0  # for a look at what is there; an upload has longer


@dataclass(frozen=True, slots=True)
class Copy:
    """A checkpoint in a remote place: its directory there, the attempt and the content that it is of."""

    name: str
    of: AttemptId
    content: str = ""

    @classmethod
    def with_files(cls, of: AttemptId, files: Iterable[FileEntry]) -> Copy:
        """Attempts are numbered per root: another run's has the same number, and not the same files."""
        listed = sorted((entry.name, entry.bytes, entry.digest) for entry in files)
        told = hashlib.sha256(repr(listed).encode()).hexdigest()[:16]
        return cls(VERL.published_name(of.step), of, told)

    @property
    def mark(self) -> str:
        """The empty file that says so."""
        return f".attempt-{self.of}" + (f".{self.content}" if self.content else "")


class Mirror(Protocol):
    """A place for copies of whole checkpoints."""

    def has(self, copy: Copy) -> bool:
        """Whether this copy is there, finished. Raises ``StorageError`` if that cannot be told."""
        ...

    def upload(self, source: str, copy: Copy, files: Sequence[FileEntry]) -> None:
        """Copy ``files`` of the directory ``source``; raise unless ``copy`` is there, whole, then."""
        ...


@dataclass(frozen=True, slots=True)
class DirectoryMirror:
    """A mounted directory. Every copy is fsynced, and read back to compare digests.

    On the machine that wrote it, a read may be answered from memory: it proves the copy, not the disk.
    """

    directory: str

    def has(self, copy: Copy) -> bool:
        with self._named():
            return Path(self.directory, copy.name, copy.mark).is_file()

    def upload(self, source: str, copy: Copy, files: Sequence[FileEntry]) -> None:
        """Raises ``StorageError`` if a call fails or the copy is not equal."""
        with self._named():
            self._upload(source, copy, files)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors of the system name the place."""
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            why = f"the remote copy failed: {describe(error)}; is {self.directory} mounted on this host?"
            raise StorageError(why, file=self.directory) from error

    def _upload(self, source: str, copy: Copy, files: Sequence[FileEntry]) -> None:
        name, nonce = copy.name, uuid.uuid4().hex[:12]
        storage = PosixStorage(self.directory)  # is made, durably, if it is not there
        try:
            partial = Path(self.directory, f".partial-{name}-{nonce}")
            partial.mkdir()
            Path(partial, copy.mark).touch()
            for entry in files:
                target = partial / entry.name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(Path(source, entry.name), target)
                with target.open("rb") as written:
                    os.fsync(written.fileno())
            for entry in files:
                path = f"{partial.name}/{entry.name}"
                same = storage.stat(path).size == entry.bytes
                if not same or storage.digest(path) != entry.digest:
                    raise StorageError(f"the copy of {entry.name} is not equal", file=path)
            fsync_tree_dirs(storage, partial.name)
            if lookup(storage, name) is not None:  # of an attempt that failed after its upload
                move(storage, name, f".replaced-{name}-{nonce}")
            move(storage, partial.name, name)
        finally:
            storage.close_root()


@dataclass(frozen=True, slots=True)
class HdfsMirror:
    """A directory that ``hdfs dfs`` reaches. Sizes are compared; HDFS itself keeps checksums."""

    directory: str
    command: tuple[str, ...] = ("hdfs", "dfs")
    timeout_s: float = 3600.0

    def has(self, copy: Copy) -> bool:
        mark = f"{self.directory}/{copy.name}/{copy.mark}"
        return self._exists(mark, min(_LOOK_S, self.timeout_s))

    def upload(self, source: str, copy: Copy, files: Sequence[FileEntry]) -> None:
        """Raises ``StorageError`` if a command fails or a size differs."""
        name, nonce = copy.name, uuid.uuid4().hex[:12]
        partial = f"{self.directory}/.partial-{name}-{nonce}"
        for directory in sorted({str(Path(entry.name).parent) for entry in files}):
            there = f"{partial}/{directory}"
            self._run("-mkdir", "-p", there)
            inside = [e.name for e in files if str(Path(e.name).parent) == directory]
            self._run("-put", *(f"{source}/{name}" for name in inside), there)
        told = self._run("-stat", "%b %n", *(f"{partial}/{entry.name}" for entry in files))
        for entry, line in zip(files, told.splitlines(), strict=True):
            if line.split(" ", 1) != [str(entry.bytes), Path(entry.name).name]:
                raise StorageError(f"the copy of {entry.name} is {line!r}", file=entry.name)
        self._run("-touchz", f"{partial}/{copy.mark}")
        final = f"{self.directory}/{name}"
        if self._exists(final):
            self._run("-mv", final, f"{self.directory}/.replaced-{name}-{nonce}")
        self._run("-mv", partial, final)
        # Moved into a directory that was there all the same?
        if not self._exists(f"{final}/{copy.mark}"):
            raise StorageError(f"{name} is not the copy of attempt {copy.of}", file=final)

    def _exists(self, path: str, timeout_s: float | None = None) -> bool:
        """``-test`` ends with 1 for "no", and for what it complains of, like a host that is away."""
        ended = self._call("-test", "-e", path, timeout_s=timeout_s)
        complaints = [line for line in ended.stderr.splitlines() if line.startswith("test:")]
        if ended.returncode not in (0, 1) or complaints:
            raise self._failed("-test", ended.stderr, path)
        return ended.returncode == 0

    def _run(self, *arguments: str) -> str:
        ended = self._call(*arguments)
        if ended.returncode != 0:
            raise self._failed(arguments[0], ended.stderr, arguments[-1])
        return ended.stdout

    def _call(
        self, *arguments: str, timeout_s: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        limit = timeout_s or self.timeout_s
        try:
            return subprocess.run(
                [*self.command, *arguments],
                capture_output=True,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            why = f"timed out after {limit} s"
            raise self._failed(arguments[0], why, arguments[-1]) from error
        except OSError as error:
            raise self._failed(arguments[0], describe(error), arguments[-1]) from error

    def _failed(self, action: str, why: str, path: str) -> StorageError:
        """Every command ends with a remote ``path``."""
        command = " ".join(self.command)
        why = f"{command} {action} failed: {why.strip()[-250:]}"
        by_hand = f"does `{command} -ls {self.directory}` work on this host?"
        return StorageError(f"{why}; {by_hand}", file=path)


# ---------------------------------------------------------------------------------------- before


@dataclass(frozen=True, slots=True)
class Awaited:
    """What an upload waits for: all other shares of an attempt, as (part, rank)."""

    ticket: Ticket
    shares: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class UploadJob:
    """Waits for the receipts of all others, and uploads what they list. See ``ports.PartJob``."""

    name: str
    directory: str
    mirror: Mirror
    awaited: Awaited
    clock: Clock

    def write(self, storage: Storage, location: str) -> Written:
        ticket = self.awaited.ticket
        receipts = Receipts(storage, location, ticket.of, ticket.world_size)
        deadline = self.clock.monotonic() + ticket.timeout_s
        arriving = receipts.arriving(self.awaited.shares, self.clock, deadline)
        files = _content(entry for receipt in arriving for entry in receipt.files)
        copy = Copy.with_files(ticket.of, files)
        self.mirror.upload(storage.absolute(location), copy, files)
        return Written(())


@dataclass(slots=True)
class UploadDraft(FilesDraft):
    """A draft whose one part is an upload."""

    make: Callable[[PartSpec], PartJob] | None = None

    def stage(
        self, location: str, specs: Sequence[PartSpec], planned: Mapping[str, bytes]
    ) -> tuple[PartJob, ...]:
        assert self.make is not None
        return tuple(self.make(spec) for spec in specs)


class UploadDriver(FilesDriver):
    """Plans an upload as a group's share. ``awaited`` is set for each save."""

    def __init__(self, mirror: Mirror, clock: Clock) -> None:
        self.mirror = mirror
        self.clock = clock
        self.awaited: Awaited | None = None

    def draft(self, parts: Mapping[str, Any]) -> UploadDraft:
        draft = super().draft(parts)
        return UploadDraft(draft.specs, draft.values, 0, make=self._job)

    def _job(self, spec: PartSpec) -> PartJob:
        assert self.awaited is not None
        return UploadJob(spec.name, spec.directory, self.mirror, self.awaited, self.clock)


class UploadWorker(BaseGroupWorker):
    """The group of one that uploads a checkpoint before it is tracked."""

    def __init__(self, root: str, mirror: Mirror) -> None:
        self.driver = UploadDriver(mirror, SystemClock())
        super().__init__(system_ports(LocalTransport(), self.driver, OpenPosix(root)))

    def begin(self, tickets: Mapping[str, Ticket], own: Sequence[str]) -> list[Any]:
        """Begin the upload of a save whose ``own`` parts the controller writes. Returns reports."""
        shares = [(name, 0) for name in own]
        for group, ticket in tickets.items():
            if group != NAME:
                ranks = range(ticket.first_rank, ticket.first_rank + ticket.size)
                shares += [(ticket.part.name, rank) for rank in ranks]
        self.driver.awaited = Awaited(tickets[NAME], tuple(shares))
        return self.write(tickets[NAME], parts={"": FileTree(_nothing)})

    def abandon(self) -> None:
        """End an upload at once: this run does not track what it copies."""
        if self._writer is not None:
            self._writer.kill(_KILL_S)
        self.close()


def _nothing(directory: str) -> None:
    """An upload has no files of its own."""


# ----------------------------------------------------------------------------------------- after


@dataclass(frozen=True, slots=True)
class Upload:
    """A copy of a published attempt, in a child."""

    root: str
    of: AttemptId
    mirror: Mirror
    look: bool = False  # an earlier run may have made the copy

    def __call__(self) -> int:
        """How many files were uploaded: none if the copy was there."""
        name = VERL.published_name(self.of.step)
        manifest = manifest_of(self.root, self.of.step)
        if manifest is None or manifest.of != self.of:
            raise SaveFailed(f"{name} is not attempt {self.of} any more", step=self.of.step)
        files = _content(manifest.files)
        copy = Copy.with_files(self.of, files)
        if self.look and self.mirror.has(copy):
            return 0
        self.mirror.upload(f"{self.root}/{name}", copy, files)
        return len(files)

    def start(self) -> Child:
        return fork_child(self, keep=(), group=True)


def manifest_of(root: str, step: int) -> Manifest | None:
    """The manifest of a published step; None if it has none. Raises ``DamagedRoot``."""
    storage = PosixStorage(root, create=False)
    try:
        return read_manifest(storage, VERL.published_name(step))
    finally:
        storage.close_root()


def _content(files: Iterable[FileEntry]) -> list[FileEntry]:
    """The files of a checkpoint, without those that are ours alone."""
    return [entry for entry in files if not entry.name.startswith(f"{PRIVATE}/")]


def mirror_of(remote: str | None) -> Mirror | None:
    """The mirror that verl's ``default_hdfs_dir`` stands for."""
    if not remote:
        return None
    hdfs = remote.startswith("hdfs:")
    return HdfsMirror(remote) if hdfs else DirectoryMirror(str(Path(remote).absolute()))
