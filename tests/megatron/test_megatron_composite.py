"""Composite checkpoints of real state: parts on different ranks, and groups under a controller."""

from __future__ import annotations

import base64
import pickle
from pathlib import Path

import numpy as np
import pytest
from cluster import Cluster, assert_complete, common_file, tracked_step

from ckptfsm import GroupWorker, PerRank
from ckptfsm.core.errors import SaveRefused
from ckptfsm.megatron.torch_dist import keeps_common_in_shard
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


def test_what_differs_by_rank_is_kept_for_each_or_told(cluster: Cluster, root: Path) -> None:
    """Would catch: a loader's position or a generator of one rank that all ranks get, without a
    word; a ``make`` with a collective that waits for ranks which never call it; a value of each rank
    that another number of ranks takes for its own."""
    told = cluster.run("save_of_each_rank", root=str(root))
    for rank, said in enumerate(told):
        assert said["error"] is None
        assert said["loader"] == {"position": 100 + rank}
        assert said["generator"] == f"of rank {rank}"
        assert (root / said["export"] / f"of_{rank}.txt").read_text() == "[0, 1]"
        assert said["stuck"]["type"] == "SaveFailed" and "every_rank=True" in said["stuck"]["text"]
    assert told[1]["warned"] == []
    (warned,) = told[0]["warned"]
    assert "step 9: part 'state': key 'loader.position' of rank 1" in warned
    assert_complete(root, 7)
    (said,) = cluster.run("restore_on_one_rank", ranks=1, root=str(root), drops=False)
    assert said["error"]["type"] == "RestoreFailed" and "reshard_drops" in said["error"]["text"]
    (said,) = cluster.run("restore_on_one_rank", ranks=1, root=str(root), drops=True)
    assert said["error"] is None and "loader" not in said["keys"] and "step" in said["keys"]


@pytest.mark.parametrize("engine", ["fork", "auto", "gated"])
def test_groups_under_a_controller_write_steps_that_stock_code_loads(
    cluster: Cluster, root: Path, engine: str
) -> None:
    """Would catch: a part that a controller without torch leaves without its metadata, a writer
    process that cannot complete it, or that waits for a confirmation which is never sent."""
    controller = Controller(root, {"actor": 2, "critic": 1}, lambda failed: [], layout="verl")
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
            engine=engine if ticket.size > 1 else "fork",  # a writer process imports torch for it
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


def test_a_value_of_each_rank_is_found_whatever_else_its_group_names(root: Path) -> None:
    """Would catch: a key with a number in it, which a tree more or less in the group changes."""
    worker = GroupWorker(root, engine="fork")
    with Controller(root, {"actor": 1}, worker.poll) as controller:
        save = controller.begin(5, {"actor": GroupPart("actor")})
        trees = {"export": {"a": 1}, "loader": PerRank({"position": 7})}
        controller.feed(worker.write(save.tickets["actor"], parts=trees))
        save.handle.wait()
        with controller.reading() as found:
            assert found is not None
            for others in ({}, {"export": {"a": 0}}):
                wanted = {**others, "loader": PerRank(None)}
                restored = worker.restore(found, "actor", parts=wanted)
                assert restored.parts["loader"] == {"position": 7}
    worker.close()


@pytest.mark.skipif(keeps_common_in_shard(), reason="its loader takes any class")
def test_I12_a_value_of_a_group_is_refused_by_name(root: Path) -> None:
    """Would catch: a value that no restore loads, told to the controller as a failed fork."""
    worker = GroupWorker(root, engine="fork")
    with Controller(root, {"actor": 1}, worker.poll) as controller:
        save = controller.begin(5, {"actor": GroupPart("actor")})
        controller.feed(worker.write(save.tickets["actor"], {"lr": np.float64(1)}))
        with pytest.raises(SaveRefused, match=r"\['lr'\], of type numpy.float64.*save x.item\(\)"):
            save.handle.wait()
    worker.close()
