"""The drop-in for megatron-core's AsyncCallsQueue, with megatron-core's requests on two ranks."""

from __future__ import annotations

import os
import re
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import (
    Cluster,
    Gate,
    assert_complete,
    await_death,
    path_of,
    steps_on_disk,
    tracked_step,
)

from ckptfsm.adapters.local_transport import LocalTransport
from ckptfsm.core.errors import ConfigError, PollMissingWarning

pytestmark = pytest.mark.megatron

Gates = Callable[[str], Gate]
ALL = [(1, 512), (2, 16), (3, 64)]


def loadable(cluster: Cluster, place: Path, steps: list[tuple[int, int]]) -> bool:
    ranks = cluster.run("queue_jobs.load_all", place=str(place), steps=steps)
    return all(all(rank) for rank in ranks)


def the_error(rank: dict[str, Any]) -> dict[str, Any]:
    """The only one; the first and the third call were finalized in this order."""
    assert [seen for seen in rank["seen"] if isinstance(seen, int)] == [0, 2]
    (error,) = [seen for seen in rank["seen"] if not isinstance(seen, int)]
    return dict(error)


def assert_only_the_second_failed(ranks: list[dict[str, Any]], kind: str, reason: str) -> None:
    for rank in ranks:
        second = the_error(rank)
        assert second["type"] == kind, second["text"]
        assert (second["facts"]["call"], second["facts"]["rank"]) == (1, 1)
        assert second["facts"]["reason"] == reason
        assert "call 1 failed on rank 1" in second["text"]
        assert rank["ran"] == [1, 3]
        assert rank["children"] == []


@pytest.mark.parametrize("blocking", [False, True])
def test_requests_in_flight_together_keep_their_results(
    cluster: Cluster, tmp_path: Path, blocking: bool
) -> None:
    """Catches: results that are swapped through the queue that all stock requests share (the small
    ones are written first): committed, and not loadable."""
    ranks = cluster.run(
        "queue_jobs.save_three", place=str(tmp_path), blocking=blocking, spawned=not blocking
    )
    for rank in ranks:
        assert rank["indices"] == [0, 1, 2]
        assert rank["seen"] == [0, 1, 2]
        assert rank["ran"] == [1, 2, 3]
        assert rank["children"] == []
    assert loadable(cluster, tmp_path, ALL)


@pytest.mark.parametrize(("blocking", "persistent"), [(False, False), (True, False), (True, True)])
def test_killed_writer_raises_on_all_ranks(
    cluster: Cluster, gate: Gates, tmp_path: Path, blocking: bool, persistent: bool
) -> None:
    """Catches: a killed writer that counts as done (stock temporal caller), one that is waited for
    for ever (stock persistent caller, Megatron-LM #6970), finalizers of a dead request."""
    paused = gate("paused")
    job = cluster.start(
        "queue_jobs.save_three",
        place=str(tmp_path),
        gate=paused.path,
        blocking=blocking,
        persistent=persistent,
    )
    writer = paused.arrival(job)
    assert writer["ppid"] == job.pids[1]
    os.kill(writer["pid"], signal.SIGKILL)
    assert_only_the_second_failed(job.results(), "WriterDied", "writer_died")
    assert loadable(cluster, tmp_path, [ALL[0], ALL[2]])
    assert not (tmp_path / "2" / "metadata.json").exists()


def test_killed_write_worker_raises_on_all_ranks(
    cluster: Cluster, gate: Gates, tmp_path: Path
) -> None:
    """Catches: megatron-core's writer, which waits for its dead worker for ever."""
    paused = gate("paused")
    job = cluster.start(
        "queue_jobs.save_three", place=str(tmp_path), gate=paused.path, worker=0, blocking=True
    )
    os.kill(paused.arrival(job)["pid"], signal.SIGKILL)
    ranks = job.results()
    assert [the_error(rank)["type"] for rank in ranks] == ["WriterDied"] * 2
    assert [rank["ran"] for rank in ranks] == [[1, 3]] * 2


@pytest.mark.parametrize("blocking", [False, True])
def test_hung_writer_raises_on_all_ranks(
    cluster: Cluster, gate: Gates, tmp_path: Path, blocking: bool
) -> None:
    """Catches: a writer on a dead file system that holds up all ranks for ever."""
    paused = gate("paused")
    job = cluster.start(
        "queue_jobs.save_three",
        place=str(tmp_path),
        gate=paused.path,
        blocking=blocking,
        writer_timeout_s=10.0,
    )
    writer = paused.arrival(job)
    ranks = job.results()
    assert_only_the_second_failed(ranks, "SaveFailed", "writer_hung")
    assert f"missed its deadline at {writer['pid']} S " in the_error(ranks[0])["text"]
    assert await_death(writer["pid"], 5.0)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("preload", "fork_failed"), ("write", "writer_failed"), ("payload", "writer_failed")],
)
def test_error_of_one_rank_raises_on_all_ranks(
    cluster: Cluster, tmp_path: Path, fault: str, reason: str
) -> None:
    """Catches: an error before the fork that leaves the other ranks in a collective, one in the
    writer that is never told."""
    ranks = cluster.run("queue_jobs.save_three", place=str(tmp_path), fault=fault)
    assert_only_the_second_failed(ranks, "SaveFailed", reason)
    assert all("a fault of this test" in the_error(rank)["text"] for rank in ranks)


@pytest.mark.parametrize(
    ("fault", "kind", "reason", "word"),
    [
        ("worker", "SaveFailed", "writer_failed", "ValueError"),
        ("dying worker", "WriterDied", "writer_died", "exit code 78"),
    ],
)
def test_a_write_worker_that_fails_raises_on_all_ranks(
    cluster: Cluster, tmp_path: Path, fault: str, kind: str, reason: str, word: str
) -> None:
    """Catches: a worker, which is a process up to megatron-core 0.16 and a thread from 0.17 on,
    with an unnoticed end: its writer waits until its deadline."""
    ranks = cluster.run("queue_jobs.save_three", place=str(tmp_path), fault=fault)
    assert_only_the_second_failed(ranks, kind, reason)
    assert all(word in the_error(rank)["text"] for rank in ranks)
    assert loadable(cluster, tmp_path, [ALL[0], ALL[2]])


def test_finalizer_that_raises_leaves_nothing_to_the_next_request(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Catches: a payload that its finalizers did not take and that the next request finds: the
    results are swapped again."""
    ranks = cluster.run("queue_jobs.save_three", place=str(tmp_path), fault="finalizer")
    for rank in ranks:
        second = the_error(rank)
        assert (second["type"], second["facts"]["reason"]) == ("SaveFailed", "finalizers")
        assert "ValueError" in second["cause"]
        assert rank["ran"] == [1, 3]
    assert loadable(cluster, tmp_path, [ALL[0], ALL[2]])


def test_a_results_queue_that_is_gone_raises_on_all_ranks(cluster: Cluster, tmp_path: Path) -> None:
    """Catches: a rank that raises alone, while the other waits for it in the next exchange."""
    for rank in cluster.run("queue_jobs.lose_the_results_queue", place=str(tmp_path)):
        [error] = rank["seen"]
        assert (error["type"], error["facts"]["reason"]) == ("SaveFailed", "results_queue")
        assert error["facts"]["rank"] == 1


def test_results_of_another_queue_fail_a_managers_save_on_all_ranks(
    cluster: Cluster, root: Path
) -> None:
    """Catches: finalizers that begin on one rank and wait for the one where others' results lie."""
    first, second = cluster.run("queue_jobs.find_results_of_another_queue", root=str(root))
    assert second["seen"].pop(1) == "of another queue"
    for rank in (first, second):
        error, later = rank["seen"]
        assert error["facts"]["reason"] == "finalizers"
        assert re.search("rank 1: .*two queues are in use at once", error["text"])
        assert later is None and rank["steps"] == [2]


def test_rank_with_nothing_to_write_finalizes_with_the_others(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Catches: a rank without a writer that does not join the finalizers' collectives."""
    ranks = cluster.run("queue_jobs.save_where_one_rank_has_nothing", place=str(tmp_path))
    assert [rank["writes"] for rank in ranks] == [True, False]
    assert [rank["seen"] for rank in ranks] == [[0], [0]]
    assert {".metadata", "metadata.json"} <= set(ranks[0]["names"])


def test_no_dist_looks_at_this_rank_only(cluster: Cluster, tmp_path: Path) -> None:
    """Catches: a rank that waits for the others although it was told not to."""
    ranks = cluster.run("queue_jobs.finish_alone", place=str(tmp_path))
    assert [rank["seen"] for rank in ranks] == [[0], [0]]


def test_abort_kills_the_writers(cluster: Cluster, gate: Gates, tmp_path: Path) -> None:
    """Catches: writers that outlive their queue, a queue that cannot be used after an abort."""
    ranks = cluster.run("queue_jobs.abort", place=str(tmp_path), gate=gate("paused").path)
    assert [rank["children"] for rank in ranks] == [[], []]
    assert [rank["seen"] for rank in ranks] == [[1], [1]]
    assert not (tmp_path / "1" / ".metadata").exists()


def test_written_call_of_a_failed_run_does_not_finalize_the_next(
    cluster: Cluster, gate: Gates, tmp_path: Path
) -> None:
    """Catches: a completion that survives ``close(abort=True)`` and counts for the first call of the
    retry (Megatron-Bridge #5117)."""
    paused, polled = gate("paused"), gate("polled")
    job = cluster.start(
        "queue_jobs.retry", place=str(tmp_path), gate=paused.path, polled=polled.path
    )
    for _ in range(2):
        polled.arrival(job)
    assert not (tmp_path / "2" / ".metadata").exists()
    paused.open(2)
    polled.open(2)
    for rank in job.results():
        assert (rank["early"], rank["seen"], rank["ran"]) == ([], [1], [2])
    assert not (tmp_path / "1" / ".metadata").exists()
    assert loadable(cluster, tmp_path, [(2, 16)])


def test_writers_die_with_their_trainer(cluster: Cluster, gate: Gates, tmp_path: Path) -> None:
    """Catches: orphans that hold the port of the restarted job and write into its directories."""
    paused, stay = gate("paused"), gate("stay")
    job = cluster.start(
        "queue_jobs.schedule_and_stay", place=str(tmp_path), gate=paused.path, stay=stay.path
    )
    writers = {w["ppid"]: w["pid"] for w in (paused.arrival(job), paused.arrival(job))}
    job.kill(1)
    assert await_death(writers[job.pids[1]], 5.0)


def test_install_is_reversible(cluster: Cluster, tmp_path: Path) -> None:
    """Catches: a queue that stays after ``uninstall``, or that leaves calls behind which are never
    finalized. A second queue over the first; a queue that was put there since and is lost."""
    for rank in cluster.run("queue_jobs.save_where_stock_stood", place=str(tmp_path)):
        unfinished, twice, displaced = rank.pop("refused")
        assert "1 calls are not finalized: close the queue first" in unfinished
        assert "queue holds a queue of ckptfsm already: uninstall that one first" in twice
        assert (
            "holds another queue by now (ckptfsm.integrations.queue.AsyncCallsQueue)" in displaced
        )
        assert rank == {"inside": True, "restored": True, "left": True, "seen": [0]}
    assert loadable(cluster, tmp_path, [(1, 16), (2, 16)])


# ----------------------------------------------------------------------------- whole checkpoints


@pytest.mark.parametrize("given", [False, True])
def test_begun_checkpoints_are_tracked(cluster: Cluster, root: Path, given: bool) -> None:
    """Catches: parts of a checkpoint that are finalized one by one, an index that never comes back."""
    root.mkdir()
    for rank in cluster.run("queue_jobs.save_begun", root=str(root), given=given):
        assert rank["seen"] == [0, 1, 2, 3, 4, 5]
        assert "step 6 is tracked already" in rank["again"], "it would write into step 4"
        assert rank["busy"] == [f"step {n} is in flight" for n in (4, 4, 5, 5, 6, 6)], "so would it"
        assert "step 6 was begun: call without no_dist" in rank["alone"], "it would never end"
    assert tracked_step(root) == 6
    for step in (4, 5, 6):
        assert_complete(root, step)
    model, optimizer = path_of(root, 6) / "model", path_of(root, 6) / "optimizer"
    for directory, step, rows in ((model, 6, 512), (optimizer, 106, 16)):
        ranks = cluster.run("stock_load", directory=str(directory), step=step, rows=rows)
        assert ranks == [True, True]


def test_begun_checkpoint_with_a_killed_writer_is_not_tracked(
    cluster: Cluster, gate: Gates, root: Path
) -> None:
    """Catches: one of two parts that moves the tracker, a request of a dead checkpoint that stays."""
    root.mkdir()
    paused = gate("paused")
    job = cluster.start("queue_jobs.save_begun", root=str(root), given=False, gate=paused.path)
    os.kill(paused.arrival(job)["pid"], signal.SIGKILL)
    for rank in job.results():
        assert [s if isinstance(s, int) else s["type"] for s in rank["seen"]] == [
            *(0, 1),
            "WriterDied",
            *(4, 5),
        ]
    assert steps_on_disk(root) == [4, 6]
    assert tracked_step(root) == 6


def test_misuse_is_refused_and_the_root_is_given_back(cluster: Cluster, root: Path) -> None:
    """Catches: a wrong directory that fails only in the writer, a part that is never scheduled."""
    for rank in cluster.run("queue_jobs.misuse", root=str(root)):
        wrong, none, fine, twice, closed, skips = rank
        assert "is not the directory of step 4" in wrong
        assert "at least one part" in none
        assert fine == ""
        assert "part 'a' of step 4 was not scheduled" in twice
        assert closed == twice
        assert "on_busy='skip' cannot be" in skips


@pytest.mark.parametrize("polled", [False, True])
def test_F28_a_queue_that_ends_with_calls_says_so(
    polled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a loop that never finalizes what it schedules, without a word."""
    from ckptfsm.integrations.queue import AsyncCallsQueue

    monkeypatch.setattr("ckptfsm.integrations.queue._fork", lambda call, request: None)
    queue = AsyncCallsQueue()
    queue._transport, queue._last = LocalTransport(), 6
    queue.schedule_async_request(None)
    if polled:
        queue._take_call()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        del queue
    told = [str(w.message) for w in said if w.category is PollMissingWarning]
    assert [text.startswith("calls 7 were never finalized") for text in told] == [True][polled:]


@pytest.mark.parametrize("scheduled_by", ["the rank", "its parent"])
def test_F13_calls_are_those_of_the_process_that_scheduled_them(
    scheduled_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a child of the trainer that ends its parent's writers, or waits for them. A queue
    that was made before its rank was forked, and is closed there without a word."""
    from ckptfsm.integrations.queue import AsyncCallsQueue

    monkeypatch.setattr("ckptfsm.integrations.queue._fork", lambda call, request: None)
    queue = AsyncCallsQueue()
    queue._transport = LocalTransport()
    if scheduled_by == "its parent":
        queue.schedule_async_request(None)
    pid = os.fork()
    if pid == 0:
        os._exit(leave(queue, scheduled_by))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    queue._calls.clear()
    queue._numbers.clear()


def leave(queue: Any, scheduled_by: str) -> int:
    """In the child: 0 if what was to happen did."""
    try:
        if scheduled_by == "the rank":
            queue.schedule_async_request(None)
            queue._calls[0].request = Finalized()
            queue.close()
            return 0 if queue.get_num_unfinalized_calls() == 0 else 1
        queue.close()
        queue.maybe_finalize_async_calls(blocking=True)
    except ConfigError:
        return 0 if queue.get_num_unfinalized_calls() == 1 else 2
    return 3


class Finalized:
    """A staged request with nothing to write and no finalizers."""

    def problem(self) -> None:
        """There are none."""

    def finalize(self, payload: Any) -> None:
        """Nothing to do."""
