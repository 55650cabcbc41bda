"""A root that was written before the directories of epochs and reader leases were called so.

``lease-and-leases.tar.gz`` was made by a run with megatron-core 0.16.1 that saved steps 1 and 2, began
step 3, took a reader lease on step 1, and was killed.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

HERE = Path(__file__)
READER = ".ckptfsm/leases/1.evaluation.json"


@pytest.mark.megatron
def test_a_root_with_the_earlier_names_is_opened_tracked_on_and_pruned(tmp_path: Path):
    """Catches: a root of an earlier version that is refused, begins its epochs anew, or loses a step
    that a reader still reads."""
    with tarfile.open(HERE.with_name("lease-and-leases.tar.gz")) as packed:
        packed.extractall(tmp_path, filter="data")
    assert (tmp_path / READER).exists()
    job = subprocess.run(
        [sys.executable, HERE, tmp_path], capture_output=True, text=True, timeout=120
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines() == ["2 2 [2.0, 2.0, 2.0, 2.0]", "[1, 3]", "[4]"]
    private = tmp_path / ".ckptfsm"
    assert [name.name for name in (private / "epochs").iterdir()] == ["epoch-000002"]
    assert list((private / "lease").iterdir()) == []
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "4"


def resume(root: Path) -> None:
    """Restore the latest step; save one while step 1 is being read, and one when it is not."""
    import torch
    from megatron.core.dist_checkpointing import ShardedTensor

    from ckptfsm import CheckpointManager, LatestN

    def state(step: int) -> dict[str, object]:
        values = torch.full((4,), float(step))
        return {"weight": ShardedTensor.from_rank_offsets("weight", values), "step": step}

    with CheckpointManager(root, retention=LatestN(1)) as ckpts:
        found = ckpts.restore(state(0))
        print(found.step, found.state["step"], found.state["weight"].tolist())
        for step in (3, 4):
            ckpts.save(step, state(step))
            ckpts.wait_until_finished()
            print(ckpts.all_steps())
            (root / READER).unlink(missing_ok=True)


if __name__ == "__main__":
    resume(Path(sys.argv[1]))
