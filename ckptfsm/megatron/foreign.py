"""Ready-made AsyncRequests of megatron-core (and of anything with the same field names).

A request is used by its field names only, since fields were added over versions. Its writer runs in
our supervised child with a private results channel in place of the shared queue, so requests in
flight together cannot swap results; its payload is put into the queue it came from immediately before
its own finalizers run, which is once, on the training thread of every rank.

Rules: exit code, payload and receipt are all required. An exception as payload is a failure. A write
worker that dies leaves megatron-core's writer waiting for ever (it never counts down), so the writer
watches its own children and ends when one of them did not end well, also where ``multiprocessing``
reaps it: it does when the next worker starts.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import popen_fork
from pathlib import Path
from typing import Any

import torch
import xxhash

from ckptfsm.documents import FileEntry
from ckptfsm.durable import fsync_existing, list_names
from ckptfsm.errors import ConfigError, SaveFailed
from ckptfsm.files import make_inside
from ckptfsm.layout import join
from ckptfsm.megatron.compat import cpu_devices
from ckptfsm.megatron.fence import stay_out_once_it_is_anothers
from ckptfsm.messages import PartSpec
from ckptfsm.ports import Storage, Written
from ckptfsm.processes import children_of, let_children_die_too
from ckptfsm.stock import COMMON
from ckptfsm.storage import DIGEST_PREFIX

_WATCH_S = 0.1
_PIECE_BYTES = 1 << 20
_WORKER_DIED = 78
_poll = popen_fork.Popen.poll


@dataclass(frozen=True)
class ForeignRequest:
    """A part that is an AsyncRequest.

    ``build`` is called on every rank once the save is accepted, with the absolute directory to write
    into (collective: it may hold megatron-core's own collectives), and returns the request. Where
    the trainer fixed the path, pass a ready ``request`` made for ``<root>/iter_<step>`` instead: the
    checkpoint is then written in place. ``directory`` is the part's, inside the step's.
    """

    build: Callable[[str], Any] | None = None
    request: Any = None
    directory: str = ""

    def __post_init__(self) -> None:
        if (self.build is None) == (self.request is None):
            raise ConfigError("a foreign part needs either build or request")


def ready_part(request: Any, directory: str = "") -> Any:
    """The part that a ready request is; of a function that makes one, a function too."""
    if callable(request):
        return partial(_made, request, directory)
    return ForeignRequest(request=request, directory=directory)


def _made(make: Callable[[], Any], directory: str) -> ForeignRequest:
    return ForeignRequest(request=make(), directory=directory)


class PrivateChannel:
    """Stands for the results queue inside one writer."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def put(self, item: Any) -> None:
        self.items.append(item)


@dataclass(slots=True)
class StagedRequest:
    """One rank's side of a request whose tensors are in host memory.

    ``queue`` is the one its finalizers will read; None if it has none.
    """

    name: str
    function: Callable[..., None] | None
    arguments: list[Any]
    keywords: dict[str, Any]
    finalizers: list[Callable[[], None]]
    queue: Any

    def run(self) -> Any:
        """In the child: run the request's own writer. What it put into its queue, if it has one."""
        assert self.function is not None
        channel = PrivateChannel()
        arguments = self.arguments
        if self.queue is not None:
            arguments = [channel if a is self.queue else a for a in arguments]
        with _watched_workers(), cpu_devices():
            self.function(*arguments, **self.keywords)
        return self._judge(channel.items) if self.queue is not None else None

    def _judge(self, items: Sequence[Any]) -> Any:
        if len(items) != 1:
            raise SaveFailed(f"the writer of {self.name} put {len(items)} results, not one")
        payload = items[0]
        if isinstance(payload, BaseException):
            raise SaveFailed(f"the writer of {self.name} failed: {payload!r}") from payload
        buckets = self.arguments[1] if len(self.arguments) > 1 else ()
        if not isinstance(payload, dict) or len(payload) != len(buckets):
            raise SaveFailed(f"the writer of {self.name} has results for {payload!r:.80} only")
        return payload

    def finalize(self, payload: Any) -> None:
        """Give the request its own payload and run its finalizers. Once (I6).

        What they leave of it in the queue, the next request must not find.
        """
        if self.queue is not None and self.function is not None:
            self.queue.put(payload)
        try:
            with cpu_devices():
                for finalizer in self.finalizers:
                    finalizer()
        finally:
            while self.queue is not None and not self.queue.empty():
                self.queue.get_nowait()

    def let_go(self) -> None:
        """The child owns the data now."""
        self.arguments = []


@dataclass(frozen=True, slots=True)
class ForeignPart:
    """One rank's side of a part that is a foreign request. See ``ports.PartJob``.

    ``made`` is the digest of what the maker of a ready request wrote itself, "" if that is nothing.
    """

    name: str
    directory: str
    rank: int
    request: StagedRequest
    made: str = ""

    def write(self, storage: Storage, location: str) -> Written:
        """Run the request's own writer, then fsync and digest what it wrote."""
        payload: Any = None
        if self.request.function is not None:
            stay_out_once_it_is_anothers(storage, location)
            payload = self.request.run()
            if self.request.queue is None:
                raise SaveFailed(f"the request of {self.name} has no queue: nobody knows its files")
        names = _files_of(payload)
        if self.rank == 0:
            if COMMON not in list_names(storage, join(location, self.directory)):
                raise SaveFailed(
                    f"there is no {COMMON} in {join(location, self.directory)}: make the request of "
                    f"{self.name!r} anew, for that directory"
                )
            names.add(COMMON)
        files = []
        for name in sorted(names):
            path = join(location, self.directory, name)
            fsync_existing(storage, path)
            relative = join(self.directory, name)
            size, digest = storage.stat(path).size, storage.digest(path)
            if name == COMMON and self.made not in ("", digest):
                raise SaveFailed(
                    f"{path} was changed after the request of {self.name!r} was taken: another one was "
                    "made for the same directory"
                )
            files.append(FileEntry(name=relative, bytes=size, digest=digest))
        return Written(tuple(files), (), payload)


def stage_foreign(spec: PartSpec, foreign: ForeignRequest, rank: int, location: str) -> ForeignPart:
    """Make (or take) the request and stage its tensors to host memory."""
    request, made = foreign.request, ""
    if foreign.build is not None:
        with cpu_devices():
            request = foreign.build(make_inside(location, spec.directory))
    elif rank == 0:
        made = _digest_of(Path(location, spec.directory, COMMON))
    return ForeignPart(spec.name, spec.directory, rank, stage_request(spec.name, request), made)


def _digest_of(path: Path) -> str:
    """The digest of a file of some 100 KB; "" if it is not there, which the writer says."""
    hasher = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                hasher.update(piece)
    except FileNotFoundError:
        return ""
    return DIGEST_PREFIX + hasher.hexdigest()


def stage_request(name: str, request: Any) -> StagedRequest:
    """Stage the tensors of an AsyncRequest to host memory, as megatron-core's own callers do."""
    arguments = list(request.async_fn_args or ())
    preload = getattr(request, "preload_fn", None)
    with cpu_devices():
        if preload is not None:
            arguments[1] = preload()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # copies that do not wait, also those made before this call
    queue = next((a for a in arguments if hasattr(a, "put") and hasattr(a, "get")), None)
    return StagedRequest(
        name,
        request.async_fn,
        arguments,
        dict(getattr(request, "async_fn_kwargs", None) or {}),
        list(request.finalize_fns),
        queue,
    )


def _files_of(payload: Any) -> set[str]:
    """The files that the write results name."""
    if not isinstance(payload, dict):
        return set()
    results: Sequence[Any] = [r for rows in payload.values() for r in rows]
    return {str(result.storage_data.relative_path) for result in results}


@contextmanager
def _watched_workers() -> Iterator[None]:
    """In the block this writer ends as soon as one of its workers ended badly: nobody else would notice.

    After it come other parts, which judge their own workers.
    """
    let_children_die_too()
    over = threading.Event()
    threading.Thread(target=_watch_workers, args=(over,), daemon=True).start()
    popen_fork.Popen.poll = _judging_poll  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        popen_fork.Popen.poll = _poll  # type: ignore[method-assign]
        over.set()


def _judging_poll(worker: popen_fork.Popen, flag: int = os.WNOHANG) -> int | None:
    """``multiprocessing`` has reaped it: the watch will not find it any more."""
    code = _poll(worker, flag)
    if code:
        os._exit(_WORKER_DIED)
    return code


def _watch_workers(over: threading.Event) -> None:
    while not over.wait(_WATCH_S):
        if any(_ended_badly(pid) for pid in children_of(os.getpid())):
            os._exit(_WORKER_DIED)


def _ended_badly(pid: int) -> bool:
    """Look without reaping: that is megatron-core's business."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False  # reaped meanwhile
    return found is not None and (found.si_code != os.CLD_EXITED or found.si_status != 0)
