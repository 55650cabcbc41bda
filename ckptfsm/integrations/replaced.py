"""Replaced names in a trainer's modules, until they are restored."""

from __future__ import annotations

import sys
from typing import Any


class Replaced:
    """The replaced attributes and their previous values, restored together, the last one first."""

    def __init__(self) -> None:
        self._stock: list[tuple[Any, str, Any]] = []

    def put(self, holder: Any, name: str, value: Any) -> None:
        """Set ``holder.name`` to ``value``."""
        self._stock.append((holder, name, getattr(holder, name)))
        setattr(holder, name, value)

    def put_everywhere(self, package: str, name: str, value: Any) -> None:
        """Set ``name`` in all modules of a package that have imported it under that name.

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
