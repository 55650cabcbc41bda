"""A writer process in a container that refuses ``process_vm_readv``, without the container."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from ckptfsm.adapters.memory import MemoryOf
from ckptfsm.adapters.spawn import Spawned
from ckptfsm.writers import write_engine, write_process

if TYPE_CHECKING:
    import pytest


def refuse_reads(patch: pytest.MonkeyPatch) -> None:
    """Let no writer process that starts from now on read memory by its address."""
    patch.setattr(write_engine, "Spawned", _spawned)


def _spawned(module: str, function: str) -> Spawned:
    assert (module, function) == ("ckptfsm.writers.write_process", "main")
    return Spawned(__name__, "main")


def main() -> None:
    """The writer process, with a kernel that refuses."""
    MemoryOf.read = _refused  # type: ignore[method-assign]
    write_process.main()


def _refused(memory: MemoryOf, address: int, into: memoryview) -> None:
    raise OSError(errno.EPERM, f"process_vm_readv: {os.strerror(errno.EPERM)}")
