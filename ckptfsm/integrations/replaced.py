"""Names of a trainer's modules that hold something of ours, until they are given back."""

from __future__ import annotations

import sys
from typing import Any


class Replaced:
    """What was replaced, and by what it was. Give it back in one go, the last first."""

    def __init__(self) -> None:
        self._stock: list[tuple[Any, str, Any]] = []

    def put(self, holder: Any, name: str, value: Any) -> None:
        """Let ``holder.name`` be ``value``."""
        self._stock.append((holder, name, getattr(holder, name)))
        setattr(holder, name, value)

    def put_everywhere(self, package: str, name: str, value: Any) -> None:
        """The same in all modules of a package that have imported it under that name.

        ``package`` is the module that defines it; the others are those beside and below.
        """
        home = sys.modules[package]
        stock, top = getattr(home, name), package.rpartition(".")[0]
        for place, module in list(sys.modules.items()):
            inside = place == top or place.startswith(f"{top}.")
            if inside and module is not None and vars(module).get(name) is stock:
                self.put(module, name, value)

    def give_back(self) -> None:
        while self._stock:
            holder, name, stock = self._stock.pop()
            setattr(holder, name, stock)
