"""``python -m benchmarks``: run the groups and show their figures, as a table or as JSON."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.measure import Figure, Options, as_json, as_table, environment

_DEFAULTS = Options(Path())
OTHERS = ("peers", "fsdp2", "device", "places")  # not by default: they take long, or need a GPU
GROUPS = (
    "saving",
    "engines",
    "two_ranks",
    "finishing",
    "restoring",
    "memory",
    "polling",
    "transition",
    "recovery",
    "scale",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Nothing is judged by exit status: a missed target is a figure."""
    given = _parse(arguments)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    groups: dict[str, list[Figure]] = {}
    about: dict[str, object] = {}
    for name in given.only or GROUPS:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="ckptfsm-bench-", dir=given.dir) as work:
            options = Options(
                Path(work),
                given.bytes,
                given.pairs,
                given.checkpoints,
                given.ranks,
                given.busy,
                device=given.device,
                alone=given.alone,
                within_s=given.within,
            )
            about = about or environment(options)
            groups[name] = import_module(f"benchmarks.{name}").run(options)
    print((as_json if given.json else as_table)(about, groups))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--json", action="store_true", help="JSON with every sample")
    parser.add_argument("--bytes", type=_positive, default=1 << 30, help="size of the saved state")
    parser.add_argument("--pairs", type=_positive, default=16, help="samples per side")
    parser.add_argument(
        "--checkpoints", type=_positive, default=10_000, help="checkpoints in the root to recover"
    )
    parser.add_argument(
        "--ranks", type=_ranks, default=_DEFAULTS.ranks, help="simulated ranks: 1000,10000,..."
    )
    parser.add_argument(
        "--busy",
        type=float,
        default=_DEFAULTS.busy_s,
        help="seconds that ranks compute after a save",
    )
    parser.add_argument("--device", default=_DEFAULTS.device, help="of the group device")
    parser.add_argument("--alone", action="store_true", help="the group device without peers")
    parser.add_argument(
        "--within",
        type=float,
        default=_DEFAULTS.within_s,
        help="seconds after which no other round of saves begins",
    )
    parser.add_argument(
        "--only", choices=(*GROUPS, *OTHERS), action="append", help="run this group only"
    )
    parser.add_argument(
        "--dir", type=Path, help="where to write (default: the temporary directory)"
    )
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _ranks(text: str) -> tuple[int, ...]:
    """Numbers of ranks, in growing order."""
    return tuple(sorted(_positive(number) for number in text.split(",")))


if __name__ == "__main__":  # stock spawns a manager process, which imports this module again
    sys.exit(main())
