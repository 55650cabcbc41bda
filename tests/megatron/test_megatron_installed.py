"""The queue beside packages as people have them: the trainer of the wheel, and an unfit
nvidia-resiliency-ext. Each in a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ckptfsm.adapters.versions import installed, series_of

pytestmark = pytest.mark.megatron

TRAINER = """
import os, sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
try:
    import megatron.training.async_utils as trainer
    from megatron.training.global_vars import set_args
except ImportError as error:  # it needs packages that a checkpoint does not
    print(f"not imported: {error}")
    raise SystemExit

from ckptfsm.core.errors import ConfigError
from ckptfsm.integrations import megatron_lm
from ckptfsm.integrations.queue import AsyncCallsQueue, install
from ckptfsm.megatron.compat import cpu_devices

root = sys.argv[1]

def state(value):
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((4,), value)), "step": int(value)}

def schedule(step):
    os.makedirs(f"{root}/{step}")
    with cpu_devices():
        request = dist_checkpointing.save(
            state(float(step)), f"{root}/{step}", async_sharded_save=True, async_strategy="mcore"
        )
    trainer.schedule_async_save(request)

def refused(second):
    try:
        second()
    except ConfigError:
        return True

def main():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    set_args(SimpleNamespace(async_save=True, async_strategy="mcore", use_persistent_ckpt_worker=False))
    with install() as queue:
        assert trainer._async_calls_queue is queue
        assert refused(megatron_lm.install), "a queue and the drop-in"
        for step in (1, 2):
            schedule(step)
        assert not trainer.is_empty_async_queue()
        trainer.maybe_finalize_async_save(blocking=True, terminate=True)
        assert trainer.is_empty_async_queue()
        trainer.reset_persistent_async_worker("mcore")
        assert trainer._async_calls_queue is queue
    assert trainer._async_calls_queue is None
    with megatron_lm.install():
        assert refused(install), "the drop-in and a queue"
    for step in (1, 2):
        loaded = dist_checkpointing.load(state(0.0), f"{root}/{step}")
        assert loaded["w"].tolist() == [float(step)] * 4 and loaded["step"] == step, loaded
    dist.destroy_process_group()
    print("done")

if __name__ == "__main__":
    main()
"""

REFUSED = """
import sys
from importlib import import_module

from ckptfsm.core.errors import ConfigError
try:
    import_module(sys.argv[1])
except ConfigError as error:
    print(f"refused: {error.message}")
else:
    print("taken")
"""

UNTRIED = """
import warnings

with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import ckptfsm.megatron
print([str(each.message) for each in said if "never tried" in str(each.message)])
"""


def run(place: Path, text: str, *arguments: str, first: Path | None = None) -> str:
    """The output of a script, in an interpreter that finds the packages below ``first`` first."""
    script = place / "job.py"
    script.write_text(text)
    ours = str(Path(__file__).resolve().parents[2])
    paths = [str(first) if first else "", ours, os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.strip().splitlines()[-1]


def unfit(place: Path, version: str, source: str) -> Path:
    """An nvidia-resiliency-ext with the names that megatron-core looks for, and this first line."""
    names = {
        "core": ["AsyncCallsQueue", "AsyncRequest"],
        "cached_metadata_filesystem_reader": ["CachedMetadataFileSystemReader"],
        "filesystem_async": ["FileSystemWriterAsync", "get_write_results_queue", "_results_queue"],
        "state_dict_saver": [
            "CheckpointMetadataCache",
            "save_state_dict_async_finalize",
            "save_state_dict_async_plan",
        ],
    }
    top = place / "nvidia_resiliency_ext"
    below = top / "checkpointing" / "async_ckpt"
    below.mkdir(parents=True)
    (top / "__init__.py").write_text(f"__version__ = {version!r}\n")
    for package in (top / "checkpointing", below):
        (package / "__init__.py").write_text("")
    for module, inside in names.items():
        text = "".join(f"{name} = int\n" for name in inside)
        (below / f"{module}.py").write_text(f"{source}\n{text}")
    about = place / f"nvidia_resiliency_ext-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: nvidia-resiliency-ext\nVersion: {version}\n"
    )
    return place


@pytest.mark.skipif(
    find_spec("megatron.training") is None, reason="in the wheel from megatron-core 0.17 on"
)
def test_install_stands_where_the_trainer_of_the_wheel_looks(tmp_path: Path) -> None:
    """Catches: a queue that is installed where today's Megatron-LM does not look."""
    said = run(tmp_path, TRAINER, str(tmp_path / "root"))
    if said.startswith("not imported"):
        pytest.skip(said)
    assert said == "done"


@pytest.mark.parametrize(
    "module", ["ckptfsm.integrations.queue", "ckptfsm.integrations.megatron_lm"]
)
def test_an_old_nvidia_resiliency_ext_is_named(tmp_path: Path, module: str) -> None:
    """Catches: an AssertionError of megatron-core without the installed versions and the remedy."""
    said = run(tmp_path, REFUSED, module, first=unfit(tmp_path / "first", "0.5.0", ""))
    if (series_of(installed("megatron-core")) or (0, 0)) < (0, 17):
        assert said == "taken"
        return
    assert said.startswith("refused: megatron-core ")
    assert "AssertionError" in said
    assert "nvidia-resiliency-ext is 0.5.0: install what it asks for, or uninstall it" in said


def test_an_untried_nvidia_resiliency_ext_is_taken_with_a_warning(tmp_path: Path) -> None:
    """Catches: a release with requests that were never saved here, taken without a word."""
    said = run(tmp_path, UNTRIED, first=unfit(tmp_path / "first", "0.99.0", ""))
    assert "nvidia-resiliency-ext 0.99.0 was never tried" in said
    assert "0.7.0" in said


@pytest.mark.parametrize("error", ["ImportError", "RuntimeError"])
def test_a_half_installed_nvidia_resiliency_ext_is_left_alone_or_named(
    tmp_path: Path, error: str
) -> None:
    """Catches: megatron-core's requests that cannot be saved since another package is broken."""
    broken = unfit(tmp_path / "first", "0.7.0", f"raise {error}('no library')")
    said = run(tmp_path, REFUSED, "ckptfsm.integrations.queue", first=broken)
    assert said == "taken" or (error != "ImportError" and "ext is 0.7.0: install what" in said), (
        said
    )
