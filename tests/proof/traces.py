"""Every journal is a legal trace (I11), and the judge of that can tell an illegal one.

Jobs of production code wander at random over a simulated disk: saves, failures, rollbacks, pins,
errors, crashes, power losses, zombies, damage, fresh starts; every journal they leave must conform.
Then journals that production code wrote are made illegal one way at a time, with right checksums,
and each must be refused by the very rule it breaks. Last, the speed of the judge, from a real disk,
and, in nightly and release, the journal of the demo. That takes a minute of CPU: in the gate the
tutorial's job stands in for it (``test_docs``), as large, of real Megatron, with its kill and its
restart.

PYTHONPATH=tests python -m proof.traces [--seed N] one wander, with its actions
"""

from __future__ import annotations

import argparse
import errno
import random
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from ckptfsm.core.documents import (
    CheckpointRecord,
    Part,
    SegmentClosed,
    SegmentOpened,
    TransitionRecord,
)
from ckptfsm.core.errors import CkptFsmError, DamagedRoot
from ckptfsm.core.layout import JOURNAL, MANIFEST, MEGATRON, QUARANTINE, segment_name
from ckptfsm.core.lifecycle import State
from ckptfsm.core.ports import Identity
from ckptfsm.core.retention import KeepAll, LatestN
from ckptfsm.disk.journal import encode_line
from ckptfsm.testing.conformance import (
    RULES,
    Conformance,
    JournalViolation,
    assert_journal_conforms,
    check_segments,
    read_segments,
)
from ckptfsm.testing.faults import FaultStorage, crash_at, fail_at
from ckptfsm.testing.harness import FakeJob
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage
from proof.coverage import watch_moves
from proof.layer import Budget, LayerResult, Violation

EVENTS_PER_SECOND = 100_000
_REPLAY = "PYTHONPATH=tests python -m proof.traces"
_TRIES = 6
_WANDER = 120  # transitions after which a wander ends

# ------------------------------------------------------------------------------------- wandering


class Wanderer:
    """A random life of a root: several runs of a job, one after the other or competing."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.disk = SimDisk()
        self.done: list[str] = []
        self.moves = 0
        self._runs = 0
        self._sleeper: FakeJob | None = None
        self._pinned: list[int] = []
        self._acts: dict[str, tuple[int, Callable[[FakeJob], object]]] = {
            "save": (20, self._save),
            "fail": (4, self._fail),
            "leave it in flight": (1, lambda job: job.request(self._next_step(job))),
            "tick": (2, lambda job: job.coordinator.tick()),
            "rollback": (2, lambda job: job.coordinator.rollback(self._any_step(job))),
            "pin": (2, self._pin),
            "unpin": (1, self._unpin),
            "measure": (2, self._measure),
            "delete": (1, lambda job: job.coordinator.delete(self._any_step(job))),
            "wake the zombie": (2, self._wake),
            "damage": (1, self._damage),
        }

    def go(self) -> SimDisk:
        while self.moves < _WANDER and self._runs < 40:
            self._run()
        return self.disk

    def _start(self) -> FakeJob:
        self._runs += 1
        name, choose = f"p{self._runs}", self.random
        storage = FaultStorage(SimStorage(self.disk, name))
        fault = choose.choice(["none"] * 6 + ["crash", "EIO", "ENOSPC", "ESTALE"])
        if fault == "crash":
            storage.before = crash_at(choose.randrange(400))
        elif fault != "none":
            storage.before = fail_at(choose.randrange(400), getattr(errno, fault))
        resume = choose.choice(["fallback"] * 11 + ["fresh"])
        retention = choose.choice([KeepAll(), LatestN(1), LatestN(3)])
        takeover = self._sleeper is not None
        self.done.append(f"{name}: fault {fault}, {resume}, {retention}, takeover={takeover}")
        identity = Identity("sim", self._runs, name, name)
        return FakeJob(
            storage, retention=retention, resume=resume, takeover=takeover, identity=identity
        )

    def _run(self) -> None:
        job = self._start()
        try:
            job.open()
            for _ in range(self.random.randrange(2, 20)):
                self._act(job)
            if self.random.randrange(2):
                job.close()
        except DamagedRoot as error:  # nothing is left to resume from: a person begins again
            self.done.append(f"refused: {error}")
            self._forget_evidence()
        except (CkptFsmError, OSError, ProcessDead) as error:
            self.done.append(f"ended by {type(error).__name__}: {error}")
        self.moves += len(job.records)
        self._end(job)

    def _end(self, job: FakeJob) -> None:
        """The job dies, loses power, or lives on as a zombie that wakes up in the next run."""
        if self._sleeper is not None:
            self.disk.kill(self._sleeper.identity.started)
            self._sleeper = None
        end = self.random.choice(["kill", "kill", "power", "sleep"])
        self.done.append(end)
        if end == "kill":
            self.disk.kill(job.identity.started)
        elif end == "power":
            self.disk.crash(self.random)
        else:
            self._sleeper = job

    def _act(self, job: FakeJob) -> None:
        weights = [weight for weight, _ in self._acts.values()]
        name = self.random.choices(list(self._acts), weights)[0]
        self.done.append(name)
        job.clock.sleep(self.random.random() * 10)
        try:
            self._acts[name][1](job)
        except (CkptFsmError, OSError) as error:
            self.done.append(f"  {type(error).__name__}: {error}")
            if job.coordinator.fatal is not None:
                raise

    def _next_step(self, job: FakeJob) -> int:
        """Mostly a later one; the others are to be refused."""
        latest = job.coordinator.ledger.latest()
        return max(0, (latest.step if latest is not None else 0) + self.random.randrange(-1, 6))

    def _save(self, job: FakeJob) -> None:
        job.save(self._next_step(job))

    def _fail(self, job: FakeJob) -> None:
        of = job.request(self._next_step(job))
        if self.random.randrange(2):
            job.fork(of)
            job.write(of, 0)
        job.fail(of)

    def _any_step(self, job: FakeJob) -> int:
        tracked = job.coordinator.ledger.in_state(State.TRACKED)
        return self.random.choice(tracked).step if tracked else 1

    def _pin(self, job: FakeJob) -> None:
        self._pinned.append(self._any_step(job))
        job.coordinator.pin(self._pinned[-1], "wander")

    def _unpin(self, job: FakeJob) -> None:
        if self._pinned:
            job.coordinator.unpin(self._pinned.pop())

    def _measure(self, job: FakeJob) -> None:
        job.coordinator.record_metrics(self._any_step(job), {"loss": self.random.random()})

    def _wake(self, job: FakeJob) -> None:
        if self._sleeper is not None:
            try:
                self._sleeper.save(1000)
            except (CkptFsmError, OSError, ProcessDead) as error:
                self.done.append(f"  the zombie: {type(error).__name__}: {error}")

    def _damage(self, job: FakeJob) -> None:
        """A person deletes a manifest: the directory is no checkpoint of ours any more."""
        SimStorage(self.disk, "person").unlink(
            f"{MEGATRON.published_name(self._any_step(job))}/{MANIFEST}"
        )

    def _forget_evidence(self) -> None:
        person = SimStorage(self.disk, "person")
        for name in person.listdir(""):
            if name != ".ckptfsm":
                person.rename(name, f"{QUARANTINE}/{name}.{self._runs}")


def _wander(budget: Budget, result: LayerResult) -> None:
    total = budget.pick(pr=150, nightly=1500, release=1500)
    found, tried = Conformance(), 0
    with watch_moves(result.coverage):
        for seed in range(total):
            wanderer = Wanderer(seed)
            tried += 1
            try:
                found = _plus(found, assert_journal_conforms(SimStorage(wanderer.go(), "judge")))
            except JournalViolation as error:
                _violate(result, "I11", str(error), f"{_REPLAY} --seed {seed}")
                if budget.stop_at_first:
                    break
    result.explored |= {
        "journals": tried,
        "segments": found.segments,
        "transitions": found.transitions,
    }


def _plus(one: Conformance, other: Conformance) -> Conformance:
    return Conformance(
        one.segments + other.segments,
        one.records + other.records,
        one.transitions + other.transitions,
        one.ignored + other.ignored,
    )


def _violate(result: LayerResult, promise: str, what: str, replay: str) -> None:
    result.violations.append(Violation(promise, what, replay))


# -------------------------------------------------------------------------------- illegal journals

Raw = dict[str, Any]
Segments = dict[int, list[Raw]]


def sample_journal() -> Segments:
    """Three segments by production code: all common moves are in the last one."""
    disk = SimDisk()
    first = FakeJob(SimStorage(disk, "p1"), identity=Identity("sim", 1, "p1", "p1"))
    first.open()
    first.save(1)
    first.close()
    second = FakeJob(SimStorage(disk, "p2"), identity=Identity("sim", 2, "p2", "p2"))
    second.open()
    second.save(2)
    second.coordinator.record_metrics(1, {"loss": 2.5})
    second.close()
    third = FakeJob(
        SimStorage(disk, "p3"), retention=LatestN(2), identity=Identity("sim", 3, "p3", "p3")
    )
    third.open()
    third.clock.sleep(5.0)
    third.fail(third.request(3))
    for step in (3, 4):
        third.clock.sleep(5.0)
        third.save(step)
    third.coordinator.record_metrics(3, {"loss": 1.5})
    third.coordinator.rollback(3)
    third.save(5)
    third.close()
    segments = read_segments(SimStorage(disk, "judge"))
    read = {epoch: list(map(_record, _lines(data))) for epoch, data in segments.items()}
    written = {epoch: _encode(records) for epoch, records in read.items()}
    assert written == {epoch: data.rstrip(b"\n") + b"\n" for epoch, data in segments.items()}
    return read


def _lines(data: bytes) -> list[bytes]:
    return data.rstrip(b"\n").split(b"\n")


def _record(line: bytes) -> Raw:
    value: Raw = from_json(line)["record"]
    return value


def _encode(records: list[Raw]) -> bytes:
    """As the library encodes, but anything: the checksum is right whatever the record says."""
    bodies = [to_json(record, inf_nan_mode="constants") for record in records]
    return b"".join(b'{"crc":"%08x","record":%b}\n' % (zlib.crc32(body), body) for body in bodies)


@dataclass(frozen=True)
class Forgery:
    """A way to make the sample illegal, and the rule that must notice."""

    name: str
    rule: str
    forge: Callable[[Segments], None]
    seal_again: bool = True


def find(records: list[Raw], event: str, *, nth: int = 0) -> int:
    """The index of the nth transition by ``event``, or of the nth record of that type."""
    hits = [i for i, r in enumerate(records) if event in (r.get("event"), r["type"])]
    return hits[nth]


def change(at: str, /, *, nth: int = 0, **fields: Any) -> Callable[[Segments], None]:
    """Other values in one record of the last segment."""

    def forge(segments: Segments) -> None:
        segments[3][find(segments[3], at, nth=nth)] |= fields

    return forge


def drop(event: str, *, nth: int = 0) -> Callable[[Segments], None]:
    def forge(segments: Segments) -> None:
        del segments[3][find(segments[3], event, nth=nth)]
        renumber(segments[3])

    return forge


def insert(after: str, copy: str, /, *, nth: int = 0, **fields: Any) -> Callable[[Segments], None]:
    """A copy of one record, with other values, after another one."""

    def forge(segments: Segments) -> None:
        records = segments[3]
        made = {**records[find(records, copy)], **fields}
        at = find(records, after, nth=nth)
        if "run_seconds" in made and "run_seconds" not in fields and made["type"] == "transition":
            made["run_seconds"] = records[at]["run_seconds"]
        records.insert(at + 1, made)
        renumber(records)

    return forge


def renumber(records: list[Raw]) -> None:
    numbers = iter(range(len(records)))
    for record in records:
        if record["type"] == "transition":
            record["seq"] = next(numbers)


def change_created(**fields: Any) -> Callable[[Segments], None]:
    def forge(segments: Segments) -> None:
        record = segments[3][find(segments[3], "save_requested")]
        record["created"] = {**record["created"], **fields}

    return forge


def change_opening(**fields: Callable[[Any], Any]) -> Callable[[Segments], None]:
    """Other values in the opening of the last segment."""

    def forge(segments: Segments) -> None:
        opened = segments[3][0]
        for name, new in fields.items():
            opened[name] = new(opened[name])

    return forge


def _first_with(**fields: Any) -> Callable[[list[Raw]], list[Raw]]:
    return lambda items: [{**items[0], **fields}, *items[1:]]


_TWO_IN_ONE_PLACE = [
    {"name": name, "kind": "torch_dist", "directory": "", "ranks": None} for name in ("a", "b")
]
_STEP_FIVE: Raw = {"step": 5, "epoch": 3, "attempt": 4}
_ADOPT: Raw = {"event": "adopted", "dest": "tracked", "source": "absent"}


def _adopt(step: int, **fields: Any) -> Raw:
    """The values of a record that adopts."""
    created = {
        "step": step, "epoch": 1, "attempt": 9, "state": "tracked", "parts": [], "world_size": 1,
        "in_place": False, "provenance": "adopted", "metrics": {}, "run_seconds": 0.0,
        "shard_bytes": 0, "reason": "", "detail": "",
    }  # fmt: skip
    identity = {"step": step, "epoch": 1, "attempt": 9}
    return {**_ADOPT, **identity, "created": created, "shard_bytes": 0, **fields}


FORGERIES = (
    # one checkpoint
    Forgery("a move is left out", "table", drop("writer_forked")),
    Forgery("a move is there twice", "table", insert("published", "published")),
    Forgery("an event that is no row", "table", change("published", event="tracker_written")),
    Forgery("another state than it is in", "table", change("published", source="forked")),
    Forgery("a name that is no event", "table", change("published", event="wished")),
    Forgery("a move within a state", "within-state", change("writer_forked", dest="requested")),
    Forgery(
        "a finalized one fails",
        "published-never-fails",
        change("tracker_written", event="failed", dest="failed", reason="x"),
    ),
    Forgery(
        "a tracked one fails",
        "published-never-fails",
        change("superseded", event="failed", dest="failed", reason="x"),
    ),
    Forgery("a tracked one is pruned", "I1", change("superseded", event="removed", dest="pruned")),
    Forgery(
        "a failed one is prunable",
        "I1",
        change("cleaned", event="superseded", dest="prunable"),
    ),
    Forgery(
        "a pruned one comes back",
        "ended",
        insert("removed", "removed", event="reprieved", dest="tracked", reason="x"),
    ),
    Forgery("a discarded one fails again", "ended", insert("cleaned", "failed")),
    Forgery("a discarded one is requested again", "ended", insert("cleaned", "save_requested")),
    Forgery("the bytes shrink", "shard-bytes", change("published", shard_bytes=1)),
    Forgery("another manifest", "manifest", change("tracker_written", manifest_crc="0" * 8)),
    Forgery("a manifest too early", "manifest", change("writer_forked", manifest_crc="0" * 8)),
    Forgery("bytes below zero", "record", change("published", shard_bytes=-1)),
    Forgery("nobody says why it failed", "reason", change("failed", reason="")),
    Forgery("nobody says why it was withdrawn", "reason", change("withdrawn", reason="")),
    Forgery("withdrawn for no reason of ours", "reason", change("withdrawn", reason="mood")),
    Forgery("a rank publishes", "reason", change("published", rank=1)),
    # its creation
    Forgery("created without a checkpoint", "creation", change("save_requested", created=None)),
    Forgery(
        "created by a later move",
        "creation",
        lambda s: s[3][find(s[3], "published")].update(
            created=s[3][find(s[3], "save_requested", nth=1)]["created"]
        ),
    ),
    Forgery("created as another attempt", "creation", change_created(attempt=7)),
    Forgery("created in another state", "creation", change_created(state="tracked")),
    Forgery("requested but adopted", "creation", change_created(provenance="adopted")),
    Forgery("two parts in one place", "creation", change_created(parts=_TWO_IN_ONE_PLACE)),
    Forgery("a checkpoint without parts", "creation", change_created(parts=[])),
    Forgery("of another epoch", "own-epoch", lambda s: _as_attempt(s[3], epoch=2)),
    Forgery("an attempt number again", "own-epoch", lambda s: _as_attempt(s[3], attempt=2)),
    Forgery("requested in the future", "run-seconds", change_created(run_seconds=1e9)),
    # several checkpoints
    Forgery("two in flight", "one-in-flight", lambda s: _second_in_flight(s[3])),
    Forgery("a step that does not grow", "steps-grow", lambda s: _as_step(s[3], 2)),
    Forgery(
        "the latest is prunable",
        "newer-tracked",
        insert("tracker_written", "superseded", nth=2, **_STEP_FIVE, shard_bytes=10**6),
    ),
    Forgery(
        "adopted in the middle of a run",
        "restart-only",
        insert("cleaned", "save_requested", **_adopt(0)),
    ),
    Forgery(
        "a step tracked twice",
        "one-per-step",
        insert("segment_opened", "save_requested", **_adopt(1), run_seconds=10.0),
    ),
    # a run
    Forgery("a number is left out", "seq", change("published", seq=77)),
    Forgery("time runs back", "run-seconds", change("published", run_seconds=0.5)),
    Forgery("time is no number", "run-seconds", change("published", run_seconds=float("nan"))),
    Forgery("a move after the end", "closing", insert("segment_closed", "rollback_started")),
    Forgery("opened twice", "opening", insert("cleaned", "segment_opened")),
    Forgery("opened as another epoch", "opening", change("segment_opened", epoch=2)),
    Forgery("not opened", "opening", lambda s: s[3].pop(0) and None),
    # rollbacks
    Forgery("an end without a beginning", "intent", insert("cleaned", "rollback_finished")),
    Forgery("a beginning within another", "intent", insert("rollback_started", "rollback_started")),
    Forgery("a rollback to nowhere", "intent", change("rollback_started", to_step=99)),
    Forgery("saved during a rollback", "intent", drop("rollback_finished")),
    Forgery("withdrawn below the target", "rollback", change("rollback_started", to_step=4)),
    Forgery("afresh, but not all", "rollback", change("withdrawn", reason="fresh")),
    Forgery("a step is left above the target", "rollback", drop("withdrawn")),
    # segments
    Forgery(
        "a seal of other bytes",
        "seal",
        change_opening(seals=_first_with(bytes=100)),
        seal_again=False,
    ),
    Forgery(
        "a seal of other content",
        "seal",
        change_opening(seals=_first_with(crc32=1)),
        seal_again=False,
    ),
    Forgery("a sealed segment is gone", "seal", lambda s: s.pop(1) and None, seal_again=False),
    Forgery(
        "a sealed segment is not sealed again",
        "seals-chain",
        change_opening(seals=lambda seals: seals[1:]),
        seal_again=False,
    ),
    Forgery(
        "a snapshot without a checkpoint",
        "snapshot",
        change_opening(checkpoints=lambda items: items[1:]),
    ),
    Forgery(
        "a snapshot with one more",
        "snapshot",
        change_opening(checkpoints=lambda items: [*items, {**items[0], "attempt": 5}]),
    ),
    Forgery(
        "a snapshot with one twice",
        "snapshot",
        change_opening(checkpoints=lambda items: [*items, items[0]]),
    ),
    Forgery(
        "a snapshot in another state",
        "snapshot",
        change_opening(checkpoints=_first_with(state="prunable")),
    ),
    Forgery(
        "a snapshot with other bytes",
        "snapshot",
        change_opening(checkpoints=_first_with(shard_bytes=7)),
    ),
    Forgery(
        "a snapshot of other time",
        "snapshot",
        change_opening(run_seconds=lambda seconds: seconds + 1),
    ),
    Forgery("a snapshot with a rollback", "snapshot", change_opening(rolling_back=lambda _: True)),
    # records
    Forgery("a field too many", "record", change("published", mood="good")),
    Forgery("a field of another type", "record", change("published", step="3")),
    Forgery("a flag for a number", "record", change("published", rank=True)),
    Forgery(
        "a snapshot without a metric",
        "snapshot",
        change_opening(checkpoints=_first_with(metrics={})),
    ),
    Forgery("metrics of no checkpoint", "metrics", change("metrics_recorded", attempt=77)),
    Forgery("metrics of a failed save", "metrics", insert("failed", "metrics_recorded", attempt=1)),
    Forgery(
        "a metric that is no number", "record", change("metrics_recorded", metrics={"loss": ""})
    ),
    Forgery("a step beyond the largest", "record", lambda s: _as_step(s[3], 10**15 + 1)),
    Forgery("a kind that is none", "record", change("published", type="wish")),
    Forgery("of a newer version", "record", change("segment_opened", schema_version=2)),
)


def _as_attempt(records: list[Raw], **fields: int) -> None:
    """The last but one save of the segment under another attempt."""
    of = records[find(records, "save_requested", nth=2)]["attempt"]
    for record in records:
        if record.get("attempt") == of:
            record |= fields
            if record["created"]:
                record["created"] = {**record["created"], **fields}


def _as_step(records: list[Raw], step: int) -> None:
    record = records[find(records, "save_requested")]
    record |= {"step": step, "created": {**record["created"], "step": step}}


def _second_in_flight(records: list[Raw]) -> None:
    """The second save is requested before the first one ended, as another attempt."""
    made = dict(records[find(records, "save_requested", nth=1)])
    made["run_seconds"] = records[find(records, "save_requested")]["run_seconds"]
    made["created"] = {**made["created"], "run_seconds": 0.0}
    records.insert(find(records, "save_requested") + 1, made)
    renumber(records)


def forged(forgery: Forgery) -> dict[int, bytes]:
    """The sample made illegal in one way, sealed as if nothing were wrong."""
    segments = sample_journal()
    forgery.forge(segments)
    if not forgery.seal_again:
        return {epoch: _encode(records) for epoch, records in segments.items()}
    written: dict[int, bytes] = {}
    seals: list[Raw] = []
    for epoch, records in sorted(segments.items()):
        if records[0]["type"] == "segment_opened":
            records[0]["seals"] = list(seals)
        written[epoch] = _encode(records)
        size, crc = len(written[epoch]), zlib.crc32(written[epoch])
        seals.append({"epoch": epoch, "bytes": size, "crc32": crc})
    return written


def damaged_lines() -> dict[int, bytes]:
    """Damage without a right checksum: a flipped bit with intact records after it."""
    written = forged(Forgery("", "", lambda segments: None))
    data = bytearray(written[3])
    data[data.index(b"\n") + 60] ^= 1
    return {**written, 3: bytes(data)}


def refused_by(segments: dict[int, bytes]) -> str:
    """The rule that refuses a journal; "" if it is accepted."""
    try:
        check_segments(segments)
    except JournalViolation as error:
        return error.rule
    return ""


def _controls(result: LayerResult) -> None:
    """Every forgery is refused by its rule; every rule refuses something."""
    replay = f"{_REPLAY} --forgeries"
    legal = refused_by(forged(Forgery("", "", lambda segments: None)))
    if legal:
        _violate(result, "I11", f"the sample itself is refused by {legal}", replay)
    seen = {"file": 1, "line": 1}  # the first needs a disk: tests/unit/testing/test_conformance.py
    if refused_by(damaged_lines()) != "line":
        _violate(result, "I11", "damage in the middle is accepted", replay)
    for forgery in FORGERIES:
        rule = refused_by(forged(forgery))
        seen[rule] = 1
        if rule != forgery.rule:
            what = f"{forgery.name}: refused by {rule or 'nobody'}, not by {forgery.rule}"
            _violate(result, "I11", what, replay)
    for rule in set(RULES) - set(seen):
        _violate(result, "I11", f"no forgery breaks the rule {rule!r}", replay)
    result.explored["illegal_journals_refused"] = len(FORGERIES) + 1


# ------------------------------------------------------------------------------------------- speed

_LIFE = (
    ("writer_forked", State.REQUESTED, State.FORKED),
    ("shard_reported", State.FORKED, State.SHARDS_WRITTEN),
    ("published", State.SHARDS_WRITTEN, State.FINALIZED),
    ("tracker_written", State.FINALIZED, State.TRACKED),
    ("superseded", State.TRACKED, State.PRUNABLE),
    ("removed", State.PRUNABLE, State.PRUNED),
)


def long_segment(transitions: int) -> Iterator[bytes]:
    """The lines of one long run that keeps its latest checkpoint, by the production encoder."""
    yield encode_line(
        SegmentOpened(epoch=1, host="h", pid=1, at="now", seals=(), run_seconds=0.0, checkpoints=())
    )
    seq = 0

    def move(attempt: int, event: str, source: State, dest: State, **more: Any) -> bytes:
        nonlocal seq
        seq += 1
        size = 0 if source in (State.ABSENT, State.REQUESTED) else 3_221_225_472
        return encode_line(
            TransitionRecord(
                seq=seq - 1, step=attempt * 100, epoch=1, attempt=attempt, event=event,
                source=source, dest=dest, shard_bytes=size, run_seconds=seq * 0.73,
                at="2026-01-01T00:00:00.123456+00:00", **more,
            )
        )  # fmt: skip

    attempt = 0
    while seq < transitions:
        attempt += 1
        created = CheckpointRecord(
            step=attempt * 100, epoch=1, attempt=attempt, state=State.REQUESTED,
            parts=(Part(name="state"),), world_size=64,
        )  # fmt: skip
        yield move(attempt, "save_requested", State.ABSENT, State.REQUESTED, created=created)
        for event, source, dest in _LIFE[:4]:
            yield move(attempt, event, source, dest)
        if attempt > 1:
            for event, source, dest in _LIFE[4:]:
                yield move(attempt - 1, event, source, dest)
    yield encode_line(SegmentClosed(run_seconds=seq * 0.73))


def _measure(budget: Budget, result: LayerResult) -> None:
    """From disk, whole function, in CPU time, best of a few: others share this machine.

    A figure, never a violation: on a busy machine a rate says nothing about the library.
    """
    transitions = budget.pick(pr=100_000, nightly=210_000, release=1_000_000)
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / JOURNAL
        directory.mkdir(parents=True)
        (directory / segment_name(1)).write_bytes(b"".join(long_segment(transitions)))
        rate = 0.0
        for _ in range(_TRIES):
            began = time.process_time()
            found = assert_journal_conforms(place)
            rate = max(rate, found.transitions / (time.process_time() - began))
            if rate >= EVENTS_PER_SECOND:
                break
    result.explored["events_per_second"] = round(rate)
    met = "met" if rate >= EVENTS_PER_SECOND else "missed"
    result.notes.append(
        f"{found.transitions} transitions from disk, {rate:,.0f}/s of CPU; "
        f"target {EVENTS_PER_SECOND:,}/s: {met}"
    )


def _demo(result: LayerResult) -> None:
    """The journal of the demo, with its kill and its restart, on a real disk."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "ckptfsm.cli", "demo", "--root", f"{place}/demo"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode != 0:
            _violate(result, "I11", f"the demo failed: {done.stderr[-2000:]}", "make demo")
            return
        try:
            found = assert_journal_conforms(f"{place}/demo")
        except JournalViolation as error:
            _violate(result, "I11", f"the demo: {error}", "make demo")
            return
    result.explored["transitions of the demo"] = found.transitions


# --------------------------------------------------------------------------------------------- run


def run(budget: Budget) -> LayerResult:
    """See the module."""
    result = LayerResult("trace validation")
    began = time.monotonic()
    _wander(budget, result)
    if not (budget.stop_at_first and result.violations):
        _controls(result)
    if not budget.stop_at_first:
        _measure(budget, result)
    if budget.profile in ("nightly", "release"):
        _demo(result)
    result.seconds = time.monotonic() - began
    return result


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.traces")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--forgeries", action="store_true")
    parser.add_argument("--speed", action="store_true")
    options = parser.parse_args(arguments)
    result = LayerResult("trace validation")
    if options.seed is not None:
        wanderer = Wanderer(options.seed)
        try:
            print(assert_journal_conforms(SimStorage(wanderer.go(), "judge")))
        except JournalViolation as error:
            _violate(result, "I11", str(error), "")
        print("\n".join(wanderer.done))
    elif options.forgeries:
        _controls(result)
    elif options.speed:
        _measure(Budget(), result)
    else:
        result = run(Budget())
    print(result.explored, *result.notes, sep="\n")
    print(*result.violations, sep="\n")
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
