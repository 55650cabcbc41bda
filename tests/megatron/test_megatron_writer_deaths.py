"""F1: a writer dies or hangs in the middle of its shards."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import (
    Cluster,
    Gate,
    Job,
    assert_complete,
    await_death,
    common_file,
    staging_of,
    states_of,
    steps_on_disk,
    tracked_step,
    transitions_of,
)

pytestmark = pytest.mark.megatron

SOON_S = 3.0  # the promise is the poll interval + 1 s; the rest is for a busy machine
Gates = Callable[[str], Gate]


def start_paused(
    cluster: Cluster, root: Path, gate: Gate, rank: int, file: str, **settings: Any
) -> Job:
    """A job whose save of step 2 stops before the fsync of ``file``, on ``rank``."""
    fault = {
        "rank": rank,
        "method": "fsync",
        "path": f".ckptfsm/staging/2.*/{file}",
        "gate": gate.path,
    }
    return cluster.start("fail_and_go_on", root=str(root), faults=[fault], **settings)


def assert_failed_and_went_on(job: Job, root: Path, kind: str, *words: str) -> list[float]:
    """Failed on both ranks, nothing left behind, and the next save is tracked. When it was told."""
    at = []
    for rank in job.results():
        assert rank["first"] is None
        assert rank["failed"] is not None, "the save of a dead writer was taken for good"
        assert rank["failed"]["type"] == kind, rank["failed"]["text"]
        for word in words:
            assert word in rank["failed"]["text"]
        assert rank["children"] == [], "processes of the failed save live on"
        assert (rank["latest"], rank["after"]["steps"]) == (1, [1])
        assert rank["after"]["staging"] == [], "the failed attempt's space was not given back"
        assert rank["third"] is None
        assert rank["all"] == [1, 3]
        at.append(rank["failed"]["at"])
    assert tracked_step(root) == 3
    assert steps_on_disk(root) == [1, 3]
    assert staging_of(root) == []
    assert states_of(root) == {1: "tracked", 3: "tracked"}
    way = [r.dest.value for r in transitions_of(root) if r.step == 2]
    assert way[-2:] == ["failed", "discarded"]
    assert_complete(root, 3)
    return at


@pytest.mark.parametrize("rank", [0, 1])
def test_f1_killed_writer_fails_the_save_on_all_ranks(
    cluster: Cluster, gate: Gates, root: Path, rank: int
) -> None:
    """SIGKILL of the writer process while a shard is half way. Would catch: "not alive" taken for
    "succeeded" (megatron's temporal caller), one rank left out."""
    paused = gate("paused")
    job = start_paused(cluster, root, paused, rank, f"__{rank}_0.distcp")
    os.kill(paused.arrival(job)["pid"], signal.SIGKILL)
    assert_failed_and_went_on(job, root, "WriterDied", f"rank {rank}", "SIGKILL")


def test_f1_killed_writer_is_noticed_soon(cluster: Cluster, gate: Gates, root: Path) -> None:
    """The writer has written its other files. Would catch: a failure that only a deadline finds, a
    failed attempt that is moved aside and never deleted."""
    paused = gate("paused")
    job = start_paused(cluster, root, paused, 0, common_file(0), empty=True)
    writer = paused.arrival(job)
    assert writer["ppid"] == job.pids[0]
    os.kill(writer["pid"], signal.SIGKILL)
    for at in assert_failed_and_went_on(job, root, "WriterDied", "rank 0", "SIGKILL"):
        assert at - writer["at"] < SOON_S
    assert job.result(0)["trash"] == [], "the failed attempt is never deleted"


def test_f1_hung_writer_meets_its_deadline(cluster: Cluster, gate: Gates, root: Path) -> None:
    """A writer stands still for ever (a dead NFS server). Would catch: a save without a deadline, a
    hung process group that is left alive and can write later."""
    paused = gate("paused")
    job = start_paused(cluster, root, paused, 1, "__1_0.distcp", writer_timeout_s=1.5)
    writer = paused.arrival(job)
    assert_failed_and_went_on(job, root, "SaveFailed", "writer_hung", "deadline")
    assert await_death(writer["pid"], 1.0)
    assert job.living() == []
