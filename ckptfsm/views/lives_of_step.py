"""All attempts at one step, for ``ckptfsm show``."""

from __future__ import annotations

from collections.abc import Sequence

from ckptfsm.core.documents import JobRecord
from ckptfsm.core.errors import DamagedRoot, describe
from ckptfsm.core.ports import Storage
from ckptfsm.core.units import bytes_text
from ckptfsm.disk.durable import lookup
from ckptfsm.disk.inspection import read_manifest
from ckptfsm.disk.overview import Overview
from ckptfsm.disk.verification import strangers_in
from ckptfsm.views.listing import state_of_job
from ckptfsm.views.reading import Life
from ckptfsm.views.timeline import clean, describe_end, format_duration, place


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
