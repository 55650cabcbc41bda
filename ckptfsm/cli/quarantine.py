"""``ckptfsm adopt`` and ``ckptfsm quarantine``: directories that are not in service."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ckptfsm.adapters.identity import this_process
from ckptfsm.adapters.posix_storage import OpenPosix, opened_storage
from ckptfsm.cli.changing import OwnerEnded, Wait, ask, owned
from ckptfsm.cli.reading import HERE, REFUSED, Json, Place, Root, opened
from ckptfsm.cli.terminal import put, put_json
from ckptfsm.coordinator.adopting import adopt_directory, require_intact
from ckptfsm.coordinator.coordinator import Coordinator
from ckptfsm.core.documents import Asked, FileEntry
from ckptfsm.core.errors import ConfigError, DamagedRoot, StepExistsError
from ckptfsm.core.evidence import ANOTHER_MANIFEST
from ckptfsm.core.layout import PRIVATE, QUARANTINE, Layout, parse_aside
from ckptfsm.core.parts import MAX_STEP, AttemptId
from ckptfsm.core.ports import Storage
from ckptfsm.core.recovery_rules import Decision
from ckptfsm.core.requests import RecoveryReport
from ckptfsm.core.units import bytes_text
from ckptfsm.disk.durable import each_file, list_names, lookup, move
from ckptfsm.disk.inspection import read_commit
from ckptfsm.disk.overview import layout_of_names, look
from ckptfsm.views.reading import Life, read_lives
from ckptfsm.views.timeline import clean, describe_end

Name = Annotated[str, typer.Argument(help="A name that ckptfsm quarantine ls shows.")]
group = typer.Typer(help="Directories that were withdrawn. Nothing deletes them by itself.")


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: ckptfsm adopt iter_0000045 -r runs/demo")(adopt)
    group.command("ls", epilog="Example: ckptfsm quarantine ls -r runs/demo")(ls)
    group.command("restore", epilog="Example: ckptfsm quarantine restore 40.e1.a4 -r runs/demo")(
        restore
    )
    group.command("drop", epilog="Example: ckptfsm quarantine drop 40.e1.a4 -r runs/demo")(drop)
    app.add_typer(group, name="quarantine")


def adopt(
    directory: Annotated[
        Path, typer.Argument(help="A complete checkpoint, on the disk of the root.")
    ],
    step: Annotated[
        int | None, typer.Option(help="Its step, if its name does not tell.", min=0, max=MAX_STEP)
    ] = None,
    root: Root = HERE,
    owner_ended: OwnerEnded = False,
) -> None:
    """Take a complete checkpoint into service, which the journal does not explain, and pin it.

    All its files are read once, and compared with its manifest, if it has one. A directory outside of
    the root is moved into the root, but none of another root. No owner may live.
    A root that is missing or empty is made.
    """
    at = root.resolve()
    makes = not root.exists() or (root.is_dir() and not any(root.iterdir()))
    if makes:
        layout = layout_of_names([directory.name])
    else:
        with opened(root) as storage:
            layout = look(storage).layout
    given = directory if directory.is_absolute() or directory.exists() else at / directory
    moved = f"adopt-{given.name}"  # its name in the root, if it comes from outside
    if not given.exists():
        said = f"there is no directory {directory}"
        if (at / moved).is_dir():
            said += f": an adopt that was cut short left it at {moved}, adopt that with --step"
        raise ConfigError(said, file=str(given), reason="missing")
    found = step if step is not None else layout.parse_published(given.name)
    if found is None:
        raise ConfigError(f"{given.name} names no step: give --step", file=str(given))
    given = given.resolve()
    outside = not given.is_relative_to(at)
    if not outside:
        source = given.relative_to(at).as_posix()
        _refuse_inside(layout, source, found)
        start(root, owner_ended)
        with opened(root) as storage:
            require_intact(storage, look(storage).layout, source, found, _all_told)
    else:
        source = moved
        _refuse_outside(given, at / source, at / layout.published_name(found))
        with opened_storage(given.parent) as storage:
            require_intact(storage, layout, given.name, found, _all_told)
        if makes:
            _make(root, layout)
        start(root, owner_ended)
    try:
        if outside:
            _move(given, at / source)
        _take_into_service(root, source, found)
    except BaseException:
        if (at / source).exists() and not given.exists():  # refused: it goes back to its place
            _move(at / source, given)
        raise


def _move(source: Path, target: Path) -> None:
    above = Path(os.path.commonpath((source, target)))
    with opened_storage(above) as storage:
        names = (path.relative_to(above).as_posix() for path in (source, target))
        move(storage, *names)


def _refuse_inside(layout: Layout, source: str, step: int) -> None:
    """Refuse the checkpoint of another step, and a directory inside a checkpoint or of a save."""
    named, parent = layout.parse_published(source), source.rpartition("/")[0]
    if parent not in ("", QUARANTINE) or (named is not None and named != step):
        raise ConfigError(f"{source} is not a place to adopt from as step {step}", file=source)


def _refuse_outside(given: Path, inside: Path, name: Path) -> None:
    """Refuse what cannot be moved into the root, or belongs to another root."""
    if os.path.lexists(name):
        raise StepExistsError(f"{name.name} is taken", file=str(name))
    if any((parent / PRIVATE).is_dir() for parent in given.parents):
        raise ConfigError(
            f"another root has it: copy it to {inside}, and adopt that", file=str(given)
        )
    above = next(each for each in inside.parents if each.exists())
    if given.stat().st_dev != above.stat().st_dev or os.path.lexists(inside):
        raise ConfigError(f"copy it to {inside} first, and adopt that", file=str(given))


def _make(root: Path, layout: Layout) -> None:
    """Make a root without a checkpoint. After a crash it is empty, or such a root."""
    OpenPosix(str(root))(create=True).close_root()
    with owned(root, layout=layout):
        put([clean(f"a new root: {root}")])


def start(root: Path, owner_ended: bool) -> None:
    """Open a root as a start does, and close it: then nothing is interrupted, and no owner lives.

    The journal forgets checkpoints that were withdrawn. A root is left as it is if it has nothing to
    resume from: the directory may be the only one.
    """
    try:
        with owned(root, ended=owner_ended) as (_, report):
            _tell([each for each in report.decisions if each.actions])
    except DamagedRoot as error:
        if "evidence" not in error.facts:
            raise
        put([clean(f"no checkpoint is in service: {error.message}")])


def _all_told(files: Sequence[FileEntry]) -> Collection[FileEntry]:
    """All files, and a line that they are read: that may take long."""
    put([f"reads {bytes_text(sum(file.bytes for file in files))}, to compare the digests"])
    return files


def _take_into_service(root: Path, source: str, step: int) -> None:
    with opened_storage(root) as storage:
        adopt_directory(storage, this_process(), look(storage).layout, source, step)
    with owned(root) as (coordinator, report):
        line = told_of_adoption(coordinator, report, step)
    put([line])


def told_of_adoption(coordinator: Coordinator, report: RecoveryReport, step: int) -> str:
    """Tell what a start decided. Returns the line about ``step``; raises if it was not adopted."""
    _tell(report.decisions)
    if coordinator.ledger.at(step) is None:
        raise DamagedRoot(f"step {step} was not adopted", step=step)
    latest = coordinator.ledger.latest()
    return f"step {step} is in service; the latest is step {latest.step if latest else None}"


def _tell(decisions: Iterable[Decision]) -> None:
    put(clean(f"{each.subject}: {each.result}, because: {each.why}") for each in decisions)


def ls(place: Place = None, root: Root = HERE, json: Json = False) -> None:
    """List the directories in quarantine: name, size, and the reason."""
    with opened(place or root) as storage:
        lives = {life.attempt: life for life in read_lives(storage)}
        rows = []
        for name in list_names(storage, QUARANTINE):
            of = parse_aside(name)
            life = lives.get(str(of)) if of is not None else None
            why = describe_end(life) + (f" ({life.detail})" if life.detail else "") if life else ""
            size = _size_of(storage, f"{QUARANTINE}/{name}")
            if size is not None:
                rows.append((name, size, why))
    if json:
        put_json([{"name": name, "bytes": size, "why": why} for name, size, why in rows])
        return
    lines = [clean(f"{name}  {bytes_text(size)}  {why}") for name, size, why in rows]
    put(lines or ["nothing is in quarantine"])


def _size_of(storage: Storage, path: str) -> int | None:
    """The bytes of a directory, or of a file such as a tracker; None if it left meanwhile."""
    try:
        found = storage.stat(path)
        if found.kind != "dir":
            return found.size
        return sum(stat.size for _, stat in each_file(storage, path))
    except FileNotFoundError:
        return None


def restore(
    name: Name, place: Place = None, root: Root = HERE, owner_ended: OwnerEnded = False
) -> None:
    """Bring a complete checkpoint back from quarantine, and pin it. No owner may live.

    All its files are read once, and compared with its manifest. A damaged one is refused, and one that
    this root did not save.

    If it is newer than the latest, it becomes the latest.
    """
    root = place or root
    of = parse_aside(name)
    with opened(root) as storage:
        if of is None or lookup(storage, f"{QUARANTINE}/{name}") is None:
            raise ConfigError(
                f"{name!r} is no checkpoint in quarantine", file=f"{QUARANTINE}/{name}"
            )
        # Before the start, which may remove the file of the journal that tells of this attempt.
        told = next((life for life in read_lives(storage) if life.attempt == str(of)), None)
    start(root, owner_ended)
    with opened(root) as storage:
        _refuse_unfit(storage, name, of, told)
    _take_into_service(root, f"{QUARANTINE}/{name}", of.step)


def _refuse_unfit(storage: Storage, name: str, of: AttemptId, told: Life | None) -> None:
    """Refuse a directory that is damaged, or is another one than the journal told of its attempt."""
    path = f"{QUARANTINE}/{name}"
    require_intact(storage, look(storage).layout, path, of.step, _all_told)
    commit = read_commit(storage, path)
    if commit is None or told is None:
        return
    another = not told.adopted and commit.manifest.of != of
    if another or told.manifest_crc not in ("", commit.crc):
        way = f"if you want it all the same: ckptfsm adopt {path} --step {of.step}"
        raise DamagedRoot(f"{ANOTHER_MANIFEST}; {way}", file=path, step=of.step)


def drop(
    name: Name,
    place: Place = None,
    root: Root = HERE,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    wait: Wait = 60.0,
) -> None:
    """Delete a directory in quarantine, for good."""
    root = place or root
    with opened(root) as storage:
        if name not in list_names(storage, QUARANTINE):
            raise ConfigError(f"{name!r} is not in quarantine", file=f"{QUARANTINE}/{name}")
    if not yes and not typer.confirm(f"Delete {clean(name)} for good?"):
        raise typer.Exit(REFUSED)
    ask(root, wait, partial(Asked, errand="drop", name=name))
