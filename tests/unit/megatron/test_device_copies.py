"""Copies of an accelerator's state: when the writer gets its order, and when the state may change.

The accelerator is a fake, or the CUDA device of the machine, if there is one. Tensors of the fake lie in
host memory. Its copies run when a test says so; the trainer's kernels run at once, unless its stream was
put behind copies.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402

from ckptfsm import CheckpointManager, SaveFailed  # noqa: E402
from ckptfsm.adapters.fork import Child  # noqa: E402
from ckptfsm.adapters.memory import OwnMemory  # noqa: E402
from ckptfsm.megatron import checkpoint_manager, device_copies, image_part  # noqa: E402
from ckptfsm.megatron.device_copies import CudaDevice, DeviceCopies, cuda_of  # noqa: E402
from ckptfsm.writers.write_engine import WriteEngine, WriteJob  # noqa: E402

WAIT_S = 60.0
LARGE = image_part.SMALL_BYTES // 4 + 100  # numbers of four bytes
SMALL = 10
GROWN = LARGE + (1 << 20)
TRACKER = "latest_checkpointed_iteration.txt"
DEVICES = ("fake", "cuda")


class FakeEvent:
    """The end of copies of a fake."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.ended = device, False

    def done(self) -> bool:
        if self.device.error:
            raise RuntimeError(self.device.error)
        return self.ended

    def wait(self) -> None:
        self.device.run()

    def hold_updates(self) -> None:
        if not self.ended:
            self.device.held_by.append(self)


class FakeDevice:
    """An accelerator whose copies run in ``run``, and whose memory the host cannot tell from its own."""

    def __init__(self) -> None:
        self.error = self.refusal = ""
        self.pinned: dict[int, int] = {}
        self.pins = 0
        self.held_by: list[FakeEvent] = []
        self._places: set[int] = set()
        self._copies: list[tuple[list, FakeEvent]] = []
        self._kernels: list[Callable[[], object]] = []

    def tensor(self, size: int) -> torch.Tensor:
        made = torch.arange(size, dtype=torch.float32)
        self._places.add(made.untyped_storage().data_ptr())
        return made

    def find(self, tensor: torch.Tensor) -> FakeDevice | None:
        return self if self.holds(tensor) else None

    def launch(self, kernel: Callable[[], object]) -> None:
        """Run a kernel on the trainer's stream."""
        if self.held_by:
            self._kernels.append(kernel)
        else:
            kernel()

    def run(self, batches: int | None = None) -> None:
        """Make the copies of all batches, or of the first ones, then run the kernels behind them."""
        begun, self._copies = self._copies[:batches], self._copies[len(self._copies[:batches]) :]
        for pairs, event in begun:
            for source, target in pairs:
                target.copy_(source)
            event.ended = True
        self.held_by = [event for event in self.held_by if not event.ended]
        while self._kernels and not self.held_by:
            self._kernels.pop(0)()

    # -------------------------------------------------------------------- device_copies.Device

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._places

    def pin(self, address: int, size: int) -> None:
        if self.refusal:
            raise OSError(errno.ENOMEM, self.refusal)
        self.pinned[address] = size
        self.pins += 1

    def unpin(self, address: int) -> None:
        if self.error:
            raise RuntimeError(self.error)
        del self.pinned[address]

    def copy(self, pairs) -> FakeEvent:
        event = FakeEvent(self)
        for _, target in pairs:
            address = target.data_ptr()
            assert any(at <= address < at + size for at, size in self.pinned.items())
        self._copies.append((list(pairs), event))
        return event


class RealDevice:
    """The CUDA device, which makes its copies when it likes."""

    def tensor(self, size: int) -> torch.Tensor:
        return torch.arange(size, dtype=torch.float32, device="cuda")

    def find(self, tensor: torch.Tensor) -> device_copies.Device | None:
        return cuda_of(tensor)

    def launch(self, kernel: Callable[[], object]) -> None:
        kernel()

    def run(self, batches: int | None = None) -> None:
        if batches is None:
            torch.cuda.synchronize()


@pytest.fixture(params=DEVICES)
def device(request) -> FakeDevice | RealDevice:
    if request.param == "fake":
        return FakeDevice()
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return RealDevice()


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
        return self.manager._ports.driver._copies

    @property
    def job(self):
        return self.manager._participant.reports.writer.process

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
        monkeypatch.setattr(checkpoint_manager, "mailbox_of", lambda transport: None)
        manager = CheckpointManager(tmp_path / f"root{len(made)}", **settings)
        made.append(Trainer(device, manager))
        return made[-1]

    yield make
    for trainer in made:
        trainer.device.run()
        trainer.manager.abandon()


# ----------------------------------------------------------------------------------- the order


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


def test_an_update_runs_behind_the_copies(device):
    """Catches: an optimizer's step beside the copy: the checkpoint has some of either."""
    copies = DeviceCopies(device.find, lambda: 1 << 40)
    tensor = device.tensor(LARGE)
    copy = copies.begin([tensor])
    room = copy.room_for(tensor)
    copy.add("w", tensor, room, small=False)
    copy.start()
    copy.order_updates()
    device.launch(lambda: tensor.add_(1))
    assert not copy.changed(), "the update is where it should be"
    device.run()
    assert copy.done()
    assert torch.equal(room, torch.arange(LARGE, dtype=torch.float32))
    assert torch.equal(tensor.cpu(), torch.arange(LARGE) + 1.0)


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


def test_a_save_waits_for_nothing(trainers, fake):
    """Catches: a trainer that waits for the accelerator in ``save``, or at the gate."""
    trainer = trainers(fake, engine="gated")
    job = trainer.save(1)
    fake.run(batches=1)  # the small tensors
    trainer.manager.before_update()
    trainer.update()
    assert len(fake._kernels) == 2, "the accelerator waits, and the host does not"
    assert not job.holds_copy
    fake.run()
    trainer.manager.wait_until_finished()
    trainer.assert_saved(1)


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


def test_a_small_tensor_may_change_in_the_forward_pass(trainers, fake):
    """Catches: a buffer of a BatchNorm that tears each gated save."""
    trainer = trainers(fake, engine="gated")
    trainer.save(1)
    fake.launch(lambda: trainer.small.add_(1))
    fake.run()
    trainer.manager.wait_until_finished()
    trainer.assert_saved(1)


def test_a_change_before_the_gate_fails_the_save(trainers, fake):
    """Catches: a torn checkpoint that counts, of a trainer without ``before_update``."""
    trainer = trainers(fake, engine="gated", on_failure="raise")
    trainer.save(1)
    fake.run(batches=1)  # the small tensors
    fake.launch(lambda: trainer.large.add_(1))
    trainer.manager.before_update()
    fake.run()
    with pytest.raises(SaveFailed, match="large was changed before it was copied to the host"):
        trainer.manager.wait_until_finished()


def test_state_on_host_and_accelerator_is_saved_together(trainers, device):
    """Catches: host memory that is read without a gate, beside that of an accelerator."""
    trainer = trainers(device, engine="gated")
    on_host = torch.ones(LARGE)
    trainer.save(1, host=on_host)
    device.run()
    trainer.manager.before_update()
    assert trainer.manager._participant.reports.writer.has_copy
    on_host.zero_()
    trainer.update()
    device.run()
    trainer.manager.wait_until_finished()
    state = {"host": ShardedTensor.from_rank_offsets("host", torch.zeros(LARGE))}
    assert torch.equal(trainer.manager.restore(state).state["host"], torch.ones(LARGE))
    trainer.assert_saved(1)


# ----------------------------------------------------------------------------------- the arena


def test_the_arena_is_pinned_once(trainers, fake):
    """Catches: memory that is pinned for each save, or is still pinned when the manager is closed."""
    trainer = trainers(fake)
    for step in (1, 2, 3):
        trainer.save(step)
        trainer.update()
        fake.run()
        trainer.manager.wait_until_finished()
        trainer.assert_saved(step, step - 1.0)
    assert (fake.pins, len(fake.pinned)) == (1, 1)
    trainer.manager.close()
    assert fake.pinned == {}


def test_a_state_that_grew_gets_another_arena(trainers, fake):
    """Catches: tensors behind the end of the arena."""
    trainer = trainers(fake)
    for step in (1, 2):
        trainer.save(step)
        fake.run()
        trainer.manager.wait_until_finished()
        trainer.large = fake.tensor(GROWN)
    assert (fake.pins, len(fake.pinned)) == (2, 1)
    state = {"large": ShardedTensor.from_rank_offsets("large", torch.zeros(GROWN))}
    found = trainer.manager.restore(state, step=2).state["large"]
    assert torch.equal(found, torch.arange(GROWN, dtype=torch.float32))


def test_an_arena_that_is_still_read_is_not_filled(fake):
    """Catches: the next save's state in the file of a slow writer."""
    copies = DeviceCopies(fake.find, lambda: 1 << 40)
    tensor = fake.tensor(LARGE)
    first = copies.begin([tensor])
    room = first.room_for(tensor)
    first.add("w", tensor, room, small=False)
    first.start()
    assert copies.begin([tensor]) is None, "the accelerator still fills it"
    fake.run()
    assert first.done()
    assert copies.begin([tensor]) is None, "a writer still reads it"
    gc.disable()  # as trainers do
    try:
        del first
        assert copies.begin([tensor]) is not None
    finally:
        gc.enable()
    assert fake.pins == 1


def test_the_writer_keeps_the_arena_until_it_has_read_it(trainers, fake, caplog):
    """Catches: an arena that is given to the next save while a killed writer may still read it."""
    trainer = trainers(fake, on_failure="warn")
    job = trainer.save(1)
    os.kill(job._process.pid, signal.SIGSTOP)
    fake.run()
    assert job.holds_copy
    values = [trainer.large, trainer.small]
    with caplog.at_level("INFO", "ckptfsm"):
        assert trainer.copies.begin(values) is None
    assert "the last copy is still in use" in caplog.text
    os.kill(job._process.pid, signal.SIGCONT)
    trainer.manager.wait_until_finished()
    assert trainer.copies.begin(values) is not None


def test_an_arena_under_copies_is_not_unpinned(fake):
    """Catches: memory that is given back while an accelerator writes into it; a close that hangs."""
    copies = DeviceCopies(fake.find, lambda: 1 << 40)
    tensor = fake.tensor(LARGE)
    copy = copies.begin([tensor])
    copy.add("w", tensor, copy.room_for(tensor), small=False)
    copy.start()
    del copy
    copies.close()
    assert len(fake.pinned) == 1
    fake.run()


def test_no_forked_child_has_the_arena(fake):
    """Catches: a data loader's process that shares pages with an accelerator."""
    copies = DeviceCopies(fake.find, lambda: 1 << 40)
    assert copies.begin([fake.tensor(LARGE)]) is not None
    [(address, size)] = fake.pinned.items()
    pid = os.fork()
    if not pid:
        lines = Path("/proc/self/maps").read_text().splitlines()
        spans = [[int(x, 16) for x in line.split()[0].split("-")] for line in lines]
        os._exit(any(low < address + size and address < high for low, high in spans))
    assert os.waitpid(pid, 0)[1] == 0


# -------------------------------------------------------------------------------- other ways


def test_without_pinned_memory_the_host_copies(trainers, fake, caplog):
    """Catches: a job that cannot save because the host has no memory to pin; a line for each save."""
    fake.refusal = "no memory to pin"
    trainer = trainers(fake)
    for step in (1, 2):
        trainer.save(step)
        trainer.manager.wait_until_finished()
        trainer.assert_saved(step)
    assert caplog.text.count("no memory to pin") == 1


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


def test_a_dead_writer_without_its_order_fails_the_save(trainers, fake):
    """Catches: an order to a dead process that is taken for an error of the agent, or for a success."""
    trainer = trainers(fake, on_failure="raise")
    job = trainer.save(1)
    job._process.kill(WAIT_S)
    fake.run()
    with pytest.raises(SaveFailed, match="killed by SIGKILL"):
        trainer.manager.wait_until_finished()


def test_a_forked_writer_keeps_its_arena(trainers, fake, monkeypatch):
    """Catches: a child without the memory that it is to write, or with memory of the next save."""
    trainer = trainers(fake)
    monkeypatch.setattr(WriteEngine, "_ready", lambda engine: None)
    for step in (1, 2):
        job = trainer.save(step)
        assert isinstance(job, Child)
        fake.launch(lambda: trainer.large.add_(1))
        trainer.manager.wait_until_finished()
        assert fake.pinned == {}
    trainer.large.zero_()
    found = trainer.saved(1)["large"]
    assert torch.equal(found, torch.arange(LARGE, dtype=torch.float32))


def test_a_forking_engine_copies_before_the_fork(trainers, fake):
    """Catches: an accelerator that writes into memory of a forked child."""
    trainer = trainers(fake, engine="fork")
    assert isinstance(trainer.save(1), Child)
    assert fake.pins == 0
    trainer.manager.wait_until_finished()
    trainer.assert_saved(1)


FORMS = {
    "rows": lambda base: base[10:20],
    "transposed": lambda base: base.t(),
    "half": lambda base: base.to(torch.bfloat16),
    "complex": lambda base: torch.complex(base, base),
    "a number": lambda base: base.sum(),
}
GAPS = {
    "columns": lambda base: base[:, 3:7],
    "expanded": lambda base: base[0].expand(5, 20),
    "empty": lambda base: base[:0],
    "conjugate": lambda base: torch.complex(base, base).conj(),
    "sparse": lambda base: base.to_sparse(),
}


def copy_of(device, tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor in an arena, if the accelerator can copy it."""
    copies = DeviceCopies(lambda each: device)
    copy = copies.begin([tensor])
    room = copy.room_for(tensor) if copy is not None else None
    if room is not None:
        copy.add("w", tensor, room, small=False)
        copy.start()
        device.run()
    return room


class Everything(FakeDevice):
    """A fake to which all tensors belong."""

    def holds(self, tensor: torch.Tensor) -> bool:
        return True


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_has_the_form_of_its_tensor(form):
    """Catches: another file than that of a copy by the host."""
    tensor = FORMS[form](torch.randn(40, 20))
    room, usual = copy_of(Everything(), tensor), tensor.detach().clone()
    assert torch.equal(room, usual)
    assert (room.dtype, room.stride()) == (usual.dtype, usual.stride())
    assert room.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize


@pytest.mark.parametrize("form", GAPS)
def test_other_forms_are_left_to_the_host(form):
    """Catches: a copy that torch makes in several steps, of which one waits for the accelerator."""
    assert copy_of(Everything(), GAPS[form](torch.randn(40, 20))) is None


# ------------------------------------------------------------------------------ the CUDA adapter


class Calls:
    """torch.cuda for one adapter: it notes the calls, in order."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.code = 0

    def note(self, name: str, found: object = None) -> Callable[..., object]:
        def call(*arguments: object, **named: object) -> object:
            self.said.append(name)
            return found

        return call

    def cuda(self) -> SimpleNamespace:
        event = SimpleNamespace(
            record=self.note("record"),
            query=self.note("query", True),
            synchronize=self.note("wait"),
        )
        side = SimpleNamespace(wait_stream=self.note("side waits for the current stream"))
        now = SimpleNamespace(wait_event=self.note("the current stream waits for the event"))
        runtime = SimpleNamespace(
            cudaHostRegister=lambda *given: self.note("register", self.code)(),
            cudaHostUnregister=self.note("unregister", 0),
        )
        return SimpleNamespace(
            Stream=lambda device: side,
            Event=lambda: event,
            current_stream=lambda device: now,
            stream=lambda stream: _Within(self.said, "side"),
            device=lambda device: _Within([], ""),
            cudart=lambda: runtime,
            check_error=self.note("checked"),
        )


class _Within:
    def __init__(self, said: list[str], name: str) -> None:
        self.said, self.name = said, name

    def __enter__(self) -> None:
        self.said.append(f"on {self.name}")

    def __exit__(self, *_: object) -> None:
        self.said.append(f"off {self.name}")


@pytest.fixture
def calls(monkeypatch) -> Calls:
    made = Calls()
    monkeypatch.setattr(torch, "cuda", made.cuda())
    return made


def test_the_adapter_orders_the_streams(calls):
    """Catches: a copy before the kernels that make the state; memory that is used again too early."""
    device = CudaDevice(torch.device("cpu"))
    target = SimpleNamespace(copy_=calls.note("copy"))
    event = device.copy([(SimpleNamespace(record_stream=calls.note("keep")), target)])
    assert event.done()
    event.hold_updates()
    event.wait()
    assert calls.said == [
        "side waits for the current stream",
        *("on side", "copy", "keep", "record", "off side"),
        *("query", "the current stream waits for the event", "wait"),
    ]


def test_the_adapter_tells_that_memory_cannot_be_pinned(calls):
    """Catches: pageable memory that is taken for pinned."""
    device = CudaDevice(torch.device("cpu"))
    device.pin(4096, 10)
    device.unpin(4096)
    assert calls.said == ["register", "unregister", "checked"]
    calls.code = 2
    with pytest.raises(OSError, match="cudaHostRegister of 10 bytes: error 2"):
        device.pin(4096, 10)


def test_a_tensor_of_the_host_has_no_device():
    assert cuda_of(torch.zeros(1)) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_copies_into_pinned_pages():
    """Catches: pages that the driver does not take, or that cannot be read by address."""
    tensor = torch.randn(1000, device="cuda")
    copies = DeviceCopies()
    copy = copies.begin([tensor])
    room = copy.room_for(tensor)
    copy.add("w", tensor, room, small=False)
    copy.start()
    copy.order_updates()
    wanted = tensor.cpu()
    tensor.zero_()
    torch.cuda.synchronize()
    assert copy.done()
    found = bytearray(wanted.numel() * 4)
    OwnMemory().read(room.data_ptr(), memoryview(found))
    assert bytes(found) == ctypes.string_at(wanted.data_ptr(), len(found))
    del copy, room
    copies.close()
