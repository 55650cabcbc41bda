"""How long to wait between two looks."""

from __future__ import annotations

from collections.abc import Iterator


def pauses(first_s: float = 0.002, longest_s: float = 0.05) -> Iterator[float]:
    """How long to wait between two looks, in seconds: short at first, then longer; never ends."""
    pause = first_s
    while True:
        yield pause
        pause = min(pause * 1.2, longest_s)
