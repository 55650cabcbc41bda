"""``ShardFile``, for a part of your trainer; defined in ``ckptfsm.writers.shard_file``."""

from ckptfsm.writers.shard_file import *  # noqa: F403
