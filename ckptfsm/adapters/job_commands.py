"""Whether the command of a job can be found, without running or importing anything of it."""

from __future__ import annotations

import ast
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec


def why_not_found(function: str, program: Sequence[str], path: str) -> str:
    """The reason why an attempt could not begin, in words; "" if its command is found.

    Nothing is imported or run: of a function, its module's source is read. ``path`` is the variable
    of the attempt's process.
    """
    if function:
        return _why_no_function(*function.split(":"))
    first = program[0]
    if "{path}" in first or "{step}" in first or shutil.which(first, path=path) is not None:
        return ""
    return f"there is no program {first!r} that can be run"


def _why_no_function(module: str, function: str) -> str:
    first = function.partition(".")[0]
    spec, within = None, None
    pieces = module.split(".")
    for number in range(1, len(pieces) + 1):
        name = ".".join(pieces[:number])
        spec = _spec_of(name, within) if number == 1 or within is not None else None
        if spec is None:
            if module != "__main__" and hasattr(sys.modules.get(module), first):  # as os.path
                return ""
            return f"there is no module {name!r} on the trainer's path"
        within = spec.submodule_search_locations
    assert spec is not None
    if within is not None and _spec_of(f"{module}.{first}", within) is not None:
        return ""
    read = getattr(spec.loader, "get_source", None)
    try:
        source = read(module) if read is not None else None
        if source is None:  # of a compiled module
            return ""
        names = _names_of(ast.parse(source))
    except (ImportError, SyntaxError, ValueError) as error:
        return f"the module {module!r} cannot be read: {error}"
    return "" if names & {first, "*", "__getattr__"} else f"{module!r} has no function {first!r}"


def _spec_of(name: str, within: Sequence[str] | None) -> ModuleSpec | None:
    """Where a module is. ``importlib.util.find_spec`` would import the packages above it."""
    finders = (each for each in sys.meta_path if hasattr(each, "find_spec"))
    found = (finder.find_spec(name, within) for finder in finders)
    return next((spec for spec in found if spec is not None), None)


def _names_of(module: ast.Module) -> set[str]:
    """All names that the code of a module binds, ``*`` if it takes those of another one."""
    found: set[str] = set()
    for node in ast.walk(module):
        match node:
            case (
                ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
            ):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name.partition(".")[0])
    return found
