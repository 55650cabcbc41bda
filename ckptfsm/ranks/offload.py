"""Where a trainer's state is while a save is drafted, staged and forked: the hook around that. No torch.

An optimizer that is offloaded to host memory would be handed to the writer by the fork alone, and the
trainer's next update in place would copy it page by page. A trainer that has an accelerator loads it
there before the state is made: staging then makes one copy, which only the writer keeps, and what is
offloaded again after the fork is in fresh memory.

Rules:
* ``load`` is called on every rank at the same point, before the state is made; then the ranks agree
  whether all of them loaded. If not, no rank makes its state, which may hold collectives, and the save
  is refused on every rank.
* ``offload`` is called on every rank whose ``load`` was called, however the save ends. That one failed
  is agreed too, and raised on every rank; the writer goes on, because it owns its copy. In a group of
  workers it fails the attempt instead.
* Without a hook there is no exchange.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckptfsm.adapters.notices import say
from ckptfsm.core.errors import OffloadFailed, describe
from ckptfsm.core.ports import Draft, Driver, OffloadHook, Transport
from ckptfsm.ranks.proposal import Proposal, propose

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("ckptfsm")


class OffloadTurn:
    """One rank's turn of the hook, around one save: a context that loads and offloads.

    ``loaded``: every rank could load. ``problem`` is why this rank could not offload.
    """

    def __init__(self, staging: OffloadHook | None, transport: Transport, step: int) -> None:
        self.problem = ""
        self._staging = staging
        self._transport = transport
        self._step = step
        self._load_error = ""
        self.loaded = True

    def __enter__(self) -> Self:
        if self._staging is None:
            return self
        try:
            self._load_error = self._call("load", self._staging)
            self.loaded = not self._transport.any_flags([bool(self._load_error)])[0]
        except BaseException:  # a Ctrl-C, a rank that is gone: what was loaded must not stay there
            self._offload()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._offload()

    def propose(
        self,
        driver: Driver,
        state: tuple[Any, Mapping[str, Any] | None],
        metrics: Mapping[str, float] | None,
    ) -> tuple[Draft | None, Proposal]:
        """This rank's draft; none if a rank could not load."""
        if not self.loaded:
            return None, Proposal(self._step, self._transport.world_size, error=self._load_error)
        return propose(driver, self._transport.world_size, self._step, state, metrics)

    def agree(self) -> None:
        """Behind the context (collective): raise on every rank if one could not offload."""
        transport = self._transport
        if self._staging is None or not transport.any_flags([bool(self.problem)])[0]:
            return
        problems = transport.gather(self.problem) or []
        failed = [(rank, text) for rank, text in enumerate(problems) if text]
        rank, text = transport.broadcast(failed[0] if failed else None)
        raise OffloadFailed(f"rank {rank}: {text}", step=self._step, rank=rank)

    def _offload(self) -> None:
        if self._staging is not None:
            self.problem = self._call("offload", self._staging)

    def _call(self, name: str, staging: OffloadHook) -> str:
        """Call one side of the hook; what it raised, in words."""
        try:
            (staging.load if name == "load" else staging.offload)()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # also torch's; carried to the next exchange
            said = f"step {self._step}: OffloadHook.{name} failed"
            say(log.exception, "staging_failed", said, step=self._step, call=name)
            return f"{name}: {describe(error)}"
        return ""
