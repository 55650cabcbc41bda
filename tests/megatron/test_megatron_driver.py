"""The plans that ranks send each other, and the memory of rank 0."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from ckptfsm import CheckpointManager, CkptFsmError
from ckptfsm.core.errors import ConfigError, RestoreFailed, SaveRefused, UnusedKeysWarning
from ckptfsm.dcp.driver import MEGATRON_CORE, StateDriver
from ckptfsm.dcp.state_format import DriverOptions
from ckptfsm.writers.plain_files import FilesDriver

pytestmark = pytest.mark.megatron


def state(rank: int, extra: str) -> dict[str, Any]:
    """Half of a tensor, and one more, named ``extra``, that only this rank has."""
    made = {"x": ShardedTensor.from_rank_offsets("x", torch.ones(4), (0, rank, 2))}
    if extra:
        made["extra"] = ShardedTensor.from_rank_offsets(f"{extra}{rank}", torch.ones(2))
    return made


def test_a_manager_takes_a_driver_for_another_kind_of_state(tmp_path) -> None:
    """Catches: a state that is not megatron-core's, for which a user would need another manager."""
    made = []

    def driver(options: DriverOptions) -> FilesDriver:
        made.append(options.rank)
        return FilesDriver()

    with CheckpointManager(tmp_path / "root", driver=driver) as ckpts:
        ckpts.save(1, parts={"notes": b"words"}).wait()
        assert ckpts.restore(parts={"notes": b""}).parts["notes"] == b"words"
        with pytest.raises(SaveRefused, match="give bytes or a FileTree"):
            ckpts.save(2, state(0, ""))
    assert made == [0]


def test_a_refused_save_takes_no_plans_from_rank_0() -> None:
    """Catches: a good save that is refused because rank 0 forgot what another rank refers to."""
    ranks = [StateDriver(DriverOptions(0)), StateDriver(DriverOptions(1))]
    for accepted, extras in (
        (True, ("", "")),
        (False, ("", "y")),  # refused by the coordinator: the disk is full, say
        (True, ("", "y")),
        (True, ("", "y")),
        (True, ("z", "y")),
    ):
        drafts = [
            driver.draft({"state": state(rank, extras[rank])}) for rank, driver in enumerate(ranks)
        ]
        merged = ranks[0].merge([draft.summary for draft in drafts])
        assert set(merged) == {"state"}
        for driver in ranks:
            if accepted:
                driver.accept()
            else:
                driver.refuse()
    assert [draft.summary.plans is None for draft in drafts] == [False, True]


def test_rank_0_without_a_part_merges_the_plans_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a part that rank 0 does not give, of a library that was imported after its manager was
    made: the save fails there with an error about nothing that the trainer did."""
    with monkeypatch.context() as earlier:
        earlier.delitem(sys.modules, MEGATRON_CORE)
        first = StateDriver(DriverOptions(0, ranks=2))
    second = StateDriver(DriverOptions(1, ranks=2))
    whole = {"x": ShardedTensor.from_rank_offsets("x", torch.ones(4))}
    drafts = [first.draft({"critic": None}), second.draft({"critic": whole})]
    assert set(first.merge([draft.summary for draft in drafts])) == {"critic"}


def test_a_writer_that_cannot_start_at_rank_0_takes_no_plans_from_it() -> None:
    """Catches: the save after one that failed at rank 0 alone is refused, and ends the training."""
    ranks = [StateDriver(DriverOptions(0)), StateDriver(DriverOptions(1))]
    for started in (False, True):
        drafts = [driver.draft({"state": state(n, "")}) for n, driver in enumerate(ranks)]
        assert set(ranks[0].merge([draft.summary for draft in drafts])) == {"state"}
        if started:
            ranks[0].accept()
        else:
            ranks[0].refuse()
        ranks[1].accept()
    assert [draft.summary.plans is None for draft in drafts] == [False, True]


def whole(key: str, *shape: int, value: float = 0.0, **settings: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, torch.full(shape, value), **settings)


def half(number: int) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", torch.ones(2), (0, number, 2))


def irregular(key: str, *shape: int, value: float = 0.0) -> ShardedTensor:
    """The same without a grid of shards."""
    tensor = torch.full(shape, value)
    return ShardedTensor(key, tensor, tensor.dtype, shape, shape, (0,) * len(shape), None)


def objects(key: str, of: int = 1) -> dict[str, ShardedObject]:
    return {f"{key}{n}": ShardedObject(key, n, (of,), (n,)) for n in range(of)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A root with one checkpoint."""
    root = str(tmp_path_factory.mktemp("saved") / "root")
    with CheckpointManager(root) as manager:
        state = {"w": whole("decoder.weight", 4, 16, value=1.0), **objects("extra"), "lr": 3}
        manager.save(1, state).wait()
    return root


MISFITS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "shape": (
        {"w": whole("decoder.weight", 4, 8)},
        (
            "part 'state': key 'decoder.weight': wanted shape (4, 8), the checkpoint has shape (4, 16): "
            "build the model with the checkpoint's sizes"
        ),
        {"key": "decoder.weight", "wanted": (4, 8), "found": (4, 16)},
    ),
    "key": (
        {"w": whole("decoder.wieght", 4, 16)},
        "no key 'decoder.wieght'; nearest: 'decoder.weight': name it as it was saved",
        {"key": "decoder.wieght", "wanted": (4, 16), "found": None},
    ),
    "several keys": (
        {"x": whole("x", 1), "w": whole("decoder.weight", 1), **objects("y")},
        "(3 keys: 'x', 'decoder.weight', 'y' do not fit)",
        {"key": "x", "wanted": (1,), "found": None},
    ),
    "key of a tensor that may have another shape": (
        {"w": whole("bias", 4, allow_shape_mismatch=True)},
        "part 'state': the checkpoint has no key 'bias'",
        {"key": "bias", "wanted": (4,), "found": None},
    ),
    "key of an object": (
        {"nested": [objects("extrb")]},
        "part 'state': the checkpoint has no key 'extrb'; nearest: 'extra'",
        {"key": "extrb", "wanted": (1,), "found": None},
    ),
    "sharding of an object": (
        objects("extra", 2),
        (
            "part 'state': key 'extra': wanted object (0,) of (2,), the checkpoint has object (0,) of "
            "(1,); a key in reshard_drops is left out under another number of ranks: name all"
        ),
        {"key": "extra", "wanted": (2,), "found": (1,)},
    ),
    "tensor for an object": (
        {"w": whole("extra", 2)},
        "part 'state': key 'extra': wanted shape (2,), the checkpoint has object (0,) of (1,)",
        {"key": "extra", "wanted": (2,), "found": (1,)},
    ),
    "object for a tensor": (
        objects("decoder.weight"),
        "key 'decoder.weight': wanted object (0,) of (1,), the checkpoint has shape (4, 16)",
        {"key": "decoder.weight", "wanted": (1,), "found": (4, 16)},
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_state_that_does_not_fit_is_named_before_anything_is_loaded(
    saved: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a wrong key or shape that comes out as a traceback of torch, without its last line."""
    wanted, words, facts = MISFITS[case]
    monkeypatch.setattr(StateDriver, "load", None)
    with CheckpointManager(saved) as manager, pytest.raises(RestoreFailed) as caught:
        manager.restore(wanted)
    assert words in caught.value.message
    assert {**caught.value.facts, **facts} == caught.value.facts
    assert (caught.value.part, caught.value.step, caught.value.file) == ("state", 1, saved)


def halves(key: str, tensor: torch.Tensor, *_: Any) -> dict[str, Any]:
    return {"a": ShardedTensor.from_rank_offsets(key, tensor)}


def first_half(found: dict[str, Any]) -> Any:
    return found["a"]


def test_a_state_that_megatron_core_can_load_is_not_refused(saved: str) -> None:
    """Catches: a check that is stricter than the load: of types, padding, dropped keys, factories."""
    made = ShardedTensorFactory("decoder.weight", torch.zeros(4, 16), halves, first_half)
    wanted = {
        "padded": whole("decoder.weight", 6, 16, allow_shape_mismatch=True),
        "made": made,
        "halves": ShardedTensor.from_rank_offsets(
            "decoder.weight", torch.zeros(4, 16, dtype=torch.bfloat16)
        ),
        "common": {"no key": 5},
        **{f"dropped{n}": o for n, o in enumerate(objects("rng_state", 2).values())},
    }
    with CheckpointManager(saved) as manager:
        for key in ("padded", "made", "halves"):
            mine = {k: v for k, v in wanted.items() if k in (key, "common", "dropped0", "dropped1")}
            if key == "padded":
                with pytest.warns(match="rng_state"):
                    restored = manager.restore(mine, partial=True)
                assert restored is not None and restored.dropped == ("rng_state",)
            else:
                restored = manager.restore({key: wanted[key]}, partial=True)
            assert restored is not None
            assert torch.equal(restored.state[key][:4], torch.ones(4, 16).to(restored.state[key]))
            assert restored.state["lr"] == 3


def typed(**dtypes: torch.dtype) -> dict[str, Any]:
    """A state with a tensor of each type, under its name."""
    made = {key: torch.ones(2, dtype=dtype) for key, dtype in dtypes.items()}
    return {key: ShardedTensor.from_rank_offsets(key, each) for key, each in made.items()}


TYPES = ("bool", "uint8", "int8", "int64", "bfloat16", "float32", "complex64")
KEPT = {
    "bool": set(TYPES),
    "uint8": {"int64", "bfloat16", "float32", "complex64"},
    "int8": {"int64", "bfloat16", "float32", "complex64"},
    "int64": {"bfloat16", "float32", "complex64"},
    "bfloat16": {"float32", "complex64"},
    "float32": {"bfloat16", "complex64"},
    "complex64": set(),
}


def test_values_that_another_type_would_change_are_not_loaded(tmp_path: Any) -> None:
    """Catches: 300 that is restored as 44, or without its imaginary part; a refusal of weights that are
    kept in another precision."""
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, typed(**{name: getattr(torch, name) for name in TYPES})).wait()
        for wanted in TYPES:
            dtype = getattr(torch, wanted)
            kept = [name for name in TYPES if wanted == name or wanted in KEPT[name]]
            found = manager.restore(typed(**dict.fromkeys(kept, dtype)), partial=True)
            assert found is not None
            assert all(torch.equal(found.state[k], torch.ones(2, dtype=dtype)) for k in kept)
            for name in set(TYPES) - set(kept):
                words = f"key '{name}': wanted {dtype}, the checkpoint has torch.{name}"
                with pytest.raises(RestoreFailed, match=words) as caught:
                    manager.restore(typed(**{name: dtype}), partial=True)
                assert (caught.value.part, caught.value.key) == ("state", name)


def moments(count: int) -> dict[str, Any]:
    """A state with moments of Adam. Each has its own key."""
    return {f"m{n}": whole(f"exp_avg.{n}", 2, value=1.0) for n in range(count)}


def test_keys_that_nobody_asks_for_are_told(tmp_path: Any) -> None:
    """Catches: a restore that drops the moments of Adam without a word, because the optimizer had
    made no step. And noise about plain values, which are all returned, about the pieces of an object,
    or where the caller left keys out on purpose."""
    weight, rng = {"w": whole("weight", 4)}, objects("rng", 2)
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, {**weight, **rng, **objects("extra"), **moments(6), "lr": 3}).wait()
        words = "^step 1: 7 keys of the checkpoint left out.* exp_avg.0, .* exp_avg.4 and 2 more"
        with pytest.warns(UnusedKeysWarning, match=words) as told:
            found = manager.restore({**weight, **rng})
        assert [w.category for w in told].count(UnusedKeysWarning) == 1 and found is not None
        assert found.unused == (*(f"exp_avg.{n}" for n in range(6)), "extra")
        assert found.state["lr"] == 3 and found.directory == str(tmp_path / "root/iter_0000001")
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnusedKeysWarning)
            part = manager.restore(weight, partial=True)
            everything = manager.restore({**weight, **rng, **objects("extra"), **moments(6)})
        assert part is not None and len(part.unused) == 8
        assert everything is not None and everything.unused == ()


def test_a_part_that_is_not_named_has_no_unused_keys(tmp_path: Any) -> None:
    """Catches: noise about the parts that a caller left out by name; or silence about a key of one
    that is restored, where the caller asks for none of its tensors."""
    parts = {"actor": {"w": whole("w", 2)}, "critic": moments(1), "note.txt": b"here"}
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, parts=parts).wait()
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnusedKeysWarning)
            actor = manager.restore(parts={"actor": {"w": whole("w", 2)}})
        assert actor is not None and actor.unused == ()
        with pytest.warns(UnusedKeysWarning, match="1 key of .*: exp_avg.0. An"):
            both = manager.restore(parts={"actor": {"w": whole("w", 2)}, "critic": {}})
        assert both is not None and both.unused == ("exp_avg.0",)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
def test_an_empty_tensor_is_saved_where_megatron_core_can(
    tmp_path: Any, shape: tuple[int, ...]
) -> None:
    """Catches: a ZeroDivisionError for an unnamed key; and an empty shard refused for good."""
    with CheckpointManager(tmp_path / "root") as manager:
        with pytest.raises(
            SaveRefused, match="part 'state': key 'w': a shard of shape .* is empty"
        ):
            manager.save(1, {"w": whole("w", *shape), "b": whole("b", 2)})
        manager.save(1, {"w": irregular("w", *shape), "b": whole("b", 2, value=1.0)}).wait()
        restored = manager.restore({"w": irregular("w", *shape), "b": whole("b", 2)})
        assert restored is not None
        assert restored.state["w"].shape == shape and restored.state["b"].sum() == 2
        with pytest.raises(RestoreFailed, match="key 'w': a shard of shape") as caught:
            manager.restore({"w": whole("w", *shape)})
        assert (caught.value.part, caught.value.key, caught.value.step) == ("state", "w", 1)


def test_a_rank_may_have_an_empty_shard_of_a_tensor_without_a_grid() -> None:
    """Catches: a refusal of an uneven sharding, which megatron-core saves."""
    ranks = [StateDriver(DriverOptions(0)), StateDriver(DriverOptions(1))]
    drafts = []
    for driver, rows, row in zip(ranks, (4, 0), (0, 4), strict=True):
        tensor = torch.ones(rows, 3)
        shard = ShardedTensor("x", tensor, tensor.dtype, (rows, 3), (4, 3), (row, 0), None)
        drafts.append(driver.draft({"state": {"x": shard}}))
    assert set(ranks[0].merge([draft.summary for draft in drafts])) == {"state"}


@pytest.mark.parametrize(("key", "shape"), [("loader/rng", (1,)), ("a/shard_0_1", (1,)), ("k", ())])
def test_I12_an_object_may_have_any_key(tmp_path: Any, key: str, shape: tuple[int, ...]) -> None:
    """Catches: a key that is saved, and that the loader cannot take apart, so that no start can load
    the checkpoint."""
    one = {"x": ShardedObject(key, {"position": 1}, shape, (0,) * len(shape))}
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, {"w": whole("w", 2), **one}).wait()
        both = manager.restore({"w": whole("w", 2), **one})
        with pytest.warns(UnusedKeysWarning):
            rest = manager.restore({"w": whole("w", 2)})
    assert both is not None and both.state["x"] == {"position": 1}
    assert rest is not None and rest.unused == (key,)


def test_I12_keys_that_no_checkpoint_can_have_are_refused() -> None:
    """Catches: keys that fail in the writer, at each save; an AttributeError of megatron-core."""
    ranks = [StateDriver(DriverOptions(0)), StateDriver(DriverOptions(1))]
    odd = "\ud800"
    for shard, words in (
        (whole(odd, 2), r"the key '\\ud800' cannot be written in UTF-8"),
        (ShardedObject(odd, 1, (1,), (0,)), "cannot be written in UTF-8"),
        (whole(5, 2), "the key 5 is not text"),  # type: ignore[arg-type]
        (whole("common_state/shard_0_1", 2), "megatron-core's own"),
    ):
        with pytest.raises(SaveRefused, match=words):
            ranks[0].draft({"state": {"x": shard}})
    for key in ("k", "k/shard_0_1"):
        tensor, found = {"x": whole(key, 2)}, objects("k")
        with pytest.raises(SaveRefused, match="is that of a tensor and of an object"):
            ranks[0].draft({"state": {**tensor, **found}})
        drafts = zip(ranks, (tensor, found), strict=True)
        with pytest.raises(SaveRefused, match="is that of a tensor and of an object"):
            ranks[0].merge([driver.draft({"state": s}).summary for driver, s in drafts])


def test_shards_that_make_no_whole_tensor_are_named() -> None:
    """Catches: a refusal by rank 0 that does not say which key of which part."""
    ranks = [StateDriver(DriverOptions(0)), StateDriver(DriverOptions(1))]
    drafts = [driver.draft({"state": state(0, ""), "more": {}}) for driver in ranks]
    with pytest.raises(CkptFsmError, match="part 'state': key 'x': ranks 0, 1 each") as caught:
        ranks[0].merge([draft.summary for draft in drafts])
    assert isinstance(caught.value, SaveRefused)
    assert (caught.value.part, caught.value.key) == ("state", "x")


@pytest.mark.parametrize(
    "ranks, said",
    [
        ([{"a": whole("w", 4), "b": whole("w", 4)}], "rank 0 has it twice: give each tensor a key"),
        ([{"w": whole("w", 4)}] * 3, "ranks 0, 1, 2 each have it .*give replica_id=rank"),
        ([{"w": whole("w", 4, replica_id=1)}] * 2, "no rank has it with the replica_id 0"),
        (
            [{"w": half(0)}, {"w": half(1)}, {"w": half(1)}],
            r"ranks 1, 2 each have its shard at \(2,\)",
        ),
        ([{"w": half(1)}], "1 of its 2 shards are in the states"),
    ],
)
def test_shards_that_do_not_fit_each_other_are_told_with_a_way_out(ranks: Any, said: str) -> None:
    """Catches: one name for two tensors, or a forgotten replica_id, told in megatron-core's words."""
    drivers = [StateDriver(DriverOptions(rank)) for rank in range(len(ranks))]
    drafts = [driver.draft({"state": one}) for driver, one in zip(drivers, ranks, strict=True)]
    with pytest.raises(SaveRefused, match=f"key 'w': {said}"):
        drivers[0].merge([draft.summary for draft in drafts])


@pytest.mark.parametrize("root", [None, 3, b"root"])
def test_a_root_that_is_no_path_is_refused(root: Any) -> None:
    """Catches: a variable of the environment that is not set, told as a TypeError of the library."""
    with pytest.raises(ConfigError, match="the root is a path, not"):
        CheckpointManager(root)
