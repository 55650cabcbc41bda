"""The programs of the ranks of the test jobs. Each function below ``Here`` is one job, run by every
rank.

Rules: arguments and results are JSON; ranks stay in lockstep by counting steps, never by looking at
a clock; the steps of a test in between happen at a gate. Nothing is replaced by a stand-in: faults
come from signals, limits, a full disk, or a storage that returns an errno.
"""

from __future__ import annotations

import atexit
import base64
import fnmatch
import inspect
import json
import multiprocessing
import os
import pickle
import resource
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")

import psutil  # noqa: E402  megatron-core warns while it is imported
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject  # noqa: E402
from megatron.core.dist_checkpointing.strategies.torch import (  # noqa: E402
    TorchDistSaveShardedStrategy,
)
from torch.distributed.checkpoint import FileSystemReader  # noqa: E402

from ckptfsm import (  # noqa: E402
    CheckpointManager,
    FileTree,
    ForeignRequest,
    GroupWorker,
    PerRank,
    SaveHandle,
    Ticket,
    TransitionRecord,
)
from ckptfsm.adapters.posix_storage import PosixStorage  # noqa: E402
from ckptfsm.core.errors import (  # noqa: E402
    CkptFsmError,
    RanksDisagreeWarning,
    ReshardWarning,
)
from ckptfsm.core.events import Failed, ShardReported  # noqa: E402
from ckptfsm.core.images import Memory  # noqa: E402
from ckptfsm.core.parts import Planned  # noqa: E402
from ckptfsm.core.ports import Storage  # noqa: E402
from ckptfsm.dcp.driver import StateDriver  # noqa: E402
from ckptfsm.dcp.state_format import DriverOptions  # noqa: E402
from ckptfsm.demo.model import ModelSpec, Trainer, initialize_parallel  # noqa: E402
from ckptfsm.megatron.compat import cpu_devices  # noqa: E402
from ckptfsm.testing.faults import FaultStorage  # noqa: E402
from ckptfsm.writers.write_job import WriteJob  # noqa: E402

torch.set_num_threads(1)

# From megatron-core 0.17 on a request says who makes it: megatron-core itself, or nvidia-resiliency-ext.
STRATEGIES = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters
NVRX = STRATEGIES and find_spec("nvidia_resiliency_ext") is not None
MAKER = (
    "nvidia_resiliency_ext.checkpointing.async_ckpt"
    if NVRX
    else "megatron.core.dist_checkpointing.strategies"
)
filesystem_async = import_module(f"{MAKER}.filesystem_async")

ROWS = 64  # of a rank's tensors; a row is 512 bytes
PACE_S = 0.002  # how long a "training step" takes
MANY_STEPS = 15_000  # at least 30 s of them: enough for anything but a hang
TIMES = {  # none of them may hide a hang behind a default of half an hour
    "effect_timeout_s": 20.0,
    "exchange_timeout_s": 40.0,
    "busy_timeout_s": 30.0,
    "close_timeout_s": 30.0,
    "writer_timeout_s": 30.0,
    "exit_timeout_s": 5.0,
}
Told = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Here:
    """This rank. ``grouped``: the job uses torch.distributed."""

    rank: int
    world_size: int
    grouped: bool

    def join(self) -> None:
        if self.grouped and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=60))
            dist.barrier()  # a rank that leaves at once would fail one that is still connecting

    def join_with_queue(self) -> None:
        """Also make the queue that megatron-core shares among its requests, in a forked process.

        Megatron-core spawns that process, which imports torch anew when it is given its first
        result: seconds on every rank. The queue is the same otherwise. The process is forked before
        a rank has sockets.
        """
        if filesystem_async._results_queue is None and not dist.is_initialized():
            manager = multiprocessing.get_context("fork").Manager()
            filesystem_async._results_queue = manager.Queue()
        self.join()


def leave() -> None:
    """The last calls of an interpreter, before ``os._exit`` ends a forked one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for child in multiprocessing.active_children():
        child.terminate()
    atexit._run_exitfuncs()


# ------------------------------------------------------------------------------- gates and faults


def meet(gate: str, what: str = "", rank: int = -1) -> None:
    """Report at a gate and wait until the test opens it (see ``cluster.Gate``)."""
    line = {"pid": os.getpid(), "ppid": os.getppid(), "what": what, "rank": rank}
    with open(f"{gate}.reached", "wb", buffering=0) as reached:
        reached.write(json.dumps({**line, "at": time.monotonic()}).encode() + b"\n")
    with open(f"{gate}.go", "rb", buffering=0) as go:
        go.read(1)


@dataclass
class Faults:
    """A hook of ``FaultStorage``: it acts before a call with a matching method and path.

    A fault is ``{"rank", "method", "path" (a pattern), "gate" or "errno"}``.
    """

    faults: Sequence[Mapping[str, Any]]
    rank: int

    def __call__(self, index: int, method: str, path: str) -> None:
        for fault in self.faults:
            here = fault.get("rank", self.rank) == self.rank and fault["method"] == method
            if not here or not fnmatch.fnmatchcase(path, fault["path"]):
                continue
            if "gate" in fault:
                meet(fault["gate"], path, self.rank)
            else:
                raise OSError(fault["errno"], os.strerror(fault["errno"]), path)


@contextmanager
def managed(
    here: Here, root: str, faults: Sequence[Mapping[str, Any]] = (), **settings: Any
) -> Iterator[CheckpointManager]:
    """A manager that leaves as a trainer's does: ``with``."""
    here.join()

    def open_storage(create: bool) -> Storage:
        storage = PosixStorage(root, create=create)
        return FaultStorage(storage, before=Faults(faults, here.rank)) if faults else storage

    with CheckpointManager(root, open_storage=open_storage, **{**TIMES, **settings}) as manager:
        if manager.config.engine == "gated":
            manager.expect_gate()
        yield manager


# ------------------------------------------------------------------------------------ small things


def state_of(step: int, here: Here, rows: int = ROWS) -> dict[str, Any]:
    """A sharded state whose every bit depends on step and rank. ``step=0`` with zeros: to load."""
    random = torch.Generator().manual_seed(step * 1000 + here.rank)
    place = (0, here.rank, here.world_size)
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.randn(rows, 64, generator=random), place),
        "m": ShardedTensor.from_rank_offsets("m", torch.randn(rows, 64, generator=random), place),
        "rng": ShardedObject(
            "rng", {"seed": step, "rank": here.rank}, (here.world_size,), (here.rank,)
        ),
        "step": step,
        "schedule": torch.full((3,), float(step)),
    }


def template_of(here: Here, rows: int = ROWS) -> dict[str, Any]:
    place = (0, here.rank, here.world_size)
    return {
        "w": ShardedTensor.from_rank_offsets("w", torch.zeros(rows, 64), place),
        "m": ShardedTensor.from_rank_offsets("m", torch.zeros(rows, 64), place),
        "rng": ShardedObject("rng", None, (here.world_size,), (here.rank,)),
    }


def is_state_of(loaded: Mapping[str, Any], step: int, here: Here, rows: int = ROWS) -> bool:
    """Bit for bit what ``state_of`` made."""
    wanted = state_of(step, here, rows)
    return (
        torch.equal(loaded["w"], wanted["w"].data)
        and torch.equal(loaded["m"], wanted["m"].data)
        and loaded["rng"] == wanted["rng"].data
        and loaded["step"] == step
        and torch.equal(loaded["schedule"], wanted["schedule"])
    )


def told(error: BaseException | None) -> Told | None:
    """An error as a test looks at it."""
    if error is None:
        return None
    facts = getattr(error, "facts", {})
    return {
        "type": type(error).__name__,
        "text": str(error),
        "facts": {k: v for k, v in facts.items() if isinstance(v, (str, int, float))},
        "at": time.monotonic(),
    }


def tell(work: Callable[[], Any]) -> Told | None:
    """Run ``work``; the library's error it raised, or None."""
    try:
        work()
    except CkptFsmError as error:
        return told(error)
    return None


def train_until_done(manager: CheckpointManager, handle: SaveHandle) -> Told | None:
    """Go on training until the save is tracked (None) or ``poll`` raised what it failed with."""
    for _ in range(MANY_STEPS):
        error = tell(manager.poll)
        if error is not None or handle.done:
            return error
        time.sleep(PACE_S)
    raise AssertionError(f"the save of step {handle.step} neither ended nor failed")


def save(manager: CheckpointManager, here: Here, step: int, rows: int = ROWS) -> Told | None:
    """Save and train on until it is settled; what went wrong, or None."""
    try:
        handle = manager.save(step, state_of(step, here, rows))
    except CkptFsmError as error:
        return told(error)
    return train_until_done(manager, handle)


def children(own: Callable[[int], bool] = lambda pid: False) -> list[int]:
    """The living processes below this rank. A process that was just killed gets two seconds to be
    gone.

    ``own(pid)``: True for those that are to stay, and are not waited for.
    """
    deadline = time.monotonic() + 2.0
    while True:
        below = psutil.Process().children(recursive=True)
        alive = [p.pid for p in below if is_running(p) and not own(p.pid)]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(PACE_S)


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def recovery_of(manager: CheckpointManager) -> Told:
    report = manager.recovery
    assert report is not None
    return {
        "latest": report.latest_step,
        "decisions": [[d.subject, d.last, d.result, d.why] for d in report.decisions],
        "warnings": list(report.warnings),
        "epoch": report.epoch,
    }


# ------------------------------------------------------------------------------- the ordinary jobs


def save_steps(
    here: Here, root: str, steps: Sequence[int], rows: int = ROWS, **settings: Any
) -> Told:
    """A job that saves these steps and ends."""
    seen: list[list[Any]] = []

    def hook(record: TransitionRecord) -> None:
        seen.append([record.step, record.source.value, record.dest.value])

    with managed(here, root, hooks=[hook], **settings) as manager:
        restored = manager.restore(template_of(here, rows))
        errors = [save(manager, here, step, rows) for step in steps]
        manager.wait_until_finished()
        return {
            "restored": restored.step if restored else None,
            "recovery": recovery_of(manager),
            "errors": errors,
            "all": manager.all_steps(),
            "latest": manager.latest_step(),
            "seen": seen,
            "children": children(),
            "stock_queue": filesystem_async._results_queue is not None,
        }


def restore(
    here: Here, root: str, step: int | None = None, rows: int = ROWS, then: int = 0, **settings: Any
) -> Told:
    """A job that restores, and then saves step ``then`` if there is one."""
    outcome: Told = {"step": None, "equal": None, "error": None, "save": None}
    try:
        with managed(here, root, **settings) as manager:
            outcome["recovery"] = recovery_of(manager)
            restored = manager.restore(template_of(here, rows), step=step)
            if restored is not None:
                outcome["step"] = restored.step
                outcome["equal"] = is_state_of(restored.state, restored.step, here, rows)
            if then:
                outcome["save"] = save(manager, here, then, rows)
            manager.wait_until_finished()
            outcome["all"] = manager.all_steps()
    except CkptFsmError as error:
        outcome["error"] = told(error)
    return outcome


def restore_what_rank_1_misnames(here: Here, root: str) -> Told:
    """Rank 1 wants a key that is not there; what both ranks hear, and a good restore after it."""
    with managed(here, root) as manager:
        first = save(manager, here, 1)
        wanted = template_of(here)
        if here.rank == 1:
            place = (0, here.rank, here.world_size)
            wanted["w"] = ShardedTensor.from_rank_offsets("v", torch.zeros(ROWS, 64), place)
        error = tell(partial(manager.restore, wanted))
        restored = manager.restore(template_of(here))
        assert restored is not None
        return {"save": first, "error": error, "equal": is_state_of(restored.state, 1, here)}


def stock_load(here: Here, directory: str, step: int, rows: int = ROWS) -> bool:
    """Megatron-core's loader on one checkpoint directory; True if bit-equal."""
    here.join()
    with cpu_devices():
        loaded = dist_checkpointing.load(template_of(here, rows), directory)
    return is_state_of(loaded, step, here, rows)


# ------------------------------------------------------------------------------------ failed saves


def fail_and_go_on(
    here: Here,
    root: str,
    faults: Sequence[Mapping[str, Any]],
    big_rows: int = ROWS,
    empty: bool = False,
    **settings: Any,
) -> Told:
    """Step 1 is saved, step 2 (maybe a big one) meets the faults, training goes on, step 3 is saved.

    ``empty``: train on until the trash is empty, and tell how much space is free then.
    """
    with managed(here, root, faults, **settings) as manager:
        first = save(manager, here, 1)
        failed = save(manager, here, 2, big_rows)
        left = children()
        latest = manager.latest_step()
        manager.wait_until_finished()
        after = {"staging": os.listdir(f"{root}/.ckptfsm/staging"), "steps": manager.all_steps()}
        third = save(manager, here, 3)
        if empty:
            empty_the_trash(manager, root)
        disk = os.statvfs(root)
        return {
            "first": first,
            "failed": failed,
            "children": left,
            "latest": latest,
            "after": after,
            "third": third,
            "all": manager.all_steps(),
            "trash": os.listdir(f"{root}/.ckptfsm/trash"),
            "free": disk.f_bavail * disk.f_frsize,
        }


def empty_the_trash(manager: CheckpointManager, root: str) -> None:
    """Train on until what was thrown away is deleted (rank 0 does it between steps)."""
    manager.wait_until_finished()
    for _ in range(MANY_STEPS):
        if manager.rank != 0 or not os.listdir(f"{root}/.ckptfsm/trash"):
            return
        manager.poll()
        time.sleep(PACE_S)


def save_and_stay(
    here: Here,
    root: str,
    tracked: Sequence[int],
    then: int,
    faults: Sequence[Mapping[str, Any]],
    **settings: Any,
) -> Told:
    """Save ``tracked``, then train on with the save of ``then`` in flight until something ends it."""
    outcome: Told = {}
    try:
        with managed(here, root, faults, **settings) as manager:
            errors = [save(manager, here, step) for step in tracked]
            assert errors == [None] * len(errors), errors
            outcome["error"] = save(manager, here, then)
            outcome["all"] = manager.all_steps()
    except CkptFsmError as error:
        outcome["error"] = told(error)
    return outcome


def outgrow_a_limit(here: Here, root: str, limit: int, big_rows: int) -> Told:
    """As ``fail_and_go_on``, with RLIMIT_FSIZE (in bytes) on rank 1."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    if here.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    return fail_and_go_on(here, root, [], big_rows)


# --------------------------------------------------------------------------- one rank fails in save


class Unreadable:
    """Something in a state dict that cannot be copied or pickled."""

    def __deepcopy__(self, memo: object) -> Unreadable:
        raise RuntimeError("this value cannot be copied")

    def __reduce__(self) -> tuple[Any, ...]:
        raise RuntimeError("this value cannot be pickled")


def fail_in_save(here: Here, root: str, fault: str, rank: int = 1) -> Told:
    """Rank ``rank`` fails inside ``save(2)`` in a special way; the others are in good health."""
    with managed(here, root) as manager:
        first = save(manager, here, 1)
        mine = here.rank == rank
        step, state = 2, state_of(2, here)
        if mine and fault == "no state":
            state = "not a state dict"
        elif mine and fault == "overlap":
            other = (0, 1 - here.rank, here.world_size)  # claims the place of the other rank
            state["w"] = ShardedTensor.from_rank_offsets("w", torch.zeros(ROWS, 64), other)
        elif mine and fault == "object":
            state["rng"] = ShardedObject("rng", Unreadable(), (here.world_size,), (here.rank,))
        elif mine and fault == "step":
            step = 7
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken: list[int] = []
        if mine and fault == "descriptors":
            used = max(int(name) for name in os.listdir("/proc/self/fd"))
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, limit[1]))
            taken = fill_descriptors()
        raised = polled = None
        try:
            handle = manager.save(step, state)
        except CkptFsmError as error:
            raised = told(error)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limit)
            for fd in taken:
                os.close(fd)
        if raised is None:
            polled = train_until_done(manager, handle)
        latest = manager.latest_step()
        third = save(manager, here, 3)
        return {
            "first": first,
            "raised": raised,
            "polled": polled,
            "latest": latest,
            "third": third,
            "all": manager.all_steps(),
            "children": children(),
        }


def fill_descriptors() -> list[int]:
    """Take every descriptor that the limit leaves."""
    taken = []
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return taken


# --------------------------------------------------------------------------------- leaving a job


def leave_in_flight(
    here: Here,
    root: str,
    faults: Sequence[Mapping[str, Any]],
    leaving: str,
    raising: Sequence[int] = (),
    **settings: Any,
) -> Told:
    """Leave with the save of step 2 in flight: the ranks in ``raising`` by an exception.

    A rank that does not raise beside one that does goes on training.
    """
    outcome: Told = {"first": None, "error": None, "raised": False}
    began = 0.0
    try:
        with managed(here, root, faults, **settings) as manager:
            outcome["first"] = save(manager, here, 1)
            handle = manager.save(2, state_of(2, here))
            if here.rank == 0:
                meet(leaving)
            dist.barrier()
            began = time.monotonic()
            if here.rank in raising:
                raise ZeroDivisionError("the loss is not a number")
            if raising:
                outcome["polled"] = train_until_done(manager, handle)
    except CkptFsmError as error:
        outcome["error"] = told(error)
    except ZeroDivisionError:
        outcome["raised"] = True
    outcome["seconds"] = time.monotonic() - began
    return outcome


def train_until_preempted(here: Here, root: str, gate: str) -> Told:
    """A trainer's loop; rank 1 stands at a gate in step 5, where the test sends a signal."""
    saved = None
    with managed(here, root, preemption_signals=("SIGTERM",), exchange_every=1) as manager:
        for step in range(1, MANY_STEPS):
            if step == 5 and here.rank == 1:
                meet(gate)
            if manager.should_save(step):
                manager.save(step, state_of(step, here))
                saved = step
            manager.poll()
            if manager.preempted and saved is not None:
                break
            time.sleep(PACE_S)
        preempted = manager.preempted
    return {"saved": saved, "preempted": preempted, "stopped_at": step}


def train_until_the_end(here: Here, root: str) -> Told:
    """A trainer's loop; rank 1 alone learns in step 5 that its node is taken away."""
    step = 0

    def end() -> float | None:
        return time.time() if here.rank == 1 and step >= 5 else None

    with managed(here, root, end_of_allocation=end, exchange_every=1) as manager:
        for step in range(1, MANY_STEPS):
            if manager.should_save(step):
                manager.save(step, state_of(step, here))
                if manager.preempted:
                    break
            manager.poll()
    return {"stopped_at": step}


# ------------------------------------------------------------------------------------- ownership


def hold(here: Here, root: str, gate: str) -> Told:
    """Save step 1, keep the root until the gate opens, then save step 2."""
    outcome: Told = {"left": None}
    try:
        with managed(here, root) as manager:
            outcome["first"] = save(manager, here, 1)
            if here.rank == 0:
                meet(gate, socket.gethostname())
            dist.barrier()
            outcome["second"] = save(manager, here, 2)
            outcome["all"] = manager.all_steps()
    except CkptFsmError as error:
        outcome["left"] = told(error)
    return outcome


# ---------------------------------------------------------------------------------- stale reports

T = TypeVar("T")


# ------------------------------------------------------------------------------ foreign requests

BIG_ROWS, SMALL_ROWS = 512, 16


def request_for(directory: str, state: dict[str, Any], strategy: Any = None) -> Any:
    """Megatron-core's AsyncRequest (collective), with two write workers by default."""
    how: dict[str, Any] = {"async_strategy": "nvrx" if NVRX else "mcore"} if STRATEGIES else {}
    strategy = strategy or TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=2)
    with cpu_devices():
        return dist_checkpointing.save(state, directory, strategy, async_sharded_save=True, **how)


@dataclass
class Gated:
    """An ``async_fn`` that stands at a gate before it begins, or whose worker ``worker`` does.

    Workers are processes or threads. The first of those writes on the writer's thread.
    """

    inner: Callable[..., None]
    gate: str
    worker: int | None = None
    forked: int = 0

    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        if self.worker is None:
            meet(self.gate, "writer")
        elif workers_are_threads():
            self._hold(filesystem_async.FileSystemWriterAsync)
        else:
            os.register_at_fork(after_in_parent=self._count, after_in_child=self._stand)
        self.inner(*arguments, **keywords)

    def _hold(self, writer: Any) -> None:
        write = writer.write_preloaded_data

        def held(*arguments: Any, **keywords: Any) -> Any:
            index = int(threading.current_thread() is not threading.main_thread())
            if index == self.worker:
                meet(self.gate, "thread")
            return write(*arguments, **keywords)

        writer.write_preloaded_data = staticmethod(held)

    def _count(self) -> None:
        self.forked += 1

    def _stand(self) -> None:
        if self.forked == self.worker:
            meet(self.gate, "worker")


def workers_are_threads() -> bool:
    return hasattr(filesystem_async.FileSystemWriterAsync, "write_preloaded_data_multithread")


@dataclass
class Build:
    """The request of a foreign part, and its fault."""

    here: Here
    step: int
    rows: int
    gate: str = ""
    worker: int | None = None
    finalizers: tuple[Callable[[], None], ...] = ()

    def __call__(self, directory: str) -> Any:
        request = request_for(directory, state_of(self.step, self.here, self.rows))
        for finalizer in self.finalizers:
            request.add_finalize_fn(finalizer)
        if self.gate:
            request = request._replace(async_fn=Gated(request.async_fn, self.gate, self.worker))
        return request


def save_foreign(
    here: Here,
    root: str,
    gate: str = "",
    worker: int | None = None,
    raising: Sequence[Any] = (),
    **settings: Any,
) -> Told:
    """Step 1 is good; step 2 has a gate in the writer of rank 1, or a finalizer that raises, where
    ``raising`` is (rank, part); step 3 is good. Each has a big and a small foreign part,
    in nested directories."""
    ran: list[str] = []

    def parts(step: int, bad: bool) -> dict[str, ForeignRequest]:
        def finalizer(part: str) -> None:
            ran.append(f"{step} {part}")
            if bad and list(raising) == [here.rank, part]:
                raise ValueError("this finalizer does not work")

        def build(part: str, of: int, rows: int, gate: str = "") -> ForeignRequest:
            last = partial(finalizer, part)
            made = Build(here, of, rows, gate, worker, (last,))
            return ForeignRequest(build=made, directory=f"role/{part}")

        mine = gate if bad and here.rank == 1 else ""
        return {
            "model": build("model", step, BIG_ROWS, mine),
            "optimizer": build("optimizer", step + 100, SMALL_ROWS),
        }

    errors = []
    here.join_with_queue()
    with managed(here, root, **settings) as manager:
        for step in (1, 2, 3):
            bad = step == 2 and bool(gate or raising)
            try:
                handle = manager.save(step, parts=parts(step, bad))
                errors.append(train_until_done(manager, handle))
            except CkptFsmError as error:
                errors.append(told(error))
        return {"errors": errors, "all": manager.all_steps(), "ran": ran}


def _leave_beside(here: Here, directory: str) -> None:
    """Newer trainers' finalizers leave hashes of all files, and the files of the tokenizer."""
    if here.rank == 0:
        Path(directory, "integrity.json").write_text("{}")
        Path(directory, "tokenizer").mkdir()
        Path(directory, "tokenizer", "vocab.json").write_text("{}")


def save_ready_made(here: Here, root: str, gate: str = "", gated: int = 1) -> Told:
    """The trainer fixed the path: requests made for ``<root>/iter_<step>``, written in place.

    The writer of step 5 on the rank ``gated`` stands at ``gate``.
    """
    errors = []
    here.join_with_queue()
    with managed(here, root) as manager:
        for step in (4, 5, 6):
            directory = f"{root}/iter_{step:07d}"
            if here.rank == 0:
                os.mkdir(directory)
            dist.barrier()
            at = gate if step == 5 and here.rank == gated else ""
            beside = partial(_leave_beside, here, directory)
            build = Build(here, step, ROWS, at, finalizers=(beside,))
            part = ForeignRequest(request=build(directory))
            try:
                handle = manager.save(step, parts={"state": part})
                errors.append(train_until_done(manager, handle))
            except CkptFsmError as error:
                errors.append(told(error))
        return {"errors": errors, "all": manager.all_steps()}


def save_with_stock_queue(here: Here, big: str, small: str, gate: str, ended: str) -> None:
    """The contrast: two requests in flight in megatron-core's queue; the small one ends first."""
    here.join()
    for directory in (big, small):
        if here.rank == 0:
            os.mkdir(directory)
    dist.barrier()
    core = import_module(f"{MAKER}.core" if NVRX else f"{MAKER}.async_utils")
    calls = core.AsyncCallsQueue(persistent=False)
    with cpu_devices():
        calls.schedule_async_request(Build(here, 1, BIG_ROWS, gate)(big))
        calls.schedule_async_request(Build(here, 101, SMALL_ROWS)(small))
        process = calls.async_calls[1].async_caller.process
        if process is not None:
            process.join(30)
        dist.barrier()
        if here.rank == 0:
            meet(ended)
        calls.maybe_finalize_async_calls(blocking=True)
        calls.close()


def look_into(here: Here, directory: str, step: int, rows: int) -> Told:
    """The files that ``.metadata`` refers to, and whether the stock loader gives back the saved
    state."""
    here.join()
    stored = FileSystemReader(directory).read_metadata().storage_data
    ends: dict[str, int] = {}
    for info in stored.values():
        end = info.offset + info.length
        ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
    try:
        equal = stock_load(here, directory, step, rows)
    except BaseException as error:  # torch's CheckpointException is one
        return {"ends": ends, "equal": False, "error": repr(error)[:300]}
    return {"ends": ends, "equal": equal, "error": None}


# ---------------------------------------------------------------------------------- a real model

SPEC = ModelSpec(hidden_size=32, layers=1, heads=2, sequence_length=16, batch_size=2)


def train_gpt(here: Here, root: str, tp: int, until: int, save_at: int, **settings: Any) -> Told:
    """Train a GPT from where the root is to step ``until``, saving at ``save_at``."""
    here.join()
    initialize_parallel(tp)
    trainer = Trainer(SPEC, tp, "cpu")
    losses: dict[str, str] = {}
    with managed(here, root, **settings) as manager:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            restored = manager.restore(trainer.sharded_state_dict())
        if restored is not None:
            trainer.load_state_dict(restored.state)
        for step in range(trainer.iteration + 1, until + 1):
            manager.before_update()  # before the whole step: the demo's trainer has one call for it
            losses[str(step)] = trainer.train_step().hex()
            if step == save_at:
                manager.save(step, trainer.sharded_state_dict())
            manager.poll()
        manager.wait_until_finished()
        return {
            "restored": restored.step if restored else None,
            "dropped": list(restored.dropped) if restored else [],
            "warnings": [w.category.__name__ for w in caught],
            "losses": losses,
            "latest": manager.latest_step(),
        }


def train_gpt_in_stock(here: Here, root: str, tp: int, until: int, save_at: int) -> dict[str, str]:
    """Train a GPT from zero without this library; megatron-core alone saves it."""
    here.join()
    initialize_parallel(tp)
    trainer = Trainer(SPEC, tp, "cpu")
    losses: dict[str, str] = {}
    for step in range(1, until + 1):
        losses[str(step)] = trainer.train_step().hex()
        if step == save_at:
            directory = Path(root, f"iter_{step:07d}")
            if here.rank == 0:
                directory.mkdir(parents=True)
            dist.barrier()
            with cpu_devices():
                dist_checkpointing.save(trainer.sharded_state_dict(), str(directory))
            if here.rank == 0:
                Path(root, "latest_checkpointed_iteration.txt").write_text(str(step))
    dist.barrier()
    return losses


# ------------------------------------------------------------------------------- memory of the host


def save_what_changes(here: Here, root: str, kind: str) -> Told:
    """Save a tensor that lies in memory in this way, and change it right behind ``save``."""
    room = torch.randn(2 * ROWS, 1024)
    room = room.share_memory_() if kind == "shared" else room
    tensor = {"part": room[ROWS:], "scattered": room[::2]}.get(kind, room)
    before = tensor.clone()

    def state() -> dict[str, Any]:
        return {"w": ShardedTensor.from_rank_offsets("w", tensor)}

    draft = StateDriver(DriverOptions(0)).draft({"state": state()})
    (job,) = draft.stage(root, draft.specs, {"state": Planned(b"")})
    pieces = [piece for image in job.images for piece in image.pieces]
    staged = [piece.address for piece in pieces if isinstance(piece, Memory)]
    with managed(here, root) as manager:
        handle = manager.save(1, state)
        tensor.zero_()
        handle.wait()
        found = manager.restore(
            {"w": ShardedTensor.from_rank_offsets("w", torch.empty_like(before))}
        )
        assert found is not None
        shards = Path(root).glob("iter_0000001/*.distcp")
        return {
            "equal": torch.equal(found.state["w"], before),
            "copied": staged != [tensor.data_ptr()],
            "excess": sum(p.stat().st_size for p in shards) - before.nbytes,
        }


# ------------------------------------------------------------------------------------ composites


def save_composite(here: Here, root: str) -> Told:
    """Rank 0 has an actor, rank 1 a critic, both a shared part; rank 1 adds files."""
    alone = Here(0, 1, False)
    mine, other = ("actor", "critic") if here.rank == 0 else ("critic", "actor")
    tree = FileTree(partial(_make_tokenizer, here.rank)) if here.rank == 1 else None
    with managed(here, root) as manager:
        parts = {
            "actor": None,
            "critic": None,
            mine: state_of(7 + here.rank, alone),
            "both": state_of(7, here),
            "tokenizer": tree,
        }
        error = tell(manager.save(7, parts={k: parts[k] for k in sorted(parts)}).wait)
        wanted = {mine: template_of(alone), other: None, "both": template_of(here)}
        found = manager.restore(parts={k: wanted[k] for k in sorted(wanted)})
        assert found is not None
        return {
            "error": error,
            "mine": is_state_of(found.parts[mine], 7 + here.rank, alone),
            "both": is_state_of(found.parts["both"], 7, here),
            "parts": sorted(found.parts),
        }


def save_of_each_rank(here: Here, root: str) -> Told:
    """Values, bytes and files that differ by rank, with and without a word about that."""
    with managed(here, root) as manager, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RanksDisagreeWarning)
        tree = FileTree(partial(_gather_and_write, here.rank), every_rank=True)
        parts = {
            "state": {**state_of(7, here), "loader": PerRank({"position": 100 + here.rank})},
            "generator.pt": PerRank(b"of rank %d" % here.rank),
            "export": tree,
        }
        error = tell(manager.save(7, parts=parts).wait)
        wanted = {
            "state": {**template_of(here), "loader": PerRank(None)},
            "generator.pt": PerRank(None),
            "export": tree,
        }
        found = manager.restore(parts=wanted)
        assert found is not None
        alone = FileTree(partial(_gather_and_write, here.rank), every_rank=False)
        stuck = tell(manager.save(8, parts={**parts, "export": alone}).wait)
        state = {**state_of(9, here), "loader": {"position": here.rank}}
        tell(manager.save(9, state).wait)
        manager.poll()  # says what there is to be said
        return {
            "error": error,
            "loader": found.parts["state"]["loader"],
            "generator": found.parts["generator.pt"].decode(),
            "export": Path(found.parts["export"]).relative_to(root).as_posix(),
            "stuck": stuck,
            "warned": [str(each.message) for each in warned],
        }


def restore_on_one_rank(here: Here, root: str, *, drops: bool) -> Told:
    """Restore values of two ranks in a job with one, which may leave them out or not."""
    wanted = {"loader": PerRank(None), "step": None}
    drop = {"reshard_drops": ("loader",)} if drops else {}
    found: list[Any] = []
    with managed(here, root, **drop) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore", ReshardWarning)
        error = tell(lambda: found.append(manager.restore(parts={"state": wanted}, step=7)))
    return {"error": error, "keys": sorted(found[0].parts["state"]) if found else []}


def _gather_and_write(rank: int, directory: str) -> None:
    """A ``make`` with a collective, as the export of a sharded model has."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rank)
    Path(directory, f"of_{rank}.txt").write_text(str(everyone))


def _make_tokenizer(rank: int, directory: str) -> None:
    Path(directory, "vocab.txt").write_text(f"of rank {rank}")


def work_in_a_group(here: Here, root: str, ticket: str, engine: str) -> list[str]:
    """A rank of a group of workers: writes its share. Returns its reports, pickled."""
    here.join()
    worker = GroupWorker(root, engine=engine)
    given: Ticket = pickle.loads(base64.b64decode(ticket))
    state = state_of(given.of.step, here)
    events = worker.write(given, parts={"model/dist_ckpt": state, "extra/dist_ckpt": {"a": 1}})
    polls = 4 * MANY_STEPS  # the writer of the first rank imports torch and megatron-core
    for _ in range(polls):
        if any(isinstance(e, (ShardReported, Failed)) for e in events):
            break
        time.sleep(PACE_S)
        events = worker.poll()  # all that it has to say, from the beginning
    else:  # the controller would wait for half an hour
        raise AssertionError(f"rank {here.rank} has reported no shard in {polls} polls: {events}")
    if engine != "fork":
        assert worker._share.writer is not None
        assert isinstance(worker._share.writer.process, WriteJob), "it was forked"
    worker.close()
    return [base64.b64encode(pickle.dumps(event)).decode() for event in events]
