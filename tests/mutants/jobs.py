"""Mutants of the jobs of ``on_tracked``: their leases, their records, and the end of their processes."""

from __future__ import annotations

from mutants.loader import mutant

MUTANTS = (
    mutant(
        "a-job-reads-another-attempt-at-its-step",
        "jobs.supervisor:Supervisor._take_next",
        "there = found is not None and found.state is State.TRACKED",
        "there = True",
        breaks="I7",
        source="order",
        killers=(
            "tests:test_supervisor.py::test_another_attempt_at_the_step_is_another_checkpoint",
            "tests:test_supervisor.py",
        ),
        why="an export is recorded for a checkpoint that was rolled back",
    ),
    mutant(
        "steps-between-two-looks-are-forgotten",
        "core.jobs:_new_ones",
        "there = tracked if last is None else tracked.union(saved)",
        "there = tracked",
        breaks="I7",
        source="order",
        killers=("tests:test_jobs.py", "tests:test_supervisor.py"),
        why="retention is faster than the jobs, and nobody hears of it",
    ),
    mutant(
        "a-job-that-ends-its-trainer-runs-for-ever",
        "core.jobs:begin_again",
        "if record.begun >= job.attempts:",
        "if False:",
        breaks="F2",
        source="F2",
        killers=("tests:test_jobs.py",),
        why="each start of the training is killed for the memory of the same job",
    ),
    mutant(
        "the-queue-of-a-slow-job-grows",
        "core.jobs:_too_many",
        "return [missed(each, _PASSED_OVER) for each in waiting[: -job.queue]]",
        "return []",
        breaks="F14",
        source="order",
        killers=("tests:test_jobs.py",),
    ),
    mutant(
        "an-attempt-begins-unrecorded",
        "jobs.supervisor:Supervisor._start",
        "self._put(record)",
        "",
        breaks="F2",
        source="order",
        killers=("tests:test_supervisor.py",),
        why="an attempt that brings the machine down is not counted",
    ),
    mutant(
        "leases-of-a-dead-process-stay",
        "jobs.supervisor:Supervisor._begin",
        'remove_marker(self._storage, f"{READERS}/{name}")',
        "pass",
        breaks="F2",
        source="F2",
        killers=("tests:test_supervisor.py::test_F2_the_next_process_begins_again",),
        why="the step of a job stays for ten minutes after each crash",
    ),
    mutant(
        "an-older-owner-runs-its-jobs-on",
        "jobs.supervisor:Supervisor._look",
        "self._check_epoch()",
        "",
        breaks="I9",
        source="fencing",
        killers=("tests:test_supervisor.py::test_F12_an_older_owner_stops",),
    ),
    mutant(
        "a-child-of-an-attempt-outlives-it",
        "adapters.job_process:JobProcess.ended",
        "self.kill()",
        "self._process.wait()",
        breaks="I7",
        source="order",
        killers=("tests:test_job_process.py::test_all_that_an_attempt_started_ends_with_it",),
        why="an upload in the background reads a step without a lease",
    ),
)
