"""The command line: ``ckptfsm --help``. Needs the extra ``ckptfsm[cli]``, and no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_WAY_OUT = "the command line needs typer, rich and prometheus-client: pip install 'ckptfsm[cli]'"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status, see ``ckptfsm.cli.app``."""
    try:
        from ckptfsm.cli.app import run

        return run(sys.argv[1:] if arguments is None else arguments)
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "prometheus_client"):
            raise
        sys.stderr.write(f"error: {_WAY_OUT}\n")
        return 2
    except KeyboardInterrupt:  # while the command is made ready
        return 130
