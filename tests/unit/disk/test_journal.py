"""The journal: torn tails, damage, seals, zombies, full disks and lost fsyncs (F4, F5, F6, F20)."""

from __future__ import annotations

import errno
import json
import os
import random
import zlib

import pytest
from ledgers import (
    checkpoint,
)
from roots import read_segments

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core import documents as d
from ckptfsm.core import layout
from ckptfsm.core.documents import (
    RollbackFinished,
    checkpoint_record,
)
from ckptfsm.core.errors import (
    JournalCorrupt,
    NewerSchema,
    OutcomeUnknown,
    StorageError,
)
from ckptfsm.core.layout import JOURNAL, PRIVATE
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.rollback import Intent
from ckptfsm.disk import durable, journal
from ckptfsm.disk.journal import (
    BLOCK_BYTES,
    RESERVE_BYTES,
    JournalWriter,
    decode_line,
    encode_line,
    newest_segment,
    parse_segment_bytes,
    read_history,
)
from ckptfsm.testing.faults import FaultStorage, crash_at
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage

pytestmark = pytest.mark.damages_journal("journals made by hand, record by record")

S = State
ONE = f"{JOURNAL}/000001.ndjson"
LIFE = (
    (S.ABSENT, "save_requested", S.REQUESTED),
    (S.REQUESTED, "writer_forked", S.FORKED),
    (S.FORKED, "shard_reported", S.SHARDS_WRITTEN),
    (S.SHARDS_WRITTEN, "published", S.FINALIZED),
    (S.FINALIZED, "tracker_written", S.TRACKED),
    (S.TRACKED, "superseded", S.PRUNABLE),
    (S.PRUNABLE, "removed", S.PRUNED),
)


def opened(epoch: int = 1, **fields) -> d.SegmentOpened:
    values = {"seals": (), "run_seconds": 0.0, "checkpoints": ()} | fields
    return d.SegmentOpened(epoch=epoch, host="h", pid=1, at="", **values)


def created(step: int, state: State = S.REQUESTED, **fields) -> d.CheckpointRecord:
    return d.CheckpointRecord(
        step=step,
        epoch=1,
        attempt=1,
        state=state,
        parts=(d.Part(name="state"),),
        world_size=2,
        **fields,
    )


def move(
    source: State, event: str, dest: State, step: int = 100, seq: int = 0, **fields
) -> d.TransitionRecord:
    if source is S.ABSENT:
        fields.setdefault("created", created(step, dest))
    return d.TransitionRecord(
        seq=seq, step=step, epoch=1, attempt=1, event=event, source=source, dest=dest, **fields
    )


def life(upto: int, step: int = 100) -> list[d.TransitionRecord]:
    return [move(*row, step=step, seq=i) for i, row in enumerate(LIFE[:upto])]


def lines(*records: d.Record) -> bytes:
    return b"".join(encode_line(r) for r in records)


def corrupt(data: bytes) -> JournalCorrupt:
    with pytest.raises(JournalCorrupt) as caught:
        parse_segment_bytes(1, data, "f")
    assert caught.value.file == "f"
    return caught.value


def sim(disk: SimDisk | None = None, process: str = "p1") -> SimStorage:
    storage = SimStorage(disk or SimDisk(), process)
    for name in (PRIVATE, JOURNAL):
        if name not in storage.disk.snapshot():
            storage.mkdir(name)
            storage.fsync_dir(name.rpartition("/")[0])
    return storage


def plant(data: bytes, epoch: int = 1, storage: SimStorage | None = None) -> SimStorage:
    storage = storage or sim()
    storage.disk.plant_file(f"{JOURNAL}/{epoch:06d}.ndjson", data)
    return storage


def write(storage, records, epoch: int = 1, first: d.SegmentOpened | None = None) -> JournalWriter:
    writer = JournalWriter(storage, epoch)
    writer.open(first or opened(epoch))
    for record in records:
        writer.append(record)
    return writer


# --------------------------------------------------------------------------- lines and segments


def test_a_line_is_plain_json_and_its_crc_is_of_the_record():
    """Catches: a format that other tools cannot read or check."""
    line = encode_line(d.SegmentClosed(run_seconds=1.0))
    value = json.loads(line)
    body = decode_line(line[:-1])
    assert json.loads(body) == value["record"]
    assert value["crc"] == f"{zlib.crc32(body):08x}"
    assert line.endswith(b"}\n") and line.count(b"\n") == 1


def test_F20_every_single_byte_error_of_a_line_is_noticed():
    """Catches: a byte of a line that no check covers."""
    line = encode_line(move(*LIFE[0]))[:-1]
    assert decode_line(line) is not None
    for at in range(len(line)):
        for flip in (0x01, 0x80):
            bad = line[:at] + bytes([line[at] ^ flip]) + line[at + 1 :]
            assert decode_line(bad) is None, at
    for end in range(len(line)):
        assert decode_line(line[:end]) is None


@pytest.mark.parametrize("storage_kind", ["posix", "sim"])
def test_records_round_trip(storage_kind, tmp_path):
    """Catches: a record lost, changed or reordered between writing and reading."""
    storage = PosixStorage(tmp_path) if storage_kind == "posix" else sim()
    if storage_kind == "posix":
        storage.mkdir(PRIVATE)
        storage.mkdir(JOURNAL)
    records = [*life(7), d.RollbackStarted(to_step=5), d.SegmentClosed(run_seconds=3.0)]
    write(storage, records).close()
    (segment,) = read_segments(storage)
    assert list(segment.records) == [opened(), *records]
    data = storage.read(ONE, 1 << 20)
    assert segment.end == len(lines(*segment.records))
    assert segment.crc32 == zlib.crc32(data[: segment.end])
    assert len(data) % BLOCK_BYTES == 0 and set(data[segment.end :]) == {0x0A}


def test_padding_grows_and_always_leaves_the_reserve():
    """Catches: ordinary records that use up the last block of a segment."""
    storage = sim()
    writer = JournalWriter(storage, 1)
    writer.open(opened())
    for step in range(60):
        for record in life(7, step):
            writer.append(record)
        (segment,) = read_segments(storage)
        size = storage.stat(ONE).size
        assert size % BLOCK_BYTES == 0
        assert RESERVE_BYTES <= size - segment.end <= BLOCK_BYTES + RESERVE_BYTES
    assert len(segment.records) == 421


@pytest.mark.parametrize("after", ["eof", "padding", "zeros"])
def test_F20_a_torn_tail_at_every_byte_is_ignored(after):
    """Catches: a crash inside the last record that loses an earlier one, or stops the restart."""
    first, last = lines(opened(), *life(3)), encode_line(move(*LIFE[3]))
    for cut in range(len(last)):
        tail = {"eof": b"", "padding": b"\n" * 600, "zeros": b"\x00" * 400 + b"\n" * 200}[after]
        segment = parse_segment_bytes(1, first + last[:cut] + tail, "f")
        whole = after != "zeros" and cut == len(last) - 1  # only the newline is missing
        assert len(segment.records) == (5 if whole else 4), cut
        if not whole:
            assert (segment.end, segment.crc32) == (len(first), zlib.crc32(first))
    everything = parse_segment_bytes(1, first + last, "f")
    assert len(everything.records) == 5 and everything.end == len(first + last)


def test_F20_damage_in_the_middle_is_corruption_at_its_offset():
    """Catches: a record in the middle silently skipped."""
    records = [opened(), *life(4)]
    data = lines(*records)
    starts = [len(lines(*records[:i])) for i in range(len(records))]
    for index in range(len(records) - 1):
        start, length = starts[index], len(encode_line(records[index]))
        for at in range(0, length - 1, 7):
            bad = data[: start + at] + bytes([data[start + at] ^ 0x04]) + data[start + at + 1 :]
            assert corrupt(bad).offset == start
        error = corrupt(data[:start] + b"\x00" * (length - 1) + data[start + length - 1 :])
        assert error.offset == start
        assert corrupt(data[:start] + b"x\ny\n" + data[start:]).offset == start


def test_F20_two_lines_run_together_are_corruption():
    """Catches: a lost newline that hides two records."""
    data = lines(opened()) + lines(*life(2)).replace(b"}\n", b"}", 1) + lines(move(*LIFE[2]))
    assert corrupt(data).offset == len(lines(opened()))


def test_an_empty_or_blank_segment_has_no_records():
    """Catches: a crash right after the creation of a segment that stops the restart."""
    for data in (b"", b"\n" * BLOCK_BYTES, b'{"crc":"00'):
        assert parse_segment_bytes(1, data, "f").records == ()
    history = read_history(plant(b"\n" * BLOCK_BYTES, epoch=4))
    assert history.ledger.checkpoints == {} and history.newest_epoch == 4
    assert history.seals == () and newest_segment(sim()) == 0
    assert read_history(SimStorage(SimDisk())).newest_epoch == 0


def signed(record: dict) -> bytes:
    body = json.dumps(record).encode()
    return b'{"crc":"%08x","record":%s}\n' % (zlib.crc32(body), body)


def test_F30_an_intact_line_that_is_not_ours_is_corruption():
    """Catches: a record with a valid checksum taken for torn, or guessed at."""
    error = corrupt(lines(opened()) + signed({"type": "melted"}))
    assert error.offset == len(lines(opened())) and "not one of ours" in str(error)
    corrupt(signed({"type": "segment_closed", "run_seconds": "1"}))
    corrupt(signed({"type": "segment_closed", "run_seconds": 1.0, "surprise": 1}))


def test_F34_a_segment_of_a_newer_version_is_refused_as_newer():
    """Catches: a newer journal called corrupt, or read half."""
    record = json.loads(d.encode(opened())) | {"schema_version": 2, "shiny": True}
    with pytest.raises(NewerSchema) as caught:
        read_history(plant(signed(record)))
    assert caught.value.schema_version == 2 and caught.value.file == ONE


# ------------------------------------------------------------------------------------- history


def test_F26_history_rebuilds_the_ledger():
    """Catches: a restart that forgets a checkpoint or its parts."""
    snapshot = created(50, S.TRACKED, metrics={"loss": 2.5}, run_seconds=7.0, provenance="adopted")
    records = [
        *life(2),
        move(*LIFE[2], shard_bytes=77, run_seconds=9.0),
        *life(7, 60),
        move(S.ABSENT, "save_requested", S.REQUESTED, 70, created=created(70)),
        move(S.REQUESTED, "failed", S.FAILED, 70, reason="writer_died", detail="rank 1"),
        d.SegmentClosed(run_seconds=8.0),
    ]
    data = lines(opened(checkpoints=(snapshot,), run_seconds=3.0), *records)
    history = read_history(plant(data))
    found = {c.step: c for c in history.ledger.checkpoints.values()}
    assert sorted(found) == [50, 70, 100]
    assert found[50].metrics == (("loss", 2.5),) and found[50].provenance == "adopted"
    assert found[100].state is S.SHARDS_WRITTEN and found[100].shard_bytes == 77
    assert found[100].forked == {0, 1} and found[100].world_size == 2
    assert (found[70].state, found[70].reason, found[70].detail) == (
        S.FAILED,
        "writer_died",
        "rank 1",
    )
    assert history.run_seconds == 9.0
    assert history.known == {AttemptId(s, 1, 1) for s in (50, 60, 70, 100)}
    assert history.seals == (d.Seal(epoch=1, bytes=len(data), crc32=zlib.crc32(data)),)


def test_requested_has_no_forks_after_a_restart():
    """Catches: in-memory forks believed after a restart."""
    history = read_history(plant(lines(opened(), *life(1))))
    assert history.ledger.in_flight().forked == frozenset()


def measured(step: int = 100, **metrics: float) -> d.MetricsRecorded:
    return d.MetricsRecorded(step=step, epoch=1, attempt=1, metrics=metrics)


def test_metrics_that_came_after_the_save_are_replayed():
    """Catches: a restart that forgets which checkpoint validated best, and prunes it."""
    first = move(*LIFE[0], created=created(100, metrics={"loss": 3.0, "lr": 0.1}))
    records = [first, *life(5)[1:], measured(loss=2.0, val=1.5), measured(val=1.0)]
    history = read_history(plant(lines(opened(), *records)))
    assert dict(history.ledger.at(100).metrics) == {"loss": 2.0, "lr": 0.1, "val": 1.0}


@pytest.mark.parametrize("moves", [0, 1, 4, 6, 7])
def test_I11_metrics_of_a_checkpoint_that_is_not_tracked_are_corruption(moves: int):
    """Catches: a journal that was edited, believed."""
    with pytest.raises(JournalCorrupt, match="metrics of 100.e1.a1") as caught:
        read_history(plant(lines(opened(), *life(moves), measured(loss=2.0))))
    assert caught.value.step == 100 and caught.value.file == ONE


LOST = created(9, S.QUARANTINED, reason="damaged")
AFRESH = d.RollbackStarted(to_step=None)


@pytest.mark.parametrize(
    ("begun", "records", "afresh"),
    [
        (False, [], False),
        (True, [], True),
        (False, [d.RollbackStarted(to_step=50), d.RollbackFinished()], False),
        (False, [AFRESH], True),
        (False, [AFRESH, d.RollbackFinished()], True),
        (False, [AFRESH, d.RollbackFinished(), *life(10)], False),
        (True, life(10), False),
    ],
)
def test_I8_a_fresh_start_counts_until_something_is_tracked(begun, records, afresh):
    """Catches: losses before a fresh start, held against the runs after it; and losses in those
    runs, not held against any run."""
    history = read_history(plant(lines(opened(begun_afresh=begun, checkpoints=(LOST,)), *records)))
    assert history.intent.begun_afresh == afresh
    tracked = history.ledger.latest() is not None
    assert history.lost == (frozenset() if afresh or tracked else {AttemptId(9, 1, 1)})


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], Intent()),
        ([d.RollbackStarted(to_step=50)], Intent(True, 50)),
        ([d.RollbackStarted(to_step=None)], Intent(True, begun_afresh=True)),
        ([d.RollbackStarted(to_step=50), d.RollbackFinished()], Intent()),
        ([d.RollbackStarted(to_step=50), d.RollbackStarted(to_step=40)], Intent(True, 40)),
    ],
)
def test_a_rollback_intent_survives_a_crash(records, expected):
    """Catches: a rollback half done and forgotten, or done again after it was finished."""
    history = read_history(plant(lines(opened(), *records)))
    assert history.intent == expected
    carried = opened(
        rolling_back=expected.rolling_back,
        rolling_back_to=expected.target,
        rolling_back_lowered=expected.lowered,
        begun_afresh=expected.begun_afresh,
    )
    assert read_history(plant(lines(carried))).intent == expected


def test_I8_the_tracker_is_lifted_with_each_step_that_it_was_left_at():
    """Catches: a second target that is lost, and our tracker taken for a newcomer's."""
    steps = (10, 20, 30, 35, 40, 50)
    records: list[d.Record] = [d.RollbackStarted(to_step=30)]
    for step, reason, lowered in (
        (50, "rollback", True),
        (10, "damaged", True),
        (30, "damaged", False),
        (40, "rollback", True),
        (20, "missing", False),
        (35, "damaged", False),  # nothing is left at the target or below
    ):
        records.append(move(S.TRACKED, "withdrawn", S.QUARANTINED, step=step, reason=reason))
        begun = opened(checkpoints=tuple(created(s, S.TRACKED) for s in steps))
        assert read_history(plant(lines(begun, *records))).intent.lowered == lowered, step


@pytest.mark.parametrize(
    "records",
    [
        [move(S.SHARDS_WRITTEN, "published", S.FINALIZED)],
        [*life(1), move(S.REQUESTED, "tracker_written", S.TRACKED)],
        [*life(1), move(S.FORKED, "shard_reported", S.SHARDS_WRITTEN)],
        [*life(5), move(S.TRACKED, "failed", S.FAILED)],
        [*life(5), move(S.TRACKED, "removed", S.PRUNED)],
        [*life(1), *life(1)],
        [*life(7), move(S.PRUNED, "reprieved", S.TRACKED)],
        [move(*LIFE[0], created=None)],
        [*life(1), move(*LIFE[1], created=created(100))],
        [move(S.ABSENT, "to_tracked", S.TRACKED)],
    ],
)
def test_I11_a_move_that_is_no_row_is_corruption(records):
    """Catches: a journal that is not a trace of the specification, read as if it were."""
    with pytest.raises(JournalCorrupt, match="not a legal move") as caught:
        read_history(plant(lines(opened(), *records)))
    assert caught.value.file == ONE and caught.value.step == 100


@pytest.mark.parametrize(
    "data",
    [lines(*life(1)), lines(opened(epoch=2)), lines(opened(), opened())],
    ids=["no opening", "another epoch", "opened twice"],
)
def test_F20_a_segment_must_begin_with_its_opening(data):
    """Catches: a segment copied from elsewhere or begun by two."""
    with pytest.raises(JournalCorrupt):
        read_history(plant(data))


# --------------------------------------------------------------------------------------- seals


def sealed() -> tuple[SimStorage, JournalWriter]:
    """Epoch 1 left step 100 tracked and step 110 requested; epoch 2 sealed it and failed 110."""
    storage = sim()
    zombie = write(storage, [*life(5), *life(1, 110)])
    history = read_history(storage)
    snapshot = tuple(d.checkpoint_record(c) for c in history.ledger.checkpoints.values())
    first = opened(2, seals=history.seals, checkpoints=snapshot)
    write(storage, [move(S.REQUESTED, "failed", S.FAILED, 110)], 2, first).close()
    return storage, zombie


def test_F13_records_of_a_zombie_after_the_seal_are_ignored():
    """Catches: a paused old trainer that changes history after it was fenced."""
    storage, zombie = sealed()
    before = read_history(storage)
    assert [c.state for c in before.ledger.in_state(*State)] == [S.TRACKED, S.FAILED]
    zombie.append(move(*LIFE[1], step=110))
    for _ in range(60):
        zombie.append(d.RollbackStarted(to_step=1))
    zombie.close()
    assert read_history(storage) == before
    assert [s.epoch for s in before.seals] == [1, 2]
    assert len(read_segments(storage)) == 2 and newest_segment(storage) == 2


@pytest.mark.parametrize("how", ["changed", "shortened"])
def test_F20_a_sealed_segment_that_changed_is_corruption(how):
    """Catches: lost or rewritten history that goes unnoticed."""
    storage, zombie = sealed()
    zombie.close()
    end = read_segments(storage)[0].end
    data = storage.read(ONE, 1 << 20)
    storage.unlink(ONE)
    if how == "changed":
        storage.disk.plant_file(ONE, data[: end - 9] + b"#" + data[end - 8 :])
    else:
        storage.disk.plant_file(ONE, data[: end - 1])
    with pytest.raises(JournalCorrupt, match="sealed segment") as caught:
        read_history(storage)
    assert caught.value.file == ONE and caught.value.offset == 0


def test_F20_a_sealed_segment_that_is_gone_is_named_and_not_missed():
    """Catches: a root that no start opens, as a purge by age took a file that nothing needs."""
    storage, zombie = sealed()
    zombie.close()
    whole = read_history(storage)
    storage.unlink(ONE)
    found = read_history(storage)
    assert (found.ledger, found.known, found.intent) == (whole.ledger, whole.known, whole.intent)
    assert found.missing == (ONE,) and [seal.epoch for seal in found.seals] == [2]
    assert read_history(storage, whole) == read_history(storage, found) == found


def test_a_journal_that_did_not_change_is_not_parsed_again(monkeypatch):
    """Catches: every record of a long journal decoded twice at each opening."""
    storage, _ = sealed()
    known = read_history(storage)
    monkeypatch.setattr(journal, "read_segment", None)
    assert read_history(storage, known) is known


@pytest.mark.parametrize("how", ["folded", "two moments"])
def test_a_journal_that_moves_while_it_is_read_is_read_again(how):
    """Catches: an evaluator that ends, or a list that says "damaged", as the owner wrote just then."""
    storage, real = plant(lines(opened(), *life(3))), SimStorage.read
    moments = [how]

    def read(path: str, limit: int) -> bytes:
        data = real(storage, path, limit)
        if moments and moments.pop():
            if how == "folded":
                raise FileNotFoundError(path)
            return data[:20] + b"#" + data[21:]  # the page of the first record is an older one
        return data

    storage.read = read
    assert read_history(storage).ledger.in_flight().state is LIFE[2][2]
    assert moments == []


@pytest.mark.parametrize(
    "change", ["a record more", "a torn tail", "an epoch more", "another text"]
)
def test_a_journal_that_changed_is_read_history(change):
    """Catches: a record that another process wrote until the lock was taken, and that is lost."""
    storage, _ = sealed()
    known = read_history(storage)
    two = f"{JOURNAL}/000002.ndjson"
    data = storage.read(two, 1 << 20).rstrip(b"\n") + b"\n"
    if change == "an epoch more":
        write(storage, [], 3, opened(3, seals=known.seals))
    elif change == "another text":
        storage.disk.overwrite(two, lines(opened(2, seals=known.seals[:1], run_seconds=7.0)))
    else:
        more = lines(move(S.ABSENT, "save_requested", S.REQUESTED, 500))
        cut = len(more) if change == "a record more" else 20
        storage.disk.overwrite(two, data + more[:cut])
    found = read_history(storage, known)
    assert found is not known and found == read_history(storage)
    assert (found != known) == (change != "a torn tail")


def test_F20_a_sealed_segment_that_changes_until_the_lock_is_taken_is_corruption():
    storage, _ = sealed()
    known = read_history(storage)
    storage.disk.overwrite(ONE, bytes(len(storage.read(ONE, 1 << 20))))
    with pytest.raises(JournalCorrupt, match="sealed segment"):
        read_history(storage, known)


def test_F2_a_segment_that_was_created_but_not_begun_is_passed_over():
    """Catches: a crash while taking the root that loses the ledger, or reuses the epoch."""
    storage, zombie = sealed()
    zombie.close()
    before = read_history(storage)
    plant(b"\n" * BLOCK_BYTES, 3, storage)
    plant(encode_line(opened(4))[:40], 4, storage)
    after = read_history(storage)
    assert after.ledger == before.ledger and after.seals == before.seals
    assert after.newest_epoch == newest_segment(storage) == 4


# ------------------------------------------------------------------------ full and failing disks


def records_on(storage) -> list[d.Record]:
    return list(read_segments(storage)[-1].records)


def test_F5_on_a_full_disk_a_failure_can_still_be_journaled():
    """Catches: a full disk on which the failure of the save cannot even be recorded."""
    disk = SimDisk()
    storage = sim(disk)
    writer = write(storage, life(1))
    disk.capacity = disk.used
    with pytest.raises(OSError) as caught:
        for step in range(200, 300):
            writer.append(move(S.ABSENT, "adopted", S.TRACKED, step))
    assert caught.value.errno == errno.ENOSPC
    before = records_on(storage)
    writer.append(move(S.REQUESTED, "failed", S.FAILED, detail="x" * 500), essential=True)
    assert len(records_on(storage)) == len(before) + 1
    with pytest.raises(OSError):
        writer.append(d.RollbackFinished())
    for _ in range(3):
        writer.append(d.SegmentClosed(run_seconds=1.0), essential=True)
    disk.capacity = None
    writer.append(d.RollbackFinished())
    found = records_on(storage)
    assert found[: len(before)] == before and len(found) == len(before) + 5
    assert read_history(storage).ledger.in_state(S.FAILED)


def test_F5_the_reserve_is_not_endless_and_its_end_is_an_error():
    """Catches: an essential record written beyond what is allocated, or dropped in silence."""
    disk = SimDisk()
    storage = sim(disk)
    writer = write(storage, [])
    disk.capacity = disk.used
    count = 0
    with pytest.raises(OSError) as caught:
        while count < 1000:
            writer.append(d.SegmentClosed(run_seconds=1.0), essential=True)
            count += 1
    assert caught.value.errno == errno.ENOSPC and count > 100
    assert len(records_on(storage)) == count + 1
    assert storage.stat(ONE).size == BLOCK_BYTES


@pytest.mark.parametrize("tried_before", [False, True])
def test_F5_an_essential_record_fits_when_only_the_reserve_cannot_be_renewed(tried_before):
    """Catches: an essential record refused because the *next* block cannot be allocated."""
    disk = SimDisk()
    storage = sim(disk)
    writer = write(storage, [])
    big = move(*LIFE[0], created=created(100, detail="x" * (2 * BLOCK_BYTES - 2000)))
    disk.capacity = disk.used + BLOCK_BYTES  # one block more, but not the reserve behind it
    if tried_before:
        with pytest.raises(OSError):
            writer.append(big)
    writer.append(big, essential=True)
    assert records_on(storage)[-1] == big


def test_F20_a_segment_does_not_grow_beyond_the_limit_of_its_reader(monkeypatch):
    """Catches: a run so long that no later one can open its root; a failure that is not journaled."""
    monkeypatch.setattr(journal, "MAX_SEGMENT_BYTES", 2 * BLOCK_BYTES)
    storage = sim()
    writer = write(storage, ())
    with pytest.raises(OSError, match="restart") as caught:
        for _ in range(1000):
            writer.append(d.SegmentClosed(run_seconds=1.0))
    assert caught.value.errno == errno.EFBIG
    writer.append(d.SegmentClosed(run_seconds=2.0), essential=True)
    assert storage.stat(ONE).size == 2 * BLOCK_BYTES
    assert read_history(storage).run_seconds == 2.0


def test_F20_a_segment_that_is_too_large_is_refused(monkeypatch):
    """Catches: a segment that is cut off at a limit, and silently loses its later records."""
    storage = sim()
    write(storage, life(3))
    monkeypatch.setattr(journal, "MAX_SEGMENT_BYTES", BLOCK_BYTES - 1)
    with pytest.raises(JournalCorrupt, match=f"{BLOCK_BYTES} bytes") as caught:
        read_history(storage)
    assert caught.value.file == ONE


def test_F5_an_essential_record_in_the_reserve_allocates_nothing():
    """Catches: an essential record that needs a write beyond the segment to be taken."""
    calls = FaultStorage(sim())
    writer = write(calls, [])
    while calls.stat(ONE).size - read_segments(calls)[0].end > RESERVE_BYTES + 200:
        writer.append(d.SegmentClosed(run_seconds=1.0))
    before = len(calls.calls)
    writer.append(move(S.ABSENT, "adopted", S.TRACKED), essential=True)
    assert calls.calls[before:] == [("pwrite", ONE), ("fsync", ONE)]
    assert calls.stat(ONE).size == BLOCK_BYTES


def test_an_error_that_is_not_a_full_disk_is_never_swallowed():
    """Catches: EIO while renewing the reserve taken for a full disk."""
    storage = sim()
    writer = write(storage, [])
    real = storage.pwrite

    def broken(handle: int, data, offset: int) -> int:
        if offset >= 2 * BLOCK_BYTES:
            raise OSError(errno.EIO, "broken")
        return real(handle, data, offset)

    storage.pwrite = broken
    big = move(*LIFE[0], created=created(100, detail="x" * (2 * BLOCK_BYTES - 2000)))
    with pytest.raises(OSError) as caught:
        writer.append(big, essential=True)
    assert caught.value.errno == errno.EIO
    assert records_on(storage) == [opened()]


def test_F6_after_a_failed_fsync_nothing_more_is_written():
    """Catches: a second fsync of a file after the first one failed (the second would succeed, and
    lie)."""
    storage = FaultStorage(sim())
    writer = write(storage, life(1))
    storage.inner.disk.fail_fsync(errno.EIO, path=ONE)
    with pytest.raises(OutcomeUnknown) as caught:
        writer.append(move(*LIFE[1]))
    assert caught.value.file == ONE and isinstance(caught.value.__cause__, OSError)
    after = len(storage.calls)
    assert storage.calls[-1] == ("close", ONE), "the handle is given back"
    for essential in (False, True):
        with pytest.raises(StorageError, match="lost or closed"):
            writer.append(move(*LIFE[2]), essential=essential)
    writer.close()
    assert len(storage.calls) == after
    storage.inner.disk.crash("all_lost")
    history = read_history(sim(storage.inner.disk))
    assert history.ledger.in_flight().state is S.REQUESTED


def test_append_after_close_is_refused():
    """Catches: a record written through a handle that belongs to another file by now."""
    writer = write(sim(), [])
    writer.close()
    writer.close()
    with pytest.raises(StorageError):
        writer.append(d.RollbackFinished())
    with pytest.raises(StorageError):
        JournalWriter(sim(), 1).append(d.RollbackFinished())


def test_I9_a_segment_is_never_opened_twice():
    """Catches: two writers in one segment."""
    storage = sim()
    write(storage, life(2))
    with pytest.raises(FileExistsError):
        JournalWriter(storage, 1).open(opened())
    assert len(records_on(storage)) == 3


@pytest.mark.parametrize("short", [1, 7, 100])
def test_F7_short_writes_are_continued(short):
    """Catches: a record cut off by a short write."""
    storage = sim(SimDisk(short_writes=short))
    write(storage, life(7)).close()
    assert records_on(storage) == [opened(), *life(7)]


def test_F7_a_write_that_takes_nothing_is_an_error():
    """Catches: an endless loop on a device that takes no bytes."""
    storage = sim()
    writer = write(storage, [])
    storage.pwrite = lambda handle, data, offset: 0
    with pytest.raises(OSError) as caught:
        writer.append(d.RollbackFinished())
    assert caught.value.errno == errno.EIO


def test_F5_a_write_that_failed_half_way_is_overwritten_by_the_next():
    """Catches: the rest of a failed longer record that makes later ones unreadable."""
    storage = sim()
    writer = write(storage, life(1))
    real, calls = storage.pwrite, []

    def half(handle: int, data, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 1:
            raise OSError(errno.EIO, "half way")
        return real(handle, bytes(data)[: len(data) * 9 // 10], offset)

    storage.pwrite = half
    with pytest.raises(OSError):
        writer.append(move(S.REQUESTED, "failed", S.FAILED, detail="x" * 900))
    storage.pwrite = real
    assert records_on(storage) == [opened(), *life(1)]
    later = [move(*LIFE[1]), move(*LIFE[2]), d.RollbackFinished()]
    for count, record in enumerate(later, start=1):
        writer.append(record)
        assert records_on(storage) == [opened(), *life(1), *later[:count]]


def test_F4_power_loss_at_any_call_loses_only_unacknowledged_records():
    """Catches: an acknowledged record that a power loss takes, or one that makes it unreadable."""
    records = life(5)
    calls = FaultStorage(sim())
    write(calls, records)
    for crash_index in range(len(calls.calls)):
        for how in ("all_lost", "all_kept", *(random.Random(seed) for seed in range(12))):
            disk = SimDisk()
            storage = FaultStorage(sim(disk), before=crash_at(crash_index))
            acknowledged = None
            writer = JournalWriter(storage, 1)
            with pytest.raises(ProcessDead):
                writer.open(opened())
                acknowledged = 0
                for record in records:
                    writer.append(record)
                    acknowledged += 1
            disk.crash(how)
            after = SimStorage(disk, "p2")
            segments = read_segments(after)
            found = list(segments[0].records) if segments else []
            whole = [opened(), *records]
            assert found == whole[: len(found)], "a prefix of what was written"
            if acknowledged is not None:
                assert 1 + acknowledged <= len(found) <= 2 + acknowledged
            read_history(after)


def failing_always(code: int, *methods: str):
    """A hook that fails these calls, every time."""

    def hook(index: int, method: str, path: str) -> None:
        if method in methods:
            raise OSError(code, os.strerror(code), path)

    return hook


def segment_opened(*records) -> d.SegmentOpened:
    return d.SegmentOpened(
        epoch=1, host="h", pid=1, at="", seals=(), run_seconds=0.0, checkpoints=records
    )


def with_journal(disk: SimDisk) -> SimStorage:
    storage = SimStorage(disk)
    durable.make_dirs(storage, layout.JOURNAL)
    return storage


def test_F6_a_failing_close_does_not_hide_an_unknown_outcome():
    """Catches: the error of the close (NFS) in place of the fsync's: not fatal to a coordinator."""
    storage = FaultStorage(with_journal(SimDisk()))
    writer = JournalWriter(storage, 1)
    writer.open(segment_opened())
    storage.before = failing_always(errno.EIO, "fsync", "close")
    with pytest.raises(OutcomeUnknown):
        writer.append(RollbackFinished())


def test_F5_a_journal_that_cannot_be_opened_closes_its_file():
    """Catches: a descriptor lost at every attempt to open a root on a full disk."""
    disk = SimDisk()
    storage = FaultStorage(with_journal(disk))
    disk.capacity = 100
    with pytest.raises(OSError):
        JournalWriter(storage, 1).open(segment_opened())
    methods = [method for method, _ in storage.calls]
    assert methods.count("close") == methods.count("open_exclusive") == 1


@pytest.mark.damages_journal("forges a snapshot")
def test_F30_a_snapshot_that_names_an_attempt_twice_is_corrupt():
    """Catches: one of two contradicting states believed, or an error that is none of ours."""
    disk = SimDisk()
    storage = with_journal(disk)
    twice = [checkpoint_record(checkpoint(1, state)) for state in (S.TRACKED, S.FAILED)]
    disk.plant_file(
        f"{layout.JOURNAL}/{layout.segment_name(1)}", encode_line(segment_opened(*twice))
    )
    with pytest.raises(JournalCorrupt):
        read_history(storage)
