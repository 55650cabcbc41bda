"""Leases of readers, as the coordinator keeps them: its own, and those of other processes.

Rules: one of its own holds until it is given back; another one, and what an error or a crash left of one
that was being written, expires when it has not changed for long, by our own monotonic time (F14).
"""

from __future__ import annotations

import logging

from ckptfsm.adapters.notices import say
from ckptfsm.core.documents import Pin, encode
from ckptfsm.core.errors import describe
from ckptfsm.core.layout import READERS, parse_reader
from ckptfsm.core.ports import Clock, Storage
from ckptfsm.disk.durable import TEMPORARY, list_names, lookup, put
from ckptfsm.disk.trash import remove_marker

log = logging.getLogger("ckptfsm")


class ReaderLeases:
    """See the module. A lease is named by its file."""

    def __init__(self, storage: Storage, clock: Clock, timeout_s: float) -> None:
        self._storage = storage
        self._clock = clock
        self._timeout_s = timeout_s
        self._taken = 0
        self._held: set[str] = set()
        self._seen: dict[str, tuple[bytes, float]] = {}

    def take(self, step: int, tag: str, nonce: str) -> str:
        """Make a lease of our own durable."""
        self._taken += 1
        name = f"{step}.{tag}-{self._taken}.json"
        lease = f"{READERS}/{name}"
        self._held.add(name)
        try:
            mark = Pin(step=step, reason="restore", nonce=nonce)
            put(self._storage, lease, encode(mark), tag=tag)
        except BaseException:
            self.give_back(lease)
            raise
        return lease

    def give_back(self, lease: str) -> None:
        """One that cannot be removed expires like any other."""
        self._held.discard(lease.rpartition("/")[2])
        try:
            remove_marker(self._storage, lease)
        except OSError as error:
            said = f"the lease {lease} could not be removed: {describe(error)}"
            say(log.warning, "lease_not_removed", said, file=lease, error=describe(error))

    def expire(self) -> None:
        """Drop those that have not changed within the timeout. One that is sick keeps no other."""
        now = self._clock.monotonic()
        seen: dict[str, tuple[bytes, float]] = {}
        for name in list_names(self._storage, READERS):
            if parse_reader(name) is None and TEMPORARY not in name:
                continue  # not one of ours
            if name in self._held:
                continue  # its reader is this process, and lives
            try:
                watched = self._watch(name, now)
            except FileNotFoundError:
                continue  # its reader finished just now
            except OSError as error:
                path, why = f"{READERS}/{name}", describe(error)
                said = f"the reader's lease {path} could not be looked at: {why}"
                say(log.warning, "reader_lease_not_looked_at", said, file=path, error=why)
                watched = self._seen.get(name)
            if watched is not None:
                seen[name] = watched
        self._seen = seen

    def _watch(self, name: str, now: float) -> tuple[bytes, float] | None:
        """What a lease holds, and since when; None if it was dropped, or is none of ours."""
        path = f"{READERS}/{name}"
        found = lookup(self._storage, path)
        if found is None or found.kind != "file":
            return None  # not one of ours: it protects, and nobody here removes it
        content, known = self._storage.read(path, 1 << 16), self._seen.get(name)
        since = known[1] if known is not None and known[0] == content else now
        if now - since <= self._timeout_s:
            return content, since
        said = (
            f"the reader's lease {path} has not changed for {self._timeout_s:g} s, and is dropped"
        )
        say(log.warning, "reader_lease_expired", said, file=path)
        remove_marker(self._storage, path)
        return None
