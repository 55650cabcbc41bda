"""mutmut over the pure modules, each with its own unit tests: a maintainer's command (``make mutmut``).

    PYTHONPATH=tests python -m proof.mutmut [MODULE ...] [--children N]

Works in a copy of the tree below ``build/mutmut``; prints, for each module, how many mutants were killed
and the name of every survivor. ``docs/mutmut.md`` says why those survive.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[2]
TESTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "lifecycle": ("lifecycle", "scenarios"),
        "ledger": ("ledger", "scenarios"),
        "intent": ("journal", "recovery", "found_by_review"),
        "findings": ("recovery", "found_by_review"),
        "recovery": ("recovery", "regressions", "schedules", "found_by_review"),
        "retention": ("retention", "config"),
        "messages": ("ledger", "lifecycle"),
        "documents": ("documents", "journal"),
        "layout": ("layout", "lease", "stock"),
        "config": ("config",),
        "errors": ("errors",),
        "proposal": ("proposal",),
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
    tests = ", ".join(f'"tests/test_{name}.py"' for name in TESTS[module])
    section = (
        "\n[tool.mutmut]\n"
        'source_paths = ["ckptfsm"]\n'
        f'only_mutate = ["ckptfsm/{module}.py"]\n'
        'also_copy = ["specs", "docs", "benchmarks"]\n'
        'pytest_add_cli_args = ["-p", "no:cacheprovider"]\n'
        f"pytest_add_cli_args_test_selection = [{tests}]\n"
    )
    (place / "pyproject.toml").write_text(text + section, encoding="utf-8")


def run(place: Path, children: int) -> tuple[Counter[str], list[str]]:
    """Run mutmut there; how many mutants ended how, and the names of the survivors."""
    mutmut = str(Path(sys.executable).with_name("mutmut"))
    subprocess.run(
        [mutmut, "run", "--max-children", str(children)],
        cwd=place,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    shown = subprocess.run(
        [mutmut, "results", "--all", "true"], cwd=place, capture_output=True, text=True, check=True
    )
    found = re.findall(r"^\s*(\S+): (.+)$", shown.stdout, re.M)
    counts = Counter(end for _, end in found)
    return counts, [name for name, end in found if end == "survived"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="proof.mutmut", description=__doc__)
    parser.add_argument("modules", nargs="*", choices=[*TESTS, []], default=[])
    parser.add_argument("--children", type=int, default=2)
    asked = parser.parse_args()
    for module in asked.modules or TESTS:
        place = ROOT / "build" / "mutmut" / module
        prepare(place, module)
        counts, survivors = run(place, asked.children)
        ends = ", ".join(f"{count} {end}" for end, count in counts.most_common())
        print(f"{module}: {ends}", flush=True)
        for name in survivors:
            print(f"    {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
