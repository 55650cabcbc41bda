"""Copies for tests: roots to copy, carriers, and a place that fails or ends its caller at a call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from real_roots import TREE, crashed, real_job, real_root

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.layout import MANIFEST
from ckptfsm.places.carrying import Carried, Carrier, run_of
from ckptfsm.places.place import CopyPlace, place_at

KINDS: list[object] = ["directory"]
if find_spec("obstore") and find_spec("moto"):
    from s3_servers import lacks_azurite

    why = lacks_azurite()
    KINDS += ["moto", pytest.param("azurite", marks=pytest.mark.skipif(bool(why), reason=why))]
every_kind = pytest.mark.parametrize("url", [*KINDS, "hdfs", "memory"], indirect=True)
CHANGES = ("create", "replace", "put", "remove", "remove_empty")


class Killed(BaseException):
    """The end of a process, as its code sees none."""


class Counted:
    """A place that ends its caller after the change with a number.

    The changes come one after the other, and after the end there is none: also in another thread.
    """

    def __init__(self, place: CopyPlace, at: int = -1) -> None:
        self._place, self._at = place, at
        self._turn = threading.Lock()
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._place, name)
        return partial(self._call, name, real) if name in CHANGES else real

    def _call(self, name: str, real: Callable[..., Any], *arguments: Any) -> Any:
        with self._turn:
            number = len(self.calls)
            if 0 <= self._at < number:
                raise Killed
            self.calls.append(name)
            result = real(*arguments)
            if number == self._at:
                raise Killed
            return result


def root_with(path: Path, *steps: int, **settings: Any) -> PosixStorage:
    """The storage of a root with these steps, whose owner has closed it."""
    real_root(path, *steps, parts=TREE, **settings)
    return PosixStorage(path, create=False)


def saved_again(path: Path, step: int) -> None:
    """Roll a root back before ``step``, and save that again: another attempt."""
    job = real_job(path)
    job.coordinator.rollback(min(c.step for c in job.coordinator.ledger.checkpoints.values()))
    job.save(step, TREE)
    crashed(job)


def new_place(path: Path) -> CopyPlace:
    """The place at a directory, which is made."""
    path.mkdir()
    return place_at(str(path))


def carry(place: Any, storage: PosixStorage, step: int, **settings: Any) -> Carried:
    return Carrier(place, storage, run_of(storage), **settings).carry(f"iter_{step:07d}")


def contents(directory: Path) -> dict[str, bytes]:
    """Every file of a published directory."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def copied(place: CopyPlace, step: int) -> dict[str, bytes]:
    """Every object of a copy but for its claim."""
    name = f"iter_{step:07d}"
    found = {each: place.read(f"{name}/{each}") for each in place.listed(name)}
    assert not any(".tmp-" in each for each in found), "a temporary file is left"
    found.pop(".ckptfsm/claim.json", None)
    return {each: data for each, data in found.items() if data is not None}


def is_committed(place: CopyPlace, step: int) -> bool:
    return place.read(f"iter_{step:07d}/{MANIFEST}") is not None
