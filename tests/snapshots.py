"""The files of a root that only its trainer may change, as they are on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple

from ckptfsm.core.layout import PRIVATE, TRACKER


class FileState(NamedTuple):
    """A file as it is found. ``ctime_ns`` moves with whatever is done to it, a link or a touch too."""

    inode: int
    mtime_ns: int
    ctime_ns: int
    size: int
    digest: str


def files_of(root: Path) -> dict[str, FileState]:
    """Every file but the tracker and ours, by its path in ``root``.

    A link counts as itself: a file that was moved away and linked to is another one.
    """
    names = (str(p.relative_to(root)) for p in root.rglob("*") if p.is_symlink() or p.is_file())
    theirs = (n for n in names if n != TRACKER and not n.startswith(f"{PRIVATE}/"))
    return {name: _state_of(root / name) for name in sorted(theirs)}


def _state_of(path: Path) -> FileState:
    found, digest = path.lstat(), hashlib.sha256(path.read_bytes()).hexdigest()
    return FileState(found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size, digest)
