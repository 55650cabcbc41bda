"""The promises of ``inspect_stock``: real checkpoints in, everything broken or hostile out.

The checkpoint is written once by stock Megatron-core, or by DCP alone; each test breaks one thing in
a copy.
"""

from __future__ import annotations

import builtins
import enum
import errno
import io
import json
import os
import pickle
import posix
import shutil
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import fake_ports
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from snapshots import files_of

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.config import make_config
from ckptfsm.core.errors import DamagedRoot
from ckptfsm.core.layout import TRACKER
from ckptfsm.core.ports import FileStat
from ckptfsm.disk.pickle_stubs import ALLOWED_GLOBALS, Stub, load_metadata_stub
from ckptfsm.disk.stock import COMMON_KEY, StockVerdict, inspect_stock
from ckptfsm.ranks.manager import Manager

pytestmark = pytest.mark.megatron

REPO = Path(__file__).resolve().parents[3]
STEP = "iter_0000005"
OBJECTS = {"rng_state/shard_0.0_1.2", "rng_state/shard_0.1_1.2"}
TENSORS = {"w.whole", "w.half", "w.scalar", "w.split"}


def _save_stock(directory: Path) -> None:
    """A checkpoint by ``megatron.core.dist_checkpointing.save``, in this process, on CPU."""
    import torch
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    make = ShardedTensor.from_rank_offsets
    state: dict[str, Any] = {
        "whole": make("w.whole", torch.arange(12.0).reshape(3, 4)),
        "half": make("w.half", torch.ones(4, dtype=torch.bfloat16)),
        "scalar": make("w.scalar", torch.tensor(3)),
        "split0": make("w.split", torch.ones(4, 2), (0, 0, 2)),
        "split1": make("w.split", torch.zeros(4, 2), (0, 1, 2)),
        "rng0": ShardedObject("rng_state", [torch.get_rng_state()], (1, 2), (0, 0)),
        "rng1": ShardedObject("rng_state", [torch.get_rng_state()], (1, 2), (0, 1)),
        "iteration": 5,
        "args": {"lr": 0.1},
    }
    dist_checkpointing.save(state, str(directory))


def _save_stock_dcp(directory: Path) -> None:
    """The same state by DCP's own planner and writer, as two ranks of FSDP2 write it."""
    import torch
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

    both = {
        "w.whole": torch.arange(12.0).reshape(3, 4),
        "w.half": torch.ones(4, dtype=torch.bfloat16),
        "w.scalar": torch.tensor(3),
        "w.nothing": torch.ones(0, 4),
        "step": 5,
    }
    planners, plans = [], []
    for rank in range(2):
        own = {f"rng_state/shard_0.{rank}_1.2": torch.get_rng_state().tolist()}
        split = {name: _shard_of(torch.ones(n, 2), rank) for name, n in _SPLIT.items()}
        planners.append(DefaultSavePlanner())
        planners[-1].set_up_planner({**both, **own, **split}, is_coordinator=rank == 0)
        plans.append(planners[-1].create_local_plan())
    plans, metadata = planners[0].create_global_plan(plans)
    writer = FileSystemWriter(str(directory))
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for planner, plan in zip(planners, writer.prepare_global_plan(plans), strict=True)
    ]
    writer.finish(metadata, results)


_SPLIT = {"w.split": 8, "w.uneven": 1}  # rows; the second rank has none of the latter


def _shard_of(whole: Any, rank: int) -> Any:
    """The rows of a rank, with the protocol by which a DTensor tells DCP where they belong."""
    import torch
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
    )
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    rows = -(-len(whole) // 2)
    part = whole[rank * rows : (rank + 1) * rows].clone()
    begin = torch.Size([min(rank * rows, len(whole)), 0])
    chunk = ChunkStorageMetadata(begin, part.size())
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(part), whole.size())
    part.__create_write_items__ = lambda name, _: [
        WriteItem(MetadataIndex(name, begin), WriteItemType.SHARD, tensor_data=data)
    ]
    part.__get_tensor_shard__ = lambda _: part
    return part


def keep_common(directory: Path, place: str) -> None:
    """Move what all ranks have in common to where another megatron-core keeps it.

    In a "file" up to 0.18; in a "shard" from 0.19 on, and then metadata.json has half of its entries.
    """
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    file, shard, index = (
        directory / "common.pt",
        directory / "__0_9.distcp",
        MetadataIndex(COMMON_KEY),
    )
    if (place == "file") == file.exists():
        return
    if place == "file":
        torch.save({"iteration": 5}, file)
        edit_metadata(directory, lambda m: m.storage_data.pop(index))
        edit_metadata(directory, lambda m: m.state_dict_metadata.pop(COMMON_KEY))
        return
    torch.save([torch.load(file)], shard)
    file.unlink()
    info = _StorageInfo(shard.name, 0, shard.stat().st_size)
    edit_metadata(directory, lambda m: m.storage_data.update({index: info}))
    edit_metadata(
        directory, lambda m: m.state_dict_metadata.update({COMMON_KEY: BytesStorageMetadata()})
    )
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (directory / "metadata.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def common(request: pytest.FixtureRequest) -> str:
    """Where the common state lies: megatron-core keeps it in a shard from 0.19 on; DCP has "none"."""
    return getattr(request, "param", "file")


def of(*commons: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("common", commons, indirect=True, scope="module")


both, formats, every = of("file", "shard"), of("file", "none"), of("file", "shard", "none")
FILES = {
    **dict.fromkeys(("file", "shard"), ("shard", ".metadata", "metadata.json", "common")),
    "none": ("shard", ".metadata"),
}
each_file = pytest.mark.parametrize(
    ("common", "name"),
    [(common, name) for common, names in FILES.items() for name in names],
    indirect=["common"],
    scope="module",
)


@pytest.fixture(scope="module")
def stock_root(tmp_path_factory: pytest.TempPathFactory, common: str) -> Iterator[Path]:
    """A root with one real checkpoint in it, which no test changes."""
    import queue

    import torch
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    root = tmp_path_factory.mktemp("stock")
    (root / STEP).mkdir()
    if common == "none":
        _save_stock_dcp(root / STEP)
        yield root
        return
    mine = not torch.distributed.is_initialized()
    if mine:
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda *args: None)
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        patch.setattr(filesystem_async, "_results_queue", queue.Queue())  # no manager process
        _save_stock(root / STEP)
        keep_common(root / STEP, common)
    yield root
    if mine:
        torch.distributed.destroy_process_group()


@pytest.fixture
def copy(stock_root: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint's directory, to break."""
    shutil.copytree(stock_root / STEP, tmp_path / STEP)
    return tmp_path / STEP


def verdict_of(directory: Path, tree: str = "") -> StockVerdict:
    storage = PosixStorage(str(directory.parent))
    try:
        return inspect_stock(storage, directory.name, tree)
    finally:
        storage.close_root()


def refused(directory: Path, file: str, *words: str) -> None:
    verdict = verdict_of(directory)
    assert not verdict.acceptable
    assert verdict.reason.startswith(f"{file}: "), verdict.reason
    for word in words:
        assert word in verdict.reason
    assert verdict.files == ()
    assert not verdict.object_keys


def edit_metadata(directory: Path, change: Callable[[Any], None]) -> None:
    """Load with the real classes, change, and write back."""
    path = directory / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def first_shard(directory: Path) -> Path:
    return sorted(directory.glob("*.distcp"))[0]


def named(directory: Path, name: str) -> Path:
    """A file of the checkpoint; "shard" is the first one, "common" the one with the common state."""
    if name == "shard":
        return first_shard(directory)
    if name == "common" and not (directory / "common.pt").exists():
        return directory / common_piece(directory)[0]
    return directory / ("common.pt" if name == "common" else name)


def common_piece(directory: Path) -> tuple[str, int, int]:
    """Where the common state lies inside a shard: its file, offset and length."""
    from torch.distributed.checkpoint.metadata import MetadataIndex

    metadata = pickle.loads((directory / ".metadata").read_bytes())
    info = metadata.storage_data[MetadataIndex(COMMON_KEY)]
    return info.relative_path, info.offset, info.length


# --------------------------------------------------------------------------------- accepted


@every
def test_a_real_checkpoint_is_accepted_with_its_files_and_keys(stock_root: Path) -> None:
    # Catches: a global or opcode of real files that is missing from the tables.
    verdict = verdict_of(stock_root / STEP)
    assert verdict.acceptable, verdict.reason
    assert verdict.reason == ""
    assert verdict.object_keys - {COMMON_KEY, "step"} == OBJECTS
    on_disk = {p.name: p.stat().st_size for p in (stock_root / STEP).iterdir()}
    assert dict(verdict.files) == on_disk


def _by_getattr(member: enum.Enum, protocol: object) -> Any:
    """The ``__reduce_ex__`` of Enum in early releases of Python 3.11."""
    return getattr, (type(member), member.name)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_member_of_an_enumeration_may_be_named_by_getattr(
    copy: Path, protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: with an early Python 3.11, every save fails and stock checkpoints are refused."""
    from torch.distributed.checkpoint.metadata import TensorProperties

    from ckptfsm.dcp.metadata import read_planned

    metadata = pickle.loads((copy / ".metadata").read_bytes())
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", _by_getattr)
    data = pickle.dumps(metadata, protocol=protocol)
    assert b"getattr" in data
    (copy / ".metadata").write_bytes(data)
    assert verdict_of(copy).acceptable, verdict_of(copy).reason
    # no such plan is in what the library writes: its classes are not allowed there
    metadata.all_local_plans = metadata.planner_data = None
    again = read_planned(pickle.dumps(metadata, protocol=protocol))
    properties = again.state_dict_metadata["w.whole"].properties
    assert isinstance(properties, TensorProperties)
    assert properties == metadata.state_dict_metadata["w.whole"].properties


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_path_that_is_not_utf_8_is_read(copy: Path, protocol: int) -> None:
    """Catches: ``verify`` calls a good checkpoint damaged, as its root has such a name."""
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    for place in (os.fsdecode(b"/caf\xe9"), Path(os.fsdecode(b"/caf\xe9"))):
        metadata.storage_meta.checkpoint_id = place
        (copy / ".metadata").write_bytes(pickle.dumps(metadata, protocol=protocol))
        assert verdict_of(copy).acceptable, verdict_of(copy).reason


def dcp_saves(directory: Path, **options: Any) -> None:
    """A state of many kinds by stock DCP, on one rank and without a process group."""
    import torch
    import torch.distributed.checkpoint as dcp

    layers = [torch.ones(2), {"lr": 0.1}]
    state = {"w": torch.ones(3, 4), "s": torch.tensor(3.0), "none": torch.ones(0), "l": layers}
    if "async" in options:
        writer = dcp.FileSystemWriter(str(directory))
        dcp.async_save(state, storage_writer=writer, no_dist=True).result()
        return
    if "empty" in options:
        state = {}
    writer = dcp.FileSystemWriter(str(directory), **options.get("writer", {}))
    planner = dcp.DefaultSavePlanner(**options.get("planner", {}))
    dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)


def mirrored(directory: Path) -> None:
    """Each stream of bytes goes through an extension, as for compression."""
    from torch.distributed.checkpoint._extension import StreamTransformExtension

    class Mirror(StreamTransformExtension):
        registry_name = staticmethod(lambda: "stream.mirror")
        from_descriptor = staticmethod(lambda version: Mirror())
        get_descriptor = transform_to = transform_from = lambda self, stream="stream.mirror/1": (
            stream
        )

    dcp_saves(directory, writer={"_extensions": [Mirror()]})


@pytest.mark.parametrize(
    "save",
    [
        dcp_saves,
        lambda directory: dcp_saves(directory, **{"async": True}),
        lambda directory: dcp_saves(directory, empty=True),
        lambda directory: dcp_saves(directory, writer={"single_file_per_rank": False}),
        lambda directory: dcp_saves(directory, writer={"thread_count": 2, "sync_files": False}),
        lambda directory: dcp_saves(directory, planner={"flatten_state_dict": False}),
        lambda directory: dcp_saves(directory, planner={"enable_plan_caching": True}),
        mirrored,
    ],
    ids=["one", "async", "empty", "many files", "threads", "not flat", "cached", "transformed"],
)
def test_what_stock_dcp_saves_is_accepted(tmp_path: Path, save: Callable[[Path], None]) -> None:
    """Catches: a run of FSDP2 or torchtitan that cannot be adopted, or not be restored once it was, for
    the way in which it saves."""
    from ckptfsm.dcp.metadata import read_planned

    for step in (tmp_path / STEP, tmp_path / "global_step_5"):
        save(step)
        verdict = verdict_of(step, "dist_ckpt" if step.name.startswith("global") else "")
        assert verdict.acceptable, verdict.reason
        read_planned((step / ".metadata").read_bytes())  # what a restore reads it with
        assert set(dict(verdict.files)) <= {p.name for p in step.iterdir()}


def test_a_save_over_another_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    """Catches: the metadata of an older save beside shards of one that was killed before its rename."""
    dcp_saves(tmp_path / STEP)
    shutil.copy(tmp_path / STEP / ".metadata", tmp_path / STEP / ".metadata.tmp")
    refused(tmp_path / STEP, ".metadata.tmp", "cut off")


def test_a_rank_that_saves_for_itself_leaves_no_checkpoint(tmp_path: Path) -> None:
    """Catches: the metadata of one rank taken for that of all; stock's loader looks for it by rank."""
    dcp_saves(tmp_path / STEP)
    (tmp_path / STEP / ".metadata").rename(tmp_path / STEP / "__0.metadata")
    refused(tmp_path / STEP, ".metadata", "missing")


@both
def test_torch_dist_without_its_own_files_is_not_plain_dcp(copy: Path, common: str) -> None:
    """Catches: a Megatron checkpoint without its common state that is resumed from as one of DCP."""
    (copy / "metadata.json").unlink()
    refused(copy, "metadata.json", "missing")
    (copy / "common.pt").unlink(missing_ok=True)
    key = COMMON_KEY if common == "shard" else min(OBJECTS)
    refused(copy, "metadata.json", "missing", key, "Megatron-core")


def test_the_classes_of_older_megatron_are_accepted(copy: Path) -> None:
    # 0.15 writes MCoreMetadata, 0.13 to 0.15 write MCoreSavePlan; 0.16 keeps empty classes for them
    from megatron.core.dist_checkpointing.strategies.torch import MCoreMetadata, MCoreSavePlan

    metadata = pickle.loads((copy / ".metadata").read_bytes())
    older, plan = MCoreMetadata(), MCoreSavePlan()
    vars(older).update(vars(metadata))
    vars(plan).update(vars(metadata.all_local_plans[0]))
    older.all_local_plans = [plan]
    older.mcore_data = {"w.whole": {"nd_reformulated_orig_global_shape": (3, 4)}}
    older.storage_meta.checkpoint_id = Path("/somewhere/else")
    (copy / ".metadata").write_bytes(pickle.dumps(older))
    assert verdict_of(copy).acceptable, verdict_of(copy).reason


def _text(word: str) -> bytes:
    return b"\x8c" + bytes([len(word)]) + word.encode()


@both
def test_the_stub_gives_the_real_content(stock_root: Path) -> None:
    top = load_metadata_stub((stock_root / STEP / ".metadata").read_bytes())
    assert top.name == "Metadata"
    assert set(top.get("state_dict_metadata")) - {COMMON_KEY} == OBJECTS | TENSORS
    whole = top.get("state_dict_metadata")["w.whole"]
    assert (whole.name, whole.get("size").args) == ("TensorStorageMetadata", ((3, 4),))
    assert isinstance(top.get("all_local_plans")[0], Stub)


class CountingStorage(PosixStorage):
    """Counts the stats of each path."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.counts: Counter[str] = Counter()

    def stat(self, path: str) -> FileStat:
        self.counts[path] += 1
        return super().stat(path)


@every
def test_each_file_is_statted_once(stock_root: Path) -> None:
    storage = CountingStorage(str(stock_root))
    assert inspect_stock(storage, STEP).acceptable
    assert len(storage.counts) == 1 + len(list((stock_root / STEP).iterdir()))
    assert set(storage.counts.values()) == {1}


# ------------------------------------------------------------------------------ broken files


@formats
def test_F21_shard_truncated_by_one_byte(copy: Path) -> None:
    shard = max(copy.glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size - 1)
    refused(copy, shard.name, "truncated")


@formats
def test_F21_shard_that_is_longer_is_accepted(copy: Path) -> None:
    with first_shard(copy).open("ab") as file:
        file.write(b"more")
    assert verdict_of(copy).acceptable


@each_file
def test_F16_no_file_may_be_a_symlink(copy: Path, name: str) -> None:
    path = named(copy, name)
    away = copy.parent / "away"
    path.rename(away)
    path.symlink_to(away)
    refused(copy, path.name, "symlink")


def test_F16_the_directory_may_not_be_a_symlink(copy: Path) -> None:
    (copy.parent / "link").symlink_to(copy)
    refused(copy.parent / "link", "link")


@formats
def test_F19_missing_directory(copy: Path) -> None:
    refused(copy.parent / "iter_0000099", "iter_0000099", "missing")


@each_file
@pytest.mark.parametrize("how", ["missing", "empty", "regular"])
def test_F19_each_file_must_be_there(copy: Path, name: str, how: str) -> None:
    path = named(copy, name)
    path.unlink()
    if how == "empty":
        path.touch()
        how = "truncated: 0 bytes" if path.suffix == ".distcp" else how
    if how == "regular":
        path.mkdir()
    refused(copy, path.name, how)


@each_file
@pytest.mark.parametrize("fraction", [0.01, 0.5, 0.99])
def test_F21_truncated(copy: Path, name: str, fraction: float) -> None:
    path = named(copy, name)
    os.truncate(path, int(path.stat().st_size * fraction))
    refused(copy, path.name)


@both
def test_F21_a_zip_that_is_no_torch_file_is_not_common_state(copy: Path, common: str) -> None:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("x", "y")
    if common == "file":
        (copy / "common.pt").write_bytes(made.getvalue())
        refused(copy, "common.pt", "torch.save")
        return
    name, offset, length = common_piece(copy)
    with (copy / name).open("r+b") as shard:
        shard.seek(offset)
        shard.write(made.getvalue().rjust(length, b"\0"))
    refused(copy, name, COMMON_KEY, "torch.save")


def test_F21_common_state_in_a_shard_that_was_gutted(copy: Path) -> None:
    """Catches: a shard of the right size without content, which a power loss leaves, taken for whole."""
    keep_common(copy, "shard")
    name, offset, length = common_piece(copy)
    with (copy / name).open("r+b") as shard:
        shard.seek(offset)
        shard.write(bytes(length))
    refused(copy, name, COMMON_KEY, "not an intact zip archive")


def test_two_common_states_are_refused(copy: Path) -> None:
    """Catches: the state of an older, interrupted save at the same step that a loader would prefer."""
    keep_common(copy, "shard")
    (copy / "common.pt").write_bytes(b"")
    refused(copy, "common.pt", f"beside {COMMON_KEY}", "older")


def test_F30_a_common_state_beyond_its_bound_is_not_read(copy: Path) -> None:
    keep_common(copy, "shard")
    name, offset, _ = common_piece(copy)

    def grow(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == COMMON_KEY:
                info.length = (1 << 30) + 1

    edit_metadata(copy, grow)
    os.truncate(copy / name, offset + (1 << 30) + 1)  # sparse
    refused(copy, name, COMMON_KEY, "more than")


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"\xff\xfe",
        b"[" * 50_000,
        b"[]",
        b"{}",
        b"1" * 5000,
        b'{"sharded_backend": "zarr"}',
        b'{"sharded_backend": ["torch_dist"]}',
        b'{"sharded_backend": "torch_dist", "sharded_backend_version": 2}',
        b'{"sharded_backend": "torch_dist", "sharded_backend_version": true}',
        b'{"sharded_backend": "torch_dist", "common_backend": "zarr"}',
        b'{"sharded_backend": "torch_dist", "unheard_of": 1}',
        b'{"sharded_backend": "torch_dist"}' + b" " * 70_000,
    ],
)
def test_F30_metadata_json_of_another_kind(copy: Path, content: bytes) -> None:
    (copy / "metadata.json").write_bytes(content)
    refused(copy, "metadata.json")


def test_metadata_json_may_leave_the_defaults_out(copy: Path) -> None:
    (copy / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    assert verdict_of(copy).acceptable


# ---------------------------------------------------------------------- metadata that is wrong


@formats
@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "a/../../outside",
        "/etc/hostname",
        "",
        ".",
        "..",
        "a//b",
        "x\0",
        "x\ud800",
        7,
        None,
    ],
)
def test_F30_relative_path_must_be_plain(copy: Path, name: Any) -> None:
    (copy.parent / "outside").write_bytes(b"x" * 100_000)

    edit_metadata(copy, piece("relative_path", name))
    refused(copy, ".metadata", "not inside")


@formats
@pytest.mark.parametrize("key", sorted(OBJECTS | TENSORS))
def test_F21_everything_declared_must_be_stored(copy: Path, key: str) -> None:
    def change(metadata: Any) -> None:
        gone = [index for index in metadata.storage_data if index.fqn == key][-1]
        del metadata.storage_data[gone]

    edit_metadata(copy, change)
    refused(copy, ".metadata", key, "stored in no file")


def piece(field: str, value: Any) -> Callable[[Any], None]:
    """A change of the first piece that is stored."""
    return lambda m: setattr(next(iter(m.storage_data.values())), field, value)


def resized(key: str, size: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        import torch

        real = torch.Size(size) if isinstance(size, list) else size
        metadata.state_dict_metadata[key].size = real

    return change


def another_dimension(metadata: Any) -> None:
    import torch

    metadata.state_dict_metadata["w.split"].chunks[0].sizes = torch.Size([4])


@formats
@pytest.mark.parametrize(
    ("change", "words"),
    [
        *((piece(f, v), ()) for f in ("offset", "length") for v in (-1, 1 << 63, 1.5, "8", None)),
        *((piece(f, True), ()) for f in ("offset", "length")),
        *((piece("transform_descriptors", v), ("how",)) for v in ("zstd", [1], 7)),
        *((resized("w.whole", size), ("torch.Size",)) for size in ([1] * 65, 7, None, "12")),
        (resized("w.split", [7, 2]), ("w.split", "outside")),
        (another_dimension, ("w.split", "dimension")),
        (lambda m: m.state_dict_metadata["w.split"].chunks.pop(), ("w.split", "do not fill")),
        (
            lambda m: m.state_dict_metadata.update({"w.whole": m.storage_meta}),
            ("TensorStorageMetadata belongs",),
        ),
        *(
            (lambda m, f=f, v=v: setattr(m, f, v), ())
            for f in ("storage_data", "state_dict_metadata")
            for v in (None, [], {"a": 1}, 3)
        ),
    ],
)
def test_F21_F30_metadata_that_cannot_be_is_refused(
    copy: Path, change: Callable[[Any], None], words: tuple[str, ...]
) -> None:
    """Catches: sizes that are no sizes, tensors that no chunks fill, another structure."""
    edit_metadata(copy, change)
    refused(copy, ".metadata", *words)


@formats
def test_F21_a_huge_length_is_a_truncated_shard(copy: Path) -> None:
    edit_metadata(copy, piece("length", (1 << 63) - 1))
    assert "truncated" in verdict_of(copy).reason


@formats
@pytest.mark.parametrize("value", [None, {}, [1], "Metadata"])
def test_F30_a_pickle_of_something_else(copy: Path, value: Any) -> None:
    (copy / ".metadata").write_bytes(pickle.dumps(value))
    refused(copy, ".metadata", "no Metadata")


# ----------------------------------------------------------------------------------- hostile


class Call:
    """Pickles to a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (posix.system, "posix.system"),
        (builtins.eval, ".eval"),
        (subprocess.check_call, ".check_call"),
    ],
)
def test_F30_no_global_is_called(
    copy: Path, function: Callable[..., Any], name: str, protocol: int
) -> None:
    witness = copy.parent / "executed"
    code = f"__import__('pathlib').Path({str(witness)!r}).touch()"
    args = (code,) if function is builtins.eval else (f"touch {witness}",)
    (copy / ".metadata").write_bytes(pickle.dumps(Call(function, *args), protocol=protocol))
    refused(copy, ".metadata", "global", name)
    assert not witness.exists()


@pytest.mark.parametrize("module", ["os", "posix", "builtins", "torch", "megatron.core"])
def test_F30_a_hand_made_call_is_not_made(copy: Path, module: str) -> None:
    witness = copy.parent / "executed"
    code = f"c{module}\nsystem\n(S'touch {witness}'\ntR."
    (copy / ".metadata").write_bytes(code.encode())
    refused(copy, ".metadata", f"global {module}.system")
    assert not witness.exists()


def test_F30_a_call_hidden_in_real_metadata_is_found(copy: Path) -> None:
    witness = copy.parent / "executed"
    path = copy / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = {"x": Call(os.system, f"touch {witness}")}
    path.write_bytes(pickle.dumps(metadata))
    refused(copy, ".metadata", "global", "system")
    assert not witness.exists()


ENUM, NOT_ENUM = (f"c{module}\n{name}\n".encode() for module, name in (
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"), ("torch", "Size")))  # fmt: skip
GETATTR = b"\x80\x04cbuiltins\ngetattr\n"


@pytest.mark.parametrize(
    "pickled",
    [
        GETATTR + ENUM + _text("__class__") + b"\x86R.",
        GETATTR + ENUM + _text("mro") + b"\x86R.",
        GETATTR + ENUM + _text("A.B") + b"\x86R.",
        GETATTR + _text("touch witness") + b"\x85R.",
        GETATTR + ENUM + b"N\x86R.",
        GETATTR + ENUM + b"\x85R.",
        GETATTR + ENUM + _text("A") + b"N\x87R.",
        GETATTR + NOT_ENUM + _text("A") + b"\x86R.",
        GETATTR + GETATTR[2:] + _text("A") + b"\x86R.",
        GETATTR + ENUM + b")R" + _text("A") + b"\x86R.",
        GETATTR + ENUM + _text("A") + b"\x86\x81.",
    ],
)
def test_F30_getattr_names_a_member_of_an_enumeration_and_nothing_else(pickled: bytes) -> None:
    """Catches: a chain of ``getattr`` that leads a stock loader from an enumeration to a function."""
    from ckptfsm.dcp.metadata import read_planned

    with pytest.raises(DamagedRoot, match=r"builtins\.getattr|malformed pickle|no Metadata"):
        load_metadata_stub(pickled)
    with pytest.raises(DamagedRoot, match="planned metadata"):
        read_planned(pickled)


@pytest.mark.parametrize(
    "name",
    [("os", "system"), ("torch", "load"), ("torch.serialization", "load"), ("builtins", "eval")],
)
def test_F30_the_list_of_globals_is_exact(name: tuple[str, str]) -> None:
    assert name not in ALLOWED_GLOBALS
    dotted = b"\x80\x04" + _text("torch") + _text("Size.__class__") + b"\x93."
    with pytest.raises(DamagedRoot, match=r"torch\.Size\.__class__"):
        load_metadata_stub(dotted)


DEEP = 300_000
STUB = b"\x80\x04ctorch\nSize\n)R"
HOSTILE = {  # name: (file, what the reason says)
    # would overflow the C stack of a standard unpickler: hash of a nested tuple
    "nested tuple as key": (b"\x80\x04}N" + b"\x85" * DEEP + b"Ns.", "TypeError"),
    "nested tuples": (b"\x80\x04N" + b"\x85" * DEEP + b".", "no Metadata"),
    "nested lists": (b"\x80\x04" + b"]" * DEEP + b"a" * (DEEP - 1) + b".", "no Metadata"),
    "nested marks": (b"\x80\x04" + b"(" * DEEP + b"t" * DEEP + b".", "no Metadata"),
    "nested stubs": (
        b"ctorch\nSize\n" * 30_000 + b")R" + b"\x85R" * 29_999 + b".",  # a call of Python for each
        "no Metadata",
    ),
    # would ask a standard unpickler for 64 GiB
    "memo far away": (b"\x80\x04Nr\xff\xff\xff\xff.", "no Metadata"),
    "memo far away, text": (b"Np4294967295\n.", "opcode 0x70"),
    "memo never set": (b"\x80\x04h\x00.", "truncated"),
    "list in itself": (b"\x80\x04]\x94h\x00a.", "no Metadata"),
    "stub in its own state": (STUB + b"\x94h\x00b.", "no Metadata"),
    "state twice": (STUB + b"}b}b.", "no Metadata"),
    # a dict whose ``get`` is a number raises where it is asked
    "state for a dict": (b"\x80\x04}}X\x03\x00\x00\x00getK\x01sb.", "malformed"),
    "state for a class": (b"\x80\x04ctorch\nSize\n}b.", "TypeError"),
    "state for a dtype": (b"\x80\x04ctorch\nfloat32\n}b.", "TypeError"),
    "call of a result": (STUB + b")R.", "TypeError"),
    "item for a stub": (STUB + b"Na.", "malformed"),
    "key without a value": (b"\x80\x04}(X\x00\x00\x00\x00u.", "malformed"),
    "persistent id": (b"\x80\x04K\x01Q.", "opcode 0x51"),
    "persistent id, text": (b"Px\n.", "opcode 0x50"),
    "extension code": (b"\x80\x04\x82\x01.", "opcode 0x82"),
    "inst": (b"(ios\nsystem\n.", "opcode 0x69"),
    "global without an end": (b"cos\nsystem", "global os."),
    "huge string": (b"\x80\x04X\xff\xff\xff\xffabc.", "truncated"),
    "short string": (b"\x80\x04\x8c\x09abc.", "truncated"),
    "huge bytes": (b"\x80\x05\x8e" + b"\xff" * 8 + b"a.", "opcode 0x8e"),
    "huge bytearray": (b"\x80\x05\x96" + b"\xff" * 7 + b"\x00.", "opcode 0x96"),
    "huge number": (b"\x80\x04\x8b\xff\xff\xff\x7f" + b"1" * 100 + b".", "opcode 0x8b"),
    "number beyond 64 bits": (b"\x80\x04\x8a\x0a" + b"\x01" * 10 + b".", "no Metadata"),
    "cut number": (b"\x80\x04J\x01\x02.", "truncated"),
    "not utf-8": (b"\x80\x04\x8c\x02\xff\xff.", "UnicodeDecodeError"),
    "protocol of the future": (b"\x80\x09N.", "ValueError"),
    "nothing on the stack": (b"\x80\x04.", "malformed"),
    "two objects": (b"\x80\x04NN.", "no Metadata"),
    "mark left over": (b"\x80\x04(N.", "no Metadata"),
    "bytes after the end": (b"\x80\x04N.N", "no Metadata"),
    "cut memo": (b"\x80\x04N\x94j\x00", "truncated"),
    "no stop": (b"\x80\x04N", "truncated"),
    "garbage": (bytes(range(256)), "opcode 0x00"),
    "another stub": (STUB + b".", "no Metadata"),
    "a class": (b"\x80\x04ctorch\nSize\n.", "no Metadata"),
}


@pytest.mark.parametrize("case", sorted(HOSTILE))
def test_F30_hostile_pickle_gives_a_verdict(copy: Path, case: str) -> None:
    content, word = HOSTILE[case]
    (copy / ".metadata").write_bytes(content)
    refused(copy, ".metadata", word)


def test_F30_a_key_that_is_a_tuple_is_refused_before_it_is_hashed(copy: Path) -> None:
    # doubled 60 times: hashing it takes 2**60 steps
    nested: Any = ()
    for _ in range(60):
        nested = (nested, nested)
    body = pickle.dumps(nested)
    (copy / ".metadata").write_bytes(b"\x80\x04}" + body[11:-1] + b"Ns.")
    started = time.perf_counter()
    refused(copy, ".metadata", "TypeError")
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize("name", [".metadata", "metadata.json", "common.pt"])
def test_F30_a_file_beyond_its_bound_is_not_read(copy: Path, name: str) -> None:
    keep_common(copy, "file")
    os.truncate(copy / name, (1 << 30) + 1)  # sparse
    refused(copy, name, "more than")


class ShortStorage(PosixStorage):
    """A file that shrinks between stat and read."""

    def read(self, path: str, limit: int, offset: int = 0) -> bytes:
        return super().read(path, limit, offset)[:-1]


def test_a_file_that_shrinks_is_a_reason(stock_root: Path) -> None:
    verdict = inspect_stock(ShortStorage(str(stock_root)), STEP)
    size = (stock_root / STEP / "metadata.json").stat().st_size
    assert verdict.reason.startswith(f"metadata.json: {size - 1} bytes read of {size}")


class FailingStorage(PosixStorage):
    """Every read fails."""

    def read(self, path: str, limit: int, offset: int = 0) -> bytes:
        raise OSError(5, "Input/output error")


@formats
def test_a_failing_disk_is_no_verdict(stock_root: Path) -> None:
    """Catches: a good checkpoint called damaged because the disk could not be read just then."""
    with pytest.raises(OSError, match="error") as caught:
        inspect_stock(FailingStorage(str(stock_root)), STEP)
    assert caught.value.errno == errno.EIO


# -------------------------------------------------------------------------------------- fuzz


@formats
@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    flips=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 255)), max_size=8),
    keep=st.integers(0, 1 << 20),
)
@example(flips=[], keep=0)
@example(flips=[(0, 255)], keep=1 << 20)
def test_F30_damaged_metadata_never_raises(
    stock_root: Path, tmp_path: Path, flips: list[tuple[int, int]], keep: int
) -> None:
    directory = tmp_path / STEP
    if not directory.exists():
        shutil.copytree(stock_root / STEP, directory)
    real = (stock_root / STEP / ".metadata").read_bytes()
    data = bytearray(real[: keep % (2 * len(real))])
    for at, mask in flips:
        if data:
            data[at % len(data)] ^= mask
    (directory / ".metadata").write_bytes(data)
    verdict = verdict_of(directory)
    assert verdict.acceptable == (verdict.reason == "")
    if len(data) < len(real):
        assert not verdict.acceptable
    if bytes(data) == real:
        assert verdict.acceptable


OPCODES = [bytes([c]) for c in b"(NKMJX)]}tuseahjqrcRb.\x85\x86\x87\x93\x94\x81"] + [
    b"\x80\x04",
    b"\x8c\x01a",
    b"ctorch\nSize\n",
]


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.sampled_from(OPCODES), max_size=60))
def test_F30_any_mix_of_opcodes_is_survived(pieces: list[bytes]) -> None:
    with pytest.raises(DamagedRoot) as caught:
        load_metadata_stub(b"".join(pieces))
    assert caught.value.file == ".metadata"


# ----------------------------------------------------------------------------------- imports


def test_inspecting_imports_neither_torch_nor_megatron(stock_root: Path) -> None:
    code = (
        "import sys; from ckptfsm.disk.stock import inspect_stock;"
        "from ckptfsm.adapters.posix_storage import PosixStorage;"
        f"v = inspect_stock(PosixStorage({str(stock_root)!r}), {STEP!r});"
        "assert v.acceptable, v.reason;"
        "bad = {m.partition('.')[0] for m in sys.modules} & {'torch', 'megatron', 'numpy'};"
        "assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------- verl's directories


def verl_step(copy: Path, *roles: str, split: bool = True) -> Path:
    """A step as verl 0.9 (``split``) or 0.7 leaves it, of copies of one tree."""
    step = copy.parent / "global_step_5"
    for role in roles:
        trees = ("model/dist_ckpt", "optimizer/dist_ckpt") if split else ("dist_ckpt",)
        for tree in trees:
            shutil.copytree(copy, step / role / tree)
        if split:
            contents = {
                name.partition("/")[0]: {"path": name, "format": "megatron_dist_checkpoint"}
                for name in trees
            }
            (step / role / "extra/dist_ckpt").mkdir(parents=True)  # made, and not in use
            (step / role / "ckpt_contents.json").write_text(json.dumps({"contents": contents}))
    return step


def verdict_of_verl(step: Path) -> StockVerdict:
    return verdict_of(step, "dist_ckpt")


@both
@pytest.mark.parametrize("split", [True, False])
def test_the_directories_of_verl_are_accepted(copy: Path, split: bool) -> None:
    """Catches: a run of released verl that cannot be adopted."""
    verdict = verdict_of_verl(verl_step(copy, "actor", "critic", split=split))
    assert verdict.acceptable, verdict.reason
    trees = {name.rpartition("/")[0] for name, _ in verdict.files}
    assert len(trees) == (4 if split else 2)


def contents(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(role: Path) -> None:
        file = role / "ckpt_contents.json"
        listed = json.loads(file.read_text())
        change(listed["contents"])
        file.write_text(json.dumps(listed))

    return apply


def _set(path: str) -> Callable[[dict[str, Any]], None]:
    return lambda listed: listed["model"].update(path=path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda role: (role / "ckpt_contents.json").unlink(),
        lambda role: (role / "ckpt_contents.json").write_text("[]"),
        contents(lambda listed: listed.clear()),
        contents(lambda listed: listed.pop("model")),
        contents(_set("gone/dist_ckpt")),
        contents(_set("../actor/model/dist_ckpt")),
        contents(_set("a\0b")),
        contents(_set("\ud800")),
        contents(_set("x" * 300)),
        lambda role: (role / "model/dist_ckpt/.metadata").unlink(),
        lambda role: shutil.rmtree(role / "optimizer"),
        lambda role: (shutil.rmtree(role / "model"), (role / "model").symlink_to("optimizer")),
        lambda role: (shutil.rmtree(role), role.symlink_to("actor")),
        lambda role: (shutil.rmtree(role / "model"), dcp_saves(role / "model/dist_ckpt")),
    ],
    ids=range(14),
)
def test_a_role_that_was_cut_off_is_not_accepted(copy: Path, spoil: Callable[[Path], Any]) -> None:
    """Catches: resuming from a step with a critic that is missing, in half, or somewhere else. A
    hostile list that keeps the whole root from being opened (F30)."""
    step = verl_step(copy, "actor", "critic")
    spoil(step / "critic")
    for _ in range(2):
        verdict = verdict_of_verl(step)
        assert not verdict.acceptable and verdict.reason
        dcp_saves(step)  # a whole checkpoint above them makes them no better


# ------------------------------------------------------------------------------------- adoption


def a_run_of(trainer: str, copy: Path) -> Path:
    """The root of a stock run: one that can be loaded, a partial one, one newer than the tracker."""
    if trainer == "megatron":
        loadable, name = copy, "iter_{:07d}"
    elif trainer == "global_step":
        loadable, name = copy.rename(copy.parent / "global_step_5"), "global_step_{}"
    else:
        loadable = verl_step(copy, "actor", "critic", split=trainer == "verl-0.9")
        shutil.rmtree(copy)
        (loadable / "data.pt").write_bytes(b"position")
        name = "global_step_{}"
    root = loadable.parent
    shutil.copytree(loadable, root / name.format(9))
    (root / name.format(3)).mkdir()
    (root / name.format(3) / "__0_0.distcp").write_bytes(b"half")
    (root / "progress.txt").write_text("a stranger's")
    (root / TRACKER).write_text("5")
    return root


@pytest.mark.parametrize(
    ("trainer", "common"),
    [
        *(("megatron", common) for common in ("file", "none")),
        *(("global_step", common) for common in ("file", "none")),
        *((verl, "file") for verl in ("verl-0.7", "verl-0.9")),
    ],
    indirect=["common"],
    scope="module",
)
def test_adoption_moves_no_byte(copy: Path, trainer: str) -> None:
    """Catches: a file of a user's only checkpoint that is written, copied, linked or renamed."""
    root = a_run_of(trainer, copy)
    before = files_of(root)
    assert len(before) > 6
    layout = "megatron" if trainer == "megatron" else "verl"
    for _ in range(2):
        with Manager(fake_ports(root), make_config({"layout": layout})) as manager:
            assert manager.all_steps() == [5]
        assert files_of(root) == before
        assert (root / TRACKER).read_text().strip() == "5"
