"""Move the state of an offloaded optimizer into shared memory, from where the writer process reads it.

A tensor keeps its identity, values, shape and strides. One whose memory is a part of a larger one stays
where it lies: other tensors may use the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ckptfsm.adapters.segments import SharedSegment, is_in_segment
from ckptfsm.core.errors import ConfigError

_ALIGNMENT = 4096  # of a storage in the segment: more than any kernel of torch asks for
_LEAST_BYTES = 64 << 10  # smaller tensors are copied when a save is staged


def tensors_of(state: Any) -> list[torch.Tensor]:
    """All tensors of an optimizer (parameters and state), or in mappings and iterables, once each.

    Raises ``ConfigError`` if ``state`` is something else.
    """
    if not isinstance(state, (torch.Tensor, torch.optim.Optimizer, Iterable)):
        raise ConfigError(
            f"a {type(state).__name__} has no tensors to share; give a torch.optim.Optimizer or tensors"
        )
    return list({id(tensor): tensor for tensor in _tensors_in(state)}.values())


def _tensors_in(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, torch.optim.Optimizer):
        yield from _tensors_in([group["params"] for group in state.param_groups])
        yield from _tensors_in(state.state)
    elif isinstance(state, Mapping):
        yield from _tensors_in(state.values())
    elif isinstance(state, Iterable) and not isinstance(state, (str, bytes)):
        for value in state:
            yield from _tensors_in(value)


def local_of(value: Any) -> Any:
    """This rank's part of a DTensor; another value as it is."""
    return value._local_tensor if isinstance(value, DTensor) else value


def storage_of(tensor: torch.Tensor) -> int | None:
    """The address of a tensor's storage, or of this rank's part; None if it has none itself."""
    try:
        return int(local_of(tensor).untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # a wrapper, as of quantized moments
        return None


def move_to_shared_memory(tensors: Iterable[torch.Tensor]) -> SharedSegment | None:
    """Move tensors on the CPU into one new segment, in place; None if there are none to move.

    Raises ``OSError`` if the kernel gives no such memory. Nothing is moved then.
    """
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if _is_movable(tensor):
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    moved = [group for group in groups.values() if _covers(group)]
    sizes = [group[0].untyped_storage().nbytes() for group in moved]
    if not moved:
        return None
    segment = SharedSegment(sum(map(_aligned, sizes)))
    start = 0
    for group, size in zip(moved, sizes, strict=True):
        _move(group, torch.frombuffer(segment.view(start, size), dtype=torch.uint8))
        start += _aligned(size)
    return segment


def _is_movable(tensor: torch.Tensor) -> bool:
    """True for plain tensors on the CPU, in memory that is neither pinned nor shared already."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_inference():
        return False
    if tensor.is_conj() or tensor.is_neg():
        return False
    storage = tensor.untyped_storage()
    return (
        storage.nbytes() >= _LEAST_BYTES
        and not (storage.is_shared() or tensor.is_pinned())
        and not is_in_segment(storage.data_ptr())
    )


def _covers(tensors: list[torch.Tensor]) -> bool:
    """True if these tensors use all bytes of their storage: none is left for others."""
    spans = sorted(span_of(tensor) for tensor in tensors)
    end = 0
    for first, last in spans:
        if first > end:
            return False
        end = max(end, last)
    return end == tensors[0].untyped_storage().nbytes()


def extent_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage from a tensor's first to its last, with the gaps between them."""
    first = int(tensor.storage_offset()) * tensor.itemsize
    if tensor.numel() == 0:
        return (first, first)
    used = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (first, first + int(used) * tensor.itemsize)


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor uses, without gaps; none if it has gaps."""
    first, last = extent_of(tensor)
    return (first, last) if last - first == tensor.nbytes else (0, 0)


def _move(tensors: list[torch.Tensor], memory: torch.Tensor) -> None:
    """Copy the storage of the tensors to ``memory``, and let them use that."""
    storage = memory.untyped_storage()
    storage.copy_(tensors[0].untyped_storage(), non_blocking=False)
    for tensor in tensors:
        place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        tensor.data = torch.empty(0, dtype=tensor.dtype).set_(storage, *place)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
