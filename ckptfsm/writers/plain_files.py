"""Parts that are plain files: bytes in memory, or files written by a call. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import xxhash

from ckptfsm.adapters.versions import installed
from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import ConfigError, SaveFailed, SaveRefused, describe
from ckptfsm.core.formats import FILE, TREE
from ckptfsm.core.layout import PRIVATE, join
from ckptfsm.core.parts import OptionalPart, PartSpec, Planned, content_of
from ckptfsm.core.ports import FileStat, Finalizer, PartFinisher, PartJob, Storage, Survey, Written
from ckptfsm.disk.durable import fsync_existing, make_dir, walk_files
from ckptfsm.disk.trash import remove_empty
from ckptfsm.disk.visibility import Visibility
from ckptfsm.writers.rank_writer import FilePart


class PlainFile:
    """Base of the values, beside bytes, that a driver saves as one file of the part's name."""

    __slots__ = ()


def is_file(value: Any) -> bool:
    """True for the value of a part that is one file."""
    return isinstance(value, (bytes, bytearray, PlainFile))


@dataclass(frozen=True, slots=True)
class FileTree:
    """A part that is a directory of files, written by ``make(directory)``.

    ``make`` is called on the training thread, with the absolute path of an existing directory. The
    directory holds at most files that ``make`` of parts inside it wrote. The writer lists the files
    and makes them durable. Symbolic links are refused; a hard link must not be written through again.

    ``every_rank`` says which of the ranks that give the part call ``make``:

    - False: the first. ``make`` may then hold no collective.
    - True: each, which gets an empty directory. Its files and directories are moved to the part's when
      ``make`` returns. If two ranks wrote one name, the save fails. Collectives are allowed, if every
      rank of the job gives the part.
    - None: as False, but if several ranks give the part, a ``RanksDisagreeWarning`` says that the
      files of the others are not kept (see the setting ``ranks_disagree``).

    ``directory`` is relative to the step's directory, by default the part's name. "" is the step's
    directory itself, without the directories of other parts.
    """

    make: Callable[[str], None]
    every_rank: bool | None = None
    directory: str | None = None


@dataclass(frozen=True, slots=True)
class TreePart(PartJob):
    """Files that exist already: the writer fsyncs and digests them.

    ``skip`` are inner directories and files that belong to other parts. Where each rank has files in the
    directory, ``names`` are this rank's. ``emptied`` is the directory that they were made in.
    """

    name: str
    directory: str
    skip: tuple[str, ...] = ()
    names: tuple[str, ...] | None = None
    emptied: str = ""
    portable, files = True, ()  # the trainer made them

    def write(self, storage: Storage, location: str) -> Written:
        files = []
        for name, stat in self._found(storage, location):
            path = join(location, self.directory, name)
            if stat.kind != "file":
                raise SaveFailed(f"{name} of part {self.name!r} is a {stat.kind}", file=path)
            fsync_existing(storage, path)
            digest = storage.digest(path)
            entry = FileEntry(name=join(self.directory, name), bytes=stat.size, digest=digest)
            files.append(entry)
        if self.emptied:
            remove_empty(storage, join(location, self.emptied))
        return Written(tuple(files))

    def _found(self, storage: Storage, location: str) -> Iterator[tuple[str, FileStat]]:
        directory = join(location, self.directory)
        if self.names is not None:
            yield from ((name, storage.stat(join(directory, name))) for name in self.names)
            return
        for name, stat in walk_files(storage, directory):
            if not any(f"{name}/".startswith(f"{inner}/") for inner in self.skip):
                yield name, stat


@dataclass(frozen=True, slots=True)
class LeftOutPart(PartJob):
    """An optional part whose ``make`` raised: only the receipt is written, with the reason."""

    name: str
    directory: str
    why: str
    portable, files = True, ()

    def write(self, storage: Storage, location: str) -> Written:
        raise SaveFailed(self.why)


def planned_bytes(parts: Iterable[PartJob]) -> int | None:
    """The bytes that a writer of these shares will write; None if only the writer will know.

    Files of a ``TreePart`` are written already.
    """
    total = 0
    for part in parts:
        if not part.portable:
            return None
        if isinstance(part, FilePart):
            total += len(part.data)
        total += sum(image.size for part_job in part.part_jobs for image in part_job.images)
    return total


@contextmanager
def at_path(
    storage: Storage, location: str, specs: Iterable[PartSpec], visibility: Visibility
) -> Iterator[str]:
    """The absolute path of an attempt, with the directories of parts that are written by path.

    Another rank may have made one, which this host shows late. Raises ``StorageError`` at the start or
    the end of the block if the path leads elsewhere: files made by path are in the right place.
    """
    by_path = [spec for spec in specs if spec.format.by_path]
    if by_path:
        visibility.require(storage, location)
        made = visibility.of_directories(storage)
        for directory in sorted({PRIVATE, *(spec.directory for spec in by_path)} - {""}):
            path = location  # not durable: the writer does that
            for piece in directory.split("/"):
                path = f"{path}/{piece}"
                make_dir(made, path)
        yield storage.absolute(location)
        storage.absolute(location)
    else:
        yield join(storage.root, location)


def make_inside(location: str, directory: str) -> str:
    """The absolute path of ``directory`` below ``location``, which must exist; made if missing."""
    path = Path(location)
    for piece in filter(None, directory.split("/")):
        path /= piece
        path.mkdir(exist_ok=True)
    return str(path)


def without_inner_parts(job: PartJob, parts: Iterable[PartSpec]) -> PartJob:
    """Exclude the directories and files of other parts from a tree of files around them."""
    if not isinstance(job, TreePart):
        return job
    base = f"{job.directory}/" if job.directory else ""
    files = [join(p.directory, p.name) for p in parts if p.format.inside]
    inside = [p.directory for p in parts if not p.format.inside and p.directory != job.directory]
    skip = [path.removeprefix(base) for path in (*inside, *files) if path.startswith(base)]
    return replace(job, skip=(*skip, *(() if base else (PRIVATE,))))


def stage_tree(spec: PartSpec, tree: FileTree, location: str, rank: int) -> TreePart | LeftOutPart:
    """Let the trainer write the files of a tree. ``location`` is the step's absolute directory.

    An exception of ``make`` passes, unless the part is optional.
    """
    try:
        if tree.every_rank:
            return _stage_share(spec, tree, location, rank)
        tree.make(make_inside(location, spec.directory))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's CheckpointException is one
        if not spec.optional:
            raise
        return LeftOutPart(spec.name, spec.directory, describe(error))
    return TreePart(spec.name, spec.directory)


def _stage_share(spec: PartSpec, tree: FileTree, location: str, rank: int) -> TreePart:
    """Let this rank write its files of a tree where no other rank does, and move them to it.

    A name that another rank moves there at the same moment is found when the receipts are put
    together: two of them list it.
    """
    apart = f"tree-{spec.name}-{rank}"
    made = make_inside(location, join(PRIVATE, apart))
    target = make_inside(location, spec.directory)
    try:
        tree.make(made)
        names = tuple(_move_files(spec, made, target, rank))
    except BaseException:
        Path(made).rename(Path(target, apart))  # goes with the part, if that is left out
        raise
    return TreePart(spec.name, spec.directory, names=names, emptied=join(PRIVATE, apart))


def _move_files(spec: PartSpec, made: str, target: str, rank: int) -> Iterator[str]:
    """Move the files of ``rank``; their names. Raises ``SaveFailed`` if there is one of a name, and
    ``SaveRefused`` if ``make`` left a directory out of which nothing may be moved.

    Makes empty directories too. A link to a directory is moved as a file: the writer refuses it.
    """
    for directory, inside, files in sorted(os.walk(made)):
        inner = "" if directory == made else os.path.relpath(directory, made)
        place = make_inside(target, inner)
        links = [name for name in inside if Path(directory, name).is_symlink()]
        for file in sorted(files + links):
            name, path = join(inner, file), Path(place, file)
            if os.path.lexists(path):
                said = f"{name} of part {spec.name!r} is written by rank {rank} and by another one"
                raise SaveFailed(said, file=str(path), part=spec.name, rank=rank)
            try:
                Path(directory, file).rename(path)
            except PermissionError as error:
                raise SaveRefused(
                    f"part {spec.name!r}: {name} of rank {rank} cannot be moved into the checkpoint "
                    f"({error.strerror}): let make leave directories that their owner may write to",
                    file=str(path),
                    part=spec.name,
                    key=name,
                    rank=rank,
                ) from error
            yield name


def file_spec(name: str, value: Any) -> PartSpec | None:
    """The spec of a part of plain files; None if ``value`` is something else."""
    if isinstance(value, (bytes, bytearray)):
        return PartSpec(name, FILE.name)
    if isinstance(value, FileTree):
        return PartSpec(name, TREE.name, name if value.directory is None else value.directory)
    return None


def stage_file(spec: PartSpec, value: Any, location: str, rank: int) -> PartJob:
    """The job of ``rank`` for a part of plain files."""
    if isinstance(value, FileTree):
        return stage_tree(spec, value, location, rank)
    return FilePart(spec.name, spec.name, bytes(value), spec.directory)


@dataclass(slots=True)
class FilesDraft:
    """See ``ports.Draft``."""

    specs: tuple[PartSpec, ...]
    values: Mapping[str, Any]
    expected_bytes: int
    in_place: bool = False
    summary: Any = None
    digests: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # of a lone process

    def stage(
        self, location: str, specs: Sequence[PartSpec], planned: Mapping[str, Planned]
    ) -> tuple[PartJob, ...]:
        return tuple(stage_file(spec, self.values[spec.name], location, 0) for spec in specs)

    def changed(self) -> str:
        return ""  # bytes do not change

    def let_go(self) -> None:
        """Nothing to free."""

    def finalizers(self) -> list[Finalizer]:
        return []


class FilesDriver:
    """``ports.Driver`` of a process without tensors, such as a controller."""

    finishers: Mapping[str, PartFinisher] = MappingProxyType({})

    def provenance(self) -> Mapping[str, str]:
        return provenance("ckptfsm")

    def draft(self, parts: Mapping[str, Any]) -> FilesDraft:
        specs = []
        values = {name: content_of(value) for name, value in parts.items()}
        for name, value in parts.items():
            spec = file_spec(name, values[name])
            if spec is None:
                raise ConfigError(
                    f"part {name!r} is a {type(values[name]).__name__}; give bytes or a FileTree",
                    part=name,
                )
            specs.append(replace(spec, ranks=(0,), optional=isinstance(value, OptionalPart)))
        return FilesDraft(tuple(specs), values, bytes_of(values))

    def merge(self, summaries: Sequence[Any]) -> Mapping[str, Planned]:
        return {}

    def accept(self) -> None:
        """Nothing is planned."""

    refuse = accept

    def survey(
        self, parts: Mapping[str, Any], directories: Mapping[str, str], droppable: Collection[str]
    ) -> Survey:
        return Survey(set(), {}, {})

    def check(self, surveys: Sequence[Survey], drop: set[str]) -> set[str]:
        """Plain files fit any sharding, and have no keys."""
        return set()

    def plan_reading(
        self,
        storage: Storage,
        location: str,
        parts: Mapping[str, tuple[str, Any]],
        files: Sequence[FileEntry],
    ) -> None:
        """Every file is verified before it is loaded."""

    def load(
        self, parts: Mapping[str, Any], directories: Mapping[str, str], drop: set[str]
    ) -> Mapping[str, Any]:
        return {name: load_file(name, value, directories[name]) for name, value in parts.items()}


def load_file(name: str, value: Any, directory: str) -> Any:
    """The content of a plain file as bytes; for a tree, the absolute path of its directory."""
    if isinstance(value, FileTree):
        return directory
    return (Path(directory) / name).read_bytes()


def bytes_of(values: Mapping[str, Any]) -> int:
    """The size of the plain files among parts, in bytes."""
    return sum(len(v) for v in values.values() if isinstance(v, (bytes, bytearray)))


def digests_of_bytes(values: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """The digests of the parts of bytes, see ``ports.Draft``."""
    return {
        name: {"": xxhash.xxh3_64_intdigest(value)}
        for name, value in values.items()
        if isinstance(value, (bytes, bytearray))
    }


def provenance(*names: str) -> dict[str, str]:
    """The versions of installed packages, for a manifest."""
    return {name: installed(name) for name in names}
