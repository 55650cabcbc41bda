"""Trainers in plain torch, DistributedDataParallel and FSDP2: they save, die and go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster

pytestmark = pytest.mark.megatron

JOB = "training_state_jobs.train"


@pytest.mark.parametrize(
    ("ranks", "wrapped", "norm", "others"),
    [
        pytest.param(0, "", True, (2, "ddp"), id="plain"),
        pytest.param(2, "ddp", True, (0, ""), id="ddp"),
        pytest.param(2, "fsdp2", False, (0, ""), id="fsdp2"),
    ],
)
def test_a_trainer_goes_on_bit_for_bit(
    cluster: Cluster, root: Path, ranks: int, wrapped: str, norm: bool, others: tuple[int, str]
) -> None:
    """Catches: a moment, a generator, a loader's place or rank 0's buffers that another rank gets, or
    none; names of a wrapper in a checkpoint, so that another number of ranks cannot go on; a loader
    that begins anew there, and nobody asked for that."""
    job: dict[str, Any] = {"root": str(root), "norm": norm}
    first = cluster.run(JOB, ranks=ranks, wrapped=wrapped, until=6, seed=1, **job)
    again = cluster.run(JOB, ranks=ranks, wrapped=wrapped, until=6, seed=2, **job)
    assert {(said["error"], said["start"]) for said in first} == {(None, 0)}
    assert {(said["error"], said["start"]) for said in again} == {(None, 3)}
    for one, other in zip(first, again, strict=True):
        assert (one["at"], one["end"], one["own"]) == (other["at"], other["end"], other["own"])
    job |= {"ranks": others[0], "wrapped": others[1], "until": 3, "seed": 3}
    for said in cluster.run(JOB, **job):
        assert said["error"]["type"] == "RestoreFailed" and "'loader'" in said["error"]["text"]
    for rank, said in enumerate(cluster.run(JOB, **job, reshard_drops=["rng_state", "loader"])):
        assert said["error"] is None and said["at"] == first[0]["at"]
        assert said["own"][0] == 100 * rank, "the loader stays as it was"
