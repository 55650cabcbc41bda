"""The transport of a process that decides alone: every call returns at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class LocalTransport:
    """A transport with a single rank."""

    rank = 0
    world_size = 1

    def any_flags(self, flags: Sequence[bool]) -> list[bool]:
        return list(flags)

    def gather(self, item: Any) -> list[Any] | None:
        return [item]

    def broadcast(self, item: Any) -> Any:
        return item

    def close(self) -> None:
        """Nothing is open."""
