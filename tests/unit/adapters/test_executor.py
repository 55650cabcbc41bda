"""The coordinator's thread: in order, bounded, and never in the way of the exit."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ckptfsm.adapters.executor import ThreadExecutor

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 10.0


@pytest.fixture
def executor():
    made = ThreadExecutor()
    yield made
    made.shutdown()


def test_work_runs_in_order(executor):
    """Catches: two changes of the disk at once, or in another order than they were asked for."""
    done: list[int] = []
    futures = [executor.submit(lambda i=i: done.append(i) or i) for i in range(200)]
    assert [f.result(WAIT_S) for f in futures] == list(range(200)) == done


def test_an_exception_belongs_to_its_future(executor):
    """Catches: an error that ends the thread, so that everything after it waits for ever."""
    bad = executor.submit(lambda: 1 // 0)
    good = executor.submit(lambda: "still here")
    assert isinstance(bad.exception(WAIT_S), ZeroDivisionError)
    assert good.result(WAIT_S) == "still here"


def test_I10_torchs_exception_belongs_to_its_future_too():
    """Catches: an error that is no ``Exception`` (torch has one) ending the thread: no question is
    answered any more, and every rank waits for its deadline."""

    class CheckpointException(BaseException):
        pass

    def work() -> None:
        raise CheckpointException

    executor = ThreadExecutor()
    bad, good = executor.submit(work), executor.submit(lambda: "still here")
    assert isinstance(bad.exception(WAIT_S), CheckpointException)
    assert good.result(WAIT_S) == "still here"
    executor.shutdown()


def test_work_runs_on_one_other_thread():
    """Catches: a hanging disk that hangs the training thread."""
    executor = ThreadExecutor()
    threads = {executor.submit(threading.get_ident).result(WAIT_S) for _ in range(5)}
    assert len(threads) == 1 and threading.get_ident() not in threads
    executor.shutdown()


def test_the_training_thread_does_not_wait():
    """Catches: ``submit`` that blocks while the disk hangs."""
    executor = ThreadExecutor()
    go = threading.Event()
    stuck = executor.submit(lambda: go.wait(WAIT_S))
    later = executor.submit(lambda: "later")
    assert not stuck.done() and not later.done()
    go.set()
    assert later.result(WAIT_S) == "later" and stuck.result() is True
    executor.shutdown()


def test_work_queued_at_shutdown_still_runs():
    """Catches: a lock that is never given back because the executor was told to stop."""
    executor = ThreadExecutor()
    go = threading.Event()
    executor.submit(lambda: go.wait(WAIT_S))
    last = executor.submit(lambda: "last")
    executor.shutdown()
    go.set()
    assert last.result(WAIT_S) == "last"


def test_the_queue_is_bounded():
    """Catches: memory that grows without end while a file system hangs."""
    executor = ThreadExecutor()
    go = threading.Event()
    executor.submit(lambda: go.wait(WAIT_S))
    with pytest.raises(queue.Full):
        for _ in range(20_000):
            executor.submit(lambda: None)
    go.set()


def test_a_hanging_disk_does_not_hang_the_exit():
    """I10. Catches: a process that cannot end because its executor waits for the disk."""
    code = (
        "import threading\n"
        "from ckptfsm.adapters.executor import ThreadExecutor\n"
        "reached = threading.Event()\n"
        "executor = ThreadExecutor()\n"
        "executor.submit(lambda: (reached.set(), threading.Event().wait()))\n"
        "reached.wait(10); executor.shutdown(); print('end')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout.strip()) == (0, "end"), done.stderr


def test_I10_a_storm_of_interrupts_leaves_no_lock_behind():
    """Catches: a Ctrl-C that leaves a lock held between the threads, so that both hang for good."""
    script = """
import signal
from ckptfsm.adapters.executor import ThreadExecutor
executor, hits, armed = ThreadExecutor(), 0, []
def strike(*_):
    if armed:
        armed.clear()
        raise KeyboardInterrupt
signal.signal(signal.SIGALRM, strike)
signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
while hits < 2_000:
    try:
        armed.append(True)
        promise = executor.submit(int)
        while not promise.done():
            promise.result(5.0)
        armed.clear()
    except KeyboardInterrupt:
        hits += 1
print(executor.submit(int).result(10.0))
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.stdout == "0\n", ended.stderr


def test_repeated_work_runs_on_the_coordinators_thread():
    """Catches: requests of people that wait for the trainer; a coordinator on two threads at once."""
    executor, threads = ThreadExecutor(), queue.SimpleQueue[int]()
    executor.repeat(lambda: threads.put(threading.get_ident()), 0.0)
    first, second = threads.get(timeout=WAIT_S), threads.get(timeout=WAIT_S)
    assert first == second == executor.submit(threading.get_ident).result(WAIT_S)
    executor.shutdown()


def test_repeated_work_that_fails_is_told_and_stops_no_other(caplog):
    """Catches: a thread that ends, so that every later question waits for its deadline."""
    executor = ThreadExecutor()
    executor.repeat(lambda: 1 // 0, 0.0)
    while executor.submit(lambda: executor._repeated).result(WAIT_S) is not None:
        pass
    assert [record.event for record in caplog.records] == ["repeated_work_ended"]
    assert executor.submit(lambda: "still here").result(WAIT_S) == "still here"
    executor.shutdown()
