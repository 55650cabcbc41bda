"""Errors and warnings, all of them; defined in ``ckptfsm.core.errors``."""

from ckptfsm.core.errors import *  # noqa: F403
