"""Changes of DTensors that torch does not count, and the memory that an optimizer promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ckptfsm.dcp.driver import StateDraft, StateDriver
from ckptfsm.dcp.gate import GatedMemory
from ckptfsm.dcp.images import Owners
from ckptfsm.dcp.state_format import DriverOptions

WIDTH = 256  # of a layer, whose weight is larger than what is copied at once


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Job:
    """A model of FSDP2 with an optimizer."""

    def __init__(self, **settings: Any) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (1,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **settings)
        self.step()

    def step(self) -> None:
        self.model(torch.randn(2, WIDTH)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def staged(self, promise: GatedMemory) -> StateDraft:
        driver = StateDriver(DriverOptions(0, promise=promise))
        state = {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }
        draft = driver.draft({"state": state})
        draft.stage("", draft.specs, driver.merge([draft.summary]))
        return draft


@pytest.mark.parametrize("settings", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("attached", [False, True])
def test_a_step_before_the_gate_is_found(settings: dict[str, bool], attached: bool) -> None:
    """Catches: a torn checkpoint that is tracked, as torch counts no change of a DTensor's memory."""
    job, promise = Job(**settings), GatedMemory()
    if attached:
        promise.attach(job.optimizer, job.optimizer.register_step_pre_hook(print))
    else:
        promise.everything = True
    draft = job.staged(promise)
    assert draft.changed() == ""
    job.model(torch.randn(2, WIDTH))  # a forward pass changes nothing
    assert draft.changed() == ""
    job.step()
    assert "was changed before" in draft.changed()


def test_an_attached_optimizer_promises_the_local_parts_of_its_dtensors() -> None:
    """Catches: all DTensors copied in ``save``, though the optimizer is attached."""
    job, promise = Job(), GatedMemory()
    promise.attach(job.optimizer, job.optimizer.register_step_pre_hook(print))
    held = job.staged(promise).held
    large = 3 * [WIDTH * WIDTH * 4]  # the first weight and its moments
    assert [tensor.numel() * 4 for _, tensor, _, _ in held.tensors] == large
    assert not any(map(held.may_change, (tensor for _, tensor, _, _ in held.tensors)))


def _added(local: torch.Tensor) -> None:
    with torch.no_grad():
        local.add_(1)


CHANGES: dict[str, Callable[[Job], None]] = {
    "to_local": lambda job: _added(job.model[0].weight.to_local()),
    "full_tensor": lambda job: _added(job.model[0].weight.full_tensor()),  # the same memory here
    "foreach": lambda job: torch._foreach_add_([job.model[0].weight.to_local().detach()], 1.0),
}


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_local_part_before_the_gate_is_found(change: str, everything: bool) -> None:
    """Catches: a torn checkpoint that is tracked: torch counts such a change for the local part of the
    parameter, and not for the one in the state dict."""
    job, promise = Job(), GatedMemory()
    promise.attach(job.optimizer, job.optimizer.register_step_pre_hook(print))
    promise.everything = everything
    draft = job.staged(promise)
    job.model(torch.randn(2, WIDTH)).sum().backward()
    assert draft.changed() == ""
    CHANGES[change](job)
    assert "was changed before" in draft.changed()


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as of quantized moments."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise NotImplementedError


def test_an_optimizer_with_moments_without_memory_can_be_attached() -> None:
    """Catches: each save that fails, with the words of torch."""
    job, promise = Job(), GatedMemory()
    parameter = next(iter(job.optimizer.state))
    job.optimizer.state[parameter]["quantized"] = Wrapped(torch.ones(3))
    promise.attach(job.optimizer, job.optimizer.register_step_pre_hook(print))
    owners = promise.owners()
    assert not promise.promises_all
    assert all(owners.of(tensor)[0] is tensor for tensor in job.model.parameters())


def test_a_promise_is_for_the_bytes_of_an_owner_alone() -> None:
    """Catches: a neighbour in the storage of an attached parameter that is read behind ``save``; a part
    of a parameter that is copied."""
    flat = torch.zeros(40)
    parts = first, second, last, comb = (
        flat[:5],
        flat[5:10],
        flat[20:30],
        flat[30:].view(5, 2)[:, 0],
    )
    owners = Owners([*reversed(parts), torch.empty(0)])
    for owned, by in ((flat[2:4], [first]), (flat[20:30], [last]), (flat[3:10], [first, second])):
        assert [id(owner) for owner in owners.of(owned)] == [id(tensor) for tensor in by]
    nobodys = (flat, flat[6:15], flat[10:20], flat[15:25], flat[25:35], comb, flat[31:32])
    assert not any(map(owners.of, (*nobodys, torch.zeros(10), Wrapped(torch.ones(3)))))
