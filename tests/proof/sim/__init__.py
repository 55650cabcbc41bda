"""Deterministic simulation of whole jobs: ``simulate(seed)`` is one run, the same every time.

Ranks, coordinator, writers, restarts, rival trainers and readers run the production code on a
simulated clock, network and file system. See ``run`` for a run, ``faults`` and ``damage`` for the
faults.
"""

from proof.sim.run import Run, simulate
from proof.sim.world import SimulationFailed

__all__ = ["Run", "SimulationFailed", "simulate"]
