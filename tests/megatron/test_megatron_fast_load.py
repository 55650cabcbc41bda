"""Restores that read files whole: the same state as by stock's load, and nothing unverified."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import Cluster, path_of
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

from ckptfsm import CheckpointManager, DamagedRoot
from ckptfsm.adapters.posix_storage import opened_storage
from ckptfsm.core.errors import RecoveryWarning
from ckptfsm.dcp import fast_load as reading
from ckptfsm.dcp.driver import StateDriver
from ckptfsm.dcp.fast_load import FastLoad
from ckptfsm.dcp.state_format import DriverOptions
from ckptfsm.disk import pieces
from ckptfsm.disk.inspection import read_manifest
from ckptfsm.megatron.compat import cpu_devices, process_group

pytestmark = pytest.mark.megatron

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
BIG = pieces.PIECE_BYTES // 4 + 3  # floats that do not fit into a piece


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=random).to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=random).to(dtype)
    return torch.randint(0, 100, shape, generator=random).to(dtype)


def whole(key: str, data: torch.Tensor, **settings: Any) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, data, **settings)


def halves(tensor: ShardedTensor) -> dict[str, Any]:
    """The build of a factory: two shards that are views of a tensor."""
    one, other = tensor.chunk(2)
    return {
        "one": whole("made.one", one),
        "other": whole("made.other", other),
    }


def replica(key: str, data: torch.Tensor) -> list[ShardedTensor]:
    """A second shard of the same rank, if megatron-core can load two: 0.13 cannot."""
    return [whole(key, data, replica_id=1)] if hasattr(ShardedTensor, "has_regular_grid") else []


def wide_state(seed: int, fill: Callable[..., torch.Tensor] = noise) -> dict[str, Any]:
    """A state with everything that a state may have. Seeds and ``fill`` tell the values."""
    flat = fill((100 + 7,), torch.float32, seed + 1)
    tied, copied = fill((9,), torch.float32, seed + 2), fill((9,), torch.float32, seed + 2)
    return {
        "dtypes": {
            str(dtype): whole(f"dtype.{dtype}", fill((3, 5), dtype, seed + n))
            for n, dtype in enumerate(DTYPES)
        },
        "shapes": [
            whole("scalar", fill((), torch.float32, seed + 3)),
            {"big": whole("big", fill((BIG,), torch.float32, seed + 4))},
            whole("also.big", fill((3, BIG // 3), torch.float32, seed + 5)),
            whole("odd", fill((1, 3, 1, 2), torch.bfloat16, seed + 6)),
        ],
        7: whole("numbered", fill((4,), torch.float32, seed + 7)),
        "views": {"a": whole("view.a", flat[:100]), "b": whole("view.b", flat[100:])},
        "transposed": whole("transposed", fill((6, 4), torch.float32, seed + 8).t()),
        "parameter": whole("parameter", torch.nn.Parameter(fill((5,), torch.float32, seed + 9))),
        "tied": [whole("tied", tied), *replica("tied", tied)],
        "copies": [whole("copied", copied), *replica("copied", copied.clone())],
        "prepended": whole("prepended", fill((4,), torch.float32, seed), prepend_axis_num=1),
        "none": ShardedTensor("none", None, torch.float32, (2,), (2,), (0,), (1,)),
        "object": ShardedObject("object", {"seed": seed}, (1,), (0,)),
        "lists": [[ShardedObject("other", [seed], (1,), (0,))]],
        "local": LocalNonpersistentObject(seed),
        "factory": ShardedTensorFactory(
            "made",
            fill((8,), torch.float32, seed + 10),
            lambda key, data, *_: halves(data),
            lambda parts: torch.cat([parts["one"], parts["other"]]),
        ),
        "step": seed,
    }


def saved_state(seed: int) -> dict[str, Any]:
    """The same, for a save."""
    state = wide_state(seed)
    state["none"] = whole("none", noise((2,), torch.float32, seed))
    return state


def empty(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def template() -> dict[str, Any]:
    return wide_state(0, empty)


def stock_load(directory: Path, state: Any) -> Any:
    with cpu_devices(), process_group():
        return dist_checkpointing.load(state, str(directory), validate_access_integrity=False)


def described(value: Any) -> Any:
    """Structure and bytes of a loaded state."""
    if isinstance(value, dict):
        return {key: described(each) for key, each in value.items()}
    if isinstance(value, list):
        return [described(each) for each in value]
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return type(value), value.dtype, tuple(value.shape), value.stride(), data
    return value


class Loads:
    """The fast loads that restores have planned."""

    def __init__(self) -> None:
        self.made: list[FastLoad | None] = []

    @property
    def filled(self) -> set[str]:
        """The keys that the last one has filled."""
        last = self.made[-1]
        return set() if last is None else {each.key for each in last.full()}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    seen, plan = Loads(), StateDriver.plan_reading

    def planned(*arguments: Any) -> FastLoad | None:
        seen.made.append(plan(*arguments))
        return seen.made[-1]

    monkeypatch.setattr(StateDriver, "plan_reading", planned)
    return seen


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with steps 1 and 2, to be copied."""
    root = tmp_path_factory.mktemp("saved") / "root"
    with CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, saved_state(step)).wait()
    return root


@pytest.fixture
def root(two_steps: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_steps, tmp_path / "root"))


def restored_state(root: Path, state: Any, **settings: Any) -> Any:
    with CheckpointManager(root, **settings) as manager:
        found = manager.restore(state)
        assert found is not None
        return found.state


NOT_FAST = {"transposed", "none"} | {shard.key for shard in replica("tied", torch.zeros(1))}
"""Not contiguous; no memory to fill; two shards in one memory."""


def test_a_restore_gives_what_stocks_load_gives(root: Path, loads: Loads) -> None:
    """Catches: a byte at the wrong place, a lost value of a list, a key that became text, a tensor
    that stock fills in place and we do not."""
    wanted, fast = template(), template()
    expected = stock_load(path_of(root, 2), wanted)
    found = restored_state(root, fast)
    assert described(found) == described(expected)
    assert found["step"] == 2
    keys = {v.key for v in nested_values(fast) if isinstance(v, ShardedTensor)}
    assert loads.filled == (keys | {"made.one", "made.other"}) - NOT_FAST
    same = [found["shapes"][1]["big"], fast["shapes"][1]["big"].data]
    assert same[0].data_ptr() == same[1].data_ptr()
    assert torch.equal(found["views"]["a"], saved_state(2)["views"]["a"].data)


@pytest.mark.parametrize("engine", ["eager", "gated"])
def test_files_of_each_engine_are_read(tmp_path: Path, loads: Loads, engine: str) -> None:
    with CheckpointManager(tmp_path / "root", engine=engine) as manager:
        manager.save(3, saved_state(3))
        manager.before_update()
        manager.wait_until_finished()
        found = manager.restore(template())
    assert described(found.state) == described(
        stock_load(path_of(tmp_path / "root", 3), template())
    )
    assert "big" in loads.filled


def test_parts_in_directories_are_read(tmp_path: Path, loads: Loads) -> None:
    """Catches: files of one part that are taken for those of another; a plain file that is read so."""
    parts = {
        "state": {"w": whole("w", noise((BIG,), torch.float32, 1))},
        "other": {"w": whole("w", noise((BIG,), torch.float32, 2))},
        "data": b"plain",
    }
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, parts=parts).wait()
        wanted = {
            "state": {"w": whole("w", torch.zeros(BIG))},
            "other": {"w": whole("w", torch.zeros(BIG))},
            "data": b"",
        }
        found = manager.restore(parts=wanted).parts
    assert found["data"] == b"plain"
    for name in ("state", "other"):
        assert torch.equal(found[name]["w"], parts[name]["w"].data)
    assert loads.made[-1] is not None
    assert {name.rpartition("/")[0] for name in loads.made[-1].files} == {"", "other"}


@pytest.mark.parametrize("inside", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("made_inside", [False, True])
def test_a_state_is_restored_in_every_mode_of_torch(
    tmp_path: Path, loads: Loads, inside: Callable[[], Any], made_inside: bool
) -> None:
    """Catches: memory that the reading thread may not write, as it is not in the caller's mode."""
    made = inside if made_inside else nullcontext
    with made():
        weight = torch.nn.Parameter(torch.zeros(BIG))
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, {"w": whole("w", torch.ones(BIG))}).wait()
        with inside():
            found = manager.restore({"w": whole("w", weight)}).state["w"]
    assert torch.equal(found, torch.ones(BIG))
    assert found.data_ptr() == weight.data_ptr()
    inference = made_inside and inside is torch.inference_mode
    assert loads.filled == (set() if inference else {"w"})


@pytest.mark.parametrize("saved_axis", [0, 1])
@pytest.mark.parametrize("wanted_axis", [0, 1])
def test_another_sharding_is_read_in_one_go(
    tmp_path: Path, loads: Loads, saved_axis: int, wanted_axis: int
) -> None:
    """Catches: half of a tensor that gets the first bytes of the whole one."""
    data = noise((2, 4, BIG // 4 * 4), torch.float32, 1)

    def shards(values: torch.Tensor, axis: int, parts: int) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(
                "w",
                each.contiguous(),
                (0, number, len(values)),
                (1 + axis, n, parts),
                prepend_axis_num=1,
            )
            for number, layer in enumerate(values)
            for n, each in enumerate(layer.chunk(parts, axis))
        ]

    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, {"w": shards(data, saved_axis, 2), "v": whole("v", data)}).wait()
        wanted = {"w": shards(data * 0, wanted_axis, 4), "v": whole("v", data * 0)}
        found = manager.restore(wanted)
    layers = [torch.cat(found.state["w"][first : first + 4], wanted_axis) for first in (0, 4)]
    assert torch.equal(torch.stack(layers), data)
    assert torch.equal(found.state["v"], data)
    assert loads.filled == {"w", "v"}


@pytest.mark.parametrize(
    "wanted",
    [
        whole("w", torch.zeros(BIG, dtype=torch.float64)),
        whole("w", torch.zeros(BIG), allow_shape_mismatch=True),
        whole("w", torch.zeros(2 * BIG)[::2]),
    ],
    ids=["dtype", "free shape", "strided"],
)
def test_another_form_is_converted_as_by_stock(
    tmp_path: Path, loads: Loads, wanted: ShardedTensor
) -> None:
    data = noise((BIG,), torch.float32, 1)
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, {"w": whole("w", data)}).wait()
        found = manager.restore({"w": wanted})
    assert found.state["w"].dtype == wanted.dtype
    assert torch.equal(found.state["w"], data.to(wanted.dtype))
    assert loads.made == [None]


@pytest.mark.parametrize("verify", ["none", "sizes"])
def test_without_digests_files_are_not_read_whole(root: Path, loads: Loads, verify: str) -> None:
    """Catches: a damaged blob that stock's reader would refuse, and that is loaded unseen."""
    assert restored_state(root, template(), verify=verify)["step"] == 2
    assert loads.made == []


def test_a_foreign_checkpoint_is_stocks_work(root: Path, loads: Loads) -> None:
    """Catches: files without digests that are read without a look at their checksums."""
    shutil.rmtree(root / ".ckptfsm")
    for step in (1, 2):
        shutil.rmtree(path_of(root, step) / ".ckptfsm")
    assert restored_state(root, template())["step"] == 2
    assert loads.made == []


@pytest.mark.parametrize("byte", [0, -1])
def test_a_blob_of_another_torch_is_left_to_stock(
    root: Path, loads: Loads, monkeypatch: pytest.MonkeyPatch, byte: int
) -> None:
    """Catches: a place of the data that is assumed without a look at the whole head."""
    form = reading.form_of

    def other(*arguments: Any) -> reading.Blob | None:
        blob = form(*arguments)
        assert blob is not None
        head = bytearray(blob.head)
        head[byte] ^= 1
        return blob._replace(head=bytes(head))

    monkeypatch.setattr(reading, "form_of", other)
    found = restored_state(root, template())
    assert described(found) == described(stock_load(path_of(root, 2), template()))
    assert loads.made[-1] is not None
    assert loads.filled == set()


def test_a_torch_with_surprises_is_left_to_stock(
    root: Path, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def surprise(tensor: torch.Tensor) -> None:
        raise ValueError("another record")

    monkeypatch.setattr(reading, "make_template", surprise)
    assert restored_state(root, template())["step"] == 2
    assert loads.made == [None]


# -- damage ----------------------------------------------------------------------------------------


def blob_of(root: Path, key: str) -> tuple[Path, int, int]:
    """The file, the place and the length of a tensor's blob in step 2."""
    directory = path_of(root, 2)
    with opened_storage(root) as storage:
        manifest = read_manifest(storage, directory.name)
        assert manifest is not None
        planned = StateDriver(DriverOptions(0)).plan_reading(
            storage, directory.name, {"state": ("", template())}, manifest.files
        )
    assert planned is not None
    (found,) = [
        (entry.name, target)
        for entry, targets in zip(planned._entries, planned._targets, strict=True)
        for target in targets
        if target.regions[0].shard.key == key
    ]
    return directory / found[0], found[1].start, found[1].blob.size


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


PLACES: dict[str, Callable[[int, int], int]] = {
    "head": lambda start, size: start + 2,
    "pickle": lambda start, size: start + 100,
    "first value": lambda start, size: start + size - 4 * BIG - 100,
    "values": lambda start, size: start + size // 2,
    "checksums": lambda start, size: start + size - 400,
    "end": lambda start, size: start + size - 1,
}


@pytest.mark.parametrize("place", PLACES)
def test_F21_a_flipped_byte_anywhere_in_a_file_is_damage(
    root: Path, loads: Loads, place: str
) -> None:
    """Catches: a digest that is not compared, or that has holes."""
    path, start, size = blob_of(root, "big")
    flip(path, PLACES[place](start, size))
    with CheckpointManager(root) as manager:
        with pytest.raises(
            DamagedRoot, match=f"step 2 is damaged: {path.name} has another content"
        ):
            manager.restore(template(), step=2)
        assert loads.made[-1] is not None
        assert path.name in loads.made[-1].files


def test_F21_the_step_before_a_damaged_one_is_whole(root: Path) -> None:
    """Catches: a tensor of the damaged step in the state of the step before it."""
    path, start, size = blob_of(root, "big")
    flip(path, start + size - 1)
    wanted = template()
    with (
        CheckpointManager(root) as manager,
        pytest.warns(RecoveryWarning, match="step 2 is damaged, .* has another content"),
    ):
        found = manager.restore(wanted)
        assert manager.all_steps() == [1]
    assert found.step == 1
    assert described(found.state) == described(stock_load(path_of(root, 1), template()))


@pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json", "truncated", "grown"])
def test_F21_damage_elsewhere_is_found_before_a_tensor_changes(
    root: Path, loads: Loads, name: str
) -> None:
    """Catches: metadata that is believed before they were verified."""
    path = path_of(root, 2) / name
    if name in ("truncated", "grown"):
        path, _, _ = blob_of(root, "big")
    elif not path.exists():
        pytest.skip(f"this megatron-core writes no {name}")
    wanted = template()
    with CheckpointManager(root) as manager:
        if name == "truncated":
            os.truncate(path, path.stat().st_size - 1)
        elif name == "grown":
            path.write_bytes(path.read_bytes() + b"x")
        else:
            flip(path, path.stat().st_size // 2)
        with pytest.raises(DamagedRoot, match="step 2 is damaged"):
            manager.restore(wanted, step=2)
    assert not wanted["shapes"][1]["big"].data.any()


def test_no_object_is_unpickled_before_its_file_was_verified(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: code in a file of another writer that runs, though the digest tells of it."""
    path, start, _ = blob_of(root, "big")
    flip(path, start + 2)

    def unpickled(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickled")

    with CheckpointManager(root) as manager:
        monkeypatch.setattr(torch, "load", unpickled)
        with pytest.raises(DamagedRoot, match="has another content"):
            manager.restore(template(), step=2)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reading is interrupted at its first piece."""
    take = FastLoad._take

    def interrupt(self: FastLoad, piece: pieces.Piece) -> None:
        take(self, piece)
        self.stop()

    monkeypatch.setattr(FastLoad, "_take", interrupt)
    yield


def test_a_reading_that_was_stopped_fills_nothing_more(
    root: Path, loads: Loads, interrupted: None
) -> None:
    """Catches: a state that changes behind the back of a trainer that was interrupted."""
    blob_of(root, "big")
    with opened_storage(root) as storage:
        manifest = read_manifest(storage, path_of(root, 2).name)
        wanted = template()
        planned = StateDriver(DriverOptions(0)).plan_reading(
            storage, path_of(root, 2).name, {"state": ("", wanted)}, manifest.files
        )
        assert planned is not None
        planned.run(planned.files)
    filled = {each.key for each in planned.full()}
    assert not {"big", "also.big"} & filled


# -- two ranks -------------------------------------------------------------------------------------


def test_each_rank_reads_its_files_past_the_page_cache(cluster: Cluster, tmp_path: Path) -> None:
    """Catches: a rank that waits for another's files, a file that is read by a rank for nothing."""
    ranks = cluster.run("fast_load_jobs.save_and_restore", root=str(tmp_path / "root"))
    for number, rank in enumerate(ranks):
        assert (rank["equal"], rank["filled"]) == (True, ["m", "w"])
        assert rank["read"] == {f"__{number}_0.distcp": True, f"__{number}_1.distcp": True}


def test_a_file_that_both_ranks_want_is_read_through_the_page_cache(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Catches: a disk that is read as often as there are replicas."""
    root = str(tmp_path / "root")
    for rank in cluster.run("fast_load_jobs.save_and_restore", root=root, replicated=True):
        assert (rank["equal"], rank["filled"]) == (True, ["m", "w"])
        assert rank["read"] == {"__0_0.distcp": False, "__0_1.distcp": False}


def test_F21_damage_that_one_rank_finds_while_it_loads_is_heard_by_both(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Catches: a rank that loads on while the other raises, and waits for it for ever."""
    root = tmp_path / "root"
    cluster.run("fast_load_jobs.save_and_restore", root=str(root))
    path = path_of(root, 1) / "__1_0.distcp"
    flip(path, path.stat().st_size // 2)
    for rank in cluster.run("restore", root=str(root), step=1):
        assert rank["error"]["type"] == "DamagedRoot"
        assert "__1_0.distcp has another content" in rank["error"]["text"]


def test_I10_an_interrupt_while_a_rank_reads_reaches_both(cluster: Cluster, tmp_path: Path) -> None:
    """Catches: a state that is written on by a thread after the call has raised."""
    ranks = cluster.run("fast_load_jobs.interrupt_reading", root=str(tmp_path / "root"))
    assert [rank["raised"] for rank in ranks] == ["RankInterrupted", "KeyboardInterrupt"]
    for rank in ranks:
        assert (rank["stopped"], rank["readers"], rank["equal"]) == ([True], 0, True)
