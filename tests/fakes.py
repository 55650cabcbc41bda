"""A trainer without torch: driver, transport and clock for a real ``Manager`` on any storage.

Only a trainer's or a network's behaviour is made up here. The writers are really forked, and production
code writes everything on disk.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.executor import ThreadExecutor
from ckptfsm.adapters.identity import this_process
from ckptfsm.adapters.local_transport import LocalTransport
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.adapters.signals import PosixDeferredSignals
from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import CkptFsmError, RankFailed, SaveRefused
from ckptfsm.core.parts import OptionalPart, PartSpec, Planned, content_of
from ckptfsm.core.ports import (
    Clock,
    Executor,
    Finalizer,
    Identity,
    Launch,
    Mailbox,
    PartFinisher,
    PartJob,
    Ports,
    Storage,
    Survey,
    Transport,
    Written,
    no_mailbox,
)
from ckptfsm.testing.harness import FINISHERS, FakePart
from ckptfsm.writers.plain_files import digests_of_bytes, file_spec, load_file, stage_file
from ckptfsm.writers.rank_writer import launch_forked
from ckptfsm.writers.shard_file import ShardFile

T = TypeVar("T")
State = Mapping[str, Any]
_DIGEST_CHARS = 64
_WAIT_S = 20.0


# ---------------------------------------------------------------------------------- the trainer


def encode_state(state: State) -> bytes:
    """The shard of a rank's state; also valid planned metadata for ``harness.fake_finisher``."""
    body = pickle.dumps(dict(state))
    return body + hashlib.sha256(body).hexdigest().encode()


def decode_state(data: bytes) -> dict[str, Any]:
    """The inverse of ``encode_state``. Raises ``ValueError`` for anything else."""
    body, digest = data[:-_DIGEST_CHARS], data[-_DIGEST_CHARS:]
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise ValueError("the shard is torn")
    value = pickle.loads(body)
    assert isinstance(value, dict)
    return value


@dataclass(frozen=True)
class FakeRequest:
    """A foreign request: written in place, complete once ``finalize(directory, payload)`` ran.

    Without a ``finalize`` the finalizer leaves the same two files as Megatron's.
    """

    content: bytes
    finalize: Callable[[Path, Any], None] | None = None


@dataclass(frozen=True, slots=True)
class FakeShard(PartJob):
    """The live state of one rank, encoded by the child that writes it, so only a fork freezes it."""

    name: str
    directory: str
    rank: int
    state: State
    before: Callable[[str, int], None] | None
    first_rank: int = 0

    def write(self, storage: Storage, location: str) -> Written:
        if self.before is not None:
            self.before(self.name, self.rank)
        content = encode_state(self.state)
        part = FakePart(self.name, self.directory, self.rank, content, self.first_rank)
        return part.write(storage, location)


@dataclass(frozen=True, slots=True)
class FakeForeignPart(PartJob):
    """A rank's share of a foreign request; its payload returns to the rank that forked."""

    name: str
    directory: str
    rank: int
    request: FakeRequest

    def write(self, storage: Storage, location: str) -> Written:
        file = f"__{self.rank}_0.distcp"
        shard = ShardFile(storage, f"{location}/{file}")
        shard.write(self.request.content)
        return Written((shard.close_durably(file),), payload={"bucket": len(self.request.content)})


@dataclass(slots=True)
class FakeDraft:
    """See ``ports.Draft``."""

    specs: tuple[PartSpec, ...]
    in_place: bool
    summary: Any
    expected_bytes: int
    driver: FakeDriver
    values: Mapping[str, Any]
    digests: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    location: str = ""

    def stage(
        self, location: str, specs: Sequence[PartSpec], planned: Mapping[str, Planned]
    ) -> tuple[PartJob, ...]:
        self.driver.maybe_fail("stage")
        self.location = location
        rank = self.driver.rank
        jobs: list[PartJob] = []
        for spec in specs:
            value = self.values[spec.name]
            if isinstance(value, FakeRequest):
                jobs.append(FakeForeignPart(spec.name, spec.directory, rank, value))
            elif not spec.format.sharded:
                jobs.append(stage_file(spec, value, location, rank))
            else:
                before, first = self.driver.before_write, spec.first_rank
                jobs.append(FakeShard(spec.name, spec.directory, rank, value, before, first))
        return tuple(jobs)

    def changed(self) -> str:
        return ""

    def let_go(self) -> None:
        """Nothing to drop."""

    def finalizers(self) -> list[Finalizer]:
        requests = [(n, v) for n, v in self.values.items() if isinstance(v, FakeRequest)]
        return [Finalizer(n, self._problem, partial(self._finalize, n, v)) for n, v in requests]

    def _problem(self) -> CkptFsmError | None:
        try:
            self.driver.maybe_fail("before finalize")
        except CkptFsmError as error:
            return error
        return None

    def _finalize(self, name: str, value: FakeRequest, payload: Any) -> None:
        self.driver.finalized.append({name: payload})
        self.driver.maybe_fail("finalize")
        if value.finalize is not None:
            value.finalize(Path(self.location), payload)
        elif self.driver.rank == 0:
            (Path(self.location) / ".metadata").write_bytes(b"metadata")
            (Path(self.location) / "metadata.json").write_bytes(b"{}")


@dataclass
class FakeDriver:
    """``ports.Driver`` for a state that is a dict, one shard per rank.

    Attributes:

    - ``failures`` maps ``draft``, ``merge``, ``stage``, ``finalize``, ``missing`` or ``load`` to
      the error that the call raises.
    - ``before_write(part, rank)`` runs in the forked child before the write.
    - ``expected_bytes`` overrides the size that a draft announces.
    - ``finalized`` has the payloads of every run of the foreign finalizers.
    - ``loads`` has the directories that were loaded.
    """

    rank: int = 0
    failures: dict[str, BaseException] = field(default_factory=dict)
    before_write: Callable[[str, int], None] | None = None
    expected_bytes: int | None = None
    finalized: list[dict[str, Any]] = field(default_factory=list)
    loads: list[dict[str, str]] = field(default_factory=list)
    accepted: int = 0
    finishers: Mapping[str, PartFinisher] = field(default_factory=lambda: FINISHERS)

    def maybe_fail(self, call: str) -> None:
        if call in self.failures:
            raise self.failures[call]

    def provenance(self) -> Mapping[str, str]:
        return {"trainer": "fake"}

    def draft(self, parts: Mapping[str, Any]) -> FakeDraft:
        self.maybe_fail("draft")
        specs = tuple(
            spec_of(name, value, len(parts)) for name, value in parts.items() if value is not None
        )
        parts = {name: content_of(value) for name, value in parts.items()}
        size = sum(len(encode_state(v)) for v in parts.values() if isinstance(v, Mapping))
        if self.expected_bytes is not None:
            size = self.expected_bytes
        in_place = any(isinstance(v, FakeRequest) for v in parts.values())
        keys = {name: sorted(v) for name, v in parts.items() if isinstance(v, Mapping)}
        digests = digests_of_bytes(parts)
        return FakeDraft(specs, in_place, keys, size, self, dict(parts), digests)

    def merge(self, summaries: Sequence[Any]) -> Mapping[str, Planned]:
        self.maybe_fail("merge")
        keys: dict[str, Any] = {}
        for summary in summaries:
            for name, found in summary.items():
                if keys.setdefault(name, found) != found:
                    raise SaveRefused("the ranks' states have different keys")
        return {}

    def accept(self) -> None:
        self.accepted += 1

    def refuse(self) -> None:
        """Nothing is remembered between saves."""

    def survey(
        self, parts: Mapping[str, Any], directories: Mapping[str, str], droppable: Collection[str]
    ) -> Survey:
        """Find the keys of the given states that this rank's shard does not have."""
        self.maybe_fail("survey")
        absent: set[str] = set()
        asked: dict[str, set[str]] = {}
        stored: dict[str, frozenset[str]] = {}
        for name, value in parts.items():
            if isinstance(value, Mapping) and value:
                shard = self._shard(directories[name])
                asked[name] = set(value)
                absent |= asked[name] - set(shard)
                stored[name] = frozenset(key for key in shard if isinstance(shard[key], bytes))
        return Survey(absent, asked, stored)

    def check(self, surveys: Sequence[Survey], drop: set[str]) -> set[str]:
        """Accept: every state fits. As in megatron-core, nobody has to ask for a plain value: only
        bytes stand for a tensor.
        """
        self.maybe_fail("check")
        asked = (keys for survey in surveys for keys in survey.shardings.values())
        stored = (keys for survey in surveys for keys in survey.stored.values())
        return set[str]().union(*stored) - set[str]().union(*asked)

    def plan_reading(
        self,
        storage: Storage,
        location: str,
        parts: Mapping[str, tuple[str, Any]],
        files: Sequence[FileEntry],
    ) -> None:
        """Every file is verified before it is loaded."""

    def load(
        self, parts: Mapping[str, Any], directories: Mapping[str, str], drop: set[str]
    ) -> Mapping[str, Any]:
        """Load. Raises ``KeyError`` for a missing key that is not in ``drop``."""
        self.maybe_fail("load")
        self.loads.append(dict(directories))
        loaded: dict[str, Any] = {}
        for name, value in parts.items():
            if isinstance(value, Mapping):
                stored = self._shard(directories[name]) if value else {}
                loaded[name] = {key: stored[key] for key in value if key not in drop}
            else:
                loaded[name] = load_file(name, value, directories[name])
        return loaded

    def _shard(self, directory: str) -> dict[str, Any]:
        return decode_state((Path(directory) / f"__{self.rank}_0.distcp").read_bytes())


def spec_of(name: str, value: Any, count: int) -> PartSpec:
    """The spec of a part, as the driver of torch states makes it. Beside the state, it is a ``dcp``."""
    if isinstance(value, OptionalPart):
        return replace(spec_of(name, value.content, count), optional=True)
    if isinstance(value, FakeRequest):
        return PartSpec(name, "foreign")
    plain = file_spec(name, value)
    if plain is not None:
        return plain
    if isinstance(value, Mapping):
        beside = name != "state" and count > 1
        return PartSpec(name, "dcp", name) if beside else PartSpec(name)
    raise TypeError(f"part {name!r} is a {type(value).__name__}")


# ------------------------------------------------------------------------------- the other ranks


class ThreadGroup:
    """The ranks of a job as threads of one process: numbered exchanges with a bounded wait.

    Items are pickled, as on a network: no two ranks ever share an object.
    """

    def __init__(self, world_size: int, timeout_s: float = _WAIT_S) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._rounds: dict[int, dict[int, bytes]] = {}
        self._reached = [0] * world_size
        self._read: dict[int, int] = {}
        self._gone: set[int] = set()

    def transport(self, rank: int) -> ThreadTransport:
        return ThreadTransport(self, rank)

    def leave(self, rank: int) -> None:
        """Remove ``rank`` from later exchanges: a rank that waits for it gets ``RankFailed``."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()

    def exchange(self, rank: int, item: Any) -> list[Any]:
        """Every rank's item, in rank order. Raises ``RankFailed`` with the ranks that are missing."""
        data = pickle.dumps(item)
        with self._changed:
            number = self._reached[rank]
            self._reached[rank] += 1
            items = self._rounds.setdefault(number, {})
            items[rank] = data
            self._changed.notify_all()
            self._changed.wait_for(partial(self._decided, items), self.timeout_s)
            if len(items) < self.world_size:
                missing = tuple(sorted(set(range(self.world_size)) - set(items)))
                raise RankFailed("a rank did not come to the exchange", ranks=missing)
            self._read[number] = self._read.get(number, 0) + 1
            if self._read[number] == self.world_size:
                del self._rounds[number], self._read[number]
        return [pickle.loads(items[r]) for r in range(self.world_size)]

    def _decided(self, items: Mapping[int, bytes]) -> bool:
        return len(items) == self.world_size or bool(self._gone - set(items))


class ThreadTransport:
    """The ``ports.Transport`` of one rank in a ``ThreadGroup``. ``exchanges`` counts its calls."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank = rank
        self.world_size = group.world_size
        self.exchanges = 0
        self._group = group

    def any_flags(self, flags: Sequence[bool]) -> list[bool]:
        return [any(column) for column in zip(*self._exchange(list(flags)), strict=True)]

    def gather(self, item: Any) -> list[Any] | None:
        everyone = self._exchange(item)
        return everyone if self.rank == 0 else None

    def broadcast(self, item: Any) -> Any:
        return self._exchange(item if self.rank == 0 else None)[0]

    def close(self) -> None:
        """Nothing is open."""

    def _exchange(self, item: Any) -> list[Any]:
        self.exchanges += 1
        return self._group.exchange(self.rank, item)


def run_ranks(
    world_size: int, work: Callable[[ThreadTransport], T], timeout_s: float = 60.0
) -> list[T | BaseException]:
    """Run ``work`` once per rank, each on a separate thread.

    Returns its result or its error, by rank.

    A rank that ends leaves the group. Raises ``TimeoutError`` if a rank is still running at the
    end.
    """
    group = ThreadGroup(world_size)
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            results[rank] = work(group.transport(rank))
        except BaseException as error:  # handed to the caller, of any kind
            results[rank] = error
        finally:
            group.leave(rank)

    threads = [
        threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for rank, thread in enumerate(threads):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            raise TimeoutError(f"rank {rank} did not end")
    return results


# ------------------------------------------------------------------------------------------ time


class ShiftedClock(SystemClock):
    """The real clock, which a test can move forward: no deadline has to be waited for."""

    def __init__(self) -> None:
        self._shift_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self._shift_s

    def unix(self) -> float:
        return super().unix() + self._shift_s

    def advance(self, seconds: float) -> None:
        self._shift_s += seconds


# -------------------------------------------------------------------------------------- assembly


def fake_ports(
    storage: str | os.PathLike[str] | Callable[[bool], Storage],
    *,
    driver: FakeDriver | None = None,
    transport: Transport | None = None,
    clock: Clock | None = None,
    executor: Callable[[], Executor] = ThreadExecutor,
    identity: Callable[[], Identity] = this_process,
    launch: Launch = launch_forked,
    mailbox: Callable[[], Mailbox | None] = no_mailbox,
) -> Ports:
    """Ports of a ``Manager`` without torch.

    ``storage`` is the directory of a root, or ``open_storage(create)``. Default: one rank, forked
    writers, the real clock.
    """
    transport = transport or LocalTransport()
    if not callable(storage):
        storage = partial(_open_posix, os.fspath(storage))
    return Ports(
        transport,
        driver or FakeDriver(transport.rank),
        clock or SystemClock(),
        executor,
        storage,
        identity,
        launch,
        PosixDeferredSignals,
        mailbox=mailbox,
    )


def _open_posix(root: str, create: bool) -> Storage:
    return PosixStorage(root, create=create)


def environment() -> dict[str, str]:
    """The variables of an interpreter that imports this module."""
    places = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}
