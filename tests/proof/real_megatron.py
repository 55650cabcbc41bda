"""The program of the ranks of a killed Megatron job, and the fork server that serves such jobs.

Each rank's storage counts the bytes that its writers put into the file that is aimed at, and kills at
exactly one of them: the process that writes, the writer above it, or the whole rank.

Rules: everything is the production manager on a state of megatron-core, or of torch; nothing waits for
a clock.
Run as a script this is ``tests/megatron/forkserver.py`` with one job more.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEGATRON_TESTS = Path(__file__).resolve().parent.parent / "megatron"
if __name__ == "__main__":
    sys.path[:0] = [str(MEGATRON_TESTS), str(MEGATRON_TESTS.parent)]

import forkserver  # noqa: E402
import jobs  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402

from ckptfsm import CheckpointManager, PerRank, TransitionRecord  # noqa: E402
from ckptfsm.adapters.posix_storage import PosixStorage  # noqa: E402
from ckptfsm.core.errors import CkptFsmError  # noqa: E402
from ckptfsm.core.layout import MEGATRON, receipt_name  # noqa: E402
from ckptfsm.core.lifecycle import State  # noqa: E402
from ckptfsm.core.retention import LatestN  # noqa: E402
from proof.coverage import Coverage, watch_moves  # noqa: E402


@dataclass(frozen=True)
class Aim:
    """Kill ``victim`` of this rank when byte ``byte`` of ``file`` of ``step`` has been written."""

    step: int
    file: str
    byte: int
    victim: str


class KillingDisk(PosixStorage):
    """The real disk, which kills at one byte. A file that ends earlier is hit at its fsync."""

    def __init__(self, root: str, *, create: bool) -> None:
        super().__init__(root, create=create)
        self.aim: Aim | None = None
        self._trainer = os.getpid()
        self._so_far = 0
        self._paths: dict[int, str] = {}

    def open_exclusive(self, path: str, *, direct: bool = False) -> int:
        handle = super().open_exclusive(path, direct=direct)
        self._paths[handle] = path
        return handle

    def write(self, handle: int, data: bytes | memoryview) -> int:
        aim = self._aimed_at(handle)
        if aim is None:
            return super().write(handle, data)
        view = memoryview(data).cast("B")
        if aim.byte > self._so_far + len(view):
            taken = super().write(handle, view)
            self._so_far += taken
            return taken
        if aim.byte > self._so_far:
            super().write(handle, view[: aim.byte - self._so_far])
        self._kill(aim.victim)
        raise AssertionError("not reached")

    def fsync(self, handle: int) -> None:
        aim = self._aimed_at(handle)
        if aim is not None:
            self._kill(aim.victim)
        super().fsync(handle)

    def _aimed_at(self, handle: int) -> Aim | None:
        path, aim = self._paths.get(handle, ""), self.aim
        if aim is None or not path.startswith(f".ckptfsm/staging/{aim.step}."):
            return None
        inside = path.split("/", 3)[3]
        same = inside == aim.file or inside.startswith(f"{aim.file}.tmp-")
        return aim if same else None

    def _kill(self, victim: str) -> None:
        me = os.getpid()
        writer = me if os.getppid() == self._trainer else os.getppid()
        os.kill({"process": me, "writer": writer, "rank": self._trainer}[victim], signal.SIGKILL)
        while True:
            signal.pause()  # the library ends a process that outlives its writer or its trainer


def aim_at(root: str, rank: int, like: int, step: int, shot: Mapping[str, Any]) -> Aim:
    """Choose file and byte among what this rank wrote for the good step ``like``."""
    own = receipt_name("state", rank)
    receipt = Path(root, MEGATRON.published_name(like), own)
    sizes = {f["name"]: f["bytes"] for f in json.loads(receipt.read_text())["files"]}
    shards = sorted(name for name in sizes if name.endswith(".distcp"))
    others = sorted(set(sizes) - set(shards)) + [own]
    sizes[own] = receipt.stat().st_size
    files = shards if shot["shard"] else others
    file = files[int(shot["file"] * len(files))]
    return Aim(step, file, int(shot["byte"] * (sizes[file] + 1)), shot["victim"])


def of_torch(state: Mapping[str, Any], here: jobs.Here) -> dict[str, Any]:
    """The state of a job with DTensors and a ``PerRank`` in the place of megatron-core's values."""
    mesh = init_device_mesh("cpu", (here.world_size,))
    made: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, ShardedTensor):
            made[key] = DTensor.from_local(value.data, mesh, [Shard(0)])
        else:
            made[key] = PerRank(value.data) if isinstance(value, ShardedObject) else value
    return made


@dataclass(frozen=True)
class States:
    """The states that a job saves: megatron-core's, or ``torch``'s."""

    here: jobs.Here
    torch: bool

    def save(self, manager: CheckpointManager, step: int) -> jobs.Told | None:
        if not self.torch:
            return jobs.save(manager, self.here, step)
        try:
            handle = manager.save(step, of_torch(jobs.state_of(step, self.here), self.here))
        except CkptFsmError as error:
            return jobs.told(error)
        return jobs.train_until_done(manager, handle)

    def template(self) -> dict[str, Any]:
        if not self.torch:
            return jobs.template_of(self.here)
        return of_torch(jobs.state_of(0, self.here), self.here)

    def is_of(self, step: int, loaded: Mapping[str, Any]) -> bool:
        found = {k: v.to_local() if isinstance(v, DTensor) else v for k, v in loaded.items()}
        return jobs.is_state_of(found, step, self.here)


def stock_load(here: jobs.Here, directory: str, step: int) -> bool:
    """Torch's loader on one checkpoint directory; True if bit-equal."""
    here.join()
    states = States(here, torch=True)
    state = states.template()
    state["rng"] = {f"rank_{here.rank}": None}
    dcp.load(state, checkpoint_id=directory)
    return states.is_of(step, {**state, "rng": state["rng"][f"rank_{here.rank}"]})


def die_in_saves(
    here: jobs.Here, root: str, told: str, shots: Sequence[Mapping[str, Any]], torch: bool
) -> Any:
    """Load the latest; then, for every shot, make a save that is hit and a good one.

    ``torch``: of torch's states. Rank 0 appends acknowledgements and findings to ``told``, line by line.
    """
    coverage = Coverage()
    disks: list[KillingDisk] = []

    def open_disk(create: bool) -> KillingDisk:
        disks.append(KillingDisk(root, create=create))
        return disks[-1]

    def tell(**facts: Any) -> None:
        if here.rank == 0:
            with open(told, "a") as lines:
                lines.write(json.dumps(facts) + "\n")

    def hook(record: TransitionRecord) -> None:
        if record.dest is State.TRACKED and record.source is State.FINALIZED:
            tell(acknowledged=record.step)
        elif record.dest is State.FAILED:
            how = {"state": record.source.value, "reason": record.reason, "detail": record.detail}
            tell(failed=record.step, **how)

    here.join()
    states = States(here, torch)
    settings = {**jobs.TIMES, "retention": LatestN(2)}
    with (
        watch_moves(coverage),
        CheckpointManager(root, open_storage=open_disk, hooks=[hook], **settings) as manager,
    ):
        good = load(manager, states, None)
        if good is None:
            good = save_well(manager, states, 1)
        for shot in shots:
            hit = good + 1
            if shot["rank"] == here.rank:
                disks[0].aim = aim_at(root, here.rank, good, hit, shot)
            error = states.save(manager, hit)
            aim, disks[0].aim = disks[0].aim, None
            assert error is not None, f"the save that was hit succeeded: {aim}"
            assert load(manager, states, good) == good
            manager.wait_until_finished()
            left = os.listdir(f"{root}/.ckptfsm/staging")
            assert not left, f"the failed attempt was not put away: {left}"
            good = save_well(manager, states, hit + 1)
            tell(survived=hit)
    return {"latest": good, "coverage": coverage.as_json()}


def save_well(manager: CheckpointManager, states: States, step: int) -> int:
    error = states.save(manager, step)
    assert error is None, f"a good save failed: {error}"
    return step


def load(manager: CheckpointManager, states: States, wanted: int | None) -> int | None:
    """Restore, verified by digests, and compare bit by bit; the step, None where there is none."""
    restored = manager.restore(states.template())
    if restored is None:
        return None
    assert wanted in (None, restored.step), f"step {restored.step} came back instead of {wanted}"
    assert states.is_of(restored.step, restored.state), "another state came back"
    return restored.step


if __name__ == "__main__":
    jobs.die_in_saves, jobs.stock_load_of_torch = die_in_saves, stock_load
    forkserver.main()
