"""Saves of an accelerator's state: when the writer gets its order, and when the state may change."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from devices import DEVICES, LARGE, FakeDevice, RealDevice, device_called
from megatron.core.dist_checkpointing import ShardedTensor

from ckptfsm import CheckpointManager, LatestN, SaveFailed, TrainingState
from ckptfsm.adapters.fork import Child
from ckptfsm.dcp import checkpoint_manager
from ckptfsm.dcp.device_copies import DeviceCopies
from ckptfsm.writers.write_engine import WriteEngine
from ckptfsm.writers.write_job import WriteJob

pytestmark = pytest.mark.megatron

WAIT_S = 60.0
SMALL = 10
GROWN = LARGE + (1 << 20)
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(params=DEVICES)
def device(request) -> FakeDevice | RealDevice:
    return device_called(request.param)


@pytest.fixture
def fake() -> FakeDevice:
    return FakeDevice()


class Trainer:
    """A job of one rank with a large and a small tensor on an accelerator."""

    def __init__(self, device, manager: CheckpointManager) -> None:
        self.device, self.manager = device, manager
        self.large, self.small = device.tensor(LARGE), device.tensor(SMALL)

    def state(self, **more: torch.Tensor) -> dict:
        tensors = {"large": self.large, "small": self.small, **more}
        return {k: ShardedTensor.from_rank_offsets(k, v) for k, v in tensors.items()}

    def save(self, step: int, **more: torch.Tensor):
        self.manager.save(step, self.state(**more))
        return self.job

    @property
    def copies(self) -> DeviceCopies:
        return self.manager._ports.driver.options.copies

    @property
    def job(self):
        return self.manager._share.writer.process

    def save_whole(self, step: int, **more: torch.Tensor) -> None:
        """Save, and wait for the end."""
        self.manager.save(step, self.state(**more))
        self.device.run()
        self.manager.wait_until_finished()

    def update(self) -> None:
        """The kernels of an optimizer's step."""
        self.device.launch(lambda: self.large.add_(1))
        self.device.launch(lambda: self.small.add_(1))

    def saved(self, step: int) -> dict[str, torch.Tensor]:
        wanted = {"large": torch.zeros(LARGE), "small": torch.zeros(SMALL)}
        state = {k: ShardedTensor.from_rank_offsets(k, v) for k, v in wanted.items()}
        return self.manager.restore(state, step=step).state

    def assert_saved(self, step: int, more: float = 0.0) -> None:
        found = self.saved(step)
        for name, size in (("large", LARGE), ("small", SMALL)):
            assert torch.equal(found[name], torch.arange(size, dtype=torch.float32) + more), name


@pytest.fixture
def trainers(monkeypatch, tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Makes a trainer; without an agent, so that a test says when anything looks."""
    made: list[Trainer] = []

    def make(device, free_bytes: int = 1 << 40, **settings) -> Trainer:
        copies = DeviceCopies(device.find, lambda: free_bytes)
        monkeypatch.setattr(checkpoint_manager, "DeviceCopies", lambda: copies)
        monkeypatch.setattr(checkpoint_manager, "mailbox_of", lambda *_: None)
        manager = CheckpointManager(tmp_path / f"root{len(made)}", **settings)
        if manager.config.engine == "gated":
            manager.expect_gate()
        made.append(Trainer(device, manager))
        return made[-1]

    yield make
    for trainer in made:
        trainer.device.run()
        trainer.manager.abandon()


@pytest.mark.parametrize("engine", ["auto", "eager", "gated"])
def test_an_update_behind_the_copy_is_not_in_the_checkpoint(trainers, device, engine):
    """Catches: a torn checkpoint, of a trainer that did all that it has to."""
    trainer = trainers(device, engine=engine)
    trainer.save(1)
    device.run(batches=1)  # the small tensors
    if engine == "gated":
        trainer.manager.before_update()
    trainer.update()
    device.run()
    trainer.manager.wait_until_finished()
    trainer.assert_saved(1)
    assert torch.equal(trainer.large.cpu(), torch.arange(LARGE) + 1.0), "the update is not lost"


def test_the_writer_has_no_order_before_the_copy(trainers, fake):
    """Catches: a writer that reads memory which the accelerator has not filled."""
    trainer = trainers(fake)
    job = trainer.save(1)
    assert isinstance(job, WriteJob)
    assert [job.holds_copy, job.poll(), job._ordered] == [False, None, False]
    assert job.whereabouts() == "the copy of the accelerator's state"
    fake.run()
    assert job.holds_copy
    trainer.manager.wait_until_finished()
    trainer.assert_saved(1)


def test_a_save_waits_for_nothing(trainers, device):
    """Catches: a trainer that waits for the accelerator in ``save``, or at the gate."""
    trainer = trainers(device, engine="gated")
    trainer.save_whole(1)  # pins the memory
    device.keep_busy()
    job = trainer.save(2)
    device.run(batches=1)  # the small tensors
    trainer.manager.before_update()
    trainer.update()
    assert not job.holds_copy, "the accelerator waits, and the host does not"
    device.run()
    trainer.manager.wait_until_finished()
    trainer.assert_saved(2)
    assert torch.equal(trainer.large.cpu(), torch.arange(LARGE) + 1.0)


def test_a_poll_of_the_trainer_is_not_needed(monkeypatch, tmp_path, device):
    """Catches: an order that waits for the trainer's next call."""
    monkeypatch.setattr(checkpoint_manager, "DeviceCopies", partial(DeviceCopies, device.find))
    with CheckpointManager(tmp_path / "root") as manager:
        trainer = Trainer(device, manager)
        trainer.save(1)
        device.run()
        deadline = time.monotonic() + WAIT_S
        while not (tmp_path / "root" / TRACKER).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (tmp_path / "root" / TRACKER).read_text().strip() == "1"
        manager.wait_until_finished()
        trainer.assert_saved(1)


def test_a_small_tensor_may_change_in_the_forward_pass(trainers, device):
    """Catches: a buffer of a BatchNorm that tears each gated save."""
    trainer = trainers(device, engine="gated")
    trainer.save(1)
    device.launch(lambda: trainer.small.add_(1))
    device.run()
    trainer.manager.wait_until_finished()
    trainer.assert_saved(1)


def test_what_no_optimizer_owns_may_change_after_a_save(trainers, device):
    """Catches: an average of the weights on a device, torn by a change before the optimizer's step."""
    trainer = trainers(device)
    large = torch.nn.Parameter(trainer.large)  # the same memory
    optimizer = torch.optim.SGD([large], lr=0.1)
    trainer.manager.attach(optimizer)
    average = torch.zeros(LARGE, device=large.device)
    trainer.save(1, average=average)
    device.run(batches=1)  # the small tensors, and the average
    device.launch(lambda: average.add_(1))
    trainer.manager.before_update()
    device.run()
    trainer.manager.wait_until_finished()
    trainer.assert_saved(1)
    template = {"average": ShardedTensor.from_rank_offsets("average", torch.ones(LARGE))}
    assert torch.equal(trainer.manager.restore(template).state["average"], torch.zeros(LARGE))


def test_a_change_before_the_gate_fails_the_save(trainers, device):
    """Catches: a torn checkpoint that counts, of a trainer without ``before_update``."""
    trainer = trainers(device, engine="gated", on_failure="raise")
    trainer.save_whole(1)
    device.keep_busy()
    trainer.save(2)
    device.run(batches=1)  # the small tensors
    device.launch(lambda: trainer.large.add_(1))
    trainer.manager.before_update()
    device.run()
    with pytest.raises(SaveFailed, match="large was changed before it was copied to the host"):
        trainer.manager.wait_until_finished()


@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_an_early_step_of_an_optimizer_is_found(trainers, device, how):
    """Catches: a torn checkpoint that counts, of an optimizer whose changes torch does not count."""
    device.has_all = True
    model = torch.nn.Linear(300, 300).to(device.place)
    optimizer = torch.optim.Adam(model.parameters(), **{how: True})
    state = TrainingState(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    manager = trainers(device, engine="gated", on_failure="raise").manager
    manager.save(1, state.state_dict())
    device.run()
    manager.wait_until_finished()
    device.keep_busy()
    manager.save(2, state.state_dict())
    device.run(batches=1)  # the small tensors
    optimizer.step()
    manager.before_update()
    device.run()
    with pytest.raises(SaveFailed, match="was changed before"):
        manager.wait_until_finished()


def test_a_graph_is_captured_beside_a_save(monkeypatch, tmp_path):
    """Catches: copies, or a look at them, that break a capture; a replay that reaches the checkpoint."""
    device = device_called("cuda")
    monkeypatch.setattr(checkpoint_manager, "DeviceCopies", partial(DeviceCopies, device.find))
    with CheckpointManager(tmp_path / "root", engine="gated", on_failure="raise") as manager:
        manager.expect_gate()
        trainer = Trainer(device, manager)
        trainer.save_whole(1)
        trainer.save(2)  # an agent looks after its copies
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            trainer.update()
        manager.before_update()
        graph.replay()
        manager.wait_until_finished()
        trainer.assert_saved(2)
        assert torch.equal(trainer.large.cpu(), torch.arange(LARGE) + 1.0)


def test_state_on_host_and_accelerator_is_saved_together(trainers, device):
    """Catches: host memory that is read without a gate, beside that of an accelerator."""
    trainer = trainers(device, engine="gated")
    on_host = torch.ones(LARGE)
    trainer.save(1, host=on_host)
    device.run()
    trainer.manager.before_update()
    assert trainer.manager._share.writer.has_copy
    on_host.zero_()
    trainer.update()
    device.run()
    trainer.manager.wait_until_finished()
    state = {"host": ShardedTensor.from_rank_offsets("host", torch.zeros(LARGE))}
    assert torch.equal(trainer.manager.restore(state).state["host"], torch.ones(LARGE))
    trainer.assert_saved(1)


def test_host_state_may_change_when_an_eager_save_returns(trainers, fake):
    """Catches: a save that fails because the host's state changed, which was copied long before; a
    trainer that waits for the accelerator because of it."""
    trainer = trainers(fake, engine="eager", on_failure="raise")
    on_host = torch.ones(LARGE)
    trainer.save(1, host=on_host)
    trainer.manager.before_update()
    assert not trainer.job.holds_copy, "the accelerator has not copied yet"
    on_host.zero_()
    trainer.update()
    fake.run()
    trainer.manager.wait_until_finished()
    state = {"host": ShardedTensor.from_rank_offsets("host", torch.zeros(LARGE))}
    assert torch.equal(trainer.manager.restore(state).state["host"], torch.ones(LARGE))
    trainer.assert_saved(1)


def test_saves_leave_no_memory_behind(trainers, device):
    """Catches: memory that each save pins, or that is still pinned when the manager is closed; memory of
    the device that a save keeps."""
    trainer = trainers(device, retention=LatestN(1))
    saves = 50 if isinstance(device, RealDevice) else 3
    before = device.used_bytes()
    for step in range(1, saves + 1):
        trainer.save(step)
        trainer.update()
        device.run()
        trainer.manager.wait_until_finished()
    trainer.assert_saved(saves, saves - 1.0)
    assert device.used_bytes() == before
    assert (device.pins, len(device.pinned)) == (1, 1)
    trainer.manager.close()
    assert device.pinned == {}


def test_a_state_that_grew_gets_another_arena(trainers, device):
    """Catches: tensors behind the end of the arena."""
    trainer = trainers(device)
    for step in (1, 2):
        trainer.save(step)
        device.run()
        trainer.manager.wait_until_finished()
        trainer.large = device.tensor(GROWN)
    assert (device.pins, len(device.pinned)) == (2, 1)
    state = {"large": ShardedTensor.from_rank_offsets("large", torch.zeros(GROWN))}
    found = trainer.manager.restore(state, step=2).state["large"]
    assert torch.equal(found, torch.arange(GROWN, dtype=torch.float32))


def test_the_writer_keeps_the_arena_until_it_has_read_it(trainers, fake, caplog):
    """Catches: an arena that is given to the next save while a killed writer may still read it."""
    trainer = trainers(fake, on_failure="warn")
    job = trainer.save(1)
    os.kill(job._process.pid, signal.SIGSTOP)
    fake.run()
    assert job.holds_copy
    values = [trainer.large, trainer.small]
    with caplog.at_level("INFO", "ckptfsm"):
        assert trainer.copies.new_copy(values) is None
    assert "the last copy is still in use" in caplog.text
    os.kill(job._process.pid, signal.SIGCONT)
    trainer.manager.wait_until_finished()
    assert trainer.copies.new_copy(values) is not None


def test_without_pinned_memory_the_host_copies(trainers, device, caplog):
    """Catches: a job that cannot save because the driver pins no memory; a line for each save."""
    device.refusal = "no memory to pin"
    trainer = trainers(device)
    for step in (1, 2):
        trainer.save(step)
        trainer.manager.wait_until_finished()
        trainer.assert_saved(step)
    assert caplog.text.count("no pinned memory") == 1
    assert device.pinned == {}


def test_a_full_device_fails_no_save_that_it_can_copy(trainers, device):
    """Catches: a save that needs memory of the device, which a trainer may have taken to the last byte;
    one that the host cannot copy then, and that hangs or ends the job."""
    trainer = trainers(device, on_failure="raise")
    columns = device.tensor(4 * LARGE).view(LARGE, 4)[:, :3]
    with device.full():
        trainer.save_whole(1)
        with pytest.raises(SaveFailed, match="out of memory"):
            trainer.save_whole(2, columns=columns)
    trainer.save_whole(3, columns=columns)
    trainer.assert_saved(1)
    trainer.assert_saved(3)


def test_an_arena_that_takes_most_of_the_memory_is_not_taken(trainers, fake, caplog):
    """Catches: a host that ends a job, because memory which stays pinned is missing elsewhere."""
    trainer = trainers(fake, free_bytes=LARGE, engine="eager")
    trainer.save(1)
    trainer.manager.wait_until_finished()
    trainer.assert_saved(1)
    assert fake.pins == 0
    assert "may be taken for long" in caplog.text


def test_an_error_of_the_accelerator_fails_the_save(trainers, fake):
    """Catches: an error in the agent's thread, a save that hangs, or a checkpoint of rubbish."""
    trainer = trainers(fake, on_failure="raise")
    trainer.save(1)
    fake.error = "an illegal memory access was encountered"
    with pytest.raises(SaveFailed, match="cannot be copied to the host: an illegal memory access"):
        trainer.manager.wait_until_finished()
    assert trainer.manager.latest_step() is None


def test_a_dead_writer_without_its_order_has_a_successor(trainers, device):
    """Catches: an order to a dead process that is taken for an error of the agent, or loses the save."""
    trainer = trainers(device, on_failure="raise")
    trainer.save_whole(1)
    device.keep_busy()
    job = trainer.save(2)
    job._process.kill(WAIT_S)
    assert not job.holds_copy, "copies were under way"
    device.run()
    trainer.manager.wait_until_finished()
    trainer.assert_saved(2)


def test_a_forked_writer_keeps_its_arena(trainers, device, monkeypatch):
    """Catches: a child without the memory that it is to write, or with memory of the next save."""
    trainer = trainers(device)
    monkeypatch.setattr(WriteEngine, "_greet", lambda engine, deadline: False)
    for step in (1, 2):
        job = trainer.save(step)
        assert isinstance(job, Child)
        device.launch(lambda: trainer.large.add_(1))
        trainer.manager.wait_until_finished()
        assert device.pinned == {}
    trainer.large.zero_()
    found = trainer.saved(1)["large"]
    assert torch.equal(found, torch.arange(LARGE, dtype=torch.float32))


def test_a_forking_engine_copies_before_the_fork(trainers, device):
    """Catches: an accelerator that writes into memory of a forked child."""
    trainer = trainers(device, engine="fork")
    assert isinstance(trainer.save(1), Child)
    assert device.pins == 0
    trainer.manager.wait_until_finished()
    trainer.assert_saved(1)
