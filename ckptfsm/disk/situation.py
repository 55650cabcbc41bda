"""Collects the facts that ``core.findings`` judges. Takes nothing, changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ckptfsm.core.errors import DamagedRoot
from ckptfsm.core.evidence import Evidence, Owner, Ownership
from ckptfsm.core.findings import Situation
from ckptfsm.core.layout import QUARANTINE, TRASH
from ckptfsm.core.lifecycle import State
from ckptfsm.core.ports import Storage
from ckptfsm.core.recovery import Plan, Resume
from ckptfsm.disk.durable import list_names
from ckptfsm.disk.inspection import gather_evidence, read_manifest
from ckptfsm.disk.overview import Overview
from ckptfsm.disk.planning import plan_start
from ckptfsm.disk.verification import strangers_in

_MOST_LOOKS = 3


def decide_start(
    overview: Overview, evidence: Evidence, resume: Resume = "fallback"
) -> Plan | DamagedRoot:
    """The plan of a start, or the error with which it would be refused."""
    history = overview.history
    try:
        return plan_start(history, evidence, history.newest_epoch + 1, resume)
    except DamagedRoot as error:
        return error


def gathered(storage: Storage, overview: Overview) -> Evidence:
    """The evidence of a root. A directory may leave meanwhile, as for a prune: then once more."""
    for _ in range(_MOST_LOOKS - 1):
        with suppress(FileNotFoundError):
            return gather_evidence(storage, overview.layout, overview.history.ledger)
    return gather_evidence(storage, overview.layout, overview.history.ledger)


def collect(storage: Storage, overview: Overview) -> Situation:
    """The facts about a root. Raises ``OSError`` or ``NewerSchema``."""
    evidence = gathered(storage, overview)
    return Situation(
        overview.ledger,
        evidence,
        overview.history.intent,
        overview.owner,
        decide_start(overview, evidence),
        tuple(list_names(storage, QUARANTINE)),
        tuple(list_names(storage, TRASH)),
        processes_in(Path(storage.root), besides=(os.getpid(), *_pid_here(overview.owner))),
        storage.free_bytes(),
        overview.history.missing,
        dict(_strangers(storage, overview)),
        overview.history.failed,
        overview.history.newest_epoch,
    )


def _strangers(storage: Storage, overview: Overview) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The files of others in the directory of each tracked step that has some."""
    for checkpoint in overview.ledger.in_state(State.TRACKED):
        name = overview.layout.published_name(checkpoint.step)
        with suppress(DamagedRoot, FileNotFoundError):  # the evidence tells of that
            manifest = read_manifest(storage, name)
            if manifest is not None and (found := strangers_in(storage, name, manifest)):
                yield checkpoint.step, found


def _pid_here(owner: Owner) -> tuple[int, ...]:
    """The owner's pid, unless it is a number of another host or container."""
    return () if owner.ownership is Ownership.ELSEWHERE else (owner.pid,)


def processes_in(root: Path, besides: tuple[int, ...]) -> tuple[str, ...]:
    """The processes of this host that have files below ``root`` open, as ``pid name``.

    Processes of other users cannot be seen, except by root.
    """
    processes = (each for each in Path("/proc").iterdir() if each.name.isdigit())
    others = (each for each in processes if int(each.name) not in besides)
    place = root.resolve()  # /proc tells paths without links
    return tuple(sorted(f"{p.name} {_name_of(p)}" for p in others if _has_open(p, place)))


def _has_open(process: Path, root: Path) -> bool:
    try:
        return any(_is_below(each, root) for each in (process / "fd").iterdir())
    except OSError:  # ended, or another user's
        return False


def _is_below(descriptor: Path, root: Path) -> bool:
    """True if a descriptor writes a file below ``root``, or holds the lock there."""
    try:
        if root not in descriptor.readlink().parents:
            return False
        flags = (descriptor.parent.parent / "fdinfo" / descriptor.name).read_text()
    except OSError:  # closed meanwhile: the other descriptors of its process still count
        return False
    mode = int(flags.partition("flags:")[2].split()[0], 8) & os.O_ACCMODE
    return mode != os.O_RDONLY


def _name_of(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "?"
