"""AsyncRequests of nvidia-resiliency-ext in the queue, where that package is installed."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from cluster import Cluster, Gate

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(
        find_spec("nvidia_resiliency_ext") is None and "CKPTFSM_NVRX" not in os.environ,
        reason="nvidia-resiliency-ext is not installed: make test-integrations",
    ),
]


def test_requests_of_nvidia_resiliency_ext(cluster: Cluster, tmp_path: Path) -> None:
    """Catches: a request whose class, queue or writer is not megatron-core's."""
    for rank in cluster.run("nvrx_jobs.save_two", place=str(tmp_path)):
        assert rank["seen"] == [0, 1]
        assert rank["loaded"] == [[1.0, 1.0, 1], [2.0, 2.0, 2]]
        assert rank["plain"] == [3.0] * 4


@pytest.mark.parametrize("how", ["", "cached", "shared", "both"])
@pytest.mark.parametrize("persistent", [False, True])
def test_I5_staged_requests_in_flight_together_keep_their_values(
    cluster: Cluster, gate: Callable[[str], Gate], tmp_path: Path, how: str, persistent: bool
) -> None:
    """Catches: three requests that are staged into the same shared memory: iteration 1 with the
    values of iteration 3, and no error. A request without the tensors that a worker of the stock
    queue has."""
    writing, scheduled = gate("writing"), gate("scheduled")
    gates = {"writing": writing.path, "scheduled": scheduled.path}
    job = cluster.start(
        "nvrx_jobs.save_three_staged", place=str(tmp_path), how=how, persistent=persistent, **gates
    )
    for _ in range(2):
        scheduled.arrival(job)
    scheduled.open(2)
    writing.open(6)
    for rank in job.results():
        assert rank["seen"] == [0, 1, 2]
        assert rank["loaded"] == [[float(value), float(value), value] for value in (1, 2, 3)]
        assert rank["put_back"]


@pytest.mark.parametrize("given", ["build", "requests", "functions"])
def test_I5_parts_of_the_same_structure_keep_their_values(
    cluster: Cluster, root: Path, given: str
) -> None:
    """Catches: two parts that are staged into the same memory: one has the values of the other."""
    root.mkdir()
    for rank in cluster.run("nvrx_jobs.save_twins", root=str(root), given=given):
        assert rank["errors"] == [None, None]
        assert rank["equal"] == [True] * 4


def test_ready_parts_in_one_memory_are_refused(cluster: Cluster, root: Path) -> None:
    """Catches: two parts that were made before either was copied: both have the values of the second."""
    root.mkdir()
    for rank in cluster.run("nvrx_jobs.save_ready_together", root=str(root)):
        first, second = rank["told"]
        if first is not None:  # a version that shares no memory keeps both
            assert "staged into the same shared memory" in first["text"]
        assert second is None
        assert rank["equal"] == [first is None, True]


def test_a_lost_request_costs_at_most_the_next_one(cluster: Cluster, tmp_path: Path) -> None:
    """Catches: requests that leave out, for ever, what was in one that was made and never scheduled."""
    for rank in cluster.run("nvrx_jobs.go_on_after_a_lost_request", place=str(tmp_path)):
        first, *_, last = rank["seen"]
        assert first == 0 or "cache miss" in first["text"]
        assert last == 1
        assert rank["loaded"] == [2.0, 2.0, 2]
