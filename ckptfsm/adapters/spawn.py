"""A process of this library that runs beside its trainer: started, talked to, watched. No torch.

Both ends hold a stream socket with framed, pickled messages, on which descriptors travel too. The end
of the stream alone proves no death: a data loader that the trainer forked keeps the trainer's end open.

Rules:

- The process inherits its end of the socket and nothing else. Its working directory is ``/``, so
  that it keeps no file system busy. Its session is new: a Ctrl-C at the terminal does not reach it.
- The process ends when its trainer ends, in whatever way, because it watches the trainer's pidfd. The
  kernel kills it too, also while it is stopped, if the trainer's main thread started it. Another thread
  may end before its trainer, and the kernel would kill the process then.
- The trainer learns of the end of the process from the kernel, and never concludes it from silence.
- Other processes that the trainer forked can neither talk to the process nor kill it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ckptfsm.adapters.fork import stand
from ckptfsm.core.errors import describe

_LENGTH = struct.Struct("!Q")
_FD = struct.Struct("i")
_READ_BYTES = 1 << 16
_MAX_FDS = 253  # the most that the kernel takes with one message
_KILL_WAIT_S = 5.0
_ORPHANED = 77
_SEND_S = 10
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PDEATHSIG = 1
_AUTOGROUP = Path("/proc/self/autogroup")
_IOPRIO_BEST_EFFORT = 2 << 13
_SYS_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_START = "import sys; sys.path[:0] = sys.argv[4:]; from {module} import {function}; {function}()"


class Channel:
    """An end of the socket: whole messages, in order."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._data = bytearray()
        self._fds: list[int] = []
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message, and duplicates of ``fds``.

        Raises ``OSError`` if the other end is closed, or does not read for long.
        """
        body = pickle.dumps(message)
        frame = memoryview(_LENGTH.pack(len(body)) + body)
        with self._sending:
            self._end.setblocking(True)
            try:
                # the descriptors travel with the first byte
                sent = socket.send_fds(self._end, [frame], fds)
                self._end.sendall(frame[sent:])
            except BlockingIOError as error:  # "temporarily unavailable" would tell nothing
                said = f"the other process took no message for {_SEND_S} s"
                raise TimeoutError(errno.ETIMEDOUT, said) from error

    def receive(self, timeout_s: float | None) -> tuple[bool, list[Any]]:
        """Everything that has arrived; None waits for something.

        Returns whether the other end is open, and the messages that are complete.
        """
        _await_input(self._end.fileno(), timeout_s)
        while True:
            try:
                data, fds = self._read()  # socket.recv_fds ignores its flags
            except BlockingIOError:
                return True, self._complete()
            except ConnectionError:
                return False, self._complete()
            if not data:
                return False, self._complete()
            self._data += data
            self._fds += fds

    def _read(self) -> tuple[bytes, list[int]]:
        room = socket.CMSG_SPACE(_MAX_FDS * _FD.size)
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        data, extra, _, _ = self._end.recvmsg(_READ_BYTES, room, flags)
        fds = [
            fd
            for level, kind, value in extra
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
            for (fd,) in _FD.iter_unpack(value[: len(value) // _FD.size * _FD.size])
        ]
        return data, fds

    def take_fds(self) -> list[int]:
        """The descriptors that have arrived, which are the caller's now."""
        fds, self._fds = self._fds, []
        return fds

    def _complete(self) -> list[Any]:
        messages = []
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            end = _LENGTH.size + length
            if len(self._data) < end:
                break
            messages.append(pickle.loads(bytes(self._data[_LENGTH.size : end])))
            del self._data[:end]
        return messages

    def close(self) -> None:
        self._end.close()


def _await_input(fd: int, timeout_s: float | None) -> None:
    """Wait until a read of ``fd`` would not block. ``select.select`` fails for numbers above 1023."""
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    waiting.poll(None if timeout_s is None else timeout_s * 1000)


def _user() -> tuple[int, int]:
    return os.geteuid(), os.getegid()


class Spawned:
    """A process that runs ``module.function``, seen from its trainer.

    Raises ``OSError`` if it cannot be started.
    """

    def __init__(self, module: str, function: str) -> None:
        ours, theirs = socket.socketpair()
        limit = struct.pack("ll", _SEND_S, 0)  # a process that is stopped must not stop its trainer
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._owner = os.getpid()
        self._user = _user()
        self._open = True
        self._exitcode: int | None = None
        command = [
            *(sys.executable, "-I", "-S", "-c", _START.format(module=module, function=function)),
            *(str(theirs.fileno()), str(os.getpid()), str(threading.get_native_id())),
            *import_path(),
        ]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        self.pid = self._process.pid
        self._channel = Channel(ours)
        # Where Yama guards memory, else without effect: our descendants may read it.
        _LIBC.prctl(_PR_SET_PTRACER, os.getpid(), 0, 0, 0)

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send it a message. Raises ``OSError`` if the process has ended."""
        if os.getpid() != self._owner:
            raise ConnectionError("this process did not start the writer")
        self._channel.send(message, fds)

    def listen(self, timeout_s: float = 0.0) -> list[Any]:
        """Its messages since the last call; waits for one at most ``timeout_s``."""
        if os.getpid() != self._owner or not self._open:
            return []
        self._open, messages = self._channel.receive(timeout_s)
        return messages

    @property
    def is_open(self) -> bool:
        """False once the process let go of the socket, and all its messages were read."""
        return self._open

    @property
    def is_of_this_user(self) -> bool:
        """False once the trainer has changed its user: files of the process are another's."""
        return self._user == _user()

    def exitcode(self) -> int | None:
        """Its exit code once it has ended, negative for a signal; None while it runs."""
        if self._exitcode is None and os.getpid() == self._owner:
            self._exitcode = self._process.poll()
        return self._exitcode

    def kill(self, timeout_s: float = _KILL_WAIT_S) -> bool:
        """Kill it and all it started. True once it is certainly gone."""
        if os.getpid() != self._owner:
            return False
        if self.exitcode() is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended by now
            except PermissionError:  # the trainer has changed its user: it ends with the socket
                self.close()
        deadline = time.monotonic() + timeout_s
        while self.exitcode() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        return self.exitcode() is not None

    def whereabouts(self) -> str:
        """Its pid, state and kernel function, for people."""
        return stand(self.pid)

    def close(self) -> None:
        """Let go of the socket: a process that waits for a message ends."""
        self._channel.close()
        self._open = False


def import_path() -> list[str]:
    """The directories from which the trainer imports, for an interpreter without ``site``.

    The order is the trainer's: a module in site-packages must not stand before Python's of that name.
    This package's directory comes first only where the trainer found it through another entry.
    """
    package = Path(__file__).resolve().parents[2]
    entries = [str(e) for e in sys.path if Path(e).is_absolute()]  # a directory may be gone
    known = any(Path(entry).resolve() == package for entry in entries)
    return list(dict.fromkeys([*([] if known else [str(package)]), *entries]))


class TrainersEnd:
    """The trainer as its spawned process sees it. ``channel`` is the way to it.

    Made first in the process: from here on the process ends with its trainer. ``last_act`` is called
    then, on a thread. The kernel leaves a process with a last act its time for that.
    """

    def __init__(self, last_act: Callable[[], object] | None = None) -> None:
        self.pid = int(sys.argv[2])
        self.channel = Channel(socket.socket(fileno=int(sys.argv[1])))
        if last_act is None and int(sys.argv[3]) == self.pid:
            # before the look at the parent: it may be dead already
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        try:
            watched = os.pidfd_open(self.pid)
        except ProcessLookupError:
            os._exit(_ORPHANED)
        if os.getppid() != self.pid:
            os._exit(_ORPHANED)
        threading.Thread(target=_end_with, args=(watched, last_act), daemon=True).start()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


def _end_with(pidfd: int, last_act: Callable[[], object] | None) -> None:
    _await_input(pidfd, None)
    try:
        if last_act is not None:
            last_act()
    finally:
        os._exit(_ORPHANED)


def be_considerate(nice: int) -> str:
    """Leave processor and disk to others: ``nice``, and the last priority of the best-effort class.

    Returns "", or the reason in words why the kernel refuses ``nice``.

    Holds for the calling thread, and for the threads that it starts from now on. A kernel that shares
    the processor among sessions gets ``nice`` for the whole session: there, it weighs only within one.
    """
    refused = ""
    if nice:
        try:
            os.nice(nice)
        except OSError as error:  # a seccomp profile: it is a help, and no need
            refused = describe(error)
        _be_nice_as_session(nice)
        number = _SYS_IOPRIO_SET.get(os.uname().machine)
        if number is not None:  # a container may forbid it: the disk is then shared evenly
            _LIBC.syscall(number, 1, 0, _IOPRIO_BEST_EFFORT | 7)
    return refused


def _be_nice_as_session(nice: int) -> None:
    """Set the weight of the session, if this process leads it: all others in it are its children."""
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # no such kernel, or the weight was changed just now
            _AUTOGROUP.write_text(str(nice))
