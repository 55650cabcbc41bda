"""Processes that live and end with the one that started them. No torch.

The kernel ends such a process with its starter, also a stopped one. A process that asks for that by
itself may be stopped before it asks, so its starter has to ask between fork and exec. ``subprocess`` can
do so only by a copy of the whole trainer, with all its locks. Here the child shares the trainer's
memory, as after ``vfork``, and makes some calls of libc. No code of Python runs in it, and no page is
copied.

The process leads a session, or a group in its starter's. All that is left of that is killed when its
end is noticed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import select
import signal
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence

from ckptfsm.adapters.fork import children_of, kill_group, kill_session, reaped

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_CLONE_VM, _CLONE_VFORK = 0x100, 0x4000
_CONTEXT_BYTES = 1 << 14  # more than any ucontext_t
_STACK_BYTES = 1 << 14
_ALIGNMENT = 64
_START_S = 10.0  # of an interpreter on a disk that does not answer
_KILL_WAIT_S = 5.0
_UNKNOWN = 255  # the exit code of a process that something else has reaped
_LibcCall = tuple[str, tuple[int, ...]]


class _Context(ctypes.Structure):
    """The first fields of ``ucontext_t``."""

    _fields_ = (
        ("flags", ctypes.c_ulong),
        ("next", ctypes.c_void_p),
        ("stack", ctypes.c_void_p),
        ("stack_flags", ctypes.c_int),
        ("stack_bytes", ctypes.c_size_t),
    )


def interpreter() -> str:
    """The trainer's interpreter. Raises ``OSError`` where it is embedded in another program."""
    if not sys.executable:
        raise FileNotFoundError(errno.ENOENT, "sys.executable names no interpreter")
    return sys.executable


class TiedProcess:
    """A process that runs ``command``, seen from the process that started it.

    ``inherited`` become its descriptors 0, 1 and so on. ``end`` is the signal that it gets when its
    starter ends. Without ``own_session``, what outlives both is killed with its starter's session.

    Raises ``OSError`` if it cannot be started, and ``ValueError`` for words that no process can have.
    """

    pid: int
    pidfd: int
    """Can be read once the process has ended."""

    def __init__(
        self,
        command: Sequence[str],
        inherited: Sequence[int],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: str = "/",
        end: signal.Signals = signal.SIGKILL,
        own_session: bool = True,
    ) -> None:
        self._owner = os.getpid()
        self._exitcode: int | None = None
        self._reaping = threading.Lock()
        self._started = threading.Event()
        self._unwanted = False
        self._error: OSError | None = None
        words = [_word(word) for word in command]
        variables = _variables(os.environ if environment is None else environment)
        place = os.open(cwd, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        if not os.access(cwd, os.X_OK):  # the child cannot tell, and would run elsewhere
            os.close(place)
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), cwd)
        fds = _moved([*inherited, place], len(inherited))
        tie: _LibcCall = "prctl", (_PR_SET_PDEATHSIG, end, 0, 0, 0)
        leads: _LibcCall = ("setsid", ()) if own_session else ("setpgid", (0, 0))
        work = words, variables, fds, (tie, leads)
        thread = threading.Thread(target=self._live, args=work, daemon=True, name="ckptfsm-child")
        try:
            thread.start()
        except RuntimeError as error:
            _close(fds)
            raise OSError(errno.EAGAIN, str(error)) from error
        self._await_start()

    def _await_start(self) -> None:
        try:
            if not self._started.wait(_START_S):
                said = f"its interpreter was not read in {_START_S:g} s"
                raise TimeoutError(errno.ETIMEDOUT, said)
        except BaseException:  # a Ctrl-C, too: the caller will not get this process
            self._unwanted = True
            if self._started.is_set() and self._error is None:
                self.kill()
            raise
        if self._error is not None:
            raise self._error

    def _live(
        self, words: list[bytes], variables: list[bytes], fds: list[int], first: Sequence[_LibcCall]
    ) -> None:
        """Start the process, and wait for its end.

        The kernel's signal comes when the *thread* that started the process ends.
        """
        # Inherited from the first instruction on: a signal to all of a job is meant for the trainer.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = _launched(words, variables, fds, first)
            self.pidfd = self._opened()
        except Exception as error:  # MemoryError, for one
            if isinstance(error, OSError):
                self._error = error
            else:
                self._error = OSError(errno.EAGAIN, repr(error))
            return
        finally:
            _close(fds)
            self._started.set()
        if self._unwanted:
            self.kill()
        wait_for(self.pidfd, None)
        self.exitcode()  # it may have been given up, and nobody asks

    def _opened(self) -> int:
        """Open ``pidfd``, for as long as this object: whoever watches it learns of the end."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except OSError:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
            raise
        weakref.finalize(self, _close_own, pidfd, self._owner).atexit = False
        return pidfd

    @property
    def running(self) -> bool:
        """False once its end was noticed: its number may be another process's by then."""
        return self._exitcode is None

    def exitcode(self) -> int | None:
        """Its exit code once it has ended, negative for a signal; None while it runs."""
        if self._exitcode is None and os.getpid() == self._owner:
            with self._reaping:
                status = reaped(self.pid, kill_session) if self._exitcode is None else None
                if status is not None:
                    (code,) = status
                    self._exitcode = _UNKNOWN if code is None else code
        return self._exitcode

    def kill(self, timeout_s: float | None = _KILL_WAIT_S) -> bool:
        """Kill it and all it started. True once it is certainly gone; None waits for that."""
        if os.getpid() != self._owner:
            return False
        if self.exitcode() is None:
            with self._reaping:
                if self._exitcode is None:
                    # its children first, which may have sessions of their own
                    for leader in (*children_of(self.pid), self.pid):
                        kill_group(leader)
            self.wait(timeout_s)
        return self.exitcode() is not None

    def wait(self, timeout_s: float | None) -> None:
        """Wait for its end, at most ``timeout_s``."""
        wait_for(self.pidfd, timeout_s)

    def resume(self) -> None:
        """Let it go on, if it is stopped."""
        with self._reaping, contextlib.suppress(ProcessLookupError):
            if self._exitcode is None and os.getpid() == self._owner:
                os.kill(self.pid, signal.SIGCONT)


def wait_for(fd: int, timeout_s: float | None, events: int = select.POLLIN) -> None:
    """Wait until ``fd`` is ready. ``select.select`` fails for numbers above 1023."""
    waiting = select.poll()
    waiting.register(fd, events)
    waiting.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)


def _close_own(fd: int, owner: int) -> None:
    if os.getpid() == owner:  # in a forked child the number may be another file's by now
        os.close(fd)


def _moved(fds: Sequence[int], above: int) -> list[int]:
    """Duplicates that are not among the first descriptors. Closes the last of ``fds``."""
    made: list[int] = []
    try:
        made.extend(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds)
    except BaseException:
        _close(made)
        raise
    finally:
        os.close(fds[-1])
    return made


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _word(text: str) -> bytes:
    if "\0" in text:
        raise ValueError(f"a NUL is in {text!r}")
    return os.fsencode(text)


def _variables(environment: Mapping[str, str]) -> list[bytes]:
    for name in environment:
        if not name or "=" in name:
            raise ValueError(f"no variable can have the name {name!r}")
    return [_word(name) + b"=" + _word(value) for name, value in environment.items()]


def _launched(
    words: list[bytes], variables: list[bytes], fds: list[int], first: Sequence[_LibcCall]
) -> int:
    """Start a process in the directory ``fds[-1]``, with the other descriptors, after ``first``."""
    arguments = (ctypes.c_char_p * (len(words) + 1))(*words, None)
    environment = (ctypes.c_char_p * (len(variables) + 1))(*variables, None)
    path = ctypes.create_string_buffer(words[0])
    failed = ctypes.create_string_buffer(1)
    at = ctypes.addressof
    pid, number = _clone(
        [
            *first,
            ("fchdir", (fds[-1],)),
            *(("dup2", (fd, target)) for target, fd in enumerate(fds[:-1])),
            ("execve", (at(path), at(arguments), at(environment))),
            ("memset", (at(failed), 1, 1)),  # only an exec that failed returns
            ("_exit", (1,)),
        ]
    )
    if pid > 0 and failed.raw != b"\0":
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    if pid < 0 or failed.raw != b"\0":
        raise OSError(number, os.strerror(number), os.fsdecode(words[0]))
    return pid


def _clone(calls: Sequence[_LibcCall]) -> tuple[int, int]:
    """A child that makes the calls in this memory, while this thread waits for its exec or exit.

    Returns its pid, or -1, and the last ``errno``. Each call is a context, which leads to the next one.
    """
    size = _CONTEXT_BYTES + _STACK_BYTES
    memory = ctypes.create_string_buffer(len(calls) * size + _STACK_BYTES + _ALIGNMENT)
    first = -(-ctypes.addressof(memory) // _ALIGNMENT) * _ALIGNMENT
    try:
        for index, (name, arguments) in enumerate(calls):
            address = first + index * size
            _LIBC.getcontext(ctypes.c_void_p(address))
            context = _Context.from_address(address)
            context.next = address + size if index + 1 < len(calls) else None
            context.stack, context.stack_bytes = address + _CONTEXT_BYTES, _STACK_BYTES
            values = map(ctypes.c_long, arguments)
            _LIBC.makecontext(ctypes.c_void_p(address), _LIBC[name], len(arguments), *values)
        top = ctypes.c_void_p(first + len(calls) * size + _STACK_BYTES)
        flags = _CLONE_VM | _CLONE_VFORK | signal.SIGCHLD
        ctypes.set_errno(0)
        pid = _LIBC.clone(_LIBC.setcontext, top, flags, ctypes.c_void_p(first))
    except AttributeError as error:  # a libc without contexts
        raise OSError(errno.ENOSYS, str(error)) from error
    return pid, ctypes.get_errno()
