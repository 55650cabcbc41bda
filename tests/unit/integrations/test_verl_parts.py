"""The code between a driver and the workers of verl, without verl and Ray."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from strangers import newer_files

from ckptfsm.core.errors import WriterDied
from ckptfsm.core.events import ShardReported
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.integrations.workers import OutOfReach, WorkerCalls
from ckptfsm.ranks.tickets import Ticket


class Answers:
    """Calls to workers that give the listed answers, in order: reports, or an error to raise."""

    def __init__(self, **said: list[Any]) -> None:
        self.said = said

    def submit(self, worker: str, function: Any, *arguments: Any) -> str:
        return worker

    def done(self, calls: Sequence[str], timeout_s: float) -> Sequence[str]:
        return list(calls)

    def result(self, call: str) -> Any:
        answer = self.said[call].pop(0) if self.said[call] else []
        if isinstance(answer, Exception):
            raise answer
        return answer


class Polled:
    """A group ``actor`` with these answers. ``lost``: the ranks of which the controller was told."""

    def __init__(self, **said: list[Any]) -> None:
        self.lost: list[tuple[str, list[int], str]] = []
        self.calls = WorkerCalls({"actor": list(said)}, Answers(**said))

    def told(self, *lost: Any) -> None:
        self.lost.append(lost)

    def poll(self) -> list[Any]:
        return list(self.calls.poll({"actor": ("poll",)}, 0.0, self.told))


def test_one_workers_error_loses_no_others_reports(caplog):
    """Catches: a shard that is on the disk and never counts, because another worker's poll raised."""
    shards = [[ShardReported(AttemptId(1, 1, 1), "actor", rank, 3, 5)] for rank in (1, 2)]
    group = Polled(one=[shards[0]], two=[RuntimeError("made-up"), shards[1]])
    assert group.poll() == shards[0]
    (record,) = [r for r in caplog.records if r.event == "worker_raised"]
    assert (record.group, record.rank) == ("actor", 1)
    assert record.why == "worker 1 of 'actor': RuntimeError: made-up"
    assert group.poll() == shards[1], "it is asked again"
    assert not group.lost


def test_a_dead_worker_is_lost_once():
    """Catches: a death that is taken for an error that passes."""
    group = Polled(one=[WriterDied("gone"), RuntimeError("asked again")])
    for _ in range(3):
        assert group.poll() == []
    assert group.lost == [("actor", [0], "gone")]


@pytest.mark.parametrize(
    ("error", "fails"), [(ValueError("out of memory"), True), (OutOfReach("a fault"), False)]
)
def test_a_share_fails_with_the_call_that_was_to_write_it(error: Exception, fails: bool):
    """Catches: a save that waits for its deadline, although its worker has said that it cannot write;
    one that fails for a fault of the network, though its worker may write."""
    group, of = Polled(one=[], two=[error]), AttemptId(1, 1, 1)
    ticket = Ticket(of, "/root", "", "", PartSpec("actor", "report"), 4, 2, 9, 1.0)
    begun = [group.calls.begin("actor", rank, ticket, "write", ticket) for rank in (0, 1)]
    found = list(group.calls.take(begun, 1.0, group.told))
    assert [(e.name, e.rank) for e in found] == ([("failed", 5)] if fails else [])
    assert group.poll() == [], "it is asked again"


ATTACH = """
from types import SimpleNamespace
from ckptfsm.integrations.verl import rank_manager as manager

def stopped(*arguments, **more):
    raise OSError(5, "made-up")

stock = SimpleNamespace(previous_saved_paths=[])
worker = SimpleNamespace(checkpoint_manager=stock, fused_worker_dict={})  # as every verl worker has
manager.GroupWorker = lambda *arguments, **more: SimpleNamespace(close=list)
manager.attach(worker, "actor", "/root", {})
assert type(worker.checkpoint_manager).__name__ == "VerlCheckpointManager"
manager.GroupWorker = stopped
try:
    manager.attach(worker, "actor", "/root", {})
except OSError:
    assert worker.checkpoint_manager is stock
else:
    raise AssertionError("it did not raise")
"""


SAVE = """
import logging
import os
import sys
from types import ModuleType
import torch
from ckptfsm.integrations.verl.rank_manager import captured

VERLS = '''
import torch
class Manager:
    checkpoint_config, previous_saved_paths = None, []
    def save(self, place):
        torch.save({"w": torch.ones(3)}, f"{place}/shard.pt")
        torch.save(2, f"{place}/old.pt", _use_new_zipfile_serialization=False)
        torch.save(3, f"{place}/inner/shard.pt")
        torch.save(4, f"{place}/twice.pt")
        torch.save(5, f"{place}/twice.pt", pickle_protocol=2)
        with open(f"{place}/open.pt", "wb") as file:
            torch.save(6, file)
'''
USERS = '''
import torch
from verl.manager import Manager
class Mine(Manager):
    def save(self, place):
        super().save(place)
        torch.save(7, f"{place}/mine.pt")
        raise OSError(28, "No space left on device")
'''
for name, text in (("verl", ""), ("verl.manager", VERLS), ("mine", USERS)):
    sys.modules[name] = ModuleType(name)
    exec(text, vars(sys.modules[name]))
place, told = sys.argv[1], []
os.makedirs(f"{place}/inner")
logging.getLogger("ckptfsm").addFilter(lambda record: told.append(record.file))
try:
    with captured(sys.modules["mine"].Mine(), place) as found:
        sys.modules["mine"].Mine().save(place)
except OSError:
    pass
assert list(found.parts) == ["shard.pt"], found.parts
assert found.parts["shard.pt"].obj["w"].sum() == 3
assert not os.path.exists(f"{place}/shard.pt")
at_once = {"old.pt": 2, "inner/shard.pt": 3, "twice.pt": 5, "open.pt": 6, "mine.pt": 7}
assert {name: torch.load(f"{place}/{name}") for name in at_once} == at_once
assert len(told) == 4 and told[:2] == [f"{place}/old.pt", f"{place}/inner/shard.pt"], told
assert sys.modules["verl.manager"].torch is torch
"""


LOAD = """
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from ckptfsm.core.errors import RestoreFailed
from ckptfsm.integrations.verl.rank_manager import VerlCheckpointManager
from ckptfsm.megatron import states

states.keeps_common_in_shard = lambda: False  # as megatron-core before 0.19
loaded = []
stock = SimpleNamespace(load_checkpoint=lambda *arguments, **more: loaded.append(arguments[0]))
ours = VerlCheckpointManager(stock, None)
for inner in ("actor/dist_ckpt", "actor/model/dist_ckpt"):
    tree = Path(sys.argv[1], inner)
    (tree.parent / "huggingface").mkdir(parents=True)
    tree.mkdir()
    ours.load_checkpoint(f"{sys.argv[1]}/actor")  # verl 0.9 makes empty trees too
    shutil.copytree(sys.argv[2], tree, dirs_exist_ok=True)
    try:
        ours.load_checkpoint(f"{sys.argv[1]}/actor")
    except RestoreFailed as error:
        assert "install 0.19 or newer" in error.message and error.part == inner, error
    else:
        raise AssertionError("it was loaded")
    (tree / "common.pt").touch()
    ours.load_checkpoint(f"{sys.argv[1]}/actor")
ours.load_checkpoint(None)  # as verl's FSDP lets one
assert len(loaded) == 5, loaded
"""


@pytest.mark.megatron
def test_a_step_for_a_newer_megatron_core_is_refused_before_verl_loads(tmp_path: Path):
    """Catches: an error of stock code about a missing file, as if the checkpoint were damaged; a
    tree that is not looked at; a refusal of readable files."""
    newer = tmp_path / "newer"
    newer.mkdir()
    for name, content in newer_files().items():
        (newer / name).write_bytes(content)
    words = [sys.executable, "-c", LOAD, str(tmp_path / "root"), str(newer)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.megatron
def test_only_a_plain_file_of_verls_own_code_waits_for_the_writer(tmp_path: Path):
    """Catches: a file that is lost, or is written otherwise than it was asked for; one that is
    written late without a word, or from an object that a user's class has changed since; a module
    of verl that keeps our torch after an error."""
    words = [sys.executable, "-c", SAVE, str(tmp_path / "step")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.megatron
def test_a_worker_that_cannot_be_attached_again_has_verls_manager():
    """Catches: a manager that is closed, and stays in its place."""
    done = subprocess.run(
        [sys.executable, "-c", ATTACH], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
