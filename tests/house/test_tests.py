"""Rules for the tests themselves: their places, and the modules that they may use. Each test lists
offenders."""

from __future__ import annotations

import ast
import re
from collections import Counter

import device_check

from house.source import MODULES, ROOT, subpackage

TESTS = ROOT / "tests"
FILES = sorted(TESTS.rglob("test_*.py"))


def test_names_of_test_files_are_unique():
    """Catches: two files of one name, of which pytest imports one."""
    count = Counter(path.name for path in FILES)
    assert [name for name, number in count.items() if number > 1] == []


def test_no_test_module_imports_another():
    """Catches: a test that depends on another file of tests: helpers have separate modules."""
    stems = {path.stem for path in FILES}
    offenders = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            offenders += [f"{path.name}: {n}" for n in names if n.rpartition(".")[2] in stems]
    assert offenders == []


def test_unit_tests_stand_in_the_subpackage_that_they_test():
    """Catches: a unit test beside the subpackages, or in a folder of a subpackage that was renamed."""
    subpackages = {subpackage(module) for module in MODULES}
    units = [path.relative_to(TESTS / "unit") for path in FILES if TESTS / "unit" in path.parents]
    assert [
        str(path) for path in units if len(path.parts) != 2 or path.parts[0] not in subpackages
    ] == []
    assert [path.name for path in FILES if path.parent == TESTS] == []


def test_the_rows_of_the_device_check_have_tests():
    """Catches: a check of `make device-check` whose test was renamed, or whose files are elsewhere; a
    package without a version that travels to the machine."""
    text = "\n".join((ROOT / path).read_text() for some in device_check.TESTS for path in some)
    names = re.findall(r"def (test_\w+)", text)
    words = [
        each.partition(".*")[0] for kinds, _ in device_check.LABELS for each in kinds.split("|")
    ]
    assert [each for each in words if not any(each in name for name in names)] == []
    assert [pin.partition("==")[0] for pin in device_check.pins()] == sorted(
        device_check.PACKAGES, key=str.casefold
    )
