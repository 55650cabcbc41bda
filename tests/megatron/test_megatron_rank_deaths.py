"""F2, F3, F13, F29: ranks are killed in the middle of a save, and the job is started again."""

from __future__ import annotations

import re
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
    descriptors_of,
    listeners_of,
    staging_of,
    states_of,
    steps_on_disk,
    tracked_step,
)

pytestmark = pytest.mark.megatron

Gates = Callable[[str], Gate]


def pause_shards(step: int, gate: Gate) -> dict[str, Any]:
    """Every rank's writer stops before the fsync of its first shard."""
    return {
        "method": "fsync",
        "path": f".ckptfsm/staging/{step}.*_0.distcp",
        "gate": gate.path,
    }


def decision_on(ranks: list[dict[str, Any]], attempt: str) -> tuple[str, str]:
    """The last state that recovery found of an attempt, and its decision: (last, result)."""
    decisions = ranks[0]["recovery"]["decisions"]
    found = [d for d in decisions if attempt in d[0]]
    assert found, f"no decision on {attempt} in {decisions}"
    return found[0][1], found[0][2]


def strange_descriptors(pid: int, root: Path, job: Job) -> dict[int, str]:
    """The descriptors of a writer besides the root, files of its attempt, its pipe and its output."""
    harmless = (
        r"/dev/null",
        r"pipe:\[\d+\]",
        re.escape(str(root)),
        re.escape(str(root)) + r"/\.ckptfsm(/staging(/2\.e1\.a2(/.*)?)?)?",
        re.escape(str(job.place)) + r"/\d\.log",
        r".*/gate-\w+\.(go|reached)",  # where it waits
        r"/proc/\d+/statm?",  # open for a moment: megatron-core asks psutil for its memory
    )
    return {
        fd: name
        for fd, name in descriptors_of(pid).items()
        if not any(re.fullmatch(pattern, name) for pattern in harmless)
    }


@pytest.mark.parametrize("victim", [0, 1])
def test_f2_f29_killed_rank_leaves_no_orphan_and_the_job_restarts_on_its_port(
    cluster: Cluster, gate: Gates, root: Path, victim: int
) -> None:
    """SIGKILL of a rank while all writers are half way; the same job again, on the same port. Would
    catch: orphans that hold the rendezvous socket (EADDRINUSE) or the root's lock, or write on; a
    surviving rank that hangs; a restart that trusts the half-written attempt."""
    paused = gate("paused")
    job = cluster.start(
        "save_and_stay",
        root=str(root),
        tracked=[1],
        then=2,
        faults=[pause_shards(2, paused)],
        exit_timeout_s=1.0,
    )
    writing = [paused.arrival(job)["pid"], paused.arrival(job)["pid"]]
    for pid in writing:
        assert strange_descriptors(pid, root, job) == {}, "a writer holds what is not its own"
    assert listeners_of(job.port) == [job.pids[0]]
    assert job.kill(victim)

    codes = job.wait()
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 0
    assert job.result(1 - victim)["error"]["type"] == "RankFailed"
    for pid in writing:
        assert await_death(pid, 5.0), "a writer outlived its trainer"
    assert job.living() == []
    assert listeners_of(job.port) == []
    assert tracked_step(root) == 1

    again = cluster.run("save_steps", root=str(root), steps=[2, 3], port=job.port)
    for rank in again:
        assert (rank["restored"], rank["errors"], rank["all"]) == (1, [None, None], [1, 2, 3])
    last, result = decision_on(again, "2.e1.a2")
    assert (last in ("requested", "forked"), "failed" in result) == (True, True)
    assert states_of(root) == {1: "tracked", 2: "tracked", 3: "tracked"}
    assert staging_of(root) == []
    assert_complete(root, 2)
    assert cluster.run("restore", root=str(root), step=2)[0]["equal"] is True


@pytest.mark.parametrize(
    "target",
    ["iter_0000002", "iter_0000002/.ckptfsm/manifest.json", "latest_checkpointed_iteration.txt"],
)
def test_f3_coordinator_killed_after_the_shards_is_rolled_forward(
    cluster: Cluster, gate: Gates, root: Path, target: str
) -> None:
    """SIGKILL of the whole job right before the manifest, before the directory gets its name, and
    before the tracker does. All shards are durable: would catch a restart that throws the finished
    save away, that has to be told, or that leaves the tracker behind the directory."""
    paused = gate("paused")
    place = target.replace("iter_0000002/", ".ckptfsm/staging/2.*/")
    fault = {"rank": 0, "method": "rename", "path": f"* -> {place}", "gate": paused.path}
    if place == "latest_checkpointed_iteration.txt":
        # The tracker of step 1 passes first.
        paused.open()
    job = cluster.start("save_and_stay", root=str(root), tracked=[1], then=2, faults=[fault])
    if place == "latest_checkpointed_iteration.txt":
        paused.arrival(job)
    assert paused.arrival(job)["pid"] == job.pids[0], "the coordinator lives in rank 0"
    for rank in (0, 1):
        job.kill(rank)
    job.wait()
    assert tracked_step(root) == 1

    for rank in cluster.run("restore", root=str(root)):
        assert (rank["step"], rank["equal"], rank["error"]) == (2, True, None)
    assert tracked_step(root) == 2
    assert steps_on_disk(root) == [1, 2]
    assert staging_of(root) == []
    assert_complete(root, 2)
