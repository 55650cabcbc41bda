"""Two disks, the same contract: the real and the simulated disk keep all that the library relies
on.

The first part runs on both, so that a simulation result says something about the real disk. The
second part needs a real kernel: symbolic links, FIFOs, locks, mounts, a full disk.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from ckptfsm.adapters import posix_storage
from ckptfsm.adapters.posix_storage import OpenPosix, PosixStorage
from ckptfsm.core.errors import ConfigError
from ckptfsm.core.layout import MANIFEST, PRIVATE, TRACKER
from ckptfsm.core.ports import DIRECT_ALIGNMENT, Storage
from ckptfsm.disk.durable import put, write_all
from ckptfsm.testing.faults import FaultStorage, crash_at, fail_at, pause_at
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage


class Disk:
    """A storage, and another program that plants files on the same disk."""

    def __init__(self, storage: Storage, symlink: Callable[[str, str], None]) -> None:
        self.storage = storage
        self.symlink = symlink


@pytest.fixture(params=["posix", "posix+walk", "sim", "posix+faults", "sim+faults"])
def disk(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Disk]:
    """Every storage; one is on a kernel that cannot open a path at once."""
    kind = request.param
    if "walk" in kind:
        monkeypatch.setattr(posix_storage, "_open_beneath", lambda root, pieces: None)
    if kind.startswith("posix"):
        real = PosixStorage(tmp_path / "store")
        wrapped: Storage = FaultStorage(real) if "faults" in kind else real
        yield Disk(wrapped, lambda path, target: os.symlink(target, f"{real.root}/{path}"))
        real.close_root()
    else:
        simulated = SimDisk()
        inner = SimStorage(simulated)
        yield Disk(FaultStorage(inner) if "faults" in kind else inner, simulated.plant_symlink)


@pytest.fixture
def store(disk: Disk) -> Storage:
    return disk.storage


@pytest.fixture
def posix(tmp_path: Path) -> Iterator[PosixStorage]:
    storage = PosixStorage(tmp_path / "store")
    yield storage
    storage.close_root()


def create(store: Storage, path: str, data: bytes = b"x") -> None:
    handle = store.open_exclusive(path)
    write_all(store, handle, data)
    store.close(handle)


def padded(data: bytes) -> memoryview:
    """``data`` in memory for direct writes: aligned, with zeros up to a whole block."""
    memory = mmap.mmap(-1, -(-len(data) // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT)
    memory.write(data)
    return memoryview(memory)


def pwrite_all(store: Storage, handle: int, view: memoryview, offset: int = 0) -> None:
    while len(view):
        taken = store.pwrite(handle, view, offset)
        view, offset = view[taken:], offset + taken


def create_direct(store: Storage, path: str, data: bytes) -> None:
    """Create a file as a fast writer does: reserved, written in whole blocks, cut, fsynced."""
    handle = store.open_exclusive(path, direct=True)
    view = padded(data)
    store.allocate(handle, len(view))
    pwrite_all(store, handle, view)
    store.truncate(handle, len(data))
    store.fsync(handle)
    store.close(handle)


def fails(code: int, call: Callable[..., object], *args: object) -> OSError:
    with pytest.raises(OSError) as caught:
        call(*args)
    assert errno.errorcode[caught.value.errno or 0] == errno.errorcode[code]
    return caught.value


# -- both disks ------------------------------------------------------------------------------------


def test_written_bytes_are_read(store: Storage) -> None:
    handle = store.open_exclusive("a")
    write_all(store, handle, b"hello ")
    write_all(store, handle, memoryview(b"world"))
    assert store.pwrite(handle, b"J", 0) == 1
    assert store.pwrite(handle, b"!", 13) == 1  # past the end: the gap is zeros
    write_all(store, handle, b".")  # pwrite did not move the position
    assert store.write(handle, b"") == 0
    store.fsync(handle)
    store.close(handle)
    assert store.read("a", 100) == b"Jello world.\0!"
    assert store.read("a", 5) == b"Jello"
    assert store.read("a", 0) == b""
    assert store.stat("a").size == 14
    create(store, "big", bytes(3 << 20))  # more than one read takes
    assert store.read("big", 1 << 30) == bytes(3 << 20)
    assert len(store.read("big", (2 << 20) + 1)) == (2 << 20) + 1


@pytest.mark.parametrize("direct", [False, True])
def test_a_file_is_read_at_any_place(disk: Disk, direct: bool) -> None:
    """Catches: a read that moves a position, an end that is taken for an error, and a direct read
    into memory that is not aligned."""
    store, data = disk.storage, os.urandom(10_000)
    create(store, "a", data)
    store.mkdir("dir")
    disk.symlink("link", "a")
    handle = store.open_reading("a", direct=direct)
    into = padded(bytes(12_288))
    for offset in (4096, 0):
        assert store.pread(handle, into[:4096], offset) == 4096
        assert into[:4096] == data[offset : offset + 4096]
    assert store.pread(handle, into, 8192) == 10_000 - 8192
    assert into[: 10_000 - 8192] == data[8192:]
    assert store.pread(handle, into, 12_288) == 0
    assert store.pread(handle, into[1:100], 7) == 99  # not aligned in any way
    assert into[1:100] == data[7:106]
    fails(errno.EINVAL, store.pread, handle, into, -1)
    store.close(handle)
    fails(errno.EBADF, store.pread, handle, into, 0)
    fails(errno.ENOENT, store.open_reading, "b")
    fails(errno.ELOOP, store.open_reading, "link")
    fails(errno.EINVAL, store.open_reading, "dir")


def test_a_file_that_is_being_made_is_not_read(store: Storage) -> None:
    handle = store.open_exclusive("a")
    fails(errno.EBADF, store.pread, handle, memoryview(bytearray(1)), 0)
    store.close(handle)


def test_open_exclusive_takes_no_name_twice(disk: Disk) -> None:
    store = disk.storage
    create(store, "file")
    store.mkdir("dir")
    disk.symlink("dangling", "nowhere")
    for path in ("file", "dir", "dangling"):
        fails(errno.EEXIST, store.open_exclusive, path)
        fails(errno.EEXIST, lambda at: store.open_exclusive(at, direct=True), path)
        fails(errno.EEXIST, store.mkdir, path)
        fails(errno.EEXIST, store.link, "file", path)
    assert store.read("file", 9) == b"x"
    assert store.listdir("") == ["dangling", "dir", "file"]


@pytest.mark.parametrize("size", [1, 4096, 5000, (1 << 20) + 1])
def test_a_direct_file_has_its_bytes_and_its_size(store: Storage, size: int) -> None:
    """Catches: padding that stays at the end, a byte that is lost or moved."""
    data = os.urandom(size)
    create_direct(store, "a", data)
    assert (store.stat("a").size, store.read("a", 1 << 21)) == (size, data)
    assert store.digest("a") == "xxh3_128:" + xxhash.xxh3_128_hexdigest(data)


def test_direct_writes_come_in_any_order_and_may_be_unaligned_after_a_short_one(
    store: Storage,
) -> None:
    handle = store.open_exclusive("a", direct=True)
    view = padded(bytes(range(256)) * 32)
    assert store.pwrite(handle, view[4096:], 4096) == 4096
    assert store.read("a", 8192) == bytes(4096) + bytes(view[4096:])
    pwrite_all(store, handle, view[:4096], 0)
    pwrite_all(store, handle, view[100:], 100)  # the rest, as if 100 bytes had been taken
    assert store.write(handle, view[:4096]) == 4096
    store.close(handle)
    assert store.read("a", 9999) == bytes(view)


def test_reserved_bytes_are_zeros(store: Storage) -> None:
    """Catches: a reservation that cuts, that overwrites, or that leaves the size as it was."""
    handle = store.open_exclusive("a")
    assert store.allocate(handle, 0) is False
    write_all(store, handle, b"start")
    if not store.allocate(handle, 9000):
        pytest.skip("this file system reserves nothing")
    assert store.read("a", 9999) == b"start" + bytes(8995)
    assert store.allocate(handle, 10) is True
    assert store.stat("a").size == 9000
    write_all(store, handle, b"!")  # the position did not move
    assert store.read("a", 7) == b"start!\0"
    error = fails(errno.EINVAL, store.allocate, handle, -1)
    assert error.filename == "a"
    store.close(handle)


def test_truncate_cuts_and_extends(store: Storage) -> None:
    handle = store.open_exclusive("a")
    write_all(store, handle, b"hello world")
    store.truncate(handle, 5)
    assert store.read("a", 99) == b"hello"
    store.truncate(handle, 8)
    assert store.read("a", 99) == b"hello\0\0\0"  # the old bytes do not come back
    assert fails(errno.EINVAL, store.truncate, handle, -1).filename == "a"
    store.truncate(handle, 0)
    assert store.stat("a").size == 0
    store.close(handle)


def test_handles_are_checked(store: Storage) -> None:
    handle = store.open_exclusive("a")
    store.close(handle)
    for call in (store.close, store.fsync, store.unlock):
        fails(errno.EBADF, call, handle)
    fails(errno.EBADF, store.write, handle, b"x")
    fails(errno.EBADF, store.pwrite, handle, b"x", 0)
    fails(errno.EBADF, store.allocate, handle, 1)
    fails(errno.EBADF, store.truncate, handle, 0)
    reading = store.open_existing("a")
    fails(errno.EBADF, store.write, reading, b"x")
    fails(errno.EBADF, store.pwrite, reading, b"x", 0)
    fails(errno.EBADF, store.allocate, reading, 1)
    fails(errno.EINVAL, store.truncate, reading, 0)
    store.fsync(reading)
    store.close(reading)


def test_rename_of_files(store: Storage) -> None:
    create(store, "old", b"old")
    create(store, "new", b"new")
    store.rename("new", "old")
    assert store.listdir("") == ["old"]
    assert store.read("old", 9) == b"new"
    store.rename("old", "old")
    store.mkdir("d")
    store.rename("old", "d/moved")
    assert store.read("d/moved", 9) == b"new"
    fails(errno.ENOENT, store.rename, "old", "older")
    create(store, "f")
    fails(errno.EISDIR, store.rename, "f", "d")
    fails(errno.ENOTEMPTY, store.rename, "d/moved", "d")
    fails(errno.ENOTDIR, store.rename, "d", "f")
    error = fails(errno.ENOENT, store.rename, "d/none", "d/other")
    assert (error.filename, error.filename2) == ("d/none", "d/other")


def test_rename_of_directories(store: Storage) -> None:
    for path in ("a", "a/in", "empty", "full"):
        store.mkdir(path)
    create(store, "full/x")
    fails(errno.ENOTEMPTY, store.rename, "a", "full")
    fails(errno.EINVAL, store.rename, "a", "a/in/a")
    fails(errno.EINVAL, store.rename, "a", "a/a")
    fails(errno.ENOTEMPTY, store.rename, "a/in", "a")
    store.rename("a", "empty")
    assert store.listdir("") == ["empty", "full"]
    assert store.listdir("empty") == ["in"]


def test_link_is_a_second_name(store: Storage) -> None:
    create(store, "a", b"one")
    store.mkdir("d")
    store.link("a", "d/b")
    store.rename("a", "d/b")  # the same file: POSIX does nothing
    assert store.listdir("") == ["a", "d"]
    store.unlink("a")
    assert store.read("d/b", 9) == b"one"
    fails(errno.ENOENT, store.link, "a", "c")
    fails(errno.EPERM, store.link, "d", "e")


def test_touching_changes_no_content(store: Storage) -> None:
    create(store, "a", b"one")
    store.touch("a")
    assert store.read("a", 9) == b"one"
    fails(errno.ENOENT, store.touch, "b")


@pytest.mark.parametrize(("umask", "file", "directory"), [(0o022, 0o644, 0o755), (0o002, 0o664, 0o775),
                                                          (0o077, 0o600, 0o700)])  # fmt: skip
def test_the_umask_and_the_setgid_bit_decide_about_access(
    tmp_path: Path, umask: int, file: int, directory: int
) -> None:
    """Catches: a colleague of the group who cannot read, lease or adopt, whatever the umask says."""
    tmp_path.chmod(0o2755)
    before = os.umask(umask)
    try:
        storage = PosixStorage(tmp_path / "above/root")
        create(storage, "a", b"x")
        storage.mkdir("d")
        create(storage, "d/b", b"x")
        assert storage.try_lock("lock") is not None
    finally:
        os.umask(before)
    found = {path.relative_to(tmp_path): path.stat() for path in (tmp_path / "above").rglob("*")}
    found[Path("above")] = (tmp_path / "above").stat()
    modes = {s.st_mode & 0o7777 for s in found.values()}
    assert modes == {file, directory | 0o2000}
    assert {s.st_gid for s in found.values()} == {tmp_path.stat().st_gid}


def test_touching_sets_the_time(tmp_path: Path) -> None:
    """Catches: old files that a purge takes although they were touched; a link that is followed."""
    (tmp_path / "beside").write_text("x")
    root = tmp_path / "root"
    root.mkdir()
    (root / "a").write_text("x")
    (root / "link").symlink_to("../beside")
    os.utime(root / "a", (1, 1))
    os.utime(tmp_path / "beside", (1, 1))
    storage = PosixStorage(root)
    for name in ("a", "link"):
        storage.touch(name)
    assert (root / "a").stat().st_mtime > 1e9 and (tmp_path / "beside").stat().st_mtime == 1


def test_removing(store: Storage) -> None:
    store.mkdir("d")
    create(store, "d/f")
    fails(errno.ENOTEMPTY, store.rmdir, "d")
    fails(errno.EISDIR, store.unlink, "d")
    fails(errno.ENOTDIR, store.rmdir, "d/f")
    handle = store.open_existing("d/f")
    store.unlink("d/f")
    store.fsync(handle)  # still open
    store.close(handle)
    fails(errno.ENOENT, store.unlink, "d/f")
    store.rmdir("d")
    fails(errno.ENOENT, store.rmdir, "d")
    assert store.listdir("") == []


def test_lookups(store: Storage) -> None:
    create(store, "f", b"abc")
    store.mkdir("d")
    assert (store.stat("f").kind, store.stat("f").size) == ("file", 3)
    assert store.stat("d").kind == "dir"
    assert store.stat("").kind == "dir"
    assert store.stat("d").device == store.stat("").device
    for name in ("c", "a", "b"):
        create(store, f"d/{name}")
    assert store.listdir("d") == ["a", "b", "c"]
    for call in (store.stat, store.listdir, store.fsync_dir, store.open_existing, store.digest):
        assert fails(errno.ENOENT, call, "d/none").filename == "d/none"
        fails(errno.ENOENT, call, "none/none")
        fails(errno.ENOTDIR, call, "f/none")
    for call in (store.listdir, store.fsync_dir):
        fails(errno.ENOTDIR, call, "f")
        call("d")
        call("")
    fails(errno.ENAMETOOLONG, store.mkdir, "x" * 256)
    fails(errno.ENOENT, store.mkdir, "none/d")
    assert store.free_bytes() > 0


def test_a_path_is_opened_in_one_call_where_no_link_is_on_it(posix: PosixStorage) -> None:
    """Catches: a kernel that always refuses, so that every path is walked."""
    posix.mkdir("d")
    posix.mkdir("d/e")
    os.symlink("d", f"{posix.root}/link")
    found = posix_storage._open_beneath(posix.fileno_of_root(), ("d", "e"))
    assert found is not None and os.readlink(f"/proc/self/fd/{found}") == f"{posix.root}/d/e"
    os.close(found)
    for outside in (("link", "e"), ("link",), ("..",), ("d", "none")):
        assert posix_storage._open_beneath(posix.fileno_of_root(), outside) is None


def test_entries_are_names_with_their_stats(disk: Disk) -> None:
    """Catches: an entry that is left out, a link that is followed, a descriptor that stays open."""
    store = disk.storage
    store.mkdir("d")
    store.mkdir("d/inner")
    create(store, "d/f", b"abc")
    disk.symlink("d/link", "f")
    before = sorted(os.listdir("/proc/self/fd"))
    for path in ("", "d"):
        names = store.listdir(path)
        inside = {name: store.stat(f"{path}/{name}" if path else name) for name in names}
        assert dict(store.entries(path)) == inside
        assert dict(store.kinds(path)) == {name: stat.kind for name, stat in inside.items()}
    assert dict(store.kinds("d")) == {"f": "file", "inner": "dir", "link": "symlink"}
    for look in (store.entries, store.kinds):
        fails(errno.ENOENT, next, look("none"))
        fails(errno.ENOTDIR, next, look("d/f"))
        fails(errno.ELOOP, next, look("d/link"))
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_entries_leave_out_a_name_that_goes_meanwhile(posix: PosixStorage) -> None:
    """Catches: a listing that fails because another program removed a file."""
    for name in ("a", "b", "c"):
        create(posix, name)
    found = posix.entries("")
    first, _ = next(found)
    gone, kept = sorted({"a", "b", "c"} - {first})
    os.unlink(f"{posix.root}/{gone}")
    assert [name for name, _ in found] == [kept]


def test_read_each_reads_the_files_that_are_there(disk: Disk) -> None:
    """Catches: contents in another order than asked for, a link that is followed, a path outside."""
    store = disk.storage
    store.mkdir("d")
    create(store, "d/a", b"first")
    create(store, "d/b", b"")
    create(store, "c", b"above")
    disk.symlink("d/link", "a")
    before = sorted(os.listdir("/proc/self/fd"))
    assert list(store.read_each("d", ["b", "none", "a"], 3)) == [("b", b""), ("a", b"fir")]
    assert list(store.read_each("", ["c"], 9)) == [("c", b"above")]
    assert list(store.read_each("none", ["a"], 1)) == []
    fails(errno.ENOTDIR, next, store.read_each("c", ["a"], 1))
    fails(errno.ELOOP, next, store.read_each("d", ["link"], 1))
    fails(errno.EINVAL, next, store.read_each("", ["d"], 1))
    for name in ("../c", "..", ".", "", "/etc/hostname", "a\0b"):
        with pytest.raises(ConfigError):
            next(store.read_each("d", [name], 1))
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_only_regular_files_are_opened(store: Storage) -> None:
    store.mkdir("d")
    for call in (store.open_existing, store.digest, store.try_lock):
        fails(errno.EINVAL, call, "d")
    fails(errno.EINVAL, store.read, "d", 1)


@pytest.mark.parametrize("size", [0, 1, 5000, (4 << 20) - 1, 4 << 20, (4 << 20) + 1])
def test_digest_covers_the_whole_file(store: Storage, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    create(store, "a", data[:size])
    assert store.digest("a") == "xxh3_128:" + xxhash.xxh3_128_hexdigest(data[:size])


def test_F16_symlinks_are_never_followed(disk: Disk) -> None:
    store = disk.storage
    store.mkdir("real")
    create(store, "real/f")
    disk.symlink("dir_link", "real")
    disk.symlink("file_link", "real/f")
    for call in (store.open_existing, store.digest, store.try_lock, store.listdir, store.fsync_dir):
        fails(errno.ELOOP, call, "dir_link")
        fails(errno.ELOOP, call, "dir_link/f")
    fails(errno.ELOOP, store.read, "file_link", 1)
    for change in (store.open_exclusive, store.mkdir, store.rmdir, store.unlink):
        fails(errno.ELOOP, change, "dir_link/f")
    for two in (store.rename, store.link):
        fails(errno.ELOOP, two, "dir_link/f", "g")
        fails(errno.ELOOP, two, "real/f", "dir_link/g")
    fails(errno.ENOTDIR, store.rmdir, "dir_link")
    assert store.stat("file_link").kind == "symlink"
    store.link("file_link", "hard")  # the link itself, here and below
    assert store.stat("hard").kind == "symlink"
    store.unlink("hard")
    store.rename("dir_link", "moved_link")
    store.unlink("moved_link")
    store.unlink("file_link")
    assert store.listdir("real") == ["f"]


@pytest.mark.parametrize("path", ["/etc", "..", "a/../b", ".", "./a", "a//b", "a/", "/", "a\0b"])
def test_F30_no_path_leads_outside(store: Storage, path: str) -> None:
    one = (
        store.open_exclusive, store.open_existing, store.mkdir, store.rmdir, store.unlink,
        store.fsync_dir, store.listdir, store.stat, store.digest, store.try_lock,
    )  # fmt: skip
    create(store, "ok")
    for call in one:
        with pytest.raises(ConfigError):
            call(path)
    for two in (store.rename, store.link):
        with pytest.raises(ValueError):
            two("ok", path)
        with pytest.raises(ValueError):
            two(path, "ok2")
    assert store.listdir("") == ["ok"]


def test_the_root_is_not_an_entry(store: Storage) -> None:
    for call in (store.open_exclusive, store.mkdir, store.rmdir, store.unlink, store.try_lock):
        with pytest.raises(ConfigError):
            call("")


def test_F12_one_process_has_the_lock_once(store: Storage) -> None:
    lock = store.try_lock("lock")
    assert lock is not None
    assert store.try_lock("lock") is None
    fails(errno.EBUSY, store.read, "lock", 1)
    fails(errno.EBUSY, store.digest, "lock")
    fails(errno.EBUSY, store.open_existing, "lock")
    store.unlock(lock)
    fails(errno.EBADF, store.unlock, lock)
    assert store.read("lock", 1) == b""
    again = store.try_lock("lock")
    assert again is not None
    store.unlock(again)


# -- the real disk only ----------------------------------------------------------------------------


def test_the_root_is_created_with_its_parents(tmp_path: Path) -> None:
    storage = PosixStorage(tmp_path / "a" / "b")
    assert storage.root == str(tmp_path / "a" / "b")
    assert storage.descriptors() == (storage.fileno_of_root(),)
    handle = storage.open_exclusive("f")
    lock = storage.try_lock("lock")
    assert lock is not None
    assert not any(os.get_inheritable(fd) for fd in (handle, lock, *storage.descriptors()))
    storage.unlock(lock)
    storage.close(handle)
    storage.close_root()
    storage.close_root()
    assert storage.descriptors() == ()
    for call in (storage.listdir, storage.stat, storage.fsync_dir):
        fails(errno.EBADF, call, "")
    fails(errno.EBADF, storage.mkdir, "d")
    with pytest.raises(ConfigError) as caught:
        PosixStorage(tmp_path / "none", create=False)
    assert caught.value.reason == "missing"
    assert not (tmp_path / "none").exists()


def test_F16_a_root_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").write_bytes(b"precious")
    for name, reason in (("link", "symlink"), ("link/", "symlink"), ("dangling", "symlink"),
                         ("file", "not_a_directory"), ("file/below", "not_a_directory")):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            PosixStorage(f"{tmp_path}/{name}")
        assert caught.value.reason == reason
        assert caught.value.root == f"{tmp_path}/{name}".rstrip("/")
    with pytest.raises(ConfigError, match=str(tmp_path / "real")):
        PosixStorage(tmp_path / "link")
    assert not (tmp_path / "nowhere").exists()
    assert (tmp_path / "file").read_bytes() == b"precious"
    for bad in ("", "a\0b"):
        with pytest.raises(ConfigError):
            PosixStorage(bad)


@pytest.mark.parametrize(
    ("root", "reason"),
    [
        *(
            (root, "url")
            for root in ("s3://b/run", "gs://b/run", "hdfs://h/run", "abfss://c@h/run")
        ),
        (Path("s3://bucket/run"), "url"),
        (Path("file:///tmp/run"), "url"),
        *((root, "not_expanded") for root in ("~", "~/run", "~me/run", "$SCRATCH/run", "${X}/run")),
    ],
)
def test_a_root_that_means_another_place_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str | Path, reason: str
) -> None:
    """Catches: a local directory named "s3:" or "~", in which a pod's checkpoints are lost with it."""
    monkeypatch.chdir(tmp_path)
    for create in (True, False):
        with pytest.raises(ConfigError) as caught:
            PosixStorage(root, create=create)
        assert (caught.value.reason, caught.value.root) == (reason, str(root))
    assert not list(tmp_path.iterdir())
    PosixStorage(f"./{root}").close_root()  # as the error says
    assert len(list(tmp_path.iterdir())) == 1


def test_a_relative_root_in_a_directory_that_was_deleted_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a bare ENOENT for a root that can be made anywhere else."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    (tmp_path / "cwd").rmdir()
    for create in (True, False):
        with pytest.raises(ConfigError, match="the working directory .* was deleted") as caught:
            PosixStorage("run", create=create)
        assert (caught.value.reason, caught.value.root) == ("no_working_directory", "run")


def test_F16_a_directory_swapped_for_a_symlink_is_not_followed(
    posix: PosixStorage, tmp_path: Path
) -> None:
    """The classic race: looked at as a directory, then replaced before the call."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_bytes(b"precious")
    posix.mkdir("d")
    create(posix, "d/f")
    assert posix.stat("d/f").kind == "file"
    os.rename(f"{posix.root}/d", f"{posix.root}/away")
    os.symlink(outside, f"{posix.root}/d")
    for call in (posix.unlink, posix.mkdir, posix.rmdir, posix.open_exclusive, posix.stat):
        fails(errno.ELOOP, call, "d/f")
    fails(errno.ELOOP, posix.rename, "away/f", "d/g")
    assert [(p.name, p.read_bytes()) for p in outside.iterdir()] == [("f", b"precious")]


def test_F13_a_root_swapped_for_a_symlink_is_not_followed(
    posix: PosixStorage, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    os.rename(posix.root, f"{posix.root}.moved")
    os.symlink(tmp_path / "outside", posix.root)
    create(posix, "f")
    assert list((tmp_path / "outside").iterdir()) == []
    assert os.listdir(f"{posix.root}.moved") == ["f"]


def test_a_fifo_hangs_nothing(posix: PosixStorage) -> None:
    os.mkfifo(f"{posix.root}/pipe")
    assert posix.stat("pipe").kind == "other"
    for call in (posix.open_existing, posix.digest, posix.try_lock):
        fails(errno.EINVAL, call, "pipe")
    fails(errno.EINVAL, posix.read, "pipe", 1)
    fails(errno.EEXIST, posix.open_exclusive, "pipe")
    posix.unlink("pipe")


def test_a_second_close_does_not_close_a_stranger(posix: PosixStorage) -> None:
    handle = posix.open_exclusive("f")
    posix.close(handle)
    stranger = os.open("/dev/null", os.O_RDONLY)
    assert stranger == handle  # the kernel reuses the lowest number
    fails(errno.EBADF, posix.close, handle)
    fails(errno.EBADF, posix.fsync, handle)
    os.close(stranger)


def test_a_file_that_grows_is_not_digested_for_ever(
    posix: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(posix, "f", b"start")
    real = os.preadv

    def slow(fd: int, buffers: list[memoryview], offset: int) -> int:
        with open(f"{posix.root}/f", "ab") as file:
            file.write(b"more")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    fails(errno.EBUSY, posix.digest, "f")


def test_F12_a_lock_file_replaced_meanwhile_is_not_the_lock(
    posix: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: two processes each hold a lock, on two files of one name."""
    real = fcntl.lockf

    def late(fd: int, how: int) -> None:
        create(posix, "other")
        os.rename(f"{posix.root}/other", f"{posix.root}/lock")
        real(fd, how)

    monkeypatch.setattr(fcntl, "lockf", late)
    fails(errno.ESTALE, posix.try_lock, "lock")
    monkeypatch.undo()
    lock = posix.try_lock("lock")
    assert lock is not None
    posix.unlock(lock)


def test_F16_a_file_swapped_for_a_fifo_or_link_is_not_opened(
    posix: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it was a regular file when looked at. Catches a blocking open, or a missing re-check."""
    os.mkfifo(f"{posix.root}/pipe")
    before = sorted(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("ckptfsm.adapters.posix_storage._regular_inode", lambda parent, name: None)
    for call in (posix.open_existing, posix.digest):
        fails(errno.EINVAL, call, "pipe")
    os.symlink("/etc/hostname", f"{posix.root}/link")  # the same race with a link
    for follow in (posix.open_existing, posix.digest, posix.try_lock):
        fails(errno.ELOOP, follow, "link")
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_F4_a_created_root_is_durable_in_its_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    PosixStorage(tmp_path / "a" / "b").close_root()
    assert synced == [str(tmp_path), str(tmp_path / "a")]
    PosixStorage(tmp_path / "a" / "b").close_root()
    assert len(synced) == 2


def test_no_call_leaks_a_descriptor(posix: PosixStorage) -> None:
    posix.mkdir("d")
    posix.mkdir("d/e")
    create(posix, "d/e/f")
    os.symlink("nowhere", f"{posix.root}/link")
    before = sorted(os.listdir("/proc/self/fd"))
    for path in ("d/e/f", "d/e", "d/e/none", "d/none/x", "link/x", "link", "d/e/f/x"):
        for call in (posix.open_existing, posix.stat, posix.listdir, posix.fsync_dir, posix.digest):
            try:
                result = call(path)
            except OSError:
                continue
            if call == posix.open_existing:
                posix.close(int(str(result)))
    assert sorted(os.listdir("/proc/self/fd")) == before


# -- direct writes and reserved blocks -------------------------------------------------------------


def is_direct(handle: int) -> bool:
    return bool(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.fixture
def direct_posix(posix: PosixStorage) -> PosixStorage:
    """The storage, on a file system that takes direct writes."""
    path = f"{posix.root}/probe"
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"no direct writes below {posix.root}: {error}")
    finally:
        os.unlink(path)
    return posix


class Refusing:
    """A file system without direct calls. ``at`` tells whether the flag or a call is refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
        self.refused = 0
        if at == "open":
            self._fcntl = fcntl.fcntl
            monkeypatch.setattr(fcntl, "fcntl", self.fcntl)
        else:
            self._pwrite, self._preadv = os.pwrite, os.preadv
            monkeypatch.setattr(os, "pwrite", self.pwrite)
            monkeypatch.setattr(os, "preadv", self.preadv)

    def fcntl(self, fd: int, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            self._refuse()
        return self._fcntl(fd, command, value)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        if is_direct(fd):
            self._refuse()
        return self._pwrite(fd, data, offset)

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if is_direct(fd):
            self._refuse()
        return self._preadv(fd, buffers, offset)

    def _refuse(self) -> None:
        self.refused += 1
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def test_direct_writes_go_past_the_page_cache(direct_posix: PosixStorage) -> None:
    """Catches: a flag that is never set, or that a write which was taken clears."""
    ordinary = direct_posix.open_exclusive("ordinary")
    handle = direct_posix.open_exclusive("a", direct=True)
    assert (is_direct(ordinary), is_direct(handle)) == (False, True)
    assert not os.get_inheritable(handle)
    pwrite_all(direct_posix, handle, padded(b"x" * 8192))
    assert is_direct(handle)
    for each in (ordinary, handle):
        direct_posix.close(each)


@pytest.mark.parametrize("at", ["open", "pwrite"])
def test_where_direct_writes_are_refused_the_file_is_written_the_ordinary_way(
    direct_posix: PosixStorage, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Catches: an EINVAL that the caller sees, and a flag that is tried again for each write."""
    data = os.urandom(5000)
    refusing = Refusing(monkeypatch, at)
    handle = direct_posix.open_exclusive("a", direct=True)
    assert is_direct(handle) == (at == "pwrite")
    view = padded(data)
    for offset in (0, 4096):
        pwrite_all(direct_posix, handle, view[offset : offset + 4096], offset)
        assert (is_direct(handle), refusing.refused) == (False, 1)
    direct_posix.truncate(handle, 5000)
    direct_posix.close(handle)
    assert direct_posix.read("a", 9999) == data


def test_direct_reads_go_past_the_page_cache(direct_posix: PosixStorage) -> None:
    """Catches: a flag that is never set, or that a read which was made clears."""
    create(direct_posix, "a", bytes(5000))
    ordinary = direct_posix.open_reading("a")
    handle = direct_posix.open_reading("a", direct=True)
    assert (is_direct(ordinary), is_direct(handle)) == (False, True)
    assert not os.get_inheritable(handle)
    assert direct_posix.pread(handle, padded(bytes(8192)), 0) == 5000
    assert is_direct(handle)
    for each in (ordinary, handle):
        direct_posix.close(each)


@pytest.mark.parametrize("at", ["open", "preadv"])
def test_where_direct_reads_are_refused_the_file_is_read_the_ordinary_way(
    direct_posix: PosixStorage, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Catches: an EINVAL that the caller sees, and a flag that is tried again for each read."""
    data = os.urandom(8192)
    create(direct_posix, "a", data)
    refusing = Refusing(monkeypatch, at)
    handle = direct_posix.open_reading("a", direct=True)
    assert is_direct(handle) == (at == "preadv")
    into = padded(bytes(4096))
    for offset in (0, 4096):
        assert direct_posix.pread(handle, into, offset) == 4096
        assert into == data[offset : offset + 4096]
        assert (is_direct(handle), refusing.refused) == (False, 1)
    direct_posix.close(handle)


@pytest.mark.parametrize("at", ["", "open", "pwrite"])
def test_I5_no_file_of_another_process_is_opened_for_direct_writes(
    direct_posix: PosixStorage, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Catches: a name opened again, without ``O_EXCL``, after ``open`` refused the flag."""
    create(direct_posix, "theirs", b"precious")
    before = sorted(os.listdir("/proc/self/fd"))
    if at:
        Refusing(monkeypatch, at)
    with pytest.raises(FileExistsError) as caught:
        direct_posix.open_exclusive("theirs", direct=True)
    assert caught.value.filename == "theirs"
    assert direct_posix.read("theirs", 99) == b"precious"
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_two_threads_whose_first_direct_writes_are_refused_both_write(
    direct_posix: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a refusal that is passed on because the other thread has made the file ordinary."""
    handle = direct_posix.open_exclusive("a", direct=True)
    view = padded(os.urandom(8192))
    real, inside = os.pwrite, [False]

    def refuse(fd: int, data: bytes | memoryview, offset: int) -> int:
        if not is_direct(fd):
            return real(fd, data, offset)
        if not inside[0]:  # meanwhile, the other thread
            inside[0] = True
            assert direct_posix.pwrite(handle, view[4096:], 4096) == 4096
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "pwrite", refuse)
    assert direct_posix.pwrite(handle, view[:4096], 0) == 4096
    direct_posix.close(handle)
    assert direct_posix.read("a", 9999) == bytes(view)


def test_other_errors_of_a_direct_file_are_passed_on(
    direct_posix: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: EIO taken for a refusal, an ordinary file written twice, a descriptor that leaks."""
    calls: list[int] = []

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        calls.append(fd)
        raise OSError(code, os.strerror(code))

    direct, ordinary = (
        direct_posix.open_exclusive(name, direct=name == "direct")
        for name in ("direct", "ordinary")
    )
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", pwrite)
        for handle, code, count in (
            (direct, errno.EIO, 1),
            (ordinary, errno.EINVAL, 1),
            (direct, errno.EINVAL, 2),  # refused again as an ordinary write
        ):
            calls.clear()
            fails(code, direct_posix.pwrite, handle, b"x", 0)
            assert calls == [handle] * count
    direct_posix.close(direct)
    assert direct_posix.open_exclusive("reused") == direct  # the kernel reuses the lowest number
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", pwrite)
        calls.clear()
        fails(code, direct_posix.pwrite, direct, b"x", 0)
        assert calls == [direct], "the handle before it was a direct one"
    before = sorted(os.listdir("/proc/self/fd"))

    def no_flags(fd: int, command: int, value: int = 0) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "fcntl", no_flags)
    error = fails(errno.EIO, lambda path: direct_posix.open_exclusive(path, direct=True), "b")
    assert error.filename == "b"
    assert sorted(os.listdir("/proc/self/fd")) == before


class Fallocate:
    """Stands for the system call: answers with these errnos, 0 for success."""

    def __init__(self, *codes: int) -> None:
        self.codes = list(codes)

    def __call__(self, fd: int, mode: int, offset: object, size: object) -> int:
        assert mode == 0
        code = self.codes.pop(0)
        ctypes.set_errno(code)
        return -1 if code else 0


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EIO", "EFBIG"])
def test_F5_no_space_to_reserve_is_an_error(
    posix: PosixStorage, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Catches: a full disk taken for a file system without ``fallocate``."""
    monkeypatch.setattr(posix_storage._LIBC, "fallocate", Fallocate(getattr(errno, name)))
    handle = posix.open_exclusive("a")
    error = fails(getattr(errno, name), posix.allocate, handle, 8192)
    assert error.filename == "a"
    posix.close(handle)


@pytest.mark.parametrize("name", ["EOPNOTSUPP", "EINVAL", "ENOSYS", "EPERM", "EACCES"])
def test_where_nothing_can_be_reserved_nothing_is_written(
    posix: PosixStorage, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Catches: ``posix_fallocate``, which writes zeros instead."""
    monkeypatch.setattr(posix_storage._LIBC, "fallocate", Fallocate(getattr(errno, name)))
    handle = posix.open_exclusive("a")
    assert posix.allocate(handle, 8192) is False
    posix.close(handle)
    assert posix.stat("a").size == 0


def test_F7_an_interrupted_reservation_is_made_again(
    posix: PosixStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    fallocate = Fallocate(errno.EINTR, errno.EINTR, 0)
    monkeypatch.setattr(posix_storage._LIBC, "fallocate", fallocate)
    handle = posix.open_exclusive("a")
    assert posix.allocate(handle, 8192) is True
    assert fallocate.codes == []
    posix.close(handle)


_HOLDER = """
import sys
from ckptfsm.adapters.posix_storage import PosixStorage
storage = PosixStorage(sys.argv[1])
print(storage.try_lock("lock") is not None, flush=True)
sys.stdin.read()
"""


def _holder(root: str) -> subprocess.Popen[str]:
    repository = str(Path(__file__).parents[3])
    return subprocess.Popen(
        [sys.executable, "-c", _HOLDER, root],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": repository},
    )


def test_F12_the_lock_ends_with_its_process(posix: PosixStorage) -> None:
    with _holder(posix.root) as holder:
        assert holder.stdout and holder.stdout.readline() == "True\n"
        assert posix.try_lock("lock") is None
        assert posix.try_lock("lock") is None  # closing the failed descriptor freed nothing
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=30)
        assert holder.stdin
        holder.stdin.close()
    lock = posix.try_lock("lock")
    assert lock is not None
    posix.unlock(lock)


def test_F12_two_adapters_of_one_process_share_one_lock(posix: PosixStorage) -> None:
    """Catches: the second one opens and closes the lock file, which drops the first one's lock."""
    other = PosixStorage(posix.root)
    lock = posix.try_lock("lock")
    assert lock is not None
    assert other.try_lock("lock") is None
    fails(errno.EBUSY, other.read, "lock", 1)
    with _holder(posix.root) as rival:
        out, _ = rival.communicate(timeout=30)
    assert out == "False\n"
    posix.unlock(lock)
    other.close_root()


def _in_child(work: Callable[[], bool]) -> bool:
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_F29_a_forked_child_does_not_have_the_lock(posix: PosixStorage) -> None:
    lock = posix.try_lock("lock")
    assert lock is not None
    assert _in_child(lambda: posix.try_lock("lock") is None)
    assert _in_child(lambda: posix.read("lock", 1) == b"")  # not held there: nothing to drop

    def release_its_copy() -> bool:
        posix.unlock(lock)
        return True

    assert _in_child(release_its_copy)
    assert _in_child(lambda: posix.try_lock("lock") is None)  # the parent still has it
    posix.unlock(lock)
    assert _in_child(lambda: posix.try_lock("lock") is not None)


@pytest.fixture
def small_disk(posix: PosixStorage) -> Iterator[str]:
    """A mounted file system of 64 KiB at ``small`` inside the store."""
    target = f"{posix.root}/small"
    os.mkdir(target)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", target], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    yield target
    subprocess.run(["umount", target], check=True)


def test_F5_a_full_disk_is_ENOSPC(small_disk: str) -> None:
    storage = PosixStorage(small_disk)
    assert 0 < storage.free_bytes() <= 64 << 10
    handle = storage.open_exclusive("big")
    fails(errno.ENOSPC, write_all, storage, handle, bytes(128 << 10))
    assert storage.stat("big").size <= 64 << 10
    assert storage.free_bytes() == 0
    storage.close(handle)
    storage.unlink("big")
    put(storage, "small", b"fits", tag="t")
    storage.close_root()


def test_F5_a_full_disk_cannot_reserve_ENOSPC(small_disk: str) -> None:
    storage = PosixStorage(small_disk)
    handle = storage.open_exclusive("big", direct=True)
    assert fails(errno.ENOSPC, storage.allocate, handle, 128 << 10).filename == "big"
    storage.close(handle)
    storage.unlink("big")
    handle = storage.open_exclusive("reserved")
    assert storage.allocate(handle, 32 << 10) is True
    free = storage.free_bytes()
    assert free <= 32 << 10
    write_all(storage, handle, b"x" * (32 << 10))
    assert storage.free_bytes() == free, "written into what was reserved"
    storage.close(handle)
    storage.close_root()


def test_F16_nothing_is_changed_on_another_device(posix: PosixStorage, small_disk: str) -> None:
    Path(small_disk, "f").write_bytes(b"precious")
    create(posix, "g")
    for call in (posix.unlink, posix.mkdir, posix.rmdir, posix.open_exclusive, posix.try_lock):
        fails(errno.EXDEV, call, "small/f")
    for two in (posix.rename, posix.link):
        fails(errno.EXDEV, two, "g", "small/g")
        fails(errno.EXDEV, two, "small/f", "h")
    for call in (posix.rmdir, lambda path: posix.rename(path, "moved")):
        fails(errno.EBUSY, call, "small")
    assert posix.listdir("small") == ["f"]
    assert posix.read("small/f", 99) == b"precious"
    assert posix.stat("small").device != posix.stat("").device


# -- fault injection -------------------------------------------------------------------------------


def test_faults_count_and_fail_each_change() -> None:
    clean = FaultStorage(SimStorage(SimDisk()))
    put(clean, "f", b"data", tag="t")
    methods = [method for method, _ in clean.calls]
    assert methods == ["open_exclusive", "write", "fsync", "close", "rename", "fsync_dir"]
    assert clean.calls[4] == ("rename", "f.tmp-t.0 -> f")
    for index, method in enumerate(methods):
        disk = SimDisk()
        storage = FaultStorage(SimStorage(disk), before=fail_at(index, errno.EIO))
        fails(errno.EIO, lambda on: put(on, "f", b"data", tag="t"), storage)
        assert storage.calls[index][0] == method
        if method == "fsync":  # as on a real disk, what was not synced is gone
            assert disk.snapshot() == {"f.tmp-t.0": b""}


def test_faults_count_and_fail_each_call_of_a_direct_file() -> None:
    """Catches: a call that a sweep over all calls would leave out, or that takes no effect."""
    clean = FaultStorage(SimStorage(SimDisk()))
    create_direct(clean, "f", b"data")
    methods = [method for method, _ in clean.calls]
    assert methods == ["open_exclusive", "allocate", "pwrite", "truncate", "fsync", "close"]
    assert {path for _, path in clean.calls} == {"f"}
    for index in range(len(methods)):
        for hook in (fail_at(index, errno.ENOSPC), crash_at(index)):
            disk = SimDisk()
            storage = FaultStorage(SimStorage(disk), before=hook)
            with pytest.raises((OSError, ProcessDead)):
                create_direct(storage, "f", b"data")
            assert len(storage.calls) == index + 1
            done = {0: None, 1: b"", 2: bytes(4096), 3: b"data" + bytes(4092)}
            if index in done:
                assert disk.snapshot().get("f") == done[index]


def test_a_dead_process_does_nothing_more() -> None:
    """Catches: ``finally: close`` or a cleanup running after the simulated crash."""
    for index in range(6):
        storage = FaultStorage(SimStorage(SimDisk()), before=crash_at(index))
        with pytest.raises(ProcessDead):
            put(storage, "f", b"data", tag="t")
        assert len(storage.calls) == index + 1
        with pytest.raises(ProcessDead):
            storage.listdir("")


def test_a_forked_writer_pauses_at_a_known_call(posix: PosixStorage, tmp_path: Path) -> None:
    reached, go = str(tmp_path / "reached"), str(tmp_path / "go")
    os.mkfifo(reached)
    os.mkfifo(go)
    hook = pause_at(lambda _, method, path: method == "rename", reached, go)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            put(FaultStorage(posix, before=hook), "f", b"data", tag="t")
            code = 0
        finally:
            os._exit(code)
    assert Path(reached).read_bytes() == b"."
    assert posix.listdir("") == ["f.tmp-t.0"]
    Path(go).write_bytes(b".")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert posix.listdir("") == ["f"]


def test_two_threads_list_the_root_at_once(tmp_path: Path):
    """Catches: listings through one shared descriptor, which share its position: names get lost."""
    for number in range(400):
        (tmp_path / f"d{number}").mkdir()
    storage = PosixStorage(tmp_path, create=False)
    with ThreadPoolExecutor(2) as pool:
        listings = list(pool.map(lambda _: len(storage.listdir("")), range(600)))
    storage.close_root()
    assert set(listings) == {400}


def test_F4_the_real_disk_is_really_asked(tmp_path, monkeypatch):
    """``posix-fsync-...-does-nothing``: only a power loss would show it, and that is not at hand."""
    synced: list[str] = []
    fsync = os.fsync

    def spy(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    storage = PosixStorage(tmp_path)
    monkeypatch.setattr(os, "fsync", spy)
    handle = storage.open_exclusive("file")
    storage.fsync(handle)
    storage.close(handle)
    storage.mkdir("inner")
    storage.fsync_dir("inner")
    storage.fsync_dir("")
    assert synced == [str(tmp_path / "file"), str(tmp_path / "inner"), str(tmp_path)]
    storage.close_root()


@pytest.mark.parametrize(
    ("mark", "place"),
    [
        (f"iter_0000040/{MANIFEST}", "iter_0000040"),
        (f"iter_0000040/{MANIFEST}", "iter_0000040/run"),
        (f"copy/{MANIFEST}", "copy"),
        (TRACKER, "iter_0000040"),  # of a stock trainer, or half-written
        (TRACKER, "global_step_40/actor"),
        (f"{PRIVATE}/lock", "iter_0000040"),
        (f"{PRIVATE}/lock", f"{PRIVATE}/run"),
        (f"iter_0000040/{MANIFEST}", "link/run"),
    ],
)
def test_a_root_in_a_checkpoint_is_refused(tmp_path: Path, mark: str, place: str) -> None:
    """Catches: a step's directory given as the root: a run from zero in it, pruned with the step."""
    (tmp_path / mark).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / mark).touch()
    (tmp_path / "link").symlink_to("iter_0000040")
    before = sorted(tmp_path.rglob("*"))
    for create in (True, False):
        with pytest.raises(ConfigError) as caught:
            OpenPosix(str(tmp_path / place))(create)
        assert caught.value.reason == "in_a_checkpoint"
    assert sorted(tmp_path.rglob("*")) == before
    OpenPosix(str(tmp_path / "beside"))(True).close_root()


def test_the_text_of_an_error_names_one_path_where_there_is_one(tmp_path):
    """Catches: "'name' -> None", as if a rename had failed."""
    storage = PosixStorage(tmp_path)
    for call in (storage.stat, storage.open_existing, storage.open_exclusive):
        with pytest.raises(OSError) as caught:
            call("none/at/all")
        assert str(caught.value).endswith("'none/at/all'")
    storage.close_root()
