"""An accelerator that a test controls, and the CUDA device of the machine, if there is one.

Tensors of the fake lie in host memory. Its copies run when a test says so; the trainer's kernels run at
once, unless its stream was put behind copies.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
import torch

from ckptfsm.dcp import device_copies, images
from ckptfsm.dcp.device_copies import cuda_of

DEVICES = ("fake", "cuda")
LARGE = images.SMALL_BYTES // 4 + 100  # numbers of four bytes


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

    # -------------------------------------------------------------------- device_copies.CudaDevice

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

    def hold_updates(self, event: FakeEvent) -> None:
        if not event.ended:
            self.held_by.append(event)


class RealDevice:
    """The CUDA device, which makes its copies when it likes."""

    def tensor(self, size: int) -> torch.Tensor:
        return torch.arange(size, dtype=torch.float32, device="cuda")

    def find(self, tensor: torch.Tensor) -> device_copies.CudaDevice | None:
        return cuda_of(tensor)

    def launch(self, kernel: Callable[[], object]) -> None:
        kernel()

    def run(self, batches: int | None = None) -> None:
        if batches is None:
            torch.cuda.synchronize()


def device_called(name: str) -> FakeDevice | RealDevice:
    """A device of ``DEVICES``. Skips the test if the machine has none."""
    if name == "fake":
        return FakeDevice()
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return RealDevice()
