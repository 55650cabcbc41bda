"""The fate of the mutants that the tests let live. Pure but for reading the explanations.

Rules: a survivor is known by its function and its changed lines, never by mutmut's number, which
shifts. Four things may account for one. The tests killed it. The two syntax trees show that it
changes only words for people. ``mypy --strict``, which the gate runs too, refuses it. Or
``mutmut_survivors.toml`` says why it may live. Whatever is left is a gap, and the command ends red.
"""

from __future__ import annotations

import ast
import builtins
import copy
import difflib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from ckptfsm.core import errors

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover  only on Python 3.10
    import tomli as tomllib

EXPLANATIONS = Path(__file__).with_name("mutmut_survivors.toml")
KILLED = frozenset({"killed", "timeout"})


def _is_error(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, Exception)


# Where words for people stand. A raised error's message is its first argument; these are the others.
_MESSAGES = frozenset(cls.__name__ for cls in vars(errors).values() if _is_error(cls))
_ARGUMENTS: Mapping[str, int] = MappingProxyType(
    {"Decision": 4, "Rejected": 1, "Withdrawn": 2, "Failed": 2}
)
_VARIABLES = frozenset({"why", "hint", "lies", "asked", "remedy", "advice"})
_FIELDS = frozenset({"why", "detail"})
_MANGLED = re.compile(r"\bx(?:_|ǁ[\w.]+ǁ)(\w+?)__mutmut_(?:orig|\d+)\b")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, order=True)
class Change:
    """The change of a mutant: its function (``Class.method``), and the lines before and after."""

    function: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """A mutant as mutmut wrote it down; ``lines`` is where, from 1, the last included."""

    change: Change
    words_only: bool
    lines: range


@dataclass
class Judgement:
    """The fate of the mutants of one module, by name; ``stale`` explains nothing that lives."""

    killed: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    explained: list[str] = field(default_factory=list)
    unexplained: list[str] = field(default_factory=list)
    stale: list[Change] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not self.unexplained and not self.stale


def judge(
    ends: Mapping[str, str],
    mutants: Mapping[str, Mutant],
    refused: Iterable[str],
    explanations: Iterable[Change],
) -> Judgement:
    """Account for every mutant; ``ends`` is how mutmut says that it ended.

    Each explanation covers one mutant: where two have the same change, it is given twice. An
    explanation is stale if none needs it, but for one that only ran out of time, which a busy
    machine may have done.
    """
    found, left, refused = Judgement(), Counter(explanations), frozenset(refused)
    for name, end in ends.items():
        mutant = mutants[name]
        if end in KILLED:
            found.killed.append(name)
            if end != "timeout" or not left[mutant.change]:
                continue
        elif mutant.words_only:
            found.words.append(name)
            continue
        elif name in refused:
            found.refused.append(name)
            continue
        elif not left[mutant.change]:
            found.unexplained.append(name)
            continue
        else:
            found.explained.append(name)
        left[mutant.change] -= 1
    found.stale = sorted(left.elements())
    return found


def read_explanations(module: str, text: str) -> list[Change]:
    """Those of ``module``. Raises ``ValueError`` for one without a reason.

    ``new`` may be a list: several mutants of one line that live for the same reason.
    """
    changes: list[Change] = []
    for entry in tomllib.loads(text).get(module, []):
        if set(entry) != {"function", "old", "new", "why"} or not entry["why"].strip():
            raise ValueError(f"{module}: an explanation has function, old, new and why: {entry}")
        news = entry["new"] if isinstance(entry["new"], list) else [entry["new"]]
        changes += [Change(entry["function"], entry["old"], new) for new in news]
    return changes


# ------------------------------------------------------------------------------------- mutants


def read_mutants(module: str, text: str) -> dict[str, Mutant]:
    """Every mutant in a file that mutmut wrote, by the name that mutmut gives it."""
    lines = text.splitlines()
    tree = ast.parse(text)
    functions, sought = dict(_functions(tree)), phrases(tree)
    mutants: dict[str, Mutant] = {}
    for name, mutant in functions.items():
        stem, mark, number = name.rpartition("__mutmut_")
        if not mark or number == "orig":
            continue
        original = functions[f"{stem}__mutmut_orig"]
        old, new = _difference(_source(original, lines), _source(mutant, lines))
        of = stem.removeprefix("x").removeprefix("_" if stem.startswith("x_") else "ǁ")
        mutants[f"ckptfsm.{module.replace('/', '.')}.{name}"] = Mutant(
            Change(of.replace("ǁ", "."), old, new),
            words_only(original, mutant, sought),
            range(mutant.lineno, (mutant.end_lineno or mutant.lineno) + 1),
        )
    return mutants


def _functions(tree: ast.Module) -> Iterable[tuple[str, Function]]:
    for node in tree.body:
        for inner in node.body if isinstance(node, ast.ClassDef) else (node,):
            if isinstance(inner, Function):
                yield inner.name, inner


def _source(function: Function, lines: list[str]) -> list[str]:
    text = lines[function.lineno - 1 : function.end_lineno]
    return [_MANGLED.sub(r"\1", line).strip() for line in text]


def _difference(old: list[str], new: list[str]) -> tuple[str, str]:
    told = [line for line in difflib.ndiff(old, new) if line[0] in "-+"]
    removed, added = ([line[2:] for line in told if line[0] == sign] for sign in "-+")
    return " ".join(removed), " ".join(added)


# --------------------------------------------------------------------------------------- words


def words_only(original: Function, mutant: Function, sought: frozenset[str] = frozenset()) -> bool:
    """True if nothing differs but text for people: the trees are the same once that is blanked.

    A text that was empty and no longer is, or became empty, may decide something: that is no
    wording. Nor are words that the module itself looks for in such a text (``sought``): those stay
    in place.
    """
    blanked = []
    for function in (original, mutant):
        tree = _Blank(sought).visit(copy.deepcopy(function))
        tree.name = ""
        blanked.append(ast.dump(tree))
    return blanked[0] == blanked[1]


def phrases(tree: ast.Module) -> frozenset[str]:
    """Words that are looked for in texts for people: ``"rolled forward" in decision.why``."""
    return frozenset(
        str(node.left.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and isinstance(node.left, ast.Constant)
        and isinstance(node.comparators[0], ast.Attribute)
        and node.comparators[0].attr in _FIELDS
    )


class _Blank(ast.NodeTransformer):
    """Blanks text where it is for people, and nowhere else."""

    def __init__(self, sought: frozenset[str]) -> None:
        self.sought = sought

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if isinstance(node.exc, ast.Call) and _called(node.exc) in vars(builtins):
            self.blank_argument(node.exc, 0)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = _called(node)
        position = 0 if name in _MESSAGES else _ARGUMENTS.get(name)
        if position is not None:
            self.blank_argument(node, position)
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if [t.id for t in node.targets if isinstance(t, ast.Name) and t.id in _VARIABLES]:
            node.value = self.blanked(node.value)
        return self.generic_visit(node)

    def blank_argument(self, call: ast.Call, position: int) -> None:
        if len(call.args) > position:
            call.args[position] = self.blanked(call.args[position])

    def blanked(self, value: ast.expr) -> ast.expr:
        """Without the text it is put together from. Conditions and arguments stay."""
        match value:
            case ast.Constant(value=str(text)):
                kept = sorted(phrase for phrase in self.sought if phrase in text)
                return ast.Constant(f"words {kept}" if text else "")
            case ast.JoinedStr(values=pieces):
                value.values = [self.blanked(piece) for piece in pieces]
            case ast.FormattedValue():
                value.value = self.blanked(value.value)
            case ast.BinOp(op=ast.Add()):
                value.left, value.right = self.blanked(value.left), self.blanked(value.right)
            case ast.IfExp():
                value.body, value.orelse = self.blanked(value.body), self.blanked(value.orelse)
            case ast.BoolOp():
                value.values = [self.blanked(piece) for piece in value.values]
            case ast.Call(func=ast.Attribute(attr="join") as join):
                join.value = self.blanked(join.value)
        return value


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""
