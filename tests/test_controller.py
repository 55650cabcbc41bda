"""Controller mode: one process without torch owns the root, groups of workers write their parts.

The same coordinator as everywhere; what is new is who reports, and who completes a part.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from groups import Group, GroupJob

from ckptfsm.clock import SystemClock
from ckptfsm.controller import Controller, GroupPart
from ckptfsm.errors import ConfigError, DamagedRoot, RootBusy, SaveFailed, SaveRefused
from ckptfsm.lifecycle import State
from ckptfsm.messages import ShardReported, WriterForked
from ckptfsm.retention import LatestN
from ckptfsm.storage import PosixStorage
from ckptfsm.testing.fakes import Gate
from ckptfsm.worker import GroupShare

SIZES = {"actor": 2, "critic": 1}
TRACKER = "latest_checkpointed_iteration.txt"


def test_two_groups_and_a_file_make_one_checkpoint(tmp_path):
    """Catches: a part that is not waited for, or completed by nobody."""
    job = GroupJob(tmp_path, SIZES)
    job.save(10).handle.wait()
    step = tmp_path / "iter_0000010"
    assert (tmp_path / TRACKER).read_text() == "10"
    assert (step / "data.pt").read_bytes() == b"position 10"
    names = {str(p.relative_to(step)) for p in step.rglob("*.distcp")}
    assert names == {"actor/__0_0.distcp", "actor/__1_0.distcp", "critic/__0_0.distcp"}
    manifest = json.loads((step / ".ckptfsm/manifest.json").read_text())
    assert [p["name"] for p in manifest["parts"]] == ["data.pt", "actor", "critic"]
    metadata = json.loads((step / "actor/.metadata").read_text())
    assert [[row[0] for row in rank] for rank in metadata] == [[0], [1]], "of both ranks"
    job.controller.close()


def test_the_tracker_moves_once_and_after_every_part(tmp_path):
    """Catches: the tracker after the first group, as released verl has it."""
    job = GroupJob(tmp_path, SIZES)
    save = job.begin(10)
    job.write(save, "actor")
    for _ in range(20):
        job.controller.poll()
        assert not (tmp_path / TRACKER).exists()
    job.write(save, "critic")
    save.handle.wait()
    assert job.events() == [
        "absent>requested",
        "requested>forked",
        "forked>shards_written",
        "shards_written>finalized",
        "finalized>tracked",
    ]
    job.controller.close()


def test_the_controller_needs_no_torch(tmp_path):
    """Catches: a driver process that has to import torch to own its checkpoints."""
    code = (
        "import sys; from ckptfsm import Controller, GroupPart\n"
        f"c = Controller({str(tmp_path)!r}, {{'actor': 1}}, lambda doomed: [])\n"
        "c.begin(1, {'actor': GroupPart('actor'), 'x': b'1'}); c.abandon()\n"
        "assert not {'torch', 'megatron'} & set(sys.modules)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_F23_one_failed_group_fails_the_checkpoint_and_gives_its_space_back(tmp_path):
    """Catches: a checkpoint without its critic; a half that stays on the disk."""
    job = GroupJob(tmp_path, SIZES, retention=LatestN(1))
    job.save(10).handle.wait()
    job.groups["critic"].drivers[0].failures["stage"] = OSError(28, "no space")
    failed = job.save(20).handle
    with pytest.raises(SaveFailed, match="rank 3"):
        failed.wait()
    job.groups["critic"].drivers[0].failures.clear()
    job.controller.wait_until_finished()
    assert (tmp_path / TRACKER).read_text() == "10"
    assert not list((tmp_path / ".ckptfsm/staging").iterdir())
    job.save(30).handle.wait()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("iter")) == [
        "iter_0000030"
    ], "retention takes the whole step, and only that"
    job.controller.close()


def test_F31_a_rank_that_cannot_prepare_fails_its_group_together(tmp_path):
    """Catches: the other ranks of the group left in a collective."""
    job = GroupJob(tmp_path, SIZES)
    job.groups["actor"].drivers[1].failures["draft"] = ValueError("a bad state dict")
    with pytest.raises(
        SaveFailed, match="rank 1 cannot prepare the save: ValueError: a bad state dict"
    ):
        job.save(10).handle.wait()
    job.controller.close()


def test_F1_a_dead_worker_fails_the_save_and_training_goes_on(tmp_path):
    """Catches: a controller that waits for ever for a worker that is gone."""
    job = GroupJob(tmp_path, SIZES, busy_timeout_s=4.0)
    save = job.begin(10)
    job.write(save, "actor")
    job.groups["critic"].dead.add(0)
    job.controller.lost("critic", [0], "the node went away")
    with pytest.raises(SaveFailed, match="worker 0 of group 'critic' is dead: the node went away"):
        save.handle.wait()
    job.controller.wait_until_finished()
    job.groups["critic"].dead.clear()  # a new one stands in its place
    job.save(20).handle.wait()
    assert job.controller.all_steps() == [20]
    job.controller.close()


def test_a_worker_that_dies_after_its_share_was_written_harms_nothing(tmp_path):
    """Catches: a durable share taken for lost."""
    job = GroupJob(tmp_path, SIZES)
    save = job.begin(10)
    job.write(save, "critic")
    while not any(isinstance(e, ShardReported) for e in job.said):
        job.controller.poll()
    job.controller.lost("critic")
    job.write(save, "actor")
    save.handle.wait()
    job.controller.close()


def test_F1_workers_that_say_nothing_are_not_awaited_for_ever(tmp_path):
    """Catches: a save without an end, because a report was lost on the way."""
    job = GroupJob(tmp_path, SIZES, writer_timeout_s=0.3, busy_timeout_s=4.0)
    save = job.begin(10)
    job.deaf = True
    with pytest.raises(SaveFailed, match="no report in time from rank"):
        save.handle.wait()
    job.controller.wait_until_finished()
    assert not list((tmp_path / ".ckptfsm/staging").iterdir()), "nobody confirmed, all the same"
    job.controller.close()


def test_F11_reports_that_come_late_or_twice_do_not_count(tmp_path):
    """Catches: a shard of an earlier attempt, or one shard twice, that completes a checkpoint."""
    job = GroupJob(tmp_path, SIZES, on_failure="warn")
    first = job.begin(10)
    job.write(first)
    while len([e for e in job.said if isinstance(e, ShardReported)]) < 3:
        job.controller.poll()
    old = [e for e in job.said if isinstance(e, (ShardReported, WriterForked))]
    first.handle.wait()
    second = job.begin(20)
    job.controller.feed(old)
    relabelled = [type(e)(second.tickets["actor"].of, *_rest(e)) for e in old if e.rank == 1]
    job.controller.feed(relabelled)  # rank 1 as reported: its twin from rank 2 is still missing
    job.controller.feed(relabelled)
    for _ in range(10):
        job.controller.poll()
    assert second.handle.state in (State.REQUESTED, State.FORKED)
    job.write(second)
    second.handle.wait()
    manifest = json.loads((tmp_path / "iter_0000020/.ckptfsm/manifest.json").read_text())
    assert (manifest["step"], manifest["attempt"]) == (20, second.tickets["actor"].of.attempt)
    job.controller.close()


def _rest(event):
    return [getattr(event, name) for name in event.__slots__]


def test_an_optional_group_may_fail_alone(tmp_path):
    """Catches: an evaluation export that costs a checkpoint."""
    job = GroupJob(tmp_path, {"actor": 2, "export": 1})
    job.groups["export"].drivers[0].before_write = _refuse
    save = job.controller.begin(
        10, {"actor": GroupPart("actor"), "export": GroupPart("export", optional=True)}
    )
    job.write(save)
    save.handle.wait()
    manifest = json.loads((tmp_path / "iter_0000010/.ckptfsm/manifest.json").read_text())
    assert [p["name"] for p in manifest["parts"]] == ["actor"]
    assert "made-up" in manifest["dropped"]["export"]
    assert not (tmp_path / "iter_0000010/export").exists()
    job.controller.close()


def _refuse(part, rank):
    raise OSError(5, "made-up")


def test_F3_a_controller_that_dies_is_followed_by_one_that_goes_on(tmp_path):
    """Catches: shares that lie there complete, and are thrown away; or are taken too early."""
    job = GroupJob(tmp_path, SIZES)
    job.save(10).handle.wait()
    save = job.begin(20)
    job.write(save, "actor")
    job.controller.abandon()
    again = GroupJob(tmp_path, SIZES)
    assert again.controller.latest_step() == 10
    again.save(30).handle.wait()
    with again.controller.reading() as found:
        assert found is not None and found.step == 30
        restored = [
            worker.restore(found, "critic", {"w": None})
            for worker in again.groups["critic"].workers
        ]
    assert restored[0].state == {"w": "critic0@30"}
    again.controller.close()


def test_what_a_controller_refuses(tmp_path):
    """Catches: a group nobody has, a group of nobody, a report of something else."""
    with pytest.raises(ConfigError, match="at least one rank"):
        Controller(tmp_path, {"actor": 0}, lambda doomed: [])
    job = GroupJob(tmp_path, SIZES)
    with pytest.raises(ConfigError, match="no group 'judge'"):
        job.controller.begin(1, {"judge": GroupPart("judge")})
    with pytest.raises(ConfigError, match="not a worker's report"):
        job.controller.feed(["hello"])
    with pytest.raises(SaveRefused):
        job.controller.begin(-1, {"actor": GroupPart("actor")})
    with pytest.raises(RootBusy):
        GroupJob(tmp_path, SIZES)
    job.controller.close()


def test_a_group_of_another_size_than_the_controller_counts_fails(tmp_path):
    """Catches: half of a group taken for all of it (F10)."""
    job = GroupJob(tmp_path, SIZES)
    small = Group("actor", 1, tmp_path)
    save = job.begin(10)
    job.controller.feed(small.write(save.tickets["actor"], [{"w": 1}]))
    with pytest.raises(SaveFailed, match="counts 2 ranks in this group, it has 1"):
        save.handle.wait()
    job.controller.close()


def test_F13_the_writer_of_a_failed_attempt_is_ended(tmp_path):
    """Catches: a writer that is reported gone, and writes on."""
    job = GroupJob(tmp_path, SIZES)
    save = job.begin(10)
    gate = Gate(tmp_path / "gate")
    job.groups["actor"].drivers[0].before_write = gate.hold
    job.write(save, "actor")
    writer = job.groups["actor"].workers[0]._writer
    assert writer is not None
    pid = writer.process.pid
    job.controller.lost("critic")
    with pytest.raises(SaveFailed, match="is dead"):
        save.handle.wait()
    job.controller.wait_until_finished()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    job.controller.close()


def test_I5_a_receipt_of_another_attempt_does_not_complete_a_group(tmp_path):
    """Catches: metadata made from what an earlier attempt wrote."""
    job = GroupJob(tmp_path, SIZES)
    job.save(10).handle.wait()
    ticket = job.begin(20).tickets["actor"]
    storage = PosixStorage(str(tmp_path), create=False)
    share = GroupShare(ticket, 1, (), (), SystemClock())
    published = "iter_0000010"
    with pytest.raises(DamagedRoot, match="a receipt of"):
        share._receipt_of(storage, published, 2)
    storage.close_root()
    job.controller.abandon()
