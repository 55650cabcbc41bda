"""The proof that every rank works in the directory that rank 0 opened: disks of hosts share paths."""

from __future__ import annotations

import errno
from contextlib import ExitStack
from dataclasses import dataclass

from ckptfsm.core.backoff import pauses
from ckptfsm.core.errors import ConfigError, DamagedRoot
from ckptfsm.core.ports import Identity, Ports, Storage
from ckptfsm.disk.ownership import newest_epoch, read_holder


@dataclass(frozen=True, slots=True)
class OpenedRoot:
    """The root at ``path``, as ``owner`` opened it."""

    path: str
    epoch: int
    owner: Identity

    def is_seen_in(self, storage: Storage) -> bool:
        """True if ``storage`` shows the epoch that this owner took."""
        try:
            holder = read_holder(storage, self.epoch)
        except DamagedRoot:  # of another root, or not all of it is visible yet
            return False
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return False  # a directory that was deleted, and that this host still has at the path
        return holder is not None and holder.nonce == self.owner.nonce


def open_when_visible(ports: Ports, timeout_s: float) -> Storage:
    """This process's storage of a root that another process made.

    A root that this host does not show yet is waited for, at most ``timeout_s``.
    """
    deadline, pause = ports.clock.monotonic() + timeout_s, pauses()
    while True:
        try:
            return ports.open_storage(False)
        except ConfigError as error:
            if error.facts.get("reason") != "missing" or ports.clock.monotonic() >= deadline:
                raise
        ports.clock.sleep(next(pause))


def open_shared(ports: Ports, root: OpenedRoot, timeout_s: float) -> Storage:
    """This rank's storage of the root that rank 0 has opened, waited for at most ``timeout_s``.

    The root is opened anew for each look: this host may still have a directory at the path that was
    deleted meanwhile. Raises ``ConfigError`` if rank 0's epoch does not show.
    """
    deadline, pause = ports.clock.monotonic() + timeout_s, pauses()
    while True:
        try:
            storage = open_when_visible(ports, deadline - ports.clock.monotonic())
        except ConfigError as error:
            if error.facts.get("reason") != "missing":
                raise
            raise _not_shared(ports, root, error.root, "no such directory") from None
        with ExitStack() as undo:
            undo.callback(storage.close_root)
            if root.is_seen_in(storage):
                undo.pop_all()
                return storage
            if ports.clock.monotonic() >= deadline:
                raise _not_shared(ports, root, storage.root, _epoch_in(storage))
        ports.clock.sleep(next(pause))


def _epoch_in(storage: Storage) -> str:
    try:
        return f"epoch {newest_epoch(storage)}"
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return "a directory that was deleted"


def _not_shared(ports: Ports, root: OpenedRoot, place: str, found: str) -> ConfigError:
    rank, host = ports.transport.rank, ports.identity().host
    return ConfigError(
        f"the ranks do not see the same directory: rank 0 on {root.owner.host} took epoch {root.epoch} "
        f"in {root.path}, and rank {rank} on {host} finds {found} at {place}: the root has to be on a "
        "file system that all hosts mount",
        reason="not_shared",
        root=place,
        rank=rank,
        host=host,
    )
