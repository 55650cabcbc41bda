"""The two substitutes that Megatron-core needs in this library: a device and a process group.

Each lasts for one foreign call. In both, a warning of megatron-core or torch is never raised, even
under ``-W error``: it would fail a save or a restore.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ckptfsm.adapters.notices import no_warning_is_an_error


@contextlib.contextmanager
def cpu_devices() -> Iterator[None]:
    """Let megatron-core run where there is no CUDA.

    It calls ``torch.cuda.synchronize()`` and ``current_device()`` all the same (0.16.1:
    ``filesystem_async.preload_tensors``, ``state_dict_saver.save_state_dict_async_finalize``).
    """
    cuda: Any = torch.cuda
    synchronize, current_device = cuda.synchronize, cuda.current_device
    try:
        if not cuda.is_available():
            cuda.synchronize = lambda device=None: None
            cuda.current_device = partial(torch.device, "cpu")
        with no_warning_is_an_error():
            yield
    finally:
        cuda.synchronize, cuda.current_device = synchronize, current_device


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """Make sure there is a default process group: planning and loading ask for a rank.

    A lone process gets a group of one for the duration of the call, from an in-memory store.
    """
    with no_warning_is_an_error():
        if dist.is_initialized():
            yield
            return
        store = torch._C._distributed_c10d.HashStore()
        hook = sys.excepthook
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            sys.excepthook = hook  # torch adds a hook at each call, for the rank's number
            yield
        finally:
            dist.destroy_process_group()
