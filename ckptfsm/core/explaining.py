"""Explains a checkpoint: why it is kept, and when it may go. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptfsm.core.evidence import TrackerEvidence
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.rollback import Intent

if TYPE_CHECKING:
    from ckptfsm.core.recovery import Plan

RETENTION = "retention"  # kept by the policy of the trainer


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The facts about a root that explanations use.

    ``pins`` are the reasons of pins by step, ``readers`` the numbers of reader leases by step.
    ``owned``: the owner of the root lives, or may live on another host. ``rules`` are those of the
    recorded policy, by step. ``damaged``: why a tracked step is not whole at its name. ``held``: the
    jobs that hold a step and are not done, each with its state, in words.
    """

    ledger: Ledger
    tracker: TrackerEvidence
    pins: Mapping[int, str]
    readers: Mapping[int, int]
    owned: bool
    rules: Mapping[int, str] = field(default_factory=dict)
    damaged: Mapping[int, str] = field(default_factory=dict)
    held: Mapping[int, str] = field(default_factory=dict)


def kept_by(ledger: Ledger) -> dict[AttemptId, tuple[str, ...]]:
    """The reasons that keep each tracked checkpoint: ``latest``, ``pin``, ``reader``, ``job``,
    ``retention``.

    The owner alone applies the policy. So a tracked checkpoint that nothing else keeps is kept by the
    policy, or the owner has not applied the policy yet.
    """
    return {offer.of: offer.kept_by or (RETENTION,) for offer in ledger.offers(())}


def explain(checkpoint: Checkpoint, facts: Surroundings) -> list[str]:
    """Sentences about one checkpoint, the most important first."""
    return [
        *_its_state(checkpoint, facts),
        *_its_rank_among_others(checkpoint, facts),
        *_its_end(checkpoint, facts),
    ]


def explain_plan(decided: Plan, intent: Intent, *, release: bool = False) -> list[str]:
    """Sentences about a start that would carry out a plan.

    ``release``: the tracker says ``release``, and its directory can be loaded.
    """
    step = _resumes_from(decided, intent)
    at_zero = _AT_RELEASE if release and not intent.unfinished else _AT_ZERO
    lines = [f"A start would resume from step {step}." if step is not None else at_zero]
    if decided.decisions:
        lines.append("It would decide, in this order:")
    for decision in decided.decisions:
        rule = f" [rule {decision.rule}]" if decision.rule else ""
        last = "" if decision.last == "none" else f", {decision.last} by the journal"
        lines.append(
            f"- {decision.subject}{last}: {decision.result}, because: {decision.why}{rule}"
        )
    lines += [f"It would warn: {warning}" for warning in decided.warnings]
    if decided.only_resumable is not None:
        lines.append(
            f"If {decided.only_resumable} cannot be completed, the start would be refused."
        )
    if step is not None:
        lines.append(_NOT_READ)
    return [*lines, "Nothing was changed."]


_NOT_READ = (
    "This rests on names and sizes. The contents were not read, and a start falls back from those "
    "that are damaged. To read them: ckptfsm verify --all"
)
_AT_ZERO = "A start would begin at zero: no checkpoint is left to resume from."
_AT_RELEASE = "A start would begin from the release that the tracker names, as step 0."


def _resumes_from(decided: Plan, intent: Intent) -> int | None:
    """The step that is the latest once the plan, and an interrupted rollback, are carried out."""
    if intent.unfinished == "fresh":
        return None
    steps = decided.survivors
    below = [s for s in steps if intent.target is None or s <= intent.target]
    return max(below or steps, default=None)


def _its_state(checkpoint: Checkpoint, facts: Surroundings) -> list[str]:
    step, state = checkpoint.step, checkpoint.state
    adopted = ", adopted from another program's files" if checkpoint.provenance == "adopted" else ""
    if state is State.TRACKED and step in facts.damaged:
        said = f"Step {step} is tracked{adopted}, and is not usable: {facts.damaged[step]}."
        return [said, "The way out: ckptfsm doctor"]
    if state is State.TRACKED:
        return [f"Step {step} is complete and tracked{adopted}."]
    if state in (State.REQUESTED, State.FORKED):
        shards, ranks = len(checkpoint.expected), checkpoint.world_size
        place = (
            "at its name, without a manifest"
            if checkpoint.in_place
            else "in staging, where no loader looks"
        )
        return [
            f"The save of step {step} is in flight ({state.value}): {shards} shards of {ranks} ranks.",
            f"Its files are {place}.",
            *_if_ended(facts),
        ]
    if state is State.SHARDS_WRITTEN:
        left = "metadata and its manifest" if checkpoint.in_place else "metadata and its name"
        words = f"Step {step} has all its shards on disk. Its {left} come next."
        return [words, *_if_ended(facts)]
    if state is State.FINALIZED:
        words = f"Step {step} is complete at its name. The journal does not have it as tracked yet."
        return [words, *_if_ended(facts)]
    if state is State.PRUNABLE:
        return [f"Step {step} is being removed: a newer one is tracked, and nothing kept it."]
    if state is State.FAILED:
        return [f"The save of step {step} failed: {checkpoint.why}. Its files are not removed yet."]
    kept = "" if checkpoint.reason == "missing" else " Its files go to quarantine."
    return [f"Step {step} was withdrawn: {checkpoint.why}.{kept}"]


def _if_ended(facts: Surroundings) -> list[str]:
    return [] if facts.owned else ["Its owner has ended: the next start decides about it."]


def _its_rank_among_others(checkpoint: Checkpoint, facts: Surroundings) -> list[str]:
    latest, tracker = facts.ledger.latest(), facts.tracker
    if latest is None:
        return ["No checkpoint of this root is tracked."]
    if latest.id != checkpoint.id:
        return [f"The latest is step {latest.step}: it is the newest tracked one."]
    if tracker.step == checkpoint.step:
        return ["It is the latest: the newest tracked one, and the tracker names it."]
    said = repr(tracker.found) if tracker.step is None else str(tracker.step)
    named = "is missing" if tracker.found == "missing" else f"says {said}"
    return [
        f"It is the latest by the journal, but the tracker {named}.",
        "To see what a start decides: ckptfsm explain --resume",
    ]


def _its_end(checkpoint: Checkpoint, facts: Surroundings) -> list[str]:
    """The facts that keep it from deletion, and the way to end each."""
    if checkpoint.state is not State.TRACKED:
        return []
    step, reasons = checkpoint.step, kept_by(facts.ledger)[checkpoint.id]
    told = {
        "latest": "It is kept because it is the latest. A newer step has to be tracked first.",
        "pin": f"It is kept by a pin{_because(facts.pins.get(step, ''))}. "
        f"To end that: ckptfsm unpin {step}",
        "reader": f"It is kept by {facts.readers.get(step, 0)} reader lease(s). A lease ends when its "
        "reader gives it back, or some time after the reader has died.",
        "job": f"It is kept until these jobs are done: {facts.held.get(step, '')}.",
        RETENTION: _by_policy(step, facts),
    }
    return [told[reason] for reason in reasons]


def _by_policy(step: int, facts: Surroundings) -> str:
    if step in facts.rules:
        return f"It is kept by the retention policy of the trainer: {facts.rules[step]}."
    if facts.owned:
        return "It is kept by the retention policy, or the owner has not applied the policy yet."
    if facts.rules:
        return "No rule of the trainer's policy keeps it: the next run of the job deletes it."
    return "It is kept by the retention policy of the trainer."


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""
