"""Forked children that hold a copy of the trainer's memory, and their supervision. No torch here.

A child keeps nothing else of its parent, and dies with it. Success is exit code 0 *and* a complete
payload: the parent never takes "not alive" for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import logging
import os
import pickle
import queue
import select
import signal
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ckptfsm.adapters.garbage import collection_paused
from ckptfsm.adapters.notices import say
from ckptfsm.adapters.shared_count import SharedCount
from ckptfsm.core.errors import describe, first_os_error
from ckptfsm.core.ports import ChildError, Outcome

log = logging.getLogger("ckptfsm")

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_HEAD = struct.Struct("!BQ")
_RESULT, _ERROR = 1, 2
_RUNS = b"\0"  # the first byte of every child; no frame begins with it
_BEGIN_S = 5.0
_FORKS = 3
_REFUSED_S = (0.001, 0.01, 0.1, 1.0)
_KILL_WAIT_S = 5.0
_ORPHANED = 77
_READ_BYTES = 1 << 16


class Child:
    """A forked child, seen from its parent. See ``ports.WriterProcess``."""

    def __init__(self, pid: int, pipe: int, count: SharedCount | None = None) -> None:
        self.pid = pid
        self._count = count
        self._parent = os.getpid()
        self._pipe: int | None = pipe
        self.began = False
        self._data = bytearray()
        self._outcome: Outcome | None = None
        os.set_blocking(pipe, False)

    def await_start(self, timeout_s: float) -> bool:
        """Wait until the child runs code of this library or has ended; False after ``timeout_s``."""
        if self._pipe is not None and not self.began:
            watch = select.poll()
            watch.register(self._pipe, select.POLLIN)
            watch.poll(timeout_s * 1000)
            self._drain()
        return self.began or self._pipe is None or self.poll() is not None

    holds_copy, must_wait = True, False  # the fork made one

    def await_copy(self, timeout_s: float) -> None:
        """No wait: the fork made it."""

    def confirm(self) -> None:
        """No message: nothing could change the copy."""

    def poll(self) -> Outcome | None:
        """The outcome, or None while the child runs. Never blocks.

        Also None in a process that the parent has forked, which cannot reap the child.
        """
        if self._outcome is None and self._is_ours():
            self._drain()
            status = reaped(self.pid)
            if status is not None:
                self._drain()
                self._finish(status[0])
        return self._outcome

    def wait(self, timeout_s: float | None = None) -> Outcome | None:
        """Wait for the end, at most ``timeout_s``; None if the child still runs then."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause = 0.0005
        while (outcome := self.poll()) is None:
            if not self._is_ours() or (deadline is not None and time.monotonic() >= deadline):
                return None
            time.sleep(pause)
            pause = min(pause * 2, 0.02)
        return outcome

    def kill(self, timeout_s: float = _KILL_WAIT_S) -> bool:
        if self.poll() is not None:
            return True
        if not self._is_ours():
            return False
        kill_group(self.pid)
        return self.wait(timeout_s) is not None

    def whereabouts(self) -> str:
        return ", ".join(kernel_state(pid) for pid in [self.pid, *children_of(self.pid)])

    def written_bytes(self) -> int:
        return 0 if self._count is None else self._count.value

    def _is_ours(self) -> bool:
        return os.getpid() == self._parent

    def _drain(self) -> None:
        while self._pipe is not None:
            try:
                piece = os.read(self._pipe, _READ_BYTES)
            except BlockingIOError:
                return
            if not piece:
                os.close(self._pipe)
                self._pipe = None
            self.began = self.began or bool(piece)
            self._data += piece

    def _finish(self, exitcode: int | None) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        self._outcome = _read_outcome(exitcode, bytes(self._data))
        self._data.clear()


def kill_group(leader: int) -> None:
    """Kill all processes of a group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the trainer's user changed
        os.killpg(leader, signal.SIGKILL)


def reaped(pid: int, kill_rest: Callable[[int], object] = kill_group) -> tuple[int | None] | None:
    """None while the leader of a group runs, else its exit code: None if something else reaped it.

    ``kill_rest`` kills what has outlived it, and would write on.
    """
    try:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return None
        kill_rest(pid)  # before its number is free for another process
        return (os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]),)
    except ChildProcessError:
        # No number is used again while it is a group's, or a session's.
        if not Path(f"/proc/{pid}").exists():
            kill_rest(pid)
        return (None,)


def kill_session(leader: int, spared: Collection[int] = ()) -> None:
    """Kill all groups of a session but the ``spared``, also those that are made meanwhile."""
    killed = set(spared)
    while groups := {leader, *_groups_of(leader)} - killed:
        for group in groups:
            kill_group(group)
        killed |= groups


def _groups_of(session: int) -> set[int]:
    """The process groups of a session, by the numbers of their leaders."""
    found: set[int] = set()
    for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it ended, or is not ours
            if os.getsid(pid) == session:
                found.add(os.getpgid(pid))
    return found


def fork_child(
    job: Callable[[], Any],
    *,
    keep: Sequence[int],
    count: SharedCount | None = None,
) -> Child:
    """Fork a child that runs ``job`` and reports its (picklable) result or its error.

    ``keep``: descriptors the child may keep. ``count``: the bytes that it writes, which ``job`` counts.
    The child has a process group of its own: it can be killed with everything it forks, and a Ctrl-C at
    the terminal does not reach it. Call within ``PosixDeferredSignals``, until the child is stored.

    Returns when the child runs. One that hangs in the fork, at a lock that another thread held, is
    killed and forked anew, but for the last one. CPython 3.10 and 3.11 did so until September 2024
    (issue 112275).
    """
    for _ in range(_FORKS - 1):
        child = _fork(job, keep, count)
        try:
            if child.await_start(_BEGIN_S):
                return child
            where = child.whereabouts()
            if not child.kill() or child.began:  # it may have left files: a writer that died
                return child
        except BaseException:  # a Ctrl-C: the caller will not get this child
            child.kill()
            raise
        said = f"a child did not begin, and is forked anew; it was {where}"
        say(log.warning, "child_did_not_begin", said, where=where)
    return _fork(job, keep, count)


def _fork(job: Callable[[], Any], keep: Sequence[int], count: SharedCount | None) -> Child:
    with _named("pipe2"):
        read_end, write_end = above_streams(os.pipe2(os.O_CLOEXEC))
    run = partial(_run_child, job, (read_end, write_end), keep, os.getpid())
    main_thread = threading.current_thread() is threading.main_thread()
    try:
        # Collecting the parent's CUDA tensors in a child crashes it.
        with collection_paused(), _named("fork"):
            pid = _forked(run) if main_thread else _forked_beside(run)
    except OSError:
        os.close(read_end)
        os.close(write_end)
        raise
    os.close(write_end)
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)  # both sides set the group: neither may wait for the other
    return Child(pid, read_end, count)


def above_streams(fds: Sequence[int]) -> list[int]:
    """These descriptors, with other numbers where a trainer without standard streams has free ones.

    Others write to these numbers, whatever is open there.
    """
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) if fd < 3 else fd for fd in fds]
    for fd in set(fds).difference(moved):
        os.close(fd)
    return moved


def _forked_beside(run: Callable[[], None]) -> int:
    """Fork on a thread that lives as long as the child. Raises ``OSError``.

    The kernel kills a child when the *thread* that forked it ends, also while the child is stopped.
    """
    told: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
    work = [run], told  # a list, to be emptied: the thread must not keep the trainer's data
    try:
        threading.Thread(target=_be_parent, args=work, daemon=True, name="ckptfsm-child").start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error
    found = told.get()
    if isinstance(found, BaseException):
        raise found
    return found


def _be_parent(
    work: list[Callable[[], None]], told: queue.SimpleQueue[int | BaseException]
) -> None:
    try:
        pid = _forked(work.pop())
    except BaseException as error:  # raised on the thread that waits
        told.put(error)
        return
    told.put(pid)
    with contextlib.suppress(ChildProcessError):  # it was reaped
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


def _forked(run: Callable[[], None]) -> int:
    """Fork a child that runs ``run``, which never returns there."""
    pauses = iter(_REFUSED_S)
    while True:
        try:
            pid = os.fork()
            break
        except RuntimeError:  # of an audit hook: filelock's, while another thread opens a lock
            pause = next(pauses, None)
            if pause is None:
                raise
            time.sleep(pause)
    if pid == 0:
        run()
    return pid


@contextlib.contextmanager
def _named(call: str) -> Iterator[None]:
    """Name the failed call and the error code in errors raised inside."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        name = errno.errorcode.get(number, "unknown")
        raise OSError(number, f"{os.strerror(number)} ({call}: {name})") from error


def _run_child(
    job: Callable[[], Any], pipe: tuple[int, int], keep: Sequence[int], parent: int
) -> None:
    """Run the child from its begin to its exit; never returns. ``pipe[0]`` is the parent's end."""
    code = 1
    try:
        try:
            gc.disable()
            _die_with(parent)  # first: it may be stopped at any time
            os.write(pipe[1], _RUNS)
            os.setpgid(0, 0)
            _reset_signals()
            os.close(pipe[0])  # its number is free for the next file
            _let_go_of_all_but({0, 1, 2, pipe[1], *keep})
            frame, ending = _frame(_RESULT, job()), 0
        except BaseException as error:  # the parent must learn of every error
            told = child_error(error)
            frame, ending = _RUNS + _frame(_ERROR, told), 1  # the first byte may be unsent
        _send(pipe[1], frame)
        code = ending
    finally:
        os._exit(code)


def child_error(error: BaseException) -> ChildError:
    """An error as a writer tells it to its trainer."""
    cause = first_os_error(error)
    words = describe(cause) if cause else ""
    return ChildError(describe(error), words, getattr(error, "kind", ""))


def _die_with(parent: int) -> None:
    """End when the parent ends, in whatever way."""
    _ask_kernel()
    if os.getppid() != parent:  # the parent died between the fork and now
        os._exit(_ORPHANED)


def let_children_die_too() -> None:
    """Make all later forks of this child, by any code, end with the child as well.

    The kernel's death signal is not inherited by a fork.
    """
    os.register_at_fork(after_in_child=_ask_kernel)


def _ask_kernel() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def children_of(pid: int) -> list[int]:
    """The processes that any thread of ``pid`` has forked and not reaped. Empty if ``pid`` is gone."""
    found: list[int] = []
    tasks = Path(f"/proc/{pid}/task")
    with contextlib.suppress(FileNotFoundError):
        for task in list(tasks.iterdir()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def kernel_state(pid: int) -> str:
    """Pid, state and kernel function of a process, such as "4242 D jbd2_log_wait_commit"."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return f"{pid} {state} {Path(f'/proc/{pid}/wchan').read_text()}"
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return f"{pid} is gone, or not ours to see"


def _reset_signals() -> None:
    """Ignore signals in the child: the trainer's handlers must not run here.

    The writer ends with its trainer, or is killed by it; until then the writer finishes its shards.
    """
    with contextlib.suppress(ValueError):  # not in a main thread: no handler can be set
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a writer must learn how its workers end


def _let_go_of_all_but(keep: set[int]) -> None:
    """Point every other descriptor at /dev/null: a restarted job needs the ports, for one.

    Closing them would free their numbers. A shard would get such a number, and a log handler of the
    trainer that still knows the number would write into the shard.
    """
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in numbers:
        if fd not in keep and fd != null:
            _point(fd, null)


def _point(fd: int, null: int) -> None:
    try:
        os.dup2(null, fd, inheritable=False)
    except OSError as error:  # above a lowered limit of open files: no file gets its number
        if error.errno != errno.EBADF:
            raise
        os.close(fd)


def _frame(kind: int, value: Any) -> bytes:
    body = pickle.dumps(value)
    return _HEAD.pack(kind, len(body)) + body


def _send(pipe: int, frame: bytes) -> None:
    view = memoryview(frame)
    while len(view):
        view = view[os.write(pipe, view) :]


def _read_outcome(exitcode: int | None, data: bytes) -> Outcome:
    """The outcome from the child's frame; a torn frame is no result."""
    frame = data.lstrip(_RUNS)
    if len(frame) < _HEAD.size:
        return Outcome(exitcode)
    kind, length = _HEAD.unpack_from(frame)
    body = frame[_HEAD.size :]
    if len(body) != length:
        return Outcome(exitcode)
    try:
        value = pickle.loads(body)
    except Exception as error:  # a payload's code: its writer failed, and its trainer goes on
        return Outcome(exitcode, error=ChildError(f"its result cannot be read: {describe(error)}"))
    if kind == _ERROR:
        return Outcome(exitcode, error=value)
    return Outcome(exitcode, payload=value, complete=True)
