"""I12 for a state in DCP's own format: what DCP could not load again is refused, by key."""

from __future__ import annotations

import collections
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ckptfsm.core.errors import SaveRefused
from ckptfsm.core.parts import PerRank
from ckptfsm.dcp import read_back
from ckptfsm.dcp.nested import flat
from ckptfsm.dcp.read_back import StateReadBack


def check(**values: Any) -> None:
    StateReadBack().check_state("model", values)


def refusal_of(value: Any) -> str:
    """What is said of a value under the key ``layer.x``, whose part and key are named."""
    with pytest.raises(SaveRefused) as caught:
        StateReadBack().check_state("model", {"fine": torch.ones(2), "layer.x": value})
    assert caught.value.part == "model" and str(caught.value.key).startswith("layer.x")
    assert "part 'model': the value at layer.x" in caught.value.message
    return str(caught.value.message)


def loaded(directory: Path, saved: Any, template: Any) -> Any:
    """What stock DCP loads of a value that it has saved."""
    dcp.save({"x": saved}, checkpoint_id=directory, no_dist=True)
    state = {"x": template}
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    return state["x"]


class Wrapped(torch.Tensor):
    """A tensor subclass that nobody knows."""


class OwnParameter(torch.nn.Parameter):
    """A parameter that a trainer tells from others by its class."""


class Trainers:
    """A class of the trainer's."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


class Unloadable:
    """A class whose pickles cannot be read."""

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("no state")

    def __getstate__(self) -> Any:
        return {"a": 1}


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4)


def flat_parameter() -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter._is_flat_param = True  # type: ignore[attr-defined]
    return parameter


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def quantized(*values: float, scale: float = 1.0) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.tensor(values), scale, 0, torch.qint8)


# Kinds of tensors, with the way out that is named.
TENSORS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "meta": (lambda: torch.ones(4, device="meta"), "materialize it"),
    "fake": (fake, "materialize it"),
    "lazy": (torch.nn.parameter.UninitializedParameter, "run the module once"),
    "subclass": (lambda: torch.ones(4).as_subclass(Wrapped), "give a torch.Tensor"),
    "running": (lambda: AsyncCollectiveTensor(torch.ones(4)), "x.wait()"),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(4)), "save outside of that"),
    "flat": (flat_parameter, "get_model_state_dict"),
    "coo": (lambda: torch.eye(2).to_sparse(), "x.to_dense()"),
    "csr": (lambda: torch.eye(2).to_sparse_csr(), "x.to_dense()"),
    "mkldnn": (lambda: torch.eye(2).to_mkldnn(), "x.to_dense()"),
    "quantized": (lambda: quantized(1.0, 2.0), "x.int_repr()"),
    "nested": (nested, "x.unbind()"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", TENSORS)
def test_I12_a_tensor_that_dcp_could_not_load_again_is_refused(kind: str) -> None:
    """Catches: a save that fails in the middle each time, or is tracked and fits no tensor again."""
    make, way = TENSORS[kind]
    said = refusal_of(make())
    assert "cannot be saved" in said and way in said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["coo", "csr", "quantized", "nested"])
def test_a_tensor_of_another_layout_is_saved_in_a_tuple(kind: str, tmp_path: Path) -> None:
    """Catches: advice that does not help, or a scale that is lost with it."""
    tensor = TENSORS[kind][0]()
    assert "a tuple (x,)" in refusal_of(tensor)
    check(x=(tensor,))
    (found,) = loaded(tmp_path, (tensor,), (quantized(0.0, 0.0, scale=0.5),))
    assert torch.equal(dense(found), dense(tensor))


def dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_nested:
        return torch.cat(tensor.unbind())
    return tensor.dequantize() if tensor.is_quantized else tensor.to_dense()


def test_tensors_that_dcp_loads_again_are_accepted(tmp_path: Path) -> None:
    """Catches: a tensor of an odd form, or a parameter of a trainer's class, that is refused."""
    marked = torch.ones(2)
    marked.tag = lambda: 1  # type: ignore[attr-defined]
    for number, tensor in enumerate(
        [
            torch.tensor(3.0),
            torch.empty(0, 3),
            torch.ones(1).expand(5),
            torch.eye(3)[:, 1],
            torch.ones(2, dtype=torch.complex64).mul(1j).conj(),
            torch.ones(2, dtype=torch.complex64).mul(1j).conj().imag,
            torch.ones(2, requires_grad=True) * 2,
            torch.nn.Parameter(torch.ones(2)),
            OwnParameter(torch.ones(2)),
            marked,
        ]
    ):
        check(x=tensor)
        into = torch.zeros(tensor.shape, dtype=tensor.dtype)
        assert torch.equal(loaded(tmp_path / str(number), tensor, into), tensor)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield DeviceMesh("cpu", [0])
    finally:
        dist.destroy_process_group()


def distributed(local: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    return DTensor.from_local(local, mesh, [placement], run_check=False)


def test_I12_a_distributed_tensor_is_judged_by_what_the_rank_has(mesh: DeviceMesh) -> None:
    """Catches: a summand of one rank that is saved as the whole; a part without values."""
    check(a=distributed(torch.ones(4), mesh, Shard(0)))
    check(a=torch.nn.Parameter(distributed(torch.ones(4), mesh, Replicate())))
    assert "x.redistribute()" in refusal_of(distributed(torch.ones(4), mesh, Partial()))
    meta = torch.ones(4, device="meta")
    assert "materialize it" in refusal_of(distributed(meta, mesh, Shard(0)))
    running = distributed(torch.ones(4), mesh, Shard(0))
    running._local_tensor = AsyncCollectiveTensor(torch.ones(4))
    assert "x.to_local().wait()" in refusal_of(running)
    check(
        a=DTensor.from_local(running.to_local().wait(), running.device_mesh, running.placements)  # type: ignore[attr-defined]
    )


def test_I12_a_distributed_tensor_in_a_pickled_value_is_refused(mesh: DeviceMesh) -> None:
    """Catches: one rank's part of a tensor in a tuple, which is saved for all ranks."""
    one = distributed(torch.ones(4), mesh, Shard(0))
    for value in ((1, {"a": one}), Trainers([one]), PerRank(one)):
        said = refusal_of(value)
        assert "x.full_tensor(), or have x in dicts and lists only" in said


def test_the_sharded_tensor_of_torch_is_judged_by_its_shards(
    mesh: DeviceMesh, tmp_path: Path
) -> None:
    """Catches: FSDP's sharded state dict without a mesh that is refused, though DCP loads it."""
    spec = ChunkShardingSpec(0, ["rank:0/cpu"])
    one, into = sharded_tensor.ones(spec, 4), {"x": sharded_tensor.zeros(spec, 4)}
    check(x=one)
    dcp.save({"x": one}, checkpoint_id=tmp_path)
    dcp.load(into, checkpoint_id=tmp_path)
    assert torch.equal(into["x"].local_tensor(), torch.ones(4))
    one.local_shards()[0].tensor = torch.ones(4, device="meta")
    assert "materialize it" in refusal_of(one)


@pytest.mark.parametrize(
    ("value", "place", "words"),
    [
        (lambda: 1, "layer.x,", "of type function"),
        ((1, [lambda: 1]), "layer.x[1][0],", "of type function"),
        (Trainers({"f": lambda: 1}), "layer.x.value['f'],", "of type function"),
        (PerRank({"a": lambda: 1}), "layer.x['a'],", "of type function"),
        (Unloadable(), "layer.x,", "RuntimeError: no state"),
        ([PerRank(1)], "layer.x[0],", "a PerRank has its place in dicts"),
    ],
)
def test_I12_a_plain_value_that_is_not_loaded_again_is_refused(
    value: Any, place: str, words: str
) -> None:
    """Catches: a checkpoint that is tracked, for which older ones are pruned, and no start loads."""
    said = refusal_of(value)
    assert f"the value at {place}" in said and words in said


def test_values_of_any_class_are_accepted_as_dcp_loads_them(tmp_path: Path) -> None:
    """Catches: a rule that is narrower than the loader: sampler states and arrays are refused."""
    values = {
        "n": np.float64(0.5),
        "a": np.arange(3),
        "d": collections.deque([1.0], maxlen=3),
        "own": Trainers(3),
        "file": io.BytesIO(b"abc"),
        "tensors": (torch.ones(2), torch.eye(2).to_sparse()),
        "text": "x \udcff",
        "none": None,
    }
    check(**values, mine=PerRank(np.random.get_state()))
    found = loaded(tmp_path, values, dict.fromkeys(values))
    assert found["own"].value == 3 and found["d"].maxlen == 3
    assert found["file"].getvalue() == b"abc" and found["text"] == "x \udcff"


def test_I12_the_loader_itself_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a rule that is imitated: a torch whose DCP takes fewer classes would load nothing."""
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda file, **_: load(file, weights_only=True))
    assert "save x.item()" in refusal_of(np.float64(1))


def test_all_of_several_values_are_named() -> None:
    """Catches: a person who mends one value at a time, with a job for each."""
    empty = torch.ones(2, device="meta")
    with pytest.raises(
        SaveRefused, match="the value at a, .*the same goes for b .*for c .*to_dense"
    ):
        check(a=empty, b=empty, c=torch.eye(2).to_sparse())


def test_values_that_did_not_change_are_not_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: saves that take longer for hundreds of values that are the same each time."""
    judge, load = StateReadBack(), torch.load
    loads: list[int] = []
    monkeypatch.setattr(torch, "load", lambda *a, **k: (loads.append(1), load(*a, **k))[1])
    counts = []
    for step in (1, 1, 2, 2):
        judge.check_state("model", {"step": step, "lr": 0.1, "w": torch.ones(2)})
        counts.append(len(loads))
    assert counts == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("key", "words"),
    [("", "is empty"), (3, "is a int: flatten"), ("a\udcff", "is not valid Unicode")],
)
def test_I12_a_key_that_cannot_be_written_is_refused(key: Any, words: str) -> None:
    """Catches: a checkpoint whose metadata, or the records about it, cannot be written or read."""
    check(größe=1)
    with pytest.raises(SaveRefused, match=words) as caught:
        StateReadBack().check_state("model", {key: 1})
    assert (caught.value.part, caught.value.key) == ("model", repr(key))


@pytest.mark.parametrize("value", [1, torch.ones(1)])
@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda value: {"a.b": value, "a": {"b": value}}, "a.b"),
        (lambda value: {"x": {1: value, "1": value}}, "x.1"),
        (lambda value: {"x": [{"y": value}], "x.0": {"y": value}}, "x.0.y"),
    ],
)
def test_I12_two_values_with_one_key_are_refused(make: Any, key: str, value: Any) -> None:
    """Catches: one of two values that is lost, or an error of torch's without a way out."""
    with pytest.raises(SaveRefused, match="rename one of them") as caught:
        flat("model", make(value), 0, SaveRefused)
    assert (caught.value.part, caught.value.key) == ("model", key)


def test_a_state_that_contains_itself_is_refused() -> None:
    """Catches: a RecursionError out of torch, which names no part."""
    state: dict[str, Any] = {"a": 1}
    state["b"] = state
    with pytest.raises(SaveRefused, match="part 'model'.*contains itself"):
        flat("model", state, 0, SaveRefused)


def test_what_torch_trainers_save_is_accepted() -> None:
    """Catches: a module, an optimizer and a scheduler of torch that are refused."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
    }
    made = flat("state", state, 0, SaveRefused)
    StateReadBack().check_state("state", made.values)
    place = made.mappings()["optimizer.param_groups.0.lr"]
    assert place == ("optimizer", "param_groups", 0, "lr")


def test_I12_a_refusal_of_many_kinds_is_bounded() -> None:
    """Catches: a journal line or an exchange as long as the state."""
    found = [
        read_back.Found(f"[{n}]", lambda: 1, read_back.Misfit(f"reason {n}"))
        for n in range(40)
        for _ in range(40)
    ]
    said = str(read_back.refusal("state", found))
    assert len(said) < 1500 and "and 1400 more values" in said


def test_I12_the_data_of_tensors_is_not_copied() -> None:
    """Catches: a save for which a state is held twice, only to look at it."""
    big = torch.zeros(1 << 20)
    marked = torch.nn.Parameter(big)
    marked.partition_dim = 0  # type: ignore[attr-defined]
    odd = [torch.nn.Parameter(big), marked, big.untyped_storage()]
    pickled = StateReadBack().pickle_of({"plain": big, "odd": odd})
    assert sum(len(piece) for _, piece in pickled.pieces) < 10_000
