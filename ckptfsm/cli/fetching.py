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
from ckptfsm.coordinator.adopting import adopt_directory
from ckptfsm.coordinator.opening import refuse_other_layout
from ckptfsm.core.documents import RunMark, decode
from ckptfsm.core.errors import ConfigError, StepExistsError
from ckptfsm.core.layout import FETCHING, RUN
from ckptfsm.core.parts import MAX_STEP
from ckptfsm.core.ports import Storage
from ckptfsm.core.units import bytes_text
from ckptfsm.disk.durable import lookup
from ckptfsm.disk.durable import put as put_file
from ckptfsm.disk.inspection import read_commit
from ckptfsm.disk.journal import read_history
from ckptfsm.disk.overview import look
from ckptfsm.disk.ownership import open_root
from ckptfsm.disk.trash import remove_empty
from ckptfsm.places.fetching import (
    CopyFound,
    Fetch,
    choose,
    copies_in,
    newest_epoch_in,
    older_than,
)
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
    with opened_storage(root) as storage:
        refuse_other_layout(storage, chosen.layout, read_history(storage))
        if not _is_there(storage, chosen):
            source = _fetched(storage, place, chosen, copies)
            adopt_directory(storage, this_process(), chosen.layout, source, chosen.step)
            remove_empty(storage, FETCHING)
    _take_over(root, chosen)


def _is_there(storage: Storage, chosen: CopyFound) -> bool:
    """True if the root has this very checkpoint. Raises ``StepExistsError`` for another one."""
    name = chosen.name
    if lookup(storage, name) is None:
        return False
    found = read_commit(storage, name)
    if found is None or found.manifest != chosen.manifest:
        raise StepExistsError(f"{name} is taken by another checkpoint", step=chosen.step, file=name)
    return True


def _fetched(storage: Storage, place: CopyPlace, chosen: CopyFound, copies: list[CopyFound]) -> str:
    """Fetch a copy while this process owns the root. Returns its directory in the root.

    The root gets an epoch above all in the place: no later attempt has the name of one there.
    """
    assert chosen.manifest is not None, "chosen"
    total = sum(entry.bytes for entry in chosen.manifest.files)
    ownership = open_root(storage, this_process(), above=newest_epoch_in(copies))
    try:
        _mark_run(storage, place, ownership.tag)
        with progress_bar() as bar:
            task = bar.add_task(chosen.name, total=total)
            fetched = Fetch(
                place,
                storage,
                chosen,
                older_than(chosen, copies),
                partial(bar.advance, task),
            )
            source = fetched.run()
    finally:
        ownership.release()
    put([clean(f"fetched {chosen.name}, {bytes_text(total)}, from {place.where}")])
    return source


def _mark_run(storage: Storage, place: CopyPlace, tag: str) -> None:
    """Let the root be of the run that the place belongs to: its copies go on there."""
    data = place.read(RUN)
    if data is None:
        return
    decode(RunMark, data, f"{place.where}/{RUN}")
    if lookup(storage, RUN) is None:
        put_file(storage, RUN, data, tag=tag)
    elif storage.read(RUN, len(data) + 1) != data:
        raise ConfigError(
            f"{storage.root} belongs to another run than {place.where}: fetch into an empty root, and "
            "move the checkpoint with ckptfsm adopt",
            file=RUN,
            place=place.where,
        )


def _take_over(root: Path, chosen: CopyFound) -> None:
    """Adopt the checkpoint as a start does, and end the pin that adopting sets.

    A death in between leaves the pin; to fetch again ends it.
    """
    with (
        owned(root, layout=chosen.layout) as (coordinator, report),
        opened_storage(root) as storage,
    ):
        line = told_of_adoption(coordinator, report, chosen.step)
        if look(storage).pins.get(chosen.step) == "adopted":
            coordinator.unpin(chosen.step)
    put([line])
