"""The commands of ``ckptfsm``, and their exit statuses.

| status | meaning |
| --- | --- |
| 0 | done, and nothing was found wrong |
| 1 | something is wrong with the root, or the command could not do its work |
| 2 | bad arguments, or a directory that is no root |
| 3 | refused: a living owner, or a rule that keeps a checkpoint |
| 130 | ended by Ctrl-C |

Rules: commands that read take no lock and write nothing. Names from disk are printed without
characters that move a cursor. Errors name the file and the reason, on standard error.
"""

from __future__ import annotations

from collections.abc import Sequence

import typer

from ckptfsm.cli import changing, demo_command, examining, exporting, quarantine, reading, verifying
from ckptfsm.cli.terminal import say_error
from ckptfsm.core.errors import (
    CkptFsmError,
    ConfigError,
    RootBusy,
    SaveRefused,
    StepNotFoundError,
)

DONE, WRONG, BAD_CALL, REFUSED, INTERRUPTED = 0, 1, 2, 3, 130

app = typer.Typer(
    name="ckptfsm",
    help="See the checkpoints of a training job, and what happened to them.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
reading.add_to(app)
verifying.add_to(app)
examining.add_to(app)
exporting.add_to(app)
changing.add_to(app)
quarantine.add_to(app)
demo_command.add_to(app)


def run(arguments: Sequence[str]) -> int:
    """Run a command. Returns the exit status."""
    try:
        app(list(arguments), prog_name="ckptfsm")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else DONE
    except (CkptFsmError, OSError) as error:
        say_error(error)
        return _status_of(error)
    return DONE


def _status_of(error: Exception) -> int:
    if isinstance(error, (RootBusy, SaveRefused)):
        return REFUSED
    missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
    return BAD_CALL if missing or isinstance(error, (ConfigError, StepNotFoundError)) else WRONG
