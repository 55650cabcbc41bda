"""F31: one rank fails inside ``save()``; no rank may be left waiting, and no rank may go on alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, staging_of, states_of, steps_on_disk, tracked_step

pytestmark = pytest.mark.megatron


def assert_went_on(ranks: list[dict[str, Any]], root: Path) -> None:
    for rank in ranks:
        assert rank["first"] is None
        assert rank["latest"] == 1
        assert rank["third"] is None
        assert rank["all"] == [1, 3]
        assert rank["children"] == []
    assert tracked_step(root) == 3
    assert steps_on_disk(root) == [1, 3]
    assert staging_of(root) == []
    assert states_of(root) == {1: "tracked", 3: "tracked"}


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        ("no state", "rank 1 cannot prepare the save"),
        ("object", "rank 1 cannot prepare the save"),
        ("overlap", "part 'state': key 'w': ranks 0, 1 each have it with the replica_id 0"),
        ("step", "rank 1 asks for step 7"),
    ],
)
def test_f31_bad_state_on_one_rank_is_refused_on_all(
    cluster: Cluster, root: Path, fault: str, word: str
) -> None:
    """Would catch: a rank that raises between two collectives and leaves the others in the second,
    an attempt that stays in flight after a refusal."""
    ranks = cluster.run("fail_in_save", root=str(root), fault=fault)
    for rank in ranks:
        assert rank["raised"] is not None, f"accepted; poll said {rank['polled']}"
        assert rank["raised"]["type"] == "SaveRefused", rank["raised"]["text"]
        assert word in rank["raised"]["text"]
    assert_went_on(ranks, root)


@pytest.mark.parametrize("victim", [0, 1])
def test_f31_failed_fork_on_one_rank_fails_the_save_on_all(
    cluster: Cluster, root: Path, victim: int
) -> None:
    """A rank is out of descriptors (for real) when it should fork its writer. Would catch: a local
    error raised from ``save``, a healthy writer of the other rank that is never ended."""
    ranks = cluster.run("fail_in_save", root=str(root), fault="descriptors", rank=victim)
    for rank in ranks:
        error = rank["raised"] or rank["polled"]
        assert error is not None, "the save of a rank without a writer went well"
        assert error["type"] in ("SaveRefused", "SaveFailed"), error["text"]
        assert "Too many open files" in error["text"]
        if victim == 1:
            assert rank["raised"] is None, "raised between the collectives"
            assert "rank 1" in error["text"]
    assert_went_on(ranks, root)
