"""The follower of a root: it looks for tracked checkpoints, and takes one after the other under a lease.

No call of the trainer waits for it. It reads the tracker, and the journal once the tracker has moved.
``evaluators`` hand each checkpoint to the caller, and keep nothing. ``runner`` runs a work for each,
with retries and a record: jobs and copies are its users.

What is taken is an attempt, not a step. Once its lease is durable, the journal still has it in use, or
it is not taken. A directory that this host does not show is waited for; in the end it is passed over.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptfsm.core.errors import DamagedRoot, JournalCorrupt, StepNotFoundError
from ckptfsm.core.lifecycle import Checkpoint
from ckptfsm.core.ports import Clock, Storage
from ckptfsm.disk.inspection import read_tracker
from ckptfsm.disk.journal import History, read_history
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.disk.visibility import VISIBILITY_S

_GONE = "its directory was gone before its turn"


class Follower:
    """Looks at a root, and takes what is due. A subclass says what that is."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._history: History | None = None
        self._settled: int | None = None  # the tracker's step, once all that it told is known

    def apply_history(self, history: History, named: int | None) -> bool:
        """Take in what the journal has. True if there is nothing to read until the tracker moves."""
        raise NotImplementedError

    def due(self) -> Sequence[Checkpoint]:
        """The checkpoints to take, in the order in which to take them."""
        raise NotImplementedError

    def lease_on(self, storage: Storage, checkpoint: Checkpoint, late_s: float) -> ReaderLease:
        """A lease on this attempt that is not held yet. It waits ``late_s`` for the directory."""
        raise NotImplementedError

    def pass_over(self, checkpoint: Checkpoint, why: str) -> None:
        """Learn that a checkpoint cannot be taken."""
        raise NotImplementedError

    def refuse(self, error: OSError) -> None:
        """Learn that a lease failed for the disk. Returns to go on with the next checkpoint."""
        raise error

    def waits_for(self, checkpoint: Checkpoint) -> bool:
        """True if a directory that is not there is looked for again."""
        return False

    def look(self, storage: Storage) -> int | None:
        """Read the tracker, and the journal if that is due. Returns the step that the tracker names."""
        named = read_tracker(storage).step
        if named is not None and named != self._settled:
            self._read(storage, named)
        return named

    def _read(self, storage: Storage, named: int | None) -> None:
        self._history = read_history(storage, self._history)
        self._settled = named if self.apply_history(self._history, named) else None

    def take(self, storage: Storage) -> ReaderLease | None:
        """A lease that is held on the first that is due, or None if none can be taken now."""
        late_until = self._clock.monotonic() + VISIBILITY_S  # for all of them
        for checkpoint in self.due():
            late_s = max(0.0, late_until - self._clock.monotonic())
            lease = self.lease_on(storage, checkpoint, late_s)
            try:
                return lease.__enter__()
            except StepNotFoundError:
                self._read(storage, read_tracker(storage).step)
                if checkpoint.id not in (each.id for each in self.due()):
                    continue
                if self.waits_for(checkpoint):
                    return None
                self.pass_over(checkpoint, _GONE)
            except JournalCorrupt:
                raise
            except DamagedRoot as error:
                self.pass_over(checkpoint, error.message)
            except OSError as error:
                self.refuse(error)
        return None
