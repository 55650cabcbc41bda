"""``ckptfsm demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptfsm.adapters.versions import require


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: ckptfsm demo --steps 20")(demo)


def demo(
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 40,
    ranks: Annotated[int, typer.Option(help="Processes.")] = 2,
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.")] = 2,
    save_every: Annotated[int, typer.Option(help="Steps between saves.")] = 5,
    keep: Annotated[int, typer.Option(help="Newest checkpoints to keep.")] = 2,
    root: Annotated[
        Path | None, typer.Option(help="An empty directory; runs/demo, emptied, if left out.")
    ] = None,
) -> None:
    """Train a small GPT, kill it in the middle of a save, recover, check. Needs ckptfsm[megatron]."""
    require("torch", "megatron-core", extra="megatron")
    from ckptfsm.demo.run import DemoFailed, DemoOptions, run_demo

    try:
        status = run_demo(DemoOptions(steps, ranks, tp, save_every, keep, root))
    except DemoFailed as error:
        typer.echo(f"FAILED: {error}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(status)
