"""The benchmarks run, on tiny sizes, and report every figure. No time is asserted anywhere."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import scale_picture

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--bytes", "65536", "--pairs", "2", "--checkpoints", "3", "--ranks", "8,3", "--busy", "0.5")
TIMEOUT_S = 600


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
        "engines",
        "two_ranks",
        "finishing",
        "restoring",
        "memory",
        "polling",
        "transition",
        "recovery",
        "scale",
    }
    assert len(figures) == len(report["figures"]), "a name is used twice"
    wanted = {name: f["target"] for name, f in figures.items() if f["target"] is not None}
    engines = {name for name in wanted if figures[name]["group"] == "engines"}
    assert len(engines) == 30
    assert {name: target for name, target in wanted.items() if name not in engines} == {
        "save(), ckptfsm / stock": 1.05,
        "until loadable, ckptfsm / stock": 1.1,
        "cold load, ckptfsm / stock": 0.8,
        "cold load, ckptfsm / reads alone": 1 / 0.9,
        "cold load, another sharding, ckptfsm / stock": 1.0,
        "opening of an empty root": 0.3,
        "opening of 1": 0.3,
        "recovery of 3, after a close": 2.0,
        "recovery of 3, after a kill": 2.0,
        "journal, for 100000 records": 1.0,
        "ckptfsm ls of 3": 1000.0,
        "one more beside 3 / beside 1": 1.2,
        "poll idle, ckptfsm": 5.0,
        "poll in flight, ckptfsm": 20.0,
        "time per rank, 8 / 3 ranks": 1.5,
        "extra peak memory / state, eager": 1.05,
        "extra peak memory / state, gated": 0.10,
        "shards durable to tracked, 2 ranks, busy for 0.5 s": 50.0,
    }
    for name, figure in figures.items():
        assert figure["samples"], name
        assert isinstance(figure["met"], bool) == (name in wanted), name
        assert math.isfinite(figure["median"]), name
    for side in ("stock", "ckptfsm"):
        assert len(figures[f"save(), {side}"]["samples"]) == 2
        assert figures[f"trainer + writers, peak PSS, {side}"]["median"] > 10  # torch alone is more
    for ranks in (3, 8):
        for name in ("coordinator", "peak RSS", "messages of a rank", "manifest", "journal"):
            assert figures[f"{ranks} ranks, {name}"]["median"] > 0
    check_workloads(figures)
    assert report["environment"]["state_bytes"] == 65536
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stderr", "stdout"], "left behind"


def check_workloads(figures: dict[str, Any]) -> None:
    """Each workload has its figures for each side; the places of a stall are those of two workloads."""
    passes = [f"{seconds} s of work" for seconds in ("0", "0.25", "0.5", "1")]
    one_rank = [*passes, *(f"{work}, 2000 mixed tensors" for work in passes)]
    two_ranks = [f"{work}, 2 ranks" for work in ("0 s of work", "0.5 s of work")]
    asked = [
        (one_rank, ("fork", "eager", "gated", "auto")),
        (two_ranks, ("eager", "gated", "auto")),
    ]
    wanted = set()
    for workloads, engines in asked:
        for work in workloads:
            wanted |= {f"{kind}, {work}, stock" for kind in ("stall", "until loadable")}
            for engine in engines:
                wanted |= {f"{kind}, {work}, {engine}" for kind in ("stall", "until loadable")}
                wanted.add(f"stall, {work}, {engine} / stock")
    assert wanted <= set(figures)
    assert {len(figures[name]["samples"]) for name in wanted} == {2}
    for start, places in (("share of the stall, ", 5 * 4), ("in ", 4 * 4)):
        shown = [name for name in figures if name.startswith(start)]
        assert len(shown) == 2 * places
        assert not [name for name in shown if "mixed" in name or "0.25 s" in name or " 1 s" in name]


def test_the_picture_of_the_scale_has_a_point_for_every_number_of_ranks() -> None:
    """Catches: a figure under another name, so that its line is not drawn."""
    lines = (*scale_picture._LINES, *scale_picture._PLANS)
    names = ("RSS before the save", "peak RSS", *(name for name, _, _ in lines))
    report = {
        "figures": [
            {"name": f"{ranks} ranks, {name}", "median": ranks / 100 * (1 + at)}
            for at, name in enumerate(names)
            for ranks in (1000, 10, 100)
        ]
    }
    drawn = ElementTree.fromstring(scale_picture.draw(report))
    circles = [shape for shape in drawn.iter() if shape.tag.endswith("circle")]
    assert len(circles) == 3 * (len(lines) + 1)
    assert scale_picture.points_of(report, "peak RSS") == [(10, 0.2), (100, 2.0), (1000, 20.0)]


@pytest.mark.megatron
def test_the_table_of_the_groups_that_are_asked_for(tmp_path: Path) -> None:
    """Catches: real saves that a benchmark cannot make any more; a group that nobody asked for."""
    groups = ("transition", "saving", "device")
    asked = [word for name in groups for word in ("--only", name)]
    table = run_benchmarks(tmp_path, *asked, "--device", "cpu")
    begin, *shown = re.split(r"^\[(\w+)\]$", table, flags=re.M)
    rows = {name: text.splitlines()[1:] for name, text in zip(shown[::2], shown[1::2], strict=True)}
    assert tuple(rows) == groups and "figure" in begin
    assert "JournalWriter.append" in rows["transition"][1]
    assert any("save(), ckptfsm / stock" in row for row in rows["saving"])
    assert len(rows["device"]) == 4 * 5, "each side has its figures"


TRAINER = """
import os, signal, sys
signal.alarm(60)  # children end with it: they wait for the pipe to be closed
reading, writing = os.pipe()

def fork():
    if not os.fork():
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)

fork()  # a helper: it was there before the save
state = bytearray(b"a") * (32 << 20)
print("up", flush=True)
sys.stdin.readline()
fork()  # the writer
for page in range(0, len(state), 4096):
    state[page] = 98
print("changed", flush=True)
sys.stdin.readline()
"""


def test_the_sampler_sees_memory_that_only_the_writer_holds() -> None:
    """Catches: a page counted twice, a helper taken for a writer, a writer that is not looked at."""
    sampler = str(ROOT / "benchmarks" / "sampler.py")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen([sys.executable, "-c", TRAINER], **pipes) as trainer:
        assert ask(trainer, "") == "up"
        with subprocess.Popen([sys.executable, "-I", sampler, str(trainer.pid)], **pipes) as watch:
            assert ask(watch, "know") == "noted"
            assert ask(watch, "begin") == "ready"
            assert ask(trainer, "fork") == "changed"
            peaks = json.loads(ask(watch, "end"))
            watch.stdin.close()
        trainer.stdin.close()
    assert 30 < peaks["writers_only"] / (1 << 20) < 40
    assert 30 < peaks["private"] / (1 << 20) < 40
    assert (
        60 < peaks["together"] / (1 << 20) < 120
    )  # its usual step makes a third copy for a moment
    assert peaks["before"] > 16 << 20 and peaks["helpers"] > 0


def ask(process: subprocess.Popen[str], line: str) -> str:
    """Say a line, if any, and hear the next one."""
    if line:
        process.stdin.write(f"{line}\n")
    return process.stdout.readline().strip()
