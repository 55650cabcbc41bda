"""A driver of a real local Ray cluster: an actor of two ranks and a critic of one, each group with
a separate process group. Run as a script: ``ray_job.py ROOT MODE``; prints one JSON line at the
end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import ray

from ckptfsm import LatestN
from ckptfsm.core.errors import SaveFailed
from ckptfsm.integrations.ray import RayController

GROUPS = {"actor": 2, "critic": 1}
TIMES = {"busy_timeout_s": 60.0, "close_timeout_s": 60.0, "exit_timeout_s": 2.0}


@ray.remote(num_cpus=0.1)
class Trainee:
    """A rank. ``gate``: its writers wait there, at the fsync of their shard, until a byte comes."""

    def __init__(self, root: str, group: str, rank: int, size: int, port: int, gate: str) -> None:
        import torch
        import torch.distributed as dist

        from ckptfsm import GroupWorker

        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        self.place = (0, rank, size)
        self.group = group
        self.gate = gate
        self.worker = GroupWorker(root, open_storage=self.open_storage(root))

    def open_storage(self, root: str) -> Any:
        from ckptfsm.adapters.posix_storage import PosixStorage
        from ckptfsm.testing.faults import FaultStorage

        def hold(index: int, method: str, path: str) -> None:
            held = method == "fsync" and path.endswith(".distcp")
            if held and self.gate and Path(self.gate).exists():
                Path(f"{self.gate}.reached").touch()
                with open(self.gate, "rb", buffering=0) as gate:
                    gate.read(1)

        return lambda create: FaultStorage(PosixStorage(root, create=create), before=hold)

    def state(self, value: float) -> dict[str, Any]:
        import torch
        from megatron.core.dist_checkpointing import ShardedTensor

        tensor = torch.full((8, 8), value)
        return {self.group: ShardedTensor.from_rank_offsets(self.group, tensor, self.place)}

    def pid(self) -> int:
        return os.getpid()

    def write(self, ticket: Any) -> Any:
        return self.worker.write(ticket, self.state(float(ticket.of.step)))

    def poll(self, doomed: Any) -> Any:
        return self.worker.poll(doomed)

    def value(self, found: Any) -> float:
        """The value that this rank finds in its part of a checkpoint."""
        restored = self.worker.restore(found, self.group, self.state(0.0))
        return float(restored.state[self.group][0, 0])


def start(root: str, group: str, gate: str = "") -> list[Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    size = GROUPS[group]
    actors = [Trainee.remote(root, group, rank, size, port, gate) for rank in range(size)]
    ray.get([actor.pid.remote() for actor in actors], timeout=120)
    return actors


def await_file(path: str) -> None:
    deadline = time.monotonic() + 60
    while not Path(path).exists():
        assert time.monotonic() < deadline, f"{path} does not appear"
        time.sleep(0.01)


def values(controller: RayController, actors: dict[str, list[Any]]) -> dict[str, Any]:
    with controller.reading() as found:
        assert found is not None
        loaded = {n: ray.get([a.value.remote(found) for a in some]) for n, some in actors.items()}
        data = Path(found.directory, "data.pt").read_text()
    return {"step": found.step, "loaded": loaded, "data": data}


def run(root: str, mode: str) -> dict[str, Any]:
    gate = f"{root}.gate"
    actors = {name: start(root, name, gate if name == "critic" else "") for name in GROUPS}
    said: dict[str, Any] = {}
    controller = RayController(root, actors, retention=LatestN(2), **TIMES)
    said["resumed"] = controller.latest_step()
    step = (controller.latest_step() or 0) + 10
    if mode == "again":
        said["found"] = values(controller, actors)
    controller.save(step, {"data.pt": b"at %d" % step}).wait()
    said["first"] = values(controller, actors)
    if mode in ("kill", "die"):
        os.mkfifo(gate)
        handle = controller.save(step + 10, {"data.pt": b"x"})
        await_file(f"{gate}.reached")
        tracker = Path(root, "latest_checkpointed_iteration.txt")
        said["tracker_meanwhile"] = tracker.read_text().strip()
        if mode == "die":
            print(json.dumps(said), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(ray.get(actors["critic"][0].pid.remote()), signal.SIGKILL)
        with contextlib.suppress(SaveFailed):
            handle.wait()
        said["failure"] = str(handle.exception())
        Path(gate).unlink()
        controller.wait_until_finished()
        said["staging"] = os.listdir(Path(root, ".ckptfsm/staging"))
        actors["critic"] = start(root, "critic")
        controller.replace("critic", actors["critic"])
        controller.save(step + 20, {"data.pt": b"at %d" % (step + 20)}).wait()
        said["after"] = values(controller, actors)
        said["steps"] = controller.all_steps()
    controller.close()
    said["torch_in_driver"] = "torch" in sys.modules
    return said


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        print(json.dumps(run(*sys.argv[1:])), flush=True)
    finally:
        ray.shutdown()
