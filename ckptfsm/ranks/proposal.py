"""The proposals of all ranks for a save, and their agreement.

A rank that cannot prepare a save writes its error into its proposal, and every rank refuses the save.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeGuard

from ckptfsm.adapters.notices import say
from ckptfsm.core.errors import (
    ConfigError,
    SaveRefused,
    describe,
    name_ranks,
    one_line,
    shorten,
)
from ckptfsm.core.parts import OptionalPart, PartSpec, Sent, content_of
from ckptfsm.core.ports import Draft, Driver
from ckptfsm.core.recorded_metrics import measured
from ckptfsm.core.requests import SaveRequest
from ckptfsm.writers.plain_files import FileTree

log = logging.getLogger("ckptfsm")
STATE = "state"  # the name of the part for a state without names
_WORDS = 460  # characters of a refusal: a report puts a few words before them


class ProposedCall(NamedTuple):
    """The state, or the named parts, that a trainer gives to a save.

    ``own`` are the names of parts that no other rank may give, or has to name.
    """

    state: Any = None
    parts: Mapping[str, Any] | None = None
    own: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Proposal(Sent):
    """The proposal of one rank, as it is sent to rank 0.

    ``specs`` are the parts that this rank writes, ``elsewhere`` the names of the others. ``digests``
    has a number for each of ``specs``: the values in it of which one rank's are kept for all.
    ``trees`` names each ``FileTree`` with its ``every_rank``. ``place`` has the part and the key of
    the value that an ``error`` is about, if it is about one. ``directories`` are those inside the
    part of a group, whose order numbers its shares. ``own``: see ``ProposedCall``.
    """

    step: int
    world_size: int
    specs: tuple[PartSpec, ...] = ()
    elsewhere: frozenset[str] = frozenset()
    in_place: bool = False
    summary: Any = None
    expected_bytes: int = 0
    metrics: tuple[tuple[str, float], ...] = ()
    error: str = ""
    trees: tuple[tuple[str, bool | None], ...] = ()
    digests: tuple[int, ...] = ()
    place: tuple[tuple[str, str], ...] = ()
    directories: tuple[str, ...] = ()
    own: frozenset[str] = frozenset()


def name_parts(state: Any, parts: Mapping[str, Any] | None) -> dict[str, Any]:
    """The parts of a call: ``state`` alone is the part named ``state``. Raises ``ConfigError``.

    A value of None means that other ranks write the part; a function is called now for its value.
    """
    if (state is None) == (parts is None):
        raise ConfigError("give either a state or named parts")
    named = {STATE: state} if parts is None else parts
    odd = [name for name in named if not isinstance(name, str)]
    if odd:
        raise ConfigError(f"the name of a part is text, not {odd[0]!r}", part=repr(odd[0]))
    return {name: _made(value) for name, value in named.items()}


def _made(value: Any) -> Any:
    if isinstance(value, OptionalPart) and callable(value.content):
        return OptionalPart(value.content())
    if hasattr(value, "state_dict") and not isinstance(value, Mapping):
        raise ConfigError(
            f"{one_line(repr(type(value)))} is no state: give a state dict, such as that of "
            "ckptfsm.TrainingState, see docs/howto-plain-torch.md"
        )
    return value() if callable(value) else value


def propose(
    driver: Driver,
    world_size: int,
    step: int,
    call: ProposedCall,
    metrics: Mapping[str, float] | None,
) -> tuple[Draft | None, Proposal]:
    """Plan a save on this rank. An error becomes part of the proposal."""
    try:
        named = name_parts(call.state, call.parts)
        figures = measured(metrics)
        draft = driver.draft(named)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # also torch's; carried to the exchange, raised on every rank
        say(log.exception, "draft_failed", f"step {step}: cannot be prepared", step=step)
        return None, Proposal(step, world_size, error=message_of(error), place=_place_of(error))
    contents = ((name, content_of(value)) for name, value in named.items())
    return draft, Proposal(
        step,
        world_size,
        draft.specs,
        frozenset(name for name, value in named.items() if value is None),
        draft.in_place,
        draft.summary,
        draft.expected_bytes,
        figures,
        trees=tuple((n, c.every_rank) for n, c in contents if isinstance(c, FileTree)),
        own=call.own,
    )


def message_of(error: BaseException) -> str:
    """The reason why a save is refused, in one bounded line; a refusal in its own words."""
    if not isinstance(error, SaveRefused):
        return describe(error) or type(error).__name__
    return shorten(one_line(error.message), _WORDS)


def is_about_a_value(error: BaseException) -> TypeGuard[SaveRefused]:
    """True for the refusal of a state because of one of its values."""
    return isinstance(error, SaveRefused) and {"part", "key"} <= set(error.facts)


def _place_of(error: BaseException) -> tuple[tuple[str, str], ...]:
    if not is_about_a_value(error):
        return ()
    return tuple((name, str(error.facts[name])) for name in ("part", "key"))


def agree(proposals: Sequence[Proposal]) -> SaveRequest:
    """At rank 0: the request that all proposals agree on. Raises ``SaveRefused`` naming ranks."""
    first = proposals[0]
    failed = {rank: p.error for rank, p in enumerate(proposals) if p.error}
    if failed:
        rank, text = next(iter(failed.items()))
        raise SaveRefused(
            f"rank {name_ranks(list(failed))} cannot prepare the save: {text}",
            step=first.step,
            rank=rank,
            ranks=tuple(failed),
            **dict(proposals[rank].place),
        )
    for rank, proposal in enumerate(proposals):
        if proposal.world_size != len(proposals):
            raise SaveRefused(
                f"rank {rank} reports a world size of {proposal.world_size}, not {len(proposals)}",
                step=first.step,
                rank=rank,
            )
        if (proposal.step, _names(proposal)) != (first.step, _names(first)):
            raise SaveRefused(
                f"rank {rank} asks for step {proposal.step} or parts that rank 0 does not ask for",
                step=first.step,
                rank=rank,
            )
        if proposal.directories != first.directories:
            raise SaveRefused(
                f"rank {rank} names the directories {list(proposal.directories)}, the first rank "
                f"{list(first.directories)}: give None where other ranks write",
                step=first.step,
                rank=rank,
            )
    given: dict[str, dict[int, PartSpec]] = {}  # in the order in which the ranks give the parts
    for rank, proposal in enumerate(proposals):
        for spec in proposal.specs:
            given.setdefault(spec.name, {})[rank] = spec
    nobody = sorted(_names(first) - set(given))
    if nobody:
        raise SaveRefused(f"no rank writes part {nobody[0]!r}", step=first.step, part=nobody[0])
    return SaveRequest(
        first.step,
        tuple(_agreed(name, found, proposals) for name, found in given.items()),
        len(proposals),
        _in_place(proposals),
        first.metrics,
        sum(p.expected_bytes for p in proposals),
    )


def _names(proposal: Proposal) -> set[str]:
    """The parts that every rank has to name."""
    return ({spec.name for spec in proposal.specs} | proposal.elsewhere) - proposal.own


def _agreed(name: str, found: Mapping[int, PartSpec], proposals: Sequence[Proposal]) -> PartSpec:
    """A part as the ranks ``found`` propose it; the first of them writes plain files for all."""
    first = next(iter(found.values()))
    if len(found) > 1 and any(name in proposals[rank].own for rank in found):
        raise SaveRefused(
            f"rank {name_ranks(list(found))} give a file {name!r} each: give it a name of its own on "
            "each rank",
            step=proposals[0].step,
            rank=min(found),
            ranks=tuple(found),
            part=name,
        )
    for rank, spec in found.items():
        if spec != first:
            raise SaveRefused(
                f"rank {rank} describes part {name!r} otherwise than rank {min(found)}",
                step=proposals[0].step,
                rank=rank,
                part=name,
            )
    if first.format.by_one and not _every_rank(name, found, proposals):
        return replace(first, ranks=(min(found),))
    if first.format.foreign and len(found) < len(proposals):
        raise SaveRefused(
            f"part {name!r} is a foreign request, whose finalizers hold collectives: every rank must "
            "have one",
            step=proposals[0].step,
            part=name,
        )
    return replace(first, ranks=None if len(found) == len(proposals) else tuple(found))


def _every_rank(name: str, ranks: Collection[int], proposals: Sequence[Proposal]) -> bool | None:
    """``every_rank`` of a tree. Raises ``SaveRefused`` unless all ranks that give it say the same."""
    said = {rank: dict(proposals[rank].trees).get(name) for rank in ranks}
    first = min(said)
    for rank, every_rank in said.items():
        if every_rank is not said[first]:
            raise SaveRefused(
                f"rank {rank} gives the FileTree {name!r} with every_rank={every_rank}, rank {first} "
                f"with every_rank={said[first]}",
                step=proposals[0].step,
                rank=rank,
                part=name,
            )
    return said[first]


def _in_place(proposals: Sequence[Proposal]) -> bool:
    """True if the save is in place. Raises ``SaveRefused`` unless all writing ranks agree."""
    said = {p.in_place for p in proposals if p.specs}
    if len(said) > 1:
        raise SaveRefused("some ranks write in place, others do not", step=proposals[0].step)
    return said == {True}
