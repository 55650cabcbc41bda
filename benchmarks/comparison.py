"""The workloads that sides are compared with, and the figures of a comparison.

Ratios are to stock's fast mode: forks are slow in two ways on such machines, so each sample is divided
by the fastest of stock's saves. The first side is stock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from benchmarks.measure import MS, Figure, in_unit
from benchmarks.one_save import PLACES, Sample
from benchmarks.sides import ManagerSide
from benchmarks.state import MIXED_TENSORS, Kind
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.lifecycle import State
from ckptfsm.views.reading import read_lives
from ckptfsm.views.timeline import place

WITH_TARGETS = ("eager", "gated", "auto")
OURS = "ckptfsm "  # before the engine in the name of a side, beside other writers
_STALL_TARGETS = {("eager", 0.0): 0.15, ("gated", 0.5): 0.03, ("auto", 0.5): 0.03}
_LOADABLE_TARGET = 0.45
_CPU_TARGET = 0.5
_FIRST_TARGET = 2.0
_STATES = (State.REQUESTED, State.FORKED, State.SHARDS_WRITTEN, State.FINALIZED)
_LEAST_S = 1e-6  # a small state may be saved for nothing
_NO_TARGETS: Mapping[str, float] = MappingProxyType({})

Times = Sequence[tuple[float, float]]  # of each save: its stall, and the time until loadable


@dataclass(frozen=True, slots=True)
class Workload:
    """A state on each rank, and the pass before its update: ``work_s`` for each GiB of state."""

    work_s: float
    kind: Kind = "large"
    ranks: int = 1

    @property
    def title(self) -> str:
        """The workload as the names of its figures have it; large tensors and one rank go unsaid."""
        kind = {"mixed": f"{MIXED_TENSORS} mixed tensors", "small": "tensors of 52 KiB"}
        ranks = [f"{self.ranks} ranks"] if self.ranks > 1 else []
        named = [kind[self.kind]] if self.kind in kind else []
        return ", ".join([f"{self.work_s:g} s of work", *named, *ranks])


def short_figures(
    workload: Workload, times: Mapping[str, Times], targets: Mapping[str, float] = _NO_TARGETS
) -> list[Figure]:
    """The stall of each side (ms), its ratio to stock's fastest, and the time until loadable (ms)."""
    fastest_s = min(stall_s for stall_s, _ in times["stock"])
    figures = []
    for name, each in times.items():
        stalls, loadable = [stall_s for stall_s, _ in each], [loadable_s for _, loadable_s in each]
        title = f"stall, {workload.title}, {name}"
        figures.append(in_unit(title, "ms", MS, stalls))
        if name != "stock":
            figures.append(
                over(f"{title} / stock", stalls, fastest_s, targets.get(name.removeprefix(OURS)))
            )
        figures.append(in_unit(f"until loadable, {workload.title}, {name}", "ms", MS, loadable))
    return figures


def first_figures(workload: Workload, firsts: Mapping[str, Sample]) -> list[Figure]:
    """The stall of the first save of each side (ms), whose plan is cold, and its ratio to stock's."""
    figures = []
    for name, sample in firsts.items():
        title = f"stall of the first save, {workload.title}, {name}"
        figures.append(in_unit(title, "ms", MS, [sample.stall_s]))
        if name.removeprefix(OURS) in WITH_TARGETS:
            base = firsts["stock"].stall_s
            figures.append(over(f"{title} / stock", [sample.stall_s], base, _FIRST_TARGET))
    return figures


def full_figures(workload: Workload, samples: Mapping[str, Sequence[Sample]]) -> list[Figure]:
    """The short figures, the places of each stall, and ratios of time until loadable and CPU time."""
    times = {name: times_of(each) for name, each in samples.items()}
    targets = {
        name: target
        for (name, work_s), target in _STALL_TARGETS.items()
        if work_s == workload.work_s
    }
    figures = short_figures(workload, times, targets)
    fastest_s = min(sample.loadable_s for sample in samples["stock"])
    least_cpu_s = min(sample.cpu_s for sample in samples["stock"])
    for name, each in samples.items():
        title = f"{workload.title}, {name}"
        for number, where in enumerate(PLACES):
            spent = [sample.places_s[number] for sample in each]
            figures.append(in_unit(f"share of the stall, {title}: {where}", "ms", MS, spent))
        if name == "stock":
            continue
        targeted = name.removeprefix(OURS) in WITH_TARGETS
        loadable, used = [sample.loadable_s for sample in each], [sample.cpu_s for sample in each]
        wanted = _LOADABLE_TARGET if targeted else None
        figures.append(over(f"until loadable, {title} / stock", loadable, fastest_s, wanted))
        wanted = _CPU_TARGET if targeted else None
        figures.append(over(f"CPU time, {title} / stock", used, least_cpu_s, wanted))
    return figures


def times_of(samples: Sequence[Sample]) -> Times:
    """Stall and time until loadable of each sample."""
    return [(sample.stall_s, sample.loadable_s) for sample in samples]


def time_in_states(workload: Workload, side: ManagerSide, warm_up_rounds: int) -> list[Figure]:
    """The time in each state from ``save`` to tracked (ms), as the journal tells it."""
    storage = PosixStorage(side.root, create=False)
    lasted: dict[State, list[float]] = {state: [] for state in _STATES}
    try:
        for lane in place(read_lives(storage)).lanes[warm_up_rounds:]:
            for entry, start, stop in lane.spans():
                if entry.state in lasted:
                    lasted[entry.state].append(stop - start)
    finally:
        storage.close_root()
    after = f"{workload.title}, {side.name}"
    return [in_unit(f"in {s.value}, {after}", "ms", MS, each) for s, each in lasted.items()]


def over(name: str, samples: Sequence[float], base: float, target: float | None) -> Figure:
    """Each sample divided by ``base``."""
    return Figure(name, "ratio", tuple(sample / max(base, _LEAST_S) for sample in samples), target)
