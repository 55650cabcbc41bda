"""A save before it exists: what each rank proposes, and what all of them must agree on.

Rules: ``propose`` is local and never raises: a rank that cannot prepare a save says so in its
proposal, and the save is refused on every rank. All checks of agreement are here, in one place.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckptfsm.coordinator import SaveRequest
from ckptfsm.errors import ConfigError, SaveRefused, describe, name_ranks
from ckptfsm.messages import PartSpec
from ckptfsm.ports import Draft, Driver

log = logging.getLogger("ckptfsm")
STATE = "state"  # the one part of a checkpoint whose trainer names none


@dataclass(frozen=True, slots=True)
class Proposal:
    """One rank's side of a save, as it is sent to the coordinator."""

    step: int
    world_size: int
    specs: tuple[PartSpec, ...] = ()
    in_place: bool = False
    summary: Any = None
    expected_bytes: int = 0
    metrics: tuple[tuple[str, float], ...] = ()
    error: str = ""


def name_parts(state: Any, parts: Mapping[str, Any] | None) -> dict[str, Any]:
    """The parts of a call: ``state`` alone is the part named ``state``. Raises ``ConfigError``."""
    if (state is None) == (parts is None):
        raise ConfigError("give either a state or named parts")
    return {STATE: state} if parts is None else dict(parts)


def propose(
    driver: Driver,
    world_size: int,
    step: int,
    state: tuple[Any, Mapping[str, Any] | None],
    metrics: Mapping[str, float] | None,
) -> tuple[Draft | None, Proposal]:
    """Plan a save on this rank. ``state`` is the call's (state, parts).

    What goes wrong becomes part of the proposal.
    """
    try:
        named = name_parts(*state)
        measured = tuple(sorted((str(k), float(v)) for k, v in (metrics or {}).items()))
        draft = driver.draft(named)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # also torch's; carried to the exchange, raised on every rank
        log.exception("draft_failed", extra={"step": step})
        return None, Proposal(step, world_size, error=describe(error))
    return draft, Proposal(
        step,
        world_size,
        draft.specs,
        draft.in_place,
        draft.summary,
        draft.expected_bytes,
        measured,
    )


def agree(proposals: Sequence[Proposal]) -> SaveRequest:
    """At rank 0: the request that all proposals stand for. Raises ``SaveRefused`` naming ranks."""
    first = proposals[0]
    failed = {rank: p.error for rank, p in enumerate(proposals) if p.error}
    if failed:
        rank, text = next(iter(failed.items()))
        raise SaveRefused(
            f"rank {name_ranks(list(failed))} cannot prepare the save: {text}",
            step=first.step,
            rank=rank,
            ranks=tuple(failed),
        )
    for rank, proposal in enumerate(proposals):
        if proposal.world_size != len(proposals):
            raise SaveRefused(
                f"rank {rank} reports a world size of {proposal.world_size}, not {len(proposals)}",
                step=first.step,
                rank=rank,
            )
        same = (proposal.step, proposal.specs, proposal.in_place)
        if same != (first.step, first.specs, first.in_place):
            raise SaveRefused(
                f"rank {rank} asks for step {proposal.step} or parts that rank 0 does not ask for",
                step=first.step,
                rank=rank,
            )
    return SaveRequest(
        first.step,
        first.specs,
        len(proposals),
        first.in_place,
        first.metrics,
        sum(p.expected_bytes for p in proposals),
    )
