"""Commands that read a root: ``ls``, ``show``, ``tree``, ``log``, ``explain``."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.garbage import collection_paused
from ckptfsm.adapters.posix_storage import opened_storage, refuse_checkpoint
from ckptfsm.cli.terminal import Console, folded, put, put_json
from ckptfsm.core.errors import DamagedRoot, JournalCorrupt, StepNotFoundError, describe
from ckptfsm.core.evidence import Ownership
from ckptfsm.core.explaining import Surroundings, explain, explain_plan
from ckptfsm.core.layout import EPOCHS, RUN
from ckptfsm.core.parts import MAX_STEP
from ckptfsm.core.ports import Storage
from ckptfsm.disk.inspection import why_damaged
from ckptfsm.disk.job_records import read_records
from ckptfsm.disk.journal import entered_at, read_history
from ckptfsm.disk.overview import Overview, look
from ckptfsm.views.listing import (
    adopted_contents,
    as_json,
    lag_lines,
    lags_of,
    lines_of,
    lines_of_step,
    missed_lines,
    rows_of,
    states_of_holds,
    tree_lines,
)
from ckptfsm.views.log import JournalTail
from ckptfsm.views.reading import read_lives
from ckptfsm.views.timeline import clean

Root = Annotated[
    Path,
    typer.Option(
        "--root", "-r", envvar="CKPTFSM_ROOT", help="The directory of all checkpoints of a job."
    ),
]
HERE = Path()


def _only_root(ctx: typer.Context, place: Path | None) -> Path | None:
    """Refuse a root that is named twice. Options that are given come before arguments."""
    if place is not None and "root" in ctx.params:
        raise typer.BadParameter("name the root once: as ROOT, or with -r")
    return place


Place = Annotated[
    Path | None,
    typer.Argument(metavar="[ROOT]", help="The root, as -r names it.", callback=_only_root),
]
RUNBOOK = "ckptfsm runbook "
_AROUND = 4  # lines of a list that are no rows, beside the first, and the line of the cursor
_ENTRIES = 20  # of one directory of a tree on a terminal
_WAY_OUT = "The way out: ckptfsm doctor"
_LONGEST_S = 1e6  # of a sleep
BROKEN, REFUSED = 1, 3  # exit statuses, see ckptfsm.cli.app
Step = Annotated[int, typer.Argument(help="The step of a checkpoint.", min=0, max=MAX_STEP)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_to(app: typer.Typer) -> None:
    for command, example in (
        (ls, "ckptfsm ls -r runs/demo"),
        (show, "ckptfsm show 40 -r runs/demo"),
        (tree, "ckptfsm tree -r runs/demo"),
        (log, "ckptfsm log -r runs/demo --step 40"),
        (explain_command, "ckptfsm explain 40 -r runs/demo"),
    ):
        name = command.__name__.removesuffix("_command")
        app.command(name, epilog=f"Example: {example}")(command)


def url_of(root: Path) -> str:
    """The URL or path of a place for copies that was given for a root; "" for a root.

    ``Path`` takes a slash of a URL.
    """
    scheme, colon, rest = str(root).partition(":/")
    if root.exists():
        copies = (root / RUN).exists() and not (root / EPOCHS).exists()
        return str(root) if copies else ""
    if not colon or not re.fullmatch("[A-Za-z][A-Za-z0-9+.-]+", scheme):
        return ""
    return f"{scheme}:///{rest}" if scheme == "file" else f"{scheme}://{rest}"


@contextmanager
def opened(root: Path) -> Iterator[Storage]:
    """The storage of a root that exists, for reading. Raises ``ConfigError`` for a checkpoint."""
    refuse_checkpoint(str(root))
    with opened_storage(root) as storage:
        yield storage


def ls(
    place: Place = None,
    root: Root = HERE,
    json: Json = False,
    watch: Annotated[
        float | None,
        typer.Option(help="Show the list again every so many seconds.", min=0.1, max=_LONGEST_S),
    ] = None,
) -> None:
    """List the checkpoints: step, state, age, size, and what keeps each.

    ROOT may be a place with copies, such as s3://bucket/run: then its copies are listed.
    """
    if url := url_of(place or root):
        from ckptfsm.cli.copies import list_copies  # here: a list of a root needs no places

        list_copies(url, as_data=json)
        return
    with opened(place or root) as storage:
        if watch is None:
            _list(storage, json)
            return
        while True:
            Console().clear()
            _list(storage, json, height=Console().height)
            time.sleep(watch)


@collection_paused()
def _list(storage: Storage, as_data: bool, height: int | None = None) -> None:
    """Print the list; of a list that is higher than ``height`` lines, the newest steps."""
    overview = look(storage)
    jobs = read_records(storage)
    since = entered_at(storage, overview.history)
    adopted = adopted_contents(storage, overview)
    latest = overview.ledger.latest()
    damaged = dict.fromkeys(overview.missing, "its directory is missing")
    if latest is not None:  # the directories of the others are not opened for a list
        damaged |= _damaged(storage, overview, latest.step)
    rows = rows_of(overview, since, SystemClock().unix(), jobs, adopted, damaged)
    if as_data:
        put_json(
            {"root": overview.root, "owner": str(overview.owner), "checkpoints": as_json(rows)}
        )
        return
    head = clean(f"{overview.root}: {overview.owner}")
    put([head, ""])
    if height is None:
        shown = rows
    else:
        around = _AROUND + (len(folded(head, Console().width)) if Console().is_terminal else 1)
        shown = rows[-max(1, height - around) :]
    put(lines_of(shown, Console().width) if shown else ["no checkpoints"])
    if len(shown) < len(rows):
        put([f"and {len(rows) - len(shown)} older ones"])
    if height is None:
        put(missed_lines(overview, jobs))
        put(lag_lines(lags_of(overview, since, SystemClock().unix())))


def show(step: Step, place: Place = None, root: Root = HERE) -> None:
    """Show every attempt at a step: its states, their times, its parts, its end."""
    with opened(place or root) as storage:
        lives = [life for life in read_lives(storage) if life.step == step]
        if not lives:
            raise StepNotFoundError(f"the journal names no step {step}", step=step)
        jobs = sorted(read_records(storage), key=lambda each: each.job)
        put(lines_of_step(storage, look(storage), lives, jobs))


def tree(place: Place = None, root: Root = HERE) -> None:
    """Show the directories of a root, with the meaning of each."""
    with opened(place or root) as storage:
        most = _ENTRIES if Console().is_terminal else None
        put(tree_lines(storage, look(storage), most))


def log(
    place: Place = None,
    root: Root = HERE,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as records come.")] = False,
    step: Annotated[int | None, typer.Option(help="Only the records of this step.")] = None,
) -> None:
    """Print the journal as sentences, oldest first."""
    with opened(place or root) as storage:
        tail = JournalTail(storage, step)
        put(tail.new_lines())
        while follow:
            time.sleep(0.5)
            put(tail.new_lines())


def explain_command(
    ctx: typer.Context,
    what: Annotated[
        str, typer.Argument(metavar="[STEP]", help="The step of a checkpoint; with --resume: ROOT.")
    ] = "",
    place: Place = None,
    root: Root = HERE,
    resume: Annotated[bool, typer.Option("--resume", help="Explain a start of the job.")] = False,
) -> None:
    """Explain a checkpoint: why it is kept, whether it is the latest, when it may go.

    With --resume: the step that a start of the job would resume from now, and why. Exit status 1 if a
    start would be refused, and 3 if it would be refused only because the owner lives.
    """
    step, root = step_or_root(ctx, what, place or root)
    if (step is None) is not resume:
        raise typer.BadParameter("give a step, or --resume")
    with opened(root) as storage:
        if step is not None:
            put(map(clean, _explain_step(storage, look(storage), step)))
            return
        lines, status = _explain_resume(storage)
        put(map(clean, lines))
        raise typer.Exit(status)


def step_or_root(ctx: typer.Context, what: str, root: Path) -> tuple[int | None, Path]:
    """The step and the root of a command that needs no step. A number is a step, other text a root."""
    if what.isdecimal() or not what:
        return (int(what) if what else None), root
    source = ctx.get_parameter_source("root")
    if ctx.params["place"] is not None or (source is not None and source.name == "COMMANDLINE"):
        raise typer.BadParameter(f"{clean(what)} is no step, and the root is named already")
    return None, Path(what)


def _explain_step(storage: Storage, overview: Overview, step: int) -> list[str]:
    found = [c for c in overview.ledger.checkpoints.values() if c.step == step]
    lives = {life.attempt: life for life in read_lives(storage) if life.step == step}
    if not lives and not found:
        raise StepNotFoundError(f"the journal names no step {step}", step=step)
    facts = Surroundings(
        overview.ledger,
        overview.tracker,
        overview.pins,
        overview.readers,
        overview.owner.may_live,
        overview.rules(),
        _damaged(storage, overview, step),
        {step: ", ".join(states_of_holds(overview, read_records(storage), step))},
    )
    lines = []
    for checkpoint in found:
        lines += explain(checkpoint, facts)
        life = lives.pop(str(checkpoint.id), None)
        if life is not None:
            last = life.entered[-1]
            lines.append(f"Recorded in epoch {last.epoch}, record {last.record}, at {last.at}.")
    for attempt, life in lives.items():
        why = f": {life.reason}" if life.reason else ""
        lines.append(f"The attempt {attempt} at this step ended as {life.end.value}{why}.")
    return lines


def _damaged(storage: Storage, overview: Overview, step: int) -> dict[int, str]:
    """Why a tracked step is not whole at its name, also by the journal as it is after that look."""
    checkpoint = overview.ledger.at(step)
    if checkpoint is None:
        return {}
    try:
        why = why_damaged(storage, overview.layout, checkpoint)
    except OSError as error:  # the rest can be told all the same
        return {step: f"it cannot be read: {describe(error)}"}
    return {step: why} if why and read_history(storage).ledger.at(step) == checkpoint else {}


def _explain_resume(storage: Storage) -> tuple[list[str], int]:
    """The decisions of a start, made by the function that a start uses, and the exit status.

    Nothing is carried out.
    """
    from ckptfsm.disk.situation import decide_start, gathered  # here: a list needs no plans

    lines, status = [], 0
    try:
        overview = look(storage)
    except JournalCorrupt as error:
        return [f"A start would be refused: {error.summary()}", _WAY_OUT], BROKEN
    if overview.owner.ownership is Ownership.LIVES:
        lines = [f"A start would be refused: {overview.owner}.", "If that process ended now:"]
        status = REFUSED
    elif overview.owner.ownership is Ownership.ELSEWHERE:
        lines = [f"This holds if the owner has ended: {overview.owner}."]
    evidence = gathered(storage, overview)
    decided = decide_start(overview, evidence)
    if isinstance(decided, DamagedRoot):
        return [*lines, f"A start would be refused: {decided.message}", _WAY_OUT], BROKEN
    told = explain_plan(decided, overview.history.intent, release=evidence.release)
    return lines + told, status
