"""``PerRank`` values of a state as objects of megatron-core, one for each rank of the job."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject

from ckptfsm.core.errors import ConfigError
from ckptfsm.core.parts import PerRank
from ckptfsm.dcp.nested import WHOLE


def with_objects(state: Any) -> Any:
    """The state with a ``ShardedObject`` for each ``PerRank``; the state itself if it has none.

    Needs a process group. Its key is the names on the way to it, with dots between them; that of a
    whole part is ``WHOLE``. Raises ``ConfigError`` for one in a list.
    """
    if isinstance(state, PerRank):
        return {WHOLE: _placed(state, WHOLE)}
    return _placed(state, "")


def _placed(value: Any, name: str) -> Any:
    if isinstance(value, PerRank):
        key = name.replace("/", ".")  # which ends a key in the metadata
        return ShardedObject(key, value.value, (dist.get_world_size(),), (dist.get_rank(),))
    if isinstance(value, dict):
        placed = {key: _placed(each, _inside(name, key)) for key, each in value.items()}
        return value if all(placed[key] is each for key, each in value.items()) else placed
    if isinstance(value, (list, tuple)):
        for place, each in enumerate(value):
            if _placed(each, _inside(name, place)) is not each:
                # megatron-core takes sharded values out of a list, and the others lose their places
                said = (
                    f"{name!r} is a {type(value).__name__} with a PerRank: make all of it a PerRank"
                )
                raise ConfigError(said, key=name)
    return value


def _inside(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)
