"""Which tests run the code that a mutant changes: those are asked for it when the map is made."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

from mutants.exchange import CannotExchangeError, Key, changed, key_of
from mutants.loader import Mutant


def mutants_by_code(mutants: Iterable[Mutant]) -> Mapping[Key, set[str]]:
    """The mutants that change each function; a module, by its file, for what it runs on import."""
    found: dict[Key, set[str]] = defaultdict(set)
    for planted in mutants:
        try:
            keys = [key_of(old) for old, _ in changed(planted)]
        except CannotExchangeError:
            keys = [(str(edit.path), 0, "") for edit in planted.edits]
        for key in keys:
            found[key].add(planted.name)
    return found


class Reached:
    """Notes the mutants whose code is run. Without any, nothing is watched."""

    def __init__(self, mutants: Mapping[Key, set[str]]) -> None:
        self._mutants = mutants
        self._codes: set[Any] = set()

    def watch(self, run: Callable[[], str]) -> tuple[str, list[str]]:
        """What ``run`` returns, and the mutants that it reached."""
        if not self._mutants:
            return run(), []
        self._codes.clear()
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            red = run()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
        keys = {key_of(code) for code in self._codes}
        keys |= {(file, 0, "") for file, _, _ in keys}
        return red, sorted({name for key in keys for name in self._mutants.get(key, ())})

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self._codes.add(frame.f_code)
