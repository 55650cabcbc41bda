"""Decides on a save before anything of it is journaled: its name, old writers, the room on the disk."""

from __future__ import annotations

import logging
from dataclasses import replace

from ckptfsm.adapters.notices import say
from ckptfsm.coordinator.applier import Applier
from ckptfsm.core.admission import Admission, Space, decide_admission, predict_bytes, why_refused
from ckptfsm.core.errors import NoRoom, SaveRefused, StepExistsError
from ckptfsm.core.lifecycle import State
from ckptfsm.core.ports import Storage
from ckptfsm.core.requests import SaveRequest
from ckptfsm.disk.durable import lookup
from ckptfsm.disk.inspection import inspect_published, is_bare, read_tracker

log = logging.getLogger("ckptfsm")
TRASH_SLICE = 256  # entries of the trash that are deleted at a time


def clear_name_and_space(
    applier: Applier, storage: Storage, request: SaveRequest, *, proven: bool
) -> None:
    """Clear the name of a save, and make room for it. Raises ``SaveRefused`` if that cannot be.

    ``proven``: this run wrote the newest tracked checkpoint, or verified its digests.
    """
    failed = [c for c in applier.ledger.in_state(State.FAILED) if c.step == request.step]
    if any(request.in_place or c.in_place for c in failed):  # they write by the published name
        raise SaveRefused(
            f"a failed attempt at step {request.step} may still be written by its old writers",
            step=request.step,
        )
    if request.in_place:
        _refuse_in_place(applier, storage, request)
    else:
        _clear_the_name(applier, storage, request)
    _make_room(applier, storage, request, proven)


def _clear_the_name(applier: Applier, storage: Storage, request: SaveRequest) -> None:
    """Refuse a name with a complete checkpoint; move a partial directory to quarantine."""
    name = applier.layout.published_name(request.step)
    if lookup(storage, name) is None:
        return
    there = inspect_published(storage, applier.layout, request.step)
    if there.found in ("manifest", "stock"):
        raise StepExistsError(
            f"{name} holds a complete checkpoint that is not in use; move it away or adopt it",
            step=request.step,
            latest=applier.ledger.latest_step(),
        )
    aside = applier.mover.set_aside(name, f"{name}.{applier.mover.tag}")
    said = f"step {request.step}: {name} is not complete, and was moved to {aside}"
    say(log.warning, "partial_directory_quarantined", said, file=name, to=aside)


def _refuse_in_place(applier: Applier, storage: Storage, request: SaveRequest) -> None:
    """Refuse a save in place at the tracker's step, or over files of value."""
    name, latest = applier.layout.published_name(request.step), applier.ledger.latest_step()
    # The tracker may name a withdrawn step: the disk did not let it be moved.
    if read_tracker(storage).step == request.step:
        raise StepExistsError(
            f"the tracker still names {name}: nothing unfinished may stand there",
            step=request.step,
            latest=latest,
        )
    if lookup(storage, name) is None:
        return
    there = inspect_published(storage, applier.layout, request.step)
    if there.found != "unexplained" or not is_bare(storage, name):
        raise StepExistsError(
            f"{name} holds files of an earlier save; move it away first",
            step=request.step,
            latest=latest,
        )


def _make_room(applier: Applier, storage: Storage, request: SaveRequest, proven: bool) -> None:
    """Refuse a save that the disk cannot hold; first delete discarded files."""
    names = [part.name for part in request.parts]
    tracked = applier.ledger.in_state(State.TRACKED)
    newest = applier.ledger.checkpoints.newest_first()
    same = (c.shard_bytes for c in newest if [part.name for part in c.parts] == names)
    needed = predict_bytes(request.expected_bytes, same)
    space = Space(needed, _free_bytes(applier, storage, needed), 0, proven)
    if space.free < needed:  # retention is asked only if need be
        gone = {offer.of for offer in applier.to_prune()}
        held = {offer.of for offer in applier.held_alone()}
        space = replace(
            space,
            to_prune=sum(c.shard_bytes for c in tracked if c.id in gone),
            held=sum(c.shard_bytes for c in tracked if c.id in held),
        )
    answer = decide_admission(space)
    if answer is Admission.PRUNE_FIRST:
        said = f"step {request.step}: {space.free} bytes are free, not {space.needed}: pruned first"
        say(log.warning, "pruned_for_room", said, step=request.step)
        applier.try_retention()
        space = replace(space, free=_free_bytes(applier, storage, needed), to_prune=0)
        answer = decide_admission(space)
    if answer is Admission.REFUSE:
        raise NoRoom(
            why_refused(space),
            step=request.step,
            bytes_needed=space.needed,
            bytes_free=space.free,
            bytes_held=space.held,
            file=storage.root,
        )


def _free_bytes(applier: Applier, storage: Storage, needed: int) -> int:
    """The free bytes; if they are too few, the trash is emptied as far as needed."""
    free = storage.free_bytes()
    while free < needed and applier.give_space_back(TRASH_SLICE):
        free = storage.free_bytes()
    return free
