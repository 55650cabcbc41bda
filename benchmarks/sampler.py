"""A light process that watches the memory of another process and its writers. Standard library only.

    python -I benchmarks/sampler.py PID

The sampler answers each line on standard input with a line. At ``know`` it notes the processes
below PID, and writers are all later ones. From ``begin`` on it samples ``smaps_rollup`` of PID (the
trainer) and of the writers, with a short pause between samples. At ``end`` it takes one more sample
and answers with the peaks, as JSON. The sampler ends with its input.

The processes of one sample are read one after the other, so a page that changes hands meanwhile may
be counted twice or not at all.
"""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path

_PAUSE_S = 0.01
_KIB = 1024
_FIELDS = ("Pss", "Pss_Anon", "Anonymous", "Private_Clean", "Private_Dirty")


def main(root: int) -> None:
    """Answer ``know``, ``begin`` and ``end`` until the input ends."""
    known = {os.getpid()}
    while word := _next_line():
        if word == "know":
            known = {*below(root), os.getpid()}
            _say("noted")
            continue
        peaks = dict.fromkeys(("together", "writers_only", "private"), 0)
        before = read_rollup(root)["Pss"]
        _say("ready")
        samples, ended = 0, False
        while not ended:
            ended = bool(select.select([sys.stdin], [], [], _PAUSE_S)[0])
            _take(peaks, root, known)
            samples += 1
        if _next_line() != "end":
            return
        helpers = [read_rollup(pid)["Pss"] for pid in known if pid != os.getpid()]
        others = {"before": before, "helpers": sum(helpers), "samples": samples}
        _say(json.dumps({**peaks, **others}))


def _take(peaks: dict[str, int], root: int, known: set[int]) -> None:
    """Take a sample. Anonymous memory beyond the trainer's is held by the writers only."""
    trainer = read_rollup(root)
    writers = [read_rollup(pid) for pid in below(root) if pid not in known]
    sums = {key: sum(w[key] for w in writers) for key in trainer}
    now = {
        "together": trainer["Pss"] + sums["Pss"],
        "writers_only": trainer["Pss_Anon"] + sums["Pss_Anon"] - trainer["Anonymous"],
        "private": sums["Private_Clean"] + sums["Private_Dirty"],
    }
    for key, value in now.items():
        peaks[key] = max(peaks[key], value)


def below(pid: int) -> list[int]:
    """Every living descendant of a process."""
    found: list[int] = []
    pending = [pid]
    while pending:
        children = _children(pending.pop())
        found += children
        pending += children
    return found


def _children(pid: int) -> list[int]:
    numbers: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            numbers += [int(word) for word in (task / "children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return numbers  # the process ended meanwhile
    return numbers


def read_rollup(pid: int) -> dict[str, int]:
    """The memory of a process in bytes; all zero once it has ended."""
    sizes = dict.fromkeys(_FIELDS, 0)
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return sizes
    for line in lines[1:]:
        key, _, value = line.partition(":")
        if key in sizes:
            sizes[key] = int(value.split()[0]) * _KIB
    return sizes


def _next_line() -> str:
    """Read a line, unbuffered: ``select`` must see every byte that was not read."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1)
        if not piece:
            break
        line += piece
    return line.decode().strip()


def _say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
