"""The ledger: one in flight, growing steps, protection from pruning, and reports that do not count."""

from __future__ import annotations

import random
import re
from dataclasses import FrozenInstanceError

import pytest
from ledgers import (
    checkpoint,
    ledger_of,
)

from ckptfsm.core import events as m
from ckptfsm.core.errors import (
    ConfigError,
    IllegalTransition,
    SaveRefused,
    StepExistsError,
)
from ckptfsm.core.events import WriterForked
from ckptfsm.core.ledger import KnownCheckpoints, Ledger, Rejected
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.parts import MAX_STEP, AttemptId, PartSpec, check_parts

S = State
PARTS = (PartSpec("state"),)


def at(step: int, attempt: int = 1, epoch: int = 1) -> AttemptId:
    return AttemptId(step, epoch, attempt)


def tracked(*steps: int) -> Ledger:
    return ledger_of(*(Checkpoint(at(step), S.TRACKED, PARTS) for step in steps))


def flying(state: State, step: int = 300, n: int = 2, base: Ledger | None = None) -> Ledger:
    everyone = frozenset(range(n))
    reported = frozenset(("state", r) for r in everyone)
    whole = state in (S.SHARDS_WRITTEN, S.FINALIZED)
    c = Checkpoint(
        at(step), state, PARTS, n, forked=everyone, reported=reported if whole else frozenset()
    )
    return ledger_of(c, base=base)


def requested(step: object, parts: tuple[PartSpec, ...] = PARTS, n: int = 1) -> m.SaveRequested:
    return m.SaveRequested(AttemptId(step, 1, 9), parts, n)  # type: ignore[arg-type]


def test_questions_of_an_empty_ledger():
    """Catches: an error or a wrong answer where there is nothing yet."""
    ledger = Ledger()
    assert ledger.latest() is None and ledger.in_flight() is None and ledger.at(1) is None
    assert ledger.to_prune(()) == [] and ledger.in_state(*State) == []


def test_latest_is_the_newest_tracked_not_the_newest():
    """Catches: an unacknowledged, prunable or quarantined checkpoint named as the latest."""
    ledger = flying(S.FINALIZED, base=tracked(100, 200))
    ledger = ledger_of(Checkpoint(at(250), S.QUARANTINED, PARTS), base=ledger)
    assert ledger.latest().step == 200
    assert ledger.in_flight().step == 300
    assert ledger.at(100).id == at(100) and ledger.at(300) is None
    assert [c.step for c in ledger.in_state(S.TRACKED)] == [100, 200]


def test_known_checkpoints_are_those_of_a_dictionary_after_any_changes():
    """Catches: a checkpoint lost, kept twice or out of order between the tracked ones and the others,
    and an earlier ledger that changes with a later one."""
    rng = random.Random(1)
    known, plain = KnownCheckpoints({}), {}
    for _ in range(500):
        of, before, was = at(rng.randrange(9), rng.randrange(1, 3)), known, dict(plain)
        after = Checkpoint(of, rng.choice((*S, *[S.TRACKED] * 9)), world_size=rng.randrange(1, 9))
        if rng.random() < 0.2:
            known = known.changed(of, None)
            plain.pop(of, None)
        else:
            known = known.changed(of, after)
            plain[of] = after
        assert known == plain == KnownCheckpoints(plain) and before == was
        assert len(known) == len(plain) and list(known) == sorted(plain)
        newest = sorted((c.id for c in plain.values() if c.state is S.TRACKED), reverse=True)
        assert [c.id for c in known.newest_first()] == newest
        assert [c.id for c in known.in_state(set(S))] == sorted(plain)


@pytest.mark.parametrize("step", [-1, MAX_STEP + 1, True, "7", 1.0, None])
def test_F30_refuse_steps_that_are_no_steps(step):
    """Catches: a step that cannot be named on disk, or a bool taken for 1."""
    with pytest.raises(SaveRefused) as caught:
        Ledger().refuse(requested(step))
    assert not isinstance(caught.value, StepExistsError)
    assert caught.value.step == step


@pytest.mark.parametrize("step", [0, 1, MAX_STEP])
def test_refuse_accepts_the_whole_range(step):
    """Catches: an off-by-one at the ends of the range."""
    Ledger().refuse(requested(step))


@pytest.mark.parametrize("state", [S.REQUESTED, S.FORKED, S.SHARDS_WRITTEN, S.FINALIZED])
def test_F22_refuse_while_one_is_in_flight(state):
    """Catches: two checkpoints in flight on one root."""
    with pytest.raises(SaveRefused) as caught:
        flying(state).refuse(requested(400))
    assert caught.value.in_flight == 300 and state.value in str(caught.value)
    assert caught.value.step == 400


@pytest.mark.parametrize("step", [50, 100, 199, 200])
def test_F15_refuse_a_step_that_is_not_after_the_latest(step):
    """Catches: saving over an acknowledged step."""
    with pytest.raises(StepExistsError) as caught:
        tracked(100, 200).refuse(requested(step))
    assert (caught.value.step, caught.value.latest) == (step, 200)
    assert isinstance(caught.value, FileExistsError)
    tracked(100, 200).refuse(requested(201))


def test_a_failed_attempt_does_not_block_its_step():
    """Catches: a failed attempt occupying the step or the flight slot."""
    failed = Checkpoint(at(200), S.FAILED, PARTS)
    ledger_of(failed, base=tracked(100)).refuse(requested(200))


@pytest.mark.parametrize(
    ("parts", "n", "text"),
    [
        ((), 1, "at least one part"),
        ((PartSpec("../x"),), 1, "not a plain name"),
        ((PartSpec(""),), 1, "not a plain name"),
        ((PartSpec("a\n"),), 1, "not a plain name"),
        ((PartSpec(".hidden"),), 1, "not a plain name"),
        ((PartSpec("x" * 65),), 1, "not a plain name"),
        ((PartSpec("a"), PartSpec("a", "file")), 1, "declared twice"),
        ((PartSpec("a", directory="/x"),), 1, "not allowed"),
        ((PartSpec("a", directory="x/../y"),), 1, "not allowed"),
        ((PartSpec("a", directory="x/"),), 1, "not allowed"),
        ((PartSpec("a", directory="."),), 1, "not allowed"),
        ((PartSpec("a", directory=".ckptfsm/receipts"),), 1, "not allowed"),
        ((PartSpec("a", ranks=(0, 2)),), 2, "outside the job"),
        ((PartSpec("a", ranks=(-1,)),), 2, "outside the job"),
        ((PartSpec("a"), PartSpec("b")), 1, "share directory"),
        ((PartSpec("a", "foreign", "d"), PartSpec("b", "torch_dist", "d")), 1, "share directory"),
        ((PartSpec("a", "foreign"), PartSpec("b", "tree")), 1, "share directory"),
        ((PartSpec("a", "report", "d"), PartSpec("b", "report", "d")), 1, "share directory"),
        ((PartSpec("a.tmp-1"),), 1, "marks our temporary files"),
        ((PartSpec("a", directory="b.tmp-1"),), 1, "marks our temporary files"),
        ((PartSpec("a", ranks=()),), 1, "by no rank"),
    ],
)
def test_F30_parts_that_cannot_live_together(parts, n, text):
    """Catches: two saves into one directory, names that leave it, ranks that do not exist."""
    with pytest.raises(ConfigError, match=text) as caught:
        check_parts(parts, n)
    assert not parts or caught.value.part == parts[-1].name
    with pytest.raises(ConfigError, match=text):
        Ledger().refuse(requested(1, parts, n))


@pytest.mark.parametrize(
    "parts",
    [
        (PartSpec("state", optional=True),),
        (PartSpec("a", "torch_dist", "a", optional=True), PartSpec("b", "torch_dist", "a/b")),
        (PartSpec("f", "file", "f", optional=True),),
        (PartSpec("f", "foreign", "f", optional=True),),
        (PartSpec("a", "torch_dist", "a", optional=True), PartSpec("f", "file", "a")),
    ],
)
def test_an_optional_part_needs_a_directory_of_its_own(parts):
    """Catches: a required part that goes out with an optional one."""
    with pytest.raises(ConfigError, match="optional") as caught:
        check_parts(parts, 1)
    assert caught.value.part == parts[0].name


def test_parts_that_can_live_together():
    """Catches: a check that is too strict."""
    check_parts(
        (
            PartSpec("state"),
            PartSpec("note", "file"),
            PartSpec("elsewhere", "report", ranks=(1,)),
            PartSpec("critic.v2", "torch_dist", "critic/model/dist_ckpt", (0, 1)),
            PartSpec("export", "tree", "export", optional=True),
            PartSpec("exported", "torch_dist", "exported", optional=True),
        ),
        2,
    )


def test_I7_kept_by_names_everything_that_keeps():
    """Catches: a protection that is not looked at, or is not named to people."""
    ledger = tracked(100, 200, 300).protected(pins=[100], readers=[100, 200], held=[100])
    one, two, three = ledger.in_state(S.TRACKED)
    assert ledger.superseded(one, [100]).kept_by == ("pin", "reader", "job", "retention")
    assert ledger.superseded(two, ()).kept_by == ("reader",)
    assert ledger.superseded(three, ()).kept_by == ("latest",)
    for step in (0, 1, 100):
        only = Checkpoint(at(step), S.PRUNABLE, PARTS)
        assert Ledger().superseded(only, ()) == m.Superseded(at(step), None, ("latest",))


def test_I7_prunable_offers_only_unkept_steps():
    """Catches: the latest, pinned, leased or preserved offered for pruning."""
    ledger = tracked(100, 200, 300, 350, 400, 500).protected([200], readers=[300], held=[350])
    offers = ledger.to_prune([400])
    assert offers == [m.Superseded(at(100), 500, ())]
    assert tracked(100).to_prune(()) == []
    assert ledger.superseded(ledger.at(500), ()) == m.Superseded(at(500), None, ("latest",))


def test_I7_keep_zero_leaves_the_latest():
    """Catches: a policy that keeps nothing emptying the store."""
    ledger = tracked(100, 200, 300)
    for offer in ledger.to_prune(()):
        ledger, moved, _ = ledger.post(offer)
        ledger, moved, _ = ledger.post(m.Removed(moved.of))
        assert moved.dest is S.PRUNED
    assert [c.step for c in ledger.checkpoints.values()] == [300]
    assert ledger.to_prune(()) == []


def test_post_moves_one_and_leaves_the_old_ledger_alone():
    """Catches: a ledger that is changed in place."""
    before = tracked(100)
    after, moved, command = before.post(requested(200))
    assert (moved.source, moved.dest, moved.of) == (S.ABSENT, S.REQUESTED, AttemptId(200, 1, 9))
    assert moved.checkpoint is after.checkpoints[moved.of]
    assert isinstance(command, m.CreateStaging)
    assert list(before.checkpoints) == [at(100)]
    with pytest.raises(TypeError):
        after.checkpoints[at(1)] = moved.checkpoint  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        after.pins = frozenset()  # type: ignore[misc]


def test_post_of_an_illegal_event_raises_and_changes_nothing():
    """Catches: a partial change before the error."""
    ledger = tracked(100)
    for event in (m.Published(at(100)), m.TrackerWritten(at(999))):
        with pytest.raises(IllegalTransition):
            ledger.post(event)
    assert ledger == tracked(100)


def test_pruned_and_discarded_are_forgotten_quarantined_is_not():
    """Catches: forgotten attempts growing the journal, or a quarantined one lost from sight."""
    ledger = flying(S.FORKED, base=tracked(100, 200))
    for event in (m.Failed(at(300), "x"), m.WritersLost(at(300)), m.Cleaned(at(300))):
        ledger, _, _ = ledger.post(event)
    assert at(300) not in ledger.checkpoints
    ledger, moved, command = ledger.post(m.Withdrawn(at(200), "rollback"))
    assert ledger.checkpoints[at(200)].state is S.QUARANTINED
    assert command == m.Quarantine(at(200))


# ------------------------------------------------------------------------------- reports (I5)


def rejected(ledger: Ledger, event: m.Event) -> Rejected:
    outcome = ledger.report(event)
    assert isinstance(outcome, Rejected), outcome
    assert outcome.event is event
    return outcome


@pytest.mark.parametrize(
    "of", [at(300, attempt=2), at(300, epoch=2), at(301)], ids=["attempt", "epoch", "step"]
)
def test_F11_a_report_of_another_attempt_is_rejected(of):
    """Catches: a late completion of an earlier attempt counted for this one."""
    event = m.ShardReported(of, "state", 0, 2, 1)
    outcome = rejected(flying(S.FORKED), event)
    assert "no living attempt" in outcome.why and str(of) in outcome.why
    assert not outcome.wrong_world_size


@pytest.mark.parametrize(
    "event",
    [
        m.ShardReported(at(300), "ghost", 0, 2, 1),
        m.ShardReported(at(300), "state", 2, 2, 1),
        m.WriterForked(at(300), 0, 2),
        m.WriterGone(at(300), 0),
        m.TrackerWritten(at(300)),
    ],
    ids=lambda e: type(e).__name__,
)
def test_I5_an_event_that_does_not_fit_the_state_is_rejected(event):
    """Catches: a cross-wired, duplicate or premature report that counts or raises."""
    outcome = rejected(flying(S.FORKED), event)
    assert outcome.why == f"{event.name} does not fit forked"
    assert not outcome.wrong_world_size


def test_F10_a_wrong_world_size_is_rejected_and_says_so():
    """Catches: ranks of another job size completing a checkpoint, and an error without numbers."""
    for event in (m.WriterForked(at(300), 0, 4), m.ShardReported(at(300), "state", 0, 4, 1)):
        outcome = rejected(flying(S.FORKED), event)
        assert outcome.wrong_world_size
        assert "4" in outcome.why and "2" in outcome.why and "rank 0" in outcome.why
        late = rejected(flying(S.FAILED), event)
        assert not late.wrong_world_size, "a failed attempt must not be failed again"


def test_I5_a_duplicate_shard_is_rejected_and_bytes_count_once():
    """Catches: the same shard reported twice completing the checkpoint or doubling its size."""
    ledger = flying(S.FORKED)
    event = m.ShardReported(at(300), "state", 0, 2, 10)
    outcome = ledger.report(event)
    assert not isinstance(outcome, Rejected)
    ledger, moved, command = outcome
    assert moved.source is moved.dest is S.FORKED and command is None
    rejected(ledger, event)
    ledger, moved, command = ledger.report(m.ShardReported(at(300), "state", 1, 2, 5))
    assert moved.dest is S.SHARDS_WRITTEN and command == m.Finalize(at(300))
    assert moved.checkpoint.shard_bytes == 15


def test_protected_replaces_the_steps_read_before():
    """Catches: a released pin or lease that protects for ever."""
    ledger = tracked(1, 2).protected([1], [1], [1]).protected([2], [])
    assert ledger.pins == {2} and ledger.readers == frozenset()


@pytest.mark.parametrize(
    "part", [PartSpec("a.tmp-1"), PartSpec("a", directory="model/x.tmp-2/dist_ckpt")]
)
def test_F30_a_part_named_like_a_temporary_file_is_refused(part: PartSpec):
    """Catches: a part that loses its shards, because they are swept away as left-over temporary
    files."""
    with pytest.raises(ConfigError, match="tmp"):
        check_parts((part,), 2)


@pytest.mark.parametrize(
    "name",
    ["metadata.json", "common.pt", "data.distcp", ".metadata", ".ckptfsm", "integrity.json"],
)
def test_I3_a_part_is_not_named_like_the_files_of_a_save(name: str):
    """Catches: a trainer's file that is overwritten by ``metadata.json`` or a shard: the save is
    acknowledged, the file is lost, and a restart finds damage. A directory of such a name, which fails
    every save."""
    for kind in ("tree", "torch_dist", "foreign"):
        with pytest.raises(ConfigError, match=re.escape(name)):
            check_parts((PartSpec(name, kind, name),), 2)
        with pytest.raises(ConfigError, match=re.escape(name)):
            check_parts((PartSpec("actor", kind, f"a/{name}"),), 2)
    with pytest.raises(ConfigError, match=re.escape(name)) as caught:
        check_parts((PartSpec("state"), PartSpec(name, "file", ranks=(0,))), 2)
    assert caught.value.part == name
    check_parts((PartSpec("state"), PartSpec(f"my-{name.strip('.')}x", "file", ranks=(0,))), 2)


def test_reports_are_absorbed_up_to_the_first_that_is_of_another_attempt_or_moves_it():
    """Catches: a report of a dead attempt that is absorbed, or that hides those before it."""
    ledger = ledger_of(Checkpoint(at(300), S.REQUESTED, PARTS, 3))
    forks = [WriterForked(at(300), rank, 3) for rank in range(3)]
    after, taken = ledger.absorb(forks)
    assert (taken, after.checkpoints[at(300)].forked) == (2, {0, 1})
    assert after == ledger.post(forks[0])[0].post(forks[1])[0]
    assert ledger.absorb([forks[0], WriterForked(at(200), 1, 3), forks[1]])[1] == 1
    assert ledger.absorb([WriterForked(at(200), 1, 3), *forks]) == (ledger, 0)
    assert ledger.absorb([WriterForked(at(300), 1, 7), *forks]) == (ledger, 0)


def test_a_late_report_of_another_world_size_fails_nothing():
    """Catches: a failure of an attempt that is published, which the table forbids."""
    ledger = ledger_of(checkpoint(100, S.FINALIZED))
    outcome = ledger.report(WriterForked(at(100), 0, 7))
    assert not outcome.wrong_world_size
