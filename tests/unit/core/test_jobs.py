"""Jobs of ``on_tracked``: which checkpoints get a record, which wait, and how a record ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptfsm.core.config import make_config
from ckptfsm.core.documents import JobRecord, JobState, decode, encode
from ckptfsm.core.errors import ConfigError, DamagedRoot
from ckptfsm.core.jobs import (
    KEPT_MISSED,
    REASON_LETTERS,
    Copy,
    Job,
    after_attempt,
    begin_again,
    begun,
    given_back,
    missed,
    pause_s,
    settle,
    with_placeholders,
)
from ckptfsm.core.layout import job_name, parse_job
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.parts import AttemptId, PartSpec

S, J = State, JobState
EXPORT = Job(name="export", command="tools.export:run")
UPLOAD = Job(name="upload", command=("upload", "{path}"))


def at(step: int, attempt: int | None = None) -> AttemptId:
    return AttemptId(step, 1, attempt or step)


def ledger(*steps: int, **others: State) -> dict[AttemptId, Checkpoint]:
    """Tracked checkpoints of these steps, and others in a state: ``s5=State.PRUNABLE``."""
    states = {at(step): S.TRACKED for step in steps}
    states |= {at(int(name[1:])): state for name, state in others.items()}
    parts = (PartSpec("state"),)
    return {of: Checkpoint(id=of, state=state, parts=parts) for of, state in states.items()}


def record(step: int, state: JobState = J.WAITING, job: Job = EXPORT, **more) -> JobRecord:
    of = more.pop("of", None) or at(step)
    return JobRecord(
        step=step, epoch=of.epoch, attempt=of.attempt, job=job.name, state=state, **more
    )


def told(records) -> list[tuple[int, str, str]]:
    return [(each.step, each.job, each.state.value) for each in records]


# ----------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"name": "Export", "command": "a:b"}, "name"),
        ({"name": "a.b", "command": "a:b"}, "name"),
        ({"name": "a\n", "command": "a:b"}, "name"),
        ({"name": "a", "command": "module.function"}, "'module:function', not 'module.function'"),
        ({"name": "a", "command": "a:b:c"}, "'module:function'"),
        ({"name": "a", "command": "a b:c"}, "'module:function'"),
        ({"name": "a", "command": "a:b.1"}, "'module:function'"),
        ({"name": "a", "command": ()}, "a program needs a name"),
        ({"name": "a", "command": ("", "x")}, "a program needs a name"),
        ({"name": "a", "command": "a:b", "attempts": 0}, "attempts"),
        ({"name": "a", "command": "a:b", "queue": 0}, "queue"),
        ({"name": "a", "command": "a:b", "every": 0}, "every"),
        ({"name": "a", "command": "a:b", "backoff_s": -1}, "backoff_s"),
        ({"name": "a", "command": "a:b", "timeout_s": 0}, "timeout_s"),
        ({"name": "a", "command": "a:b", "evry": 3}, "evry"),
    ],
)
def test_a_job_that_cannot_work_is_refused(values, words):
    """Catches: a job that fails at its first checkpoint, hours after the start."""
    with pytest.raises(ConfigError, match=words) as raised:
        Job(**values)
    assert raised.value.facts["key"] == "on_tracked"
    with pytest.raises(ConfigError, match=words):
        make_config({"on_tracked": [values]})


def test_jobs_are_read_from_a_dict_and_have_different_names():
    found = make_config({"on_tracked": [{"name": "a", "command": ["sh", "x"], "every": 5}]})
    assert found.on_tracked == (Job(name="a", command=("sh", "x"), every=5),)
    assert (found.on_tracked[0].attempts, found.on_tracked[0].queue) == (3, 8)
    with pytest.raises(ConfigError, match="have one name"):
        make_config({"on_tracked": [EXPORT, EXPORT]})


def test_placeholders_are_replaced_once_and_other_braces_stay():
    """Catches: a root with ``{step}`` in its name, and a shell's ``${x}``, that are taken apart."""
    words = ["-c", "cp {path}/{step} ${x} {}", "{step}{step}"]
    assert with_placeholders(words, "/r/{step}/{path}", 7) == [
        "-c",
        "cp /r/{step}/{path}/7 ${x} {}",
        "77",
    ]


def test_a_name_is_that_of_its_attempt_and_job():
    name = job_name(AttemptId(40, 2, 7), "to-hf_2")
    assert name == ".ckptfsm/jobs/40.e2.a7.to-hf_2.json"
    assert parse_job(name.rpartition("/")[2]) == (AttemptId(40, 2, 7), "to-hf_2")
    for bad in (
        "40.e2.a7.json",
        "40.e2.a7.A.json",
        "40.e2.a7.a",
        "40.e2.a07.a.json",
        "x",
        "a.json",
    ):
        assert parse_job(bad) is None, bad


def test_a_record_comes_back_and_a_strange_one_is_refused():
    kept = record(40, J.FAILED, begun=3, reason="exit status 1")
    assert decode(JobRecord, encode(kept), "x") == kept
    with pytest.raises(DamagedRoot):
        decode(JobRecord, encode(kept).replace(b'"failed"', b'"lost"'), "x")


# -------------------------------------------------------------------------- records for checkpoints


def test_a_new_job_begins_with_the_newest():
    """Catches: a job that exports a hundred old checkpoints when it is first configured."""
    found = settle((EXPORT,), (), ledger(1, 2, 3))
    assert told(found.put) == [(3, "export", "waiting")]
    assert (found.put, found.removed) == (found.waiting, ())
    assert settle((EXPORT,), (), {}).put == ()


def test_later_checkpoints_wait_in_the_order_of_requests_then_of_jobs():
    """Catches: a checkpoint that is passed over, and one that comes again after a rollback."""
    known = [record(3, J.DONE), record(3, J.DONE, UPLOAD)]
    again = at(2, attempt=9)  # step 2 was saved again after a rollback from step 3
    now = {**ledger(1, 5), again: Checkpoint(id=again, state=S.TRACKED, parts=())}
    found = settle((UPLOAD, EXPORT), known, {**now, **ledger(3)})
    assert told(found.waiting) == [
        (5, "upload", "waiting"),
        (5, "export", "waiting"),
        (2, "upload", "waiting"),
        (2, "export", "waiting"),
    ]
    assert set(found.put) == set(found.waiting) and found.removed == ()


def test_only_multiples_of_every():
    job = Job(name="export", command="a:b", every=10)
    found = settle((job,), [record(10, J.DONE)], ledger(10, 15, 20, 30))
    assert told(found.put) == [(20, "export", "waiting"), (30, "export", "waiting")]
    assert told(settle((job,), (), ledger(10, 15)).put) == [(10, "export", "waiting")]


def test_only_what_is_tracked_gets_a_record():
    states = {"s2": S.FINALIZED, "s3": S.PRUNABLE, "s4": S.FORKED}
    assert settle((EXPORT,), [record(1, J.DONE)], ledger(1, **states)).put == ()


def test_a_checkpoint_that_came_and_went_between_two_looks_is_missed():
    """Catches: a promise that is broken silently, because retention was faster than the next look."""
    known = [record(1, J.DONE)]
    found = settle((EXPORT,), known, ledger(1, 4, s3=S.QUARANTINED), saved=[at(1), at(2), at(3)])
    assert told(found.put) == [
        (2, "export", "missed"),
        (3, "export", "missed"),
        (4, "export", "waiting"),
    ]
    assert [each.reason for each in found.put] == [
        "its checkpoint was pruned before its turn",
        "its checkpoint was withdrawn before its turn",
        "",
    ]
    assert told(found.waiting) == [(4, "export", "waiting")]


def test_a_new_job_has_missed_nothing():
    assert told(settle((EXPORT,), (), ledger(4), saved=[at(1), at(4)]).put) == [
        (4, "export", "waiting")
    ]


def test_a_new_job_skips_nothing_that_its_owner_saved():
    """Catches: the first steps of a run, skipped as they came before the first look."""
    old = [AttemptId(step, 1, step) for step in (10, 20)]
    ours = [AttemptId(step, 2, step) for step in (30, 40, 50)]
    adopted = [AttemptId(step, 2, step) for step in (5, 6)]
    there = [*old, *ours[1:]]
    now = {of: Checkpoint(id=of, state=S.TRACKED, parts=()) for of in there}
    found = settle((EXPORT,), (), now, saved=[*old, *ours], epoch=2)
    assert told(found.put) == [
        (20, "export", "waiting"),
        (30, "export", "missed"),
        (40, "export", "waiting"),
        (50, "export", "waiting"),
    ]
    now = {of: Checkpoint(id=of, state=S.TRACKED, parts=()) for of in adopted}
    assert told(settle((EXPORT,), (), now, epoch=2).put) == [(6, "export", "waiting")]


# ----------------------------------------------------------------------------- the fate of a record


def test_I7_a_copy_is_a_job_that_holds_and_counts_for_its_place_alone():
    """Catches: a step pruned as it was copied to another place; a copy that holds nothing."""
    one, other = Copy("s3://bucket/a"), Copy("s3://bucket/b", before_prune=False)
    config = make_config({"copies": [one, other, {"to": "copies", "name": "disk", "every": 10}]})
    names = [job.name for job in config.jobs]
    assert len(set(names)) == 3
    assert config.holds == {names[0]: 1, "disk": 10}
    assert Copy.model_validate_json(config.jobs[0].environment["CKPTFSM_COPY"]) == one


@pytest.mark.parametrize(
    "values", [{}, {"to": ""}, {"to": "x", "limit_mb_s": 0}, {"to": "x", "before": True}]
)
def test_a_bad_copy_is_refused(values):
    """Catches: a limit of nothing, a setting that is misspelt and kept in silence."""
    with pytest.raises(ConfigError, match="a copy: ") as raised:
        Copy(**values)
    assert raised.value.key == "copies"


@pytest.mark.parametrize("state", [J.WAITING, J.RUNNING])
def test_a_checkpoint_that_goes_before_its_turn_is_missed(state):
    """Catches: a job that waits for ever, and a record that vanishes with its checkpoint."""
    found = settle((EXPORT,), [record(1, state), record(2, state)], ledger(3, s2=S.QUARANTINED))
    assert told(found.put)[:2] == [(1, "export", "missed"), (2, "export", "missed")]
    assert "pruned" in found.put[0].reason and "withdrawn" in found.put[1].reason
    assert told(found.waiting) == [(3, "export", "waiting")]


def test_a_prunable_one_may_come_back_and_waits_out_of_turn():
    found = settle((EXPORT,), [record(1), record(2)], ledger(2, s1=S.PRUNABLE))
    assert (found.put, found.removed) == ((), ())
    assert told(found.waiting) == [(2, "export", "waiting")]


def test_the_job_that_runs_is_left_alone():
    """Catches: two processes for a job, and a record that is missed while its job runs."""
    busy = record(1, J.RUNNING, begun=1)
    found = settle((EXPORT,), [busy, record(2)], ledger(2), [busy])
    assert (found.put, found.removed) == ((), ())
    assert told(found.waiting) == [(2, "export", "waiting")]
    retried = record(1, J.WAITING, begun=1)
    assert settle((EXPORT,), [retried], ledger(1), [retried]).waiting == ()


def test_a_job_that_is_no_longer_configured_is_missed():
    known = [record(1), record(1, J.DONE, UPLOAD)]
    found = settle((UPLOAD,), known, ledger(1))
    assert told(found.put) == [(1, "export", "missed")]
    assert found.put[0].reason == "the job is no longer configured" and found.waiting == ()


@pytest.mark.parametrize("state", [J.DONE, J.FAILED, J.MISSED])
def test_what_has_ended_stays_as_it_is_while_its_checkpoint_is_there(state):
    known = [record(1, state), record(2, J.DONE)]
    found = settle((EXPORT,), known, ledger(2, s1=S.PRUNABLE))
    assert (found.put, found.removed, found.waiting) == ((), (), ())
    found = settle((), known, ledger(1, 2))
    assert (found.put, found.removed) == ((), ())


def test_a_slow_job_misses_the_oldest():
    """Catches: a queue that grows for as long as training lasts."""
    job = Job(name="export", command="a:b", queue=2)
    known = [record(step) for step in (1, 2, 3, 4)]
    found = settle((job,), known, ledger(1, 2, 3, 4))
    assert told(found.put) == [(1, "export", "missed"), (2, "export", "missed")]
    assert found.put[0].reason == "newer checkpoints came before its turn"
    assert told(found.waiting) == [(3, "export", "waiting"), (4, "export", "waiting")]
    found = settle((job,), known, ledger(1, 2, 3, 4), busy=known[:1])
    assert told(found.put) == [(2, "export", "missed")], "the one that runs does not wait"
    assert settle((job,), known[:2], ledger(1, 2)).put == ()


def test_a_queue_is_that_of_its_job():
    job = Job(name="export", command="a:b", queue=1)
    known = [record(1), record(1, job=UPLOAD), record(2, J.DONE), record(2, job=UPLOAD)]
    assert settle((job, UPLOAD), known, ledger(1, 2)).put == ()


# ------------------------------------------------------------------------------------ jobs that hold

COPY = Job(name="copy", command="a:b", hold=True, queue=1)


def test_I7_a_job_that_holds_takes_all_that_are_there_and_misses_none():
    """Catches: a step that no record names, and that is held for ever; a full queue that misses one."""
    assert told(settle((COPY,), (), ledger(1, 2, 3)).put) == [
        (n, "copy", "waiting") for n in (1, 2, 3)
    ]
    known = [record(2, J.DONE, COPY)]
    found = settle((COPY,), known, ledger(1, 2, 3), saved=[at(3), at(4)])
    assert told(found.put) == [
        (1, "copy", "waiting"),
        (3, "copy", "waiting"),
        (4, "copy", "missed"),
    ], "4 was withdrawn: nothing else takes it"
    every = Job(name="copy", command="a:b", hold=True, every=2)
    assert told(settle((every,), (), ledger(1, 2, 3)).put) == [(2, "copy", "waiting")]


def test_I7_a_job_that_holds_begins_again_until_it_is_done():
    """Catches: a step that is held by a record that nobody takes up again."""
    states = (J.WAITING, J.RUNNING, J.FAILED, J.MISSED, J.DONE)
    known = [record(n, state, COPY, begun=5, reason="x") for n, state in enumerate(states, 1)]
    known.append(record(9, J.MISSED, COPY))
    found = begin_again((COPY,), known, ledger(*range(1, 6)))
    assert told(found) == [(n, "copy", "waiting") for n in (2, 3, 4)]
    assert [each.reason for each in found] == [
        "its process was ended during the last attempt",
        "x",
        "x",
    ]
    assert all(each.begun == 5 for each in found)


def test_a_job_that_holds_comes_back_after_the_longest_pause():
    assert [pause_s(COPY, n) for n in (1, 2, 3, 4)] == [30.0, 60.0, 3600.0, 3600.0]


# --------------------------------------------------------------------------------- what is forgotten


def test_after_a_rollback_the_latest_that_stayed_waits_again_once():
    """Catches: a job that goes on naming a step that was given up; one that runs at every look; a step
    that was damaged taken for one that was given up."""
    job = UPLOAD.model_copy(update={"after_rollback": True})
    done = [record(step, J.DONE, job) for step in (10, 20, 30, 40)]
    gone = {
        of: replace(each, reason="rollback")
        for of, each in ledger(s30=S.QUARANTINED, s40=S.QUARANTINED).items()
    }
    there = {**ledger(10, 20), **gone}
    found = settle([job], done, there)
    assert told(found.waiting) == [(20, "upload", "waiting")]
    assert told(found.removed) == [(30, "upload", "done")], "the newest tells where the job was"
    after = {each.step: each for each in [*done[:2], *found.put]}
    assert "rolled back" in after[40].reason
    again = settle([job], [done[0], after[40], record(20, J.DONE, job)], there)
    assert (again.put, again.waiting) == ((), ())
    back = settle([job], [done[0], after[40], record(20, J.DONE, job)], ledger(10, 20, 40))
    assert told(back.waiting) == [(40, "upload", "waiting")], "it came back from quarantine"
    assert settle([UPLOAD], done, there).waiting == ()
    forgotten = settle([job], done, ledger(10, 20))
    assert told(forgotten.waiting) == [(20, "upload", "waiting")], "by the owner after the next one"
    lost = {of: replace(each, reason="damaged") for of, each in gone.items()}
    found = settle([job], done, {**there, **lost})
    assert found.waiting == ()
    assert settle([job], [*done[:2], *found.put], ledger(10, 20)).put == ()


def test_records_go_with_their_checkpoints():
    """Catches: a file for each checkpoint that ever was."""
    known = [record(1, J.DONE), record(2, J.FAILED), record(3, J.DONE), record(4, J.DONE)]
    found = settle((EXPORT,), known, ledger(3, 4))
    assert told(found.removed) == [(1, "export", "done"), (2, "export", "failed")]
    assert found.put == ()
    assert told(settle((), known, ledger(3, 4)).removed) == told(found.removed)


def test_the_newest_record_stays_and_tells_where_the_job_was():
    """Catches: an old step that retention keeps, exported again when the newer ones are gone."""
    job = Job(name="export", command="a:b", every=10)
    known = [record(20, J.DONE)]
    found = settle((job,), known, ledger(10, 25))  # 10 was there before the job was configured
    assert (found.put, found.removed) == ((), ())


def test_the_last_that_were_missed_stay():
    many = [record(step, J.MISSED) for step in range(1, KEPT_MISSED + 4)]
    found = settle((EXPORT,), many, {})
    assert [each.step for each in found.removed] == [1, 2, 3]


# ------------------------------------------------------------------------------------- attempts


def test_a_job_that_was_interrupted_begins_again_until_its_attempts_are_used_up():
    """Catches: a job that is lost by a restart, and one that brings down each run for ever."""
    known = [
        record(1, J.RUNNING, begun=1),
        record(2, J.RUNNING, begun=3),
        record(3, J.WAITING, begun=2, reason="exit status 1"),
        record(4, J.WAITING, begun=3, reason="exit status 1"),
        record(5, J.DONE, begun=3),
        record(6, J.RUNNING, UPLOAD, begun=1),
    ]
    found = begin_again((EXPORT,), known, ledger(*range(1, 7)))
    assert told(found) == [
        (1, "export", "waiting"),
        (2, "export", "failed"),
        (4, "export", "failed"),
    ]
    assert [(each.begun, each.reason) for each in found] == [
        (1, "its process was ended during the last attempt"),
        (3, "its process was ended during the last attempt"),
        (3, "exit status 1"),
    ]


def test_an_attempt_counts_from_its_begin():
    first = begun(record(1))
    assert (first.state, first.begun) == (J.RUNNING, 1)
    again = after_attempt(first, EXPORT, "exit status 1")
    assert (again.state, again.begun, again.reason) == (J.WAITING, 1, "exit status 1")
    last = begun(begun(again))
    assert (last.begun, last.reason) == (3, "exit status 1")
    assert after_attempt(last, EXPORT, "killed").state is J.FAILED
    done = after_attempt(last, EXPORT, "")
    assert (done.state, done.begun, done.reason) == (J.DONE, 3, "")


def test_an_attempt_that_the_trainers_end_broke_off_does_not_count():
    first = given_back(begun(record(1, begun=1, reason="exit status 1")))
    assert (first.state, first.begun, first.reason) == (J.WAITING, 1, "exit status 1")
    assert given_back(record(1, begun=1)).begun == 1, "it waited for its next attempt"


def test_a_reason_is_bounded():
    found = missed(record(1), "x" * 10_000)
    assert len(found.reason) == REASON_LETTERS and decode(JobRecord, encode(found), "x") == found


def test_pauses_double_up_to_an_hour():
    assert [pause_s(EXPORT, n) for n in (1, 2, 3)] == [30.0, 60.0, 120.0]
    assert (pause_s(EXPORT, 9), pause_s(EXPORT, 100)) == (3600.0, 3600.0)
    patient = Job(name="a", command="a:b", backoff_s=5000)
    assert (pause_s(patient, 1), pause_s(patient, 2)) == (5000.0, 5000.0)
