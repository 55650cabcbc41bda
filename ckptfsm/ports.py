"""The library's needs of a machine and of a trainer; defined in ``ckptfsm.core.ports``."""

from ckptfsm.core.ports import *  # noqa: F403
from ckptfsm.core.ports import OffloadHook

Staging = OffloadHook  # the name it had first
