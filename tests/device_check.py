"""All that only a machine with a GPU can show, in one run: ``make device-check``.

    python tests/device_check.py --fetch        fill build/wheels, on a machine with a package index
    python tests/device_check.py [--out DIR]    check and measure; a table, and DIR/device-check.json

It runs bare: it needs Python 3.12 with torch, numpy, pytest and hypothesis, no network and no install.
Everything else comes from the wheels; another Python uses what it has. Without a GPU a stand-in is used
where there is one, and all else says that it needs a GPU. Each section is a process of its own. A test
that hangs is killed, and costs its row alone. All of it ends within nine minutes.

This module is also a plugin of the pytest that it starts, which notes each test as it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WHEELS, WORK = ROOT / "build" / "wheels", ROOT / "build" / "device"
WANTED = (3, 12)
PACKAGES = (
    "megatron-core",
    "pydantic",
    "pydantic_core",
    "annotated-types",
    "typing-inspection",
    "typing_extensions",
    "transitions",
    "six",
    "isal",
    "psutil",
    "xxhash",
)
TAGS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
TOTAL_S, ROUNDS_S, STUCK_S = 520.0, 100.0, 90.0
PEERS = 0.6  # of the time that is left may pass for figures beside peers, which can fail or hang
TESTS = (
    ("tests/unit/megatron/test_device_copies.py", "tests/megatron/test_megatron_device.py"),
    ("tests/megatron/test_megatron_device_jobs.py",),
)
LABELS = (  # of the rows, by the names of tests: the first that fits
    ("bit_for_bit.*gpt", "GPT, bf16, distributed optimizer, NCCL: SIGKILL, resumed bit for bit"),
    ("bit_for_bit.*fsdp2", "FSDP2, NCCL: SIGKILL, resumed bit for bit"),
    ("bit_for_bit.*offloaded", "optimizer in shared host memory: SIGKILL, resumed bit for bit"),
    ("early_step|change_before", "early changes are found: foreach, fused"),
    ("graph", "CUDA graph captured and replayed beside a save"),
    ("leave_no_memory|arena_under_copies", "50 saves leave no device memory and no pinned memory"),
    ("pinned_memory_the_host|full_device|takes_most", "memory that the driver refuses"),
    ("dead_writer|writer_keeps", "writer killed or stopped while copies run"),
    ("", "other tests on the fake and on CUDA"),
)
GPU, MISSING = "cuda", "needs a GPU"
PROBE = """
import json, os, platform, torch
from importlib.metadata import version
about = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
         "megatron-core": version("megatron-core"), "kernel": platform.release(),
         "cores": os.cpu_count(), "gpu": None}
if torch.cuda.is_available():
    about["gpu"] = torch.cuda.get_device_name()
    about["gpu_bytes"] = torch.cuda.get_device_properties(0).total_memory
print(json.dumps(about))
"""


@dataclass
class Row:
    """A line of the table. ``good`` is None where nothing is promised, or nothing could be seen."""

    name: str
    result: str
    target: str = ""
    good: bool | None = None
    details: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------ the plugin of pytest


def pytest_runtest_logstart(nodeid: str, location: object) -> None:
    _note(nodeid, "begun", "")


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        crash = getattr(getattr(reason, "reprcrash", None), "message", reason)
        _note(report.nodeid, report.outcome, str(crash or "").removeprefix("Skipped: "))


def _note(nodeid: str, outcome: str, why: str) -> None:
    with Path(os.environ["CKPTFSM_DEVICE_ROWS"]).open("a") as file:
        file.write(json.dumps([nodeid, outcome, why[:500]]) + "\n")


# ------------------------------------------------------------------------------------- the sections


class Check:
    """One run, below ``out``. ``end``: when everything has to have ended, by the monotonic clock."""

    def __init__(self, out: Path, place: str | None) -> None:
        self.out, self.end = out, time.monotonic() + TOTAL_S
        for place_of in (out, WORK):
            place_of.mkdir(parents=True, exist_ok=True)
        paths = [*map(str, self._installed()), str(ROOT), str(ROOT / "tests")]
        plain = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # whatever else is installed there
        self.environment = {**os.environ, **plain, "PYTHONPATH": os.pathsep.join(paths)}
        probe = [sys.executable, "-W", "ignore", "-c", PROBE]
        told = subprocess.run(probe, env=self.environment, cwd=ROOT, stdout=-1, check=True).stdout
        self.about: dict[str, Any] = json.loads(told.splitlines()[-1])
        self.place = place or (GPU if self.about["gpu"] else "cpu")

    def _installed(self) -> list[Path]:
        """The wheels, installed for this run; nothing for a Python that they are not for."""
        site, wheels = WORK / "site", sorted(WHEELS.glob("*.whl"))
        if sys.version_info[:2] != WANTED or not wheels:
            print("no wheels for this Python: what is installed is used", file=sys.stderr)
            return []
        _remove(site)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        how = ["--no-index", "--no-deps", "--no-compile", "--target", str(site)]
        subprocess.run([*pip, *how, *map(str, wheels)], check=True)
        return [site]

    def run(self, name: str, command: list[str], watched: Path | None, end: float) -> str:
        """Run a section, with its output in a file, until ``end``. Returns "" or why it was killed."""
        log = self.out / f"{name}.log"
        into = {**self.environment, "CKPTFSM_DEVICE_ROWS": str(watched)}
        with log.open("a") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, env=into, stdout=file, stderr=file, start_new_session=True
            )
            try:
                while True:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(0.2)
                        return ""
                    if time.monotonic() > end:
                        return "its time was up"
                    if watched and time.time() - watched.stat().st_mtime > STUCK_S:
                        return f"it did not end in {STUCK_S:.0f} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def tests(self, number: int) -> dict[str, tuple[str, str]]:
        """The outcome of each test of a section, and why. Begins anew behind a test that hangs."""
        name, rows = f"tests{number}", self.out / f"tests{number}.rows"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "device_check", *TESTS[number]]
        command += ["-p", "no:cacheprovider", *(["-k", "not cpu"] if self.place == GPU else [])]
        rows.write_text("")
        (self.out / f"{name}.log").unlink(missing_ok=True)
        while True:
            seen = self._seen(rows)
            skips = [f"--deselect={test}" for test in seen]
            rows.touch()
            killed = self.run(name, [*command, *skips], rows, self.end)
            found = self._seen(rows)
            hung = [test for test, (outcome, _) in found.items() if outcome == "begun"]
            for test in hung:
                with rows.open("a") as file:
                    why = killed or "the process of pytest died"
                    file.write(json.dumps([test, "failed", why]) + "\n")
            if not hung or time.monotonic() > self.end:
                return self._seen(rows)

    def _seen(self, rows: Path) -> dict[str, tuple[str, str]]:
        lines = map(json.loads, rows.read_text().splitlines())
        return {test: (outcome, why) for test, outcome, why in lines}

    def figures(self, size: int | None, *, alone: bool = False) -> dict[str, Any] | None:
        """The figures of the benchmark, as its JSON; None if it did not end well."""
        left_s = (self.end - time.monotonic()) * (1 if alone else PEERS)
        most = shutil.disk_usage(WORK).free // 6 >> 20 << 20
        wanted = size or min(8 << 30 if self.place == GPU else 64 << 20, most)
        pairs = "6" if self.place == GPU else "2"
        name = "figures-alone" if alone else "figures"
        work, log = WORK / name, self.out / f"{name}.log"
        _remove(work)
        work.mkdir(parents=True)
        log.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks", "--only", "device", "--json"]
        command += ["--device", self.place, "--bytes", str(wanted), "--pairs", pairs]
        command += ["--within", str(min(ROUNDS_S, left_s / 3)), "--dir", str(work)]
        command += ["--alone"] if alone else []
        self.run(name, command, None, time.monotonic() + left_s)
        _remove(work)
        text = log.read_text()
        begin = text.find('{\n "environment"')
        if begin < 0:
            return None
        found: dict[str, Any] = json.JSONDecoder().raw_decode(text[begin:])[0]
        return found


def _remove(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)


# ---------------------------------------------------------------------------------------- the table


def rows_of(tests: dict[str, tuple[str, str]]) -> list[Row]:
    """A row for each label."""
    by_label: dict[str, list[tuple[str, str, str]]] = {label: [] for _, label in LABELS}
    for test, (outcome, why) in tests.items():
        label = next(label for words, label in LABELS if re.search(words, test.rpartition("::")[2]))
        by_label[label].append((test, MISSING if MISSING in why else outcome, why))
    rows = []
    for label, found in by_label.items():
        count = Counter(outcome for _, outcome, _ in found)
        said = ", ".join(f"{n} {outcome}" for outcome, n in sorted(count.items())) or "did not run"
        failed = [f"{test}: {why}" for test, outcome, why in found if outcome == "failed"]
        good = None if not failed and not count["passed"] and found else bool(found and not failed)
        rows.append(Row(label, said, "all pass", good, failed))
    return rows


def rows_of_figures(report: dict[str, Any] | None, place: str) -> list[Row]:
    """A row for each figure. Those of a stand-in meet no target, and miss none."""
    if report is None:
        return [Row("figures", "did not end: see figures-alone.log", good=False)]
    rows = []
    for each in report["figures"]:
        low, high = min(each["samples"]), max(each["samples"])
        result = f"{each['median']:.4g} {each['unit']} ({low:.4g} to {high:.4g})"
        target = "" if each["target"] is None else f"at most {each['target']:.4g}"
        rows.append(Row(each["name"], result, target, each["met"] if place == GPU else None))
    if not any("copies / plain" in row.name for row in rows):
        rows.append(Row("time of a save's copies / plain", MISSING))
    return rows


def table(rows: list[Row], place: str) -> str:
    words = {None: "", True: "yes" if place == GPU else "by a stand-in", False: "NO"}
    cells = [("check or figure", "result", "target", "met")]
    cells += [(row.name, row.result, row.target, words[row.good]) for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(4)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in cells]
    lines += [f"FAILED {detail.splitlines()[0]}" for row in rows for detail in row.details]
    return "\n".join(line.rstrip() for line in lines)


def check(out: Path, place: str | None, size: int | None) -> int:
    """Returns 1 if a check failed. A missed target is a figure, not a failure."""
    began = time.monotonic()
    run = Check(out, place)
    seen: dict[str, tuple[str, str]] = {}
    for number in range(len(TESTS)):
        seen |= run.tests(number)
    checks, beside = rows_of(seen), run.figures(size)
    report = beside or run.figures(size, alone=True)
    rows = checks + rows_of_figures(report, run.place)
    if beside is None:
        rows.append(Row("figures beside peers", "did not end: see figures.log", good=False))
    about = {**run.about, "stand_in": run.place != GPU, "seconds": round(time.monotonic() - began)}
    for name, value in about.items():
        print(f"{name}: {value}")
    print(f"\n{table(rows, run.place)}", flush=True)
    written = {"about": about, "rows": [vars(row) for row in rows], "tests": seen}
    (out / "device-check.json").write_text(json.dumps({**written, "figures": report}, indent=1))
    return int(beside is None or any(row.good is False for row in checks))


def pins() -> list[str]:
    """``PACKAGES`` with the versions of constraints.txt for the newest Python."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [line.partition(";")[0].strip() for line in lines if "python_version <" not in line]
    return [pin for pin in pinned if pin.partition("==")[0] in PACKAGES]


def fetch() -> int:
    """Fill the folder of wheels."""
    asked = pins()
    _remove(WHEELS)
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    how = ["--only-binary=:all:", "--python-version", ".".join(map(str, WANTED))]
    how += [word for tag in TAGS for word in ("--platform", tag)]
    done = subprocess.run([*pip, "--quiet", *how, "--dest", str(WHEELS), *asked])
    if done.returncode == 0:
        size = sum(wheel.stat().st_size for wheel in WHEELS.iterdir())
        print(f"{len(asked)} wheels, {size / (1 << 20):.1f} MiB in {WHEELS}")
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--fetch", action="store_true")
    parser.add_argument("--out", type=Path, default=WORK)
    parser.add_argument("--device", choices=("cpu", GPU), help="default: the GPU, if there is one")
    parser.add_argument("--bytes", type=int, help="of the state that is measured")
    given = parser.parse_args()
    return fetch() if given.fetch else check(given.out.resolve(), given.device, given.bytes)


if __name__ == "__main__":
    sys.exit(main())
