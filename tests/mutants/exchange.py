"""Plants a mutant in an interpreter that has imported the library: functions get other code, in place.

Only the bodies of functions can be exchanged. Code that ran when its module was imported cannot: the
table, a class, a constant, a default of a parameter. ``CannotExchangeError`` says so, and nothing is
exchanged; such a mutant needs an interpreter that imports the mutated text.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from mutants.loader import PACKAGE, ROOT, Mutant, mutated_sources

Key = tuple[str, int, str]  # file, line, name
Living = Mapping[Key, Sequence[FunctionType]]


class CannotExchangeError(Exception):
    """What the mutant changes is no body of a function, or that function cannot be found."""


def key_of(code: CodeType) -> Key:
    return code.co_filename, code.co_firstlineno, code.co_name


def living_functions(folder: Path = ROOT / PACKAGE) -> Living:
    """Every function of the library that exists, wrapped and nested ones too."""
    gc.unfreeze()  # what is frozen is in no list of objects
    found: dict[Key, list[FunctionType]] = defaultdict(list)
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename.startswith(f"{folder}/"):
            found[key_of(each.__code__)].append(each)
    return found


def exchange(codes: Iterable[tuple[CodeType, CodeType]], living: Living) -> None:
    """Give the functions of the first code of each pair the second, in this process.

    Raises ``CannotExchangeError``; no function is changed then.
    """
    found: list[tuple[FunctionType, CodeType]] = []
    for old, new in codes:
        functions = [
            f for f in living.get(key_of(old), ()) if _meaning(f.__code__) == _meaning(old)
        ]
        if not functions or old.co_freevars != new.co_freevars:
            raise CannotExchangeError(f"{old.co_name} is not to be found, or is another closure")
        if any(key_of(inner) in living for inner in _inside(old)):
            raise CannotExchangeError(f"{old.co_name} has made functions when it was imported")
        found += [(function, new) for function in functions]
    for function, code in found:
        function.__code__ = code


def changed(planted: Mutant) -> Iterator[tuple[CodeType, CodeType]]:
    """The outermost functions that the mutant changes: their code before and after."""
    for name, text in mutated_sources(planted).items():
        path = sys.modules[name].__file__ or ""
        texts = (Path(path).read_text(encoding="utf-8"), text)
        yield from changed_code(*(compile(t, path, "exec", dont_inherit=True) for t in texts))


def changed_code(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Of the body of a module or of a class."""
    if _meaning(old, nested=False) != _meaning(new, nested=False):
        raise CannotExchangeError(f"{old.co_name} is changed, which runs when it is imported")
    for before, after in zip(_nested(old), _nested(new), strict=True):
        if not before.co_flags & inspect.CO_OPTIMIZED:  # the body of a class
            yield from changed_code(before, after)
        elif _meaning(before) != _meaning(after):
            yield before, after


def _nested(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


def _inside(code: CodeType) -> Iterator[CodeType]:
    for each in _nested(code):
        yield each
        yield from _inside(each)


def _meaning(code: CodeType, *, nested: bool = True) -> tuple[Any, ...]:
    """What the code does, wherever it stands; without what is ``nested`` only how it is called."""
    constants = [
        (each.co_name, *(_meaning(each) if nested else ()))
        if isinstance(each, CodeType)
        else (type(each), each)
        for each in code.co_consts
    ]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    arguments = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    return code.co_code, getattr(code, "co_exceptiontable", b""), names, arguments, constants
