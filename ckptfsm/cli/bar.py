"""The bar of a command that reads for long."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


def progress_bar() -> Progress:
    """A bar on standard error, if that is a terminal: bytes, bytes per second, time left."""
    console = Console(stderr=True)
    console.quiet = not console.is_terminal
    columns = (
        TextColumn("{task.description}"),
        BarColumn(20),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=console.quiet)
