"""Mutants of the jobs of ``on_tracked``: their leases, their records, and the end of their processes."""

from __future__ import annotations

from mutants.loader import mutant

MUTANTS = (
    mutant(
        "a-job-reads-another-attempt-at-its-step",
        "disk.reader_lease:ReaderLease._known",
        'self.attempt in ("", str(c.id))',
        "True",
        breaks="I7",
        source="order",
        why="an export is recorded for a checkpoint that was rolled back",
    ),
    mutant(
        "steps-between-two-looks-are-forgotten",
        "core.jobs:_new_ones",
        "there = tracked if is_new else tracked.union(saved)",
        "there = tracked",
        breaks="I7",
        source="order",
        why="retention is faster than the jobs, and nobody hears of it",
    ),
    mutant(
        "a-job-that-ends-its-trainer-runs-for-ever",
        "core.jobs:begin_again",
        "if record.begun >= job.attempts:",
        "if False:",
        breaks="F2",
        source="F2",
        why="each start of the training is killed for the memory of the same job",
    ),
    mutant(
        "the-queue-of-a-slow-job-grows",
        "core.jobs:_too_many",
        "return [missed(each, _PASSED_OVER) for each in waiting[: -job.queue]]",
        "return []",
        breaks="F14",
        source="order",
    ),
    mutant(
        "an-attempt-begins-unrecorded",
        "follow.runner:Runner._start",
        "self._put(record)",
        "",
        breaks="F2",
        source="order",
        why="an attempt that brings the machine down is not counted",
    ),
    mutant(
        "leases-of-a-dead-process-stay",
        "follow.runner:Runner._begin",
        'remove_marker(self._storage, f"{READERS}/{name}")',
        "pass",
        breaks="F2",
        source="F2",
        why="the step of a job stays for ten minutes after each crash",
    ),
    mutant(
        "an-older-owner-runs-its-jobs-on",
        "follow.runner:Runner._look",
        "self._check_epoch()",
        "",
        breaks="I9",
        source="fencing",
    ),
    mutant(
        "a-child-of-an-attempt-outlives-it",
        "adapters.fork:reaped",
        "if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:\n    return None\n"
        "kill_group(pid)",
        "if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:\n    return None",
        breaks="I7",
        source="order",
        why="an upload in the background reads a step without a lease",
    ),
    mutant(
        "an-error-of-a-job-ends-all-jobs",
        "follow.runner:Runner._start",
        "except Exception as error:",
        "except OSError as error:",
        breaks="I10",
        source="order",
    ),
)
