"""Saves by the persistent writer process: the same files, the same promises, and no torn state."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from cluster import (
    Cluster,
    assert_complete,
    path_of,
    staging_of,
    states_of,
    steps_on_disk,
    tracked_step,
    transitions_of,
)

pytestmark = pytest.mark.megatron

ENGINES = ("eager", "gated")
MIB_OF_FLOATS = 1 << 18


@pytest.mark.parametrize("engine", ENGINES)
def test_saves_are_tracked_pruned_restored_and_stock_loadable(
    cluster: Cluster, root: Path, engine: str
) -> None:
    """Catches: a checkpoint of the engine that stock megatron-core cannot load, or that the life
    cycle treats otherwise than a forked writer's."""
    keep = {"retention": {"latest_n": 2}, "engine": engine}
    ranks = cluster.run("save_steps", root=str(root), steps=[1, 2, 3], **keep)
    for rank in ranks:
        assert (rank["errors"], rank["all"]) == ([None] * 3, [2, 3])
        assert len(rank["children"]) == 1, "one writer process stays"
    assert (steps_on_disk(root), tracked_step(root), staging_of(root)) == ([2, 3], 3, [])
    way = ["requested", "forked", "shards_written", "finalized", "tracked"]
    assert [r.dest.value for r in transitions_of(root) if r.step == 3] == way
    for step in (2, 3):
        assert_complete(root, step)
        directory = str(path_of(root, step))
        assert cluster.run("stock_load", directory=directory, step=step) == [True, True]
    for rank in cluster.run("restore", root=str(root), then=4, engine=engine):
        assert (rank["step"], rank["equal"], rank["error"], rank["save"]) == (3, True, None, None)


@pytest.mark.parametrize("engine", ENGINES)
def test_files_are_those_of_a_forked_writer(cluster: Cluster, tmp_path: Path, engine: str) -> None:
    """Catches: a byte that torch.save writes otherwise; an item at another place in its file."""
    for name in ("fork", engine):
        cluster.run("save_steps", root=str(tmp_path / name), steps=[1], engine=name)
    directories = [path_of(tmp_path / name, 1) for name in ("fork", engine)]
    names = [sorted(p.name for p in each.iterdir() if p.is_file()) for each in directories]
    assert names[0] == names[1]
    for name in names[0]:
        forked, written = ((each / name).read_bytes() for each in directories)
        if name != ".metadata":  # has the path of its directory, and an id
            assert written == forked, name


@pytest.mark.parametrize("engine", ENGINES)
def test_where_memory_cannot_be_read_files_are_the_same(
    cluster: Cluster, tmp_path: Path, engine: str
) -> None:
    """Their bytes are those of a forked writer, which stock code loads. Catches: a container that
    refuses ``process_vm_readv``, and writes other bytes, or forks."""
    root = tmp_path / engine
    cluster.run("save_steps", root=str(tmp_path / "fork"), steps=[1, 2], rows=20000, engine="fork")
    for rank in cluster.run(
        "engine_jobs.save_refused", root=str(root), steps=[1, 2], rows=20000, engine=engine
    ):
        assert (rank["errors"], rank["all"]) == ([None] * 2, [1, 2])
        assert len(rank["children"]) == 1, "one writer process stays"
    for file in path_of(tmp_path / "fork", 2).iterdir():
        if file.suffix == ".distcp":
            assert (path_of(root, 2) / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("refuse", [False, True])
def test_a_shared_optimizer_is_gated_where_memory_cannot_be_read(
    cluster: Cluster, root: Path, refuse: bool
) -> None:
    """Catches: a copy of state that the writer process shares; a torn one; a step that leaves the
    shared memory; a gate that is open while it is read."""
    job = "engine_jobs.save_shared"
    settings = {"size": 2 * MIB_OF_FLOATS, "refuse": refuse, "engine": "gated"}
    for rank in cluster.run(job, root=str(root), **settings):
        assert rank["shared"] == 3 * 2 * MIB_OF_FLOATS * 4
        assert rank["equal"] == [True, True]
        assert rank["gated"] == [True, True]
        assert rank["arenas"] == [False, False]
        assert rank["segments"] == [1, 1]
    assert cluster.run("engine_jobs.latest", root=str(root)) == [2, 2]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_ctrl_c_is_heard_while_a_writer_does_not_greet(
    cluster: Cluster, root: Path, victim: int
) -> None:
    """Catches: a stopped writer process that makes ``save`` deaf; a rank that waits for the interrupted
    one; a process that is left behind."""
    ranks = cluster.run("engine_jobs.interrupt_hello", root=str(root), victim=victim)
    for number, rank in enumerate(ranks):
        assert rank["interrupted"] == (number == victim)
        assert rank["failed"] is not None
        assert f"rank {victim}: KeyboardInterrupt" in rank["failed"]["text"]
        assert (rank["second"], rank["all"], rank["children"]) == (None, [2], 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_gpt_resumes_bit_for_bit(cluster: Cluster, root: Path, engine: str) -> None:
    """Catches: a weight of a later step in a checkpoint: the next loss differs."""
    first = cluster.run("train_gpt", root=str(root), tp=2, until=4, save_at=2, engine=engine)
    assert [rank["latest"] for rank in first] == [2, 2]
    for rank in cluster.run("train_gpt", root=str(root), tp=2, until=4, save_at=4, engine=engine):
        assert rank["restored"] == 2
        assert rank["losses"] == {step: first[0]["losses"][step] for step in ("3", "4")}


def with_a_killed_writer(cluster: Cluster, root: Path, victim: int, engine: str) -> list[Any]:
    """Save three times; the writer of one rank is killed when it has read the second state."""
    settings = {"number": int(signal.SIGKILL), "rows": 1000, "engine": engine}
    return cluster.run("engine_jobs.strike_writer", root=str(root), victim=victim, **settings)


@pytest.mark.parametrize("victim", [0, 1])
def test_f1_a_killed_writer_of_an_eager_save_begins_again(
    cluster: Cluster, root: Path, victim: int
) -> None:
    """Catches: a save that is lost with a process though its whole copy is still there."""
    for rank in with_a_killed_writer(cluster, root, victim, "eager"):
        assert (rank["first"], rank["failed"], rank["third"]) == (None, None, None)
        assert rank["all"] == [1, 2, 3]
    assert (tracked_step(root), staging_of(root)) == (3, [])


@pytest.mark.parametrize("victim", [0, 1])
def test_f1_a_killed_writer_fails_the_save_on_all_ranks(
    cluster: Cluster, root: Path, victim: int
) -> None:
    """Catches: a dead writer process that counts, that hangs the job, or is used for the next save."""
    for rank in with_a_killed_writer(cluster, root, victim, "gated"):
        assert (rank["first"], rank["third"]) == (None, None)
        assert rank["failed"] is not None
        assert rank["failed"]["type"] == "WriterDied", rank["failed"]["text"]
        assert f"rank {victim}: killed by SIGKILL" in rank["failed"]["text"]
        assert rank["all"] == [1, 3]
    assert (tracked_step(root), staging_of(root)) == (3, [])


def test_f1_a_writer_that_is_killed_while_it_reads_begins_again(
    cluster: Cluster, root: Path
) -> None:
    """Catches: a save that is lost though its state was still there; one with the next step's state;
    a gate that opens with the death of the writer."""
    ranks = cluster.run(
        "engine_jobs.strike_reader", root=str(root), victim=1, size=4 * MIB_OF_FLOATS
    )
    for rank in ranks:
        assert (rank["failed"], rank["equal"], rank["third"]) == (None, True, None)
        assert (rank["all"], rank["same"]) == ([1, 2, 3], False)
    assert states_of(root) == {1: "tracked", 2: "tracked", 3: "tracked"}


def test_f1_a_stopped_writer_meets_its_deadline(cluster: Cluster, root: Path) -> None:
    """Catches: a gate, or a save, that waits for ever for a writer that does not run."""
    ranks = cluster.run(
        "engine_jobs.strike_writer",
        root=str(root),
        victim=1,
        number=int(signal.SIGSTOP),
        rows=1000,
        engine="gated",
        writer_timeout_s=6.0,
    )
    for rank in ranks:
        assert rank["failed"]["facts"]["reason"] == "writer_hung"
        assert (rank["third"], rank["all"]) == (None, [1, 3])


@pytest.mark.parametrize("engine", ENGINES)
def test_no_checkpoint_is_torn(cluster: Cluster, root: Path, engine: str) -> None:
    """Catches: a gate that opens early; memory that is read after it may change."""
    settings = {"saves": 5, "size": 4 * MIB_OF_FLOATS, "engine": engine}
    assert cluster.run("engine_jobs.update_as_early_as_allowed", root=str(root), **settings) == [
        [],
        [],
    ]


@pytest.mark.parametrize("how", ["in place", "moved"])
def test_a_state_that_changes_too_early_fails_its_save(
    cluster: Cluster, root: Path, how: str
) -> None:
    """Catches: a torn checkpoint that is tracked, because a trainer forgot ``before_update``."""
    job = "engine_jobs.update_too_early"
    for rank in cluster.run(job, root=str(root), how=how, size=4 * MIB_OF_FLOATS):
        assert rank["failed"] is not None
        assert rank["failed"]["facts"]["reason"] == "state_changed"
        assert "before the writer had read it" in rank["failed"]["text"]
        assert (rank["third"], rank["all"]) == (None, [1, 3])
    assert states_of(root) == {1: "tracked", 3: "tracked"}


def test_leaving_takes_a_save_that_is_still_read(cluster: Cluster, root: Path) -> None:
    """Catches: a save whose writer waits for a confirmation that is never sent."""
    cluster.run("engine_jobs.leave_in_flight", root=str(root), size=MIB_OF_FLOATS)
    assert cluster.run("engine_jobs.latest", root=str(root)) == [1, 1]


@pytest.mark.parametrize("engine", ["fork", "eager", "gated"])
def test_a_save_is_tracked_while_its_trainer_computes(
    cluster: Cluster, root: Path, engine: str
) -> None:
    """Catches: durable shards that wait for the next call of a trainer, which may come after hours."""
    job = "engine_jobs.save_without_polling"
    for rank in cluster.run(job, root=str(root), engine=engine):
        assert rank["seen"] == [1, None]
        assert (rank["failed"], rank["all"]) == (None, [1])
    way = ["requested", "forked", "shards_written", "finalized", "tracked"]
    assert [r.dest.value for r in transitions_of(root)] == way
