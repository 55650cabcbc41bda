"""A trainer's promise to wait before it changes its state, given to a manager or a group's worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ckptfsm.writers.write_engine import WriteEngine


class Gate(ABC):
    """Base of the classes that have ``before_update``. Without an engine, writers are forked."""

    _engine: WriteEngine | None

    @abstractmethod
    def before_update(self) -> None:
        """Wait until the writer has read the state."""

    def attach(self, optimizer: Any) -> Any:
        """Call ``before_update`` before each step of a torch optimizer (local).

        ``optimizer`` is a ``torch.optim.Optimizer``; of one that wraps others, attach the inner ones.
        Returns torch's handle: its ``remove`` undoes this. See ``expect_gate``.
        """
        self.expect_gate()
        return optimizer.register_step_pre_hook(self._before_step)

    def expect_gate(self) -> None:
        """Promise to call ``before_update`` before each change of the state (local).

        With ``engine="auto"`` or ``"gated"``, the writer then reads the state of later saves while the
        trainer goes on. Without the promise, ``save`` returns once the state was copied or read.
        """
        if self._engine is not None:
            self._engine.expect_gate()

    def _before_step(self, *_: Any) -> None:
        self.before_update()
