"""Plan a restart, from the journal and from the evidence on disk. Pure.

``plan`` collects the facts, lets the rules decide about each checkpoint (``recovery_rules.RULES``), and
orders the decisions. A root that cannot be decided is refused (``recovery_refusals``). The coordinator
carries the plan out through the same table and commands as a living save. In a root that is refused,
only epochs and temporaries have changed by then.

The same rules decide about a directory that no checkpoint of the journal explains. If there is evidence,
but no checkpoint to resume from, ``DamagedRoot`` is raised (I8). Only ``resume="fresh"`` may begin
again, after moving the evidence to quarantine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from ckptfsm.core.errors import DamagedRoot
from ckptfsm.core.events import (
    Adopted,
    Command,
    Event,
    Finalize,
    FoundPublished,
    Prune,
    Quarantine,
    Reprieved,
    Withdrawn,
    WritersLost,
    WriteTracker,
)
from ckptfsm.core.evidence import Evidence, TrackerEvidence, went_on
from ckptfsm.core.ledger import KnownCheckpoints, Ledger
from ckptfsm.core.lifecycle import UNPUBLISHED, Checkpoint, State, absent
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.recovery_refusals import (
    hopeless,
    reasons_against_scratch,
    refuse_leftovers,
    refuse_newcomer,
    warnings_of,
)
from ckptfsm.core.recovery_rules import (
    Decision,
    Facts,
    Result,
    actions_of,
    decide,
    is_there,
    was_put_back,
)
from ckptfsm.core.rollback import NO_INTENT, Intent

Resume = Literal["strict", "fallback", "fresh"]


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions in the order to carry them out. ``warnings`` are for display.

    ``reasons`` speak against beginning from scratch. ``only_resumable`` is an attempt to roll forward,
    if nothing else is left to resume from. The tracker is moved to ``fallback`` before anything is
    withdrawn. ``survivors`` are the steps that are tracked then, before an interrupted rollback is
    completed.
    """

    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    only_resumable: AttemptId | None = None
    fallback: int | None = None
    survivors: frozenset[int] = frozenset()

    @property
    def actions(self) -> list[Event | Command]:
        """The actions of all decisions, in their order."""
        return actions_of(self.decisions)


def plan(
    ledger: Ledger,
    evidence: Evidence,
    epoch: int,
    resume: Resume,
    *,
    intent: Intent = NO_INTENT,
    lost: frozenset[AttemptId] = frozenset(),
) -> Plan:
    """Decide. ``epoch`` is the new run's, ``lost`` was withdrawn by the last run as damaged or
    missing.

    While an ``intent`` is unfinished, the tracker and the journal are expected to differ.

    Raises ``DamagedRoot`` if there is evidence of a checkpoint and none to resume from. With
    ``strict``, also if the newest checkpoint is not the one that tracker and journal name.
    """
    interrupted = intent.unfinished
    afresh = "fresh" in (resume, interrupted)
    if interrupted and resume != "fresh":
        refuse_newcomer(intent, ledger, evidence)
    if interrupted or afresh:  # a power loss may show a move at both of its names
        evidence = replace(evidence, aside=frozenset())
    if afresh:  # a fresh start takes the tracker away first
        evidence = replace(evidence, tracker=TrackerEvidence("missing"))
    newest_counts = afresh or not (evidence.layout.by_tracker or interrupted)
    in_use = None if newest_counts else _newest_in_use(ledger, evidence, lost)
    facts = _facts(ledger, evidence)
    known = [decide(each) for each in facts]
    decisions = _in_order(known, _unknown(facts, evidence, epoch, in_use))
    survivors = _survivors(ledger, evidence, decisions)
    if afresh:
        refuse_leftovers(ledger, evidence, decisions)
        reasons: tuple[str, ...] = ()
    else:
        reasons = reasons_against_scratch(evidence, decisions, bool(interrupted), lost)
    if reasons and not survivors:
        raise hopeless(reasons)
    warnings = warnings_of(evidence, survivors, decisions, intent)
    if resume == "strict" and warnings:
        raise DamagedRoot(f"resume='strict': {warnings[0]}", warnings=warnings)
    found = [d for d in decisions if d.actions or d.result is Result.REPORTED]
    return Plan(
        (*found, *_strays(ledger, evidence)),
        warnings,
        reasons,
        _last_hope(decisions, survivors) if reasons else None,
        None if afresh else _fallback(ledger, evidence, decisions, survivors, intent),
        frozenset(survivors),
    )


def forget_moved(
    ledger: Ledger,
    decisions: Sequence[Decision],
    lost: frozenset[AttemptId] = frozenset(),
) -> Ledger:
    """The ledger to begin with: without the checkpoints that an earlier run moved to quarantine.

    The ``lost`` ones stay, as evidence, unless they are found again and adopted.
    """
    actions = actions_of(decisions)
    moving = {a.of for a in actions if isinstance(a, Quarantine)}
    staying = moving | (lost - {a.of for a in actions if isinstance(a, Adopted)})
    living = {
        of: c
        for of, c in ledger.checkpoints.items()
        if c.state is not State.QUARANTINED or of in staying
    }
    return replace(ledger, checkpoints=KnownCheckpoints(living))


# ------------------------------------------------------------------------------------------ facts


def _facts(ledger: Ledger, evidence: Evidence) -> list[Facts]:
    """Collect the facts for the rules, for every checkpoint of the journal."""
    latest = ledger.latest_step()
    saving = {c.step for c in ledger.in_state(State.FINALIZED)}
    return [
        Facts(
            checkpoint,
            evidence.layout.published_name(checkpoint.step),
            evidence.tracker,
            evidence.published.get(checkpoint.step),
            staging=evidence.staging.get(checkpoint.id),
            in_trash=checkpoint.id in evidence.trashed,
            in_quarantine=checkpoint.id in evidence.aside,
            newest=latest,
            tracker_leads=evidence.tracker.step in saving,
        )
        for checkpoint in sorted(ledger.checkpoints.values(), key=_turn)
    ]


def _turn(checkpoint: Checkpoint) -> tuple[int, bool, AttemptId]:
    """Sort by steps. At one step, a withdrawn checkpoint comes last: another has a right to the name."""
    return checkpoint.step, checkpoint.state is State.QUARANTINED, checkpoint.id


def _newest_in_use(ledger: Ledger, evidence: Evidence, lost: frozenset[AttemptId]) -> int | None:
    """The newest step that counts as in use; None if nothing tells. See ``History.lost``."""
    latest = ledger.latest()
    if evidence.tracker.step is not None:
        return evidence.tracker.step
    if latest is not None:  # torn or missing: the journal knows the latest
        return latest.step
    if evidence.release:
        return -1  # the release is in use, and every step is newer
    return max((of.step for of in lost), default=None)


# ------------------------------------------------------- directories that no checkpoint explains


def _unknown(
    known: Sequence[Facts], evidence: Evidence, epoch: int, in_use: int | None
) -> list[Decision]:
    """Decide about the directories that the journal does not explain.

    The newest comes first: an adoption that is interrupted then has the one to resume from already.
    The attempts are numbered from the oldest on, as if they had been saved one after the other.
    """
    explained = {facts.checkpoint.step for facts in known if _explains(facts)}
    strange = sorted(evidence.published.keys() - explained)
    decisions: list[Decision] = []
    for number, step in reversed(list(enumerate(strange, 1))):
        there = evidence.published[step]
        # A directory copied to another step's name holds a manifest of its old step.
        named = there.of if there.of is not None and there.of.step == step else None
        unknown = absent(named or AttemptId(step, epoch, number))
        name = evidence.layout.published_name(step)
        decisions.append(decide(Facts(unknown, name, evidence.tracker, there, in_use=in_use)))
    return decisions


def _explains(facts: Facts) -> bool:
    """True if the directory at its step's name is this checkpoint's, and decided with it.

    An attempt in place that was never tracked leaves a directory that a stock loader may accept. If
    another trainer went on from there, the directory is that trainer's.
    """
    checkpoint, there = facts.checkpoint, facts.there
    if there is None:
        return False
    if checkpoint.state is State.QUARANTINED:
        return is_there(facts) and not was_put_back(facts)
    if checkpoint.state in (State.FINALIZED, State.TRACKED, State.PRUNABLE):
        return is_there(facts)
    if checkpoint.in_place and there.found == "stock":
        return not went_on(checkpoint, facts.tracker)
    if there.of == checkpoint.id:  # damaged before it was ever tracked: that is for a person
        return there.found == "manifest" or checkpoint.state not in UNPUBLISHED
    return checkpoint.in_place and there.of is None


def _strays(ledger: Ledger, evidence: Evidence) -> list[Decision]:
    """Report the names that no attempt explains and that are no checkpoints, and do nothing more."""
    names = [(name, "no checkpoint, and nothing explains it") for name in evidence.strays]
    names += [
        (f"staging {of}", staged.detail or "no journal explains it")
        for of, staged in sorted(evidence.staging.items())
        if of not in ledger.checkpoints
    ]
    return [Decision(name, "none", "unknown name", Result.REPORTED, why) for name, why in names]


# ------------------------------------------------------------------------------------------ order


def _in_order(known: list[Decision], unknown: list[Decision]) -> list[Decision]:
    """Clean up the failed ones first, while the tracker still shows who resumed from them.

    Adoptions come next, so that the tracker never goes back below them meanwhile. An adoption waits
    if the journal's checkpoint of its step needs another action first. Withdrawals go from the newest
    down: a tracker that names one goes to what is left, and must not find another that is to leave.
    Prunes come last, the newest first: a pruned checkpoint that nothing newer outlives comes back.
    """
    leaving = [d for d in known if _has(d, Prune)]
    failed = [d for d in known if _has(d, WritersLost)]
    withdrawn = [d for d in known if _has(d, Withdrawn)]
    withdrawn.sort(key=lambda d: d.step or 0, reverse=True)
    staying = [d for d in known if d not in leaving and d not in failed and d not in withdrawn]
    busy = {d.step for d in known if d.actions and d not in failed}
    first = [d for d in unknown if d.actions and d.step not in busy]
    pruned = {d.step for d in leaving}
    rest = [d for d in unknown if d not in first]
    last = [d for d in rest if d.actions and d.step in pruned]
    ordered = [*failed, *first, *withdrawn, *staying, *(d for d in rest if d not in last)]
    for step, prunes in groupby(reversed(leaving), key=lambda d: d.step):
        ordered += [*prunes, *(d for d in last if d.step == step)]
    return ordered


def _has(decision: Decision, kind: type[Event | Command]) -> bool:
    return any(isinstance(action, kind) for action in decision.actions)


# ------------------------------------------------------------------------ checkpoints to resume
# from


def _survivors(ledger: Ledger, evidence: Evidence, decisions: list[Decision]) -> set[int]:
    """The steps that will be tracked once the decisions are carried out, in their order."""
    steps = {c.step for c in ledger.in_state(State.TRACKED)}
    for action in actions_of(decisions):
        if isinstance(action, Withdrawn):
            steps.discard(action.of.step)
        elif isinstance(action, (Adopted, FoundPublished, WriteTracker, Finalize, Reprieved)):
            steps.add(action.of.step)
        elif isinstance(action, Prune) and action.of in evidence.restorable:
            free = action.of.step not in evidence.published
            named = evidence.tracker.step == action.of.step
            if free and (named or action.of.step > max(steps, default=-1)):
                steps.add(action.of.step)  # in use, or nothing newer is left: reprieved
    return steps


def _last_hope(decisions: list[Decision], survivors: set[int]) -> AttemptId | None:
    """The attempt to roll forward, if there is nothing else to resume from."""
    forward = {a.of for a in actions_of(decisions) if isinstance(a, Finalize)}
    return next(iter(forward)) if survivors == {of.step for of in forward} else None


def _fallback(
    ledger: Ledger,
    evidence: Evidence,
    decisions: list[Decision],
    survivors: set[int],
    intent: Intent,
) -> int | None:
    """The step to move the tracker to before anything is withdrawn; None if the tracker may stay.

    The tracker moves if it tells nothing, or names a step that is to leave. Its new step is the
    newest that stays tracked, or is adopted or reprieved at its name. A withdrawal comes before the
    adoption of the directory at the same name. A death in between leaves the journal with an older
    checkpoint, and no opening resumes unasked from a newer one.

    While a rollback is unfinished, the tracker moves only if it names what leaves. It never goes above
    the target: the next opening would take a higher step for another trainer's.
    """
    actions, named = actions_of(decisions), evidence.tracker.step
    gone = {action.of for action in actions if isinstance(action, Withdrawn)}
    leaving = {a.of.step for a in actions if isinstance(a, (Withdrawn, Quarantine))}
    told_nothing = named is None and not intent.unfinished
    if not gone or named in survivors or not (told_nothing or named in leaving):
        return None
    steps = {c.step for c in ledger.in_state(State.TRACKED) if c.id not in gone}
    steps |= {a.of.step for a in actions if isinstance(a, (Adopted, Reprieved))}
    if intent.target is not None:
        steps = {step for step in steps if step <= intent.target}
    return max(steps, default=None)
