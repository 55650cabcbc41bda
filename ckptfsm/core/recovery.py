"""What a restart decides, from the journal and from what is on disk. Pure.

``plan`` looks at (ledger x evidence x tracker) and returns decisions; the coordinator carries them
out through the same table and the same commands as a living save. Nothing is changed before the plan
is complete, so a root that cannot be decided is left as it was.

The rules, by the last journaled state of an attempt:

| last | evidence | decision |
|---|---|---|
| requested, forked | not published | failed(process_lost) |
| shards_written | receipts and planned metadata valid, nobody else's by now | finalize: roll forward |
| shards_written | otherwise | failed(process_lost) |
| any before finalized | published with its own valid manifest | finalized |
| finalized | there, newer than every tracked one | track |
| finalized | otherwise | withdrawn |
| tracked | missing, damaged or another's | withdrawn; the newest valid one is next |
| prunable | still at its name | reprieved; retention looks at every guard again |
| prunable | damaged at its name | withdrawn(damaged) |
| prunable | gone from its name | removed, or back if it is needed; withdrawn if it cannot be |
| failed | - | files to the trash |
| quarantined | still at its name, or in the trash | moved aside |
| none | complete, not newer than the tracker (or all go) | adopted, pinned; the newest first |
| none | anything else | reported, never touched |

A whole directory of another attempt at the name is not explained, nor is one that was damaged
before the journal knew that it had been published. Where the tracker names no step, "newer" is newer
than the journal's latest; if it has none, every step is newer than a ``release`` in use; else it
is newer than what was lost.

Rules of this module: evidence is never explained away. If there is any and no checkpoint to resume
from comes out, ``DamagedRoot`` is raised (I8); only ``resume="fresh"`` may begin again, after moving
the evidence to quarantine.
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
    Failed,
    Finalize,
    FoundPublished,
    Prune,
    Quarantine,
    Reprieved,
    Withdrawn,
    WritersLost,
    WriteTracker,
)
from ckptfsm.core.evidence import (
    Evidence,
    TrackerEvidence,
    is_its_own,
    is_whole,
    went_on,
    why_not_whole,
)
from ckptfsm.core.layout import QUARANTINE, TRASH
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.lifecycle import UNPUBLISHED, Checkpoint, State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.rollback import NO_INTENT, Intent

Resume = Literal["strict", "fallback", "fresh"]
_FAILING = (*UNPUBLISHED, State.FAILED)


@dataclass(frozen=True, slots=True)
class Decision:
    """One thing recovery decided about one attempt (or name), and why.

    ``actions`` are carried out in order: events through the table, commands as the table would emit
    them. A decision without actions is a report.
    """

    subject: str
    last: str
    found: str
    result: str
    why: str
    actions: tuple[Event | Command, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The decisions in the order to carry them out. ``warnings`` are for people.

    ``reasons`` speak against beginning from scratch; ``last_hope`` is an attempt that is to be rolled
    forward, if nothing else is left to resume from. The tracker is put to ``fallback`` before anything
    is withdrawn.
    """

    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    last_hope: AttemptId | None = None
    fallback: int | None = None

    @property
    def actions(self) -> list[Event | Command]:
        """Those of all decisions, in their order."""
        return _actions(self.decisions)


def plan(
    ledger: Ledger,
    evidence: Evidence,
    epoch: int,
    resume: Resume,
    *,
    intent: Intent = NO_INTENT,
    lost: frozenset[AttemptId] = frozenset(),
) -> Plan:
    """Decide. ``epoch`` is the new run's. While an ``intent`` is unfinished, the tracker and the journal
    are expected to differ. ``lost``: withdrawn by the last run, as damaged or missing.

    Raises ``DamagedRoot`` when there is evidence of a checkpoint and none to resume from, or, with
    ``strict``, when the newest one is not what tracker and journal say.
    """
    interrupted = intent.unfinished
    afresh = "fresh" in (resume, interrupted)
    if interrupted and resume != "fresh":
        _refuse_newcomer(intent, ledger, evidence)
    if interrupted or afresh:  # a power loss may show a move at both of its names
        evidence = replace(evidence, aside=frozenset())
    if afresh:  # it is taken away first
        evidence = replace(evidence, tracker=TrackerEvidence("missing"))
    known = [_decide(c, ledger, evidence) for c in _all(ledger)]
    limit = None if afresh else _newest_in_use(ledger, evidence, lost)
    unknown = _unknown(ledger, evidence, epoch, limit)
    decisions = _in_order(ledger, known, unknown)
    survivors = _survivors(ledger, evidence, decisions)
    if afresh:
        _refuse_leftovers(ledger, evidence, decisions)
        reasons: tuple[str, ...] = ()
    else:
        reasons = _reasons(evidence, decisions, bool(interrupted), lost)
    if reasons and not survivors:
        raise hopeless(reasons)
    warnings = _warnings(evidence, survivors, decisions, intent)
    if resume == "strict" and warnings:
        raise DamagedRoot(f"resume='strict': {warnings[0]}", warnings=warnings)
    found = [d for d in decisions if d.actions or d.result == "reported"]
    forward = {a.of for a in _actions(decisions) if isinstance(a, Finalize)}
    only = bool(reasons) and survivors == {of.step for of in forward}
    last_hope = next(iter(forward)) if only else None
    goes_back = interrupted or afresh
    fallback = None if goes_back else _fallback(ledger, evidence, decisions, survivors)
    return Plan((*found, *_strays(ledger, evidence)), warnings, reasons, last_hope, fallback)


def forget_moved(
    ledger: Ledger,
    decisions: Sequence[Decision],
    lost: frozenset[AttemptId] = frozenset(),
) -> Ledger:
    """The ledger to begin with: without what was moved to quarantine by an earlier run.

    What is ``lost`` stays, as evidence, unless it is there again and adopted.
    """
    actions = _actions(decisions)
    moving = {a.of for a in actions if isinstance(a, Quarantine)}
    staying = moving | (lost - {a.of for a in actions if isinstance(a, Adopted)})
    living = {
        of: c
        for of, c in ledger.checkpoints.items()
        if c.state is not State.QUARANTINED or of in staying
    }
    return replace(ledger, checkpoints=living)


def _in_order(ledger: Ledger, known: list[Decision], unknown: list[Decision]) -> list[Decision]:
    """What has failed is cleaned up first: the tracker still tells who went on from it.

    Then comes what is adopted, so that the tracker never goes back below it meanwhile, but not where the
    journal's own checkpoint has to leave the step before. Prunes come late, the newest first: one that
    nothing newer outlives comes back.
    """
    leaving = [d for d in known if any(isinstance(a, Prune) for a in d.actions)]
    failed = [d for d in known if any(isinstance(a, WritersLost) for a in d.actions)]
    staying = [d for d in known if d not in leaving and d not in failed]
    busy = {_step(d) for d in known if d.actions and d not in failed}
    first = [d for d in unknown if d.actions and not any(a.of.step in busy for a in d.actions)]
    pruned = {a.of.step for d in leaving for a in d.actions}
    rest = [d for d in unknown if d not in first]
    last = [d for d in rest if any(a.of.step in pruned for a in d.actions)]
    ordered = [*failed, *first, *staying, *(d for d in rest if d not in last)]
    for step, prunes in groupby(reversed(leaving), key=_step):
        ordered += [*prunes, *(d for d in last if _step(d) == step)]
    return ordered


def _step(decision: Decision) -> int:
    """Of a decision with actions: they are of one step."""
    return decision.actions[0].of.step


def _all(ledger: Ledger) -> list[Checkpoint]:
    return sorted(ledger.checkpoints.values(), key=_turn)


def _turn(checkpoint: Checkpoint) -> tuple[int, bool, AttemptId]:
    """By steps. What was withdrawn before comes after what may have a right to its name until then."""
    return checkpoint.step, checkpoint.state is State.QUARANTINED, checkpoint.id


def _decide(checkpoint: Checkpoint, ledger: Ledger, evidence: Evidence) -> Decision:
    """The row of the module's table for one checkpoint of the journal."""
    of, state = checkpoint.id, checkpoint.state
    there = evidence.published.get(of.step)
    whole = there is not None and is_whole(checkpoint, there)
    found = there.found if there is not None else "not published"
    if state in (State.REQUESTED, State.FORKED, State.SHARDS_WRITTEN):
        return _decide_unpublished(checkpoint, whole, ledger, evidence)
    if state is State.FINALIZED:
        latest = ledger.latest()
        newer = latest is None or of.step > latest.step
        if whole and newer:
            why = "complete under its published name"
            return _decision(checkpoint, found, "tracked", why, WriteTracker(of))
        if not whole:
            return _withdrawn(checkpoint, evidence)
        why = "not newer than the tracked one"
        return _decision(checkpoint, found, "withdrawn", why, Withdrawn(of, "damaged", why))
    if state is State.TRACKED:
        if whole and _is_there(checkpoint, evidence):
            return _decision(checkpoint, found, "kept", "complete")
        return _withdrawn(checkpoint, evidence)
    if state is State.QUARANTINED:
        back = whole and there is not None and there.of == of  # it needs no other copy
        left = of in evidence.trashed and not back
        if left or _is_to_be_moved(checkpoint, ledger, evidence):
            return _decision(checkpoint, found, "quarantined", "withdrawn before", Quarantine(of))
        why = "moved aside before, or somebody put it back"
        return _decision(checkpoint, found, "forgotten", why)
    if state is State.PRUNABLE:
        own = _is_there(checkpoint, evidence)
        if there is None or (_is_elsewhere(checkpoint, evidence) and not own):
            why = "gone from its name: removed, unless it is needed after all"
            return _decision(checkpoint, found, "pruned", why, Prune(of))
        if whole and own:
            why = "still at its name: every guard is looked at again"
            return _decision(checkpoint, found, "tracked", why, Reprieved(of, "restart"))
        return _withdrawn(checkpoint, evidence)
    return _decision(checkpoint, found, "discarded", "it had failed", WritersLost(of))


def _withdrawn(checkpoint: Checkpoint, evidence: Evidence) -> Decision:
    """It is not whole. Of one that is missing, nothing is to be moved aside later either."""
    there = evidence.published.get(checkpoint.step)
    found = there.found if there is not None else "not published"
    own = _is_there(checkpoint, evidence)
    reason: Literal["missing", "damaged"] = "damaged" if own else "missing"
    trashed = there is None and checkpoint.id in evidence.trashed
    lies = f"; look in {TRASH} and {QUARANTINE}" if trashed else ""
    gone = Withdrawn(checkpoint.id, reason, why_not_whole(there) + lies)
    return _decision(checkpoint, found, f"withdrawn({reason})", gone.detail, gone)


def _is_elsewhere(checkpoint: Checkpoint, evidence: Evidence) -> bool:
    """True if its own directory was moved to trash or quarantine.

    A tracked one lies in the trash where a fenced run's rename landed late, or a power loss left both
    names; in quarantine only what has left its state.
    """
    left = checkpoint.state in (State.PRUNABLE, State.QUARANTINED)
    return checkpoint.id in evidence.trashed or (left and checkpoint.id in evidence.aside)


def _is_there(checkpoint: Checkpoint, evidence: Evidence) -> bool:
    """True if its own directory stands at its name.

    What was saved here and withdrawn by an earlier run, and is there in a form that only a stock loader
    takes, a stock trainer saved again: its own went to quarantine, and a person may have emptied that.
    """
    there = evidence.published.get(checkpoint.step)
    if there is None:
        return False
    withdrawn = checkpoint.state is State.QUARANTINED and checkpoint.provenance == "saved"
    if withdrawn and there.found == "stock":
        return False
    return is_its_own(checkpoint, there, _is_elsewhere(checkpoint, evidence))


def _decide_unpublished(
    checkpoint: Checkpoint, whole: bool, ledger: Ledger, evidence: Evidence
) -> Decision:
    of = checkpoint.id
    if whole:
        why = "published with its own manifest; only the journal lagged"
        return _decision(checkpoint, "manifest", "finalized", why, FoundPublished(of))
    staging = evidence.staging.get(of)
    taken = checkpoint.step in evidence.published
    if checkpoint.in_place:
        taken = went_on(checkpoint, evidence.tracker)
    complete = staging is not None and staging.complete and not taken
    if checkpoint.state is State.SHARDS_WRITTEN and complete:
        why = "every shard has a valid receipt: rolled forward"
        return _decision(checkpoint, "receipts complete", "finalized", why, Finalize(of))
    why = "the processes writing it are gone"
    if checkpoint.state is State.SHARDS_WRITTEN:
        why = staging.detail if staging is not None else "its staging directory is gone"
        why = why or "its name is somebody else's by now"
    failed = Failed(of, "process_lost", why)
    return _decision(checkpoint, "not published", "failed", why, failed, WritersLost(of))


def _decision(
    checkpoint: Checkpoint, found: str, result: str, why: str, *actions: Event | Command
) -> Decision:
    subject = f"step {checkpoint.step} ({checkpoint.id})"
    return Decision(subject, checkpoint.state.value, found, result, why, actions)


def _newest_in_use(ledger: Ledger, evidence: Evidence, lost: frozenset[AttemptId]) -> int | None:
    """Nothing newer than this step counts as in use; None if nothing tells. See ``History.lost``."""
    latest = ledger.latest()
    if evidence.tracker.step is not None:
        return evidence.tracker.step
    if latest is not None:  # torn or missing: the journal says what was in use
        return latest.step
    if evidence.release:
        return -1  # the release is in use, and every step is newer
    return max((of.step for of in lost), default=None)


def _unknown(ledger: Ledger, evidence: Evidence, epoch: int, limit: int | None) -> list[Decision]:
    """Directories that the journal does not explain; above ``limit`` none is adopted.

    The newest first: an adoption that is interrupted then has the one to resume from already.
    """
    explained = {c.step for c in ledger.checkpoints.values() if _explains(c, ledger, evidence)}
    decisions: list[Decision] = []
    adopted = 0
    for step, there in sorted(evidence.published.items(), reverse=True):
        if step in explained:
            continue
        name = evidence.layout.published_name(step)
        complete = there.found in ("manifest", "stock")
        newer = limit is not None and step > limit
        if complete and not newer:
            adopted += 1
            of = there.of or AttemptId(step, epoch, adopted)
            why = "complete, and no journal explains it: adopted in place and pinned"
            adopt = Adopted(of, there.run_seconds, there.metrics)
            decisions.append(Decision(name, "none", there.found, "adopted", why, (adopt,)))
        else:
            why = "newer than the tracker: never resumed from unasked" if newer else there.detail
            decisions.append(Decision(name, "none", there.found, "reported", why))
    return decisions


def _put_back(checkpoint: Checkpoint, ledger: Ledger, evidence: Evidence) -> bool:
    """True if somebody else moved the tracker to where it uses what a rollback took away.

    Ours was moved below, durably, before anything was withdrawn; but for what was damaged, which comes
    back if nothing is tracked: then it was refused, and a person was told to repair it.
    """
    tracker, latest = evidence.tracker.step, ledger.latest()
    if tracker is None or (checkpoint.reason == "damaged" and latest is not None):
        return False
    if any(c.step == tracker for c in ledger.in_state(State.FINALIZED)):
        return False  # that is why it names it
    return checkpoint.step <= tracker and (latest is None or latest.step < tracker)


def _explains(checkpoint: Checkpoint, ledger: Ledger, evidence: Evidence) -> bool:
    """True if what stands at its step's name is this checkpoint's, and decided with it.

    What a stock loader would accept is not that of an attempt in place that never was tracked, if
    another trainer went on from there.
    """
    state = checkpoint.state
    there = evidence.published.get(checkpoint.step)
    if there is None:
        return False
    if state is State.QUARANTINED:
        return _is_to_be_moved(checkpoint, ledger, evidence)
    if state in (State.FINALIZED, State.TRACKED, State.PRUNABLE):
        return _is_there(checkpoint, evidence)
    if checkpoint.in_place and there.found == "stock":
        return not went_on(checkpoint, evidence.tracker)
    if there.of == checkpoint.id:  # damaged before it was ever tracked: that is for a person
        return there.found == "manifest" or state not in UNPUBLISHED
    return checkpoint.in_place and there.of is None


def _is_to_be_moved(checkpoint: Checkpoint, ledger: Ledger, evidence: Evidence) -> bool:
    """True if what was withdrawn is still at its name, and nobody put it back there."""
    there = evidence.published.get(checkpoint.step)
    whole = there is not None and is_whole(checkpoint, there)
    put_back = whole and _put_back(checkpoint, ledger, evidence)
    return _is_there(checkpoint, evidence) and not put_back


def _strays(ledger: Ledger, evidence: Evidence) -> list[Decision]:
    """What no attempt explains and is no checkpoint: reported and nothing more."""
    names = [(name, "no checkpoint, and nothing explains it") for name in evidence.strays]
    names += [
        (f"staging {of}", staged.detail or "no journal explains it")
        for of, staged in sorted(evidence.staging.items())
        if of not in ledger.checkpoints
    ]
    return [Decision(name, "none", "unknown name", "reported", why) for name, why in names]


def _survivors(ledger: Ledger, evidence: Evidence, decisions: list[Decision]) -> set[int]:
    """The steps that will be tracked once the decisions are carried out, in their order."""
    steps = {c.step for c in ledger.in_state(State.TRACKED)}
    for action in _actions(decisions):
        if isinstance(action, Withdrawn):
            steps.discard(action.of.step)
        elif isinstance(action, (Adopted, FoundPublished, WriteTracker, Finalize, Reprieved)):
            steps.add(action.of.step)
        elif isinstance(action, Prune) and action.of in evidence.restorable:
            free = action.of.step not in evidence.published
            named = evidence.tracker.step == action.of.step
            if free and (named or action.of.step > max(steps, default=-1)):
                steps.add(action.of.step)  # it is in use, or nothing newer is left: it comes back
    return steps


def _fallback(
    ledger: Ledger, evidence: Evidence, decisions: list[Decision], survivors: set[int]
) -> int | None:
    """The newest that stays tracked, or is adopted or reprieved where it stands, if anything is
    withdrawn and the tracker tells nothing, or names what leaves; else, and if there is none, None.

    Withdrawals come before the adoption of what has a name instead: a death in between would leave the
    journal with something older, and what is newer than that is never resumed from unasked.
    """
    actions, named = _actions(decisions), evidence.tracker.step
    gone = {action.of for action in actions if isinstance(action, Withdrawn)}
    leaving = {a.of.step for a in actions if isinstance(a, (Withdrawn, Quarantine))}
    if not gone or named in survivors or named not in {None, *leaving}:
        return None
    steps = {c.step for c in ledger.in_state(State.TRACKED) if c.id not in gone}
    steps |= {a.of.step for a in actions if isinstance(a, (Adopted, Reprieved))}
    return max(steps, default=None)


def _actions(decisions: Sequence[Decision]) -> list[Event | Command]:
    return [action for decision in decisions for action in decision.actions]


def _refuse_leftovers(ledger: Ledger, evidence: Evidence, decisions: list[Decision]) -> None:
    """A fresh start that left a name behind would be the last one that is possible.

    What a failed attempt has published after all is moved to quarantine with its files.
    """
    stuck = [d.subject for d in decisions if d.result == "reported"]
    for step, there in sorted(evidence.published.items()):
        name = evidence.layout.published_name(step)
        failing = ledger.checkpoints.get(there.of) if there.of is not None else None
        if failing is not None and failing.state in _FAILING and failing.step == step:
            stuck = [n for n in stuck if n != name]
        elif there.found == "no_directory" and name not in stuck:
            stuck.append(name)
    stuck += [name for name in evidence.mounts if name not in stuck]
    if stuck:
        raise DamagedRoot(
            f"a fresh start would leave {', '.join(stuck[:5])} behind: move it away first",
            evidence=tuple(stuck),
        )


def _refuse_newcomer(intent: Intent, ledger: Ledger, evidence: Evidence) -> None:
    """Refuse to complete a rollback or a fresh start over what somebody may have in use since.

    A fresh start takes the tracker away first, a rollback puts it to its target: before that it names
    the newest one, and afterwards perhaps one below, if the target is damaged.
    """
    tracker, target = evidence.tracker, intent.target
    if target is None or tracker.found == "release":
        used = tracker.found != "missing"
    else:
        above = tracker.step is not None and tracker.step > target
        used = above and _is_anothers(tracker.step, intent, ledger, evidence)
    if used:
        asked, remedy = "rollback", ""
        if target is None:
            asked = "fresh start"
            remedy = "pass resume='fresh' again to move all of it to quarantine, or "
        raise DamagedRoot(
            f"a {asked} was interrupted, and the tracker says {_told_by(tracker)}: {remedy}set "
            "aside what was saved since, and the tracker, until that is complete",
            step=tracker.step,
        )


def _is_anothers(step: int | None, intent: Intent, ledger: Ledger, evidence: Evidence) -> bool:
    """True if what the tracker names above a rollback's target may be somebody's who saved since.

    Once the rollback had lowered the tracker: whatever stands there. Before that the tracker named our
    newest, so at that step only what has become a stock one; at any other whatever stands there, but
    for what was withdrawn, has not left its name, and is not whole.
    """
    there, latest = evidence.published.get(step) if step is not None else None, ledger.latest()
    if there is None or intent.lowered:
        return there is not None
    if latest is not None and step == latest.step:
        return there.found == "stock" and latest.provenance == "saved"
    gone = ledger.in_state(State.QUARANTINED)
    withdrawn = any(c.step == step and c.id not in evidence.aside for c in gone)
    return there.found in ("manifest", "stock") or not withdrawn


def _reasons(
    evidence: Evidence,
    decisions: list[Decision],
    interrupted: bool,
    lost: frozenset[AttemptId],
) -> tuple[str, ...]:
    """Why not to begin from scratch: the evidence of a checkpoint (I8). Empty if there is none."""
    published = [
        d
        for d in decisions
        if d.result == "reported"
        or d.result.startswith("withdrawn")
        or (d.result == "quarantined" and d.found in ("manifest", "stock") and not interrupted)
    ]
    named = evidence.tracker.found in ("step", "torn")
    nothing = not published and not lost and (interrupted or not named)
    if evidence.release or nothing:
        return ()
    reasons = [f"{d.subject}: {d.why}" for d in published]
    reasons += [f"step {of.step} ({of}) is not usable, said the last run" for of in sorted(lost)]
    if named:
        reasons.append(f"the tracker says {_told_by(evidence.tracker)}")
    return tuple(reasons)


def hopeless(reasons: Sequence[str]) -> DamagedRoot:
    """The error of a root that shows checkpoints, and none to resume from."""
    return DamagedRoot(
        "there is evidence of a checkpoint but none to resume from: "
        + "; ".join(reasons[:5])
        + ". Repair it, or pass resume='fresh' to move it to quarantine and begin again",
        evidence=tuple(reasons),
    )


def _told_by(tracker: TrackerEvidence) -> str:
    if tracker.step is not None:
        return str(tracker.step)
    return "'release'" if tracker.found == "release" else "something unreadable"


def _warnings(
    evidence: Evidence, survivors: set[int], decisions: list[Decision], intent: Intent
) -> tuple[str, ...]:
    """What a person should know before the run goes on: not what they asked for themselves."""
    warnings = [
        f"{d.subject} is {d.result}: {d.why}"
        for d in decisions
        if d.result.startswith("withdrawn") and not _is_asked_for(d, intent)
    ]
    tracker = evidence.tracker
    staying = (s for s in survivors if intent.target is None or s <= intent.target)
    newest = max(staying, default=None)
    if tracker.found == "release" and newest is not None:
        warnings.append(
            f"the tracker says 'release'; the journal's latest is {newest}, and it is kept"
        )
    elif tracker.found == "torn":
        warnings.append(f"the tracker is unreadable; rebuilt from the journal as {newest}")
    elif tracker.found == "step" and tracker.step not in survivors:
        if not intent.unfinished:
            warnings.append(
                f"the tracker names step {tracker.step}, which is not a complete checkpoint; "
                f"falling back to {newest}"
            )
    elif tracker.found == "step" and newest is not None and tracker.step != newest:
        rolled = any("rolled forward" in d.why or "journal lagged" in d.why for d in decisions)
        lagging = any(d.last == "finalized" and d.result == "tracked" for d in decisions)
        adopted = {a.of.step for d in decisions for a in d.actions if isinstance(a, Adopted)}
        if tracker.step in adopted or not (rolled or lagging or intent.unfinished):
            advice = "" if intent.unfinished else ". To go back on purpose, use rollback()"
            warnings.append(
                f"the tracker names step {tracker.step}, the journal's latest is {newest}; the "
                f"tracker is rewritten{advice}"
            )
    return tuple(warnings)


def _is_asked_for(withdrawn: Decision, intent: Intent) -> bool:
    """True if an unfinished rollback or fresh start takes it away, whatever became of it."""
    if not intent.unfinished:
        return False
    return intent.target is None or _step(withdrawn) > intent.target
