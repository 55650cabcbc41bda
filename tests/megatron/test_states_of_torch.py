"""States of torch's parallelism: real ranks save, restore and reshard them; stock code reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch_jobs import local, unlike

from ckptfsm import CheckpointManager, PerRank
from ckptfsm.core.errors import ReshardWarning, RestoreFailed

pytestmark = pytest.mark.megatron

NOTHING = {"done": True, "ours": [], "stock": [], "went on": True}


@pytest.mark.parametrize("engine", ["eager", "gated", "fork"])
def test_states_of_every_layout_are_restored_and_stock_loadable(cluster, root, tmp_path, engine):
    """Catches: a part of a DTensor that no rank writes, or another's; a state that the trainer changed
    while it was read; files that only we can read; a restore by fewer or more ranks that differs."""
    expected = tmp_path / "expected.pt"
    names = {"root": str(root), "expected": str(expected)}
    assert cluster.run("torch_jobs.save_and_load", engine=engine, **names) == [NOTHING] * 2
    wanted = torch.load(expected, weights_only=False)
    _whole_file(root, tmp_path / "whole.pt", wanted)
    _restored_alone(root, wanted)
    found = cluster.run("torch_jobs.restore", **names)
    assert found == [{"step": 2, "unlike": []}] * 2


def test_parts_that_megatron_fsdp_divides_in_its_own_way(cluster, root):
    """Catches: rows of a DTensor where torch would put them, although its owner says otherwise; a rank
    without any."""
    found = cluster.run("torch_jobs.save_and_load_uneven", ranks=3, root=str(root))
    assert found == [{"ours": [], "stock": []}] * 3


def test_the_checks_of_torchs_own_tests_pass_over_what_we_wrote(cluster, root):
    """Catches: a parameter, a buffer or an optimizer's group that comes back as another one than in a
    plain model that was trained alike."""
    found = cluster.run("torch_jobs.judged_by_torch", root=str(root))
    assert found == [{"checked": 4}] * 2


def _whole_file(root: Path, file: Path, wanted: dict) -> None:
    """Stock makes one file of all ranks', nested as the state was."""
    dcp_to_torch_save(root / "iter_0000001", file)
    loaded = torch.load(file, weights_only=False)
    positions = loaded.pop("loader")
    assert positions == {f"rank_{rank}": {"rank": rank, "seed": 1} for rank in range(2)}
    assert list(loaded["numbers"]) == ["3", "5"]  # torch knows names only
    assert unlike(local(loaded), local(wanted)) == []


def _restored_alone(root: Path, wanted: dict) -> None:
    """One process restores what two saved, and saves it whole as step 2."""
    template = torch.load(root.parent / "expected.pt", weights_only=False)
    tensors = [value for value in local(template).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) > 40
    _zero(template)
    with CheckpointManager(root, engine="fork", reshard_drops=("loader",)) as manager:
        with pytest.raises(RestoreFailed, match="no key 'model.w'"):
            manager.restore({"model": {"w": torch.zeros(1)}})
        with pytest.warns(ReshardWarning, match="loader"):
            restored = manager.restore({**template, "loader": PerRank(None)})
        assert restored is not None and "loader" not in restored.state
        assert unlike(local(restored.state), local(wanted)) == []
        manager.save(2, restored.state)
        manager.wait_until_finished()
        assert manager.latest_step() == 2


def _zero(state: Any) -> None:
    """Leave nothing of the values but the form of the tensors."""
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if isinstance(value, (dict, list)):
            _zero(value)
        elif isinstance(value, torch.Tensor):
            value.zero_()
        else:
            state[key] = None
