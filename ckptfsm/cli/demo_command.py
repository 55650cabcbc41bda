"""``ckptfsm demo``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from ckptfsm.adapters.versions import require


def add_to(app: typer.Typer) -> None:
    app.command(epilog="Example: ckptfsm demo --steps 20")(demo)


def demo(
    trainer: Annotated[
        Literal["megatron", "fsdp2"] | None,
        typer.Option(help="Whose training; fsdp2, if left out where megatron-core is missing."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 40,
    ranks: Annotated[int, typer.Option(help="Processes.")] = 2,
    tp: Annotated[
        int | None, typer.Option(help="Megatron's tensor-parallel size; 2, if left out.")
    ] = None,
    save_every: Annotated[int, typer.Option(help="Steps between saves.")] = 5,
    keep: Annotated[int, typer.Option(help="Newest checkpoints to keep.")] = 2,
    root: Annotated[
        Path | None, typer.Option(help="An empty directory; runs/demo, emptied, if left out.")
    ] = None,
) -> None:
    """Train a small GPT, kill it in the middle of a save, recover, check.

    Needs ckptfsm[megatron], or ckptfsm[torch] with --trainer fsdp2.
    """
    if trainer is None:
        trainer = "megatron" if _has_megatron_core() else "fsdp2"
        if trainer == "fsdp2":
            typer.echo(
                "megatron-core is not installed: --trainer fsdp2 needs torch alone", err=True
            )
    if trainer == "megatron":
        require("torch", "megatron-core", extra="megatron")
    else:
        require("torch", extra="torch")
    from ckptfsm.demo.run import DemoFailed, DemoOptions, run_demo

    if tp is None:
        tp = 2 if trainer == "megatron" else 1
    try:
        status = run_demo(DemoOptions(trainer, steps, ranks, tp, save_every, keep, root))
    except DemoFailed as error:
        typer.echo(f"FAILED: {error}", err=True)
        raise typer.Exit(1) from None
    raise typer.Exit(status)


def _has_megatron_core() -> bool:
    try:
        return find_spec("megatron.core") is not None
    except ModuleNotFoundError:  # there is no megatron at all
        return False
