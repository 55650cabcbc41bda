"""Hypothesis strategies for policies, ledgers that a journal can contain, and evidence beside them.

Their combination need not be reasonable: evidence may contradict the ledger.
"""

from __future__ import annotations

from typing import Literal

from hypothesis import strategies as st
from ledgers import ledger_of

from ckptfsm.core.evidence import Evidence, PublishedEvidence, StagingEvidence, TrackerEvidence
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.lifecycle import FORGOTTEN, IN_FLIGHT, Checkpoint, State
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.core.retention import (
    AllOf,
    AnyOf,
    BestN,
    EveryNSeconds,
    EveryNSteps,
    KeepAll,
    LatestN,
    Policy,
    Steps,
)

MAX_STEP = 12
Provenance = Literal["saved", "adopted"]
Found = Literal["manifest", "stock", "damaged", "unexplained", "no_directory"]
Word = Literal["missing", "torn", "release"]
_PROVENANCES: tuple[Provenance, ...] = ("saved", "adopted")
_REASONS = ("rollback", "damaged", "missing", "fresh")
_FOUND: tuple[Found, ...] = ("manifest", "stock", "damaged", "unexplained", "no_directory")
_WORDS: tuple[Word, ...] = ("missing", "torn", "release")


def steps() -> st.SearchStrategy[int]:
    """A step, from 0 to 12."""
    return st.integers(0, MAX_STEP)


def policies() -> st.SearchStrategy[Policy]:
    """A retention policy, also one that keeps nothing, and combinations."""
    simple: st.SearchStrategy[Policy] = st.one_of(
        st.builds(LatestN, st.integers(0, 3)),
        st.builds(EveryNSteps, st.integers(1, 5)),
        st.builds(EveryNSeconds, st.floats(0.5, 50)),
        st.builds(BestN, st.just("loss"), st.integers(0, 2), st.sampled_from(("min", "max"))),
        st.builds(Steps, st.sets(steps(), max_size=3)),
        st.just(KeepAll()),
    )
    several = st.lists(simple, min_size=2, max_size=3).map(tuple)
    return st.one_of(simple, several.map(AnyOf), several.map(AllOf))


def layouts(max_parts: int = 3) -> st.SearchStrategy[tuple[PartSpec, ...]]:
    """The declared parts of a checkpoint: ``state`` at its root, and others beside it."""
    others = (
        PartSpec("actor", "dcp", "actor"),
        PartSpec("critic", directory="critic", ranks=(0,)),
        PartSpec("data", "file", ranks=(0,)),
    )
    more = st.lists(st.sampled_from(others), unique=True, max_size=max_parts - 1)
    return more.map(lambda drawn: (PartSpec("state"), *drawn))


@st.composite
def ledgers(draw: st.DrawFn, max_checkpoints: int = 4) -> Ledger:
    """A ledger that a journal can contain: distinct steps, at most the newest one in flight."""
    chosen = sorted(draw(st.sets(steps(), max_size=max_checkpoints)))
    settled = sorted(set(State) - FORGOTTEN - IN_FLIGHT - {State.ABSENT}, key=list(State).index)
    ledger = Ledger()
    newer_is_tracked = False
    for position, step in reversed(list(enumerate(chosen))):
        states = settled
        if position == len(chosen) - 1:
            states = [*settled, *sorted(IN_FLIGHT, key=list(State).index)]
        state = draw(st.sampled_from(states))
        if state is State.PRUNABLE and not newer_is_tracked:
            state = State.TRACKED  # no newer one could make it prunable
        newer_is_tracked = newer_is_tracked or state is State.TRACKED
        provenance: Provenance = "saved"
        if state in (State.TRACKED, State.PRUNABLE, State.QUARANTINED):
            provenance = draw(st.sampled_from(_PROVENANCES))
        of = AttemptId(step, draw(st.integers(1, 2)), position + 1)
        checkpoint = Checkpoint(
            of,
            state,
            draw(layouts()) if provenance == "saved" else (),
            draw(st.integers(1, 2)) if provenance == "saved" else 1,
            provenance=provenance,
            reason=draw(st.sampled_from(_REASONS)) if state is State.QUARANTINED else "",
        )
        ledger = ledger_of(checkpoint, base=ledger)
    return ledger


@st.composite
def published_evidence(draw: st.DrawFn, ledger: Ledger, step: int) -> PublishedEvidence:
    """A directory under a published name: of its attempt, of another one, a stock one, or broken."""
    failed = State.FAILED  # never published
    own = [c.id for c in ledger.checkpoints.values() if c.step == step and c.state is not failed]
    found = draw(st.sampled_from(_FOUND))
    of = None
    if found in ("manifest", "damaged"):
        torn = [None] if found == "damaged" else []
        of = draw(st.sampled_from([*own, AttemptId(step, 9, 9), *torn]))
    return PublishedEvidence(step, found, of, detail="" if found == "manifest" else "as drawn")


@st.composite
def evidences(draw: st.DrawFn, ledger: Ledger) -> Evidence:
    """Evidence of a disk beside ``ledger``, which it may or may not fit."""
    known = sorted({c.step for c in ledger.checkpoints.values()})
    candidates = st.one_of(st.sampled_from(known), steps()) if known else steps()
    there = sorted(draw(st.sets(candidates, max_size=4)))
    published = {step: draw(published_evidence(ledger, step)) for step in there}
    staging = {
        of: StagingEvidence(draw(st.booleans()), "as drawn")
        for of, c in ledger.checkpoints.items()
        if c.state in IN_FLIGHT | {State.FAILED} and draw(st.booleans())
    }
    named = draw(st.one_of(st.none(), candidates))
    word = draw(st.sampled_from(_WORDS))
    tracker = TrackerEvidence(word)
    if named is not None:
        tracker = TrackerEvidence("step", named, draw(st.booleans()))
    release = tracker.found == "release" and draw(st.booleans())
    withdrawn = [of for of, c in ledger.checkpoints.items() if c.state is State.QUARANTINED]
    aside = frozenset(of for of in withdrawn if draw(st.booleans()))
    leaving = [
        *withdrawn,
        *(of for of, c in ledger.checkpoints.items() if c.state is State.PRUNABLE),
    ]
    trashed = frozenset(of for of in leaving if draw(st.booleans()))
    back = frozenset(of for of in trashed if of not in withdrawn and draw(st.booleans()))
    return Evidence(
        tracker,
        published,
        staging,
        release=release,
        aside=aside,
        trashed=trashed,
        restorable=back,
        unnamed=("ckpt_7",) if draw(st.booleans()) else (),
    )
