"""How code is written here: one test for each rule, which lists who breaks it."""

from __future__ import annotations

import ast

from house.source import MODULES, calls, tree

MAX_FUNCTION_LINES = 75


def test_no_error_is_swallowed():
    """Catches: ``except: pass``, ``suppress(Exception)``, ``rmtree(ignore_errors=True)``."""
    found = []
    for module in MODULES:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.ExceptHandler) and (node.type is None or _is_silent(node)):
                found.append((module, node.lineno))
        for _, call in calls(module):
            broad = ast.unparse(call.func).endswith("suppress") and _broad(*call.args)
            if broad or "ignore_errors" in {keyword.arg for keyword in call.keywords}:
                found.append((module, call.lineno))
    assert found == []


def _is_silent(handler: ast.ExceptHandler) -> bool:
    assert handler.type is not None
    return _broad(handler.type) and all(isinstance(each, ast.Pass) for each in handler.body)


def _broad(*types: ast.expr) -> bool:
    names = {n.id for each in types for n in ast.walk(each) if isinstance(n, ast.Name)}
    return bool(names & {"Exception", "BaseException"})


def test_functions_are_short():
    """Catches: a function that no longer fits on a screen."""
    found = [
        (module, node.name)
        for module in MODULES
        for node in ast.walk(tree(module))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert found == []


def test_every_log_line_is_said_with_an_event():
    """Catches: a line of one word for people, or one that log processors cannot filter."""
    found = [
        (module, call.lineno)
        for module in MODULES
        for _, call in calls(module)
        if isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == "log"
    ]
    assert found == []


def test_every_module_has_a_docstring():
    """Catches: a module without its sentence of purpose."""
    found = [m for m in MODULES if tree(m).body and not ast.get_docstring(tree(m))]
    assert found == []


def test_a_class_name_stands_once():
    """Catches: two classes of one name, of which a reader or a search finds the wrong one."""
    found: dict[str, list[str]] = {}
    for module in MODULES:
        for node in tree(module).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    assert {name: places for name, places in found.items() if len(places) > 1} == {}
