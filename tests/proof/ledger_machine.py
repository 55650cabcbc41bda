"""The state machine that Hypothesis drives over the production ledger.

Honest, late and cross-wired reports, failures, restarts' adoptions, and mad retention policies.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis import target
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from ckptfsm.core import events as m
from ckptfsm.core.errors import IllegalTransition, SaveRefused, StepExistsError
from ckptfsm.core.ledger import Ledger, Rejected
from ckptfsm.core.lifecycle import (
    IN_FLIGHT,
    State,
    has_finalizers,
)
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.core.retention import BestN, EveryNSteps, KeepAll, LatestN, Policy, describe_tracked
from proof.drawn_roots import policies

S = State
LAYOUTS = (
    (PartSpec("state"),),
    (PartSpec("state"), PartSpec("data", "file", ranks=(0,))),
    (PartSpec("actor", directory="actor"), PartSpec("critic", directory="critic", ranks=(0, 1))),
    (PartSpec("state", "foreign"),),
)


class Foreign(Policy):
    """Names steps that were never saved."""

    def preserve(self, checkpoints):
        return [10**9, -5]


class Nothing(Policy):
    def preserve(self, checkpoints):
        return ()


class Raises(Policy):
    def preserve(self, checkpoints):
        raise RuntimeError("a user's policy")


class Odd(Policy):
    """Keeps by the parity of the position: unrelated to anything."""

    def preserve(self, checkpoints):
        return [c.step for c in checkpoints[::2]]


POLICIES = (LatestN(0), LatestN(1), BestN("loss", 1), EveryNSteps(4), KeepAll())
MAD = (Foreign(), Nothing(), Raises(), Odd())


class LedgerMachine(RuleBasedStateMachine):
    """The coordinator's part is played by the rules; what must hold is in the invariants."""

    attempts = Bundle("attempts")

    @initialize()
    def begin(self):
        self.ledger = Ledger()
        self.most = 0
        self.count = 0
        self.epoch = 1
        self.accepted: dict[AttemptId, set[tuple[str, int]]] = {}
        self.ever_tracked: set[AttemptId] = set()
        self.pruned: set[AttemptId] = set()
        self.resumable: set[int] = set()  # tracked once, and not withdrawn since

    # ------------------------------------------------------------------------------- helpers

    def take(self, outcome):
        self.ledger, moved, command = outcome
        if moved.dest is S.TRACKED:
            self.ever_tracked.add(moved.of)
            self.resumable.add(moved.of.step)
        if moved.dest is S.PRUNED:
            assert moved.source is S.PRUNABLE, "I1: pruned from elsewhere"
            self.pruned.add(moved.of)
            self.resumable.discard(moved.of.step)
        if moved.dest is S.QUARANTINED:
            self.resumable.discard(moved.of.step)
        return command

    def post(self, event):
        return self.take(self.ledger.post(event))

    def report(self, event):
        """Post a report; what is rejected must change nothing (I5), what counts must be honest."""
        before, content = self.ledger, dict(self.ledger.checkpoints)
        outcome = before.report(event)
        assert dict(before.checkpoints) == content, "I5: a report changed the old ledger"
        living = before.checkpoints.get(event.of)
        if isinstance(outcome, Rejected):
            assert outcome.event is event and outcome.why
            return outcome
        assert living is not None, "I5: a report to nobody counted"
        if isinstance(event, m.ShardReported):
            key = (event.part, event.rank)
            assert event.world_size == living.world_size, "I5: wrong world size counted"
            assert key in living.expected, "I5: an undeclared shard counted"
            assert key not in self.accepted[event.of], "I5: a duplicate counted"
            self.accepted[event.of].add(key)
        others = {of: c for of, c in content.items() if of != event.of}
        command = self.take(outcome)
        now = {of: c for of, c in self.ledger.checkpoints.items() if of != event.of}
        assert now == others, "I5: a report touched another attempt"
        return command

    def flying(self):
        return self.ledger.in_flight()

    # --------------------------------------------------------------------------------- rules

    @rule(
        target=attempts,
        delta=st.integers(-2, 4),
        layout=st.sampled_from(LAYOUTS),
        n=st.integers(2, 3),
    )
    def request(self, delta, layout, n):
        latest = self.ledger.latest()
        step = (latest.step if latest else 0) + delta
        of = AttemptId(step, self.epoch, self.count + 1)
        event = m.SaveRequested(of, layout, n, metrics=(("loss", float(step % 5)),))
        try:
            self.ledger.refuse(event)
        except StepExistsError:
            assert latest is not None and step <= latest.step
            return multiple()
        except SaveRefused:
            assert self.flying() is not None or step < 0
            return multiple()
        assert self.flying() is None and (latest is None or step > latest.step) and step >= 0
        self.count += 1
        self.accepted[of] = set()
        assert isinstance(self.post(event), m.CreateStaging)
        self.most = max(self.most, len(self.ledger.checkpoints))
        return of

    @rule(of=attempts, data=st.data())
    def wild_report(self, of, data):
        """Any attempt there ever was, any rank, part and world size: mostly lies."""
        rank, n = data.draw(st.integers(-1, 3)), data.draw(st.integers(1, 4))
        part = data.draw(st.sampled_from(["state", "data", "actor", "critic", "ghost"]))
        kinds = (
            m.WriterForked(of, rank, n),
            m.ShardReported(of, part, rank, n, 1),
            m.ShardReported(AttemptId(of.step, of.epoch + 1, of.attempt), part, rank, n, 1),
            m.WriterGone(of, rank),
        )
        self.report(data.draw(st.sampled_from(kinds)))

    @precondition(lambda self: self.flying() is not None)
    @rule(data=st.data())
    def honest_reports(self, data):
        """Forks, then a few of the missing shards, in any order."""
        c = self.flying()
        for rank in data.draw(st.permutations(sorted(c.writers - c.forked))):
            self.report(m.WriterForked(c.id, rank, c.world_size))
        missing = data.draw(st.permutations(sorted(c.expected - c.reported)))
        for part, rank in missing[: data.draw(st.integers(0, len(missing)))]:
            event = m.ShardReported(c.id, part, rank, c.world_size, 5)
            self.report(event)
            assert isinstance(self.report(event), Rejected), "I5: a duplicate counted"

    @precondition(lambda self: self.ledger.in_state(S.SHARDS_WRITTEN))
    @rule()
    def published(self):
        c = self.flying()
        if has_finalizers(c):
            missing = sorted(c.writers - c.finalizers_ran)
            ran = [self.report(m.FinalizersRan(c.id, rank)) for rank in missing]
            assert not missing or ran[-1] == m.Finalize(c.id), (
                "I6: the last finalizers are not told"
            )
        self.post(m.PublishedOnDisk(c.id))
        assert isinstance(self.report(m.Failed(c.id, "late")), Rejected), (
            "something published failed"
        )
        assert isinstance(self.post(m.Published(c.id)), m.WriteTracker)

    @precondition(lambda self: self.ledger.in_state(S.FINALIZED))
    @rule()
    def tracker_written(self):
        self.post(m.TrackerWritten(self.flying().id))

    @precondition(lambda self: self.flying() is not None)
    @rule(lost=st.booleans())
    def fail(self, lost):
        c = self.flying()
        if c.state is S.FINALIZED:
            outcome = self.report(m.Failed(c.id, "late"))
            assert isinstance(outcome, Rejected), "something published failed"
            return
        self.post(m.Failed(c.id, "writer_died"))
        if lost:
            assert isinstance(self.post(m.WritersLost(c.id)), m.CleanUp)

    @precondition(lambda self: self.ledger.in_state(S.FAILED))
    @rule(data=st.data())
    def writer_gone_and_cleaned(self, data):
        c = data.draw(st.sampled_from(self.ledger.in_state(S.FAILED)))
        for rank in sorted(c.writers - c.gone):
            assert isinstance(self.report(m.Cleaned(c.id)), Rejected), "cleaned under a writer"
            self.report(m.WriterGone(c.id, rank))
        self.post(m.Cleaned(c.id))
        assert c.id not in self.ledger.checkpoints

    @rule(policy=policies() | st.sampled_from(POLICIES + MAD))
    def retire(self, policy):
        """As the coordinator does: a policy that raises keeps everything."""
        infos = describe_tracked(self.ledger)
        try:
            preserved = frozenset(policy.preserve(infos))
        except RuntimeError:
            return
        top = self.ledger.latest()
        for offer in self.ledger.to_prune(preserved):
            protected = self.ledger.pins | self.ledger.readers | self.ledger.held
            assert offer.of.step not in protected, "I7: protected"
            assert offer.of != top.id and offer.newer_step == top.step, "I7: the latest offered"
            assert offer.of.step not in preserved, "a policy was not obeyed"
            assert isinstance(self.post(offer), m.Prune)

    @precondition(lambda self: self.ledger.in_state(S.TRACKED))
    @rule(data=st.data())
    def forced_offer(self, data):
        """A caller that offers a protected checkpoint anyway must be stopped by the table."""
        c = data.draw(st.sampled_from(self.ledger.in_state(S.TRACKED)))
        offer = self.ledger.superseded(c, ())
        if not offer.kept_by:
            return
        try:
            self.ledger.post(offer)
        except IllegalTransition:
            return
        raise AssertionError("I7: a kept checkpoint became prunable")

    @precondition(lambda self: self.ledger.in_state(S.PRUNABLE))
    @rule(data=st.data(), found=st.sampled_from(("free", "kept", "damaged")))
    def prune_or_not(self, data, found):
        c = data.draw(st.sampled_from(self.ledger.in_state(S.PRUNABLE)))
        if found == "damaged":
            assert isinstance(self.post(m.Withdrawn(c.id, "damaged")), m.Quarantine)
            return
        kept = found == "kept" or c.step in self.ledger.pins | self.ledger.readers
        self.post(m.Reprieved(c.id, "pin") if kept else m.Removed(c.id))

    @rule(
        pins=st.sets(st.integers(0, 12), max_size=3),
        readers=st.sets(st.integers(0, 12)),
        held=st.sets(st.integers(0, 12)),
    )
    def protect(self, pins, readers, held):
        self.ledger = self.ledger.protected(pins, readers, held)

    @precondition(lambda self: self.ledger.in_state(S.TRACKED) and self.flying() is None)
    @rule(data=st.data())
    def rollback(self, data):
        """Later ones are withdrawn, prunable ones reprieved first so that they can be."""
        target = data.draw(st.sampled_from(self.ledger.in_state(S.TRACKED))).step
        for c in self.ledger.in_state(S.PRUNABLE):
            if c.step > target:
                self.post(m.Reprieved(c.id, "rollback"))
        for c in reversed(self.ledger.in_state(S.TRACKED)):
            if c.step > target:
                assert isinstance(self.post(m.Withdrawn(c.id, "rollback")), m.Quarantine)
        assert self.ledger.latest().step == target

    @rule(target=attempts, step=st.integers(0, 8))
    def adopt(self, step):
        """At a restart: an unknown directory, not newer than the tracked step."""
        latest = self.ledger.latest()
        taken = {c.step for c in self.ledger.checkpoints.values()}
        if self.flying() is not None or step in taken or (latest and step > latest.step):
            return multiple()
        self.epoch += 1
        of = AttemptId(step, self.epoch, 1)
        self.count = 1
        self.accepted[of] = set()
        self.post(m.Adopted(of))
        ledger = self.ledger
        self.ledger = ledger.protected(ledger.pins | {step}, ledger.readers, ledger.held)
        return of

    # ---------------------------------------------------------------------------- invariants

    @invariant()
    def I1_nothing_is_deleted_that_was_never_tracked(self):
        prunable = {c.id for c in self.ledger.in_state(S.PRUNABLE)}
        assert prunable | self.pruned <= self.ever_tracked

    @invariant()
    def I1_what_was_tracked_never_fails(self):
        assert not self.ever_tracked & {c.id for c in self.ledger.in_state(S.FAILED)}

    @invariant()
    def I7_the_newest_resumable_is_the_latest(self):
        """The latest is never prunable or pruned: only a rollback lowers it."""
        latest = self.ledger.latest()
        newest = max(self.resumable, default=None)
        assert (latest.step if latest else None) == newest

    @invariant()
    def at_most_one_in_flight(self):
        assert len(self.ledger.in_state(*IN_FLIGHT)) <= 1

    @invariant()
    def I3_written_means_every_part_of_every_rank_reported(self):
        for c in self.ledger.in_state(S.SHARDS_WRITTEN, S.FINALIZED):
            assert self.accepted[c.id] == c.expected

    @invariant()
    def forgotten_ones_are_not_carried_along(self):
        assert not self.ledger.in_state(S.PRUNED, S.DISCARDED, S.ABSENT)

    @invariant()
    def steps_in_flight_are_newer_than_the_latest(self):
        latest, flying = self.ledger.latest(), self.flying()
        assert not (latest and flying) or flying.step > latest.step

    def teardown(self):
        target(float(self.most), label="checkpoints at once")
