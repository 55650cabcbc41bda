"""Properties of recovery and retention for any ledger and any evidence, contradictory ones too.

``carry_out`` plays the coordinator: it takes a plan's actions through the production ledger and
changes the evidence as the commands change the disk.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from ckptfsm.core import events as m
from ckptfsm.core.errors import DamagedRoot, IllegalTransition
from ckptfsm.core.evidence import Evidence, PublishedEvidence, TrackerEvidence
from ckptfsm.core.ledger import KnownCheckpoints, Ledger
from ckptfsm.core.lifecycle import IN_FLIGHT, Checkpoint, State
from ckptfsm.core.recovery import forget_moved, plan
from ckptfsm.core.retention import describe_tracked
from proof.drawn_roots import evidences, ledgers, policies, steps

RESUME = st.sampled_from(("strict", "fallback", "fresh"))
EPOCH = 3


@st.composite
def roots(draw) -> tuple[Ledger, Evidence]:
    ledger = draw(ledgers())
    return ledger, draw(evidences(ledger))


def is_whole(checkpoint: Checkpoint, evidence: Evidence) -> bool:
    """Its directory is there, complete, and of this attempt."""
    there = evidence.published.get(checkpoint.step)
    if there is None:
        return False
    own = there.found == "manifest" and there.of == checkpoint.id
    return own or (checkpoint.provenance == "adopted" and there.found == "stock")


class Played:
    """A ledger and evidence on which decisions are carried out as the applier does."""

    def __init__(self, ledger: Ledger, evidence: Evidence) -> None:
        self.ledger = ledger
        self.evidence = evidence

    def post(self, event: m.Event) -> None:
        self.ledger, _, command = self.ledger.post(event)
        if command is not None:
            self.run(command)

    def run(self, command: m.Command) -> None:
        of = command.of
        checkpoint = self.ledger.checkpoints.get(of)
        match command:
            case m.Finalize():
                self._publish(PublishedEvidence(of.step, "manifest", of))
                self.post(m.PublishedOnDisk(of))
                self.post(m.Published(of))
            case m.WriteTracker():
                self.evidence = replace(self.evidence, tracker=_our_tracker(of.step))
                if checkpoint is not None and checkpoint.state is State.FINALIZED:
                    self.post(m.TrackerWritten(of))
            case m.Prune():
                self._prune(of)
            case m.CleanUp():
                self._forget_staging(of)
                self.post(m.Cleaned(of))
            case m.Quarantine():
                self._move_aside(of)
            case _:
                raise AssertionError(f"recovery would {command}")

    def _publish(self, there: PublishedEvidence) -> None:
        published = {**self.evidence.published, there.step: there}
        self.evidence = replace(self.evidence, published=published)
        assert there.of is not None
        self._forget_staging(there.of)

    def _forget_staging(self, of: m.AttemptId) -> None:
        staging = {k: v for k, v in self.evidence.staging.items() if k != of}
        self.evidence = replace(self.evidence, staging=staging)

    def _prune(self, of: m.AttemptId) -> None:
        """The step comes back if nothing newer is tracked, or for a reader: of a step that three
        divides."""
        there = self.evidence.published.get(of.step)
        latest = self.ledger.latest()
        needed = latest is None or latest.step < of.step or of.step % 3 == 0
        if of not in self.evidence.trashed or not needed:
            self.evidence = replace(self.evidence, trashed=self.evidence.trashed - {of})
            self.post(m.Removed(of))
        elif there is not None or of not in self.evidence.restorable:
            self.post(m.Withdrawn(of, "damaged"))
        else:
            published = {**self.evidence.published, of.step: _back(self.ledger.checkpoints[of])}
            trashed = self.evidence.trashed - {of}
            self.evidence = replace(self.evidence, published=published, trashed=trashed)
            self.post(m.Reprieved(of, "needed"))

    def _move_aside(self, of: m.AttemptId) -> None:
        moved = self.evidence.trashed & {of}
        trashed, aside = self.evidence.trashed - moved, self.evidence.aside | moved
        self.evidence = replace(self.evidence, trashed=trashed, aside=aside)
        living = self.ledger.in_state(State.FINALIZED, State.TRACKED, State.PRUNABLE)
        there = self.evidence.published.get(of.step)
        if any(c.step == of.step for c in living) or there is None:
            return
        checkpoint = self.ledger.checkpoints[of]
        nameless = there.of is None and there.found != "no_directory" and not moved
        own = there.of == of or nameless
        if own and checkpoint.reason != "missing":
            published = {k: v for k, v in self.evidence.published.items() if k != of.step}
            aside = self.evidence.aside | {of}
            self.evidence = replace(self.evidence, published=published, aside=aside)

    def end(self) -> None:
        """The last act of an opening: the tracker names the latest."""
        latest = self.ledger.latest()
        if latest is not None:
            self.evidence = replace(self.evidence, tracker=_our_tracker(latest.step))


def _our_tracker(step: int) -> TrackerEvidence:
    return TrackerEvidence("step", step, by_us=True)


def _back(checkpoint: Checkpoint) -> PublishedEvidence:
    if checkpoint.provenance == "adopted":
        return PublishedEvidence(checkpoint.step, "stock")
    return PublishedEvidence(checkpoint.step, "manifest", checkpoint.id)


def carry_out(ledger: Ledger, evidence: Evidence, decisions) -> Played:
    played = Played(forget_moved(ledger, decisions), evidence)
    for decision in decisions:
        for action in decision.actions:
            if isinstance(action, m.Command):
                played.run(action)
            else:
                played.post(action)
    played.end()
    return played


@given(root=roots(), resume=RESUME)
def recovery_is_lawful_and_loses_nothing(root, resume):
    """I1, I2, I8: legal moves only; a whole tracked checkpoint stays; no start from scratch."""
    ledger, evidence = root
    whole = {c.step for c in ledger.in_state(State.TRACKED) if is_whole(c, evidence)}
    tracked_in_journal = bool(ledger.in_state(State.TRACKED, State.PRUNABLE, State.FINALIZED))
    try:
        decided = plan(ledger, evidence, EPOCH, resume)
    except DamagedRoot:
        assert resume != "fallback" or not whole, "I8: gave up although a whole one is there"
        return
    assert decided == plan(ledger, evidence, EPOCH, resume), "I8: not a function of its inputs"
    try:
        played = carry_out(ledger, evidence, decided.decisions)
    except IllegalTransition as error:
        raise AssertionError(f"I11: recovery decided an illegal move: {error}") from error
    after = played.ledger
    kept = {c.step for c in after.in_state(State.TRACKED)}
    assert whole <= kept, f"I2: whole tracked steps {whole - kept} were given up"
    for checkpoint in after.in_state(State.TRACKED):
        assert is_whole(checkpoint, played.evidence), f"I2: {checkpoint.id} is not whole"
    assert not after.in_state(*IN_FLIGHT, State.PRUNABLE, State.FAILED), "I8: left undecided"
    if resume != "fresh" and not kept:
        adoptable = [p for p in evidence.published.values() if p.found in ("manifest", "stock")]
        named = evidence.tracker.found in ("step", "torn")
        assert not adoptable or not named, "I8: from scratch beside a complete checkpoint"
        assert not evidence.unnamed or evidence.release, "I8: from scratch beside a .metadata"
        assert not named, "I8: from scratch although the tracker says something"
        assert not tracked_in_journal or evidence.release or not evidence.published, (
            "I8: from scratch although the journal knows one"
        )


def _beside_a_release() -> tuple[Ledger, Evidence]:
    """Step 0, of another program, is newer than the release; ours, step 1, was published and is
    tracked now."""
    ours, other = m.AttemptId(1, 1, 1), m.AttemptId(0, 9, 9)
    requested = Checkpoint(ours, State.REQUESTED, (m.PartSpec("state"),), 1)
    published = {of.step: PublishedEvidence(of.step, "manifest", of) for of in (other, ours)}
    tracker = TrackerEvidence("release")
    return Ledger(KnownCheckpoints({ours: requested})), Evidence(tracker, published, release=True)


@example(root=_beside_a_release())
@given(root=roots())
def recovery_is_idempotent(root):
    """I8: the next recovery finds the results of the first settled; its tracker is the ledger's
    latest.

    A complete directory that was newer than the step in use, and no longer is, may be adopted now.
    """
    ledger, evidence = root
    try:
        decided = plan(ledger, evidence, EPOCH, "fallback")
    except DamagedRoot:
        return
    played = carry_out(ledger, evidence, decided.decisions)
    again = plan(played.ledger, played.evidence, EPOCH + 1, "fallback")
    latest = played.ledger.latest()
    bound = evidence.tracker.step
    if bound is None:
        before = ledger.latest()
        bound = before.step if before is not None else -1 if evidence.release else None
    late = {
        p for p in evidence.published if bound is not None and latest and bound < p < latest.step
    }
    changing = [d for d in again.decisions if any(_changes(a, late) for a in d.actions)]
    assert not changing, f"I8: a second recovery still decides {changing}"
    assert latest is None or played.evidence.tracker.step == latest.step


def _changes(action, late: set[int]) -> bool:
    """Moving aside may be repeated; what the tracker has passed by now may be adopted."""
    if isinstance(action, m.Adopted):
        return action.of.step not in late
    return not isinstance(action, m.Quarantine)


@given(
    ledger=ledgers(6),
    policy=policies(),
    pins=st.sets(steps()),
    readers=st.sets(steps()),
    held=st.sets(steps()),
)
def retention_never_takes_what_is_needed(ledger, policy, pins, readers, held):
    """I7: not the latest, nothing in flight, pinned, leased or held by a job, and nothing that did not
    get tracked.
    """
    ledger = ledger.protected(pins, readers, held)
    others = pins | readers | held
    tracked = ledger.in_state(State.TRACKED)
    preserved = frozenset(policy.preserve(describe_tracked(ledger)))
    offered = {offer.of for offer in ledger.to_prune(preserved)}
    assert offered <= {c.id for c in tracked}
    if tracked:
        assert tracked[-1].id not in offered, "I7: the latest was offered"
    for offer in ledger.to_prune(preserved):
        step = offer.of.step
        assert step not in others | preserved, "I7: a protected one was offered"
        ledger, moved, command = ledger.post(offer)
        assert moved.dest is State.PRUNABLE and isinstance(command, m.Prune)
    assert not tracked or ledger.latest() == tracked[-1], "I7: retention emptied the store"
    for checkpoint in ledger.in_state(State.TRACKED):
        taken = checkpoint.step in others | preserved or checkpoint == tracked[-1]
        assert taken, "a policy was not obeyed"


PROPERTIES = (
    recovery_is_lawful_and_loses_nothing,
    recovery_is_idempotent,
    retention_never_takes_what_is_needed,
)
