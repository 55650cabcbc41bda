"""``ckptfsm fetch``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ckptfsm.adapters.identity import this_process
from ckptfsm.adapters.posix_storage import OpenPosix, opened_storage
from ckptfsm.cli.bar import progress_bar
from ckptfsm.cli.changing import OwnerEnded, owned
from ckptfsm.cli.quarantine import start, told_of_adoption
from ckptfsm.cli.terminal import put
from ckptfsm.coordinator.bringing_back import BringBack
from ckptfsm.core.parts import MAX_STEP
from ckptfsm.core.units import bytes_text
from ckptfsm.places.fetching import CopyFound, choose, copies_in
from ckptfsm.places.place import CopyPlace, place_at
from ckptfsm.views.timeline import clean


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: ckptfsm fetch copies/gpt runs/new")(fetch)


def fetch(
    url: Annotated[str, typer.Argument(help="A place with copies, such as s3://bucket/run.")],
    root: Annotated[Path, typer.Argument(help="The root to fetch into; made if it is missing.")],
    step: Annotated[
        int | None, typer.Option(help="The step; the latest copy if left out.", min=0, max=MAX_STEP)
    ] = None,
    owner_ended: OwnerEnded = False,
) -> None:
    """Bring a copy of a checkpoint back into a root: the next start resumes from it.

    Every file is compared with its digest. A fetch that was cut short goes on when it is called again.
    The checkpoint is the root's own afterwards: retention decides about it. No owner may live.
    """
    place = place_at(url)
    copies = copies_in(place)
    chosen = choose(place, copies, step)
    OpenPosix(str(root))(create=True).close_root()
    with opened_storage(root) as storage:
        used = bool(storage.listdir(""))
    if used:
        start(root, owner_ended)
    put(_brought_back(root, place, copies, chosen))
    with owned(root, layout=chosen.layout) as (coordinator, report):
        line = told_of_adoption(coordinator, report, chosen.step)
    put([line])


def _brought_back(
    root: Path, place: CopyPlace, copies: list[CopyFound], chosen: CopyFound
) -> list[str]:
    """Fetch a copy, with a bar. Returns what is to be told."""
    assert chosen.manifest is not None, "chosen"
    total = sum(entry.bytes for entry in chosen.manifest.files)
    with opened_storage(root) as storage, progress_bar() as bar:
        told = partial(bar.advance, bar.add_task(chosen.name, total=total))
        back = BringBack(storage, this_process(), place, copies, told)
        aside = back.run(chosen)
    if aside is None:
        return []
    lines = [f"{chosen.name} was damaged, and is now {aside}"] if aside else []
    lines.append(f"fetched {chosen.name}, {bytes_text(total)}, from {place.where}")
    return [clean(line) for line in lines]
