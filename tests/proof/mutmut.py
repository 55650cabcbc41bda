"""mutmut over the pure modules, each with its unit tests: a maintainer's command (``make mutmut``).

    PYTHONPATH=tests python -m proof.mutmut [MODULE ...] [--children N] [--again]

Works in a copy of the tree below ``build/mutmut``. Prints, for each module, the fate of its mutants
(see ``survivors``), and ends red if one lives without an explanation, or an explanation explains
nothing. ``--again`` runs nothing and judges the results of the last run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from proof import survivors
from proof.survivors import Judgement, Mutant

ROOT = Path(__file__).resolve().parents[2]
TESTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "core/lifecycle": ("lifecycle",),
        "core/ledger": ("ledger",),
        "core/rollback": ("journal", "recovery", "histories"),
        "core/admission": ("admission",),
        "core/images": ("blob", "image"),
        "core/units": ("progress",),
        "core/evidence": ("recovery", "histories"),
        "core/explaining": ("reading",),
        "core/findings": ("examining",),
        "core/jobs": ("jobs",),
        "core/metrics": ("exporting", "metrics"),
        "core/notes": ("metrics",),
        "core/progress": ("progress",),
        "core/preemption": ("preemption",),
        "core/recorded_metrics": ("recorded_metrics",),
        "core/recovery": ("recovery",),  # the other suites take minutes for each mutant that lives
        "core/recovery_rules": ("recovery_rules", "recovery"),
        "core/recovery_refusals": ("recovery",),
        "core/keeping": ("keeping",),
        "core/retention": ("retention", "recorded_policy", "config"),
        "core/events": ("ledger", "lifecycle"),
        "core/parts": ("ledger", "proposal"),
        "core/documents": ("documents", "journal"),
        "core/layout": ("layout", "ownership", "stock"),
        "core/config": ("config",),
        "core/errors": ("errors",),
        "ranks/proposal": ("proposal",),
    }
)
_COPIED = ("ckptfsm", "tests", "specs", "docs", "benchmarks")
_FILES = ("Makefile", "README.md", "CHANGELOG.md", "LICENSE")


def prepare(place: Path, module: str) -> None:
    """A copy of the tree whose configuration mutates one module."""
    if place.exists():
        shutil.rmtree(place)
    place.mkdir(parents=True)
    for name in _COPIED:
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in _FILES:
        shutil.copy(ROOT / name, place / name)
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = [path for name in TESTS[module] for path in (ROOT / "tests").rglob(f"test_{name}.py")]
    tests = ", ".join(f'"{path.relative_to(ROOT)}"' for path in found)
    section = (
        "\n[tool.mutmut]\n"
        'source_paths = ["ckptfsm"]\n'
        f'only_mutate = ["ckptfsm/{module}.py"]\n'
        'also_copy = ["specs", "docs", "benchmarks"]\n'
        'pytest_add_cli_args = ["-p", "no:cacheprovider"]\n'
        f"pytest_add_cli_args_test_selection = [{tests}]\n"
    )
    (place / "pyproject.toml").write_text(text + section, encoding="utf-8")


def run(place: Path, children: int) -> None:
    """Run mutmut there."""
    subprocess.run(
        [_beside("mutmut"), "run", "--max-children", str(children)],
        cwd=place,
        stdout=subprocess.DEVNULL,
        check=True,
    )


def _beside(command: str) -> str:
    return str(Path(sys.executable).with_name(command))


def ends(place: Path) -> dict[str, str]:
    """How each mutant ended, by name."""
    shown = subprocess.run(
        [_beside("mutmut"), "results", "--all", "true"],
        cwd=place,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(re.findall(r"^\s*(\S+): (.+)$", shown.stdout, re.M))


def refused(place: Path, module: str, mutants: Mapping[str, Mutant]) -> set[str]:
    """The mutants whose types our configuration of mypy refuses, in the file that mutmut wrote."""
    checked = subprocess.run(
        [
            sys.executable,
            *("-m", "mypy", "--follow-imports", "silent", "--no-error-summary"),
            *(
                "--config-file",
                str(ROOT / "pyproject.toml"),
                "--cache-dir",
                str(place.parent / "mypy"),
            ),
            f"ckptfsm/{module}.py",
        ],
        cwd=place / "mutants",
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    found = re.findall(rf"^ckptfsm/{module}\.py:(\d+): error: ", checked.stdout, re.M)
    if checked.returncode > 1 or (checked.returncode and not found):
        raise SystemExit(f"mypy: {checked.stdout}{checked.stderr}")
    wrong = set(map(int, found))
    return {name for name, mutant in mutants.items() if not wrong.isdisjoint(mutant.lines)}


def judge(place: Path, module: str) -> Judgement:
    """The fate of the mutants of a run, told in a line and, where it is to be acted on, in full."""
    text = (place / "mutants" / "ckptfsm" / f"{module}.py").read_text(encoding="utf-8")
    mutants, ended = survivors.read_mutants(module, text), ends(place)
    explanations = survivors.EXPLANATIONS.read_text(encoding="utf-8")
    found = survivors.judge(
        ended,
        mutants,
        refused(place, module, mutants),
        survivors.read_explanations(module.rpartition("/")[2], explanations),
    )
    print(
        f"{module}: {len(ended)} mutants, {len(found.killed)} killed, {len(found.words)} words only, "
        f"{len(found.refused)} refused by mypy, {len(found.explained)} explained, "
        f"{len(found.unexplained)} unexplained, {len(found.stale)} stale explanations",
        flush=True,
    )
    for name in found.unexplained:
        change = mutants[name].change
        print(f"    {name} ({ended[name]}), {change.function}:", flush=True)
        print(f"      - {change.old}\n      + {change.new}", flush=True)
    for change in found.stale:
        print(
            f"    stale, {change.function}:\n      - {change.old}\n      + {change.new}", flush=True
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="proof.mutmut", description=__doc__)
    parser.add_argument("modules", nargs="*", choices=[*TESTS, []], default=[])
    parser.add_argument("--children", type=int, default=2)
    parser.add_argument("--again", action="store_true")
    asked = parser.parse_args()
    good = True
    for module in asked.modules or TESTS:
        place = ROOT / "build" / "mutmut" / module
        if not asked.again:
            prepare(place, module)
            run(place, asked.children)
        good &= judge(place, module).good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
