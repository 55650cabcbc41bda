"""The export for Hugging Face: the same values under their names, and a directory that is whole or not
there. Whether transformers loads it, tests/integrations asks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckptfsm import CheckpointManager
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.errors import (
    CkptFsmError,
    ConfigError,
    DamagedRoot,
    NoRoom,
    PlaceInUse,
    RestoreFailed,
    StepNotFoundError,
)
from ckptfsm.dcp.loading import read_tensor
from ckptfsm.integrations import hugging_face
from ckptfsm.integrations.hugging_face import (
    HuggingFaceSettings,
    export,
    export_checkpoint,
    settings_of,
)

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "BOOL": torch.bool}
TIED = torch.arange(12, dtype=torch.bfloat16).reshape(4, 3) / 7
MODEL = {
    "embed.weight": TIED,
    "head.weight": TIED,
    "layers": {"0": {"w": torch.randn(5, 3).T, "column": torch.eye(3)[:, 1]}},
    "an_odd_byte": torch.tensor([True]),
    "norm": {
        "w": torch.randn(3),
        "empty": torch.empty(0, 4),
        "count": torch.tensor(7),
        "mask": torch.tensor([True]),
    },
}
NAMES: Mapping[str, torch.Tensor] = {
    **{key: value for key, value in MODEL.items() if isinstance(value, torch.Tensor)},
    **{f"layers.0.{key}": value for key, value in MODEL["layers"]["0"].items()},
    **{f"norm.{key}": value for key, value in MODEL["norm"].items()},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has ``root``, whose step 10 has the model and more, and ``hf``, which describes the model."""
    place = tmp_path_factory.mktemp("saved")
    state = {"model": MODEL, "optimizer": {"model.w": torch.ones(2)}, "epoch": 3}
    with CheckpointManager(place / "root") as ckpts:
        ckpts.save(10, state).wait()
        ckpts.save(
            20, parts={"actor": {"w": torch.ones(2)}, "critic": {"w": torch.zeros(3)}}
        ).wait()
    hf = place / "hf"
    hf.mkdir()
    for name in ("config.json", "tokenizer.json", "merges.txt", "chat_template.jinja"):
        (place / name).write_text(name)
        (hf / name).symlink_to(place / name)  # as in the cache of the hub
    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        (hf / name).write_text("weights of another model")
    return place


@pytest.fixture
def place(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved / "root", tmp_path / "root")
    (tmp_path / "hf").symlink_to(saved / "hf")
    return tmp_path


def settings(place: Path, **more: Any) -> HuggingFaceSettings:
    given = {"to": str(place / "out"), "model": str(place / "hf"), **more}
    return HuggingFaceSettings.model_validate(given)


def exported(place: Path, **more: Any) -> Path:
    export_checkpoint(place / "root/iter_0000010", 10, settings(place, **more))
    return place / "out/step_0000010"


def read(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, by its specification alone."""
    data = file.read_bytes()
    [size] = struct.unpack("<Q", data[:8])
    header, values = json.loads(data[8 : 8 + size]), bytearray(data[8 + size :])
    assert header.pop("__metadata__") == {"format": "pt"}
    found, end = {}, 0
    for name, about in header.items():
        (begin, last), dtype = about["data_offsets"], DTYPES[about["dtype"]]
        assert begin == end and (8 + size + begin) % dtype.itemsize == 0, "holes, or not aligned"
        raw = torch.tensor(list(values[begin:last]), dtype=torch.uint8)
        found[name], end = raw.view(dtype).reshape(about["shape"]), last
    assert end == len(values)
    return found


def assert_same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def left(place: Path) -> list[str]:
    """What the directory of the exports has, but for the lock."""
    out = place / "out"
    return sorted(set(os.listdir(out)) - {".ckptfsm-export.lock"}) if out.exists() else []


# ------------------------------------------------------------------------------------ what is written


def test_the_values_are_the_saved_ones_and_weights_of_others_are_not_copied(place: Path) -> None:
    """Catches: a name, type or stride that is lost; a tensor of the optimizer; old weights."""
    found = exported(place)
    assert_same(read(found / "model.safetensors"), NAMES)
    beside = {"config.json", "tokenizer.json", "merges.txt", "chat_template.jinja"}
    assert set(os.listdir(found)) == beside | {"model.safetensors", "ckptfsm.json"}
    assert all((found / name).read_text() == name for name in beside)
    assert json.loads((found / "ckptfsm.json").read_text())["attempt"] == "10.e1.a1"
    assert left(place) == ["step_0000010"]


def test_files_of_a_limited_size_and_their_index(place: Path) -> None:
    """Catches: an index that names another file; a tensor that is left out where a file ends."""
    found = exported(place, file_mb=50 / 1e6, prefix="model")
    index = json.loads((found / "model.safetensors.index.json").read_text())
    files = sorted(found.glob("*.safetensors"))
    several = len(files)
    assert several > 2
    assert [each.name for each in files] == [
        f"model-{number:05d}-of-{several:05d}.safetensors" for number in range(1, several + 1)
    ]
    parts = {file.name: read(file) for file in files}
    assert index["weight_map"] == {name: file for file, some in parts.items() for name in some}
    assert_same({k: v for some in parts.values() for k, v in some.items()}, NAMES)
    sizes = {f: sum(v.nbytes for v in some.values()) for f, some in parts.items()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert all(size <= 50 or len(parts[file]) == 1 for file, size in sizes.items())


def test_one_tensor_is_in_memory_at_a_time(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: an export that needs as much host memory as a file, or as the model."""
    living: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def noted(*arguments: Any) -> torch.Tensor:
        nonlocal most
        most = max(most, sum(each() is not None for each in living))
        value = read_tensor(*arguments)
        living.append(weakref.ref(value))
        return value

    monkeypatch.setattr(hugging_face, "read_tensor", noted)
    exported(place)
    assert (len(living), most) == (len(NAMES), 0)


def test_floats_in_another_type_and_only_a_subtree(place: Path) -> None:
    """Catches: integers or booleans that are converted, too; a prefix that is no border of a name."""
    found = exported(place, dtype="bfloat16", prefix="model.norm")
    assert_same(
        read(found / "model.safetensors"),
        {
            name: value.bfloat16() if value.is_floating_point() else value
            for name, value in MODEL["norm"].items()
        },
    )


def test_of_several_parts_one_is_named(place: Path) -> None:
    """Catches: the critic exported as the model, because it stands first."""
    step = place / "root/iter_0000020"
    with pytest.raises(ConfigError, match=r"has 2 parts .* 'actor' \(dcp\), 'critic' \(dcp\)"):
        export_checkpoint(step, 20, settings(place, prefix=""))
    export_checkpoint(step, 20, settings(place, prefix="", part="critic"))
    assert_same(read(place / "out/step_0000020/model.safetensors"), {"w": torch.zeros(3)})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_directory_that_torch_wrote_itself(place: Path) -> None:
    """Catches: Accelerate's directory of FSDP, or an adopted checkpoint, that cannot be exported."""
    step = place / "run/checkpoint-7"
    for directory in (step, step / "pytorch_model_fsdp_0"):
        dcp.save({"model": {"w": torch.ones(3)}}, checkpoint_id=directory, no_dist=True)
    for part in ("", "pytorch_model_fsdp_0"):
        given = settings(place, part=part, to=str(place / f"out{part}"))
        export_checkpoint(step, 7, given)
        file = Path(given.to, "step_0000007/model.safetensors")
        assert_same(read(file), {"w": torch.ones(3)})


# ---------------------------------------------------------------------------------- whole or not there


def test_all_of_it_is_durable_before_it_has_its_name(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a power loss that takes what an export has, after it got its name."""
    calls: list[str] = []
    opened: list[str] = []

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(storage: PosixStorage, *arguments: Any, **more: Any) -> Any:
            if storage.root == str(place / "out"):
                calls.append(name)
                opened.extend(arguments[:1] if name == "open_exclusive" else ())
            return real(storage, *arguments, **more)

        return call

    for name in ("open_exclusive", "fsync", "fsync_dir", "rename"):
        monkeypatch.setattr(PosixStorage, name, noted(name, getattr(PosixStorage, name)))
    exported(place, file_mb=50 / 1e6)
    before = calls[: calls.index("rename")]
    assert before.count("fsync") == len(opened) > 5
    assert before[-1] == "fsync_dir"
    assert calls[calls.index("rename") + 1] == "fsync_dir"


def test_killed_before_the_rename_it_leaves_no_export_and_the_next_attempt_completes_it(
    place: Path,
) -> None:
    """Catches: half an export that a loader takes; what a killed job wrote, left for ever."""
    code = (
        "import os, sys; from ckptfsm.integrations import hugging_face as job\n"
        "job.move = lambda *_: os.kill(os.getpid(), 9)\n"
        "job.export(sys.argv[1], 10, {})"
    )
    step = str(place / "root/iter_0000010")
    given = {"CKPTFSM_HF_TO": str(place / "out"), "CKPTFSM_HF_MODEL": str(place / "hf")}
    killed = subprocess.run([sys.executable, "-c", code, step], env={**os.environ, **given})
    assert killed.returncode == -signal.SIGKILL
    assert left(place) == ["step_0000010.tmp-export"]
    assert {"config.json", "model.safetensors"} <= set(os.listdir(place / "out" / left(place)[0]))
    assert_same(read(exported(place) / "model.safetensors"), NAMES)
    assert left(place) == ["step_0000010"]


def test_a_repeated_attempt_finds_it_done_and_another_checkpoint_is_refused(place: Path) -> None:
    """Catches: an export that fails when its job runs again, or that becomes another model unseen."""
    file = exported(place) / "model.safetensors"
    before = file.stat()
    said = export_checkpoint(place / "root/iter_0000010", 10, settings(place))
    assert "is there already" in said and file.stat() == before
    with pytest.raises(PlaceInUse, match="move it away"):
        exported(place, dtype="float32")
    manifest = place / "root/iter_0000010/.ckptfsm/manifest.json"
    manifest.unlink()  # as of another attempt, in which nothing is the same
    with pytest.raises(PlaceInUse, match="another checkpoint"):
        exported(place)
    assert file.stat() == before and left(place) == ["step_0000010"]


def test_of_two_at_once_one_is_refused(place: Path) -> None:
    """Catches: two processes that write one directory."""
    other = PosixStorage(place / "out")
    held = other.try_lock(".ckptfsm-export.lock")
    assert held is not None
    with pytest.raises(PlaceInUse, match="another process"):
        exported(place)
    other.unlock(held)
    other.close_root()
    exported(place)


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"part": "actor"}, "no part 'actor' with tensors; it has 'state' \\(dcp\\)"),
        ({"prefix": "modell."}, "begin with: model, optimizer"),
        ({"model": "{place}/none"}, "there is no config.json in"),
        ({"to": "{place}/root"}, "the root of a job"),
        ({"to": "{place}/root/exports"}, "the root of a job"),
        ({"to": "s3://bucket/exports"}, "s3://bucket"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    place: Path, given: dict[str, str], said: str
) -> None:
    """Catches: an error that does not tell what to name instead; files among those of a root."""
    before = sorted((place / "root").rglob("*"))
    more = {key: value.format(place=place) for key, value in given.items()}
    with pytest.raises(ConfigError, match=said):
        exported(place, **more)
    assert left(place) == []
    assert sorted((place / "root").rglob("*")) == before


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"MODEL": "m"}, "to: Field required"),
        ({"TO": "a", "MODEL": "m", "PREFFIX": "x"}, "preffix: Extra inputs"),
        ({"TO": "a", "MODEL": "m", "DTYPE": "int8"}, "dtype: Input should be"),
        ({"TO": "a", "MODEL": "m", "PART": "../x"}, "part"),
    ],
)
def test_a_variable_that_cannot_be_is_refused(variables: dict[str, str], said: str) -> None:
    """Catches: a word that is misspelt, and means nothing in silence."""
    with pytest.raises(ConfigError, match=said):
        settings_of({f"CKPTFSM_HF_{name}": value for name, value in variables.items()})


def test_the_job_ends_with_the_reason(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a job that counts as done without an export."""
    monkeypatch.setenv("CKPTFSM_HF_TO", str(place / "out"))
    monkeypatch.setenv("CKPTFSM_HF_MODEL", str(place))
    with pytest.raises(SystemExit, match="no config.json"):
        export(str(place / "root/iter_0000010"), 10, {})


def test_what_goes_wrong_on_the_way_leaves_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a damaged model that is exported as a good one; a disk that stays full."""

    def fails(error: type[CkptFsmError], said: str) -> None:
        with pytest.raises(error, match=said):
            exported(place)
        assert left(place) == []

    with monkeypatch.context() as patch:
        patch.setattr(PosixStorage, "free_bytes", lambda _: 100)
        fails(NoRoom, "has 100 B free")
    with monkeypatch.context() as patch:
        commits = iter([hugging_face.read_commit(PosixStorage(place / "root"), "iter_0000010")])
        patch.setattr(hugging_face, "read_commit", lambda *_: next(commits, None))
        fails(StepNotFoundError, "saved again, or taken away")
    for shard in (place / "root/iter_0000010").glob("*.distcp"):
        shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    fails(DamagedRoot, "distcp has another content")
    with monkeypatch.context() as patch:  # as where no manifest tells
        patch.setattr(hugging_face, "_verify", lambda *_: None)
        for shard in (place / "root/iter_0000010").glob("*.distcp"):
            shard.write_bytes(b"")
        fails(RestoreFailed, "key 'model.* cannot be read")


def test_a_part_of_megatron_needs_bridge(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: Megatron's names exported as if they were those of Hugging Face."""
    step = place / "run/iter_0000010"
    step.mkdir(parents=True)
    for name in (".metadata", "metadata.json", "common.pt"):
        (step / name).write_bytes(b"")

    def said(error: type[CkptFsmError], match: str, **more: Any) -> None:
        with pytest.raises(error, match=match):
            export_checkpoint(step, 10, settings(place, **more))
        assert left(place) == []

    said(ConfigError, "no run_config.yaml of Megatron-Bridge")
    (step / "run_config.yaml").write_text("")
    said(ConfigError, "leave out \\['dtype'\\]", dtype="bfloat16")
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    said(ConfigError, "install megatron-bridge")


def test_a_type_that_no_file_can_have_is_refused() -> None:
    """Catches: values under the name of another type."""
    about = TensorStorageMetadata.__new__(TensorStorageMetadata)
    about.size = torch.Size([2])
    about.properties = type("P", (), {"dtype": torch.complex128})()
    metadata: Any = type("M", (), {"state_dict_metadata": {"model.w": about}})()
    with pytest.raises(ConfigError, match=r"'model.w' is of torch.complex128"):
        hugging_face._tensors_of("state", metadata, HuggingFaceSettings(to="a", model="m"))
