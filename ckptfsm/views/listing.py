"""A root as text: its checkpoints, one step, its directories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from types import MappingProxyType
from typing import Any

from ckptfsm.core.documents import JobRecord, JobState
from ckptfsm.core.errors import DamagedRoot, NewerSchema, describe
from ckptfsm.core.evidence import Ownership
from ckptfsm.core.explaining import RETENTION, kept_by
from ckptfsm.core.layout import (
    ANSWERS,
    EPOCHS,
    FETCHING,
    INBOX,
    JOBS,
    JOURNAL,
    PINS,
    PRIVATE,
    QUARANTINE,
    READERS,
    STAGING,
    TRACKER,
    TRASH,
)
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Storage
from ckptfsm.core.units import bytes_text
from ckptfsm.disk.durable import each_file, list_names, lookup
from ckptfsm.disk.inspection import read_manifest
from ckptfsm.disk.overview import Overview
from ckptfsm.disk.verification import strangers_in
from ckptfsm.views.reading import Life
from ckptfsm.views.timeline import clean, clip, describe_end, format_duration, parse_time, place

UNKNOWN = "unknown"  # a directory that no checkpoint of the journal explains
_HEADS = ("STEP", "STATE", "AGE", "SIZE", "RANKS", "PARTS", "JOBS", "KEPT BY")
_LEFT = (False, True, False, False, False, True, True, True)
_JOBS_COLUMN = 6
_NO_OWNER = (Ownership.ENDED, Ownership.RELEASED)
_MIN_LAST = 8
_STOCK_PART = ("state",)
_MEANING: Mapping[str, str] = MappingProxyType(
    {
        JOURNAL: "the transitions, one file per epoch",
        EPOCHS: "the owners, the newest counts",
        STAGING: "saves in flight",
        TRASH: "given up, deleted a little at a time",
        QUARANTINE: "withdrawn, never deleted by itself",
        INBOX: "operator requests to the owner",
        ANSWERS: "the owner's answers to them",
        PINS: "steps that people keep",
        READERS: "steps that readers hold",
        JOBS: "jobs of on_tracked, by attempt and name",
        FETCHING: "checkpoints that are being fetched",
    }
)


@dataclass(frozen=True, slots=True)
class AdoptedContents:
    """What the directory of an adopted checkpoint tells: the journal begins with the adoption.

    ``bytes`` of all files; the names of the parts; when it was written, "" if nothing tells.
    """

    bytes: int
    parts: tuple[str, ...]
    written_at: str = ""


def adopted_contents(storage: Storage, overview: Overview) -> Mapping[AttemptId, AdoptedContents]:
    """The contents of the adopted checkpoints; without those whose directory cannot be read."""
    found = {}
    for of, checkpoint in overview.ledger.checkpoints.items():
        if checkpoint.provenance == "adopted" and checkpoint.state is State.TRACKED:
            contents = _contents_of(storage, overview, checkpoint)
            if contents is not None:
                found[of] = contents
    return found


def _contents_of(
    storage: Storage, overview: Overview, checkpoint: Checkpoint
) -> AdoptedContents | None:
    name = overview.layout.published_name(checkpoint.step)
    try:
        manifest = read_manifest(storage, name)
        if manifest is not None:
            parts = tuple(part.name for part in manifest.parts)
            return AdoptedContents(sum(f.bytes for f in manifest.files), parts, manifest.written_at)
        size = sum(stat.size for _, stat in each_file(storage, name))
    except NewerSchema:
        raise
    except (DamagedRoot, FileNotFoundError):  # for the doctor to judge, or pruned meanwhile
        return None
    return AdoptedContents(size, () if overview.layout.tree else _STOCK_PART)


@dataclass(frozen=True, slots=True)
class ListedStep:
    """A checkpoint in a list. ``age_s``: seconds since it entered its state, None if not known.

    An adopted checkpoint is as old as its manifest says. ``bytes`` is the size of its shards, or of
    all files of an adopted one. ``metrics`` are those of its save, and those that came later.
    A directory that no journal explains has the state ``unknown`` and no attempt.
    """

    step: int
    state: str
    attempt: str
    age_s: float | None
    bytes: int
    ranks: int
    parts: tuple[str, ...]
    kept_by: tuple[str, ...]
    note: str = ""
    jobs: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


def rows_of(
    overview: Overview,
    since: Mapping[AttemptId, str],
    now: float,
    jobs: Sequence[JobRecord] = (),
    adopted: Mapping[AttemptId, AdoptedContents] = MappingProxyType({}),
    damaged: Mapping[int, str] = MappingProxyType({}),
) -> list[ListedStep]:
    """The rows of a root, oldest step first. ``since``: when each attempt entered its state.

    ``now`` is in seconds since 1970. ``jobs`` are the records of jobs. ``adopted``: what the
    directories of adopted checkpoints tell. ``damaged``: why a tracked step is not whole at its name.
    """
    told: dict[AttemptId, tuple[str, ...]] = {}
    for record in sorted(jobs, key=lambda each: each.job):
        words = f"{record.job}: {state_of_job(overview, record)}"
        told[record.of] = (*told.get(record.of, ()), words)
    reasons, rules = kept_by(overview.ledger), overview.rules()
    rows = []
    for of, checkpoint in overview.ledger.checkpoints.items():
        row = _row(overview, checkpoint, _age(since.get(of, ""), now), reasons.get(of, ()))
        if (told_by_files := adopted.get(of)) is not None:
            row = _with_contents(row, told_by_files, now)
        rule = rules.get(row.step, "") if row.kept_by == (RETENTION,) else ""
        tracked = checkpoint.state is State.TRACKED
        wrong = f"NOT USABLE: {damaged[row.step]}" if tracked and row.step in damaged else ""
        note = ", ".join(filter(None, (wrong, rule, row.note)))
        rows.append(replace(row, note=note, jobs=told.get(of, ())))
    for name in overview.unknown:
        step = overview.layout.parse_published(name)
        assert step is not None
        note = "see ckptfsm doctor"
        rows.append(ListedStep(step, UNKNOWN, "", None, 0, 0, (), (), note))
    return sorted(rows, key=lambda row: (row.step, row.attempt))


def state_of_job(overview: Overview, record: JobRecord) -> str:
    """The state of a job; without an owner nothing runs, whatever its record says."""
    if record.state is JobState.RUNNING and overview.owner.ownership in _NO_OWNER:
        return "interrupted"
    return "to retry" if record.state is JobState.WAITING and record.begun else record.state.value


def missed_lines(overview: Overview, jobs: Sequence[JobRecord]) -> list[str]:
    """A line for each job that was missed and has no row, as its checkpoint is gone."""
    gone = [r for r in jobs if r.of not in overview.ledger.checkpoints]
    lost = [r for r in gone if r.state is JobState.MISSED]
    return [
        clean(f"the job {r.job} was missed for step {r.step}: {r.reason}")
        for r in sorted(lost, key=lambda r: (r.step, r.job))
    ]


def states_of_holds(overview: Overview, jobs: Sequence[JobRecord], step: int) -> list[str]:
    """The jobs that hold a step and are not done, each with its state and its last error."""
    checkpoint = overview.ledger.at(step)
    told = {each.job: each for each in jobs if checkpoint is not None and each.of == checkpoint.id}
    found = []
    for name in overview.held.get(step, ()):
        record = told.get(name)
        if record is None:
            found.append(f"{name} (not begun)")
            continue
        attempts = f" after {record.begun} attempts" if record.begun > 1 else ""
        why = f": {record.reason}" if record.reason else ""
        found.append(f"{name} ({state_of_job(overview, record)}{attempts}{why})")
    return found


@dataclass(frozen=True, slots=True)
class JobLag:
    """How far a job lags that holds its checkpoints: the steps, and the seconds since the oldest of
    them was tracked; None if no record tells.
    """

    job: str
    steps: tuple[int, ...]
    oldest_s: float | None


def lags_of(overview: Overview, since: Mapping[AttemptId, str], now: float) -> list[JobLag]:
    """The lag of each job that holds checkpoints. ``since``, ``now``: see ``rows_of``."""
    found = []
    for name in sorted(overview.history.holds):
        held = [
            c
            for c in overview.ledger.in_state(State.TRACKED)
            if name in overview.held.get(c.step, ())
        ]
        ages = [age for c in held if (age := _age(since.get(c.id, ""), now)) is not None]
        found.append(JobLag(name, tuple(c.step for c in held), max(ages, default=None)))
    return found


def lag_lines(lags: Sequence[JobLag]) -> list[str]:
    """A line for each job that holds steps."""
    return [
        f"the job {lag.job} holds {len(lag.steps)} step{'s' if len(lag.steps) > 1 else ''}"
        + (f", the oldest for {format_duration(lag.oldest_s)}" if lag.oldest_s is not None else "")
        for lag in lags
        if lag.steps
    ]


def _row(
    overview: Overview, checkpoint: Checkpoint, age_s: float | None, reasons: tuple[str, ...]
) -> ListedStep:
    return ListedStep(
        checkpoint.step,
        checkpoint.state.value,
        str(checkpoint.id),
        age_s,
        checkpoint.shard_bytes,
        checkpoint.world_size if checkpoint.provenance == "saved" else 0,
        tuple(part.name for part in checkpoint.parts),
        reasons,
        _note(overview, checkpoint),
        metrics=dict(checkpoint.metrics),
    )


def _with_contents(row: ListedStep, told: AdoptedContents, now: float) -> ListedStep:
    """The row of an adopted checkpoint, as old as its files where these tell when they were written."""
    written = _age(told.written_at, now)
    age_s = row.age_s if written is None else written
    return replace(row, bytes=told.bytes, parts=told.parts, age_s=age_s)


def _note(overview: Overview, checkpoint: Checkpoint) -> str:
    """The remark behind the reasons and a rule: a pin's reason, the reason of a failure."""
    if checkpoint.state in (State.FAILED, State.QUARANTINED):
        return checkpoint.reason
    adopted = "adopted" if checkpoint.provenance == "adopted" else ""
    return overview.pins.get(checkpoint.step, "") or adopted


def _age(since: str, now: float) -> float | None:
    when = parse_time(since)
    return None if when is None else max(0.0, now - when)


def as_json(rows: Sequence[ListedStep]) -> list[dict[str, Any]]:
    """The rows as JSON takes them: it has no NaN and no infinity, so such a metric is None."""
    return [
        {**asdict(row), "metrics": {n: v if isfinite(v) else None for n, v in row.metrics.items()}}
        for row in rows
    ]


def lines_of(rows: Sequence[ListedStep], width: int) -> list[str]:
    """The rows as lines of at most ``width`` characters, safe to print on a terminal."""
    cells: list[tuple[str, ...]] = [_HEADS, *(_cells(row) for row in rows)]
    left: tuple[bool, ...] = _LEFT
    if not any(row.jobs for row in rows):
        cells = [(*line[:_JOBS_COLUMN], *line[_JOBS_COLUMN + 1 :]) for line in cells]
        left = (*_LEFT[:_JOBS_COLUMN], *_LEFT[_JOBS_COLUMN + 1 :])
    widths = [max(len(line[i]) for line in cells) for i in range(len(left))]
    for column in range(5, len(widths) - 1):
        used = sum(widths[:-1]) + 2 * (len(widths) - 1)
        least = len(cells[0][column])
        widths[column] = max(least, widths[column] - max(0, used + _MIN_LAST - width))
    lines = []
    for line in cells:
        padded = [
            clip(cell, widths[i]).ljust(widths[i]) if left[i] else cell.rjust(widths[i])
            for i, cell in enumerate(line[:-1])
        ]
        lines.append(clip("  ".join([*padded, line[-1]]).rstrip(), width))
    return lines


def _cells(row: ListedStep) -> tuple[str, ...]:
    reasons = ", ".join(row.kept_by)
    kept = f"{reasons}: {row.note}" if reasons and row.note else reasons or row.note
    return (
        str(row.step),
        row.state,
        "-" if row.age_s is None else format_duration(row.age_s),
        bytes_text(row.bytes) if row.bytes else "-",
        str(row.ranks or "-"),
        clean(",".join(row.parts)) or "-",
        clean(", ".join(row.jobs)) or "-",
        clean(kept),
    )


def lines_of_step(
    storage: Storage, overview: Overview, lives: Sequence[Life], jobs: Sequence[JobRecord] = ()
) -> list[str]:
    """The attempts at a step, in order of request, and the files at its name. Safe to print."""
    lines: list[str] = []
    metrics = {str(of): c.metrics for of, c in overview.ledger.checkpoints.items()}
    for lane in place(lives).lanes:
        life = lane.life
        lines.append(f"step {life.step}, attempt {life.attempt}: {describe_end(life)}")
        spans = {id(entry): stop - start for entry, start, stop in lane.spans()}
        for entry in life.entered:
            lasted = spans.get(id(entry)) if entry is not life.entered[-1] else None
            stay = f"for {format_duration(lasted)}" if lasted is not None else ""
            when = f"epoch {entry.epoch} record {entry.record}"
            lines.append(
                f"  {entry.state.value:<14} {entry.at or '-':<29} {stay:<12} {when}".rstrip()
            )
        if life.shard_bytes:
            lines.append(f"  shards: {bytes_text(life.shard_bytes)}")
        if life.reason:
            lines.append(f"  reason: {life.reason}" + (f" ({life.detail})" if life.detail else ""))
        lines += [f"  metric {name}: {value:g}" for name, value in metrics.get(life.attempt, ())]
        lines += [_job_line(overview, each) for each in jobs if str(each.of) == life.attempt]
    lines += _at_its_name(storage, overview, lives[0].step)
    return [clean(line) for line in lines]


def _job_line(overview: Overview, record: JobRecord) -> str:
    attempts = f", {record.begun} attempts" if record.begun > 1 else ""
    why = f": {record.reason}" if record.reason else ""
    return f"  job {record.job}: {state_of_job(overview, record)}{attempts}, {record.at}{why}"


def _at_its_name(storage: Storage, overview: Overview, step: int) -> list[str]:
    name = overview.layout.published_name(step)
    try:
        manifest = read_manifest(storage, name)
    except DamagedRoot as error:
        return [f"at {name}: {describe(error)}"]
    if manifest is None:
        if lookup(storage, name) is None:
            return [f"at {name}: nothing"]
        return [f"at {name}: no manifest of this library"]
    total = sum(file.bytes for file in manifest.files)
    parts = ", ".join(f"{part.name} ({part.kind})" for part in manifest.parts)
    return [
        f"at {name}: {len(manifest.files)} files, {bytes_text(total)}, attempt {manifest.of}",
        f"  parts: {parts}",
        *(f"  not of this checkpoint: {each}" for each in strangers_in(storage, name, manifest)),
    ]


def tree_lines(storage: Storage, overview: Overview, most: int | None) -> list[str]:
    """The tree, safe to print on a terminal, with ``most`` entries of each private directory.

    None: all of them.
    """
    states = {c.step: c.state.value for c in overview.ledger.checkpoints.values()}
    lines = [overview.root]
    for name in list_names(storage, ""):
        step = overview.layout.parse_published(name)
        if name == TRACKER:
            found = overview.tracker
            lines.append(f"  {name}  says {found.found if found.step is None else found.step}")
        elif step is not None:
            lines.append(f"  {name}/  {states.get(step, 'no journal explains it')}")
        elif name != PRIVATE:
            lines.append(f"  {name}  not of this library")
    lines += [f"  {PRIVATE}/", *_private(storage, most)]
    return [clean(line) for line in lines]


def _private(storage: Storage, most: int | None) -> Iterator[str]:
    for name in list_names(storage, PRIVATE):
        path = f"{PRIVATE}/{name}"
        if path not in _MEANING:
            yield f"    {name}"
            continue
        inside = list_names(storage, path)
        yield f"    {name}/  {_MEANING[path]}" + ("" if inside else " (none)")
        yield from (f"      {each}" for each in inside[:most])
        if most is not None and len(inside) > most:
            yield f"      and {len(inside) - most} more"
