"""Signals that arrive while a child gets an owner: put off, not lost.

Each test says what it would catch. The signals are real.
"""

from __future__ import annotations

import _signal
import ctypes
import faulthandler
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptfsm.adapters.signals import OneCall, PosixDeferredSignals

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The signals that the trainer's handlers got; the one for SIGINT raises, as usual."""
    said: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        said.append(number)
        raise KeyboardInterrupt

    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, interrupt),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda number, frame: said.append(number)),
        signal.SIGUSR1: signal.signal(signal.SIGUSR1, signal.SIG_IGN),
        signal.SIGUSR2: signal.signal(signal.SIGUSR2, signal.SIG_DFL),
    }
    yield said
    for number, handler in before.items():
        signal.signal(number, handler)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in signal.valid_signals()]


def test_a_handler_runs_at_the_end_of_the_block(heard: list[int]):
    """Catches: a Ctrl-C between a fork and the line that stores the child; one that is lost."""
    before, stored = handlers(), []
    with pytest.raises(KeyboardInterrupt), PosixDeferredSignals():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        stored.append(list(heard))
    assert stored == [[]]
    assert heard == [signal.SIGINT, signal.SIGTERM], "each of them, in order"
    assert handlers() == before
    signal.raise_signal(signal.SIGTERM)
    assert heard[2:] == [signal.SIGTERM]


def test_an_error_in_the_block_comes_out(heard: list[int]):
    """Catches: a fork that failed, taken for one that was stored; a job that cannot be ended."""
    before = handlers()
    with pytest.raises(BlockingIOError), PosixDeferredSignals():
        signal.raise_signal(signal.SIGTERM)
        raise BlockingIOError
    assert (heard, handlers()) == ([signal.SIGTERM], before)


def test_blocks_may_be_nested(heard: list[int]):
    """Catches: an inner block that ends the outer one's wait."""
    before, stored = handlers(), []
    with PosixDeferredSignals():
        with PosixDeferredSignals():
            signal.raise_signal(signal.SIGTERM)
        stored.append(list(heard))
    assert (stored, heard, handlers()) == ([[]], [signal.SIGTERM], before)


def for_the_kernel(number: int) -> tuple[bytes, bytes]:
    """Handler and flags of a signal: of a ``struct sigaction`` of glibc with 64 bits."""
    found = ctypes.create_string_buffer(256)
    assert ctypes.CDLL(None).sigaction(number, None, found) == 0
    return found.raw[:8], found.raw[136:140]


def test_the_kernels_setting_of_a_handler_comes_back(heard: list[int], tmp_path: Path):
    """Catches: a handler in C above Python's that is gone after the first save, as a library sets
    it. Calls that a signal did not interrupt before (asyncio asks for that), and now does."""
    signal.siginterrupt(signal.SIGINT, False)
    with (tmp_path / "trace").open("w") as trace:
        faulthandler.register(signal.SIGTERM, file=trace, chain=True)
        before = [for_the_kernel(number) for number in (signal.SIGINT, signal.SIGTERM)]
        with PosixDeferredSignals():
            pass
        assert [for_the_kernel(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
        signal.raise_signal(signal.SIGTERM)
        faulthandler.unregister(signal.SIGTERM)
    assert "most recent call first" in (tmp_path / "trace").read_text()
    assert heard == [signal.SIGTERM]


class Strike:
    """Stands for ``_signal.signal``: a signal arrives just before or after its nth call."""

    def __init__(self, number: int, nth: int, *, early: bool) -> None:
        self.number, self.left, self.early, self.set = number, nth, early, _signal.signal

    def __call__(self, number: int, handler: object) -> object:
        self.left -= 1
        if self.left == 0 and self.early:
            signal.raise_signal(self.number)
        before = self.set(number, handler)
        if self.left == 0 and not self.early:
            signal.raise_signal(self.number)
        return before


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_on_the_way_in_or_out_is_not_lost(
    number: int, nth: int, early: bool, heard: list[int], monkeypatch: pytest.MonkeyPatch
):
    """Catches: a handler that is never called again, because another one raised on the way."""
    ended = "left"
    with monkeypatch.context() as patched:
        patched.setattr(_signal, "signal", Strike(number, nth, early=early))
        try:
            with PosixDeferredSignals():  # two handlers are put off, and two put back
                pass
        except KeyboardInterrupt:
            ended = "raised"
    assert (heard, ended) == ([number], "raised" if number == signal.SIGINT else "left")
    signal.raise_signal(signal.SIGTERM)
    assert heard[1:] == [signal.SIGTERM], "whatever stands there passes it on"


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("nth", [3, 4])
def test_one_that_was_put_off_is_not_lost_where_another_comes_on_the_way_out(
    nth: int, early: bool, heard: list[int], monkeypatch: pytest.MonkeyPatch
):
    """Catches: a SIGTERM that waited and is never heard, and a wrapper that stands where the trainer's
    handler stood, since a Ctrl-C raised while handlers were put back."""
    before = handlers()
    with monkeypatch.context() as patched:
        patched.setattr(_signal, "signal", Strike(signal.SIGINT, nth, early=early))
        with pytest.raises(KeyboardInterrupt), PosixDeferredSignals():
            signal.raise_signal(signal.SIGTERM)
    assert sorted(heard) == [signal.SIGINT, signal.SIGTERM]
    assert handlers() == before


def test_other_threads_have_no_handlers():
    """Catches: a save from another thread that fails, since only the main one may set handlers."""
    ended: list[bool] = []

    def fork() -> None:
        with PosixDeferredSignals():
            ended.append(True)

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    assert ended == [True]


def test_a_thread_that_may_set_no_handler_goes_on(monkeypatch: pytest.MonkeyPatch):
    """Catches: a save that fails because the program's interpreter was begun in another thread."""

    def refuses(number: int, handler: object) -> None:
        raise ValueError("signal only works in main thread of the main interpreter")

    monkeypatch.setattr(_signal, "signal", refuses)
    done = []
    with PosixDeferredSignals():
        done.append(True)
    assert done == [True]


def test_a_handler_is_heard_where_the_block_asks(heard: list[int]):
    """Catches: a wait of minutes that no Ctrl-C ends; a handler that runs twice."""
    waits = PosixDeferredSignals()
    with waits:
        assert waits.hear() is None
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert heard == []
        assert isinstance(waits.hear(), KeyboardInterrupt)
        assert heard == [signal.SIGTERM, signal.SIGINT]
    assert len(heard) == 2


def test_a_thousand_of_one_signal_are_one(heard: list[int]):
    """Found by review. Catches: handlers of a timer that are run one inside the other, until Python has
    no stack left; a frame that is kept for each."""
    with PosixDeferredSignals():
        for _ in range(5000):
            signal.raise_signal(signal.SIGTERM)
    assert heard == [signal.SIGTERM]


def test_a_handler_that_another_one_set_stays(heard: list[int]):
    """Catches: a trainer that loses the handler which it set for the second Ctrl-C."""

    def second(number: int, frame: object) -> None:
        heard.append(-number)

    def first(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, second)

    signal.signal(signal.SIGTERM, first)
    waits = PosixDeferredSignals()
    with waits:
        signal.raise_signal(signal.SIGTERM)
        waits.hear()
    signal.raise_signal(signal.SIGTERM)
    assert heard == [-signal.SIGTERM]


def test_a_call_inside_a_call_is_one_call(heard: list[int]):
    """Catches: handlers that run at the end of an inner call, while the outer one has more to do."""
    one_call, stored = OneCall(PosixDeferredSignals), []
    with pytest.raises(KeyboardInterrupt), one_call.running():
        with one_call.running():
            signal.raise_signal(signal.SIGINT)
        stored.append(list(heard))
    assert (stored, heard) == ([[]], [signal.SIGINT])
    with one_call.running():
        assert one_call.hear() is None


class Elastic(Exception):
    """The exception of a handler that is no exit, as torchelastic's."""


@pytest.fixture
def elastic(heard):
    """A handler of SIGUSR1 that raises an ``Exception``."""

    def handler(number: int, frame: object) -> None:
        raise Elastic

    signal.signal(signal.SIGUSR1, handler)  # put back by ``heard``


def test_only_an_exit_ends_a_wait_for_one(heard):
    one_call = OneCall(PosixDeferredSignals)
    with one_call.running():
        signal.raise_signal(signal.SIGINT)
        assert isinstance(one_call.check_exit(), KeyboardInterrupt)
        assert one_call.hear() is None, "it was told"


def test_another_exception_of_a_handler_is_raised_at_the_end(elastic):
    """Catches: a handler's exception that is lost, or counted as an error of the save."""
    one_call, done = OneCall(PosixDeferredSignals), []
    with pytest.raises(Elastic), one_call.running():
        signal.raise_signal(signal.SIGUSR1)
        done.append(one_call.check_exit())
    assert done == [None]
    with one_call.running():
        assert one_call.hear() is None


def test_another_exception_of_a_handler_is_heard_later(elastic):
    one_call = OneCall(PosixDeferredSignals)
    with one_call.running():
        signal.raise_signal(signal.SIGUSR1)
        assert one_call.check_exit() is None
        assert isinstance(one_call.hear(), Elastic)


def test_a_handler_that_left_the_manager_is_heard_at_once(elastic):
    one_call = OneCall(PosixDeferredSignals)
    with pytest.raises(Elastic), one_call.running():
        one_call.left = True
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(Elastic):
            one_call.check_exit()


IN_THE_FORK = """
import logging, os, signal, threading
from ckptfsm.adapters.signals import PosixDeferredSignals
from ckptfsm.adapters.fork import fork_child
signal.signal(signal.SIGINT, signal.default_int_handler)
me = os.getpid()
def strike():
    if os.getpid() == me:
        signal.raise_signal(signal.SIGINT)
os.register_at_fork(before=strike, after_in_parent=strike)
child = None
try:
    with PosixDeferredSignals():
        child = fork_child(lambda: "written", keep=())
except KeyboardInterrupt:
    print("interrupted,", child.wait(20).payload)
"""


def test_an_interrupt_inside_the_fork_is_not_swallowed():
    """Catches: a Ctrl-C that CPython prints and forgets, because it came in a call before or after
    the fork. A Ctrl-C from logging's hook would leave logging's lock held for good."""
    command = [sys.executable, "-c", IN_THE_FORK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("interrupted, written", "", 0)


LOADER = """
import os, signal, subprocess, sys
from torch.utils.data import DataLoader
from ckptfsm import shield_worker
notices = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
for notice in notices:
    signal.signal(notice, lambda *_: None)  # as a manager with preemption_signals does
batches = iter(DataLoader(range(200), num_workers=2, worker_init_fn=shield_worker))
next(batches), next(batches)  # one of each worker: both are shielded
for notice in notices:
    kill = ["kill", f"-{int(notice)}", "--", f"-{os.getpgrp()}"]
    subprocess.run(kill, check=True, start_new_session=True)
print(2 + sum(1 for _ in batches), flush=True)
left = iter(DataLoader(range(200), num_workers=1, worker_init_fn=shield_worker))
next(left)
sys.exit(3)
"""


def test_the_workers_of_a_data_loader_outlive_a_notice_and_not_their_trainer():
    """Catches: a notice to a process group that kills the workers, so that the last save is not made;
    a trainer that waits for ever for its workers, when it exits in the middle of an epoch."""
    pytest.importorskip("torch")
    command = [sys.executable, "-c", LOADER]
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, start_new_session=True
    )
    assert (ran.stdout.strip(), ran.returncode) == ("200", 3), ran.stderr
