"""Ranks of a job under Accelerate or Trainer, forked from a server that has imported both once."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

PATIENCE_S = 120.0
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["accelerate_job", "transformers_job"])


@dataclass
class Ranks:
    """The processes of one job, and where each leaves its words and its result."""

    place: Path
    processes: list[Any]

    def results(self) -> list[dict[str, Any]]:
        """Each rank's result; every rank must have ended well."""
        codes = self.codes()
        assert codes == [0] * len(codes), f"exit codes {codes}\n{self.words()}"
        return [json.loads((self.place / f"{rank}.json").read_text()) for rank in range(len(codes))]

    def words(self) -> str:
        """The end of what each rank said."""
        logs = sorted(self.place.glob("*.log"))
        return "\n".join(log.read_text(errors="replace")[-6000:] for log in logs)

    def codes(self) -> list[int]:
        for process in self.processes:
            process.join(PATIENCE_S)
            if process.exitcode is None:
                self.kill()
        return [process.exitcode for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


def start(place: Path, job: str, ranks: int, **arguments: Any) -> Ranks:
    """Start ``ranks`` processes that run ``job`` ("module.function") with ``arguments``."""
    place.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        _CONTEXT.Process(target=_run, args=(str(place), job, rank, ranks, port, arguments))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return Ranks(place, processes)


def run(place: Path, job: str, ranks: int, **arguments: Any) -> list[dict[str, Any]]:
    return start(place, job, ranks, **arguments).results()


@dataclass
class Jobs:
    """Jobs on one root below ``place``; each is compared with a run of stock code that never stopped.

    ``job`` is their function, ``arguments`` those of all of them, ``whole`` what each rank went
    through in that run.
    """

    place: Path
    job: str
    arguments: dict[str, Any]
    whole: list[dict[str, Any]]

    def start(self, **arguments: Any) -> Ranks:
        number = len(list(self.place.glob("job*")))
        return start(self.place / f"job{number}", self.job, 2, **self.arguments, **arguments)

    def __call__(self, *, begin: int, last: int, **arguments: Any) -> list[dict[str, Any]]:
        """Run a job that begins from step ``begin`` and ends after ``last``; each rank's result."""
        ranks = self.start(last=last, resume=begin > 0, **arguments).results()
        for rank, whole in zip(ranks, self.whole, strict=True):
            assert rank["begin"] == begin
            assert rank["digests"].items() <= whole["digests"].items()
            assert max(map(int, rank["digests"])) == last
        return ranks

    def killed_in(self, step: int, **arguments: Any) -> None:
        """Run a job whose rank 0 dies in the save of ``step``; the other rank is ended, too."""
        ranks = self.start(killed_in=step, last=step, **arguments)
        ranks.processes[0].join(PATIENCE_S)
        assert ranks.processes[0].exitcode == -signal.SIGKILL
        ranks.kill()
        ranks.codes()


def _run(
    place: str, job: str, rank: int, ranks: int, port: int, arguments: Mapping[str, Any]
) -> None:
    log = os.open(f"{place}/{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    if ranks > 1:
        os.environ.update({name: str(value) for name, value in own.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    module, _, name = job.rpartition(".")
    function: Callable[..., Any] = getattr(import_module(module), name)
    try:
        result = function(rank, **arguments)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    Path(place, f"{rank}.json").write_text(json.dumps(result))
    sys.stderr.flush()
    os._exit(0)
