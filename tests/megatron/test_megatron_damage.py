"""F21: a checkpoint is damaged on disk between two jobs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import (
    Cluster,
    ForkServer,
    common_file,
    path_of,
    states_of,
    steps_on_disk,
    tracked_step,
)

pytestmark = pytest.mark.megatron


def flip(directory: Path) -> None:
    """A flipped bit, in the middle of a shard."""
    flip_in(directory / "__1_0.distcp")


def flip_in(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_metadata(directory: Path) -> None:
    flip_in(directory / ".metadata")


def flip_common(directory: Path) -> None:
    flip_in(directory / common_file(0))


def truncate(directory: Path) -> None:
    path = directory / "__1_0.distcp"
    os.truncate(path, path.stat().st_size - 1)


def remove(directory: Path) -> None:
    (directory / "__0_1.distcp").unlink()


def swap(directory: Path) -> None:
    one, other = directory / "__0_1.distcp", directory / "__1_1.distcp"
    assert one.stat().st_size == other.stat().st_size, "sizes alone would tell"
    assert one.read_bytes() != other.read_bytes()
    aside = directory / "aside"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def add(directory: Path) -> None:
    shutil.copy(directory / "__1_0.distcp", directory / "__2_0.distcp")


DAMAGES: list[Callable[[Path], None]] = [
    flip,
    flip_metadata,
    flip_common,
    truncate,
    remove,
    swap,
    add,
]


@pytest.fixture(scope="module")
def saved(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Roots with the steps 1 and 2, and with step 1 only, to be copied."""
    place = tmp_path_factory.mktemp("saved")
    with Cluster(fork_server, place / "jobs") as cluster:
        cluster.run("save_steps", root=str(place / "two"), steps=[1, 2])
        cluster.run("save_steps", root=str(place / "one"), steps=[1])
    return place


@pytest.mark.parametrize("damage", DAMAGES)
def test_f21_damaged_checkpoint_falls_back_to_the_one_before(
    cluster: Cluster, saved: Path, root: Path, damage: Callable[[Path], None]
) -> None:
    """Would catch: damaged tensors that are loaded, a start from zero while a good checkpoint is
    there, a damaged checkpoint that is deleted, a tracker that still names it."""
    shutil.copytree(saved / "two", root)
    damage(path_of(root, 2))
    for rank in cluster.run("restore", root=str(root), then=3):
        assert rank["error"] is None, rank["error"]
        assert (rank["step"], rank["equal"]) == (1, True)
        assert (rank["save"], rank["all"]) == (None, [1, 3])
    assert tracked_step(root) == 3
    assert steps_on_disk(root) == [1, 3]
    assert states_of(root) == {1: "tracked", 2: "quarantined", 3: "tracked"}
    (kept,) = (root / ".ckptfsm" / "quarantine").iterdir()
    assert kept.name.startswith("2.e1.")
    assert (kept / ".metadata").exists()


def test_f21_damaged_checkpoint_that_was_asked_for_raises(
    cluster: Cluster, saved: Path, root: Path
) -> None:
    """Would catch: another step than the one that was asked for."""
    shutil.copytree(saved / "two", root)
    flip(path_of(root, 2))
    for rank in cluster.run("restore", root=str(root), step=2):
        assert rank["error"] is not None
        assert rank["error"]["type"] == "DamagedRoot"
        assert "__1_0.distcp" in rank["error"]["text"]
    assert steps_on_disk(root) == [1, 2]
    for rank in cluster.run("restore", root=str(root), step=1):
        assert (rank["step"], rank["equal"]) == (1, True)


@pytest.mark.parametrize("damage", [flip, truncate, remove])
def test_f21_damage_of_the_only_checkpoint_raises(
    cluster: Cluster, saved: Path, root: Path, damage: Callable[[Path], None]
) -> None:
    """Would catch: a silent start from zero (I8), and a repair that destroys what a person needs."""
    shutil.copytree(saved / "one", root)
    damage(path_of(root, 1))
    for rank in cluster.run("restore", root=str(root)):
        assert (rank["step"], rank["equal"]) == (None, None)
        assert rank["error"] is not None, "began from zero"
        assert rank["error"]["type"] == "DamagedRoot"
    assert steps_on_disk(root) == [1]
    assert tracked_step(root) == 1
