"""The environment of the exhaustive search: a disk of tokens, and a journal of records.

Rules: a value of the disk is an immutable tree that shares its unchanged parts, so that every
moment of an action can be kept and compared. Calls take effect in the order they are made and at
once: so does SIGKILL leave them. Lost or reordered writes are the matter of the simulation, not of
this search. Before each change a hook is called, which may note the moment, raise, or look.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import ckptfsm.core.documents as documents
import ckptfsm.disk.journal as journal
from ckptfsm.core.errors import Fenced
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.ports import FileStat
from ckptfsm.core.rollback import NO_INTENT, Intent
from ckptfsm.testing.one_by_one import OneByOne

_PUBLISHED = frozenset({State.FINALIZED, State.TRACKED, State.PRUNABLE, State.QUARANTINED})
Hook = Callable[[str, tuple[Any, ...]], None]
"""Called with the name of a call and its arguments, before it changes anything."""


class Dir:
    """An immutable directory: names to directories or bytes. Its hash is computed once.

    ``note`` is for the judge of the directory: a verdict about a value never changes.
    """

    __slots__ = ("_hash", "names", "note")

    def __init__(self, names: dict[str, Dir | bytes]) -> None:
        self.names = names
        self.note: Any = None
        self._hash: int | None = None

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self.names.items()))
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        same = isinstance(other, Dir) and hash(self) == hash(other)
        return same and self.names == other.names  # type: ignore[union-attr]

    def get(self, path: str) -> Dir | bytes | None:
        node: Dir | bytes | None = self
        for name in _pieces(path):
            if not isinstance(node, Dir):
                return None
            node = node.names.get(name)
        return node

    def put(self, path: str, node: Dir | bytes | None) -> Dir:
        """The same tree with ``node`` at ``path``; None removes it."""
        name, _, rest = path.partition("/")
        names = dict(self.names)
        if rest:
            inner = names.get(name)
            if not isinstance(inner, Dir):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            names[name] = inner.put(rest, node)
        elif node is None:
            names.pop(name, None)
        else:
            names[name] = node
        return Dir(names)

    def walk(self, prefix: str = "") -> Iterator[tuple[str, bytes]]:
        """Every file below, by its relative name."""
        for name, node in sorted(self.names.items()):
            if isinstance(node, Dir):
                yield from node.walk(f"{prefix}{name}/")
            else:
                yield prefix + name, node


@lru_cache(maxsize=4096)
def _pieces(path: str) -> tuple[str, ...]:
    return tuple(path.split("/")) if path else ()


EMPTY = Dir({})


def tree(**files: bytes) -> Dir:
    """A directory with these files."""
    return Dir(dict(files))


class Disk(OneByOne):
    """``Storage`` over a tree. ``hook`` is called before every change and every ``fsync``."""

    def __init__(self, value: Dir, hook: Hook) -> None:
        self.root = "/root"
        self.value = value
        self.hook = hook
        self._handles: dict[int, str] = {}
        self._count = 0

    # -- changes -------------------------------------------------------------------------------

    def open_exclusive(self, path: str) -> int:
        if self.value.get(path) is not None:
            raise _error(errno.EEXIST, path)
        self._parent_of(path)
        self.hook("create", (path,))
        self.value = self.value.put(path, b"")
        return self._open(path)

    def open_existing(self, path: str) -> int:
        self._file(path)
        return self._open(path)

    def write(self, handle: int, data: bytes | memoryview) -> int:
        path = self._handles[handle]
        self.value = self.value.put(path, self._file(path) + bytes(data))
        return len(data)

    def rename(self, src: str, dst: str) -> None:
        node = self.value.get(src)
        if node is None:
            raise _error(errno.ENOENT, src)
        self._parent_of(dst)
        there = self.value.get(dst)
        if isinstance(there, Dir) and (there.names or not isinstance(node, Dir)):
            raise _error(errno.ENOTEMPTY, dst)
        self.hook("rename", (src, dst))
        self.value = self.value.put(src, None).put(dst, node)
        self.hook("renamed", (src, dst))  # an error can come after the effect too

    def mkdir(self, path: str) -> None:
        if self.value.get(path) is not None:
            raise _error(errno.EEXIST, path)
        self._parent_of(path)
        self.hook("mkdir", (path,))
        self.value = self.value.put(path, EMPTY)

    def rmdir(self, path: str) -> None:
        if self._dir(path).names:
            raise _error(errno.ENOTEMPTY, path)
        self.hook("rmdir", (path,))
        self.value = self.value.put(path, None)

    def unlink(self, path: str) -> None:
        self._file(path)
        self.hook("unlink", (path,))
        self.value = self.value.put(path, None)

    def fsync(self, handle: int) -> None:
        self.hook("fsync", (self._handles[handle],))

    def fsync_dir(self, path: str) -> None:
        self._dir(path)
        self.hook("fsync", (path,))

    def close(self, handle: int) -> None:
        del self._handles[handle]

    # -- questions -----------------------------------------------------------------------------

    def listdir(self, path: str) -> list[str]:
        return sorted(self._dir(path).names)

    def stat(self, path: str) -> FileStat:
        node = self.value.get(path)
        if node is None:
            raise _error(errno.ENOENT, path)
        return FileStat("dir", 0, 1) if isinstance(node, Dir) else FileStat("file", len(node), 1)

    def read(self, path: str, limit: int, offset: int = 0) -> bytes:
        return self._file(path)[offset : offset + limit]

    def free_bytes(self) -> int:
        return 1 << 40

    def digest(self, path: str) -> str:
        return f"crc32:{zlib.crc32(self._file(path)):08x}"

    def absolute(self, path: str) -> str:
        return f"{self.root}/{path}"

    # -- inside --------------------------------------------------------------------------------

    def _open(self, path: str) -> int:
        self._count += 1
        self._handles[self._count] = path
        return self._count

    def _parent_of(self, path: str) -> None:
        self._dir(path.rpartition("/")[0])

    def _dir(self, path: str) -> Dir:
        node = self.value.get(path)
        if not isinstance(node, Dir):
            raise _error(errno.ENOENT if node is None else errno.ENOTDIR, path)
        return node

    def _file(self, path: str) -> bytes:
        node = self.value.get(path)
        if not isinstance(node, bytes):
            raise _error(errno.ENOENT if node is None else errno.EISDIR, path)
        return node


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


# --------------------------------------------------------------------------------------- journal


class Journaled(NamedTuple):
    """The content of the journal's durable records."""

    checkpoints: tuple[Checkpoint, ...] = ()
    intent: Intent = NO_INTENT
    discarded: frozenset[Any] = frozenset()  # in the newest segment

    def state_of(self, of: Any) -> str:
        return next((c.state.value for c in self.checkpoints if c.id == of), "absent")

    def history(self, epoch: int) -> journal.History:
        """As ``read_history`` would return it."""
        ledger = journal.Ledger(journal.KnownCheckpoints({c.id: c for c in self.checkpoints}))
        lost = journal.lost_without(ledger, self.intent)
        known = self.discarded.union(ledger.checkpoints)
        return journal.History(ledger, 0.0, (), epoch, self.intent, known, lost=lost)


class RecordJournal:
    """Stands where ``JournalWriter`` stands: production replays each appended record at once.

    The result is that of a restart, so an illegal record is seen when it is written.
    """

    def __init__(self, value: Journaled, hook: Hook, then: Callable[[Any], None]) -> None:
        self.file = "journal"
        self.value = value
        self._hook = hook
        self._then = then

    def open(self, opened: documents.SegmentOpened) -> None:
        self._hook("append", (opened,))
        self.value = Journaled(
            tuple(plain(documents.checkpoint_of(record)) for record in opened.checkpoints),
            Intent.carried_by(opened),
        )

    def append(self, record: Any, *, essential: bool = False) -> None:
        self._hook("append", (record, essential))
        checkpoints = self.value.checkpoints
        living = {c.id: journal.Replayed(c) for c in checkpoints}
        intent, discarded = self.value.intent.after(record, living), self.value.discarded
        if isinstance(record, documents.TransitionRecord):
            journal.replay_transition(living, record, self.file, 0)
            discarded = discarded.union({c.id for c in checkpoints} - living.keys())
            checkpoints = tuple(plain(living[of].finish()) for of in sorted(living))
        elif isinstance(record, documents.MetricsRecorded):
            journal.replay_metrics(living, record, self.file, 0)
            checkpoints = tuple(plain(living[of].finish()) for of in sorted(living))
        self.value = Journaled(checkpoints, intent, discarded)
        self._then(record)

    def close(self) -> None:
        """Nothing more will come."""


def plain(checkpoint: Checkpoint) -> Checkpoint:
    """Without the words for people, and once published without who reported: nothing reads them. Why
    one was withdrawn, recovery reads.
    """
    if checkpoint.state in _PUBLISHED and (checkpoint.forked or checkpoint.reported):
        nobody: frozenset[Any] = frozenset()
        checkpoint = replace(checkpoint, forked=nobody, reported=nobody, gone=nobody)
    reason = checkpoint.reason if checkpoint.state is State.QUARANTINED else ""
    if checkpoint.reason != reason or checkpoint.detail:
        return replace(checkpoint, reason=reason, detail="")
    return checkpoint


class EpochLease:
    """Stands where ``RootOwnership`` stands. From its ``fenced_at``-th check on there is a newer
    epoch."""

    def __init__(self, epoch: int, hook: Hook, fenced_at: int = 0) -> None:
        self.epoch = epoch
        self.checks = 0
        self.fenced = False
        self._hook = hook
        self._fenced_at = fenced_at

    @property
    def tag(self) -> str:
        return f"e{self.epoch}"

    def check(self) -> None:
        self.checks += 1
        self._hook("check", ())
        if self._fenced_at and self.checks >= self._fenced_at:
            self.fenced = True
            raise Fenced("a newer epoch took over", epoch=self.epoch, newer_epoch=self.epoch + 1)

    def claim_lock(self) -> None:
        """There is no lock here, only epochs."""

    def keep_young(self) -> None:
        """No purge comes here."""

    def release(self, *, as_found: bool = False) -> None:
        """No code waits for it here, and nobody reads who owned the root before."""


class StillClock:
    """Time stands still: no promise of this search depends on it."""

    def monotonic(self) -> float:
        return 0.0

    def wall(self) -> str:
        return ""

    def unix(self) -> float:
        return 1.5e9

    def sleep(self, seconds: float) -> None:
        raise AssertionError("nothing here may sleep")
