"""The transport of a process that decides alone: the same calls, nobody to ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class LocalTransport:
    """Rank 0, alone. A controller counts its workers in ``world_size``: they send reports instead."""

    rank = 0

    def __init__(self, world_size: int = 1) -> None:
        self.world_size = world_size

    def any_flags(self, flags: Sequence[bool]) -> list[bool]:
        return list(flags)

    def gather(self, item: Any) -> list[Any] | None:
        return [item]

    def broadcast(self, item: Any) -> Any:
        return item

    def close(self) -> None:
        """Nothing is open."""
