"""Everything that a change has to pass, lane by lane, with the seconds of each: `.ci/run`.

What fails most often and soonest goes first. Behind the seconds of a lane stand those of the last good
run, from ``seconds.json`` (of targets: ``integrations/ran.json``). After ``LIMIT_S``, a lane that took
more than its share of processor seconds ends the run, and is named. A slow machine slows all lanes
alike, and gets until ``LAST_S``.

    python tests/ci.py [--write]     --write: after a good run, its seconds are those of seconds.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from lanes import note

ROOT = Path(__file__).resolve().parents[1]
SECONDS = ROOT / "tests" / "seconds.json"
RAN = ROOT / "tests" / "integrations" / "ran.json"
LIMIT_S = 45 * 60.0
LAST_S = 80 * 60.0
LANES: Mapping[str, tuple[str, ...]] = {
    "environment": (".venv/.installed",),
    "lint": ("lint",),
    "tests": ("tests",),
    "sample": ("sample",),
    "gate tests": ("gate-tests",),
    "layers": ("layers",),
    "targets": ("test-integrations", "DUE=1", "COMPLETE=1"),
}
MORE = 2.0  # times its share, and
MORE_S = 30.0  # so many seconds on top, is more than its share
LONG_S = 10.0  # shorter lanes do not tell how fast a machine is
ENDING_S = 20.0  # for pytest and the layers to end what they started

Seconds = tuple[float, float]  # of wall, of all processors


def usual_seconds() -> dict[str, Seconds]:
    """What each lane, layer and target took in the last good run."""
    ran = json.loads(RAN.read_text())
    targets = {
        f"targets: {n}": (row["run_s"], row.get("processor_s", 0.0)) for n, row in ran.items()
    }
    lanes = {name: (wall, used) for name, (wall, used) in json.loads(SECONDS.read_text()).items()}
    return {**targets, **lanes}


def pace_of(took: Mapping[str, Seconds], usual: Mapping[str, Seconds]) -> float:
    """How many times the usual processor seconds the lanes that have ended took: the median."""
    long = [name for name in took if name in usual and took[name][1] and usual[name][1] >= LONG_S]
    return statistics.median_low(took[n][1] / usual[n][1] for n in long) if long else 1.0


def grown(took: Mapping[str, Seconds], usual: Mapping[str, Seconds]) -> list[str]:
    """The lanes that took more than their share of processor seconds, and how much.

    Wall is not compared: it tells how busy the machine was.
    """
    pace = pace_of(took, usual)
    return sorted(
        f"{name}: {took[name][1]:.0f} processor s, its share is {pace * usual[name][1]:.0f}"
        for name in took.keys() & usual.keys()
        if usual[name][1] and took[name][1] > MORE * pace * usual[name][1] + MORE_S
    )


class Run:
    """The lanes so far. ``told``: where their parts tell their seconds, see ``lanes.note``."""

    def __init__(self, told: Path) -> None:
        self.began = time.monotonic()
        self.usual = usual_seconds()
        self._told = told
        self._seen: dict[str, float] = {}  # since when a part, or a lane, is known
        self._shown: set[str] = set()

    def took(self) -> dict[str, Seconds]:
        """The seconds of all that has ended, and the wall so far of what has not."""
        took: dict[str, Seconds] = {}
        for line in self._told.read_text().splitlines():
            name, *seconds = json.loads(line)
            since = self._seen.setdefault(name, time.monotonic())
            took[name] = (seconds[0], seconds[1]) if seconds else (time.monotonic() - since, 0.0)
        return took

    def lane(self, name: str, arguments: tuple[str, ...]) -> int:
        """Run a lane to its end, or to the end of our patience: its exit code."""
        note(name)
        began, used = time.monotonic(), _used_by_children()
        command = [os.environ.get("MAKE", "make"), "--no-print-directory", *arguments]
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        try:
            code = self._wait(process)
        finally:
            _end(process)
        note(name, time.monotonic() - began, _used_by_children() - used)
        self._show()
        return code

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        said = False
        while True:
            try:
                return process.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                took, gone = self.took(), time.monotonic() - self.began
            if gone >= LAST_S or (gone >= LIMIT_S and grown(took, self.usual)):
                return self._stop(gone)
            if gone >= LIMIT_S and not said:
                said = True
                print(f"=== {gone / 60:.0f} min: no lane took more than its share. {self._pace()}")

    def _stop(self, gone: float) -> int:
        running = [name for name, seconds in self.took().items() if not seconds[1]]
        names = grown(self.took(), self.usual) or [f"none; {name} was running" for name in running]
        print(f"=== STOPPED after {gone / 60:.0f} min. {self._pace()} Grown:", *names, sep="\n    ")
        return 1

    def _pace(self) -> str:
        return (
            f"Lanes take {pace_of(self.took(), self.usual):.1f} times the usual processor seconds."
        )

    def _show(self) -> None:
        """A line for each part, and each lane, that has ended since the last time."""
        for line in self._told.read_text().splitlines():
            name, *seconds = json.loads(line)
            if seconds and name not in self._shown:
                self._shown.add(name)
                usual = "usually {:.0f} and {:.0f}".format(*self.usual.get(name, (0, 0)))
                print(f"=== {name:34} {seconds[0]:7.1f} s {seconds[1]:7.1f} processor s  {usual}")
        sys.stdout.flush()


def _used_by_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _end(process: subprocess.Popen[bytes]) -> None:
    """As a Ctrl-C would, so that the tests and layers end what they started; then for good."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(timeout=ENDING_S)
            except subprocess.TimeoutExpired:
                continue


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # a lane has its own session, and is ended by us
        signal.signal(number, signal.default_int_handler)
    with tempfile.NamedTemporaryFile(prefix="ckptfsm-seconds-") as told:
        os.environ["CKPTFSM_SECONDS"] = told.name
        run = Run(Path(told.name))
        for name, arguments in LANES.items():
            if run.lane(name, arguments):
                print(f"=== FAILED: {name}")
                return 1
        took = run.took()
    more = grown(took, run.usual)
    print("=== all lanes passed", *(f"but see {line}" for line in more), sep="\n    ")
    if asked.write:
        lanes = [f"{json.dumps(n)}: {json.dumps(s)}" for n, s in took.items() if "targets" not in n]
        SECONDS.write_text("{\n " + ",\n ".join(lanes) + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
