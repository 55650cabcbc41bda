"""Puts a planted bug into the production code as it is imported, in a separate process.

A mutant replaces code in a named function, see ``anchors``. Rules:

- The old code stands exactly once in its function, so that a change of the library which moves it
  is noticed at once.
- A mutant is installed before ``ckptfsm`` is imported.
- Nothing on disk changes, and no byte code of a mutant is cached.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from mutants import anchors

PACKAGE = "ckptfsm"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Edit:
    """``new`` in the place of ``old`` in a function: ``where`` is ``module:Class.method``.

    The module is named without the package. An empty ``new`` leaves a statement out.
    """

    where: str
    old: str
    new: str

    @property
    def module(self) -> str:
        return self.where.partition(":")[0]

    @property
    def path(self) -> Path:
        return ROOT / PACKAGE / f"{self.module.replace('.', '/')}.py"

    def span(self, source: str) -> tuple[int, int]:
        """Where ``old`` stands in the module's source. Raises ``LookupError`` unless that is once."""
        found = anchors.find(source, self.where.partition(":")[2], self.old)
        if len(found) != 1:
            raise LookupError(f"{self.old!r} stands {len(found)} times in {PACKAGE}.{self.where}")
        return found[0]


@dataclass(frozen=True)
class Mutant:
    """A planted bug.

    - ``breaks``: the promise (``I2``) or the fault rule (``F24``) that the bug violates.
    - ``source``: the public report of the behaviour that the bug brings back, or the kind of slip
      (``fsync``, ``order``, ``fencing``, ``table``, ...).
    - ``why``: the consequence, where the name does not tell it.
    """

    name: str
    breaks: str
    source: str
    edits: tuple[Edit, ...]
    why: str = ""


def read(path: Path) -> Iterator[Mutant]:
    """The mutants of a file; ``catalogue`` says how they are written."""
    _, *blocks = re.split(r"^== ", path.read_text(encoding="utf-8"), flags=re.M)
    for block in blocks:
        head, *lines = block.rstrip().splitlines()
        name, breaks, source = re.split("[:,] ", head, maxsplit=2)
        changes: list[tuple[str, list[str], list[str]]] = []
        why = ""
        for line in lines:
            if line.startswith("@ "):
                changes.append((line[2:], [], []))
            elif line.startswith(("-", "+")):
                changes[-1]["-+".index(line[0]) + 1].append(line[2:])
            else:
                why = line
        edits = (Edit(where, "\n".join(old), "\n".join(new)) for where, old, new in changes)
        yield Mutant(name, breaks, source, tuple(edits), why)


def mutated_sources(planted: Mutant) -> dict[str, str]:
    """The source text of every module that the mutant changes, by full module name.

    Raises ``LookupError`` if old code does not stand exactly once where it should.
    """
    sources: dict[str, str] = {}
    for edit in planted.edits:
        full = f"{PACKAGE}.{edit.module}"
        text = sources.get(full) or edit.path.read_text(encoding="utf-8")
        try:
            sources[full] = anchors.replace(text, edit.span(text), edit.new)
        except LookupError as error:
            raise LookupError(f"{planted.name}: {error}") from None
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
