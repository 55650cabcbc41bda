"""The shape of the house: layers, who may import what, who may delete, how long a function may be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from rooms import PURE

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ckptfsm"
MODULES = sorted(p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py"))

# What a pure module may use of the standard library; core/config.py reads a TOML file besides.
HARMLESS = {
    "__future__",
    "collections",
    "concurrent",
    "dataclasses",
    "difflib",
    "enum",
    "functools",
    "itertools",
    "json",
    "math",
    "re",
    "signal",  # the names of signals
    "types",
    "typing",
}
LIBRARIES = {"core/documents.py": {"pydantic", "zlib"}, "core/lifecycle.py": {"transitions"}}
LIBRARIES["core/config.py"] = {"pydantic", "pathlib", "sys", "tomllib", "tomli"}
UPPER = {"coordinator", "owner", "manager", "controller", "worker", "pump", "handle"}
UPPER |= {"cli", "megatron", "integrations", "demo", "testing"}
LOWER = PURE | {
    "disk/assembly.py",
    "adapters/clock.py",
    "disk/durable.py",
    "disk/effects.py",
    "disk/inspection.py",
    "adapters/executor.py",
    "disk/journal.py",
    "disk/ownership.py",
    "adapters/notices.py",
    "adapters/fork.py",
    "disk/reader_leases.py",
    "disk/receipts.py",
    "disk/stock.py",
    "adapters/posix_storage.py",
    "adapters/local_transport.py",
    "disk/trash.py",
    "writers/rank_writer.py",
}
DELETERS = {"disk/trash.py"}
MAX_FUNCTION_LINES = 75


@cache
def tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / module).read_text(), module)


def imports(module: str) -> Iterator[str]:
    """Every imported module by its full name, wherever in the file; ``from a import b`` as a.b."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top(name: str) -> str:
    return name.partition(".")[0]


def ours(module: str) -> set[str]:
    """The first-level modules of ckptfsm that a module imports."""
    return {
        name.split(".")[1] for name in imports(module) if top(name) == "ckptfsm" and "." in name
    }


def test_the_checked_modules_exist():
    """Catches: a rename that silently takes a module out of these checks."""
    assert not (LOWER | DELETERS) - set(MODULES)


def test_no_test_module_imports_another():
    """Catches: a helper that lives with the tests of something else, and moves with them."""
    found = [
        path.name
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"^\s*(from|import) test_", path.read_text(), re.M)
    ]
    assert found == []


@pytest.mark.parametrize("module", sorted(PURE))
def test_pure_modules_import_only_pure_modules(module):
    """Catches: I/O, a clock or torch reaching the core, which simulation and proofs rely on."""
    assert {f"{name}.py" for name in ours(module)} <= PURE
    outside = {top(name) for name in imports(module)} - {"ckptfsm"}
    assert outside <= HARMLESS | LIBRARIES.get(module, set())


@pytest.mark.parametrize("module", sorted(PURE))
def test_pure_modules_do_not_open_log_or_print(module):
    """Catches: an effect in the core that no import gives away."""
    if module == "core/config.py":
        return
    names = {n.id for n in ast.walk(tree(module)) if isinstance(n, ast.Name)}
    assert not names & {"open", "print", "input", "exec", "eval", "__import__", "log", "logging"}


@pytest.mark.parametrize("module", sorted(LOWER))
def test_imports_point_down(module):
    """Catches: the shell importing who drives it."""
    assert not ours(module) & UPPER


@pytest.mark.parametrize("module", MODULES)
def test_nothing_imports_an_integration(module):
    """Catches: the library in need of somebody's trainer."""
    if not module.startswith("integrations/"):
        assert "integrations" not in ours(module)


def test_there_is_no_import_cycle():
    """Catches: two modules that cannot be understood, or imported, one without the other."""
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        if module == "__init__.py":
            continue
        me = module.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        names = {name.removeprefix("ckptfsm.") for name in imports(module) if "ckptfsm." in name}
        graph[me] = names | {name.rpartition(".")[0] for name in names}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"cycle: {' -> '.join((*path, name))}"
        if name not in done:
            for inner in sorted(graph[name] & set(graph) - {name}):
                visit(inner, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("module", MODULES)
def test_only_megatron_and_its_users_import_torch(module):
    """Catches: torch needed to read a journal or to import the package."""
    if module.startswith(("megatron/", "demo/", "integrations/")):
        return
    heavy = {"torch", "megatron", "numpy", "nvidia_resiliency_ext"}
    assert not {top(name) for name in imports(module)} & heavy


@pytest.mark.parametrize("module", MODULES)
def test_nobody_imports_the_integrations(module):
    """Catches: the library that needs one of its trainers."""
    if not module.startswith("integrations/"):
        assert "integrations" not in ours(module)


@pytest.mark.parametrize("module", MODULES)
def test_only_lifecycle_imports_transitions(module):
    """Catches: a second state machine beside the one table."""
    uses = "transitions" in {top(name) for name in imports(module)}
    assert uses == (module == "core/lifecycle.py")


def test_import_ckptfsm_is_light():
    """Catches: four seconds of torch and megatron-core for ``import ckptfsm``, by any way."""
    code = (
        "import ckptfsm, sys\n"
        "heavy = {'torch', 'megatron', 'numpy', 'nvidia_resiliency_ext'}\n"
        "print(sorted({n.partition('.')[0] for n in sys.modules} & heavy))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def calls(module: str) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            yield name or getattr(node.func, "id", ""), node


@pytest.mark.parametrize("module", MODULES)
def test_I1_deletion_is_in_one_place(module):
    """Catches: a second place that deletes; the implementations of the port are the exception."""
    if module in {*DELETERS, "adapters/posix_storage.py"} or module.startswith(
        ("testing/", "demo/")
    ):
        return
    found = [
        (name, call.lineno)
        for name, call in calls(module)
        if name in {"unlink", "rmdir", "rmtree"} or ast.unparse(call.func) == "os.remove"
    ]
    assert not found


@pytest.mark.parametrize("module", sorted(DELETERS))
def test_the_deleters_do_delete(module):
    """Catches: the check above looking for something that no longer exists."""
    assert [name for name, _ in calls(module) if name == "unlink"]


@pytest.mark.parametrize("module", MODULES)
def test_no_error_is_swallowed(module):
    """Catches: ``except: pass``, ``suppress(Exception)``, ``rmtree(ignore_errors=True)``."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{module}:{node.lineno}: bare except"
            broad = {"Exception", "BaseException"} & {
                n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)
            }
            silent = all(isinstance(s, ast.Pass) for s in node.body)
            assert not (broad and silent), f"{module}:{node.lineno}: swallows everything"
        if isinstance(node, ast.Call):
            assert "ignore_errors" not in {k.arg for k in node.keywords}, module
            if ast.unparse(node.func).endswith("suppress"):
                named = {ast.unparse(a) for a in node.args}
                assert not named & {"Exception", "BaseException"}, f"{module}:{node.lineno}"


@pytest.mark.parametrize("module", MODULES)
def test_functions_are_short(module):
    """Catches: a function that no longer fits on a screen."""
    for node in ast.walk(tree(module)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{module}: {node.name} has {length} lines"


@pytest.mark.parametrize("module", MODULES)
def test_every_log_line_is_said_with_an_event(module):
    """Catches: a line of one word for people, or one that log processors cannot filter."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = f"{getattr(node.func.value, 'id', '')}.{node.func.attr}"
            assert not called.startswith("log."), f"{module}: {node.lineno}: use notices.say"


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_is(module):
    """Catches: a module without its sentence of purpose."""
    assert ast.get_docstring(tree(module)) or not tree(module).body


@pytest.mark.parametrize(
    "module",
    sorted(PURE | {"disk/journal.py", "disk/assembly.py", "disk/effects.py", "disk/inspection.py"}),
)
def test_F14_no_decision_reads_a_clock(module):
    """Catches: wall time or mtime in a decision."""
    forbidden = {"time", "monotonic_ns", "now", "utcnow", "st_mtime", "getmtime"}
    attributes = {n.attr for n in ast.walk(tree(module)) if isinstance(n, ast.Attribute)}
    assert not attributes & forbidden
    assert not {"time", "datetime"} & {top(name) for name in imports(module)}
