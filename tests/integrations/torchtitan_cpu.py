"""Lets the real trainer of torchtitan run where there is no CUDA. Import it before torchtitan.

Replaced are the name and the module of the device, and the two seconds that rank 0 sleeps at the end.
The attention is causal and no ``flex_attention``, which has no gradient on a CPU. FSDP adds gradients
without a factor, which gloo has not. Training, saving and loading stay as they are.
"""

from __future__ import annotations

import time
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch._utils
import torch.nn.functional as F
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

_DEVICE = ModuleType("a CPU as a device")
_DEVICE.__dict__.update(
    set_device=lambda device: None,
    device_count=lambda: 1,
    current_device=lambda: 0,
    get_device_name=lambda device=None: "cpu",
    get_device_properties=lambda device=None: SimpleNamespace(total_memory=1 << 30),
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    memory_stats=lambda device=None: {},
    synchronize=lambda device=None: None,
)
_stock_module = torch._utils._get_device_module
_stock_factors = _fsdp_collectives._get_gradient_divide_factors


def _module_of(kind: str) -> Any:
    return _DEVICE if kind == "cpu" else _stock_module(kind)


def _factors(*arguments: Any, **keywords: Any) -> Any:
    return _stock_factors(*arguments[:5], **{**keywords, "force_sum_reduction_for_comms": True})


def _causal(q: Any, k: Any, v: Any, *, scale: Any, enable_gqa: bool, **_: Any) -> tuple[Any, None]:
    found = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
    )
    return found, None


torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = _module_of
_fsdp_collectives._get_gradient_divide_factors = _factors

from torchtitan import trainer  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402

FlexAttention._compiled_flex_attn = staticmethod(_causal)
trainer.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)
