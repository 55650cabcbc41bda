"""Brings a copy from another place back into a root, where the next start adopts it as the root's own.

| # | step | a crash right after it leaves |
|---|---|---|
| 1 | The root gets the mark of its run, and an epoch above all in the place | a root of that run |
| 2 | The files, the manifest last, see ``places.fetching`` | a half fetch: a start at zero is refused |
| 3 | ``.ckptfsm/fetching/<attempt>.whole``: it was fetched | the same |
| 4 | What is left of this checkpoint, damaged, goes to quarantine | a fetch that goes on |
| 5 | The directory gets its published name, the tracker names it | a checkpoint that a start adopts |
| 6 | The start adopts it without a pin, and removes the mark | the mark, which the next start removes |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ckptfsm.adapters.notices import say
from ckptfsm.coordinator.adopting import adopt_directory
from ckptfsm.coordinator.coordinator import Coordinator
from ckptfsm.coordinator.opening import refuse_other_layout
from ckptfsm.core.documents import RunMark, decode
from ckptfsm.core.errors import ConfigError, DamagedRoot, StepExistsError
from ckptfsm.core.layout import (
    FETCHING,
    RUN,
    TRACKER,
    Layout,
    fetched_mark,
    parse_attempt,
    quarantine_dir,
)
from ckptfsm.core.ports import Identity, Storage
from ckptfsm.disk.durable import list_names, lookup, put
from ckptfsm.disk.inspection import read_commit
from ckptfsm.disk.journal import read_history
from ckptfsm.disk.ownership import RootOwnership, open_root
from ckptfsm.disk.setting_aside import move_aside
from ckptfsm.disk.verification import verify_directory
from ckptfsm.places.fetching import (
    CopyFound,
    Fetch,
    Progress,
    choose,
    copies_in,
    newest_epoch_in,
    older_than,
)
from ckptfsm.places.place import CopyPlace, place_at

log = logging.getLogger("ckptfsm")


@dataclass(frozen=True, slots=True)
class BringBack:
    """Brings copies of ``place`` back into the root ``storage``, which nobody owns.

    ``copies``: all in the place, see ``copies_in``. ``told`` gets the bytes of each piece of a file.
    """

    storage: Storage
    identity: Identity
    place: CopyPlace
    copies: Sequence[CopyFound]
    told: Progress

    def run(self, chosen: CopyFound) -> str | None:
        """Fetch a copy and publish it, see the module. None if the root has it already, undamaged.

        Returns where the damaged checkpoint is that had its name, "" if there was none.
        The caller has opened and closed the root before, if it was used. Raises ``StepExistsError`` if
        another checkpoint has the name, and the errors of ``Fetch.run`` and ``adopt_directory``.
        """
        refuse_other_layout(self.storage, chosen.layout, read_history(self.storage))
        if self._has(chosen):
            self.begin()  # the disk may be an older one, see ``carrying``
            return None
        aside = ""
        with self._owned() as ownership:
            fetch = Fetch(
                self.place, self.storage, chosen, older_than(chosen, self.copies), self.told
            )
            source = fetch.run()
            of = parse_attempt(source.rpartition("/")[2])
            assert of is not None, "the name that fetching_dir gives"
            put(self.storage, fetched_mark(of), b"", tag=ownership.tag)
            if lookup(self.storage, chosen.name) is not None:
                ownership.check()
                aside = move_aside(self.storage, chosen.name, quarantine_dir(of))
        adopt_directory(self.storage, self.identity, chosen.layout, source, chosen.step)
        return aside

    def begin(self) -> None:
        """Let the root go on as the run of the place: see step 1."""
        with self._owned():
            pass

    def _has(self, chosen: CopyFound) -> bool:
        """True if the root has this very checkpoint; False if one of its files is damaged, too.

        Raises ``StepExistsError`` for another one.
        """
        name = chosen.name
        if lookup(self.storage, name) is None:
            return False
        found = read_commit(self.storage, name)
        if found is None or found.manifest != chosen.manifest:
            raise StepExistsError(
                f"{name} is taken by another checkpoint", step=chosen.step, file=name
            )
        return verify_directory(self.storage, name, chosen.layout, chosen.step).good

    @contextmanager
    def _owned(self) -> Iterator[RootOwnership]:
        """Own the root, and mark its run. No later attempt has the name of one in the place."""
        above = newest_epoch_in(self.copies)
        ownership = open_root(self.storage, self.identity, above=above)
        try:
            self._mark_run(ownership.tag)
            yield ownership
        finally:
            ownership.release()

    def _mark_run(self, tag: str) -> None:
        """Let the root be of the run that the place belongs to: its copies go on there."""
        data = self.place.read(RUN)
        if data is None:
            return
        decode(RunMark, data, f"{self.place.where}/{RUN}")
        if lookup(self.storage, RUN) is None:
            put(self.storage, RUN, data, tag=tag)
        elif self.storage.read(RUN, len(data) + 1) != data:
            raise ConfigError(
                f"{self.storage.root} belongs to another run than {self.place.where}: fetch into an "
                "empty root, and move the checkpoint with ckptfsm adopt",
                file=RUN,
                place=self.place.where,
            )


def bring_back_if_empty(
    storage: Storage,
    identity: Identity,
    url: str,
    make: Callable[[], Coordinator],
    layout: Layout,
    told: Progress,
) -> str:
    """Bring the latest copy at ``url`` back, if a start of the root would begin at zero.

    Returns a warning: "" if a copy was fetched, or if the root has a checkpoint, or was begun afresh.
    ``make`` gives a new coordinator of the root. Raises ``PlaceFailed`` if the place cannot be reached,
    and as ``BringBack.run``.
    """
    names = list_names(storage, "")
    if any(map(layout.is_published, names)) or not _begins_at_zero(storage, make()):
        return ""
    place = place_at(url)
    said = f"the root has no checkpoint: asks {place.where} for a copy"
    say(log.info, "fetch_begun", said, place=place.where)
    copies = copies_in(place)
    back = BringBack(storage, identity, place, copies, told)
    if place.read(TRACKER) is None and all(copy.data is None for copy in copies):
        back.begin()
        more = f": {len(copies)} are not committed" if copies else ""
        return f"{place.where} has no copy{more}. The job begins at zero"
    chosen = choose(place, copies, None)
    if chosen.layout != layout:
        raise ConfigError(
            f"{place.where}/{chosen.name} is in the layout {chosen.layout.name!r}, not "
            f"{layout.name!r}: set layout=",
            key="layout",
            place=place.where,
        )
    back.run(chosen)
    where = f"{place.where}/{chosen.name}"
    say(log.info, "fetch_ended", f"fetched {where}", place=place.where, step=chosen.step)
    return ""


def _begins_at_zero(storage: Storage, coordinator: Coordinator) -> bool:
    """Start a root and close it. True if it has no checkpoint, and nobody asked for a fresh start."""
    try:
        report = coordinator.open()
    except DamagedRoot as error:
        evidence = error.facts.get("evidence", ("",))
        if all(str(each).startswith(f"{FETCHING}/") for each in evidence):
            return True  # a fetch that was cut short
        raise
    coordinator.close()
    return report.latest_step is None and not read_history(storage).intent.begun_afresh
