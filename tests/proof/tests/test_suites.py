"""A broken library turns the Hypothesis suites red. That they hold is ``proof.suites``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from profiles import profile
from proof import suites
from proof.layer import Budget

from ckptfsm.core import ledger, lifecycle, recovery_rules
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.lifecycle import State


def tracked_is_trusted(monkeypatch):
    """A tracked checkpoint is resumed from without a look at it."""
    whole = recovery_rules.is_whole

    def trusting(checkpoint, there):
        return checkpoint.state is State.TRACKED or whole(checkpoint, there)

    monkeypatch.setattr(recovery_rules, "is_whole", trusting)


def no_guard_keeps_it(monkeypatch):
    """A tracked checkpoint may be deleted as soon as a newer one is tracked, pinned or read or not."""

    def newer(checkpoint, event):
        return event.newer_step is not None

    kept = lifecycle.a_newer_one_is_tracked_and_nothing_keeps_it
    table = (replace(row, guard=newer) if row.guard is kept else row for row in lifecycle.TABLE)
    monkeypatch.setattr(lifecycle, "TABLE", tuple(table))
    monkeypatch.setattr(ledger, "apply", lifecycle.apply_row)


def the_latest_is_offered(monkeypatch):
    offer = Ledger._offer

    def unkept(self, checkpoint, latest, preserved):
        return replace(offer(self, checkpoint, latest, preserved), kept_by=())

    monkeypatch.setattr(Ledger, "_offer", unkept)


@pytest.mark.parametrize(
    ("plant", "suite"),
    [
        (tracked_is_trusted, "recovery_is_lawful_and_loses_nothing"),
        (no_guard_keeps_it, "ledger"),
        (the_latest_is_offered, "retention_never_takes_what_is_needed"),
    ],
)
def test_a_planted_bug_turns_a_suite_red(monkeypatch, plant, suite):
    """Catches: a suite that excuses whatever it sees; a finding without promise or replay."""
    plant(monkeypatch)
    check, _ = suites.SUITES[suite]
    settings = profile("pr", scale=4, shrink=False)
    found = suites.violation_of(suite, "pr", partial(check, settings=settings))
    assert found is not None and found.promise in ("I2", "I7")
    assert f"--suite {suite}" in found.replay


def test_stop_at_first_stops_at_the_first(monkeypatch):
    """Catches: a search that goes on when a mutant was seen."""
    tracked_is_trusted(monkeypatch)
    result = suites.run(Budget(stop_at_first=True))
    assert len(result.violations) == 1 and result.explored["suites"] == 1
