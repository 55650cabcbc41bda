"""Puts a planted bug into the production code as it is imported, in a process of its own.

A mutant is a replacement of source text. Rules: the old text stands exactly once in its module, so
that a change of the library which moves it is noticed at once; a mutant is installed before
``ckptfsm`` is imported; nothing on disk changes, and no byte code of a mutant is cached.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "ckptfsm"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Edit:
    """Where ``old`` stands in ``module`` (without the package's name), ``new`` is to stand."""

    module: str
    old: str
    new: str

    @property
    def path(self) -> Path:
        return ROOT / PACKAGE / f"{self.module.replace('.', '/')}.py"


@dataclass(frozen=True)
class Mutant:
    """A planted bug.

    ``breaks`` is the promise (``I2``) or the fault rule (``F24``) that it violates; ``source`` the
    public report whose old semantics it has, or what kind of slip it is (``fsync``, ``order``,
    ``fencing``, ``table``, ...). ``killers`` are the layers likely to see it, the quickest first: a
    hint that saves time and nothing else. ``why`` is said where the name does not.
    """

    name: str
    breaks: str
    source: str
    edits: tuple[Edit, ...]
    killers: tuple[str, ...] = ()
    why: str = ""


def mutant(
    name: str,
    module: str,
    old: str,
    new: str,
    *more: tuple[str, str, str],
    breaks: str,
    source: str,
    killers: Sequence[str] = (),
    why: str = "",
) -> Mutant:
    """A mutant of one replacement, or of several: ``more`` are (module, old, new)."""
    edits = tuple(Edit(*edit) for edit in ((module, old, new), *more))
    return Mutant(name, breaks, source, edits, tuple(killers), why)


def mutated_sources(planted: Mutant) -> dict[str, str]:
    """The source text of every module that the mutant changes, by full module name.

    Raises ``LookupError`` if an old text does not stand exactly once where it should.
    """
    sources: dict[str, str] = {}
    for edit in planted.edits:
        full = f"{PACKAGE}.{edit.module}"
        text = sources.get(full) or edit.path.read_text(encoding="utf-8")
        found = text.count(edit.old)
        if found != 1:
            raise LookupError(f"{planted.name}: its old text stands {found} times in {full}")
        sources[full] = text.replace(edit.old, edit.new)
    return sources


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from other text than its file has; never from, or into, cached byte code."""

    def __init__(self, fullname: str, path: str, source: str) -> None:
        super().__init__(fullname, path)
        self._source = source

    def get_data(self, path: str) -> bytes:
        return self._source.encode()

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError("a mutant has no cached byte code")


class _Finder:
    """Finds the modules of one mutant, and nothing else."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._sources:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert found is not None and found.origin is not None
        loader = _Loader(fullname, found.origin, self._sources[fullname])
        return importlib.util.spec_from_file_location(fullname, found.origin, loader=loader)


def install(planted: Mutant) -> None:
    """Plant the bug in this process. ``ckptfsm`` must not have been imported."""
    if PACKAGE in sys.modules:
        raise RuntimeError(f"{PACKAGE} was imported before the mutant was planted")
    sys.meta_path.insert(0, _Finder(mutated_sources(planted)))
