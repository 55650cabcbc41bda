"""A process beside its trainer: messages, the deaths of both ends, and its inheritance."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import ckptfsm
from ckptfsm.adapters import spawn
from ckptfsm.adapters.fork import fork_child
from ckptfsm.adapters.memory import MemoryOf, OwnMemory
from ckptfsm.adapters.spawn import Spawned
from ckptfsm.adapters.tied import TiedProcess

WAIT_S = 20.0
ECHO = "spawned_echo"
HERE = str(Path(__file__).parent)


@pytest.fixture
def echo(monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    made: list[Spawned] = []

    def start() -> Spawned:
        made.append(Spawned(ECHO, "main"))
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.close()


def answers(process: Spawned, count: int) -> list[object]:
    deadline = time.monotonic() + WAIT_S
    found: list[object] = []
    while len(found) < count and time.monotonic() < deadline:
        found += process.listen(0.1)
    assert len(found) == count, found
    return found


def answer(process: Spawned) -> object:
    return answers(process, 1)[0]


def is_gone(pid: int, within_s: float = WAIT_S) -> bool:
    """Wait until a process has ended."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    ended, _, _ = select.select([watched], [], [], within_s)
    os.close(watched)
    return bool(ended)


def test_messages_arrive_whole_and_in_order(echo):
    """Catches: a long message that is cut, or two short ones that are one."""
    process = echo()
    process.send(("say", b"x" * 3_000_000))
    assert answer(process) == b"x" * 3_000_000
    sent = ["short", {"a": [1, 2]}, b""]
    for message in sent:
        process.send(("say", message))
    assert answers(process, 3) == sent


def test_descriptors_travel(echo, tmp_path):
    """Catches: a process that opens the root by its path, where another directory may be by now."""
    process = echo()
    directory = os.open(tmp_path, os.O_RDONLY)
    process.send(("stat", None), [directory])
    found = os.fstat(directory)
    os.close(directory)
    assert answer(process) == (found.st_dev, found.st_ino)


def test_nothing_else_is_inherited(echo, tmp_path):
    """Catches: a listening socket or a lock that a dead trainer's writer keeps; a busy directory."""
    kept = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(kept, True)
    process = echo()
    process.send(("inherited", None))
    descriptors, cwd, modules = answer(process)
    os.close(kept)
    assert [
        path for path in descriptors if not path.startswith(("/dev/null", "socket:", "anon_"))
    ] == []
    assert len([path for path in descriptors if path.startswith("socket:")]) == 1
    assert (cwd, {"torch", "numpy", "pytest"} & set(modules)) == ("/", set())


def test_nice_values_are_set(echo):
    """Catches: a writer that takes the processor, or the disk, from the trainer."""
    process = echo()
    process.send(("be_considerate", 7))
    nice, of_a_new_thread, idle, of_the_session = answer(process)
    assert nice == of_a_new_thread == os.nice(0) + 7
    assert idle == (2 << 13) | 7, "not the last of the best-effort class"
    assert of_the_session in ([], ["7"]), (
        "a nice value weighs only within a session, on some kernels"
    )


def test_F1_its_death_is_told(echo):
    """Catches: a dead process that is waited for."""
    process = echo()
    process.send(("say", "here"))
    assert answer(process) == "here"
    os.kill(process.pid, signal.SIGKILL)
    assert is_gone(process.pid)
    assert process.exitcode() == -signal.SIGKILL
    assert process.listen() == []
    with pytest.raises(OSError, match="Broken pipe|reset"):
        process.send("nobody hears this")


def test_words_before_its_death_are_heard(echo):
    """Catches: a result that is lost because the process ended right after it."""
    process = echo()
    process.send(("say_and_end", b"y" * 1000))
    assert is_gone(process.pid)
    assert process.exitcode() == 3
    assert process.listen() == [b"y" * 1000]


def test_kill_ends_all_it_started(echo):
    """Catches: a worker of the process that writes on."""
    process = echo()
    process.send(("start_child", None))
    child = answer(process)
    assert process.kill()
    assert is_gone(child)


def test_a_signal_that_is_meant_for_the_trainer_does_not_end_it(echo):
    """Catches: a save that fails because its trainer was told to end, or to save."""
    process = echo()
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        os.kill(process.pid, number)  # it does not run yet
    process.send(("session", None))
    assert answer(process) != os.getsid(0), "a Ctrl-C at the terminal"
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        os.kill(process.pid, number)
    process.send(("say", "alive"))
    assert answer(process) == "alive"


def test_I7_all_groups_of_its_session_end_with_a_process(tmp_path):
    """Catches: an upload that outlives the process of the jobs, and reads a step without a lease."""
    os.mkfifo(tmp_path / "ready")
    work = "timeout 600 sh -c 'echo $PPID > ready; exec sleep 600' & wait"
    null = os.open(os.devnull, os.O_RDWR)
    process = TiedProcess(["/bin/sh", "-c", work], [null] * 3, cwd=str(tmp_path))
    os.close(null)
    child = int((tmp_path / "ready").read_text())
    assert os.getpgid(child) == child
    os.kill(process.pid, signal.SIGKILL)
    gone = is_gone(child, 2.0)
    if not gone:
        os.kill(child, signal.SIGTERM)
    assert gone


TRAINER = """
import os, signal, sys, threading, time
signal.alarm(90)  # its test may be gone before it reads the pid
from ckptfsm.adapters.spawn import Spawned
from ckptfsm.adapters.tied import TiedProcess
made = []
class Long:
    # a program that asks the kernel for nothing
    def __init__(self):
        null = os.open(os.devnull, os.O_RDWR)
        self.process = TiedProcess(["/bin/sleep", "60"], [null] * 3)
        self.pid = self.process.pid
def start():
    if "program" in sys.argv[1]:
        made.append(Long())
        return
    made.append(Spawned("spawned_echo", "main"))
    made[0].send(("say", "here"))
    while not made[0].listen(0.1): assert made[0].exitcode() is None
if "thread" in sys.argv[1]:
    thread = threading.Thread(target=start)
    thread.start()
    while os.path.exists(f"/proc/self/task/{thread.native_id}"): time.sleep(0.01)
else:
    start()
[process] = made
if sys.argv[1] == "loader" and os.fork() == 0:
    time.sleep(60)
if "stopped" in sys.argv[1]:
    os.kill(process.pid, signal.SIGSTOP)
if sys.argv[1] == "thread":
    process.send(("say", "there"))
    while not process.listen(0.1): assert process.exitcode() is None
print(process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("number", "also"),
    [
        (signal.SIGTERM, "alone"),
        (signal.SIGKILL, "alone"),
        (signal.SIGKILL, "loader"),
        (signal.SIGKILL, "stopped"),
        (signal.SIGKILL, "thread"),
        (signal.SIGKILL, "stopped_program"),
        (signal.SIGKILL, "stopped_program_of_thread"),
    ],
)
def test_F3_it_ends_with_its_trainer(number, also):
    """Catches: a writer that outlives its trainer, while a forked data loader keeps the socket of that,
    or while it is stopped, even before its first instruction; one that ends with the thread that
    started it."""
    path = os.pathsep.join([HERE, *sys.path])
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, also],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    assert trainer.stdout is not None
    pid = int(trainer.stdout.readline())
    trainer.send_signal(number)
    trainer.wait(WAIT_S)
    gone = is_gone(pid)
    if not gone:
        os.kill(pid, signal.SIGKILL)
    assert gone
    if also == "loader":
        os.killpg(trainer.pid, signal.SIGKILL)
    trainer.stdout.close()


def test_a_process_that_the_trainer_forked_can_do_it_no_harm(echo):
    """Catches: a data loader that kills the writer, or takes its messages, at its exit."""
    process = echo()
    child = os.fork()
    if child == 0:
        heard = process.listen(0.1), process.exitcode(), process.kill(0.0)
        try:
            process.send(("say", "stolen"))
        except OSError:
            os._exit(0 if heard == ([], None, False) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    process.send(("say", "mine"))
    assert answer(process) == "mine"


def test_a_message_to_a_stopped_process_goes_on_later(echo, tmp_path):
    """Catches: a trainer that waits for a process which does not read; a message that is cut, or that
    overtakes another one; an error that names nothing where descriptors have no room."""
    process = echo()
    process.send(("say", 5))
    assert answer(process) == 5
    os.kill(process.pid, signal.SIGSTOP)
    large = bytes(range(256)) * (4 << 12)
    process.send(("say", large))
    process.send(("say", "behind it"))
    assert process.listen() == []
    directory = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(TimeoutError, match="the other process has no room for a message"):
        process.send(("stat", None), [directory])
    os.close(directory)
    before = process.sent_at
    process.resume()
    assert answers(process, 2) == [large, "behind it"]
    assert process.sent_at > before
    process.send(("say", "whole"))
    assert answer(process) == "whole"


def test_F1_a_process_that_dies_with_half_a_message_is_heard(echo):
    """Catches: an error, or a busy loop, instead of the end of the process."""
    process = echo()
    os.kill(process.pid, signal.SIGSTOP)
    process.send(("say", bytes(4 << 20)))
    os.kill(process.pid, signal.SIGKILL)
    assert is_gone(process.pid)
    assert (process.listen(), process.is_open) == ([], False)
    assert process.exitcode() == -signal.SIGKILL


CLOSED = """
import os, sys
from ckptfsm.adapters.fork import fork_child
from ckptfsm.adapters.spawn import Spawned
for fd in map(int, sys.argv[1:]):
    os.close(fd)
process = Spawned("spawned_echo", "main")
process.send(("say", "here"))
while not (heard := process.listen(0.1)):
    assert process.exitcode() is None
def noisy():
    for fd in (1, 2):
        try:
            os.write(fd, b"noise")
        except OSError:
            pass
    return "written"
os._exit(0 if heard == ["here"] and fork_child(noisy, keep=()).wait().succeeded else 1)
"""


@pytest.mark.parametrize("closed", ["0", "1", "2", "0 1 2"])
def test_standard_streams_of_the_trainer_may_be_closed(closed):
    """Catches: a trainer that runs as a daemon, whose writer takes the null device for its trainer, or
    whose writer's output is taken for its result."""
    path = os.pathsep.join([HERE, *sys.path])
    command = [sys.executable, "-c", CLOSED, *closed.split()]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("found", ["", None, "/nonexistent/python", "no thread"])
def test_a_start_that_fails_is_an_error_of_the_system(monkeypatch, found):
    """Catches: an error that no caller expects, or none, where the interpreter was replaced, Python is
    embedded, or a container has no more processes; descriptors that each try leaves open."""
    before = len(os.listdir("/proc/self/fd"))
    if found == "no thread":
        monkeypatch.setattr(threading.Thread, "start", no_thread)
    else:
        monkeypatch.setattr(sys, "executable", found)
    with pytest.raises(OSError, match="thread|python|sys.executable"):
        Spawned(ECHO, "main")
    assert len(os.listdir("/proc/self/fd")) == before


def test_modules_of_python_come_before_those_of_packages(monkeypatch, tmp_path):
    """Catches: a backport in site-packages that the trainer never imports, and the process does: no
    writer process would ever start."""
    shutil.copytree(Path(ckptfsm.__file__).parent, tmp_path / "ckptfsm")
    (tmp_path / "dataclasses.py").write_text("raise ImportError('for Python 3.6')\n")
    made_in = str(tmp_path / "ckptfsm/adapters/spawn.py")
    monkeypatch.setattr(spawn, "__file__", made_in)
    monkeypatch.setattr(sys, "path", [*sys.path, HERE, str(tmp_path)])
    process = Spawned(ECHO, "main")
    process.send(("say", 5))
    assert answer(process) == 5
    process.kill()
    process.close()


def test_a_package_that_is_not_on_the_path_is_found(monkeypatch):
    """Catches: a trainer in the directory of its sources, or an editable install, without a writer."""
    outer = str(Path(ckptfsm.__file__).resolve().parents[1])
    others = [entry for entry in sys.path if Path(entry).resolve() != Path(outer)]
    monkeypatch.setattr(sys, "path", ["", *others])
    assert spawn.import_path()[0] == outer


def test_memory_of_another_process_is_read(echo):
    """Catches: bytes of the wrong place, or of the reader."""
    process = echo()
    process.send(("address", b"content of the other" * 1000))
    address, size = answer(process)
    found = bytearray(size)
    MemoryOf(process.pid).read(address, memoryview(found))
    assert found == b"content of the other" * 1000


def test_memory_that_is_not_there_is_an_error(echo):
    """Catches: zeros instead of a tensor that was freed."""
    process = echo()
    with pytest.raises(OSError, match="process_vm_readv") as raised:
        MemoryOf(process.pid).read(8, memoryview(bytearray(16)))
    assert raised.value.errno == errno.EFAULT


def test_memory_of_this_process_is_read():
    """Catches: a copy of the wrong length."""
    source = ctypes.create_string_buffer(b"abcdef", 6)
    found = bytearray(6)
    OwnMemory().read(ctypes.addressof(source) + 1, memoryview(found)[1:4])
    assert found == b"\0bcd\0\0"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_process_of_the_user_that_the_trainer_was_ends_with_its_socket(echo):
    """Catches: a trainer that gave up root, and ends with a bare PermissionError at its last call."""

    def trainer() -> tuple[bool, bool, bool]:
        process = echo()
        before = process.is_of_this_user
        os.setresgid(54321, 54321, 54321)
        os.setresuid(54321, 54321, 54321)
        return before, process.is_of_this_user, process.kill(WAIT_S)

    child = fork_child(trainer, keep=())
    assert child.wait(WAIT_S).payload == (True, False, True)
