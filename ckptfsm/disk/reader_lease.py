"""Reader leases: a reader, say an evaluator outside the job, keeps a step from being pruned.

The lease is made durable first, then the reader looks whether the step is still there. The coordinator
looks for leases before and after it moves a directory to the trash. So either the step stays, or the
reader learns that it is gone (F27); nothing is deleted before the second look.

A lease lives as long as it changes. The coordinator drops one of another process that has not changed
for long, by its monotonic time (F14).
"""

from __future__ import annotations

import logging
import os
import uuid
from functools import partial

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.notices import say
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.backoff import pauses
from ckptfsm.core.documents import Pin, encode
from ckptfsm.core.errors import (
    ConfigError,
    DamagedRoot,
    NewerSchema,
    StepNotFoundError,
    describe,
)
from ckptfsm.core.evidence import is_whole, why_not_whole
from ckptfsm.core.layout import LAYOUTS, OWN, READERS, LayoutName, parse_reader
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.ports import Clock, Storage
from ckptfsm.disk.durable import is_refused, is_temporary, list_names, lookup, put, storage_error
from ckptfsm.disk.inspection import inspect_published, read_commit
from ckptfsm.disk.journal import read_history
from ckptfsm.disk.trash import remove_marker
from ckptfsm.disk.visibility import VISIBILITY_S

# The tracker is written before that is journaled, and a lease may come while a prune begins.
_READ = (State.TRACKED, State.FINALIZED, State.PRUNABLE)


class ReaderLease:
    """Keeps one step from being pruned while the ``with`` block runs.

    The lease does not stop a rollback or the withdrawal of a damaged step. Both move the step to
    quarantine, where nothing is deleted, and the next ``renew`` raises.

    - ``layout`` is the job's (see ``CheckpointConfig``). ``path`` is the absolute directory to read.
    - ``attempt``: the lease is on this attempt at the step, and on no other; "" takes any.
    - ``nonce`` names the lease and is used once; by default it has the pid and a random number.
    - ``kept_by``: the process of this library whose lease it is. Its next start removes the lease.
    - ``visibility_timeout_s``: how long a step that the journal has in use is waited for, by ``clock``,
      where this host does not show it yet.

    ``renew`` it at least every ``reader_timeout_s`` of the job's configuration. Works without torch;
    needs write access to the root's ``.ckptfsm/readers``.

    Raises ``StepNotFoundError`` if the step is missing, ``ConfigError`` if the root is missing or the
    nonce is reserved, and ``NotPermitted`` if this user may not write the lease. Raises
    ``DamagedRoot`` if the directory is not the checkpoint that the journal has in use, say another
    run's of the same step, or if the journal is damaged. Raises ``OSError`` if the disk fails: then
    try again.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        step: int,
        *,
        layout: LayoutName = "megatron",
        storage: Storage | None = None,
        attempt: str = "",
        nonce: str | None = None,
        kept_by: str = "",
        visibility_timeout_s: float = VISIBILITY_S,
        clock: Clock | None = None,
    ) -> None:
        if nonce is not None and nonce.startswith(OWN):
            raise ConfigError(f"nonce {nonce!r} is reserved: begin it with anything but {OWN!r}")
        self._owned = storage is None
        try:
            self._storage = storage or PosixStorage(root, create=False)
        except PermissionError as error:
            raise storage_error(error, "lease", os.fspath(root)) from error
        self.step = step
        self.attempt = attempt
        self._nonce = nonce or f"{kept_by}{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._file = f"{READERS}/{step}.{self._nonce}.json"
        self._renewals = 0
        self._process = 0  # the one that entered the block
        self._manifest: str | None = None  # its checksum then, "" for none; None: not compared
        self._layout = LAYOUTS[layout]
        self._name = self._layout.published_name(step)
        self._late_s = visibility_timeout_s
        self._clock = clock or SystemClock()
        self.path = f"{self._storage.root}/{self._name}"

    def __enter__(self) -> ReaderLease:
        self._process = os.getpid()
        try:
            self._mark()
            self._await_directory()
            self._compare()
        except BaseException:
            self.__exit__()
            raise
        return self

    def renew(self) -> None:
        """Show the job that the reader still lives.

        Raises ``StepNotFoundError`` if the step is gone, or was saved again. Raises ``StorageError`` if
        ``path`` now leads to another root than the opened one, which holds the lease.
        """
        self._mark()
        if not self._is_there():
            raise self._gone()
        if not self._is_same():
            raise self._gone(" with the manifest that it had")
        self.path = self._storage.absolute(self._name)

    def metrics(self) -> dict[str, float]:
        """The metrics of the checkpoint by name, as the journal has them now.

        Those of its save, and those that were recorded later. A directory that no journal explains has
        none. Raises ``DamagedRoot`` for a damaged journal, and ``OSError``.
        """
        known = self._known()
        return dict(known[-1].metrics) if known else {}

    def _known(self) -> list[Checkpoint]:
        """The checkpoints of the step, or the attempt, that the journal has in use, oldest first."""
        found = read_history(self._storage).ledger.in_state(*_READ)
        ours = [c for c in found if c.step == self.step]
        return [c for c in ours if self.attempt in ("", str(c.id))]

    def _is_there(self) -> bool:
        found = lookup(self._storage, self._name)
        return found is not None and found.kind == "dir"

    def _is_same(self) -> bool:
        """False if another attempt stands at the name. A damaged one is for the job to withdraw."""
        if self._manifest is None:
            return True
        try:
            commit = read_commit(self._storage, self._name)
        except DamagedRoot as error:
            return not isinstance(error, NewerSchema)
        return self._manifest == (commit.crc if commit is not None else "")

    def _gone(self, how: str = "") -> StepNotFoundError:
        said = f"step {self.step} is not at {self.path}{how}"
        return StepNotFoundError(said, step=self.step, file=self.path)

    def _await_directory(self) -> None:
        """Return once the step is there, see the class. Raises ``StepNotFoundError``."""
        deadline, pause = self._clock.monotonic() + self._late_s, pauses()
        while not self._is_there():
            if self._clock.monotonic() >= deadline or not self._known():
                raise self._gone()
            self._clock.sleep(next(pause))
        self.path = self._storage.absolute(self._name)

    def _compare(self) -> None:
        """Raise ``DamagedRoot`` if no checkpoint that the journal has in use is this directory.

        A directory that no checkpoint in use explains, such as one in place that is being written, is
        not judged.
        """
        look = partial(inspect_published, self._storage, self._layout, self.step, files=False)
        there = look()
        while (known := self._known()) and not any(is_whole(c, there) for c in known):
            earlier, there = there, look()
            if there.found == "no_directory":  # retention may bring it back from the trash
                self._await_directory()
            elif there == earlier:  # else the step was saved again between the two looks
                why = why_not_whole(known[-1], there)
                raise DamagedRoot(f"step {self.step}: {why}", step=self.step, file=self.path)
        self._manifest = there.manifest_crc if known else None
        # A prune that began may have looked for leases before this one was there.
        if self.attempt and not any(c.state is not State.PRUNABLE for c in known):
            raise self._gone()

    def _mark(self) -> None:
        """Write the lease, with another content than before."""
        self._renewals += 1
        mark = Pin(step=self.step, reason="reader", nonce=f"{self._nonce}-{self._renewals}")
        try:
            put(self._storage, self._file, encode(mark), tag=self._nonce)
        except OSError as error:
            if not is_refused(error):
                raise
            raise storage_error(error, "lease", self._file) from error

    def __exit__(self, *error: object) -> None:
        try:
            if os.getpid() == self._process:  # in a forked child the lease is its parent's
                remove_marker(self._storage, self._file)
        finally:
            if self._owned:
                self._storage.close_root()


log = logging.getLogger("ckptfsm")


class ReaderLeases:
    """The leases that the coordinator knows, each named by its file."""

    def __init__(self, storage: Storage, clock: Clock, timeout_s: float) -> None:
        self._storage = storage
        self._clock = clock
        self._timeout_s = timeout_s
        self._taken = 0
        self._held: set[str] = set()
        self._seen: dict[str, tuple[bytes, float]] = {}

    @property
    def held(self) -> bool:
        """True while this job reads a checkpoint."""
        return bool(self._held)

    def take(self, step: int, tag: str, nonce: str) -> str:
        """Make a lease for a restore of this job durable. Returns its file."""
        self._taken += 1
        lease = f"{READERS}/{step}.{tag}-{self._taken}.json"
        self._held.add(lease)
        try:
            mark = Pin(step=step, reason="restore", nonce=nonce)
            put(self._storage, lease, encode(mark), tag=tag)
        except BaseException:
            self.give_back(lease)
            raise
        return lease

    @property
    def steps(self) -> frozenset[int]:
        """The steps of the leases that this job holds."""
        names = (parse_reader(lease.rpartition("/")[2]) for lease in self._held)
        return frozenset(step for step in names if step is not None)

    def give_back(self, lease: str) -> None:
        """Remove a lease of this job; if that fails, the lease expires like any other."""
        self._held.discard(lease)
        try:
            remove_marker(self._storage, lease)
        except OSError as error:
            said = f"the lease {lease} could not be removed: {describe(error)}"
            say(log.warning, "lease_not_removed", said, file=lease, error=describe(error))

    def expire(self) -> None:
        """Drop the leases that have not changed within the timeout. An unreadable lease stays."""
        now = self._clock.monotonic()
        seen: dict[str, tuple[bytes, float]] = {}
        for name in list_names(self._storage, READERS):
            path = f"{READERS}/{name}"
            is_lease = parse_reader(name) is not None or is_temporary(name)  # or a half-written one
            if not is_lease or path in self._held:
                continue  # one that is held: the reader is this process, which lives
            try:
                watched = self._watch(path, now)
            except FileNotFoundError:
                continue  # the reader finished just now
            except OSError as error:
                why = describe(error)
                said = f"the reader's lease {path} could not be looked at: {why}"
                say(log.warning, "reader_lease_not_looked_at", said, file=path, error=why)
                watched = self._seen.get(path)
            if watched is not None:
                seen[path] = watched
        self._seen = seen

    def _watch(self, path: str, now: float) -> tuple[bytes, float] | None:
        """The content of a lease, and since when; None if it was dropped, or is no lease of this
        library.
        """
        found = lookup(self._storage, path)
        if found is None or found.kind != "file":
            return None  # no lease of this library: it protects its step, and is never removed
        content, known = self._storage.read(path, 1 << 16), self._seen.get(path)
        since = known[1] if known is not None and known[0] == content else now
        if now - since <= self._timeout_s:
            return content, since
        said = (
            f"the reader's lease {path} has not changed for {self._timeout_s:g} s, and is dropped"
        )
        say(log.warning, "reader_lease_expired", said, file=path)
        remove_marker(self._storage, path)
        return None
