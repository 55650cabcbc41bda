"""Whose memory a writer reads: a state that changes behind ``save``."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import Cluster

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
