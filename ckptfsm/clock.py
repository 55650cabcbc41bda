"""The real clock. Passed in wherever time is needed; nothing else imports ``time`` for decisions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime, timezone


class SystemClock:
    """Monotonic seconds for decisions, UTC text for people."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> str:
        return datetime.now(timezone.utc).isoformat(timespec="milliseconds")

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def pauses(first_s: float = 0.002, longest_s: float = 0.05) -> Iterator[float]:
    """How long to wait between two looks, in seconds: short at first, then longer; never ends."""
    pause = first_s
    while True:
        yield pause
        pause = min(pause * 1.2, longest_s)
