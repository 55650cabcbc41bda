"""Directories of Accelerate and Trainer: whole ones are taken, and one that was cut off is not."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import pytest

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.layout import ACCELERATE, HF, Layout
from ckptfsm.disk.stock import StockVerdict
from ckptfsm.disk.stock_files import inspect_unlisted


def archive() -> bytes:
    """As ``torch.save`` ends."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as made:
        made.writestr("archive/data.pkl", b"x" * 100)
    return data.getvalue()


def safetensors() -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(16)


WRITTEN = {
    HF: {
        "model.safetensors": safetensors(),
        "optimizer.pt": archive(),
        "rng_state_0.pth": archive(),
        "trainer_state.json": b'{"global_step": 5}',
        "vocab.txt": b"",
    },
    ACCELERATE: {
        "pytorch_model.bin": archive(),
        "optimizer.bin": archive(),
        "random_states_0.pkl": archive(),
        "random_states_1.pkl": archive(),
    },
}


def verdict(root: Path, layout: Layout, changes: dict[str, bytes | None]) -> StockVerdict:
    directory = root / layout.published_name(5)
    directory.mkdir()
    for name, data in {**WRITTEN[layout], **changes}.items():
        if data is not None:
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(data)
    storage = PosixStorage(root, create=False)
    try:
        return inspect_unlisted(storage, layout, directory.name)
    finally:
        storage.close_root()


@pytest.mark.parametrize("layout", WRITTEN, ids=lambda each: each.name)
def test_a_whole_directory_is_taken_with_all_its_files(tmp_path: Path, layout: Layout) -> None:
    found = verdict(tmp_path, layout, {})
    assert (found.acceptable, found.reason) == (True, "")
    assert dict(found.files) == {name: len(data) for name, data in WRITTEN[layout].items()}


@pytest.mark.parametrize("layout", WRITTEN, ids=lambda each: each.name)
def test_every_file_that_was_cut_off_is_named(tmp_path: Path, layout: Layout) -> None:
    for name, data in WRITTEN[layout].items():
        for size in range(0, len(data), max(1, len(data) // 3)):
            root = tmp_path / f"{name}.{size}"
            root.mkdir()
            found = verdict(root, layout, {name: data[:size]})
            assert not found.acceptable and name in found.reason, (name, size, found)


@pytest.mark.parametrize(
    ("layout", "changes", "said"),
    [
        (HF, {"trainer_state.json": None}, "trainer_state.json"),
        (ACCELERATE, {"random_states_0.pkl": None}, "written late"),
        (HF, {"model.safetensors": None}, "no weights"),
        (ACCELERATE, {"pytorch_model.bin": None}, "no weights"),
        (HF, {"model.safetensors": safetensors() + b"x"}, "model.safetensors"),
        (HF, {"pytorch_model_fsdp_0/__0_0.distcp": b"x"}, "pytorch_model_fsdp_0/.metadata"),
        (HF, {"optimizer_0/.metadata": b"x"}, "optimizer_0"),
        (HF, {"optimizer_0/.metadata.tmp": b"x"}, ".metadata.tmp"),
        (
            HF,
            {"model.safetensors.index.json": b'{"weight_map": {"w": "model-2.safetensors"}}'},
            "model-2.safetensors",
        ),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, layout: Layout, changes: dict[str, bytes | None], said: str
) -> None:
    found = verdict(tmp_path, layout, changes)
    assert not found.acceptable and said in found.reason, found


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5/config.json").symlink_to("/etc/hostname")
    storage = PosixStorage(tmp_path, create=False)
    found = inspect_unlisted(storage, HF, "checkpoint-5")
    storage.close_root()
    assert not found.acceptable and "config.json" in found.reason
