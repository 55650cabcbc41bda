"""Lets the real Megatron-Bridge be imported, and its ``pretrain`` run, where there is no CUDA.

- ``transformer_engine`` is a stand-in without anything in it: Bridge names its classes when it is
  imported. megatron-core is imported before, and knows that there is none.
- CUDA: as in ``megatron_lm_cpu.py``. ``initialize_megatron`` is told ``allow_no_cuda=True``, one of its
  arguments; no kernel is compiled, and no process is started for stock's queue, which wants a GPU.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

with contextlib.redirect_stdout(sys.stderr):  # where their log stays: our parent reads the other
    import megatron.training.utils.utils
    import megatron_lm_cpu


class Absent(types.ModuleType):
    """A module in which every name stands for a class, or for a module, without anything in it."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        inside = f"{self.__name__}.{name}"
        made = type(name, (), {}) if name[0].isupper() else Absent(inside)
        setattr(self, name, made)
        return made


def _without_transformer_engine() -> None:
    assert megatron.training.utils.utils, "imported before: it asks for the version"
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        module = Absent(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
    sys.modules["transformer_engine"].pytorch = sys.modules["transformer_engine.pytorch"]


_without_transformer_engine()

with contextlib.redirect_stdout(sys.stderr):
    from megatron.bridge.training import initialize, pretrain, setup  # noqa: F401
    from megatron.bridge.training.state import GlobalState


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    nothing = megatron_lm_cpu._nothing
    on_cpu = partial(setup.initialize_megatron, allow_no_cuda=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.multiple("torch.cuda", **megatron_lm_cpu._CUDA))
        state = megatron_lm_cpu._random_state
        stack.enter_context(patch("torch.cuda.random.get_rng_state", state))
        stack.enter_context(patch.object(setup, "initialize_megatron", on_cpu))
        stack.enter_context(patch.object(setup, "set_jit_fusion_options", nothing))
        stack.enter_context(patch.object(initialize, "force_nccl_backend_init", nothing))
        stack.enter_context(patch.object(initialize, "compile_helpers", nothing))
        stack.enter_context(
            patch.object(GlobalState, "initialize_async_checkpoint_worker", nothing)
        )
        stack.enter_context(megatron_lm_cpu._OnCpu())
        yield
