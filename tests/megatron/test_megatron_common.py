"""The common state of all ranks: written where the installed megatron-core keeps it, and read back.

Up to megatron-core 0.18 that is ``common.pt``, from 0.19 on an object in a shard. A job of one rank in
this process; which of the two the installed one writes is asked, not assumed.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

from ckptfsm import CheckpointManager, LatestN
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.errors import RestoreFailed, SaveRefused
from ckptfsm.disk.stock import COMMON, COMMON_KEY, inspect_stock
from ckptfsm.integrations import megatron_lm
from ckptfsm.megatron import states
from ckptfsm.megatron.compat import cpu_devices, process_group
from ckptfsm.megatron.torch_dist import keeps_common_in_shard

pytestmark = pytest.mark.megatron
IN_SHARD = keeps_common_in_shard()


def state(value: float = 0.0) -> dict[str, Any]:
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.full((4,), value)),
        "o": ShardedObject("rng", [value], (1,), (0,)),
        "iteration": int(value),
        "args": {"lr": [value]},
    }


def save(root: Path, *steps: int, **settings: Any) -> None:
    with CheckpointManager(root, **settings) as ckpts:
        for step in steps:
            ckpts.save(step, state(step)).wait()


def stock_save(directory: Path, step: int) -> None:
    directory.mkdir(parents=True)
    with cpu_devices(), process_group():
        dist_checkpointing.save(state(step), str(directory))


def stock_load(directory: Path) -> Any:
    with cpu_devices(), process_group():
        return dist_checkpointing.load(state(), str(directory))


def is_at(found: Any, step: int) -> None:
    assert found["w"].eq(step).all() and found["o"] == [step]
    assert (found["iteration"], found["args"]) == (step, {"lr": [step]})


def keys_of(directory: Path) -> frozenset[str]:
    verdict = inspect_stock(PosixStorage(str(directory.parent)), directory.name)
    assert verdict.acceptable, verdict.reason
    return verdict.object_keys


def test_a_save_keeps_it_where_the_installed_megatron_core_does(tmp_path: Path) -> None:
    """Catches: our saves that a later megatron-core reads by a deprecated reader only, or not at
    all."""
    root, stock = tmp_path / "root", tmp_path / "stock"
    save(root, 1)
    stock_save(stock, 1)
    mine = root / "iter_0000001"
    assert (COMMON_KEY in keys_of(mine)) is (COMMON_KEY in keys_of(stock)) is IN_SHARD
    assert (mine / COMMON).exists() is (stock / COMMON).exists() is not IN_SHARD
    is_at(stock_load(mine), 1)


def test_a_save_can_be_kept_readable_for_every_megatron_core(tmp_path: Path) -> None:
    """Catches: a job that cannot go back to its older megatron-core, though it asked for that."""
    save(tmp_path, 1, common_state="file")
    mine = tmp_path / "iter_0000001"
    assert (mine / COMMON).exists() and COMMON_KEY not in keys_of(mine)
    is_at(stock_load(mine), 1)


def test_a_root_of_both_goes_on(tmp_path: Path) -> None:
    """Catches: a run that cannot go on, or be pruned, once its megatron-core was changed."""
    save(tmp_path, 1, common_state="file")
    with CheckpointManager(tmp_path, retention=LatestN(2)) as ckpts:
        restored = ckpts.restore(state())
        assert restored is not None and restored.step == 1
        is_at(restored.state, 1)
        for step in (2, 3):
            ckpts.save(step, state(step)).wait()
        ckpts.wait_until_finished()
        assert ckpts.all_steps() == [2, 3]
        restored = ckpts.restore(state())
        assert restored is not None
        is_at(restored.state, 3)


def test_a_root_of_a_newer_megatron_core_is_refused_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: the only checkpoints put away as damaged, because an older megatron-core was
    installed; or the words of megatron-core, that ``common.pt`` is missing."""
    monkeypatch.setattr(states, "keeps_common_in_shard", lambda: True)
    save(tmp_path, 1, 2)
    assert not (tmp_path / "iter_0000002" / COMMON).exists()
    monkeypatch.setattr(states, "keeps_common_in_shard", lambda: False)
    with CheckpointManager(tmp_path) as ckpts:
        with pytest.raises(
            RestoreFailed, match="install 0.19 or newer. Nothing was changed"
        ) as caught:
            ckpts.restore(state())
        assert (caught.value.step, caught.value.part) == (2, "state")
        assert ckpts.all_steps() == [1, 2] and ckpts.latest_step() == 2
    assert COMMON_KEY in keys_of(tmp_path / "iter_0000002")


@pytest.mark.parametrize("call", ["load_common_state_dict", "load"])
def test_steps_of_a_newer_megatron_core_are_refused_before_stock_code_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Catches: a trainer of an older megatron-core that says no more than that a file is missing."""
    monkeypatch.setattr(states, "keeps_common_in_shard", lambda: True)
    save(tmp_path, 1)
    monkeypatch.setattr(states, "keeps_common_in_shard", lambda: False)
    under = megatron_lm.CapturingSaves(dist_checkpointing, None)
    place = str(tmp_path / "iter_0000001")
    load = partial(getattr(under, call), *([state()] if call == "load" else []))
    with pytest.raises(RestoreFailed, match="install 0.19 or newer. Nothing was changed"):
        load(place)


def test_the_key_of_megatron_core_is_not_taken(tmp_path: Path) -> None:
    """Catches: a state of the trainer's that is written over, under megatron-core's key."""
    mine = {**state(1), "mine": ShardedObject("common_state", [1], (1,), (0,))}
    with CheckpointManager(tmp_path) as ckpts, pytest.raises(SaveRefused, match="'common_state'"):
        ckpts.save(1, mine)


@pytest.mark.parametrize("extra", ["integrity.json", "tokenizer/tokenizer.json"])
def test_a_run_of_stock_is_adopted_goes_on_and_is_pruned(tmp_path: Path, extra: str) -> None:
    """Catches: directories of today's stock code that cannot be adopted, or with files that are in
    the way."""
    root = tmp_path / "root"
    for step in (5, 10):
        stock_save(root / f"iter_{step:07d}", step)
    beside = root / "iter_0000010" / extra
    beside.parent.mkdir(exist_ok=True)
    beside.write_text("{}")
    (root / "latest_checkpointed_iteration.txt").write_text("10")
    shutil.copytree(root / "iter_0000005", root / "iter_0000007")
    shard = next((root / "iter_0000007").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with CheckpointManager(root, retention=LatestN(1)) as ckpts:
        assert ckpts.all_steps() == [5, 10]
        with pytest.warns(match="iter_0000007 is left alone"):
            restored = ckpts.restore(state())
        assert restored is not None and restored.step == 10
        is_at(restored.state, 10)
        ckpts.save(15, state(15)).wait()
        ckpts.unpin(10)
        ckpts.wait_until_finished()
        assert ckpts.all_steps() == [5, 15]
    assert not (root / "iter_0000010").exists()
    is_at(stock_load(root / "iter_0000015"), 15)


def test_both_formats_of_stock_in_one_root_are_adopted(tmp_path: Path) -> None:
    """Catches: half of a run left behind by an update of megatron-core."""
    made = tmp_path / "made"
    save(made, 1, common_state="file")
    save(made, 2)
    root = tmp_path / "root"
    for name in ("iter_0000001", "iter_0000002"):
        shutil.copytree(made / name, root / name, ignore=shutil.ignore_patterns(".ckptfsm"))
    stock_save(root / "iter_0000003", 3)
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    with CheckpointManager(root) as ckpts:
        assert ckpts.all_steps() == [1, 2, 3]
        for step in (1, 2, 3):
            restored = ckpts.restore(state(), step=step)
            assert restored is not None
            is_at(restored.state, step)
