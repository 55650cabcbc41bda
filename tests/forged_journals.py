"""Journals that production code wrote, made illegal one way at a time, with right checksums.

The judge of journals must refuse each by the very rule that it breaks. That legal ones pass is seen
everywhere: the journals of all tests and of all simulated jobs are judged.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json, to_json

from ckptfsm.core.ports import Identity
from ckptfsm.core.retention import LatestN
from ckptfsm.testing.conformance import JournalViolation, check_segments, read_segments
from ckptfsm.testing.harness import FakeJob
from ckptfsm.testing.simfs import SimDisk, SimStorage

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
