"""Which subpackage may import which, what the core may use, and where torch, deletions and the
table are.
"""

from __future__ import annotations

import ast
import subprocess
import sys

import ckptfsm
from ckptfsm.core import formats
from house.source import (
    MODULES,
    PACKAGE,
    ROOT,
    calls,
    imported_modules,
    imports,
    packages,
    subpackage,
    tree,
)

# From the ground up: a subpackage imports those before it, and nothing after it.
SUBPACKAGES = (
    "core",
    "adapters",
    "disk",
    "writers",
    "places",
    "coordinator",
    "follow",
    "ranks",
    "dcp",
    "megatron",
    "integrations",
    "views",
    "testing",
    "demo",
    "cli",
)
TORCH = ("dcp", "megatron", "integrations")
APART = {  # subpackages that are earlier in the list, and yet not to be imported
    "follow": {"writers", "coordinator"},
    "places": {"writers"},
    "views": {"adapters", "writers", "coordinator", "follow", "places", "ranks", *TORCH},
    "testing": {*TORCH, "views"},
    "demo": {"integrations"},
    "cli": {"writers", "follow", "ranks", *TORCH, "testing"},
}
# The modules of the standard library that the core may use; config.py reads a TOML file besides.
HARMLESS = {
    "__future__",
    "collections",
    "concurrent",
    "dataclasses",
    "difflib",
    "enum",
    "fnmatch",
    "functools",
    "itertools",
    "json",
    "math",
    "operator",
    "re",
    "signal",  # the names of signals
    "types",
    "typing",
}
LIBRARIES = {
    "core/images.py": {"array", "struct", "zlib"},
    "core/documents.py": {"pydantic", "zlib"},
    "core/jobs.py": {"pydantic", "hashlib"},
    "core/lifecycle.py": {"transitions"},
    "core/config.py": {"pydantic", "pathlib", "sys", "tomllib", "tomli"},
}
HEAVY = {"torch", "megatron", "numpy", "nvidia_resiliency_ext"}
WITH_TORCH = {*TORCH, "demo"}
DELETERS = {
    "disk/trash.py",
    "adapters/posix_storage.py",
    "places/fsspec_place.py",  # in a place for copies, which lies in no root
}
CORE = [module for module in MODULES if subpackage(module) == "core"]


def test_imports_point_down():
    """Catches: a subpackage that imports a subpackage above it, or a foreign package."""
    floor = {name: number for number, name in enumerate(SUBPACKAGES)}
    found = [
        f"{module} imports {other}"
        for module in MODULES
        for other in imported_modules(module)
        if subpackage(module) and subpackage(other) != subpackage(module)
        if not subpackage(other)
        and other != "__init__.py"
        or subpackage(other)
        and floor[subpackage(other)] > floor[subpackage(module)]
        or subpackage(other) in APART.get(subpackage(module), ())
    ]
    assert found == []


def test_there_is_no_import_cycle():
    """Catches: two modules that cannot be imported one without the other."""
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"cycle: {' -> '.join((*path, module))}"
        if module not in done:
            for other in sorted(imported_modules(module, run=True) - {"__init__.py"}):
                visit(other, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def test_the_core_uses_nothing_of_the_machine():
    """Catches: I/O, a clock or torch in the code that decides, on which simulation and proofs rely."""
    found = [
        (module, name)
        for module in CORE
        for name in packages(module) - HARMLESS - LIBRARIES.get(module, set())
    ]
    assert found == []


def test_the_core_does_not_open_log_or_print():
    """Catches: an effect in the code that decides, which no import gives away."""
    effects = {"open", "print", "input", "exec", "eval", "__import__", "log", "logging"}
    found = [
        (module, node.id)
        for module in CORE
        if module != "core/config.py"
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Name) and node.id in effects
    ]
    assert found == []


def test_F14_no_decision_reads_a_clock():
    """Catches: wall time or mtime in a decision."""
    forbidden = {"time", "monotonic_ns", "now", "utcnow", "st_mtime", "getmtime"}
    modules = [
        *CORE,
        "disk/journal.py",
        "disk/assembly.py",
        "disk/inspection.py",
        "disk/publishing.py",
        "disk/setting_aside.py",
    ]
    found = [
        (module, node.attr)
        for module in modules
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Attribute) and node.attr in forbidden
    ]
    assert found == []
    assert not {"time", "datetime"} & {name for module in modules for name in packages(module)}


def test_torch_is_in_few_subpackages():
    """Catches: torch needed to read a journal, or to import the package; megatron-core in dcp/."""
    found = [m for m in MODULES if subpackage(m) not in WITH_TORCH and packages(m) & HEAVY]
    assert found == []
    assert [m for m in MODULES if subpackage(m) == "dcp" and "megatron" in packages(m)] == []


def test_the_kit_needs_hypothesis_alone():
    """Catches: a tool of our proof in the wheel, with packages that no user's test needs."""
    of_the_library = {"pydantic", "pydantic_core", "xxhash"}
    allowed = {*sys.stdlib_module_names, *of_the_library, "hypothesis"}
    found = [(m, packages(m) - allowed) for m in MODULES if subpackage(m) == "testing"]
    assert [(module, names) for module, names in found if names] == []


def test_import_ckptfsm_is_light():
    """Catches: four seconds of torch and megatron-core for ``import ckptfsm``, by any way."""
    code = (
        "import ckptfsm, sys\n"
        f"print(sorted({{n.partition('.')[0] for n in sys.modules}} & {HEAVY!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_only_the_table_uses_transitions():
    """Catches: a second state machine beside the one table."""
    assert [m for m in MODULES if "transitions" in packages(m)] == ["core/lifecycle.py"]


def test_I1_deletion_is_in_one_place():
    """Catches: a second place that deletes; the implementations of the port are the exception."""
    found = {
        module
        for module in MODULES
        if subpackage(module) not in {"testing", "demo"}
        for name, call in calls(module)
        if name in {"unlink", "rmdir", "rmtree"} or ast.unparse(call.func) == "os.remove"
    }
    assert found == DELETERS


def test_the_checked_modules_exist():
    """Catches: a rename that silently takes a module, or a subpackage, out of these checks."""
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(SUBPACKAGES)
    assert not (DELETERS | set(LIBRARIES)) - set(MODULES)
    assert not {name for module in MODULES for name in imports(module)} & {"ckptfsm.core"}


def test_public_names_are_the_same_for_people_and_for_type_checkers():
    """Catches: a name that a type checker finds elsewhere, or not at all."""
    (typed,) = (
        node.body
        for node in tree("__init__.py").body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    told = {
        alias.asname or alias.name: node.module
        for node in typed
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert told == dict(ckptfsm._PLACES)
    assert list(ckptfsm.__all__) == list(ckptfsm._PLACES)


def test_nobody_asks_for_a_format_by_its_name():
    """Catches: a rule about a format that stands outside of ``core/formats.py``, and that the next
    format is forgotten in."""
    constants = {name for name, value in vars(formats).items() if isinstance(value, formats.Format)}
    assert len(constants) == len(formats.FORMATS)
    named = {
        module
        for module in MODULES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Compare)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Name) and inner.id in constants
    }
    assert named == set()
