"""The share of its host that this process may use: memory and processors. No torch.

The host, or any of the process's cgroups (version 2) may be the limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")


def available_bytes(cgroups: Path = _CGROUPS, proc: Path = _PROC) -> int:
    """The memory that this process can take before the host, or one of its cgroups, is full.

    Page cache counts as free. Raises ``OSError`` if the kernel does not tell.
    """
    lines = (proc / "meminfo").read_text().splitlines()
    [host] = (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return min([host, *_left_in_cgroups(cgroups, proc)])


def processors(cgroups: Path = _CGROUPS, proc: Path = _PROC) -> int:
    """The processors that this process can keep busy, at least 1.

    A container with a quota of 4 processors on a host of 64 is stopped for most of each period if more
    of its threads run. Raises ``OSError`` if the kernel does not tell.
    """
    quotas = (
        line.split()
        for directory in _limited_by(cgroups, proc, "cpu.max")
        for line in (directory / "cpu.max").read_text().splitlines()
    )
    shares = [int(quota) // int(period) for quota, period in quotas if quota != "max"]
    return max(1, min([len(os.sched_getaffinity(0)), *shares]))


def ranks_of_this_host() -> int:
    """The number of ranks that share this host's memory, as a launcher tells it; 1 if none does.

    torchrun, Ray Train and verl set ``LOCAL_WORLD_SIZE``.
    """
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(told)) if told.isdecimal() else 1


def _left_in_cgroups(cgroups: Path, proc: Path) -> Iterator[int]:
    """The bytes left under each limit of this process's cgroups."""
    for directory in _limited_by(cgroups, proc, "memory.max"):
        allowed = (directory / "memory.max").read_text().strip()
        if allowed != "max":
            yield int(allowed) - _used_in(directory)


def _used_in(directory: Path) -> int:
    used = int((directory / "memory.current").read_text())
    stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    return used - int(stat["inactive_file"]) - int(stat["active_file"])


def _limited_by(cgroups: Path, proc: Path, file: str) -> Iterator[Path]:
    """The cgroup of this process, and those above it, that have the file of a limit."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except FileNotFoundError:  # a kernel without cgroups
        return
    for line in lines:
        number, _, path = line.partition("::")
        if number != "0":
            continue
        place = cgroups / path.strip("/")
        for directory in (place, *place.parents):
            if directory.is_relative_to(cgroups) and (directory / file).is_file():
                yield directory
