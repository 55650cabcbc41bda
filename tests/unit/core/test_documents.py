"""Documents on disk: strict reading, exact round trips, newer versions refused (F30, F34)."""

from __future__ import annotations

import gc
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ckptfsm.core import documents as d
from ckptfsm.core.documents import (
    FileEntry,
)
from ckptfsm.core.errors import (
    DamagedRoot,
    NewerSchema,
    SaveFailed,
)
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.parts import MAX_STEP, AttemptId, PartSpec

quick = settings(max_examples=60, derandomize=True, deadline=None, database=None)

RECEIPT = d.Receipt(
    step=100,
    epoch=3,
    attempt=1,
    part="state",
    rank=1,
    world_size=2,
    files=(d.FileEntry(name="__1_0.distcp", bytes=64, digest="xxh3_128:" + "0" * 32),),
    results=(("model.w", [0, 0], None, "__1_0.distcp", 0, 64),),
)
MANIFEST = d.Manifest(
    step=100,
    epoch=3,
    attempt=1,
    world_size=2,
    parts=(d.Part(name="state"), d.Part(name="x", kind="file", directory="x", ranks=(0,))),
    files=RECEIPT.files,
    metrics={"loss": 1.5},
    provenance={"torch": "2.9"},
)
PIN = d.Pin(step=100, reason="eval")
HOLDER = d.Holder(epoch=1, host="h", pid=1, started="s", nonce="n")
DOCUMENTS = [RECEIPT, MANIFEST, PIN, HOLDER]
RECORDS = [
    d.SegmentOpened(
        epoch=2,
        host="h",
        pid=1,
        at="",
        seals=(d.Seal(epoch=1, bytes=10, crc32=5),),
        run_seconds=1.0,
        checkpoints=(),
    ),
    d.TransitionRecord(
        seq=0,
        step=1,
        epoch=1,
        attempt=1,
        event="published",
        source=State.SHARDS_WRITTEN,
        dest=State.FINALIZED,
    ),
    d.RollbackStarted(to_step=None),
    d.RollbackStarted(to_step=5),
    d.RollbackFinished(),
    d.MetricsRecorded(step=1, epoch=1, attempt=1, metrics={"loss": 1.5, "val acc": -2.0}),
    d.SegmentClosed(run_seconds=2.0),
]


def ids(thing: object) -> str:
    return type(thing).__name__


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_documents_round_trip(document):
    """Catches: a field that does not come back as it was written."""
    again = d.decode(type(document), d.encode(document), "f")
    # write results are free-form rows: JSON has lists only
    assert json.loads(d.encode(again)) == json.loads(d.encode(document))
    assert again.model_dump(exclude={"results"}) == document.model_dump(exclude={"results"})
    assert b"\n" not in d.encode(document)


@pytest.mark.parametrize("record", RECORDS, ids=ids)
def test_records_round_trip_as_their_type(record):
    """Catches: a journal record that is read back as another kind."""
    assert d.RECORD.validate_json(d.encode(record)) == record


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_F30_unknown_fields_are_refused(document):
    """Catches: ``extra`` allowed, so that a document is half understood."""
    value = json.loads(d.encode(document)) | {"surprise": 1}
    with pytest.raises(DamagedRoot, match="surprise") as caught:
        d.decode(type(document), json.dumps(value).encode(), "dir/file.json")
    assert caught.value.file == "dir/file.json"
    assert not isinstance(caught.value, NewerSchema)


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
def test_documents_are_frozen(document):
    """Catches: a document that is changed after it was checked."""
    with pytest.raises(ValidationError):
        document.schema_version = 2


@pytest.mark.parametrize("document", DOCUMENTS, ids=ids)
@pytest.mark.parametrize("version", [2, 99, 10**30])
def test_F34_a_newer_schema_is_refused_as_newer(document, version):
    """Catches: a newer document called damaged (and put aside), or read as if it were ours."""
    value = json.loads(d.encode(document)) | {"schema_version": version, "new_field": {}}
    with pytest.raises(NewerSchema) as caught:
        d.decode(type(document), json.dumps(value).encode(), "f")
    assert caught.value.schema_version == version and caught.value.file == "f"


def test_F34_a_part_in_an_unknown_format_is_refused_as_newer():
    """Catches: a whole checkpoint of a newer version that is called damaged, and put aside."""
    value = json.loads(d.encode(MANIFEST))
    value["parts"][0]["kind"] = "columns"
    with pytest.raises(NewerSchema, match="does not know: 'columns'") as caught:
        d.decode(d.Manifest, json.dumps(value).encode(), "f")
    assert caught.value.file == "f"


@pytest.mark.parametrize("version", [0, -1, "2", None, 1.5, [2]])
def test_F30_a_nonsense_schema_version_is_damage(version):
    """Catches: any odd version taken for a newer one."""
    value = json.loads(d.encode(PIN)) | {"schema_version": version}
    with pytest.raises(DamagedRoot) as caught:
        d.decode(d.Pin, json.dumps(value).encode(), "f")
    assert not isinstance(caught.value, NewerSchema)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00" * 100,
        b"null",
        b"[]",
        b"3",
        b'{"step": 1',
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"step":' + b"9" * 100_000 + b"}",
        b'{"step":1e400}',
    ],
    ids=range(10),
)
def test_F30_hostile_bytes_are_damage_not_a_crash(data):
    """Catches: any exception but a typed one that names the file."""
    with pytest.raises(DamagedRoot) as caught:
        d.decode(d.Receipt, data, "dir/receipt.json")
    assert caught.value.file == "dir/receipt.json" and "receipt is damaged" in str(caught.value)


@given(st.binary(max_size=200))
@quick
def test_F30_random_bytes_are_damage(data):
    """Catches: as above, for arbitrary bytes."""
    with pytest.raises(DamagedRoot):
        d.decode(d.Receipt, data, "f")


@given(st.data())
@quick
def test_F21_every_truncation_of_a_receipt_is_damage(data):
    """Catches: a torn receipt that still counts."""
    whole = d.encode(RECEIPT)
    with pytest.raises(DamagedRoot):
        d.decode(d.Receipt, whole[: data.draw(st.integers(0, len(whole) - 1))], "f")


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"step": MAX_STEP + 1},
        {"step": "100"},
        {"step": 100.0},
        {"step": True},
        {"epoch": 0},
        {"attempt": 0},
        {"rank": -1},
        {"rank": None},
        {"world_size": 0},
        {"files": None},
        {"files": [{"name": "a", "bytes": -1}]},
        {"files": [{"name": "a", "bytes": 1 << 63}]},
        {"files": [{"name": "a", "bytes": 1, "mode": 0o4755}]},
    ],
    ids=str,
)
def test_F30_receipts_are_read_strictly(change):
    """Catches: coercion (``"100"``, ``100.0``, ``true``) and numbers out of range."""
    value = json.loads(d.encode(RECEIPT)) | change
    with pytest.raises(DamagedRoot, match=next(iter(change))):
        d.decode(d.Receipt, json.dumps(value).encode(), "f")


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "a//b", "a/", "a\x00b", "x" * 1025, "/", "..", "../x", "a/../../x", "a/.."],
)
def test_F30_hostile_file_names_are_refused(name):
    """Catches: a manifest that names something outside the checkpoint."""
    with pytest.raises(ValidationError):
        d.FileEntry(name=name, bytes=1)


@pytest.mark.parametrize("name", ["__0_0.distcp", "a/b/c", ".metadata", "actor/.ckptfsm", "ü"])
def test_ordinary_file_names_are_accepted(name):
    """Catches: a rule that refuses what Megatron writes."""
    assert d.FileEntry(name=name, bytes=0).name == name


def test_a_document_of_another_kind_is_damage():
    """Catches: a pin read as a manifest."""
    with pytest.raises(DamagedRoot):
        d.decode(d.Manifest, d.encode(PIN), "f")
    with pytest.raises(ValidationError):
        d.RECORD.validate_json(b'{"type":"segment_melted"}')


def test_of_names_the_attempt():
    """Catches: step, epoch and attempt swapped (I5)."""
    assert RECEIPT.of == MANIFEST.of == AttemptId(step=100, epoch=3, attempt=1)
    assert RECORDS[1].of == AttemptId(1, 1, 1)


def test_first_problem_without_a_place():
    """Catches: an error message that begins with a bare colon."""
    with pytest.raises(ValidationError) as caught:
        d.Pin.model_validate_json(b"{")
    assert d.first_problem(caught.value).startswith("Invalid JSON")


def test_first_problem_says_where():
    """Catches: a report of damage that does not lead to the damaged field."""
    with pytest.raises(ValidationError) as caught:
        d.Receipt.model_validate_json(d.encode(RECEIPT).replace(b'"bytes":64', b'"bytes":-1'))
    assert d.first_problem(caught.value).startswith("files.0.bytes: Input should be")


names = st.text("abcdefgh", min_size=1, max_size=5)
parts = st.builds(
    PartSpec,
    names,
    st.sampled_from(["torch_dist", "foreign", "file", "report"]),
    names,
    st.none() | st.sets(st.integers(0, 7)).map(lambda s: tuple(sorted(s))),
)
metrics = st.dictionaries(names, st.floats(allow_nan=False, allow_infinity=False), max_size=3)


@given(
    st.builds(
        Checkpoint,
        id=st.builds(
            AttemptId, st.integers(0, MAX_STEP), st.integers(1, 10**9), st.integers(1, 10**9)
        ),
        state=st.sampled_from(State),
        parts=st.lists(parts, max_size=3).map(tuple),
        world_size=st.integers(1, 10**6),
        in_place=st.booleans(),
        provenance=st.sampled_from(["saved", "adopted"]),
        metrics=metrics.map(lambda m: tuple(sorted(m.items()))),
        run_seconds=st.floats(0, 1e12),
        shard_bytes=st.integers(0, 1 << 62),
        reason=st.text(max_size=10),
        detail=st.text(max_size=10),
    )
)
@quick
def test_F26_a_checkpoint_survives_its_record(checkpoint):
    """Catches: a field that a restart forgets (steps, metrics, run time, parts, reasons)."""
    record = d.checkpoint_record(checkpoint)
    again = d.CheckpointRecord.model_validate_json(d.encode(record))
    assert d.checkpoint_of(again) == checkpoint


def test_a_record_leaves_out_the_facts_of_receipts_on_disk():
    """Catches: in-memory reports believed after a restart instead of the disk."""
    everyone = frozenset({0})
    c = Checkpoint(
        AttemptId(1, 1, 1), State.FORKED, (PartSpec("state"),), 1, forked=everyone, gone=everyone
    )
    again = d.checkpoint_of(d.checkpoint_record(c))
    assert again.forked == again.gone == again.reported == frozenset()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda doc: type(doc).__name__)
def test_F21_a_sealed_document_that_changed_is_damaged(document):
    """Catches: a checksum that is not of the whole document, or that is never compared."""
    data = d.encode_sealed(document)
    assert data.startswith(b'{"crc":"') and d.decode(type(document), data, "f") == document
    for place in range(len(b'{"crc":"'), len(data)):
        changed = bytearray(data)
        changed[place] ^= 1
        kind = type(document).__name__.lower()
        with pytest.raises(DamagedRoot, match=f"^{kind} is damaged") as caught:
            d.decode(type(document), bytes(changed), "f.json")
        assert caught.value.file == "f.json"


def test_I4_a_document_that_no_reader_would_take_is_not_written(monkeypatch):
    """Catches: a checkpoint that is published with a manifest that is never read."""
    document = DOCUMENTS[0]
    monkeypatch.setattr(d, "MAX_DOCUMENT_BYTES", len(d.encode_sealed(document)))
    d.encode_sealed(document)
    monkeypatch.setattr(d, "MAX_DOCUMENT_BYTES", len(d.encode_sealed(document)) - 1)
    with pytest.raises(SaveFailed, match="more than"):
        d.encode_sealed(document)


def test_the_declared_parts_come_back_as_they_were():
    """Catches: an optional part that a restart takes for required."""
    parts = (PartSpec("state"), PartSpec("x", "file", "x", (0,), True))
    assert tuple(part.spec() for part in d.part_records(parts)) == parts


def test_F16_a_piece_of_a_name_that_is_a_dot_is_refused():
    """Catches: two names of one file."""
    with pytest.raises(ValidationError, match="not a plain relative name"):
        d.FileEntry(name="a/./b", bytes=1)


@pytest.mark.parametrize("name", ["../x", "a/../b", "./x", "a/./b", ".", ".."])
def test_F30_a_file_name_with_dots_for_a_component_is_refused(name):
    """Catches: a document that names a file outside its directory, or one file by two names."""
    with pytest.raises(ValidationError):
        FileEntry(name=name, bytes=1)


def test_an_entry_of_a_file_is_one_object_for_the_garbage_collector() -> None:
    """Catches: full collections of a trainer's objects, because a save of many ranks made millions."""
    (entry,) = d.decode(d.Receipt, d.encode_sealed(RECEIPT), "r").files
    held = [o for o in gc.get_referents(entry) if gc.is_tracked(o) and not isinstance(o, type)]
    assert held == []


def test_an_entry_of_a_file_is_strict_and_frozen_and_can_be_sent() -> None:
    """Catches: an entry with an unknown field, a number as text, or a digest that changes later."""
    entry = FileEntry(name="a/b", bytes=1)
    assert pickle.loads(pickle.dumps(entry)) == entry
    assert {entry: 1}[FileEntry(name="a/b", bytes=1, digest=None)] == 1
    for wrong in ({"bytes": "1"}, {"name": "../a"}, {"bytes": -1}, {"more": 1}, {"digest": 1}):
        with pytest.raises(ValidationError):
            FileEntry(**{"name": "a", "bytes": 1, **wrong})  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        entry.digest = "xxh3_128:"  # type: ignore[misc]
