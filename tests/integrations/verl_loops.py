"""Finds the calls that verl's training loops make in every step, by reading their source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any


def calls_in_every_step(kind: type, name: str, wanted: str, *, in_loop: bool = False) -> bool:
    """Whether ``kind.name`` has a loop that calls ``self.wanted`` each time around, under no condition.

    The call may be in a method that the loop calls. Statements after an unconditional ``continue``,
    ``break`` or ``return`` do not count.
    """
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(kind, name))))
    (function,) = ast.parse(source).body
    assert isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
    return _calls(function.body, kind, wanted, in_loop)


def _calls(body: list[ast.stmt], kind: type, wanted: str, in_loop: bool) -> bool:
    for statement in body:
        if isinstance(statement, (ast.Continue, ast.Break, ast.Return)):
            return False
        if isinstance(statement, (ast.If, ast.FunctionDef)):
            if in_loop and _may_skip_the_rest(statement):
                return False
            continue
        if isinstance(statement, (ast.For, ast.AsyncFor, ast.While)):
            found = _calls(statement.body, kind, wanted, True)
        elif isinstance(statement, (ast.With, ast.AsyncWith, ast.Try)):
            found = _calls(statement.body, kind, wanted, in_loop)
        else:
            found = any(_leads_there(called, kind, wanted, in_loop) for called in _own(statement))
        if found:
            return True
    return False


def _may_skip_the_rest(statement: ast.stmt) -> bool:
    return any(isinstance(node, ast.Continue) for node in ast.walk(statement))


def _own(statement: ast.stmt) -> list[str]:
    """The methods of ``self`` that a statement calls."""
    calls = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return [f.attr for f in calls if isinstance(f, ast.Attribute) and _is_self(f.value)]


def _is_self(value: Any) -> bool:
    return isinstance(value, ast.Name) and value.id == "self"


def _leads_there(called: str, kind: type, wanted: str, in_loop: bool) -> bool:
    if called == wanted:
        return in_loop
    method = inspect.unwrap(getattr(kind, called, _leads_there))
    known = inspect.isfunction(method) and method.__module__.startswith("verl.trainer")
    known = known or method.__module__.startswith("verl.experimental")
    return known and calls_in_every_step(kind, called, wanted, in_loop=in_loop)
