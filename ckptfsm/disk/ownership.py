"""Ownership of a root: a lock that dies with its process, and an epoch that fences zombies.

The lock is a POSIX record lock: it tells a living owner from a dead one on one host, and no fork
inherits it. The epoch, a file created by ``link``, tells new from old also where the lock cannot:
without locks in the file system, after a takeover, or for a paused process. ``check`` comes before
every effect that another owner could notice (I9).
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from ckptfsm.adapters.abilities import required
from ckptfsm.adapters.identity import _started, boot_of, is_hidden, is_stopped
from ckptfsm.adapters.notices import say
from ckptfsm.core.documents import Holder, decode, encode_sealed
from ckptfsm.core.errors import (
    ConfigError,
    DamagedRoot,
    Fenced,
    NewerSchema,
    RootBusy,
    RootLost,
    StorageError,
    describe,
)
from ckptfsm.core.layout import (
    DIRECTORIES,
    EPOCHS,
    JOBS,
    JOURNAL,
    LOCK,
    PINS,
    PRIVATE,
    RUN,
    TAKING,
    epoch_name,
    parse_epoch,
    segment_name,
)
from ckptfsm.core.ports import Identity, Storage
from ckptfsm.disk.durable import list_names, lookup, make_dir, put, write_new
from ckptfsm.disk.journal import newest_segment
from ckptfsm.disk.trash import remove_marker

log = logging.getLogger("ckptfsm")
_HOLDER_BYTES = 1 << 16
_ATTEMPTS = 16


class _OwnedHere:
    """The nonces of the roots that this process owns. Process-wide, because ownership is.

    A root is forgotten here also where a dead disk does not take its release.
    """

    def __init__(self) -> None:
        self.nonces: set[str] = set()


_living = _OwnedHere()


class RootOwnership:
    """The right to change a root. ``epoch`` is this run's generation."""

    def __init__(
        self,
        storage: Storage,
        identity: Identity,
        epoch: int,
        lock: int | None,
        ended: Holder | None = None,
    ) -> None:
        """``ended``: the holder before, if it has ended without giving the root back."""
        self.epoch = epoch
        self._ended = ended
        self._storage = storage
        self._identity = identity
        self._lock = lock
        _living.nonces.add(identity.nonce)

    @property
    def tag(self) -> str:
        """Unique to this process on this root: for temporary names."""
        return f"{self.epoch}-{self._identity.pid}-{self._identity.nonce[:12]}"

    def check(self) -> None:
        """Raise ``Fenced`` if the newest epoch is another's, ``RootLost`` if nothing tells whose it is.

        The number alone does not tell: once all files were deleted, it is given out anew.
        """
        newest = newest_epoch(self._storage)
        found = self._nonce_found() if newest == self.epoch else None
        if newest not in (0, self.epoch) or found not in (None, "", self._identity.nonce):
            raise self._fenced(newest)
        if found is None:  # none was listed, or ours was removed since: a listing may be old
            self._renew_epoch()

    def _fenced(self, newer: int) -> Fenced:
        said = "a newer manager took this root over"
        if newer <= self.epoch:  # all epochs were forgotten, and given out anew
            said = "another manager took this root over, after its files were deleted"
        return Fenced(said, epoch=self.epoch, newer_epoch=newer)

    def _renew_epoch(self) -> None:
        """Make this epoch's file anew after a purge, if nothing tells of another owner.

        A successor's epoch is above our segment, as long as that is there. So whenever the successor
        comes, between any two lines here too, one of our looks sees its epoch or its segment.
        """
        storage = self._storage
        segment = newest_segment(storage)
        newest = max(newest_epoch(storage), segment)
        if newest > self.epoch:
            raise self._fenced(newest)
        if segment < self.epoch:
            raise self.lost()
        self._lock_again()
        make_dir(storage, EPOCHS)
        storage.fsync_dir(PRIVATE)
        temporary = _link_this_epoch(storage, self._identity, self.epoch)
        if temporary is not None:
            remove_marker(storage, temporary)
        storage.fsync_dir(EPOCHS)
        newest = max(newest_epoch(storage), newest_segment(storage))
        if temporary is None or newest != self.epoch:
            raise self._fenced(newest)
        file = _epoch_path(self.epoch)
        said = f"{file} was deleted, and is made anew: does something purge old files here?"
        say(log.warning, "epoch_renewed", said, file=file)

    def _lock_again(self) -> None:
        """Raise ``RootLost`` unless nobody else has the lock: ours may be lost without a word."""
        self._let_lock_go()
        self.claim_lock()
        if self._lock is None:
            raise RootLost(
                f"{_epoch_path(self.epoch)} was deleted, and another process has the lock",
                file=_epoch_path(self.epoch),
                epoch=self.epoch,
            )

    def lost(self) -> RootLost:
        """The error for files without which this owner cannot go on."""
        what = root = self._storage.root
        if lookup(self._storage, PRIVATE) is not None:
            what = f"{root}/{JOURNAL}/{segment_name(self.epoch)}"
        else:
            with contextlib.suppress(StorageError):  # the root itself is not at its path
                self._storage.absolute("")
                what = f"{root}/{PRIVATE}"
        return RootLost(f"{what} was deleted under its job", file=what, epoch=self.epoch)

    def keep_young(self) -> None:
        """Give the files that are written once a new time: a purge by age takes what is old.

        Raises as ``check``, and ``RootLost`` if the journal of this run is gone.
        """
        if lookup(self._storage, LOCK) is None:
            self._let_lock_go()
            self.claim_lock()
        if newest_segment(self._storage) < self.epoch:
            raise self.lost()
        self.check()
        for directory in (EPOCHS, JOURNAL, PINS, JOBS):
            for name in list_names(self._storage, directory):
                _touch(self._storage, f"{directory}/{name}")
        for name in (LOCK, RUN):
            _touch(self._storage, name)

    def claim_lock(self) -> None:
        """After a takeover: take the lock as soon as the previous owner has died (F32)."""
        if self._lock is None:
            self._lock = self._storage.try_lock(LOCK)

    def release(self, *, as_found: bool = False) -> None:
        """Let go of the root: another manager in the same process may open it now.

        ``as_found``: the opening repaired nothing, so a crash before it stays to be seen.
        """
        try:
            ours = newest_epoch(self._storage) == self.epoch
            if ours and self._nonce_found() in (None, "", self._identity.nonce):
                self._say_released(as_found)
        finally:
            self.release_lock_only()

    def _nonce_found(self) -> str | None:
        """The nonce in our epoch's file: None if there is no file, "" if the file is damaged."""
        try:
            holder = read_holder(self._storage, self.epoch)
        except NewerSchema as error:
            raise self._fenced(self.epoch) from error
        except DamagedRoot:
            return ""
        return holder.nonce if holder is not None else None

    def _say_released(self, as_found: bool) -> None:
        holder = _holder(self._identity, self.epoch, released=True)
        if as_found and self._ended is not None:
            holder = self._ended.model_copy(update={"epoch": self.epoch})
        path = _epoch_path(self.epoch)
        try:
            put(self._storage, path, encode_sealed(holder), tag=self.tag)
        except OSError:
            if self._lock is None:  # the previous owner may live: this epoch must go on fencing it
                raise
            remove_marker(self._storage, path)  # even a full disk lets a file be removed

    def release_lock_only(self) -> None:
        """Give up the lock only, as the death of the process would."""
        _living.nonces.discard(self._identity.nonce)
        self._let_lock_go()

    def _let_lock_go(self) -> None:
        if self._lock is not None:
            lock, self._lock = self._lock, None
            self._storage.unlock(lock)


def _touch(storage: Storage, path: str) -> None:
    try:
        storage.touch(path)
    except FileNotFoundError:  # removed meanwhile, as a pin by a person
        return
    except OSError as error:
        said = f"{path} gets older, and a purge may take it: {describe(error)}"
        say(log.warning, "not_renewed", said, file=path, error=describe(error))


def newest_epoch(storage: Storage) -> int:
    """The newest epoch that an owner has taken; 0 if there was none."""
    epochs = map(parse_epoch, list_names(storage, EPOCHS))
    return max((epoch for epoch in epochs if epoch is not None), default=0)


def read_holder(storage: Storage, epoch: int) -> Holder | None:
    """The holder of ``epoch``; None if there is no such epoch."""
    path = _epoch_path(epoch)
    try:
        return decode(Holder, storage.read(path, _HOLDER_BYTES), path)
    except FileNotFoundError:
        return None


def open_root(
    storage: Storage, identity: Identity, *, above: int = 0, takeover: bool = False
) -> RootOwnership:
    """Take the root: lock, then a new epoch (greater than ``above`` and than any other).

    Raises ``RootBusy`` with host and pid of the living owner, unless ``takeover``. Raises
    ``ConfigError`` where the file system has no locks, hard links or fsync of directories.
    """
    for directory in DIRECTORIES:
        make_dir(storage, directory)
    with required("fsync of directories", storage.root):
        for directory in ("", *DIRECTORIES):
            # A killed process may have left names that are not durable.
            storage.fsync_dir(directory)
    with required("record locks (fcntl)", storage.root):
        lock = storage.try_lock(LOCK)
    try:
        epoch = newest_epoch(storage)
        holder = known_holder(storage, epoch)
        if not takeover and (lock is None or holder_lives(storage, holder, identity)):
            raise _busy(storage.root, holder, identity)
        taken, temporary = _link_epoch(storage, identity, max(epoch, above))
    except BaseException:
        if lock is not None:
            storage.unlock(lock)
        raise
    ended = holder if holder is not None and not holder.released and not takeover else None
    ownership = RootOwnership(storage, identity, taken, lock, ended)
    try:
        remove_marker(storage, temporary)
        storage.fsync_dir(EPOCHS)
        _forget_older(storage, taken)
    except BaseException:
        ownership.release()  # otherwise this process would be refused when it tries again
        raise
    return ownership


def known_holder(storage: Storage, epoch: int) -> Holder | None:
    """The holder of ``epoch``, or None if its file is damaged. Raises ``NewerSchema``."""
    try:
        return read_holder(storage, epoch)
    except NewerSchema:
        raise
    except DamagedRoot:
        return None


def holder_lives(storage: Storage, holder: Holder | None, identity: Identity) -> bool:
    """True if the holder lives: a manager of this process, or a process here that has the lock's
    file open. One that cannot be looked at, such as another user's, is never taken as dead.

    The lock is not asked: some file systems know none, and a process that opens and closes the file
    once more has lost its own. A copied root names the holder too, who has not the *copy's* file open.
    """
    if holder is None or holder.released:
        return False
    if _is_here(holder, identity):
        return holder.nonce in _living.nonces
    if is_elsewhere(holder, identity):
        return False
    started = _started(holder.pid)
    if not started and is_hidden(holder.pid):
        return boot_of(holder.started) == boot_of(identity.started)
    if not started or holder.started != started:
        return False
    return _may_have_open(holder.pid, storage.absolute(LOCK))


def _may_have_open(pid: int, path: str) -> bool:
    """True if a process has the file ``path`` open, or does not let this user see its files."""
    descriptors = Path(f"/proc/{pid}/fd")
    try:
        names = os.listdir(descriptors)
    except PermissionError:
        return True
    except OSError:  # ended
        return False
    return any(_may_lead_to(descriptors / name, path) for name in names)


def _may_lead_to(descriptor: Path, path: str) -> bool:
    try:
        named = descriptor.readlink().name == Path(path).name  # touch no other file of it
        return named and descriptor.samefile(path)
    except PermissionError:
        return True
    except OSError:  # closed meanwhile
        return False


def is_elsewhere(holder: Holder, identity: Identity) -> bool:
    """True if the holder's pid means nothing here: on another host, or in another container."""
    namespaces = {holder.namespace, identity.namespace} - {""}
    return holder.host != identity.host or len(namespaces) > 1


def is_owned_here(storage: Storage, identity: Identity) -> bool:
    """True if this process took the newest epoch."""
    holder = known_holder(storage, newest_epoch(storage))
    return holder is not None and _is_here(holder, identity)


def _is_here(holder: Holder, identity: Identity) -> bool:
    same = (holder.host, holder.pid, holder.started) == identity[:3]
    return same and not is_elsewhere(holder, identity)


def _busy(root: str, holder: Holder | None, identity: Identity) -> RootBusy:
    host, pid = (holder.host, holder.pid) if holder else ("unknown", None)
    said = f"root {root} is owned by pid {pid} on {host}"
    if holder is not None and _is_here(holder, identity):
        said = (
            f"root {root} is owned by another manager of this process: close it or abandon it first; if "
            "that was done, the disk has not answered it yet"
        )
    elif holder is not None and not is_elsewhere(holder, identity) and is_stopped(holder.pid):
        said += f", which is stopped: kill -CONT {pid} lets it go on, kill -9 {pid} ends it"
    return RootBusy(said, root=root, host=host, pid=pid)


def _link_epoch(storage: Storage, identity: Identity, newest: int) -> tuple[int, str]:
    """Create the next epoch's file, complete at once. Returns the epoch and the temporary name."""
    for epoch in range(newest + 1, newest + 1 + _ATTEMPTS):
        temporary = _link_this_epoch(storage, identity, epoch)
        if temporary is not None:
            return epoch, temporary
    raise RootBusy("others take this root again and again", root=storage.root)


def _link_this_epoch(storage: Storage, identity: Identity, epoch: int) -> str | None:
    """Create the file of ``epoch``; returns the temporary name, or None if another has the epoch."""
    temporary = f"{EPOCHS}/{TAKING}{identity.pid}-{identity.nonce}-{epoch}"
    _write_taking(storage, temporary, _holder(identity, epoch))
    try:
        with required("hard links", storage.root):
            storage.link(temporary, _epoch_path(epoch))
    except ConfigError:
        remove_marker(storage, temporary)
        raise
    except OSError as error:
        # The link may exist all the same (F8): NFS even reports EEXIST when it repeats our request.
        holder = known_holder(storage, epoch)
        if holder is None or holder.nonce != identity.nonce:
            if not isinstance(error, FileExistsError):
                raise
            remove_marker(storage, temporary)
            return None
    return temporary


def _write_taking(storage: Storage, path: str, holder: Holder) -> None:
    """Write the file that becomes an epoch; on a full disk, remove the partial file."""
    remove_marker(storage, path)  # left by an earlier try: only this process has its nonce
    try:
        write_new(storage, path, encode_sealed(holder))
    except OSError:
        try:
            remove_marker(storage, path)
        except OSError as error:
            say(log.warning, "not_removed", f"{path} stays: {describe(error)}", file=path)
        raise


def _forget_older(storage: Storage, epoch: int) -> None:
    """Remove the epochs below ``epoch``; a zombie sees ``epoch`` and stops either way."""
    for name in list_names(storage, EPOCHS):
        older = parse_epoch(name)
        if older is not None and older < epoch:
            remove_marker(storage, f"{EPOCHS}/{name}")


def _holder(identity: Identity, epoch: int, *, released: bool = False) -> Holder:
    return Holder(epoch=epoch, released=released, **identity._asdict())


def _epoch_path(epoch: int) -> str:
    return f"{EPOCHS}/{epoch_name(epoch)}"
