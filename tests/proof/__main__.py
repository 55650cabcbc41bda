"""Runs the layers of proof and prints one table: the amounts explored, the times, the violations.

    PYTHONPATH=tests python -m proof [--profile PROFILE] [--only LAYER ...] [--hours H]

Each layer runs in a fresh interpreter, as many at once as there are CPUs for, and one more. The run
fails if a layer finds a violation or breaks, or if a fault strikes where ``proof.faults`` says that
it cannot. When all layers of the profile ran, it also fails for a row of the table, a state x event
or an applicable fault x state that no layer exercised. ``--write`` makes build/proof.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from proof.catalogue import LAYERS, layers_of
from proof.layer import SMALL, Budget, LayerResult, Profile, in_memory
from proof.report import document, exercised, impossible, table, unexercised
from proof.running import run_all, run_one

ROOT = Path(__file__).resolve().parent.parent.parent


def main() -> int:
    asked = parse()
    budget = Budget(asked.profile, asked.cpus, hours=asked.hours)
    if asked.result:  # one layer, for the interpreter that asked
        result = run_one(asked.only[0], budget)
        Path(asked.result).write_text(json.dumps(result.as_json()))
        return 0
    names = asked.only or layers_of(asked.profile)
    memory = in_memory() if asked.profile in SMALL else None
    # What a layer left running may write there: then the removal raises.
    with tempfile.TemporaryDirectory(prefix="proof-", dir=memory) as scratch:
        os.chmod(scratch, 0o755)  # a test of the mutants may let another user in
        results = run_all(names, budget, Path(scratch))
        print(table(results))
        for result in results:
            show_violations(result)
    ok = not any(result.violations for result in results)
    whole = not asked.only and asked.profile not in ("sample", "soak")  # parts of the whole
    ok = judge_coverage(results, asked.profile, whole=whole) and ok
    if asked.write:
        page = ROOT / "build" / "proof.md"
        page.parent.mkdir(exist_ok=True)
        page.write_text(document(results, asked.profile))
    print("all promises held" if ok else "PROOF FAILED")
    return 0 if ok else 1


def judge_coverage(results: Sequence[LayerResult], profile: str, *, whole: bool) -> bool:
    """Say which pairs no layer exercised, if the ``whole`` profile ran, and those that the table of
    faults denies."""
    wrong = [f"CANNOT HAPPEN, AND DID: {line}" for line in impossible(results)]
    if whole:
        print(exercised(results, profile))
        wrong += [f"NOT EXERCISED: {line}" for line in unexercised(results, profile)]
    print("\n".join(wrong), end="\n" if wrong else "")
    return not wrong


def show_violations(result: LayerResult) -> None:
    for violation in result.violations:
        print(f"\nVIOLATED {violation.promise} in {result.layer}: {violation.what}")
        print(f"    again: {violation.replay}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="proof", description=__doc__)
    parser.add_argument("--profile", choices=get_args(Profile), default="pr")
    parser.add_argument("--only", nargs="+", choices=tuple(LAYERS), default=[])
    parser.add_argument("--hours", type=float, default=1.0, help="how long a soak goes on")
    # No more than 4: a container may be allowed a part of the processors that it sees.
    parser.add_argument("--cpus", type=int, default=min(4, max(2, os.cpu_count() or 2)))
    parser.add_argument("--write", action="store_true", help="put the table into build/proof.md")
    parser.add_argument("--result", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
