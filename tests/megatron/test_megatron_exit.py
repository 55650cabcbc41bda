"""F25: leaving a job while a save is in flight: in order, by an exception, by SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import (
    Cluster,
    Gate,
    assert_complete,
    staging_of,
    states_of,
    steps_on_disk,
    tracked_step,
)

pytestmark = pytest.mark.megatron

Gates = Callable[[str], Gate]


def pause_rank_one(gate: Gate) -> list[dict[str, Any]]:
    path = ".ckptfsm/staging/2.*/__1_0.distcp"
    return [{"rank": 1, "method": "fsync", "path": path, "gate": gate.path}]


def test_f25_normal_exit_drains(cluster: Cluster, gate: Gates, root: Path) -> None:
    """The loop ends right after ``save``, without a poll. Would catch: a last checkpoint that is
    written and never tracked, a writer that is killed at the exit."""
    paused, leaving = gate("paused"), gate("leaving")
    job = cluster.start(
        "leave_in_flight", root=str(root), faults=pause_rank_one(paused), leaving=leaving.path
    )
    paused.arrival(job)
    leaving.arrival(job)
    leaving.open()
    paused.open()
    for rank in job.results():
        assert (rank["first"], rank["error"], rank["raised"]) == (None, None, False)
    assert tracked_step(root) == 2
    assert states_of(root) == {1: "tracked", 2: "tracked"}
    assert_complete(root, 2)
    assert job.living() == []


@pytest.mark.parametrize("raising", [[0, 1], [0], [1]])
def test_f25_exception_leaves_in_time_and_the_next_start_decides(
    cluster: Cluster, gate: Gates, root: Path, raising: list[int]
) -> None:
    """Training raises while a writer stands still, on all ranks or on one. Would catch: an exit that
    waits for a hung writer or for the other ranks, an exception that is replaced, processes left."""
    paused, leaving = gate("paused"), gate("leaving")
    job = cluster.start(
        "leave_in_flight",
        root=str(root),
        faults=pause_rank_one(paused),
        leaving=leaving.path,
        raising=raising,
        exit_timeout_s=1.0,
    )
    paused.arrival(job)
    leaving.arrival(job)
    leaving.open()
    for number, rank in enumerate(job.results()):
        if number in raising:
            assert (rank["raised"], rank["error"]) == (True, None), "the exception was replaced"
            assert rank["seconds"] < 1.0 + 3.0
        else:
            told = rank["error"] or rank["polled"]
            assert told is not None
            assert told["type"] == "RankFailed", told["text"]
            assert rank["seconds"] < 2 * 1.0 + 6.0
    assert job.living() == []
    assert tracked_step(root) == 1

    for rank in cluster.run("save_steps", root=str(root), steps=[2]):
        assert (rank["restored"], rank["errors"], rank["all"]) == (1, [None], [1, 2])
    assert staging_of(root) == []
    assert states_of(root) == {1: "tracked", 2: "tracked"}
    assert steps_on_disk(root) == [1, 2]


def test_the_end_that_one_rank_knows_of_ends_all(cluster: Cluster, root: Path) -> None:
    """I10. Catches: a flag that the real exchange leaves out, a rank that saves alone."""
    ranks = cluster.run("train_until_the_end", root=str(root))
    assert [rank["stopped_at"] for rank in ranks] == [6, 6]
    assert states_of(root) == {6: "tracked"}


def test_f25_sigterm_saves_at_an_agreed_step_and_drains(
    cluster: Cluster, gate: Gates, root: Path
) -> None:
    """A rank gets SIGTERM. Would catch: ranks that save different steps, a signal that only its
    rank hears of, a last save that is not drained."""
    standing = gate("standing")
    job = cluster.start("train_until_preempted", root=str(root), gate=standing.path)
    standing.arrival(job)
    assert job.kill(1, signal.SIGTERM)
    standing.open()
    ranks = job.results()
    assert ranks[0] == ranks[1]
    assert ranks[0]["preempted"] is True
    step = ranks[0]["saved"]
    assert step is not None
    assert 5 <= step <= 8, "the preemption was not agreed soon"
    assert tracked_step(root) == step
    assert states_of(root) == {step: "tracked"}
    for rank in cluster.run("restore", root=str(root)):
        assert (rank["step"], rank["equal"]) == (step, True)
