"""The only module that deletes files of a root.

Deleted are discarded directories and left-out parts in the trash, our temporary files, markers that are
over, and staged files of a killed writer. So is what a fetch left that is given up. Removal goes in
bounded slices and never follows a link.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence

from ckptfsm.adapters.abilities import required
from ckptfsm.core.errors import ConfigError
from ckptfsm.core.layout import (
    EPOCHS,
    FETCHING,
    GONE,
    JOURNAL,
    PINS,
    STAGING,
    TAKING,
    TRACKER,
    TRASH,
    is_deletable,
)
from ckptfsm.core.ports import Storage
from ckptfsm.disk.durable import TEMPORARY, is_temporary, list_names, lookup, make_dir

_DEPTH = 64
_SLICE = 1000  # entries


def remove_some(storage: Storage, limit: int, check: Callable[[], None] | None = None) -> int:
    """Delete up to ``limit`` entries of the trash, deepest first. Returns how many were deleted.

    A name without the mark of a given-up directory is passed over: a late rename may have taken it
    there. An entry that cannot be deleted is passed over, too; its error is raised once nothing
    else is left.

    ``check`` raises if a successor took the root over. The call comes between the look and the
    first deletion. A successor's prunes come to the trash after its epoch, so the look has not seen
    them (I9).
    """
    removed = 0
    stuck: OSError | None = None
    names = [name for name in list_names(storage, TRASH) if is_deletable(name)]
    if check is not None:
        check()
    for name in names:
        if removed >= limit:
            break
        try:
            removed += _remove(storage, f"{TRASH}/{name}", limit - removed, _DEPTH)
        except OSError as error:  # one that is stuck must not keep the others
            stuck = stuck or error
    if stuck is not None and not removed:
        raise stuck
    return removed


def require_rename(storage: Storage, tag: str) -> None:
    """Rename a directory of our own, and remove it.

    Raises ``ConfigError`` if the file system cannot. Its names may be deleted: a kill in between leaves
    an entry of the trash. ``tag`` is unique to the process.
    """
    made = f"{TRASH}/{GONE}trial{TEMPORARY}{tag}"
    moved = f"{made}.moved"
    make_dir(storage, made)
    try:
        with required("rename of directories", storage.root):
            storage.rename(made, moved)
    except ConfigError:
        storage.rmdir(made)
        raise
    except FileNotFoundError:
        # Else a repeated request: NFS answers the first one twice.
        if lookup(storage, moved) is None:
            raise
    with contextlib.suppress(FileNotFoundError):  # the same
        storage.rmdir(moved)


def _remove(storage: Storage, path: str, limit: int, depth: int) -> int:
    found = lookup(storage, path)
    if found is None or depth == 0:
        return 0
    if found.kind != "dir":
        storage.unlink(path)
        return 1
    removed = 0
    for name in storage.listdir(path):
        if removed >= limit:
            return removed
        removed += _remove(storage, f"{path}/{name}", limit - removed, depth - 1)
    if removed < limit and not storage.listdir(path):
        storage.rmdir(path)
        removed += 1
    return removed


def sweep_temporaries(
    storage: Storage, directories: Sequence[str] = ("", PINS, EPOCHS, JOURNAL)
) -> int:
    """Delete temporary files that an error or a crash left beside tracker, pins, epochs, segments.

    Those of readers' leases are left: a reader may be writing one now, and they expire as leases do.
    """
    swept = 0
    for directory in directories:
        for name in list_names(storage, directory):
            temporary = TEMPORARY in name if directory else name.startswith(TRACKER + TEMPORARY)
            ours = temporary or (directory == EPOCHS and name.startswith(TAKING))
            path = f"{directory}/{name}" if directory else name
            if ours and storage.stat(path).kind == "file":
                storage.unlink(path)
                swept += 1
    return swept


def sweep_attempt(storage: Storage, directory: str, names: Iterable[str]) -> None:
    """Delete the temporary files ``names`` that a crash in a ``put`` left inside an attempt.

    Raises ``ValueError`` for the name of any other file.
    """
    for name in names:
        if not is_temporary(name):
            raise ValueError(f"{name} is no temporary file")
        storage.unlink(f"{directory}/{name}")


def remove_staged(storage: Storage, path: str) -> None:
    """Delete a file of an attempt whose writer is dead, if it exists: another writer begins again.

    Raises ``ValueError`` unless the file lies below staging: elsewhere a later attempt has files of
    the same name.
    """
    if not path.startswith(f"{STAGING}/"):
        raise ValueError(f"{path} is not in a staging directory")
    if lookup(storage, path) is not None:
        storage.unlink(path)


def remove_fetched(storage: Storage, path: str) -> None:
    """Delete a directory of a fetch that is given up. The caller owns the root."""
    if not path.startswith(f"{FETCHING}/"):
        raise ValueError(f"{path} is not in the directory of fetches")
    while _remove(storage, path, _SLICE, _DEPTH):
        """Slice by slice."""


def remove_empty(storage: Storage, path: str) -> None:
    """Remove a directory with nothing but directories in it, if it exists; ``OSError`` otherwise."""
    if lookup(storage, path) is None:
        return
    for name in storage.listdir(path):
        remove_empty(storage, f"{path}/{name}")
    storage.rmdir(path)


def remove_marker(storage: Storage, path: str) -> bool:
    """Delete a pin, a lease, a request, an old epoch or segment durably. False if there is none."""
    if lookup(storage, path) is None:
        return False
    try:
        storage.unlink(path)
    except FileNotFoundError:  # another process was first
        return False
    storage.fsync_dir(path.rpartition("/")[0])
    return True
