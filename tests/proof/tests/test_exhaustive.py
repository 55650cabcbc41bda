"""Every state of a few small worlds keeps the promises, and a planted bug is found in them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from proof.exhaustive import Scope, Search, history, scope_named
from proof.exhaustive_disk import Dir, EpochLease, tree
from proof.exhaustive_world import Left

from ckptfsm.coordinator import applier
from ckptfsm.coordinator.applier import Applier
from ckptfsm.core import keeping, layout, lifecycle, recovery
from ckptfsm.core.events import Prune, ShardReported
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.lifecycle import State
from ckptfsm.core.retention import LatestN
from ckptfsm.disk.job_records import JobHolds
from ckptfsm.disk.publishing import Publisher
from ckptfsm.disk.setting_aside import Mover


def cleaned_unguarded(monkeypatch):
    guard = lifecycle.every_writer_is_gone
    rows = tuple(replace(r, guard=None) if r.guard is guard else r for r in lifecycle.TABLE)
    monkeypatch.setattr(lifecycle, "TABLE", rows)


def two_in_flight(monkeypatch):
    monkeypatch.setattr(Ledger, "refuse", lambda self, event: None)


def one_shard_short(monkeypatch):
    def short(so_far, event):
        awaited = still_awaited(so_far, event)
        return awaited - (isinstance(event, ShardReported) and awaited > 0)

    still_awaited = lifecycle._still_awaited
    monkeypatch.setattr(lifecycle, "_still_awaited", short)


def any_shard_counts(monkeypatch):
    def counted(so_far, event):
        if isinstance(event, ShardReported):
            return len(so_far.expected) - len(so_far.reported) - 1
        return still_awaited(so_far, event)

    still_awaited = lifecycle._still_awaited
    monkeypatch.setattr(lifecycle, "_still_awaited", counted)


def no_second_look(monkeypatch):
    def kept(facts):
        return kept_wherever_it_lies(replace(facts, holds=replace(facts.holds, **nobody)))

    nobody = {"pinned": False, "leased": False}
    kept_wherever_it_lies = keeping._kept_wherever_it_lies
    monkeypatch.setattr(keeping, "_kept_wherever_it_lies", kept)


def jobs_hold_nothing(monkeypatch):
    monkeypatch.setattr(JobHolds, "of_steps", lambda *_: {})


def the_tracked_are_withdrawn(monkeypatch):
    monkeypatch.setattr(recovery, "_survivors", lambda ledger, evidence, decisions: set())


def missing_ones_are_kept(monkeypatch):
    decide = recovery.decide

    def trusting(facts):
        found = decide(facts)
        return replace(found, actions=()) if facts.checkpoint.state is State.TRACKED else found

    monkeypatch.setattr(recovery, "decide", trusting)


def pruned_before_journaled(monkeypatch):
    commit = Applier.commit

    def hasty(self, ledger, moved, command):
        if isinstance(command, Prune):
            self.mover.prune(moved.checkpoint, moved.event.newer_step)
        commit(self, ledger, moved, command)

    monkeypatch.setattr(Applier, "commit", hasty)


def tracker_before_publishing(monkeypatch):
    finalize = Publisher.finalize

    def hasty(self, checkpoint):
        self.write_tracker(checkpoint.step)
        return finalize(self, checkpoint)

    monkeypatch.setattr(Publisher, "finalize", hasty)


def nobody_looks_at_the_epoch(monkeypatch):
    monkeypatch.setattr(EpochLease, "check", lambda lease: None)


def a_tick_that_breaks(monkeypatch):
    monkeypatch.setattr(applier.Applier, "retry_pending", lambda applier: {}["a bug"])


def clean_up_is_forgotten(monkeypatch):
    monkeypatch.setattr(Applier, "_run_clean_up", lambda self, checkpoint: None)


def prune_by_deleting(monkeypatch):
    def prune(self, checkpoint, newer_step):
        base = layout.MEGATRON.published_name(checkpoint.step)
        for name in self.storage.listdir(base):
            if self.storage.stat(f"{base}/{name}").kind == "file":
                self.storage.unlink(f"{base}/{name}")
        return ""

    monkeypatch.setattr(applier, "published_name", lambda step: f"iter_{step:07d}", raising=False)
    monkeypatch.setattr(Mover, "prune", prune)


PLANTED = (
    (cleaned_unguarded, "ranks", "I1"),
    (two_in_flight, "keep", "I5"),
    (one_shard_short, "ranks", "I3"),
    (any_shard_counts, "ranks", "I5"),
    (no_second_look, "keep", "I7"),
    (jobs_hold_nothing, "jobs", "I7"),
    (the_tracked_are_withdrawn, "keep", "I8"),
    (missing_ones_are_kept, "damage", "I2"),
    (pruned_before_journaled, "keep", "I1"),
    (tracker_before_publishing, "keep", "I2"),
    (nobody_looks_at_the_epoch, "epochs", "I9"),
    (clean_up_is_forgotten, "ranks", "I10"),
    (a_tick_that_breaks, "epochs", "I10"),
    (prune_by_deleting, "keep", "I1"),
)


@pytest.mark.parametrize(
    ("plant", "scope", "promise"), PLANTED, ids=lambda v: getattr(v, "__name__", v)
)
def test_a_planted_bug_breaks_its_promise(plant, scope, promise, monkeypatch):
    """Catches: a search that looks away. The history of a finding shows it again."""
    plant(monkeypatch)
    # A state that never settles is known only when the search ends, so that one ends early.
    limit = 2_000 if promise == "I10" else 20_000
    found = Search(scope_named(scope), limit).run()
    assert found.broken, f"not found in {found.states} states"
    assert found.broken[0][0] == promise, found.broken[0]
    told = history(scope_named(scope), found.broken[0][2])
    assert promise == "I10" or f"BROKEN {promise}" in told[-1], told
    print("\n".join(told), f"{found.states} states, {found.seconds:.2f} s", sep="\n")


def test_equal_trees_are_equal_however_they_were_made():
    """Catches: states counted twice, or taken for one another."""
    one = tree(a=b"1").put("d", Dir({})).put("d/e", b"2")
    two = Dir({"d": Dir({"e": b"2"}), "a": b"1"})
    assert one == two and hash(one) == hash(two)
    assert one != two.put("d/e", b"3") and one.put("d/e", None) != one


def test_retention_is_searched():
    """Catches: a search in which nothing is ever given up, so that every promise about it holds."""
    search = Search(Scope("few", Left(requests=2), steps=2, retention=LatestN(1)), 1000)
    assert search.run().closed
    trashes = [world.disk.get(layout.TRASH) for world in search._worlds]
    assert any(isinstance(trash, Dir) and trash.names for trash in trashes)
