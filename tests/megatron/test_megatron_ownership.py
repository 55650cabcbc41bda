"""F12, F13, F32: more than one job, or more than one manager, on one root; late reports (F11)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import (
    Cluster,
    Gate,
    assert_complete,
    await_death,
    history_of,
    staging_of,
    states_of,
    steps_on_disk,
    tracked_step,
    transitions_of,
)

from ckptfsm import CheckpointManager
from ckptfsm.writers.write_engine import WriteEngine

pytestmark = pytest.mark.megatron

Gates = Callable[[str], Gate]


def test_f12_f32_second_job_is_refused_with_host_and_pid(
    cluster: Cluster, gate: Gates, root: Path
) -> None:
    """A second job starts on a living root. Would catch: two coordinators on one root, a refusal that
    only rank 0 hears of, a refused start that disturbs the owner."""
    held = gate("held")
    owner = cluster.start("hold", root=str(root), gate=held.path)
    holder = held.arrival(owner)
    for rank in cluster.run("restore", root=str(root)):
        assert rank["error"] is not None
        assert rank["error"]["type"] == "RootBusy"
        facts = rank["error"]["facts"]
        assert (facts["host"], facts["pid"]) == (holder["what"], owner.pids[0])
        assert str(owner.pids[0]) in rank["error"]["text"]
    held.open()
    for rank in owner.results():
        assert (rank["first"], rank["second"], rank["left"]) == (None, None, None)
        assert rank["all"] == [1, 2]
    assert history_of(root).newest_epoch == 1, "the refused job left a mark"
    for rank in cluster.run("restore", root=str(root)):
        assert (rank["step"], rank["equal"]) == (2, True)


def test_f12_second_manager_of_one_process_is_refused(cluster: Cluster, root: Path) -> None:
    """POSIX locks do not hold against the same process, and closing the lock file drops them. Would
    catch: a second manager that gets in, or that costs the first one its lock."""
    (only,) = cluster.run("own_twice", ranks=0, root=str(root))
    assert only["busy"]["type"] == "RootBusy"
    assert only["busy"]["facts"]["pid"] == only["pid"]
    assert only["errors"] == [None, None, None]
    assert only["all"] == [1, 2, 3]


def test_f12_a_constructor_that_is_interrupted_keeps_no_root(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a root that is busy until the process ends, owned by a manager that nothing can close."""

    def interrupted(engine: WriteEngine) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(WriteEngine, "warm_up", interrupted)
        with pytest.raises(KeyboardInterrupt):
            CheckpointManager(str(root))
    with CheckpointManager(str(root)) as manager:
        assert manager.all_steps() == []


def test_f12_takeover_fences_the_first_job(cluster: Cluster, gate: Gates, root: Path) -> None:
    """The first job only seemed to be gone. Would catch: effects of two owners that interleave."""
    held = gate("held")
    first = cluster.start("hold", root=str(root), gate=held.path)
    held.arrival(first)
    for rank in cluster.run("save_steps", root=str(root), steps=[5], takeover=True):
        assert (rank["restored"], rank["errors"], rank["all"]) == (1, [None], [1, 5])
    held.open()
    for rank in first.results():
        assert rank["second"] is not None, "a fenced job went on saving"
        assert rank["second"]["type"] == "Fenced"
    assert tracked_step(root) == 5
    assert steps_on_disk(root) == [1, 5]
    assert staging_of(root) == []
    assert states_of(root) == {1: "tracked", 5: "tracked"}


def test_f13_writer_of_a_fenced_job_wakes_up(cluster: Cluster, gate: Gates, root: Path) -> None:
    """The takeover comes while a writer of the first job stands in its shard; then it goes on. Would
    catch: a zombie writer that brings its directory back, a zombie coordinator that publishes."""
    paused = gate("paused")
    fault = {
        "rank": 1,
        "method": "fsync",
        "path": ".ckptfsm/staging/2.*/__1_0.distcp",
        "gate": paused.path,
    }
    first = cluster.start("save_and_stay", root=str(root), tracked=[1], then=2, faults=[fault])
    worker = paused.arrival(first)
    for rank in cluster.run("save_steps", root=str(root), steps=[2], takeover=True):
        assert (rank["restored"], rank["errors"], rank["all"]) == (1, [None], [1, 2])
    paused.open()
    for rank in first.results():
        assert rank["error"] is not None, "a fenced job acknowledged a save"
    assert await_death(worker["pid"])
    assert first.living() == []
    assert tracked_step(root) == 2
    assert steps_on_disk(root) == [1, 2]
    assert staging_of(root) == []
    assert_complete(root, 2)
    tracked = [r.epoch for r in transitions_of(root) if r.step == 2 and r.dest.value == "tracked"]
    assert tracked == [2]
    for rank in cluster.run("restore", root=str(root)):
        assert (rank["step"], rank["equal"]) == (2, True)


def test_f11_reports_of_an_earlier_attempt_do_not_count(
    cluster: Cluster, gate: Gates, root: Path
) -> None:
    """An attempt failed; its completion comes while the next attempt at the same step is in flight.
    Would catch: a stale completion that finalizes the next save, or a late failure that kills it."""
    paused, middle = gate("paused"), gate("middle")
    fault = {"method": "fsync", "path": ".ckptfsm/staging/1.*.a2/__0_0.distcp", "gate": paused.path}
    job = cluster.start(
        "meet_stale_reports", ranks=0, root=str(root), faults=[fault], middle=middle.path
    )
    middle.arrival(job)
    assert steps_on_disk(root) == [], "a stale report finalized the attempt in flight"
    paused.arrival(job)
    middle.open()
    paused.open()
    (only,) = job.results()
    first, second = only["errors"]
    assert first["type"] == "WriterDied"
    assert second is None
    assert only["states"] == ["none", "forked", "tracked"]
    assert only["all"] == [1]
    assert states_of(root) == {1: "tracked"}
    assert_complete(root, 1)


def test_f10_wrong_world_size_fails_the_attempt(cluster: Cluster, gate: Gates, root: Path) -> None:
    """A report from a job of another size. Would catch: a checkpoint committed with ranks missing."""
    paused, middle = gate("paused"), gate("middle")
    fault = {"method": "fsync", "path": ".ckptfsm/staging/1.*/__0_0.distcp", "gate": paused.path}
    (only,) = cluster.run(
        "meet_wrong_world_size", ranks=0, root=str(root), faults=[fault], middle=middle.path
    )
    first, second = only["errors"]
    assert first["type"] == "SaveFailed"
    assert "wrong_world_size" in first["text"]
    assert second is None
    assert only["all"] == [2]
    assert staging_of(root) == []
