"""Finds a statement, or a part of one, in a named function of a module, however it is laid out.

Code is compared by its words: names, numbers, strings and signs. Line breaks, indentation, comments and
the comma that a formatter puts before a closing bracket make no difference. A function is named as in
``Applier.settle``; a class and a name that is assigned to may stand in its place, "" is the whole
module.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

_WORD = re.compile(
    r"""
    \s+ | \\\n | \#[^\n]*                                                # nothing
    | (?P<word>
        [rbfuRBFU]{0,2}(?:\"\"\"(?:\\.|[^\\])*?\"\"\" | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*')
        | \w+ | -> | := | [*]{2}=? | //=? | <<=? | >>=? | [-+*/%&|^@<>=!]= | \.\.\. | .
      )
    """,
    re.VERBOSE | re.DOTALL,
)


class Word(NamedTuple):
    text: str
    start: int
    end: int


def words(text: str, start: int = 0, end: int | None = None) -> list[Word]:
    """The words of ``text[start:end]``, with their places in ``text``."""
    found = list(_words(text, start, len(text) if end is None else end))
    return [
        word for word, after in zip(found, [*found[1:], None], strict=True) if _counts(word, after)
    ]


def _words(text: str, start: int, end: int) -> Iterator[Word]:
    while start < end:
        match = _WORD.match(text, start, end)
        assert match is not None, text[start : start + 20]
        if match["word"]:
            yield Word(match["word"], match.start(), match.end())
        start = match.end()


def _counts(word: Word, after: Word | None) -> bool:
    return word.text != "," or after is None or after.text not in ")]}"


def find(source: str, function: str, old: str) -> list[tuple[int, int]]:
    """Where ``old`` stands in a function of ``source``. Raises ``LookupError`` if that is not there."""
    here = words(source, *extent(source, function))
    wanted = [word.text for word in words(old)]
    starts = range(len(here) - len(wanted) + 1)
    texts = [word.text for word in here]
    return [
        (here[at].start, here[at + len(wanted) - 1].end)
        for at in starts
        if texts[at : at + len(wanted)] == wanted
    ]


def replace(source: str, span: tuple[int, int], new: str) -> str:
    """``new`` in the place of a span; its further lines are indented from the line where it begins."""
    start, end = span
    line = source[source.rfind("\n", 0, start) + 1 : start]
    indent = line[: len(line) - len(line.lstrip())]
    text = textwrap.indent(new, indent).removeprefix(indent)
    return source[:start] + (text or "pass") + source[end:]


@cache
def extent(source: str, function: str) -> tuple[int, int]:
    """Where a function, a class or an assignment begins and ends."""
    if not function:
        return 0, len(source)
    found: ast.AST = _parsed(source)
    for name in function.split("."):
        found = _inside(found, name, function)
    assert isinstance(found, ast.stmt) and found.end_lineno is not None
    first = min([found.lineno, *(each.lineno for each in getattr(found, "decorator_list", []))])
    lines = source.splitlines(keepends=True)
    start = sum(map(len, lines[: first - 1]))
    return start, start + sum(map(len, lines[first - 1 : found.end_lineno]))


@cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _inside(where: ast.AST, name: str, function: str) -> ast.AST:
    for node in ast.walk(where):
        if node is not where and name in _names(node):
            return node
    raise LookupError(f"there is no {function}")


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return [target.id for target in targets if isinstance(target, ast.Name)]
    return []
