"""The versions of other packages that were tried; defined in ``ckptfsm.adapters.versions``."""

from ckptfsm.adapters.versions import *  # noqa: F403
