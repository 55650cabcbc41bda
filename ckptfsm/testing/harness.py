"""A job without torch: the production coordinator and writer code on any storage, step by step.

Only the tensors are made up. ``invariants.check_root`` judges the result, and shares no code with it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ckptfsm.adapters.memory import OwnMemory
from ckptfsm.coordinator.coordinator import Coordinator, CoordinatorOptions
from ckptfsm.core.documents import FileEntry, TransitionRecord
from ckptfsm.core.events import Failed, ShardReported, WriterForked, WriterGone
from ckptfsm.core.images import Copied, Literal, Piece, image_of
from ckptfsm.core.layout import MEGATRON, PLANNED, Layout, join, planned_name
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.core.ports import Identity, PartFinisher, PartJob, RankJob, Storage, Written
from ckptfsm.core.requests import News, RecoveryReport, SaveRequest
from ckptfsm.core.retention import KeepAll, Policy
from ckptfsm.disk.durable import make_dirs
from ckptfsm.testing.invariants import RootBroken, check_root
from ckptfsm.writers.image import InlineChunks, write_image
from ckptfsm.writers.rank_writer import write_rank
from ckptfsm.writers.shard_file import ShardFile

__all__ = [
    "FINISHERS",
    "FakeJob",
    "FakePart",
    "RootBroken",
    "SimClock",
    "check_root",
    "fake_content",
]

PARTS = (PartSpec("state"),)
FIRST = Identity("sim", 1, "boot:1", "nonce-1")


class SimClock:
    """Time that passes only in ``sleep``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> str:
        return f"sim+{self.now:.3f}"

    def unix(self) -> float:
        return 1.5e9 + self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True, slots=True)
class FakePart(PartJob):
    """A rank's shard of made-up content, with the files and receipt of a real part.

    Every other rank writes as the write engine does: preallocated, past the page cache.
    """

    name: str
    directory: str
    rank: int
    content: bytes
    first_rank: int = 0

    def write(self, storage: Storage, location: str) -> Written:
        files = [self._file(storage, location, join(self.directory, f"__{self.rank}_0.distcp"))]
        if self.rank == self.first_rank:
            make_dirs(storage, PLANNED, base=location)
            files.append(self._file(storage, location, planned_name(self.name)))
            storage.fsync_dir(join(location, PLANNED))
        return Written(tuple(files), ((self.rank, len(self.content)),))

    def _file(self, storage: Storage, location: str, name: str) -> FileEntry:
        if self.rank % 2:
            half = len(self.content) // 2
            pieces: list[Piece] = [Literal(self.content[:half]), Copied(self.content[half:])]
            source = InlineChunks(OwnMemory())
            return write_image(storage, location, image_of(name, pieces), source)
        shard = ShardFile(storage, join(location, name))
        shard.write(self.content)
        return shard.close_durably(name)


class UnplannedPart(FakePart):
    """A rank's share of a foreign request, which has no planned metadata."""

    def write(self, storage: Storage, location: str) -> Written:
        return Written((self._file(storage, location, f"__{self.rank}_0.distcp"),))


class HalfPart(FakePart):
    """A shard of which only one half fits on the disk."""

    def write(self, storage: Storage, location: str) -> Written:
        name = join(location, self.directory, f"__{self.rank}_0.distcp")
        ShardFile(storage, name).write(self.content[: len(self.content) // 2])
        raise OSError(errno.EIO, os.strerror(errno.EIO), name)


def fake_finisher(
    planned: bytes, results: Sequence[Sequence[Any]], location: str
) -> Mapping[str, bytes]:
    """Stands in for the finisher of a torch_dist part; refuses torn planned metadata, as that does."""
    return {**fake_dcp_finisher(planned, results, location), "metadata.json": b"{}"}


def fake_dcp_finisher(planned: bytes, results: Sequence[Any], location: str) -> Mapping[str, bytes]:
    """The same for a part in DCP's own format, which one file completes."""
    if hashlib.sha256(planned[:-64]).hexdigest().encode() != planned[-64:]:
        raise ValueError("planned metadata is torn")
    return {".metadata": json.dumps([list(r) for r in results]).encode()}


def fake_content(of: AttemptId, rank: int) -> bytes:
    """Content that names its attempt and rank and ends with its checksum."""
    body = f"{of} rank {rank} ".encode() * 40
    return body + hashlib.sha256(body).hexdigest().encode()


FINISHERS: Mapping[str, PartFinisher] = MappingProxyType(
    {"torch_dist": fake_finisher, "dcp": fake_dcp_finisher}
)


@dataclass
class FakeJob:
    """A run of a trainer: a coordinator and the writers of ``ranks`` ranks, all on one thread.

    ``cannot``: parts that the last rank begins to write and cannot. ``holds``: of the options.
    ``acknowledged`` collects the steps that were reported as tracked to the trainer.
    """

    storage: Storage
    ranks: int = 2
    retention: Policy = field(default_factory=KeepAll)
    resume: Any = "fallback"
    takeover: bool = False
    identity: Identity = FIRST
    clock: SimClock = field(default_factory=SimClock)
    cannot: frozenset[str] = frozenset()
    layout: Layout = MEGATRON
    holds: Mapping[str, int] = field(default_factory=dict)
    acknowledged: list[int] = field(default_factory=list)
    records: list[TransitionRecord] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.coordinator = Coordinator(
            self.storage,
            clock=self.clock,
            identity=self.identity,
            options=CoordinatorOptions(
                self.retention,
                self.resume,
                self.takeover,
                layout=self.layout,
                holds=self.holds,
            ),
            finishers=FINISHERS,
            provenance={"ckptfsm": "test"},
        )

    def open(self) -> RecoveryReport:
        report = self.coordinator.open()
        self._listen()
        return report

    def request(
        self, step: int, parts: tuple[PartSpec, ...] = PARTS, *, in_place: bool = False
    ) -> AttemptId:
        request = SaveRequest(step, parts, self.ranks, in_place, expected_bytes=100)
        of = self.coordinator.request(request)
        self._listen()
        return of

    def fork(self, of: AttemptId) -> None:
        self.coordinator.report([WriterForked(of, rank, self.ranks) for rank in range(self.ranks)])
        self._listen()

    def write(self, of: AttemptId, rank: int) -> None:
        """Write and report one rank's shards."""
        self.coordinator.report(self.write_silently(of, rank))
        self._listen()

    def write_silently(self, of: AttemptId, rank: int) -> list[ShardReported]:
        """Write one rank's shards; the reports of them, which are not sent."""
        checkpoint = self.coordinator.ledger.checkpoints[of]
        location = self.layout.working_dir(of, checkpoint.in_place)
        own = [p for p in checkpoint.parts if p.ranks is None or rank in p.ranks]
        fakes = tuple(self._part(p, rank, fake_content(of, rank)) for p in own)
        optional = frozenset(p.name for p in own if p.optional)
        job = RankJob(of, rank, self.ranks, location, fakes, optional)
        written = write_rank(self.storage, job)
        return [ShardReported(of, name, rank, self.ranks, size) for name, size, _ in written]

    def _part(self, spec: PartSpec, rank: int, content: bytes) -> FakePart:
        made = UnplannedPart if spec.kind == "foreign" else FakePart
        if spec.name in self.cannot and rank == self.ranks - 1:
            made = HalfPart
        return made(spec.name, spec.directory, rank, content, spec.first_rank)

    def save(self, step: int, parts: tuple[PartSpec, ...] = PARTS) -> AttemptId:
        """A whole save of all ranks."""
        of = self.request(step, parts)
        self.fork(of)
        for rank in range(self.ranks):
            self.write(of, rank)
        return of

    def fail(self, of: AttemptId, reason: str = "writer_died") -> None:
        gone = [WriterGone(of, rank) for rank in range(self.ranks)]
        self.coordinator.report([Failed(of, reason), *gone])
        self._listen()

    def close(self) -> None:
        self.coordinator.close()
        self._listen()

    def take_news(self) -> list[News]:
        """The news since the last call, in order."""
        news = self.coordinator.news.since(0)
        if news:
            self.coordinator.news.forget(news[-1][0] + 1)
        return [item for _, item in news]

    def _listen(self) -> None:
        for record in self.take_news():
            if isinstance(record, TransitionRecord):
                self.records.append(record)
                if record.dest is State.TRACKED and record.source is State.FINALIZED:
                    self.acknowledged.append(record.step)
