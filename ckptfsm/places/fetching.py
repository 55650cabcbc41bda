"""Brings a copy back into a root: all files, each compared with its digest, and the manifest last.

The files go to ``.ckptfsm/fetching/<attempt>``. A file that is there with its size and digest counts,
so a fetch that was cut short goes on. The caller gives the directory its published name, and owns the
root meanwhile. Until then a start of a root without a checkpoint is refused: it would begin at zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import xxhash

from ckptfsm.adapters.posix_storage import DIGEST_PREFIX
from ckptfsm.core.documents import Claim, FileEntry, Manifest, RolledBack, decode
from ckptfsm.core.errors import (
    CopyDamaged,
    DamagedRoot,
    NewerSchema,
    NoRoom,
    PlaceFailed,
    StepNotFoundError,
)
from ckptfsm.core.jobs import turn
from ckptfsm.core.layout import (
    CLAIM,
    FETCHING,
    LAYOUTS,
    MANIFEST,
    ROLLED_BACK,
    TRACKER,
    TRACKER_BYTES,
    Layout,
    fetching_dir,
    parse_attempt,
    parse_tracker,
)
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Storage
from ckptfsm.disk.durable import (
    TEMPORARY,
    each_kind,
    is_temporary,
    list_names,
    lookup,
    make_dirs,
    parent_of,
    put,
    write_all,
)
from ckptfsm.disk.trash import remove_fetched, remove_marker, sweep_attempt
from ckptfsm.places.place import CopyPlace

_TAG = "fetch"  # the owner of the root fetches alone
_AT_ONCE = 4  # files
_LOOKS = 8
_TRIES = 3
_REMOVED = "the copy was removed or replaced meanwhile"
Progress = Callable[[int], None]


def _tell_nobody(_: int) -> None:
    """Nothing is shown of the progress."""


@dataclass(frozen=True, slots=True)
class CopyFound:
    """A directory of a step in a place. ``manifest`` is None unless the copy is committed and whole.

    ``data`` are the manifest's bytes, None if there is none. ``problem`` is what is wrong with them,
    ``claim`` the attempt that has the name, if that can be told. ``left_behind``: by a rollback.
    """

    name: str
    step: int
    layout: Layout
    manifest: Manifest | None = None
    data: bytes | None = None
    claim: Claim | None = None
    problem: str = ""
    left_behind: bool = False

    @property
    def is_damaged(self) -> bool:
        """True if there is a manifest, and it cannot be read."""
        return self.data is not None and self.manifest is None


def copies_in(place: CopyPlace) -> list[CopyFound]:
    """The copies in a place, the latest attempt first; then those left behind, and the others.

    Raises ``PlaceFailed``, or ``NewerSchema`` for a manifest of a newer version.
    """
    back = _rolled_back_in(place)
    named = [
        (name, step, layout)
        for name in place.names()
        for layout in LAYOUTS.values()
        if (step := layout.parse_published(name)) is not None
    ]
    with ThreadPoolExecutor(_LOOKS) as looks:
        found = list(looks.map(lambda each: _look(place, *each), named))
    marked = [replace(copy, left_behind=_is_left_behind(copy, back)) for copy in found]
    return sorted(marked, key=_rank, reverse=True)


def _rolled_back_in(place: CopyPlace) -> RolledBack | None:
    """The last rollback of the run of a place, None if there was none. Raises ``DamagedRoot``."""
    data = place.read(ROLLED_BACK)
    return decode(RolledBack, data, f"{place.where}/{ROLLED_BACK}") if data is not None else None


def _is_left_behind(copy: CopyFound, back: RolledBack | None) -> bool:
    named = copy.manifest or copy.claim
    return named is not None and leaves_behind(back, named.of)


def leaves_behind(back: RolledBack | None, of: AttemptId) -> bool:
    return back is not None and turn(back.of) < turn(of) <= back.until


def _rank(copy: CopyFound) -> tuple[bool, bool, tuple[int, int, int], int]:
    of = copy.manifest.of if copy.manifest is not None else None
    return (
        of is not None,
        not copy.left_behind,
        turn(of) if of is not None else (0, 0, 0),
        copy.step,
    )


def _look(place: CopyPlace, name: str, step: int, layout: Layout) -> CopyFound:
    data, claim = place.read(f"{name}/{MANIFEST}"), _claim_of(place, name)
    if data is None:
        return CopyFound(name, step, layout, claim=claim, problem="not committed")
    try:
        manifest = decode(Manifest, data, f"{place.where}/{name}/{MANIFEST}")
    except NewerSchema:
        raise
    except DamagedRoot as error:
        return CopyFound(name, step, layout, None, data, claim, error.message)
    if manifest.step != step:
        said = f"its manifest is of step {manifest.step}"
        return CopyFound(name, step, layout, None, data, claim, said)
    return CopyFound(name, step, layout, manifest, data, claim)


def _claim_of(place: CopyPlace, name: str) -> Claim | None:
    data = place.read(f"{name}/{CLAIM}")
    try:
        return decode(Claim, data, f"{place.where}/{name}/{CLAIM}") if data is not None else None
    except NewerSchema:
        raise
    except DamagedRoot:
        return None


def named_in(place: CopyPlace) -> int | str | None:
    """The content of the tracker of a place, see ``parse_tracker``; None if there is none."""
    tracker = place.read(TRACKER)
    return parse_tracker(tracker[:TRACKER_BYTES]) if tracker is not None else None


def choose(place: CopyPlace, copies: Sequence[CopyFound], step: int | None) -> CopyFound:
    """The latest copy that no rollback left behind, or that of ``step``.

    Raises ``StepNotFoundError``. Raises ``CopyDamaged`` if the manifest of that copy is damaged, also if
    a damaged one may be later than the latest: an older one is never taken without a word.
    """
    whole = [copy for copy in copies if copy.manifest is not None]
    found = [copy for copy in whole if step is None or copy.step == step]
    for copy in copies:
        asked = copy.step == step if step is not None else _may_be_later(copy, found)
        if copy.is_damaged and asked:
            older = older_than(copy, copies)
            how = f"ckptfsm fetch {place.where} ROOT --step {older[-1]}" if older else ""
            way = f"; the next older copy is of step {older[-1]}: {how}" if older else ""
            raise CopyDamaged(
                f"{place.where}/{copy.name}/{MANIFEST}: {copy.problem}{way}",
                place=place.where,
                object=f"{copy.name}/{MANIFEST}",
                step=copy.step,
                older=older,
            )
    if step is None:
        _require_named(place, whole)
    if not found:
        what = f"no copy of step {step}" if step is not None else "no copy"
        raise StepNotFoundError(
            f"{place.where} has {what}", place=place.where, step=step, available=_steps(whole)
        )
    return found[0]


def _require_named(place: CopyPlace, whole: Sequence[CopyFound]) -> None:
    """Raise ``CopyDamaged`` if the place's tracker names a step that has no whole copy."""
    named = named_in(place)
    if not isinstance(named, int) or any(copy.step == named for copy in whole):
        return
    older = _steps(whole)
    way = f": ckptfsm fetch {place.where} ROOT --step {older[-1]}" if older else ""
    raise CopyDamaged(
        f"{place.where}/{TRACKER} names step {named}, which has no whole copy any more; steps with one: "
        f"{list(older)}{way}",
        place=place.where,
        object=TRACKER,
        step=named,
        older=older,
    )


def _may_be_later(damaged: CopyFound, found: Sequence[CopyFound]) -> bool:
    """True unless the claim of a damaged copy is of an earlier attempt than the latest whole one, or of
    one that was left behind."""
    if not found or damaged.claim is None or found[0].manifest is None:
        return True
    return not damaged.left_behind and turn(damaged.claim.of) > turn(found[0].manifest.of)


def _steps(copies: Iterable[CopyFound], below: int | None = None) -> tuple[int, ...]:
    steps = sorted({copy.step for copy in copies if below is None or copy.step < below})
    return tuple(steps[-8:])


def older_than(chosen: CopyFound, copies: Iterable[CopyFound]) -> tuple[int, ...]:
    """The steps of whole copies below the chosen one."""
    return _steps((copy for copy in copies if copy.manifest is not None), chosen.step)


def newest_epoch_in(copies: Iterable[CopyFound]) -> int:
    """The greatest epoch of any attempt in a place. A root that goes on from it begins above."""
    epochs = [copy.manifest.epoch for copy in copies if copy.manifest is not None]
    epochs += [copy.claim.epoch for copy in copies if copy.claim is not None]
    return max(epochs, default=0)


def problems_of(place: CopyPlace, copy: CopyFound, told: Progress = _tell_nobody) -> list[str]:
    """What is wrong with a copy, file by file; empty if every object has the content that was written.

    Every object is read. Raises ``PlaceFailed``.
    """
    if copy.manifest is None:
        return [copy.problem]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        found = threads.map(partial(_problem_of, place, copy.name, told), copy.manifest.files)
        return list(dict.fromkeys(problem for problem in found if problem))


def _problem_of(place: CopyPlace, directory: str, told: Progress, entry: FileEntry) -> str:
    name, digest, total = f"{directory}/{entry.name}", xxhash.xxh3_128(), 0
    wanted = entry.digest if entry.digest is not None else place.digest(name)
    try:
        with closing(place.stream(name)) as pieces:
            for piece in pieces:
                digest.update(piece)
                total += len(piece)
                told(len(piece))
    except FileNotFoundError:
        gone = place.read(f"{directory}/{MANIFEST}") is None
        return _REMOVED if gone else f"{entry.name} is missing"
    if total != entry.bytes:
        return f"{entry.name} has {total} bytes, not {entry.bytes}"
    same = wanted in (None, DIGEST_PREFIX + digest.hexdigest())
    return "" if same else f"{entry.name} has another content than was written"


@dataclass(frozen=True, slots=True)
class Fetch:
    """The fetch of a copy into the root ``storage``, which the caller owns.

    ``older``: the steps of older copies, for errors. ``told`` gets the number of bytes of each piece.
    """

    place: CopyPlace
    storage: Storage
    copy: CopyFound
    older: tuple[int, ...] = ()
    told: Progress = _tell_nobody

    def run(self) -> str:
        """Fetch all files and the manifest. Returns the directory in the root, which is complete then.

        Raises ``CopyDamaged``, ``NoRoom``, ``PlaceFailed``.
        """
        manifest = self.copy.manifest
        assert manifest is not None, "a copy that is committed was chosen"
        stage, names = fetching_dir(manifest.of), [entry.name for entry in manifest.files]
        self._give_up_others(stage)
        make_dirs(self.storage, stage)
        left = {name for name, kind in each_kind(self.storage, stage) if kind == "file"}
        sweep_attempt(self.storage, stage, filter(is_temporary, left.difference(names)))
        self._require_room(stage, manifest.files)
        for directory in sorted({parent_of(name) for name in (MANIFEST, *names)} - {""}):
            make_dirs(self.storage, directory, base=stage)
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            waiting = [threads.submit(self._file, stage, entry) for entry in manifest.files]
            try:
                for each in waiting:
                    each.result()
            finally:
                threads.shutdown(cancel_futures=True)
        # Last: a directory that carries a manifest is complete.
        put(self.storage, f"{stage}/{MANIFEST}", self.copy.data or b"", tag=_TAG)
        return stage

    def _give_up_others(self, stage: str) -> None:
        """Delete what fetches of other copies have left: it takes the room."""
        for name in list_names(self.storage, FETCHING):
            path = f"{FETCHING}/{name}"
            if parse_attempt(name) is not None and path != stage:
                remove_fetched(self.storage, path)

    def _require_room(self, stage: str, files: Sequence[FileEntry]) -> None:
        found = (lookup(self.storage, f"{stage}/{entry.name}") for entry in files)
        needed = sum(entry.bytes for entry in files) - sum(stat.size for stat in found if stat)
        free = self.storage.free_bytes()
        if needed > free:
            raise NoRoom(
                "the disk cannot hold the checkpoint; what was fetched before stays, and counts",
                step=self.copy.step,
                bytes_needed=needed,
                bytes_free=free,
                file=self.storage.root,
            )

    def _file(self, stage: str, entry: FileEntry) -> None:
        """Fetch a file, unless it is there. After a reset, or a flipped bit on the way: once more."""
        path, name = f"{stage}/{entry.name}", f"{self.copy.name}/{entry.name}"
        wanted = entry.digest if entry.digest is not None else self.place.digest(name)
        found = lookup(self.storage, path)
        if found is not None and found.size == entry.bytes and self.storage.digest(path) == wanted:
            self.told(entry.bytes)
            return
        for left in reversed(range(_TRIES)):
            try:
                if self._stream(name, path, entry.bytes, wanted):
                    return
            except FileNotFoundError as error:
                raise self._damaged(name, "is not there") from error
            except PlaceFailed:
                if not left:
                    raise
        raise self._damaged(name, "has another content than was written")

    def _stream(self, name: str, path: str, size: int, wanted: str | None) -> bool:
        """Write an object to a file, durably. False if it has another size or digest."""
        temporary, digest, total = f"{path}{TEMPORARY}{_TAG}", xxhash.xxh3_128(), 0
        remove_marker(self.storage, temporary)
        handle = self.storage.open_exclusive(temporary)
        try:
            with closing(self.place.stream(name)) as pieces:
                for piece in pieces:
                    total += len(piece)
                    if total > size:
                        return False
                    digest.update(piece)
                    write_all(self.storage, handle, piece)
                    self.told(len(piece))
            self.storage.fsync(handle)
        finally:
            self.storage.close(handle)
        if total != size or wanted not in (None, DIGEST_PREFIX + digest.hexdigest()):
            return False
        self.storage.rename(temporary, path)
        return True

    def _damaged(self, name: str, what: str) -> CopyDamaged:
        way = f"; the next older copy is of step {self.older[-1]}" if self.older else ""
        if self.place.read(f"{self.copy.name}/{MANIFEST}") != self.copy.data:
            what, way = f"is not there: {_REMOVED}", "; call again for one that is there now"
        return CopyDamaged(
            f"{self.place.where}/{name} {what}: nothing was published{way}",
            place=self.place.where,
            object=name,
            step=self.copy.step,
            older=self.older,
        )
