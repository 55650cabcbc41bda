"""A real GPT: bit-for-bit resumption, and restoring under another world size."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import Cluster, tracked_step

pytestmark = pytest.mark.megatron


def test_gpt_resumes_bit_for_bit_and_reshards_with_a_warning(cluster: Cluster, root: Path) -> None:
    """TP=2 on two ranks, again on two ranks, then TP=1 on one. Would catch: state that is not in the
    checkpoint (the next loss differs), a restore under another sharding that fails or stays silent
    about the generator state it dropped."""
    first = cluster.run("train_gpt", root=str(root), tp=2, until=4, save_at=2)
    assert first[0]["losses"] == first[1]["losses"]
    assert [rank["latest"] for rank in first] == [2, 2]

    for rank in cluster.run("train_gpt", root=str(root), tp=2, until=4, save_at=4):
        assert (rank["restored"], rank["dropped"]) == (2, [])
        assert "ReshardWarning" not in rank["warnings"]
        assert rank["losses"] == {step: first[0]["losses"][step] for step in ("3", "4")}
    assert tracked_step(root) == 4

    (alone,) = cluster.run("train_gpt", ranks=1, root=str(root), tp=1, until=6, save_at=6)
    assert (alone["restored"], alone["dropped"]) == (4, ["rng_state"])
    assert "ReshardWarning" in alone["warnings"]
    assert list(alone["losses"]) == ["5", "6"]
    before, after = float.fromhex(first[0]["losses"]["4"]), float.fromhex(alone["losses"]["5"])
    assert abs(after - before) < 0.5, "these are not the trained weights"
    assert tracked_step(root) == 6


def test_a_gpt_of_stock_is_adopted_and_goes_on_under_another_sharding(
    cluster: Cluster, root: Path
) -> None:
    """Megatron-core alone saves it, TP=2 on two ranks. Would catch: a run of stock that is adopted
    without part of its state, or that only the same sharding can load."""
    losses = cluster.run("train_gpt_in_stock", root=str(root), tp=2, until=4, save_at=2)[0]
    assert not (root / ".ckptfsm").exists()
    (alone,) = cluster.run("train_gpt", ranks=1, root=str(root), tp=1, until=3, save_at=9)
    assert (alone["restored"], alone["dropped"]) == (2, ["rng_state"])
    before, after = float.fromhex(losses["2"]), float.fromhex(alone["losses"]["3"])
    assert abs(after - before) < 0.5, "these are not the trained weights"
    for rank in cluster.run("train_gpt", root=str(root), tp=2, until=4, save_at=4):
        assert (rank["restored"], rank["dropped"], rank["latest"]) == (2, [], 4)
        assert rank["losses"] == {step: losses[step] for step in ("3", "4")}
    assert tracked_step(root) == 4
