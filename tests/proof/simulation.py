"""Deterministic simulation of whole jobs, seed by seed.

Ranks, coordinator, writers, restarts, rivals and readers run the production code on a simulated
clock, network and disk (``proof.sim``); the judges look after every storage call. Each seed is one
run: seeds 0..N-1, never random ones. A violation is printed as the command that replays its seed:

    PYTHONPATH=tests python -m proof.simulation --seed N [--aim STATE]

Some runs strike the coordinator in a state that is soon over, and let people and rivals come then: the
seeds alone would leave that to luck, and to another luck after every change.

Rules: seeds are shared out in chunks among processes that were forked before anything ran; a worker
that dies is a violation too, never a smaller count, and never waited for.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType

from ckptfsm.core.lifecycle import State
from proof.coverage import Coverage, watch_moves
from proof.layer import Budget, LayerResult, Violation, timed
from proof.sharing import WorkerDied, share_out
from proof.sim import simulate
from proof.sim.answers import REPLAYED

LAYER = "simulation"
_CHUNK = 250
_CHUNK_AIMED = 20
_CHUNK_HURRIED = 8  # when the first violation ends the run
_COMMAND = "PYTHONPATH=tests python -m proof.simulation"
_REPLAY = f"{_COMMAND} --seed"
_SEEDS_RERUN = 20
_ENOUGH = 2000  # in so many runs every kind of late answer comes, many times
AIMED: MappingProxyType[State, int] = MappingProxyType(  # how many runs aim at a state
    {
        State.ABSENT: 150,
        State.REQUESTED: 50,
        State.FORKED: 150,
        State.SHARDS_WRITTEN: 50,
        State.FINALIZED: 200,
        State.PRUNABLE: 120,
        State.FAILED: 300,
    }
)
_COUNTED = ("runs", "storage calls", "saves", "journals", *REPLAYED)
_NOTHING = MappingProxyType(dict.fromkeys(_COUNTED, 0))


def run(budget: Budget) -> LayerResult:
    """Seeds 0..N-1 on ``budget.processes`` processes, then some of them again."""
    # Of the planted bugs that this layer is asked about first, the last is seen in run 568.
    count = budget.pick(pr=4_000, nightly=60_000, release=60_000)
    deadline = time.monotonic() + budget.hours * 3600 if budget.profile == "soak" else None
    result = LayerResult(LAYER, {**_NOTHING, "re-runs": 0})
    size = _CHUNK_HURRIED if budget.stop_at_first else _CHUNK
    seeds = _chunks(0, None if deadline is not None else count, size)
    for part in _share_out(seeds, budget.processes):
        _add(result, part)
        late = deadline is not None and time.monotonic() >= deadline
        if late or (budget.stop_at_first and result.violations):
            break
    if deadline is None and not (budget.stop_at_first and result.violations):
        _run_aimed(result, budget)
    if not result.violations:
        _check_replayed(result)
        times = 50 if budget.profile == "soak" else 1
        _check_reruns(result, budget.some(range(_SEEDS_RERUN), 10), times)
    return result


def look(seed: str) -> LayerResult:
    """One seed, which shows a planted bug sooner than all of them."""
    return LayerResult.from_json(json.loads(run_chunk(range(int(seed), int(seed) + 1))))


def _run_aimed(result: LayerResult, budget: Budget) -> None:
    for aim, all_runs in AIMED.items():
        count = budget.pick(pr=all_runs, nightly=all_runs, release=all_runs)
        for part in _share_out(_chunks(0, count, _CHUNK_AIMED), budget.processes, aim):
            _add(result, part)


def _check_replayed(result: LayerResult) -> None:
    """Answers that came late or twice are no fault of a state: their count must not be 0."""
    if result.explored["runs"] < _ENOUGH:
        return
    for kind in REPLAYED:
        if not result.explored[kind]:
            what = (
                f"no {kind} in {result.explored['runs']} runs: nothing shows that they do not count"
            )
            result.violations.append(Violation("", what, _COMMAND))


def rerun_hashes(seeds: Sequence[int], times: int) -> list[int]:
    """The seeds whose trace differs between runs, also under another ``PYTHONHASHSEED``."""
    first = [simulate(seed).trace for seed in seeds]
    different: set[int] = set()
    for number in range(times + 1):
        again = [simulate(seed).trace for seed in seeds] if number else _elsewhere(seeds)
        pairs = zip(seeds, first, again, strict=True)
        different |= {seed for seed, one, other in pairs if one != other}
    return sorted(different)


def _check_reruns(result: LayerResult, seeds: Sequence[int], times: int) -> None:
    for seed in rerun_hashes(seeds, times):
        what = "the same seed gave another trace"
        result.violations.append(Violation("determinism", what, f"{_REPLAY} {seed}"))
    result.explored["re-runs"] += len(seeds) * (times + 1)


def _elsewhere(seeds: Sequence[int]) -> list[str]:
    """The traces of the seeds as another interpreter with another hash seed makes them."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "proof.simulation", "--hashes", *map(str, seeds)]
    paths = os.pathsep.join([str(root), str(root / "tests")])
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": paths}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=True
    )
    return ended.stdout.split()


# ------------------------------------------------------------------------------------- many seeds


def _chunks(first: int, end: int | None, size: int = _CHUNK) -> Iterator[range]:
    """Seeds from ``first`` up to ``end``, or without end."""
    while end is None or first < end:
        last = first + size if end is None else min(first + size, end)
        yield range(first, last)
        first = last


def _share_out(chunks: Iterable[range], processes: int, aim: State | None = None) -> Iterator[str]:
    """The results of the chunks, as JSON, in order, so that a count never depends on timing.

    A worker that dies ends them, with the violation that names the seeds it may have died of.
    """
    try:
        yield from share_out(partial(run_chunk, aim=aim), chunks, processes)
    except WorkerDied as died:
        result = LayerResult(LAYER, violations=[_violation_of(died, aim)])
        yield json.dumps(result.as_json())


def _violation_of(died: WorkerDied[range], aim: State | None) -> Violation:
    lost = ", ".join(f"{seeds[0]} to {seeds[-1]}" for seeds in died.lost)
    again = [f"--first {seeds[0]} --runs {len(seeds)}" for seeds in died.lost[:1]]
    return Violation("", f"{died}: seeds {lost}", " ".join([_COMMAND, *again]) + _aim_of(aim))


def _aim_of(aim: State | None) -> str:
    """The end of the command that replays a run."""
    return f" --aim {aim.value}" if aim is not None else ""


def run_chunk(seeds: range, aim: State | None = None) -> str:
    """Run some seeds here; the result as JSON."""
    coverage = Coverage()
    result = LayerResult(LAYER, dict(_NOTHING), coverage=coverage)
    collecting = gc.isenabled()
    gc.disable()  # a run is small and leaves no cycles that matter within a chunk
    try:
        with quiet(), watch_moves(coverage):
            for seed in seeds:
                one = simulate(seed, aim=aim, coverage=coverage)
                result.explored["runs"] += 1
                result.explored["storage calls"] += one.calls
                result.explored["saves"] += one.saves
                result.explored["journals"] += one.journals
                for kind, times in one.replayed.items():
                    result.explored[kind] += times
                if one.failure is not None:
                    again = f"{_REPLAY} {seed}{_aim_of(aim)}"
                    found = Violation(one.failure.promise, one.failure.what, again)
                    result.violations.append(found)
    finally:
        if collecting:
            gc.enable()
        gc.collect()
    return json.dumps(result.as_json())


@contextmanager
def quiet() -> Iterator[None]:
    """No reader wants the millions of failures that a simulation makes."""
    log = logging.getLogger("ckptfsm")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


def _add(result: LayerResult, part: str) -> None:
    other = LayerResult.from_json(json.loads(part))
    for name, count in other.explored.items():
        result.explored[name] = result.explored.get(name, 0) + count
    result.violations += other.violations
    result.coverage.add(other.coverage)


# --------------------------------------------------------------------------------------- by hand


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay one seed, or run many."""
    parser = argparse.ArgumentParser(prog="proof.simulation")
    parser.add_argument("--seed", type=int, help="replay one seed and print the end of its trace")
    parser.add_argument("--tail", type=int, default=80, help="how many lines of the trace")
    parser.add_argument("--runs", type=int, help="run this many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--aim", type=State, help="with --seed, --runs: strike in this state")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--hashes", type=int, nargs="+", help="print the traces of these seeds")
    chosen = parser.parse_args(arguments)
    with quiet():
        return _do(chosen)


def _do(chosen: argparse.Namespace) -> int:
    if chosen.hashes is not None:
        print("\n".join(simulate(seed).trace for seed in chosen.hashes))
        return 0
    if chosen.seed is not None:
        return _replay(chosen.seed, chosen.tail, chosen.aim)
    if chosen.runs is None:
        result = timed(run, Budget(processes=chosen.processes))
    else:
        result = _run_some(chosen.first, chosen.runs, chosen.processes, chosen.aim)
    return _report(result)


def _run_some(first: int, count: int, processes: int, aim: State | None) -> LayerResult:
    result = LayerResult(LAYER)
    began = time.monotonic()
    for part in _share_out(_chunks(first, first + count), processes, aim):
        _add(result, part)
    result.seconds = time.monotonic() - began
    return result


def _replay(seed: int, tail: int, aim: State | None) -> int:
    one = simulate(seed, aim=aim, tail=tail, keep_tail=True)
    print("\n".join(one.tail))
    digest = hashlib.sha256(one.trace.encode()).hexdigest()[:8]
    print(f"seed {seed}: {one.calls} calls, {one.sim_seconds:.1f} s, {one.saves} saves, {digest}")
    print(f"VIOLATION {one.failure}" if one.failure is not None else "every promise held")
    return 1 if one.failure is not None else 0


def _report(result: LayerResult) -> int:
    shown = ", ".join(f"{count} {name}" for name, count in result.explored.items())
    print(f"{shown} in {result.seconds:.0f} s; {len(result.violations)} violations")
    print("faults:", ", ".join(f"{k}: {n}" for k, n in sorted(result.coverage.faults.items())))
    rows = result.coverage.rows
    print(f"{len(rows)} rows of the table, {len(result.coverage.pairs)} state x event")
    for violation in result.violations[:20]:
        print(f"{violation.promise}: {violation.what[:300]}\n    {violation.replay}")
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
