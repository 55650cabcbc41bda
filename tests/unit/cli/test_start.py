"""The start of a command: the packages that it needs, and those that it imports."""

from __future__ import annotations

import runpy
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from unittest.mock import Mock

import pytest
from cli_runs import ran, said
from packaging.requirements import Requirement
from real_roots import TREE, real_root

from ckptfsm.cli import app, demo_command
from ckptfsm.demo import run as run_of_demo

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[3]
HEAVY = {"torch", "megatron", "numpy", "nvidia_resiliency_ext", "prometheus_client"}
RUN = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {heavy!r}:
            raise ImportError(f"{{name}} is not to be imported")

sys.meta_path.insert(0, Refused())
from ckptfsm.cli import main
status = main({arguments!r})
print("modules", *sys.modules)
sys.exit(status)
"""


def run(*arguments: object) -> tuple[str, set[str]]:
    """The output of a command in a fresh interpreter without torch, and the modules it imports."""
    code = RUN.format(heavy=sorted(HEAVY), arguments=[str(each) for each in arguments])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    out, _, modules = done.stdout.rpartition("modules ")
    return out, set(modules.split())


def test_help_imports_neither_a_subpackage_nor_pydantic():
    """Catches: a start that takes as long as the slowest command."""
    out, modules = run("--help")
    assert "record-metrics" in out
    subpackages = {name for name in modules if name.startswith("ckptfsm.")}
    assert subpackages == {"ckptfsm.cli", "ckptfsm.cli.app", "ckptfsm.core", "ckptfsm.core.errors"}
    assert not modules & {"pydantic", "rich", "transitions", "prometheus_client"}


def test_ls_imports_neither_the_coordinator_nor_plans_nor_pictures(tmp_path):
    out, modules = run("ls", "-r", real_root(tmp_path, 10))
    assert "10  tracked" in out
    assert not modules & {
        "rich",
        "prometheus_client",
        "ckptfsm.coordinator",
        "ckptfsm.core.recovery",
        "ckptfsm.views.picture",
        "ckptfsm.cli.verifying",
    }


@pytest.mark.parametrize(
    "arguments",
    (
        ("show", "20"),
        ("tree",),
        ("log",),
        ("explain", "--resume"),
        ("verify", "--all", "--read-data-subset", "0%"),
        ("doctor",),
        ("timeline", "-o", "lives.html"),
        ("trace",),
        ("export", "--prometheus"),
        ("pin", "10"),
        ("prune", "--dry-run", "--keep-latest", "1"),
        ("rollback", "10", "--yes"),
        ("lease", "10", "--ttl", "0"),
        ("record-metrics", "20", "val=1"),
        ("quarantine", "ls"),
    ),
    ids=lambda arguments: arguments[0],
)
def test_commands_need_nothing_of_an_extra(arguments, tmp_path):
    """Catches: a command that only works on a machine for training, or with the extra of metrics."""
    root = real_root(tmp_path / "root", 10, 20, parts=TREE)
    named = [str(tmp_path / each) if each.endswith(".html") else each for each in arguments]
    run(*named, "-r", root)


def test_the_command_line_names_no_package_of_a_trainer():
    """Catches: an installation that brings torch, or lacks what ``ckptfsm`` starts with."""
    wanted = list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    found: dict[str, str] = {}
    while wanted:
        requirement = Requirement(wanted.pop())
        marker = requirement.marker
        if requirement.name in found or (marker is not None and not marker.evaluate({"extra": ""})):
            continue
        assert not requirement.extras, "the requirements of an extra are not followed here"
        found[requirement.name] = str(requirement)
        try:
            wanted += requires(requirement.name) or []
        except PackageNotFoundError:
            assert requirement.name == "tomli"  # of older versions of Python
    assert {"typer", "pydantic", "rich"} <= set(found)
    assert not set(found) & {*HEAVY, "megatron-core", "nvidia-resiliency-ext", "ray", "verl"}


def test_every_command_is_in_the_list_with_a_line_that_fits(capsys):
    """Catches: a command that no list shows, or a line that is cut off with dots."""
    for name, (module, _) in app.COMMANDS.items():
        assert app._declared_in(module)[name].help, name
    modules = {module for module, _ in app.COMMANDS.values()}
    declared = {name for module in modules for name in app._declared_in(module)}
    assert declared == set(app.COMMANDS)
    listed = said(capsys, "--help").partition("Commands:")[2].splitlines()[1:]
    assert [line.split()[0] for line in listed] == list(app.COMMANDS)
    assert not any(line.endswith("...") for line in listed)


def test_the_version_is_that_of_the_installed_package(capsys):
    """Catches: a report of a fault without the version, as no command tells it."""
    assert said(capsys, "--version") == f"ckptfsm {version('ckptfsm')}\n"


def test_a_mistyped_command_is_answered_with_the_nearest_one(capsys):
    status = app.run(["explian", "10"])
    assert status == app.BAD_CALL and "Did you mean 'explain'" in capsys.readouterr().err


def test_the_statuses_of_the_page_are_those_of_the_module():
    """Catches: two tables of exit statuses that tell a monitor different things."""
    page = (ROOT / "docs/cli.md").read_text().partition("| exit status | meaning |")[2]
    told = page.splitlines()[2:7]
    table = [line.replace("``", "`") for line in (app.__doc__ or "").splitlines()]
    assert [line for line in table if line.startswith("| ") and line[2].isdigit()] == told


def test_without_its_packages_the_command_line_tells_how_to_get_them(capsys, monkeypatch):
    """Catches: a traceback, or a way to get them that finds nothing on an index."""
    monkeypatch.delitem(sys.modules, "ckptfsm.cli.app")
    monkeypatch.setitem(sys.modules, "typer", None)
    status, out, err = ran(capsys, "ls")
    assert (status, out) == (2, "") and "typer is missing: pip install typer rich" in err


def test_a_module_of_the_library_that_is_missing_is_no_missing_extra(capsys, monkeypatch):
    """Catches: a broken installation that is answered with advice that cannot help."""
    monkeypatch.delitem(sys.modules, "ckptfsm.cli.app")
    monkeypatch.setitem(sys.modules, "ckptfsm.core.errors", None)
    with pytest.raises(ModuleNotFoundError, match="ckptfsm.core.errors"):
        ran(capsys, "ls")


def test_the_package_of_commands_runs_as_a_module(tmp_path, capsys, monkeypatch):
    """Catches: ``python -m ckptfsm.cli`` that loses the arguments or the exit status."""
    monkeypatch.setattr(sys, "argv", ["ckptfsm", "show", "99", "-r", str(real_root(tmp_path, 10))])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("ckptfsm.cli", run_name="__main__")
    assert ended.value.code == app.BAD_CALL and "no step 99" in capsys.readouterr().err


@pytest.mark.parametrize("status", (0, 1))
def test_the_demo_gets_the_options_and_gives_its_status(status, tmp_path, capsys, monkeypatch):
    """Catches: two options that are swapped, a failed check with status 0."""
    given: list[run_of_demo.DemoOptions] = []

    def run_demo(options):
        given.append(options)
        return status

    monkeypatch.setattr(demo_command, "require", lambda *packages, extra: None)
    monkeypatch.setattr(run_of_demo, "run_demo", run_demo)
    options = ("--steps", 12, "--ranks", 4, "--tp", 1, "--save-every", 3, "--keep", 6)
    for trainer in ("megatron", "fsdp2"):
        assert ran(capsys, "demo", "--trainer", trainer, *options, "--root", tmp_path) == (
            status,
            "",
            "",
        )
        assert given.pop() == run_of_demo.DemoOptions(
            trainer=trainer, steps=12, ranks=4, tp=1, save_every=3, keep=6, root=tmp_path
        )


@pytest.mark.parametrize(
    "there, trainer, needed, extra",
    [
        (True, "megatron", ("torch", "megatron-core"), "megatron"),
        (False, "fsdp2", ("torch",), "torch"),
    ],
)
def test_the_demo_takes_the_trainer_that_is_installed(
    there, trainer, needed, extra, capsys, monkeypatch
):
    """Catches: a demo that asks for megatron-core where torch is enough, or does not say so."""
    given: list[object] = []
    monkeypatch.setattr(demo_command, "_has_megatron_core", lambda: there)
    monkeypatch.setattr(
        demo_command, "require", lambda *packages, extra: given.append((packages, extra))
    )
    monkeypatch.setattr(run_of_demo, "run_demo", lambda options: given.append(options) or 0)
    status, out, err = ran(capsys, "demo")
    assert (status, out, "--trainer fsdp2" in err) == (0, "", not there)
    assert given == [(needed, extra), run_of_demo.DemoOptions(trainer, tp=2 if there else 1)]


def test_a_tensor_parallel_size_is_not_ignored(capsys, monkeypatch):
    """Catches: --tp that is dropped in silence with a trainer that has none."""
    monkeypatch.setattr(demo_command, "require", lambda *packages, extra: None)
    status, _, err = ran(capsys, "demo", "--trainer", "fsdp2", "--tp", 2)
    assert status != 0 and "--tp 2 is for --trainer megatron" in err


def test_a_demo_that_failed_says_why_and_has_status_1(capsys, monkeypatch):
    monkeypatch.setattr(demo_command, "require", lambda *packages, extra: None)
    failed = Mock(side_effect=run_of_demo.DemoFailed("the losses differ"))
    monkeypatch.setattr(run_of_demo, "run_demo", failed)
    assert ran(capsys, "demo") == (1, "", "FAILED: the losses differ\n")
