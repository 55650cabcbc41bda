"""Pauses between two polls."""

from __future__ import annotations

from collections.abc import Iterator


def pauses(longest_s: float = 0.05) -> Iterator[float]:
    """Yield pauses in seconds without end: 2 ms at first, then 20% longer each time."""
    pause = 0.002
    while True:
        yield pause
        pause = min(pause * 1.2, longest_s)
