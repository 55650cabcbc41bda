"""The environments of `make test-integrations`, and which targets are due."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from integrations import run

TARGETS = {target.name: target for target in run.TARGETS}
NOW = {name: {"ran_with": target.ran_with} for name, target in TARGETS.items()}


def test_a_change_runs_the_oldest_and_the_newest_of_each_trainer(capsys):
    """Catches: a trainer of which no version runs; tests of stock code that no change can break."""
    due = run.due(NOW)
    assert [target.name for target in due] == [
        "torch-alone",
        "megatron-core-0.13",
        "megatron-core-0.19",
        "nvrx-0.7",
        "megatron-lm-0.19",
        "megatron-bridge-0.6",
        "ray",
        "places",
        "torchtitan-0.3",
        "lightning-2.6",
        "accelerate-1.15-transformers-5.23",
        "verl-0.9.1-core-0.19",
    ]
    assert not any(test in target.tests for target in due for test in run.TODAY_TESTS)
    assert capsys.readouterr().out == ""


def test_a_target_that_was_changed_since_it_ran_is_due(capsys):
    """Catches: an older version that nothing runs after its integration has changed."""
    due = run.due({**NOW, "verl-0.7.1": {"ran_with": "another"}, "nvrx-0.7": {}})
    assert "verl-0.7.1" in [target.name for target in due]
    assert TARGETS["nvrx-0.7"] in due, "whole"
    said = capsys.readouterr().out
    assert "1 targets more" in said and "verl-0.7.1" in said and "WRITE=1" in said


@pytest.mark.parametrize(
    ("file", "targets"),
    [
        ("ckptfsm/integrations/queue.py", ("ray", "verl-0.9.1", "megatron-bridge-0.6")),
        ("ckptfsm/integrations/verl/trainer.py", ("verl-0.9.1",)),
        ("ckptfsm/integrations/ray.py", ("ray",)),
        ("ckptfsm/integrations/hugging_face.py", ("megatron-bridge-0.6",)),
        ("ckptfsm/adapters/versions.py", ("ray", "verl-0.9.1", "megatron-bridge-0.6")),
        ("tests/integrations/verl_job.py", ("verl-0.9.1",)),
        ("tests/integrations/test_ray.py", ("ray",)),
    ],
)
def test_a_changed_file_is_noticed(tmp_path, monkeypatch, file, targets):
    """Catches: an integration, its versions or its tests that may change unseen; a target that is due
    for another trainer's files."""
    changed = tmp_path / file
    changed.parent.mkdir(parents=True)
    changed.write_text("# one")
    monkeypatch.setattr(run, "ROOT", tmp_path)
    versions = tmp_path / "ckptfsm/adapters/versions.py"
    versions.parent.mkdir(parents=True, exist_ok=True)
    versions.touch()
    names = ("ray", "verl-0.9.1", "megatron-bridge-0.6")
    before = {name: TARGETS[name].ran_with for name in names}
    changed.write_text("# two")
    assert tuple(n for n, ran in before.items() if TARGETS[n].ran_with != ran) == targets


def test_an_environment_is_told_by_what_it_holds(monkeypatch):
    """Catches: an environment that stays after other packages were asked for, or of a lender."""
    ray, lent = TARGETS["ray"], TARGETS["verl-0.9.1-core-0.19"]
    assert replace(ray, packages=(("ray==1",),)).key != ray.key
    assert replace(lent, borrows="ray").key != lent.key
    assert replace(ray, tests=()).key == ray.key
    here = ray.key
    monkeypatch.setattr(run, "_named", lambda: ("torch==9", ""))
    assert ray.key != here


@pytest.fixture
def plain(tmp_path, monkeypatch) -> run.Target:
    """A target of this Python, whose packages are not really installed."""
    monkeypatch.setattr(run, "PLACE", tmp_path / "environments")
    return run.Target("plain", run.MINE, (("a",), ("b",)), ())


def test_a_half_made_environment_is_made_anew_and_a_whole_one_kept(plain, monkeypatch):
    """Catches: tests that run with half of the packages after an installation was interrupted."""
    asked: list[str] = []

    def pip(python: Path, *arguments: str) -> None:
        asked.extend(arguments)
        if asked == ["a", "b"]:
            raise subprocess.CalledProcessError(1, "pip")

    monkeypatch.setattr(run, "pip", pip)
    with pytest.raises(subprocess.CalledProcessError):
        run.prepared(plain)
    python, _ = run.prepared(plain)
    assert python.exists() and asked == ["a", "b", "a", "b"]
    run.prepared(plain)
    assert asked == ["a", "b", "a", "b"]


def test_environments_that_nobody_uses_are_removed(plain, monkeypatch):
    """Catches: a cache that grows with each version that was ever tried."""
    monkeypatch.setattr(run, "pip", lambda *arguments: None)
    run.prepared(plain)
    other = replace(plain, name="other")
    run.prepared(other)
    os.utime(plain.place / run.WHOLE, (0, 0))
    run.prepared(other)
    assert other.place.exists() and not plain.place.exists()


def test_what_is_due_cannot_be_written():
    """Catches: a row of the table that names tests which were left out."""
    with pytest.raises(SystemExit):
        run.parse(["--due", "--write"])


def test_what_cannot_run_is_told_and_the_others_run(monkeypatch, capsys):
    """Catches: a version that is on no index, or a Python that is not here, and a run that is green."""

    def prepared(target: run.Target) -> tuple[Path, int]:
        if target.name == "nvrx-0.4":
            raise subprocess.CalledProcessError(1, "pip")
        return Path("python"), 0

    monkeypatch.setattr(run, "prepared", prepared)
    monkeypatch.setattr(run, "run", lambda target, python, install_s: {"ok": True})
    monkeypatch.setattr(run, "left_out", lambda target: "no Python" if "0.6" in target.name else "")
    assert run.main(["ray", "nvrx-0.7"]) == 0
    assert run.main(["nvrx", "ray"]) == 1
    assert "left out: nvrx-0.6, failed: nvrx-0.4" in capsys.readouterr().out
    assert run.main(["nvrx-0.6", "ray"]) == 0 and run.main(["nvrx-0.6", "ray", "--complete"]) == 1
