"""The cost of one save for its coordinator, against the number of ranks.

Measured: a whole save, from the proposals of all ranks to tracked, with the real coordinator, its
client, its journal and the real disk. The ranks are simulated: many in one process, which sends
each rank's messages as pickles and writes each rank's receipt and shard (see ``scale_ranks``).
Coordinator and ranks are fresh processes for every number of ranks, so that each has its peak of
memory.

Included: the messages of the ranks are unpickled, and ``.metadata`` is written for one tensor that
all ranks share. Left out: megatron-core's plan, whose cost is that of a stock save, and the import of
megatron-core. The plans of DCP's own format are measured by themselves, see ``scale_plans``.

Seconds are the processor time of the coordinator's process, with that of the kernel for it.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from benchmarks import scale_plans
from benchmarks.measure import Figure, Options
from benchmarks.scale_ranks import receive
from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.executor import ThreadExecutor
from ckptfsm.adapters.garbage import collection_paused
from ckptfsm.adapters.identity import this_process
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.coordinator.coordinator import Coordinator, CoordinatorOptions
from ckptfsm.core.layout import JOURNAL, MANIFEST, MEGATRON
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.requests import News, NothingInFlight
from ckptfsm.dcp.driver import StateDriver
from ckptfsm.ranks.coordinator_client import CoordinatorClient
from ckptfsm.ranks.proposal import agree

_STEP = 1
_TIMEOUT_S = 600.0
_LOOK_S = 0.005
_MIB = 1 << 20
_TARGET_RANKS, _TARGET_S, _TARGET_MIB = 100_000, 2.0, 1024.0
_STRAIGHT = 1.5  # times the growth of the ranks: more is no straight line


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one save. Seconds of processor time, MiB of peak RSS, bytes.

    ``finisher_s`` is the part of ``finish_s`` that makes ``.metadata``. ``start_mib`` is the memory
    before the save. ``sent_bytes`` and ``news_bytes`` are the messages from and to one rank.
    """

    ranks: int
    agree_s: float
    reports_s: float
    finish_s: float
    finisher_s: float
    wall_s: float
    start_mib: float
    peak_mib: float
    sent_bytes: float
    news_bytes: float
    manifest_bytes: int
    journal_bytes: int

    @property
    def total_s(self) -> float:
        return self.agree_s + self.reports_s + self.finish_s


def run(options: Options) -> list[Figure]:
    """Processor time, memory and bytes of one save, for each number of ranks."""
    costs = [_measure_apart(options.work / str(count), count) for count in options.ranks]
    figures = [figure for cost in costs for figure in _figures(cost)]
    for few, many in pairwise(costs):
        growth = (many.total_s / few.total_s) / (many.ranks / few.ranks)
        name = f"time per rank, {many.ranks} / {few.ranks} ranks"
        figures.append(Figure(name, "ratio", (growth,), _STRAIGHT))
    return [*figures, *scale_plans.run(max(options.ranks))]


def _figures(cost: Cost) -> list[Figure]:
    told = {
        "coordinator": ("s", cost.total_s, _TARGET_S),
        "of it: agree on the proposals": ("s", cost.agree_s, None),
        "of it: take the reports": ("s", cost.reports_s, None),
        "of it: finish and publish": ("s", cost.finish_s, None),
        "of that: make .metadata": ("s", cost.finisher_s, None),
        "until tracked, ranks included": ("s", cost.wall_s, None),
        "peak RSS": ("MiB", cost.peak_mib, _TARGET_MIB),
        "RSS before the save": ("MiB", cost.start_mib, None),
        "messages of a rank": ("bytes", cost.sent_bytes, None),
        "news for a rank": ("bytes", cost.news_bytes, None),
        "manifest": ("bytes", cost.manifest_bytes, None),
        "journal": ("bytes", cost.journal_bytes, None),
    }
    return [
        Figure(
            f"{cost.ranks} ranks, {name}",
            unit,
            (float(value),),
            target if cost.ranks == _TARGET_RANKS else None,
        )
        for name, (unit, value, target) in told.items()
    ]


def _measure_apart(root: Path, count: int) -> Cost:
    """Measure one save in a fresh process."""
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "benchmarks.scale",
            "--measure",
            str(root),
            str(count),
        ],
        stdout=subprocess.PIPE,
        timeout=_TIMEOUT_S,
        check=True,
    )
    return Cost(**json.loads(done.stdout))


# ------------------------------------------------------------------------------------- one process


class Ranks:
    """The transport of rank 0, whose other ranks are simulated. Counts the bytes of messages.

    ``ask`` names the next answer that all ranks give in an exchange.
    """

    rank = 0

    def __init__(self, root: Path, count: int) -> None:
        self.world_size = count
        self.asked: tuple[str, Any] | None = None
        self.sent = self.told = 0
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.scale_ranks", str(root), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def ask(self, name: str, argument: Any) -> None:
        """Let the ranks work; their messages come with the next ``gather``."""
        pipe = self._pipe(self._process.stdin)
        pickle.dump((name, argument), pipe)
        pipe.flush()
        self.asked = (name, argument)

    def any_flags(self, flags: Sequence[bool]) -> list[bool]:
        return list(flags)

    def gather(self, item: Any) -> list[Any] | None:
        """The messages of all ranks; rank 0 is simulated, too. None are sent without ``ask``."""
        if self.asked is None:
            return [item]
        self.asked = None
        messages = list(receive(self._pipe(self._process.stdout), self.world_size))
        self.sent += sum(map(len, messages))
        with collection_paused():  # as ``GlooTransport`` does
            return [pickle.loads(message) for message in messages]

    def broadcast(self, item: Any) -> Any:
        self.told += len(pickle.dumps(item))
        return item

    def close(self) -> None:
        self._pipe(self._process.stdin).close()
        self._pipe(self._process.stdout).close()
        self._process.wait(_TIMEOUT_S)

    def _pipe(self, pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe


@dataclass(slots=True)
class TimedFinisher:
    """The finisher of torch_dist parts, and the seconds of processor time that it took."""

    seconds: float = 0.0

    def __call__(
        self, planned: bytes, results: Sequence[Sequence[Any]], location: str
    ) -> Mapping[str, bytes]:
        began = time.process_time()
        made = StateDriver.finishers["torch_dist"](planned, results, location)
        self.seconds += time.process_time() - began
        return made


@dataclass(slots=True)
class Save:
    """Drives one save through the coordinator's client, as rank 0 does."""

    client: CoordinatorClient
    ranks: Ranks
    news: list[News] = field(default_factory=list)

    def request(self) -> AttemptId:
        """Agree on the proposals of all ranks, and ask the coordinator."""
        self.ranks.ask("propose", _STEP)
        proposals = self.ranks.gather(None)
        assert proposals is not None
        return self.client.ask(Coordinator.request, agree(proposals))

    def reported(self, name: str, of: AttemptId, state: State) -> None:
        """Make one exchange with the reports of all ranks, and wait for ``state``."""
        self.ranks.ask(name, of)
        self._take()
        self.wait(state)

    def wait(self, state: State) -> None:
        """Take news until ``state`` is reached; for the last state, until nothing is in flight."""
        while not self._is_over(state):
            time.sleep(_LOOK_S)
            if self.client.has_news:
                self._take()

    def _take(self) -> None:
        update = self.client.exchange([])
        if update.fatal is not None:
            raise update.fatal
        for number, news in update.news:
            self.client.taken = number + 1
            self.news.append(news)

    def _is_over(self, state: State) -> bool:
        moves = [news for news in self.news if not isinstance(news, NothingInFlight)]
        reached = [getattr(move, "dest", None) for move in moves]
        if State.FAILED in reached:
            raise AssertionError(f"the save failed: {moves[-1]}")
        return state in reached and (state is not State.TRACKED or self.news[-1] not in moves)


def measure(root: Path, count: int) -> Cost:
    """Take a save of ``count`` ranks from its proposals to tracked, in this process."""
    import_module("ckptfsm.megatron.torch_dist")  # as in a trainer that makes such parts
    ranks, finisher = Ranks(root, count), TimedFinisher()
    coordinator = Coordinator(
        PosixStorage(root),
        clock=SystemClock(),
        identity=this_process(),
        options=CoordinatorOptions(),
        finishers={"torch_dist": finisher},
        provenance={},
    )
    client = CoordinatorClient(ranks, _TIMEOUT_S, lambda: None)
    client.start(coordinator, ThreadExecutor())
    client.ask(Coordinator.open)
    save = Save(client, ranks)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    start, began = _memory("VmRSS"), time.perf_counter()
    times = [time.process_time()]
    of = save.request()
    times.append(time.process_time())
    save.reported("fork", of, State.FORKED)
    save.reported("write", of, State.SHARDS_WRITTEN)
    times.append(time.process_time())
    save.wait(State.TRACKED)
    times.append(time.process_time())
    wall, peak = time.perf_counter() - began, _memory("VmHWM")
    client.ask(Coordinator.close)
    client.stop()
    ranks.close()
    published = root / MEGATRON.published_name(_STEP)
    segment = next((root / JOURNAL).iterdir())
    agreed, reported, finished = (b - a for a, b in pairwise(times))
    return Cost(
        count,
        agreed,
        reported,
        finished,
        finisher.seconds,
        wall,
        start,
        peak,
        ranks.sent / count,
        ranks.told,
        (published / MANIFEST).stat().st_size,
        len(segment.read_bytes().rstrip(b"\n")),
    )


def _memory(key: str) -> float:
    """``VmRSS`` or ``VmHWM`` of this process, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = next(line for line in lines if line.startswith(f"{key}:"))
    return int(found.split()[1]) * 1024 / _MIB


def main(arguments: Sequence[str]) -> None:
    """Measure one save here, and print its cost."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale")
    parser.add_argument("--measure", nargs=2, metavar=("ROOT", "RANKS"), required=True)
    root, count = parser.parse_args(arguments).measure
    logging.getLogger("ckptfsm").setLevel(logging.ERROR)
    print(json.dumps(asdict(measure(Path(root), int(count)))))


if __name__ == "__main__":
    main(sys.argv[1:])
