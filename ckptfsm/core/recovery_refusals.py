"""Refuse the roots that recovery cannot decide, and warn of oddities. Pure.

Every refusal is a ``DamagedRoot`` that tells a person the way out.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptfsm.core.errors import DamagedRoot
from ckptfsm.core.events import Adopted, Finalize, FoundPublished, WriteTracker
from ckptfsm.core.evidence import Evidence, PublishedEvidence, TrackerEvidence
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.lifecycle import UNPUBLISHED, State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.recovery_rules import Decision, Result, actions_of
from ckptfsm.core.rollback import Intent

_FAILING = (*UNPUBLISHED, State.FAILED)
_WITHDRAWN = (Result.WITHDRAWN, Result.WITHDRAWN_DAMAGED, Result.WITHDRAWN_MISSING)


# --------------------------------------------------------------------- a fresh start or a rollback


def refuse_leftovers(ledger: Ledger, evidence: Evidence, decisions: Sequence[Decision]) -> None:
    """Refuse a fresh start that would leave a name behind: no later one would be possible."""
    moving = {p.step for p in evidence.published.values() if _is_of_a_failed_one(p, ledger)}
    stuck = [d.subject for d in decisions if d.result is Result.REPORTED and d.step not in moving]
    links = sorted(p.step for p in evidence.published.values() if p.found == "no_directory")
    names = [evidence.layout.published_name(step) for step in links]
    stuck += [name for name in names if name not in stuck]
    stuck += [name for name in evidence.mounts if name not in stuck]
    if stuck:
        raise DamagedRoot(
            f"a fresh start would leave {', '.join(stuck[:5])} behind: move it away first",
            evidence=tuple(stuck),
        )


def _is_of_a_failed_one(there: PublishedEvidence, ledger: Ledger) -> bool:
    """True if a failed attempt was published after all: it goes to quarantine with its files."""
    failing = ledger.checkpoints.get(there.of) if there.of is not None else None
    return failing is not None and failing.state in _FAILING and failing.step == there.step


def refuse_newcomer(intent: Intent, ledger: Ledger, evidence: Evidence) -> None:
    """Refuse to complete a rollback or a fresh start over a checkpoint that may be in use since.

    A fresh start takes the tracker away first, a rollback moves it to its target. Before that, the
    tracker names the newest checkpoint; afterwards perhaps one below the target, if the target is
    damaged.
    """
    tracker, target = evidence.tracker, intent.target
    if target is None or tracker.found == "release":
        used = tracker.found != "missing"
    else:
        above = tracker.step is not None and tracker.step > target
        used = above and _is_saved_since(tracker.step, intent, ledger, evidence)
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


def _is_saved_since(step: int | None, intent: Intent, ledger: Ledger, evidence: Evidence) -> bool:
    """True if the tracker names a directory, above a rollback's target, that may have been saved
    since.

    Once the rollback had lowered the tracker, that is any directory. Before, the tracker named our
    newest step: there, only a stock directory counts. At any other step every directory counts,
    except a damaged one that was withdrawn and has not left its name.
    """
    there, latest = evidence.published.get(step) if step is not None else None, ledger.latest()
    if there is None or intent.lowered:
        return there is not None
    if latest is not None and step == latest.step:
        return there.found == "stock" and latest.provenance == "saved"
    gone = ledger.in_state(State.QUARANTINED)
    withdrawn = any(c.step == step and c.id not in evidence.aside for c in gone)
    return there.found in ("manifest", "stock") or not withdrawn


# -------------------------------------------------------------------------------- nothing to resume


def reasons_against_scratch(
    evidence: Evidence,
    decisions: Sequence[Decision],
    interrupted: bool,
    lost: frozenset[AttemptId],
) -> tuple[str, ...]:
    """The evidence of a checkpoint, which speaks against a start from scratch (I8)."""
    telling = [d for d in decisions if _tells_of_a_checkpoint(d, interrupted, evidence)]
    named = evidence.tracker.found in ("step", "torn")
    nothing = not (telling or lost or evidence.unnamed) and (interrupted or not named)
    if evidence.release or nothing:
        return ()
    reasons = [f"{d.subject}: {d.why}" for d in telling] + [*evidence.unnamed]
    reasons += [f"step {of.step} ({of}) is not usable, said the last run" for of in sorted(lost)]
    if named:
        reasons.append(f"the tracker says {_told_by(evidence.tracker)}")
    return tuple(reasons)


def _tells_of_a_checkpoint(decision: Decision, interrupted: bool, evidence: Evidence) -> bool:
    """True for a reported or withdrawn directory, and for one that was withdrawn before and is
    complete.

    An interrupted rollback or fresh start explains the last of these.
    """
    if decision.result is not Result.QUARANTINED:
        return decision.result is Result.REPORTED or decision.result in _WITHDRAWN
    there = evidence.published.get(decision.step) if decision.step is not None else None
    complete = there is not None and there.found in ("manifest", "stock")
    return complete and not interrupted


def hopeless(reasons: Sequence[str]) -> DamagedRoot:
    """The error of a root that shows checkpoints, and none to resume from."""
    return DamagedRoot(
        "there is evidence of a checkpoint but none to resume from: "
        + "; ".join(reasons[:5])
        + ". Repair it, or pass resume='fresh' to move the steps to quarantine and begin again",
        evidence=tuple(reasons),
    )


def _told_by(tracker: TrackerEvidence) -> str:
    if tracker.step is not None:
        return str(tracker.step)
    return "'release'" if tracker.found == "release" else "something unreadable"


# ------------------------------------------------------------------------------------------ warnings


def warnings_of(
    evidence: Evidence, survivors: set[int], decisions: Sequence[Decision], intent: Intent
) -> tuple[str, ...]:
    """Warn a person before the run starts, but not of the effects of their own request."""
    withdrawn = [
        f"{d.subject} is {d.result}: {d.why}"
        for d in decisions
        if d.result in _WITHDRAWN and not _is_asked_for(d, intent)
    ]
    told = _warning_of_tracker(evidence.tracker, survivors, decisions, intent)
    return (*withdrawn, told) if told else tuple(withdrawn)


def _is_asked_for(withdrawn: Decision, intent: Intent) -> bool:
    """True if an unfinished rollback or fresh start withdraws it."""
    if not intent.unfinished or withdrawn.step is None:
        return False
    return intent.target is None or withdrawn.step > intent.target


def _warning_of_tracker(
    tracker: TrackerEvidence, survivors: set[int], decisions: Sequence[Decision], intent: Intent
) -> str:
    """Say if anything is odd about the tracker; "" if nothing is."""
    staying = (s for s in survivors if intent.target is None or s <= intent.target)
    newest = max(staying, default=None)
    if tracker.found == "torn":
        return f"the tracker is unreadable; rebuilt from the journal as {newest}"
    if newest is not None and tracker.found == "release":
        return f"the tracker says 'release'; the journal's latest is {newest}, and it is kept"
    if tracker.found != "step":
        return ""
    if tracker.step not in survivors:
        lost = f"the tracker names step {tracker.step}, which is not a complete checkpoint"
        return "" if intent.unfinished else f"{lost}; falling back to {newest}"
    if newest is None or tracker.step == newest or _lags(tracker, decisions, intent):
        return ""
    advice = "" if intent.unfinished else ". To go back on purpose, use rollback()"
    return (
        f"the tracker names step {tracker.step}, the journal's latest is {newest}; the "
        f"tracker is rewritten{advice}"
    )


def _lags(tracker: TrackerEvidence, decisions: Sequence[Decision], intent: Intent) -> bool:
    """True if a crash explains that the tracker names an older step that no other trainer uses."""
    actions = actions_of(decisions)
    crashed = any(isinstance(a, (FoundPublished, Finalize, WriteTracker)) for a in actions)
    adopted = {a.of.step for a in actions if isinstance(a, Adopted)}
    return tracker.step not in adopted and (crashed or bool(intent.unfinished))
