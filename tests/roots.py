"""Jobs that save into a root on a simulated disk: their beginning, their faults, and their remains."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from ckptfsm.core.layout import JOURNAL, TRACKER, parse_segment, staging_dir
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.core.ports import Identity, Storage
from ckptfsm.disk.durable import list_names, make_dirs
from ckptfsm.disk.journal import Segment, read_segment
from ckptfsm.testing.faults import FaultStorage, Hook
from ckptfsm.testing.harness import FakeJob, check_root
from ckptfsm.testing.simfs import SimDisk, SimStorage


def read_segments(storage: Storage) -> list[Segment]:
    """Every segment of a root, oldest first, as parsed. Seals are not applied."""
    epochs = filter(None, map(parse_segment, list_names(storage, JOURNAL)))
    return [read_segment(storage, epoch) for epoch in sorted(epochs)]


def start(
    disk: SimDisk, name: str = "first", *, wrap=None, opened: bool = True, **settings
) -> FakeJob:
    """A job with a simulated process."""
    storage = FaultStorage(SimStorage(disk, name))
    identity = Identity("sim", sum(name.encode()), name, name)
    job = FakeJob(wrap(storage) if wrap else storage, identity=identity, **settings)
    if opened:
        job.open()
    return job


def stop(disk: SimDisk, job: FakeJob, name: str = "first") -> None:
    job.close()
    disk.kill(name)


def saved(disk: SimDisk, *steps: int, name: str = "first", **settings) -> FakeJob:
    job = start(disk, name, **settings)
    for step in steps:
        job.save(step)
    return job


def left(disk: SimDisk, *steps: int, **settings) -> None:
    """A root with these steps, whose process is gone."""
    stop(disk, saved(disk, *steps, **settings))


def tracked(job: FakeJob) -> list[int]:
    return [c.step for c in job.coordinator.ledger.in_state(State.TRACKED)]


def destinations(job: FakeJob) -> list[str]:
    return [r.dest.value for r in job.records]


def replace(disk: SimDisk, path: str, data: bytes) -> None:
    """The change of a file by another program."""
    vandal = SimStorage(disk, "vandal")
    try:
        vandal.unlink(path)
    except FileNotFoundError:
        pass
    disk.plant_file(path, data)
    disk.kill("vandal")


def content(disk: SimDisk, path: str) -> bytes:
    found = disk.snapshot()[path]
    assert isinstance(found, bytes)
    return found


def staged(job: FakeJob, step: int) -> tuple[AttemptId, str]:
    """An attempt that both ranks forked for."""
    of = job.request(step)
    job.fork(of)
    return of, staging_dir(of)


def foreign_attempt(job: FakeJob, between: Callable[[], object] = list) -> AttemptId:
    """The request of a trainer at step 1, written. ``between`` runs before that is reported."""
    of = job.request(1, (PartSpec("state", "foreign"),), in_place=True)
    job.fork(of)
    reports = [each for rank in (0, 1) for each in job.write_silently(of, rank)]
    between()
    job.coordinator.report(reports)
    return of


ONE, TWO = "iter_0000001", "iter_0000002"


LATER = 60.0  # seconds after which the coordinator wants to tick again


def fails(method: str, matches: Callable[[str], bool], code: int = errno.EIO) -> Hook:
    """A hook that fails the first call of ``method`` whose path ``matches``."""
    left_over = [code]

    def hook(index: int, called: str, path: str) -> None:
        if left_over and called == method and matches(path):
            raise OSError(left_over[0], os.strerror(left_over.pop()), path)

    return hook


def fails_to_look(
    job: FakeJob, method: str, matches: Callable[[str], bool], code: int, times: int = 1
) -> list[str]:
    """Fail calls that change nothing, which ``FaultStorage`` has no hook for. Returns what failed."""
    original, failed = getattr(job.storage, method), []

    def call(path: str, *arguments):
        if len(failed) < times and matches(path):
            failed.append(path)
            raise OSError(code, os.strerror(code), path)
        return original(path, *arguments)

    setattr(job.storage, method, call)
    return failed


def judge(disk: SimDisk, acknowledged: int | None) -> int | None:
    return check_root(SimStorage(disk, "judge"), acknowledged)


def names(disk: SimDisk, directory: str = "") -> list[str]:
    return sorted(SimStorage(disk, "judge").listdir(directory))


Matches = Callable[[str], bool]


def moves(name: str) -> Matches:
    """The rename that takes ``name`` away."""
    return lambda path: path.startswith(f"{name} ->")


def makes(name: str) -> Matches:
    """The rename that puts ``name`` there."""
    return lambda path: path.endswith(f"-> {name}")


def in_place(job: FakeJob, step: int) -> AttemptId:
    """A save whose path the trainer fixed, as far as its writer's fork."""
    of = job.request(step, in_place=True)
    job.fork(of)
    return of


def start_with(storage: Any, name: str, **options: Any) -> FakeJob:
    job = FakeJob(storage, identity=identity(name), **options)
    job.open()
    return job


def identity(name: str) -> Identity:
    return Identity("sim", len(name), f"boot:{name}", name)


class Strike:
    """A hook that raises at every call of a method on a path."""

    def __init__(self, method: str, path: str, error: BaseException) -> None:
        self.method, self.path, self.error = method, path, error

    def __call__(self, index: int, method: str, path: str) -> None:
        if method == self.method and self.path in path:
            raise self.error


def below(disk: SimDisk, directory: str) -> dict[str, Any]:
    prefix = f"{directory}/"
    return {k.removeprefix(prefix): v for k, v in disk.snapshot().items() if k.startswith(prefix)}


def saved_by_another(disk: SimDisk) -> None:
    """At the name of step 2 stands what another run has saved, whole, in place of this one's."""
    other = SimDisk()
    saved(other, 1).close()
    other.kill("first")
    saved(other, 2, name="second")
    if TWO in names(disk):
        disk.uproot(TWO)
    person = SimStorage(disk, "person")
    person.mkdir(TWO)
    for path, data in sorted(below(other, TWO).items()):
        if data is None:
            person.mkdir(f"{TWO}/{path}")
        else:
            disk.plant_file(f"{TWO}/{path}", data)


def older_format(disk: SimDisk, step: int) -> None:
    """A trainer saves a step in a format that is not judged, and its tracker names it."""
    person, name = SimStorage(disk, "person"), f"iter_{step:07d}"
    make_dirs(person, f"{name}/mp_rank_00")
    handle = person.open_exclusive(f"{name}/mp_rank_00/model_optim_rng.pt")
    person.write(handle, b"weights")
    person.close(handle)
    disk.overwrite(TRACKER, b"%d" % step)
    disk.kill("person")


PRECIOUS = b"precious".ljust(100)
