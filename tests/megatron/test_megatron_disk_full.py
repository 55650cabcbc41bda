"""F5: the disk is full, for real."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import (
    Cluster,
    Gate,
    assert_complete,
    staging_of,
    states_of,
    steps_on_disk,
    tracked_step,
)

pytestmark = pytest.mark.megatron

DISK_BYTES = 8 << 20
LEFT_BYTES = 1 << 20
BIG_ROWS = 3 << 10  # 3/4 MiB per tensor: 3 MiB in all
Gates = Callable[[str], Gate]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "ckptfsm-test", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def assert_only_the_big_one_failed(ranks: list[dict[str, Any]], root: Path, *words: str) -> None:
    for rank in ranks:
        assert rank["first"] is None
        assert rank["failed"] is not None
        assert rank["failed"]["type"] == "SaveFailed"
        for word in words:
            assert word in rank["failed"]["text"], rank["failed"]["text"]
        assert rank["latest"] == 1, "the tracked step regressed or moved on"
        assert rank["third"] is None, rank["third"]
        assert rank["all"] == [1, 3]
    assert tracked_step(root) == 3
    assert steps_on_disk(root) == [1, 3]
    assert staging_of(root) == []
    assert states_of(root) == {1: "tracked", 3: "tracked"}
    assert_complete(root, 1)
    assert_complete(root, 3)


def fill(disk: Path) -> None:
    """Leave ``LEFT_BYTES`` free. Writers that are not paused may take some meanwhile."""
    with (disk / "filler").open("wb", buffering=0) as filler:
        while (free := os.statvfs(disk)).f_bavail * free.f_frsize > LEFT_BYTES:
            filler.write(bytes(free.f_frsize))


def test_f5_full_disk_fails_the_save_and_gives_its_space_back(
    cluster: Cluster, gate: Gates, small_disk: Path
) -> None:
    """The disk fills up after the preflight. Would catch: an errno that torch masks ("unexpected
    pos"), a failure that cannot be journaled on a full disk, a partial that keeps the space."""
    root = small_disk / "root"
    paused = gate("paused")
    fault = {
        "method": "open_exclusive",
        "path": ".ckptfsm/staging/2.*_0.distcp",
        "gate": paused.path,
    }
    job = cluster.start(
        "fail_and_go_on", root=str(root), faults=[fault], big_rows=BIG_ROWS, empty=True
    )
    for _ in range(2):
        paused.arrival(job)
    fill(small_disk)
    paused.open(2)
    ranks = job.results()
    text = os.strerror(errno.ENOSPC)
    assert_only_the_big_one_failed(ranks, root, "first system error", text)
    assert ranks[0]["free"] > LEFT_BYTES - (256 << 10), "the space was not given back"


def test_f5_file_size_limit_fails_the_save_on_all_ranks(cluster: Cluster, root: Path) -> None:
    """The same without being root: one rank's files may not grow (EFBIG). Would catch: a write error
    of one rank that the other does not hear of."""
    job = cluster.start("outgrow_a_limit", root=str(root), limit=128 << 10, big_rows=BIG_ROWS)
    assert_only_the_big_one_failed(job.results(), root, "rank 1", os.strerror(errno.EFBIG))


def test_f5_f6_fsync_error_fails_the_save(cluster: Cluster, root: Path) -> None:
    """EIO from the fsync of a shard of rank 1. Would catch: an fsync with a result that is not
    looked at."""
    fault = {
        "rank": 1,
        "method": "fsync",
        "path": ".ckptfsm/staging/2.*/__1_1.distcp",
        "errno": errno.EIO,
    }
    job = cluster.start("fail_and_go_on", root=str(root), faults=[fault])
    assert_only_the_big_one_failed(job.results(), root, "rank 1", os.strerror(errno.EIO))
