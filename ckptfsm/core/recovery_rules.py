"""The decision table of recovery, as data. Pure.

``RULES`` is read from top to bottom. The first rule for the checkpoint's state with a true
condition decides. The last rule of every state has no condition, so a rule always decides.

A rule looks only at ``Facts``: typed evidence of one checkpoint. A directory that no checkpoint of the
journal explains has the state ``absent``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

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
    ANOTHER_MANIFEST,
    PublishedEvidence,
    StagingEvidence,
    TrackerEvidence,
    is_its_own,
    is_whole,
    went_on,
    why_not_whole,
)
from ckptfsm.core.layout import QUARANTINE, TRASH
from ckptfsm.core.lifecycle import Checkpoint, State


class Result(str, Enum):
    """The outcomes of a decision, as reports print them."""

    FINALIZED = "finalized"
    FAILED = "failed"
    TRACKED = "tracked"
    KEPT = "kept"
    WITHDRAWN = "withdrawn"
    WITHDRAWN_DAMAGED = "withdrawn(damaged)"
    WITHDRAWN_MISSING = "withdrawn(missing)"
    PRUNED = "pruned"
    DISCARDED = "discarded"
    QUARANTINED = "quarantined"
    FORGOTTEN = "forgotten"
    ADOPTED = "adopted"
    REPORTED = "reported"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Facts:
    """The evidence about one checkpoint that a rule may look at.

    - ``name`` is its published name, ``there`` the directory at that name.
    - ``in_trash``, ``in_quarantine``: another directory of this attempt lies there.
    - ``newest`` is the newest tracked step.
    - ``tracker_leads``: the tracker names a step that the journal knows as finalized only.
    - ``in_use`` is the newest step that was in use; None if nothing tells.
    """

    checkpoint: Checkpoint
    name: str
    tracker: TrackerEvidence
    there: PublishedEvidence | None = None
    staging: StagingEvidence | None = None
    in_trash: bool = False
    in_quarantine: bool = False
    newest: int | None = None
    tracker_leads: bool = False
    in_use: int | None = None


# ------------------------------------------------------------------------------------- conditions


def always(facts: Facts) -> bool:
    """In every other case."""
    return True


def is_whole_at_its_name(facts: Facts) -> bool:
    """The directory at its name is whole, and this attempt's."""
    return facts.there is not None and is_whole(facts.checkpoint, facts.there)


def is_there(facts: Facts) -> bool:
    """The directory at its name belongs to it, whole or damaged."""
    if facts.there is None or _was_saved_again(facts):
        return False
    return is_its_own(facts.checkpoint, facts.there, _lies_elsewhere(facts))


def _was_saved_again(facts: Facts) -> bool:
    """True if a stock trainer has saved the step since this checkpoint was withdrawn.

    The withdrawn directory went to quarantine then, and a person may have emptied that.
    """
    checkpoint, there = facts.checkpoint, facts.there
    withdrawn = checkpoint.state is State.QUARANTINED and checkpoint.provenance == "saved"
    return withdrawn and there is not None and there.found == "stock"


def _lies_elsewhere(facts: Facts) -> bool:
    """True if its directory was moved to trash or quarantine.

    A tracked one lies in the trash if a fenced run's rename landed late, or a power loss left both
    names. Quarantine counts only for a checkpoint that has left its state.
    """
    left = facts.checkpoint.state in (State.PRUNABLE, State.QUARANTINED)
    return facts.in_trash or (left and facts.in_quarantine)


def can_be_rolled_forward(facts: Facts) -> bool:
    """Staging is complete, and the name is free (in place: no other trainer resumed from it)."""
    return facts.staging is not None and facts.staging.complete and not _name_is_taken(facts)


def _name_is_taken(facts: Facts) -> bool:
    if facts.checkpoint.in_place:
        return went_on(facts.checkpoint, facts.tracker)
    return facts.there is not None


def staging_is_incomplete(facts: Facts) -> bool:
    """Staging is incomplete, or gone."""
    return facts.staging is None or not facts.staging.complete


def is_whole_and_newer(facts: Facts) -> bool:
    """The checkpoint is whole, and newer than every tracked one."""
    newer = facts.newest is None or facts.checkpoint.step > facts.newest
    return is_whole_at_its_name(facts) and newer


def is_whole_and_its_own(facts: Facts) -> bool:
    """The directory at its name is whole and belongs to it."""
    return is_whole_at_its_name(facts) and is_there(facts)


def is_gone_from_its_name(facts: Facts) -> bool:
    """The name is free, or has another directory while this one lies in trash or quarantine."""
    return facts.there is None or (_lies_elsewhere(facts) and not is_there(facts))


def is_left_in_the_trash(facts: Facts) -> bool:
    """A directory of this attempt lies in the trash, and no whole one is at its name by its manifest."""
    there = facts.there
    back = is_whole_at_its_name(facts) and there is not None and there.of == facts.checkpoint.id
    return facts.in_trash and not back


def was_put_back(facts: Facts) -> bool:
    """The checkpoint is whole, and the tracker was put to it or beyond, past every tracked one.

    A rollback moves the tracker below, durably, before it withdraws anything. The tracker may still
    name a checkpoint that was withdrawn as damaged: that is repaired only if nothing is tracked.
    """
    named = facts.tracker.step
    if named is None or facts.tracker_leads or not is_whole_at_its_name(facts):
        return False
    if facts.checkpoint.reason == "damaged" and facts.newest is not None:
        return False
    return facts.checkpoint.step <= named and (facts.newest is None or facts.newest < named)


def is_newer_than_any_in_use(facts: Facts) -> bool:
    """The step is newer than any that was in use."""
    return facts.in_use is not None and facts.checkpoint.step > facts.in_use


def is_complete(facts: Facts) -> bool:
    """A loader would take the directory: its manifest holds, or a stock trainer wrote it."""
    return facts.there is not None and facts.there.found in ("manifest", "stock")


# ------------------------------------------------------------------------- explanations


def _of_staging(facts: Facts) -> str:
    return facts.staging.detail if facts.staging is not None else "its staging directory is gone"


def _of_the_directory(facts: Facts) -> str:
    return facts.there.detail if facts.there is not None else ""


def _of_the_failure(facts: Facts) -> str:
    return f"it had failed: {facts.checkpoint.why}"


def _not_whole(facts: Facts) -> str:
    trashed = facts.there is None and facts.in_trash
    lies = f"; look in {TRASH} and {QUARANTINE}" if trashed else ""
    return why_not_whole(facts.checkpoint, facts.there) + lies


def _why_it_leaves_again(facts: Facts) -> str:
    there = facts.there
    if there is None or there.found != "manifest" or is_whole(facts.checkpoint, there):
        return "withdrawn before"
    of = facts.checkpoint.id
    way = f"ckptfsm adopt {QUARANTINE}/{of} --step {of.step}"
    return f"{ANOTHER_MANIFEST}. If it is to be used all the same: {way}"


# ------------------------------------------------------------------------------------------ rules


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: if a checkpoint is in one of ``states`` and ``when`` holds, the ``result``, by
    ``actions``.

    ``why`` explains the result in words or by a function that makes them. If ``found``
    is set, reports show it instead of the finding at the published name.
    """

    name: str
    states: tuple[State, ...]
    when: Callable[[Facts], bool]
    result: Result
    actions: tuple[type[Event | Command], ...]
    why: str | Callable[[Facts], str]
    found: str = ""


S, R = State, Result
RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "journal_lags_behind_publishing",
        (S.REQUESTED, S.FORKED, S.SHARDS_WRITTEN),
        is_whole_at_its_name,
        R.FINALIZED,
        (FoundPublished,),
        "published with its own manifest; only the journal lagged",
    ),
    Rule(
        "roll_forward",
        (S.SHARDS_WRITTEN,),
        can_be_rolled_forward,
        R.FINALIZED,
        (Finalize,),
        "every shard has a valid receipt: rolled forward",
        found="receipts complete",
    ),
    Rule(
        "staging_incomplete",
        (S.SHARDS_WRITTEN,),
        staging_is_incomplete,
        R.FAILED,
        (Failed, WritersLost),
        _of_staging,
        found="not published",
    ),
    Rule(
        "name_taken",
        (S.SHARDS_WRITTEN,),
        always,
        R.FAILED,
        (Failed, WritersLost),
        "another program uses its name by now",
        found="not published",
    ),
    Rule(
        "writers_died",
        (S.REQUESTED, S.FORKED),
        always,
        R.FAILED,
        (Failed, WritersLost),
        "the processes writing it are gone",
        found="not published",
    ),
    Rule(
        "tracker_lags_behind_journal",
        (S.FINALIZED,),
        is_whole_and_newer,
        R.TRACKED,
        (WriteTracker,),
        "complete under its published name",
    ),
    Rule(
        "not_newer",
        (S.FINALIZED,),
        is_whole_at_its_name,
        R.WITHDRAWN,
        (Withdrawn,),
        "not newer than the tracked one",
    ),
    Rule("whole", (S.TRACKED,), is_whole_and_its_own, R.KEPT, (), "complete"),
    Rule(
        "prune_was_cut_short",
        (S.PRUNABLE,),
        is_gone_from_its_name,
        R.PRUNED,
        (Prune,),
        "gone from its name: removed, unless it is needed after all",
    ),
    Rule(
        "prune_had_not_begun",
        (S.PRUNABLE,),
        is_whole_and_its_own,
        R.TRACKED,
        (Reprieved,),
        "still at its name: every guard is looked at again",
    ),
    Rule(
        "damaged",
        (S.FINALIZED, S.TRACKED, S.PRUNABLE),
        is_there,
        R.WITHDRAWN_DAMAGED,
        (Withdrawn,),
        _not_whole,
    ),
    Rule(
        "missing",
        (S.FINALIZED, S.TRACKED, S.PRUNABLE),
        always,
        R.WITHDRAWN_MISSING,
        (Withdrawn,),
        _not_whole,
    ),
    Rule("failed", (S.FAILED,), always, R.DISCARDED, (WritersLost,), _of_the_failure),
    Rule(
        "left_in_the_trash",
        (S.QUARANTINED,),
        is_left_in_the_trash,
        R.QUARANTINED,
        (Quarantine,),
        "withdrawn before",
    ),
    Rule("put_back", (S.QUARANTINED,), was_put_back, R.FORGOTTEN, (), "it was put back"),
    Rule(
        "left_at_its_name",
        (S.QUARANTINED,),
        is_there,
        R.QUARANTINED,
        (Quarantine,),
        _why_it_leaves_again,
    ),
    Rule("moved_aside", (S.QUARANTINED,), always, R.FORGOTTEN, (), "moved aside before"),
    Rule(
        "never_in_use",
        (S.ABSENT,),
        is_newer_than_any_in_use,
        R.REPORTED,
        (),
        "newer than the tracker: never resumed from unasked",
    ),
    Rule(
        "unknown_and_complete",
        (S.ABSENT,),
        is_complete,
        R.ADOPTED,
        (Adopted,),
        "complete, and no journal explains it: adopted in place",
    ),
    Rule("unknown", (S.ABSENT,), always, R.REPORTED, (), _of_the_directory),
)


def table() -> list[tuple[str, ...]]:
    """Name, states, condition, result and actions of every rule: documentation is made from these."""
    return [
        (
            rule.name,
            ", ".join(state.value for state in rule.states),
            (rule.when.__doc__ or "").partition("\n")[0].rstrip("."),
            rule.result.value,
            ", ".join(k.name if issubclass(k, Event) else k.__name__ for k in rule.actions),
        )
        for rule in RULES
    ]


__doc__ = f"{__doc__}\n" + "\n".join(" | ".join(row) for row in table())

# -------------------------------------------------------------------------------------- decisions


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about one attempt (or name), and why.

    ``actions`` are carried out in order: events through the table, commands as the table would emit
    them. A decision without actions is a report. ``rule`` names the rule that decided, and ``step`` is
    that of the checkpoint. A name that nothing explains has neither.
    """

    subject: str
    last: str
    found: str
    result: Result
    why: str
    actions: tuple[Event | Command, ...] = ()
    rule: str = ""
    step: int | None = None


def actions_of(decisions: Sequence[Decision]) -> list[Event | Command]:
    """The actions of all decisions, in their order."""
    return [action for decision in decisions for action in decision.actions]


def rule_for(facts: Facts) -> Rule:
    """The first rule for the checkpoint's state with a true condition."""
    state = facts.checkpoint.state
    return next(rule for rule in RULES if state in rule.states and rule.when(facts))


def decide(facts: Facts) -> Decision:
    """Let the rules decide about one checkpoint."""
    rule, checkpoint = rule_for(facts), facts.checkpoint
    unknown = checkpoint.state is State.ABSENT
    at_name = facts.there.found if facts.there is not None else "not published"
    why = rule.why if isinstance(rule.why, str) else rule.why(facts)
    return Decision(
        facts.name if unknown else f"step {checkpoint.step} ({checkpoint.id})",
        "none" if unknown else checkpoint.state.value,
        rule.found or at_name,
        rule.result,
        why,
        tuple(_action(kind, rule, facts, why) for kind in rule.actions),
        rule.name,
        checkpoint.step,
    )


def _action(kind: type[Event | Command], rule: Rule, facts: Facts, why: str) -> Event | Command:
    of, there = facts.checkpoint.id, facts.there
    if kind is Failed:
        return Failed(of, "process_lost", why)
    if kind is Withdrawn:
        missing = rule.result is Result.WITHDRAWN_MISSING
        return Withdrawn(of, "missing" if missing else "damaged", why)
    if kind is Reprieved:
        return Reprieved(of, "restart")
    if kind is Adopted and there is not None:
        return Adopted(of, there.run_seconds, there.metrics, there.manifest_crc)
    if kind is FoundPublished and there is not None:
        return FoundPublished(of, there.manifest_crc)
    return kind(of)
