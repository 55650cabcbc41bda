"""The agent: reports that do not wait for a round, and its ends."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from fakes import FakeDriver, ThreadTransport, fake_ports, run_ranks

from ckptfsm.coordinator.coordinator import Coordinator
from ckptfsm.core.config import make_config
from ckptfsm.core.errors import PollMissingWarning, WriterDied
from ckptfsm.core.events import Event
from ckptfsm.core.layout import TRACKER
from ckptfsm.core.ports import Mailbox, OneRank
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.fakes import FifoGate

WAIT_S = 15.0


class Shared:
    """A mailbox for threads that are ranks. ``broken``: nothing can be posted."""

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken
        self.letters: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.posted: list[Event] = []
        self.closed = threading.Event()

    def post(self, events: Sequence[Event]) -> None:
        if self.broken:
            raise OSError("no connection")
        for event in events:
            self.posted.append(event)
            self.letters.put(event)

    def collect(self) -> list[Event]:
        found = []
        while not self.letters.empty():
            found.append(self.letters.get())
        return found

    def close(self) -> None:
        self.closed.set()


def manager_of(
    root: Path, mailbox: Mailbox | None, transport=None, before_write=None, **settings
) -> Manager:
    driver = FakeDriver(transport.rank if transport is not None else 0)
    driver.before_write = before_write or driver.before_write
    ports = fake_ports(root, driver=driver, transport=transport, mailbox=lambda: mailbox)
    return Manager(ports, make_config({"exit_timeout_s": 1.0, **settings}))


def await_tracker(root: Path, step: int) -> bool:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if (root / TRACKER).exists() and (root / TRACKER).read_text().strip() == str(step):
            return True
        time.sleep(0.002)
    return False


def test_a_save_of_one_rank_is_tracked_without_a_round(tmp_path):
    """Catches: a trainer that computes for hours, and finds its save of before still in flight."""
    with manager_of(tmp_path, OneRank()) as manager:
        for step in (1, 2):
            handle = manager.save(step, {"w": step})
            assert await_tracker(tmp_path, step)
            assert not handle.done
            manager.wait_until_finished()
            assert handle.done
        assert manager.all_steps() == [1, 2]


@pytest.mark.parametrize("killed", [False, True])
def test_reports_that_come_by_both_ways_are_no_warning(tmp_path, caplog, killed):
    """Catches: two warnings of rejected reports in the log of each save."""
    gate = FifoGate(tmp_path / "gate")
    settings = {"before_write": gate.hold if killed else None, "on_failure": "warn"}
    with manager_of(tmp_path / "root", OneRank(), **settings) as manager:
        handle = manager.save(1, {"w": 1})
        writer = manager._share.writer
        assert writer is not None
        if killed:
            assert writer.process.kill(WAIT_S)
        else:
            assert await_tracker(tmp_path / "root", 1)
        manager._client.ask(Coordinator.nothing)
        manager._participant.exchange()
        for event in writer.poll(0.0):
            manager._client.ask(Coordinator.report, [event])
        with contextlib.suppress(WriterDied):
            handle.wait()
    assert "a report is rejected" not in caplog.text


def test_reports_of_other_ranks_need_no_round(tmp_path):
    """Catches: a rank that computes, and holds up the save of all."""
    box = Shared()

    def run(transport: ThreadTransport) -> list[int]:
        with manager_of(tmp_path, box, transport) as manager:
            manager.save(1, {"w": transport.rank})
            assert await_tracker(tmp_path, 1)
            manager.wait_until_finished()
            return manager.all_steps()

    assert run_ranks(2, run) == [[1], [1]]
    assert [event.name for event in box.posted] == ["writer_forked", "shard_reported"]
    assert {event.rank for event in box.posted} == {1}


def test_without_its_mailbox_a_rank_reports_in_rounds(tmp_path, caplog):
    """Catches: a broken connection that ends a job, or is never told; a save that is lost with it."""
    box = Shared(broken=True)

    def run(transport: ThreadTransport) -> list[int]:
        with manager_of(tmp_path, box, transport) as manager:
            manager.save(1, {"w": transport.rank})
            manager.wait_until_finished()
            return manager.all_steps()

    assert run_ranks(2, run) == [[1], [1]]
    assert caplog.text.count("reports of saves now wait for poll(): OSError: no connection") == 1
    assert box.closed.wait(WAIT_S)


def test_a_failure_is_raised_by_poll(tmp_path):
    """Catches: an error that the agent has seen, and no call of the trainer raises."""
    gate = FifoGate(tmp_path / "gate")
    with manager_of(tmp_path / "root", OneRank(), before_write=gate.hold) as manager:
        handle = manager.save(1, {"w": 1})
        assert manager._share.writer.process.kill(WAIT_S)
        with pytest.raises(WriterDied):
            manager.wait_until_finished()
        assert isinstance(handle.exception(), WriterDied)


def test_a_trainer_without_polls_is_told_that_failures_are_not_seen(tmp_path):
    """Catches: the advice that only ``poll`` tracks, which is not so with an agent."""
    with manager_of(tmp_path, OneRank(), poll_warning_steps=2) as manager:
        manager.save(1, {"w": 1})
        manager.should_save(2)
        with pytest.warns(PollMissingWarning, match="its failure would not be seen"):
            manager.should_save(5)
        manager.wait_until_finished()


def test_the_thread_ends_with_its_manager(tmp_path):
    """Catches: a thread, or an open port, for each manager that ever was."""
    before = threading.active_count()
    for _ in range(3):
        box = Shared()
        manager = manager_of(tmp_path, box)
        agent = manager._share.agent
        assert agent.alive
        manager.close()
        agent._thread.join(WAIT_S)
        assert not agent.alive
        assert box.closed.is_set()
    assert threading.active_count() <= before + 1
