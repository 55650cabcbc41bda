"""The hook that moves a trainer's state while a save is drafted, staged and forked. No torch.

A fork alone would hand an optimizer in host memory to the writer. The trainer's next update in
place would then copy it page by page. A trainer with an accelerator loads the optimizer there
before the state is made: staging then makes a single copy, for the writer alone. After the fork it
is offloaded into fresh memory.

Rules:

- ``load`` is called on every rank at the same point, before the state is made. Then the ranks agree
  whether all of them loaded. If not, no rank makes its state, which may hold collectives, and the
  save is refused on every rank.
- ``offload`` is called on every rank after its ``load``, at every end of the save. A failure is
  agreed too, and raised on every rank; the writer goes on with its copy. In a group of workers it
  fails the attempt instead.
- Without a hook there is no exchange.
"""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TYPE_CHECKING

from ckptfsm.adapters.notices import say
from ckptfsm.core.errors import OffloadFailed, describe
from ckptfsm.core.ports import OffloadHook, Transport

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("ckptfsm")


class OffloadTurn:
    """The calls of the hook around one save, on one rank: a context that loads and offloads.

    ``loaded``: every rank could load. ``load_error`` and ``problem`` are this rank's reasons why it
    could not load or offload.
    """

    def __init__(self, staging: OffloadHook | None, transport: Transport, step: int) -> None:
        self.problem = ""
        self._staging = staging
        self._transport = transport
        self._step = step
        self.load_error = ""
        self.loaded = True

    def __enter__(self) -> Self:
        if self._staging is None:
            return self
        try:
            self.load_error = self._call("load", self._staging)
            self.loaded = not self._transport.any_flags([bool(self.load_error)])[0]
        except BaseException:  # a Ctrl-C, a lost rank: loaded state must be offloaded
            self.problem = self._call("offload", self._staging)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._staging is not None:
            self.problem = self._call("offload", self._staging)

    def agree(self) -> None:
        """Raise on every rank if one could not offload (collective); called after the context."""
        transport = self._transport
        if self._staging is None or not transport.any_flags([bool(self.problem)])[0]:
            return
        problems = transport.gather(self.problem) or []
        failed = [(rank, text) for rank, text in enumerate(problems) if text]
        rank, text = transport.broadcast(failed[0] if failed else None)
        raise OffloadFailed(f"rank {rank}: {text}", step=self._step, rank=rank)

    def _call(self, name: str, staging: OffloadHook) -> str:
        """Call one side of the hook. Returns its error in words, "" if it succeeded."""
        try:
            (staging.load if name == "load" else staging.offload)()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # also torch's; carried to the next exchange
            said = f"step {self._step}: OffloadHook.{name} failed"
            say(log.exception, "staging_failed", said, step=self._step, call=name)
            return f"{name}: {describe(error)}"
        return ""
