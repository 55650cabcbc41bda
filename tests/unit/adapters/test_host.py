"""The memory and the processors that a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptfsm.adapters.host import available_bytes, processors

GIB = 1 << 30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    made = tmp_path / "proc"
    (made / "self").mkdir(parents=True)
    (made / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   8388608 kB\nBuffers: 1 kB\n")
    (made / "self/cgroup").write_text("4:memory:/old\n0::/job/step\n")
    return made


def limit(directory: Path, allowed: str, used: int = 0, cached: int = 0) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{allowed}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\nactive_file 0\n")


def test_without_cgroups_the_host_decides(tmp_path, proc):
    """Catches: a host without cgroups of version 2 that can save nothing."""
    assert available_bytes(tmp_path / "none", proc) == 8 * GIB
    (proc / "self/cgroup").unlink()  # a kernel that was built without any
    assert available_bytes(tmp_path / "none", proc) == 8 * GIB


@pytest.mark.parametrize(
    "meminfo", [None, b"", b"MemTotal: 9 kB\n", b"MemAvailable: much\n", b"MemAvailable:", b"\xff"]
)
def test_without_meminfo_the_free_pages_count(tmp_path, proc, monkeypatch, meminfo):
    """Catches: a save that fails because a limit cannot be read; memory without a limit."""
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 5, "SC_PAGE_SIZE": 4096}.__getitem__)
    (proc / "meminfo").unlink()
    if meminfo is not None:
        (proc / "meminfo").write_bytes(meminfo)
    assert available_bytes(tmp_path / "none", proc) == 5 * 4096
    (proc / "self/cgroup").write_text("\nnot a line\n0::\n")
    assert available_bytes(tmp_path / "none", proc) == 5 * 4096


def test_processors_need_no_affinity(tmp_path, proc, monkeypatch):
    """Catches: a save that fails under a seccomp profile."""

    def refuse(pid: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    assert processors(tmp_path / "none", proc) == (os.cpu_count() or 1)


def test_the_least_of_all_limits_counts(tmp_path, proc):
    """Catches: a container that is ended because its host has memory; a cgroup above that is full;
    page cache that counts as used."""
    cgroups = tmp_path / "cgroup"
    limit(cgroups / "job/step", "max")
    assert available_bytes(cgroups, proc) == 8 * GIB
    limit(cgroups / "job", str(4 * GIB), used=3 * GIB, cached=1 * GIB)
    assert available_bytes(cgroups, proc) == 2 * GIB
    limit(cgroups / "job/step", str(GIB))
    assert available_bytes(cgroups, proc) == GIB
    limit(cgroups, str(GIB), used=GIB - 5)
    assert available_bytes(cgroups, proc) == 5


def test_limits_of_cgroups_of_version_1_count(tmp_path, proc, monkeypatch):
    """Catches: a host with old cgroups, whose containers are ended at a save."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    (proc / "self/cgroup").write_text("4:memory:/old\n3:cpu,cpuacct:/docker/5\n0::/job/step\n")
    memory, cpu = tmp_path / "cgroup/memory/old", tmp_path / "cgroup/cpu,cpuacct"
    memory.mkdir(parents=True)
    cpu.mkdir()  # a container sees its cgroup as the topmost
    (memory / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (memory / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    lines = f"inactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file 1\n"
    (memory / "memory.stat").write_text(lines)
    (cpu / "cpu.cfs_quota_us").write_text("300000\n")
    (cpu / "cpu.cfs_period_us").write_text("100000\n")
    assert available_bytes(tmp_path / "cgroup", proc) == 2 * GIB + 1
    assert processors(tmp_path / "cgroup", proc) == 3
    (cpu / "cpu.cfs_quota_us").write_text("-1\n")
    assert processors(tmp_path / "cgroup", proc) == 64


def test_a_limit_that_cannot_be_read_does_not_count(tmp_path, proc, monkeypatch):
    """Found by review. Catches: a sandbox with some of a kernel's files, where each save fails."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    (proc / "self/cgroup").write_text("4:memory:/\n3:cpu:/\n0::/\n")
    cgroups = tmp_path / "cgroup"
    (cgroups / "memory").mkdir(parents=True)
    (cgroups / "cpu").mkdir()
    (cgroups / "cpu/cpu.cfs_quota_us").write_text("300000\n")  # without its period
    (cgroups / "cpu.max").write_text("max\n")
    (cgroups / "memory.max").mkdir()  # cannot be read
    assert processors(cgroups, proc) == 64
    assert available_bytes(cgroups, proc) == 8 * GIB
    (cgroups / "memory/memory.limit_in_bytes").write_text(f"{GIB}\n")
    assert available_bytes(cgroups, proc) == GIB
    (cgroups / "memory/memory.stat").write_text("cache 5\n")
    (cgroups / "memory/memory.usage_in_bytes").write_text("7\n")
    assert available_bytes(cgroups, proc) == GIB - 7


def test_a_cgroup_above_its_limit_has_nothing_left(tmp_path, proc):
    """Found by review. Catches: a warning that a copy may take a negative number of bytes."""
    limit(tmp_path / "cgroup/job", str(GIB), used=GIB + 1)
    assert available_bytes(tmp_path / "cgroup", proc) == 0


def test_controllers_that_are_mounted_under_another_name_count(tmp_path, proc, monkeypatch):
    """Found by review. Catches: a kernel that tells ``cpuacct,cpu``, with ``cpu,cpuacct`` mounted."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    (proc / "self/cgroup").write_text("3:cpuacct,cpu:/docker/5\n")
    mounted = tmp_path / "cgroup/cpu,cpuacct"
    mounted.mkdir(parents=True)
    (tmp_path / "cgroup/cpu").symlink_to(mounted)
    (mounted / "cpu.cfs_quota_us").write_text("300000\n")
    (mounted / "cpu.cfs_period_us").write_text("100000\n")
    assert processors(tmp_path / "cgroup", proc) == 3


def test_this_process_can_take_memory():
    """Catches: a format of this kernel that is not read."""
    assert 0 < available_bytes() < 1 << 50


def test_the_quota_of_a_container_limits_its_processors(tmp_path, proc, monkeypatch):
    """Catches: eight threads of a copy that are stopped together, because the container may use two."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    cgroups = tmp_path / "cgroup"
    assert processors(cgroups, proc) == 64
    (cgroups / "job/step").mkdir(parents=True)
    (cgroups / "job/step/cpu.max").write_text("max 100000\n")
    (cgroups / "job/cpu.max").write_text("450000 100000\n")
    assert processors(cgroups, proc) == 4
    (cgroups / "job/step/cpu.max").write_text("5000 100000\n")
    assert processors(cgroups, proc) == 1


def test_this_process_has_processors():
    """Catches: a format of this kernel that is not read."""
    assert 1 <= processors() <= len(os.sched_getaffinity(0))
