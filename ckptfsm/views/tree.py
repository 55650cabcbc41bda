"""The directories of a root with the meaning of each, for ``ckptfsm tree``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from ckptfsm.core.layout import (
    ANSWERS,
    EPOCHS,
    INBOX,
    JOBS,
    JOURNAL,
    PINS,
    PRIVATE,
    QUARANTINE,
    READERS,
    STAGING,
    TRACKER,
    TRASH,
)
from ckptfsm.core.ports import Storage
from ckptfsm.disk.durable import list_names
from ckptfsm.disk.overview import Overview
from ckptfsm.views.timeline import clean

_MEANING: Mapping[str, str] = MappingProxyType(
    {
        JOURNAL: "the transitions, one file per epoch",
        EPOCHS: "the owners, the newest counts",
        STAGING: "saves in flight",
        TRASH: "given up, deleted a little at a time",
        QUARANTINE: "withdrawn, never deleted by itself",
        INBOX: "requests of people to the owner",
        ANSWERS: "the owner's answers to them",
        PINS: "steps that people keep",
        READERS: "steps that readers hold",
        JOBS: "jobs of on_tracked, by attempt and name",
    }
)


def tree_lines(storage: Storage, overview: Overview, most: int | None) -> list[str]:
    """The tree, safe to print on a terminal, with ``most`` entries of each private directory.

    None: all of them.
    """
    states = {c.step: c.state.value for c in overview.ledger.checkpoints.values()}
    lines = [overview.root]
    for name in list_names(storage, ""):
        step = overview.layout.parse_published(name)
        if name == TRACKER:
            said = (
                overview.tracker.step
                if overview.tracker.step is not None
                else overview.tracker.found
            )
            lines.append(f"  {name}  says {said}")
        elif step is not None:
            lines.append(f"  {name}/  {states.get(step, 'no journal explains it')}")
        elif name != PRIVATE:
            lines.append(f"  {name}  not of this library")
    lines += [f"  {PRIVATE}/", *_private(storage, most)]
    return [clean(line) for line in lines]


def _private(storage: Storage, most: int | None) -> Iterator[str]:
    for name in list_names(storage, PRIVATE):
        path = f"{PRIVATE}/{name}"
        if path not in _MEANING:
            yield f"    {name}"
            continue
        inside = list_names(storage, path)
        yield f"    {name}/  {_MEANING[path]}" + ("" if inside else " (none)")
        yield from (f"      {each}" for each in inside[:most])
        if most is not None and len(inside) > most:
            yield f"      and {len(inside) - most} more"
