"""The records of jobs on disk: a small document for each checkpoint and job in ``.ckptfsm/jobs``.

The process of the jobs, ``follow.jobs``, is the only writer. A record that cannot be read counts as
absent, and is written anew: its job then runs again.
"""

from __future__ import annotations

import json

from ckptfsm.core.documents import MAX_SEGMENT_BYTES, JobRecord, decode
from ckptfsm.core.errors import DamagedRoot, NewerSchema
from ckptfsm.core.layout import JOBS, JOURNAL, parse_job, parse_segment
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Storage
from ckptfsm.disk.durable import list_names
from ckptfsm.disk.journal import decode_line

_RECORD_BYTES = 1 << 16
_TRACKED = b'"dest":"%s"' % State.TRACKED.value.encode()


def read_records(storage: Storage) -> list[JobRecord]:
    """All records, in no order. Raises ``NewerSchema`` or ``OSError``."""
    found = []
    names = [name for name in list_names(storage, JOBS) if parse_job(name) is not None]
    for name, data in storage.read_each(JOBS, names, _RECORD_BYTES) if names else ():
        try:
            record = decode(JobRecord, data, f"{JOBS}/{name}")
        except NewerSchema:
            raise
        except DamagedRoot:
            continue
        if parse_job(name) == (record.of, record.job):
            found.append(record)
    return found


def saved_since(storage: Storage, epoch: int) -> set[AttemptId]:
    """The attempts that the journal acknowledged from ``epoch`` on, also those that are gone since.

    Reads only these lines, and judges nothing.
    """
    names = [name for name in list_names(storage, JOURNAL) if (parse_segment(name) or 0) >= epoch]
    segments = (storage.read(f"{JOURNAL}/{name}", MAX_SEGMENT_BYTES) for name in names)
    lines = (line for data in segments for line in data.split(b"\n") if _TRACKED in line)
    records = (json.loads(body) for line in lines if (body := decode_line(line)) is not None)
    return {
        AttemptId(record["step"], record["epoch"], record["attempt"])
        for record in records
        if (record.get("type"), record.get("source")) == ("transition", "finalized")
    }
