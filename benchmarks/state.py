"""The state that a benchmark saves: tensors that a training step updates in place."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, Literal

import torch
from megatron.core.dist_checkpointing import ShardedTensor

Kind = Literal["large", "mixed", "small"]
LARGE_TENSORS, MIXED_TENSORS = 16, 2_000
SMALL_BYTES = 52 << 10  # of each small tensor
_DTYPES = (torch.float32, torch.bfloat16, torch.int64)  # of mixed tensors
_DECADES = 4  # the largest of the mixed tensors has about 10**4 times the bytes of the smallest
_UNIT_BYTES = 8  # each dtype fits into it without a rest
_FLOAT_BYTES = 4
_SEED = 1234


class TrainingState:
    """``state_bytes`` of tensors: 16 ``large`` ones of float32, 2,000 ``mixed`` ones, or ``small`` ones.

    Sizes, dtypes and values come from a seed. ``offsets`` is the place of the tensors in those of
    all ranks, as ``ShardedTensor.from_rank_offsets`` takes it.
    """

    def __init__(
        self,
        state_bytes: int,
        kind: Kind = "large",
        device: str = "cpu",
        offsets: tuple[tuple[int, int, int], ...] = (),
    ) -> None:
        generator = torch.Generator(device).manual_seed(_SEED)
        self._offsets = offsets
        self.tensors = [
            torch.rand(length, device=device, generator=generator).mul_(256).to(dtype)
            for length, dtype in _FORMS[kind](state_bytes)
        ]

    def sharded(self, step: int) -> dict[str, Any]:
        """The sharded state dict of ``step``, with a little common state."""
        named = {f"layer.{i}.weight": tensor for i, tensor in enumerate(self.tensors)}
        shards = {
            k: ShardedTensor.from_rank_offsets(k, v, *self._offsets) for k, v in named.items()
        }
        return {**shards, "step": step, "args": {"lr": 1e-3, "seed": 1234}}

    def update(self) -> None:
        """Update every tensor in place, as an optimizer does, also on a device."""
        for tensor in self.tensors:
            tensor.add_(1)
        await_stream(self.tensors[0])


def await_stream(tensor: torch.Tensor) -> None:
    """Wait for the work of a device's current stream."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def _large(state_bytes: int) -> Iterator[tuple[int, torch.dtype]]:
    """Length and dtype of each tensor: all the same."""
    length = max(1, state_bytes // LARGE_TENSORS // _FLOAT_BYTES)
    return ((length, torch.float32) for _ in range(LARGE_TENSORS))


def _small(state_bytes: int) -> Iterator[tuple[int, torch.dtype]]:
    """As many float32 tensors of 52 KiB as there is room for."""
    many = max(1, state_bytes // SMALL_BYTES)
    return ((SMALL_BYTES // _FLOAT_BYTES, torch.float32) for _ in range(many))


def _mixed(state_bytes: int) -> Iterator[tuple[int, torch.dtype]]:
    """Length and dtype of each tensor, with as many tensors in each decade of sizes.

    A tensor has at least 8 bytes. All together have ``state_bytes``, where that is enough for them.
    """
    draw = random.Random(_SEED)
    sums = list(accumulate(10 ** draw.uniform(0, _DECADES) for _ in range(MIXED_TENSORS)))
    spare = max(0, state_bytes // _UNIT_BYTES - MIXED_TENSORS)
    ends = [round(spare * part / sums[-1]) for part in sums]
    for start, end in pairwise([0, *ends]):
        dtype = draw.choice(_DTYPES)
        yield (1 + end - start) * _UNIT_BYTES // dtype.itemsize, dtype


_FORMS: Mapping[Kind, Callable[[int], Iterator[tuple[int, torch.dtype]]]] = MappingProxyType(
    {"large": _large, "mixed": _mixed, "small": _small}
)
