"""The layers of proof: what each one is, where it runs, and how many CPUs it can use."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Entry:
    """A layer. ``module`` has ``run(budget)``; ``profiles`` are those that include it."""

    module: str
    about: str
    cpus: int
    profiles: tuple[str, ...] = ("pr", "nightly", "release")


MAINTAINERS = ("nightly", "release")
WITH_SOAK = ("pr", "nightly", "release", "soak")

# In the order they are started: the long ones first, so that the short ones fill the gaps.
LAYERS: MappingProxyType[str, Entry] = MappingProxyType(
    {
        "simulation": Entry(
            "proof.simulation", "whole jobs, simulated clock, network and disk", 2, WITH_SOAK
        ),
        "mutants": Entry("proof.mutants", "planted bugs, each killed by a layer", 2),
        "processes": Entry(
            "proof.processes", "SIGKILL and errors at every storage call, real disk", 2
        ),
        "megatron_kills": Entry(
            "proof.megatron_kills", "real Megatron writers killed at random bytes", 2, WITH_SOAK
        ),
        "exhaustive": Entry("proof.exhaustive", "every state of the pure core in small bounds", 1),
        "suites": Entry("proof.suites", "Hypothesis over ledger, recovery and manager", 1),
        "determinism": Entry(
            "proof.determinism", "the same seed gives the same trace", 2, WITH_SOAK
        ),
        "corruption": Entry("proof.corruption", "damaged checkpoints are told from whole ones", 1),
        "fuzz": Entry("proof.fuzz", "readers of what lies on disk, fed with anything", 1),
        "fieldbugs": Entry("proof.fieldbugs", "public bugs: red on the old way, green here", 1),
        "traces": Entry("proof.traces", "journals replayed against the specification", 1),
        "inductive": Entry("proof.inductive", "z3: the invariant holds for any number", 1),
        "races": Entry("proof.races", "spin: check-then-act races", 1, MAINTAINERS),
        "powerloss": Entry(
            "proof.powerloss", "power loss below a real file system", 1, MAINTAINERS
        ),
    }
)


def layers_of(profile: str) -> list[str]:
    """The layers that belong to a profile, in the order to start them."""
    return [name for name, entry in LAYERS.items() if profile in entry.profiles]


def command_of(name: str, profile: str) -> str:
    """What a person types to run one layer."""
    return f"PYTHONPATH=tests python -m proof --profile {profile} --only {name}"
