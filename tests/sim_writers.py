"""Writers that a test controls: a rank's writer that runs, dies or hangs on command.

``SimWriters()`` is a ``ports.Launch`` for ``SimStorage``. At launch the job is copied, as by a fork.
Nothing happens until ``finish``, ``die`` or ``kill``: the library's ``write_rank`` then writes, as a
separate simulated process.
"""

from __future__ import annotations

import pickle
import signal
from dataclasses import replace

from ckptfsm.core.errors import CkptFsmError, describe
from ckptfsm.core.ports import ChildError, Outcome, RankJob, Storage
from ckptfsm.testing.faults import FaultStorage, Hook, crash_at
from ckptfsm.testing.simfs import ProcessDead, SimDisk, SimStorage
from ckptfsm.writers.rank_writer import write_rank


class PlainCount:
    """A ``adapters.shared_count.Count`` of a writer that lives in this process."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, count: int) -> None:
        self.value += count


class CopiedWriter:
    """The answers of a writer whose job was copied at its launch: no trainer waits for it."""

    holds_copy = True
    must_wait = False

    def __init__(self) -> None:
        self._count = PlainCount()

    def await_copy(self, timeout_s: float) -> None:
        """No wait."""

    def confirm(self) -> None:
        """No message: nothing could change the copy."""

    def whereabouts(self) -> str:
        return ""

    def written_bytes(self) -> int:
        return self._count.value


class SimWriter(CopiedWriter):
    """The writer of one rank, see the module. ``calls`` counts its changing storage calls so far."""

    def __init__(self, disk: SimDisk, name: str, job: RankJob, hook: Hook | None) -> None:
        super().__init__()
        self.job: RankJob = replace(job, parts=pickle.loads(pickle.dumps(job.parts)))
        self.calls = 0
        self._disk = disk
        self._name = name
        self._hook = hook
        self._outcome: Outcome | None = None

    @property
    def running(self) -> bool:
        return self._outcome is None

    def poll(self) -> Outcome | None:
        return self._outcome

    def wait(self, timeout_s: float) -> Outcome | None:
        """Return at once: waiting does not advance this writer."""
        return self._outcome

    def kill(self, timeout_s: float) -> bool:
        if self._outcome is None:
            self._end(Outcome(-signal.SIGKILL))
        return True

    def finish(self) -> Outcome:
        """Write everything and end; a storage error ends the writer with exit code 1."""
        return self._write(self._hook)

    def die(self, after_calls: int) -> Outcome:
        """Write up to so many changing storage calls, then be killed."""
        return self._write(crash_at(after_calls))

    def _write(self, hook: Hook | None) -> Outcome:
        if self._outcome is not None:
            return self._outcome
        storage = FaultStorage(SimStorage(self._disk, self._name), before=hook)
        try:
            payload = write_rank(storage, self.job, count=self._count)
            outcome = Outcome(0, payload=payload, complete=True)
        except ProcessDead:
            outcome = Outcome(-signal.SIGKILL)
        except (CkptFsmError, OSError) as error:
            kind = getattr(error, "kind", "")
            outcome = Outcome(1, error=ChildError(describe(error), describe(error), kind))
        self.calls = len(storage.calls)
        return self._end(outcome)

    def _end(self, outcome: Outcome) -> Outcome:
        self._outcome = outcome
        self._disk.kill(self._name)
        return outcome


class SimWriters:
    """``ports.Launch`` on a simulated disk. ``writers`` has all started writers, in order.

    ``hook`` is called before each changing storage call of a writer, as in ``FaultStorage``.
    """

    def __init__(self, disk: SimDisk, name: str = "writer", hook: Hook | None = None) -> None:
        self.writers: list[SimWriter] = []
        self._disk = disk
        self._name = name
        self._hook = hook

    def __call__(self, storage: Storage, job: RankJob) -> SimWriter:
        name = f"{self._name}-{job.of}-{job.rank}-{len(self.writers)}"
        writer = SimWriter(self._disk, name, job, self._hook)
        self.writers.append(writer)
        return writer
