"""The programs of the ranks of the queue's test jobs. See ``jobs.py``; its rules hold here."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from jobs import (
    MANY_STEPS,
    PACE_S,
    TIMES,
    Gated,
    Here,
    Told,
    children,
    filesystem_async,
    managed,
    meet,
    request_for,
    state_of,
    told,
    train_until_done,
    workers_are_threads,
)
from megatron.core.dist_checkpointing import ShardedTensor

from ckptfsm import ForeignRequest
from ckptfsm.core.errors import CkptFsmError
from ckptfsm.integrations.queue import AsyncCallsQueue, install

ROWS = 16


def queue_of(**settings: Any) -> AsyncCallsQueue:
    return AsyncCallsQueue(**{**TIMES, **settings})


def make_directory(here: Here, path: str) -> str:
    if here.rank == 0:
        os.mkdir(path)
    dist.barrier()
    return path


def until_empty(queue: AsyncCallsQueue, blocking: bool) -> list[Any]:
    """Train on until nothing is in flight: the indices and the errors that came, in order."""
    seen: list[Any] = []
    for _ in range(MANY_STEPS):
        if not queue.get_num_unfinalized_calls():
            return seen
        try:
            seen += queue.maybe_finalize_async_calls(blocking=blocking)
        except CkptFsmError as error:
            seen.append({**(told(error) or {}), "cause": repr(error.__cause__)})
        time.sleep(PACE_S)
    raise AssertionError("calls that neither end nor fail")


def save_three(
    here: Here,
    place: str,
    gate: str = "",
    worker: int | None = None,
    fault: str = "",
    blocking: bool = False,
    spawned: bool = False,
    **settings: Any,
) -> Told:
    """Three requests in flight together; the second has a gate in the writer of rank 1, or a fault
    there: ``preload``, ``write``, ``payload``, ``worker``, ``dying worker``.

    ``finalizer`` (before megatron-core's, which hold collectives): one that raises, on both ranks.
    ``spawned``: megatron-core makes its shared queue.
    """
    if spawned:
        here.join()
    else:
        here.join_with_queue()
    queue = queue_of(**settings)
    ran: list[int] = []
    requests = []
    for step, rows in ((1, 512), (2, ROWS), (3, 64)):
        directory = make_directory(here, f"{place}/{step}")
        request = request_for(directory, state_of(step, here, rows))
        request.add_finalize_fn(partial(ran.append, step))
        requests.append(request)
    if fault == "finalizer" or (here.rank == 1 and (gate or fault)):
        requests[1] = spoil(requests[1], gate, worker, fault)
    indices = [queue.schedule_async_request(request) for request in requests]
    assert queue.get_num_unfinalized_calls() == 3
    seen = until_empty(queue, blocking)
    left = children_but_the_stock_manager()
    queue.close()
    return {"indices": indices, "seen": seen, "ran": ran, "children": left}


def spoil(request: Any, gate: str, worker: int | None, fault: str) -> Any:
    if gate:
        return request._replace(async_fn=Gated(request.async_fn, gate, worker))
    if fault in ("worker", "dying worker"):
        error = ValueError("a fault of this test") if fault == "worker" else SystemExit(3)
        return request._replace(async_fn=WorkerFails(request.async_fn, error))
    if fault == "finalizer":
        return request._replace(finalize_fns=[fail, *request.finalize_fns])
    field = {"preload": "preload_fn", "write": "async_fn", "payload": "async_fn"}[fault]
    return request._replace(**{field: put_an_error if fault == "payload" else fail})


@dataclass
class WorkerFails:
    """An ``async_fn`` with a write worker, process or thread, that fails to write."""

    inner: Callable[..., None]
    error: BaseException

    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        writer = self.inner.func if isinstance(self.inner, partial) else self.inner
        module = sys.modules[writer.__module__]
        module._write_item = self._write  # type: ignore[attr-defined]
        self.inner(*arguments, **keywords)

    def _write(self, *_: Any, **__: Any) -> None:
        on_main = threading.current_thread() is threading.main_thread()
        if workers_are_threads() and on_main:
            return
        raise self.error


def fail(*_: Any) -> None:
    raise ValueError("a fault of this test")


def put_an_error(rank: int, buckets: Any, queue: Any) -> None:
    """Act as megatron-core's writer with an error: exit code 0."""
    queue.put(ValueError("a fault of this test"))


def children_but_the_stock_manager() -> list[int]:
    return children(is_to_stay)


def is_to_stay(pid: int) -> bool:
    """Megatron-core keeps a process for the queue that all requests share, and Python one more."""
    shared = filesystem_async._results_queue
    manager = shared._manager._process.ident if shared is not None else None
    return pid == manager or "resource_tracker" in commandline(pid)


def commandline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "resource_tracker"  # ended meanwhile


def load_all(here: Here, place: str, steps: Sequence[Sequence[int]]) -> list[bool]:
    """Stock megatron-core loads these (step, rows), bit for bit."""
    from jobs import stock_load

    return [stock_load(here, f"{place}/{step}", step, rows) for step, rows in steps]


def save_where_one_rank_has_nothing(here: Here, place: str) -> Told:
    """Rank 1 holds replicas only: its ``async_fn`` is None."""
    here.join_with_queue()
    queue = queue_of()
    directory = make_directory(here, f"{place}/1")
    data = torch.full((8, 4), 5.0)
    whole = ShardedTensor.from_rank_offsets("w", data, replica_id=here.rank)
    request = request_for(directory, {"w": whole, "step": 1})
    queue.schedule_async_request(request)
    seen = until_empty(queue, blocking=True)
    return {
        "writes": request.async_fn is not None,
        "seen": seen,
        "names": sorted(os.listdir(directory)),
    }


def finish_alone(here: Here, place: str) -> Told:
    """``no_dist``: rank 0 finalizes what is done there while rank 1 has not been asked at all."""
    here.join_with_queue()
    queue = queue_of()
    directory = make_directory(here, f"{place}/1")
    request = request_for(directory, state_of(1, here, ROWS))._replace(finalize_fns=[])
    queue.schedule_async_request(request)
    seen: list[int] = []
    if here.rank == 0:
        for _ in range(MANY_STEPS):
            seen += queue.maybe_finalize_async_calls(no_dist=True)
            if seen:
                break
            time.sleep(PACE_S)
    dist.barrier()
    if here.rank == 1:
        seen += queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
    return {"seen": seen}


def abort(here: Here, place: str, gate: str) -> Told:
    """A writer stands at a gate; ``close(abort=True)``, then the queue is used again."""
    here.join_with_queue()
    queue = queue_of()
    first = request_for(make_directory(here, f"{place}/1"), state_of(1, here, ROWS))
    queue.schedule_async_request(first._replace(async_fn=Gated(first.async_fn, gate)))
    queue.close(abort=True)
    left = children_but_the_stock_manager()
    dist.barrier()
    second = request_for(make_directory(here, f"{place}/2"), state_of(2, here, ROWS))
    queue.schedule_async_request(second)
    return {"children": left, "seen": until_empty(queue, blocking=True)}


def retry(here: Here, place: str, gate: str, polled: str) -> Told:
    """A call is written when the run fails; the next run's first call has a gate in its writers."""
    here.join_with_queue()
    queue = queue_of()
    ran: list[int] = []
    first = request_for(make_directory(here, f"{place}/1"), state_of(1, here, ROWS))
    first.add_finalize_fn(partial(ran.append, 1))
    queue.schedule_async_request(first)
    while children_but_the_stock_manager():  # the test's patience ends
        time.sleep(PACE_S)
    queue.close(abort=True)
    dist.barrier()
    second = request_for(make_directory(here, f"{place}/2"), state_of(2, here, ROWS))
    second.add_finalize_fn(partial(ran.append, 2))
    queue.schedule_async_request(second._replace(async_fn=Gated(second.async_fn, gate)))
    early: list[int] = []
    for _ in range(10):
        early += queue.maybe_finalize_async_calls()
    early += ran
    meet(polled)
    seen = until_empty(queue, blocking=True)
    queue.close()
    return {"early": early, "seen": seen, "ran": ran}


def schedule_and_stay(here: Here, place: str, gate: str, stay: str) -> None:
    here.join_with_queue()
    queue = queue_of()
    request = request_for(make_directory(here, f"{place}/1"), state_of(1, here, ROWS))
    queue.schedule_async_request(request._replace(async_fn=Gated(request.async_fn, gate)))
    meet(stay)


def save_where_stock_stood(here: Here, place: str) -> Told:
    """A queue where ``install`` looks by default, and one that a trainer holds elsewhere."""
    here.join_with_queue()
    holder, name = where_stock_stands()
    before = getattr(holder, name)
    with install(queue_of()) as queue:
        inside = getattr(holder, name) is queue
        request = request_for(make_directory(here, f"{place}/1"), state_of(1, here, ROWS))
        getattr(holder, name).schedule_async_request(request)
    trainer = Trainer()
    first = install(queue_of(), trainer, "queue")
    request = request_for(make_directory(here, f"{place}/2"), state_of(2, here, ROWS))
    trainer.queue.schedule_async_request(request)
    said = [refused(first.uninstall), refused(partial(install, queue_of(), trainer, "queue"))]
    seen = trainer.queue.maybe_finalize_async_calls(blocking=True)
    trainer.queue = later = queue_of()
    said.append(refused(first.uninstall))
    left = trainer.queue is later
    trainer.queue = first.queue
    first.uninstall()
    return {
        "inside": inside,
        "restored": getattr(holder, name) is before and trainer.queue is None,
        "refused": said,
        "left": left,
        "seen": seen,
    }


def where_stock_stands() -> tuple[Any, str]:
    """Megatron-LM's module needs more than a rank has here; only the module of that name counts."""
    base = sys.modules.get("megatron.core.dist_checkpointing.strategies.base")
    if hasattr(base, "async_calls"):
        return base, "async_calls"
    trainer = ModuleType("megatron.training.async_utils")
    trainer._async_calls_queue = None  # type: ignore[attr-defined]
    trainer.init_persistent_async_worker = fail  # type: ignore[attr-defined]
    sys.modules[trainer.__name__] = trainer
    return trainer, "_async_calls_queue"


class Trainer:
    queue: Any = None


# -------------------------------------------------------------------------- whole checkpoints


def save_begun(here: Here, root: str, given: bool, gate: str = "") -> Told:
    """Steps 4, 5 and 6 of two parts each, through a manager that the queue opens or is ``given``."""
    here.join_with_queue()
    if given:
        with managed(here, root) as manager:
            return save_begun_steps(here, root, AsyncCallsQueue(manager=manager), gate)
    queue = queue_of()
    outcome = save_begun_steps(here, root, queue, gate)
    queue.close()
    return outcome


def save_begun_steps(here: Here, root: str, queue: AsyncCallsQueue, gate: str) -> Told:
    seen: list[Any] = []
    busy: list[str] = []
    for step in (4, 5, 6):
        directory = f"{root}/iter_{step:07d}"
        queue.begin(step, directory, ["model", "optimizer"])
        make_directory(here, directory)
        for part, of, rows in (("model", step, 512), ("optimizer", step + 100, ROWS)):
            make_directory(here, f"{directory}/{part}")
            request = request_for(f"{directory}/{part}", state_of(of, here, rows))
            if gate and step == 5 and (here.rank, part) == (1, "optimizer"):
                request = request._replace(async_fn=Gated(request.async_fn, gate))
            queue.schedule_async_request(request)
        for early in (step, step - 1):
            busy.append(refused(partial(queue.begin, early, f"{root}/iter_{early:07d}", ["model"])))
        alone = refused(queue.maybe_finalize_async_calls, no_dist=True)
        seen += until_empty(queue, blocking=False)
    again = refused(partial(queue.begin, 4, f"{root}/iter_0000004", ["model"]))
    return {"seen": seen, "again": again, "alone": alone, "busy": busy}


def refused(call: Callable[..., Any], **given: Any) -> str:
    """The message of the error that the call raises; "" if none."""
    try:
        call(**given)
    except CkptFsmError as error:
        return error.message
    return ""


def misuse(here: Here, root: str) -> list[str]:
    """Calls that cannot work."""
    here.join_with_queue()
    queue = queue_of()
    make_directory(here, root)
    calls: list[Callable[[], Any]] = [
        partial(queue.begin, 4, f"{root}/iter_0000005", ["state"]),
        partial(queue.begin, 4, f"{root}/iter_0000004", []),
        partial(queue.begin, 4, f"{root}/iter_0000004", ["a", "b"]),
        partial(queue.begin, 4, f"{root}/iter_0000004", ["a", "b"]),
        queue.close,
        partial(queue_of(on_busy="skip").begin, 4, f"{root}/iter_0000004", ["a"]),
    ]
    found = [refused(call) for call in calls]
    with managed(here, root):  # given back
        return found


# --------------------------------------------------------------------- foreign parts of a manager


def leave_a_payload(here: Here, root: str) -> Told:
    """The finalizers of step 1 end before they took their payload; step 2 is good."""
    errors = []
    here.join_with_queue()
    with managed(here, root) as manager:
        for step, rows in ((1, 512), (2, ROWS)):
            part = ForeignRequest(build=partial(build_one, here, step, rows, bad=step == 1))
            try:
                manager.save(step, parts={"state": part}).wait()
                errors.append(None)
            except CkptFsmError as error:
                errors.append(type(error).__name__)
    return {"errors": errors}


def lose_the_results_queue(here: Here, place: str) -> Told:
    """The process of megatron-core's results queue is killed on rank 1 while a request is written."""
    here.join_with_queue()
    queue = queue_of()
    directory = make_directory(here, f"{place}/1")
    queue.schedule_async_request(request_for(directory, state_of(1, here, ROWS)))
    if here.rank == 1:
        process = filesystem_async._results_queue._manager._process
        process.kill()
        process.join()
    return {"seen": until_empty(queue, blocking=True)}


def find_results_of_another_queue(here: Here, root: str) -> Told:
    """They wait at rank 1 while a manager saves a request; then they are taken, and it saves again."""
    here.join_with_queue()
    seen = []
    with managed(here, root) as manager:
        for step in (1, 2):
            part = ForeignRequest(build=partial(build_one, here, step, ROWS, bad=False))
            handle = manager.save(step, parts={"state": part})
            if here.rank == 1 and step == 1:
                filesystem_async._results_queue.put("of another queue")
            seen.append(train_until_done(manager, handle))
            if here.rank == 1 and step == 1:
                seen.append(filesystem_async._results_queue.get_nowait())
        return {"seen": seen, "steps": manager.all_steps()}


def build_one(here: Here, step: int, rows: int, directory: str, *, bad: bool) -> Any:
    request = request_for(directory, state_of(step, here, rows))
    return request._replace(finalize_fns=[fail, *request.finalize_fns]) if bad else request
