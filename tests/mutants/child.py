"""Show a mutant to a layer, in a separate process that ``mutants.nursery`` forks.

Rules: the mutant is planted before anything of the library is imported, also in the interpreters
that a layer starts (``planted/sitecustomize.py``). Only a violation, a failed assertion or an error
that the library itself names counts; a layer that stumbles over the mutant in any other way has not
seen it.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
from pathlib import Path
from typing import Any, NoReturn

from mutants.catalogue import by_name
from mutants.loader import install

CONTROL = "control"
PLANTED = "CKPTFSM_MUTANT"
TESTS = "tests:"
SEEDS = "seeds:"
_MOST_CHARACTERS = 8_000
_FOLDER = Path(__file__).parents[1]


def find_test(name: str) -> str:
    """The path of ``test_x.py`` or ``test_x.py::test_name``: file names are unique below tests/.

    ``subject/name`` is a golden history of that subject.
    """
    if "/" in name and ".py" not in name:
        name = f"test_histories.py::test_history[{name}]"
    file, colons, test = name.partition("::")
    found = sorted(_FOLDER.rglob(file))
    if len(found) != 1:
        raise FileNotFoundError(f"{len(found)} files below tests/ are called {file}")
    return f"{found[0]}{colons}{test}"


def answer(name: str, layer: str, profile: str, out: int) -> NoReturn:
    """Write the layer's finding to ``out``, as a line of JSON, and end this process."""
    if name != CONTROL:
        install(by_name(name))
    judges = {TESTS: _judge_by_tests, SEEDS: _judge_by_seeds}
    found = judges.get(layer.partition(":")[0] + ":", _judge_by_layer)(layer, profile)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    found["cpu_s"] = sum(u.ru_utime + u.ru_stime for u in used)
    os.write(out, json.dumps({k: _short(v) for k, v in found.items()}).encode())
    os._exit(0)  # a mutant may have left threads behind that never end


def _short(value: Any) -> Any:
    """A string cut to a length that a pipe takes at once, even before it is read."""
    return value[:_MOST_CHARACTERS] if isinstance(value, str) else value


def _judge_by_layer(layer: str, profile: str) -> dict[str, Any]:
    """Run a layer. The keys of the answer:

    - ``saw``: the finding; ``replay``: how to see it again, in a copy with the mutant.
    - ``skipped``: why the layer did not look; ``broke``: how it stumbled.
    """
    name = layer if "." in layer else f"proof.{layer}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, name.rpartition(".")[0]):
            raise
        return {"skipped": "there is no such layer"}
    budget_type = importlib.import_module("proof.layer").Budget
    errors = importlib.import_module("ckptfsm.core.errors")
    try:
        result = module.run(budget_type(profile=profile, processes=1, stop_at_first=True))
    except (AssertionError, errors.CkptFsmError) as error:
        return {"saw": f"{type(error).__name__}: {error}"}
    except Exception as error:  # noqa: BLE001  # no other error is a finding
        return {"broke": f"{type(error).__name__}: {error}"}
    if result.violations:
        first = result.violations[0]
        return {"saw": f"{first.promise}: {first.what}", "replay": first.replay}
    return {"skipped": result.skipped} if result.skipped else {}


def _judge_by_seeds(layer: str, profile: str) -> dict[str, Any]:
    """``red``: the seeds of the simulation, out of ``seeds:1,2,3``, that violate something."""
    simulate = importlib.import_module("proof.sim").simulate
    seeds = [int(seed) for seed in layer.removeprefix(SEEDS).split(",")]
    return {"red": [seed for seed in seeds if simulate(seed).failure is not None]}


class _FirstFailure:
    """A pytest plugin that keeps the first test that failed."""

    def __init__(self) -> None:
        self.seen = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.seen:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message.splitlines()[0] if crash is not None else "failed"
            self.seen = f"{report.nodeid.rpartition('::')[2]}: {message}"


def _judge_by_tests(layer: str, profile: str) -> dict[str, Any]:
    import pytest

    try:
        files = [find_test(name) for name in layer.removeprefix(TESTS).split(",")]
    except FileNotFoundError as error:
        return {"skipped": str(error)}
    first = _FirstFailure()
    arguments = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not megatron",
        f"--rootdir={_FOLDER.parent}",
    ]
    code = pytest.main([*arguments, *files], plugins=[first])
    if code == pytest.ExitCode.TESTS_FAILED:
        return {"saw": first.seen}
    return {} if code == pytest.ExitCode.OK else {"broke": f"pytest ended with {code}"}
