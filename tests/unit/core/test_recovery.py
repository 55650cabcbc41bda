"""The decisions of a restart: every row of the table in ``ckptfsm.core.recovery``, faults,
idempotence."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ledgers import (
    MISSING,
    PARTS,
    TORN,
    at,
    checkpoint,
    damaged,
    evidence,
    ledger_of,
    names,
    stock,
    unexplained,
    whole,
)

from ckptfsm.core import events as m
from ckptfsm.core.errors import (
    DamagedRoot,
)
from ckptfsm.core.evidence import (
    Evidence,
    PublishedEvidence,
    StagingEvidence,
    TrackerEvidence,
    went_on,
)
from ckptfsm.core.layout import LAYOUTS, MEGATRON
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.recovery import Plan, forget_moved, plan
from ckptfsm.core.recovery_refusals import hopeless
from ckptfsm.core.recovery_rules import Decision
from ckptfsm.core.rollback import Intent

S = State
EPOCH = 9


def decide(ledger: Ledger, ev: Evidence, resume="fallback", **fields) -> Plan:
    return plan(ledger, ev, EPOCH, resume, **fields)


def only(found: Plan) -> Decision:
    assert len(found.decisions) == 1, found.decisions
    return found.decisions[0]


def about(found: Plan, step: int) -> Decision:
    of = [d for d in found.decisions if f"step {step} " in d.subject]
    assert len(of) == 1, found.decisions
    return of[0]


def reported_besides(found: Plan, step: int) -> Decision:
    """The report of the directory at the name of ``step``; the attempt's is the only other decision."""
    assert len(found.decisions) == 2, found.decisions
    (report,) = [d for d in found.decisions if d.subject == MEGATRON.published_name(step)]
    assert (report.last, report.result, report.actions) == ("none", "reported", ())
    return report


BASE = checkpoint(100, S.TRACKED)  # an acknowledged checkpoint that is whole
COMPLETE = StagingEvidence(True)
PARTIAL = StagingEvidence(False, "receipt of rank 1 is missing")


# ------------------------------------------------------------------- the rows, one by one


@pytest.mark.parametrize("state", [S.REQUESTED, S.FORKED])
@pytest.mark.parametrize("staged", [COMPLETE, PARTIAL, None])
def test_F2_requested_and_forked_and_not_published_fail(state, staged):
    """Catches: a save resumed with shards that were never acknowledged, even if staging looks
    complete."""
    staging = {at(200): staged} if staged else {}
    found = decide(
        ledger_of(BASE, checkpoint(200, state)), evidence(names(100), whole(100), staging=staging)
    )
    lost = m.Failed(at(200), "process_lost", "the processes writing it are gone")
    assert only(found).actions == (lost, m.WritersLost(at(200)))
    assert (only(found).last, only(found).result) == (state.value, "failed")
    assert found.warnings == ()


def test_F3_shards_written_and_complete_is_rolled_forward():
    """Catches: a written checkpoint thrown away at a restart."""
    ev = evidence(names(100), whole(100), staging={at(200): COMPLETE})
    found = decide(ledger_of(BASE, checkpoint(200, S.SHARDS_WRITTEN)), ev)
    assert only(found).actions == (m.Finalize(at(200)),)
    assert found.warnings == ()


@pytest.mark.parametrize("staged", [PARTIAL, None], ids=["partial", "gone"])
def test_I3_shards_written_and_not_complete_fails(staged):
    """Catches: a checkpoint finalized with a receipt missing; a failure without its reason."""
    ev = evidence(names(100), whole(100), staging={at(200): staged} if staged else {})
    decision = only(decide(ledger_of(BASE, checkpoint(200, S.SHARDS_WRITTEN)), ev))
    assert [type(a) for a in decision.actions] == [m.Failed, m.WritersLost]
    assert decision.actions[0].reason == "process_lost"
    expected = staged.detail if staged else "its staging directory is gone"
    assert decision.actions[0].detail == decision.why == expected


def test_I4_shards_written_is_not_published_over_something_else():
    """Catches: a roll-forward to a name that another directory has taken."""
    ev = evidence(names(100), whole(100), unexplained(200), staging={at(200): COMPLETE})
    found = decide(ledger_of(BASE, checkpoint(200, S.SHARDS_WRITTEN)), ev)
    assert about(found, 200).result == "failed"
    assert "newer than the tracker" in reported_besides(found, 200).why


@pytest.mark.parametrize(
    ("says", "by_us", "expected"),
    [
        (None, False, False),
        (199, False, False),
        (200, False, True),
        (201, False, True),
        (201, True, False),
    ],
)
def test_I8_who_went_on_from_an_attempt_in_place(says, by_us, expected):
    """Catches: a tracker of ours at a newer step taken for another trainer's, who went on from here."""
    tracker = TrackerEvidence("step" if says is not None else "missing", says, by_us)
    assert went_on(checkpoint(200, S.FAILED, in_place=True), tracker) is expected


def test_shards_written_in_place_is_rolled_forward_under_its_name():
    """Catches: a foreign in-place save lost because its directory already has its name."""
    c = checkpoint(200, S.SHARDS_WRITTEN, in_place=True)
    ev = evidence(names(100), whole(100), unexplained(200), staging={at(200): COMPLETE})
    assert only(decide(ledger_of(BASE, c), ev)).actions == (m.Finalize(at(200)),)


@pytest.mark.parametrize("state", [S.REQUESTED, S.FORKED, S.SHARDS_WRITTEN])
def test_F3_published_with_its_manifest_is_finalized(state):
    """Catches: a published checkpoint failed because the journal lagged behind the rename."""
    found = decide(
        ledger_of(BASE, checkpoint(200, state)), evidence(names(100), whole(100), whole(200))
    )
    assert only(found).actions == (m.FoundPublished(at(200)),)
    assert found.warnings == ()


def test_I5_a_manifest_of_another_attempt_does_not_finalize_this_one():
    """Catches: an earlier attempt's directory taken for this attempt's."""
    other = whole(200, at(200, epoch=1, attempt=7))
    ev = evidence(names(100), whole(100), other)
    found = decide(ledger_of(BASE, checkpoint(200, S.FORKED)), ev)
    assert about(found, 200).result == "failed"
    assert "newer than the tracker" in reported_besides(found, 200).why


@pytest.mark.parametrize("tracker", [names(100), names(200), MISSING])
def test_F3_finalized_is_tracked(tracker):
    """Catches: a crash between manifest and tracker that loses the checkpoint."""
    found = decide(
        ledger_of(BASE, checkpoint(200, S.FINALIZED)), evidence(tracker, whole(100), whole(200))
    )
    assert only(found).actions == (m.WriteTracker(at(200)),)
    assert only(found).result == "tracked" and found.warnings == ()
    first = decide(ledger_of(checkpoint(200, S.FINALIZED)), evidence(MISSING, whole(200)))
    assert only(first).actions == only(found).actions, "F33: it needs no older one"


@pytest.mark.parametrize(
    "there",
    [None, damaged(200), whole(200, at(200, 1, 7)), stock(200)],
    ids=["missing", "damaged", "another", "stock"],
)
def test_finalized_and_not_there_is_withdrawn(there):
    """Catches: a tracker written for a checkpoint that cannot be loaded."""
    published = [whole(100)] + ([there] if there else [])
    found = decide(ledger_of(BASE, checkpoint(200, S.FINALIZED)), evidence(names(100), *published))
    (action,) = found.decisions[0].actions
    assert isinstance(action, m.Withdrawn) and action.detail == found.decisions[0].why
    assert there or action.detail == "its directory is missing"
    assert action.reason == ("damaged" if there in (damaged(200), stock(200)) else "missing")
    assert found.warnings and "200" in found.warnings[0]


def test_finalized_and_not_newer_is_withdrawn():
    """Catches: a tracker that goes back by itself."""
    ledger = ledger_of(checkpoint(300, S.TRACKED), checkpoint(200, S.FINALIZED))
    found = decide(ledger, evidence(names(300), whole(300), whole(200)))
    (action,) = about(found, 200).actions
    assert action == m.Withdrawn(at(200), "damaged", "not newer than the tracked one")


def test_tracked_and_whole_is_kept():
    """Catches: a restart that does something to a healthy root."""
    found = decide(ledger_of(BASE), evidence(names(100), whole(100)))
    assert (found.decisions, found.warnings) == ((), ())


def test_tracked_and_adopted_needs_no_manifest():
    """Catches: an adopted stock checkpoint withdrawn at the next restart."""
    c = checkpoint(100, S.TRACKED, provenance="adopted")
    ev = evidence(names(100), PublishedEvidence(100, "stock"))
    assert decide(ledger_of(c), ev).decisions == ()
    with pytest.raises(DamagedRoot):  # one of ours does need its manifest
        decide(ledger_of(BASE), ev)


@pytest.mark.parametrize(
    ("there", "why"),
    [
        (None, "its directory is missing"),
        (damaged(200), "shard of 200 is gutted"),
        (unexplained(200), "no metadata"),
    ],
    ids=["missing", "damaged", "unexplained"],
)
def test_F19_tracked_and_not_there_falls_back(there, why):
    """Catches: a tracker that goes on naming a gutted directory; a silent fallback."""
    published = [whole(100)] + ([there] if there else [])
    ledger = ledger_of(BASE, checkpoint(200, S.TRACKED))
    found = decide(ledger, evidence(names(200), *published))
    reason = "damaged" if there else "missing"
    assert only(found).actions == (m.Withdrawn(at(200), reason, why),)
    assert only(found).result == f"withdrawn({reason})"
    assert any("falling back to 100" in w for w in found.warnings)


def test_F19_another_whole_attempt_at_the_name_is_adopted_at_once():
    """Catches: a complete checkpoint that only the second restart takes notice of (I8)."""
    there = whole(200, at(200, 1, 7))
    ledger = ledger_of(BASE, checkpoint(200, S.TRACKED))
    found = decide(ledger, evidence(names(200), whole(100), there))
    why = "another checkpoint stands at its name"
    assert [d.actions for d in found.decisions] == [
        (m.Withdrawn(at(200), "missing", why),),
        (m.Adopted(at(200, 1, 7), 200.0),),
    ]
    assert why in found.warnings[0]


def test_F33_damaged_before_it_was_ever_tracked_is_reported_not_forgotten():
    """Catches: a start from scratch beside a published directory, because the journal lagged behind
    (I8)."""
    ledger = ledger_of(checkpoint(200, S.REQUESTED))
    with pytest.raises(DamagedRoot, match="shard of 200 is gutted"):
        decide(ledger, evidence(MISSING, damaged(200)))


def test_F17_prunable_and_still_there_is_reprieved():
    """Catches: a deletion that goes on under a new policy or pin without looking again."""
    ledger = ledger_of(checkpoint(100, S.PRUNABLE), checkpoint(200, S.TRACKED))
    found = decide(ledger, evidence(names(200), whole(100), whole(200)))
    assert only(found).actions == (m.Reprieved(at(100), "restart"),)
    assert found.warnings == ()


@pytest.mark.parametrize(
    ("there", "why"),
    [
        (damaged(100), "shard of 100 is gutted"),
        (unexplained(100), "no metadata"),
        (stock(100), "it has no manifest"),
        (whole(100, at(100, 1, 7)), "another checkpoint stands at its name"),
    ],
    ids=["damaged", "unexplained", "stock", "another"],
)
def test_F17_prunable_and_damaged_is_withdrawn(there, why):
    """I2. Catches: a checkpoint that does not hold brought back to life as one to fall back to."""
    ledger = ledger_of(checkpoint(100, S.PRUNABLE), checkpoint(200, S.TRACKED))
    found = decide(ledger, evidence(names(200), there, whole(200)))
    own = there.of in (None, at(100))
    reason = "damaged" if own else "missing"
    assert found.decisions[0].actions == (m.Withdrawn(at(100), reason, why),)
    assert found.decisions[0].result == f"withdrawn({reason})"
    assert [d.result for d in found.decisions[1:]] == ([] if own else ["adopted"])
    assert len(found.warnings) == 1 and why in found.warnings[0]


def test_F17_prunable_and_gone_is_pruned():
    """Catches: a moved-away checkpoint that comes back to life, or is asked for again."""
    ledger = ledger_of(checkpoint(100, S.PRUNABLE), checkpoint(200, S.TRACKED))
    found = decide(ledger, evidence(names(200), whole(200)))
    assert only(found).actions == (m.Prune(at(100)),)
    assert found.warnings == ()


def test_failed_is_cleaned():
    """Catches: space of a failed attempt never given back; its dead writers waited for."""
    found = decide(ledger_of(BASE, checkpoint(200, S.FAILED)), evidence(names(100), whole(100)))
    assert only(found).actions == (m.WritersLost(at(200)),)


def test_quarantined_and_still_at_its_name_is_moved_aside():
    """Catches: a rollback interrupted between journal and rename, resumed from by a stock loader."""
    ledger = ledger_of(BASE, checkpoint(200, S.QUARANTINED))
    found = decide(ledger, evidence(names(100), whole(100), whole(200)))
    assert only(found).actions == (m.Quarantine(at(200)),)
    adopted = ledger_of(BASE, checkpoint(200, S.QUARANTINED, provenance="adopted"))
    found = decide(adopted, evidence(names(100), whole(100), stock(200)))
    assert only(found).actions == (m.Quarantine(at(200)),)


def test_quarantined_and_moved_aside_needs_nothing():
    """Catches: a newer attempt at the same step quarantined in the old one's place."""
    old, new = checkpoint(200, S.QUARANTINED), Checkpoint(at(200, 2), S.TRACKED, PARTS, 2)
    ev = evidence(names(200), whole(200, at(200, 2)))
    assert decide(ledger_of(old, new), ev).decisions == ()
    assert decide(ledger_of(BASE, old), evidence(names(100), whole(100))).decisions == ()


@pytest.mark.parametrize(
    ("ours", "there", "fields", "said"),
    [
        (S.FORKED, None, {}, ("forked", "not published", "failed")),
        (S.FORKED, whole(200), {}, ("forked", "manifest", "finalized")),
        (
            S.SHARDS_WRITTEN,
            None,
            {"staging": {at(200): COMPLETE}},
            ("shards_written", "receipts complete", "finalized"),
        ),
        (S.FINALIZED, whole(200), {}, ("finalized", "manifest", "tracked")),
        (S.TRACKED, None, {}, ("tracked", "not published", "withdrawn(missing)")),
        (S.TRACKED, damaged(200), {}, ("tracked", "damaged", "withdrawn(damaged)")),
        (S.PRUNABLE, None, {}, ("prunable", "not published", "pruned")),
        (S.PRUNABLE, whole(200), {}, ("prunable", "manifest", "tracked")),
        (S.FAILED, None, {}, ("failed", "not published", "discarded")),
        (S.QUARANTINED, whole(200), {}, ("quarantined", "manifest", "quarantined")),
        (
            S.QUARANTINED,
            None,
            {"trashed": frozenset({at(200)})},
            ("quarantined", "not published", "quarantined"),
        ),
    ],
)
def test_a_decision_names_both_states(ours, there, fields, said):
    """Catches: a report that tells a person another story than the plan."""
    published = [whole(100), *([there] if there is not None else [])]
    decision = only(
        decide(ledger_of(BASE, checkpoint(200, ours)), evidence(names(100), *published, **fields))
    )
    assert (decision.last, decision.found, decision.result) == said
    assert decision.subject == "step 200 (200.e1.a1)" and decision.why


def test_strays_are_told_with_why_they_are_left_alone():
    """Catches: a name that a person cannot look up, or is told nothing about."""
    staged = {at(300): StagingEvidence(True), at(400): PARTIAL}
    found = decide(ledger_of(BASE), evidence(names(100), whole(100), strays=("x",), staging=staged))
    assert [(d.subject, d.why) for d in found.decisions] == [
        ("x", "no checkpoint, and nothing explains it"),
        ("staging 300.e1.a1", "no journal explains it"),
        ("staging 400.e1.a1", "receipt of rank 1 is missing"),
    ]
    assert {(d.last, d.found, d.result) for d in found.decisions} == {
        ("none", "unknown name", "reported")
    }


@pytest.mark.parametrize(
    ("there", "trashed", "detail"),
    [
        (None, (), "its directory is missing"),
        (None, (200,), "its directory is missing; look in .ckptfsm/trash and .ckptfsm/quarantine"),
        (damaged(200), (200,), "shard of 200 is gutted"),
    ],
)
def test_F19_a_withdrawal_says_where_to_look(there, trashed, detail):
    """Catches: a person who is not told that the lost checkpoint lies in the trash."""
    published = [whole(100), *([there] if there is not None else [])]
    ev = evidence(names(200), *published, trashed=frozenset(at(s) for s in trashed))
    decision = about(decide(ledger_of(BASE, checkpoint(200, S.TRACKED)), ev), 200)
    assert decision.actions[0].detail == decision.why == detail


def test_a_withdrawn_step_leaves_its_name_after_one_with_a_right_to_it():
    """Catches: a newer attempt's directory moved to quarantine for an older one's."""
    new = Checkpoint(at(200, attempt=2), S.FINALIZED, PARTS, 2)
    ev = evidence(names(100), whole(100), whole(200, new.id), trashed=frozenset({at(200)}))
    found = decide(ledger_of(BASE, checkpoint(200, S.QUARANTINED), new), ev)
    assert [d.result for d in found.decisions] == ["tracked", "quarantined"]


def test_I2_a_tracker_that_names_a_save_in_flight_puts_nothing_back():
    """Catches: a checkpoint that a rollback took away adopted again, as a save has moved the
    tracker above it."""
    ledger = ledger_of(
        BASE,
        checkpoint(200, S.QUARANTINED, reason="rollback"),
        checkpoint(300, S.FINALIZED),
    )
    found = decide(ledger, evidence(names(300), whole(100), whole(200), whole(300)))
    assert [a for d in found.decisions for a in d.actions] == [
        m.Quarantine(at(200)),
        m.WriteTracker(at(300)),
    ]


def test_a_stock_save_at_the_step_of_a_failed_save_is_told():
    """Catches: a stranger's directory taken for that of an attempt that had a directory in staging."""
    ledger = ledger_of(BASE, checkpoint(200, S.FAILED))
    found = decide(ledger, evidence(names(100), whole(100), stock(200)))
    assert "newer than the tracker" in reported_besides(found, 200).why


def test_I8_a_roll_forward_in_place_stops_where_another_trainer_went_on():
    """Catches: a directory completed that a stock trainer has saved into, and uses."""
    ours = checkpoint(200, S.SHARDS_WRITTEN, in_place=True)
    ev = evidence(names(200), whole(100), unexplained(200), staging={at(200): COMPLETE})
    assert about(decide(ledger_of(BASE, ours), ev), 200).result == "failed"


def test_forget_moved_keeps_steps_still_to_be_moved_and_lost_ones():
    """Catches: evidence of a lost checkpoint that a restart forgets, or one that comes back twice."""
    gone = {step: checkpoint(step, S.QUARANTINED) for step in (200, 300, 400, 500)}
    ledger = ledger_of(BASE, *gone.values())
    decisions = [
        Decision("", "quarantined", "", "quarantined", "", (m.Quarantine(at(200)),)),
        Decision("", "none", "stock", "adopted", "", (m.Adopted(at(400)),)),
    ]
    lost = frozenset({at(300), at(400)})
    left = forget_moved(ledger, decisions, lost)
    assert left == ledger_of(BASE, gone[200], gone[300])
    assert forget_moved(ledger, []) == ledger_of(BASE)


@pytest.mark.parametrize("there", [whole(100), stock(100)], ids=["manifest", "stock"])
@pytest.mark.parametrize("tracker", [names(100), names(300), MISSING, TORN])
def test_I8_unknown_and_complete_is_adopted(there, tracker):
    """Catches: beginning from scratch although a stock run, or a copied root, left a checkpoint."""
    found = decide(Ledger(), evidence(tracker, there, unexplained(50)))
    adopt = next(d for d in found.decisions if d.result == "adopted")
    of = there.of or AttemptId(100, EPOCH, 2)
    assert adopt.actions == (m.Adopted(of, there.run_seconds),)
    assert adopt.subject == "iter_0000100" and adopt.last == "none"


def test_unknown_and_newer_than_the_tracker_is_reported_only():
    """Catches: a stock save that the tracker never named, resumed from unasked."""
    found = decide(ledger_of(BASE), evidence(names(100), whole(100), stock(200)))
    assert (only(found).result, only(found).actions) == ("reported", ())
    assert "newer than the tracker" in only(found).why


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_trainer_without_a_tracker_goes_on_from_the_newest_directory(layout):
    """Catches: what a stock trainer saved after us left behind, where that trainer would resume from it;
    a rollback that was cut short and comes back."""
    there = replace(evidence(names(100), whole(100), stock(200)), layout=layout)
    expected = "reported" if layout.by_tracker else "adopted"
    assert only(decide(ledger_of(BASE), there)).result == expected
    unfinished = decide(ledger_of(BASE), there, intent=Intent(True, 50))
    (theirs,) = [d for d in unfinished.decisions if d.step == 200]
    assert theirs.result == "reported"


def test_unknown_and_anything_else_is_reported_never_touched():
    """Catches: recovery that moves or deletes what it cannot explain."""
    ev = evidence(
        names(100),
        whole(100),
        unexplained(50),
        damaged(60),
        staging={at(70): StagingEvidence(False)},
        strays=(".ckptfsm/staging/notes",),
    )
    found = decide(ledger_of(BASE), ev)
    assert [d.subject for d in found.decisions] == [
        "iter_0000060",
        "iter_0000050",
        ".ckptfsm/staging/notes",
        "staging 70.e1.a1",
    ]
    assert all(d.result == "reported" and not d.actions for d in found.decisions)
    assert all(d.why for d in found.decisions)


# ---------------------------------------------------------------- faults over the whole root


def test_F33_a_crash_in_the_very_first_save_begins_at_zero():
    """Catches: an unfinished first save that stops every later start (it is no evidence)."""
    for state in (S.REQUESTED, S.FORKED, S.SHARDS_WRITTEN, S.FAILED):
        found = decide(ledger_of(checkpoint(100, state)), evidence(MISSING))
        assert only(found).result in ("failed", "discarded") and found.warnings == ()
    assert decide(Ledger(), evidence(MISSING)) == Plan((), ())
    unknown = decide(Ledger(), evidence(MISSING, staging={at(1): PARTIAL}, strays=("notes",)))
    assert [d.result for d in unknown.decisions] == ["reported", "reported"]


@pytest.mark.parametrize(
    ("ledger", "ev"),
    [
        (Ledger(), evidence(names(100))),
        (Ledger(), evidence(TORN)),
        (Ledger(), evidence(MISSING, unexplained(100))),
        (Ledger(), evidence(MISSING, damaged(100))),
        (Ledger(), evidence(names(100), stock(200))),
        (ledger_of(BASE), evidence(names(100))),
        (ledger_of(BASE), evidence(MISSING)),
        (ledger_of(BASE), evidence(names(100), damaged(100))),
        (ledger_of(checkpoint(100, S.FINALIZED)), evidence(MISSING)),
        (ledger_of(checkpoint(100, S.FINALIZED)), evidence(MISSING, damaged(100))),
        (ledger_of(checkpoint(100, S.PRUNABLE), checkpoint(200, S.TRACKED)), evidence(names(200))),
        (ledger_of(checkpoint(100, S.FORKED)), evidence(names(100))),
        (ledger_of(checkpoint(100, S.QUARANTINED)), evidence(names(100))),
        (Ledger(), evidence(MISSING, unnamed=("ckpt_100 has a .metadata",))),
        (ledger_of(checkpoint(100, S.FORKED)), evidence(MISSING, unnamed=("the root itself",))),
    ],
)
@pytest.mark.parametrize("resume", ["fallback", "strict"])
def test_I8_hopeless_is_damaged_root_never_scratch(ledger, ev, resume):
    """Catches: "start from scratch" while there is evidence of a checkpoint (F18, F19)."""
    with pytest.raises(DamagedRoot) as caught:
        decide(ledger, ev, resume)
    assert caught.value.evidence and "resume='fresh'" in str(caught.value)


def test_I8_a_checkpoint_without_a_steps_name_is_left_alone_by_a_fresh_start():
    """Catches: a root that cannot begin anew, or is refused beside a checkpoint to resume from."""
    beside = ("ckpt_100 has a .metadata",)
    assert decide(Ledger(), evidence(MISSING, unnamed=beside), "fresh") == Plan(())
    release = evidence(TrackerEvidence("release"), release=True, unnamed=beside)
    assert decide(Ledger(), release) == Plan(())
    found = decide(ledger_of(BASE), evidence(names(100), whole(100), unnamed=beside))
    assert found.survivors == {100} and found.warnings == ()


def test_a_hopeless_root_is_told_in_a_few_words_and_carries_them_all():
    """Catches: a message of ten thousand directories, or evidence that is left out of the error."""
    reasons = [f"step {step} is gone" for step in range(7)]
    error = hopeless(reasons)
    assert f"resume from: {'; '.join(reasons[:5])}. Repair it" in error.message
    assert error.evidence == tuple(reasons)


def test_F18_a_torn_tracker_is_rebuilt_with_a_warning():
    """Catches: a torn tracker that stops the run, or is repaired in silence."""
    found = decide(ledger_of(BASE), evidence(TORN, whole(100)))
    assert found.warnings == ("the tracker is unreadable; rebuilt from the journal as 100",)


def test_F18_a_release_directory_is_a_place_to_resume_from():
    """Catches: a stock ``release`` root that is refused, or one that is accepted although its
    directory is gone."""
    release = TrackerEvidence("release")
    found = decide(Ledger(), evidence(release, unexplained(5), release=True))
    assert [d.result for d in found.decisions] == ["reported"]
    with pytest.raises(DamagedRoot):
        decide(Ledger(), evidence(release, unexplained(5)))


@pytest.mark.parametrize("step", [0, 1, 100])
def test_F18_everything_is_newer_than_a_release(step):
    """Catches: a checkpoint beside a release in use that is resumed from unasked."""
    found = decide(Ledger(), evidence(TrackerEvidence("release"), stock(step), release=True))
    assert (only(found).result, only(found).actions) == ("reported", ())


def test_adopted_steps_are_numbered():
    """Catches: two attempts of one number in a journal, an older step that counts as the later."""
    found = decide(Ledger(), evidence(MISSING, stock(100), stock(200)))
    assert [a.of for d in found.decisions for a in d.actions] == [
        AttemptId(200, EPOCH, 2),
        AttemptId(100, EPOCH, 1),
    ]


@pytest.mark.parametrize(
    ("there", "warning"),
    [
        (None, "the tracker names step 50, the journal's latest is 100; the tracker is rewritten"),
        (unexplained(50), "the tracker names step 50, which is not a complete checkpoint"),
    ],
)
def test_a_step_from_the_trash_counts_where_its_name_is_free(there, warning):
    """Catches: a person told that the step in use is gone although it comes back, or the reverse."""
    published = [whole(100), *([there] if there is not None else [])]
    mine = frozenset({at(50)})
    ev = evidence(names(50), *published, trashed=mine, restorable=mine)
    found = decide(ledger_of(checkpoint(50, S.PRUNABLE), BASE), ev)
    assert len(found.warnings) == 1 and found.warnings[0].startswith(warning)


@pytest.mark.parametrize("step", [0, 1])
def test_I8_the_only_one_comes_back_whatever_its_step(step):
    """Catches: a root called hopeless although its one checkpoint lies whole in the trash."""
    mine = frozenset({at(step)})
    ev = evidence(TORN, trashed=mine, restorable=mine)
    found = decide(ledger_of(checkpoint(step, S.PRUNABLE)), ev)
    assert found.warnings == (f"the tracker is unreadable; rebuilt from the journal as {step}",)


def test_F18_release_beside_checkpoints_of_ours_is_said():
    """Catches: a tracker set to ``release`` by hand that is rewritten in silence."""
    found = decide(ledger_of(BASE), evidence(TrackerEvidence("release"), whole(100)))
    (warning,) = found.warnings
    assert "release" in warning and "100" in warning


def test_F17_a_hand_edited_tracker_is_rewritten_with_a_warning():
    """Catches: an acknowledged step that regresses without a rollback (I2)."""
    ledger = ledger_of(BASE, checkpoint(200, S.TRACKED))
    found = decide(ledger, evidence(names(100), whole(100), whole(200)))
    assert found.decisions == () and len(found.warnings) == 1
    assert "rollback()" in found.warnings[0] and "200" in found.warnings[0]
    ledger = ledger_of(checkpoint(50, S.PRUNABLE), BASE, checkpoint(200, S.TRACKED))
    ev = evidence(names(100), whole(50), whole(100), whole(200))
    assert decide(ledger, ev).warnings == found.warnings, "one that is reprieved explains nothing"


@pytest.mark.parametrize(
    ("ledger", "ev"),
    [
        (
            ledger_of(BASE, checkpoint(200, S.FINALIZED)),
            evidence(names(100), whole(100), whole(200)),
        ),
        (ledger_of(BASE, checkpoint(200, S.FORKED)), evidence(names(100), whole(100), whole(200))),
        (
            ledger_of(BASE, checkpoint(200, S.SHARDS_WRITTEN)),
            evidence(names(100), whole(100), staging={at(200): COMPLETE}),
        ),
        (ledger_of(BASE), evidence(names(100), whole(100), stock(50))),
    ],
    ids=["finalized", "found", "rolled", "older-adopted"],
)
def test_strict_accepts_an_ordinary_crash(ledger, ev):
    """Catches: strict refusing what is no contradiction at all."""
    assert decide(ledger, ev, "strict") == decide(ledger, ev)


@pytest.mark.parametrize(
    ("ledger", "ev"),
    [
        (ledger_of(BASE, checkpoint(200, S.TRACKED)), evidence(names(200), whole(100))),
        (ledger_of(BASE), evidence(TORN, whole(100))),
        (ledger_of(BASE, checkpoint(200, S.TRACKED)), evidence(names(100), whole(100), whole(200))),
        (ledger_of(BASE, checkpoint(200, S.FINALIZED)), evidence(names(100), whole(100))),
    ],
    ids=["gutted", "torn", "edited", "lost"],
)
def test_strict_refuses_where_fallback_only_warns(ledger, ev):
    """Catches: strict that falls back."""
    warnings = decide(ledger, ev).warnings
    assert warnings
    with pytest.raises(DamagedRoot, match="strict") as caught:
        decide(ledger, ev, "strict")
    assert caught.value.warnings == warnings


def test_fresh_adopts_everything_so_that_it_can_be_set_aside():
    """Catches: a fresh start that forgets a checkpoint newer than the tracker."""
    found = decide(ledger_of(BASE), evidence(names(100), whole(100), stock(200)), "fresh")
    assert only(found).actions == (m.Adopted(AttemptId(200, EPOCH, 1), 0.0),)


def test_fresh_refuses_to_leave_behind_a_directory_it_cannot_move():
    """Catches: a fresh run that meets an unexplained directory at its first save."""
    with pytest.raises(DamagedRoot, match="would leave") as caught:
        decide(ledger_of(BASE), evidence(names(100), whole(100), unexplained(200)), "fresh")
    assert caught.value.evidence == ("iter_0000200",)
    link = PublishedEvidence(200, "no_directory")
    for ours in (BASE, checkpoint(200, S.FAILED, in_place=True)):
        with pytest.raises(DamagedRoot, match="would leave iter_0000200 behind") as caught:
            decide(ledger_of(ours), evidence(MISSING, link, mounts=("iter_0000200",)), "fresh")
        assert caught.value.evidence == ("iter_0000200",)
    mounts = tuple(f"iter_{step:07d}" for step in range(7))
    with pytest.raises(DamagedRoot, match=", ".join(mounts[:5]) + " behind") as caught:
        decide(ledger_of(BASE), evidence(names(100), whole(100), mounts=mounts), "fresh")
    assert caught.value.evidence == mounts


def test_a_directory_under_another_steps_name_is_judged_by_its_name():
    """Catches: a copy of a step under another name that is taken for that step: a wrong reason in the
    report, and a fresh start that leaves the copy behind.
    """
    copy = PublishedEvidence(50, "damaged", at(200), detail="its manifest is of step 200")
    found = decide(ledger_of(BASE), evidence(names(100), whole(100), copy))
    assert [(d.subject, d.step, d.why) for d in found.decisions] == [
        ("iter_0000050", 50, "its manifest is of step 200")
    ]
    ledger = ledger_of(BASE, checkpoint(200, S.FORKED))
    with pytest.raises(DamagedRoot, match="would leave iter_0000050 behind"):
        decide(ledger, evidence(names(100), whole(100), damaged(200), copy), "fresh")


def test_fresh_moves_the_published_files_of_a_failed_attempt():
    """Catches: a fresh start that refuses over a directory that it takes away itself."""
    ledger = ledger_of(BASE, checkpoint(200, S.FORKED))
    found = decide(ledger, evidence(names(100), whole(100), damaged(200)), "fresh")
    assert about(found, 200).result == "failed"


def test_fresh_does_not_tell_of_a_tracker_that_it_takes_away():
    """Catches: a warning about what the person has just asked for."""
    assert decide(ledger_of(BASE), evidence(names(300), whole(100)), "fresh").warnings == ()


def test_an_unfinished_fresh_start_goes_on():
    """Catches: a crash in the middle of a fresh start that makes the root hopeless."""
    ledger = ledger_of(checkpoint(100, S.QUARANTINED))
    decide(ledger, evidence(MISSING), intent=Intent(True))
    with pytest.raises(DamagedRoot, match="would leave"):
        decide(ledger, evidence(MISSING, unexplained(5)), intent=Intent(True))


@pytest.mark.parametrize(
    "says", [names(100), names(200), names(300), TORN, TrackerEvidence("release")]
)
def test_I8_an_unfinished_fresh_start_does_not_take_a_tracker_away_unasked(says):
    """Catches: a newer stock save that is in use moved to quarantine, and a start from zero."""
    ledger = ledger_of(checkpoint(100, S.TRACKED), checkpoint(200, S.TRACKED))
    there = evidence(says, whole(100), whole(200))
    said = {"release": "'release'", "torn": "something unreadable"}.get(says.found, says.step)
    with pytest.raises(DamagedRoot) as caught:
        decide(ledger, there, intent=Intent(True))
    assert caught.value.message == (
        f"a fresh start was interrupted, and the tracker says {said}: pass resume='fresh' again to "
        "move all of it to quarantine, or set aside what was saved since, and the tracker, until that "
        "is complete"
    )
    assert caught.value.step == says.step
    assert decide(ledger, there, "fresh", intent=Intent(True)).reasons == ()


@pytest.mark.parametrize(
    ("says", "goes_on"),
    [
        (names(50), True),  # the target was damaged, and the next one below was taken
        (names(100), True),
        (names(300), True),  # not moved yet
        (MISSING, True),
        (names(200), False),
        (names(400), True),  # where nothing is
        (TrackerEvidence("release"), False),
    ],
)
def test_I8_an_unfinished_rollback_does_not_take_over_a_step_in_use(says, goes_on):
    """Catches: a rollback that is completed over a newer stock save, also at a step that it had not
    moved yet."""
    ledger = ledger_of(*(checkpoint(s, S.TRACKED) for s in (50, 100, 200, 300)))
    there = evidence(says, *(whole(s) for s in (50, 100, 200, 300)))
    if goes_on:
        found = decide(ledger, there, "strict", intent=Intent(True, 100))
        assert found.warnings == found.reasons == (), "that the tracker differs is expected"
        return
    for resume in ("strict", "fallback"):
        with pytest.raises(DamagedRoot, match="tracker says '?[a-z0-9]+'?: set aside what"):
            decide(ledger, there, resume, intent=Intent(True, 100))
    assert decide(ledger, there, "fresh", intent=Intent(True, 100)).reasons == ()


@pytest.mark.parametrize("there", [damaged(200), unexplained(200), whole(200), stock(200)])
@pytest.mark.parametrize("state", [S.TRACKED, S.QUARANTINED, S.FAILED])
@pytest.mark.parametrize("lowered", [False, True])
def test_I8_a_directory_at_a_known_step_may_be_of_another_trainer(there, state, lowered):
    """Catches: a save of another format, or over our files, moved away as its step is one of ours."""
    ours = replace(checkpoint(200, state), reason="rollback" if state is S.QUARANTINED else "")
    ledger = ledger_of(checkpoint(100, S.TRACKED), ours, checkpoint(300, S.TRACKED))
    there = evidence(names(200), whole(100), there, whole(300))
    lost = state is S.QUARANTINED and there.published[200].found in ("damaged", "unexplained")
    intent = Intent(True, 100, lowered=lowered)
    if lost and not lowered:
        assert decide(ledger, there, intent=intent).decisions
        return
    with pytest.raises(DamagedRoot, match="a rollback was interrupted, and the tracker says 200"):
        decide(ledger, there, intent=intent)


def test_I8_a_withdrawal_elsewhere_says_nothing_of_a_directory_here():
    """Catches: a save of another format moved away as something else of ours was withdrawn."""
    gone = checkpoint(250, S.QUARANTINED, reason="rollback")
    ledger = ledger_of(BASE, gone, checkpoint(300, S.TRACKED))
    there = evidence(names(200), whole(100), unexplained(200), whole(300))
    with pytest.raises(DamagedRoot, match="a rollback was interrupted"):
        decide(ledger, there, intent=Intent(True, 100))


def test_an_unfinished_rollback_over_an_adopted_step_gives_no_advice():
    """Catches: "use rollback()" told to a caller who just did."""
    there = evidence(names(50), stock(50), whole(100))
    (warning,) = decide(ledger_of(BASE), there, intent=Intent(True, 100)).warnings
    assert warning.endswith("the journal's latest is 100; the tracker is rewritten")


@pytest.mark.parametrize("provenance", ["saved", "adopted"])
def test_I8_the_newest_that_was_saved_anew_is_anothers(provenance):
    """Catches: a stock trainer's save of the step that a rollback began at, moved away unasked."""
    newest = replace(checkpoint(300, S.TRACKED), provenance=provenance)
    ledger = ledger_of(checkpoint(100, S.TRACKED), newest)
    there = evidence(names(300), whole(100), stock(300))
    if provenance == "adopted":  # it always looked so
        assert decide(ledger, there, intent=Intent(True, 100)).warnings == ()
        return
    with pytest.raises(DamagedRoot, match="a rollback was interrupted, and the tracker says 300"):
        decide(ledger, there, intent=Intent(True, 100))


def test_an_unfinished_rollback_warns_of_unrequested_moves():
    """Catches: a rollback that goes on with no word about its target, or who moved the tracker."""
    ledger = ledger_of(*(checkpoint(s, S.TRACKED) for s in (100, 200, 300)))
    intent = Intent(True, 200)
    there = (whole(100), damaged(200), whole(300))
    warnings = decide(ledger, evidence(names(300), *there), intent=intent).warnings
    assert len(warnings) == 1 and "shard of 200 is gutted" in warnings[0]
    with pytest.raises(DamagedRoot, match="strict"):
        decide(ledger, evidence(names(300), *there), "strict", intent=intent)
    for tracker, said in ((TORN, "is unreadable"), (names(150), "names step 150")):
        there = (whole(100), stock(150), whole(200), whole(300))
        warning = decide(ledger, evidence(tracker, *there), intent=intent).warnings[0]
        assert said in warning and "300" not in warning and "rollback()" not in warning


@pytest.mark.parametrize("ours", [S.SHARDS_WRITTEN, S.FINALIZED])
def test_a_roll_forward_over_a_step_in_use_is_said(ours):
    """Catches: a run that goes on from our attempt, while the tracker names the save of another
    trainer."""
    ledger = ledger_of(checkpoint(100, S.TRACKED), checkpoint(300, ours))
    ev = evidence(names(200), whole(100), stock(200), whole(300))
    assert "the tracker names step 200" in decide(ledger, ev).warnings[0]
    with pytest.raises(DamagedRoot, match="strict"):
        decide(ledger, ev, "strict")
    assert decide(ledger, evidence(names(100), whole(100), whole(300))).warnings == ()


@pytest.mark.parametrize("there", [damaged(300), None, whole(300), stock(300)])
@pytest.mark.parametrize("reason", ["damaged", "missing", "rollback"])
def test_I8_an_unfinished_rollback_goes_on_where_the_tracker_names_a_lost_step(there, reason):
    """Catches: a rollback that is never completed, as what the tracker named was damaged before it."""
    lost = replace(checkpoint(300, S.QUARANTINED), reason=reason)
    ledger = ledger_of(checkpoint(100, S.TRACKED), lost)
    ev = evidence(names(300), whole(100), *([there] if there else []))
    if there in (damaged(300), None):
        assert decide(ledger, ev, "strict", intent=Intent(True, 100)).warnings == ()
        return
    with pytest.raises(DamagedRoot, match="a rollback was interrupted, and the tracker says 300"):
        decide(ledger, ev, "fallback", intent=Intent(True, 100))


# ------------------------------------------------------------------ whose a directory is (I8)


ANOTHER = at(100, 9, 9)


@pytest.mark.parametrize("provenance", ["saved", "adopted"])
@pytest.mark.parametrize(
    ("there", "owner"),
    [
        (damaged(100), "both"),
        (unexplained(100), "both"),
        (stock(100), "adopted"),  # one that was saved has lost its manifest: adopted anew
        (PublishedEvidence(100, "damaged", None, detail="torn manifest"), "both"),
        (PublishedEvidence(100, "damaged", ANOTHER, detail="another's, gutted"), "nobody"),
        (PublishedEvidence(100, "no_directory", detail="a symlink"), "nobody"),
    ],
    ids=["own", "no manifest", "loadable", "torn manifest", "another's", "link"],
)
def test_a_directory_at_the_name_of_a_withdrawn_step_is_its_or_a_strangers(
    provenance, there, owner
):
    """Catches: a stranger's directory that is explained away once, and evidence at the next restart
    (I8). A damaged checkpoint that never reaches quarantine, because its move was interrupted."""
    withdrawn = checkpoint(100, S.QUARANTINED, provenance=provenance)
    ledger = ledger_of(withdrawn, checkpoint(200, S.TRACKED))
    found = decide(ledger, evidence(names(200), whole(200), there))
    results = {d.result for d in found.decisions if "100" in d.subject}
    own, strangers = (
        owner in ("both", provenance),
        {"adopted" if there == stock(100) else "reported"},
    )
    assert results == ({"quarantined"} if own else strangers), found.decisions
    moved = evidence(names(200), whole(200), there, aside=frozenset({at(100)}))
    results = {d.result for d in decide(ledger, moved).decisions if "100" in d.subject}
    strangers = {"adopted" if there.found == "stock" else "reported"}
    assert results == ({"quarantined"} if there.of == at(100) else strangers), "its own is aside"


@pytest.mark.parametrize("provenance", ["saved", "adopted"])
@pytest.mark.parametrize("there", [whole(100), stock(100), unexplained(100)])
def test_a_directory_at_the_name_of_a_missing_step_is_not_the_withdrawn_one(provenance, there):
    """Catches: a step that a stock trainer saved again, or a person brought back from a backup, which
    goes to quarantine because a checkpoint of that step was missing before."""
    missing = replace(checkpoint(100, S.QUARANTINED, provenance=provenance), reason="missing")
    ledger = ledger_of(missing, checkpoint(200, S.TRACKED))
    found = decide(ledger, evidence(names(200), whole(200), there))
    results = {d.result for d in found.decisions if "100" in d.subject and d.found == there.found}
    assert results == {"reported" if there.found == "unexplained" else "adopted"}


@pytest.mark.parametrize("provenance", ["saved", "adopted"])
@pytest.mark.parametrize("there", [None, whole(100, ANOTHER), stock(100), unexplained(100)])
def test_I7_a_step_in_the_trash_is_not_the_directory_at_its_name(provenance, there):
    """Catches: a stranger's directory that is withdrawn, or tracked, for the one in the trash."""
    trashed = frozenset({at(100)})
    ledger = ledger_of(
        checkpoint(100, S.PRUNABLE, provenance=provenance), checkpoint(200, S.TRACKED)
    )
    published = [whole(200)] + ([there] if there else [])
    found = decide(ledger, evidence(names(200), *published, trashed=trashed))
    assert [d.actions for d in found.decisions if d.last == "prunable"] == [(m.Prune(at(100)),)]
    strangers = [d.result for d in found.decisions if d.last == "none"]
    complete = there is not None and there.found in ("manifest", "stock")
    assert strangers == ([] if there is None else ["adopted" if complete else "reported"])
    withdrawn = ledger_of(
        checkpoint(100, S.QUARANTINED, provenance=provenance), checkpoint(200, S.TRACKED)
    )
    found = decide(withdrawn, evidence(names(200), *published, trashed=trashed))
    moves = [d.actions for d in found.decisions if d.last == "quarantined"]
    assert moves == [(m.Quarantine(at(100)),)], "it is never deleted"


@pytest.mark.parametrize("provenance", ["saved", "adopted"])
@pytest.mark.parametrize("there", [whole(100, ANOTHER), stock(100), unexplained(100)])
@pytest.mark.parametrize("resume", ["fallback", "fresh"])
def test_I8_a_directory_at_the_name_of_a_tracked_step_in_the_trash_is_another(
    provenance, there, resume
):
    """Catches: a newer stock save at the name, withdrawn for ours, which the move then leaves
    alone: a fresh start that leaves it at its name and says nothing."""
    ledger = ledger_of(
        checkpoint(100, S.TRACKED, provenance=provenance), checkpoint(200, S.TRACKED)
    )
    seen = evidence(names(200), there, whole(200), trashed=frozenset({at(100)}))
    if resume == "fresh" and there.found == "unexplained":
        with pytest.raises(DamagedRoot, match="iter_0000100"):
            decide(ledger, seen, resume=resume)
        return
    found = {(d.last, d.result) for d in decide(ledger, seen, resume=resume).decisions}
    theirs = "reported" if there.found == "unexplained" else "adopted"
    assert {("tracked", "withdrawn(missing)"), ("none", theirs)} <= found


@pytest.mark.parametrize("provenance", ["saved", "adopted"])
@pytest.mark.parametrize("reason", ["damaged", "missing", "rollback", "fresh"])
@pytest.mark.parametrize("tracker", [names(199), names(200), names(201), MISSING])
def test_I8_a_step_that_a_person_put_back_is_adopted(provenance, reason, tracker):
    """Catches: a checkpoint that a person moved back to its name, with the tracker onto it, and
    that goes to quarantine again. A damaged one, or one that the tracker does not reach, that comes
    back although another one is tracked."""
    gone = replace(checkpoint(200, S.QUARANTINED, provenance=provenance), reason=reason)
    there = whole(200) if provenance == "saved" else stock(200)
    ledger = ledger_of(BASE, gone)
    for trashed in (frozenset(), frozenset({at(200)}) if provenance == "saved" else frozenset()):
        found = decide(ledger, evidence(tracker, whole(100), there, trashed=trashed))
        results = {d.result for d in found.decisions if "200" in d.subject}
        beyond = tracker.step is not None and tracker.step >= 200
        if reason == "missing":
            assert results == {"adopted" if beyond else "reported"}
        else:
            assert results == {"adopted" if beyond and reason != "damaged" else "quarantined"}


FORWARD = checkpoint(400, S.SHARDS_WRITTEN)
DECIDED = ledger_of(BASE, checkpoint(200, S.TRACKED), checkpoint(300, S.TRACKED), FORWARD)


@pytest.mark.parametrize(
    ("tracker", "published", "to"),
    [
        (TORN, [stock(200), damaged(300)], 200),  # of another program, and adopted
        (names(300), [stock(200), damaged(300)], 200),
        (names(300), [damaged(200), damaged(300)], 100),
        (names(999), [whole(200), damaged(300)], None),  # it stays there meanwhile
        (TORN, [damaged(200), whole(300)], 300),
        (names(300), [damaged(200), whole(300)], None),  # it names what stays
        (names(100), [damaged(200), whole(300)], None),
        (names(200), [stock(200), whole(300)], None),
        (TORN, [whole(200), whole(300)], None),  # nothing is withdrawn
    ],
)
def test_I8_the_tracker_is_put_to_a_staying_step_before_anything_is_withdrawn(
    tracker, published, to
):
    """Catches: a tracker that names a step which an opening is about to take away, or nothing. A
    tracker that an opening moves although its step stays, or onto a step that is only to be rolled
    forward."""
    seen = evidence(
        tracker,
        whole(100),
        *published,
        trashed=frozenset({at(200)}) if stock(200) in published else frozenset(),
        staging={at(400): COMPLETE},
    )
    assert decide(DECIDED, seen).fallback == to


@pytest.mark.parametrize(
    ("published", "trashed", "to"),
    [([whole(200)], [], 200), ([damaged(200)], [], 100), ([], [at(200)], 100)],
)
def test_I2_the_tracker_is_put_to_a_step_reprieved_at_its_name(published, trashed, to):
    """Catches: a tracker that goes below what a prune had chosen, and had not moved yet."""
    ledger = ledger_of(BASE, checkpoint(200, S.PRUNABLE), checkpoint(300, S.TRACKED))
    seen = evidence(names(300), whole(100), *published, damaged(300), trashed=frozenset(trashed))
    assert decide(ledger, seen).fallback == to


@pytest.mark.parametrize("resume", ["fallback", "fresh"])
@pytest.mark.parametrize("target", [100, None])
def test_I8_the_tracker_waits_while_a_rollback_or_a_fresh_start_is_to_be_completed(resume, target):
    """Catches: a tracker above the target of a rollback, or back after a fresh start took it away."""
    intent = Intent(rolling_back=True, target=target)
    seen = evidence(MISSING, whole(100), whole(200), damaged(300), staging={at(400): COMPLETE})
    assert decide(DECIDED, seen, resume, intent=intent).fallback is None
    assert decide(DECIDED, seen, "fresh").fallback is None


@pytest.mark.parametrize(
    ("named", "published", "to"),
    [
        (200, [whole(100), damaged(200)], 100),  # of 300, nothing is left at its name
        (200, [whole(100), damaged(200), whole(300)], 100),
        (200, [damaged(100), damaged(200), whole(300)], None),
        (300, [whole(100), whole(200)], 200),
        (200, [whole(100), whole(200), damaged(300)], None),
    ],
)
def test_I2_a_tracker_that_names_what_leaves_is_moved_first_in_an_interrupted_rollback(
    named, published, to
):
    """Catches: a tracker that goes up to a step which is gone, since the journal's tail is lost."""
    seen = evidence(names(named), *published, staging={at(400): COMPLETE})
    assert decide(DECIDED, seen, intent=Intent(rolling_back=True, target=200)).fallback == to


@pytest.mark.parametrize("state", [S.REQUESTED, S.SHARDS_WRITTEN, S.FAILED])
@pytest.mark.parametrize("tracker", [names(199), names(200), names(201), MISSING])
def test_a_loadable_directory_of_an_attempt_in_place_is_foreign_once_it_was_tracked(state, tracker):
    """Catches: the checkpoint of another trainer that is taken for the remains of our failed
    attempt. Remains of ours that are adopted although they were never complete."""
    attempt = replace(checkpoint(200, state), in_place=True)
    found = decide(ledger_of(BASE, attempt), evidence(tracker, whole(100), stock(200)))
    results = {d.result for d in found.decisions if d.last == "none"}
    reached = tracker.step is not None and tracker.step >= 200
    assert results == ({"adopted"} if reached else set())


@pytest.mark.parametrize("there", [whole(100), damaged(100), stock(100)])
@pytest.mark.parametrize("intent", [Intent(), Intent(True, 100), Intent(True)])
def test_I8_a_withdrawn_step_whole_at_its_name_is_evidence(there, intent):
    """Catches: a start from scratch beside a whole checkpoint, as its move to quarantine was cut
    off."""
    gone = replace(checkpoint(100, S.QUARANTINED, provenance="adopted"), reason="rollback")
    ledger, ev = ledger_of(gone), evidence(MISSING, there)
    if there == damaged(100) or intent.unfinished:
        found = decide(ledger, ev, intent=intent)
        assert only(found).actions == (m.Quarantine(at(100)),) and not found.reasons
        return
    with pytest.raises(DamagedRoot) as caught:
        decide(ledger, ev)
    assert "100" in caught.value.evidence[0]


@pytest.mark.parametrize(
    ("resume", "intent"),
    [("fresh", Intent()), ("fallback", Intent(True, 100)), ("fallback", Intent(True))],
)
def test_steps_in_quarantine_are_not_asked_when_everything_goes_there(resume, intent):
    """Catches: a fresh start or rollback that a power loss, which shows a move at both its names, leaves
    half done."""
    gone = replace(checkpoint(200, S.QUARANTINED), reason="rollback")
    tracker = MISSING if intent.unfinished == "fresh" else names(100)
    ev = evidence(tracker, whole(100), unexplained(200), aside=frozenset({at(200)}))
    found = plan(ledger_of(BASE, gone), ev, 9, resume, intent=intent)
    assert [d.actions for d in found.decisions if "200" in d.subject] == [(m.Quarantine(at(200)),)]


def test_I8_a_roll_forward_that_is_all_there_is_is_the_last_hope():
    """Catches: the only checkpoint there could be, failed by a disk that is full for a moment."""
    attempt = checkpoint(200, S.SHARDS_WRITTEN)
    staging = {at(200): COMPLETE}
    assert decide(ledger_of(attempt), evidence(names(200), staging=staging)).only_resumable == at(
        200
    )
    assert decide(ledger_of(attempt), evidence(MISSING, staging=staging)).only_resumable is None
    beside = evidence(names(100), whole(100), staging=staging)
    assert decide(ledger_of(BASE, attempt), beside).only_resumable is None


@pytest.mark.parametrize("there", [None, stock(100)])
@pytest.mark.parametrize("whole_there", [True, False])
def test_I8_a_whole_step_in_the_trash_is_one_to_resume_from(there, whole_there):
    """Catches: a refusal, or a start from scratch, beside a checkpoint that the prune would bring
    back. A plan that counts on one that is not whole, or on one with a taken name."""
    of = at(100)
    back = frozenset({of}) if whole_there else frozenset()
    ledger = ledger_of(checkpoint(100, S.PRUNABLE), checkpoint(200, S.TRACKED))
    published = [damaged(200)] + ([there] if there else [])
    ev = evidence(names(200), *published, trashed=frozenset({of}), restorable=back)
    if there is None and not whole_there:
        with pytest.raises(DamagedRoot):
            decide(ledger, ev)
        return
    found = decide(ledger, ev)
    kinds = [type(d.actions[0]).__name__ for d in found.decisions]
    assert kinds == ["Withdrawn", "Prune"] + (["Adopted"] if there else [])
    assert found.warnings[-1].endswith("falling back to 100")
    newer = ledger_of(checkpoint(300, S.TRACKED), base=ledger)
    found = decide(newer, replace(ev, published={**ev.published, 300: whole(300)}))
    assert not [w for w in found.warnings if "falling back to 100" in w]


def test_F20_an_adopted_step_brings_its_metrics():
    """Catches: a retention by the best metric that forgets what another run has measured."""
    there = replace(whole(100), metrics=(("loss", 0.5),))
    (adopted,) = only(decide(Ledger(), evidence(names(100), there))).actions
    assert adopted == m.Adopted(at(100), there.run_seconds, (("loss", 0.5),))


def falls_back_to(found: Plan, step: int) -> bool:
    return any(f"falling back to {step}" in warning for warning in found.warnings)


def test_I2_F17_a_damaged_prunable_is_not_fallen_back_to():
    """Catches: a checkpoint reprieved by the restart although its manifest does not hold."""
    ledger = ledger_of(
        checkpoint(100, S.PRUNABLE), checkpoint(50, S.TRACKED), checkpoint(200, S.TRACKED)
    )
    found = decide(ledger, evidence(names(200), damaged(100), whole(50)))
    assert falls_back_to(found, 50), found.warnings


@pytest.mark.parametrize("state", [S.FORKED, S.FAILED, S.QUARANTINED])
def test_I8_an_unpublished_attempt_does_not_hide_a_stock_checkpoint_of_its_step(state):
    """Catches: a directory explained by an attempt that never was there; a stock run saved it."""
    ledger = ledger_of(checkpoint(50, S.TRACKED), checkpoint(100, state))
    found = decide(ledger, evidence(names(100), whole(50), stock(100)))
    assert not falls_back_to(found, 50), found.warnings


def test_a_tracker_that_says_zero_is_quoted():
    """Catches: step 0 taken for nothing, and called unreadable."""
    with pytest.raises(DamagedRoot, match="tracker says 0"):
        decide(Ledger(), evidence(names(0)))
