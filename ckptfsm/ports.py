"""The library's needs of a machine and of a trainer; defined in ``ckptfsm.core.ports``."""

from ckptfsm.core.ports import *  # noqa: F403
