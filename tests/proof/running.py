"""Runs layers, each in a fresh interpreter: as many at once as CPUs allow, and one more.

A layer waits now and then, for a disk, a process or its last worker; the one more takes what is
idle. In the profiles of `make test` and `make gate` a layer waits for no disk: what it writes lies in
memory, where there is room. In a soak the layers that go on begin last, side by side, and each of them
gets all the hours asked for. Earlier layers come on top.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from lanes import note

from proof.catalogue import LAYERS, command_of
from proof.layer import SMALL, Budget, LayerResult, Violation, timed


def run_one(name: str, budget: Budget) -> LayerResult:
    """Run a layer here. A layer that breaks is a violation, with the traceback."""
    logging.disable(logging.CRITICAL)  # millions of refusals and failures are the point
    try:
        module = importlib.import_module(LAYERS[name].module)
        result = timed(module.run, budget)
    except Exception:  # the report has to name it, whatever it is
        text = traceback.format_exc()
        result = LayerResult(name)
        result.violations.append(Violation("", text, command_of(name, budget.profile)))
    finally:
        logging.disable(logging.NOTSET)
    result.layer = name
    return result


@dataclass
class Running:
    name: str
    cpus: int
    process: subprocess.Popen[bytes]
    file: Path
    began: float


def run_all(names: list[str], budget: Budget, scratch: Path) -> list[LayerResult]:
    """Run the layers, and return their results in the order given."""
    soak = budget.profile == "soak"
    waiting = sorted(names, key=lambda name: soak and LAYERS[name].goes_on)
    running: list[Running] = []
    results: dict[str, LayerResult] = {}
    try:
        while waiting or running:
            free = budget.processes + 1 - sum(r.cpus for r in running)
            fitting = next((n for n in waiting if _cpus(n, budget) <= free), None)
            if fitting is not None:
                waiting.remove(fitting)
                running.append(_start(fitting, budget, scratch))
                continue
            done = _wait_for_one(running, budget)
            running.remove(done)
            results[done.name] = result = _result_of(done, budget)
            if budget.profile == "pr":
                note(f"layers: {done.name}", result.seconds, result.processor_s)
            print(_line(result), flush=True)
    finally:
        for each in running:  # a Ctrl-C reaches only us
            _end(each)
    return [results[name] for name in names]


def _cpus(name: str, budget: Budget) -> int:
    return min(LAYERS[name].cpus, budget.processes)


def _start(name: str, budget: Budget, scratch: Path) -> Running:
    file, cpus = scratch / f"{name}.json", _cpus(name, budget)
    values = dataclasses.replace(budget, processes=cpus)
    command = [sys.executable, "-m", "proof", "--profile", values.profile, "--only", name]
    command += ["--hours", str(values.hours), "--cpus", str(cpus), "--result", str(file)]
    in_memory = {"TMPDIR": str(scratch)} if values.profile in SMALL else {}
    if values.profile == "pr":
        note(f"layers: {name}")
    process = subprocess.Popen(command, env={**os.environ, **in_memory}, start_new_session=True)
    return Running(name, cpus, process, file, time.monotonic())


def _wait_for_one(running: list[Running], budget: Budget) -> Running:
    """The first that ends; one that runs beyond its limit is ended, and left no result."""
    goes_on_s = budget.hours * 3600 if budget.profile == "soak" else 0.0
    while True:
        for each in running:
            try:
                each.process.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                limit_s = LAYERS[each.name].limit_s + goes_on_s
                if time.monotonic() - each.began < limit_s:
                    continue
                _end(each)
            return each


def _end(running: Running) -> None:
    """End a layer with everything it started."""
    os.killpg(running.process.pid, signal.SIGKILL)
    running.process.wait()


def _result_of(done: Running, budget: Budget) -> LayerResult:
    if done.file.exists():
        return LayerResult.from_json(json.loads(done.file.read_text()))
    result = LayerResult(done.name, seconds=time.monotonic() - done.began)
    what = f"the layer ended with exit code {done.process.returncode} and left no result"
    result.violations.append(Violation("", what, command_of(done.name, budget.profile)))
    return result


def _line(result: LayerResult) -> str:
    found = f"{len(result.violations)} VIOLATIONS" if result.violations else "ok"
    hidden = result.skipped and not result.violations
    state = f"skipped: {result.skipped}" if hidden else found
    took = f"{result.seconds:7.1f} s {result.processor_s:7.1f} processor s"
    return f"{result.layer:16} {took}  {state}"
