"""Takes a root: waits for a command that holds it, refuses one that cannot be gone on with."""

from __future__ import annotations

import logging
from collections.abc import Collection
from shlex import quote

from ckptfsm.adapters.notices import say
from ckptfsm.adapters.versions import installed
from ckptfsm.core.errors import ConfigError, RootBusy
from ckptfsm.core.layout import LAYOUTS, Layout
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.lifecycle import State
from ckptfsm.core.ports import Clock, Identity, Storage
from ckptfsm.disk.durable import list_names
from ckptfsm.disk.inspection import newest_published_epoch
from ckptfsm.disk.journal import History, newest_segment, read_history
from ckptfsm.disk.ownership import RootOwnership, is_owned_here, open_root

log = logging.getLogger("ckptfsm")
_LOOK_S = 0.5


def take_root(
    storage: Storage,
    clock: Clock,
    identity: Identity,
    layout: Layout,
    *,
    takeover: bool,
    wait_s: float,
) -> tuple[RootOwnership, History]:
    """Take the root, and read its journal just before. Raises ``RootBusy`` after ``wait_s``.

    The holder may be a short command, which changes the root and gives it back at once. No record on
    disk distinguishes a command from a trainer.
    """
    deadline, waits = clock.monotonic() + wait_s, False
    while True:
        before = read_history(storage)
        refuse_other_layout(storage, layout, before)
        above = newest_segment(storage) or newest_published_epoch(storage, layout)
        try:
            return open_root(storage, identity, above=above, takeover=takeover), before
        except RootBusy as busy:
            host, pid = busy.facts.get("host"), busy.facts.get("pid")
            if is_owned_here(storage, identity) or clock.monotonic() >= deadline:
                raise
            if not waits:
                said = f"{busy.message}: waiting for it, at most {wait_s:g} s"
                say(log.warning, "waits_for_root", said, host=host, pid=pid)
        waits = True
        clock.sleep(_LOOK_S)


def refuse_other_layout(storage: Storage, layout: Layout, history: History) -> None:
    """Refuse another layout: under its names, every checkpoint would seem missing."""
    if history.layout and history.ledger.checkpoints:
        used = [history.layout]
    else:
        names = list_names(storage, "")
        used = [each.name for each in LAYOUTS.values() if any(map(each.is_published, names))]
    other = [name for name in used if name != layout.name]
    if other:
        raise ConfigError(
            f"{storage.root} holds steps in the layout {other[0]!r}, not {layout.name!r}: set layout=",
            file=storage.root,
            key="layout",
        )


def refuse_unfinishable(
    storage: Storage, layout: Layout, ledger: Ledger, finishers: Collection[str]
) -> None:
    """Refuse to open with an attempt that only a process with its driver can complete (I8)."""
    for checkpoint in ledger.in_state(State.SHARDS_WRITTEN):
        for part in checkpoint.parts:
            if part.format.planned and part.kind not in finishers:
                needs = "torch" if part.format.stock else f"the driver of {part.kind!r}"
                how = _by_hand(storage, layout) if part.format.stock else ""
                raise ConfigError(
                    f"step {checkpoint.step} was written, and its part {part.name!r} needs {needs} to "
                    f"be completed: open the root once with CheckpointManager{how}",
                    step=checkpoint.step,
                    part=part.name,
                )


def _by_hand(storage: Storage, layout: Layout) -> str:
    """The command that opens the root with torch, where that is installed."""
    if "not installed" in (installed("torch"), installed("megatron-core")):
        return ""
    code = "import sys, ckptfsm; ckptfsm.CheckpointManager(sys.argv[1], layout=sys.argv[2]).close()"
    return f". Start the job, or run: python -c '{code}' {quote(storage.root)} {layout.name}"
