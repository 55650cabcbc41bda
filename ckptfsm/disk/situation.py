"""The plan of a start, and the facts that ``core.findings`` judges. Takes nothing, changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ckptfsm.adapters.garbage import collection_paused
from ckptfsm.core.errors import DamagedRoot
from ckptfsm.core.evidence import Evidence, Ownership
from ckptfsm.core.findings import Situation
from ckptfsm.core.layout import FETCHING, JOURNAL, LOCK, QUARANTINE, TRASH, parse_attempt
from ckptfsm.core.lifecycle import State
from ckptfsm.core.ports import Storage
from ckptfsm.core.recovery import Plan, Resume, plan
from ckptfsm.disk.durable import list_names
from ckptfsm.disk.inspection import gather_evidence, read_manifest
from ckptfsm.disk.job_records import read_records
from ckptfsm.disk.journal import History
from ckptfsm.disk.overview import Overview
from ckptfsm.disk.verification import strangers_in

_MOST_LOOKS = 3


@collection_paused()
def plan_start(history: History, evidence: Evidence, epoch: int, resume: Resume) -> Plan:
    """Decide from everything that journal and disk tell, at a start and to foretell one.

    Raises ``DamagedRoot``, see ``plan``.
    """
    return plan(history.ledger, evidence, epoch, resume, intent=history.intent, lost=history.lost)


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
    owner = overview.owner
    here = owner.ownership is not Ownership.ELSEWHERE  # else its pid is a number of another host
    besides = (os.getpid(), owner.pid) if here else (os.getpid(),)
    processes = processes_in(Path(storage.root), besides)
    return Situation(
        overview.ledger,
        evidence,
        overview.history.intent,
        owner,
        decide_start(overview, evidence),
        tuple(list_names(storage, QUARANTINE)),
        tuple(list_names(storage, TRASH)),
        processes.writing,
        storage.free_bytes(),
        overview.history.missing,
        dict(_strangers(storage, overview)),
        processes.forked,
        overview.history.failed,
        overview.history.newest_epoch,
        tuple(read_records(storage)),
        overview.held,
        tuple(name for name in list_names(storage, FETCHING) if parse_attempt(name) is not None),
    )


def _strangers(storage: Storage, overview: Overview) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The files of others in the directory of each tracked step that has some."""
    for checkpoint in overview.ledger.in_state(State.TRACKED):
        name = overview.layout.published_name(checkpoint.step)
        with suppress(DamagedRoot, FileNotFoundError):  # the evidence tells of that
            manifest = read_manifest(storage, name)
            if manifest is not None and (found := strangers_in(storage, name, manifest)):
                yield checkpoint.step, found


class Processes(NamedTuple):
    """Processes of this host with files of a root open for writing, each as ``pid name``.

    ``forked`` have nothing but the lock and the journal: a manager's process forked them, as torch
    forks the workers of a data loader. They keep no start away.
    """

    writing: tuple[str, ...] = ()
    forked: tuple[str, ...] = ()


def processes_in(root: Path, besides: tuple[int, ...]) -> Processes:
    """The processes of this host that have files below ``root`` open, and are not among ``besides``.

    Processes of other users cannot be seen, except by root.
    """
    place = root.resolve()  # /proc tells paths without links
    writing: list[str] = []
    forked: list[str] = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit() or int(process.name) in besides:
            continue
        opened = list(_opened(process, place))
        if opened:
            owners = all(name.startswith((LOCK, f"{JOURNAL}/")) for name in opened)
            (forked if owners else writing).append(f"{process.name} {_name_of(process)}")
    return Processes(tuple(sorted(writing)), tuple(sorted(forked)))


def _opened(process: Path, root: Path) -> Iterator[str]:
    """The files below ``root`` that a process has open for writing, as paths in it."""
    try:
        for descriptor in (process / "fd").iterdir():
            name = _written_below(descriptor, root)
            if name:
                yield name
    except OSError:  # ended, or another user's
        return


def _written_below(descriptor: Path, root: Path) -> str:
    """The path in ``root`` of the file that a descriptor writes, or locks; "" if it does not."""
    try:
        file = descriptor.readlink()
        if root not in file.parents:
            return ""
        flags = (descriptor.parent.parent / "fdinfo" / descriptor.name).read_text()
    except OSError:  # closed meanwhile: the other descriptors of its process still count
        return ""
    mode = int(flags.partition("flags:")[2].split()[0], 8) & os.O_ACCMODE
    return "" if mode == os.O_RDONLY else str(file.relative_to(root))


def _name_of(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "?"
