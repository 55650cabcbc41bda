"""Requests of nvidia-resiliency-ext in the queue. Needs that package: ``make test-integrations``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jobs import Here, Told
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint
from queue_jobs import make_directory, queue_of, until_empty
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ckptfsm.integrations.queue import install
from ckptfsm.megatron.compat import cpu_devices


def request_of(directory: str, value: float) -> Any:
    """As the package's own example makes one (collective)."""
    state = {"w": torch.full((64, 64), value), "step": int(value)}
    writer = FileSystemWriterAsync(directory)
    with cpu_devices():
        planned = save_state_dict_async_plan(
            state, writer, None, 0, planner=DefaultSavePlanner(), enable_cache=False
        )
    # Its result is (writer, metadata, wrapper), and in some versions more.
    function, preload, arguments = writer.get_save_function_and_args()
    finalizers = [lambda: save_state_dict_async_finalize(*planned)]
    return AsyncRequest(function, arguments, finalizers, {}, preload)


def save_two(here: Here, place: str) -> Told:
    """Two requests in flight together, and a plain ``torch.save`` through the package's own class."""
    here.join()
    queue = queue_of()
    for name in ("1", "2"):
        directory = make_directory(here, f"{place}/{name}")
        queue.schedule_async_request(request_of(directory, float(name)))
    seen = until_empty(queue, blocking=False)
    loaded = []
    for name in ("1", "2"):
        state = {"w": torch.zeros(64, 64), "step": 0}
        dcp.load(state, checkpoint_id=f"{place}/{name}")
        loaded.append([float(state["w"].min()), float(state["w"].max()), state["step"]])
    saver = TorchAsyncCheckpoint(persistent_queue=False)
    with cpu_devices(), install(queue_of(), saver, "_async_calls_queue"):
        saver.async_save({"w": torch.full((4,), 3.0)}, f"{place}/plain{here.rank}.pt")
        saver.finalize_async_save(blocking=True)
    dist.barrier()
    plain = torch.load(Path(place) / f"plain{here.rank}.pt")
    return {"seen": seen, "loaded": loaded, "plain": plain["w"].tolist()}
