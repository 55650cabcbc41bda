"""The share of its host that this process may use: memory and processors. No torch.

The host may be the limit, or any of the process's cgroups, of version 1 or 2. A limit that cannot be
read does not count: a save must not fail because of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
_FREE_FRACTION = 0.5  # of the free memory, for the copies of all ranks of the host
_MEMORY_FILES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


def available_bytes(cgroups: Path = _CGROUPS, proc: Path = _PROC) -> int:
    """The memory that this process can take before the host, or one of its cgroups, is full.

    Page cache counts as free, where the kernel tells of it.
    """
    return max(0, min([_left_on_host(proc), *_left_in_cgroups(cgroups, proc)]))


def affordable_bytes(free_bytes: Callable[[], int] = available_bytes) -> int:
    """The memory that this process may keep for copies of its state, beside its host's other ranks."""
    return int(free_bytes() * _FREE_FRACTION / ranks_of_this_host())


def processors(cgroups: Path = _CGROUPS, proc: Path = _PROC) -> int:
    """The processors that this process can keep busy, at least 1.

    A container with a quota of 4 processors on a host of 64 is stopped for most of each period if more
    of its threads run.
    """
    try:
        allowed = len(os.sched_getaffinity(0))
    except OSError:  # a seccomp profile
        allowed = os.cpu_count() or 1
    return max(1, min([allowed, *_quotas(cgroups, proc)]))


def ranks_of_this_host() -> int:
    """The number of ranks that share this host's memory, as a launcher tells it; 1 if none does.

    torchrun, Ray Train and verl set ``LOCAL_WORLD_SIZE``.
    """
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(told)) if told.isdecimal() else 1


def _left_on_host(proc: Path) -> int:
    """The bytes left on this host. A container may have no ``/proc``, or a broken one."""
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        number, *_ = (*value.split(), "")
        if name == "MemAvailable" and number.isdecimal():
            return int(number) << 10
    # By a system call: the free pages alone, so rather too few.
    return max(0, os.sysconf("SC_AVPHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")


def _left_in_cgroups(cgroups: Path, proc: Path) -> Iterator[int]:
    """The bytes left under each limit of this process's cgroups."""
    for directory in _cgroups_of("memory", cgroups, proc):
        for limit, used, page_cache in _MEMORY_FILES:
            allowed = _first_line(directory / limit)
            if allowed.isdecimal():
                stat = dict(line.partition(" ")[::2] for line in _lines(directory / "memory.stat"))
                cached = sum(_number(stat.get(name, "")) for name in page_cache)
                yield int(allowed) - _number(_first_line(directory / used)) + cached


def _quotas(cgroups: Path, proc: Path) -> Iterator[int]:
    """The whole processors under each limit of this process's cgroups."""
    for directory in _cgroups_of("cpu", cgroups, proc):
        both = _first_line(directory / "cpu.max").split()  # version 2
        old = (_first_line(directory / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        quota, period, *_ = (*both, *old)
        if quota.isdecimal() and _number(period):
            yield int(quota) // int(period)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _first_line(file: Path) -> str:
    return next(iter(_lines(file)), "")


def _lines(file: Path) -> list[str]:
    """The lines of a file; none if there is no such file, or if it cannot be read."""
    try:
        return file.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _cgroups_of(controller: str, cgroups: Path, proc: Path) -> Iterator[Path]:
    """The cgroups of this process, and those above them, with or without files of the controller.

    Some hosts mount ``cpuacct,cpu`` under another name; a link with the controller's name leads there.
    """
    for line in _lines(proc / "self/cgroup"):
        number, controllers, path, *_ = (*line.split(":", 2), "", "")
        if number == "0":
            tops = [cgroups]
        elif controller in controllers.split(","):
            tops = [cgroups / controllers, cgroups / controller]
        else:
            continue
        for top in tops:
            # A container sees its cgroup as the topmost, all the same.
            place = top / path.strip("/")
            yield from (each for each in (place, *place.parents) if each.is_relative_to(top))
