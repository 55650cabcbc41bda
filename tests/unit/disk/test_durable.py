"""``put`` and ``move``: the two durable moves, under short writes, unknown outcomes and power loss."""

from __future__ import annotations

import errno
import os
import random

import pytest
from roots import (
    fails,
    makes,
)

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import (
    DamagedRoot,
    StorageError,
)
from ckptfsm.core.layout import PINS, PRIVATE
from ckptfsm.disk import durable
from ckptfsm.testing.faults import FaultStorage, crash_at, fail_at
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage

OLD, NEW = b"old content", b"new, and longer, content"


@pytest.fixture(params=["posix", "sim"])
def storage(request, tmp_path):
    return PosixStorage(tmp_path) if request.param == "posix" else SimStorage(SimDisk())


def sim_with_old() -> SimStorage:
    storage = SimStorage(SimDisk())
    storage.mkdir("d")
    storage.fsync_dir("")
    durable.put(storage, "d/f", OLD, tag="0")
    return storage


def calls_of(work) -> list[tuple[str, str]]:
    storage = FaultStorage(sim_with_old())
    work(storage)
    return storage.calls


def put_new(storage) -> None:
    durable.put(storage, "d/f", NEW, tag="1")


def test_put_creates_and_replaces(storage):
    """Catches: a put that appends, truncates, or leaves its temporary file."""
    for content in (b"", OLD, NEW, b"x"):
        durable.put(storage, "f", content, tag="t")
        assert storage.read("f", 100) == content
        assert storage.listdir("") == ["f"]


def test_put_makes_every_call_in_the_durable_order():
    """Catches: a missing or misplaced fsync."""
    assert calls_of(put_new) == [
        ("open_exclusive", "d/f.tmp-1.0"),
        ("write", "d/f.tmp-1.0"),
        ("fsync", "d/f.tmp-1.0"),
        ("close", "d/f.tmp-1.0"),
        ("rename", "d/f.tmp-1.0 -> d/f"),
        ("fsync_dir", "d"),
    ]


def test_I2_F4_power_loss_at_any_call_of_put_leaves_old_or_new():
    """Catches: a reader that sees nothing, or a part of it."""
    for index in range(len(calls_of(put_new)) + 1):
        for how in ("all_lost", "all_kept", *(random.Random(seed) for seed in range(25))):
            inner = sim_with_old()
            done = False
            try:
                put_new(FaultStorage(inner, before=crash_at(index)))
                done = True
            except ProcessDead:
                pass
            inner.disk.crash(how)
            after = SimStorage(inner.disk, "p2")
            assert after.read("d/f", 100) in ([NEW] if done else [OLD, NEW]), (index, how)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_F5_F6_an_error_before_the_rename_leaves_the_old_content(code):
    """Catches: a failed put that reports success, or destroys what was there."""
    calls = calls_of(put_new)
    for index, (method, _) in enumerate(calls):
        inner = sim_with_old()
        with pytest.raises(OSError) as caught:
            put_new(FaultStorage(inner, before=fail_at(index, code)))
        assert caught.value.errno == code
        expected = NEW if method == "fsync_dir" else OLD
        assert inner.read("d/f", 100) == expected, method


def test_F6_a_file_whose_fsync_failed_is_never_fsynced_again():
    """Catches: fsyncgate: the second fsync succeeds and the data is gone."""
    inner = sim_with_old()
    storage = FaultStorage(inner)
    inner.disk.fail_fsync(errno.EIO)
    with pytest.raises(OSError):
        put_new(storage)
    assert [c for c in storage.calls if c[0] == "fsync"] == [("fsync", "d/f.tmp-1.0")]
    assert storage.calls[-1] == ("close", "d/f.tmp-1.0")
    durable.put(storage, "d/f", NEW, tag="2")
    assert inner.read("d/f", 100) == NEW


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO])
def test_F8_a_rename_that_happened_and_reported_an_error(code):
    """Catches: an unknown outcome assumed to be a failure."""
    calls = calls_of(put_new)
    index = next(i for i, (method, _) in enumerate(calls) if method == "rename")
    inner = sim_with_old()
    storage = FaultStorage(inner, after=fail_at(index, code))
    put_new(storage)
    assert inner.read("d/f", 100) == NEW
    assert storage.calls[-1] == ("fsync_dir", "d"), "made durable all the same"


def test_F8_a_rename_that_did_not_happen_raises():
    """Catches: an unknown outcome assumed to be a success."""
    inner = sim_with_old()
    index = next(i for i, (method, _) in enumerate(calls_of(put_new)) if method == "rename")
    with pytest.raises(OSError):
        put_new(FaultStorage(inner, before=fail_at(index, errno.ESTALE)))
    assert inner.read("d/f", 100) == OLD
    # Nothing there at all, and a longer file with the same beginning, are not success either.
    inner = sim_with_old()
    inner.unlink("d/f")
    with pytest.raises(OSError):
        put_new(FaultStorage(inner, before=fail_at(index, errno.ESTALE)))
    inner = sim_with_old()
    durable.put(inner, "d/f", NEW + b"!", tag="0")
    with pytest.raises(OSError):
        put_new(FaultStorage(inner, before=fail_at(index, errno.ESTALE)))


@pytest.mark.parametrize("short", [1, 5])
def test_F7_short_writes_are_continued(short):
    """Catches: content cut off by a short write."""
    storage = SimStorage(SimDisk(short_writes=short))
    durable.put(storage, "f", NEW, tag="t")
    assert storage.read("f", 100) == NEW


def test_F7_a_write_that_takes_nothing_is_an_error_and_closes():
    """Catches: an endless loop, or a handle left open."""
    storage = FaultStorage(SimStorage(SimDisk()))
    storage.inner.write = lambda handle, data: 0
    with pytest.raises(OSError) as caught:
        durable.put(storage, "f", NEW, tag="t")
    assert caught.value.errno == errno.EIO
    assert storage.calls[-1][0] == "close"


def test_two_writers_never_share_a_temporary_name(storage):
    """Catches: a put into a file that another process is writing."""
    storage.close(storage.open_exclusive("f.tmp-t.0"))
    durable.put(storage, "f", NEW, tag="u")
    assert storage.read("f", 100) == NEW and storage.listdir("") == ["f", "f.tmp-t.0"]


def test_F6_a_temporary_that_was_left_is_skipped_and_never_written_again(storage):
    """Catches: a put that fails for good, or goes on with a file after its fsync may have
    failed."""
    for number in range(2):
        durable.write_new(storage, f"f.tmp-t.{number}", OLD)
    durable.put(storage, "f", NEW, tag="t")
    assert storage.read("f", 100) == NEW
    assert storage.listdir("") == ["f", "f.tmp-t.0", "f.tmp-t.1"]
    assert [storage.read(f"f.tmp-t.{number}", 100) for number in range(2)] == [OLD, OLD]


def test_a_put_does_not_fill_a_directory_with_temporaries():
    """Catches: an endless search for a free name; an error that does not say where to look."""
    storage = SimStorage(SimDisk())
    for number in range(100):
        durable.write_new(storage, f"f.tmp-t.{number}", b"")
    with pytest.raises(StorageError, match=r"f\.tmp-t") as caught:
        durable.put(storage, "f", NEW, tag="t")
    assert caught.value.file == "f.tmp-t" and len(storage.listdir("")) == 100


# -------------------------------------------------------------------------------------- move


def test_move_and_move_again(storage):
    """Catches: a repeated move that fails although it was done before (recovery repeats it)."""
    durable.make_dirs(storage, "a/x")
    durable.make_dirs(storage, "b")
    durable.put(storage, "a/x/f", OLD, tag="t")
    durable.move(storage, "a/x", "b/y")
    assert storage.listdir("a") == [] and storage.read("b/y/f", 99) == OLD
    durable.move(storage, "a/x", "b/y")
    assert storage.read("b/y/f", 99) == OLD


def test_move_of_nothing_raises(storage):
    """Catches: a move that reports success with neither name there."""
    with pytest.raises(FileNotFoundError):
        durable.move(storage, "a", "b")


def test_move_onto_something_raises(storage):
    """Catches: a move into, or over, another checkpoint."""
    durable.make_dirs(storage, "a")
    durable.make_dirs(storage, "b/inner")
    with pytest.raises(OSError):
        durable.move(storage, "a", "b")
    assert storage.listdir("") == ["a", "b"] and storage.listdir("b") == ["inner"]


def moving(before=None, after=None, rename=None) -> FaultStorage:
    inner = SimStorage(SimDisk())
    durable.make_dirs(inner, "a/x")
    durable.make_dirs(inner, "b")
    if rename is not None:
        inner.rename = rename
    return FaultStorage(inner, before=before, after=after)


def test_F8_a_move_that_happened_and_reported_an_error():
    """Catches: an unknown outcome assumed to be a failure; a directory fsync left out."""
    storage = moving(after=fail_at(0, errno.ESTALE))
    durable.move(storage, "a/x", "b/y")
    assert storage.calls == [("rename", "a/x -> b/y"), ("fsync_dir", "b"), ("fsync_dir", "a")]
    assert storage.listdir("b") == ["y"]


def test_F8_a_move_that_did_not_happen_raises():
    """Catches: an unknown outcome assumed to be a success."""
    storage = moving(before=fail_at(0, errno.ESTALE))
    with pytest.raises(OSError) as caught:
        durable.move(storage, "a/x", "b/y")
    assert caught.value.errno == errno.ESTALE
    assert storage.listdir("a") == ["x"]


def test_F8_a_rename_that_says_yes_and_does_nothing_is_noticed():
    """Catches: a rename believed without looking at both names."""
    storage = moving(rename=lambda src, dst: None)
    with pytest.raises(StorageError, match="did not happen") as caught:
        durable.move(storage, "a/x", "b/y")
    assert caught.value.file == "a/x"


# --------------------------------------------------------------------------- directories, looking


def test_make_dirs_is_repeatable_and_durable(storage):
    """Catches: a directory that is there but was never made durable in its parent."""
    durable.make_dirs(storage, "a/b/c")
    durable.make_dirs(storage, "a/b/c")
    assert storage.stat("a/b/c").kind == "dir"
    again = FaultStorage(storage)
    durable.make_dirs(again, "a/b")
    assert [c for c in again.calls if c[0] == "fsync_dir"] == [
        ("fsync_dir", ""),
        ("fsync_dir", "a"),
    ]


def test_F4_a_file_in_a_purged_directory_survives_power_loss():
    """Catches: a directory that is made anew for a pin, and that a power loss takes with the pin."""
    disk = SimDisk()
    storage = SimStorage(disk)
    durable.make_dirs(storage, PINS)
    storage.rmdir(PINS)
    storage.fsync_dir(PRIVATE)
    durable.put(storage, f"{PINS}/5.json", NEW, tag="t")
    disk.crash("all_lost")
    assert SimStorage(disk).read(f"{PINS}/5.json", 100) == NEW


def test_F16_make_dirs_refuses_a_file_in_its_way(storage, tmp_path):
    """Catches: a file or a symbolic link taken for a directory."""
    durable.put(storage, "f", OLD, tag="t")
    with pytest.raises(OSError):
        durable.make_dirs(storage, "f/x")
    if isinstance(storage, SimStorage):
        storage.disk.plant_symlink("l", "elsewhere")
    else:
        (tmp_path / "l").symlink_to(tmp_path)
    with pytest.raises(FileExistsError):
        durable.make_dirs(storage, "l")


def test_make_dirs_never_brings_its_base_back(storage):
    """Catches: a late writer that recreates a directory which was moved to the trash (F13)."""
    durable.make_dirs(storage, "base")
    durable.make_dirs(storage, "x/y", base="base")
    assert storage.stat("base/x/y").kind == "dir"
    with pytest.raises(FileNotFoundError):
        durable.make_dirs(storage, "x", base="gone")
    assert storage.listdir("") == ["base"]


def test_looking_where_there_is_nothing(storage):
    """Catches: an error where "nothing there" is the answer; an error swallowed that is not."""
    durable.put(storage, "f", OLD, tag="t")
    assert durable.lookup(storage, "x") is None
    assert durable.lookup(storage, "x/y") is None
    assert durable.lookup(storage, "f/y") is None
    assert durable.lookup(storage, "f").size == len(OLD)
    assert durable.list_names(storage, "x") == []
    with pytest.raises(NotADirectoryError):
        durable.list_names(storage, "f")


def test_walk_files_and_fsync_tree(storage, monkeypatch):
    """Catches: a file that is overlooked, a link that is followed, an endless directory."""
    durable.make_dirs(storage, "d/a/b")
    for name in ("d/1", "d/a/2", "d/a/b/3"):
        durable.put(storage, name, b"xyz", tag="t")
    names = [(name, stat.size) for name, stat in durable.walk_files(storage, "d")]
    assert names == [("1", 3), ("a/2", 3), ("a/b/3", 3)]
    with monkeypatch.context() as patch, pytest.raises(StorageError, match="more files"):
        patch.setattr(durable, "_MOST_ENTRIES", 2)
        durable.walk_files(storage, "d")
    seen = FaultStorage(storage)
    durable.fsync_tree_dirs(seen, "d")
    assert [path for _, path in seen.calls] == ["d/a/b", "d/a", "d"]
    seen.calls.clear()
    files = [FileEntry(name=name, bytes=3) for name in ("1", "a/b/3")]
    durable.fsync_dirs_of(seen, "d", files)
    assert [path for _, path in seen.calls] == ["d/a/b", "d/a", "d"]


def test_F4_fsync_existing_makes_a_foreign_file_durable():
    """Catches: a file that another program wrote and that is never made durable."""
    disk = SimDisk()
    storage = SimStorage(disk)
    handle = storage.open_exclusive("f")
    storage.write(handle, OLD)
    storage.close(handle)
    storage.fsync_dir("")
    durable.fsync_existing(storage, "f")
    disk.crash("all_lost")
    assert SimStorage(disk).read("f", 99) == OLD


def test_fsync_existing_closes_on_error():
    """Catches: a descriptor leaked at every failing fsync."""
    inner = sim_with_old()
    inner.disk.fail_fsync(errno.EIO)
    storage = FaultStorage(inner)
    with pytest.raises(OSError):
        durable.fsync_existing(storage, "d/f")
    assert storage.calls[-1] == ("close", "d/f")


def test_storage_error_names_call_file_and_errno():
    """Catches: an error that does not say which file and why."""
    error = durable.storage_error(OSError(errno.ENOSPC, "x", "a/b"), "write")
    assert (error.file, error.call, error.errno_name) == ("a/b", "write", "ENOSPC")
    assert "No space left" in str(error)
    error = durable.storage_error(OSError("strange"), "journal", "j")
    assert (error.file, error.errno_name) == ("j", None) and "strange" in str(error)


def test_F8_a_file_of_the_same_content_does_not_excuse_a_failed_rename():
    """Catches: a rename that did not happen taken for done, as the old file has
    the same content. The trusted file was never fsynced then, and a power loss takes it."""
    disk = SimDisk()
    storage = FaultStorage(SimStorage(disk, "first"))
    handle = storage.open_exclusive("f")
    durable.write_all(storage, handle, b"content")  # never fsynced
    storage.close(handle)
    storage.before = fails("rename", makes("f"))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        durable.put(storage, "f", b"content", tag="1")
    storage.before, storage.after = None, fails("rename", makes("f"))
    durable.put(storage, "f", b"content", tag="2")  # it happened, and reported an error
    assert [path for method, path in storage.calls if method == "rename"] == [
        "f.tmp-1.0 -> f",
        "f.tmp-2.0 -> f",
    ]
    disk.crash("all_lost")
    assert disk.snapshot()["f"] == b"content"


@pytest.mark.parametrize("size", [0, 1, durable.SMALL_BYTES - 1, durable.SMALL_BYTES, 200_000])
def test_a_document_is_read_whole_or_refused(storage, size):
    """Catches: a document that is cut off, also at the length of the first read."""
    durable.write_new(storage, "f", bytes(size))
    assert durable.read_document(storage, "f", size + 1) == bytes(size)
    assert durable.read_document(storage, "f", size) == bytes(size)
    if size:
        with pytest.raises(DamagedRoot):
            durable.read_document(storage, "f", size - 1)


def test_F6_a_name_that_cannot_be_looked_at_is_not_a_missing_one(monkeypatch):
    """Catches: a disk with an error, whose files count as gone."""
    storage = sim_with_old()

    def sick(path: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(storage, "stat", sick)
    with pytest.raises(OSError, match=r"d/f"):
        durable.lookup(storage, "d/f")
