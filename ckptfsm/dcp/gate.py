"""A trainer's promise to wait before it changes its state, given to a manager or a group's worker."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any

import torch

from ckptfsm.adapters.signals import OneCall
from ckptfsm.core.errors import ConfigError
from ckptfsm.dcp.images import Owners
from ckptfsm.dcp.shared_memory import move_to_shared_memory, tensors_of
from ckptfsm.writers.write_engine import WriteEngine


class GatedMemory:
    """The memory that the trainer changes only after ``before_update`` has returned.

    ``everything`` once the trainer said so. Otherwise the memory of the attached optimizers: nothing
    is known of the rest of the state, as of an EMA or the buffers of a BatchNorm.
    """

    def __init__(self) -> None:
        self.everything = False
        self._hooks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._attached = False

    def attach(self, optimizer: torch.optim.Optimizer, hook: Any) -> None:
        self._hooks[optimizer], self._attached = hook, True

    @property
    def promises_all(self) -> bool:
        """True for all memory; without any promise, the engine reads nothing behind ``save``."""
        return self.everything or not self._attached

    def owners(self) -> Owners:
        """The tensors of the optimizers that wait."""
        waiting = (each for each, hook in self._hooks.items() if hook.id in hook.hooks_dict_ref())
        return Owners(tensor for each in waiting for tensor in tensors_of(each))


class Gate(ABC):
    """Base of the classes that have ``before_update``. Without an engine, writers are forked."""

    def _wait_with(self, engine: WriteEngine | None, promise: GatedMemory, calls: OneCall) -> None:
        self._engine, self._promise = engine, promise
        if engine is not None:
            engine.check_signals = calls.check_exit

    @abstractmethod
    def before_update(self) -> None:
        """Wait until the writer has read the state."""

    def attach(self, optimizer: Any) -> Any:
        """Call ``before_update`` before each step of a torch optimizer (local).

        ``optimizer`` is a ``torch.optim.Optimizer``; of one that wraps others, attach the inner ones.
        With ``engine="auto"`` or ``"gated"``, the writer then reads the optimizer's parameters and state
        while the trainer goes on. All other tensors of a save are copied before ``save`` returns, as
        nothing is known of their changes. Returns torch's handle: its ``remove`` undoes this. See
        ``expect_gate``.
        """
        handle = optimizer.register_step_pre_hook(self._before_step)
        self._promise.attach(optimizer, handle)
        if self._engine is not None:
            self._engine.expect_gate()
        return handle

    def expect_gate(self) -> None:
        """Promise to call ``before_update`` before each change of the state (local).

        With ``engine="auto"`` or ``"gated"``, the writer then reads the state of later saves while the
        trainer goes on. Without a promise, ``save`` returns once the state was copied or read.
        """
        self._promise.everything = True
        if self._engine is not None:
            self._engine.expect_gate()

    def share(self, state: Any) -> int:
        """Move an offloaded optimizer's state into memory that the writer process shares (local).

        ``state`` is a ``torch.optim.Optimizer`` with its parameters, or tensors, also in mappings and
        iterables. Each tensor on the CPU keeps its identity and its values; its memory is another.
        Give all tensors that share memory with each other: those left out keep the old memory.
        Call it when the state exists: after the first step, or after ``restore``. Returns the bytes
        that were moved. Tensors that are made later are read the usual way, and so are those that use
        a part of a larger memory.

        The moved storages cannot be resized: torch raises ``RuntimeError``.

        The memory is given back when this object is closed and the tensors are gone. A process that
        the trainer forks shares it: no change of either is hidden from the other.

        Raises ``ConfigError`` if ``state`` is something else, where writers are forked
        (``engine="fork"``, another storage), or after 200 calls; ``OSError`` if the kernel has no such
        memory. Nothing is moved then.
        """
        engine = self._engine
        if engine is None:
            raise ConfigError("share needs a writer process: writers are forked here")
        if not engine.may_add_segment:
            raise ConfigError("share was called too often: give all tensors in one call")
        tensors = tensors_of(state)
        self.before_update()
        segment = move_to_shared_memory(tensors)
        if segment is None:
            return 0
        engine.add_segment(segment)
        return segment.size

    def _before_step(self, *_: Any) -> None:
        self.before_update()
