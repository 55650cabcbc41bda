"""Pins and readers' leases on disk: both keep a checkpoint from being pruned.

Rules: a name alone tells which step it keeps, so that a damaged document keeps it as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckptfsm.core.documents import Pin, encode
from ckptfsm.core.layout import PINS, READERS, parse_pin, parse_reader, pin_name
from ckptfsm.core.ports import Storage
from ckptfsm.disk.durable import list_names, put


@dataclass(frozen=True, slots=True)
class Protection:
    """Reads the pins and leases of checkpoints, and pins. ``tag`` names our temporaries."""

    storage: Storage
    tag: str
    check_epoch: Callable[[], None]

    def pinned_steps(self) -> set[int]:
        """The steps pinned at an adoption or by a person."""
        names = list_names(self.storage, PINS)
        return {step for name in names if (step := parse_pin(name)) is not None}

    def reader_leases(self) -> dict[str, int]:
        """The step that each reader lease holds, by the path of the lease."""
        return {
            f"{READERS}/{name}": step
            for name in list_names(self.storage, READERS)
            if (step := parse_reader(name)) is not None
        }

    def pin(self, step: int, reason: str) -> None:
        """Keep ``step`` until its pin is removed, durably."""
        self.check_epoch()
        put(self.storage, pin_name(step), encode(Pin(step=step, reason=reason)), tag=self.tag)
