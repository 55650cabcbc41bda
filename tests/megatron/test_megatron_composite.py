"""Composite checkpoints of real state: parts on different ranks, and groups under a controller."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path

import pytest
from cluster import Cluster, assert_complete, common_file, tracked_step

from ckptfsm.ranks.controller import Controller
from ckptfsm.ranks.tickets import GroupPart

pytestmark = pytest.mark.megatron


def test_parts_of_different_ranks_are_one_checkpoint(cluster: Cluster, root: Path) -> None:
    """Would catch: a part planned or completed by a rank that does not have it."""
    for rank, said in enumerate(cluster.run("save_composite", root=str(root))):
        mine = ("actor", "critic")[rank]
        assert said == {"error": None, "mine": True, "both": True, "parts": sorted(["both", mine])}
    assert tracked_step(root) == 7
    assert_complete(root, 7)
    step = root / "iter_0000007"
    assert (step / "tokenizer/vocab.txt").read_text() == "of rank 1"
    for part, rank in (("actor", 0), ("critic", 1)):
        files = {p.name for p in (step / part).iterdir()} - {".metadata", "metadata.json"}
        assert files == {f"__{rank}_0.distcp", f"__{rank}_1.distcp", common_file(rank)}
        (loaded,) = cluster.run("stock_load", ranks=1, directory=str(step / part), step=7 + rank)
        assert loaded, "megatron-core's own loader reads each part"


@pytest.mark.parametrize("engine", ["fork", "auto", "gated"])
def test_groups_under_a_controller_write_steps_that_stock_code_loads(
    cluster: Cluster, root: Path, engine: str
) -> None:
    """Would catch: a part that a controller without torch leaves without its metadata, a writer
    process that cannot complete it, or that waits for a confirmation which is never sent."""
    controller = Controller(root, {"actor": 2, "critic": 1}, lambda doomed: [], layout="verl")
    save = controller.begin(
        5,
        {"actor": GroupPart("actor"), "critic": GroupPart("critic"), "data.pt": b"position"},
    )
    jobs = [
        cluster.start(
            "work_in_a_group",
            ranks=ticket.size,
            root=str(root),
            ticket=base64.b64encode(pickle.dumps(ticket)).decode(),
            engine=engine,
        )
        for ticket in save.tickets.values()
    ]
    for job in jobs:
        for reports in job.results():
            controller.feed(pickle.loads(base64.b64decode(report)) for report in reports)
    save.handle.wait()
    controller.close()
    step = root / "global_step_5"
    assert tracked_step(root) == 5
    for part, ranks in (("actor", 2), ("critic", 1)):
        directory = str(step / part / "model/dist_ckpt")
        assert cluster.run("stock_load", ranks=ranks, directory=directory, step=5) == [True] * ranks
        assert (step / part / "extra/dist_ckpt/.metadata").exists()
