"""Everything the library writes to disk, as pydantic models: journal records, receipts, manifests.

A document of a newer ``schema_version`` is refused with ``NewerSchema`` and never rewritten. Receipts
and manifests begin with a checksum of their other bytes, so that a flipped bit is detected.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from enum import Enum
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

from ckptfsm.core.errors import DamagedRoot, NewerSchema, SaveFailed
from ckptfsm.core.formats import FORMATS, TORCH_DIST, format_of
from ckptfsm.core.layout import JOB_NAME, MEGATRON
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.parts import MAX_STEP, AttemptId, PartSpec
from ckptfsm.core.recorded_metrics import MOST, MOST_LETTERS

SCHEMA_VERSION = 1
# A manifest of 10,000 ranks, each with 20 files of 120 bytes an entry, has 24 MB. A receipt with a
# million rows of 150 bytes has 150 MB.
MAX_DOCUMENT_BYTES = 256 << 20
# 250,000 saves in one run, at 4 KB each: half a year with one a minute.
MAX_SEGMENT_BYTES = 1 << 30
# Number of older segments that a new segment seals; older ones are removed at the next opening.
KEPT_SEGMENTS = 16
_NO_NAMES = frozenset({"", ".", ".."})

Step = Annotated[int, Field(ge=0, le=MAX_STEP)]
Count = Annotated[int, Field(ge=0, le=1 << 62)]
Number = Annotated[int, Field(ge=1, le=10**9)]
Checksum = Annotated[str, StringConstraints(pattern="^([0-9a-f]{8})?$")]
MetricName = Annotated[str, StringConstraints(min_length=1, max_length=MOST_LETTERS)]


def _check_name(name: str) -> str:
    """``name``, if it is a plain relative name. Raises ``ValueError`` for any other."""
    if "\0" in name or not _NO_NAMES.isdisjoint(name.split("/")):
        raise ValueError("not a plain relative name")
    return name


class _NewerFormat(ValueError):
    """A part is in a format that this version does not know."""


def _check_format(name: str) -> str:
    """``name``, if it is that of a format. Any other is a newer version's."""
    if format_of(name) is None:
        raise _NewerFormat(f"a part in a format that this version does not know: {name!r:.80}")
    return name


FileName = Annotated[str, StringConstraints(max_length=1024), AfterValidator(_check_name)]
FormatName = Annotated[
    str, AfterValidator(_check_format), Field(json_schema_extra={"enum": list(FORMATS)})
]


class Document(BaseModel):
    """Base: frozen, strict, no unknown fields."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, ser_json_inf_nan="constants"
    )


class OfAttempt(Document):
    """Base of what has the ``step``, ``epoch`` and ``attempt`` of an attempt."""

    @property
    def of(self) -> AttemptId:
        return AttemptId(self.step, self.epoch, self.attempt)  # type: ignore[attr-defined]


@dataclass(config=ConfigDict(extra="forbid", strict=True), frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file of a checkpoint; ``digest`` is ``xxh3_128:<hex>`` of its content."""

    name: FileName
    bytes: Count
    digest: str | None = None


class Part(Document):
    """A declared part, see ``parts.PartSpec``."""

    name: FileName
    kind: FormatName = TORCH_DIST.name
    directory: FileName | Literal[""] = ""
    ranks: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    optional: bool = False

    def spec(self) -> PartSpec:
        return _spec_of(self.name, self.kind, self.directory, self.ranks, self.optional)


_spec_of = lru_cache(maxsize=64)(PartSpec)  # all checkpoints of a run have the same


class Receipt(OfAttempt):
    """The shards that one rank wrote for one part: every file, fsynced, and its write results.

    ``files`` are named relative to the step's directory. ``results`` are rows of the part: for
    ``torch_dist`` one ``[key, offset or null, index or null, file, offset, length]`` per item.
    ``dropped`` says why this rank could not write an optional part; ``files`` is empty then.
    """

    schema_version: Literal[1] = 1
    step: Step
    epoch: Number
    attempt: Number
    part: str
    rank: Annotated[int, Field(ge=0)]
    world_size: Number
    files: tuple[FileEntry, ...]
    results: tuple[tuple[Any, ...], ...] = ()
    dropped: str = ""


class Manifest(OfAttempt):
    """The commit record inside a published directory: a directory that carries it is complete.

    ``files`` lists all other files of the directory, receipts included. ``provenance`` names the
    library versions that wrote the directory, for display. ``dropped`` are the optional parts that
    were left out, and why.
    """

    schema_version: Literal[1] = 1
    step: Step
    epoch: Number
    attempt: Number
    world_size: Number
    parts: tuple[Part, ...]
    files: tuple[FileEntry, ...]
    metrics: dict[str, float] = {}
    run_seconds: float = 0.0
    provenance: dict[str, str] = {}
    dropped: dict[str, str] = {}
    written_at: str = ""


class RunMark(Document):
    """The run that a root, or a place for copies, belongs to. It is made with the first copy."""

    schema_version: Literal[1] = 1
    run: Annotated[str, StringConstraints(pattern="^[0-9a-f]{32}$")]


class Claim(OfAttempt):
    """The attempt that is copied into a step's directory of a place, before its first file is.

    ``content`` is the SHA-256 of its manifest: another run may have an attempt of the same name.
    """

    schema_version: Literal[1] = 1
    step: Step
    epoch: Number
    attempt: Number
    content: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]


class RolledBack(OfAttempt):
    """The attempt that a rollback went back to, in a place. Later ones up to ``until`` are left behind.

    ``until`` is the turn of an attempt, see ``jobs.turn``.
    """

    schema_version: Literal[1] = 1
    step: Step
    epoch: Number
    attempt: Number
    until: tuple[Count, Count, Count]


class Holder(Document):
    """The process that took an epoch. ``released`` once its manager let go of the root in any way.

    ``namespace``: see ``ports.Identity``. Earlier versions have no such field.
    """

    schema_version: Literal[1] = 1
    epoch: Number
    host: str
    pid: int
    started: str
    nonce: str
    released: bool = False
    namespace: str = ""


class Pin(Document):
    """A pin or a reader's lease on a step, and why."""

    schema_version: Literal[1] = 1
    step: Step
    reason: str = ""
    nonce: str = ""


RequestKind = Literal["pin", "unpin", "prune", "prune_step", "rollback", "drop", "record_metrics"]


class Asked(Document):
    """An operator request to the owner that has ``epoch``; the next owner does not carry it out.

    ``by`` names the person's process, for display. ``dry``: only tell what would be done. ``name``: a
    name in quarantine.
    """

    schema_version: Literal[1] = 1
    nonce: str
    epoch: Number
    errand: RequestKind
    step: Step | None = None
    reason: Annotated[str, StringConstraints(max_length=1000)] = ""
    name: FileName | None = None
    dry: bool = False
    metrics: dict[str, float] = {}
    by: str = ""


class Answered(Document):
    """The owner's answer to the request with this nonce. ``kind`` is that of an error, or ""."""

    schema_version: Literal[1] = 1
    nonce: str
    words: str
    kind: str = ""


class JobState(Enum):
    """The state of a job of ``on_tracked`` for a checkpoint. The last three are final.

    Of a job that holds its checkpoint, only ``done`` is.
    """

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    MISSED = "missed"


JobName = Annotated[str, StringConstraints(pattern=f"^{JOB_NAME}$")]


class JobRecord(OfAttempt):
    """A job of ``on_tracked`` for one checkpoint. ``begun``: the number of attempts that began.

    ``reason``: the last error, or why the job was missed. ``at`` is for display.
    """

    schema_version: Literal[1] = 1
    step: Step
    epoch: Number
    attempt: Number
    job: JobName
    state: JobState
    begun: Count = 0
    reason: Annotated[str, StringConstraints(max_length=4000)] = ""
    at: str = ""


class CheckpointRecord(OfAttempt):
    """A checkpoint as a snapshot or a creating transition carries it."""

    step: Step
    epoch: Number
    attempt: Number
    state: State
    parts: tuple[Part, ...]
    world_size: Number
    in_place: bool = False
    provenance: Literal["saved", "adopted"] = "saved"
    metrics: dict[str, float] = {}
    run_seconds: float = 0.0
    shard_bytes: Count = 0
    manifest_crc: Checksum = ""
    reason: str = ""
    detail: str = ""


class Seal(Document):
    """An older segment as it was when a newer epoch began; later bytes of the segment do not count."""

    epoch: Number
    bytes: Count
    crc32: Count


class SegmentOpened(Document):
    """First record of a segment: the process, the sealed older segments, and the ledger at that
    time.

    ``retention`` is for display, see ``retention.record_of``. Nothing is decided by it. ``holds``: the
    ``every`` of each job that holds its checkpoints, by name. A command keeps them, too.
    """

    type: Literal["segment_opened"] = "segment_opened"
    schema_version: Literal[1] = 1
    epoch: Number
    host: str
    pid: int
    at: str
    seals: tuple[Seal, ...]
    run_seconds: float
    rolling_back: bool = False
    rolling_back_to: Step | None = None
    rolling_back_lowered: bool = False
    begun_afresh: bool = False
    layout: str = MEGATRON.name
    retention: Mapping[str, Any] = Field(default_factory=dict)
    holds: dict[JobName, Number] = {}
    checkpoints: tuple[CheckpointRecord, ...]


class TransitionRecord(OfAttempt):
    """A transition, as journaled and as hooks receive it.

    ``at`` is for display, never for decisions.

    ``created`` is filled by the events that begin a checkpoint, ``rank`` by the failure of one
    rank. ``manifest_crc`` is the checksum that the manifest begins with, from ``finalized`` on.
    """

    type: Literal["transition"] = "transition"
    seq: Count
    step: Step
    epoch: Number
    attempt: Number
    event: str
    source: State
    dest: State
    reason: str = ""
    detail: str = ""
    rank: Annotated[int, Field(ge=0)] | None = None
    shard_bytes: Count = 0
    manifest_crc: Checksum = ""
    run_seconds: float = 0.0
    at: str = ""
    created: CheckpointRecord | None = None

    @property
    def acknowledges(self) -> bool:
        """True if a save became tracked; False for an adopted or a restored checkpoint."""
        return self.dest is State.TRACKED and self.source is State.FINALIZED


class RollbackStarted(Document):
    """The intent to make ``to_step`` the latest; None means to begin afresh."""

    type: Literal["rollback_started"] = "rollback_started"
    to_step: Step | None
    at: str = ""


class RollbackFinished(Document):
    """Tracker and directories are as the intent demands."""

    type: Literal["rollback_finished"] = "rollback_finished"
    at: str = ""


class MetricsRecorded(OfAttempt):
    """Metrics of a tracked checkpoint that came after its save. Each replaces one of the same name."""

    type: Literal["metrics_recorded"] = "metrics_recorded"
    step: Step
    epoch: Number
    attempt: Number
    metrics: Annotated[dict[MetricName, FiniteFloat], Field(min_length=1, max_length=MOST)]
    at: str = ""


class SegmentClosed(Document):
    """The manager was closed in order."""

    type: Literal["segment_closed"] = "segment_closed"
    run_seconds: float
    at: str = ""


Record = Annotated[
    SegmentOpened
    | TransitionRecord
    | RollbackStarted
    | RollbackFinished
    | MetricsRecorded
    | SegmentClosed,
    Field(discriminator="type"),
]
# Its times are unlike, so that a cache of strings takes longer than it saves.
RECORD: TypeAdapter[Record] = TypeAdapter(Record, config=ConfigDict(cache_strings="keys"))

D = TypeVar("D", bound=Document)
_SEAL = b'{"crc":"'
_SEAL_BYTES = len(_SEAL) + 9


def encode(document: BaseModel) -> bytes:
    """Canonical bytes of a document: one line of JSON."""
    return document.model_dump_json(exclude_defaults=False).encode()


def encode_sealed(document: BaseModel) -> bytes:
    """Canonical bytes with a checksum in front: ``{"crc":"xxxxxxxx",...}``.

    Raises ``SaveFailed`` for a document that is too large to be read back.
    """
    body = encode(document)
    if len(body) + _SEAL_BYTES > MAX_DOCUMENT_BYTES:
        name = type(document).__name__.lower()
        raise SaveFailed(f"a {name} of {len(body)} bytes, more than {MAX_DOCUMENT_BYTES}")
    return _SEAL + b"%08x" % zlib.crc32(body) + b'",' + body[1:]


def checksum_of(data: bytes) -> str:
    """The checksum in front of a sealed document, as eight hexadecimal digits; "" if it has none."""
    return data[len(_SEAL) : len(_SEAL) + 8].decode("latin-1") if data.startswith(_SEAL) else ""


def decode(model: type[D], data: bytes, file: str) -> D:
    """Parse ``data``, read from ``file``, and verify its checksum if it carries one.

    Raises ``NewerSchema`` for a newer ``schema_version`` or format, ``DamagedRoot`` for any other fault.
    """
    if data.startswith(_SEAL):
        end = len(_SEAL) + 8
        body = b"{" + data[end + 2 :]
        if data[len(_SEAL) : end + 2] != b'%08x",' % zlib.crc32(body):
            raise DamagedRoot(f"{model.__name__.lower()} is damaged: wrong checksum", file=file)
        data = body
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        raise_newer(data, file, error)
        raise DamagedRoot(
            f"{model.__name__.lower()} is damaged: {first_problem(error)}", file=file
        ) from error


def raise_newer(data: bytes, file: str, error: ValidationError) -> None:
    """Raise ``NewerSchema`` if ``data`` has a newer schema than this library knows, or a newer format.

    ``error``: what its validation complained about.
    """
    for problem in error.errors(include_url=False, include_input=False):
        found = problem.get("ctx", {}).get("error")
        if isinstance(found, _NewerFormat):
            raise NewerSchema(str(found), file=file, schema_version=SCHEMA_VERSION)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return
    version = value.get("schema_version") if isinstance(value, Mapping) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise NewerSchema(
            f"schema version {version} is newer than {SCHEMA_VERSION}",
            file=file,
            schema_version=version,
        )


def first_problem(error: ValidationError) -> str:
    """The first thing a validation complained about, in one line."""
    problem = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(piece) for piece in problem["loc"])
    return f"{where}: {problem['msg']}" if where else str(problem["msg"])


@lru_cache(maxsize=64)
def part_records(parts: tuple[PartSpec, ...]) -> tuple[Part, ...]:
    """Declared parts as documents carry them."""
    return tuple(Part.model_validate(part, from_attributes=True) for part in parts)


_ALIKE = (  # fields of a checkpoint and its record that hold the same value
    "state",
    "world_size",
    "in_place",
    "provenance",
    "run_seconds",
    "shard_bytes",
    "manifest_crc",
    "reason",
    "detail",
)
_alike_in = attrgetter(*_ALIKE)


def checkpoint_record(checkpoint: Checkpoint) -> CheckpointRecord:
    """A checkpoint as its record. The record omits which ranks reported: receipts on disk say so."""
    return CheckpointRecord(
        step=checkpoint.id.step,
        epoch=checkpoint.id.epoch,
        attempt=checkpoint.id.attempt,
        parts=part_records(checkpoint.parts),
        metrics=dict(checkpoint.metrics),
        **dict(zip(_ALIKE, _alike_in(checkpoint), strict=True)),
    )


def checkpoint_of(record: CheckpointRecord, **told: Any) -> Checkpoint:
    """The inverse of ``checkpoint_record``, with the fields that later records ``told``."""
    values = dict(zip(_ALIKE, _alike_in(record), strict=True))
    values.update(told)
    if record.metrics:
        values["metrics"] = tuple(sorted(record.metrics.items()))
    if "parts" not in told:
        values["parts"] = part_specs(record)
    return Checkpoint(record.of, **values)


def part_specs(record: CheckpointRecord) -> tuple[PartSpec, ...]:
    """The declared parts of a checkpoint."""
    return tuple(part.spec() for part in record.parts)
