"""The arguments and the result of every layer of proof.

A layer is a module of this package with a function ``run(budget) -> LayerResult``. Each layer
drives the production code, never a copy of the protocol. A violation is a promise that did not
hold, with the one command that shows it again.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from proof.coverage import Coverage

SMALL = ("sample", "pr")  # the profiles of `make test` and `make gate`
Profile = Literal["sample", "pr", "nightly", "release", "soak"]
_SAMPLED = 20
_MEMORY = "/dev/shm"
_ROOM = 1 << 30  # bytes
_T = TypeVar("_T")


@dataclass(frozen=True)
class Budget:
    """How much to explore.

    ``pr`` is the profile of the gate: derandomized, bounded. ``sample`` is the part of it that
    ``make test`` runs. ``nightly`` and ``release`` go further; ``soak`` goes on for ``hours``.
    ``processes``: how many CPUs may be used. ``stop_at_first``: return with the first violation, so
    that mutants are killed quickly.
    """

    profile: Profile = "pr"
    processes: int = 2
    stop_at_first: bool = False
    hours: float = 0.0

    def pick(self, *, pr: int, nightly: int, release: int, soak: int | None = None) -> int:
        """The amount for this profile; for ``sample`` a twentieth of ``pr``, and at least 1."""
        sample = max(1, pr // _SAMPLED)
        amounts = {"pr": pr, "nightly": nightly, "release": release, "soak": soak or release}
        return {"sample": sample, **amounts}[self.profile]

    def some(self, things: Sequence[_T], every: int = _SAMPLED) -> Sequence[_T]:
        """All of them, or in a sample the first of each ``every``."""
        return things[::every] if self.profile == "sample" else things


@dataclass(frozen=True)
class Violation:
    """A promise (``I4``) that did not hold: the finding, and the command that shows it again."""

    promise: str
    what: str
    replay: str


@dataclass
class LayerResult:
    """The result of a layer: named counts (runs, states, sites, kills) and its findings.

    ``seconds`` are of wall, ``processor_s`` those of all processors, in all processes of the layer.
    ``skipped`` is the reason if it could not run at all; that is shown, never hidden. ``notes`` are
    further lines for the report; ``kills`` how many mutants each layer has killed.
    """

    layer: str
    explored: dict[str, int] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)
    seconds: float = 0.0
    processor_s: float = 0.0
    skipped: str = ""
    notes: list[str] = field(default_factory=list)
    kills: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "violations": [vars(v) for v in self.violations],
            "coverage": self.coverage.as_json(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LayerResult:
        return cls(
            **{
                **data,
                "violations": [Violation(**v) for v in data["violations"]],
                "coverage": Coverage.from_json(data["coverage"]),
            }
        )


Run = Callable[[Budget], LayerResult]


def timed(run: Run, budget: Budget) -> LayerResult:
    """Run a layer and note its seconds."""
    began, used = time.monotonic(), sum(os.times()[:4])
    result = run(budget)
    result.seconds = time.monotonic() - began
    result.processor_s = (
        sum(os.times()[:4]) - used
    )  # of this process, and of all that it waited for
    return result


def in_memory() -> str | None:
    """A directory in memory, for roots to which a disk adds nothing; None if it is not there or full."""
    roomy = os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= _ROOM
    return _MEMORY if roomy else None
