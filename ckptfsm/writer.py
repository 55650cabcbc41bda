"""``ShardFile``, for a part of your own; defined in ``ckptfsm.writers.shard_file``."""

from ckptfsm.writers.shard_file import *  # noqa: F403
