"""Pins and readers' leases on disk: both keep a checkpoint from being pruned.

A name alone tells which step it keeps, so that a damaged document keeps it as well.
"""

from __future__ import annotations

from ckptfsm.core.layout import PINS, READERS, parse_pin, parse_reader
from ckptfsm.core.ports import Storage
from ckptfsm.disk.durable import list_names


def pinned_steps(storage: Storage) -> dict[int, str]:
    """The pin of each step that was pinned at an adoption or by a person."""
    names = ((name, parse_pin(name)) for name in list_names(storage, PINS))
    return {step: f"{PINS}/{name}" for name, step in names if step is not None}


def reader_leases(storage: Storage) -> dict[str, int]:
    """The step that each reader lease holds, by the path of the lease."""
    names = ((name, parse_reader(name)) for name in list_names(storage, READERS))
    return {f"{READERS}/{name}": step for name, step in names if step is not None}
