"""A checkpoint manager inside a verl worker, with verl's signatures and saves through ckptfsm.

verl's ``save_checkpoint`` runs in the directory of the attempt, and writes its usual files. Only two
of its calls lead here: ``dist_checkpointing.save`` (Megatron), and ``torch.save`` in verl's own modules
(FSDP). What they are given is kept, and written by our writer. So the layout on disk is that of the
installed verl. verl's manager always believes that it saves synchronously and keeps everything: it
schedules no request, writes no tracker, deletes nothing.

A save needs the ticket of a driver, in place of ``hdfs_path``, which verl hands through unchanged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import ckptfsm.megatron  # noqa: F401 first, to report a missing or old package

# isort: split
import torch

from ckptfsm.adapters.notices import say
from ckptfsm.core.errors import ConfigError, SaveFailed
from ckptfsm.core.events import Event
from ckptfsm.core.layout import VERL
from ckptfsm.core.parts import AttemptId, is_part_name
from ckptfsm.dcp.checkpoint_manager import GroupWorker
from ckptfsm.dcp.torch_file import TorchFile
from ckptfsm.integrations.replaced import Replaced
from ckptfsm.megatron.states import refuse_newer
from ckptfsm.ranks.group_worker import BaseGroupWorker
from ckptfsm.ranks.tickets import Ticket
from ckptfsm.writers.plain_files import FileTree

log = logging.getLogger("ckptfsm")
_FUNNEL = "save_dist_checkpointing"  # every torch_dist save of verl calls it
_ATTRIBUTES = ("checkpoint_mananager", "checkpoint_manager")  # verl's spelling, and the right one
_WITHIN = ("", "engine", "actor.engine")


@dataclass(frozen=True, slots=True)
class Told:
    """verl's checkpoint configuration, except that saves are synchronous."""

    config: Any
    async_save: bool = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)


@dataclass(slots=True)
class Trees:
    """Replaces verl's ``save_dist_checkpointing``: keeps the state dicts, by directory in ``base``."""

    base: str
    states: dict[str, Any] = field(default_factory=dict)

    def __call__(
        self,
        sharded_state_dict: Mapping[str, Any],
        ckpt_path: str,
        async_save: bool = False,
        content_metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep a state dict, with the metadata where ``dist_checkpointing.save`` would put it."""
        state = dict(sharded_state_dict)
        if content_metadata is not None:
            state["content_metadata"] = dict(content_metadata)
        self.states[os.path.relpath(ckpt_path, self.base)] = state


class Files:
    """Replaces ``torch`` in a module of verl: ``save`` keeps objects, by the file's name in ``base``."""

    def __init__(self, base: str) -> None:
        self.base = Path(base).absolute()
        self.files: dict[str, TorchFile] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def save(self, obj: Any, f: Any, *arguments: Any, **keywords: Any) -> None:
        """Keep an object for a file in ``base``. Anything else is saved at once, as by verl."""
        path = Path(f).absolute() if isinstance(f, (str, os.PathLike)) else None
        name = path.name if path is not None and path.parent == self.base else ""
        if is_part_name(name) and not arguments and not keywords:
            self.files[name] = TorchFile(obj, weights_only=False)  # as verl loads it
            return
        self.files.pop(name, None)  # as it is overwritten
        said = f"{f!r:.200} is written while the save is called: no plain torch.save into a part"
        say(log.warning, "file_not_captured", said, file=str(f))
        torch.save(obj, f, *arguments, **keywords)


@dataclass(frozen=True, slots=True)
class Captured:
    """What verl's manager gave to be saved: state dicts by directory, and files by name."""

    trees: Trees
    torch: Files

    @property
    def parts(self) -> dict[str, Any]:
        return {**self.trees.states, **self.torch.files}


@contextlib.contextmanager
def captured(manager: Any, base: str) -> Iterator[Captured]:
    """Only take states and files while verl's manager saves below ``base``."""
    found, replaced = Captured(Trees(base), Files(base)), Replaced()
    try:
        replaced.put(manager, "checkpoint_config", Told(manager.checkpoint_config))
        for module in _modules_of(manager):
            if hasattr(module, _FUNNEL):
                replaced.put(module, _FUNNEL, found.trees)
            # Other modules than verl's may change an object after they saved it.
            if module.__name__.startswith("verl.") and vars(module).get("torch") is torch:
                replaced.put(module, "torch", found.torch)
        yield found
    finally:
        replaced.give_back()
        manager.previous_saved_paths = []  # the driver does retention


def _modules_of(manager: Any) -> list[ModuleType]:
    """The modules that define a manager's class and its bases, each once."""
    names = dict.fromkeys(kind.__module__ for kind in type(manager).__mro__)
    return [sys.modules[name] for name in names]


class VerlCheckpointManager:
    """Replaces verl's manager in a worker. All other attributes are those of verl's manager."""

    def __init__(
        self, manager: Any, worker: BaseGroupWorker, beside: Callable[[str], None] | None = None
    ) -> None:
        """``beside(directory)`` writes this rank's other files of a checkpoint."""
        self._manager = manager
        self._worker = worker
        self._beside = beside

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: Ticket | str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Begin this rank's share of a save (collective in the group); ``hdfs_path`` is its ticket.

        When it returns, the tensors may change. ``max_ckpt_to_keep`` is ignored: the driver does
        retention. Raises ``ConfigError`` if no driver began the save.
        """
        ticket = hdfs_path
        if not isinstance(ticket, Ticket):
            raise ConfigError(
                f"the save of {local_path} was not begun by a trainer that ckptfsm drives: "
                "no driver would finalize it",
                step=global_step,
            )
        # ``poll`` returns the reports.
        self._worker.write(ticket, parts=partial(self._parts, ticket, global_step))

    def _parts(self, ticket: Ticket, step: int) -> dict[str, Any]:
        """Let verl write its files into the attempt's directory, and take its states."""
        if not Path(ticket.root, ticket.location).is_dir():
            raise SaveFailed("the attempt's directory is not there", step=step)
        with captured(self._manager, ticket.directory) as found:
            self._manager.save_checkpoint(
                local_path=ticket.directory, hdfs_path=None, global_step=step, max_ckpt_to_keep=None
            )
        if self._beside is not None:
            self._beside(ticket.directory)
        return {**found.parts, "": FileTree(_written_already, every_rank=False)}

    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool = False,
    ) -> None:
        """Load as verl does, but never delete the loaded directory: it is the driver's.

        Raises ``RestoreFailed`` for a checkpoint that only a newer megatron-core can read.
        """
        if local_path is not None:  # with FSDP, verl then loads nothing
            _refuse_newer(Path(local_path))
        self._manager.load_checkpoint(local_path, hdfs_path, del_local_after_load=False)

    def poll(self, doomed: Sequence[AttemptId]) -> list[Event]:
        """See ``BaseGroupWorker.poll`` (local)."""
        return self._worker.poll(doomed)

    def close(self) -> Any:
        """Wait for the writer to end, and return verl's manager."""
        self._worker.close()
        return self._manager


def _refuse_newer(directory: Path) -> None:
    """Raise ``RestoreFailed`` if a newer megatron-core wrote a tree of the role in ``directory``.

    verl 0.7 has one tree in a role's directory, 0.9 three directories with one each.
    """
    for tree in sorted([*directory.glob(VERL.tree), *directory.glob(f"*/{VERL.tree}")]):
        refuse_newer(str(tree.relative_to(directory.parent)), str(tree))


def _written_already(directory: str) -> None:
    """Write nothing: verl's ``save_checkpoint`` wrote the role's files already, on one rank."""


# ------------------------------------------------------------------------- called in a verl worker


def attach(worker: Any, role: str, root: str, settings: Mapping[str, Any]) -> None:
    """Replace verl's manager in ``worker`` (a verl worker, or several in one process).

    The worker's method ``beside``, if any, is passed to ``VerlCheckpointManager``. Collective in
    the role's group. Raises ``ConfigError`` if there is no manager for ``role``.
    """
    detach(worker, role)  # closes a previous one, even if the next one fails
    holder, attribute = _place_of_manager(worker, role)
    manager = getattr(holder, attribute)
    ours = GroupWorker(root, settings)
    beside = getattr(worker, "beside", None)
    setattr(holder, attribute, VerlCheckpointManager(manager, ours, beside))


def detach(worker: Any, role: str) -> None:
    """Put verl's manager back, once the writer has ended (local)."""
    holder, attribute = _place_of_manager(worker, role)
    manager = getattr(holder, attribute)
    if isinstance(manager, VerlCheckpointManager):
        setattr(holder, attribute, manager.close())


def poll(worker: Any, role: str, doomed: Sequence[AttemptId]) -> list[Event]:
    """The reports of the role's manager in this process (local)."""
    holder, attribute = _place_of_manager(worker, role)
    events: list[Event] = getattr(holder, attribute).poll(doomed)
    return events


def _place_of_manager(worker: Any, role: str) -> tuple[Any, str]:
    """The object and the attribute that hold the role's manager."""
    for inner in _of_role(worker, role):
        for path in _WITHIN:
            holder = inner
            for name in filter(None, path.split(".")):
                holder = getattr(holder, name, None)
            for attribute in _ATTRIBUTES:
                if getattr(holder, attribute, None) is not None:
                    return holder, attribute
    raise ConfigError(f"this worker has no checkpoint manager for {role!r}", part=role)


def _of_role(worker: Any, role: str) -> list[Any]:
    """The verl workers of a role in one process: colocated ones sit in a dict by their role."""
    colocated = getattr(worker, "worker_dict", None) or getattr(worker, "fused_worker_dict", None)
    if not colocated:  # empty in a worker that is alone
        return [worker]
    return [inner for name, inner in colocated.items() if str(name).startswith(role)]
