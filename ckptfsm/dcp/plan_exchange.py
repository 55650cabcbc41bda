"""The plans of all ranks at rank 0: a rank sends its own again only once it has changed."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from ckptfsm.adapters.garbage import collection_paused
from ckptfsm.core.errors import SaveRefused
from ckptfsm.core.parts import Planned

MergePart = Callable[[str, Mapping[int, Any]], Planned]


@dataclass(frozen=True, slots=True)
class Summary:
    """A rank's plans; only their digest if rank 0 has them from the last accepted save."""

    digest: str
    plans: bytes | None


class PlanExchange:
    """One rank's side of the exchange, and at rank 0 what the others have sent."""

    def __init__(self) -> None:
        self._summarized: tuple[list[tuple[str, Any]], bytes, str] = ([], b"", "")
        self._sent = ""
        self._accepted = ""
        self._plans: dict[str, bytes] = {}  # plans of the accepted saves, by digest
        self._candidates: dict[str, bytes] = {}
        self._merged: tuple[tuple[str, ...], Mapping[str, Planned]] = ((), {})

    @collection_paused()
    def summary_of(self, plans: Mapping[str, Any]) -> Summary:
        """The plans by their parts, as they are sent. They are pickled again only if one is new."""
        found = list(plans.items())
        known, pickled, digest = self._summarized
        same = [(name, id(plan)) for name, plan in found] == [
            (name, id(plan)) for name, plan in known
        ]
        if not same or not digest:
            pickled = pickle.dumps(found)
            digest = xxhash.xxh3_128_hexdigest(pickled)
            self._summarized = (found, pickled, digest)
        accepted, self._accepted, self._sent = self._accepted, "", digest
        # A save that is neither accepted nor refused here leaves "": the next one sends every plan.
        return Summary(digest, None if digest == accepted else pickled)

    def accept(self) -> None:
        """See ``ports.Driver``."""
        self._plans = dict(self._candidates)
        self._accepted = self._sent  # last: an interrupt before this line sends every plan again

    def refuse(self) -> None:
        """See ``ports.Driver``."""
        self._accepted = ""

    @collection_paused()
    def merge(self, summaries: Sequence[Summary], merge_part: MergePart) -> Mapping[str, Planned]:
        """At rank 0: what ``merge_part`` makes of a part's plans, by rank. Raises ``SaveRefused``.

        If every rank refers to its last plan, each has its share in ``shares`` already.
        """
        digests = tuple(s.digest for s in summaries)
        known = self._plans | self._candidates  # a rank may have accepted one that rank 0 refused
        known.update({s.digest: s.plans for s in summaries if s.plans is not None})
        if any(digest not in known for digest in digests):
            raise SaveRefused("a rank refers to a plan that rank 0 does not have; save again")
        self._candidates = {digest: known[digest] for digest in digests}
        if digests == self._merged[0]:
            merged = self._merged[1]
            if all(s.plans is None for s in summaries):
                return {name: plan._replace(shares=b"") for name, plan in merged.items()}
            return merged
        ranks = [dict(pickle.loads(known[digest])) for digest in digests]
        merged = {}
        for name in dict.fromkeys(name for rank in ranks for name in rank):
            having = {rank: parts[name] for rank, parts in enumerate(ranks) if name in parts}
            merged[name] = merge_part(name, having)
        self._merged = (digests, merged)
        return merged
