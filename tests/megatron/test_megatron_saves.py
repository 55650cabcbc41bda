"""The good way: real saves of two ranks, retention, a new job, megatron-core's loader."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cluster import (
    Cluster,
    assert_complete,
    common_file,
    history_of,
    path_of,
    staging_of,
    states_of,
    steps_on_disk,
    tracked_step,
    transitions_of,
)

pytestmark = pytest.mark.megatron


def test_saves_are_tracked_pruned_restored_and_stock_loadable(cluster: Cluster, root: Path) -> None:
    """Would catch: a save acknowledged before it is tracked, retention that forgets or takes too
    much, a checkpoint that only our loader reads, leftovers, a manager process of megatron's."""
    retention = {"latest_n": 2, "every_n_steps": 3}
    ranks = cluster.run("save_steps", root=str(root), steps=[1, 2, 3, 4, 5], retention=retention)
    for rank in ranks:
        assert rank["restored"] is None
        assert rank["errors"] == [None] * 5
        assert (rank["all"], rank["latest"]) == ([3, 4, 5], 5)
        assert rank["children"] == [], "a process outlived the saves"
        assert not rank["stock_queue"], "megatron's shared results queue was made"
    assert ranks[0]["seen"] == ranks[1]["seen"], "the ranks saw different transitions"
    assert steps_on_disk(root) == [3, 4, 5]
    assert tracked_step(root) == 5
    assert staging_of(root) == []
    assert states_of(root) == {3: "tracked", 4: "tracked", 5: "tracked"}
    for step in (3, 4, 5):
        assert_complete(root, step)
    names = {p.name for p in path_of(root, 5).iterdir()}
    shards = {f"__{rank}_{n}.distcp" for rank in (0, 1) for n in (0, 1)}
    assert names == {".ckptfsm", ".metadata", "metadata.json", common_file(0)} | shards

    way = ["requested", "forked", "shards_written", "finalized", "tracked"]
    assert [r.dest.value for r in transitions_of(root) if r.step == 5] == way
    assert [r.dest.value for r in transitions_of(root) if r.step == 2] == [
        *way,
        "prunable",
        "pruned",
    ]

    again = cluster.run("restore", root=str(root), then=6, retention=retention)
    for rank in again:
        assert (rank["step"], rank["equal"], rank["error"]) == (5, True, None)
        assert rank["save"] is None
        assert rank["all"] == [3, 5, 6], "retention forgot the saves of the earlier run (F26)"
    assert history_of(root).newest_epoch == 2
    for step in (3, 5, 6):
        directory = str(path_of(root, step))
        assert cluster.run("stock_load", directory=directory, step=step) == [True, True]


def test_a_key_that_one_rank_misnames_is_named_on_all(cluster: Cluster, root: Path) -> None:
    """Catches: a rank that raises before the load, and the other in the load's collectives for ever."""
    ranks = cluster.run("restore_what_rank_1_misnames", root=str(root))
    for rank in ranks:
        assert (rank["save"], rank["equal"], rank["error"]["type"]) == (None, True, "RestoreFailed")
        assert "part 'state': the checkpoint has no key 'v'" in rank["error"]["text"]
    assert "rank 1: RestoreFailed" in ranks[0]["error"]["text"]
    assert ranks[1]["error"]["facts"]["key"] == "v"


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "strided"])
def test_a_common_value_may_be_a_tensor_of_any_layout(layout: str) -> None:
    """Catches: a sparse tensor among the common values that makes every save fail."""
    from ckptfsm.dcp.images import to_host

    tensor = torch.eye(3)
    value = tensor if layout == "strided" else tensor.to_sparse(layout=getattr(torch, layout))
    staged = to_host(value)
    assert staged.layout is value.layout
    if layout != "strided":  # its values may be shared: a fork would not freeze them
        value.values().zero_() if layout == "sparse_csr" else value.coalesce().values().zero_()
    assert torch.equal(staged.to_dense() if layout != "strided" else staged, tensor)


STRICT = """
import sys, warnings
from collections import OrderedDict
from ckptfsm import CheckpointManager
import torch
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # megatron-core's own, of the trainer's import
    from megatron.core.dist_checkpointing import ShardedTensor
from ckptfsm.core.errors import SaveFailedWarning

class Loud:
    def __reduce__(self):
        warnings.warn("of a foreign class")
        return OrderedDict, ()

class PickledOnce:
    times = 0

    def __reduce__(self):
        PickledOnce.times += 1
        if PickledOnce.times > 1:  # the first is a look at it, before the save is accepted
            raise RuntimeError("cannot be written")
        return OrderedDict, ()

def raised(work):
    try:
        work()
    except Warning as warning:
        return type(warning).__name__

def state(value):
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((4,), value))}

with CheckpointManager(sys.argv[1], on_failure="warn") as manager:
    manager.save(1, {**state(1.0), "loud": Loud()}).wait()
    restored = manager.restore(state(0.0))
    assert restored.step == 1 and restored.state["w"].sum() == 4
    manager.save(2, {**state(1.0), "oops": PickledOnce()})
    print(raised(manager.wait_until_finished), raised(lambda: warnings.warn("of the trainer")))
"""


def test_a_foreign_warning_fails_neither_a_save_nor_a_restore(root: Path) -> None:
    """Under ``-W error``. Catches: a restore that fails on a deprecation within megatron-core, and
    a warning of ours or the trainer's that is not an error any more."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", STRICT, str(root)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "SaveFailedWarning UserWarning\n"
    foreign = (
        "`load_state_dict` is deprecated",
        "load in a single process",
    )
    assert any(words in ran.stderr for words in foreign), "foreign warnings are hidden"
    assert "of a foreign class" in ran.stderr
