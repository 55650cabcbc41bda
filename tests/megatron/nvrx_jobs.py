"""Requests of nvidia-resiliency-ext in the queue. Needs that package: ``make test-integrations``."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import Gated, Here, Told, managed, meet, request_for, state_of, stock_load, tell
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint
from queue_jobs import Trainer, make_directory, queue_of, until_empty
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ckptfsm import ForeignRequest
from ckptfsm.integrations.queue import AsyncCallsQueue as OurQueue
from ckptfsm.integrations.queue import install
from ckptfsm.megatron.compat import cpu_devices


def request_of(directory: str, value: float, **how: Any) -> Any:
    """A request as the package's example makes one (collective). ``how``: settings of its writer."""
    state = {"w": torch.full((64, 64), value), "step": int(value)}
    writer = FileSystemWriterAsync(directory, **how)
    with cpu_devices():
        planned = save_state_dict_async_plan(
            state, writer, None, 0, planner=DefaultSavePlanner(), enable_cache=False
        )
    # Its result is (writer, metadata, wrapper), and in some versions more.
    function, preload, arguments = writer.get_save_function_and_args()
    finalizers = [lambda: save_state_dict_async_finalize(*planned)]
    return AsyncRequest(function, arguments, finalizers, {}, preload)


def save_two(here: Here, place: str) -> Told:
    """Two requests in flight together, and a plain ``torch.save`` through the package's class."""
    here.join()
    queue = queue_of()
    for name in ("1", "2"):
        directory = make_directory(here, f"{place}/{name}")
        queue.schedule_async_request(request_of(directory, float(name)))
    seen = until_empty(queue, blocking=False)
    loaded = [load(f"{place}/{name}") for name in ("1", "2")]
    saver = TorchAsyncCheckpoint(persistent_queue=False)
    with cpu_devices(), install(queue_of(), saver, "_async_calls_queue"):
        saver.async_save({"w": torch.full((4,), 3.0)}, f"{place}/plain{here.rank}.pt")
        saver.finalize_async_save(blocking=True)
    dist.barrier()
    plain = torch.load(Path(place) / f"plain{here.rank}.pt")
    return {"seen": seen, "loaded": loaded, "plain": plain["w"].tolist()}


def load(directory: str) -> list[float]:
    state = {"w": torch.zeros(64, 64), "step": 0}
    dcp.load(state, checkpoint_id=directory)
    return [float(state["w"].min()), float(state["w"].max()), state["step"]]


def staged_in(how: str) -> dict[str, Any]:
    """Settings of the writer; an older one does not know shared memory, and stages as it does."""
    wanted = {"cached": ["use_cached_data_structure"], "shared": ["use_cpu_shm_for_gpu_tensors"]}
    wanted["both"] = wanted["cached"] + wanted["shared"]
    known = inspect.signature(FileSystemWriterAsync.__init__).parameters
    return {name: True for name in wanted.get(how, []) if name in known}


def save_three_staged(
    here: Here, place: str, how: str, persistent: bool, writing: str, scheduled: str
) -> Told:
    """Three requests in flight, where a queue of the package stood, which goes on afterwards. Their
    writers stand at a gate until all are scheduled."""
    here.join_with_queue()
    trainer = Trainer()
    settings = {"cpu_shm_mode": True} if "cpu_shm_mode" in known_to_queue() else {}
    trainer.queue = stock = AsyncCallsQueue(persistent=persistent, **settings)
    writer = staged_in(how)
    request_of(
        make_directory(here, f"{place}/0"), 0.0, **writer
    )  # a worker of the stock queue has it
    with install(queue_of(), trainer, "queue") as queue:
        for value in (1, 2, 3):
            directory = make_directory(here, f"{place}/{value}")
            request = request_of(directory, float(value), **writer)
            gated = request._replace(async_fn=Gated(request.async_fn, writing))
            queue.schedule_async_request(gated)
        meet(scheduled)
        seen = until_empty(queue, blocking=True)
    return {
        "seen": seen,
        "loaded": [load(f"{place}/{value}") for value in (1, 2, 3)],
        "put_back": trainer.queue is stock,
    }


def known_to_queue() -> Any:
    return inspect.signature(AsyncCallsQueue.__init__).parameters


def go_on_after_a_lost_request(here: Here, place: str) -> Told:
    """A request is made, believed to be at a worker, and lost; the next ones."""
    here.join_with_queue()
    writer = staged_in("both")
    queue = queue_of()
    request_of(make_directory(here, f"{place}/0"), 0.0, **writer)
    for value in (1, 2):
        directory = make_directory(here, f"{place}/{value}")
        queue.schedule_async_request(request_of(directory, float(value), **writer))
    return {"seen": until_empty(queue, blocking=True), "loaded": load(f"{place}/2")}


def save_twins(here: Here, root: str, given: str) -> Told:
    """Two steps of two parts of the same structure, which the package stages into the same memory: by a
    manager, or made one after the other and scheduled after ``begin``."""
    here.join_with_queue()
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=2, **shared_staging())

    def build(of: int, directory: str) -> Any:
        return request_for(directory, state_of(of, here), strategy)

    errors = []
    with managed(here, root) as manager:
        queue = OurQueue(manager=manager)
        for step in (1, 2):
            directory = f"{root}/iter_{step:07d}"
            if given == "build":
                parts = {
                    part: ForeignRequest(build=partial(build, of))
                    for part, of in (("actor", step), ("critic", step + 100))
                }
                errors.append(tell(manager.save(step, parts=parts).wait))
                continue
            queue.begin(step, directory, ["actor", "critic"])
            make_directory(here, directory)
            for part, of in (("actor", step), ("critic", step + 100)):
                make = partial(build, of, make_directory(here, f"{directory}/{part}"))
                queue.schedule_async_request(make if given == "functions" else make())
            errors.append(tell(partial(queue.maybe_finalize_async_calls, blocking=True)))
        queue.close()
    equal = [
        stock_load(here, f"{root}/iter_{step:07d}/{part}", of)
        for step in (1, 2)
        for part, of in (("actor", step), ("critic", step + 100))
    ]
    return {"errors": errors, "equal": equal}


def save_ready_together(here: Here, root: str) -> Told:
    """Two ready requests of the same structure, both made before the save; then a save of one."""
    here.join_with_queue()
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=2, **shared_staging())
    told = []
    with managed(here, root) as manager:
        for step, parts in ((1, ["actor", "critic"]), (2, ["actor"])):
            place = make_directory(here, f"{root}/iter_{step:07d}")
            requests = {}
            for number, part in enumerate(parts):
                directory = make_directory(here, f"{place}/{part}")
                request = request_for(directory, state_of(step + 100 * number, here), strategy)
                requests[part] = ForeignRequest(request=request, directory=part)
            told.append(tell(partial(save_and_wait, manager, step, requests)))
    first = told[0] is None and stock_load(here, f"{root}/iter_0000001/actor", 1)
    return {"told": told, "equal": [first, stock_load(here, f"{root}/iter_0000002/actor", 2)]}


def save_and_wait(manager: Any, step: int, parts: Any) -> None:
    manager.save(step, parts=parts).wait()


def shared_staging() -> dict[str, Any]:
    """Settings of the strategy; an older one does not know shared memory."""
    settings = {"cached_metadata": True, "cpu_shm_mode": True}
    known = inspect.signature(TorchDistSaveShardedStrategy.__init__).parameters
    return {name: value for name, value in settings.items() if name in known}
