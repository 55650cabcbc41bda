"""A file of a checkpoint that is written, counted, digested and made durable in one pass."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ckptfsm.core.documents import FileEntry
from ckptfsm.core.ports import Storage
from ckptfsm.disk.durable import write_all

_OVERLAP_BYTES = 1 << 20  # below this a thread costs more than the digest


class ShardFile:
    """A new file of a checkpoint, as ``torch.save`` wants one: ``write``, ``tell``, ``flush``."""

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage = storage
        self.path = path
        self._position = 0
        self._handle = storage.open_exclusive(path)

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        write_all(self._storage, self._handle, view)
        self._position += len(view)
        return len(view)

    def tell(self) -> int:
        return self._position

    def flush(self) -> None:
        """Nothing is buffered here."""

    def close_durably(self, name: str) -> FileEntry:
        """Fsync, digest, close. The digest costs no time while the disk is busy with the fsync."""
        digest = None
        with ThreadPoolExecutor(1, "ckptfsm-digest") as beside:
            try:
                if self._position >= _OVERLAP_BYTES:
                    digest = beside.submit(self._storage.digest, self.path)
                self._storage.fsync(self._handle)
            finally:
                self._storage.close(self._handle)
        found = self._storage.digest(self.path) if digest is None else digest.result()
        return FileEntry(name=name, bytes=self._position, digest=found)
