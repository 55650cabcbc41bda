"""A root as a reader sees it: the journal, the tracker, pins, leases, jobs. Changes nothing.

A living owner may change the root meanwhile, and two files may be of different moments. So an overview
is for display, and no decision is made from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckptfsm.adapters.identity import is_stopped, this_process
from ckptfsm.core.documents import Holder, Pin, decode
from ckptfsm.core.errors import ConfigError, DamagedRoot, NewerSchema
from ckptfsm.core.evidence import Owner, Ownership, TrackerEvidence
from ckptfsm.core.layout import LAYOUTS, MEGATRON, PRIVATE, TRACKER, Layout
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.ports import Identity, Storage
from ckptfsm.core.retention import describe_tracked, rules_that_keep
from ckptfsm.disk.durable import list_names, lookup
from ckptfsm.disk.inspection import (
    pinned_steps,
    read_tracker,
    reader_leases,
    unnamed_checkpoints,
)
from ckptfsm.disk.job_records import JobHolds
from ckptfsm.disk.journal import History, read_history
from ckptfsm.disk.ownership import holder_lives, is_elsewhere, newest_epoch, read_holder

_PIN_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Overview:
    """A root at about one moment.

    - ``ledger``: the checkpoints, with the steps that pins, reader leases and jobs keep.
    - ``pins``: the reason of each pin, by step. ``readers``: the number of reader leases, by step.
    - ``held``: the jobs that hold each step, and are not done.
    - ``unknown``: published names that no checkpoint of the journal explains.
    - ``missing``: the tracked steps without a directory at their name.
    """

    root: str
    layout: Layout
    history: History
    ledger: Ledger
    tracker: TrackerEvidence
    owner: Owner
    pins: Mapping[int, str]
    readers: Mapping[int, int]
    unknown: tuple[str, ...]
    missing: frozenset[int] = frozenset()
    held: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def rules(self) -> dict[int, str]:
        """The rules of the newest owner's policy that keep each step, in words."""
        return rules_that_keep(self.history.retention, describe_tracked(self.ledger))


def look(storage: Storage) -> Overview:
    """Read a root.

    Raises ``JournalCorrupt``, ``NewerSchema`` or ``OSError``; ``ConfigError`` for a directory that is
    no root.
    """
    history = read_history(storage)
    names = list_names(storage, "")
    layout = LAYOUTS.get(history.layout) or layout_of_names(names)
    published = {n: step for n in names if (step := layout.parse_published(n)) is not None}
    ours = published or PRIVATE in names or TRACKER in names
    if not ours and not any(unnamed_checkpoints(storage, layout, names)):
        raise ConfigError(
            "there is no checkpoint and no journal: this is no root",
            root=storage.root,
            reason="no_root",
        )
    pins = {step: _reason_of(storage, path) for step, path in pinned_steps(storage).items()}
    readers = Counter(reader_leases(storage).values())
    held = JobHolds(storage, history.holds).of_steps(history.ledger)
    known = {c.step for c in history.ledger.checkpoints.values() if _has_its_name(c)}
    return Overview(
        storage.root,
        layout,
        history,
        history.ledger.protected(pins, readers, held),
        read_tracker(storage),
        owner_of(storage),
        pins,
        readers,
        tuple(name for name, step in published.items() if step not in known),
        _missing(storage, history, frozenset(published.values())),
        held,
    )


def _missing(storage: Storage, history: History, published: frozenset[int]) -> frozenset[int]:
    """The tracked steps that are not at their name, also by the journal as it is after that look."""
    missing = _tracked(history) - published
    return missing & _tracked(read_history(storage, history)) if missing else missing


def _tracked(history: History) -> frozenset[int]:
    return frozenset(c.step for c in history.ledger.in_state(State.TRACKED))


def owner_of(storage: Storage) -> Owner:
    """The owner of a root. Its lock is not touched: asking for it could take it from others."""
    epoch = newest_epoch(storage)
    try:
        holder = read_holder(storage, epoch) if epoch else None
    except NewerSchema:
        raise
    except DamagedRoot:
        return Owner(Ownership.UNREADABLE, epoch)
    if holder is None:
        return Owner(Ownership.NEVER, epoch)
    here = this_process()
    found = _ownership(storage, holder, here)
    in_container = found is Ownership.ELSEWHERE and holder.host == here.host
    stopped = found is Ownership.LIVES and is_stopped(holder.pid)
    return Owner(found, epoch, holder.host, holder.pid, in_container, stopped)


def _ownership(storage: Storage, holder: Holder, here: Identity) -> Ownership:
    if holder.released:
        return Ownership.RELEASED
    if is_elsewhere(holder, here):
        return Ownership.ELSEWHERE
    return Ownership.LIVES if holder_lives(storage, holder, here) else Ownership.ENDED


def layout_of_names(names: Iterable[str]) -> Layout:
    """The layout in which one of these names is a step's; Megatron's if there is none."""
    names = list(names)
    used = [each for each in LAYOUTS.values() if any(map(each.is_published, names))]
    return used[0] if used else MEGATRON


def _has_its_name(checkpoint: Checkpoint) -> bool:
    """True if a checkpoint explains a directory at its published name."""
    published = (State.SHARDS_WRITTEN, State.FINALIZED, State.TRACKED, State.PRUNABLE)
    return checkpoint.in_place or checkpoint.state in published


def _reason_of(storage: Storage, path: str) -> str:
    """The reason in a pin; a damaged one pins all the same."""
    try:
        found = lookup(storage, path)
        if found is None or found.kind != "file":
            return ""
        return decode(Pin, storage.read(path, _PIN_BYTES), path).reason
    except (DamagedRoot, FileNotFoundError):
        return ""
