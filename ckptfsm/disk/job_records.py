"""The records of jobs on disk: a small document for each checkpoint and job in ``.ckptfsm/jobs``.

The process of the jobs, ``follow.jobs``, is the only writer. A record that cannot be read counts as
absent, and is written anew: its job then runs again.
"""

from __future__ import annotations

from ckptfsm.core.documents import JobRecord, decode
from ckptfsm.core.errors import DamagedRoot, NewerSchema
from ckptfsm.core.layout import JOBS, parse_job
from ckptfsm.core.ports import Storage
from ckptfsm.disk.durable import list_names

_RECORD_BYTES = 1 << 16


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
