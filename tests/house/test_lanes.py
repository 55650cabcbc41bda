"""The lanes of the tests: nothing is in none of them, and no line of the list is stale."""

from __future__ import annotations

import re
from pathlib import Path

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
    lanes = dict(re.findall(r"^(\w+): \$\(STAMP\)\n((?:\t.*\n)+)", made, re.M))
    assert '-m "not gate"' in lanes["test"] and "--profile sample" in lanes["test"]
    assert "-m gate" in lanes["gate"] and "--profile pr" in lanes["gate"]
    steps = re.findall(r"make ([\w-]+)", (ROOT / ".ci/run").read_text())
    assert steps == ["test", "gate", "test-integrations"]
