"""Lets the real ``megatron.training`` run where there is no CUDA. Everything replaced stands here.

- Tensors: a request for the device "cuda" gets the CPU, ``Tensor.cuda`` returns the tensor itself,
  and ``Tensor.type`` says "torch.cuda.FloatTensor" (the optimizers sort parameters by that name).
- ``torch.cuda``: one device (of a new kind), no streams, nothing to wait for, no cache; its random
  state is the CPU's.
- ``initialize_megatron`` inside ``pretrain`` is told ``allow_no_cuda=True``, which is one of its
  arguments.
- Neither the fused CUDA kernels nor the C++ index builder of datasets are compiled.

The replacements last as long as a ``with``. Saving, loading, training and arguments stay as they
are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.datasets import utils as datasets
from megatron.training import initialize, training
from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    """Every tensor of the device "cuda" is made on the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        asks_its_type = function is torch.Tensor.type and isinstance(result, str)
        return result.replace("torch.", "torch.cuda.") if asks_its_type else result


def _nothing(*arguments: Any, **keywords: Any) -> None:
    """Replaces a function that only a GPU needs."""


def _random_state(device: object = None) -> torch.Tensor:
    return torch.get_rng_state()


def _stream(*arguments: Any, **keywords: Any) -> Any:
    return SimpleNamespace(wait_stream=_nothing)


_CUDA = {
    "device_count": lambda: 1,
    "current_device": lambda: torch.device("cpu"),
    "get_device_properties": lambda device: SimpleNamespace(major=10),
    "set_device": _nothing,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "get_rng_state": _random_state,
    "Stream": _stream,
    "current_stream": _stream,
    "default_stream": _stream,
    "stream": contextlib.nullcontext,
}


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    on_cpu = partial(training.initialize_megatron, allow_no_cuda=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.multiple("torch.cuda", **_CUDA))
        stack.enter_context(patch("torch.cuda.random.get_rng_state", _random_state))
        stack.enter_context(patch.object(training, "initialize_megatron", on_cpu))
        if hasattr(initialize, "fused_kernels"):  # up to 0.17
            stack.enter_context(patch.object(initialize.fused_kernels, "load", _nothing))
        stack.enter_context(patch.object(datasets, "compile_helpers", _nothing))
        stack.enter_context(_OnCpu())
        yield
