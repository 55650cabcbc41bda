"""A CPU as verl's accelerator, by verl's platform plugin: ``VERL_PLATFORM=cpu``.

Import this module before anything of verl asks for its platform; verl does so itself with
``VERL_USE_EXTERNAL_MODULES=verl_cpu``. ``VERL_ENGINE_DEVICE=cuda`` lets verl take its engines for
GPUs.
"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(*arguments: Any, **keywords: Any) -> None:
    """Does nothing: a CPU has no such function."""


def _zero(*arguments: Any) -> int:
    return 0


def _no(*arguments: Any) -> bool:
    return False


CPU = SimpleNamespace(
    is_available=_no,
    empty_cache=_nothing,
    synchronize=_nothing,
    set_device=_nothing,
    reset_peak_memory_stats=_nothing,
    ipc_collect=_nothing,
    max_memory_allocated=_zero,
    max_memory_reserved=_zero,
    memory_allocated=_zero,
    memory_reserved=_zero,
    mem_get_info=lambda *arguments: (0, 0),
    device_count=lambda: 1,
    current_device=lambda: "cpu",
    get_device_name=lambda *arguments: "cpu",
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
)


@PlatformRegistry.register(platform="cpu")
class Cpu(PlatformBase):
    """All calls of a platform that verl's SFT trainer makes."""

    device_name = "cpu"
    vendor_name = "none"
    device_module = CPU

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """Does nothing: there is one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Does nothing: nothing runs beside."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None:
        """Does nothing: a CPU has no such allocator."""

    def empty_cache(self) -> None:
        """Does nothing: a CPU has no such cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "NONE_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return contextlib.nullcontext()

    def cudart(self) -> None:
        """Returns None: a CPU has no CUDA runtime."""

    def profiler_start(self) -> None:
        """Does nothing: there is no profiler."""

    profiler_stop = profiler_start

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False
