"""Controller mode: one process without torch owns the root, groups of workers write their parts.

The same coordinator as everywhere; what is new is who reports, and who completes a part.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeDraft, fake_ports
from groups import SETTINGS, Group, GroupJob
from managers import (
    Elastic,
    ReadLate,
    Struck,
    Unread,
    UnreadWithoutGate,
    handler_that_raises,
)

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.executor import WorkResult
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.coordinator.coordinator import Coordinator
from ckptfsm.core.config import make_config
from ckptfsm.core.errors import (
    ConfigError,
    DamagedRoot,
    DeadlineExceeded,
    NoRoom,
    OutcomeUnknown,
    RootBusy,
    SaveFailed,
    SaveFailedWarning,
    SaveRefused,
)
from ckptfsm.core.events import Failed, ShardReported, WriterForked, WriterGone
from ckptfsm.core.lifecycle import State
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.ports import Outcome, RankJob, Storage, WriterProcess
from ckptfsm.core.requests import Located
from ckptfsm.core.retention import LatestN
from ckptfsm.disk.publishing import Publisher
from ckptfsm.ranks.controller import Controller
from ckptfsm.ranks.group_worker import GroupShare
from ckptfsm.ranks.manager import Manager
from ckptfsm.ranks.tickets import GroupPart
from ckptfsm.testing.fakes import FifoGate
from ckptfsm.writers.image import ImagePart
from ckptfsm.writers.plain_files import FileTree
from ckptfsm.writers.rank_writer import RankWriter, launch_forked

SIZES = {"actor": 2, "critic": 1}
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[GroupJob]:
    made = GroupJob(tmp_path, SIZES)
    yield made
    made.controller.close()


def test_two_groups_and_a_file_make_one_checkpoint(job, tmp_path):
    """Catches: a part that is not waited for, or never completed."""
    job.save(10).handle.wait()
    step = tmp_path / "iter_0000010"
    assert (tmp_path / TRACKER).read_text().strip() == "10"
    assert (step / "data.pt").read_bytes() == b"position 10"
    names = {str(p.relative_to(step)) for p in step.rglob("*.distcp")}
    assert names == {"actor/__0_0.distcp", "actor/__1_0.distcp", "critic/__0_0.distcp"}
    manifest = json.loads((step / ".ckptfsm/manifest.json").read_text())
    assert [p["name"] for p in manifest["parts"]] == ["data.pt", "actor", "critic"]
    metadata = json.loads((step / "actor/.metadata").read_text())
    assert [[row[0] for row in rank] for rank in metadata] == [[0], [1]], "of both ranks"


def test_a_save_in_order_logs_no_warning(tmp_path, caplog):
    """Catches: a warning for each worker and save, in which one that matters is not seen."""
    job = GroupJob(tmp_path, SIZES)
    with caplog.at_level(logging.INFO, logger="ckptfsm"):
        job.save(10).handle.wait()
        job.save(20).handle.wait()
    job.controller.close()
    assert [r.getMessage() for r in caplog.records if r.levelno > logging.INFO] == []


def test_the_tracker_moves_once_and_after_every_part(job, tmp_path):
    """Catches: the tracker after the first group, as released verl has it."""
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


@pytest.mark.parametrize("on_failure", ["raise", "warn"])
def test_F5_groups_do_not_write_what_the_disk_cannot_hold(tmp_path, monkeypatch, on_failure: str):
    """Catches: a save of unannounced size that is admitted to a full disk, and tickets of a save that
    was refused."""
    job = GroupJob(tmp_path, SIZES, on_failure=on_failure)
    job.save(10).handle.wait()
    with monkeypatch.context() as full:
        full.setattr(job.controller._storage, "free_bytes", lambda: 100)
        if on_failure == "raise":
            with pytest.raises(NoRoom) as caught:
                job.begin(20)
            assert (caught.value.step, caught.value.bytes_free) == (20, 100)
        else:
            with pytest.warns(SaveFailedWarning, match="no_room"):
                begun = job.begin(20)
            assert (begun.handle.skipped, dict(begun.tickets)) == (True, {})
    job.save(30).handle.wait()
    assert job.controller.all_steps() == [10, 30]
    job.controller.close()


def test_the_end_of_the_allocation_makes_a_controllers_save_due(tmp_path):
    """Catches: a driver of groups that is cut off although its end was known."""
    job = GroupJob(tmp_path, SIZES, end_of_allocation=time.time(), exchange_every=1)
    assert not job.controller.preempted
    job.controller.poll()
    assert job.controller.preempted and job.controller.should_save(10)
    job.save(10).handle.wait()
    job.controller.poll()
    assert not job.controller.should_save(20)
    job.controller.close()


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
    assert (tmp_path / TRACKER).read_text().strip() == "10"
    assert not list((tmp_path / ".ckptfsm/staging").iterdir())
    job.save(30).handle.wait()
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("iter")) == [
        "iter_0000030"
    ], "retention takes the whole step, and only that"
    job.controller.close()


@pytest.mark.parametrize(
    ("rank", "call", "error", "said"),
    [
        (1, "draft", ValueError("a bad state"), "rank 1 cannot prepare .* ValueError: a bad state"),
        (0, "merge", BaseException("CheckpointException"), "CheckpointException"),
    ],
)
def test_F31_a_rank_that_cannot_prepare_fails_its_group_together(job, rank, call, error, said):
    """Catches: the other ranks of the group left in a collective."""
    job.groups["actor"].drivers[rank].failures[call] = error
    with pytest.raises(SaveFailed, match=said):
        job.save(10).handle.wait()


def test_I12_a_group_that_refuses_a_value_says_so_to_the_controller(job):
    """Catches: a refusal that reads as a failed fork, or whose way out is cut off."""
    value = f"the value at ['{'x' * 150}'], of type Odd, could not be loaded again, as {'y' * 150}"
    refused = SaveRefused(f"part 'actor.0': {value}: save list(x)", part="actor.0", key="['x']")
    job.groups["actor"].drivers[1].failures["draft"] = refused
    save = job.save(10)
    with pytest.raises(SaveRefused, match=r"\['x+'\], of type Odd, .*: save list\(x\)") as caught:
        save.handle.wait()
    assert (caught.value.kind, caught.value.reason) == ("save_refused", "save_refused")
    job.groups["actor"].drivers[1].failures.clear()
    job.save(20).handle.wait()
    assert job.controller.all_steps() == [20]


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


def test_a_worker_that_dies_after_its_share_was_written_harms_nothing(job):
    """Catches: a durable share taken for lost."""
    save = job.begin(10)
    job.write(save, "critic")
    while not any(isinstance(e, ShardReported) for e in job.said):
        job.controller.poll()
    job.controller.lost("critic")
    job.write(save, "actor")
    save.handle.wait()


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


def test_F11_late_reports_of_an_earlier_controller_do_not_count(tmp_path):
    """Catches: a report of an attempt that this controller did not begin, handed on to the ledger."""
    GroupJob(tmp_path, SIZES).controller.close()
    job = GroupJob(tmp_path, SIZES)
    earlier = AttemptId(4, 1, 3)
    job.controller._participant.view.unfinished[earlier] = State.FAILED  # its clean-up is retried
    job.controller._collect()
    job.controller.feed([WriterForked(earlier, 2, 4), ShardReported(earlier, "actor", 2, 4, 5)])
    assert job.controller._reports.outbox == []
    assert job.controller.failed == (earlier,)  # its writers are told to end all the same
    del job.controller._participant.view.unfinished[earlier]
    job.controller.wait_for(job.save(5).handle)
    job.controller.close()


def _rest(event):
    return [getattr(event, name) for name in event.__slots__]


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


def test_refusals_of_a_controller(tmp_path):
    """Catches: an unknown group, an empty group, a report of something else."""
    with pytest.raises(ConfigError, match="at least one rank"):
        Controller(tmp_path, {"actor": 0}, lambda failed: [])
    job = GroupJob(tmp_path, SIZES)
    with pytest.raises(ConfigError, match="no group 'judge'"):
        job.controller.begin(1, {"judge": GroupPart("judge")})
    with pytest.raises(ConfigError, match="'actor' is a group"):
        job.controller.begin(1, {"actor": b"", "critic": GroupPart("critic")})
    with pytest.raises(ConfigError, match="two parts"):
        job.controller.begin(1, {"a": GroupPart("actor"), "b": GroupPart("actor")})
    with pytest.raises(ConfigError, match="share directory"):
        job.controller.begin(1, {"a": GroupPart("actor", "x"), "b": GroupPart("critic", "x")})
    with pytest.raises(ConfigError, match="not a worker's report"):
        job.controller.feed(["hello"])
    with pytest.raises(SaveRefused):
        job.controller.begin(-1, {"actor": GroupPart("actor")})
    with pytest.raises(RootBusy):
        GroupJob(tmp_path, SIZES)
    job.controller.close()


def test_a_file_may_be_named_like_a_group_that_writes_under_another_name(tmp_path):
    """Catches: a refusal of an unambiguous name."""
    job = GroupJob(tmp_path, SIZES)
    begun = job.controller.begin(1, {"policy": GroupPart("actor"), "actor": b"a file"})
    assert set(begun.tickets) == {"actor"}
    job.controller.abandon()


def test_a_group_of_another_size_than_the_controller_counts_fails(job, tmp_path):
    """Catches: half of a group taken for all of it (F10)."""
    small = Group("actor", 1, tmp_path)
    save = job.begin(10)
    job.controller.feed(small.write(save.tickets["actor"], [{"w": 1}]))
    with pytest.raises(SaveFailed, match="counts 2 ranks in this group, it has 1"):
        save.handle.wait()


def test_F5_a_controller_goes_on_while_the_tracker_is_blocked(tmp_path):
    """Catches: a driver that waits for ``busy_timeout_s`` for a tracker that cannot be written; tickets
    of a save that was skipped."""
    job = GroupJob(tmp_path, SIZES, on_failure="warn")
    job.controller.wait_for(job.save(1).handle)
    (tmp_path / TRACKER).unlink()
    (tmp_path / TRACKER).mkdir()
    second = job.save(2)
    with pytest.warns(SaveFailedWarning, match=f"step 2 .*blocked.*{TRACKER}, EISDIR"):
        third = job.save(3)
    assert (third.handle.skipped, dict(third.tickets)) == (True, {})
    job.controller.wait_for(third.handle)
    assert second.handle.blocked_by.file == TRACKER
    (tmp_path / TRACKER).rmdir()
    job.controller.wait_for(job.save(4).handle)
    assert (job.controller.all_steps(), second.handle.state) == ([1, 2, 4], State.TRACKED)
    job.controller.close()


def test_F13_the_writer_of_a_failed_attempt_is_ended(job, tmp_path):
    """Catches: a writer that is reported gone, and writes on."""
    save = job.begin(10)
    gate = FifoGate(tmp_path / "gate")
    job.groups["actor"].drivers[0].before_write = gate.hold
    job.write(save, "actor")
    writer = job.groups["actor"].workers[0]._share.writer
    assert writer is not None
    pid = writer.process.pid
    job.controller.lost("critic")
    with pytest.raises(SaveFailed, match="is dead"):
        save.handle.wait()
    job.controller.wait_until_finished()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_writer_of_a_failed_attempt_is_gone_before_the_next_one_starts(tmp_path):
    """Catches: a host that is ended because two saves of one worker have their copies at once."""
    job = GroupJob(tmp_path, {"actor": 1})
    worker, driver = job.groups["actor"].workers[0], job.groups["actor"].drivers[0]
    driver.before_write = FifoGate(tmp_path / "gate").hold
    job.write(job.begin(10))
    first = worker._share.writer
    job.controller.abandon()
    again = GroupJob(tmp_path, {"actor": 1})
    again.groups = job.groups  # the workers outlive their controller
    driver.before_write = None
    begin, ended = worker._ports.launch, []

    def launch(storage: Storage, order: RankJob) -> WriterProcess:
        ended.append(first.process.poll() is not None)
        return begin(storage, order)

    worker._share._ports = replace(worker._ports, launch=launch)
    again.save(20).handle.wait()
    assert ended == [True]
    again.controller.close()


def test_I5_a_receipt_of_another_attempt_does_not_complete_a_group(tmp_path):
    """Catches: metadata made from the results of an earlier attempt."""
    job = GroupJob(tmp_path, SIZES)
    job.save(10).handle.wait()
    ticket = job.begin(20).tickets["actor"]
    storage = PosixStorage(str(tmp_path), create=False)
    share = GroupShare("actor", "actor", ticket, 1, (), (), SystemClock())
    published = "iter_0000010"
    with pytest.raises(DamagedRoot, match="the receipt is of"):
        share._of_others(storage, published)
    storage.close_root()
    job.controller.abandon()


def test_a_groups_share_waits_for_the_copies_of_its_jobs(tmp_path):
    """Catches: a worker's writer that reads memory which an accelerator has not filled."""
    job = GroupJob(tmp_path, SIZES)
    ticket = job.begin(10).tickets["actor"]
    plain, copies = ImagePart("a", "", ()), Copies()
    copied = replace(plain, name="b", copying=copies)
    for shares, copying in ((plain, copied), copies), ((plain,), None):
        share = GroupShare("actor", "actor", ticket, 1, shares, (), SystemClock())
        order = RankJob(ticket.of, 1, 2, ticket.location, (share,))
        assert order.copying is copying
        assert pickle.loads(pickle.dumps(order)).copying is None, "the writer process gets none"
    job.controller.abandon()


class Copies:
    """Copies of an accelerator."""


# ------------------------------------------------------------------------ what a review has found


def test_I8_a_controller_does_not_finish_parts_that_need_torch(tmp_path):
    """Catches: a torch_dist save without its metadata, tracked, for which the one before is pruned."""

    def stop(self, checkpoint):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        manager = Manager(fake_ports(tmp_path), make_config(dict(SETTINGS)))
        manager.save(10, {"w": 1}).wait()
        patch.setattr(Publisher, "finalize", stop)
        with pytest.raises(OutcomeUnknown, match="interrupted"):
            manager.save(20, {"w": 2}).wait()
        manager.abandon()
    with pytest.raises(ConfigError, match="step 20 was written, and its part 'state' needs torch"):
        GroupJob(tmp_path, SIZES, retention=LatestN(1))
    with Manager(fake_ports(tmp_path), make_config(dict(SETTINGS))) as manager:
        assert manager.all_steps() == [10, 20]


def test_F21_reading_looks_at_every_file(tmp_path):
    """Catches: a controller that verifies one share of as many as it has workers."""
    job = GroupJob(tmp_path, {"actor": 3, "critic": 2})
    job.save(10).handle.wait()
    job.save(20).handle.wait()
    listed = json.loads((tmp_path / "iter_0000020/.ckptfsm/manifest.json").read_text())["files"]
    for entry in listed:
        file = tmp_path / "iter_0000020" / entry["name"]
        whole = file.read_bytes()
        file.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        with pytest.raises(DamagedRoot, match="another content"), job.controller.reading(20):
            pass
        file.write_bytes(whole)
    job.controller.close()


def test_I4_a_call_that_is_tried_again_writes_nothing(tmp_path):
    """Catches: an orchestrator's retry that changes what was digested, or published."""
    job = GroupJob(tmp_path, {"actor": 1})
    save = job.begin(10)
    (worker,) = job.groups["actor"].workers
    made: list[str] = []

    def make(directory: str) -> None:
        made.append(directory)
        Path(directory, "v").write_text(str(len(made)))

    parts = {"w": {"w": 1}, "files": FileTree(make)}
    first = worker.write(save.tickets["actor"], parts=parts)
    again = worker.write(save.tickets["actor"], parts=parts)
    assert len(made) == 1 and again[: len(first)] == first
    job.controller.feed([*first, *again])
    save.handle.wait()
    assert (tmp_path / "iter_0000010/actor/files/v").read_text() == "1"
    job.controller.close()


def test_shares_whose_names_are_alike_are_all_there(tmp_path):
    """Catches: one share that takes the name, and the place, of another."""
    job = GroupJob(tmp_path, {"actor": 1})
    save = job.begin(10)
    (worker,) = job.groups["actor"].workers
    parts = {key: {"w": key} for key in ("a/b", "a.b", "x", "x.y")}
    job.controller.feed(worker.write(save.tickets["actor"], parts=parts))
    save.handle.wait()
    with job.controller.reading() as found:
        assert found is not None
        restored = worker.restore(found, "actor", parts={key: {"w": None} for key in parts})
    assert restored.parts == parts
    job.controller.close()


def test_F30_a_share_stays_inside_its_part(tmp_path):
    """Catches: a tree of files written into another checkpoint."""
    job = GroupJob(tmp_path, {"actor": 1})
    save = job.begin(10)
    (worker,) = job.groups["actor"].workers
    hostile = {"../../../../out": FileTree(lambda d: Path(d, "x").write_text("x"))}
    job.controller.feed(worker.write(save.tickets["actor"], parts=hostile))
    with pytest.raises(SaveFailed, match="is not allowed"):
        save.handle.wait()
    assert not (tmp_path / "out").exists()
    job.controller.close()


def test_F27_two_readings_of_one_step_keep_it_both(tmp_path):
    """Catches: a lease that ends with that of another reader in the same process, or expires."""
    job = GroupJob(tmp_path, SIZES, retention=LatestN(1), reader_timeout_s=0.05)
    job.save(10).handle.wait()
    with job.controller.reading(10) as outer:
        with job.controller.reading(10):
            pass
        job.save(20).handle.wait()
        assert outer is not None and Path(outer.directory).exists()
        assert job.controller.all_steps() == [10, 20]
    job.save(30).handle.wait()
    assert job.controller.all_steps() == [30]
    job.controller.close()


@pytest.mark.parametrize("end", [FutureTimeout, KeyboardInterrupt])
def test_F27_a_lease_without_a_waiter_is_given_back(job, tmp_path, monkeypatch, end):
    """Catches: a checkpoint that is kept for as long as the job runs, as its lease is unknown."""
    job.save(10).handle.wait()
    struck: list[WorkResult[Any]] = []
    wait = WorkResult.exception

    def interrupted(promise: WorkResult[Any], timeout: float | None = None) -> BaseException | None:
        if timeout is not None and promise in (struck or [promise]):
            struck.append(promise)
            raise end
        return wait(promise, timeout)

    monkeypatch.setattr(WorkResult, "exception", interrupted)
    raised = DeadlineExceeded if end is FutureTimeout else end
    with pytest.raises(raised), job.controller.reading(10):
        pass
    assert isinstance(struck[0].result(10), Located), "it took its lease"
    with job.controller.reading(10):
        assert len(os.listdir(tmp_path / ".ckptfsm/readers")) == 1, "only this one's"


def test_F27_a_ctrl_c_that_takes_an_answer_gives_its_lease_back(job, tmp_path):
    """Catches: a checkpoint that is kept for good: a hook of the news with its lease was struck."""
    job.save(10).handle.wait()
    struck: list[int] = []

    def strike(record):
        if not struck:
            struck.append(record.step)
            raise KeyboardInterrupt

    held = job.begin(20)
    job.controller._participant._hooks = (strike,)
    job.controller._client.ask(
        Coordinator.report, [Failed(held.tickets["actor"].of, "writer_died")]
    )
    with pytest.raises(KeyboardInterrupt), job.controller.reading(10):
        pass
    with job.controller.reading(10):
        assert len(os.listdir(tmp_path / ".ckptfsm/readers")) == 1, "only this one's"
    with pytest.raises(SaveFailed):
        job.controller.wait_until_finished()


def test_I10_a_ctrl_c_in_begin_leaves_nothing_unended(job):
    """Catches: a controller that can save nothing any more."""
    struck: list[int] = []

    def strike(record):
        if not struck:
            struck.append(record.step)
            raise KeyboardInterrupt

    job.controller._participant._hooks = (strike,)
    with pytest.raises(KeyboardInterrupt):
        job.begin(10)
    with pytest.raises(SaveFailed):
        job.controller.wait_until_finished()
    job.controller.wait_until_finished()
    job.save(20).handle.wait()


def test_I10_asking_workers_may_raise_and_the_deadline_stays(tmp_path):
    """Catches: a broken call that keeps a save in flight for ever."""
    job = GroupJob(tmp_path, SIZES, writer_timeout_s=0.2)
    save = job.begin(10)

    def broken(failed):
        raise RuntimeError("the network is gone")

    job.controller._ask_workers = broken
    for _ in range(200):
        with contextlib.suppress(RuntimeError, SaveFailed):
            job.controller.poll()
        if save.handle.done:
            break
        time.sleep(0.01)
    assert save.handle.exception() is not None
    job.controller.abandon()


def test_lost_concerns_only_its_ranks(tmp_path):
    """Catches: a group beside the save that fails it, a rank of another group, an unknown name."""
    job = GroupJob(tmp_path, {"actor": 1, "critic": 1})
    save = job.controller.begin(10, {"actor": GroupPart("actor")})
    job.controller.lost("critic")
    job.write(save)
    save.handle.wait()
    with pytest.raises(ConfigError, match="no rank 1"):
        job.controller.lost("actor", [1])
    with pytest.raises(ConfigError, match="no group"):
        job.controller.lost("judge")
    job.controller.close()


@pytest.mark.parametrize(
    "event",
    [
        lambda of: Failed(of, 5, ""),
        lambda of: Failed(of, "x" * 1000, ""),
        lambda of: Failed(of, "writer_died", "", -1),
        lambda of: ShardReported(of, "actor", 1, 4, -5),
        lambda of: ShardReported(of, "actor", 1, 4, 10**30),
        lambda of: ShardReported(of, "actor", "one", 4, 5),
        lambda of: WriterForked(of, 1, ["4"]),
        lambda of: WriterForked(of, [1], 4),
        lambda of: Failed(of, "writer_failed", "", 1.0),
        lambda of: ShardReported(of, "../state", 1, 4, 5),
        lambda of: WriterForked(of._replace(epoch=[of.epoch]), 1, 4),
        lambda of: WriterForked(str(of), 1, 4),
    ],
)
def test_F30_a_report_that_cannot_be_is_dropped(job, event):
    """Catches: one bad message that stops the coordinator for good."""
    save = job.begin(10)
    job.controller.feed([event(save.tickets["actor"].of)])
    job.controller.poll()
    job.write(save)
    save.handle.wait()


def test_reports_may_come_in_any_order(tmp_path):
    """Catches: a shard that does not count because the answer to the call before it came later."""
    job = GroupJob(tmp_path, {"actor": 1})
    save = job.begin(10)
    (worker,) = job.groups["actor"].workers
    forked = worker.write(save.tickets["actor"], {"w": 1})
    said: list = []
    while not any(isinstance(e, ShardReported) for e in said):
        said += worker.poll()
    job.controller.feed(said)
    job.controller.poll()
    job.controller.feed(forked)
    save.handle.wait()
    job.controller.close()


def test_an_answer_that_was_lost_costs_nothing(tmp_path):
    """Catches: a worker that reports once, to a controller that was cut off then."""
    job = GroupJob(tmp_path, {"actor": 1})
    save = job.begin(10)
    (worker,) = job.groups["actor"].workers
    worker.write(save.tickets["actor"], {"w": 1})
    while not any(isinstance(e, ShardReported) for e in worker.poll()):
        pass  # no answer arrived
    job.controller.feed(worker.poll())
    job.controller.feed(worker.poll())
    assert save.handle.wait().state is State.TRACKED
    job.controller.close()


@pytest.mark.parametrize("call", ["draft", "stage"])
def test_an_optional_group_that_cannot_begin_is_left_out(tmp_path, call):
    """Catches: an export that fails before its writer, and the checkpoint with it."""
    job = GroupJob(tmp_path, {"actor": 1, "export": 1})
    job.groups["export"].drivers[0].failures[call] = BaseException("made-up")
    save = job.controller.begin(
        10, {"actor": GroupPart("actor"), "export": GroupPart("export", optional=True)}
    )
    for name in ("actor", "export"):
        (worker,) = job.groups[name].workers
        job.controller.feed(worker.write(save.tickets[name], parts={"model": {"w": 1}}))
    save.handle.wait()
    manifest = json.loads((tmp_path / "iter_0000010/.ckptfsm/manifest.json").read_text())
    assert "made-up" in manifest["dropped"]["export"]
    with job.controller.reading() as found:
        assert found is not None
        with pytest.raises(ConfigError, match="has no part 'export'; it has actor"):
            job.groups["export"].workers[0].restore(found, "export", {"w": None})
    job.controller.close()


def test_several_trees_of_an_optional_group_go_together(tmp_path):
    """Catches: planned metadata of a share that is left behind, and fails the checkpoint."""
    job = GroupJob(tmp_path, {"actor": 1, "export": 2})
    job.groups["export"].drivers[1].before_write = _refuse
    save = job.controller.begin(
        10, {"actor": GroupPart("actor"), "export": GroupPart("export", optional=True)}
    )
    for name, ticket in save.tickets.items():
        size = len(job.groups[name].workers)
        trees = {"model": {"w": 1}, "extra": {"w": 2}}
        job.controller.feed(job.groups[name].write(ticket, [None] * size, parts=trees))
    save.handle.wait()
    manifest = json.loads((tmp_path / "iter_0000010/.ckptfsm/manifest.json").read_text())
    assert [p["name"] for p in manifest["parts"]] == ["actor"]
    assert "made-up" in manifest["dropped"]["export"]
    assert not (tmp_path / "iter_0000010/export").exists()
    job.controller.close()


def test_I8_names_of_another_layout_are_evidence(tmp_path):
    """Catches: a run that begins from zero beside its checkpoints, because of one word."""
    (tmp_path / "iter_0000010").mkdir()
    with pytest.raises(ConfigError, match="in the layout 'megatron'"):
        GroupJob(tmp_path, SIZES, layout="verl")
    (tmp_path / "iter_0000010").rmdir()
    GroupJob(tmp_path, SIZES, layout="verl").controller.close()
    GroupJob(tmp_path, SIZES).controller.close()


def test_I4_leaving_a_part_out_takes_only_its_plan(tmp_path):
    """Catches: an optional part that takes what another part's manifest entry names with it."""
    job = GroupJob(tmp_path, {"a": 1, "b": 1})
    parts = {"a": GroupPart("a"), "a.0": GroupPart("b", optional=True)}
    save = job.controller.begin(1, parts)
    job.groups["b"].drivers[0].failures["draft"] = RuntimeError("no b today")
    job.write(save)
    save.handle.wait()
    manifest = json.loads((tmp_path / "iter_0000001/.ckptfsm/manifest.json").read_text())
    assert manifest["dropped"]
    names = [entry["name"] for entry in manifest["files"]]
    assert [name for name in names if not (tmp_path / "iter_0000001" / name).exists()] == []
    job.controller.close()


def test_a_failed_save_that_was_not_tried_again_is_raised_at_the_end(tmp_path):
    """Catches: a run without a single good save, and without a word."""
    job = GroupJob(tmp_path, {"actor": 1}, on_failure=3)
    job.groups["actor"].drivers[0].failures["draft"] = RuntimeError("bad state")
    for step in (1, 2):
        job.save(step)
        job.controller.wait_until_finished()
    with pytest.raises(SaveFailed, match="step 2 .*bad state"):
        job.controller.close()
    second = GroupJob(tmp_path, {"actor": 1}, on_failure=3)
    second.groups["actor"].drivers[0].failures["draft"] = RuntimeError("bad state")
    second.save(3)
    second.controller.wait_until_finished()
    second.groups["actor"].drivers[0].failures.clear()
    second.save(4).handle.wait()
    second.controller.close()


def test_a_reading_that_outlives_its_controller_keeps_the_loads_error(tmp_path):
    """Catches: an error of the load behind one that says only that the controller is closed."""
    job = GroupJob(tmp_path, {"actor": 1})
    job.save(1).handle.wait()
    with pytest.raises(ValueError, match="of the load"), job.controller.reading():
        job.controller.close()
        raise ValueError("of the load")


def test_a_tree_at_the_top_of_the_step_is_refused(tmp_path):
    """Catches: a tree that claims the files of all other parts, so that every save fails."""
    job = GroupJob(tmp_path, {"actor": 1})
    save = job.controller.begin(1, {"actor": GroupPart("actor", directory=""), "data.pt": b"1"})
    tree = FileTree(lambda directory: None)
    job.controller.feed(job.groups["actor"].write(save.tickets["actor"], [tree]))
    with pytest.raises(SaveFailed, match="needs a directory of its own"):
        save.handle.wait()
    job.controller.close()


def test_a_tree_at_the_top_of_a_step_that_has_no_other_part(tmp_path):
    """Catches: files at the top that are refused, left out, or claimed together with ours."""
    job = GroupJob(tmp_path, {"actor": 1})

    def make(directory):
        Path(directory, "extra.pt").write_text("x")
        Path(directory, "model").mkdir(exist_ok=True)
        Path(directory, "model/config.json").write_text("y")

    save = job.controller.begin(1, {"actor": GroupPart("actor", directory="")})
    parts = {"model/dist_ckpt": {"w": 1}, "": FileTree(make)}
    job.controller.feed(job.groups["actor"].write(save.tickets["actor"], [None], parts=parts))
    save.handle.wait()
    job.controller.close()
    step = Path(tmp_path, "iter_0000001")
    receipts = [json.loads(p.read_text()) for p in step.glob(".ckptfsm/receipts/**/*.json")]
    listed = [entry["name"] for receipt in receipts for entry in receipt["files"]]
    assert [name for name in listed if name.startswith(".ckptfsm/")] == [
        ".ckptfsm/planned/actor.1.bin"
    ]
    found = {str(p.relative_to(step)) for p in step.rglob("*") if p.is_file()}
    assert {f for f in found if not f.startswith(".ckptfsm/")} < set(listed)
    assert len(listed) == len(set(listed))
    assert {"extra.pt", "model/config.json"} < set(listed)


def test_a_long_report_fits_into_the_journal(tmp_path):
    """Catches: a worker's traceback that leaves no room for the failure on a full disk."""
    job = GroupJob(tmp_path, {"actor": 1})
    save = job.controller.begin(1, {"actor": GroupPart("actor")})
    ticket = save.tickets["actor"]
    text = "\udc80" + "x" * 100_000
    job.controller.feed([Failed(ticket.of, "fork_failed", text, ticket.first_rank)])
    job.controller.poll()
    with pytest.raises(SaveFailed, match="x{100}"):
        save.handle.wait()
    [record] = [r for r in job.records if r.dest is State.FAILED]
    assert len(record.detail) <= 500
    job.controller.close()


def test_workers_that_confirm_late_are_told_no_more(tmp_path):
    """Catches: an attempt that was given up and is asked for until the job ends."""
    job = GroupJob(tmp_path, {"actor": 2})
    save = job.begin(1)
    ticket = save.tickets["actor"]
    job.deaf = True
    job.controller.feed([Failed(ticket.of, "fork_failed", "no", ticket.first_rank)])
    with pytest.raises(SaveFailed):
        save.handle.wait()
    job.controller.wait_until_finished()
    assert job.controller.failed == (ticket.of,)
    job.controller.feed([WriterGone(ticket.of, ticket.first_rank)])
    assert job.controller.failed == (ticket.of,)
    job.controller.feed([WriterGone(ticket.of, ticket.first_rank + 1)])
    assert job.controller.failed == ()
    job.controller.close()


def test_I10_a_ctrl_c_is_heard_at_the_gate_of_a_worker(tmp_path):
    """Catches: a Ctrl-C that breaks off a message of the writer, or waits for the writer's deadline."""
    job = GroupJob(tmp_path, {"actor": 1})
    ticket = job.begin(10).tickets["actor"]
    worker = job.groups["actor"].workers[0]
    order = RankJob(ticket.of, 0, 1, ticket.location, ())
    worker._share.writer = RankWriter(
        worker._open(ticket.root), order, launch=Unread, deadline=1e12
    )
    with pytest.raises(KeyboardInterrupt):
        worker.before_update()
    assert worker._share.writer.process.looks == 1
    job.controller.abandon()


def test_a_worker_without_memory_for_a_copy_waits_for_its_reader(tmp_path):
    """Catches: a worker that changes its state while a writer reads it, and knows of no gate."""
    job = GroupJob(tmp_path, {"actor": 1})
    save = job.begin(10)
    worker = job.groups["actor"].workers[0]
    worker._share._ports = replace(worker._ports, launch=ReadLate)
    job.write(save)
    assert worker._share.writer.has_copy
    save.handle.wait()
    job.controller.close()


def test_I10_a_ctrl_c_ends_the_wait_of_a_worker_and_its_writer(tmp_path):
    """Catches: a Ctrl-C that waits for a slow disk; a writer that reads on while the state changes; a
    controller that waits for that writer."""
    job = GroupJob(tmp_path, {"actor": 1})
    ticket = job.begin(10).tickets["actor"]
    worker = job.groups["actor"].workers[0]
    started = []

    def launch(storage: Storage, order: RankJob) -> WriterProcess:
        started.append(UnreadWithoutGate(storage, order))
        return started[0]

    worker._share._ports = replace(worker._ports, launch=launch)
    with pytest.raises(KeyboardInterrupt):
        worker.write(ticket, {"w": b"x"})
    assert (started[0].looks, started[0].outcome) == (1, Outcome(-9))
    [failed] = worker.poll()
    assert (failed.reason, "was interrupted" in failed.detail) == ("fork_failed", True)
    job.controller.abandon()


def test_I10_another_exception_of_a_handler_does_not_fail_a_worker_that_waits(tmp_path):
    """Found by review. Catches: an exception of a user's handler that is taken for an error of the
    writer: the save is lost, and the worker never hears of it."""
    job = GroupJob(tmp_path, {"actor": 1})
    save = job.begin(10)
    worker = job.groups["actor"].workers[0]
    worker._share._ports = replace(worker._ports, launch=Struck)
    with handler_that_raises(), pytest.raises(Elastic):
        worker.write(save.tickets["actor"], {"w": b"x"})
    save.handle.wait()
    job.controller.close()


def test_a_worker_whose_wait_fails_ends_its_writer(tmp_path):
    """Found by review. Catches: a writer that reads on while the state changes, beside the one that
    leaves an optional part out."""

    class Broken(UnreadWithoutGate):
        def await_copy(self, timeout_s: float) -> None:
            raise TimeoutError("the other process took no message")

    job = GroupJob(tmp_path, {"actor": 1})
    started = []

    def launch(storage: Storage, order: RankJob) -> WriterProcess:
        started.append((Broken if not started else launch_forked)(storage, order))
        return started[-1]

    parts = {"actor": GroupPart("actor", optional=True), "data.pt": b"x"}
    save = job.controller.begin(10, parts)
    worker = job.groups["actor"].workers[0]
    worker._share._ports = replace(worker._ports, launch=launch)
    worker.write(save.tickets["actor"], {"w": b"x"})
    assert started[0].outcome == Outcome(-9)
    save.handle.wait()
    job.controller.close()


def test_I10_a_ctrl_c_while_a_workers_writer_starts_is_reported(tmp_path, monkeypatch):
    """Catches: a state that is kept for ever; a controller that waits for a writer that never began."""
    job = GroupJob(tmp_path, {"actor": 1})
    ticket = job.begin(10).tickets["actor"]
    worker = job.groups["actor"].workers[0]
    let_go: list[FakeDraft] = []
    monkeypatch.setattr(FakeDraft, "let_go", lambda draft: let_go.append(draft))

    def interrupted(storage: Storage, order: RankJob) -> WriterProcess:
        raise KeyboardInterrupt

    worker._share._ports = replace(worker._ports, launch=interrupted)
    with pytest.raises(KeyboardInterrupt):
        worker.write(ticket, {"w": b"x"})
    [failed] = worker.poll()
    assert (failed.reason, "was interrupted" in failed.detail) == ("fork_failed", True)
    assert len(let_go) == 1
    job.controller.abandon()
