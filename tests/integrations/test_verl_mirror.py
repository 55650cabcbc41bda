"""Mirrors of verl's checkpoints, without verl: a directory, and a made-up ``hdfs`` command."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import StorageError
from ckptfsm.core.parts import AttemptId
from ckptfsm.integrations.verl import mirror as mirror_module
from ckptfsm.integrations.verl.mirror import DirectoryMirror, HdfsMirror, RemoteCopy, mirror_of

HDFS = """#!/bin/sh
# What `hdfs dfs` does with a few commands, on local directories.
shift
case "$1" in
  -test) echo "WARN util.NativeCodeLoader: as every Hadoop says" >&2
         [ -z "$AWAY" ] || { echo "test: Call failed: Connection refused" >&2; exit 1; }
         [ -e "$3" ];;
  -touchz) : > "$2";;
  -mkdir) mkdir -p "$3";;
  -put) shift; for last; do :; done
        for file; do [ "$file" = "$last" ] || cp "$file" "$last/" || exit 1; done;;
  -stat) shift 2; for file; do stat -c '%s' "$file" | tr '\\n' ' '; basename "$file"; done;;
  -mv) mv "$2" "$3";;
esac
"""


COPY = RemoteCopy("global_step_1", AttemptId(1, 1, 1))


def checkpoint(place: Path) -> tuple[str, list[FileEntry]]:
    """A directory with two files, and their entries as in a receipt."""
    (place / "source/actor/dist_ckpt").mkdir(parents=True)
    (place / "source/data.pt").write_bytes(b"position")
    (place / "source/actor/dist_ckpt/__0_0.distcp").write_bytes(b"weights" * 1000)
    storage = PosixStorage(str(place / "source"), create=False)
    names = ("data.pt", "actor/dist_ckpt/__0_0.distcp")
    files = [
        FileEntry(name=name, bytes=storage.stat(name).size, digest=storage.digest(name))
        for name in names
    ]
    storage.close_root()
    return str(place / "source"), files


def mirrors(place: Path) -> list[Any]:
    (place / "there").mkdir()
    script = place / "hdfs"
    script.write_text(HDFS)
    script.chmod(0o755)
    there = str(place / "there")
    return [DirectoryMirror(there), HdfsMirror(there, command=(str(script), "dfs"))]


@pytest.mark.parametrize("kind", [0, 1])
def test_a_copy_has_every_file_and_replaces_one_of_a_failed_attempt(
    tmp_path: Path, kind: int
) -> None:
    """Catches: a file that was not copied; an old copy that is mixed with the new one, or deleted."""
    mirror = mirrors(tmp_path)[kind]
    source, files = checkpoint(tmp_path)
    (tmp_path / "there/global_step_1").mkdir()
    (tmp_path / "there/global_step_1/old").write_text("old")
    mirror.upload(source, COPY, files)
    assert mirror.has(COPY) and not mirror.has(replace(COPY, name="global_step_2"))
    assert not mirror.has(replace(COPY, of=AttemptId(1, 2, 1))), "of another branch"
    copy = tmp_path / "there/global_step_1"
    found = {str(p.relative_to(copy)): p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    assert found.pop(COPY.mark) == b""
    assert found == {e.name: Path(source, e.name).read_bytes() for e in files}
    assert [p.name for p in (tmp_path / "there").glob(".replaced-*/old")] == ["old"]


@pytest.mark.parametrize("kind", [0, 1])
def test_a_copy_that_differs_is_not_there(tmp_path: Path, kind: int) -> None:
    """Catches: results of an upload that are not checked."""
    mirror = mirrors(tmp_path)[kind]
    source, files = checkpoint(tmp_path)
    Path(source, "data.pt").write_bytes(b"posi")
    with pytest.raises(StorageError, match="data.pt"):
        mirror.upload(source, COPY, files)
    assert not mirror.has(COPY)


def test_a_command_that_fails_is_an_error(tmp_path: Path) -> None:
    """Catches: an exit code that is ignored."""
    mirror = mirrors(tmp_path)[1]
    source, files = checkpoint(tmp_path)
    Path(source, "data.pt").unlink()
    with pytest.raises(StorageError, match="-put failed"):
        mirror.upload(source, COPY, files)


def test_equal_sizes_are_not_enough_where_content_can_be_read(tmp_path: Path) -> None:
    """Catches: a digest that is not compared."""
    mirror = mirrors(tmp_path)[0]
    source, files = checkpoint(tmp_path)
    Path(source, "data.pt").write_bytes(b"POSITION")
    with pytest.raises(StorageError, match="not equal"):
        mirror.upload(source, COPY, files)


def test_a_host_that_is_away_is_not_a_missing_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a copy that is moved into the old one of its name, and taken for it."""
    mirror = mirrors(tmp_path)[1]
    source, files = checkpoint(tmp_path)
    mirror.upload(source, COPY, files)
    monkeypatch.setenv("AWAY", "1")
    with pytest.raises(StorageError, match="Connection refused"):
        mirror.has(COPY)
    later = replace(COPY, of=AttemptId(1, 2, 1))
    with pytest.raises(StorageError, match="Connection refused"):
        mirror.upload(source, later, files)
    monkeypatch.delenv("AWAY")
    assert mirror.has(COPY) and not mirror.has(later)


@pytest.mark.parametrize("fault", ["missing", "hung"])
def test_a_command_that_cannot_be_run_is_an_error_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Catches: a bare ``FileNotFoundError``; a look that takes as long as an upload may."""
    script = tmp_path / "hdfs"
    if fault == "hung":
        script.write_text("#!/bin/sh\nexec sleep 60\n")
        script.chmod(0o755)
        monkeypatch.setattr(mirror_module, "_LOOK_S", 0.2)
    mirror = HdfsMirror("hdfs://host/run", command=(str(script), "dfs"))
    with pytest.raises(StorageError, match="No such file|timed out after 0.2") as raised:
        mirror.has(COPY)
    assert raised.value.file == f"hdfs://host/run/global_step_1/{COPY.mark}"
    assert f"`{script} dfs -ls hdfs://host/run`" in raised.value.message, "what to try by hand"
    source, files = checkpoint(tmp_path)
    with pytest.raises(StorageError, match="No such file|timed out after 0.1"):
        replace(mirror, timeout_s=0.1).upload(source, COPY, files)


def test_a_directory_that_cannot_be_reached_is_an_error_that_names_it(tmp_path: Path) -> None:
    """Catches: an error of the system alone, which may be of either side."""
    mirror = DirectoryMirror(str(tmp_path / ("x" * 300)))
    source, files = checkpoint(tmp_path)
    for call in (lambda: mirror.has(COPY), lambda: mirror.upload(source, COPY, files)):
        with pytest.raises(StorageError, match="too long.*mounted") as raised:
            call()
        assert raised.value.file == mirror.directory


def test_the_mirror_that_a_setting_stands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: an ``hdfs:`` address taken for a directory here; a relative path that moves."""
    monkeypatch.chdir(tmp_path)
    assert mirror_of("hdfs://host/run") == HdfsMirror("hdfs://host/run")
    assert mirror_of("there") == DirectoryMirror(str(tmp_path / "there"))
    assert mirror_of(None) is None and mirror_of("") is None
