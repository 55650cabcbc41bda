"""The progress of a save: of the handle on each rank, and as rank 0 shows it."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
from fakes import FakeDriver, fake_ports, run_ranks
from groups import GroupJob

from ckptfsm.adapters.progress_line import open_line
from ckptfsm.core.config import make_config
from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.errors import SaveFailed, SaveFailedWarning
from ckptfsm.core.events import ShardReported
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.core.ports import OneRank
from ckptfsm.core.progress import Progress, progress_of
from ckptfsm.core.requests import Accepted
from ckptfsm.ranks.manager import Manager
from ckptfsm.ranks.progress import ProgressDisplay
from ckptfsm.ranks.tickets import GroupPart
from ckptfsm.testing.fakes import FifoGate
from ckptfsm.testing.harness import SimClock

OF = AttemptId(7, 1, 1)
SAVE = Accepted(OF, False, (PartSpec("state"),))
WAIT_S = 30.0


def manager_of(
    root: Path, transport=None, *, mailbox=None, before_write=None, expected=None, **settings
) -> Manager:
    driver = FakeDriver(transport.rank if transport is not None else 0)
    driver.before_write, driver.expected_bytes = before_write, expected
    ports = fake_ports(root, driver=driver, transport=transport, mailbox=lambda: mailbox)
    return Manager(ports, make_config({"exit_timeout_s": 1.0, "progress": "log", **settings}))


def said(caplog) -> list[object]:
    return [r for r in caplog.records if getattr(r, "event", "") == "save_progress"]


class Line:
    """A terminal that keeps what it was shown. ``broken``: it is gone."""

    def __init__(self, width: int = 80, *, broken: bool = False) -> None:
        self.width, self.broken = width, broken
        self.drawn: list[str] = []
        self.ended: list[str] = []

    def draw(self, text: str) -> None:
        if self.broken:
            raise OSError("no terminal")
        self.drawn.append(text)

    def end(self, text: str) -> None:
        self.ended.append(text)


def shown(line: Line | None, clock: SimClock, mode: str = "auto", rank: int = 0) -> ProgressDisplay:
    return ProgressDisplay(mode, rank, clock, lambda: line)


def half() -> Progress:
    return progress_of(10**9, 2 * 10**9, 1.0)


def record(dest: State, source: State = State.FINALIZED) -> TransitionRecord:
    return TransitionRecord(
        seq=1, step=7, epoch=1, attempt=1, event="any", source=source, dest=dest
    )


# --------------------------------------------------------------------------------- the handle


def test_the_handle_tells_bytes_while_the_writer_writes(tmp_path):
    """Catches: a progress that is there only when the save is over."""
    gate = FifoGate(tmp_path / "gate")
    root = tmp_path / "root"
    with manager_of(root, before_write=gate.hold, expected=10_000) as manager:
        handle = manager.save(1, parts={"notes": b"n" * 5000, "state": {"w": 1}})
        held = gate.reached()
        during = handle.progress
        os.close(held)
        handle.wait()
        after = handle.progress
        skipped = type(handle)(2)
    assert during is not None and after is not None
    assert (during.written_bytes, during.total_bytes, during.durable) == (5000, 10_000, False)
    assert (after.durable, after.eta_s, after.fraction) == (True, 0.0, 1.0)
    assert 5000 < after.written_bytes != 10_000, "the size that it has, not the expected one"
    assert handle.progress == after, "it is over, and its time stands still"
    assert skipped.progress is None


@pytest.mark.parametrize("progress", ["log", "off"])
def test_a_failed_save_keeps_the_progress_of_its_end(tmp_path, caplog, progress):
    """Catches: a failed save whose time goes on, or that is told to be durable; a log line of a trainer
    that never asked for it."""
    caplog.set_level("INFO", logger="ckptfsm")
    settings = {"on_failure": "warn", "progress": progress}
    with manager_of(tmp_path, before_write=lambda *_: os._exit(3), **settings) as manager:
        handle = manager.save(1, {"w": 1})
        with pytest.raises(SaveFailed):
            handle.wait()
        with pytest.warns(SaveFailedWarning):
            manager.poll()
        found = handle.progress
        assert found is not None and not found.durable
        assert handle.progress == found
        lines = said(caplog)
    assert len(lines) == (progress == "log")
    for line in lines:
        assert line.tracked is False
        assert line.getMessage().startswith("step 1 failed after ")


def test_each_rank_has_its_own_progress_and_rank_0_logs_all(tmp_path, caplog):
    """Catches: a line for each rank, or with the bytes of one; a rank that tells another's."""
    caplog.set_level("INFO", logger="ckptfsm")

    def work(transport):
        with manager_of(tmp_path, transport) as manager:
            handle = manager.save(1, {"w": b"w" * 1000 * (1 + transport.rank)})
            handle.wait()
            return handle.progress.written_bytes

    results = run_ranks(2, work)
    assert all(isinstance(each, int) for each in results), results
    assert results[1] > 2000 > 1000 < results[0]
    (line,) = said(caplog)
    assert (line.step, line.bytes, line.tracked) == (1, sum(results), True)
    assert line.slowest_rank in (0, 1)
    assert "of 2" in line.getMessage()


@pytest.mark.parametrize("mailbox", [None, OneRank()])
def test_a_save_is_one_log_line_by_the_agent_and_by_rounds(tmp_path, caplog, mailbox):
    """Catches: reports that come by one way and are not heard, or twice by both."""
    caplog.set_level("INFO", logger="ckptfsm")
    with manager_of(tmp_path, mailbox=mailbox) as manager:
        sizes = []
        for step in (1, 2):
            handle = manager.save(step, {"w": b"w" * 100 * step})
            handle.wait()
            sizes.append(handle.progress.written_bytes)
    lines = said(caplog)
    assert [line.bytes for line in lines] == sizes
    assert [line.step for line in lines] == [1, 2]
    assert all(line.seconds > 0 and line.bytes_per_s > 0 for line in lines)


def test_a_worker_of_a_group_tells_its_share_and_the_controller_logs_all(tmp_path, caplog):
    """Catches: a controller's save of which nobody sees the progress."""
    caplog.set_level("INFO", logger="ckptfsm")
    job = GroupJob(tmp_path, {"actor": 2}, progress="log")
    workers = job.groups["actor"].workers
    assert [worker.progress for worker in workers] == [None, None]
    with job.controller as controller:
        save = controller.begin(1, {"data.pt": b"plain", "actor": GroupPart("actor")})
        own = save.handle.progress
        assert own is not None and own.total_bytes == 5
        job.groups["actor"].write(save.tickets["actor"], [{"w": 0}, {"w": 1}])
        save.handle.wait()
        shares = [worker.progress for worker in workers]
        assert all(share is not None and share.durable for share in shares)
        total = 5 + sum(share.written_bytes for share in shares)
    (line,) = said(caplog)
    assert (line.bytes, line.tracked) == (total, True)
    assert "of 3" in line.getMessage()


# --------------------------------------------------------------------------------- the display


def test_a_line_is_drawn_at_most_ten_times_a_second():
    """Catches: a terminal that is drawn as often as the agent looks."""
    line, clock = Line(), SimClock()
    display = shown(line, clock)
    display.look()
    display.start(SAVE, 2, half)
    for _ in range(30):
        display.look()
        clock.sleep(0.01)
    assert len(line.drawn) == 3
    assert line.drawn[0].startswith("saving step 7  ###")
    assert line.drawn[0].endswith("0/2 ranks")
    assert all(len(text) < 80 for text in line.drawn)


def test_reports_of_ranks_are_counted_once_and_the_last_is_named():
    """Catches: a report that the rounds repeat, and one of another attempt."""
    line, clock = Line(), SimClock()
    display = shown(line, clock)
    display.start(SAVE, 2, half)
    clock.sleep(1.0)
    first = ShardReported(OF, "state", 1, 2, 10**9)
    display.note_reports(
        [
            first,
            ShardReported(OF, "notes", 1, 2, 5),
            ShardReported(AttemptId(6, 1, 0), "state", 0, 2, 1),
        ]
    )
    clock.sleep(1.0)
    display.note_reports([first])
    display.look()
    assert line.drawn[-1].endswith("1/2 ranks")
    display.note_reports([ShardReported(OF, "state", 0, 2, 10**9 - 5)])
    clock.sleep(60.0)
    display.take(record(State.TRACKED))
    assert line.ended == ["step 7 saved: 2.0 GB in 2.0 s (1.0 GB/s), rank 0 was the last of 2"]
    display.look()
    display.leave()
    assert len(line.ended) == 1


@pytest.mark.parametrize(
    ("dest", "word"), [(State.FAILED, "failed"), (State.QUARANTINED, "was withdrawn")]
)
def test_a_lost_save_ends_its_line(dest, word):
    """Catches: a line that stays on the terminal as if the save went on."""
    line = Line()
    display = shown(line, SimClock())
    display.start(SAVE, 1, half)
    display.take(record(dest, State.FORKED))
    assert line.ended == [f"step 7 {word} after 1.0 s, 1.0 GB of rank 0 were written"]


def test_a_save_that_is_left_ends_its_line():
    """Catches: a shell whose prompt stands behind the line of a trainer that was interrupted."""
    line = Line()
    display = shown(line, SimClock())
    display.start(SAVE, 1, half)
    display.leave()
    display.leave()
    assert len(line.ended) == 1 and "left in flight" in line.ended[0]


def test_a_terminal_that_is_gone_ends_the_display_only(caplog):
    """Catches: a save that fails, or an agent that ends, because a window was closed."""
    caplog.set_level("INFO", logger="ckptfsm")
    clock = SimClock()
    display = shown(Line(broken=True), clock)
    display.start(SAVE, 1, half)
    display.look()
    display.take(record(State.TRACKED))
    events = [r.event for r in caplog.records]
    assert events == ["no_progress_line", "save_progress"]


def test_only_rank_0_shows_and_log_draws_nothing(caplog):
    """Catches: lines of several ranks over each other on one terminal."""
    caplog.set_level("INFO", logger="ckptfsm")
    line = Line()
    for mode, rank in (("log", 0), ("auto", 1), ("off", 0)):
        display = shown(line, SimClock(), mode, rank)
        display.start(SAVE, 1, half)
        display.note_reports([ShardReported(OF, "state", 0, 1, 5)])
        display.look()
        display.take(record(State.TRACKED))
    assert (line.drawn, line.ended) == ([], [])
    assert len(said(caplog)) == 1


def test_the_agent_draws_while_the_trainer_computes(tmp_path, monkeypatch):
    """Catches: a line that moves only when the trainer polls."""
    line, drawn = Line(), threading.Event()
    draw = line.draw
    monkeypatch.setattr(line, "draw", lambda text: (draw(text), drawn.set()))
    gate = FifoGate(tmp_path / "gate")
    with manager_of(tmp_path / "root", mailbox=OneRank(), before_write=gate.hold) as manager:
        manager._participant.display._open = lambda: line
        handle = manager.save(1, {"w": 1})
        held = gate.reached()
        assert drawn.wait(WAIT_S)
        os.close(held)
        handle.wait()
    assert line.ended and line.ended[0].startswith("step 1 saved: ")


# --------------------------------------------------------------------------------- the terminal


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 60 columns: its other end, and a function that makes it standard error."""
    ours, theirs = os.openpty()
    stream = os.fdopen(theirs, "w", encoding="utf-8", buffering=1)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    # pytest puts its capture into sys.stderr between the fixture and the test
    yield ours, lambda: monkeypatch.setattr(sys, "stderr", stream)
    stream.close()
    os.close(ours)


def test_a_line_replaces_the_last_and_the_end_stays(terminal):
    """Catches: pictures below each other, and a prompt behind the last one."""
    other_end, use = terminal
    use()
    line = open_line()
    assert line is not None and line.width == 60
    line.draw("first ####......")
    line.draw("second")
    line.end("the end")
    seen = ""
    while "the end\r\n" not in seen:
        seen += os.read(other_end, 10_000).decode()
    first, second, last = seen.split("\r\x1b[2K")[1:]
    assert "first" in first and first.endswith("\r")
    assert "second" in second and second.endswith("\r")
    assert last.endswith("the end\r\n")


def test_there_is_no_line_without_a_terminal_or_rich(terminal, monkeypatch, tmp_path):
    """Catches: control characters in a log file; a trainer that cannot start without rich."""
    terminal[1]()
    assert open_line() is not None
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "rich.console", None)
        assert open_line() is None
    with (tmp_path / "log").open("w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        assert open_line() is None
