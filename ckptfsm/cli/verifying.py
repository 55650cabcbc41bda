"""``ckptfsm verify``."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from ckptfsm.adapters.posix_storage import opened_storage
from ckptfsm.cli.bar import progress_bar
from ckptfsm.cli.reading import HERE, RUNBOOK, Json, Place, Root, opened, step_or_root, url_of
from ckptfsm.cli.terminal import put, put_json
from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import JournalCorrupt, StepNotFoundError
from ckptfsm.core.layout import JOURNAL, LAYOUTS, MANIFEST, TRACKER, Layout
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.ports import Storage
from ckptfsm.core.units import bytes_text
from ckptfsm.disk.durable import list_names
from ckptfsm.disk.overview import layout_of_names, look
from ckptfsm.disk.pickle_stubs import METADATA
from ckptfsm.disk.pieces import Piece
from ckptfsm.disk.verification import Verdict, verify_directory, verify_step
from ckptfsm.views.timeline import clean, format_duration


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: ckptfsm verify --all -r runs/demo")(verify)


def verify(
    ctx: typer.Context,
    what: Annotated[
        str,
        typer.Argument(metavar="[STEP | DIR]", help="A step, or a copy; the latest if left out."),
    ] = "",
    place: Place = None,
    root: Root = HERE,
    everything_tracked: Annotated[
        bool, typer.Option("--all", help="Every tracked checkpoint, the newest first.")
    ] = False,
    read_data_subset: Annotated[
        str, typer.Option(help="The fraction of the files to read, at random: 10%.")
    ] = "100%",
    json: Json = False,
) -> None:
    """Compare checkpoints with their manifests: names, sizes, digests, and the form of the metadata.

    DIR is a root, or the directory of one checkpoint, also a copy far from its root; or the URL of a
    place with copies, such as s3://bucket/run. Exit status 1 if one is damaged, or the journal of the
    root.
    """
    fraction = _fraction(read_data_subset)
    step, root = step_or_root(ctx, what, place or root)
    if step is not None and everything_tracked:
        raise typer.BadParameter("give a step, or --all")
    if url := url_of(root):
        from ckptfsm.cli.copies import verify_copies  # here: a root needs no places

        verify_copies(url, step, everything_there=everything_tracked, as_data=json)
        return
    if _is_checkpoint(root):
        _verify_copy(root, fraction, json)
        return
    verdicts: list[Verdict] = []
    with opened(root) as storage:
        shelf = _shelf(storage)
        if shelf.problem and not json:
            put([clean(shelf.problem)])
        with progress_bar() as progress:
            for each in _steps(shelf, step, everything_tracked):
                began = time.monotonic()
                watched = _Watched(fraction, progress, f"step {each}")
                verdicts.append(_verified(storage, shelf, each, watched))
                if not json:
                    told = _lines(f"step {each}", verdicts[-1], time.monotonic() - began)
                    put(map(clean, told))
    if json:
        put_json([asdict(verdict) for verdict in verdicts])
    else:
        put(_way_out(verdicts, shelf))
    if (shelf.problem and not shelf.lost) or any(
        not verdict.good and not verdict.gone for verdict in verdicts
    ):
        raise typer.Exit(1)


def _is_checkpoint(place: Path) -> bool:
    """True for the directory of a checkpoint, which is no root: by its name, or by its metadata."""
    if not place.is_dir() or any((place / name).exists() for name in (JOURNAL, TRACKER)):
        return False
    named = any(layout.is_published(place.resolve().name) for layout in LAYOUTS.values())
    return named or any((place / name).exists() for name in (MANIFEST, METADATA))


def _verify_copy(place: Path, fraction: float, json: bool) -> None:
    """Verify one directory. No journal is asked: its manifest alone says what has to be there."""
    place = place.resolve()
    layout = layout_of_names([place.name])
    with opened_storage(place.parent) as storage, progress_bar() as progress:
        began = time.monotonic()
        watched = _Watched(fraction, progress, place.name)
        named = layout.parse_published(place.name)
        try:
            verdict = verify_directory(
                storage, place.name, layout, None, watched.choose, watched.read
            )
        finally:
            watched.end()
    if json:
        put_json([asdict(verdict)])
    else:
        lines = _lines(place.name, verdict, time.monotonic() - began)
        if verdict.step not in (None, named):
            lines.append(f"  it is of step {verdict.step}")
        put(map(clean, lines))
    if not verdict.good:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Shelf:
    """The checkpoints of a root that can be verified, the newest first.

    ``expected`` has the journal's checkpoint of each step. ``problem``: the journal is damaged, or
    ``lost``: not there. Then the steps are those of published names.
    """

    root: str
    layout: Layout
    expected: Mapping[int, Checkpoint | None]
    problem: str = ""
    lost: bool = False

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(self.expected)


def _shelf(storage: Storage) -> _Shelf:
    try:
        overview = look(storage)
    except JournalCorrupt as error:
        return _by_names(storage, error.summary())
    if not overview.history.layout and overview.unknown:
        return _by_names(storage, "there is no journal", lost=True)
    tracked = {c.step: c for c in overview.ledger.in_state(State.TRACKED)[::-1]}
    return _Shelf(overview.root, overview.layout, tracked)


def _by_names(storage: Storage, said: str, *, lost: bool = False) -> _Shelf:
    names = list_names(storage, "")
    layout = layout_of_names(names)
    found = (layout.parse_published(name) for name in names)
    steps = sorted((step for step in found if step is not None), reverse=True)
    problem = f"{said}: judged is what stands under the names of steps"
    return _Shelf(storage.root, layout, dict.fromkeys(steps), problem, lost)


def _fraction(text: str) -> float:
    try:
        fraction = float(text.removesuffix("%")) / 100
    except ValueError:
        fraction = -1.0
    if not text.endswith("%") or not 0 <= fraction <= 1:
        raise typer.BadParameter(f"{text!r} is no percentage from 0% to 100%")
    return fraction


def _steps(shelf: _Shelf, step: int | None, everything_tracked: bool) -> Sequence[int]:
    if everything_tracked and shelf.steps:
        return shelf.steps
    if step is None and not shelf.steps:
        raise StepNotFoundError("no checkpoint of this root is tracked", file=shelf.root)
    if step is not None and step not in shelf.steps:
        raise StepNotFoundError(f"step {step} is not tracked", step=step, file=shelf.root)
    return [step if step is not None else shelf.steps[0]]


class _Watched:
    """A fraction of the files at random, at least one unless it is 0, whose reads move a bar."""

    def __init__(self, fraction: float, progress: Progress, name: str) -> None:
        self._fraction = fraction
        self._progress = progress
        self._task = progress.add_task(name, total=None)

    def choose(self, files: Sequence[FileEntry]) -> Collection[FileEntry]:
        chosen = files
        if self._fraction < 1:
            count = max(1, round(self._fraction * len(files))) if self._fraction else 0
            chosen = random.sample(files, k=min(len(files), count))
        self._progress.update(self._task, total=sum(file.bytes for file in chosen))
        return chosen

    def read(self, piece: Piece) -> None:
        self._progress.advance(self._task, len(piece.view))

    def end(self) -> None:
        self._progress.remove_task(self._task)


def _verified(storage: Storage, shelf: _Shelf, step: int, watched: _Watched) -> Verdict:
    """The verdict. A directory that is gone, or another attempt's, is damage, unless the journal tells
    of that by now.
    """
    expected = shelf.expected[step]
    try:
        verdict = verify_step(storage, shelf.layout, expected or step, watched.choose, watched.read)
    finally:
        watched.end()
    if expected is None or (verdict.good and not verdict.gone):
        return verdict
    now = look(storage).ledger.at(step)
    if now is not None and now.id != expected.id:  # rolled back, and saved again
        return replace(verdict, gone=True)
    if verdict.gone and now is not None:
        missing = f"{shelf.layout.published_name(step)} is not there, and the journal tracks it"
        return Verdict(step, (missing,))
    return verdict


def _way_out(verdicts: Sequence[Verdict], shelf: _Shelf) -> list[str]:
    """Lines below the verdicts, if one is damaged, or the journal."""
    bad = (verdict.step for verdict in verdicts if not verdict.good and not verdict.gone)
    damaged = {step for step in bad if step is not None}
    if shelf.lost and damaged:
        names = ", ".join(shelf.layout.published_name(step) for step in sorted(damaged))
        remedy = f"move {names} out of the root: a start would adopt it by its names and sizes"
        return [f"    do: {remedy}", f"    see: {RUNBOOK}directory-to-adopt"]
    if shelf.problem and not shelf.lost:
        return ["    do: ckptfsm doctor", f"    see: {RUNBOOK}journal-damaged"]
    if not damaged:
        return []
    latest = shelf.steps[0]
    good = [v.step for v in verdicts if v.good and not v.gone and v.step is not None]
    if latest not in damaged:
        remedy = f"nothing now, if the latest is good: ckptfsm verify {latest}"
    elif good:
        remedy = f"start the job, or: ckptfsm rollback {max(good)}"
    elif len(verdicts) < len(shelf.steps):
        remedy = "see which one is good: ckptfsm verify --all"
    else:
        remedy = "put a good copy back: no checkpoint of this root is good"
    return [f"    do: {remedy}", f"    see: {RUNBOOK}checkpoint-damaged"]


def _lines(name: str, verdict: Verdict, seconds: float) -> list[str]:
    if verdict.gone:
        return [f"{name}: gone from its name meanwhile: not judged"]
    if verdict.problems:
        return [f"{name}: DAMAGED", *(f"  {problem}" for problem in verdict.problems)]
    size, rate = verdict.bytes_read, verdict.bytes_read / max(seconds, 1e-6)
    if not verdict.digests:
        return [
            f"{name}: good in form, {verdict.files} files; without a manifest no digest is known"
        ]
    took = f"{format_duration(seconds)} ({bytes_text(int(rate))}/s)"
    return [
        f"{name}: good, {verdict.files} files, {bytes_text(size)} read in {took}",
        *(f"  not of this checkpoint: {stranger}" for stranger in verdict.strangers),
    ]
