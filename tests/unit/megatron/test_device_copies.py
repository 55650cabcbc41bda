"""The arena for an accelerator's state, the copies into it, and the calls of the CUDA adapter."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from devices import DEVICES, LARGE, FakeDevice, RealDevice, device_called  # noqa: E402

from ckptfsm.adapters.memory import OwnMemory  # noqa: E402
from ckptfsm.dcp.device_copies import CudaDevice, DeviceCopies, cuda_of  # noqa: E402


@pytest.fixture(params=DEVICES)
def device(request) -> FakeDevice | RealDevice:
    return device_called(request.param)


@pytest.fixture
def fake() -> FakeDevice:
    return FakeDevice()


def test_an_update_runs_behind_the_copies(device):
    """Catches: an optimizer's step beside the copy: the checkpoint has some of either."""
    copies = DeviceCopies(device.find, lambda: 1 << 40)
    tensor = device.tensor(LARGE)
    copy = copies.new_copy([tensor])
    slot = copy.slot_for(tensor)
    copy.add("w", tensor, slot, first=False)
    copy.start()
    copy.order_updates()
    device.launch(lambda: tensor.add_(1))
    assert not copy.changed(), "the update is where it should be"
    device.run()
    assert copy.done()
    assert torch.equal(slot, torch.arange(LARGE, dtype=torch.float32))
    assert torch.equal(tensor.cpu(), torch.arange(LARGE) + 1.0)


def test_an_arena_that_is_still_read_is_not_filled(fake):
    """Catches: the next save's state in the file of a slow writer."""
    copies = DeviceCopies(fake.find, lambda: 1 << 40)
    tensor = fake.tensor(LARGE)
    first = copies.new_copy([tensor])
    slot = first.slot_for(tensor)
    first.add("w", tensor, slot, first=False)
    first.start()
    assert copies.new_copy([tensor]) is None, "the accelerator still fills it"
    fake.run()
    assert first.done()
    assert copies.new_copy([tensor]) is None, "a writer still reads it"
    gc.disable()  # as trainers do
    try:
        del first
        assert copies.new_copy([tensor]) is not None
    finally:
        gc.enable()
    assert fake.pins == 1


def test_an_arena_under_copies_is_not_unpinned(fake):
    """Catches: memory that is given back while an accelerator writes into it; a close that hangs."""
    copies = DeviceCopies(fake.find, lambda: 1 << 40)
    tensor = fake.tensor(LARGE)
    copy = copies.new_copy([tensor])
    copy.add("w", tensor, copy.slot_for(tensor), first=False)
    copy.start()
    del copy
    copies.close()
    assert len(fake.pinned) == 1
    fake.run()


def test_no_forked_child_has_the_arena(fake):
    """Catches: a data loader's process that shares pages with an accelerator."""
    copies = DeviceCopies(fake.find, lambda: 1 << 40)
    assert copies.new_copy([fake.tensor(LARGE)]) is not None
    [(address, size)] = fake.pinned.items()
    pid = os.fork()
    if not pid:
        lines = Path("/proc/self/maps").read_text().splitlines()
        spans = [[int(x, 16) for x in line.split()[0].split("-")] for line in lines]
        os._exit(any(low < address + size and address < high for low, high in spans))
    assert os.waitpid(pid, 0)[1] == 0


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
    copy = copies.new_copy([tensor])
    slot = copy.slot_for(tensor) if copy is not None else None
    if slot is not None:
        copy.add("w", tensor, slot, first=False)
        copy.start()
        device.run()
    return slot


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_has_the_form_of_its_tensor(form):
    """Catches: another file than that of a copy by the host."""
    tensor = FORMS[form](torch.randn(40, 20))
    slot, usual = copy_of(FakeDevice(has_all=True), tensor), tensor.detach().clone()
    assert torch.equal(slot, usual)
    assert (slot.dtype, slot.stride()) == (usual.dtype, usual.stride())
    assert slot.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize


@pytest.mark.parametrize("form", GAPS)
def test_other_forms_are_left_to_the_host(form):
    """Catches: a copy that torch makes in several steps, of which one waits for the accelerator."""
    assert copy_of(FakeDevice(has_all=True), GAPS[form](torch.randn(40, 20))) is None


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
    assert event.query()
    device.hold_updates(event)
    event.synchronize()
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_copies_into_pinned_pages():
    """Catches: pages that the driver does not take, or that cannot be read by address."""
    tensor = torch.randn(1000, device="cuda")
    copies = DeviceCopies()
    copy = copies.new_copy([tensor])
    slot = copy.slot_for(tensor)
    copy.add("w", tensor, slot, first=False)
    copy.start()
    copy.order_updates()
    wanted = tensor.cpu()
    tensor.zero_()
    torch.cuda.synchronize()
    assert copy.done()
    found = bytearray(wanted.numel() * 4)
    OwnMemory().read(slot.data_ptr(), memoryview(found))
    assert bytes(found) == ctypes.string_at(wanted.data_ptr(), len(found))
    del copy, slot
    copies.close()
