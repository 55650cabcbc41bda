"""Which copies of a run stay in a place, and how the others go: ``Copy(keep=N)``.

The N latest stay: the latest that no rollback left behind, and those of earlier attempts with lower
steps. What a rollback left behind does not count, and goes once a later copy is named. Only copies of
this root's epochs count, and only those go: a checkpoint that was adopted from another run may have a
later epoch. In a directory the manifest goes first, then the files, then the claim. So a crash leaves a
copy, or a claim without a manifest.

Such a claim may also be of a copy that has only begun. If it is earlier than the N latest, nobody needs
either: all of it goes. Its carrier, if there is one, finds the N later copies at its next attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ckptfsm.core.documents import encode
from ckptfsm.core.jobs import turn
from ckptfsm.core.layout import CLAIM, MANIFEST
from ckptfsm.core.parts import AttemptId
from ckptfsm.disk.durable import TEMPORARY
from ckptfsm.places.fetching import CopyFound, copies_in, named_in
from ckptfsm.places.place import CopyPlace

_AT_ONCE = 8


def is_surplus(place: CopyPlace, of: AttemptId, keep: int, epoch: int) -> bool:
    """True if the place has ``keep`` copies of later attempts, up to ``epoch``."""
    latest = _latest(copies_in(place), keep, epoch)
    return len(latest) == keep and turn(of) < min(latest)


def remove_surplus(place: CopyPlace, keep: int, epoch: int, in_use: int | None) -> None:
    """Remove all copies, whole or begun, that are earlier than the ``keep`` latest; and what a rollback
    left behind.

    The copy that the tracker names stays, and that of ``in_use``, the step in the root's own tracker. So
    does one whose manifest or claim cannot be decoded, and one in whose directory somebody put other
    objects. Raises ``PlaceFailed``, and ``NewerSchema`` if a newer version wrote there; nothing is
    removed then.
    """
    copies, named = copies_in(place), named_in(place)
    latest = _latest(copies, keep, epoch)
    if len(latest) < keep:
        return
    for copy in copies:
        if copy.data is None and copy.claim is None:
            place.remove_empty(copy.name)  # a removal was cut short after the claim
        elif copy.step not in (named, in_use):
            # Whole, and not counted: of an earlier rollback, too, which the mark does not tell any more.
            aside = copy.manifest is not None and turn(copy.manifest.of) not in latest
            before = max(latest) if aside and named == in_use else min(latest)
            if _is_earlier(copy, before, epoch):
                _remove(place, copy)


def _latest(copies: Iterable[CopyFound], keep: int, epoch: int) -> list[tuple[int, int, int]]:
    """The turns of the latest copies: so many, or fewer if there are no more."""
    there = [c.manifest.of for c in copies if c.manifest is not None and not c.left_behind]
    branch: list[AttemptId] = []
    for of in sorted((of for of in there if of.epoch <= epoch), key=turn, reverse=True):
        if len(branch) < keep and (not branch or of.step < branch[-1].step):
            branch.append(of)
    return [turn(of) for of in branch]


def _is_earlier(copy: CopyFound, oldest: tuple[int, int, int], epoch: int) -> bool:
    """True if all that is known of a directory is earlier than the ``oldest`` that stays."""
    if copy.is_damaged:
        return False
    known = [each.of for each in (copy.manifest, copy.claim) if each is not None]
    return bool(known) and all(turn(of) < oldest and of.epoch <= epoch for of in known)


def _remove(place: CopyPlace, copy: CopyFound) -> None:
    data = [each for each in place.listed(copy.name) if each not in (MANIFEST, CLAIM)]
    if copy.manifest is not None and any(_strangers(copy, data)):
        return
    remove = partial(_remove_object, place, copy)
    remove(MANIFEST)
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        list(threads.map(remove, data))
    remove(CLAIM)
    place.remove_empty(copy.name)


def _strangers(copy: CopyFound, names: Sequence[str]) -> Iterator[str]:
    """The objects in a directory that its copy does not have."""
    assert copy.manifest is not None
    listed = {entry.name for entry in copy.manifest.files}
    return (n for n in names if n not in listed and TEMPORARY not in n.rpartition("/")[2])


def _remove_object(place: CopyPlace, copy: CopyFound, name: str) -> None:
    """Remove an object, unless the directory was claimed anew since it was looked at."""
    seen = encode(copy.claim) if copy.claim is not None else None
    if place.read(f"{copy.name}/{CLAIM}") == seen:
        place.remove(f"{copy.name}/{name}")
