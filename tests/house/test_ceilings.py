"""The house stays light: nothing grows above its ceiling.

Raising a ceiling needs a line in ``docs/decisions`` that says what the growth is for. Lower one when
you have made something lighter.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from types import MappingProxyType

import pytest

from house.source import MODULES, PACKAGE, ROOT, subpackage

# Lines of the library, by subpackage; "" are the doors at its root.
LINES = MappingProxyType(
    {
        "": 140,
        "adapters": 3540,
        "cli": 2000,
        "coordinator": 2230,
        "core": 7250,
        "dcp": 5590,
        "demo": 1030,
        "disk": 4900,
        "follow": 1210,
        "integrations": 5620,
        "megatron": 2100,
        "places": 2190,
        "ranks": 4620,
        "testing": 2340,
        "views": 1380,
        "writers": 2420,
    }
)
WORDS, PAGES = 60_500, 63  # of Markdown in docs and specs
# Functions and files of the library that a save runs through, in the process of the trainer.
UNTIL_RETURNED, UNTIL_PRUNED = (362, 65), (545, 80)
HOPS_RUNS = 3  # a busy machine has a slow writer process, of which more functions are seen


def test_no_subpackage_is_above_its_ceiling():
    """Catches: a feature that is added around the others, and takes nothing away."""
    lines: Counter[str] = Counter()
    for module in MODULES:
        lines[subpackage(module)] += len((PACKAGE / module).read_text().splitlines())
    assert lines.keys() == LINES.keys()
    assert {name: count for name, count in lines.items() if count > LINES[name]} == {}


def test_the_pages_are_below_their_ceiling():
    """Catches: documentation that nobody can read any more."""
    pages = [page for top in ("docs", "specs") for page in (ROOT / top).rglob("*.md")]
    words = sum(len(re.findall(r"\w+", page.read_text(encoding="utf-8"))) for page in pages)
    assert (words <= WORDS, len(pages) <= PAGES) == (True, True), (words, len(pages))


@pytest.mark.megatron
def test_a_save_runs_through_few_functions():
    """Catches: a layer that only hands on."""
    runs = [_hops() for _ in range(HOPS_RUNS)]
    least = tuple(map(min, zip(*runs, strict=True)))
    assert all(a <= b for a, b in zip(least, UNTIL_RETURNED + UNTIL_PRUNED, strict=True)), runs


def _hops() -> tuple[int, ...]:
    command = [sys.executable, "-m", "benchmarks.hops"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    return tuple(map(int, re.findall(r"(\d+) (?:functions|files)", done.stdout)))
