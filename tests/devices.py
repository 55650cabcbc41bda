"""An accelerator that a test controls, and the CUDA device of the machine, if there is one.

Tensors of the fake lie in host memory. Its copies run when a test says so; the trainer's kernels run at
once, unless its stream was put behind copies.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch

from ckptfsm.dcp import images
from ckptfsm.dcp.device_copies import CudaDevice

DEVICES = ("fake", "cuda")
LARGE = images.SMALL_BYTES // 4 + 100  # numbers of four bytes
_BUSY_CYCLES = 8 << 30  # of a GPU: about 4 s


class FakeEvent:
    """The end of copies of a fake."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.ended = device, False

    def query(self) -> bool:
        if self.device.error:
            raise RuntimeError(self.device.error)
        return self.ended

    def synchronize(self) -> None:
        self.device.run()


class FakeDevice:
    """An accelerator whose copies run in ``run``, and whose memory the host cannot tell from its own.

    ``has_all``: every tensor lies in its memory, also those that it has not made.
    """

    place = "cpu"

    def __init__(self, *, has_all: bool = False) -> None:
        self.has_all = has_all
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

    def keep_busy(self) -> None:
        """Let copies that begin now not end for a while."""

    def used_bytes(self) -> int:
        """The device memory of all living tensors."""
        return 0

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Refuse all memory of the device: the host's copies of tensors with gaps need some."""
        copied = images.to_host

        def refused(value: object) -> object:
            if isinstance(value, torch.Tensor) and self.holds(value):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return copied(value)

        with patch.object(images, "to_host", refused):
            yield

    # -------------------------------------------------------------------- device_copies.CudaDevice

    def holds(self, tensor: torch.Tensor) -> bool:
        return self.has_all or tensor.untyped_storage().data_ptr() in self._places

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

    def hold_updates(self, event: FakeEvent) -> None:
        if not event.ended:
            self.held_by.append(event)


class ReadyDevice(FakeDevice):
    """A fake to which all tensors belong, and which makes its copies at once: for whole jobs."""

    def __init__(self) -> None:
        super().__init__(has_all=True)

    def copy(self, pairs) -> FakeEvent:
        event = super().copy(pairs)
        self.run()
        return event


class RealDevice:
    """The CUDA device, which makes its copies when it likes. Notes what it has pinned."""

    place = "cuda"

    def __init__(self) -> None:
        self.refusal = ""
        self.pinned: dict[int, int] = {}
        self.pins = 0

    def tensor(self, size: int) -> torch.Tensor:
        return torch.arange(size, dtype=torch.float32, device="cuda")

    def find(self, tensor: torch.Tensor) -> CudaDevice | None:
        return _Watched(tensor.device, self) if tensor.is_cuda else None

    def launch(self, kernel: Callable[[], object]) -> None:
        kernel()

    def run(self, batches: int | None = None) -> None:
        if batches is None:
            torch.cuda.synchronize()

    def keep_busy(self) -> None:
        torch.cuda._sleep(_BUSY_CYCLES)

    def used_bytes(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        torch.cuda.empty_cache()
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
        taken = []
        for size in (1 << 20, 1 << 14, 512):
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
            del taken


class _Watched(CudaDevice):
    """CUDA. If it is to refuse memory, the driver is asked to pin the same pages twice."""

    def __init__(self, device: torch.device, owner: RealDevice) -> None:
        super().__init__(device)
        self._owner = owner

    def pin(self, address: int, size: int) -> None:
        super().pin(address, size)
        if self._owner.refusal:
            try:
                super().pin(address, size)
            finally:
                super().unpin(address)
        self._owner.pinned[address] = size
        self._owner.pins += 1

    def unpin(self, address: int) -> None:
        super().unpin(address)
        del self._owner.pinned[address]


def device_called(name: str) -> FakeDevice | RealDevice:
    """A device of ``DEVICES``. Skips the test if the machine has none."""
    if name == "fake":
        return FakeDevice()
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return RealDevice()
