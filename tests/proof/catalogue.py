"""The layers of proof: the purpose of each one, where it runs, and how many CPUs it can use."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Entry:
    """A layer. ``module`` has ``run(budget)``; ``profiles`` are those that include it.

    ``drives``: it runs jobs on a disk, so that what it came across was really reached. ``goes_on``: in
    a soak, until the soak's hours are over. ``limit_s``: the wall time after which it is taken for hung
    and ended, beyond those hours; three times what it takes where nothing else runs, or more.
    """

    module: str
    about: str
    cpus: int
    profiles: tuple[str, ...] = ("sample", "pr", "nightly", "release")
    drives: bool = False
    goes_on: bool = False
    limit_s: float = 2 * 3600.0


MAINTAINERS = ("nightly", "release")
WITH_SOAK = ("sample", "pr", "nightly", "release", "soak")

# In the order they are started: the long ones first, so that the short ones fill the gaps. Those that
# wait for disks and processes take one CPU, beside those that compute.
LAYERS: MappingProxyType[str, Entry] = MappingProxyType(
    {
        "simulation": Entry(
            "proof.simulation",
            "whole jobs, simulated clock, network and disk",
            cpus=2,
            profiles=WITH_SOAK,
            drives=True,
            goes_on=True,
        ),
        "mutants": Entry("proof.mutants", "planted bugs, each killed by a layer", cpus=2),
        "processes": Entry(
            "proof.processes",
            "SIGKILL and errors at every storage call, real processes, real disk",
            cpus=1,
            drives=True,
            limit_s=4 * 3600.0,  # it waits for every fsync: 54 minutes on a disk that is quick
        ),
        "megatron_kills": Entry(
            "proof.megatron_kills",
            "real Megatron writers killed at random bytes",
            cpus=1,
            profiles=WITH_SOAK,
            drives=True,
            goes_on=True,
        ),
        "interrupts": Entry(
            "proof.interrupts",
            "a Ctrl-C before every line of a public call, and at random, then the job goes on",
            cpus=1,
            drives=True,
        ),
        "determinism": Entry(
            "proof.determinism",
            "the same seed gives the same trace",
            cpus=2,
            profiles=WITH_SOAK,
            limit_s=4 * 3600.0,  # a soak's thousand re-runs
        ),
        "exhaustive": Entry("proof.exhaustive", "every state of the core in small bounds", cpus=2),
        "suites": Entry(
            "proof.suites",
            "Hypothesis over ledger, recovery, retention and plain values",
            cpus=1,
            drives=True,
        ),
        "corruption": Entry(
            "proof.corruption", "damaged checkpoints are told from whole ones", cpus=1, drives=True
        ),
        "fuzz": Entry("proof.fuzz", "readers of what lies on disk, fed with anything", cpus=1),
        "fieldbugs": Entry(
            "proof.fieldbugs", "public bugs: red on the old way, green here", cpus=1, drives=True
        ),
        "inductive": Entry("proof.inductive", "z3: the invariant holds for any number", cpus=1),
        "races": Entry("proof.races", "spin: check-then-act races", cpus=1, profiles=MAINTAINERS),
        "powerloss": Entry(
            "proof.powerloss",
            "power loss below a real file system",
            cpus=2,
            profiles=MAINTAINERS,
            drives=True,
        ),
    }
)


def layers_of(profile: str) -> list[str]:
    """The layers that belong to a profile, in the order to start them."""
    return [name for name, entry in LAYERS.items() if profile in entry.profiles]


def command_of(name: str, profile: str) -> str:
    """The command of a person that runs one layer."""
    return f"PYTHONPATH=tests python -m proof --profile {profile} --only {name}"
