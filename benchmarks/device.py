"""A state on a CUDA device: the rate of its copies to the host, and saves beside other writers.

Skipped on a machine without such a device. The copies of a save are compared with a plain copy of each
tensor into memory that torch has pinned. Then each side saves in turns, as in ``engines``, with a pass
that takes as long as the plain copies: what it takes longer behind a save is what the copies cost.
``--device cpu`` shows that the saves run; its figures say nothing about a device.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.measure import MS, Figure, Options, in_unit, ratio, timed
from benchmarks.one_save import Sample, save_in_turns, settled
from benchmarks.peers import PinnedDcpSide
from benchmarks.sides import ManagerSide, Side, StockSide
from benchmarks.state import TrainingState
from ckptfsm import CheckpointManager, LatestN
from ckptfsm.dcp.device_copies import DeviceCopies
from ckptfsm.megatron.compat import cpu_devices, process_group

ENGINES = ("eager", "gated")
_CALL_MS, _PASS, _COPIES = 5.0, 1.01, 1 / 0.95  # the greatest that are good enough
_GB, _GIB = 1e9, 1 << 30
_WARM_UP_ROUNDS = 2
_CPU_PASS_S = 0.1  # for each GiB


def run(options: Options) -> list[Figure]:
    """Rates of copies (GB/s); of each side the time of its calls, of the pass, and until loadable."""
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr, flush=True)
        return []
    state = TrainingState(options.state_bytes, device=options.device)
    rates = _rates(state, options) if options.device == "cuda" else []
    pass_s = _CPU_PASS_S * options.state_bytes / _GIB
    if rates:
        pass_s = options.state_bytes / _GB / statistics.median(rates[1].samples)
    with _sides(options) as sides:
        work_s = pass_s * _GIB / options.state_bytes
        samples = settled(save_in_turns(sides, state, work_s, options), options)
    return [*rates, *(f for name, each in samples.items() for f in _figures(name, each, pass_s))]


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
    return [*rates, ratio("time of a save's copies / plain", *seconds.values(), target=_COPIES)]


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


@contextlib.contextmanager
def _sides(options: Options) -> Iterator[list[Side]]:
    work: Path = options.work
    with contextlib.ExitStack() as stack:
        stack.enter_context(cpu_devices())
        stack.enter_context(process_group())
        sides: list[Side] = []
        if not options.alone:
            pinned = PinnedDcpSide(work / "dcp", options.device)
            stack.callback(pinned.close)
            sides += [StockSide(work / "stock"), pinned]
        for engine in ENGINES:
            manager = CheckpointManager(work / engine, retention=LatestN(1), engine=engine)
            sides.append(ManagerSide(work / engine, stack.enter_context(manager), engine))
        yield sides


def _figures(name: str, samples: Sequence[Sample], pass_s: float) -> list[Figure]:
    """The figures of one side. Its gate has a target if it promises one, its calls if they are ours."""
    ours = _CALL_MS if name in ENGINES else None
    save, behind, gate, _ = ([s.places_s[place] for s in samples] for place in range(4))
    passes = tuple(1 + excess / pass_s for excess in behind)
    return [
        in_unit(f"save() on a device, {name}", "ms", MS, save, ours),
        in_unit(f"before_update(), state on a device, {name}", "ms", MS, gate, ours),
        Figure(f"pass beside copies, {name}", "ratio", passes, _PASS if name == "gated" else None),
        in_unit(f"stall, state on a device, {name}", "ms", MS, [s.stall_s for s in samples]),
        in_unit(
            f"until loadable, state on a device, {name}", "ms", MS, [s.loadable_s for s in samples]
        ),
    ]
