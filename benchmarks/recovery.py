"""Seconds to open a root that holds many tracked checkpoints, to read its journal, and to list it.

Measured: the construction of a ``CheckpointManager`` (warm page cache) in two cases. After an
orderly close the journal begins with a snapshot; after a run that was killed every transition is
replayed.

Also measured: an empty root, the journal alone, the command line (``commands``), and the cost of one
more checkpoint beside ten and beside all the others, from request to tracked. Coordinator and writer
work on hardly any data and without fsyncs, so that only the work per known checkpoint shows.

The production coordinator and writer build the root from one real save. The files of that save are
written again for every step; only the fsyncs are left out while building.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import commands
from benchmarks.measure import MS, Figure, Options, in_unit, ratio, timed
from benchmarks.state import TrainingState
from ckptfsm import CheckpointManager
from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.identity import this_process
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.coordinator.coordinator import Coordinator, CoordinatorOptions
from ckptfsm.core.documents import Receipt, decode
from ckptfsm.core.events import ShardReported, WriterForked
from ckptfsm.core.layout import MEGATRON, PLANNED, PRIVATE, join, receipt_name
from ckptfsm.core.parts import PartSpec
from ckptfsm.core.ports import PartJob, RankJob, Storage, Written
from ckptfsm.core.requests import SaveRequest
from ckptfsm.dcp.driver import StateDriver
from ckptfsm.disk.durable import make_dirs
from ckptfsm.disk.journal import read_history, read_segment
from ckptfsm.writers.rank_writer import write_rank
from ckptfsm.writers.shard_file import ShardFile

_TARGET_S = 2.0  # of 10,000 checkpoints
_OPENING_S = 0.3  # of none, and of a tenth
_GROWTH = 1.2  # of one more save: its noise
_MOST_OPENINGS = 5
_SAVES = 100
_RECORDS, _RECORDS_S = 100_000, 1.0
_PART = "state"
_SEED_BYTES = 64 << 10


class UnsyncedStorage(PosixStorage):
    """The real disk without its fsyncs: only for building a root, followed by one sync."""

    def fsync(self, handle: int) -> None:
        """Left to the sync at the end."""

    def fsync_dir(self, path: str) -> None:
        """Left to the sync at the end."""


@dataclass(frozen=True, slots=True)
class ReplayedPart(PartJob):
    """A part that writes the files of an earlier save again."""

    name: str
    directory: str
    contents: tuple[tuple[str, bytes], ...]
    results: tuple[tuple[Any, ...], ...]

    def write(self, storage: Storage, location: str) -> Written:
        make_dirs(storage, PLANNED, base=location)
        entries = []
        for name, content in self.contents:
            shard = ShardFile(storage, join(location, name))
            shard.write(content)
            entries.append(shard.close_durably(name))
        return Written(tuple(entries), self.results)


def run(options: Options) -> list[Figure]:
    """Seconds to construct a manager on a root of ``checkpoints`` tracked checkpoints."""
    root, killed, fewer = options.work / "root", options.work / "killed", options.work / "fewer"
    count, part = options.checkpoints, _record_part(options.work / "seed")
    tenth, ten = max(1, count // 10), min(10, count // 2)
    build_root(fewer, tenth, part)
    tracked = build_root(root, count, part)
    shutil.copytree(root / PRIVATE, killed)
    openings = range(min(options.pairs, _MOST_OPENINGS))
    journal = _read_journal(root, options.pairs)
    after_kill = [_open_again(root, killed) for _ in openings]
    after_close = [_open_again(root, None) for _ in openings]
    first = tracked[ten : ten + _SAVES]  # of many, as the disk writes in bursts
    last = tracked[-len(first) :]
    return [
        in_unit("opening of an empty root", "s", 1.0, _open_new(options), _OPENING_S),
        in_unit(
            f"opening of {tenth}",
            "s",
            1.0,
            [_open_again(fewer, None) for _ in openings],
            _OPENING_S,
        ),
        in_unit(f"recovery of {count}, after a close", "s", 1.0, after_close, _TARGET_S),
        in_unit(f"recovery of {count}, after a kill", "s", 1.0, after_kill, _TARGET_S),
        in_unit(f"journal, for {_RECORDS} records", "s", 1.0, journal, _RECORDS_S),
        *commands.figures(root, count, options.pairs),
        in_unit(f"one more beside {ten}, no fsync", "ms", MS, first),
        in_unit(f"one more beside {count}, no fsync", "ms", MS, last),
        ratio(f"one more beside {count} / beside {ten}", last, first, _GROWTH),
    ]


def _open_new(options: Options) -> list[float]:
    """Seconds to construct a manager on a directory that is not there."""
    return [_open_again(options.work / f"new{number}", None) for number in range(options.pairs)]


def _read_journal(root: Path, pairs: int) -> list[float]:
    """Seconds to read and replay the journal of a killed run, for ``_RECORDS`` records."""
    storage = PosixStorage(root, create=False)
    count = len(read_segment(storage, 1).records)
    seconds = [timed(partial(read_history, storage)) for _ in range(pairs)]
    storage.close_root()
    return [each * _RECORDS / count for each in seconds]


def _record_part(root: Path) -> ReplayedPart:
    """A real save of a small state, as a part that can be written again and again."""
    with CheckpointManager(root) as manager:
        manager.save(1, TrainingState(_SEED_BYTES).sharded(1)).wait()
    directory = root / MEGATRON.published_name(1)
    path = directory / receipt_name(_PART, 0)
    receipt = decode(Receipt, path.read_bytes(), str(path))
    contents = tuple((f.name, (directory / f.name).read_bytes()) for f in receipt.files)
    return ReplayedPart(_PART, "", contents, receipt.results)


def build_root(root: Path, count: int, part: ReplayedPart) -> list[float]:
    """``count`` tracked checkpoints and the journal of a run that ended without closing it.

    Returns the seconds that each of them took from request to tracked.
    """
    storage = UnsyncedStorage(root)
    coordinator = Coordinator(
        storage,
        clock=SystemClock(),
        identity=this_process(),
        options=CoordinatorOptions(),
        finishers=StateDriver.finishers,
        provenance={},
    )
    coordinator.open()
    seconds = [
        timed(partial(_track, coordinator, storage, step, part)) for step in range(1, count + 1)
    ]
    coordinator.abandon()
    os.sync()
    return seconds


def _track(coordinator: Coordinator, storage: Storage, step: int, part: ReplayedPart) -> None:
    """Take a checkpoint through all its states; this process is the only rank."""
    of = coordinator.request(SaveRequest(step, (PartSpec(_PART, "torch_dist"),), world_size=1))
    coordinator.report([WriterForked(of, 0, 1)])
    written: Sequence[tuple[str, int, Any]] = write_rank(
        storage, RankJob(of, 0, 1, MEGATRON.working_dir(of, False), (part,))
    )
    coordinator.report([ShardReported(of, name, 0, 1, size) for name, size, _ in written])


def _open_again(root: Path, private: Path | None) -> float:
    """Seconds to construct a manager; ``private`` first puts the journal of a killed run back."""
    if private is not None:
        shutil.rmtree(root / PRIVATE)
        shutil.copytree(private, root / PRIVATE)
        os.sync()
    opened: list[CheckpointManager] = []
    seconds = timed(lambda: opened.append(CheckpointManager(root)))
    opened[0].close()
    return seconds
