"""Leases for readers outside the job: an evaluator that loads a checkpoint while training goes on.

Order: the lease is made durable first, then the reader looks whether the step is still there. The
pruner looks for leases before and after it moves a directory to the trash. So either the step stays,
or the reader is told that it is gone (F27); nothing is deleted before the second look.

Rules: a lease lives as long as it changes: ``renew`` it at least every ``reader_timeout_s`` of the
job's configuration. Works without torch; needs write access to the root's ``.ckptfsm/leases``.
"""

from __future__ import annotations

import os
import uuid
from types import TracebackType
from typing import Literal

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.documents import Pin, encode
from ckptfsm.core.errors import StepNotFoundError
from ckptfsm.core.layout import LAYOUTS, READERS
from ckptfsm.core.ports import Storage
from ckptfsm.disk.durable import lookup, put
from ckptfsm.disk.trash import remove_marker


class ReaderLease:
    """Keeps one step from being pruned while the ``with`` block runs.

    From nothing else: a rollback, or damage that is found, takes it to quarantine, from where nothing is
    deleted, and the next ``renew`` raises.

    ``layout`` is the job's (see ``CheckpointConfig``). ``path`` is the absolute directory to read;
    ``nonce`` names the lease and is used once; by default it is made of the pid and chance. Raises
    ``StepNotFoundError`` if the step is not there, ``ConfigError`` if the root is not; an ``OSError``
    of the disk, or of a lease that took longer than the timeout to write: then try again.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        step: int,
        *,
        layout: Literal["megatron", "verl"] = "megatron",
        storage: Storage | None = None,
        nonce: str | None = None,
    ) -> None:
        self._owned = storage is None
        self._storage = storage or PosixStorage(root, create=False)
        self._step = step
        self._nonce = nonce or f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._file = f"{READERS}/{step}.{self._nonce}.json"
        self._renewals = 0
        self._name = LAYOUTS[layout].published_name(step)
        self.path = f"{self._storage.root}/{self._name}"

    def __enter__(self) -> ReaderLease:
        try:
            self.renew()
        except BaseException:
            self._let_go()
            raise
        return self

    def renew(self) -> None:
        """Say that the reader still lives.

        Raises ``StepNotFoundError`` if the step is gone, ``StorageError`` if ``path`` leads to another
        root than the one that was opened, where the lease is.
        """
        self._renewals += 1
        mark = Pin(step=self._step, reason="reader", nonce=f"{self._nonce}-{self._renewals}")
        put(self._storage, self._file, encode(mark), tag=self._nonce)
        found = lookup(self._storage, self._name)
        if found is None or found.kind != "dir":
            raise StepNotFoundError(
                f"step {self._step} is not at {self.path}", step=self._step, file=self.path
            )
        self.path = self._storage.absolute(self._name)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._let_go()

    def _let_go(self) -> None:
        try:
            remove_marker(self._storage, self._file)
        finally:
            if self._owned:
                self._storage.close_root()
