"""Deletion: only what lies in the trash, in bounded slices, never through a link."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.layout import DIRECTORIES, PINS, READERS, STAGING, TRACKER, TRASH
from ckptfsm.disk.durable import make_dirs, write_new
from ckptfsm.disk.trash import (
    remove_marker,
    remove_some,
    remove_staged,
    sweep_attempt,
    sweep_temporaries,
)
from ckptfsm.testing.faults import FaultStorage, crash_at
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage


@pytest.fixture(params=["posix", "sim"])
def storage(request, tmp_path: Path):
    made = (
        PosixStorage(tmp_path / "root") if request.param == "posix" else SimStorage(SimDisk(), "p")
    )
    for directory in DIRECTORIES:
        make_dirs(made, directory)
    return made


def fill(storage, directory: str, files: int = 3) -> None:
    make_dirs(storage, f"{directory}/deep/er")
    for index in range(files):
        write_new(storage, f"{directory}/{index}", b"x")
        write_new(storage, f"{directory}/deep/er/{index}", b"x")


def test_everything_in_the_trash_goes_and_nothing_else(storage):
    """I1. Catches: a deletion outside the trash, and a trash that never gets empty."""
    fill(storage, f"{TRASH}/gone-1.e1.a1")
    fill(storage, "iter_0000002")
    write_new(storage, f"{TRASH}/gone-2.e1.a1", b"x")
    assert remove_some(storage, 1000) == 6 + 3 + 1
    assert storage.listdir(TRASH) == []
    assert len(storage.listdir("iter_0000002")) == 4
    assert remove_some(storage, 1000) == 0


def test_I1_a_directory_that_was_not_given_up_stays(storage):
    """Catches: a checkpoint deleted that a late rename of another program took there, or a person
    renamed."""
    stays = ["1.e1.a1", "1.e1.a1-mine", "1.e1.a1.1", "1.e1.a1.bak", "iter_0000001"]
    for name in (*stays, "gone-1.e1.a1", "gone-1.e1.a1.1", "part-1.e1.a1"):
        fill(storage, f"{TRASH}/{name}")
    assert remove_some(storage, 1000) == 3 * 9
    assert storage.listdir(TRASH) == stays


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_slices_are_bounded(storage, limit: int):
    """Catches: a deletion of a million files in one go, while a save waits."""
    for step in (1, 2):
        fill(storage, f"{TRASH}/gone-{step}.e1.a1")
    slices = []
    while removed := remove_some(storage, limit):
        slices.append(removed)
        assert len(slices) < 100
    assert max(slices) <= limit and sum(slices) == 2 * 9
    assert storage.listdir(TRASH) == []


def test_F16_links_in_the_trash_are_removed_not_followed(tmp_path: Path):
    """Catches: a user's data deleted through a link inside a pruned checkpoint."""
    storage = PosixStorage(tmp_path / "root")
    make_dirs(storage, f"{TRASH}/gone-1.e1.a1")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    trash = tmp_path / "root" / TRASH
    os.symlink(outside, trash / "gone-1.e1.a1" / "directory")
    os.symlink(outside / "precious", trash / "gone-1.e1.a1" / "file")
    os.symlink(outside, trash / "gone-2.e1.a1")
    os.symlink("../../..", trash / "gone-3.e1.a1")
    os.mkfifo(trash / "gone-4.e1.a1")
    while remove_some(storage, 3):
        pass
    assert list(trash.iterdir()) == []
    assert (outside / "precious").read_text() == "precious"


def test_F16_a_trash_that_is_a_link_is_not_followed(tmp_path: Path):
    """Catches: the whole of another directory deleted."""
    storage = PosixStorage(tmp_path / "root")
    make_dirs(storage, ".ckptfsm")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("precious")
    os.symlink(tmp_path / "outside", tmp_path / "root" / TRASH)
    with pytest.raises(OSError) as caught:
        remove_some(storage, 100)
    assert caught.value.errno == errno.ELOOP
    assert (tmp_path / "outside" / "precious").read_text() == "precious"


def test_too_deep_is_left(storage):
    """F30. Catches: a recursion without end on hostile directories."""
    make_dirs(storage, f"{TRASH}/gone-1.e1.a1/" + "/".join(["d"] * 100))
    write_new(storage, f"{TRASH}/gone-2.e1.a1", b"x")
    assert remove_some(storage, 1000) == 1
    assert storage.listdir(TRASH) == ["gone-1.e1.a1"]


def test_an_error_leaves_the_rest_for_later():
    """Catches: a trash that is given up because of one entry."""
    disk = SimDisk()
    storage = SimStorage(disk, "p")
    for directory in DIRECTORIES:
        make_dirs(storage, directory)
    fill(storage, f"{TRASH}/gone-1.e1.a1")
    broken = [True]

    def before(index: int, method: str, path: str) -> None:
        if broken and method == "unlink":
            broken.pop()
            raise OSError(errno.EIO, "EIO", path)

    faulty = FaultStorage(storage, before=before)
    with pytest.raises(OSError):
        remove_some(faulty, 100)
    assert remove_some(faulty, 100) == 9


def test_F17_a_deletion_that_was_killed_goes_on():
    """Catches: leftovers that a restart cannot remove."""
    for index in range(9):
        disk = SimDisk()
        storage = SimStorage(disk, "first")
        for directory in DIRECTORIES:
            make_dirs(storage, directory)
        fill(storage, f"{TRASH}/gone-1.e1.a1")
        with pytest.raises(ProcessDead):
            remove_some(FaultStorage(storage, before=crash_at(index)), 100)
        disk.kill("first")
        again = SimStorage(disk, "second")
        assert remove_some(again, 100) == 9 - index
        assert again.listdir(TRASH) == []


def test_only_our_temporaries_are_swept(storage):
    """Catches: a user's file deleted because of its name, or a tracker's leftover that stays."""
    ours = [f"{TRACKER}.tmp-1-2-x", f"{PINS}/5.json.tmp-1-2-x"]
    theirs = [
        f"{READERS}/5.a.json.tmp-1-2-x",
        "notes.txt",
        "tmp-1",
        f"{PINS}/5.json",
        f"{TRASH}/a.tmp-1",
        "take-1",
    ]
    for path in (*ours, ".ckptfsm/epochs/take-1-2-3", *theirs):
        write_new(storage, path, b"x")
    storage.mkdir("directory.tmp-1")
    assert sweep_temporaries(storage) == 3
    for path in theirs:
        assert storage.read(path, 10) == b"x"
    assert storage.stat("directory.tmp-1").kind == "dir"
    assert sweep_temporaries(storage) == 0


def test_only_temporary_files_of_an_attempt_are_swept(storage):
    """Catches: a shard that is deleted as a leftover of a put."""
    make_dirs(storage, "attempt/.ckptfsm/receipts/state")
    write_new(storage, "attempt/.ckptfsm/receipts/state/0.json.tmp-5.e1.a1", b"x")
    write_new(storage, "attempt/.metadata.tmp-1-2-x", b"x")
    write_new(storage, "attempt/__0_0.distcp", b"x")
    names = [".ckptfsm/receipts/state/0.json.tmp-5.e1.a1", ".metadata.tmp-1-2-x"]
    with pytest.raises(ValueError, match="no temporary file"):
        sweep_attempt(storage, "attempt", [*names, "__0_0.distcp"])
    assert storage.listdir("attempt") == [".ckptfsm", "__0_0.distcp"]
    assert storage.listdir("attempt/.ckptfsm/receipts/state") == []


@pytest.mark.parametrize("loss", ["all_lost", "all_kept"])
def test_a_marker_is_removed_durably(loss):
    """F4. Catches: a pin that comes back after a power loss."""
    disk = SimDisk()
    storage = SimStorage(disk, "p")
    for directory in DIRECTORIES:
        make_dirs(storage, directory)
    write_new(storage, f"{PINS}/5.json", b"{}")
    storage.fsync_dir(PINS)
    remove_marker(storage, f"{PINS}/5.json")
    remove_marker(storage, f"{PINS}/5.json")
    disk.crash(loss)
    assert SimStorage(disk, "q").listdir(PINS) == []


def test_only_staged_files_of_a_dead_writer_are_removed(storage):
    """Catches: a shard of a checkpoint that is removed for a writer which begins again."""
    make_dirs(storage, f"{STAGING}/5")
    make_dirs(storage, "iter_5")
    for directory in (f"{STAGING}/5", "iter_5"):
        write_new(storage, f"{directory}/shard", b"x")
    for _ in range(2):
        remove_staged(storage, f"{STAGING}/5/shard")
    with pytest.raises(ValueError, match="not in a staging directory"):
        remove_staged(storage, "iter_5/shard")
    assert storage.listdir(f"{STAGING}/5") == []
    assert storage.listdir("iter_5") == ["shard"]
