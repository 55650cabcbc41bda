"""``ckptfsm verify``."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ckptfsm.cli.reading import HERE, RUNBOOK, Json, Root, opened
from ckptfsm.cli.terminal import put, put_json
from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import StepNotFoundError
from ckptfsm.core.lifecycle import State
from ckptfsm.core.ports import Storage
from ckptfsm.disk.overview import Overview, look
from ckptfsm.disk.pieces import Piece
from ckptfsm.disk.verification import Choose, Verdict, everything, verify_step
from ckptfsm.views.timeline import clean, format_bytes, format_duration


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: ckptfsm verify --all -r runs/demo")(verify)


def verify(
    step: Annotated[int | None, typer.Argument(help="A step; the latest if left out.")] = None,
    root: Root = HERE,
    everything_tracked: Annotated[
        bool, typer.Option("--all", help="Every tracked checkpoint, the newest first.")
    ] = False,
    read_data_subset: Annotated[
        str, typer.Option(help="The share of the files to read, at random: 10%.")
    ] = "100%",
    json: Json = False,
) -> None:
    """Compare checkpoints with their manifests: names, sizes, digests, and the form of the metadata.

    Exit status 1 if one is damaged.
    """
    share = _share(read_data_subset)
    verdicts: list[Verdict] = []
    if step is not None and everything_tracked:
        raise typer.BadParameter("give a step, or --all")
    with opened(root) as storage:
        overview = look(storage)
        steps = _steps(overview, step, everything_tracked)
        with _progress() as progress:
            for each in steps:
                began = time.monotonic()
                watched = _Watched(_choice(share), progress, each)
                verdicts.append(_verified(storage, overview, each, watched))
                if not json:
                    put(map(clean, _lines(verdicts[-1], time.monotonic() - began)))
    if json:
        put_json([asdict(verdict) for verdict in verdicts])
    else:
        put(_way_out(verdicts, _steps(overview, None, everything_tracked=True)))
    if any(not verdict.good and not verdict.gone for verdict in verdicts):
        raise typer.Exit(1)


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not text.endswith("%") or not 0 <= share <= 1:
        raise typer.BadParameter(f"{text!r} is no percentage from 0% to 100%")
    return share


def _steps(overview: Overview, step: int | None, everything_tracked: bool) -> list[int]:
    tracked = [c.step for c in overview.ledger.in_state(State.TRACKED)]
    if everything_tracked:
        return tracked[::-1]
    if step is None and not tracked:
        raise StepNotFoundError("no checkpoint of this root is tracked", file=overview.root)
    if step is not None and step not in tracked:
        raise StepNotFoundError(f"step {step} is not tracked", step=step, file=overview.root)
    return [step if step is not None else tracked[-1]]


def _choice(share: float) -> Choose:
    if share == 1:
        return everything

    return partial(_at_random, share)


def _at_random(share: float, files: Sequence[FileEntry]) -> Collection[FileEntry]:
    """A share of the files, at least one unless the share is 0."""
    count = max(1, round(share * len(files))) if share else 0
    return random.sample(files, k=min(len(files), count))


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A bar on standard error, if that is a terminal: bytes, bytes per second, time left."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(20),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield progress


class _Watched:
    """A choice of files whose reads move a bar, or nothing if there is no bar."""

    def __init__(self, choose: Choose, progress: Progress | None, step: int) -> None:
        self._choose = choose
        self._progress = progress
        self._task = progress.add_task(f"step {step}", total=None) if progress else None

    def choose(self, files: Sequence[FileEntry]) -> Collection[FileEntry]:
        chosen = self._choose(files)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, total=sum(file.bytes for file in chosen))
        return chosen

    def read(self, piece: Piece) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, len(piece.view))

    def end(self) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.remove_task(self._task)


def _verified(storage: Storage, overview: Overview, step: int, watched: _Watched) -> Verdict:
    """The verdict. A directory that is gone, or another attempt's, is damage, unless the journal tells
    of that by now.
    """
    checkpoint = overview.ledger.at(step)
    assert checkpoint is not None, "only tracked steps are verified"
    try:
        verdict = verify_step(storage, overview.layout, checkpoint, watched.choose, watched.read)
    finally:
        watched.end()
    if verdict.good and not verdict.gone:
        return verdict
    now = look(storage).ledger.at(step)
    if now is not None and now.id != checkpoint.id:  # rolled back, and saved again
        return replace(verdict, gone=True)
    if verdict.gone and now is not None:
        missing = f"{overview.layout.published_name(step)} is not there, and the journal tracks it"
        return Verdict(step, (missing,))
    return verdict


def _way_out(verdicts: Sequence[Verdict], tracked: Sequence[int]) -> list[str]:
    """Lines below the verdicts, if one is damaged. ``tracked``: all such steps, the newest first."""
    damaged = {verdict.step for verdict in verdicts if not verdict.good and not verdict.gone}
    if not damaged:
        return []
    latest = tracked[0]
    good = [verdict.step for verdict in verdicts if verdict.good and not verdict.gone]
    if latest not in damaged:
        remedy = f"nothing now, if the latest is good: ckptfsm verify {latest}"
    elif good:
        remedy = f"start the job, or: ckptfsm rollback {max(good)}"
    elif len(verdicts) < len(tracked):
        remedy = "see which one is good: ckptfsm verify --all"
    else:
        remedy = "put a good copy back: no checkpoint of this root is good"
    return [f"    do: {remedy}", f"    see: {RUNBOOK}checkpoint-damaged.md"]


def _lines(verdict: Verdict, seconds: float) -> list[str]:
    name = f"step {verdict.step}"
    if verdict.gone:
        return [f"{name}: gone from its name meanwhile: not judged"]
    if verdict.problems:
        return [f"{name}: DAMAGED", *(f"  {problem}" for problem in verdict.problems)]
    size, rate = verdict.bytes_read, verdict.bytes_read / max(seconds, 1e-6)
    if not verdict.digests:
        return [
            f"{name}: good in form, {verdict.files} files; without a manifest no digest is known"
        ]
    took = f"{format_duration(seconds)} ({format_bytes(int(rate))}/s)"
    return [f"{name}: good, {verdict.files} files, {format_bytes(size)} read in {took}"]
