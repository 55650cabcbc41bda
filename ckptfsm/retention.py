"""Policies: which tracked checkpoints to keep; defined in ``ckptfsm.core.retention``."""

from ckptfsm.core.retention import *  # noqa: F403
