"""F23, I6: AsyncRequests of other code, in parts of one checkpoint and in place."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster import (
    PATIENCE_S,
    Cluster,
    Gate,
    assert_complete,
    await_death,
    await_file,
    children_of,
    path_of,
    staging_of,
    states_of,
    steps_on_disk,
    tracked_step,
)

from ckptfsm.adapters.fork import fork_child
from ckptfsm.core.layout import receipt_name
from ckptfsm.megatron.foreign import StagedRequest

pytestmark = pytest.mark.megatron

Gates = Callable[[str], Gate]
BIG_ROWS, SMALL_ROWS = 512, 16  # as in jobs.py
RAN = [f"{step} {part}" for step in (1, 2, 3) for part in ("model", "optimizer")]


def assert_refers_to_its_own_files(directory: Path, seen: list[dict[str, Any]]) -> None:
    """Every file is referred to up to its last byte: another part's offsets would not fit."""
    sizes = {p.name: p.stat().st_size for p in directory.glob("*.distcp")}
    for rank in seen:
        assert rank["ends"] == sizes
        assert rank["error"] is None
        assert rank["equal"] is True


def assert_only_step_two_failed(
    ranks: list[dict[str, Any]], root: Path, kind: str, *words: str
) -> None:
    for rank in ranks:
        first, second, third = rank["errors"]
        assert first is None
        assert second is not None, "taken for good"
        assert second["type"] == kind, second["text"]
        for word in words:
            assert word in second["text"]
        assert third is None, third
        assert rank["all"] == [1, 3]
    assert tracked_step(root) == 3
    assert steps_on_disk(root) == [1, 3]
    assert staging_of(root) == []
    assert states_of(root) == {1: "tracked", 3: "tracked"}
    assert_complete(root, 3)


def test_f23_two_foreign_parts_keep_their_results_apart(cluster: Cluster, root: Path) -> None:
    """A big and a small request in one checkpoint. Would catch: results that are swapped through the
    queue that all requests share: committed, and not loadable."""
    ranks = cluster.run("save_foreign", root=str(root))
    for rank in ranks:
        assert rank["errors"] == [None, None, None]
        assert rank["all"] == [1, 2, 3]
        assert rank["ran"] == RAN
    for name, step, rows in (("model", 3, BIG_ROWS), ("optimizer", 103, SMALL_ROWS)):
        directory = path_of(root, 3) / "role" / name
        seen = cluster.run("look_into", directory=str(directory), step=step, rows=rows)
        assert_refers_to_its_own_files(directory, seen)
    assert_complete(root, 3)


def test_stock_queue_swaps_the_results_of_two_requests(
    cluster: Cluster, gate: Gates, tmp_path: Path
) -> None:
    """The contrast to the test above: megatron-core's AsyncCallsQueue, the same two requests, and
    the small one ends first. If this fails, megatron-core was mended."""
    big, small = tmp_path / "big", tmp_path / "small"
    writing, ended = gate("writing"), gate("ended")
    job = cluster.start(
        "save_with_stock_queue",
        big=str(big),
        small=str(small),
        gate=writing.path,
        ended=ended.path,
    )
    writing.arrival(job)
    writing.arrival(job)
    ended.arrival(job)
    writing.open(2)
    ended.open()
    job.results()
    assert (big / "metadata.json").exists(), "it was not even committed"
    seen = cluster.run("look_into", directory=str(big), step=1, rows=BIG_ROWS)
    sizes = {p.name: p.stat().st_size for p in big.glob("*.distcp")}
    assert seen[0]["ends"] != sizes
    assert not any(rank["equal"] for rank in seen)


def test_f1_killed_foreign_writer_fails_on_all_ranks(
    cluster: Cluster, gate: Gates, root: Path
) -> None:
    """Would catch: finalizers that run after a writer was killed (megatron's temporal caller)."""
    paused = gate("paused")
    job = cluster.start("save_foreign", root=str(root), gate=paused.path)
    writer = paused.arrival(job)
    assert writer["ppid"] == job.pids[1]
    os.kill(writer["pid"], signal.SIGKILL)
    ranks = job.results()
    assert_only_step_two_failed(ranks, root, "WriterDied", "rank 1", "SIGKILL")
    assert [rank["ran"] for rank in ranks] == [[*RAN[:2], *RAN[4:]]] * 2


@pytest.mark.parametrize("worker", [0, 1])
def test_f1_killed_foreign_write_worker_fails_on_all_ranks(
    cluster: Cluster, gate: Gates, root: Path, worker: int
) -> None:
    """A worker of megatron-core's writer is killed, the first one or, when the first one is done, the
    last one; one that is a thread, with its writer. Would catch: a writer that waits for its dead worker
    until the deadline."""
    paused = gate("paused")
    job = cluster.start(
        "save_foreign", root=str(root), gate=paused.path, worker=worker, writer_timeout_s=10.0
    )
    found = paused.arrival(job)
    if worker == 1 and found["what"] == "worker":
        others = [pid for pid in children_of(found["ppid"]) if pid != found["pid"]]
        assert all(await_death(pid) for pid in others), "the first worker does not end"
    os.kill(found["pid"], signal.SIGKILL)
    assert_only_step_two_failed(job.results(), root, "WriterDied", "rank 1")
    writer = found["pid"] if found["what"] == "thread" else found["ppid"]
    assert await_death(writer, 1.0)


def starts_another_after_one_died(*_: Any) -> None:
    """As megatron-core's writer whose first worker is killed before it has started the second one."""
    context = multiprocessing.get_context("fork")
    first = context.Process(target=signal.raise_signal, args=(signal.SIGKILL,))
    first.start()
    assert first.pid is not None
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    context.Process(target=int).start()  # reaps the first one
    threading.Event().wait()


def test_f1_a_write_worker_that_multiprocessing_reaps_ends_the_writer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found by a run of this suite. Would catch: a writer that waits for a worker until the
    deadline, since only the process that reaped it saw its end."""
    monkeypatch.setattr("ckptfsm.megatron.foreign._WATCH_S", 3600.0)
    request = StagedRequest("x", starts_another_after_one_died, [], {}, [], None)
    child = fork_child(request.run, keep=())
    outcome = child.wait(PATIENCE_S)
    child.kill()
    assert outcome is not None, "it waits"
    assert "exit code 78" in outcome.explain()


def writes_a_part_after_it() -> int | None:
    """The end of a worker of a later part, of a writer that has run a request."""
    StagedRequest("x", int, [], {}, [], None).run()
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(PATIENCE_S)
    worker = multiprocessing.get_context("fork").Process(target=os._exit, args=(3,))
    worker.start()
    worker.join()
    return worker.exitcode


def test_i3_the_watch_ends_with_its_part() -> None:
    """Found by review. Would catch: the worker of an optional part after it that fails, and ends the
    whole writer instead of its part."""
    child = fork_child(writes_a_part_after_it, keep=())
    outcome = child.wait(PATIENCE_S)
    child.kill()
    assert outcome is not None
    assert outcome.payload == 3, outcome.explain()


def test_f29_foreign_write_workers_die_with_their_trainer(
    cluster: Cluster, gate: Gates, root: Path
) -> None:
    """SIGKILL of a rank while a worker of megatron-core's writer stands still. Would catch: a
    worker that outlives its writer, since the kernel's death signal is not inherited by a fork."""
    paused = gate("paused")
    job = cluster.start("save_foreign", root=str(root), gate=paused.path, worker=0)
    found = paused.arrival(job)
    assert job.kill(1)
    if found["what"] == "worker":
        assert await_death(found["ppid"], 5.0)
    assert await_death(found["pid"], 5.0), "a write worker outlived its trainer"


@pytest.mark.parametrize("raising", [(0, "optimizer"), (1, "optimizer")])
def test_i6_foreign_finalizer_that_raises_fails_on_all_ranks(
    cluster: Cluster, root: Path, raising: tuple[int, str]
) -> None:
    """Would catch: a checkpoint that is committed all the same, finalizers that run again."""
    ranks = cluster.run("save_foreign", root=str(root), raising=raising)
    words = ("finalizers", f"rank {raising[0]}", "this finalizer does not work")
    assert_only_step_two_failed(ranks, root, "SaveFailed", *words)
    assert [rank["ran"] for rank in ranks] == [RAN, RAN]


def test_i6_i10_finalizer_of_the_first_part_raises_on_one_rank(
    cluster: Cluster, root: Path
) -> None:
    """The finalizers of the next part hold collectives. Would catch: one rank that runs them alone
    and waits there for the rank that raised, until the group's timeout."""
    times = {"effect_timeout_s": 4.0, "exchange_timeout_s": 8.0}
    ranks = cluster.run("save_foreign", root=str(root), raising=(1, "model"), **times)
    words = ("finalizers", "rank 1", "this finalizer does not work")
    assert_only_step_two_failed(ranks, root, "SaveFailed", *words)
    for rank in ranks:
        assert rank["ran"].count("2 model") == 1


def test_i5_finalizers_that_end_early_leave_no_payload(cluster: Cluster, root: Path) -> None:
    """Catches: a payload that stays in the queue of all requests: the next save takes it for
    another, is tracked, and cannot be loaded."""
    for rank in cluster.run("queue_jobs.leave_a_payload", root=str(root)):
        assert rank["errors"] == ["SaveFailed", None]
    directory = str(path_of(root, 2))
    assert cluster.run("stock_load", directory=directory, step=2, rows=SMALL_ROWS) == [True, True]


def test_i4_ready_made_requests_are_written_in_place(cluster: Cluster, root: Path) -> None:
    """Would catch: a request with a fixed path that is looked for in staging. A save that fails
    because of the files that finalizers of newer trainers leave beside the shards."""
    root.mkdir()
    for rank in cluster.run("save_ready_made", root=str(root)):
        assert rank["errors"] == [None, None, None]
        assert rank["all"] == [4, 5, 6]
    assert tracked_step(root) == 6
    for step in (4, 6):
        assert_complete(root, step)
        assert (path_of(root, step) / "integrity.json").exists()
        assert (path_of(root, step) / "tokenizer" / "vocab.json").exists()
        directory = str(path_of(root, step))
        assert cluster.run("stock_load", directory=directory, step=step) == [True, True]
    for rank in cluster.run("restore", root=str(root)):
        assert (rank["step"], rank["equal"]) == (6, True)


@pytest.mark.parametrize("gated", [0, 1])
def test_i2_a_second_request_for_a_directory_in_flight_fails_its_save(
    cluster: Cluster, gate: Gates, root: Path, gated: int
) -> None:
    """Would catch: a tracked checkpoint with the tensors of one request and the common state of
    another, which was made for the same directory meanwhile."""
    root.mkdir()
    paused = gate("paused")
    job = cluster.start("save_ready_made", root=str(root), gate=paused.path, gated=gated)
    paused.arrival(job)
    if gated == 1:
        assert await_file(path_of(root, 5) / receipt_name("state", 0))
    if in_shard := not (path_of(root, 4) / "common.pt").exists():  # from megatron-core 0.19 on
        (path_of(root, 5) / "common.pt").write_bytes(b"an older megatron-core writes this first")
    else:
        shutil.copyfile(path_of(root, 4) / "common.pt", path_of(root, 5) / "common.pt")
    paused.open()
    for rank in job.results():
        first, second, third = rank["errors"]
        assert (first, third) == (None, None)
        assert second["type"] == "SaveFailed"
        taken, written = (
            "was changed after the request of 'state' was taken",
            "after it was written",
        )
        if in_shard:
            taken, written = "megatron-core would load it instead of", "common.pt"
        assert (taken, written)[gated] in second["text"]
        assert rank["all"] == [4, 6]
    assert steps_on_disk(root) == [4, 6]
    assert tracked_step(root) == 6


def test_i4_ready_made_request_with_a_killed_writer_leaves_its_name(
    cluster: Cluster, gate: Gates, root: Path
) -> None:
    """Would catch: a half-written directory that stays under a published name."""
    root.mkdir()
    paused = gate("paused")
    job = cluster.start("save_ready_made", root=str(root), gate=paused.path)
    os.kill(paused.arrival(job)["pid"], signal.SIGKILL)
    for rank in job.results():
        first, second, third = rank["errors"]
        assert (first, third) == (None, None)
        assert second["type"] == "WriterDied"
        assert rank["all"] == [4, 6]
    assert steps_on_disk(root) == [4, 6]
    assert tracked_step(root) == 6
