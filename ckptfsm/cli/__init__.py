"""The command line: ``ckptfsm --help``. Comes with every installation, and needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status, see ``ckptfsm.cli.app``."""
    try:
        from ckptfsm.cli.app import run

        return run(sys.argv[1:] if arguments is None else arguments)
    except ModuleNotFoundError as error:  # installed without what it depends on
        if error.name not in ("typer", "rich"):
            raise
        sys.stderr.write(f"error: {error.name} is missing: pip install typer rich\n")
        return 2
    except KeyboardInterrupt:  # while the command is made ready
        return 130
