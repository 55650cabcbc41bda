"""Commands that make files of a journal for other tools: ``timeline``, ``trace``, ``export``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.cli.reading import HERE, Place, Root, opened
from ckptfsm.cli.terminal import put
from ckptfsm.core.errors import ConfigError
from ckptfsm.core.layout import LAYOUTS, PRIVATE, TRACKER
from ckptfsm.core.metrics import text_of
from ckptfsm.disk.job_records import read_records
from ckptfsm.disk.journal import entered_at
from ckptfsm.disk.overview import look
from ckptfsm.views.chrome_trace import chrome_trace
from ckptfsm.views.listing import adopted_contents, lags_of
from ckptfsm.views.metrics import metrics_of
from ckptfsm.views.picture import render_html
from ckptfsm.views.reading import read_lives
from ckptfsm.views.timeline import clean

Output = Annotated[Path | None, typer.Option("--output", "-o", help="The file to write.")]


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: ckptfsm timeline -r runs/demo -o lives.html")(timeline)
    app.command(epilog="Example: ckptfsm trace -r runs/demo -o trace.json")(trace)
    app.command(epilog="Example: ckptfsm export --prometheus -r runs/demo")(export)


def timeline(
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")],
    place: Place = None,
    root: Root = HERE,
) -> None:
    """Draw the life of each checkpoint: one page without scripts, a lane for each attempt."""
    root = place or root
    with opened(root) as storage:
        lives, name = read_lives(storage), storage.root
    _write(root, output, render_html(lives, name))
    put([f"{output}: {len(lives)} attempts"])


def trace(place: Place = None, root: Root = HERE, output: Output = None) -> None:
    """Check the journal against the table of the life cycle; with -o, write a trace for Perfetto.

    Exit status 1 if a transition is no row of the table.
    """
    root = place or root
    with opened(root) as storage:
        look(storage)  # replays the newest segment, move by move
        lives = read_lives(storage)
    moves = sum(len(life.entered) for life in lives)
    if output is not None:
        _write(root, output, json.dumps(chrome_trace(lives)))
    put([f"{len(lives)} attempts, {moves} states entered: all moves are rows of the table"])


def export(
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="The text format of Prometheus.")
    ] = False,
    place: Place = None,
    root: Root = HERE,
    output: Output = None,
) -> None:
    """Print metrics of a root, say for the textfile collector of a node exporter."""
    if not prometheus:
        raise typer.BadParameter("choose a format: --prometheus")
    root = place or root
    with opened(root) as storage:
        overview, now = look(storage), SystemClock().unix()
        metrics = metrics_of(
            overview,
            read_lives(storage),
            now,
            storage.free_bytes(),
            read_records(storage),
            adopted_contents(storage, overview),
            lags_of(overview, entered_at(storage, overview.history), now),
        )
    text = text_of(metrics, {"root": clean(overview.root)})
    if output is None:
        sys.stdout.write(text)
    else:
        _write(root, output, text)


def _write(root: Path, output: Path, text: str) -> None:
    """Write a file anew, complete at its name: a collector may read at any time.

    A device or a pipe is written to. Raises ``ConfigError`` for a file of the library.
    """
    place, base = output.resolve(), root.resolve()
    if place.is_relative_to(base) and place != base and _is_ours(place.relative_to(base).parts[0]):
        raise ConfigError("the output would lie among the files of the library", file=str(output))
    if output.exists() and not output.is_file():
        output.write_text(text, encoding="utf-8")
        return
    partial = place.with_name(f".{place.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(place)


def _is_ours(name: str) -> bool:
    """True for a name in a root that the library, or a trainer's loader, reads."""
    is_step = any(layout.is_published(name) for layout in LAYOUTS.values())
    return is_step or name in (PRIVATE, TRACKER)
