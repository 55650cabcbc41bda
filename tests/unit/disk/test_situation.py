"""The facts that a doctor collects: processes that still write, and the plan of a start."""

from __future__ import annotations

import ast
import inspect
import os

import pytest

from ckptfsm.coordinator import coordinator
from ckptfsm.disk import situation


@pytest.mark.parametrize("closed", ("3", "4"))
def test_a_descriptor_that_closes_meanwhile_hides_no_other(closed, tmp_path):
    """Catches: a process that goes on writing, and is not named, as it closed another file."""
    root, process = tmp_path / "root", tmp_path / "proc/17"
    for name in ("fd", "fdinfo"):
        (process / name).mkdir(parents=True)
    for descriptor in ("3", "4"):
        (process / "fd" / descriptor).symlink_to(root / descriptor)
        if descriptor != closed:
            (process / "fdinfo" / descriptor).write_text(f"pos:\t0\nflags:\t0{os.O_WRONLY:o}\n")
    assert list(situation._opened(process, root)) == [{"3": "4", "4": "3"}[closed]]


def test_a_file_that_is_only_read_does_not_count(tmp_path):
    root, process = tmp_path / "root", tmp_path / "proc/17"
    for name in ("fd", "fdinfo"):
        (process / name).mkdir(parents=True)
    (process / "fd/3").symlink_to(root / "3")
    (process / "fdinfo/3").write_text(f"pos:\t0\nflags:\t0{os.O_RDONLY:o}\n")
    assert not list(situation._opened(process, root))


def test_a_start_and_its_forecast_are_planned_by_one_function():
    """Catches: a doctor that promises a start other than the one that comes."""
    assert coordinator.plan_start is situation.plan_start
    for module, planned in ((coordinator, 0), (situation, 1)):
        called = [
            ast.unparse(node.func)
            for node in ast.walk(ast.parse(inspect.getsource(module)))
            if isinstance(node, ast.Call)
        ]
        assert "plan_start" in called and called.count("plan") == planned
