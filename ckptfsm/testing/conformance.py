"""Judges whether a journal is a legal trace of the specification, without the code that wrote it.

``assert_journal_conforms`` replays every segment of a root (I11). The specification is
``lifecycle.TABLE`` for a single checkpoint, and ``RULES`` for several, a run, or a restart. Nothing is
shared with ``journal`` but the words of the format.

The remains of a crash or a zombie conform: a torn tail, bytes after a seal, a segment created but not
begun, one without a seal.
"""

from __future__ import annotations

import json
import os
import zlib
from bisect import bisect_right, insort
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from pydantic import ValidationError

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core import documents
from ckptfsm.core.documents import MAX_SEGMENT_BYTES, RECORD, first_problem
from ckptfsm.core.errors import ConfigError
from ckptfsm.core.layout import JOURNAL, parse_segment
from ckptfsm.core.lifecycle import ENDED, IN_FLIGHT, TABLE, UNPUBLISHED, State
from ckptfsm.core.parts import PartSpec, check_parts
from ckptfsm.core.ports import Storage
from ckptfsm.disk.durable import list_names

RULES: Mapping[str, str] = MappingProxyType(
    {
        "file": "a segment is a regular file",
        "line": "a damaged line is the last thing in its segment",
        "record": "every record has exactly the fields of its kind, each of its type",
        "opening": "a segment begins with its own opening, and has no other",
        "closing": "nothing follows the closing of a segment",
        "seal": "a sealed segment is there, unchanged, and ends with a record (F20)",
        "seals-chain": "a segment seals what the one before it sealed, and that one; or the newest 16",
        "snapshot": "a segment opens with the ledger that the sealed ones add up to",
        "seq": "transitions are numbered from 0 in each segment",
        "run-seconds": "the accumulated run time never decreases",
        "table": "every transition is a row of the table, from the state the checkpoint is in",
        "within-state": "what happens within one state is not journaled",
        "I1": "only a prunable checkpoint is pruned, only a tracked one becomes prunable",
        "published-never-fails": "a finalized or tracked checkpoint never fails",
        "ended": "an ended attempt never comes back, unless a restart adopts its directory",
        "creation": "a creating transition, and no other, carries the checkpoint it creates",
        "own-epoch": "a save is requested under its segment's epoch, with a growing attempt number",
        "one-in-flight": "at most one checkpoint is in flight per root",
        "steps-grow": "a save is requested after the latest tracked step, and tracked after it (I2)",
        "one-per-step": "a step has one tracked checkpoint at most",
        "newer-tracked": "a checkpoint becomes prunable only while a newer one is tracked (I7)",
        "restart-only": "a restart adopts and finds published, before the first save of its segment",
        "reason": "who fails, is withdrawn or reprieved says why; only a failure names a rank",
        "shard-bytes": "the bytes of a checkpoint never shrink",
        "manifest": "a checkpoint gets its manifest where it is published, and never another",
        "intent": "a rollback begins and ends once, or gives way to a fresh start; no save in between",
        "rollback": "only a rollback withdraws for one, above its target, and all that is there",
        "metrics": "only a tracked checkpoint gets metrics after its save",
    }
)

_PREFIX, _MIDDLE = b'{"crc":"', b'","record":'
_BODY = len(_PREFIX) + 8 + len(_MIDDLE)
_ADDED = {"retention", "manifest_crc"}  # the fields that journals of earlier versions do not have
_ABSENT, _TRACKED, _PRUNABLE = State.ABSENT.value, State.TRACKED.value, State.PRUNABLE.value
_FAILED, _QUARANTINED, _PRUNED = State.FAILED.value, State.QUARANTINED.value, State.PRUNED.value
_IN_FLIGHT = frozenset(state.value for state in IN_FLIGHT)
_UNPUBLISHED = frozenset(state.value for state in UNPUBLISHED)
_ENDED = frozenset(state.value for state in ENDED)
_GONE = _ENDED - {_QUARANTINED}
_PUBLISHING = frozenset({"published", "found_published"})
_ALONE = frozenset({"writer_forked", "shard_reported", "published"})  # concern no other checkpoint
_REASONS = ("rollback", "damaged", "missing", "fresh")
_CARRIED = (
    "run_seconds",
    "rolling_back",
    "rolling_back_to",
    "rolling_back_lowered",
    "begun_afresh",
)

_Id = tuple[int, int, int]
_Raw = dict[str, Any]


class JournalViolation(AssertionError):
    """A journal is no legal trace. ``record`` is the index in ``file``: 0 is the opening."""

    def __init__(self, file: str, record: int, rule: str, detail: str) -> None:
        super().__init__(f"{file} record {record}: {detail} [{rule}: {RULES[rule]}]")
        self.file, self.record, self.rule = file, record, rule


@dataclass(frozen=True, slots=True)
class Conformance:
    """The counts of a journal that conforms. ``ignored`` segments were not begun, or not sealed."""

    segments: int = 0
    records: int = 0
    transitions: int = 0
    ignored: int = 0


def assert_journal_conforms(
    root: str | os.PathLike[str] | Storage, *, lost: Collection[int] = ()
) -> Conformance:
    """Replay the journal of a root: its directory, or any ``Storage``. Returns the counts.

    A root without a journal conforms. ``lost``: the epochs of segments that somebody else has removed.
    Raises ``JournalViolation`` for the first violation found, ``OSError`` if it cannot be read.
    """
    return check_segments(read_segments(root), lost=lost)


def read_segments(root: str | os.PathLike[str] | Storage) -> dict[int, bytes]:
    """The segments of a root as found on disk: epoch -> content."""
    if not isinstance(root, (str, os.PathLike)):
        return _segments_in(root)
    if not Path(root).is_dir():
        return {}
    storage = PosixStorage(os.fspath(root))
    try:
        return _segments_in(storage)
    finally:
        storage.close_root()


def _segments_in(storage: Storage) -> dict[int, bytes]:
    segments: dict[int, bytes] = {}
    for name in list_names(storage, JOURNAL):
        epoch = parse_segment(name)
        if epoch is None:
            continue
        found = storage.stat(f"{JOURNAL}/{name}")
        if found.kind != "file":  # reading a FIFO would never end
            raise JournalViolation(_file(epoch), 0, "file", f"it is a {found.kind}")
        if found.size > MAX_SEGMENT_BYTES:
            raise JournalViolation(_file(epoch), 0, "file", f"it has {found.size} bytes")
        segments[epoch] = storage.read(f"{JOURNAL}/{name}", MAX_SEGMENT_BYTES)
    return segments


def check_segments(segments: Mapping[int, bytes], *, lost: Collection[int] = ()) -> Conformance:
    """Replay segments in memory: epoch -> content. Raises ``JournalViolation``.

    ``lost``: the epochs of segments that somebody else has removed, if they are not there.
    """
    begun = ((e, first) for e in sorted(segments, reverse=True) if (first := _first(segments[e])))
    newest, opening = next(begun, (0, b""))
    if not newest:
        return Conformance(ignored=len(segments))
    sealed = _parsed_opening(_file(newest), opening, newest)["seals"]
    gone = frozenset(lost) - segments.keys()
    replay = _Replay(folded=len(sealed) >= documents.KEPT_SEGMENTS, lost=gone)
    for seal in sealed:
        if seal["epoch"] in gone:
            continue
        data = segments.get(seal["epoch"], b"")[: seal["bytes"]]
        if len(data) < seal["bytes"] or zlib.crc32(data) != seal["crc32"]:
            file = _file(seal["epoch"])
            raise JournalViolation(file, 0, "seal", f"not what {_file(newest)} sealed")
        replay.segment(seal["epoch"], data, sealed=True)
    replay.segment(newest, segments[newest], sealed=False)
    count = sum(seal["epoch"] not in gone for seal in sealed) + 1
    return Conformance(count, replay.records, replay.transitions, len(segments) - count)


def _file(epoch: int) -> str:
    return f"{JOURNAL}/{epoch:06d}.ndjson"


def _body(line: bytes) -> bytes | None:
    """The record of an intact line, or None."""
    if line[:8] != _PREFIX or line[16:_BODY] != _MIDDLE or line[-1:] != b"}":
        return None
    body = line[_BODY:-1]
    return body if line[8:16] == b"%08x" % zlib.crc32(body) else None


def _first(data: bytes) -> bytes:
    """The first intact record of a segment; empty if there is none."""
    data, at = data.lstrip(b"\n"), 0
    while at < len(data):
        end = data.find(b"\n", at)
        body = _body(data[at : end if end >= 0 else len(data)])
        if body is not None:
            return body
        at = end + 1 if end >= 0 else len(data)
    return b""


def _bodies(data: bytes) -> Iterator[tuple[bytes | None, int]]:
    """Every line that is not padding: its record or None, and the offset of its end."""
    end = -1
    for line in data.rstrip(b"\n").split(b"\n"):
        end += len(line) + 1
        if line:
            yield _body(line), end


def _parsed(file: str, index: int, body: bytes) -> _Raw:
    """A record of any kind, validated by its model.

    Raises also if a field with a default is missing, unless journals of earlier versions have none.
    """
    try:
        record = RECORD.validate_json(body)
    except ValidationError as error:
        raise JournalViolation(file, index, "record", first_problem(error)) from None
    missing = set(type(record).model_fields) - record.model_fields_set - _ADDED
    if missing:
        raise JournalViolation(file, index, "record", f"without {', '.join(sorted(missing))}")
    value: _Raw = record.model_dump(mode="json")
    return value


def _parsed_opening(file: str, body: bytes, epoch: int) -> _Raw:
    opened = _parsed(file, 0, body)
    if opened["type"] != "segment_opened" or opened["epoch"] != epoch:
        detail = f"begins with {opened['type']} of epoch {opened.get('epoch')}"
        raise JournalViolation(file, 0, "opening", detail)
    return opened


# ------------------------------------------------------------------------------------------ replay


_ONLY_FROM = MappingProxyType(
    {_PRUNED: _PRUNABLE, _PRUNABLE: _TRACKED, State.DISCARDED.value: _FAILED}
)


def _broken_promise(source: str, dest: str) -> str:
    """The promise that a move breaks, whether it stands in the table or not; "" if none."""
    if source == dest:
        return "within-state"
    if dest == _FAILED and source not in _UNPUBLISHED:
        return "published-never-fails"
    if _ONLY_FROM.get(dest, source) != source:
        return "I1"
    return "ended" if source in _ENDED else ""


_MOVES: Mapping[tuple[str, str, str], str] = MappingProxyType(
    {
        (row.source.value, row.event.name, row.dest.value): _broken_promise(
            row.source.value, row.dest.value
        )
        for row in TABLE
    }
)


class _Replay:
    """The ledger according to the journal, over all segments; raises at the first violation.

    ``folded``: the first segment need not be the first of the root. Its snapshot is believed then,
    as is that of a segment that follows a ``lost`` one.
    """

    def __init__(self, *, folded: bool, lost: Collection[int]) -> None:
        self._folded = folded
        self._lost = lost
        self.records = self.transitions = 0
        self.checkpoints: dict[_Id, _Raw] = {}
        self.ended: set[_Id] = set()
        self.tracked: list[int] = []
        self.in_flight: _Id | None = None
        self.run_seconds = 0.0
        self.rolling_back = False
        self.target: int | None = None
        self.lowered = False
        self.begun_afresh = False
        self._seals: list[_Raw] = []
        self._file = ""
        self._index = self._seq = self._epoch = self._attempt = 0
        self._saved = self._closed = False
        self._other: Mapping[str, Callable[[_Raw], None]] = {
            "transition": self._transition,
            "rollback_started": self._rollback_started,
            "rollback_finished": self._rollback_finished,
            "metrics_recorded": self._metrics_recorded,
            "segment_closed": self._segment_closed,
        }

    def fail(self, rule: str, detail: str) -> NoReturn:
        raise JournalViolation(self._file, self._index, rule, detail)

    def segment(self, epoch: int, data: bytes, *, sealed: bool) -> None:
        """Replay one segment. If it is sealed, ``data`` is the sealed part."""
        self._file, self._epoch, self._index = _file(epoch), epoch, 0
        self._seq = self._attempt = 0
        self._saved = self._closed = False
        torn, end = False, 0
        for body, line_end in _bodies(data):
            if body is None:
                torn = True
                continue
            if torn:
                self.fail("line", "an intact record follows a damaged line")
            if self._index:
                self._record(body)
            else:
                self._open(_parsed_opening(self._file, body, epoch))
            self._index += 1
            end = min(line_end + 1, len(data))
        if sealed and (torn or end != len(data)):
            self.fail("seal", "the seal does not end with a record")
        self.records += self._index
        self._seals.append({"epoch": epoch, "bytes": end, "crc32": zlib.crc32(data[:end])})

    # ---------------------------------------------------------------------------- whole segments

    def _open(self, opened: _Raw) -> None:
        follows_a_gap = any(seal["epoch"] in self._lost for seal in opened["seals"][-1:])
        if follows_a_gap or (self._folded and not self._seals and opened["seals"]):
            self._begin_with(opened)
        there = [seal for seal in self._seals if seal["epoch"] not in self._lost]
        newest = [seals[-documents.KEPT_SEGMENTS :] for seals in (self._seals, there)]
        if opened["seals"] not in (self._seals, there, *newest):
            self.fail("seals-chain", f"it seals {len(opened['seals'])} of {len(self._seals)}")
        self._seals = list(opened["seals"])
        state = tuple(opened[name] for name in _CARRIED)
        rollback = (self.rolling_back, self.target, self.lowered)
        was = (self.run_seconds, *rollback, self.begun_afresh)
        if state != was:
            self.fail("snapshot", f"it opens with {state}, the segment before ended with {was}")
        carried = {_id_of(c): c for c in opened["checkpoints"]}
        if len(carried) != len(opened["checkpoints"]):
            self.fail("snapshot", "it names an attempt twice")
        for of, before in list(self.checkpoints.items()):
            after = carried.pop(of, None)
            if after is None and before["state"] == _QUARANTINED:
                del self.checkpoints[of]  # set aside: nothing is left to look after
            elif after is None or not _same(before, after):
                self.fail("snapshot", f"{_text(of)} is {after}, was {before}")
        if carried:
            self.fail("snapshot", f"{_text(next(iter(carried)))} comes from nowhere")

    def _begin_with(self, opened: _Raw) -> None:
        """Take over the snapshot of a segment, if the earlier segments are gone."""
        self._seals = opened["seals"]
        self.run_seconds, self.begun_afresh = opened["run_seconds"], opened["begun_afresh"]
        self.rolling_back, self.target = opened["rolling_back"], opened["rolling_back_to"]
        self.lowered = opened["rolling_back_lowered"]
        self.checkpoints = {_id_of(c): dict(c) for c in opened["checkpoints"]}
        states = {of: c["state"] for of, c in self.checkpoints.items()}
        self.tracked = sorted(of[0] for of, state in states.items() if state == _TRACKED)
        self.in_flight = next((of for of, state in states.items() if state in _IN_FLIGHT), None)

    def _segment_closed(self, record: _Raw) -> None:
        self._run_on(record["run_seconds"])
        self._closed = True

    def _rollback_started(self, record: _Raw) -> None:
        target = record["to_step"]
        if self.rolling_back and (target is not None or self.target is None):
            self.fail("intent", "a rollback begins within another")
        if target is not None and (self.in_flight is not None or target not in self.tracked):
            self.fail("intent", f"a rollback to {target}, which is not tracked, or during a save")
        self.rolling_back, self.target, self.lowered = True, target, False
        self.begun_afresh = self.begun_afresh or target is None

    def _rollback_finished(self, record: _Raw) -> None:
        if not self.rolling_back:
            self.fail("intent", "a rollback ends that never began")
        target = -1 if self.target is None else self.target
        reachable = self.target is None or (self.tracked and self.tracked[0] <= target)
        if reachable and self.tracked and self.tracked[-1] > target:
            self.fail("rollback", f"step {self.tracked[-1]} is left above {self.target}")
        self.rolling_back, self.target, self.lowered = False, None, False

    def _metrics_recorded(self, record: _Raw) -> None:
        known = self.checkpoints.get(_id_of(record))
        if known is None or known["state"] != _TRACKED:
            state = known["state"] if known is not None else _ABSENT
            self.fail("metrics", f"{_text(_id_of(record))} is {state}")
        known["metrics"] = {**known["metrics"], **record["metrics"]}

    def _run_on(self, run_seconds: float) -> None:
        if not run_seconds >= self.run_seconds:  # also for a NaN
            self.fail("run-seconds", f"{run_seconds} after {self.run_seconds}")
        self.run_seconds = run_seconds

    # -------------------------------------------------------------------------------- one record

    def _record(self, body: bytes) -> None:
        if self._closed:
            self.fail("closing", "a record follows")
        record = _parsed(self._file, self._index, body)
        if record["type"] == "segment_opened":
            self.fail("opening", "it is opened twice")
        self._other[record["type"]](record)

    def _transition(self, record: _Raw) -> None:
        if record["seq"] != self._seq:
            self.fail("seq", f"it is number {record['seq']}, not {self._seq}")
        self._seq += 1
        self.transitions += 1
        self._run_on(record["run_seconds"])
        of = (record["step"], record["epoch"], record["attempt"])
        source, event, dest = record["source"], record["event"], record["dest"]
        broken = _MOVES.get((source, event, dest))
        before = self.checkpoints.get(of)
        state = before["state"] if before is not None else _ABSENT
        if broken or broken is None or state != source:
            words = f"{_text(of)}: {source} -{event}-> {dest} while it is {state}"
            self.fail(self._why_illegal(of, state, broken, (source, event, dest)), words)
        after = self._created(of, record) if before is None else before
        if (record["created"] is not None) != (before is None):
            self.fail("creation", f"{_text(of)}: {event} with created={record['created']}")
        alone = event in _ALONE and self.in_flight == of and record["rank"] is None
        if not alone:
            self._judge(of, source, event, dest, record)
        if record["shard_bytes"] < after["shard_bytes"]:
            self.fail("shard-bytes", f"{_text(of)}: {record['shard_bytes']}")
        known, crc = after.get("manifest_crc", ""), record["manifest_crc"]
        if crc != known and (known or event not in _PUBLISHING):
            self.fail("manifest", f"{_text(of)}: {event} with {crc!r}, known is {known!r}")
        self._move(of, after, source, dest)
        after["state"] = dest
        after["shard_bytes"] = record["shard_bytes"]
        after["manifest_crc"] = crc
        after["reason"] = record["reason"] or after["reason"]
        after["detail"] = record["detail"] or after["detail"]

    def _why_illegal(
        self, of: _Id, state: str, broken: str | None, move: tuple[str, str, str]
    ) -> str:
        """The most telling rule that a move breaks."""
        if state in _ENDED or (of in self.ended and move[0] != _ABSENT):
            return "ended"
        return broken or _broken_promise(move[0], move[2]) or "table"

    def _created(self, of: _Id, record: _Raw) -> _Raw:
        """The checkpoint that this record creates."""
        created, event = record["created"], record["event"]
        if created is None:
            self.fail("creation", f"{_text(of)}: {event} creates nothing")
        adopted = event == "adopted"
        provenance = "adopted" if adopted else "saved"
        said = (_id_of(created), created["state"], created["provenance"])
        if said != (of, record["dest"], provenance):
            self.fail("creation", f"{_text(of)} by {event} creates {said}")
        if adopted:
            return dict(created)
        if of in self.ended:
            self.fail("ended", f"{_text(of)} is requested again")
        if of[1] != self._epoch or of[2] <= self._attempt:
            detail = f"{_text(of)} after attempt {self._attempt} of epoch {self._epoch}"
            self.fail("own-epoch", detail)
        self._attempt = of[2]
        if created["run_seconds"] > record["run_seconds"]:
            self.fail("run-seconds", f"{_text(of)} was requested later than journaled")
        try:
            check_parts(tuple(map(_spec_of, created["parts"])), created["world_size"])
        except ConfigError as error:
            self.fail("creation", f"{_text(of)}: {error.message}")
        return dict(created)

    def _judge(self, of: _Id, source: str, event: str, dest: str, record: _Raw) -> None:
        """Judge what the table leaves open: the other checkpoints, the run, the reason."""
        step, latest = of[0], self.tracked[-1] if self.tracked else -1
        if event in ("adopted", "found_published"):
            if self._saved:
                self.fail("restart-only", f"{_text(of)}: {event} after a save was requested")
        elif source == _ABSENT:
            self._saved = True
            if self.rolling_back:
                self.fail("intent", f"{_text(of)} is requested during a rollback")
            if step <= latest:
                self.fail("steps-grow", f"{_text(of)} is requested, the latest is {latest}")
        if dest in _IN_FLIGHT and self.in_flight not in (None, of):
            assert self.in_flight is not None
            self.fail("one-in-flight", f"{_text(of)} joins {_text(self.in_flight)}")
        if event == "tracker_written" and step <= latest:
            self.fail("steps-grow", f"{_text(of)} is tracked, the latest is {latest}")
        if dest == _TRACKED and source != _TRACKED and self._is_tracked(step):
            self.fail("one-per-step", f"{_text(of)}: step {step} is tracked already")
        if dest == _PRUNABLE and latest <= step:
            self.fail("newer-tracked", f"{_text(of)}, the latest is {latest}")
        reason = record["reason"]
        if (not reason and event in ("failed", "withdrawn", "reprieved")) or (
            record["rank"] is not None and dest != _FAILED
        ):
            self.fail("reason", f"{_text(of)}: {event} because {reason!r} of {record['rank']}")
        if event == "withdrawn" and reason not in ("damaged", "missing"):
            self._judge_withdrawal(of, reason)
        elif event == "withdrawn" and self.target is not None:
            reached = self.tracked[: bisect_right(self.tracked, self.target)]
            self.lowered = self.lowered and step != max(reached, default=None)

    def _judge_withdrawal(self, of: _Id, reason: str) -> None:
        if reason not in _REASONS:
            self.fail("reason", f"{_text(of)} is withdrawn for {reason!r}")
        expected = "fresh" if self.target is None else "rollback"
        above = self.target is None or of[0] > self.target
        if not (self.rolling_back and above and reason == expected):
            self.fail("rollback", f"{_text(of)} is withdrawn for {reason!r} to {self.target}")
        self.lowered = self.lowered or reason == "rollback"

    def _is_tracked(self, step: int) -> bool:
        at = bisect_right(self.tracked, step)
        return at > 0 and self.tracked[at - 1] == step

    def _move(self, of: _Id, after: _Raw, source: str, dest: str) -> None:
        """Keep the indexes: the checkpoint in flight, the tracked ones, all of them."""
        if dest in _IN_FLIGHT:
            self.in_flight = of
        elif self.in_flight == of:
            self.in_flight = None
        if source == _TRACKED:
            del self.tracked[bisect_right(self.tracked, of[0]) - 1]
        if dest == _TRACKED:
            self.begun_afresh = self.begun_afresh and self.rolling_back
            insort(self.tracked, of[0])
        if dest in _ENDED:
            self.ended.add(of)
        if dest in _GONE:
            del self.checkpoints[of]
        else:
            self.checkpoints[of] = after


def _id_of(record: _Raw) -> _Id:
    return record["step"], record["epoch"], record["attempt"]


def _spec_of(part: _Raw) -> PartSpec:
    ranks = part["ranks"]
    return PartSpec(
        part["name"],
        part["kind"],
        part["directory"],
        ranks and tuple(ranks),
        part.get("optional", False),
    )


def _text(of: _Id) -> str:
    return f"{of[0]}.e{of[1]}.a{of[2]}"


def _same(one: _Raw, other: _Raw) -> bool:
    """True if both are equal as JSON: a NaN equals itself."""
    return one == other or json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
