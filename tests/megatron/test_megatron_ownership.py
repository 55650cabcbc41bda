"""F12, F13, F32: more than one job on one root."""

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
    # Half of the time for an effect is waited for a short command to give the root back.
    for rank in cluster.run("restore", root=str(root), effect_timeout_s=2.0):
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
