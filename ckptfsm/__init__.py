"""Every training checkpoint as an explicit state machine that drives Megatron-core's async saves.

Each name is loaded when it is first asked for. So importing this takes no time, and imports neither
torch nor megatron-core: ``CheckpointManager``, ``TrainingState``, ``ForeignRequest`` and
``GroupWorker`` do.
"""

from __future__ import annotations

import logging
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptfsm.adapters.signals import shield_worker as shield_worker
    from ckptfsm.core.config import CheckpointConfig as CheckpointConfig
    from ckptfsm.core.config import load_config as load_config
    from ckptfsm.core.config import save_again as save_again
    from ckptfsm.core.documents import TransitionRecord as TransitionRecord
    from ckptfsm.core.errors import CkptFsmError as CkptFsmError
    from ckptfsm.core.errors import DamagedRoot as DamagedRoot
    from ckptfsm.core.errors import RootBusy as RootBusy
    from ckptfsm.core.errors import SaveFailed as SaveFailed
    from ckptfsm.core.errors import SaveRefused as SaveRefused
    from ckptfsm.core.jobs import Copy as Copy
    from ckptfsm.core.jobs import Job as Job
    from ckptfsm.core.lifecycle import State as State
    from ckptfsm.core.parts import OptionalPart as OptionalPart
    from ckptfsm.core.parts import PerRank as PerRank
    from ckptfsm.core.progress import Progress as Progress
    from ckptfsm.core.requests import RecoveryReport as RecoveryReport
    from ckptfsm.core.retention import AllOf as AllOf
    from ckptfsm.core.retention import AnyOf as AnyOf
    from ckptfsm.core.retention import BestN as BestN
    from ckptfsm.core.retention import CheckpointInfo as CheckpointInfo
    from ckptfsm.core.retention import EveryNSeconds as EveryNSeconds
    from ckptfsm.core.retention import EveryNSteps as EveryNSteps
    from ckptfsm.core.retention import KeepAll as KeepAll
    from ckptfsm.core.retention import LatestN as LatestN
    from ckptfsm.core.retention import Policy as Policy
    from ckptfsm.core.retention import Steps as Steps
    from ckptfsm.dcp.checkpoint_manager import CheckpointManager as CheckpointManager
    from ckptfsm.dcp.checkpoint_manager import GroupWorker as GroupWorker
    from ckptfsm.dcp.torch_file import TorchFile as TorchFile
    from ckptfsm.dcp.training_state import TrainingState as TrainingState
    from ckptfsm.disk.reader_lease import ReaderLease as ReaderLease
    from ckptfsm.follow.evaluators import checkpoints as checkpoints
    from ckptfsm.follow.evaluators import wait_for_new_checkpoint as wait_for_new_checkpoint
    from ckptfsm.megatron.foreign import ForeignRequest as ForeignRequest
    from ckptfsm.ranks.controller import Controller as Controller
    from ckptfsm.ranks.handle import Restored as Restored
    from ckptfsm.ranks.handle import SaveHandle as SaveHandle
    from ckptfsm.ranks.tickets import GroupPart as GroupPart
    from ckptfsm.ranks.tickets import GroupSave as GroupSave
    from ckptfsm.ranks.tickets import Reading as Reading
    from ckptfsm.ranks.tickets import Ticket as Ticket
    from ckptfsm.writers.plain_files import FileTree as FileTree
    from ckptfsm.writers.shard_file import ShardFile as ShardFile

logging.getLogger("ckptfsm").addHandler(logging.NullHandler())
# transitions logs parts of every move at INFO, a level that trainers show: 14 lines for each save.
if (parts_of_moves := logging.getLogger("transitions")).level == logging.NOTSET:
    parts_of_moves.setLevel(logging.WARNING)


# The public names of each module, by topic.
_NAMES = MappingProxyType(
    {
        "dcp.checkpoint_manager": ("CheckpointManager", "GroupWorker"),
        "core.config": ("CheckpointConfig", "load_config", "save_again"),
        "core.jobs": ("Job", "Copy"),
        "ranks.handle": ("SaveHandle", "Restored"),
        "core.progress": ("Progress",),
        "disk.reader_lease": ("ReaderLease",),
        "follow.evaluators": ("checkpoints", "wait_for_new_checkpoint"),
        "core.lifecycle": ("State",),
        "core.documents": ("TransitionRecord",),
        "core.requests": ("RecoveryReport",),
        "core.errors": ("CkptFsmError", "SaveFailed", "SaveRefused", "RootBusy", "DamagedRoot"),
        "megatron.foreign": ("ForeignRequest",),
        "dcp.torch_file": ("TorchFile",),
        "dcp.training_state": ("TrainingState",),
        "writers.plain_files": ("FileTree",),
        "writers.shard_file": ("ShardFile",),
        "core.parts": ("OptionalPart", "PerRank"),
        "adapters.signals": ("shield_worker",),
        "ranks.controller": ("Controller",),
        "ranks.tickets": ("GroupPart", "GroupSave", "Ticket", "Reading"),
        "core.retention": (
            "Policy",
            "CheckpointInfo",
            "LatestN",
            "EveryNSteps",
            "EveryNSeconds",
            "BestN",
            "Steps",
            "KeepAll",
            "AnyOf",
            "AllOf",
        ),
    }
)
_PLACES = MappingProxyType(
    {name: f"ckptfsm.{place}" for place, names in _NAMES.items() for name in names}
)
__all__ = list(_PLACES)

BESIDE_TORCH = MappingProxyType(
    {
        name: place
        for name, place in _PLACES.items()
        if place.startswith(("ckptfsm.dcp.", "ckptfsm.megatron."))
    }
)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'ckptfsm' has no attribute {name!r}")
    if name not in BESIDE_TORCH:
        return getattr(import_module(_PLACES[name]), name)
    from ckptfsm.adapters.notices import no_warning_is_an_error

    with no_warning_is_an_error():  # megatron-core and torch raise some when they are imported
        return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
