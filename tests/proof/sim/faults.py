"""Faults of a simulated run: rates, drawn anew for every run.

Rules: a rate of ``Faults`` is a probability per storage call; 0 means that it does not occur in the
run. ``heal`` ends all of them. The faults that a call may have, and their numbers in the catalogue
of faults, are written only here.
"""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass, fields
from types import MappingProxyType

_WRITES = ("write", "pwrite", "allocate", "truncate", "fsync", "close")
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_ODD = (errno.EIO, errno.ESTALE, errno.EINTR)
READS = frozenset({"read", "stat", "listdir", "digest", "free_bytes", "open_reading", "pread"})


@dataclass
class Faults:
    """Rates of one run.

    ``full``: no space (F5); ``error``: another error, nothing happened (F6, F8); ``unknown``: it
    happened and reports an error (F8); ``read``: a read fails; ``short``: a short write (F7);
    ``slow`` and ``hang``: the call takes its time, or more than any wait; ``kill_trainer`` and
    ``kill_writer``: SIGKILL at the call (F1, F2); ``power``: power loss at the call (F4);
    ``pause``: the process is stopped for a while (F13).
    """

    full: float = 0.0
    error: float = 0.0
    unknown: float = 0.0
    read: float = 0.0
    short: float = 0.0
    slow: float = 0.0
    hang: float = 0.0
    kill_trainer: float = 0.0
    kill_writer: float = 0.0
    power: float = 0.0
    pause: float = 0.0

    def __post_init__(self) -> None:
        self.total = sum(getattr(self, field.name) for field in fields(self))

    def heal(self) -> None:
        for field in fields(self):
            setattr(self, field.name, 0.0)
        self.total = 0.0

    def kind_at(self, mark: float) -> str:
        """The fault whose share of [0, total) ``mark`` falls into."""
        for field in fields(self):
            mark -= getattr(self, field.name)
            if mark < 0:
                return field.name
        return ""


_SCALES = MappingProxyType(
    {
        "full": (0.25, 0.02),
        "error": (0.3, 0.02),
        "unknown": (0.3, 0.02),
        "read": (0.2, 0.005),
        "short": (0.2, 0.3),
        "slow": (0.3, 0.05),
        "hang": (0.05, 0.002),
        "kill_trainer": (0.3, 0.006),
        "kill_writer": (0.25, 0.02),
        "power": (0.3, 0.005),
        "pause": (0.1, 0.01),
    }
)


def draw_faults(choose: random.Random) -> Faults:
    """Some kinds of faults, each at a separate rate; one run in six has none."""
    if choose.random() < 0.17:
        return Faults()
    return Faults(**{name: draw_rate(choose, *scale) for name, scale in _SCALES.items()})


def draw_rate(choose: random.Random, chance: float, most: float = 1.0) -> float:
    """The rate of one kind of fault: 0 in most runs, and otherwise of any magnitude up to ``most``."""
    return most * 10 ** (-1.5 * choose.random()) if choose.random() < chance else 0.0


def errno_for(kind: str, choose: random.Random) -> int:
    """A plausible errno for a fault."""
    return choose.choice(_DISK_FULL if kind == "full" else _ODD)


def can_strike(kind: str, method: str) -> bool:
    """True if a fault of this kind makes sense at a call of this method."""
    if kind == "read":
        return method in READS
    if kind == "full":
        return method in (*_WRITES, "mkdir", "open_exclusive", "rename", "link")
    if kind == "short":
        return method in ("write", "pwrite")
    if kind in ("error", "unknown"):
        return method not in READS and method not in ("try_lock", "unlock")
    return True


def number_of(kind: str, method: str) -> str:
    """The fault's number in the catalogue."""
    if kind in ("error", "unknown") and method == "fsync":
        return "F6"
    return {
        "full": "F5",
        "error": "F8",
        "unknown": "F8",
        "read": "F8",
        "short": "F7",
        "kill_trainer": "F2",
        "kill_writer": "F1",
        "power": "F4",
        "pause": "F13",
    }.get(kind, "")
