"""A process of this library that runs beside its trainer: started, talked to, watched. No torch.

Both ends hold a stream socket with framed, pickled messages, on which descriptors travel too. The
process inherits nothing else. The trainer learns of its end from the kernel, and never from silence or
from the end of the stream.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ckptfsm.adapters.fork import above_streams, kernel_state
from ckptfsm.adapters.tied import TiedProcess, interpreter, wait_for
from ckptfsm.core.errors import describe

_LENGTH = struct.Struct("!Q")
_FD = struct.Struct("i")
_READ_BYTES = 1 << 16
_MAX_FDS = 253  # the most that the kernel takes with one message
_KILL_WAIT_S = 5.0
_ORPHANED = 77
_CHANNEL = 3  # the descriptor of the process's end of the socket
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PTRACER = 0x59616D61
_AUTOGROUP = Path("/proc/self/autogroup")
_IOPRIO_BEST_EFFORT = 2 << 13
_SYS_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_START = "import sys; sys.path[:0] = sys.argv[2:]; from {module} import {function}; {function}()"


class Channel:
    """An end of the socket: whole messages, in order."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._data = bytearray()
        self._fds: list[int] = []
        self._unsent: list[memoryview] = []
        self._sending = threading.Lock()
        self.sent_at = time.monotonic()  # when the other end last took something

    def fileno(self) -> int:
        return self._end.fileno()

    def post(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Begin to send a message, and duplicates of ``fds``. Waits for nothing: ``receive`` goes on.

        Raises ``OSError`` if the other end is closed, or has no room for descriptors.
        """
        body = pickle.dumps(message)
        frames = [memoryview(_LENGTH.pack(len(body))), memoryview(body)]  # not joined: a copy
        with self._sending:
            self._unsent = self._pushed([*self._unsent, *frames], fds)

    def send(self, message: Any) -> None:
        """Send a message, and wait until the other end took it. ``OSError`` if that is closed."""
        self.post(message)
        while not self._flush():
            wait_for(self._end.fileno(), None, select.POLLOUT)

    def _flush(self) -> bool:
        """Send what the other end takes now. True if nothing is left."""
        with self._sending:
            self._unsent = self._pushed(self._unsent)
            return not self._unsent

    def _pushed(self, frames: list[memoryview], fds: Sequence[int] = ()) -> list[memoryview]:
        """Send what the other end takes now of these frames. Returns the rest."""
        # socket.send_fds ignores its flags
        extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while frames:
            try:
                sent = self._end.sendmsg(frames, extra, socket.MSG_DONTWAIT)
            except BlockingIOError as error:
                if extra:  # later they may be closed, or stand for other files
                    said = "the other process has no room for a message"
                    raise TimeoutError(errno.ETIMEDOUT, said) from error
                break
            frames, extra = _rest(frames, sent), []  # descriptors go with the first byte
            self.sent_at = time.monotonic()
        return frames

    def receive(self, timeout_s: float | None) -> tuple[bool, list[Any]]:
        """Everything that has arrived; None waits for something. Goes on with a message of ours.

        Returns whether the other end is open, and the messages that are complete.
        """
        events = select.POLLIN | (select.POLLOUT if self._unsent else 0)
        wait_for(self._end.fileno(), timeout_s, events)
        with contextlib.suppress(ConnectionError):  # the reads below tell, after its last words
            self._flush()
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
            with memoryview(self._data) as data, data[_LENGTH.size : end] as body:
                messages.append(pickle.loads(body))  # not copied: a part of bytes may be large
            del self._data[:end]
        return messages

    def shut_down(self) -> None:
        """End the stream for all who share it: a forked data loader may have the socket, too."""
        with contextlib.suppress(OSError):  # it was closed before
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end.close()


def _user() -> tuple[int, int]:
    return os.geteuid(), os.getegid()


def _rest(frames: Sequence[memoryview], sent: int) -> list[memoryview]:
    """The frames without their first ``sent`` bytes."""
    rest = []
    for frame in frames:
        if sent < len(frame):
            rest.append(frame[sent:])
        sent = max(0, sent - len(frame))
    return rest


class Spawned:
    """A process that runs ``module.function``, seen from its trainer.

    ``last_act``: it makes a ``TrainersEnd`` with one. Raises ``OSError`` if it cannot be started.
    """

    def __init__(self, module: str, function: str, *, last_act: bool = False) -> None:
        self._owner = os.getpid()
        self._user = _user()
        self._open = True
        self._unread: list[Any] = []
        code = _START.format(module=module, function=function)
        command = [interpreter(), "-I", "-S", "-c", code, str(os.getpid()), *import_path()]
        ours, theirs = (
            socket.socket(fileno=fd)
            for fd in above_streams([end.detach() for end in socket.socketpair()])
        )
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._process = TiedProcess(
                command,
                [null, null, null, theirs.fileno()],
                end=signal.SIGCONT if last_act else signal.SIGKILL,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(null)
        self.pid = self._process.pid
        self._channel = Channel(ours)
        # Where Yama guards memory, else without effect: our descendants may read it.
        _LIBC.prctl(_PR_SET_PTRACER, os.getpid(), 0, 0, 0)

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send it a message. Waits for nothing: ``listen`` sends the rest of a large one.

        Raises ``OSError`` if the process has ended, or has no room for the descriptors.
        """
        if os.getpid() != self._owner:
            raise ConnectionError("this process did not start the writer")
        self._channel.post(message, fds)

    @property
    def sent_at(self) -> float:
        """When it last took a part of a message, by the monotonic clock."""
        return self._channel.sent_at

    def listen(self, timeout_s: float = 0.0) -> list[Any]:
        """Its messages since the last call; waits for one, or until one of ours went on."""
        if os.getpid() != self._owner:
            return []
        if self._open:
            timeout_s = 0.0 if self._unread else timeout_s
            self._open, messages = self._channel.receive(timeout_s)
            self._unread += messages
        elif not self._unread and timeout_s > 0:  # nothing comes any more but its end
            self._process.wait(timeout_s)
        unread, self._unread = self._unread, []
        return unread

    def next_message(self, timeout_s: float) -> Any:
        """Its next message, or None if there is none in ``timeout_s``; the others stay."""
        first, *self._unread = self.listen(timeout_s) or [None]
        return first

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
        return self._process.exitcode()

    def kill(self, timeout_s: float = _KILL_WAIT_S) -> bool:
        """Kill it and all it started. True once it is certainly gone."""
        if os.getpid() == self._owner and not self.is_of_this_user:
            self.close()  # no signal of ours reaches it: it ends with the socket
        return self._process.kill(timeout_s)

    def resume(self) -> None:
        """Let it go on, if it is stopped."""
        self._process.resume()

    def whereabouts(self) -> str:
        """See ``kernel_state``."""
        return kernel_state(self.pid)

    def close(self) -> None:
        """Let go of the socket: a process that waits for a message ends."""
        if os.getpid() == self._owner:
            self._channel.shut_down()
        self._channel.close()
        self._open = False


def import_path() -> list[str]:
    """The directories from which the trainer imports, for an interpreter without ``site``.

    The order is the trainer's: a module in site-packages must not stand before Python's of that name.
    """
    package = Path(__file__).resolve().parents[2]
    entries = [str(e) for e in sys.path if Path(e).is_absolute()]  # a directory may be gone
    # If not, the trainer found this package through another entry.
    known = any(Path(entry).resolve() == package for entry in entries)
    return list(dict.fromkeys([*([] if known else [str(package)]), *entries]))


class TrainersEnd:
    """The trainer as its spawned process sees it. ``channel`` is the way to it.

    Made first in the process: from here on the process ends with its trainer. ``last_act`` is called
    then, on a thread.
    """

    def __init__(self, last_act: Callable[[], object] | None = None) -> None:
        self.pid = int(sys.argv[1])
        _close_from(_CHANNEL + 1)
        os.set_inheritable(_CHANNEL, False)
        self.channel = Channel(socket.socket(fileno=_CHANNEL))
        try:
            watched = os.pidfd_open(self.pid)
        except ProcessLookupError:
            os._exit(_ORPHANED)
        if os.getppid() != self.pid:
            os._exit(_ORPHANED)
        threading.Thread(target=_end_with, args=(watched, last_act), daemon=True).start()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the trainer may ignore the ends of its own


def _close_from(first: int) -> None:
    """Close what the trainer has opened without CLOEXEC, as a listening socket."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd >= first:
            with contextlib.suppress(OSError):  # of the listing itself
                os.close(fd)


def _end_with(pidfd: int, last_act: Callable[[], object] | None) -> None:
    wait_for(pidfd, None)
    try:
        if last_act is not None:
            last_act()
    finally:
        os._exit(_ORPHANED)


def be_considerate(nice: int) -> str:
    """Leave processor and disk to others: ``nice``, and the last priority of the best-effort class.

    Holds for the calling thread, and for the threads that it starts from now on. Returns "", or the
    reason in words why the kernel refuses ``nice``.
    """
    refused = ""
    if nice:
        try:
            os.nice(nice)
        except OSError as error:  # a seccomp profile: it is a help, and no need
            refused = describe(error)
        # A kernel may share the processor among sessions: ``nice`` then weighs only within one.
        if os.getsid(0) == os.getpid():  # all others in the session are its children
            with contextlib.suppress(OSError):  # no such kernel, or the weight was changed just now
                _AUTOGROUP.write_text(str(nice))
        number = _SYS_IOPRIO_SET.get(os.uname().machine)
        if number is not None:  # a container may forbid it: the disk is then shared evenly
            _LIBC.syscall(number, 1, 0, _IOPRIO_BEST_EFFORT | 7)
    return refused
