"""Copies of an accelerator's state to the host that the trainer does not wait for.

A side stream copies the tensors into pinned memory, behind the work that the trainer's current stream
has so far; the trainer joins other streams before ``save``. The trainer may change its tensors once its
current stream was put behind the copies (``order_updates``). The writer gets its order when they are
made.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ckptfsm.adapters.host import affordable_bytes, available_bytes
from ckptfsm.adapters.memory import give_to_children, take_pages
from ckptfsm.adapters.notices import say
from ckptfsm.core.errors import SaveFailed, describe

log = logging.getLogger("ckptfsm")

_ALIGNMENT = 512  # of a tensor in the arena
_GRAIN = 2 << 20  # the size of an arena is a multiple of this
_PORTABLE = 1  # ``cudaHostRegisterPortable``
_LEFT: list[PinnedArena] = []  # an accelerator that hangs may still write into these
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class CudaDevice:
    """A CUDA or ROCm device, through torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if the tensor lies in the memory of this device."""
        return tensor.device == self._device

    def pin(self, address: int, size: int) -> None:
        """Let the device reach this host memory. Raises ``OSError`` if it does not."""
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))
            if code:
                with contextlib.suppress(RuntimeError):  # the next kernel reports the error again
                    torch.ones(1, device=self._device).add_(1)
                raise OSError(errno.ENOMEM, f"cudaHostRegister of {size} bytes: error {code}")

    def unpin(self, address: int) -> None:
        """Undo ``pin``. Raises ``RuntimeError`` if the device failed."""
        with torch.cuda.device(self._device):
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(address)))

    def copy(self, pairs: Pairs) -> torch.cuda.Event:
        """Begin copies (from, to), in order, behind the current stream's work so far."""
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
                source.record_stream(self._side)  # its memory may be freed, and used again
            event = torch.cuda.Event()
            event.record(self._side)
        return event

    def hold_updates(self, event: torch.cuda.Event) -> None:
        """Let the later work of the current stream run behind these copies; does not wait."""
        torch.cuda.current_stream(self._device).wait_event(event)


def cuda_of(tensor: torch.Tensor) -> CudaDevice | None:
    """The CUDA device that holds a tensor, or None."""
    return CudaDevice(tensor.device) if tensor.is_cuda else None


class PinnedArena:
    """Pinned host memory, kept for the next saves. Raises ``OSError`` if there is none.

    No forked child has it: an accelerator writes into it past the kernel's copy-on-write.
    """

    def __init__(self, device: CudaDevice, size: int) -> None:
        self._device = device
        self.size = -(-size // _GRAIN) * _GRAIN
        self.pages = take_pages(self.size)
        self._address = ctypes.addressof(self.pages)
        device.pin(self._address, self.size)
        self._storage = torch.frombuffer(self.pages, dtype=torch.uint8).untyped_storage()

    def view(self, start: int, like: torch.Tensor) -> torch.Tensor:
        """A tensor at ``start``, in the form of ``like``."""
        piece = self._storage[start : start + like.numel() * like.itemsize]
        return torch.empty(0, dtype=like.dtype, device="cpu").set_(
            piece, 0, like.shape, like.stride()
        )

    def let_go(self) -> None:
        """Unpin the memory, after all copies into it. The pages go with the last reference to them."""
        try:
            self._device.unpin(self._address)
        except RuntimeError as error:  # the accelerator failed before
            said = f"pinned memory cannot be given back: {describe(error)}"
            say(log.warning, "not_unpinned", said, error=describe(error))


class DeviceCopies:
    """The arena of one rank, and the saves that use it.

    ``find`` returns the device of a tensor, or None for one in host memory. All later calls are
    for the first device that is found; tensors of other devices are copied by the host.
    """

    def __init__(
        self,
        find: Callable[[torch.Tensor], CudaDevice | None] = cuda_of,
        free_bytes: Callable[[], int] = available_bytes,
    ) -> None:
        self._find = find
        self._free_bytes = free_bytes
        self._device: CudaDevice | None = None
        self._arena: PinnedArena | None = None
        self._last: weakref.ref[StateCopy] | None = None
        self._event: torch.cuda.Event | None = None  # of the last copies
        self._off = False

    def new_copy(self, values: Iterable[Any]) -> StateCopy | None:
        """The copy of a save with these values; None if the host is to copy, or nothing is to be."""
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if self._device is None:
            found = map(self._find, tensors)
            self._device = next((each for each in found if each is not None), None)
        device = self._device
        if self._off or device is None:
            return None
        needed = sum(_slot_bytes(each) for each in tensors if _is_copied_by(device, each))
        if not needed:
            return None
        # While a writer may read the arena, its ``StateCopy`` lives.
        if (self._last is not None and self._last() is not None) or not self._is_filled():
            said = "the state is copied while the trainer waits: the last copy is still in use"
            say(log.info, "pinned_memory_in_use", said)
            return None
        arena = self._arena_of(device, needed)
        if arena is None:
            return None
        copy = StateCopy(self, device, arena)
        self._last = weakref.ref(copy)
        return copy

    def begun(self, event: torch.cuda.Event) -> None:
        """Note the end of the last copies into the arena."""
        self._event = event

    def _is_filled(self) -> bool:
        """True if no copy into the arena is under way."""
        try:
            if self._event is not None and not self._event.query():
                return False
        except RuntimeError as error:
            said = f"the last copies of the state failed: {describe(error)}"
            say(log.warning, "device_failed", said, error=describe(error))
        self._event = None
        return True

    def _arena_of(self, device: CudaDevice, needed: int) -> PinnedArena | None:
        """An arena of at least ``needed`` bytes; None, and never one again, if there is no memory."""
        if self._arena is not None and self._arena.size >= needed:
            return self._arena
        self.close()  # first: else both are there for a moment
        try:
            limit = affordable_bytes(self._free_bytes)
            if needed > limit:
                raise OSError(
                    errno.ENOMEM, f"{needed} bytes, and at most {limit} may be taken for long"
                )
            self._arena = PinnedArena(device, needed)
        except OSError as error:
            self._off = True
            why = describe(error)
            said = f"the trainer waits for copies of its state: no pinned memory: {why}"
            say(log.warning, "no_pinned_memory", said, error=why)
        return self._arena

    def give_to_children(self) -> None:
        """Give the arena to a child that is forked next, filled for the last time; use none again."""
        arena, self._off = self._arena, True
        self.close()
        if arena is not None:
            give_to_children(arena.pages)

    def close(self) -> None:
        """Give the arena back; never waits. Under copies, it stays until the process ends."""
        arena, self._arena = self._arena, None
        if arena is None:
            return
        if self._is_filled():
            arena.let_go()
        else:
            _LEFT.append(arena)


def _is_copied_by(device: CudaDevice, tensor: torch.Tensor) -> bool:
    """True if the device can copy a tensor by itself, as it lies in memory."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and device.holds(tensor)
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.numel() > 0
        and torch.empty_like(tensor, device="meta").stride() == tensor.stride()  # without gaps
    )


def _slot_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor in an arena."""
    return -(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT


class StateCopy:
    """The copies of one save, see ``core.images.Copying``. The arena is taken while this lives.
    ``watched``: names, tensors and versions; a change of one before ``order_updates`` is found."""

    def __init__(self, owner: DeviceCopies, device: CudaDevice, arena: PinnedArena) -> None:
        self._owner, self._device, self._arena = owner, device, arena
        self.host_copied = False
        self._used = 0
        self._first: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._others: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.watched: list[tuple[str, torch.Tensor, int]] = []
        self._problem = ""
        self._event: torch.cuda.Event | None = None

    def slot_for(self, value: Any) -> torch.Tensor | None:
        """Host memory in the form of a tensor; None if the host is to copy it."""
        if not isinstance(value, torch.Tensor) or not _is_copied_by(self._device, value):
            return None
        start = self._used
        self._used += _slot_bytes(value)
        return self._arena.view(start, value)

    def add(self, name: str, value: torch.Tensor, slot: torch.Tensor, *, first: bool) -> None:
        """Copy a tensor into its slot. If it is ``first``, it may be changed once ``start`` returns."""
        (self._first if first else self._others).append((value, slot))
        if not first:
            self.watched.append((name, value, version_of(value)))

    def start(self) -> None:
        """Begin the copies. Raises the accelerator's error."""
        if self._first:
            self._device.hold_updates(self._copy(self._first))
        if self._others:
            self._copy(self._others)
        self._first, self._others = [], []

    def _copy(self, pairs: Pairs) -> torch.cuda.Event:
        self._event = event = self._device.copy(pairs)
        self._owner.begun(event)
        return event

    def done(self) -> bool:
        if self._event is not None:
            try:
                if not self._event.query():
                    return False
            except RuntimeError as error:
                raise SaveFailed(f"the state cannot be copied to the host: {error}") from error
            self._event = None
        return True

    def order_updates(self) -> None:
        self._problem = self.changed()
        self.watched = []
        if self._event is not None:
            self._device.hold_updates(self._event)

    def changed(self) -> str:
        """The first tensor that was changed before ``order_updates``, in words; "" if none was."""
        for name, tensor, version in self.watched:
            if not self._problem and version_of(tensor) != version:
                self._problem = f"{name} was changed before it was copied to the host"
        return self._problem

    def let_go(self) -> None:
        self.watched = []

    def give_to_child(self) -> None:
        if self._event is not None:
            self._event.synchronize()
        self._owner.give_to_children()


def version_of(tensor: torch.Tensor) -> int:
    """The number of changes in place that torch has counted; it counts none in inference mode."""
    return 0 if tensor.is_inference() else tensor._version
