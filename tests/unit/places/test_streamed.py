"""HDFS by a made-up program, and file systems of fsspec: what is theirs alone among the places."""

from __future__ import annotations

import uuid
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest
from copying import Counted, Killed, carry, contents, copied, is_committed, root_with
from fsspec.implementations.memory import MemoryFileSystem
from hdfs_program import calls_of_hdfs, install_hdfs

from ckptfsm.core.errors import ConfigError, DamagedRoot, PlaceFailed
from ckptfsm.places import hdfs
from ckptfsm.places.hdfs import HdfsPlace
from ckptfsm.places.place import CopyPlace, place_at

NAME = "iter_0000010/a file"
LARGE = [b"x" * (1 << 20)] * 3  # more than a pipe takes
CALLS = {
    "names": lambda place: place.names(),
    "listed": lambda place: place.listed("iter_0000010"),
    "read": lambda place: place.read(NAME),
    "digest": lambda place: place.digest(NAME),
    "stream": lambda place: list(place.stream(NAME)),
    "create": lambda place: place.create(NAME, b"new"),
    "replace": lambda place: place.replace(NAME, b"new", b"old data"),
    "put": lambda place: place.put(NAME, iter(LARGE), 3 << 20, ""),
    "remove": lambda place: place.remove(NAME),
}


@pytest.fixture
def namenode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that is ``hdfs://host``."""
    return install_hdfs(tmp_path / "hadoop", monkeypatch)


@pytest.fixture
def place(namenode: Path) -> CopyPlace:
    """One with an object."""
    place = place_at("hdfs://host/run")
    place.put(NAME, iter([b"old data"]), 8, "")
    return place


@pytest.fixture
def root(tmp_path: Path):
    storage = root_with(tmp_path / "root", 10)
    yield storage
    storage.close_root()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("fault", ["away", "hung", "cut"])
def test_a_failure_of_hdfs_is_never_an_absence(place, fault, call, monkeypatch):
    """Catches: a host that is away taken for an empty place, half an object, a call without end."""
    monkeypatch.setattr(hdfs, "_QUIET_S", 0.2 if fault == "hung" else 60.0)
    monkeypatch.setenv("HDFS_FAULT", fault)
    if fault == "cut" and call in ("names", "listed", "put", "remove"):
        return
    with pytest.raises(PlaceFailed, match=r"does `hdfs dfs -ls hdfs://host/run` work") as raised:
        CALLS[call](place)
    why = {"away": "Connection refused", "hung": "no byte in 0.2 s", "cut": "Could not obtain"}
    assert why[fault] in raised.value.message
    monkeypatch.delenv("HDFS_FAULT")
    assert place.read(NAME) == b"old data"


def test_what_is_not_in_hdfs_is_told_as_such(place):
    """Catches: an error for a directory that nothing was written to."""
    assert place.listed("iter_0000020") == {}
    assert (place.read("iter_0000020/x"), place.digest("x")) == (None, None)
    place.remove("x")
    with pytest.raises(FileNotFoundError):
        list(place.stream("x"))
    assert place.listed("iter_0000010") == {"a file": 8}, "owner, group and name may have blanks"
    with pytest.raises(PlaceFailed, match="is not there"):
        place_at("hdfs://host/mistyped").names()
    with pytest.raises(PlaceFailed, match="for a pattern"):
        place.remove("iter_0000010/*")


@pytest.mark.parametrize("call", ["create", "replace", "put"])
def test_killed_between_two_commands_an_object_is_whole_or_not_there(place, call, monkeypatch):
    """Catches: half an object under its name; one that keeps the next writer out."""
    run, before = HdfsPlace._command, None if call == "create" else b"old data"
    after = b"".join(LARGE) if call == "put" else b"new"
    left = 0

    def counted(self, *words, **more):
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        return run(self, *words, **more)

    for number in range(12):
        place.remove(NAME)
        if before is not None:
            place.put(NAME, iter([before]), 8, "")
        left = number
        with monkeypatch.context() as patched:
            patched.setattr(HdfsPlace, "_command", counted)
            with suppress(Killed):
                CALLS[call](place)
        assert place.read(NAME) in (None, before, after)
    assert place.read(NAME) == after
    assert left > 0, "not killed at the end"


def test_of_two_that_create_an_object_in_hdfs_one_is_told_of_the_others(place, monkeypatch):
    """Catches: two claims, each of which is believed to be the first."""
    write = HdfsPlace._write

    def late(self, name, pieces):
        write(self, name, pieces)
        if ".tmp-" in name and not place.read("claim"):
            monkeypatch.setattr(HdfsPlace, "_write", write)
            assert place.create("claim", b"theirs") == b"theirs"

    monkeypatch.setattr(HdfsPlace, "_write", late)
    assert place.create("claim", b"ours") == b"theirs"
    assert place.read("claim") == b"theirs"


@pytest.mark.parametrize("scheme", ["hdfs", "memory"])
def test_what_the_pieces_raise_is_raised_and_nothing_appears(scheme, namenode):
    """Catches: the first half of a damaged file, with its name; a temporary file that stays."""

    def pieces():
        yield from LARGE
        raise DamagedRoot("a flipped bit")

    place = place_at(f"{scheme}://host/{uuid.uuid4().hex}")
    with pytest.raises(DamagedRoot):
        place.put("step/x", pieces(), 3 << 20, "")
    assert place.listed("step") == {}


def test_a_copy_to_hdfs_takes_few_commands(root, namenode):
    """Catches: a Java machine more for each file, of a second or two."""
    done = carry(place_at("hdfs://host/run"), root, 10)
    first = len(calls_of_hdfs(namenode))
    assert first <= 37 + 4 * done.files
    carry(place_at("hdfs://host/run"), root, 10)
    assert len(calls_of_hdfs(namenode)) - first <= 4 + done.files, "each is read once"


def test_without_the_program_hdfs_a_start_is_refused(monkeypatch, tmp_path):
    """Catches: a job that finds out at its first checkpoint."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="need the program hdfs"):
        place_at("hdfs://host/run")


class Plain(MemoryFileSystem):
    """A file system without an exclusive mode; ``Careless`` takes it for the usual one."""

    protocol = "plain"

    def _open(self, path, mode="rb", **more):
        if "x" in mode:
            raise ValueError(f"invalid mode {mode}")
        return super()._open(path, mode, **more)


class Careless(MemoryFileSystem):
    protocol = "careless"

    def _open(self, path, mode="rb", **more):
        return super()._open(path, mode.replace("x", "w"), **more)


class Broken(MemoryFileSystem):
    """One that fails with errors of its own package."""

    protocol = "broken"

    def ls(self, path, **more):
        raise RuntimeError("the session is closed")

    _open = ls


class Full(MemoryFileSystem):
    protocol = "full"

    def _open(self, path, mode="rb", **more):
        if "x" in mode:
            raise OSError(28, "No space left on device")
        return super()._open(path, mode, **more)


for kind in (Plain, Careless, Broken, Full):
    fsspec.register_implementation(kind.protocol, kind, clobber=True)


@pytest.mark.parametrize("scheme", ["plain", "careless"])
def test_a_file_system_that_cannot_create_is_refused_unless_one_job_alone_writes(scheme, root):
    """Catches: two jobs that overwrite each other's copies, on a file system of fsspec."""
    place = place_at(f"{scheme}://{uuid.uuid4().hex}/run")
    with pytest.raises(ConfigError, match="sole_writer"):
        carry(place, root, 10)
    with pytest.raises(Killed):
        carry(Counted(place, 3), root, 10, sole_writer=True)
    carry(place, root, 10, sole_writer=True)
    assert is_committed(place, 10)
    assert copied(place, 10) == contents(Path(root.root, "iter_0000010"))
    assert carry(place, root, 10, sole_writer=True).sent == 0


def test_a_failure_of_a_file_system_is_never_an_absence():
    """Catches: a directory that cannot be listed taken for an empty one; an error of another package
    that ends the job with a traceback."""
    place = place_at("broken://host/run")
    for call in CALLS.keys() - {"remove"}:
        with pytest.raises(PlaceFailed, match="the session is closed"):
            CALLS[call](place)


def test_an_error_that_keeps_an_object_from_being_created_is_told():
    """Catches: an object that another is believed to have created, as an error came."""
    place = place_at(f"full://{uuid.uuid4().hex}")
    with pytest.raises(PlaceFailed, match="No space left"):
        place.create("claim", b"ours")
    place.put("claim", iter([b"theirs"]), 6, "")
    assert place.create("claim", b"ours") == b"theirs"


def test_an_object_that_was_created_and_never_written_is_told():
    """Catches: an empty claim that counts as another's, or is written over."""
    place = place_at(f"memory://{uuid.uuid4().hex}")
    place.put("claim", iter([]), 0, "")
    with pytest.raises(PlaceFailed, match="is empty: a copy was killed"):
        place.create("claim", b"ours")


def test_a_url_that_cannot_be_a_place_is_refused_at_once():
    """Catches: a package that is missing, told at the first checkpoint; a password in the log."""
    with pytest.raises(ConfigError, match="dropbox"):
        place_at("dropbox://x")
    with pytest.raises(ConfigError, match="hdfs://, s3://.* and the schemes of fsspec"):
        place_at("gopher://x")
    assert place_at("memory://user:secret@host/run").where == "memory://host/run"
