"""The modules of the library, as the rules of the house see them: parsed once, named by their path."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ckptfsm"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@cache
def tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / module).read_text(), module)


def imports(module: str, *, run: bool = False) -> Iterator[str]:
    """Every imported module by its full name, wherever in the file; ``from a import b`` as a.b.

    ``run``: without those below ``if TYPE_CHECKING``, which no interpreter imports.
    """
    only_typed = {
        inner
        for node in ast.walk(tree(module))
        if run and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in node.body
    }
    for node in ast.walk(tree(module)):
        if node in only_typed:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_modules(module: str, *, run: bool = False) -> set[str]:
    """The modules of the library that a module imports, as paths. ``run``: see ``imports``."""
    found = set()
    for name in imports(module, run=run):
        if name.startswith("ckptfsm"):
            place = "/".join(name.split(".")[1:])
            parent = place.rpartition("/")[0]
            for path in (
                f"{place}.py",
                f"{place}/__init__.py",
                f"{parent}.py",
                f"{parent}/__init__.py",
            ):
                if path.lstrip("/") in MODULES:
                    found.add(path.lstrip("/"))
                    break
    return found - {module}


def packages(module: str) -> set[str]:
    """The packages outside of the library that a module imports."""
    return {name.partition(".")[0] for name in imports(module)} - {"ckptfsm"}


def subpackage(module: str) -> str:
    """The folder of a module; "" for a door at the root."""
    return module.partition("/")[0] if "/" in module else ""


def calls(module: str) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            yield name or getattr(node.func, "id", ""), node
