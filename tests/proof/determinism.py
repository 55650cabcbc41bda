"""The fast layers, run again and again: the same trace every time, in any interpreter.

    PYTHONPATH=tests python -m proof.determinism

A fingerprint is a hash over everything a layer did, in order: each call of the simulation, each
transition of the exhaustive search, each event that Hypothesis offered to a checkpoint, each
corruption and hostile input with its outcome. Each re-run is a fresh interpreter with another
``PYTHONHASHSEED``, so that an order that comes from a set, an address or a clock shows.

Left out: the work of z3 (its amount is bounded, not its order), and the timing of real processes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from fieldbugs.catalogue import REPORTS
from fieldbugs.model import search as search_model
from profiles import profile

from ckptfsm.core.events import Event
from ckptfsm.core.lifecycle import Checkpoint
from proof.corruption import Bench, make_template
from proof.coverage import Coverage, watch_moves
from proof.exhaustive import SCOPES, Search
from proof.fuzz import TARGETS, attempt, attempt_root, hostile_root
from proof.inductive import agree, load_spec
from proof.layer import Budget, LayerResult, Violation, timed
from proof.sim import simulate
from proof.suites import SUITES

ROOT = Path(__file__).resolve().parents[2]
SEEDS = range(24)
STATES = 150  # of each scope of the exhaustive search
PATIENCE_S = 600.0  # for one re-run; one that takes longer is an error
INPUTS = 8  # of each target of the fuzzing
AGREEMENTS = 400
ON_A_REAL_DISK = frozenset({"plain values"})  # its manifests, and so its events, tell the time
EXAMPLES = 0.05  # of the examples that the suites run in the gate


class Trace(Coverage):
    """Coverage that also hashes every event offered to a checkpoint, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.hash = hashlib.blake2b(digest_size=16)

    def move(self, checkpoint: Checkpoint, event: Event) -> None:
        super().move(checkpoint, event)
        self.hash.update(f"{checkpoint.id} {checkpoint.state.value} {event}\n".encode())


def fingerprints() -> Iterator[tuple[str, str]]:
    """(layer, hash of its work), for each fast layer."""
    traces = [simulate(seed).trace for seed in SEEDS]
    yield "simulation", hashlib.blake2b("".join(traces).encode(), digest_size=16).hexdigest()
    for suite, (check, scale) in SUITES.items():
        if suite in ON_A_REAL_DISK:
            continue
        trace = Trace()
        with watch_moves(trace):
            check(settings=profile("pr", scale=scale * EXAMPLES, shrink=False))
        yield f"suite {suite}", trace.hash.hexdigest()
    for scope in SCOPES:
        search = Search(scope, STATES)
        search.run()
        yield f"exhaustive {scope.name}", search.fingerprint()
    bench = Bench([make_template("killed")])
    tried = [bench.trial(seed) for seed in range(20)]
    yield (
        "corruption",
        _digest([f"{c} {problem}" for c, problem in tried], sorted(bench.counts.items())),
    )
    yield "fuzz", _digest([*_fuzzed()])
    searched = [search_model(m) for report in REPORTS for m in (report.old, report.mended)]
    yield "fieldbugs", _digest(searched)
    trace = Trace()
    differing = list(agree(load_spec(), AGREEMENTS, trace))
    yield "inductive", _digest(differing, trace.hash.hexdigest())


def _fuzzed() -> Iterator[tuple[bytes, str]]:
    """Each hostile document and the answer of its reader, then whole roots."""
    for name, target in TARGETS.items():
        for seed in range(INPUTS):
            yield target.make(Random(f"{name} {seed}")), attempt(target, seed)
    for seed in range(INPUTS):
        yield repr(hostile_root(seed)).encode(), attempt_root(seed)


def _digest(*seen: object) -> str:
    return hashlib.blake2b(repr(seen).encode(), digest_size=16).hexdigest()


def run(budget: Budget) -> LayerResult:
    """Re-run 4 times in the gate, 20 times before a release, 1,000 times in a soak."""
    times = max(2, budget.pick(pr=4, nightly=20, release=20, soak=1000))  # one has no other
    result = LayerResult("determinism", {"re-runs": times})
    with ThreadPoolExecutor(budget.processes) as pool:
        runs = list(pool.map(_elsewhere, range(times)))
    result.explored["layers"] = len(runs[0])
    for layer in runs[0]:
        seen = {found[layer] for found in runs}
        if len(seen) != 1:
            what = f"{layer}: {times} runs gave {len(seen)} different traces"
            replay = "PYTHONPATH=tests python -m proof.determinism"
            result.violations.append(Violation("determinism", what, replay))
    return result


def _elsewhere(number: int) -> dict[str, str]:
    """The fingerprints as another interpreter, with another hash seed and directory, gives them."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONHASHSEED": str(number), "PYTHONPATH": paths}
    command = [sys.executable, "-m", "proof.determinism", "--print"]
    with tempfile.TemporaryDirectory() as scratch:
        ended = subprocess.run(
            command,
            env=environment,
            cwd=scratch,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
    if ended.returncode != 0:
        raise RuntimeError(f"re-run {number} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    found: dict[str, str] = json.loads(ended.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--print", action="store_true", help="this interpreter's fingerprints")
    if parser.parse_args().print:
        print(json.dumps(dict(fingerprints())))
        return 0
    result = timed(run, Budget())
    for violation in result.violations:
        print(violation.what)
    print(f"{result.explored} in {result.seconds:.1f} s")
    return 1 if result.violations else 0


if __name__ == "__main__":
    sys.exit(main())
