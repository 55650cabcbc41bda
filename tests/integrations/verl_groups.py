"""The driver's side of ``verl_worker``: worker groups, and how functions are called in their workers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from servers import Running

from ckptfsm.core.errors import WriterDied

LIMIT_S = 120.0


class Call:
    """A call that was begun. ``answer`` comes later."""

    def __init__(self, worker: PipeWorker) -> None:
        self.worker = worker
        self.answer: tuple[str, Any] | None = None


class PipeWorker:
    """A worker at the other end of a pipe. Answers come in the order of the calls."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.waiting: list[Call] = []
        self.pid = 0
        self.is_dead = False

    def submit(self, name: str, *arguments: Any, **keywords: Any) -> Call:
        call = Call(self)
        self.waiting.append(call)
        try:
            self.connection.send((name, arguments, keywords))
        except OSError:
            self.die()
        return call

    def take(self) -> None:
        """Take an answer, or learn that the worker has ended."""
        try:
            self.waiting.pop(0).answer = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.die()

    def die(self) -> None:
        self.is_dead = True
        for call in self.waiting:
            call.answer = call.answer or ("dead", f"process {self.pid}")
        self.waiting = []


class PipeCalls:
    """See ``ckptfsm.integrations.verl.Calls``."""

    def submit(self, worker: PipeWorker, function: Any, *arguments: Any) -> Call:
        return worker.submit(f"{function.__module__}:{function.__name__}", *arguments)

    def done(self, calls: Sequence[Call], timeout_s: float) -> list[Call]:
        deadline = time.monotonic() + timeout_s
        while True:
            open_calls = [c for c in calls if c.answer is None and not c.worker.is_dead]
            busy = {c.worker.connection: c.worker for c in open_calls}
            left = max(0.0, deadline - time.monotonic())
            ready = wait(list(busy), left) if busy else []
            for connection in ready:
                busy[connection].take()  # type: ignore[index]
            if not ready:
                return [c for c in calls if c.answer is not None]

    def result(self, call: Call) -> Any:
        assert call.answer is not None
        kind, value = call.answer
        if kind == "dead":
            raise WriterDied(f"the worker is dead: {value}")
        if kind == "error":
            raise RuntimeError(value)
        return value


class WorkerGroup:
    """A role's worker group, as a driver of verl has it."""

    def __init__(self, server: Running, role: str, size: int, place: Path, **more: Any) -> None:
        self.role, self.place = role, place
        self.calls = PipeCalls()
        checkpoint = {"async_save": more.pop("async_save", False), **more.pop("checkpoint", {})}
        store = place / f"store-{role}-{time.monotonic_ns()}"
        self.workers = []
        for rank in range(size):
            worker = PipeWorker(server.connect())
            log = str(place / f"{role}-{rank}.log")
            what = {"role": role, "rank": rank, "size": size, "store": str(store), "log": log}
            bridge = more.get("bridge", False)
            worker.connection.send({**what, "checkpoint": checkpoint, "bridge": bridge})
            worker.waiting.append(Call(worker))
            self.workers.append(worker)
        for worker in self.workers:
            worker.pid = self.results([worker.waiting[0]])[0]

    def call(self, name: str, *arguments: Any, **keywords: Any) -> list[Any]:
        return self.results([w.submit(name, *arguments, **keywords) for w in self.workers])

    def results(self, begun: list[Call]) -> list[Any]:
        done = self.calls.done(begun, LIMIT_S)
        assert len(done) == len(begun), f"{self.role} does not answer: {self.logs()}"
        return [self.calls.result(call) for call in begun]

    def logs(self) -> str:
        return "\n".join(
            p.read_text()[-3000:] for p in sorted(self.place.glob(f"{self.role}-*.log"))
        )

    def save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        self.call("method:save_checkpoint", *arguments, **keywords)

    def load_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        self.call("method:load_checkpoint", *arguments, **keywords)

    def close(self) -> None:
        for worker in self.workers:
            worker.connection.close()


class Loader:
    """A data loader with a position."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return 1_000_000

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def config_of(root: Path, **trainer: Any) -> Any:
    """The few keys of verl's configuration that its trainers' checkpoint code reads."""
    async_save = trainer.pop("async_save", False)
    values = {
        "default_local_dir": str(root),
        "default_hdfs_dir": None,
        "resume_mode": "auto",
        "resume_from_path": None,
        "del_local_ckpt_after_load": False,
        "max_actor_ckpt_to_keep": None,
        "max_critic_ckpt_to_keep": None,
        **trainer,
    }
    actor = {"checkpoint": {"async_save": async_save}}
    return OmegaConf.create({"trainer": values, "actor_rollout_ref": {"actor": actor}})


class Callback:
    """See verl's ``CheckpointCallback``: notes each call, and the step that the tracker names then."""

    def __init__(self, config: Any) -> None:
        self.root = Path(config.trainer.default_local_dir)
        self.told: list[tuple[int, str, bool, str]] = []

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool, **more: Any
    ) -> None:
        tracker = self.root / "latest_checkpointed_iteration.txt"
        self.told.append((global_step, checkpoint_dir, async_save, tracker.read_text().strip()))
