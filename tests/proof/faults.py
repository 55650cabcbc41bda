"""Which fault can strike in which state of a checkpoint: what a whole run must have exercised.

``any`` stands for faults that have nothing to do with one checkpoint's state.
"""

from __future__ import annotations

from types import MappingProxyType

WRITING = ("requested", "forked", "shards_written")
FLYING = (*WRITING, "finalized")
ON_DISK = (*FLYING, "tracked", "prunable", "failed")

APPLICABLE: MappingProxyType[str, tuple[str, ...]] = MappingProxyType({})
