"""Roots on the real disk, made by a job without torch: for commands, which open what they are given."""

from __future__ import annotations

from pathlib import Path

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.identity import this_process
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.parts import PartSpec
from ckptfsm.testing.harness import PARTS, FakeJob

TREE = (PartSpec("state", kind="tree"),)  # the shards of a fake job are no torch_dist files


def real_job(root: Path, **settings) -> FakeJob:
    """A job of this process that owns ``root``."""
    job = FakeJob(PosixStorage(root), identity=this_process(), clock=SystemClock(), **settings)
    job.open()
    return job


def real_root(root: Path, *steps: int, parts=PARTS, **settings) -> Path:
    """A root with these steps, whose owner has closed it."""
    job = real_job(root, **settings)
    for step in steps:
        job.save(step, parts)
    job.close()
    job.storage.close_root()
    return root


def crashed(job: FakeJob) -> None:
    """Let go of a root as the death of its process would."""
    ownership, job.coordinator._ownership = job.coordinator._ownership, None
    assert ownership is not None
    ownership.release_lock_only()
    job.storage.close_root()
