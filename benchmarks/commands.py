"""Processor time of the command line: its start, and a list of a large root. Each is a process."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

from benchmarks.measure import MS, Figure, in_unit

_LS_TARGET_MS = 1000.0  # of 10,000 checkpoints


def figures(root: Path, count: int, pairs: int) -> list[Figure]:
    """The figures for a root of ``count`` checkpoints (ms)."""
    start = [_cpu_s("--help") for _ in range(pairs)]
    listing = [_cpu_s("ls", "-r", str(root)) for _ in range(pairs)]
    return [
        in_unit("ckptfsm --help", "ms", MS, start),
        in_unit(f"ckptfsm ls of {count}", "ms", MS, listing, _LS_TARGET_MS),
    ]


def _cpu_s(*arguments: str) -> float:
    """Processor time of one command. Raises ``CalledProcessError`` if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "ckptfsm.cli", *arguments],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "NO_COLOR": "1"},
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
