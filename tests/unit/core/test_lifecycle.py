"""The table, exhaustively: every state x event x guard outcome, through machine, table and a reference.

``reference`` below is a second, independent reading of the specification (double entry): a guard
that is changed in the library, in whatever way, disagrees with it somewhere in the product.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import FrozenInstanceError, replace

import pytest
from transitions import Machine

from ckptfsm.core import events as m
from ckptfsm.core import lifecycle
from ckptfsm.core.errors import IllegalTransition
from ckptfsm.core.events import Event
from ckptfsm.core.lifecycle import (
    ENDED,
    EVENTS,
    FORGOTTEN,
    IN_FLIGHT,
    TABLE,
    Checkpoint,
    Row,
    State,
    absent,
    absorb,
    apply,
    compile_machine,
    find_row,
)
from ckptfsm.core.parts import AttemptId, PartSpec

S = State
OF = AttemptId(100, 3, 1)
STALE = AttemptId(100, 2, 1)
PARTS = (PartSpec("state"), PartSpec("data", "file", ranks=(0,)))
ALL_REPORTS = frozenset({("state", 0), ("state", 1), ("data", 0)})
EVERYONE = frozenset({0, 1})
FOREIGN = (PartSpec("foreign", "foreign"),)


def checkpoints() -> list[Checkpoint]:
    """Every state with every relevant memory of forks, reports and ends (not only reachable ones)."""
    forked = [frozenset(), frozenset({0}), frozenset({1}), EVERYONE]
    reported = [frozenset(), frozenset({("state", 0)}), *(ALL_REPORTS - {r} for r in ALL_REPORTS)]
    reported.append(ALL_REPORTS)
    gone = [frozenset(), frozenset({0}), EVERYONE]
    base = Checkpoint(OF, S.ABSENT, PARTS, 2)
    found = [
        replace(base, state=state, forked=f, reported=r, gone=g)
        for state, f, r, g in itertools.product(State, forked, reported, gone)
    ]
    published = [replace(base, state=state, published=True) for state in State]
    ran = [
        replace(base, state=state, parts=FOREIGN, finalizers_ran=ranks, published=published)
        for state, ranks, published in itertools.product(State, gone, (False, True))
    ]
    last = replace(base, state=S.FORKED, parts=FOREIGN, forked=EVERYONE)
    last = replace(last, reported=frozenset({("foreign", 0)}))
    return [absent(OF), *found, *published, *ran, last]


def events(of: AttemptId = OF) -> list[Event]:
    """Every event class; several of each where a guard could say either."""
    found: list[Event] = [
        m.SaveRequested(of, PARTS, 2),
        m.Published(of),
        m.FoundPublished(of),
        m.TrackerWritten(of),
        m.Reprieved(of, "pin"),
        m.Removed(of),
        m.Failed(of, "writer_died"),
        m.WritersLost(of),
        m.Cleaned(of),
        m.Withdrawn(of, "rollback"),
        m.Withdrawn(of, "damaged"),
        m.Adopted(of),
        m.PublishedOnDisk(of),
    ]
    found += [m.FinalizersRan(of, rank) for rank in (-1, 0, 1, 2)]
    found += [m.WriterForked(of, rank, n) for rank in (-1, 0, 1, 2) for n in (1, 2, 3)]
    found += [
        m.ShardReported(of, part, rank, n, 7)
        for part in ("state", "data", "foreign", "ghost")
        for rank in (-1, 0, 1, 2)
        for n in (2, 3)
    ]
    found += [m.WriterGone(of, rank) for rank in (-1, 0, 1, 2)]
    found += [
        m.Superseded(of, newer, kept)
        for newer in (None, 0, 99, 100, 101)
        for kept in ((), ("pin",), ("latest", "retention"))
    ]
    return found


def reference(c: Checkpoint, e: Event) -> tuple[State, type[m.Command] | None] | None:
    """The specification read a second time, by hand. None: illegal."""
    before_publishing = (S.REQUESTED, S.FORKED, S.SHARDS_WRITTEN)
    match e:
        case m.SaveRequested() if c.state is S.ABSENT and not c.parts:
            return S.REQUESTED, m.CreateStaging
        case m.Adopted() if c.state is S.ABSENT and not c.parts:
            return S.TRACKED, None
        case m.WriterForked() if c.state is S.REQUESTED:
            if e.world_size != 2 or e.rank not in (0, 1) or e.rank in c.forked:
                return None
            return (S.FORKED if c.forked | {e.rank} == {0, 1} else S.REQUESTED), None
        case m.ShardReported() if c.state in (S.REQUESTED, S.FORKED):
            key = (e.part, e.rank)
            due = {("foreign", 0), ("foreign", 1)} if c.parts == FOREIGN else ALL_REPORTS
            if e.world_size != 2 or key not in due or key in c.reported:
                return None
            if e.rank not in c.forked:
                return None
            if c.reported | {key} != due:
                return c.state, None
            then = m.RunFinalizers if c.parts == FOREIGN else m.Finalize
            return (S.SHARDS_WRITTEN, then) if c.state is S.FORKED else None
        case m.FinalizersRan() if c.state is S.SHARDS_WRITTEN and c.parts == FOREIGN:
            if c.published or e.rank not in {0, 1} - c.finalizers_ran:
                return None
            everyone = c.finalizers_ran | {e.rank} == {0, 1}
            return S.SHARDS_WRITTEN, (m.Finalize if everyone else None)
        case m.PublishedOnDisk() if c.state is S.SHARDS_WRITTEN and not c.published:
            return S.SHARDS_WRITTEN, None
        case m.Published() if c.state is S.SHARDS_WRITTEN and c.published:
            return S.FINALIZED, m.WriteTracker
        case m.FoundPublished() if c.state in before_publishing:
            return S.FINALIZED, m.WriteTracker
        case m.TrackerWritten() if c.state is S.FINALIZED:
            return S.TRACKED, None
        case m.Superseded() if c.state is S.TRACKED:
            newer = e.newer_step is not None and e.newer_step > 100
            return (S.PRUNABLE, m.Prune) if newer and not e.kept_by else None
        case m.Reprieved() if c.state is S.PRUNABLE:
            return S.TRACKED, None
        case m.Removed() if c.state is S.PRUNABLE:
            return S.PRUNED, None
        case m.Failed() if c.state in before_publishing:
            if c.state is S.SHARDS_WRITTEN and c.published:
                return None
            return S.FAILED, None
        case m.WriterGone() if c.state is S.FAILED:
            if e.rank not in {0, 1} - c.gone:
                return None
            return S.FAILED, (m.CleanUp if c.gone | {e.rank} == {0, 1} else None)
        case m.WritersLost() if c.state is S.FAILED and c.gone != {0, 1}:
            return S.FAILED, m.CleanUp
        case m.Cleaned() if c.state is S.FAILED and c.gone == {0, 1}:
            return S.DISCARDED, None
        case m.Withdrawn() if c.state in (S.TRACKED, S.FINALIZED, S.PRUNABLE):
            return S.QUARANTINED, m.Quarantine
    return None


def matching_rows(c: Checkpoint, e: Event) -> list[Row]:
    return [
        row
        for row in TABLE
        if row.source is c.state and row.event is type(e) and (row.guard is None or row.guard(c, e))
    ]


def test_every_state_and_event_agrees_with_table_machine_and_reference():
    """Catches: a changed, missing or extra row or guard; the machine and the table disagreeing."""
    exercised: set[Row] = set()
    for c, e in itertools.product(checkpoints(), events()):
        if c.parts == () and c.state is not S.ABSENT:
            continue
        rows = matching_rows(c, e)
        assert len(rows) <= 1, f"two guards true: {c} {e} {rows}"
        row = rows[0] if rows else None
        assert find_row(c, e) is row
        expected = reference(c, e)
        assert (expected is None) == (row is None), f"{c} {e}: {row}, expected {expected}"
        if row is None:
            with pytest.raises(IllegalTransition) as caught:
                apply(c, e)
            assert caught.value.facts["step"] == 100
            assert caught.value.facts["state"] == c.state.value
            assert caught.value.facts["event"] == e.name
            assert caught.value.facts["attempt"] == "100.e3.a1"
            continue
        moved, command = apply(c, e)
        exercised.add(row)
        assert (moved.state, type(command) if command else None) == expected
        assert (row.dest, row.command) == expected
        assert moved.id == OF and (command is None or command.of == OF)
    assert exercised == set(TABLE), f"never exercised: {set(TABLE) - exercised}"


def test_the_machine_says_nothing_in_a_log_at_INFO(caplog):
    """Catches: lines of the package ``transitions`` in the log of every trainer that logs at INFO."""
    caplog.set_level(logging.INFO)
    for c, e in itertools.product(checkpoints(), events()):
        if find_row(c, e) is not None:
            apply(c, e)
    assert caplog.records == []


def test_I5_an_event_of_another_attempt_is_illegal_everywhere():
    """Catches: a completion of an earlier attempt (or epoch, or step) moving this one (F11)."""
    for other in (STALE, AttemptId(100, 3, 2), AttemptId(101, 3, 1)):
        for c, e in itertools.product(checkpoints()[::11], events(other)):
            with pytest.raises(IllegalTransition) as caught:
                apply(c, e)
            assert caught.value.facts["step"] == 100


def test_every_event_class_of_messages_is_in_the_matrix():
    """Catches: a new event class that no test drives."""
    classes = {
        thing
        for thing in vars(m).values()
        if isinstance(thing, type) and issubclass(thing, Event) and thing is not Event
    }
    assert {type(e) for e in events()} == classes
    assert set(EVENTS) == classes
    assert len({cls.name for cls in classes}) == len(classes)


def test_a_checkpoint_cannot_be_changed():
    """Catches: Checkpoint losing frozen or slots."""
    c = absent(OF)
    with pytest.raises(FrozenInstanceError):
        c.state = S.TRACKED  # type: ignore[misc]
    with pytest.raises((FrozenInstanceError, AttributeError, TypeError)):
        c.extra = 1  # type: ignore[attr-defined]


def test_the_machine_has_no_auto_transitions():
    """Catches: ``auto_transitions=True``, which adds ``to_tracked()`` and bypasses every guard."""
    machine = compile_machine()
    assert set(machine.events) == {cls.name for cls in EVENTS}
    assert not [name for name in machine.events if name.startswith("to_") or name == "to"]
    for state in State:
        assert not [t for t in machine.get_triggers(state) if t.startswith("to_")]
    assert not machine.models


def test_apply_remembers_its_facts():
    """Catches: a forgotten or wrong field when an event is absorbed."""
    c, _ = apply(absent(OF), m.SaveRequested(OF, PARTS, 2, True, (("loss", 1.5),), run_seconds=9.0))
    assert (c.parts, c.world_size, c.in_place, c.metrics) == (PARTS, 2, True, (("loss", 1.5),))
    assert c.run_seconds == 9.0 and c.provenance == "saved" and c.step == 100
    c, _ = apply(c, m.WriterForked(OF, 1, 2))
    c, _ = apply(c, m.ShardReported(OF, "state", 1, 2, 10))
    c, _ = apply(c, m.WriterForked(OF, 0, 2))
    c, _ = apply(c, m.ShardReported(OF, "state", 0, 2, 5))
    assert c.forked == {0, 1} and c.reported == {("state", 0), ("state", 1)}
    assert c.shard_bytes == 15
    failed, _ = apply(c, m.Failed(OF, "writer_died", "rank 0: signal 9"))
    assert (failed.reason, failed.detail) == ("writer_died", "rank 0: signal 9")
    one, _ = apply(failed, m.WriterGone(OF, 1))
    assert one.gone == {1}
    assert apply(one, m.WritersLost(OF))[0].gone == {0, 1}
    adopted, _ = apply(absent(OF), m.Adopted(OF, 4.0, (("loss", 1.0),)))
    assert (adopted.provenance, adopted.run_seconds) == ("adopted", 4.0)
    assert adopted.metrics == (("loss", 1.0),)
    out, _ = apply(adopted, m.Withdrawn(OF, "rollback", "to 50"))
    assert (out.reason, out.detail) == ("rollback", "to 50")


REPORTS = (m.WriterForked, m.ShardReported, m.FinalizersRan, m.WriterGone)


def test_absorb_takes_a_report_exactly_if_apply_stays_in_the_state():
    """Catches: a guard that absorb forgets, a report with a command that is lost."""
    for checkpoint, event in itertools.product(checkpoints(), [*events(), *events(STALE)]):
        try:
            after, command = apply(checkpoint, event)
        except IllegalTransition:
            after, command = checkpoint, None
        taken = isinstance(event, REPORTS) and command is None and after.state is checkpoint.state
        if taken and after != checkpoint:
            assert absorb(checkpoint, [event]) == (after, 1), (checkpoint, event)
        else:
            assert absorb(checkpoint, [event]) == (checkpoint, 0), (checkpoint, event)


def test_absorb_of_many_reports_is_apply_of_each():
    """Catches: facts of the second report that are judged without those of the first."""
    everyone = range(6)
    parts = (PartSpec("state"), PartSpec("data", "file", ranks=(3,)))
    begun = Checkpoint(OF, S.REQUESTED, parts, 6)
    mixed = [
        report
        for rank in everyone
        for report in (m.WriterForked(OF, rank, 6), m.ShardReported(OF, "state", rank, 6, rank))
    ]
    once = begun
    for report in mixed[:-2]:
        once, command = apply(once, report)
        assert command is None
    assert absorb(begun, mixed) == (once, len(mixed) - 2), "the last fork moves it"
    assert absorb(begun, mixed, 2)[1] == len(mixed) - 2, "rank 0 has not forked then"
    assert absorb(begun, [*mixed[:4], mixed[0]])[1] == 4, "a report counts once"
    assert absorb(begun, mixed, len(mixed)) == (begun, 0)


def test_absorb_looks_up_the_ranks_once_for_all_reports():
    """Catches: a look-up by all parts for each report, which is half of its cost."""
    begun, looked = Checkpoint(OF, S.REQUESTED, PARTS, 100), lifecycle.writers_of.cache_info
    before = looked()
    assert absorb(begun, [m.WriterForked(OF, rank, 100) for rank in range(99)])[1] == 99
    after = looked()
    assert after.hits + after.misses - before.hits - before.misses == 1


def test_I3_expected_reports_are_all_parts_of_all_their_ranks():
    """Catches: a part or rank left out of the set that must be durable."""
    c = Checkpoint(OF, S.REQUESTED, PARTS, 2)
    assert c.expected == ALL_REPORTS
    assert c.writers == EVERYONE
    assert replace(c, world_size=3).expected == ALL_REPORTS | {("state", 2)}


def test_the_compiled_machine_makes_the_moves(monkeypatch):
    """Catches: a move that the table makes beside the machine."""
    monkeypatch.setattr("ckptfsm.core.lifecycle.find_row", lambda checkpoint, event: None)
    moved, command = apply(absent(OF), m.SaveRequested(OF, PARTS, 2))
    assert (moved.state, command) == (S.REQUESTED, m.CreateStaging(OF))
    empty = Machine(model=None, states=list(State), initial=S.ABSENT, auto_transitions=False)
    monkeypatch.setattr("ckptfsm.core.lifecycle.compile_machine", lambda: empty)
    with pytest.raises(IllegalTransition) as caught:
        apply(absent(OF), m.SaveRequested(OF, PARTS, 2))
    assert caught.value.facts["step"] == 100


# ---------------------------------------------------------------- the table as a graph


def sources(dest: State) -> set[State]:
    return {row.source for row in TABLE if row.dest is dest and row.source is not dest}


def reachable(start: State, without: frozenset[State] = frozenset()) -> set[State]:
    seen, pending = {start}, [start]
    while pending:
        here = pending.pop()
        for row in TABLE:
            if row.source is here and row.dest not in seen | without:
                seen.add(row.dest)
                pending.append(row.dest)
    return seen


def test_I1_deletion_only_from_prunable_and_prunable_only_from_tracked():
    """Catches: a row that lets something published be deleted by any other way."""
    assert sources(S.PRUNED) == {S.PRUNABLE}
    assert sources(S.PRUNABLE) == {S.TRACKED}
    assert sources(S.DISCARDED) == {S.FAILED}
    assert {r.source for r in TABLE if r.command is m.Prune} == {S.TRACKED}
    assert {r.source for r in TABLE if r.command is m.CleanUp} == {S.FAILED}


def test_I1_nothing_published_ever_fails():
    """Catches: a way from finalized (published) to failed: the files of a failed attempt are thrown
    away."""
    assert S.FAILED not in reachable(S.FINALIZED)
    assert S.DISCARDED not in reachable(S.FINALIZED)
    assert S.FAILED in reachable(S.ABSENT, without=frozenset({S.FINALIZED}))
    assert reachable(S.FAILED) == {S.FAILED, S.DISCARDED}


def test_tracked_is_reached_only_via_finalized_adopted_or_reprieved():
    """Catches: an acknowledgement that skips publishing."""
    into = {(r.source, r.event) for r in TABLE if r.dest is S.TRACKED}
    assert into == {
        (S.FINALIZED, m.TrackerWritten),
        (S.ABSENT, m.Adopted),
        (S.PRUNABLE, m.Reprieved),
    }


def test_I3_finalized_follows_shards_written_except_where_a_restart_found_a_manifest():
    """Catches: publishing before every shard is durable."""
    into = {(r.source, r.event) for r in TABLE if r.dest is S.FINALIZED}
    assert into - {(s, m.FoundPublished) for s in State} == {(S.SHARDS_WRITTEN, m.Published)}


def test_nothing_leaves_an_ended_state_and_everything_can_end():
    """Catches: a dead end in the middle, or life after the end."""
    assert not [row for row in TABLE if row.source in ENDED]
    assert FORGOTTEN < ENDED and not IN_FLIGHT & ENDED
    for state in State:
        assert reachable(state) & ENDED, f"{state} never ends"
    assert reachable(S.ABSENT) == set(State)
    assert not [row for row in TABLE if row.dest is S.ABSENT]


def test_every_arrival_asks_for_the_command_that_continues_it():
    """Catches: a row that moves on without asking for the effect."""
    wanted = {
        S.SHARDS_WRITTEN: {m.Finalize, m.RunFinalizers},
        S.FINALIZED: {m.WriteTracker},
        S.PRUNABLE: {m.Prune},
        S.QUARANTINED: {m.Quarantine},
    }
    for row in TABLE:
        if row.dest in wanted and row.source is not row.dest:
            assert row.command in wanted[row.dest], row
