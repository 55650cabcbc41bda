"""The command line: ``ckptfsm demo``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ckptfsm.adapters.versions import require
from ckptfsm.core.errors import CkptFsmError


def main(argv: list[str] | None = None) -> int:
    """Run a command. Returns the exit status: 0, 1 for a broken promise, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="ckptfsm", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo", help="train a small GPT, kill it in the middle of a save, recover, check"
    )
    demo.add_argument("--steps", type=int, default=40, help="optimizer steps (default 40)")
    demo.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    demo.add_argument("--tp", type=int, default=2, help="tensor-parallel size (default 2)")
    demo.add_argument("--save-every", type=int, default=5, help="steps between saves (default 5)")
    demo.add_argument("--keep", type=int, default=2, help="newest checkpoints to keep (default 2)")
    demo.add_argument("--root", type=Path, help="empty directory (default runs/demo, emptied)")
    options = parser.parse_args(argv)
    return _demo(options)


def _demo(options: argparse.Namespace) -> int:
    from ckptfsm.demo.run import DemoFailed, DemoOptions, run_demo

    try:
        require("torch", "megatron-core", extra="megatron")
        return run_demo(
            DemoOptions(
                options.steps,
                options.ranks,
                options.tp,
                options.save_every,
                options.keep,
                options.root,
            )
        )
    except DemoFailed as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    except CkptFsmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
