"""The rules of recovery: one always decides, none is dead, and each does what the table says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from ledgers import MISSING, TORN, at, checkpoint, damaged, names, stock, unexplained, whole

from ckptfsm.core import lifecycle, recovery_rules
from ckptfsm.core.errors import IllegalTransition
from ckptfsm.core.events import Adopted, Event, FoundPublished
from ckptfsm.core.evidence import PublishedEvidence, StagingEvidence, TrackerEvidence
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.recovery_rules import RULES, Facts, Result, always, decide, rule_for

STEP = 20
VOUCHED, ANOTHER = "0a0a0a0a", "0b0b0b0b"  # checksums of manifests
LEFT_BY_A_CRASH = set(State) - {State.PRUNED, State.DISCARDED}  # the ledger forgets these
THERE = (
    None,
    whole(STEP),
    whole(STEP, at(STEP, attempt=7)),
    *(replace(whole(STEP), manifest_crc=crc) for crc in (VOUCHED, ANOTHER)),
    stock(STEP),
    damaged(STEP),
    replace(damaged(STEP), of=None),
    unexplained(STEP),
    PublishedEvidence(STEP, "no_directory", detail="a link"),
)
STAGING = (None, StagingEvidence(True), StagingEvidence(False, "receipt of rank 1 is missing"))
TRACKERS = (
    MISSING,
    TORN,
    names(STEP - 10),
    names(STEP),
    names(STEP + 10),
    TrackerEvidence("step", STEP + 10, by_us=True),
)


def histories(state: State) -> Iterator[Checkpoint]:
    """Checkpoints in this state that a journal can tell of, or the one that it does not know."""
    if state is State.ABSENT:
        yield lifecycle.absent(at(STEP))
        return
    reasons = ("rollback", "damaged", "missing") if state is State.QUARANTINED else ("",)
    published = state in (State.TRACKED, State.PRUNABLE, State.QUARANTINED)
    kinds = [("saved", False), ("saved", True)] + [("adopted", False)] * published
    for reason, (provenance, in_place) in product(reasons, kinds):
        made = checkpoint(STEP, state, reason=reason, provenance=provenance, in_place=in_place)
        yield made
        if state not in lifecycle.UNPUBLISHED:
            yield replace(made, manifest_crc=VOUCHED)


def every_case(state: State) -> Iterator[Facts]:
    """All facts that make a difference to a rule, in every combination."""
    staging = STAGING if state is State.SHARDS_WRITTEN else (None,)
    found = THERE[1:] if state is State.ABSENT else THERE  # else there is nothing to decide about
    steps = (None, STEP - 10, STEP + 10)
    flags = (False, True)
    for c, there, staged, tracker, trash, aside, newest, leads, in_use in product(
        histories(state), found, staging, TRACKERS, flags, flags, steps, flags, steps
    ):
        yield Facts(c, "iter", tracker, there, staged, trash, aside, newest, leads, in_use)


@pytest.mark.parametrize("state", sorted(LEFT_BY_A_CRASH), ids=lambda s: s.value)
def test_one_rule_decides_in_every_case_and_none_is_dead(state):
    """Catches: a state without a last rule, and a rule that another one hides."""
    mine = [rule for rule in RULES if state in rule.states]
    assert [rule.name for rule in mine if rule.when is always] == [mine[-1].name]
    assert {rule_for(facts).name for facts in every_case(state)} == {rule.name for rule in mine}


def test_only_the_manifest_that_the_journal_recorded_is_resumed_from():
    """Catches: another run's directory, whose attempt has the same name, that is kept, tracked or
    taken for gone. A manifest that recovery finds, and does not record."""
    for state in LEFT_BY_A_CRASH:
        for facts in every_case(state):
            there, actions = facts.there, decide(facts).actions
            found = [a for a in actions if isinstance(a, (Adopted, FoundPublished))]
            assert all(there is not None and a.manifest_crc == there.manifest_crc for a in found)
            if (
                state in (State.FINALIZED, State.TRACKED, State.PRUNABLE)
                and facts.checkpoint.manifest_crc
                and there is not None
                and there.manifest_crc == ANOTHER
            ):
                assert decide(facts).result is Result.WITHDRAWN_DAMAGED, facts


def test_a_hidden_rule_is_found(monkeypatch):
    """Catches: an enumeration of cases that finds every rule alive."""
    rules = list(RULES)
    first = next(n for n, rule in enumerate(rules) if rule.name == "whole")
    rules.insert(first + 1, replace(rules[first], name="hidden"))
    monkeypatch.setattr(recovery_rules, "RULES", tuple(rules))
    used = {rule_for(facts).name for facts in every_case(State.TRACKED)}
    assert used == {"whole", "damaged", "missing"}


def test_every_rule_has_a_distinct_name_and_is_for_states_of_a_ledger():
    """Catches: two rules that a report cannot tell apart, and a rule for a state that is forgotten."""
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert {state for rule in RULES for state in rule.states} == LEFT_BY_A_CRASH


@pytest.mark.parametrize("state", sorted(LEFT_BY_A_CRASH), ids=lambda s: s.value)
def test_a_decision_follows_its_rule_and_says_why(state):
    """Catches: an action of another attempt, or in another order than the table has it; no reason; a
    first event that the table of the lifecycle forbids."""
    for facts in every_case(state):
        rule, decision = rule_for(facts), decide(facts)
        assert (decision.rule, decision.result) == (rule.name, rule.result)
        assert tuple(type(action) for action in decision.actions) == rule.actions
        assert {action.of for action in decision.actions} <= {facts.checkpoint.id}
        assert decision.step == STEP and decision.why
        if decision.actions and isinstance(decision.actions[0], Event):
            _must_be_legal(facts.checkpoint, decision.actions[0])


def _must_be_legal(checkpoint: Checkpoint, event: Event) -> None:
    try:
        lifecycle.apply(checkpoint, event)
    except IllegalTransition as error:
        raise AssertionError(f"{event} in {checkpoint.state}") from error


def test_results_are_told_as_they_always_were():
    """Catches: a report that prints the name of a class instead of the result."""
    assert f"{Result.WITHDRAWN_MISSING}" == "withdrawn(missing)" == Result.WITHDRAWN_MISSING
    assert str(Result.ADOPTED) == "adopted"
