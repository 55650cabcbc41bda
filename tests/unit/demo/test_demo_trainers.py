"""The demo's trainer of plain torch: the whole demo, in processes without megatron-core."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from ckptfsm.core.errors import CkptFsmError  # noqa: E402
from ckptfsm.demo.trainers import check_imports  # noqa: E402


def test_the_demo_under_fsdp2_keeps_every_promise(tmp_path: Path):
    """Catches: a generator, a moment or a count of steps that is lost with a state of torch, and
    megatron-core imported for it."""
    options = (
        "--ranks",
        "1",
        "--steps",
        "4",
        "--save-every",
        "2",
        "--root",
        str(tmp_path / "root"),
    )
    command = [sys.executable, "-m", "ckptfsm.cli", "demo", "--trainer", "fsdp2", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.count("bit for bit") == 2
    assert "stock torch.distributed.checkpoint.load: " in done.stdout


def test_an_import_of_megatron_core_is_seen(monkeypatch: pytest.MonkeyPatch):
    """Catches: a check that passes whatever was imported."""
    for name in [each for each in sys.modules if each.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    check_imports("fsdp2")
    monkeypatch.setitem(sys.modules, "megatron.core", sys)
    check_imports("megatron")
    with pytest.raises(CkptFsmError, match=r"--trainer fsdp2 has imported megatron\.core"):
        check_imports("fsdp2")
