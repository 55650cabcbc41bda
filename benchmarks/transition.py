"""The time of a durable transition: from the event to the fsynced record in the journal.

Measured: the coordinator's ``report`` of one event (table, ledger, record, journal), and the
journal's ``append`` alone. The floor is a bare write of the same bytes into an allocated file with
fsync. Also measured: ``request``, which is a transition and the making of the staging directory.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

from benchmarks.measure import MS, Figure, Options, in_unit, timed
from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.identity import this_process
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.coordinator.coordinator import Coordinator, CoordinatorOptions
from ckptfsm.core.documents import SegmentOpened, TransitionRecord
from ckptfsm.core.events import Failed, WriterForked, WritersLost
from ckptfsm.core.layout import JOURNAL
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import PartSpec
from ckptfsm.core.requests import SaveRequest
from ckptfsm.disk.journal import BLOCK_BYTES, JournalWriter, encode_line

_PER_PAIR = 4  # a transition is cheap: more samples than pairs
_RECORD = TransitionRecord(
    seq=1,
    step=100,
    epoch=1,
    attempt=1,
    event="writer_forked",
    source=State.REQUESTED,
    dest=State.FORKED,
    run_seconds=12.5,
    at="2026-01-01T00:00:00.000+00:00",
)


def run(options: Options) -> list[Figure]:
    """Milliseconds of each operation, on the file system of the work directory."""
    count = options.pairs * _PER_PAIR
    requests, reports = _coordinator_samples(options.work / "coordinator", count)
    appends = _append_samples(options.work / "journal", count)
    floor = _floor_samples(options.work / "floor", count)
    return [
        in_unit("one durable transition (report)", "ms", MS, reports),
        in_unit("of it: JournalWriter.append", "ms", MS, appends),
        in_unit("floor: pwrite + fsync of as many bytes", "ms", MS, floor),
        in_unit("request (transition + staging directory)", "ms", MS, requests),
    ]


def _coordinator_samples(root: Path, count: int) -> tuple[list[float], list[float]]:
    """Seconds of ``request`` and of ``report`` of one event, each ``count`` times."""
    coordinator = Coordinator(
        PosixStorage(root),
        clock=SystemClock(),
        identity=this_process(),
        options=CoordinatorOptions(),
        finishers={},
        provenance={},
    )
    coordinator.open()
    parts = (PartSpec("state", "torch_dist"),)
    requests: list[float] = []
    reports: list[float] = []
    for step in range(1, count + 1):
        began = time.perf_counter()
        of = coordinator.request(SaveRequest(step, parts, world_size=1))
        requests.append(time.perf_counter() - began)
        reports.append(timed(partial(coordinator.report, [WriterForked(of, 0, 1)])))
        coordinator.report([Failed(of, "benchmark"), WritersLost(of)])
        coordinator.tick()  # empties the trash
    coordinator.close()
    return requests, reports


def _append_samples(root: Path, count: int) -> list[float]:
    """Seconds of one journal append with its fsync."""
    storage = PosixStorage(root)
    (root / JOURNAL).mkdir(parents=True)
    journal = JournalWriter(storage, 1)
    journal.open(
        SegmentOpened(epoch=1, host="h", pid=1, at="", seals=(), run_seconds=0.0, checkpoints=())
    )
    samples = [timed(partial(journal.append, _RECORD)) for _ in range(count)]
    journal.close()
    return samples


def _floor_samples(path: Path, count: int) -> list[float]:
    """Seconds of a bare write and fsync into blocks that are allocated and written already."""
    line = encode_line(_RECORD)
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    os.pwrite(fd, b"\n" * (len(line) * count + BLOCK_BYTES), 0)
    os.fsync(fd)

    samples = [timed(partial(_write_through, fd, line, at * len(line))) for at in range(count)]
    os.close(fd)
    return samples


def _write_through(fd: int, data: bytes, offset: int) -> None:
    os.pwrite(fd, data, offset)
    os.fsync(fd)
