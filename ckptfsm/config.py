"""Settings of a checkpointed job; defined in ``ckptfsm.core.config``."""

from ckptfsm.core.config import *  # noqa: F403
