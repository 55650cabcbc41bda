"""Forked children: their success, the descriptors they hold, and their end.

Each test names the bugs that it would catch. Everything here is a real fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from ckptfsm.adapters import fork as processes
from ckptfsm.adapters.fork import Child, _ask_kernel, children_of, fork_child
from ckptfsm.core.ports import ChildError, Outcome
from ckptfsm.testing.fakes import FifoGate

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 20.0


def ended(child: Child) -> Outcome:
    outcome = child.wait(WAIT_S)
    assert outcome is not None, "the child did not end"
    return outcome


def run(job, *, keep=()) -> Outcome:
    return ended(fork_child(job, keep=keep))


def wait_for_eof(descriptor: int) -> bytes:
    """Everything until the last process that holds the other end is gone; bounded."""
    data = b""
    while select.select([descriptor], [], [], WAIT_S)[0]:
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            return data
        data += piece
    raise AssertionError("somebody still holds the other end")


def test_a_result_comes_back():
    """Catches: a payload that is lost, cut off at the size of a pipe, or delayed for ever."""
    large = {"rows": [("key", index, b"x" * 100) for index in range(20_000)]}
    outcome = run(lambda: large)
    assert outcome.succeeded and outcome.payload == large and outcome.exitcode == 0


def test_none_is_a_result_too():
    """Catches: "no payload" and "the payload is None" taken for each other."""
    assert run(lambda: None) == Outcome(0, None, None, True)


@pytest.mark.parametrize("code", [0, 1, 3, 77])
def test_an_exit_code_alone_is_never_success(code: int):
    """F1. Catches: exit 0 without a result taken for a written shard."""
    outcome = run(lambda: os._exit(code))
    assert not outcome.succeeded and outcome.exitcode == code
    assert outcome.explain() == f"exit code {code} without a complete result"


def test_an_exception_is_told():
    """Catches: a failure reported as "exit code 1" and nothing else."""

    def job() -> None:
        raise RuntimeError("a\nbug")

    outcome = run(job)
    assert not outcome.succeeded and outcome.exitcode == 1
    assert outcome.error == ChildError("RuntimeError: a bug")
    assert outcome.explain() == "RuntimeError: a bug"


@pytest.mark.parametrize("call", ["setpgid", "listdir", "open"])
def test_I10_an_error_before_the_job_is_told(call: str, monkeypatch: pytest.MonkeyPatch):
    """Catches: "exit code 1 without a complete result" where the system said why."""

    def refused(*arguments: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), call)

    parent, real = os.getpid(), getattr(os, call)
    refuse_child = lambda *a, **k: (real if os.getpid() == parent else refused)(*a, **k)  # noqa: E731
    monkeypatch.setattr(os, call, refuse_child)
    outcome = run(lambda: None)
    assert not outcome.succeeded and outcome.exitcode == 1
    assert outcome.explain().startswith(f"OSError: [Errno 24] Too many open files: '{call}'")


def test_I10_an_error_before_the_first_byte_is_told(monkeypatch: pytest.MonkeyPatch):
    """Catches: a report that is read one byte too late because the child had not said that it runs."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(processes.gc, "disable", interrupted)
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        processes._run_child(int, (read_end, write_end), (), os.getppid())
    os.close(write_end)
    assert ended(Child(pid, read_end)).error == ChildError("KeyboardInterrupt: ")


def in_few_descriptors(job, free: int) -> str:
    """The answer of ``job`` in a process that has only so many descriptors left."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        os.closerange(3, write_end)  # earlier tests in this process may hold many
        os.closerange(write_end + 1, 64)
        held = []
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for descriptor in held[len(held) - free :]:
            os.close(descriptor)
        try:
            os.write(write_end, job().encode())
        except OSError as error:
            os.write(write_end, str(error).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    os.waitpid(pid, 0)
    said = wait_for_eof(read_end).decode()
    os.close(read_end)
    return said


def test_a_descriptor_above_the_limit_is_let_go_of():
    """Catches: every save failing without a cause, for a descriptor that a launcher opened before it
    lowered the limit, or a child that keeps it."""

    def job() -> str:
        with pytest.raises(OSError):
            os.fstat(1000)
        return "written"

    def trainer() -> str:
        return str(run(job).payload)

    number = fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 1000)
    try:
        assert number == 1000
        assert in_few_descriptors(trainer, free=10) == "written"
    finally:
        os.close(number)


def test_a_child_needs_no_descriptor_of_its_own():
    """Catches: a child that cannot let go of its inheritance where only its pipe could be made."""
    assert in_few_descriptors(lambda: str(run(lambda: "written").payload), free=2) == "written"


@pytest.mark.parametrize("free", [0, 1])
def test_I10_a_trainer_without_a_descriptor_for_the_pipe_is_told(free: int):
    """Catches: "too many open files" that does not say where."""
    said = in_few_descriptors(lambda: str(run(lambda: "written").payload), free=free)
    assert "EMFILE" in said and "pipe2" in said


@pytest.mark.parametrize(("refusals", "written"), [(1, True), (4, True), (5, False)])
def test_a_fork_that_an_audit_hook_refuses_is_tried_again(
    refusals: int, written: bool, monkeypatch: pytest.MonkeyPatch
):
    """Catches: a save that fails because another thread took a file lock just then (filelock 4.2.12)."""
    real, left, pauses = os.fork, [refusals], []

    def fork() -> int:
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("os.fork is unsafe while filelock is changing descriptor ownership")
        return real()

    monkeypatch.setattr(os, "fork", fork)
    monkeypatch.setattr(time, "sleep", pauses.append)
    try:
        said = run(lambda: "written").payload
    except RuntimeError as error:
        said = str(error)
    assert (said == "written") is written
    assert pauses[:refusals] == [0.001, 0.01, 0.1, 1.0][:refusals]


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), BaseException("odd")])
def test_no_exception_is_success(error: BaseException):
    """Catches: torch's CheckpointException, a BaseException, or sys.exit(0) taken for success."""

    def job() -> None:
        raise error

    outcome = run(job)
    assert not outcome.succeeded and type(error).__name__ in outcome.explain()


def test_F5_the_first_system_error_surfaces():
    """Catches: a full disk that reaches people as "unexpected pos" only."""

    def job() -> None:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "shard")
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0") from None

    outcome = run(job)
    assert "No space left" in outcome.error.os_error
    assert outcome.explain().startswith("RuntimeError: unexpected pos")
    assert "first system error: OSError: [Errno 28]" in outcome.explain()


def test_a_result_that_cannot_be_pickled_is_a_failure():
    """Catches: exit 0 with half a payload."""
    outcome = run(lambda: lambda: None)
    assert not outcome.succeeded and "pickle" in outcome.explain().lower()


class Odd(Exception):
    """Pickles, and does not unpickle: many exceptions with two arguments do that."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one)


def test_I10_a_result_that_cannot_be_read_is_a_failure():
    """Catches: an error out of ``poll``, between two exchanges, while the other ranks wait."""
    child = fork_child(lambda: Odd(1, 2), keep=())
    outcome = child.wait(30)
    assert outcome is not None and not outcome.succeeded and outcome.exitcode == 0
    assert "its result cannot be read: TypeError" in outcome.explain()
    assert child.poll() is outcome


def test_a_truncated_payload_is_no_result():
    """Catches: a writer killed in the middle of its report, whose report is believed."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.write(write_end, b"\0\x01" + (1000).to_bytes(8, "big") + b"half")
    os.close(write_end)
    outcome = ended(Child(pid, read_end))
    assert outcome == Outcome(0) and not outcome.succeeded


def test_F1_a_killed_child_is_a_failure_with_the_signals_name():
    """Catches: "not alive" taken for "succeeded"."""
    outcome = run(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert outcome.exitcode == -signal.SIGKILL and not outcome.succeeded
    assert outcome.explain() == "killed by SIGKILL"


def test_a_signal_without_a_name():
    """Catches: an error while explaining an error."""
    assert Outcome(-40).explain() == "killed by signal 40"


def test_poll_never_blocks_and_wait_is_bounded(tmp_path: Path):
    """I10. Catches: a training step that waits for a writer."""
    gate = FifoGate(tmp_path / "gate")
    child = fork_child(gate.hold, keep=())
    assert child.poll() is None
    assert child.wait(0.01) is None
    gate.open()
    assert ended(child).succeeded
    assert child.poll() is child.wait() is child.poll()
    assert child.kill() is True


def test_F1_kill_takes_the_grandchildren_too(tmp_path: Path):
    """Catches: a worker of a killed writer that goes on writing into the attempt's files."""
    read_end, write_end = os.pipe()
    gate = FifoGate(tmp_path / "gate")

    def job() -> None:
        for _ in range(2):
            if os.fork() == 0:
                os.write(write_end, b".")
                gate.hold()
                os._exit(0)
        gate.hold()

    child = fork_child(job, keep=(write_end,))
    os.close(write_end)
    seen = b""
    while len(seen) < 2:
        assert select.select([read_end], [], [], WAIT_S)[0]
        seen += os.read(read_end, 2)
    assert child.kill() is True
    assert wait_for_eof(read_end) == b"", "a grandchild still holds its end"
    os.close(read_end)


def test_F3_a_writer_that_hangs_can_be_located(tmp_path: Path):
    """Catches: a hang without an explanation: was it the disk, or a lock?"""
    read_end, write_end = os.pipe()
    gate = FifoGate(tmp_path / "gate")

    def job() -> None:
        worker = os.fork()
        if worker == 0:
            gate.hold()
            os._exit(0)
        os.write(write_end, b"%d\n" % worker)
        gate.hold()

    child = fork_child(job, keep=(write_end,))
    os.close(write_end)
    with os.fdopen(read_end) as told:
        worker = told.readline().strip()
    seen = [place.split() for place in child.whereabouts().split(", ")]
    assert [pid for pid, _, _ in seen] == [str(child.pid), worker]
    assert all(state in "RSD" for _, state, _ in seen)
    assert child.kill() is True
    assert child.whereabouts() == f"{child.pid} is gone, or not ours to see"


HANGING = """
import os, signal, sys
from ckptfsm.adapters import fork as processes
bad, how, processes._BEGIN_S, patience_s = int(sys.argv[1]), sys.argv[2], *map(float, sys.argv[3:])
forks = []
def end_in_the_fork():
    while len(forks) <= bad and how == "hang":
        signal.pause()
    if len(forks) <= bad:
        os.kill(os.getpid(), signal.SIGKILL)
os.register_at_fork(before=lambda: forks.append(1), after_in_child=end_in_the_fork)
child = processes.fork_child(lambda: "written", keep=())
assert set(processes.children_of(os.getpid())) <= {child.pid}, "one that hung is left"
outcome = child.wait(patience_s)
print(outcome.payload or outcome.explain() if outcome else f"hangs: {child.began} {child.kill()}")
"""


@pytest.mark.parametrize(
    ("bad", "how", "begin_s", "patience_s", "said"),
    [
        (0, "hang", WAIT_S, WAIT_S, "written"),
        (2, "hang", 0.5, 5.0, "written"),
        (3, "hang", 0.5, 0.5, "hangs: False True"),
        (1, "die", WAIT_S, WAIT_S, "killed by SIGKILL"),
    ],
)
def test_a_child_that_hangs_in_its_fork_is_forked_anew(
    bad: int, how: str, begin_s: float, patience_s: float, said: str
):
    """I10. A lock was held at the fork. Catches: a save that fails at its deadline for it.

    A child that died there is a writer that died.
    """
    command = [sys.executable, "-c", HANGING, str(bad), how, str(begin_s), str(patience_s)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.stdout.strip(), done.returncode) == (said, 0), done.stderr


def test_a_child_that_began_after_all_is_not_forked_twice(monkeypatch: pytest.MonkeyPatch):
    """Catches: a second writer over the files of one that was killed while it wrote."""
    began = Child.await_start

    def too_late(child: Child, timeout_s: float) -> bool:
        assert began(child, WAIT_S)
        return False

    forked: list[int] = []
    fork = os.fork

    def counted() -> int:
        forked.append(1)
        return fork()

    monkeypatch.setattr(Child, "await_start", too_late)
    monkeypatch.setattr(os, "fork", counted)
    outcome = run(threading.Event().wait)
    assert outcome.explain() == "killed by SIGKILL" and len(forked) == 1


def test_a_child_that_died_is_not_waited_for_where_another_holds_its_pipe():
    """Catches: five seconds, and a second fork, for a writer that died at its beginning, since a child
    of another thread has inherited its pipe."""
    read_end, inherited = os.pipe()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    child = Child(pid, read_end)
    assert child.await_start(0.0) is True
    assert child.poll() == Outcome(0)
    os.close(inherited)


def test_a_child_that_cannot_be_killed_is_not_forked_anew(monkeypatch: pytest.MonkeyPatch):
    """Catches: a child in an uninterruptible sleep that is no longer waited for."""
    kill = Child.kill
    monkeypatch.setattr(Child, "await_start", lambda child, timeout_s: False)
    monkeypatch.setattr(Child, "kill", lambda child: False)
    before = set(children_of(os.getpid()))
    child = fork_child(threading.Event().wait, keep=())
    assert set(children_of(os.getpid())) - before == {child.pid}
    assert child.poll() is None and kill(child) is True


def test_an_interrupt_while_a_child_begins_leaves_none(monkeypatch: pytest.MonkeyPatch):
    """Catches: a writer that is not known to its trainer, at work on the files of the next save."""

    def interrupted(child: Child, timeout_s: float) -> bool:
        raise KeyboardInterrupt

    before = set(children_of(os.getpid()))
    monkeypatch.setattr(Child, "await_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fork_child(threading.Event().wait, keep=())
    assert set(children_of(os.getpid())) <= before


def test_a_thread_that_ended_hides_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Catches: the watch over a writer's workers, ended by a thread that ended while it looked."""
    gate = FifoGate(tmp_path / "gate")
    child = fork_child(gate.hold, keep=())
    ended_thread = threading.Thread(target=int)
    ended_thread.start()
    ended_thread.join()
    listed = Path.iterdir

    def with_the_ended(place: Path) -> list[Path]:
        return [place / str(ended_thread.native_id), *listed(place)]

    monkeypatch.setattr(Path, "iterdir", with_the_ended)
    assert child.pid in children_of(os.getpid())
    assert child.kill() is True
    assert child.pid not in children_of(os.getpid())


def test_grandchildren_end_when_the_writer_ends_by_itself(tmp_path: Path):
    """F13. Catches: a worker that outlives its writer and writes late."""
    read_end, write_end = os.pipe()
    gate = FifoGate(tmp_path / "gate")

    def job() -> str:
        if os.fork() == 0:
            gate.hold()
            os._exit(0)
        return "done"

    child = fork_child(job, keep=(write_end,))
    os.close(write_end)
    assert ended(child).payload == "done"
    assert wait_for_eof(read_end) == b""
    os.close(read_end)


_prctl = ctypes.CDLL(None).prctl
_PR_SET_CHILD_SUBREAPER = 36
TRAINER = """
import os, signal, sys, threading
from ckptfsm.adapters.fork import fork_child
alive = int(sys.argv[2])
def job():
    os.write(alive, b"%d" % os.getpid())
    if sys.argv[3] == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait(60)
def trainer():
    fork_child(job, keep=(alive,))
    threading.Event().wait(60)
if sys.argv[1] == "main":
    trainer()
else:
    thread = threading.Thread(target=trainer)
    thread.start()
    thread.join()
"""


@pytest.mark.parametrize("state", ["running", "stopped"])
@pytest.mark.parametrize("thread", ["main", "other"])
def test_F29_a_child_dies_with_its_trainer(thread: str, state: str):
    """Catches: an orphaned writer that holds the port, the GPU or the disk of the restarted job."""
    read_end, write_end = os.pipe()
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, thread, str(write_end), state],
        cwd=ROOT,
        pass_fds=(write_end,),
    )
    os.close(write_end)
    try:
        assert select.select([read_end], [], [], WAIT_S)[0]
        child = int(os.read(read_end, 100))
        # In its new parent's session no group is orphaned, so a stopped child gets no SIGHUP.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        trainer.kill()
        trainer.wait(WAIT_S)
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        try:
            assert wait_for_eof(read_end) == b"", "the child outlived its trainer"
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    finally:
        trainer.kill()
        trainer.wait(WAIT_S)
        os.close(read_end)


def ask_too_late(parent: int) -> None:
    """Stands for ``_ask_kernel`` in a child whose parent ends first: no process will signal it."""
    while os.getppid() == parent:
        time.sleep(0.001)  # bounded: its parent ends at once
    _ask_kernel()


def test_F29_a_child_whose_trainer_died_before_it_could_ask_ends(monkeypatch: pytest.MonkeyPatch):
    """Catches: an orphaned writer that gets no signal: its trainer died between the fork and prctl."""
    read_end, write_end = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        monkeypatch.setattr(
            processes, "_BEGIN_S", 0.5
        )  # it waits for a child that asks after its end
        monkeypatch.setattr(processes, "_ask_kernel", partial(ask_too_late, os.getpid()))
        fork_child(partial(os.write, write_end, b"it writes"), keep=(write_end,))
        os._exit(0)
    os.close(write_end)
    os.waitpid(trainer, 0)
    assert wait_for_eof(read_end) == b""
    os.close(read_end)


def test_F29_a_child_outlives_the_thread_that_forked_it(tmp_path: Path):
    """Catches: a writer killed because a helper thread of the trainer ended."""
    gate = FifoGate(tmp_path / "gate")
    made: list[Child] = []
    read_end, write_end = os.pipe()

    def job() -> None:
        os.write(write_end, b".")
        gate.hold()

    def fork() -> None:
        made.append(fork_child(job, keep=(write_end,)))
        os.write(write_end, os.read(read_end, 1))  # it has begun: only now may this thread end
        native.append(threading.get_native_id())

    native: list[int] = []
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    while Path(f"/proc/self/task/{native[0]}").exists():  # the kernel's thread, not Python's
        os.sched_yield()
    os.close(read_end)
    os.close(write_end)
    gate.open()
    assert ended(made[0]).succeeded


def test_F29_a_child_does_not_hold_a_listening_socket(tmp_path: Path):
    """Catches: EADDRINUSE in the restarted job, because a writer still has the rendezvous port."""
    gate = FifoGate(tmp_path / "gate")
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    address = listening.getsockname()
    listening.set_inheritable(True)
    read_end, write_end = os.pipe()

    def job() -> int:
        os.write(write_end, b".")
        os.close(write_end)
        gate.hold()
        return held()

    child = fork_child(job, keep=(write_end,))
    assert select.select([read_end], [], [], WAIT_S)[0], "the child did not begin"
    os.close(write_end)
    os.close(read_end)
    listening.close()
    with socket.socket() as again:
        again.bind(address)
        again.listen()
    gate.open()
    assert ended(child).payload <= 4, "stdio and the pipe"


def held() -> int:
    """How many descriptors of this process lead to anything but /dev/null or the listing."""
    places = []
    for name in os.listdir("/proc/self/fd"):
        try:
            places.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            places.append("the listing itself")
    return sum(place not in (os.devnull, "the listing itself") for place in places)


def test_a_child_keeps_the_descriptors_it_was_told_to(tmp_path: Path):
    """Catches: a writer whose storage was closed under it."""
    kept = os.open(tmp_path, os.O_RDONLY)
    other = os.open(tmp_path, os.O_RDONLY)

    def job() -> tuple[bool, bool]:
        def is_kept(fd: int) -> bool:
            return os.readlink(f"/proc/self/fd/{fd}") != os.devnull

        return is_kept(kept), is_kept(other)

    assert run(job, keep=(kept,)).payload == (True, False)
    assert os.fstat(kept) and os.fstat(other)
    os.close(kept)
    os.close(other)


def test_SIGCHLD_ignored_is_a_failure_not_a_success():
    """Catches: an unknown exit status taken for 0."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        outcome = run(lambda: "written")
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert outcome.exitcode is None and not outcome.succeeded
    assert "SIGCHLD" in outcome.explain()


def test_other_code_reaped_the_child(tmp_path: Path):
    """Catches: the same, where a trainer's ``waitpid(-1)`` was faster."""
    child = fork_child(lambda: "written", keep=())
    os.waitpid(child.pid, 0)
    outcome = ended(child)
    assert outcome.exitcode is None and not outcome.succeeded


def test_only_a_group_that_is_certainly_ours_is_killed(monkeypatch: pytest.MonkeyPatch):
    """Catches: SIGKILL to strangers, who got the number of a writer that was reaped already."""
    killed: list[str] = []

    def killpg(group: int, number: int) -> None:
        stat = Path(f"/proc/{group}/stat")
        killed.append(stat.read_text().rpartition(")")[2].split()[0] if stat.exists() else "none")

    monkeypatch.setattr(os, "killpg", killpg)
    assert run(lambda: "written").succeeded
    assert killed == ["Z"], "before it is reaped, for workers that it left"
    child = fork_child(lambda: "written", keep=())
    os.waitpid(child.pid, 0)
    assert child.kill() is True
    assert killed == ["Z", "none"], (
        "nobody has the number: it is a group's of its workers, or nobody's"
    )
    child = fork_child(lambda: "written", keep=())
    os.waitpid(child.pid, 0)
    child.pid = os.getppid()  # as if it were a stranger's by now
    assert child.kill() is True and killed == ["Z", "none"]


def test_the_trainers_signal_handlers_do_not_run_in_a_child():
    """Catches: a writer that runs the trainer's SIGTERM handler, or dies of its Ctrl-C."""

    def handlers() -> tuple[bool, bool]:
        return (
            signal.getsignal(signal.SIGTERM) is signal.SIG_IGN,
            signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        )

    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        assert run(handlers).payload == (True, True)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_child_in_a_new_group():
    """Catches: a Ctrl-C at the terminal that kills the writer with the trainer's group."""
    group, pid = run(lambda: (os.getpgid(0), os.getpid())).payload
    assert group == pid


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_off_in_a_child_and_as_it_was_in_the_parent(enabled: bool):
    """Catches: the parent's CUDA tensors collected in a child; a trainer left without collector."""
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        assert run(gc.isenabled).payload is False
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_no_zombie_and_no_descriptor_is_left():
    """Catches: a job that runs out of descriptors or processes after a thousand saves."""
    run(lambda: None)
    before = set(os.listdir("/proc/self/fd"))
    children = [fork_child(lambda: None, keep=()) for _ in range(5)]
    children.append(fork_child(lambda: os._exit(3), keep=()))
    for child in children:
        ended(child)
    assert set(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ChildProcessError):
        os.waitpid(children[0].pid, os.WNOHANG)


def test_a_child_never_returns_into_its_parents_frames():
    """Catches: ``finally`` blocks and exit handlers of the trainer run a second time, in a child."""
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    try:
        child = fork_child(lambda: sys.exit("bye"), keep=(write_end,))
        assert not ended(child).succeeded
    finally:
        os.write(write_end, b"%d" % os.getpid())
        os.close(write_end)
    assert wait_for_eof(read_end) == b"%d" % os.getpid()
    os.close(read_end)
