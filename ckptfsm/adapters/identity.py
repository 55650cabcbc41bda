"""The running process, as a record on disk names it."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

from ckptfsm.core.ports import Identity


def this_process() -> Identity:
    """The running process: its start time distinguishes it from an earlier one with the same pid."""
    try:
        namespace = str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:  # the kernel does not tell
        namespace = ""
    started, nonce = _started("self"), uuid.uuid4().hex
    return Identity(socket.gethostname(), os.getpid(), started, nonce, namespace)


def is_stopped(pid: int) -> bool:
    """True if a process of this machine is stopped, by SIGSTOP or a debugger: it does nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def _started(process: int | str) -> str:
    """Boot and start time of a process on this machine; "" if there is none, or it is hidden.

    ``process`` is ``"self"`` for the running one: ``/proc`` may be that of another pid namespace.
    """
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{fields[19]}"


def boot_of(started: str) -> str:
    """The boot in the start of a process, as its record on disk names it."""
    return started.partition(":")[0]


def is_hidden(pid: int) -> bool:
    """True if another user's process has this number, and ``/proc`` does not show it (hidepid)."""
    try:
        os.kill(pid, 0)  # sends nothing
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return False
