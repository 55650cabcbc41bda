"""A disk that remembers: a real file system runs on it, and every write and flush is recorded.

A file, served over ``/dev/fuse`` by a separate process, stands below a loop device below the file
system. The server is sent the same, in order, as a disk with a volatile cache: writes, and flushes
that make all earlier writes durable.

Rules:
* ``enter_private_mounts`` comes first: all mounts are made in a mount namespace of this process, and
  every loop device clears itself, so that nothing is left behind however the process ends.
* The server touches nothing but its memory and its log, and sees none of the mounts, so it can
  never wait for itself.
* Linux and root only; ``OSError`` where the machine does not allow it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import select
import signal
import stat
import struct
import subprocess
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

BLOCK = 4096

_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x4000, 1 << 18, 2
_PR_SET_PDEATHSIG = 1
_LOOP_CONFIGURE, _LOOP_GET_FREE, _LOOP_AUTOCLEAR = 0x4C0A, 0x4C82, 4
_LOOP_ATTEMPTS = 32

Record = tuple[int, bytes] | None
"""A write (offset in bytes, data), or None: a flush, all writes before it are durable."""


class Image:
    """The content of a disk as blocks that are not zero. Copies are cheap: blocks are immutable."""

    def __init__(self, size: int, blocks: dict[int, bytes] | None = None) -> None:
        self.size = size
        self._blocks = dict(blocks or {})

    def copy(self) -> Image:
        return Image(self.size, self._blocks)

    def write(self, offset: int, data: bytes) -> None:
        while data:
            number, start = divmod(offset, BLOCK)
            piece = data[: BLOCK - start]
            old = self._blocks.get(number, bytes(BLOCK))
            self._blocks[number] = old[:start] + piece + old[start + len(piece) :]
            offset, data = offset + len(piece), data[len(piece) :]

    def dump(self, fd: int) -> None:
        """Make the file hold exactly this image."""
        os.ftruncate(fd, 0)
        os.ftruncate(fd, self.size)
        for number, block in self._blocks.items():
            os.pwrite(fd, block, number * BLOCK)

    @classmethod
    def load(cls, fd: int) -> Image:
        image = cls(os.fstat(fd).st_size)
        for number in range(image.size // BLOCK):
            block = os.pread(fd, BLOCK, number * BLOCK)
            if block.strip(b"\0"):
                image._blocks[number] = block
        return image


# ------------------------------------------------------------------------------------ mounts and loops


def enter_private_mounts(work: str) -> None:
    """Leave the machine's mounts alone from here on; ``work`` becomes a file system in memory.

    All of it ends with this process and its children, and they end with their parent.
    """
    die_with_parent()
    _call("unshare", _CLONE_NEWNS)
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("ckptfsm-powerloss", work, "tmpfs")


def _leave_mounts(disk: str) -> None:
    """Separate mounts for the server, without its disk.

    The last process of a mount namespace unmounts it in its exit, before its descriptors are closed. A
    server that dies as the last one would wait for ever for itself to serve that unmount.
    """
    _call("unshare", _CLONE_NEWNS)
    _call("umount2", disk.encode(), _MNT_DETACH)


def die_with_parent() -> None:
    parent = os.getppid()
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def make_image(command: tuple[str, ...], size: int, work: str) -> Image:
    """A fresh file system of ``size`` bytes, made by ``command`` with a file's name appended."""
    path = os.path.join(work, "mkfs.img")
    with open(path, "w+b") as file:
        os.ftruncate(file.fileno(), size)
        done = subprocess.run((*command, path), capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise OSError(errno.EIO, f"{command[0]}: {done.stderr.strip() or done.stdout.strip()}")
        image = Image.load(file.fileno())
    os.unlink(path)
    return image


@contextmanager
def mounted(fd: int, work: str, kind: str, options: str = "") -> Iterator[str]:
    """Mount the file system in the file ``fd`` through a loop device; yields where."""
    where = os.path.join(work, "mnt")
    os.makedirs(where, exist_ok=True)
    device, loop = _attach(fd)
    try:
        _mount(device, where, kind, 0, options)
    finally:
        os.close(loop)  # the mount keeps it; without one it clears itself now
    try:
        yield where
    finally:
        _unmount(where)


def _attach(fd: int) -> tuple[str, int]:
    """A free loop device on ``fd``: its path, and a descriptor that keeps it."""
    info = struct.pack(
        "<5Q4I64s64s32s2Q", 0, 0, 0, 0, 0, 0, 0, 0, _LOOP_AUTOCLEAR, b"", b"", b"", 0, 0
    )
    config = struct.pack("<II", fd, 512) + info + bytes(64)
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_LOOP_ATTEMPTS):
            path = f"/dev/loop{fcntl.ioctl(control, _LOOP_GET_FREE)}"
            loop = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(loop, _LOOP_CONFIGURE, config)
                return path, loop
            except OSError as error:
                os.close(loop)
                if error.errno != errno.EBUSY:  # another process took it meanwhile
                    raise
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "no free loop device")


def _mount(source: str, target: str, kind: str | None, flags: int = 0, data: str = "") -> None:
    kind_bytes = kind.encode() if kind is not None else None
    _call("mount", source.encode(), target.encode(), kind_bytes, flags, data.encode())


def _unmount(target: str) -> None:
    try:
        _call("umount2", target.encode(), 0)
    except OSError:  # something is still open in it: out of sight now, gone with this process
        _call("umount2", target.encode(), _MNT_DETACH)


def _call(name: str, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    converted = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    if getattr(libc, name)(*converted) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


# -------------------------------------------------------------------------------------- the recording


class RecordingDisk:
    """A disk with ``image`` on it. ``position()`` is how many writes and flushes it got so far."""

    def __init__(self, image: Image, work: str) -> None:
        self._image = image
        self._work = work
        self._counter = mmap.mmap(-1, 8)
        self._log = os.path.join(work, "log")

    def position(self) -> int:
        return int.from_bytes(self._counter[:8], "little")

    @contextmanager
    def mounted(self, kind: str, options: str = "") -> Iterator[str]:
        """The file system on the disk, recorded until it is unmounted; yields where it is."""
        disk = os.path.join(self._work, "disk")
        Path(disk).touch()
        server = self._serve(disk)
        try:
            fd = os.open(disk, os.O_RDWR | os.O_CLOEXEC)
            try:
                with mounted(fd, self._work, kind, options) as where:
                    yield where
            finally:
                os.close(fd)
        finally:
            _unmount(disk)
            _end(server)

    def _serve(self, disk: str) -> int:
        """Mount the disk and start its server; the server's pid."""
        fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        try:
            options = f"fd={fuse},rootmode={stat.S_IFREG | 0o600:o},user_id=0,group_id=0"
            _mount("ckptfsm-powerloss", disk, "fuse", 0, options)  # reading it is an error before
            server = os.fork()
            if server == 0:
                self._be_server(fuse, disk)
        finally:
            os.close(fuse)  # now the server alone holds it: its death ends every request
        return server

    def _be_server(self, fuse: int, disk: str) -> NoReturn:
        code = 1
        try:
            die_with_parent()
            _leave_mounts(disk)
            _Server(self._image, fuse, self._log, self._counter).run()
            code = 0
        except BaseException:  # a forked child: no frame above may go on
            traceback.print_exc()
        finally:
            os._exit(code)

    def records(self) -> list[Record]:
        """Everything that was recorded, in order. Only after it is unmounted."""
        records: list[Record] = []
        data = Path(self._log).read_bytes()
        at = 0
        while at < len(data):
            kind, offset, length = _ENTRY.unpack_from(data, at)
            at += _ENTRY.size
            records.append((offset, data[at : at + length]) if kind else None)
            at += length
        return records


def _end(server: int) -> None:
    """Wait until the server saw its disk unmounted; one that is still in use is taken away."""
    descriptor = os.pidfd_open(server)
    try:
        if not select.select([descriptor], [], [], _END_S)[0]:
            os.kill(server, signal.SIGKILL)
        _, status = os.waitpid(server, 0)
    finally:
        os.close(descriptor)
    if status:
        raise OSError(errno.EBUSY, f"the recorded disk did not end in order (status {status})")


_END_S = 10.0
_ENTRY = struct.Struct("<BQQ")
_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
_WRITE = struct.Struct("<QQIIQII")
_MAX_WRITE = 128 * 1024
_DIRECT_IO = 1
_BIG_WRITES = 1 << 5
_GETATTR, _SETATTR, _OPEN, _READ, _WRITES, _STATFS, _RELEASE = 3, 4, 14, 15, 16, 17, 18
_FSYNC, _FLUSH, _INIT, _INTERRUPT, _DESTROY, _FORGET, _FORGETS = 20, 25, 26, 36, 38, 2, 42
_NO_REPLY = (_INTERRUPT, _FORGET, _FORGETS)


@dataclass
class _Server:
    """Answers the kernel's requests for one file. Direct I/O: every write reaches us at once."""

    image: Image
    fuse: int
    log: str
    counter: mmap.mmap

    def run(self) -> None:
        memory = os.memfd_create("disk")
        self.image.dump(memory)
        self.disk = memory
        with open(self.log, "wb", buffering=0) as file:
            self.file = file
            while (request := self._next()) is not None:
                _, opcode, unique, *_ = _IN.unpack_from(request)
                if opcode in _NO_REPLY:
                    continue
                try:
                    answer, error = self._answer(opcode, memoryview(request)[_IN.size :]), 0
                except OSError as problem:
                    answer, error = b"", -(problem.errno or errno.EIO)
                self._reply(_OUT.pack(_OUT.size + len(answer), error, unique) + answer)

    def _next(self) -> bytes | None:
        while True:
            try:
                return os.read(self.fuse, _MAX_WRITE + 4096)
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return None
                if error.errno not in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    raise

    def _reply(self, answer: bytes) -> None:
        try:
            os.write(self.fuse, answer)
        except FileNotFoundError:
            pass  # it is no longer waited for: the last close races with the unmount

    def _answer(self, opcode: int, body: memoryview) -> bytes:
        if opcode == _WRITES:
            _, offset, length, *_ = _WRITE.unpack_from(body)
            data = bytes(body[_WRITE.size : _WRITE.size + length])
            os.pwrite(self.disk, data, offset)
            self._record(1, offset, data)
            return struct.pack("<II", length, 0)
        if opcode == _READ:
            _, offset, length, *_ = _WRITE.unpack_from(body)
            return os.pread(self.disk, length, offset)
        if opcode == _FSYNC:
            self._record(0, 0, b"")
            return b""
        if opcode == _INIT:
            version = (7, 31, 0, _BIG_WRITES, 16, 12, _MAX_WRITE, 1)
            return struct.pack("<IIIIHHII36x", *version)
        if opcode in (_GETATTR, _SETATTR):
            return struct.pack("<QII", 0, 0, 0) + self._attributes()
        if opcode == _OPEN:
            return struct.pack("<QII", 0, _DIRECT_IO, 0)
        if opcode in (_RELEASE, _FLUSH, _DESTROY):
            return b""
        raise OSError(errno.ENOSYS, "not needed for a disk")

    def _record(self, kind: int, offset: int, data: bytes) -> None:
        self.file.write(_ENTRY.pack(kind, offset, len(data)) + data)
        taken = int.from_bytes(self.counter[:8], "little")
        self.counter[:8] = (taken + 1).to_bytes(8, "little")

    def _attributes(self) -> bytes:
        size = self.image.size
        times = (0, 0, 0, 0, 0, 0)
        return struct.pack(
            "<6Q10I",
            1,
            size,
            size // 512,
            *times[:3],
            *times[3:],
            stat.S_IFREG | 0o600,
            1,
            0,
            0,
            0,
            BLOCK,
            0,
        )
