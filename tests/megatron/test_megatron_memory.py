"""Whose memory a writer reads: a state that changes behind ``save``, an offloaded optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import Cluster, tracked_step

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize(
    ("kind", "copied"), [("whole", False), ("part", False), ("scattered", True), ("shared", True)]
)
def test_cpu_tensors_are_frozen_by_the_fork_or_copied(
    cluster: Cluster, root: Path, kind: str, copied: bool
) -> None:
    """Would catch: memory that a fork shares written as it is later (torn), a second copy of memory that
    the fork freezes, a view written with all of its storage."""
    (said,) = cluster.run("save_what_changes", ranks=1, root=str(root), kind=kind)
    assert said["equal"], "it was written after it was changed"
    assert said["copied"] == copied
    assert said["excess"] < 4096


def test_an_offloaded_optimizer_is_loaded_around_each_save(cluster: Cluster, root: Path) -> None:
    """Would catch: moments of before they were loaded or after the next step, an accelerator that
    the library keeps full. A rank left in a collective when another is out of memory."""
    ranks = cluster.run("save_offloaded", root=str(root))
    for said in ranks:
        first, second, third = said["errors"]
        assert (first, third) == (None, None)
        assert second["type"] == "SaveRefused"
        assert "rank 1" in second["text"] and "out of memory" in second["text"]
        assert said["equal"] == [True, True]
        assert said["held"] == [0, 0, 0], "the loaded moments could not be freed"
        saved = ["load", "state", "offload", "state"]
        assert said["calls"] == [*saved, "load", "offload", *saved]
        assert said["steps"] == [1, 3]
    assert tracked_step(root) == 3
