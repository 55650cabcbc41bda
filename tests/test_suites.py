"""The Hypothesis suites of the ``pr`` profile, and that a broken library turns them red."""

from __future__ import annotations

from functools import partial

import pytest
from proof import suites
from proof.layer import Budget
from proof.trainers import TrainerMachine

from ckptfsm import ledger, lifecycle
from ckptfsm.errors import IllegalTransition
from ckptfsm.testing.profiles import profile


@pytest.mark.parametrize("suite", suites.SUITES)
def test_the_suite_holds(suite):
    check, scale = suites.SUITES[suite]
    check(settings=profile("pr", scale=scale / 5))


def test_a_broken_guard_is_a_violation_with_its_history(monkeypatch):
    """Catches: a harness that reports green whatever the library does."""

    def always(checkpoint, event):
        return event.newer_step is not None

    table = tuple(
        row
        if row.guard is not lifecycle.a_newer_one_is_tracked_and_nothing_keeps_it
        else lifecycle.Row(row.source, row.event, always, row.dest, row.command)
        for row in lifecycle.TABLE
    )
    monkeypatch.setattr(lifecycle, "TABLE", table)
    monkeypatch.setattr(ledger, "apply", lifecycle.apply_row)
    check, _ = suites.SUITES["ledger"]
    settings = profile("pr", scale=2, shrink=False)
    found = suites.violation_of("ledger", "pr", partial(check, settings=settings))
    assert found is not None and found.promise == "I7"
    assert "forced_offer" in found.what and "--suite ledger" in found.replay


def test_I11_an_illegal_move_is_a_violation():
    """Catches: a trainer that takes our own bugs for one more refusal."""

    def move():
        raise IllegalTransition("tracked, and removed")

    with pytest.raises(AssertionError, match="I11: an illegal move was tried"):
        TrainerMachine().attempt(move)


def test_stop_at_first_stops_at_the_first(monkeypatch):
    monkeypatch.setattr(ledger.Ledger, "refuse", lambda self, event: None)
    result = suites.run(Budget(stop_at_first=True))
    assert len(result.violations) == 1 and result.explored["suites"] == 1
