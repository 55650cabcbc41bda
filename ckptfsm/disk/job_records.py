"""The records of jobs in a root, and the steps that jobs hold. Reads only.

A step is held until the record of each job that holds it says that the job is done. A record that is
missing, damaged or cannot be read says nothing, so its step is held.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptfsm.core.documents import JobRecord, JobState, decode
from ckptfsm.core.errors import DamagedRoot, NewerSchema
from ckptfsm.core.jobs import Key, first_record
from ckptfsm.core.layout import JOBS, job_name, parse_job
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.lifecycle import State
from ckptfsm.core.ports import Storage
from ckptfsm.disk.durable import list_names

_RECORD_BYTES = 1 << 16
_UNREADABLE = "its record could not be read"


class JobHolds:
    """The jobs that hold checkpoints of a root: ``holds`` has the ``every`` of each, by name.

    A record that was done once is not read again.
    """

    def __init__(self, storage: Storage, holds: Mapping[str, int]) -> None:
        self._storage = storage
        self._holds = holds
        self._done: set[Key] = set()

    def of_steps(self, ledger: Ledger) -> dict[int, tuple[str, ...]]:
        """The names of the jobs that hold each step of ``ledger``, without the steps of none."""
        there = ledger.in_state(State.TRACKED) if self._holds else ()
        found = {}
        for checkpoint in there:
            due = [name for name, every in self._holds.items() if checkpoint.step % every == 0]
            unfinished = tuple(name for name in due if not self._is_done((checkpoint.id, name)))
            if unfinished:
                found[checkpoint.step] = unfinished
        return found

    def _is_done(self, key: Key) -> bool:
        if key not in self._done and self._reads_done(key):
            self._done.add(key)
        return key in self._done

    def _reads_done(self, key: Key) -> bool:
        file = job_name(*key)
        try:
            record = decode(JobRecord, self._storage.read(file, _RECORD_BYTES), file)
        except (DamagedRoot, OSError):  # in doubt the step stays
            return False
        return (record.of, record.job) == key and record.state is JobState.DONE


def read_records(storage: Storage) -> list[JobRecord]:
    """All records of jobs, in no order. Raises ``NewerSchema`` or ``OSError``.

    One that cannot be read counts as one that waits, by its name: its job then runs again.
    """
    named = {name: key for name in list_names(storage, JOBS) if (key := parse_job(name))}
    found = []
    for name, data in storage.read_each(JOBS, list(named), _RECORD_BYTES) if named else ():
        of, job = named[name]
        try:
            record = decode(JobRecord, data, f"{JOBS}/{name}")
        except NewerSchema:
            raise
        except DamagedRoot:
            record = None
        if record is None or (record.of, record.job) != (of, job):
            record = first_record(of, job, _UNREADABLE)
        found.append(record)
    return found
