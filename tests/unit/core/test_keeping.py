"""Which directory leaves its name, and which stays: every combination of facts, without a disk."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from ledgers import at, checkpoint

from ckptfsm.core.evidence import PublishedEvidence
from ckptfsm.core.keeping import (
    AtName,
    CleanUpDecision,
    CleanUpFacts,
    Contents,
    Holds,
    InPlaceDecision,
    InPlaceFacts,
    Place,
    PruneDecision,
    PruneFacts,
    QuarantineDecision,
    QuarantineFacts,
    at_name,
    decide_clean_up,
    decide_in_place,
    decide_left,
    decide_prune,
    decide_quarantine,
    is_taken,
    place_of,
    why_kept,
)
from ckptfsm.core.lifecycle import State

STEP = 5
YES_NO = (False, True)
NEWEST = (-1, 4, 5, 9)  # none, older, another attempt at the same step, newer
TRACKER = (None, 4, 5, 9)  # torn or gone, older, this step, newer
MOVE = PruneDecision.MOVE

HOLDS = [Holds(*each) for each in product(YES_NO, YES_NO, TRACKER, YES_NO)]
PRUNES = [
    PruneFacts(STEP, newest, there, holds)
    for newest, there, holds in product(NEWEST, YES_NO, HOLDS)
]
FAILED = [CleanUpFacts(*each) for each in product(YES_NO, AtName, YES_NO, YES_NO, YES_NO, YES_NO)]
IN_PLACE = [InPlaceFacts(*each) for each in product(YES_NO, AtName, YES_NO, Contents)]

OURS = checkpoint(STEP, State.PRUNABLE)
ADOPTED = replace(OURS, provenance="adopted")
WITHDRAWN = replace(OURS, state=State.QUARANTINED, reason="damaged")
MISSING = replace(WITHDRAWN, reason="missing")
VOUCHED = replace(OURS, manifest_crc="0a0a0a0a")
CHECKPOINTS = (OURS, ADOPTED, WITHDRAWN, replace(WITHDRAWN, provenance="adopted"), MISSING, VOUCHED)
STRANGER = at(STEP, epoch=2, attempt=7)
THERE = [
    *(PublishedEvidence(STEP, "manifest", of) for of in (OURS.id, STRANGER)),
    *(PublishedEvidence(STEP, "damaged", of) for of in (OURS.id, STRANGER, None)),
    PublishedEvidence(STEP, "stock"),
    PublishedEvidence(STEP, "unexplained"),
    PublishedEvidence(STEP, "no_directory"),
]


# ------------------------------------------------------------------------------------------- prune


def test_I7_only_a_checkpoint_that_nothing_keeps_is_moved():
    """Catches: a guard that is left out, or turned round, in whatever company it stands."""
    for facts in PRUNES:
        superseded = facts.newer_step in (STEP, 9) and facts.newer_is_there
        held = facts.holds.pinned or facts.holds.leased or facts.holds.not_ours
        free = superseded and not held and facts.holds.tracker_step == 9
        assert (decide_prune(facts) is MOVE) == free, facts


@pytest.mark.parametrize(
    "change",
    [
        {"pinned": True},
        {"leased": True},
        {"tracker_step": STEP},
        {"tracker_step": STEP - 1},
        {"tracker_step": None},
        {"not_ours": True},
    ],
    ids=str,
)
def test_F27_a_hold_that_came_while_it_was_moved_brings_it_back(change):
    """Catches: a second look that does not see everything that the first one does."""
    for facts in PRUNES:
        if decide_prune(facts) is MOVE:
            again = replace(facts, holds=replace(facts.holds, **change))
            assert decide_prune(again) is not MOVE, again


@pytest.mark.parametrize("taken", YES_NO)
def test_I7_a_needed_step_does_not_stay_in_the_trash(taken):
    """Catches: a crash between move and second look, after which one of the guards is not looked
    at."""
    for facts in PRUNES:
        last = facts.newer_step < STEP or not facts.newer_is_there
        named = facts.holds.tracker_step == STEP and not taken
        needed = last or facts.holds.pinned or facts.holds.leased or named
        left = decide_left(facts, taken)
        assert (left is MOVE) == (not needed), facts


def test_I1_the_place_of_a_checkpoint_is_certain_or_it_is_damaged():
    """Catches: a stranger's directory that is pruned for ours, and ours that is taken for gone. Another
    run's, whose attempt has the same name, is neither pruned nor passed over."""
    recorded = PublishedEvidence(STEP, "manifest", OURS.id, manifest_crc=VOUCHED.manifest_crc)
    for ours, there, moved in product(CHECKPOINTS, (*THERE, recorded), YES_NO):
        place = place_of(ours, there, moved)
        missing = ours.reason == "missing"
        says_ours = there.of == ours.id and not missing
        adopted = ours.provenance == "adopted" and there.found == "stock" and not moved
        replaced = ours.manifest_crc not in ("", there.manifest_crc)
        if says_ours and replaced:
            assert place is Place.DAMAGED, (ours, there, moved)
        elif says_ours or (adopted and not missing):
            assert place is Place.AT_ITS_NAME, (ours, there, moved)
        elif there.of is not None or moved:
            assert place is Place.LEFT, (ours, there, moved)
        else:
            assert place is Place.DAMAGED, (ours, there, moved)
    assert {place_of(each, None, moved) for each in CHECKPOINTS for moved in YES_NO} == {Place.LEFT}


@pytest.mark.parametrize(
    ("decision", "reason"),
    [
        (PruneDecision.MOVE, ""),
        (PruneDecision.KEEP_NOTHING_NEWER, "nothing newer is tracked any more"),
        (PruneDecision.KEEP_NEWER_MISSING, "step 9 is not there"),
        (PruneDecision.KEEP_PINNED, "pin"),
        (PruneDecision.KEEP_READER, "reader"),
        (PruneDecision.KEEP_TRACKER, "the tracker says 4"),
        (PruneDecision.KEEP_NOT_OURS, "not a directory of this file system"),
        (PruneDecision.KEEP_NAMED, "the tracker names it"),
    ],
)
def test_the_journal_gets_the_reason_that_kept_it(decision, reason):
    """Catches: a reason in the journal that earlier versions do not write, or without its step."""
    assert why_kept(decision, PruneFacts(STEP, 9, True, Holds(False, False, 4, False))) == reason


# ---------------------------------------------------------------------------------------- clean up


def test_the_claimant_of_the_directory_at_a_name():
    """Catches: a torn manifest, or one of another attempt, that is taken for this attempt's."""
    assert [at_name(OURS, there) for there in THERE] == [
        AtName.ITS_OWN,
        AtName.OTHER_ATTEMPT,
        AtName.ITS_OWN,
        AtName.OTHER_ATTEMPT,
        AtName.TORN,
        AtName.STOCK,
        AtName.UNFINISHED,
        AtName.NOTHING,
    ]


def test_I1_a_clean_up_gives_up_unpublished_directories_in_staging():
    """Catches: a failed attempt that is deleted although a late rename published it."""
    for facts in FAILED:
        given_up = decide_clean_up(facts) is CleanUpDecision.DISCARD
        staged = not facts.in_place and facts.working_dir
        assert given_up == (staged and facts.at_name is not AtName.ITS_OWN), facts


def test_I1_a_clean_up_takes_from_a_published_name_only_its_own():
    """Catches: a checkpoint of another attempt or trainer, a link or a mount, that is moved away."""
    for facts in FAILED:
        taken = decide_clean_up(facts) is CleanUpDecision.QUARANTINE_PUBLISHED
        no_staging = facts.in_place or not facts.working_dir
        torn = facts.at_name is AtName.TORN and facts.alone and no_staging
        assert taken == (facts.at_name is AtName.ITS_OWN or torn), facts


def test_I1_a_clean_up_in_place_leaves_directories_in_use_by_others():
    """Catches: a directory that another trainer went on from, and that is moved away as a left over."""
    for facts in FAILED:
        decision = decide_clean_up(facts)
        used = facts.held or facts.went_on or facts.at_name is AtName.OTHER_ATTEMPT
        moved = (CleanUpDecision.LOOK_INSIDE, CleanUpDecision.DISCARD)
        if facts.in_place and (used or facts.at_name is AtName.NOT_OURS):
            assert decision not in moved, facts
        if decision is CleanUpDecision.LEAVE_TO_OTHERS:
            assert facts.in_place and used, facts
        if decision is CleanUpDecision.LEAVE_NOT_OURS:
            assert facts.in_place and facts.at_name is AtName.NOT_OURS, facts


def test_I10_a_clean_up_leaves_none_of_its_directories_undecided():
    """Catches: the directory of a failed attempt that stays, though no other attempt uses it."""
    for facts in FAILED:
        decision = decide_clean_up(facts)
        if decision is CleanUpDecision.NOTHING_LEFT:
            assert not facts.working_dir and facts.at_name is not AtName.ITS_OWN, facts
        if decision is CleanUpDecision.LOOK_INSIDE:
            assert facts.in_place and facts.working_dir, facts


def test_I1_in_place_only_this_attempts_unfinished_save_may_be_deleted():
    """Catches: a save of another trainer, whole or begun, deleted as what this attempt has left."""
    for facts in IN_PLACE:
        worthless = facts.at_name is AtName.UNFINISHED and facts.contents is not Contents.MORE
        expected = facts.alone and facts.marked and worthless
        assert (decide_in_place(facts) is InPlaceDecision.DISCARD) == expected, facts


def test_I1_a_directory_completed_while_it_is_moved_is_not_deleted():
    """Catches: a second look that always gives the answer of the first."""
    for facts in IN_PLACE:
        if decide_in_place(facts) is InPlaceDecision.DISCARD:
            again = replace(facts, contents=Contents.MORE)
            assert decide_in_place(again) is InPlaceDecision.QUARANTINE, facts


def test_I1_in_place_a_directory_that_was_made_anew_is_left():
    """Catches: a directory that vanishes under a trainer that has just begun in it."""
    for facts in IN_PLACE:
        begun = not facts.marked and facts.contents is Contents.BARE
        assert (decide_in_place(facts) is InPlaceDecision.LEAVE) == begun, facts


# -------------------------------------------------------------------------------------- quarantine


def test_I1_a_withdrawal_moves_only_the_withdrawn_checkpoint():
    """Catches: a step that was saved again: its new checkpoint is moved in place of the old one."""
    cases = product(CHECKPOINTS, YES_NO, (None, *THERE), YES_NO, YES_NO)
    for withdrawn, alone, there, moved, foreign in cases:
        decision = decide_quarantine(withdrawn, QuarantineFacts(alone, there, moved, foreign))
        unnamed = there is not None and there.of is None and there.found != "no_directory"
        own = there is not None and (there.of == withdrawn.id or (unnamed and not moved))
        case = (withdrawn, alone, there, moved, foreign)
        if not (alone and own and withdrawn.reason != "missing"):
            assert decision is QuarantineDecision.NOTHING_TO_MOVE, case
        elif foreign:
            assert decision is QuarantineDecision.LEAVE_NOT_OURS, case
        else:
            assert decision is QuarantineDecision.MOVE, case


def test_I2_the_tracker_stays_with_a_complete_foreign_checkpoint():
    """Catches: a tracker that is taken from a new save at a withdrawn step."""
    for withdrawn, there, moved in product(CHECKPOINTS, THERE, YES_NO):
        taken = is_taken(withdrawn, there, moved)
        facts = QuarantineFacts(True, there, moved, False)
        own = decide_quarantine(withdrawn, facts) is QuarantineDecision.MOVE
        assert taken == (there.found in ("manifest", "stock") and not own), (withdrawn, there)


# ----------------------------------------------------------------------------------------- answers


def test_every_answer_is_given_and_says_when():
    """Catches: an answer that no facts lead to, and two answers that say the same."""
    given = {
        *map(decide_prune, PRUNES),
        *(decide_left(facts, taken) for facts in PRUNES for taken in YES_NO),
        *(place_of(OURS, there, False) for there in (None, *THERE)),
        *map(decide_clean_up, FAILED),
        *map(decide_in_place, IN_PLACE),
        *(
            decide_quarantine(WITHDRAWN, QuarantineFacts(True, there, False, foreign))
            for there in THERE
            for foreign in YES_NO
        ),
    }
    answers = (
        Place,
        PruneDecision,
        CleanUpDecision,
        InPlaceDecision,
        QuarantineDecision,
    )
    assert given == {answer for each in answers for answer in each}
    for each in (*answers, AtName, Contents):
        assert len({answer.value for answer in each}) == len(each.__members__)
