"""I12: a save is refused if no restore could load what it would write, by key and with the way out.

Jobs of one rank in this process, and drafts without a job.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import io
import logging
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from ckptfsm import CheckpointManager, LatestN
from ckptfsm.core.errors import RestoreFailed, SaveRefused
from ckptfsm.dcp.driver import StateDriver
from ckptfsm.dcp.state_format import DriverOptions
from ckptfsm.megatron import read_back, states
from ckptfsm.megatron.compat import process_group
from ckptfsm.megatron.foreign import ForeignRequest
from ckptfsm.megatron.states import formats_of, refuse_misfits
from ckptfsm.megatron.torch_dist import keeps_common_in_shard

pytestmark = pytest.mark.megatron


@dataclasses.dataclass
class Progress:
    epoch: int = 3


class Mode(enum.Enum):
    FAST = 1


class Trainers:
    """A class of the trainer's."""


class Wrapped(torch.Tensor):
    """A tensor subclass that nobody knows."""


Window = collections.namedtuple("Window", "first last")


def state(**more: Any) -> dict[str, Any]:
    return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4)), **more}


def draft(**more: Any) -> None:
    StateDriver(DriverOptions(0)).draft({"state": state(**more)})


def refusal_of(**more: Any) -> str:
    with pytest.raises(SaveRefused) as caught:
        draft(**more)
    assert caught.value.part == "state"
    return str(caught.value.message)


# Value, its type as it is named, and the way out that is named, as code for it.
ODD = [
    (np.float64(0.1), "numpy.float64", "x.item()"),
    (np.float32(0.5), "numpy.float32", "x.item()"),
    (np.int64(3), "numpy.int64", "x.item()"),
    (np.bool_(True), "numpy.bool", "x.item()"),
    (np.datetime64("2026-01-01"), "numpy.datetime64", "str(x)"),
    (np.ones(3), "numpy.ndarray", "torch.from_numpy(x)"),
    (np.array(["a"]), "numpy.ndarray", "x.tolist()"),
    (collections.deque([1.0], maxlen=9), "collections.deque", "list(x)"),
    (frozenset([1]), "frozenset", "list(x)"),
    (range(3), "range", "list(x)"),
    (Window(1, 2), "Window", "list(x)"),
    ((collections.defaultdict(int),), "collections.defaultdict", "dict(x[0])"),
    (datetime.datetime(2026, 1, 1), "datetime.datetime", "x.isoformat()"),
    (datetime.timedelta(1), "datetime.timedelta", "x.total_seconds()"),
    (decimal.Decimal("1.5"), "decimal.Decimal", "str(x)"),
    (1 << 3000, "int", "str(x)"),
    (torch.Generator(), "torch._C.Generator", "x.get_state()"),
    (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear", "x.state_dict()"),
    (Progress(), "Progress", "dataclasses.asdict(x)"),
    (Mode.FAST, "Mode", "x.value"),
]


@pytest.mark.skipif(keeps_common_in_shard(), reason="its loader takes any class")
@pytest.mark.parametrize("value, kind, way", ODD, ids=[kind for _, kind, _ in ODD])
def test_I12_a_value_that_no_restore_loads_is_refused_with_a_way_out(
    value: Any, kind: str, way: str
) -> None:
    """Catches: a checkpoint that is tracked, for which older ones are pruned, and that no start can
    load; or advice that does not help."""
    said = refusal_of(oops=value, fine=1.0)
    assert "['oops']" in said and f"{kind}," in said and "['fine']" not in said
    assert way.replace("x[0]", "x") in said
    draft(oops=eval(way, {"x": value, "torch": torch, "dataclasses": dataclasses}))


@pytest.mark.skipif(keeps_common_in_shard(), reason="its loader takes any class")
@pytest.mark.parametrize("value", [Progress(), Mode.FAST, Trainers()])
def test_I12_a_class_of_the_trainers_is_accepted_once_it_is_registered(
    tmp_path: Path, value: Any
) -> None:
    """Catches: an acceptance that is remembered although the class is registered no longer; or a rule
    of our own, which does not ask what is registered."""
    driver, kind = StateDriver(DriverOptions(0)), type(value)
    assert f"add_safe_globals([{kind.__name__}])" in refusal_of(x=value)
    with torch.serialization.safe_globals([kind]):
        driver.draft({"state": state(x=value)})
        with CheckpointManager(tmp_path) as ckpts:
            ckpts.save(1, state(x=value)).wait()
            restored = ckpts.restore(state())
        assert restored is not None and type(restored.state["x"]) is kind
    with pytest.raises(SaveRefused):
        driver.draft({"state": state(x=value)})


@pytest.mark.skipif(keeps_common_in_shard(), reason="its loader takes any class")
def test_I12_the_environment_of_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a rule that is imitated: the job's own loads would take the value."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    draft(x=np.float64(1))


@pytest.mark.skipif(keeps_common_in_shard(), reason="its loader takes any class")
def test_I12_a_megatron_core_that_loads_any_class_is_not_narrowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: all saves refused under megatron-core 0.13 and 0.17, for arguments that these load."""

    def load_common_state_dict(place: str) -> Any:
        return torch.load(f"{place}/common.pt", weights_only=False)

    monkeypatch.setattr(dist_checkpointing, "load_common_state_dict", load_common_state_dict)
    draft(x=np.float64(1), y=Progress())


@pytest.mark.parametrize(
    "more, place",
    [
        ({"a": {"b": [1, {"lr": lambda: 1}]}}, "['a']['b'][1]['lr']"),
        ({"a": (1, (2, lambda: 1))}, "['a'][1][1]"),
        ({"args": argparse.Namespace(lr=1, when=lambda: 1)}, "['args'].when"),
        ({"a": {len.__call__: 1}}, "['a'] key"),
        ({"a": [ShardedObject("o", {"k": lambda: 1}, (1,), (0,))]}, "['a'][0] (object 'o')['k']"),
    ],
)
def test_I12_a_value_is_named_where_it_stands(more: dict[str, Any], place: str) -> None:
    """Catches: a refusal that leaves a person to search hundreds of values; a lambda that fails the
    writer, and is to be saved again later."""
    assert f"the value at {place}" in refusal_of(**more)


def test_I12_all_of_several_values_are_named() -> None:
    """Catches: a person who mends one value at a time, with a job for each."""
    said = refusal_of(a=lambda: 1, b=1, c=lambda: 1, d=lambda: 1)
    assert "['a']" in said and "the same goes for ['c'] (function), ['d'] (function)" in said


@pytest.mark.skipif(keeps_common_in_shard(), reason="its loader takes any class")
def test_I12_each_kind_of_value_has_its_own_way_out() -> None:
    """Catches: the advice for the first value, given for others that it does not help; a text of
    thousands of places."""
    one = np.float64(1)
    said = refusal_of(d=collections.deque([1]), n={"m": one, "b": np.bool_(1)}, s=[one] * 99)
    assert "['d'], of type collections.deque" in said and "save list(x), and x.maxlen" in said
    assert "; for ['n']['m'] (numpy.float64), ['n']['b'] (numpy.bool" in said
    assert "['s'][1] (numpy.float64) and 97 more: save x.item()" in said


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4)


def flat() -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter._is_flat_param = True  # type: ignore[attr-defined]
    return parameter


MISFITS = {
    "a subclass": lambda: torch.ones(4).as_subclass(Wrapped),
    "without data": lambda: torch.ones(4, device="meta"),
    "fake": fake,
    "functional": lambda: torch._to_functional_tensor(torch.ones(4)),
    "flat": flat,
    "distributed": lambda: distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,))),
}


@pytest.mark.parametrize("where", ["plain", "within", "shard", "object"])
@pytest.mark.parametrize("kind", MISFITS)
def test_I12_a_tensor_that_is_not_whole_is_refused(kind: str, where: str) -> None:
    """Catches: one rank's part of a tensor that is saved as the whole, without a word."""
    with process_group():
        tensor = MISFITS[kind]()
        place = {
            "plain": lambda: tensor,
            "within": lambda: (1, {"y": tensor}),
            "shard": lambda: ShardedTensor.from_rank_offsets("k", tensor),
            "object": lambda: ShardedObject("k", [tensor], (1,), (0,)),
        }[where]()
        said = refusal_of(x=place)
        assert "['x']" in said and "cannot be saved" in said
        if where == "shard":
            with pytest.raises(RestoreFailed, match="'k'"):
                formats_of(DriverOptions(0))[1].survey("state", state(x=place), "", ())


def test_I12_a_sparse_shard_is_refused() -> None:
    """Catches: a ShardedTensor that fails in the middle of each save, with the advice to try again."""
    for sparse in (torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()):
        shard = ShardedTensor.from_rank_offsets("k", sparse)
        assert "its layout is torch.sparse" in refusal_of(x=shard)
        with process_group(), pytest.raises(RestoreFailed, match="its layout is torch.sparse"):
            formats_of(DriverOptions(0))[1].survey("state", state(x=shard), "", ())


@pytest.mark.parametrize("anything", [False, True])
@pytest.mark.parametrize(
    "hidden",
    [
        lambda one: (one, 1),
        lambda one: Progress(one),
        lambda one: (LocalNonpersistentObject(1),),
    ],
)
def test_I12_a_sharded_value_that_megatron_core_does_not_find_is_refused(
    hidden: Any, anything: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: rank 0's shard that is saved for all ranks, also where the loader takes any class."""
    one = ShardedTensor.from_rank_offsets("v", torch.ones(2))
    with process_group():
        monkeypatch.setattr(states, "keeps_common_in_shard", lambda: anything)
        driver = StateDriver(DriverOptions(0, common_state="auto"))
        with pytest.raises(SaveRefused, match="out of the tuple or object"):
            driver.draft({"state": state(x=hidden(one))})


class OwnParameter(torch.nn.Parameter):
    """A parameter that a trainer tells from others by its class."""


def test_I12_a_parameter_of_another_class_has_its_values_in_a_plain_tensor(tmp_path: Path) -> None:
    """Catches: a model with parameters of its own kind, none of which can be saved any more."""
    one = OwnParameter(torch.arange(4.0))
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, {"w": ShardedTensor.from_rank_offsets("w", one)}).wait()
        found = manager.restore({"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4))})
    assert torch.equal(found.state["w"], torch.arange(4.0))


def test_I12_objects_that_nobody_writes_or_fills_may_be_empty() -> None:
    """Catches: a replica's object, or one of a template, that is refused for want of values."""
    empty = torch.ones(4, device="meta")
    with process_group():
        draft(x=ShardedObject("k", empty, (1,), (0,), replica_id=1))
        refuse_misfits("state", [ShardedObject("k", empty, (1,), (0,))])


def test_I12_a_distributed_tensor_has_its_way_out() -> None:
    """Catches: a user of FSDP2 who is told no more than that it is refused."""
    with process_group():
        said = refusal_of(x=MISFITS["distributed"]())
    assert "full_tensor()" in said and "to_local()" in said


@pytest.mark.parametrize(
    "some",
    [
        lambda one: [one, 1.0],
        lambda one: [{"a": one}, {"b": 1}],
        lambda one: [[], one],
        lambda one: [LocalNonpersistentObject(1), 2, one],
    ],
)
def test_I12_a_list_that_is_not_put_together_again_is_refused(some: Any) -> None:
    """Catches: values of a list that come back at another place, or a load that ends in merging it."""
    one = ShardedTensor.from_rank_offsets("v", torch.ones(2))
    assert "the list at ['a']['b']" in refusal_of(a={"b": some(one)})


def test_I12_what_trainers_save_is_accepted_and_restored(tmp_path: Path) -> None:
    """Catches: random states, arguments and optimizers of Megatron's that are refused."""
    marked = torch.nn.Parameter(torch.ones(2))
    marked.tensor_model_parallel = True  # type: ignore[attr-defined]
    groups = [{"lr": 0.1, "params": LocalNonpersistentObject([0])} for _ in range(2)]
    plain = {
        "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.99), place=Path("a")),
        "param_groups": groups,
        "dtype": torch.bfloat16,
        "seen": {1, 2},
        "by_layer": {0: torch.ones(2), (1, 2): None},
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "sparse": [torch.eye(2).to_sparse(), torch.eye(2).to_sparse_csr()],
        "marked": marked,
        "empty": collections.defaultdict(int),
    }
    rng = [{"np": np.random.get_state(), "torch": torch.get_rng_state(), "py": (3, (1, 2), None)}]
    odd = {"o": ShardedObject("o", [Progress(), np.float64(1)], (1,), (0,))}
    made = state(plain=plain, rng=ShardedObject("rng", rng, (1,), (0,)), odd=odd)
    with CheckpointManager(tmp_path) as ckpts:
        ckpts.save(1, made).wait()
        restored = ckpts.restore(made)
    assert restored is not None
    found = restored.state["plain"]
    assert found["args"] == plain["args"] and found["seen"] == {1, 2}
    assert found["marked"].sum() == 2 and found["empty"] == {}
    assert [group["lr"] for group in found["param_groups"]] == [0.1, 0.1]
    assert np.array_equal(restored.state["rng"][0]["np"][1], rng[0]["np"][1])
    assert restored.state["odd"]["o"] == [Progress(), np.float64(1)]


@pytest.mark.skipif(keeps_common_in_shard(), reason="its loader takes any class")
def test_I12_a_refused_save_leaves_the_older_one(tmp_path: Path) -> None:
    """Catches: an older checkpoint that was pruned for one that cannot be loaded."""
    with CheckpointManager(tmp_path, retention=LatestN(1)) as ckpts:
        ckpts.save(1, state(lr=1.0)).wait()
        with pytest.raises(SaveRefused, match=r"\['lr'\].*float64.*x.item\(\)") as caught:
            ckpts.save(2, state(lr=np.float64(1)))
        assert (caught.value.part, caught.value.key) == ("state", "['lr']")
        ckpts.save(3, state(lr=1.0)).wait()
    with CheckpointManager(tmp_path) as ckpts:
        assert ckpts.all_steps() == [3]


def test_I12_values_that_did_not_change_are_not_loaded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: saves that take longer for hundreds of values that are the same each time."""
    driver, loads = StateDriver(DriverOptions(0)), []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: (loads.append(1), load(*a, **k))[1])
    counts = []
    for step in (1, 1, 2, 2):
        rng = ShardedObject("rng", [torch.rand(4)], (1,), (0,))
        driver.draft({"state": state(step=step, rng=rng)})
        counts.append(len(loads))
    assert counts == [2, 2, 3, 3]


@pytest.mark.skipif(keeps_common_in_shard(), reason="its loader takes any class")
@pytest.mark.parametrize("value", [np.float64(1), np.ones(2), collections.deque([1]), Progress()])
def test_a_checkpoint_of_before_names_what_is_refused_and_what_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: an error that is cut off before the refused class, with escape codes of a terminal, and
    with advice about shapes; or advice that does not help."""
    with monkeypatch.context() as patch, CheckpointManager(tmp_path) as ckpts:
        patch.setattr(read_back.ReadBack, "check", lambda *arguments: ())
        ckpts.save(1, state(x=value)).wait()
    with CheckpointManager(tmp_path) as ckpts:
        with caplog.at_level(logging.WARNING), pytest.raises(RestoreFailed) as caught:
            ckpts.restore(state())
        said = str(caught.value)
        kind = {np.float64: "numpy", np.ndarray: "numpy"}.get(type(value), type(value).__name__)
        assert kind in said and said.isprintable() and "shape" not in said
        assert all(record.getMessage().isprintable() for record in caplog.records)
        assert isinstance(caught.value.__cause__, pickle.UnpicklingError)
        assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1" in said
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
        assert ckpts.restore(state()) is not None


def request_for(directory: Path, value: Any) -> Any:
    """A request as megatron-core makes it: a shard with an object, and a ``common.pt`` beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    torch.save({"lr": value}, directory / "common.pt")
    held = io.BytesIO()
    torch.save([1], held)
    item = SimpleNamespace(index=MetadataIndex("rng"))
    bucket = (str(directory / "__0_0.distcp"), "__0_0.distcp", ([(item, held)], []))
    return SimpleNamespace(async_fn=print, async_fn_args=[0, [bucket]], finalize_fns=[])


@pytest.mark.skipif(keeps_common_in_shard(), reason="its loader takes any class")
@pytest.mark.parametrize("ready", [True, False])
def test_I12_what_another_maker_has_pickled_is_loaded_back(tmp_path: Path, ready: bool) -> None:
    """Catches: a request with a value that no start can load, which is tracked."""

    def staged(name: str, value: Any) -> None:
        place = tmp_path / name
        request = {"request": request_for(place, value)}
        build = {"build": lambda directory: request_for(place, value)}
        made = StateDriver(DriverOptions(0)).draft(
            {"a": ForeignRequest(**(request if ready else build))}
        )
        if not ready:
            made.stage(str(tmp_path), made.specs, {})

    staged("good", 1.0)
    with pytest.raises(SaveRefused, match="common.pt of the request.*numpy.*scalar") as caught:
        staged("bad", np.float64(1))
    assert (caught.value.part, caught.value.key) == ("a", "common.pt")


def test_I12_an_object_of_another_maker_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    """Catches: an object of a class that is made while the trainer runs, or whose pickle is torn."""
    request = request_for(tmp_path, 1.0)
    ((_, _, ([(_, held)], _)),) = request.async_fn_args[1]
    held.truncate(held.getbuffer().nbytes // 2)
    with pytest.raises(SaveRefused, match="rng of the request could not be loaded again") as caught:
        StateDriver(DriverOptions(0)).draft({"a": ForeignRequest(request=request)})
    assert caught.value.key == "rng"
