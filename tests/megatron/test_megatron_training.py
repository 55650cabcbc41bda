"""The drop-in for Megatron-LM, under a trainer with the functions and order of ``megatron.training``."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cluster import (
    Cluster,
    Gate,
    StillRuns,
    assert_complete,
    path_of,
    states_of,
    steps_on_disk,
    tracked_step,
    transitions_of,
)

pytestmark = pytest.mark.megatron

Gates = Callable[[str], Gate]


def train(cluster: Cluster, root: Path, *, installed: bool, **args: Any) -> list[dict[str, Any]]:
    start = partial(cluster.start, "training_jobs.train", root=str(root), **args)
    job = start(installed=installed)
    try:
        return job.results()
    except StillRuns:
        if installed:
            raise
        # The writer that stock code forks for a save forks again while a thread feeds its queue. A
        # second fork that inherits a lock of that thread never ends, nor do the others.
        job.end()
        return start(installed=False).results()


def assert_began_from(ranks: list[dict[str, Any]], step: int) -> None:
    for rank in ranks:
        assert rank["error"] is None
        assert rank["start"] == step
        assert rank["loaded"] is (True if step else None)


def test_stock_code_resumes_from_our_steps(cluster: Cluster, root: Path) -> None:
    """Catches: a checkpoint that stock code cannot load, a closure that still writes the tracker, a
    last save (7, after ``terminate``) that is lost."""
    ranks = train(cluster, root, installed=True, train_iters=7)
    assert_began_from(ranks, 0)
    assert [rank["ran"] for rank in ranks] == [
        [],
        [f"{who} {step}" for step in (2, 4, 6, 7) for who in ("onelogger", "wandb")],
    ]
    assert tracked_step(root) == 7
    for step in (2, 4, 6, 7):
        assert_complete(root, step)
    assert_began_from(train(cluster, root, installed=False, train_iters=7), 7)


@pytest.mark.parametrize("async_save", [False, True])
def test_we_resume_from_steps_of_stock_code(cluster: Cluster, root: Path, async_save: bool) -> None:
    """Catches: an existing save directory that is not adopted, or that retention deletes unasked."""
    train(cluster, root, installed=False, train_iters=4, async_save=async_save)
    ranks = train(cluster, root, installed=True, train_iters=8, save_retain_interval=4)
    assert_began_from(ranks, 4)
    assert steps_on_disk(root) == [2, 4, 8]
    assert states_of(root) == {2: "tracked", 4: "tracked", 8: "tracked"}
    assert_began_from(train(cluster, root, installed=True, train_iters=8), 8)


def test_save_retain_interval_keeps_the_last_and_the_multiples(
    cluster: Cluster, root: Path
) -> None:
    """Catches: retention that is not Megatron-LM's, or that forgets across a restart."""
    for until, kept in ((6, [4, 6]), (10, [4, 8, 10])):
        train(cluster, root, installed=True, train_iters=until, save_retain_interval=4)
        assert steps_on_disk(root) == kept
        assert tracked_step(root) == until


def test_tracker_waits_for_the_writers_and_names_their_iteration(
    cluster: Cluster, gate: Gates, root: Path
) -> None:
    """Catches: a tracker at the request, closures before the save is durable, a tracker that names the
    iteration that training has come to (Megatron-Bridge #3267)."""
    paused, trained = gate("paused"), gate("trained")
    job = cluster.start(
        "training_jobs.train_on_while_saving",
        root=str(root),
        gate=paused.path,
        trained=trained.path,
    )
    paused.arrival(job)
    for _ in range(2):
        trained.arrival(job)
    assert tracked_step(root) == 2
    assert steps_on_disk(root) == [2]
    paused.open()
    trained.open(2)
    reports = [[], ["onelogger 2", "wandb 2", "onelogger 4", "wandb 4"]]
    ranks = job.results()
    assert [rank["early"] for rank in ranks] == [reports[0], reports[1][:2]]
    assert [rank["ran"] for rank in ranks] == reports
    assert tracked_step(root) == 4
    assert_complete(root, 4)
    assert_began_from(train(cluster, root, installed=False, train_iters=4), 4)


def test_retention_does_not_count_a_save_in_flight(
    cluster: Cluster, gate: Gates, root: Path
) -> None:
    """Catches: retention that keeps the newest, which is in flight, and deletes the tracked one
    (Megatron-Bridge #5184); one that forgets the older when the newer is tracked."""
    paused, retained = gate("paused"), gate("retained")
    job = cluster.start(
        "training_jobs.retain_while_saving",
        root=str(root),
        gate=paused.path,
        retained=retained.path,
    )
    paused.arrival(job)
    for _ in range(2):
        retained.arrival(job)
    assert (tracked_step(root), steps_on_disk(root)) == (2, [2])
    assert_complete(root, 2)
    assert "prunable" not in [r.dest.value for r in transitions_of(root) if r.step == 2]
    paused.open()
    retained.open(2)
    job.results()
    assert (tracked_step(root), steps_on_disk(root)) == (4, [4])


def test_killed_writer_leaves_the_tracker(cluster: Cluster, gate: Gates, root: Path) -> None:
    """Catches: finalizers after a SIGKILL (stock temporal caller): a tracker that names half a
    checkpoint, the whole one before it deleted."""
    paused = gate("paused")
    job = cluster.start(
        "training_jobs.train",
        root=str(root),
        installed=True,
        gate=paused.path,
        gated_at=4,
        save_retain_interval=100,
    )
    os.kill(paused.arrival(job)["pid"], signal.SIGKILL)
    for rank in job.results():
        assert rank["error"]["type"] == "WriterDied"
        assert rank["error"]["facts"]["step"] == 4
    assert tracked_step(root) == 2
    assert steps_on_disk(root) == [2]
    assert_began_from(train(cluster, root, installed=True), 2)
    assert tracked_step(root) == 6


def test_killed_writer_is_survived_with_a_warning(
    cluster: Cluster, gate: Gates, root: Path
) -> None:
    """Catches: ``on_failure`` that does not reach the manager."""
    paused = gate("paused")
    job = cluster.start(
        "training_jobs.train",
        root=str(root),
        installed=True,
        gate=paused.path,
        gated_at=4,
        settings={"on_failure": "warn"},
    )
    os.kill(paused.arrival(job)["pid"], signal.SIGKILL)
    assert_began_from(job.results(), 0)
    assert steps_on_disk(root) == [2, 6]
    assert tracked_step(root) == 6


@pytest.mark.parametrize("text", ["", "\x00\x00"])
def test_torn_tracker_is_mended_before_the_load(cluster: Cluster, root: Path, text: str) -> None:
    """Catches: a run that ends with status 0 because of a torn tracker (stock does: first half)."""
    train(cluster, root, installed=True)
    (root / "latest_checkpointed_iteration.txt").write_text(text)
    assert [r["exit"] for r in train(cluster, root, installed=False)] == [True, True]
    assert_began_from(train(cluster, root, installed=True), 6)
    assert tracked_step(root) == 6


@pytest.mark.parametrize("installed", [False, True])
def test_non_persistent_cleanup_spares_the_tracked_one(
    cluster: Cluster, gate: Gates, root: Path, installed: bool
) -> None:
    """The newest non-persistent directory is a partial one of a dead run. Stock goes by names: it keeps
    that one and deletes the tracked one, so that a death during the next save leaves nothing. Catches:
    the same here."""
    fast: dict[str, Any] = {"non_persistent_save_interval": 1, "non_persistent_ckpt_type": "global"}
    if not installed:
        fast["async_save"] = False  # its cleanup deletes what is in flight as well
    place = root / "non_persistent"
    train(cluster, root, installed=installed, train_iters=3, save_interval=100, **fast)
    assert tracked_step(place) == 3
    (place / "iter_0000009").mkdir()
    (place / "iter_0000009" / "__0_0.distcp").write_bytes(b"half")
    paused = gate("paused")
    job = cluster.start(
        "training_jobs.train",
        root=str(root),
        installed=installed,
        gate=paused.path,
        gated_at=4,
        train_iters=5,
        save_interval=100,
        **fast,
    )
    if installed:
        paused.arrival(job)
        job.kill(0)
        job.kill(1)
        job.wait()
        assert tracked_step(place) == 3
        assert_complete(place, 3)
    else:
        assert job.results()[0]["start"] == 3
        assert not path_of(place, 3).exists()


def test_synchronous_save_is_tracked_when_it_returns(cluster: Cluster, root: Path) -> None:
    """Catches: ``async_save=False`` that still runs the closure, or that returns before the tracker."""
    ranks = cluster.run("training_jobs.save_synchronously", root=str(root))
    for rank in ranks:
        assert rank["tracker"] == "4"
        assert rank["asked"] is False
    assert [rank["ran"] for rank in ranks] == [[], ["onelogger 4", "wandb 4"]]


def test_uninstall_restores_every_name(cluster: Cluster, root: Path) -> None:
    """Catches: a function that was imported by name elsewhere and stays, a save that is never
    polled."""
    for rank in cluster.run("training_jobs.install_and_uninstall", root=str(root)):
        assert rank["restored"]
        assert {
            "trainer_lm.training.save_checkpoint",
            "trainer_lm.training.maybe_finalize_async_save",
            "trainer_lm.training.load_checkpoint",
            "trainer_lm.checkpointing.schedule_async_save",
            "trainer_lm.checkpointing.is_empty_async_queue",
            "trainer_lm.checkpointing.dist_checkpointing",
        } <= set(rank["changed"])
        in_flight, other_format, same_place = rank["refused"]
        assert "in flight" in in_flight
        assert "torch_dist" in other_format
        assert "dataloader" in same_place


def test_a_trainer_that_saves_in_another_way_is_refused(cluster: Cluster) -> None:
    """Catches: a name that a newer trainer does not have, so that the trainer's closure writes the
    tracker."""
    none, moved, unused, older = cluster.run("training_jobs.refuse_other_trainers", ranks=0)[0]
    assert "no_such_trainer" in none and "since 0.17" in none and "clone" in none
    assert "trainer_lm.async_utils" in moved and "has no schedule_async_save" in moved
    assert "trainer_lm.checkpointing" in unused and "has no ensure_directory_exists" in unused
    for said in (moved, unused):
        assert "Tried were 0.13.1" in said and "leave install() out" in said
    assert older == "", "before 0.15"


def test_files_of_the_tokenizer_come_and_go_with_their_checkpoint(
    cluster: Cluster, root: Path
) -> None:
    """Catches: files that are left out because the closure that writes them does not run. Files
    that are in no manifest, that stay when their checkpoint goes, or that are in the way of an
    adoption."""
    assets: dict[str, Any] = {"save_tokenizer_assets": True, "save_retain_interval": 4}
    stock = {**assets, "async_save": False}
    train(cluster, root, installed=False, train_iters=2, **stock)
    assert_began_from(train(cluster, root, installed=True, train_iters=10, **assets), 2)
    assert steps_on_disk(root) == [2, 4, 8, 10], "2 is pinned"
    for step in (2, 4, 8, 10):
        vocabulary = path_of(root, step) / "tokenizer" / "vocab.json"
        assert vocabulary.read_text() == "a tokenizer of type NullTokenizer"
    for step in (4, 8, 10):
        assert_complete(root, step)
    assert_began_from(train(cluster, root, installed=False, train_iters=10, **stock), 10)


def test_a_trainer_of_its_own(cluster: Cluster, root: Path) -> None:
    """Catches: a ready request that is not tracked, an iteration twice that ends the run, a manager
    that cannot be opened again."""
    root.mkdir()
    for rank in cluster.run("training_jobs.save_alone", root=str(root)):
        assert rank["steps"] == [[2], [4], [True, False, True], [8, 9]]
    assert steps_on_disk(root) == [4, 7]
    assert tracked_step(root) == 7
    assert cluster.run("stock_load", directory=str(path_of(root, 7)), step=7) == [True, True]


def test_another_run_into_the_same_directory_is_refused(cluster: Cluster, root: Path) -> None:
    """Catches: a run whose saves are all skipped, because another one has saved their iterations."""
    train(cluster, root, installed=True, train_iters=6, save_interval=2)
    elsewhere = str(root.parent / "nothing")
    for rank in train(
        cluster, root, installed=True, train_iters=6, save_interval=2, load=elsewhere
    ):
        assert rank["error"]["type"] == "StepExistsError"
        assert rank["warned"] == ["RecoveryWarning"]
    assert tracked_step(root) == 6
    for rank in train(cluster, root, installed=True, train_iters=6, save_interval=2):
        assert rank["error"] is None, "it resumed from 6 and saves 6 again at its end"


def test_a_synchronous_save_remembers_that_it_was_one(cluster: Cluster, root: Path) -> None:
    """Catches: our way of saving in the arguments that a checkpoint keeps."""
    cluster.run("training_jobs.save_synchronously", root=str(root))
    [asked] = cluster.run("training_jobs.saved_arguments", root=str(root), iteration=4)[:1]
    assert asked is False


def test_an_error_of_stock_code_on_one_rank_is_raised_on_all(cluster: Cluster, root: Path) -> None:
    """Catches: ranks that wait for one that has left the save with a local error. The directory of
    a save that was refused, which stock code makes before it knows."""
    for rank in cluster.run("training_jobs.fail_on_one_rank", root=str(root)):
        assert rank["error"]["type"] == "SaveRefused"
        assert "OSError: a fault of this test" in rank["error"]["text"]
        assert rank["steps"] == [4]
    assert steps_on_disk(root) == [4]


def test_terminate_after_a_failed_save_gives_the_root_back(cluster: Cluster, root: Path) -> None:
    """Catches: a root that stays locked by a trainer that has left it, as it thinks."""
    for rank in cluster.run("training_jobs.fail_and_terminate", root=str(root)):
        assert rank["error"]["type"] == "SaveFailed"
        assert "a broken state" in rank["error"]["text"]
        assert rank["steps"] == []
        assert "on_failure" in rank["again"]
