"""A state on a CUDA device: the rate of its copies to the host, and the stall of a save.

Skipped on a machine without such a device. The copies of a save are compared with a plain copy of each
tensor into memory that torch has pinned. The stall is the time in ``save`` and ``before_update``, and
how much longer than usual the update behind them takes, until the device has made it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.measure import MS, Figure, Options, in_unit, ratio, timed
from benchmarks.state import TrainingState
from ckptfsm import CheckpointManager, LatestN
from ckptfsm.dcp.device_copies import DeviceCopies
from ckptfsm.megatron.compat import process_group

ENGINES = ("eager", "gated", "fork")  # the last one copies while the trainer waits
_GB = 1e9
_USUAL = 3
_WARM_UP_ROUNDS = 2


def run(options: Options) -> list[Figure]:
    """Rates of copies (GB/s), and the stall of a save with each engine (ms); nothing without CUDA."""
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr, flush=True)
        return []
    state = TrainingState(options.state_bytes, device="cuda")
    return [*_rates(state, options), *_stalls(state, options)]


def _rates(state: TrainingState, options: Options) -> list[Figure]:
    pinned = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in state.tensors]
    copies = DeviceCopies()
    sides: dict[str, Callable[[], object]] = {
        "a save's copies": partial(_staged, state, copies),
        "plain pinned copies": partial(_plain, state, pinned),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(_WARM_UP_ROUNDS + options.pairs):
        for name, copy in sides.items():
            torch.cuda.synchronize()
            taken = timed(copy)
            if number >= _WARM_UP_ROUNDS:
                seconds[name].append(taken)
    copies.close()
    size = sum(t.numel() * t.itemsize for t in state.tensors) / _GB
    rates = [Figure(name, "GB/s", tuple(size / s for s in each)) for name, each in seconds.items()]
    return [*rates, ratio("time of a save's copies / plain", *seconds.values())]


def _plain(state: TrainingState, pinned: list[torch.Tensor]) -> None:
    for source, target in zip(state.tensors, pinned, strict=True):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()


def _staged(state: TrainingState, copies: DeviceCopies) -> None:
    copy = copies.new_copy(state.tensors)
    if copy is None:
        raise RuntimeError("no memory could be pinned: see the log")
    for number, tensor in enumerate(state.tensors):
        slot = copy.slot_for(tensor)
        if slot is None:
            raise RuntimeError(f"tensor {number} is not copied by the device")
        copy.add(str(number), tensor, slot, first=False)
    copy.start()
    torch.cuda.synchronize()
    if not copy.done():
        raise RuntimeError("the device has ended, and its copies have not")


def _stalls(state: TrainingState, options: Options) -> list[Figure]:
    usual = min(timed(partial(_update, state)) for _ in range(_USUAL))
    figures = []
    for engine in ENGINES:
        samples = _stalls_of(options.work / engine, engine, state, options.pairs, usual)
        figures.append(in_unit(f"save() on a device, {engine}", "ms", MS, samples[0]))
        figures.append(in_unit(f"stall, state on a device, {engine}", "ms", MS, samples[1]))
    return figures


def _stalls_of(
    root: Path, engine: str, state: TrainingState, pairs: int, usual_s: float
) -> tuple[list[float], list[float]]:
    """Seconds in ``save``, and of the whole stall, of each save."""
    saves, stalls = [], []
    with process_group(), CheckpointManager(root, retention=LatestN(1), engine=engine) as manager:
        if engine == "gated":
            manager.expect_gate()
        for step in range(1, _WARM_UP_ROUNDS + pairs + 1):
            torch.cuda.synchronize()
            saved = timed(partial(manager.save, step, state.sharded(step)))
            updated = timed(lambda: (manager.before_update(), _update(state)))
            manager.wait_until_finished()
            if step > _WARM_UP_ROUNDS:
                saves.append(saved)
                stalls.append(max(0.0, saved + updated - usual_s))
    return saves, stalls


def _update(state: TrainingState) -> None:
    state.update()
    torch.cuda.synchronize()
