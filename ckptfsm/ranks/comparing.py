"""Compares what the ranks give for a value of which a checkpoint keeps one for all ranks.

Those are the plain values of a state, a part of bytes, and a ``FileTree`` that says nothing of its
ranks. Each rank sends a digest for a part with its proposal. Only if these differ, a few of the ranks
send the digests of all keys, so that the keys can be named.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import xxhash

from ckptfsm.adapters.notices import say
from ckptfsm.core.errors import SaveRefused, name_ranks, shorten
from ckptfsm.core.parts import Sent
from ckptfsm.core.ports import Draft, Transport
from ckptfsm.ranks.proposal import Proposal

log = logging.getLogger("ckptfsm")
_ASKED = 8  # ranks that send the digests of a part's keys, beside the first
_TOLD = 8  # differences of one save that have a line of their own
Digests = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Difference(Sent):
    """A value that ``ranks``, and perhaps ``more`` others, give otherwise than rank ``first``.

    ``key`` is "" for a part without keys. ``tree``: a ``FileTree`` of several ranks.
    """

    part: str
    key: str
    first: int
    ranks: tuple[int, ...]
    more: int = 0
    tree: bool = False

    def __str__(self) -> str:
        others = name_ranks(self.ranks) + (f" (perhaps {self.more} more)" if self.more else "")
        if self.tree:
            return (
                f"part {self.part!r}: rank {others} gives a FileTree too, and rank {self.first} alone "
                "writes it: every_rank=True keeps the files of each rank, every_rank=False says that "
                "one rank's are enough"
            )
        what = f"key {self.key!r}" if self.key else "its bytes"
        return (
            f"part {self.part!r}: {what} of rank {others} is not that of rank {self.first}, which is "
            "kept for all ranks: PerRank(value) keeps one for each rank"
        )


def _facts_of(found: Difference) -> dict[str, Any]:
    return {"part": found.part, "key": found.key or None, "ranks": found.ranks}


@dataclass(frozen=True, slots=True)
class _Asked(Sent):
    """The ranks that are asked for the digests of a part: ``first``, and ``ranks`` that differ.

    ``own_keys``: a key that a rank lacks is no difference.
    """

    first: int
    ranks: tuple[int, ...]
    more: int
    own_keys: bool


class Comparison:
    """The comparison of one rank with the others, see the module. ``mode``: ``ranks_disagree``."""

    def __init__(self, transport: Transport, mode: Literal["warn", "refuse"]) -> None:
        self._transport = transport
        self._refuses = mode == "refuse"  # then a difference is found again at every save
        self._named: set[tuple[str, str]] = set()  # part and key, once; the same on every rank

    def digests_of(self, draft: Draft) -> tuple[int, ...]:
        """A digest for each part of a draft (local)."""
        return tuple(self._whole(spec.name, draft.digests.get(spec.name)) for spec in draft.specs)

    def _whole(self, part: str, digests: Digests | None) -> int:
        rest = {k: v for k, v in (digests or {}).items() if (part, k) not in self._named}
        return xxhash.xxh3_64_intdigest(repr(sorted(rest.items())).encode()) if rest else 0

    def differences(
        self, proposals: Sequence[Proposal] | None, draft: Draft | None
    ) -> tuple[Difference, ...]:
        """The differences that were not named yet (collective). Rank 0 has the ``proposals``."""
        asked = self._asked(proposals or ())
        trees = self._trees(proposals or ())
        if not self._transport.any_flags([bool(asked or trees)])[0]:
            return ()
        asked = self._transport.broadcast(asked)
        digests = draft.digests if draft is not None else {}
        rank = self._transport.rank
        answer = {
            part: digests.get(part, {})
            for part, each in asked.items()
            if rank == each.first or rank in each.ranks
        }
        answers = self._transport.gather(answer)
        told: tuple[tuple[Difference, ...], list[tuple[str, str]]] = self._transport.broadcast(
            ((), [])
            if answers is None
            else ((*trees, *_named(asked, answers, self._named)), _own_keys(asked, answers))
        )
        found, own = told
        differing = {(each.part, each.key) for each in found}
        self._named.update(each for each in own if each not in differing)
        if not self._refuses:
            self._named.update((each.part, each.key) for each in found)
        return found

    def warn_of(self, step: int, differences: Sequence[Difference]) -> list[str]:
        """Log the differences of a save, unless they refuse it. Returns the lines."""
        if self._refuses:
            return []
        lines = []
        for found in differences[:_TOLD]:
            lines.append(f"step {step}: {found}")
            say(log.warning, "ranks_disagree", lines[-1], step=step, **_facts_of(found))
        more = [f"{each.part}: {each.key}" for each in differences[_TOLD:]]
        if more:
            names = shorten(", ".join(more))
            lines.append(f"step {step}: {len(more)} more keys differ by rank: {names}")
            say(log.warning, "ranks_disagree", lines[-1], step=step)
        return lines

    def refuse(self, step: int, differences: Sequence[Difference]) -> None:
        """Raise ``SaveRefused`` because of the first difference, unless it is warned of."""
        if self._refuses:
            raise SaveRefused(str(differences[0]), step=step, **_facts_of(differences[0]))

    def _asked(self, proposals: Sequence[Proposal]) -> dict[str, _Asked]:
        """The parts whose digests differ, with the ranks that are asked."""
        given: dict[str, dict[int, int]] = {}
        own_keys: dict[str, bool] = {}
        for rank, proposal in enumerate(proposals):
            for spec, digest in zip(proposal.specs, proposal.digests, strict=False):
                given.setdefault(spec.name, {})[rank] = digest
                own_keys[spec.name] = spec.format.own_keys
        asked = {}
        for part, digests in given.items():
            first = min(digests)
            others = tuple(r for r, digest in digests.items() if digest != digests[first])
            if others:
                more = len(others[_ASKED:])
                asked[part] = _Asked(first, others[:_ASKED], more, own_keys[part])
        return asked

    def _trees(self, proposals: Sequence[Proposal]) -> tuple[Difference, ...]:
        """Trees that several ranks give, without a word about the others."""
        givers: dict[str, list[int]] = {}
        for rank, proposal in enumerate(proposals):
            for part, every_rank in proposal.trees:
                if every_rank is None:
                    givers.setdefault(part, []).append(rank)
        return tuple(
            Difference(part, "", ranks[0], tuple(ranks[1:]), tree=True)
            for part, ranks in givers.items()
            if len(ranks) > 1 and (part, "") not in self._named
        )


def _named(
    asked: Mapping[str, _Asked],
    answers: Sequence[Mapping[str, Digests]],
    known: set[tuple[str, str]],
) -> list[Difference]:
    """At rank 0: the keys that differ among the ranks that were asked."""
    found = []
    for part, each in asked.items():
        given = {rank: answers[rank][part] for rank in (each.first, *each.ranks)}
        for key in dict.fromkeys(key for digests in given.values() for key in digests):
            having = {
                rank: digests.get(key)
                for rank, digests in given.items()
                if key in digests or not each.own_keys
            }
            first = min(having)
            ranks = tuple(rank for rank, digest in having.items() if digest != having[first])
            if ranks and (part, key) not in known:
                found.append(Difference(part, key, first, ranks, each.more))
    return found


def _own_keys(
    asked: Mapping[str, _Asked], answers: Sequence[Mapping[str, Digests]]
) -> list[tuple[str, str]]:
    """The keys that not every rank has of those asked, where that is no difference."""
    found = []
    for part, each in asked.items():
        if each.own_keys:
            given = [set[str](answers[rank][part]) for rank in (each.first, *each.ranks)]
            own: set[str] = set().union(*given) - given[0].intersection(*given)
            found += [(part, key) for key in sorted(own)]
    return found
