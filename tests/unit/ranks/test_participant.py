"""A rank's side of the protocol: its writer, its reports, and the news that it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import fake_ports
from inline import InlineExecutor
from managers import QUICK
from sim_writers import SimWriters

from ckptfsm.core.config import make_config
from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Identity
from ckptfsm.core.requests import NothingInFlight
from ckptfsm.ranks.coordinator_client import Update
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.testing.harness import (
    FINISHERS,
    SimClock,
)
from ckptfsm.testing.simfs import SimDisk, SimStorage


def look(disk: SimDisk) -> SimStorage:
    return SimStorage(disk, "look")


def test_I1_nothing_is_cleaned_up_under_a_writer_that_may_live():
    """``gone-is-said-of-the-living``: a writer in an uninterruptible wait survives its SIGKILL."""
    disk, clock = SimDisk(), SimClock()
    writers = Immortal(disk)
    ports = fake_ports(
        lambda create: FaultStorage(SimStorage(disk, "trainer")),
        clock=clock,
        executor=InlineExecutor,
        identity=lambda: Identity("sim", 1, "boot:1", "nonce"),
        launch=writers,
    )
    ports.driver.finishers = FINISHERS
    manager = Manager(ports, make_config({"on_failure": "warn", "writer_timeout_s": 5.0}))
    manager.save(1, {"x": 1})
    clock.now += 10.0
    with pytest.warns(UserWarning):
        for _ in range(5):
            manager.poll()
    staging = look(disk).listdir(".ckptfsm/staging")
    assert len(staging) == 1, "its files were taken from under a writer that may live"
    writers.mortal = True
    for _ in range(5):
        manager.poll()
    assert look(disk).listdir(".ckptfsm/staging") == []


class Immortal(SimWriters):
    """Writers that no kill ends, until ``mortal``."""

    mortal = False

    def __call__(self, storage, job):
        writer = super().__call__(storage, job)
        kill = writer.kill
        writer.kill = lambda timeout_s: self.mortal and kill(timeout_s)
        return writer


def test_F24_an_interrupted_hook_loses_no_news(tmp_path: Path):
    """Catches: news that came together with the record of an interrupted hook, and
    never come again: the save stays in flight for this rank."""

    def hook(record: TransitionRecord) -> None:
        if record.dest is State.REQUESTED and record.step == 1:
            raise KeyboardInterrupt

    manager = Manager(fake_ports(tmp_path / "root"), make_config(QUICK))
    of = AttemptId(1, 1, 1)
    manager._participant._hooks = (hook,)
    ends = [(State.ABSENT, State.REQUESTED), (State.REQUESTED, State.FAILED)]
    ends.append((State.FAILED, State.DISCARDED))
    news = [told(of, source, dest) for source, dest in ends]
    numbered = tuple(enumerate((*news, NothingInFlight()), manager._client.taken))
    with pytest.raises(KeyboardInterrupt):
        manager._participant.take_update(Update(numbered))
    assert not manager._participant.view.quiet
    manager._participant.take_update(Update())
    assert manager._participant.view.quiet
    manager.close()


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
