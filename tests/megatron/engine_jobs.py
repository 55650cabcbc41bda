"""The jobs of the write engine's tests. See ``jobs.py``; its rules hold here."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import tracked_step
from jobs import (
    PACE_S,
    Here,
    Told,
    children,
    managed,
    save,
    save_steps,
    state_of,
    tell,
    train_until_done,
)
from megatron.core.dist_checkpointing import ShardedTensor
from refused_reads import refuse_reads

from ckptfsm.adapters.spawn import Spawned
from ckptfsm.writers import write_engine
from ckptfsm.writers.write_engine import WriteEngine
from ckptfsm.writers.write_job import WriteJob


def save_refused(here: Here, root: str, steps: list[int], **settings: Any) -> Told:
    """Save in a container that lets no process read the memory of another one. No fork helps."""
    with pytest.MonkeyPatch.context() as patch:
        refuse_reads(patch)
        patch.setattr(write_engine, "launch_forked", None)
        return save_steps(here, root, steps, **settings)


def save_shared(here: Here, root: str, size: int, refuse: bool, **settings: Any) -> Told:
    """Save an offloaded Adam in shared memory after each step, and step again when that is allowed."""
    torch.manual_seed(here.rank)
    weight = torch.nn.Parameter(torch.randn(size))
    optimizer = torch.optim.Adam([weight])
    place = (0, here.rank, here.world_size)

    def step() -> None:
        weight.grad = torch.randn(size)
        optimizer.step()

    def state() -> dict[str, Any]:
        tensors = {"w": weight.detach(), **optimizer.state[weight]}
        tensors.pop("step")
        return {
            key: ShardedTensor.from_rank_offsets(key, tensor, place)
            for key, tensor in tensors.items()
        }

    step()
    equal, readings = [], []
    with pytest.MonkeyPatch.context() as patch, managed(here, root, **settings) as manager:
        if refuse:
            refuse_reads(patch)
            patch.setattr(write_engine, "launch_forked", None)
        read = WriteEngine._reading
        patch.setattr(
            WriteEngine, "_reading", lambda *args: readings.append(read(*args)) or readings[-1]
        )
        shared = manager.share(optimizer)
        manager.attach(optimizer)
        for number in (1, 2):
            wanted = {key: value.data.clone() for key, value in state().items()}
            handle = manager.save(number, state())
            step()
            assert train_until_done(manager, handle) is None
            before = {key: value.data.clone() for key, value in state().items()}
            loaded = manager.restore(state(), step=number)
            assert loaded is not None
            equal.append(all(torch.equal(loaded.state[key], wanted[key]) for key in wanted))
            for key, value in state().items():
                value.data.copy_(before[key])
    return {
        "shared": shared,
        "equal": equal,
        "gated": [reading.mutable for reading in readings],
        "arenas": [reading.arena is not None for reading in readings],
        "segments": [len(reading.segments) for reading in readings],
    }


def strike_writer(
    here: Here, root: str, victim: int, number: int, rows: int, **settings: Any
) -> Told:
    """Save steps 1 to 3. The writer of one rank gets a signal when it has read the state of step 2."""

    confirm, struck = WriteJob.confirm, []

    def strike(job: WriteJob) -> None:
        if not struck:
            os.kill(job._process.pid, number)
            struck.append(number)
        confirm(job)

    with managed(here, root, **settings) as manager:
        first = save(manager, here, 1)
        with pytest.MonkeyPatch.context() as patch:
            if here.rank == victim:
                patch.setattr(WriteJob, "confirm", strike)
            error = save(manager, here, 2, rows)
        manager.wait_until_finished()
        third = save(manager, here, 3)
        return {"first": first, "failed": error, "third": third, "all": manager.all_steps()}


def interrupt_hello(here: Here, root: str, victim: int) -> Told:
    """Save steps 1 and 2. A Ctrl-C comes while one rank waits for the hello of its writer process."""
    interrupted = False

    def without_probe(engine: WriteEngine) -> Spawned:
        return Spawned("ckptfsm.writers.write_process", "main")

    def listen(process: Spawned, timeout_s: float = 0.0) -> list[Any]:
        signal.raise_signal(signal.SIGINT)
        return []

    with pytest.MonkeyPatch.context() as patch:
        if here.rank == victim:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            patch.setattr(WriteEngine, "_spawned", without_probe)
        with managed(here, root, engine="eager") as manager:
            if here.rank == victim:
                patch.setattr(Spawned, "listen", listen)
            try:
                manager.save(1, state_of(1, here))
            except KeyboardInterrupt:
                interrupted = True
            patch.undo()
            failed = tell(manager.wait_until_finished)
            second = save(manager, here, 2)
            return {
                "interrupted": interrupted,
                "failed": failed,
                "second": second,
                "all": manager.all_steps(),
                "children": len(children()),
            }


def strike_reader(here: Here, root: str, victim: int, size: int) -> Told:
    """Kill the writer of one rank while it reads the state of step 2, and step as soon as allowed."""
    weights = Updated(here, size)
    with managed(here, root, engine="gated") as manager:
        assert save(manager, here, 1) is None  # the writer process is there
        writers = children() if here.rank == victim else []
        handle = manager.save(2, weights.state())
        for pid in writers:
            os.kill(pid, signal.SIGKILL)
        manager.before_update()
        weights.update()
        failed = train_until_done(manager, handle)
        loaded = manager.restore(Updated(here, size).state(), step=2)
        assert loaded is not None
        return {
            "failed": failed,
            "equal": weights.is_at(loaded.state, 0.0),
            "third": save(manager, here, 3),
            "all": manager.all_steps(),
            "same": children() == writers,
        }


class Updated:
    """Weights of a rank that are changed in place. All values of a step are equal, and known."""

    def __init__(self, here: Here, size: int) -> None:
        self._place = (0, here.rank, here.world_size)
        self._names = ("w", "m")
        self.tensors = {name: torch.zeros(size) for name in self._names}

    def state(self) -> dict[str, Any]:
        return {
            name: ShardedTensor.from_rank_offsets(name, tensor, self._place)
            for name, tensor in self.tensors.items()
        }

    def update(self) -> None:
        with torch.no_grad():
            for tensor in self.tensors.values():
                tensor.add_(1.0)

    def is_at(self, loaded: dict[str, Any], value: float) -> bool:
        return all(bool((loaded[name] == value).all()) for name in self._names)


def update_as_early_as_allowed(
    here: Here, root: str, saves: int, size: int, **settings: Any
) -> list[int]:
    """Save after each update, and update again at once when that is allowed.

    Returns the steps with a state that is not that of their step.
    """
    weights, torn = Updated(here, size), []
    with managed(here, root, retention={"latest_n": 1}, **settings) as manager:
        for step in range(1, saves + 1):
            manager.before_update()
            weights.update()
            handle = manager.save(step, weights.state())
            manager.before_update()
            weights.update()
            assert train_until_done(manager, handle) is None
            loaded = manager.restore(Updated(here, size).state(), step=step)
            assert loaded is not None
            if not weights.is_at(loaded.state, 2.0 * step - 1):
                torn.append(step)
    return torn


def update_too_early(here: Here, root: str, how: str, size: int) -> Told:
    """Change the state on rank 1 without ``before_update``, while the writer reads it."""
    weights = Updated(here, size)
    with managed(here, root, engine="gated") as manager:
        assert save(manager, here, 1) is None  # the writer process is there
        if here.rank == 1:
            for pid in children():
                os.kill(pid, signal.SIGSTOP)
        handle = manager.save(2, weights.state())
        if here.rank == 1:
            if how == "in place":
                weights.update()
            else:
                weights.tensors["w"].set_(torch.ones(size))
            for pid in children():
                os.kill(pid, signal.SIGCONT)
        failed = train_until_done(manager, handle)
        manager.wait_until_finished()
        manager.before_update()
        return {"failed": failed, "third": save(manager, here, 3), "all": manager.all_steps()}


def leave_in_flight(here: Here, root: str, size: int) -> None:
    """Leave by an exception with a gated save in flight that no call has looked at since."""
    weights = Updated(here, size)
    try:
        with managed(here, root, engine="gated") as manager:
            manager.save(1, weights.state())
            raise KeyError("training failed")
    except KeyError:
        return


def latest(here: Here, root: str) -> int | None:
    with managed(here, root) as manager:
        return manager.latest_step()


def save_without_polling(here: Here, root: str, **settings: Any) -> Told:
    """Save, and compute without a call of the manager until the tracker names the step."""
    with managed(here, root, **settings) as manager:
        handle = manager.save(1, state_of(1, here))
        deadline = time.monotonic() + 60.0
        while tracked_step(Path(root)) != 1 and time.monotonic() < deadline:
            time.sleep(PACE_S)
        seen = (tracked_step(Path(root)), manager.latest_step())
        return {
            "seen": seen,
            "failed": train_until_done(manager, handle),
            "all": manager.all_steps(),
        }
