"""The transport over torch.distributed: a separate gloo group beside the trainer's groups.

A collective that fails means that a rank is gone: ``RankFailed``; the job has to be restarted, and
recovery decides from disk.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from ckptfsm.adapters.garbage import collection_paused
from ckptfsm.adapters.local_transport import LocalTransport
from ckptfsm.core.config import CheckpointConfig
from ckptfsm.core.errors import ConfigError, RankFailed, describe
from ckptfsm.core.ports import Transport


class GlooTransport:
    """Talks to all ranks of the job over CPU tensors. Construction is collective."""

    def __init__(self, timeout_s: float) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        # Newer versions of torch also declare a number as the type, for a rank that is no member.
        self._group = cast(dist.ProcessGroup, group)
        self._flags = torch.zeros(8, dtype=torch.uint8)

    def any_flags(self, flags: Sequence[bool]) -> list[bool]:
        """A single all-reduce of a few bytes."""
        count = len(flags)
        self._flags[:count] = torch.tensor(flags, dtype=torch.uint8)
        with _named("agree on flags"):
            dist.all_reduce(self._flags[:count], op=dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in self._flags[:count].tolist()]

    def gather(self, item: Any) -> list[Any] | None:
        """Objects are made of the bytes of all ranks once these are here, and not while it waits."""
        everyone: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        with _named("gather reports"):
            dist.gather_object(pickle.dumps(item), everyone, dst=0, group=self._group)
        if everyone is None:
            return None
        with collection_paused():
            return [pickle.loads(data) for data in everyone]

    def broadcast(self, item: Any) -> Any:
        box = [item]
        with _named("broadcast"):
            dist.broadcast_object_list(box, src=0, group=self._group, device=torch.device("cpu"))
        return box[0]

    def close(self) -> None:
        """Destroy the group, unless the process group of the job has ended and taken it along."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankFailed(f"a rank is gone: could not {what}: {describe(error)}") from error


def transport_of(config: CheckpointConfig) -> Transport:
    """The transport among the ranks of the default process group, if there is one.

    Raises ``ConfigError`` without a process group where ``WORLD_SIZE`` is above 1: the other ranks
    would each take themselves for rank 0.
    """
    if dist.is_available() and dist.is_initialized():
        alone = dist.get_world_size() == 1
        return LocalTransport() if alone else GlooTransport(config.exchange_timeout_s)
    told, rank = os.environ.get("WORLD_SIZE", "").strip(), os.environ.get("RANK")
    if told.isdecimal() and int(told) > 1:
        here = "this process" if rank is None else f"this process (RANK={rank})"
        raise ConfigError(
            f"WORLD_SIZE={told} says that {here} is one of {told} ranks, and there is no process group: "
            "call torch.distributed.init_process_group before this on every rank; if one process alone "
            "uses the root, set WORLD_SIZE=1 in its environment",
            reason="no_process_group",
            world_size=int(told),
            rank=rank,
        )
    return LocalTransport()
