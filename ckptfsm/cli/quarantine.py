"""``ckptfsm adopt`` and ``ckptfsm quarantine``: directories that are not in service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptfsm.adapters.identity import this_process
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.cli.changing import REFUSED, Wait, ask
from ckptfsm.cli.owning import owned
from ckptfsm.cli.reading import HERE, Json, Root, opened
from ckptfsm.cli.terminal import put, put_json
from ckptfsm.coordinator.admitting import admit, judge
from ckptfsm.core.errors import ConfigError, DamagedRoot
from ckptfsm.core.layout import QUARANTINE, parse_aside
from ckptfsm.core.parts import MAX_STEP
from ckptfsm.disk.durable import each_file, list_names, lookup
from ckptfsm.disk.overview import look
from ckptfsm.views.reading import read_lives
from ckptfsm.views.timeline import clean, describe_end, format_bytes

Name = Annotated[str, typer.Argument(help="A name that ckptfsm quarantine ls shows.")]
group = typer.Typer(help="Directories that were withdrawn. Nothing deletes them by itself.")


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: ckptfsm adopt iter_0000040 -r runs/demo")(adopt)
    group.command("ls", epilog="Example: ckptfsm quarantine ls -r runs/demo")(ls)
    group.command("restore", epilog="Example: ckptfsm quarantine restore 40.e2.a5 -r runs/demo")(
        restore
    )
    group.command("drop", epilog="Example: ckptfsm quarantine drop 40.e2.a5 -r runs/demo")(drop)
    app.add_typer(group, name="quarantine")


def adopt(
    directory: Annotated[
        Path, typer.Argument(help="A complete checkpoint, on the disk of the root.")
    ],
    step: Annotated[
        int | None,
        typer.Option(help="Its step, if its name does not tell.", min=0, max=MAX_STEP),
    ] = None,
    root: Root = HERE,
) -> None:
    """Take a complete checkpoint into service, which the journal does not explain, and pin it.

    A directory outside of the root is moved into the root. No owner may live.
    """
    with opened(root) as storage:
        layout, at = look(storage).layout, Path(storage.root)
    given = directory if directory.is_absolute() or directory.exists() else at / directory
    found = step if step is not None else layout.parse_published(given.name)
    if found is None:
        raise ConfigError(f"{given.name} names no step: give --step", file=str(given))
    given = given.resolve()
    if given.is_relative_to(at.resolve()):
        _take_into_service(root, given.relative_to(at.resolve()).as_posix(), found)
        return
    with opened(given.parent) as beside:
        judge(beside, layout, given.name, found)
    inside = at / f"adopt-{given.name}"
    if given.stat().st_dev != at.stat().st_dev or inside.exists():
        raise ConfigError(f"copy it to {inside} first, and adopt that", file=str(given))
    given.rename(inside)
    try:
        _take_into_service(root, inside.name, found)
    except BaseException:
        if inside.exists():  # refused: it goes back to its place
            inside.rename(given)
        raise


def _take_into_service(root: Path, source: str, step: int) -> None:
    storage = PosixStorage(root, create=False)
    try:
        admit(storage, this_process(), look(storage).layout, source, step)
    finally:
        storage.close_root()
    with owned(root) as (coordinator, report):
        for decision in report.decisions:
            put([clean(f"{decision.subject}: {decision.result}, because: {decision.why}")])
        latest = coordinator.ledger.latest()
        if coordinator.ledger.at(step) is None:
            raise DamagedRoot(f"step {step} was not adopted", step=step)
    put([f"step {step} is in service; the latest is step {latest.step if latest else None}"])


def ls(root: Root = HERE, json: Json = False) -> None:
    """List the directories in quarantine: name, size, and the reason."""
    with opened(root) as storage:
        lives = {life.attempt: life for life in read_lives(storage)}
        rows = []
        for name in list_names(storage, QUARANTINE):
            of = parse_aside(name)
            life = lives.get(str(of)) if of is not None else None
            why = describe_end(life) + (f" ({life.detail})" if life.detail else "") if life else ""
            files = [stat.size for _, stat in each_file(storage, f"{QUARANTINE}/{name}")]
            rows.append((name, sum(files), why))
    if json:
        put_json([{"name": name, "bytes": size, "why": why} for name, size, why in rows])
        return
    lines = [clean(f"{name}  {format_bytes(size)}  {why}") for name, size, why in rows]
    put(lines or ["nothing is in quarantine"])


def restore(name: Name, root: Root = HERE) -> None:
    """Bring a complete checkpoint back from quarantine, and pin it. No owner may live.

    If it is newer than the latest, it becomes the latest.
    """
    of = parse_aside(name)
    with opened(root) as storage:
        if of is None or lookup(storage, f"{QUARANTINE}/{name}") is None:
            raise ConfigError(
                f"{name!r} is no checkpoint in quarantine", file=f"{QUARANTINE}/{name}"
            )
    try:
        with owned(root):
            pass  # the journal forgets that it was withdrawn, and the next opening adopts it
    except DamagedRoot as error:  # nothing is left to resume from but this
        put([clean(f"no checkpoint is in service: {error.message}")])
    _take_into_service(root, f"{QUARANTINE}/{name}", of.step)


def drop(
    name: Name,
    root: Root = HERE,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    wait: Wait = 60.0,
) -> None:
    """Delete a directory in quarantine, for good."""
    with opened(root) as storage:
        if name not in list_names(storage, QUARANTINE):
            raise ConfigError(f"{name!r} is not in quarantine", file=f"{QUARANTINE}/{name}")
    if not yes and not typer.confirm(f"Delete {clean(name)} for good?"):
        raise typer.Exit(REFUSED)
    ask(root, wait, "drop", name=name)
