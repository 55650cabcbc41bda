"""The benchmarks run, on tiny sizes, and report every figure. No time is asserted anywhere."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TINY = ("--bytes", "65536", "--pairs", "2", "--checkpoints", "3")
TIMEOUT_S = 300


def run_benchmarks(work: Path, *arguments: str) -> str:
    """Standard output of a run. Into a file: stock's manager process may hold a pipe open."""
    output, errors = work / "stdout", work / "stderr"
    with output.open("wb") as out, errors.open("wb") as err:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks", "--dir", str(work), *TINY, *arguments],
            cwd=ROOT,
            stdout=out,
            stderr=err,
            timeout=TIMEOUT_S,
        )
    assert done.returncode == 0, errors.read_text()[-4000:]
    return output.read_text()


@pytest.mark.megatron
def test_every_group_reports_its_figures(tmp_path: Path) -> None:
    report = json.loads(run_benchmarks(tmp_path, "--json"))
    figures = {figure["name"]: figure for figure in report["figures"]}
    assert {figure["group"] for figure in figures.values()} == {
        "saving",
        "polling",
        "transition",
        "recovery",
    }
    assert len(figures) == len(report["figures"]), "a name is used twice"
    targets = {name: f["target"] for name, f in figures.items() if f["target"] is not None}
    assert targets == {
        "save(), ckptfsm / stock": 1.05,
        "until loadable, ckptfsm / stock": 1.1,
        "recovery of 3, after a close": 1.0,
        "recovery of 3, after a kill": 1.0,
    }
    for name, figure in figures.items():
        assert figure["samples"], name
        assert isinstance(figure["met"], bool) == (name in targets), name
        assert math.isfinite(figure["median"]), name
    for side in ("stock", "ckptfsm"):
        assert len(figures[f"save(), {side}"]["samples"]) == 2
    assert report["environment"]["state_bytes"] == 65536
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stderr", "stdout"], "left behind"


@pytest.mark.megatron
def test_the_table_of_one_group(tmp_path: Path) -> None:
    table = run_benchmarks(tmp_path, "--only", "transition")
    assert "[transition]" in table
    assert "[saving]" not in table
    assert "JournalWriter.append" in table
