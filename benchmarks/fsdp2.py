"""DTensors of FSDP2 on two ranks: ckptfsm beside torch's DCP, with nothing of megatron-core.

A model of equal layers under FSDP2 with AdamW: few large tensors, or many small ones. Each save begins
on both ranks together. Peers count as loadable when their future is done, and ckptfsm when the step is
tracked. All of them fsync their files; DCP's directories are not fsynced. Ratios are to the fastest of
the peers' saves. ``torch_checkpointing`` is measured where it is installed, and fsyncs nothing.

Restores are from the disk: ours reads past the page cache, as a verification of what lies in memory
would prove nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.comparison import Times, over, times_of
from benchmarks.measure import MS, Figure, Options, in_unit, ratio
from benchmarks.one_save import save_in_turns, settled
from benchmarks.peers import DcpSide, TorchCheckpointingSide
from benchmarks.real_ranks import RANKS, report, run_ranks
from benchmarks.restoring import drop_cache
from benchmarks.sides import ManagerSide
from benchmarks.two_ranks import larger
from ckptfsm import CheckpointManager, LatestN

LAYERS = (22, 416)  # about 137 and 2,500 tensors: weight, bias and their three of AdamW
WORK_S = (0.0, 0.5, 1.0)  # for each GiB of state
ENGINES = ("eager", "gated")
_PEERS = ("thread", "process", "save")
_RESTORES = 5
_STALL, _TRACKED, _RESTORE = 0.3, 0.9, 1.0


class FsdpState:
    """A model with ``layers`` linear layers and its optimizer, of ``state_bytes`` on all ranks."""

    def __init__(self, layers: int, state_bytes: int) -> None:
        floats = state_bytes // 4 // 3 // layers  # a weight and two moments
        width = max(RANKS, int(floats**0.5))
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
        mesh = init_device_mesh("cpu", (RANKS,))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.update()
        self.tensors = sum(len(each) + 1 for each in self.optimizer.state.values())

    def sharded(self, step: int) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
            "step": step,
        }

    def update(self) -> None:
        self.optimizer.step()


class SharedDcpSide(DcpSide):
    """DCP by the ranks of a job; the first one deletes."""

    def __init__(self, root: Path, how: str) -> None:
        self.name = f"DCP {how}"
        self._root, self._how, self._future = root, how, None
        root.mkdir(exist_ok=True)

    def save(self, step: int, state: dict[str, Any]) -> None:
        place = str(self._root / str(step))
        if self._how == "save":
            dcp.save(state, checkpoint_id=place)
            return
        kind = dcp.state_dict_saver.AsyncCheckpointerType(self._how)
        self._future = dcp.async_save(state, checkpoint_id=place, async_checkpointer_type=kind)

    def clear(self) -> None:
        if dist.get_rank() == 0:
            super().clear()


class SharedTorchCheckpointing(TorchCheckpointingSide):
    """``torch_checkpointing`` by the ranks of a job; the first one deletes."""

    def save(self, step: int, state: dict[str, Any]) -> None:
        self._future = self._manager.save(str(self._root / str(step)), state)

    def clear(self) -> None:
        if dist.get_rank() == 0:
            super().clear()


def run(options: Options) -> list[Figure]:
    """Stall and time until loadable (ms), restores, and their ratios to the peers'."""
    figures = []
    for layers in LAYERS:
        work = options.work / str(layers)
        work.mkdir()
        measured = run_ranks(__name__, work, options.state_bytes, options.pairs, layers)
        for work_s, times in zip(WORK_S, measured["saves"], strict=True):
            title = f"{measured['tensors']} tensors, {work_s:g} s of work"
            figures += _figures(title, times)
        figures += _restores(f"{measured['tensors']} tensors", measured["restores"])
    return figures


def _figures(title: str, times: dict[str, Times]) -> list[Figure]:
    peers = [each for name, saves in times.items() if name.startswith("DCP") for each in saves]
    stall_s, loadable_s = min(each[0] for each in peers), min(each[1] for each in peers)
    figures = []
    for name, saves in times.items():
        stalls, loadable = [each[0] for each in saves], [each[1] for each in saves]
        figures.append(in_unit(f"stall, {title}, {name}", "ms", MS, stalls))
        figures.append(in_unit(f"until loadable, {title}, {name}", "ms", MS, loadable))
        if name.startswith("ckptfsm"):
            figures.append(over(f"stall, {title}, {name} / DCP", stalls, stall_s, _STALL))
            said = f"until loadable, {title}, {name} / DCP"
            figures.append(over(said, loadable, loadable_s, _TRACKED))
    return figures


def _restores(title: str, seconds: dict[str, list[float]]) -> list[Figure]:
    ours, dcps = seconds["ckptfsm"], seconds["DCP"]
    return [
        in_unit(f"cold restore, {title}, ckptfsm, verified", "ms", MS, ours),
        in_unit(f"cold restore, {title}, DCP, not verified", "ms", MS, dcps),
        ratio(f"cold restore, {title}, ckptfsm / DCP", ours, dcps, _RESTORE),
    ]


def rank_main(options: Options, layers: int) -> None:
    """A rank: save in turns, then restore in turns. Rank 0 reports the times of both."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    state = FsdpState(layers, options.state_bytes)
    saves = [_saves(options, work_s, state) for work_s in WORK_S]
    restores = _restore_in_turns(options.work, state)
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        report(options.work, {"saves": saves, "restores": restores, "tensors": state.tensors})


def _saves(options: Options, work_s: float, state: FsdpState) -> dict[str, Times]:
    work = options.work / f"after-{work_s:g}"
    work.mkdir(exist_ok=True)  # every rank makes it
    with contextlib.ExitStack() as stack:
        sides: list[Any] = [SharedDcpSide(work / f"dcp-{how}", how) for how in _PEERS]
        if find_spec("torch_checkpointing"):
            sides.append(SharedTorchCheckpointing(work / "torch-checkpointing"))
            stack.callback(sides[-1].close)
        for engine in ENGINES:
            root = work / engine
            manager = CheckpointManager(root, retention=LatestN(1), engine=engine)
            sides.append(ManagerSide(root, stack.enter_context(manager), f"ckptfsm {engine}"))
        samples = settled(save_in_turns(sides, state, work_s, options), options)
        times = {name: times_of(each) for name, each in samples.items()}
        of_all: list[dict[str, Times]] = [{} for _ in range(RANKS)]
        dist.all_gather_object(of_all, times)
    return {name: larger(*(each[name] for each in of_all)) for name in times}


def _restore_in_turns(work: Path, state: FsdpState) -> dict[str, list[float]]:
    """The seconds of restores of one checkpoint from the disk: ours verified, DCP's not."""
    root = work / "restored"
    seconds: dict[str, list[float]] = {"ckptfsm": [], "DCP": []}
    with CheckpointManager(root, retention=LatestN(1)) as manager:
        manager.save(1, state.sharded(1)).wait()
        place = str(root / "iter_0000001")
        for _ in range(_RESTORES):
            for name, each in seconds.items():
                template = state.sharded(0)
                if dist.get_rank() == 0:
                    drop_cache(Path(place))
                dist.barrier()
                began = time.perf_counter()
                if name == "DCP":
                    dcp.load(template, checkpoint_id=place)
                else:
                    manager.restore(template)
                dist.barrier()
                each.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        shutil.rmtree(root)
        os.sync()
    return seconds


if __name__ == "__main__":  # a peer spawns a process, which imports this module again
    place, size, pairs, count = sys.argv[1:]
    rank_main(Options(Path(place), int(size), int(pairs)), int(count))
