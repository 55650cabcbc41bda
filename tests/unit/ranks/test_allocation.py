"""The end of the allocation, as one rank knows it, on a clock that only tests move."""

from __future__ import annotations

import logging

import pytest

from ckptfsm.ranks.allocation import Allocation
from ckptfsm.testing.harness import SimClock


def ending(told, clock: SimClock | None = None) -> tuple[Allocation, SimClock]:
    clock = clock or SimClock()
    return Allocation(clock, told), clock


def save(allocation: Allocation, clock: SimClock, seconds: float) -> None:
    allocation.save_begins()
    clock.now += seconds
    allocation.save_tracked()


def seconds_before_the_end(
    allocation: Allocation, clock: SimClock, end: float, look: float
) -> float:
    """The time left at the first look that asks for the last save; looks are ``look`` apart."""
    while clock.unix() < end:
        if allocation.ends_soon(idle=True):
            return end - clock.unix()
        clock.now += look
    raise AssertionError("the end came first")


def test_no_end_is_no_reason():
    """Catches: a job without a known end that is told to save."""
    allocation, clock = ending(None)
    clock.now += 1e9
    assert not allocation.ends_soon(idle=True)


def test_the_slow_saves_of_this_run_decide():
    """Catches: a mean duration, one of another save, and a look that is not waited for."""
    clock = SimClock()
    end = clock.unix() + 10_000
    allocation, _ = ending(end, clock)
    for seconds in (10.0, 10.0, 50.0, 10.0):
        save(allocation, clock, seconds)
    left = seconds_before_the_end(allocation, clock, end, look=7.0)
    assert 2 * 50 + 14 - 7 < left <= 2 * 50 + 14


def test_a_save_that_was_not_tracked_is_not_measured():
    """Catches: a refused save whose duration lasts until the next one is tracked."""
    clock = SimClock()
    end = clock.unix() + 10_000
    allocation, _ = ending(end, clock)
    allocation.save_begins()
    clock.now += 3000
    save(allocation, clock, 10.0)
    allocation.save_tracked()  # of an earlier run
    left = seconds_before_the_end(allocation, clock, end, look=1.0)
    assert 2 * 10 + 1 < left <= 2 * 10 + 2


def test_looks_while_a_save_is_in_flight_do_not_count():
    """Catches: a last save that comes too late, because ranks look more often during a save."""
    clock = SimClock()
    end = clock.unix() + 10_000
    allocation, _ = ending(end, clock)
    save(allocation, clock, 10.0)
    for idle in (True, True, *[False] * 50):
        assert not allocation.ends_soon(idle=idle)
        clock.now += 30.0 if idle else 1.0
    clock.now = end - clock.unix() + clock.now - 81
    assert not allocation.ends_soon(idle=False)
    clock.now += 1
    assert allocation.ends_soon(idle=False)


def test_an_agreed_end_is_told_once():
    """Catches: a save at every look until the job is killed."""
    allocation, clock = ending(SimClock().unix() + 100)
    clock.now += 99
    assert allocation.ends_soon(idle=True) and allocation.ends_soon(idle=True)
    allocation.agreed()
    assert not allocation.ends_soon(idle=True)


def test_F14_a_jump_of_the_wall_clock_changes_nothing(monkeypatch):
    """Catches: a last save that comes an hour too early or too late when the clock is set."""
    clock = SimClock()
    end = clock.unix() + 10_000
    allocation, _ = ending(end, clock)
    save(allocation, clock, 10.0)
    assert not allocation.ends_soon(idle=True)
    monkeypatch.setattr(clock, "unix", lambda: end - 1)
    assert not allocation.ends_soon(idle=True)
    monkeypatch.setattr(clock, "unix", lambda: 1.0)
    clock.now += 9985
    assert allocation.ends_soon(idle=True)


def test_a_function_tells_the_end_when_it_learns_of_it():
    """Catches: an end that is asked for once, and one that was taken back."""
    told: list[float | None] = [None]
    allocation, clock = ending(lambda: told[0])
    save(allocation, clock, 10.0)
    assert not allocation.ends_soon(idle=False)
    told[0] = clock.unix() + 15
    assert allocation.ends_soon(idle=False)
    told[0] = clock.unix() + 1500
    assert not allocation.ends_soon(idle=False)
    told[0] = None
    clock.now += 1500
    assert not allocation.ends_soon(idle=False)


@pytest.mark.parametrize("answer", [30.0, "soon", ZeroDivisionError()], ids=repr)
def test_F24_a_function_that_fails_is_logged_once_and_tells_nothing(answer, caplog):
    """Catches: a rank that raises alone, a job that ends as it begins, a line at every look."""

    def tell():
        if isinstance(answer, Exception):
            raise answer
        return answer

    allocation, _ = ending(tell)
    with caplog.at_level(logging.WARNING, logger="ckptfsm"):
        assert [allocation.ends_soon(idle=True) for _ in range(3)] == [False] * 3
    assert [r.event for r in caplog.records] == ["end_not_known"]
