"""Ready-made AsyncRequests of megatron-core, and objects with the same field names.

The writer of a request runs in a supervised child. A fork freezes pageable memory only, and the next
request could be staged into the same shared or pinned memory. So tensors in shared memory are copied
when a request is taken, and pinned ones are kept until the writer has ended.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import popen_fork
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.core
import torch
from torch.utils._pytree import tree_leaves, tree_map

from ckptfsm.adapters.fork import children_of, let_children_die_too
from ckptfsm.adapters.posix_storage import digest_of
from ckptfsm.adapters.segments import is_in_segment
from ckptfsm.adapters.versions import installed
from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import ConfigError, SaveFailed, SaveRefused, describe, one_line
from ckptfsm.core.layout import join
from ckptfsm.core.parts import PartSpec
from ckptfsm.core.ports import PartJob, Storage, Written
from ckptfsm.disk.durable import fsync_existing, list_names
from ckptfsm.disk.stock import COMMON, COMMON_KEY
from ckptfsm.megatron.compat import cpu_devices
from ckptfsm.megatron.fence import stay_out_once_fenced
from ckptfsm.writers.plain_files import make_inside

_WATCH_S = 0.1
_WORKER_DIED = 78
_LOGGED = 3  # lines of a writer's log that its error quotes
_NVRX_WRITER = "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async"
_NVRX_CORE = "nvidia_resiliency_ext.checkpointing.async_ckpt.core"
_poll = popen_fork.Popen.poll


@dataclass(frozen=True)
class ForeignRequest:
    """A part that is an AsyncRequest.

    ``build`` is called on every rank once the save is accepted, with the absolute directory to
    write into, and returns the request. The call is collective: it may hold collectives of
    megatron-core. If the trainer fixed the path, pass a ready ``request`` made for
    ``<root>/iter_<step>`` instead: the checkpoint is then written in place. ``directory`` is
    relative to the step's directory.
    """

    build: Callable[[str], Any] | None = None
    request: Any = None
    directory: str = ""

    def __post_init__(self) -> None:
        if (self.build is None) == (self.request is None):
            raise ConfigError("a foreign part needs either build or request")


def ready_part(request: Any, directory: str = "") -> Any:
    """The part for a ready request, or a function that makes it from one that makes the request."""
    if callable(request):
        return partial(_made, request, directory)
    return ForeignRequest(request=request, directory=directory)


def _made(make: Callable[[], Any], directory: str) -> ForeignRequest:
    """The part for the request that ``make`` returns, with its tensors copied at once.

    The next part's request is made before this one is staged.
    """
    return ForeignRequest(request=taken_now(make_request(make)), directory=directory)


def make_request(make: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function that makes a request. Raises ``ConfigError`` if it misses a package."""
    try:
        return make(*arguments)
    except ImportError as error:
        raise ConfigError(
            f"no request can be made: {describe(error)} ({_installed()}): install what is missing, or "
            'make the request with async_strategy="mcore"'
        ) from error


def _installed() -> str:
    nvrx = installed("nvidia-resiliency-ext")
    return f"megatron-core {megatron.core.__version__}, nvidia-resiliency-ext {nvrx}"


class PrivateChannel(list[Any]):
    """Replaces the results queue inside a writer: requests in flight together cannot swap results."""

    put = list.append


@dataclass(slots=True)
class StagedRequest:
    """A request on one rank, with its tensors in host memory.

    ``queue`` is the queue that the finalizers will read; None if there is none. ``shared``: the
    addresses of the shared memory from which the tensors were copied.
    """

    name: str
    function: Callable[..., None] | None
    arguments: list[Any]
    keywords: dict[str, Any]
    finalizers: list[Callable[[], None]]
    queue: Any
    shared: frozenset[int] = frozenset()

    def run(self) -> Any:
        """In the child: run the writer of the request. Returns the content of its queue, if any."""
        assert self.function is not None
        channel = PrivateChannel()
        arguments = self.arguments
        if self.queue is not None:
            arguments = [channel if a is self.queue else a for a in arguments]
        with _watched_workers(), cpu_devices(), _Logged() as logged:
            try:
                self.function(*arguments, **self.keywords)
            except Exception as error:
                raise SaveFailed(
                    f"the writer of {self.name} failed: {describe(error)}{logged.said()}"
                ) from error
        return self._judge(channel, logged.said()) if self.queue is not None else None

    def _judge(self, items: Sequence[Any], logged: str) -> Any:
        if len(items) != 1:
            raise SaveFailed(f"the writer of {self.name} put {len(items)} results, not one{logged}")
        payload = items[0]
        if isinstance(payload, BaseException):
            raise SaveFailed(f"the writer of {self.name} failed: {payload!r}{logged}") from payload
        buckets = self.arguments[1] if len(self.arguments) > 1 else ()
        if not isinstance(payload, dict) or len(payload) != len(buckets):
            raise SaveFailed(f"the writer of {self.name} has results for {payload!r:.80} only")
        return payload

    def problem(self) -> SaveFailed | None:
        """The error that forbids the finalizers here: results of another queue wait in theirs."""
        try:
            if self.queue is None or self.function is None or self.queue.empty():
                return None
        except Exception as error:  # its process may be gone for this rank alone
            return SaveFailed(
                f"the results queue of {self.name} cannot be read ({describe(error)}): megatron-core's "
                "process for it is gone; start the job anew",
                reason="results_queue",
            )
        return SaveFailed(
            f"two queues are in use at once: results of another one wait where those of {self.name} "
            f"belong, and are left there ({_installed()}): finalize or close that queue before the next "
            "save",
            reason="two_queues",
        )

    def finalize(self, payload: Any) -> None:
        """Put ``payload`` into the queue of the request and run its finalizers. Once (I6).

        Raises ``SaveFailed`` if the queue holds results of another queue, which are left there.
        """
        self.arguments = []
        problem = self.problem()
        if problem is not None:
            raise problem
        if self.queue is not None and self.function is not None:
            self.queue.put(payload)
        try:
            with cpu_devices():
                for finalizer in self.finalizers:
                    finalizer()
        finally:
            # not for the next request
            while self.queue is not None and not self.queue.empty():
                self.queue.get_nowait()

    def let_go(self) -> None:
        """Drop the data, of which the child has a copy; but pinned memory may be shared with it."""
        left = tree_leaves(self.arguments) if torch.cuda.is_initialized() else []
        self.arguments = [each for each in left if _in_host_memory(each) and each.is_pinned()]


@dataclass(frozen=True, slots=True)
class ForeignPart(PartJob):
    """The share of a rank in a part that is a foreign request.

    ``made`` is the digest of the ``common.pt`` that the maker of a ready request wrote, "" if there
    is none.
    """

    name: str
    directory: str
    rank: int
    request: StagedRequest
    made: str = ""

    def write(self, storage: Storage, location: str) -> Written:
        """Run the writer of the request, then fsync and digest its files."""
        payload: Any = None
        if self.request.function is not None:
            stay_out_once_fenced(storage, location)
            if self.rank == 0 and _has_common(self.request.arguments):
                self._refuse_older_common(storage, location)
            payload = self.request.run()
            if self.request.queue is None:
                raise SaveFailed(f"the request of {self.name} has no queue: its files are unknown")
        results = _results_in(payload)
        self._require_all(results)
        ends = _ends_of(results)
        names = set(ends)
        if self.rank == 0 and _has_common(results):
            self._refuse_older_common(storage, location)
        elif self.rank == 0:
            place = join(location, self.directory)
            if COMMON not in list_names(storage, place):
                raise SaveFailed(
                    f"there is no {COMMON} in {place}, and no {COMMON_KEY} in what was written: make "
                    f"the request of {self.name!r} anew, for that directory"
                )
            names.add(COMMON)
        entries = (self._entry(storage, location, n, ends.get(n, 0)) for n in sorted(names))
        return Written(tuple(entries), (), payload)

    def _require_all(self, results: Sequence[Any]) -> None:
        """Raise ``SaveFailed`` if a result is missing: the metadata would lack its item."""
        asked = {index for index in map(_index_of, tree_leaves(self.request.arguments)) if index}
        lost = asked - {result.index for result in results}
        if lost:
            raise SaveFailed(
                f"the writer of {self.name!r} has no result for {len(lost)} of {len(asked)} items, "
                f"{min(index.fqn for index in lost)!r} for one",
                reason="results_lost",
            )

    def _refuse_older_common(self, storage: Storage, location: str) -> None:
        """Refuse a ``common.pt`` beside a common state in a shard: a loader would read that file."""
        place = join(location, self.directory)
        if COMMON in list_names(storage, place):
            raise SaveFailed(
                f"{join(place, COMMON)} is of another save, and megatron-core would load it instead of "
                f"what this one has in its shards ({COMMON_KEY}): remove it, then save again",
                file=join(place, COMMON),
                reason="older_common",
            )

    def _entry(self, storage: Storage, location: str, name: str, written: int) -> FileEntry:
        path = join(location, self.directory, name)
        fsync_existing(storage, path)
        size, digest = storage.stat(path).size, storage.digest(path)
        if size < written:
            raise SaveFailed(
                f"{path} has {size} bytes, and {written} were written to it",
                file=path,
                reason="torn_file",
            )
        if name == COMMON and self.made not in ("", digest):
            raise SaveFailed(
                f"{path} was changed after the request of {self.name!r} was taken: another one was "
                "made for the same directory"
            )
        return FileEntry(name=join(self.directory, name), bytes=size, digest=digest)


def stage_foreign(
    spec: PartSpec, foreign: ForeignRequest, rank: int, location: str, before: Sequence[ForeignPart]
) -> ForeignPart:
    """Make (or take) the request and stage its tensors to host memory.

    ``before``: the save's earlier ones.
    """
    request, made = foreign.request, ""
    if foreign.build is not None:
        with cpu_devices():
            request = make_request(foreign.build, make_inside(location, spec.directory))
    elif rank == 0:
        made = _digest_of(Path(location, spec.directory, COMMON))
    staged = stage_request(spec.name, request)
    if foreign.build is None:
        _refuse_memory_of_another(staged, before)
    return ForeignPart(spec.name, spec.directory, rank, staged, made)


def _refuse_memory_of_another(staged: StagedRequest, before: Sequence[ForeignPart]) -> None:
    """Refuse requests staged into the same memory: both would hold the values of the later one."""
    for other in before:
        if staged.shared & other.request.shared:
            raise SaveRefused(
                f"the requests of {other.name!r} and {staged.name!r} were staged into the same shared "
                "memory, so one has the values of the other: give build functions "
                "(ForeignRequest(build=...)), or schedule each in the queue before the next is made",
                part=staged.name,
            )


def _digest_of(path: Path) -> str:
    """The digest of a file of some 100 KB; "" if it is missing, which the writer reports."""
    try:
        return digest_of(path.read_bytes())
    except FileNotFoundError:
        return ""


def stage_request(name: str, request: Any) -> StagedRequest:
    """Stage the tensors of an AsyncRequest to host memory that a fork freezes."""
    staged = _preloaded(request)
    arguments = list(tree_map(_private, staged))
    queue = next((a for a in arguments if hasattr(a, "put") and hasattr(a, "get")), None)
    keywords = dict(tree_map(_private, dict(getattr(request, "async_fn_kwargs", None) or {})))
    shared = {a.untyped_storage().data_ptr() for a in tree_leaves(staged) if _is_shared(a)} - {0}
    finalizers = list(request.finalize_fns)
    return StagedRequest(
        name, request.async_fn, arguments, keywords, finalizers, queue, frozenset(shared)
    )


def taken_now(request: Any) -> Any:
    """The same request with its tensors copied: the next may be staged into the same memory.

    An error is raised later, where the request is staged with the others of its save.
    """
    try:
        arguments = list(tree_map(_private, _preloaded(request)))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # also torch's
        return SimpleNamespace(async_fn=None, async_fn_args=(), preload_fn=partial(_raise, error))
    return SimpleNamespace(
        async_fn=request.async_fn,
        async_fn_args=arguments,
        async_fn_kwargs=getattr(request, "async_fn_kwargs", None),
        finalize_fns=request.finalize_fns,
    )


def _raise(error: BaseException) -> None:
    raise error


def _preloaded(request: Any) -> list[Any]:
    """The arguments of the request's writer, staged as the callers of megatron-core do."""
    arguments = list(request.async_fn_args or ())
    preload = getattr(request, "preload_fn", None)
    with cpu_devices():
        if preload is not None:
            try:
                arguments[1] = preload()
            except BaseException:
                forget_what_workers_have()
                raise
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # wait for asynchronous copies, also earlier ones
    return arguments


def _private(value: Any) -> Any:
    """A copy of a tensor in shared memory, any other value as it is.

    A change by the trainer would reach an already forked writer through shared memory.
    """
    in_segment = _in_host_memory(value) and is_in_segment(value.data_ptr())
    return value.detach().clone() if in_segment or _is_shared(value) else value


def _is_shared(value: Any) -> bool:
    return _in_host_memory(value) and bool(value.is_shared())


def _in_host_memory(value: Any) -> bool:
    strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return bool(strided and value.device.type == "cpu")


def forget_what_workers_have() -> None:
    """Make nvidia-resiliency-ext put all tensors into its next request.

    It leaves out those that its persistent worker has cached, which our writers do not have.
    """
    writer = getattr(sys.modules.get(_NVRX_WRITER), "FileSystemWriterAsync", None)
    caller = getattr(sys.modules.get(_NVRX_CORE), "PersistentAsyncCaller", None)
    names = ((writer, "cleanup_tensor_caches"), (caller, "cleanup_worker_data_cache"))
    for holder, name in names:
        if hasattr(holder, name):  # older versions have no cache
            getattr(holder, name)()


def _results_in(payload: Any) -> list[Any]:
    lists = payload.values() if isinstance(payload, dict) else ()
    return [result for results in lists for result in results]


def _ends_of(results: Sequence[Any]) -> dict[str, int]:
    """The least size in bytes that each file must have for the results stored in it."""
    ends: dict[str, int] = {}
    for result in results:
        place = result.storage_data
        name = str(place.relative_path)
        end = getattr(place, "offset", 0) + getattr(place, "length", 0)
        ends[name] = max(end, ends.get(name, 0))
    return ends


def _index_of(item: Any) -> Any:
    """The index (key, offset) of a write item or a write result; None for anything else."""
    index = getattr(item, "index", None)
    return index if hasattr(index, "fqn") else None


def objects_in(arguments: Any) -> list[tuple[str, io.BytesIO]]:
    """The pickled objects among the items of a request's writer, by key."""
    pairs = itertools.pairwise(tree_leaves(arguments))
    return [
        (_index_of(item).fqn, value)
        for item, value in pairs
        if isinstance(value, io.BytesIO) and _index_of(item) is not None
    ]


def common_files(arguments: Any) -> list[Path]:
    """The files of the common state that the maker of a request has written, beside its shards."""
    paths = (Path(leaf) for leaf in tree_leaves(arguments) if isinstance(leaf, (str, Path)))
    shards = (path for path in paths if path.suffix == ".distcp" and path.parent.name)
    return [place / COMMON for place in dict.fromkeys(path.parent for path in shards)]


def _has_common(items: Any) -> bool:
    """True if the common state is among these write items or write results."""
    found = map(_index_of, tree_leaves(items))
    return any(index is not None and index.fqn == COMMON_KEY for index in found)


class _Logged(logging.Handler):
    """Collects the error logs of a writer: megatron-core names the cause only there."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._lines: deque[str] = deque(maxlen=_LOGGED)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(one_line(record.getMessage()))

    def said(self) -> str:
        return f"; it logged: {'; '.join(self._lines)}" if self._lines else ""

    def __enter__(self) -> _Logged:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *raised: object) -> None:
        logging.getLogger().removeHandler(self)


@contextmanager
def _watched_workers() -> Iterator[None]:
    """End this writer as soon as a worker in the block fails: megatron-core would wait for ever.

    Workers are processes up to megatron-core 0.16 and threads from 0.17 on.
    """
    let_children_die_too()
    hook, threading.excepthook = threading.excepthook, _end_with_thread
    over = threading.Event()
    threading.Thread(target=_watch_workers, args=(over,), daemon=True).start()
    popen_fork.Popen.poll = _judging_poll  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        popen_fork.Popen.poll = _poll  # type: ignore[method-assign]
        threading.excepthook = hook
        over.set()


def _end_with_thread(raised: threading.ExceptHookArgs) -> None:
    """End the writer: a thread that raised (also ``SystemExit``) never counts down."""
    try:
        text = "".join(traceback.format_exception(raised.exc_value))
        os.write(2, f"a write worker, which is a thread, ended the writer:\n{text}".encode())
    finally:  # even if printing fails
        os._exit(_WORKER_DIED)


def _judging_poll(worker: popen_fork.Popen, flag: int = os.WNOHANG) -> int | None:
    """Judge the exit code of a worker that ``multiprocessing`` reaps before the watch can see it."""
    code = _poll(worker, flag)
    if code:
        os._exit(_WORKER_DIED)
    return code


def _watch_workers(over: threading.Event) -> None:
    while not over.wait(_WATCH_S):
        if any(map(_ended_badly, children_of(os.getpid()))):
            os._exit(_WORKER_DIED)


def _ended_badly(pid: int) -> bool:
    """True if a child ended badly. Does not reap the child: megatron-core does that."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False  # reaped meanwhile
    return found is not None and (found.si_code != os.CLD_EXITED or found.si_status != 0)
