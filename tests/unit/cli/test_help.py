"""``--help`` of every command: an example, which runs as it stands there."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runs import ran, said
from real_roots import TREE, real_job, real_root

from ckptfsm.cli import app as application
from ckptfsm.core.jobs import Copy
from ckptfsm.places.carry import copy_directory

NEEDS_TORCH = {"demo"}
HELD_ON = {"lease"}  # goes on until its time is over, or Ctrl-C


def commands() -> Iterator[str]:
    """Every command, as a person types it."""
    for name in application.COMMANDS:
        inside = getattr(application.command(name), "commands", None)
        yield from [name] if inside is None else (f"{name} {each}" for each in inside)


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """A root such as ``ckptfsm demo`` leaves: steps 15, 30, 35 and 40."""
    root = tmp_path_factory.mktemp("examples") / "demo"
    job = real_job(root)
    for step in (15, 30, 35, 40):
        job.save(step, TREE)
    job.close()
    job.storage.close_root()
    return root


def prepared(command: str, capsys) -> None:
    """Do to runs/demo what the example of a command takes for granted."""
    if command in ("quarantine restore", "quarantine drop"):
        said(capsys, "rollback", "35", "--yes", "-r", "runs/demo")
        (gone,) = Path("runs/demo/.ckptfsm/quarantine").iterdir()
        assert gone.name == "40.e1.a4"
    elif command == "adopt":
        real_root(Path("runs/other"), 45, parts=TREE)
        Path("runs/other/iter_0000045").rename("runs/demo/iter_0000045")
    elif command == "fetch":
        Path("copies/gpt").mkdir(parents=True)
        copy_directory(Path("runs/demo/iter_0000040"), Copy("copies/gpt"))


def test_every_command_is_there():
    """Catches: tests that pass because there is nothing to test."""
    assert {"ls", "doctor", "record-metrics", "quarantine restore", "demo"} <= set(commands())


@pytest.mark.parametrize("command", list(commands()))
def test_the_example_of_each_command_runs(command: str, demo, tmp_path, capsys, monkeypatch):
    """Catches: an example with an option that was renamed, a command without one."""
    helped = " ".join(said(capsys, *command.split(), "--help").split())
    (example,) = re.findall(r"Example: ckptfsm (.*)$", helped)
    assert example.startswith(command)
    if command in NEEDS_TORCH:
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("typer.confirm", lambda question: True)
    if command in HELD_ON:
        monkeypatch.setattr("ckptfsm.cli.changing.time.sleep", interrupted)
    shutil.copytree(demo, "runs/demo")
    prepared(command, capsys)
    status, out, err = ran(capsys, *shlex.split(example))
    assert (status, err) == (130 if command in HELD_ON else 0, ""), out


def interrupted(seconds: float) -> None:
    raise KeyboardInterrupt
