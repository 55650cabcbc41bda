"""Requests that are staged in shared memory, which the next one of the same structure uses again.

A fork freezes pageable memory only. nvidia-resiliency-ext keeps its staging memory for the next request
and drains, before it is used again, the one queue that said that it should. ``SharedStaging`` is a queue
that did not; done right, each request has memory that no other one is staged into. ``StagesTogether``
makes such requests for this library's queue.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ckptfsm.core.ports import Storage
from ckptfsm.testing.fakes import FifoGate
from ckptfsm.testing.simfs import SimDisk, SimStorage
from fieldbugs.model import Action
from fieldbugs.player import LIMIT_S, Player

STEPS = (100, 200)


@dataclass(frozen=True)
class Staged:
    """``writing``: (step, what its writer reads there now); ``disk``: (step, what was written)."""

    writing: tuple[tuple[int, int], ...] = ()
    disk: tuple[tuple[int, int], ...] = ()
    finalized: tuple[int, ...] = ()


class SharedStaging:
    """See the module. ``shared``: the old way."""

    def __init__(self, *, shared: bool) -> None:
        self.shared = shared

    def initial(self) -> Staged:
        return Staged()

    def actions(self, state: Staged) -> Iterator[tuple[Action, Staged]]:
        for step in STEPS:
            if step > max((s for s, _ in (*state.writing, *state.disk)), default=0):
                yield Action("save", step), self._saved(state, step)
        for step, values in state.writing:
            left = tuple(each for each in state.writing if each[0] != step)
            disk = tuple(sorted((*state.disk, (step, values))))
            yield Action("written", step), replace(state, writing=left, disk=disk)
        if len(state.finalized) < len(state.disk):
            yield Action("poll"), replace(state, finalized=tuple(step for step, _ in state.disk))

    def _saved(self, state: Staged, step: int) -> Staged:
        before = tuple((s, step if self.shared else values) for s, values in state.writing)
        return replace(state, writing=(*before, (step, step)))

    def broken(self, state: Staged) -> str:
        for step, values in state.disk:
            if step in state.finalized and values != step:
                return f"I5: step {step} holds the values of step {values}"
        return ""

    def show(self, state: Staged) -> str:
        disk = ", ".join(f"{step} with the values of {values}" for step, values in state.disk)
        return f"{disk or 'nothing'}; finalized: {_listed(state.finalized)}"


class StagesTogether(Player):
    """A trainer with this library's queue, whose requests are all staged into one shared tensor."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of megatron-core, for keys that it does not find
            import torch

            from ckptfsm.integrations.queue import AsyncCallsQueue
        self.directory = directory
        self.memory = torch.zeros(1, dtype=torch.int64).share_memory_()
        self.queue = AsyncCallsQueue(writer_timeout_s=LIMIT_S)
        self.gates: dict[int, FifoGate] = {}
        self.written_steps: list[int] = []
        self.finalized: list[int] = []

    def save(self, step: int) -> None:
        self.memory.fill_(step)
        self.gates[step] = FifoGate(self.directory / f"gate-{step}")
        request = SimpleNamespace(
            async_fn=partial(_write, self.gates[step], self._path(step)),
            async_fn_args=(self.memory,),
            finalize_fns=[partial(self.finalized.append, step)],
        )
        self.queue.schedule_async_request(request)

    def written(self, step: int) -> None:
        self.gates.pop(step).open(LIMIT_S)
        for _ in self._until(lambda: self._path(step).exists()):
            """Its writer writes."""
        self.written_steps.append(step)

    def poll(self) -> None:
        """Poll as a training loop does, until what is written is finalized."""
        for _ in self._until(lambda: self.finalized == self.written_steps):
            self.queue.maybe_finalize_async_calls()

    def _until(self, done: Callable[[], bool]) -> Iterator[None]:
        deadline = time.monotonic() + LIMIT_S
        while not done():
            assert time.monotonic() < deadline, f"I10: only {self.finalized} are finalized"
            yield
            time.sleep(0.001)  # bounded by the deadline

    def _path(self, step: int) -> Path:
        return self.directory / str(step)

    def holds(self, step: int) -> str:
        return self._path(step).read_text()

    def close(self) -> None:
        self.queue.close(abort=True)

    def reader(self) -> Storage:
        return SimStorage(SimDisk(), "reader")

    def show(self) -> str:
        there = [f"{step} with the values of {self.holds(step)}" for step in self.written_steps]
        return f"{', '.join(there) or 'nothing'}; finalized: {_listed(self.finalized)}"

    def judge(self) -> None:
        """There is no root of ours: each file has the values of its step."""
        for step in self.finalized:
            assert self.holds(step) == str(step), f"I5: {step} holds {self.holds(step)}"


def _write(gate: FifoGate, path: Path, memory: Any) -> None:
    gate.hold()
    written = path.with_suffix(".part")
    written.write_text(str(int(memory)))
    written.rename(path)


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


def each_holds_its_own(trainer: StagesTogether) -> None:
    """Both had been in flight together, in the same staging memory."""
    assert list(trainer.gates) == [200], "200 is not in flight"
    trainer.written(200)
    trainer.poll()
    trainer.judge()
    assert trainer.finalized == [100, 200]
