"""verl (0.7.1, 0.9.0, 0.9.1), released and unchanged, with checkpoints that ckptfsm drives.

``install`` is for the driver; it puts ``ckptfsm.integrations.verl.rank_manager`` into the workers.
"""

from ckptfsm.integrations.verl.mirror import Copy, DirectoryMirror, HdfsMirror, Mirror
from ckptfsm.integrations.verl.trainer import Checkpoints, install, install_in_verl, retention_of
from ckptfsm.integrations.verl.workers import Calls, RayCalls

__all__ = [
    "install",
    "install_in_verl",
    "Checkpoints",
    "retention_of",
    "Mirror",
    "DirectoryMirror",
    "HdfsMirror",
    "Copy",
    "Calls",
    "RayCalls",
]
