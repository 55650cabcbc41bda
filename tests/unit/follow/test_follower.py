"""An evaluator that watches a root: which checkpoints it is given, and under which leases.

The clock of the evaluator is a fake: while it sleeps, the job acts. So nothing depends on time.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from real_roots import crashed, real_job, real_root
from strangers import newer_files

from ckptfsm.core.errors import ConfigError, DamagedRoot, DeadlineExceeded, StepNotFoundError
from ckptfsm.core.layout import TRACKER, VERL
from ckptfsm.core.lifecycle import State
from ckptfsm.core.retention import LatestN
from ckptfsm.disk import reader_lease
from ckptfsm.disk.publishing import Publisher
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.disk.visibility import VISIBILITY_S
from ckptfsm.follow import evaluators, follower
from ckptfsm.follow.evaluators import checkpoints, wait_for_new_checkpoint
from ckptfsm.testing.harness import FakeJob


class Turns:
    """A clock. At each sleep the next action of the job runs; then only time goes by."""

    def __init__(self, *actions: Callable[[], object]) -> None:
        self.now = 0.0
        self.actions = list(actions)

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> str:
        return ""

    def unix(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.actions:
            self.actions.pop(0)()


def seen(root: Path, *actions: Callable[[], object], after=None, **settings) -> list[int]:
    """The steps that an evaluator is given while the job acts, until nothing new comes."""
    turns = Turns(*actions)
    given = checkpoints(root, after, timeout_s=60.0, clock=turns, **settings)
    found = [lease.step for lease in given]
    assert turns.actions == [] and leases(root) == []
    return found


def leases(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob(".ckptfsm/readers/*"))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[FakeJob]:
    job = real_job(tmp_path)
    for step in (10, 20, 30):
        job.save(step)
    yield job
    job.coordinator.abandon()
    job.storage.close_root()


def test_every_checkpoint_comes_once_and_in_order(job: FakeJob, tmp_path: Path):
    """Catches: a step that is passed over, or evaluated twice."""
    coming = [lambda: job.save(40), lambda: None, lambda: (job.save(50), job.save(60))]
    assert seen(tmp_path, *coming) == [10, 20, 30, 40, 50, 60]


@pytest.mark.parametrize(("after", "first"), [(20, 30), (25, 30), (0, 10), ("20.e1.a2", 30)])
def test_the_reader_goes_on_after_what_it_has_seen(job: FakeJob, tmp_path: Path, after, first):
    """Catches: an evaluator that begins anew at each of its restarts."""
    assert seen(tmp_path, lambda: job.save(40), after=after) == [*range(first, 31, 10), 40]


def test_a_step_beyond_the_latest_is_waited_for(job: FakeJob, tmp_path: Path):
    """Catches: ``after`` that is taken for a rollback."""
    assert seen(tmp_path, lambda: job.save(40), lambda: job.save(50), after=40) == [50]
    assert seen(tmp_path, lambda: job.save(60), lambda: job.save(70), after=65) == [70]


def test_only_the_newest(job: FakeJob, tmp_path: Path):
    """Catches: an evaluator that is slower than the saves, and falls back further and further."""
    coming = [lambda: (job.save(40), job.save(50)), lambda: job.save(60)]
    assert seen(tmp_path, *coming, newest_only=True) == [30, 50, 60]


def test_the_lease_is_held_while_the_body_runs(tmp_path: Path):
    """I7. Catches: a step that is pruned while it is evaluated, or kept for ever after that."""
    job = real_job(tmp_path, retention=LatestN(1))
    job.save(10)
    given = checkpoints(tmp_path, clock=Turns(), timeout_s=1.0)
    lease = next(given)
    assert lease.step == 10 and lease.attempt == "10.e1.a1"
    job.save(20)
    job.save(30)
    assert lease.path == str(tmp_path / "iter_0000010")
    assert sorted(os.listdir(lease.path)) != [] and len(leases(tmp_path)) == 1
    assert next(given).step == 30, "20 was pruned meanwhile"
    job.coordinator.unpin(10)  # retention decides anew
    assert [p.name for p in sorted(tmp_path.glob("iter_*"))] == ["iter_0000030"]
    given.close()
    assert leases(tmp_path) == []
    job.close()


@pytest.mark.parametrize("kind", ["lease", "loop"])
def test_I7_a_forked_child_that_leaves_the_block_leaves_the_lease(
    kind: str, job: FakeJob, tmp_path: Path
):
    """Catches: a helper of the evaluator that ends by ``sys.exit``, and takes the step from it."""
    with ExitStack() as block:
        given = checkpoints(tmp_path, clock=Turns())
        if kind == "loop":
            next(block.enter_context(closing(given)))
        else:
            block.enter_context(ReaderLease(tmp_path, 10))
        before = leases(tmp_path)
        if (child := os.fork()) == 0:
            try:
                block.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert leases(tmp_path) == before != []
    assert leases(tmp_path) == []


def test_a_forked_child_ends_the_lease_that_it_began_itself(job: FakeJob, tmp_path: Path):
    """Catches: a lease that was made in the parent, entered in the child, and stays until it expires."""
    lease = ReaderLease(tmp_path, 10)
    if (child := os.fork()) == 0:
        try:
            with lease:
                held = leases(tmp_path) != []
        finally:
            os._exit(0 if held else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert leases(tmp_path) == []


def test_a_body_that_raises_ends_the_lease(job: FakeJob, tmp_path: Path):
    """Catches: a failed evaluation that keeps its step until the lease expires."""
    given = checkpoints(tmp_path, clock=Turns())
    next(given)
    assert len(leases(tmp_path)) == 1
    with pytest.raises(ValueError, match="a bad evaluation"):
        given.throw(ValueError("a bad evaluation"))
    assert leases(tmp_path) == []


def test_a_root_that_does_not_exist_yet_is_waited_for(tmp_path: Path):
    """Catches: an evaluator that has to be started after the trainer."""
    root, jobs = tmp_path / "runs/gpt", []
    coming = [
        lambda: root.mkdir(parents=True),
        lambda: jobs.append(real_job(root)),
        lambda: jobs[0].save(10),
        lambda: (jobs[0].close(), jobs[0].storage.close_root()),
        lambda: jobs.append(real_job(root)),
        lambda: jobs[1].save(20),
    ]
    assert seen(root, *coming) == [10, 20]
    jobs[1].close()


@pytest.mark.parametrize("text", ["", "5", "forty\n", "release\n", None])
def test_F30_a_tracker_that_is_torn_for_a_moment(job: FakeJob, tmp_path: Path, text: str | None):
    """Catches: a reader that ends, or begins anew, because it looked at a bad moment."""
    tracker = tmp_path / TRACKER
    whole = tracker.read_text()

    def tear() -> None:
        tracker.unlink()
        if text is not None:
            tracker.write_text(text)

    coming = [tear, lambda: None, lambda: tracker.write_text(whole), lambda: job.save(40)]
    assert seen(tmp_path, *coming) == [10, 20, 30, 40]


def test_steps_that_come_again_after_a_rollback_are_new(job: FakeJob, tmp_path: Path):
    """Catches: an evaluator that waits until the job is beyond the step that it has seen."""
    coming = [
        lambda: job.coordinator.rollback(10),
        lambda: job.save(20),
        lambda: job.save(25),
        lambda: job.save(30),
    ]
    assert seen(tmp_path, *coming) == [10, 20, 30, 20, 25, 30]


def test_a_rollback_while_the_reader_is_busy(job: FakeJob, tmp_path: Path):
    """Catches: steps that came again meanwhile, taken for those that were seen."""
    given, found = checkpoints(tmp_path, "20.e1.a2", timeout_s=1.0, clock=Turns()), []
    for lease in given:
        found.append(lease.attempt)
        if found == ["30.e1.a3"]:
            job.coordinator.rollback(10)
            for step in (20, 30):
                job.save(step)
    assert found == ["30.e1.a3", "20.e1.a4", "30.e1.a5"]


def test_a_tracker_that_names_the_same_step_again(job: FakeJob, tmp_path: Path):
    """Catches: a busy reader that takes an old step in the tracker for no news."""
    turns = Turns(lambda: None, lambda: job.save(40))
    found = []
    for lease in checkpoints(tmp_path, "30.e1.a3", timeout_s=20.0, clock=turns):
        found.append(lease.step)
        if lease.step == 40:
            job.coordinator.rollback(10)
            job.save(30)
    assert found == [40, 30]


@pytest.mark.parametrize(("after", "found"), [(30, [35]), ("30.e1.a3", [20, 25, 30, 35])])
def test_a_reader_that_restarts_after_a_rollback(job: FakeJob, tmp_path: Path, after, found):
    """Catches: a reader that passes over the steps below the attempt that it saw last."""
    job.coordinator.rollback(10)
    job.save(20)
    coming = [lambda: job.save(25), lambda: job.save(30), lambda: job.save(35)]
    assert seen(tmp_path, *coming, after=after) == found


@pytest.mark.parametrize("newest_only", [False, True])
@pytest.mark.parametrize("after", [20, 25])
def test_steps_up_to_after_never_come(job: FakeJob, tmp_path: Path, after: int, newest_only: bool):
    """Catches: steps that the caller has left out, given once the job went back below them."""
    coming = [lambda: job.coordinator.rollback(10), lambda: None]
    coming += [lambda step=step: job.save(step) for step in (15, 20, 25, 30, 20 + after)]
    found = [30, *(step for step in (25, 30, 20 + after) if step > after)]
    assert seen(tmp_path, *coming, after=after, newest_only=newest_only) == found


def test_a_reader_that_restarts_after_a_rollback_and_a_restart(job: FakeJob, tmp_path: Path):
    """Catches: an attempt that the journal has forgotten, taken for none."""
    job.coordinator.rollback(10)
    job.close()
    second = real_job(tmp_path)
    second.save(20)
    assert State.QUARANTINED not in {
        c.state for c in second.coordinator.ledger.checkpoints.values()
    }
    assert seen(tmp_path, after="30.e1.a3") == [20]
    assert seen(tmp_path, lambda: second.save(40), after=30) == [40]
    second.close()


def test_a_step_that_is_rolled_back_before_it_was_given(job: FakeJob, tmp_path: Path):
    """I2. Catches: a checkpoint above the tracker, which a rollback is about to move away."""
    given, found = checkpoints(tmp_path, timeout_s=1.0, clock=Turns()), []
    for lease in given:
        found.append(lease.step)
        if lease.step == 10:  # the tracker is lowered first
            (tmp_path / TRACKER).write_text("10\n")
    assert found == [10]


def test_a_directory_that_is_gone_is_passed_over(job: FakeJob, tmp_path: Path):
    """Catches: a reader that waits for ever for a directory that a person has removed."""
    shutil.rmtree(tmp_path / "iter_0000020")
    assert seen(tmp_path) == [10, 30]


def test_F9_the_newest_directory_may_show_late(job: FakeJob, tmp_path: Path):
    """Catches: the newest checkpoint passed over, because its name was not visible yet."""
    newest, away = tmp_path / "iter_0000030", tmp_path / "elsewhere"
    newest.rename(away)
    turns = Turns()

    def show() -> None:
        if turns.now > 2 * VISIBILITY_S:
            away.rename(newest)
        else:
            turns.actions.append(show)

    show()
    found = [lease.step for lease in checkpoints(tmp_path, timeout_s=60.0, clock=turns)]
    assert found == [10, 20, 30]


def test_F9_an_older_directory_may_show_late(job: FakeJob, tmp_path: Path):
    """Catches: a checkpoint that no evaluator measures, as the newest became visible before it."""
    older, away = tmp_path / "iter_0000010", tmp_path / "elsewhere"
    older.rename(away)
    assert seen(tmp_path, lambda: None, lambda: away.rename(older)) == [10, 20, 30]


def test_a_directory_of_another_run_is_passed_over_and_told_once(
    job: FakeJob, tmp_path: Path, tmp_path_factory, caplog
):
    """Catches: an evaluator that measures another run's weights, of the same step and attempt."""
    other = real_root(tmp_path_factory.mktemp("other") / "run", 10, 20, 30)
    for step in (20, 30):
        shutil.rmtree(tmp_path / f"iter_00000{step}")
        (other / f"iter_00000{step}").rename(tmp_path / f"iter_00000{step}")
    assert seen(tmp_path, lambda: None, lambda: job.save(40)) == [10, 40]
    told = [r.message for r in caplog.records if "another run's" in r.message]
    assert [line.partition(":")[0] for line in told] == [
        "step 20 is passed over",
        "step 30 is passed over",
    ]
    with pytest.raises(DamagedRoot, match="another run's") as caught, ReaderLease(tmp_path, 20):
        pytest.fail("leased")
    assert caught.value.step == 20 and leases(tmp_path) == []


def test_a_step_that_is_saved_again_while_it_is_leased_is_this_runs(
    job: FakeJob, tmp_path: Path, monkeypatch
):
    """Catches: a good checkpoint called another run's, where the save came between two looks."""
    real = reader_lease.inspect_published

    def look(*given: Any, **how: Any):
        seen = real(*given, **how)
        if job.coordinator.ledger.at(30) == first:
            job.coordinator.rollback(20)
            job.save(30)
        return seen

    first = job.coordinator.ledger.at(30)
    monkeypatch.setattr(reader_lease, "inspect_published", look)
    with ReaderLease(tmp_path, 30) as lease:
        assert lease.step == 30
    assert job.coordinator.ledger.at(30) != first


@pytest.mark.parametrize("attempt", ["", "30.e1.a3"])
def test_I7_a_lease_is_not_renewed_on_a_later_attempt_at_its_step(
    job: FakeJob, tmp_path: Path, attempt: str
):
    """Catches: an evaluation of mixed weights, as the step was rolled back and saved again under it."""
    with ReaderLease(tmp_path, 30, attempt=attempt) as lease:
        lease.renew()
        job.coordinator.rollback(20)
        job.save(30)
        with pytest.raises(
            StepNotFoundError, match="step 30 is not at .* the manifest that it had"
        ):
            lease.renew()


def test_I7_a_lease_on_an_adopted_step_is_not_renewed_on_a_save_of_it(tmp_path: Path):
    """Catches: a checkpoint without a manifest, for which anything at its name is taken."""
    for step in (10, 20):
        (tmp_path / f"iter_00000{step}").mkdir()
        for name, data in newer_files().items():
            (tmp_path / f"iter_00000{step}" / name).write_bytes(data)
    (tmp_path / TRACKER).write_text("20\n")
    job = real_job(tmp_path)
    with ReaderLease(tmp_path, 20) as lease:
        lease.renew()
        job.coordinator.rollback(10)
        job.save(20)
        with pytest.raises(StepNotFoundError, match="the manifest that it had"):
            lease.renew()
    job.close()


def test_a_damaged_manifest_does_not_end_a_lease(job: FakeJob, tmp_path: Path):
    """Catches: a step that is pruned under its reader for a read that failed."""
    with ReaderLease(tmp_path, 30) as lease:
        (tmp_path / "iter_0000030/.ckptfsm/manifest.json").write_bytes(b"{")
        lease.renew()


def test_I7_a_step_that_goes_while_its_lease_is_made_is_passed_over(
    job: FakeJob, tmp_path: Path, monkeypatch
):
    """F27. Catches: an iterator that ends with an error, because retention was quicker."""
    real = ReaderLease._mark

    def mark(lease: ReaderLease) -> None:
        if lease.step == 10:
            job.coordinator.delete(10)
        real(lease)

    monkeypatch.setattr(ReaderLease, "_mark", mark)
    assert seen(tmp_path) == [20, 30]


def test_a_checkpoint_that_the_tracker_names_before_the_journal_does(tmp_path: Path, monkeypatch):
    """Catches: a reader that waits for the restart of a job that died at a bad moment."""
    job = real_job(tmp_path)
    job.save(10)
    real = Publisher.write_tracker

    class Killed(BaseException):
        pass

    def write_tracker(publisher: Publisher, step: int) -> None:
        real(publisher, step)
        raise Killed

    monkeypatch.setattr(Publisher, "write_tracker", write_tracker)
    with pytest.raises(Killed):
        job.save(20)
    crashed(job)
    monkeypatch.undo()
    jobs = []
    coming = [lambda: None, lambda: jobs.append(real_job(tmp_path)), lambda: jobs[0].save(30)]
    assert seen(tmp_path, *coming) == [10, 20, 30]
    jobs[0].close()


def test_another_root_at_the_same_path_begins_anew(tmp_path: Path):
    """Catches: a run that was deleted and begun again, of which nothing is evaluated."""
    root = tmp_path / "root"
    for _ in range(2):
        job = real_job(root)
        job.close()
    job = real_job(root)
    job.save(10)
    jobs = [job]

    def begin_again() -> None:
        crashed(jobs.pop())
        shutil.rmtree(root)
        jobs.append(real_job(root))
        jobs[0].save(5)

    assert seen(root, begin_again, lambda: jobs[0].save(6)) == [10, 5, 6]
    assert seen(root, after="10.e3.a1") == [5, 6]
    jobs[0].close()


@pytest.mark.parametrize("newest_only", [False, True])
@pytest.mark.parametrize("starts", [1, 3])
@pytest.mark.parametrize("together", [True, False])
def test_another_run_with_the_same_schedule_begins_anew(
    tmp_path: Path, together: bool, starts: int, newest_only: bool
):
    """Catches: a run that was begun again, whose attempts have the names and tracker of the first."""
    root, jobs = tmp_path / "root", [real_job(tmp_path / "root")]
    for step in (10, 20):
        jobs[0].save(step)

    def begin_again() -> None:
        crashed(jobs.pop())
        shutil.rmtree(root)
        for start in range(starts):
            jobs.append(real_job(root))
            if start == 0:
                jobs[-1].save(10)
            if start == 0 and together:
                jobs[-1].save(20)
            if start < starts - 1:
                crashed(jobs.pop())

    coming = [begin_again, lambda: together or jobs[0].save(20), lambda: None]
    first = [20] if newest_only else [10, 20]
    second = [20] if newest_only and together else [10, 20]
    assert seen(root, *coming, newest_only=newest_only) == [*first, *second]
    jobs[0].close()


def test_another_run_is_seen_while_it_saves(tmp_path: Path):
    """Catches: a save in flight that is taken for the first run's, as it has no manifest yet."""
    root, begun = tmp_path / "root", []
    jobs = [real_job(root, retention=LatestN(1))]
    for step in (10, 20, 30):
        jobs[0].save(step)

    def begin_again() -> None:
        crashed(jobs.pop())
        shutil.rmtree(root)
        jobs.append(real_job(root))
        for step in (10, 20):
            jobs[0].save(step)
        begun.append(jobs[0].request(30))

    def go_on() -> None:
        (of,) = begun
        jobs[0].fork(of)
        for rank in range(jobs[0].ranks):
            jobs[0].write(of, rank)

    assert seen(root, begin_again, go_on, lambda: None, after=20) == [30, 10, 20, 30]
    jobs[0].close()


def test_a_root_of_verl(tmp_path: Path):
    """Catches: names of Megatron in the root of another trainer."""
    job = real_job(tmp_path, layout=VERL)
    job.save(7)
    lease = next(checkpoints(tmp_path, clock=Turns()))
    assert lease.path == str(tmp_path / "global_step_7")
    job.close()


def test_a_look_at_nothing_new_reads_the_tracker_alone(job: FakeJob, tmp_path: Path, monkeypatch):
    """Catches: a journal of a year that each reader reads every few seconds."""
    reads = []
    real = follower.read_history
    monkeypatch.setattr(follower, "read_history", lambda *a: (reads.append(1), real(*a))[1])
    assert seen(tmp_path, *[lambda: None] * 9, after=30) == []
    assert len(reads) == 1


def test_a_long_body_is_no_end_of_the_lease(job: FakeJob, tmp_path: Path, monkeypatch):
    """Catches: an evaluation of an hour whose step is pruned after ten minutes."""
    renewed, real = threading.Semaphore(0), ReaderLease.renew

    def renew(lease: ReaderLease) -> None:
        real(lease)
        renewed.release()

    monkeypatch.setattr(ReaderLease, "renew", renew)
    given = checkpoints(tmp_path, clock=Turns(), renew_s=0.001)
    next(given)
    assert "ckptfsm-lease" in {thread.name for thread in threading.enumerate()}
    for _ in range(4):
        assert renewed.acquire(timeout=60)
    given.close()
    assert leases(tmp_path) == []
    assert "ckptfsm-lease" not in {thread.name for thread in threading.enumerate()}


def test_a_renewal_that_fails_is_told_and_tried_again(job: FakeJob, tmp_path: Path, caplog):
    """Catches: a lease that ends for a disk that was sick for a moment, or a body that it kills."""
    lease = ReaderLease(tmp_path, 10)
    waits = iter([False, False, False, True])
    with lease:
        readers = tmp_path / ".ckptfsm/readers"
        aside = readers.rename(tmp_path / "aside")
        readers.write_text("no directory, so it is not made anew")

        def ended(seconds: float) -> bool:
            if "not renewed" in caplog.text and aside.exists():
                readers.unlink()
                aside.rename(readers)
            return next(waits)

        before = next(aside.iterdir()).read_bytes()
        evaluators._renew(lease, 1.0, ended)
        assert caplog.text.count("not renewed") == 1
        assert next(readers.iterdir()).read_bytes() != before
    assert list(waits) == []


def test_a_lease_on_a_step_that_was_rolled_back_is_given_up(job: FakeJob, tmp_path: Path, caplog):
    """Catches: a thread that makes leases on nothing, every minute."""
    with ReaderLease(tmp_path, 30) as lease:
        job.coordinator.rollback(10)
        waits = iter([False, True])
        evaluators._renew(lease, 1.0, lambda seconds: next(waits))
        assert list(waits) == [True] and "step 30 is not at" in caplog.text


def test_wait_for_a_new_checkpoint_holds_a_lease_on_the_newest(job: FakeJob, tmp_path: Path):
    """Catches: a step that is pruned between the wait and the lease."""
    turns = Turns(lambda: None, lambda: (job.save(40), job.save(50)))
    with wait_for_new_checkpoint(tmp_path, after=30, clock=turns) as lease:
        assert (lease.step, len(leases(tmp_path))) == (50, 1)
    assert leases(tmp_path) == []


def test_wait_for_a_new_checkpoint_ends_in_time(job: FakeJob, tmp_path: Path):
    """Catches: a wait without an end, for a job that will never save again."""
    turns = Turns()
    with pytest.raises(DeadlineExceeded) as caught:
        wait_for_new_checkpoint(tmp_path, 30, timeout_s=7.0, poll_interval_s=5.0, clock=turns)
    assert turns.now == 7.0 and caught.value.timeout_s == 7.0
    assert caught.value.waiting_for == str(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"after": "forty"},
        {"after": 4.5},
        {"after": True},
        {"poll_interval_s": 0.0},
        {"poll_interval_s": float("nan")},
        {"renew_s": 0.0},
    ],
    ids=repr,
)
def test_bad_arguments_are_refused_at_the_call(settings, tmp_path: Path):
    """Catches: an error at the first turn of a loop, hours after the call."""
    with pytest.raises(ConfigError):
        checkpoints(tmp_path, **settings)


def test_a_root_that_is_a_link_is_refused(tmp_path: Path):
    """Catches: a wait for ever at a path that can never be a root."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="symbolic link"):
        next(checkpoints(tmp_path / "link", clock=Turns()))
