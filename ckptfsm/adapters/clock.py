"""The real clock. Passed in wherever time is needed; nothing else imports ``time`` for decisions."""

from __future__ import annotations

import time
from datetime import datetime, timezone


class SystemClock:
    """Monotonic seconds for decisions, UTC text for display."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> str:
        return datetime.now(timezone.utc).isoformat(timespec="milliseconds")

    def unix(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


SYSTEM = SystemClock()
