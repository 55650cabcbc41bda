"""The process that runs jobs, in the process of the test: roots and attempts are real.

``look_s`` is 0: each ``work`` looks at the root. So a test says when a look comes.
"""

from __future__ import annotations

import errno
import os
import select
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from real_roots import crashed, real_job, real_root

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.job_process import JobProcess
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.adapters.spawn import import_path
from ckptfsm.core.documents import JobRecord, JobState
from ckptfsm.core.errors import ConfigError, Fenced
from ckptfsm.core.jobs import Job
from ckptfsm.core.lifecycle import Checkpoint
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.retention import LatestN
from ckptfsm.disk.job_records import read_records
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.follow import follower, runner
from ckptfsm.follow.jobs import JobOrder, JobRecords, JobWork
from ckptfsm.follow.runner import FollowPlan, Runner, Trouble

WAIT_S = 60.0
HELD = "echo {step} >> begun; read word < go; echo $word >> heard"


class Still(SystemClock):
    """A clock that a test moves."""

    later = 0.0
    asleep = staticmethod(lambda: None)

    def monotonic(self) -> float:
        return self.later

    def sleep(self, seconds: float) -> None:
        self.later += seconds
        self.asleep()


class Attempts(JobWork):
    newest: JobProcess | None = None

    def begin(self, record: JobRecord, checkpoint: Checkpoint, path: str) -> JobProcess:
        self.newest = super().begin(record, checkpoint, path)
        return self.newest

    @property
    def run(self) -> bool:
        return self.newest is not None and self.newest.running


class Work:
    """A runner for ``root``, whose owner has epoch 1, and its messages."""

    def __init__(self, root: Path, place: Path, *jobs: Job, epoch: int = 1) -> None:
        self.place, self.told, self.clock = place, [], Still()
        plan = FollowPlan(epoch, "megatron", jobs, 60.0, look_s=0.0)
        self.attempts = Attempts()
        self.attempts.order = JobOrder(
            str(root), plan, jobs, (str(place), *import_path()), str(place)
        )
        self.storage = PosixStorage(root)
        self.store = JobRecords(self.storage)
        self.runner = Runner(
            self.storage, plan, self.attempts, self.told.append, self.store, self.clock
        )

    @property
    def records(self) -> list[tuple[int, str, str, int]]:
        found = [(r.step, r.job, r.state.value, r.begun) for r in read_records(self.storage)]
        return sorted(found)

    @property
    def words(self) -> list[str]:
        return [
            each.words
            if isinstance(each, Trouble)
            else f"{each.step} {each.job} {each.state.value}"
            for each in self.told
        ]

    def work(self) -> None:
        self.runner.turn()

    def finish(self) -> None:
        """Work until nothing runs or waits."""
        for _ in range(500):
            self.work()
            if self.runner.idle:
                return
            self.wait()
        raise AssertionError(self.told)

    def wait(self) -> None:
        attempts = [busy.attempt for busy in self.runner._busy.values() if busy.attempt is not None]
        if attempts:
            watched = [fd for attempt in attempts for fd in attempt.watched()]
            ready, _, _ = select.select(watched, [], [], WAIT_S)
            assert ready, "no attempt ends"

    def go(self, word: str = "on") -> None:
        """Let an attempt of ``HELD`` go on."""
        (self.place / "go").write_text(f"{word}\n")


@pytest.fixture
def make(tmp_path):
    root, place, made = tmp_path / "root", tmp_path / "place", []
    place.mkdir()
    os.mkfifo(place / "go")

    def started(*jobs: Job, epoch: int = 1) -> Work:
        made.append(Work(root, place, *jobs, epoch=epoch))
        return made[-1]

    job = real_job(root, retention=LatestN(1))
    yield started, job
    for each in made:
        each.runner.leave()
        each.storage.close_root()
    if job.coordinator._ownership is not None:
        job.close()


def shell(text: str, name: str = "export", **settings) -> Job:
    return Job(name=name, command=("sh", "-c", text), **{"backoff_s": 0.0, **settings})


def readers(job) -> list[str]:
    return [name for name in job.storage.listdir(".ckptfsm/readers") if name.endswith(".json")]


def published(job) -> list[str]:
    return [name for name in job.storage.listdir("") if name.startswith("iter_")]


def test_a_job_runs_under_a_lease_and_is_done(make):
    """Catches: an export of a step that retention takes away meanwhile."""
    start, job = make
    work = start(
        shell("ls $CKPTFSM_ROOT/.ckptfsm/readers > leases; ls {path} > files; echo {step} > step")
    )
    work.finish()
    assert work.records == [] and work.words == []
    job.save(10)
    leased = []  # when the owner is told, which then looks whether the step may go
    work.runner._tell = lambda told: (work.told.append(told), leased.append(readers(job)))
    work.finish()
    assert work.records == [(10, "export", "done", 1)] and work.words == ["10 export done"]
    assert leased == [[]]
    assert (work.place / "leases").read_text().startswith("10.@job-")
    assert "__0_0.distcp" in (work.place / "files").read_text()
    assert (work.place / "step").read_text() == "10\n"
    assert readers(job) == []
    work.work()
    assert work.words == ["10 export done"], "once"


@pytest.mark.parametrize("nonce", ["job-4711", "upload-1", "x.job-1", "job-", "a.@job-1-2"])
def test_I7_a_readers_lease_is_not_a_jobs_whatever_its_nonce(make, nonce: str):
    """Catches: an evaluator named after its batch job, whose step a start of the jobs gives up."""
    start, job = make
    job.save(10)
    with ReaderLease(job.storage.root, 10, nonce=nonce):
        start(shell("true")).finish()
        job.save(20)
        assert published(job) == ["iter_0000010", "iter_0000020"]
        assert readers(job) == [f"10.{nonce}.json"]


def test_a_nonce_that_only_the_librarys_own_leases_have_is_refused(make):
    """Catches: a lease that the next start removes as its own."""
    _, job = make
    with pytest.raises(ConfigError, match="begin it with anything but '@'"):
        ReaderLease(job.storage.root, 10, nonce="@job-1")


def test_a_job_that_fails_twice_then_works(make):
    start, job = make
    work = start(shell("echo x >> tries; test $(wc -l < tries) -eq 3 || { echo busy; exit 5; }"))
    job.save(10)
    work.finish()
    assert work.records == [(10, "export", "done", 3)]
    assert work.words == ["10 export waiting", "10 export waiting", "10 export done"]
    assert work.told[0].reason == "exit status 5: busy" and work.told[2].reason == ""


def test_the_lease_is_held_between_attempts(make):
    """Catches: an upload that fails once, and whose step is gone at the second attempt."""
    start, job = make
    work = start(shell("echo x >> tries; test $(wc -l < tries) -ge 2", backoff_s=1000.0))
    job.save(10)
    work.work()
    while work.words != ["10 export waiting"]:
        work.wait()
        work.work()
    work.work()
    assert len(readers(job)) == 1 and not work.attempts.run
    job.save(20)
    assert published(job) == ["iter_0000010", "iter_0000020"]
    work.clock.later = 1000.0
    work.finish()
    assert work.records == [(10, "export", "done", 2), (20, "export", "done", 1)]


def test_I7_retention_waits_for_the_job_that_runs_and_for_no_other(make):
    """Catches: a step that is pruned under its job, and steps that pile up behind a slow one."""
    start, job = make
    work = start(shell(HELD, queue=5))
    job.save(10)
    work.work()
    for step in (20, 30):
        job.save(step)
        work.work()
    assert published(job) == ["iter_0000010", "iter_0000030"]
    assert work.records == [
        (10, "export", "running", 1),
        (20, "export", "missed", 0),
        (30, "export", "waiting", 0),
    ]
    assert work.words == ["20 export missed"]
    assert work.told[0].reason == "its checkpoint was pruned before its turn"
    work.go("first")
    while (30, "export", "running", 1) not in work.records:
        work.wait()
        work.work()
    assert (10, "export", "done", 1) in work.records
    job.save(40)
    assert published(job) == ["iter_0000030", "iter_0000040"]
    work.work()
    assert [row[:3] for row in work.records][:1] == [(20, "export", "missed")]


def test_a_hanging_job_is_killed_after_its_time(make):
    start, job = make
    work = start(shell("echo here; read word < go", timeout_s=100.0, attempts=1))
    job.save(10)
    work.work()
    work.clock.later = 99.0
    work.work()
    assert work.records == [(10, "export", "running", 1)]
    work.clock.later = 200.0
    work.work()
    assert work.records == [(10, "export", "failed", 1)]
    assert work.told[0].reason.startswith("killed after 100 s")
    assert readers(job) == [] and not work.attempts.run


def test_a_job_whose_process_is_killed_has_failed(make):
    start, job = make
    work = start(shell("kill -KILL $$", attempts=2))
    job.save(10)
    work.finish()
    assert work.records == [(10, "export", "failed", 2)]
    assert work.words == ["10 export waiting", "10 export failed"]
    assert work.told[1].reason == "killed by SIGKILL"


def test_a_job_takes_only_the_multiples_of_its_every(make):
    start, job = make
    work = start(shell("echo a >> order", "a"), shell("echo b >> order", "b", every=20))
    for step in (10, 20):
        job.save(step)
        work.finish()
    assert sorted((work.place / "order").read_text().split()) == ["a", "a", "b"]
    assert work.records == [(20, "a", "done", 1), (20, "b", "done", 1)]


def test_I7_each_job_has_its_own_queue(make):
    """Catches: an upload of an hour that keeps the evaluation of a new step waiting; a step whose lease
    ends with the first of two jobs.
    """
    start, job = make
    work = start(shell(HELD, "slow"), shell("echo {step} >> ran", "quick"))
    job.save(10)
    work.work()
    while work.words != ["10 quick done"]:
        work.wait()
        work.work()
    job.save(20)
    work.work()
    while work.words != ["10 quick done", "20 quick done"]:
        work.wait()
        work.work()
    assert (10, "slow", "running", 1) in work.records and (20, "slow", "waiting", 0) in work.records
    assert published(job) == ["iter_0000010", "iter_0000020"] and len(readers(job)) == 1
    work.go()
    while (20, "slow", "running", 1) not in work.records:
        work.wait()
        work.work()
    work.go()
    work.finish()
    assert readers(job) == []
    assert [row[:3] for row in work.records if row[0] == 20] == [
        (20, "quick", "done"),
        (20, "slow", "done"),
    ]


def test_I7_a_job_that_holds_goes_on_with_the_others_and_comes_back(make):
    """Catches: one checkpoint that cannot be copied, behind which all others wait; one that is given up,
    whose step stays for ever.
    """
    start, job = make
    job.policy = None
    job.save(10)
    job.coordinator.pin(10, "")
    job.save(20)
    text = "echo {step} >> ran; test {step} = 20 -o -e mended"
    work = start(shell(text, attempts=2, hold=True))
    work.finish()
    assert work.records == [(10, "export", "failed", 2), (20, "export", "done", 1)]
    assert work.runner.idle and readers(job) == [], "a drain does not wait for the pause"
    (work.place / "mended").touch()
    work.clock.later += 3599.0
    work.finish()
    assert work.records[0] == (10, "export", "failed", 2)
    work.clock.later += 2.0
    work.finish()
    assert work.records[0] == (10, "export", "done", 3)
    assert (work.place / "ran").read_text().split() == ["10", "10", "20", "10"]
    assert work.words[-2:] == ["10 export waiting", "10 export done"]


def test_I7_a_job_that_can_never_be_done_is_missed_once_and_its_step_stays(make):
    """Catches: a copy of a directory that nobody can copy, tried for ever, or counted as done."""
    start, job = make
    code = "from ckptfsm.core.ports import Unfit\ndef copy(*_):\n    raise Unfit('a link')\n"
    settings = Job(name="copy", command="never:copy", hold=True, attempts=3, backoff_s=0.0)
    job.save(10)
    work = start(settings)
    (work.place / "never.py").write_text(code)
    for _ in range(2):
        work.finish()
        assert work.records == [(10, "copy", "missed", 1)] and work.words == ["10 copy missed"]
        assert work.told[0].reason == "a link"
        work.clock.later += 1e5
    assert readers(job) == []
    (work.place / "never.py").write_text("def copy(*_):\n    pass\n")
    again = start(settings)  # of the next process: somebody may have mended it
    again.finish()
    assert again.records == [(10, "copy", "done", 2)]


def test_a_step_that_is_rolled_back_while_its_job_runs(make):
    """Catches: a job that reads a directory which was moved away, and is done."""
    start, job = make
    job.policy = None
    job.save(10)
    job.coordinator.pin(10, "")
    job.save(20)
    work = start(shell(HELD, every=20))
    work.work()
    assert work.records == [(20, "export", "running", 1)]
    job.coordinator.rollback(10)
    work.clock.later = 61.0
    work.work()
    assert work.records == [(20, "export", "missed", 1)]
    assert work.told[0].reason == "its checkpoint was withdrawn while it ran"
    assert not work.attempts.run and readers(job) == []


def test_another_attempt_at_the_step_is_another_checkpoint(make):
    """Catches: a job that was promised for an attempt, and reads a later one at the same step.

    The rollback and the second save come between the look and the lease.
    """
    start, job = make
    job.save(10)
    job.coordinator.pin(10, "")
    job.save(20)
    work = start(shell("cp {path}/.ckptfsm/manifest.json .", every=20))
    work.runner._look()
    assert [each.step for each in work.runner._waiting] == [20]
    job.coordinator.rollback(10)
    job.save(20)
    work.runner._attend(0.0)
    assert readers(job) == [] and not work.attempts.run
    work.finish()
    found = {(r.of.attempt, r.state, r.reason) for r in read_records(work.storage)}
    assert found == {
        (2, JobState.MISSED, "its checkpoint was withdrawn before its turn"),
        (3, JobState.DONE, ""),
    }


def test_a_job_of_another_runs_directory_is_missed(make, tmp_path):
    """Catches: an export of another run's weights, of the same step and attempt."""
    start, job = make
    job.save(10)
    other = real_root(tmp_path / "other", 10)
    shutil.rmtree(tmp_path / "root/iter_0000010")
    (other / "iter_0000010").rename(tmp_path / "root/iter_0000010")
    work = start(shell("true"))
    work.finish()
    (record,) = read_records(work.storage)
    assert record.state is JobState.MISSED and "another run's" in record.reason
    assert readers(job) == []


def test_no_attempt_begins_or_is_done_while_another_root_is_there(make, tmp_path):
    """Catches: an export that is recorded as done, and read another run's weights."""
    start, job = make
    work = start(shell("echo {step} >> begun; read word < go"))
    job.save(20)
    work.work()
    root, moved, other = tmp_path / "root", tmp_path / "moved", real_root(tmp_path / "other", 20)
    root.rename(moved)
    other.rename(root)
    work.go()
    while not work.words:
        work.wait()
        work.work()
    assert work.words == ["20 export waiting"] and "not the directory" in work.told[0].reason
    for _ in range(3):
        work.work()
    assert not work.attempts.run and len(work.words) == 2
    assert "not the directory that was opened" in work.words[1]
    assert work.records == [(20, "export", "waiting", 1)]
    root.rename(other)
    moved.rename(root)
    work.work()
    work.go()
    work.finish()
    assert work.records == [(20, "export", "done", 2)]
    assert (work.place / "begun").read_text() == "20\n20\n"


def test_a_step_that_is_pruned_between_the_look_and_the_lease_is_missed(make):
    start, job = make
    job.save(10)
    work = start(shell("echo {step} >> ran"))
    work.runner._look()
    job.save(20)
    work.runner._attend(0.0)
    assert not work.attempts.run
    work.finish()
    assert work.records == [(10, "export", "missed", 0), (20, "export", "done", 1)]
    assert (work.place / "ran").read_text() == "20\n"


def test_steps_that_come_and_go_between_two_looks_are_missed(make):
    """Catches: saves that are faster than the looks, of which no record tells."""
    start, job = make
    work = start(shell("true"))
    job.save(10)
    work.finish()
    for step in (20, 30, 40):
        job.save(step)
    work.finish()
    assert work.records == [
        (20, "export", "missed", 0),
        (30, "export", "missed", 0),
        (40, "export", "done", 1),
    ]


def test_steps_that_were_saved_before_the_first_look_are_not_skipped(make):
    """Catches: the first steps of a run, of which no record tells, as the process was slow to start."""
    start, job = make
    job.save(10)
    job.save(20)
    work = start(shell("true"))
    work.finish()
    assert work.records == [(10, "export", "missed", 0), (20, "export", "done", 1)]


def test_a_step_that_is_tracked_during_a_look_is_not_missed(make, monkeypatch):
    """Catches: a checkpoint called pruned, as it was tracked after the ledger had been read."""
    start, job = make
    work = start(shell("true"))
    for step in (10, 20):
        job.save(step)
        job.coordinator.pin(step, "")
        if step == 10:
            work.finish()
    real, coming = follower.read_history, [30]

    def read(*arguments):
        found = real(*arguments)
        if coming:
            job.save(coming.pop())
        return found

    monkeypatch.setattr(follower, "read_history", read)
    work.finish()
    work.finish()
    assert [row[:3] for row in work.records] == [(n, "export", "done") for n in (10, 20, 30)]


def test_F9_a_directory_that_shows_late_is_waited_for_and_then_missed(make, tmp_path):
    start, job = make
    job.save(10)
    work = start(shell("echo {step} >> ran"))
    there, hidden = tmp_path / "root/iter_0000010", tmp_path / "hidden"
    there.rename(hidden)
    work.clock.asleep = lambda: hidden.rename(there)
    work.finish()
    assert work.records == [(10, "export", "done", 1)]
    job.save(20)
    (tmp_path / "root/iter_0000020").rename(hidden)
    work.clock.asleep = lambda: None
    work.finish()
    assert (20, "export", "missed", 0) in work.records
    assert work.told[-1].reason == "its directory was gone before its turn"
    hidden.rename(tmp_path / "root/iter_0000020")


def test_F2_the_next_process_begins_again(make):
    """Catches: a job that is lost with its process, and a lease that keeps its step for ten minutes."""
    start, job = make
    job.save(10)
    first = start(shell(HELD), shell("true", "other"))
    first.work()
    assert first.records == [(10, "export", "running", 1), (10, "other", "running", 1)]
    assert len(readers(job)) == 1
    while first.runner._busy:
        first.runner._busy.popitem()[1].attempt.kill()  # as its death would
    first.store.put(job_record(20, "export"))
    (Path(first.storage.root) / ".ckptfsm/jobs/x.json.tmp-1-2.0").write_text("{")
    second = start(shell("true"), shell("true", "other"))
    second.work()
    assert len(readers(job)) == 1, "that of the second"
    second.finish()
    assert [row for row in second.records if row[0] == 10] == [
        (10, "export", "done", 2),
        (10, "other", "done", 2),
    ]
    assert sorted(second.words[:2]) == ["10 export waiting", "10 other waiting"]
    assert readers(job) == []
    assert not [n for n in job.storage.listdir(".ckptfsm/jobs") if ".tmp-" in n]


def job_record(step: int, job: str) -> JobRecord:
    return JobRecord(step=step, epoch=1, attempt=1, job=job, state=JobState.DONE)


@pytest.mark.parametrize("left", ["", '{"schema_version":1', "another's"])
def test_a_job_whose_record_cannot_be_read_runs_again(make, tmp_path, left):
    """Catches: a job that never runs for a step, as later steps have records."""
    start, job = make
    work = start(shell("echo {step} >> ran"))
    job.save(10)
    job.coordinator.pin(10, "")
    work.finish()
    job.save(20)
    work.finish()
    jobs = tmp_path / "root/.ckptfsm/jobs"
    damaged = (jobs / "20.e1.a2.export.json").read_text() if left == "another's" else left
    (jobs / "10.e1.a1.export.json").write_text(damaged)
    (jobs / "5.e1.a9.export.json").write_text(damaged)
    (jobs / "notes.txt").write_text("x")
    (record, *_) = [each for each in read_records(work.storage) if each.step == 10]
    assert (record.state, record.reason) == (JobState.WAITING, "its record could not be read")
    again = start(shell("echo {step} >> ran"))
    again.finish()
    assert again.records == [
        (5, "export", "missed", 0),
        (10, "export", "done", 1),
        (20, "export", "done", 1),
    ]
    assert (work.place / "ran").read_text() == "10\n20\n10\n"
    assert again.words == ["5 export missed", "10 export done"]
    assert (jobs / "notes.txt").exists()


def test_F12_an_older_owner_stops(make):
    """Catches: two processes that run the jobs of one root."""
    start, job = make
    job.save(10)
    work = start(shell(HELD))
    work.work()
    crashed(job)
    again = real_job(Path(work.storage.root), retention=LatestN(1))
    with pytest.raises(Fenced, match="another owner"):
        work.work()
    work.runner.leave()
    assert work.records == [(10, "export", "running", 1)], "that of the next owner's process"
    assert readers(again) == []
    again.close()


def test_F6_an_error_of_the_disk_is_told_once_and_tried_again(make, monkeypatch):
    """Catches: a process that ends at the first error, and an attempt that begins unrecorded."""
    start, job = make
    job.save(10)
    work = start(shell("echo {step} >> ran"))
    real, refused = work.store.put, [OSError(errno.EIO, "bad disk")] * 4

    def put(record):
        if refused:
            raise refused.pop()
        real(record)

    monkeypatch.setattr(work.store, "put", put)
    for _ in range(4):
        work.work()
    assert not (work.place / "ran").exists()
    work.finish()
    assert work.words == ["OSError: [Errno 5] bad disk", "10 export done"]
    assert (work.place / "ran").read_text() == "10\n"


class Quiet:
    """The trainer's end of a channel on which nothing is said until the clock comes to ``until``."""

    def __init__(self, clock: Still, until: float) -> None:
        self.clock, self.until, self.waits = clock, until, 0

    def fileno(self) -> int:
        return 0

    def receive(self, _: float | None) -> tuple[bool, list]:
        return self.clock.later < self.until, []

    def register(self, *_: object) -> None: ...

    def poll(self, timeout_ms: float) -> None:
        self.waits += 1
        assert self.waits < 1000, "it never rests"
        self.clock.later += timeout_ms / 1000


def test_F6_a_disk_that_takes_no_record_is_asked_after_pauses(make, monkeypatch):
    """Catches: a process that tries without a pause, and whose temporary files then refuse every record
    for good, though there is room again."""
    start, job = make
    job.save(10)
    work = start(shell("echo {step} >> ran"))
    work.runner._plan = replace(work.runner._plan, look_s=1.0)
    real = work.storage.write
    full = SimpleNamespace(tries=0)

    def write(handle, data):
        if b'"running"' not in bytes(data):
            return real(handle, data)
        full.tries += 1
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(work.storage, "write", write)
    quiet = Quiet(work.clock, 1000.0)
    monkeypatch.setattr(runner, "select", SimpleNamespace(poll=lambda: quiet, POLLIN=0))
    work.runner.serve(quiet)
    assert 150 < full.tries < 250 and quiet.waits < 1000
    assert work.words == ["OSError: [Errno 28] disk full"]
    assert len(work.storage.listdir(".ckptfsm/jobs")) <= 2, "the record, and a temporary file"
    monkeypatch.undo()
    work.clock.later += 10.0
    work.finish()
    assert work.records == [(10, "export", "done", 1)]


def test_an_end_that_cannot_be_recorded_is_recorded_later(make, monkeypatch):
    """Catches: a job that is done, and is run again because its record was refused."""
    start, job = make
    job.save(10)
    work = start(shell("echo {step} >> ran"))
    work.work()
    work.wait()
    real, refused = work.store.put, [OSError(errno.ENOSPC, "disk full")] * 2

    def put(record):
        if refused and record.state is JobState.DONE:
            raise refused.pop()
        real(record)

    monkeypatch.setattr(work.store, "put", put)
    while refused:
        work.work()
        work.wait()
    work.finish()
    assert work.words == ["OSError: [Errno 28] disk full", "10 export done"]
    assert (work.place / "ran").read_text() == "10\n" and readers(job) == []


def test_the_end_of_the_trainer_gives_the_job_back(make):
    start, job = make
    job.save(10)
    work = start(shell(HELD))
    work.work()
    work.runner.end()
    assert work.records == [(10, "export", "waiting", 0)] and readers(job) == []
    work.runner.end()


def test_a_failure_to_start_is_a_failed_attempt(make):
    start, job = make
    work = start(shell("true", attempts=1))
    work.attempts.order = replace(work.attempts.order, cwd=str(work.place / "gone"))
    job.save(10)
    work.finish()
    assert work.records == [(10, "export", "failed", 1)]
    assert "FileNotFoundError" in work.told[0].reason


def test_metrics_and_attempt_are_those_of_the_journal(make):
    """Catches: a function that is called with the metrics of the save alone, or without those that
    an earlier attempt reported."""
    start, job = make
    job.save(10)
    job.coordinator.record_metrics(10, {"loss": 0.25})
    work = start(Job(name="again", command="told_of:again", backoff_s=0.0))
    (work.place / "told_of.py").write_text(
        "def note(path, step, metrics): open('told', 'w').write(repr((step, metrics)))\n"
        "def again(path, step, metrics):\n"
        "    if open('go').readline() == 'fail\\n': raise OSError\n"
        "    note(path, step, metrics)\n"
    )
    work.work()
    work.work()  # after the first renewal of the lease
    job.coordinator.record_metrics(10, {"bleu": 0.5})
    work.go("fail")
    while not work.words:
        work.wait()
        work.work()
    work.work()
    work.go()
    work.finish()
    assert (work.place / "told").read_text() == "(10, {'bleu': 0.5, 'loss': 0.25})"
    record = read_records(work.storage)[-1]
    assert record.of == AttemptId(10, 1, 1) and record.at.startswith("20")


@pytest.mark.parametrize("name", ["A=B", "nul\0"])
def test_an_error_of_a_job_is_its_own(make, name):
    """Catches: a job whose settings no process can have, and that ends all others with it."""
    start, job = make
    bad = Job(name="bad", command=("true",), environment={name: "1"}, attempts=1)
    work = start(bad, shell("true", "good"))
    job.save(10)
    work.finish()
    assert work.records == [(10, "bad", "failed", 1), (10, "good", "done", 1)]
    assert work.words == ["10 bad failed", "10 good done"]
