"""The lanes of the tests: nothing is in none of them, and no line of the list is stale."""

from __future__ import annotations

import json
import re
from pathlib import Path

import ci
import pytest
from lanes import GATE, is_for_gate

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent


def test_a_test_of_the_gate_is_there():
    """Catches: a test that was renamed, and that `make test` waits for since."""
    text = "\n".join(path.read_text() for path in TESTS.rglob("test_*.py"))
    assert [name for name in GATE if not re.search(rf"def {name}\(", text)] == []


def test_some_examples_stay():
    """Catches: a pattern that keeps all examples of a test, or none, out of `make gate`."""
    assert is_for_gate("test_I2_sigkill_at_every_storage_call[control]")
    assert not is_for_gate("test_I2_sigkill_at_every_storage_call[fail_and_retry]")
    assert is_for_gate("test_a_soak_ends_though_its_seeds_do_not")
    assert not is_for_gate("test_of_another_name[control]")


def test_the_lanes_run_everything_once():
    """Catches: a test that no lane runs, or the proof's whole profile in `make test`."""
    made = (ROOT / "Makefile").read_text()
    rules = dict(re.findall(r"^([\w-]+): \$\(\w*STAMP\)\n((?:\t.*\n)+)", made, re.M))
    parts = {name: rules[name].split()[-2 - (name == "test") :] for name in ("test", "gate")}
    assert parts == {"test": ["lint", "tests", "sample"], "gate": ["gate-tests", "layers"]}
    assert '-m "not gate"' in rules["tests"] and "--profile sample" in rules["sample"]
    assert "-m gate" in rules["gate-tests"] and "--profile pr" in rules["layers"]
    goals = [arguments[0] for arguments in ci.LANES.values()]
    assert goals == [".venv/.installed", *parts["test"], *parts["gate"], "test-integrations"]


USUAL = {"lint": (20.0, 40.0), "tests": (400.0, 600.0), "layers: fuzz": (40.0, 50.0)}


@pytest.mark.parametrize("wall, used", [(1.0, 1.0), (4.0, 1.0), (3.0, 3.0)])
def test_a_busy_or_a_slow_machine_has_no_lane_that_grew(wall, used):
    """Catches: a good change that fails because the machine is what it is."""
    took = {name: (wall * seconds[0], used * seconds[1]) for name, seconds in USUAL.items()}
    assert ci.grown(took, USUAL) == []
    just_begun = {"lint": took["lint"], "tests": (5.0, 0.0)}
    assert ci.grown(just_begun, USUAL) == []


def test_the_lane_that_grew_is_named():
    """Catches: a lane that hides behind a machine of half the speed."""
    took = {name: (2 * wall, 2 * used) for name, (wall, used) in USUAL.items()}
    found = ci.grown({**took, "layers: fuzz": (800.0, 1300.0)}, USUAL)
    assert found == ["layers: fuzz: 1300 processor s, its share is 100"]


def test_a_run_that_is_too_long_ends_by_itself(tmp_path, monkeypatch, capsys):
    """Catches: a lane that hangs until somebody ends all of it, without a word."""
    told, make = tmp_path / "told", tmp_path / "make"
    make.write_text("#!/bin/sh\nexec sleep 60\n")
    make.chmod(0o700)
    monkeypatch.setenv("CKPTFSM_SECONDS", str(told))
    monkeypatch.setenv("MAKE", str(make))
    monkeypatch.setattr(ci, "LAST_S", 0.0)
    assert ci.Run(told).lane("lint", ("lint",)) == 1
    said = capsys.readouterr().out
    assert "STOPPED" in said and "lint was running" in said
    ended = [json.loads(line) for line in told.read_text().splitlines()]
    assert [line[0] for line in ended] == ["lint", "lint"] and len(ended[-1]) == 3
