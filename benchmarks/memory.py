"""Host memory of a save of state on the CPU that changes right behind ``save()``: both sides.

This is a trainer with an offloaded optimizer and no accelerator to load it to. The writer gets the
state by the fork alone, and the next step updates all of it in place, page by page out from under
the writer.

Measured for each side, in alternating pairs:

- The peak of the trainer and its writers together, also without the memory that the trainer alone
  had before the save. This is PSS: a page counts once, however many processes share it.
- The memory that only the writers hold: anonymous pages that the trainer does not map any more.
- The sum of the memory private to one writer process each. A page that two of a rank's writers
  share is private to neither.
- How much longer than usual the first step takes.
- The peak above the trainer before the save, for each byte of the state, also with the engines that
  have a writer process. That process counts as a whole.

Memory and time come from different saves, because the sampler disturbs the processes it watches.
Stock's manager process is not counted, but has a separate figure.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from benchmarks.measure import MS, Figure, Options, in_unit, ratio, timed
from benchmarks.sides import ManagerSide, Side, both_sides
from benchmarks.state import TrainingState
from ckptfsm import CheckpointManager, LatestN
from ckptfsm.megatron.compat import cpu_devices, process_group

_USUAL_STEPS = 3
_WARM_UP_PAIRS = 1
_EXTRA_TARGETS = {"eager": 1.05, "gated": 0.10}
_MIB = 1 << 20
_SAMPLER = Path(__file__).with_name("sampler.py")


@dataclass(frozen=True, slots=True)
class Peaks:
    """The sampler's readings during one save, in bytes; see ``sampler.py``.

    ``before`` is the trainer alone, ``helpers`` are processes that outlive a save.
    """

    before: int
    together: int
    writers_only: int
    private: int
    helpers: int
    samples: int


@dataclass(frozen=True, slots=True)
class Sample:
    """Two saves of one side: the memory of one, the steps of the other (seconds)."""

    peaks: Peaks
    usual_s: float
    first_s: float


class Sampler:
    """A sampler: a process that watches this one."""

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests = requests
        self._answers = answers

    def know(self) -> None:
        """Note the processes of now, which are no writers."""
        self._ask("know")

    def begin(self) -> None:
        """Watch from now on."""
        self._ask("begin")

    def end(self) -> Peaks:
        """The peaks since ``begin``."""
        return Peaks(**json.loads(self._ask("end")))

    def _ask(self, word: str) -> str:
        self._requests.write(f"{word}\n")
        self._requests.flush()
        return self._answers.readline()


@contextlib.contextmanager
def sampler() -> Iterator[Sampler]:
    """A sampler of this process; it ends with the context."""
    with subprocess.Popen(
        [sys.executable, "-I", str(_SAMPLER), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        yield Sampler(process.stdin, process.stdout)
        process.stdin.close()


def run(options: Options) -> list[Figure]:
    """Peaks of memory (MiB), excess of the first step (ms): both sides, and ratios. Engines."""
    state = TrainingState(options.state_bytes)
    samples: dict[str, list[Sample]] = {"stock": [], "ckptfsm": []}
    with both_sides(options.work, "fork") as sides, sampler() as watcher:
        for pair in range(_WARM_UP_PAIRS + options.pairs):
            for side in sides if pair % 2 == 0 else reversed(sides):
                sample = _measure(side, 2 * pair + 1, state, options.poll_interval_s, watcher)
                if pair >= _WARM_UP_PAIRS:
                    samples[side.name].append(sample)
    extra = {
        "stock": [_above(sample.peaks) for sample in samples["stock"]],
        "fork": [_above(sample.peaks) for sample in samples["ckptfsm"]],
    }
    with cpu_devices(), process_group(), sampler() as watcher:
        for engine in ("eager", "gated"):
            extra[engine] = [
                _above(_peaks_with(engine, options, state, watcher)) for _ in range(options.pairs)
            ]
    return [
        *_figures(samples["ckptfsm"], samples["stock"]),
        *(_per_byte(name, sizes, options.state_bytes) for name, sizes in extra.items()),
    ]


def _peaks_with(engine: str, options: Options, state: TrainingState, watcher: Sampler) -> Peaks:
    """The memory of a save above the trainer without a manager, after an earlier save.

    The writer process starts before the samples: until its ``exec``, it has all memory of the trainer.
    A copy that the trainer keeps from the earlier save counts.
    """
    root = options.work / engine
    watcher.know()
    watcher.begin()
    before = watcher.end().before
    with CheckpointManager(root, retention=LatestN(1), engine=engine) as manager:
        side = ManagerSide(root, manager, engine)
        _save(side, 1, state, options.poll_interval_s)
        watcher.begin()
        _save(side, 2, state, options.poll_interval_s)
        peaks = watcher.end()
    shutil.rmtree(root)
    os.sync()
    return replace(peaks, before=before)


def _measure(
    side: Side, step: int, state: TrainingState, poll_interval_s: float, watcher: Sampler
) -> Sample:
    """The memory of the save of ``step``, and the steps around the next one."""
    watcher.know()
    watcher.begin()
    _save(side, step, state, poll_interval_s)
    peaks = watcher.end()
    side.clear()
    usual_s = statistics.median(timed(state.update) for _ in range(_USUAL_STEPS))
    first_s = _save(side, step + 1, state, poll_interval_s)
    side.clear()
    return Sample(peaks, usual_s, first_s)


def _save(side: Side, step: int, state: TrainingState, poll_interval_s: float) -> float:
    """Save until loadable. Returns the seconds of the step right behind ``save()``."""
    side.save(step, state.sharded(step))
    side.before_update()
    first_s = timed(state.update)
    while not side.poll():
        time.sleep(poll_interval_s)
    return first_s


def _figures(ours: list[Sample], stock: list[Sample]) -> list[Figure]:
    figures: list[Figure] = []
    for name, size in (
        ("trainer + writers, peak PSS", _together),
        ("above the trainer before the save", _above),
        ("held by the writers only, peak", _writers_only),
        ("private to one writer each, peak", _private),
    ):
        here, there = [size(s.peaks) for s in ours], [size(s.peaks) for s in stock]
        figures += [_mib(f"{name}, stock", there), _mib(f"{name}, ckptfsm", here)]
        if min(there) > 0:  # a small state may be written between two samples
            figures.append(ratio(f"{name}, ckptfsm / stock", here, there))
    for side, samples in (("stock", stock), ("ckptfsm", ours)):
        excess = [s.first_s - s.usual_s for s in samples]
        figures += [
            in_unit(f"usual step, {side}", "ms", MS, [s.usual_s for s in samples]),
            in_unit(f"excess of the first step, {side}", "ms", MS, excess),
        ]
    firsts = [s.first_s for s in ours], [s.first_s for s in stock]
    figures.append(ratio("first step, ckptfsm / stock", *firsts))
    figures.append(_mib("stock's manager process, PSS", [s.peaks.helpers for s in stock]))
    return figures


def _together(peaks: Peaks) -> int:
    return peaks.together


def _above(peaks: Peaks) -> int:
    return peaks.together - peaks.before


def _writers_only(peaks: Peaks) -> int:
    return peaks.writers_only


def _private(peaks: Peaks) -> int:
    return peaks.private


def _per_byte(name: str, sizes: Sequence[int], state_bytes: int) -> Figure:
    title = f"extra peak memory / state, {name}"
    samples = tuple(size / state_bytes for size in sizes)
    return Figure(title, "ratio", samples, _EXTRA_TARGETS.get(name))


def _mib(name: str, sizes: Sequence[int]) -> Figure:
    return Figure(name, "MiB", tuple(size / _MIB for size in sizes))
