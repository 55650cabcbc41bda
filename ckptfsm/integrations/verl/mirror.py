"""Copies of checkpoints in a remote place: copied under another name, checked there, then renamed.

*before*: the upload is a part of the checkpoint, a group with one writer. The writer waits for the
receipts of all others, uploads the listed files, and only then makes its receipt. Without that
receipt nothing is tracked. *after*: a child uploads a tracked checkpoint, see ``uploads``.

Every file is checked against receipts or manifest: its size, and its digest where the place can be
read. Nothing is ever deleted in the remote place. A copy carries its attempt and its content, so one of
an abandoned branch, or of another run into the same place, does not count.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from ckptfsm.adapters.fork import Child, fork_child
from ckptfsm.adapters.local_transport import LocalTransport
from ckptfsm.adapters.posix_storage import OpenPosix, PosixStorage
from ckptfsm.core.documents import FileEntry, Manifest
from ckptfsm.core.errors import SaveFailed, StorageError, describe
from ckptfsm.core.formats import TREE
from ckptfsm.core.layout import PRIVATE, VERL
from ckptfsm.core.parts import AttemptId, PartSpec, Planned
from ckptfsm.core.ports import Clock, PartJob, Storage, Written
from ckptfsm.disk.durable import fsync_tree_dirs, lookup, move
from ckptfsm.disk.inspection import read_manifest
from ckptfsm.disk.receipts import Receipts
from ckptfsm.ranks.group_worker import BaseGroupWorker
from ckptfsm.ranks.tickets import Ticket
from ckptfsm.ranks.wiring import system_ports
from ckptfsm.writers.plain_files import FilesDraft, FilesDriver

NAME = "mirror"
When = Literal["before", "after"]
_KILL_S = 10.0
_LOOK_S = 60.0  # for a look at the place; an upload has longer


@dataclass(frozen=True, slots=True)
class RemoteCopy:
    """A checkpoint in a remote place: its directory there, its attempt and its content."""

    name: str
    of: AttemptId
    content: str = ""

    @classmethod
    def with_files(cls, of: AttemptId, files: Iterable[FileEntry]) -> RemoteCopy:
        """The copy of an attempt with these files.

        Attempts are numbered per root: another run may have the same number, but with other files.
        """
        listed = sorted((entry.name, entry.bytes, entry.digest) for entry in files)
        told = hashlib.sha256(repr(listed).encode()).hexdigest()[:16]
        return cls(VERL.published_name(of.step), of, told)

    @property
    def mark(self) -> str:
        """The name of the empty file that records attempt and content."""
        return f".attempt-{self.of}" + (f".{self.content}" if self.content else "")


class Mirror(Protocol):
    """A place for copies of whole checkpoints."""

    def has(self, copy: RemoteCopy) -> bool:
        """True if this copy exists, finished. Raises ``StorageError`` if that cannot be told."""
        ...

    def upload(self, source: str, copy: RemoteCopy, files: Sequence[FileEntry]) -> None:
        """Copy ``files`` of the directory ``source``; raise unless ``copy`` is then complete."""
        ...


@dataclass(frozen=True, slots=True)
class DirectoryMirror:
    """A mounted directory. Every copy is fsynced, and read back to compare digests.

    On the machine that wrote a file, a read may come from memory: it proves the copy, not the disk.
    """

    directory: str

    def has(self, copy: RemoteCopy) -> bool:
        with self._named():
            return Path(self.directory, copy.name, copy.mark).is_file()

    def upload(self, source: str, copy: RemoteCopy, files: Sequence[FileEntry]) -> None:
        """Copy the files. Raises ``StorageError`` if a call fails or the copy is not equal."""
        with self._named():
            self._upload(source, copy, files)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Name the place in errors of the system."""
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            why = f"the remote copy failed: {describe(error)}; is {self.directory} mounted on this host?"
            raise StorageError(why, file=self.directory) from error

    def _upload(self, source: str, copy: RemoteCopy, files: Sequence[FileEntry]) -> None:
        name, nonce = copy.name, uuid.uuid4().hex[:12]
        storage = PosixStorage(self.directory)  # made durably if missing
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
            if lookup(storage, name) is not None:  # left by an attempt that failed after its upload
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

    def has(self, copy: RemoteCopy) -> bool:
        mark = f"{self.directory}/{copy.name}/{copy.mark}"
        return self._exists(mark, min(_LOOK_S, self.timeout_s))

    def upload(self, source: str, copy: RemoteCopy, files: Sequence[FileEntry]) -> None:
        """Copy the files. Raises ``StorageError`` if a command fails or a size differs."""
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
        """True if ``path`` exists.

        ``-test`` ends with 1 for "no", and for complaints like an absent host.
        """
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
        """The error of a command, all of which end with a remote ``path``."""
        command = " ".join(self.command)
        why = f"{command} {action} failed: {why.strip()[-250:]}"
        by_hand = f"does `{command} -ls {self.directory}` work on this host?"
        return StorageError(f"{why}; {by_hand}", file=path)


# ---------------------------------------------------------------------------------------- before


@dataclass(frozen=True, slots=True)
class UploadJob(PartJob):
    """Waits for the receipts of the ``awaited`` shares, (part, rank), and uploads the listed files."""

    name: str
    directory: str
    mirror: Mirror
    ticket: Ticket
    awaited: tuple[tuple[str, int], ...]
    clock: Clock

    def write(self, storage: Storage, location: str) -> Written:
        ticket = self.ticket
        receipts = Receipts(storage, location, ticket.of, ticket.world_size)
        deadline = self.clock.monotonic() + ticket.timeout_s
        arriving = receipts.arriving(self.awaited, self.clock, deadline)
        files = _content(entry for receipt in arriving for entry in receipt.files)
        copy = RemoteCopy.with_files(ticket.of, files)
        self.mirror.upload(storage.absolute(location), copy, files)
        return Written(())


class UploadDraft(FilesDraft):
    def stage(
        self, location: str, specs: Sequence[PartSpec], planned: Mapping[str, Planned]
    ) -> tuple[PartJob, ...]:
        placed = ((spec, self.values[spec.name]) for spec in specs)
        return tuple(replace(job, name=spec.name, directory=spec.directory) for spec, job in placed)


class UploadDriver(FilesDriver):
    """Plans a group's share that is an ``UploadJob``, and has no files of its own."""

    def draft(self, parts: Mapping[str, Any]) -> UploadDraft:
        specs = tuple(PartSpec(name, TREE.name, ranks=(0,)) for name in parts)
        return UploadDraft(specs, parts, 0)


class UploadWorker(BaseGroupWorker):
    """The group with one rank that uploads a checkpoint before it is tracked."""

    def __init__(self, root: str, mirror: Mirror) -> None:
        self._mirror = mirror
        super().__init__(system_ports(LocalTransport(), UploadDriver(), OpenPosix(root)))

    def begin(self, tickets: Mapping[str, Ticket], own: Sequence[str]) -> list[Any]:
        """Begin the upload of a save; the controller writes the parts ``own``. Returns reports."""
        shares = [(name, 0) for name in own]
        for group, ticket in tickets.items():
            if group != NAME:
                ranks = range(ticket.first_rank, ticket.first_rank + ticket.size)
                shares += [(ticket.part.name, rank) for rank in ranks]
        ticket, clock = tickets[NAME], self._ports.clock
        job = UploadJob("", "", self._mirror, ticket, tuple(shares), clock)
        return self.write(ticket, parts={"": job})

    def abandon(self) -> None:
        """End an upload at once: this run will not track its checkpoint."""
        self._share.drop(_KILL_S)
        self.close()


# ----------------------------------------------------------------------------------------- after


@dataclass(frozen=True, slots=True)
class Upload:
    """A copy of a published attempt, in a child."""

    root: str
    of: AttemptId
    mirror: Mirror
    look: bool = False  # an earlier run may have made the copy

    def __call__(self) -> int:
        """Upload; returns the number of files, 0 if the copy existed."""
        name = VERL.published_name(self.of.step)
        manifest = manifest_of(self.root, self.of.step)
        if manifest is None or manifest.of != self.of:
            raise SaveFailed(f"{name} is not attempt {self.of} any more", step=self.of.step)
        files = _content(manifest.files)
        copy = RemoteCopy.with_files(self.of, files)
        if self.look and self.mirror.has(copy):
            return 0
        self.mirror.upload(f"{self.root}/{name}", copy, files)
        return len(files)

    def start(self) -> Child:
        return fork_child(self, keep=())


def manifest_of(root: str, step: int) -> Manifest | None:
    """The manifest of a published step; None if it has none. Raises ``DamagedRoot``."""
    storage = PosixStorage(root, create=False)
    try:
        return read_manifest(storage, VERL.published_name(step))
    finally:
        storage.close_root()


def _content(files: Iterable[FileEntry]) -> list[FileEntry]:
    """The files of a checkpoint, without this library's private ones."""
    return [entry for entry in files if not entry.name.startswith(f"{PRIVATE}/")]


def mirror_of(remote: str | None) -> Mirror | None:
    """The mirror for verl's ``default_hdfs_dir``; None if that is not set."""
    if not remote:
        return None
    hdfs = remote.startswith("hdfs:")
    return HdfsMirror(remote) if hdfs else DirectoryMirror(str(Path(remote).absolute()))
