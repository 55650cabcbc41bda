"""A place for copies in HDFS, by the command ``hdfs dfs``.

An object is written under a name that no one else has, and moved. ``-mv`` is refused where a file has
the name: of two that create an object, one is told of the other's. ``-put`` alone would not do, as two
of them write to the same ``._COPYING_``.

Each command starts a Java machine, which takes a second or two: there are few of them, and few at once.
Exit status and complaint together tell that an object is not there. Anything else is a failure, as of
a host that does not answer.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from shutil import which
from tempfile import TemporaryFile
from typing import IO

from ckptfsm.core.errors import ConfigError, PlaceFailed, describe
from ckptfsm.disk.durable import parent_of
from ckptfsm.places.streamed import StreamedPlace, temporary_of

_AT_ONCE = 4  # commands
_QUIET_S = 300.0  # longest time in which a command neither takes nor gives a byte
_PIECE_BYTES = 1 << 20
_SHOWN = 300  # letters of a complaint
_ABSENT = ": No such file or directory"
_EXISTS = ": File exists"
_PATTERN = re.compile(r"[*?\[\]{}\\]")
# Kind and rights, replicas, owner and group (which may have blanks), bytes, time, path.
_ROW = re.compile(r"([-d])\S{9,}\s.*?\s(\d+)\s+\d{4}-\d\d-\d\d\s\d\d:\d\d\s(.*)")


class HdfsPlace(StreamedPlace):
    """See ``place.CopyPlace``. Raises ``ConfigError`` if there is no program ``hdfs``."""

    def __init__(self, url: str) -> None:
        if which("hdfs") is None:
            raise ConfigError(
                f"copies at {url} need the program hdfs of Hadoop, and it is not in PATH",
                key="copies",
                url=url,
            )
        self.where = url.rstrip("/")
        self._turns = threading.BoundedSemaphore(_AT_ONCE)
        self._made: set[str] = set()  # directories

    def names(self) -> list[str]:
        rows = self._rows("", "-ls", self.where)
        if rows is None:
            raise self._failed("-ls", f"{self.where} is not there", "")
        return [path.rpartition("/")[2] for kind, _, path in rows if kind == "d"]

    def listed(self, directory: str) -> Mapping[str, int]:
        # The host is told or not, by version.
        below = f"/{self._path(directory).partition('://')[2].partition('/')[2]}/"
        rows = self._rows(directory, "-ls", "-R", self._path(directory)) or []
        return {path.partition(below)[2]: size for kind, size, path in rows if kind == "-"}

    def _rows(self, name: str, *words: str) -> list[tuple[str, int, str]] | None:
        """Kind, bytes and path of each line of a list; None if the directory is not there."""
        with self._command(name, *words) as command:
            lines = b"".join(command.given()).decode(errors="replace").splitlines()
            complaint = command.complaint()
        if complaint.endswith(_ABSENT) and not lines:
            return None
        if complaint:
            raise self._failed(words[0], complaint, name)
        found = (_ROW.fullmatch(line) for line in lines)
        return [(row[1], int(row[2]), row[3]) for row in found if row]

    def stream(self, name: str) -> Generator[bytes, None, None]:
        gave = False
        with self._command(name, "-cat", self._path(name)) as command:
            for piece in command.given():
                gave = True
                yield piece
            complaint = command.complaint()
        if complaint.endswith(_ABSENT) and not gave:
            raise FileNotFoundError(f"{self.where}/{name}")
        if complaint:
            raise self._failed("-cat", complaint, name)

    def create(self, name: str, data: bytes) -> bytes:
        found = self.read(name)
        if found is not None:
            return found
        complaint = self._write_and_move(name, iter([data]), replaces=False)
        found = self.read(name)
        if found is None:
            raise self._failed("-mv", complaint or "it was moved, and is not there", name)
        return found

    def put(self, name: str, pieces: Iterator[bytes], size: int, digest: str) -> None:
        if complaint := self._write_and_move(name, pieces, replaces=True):
            raise self._failed("-mv", complaint, name)

    def remove(self, name: str) -> None:
        self._run(name, "-rm", "-f", "-skipTrash", self._path(name))

    def remove_empty(self, directory: str) -> None:
        rows = self._rows(directory, "-ls", "-R", self._path(directory))
        if rows is None or any(kind == "-" for kind, _, _ in rows):
            return
        below = sorted((path for _, _, path in rows), reverse=True)  # the innermost first
        self._made.clear()
        ignore = "--ignore-fail-on-non-empty"  # another process may have written there
        self._run(directory, "-rmdir", ignore, *below, self._path(directory))

    def _write_and_move(self, name: str, pieces: Iterator[bytes], *, replaces: bool) -> str:
        """Write an object. Returns why it could not be moved to its name, "" if it was.

        ``replaces``: an object of that name is removed first, so that for a moment there is none.
        """
        temporary, complaint = temporary_of(name), "it was not written"
        move = ("-mv", self._path(temporary), self._path(name))
        try:
            self._write(temporary, pieces)
            complaint = self._complaint(name, *move)
            if complaint.endswith(_EXISTS) and replaces:  # else another carrier swept the temporary
                self.remove(name)
                complaint = self._complaint(name, *move)
        finally:
            if complaint:
                self._discard(temporary)
        return complaint

    def _write(self, name: str, pieces: Iterator[bytes]) -> None:
        """Write a new object, and make its directory. What ``pieces`` raises is raised."""
        parent = parent_of(name)
        if parent not in self._made:
            self._run(name, "-mkdir", "-p", self._path(parent) if parent else self.where)
            self._made.add(parent)
        with self._command(name, "-put", "-", self._path(name), is_fed=True) as command:
            command.feed(pieces)
            complaint = command.complaint()
        if complaint:
            raise self._failed("-put", complaint, name)

    def _discard(self, temporary: str) -> None:
        """Remove what was written. What is left then, the next copy sweeps."""
        paths = (self._path(each) for each in (temporary, f"{temporary}._COPYING_"))
        with suppress(PlaceFailed):  # the caller has the reason
            self._run(temporary, "-rm", "-f", "-skipTrash", *paths)

    def _run(self, name: str, *words: str) -> None:
        if complaint := self._complaint(name, *words):
            raise self._failed(words[0], complaint, name)

    def _complaint(self, name: str, *words: str) -> str:
        """Run a command. Returns its complaint, "" if it succeeded."""
        with self._command(name, *words) as command:
            return command.complaint()

    @contextmanager
    def _command(self, name: str, *words: str, is_fed: bool = False) -> Iterator[_Command]:
        """A command, killed at the end of the block if it still runs."""
        with self._turns, TemporaryFile() as said:
            try:
                process = subprocess.Popen(
                    ("hdfs", "dfs", *words),
                    stdin=subprocess.PIPE if is_fed else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=said,
                    bufsize=0,
                )
            except OSError as error:
                raise self._failed(words[0], describe(error), name) from error
            with process:
                try:
                    yield _Command(process, said, words[0][1:])
                except _Quiet as error:
                    raise self._failed(words[0], f"{error}", name) from error
                finally:
                    process.kill()

    def _path(self, name: str) -> str:
        if _PATTERN.search(name):
            raise PlaceFailed(
                f"{name}: hdfs dfs takes such a name for a pattern", place=self.where, object=name
            )
        return f"{self.where}/{name}"

    def _failed(self, action: str, why: str, name: str) -> PlaceFailed:
        said = f"hdfs dfs {action} failed: {' '.join(why.split())[-_SHOWN:]}"
        by_hand = f"does `hdfs dfs -ls {self.where}` work on this host?"
        return PlaceFailed(f"{said}; {by_hand}", place=self.where, object=name, call=action)


class _Quiet(Exception):
    """A command neither takes nor gives a byte any more."""


@dataclass(frozen=True, slots=True)
class _Command:
    """A command that runs, and the file with its complaints, which begin with ``action``.

    Every method raises ``_Quiet``.
    """

    process: subprocess.Popen[bytes]
    said: IO[bytes]
    action: str

    def feed(self, pieces: Iterator[bytes]) -> None:
        """Give it pieces, and the end. One that has ended tells why by itself."""
        pipe = self.process.stdin
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
        for piece in pieces:
            left = memoryview(piece)
            while left:
                _await(pipe, select.POLLOUT)
                try:
                    left = left[os.write(pipe.fileno(), left) :]
                except BrokenPipeError:
                    return
        pipe.close()

    def given(self) -> Iterator[bytes]:
        """What it gives, in pieces."""
        pipe = self.process.stdout
        assert pipe is not None
        while True:
            _await(pipe, select.POLLIN)
            piece = os.read(pipe.fileno(), _PIECE_BYTES)
            if not piece:
                return
            yield piece

    def complaint(self) -> str:
        """Wait for its end. Its complaint in a line, "" if it succeeded."""
        for _ in self.given():
            """Of no interest to the caller."""
        try:
            status = self.process.wait(_QUIET_S)
        except subprocess.TimeoutExpired as error:
            raise _Quiet(f"it does not end within {_QUIET_S:g} s") from error
        if status == 0:
            return ""
        self.said.seek(0)
        lines = self.said.read().decode(errors="replace").splitlines()
        own = [line for line in lines if line.startswith(f"{self.action}: ")]
        if status == 1 and len(own) == 1:
            return own[0]
        return f"exit status {status}: {' '.join((own or lines)[-3:])}."


def _await(pipe: IO[bytes], event: int) -> None:
    ready = select.poll()
    ready.register(pipe.fileno(), event)
    if not ready.poll(1000 * _QUIET_S):
        raise _Quiet(f"no byte in {_QUIET_S:g} s")
