"""Every training checkpoint as an explicit state machine that drives Megatron-core's async saves.

Each name is loaded when it is first asked for. So importing this takes no time, and imports neither
torch nor megatron-core: ``CheckpointManager``, ``ForeignRequest`` and ``GroupWorker`` do.
"""

from __future__ import annotations

import logging
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptfsm.core.config import CheckpointConfig, load_config, save_again
    from ckptfsm.core.documents import TransitionRecord
    from ckptfsm.core.errors import CkptFsmError, DamagedRoot, RootBusy, SaveFailed, SaveRefused
    from ckptfsm.core.jobs import Job
    from ckptfsm.core.lifecycle import State
    from ckptfsm.core.parts import OptionalPart
    from ckptfsm.core.ports import OffloadHook
    from ckptfsm.core.progress import Progress
    from ckptfsm.core.requests import RecoveryReport
    from ckptfsm.core.retention import (
        AllOf,
        AnyOf,
        BestN,
        CheckpointInfo,
        EveryNSeconds,
        EveryNSteps,
        KeepAll,
        LatestN,
        Policy,
        Steps,
    )
    from ckptfsm.disk.reader_lease import ReaderLease
    from ckptfsm.disk.watching import checkpoints, wait_for_new_checkpoint
    from ckptfsm.megatron.checkpoint_manager import CheckpointManager
    from ckptfsm.megatron.foreign import ForeignRequest
    from ckptfsm.megatron.torch_group_worker import GroupWorker
    from ckptfsm.ranks.controller import Controller
    from ckptfsm.ranks.handle import Restored, SaveHandle
    from ckptfsm.ranks.tickets import GroupPart, GroupSave, Reading, Ticket
    from ckptfsm.writers.plain_files import FileTree

__all__ = [
    "CheckpointManager",
    "CheckpointConfig",
    "load_config",
    "save_again",
    "Job",
    "SaveHandle",
    "Progress",
    "Restored",
    "ReaderLease",
    "checkpoints",
    "wait_for_new_checkpoint",
    "State",
    "TransitionRecord",
    "RecoveryReport",
    "CkptFsmError",
    "SaveFailed",
    "SaveRefused",
    "RootBusy",
    "DamagedRoot",
    "ForeignRequest",
    "FileTree",
    "OptionalPart",
    "OffloadHook",
    "Controller",
    "GroupPart",
    "GroupSave",
    "Ticket",
    "Reading",
    "GroupWorker",
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
]

logging.getLogger("ckptfsm").addHandler(logging.NullHandler())
# transitions logs parts of every move at INFO, a level that trainers show: 14 lines for each save.
if (parts_of_moves := logging.getLogger("transitions")).level == logging.NOTSET:
    parts_of_moves.setLevel(logging.WARNING)


BESIDE_TORCH = MappingProxyType(
    {
        "CheckpointManager": "ckptfsm.megatron.checkpoint_manager",
        "ForeignRequest": "ckptfsm.megatron.foreign",
        "GroupWorker": "ckptfsm.megatron.torch_group_worker",
    }
)
_PLACES = MappingProxyType(
    {
        **BESIDE_TORCH,
        "CheckpointConfig": "ckptfsm.core.config",
        "load_config": "ckptfsm.core.config",
        "save_again": "ckptfsm.core.config",
        "Job": "ckptfsm.core.jobs",
        "SaveHandle": "ckptfsm.ranks.handle",
        "Progress": "ckptfsm.core.progress",
        "Restored": "ckptfsm.ranks.handle",
        "ReaderLease": "ckptfsm.disk.reader_lease",
        "checkpoints": "ckptfsm.disk.watching",
        "wait_for_new_checkpoint": "ckptfsm.disk.watching",
        "State": "ckptfsm.core.lifecycle",
        "TransitionRecord": "ckptfsm.core.documents",
        "RecoveryReport": "ckptfsm.core.requests",
        **dict.fromkeys(
            ("CkptFsmError", "SaveFailed", "SaveRefused", "RootBusy", "DamagedRoot"),
            "ckptfsm.core.errors",
        ),
        "FileTree": "ckptfsm.writers.plain_files",
        "OptionalPart": "ckptfsm.core.parts",
        "OffloadHook": "ckptfsm.core.ports",
        "Controller": "ckptfsm.ranks.controller",
        **dict.fromkeys(("GroupPart", "GroupSave", "Ticket", "Reading"), "ckptfsm.ranks.tickets"),
        **dict.fromkeys(
            (
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
            "ckptfsm.core.retention",
        ),
    }
)
_FIRST_NAMES = MappingProxyType({"Staging": "OffloadHook"})  # names that had another one first


def __getattr__(name: str) -> Any:
    name = _FIRST_NAMES.get(name, name)
    if name not in _PLACES:
        raise AttributeError(f"module 'ckptfsm' has no attribute {name!r}")
    if name not in BESIDE_TORCH:
        return getattr(import_module(_PLACES[name]), name)
    from ckptfsm.adapters.notices import no_warning_is_an_error

    with no_warning_is_an_error():  # megatron-core and torch raise some when they are imported
        return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
