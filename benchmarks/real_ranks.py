"""Real processes as the ranks of a job on this machine, for the groups that need more than one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RANKS = 2
_LOOK_S = 0.05
_RESULT = "result.json"


def run_ranks(module: str, work: Path, *arguments: object) -> Any:
    """Run ``python -m module WORK ARGUMENTS...`` on each rank; the result is what rank 0 reports."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", module, str(work), *map(str, arguments)]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    ranks = [
        subprocess.Popen(command, env={**os.environ, **where, "RANK": str(rank)})
        for rank in range(RANKS)
    ]
    try:
        _wait_for_all(ranks)
    finally:
        for rank in ranks:
            rank.kill()  # the other ranks of a failed one may wait for it
            rank.wait()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("a rank of the benchmark failed")
    return json.loads((work / _RESULT).read_text(encoding="utf-8"))


def _wait_for_all(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all ranks have ended, or a rank has failed."""
    while True:
        codes = [rank.poll() for rank in ranks]
        if None not in codes or any(codes):
            return
        time.sleep(_LOOK_S)


def report(work: Path, result: object) -> None:
    """Hand a result to ``run_ranks``, as JSON: a file, because a child of stock may hold a pipe open."""
    (work / _RESULT).write_text(json.dumps(result), encoding="utf-8")
