"""Notes of a manager to its meters: how long a save kept the trainer waiting, and refusals."""

from __future__ import annotations

import pytest
from fakes import ShiftedClock, fake_ports
from managers import QUICK, weights

from ckptfsm.core.config import make_config
from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.errors import ManagerClosed, PollMissingWarning, StepExistsError
from ckptfsm.core.notes import Meter, Note, Refused, Stalled, Unpolled
from ckptfsm.core.ports import Outcome, RankJob, Storage
from ckptfsm.ranks.controller import Controller
from ckptfsm.ranks.manager import Manager
from ckptfsm.testing.fakes import FifoGate
from ckptfsm.writers.plain_files import FilesDriver


class Heard(Meter):
    """A meter that keeps its notes; ``records`` are the states that it heard of."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.states: list[str] = []

    def __call__(self, record: TransitionRecord) -> None:
        self.states.append(record.dest.value)

    def note(self, note: Note) -> None:
        self.notes.append(note)


class StillClock(ShiftedClock):
    """A clock that only ``advance`` moves."""

    def monotonic(self) -> float:
        return self._shift_s


class LateReader:
    """A writer that has read the state once the trainer has waited for two seconds."""

    holds_copy = must_wait = False

    def __init__(self, clock: ShiftedClock) -> None:
        self._clock = clock
        self.outcome: Outcome | None = None

    def __call__(self, storage: Storage, job: RankJob) -> LateReader:
        return self

    def await_copy(self, timeout_s: float) -> None:
        self._clock.advance(2.0)
        self.holds_copy = True

    def confirm(self) -> None:
        """Nothing is written."""

    def poll(self) -> Outcome | None:
        return self.outcome

    def wait(self, timeout_s: float) -> Outcome | None:
        return self.outcome

    def written_bytes(self) -> int:
        return 0

    def kill(self, timeout_s: float) -> bool:
        self.outcome = Outcome(-9)
        return True


@pytest.fixture
def heard():
    return Heard()


def opened(tmp_path, *hooks, settings=(), **ports) -> Manager:
    config = make_config({**QUICK, **dict(settings)})
    return Manager(fake_ports(tmp_path / "root", **ports), config, hooks)


def test_a_save_tells_how_long_it_kept_the_trainer(tmp_path, heard):
    """Catches: a stall without the making of the state, or that is told before the call has ended."""
    clock = StillClock()
    manager = opened(tmp_path, heard, clock=clock)
    manager.save(10, lambda: clock.advance(3.0) or weights(10))
    assert heard.notes == [Stalled(10, 3.0)]
    manager.close()
    assert heard.states[-1] == "tracked"
    assert heard.notes == [Stalled(10, 3.0)]


def test_the_wait_before_an_update_is_a_stall_of_its_save(tmp_path, heard):
    """Catches: a gated save that looks free, a note for a call that waited for nothing."""
    clock = StillClock()
    manager = opened(tmp_path, heard, clock=clock, launch=LateReader(clock))
    manager.save(10, weights(10))
    manager.before_update()
    manager.before_update()
    assert heard.notes == [Stalled(10, 0.0), Stalled(10, 2.0)]
    with pytest.warns(UserWarning):
        manager.abandon()


def test_a_refused_save_is_told_by_its_kind(tmp_path, heard):
    """Catches: a refusal of which no metric tells; a stall that an error swallows."""
    manager = opened(tmp_path, heard)
    manager.save(10, weights(10)).wait()
    del heard.notes[:]
    with pytest.raises(StepExistsError):
        manager.save(10, weights(10))
    refused, stalled = heard.notes
    assert refused == Refused("step_exists") and stalled.step == 10
    manager.close()


def test_a_save_that_is_not_polled_is_told(tmp_path, heard):
    """Catches: a warning that only the log has."""
    gate = FifoGate(tmp_path / "gate")
    manager = opened(tmp_path, heard, settings={"poll_warning_steps": 5})
    manager._ports.driver.before_write = gate.hold
    manager.save(10, weights(10))
    manager.should_save(14)
    assert Unpolled() not in heard.notes
    with pytest.warns(PollMissingWarning):
        manager.should_save(15)
    assert heard.notes.count(Unpolled()) == 1
    gate.open()
    manager.close()


def test_a_meter_that_fails_disturbs_nothing(tmp_path, heard, caplog):
    """Catches: an error of a hook in training, and meters after it that are not told."""

    class Broken(Heard):
        def note(self, note: Note) -> None:
            raise ZeroDivisionError

    manager = opened(tmp_path, Broken(), heard)
    manager.save(10, weights(10)).wait()
    assert [note.step for note in heard.notes] == [10]
    assert [r.event for r in caplog.records if r.levelname == "ERROR"] == ["hook_failed"]
    manager.close()


def test_a_meter_may_not_call_the_manager(tmp_path, caplog):
    """Catches: a collective call of one rank, for which the others wait."""
    managers: list[Manager] = []

    class Calling(Heard):
        def note(self, note: Note) -> None:
            managers[0].poll()

    managers.append(opened(tmp_path, Calling()))
    managers[0].save(10, weights(10)).wait()
    said = [r for r in caplog.records if getattr(r, "event", "") == "hook_failed"]
    assert "may not call its manager" in str(said[0].exc_info[1])
    managers[0].close()


def test_a_closed_manager_tells_nothing(tmp_path, heard):
    """Catches: notes from a process that the trainer forked, about a manager that is not its."""
    manager = opened(tmp_path, heard)
    manager.close()
    with pytest.raises(ManagerClosed):
        manager.save(10, weights(10))
    assert heard.notes == []


def test_a_controller_tells_the_time_of_begin(tmp_path, heard):
    """Catches: a driver process whose saves look free."""
    clock = StillClock()

    class SlowFiles(FilesDriver):
        def draft(self, parts):
            clock.advance(4.0)
            return super().draft(parts)

    ports = fake_ports(tmp_path / "root", driver=SlowFiles(), clock=clock)
    controller = Controller(
        tmp_path / "root", {"a": 1}, lambda failed: [], QUICK, hooks=[heard], ports=ports
    )
    controller.begin(10, {"notes": b"text"})
    assert heard.notes == [Stalled(10, 4.0)]
    controller.close()
