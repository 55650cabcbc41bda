"""A broken library turns the Hypothesis suites red. That they hold is ``proof.suites``."""

from __future__ import annotations

import errno
from functools import partial

import pytest
from hypothesis.statistics import collector
from profiles import profile
from proof import suites
from proof.layer import Budget
from proof.recovery_machine import RecoveryMachine
from proof.trainers import TrainerMachine

from ckptfsm.core import ledger, lifecycle, recovery_rules
from ckptfsm.core.errors import IllegalTransition
from ckptfsm.core.layout import TRACKER
from ckptfsm.disk.publishing import Publisher


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


@pytest.mark.parametrize(
    "suite, labels",
    [
        ("ledger", {"checkpoints at once"}),
        ("trainer", {"crash depth", "writers in flight at an end"}),
        ("recovery", {"crash depth"}),
    ],
)
def test_the_machines_are_driven_deep(suite, labels):
    """Catches: a machine with examples that are not driven to deeper crashes and more in flight."""
    check, _ = suites.SUITES[suite]
    told = []
    with collector.with_value(told.append):
        check(settings=profile("pr", scale=0.4, shrink=False))
    (statistics,) = told
    assert set(statistics["targets"]) == labels
    # Not of each: Hypothesis draws constants of the modules that are loaded, so that the order of the
    # tests decides whether a machine's forty examples end one with writers in flight.
    assert any(score > 0 for score in statistics["targets"].values())


@pytest.mark.parametrize("call, power", [(48, 4), (48, 6), (49, 5), (49, 7)])
def test_I8_power_shows_a_step_of_a_fresh_start_at_both_names(call, power):
    """Found by a release run. Catches: a machine that expects more than decision 7 promises."""
    machine = RecoveryMachine()
    machine.begin(saved=0, adopted=1, keep=None)
    machine.leave(closes=False, blow=None)
    machine.start("fresh", keep=None, blow=(call, errno.EIO), rate=0.0, seed=0)
    machine.leave(closes=False, blow=None)
    machine.power_fails(how=power)
    machine.start("fallback", keep=None, blow=None, rate=0.0, seed=0)
    machine.I1_I2_I4_the_disk_holds_what_was_promised()
    machine.teardown()


def test_I8_a_rollback_goes_on_over_a_tracker_that_an_opening_wrote():
    """Found by a release run. Catches: a machine that takes what an opening wrote anew, and could not
    make durable, for a stranger's for ever."""
    machine = RecoveryMachine()
    machine.begin(saved=0, adopted=1, keep=None)
    machine.leave(closes=False, blow=None)
    machine.stock_saves(ahead=1, tracked=False, synced=False)
    machine.stock_saves(ahead=1, tracked=True, synced=False)
    machine.start("fallback", keep=None, blow=None, rate=0.02, seed=22)
    machine.roll_back(back=1, blow=None)
    assert machine.interrupted == ("rollback", 2)
    machine.start("fallback", keep=None, blow=None, rate=0.0, seed=0)
    machine.teardown()


def test_I8_a_save_that_was_cut_short_is_no_limit_for_a_stock_trainer():
    """Found by a release run. Catches: a machine that takes for certain that a start which died had
    journaled the only save, so that nothing above it may be adopted."""
    machine = RecoveryMachine()
    machine.begin(saved=0, adopted=0, keep=None)
    machine.leave(closes=False, blow=None)
    machine.start("fallback", keep=None, blow=None, rate=0.0, seed=0)
    machine.save(ahead=1, blow=(67, 0))
    machine.power_fails(how="all_lost")
    machine.start("fallback", keep=None, blow=(0, 0), rate=0.0, seed=0)
    machine.stock_saves(ahead=1, tracked=False, synced=False)
    machine.teardown()


def test_I8_adoptions_of_a_start_are_no_limit_for_the_start_before():
    """Found by a release run. Catches: a machine that takes the newest of the steps that two
    cut-short starts may have adopted for the step that the first of them has journaled."""
    machine = RecoveryMachine()
    machine.begin(saved=2, adopted=0, keep=1)
    machine.leave(blow=None, closes=False)
    machine.start("fresh", keep=None, blow=None, rate=0.0, seed=0)
    machine.tick(blow=None)
    machine.leave(blow=None, closes=False)
    machine.stock_saves(ahead=1, tracked=False, synced=False)
    machine.start("fallback", keep=None, blow=(59, 0), rate=0.0, seed=0)
    machine.stock_saves(ahead=1, tracked=False, synced=True)
    machine.start("fallback", keep=None, blow=None, rate=0.02, seed=0)
    assert machine.dead()
    machine.teardown()


@pytest.mark.parametrize("call", range(30, 50))
@pytest.mark.parametrize("torn", [False, True])
def test_I2_a_rollback_dies_before_a_spoilt_tracker_could_be_put_right(torn, call):
    """Found by a release run. Catches: a machine that takes a tracker that a person had spoilt,
    with a repair that failed and waits to be tried again, for one that the rollback destroyed."""
    machine = RecoveryMachine()
    machine.begin(saved=0, adopted=2, keep=None)
    machine.leave(closes=False, blow=None)
    machine.spoils_the_tracker(torn=torn)
    machine.start("fallback", keep=None, blow=(call, errno.EIO), rate=0.0, seed=0)
    if machine.alive():
        assert (machine.look().step is None) == (38 <= call <= 45), "what the tests below are about"
        machine.roll_back(back=1, blow=(0, 0))
    machine.I1_I2_I4_the_disk_holds_what_was_promised()
    machine.start("fallback", keep=None, blow=None, rate=0.0, seed=0)
    machine.I1_I2_I4_the_disk_holds_what_was_promised()
    machine.teardown()


@pytest.mark.parametrize("cut_short", [False, True])
@pytest.mark.parametrize("rots", [False, True])
def test_I8_a_save_whose_record_was_not_fsynced_may_be_the_journals_newest(cut_short, rots):
    """Found by review. Catches: a machine that asks for a stock save above such a save that was
    never tracked."""
    machine = RecoveryMachine()
    machine.begin(saved=0, adopted=0, keep=None)
    machine.save(ahead=1, blow=(69, 0))
    if rots:
        machine.rots(back=0, cut=True)
    machine.spoils_the_tracker(torn=False)
    if cut_short:
        machine.start("fallback", keep=None, blow=(0, 0), rate=0.0, seed=0)
    machine.stock_saves(ahead=1, tracked=False, synced=True)
    machine.start("fallback", keep=None, blow=None, rate=0.0, seed=0)
    machine.teardown()


@pytest.mark.parametrize("call", range(40, 80))
def test_I2_an_adoption_that_is_cut_short_begins_with_the_newest(call):
    """Found by review. Catches: a failed save's step that is adopted behind older ones, so that a death
    in between resumes from these."""
    machine = RecoveryMachine()
    machine.begin(saved=0, adopted=0, keep=None)
    machine.save(ahead=3, blow=(10, 0))
    machine.stock_saves(ahead=1, tracked=True, synced=True)
    machine.stock_saves(ahead=2, tracked=True, synced=True)
    machine.spoils_the_tracker(torn=True)
    machine.start("fallback", keep=None, blow=(call, 0), rate=0.0, seed=0)
    machine.start("fallback", keep=None, blow=None, rate=0.0, seed=0)
    assert set(machine.tracked) == {1, 3}
    machine.teardown()


def test_I11_an_illegal_move_is_a_violation():
    """Catches: a trainer that takes our bugs for one more refusal."""

    def move():
        raise IllegalTransition("tracked, and removed")

    with pytest.raises(AssertionError, match="I11: an illegal move was tried"):
        TrainerMachine().attempt(move)


def without_a_tracker(monkeypatch):
    """Between publishing a step and pruning an older one, the tracker is gone for a moment."""
    put = Publisher.write_tracker

    def write_tracker(self, step):
        if TRACKER in self.storage.listdir(""):
            self.storage.unlink(TRACKER)
        put(self, step)

    monkeypatch.setattr(Publisher, "write_tracker", write_tracker)


def tracked_is_trusted(monkeypatch):
    """A tracked checkpoint is resumed from without a look at it."""
    whole = recovery_rules.is_whole

    def trusting(checkpoint, there):
        return checkpoint.state is lifecycle.State.TRACKED or whole(checkpoint, there)

    monkeypatch.setattr(recovery_rules, "is_whole", trusting)


@pytest.mark.parametrize("plant", [without_a_tracker, tracked_is_trusted])
def test_a_planted_bug_turns_the_recovery_suite_red(monkeypatch, plant):
    """Catches: a model of recovery that excuses whatever it sees."""
    plant(monkeypatch)
    check, _ = suites.SUITES["recovery"]
    settings = profile("pr", scale=4, shrink=False)  # it stops at the first
    found = suites.violation_of("recovery", "pr", partial(check, settings=settings))
    assert found is not None and found.promise in ("I2", "I4", "I8")


def test_stop_at_first_stops_at_the_first(monkeypatch):
    monkeypatch.setattr(ledger.Ledger, "refuse", lambda self, event: None)
    result = suites.run(Budget(stop_at_first=True))
    assert len(result.violations) == 1 and result.explored["suites"] == 1
