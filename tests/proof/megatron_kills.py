"""Real Megatron writers SIGKILLed at random bytes of their files, on a real disk.

A round is one root and two jobs of two ranks. In each job every other save is hit. A process dies
at a random byte of a random file of a random rank (shards, common state, planned metadata,
receipt): the one that writes, or the writer above it. The first job ends with a rank killed the
same way, the second starts from its remains. Between two hits the earlier step is loaded and
compared bit by bit, and the next save must be tracked. At the end the stock loader reads the tracked
step. Every other round saves states of torch, in DCP's own format.

Rules: bytes come from the round's seed, so a round can be run again. Nothing acknowledged is ever lost;
a hit save is never published.

    PYTHONPATH=tests python -m proof.megatron_kills
    PYTHONPATH=tests python -m proof.megatron_kills --seed 7
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "megatron"))

from cluster import (  # noqa: E402
    Cluster,
    ForkServer,
    Job,
    assert_complete,
    history_of,
    path_of,
    staging_of,
    steps_on_disk,
    tracked_step,
)

from ckptfsm.core.errors import CkptFsmError  # noqa: E402
from ckptfsm.core.lifecycle import State  # noqa: E402
from ckptfsm.testing.conformance import JournalViolation, assert_journal_conforms  # noqa: E402
from proof.coverage import Coverage  # noqa: E402
from proof.layer import Budget, LayerResult, Violation, timed  # noqa: E402
from proof.processes import file_system_of  # noqa: E402

KILLS = 25  # of a round
PATIENCE_S = 300.0  # for a job; a hang inside it meets another deadline
DYING_S = 10.0
IN_SHARDS = 0.7  # the part of the kills that hit a shard; the others hit what goes with it


def shots_of(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The hits on the two jobs of a round; the last one of the first job hits a whole rank."""
    chance = random.Random(seed)
    shots = [
        {
            "rank": chance.randrange(2),
            "shard": chance.random() < IN_SHARDS,
            "file": chance.random(),
            "byte": chance.random(),
            "victim": chance.choice(("process", "writer")),
        }
        for _ in range(KILLS)
    ]
    first = shots[: KILLS // 2 + 1]
    first[-1] = {**first[-1], "victim": "rank"}
    return first, shots[len(first) :]


class Round:
    """A root, its two jobs, and their words."""

    def __init__(self, cluster: Cluster, place: Path, seed: int) -> None:
        self.kills = 0
        self.journals = 0
        self.coverage = Coverage()
        self._cluster = cluster
        self._root = place / "root"
        self._told = place / "told"
        self._shots = shots_of(seed)
        self._torch = bool(seed % 2)
        self._judged = 0

    def run(self) -> None:
        """Raises ``AssertionError`` or an error of the library for a promise that did not hold."""
        self._told.touch()
        arguments = {"root": str(self._root), "told": str(self._told), "torch": self._torch}
        first, second = self._shots
        job = self._cluster.start("die_in_saves", shots=first, **arguments)
        killed = job.pids[first[-1]["rank"]]
        codes = dict(zip(job.pids, job.wait(PATIENCE_S), strict=True))
        self._nobody_is_left(job)
        assert codes[killed] == -signal.SIGKILL, f"F2: no rank was killed: {codes}\n{job.logs()}"
        self._judge(len(first) - 1)
        flying = history_of(self._root).ledger.in_flight()
        self.coverage.fault("F2", flying.state if flying is not None else None)
        self.kills += 1
        job = self._cluster.start("die_in_saves", shots=second, **arguments)
        results = job.results(PATIENCE_S)
        self._nobody_is_left(job)
        self.coverage.add(Coverage.from_json(results[0]["coverage"]))
        self._judge(len(second))
        assert staging_of(self._root) == [], "I8: a partial was left"
        step = tracked_step(self._root)
        assert step == results[0]["latest"], f"I2: {step} is tracked"
        directory = str(path_of(self._root, step))
        stock = "stock_load_of_torch" if self._torch else "stock_load"
        loaded = self._cluster.run(stock, directory=directory, step=step)
        assert loaded == [True, True], "I2: stock code does not load the tracked step"

    def _nobody_is_left(self, job: Job) -> None:
        """Writers and workers end with whoever forked them."""
        deadline = time.monotonic() + DYING_S
        while (left := job.living()) and time.monotonic() < deadline:
            time.sleep(0.01)  # the kernel is at it; bounded by the deadline
        self.coverage.fault("F29", None)
        assert not left, f"F29: {left} outlived their job"

    def _judge(self, survived: int) -> None:
        """The steps after a job: acknowledged ones, published ones, and those that were hit and
        ``survived``."""
        lines = [json.loads(line) for line in self._told.read_text().splitlines()]
        acknowledged = max(line["acknowledged"] for line in lines if "acknowledged" in line)
        failed = [line for line in lines if "failed" in line]
        tracked = tracked_step(self._root)
        assert tracked is not None, "I2: nothing is tracked"
        assert tracked >= acknowledged, f"I2: {tracked} is tracked, {acknowledged} was acknowledged"
        history_of(self._root)
        try:
            assert_journal_conforms(self._root)
        except JournalViolation as error:
            raise AssertionError(f"I11: {error}") from error
        self.journals += 1
        for step in steps_on_disk(self._root):
            assert_complete(self._root, step)
            assert step not in {line["failed"] for line in failed}, f"I3: {step} failed"
        new = [line for line in failed[self._judged :] if line["reason"] != "process_lost"]
        assert len(new) == survived, f"F1: {survived} saves should have failed: {new}"
        for line in new:
            assert "SIGKILL" in line["detail"], f"F1: failed otherwise: {line}"
            self.coverage.fault("F1", State(line["state"]))
        self._judged = len(failed)
        self.kills += survived


def run(budget: Budget) -> LayerResult:
    """Rounds of 25 kills: 2 in ``pr``, 40 in the soak and until its hours are over."""
    result = LayerResult("megatron_kills")
    rounds = budget.pick(pr=2, nightly=8, release=8, soak=40)
    deadline = time.monotonic() + budget.hours * 3600
    seed = 0
    with _server() as server:
        while seed < rounds or (budget.profile == "soak" and time.monotonic() < deadline):
            play(server, seed, result)
            seed += 1
            if result.violations and budget.stop_at_first:
                break
    result.notes.append(f"{tempfile.gettempdir()} is {file_system_of(tempfile.gettempdir())}")
    return result


def play(server: ForkServer, seed: int, result: LayerResult) -> None:
    """Add a round to ``result``."""
    place = Path(tempfile.mkdtemp(prefix="ckptfsm-kills-"))
    try:
        with Cluster(server, place) as cluster:
            played = Round(cluster, place, seed)
            played.run()
    except (AssertionError, CkptFsmError) as error:
        named = re.match(r"[IF]\d+(?=: )", str(error))
        command = f"PYTHONPATH=tests python -m proof.megatron_kills --seed {seed}"
        promise = named[0] if named else "F1"
        result.violations.append(Violation(promise, str(error)[-4000:], command))
    finally:
        shutil.rmtree(place)
    explored = result.explored
    explored["rounds"] = explored.get("rounds", 0) + 1
    explored["kills"] = explored.get("kills", 0) + played.kills
    explored["journals"] = explored.get("journals", 0) + played.journals
    result.coverage.add(played.coverage)


@contextmanager
def _server() -> Iterator[ForkServer]:
    server = ForkServer(HERE / "real_megatron.py")
    try:
        yield server
    finally:
        server.close()


def main() -> int:
    """Run the layer, or one round. Exit code 1 if anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m proof.megatron_kills")
    parser.add_argument("--profile", default="pr", choices=["pr", "nightly", "release", "soak"])
    parser.add_argument("--hours", type=float, default=0.0)
    parser.add_argument("--stop-at-first", action="store_true")
    parser.add_argument("--seed", type=int)
    asked = parser.parse_args()
    result = LayerResult("megatron_kills")
    if asked.seed is not None:
        with _server() as server:
            play(server, asked.seed, result)
    else:
        budget = Budget(asked.profile, stop_at_first=asked.stop_at_first, hours=asked.hours)
        result = timed(run, budget)
    print(f"{result.layer}: {result.seconds:.1f} s, {result.explored}, {result.notes}")
    for violation in result.violations:
        print(f"VIOLATION {violation.promise}: {violation.what}\n  {violation.replay}")
    print(f"{len(result.violations)} violations; faults {dict(result.coverage.faults)}")
    return int(bool(result.violations))


if __name__ == "__main__":
    raise SystemExit(main())
