"""Settings and states for managers in tests."""

from __future__ import annotations

TEMPLATE = {"weights": None}


QUICK = {"exit_timeout_s": 0.5, "close_timeout_s": 20.0, "busy_timeout_s": 20.0}


def weights(step: int) -> dict[str, object]:
    return {"weights": b"w%d" % step, "step": step}
