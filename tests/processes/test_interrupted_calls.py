"""A Ctrl-C in the middle of a call: no attempt waits for ever, no writer and no root is forgotten."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import FakeDriver, fake_ports
from managers import QUICK, weights

from ckptfsm.adapters.fork import Child, fork_child
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.config import make_config
from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.errors import (
    RootBusy,
    SaveFailed,
)
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import RankJob, Storage
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.writers.rank_writer import launch_forked


class CtrlC:
    """Interrupts the training thread at a call of the coordinator's thread, once it is armed."""

    def __init__(self, method: str, path: str) -> None:
        self.method, self.path = method, path
        self.armed = False

    def __call__(self, index: int, method: str, path: str) -> None:
        if self.armed and method == self.method and self.path in path:
            self.armed = False
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A job in the background ignores Ctrl-C, and its tests with it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("where", ["asking", "told", "staging", "forking"])
def test_I10_a_save_interrupted_before_its_fork_is_not_in_flight_for_ever(
    where: str, tmp_path: Path
):
    """Catches: a Ctrl-C, which a notebook survives, in the middle of ``save``: the
    attempt waits for a writer that is never forked, and every later save runs into its deadline."""
    ctrl_c = CtrlC("mkdir", ".ckptfsm/staging/2.")
    storage = FaultStorage(PosixStorage(tmp_path / "root"), before=ctrl_c)
    driver = FakeDriver()

    def hook(record: TransitionRecord) -> None:
        if where == "told" and (record.step, record.dest) == (2, State.REQUESTED):
            raise KeyboardInterrupt

    def launch(storage: Storage, job: RankJob) -> Child:
        if where == "forking" and job.of.step == 2:
            raise KeyboardInterrupt
        return launch_forked(storage, job)

    ports = fake_ports(lambda create: storage, driver=driver, launch=launch)
    manager = Manager(ports, make_config({**QUICK, "busy_timeout_s": 5.0}), (hook,))
    manager.save(1, weights(1)).wait()
    ctrl_c.armed = where == "asking"
    if where == "staging":
        driver.failures["stage"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        manager.save(2, weights(2))
    driver.failures.clear()
    if where != "asking":  # its failure comes out here as on every other rank
        with pytest.raises(SaveFailed, match="interrupted|KeyboardInterrupt"):
            manager.wait_until_finished()
    manager.save(3, weights(3)).wait()
    # A handler waits for the end of the call: the save was begun, and goes on.
    assert manager.all_steps() == ([1, 2, 3] if where == "asking" else [1, 3])
    manager.close()


@pytest.mark.usefixtures("interruptible")
def test_I5_a_writer_whose_fork_was_interrupted_is_not_forgotten(tmp_path: Path):
    """Found by review. Catches: a Ctrl-C between the fork and the line that stores the writer. The
    attempt is cleaned up, and its files may be given to the next one, while the writer writes."""
    children: list[Child] = []

    def launch(storage: Storage, job: RankJob) -> Child:
        if children:
            return launch_forked(storage, job)
        children.append(fork_child(threading.Event().wait, keep=()))
        signal.raise_signal(signal.SIGINT)
        return children[0]

    manager = Manager(fake_ports(tmp_path / "root", launch=launch), make_config(QUICK))
    with pytest.raises(KeyboardInterrupt):
        manager.save(1, weights(1))
    manager.poll()
    assert manager.step_in_flight() == 1, "the save goes on"
    os.kill(children[0].pid, signal.SIGKILL)
    with pytest.raises(SaveFailed, match="SIGKILL"):
        manager.wait_until_finished()
    manager.save(1, weights(1)).wait()
    manager.close()


@pytest.mark.usefixtures("interruptible")
def test_I10_an_opening_that_is_interrupted_gives_the_root_back(tmp_path: Path):
    """Catches: a Ctrl-C while the root is opened: the process that survives it finds
    the root owned by itself."""
    ctrl_c = CtrlC("open_exclusive", "journal")
    ctrl_c.armed = True
    storage = FaultStorage(PosixStorage(tmp_path / "root"), before=ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        Manager(fake_ports(lambda create: storage), make_config(QUICK))
    deadline = time.monotonic() + 30
    while True:  # the other thread lets go later
        try:
            Manager(fake_ports(tmp_path / "root"), make_config(QUICK)).close()
            break
        except RootBusy:
            assert time.monotonic() < deadline


def told(of: AttemptId, source: State, dest: State) -> TransitionRecord:
    return TransitionRecord(
        seq=0,
        step=of.step,
        epoch=of.epoch,
        attempt=of.attempt,
        event="made up",
        source=source,
        dest=dest,
        run_seconds=0.0,
        at="now",
    )
