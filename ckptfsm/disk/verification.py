"""Verifies a checkpoint on disk: names, sizes, digests, and the metadata that stock loads. Reads only.

A checkpoint that another program wrote has no digests: only its form can be judged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from ckptfsm.core.documents import FileEntry, Manifest
from ckptfsm.core.errors import DamagedRoot, NewerSchema, describe
from ckptfsm.core.evidence import ANOTHER_MANIFEST, is_published_as
from ckptfsm.core.layout import MANIFEST, Layout, join
from ckptfsm.core.lifecycle import Checkpoint
from ckptfsm.core.ports import Storage
from ckptfsm.disk.durable import each_kind, is_about_content, lookup
from ckptfsm.disk.inspection import check_extra_shards, check_sizes, read_commit
from ckptfsm.disk.pieces import Piece, ToRead, first_bad_file
from ckptfsm.disk.stock import inspect_stock
from ckptfsm.disk.stock_files import inspect_unlisted


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result for one step. ``problems`` is empty if nothing was found wrong.

    ``files`` is the number of its files, ``bytes_read`` the size of those whose content was compared.
    ``gone``: the directory left its name meanwhile, as a prune does. ``strangers`` are files in the
    directory that the checkpoint does not have; no loader reads them. ``step`` is None for a copy
    that does not tell it.
    """

    step: int | None
    problems: tuple[str, ...]
    files: int = 0
    bytes_read: int = 0
    gone: bool = False
    digests: bool = True
    strangers: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        return not self.problems


Choose = Callable[[Sequence[FileEntry]], Collection[FileEntry]]


def everything(files: Sequence[FileEntry]) -> Collection[FileEntry]:
    return files


def _tell_nobody(piece: Piece) -> None:
    """Nothing is shown of the progress."""


def verify_step(
    storage: Storage,
    layout: Layout,
    expected: Checkpoint | int,
    choose: Choose = everything,
    progress: Callable[[Piece], None] = _tell_nobody,
) -> Verdict:
    """Verify the checkpoint at its published name. See ``verify_directory``."""
    name = layout.published_name(expected.step if isinstance(expected, Checkpoint) else expected)
    return verify_directory(storage, name, layout, expected, choose, progress)


def verify_directory(
    storage: Storage,
    name: str,
    layout: Layout,
    expected: Checkpoint | int | None,
    choose: Choose = everything,
    progress: Callable[[Piece], None] = _tell_nobody,
) -> Verdict:
    """Verify the checkpoint in the directory ``name``, also a copy that no journal tells of.

    ``expected`` is the checkpoint of the journal, or its step, or None if any will do. ``choose`` picks
    the files whose content is compared; ``progress`` is told of each piece read. Raises
    ``NewerSchema``, and the ``OSError`` of a sick disk.
    """
    step = expected.step if isinstance(expected, Checkpoint) else expected
    try:
        return _verify(storage, name, layout, expected, choose, progress)
    except NewerSchema:
        raise
    except (DamagedRoot, OSError) as error:
        if lookup(storage, name) is None:
            return Verdict(step, (f"{name} is not there",), gone=True)
        if isinstance(error, OSError) and not is_about_content(error):
            raise
        return Verdict(step, (f"{name}: {describe(error)}",))


def _verify(
    storage: Storage,
    name: str,
    layout: Layout,
    expected: Checkpoint | int | None,
    choose: Choose,
    progress: Callable[[Piece], None],
) -> Verdict:
    step = expected.step if isinstance(expected, Checkpoint) else expected
    commit = read_commit(storage, name)
    if commit is None:
        stock = inspect_unlisted(storage, layout, name)
        refused = () if stock.acceptable else (f"{name}: {stock.reason}",)
        gone = lookup(storage, name) is None
        return Verdict(step, refused, len(stock.files), gone=gone, digests=False)
    manifest = commit.manifest
    step = manifest.step if step is None else step
    own = not isinstance(expected, Checkpoint) or is_published_as(expected, manifest.of, commit.crc)
    found = [
        "" if own else ANOTHER_MANIFEST,
        "" if manifest.step == step else f"its manifest is of step {manifest.step}",
        check_sizes(storage, name, manifest.files),
        check_extra_shards(storage, name, manifest.files),
        *_metadata(storage, name, manifest),
    ]
    problems = [f"{name}: {problem}" for problem in found if problem]
    if problems:
        gone = lookup(storage, name) is None
        return Verdict(step, tuple(problems), len(manifest.files), gone=gone)
    chosen = [file for file in choose(manifest.files) if file.digest is not None]
    bad = _bad_files(storage, name, chosen, progress)
    problems = [f"{name}/{file.name} has another content than was written" for file in bad]
    strangers = strangers_in(storage, name, manifest)
    gone = lookup(storage, name) is None
    read = sum(file.bytes for file in chosen)
    return Verdict(step, tuple(problems), len(manifest.files), read, gone, strangers=strangers)


def strangers_in(storage: Storage, name: str, manifest: Manifest) -> tuple[str, ...]:
    """The files in the directory ``name`` that its manifest does not list."""
    listed = {MANIFEST, *(file.name for file in manifest.files)}
    return tuple(sorted(each for each, _ in each_kind(storage, name) if each not in listed))


def _metadata(storage: Storage, name: str, manifest: Manifest) -> Iterator[str]:
    """The reasons why a stock loader would refuse a part that it reads, without unpickling freely."""
    for part in manifest.parts:
        kind = part.spec().format
        if kind.stock:
            verdict = inspect_stock(storage, join(name, part.directory), known=kind)
            if not verdict.acceptable:
                yield f"a stock loader would refuse part {part.name!r}: {verdict.reason}"


def _bad_files(
    storage: Storage, name: str, files: Sequence[FileEntry], progress: Callable[[Piece], None]
) -> list[FileEntry]:
    """The files with another content than their digest says."""
    left = list(files)
    bad: list[FileEntry] = []
    while True:
        wanted = [ToRead(f"{name}/{f.name}", f.bytes, f.digest or "") for f in left]
        index = first_bad_file(storage, wanted, progress, _never)
        if index is None:
            return bad
        bad.append(left[index])
        left = left[index + 1 :]


def _never() -> bool:
    return False
