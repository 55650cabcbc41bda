"""The commands of ``ckptfsm``, and their exit statuses.

| status | meaning |
| --- | --- |
| 0 | done; ``doctor``: nothing is broken |
| 1 | something is broken, so that a start cannot repair it, or the command could not do its work |
| 2 | bad arguments, or a directory that is no root |
| 3 | refused: a living owner, or a rule that keeps a checkpoint; or the outcome is not known |
| 130 | ended by Ctrl-C |

Commands that read take no lock and write nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from ckptfsm.core.errors import (
    CkptFsmError,
    ConfigError,
    OutcomeUnknown,
    RootBusy,
    SaveRefused,
    StepNotFoundError,
)

DONE, WRONG, BAD_CALL, REFUSED, INTERRUPTED = 0, 1, 2, 3, 130

# The module of each command, which is imported when the command is called, and a line for the list.
COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "ls": ("reading", "List the checkpoints, and the reason that keeps each."),
        "show": ("reading", "Show every attempt at a step: states, times, parts, end."),
        "tree": ("reading", "Show the directories of a root, with the meaning of each."),
        "log": ("reading", "Print the journal as sentences, oldest first."),
        "explain": ("reading", "Explain why a checkpoint is kept, and when it may go."),
        "verify": ("verifying", "Compare checkpoints with the digests in their manifests."),
        "doctor": ("examining", "Find damage, and tell the way out."),
        "runbook": ("examining", "Print what to do about a finding of the doctor."),
        "timeline": ("exporting", "Draw the life of each checkpoint as a page."),
        "trace": ("exporting", "Check the journal against the table of the life cycle."),
        "export": ("exporting", "Print metrics of a root in the format of Prometheus."),
        "pin": ("changing", "Keep a checkpoint from pruning until it is unpinned."),
        "unpin": ("changing", "End a pin: retention decides anew."),
        "prune": ("changing", "Delete checkpoints that retention no longer keeps."),
        "rollback": ("changing", "Make a step the latest again."),
        "lease": ("changing", "Keep a step while this command runs, and print its path."),
        "record-metrics": ("changing", "Add metrics to a checkpoint after its save."),
        "adopt": ("quarantine", "Take a complete checkpoint from elsewhere into service."),
        "fetch": ("fetching", "Bring a copy of a checkpoint back into a root."),
        "quarantine": ("quarantine", "List, restore or drop directories that were withdrawn."),
        "demo": ("demo_command", "Train a small GPT, kill it during a save, and recover."),
    }
)


class _Commands(TyperGroup):
    """The commands. Their list is of stand-ins; the real one is imported when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, stand_in, rest = super().resolve_command(ctx, args)
        return name, stand_in if name is None else command(name), rest


def command(name: str) -> Any:
    """The command of this name, as its module declares it."""
    return _declared_in(COMMANDS[name][0])[name]


@cache
def _declared_in(module: str) -> Mapping[str, Any]:
    declared = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    import_module(f"ckptfsm.cli.{module}").add_to(declared)
    return get_group(declared).commands


def _stand_in() -> None:
    """Stands in the list for a command."""


_HELP = "See the checkpoints of a training job, and what happened to them."
app = typer.Typer(
    name="ckptfsm",
    cls=_Commands,
    help=_HELP,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(wanted: bool) -> None:
    if wanted:
        from ckptfsm.adapters.versions import installed

        typer.echo(f"ckptfsm {installed('ckptfsm')}")
        raise typer.Exit


@app.callback(help=_HELP)
def _options(
    asked: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """The options of ``ckptfsm`` itself."""


for _name, (_, _line) in COMMANDS.items():
    app.command(_name, help=_line)(_stand_in)


def run(arguments: Sequence[str]) -> int:
    """Run a command. Returns the exit status."""
    try:
        status = app(list(arguments), prog_name="ckptfsm")
    except SystemExit as error:
        status = error.code
    except (CkptFsmError, OSError) as error:
        from ckptfsm.cli.terminal import say_error
        from ckptfsm.disk.durable import is_refused, storage_error

        if isinstance(error, OSError) and is_refused(error):
            error = storage_error(error, "open")
        say_error(error)
        return _status_of(error)
    return status if isinstance(status, int) else DONE


def _status_of(error: Exception) -> int:
    if isinstance(error, (RootBusy, SaveRefused, OutcomeUnknown)):
        return REFUSED
    missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
    return BAD_CALL if missing or isinstance(error, (ConfigError, StepNotFoundError)) else WRONG
