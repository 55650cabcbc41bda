"""Megatron's torch_dist format, which stock loaders read: DCP's, with more beside it.

The files are ``__<rank>_<n>.distcp`` with one ``torch.save`` per item, ``.metadata``, ``metadata.json``,
and the state common to all ranks. That is a file ``common.pt`` up to megatron-core 0.18. From 0.19 on it
is an object in a shard, which older versions cannot read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import megatron.core
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from ckptfsm.adapters.garbage import collection_paused
from ckptfsm.adapters.versions import series_of
from ckptfsm.dcp.metadata import completed, dumped
from ckptfsm.disk.stock import COMMON_KEY

COMMON_IN_SHARD = (0, 19)  # the first megatron-core with the common state in a shard


def keeps_common_in_shard() -> bool:
    """True if the installed megatron-core keeps the common state as an object in a shard."""
    series = series_of(str(megatron.core.__version__))
    if series is None:  # the reader of older files came with the new format
        return hasattr(serialization, "_legacy_common_state_exists")
    return series >= COMMON_IN_SHARD


@collection_paused()
def finish_part(
    planned: bytes, results: Sequence[Sequence[Any]], location: str
) -> Mapping[str, bytes]:
    """``.metadata`` and ``metadata.json`` of a part, see ``ports.PartFinisher``."""
    metadata = completed(planned, location)
    if any(row[0] == COMMON_KEY for rows in results for row in rows):
        metadata.state_dict_metadata[COMMON_KEY] = BytesStorageMetadata()
    config = CheckpointingConfig("torch_dist", 1)
    return {
        ".metadata": dumped(metadata, results),
        "metadata.json": json.dumps(asdict(config)).encode(),
    }
