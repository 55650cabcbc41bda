"""Inspects a root, for recovery and for verification. Reads only, and no more than a bounded size.

A damaged document is a finding, not an error; one of a newer version stops everything (F34).
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from ckptfsm.adapters.notices import say
from ckptfsm.core.documents import MAX_DOCUMENT_BYTES, FileEntry, Manifest, checksum_of, decode
from ckptfsm.core.errors import CkptFsmError, DamagedRoot, NewerSchema, describe
from ckptfsm.core.evidence import (
    Evidence,
    PublishedEvidence,
    StagingEvidence,
    TrackerEvidence,
    is_whole,
    why_not_whole,
)
from ckptfsm.core.formats import is_shard
from ckptfsm.core.keeping import Contents
from ckptfsm.core.layout import (
    FETCHING,
    HF,
    LAYOUTS,
    MANIFEST,
    PINS,
    PRIVATE,
    QUARANTINE,
    READERS,
    STAGING,
    TRACKER,
    TRACKER_BYTES,
    TRASH,
    Layout,
    begun_name,
    join,
    parse_aside,
    parse_attempt,
    parse_fetched,
    parse_pin,
    parse_reader,
    parse_tracker,
    planned_name,
    tracker_text,
)
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import FileStat, Storage
from ckptfsm.disk.durable import (
    is_about_content,
    is_temporary,
    list_names,
    lookup,
    read_document,
    walk_files,
)
from ckptfsm.disk.pickle_stubs import METADATA
from ckptfsm.disk.receipts import CheckedReceipt, Receipts
from ckptfsm.disk.stock import COMMON, inspect_stock
from ckptfsm.disk.stock_files import inspect_unlisted

log = logging.getLogger("ckptfsm")

_OPTIMIZER = "optimizer.pt"  # of transformers' Trainer
_LIGHTNING = ".ckpt"
_FEW = 2


def read_tracker(storage: Storage) -> TrackerEvidence:
    """Read the tracker. A tracker that is not a regular file counts as torn."""
    found = lookup(storage, TRACKER)
    if found is None:
        return TrackerEvidence("missing")
    text = storage.read(TRACKER, TRACKER_BYTES) if found.kind == "file" else b""
    value = parse_tracker(text)
    if value is None:
        return TrackerEvidence("torn")
    if isinstance(value, str):
        return TrackerEvidence("release")
    return TrackerEvidence("step", value, by_us=text == tracker_text(value))


class Commit(NamedTuple):
    """A manifest, and the checksum that its file begins with."""

    manifest: Manifest
    crc: str


def read_manifest(storage: Storage, directory: str) -> Manifest | None:
    """The manifest of a directory; None where there is none. Raises as ``read_commit`` does."""
    found = read_commit(storage, directory)
    return found.manifest if found is not None else None


def read_commit(storage: Storage, directory: str) -> Commit | None:
    """The manifest of a directory and its checksum; None where there is none.

    Raises ``DamagedRoot``, also where a link is on the way to it: that is never followed.
    """
    path = f"{directory}/{MANIFEST}"
    try:
        data = read_document(storage, path, MAX_DOCUMENT_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if isinstance(error, CkptFsmError) or not is_about_content(error):
            raise
        raise DamagedRoot(f"the manifest cannot be reached: {error}", file=path) from error
    return Commit(decode(Manifest, data, path), checksum_of(data))


def pinned_steps(storage: Storage) -> dict[int, str]:
    """The pin of each step that was pinned at an adoption or by a person."""
    names = ((name, parse_pin(name)) for name in list_names(storage, PINS))
    return {step: f"{PINS}/{name}" for name, step in names if step is not None}


def reader_leases(storage: Storage) -> dict[str, int]:
    """The step that each reader lease holds, by the path of the lease."""
    names = ((name, parse_reader(name)) for name in list_names(storage, READERS))
    return {f"{READERS}/{name}": step for name, step in names if step is not None}


def moved_aside(storage: Storage, directory: str) -> dict[AttemptId, list[str]]:
    """The attempts with directories in trash or quarantine, and the paths, by name alone."""
    found: dict[AttemptId, list[str]] = {}
    for name in list_names(storage, directory):
        of = parse_aside(name)
        if of is not None:
            found.setdefault(of, []).append(f"{directory}/{name}")
    return found


Listings = Mapping[str, Mapping[str, FileStat]]
"""What was listed just now, by the directory inside a checkpoint and the name."""
NOT_LISTED: Listings = MappingProxyType({})


def list_beside(storage: Storage, directory: str, files: Iterable[FileEntry]) -> Listings:
    """The listings of the directories inside ``directory`` that hold many of ``files``, or shards.

    One listing takes less time than three looks, each of which opens the directory anew.
    """
    count: dict[str, int] = {}
    for entry in files:
        inner = entry.name.rpartition("/")[0]
        count[inner] = count.get(inner, 0) + 1
    found: dict[str, Mapping[str, FileStat]] = {}
    for inner, many in count.items():
        if many > _FEW or _may_hold_shards(inner):
            try:
                found[inner] = dict(storage.entries(join(directory, inner)))
            except (FileNotFoundError, NotADirectoryError):
                found[inner] = {}
    return found


def check_sizes(
    storage: Storage, directory: str, files: Iterable[FileEntry], seen: Listings = NOT_LISTED
) -> str:
    """The first listed file that is missing, not a regular file, or of another size; "" if none."""
    for entry in files:
        if ".." in entry.name.split("/"):
            return f"{entry.name}: not a name inside the checkpoint"
        inner, _, name = entry.name.rpartition("/")
        # A network file system may list a new name late: one that is missing is looked up.
        found = seen.get(inner, {}).get(name) or lookup(storage, f"{directory}/{entry.name}")
        if found is None:
            return f"{entry.name} is missing"
        if found.kind != "file" or found.size != entry.bytes:
            return f"{entry.name} is a {found.kind} of {found.size} bytes, not {entry.bytes}"
    return ""


def check_digests(storage: Storage, directory: str, files: Iterable[FileEntry]) -> str:
    """The first listed file with another digest; "" if none.

    A warm re-read proves memory, not disk.
    """
    for entry in files:
        if entry.digest is not None and storage.digest(f"{directory}/{entry.name}") != entry.digest:
            return f"{entry.name} has another content than was written"
    return ""


def check_extra_shards(
    storage: Storage, directory: str, files: Sequence[FileEntry], seen: Listings = NOT_LISTED
) -> str:
    """The first shard file that the manifest does not list; "" if none. ``seen``: of ``list_beside``."""
    listed = {entry.name for entry in files}
    directories = {name.rpartition("/")[0] for name in listed}
    for inner in sorted(filter(_may_hold_shards, directories)):
        names = seen[inner] if inner in seen else list_names(storage, join(directory, inner))
        for name in sorted(names):
            relative = f"{inner}/{name}" if inner else name
            if relative not in listed and is_shard(name):
                return f"{relative} is not of this checkpoint"
    return ""


def _may_hold_shards(inner: str) -> bool:
    return PRIVATE not in inner.split("/")


def _raise_unless_damage(error: DamagedRoot | OSError) -> None:
    """Raise ``error`` unless it tells of damage: a sick disk or a newer version does not."""
    if isinstance(error, NewerSchema):
        raise error
    if isinstance(error, OSError) and not is_about_content(error):
        raise error


def inspect_published(
    storage: Storage, layout: Layout, step: int, *, files: bool = True, at: str | None = None
) -> PublishedEvidence:
    """Judge the directory at the published name of ``step``, by names and sizes.

    ``at``: judge this directory as if it had that name. Without ``files``, the files listed in its
    manifest are not checked, only its attempt is read.
    """
    directory = at if at is not None else layout.published_name(step)
    commit, problem = None, ""
    try:
        commit = read_commit(storage, directory)
    except (DamagedRoot, OSError) as error:
        _raise_unless_damage(error)
        problem = str(error)
    if commit is None:
        found = lookup(storage, directory)
        if found is None or found.kind != "dir":
            kind = found.kind if found else "nothing"
            return PublishedEvidence(step, "no_directory", detail=f"{directory} is a {kind}")
        if problem:
            return PublishedEvidence(step, "damaged", detail=f"{directory}: {problem}")
        verdict = inspect_unlisted(storage, layout, directory)
        if verdict.acceptable:
            return PublishedEvidence(step, "stock")
        return PublishedEvidence(step, "unexplained", detail=f"{directory}: {verdict.reason}")
    manifest, crc = commit
    problem = "" if manifest.step == step else f"its manifest is of step {manifest.step}"
    try:
        if files:
            seen = list_beside(storage, directory, manifest.files)
            problem = problem or check_sizes(storage, directory, manifest.files, seen)
            problem = problem or check_extra_shards(storage, directory, manifest.files, seen)
    except OSError as error:  # a link or a file where a directory was
        _raise_unless_damage(error)
        problem = str(error)
    if problem:
        detail = f"{directory}: {problem}"
        return PublishedEvidence(step, "damaged", manifest.of, detail=detail, manifest_crc=crc)
    metrics, seconds = tuple(sorted(manifest.metrics.items())), manifest.run_seconds
    return PublishedEvidence(step, "manifest", manifest.of, seconds, "", metrics, crc)


def why_damaged(storage: Storage, layout: Layout, checkpoint: Checkpoint) -> str:
    """The reason why a tracked checkpoint is not whole at its name, by names and sizes; "" if it is."""
    there = inspect_published(storage, layout, checkpoint.step)
    if is_whole(checkpoint, there):
        return ""
    gone = lookup(storage, layout.published_name(checkpoint.step)) is None
    return why_not_whole(checkpoint, None if gone else there)


def which_comes_back(
    storage: Storage, layout: Layout, checkpoint: Checkpoint, paths: Iterable[str]
) -> str | None:
    """The first of an attempt's paths in the trash that is not known to be torn, or another's.

    If one cannot be read, the move that brings it back will tell.
    """
    for path in paths:
        try:
            there = inspect_published(storage, layout, checkpoint.step, at=path)
        except CkptFsmError:
            raise
        except OSError as error:
            why = describe(error)
            said = f"{path} in the trash could not be read: {why}"
            say(log.warning, "trash_not_read", said, file=path, error=why)
            return path
        if is_whole(checkpoint, there):
            return path
    return None


def is_manifest_of(storage: Storage, layout: Layout, of: AttemptId, path: str) -> bool:
    """True if the directory at ``path`` carries this attempt's manifest."""
    there = inspect_published(storage, layout, of.step, files=False, at=path)
    return there.found == "manifest" and there.of == of


def is_marked(storage: Storage, directory: str, of: AttemptId) -> bool:
    """True if this attempt began in a directory in place, which was not made anew since."""
    return lookup(storage, f"{directory}/{begun_name(of)}") is not None


def is_bare(storage: Storage, directory: str) -> bool:
    """True if a directory holds only files that a stock save leaves before its writers begin."""
    found = lookup(storage, directory)
    if found is None or found.kind != "dir":
        return False
    return all(_comes_first(name) for name, _ in walk_files(storage, directory))


def contents_of(storage: Storage, directory: str, checkpoint: Checkpoint) -> Contents:
    """How far the save of an attempt got in a directory in place, by the names of its files."""
    names = [name for name, _ in walk_files(storage, directory)]
    if all(map(_comes_first, names)):
        return Contents.BARE
    return Contents.CUT_SHORT if _is_cut_short(names, checkpoint) else Contents.MORE


def _comes_first(name: str) -> bool:
    """True for the file that a stock save leaves before its writers begin."""
    return name.rpartition("/")[2] == COMMON


def _is_cut_short(names: Iterable[str], checkpoint: Checkpoint) -> bool:
    """True if this attempt leaves these files before its metadata."""
    return all(
        path.startswith(f"{PRIVATE}/")
        or is_temporary(path)
        or any(part.format.is_early(path, part.name, part.directory) for part in checkpoint.parts)
        for path in names
    )


def dropped_parts(checkpoint: Checkpoint, receipts: Sequence[CheckedReceipt]) -> dict[str, str]:
    """The optional parts that a rank left out, and why. Raises ``DamagedRoot`` for a required one."""
    optional = {spec.name for spec in checkpoint.parts if spec.optional}
    dropped: dict[str, str] = {}
    for receipt in receipts:
        if receipt.dropped and receipt.part not in optional:
            raise DamagedRoot(
                f"part {receipt.part!r} was left out, and it is required: {receipt.dropped}",
                rank=receipt.rank,
                step=checkpoint.step,
            )
        if receipt.dropped:
            dropped.setdefault(receipt.part, f"rank {receipt.rank}: {receipt.dropped}")
    return dropped


def inspect_staging(storage: Storage, layout: Layout, checkpoint: Checkpoint) -> StagingEvidence:
    """Judge whether an attempt could be finalized as it lies in its directory."""
    directory = layout.working_dir(checkpoint.id, checkpoint.in_place)
    if lookup(storage, directory) is None:
        return StagingEvidence(False, "its directory is gone")
    if any(part.format.foreign for part in checkpoint.parts):
        return StagingEvidence(False, "a foreign part's finalizers ended with its process")
    try:
        own = Receipts(storage, directory, checkpoint.id, checkpoint.world_size)
        receipts = [own.read(*share) for share in sorted(checkpoint.expected)]
        dropped = dropped_parts(checkpoint, receipts)
        for receipt in receipts:
            files = receipt.files if receipt.part not in dropped else ()
            problem = check_sizes(storage, directory, files)
            if problem:
                return StagingEvidence(False, problem)
        for spec in checkpoint.parts:
            if spec.name in dropped:
                continue
            if spec.format.planned and not lookup(
                storage, f"{directory}/{planned_name(spec.name)}"
            ):
                return StagingEvidence(False, f"no planned metadata of part {spec.name}")
    except (DamagedRoot, OSError) as error:
        _raise_unless_damage(error)
        return StagingEvidence(False, str(error))
    return StagingEvidence(True)


def newest_published_epoch(storage: Storage, layout: Layout) -> int:
    """The greatest epoch that a manifest under a published name belongs to; 0 if there is none.

    If the journal was lost, its epochs begin above it: no attempt may get the number of another.
    """
    newest = 0
    for name in list_names(storage, ""):
        if layout.parse_published(name) is None:
            continue
        try:
            manifest = read_manifest(storage, name)
        except NewerSchema:
            raise
        except DamagedRoot:
            continue  # damaged, or a link: ``gather_evidence`` reports it
        newest = max(newest, manifest.epoch if manifest is not None else 0)
    return newest


def unnamed_checkpoints(storage: Storage, layout: Layout, names: Iterable[str]) -> Iterator[str]:
    """In words: which of these names of the root could be resumed from; "" is the root itself.

    By names alone, one listing of each. A link is not followed, and a directory that is closed to this
    user tells nothing.
    """
    for name in names:
        try:
            mark = _mark_of_state(storage, name)
        except OSError as error:
            if error.errno != errno.EACCES and not is_about_content(error):
                raise
            continue
        if not mark:
            continue
        other = [each for each in LAYOUTS if LAYOUTS[each].is_published(name)]
        fits = next((each for each in LAYOUTS.values() if each.last == mark), layout)
        way = f"give it that of its step, such as {fits.published_name(100)}"
        if mark.endswith(_LIGHTNING):
            way = "load it once with the code that saved it, or take another root"
        elif not name:
            way = "give the directory above it as the root"
        elif name == "release":
            way = f"write that word into {TRACKER}"
        elif other:
            way = f"open the root with layout={other[0]!r}"
        elif fits is not layout:
            way += f", and open the root with layout={fits.name!r}"
        yield f"{name or 'the root itself'} has a {mark} and no step's name: {way}"


def _half_fetched(storage: Storage) -> Iterator[str]:
    """In words: the checkpoints whose fetch has not ended. A start at zero would pass them over."""
    # A mark is of a whole one, which may have its published name by now.
    for name in [n for n in list_names(storage, FETCHING) if parse_fetched(n) is None]:
        yield f"{FETCHING}/{name} is a checkpoint that ckptfsm fetch has not completed: fetch it again"


def _mark_of_state(storage: Storage, name: str) -> str:
    """The file that tells of a training's state, and not of a model alone; "" if there is none.

    In the root itself, Trainer leaves a ``trainer_state.json`` beside an exported model too, and
    Lightning's files are its drop-in's to look at.
    """
    marks = {METADATA, _OPTIMIZER, *(each.last for each in LAYOUTS.values())}
    if not name:
        marks.discard(HF.last)
    for file in sorted(list_names(storage, name)):
        if file in marks or (name and file.endswith(_LIGHTNING)):
            found = lookup(storage, join(name, file))
            if found is not None and found.kind == "file":
                return file
    return ""


def gather_evidence(storage: Storage, layout: Layout, ledger: Ledger) -> Evidence:
    """Look at everything that recovery decides from, in one pass."""
    published: dict[int, PublishedEvidence] = {}
    strays: list[str] = []
    mounts: list[str] = []
    device = storage.stat("").device
    staged = (State.REQUESTED, State.FORKED, State.FAILED)  # never had its name, if not in place
    known = {c.step for c in ledger.checkpoints.values() if c.in_place or c.state not in staged}
    devices = {name: stat.device for name, stat in storage.entries("")}
    names = sorted(devices)
    for name in names:
        step = layout.parse_published(name)
        if step is None:
            continue
        there = inspect_published(storage, layout, step)
        if there.found == "unexplained" and step not in known and is_bare(storage, name):
            strays.append(name)
            continue
        published[step] = there
        if there.found != "no_directory" and devices[name] != device:
            mounts.append(name)
    staging: dict[AttemptId, StagingEvidence] = {}
    for name in list_names(storage, STAGING):
        of = parse_attempt(name)
        if of is None:
            strays.append(f"{STAGING}/{name}")
        elif of not in ledger.checkpoints:
            staging[of] = StagingEvidence(False, "no journal explains it")
    for checkpoint in ledger.checkpoints.values():
        if checkpoint.state is State.SHARDS_WRITTEN:
            staging[checkpoint.id] = inspect_staging(storage, layout, checkpoint)
    trashed = moved_aside(storage, TRASH)
    leaving = [c for c in ledger.in_state(State.PRUNABLE) if c.id in trashed]
    back = (c.id for c in leaving if which_comes_back(storage, layout, c, trashed[c.id]))
    tracker = read_tracker(storage)
    unnamed: Iterable[str] = ()
    if not published and ledger.latest() is None:
        unnamed = chain(_half_fetched(storage), unnamed_checkpoints(storage, layout, ("", *names)))
    release = tracker.found == "release" and inspect_stock(storage, "release").acceptable
    return Evidence(
        tracker,
        MappingProxyType(published),
        MappingProxyType(staging),
        tuple(strays),
        release,
        layout,
        frozenset(moved_aside(storage, QUARANTINE)),
        frozenset(trashed),
        frozenset(back),
        tuple(mounts),
        tuple(unnamed),
    )
