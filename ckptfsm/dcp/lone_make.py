"""No collective in the ``make`` of a ``FileTree`` that a single rank writes.

It would wait for the other ranks, or match a collective of the training's. It is refused where torch
sees it: on this thread, and through the dispatcher.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from ckptfsm.core.errors import SaveFailed
from ckptfsm.core.parts import PartSpec

_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd")
_LOCAL = ("wait_tensor",)  # waits for a collective that began before


@contextmanager
def no_collective(spec: PartSpec, rank: int) -> Iterator[None]:
    """A block in which a collective with other ranks raises ``SaveFailed``, if one rank runs it."""
    if not spec.format.by_path or spec.ranks is None or len(spec.ranks) > 1:
        yield
        return
    with _NoCollective(spec.name, rank):
        yield


class _NoCollective(TorchDispatchMode):
    def __init__(self, part: str, rank: int) -> None:
        super().__init__()
        self._part, self._rank = part, rank

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = func.name().partition(".")[0]
        space, _, name = operation.partition("::")
        collective = space in _NAMESPACES and name not in _LOCAL
        if collective and _ranks_of((*args, *kwargs.values())) > 1:
            raise SaveFailed(
                f"part {self._part!r}: make of its FileTree begins a collective ({operation}), and "
                f"rank {self._rank} alone calls make: FileTree(make, every_rank=True) calls it on "
                "every rank",
                part=self._part,
                rank=self._rank,
            )
        return func(*args, **kwargs)


def _ranks_of(arguments: tuple[Any, ...]) -> int:
    """The number of ranks in the group among the arguments of a collective."""
    for each in arguments:
        if isinstance(each, torch.ScriptObject):
            try:
                return int(dist.ProcessGroup.unbox(each).size())
            except RuntimeError:  # another object, such as the kind of a reduction
                continue
    names = [each for each in arguments if isinstance(each, str)]
    resolve = cast(Any, dist.distributed_c10d)._resolve_process_group
    groups = [resolve(name) for name in names[-1:]]
    return max((int(group.size()) for group in groups), default=dist.get_world_size())
