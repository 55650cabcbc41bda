"""The jobs of the tests of torch's own states. See ``jobs.py``; its rules hold here."""

from __future__ import annotations

import unittest
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import TIMES, Here, Told
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.common_dist_composable import (
    CompositeParamModel,
    NestedSequentialModel,
)
from torch.testing._internal.distributed.common_state_dict import VerifyStateDictMixin

from ckptfsm import CheckpointManager, PerRank

Maker = Callable[[torch.device], torch.nn.Module]
LAYOUTS = ("fsdp", "hsdp", "tensors")


def distributed(layout: str, model: torch.nn.Module) -> None:
    """Distribute a model: among the ranks, as their copies, or by columns and rows."""
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    else:
        shape = (2, 1) if layout == "hsdp" else (1, 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
    if layout == "tensors":
        parallelize_module(model, mesh["inner"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        mesh = mesh["outer"]
    fully_shard(model, mesh=mesh)


class Training:
    """Models of all layouts and a plain one, with optimizers; their bits depend on ``seed``.

    Alone, the models are not distributed.
    """

    def __init__(self, seed: int, ranks: int) -> None:
        torch.manual_seed(seed)
        self.seed, self.models, self.optimizers = seed, {}, {}
        for layout in (*LAYOUTS, "plain"):
            rows = 7 if layout in ("fsdp", "plain") else 8  # uneven on two ranks
            model = torch.nn.Sequential(torch.nn.Linear(6, rows), torch.nn.Linear(rows, 4))
            if layout != "plain" and ranks > 1:
                distributed(layout, model)
            self.models[layout] = model
            self.optimizers[layout] = torch.optim.AdamW(model.parameters())
        self.step()

    def step(self) -> None:
        for layout, model in self.models.items():
            model(torch.ones(3, 6)).sum().backward()
            self.optimizers[layout].step()
            self.optimizers[layout].zero_grad()

    def state(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = {
            layout: {
                "model": get_model_state_dict(model),
                "optimizer": get_optimizer_state_dict(model, self.optimizers[layout]),
            }
            for layout, model in self.models.items()
        }
        numbers = {3: torch.full((2,), float(self.seed)), 5: [self.seed]}
        found |= {"numbers": numbers, "step": self.seed}
        return found | {"loader": PerRank({"rank": rank, "seed": self.seed})}


def local(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of this rank's values, by their keys."""
    return {key: _local(value) for key, value in flatten_state_dict(dict(state))[0].items()}


def _local(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.to_local().detach().clone()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with whole tensors, on every rank, but for what each rank has of its own (collective)."""
    return {key: _whole(each) for key, each in state.items() if not isinstance(each, PerRank)}


def _whole(value: Any) -> Any:
    if isinstance(value, Mapping):
        return whole(value)
    return _local(value.full_tensor() if isinstance(value, DTensor) else value)


def unlike(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The keys whose values are not the same, bit for bit."""
    same = {
        key
        for key in found.keys() & wanted.keys()
        if (
            torch.equal(found[key], wanted[key])
            if isinstance(wanted[key], torch.Tensor)
            else found[key] == wanted[key]
        )
    }
    return sorted((found.keys() | wanted.keys()) - same)


def save_and_load(here: Here, root: str, expected: str, engine: str) -> Told:
    """Save step 1 and train on at once; what differs in our restore of it, and in stock's load."""
    here.join()
    training, others = Training(1, here.world_size), [Training(n, here.world_size) for n in (2, 3)]
    with CheckpointManager(root, engine=engine, **TIMES) as manager:
        for optimizer in training.optimizers.values() if engine == "gated" else ():
            manager.attach(optimizer)
        state = training.state(here.rank)
        saved, everything = local(state), whole(state)
        handle = manager.save(1, state)
        training.step()
        manager.wait_until_finished()
        template = others[0].state(here.rank)
        restored = manager.restore(template)
        assert restored is not None and restored.state is template
        template["loader"] = PerRank(template["loader"])
        ours = unlike(_unwrapped(local(template)), _unwrapped(saved))
        stock = others[1].state(here.rank)
        del stock["loader"], saved["loader"]
        dcp.load(stock, checkpoint_id=f"{root}/iter_0000001")
        del stock["numbers"][5]  # stock puts the new value under the text "5"
        changed = unlike(local(training.state(here.rank)), saved)
        if here.rank == 0:
            torch.save(everything, expected)
    return {
        "done": handle.done,
        "ours": ours,
        "stock": unlike(local(stock), saved),
        "went on": any(key.endswith("weight") for key in changed),
    }


def _unwrapped(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.value if isinstance(v, PerRank) else v for k, v in values.items()}


def restore(here: Here, root: str, expected: str) -> Told:
    """Restore the newest step, which another number of ranks saved; what differs from ``expected``."""
    here.join()
    with CheckpointManager(root, engine="fork", **TIMES) as manager:
        template = Training(4, here.world_size).state(here.rank)
        del template["loader"]
        restored = manager.restore(template)
        assert restored is not None
        found = local(whole(restored.state))
    wanted = torch.load(Path(expected), weights_only=False)
    return {"step": restored.step, "unlike": unlike(found, local(wanted))}


ROWS = (5, 0, 2)  # where torch would divide 7 into 3, 3 and 1


def save_and_load_uneven(here: Here, root: str) -> Told:
    """DTensors that Megatron-FSDP divides in its own way: our restore, and stock's load."""
    here.join()
    mesh = init_device_mesh("cpu", (here.world_size,))
    first = sum(ROWS[: here.rank])
    whole_value = torch.arange(21.0).reshape(7, 3)
    state, ours, stock = (
        _uneven(value[first : first + ROWS[here.rank]], mesh)
        for value in (whole_value, torch.zeros(7, 3), torch.zeros(7, 3))
    )
    with CheckpointManager(root, **TIMES) as manager:
        manager.save(1, state)
        manager.wait_until_finished()
        manager.restore(ours)
    dcp.load(stock, checkpoint_id=f"{root}/iter_0000001")
    saved = local(state)
    return {"ours": unlike(local(ours), saved), "stock": unlike(local(stock), saved)}


def _uneven(part: torch.Tensor, mesh: DeviceMesh) -> dict[str, Any]:
    """A state as Megatron-FSDP prepares it for DCP."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor

    made = DTensor.from_local(
        part.clone(), mesh, [Shard(0)], shape=torch.Size((7, 3)), stride=(3, 1)
    )
    found: dict[str, Any] = {"model": {"w": made}, "step": 1}
    uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(found)
    return found


class Judge(VerifyStateDictMixin, unittest.TestCase):
    """The checks of torch's own tests of state dicts."""

    def assertEqual(self, first: Any, second: Any, msg: Any = None) -> None:
        """Equal, also dicts with tensors."""
        if isinstance(first, dict):
            first, second = [], unlike(local(first), local(second))
        super().assertEqual(first, second, msg)


class Trained:
    """A model of torch's tests and its optimizer, after a step; its bits depend on ``seed``."""

    def __init__(self, make: Maker, seed: int, sharded: bool = True) -> None:
        torch.manual_seed(seed)
        self.model = make(torch.device("cpu"))
        if sharded:
            distributed("fsdp", self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }


def judged_by_torch(here: Here, root: str) -> Told:
    """Save models of torch's tests under FSDP2. Its checks compare what we restore into others, and what
    stock loads, with a plain model that was trained alike."""
    here.join()
    judge, checked = Judge(), 0
    with CheckpointManager(root, **TIMES) as manager:
        for step, make in enumerate((CompositeParamModel, NestedSequentialModel), 1):
            plain = Trained(make, 0, sharded=False)
            manager.save(step, Trained(make, 0).state())
            manager.wait_until_finished()
            ours, stock = Trained(make, step).state(), Trained(make, step).state()
            manager.restore(ours)
            dcp.load(stock, checkpoint_id=f"{root}/iter_{step:07d}")
            for found in (ours, stock):
                judge._verify_msd(plain.model.state_dict(), found["model"])
                optimizers = plain.optimizer.state_dict(), found["optimizer"]
                judge._verify_osd(plain.model, plain.optimizer, *optimizers)
                fresh = torch.optim.AdamW(plain.model.parameters(), lr=0.01)
                judge._verify_osd_by_load(plain.model, plain.optimizer, fresh, found["optimizer"])
                checked += 1
    return {"checked": checked}
