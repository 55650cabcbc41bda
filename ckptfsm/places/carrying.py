"""The protocol of a copy: from a published directory of a root into a place.

| # | step | a crash right after it leaves |
|---|---|---|
| 1 | The place is probed: an object is created twice, and the second must not win | a probe |
| 2 | ``.ckptfsm/run.json``, create only: the place belongs to this run | a place of this run |
| 3 | ``<step>/.ckptfsm/claim.json``, create only: attempt and content | a claim: this attempt goes on |
| 4 | Look what is there: an object counts if its size and digest are right | the same |
| 5 | All other files, two at a time; each digest is compared before its object appears | whole objects |
| 6 | Look again, then the manifest, create only: this is the commit | a copy |
| 7 | The tracker, compare and swap: later attempts only, but after a rollback | the next copy moves it |
| 8 | With ``keep``, earlier copies go: manifest, files, claim | a claim, which the next copy removes |

So a copy without a manifest is none, and any machine may complete it. No local record is needed: where
the manifest is there with the same bytes, and every file, the copy is done. A file that someone has
removed since is sent again.

A claim without a manifest, of an earlier attempt of the same run, is taken over: its machine is gone,
and the job has saved the step again. A process of that attempt may still live. It looks at the claim
before the last piece of each file, without which nothing appears, so it stops.

A copy of an earlier attempt, as after a rollback, stays, unless ``replaces`` is set. Then the manifest
goes once the claim is the later attempt's: a crash from there on leaves a copy that is not committed.

The tracker goes to a later attempt only; or back, from a step that this root has saved and left behind
in a rollback. ``.ckptfsm/rolled-back.json`` tells first which attempts were left behind: the latest of
the others is what a fetch takes. So no copy is lost that was committed, and not named yet.

The claim comes first and goes last. So objects without one are a stranger's, and their directory is
refused. A claim without a manifest may be a copy that has begun, or one that is half removed. Only what
is earlier than all that ``keep`` leaves is removed, and that is not sent any more: see ``removing``.
"""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

import xxhash

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.posix_storage import DIGEST_PREFIX
from ckptfsm.core.documents import (
    Claim,
    FileEntry,
    Manifest,
    RolledBack,
    RunMark,
    decode,
    encode,
)
from ckptfsm.core.errors import ConfigError, DamagedRoot, NewerSchema, PlaceFailed, PlaceInUse
from ckptfsm.core.jobs import turn
from ckptfsm.core.layout import (
    CLAIM,
    MANIFEST,
    PRIVATE,
    ROLLED_BACK,
    RUN,
    TRACKER,
    TRACKER_BYTES,
    parse_tracker,
    tracker_text,
)
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Clock, Storage
from ckptfsm.disk.durable import TEMPORARY, is_temporary, list_names, lookup
from ckptfsm.disk.inspection import read_manifest, read_tracker
from ckptfsm.disk.journal import saved_since
from ckptfsm.disk.overview import layout_of_names
from ckptfsm.disk.ownership import newest_epoch
from ckptfsm.disk.pieces import Pieces, ToRead
from ckptfsm.places.directory import create_once
from ckptfsm.places.fetching import copies_in, leaves_behind
from ckptfsm.places.place import CopyPlace
from ckptfsm.places.removing import is_surplus, remove_surplus
from ckptfsm.places.source import CopySource, source_of

PROBE = f"{PRIVATE}/probe"
_AT_ONCE = 2  # files
_LOOKS = 8  # at once
_TRIES = 5
_RUN_BYTES = 1 << 12
_LARGE_BYTES = 4 << 20  # more than a piece


@dataclass(frozen=True, slots=True)
class Carried:
    """The result of a copy: the number of its files, and the files and bytes that were sent now."""

    files: int
    sent: int
    sent_bytes: int


class Throttle:
    """Lets so many MB pass each second, over all threads; None: any number."""

    def __init__(self, mb_s: float | None = None, clock: Clock | None = None) -> None:
        self._rate = mb_s * 1e6 if mb_s is not None else 0.0
        self._clock = clock if clock is not None else SystemClock()
        self._turn = threading.Lock()
        self._free_at = self._clock.monotonic()

    def take(self, size: int) -> None:
        """Wait until ``size`` bytes may pass."""
        if not self._rate:
            return
        with self._turn:
            now = self._clock.monotonic()
            self._free_at = max(self._free_at, now) + size / self._rate
            pause = self._free_at - now
        self._clock.sleep(pause)


def run_of(storage: Storage) -> bytes:
    """The mark of the run that a root belongs to; made if there is none. Raises ``DamagedRoot``."""
    if lookup(storage, RUN) is None:
        create_once(storage, RUN, encode(RunMark(run=uuid.uuid4().hex)))
    data = storage.read(RUN, _RUN_BYTES)
    decode(RunMark, data, RUN)
    return data


@dataclass(frozen=True, slots=True)
class Carrier:
    """Copies published directories of the root ``storage`` into ``place``, see the module.

    ``run``: the root's mark, see ``run_of``. ``sole_writer``: the user promises that no other process
    writes there, so a server may be used that ignores conditions. ``replaces``: a later attempt of
    the same run takes the place of a copy. ``keep``: so many copies stay, None for all. ``returns``:
    copies of this root are there already, so a place without its mark is another one.
    """

    place: CopyPlace
    storage: Storage
    run: bytes
    throttle: Throttle = field(default_factory=Throttle)
    sole_writer: bool = False
    replaces: bool = False
    keep: int | None = None
    returns: bool = False

    def carry(self, name: str) -> Carried:
        """Copy the directory ``name`` of the root.

        Raises ``ConfigError`` for a server that cannot be used, ``PlaceInUse`` if another run or attempt
        has the name. ``DamagedRoot`` if a file is not what the manifest says, ``PlaceFailed``, and as
        ``source_of`` does.
        """
        source = source_of(self.storage, name)
        todo: Sequence[FileEntry] = ()
        committed = self.place.read(f"{name}/{MANIFEST}") == source.data
        if not committed or self._missing(name, source.files):
            self._require_that_it_is_there()
            if not self.sole_writer:
                probe(self.place)
            self._require_own(self._created(RUN, self.run))
            if self._is_surplus(source.of):
                self._remove_surplus()
                return Carried(len(source.files), 0, 0)
            todo = self._copy(source)
        self._move_tracker(source.of)
        self._remove_surplus()
        return Carried(len(source.files), len(todo), sum(entry.bytes for entry in todo))

    def _copy(self, source: CopySource) -> Sequence[FileEntry]:
        """Send what is missing, and commit the copy. Returns the files that were sent."""
        name, of, data, files = source.name, source.of, source.data, source.files
        content = hashlib.sha256(data).hexdigest()
        claim = Claim(step=of.step, epoch=of.epoch, attempt=of.attempt, content=content)
        self._claim_name(name, claim)
        if self.replaces and self.place.read(f"{name}/{MANIFEST}") not in (None, data):
            self.place.remove(f"{name}/{MANIFEST}")
        todo = self._missing(name, files)
        self._send(name, todo, encode(claim))
        if lost := self._missing(name, files):
            raise PlaceFailed(
                f"{lost[0].name} is not there after it was sent, or is another's",
                place=self.place.where,
                object=f"{name}/{lost[0].name}",
            )
        source.require_unchanged(self.storage)
        self._sweep(name, files)
        self._require_claim(name, encode(claim))
        there = self._created(f"{name}/{MANIFEST}", data)
        if there != data:
            raise self._taken(name, of, decode(Manifest, there, MANIFEST).of)
        return todo

    # -- how many there are

    def _is_surplus(self, of: AttemptId) -> bool:
        """True if nobody needs this copy. That of the step in use is needed, whatever its attempt."""
        if self.keep is None or read_tracker(self.storage).step == of.step:
            return False
        return is_surplus(self.place, of, self.keep, newest_epoch(self.storage))

    def _remove_surplus(self) -> None:
        if self.keep is not None:
            self._require_own(self.place.read(RUN))
            in_use = read_tracker(self.storage).step
            remove_surplus(self.place, self.keep, newest_epoch(self.storage), in_use)

    # -- what is there

    def _missing(self, name: str, files: Sequence[FileEntry]) -> list[FileEntry]:
        """The files that are not in the place, or have another size or digest there."""
        sizes = self.place.listed(name)
        same = [entry for entry in files if sizes.get(entry.name) == entry.bytes]
        paths = [f"{name}/{entry.name}" for entry in same]
        with ThreadPoolExecutor(_LOOKS) as looks:
            found = looks.map(self.place.digest, paths)
            good = {e.name for e, digest in zip(same, found, strict=True) if digest == e.digest}
        return [entry for entry in files if entry.name not in good]

    def _sweep(self, name: str, files: Sequence[FileEntry]) -> None:
        """Remove what killed carriers have left half-written in a directory."""
        for each in self.place.listed(name).keys() - {entry.name for entry in files}:
            if is_temporary(each):
                self.place.remove(f"{name}/{each}")

    # -- whose it is

    def _created(self, name: str, data: bytes) -> bytes:
        """Create an object unless it exists. Returns what is there then.

        A server that ignores conditions would write over what another run, or another attempt, has put
        there: ``sole_writer`` promises that nobody does so meanwhile, not that nobody ever did.
        """
        there = self.place.read(name) if self.sole_writer else None
        return self.place.create(name, data) if there is None else there

    def _require_that_it_is_there(self) -> None:
        """Raise ``PlaceFailed`` for an empty place that had copies: the one below a mount point, say."""
        if self.returns and self.place.read(RUN) is None:
            where, root = self.place.where, self.storage.root
            raise PlaceFailed(
                f"{where} has no {RUN}, and copies of {root} were made there: is it mounted? If it was "
                f"emptied, put {root}/{RUN} there",
                place=where,
                object=RUN,
            )

    def _require_own(self, there: bytes | None) -> None:
        """Raise ``PlaceInUse`` unless the place is marked as this run's."""
        if there != self.run:
            where, root = self.place.where, self.storage.root
            raise PlaceInUse(
                f"{where} has the copies of another run: choose another prefix. If it is this run's, "
                f"and {root}/{RUN} was lost, put {where}/{RUN} there",
                place=where,
                object=RUN,
            )

    def _claim_name(self, name: str, own: Claim) -> None:
        path, data = f"{name}/{CLAIM}", encode(own)
        self._refuse_strangers(name)
        for _ in range(_TRIES):
            there = self._created(path, data)
            if there == data:
                return
            theirs = decode(Claim, there, path)
            committed = self.place.read(f"{name}/{MANIFEST}") is not None
            if (committed and not self.replaces) or turn(theirs.of) >= turn(own.of):
                raise self._taken(name, own.of, theirs.of)
            if self.place.replace(path, data, there):
                return
        raise PlaceFailed("the claim changes all the time", place=self.place.where, object=path)

    def _refuse_strangers(self, name: str) -> None:
        """Raise ``PlaceInUse`` for a directory that has objects and was never claimed.

        HDFS has no claim for a moment while it is replaced, but the temporary object of the new one.
        """
        if self.place.read(f"{name}/{CLAIM}") is not None:
            return
        listed = self.place.listed(name)
        if any(each.startswith(f"{CLAIM}{TEMPORARY}") for each in listed):
            return
        found = [each for each in sorted(listed) if not is_temporary(each)]
        if found and self.place.read(f"{name}/{CLAIM}") is None:  # else claimed and sent meanwhile
            where = f"{self.place.where}/{name}"
            raise PlaceInUse(
                f"{where} has {found[0]} and was never claimed: another tool or a person put it there. "
                f"Move {where} away, or remove it",
                place=self.place.where,
                object=f"{name}/{found[0]}",
            )

    def _taken(self, name: str, own: AttemptId, theirs: AttemptId) -> PlaceInUse:
        where = f"{self.place.where}/{name}"
        said = (
            f"is of attempt {theirs}, and this one is {own}: after a rollback, say, or of a job on "
            f"another machine. If that copy is not needed any more, remove {where}, or set replaces=True"
        )
        if theirs == own:
            said = f"has another content of the same attempt {own}: remove {where}, if this one is right"
        return PlaceInUse(
            f"{where} {said}",
            place=self.place.where,
            object=name,
            step=own.step,
        )

    # -- data

    def _send(self, name: str, files: Sequence[FileEntry], claim: bytes) -> None:
        """Send files, two at a time, small ones first. After an error no other file is begun."""
        in_order = iter(sorted(files, key=lambda entry: entry.bytes))
        turns = threading.Lock()
        failed: list[BaseException] = []

        def work() -> None:
            while not failed:
                with turns:
                    entry = next(in_order, None)
                if entry is None:
                    return
                try:
                    self._send_one(name, entry, claim)
                except BaseException as error:  # raised below, in the caller's thread
                    failed.append(error)

        with ThreadPoolExecutor(_AT_ONCE) as senders:
            for each in [senders.submit(work) for _ in range(_AT_ONCE)]:
                each.result()
        if failed:
            raise failed[0]

    def _send_one(self, name: str, entry: FileEntry, claim: bytes) -> None:
        """Send a file. Its object appears only if the claim is still this attempt's by then."""
        if entry.bytes > _LARGE_BYTES:  # else nothing is given before the last piece
            self._require_claim(name, claim)
        path, digest = f"{name}/{entry.name}", entry.digest or ""
        confirm = partial(self._require_claim, name, claim)
        with closing(compared(self.storage, path, entry, self.throttle.take, confirm)) as pieces:
            self.place.put(path, pieces, entry.bytes, digest)

    def _require_claim(self, name: str, claim: bytes) -> None:
        there = self.place.read(f"{name}/{CLAIM}")
        if there != claim:
            theirs = "removed" if there is None else f"of {decode(Claim, there, CLAIM).of}"
            raise PlaceInUse(
                f"the claim of {self.place.where}/{name} is {theirs} by now: this copy ends",
                place=self.place.where,
                object=f"{name}/{CLAIM}",
            )

    # -- the tracker

    def _move_tracker(self, of: AttemptId) -> None:
        """Let the tracker of the place name this copy, unless it names a later one that is in use.

        The root is asked after the place, which must be the same when it is changed. So a process that
        was frozen in between changes nothing.
        """
        text = tracker_text(of.step)
        for _ in range(_TRIES):
            found, mark = self.place.read(TRACKER), self.place.read(ROLLED_BACK)
            theirs = self._named_by(found) if found != text else None
            back = theirs is not None and self._went_back(of, theirs)
            if not self._mark_rollback(of, mark, back):
                continue
            if found == text or not (back or theirs is None or self._is_later(of, theirs)):
                return
            if self._swap(TRACKER, text, found):
                return
        raise PlaceFailed(
            "the tracker changes all the time", place=self.place.where, object=TRACKER
        )

    def _swap(self, name: str, data: bytes, expected: bytes | None) -> bool:
        """Make or replace a small object that was ``expected``. False if it is another by now."""
        if expected is None:
            return self.place.create(name, data) == data
        return self.place.replace(name, data, expected)

    def _named_by(self, tracker: bytes | None) -> AttemptId | None:
        """The attempt that the tracker names; None if it names nothing, or no copy that can be read."""
        step = parse_tracker(tracker[:TRACKER_BYTES]) if tracker is not None else None
        if not isinstance(step, int):
            return None
        name = layout_of_names(self.place.names()).published_name(step)
        path = f"{name}/{MANIFEST}"
        data = self.place.read(path)
        try:
            theirs = decode(Manifest, data, path).of if data is not None else None
            later = theirs is not None and self._is_of_a_later_life(theirs)
        except NewerSchema:
            raise
        except DamagedRoot:  # for ``verify`` to tell: later copies do not wait for a person
            return None
        if theirs is not None and later:
            raise self._of_an_older_disk(theirs)
        return theirs

    def _went_back(self, of: AttemptId, theirs: AttemptId) -> bool:
        """True if this root saved their attempt, and went back to this step or a later one."""
        in_use = read_tracker(self.storage).step
        if in_use is None or not of.step <= in_use < theirs.step:
            return False
        return theirs in saved_since(self.storage, theirs.epoch)

    def _is_later(self, of: AttemptId, theirs: AttemptId) -> bool:
        """True if this copy is later than theirs: as the root knows, or else by its attempt."""
        in_use = read_tracker(self.storage).step
        if in_use is not None and of.step <= in_use and self._is_here(theirs):
            return theirs.step < of.step  # one of the two may be another run's, that was adopted
        return turn(theirs) < turn(of)

    def _mark_rollback(self, of: AttemptId, mark: bytes | None, back: bool) -> bool:
        """Mark what a rollback left behind. False if the ``mark`` is another by now.

        What is carried is in the root. If it was left behind, then it came back from quarantine.
        """
        marked = decode(RolledBack, mark, ROLLED_BACK) if mark is not None else None
        if back:
            epoch = newest_epoch(self.storage)
            there = [c.manifest.of for c in copies_in(self.place) if c.manifest is not None]
            until = max(turn(each) for each in there if each.epoch <= epoch)
        elif marked is not None and leaves_behind(marked, of):
            until = marked.until
        else:
            return True
        now = RolledBack(step=of.step, epoch=of.epoch, attempt=of.attempt, until=until)
        return self._swap(ROLLED_BACK, encode(now), mark)

    def _is_of_a_later_life(self, theirs: AttemptId) -> bool:
        """True if no owner of this root can have made an attempt, and no person put it here."""
        return theirs.epoch > newest_epoch(self.storage) and not self._is_here(theirs)

    def _is_here(self, theirs: AttemptId) -> bool:
        """True if the root has the checkpoint of an attempt."""
        layout = layout_of_names(list_names(self.storage, ""))
        here = read_manifest(self.storage, layout.published_name(theirs.step))
        return here is not None and here.of == theirs

    def _of_an_older_disk(self, theirs: AttemptId) -> PlaceInUse:
        where, root = self.place.where, self.storage.root
        return PlaceInUse(
            f"{where} has a copy of this run, of attempt {theirs}, which is later than all of {root}. "
            "This disk is an older one, or another machine goes on with the run: end the job that "
            f"should not. ckptfsm fetch {where} {root} lets this root go on above that attempt",
            place=where,
            object=TRACKER,
            step=theirs.step,
        )


def probe(place: CopyPlace) -> None:
    """Raise ``ConfigError`` unless the place refuses to create an object that exists."""
    for _ in range(2):
        mine = uuid.uuid4().hex.encode()
        if place.create(PROBE, mine) != mine:
            return
    raise ConfigError(
        f"{place.where}: the server ignores If-None-Match, so two jobs could overwrite each other's "
        "copies without a word. Use another server; or set sole_writer=True, if only one job ever "
        "writes to this prefix",
        key="copies",
        url=place.where,
    )


def compared(
    storage: Storage,
    path: str,
    entry: FileEntry,
    take: Callable[[int], None],
    confirm: Callable[[], None],
) -> Generator[bytes, None, None]:
    """The pieces of a file. Raises ``DamagedRoot`` before the last one, unless size and digest agree.

    ``take`` is told the size of each piece before it is given away. ``confirm`` is called before the
    last one: without that piece no object appears.
    """
    digest, size, last = xxhash.xxh3_128(), 0, b""
    with closing(Pieces(storage, [ToRead(path, entry.bytes, entry.digest or "")])) as pieces:
        for piece in pieces.in_order():
            if last:
                yield last
            digest.update(piece.view)
            size += len(piece.view)
            take(len(piece.view))
            last = bytes(piece.view)
    if size != entry.bytes or DIGEST_PREFIX + digest.hexdigest() != entry.digest:
        raise DamagedRoot(
            "a file has another content than was written; it is not copied", file=path
        )
    confirm()
    yield last
