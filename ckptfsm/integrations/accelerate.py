"""Accelerate's ``save_state`` and ``load_state``, on checkpoints of this library.

Accelerate's own code writes the files of each rank, into the directory of the attempt. The library
makes them durable, publishes them with one rename, and deletes old checkpoints. A checkpoint is tracked
when the call returns, or with ``sync=False`` some time later. Every method is collective.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckptfsm.adapters.notices import warn_caller
from ckptfsm.adapters.versions import require
from ckptfsm.core.config import Settings, config_of
from ckptfsm.core.errors import ConfigError, RecoveryWarning, ReshardWarning
from ckptfsm.core.layout import LAYOUTS, MANIFEST
from ckptfsm.core.retention import KeepAll, LatestN, Policy
from ckptfsm.dcp.checkpoint_manager import CheckpointManager
from ckptfsm.integrations.replaced import Replaced
from ckptfsm.ranks.handle import Restored, SaveHandle
from ckptfsm.writers.plain_files import FileTree

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

# The trainer decides when it saves, and its own code writes while the call lasts.
_WITHOUT_EFFECT = (
    "save_interval_steps",
    "save_steps",
    "save_interval_s",
    "preemption_signals",
    "end_of_allocation",
    "agree_when_idle",
    "exchange_every",
    "engine",
    "read_twice",
    "writer_files",
    "common_state",
    "reshard_drops",
)
# Every rank writes a file of this name: rank 0's keeps it. Stock code keeps that of the last writer.
_OF_EVERY_RANK = ("scaler.pt", "dl_state_dict*.bin")
_NOT_TRIED = ("DEEPSPEED", "MEGATRON_LM", "XLA")  # kinds of training that write other files


class FilesOfTrainer:
    """The checkpoints below ``root`` whose files a trainer's own code writes and reads.

    ``limit`` counts whole checkpoints in the absence of ``retention``. Raises ``ConfigError`` for a
    setting that would have no effect, and the errors of ``CheckpointManager``.
    """

    def __init__(
        self, root: str | os.PathLike[str], layout: str, limit: Policy, settings: Mapping[str, Any]
    ) -> None:
        for name in _WITHOUT_EFFECT:
            if name in settings:
                raise ConfigError(f"{name} has no effect here: the trainer decides", key=name)
        usual = {"retention": limit, "layout": layout, "sync": True}
        config = config_of(None, {**usual, **settings})
        if config.saves_again:
            said = "the trainer decides when it saves: on_failure is 'raise' or 'warn'"
            raise ConfigError(said, key="on_failure")
        self.root = os.path.realpath(root)
        self.layout = LAYOUTS[config.layout]
        self.manager = CheckpointManager(root, config)
        self._last: SaveHandle | None = None

    def save(
        self, step: int, write: Callable[[str], None], metrics: Mapping[str, float] | None = None
    ) -> bool:
        """Save what ``write(directory)`` writes on each rank; with ``sync``, wait until it is tracked.

        The directory is empty, and each rank has one of its own. Two ranks may not write one name.
        False after a failure under ``on_failure="warn"``. Raises the errors of
        ``CheckpointManager.save``.
        """
        make = partial(_write_share, self.manager.rank, write)
        tree = FileTree(make, every_rank=True, directory="")
        handle = self._last = self.manager.save(step, tree, metrics=metrics)
        return not handle.skipped and handle.exception() is None

    def settle(self) -> None:
        """Wait until the last save is tracked or has failed, as the next save does."""
        if self._last is not None and not self._last.skipped:
            self.manager.wait_for(self._last)

    def find(self, step: int | None = None) -> Restored | None:
        """The newest checkpoint, or that of ``step``, verified; None without evidence of any.

        Waits for the save in flight.
        """
        self.manager.wait_until_finished()
        return self.manager.restore(FileTree(_writes_nothing, directory=""), step=step)

    def step_of(self, directory: str | os.PathLike[str]) -> int | None:
        """The step of a checkpoint's directory in this root; None for any other path."""
        path = Path(directory).expanduser()
        inside = os.path.realpath(path.parent) == self.root
        return self.layout.parse_published(path.name) if inside else None

    def path(self, step: int) -> str:
        """The directory that the checkpoint of ``step`` has, or will have."""
        return os.path.join(self.root, self.layout.published_name(step))


def _write_share(rank: int, write: Callable[[str], None], directory: str) -> None:
    write(directory)
    if rank:
        for pattern in _OF_EVERY_RANK:
            for file in sorted(Path(directory).glob(pattern)):
                file.rename(file.with_stem(f"{file.stem}.rank_{rank}"))


def _writes_nothing(directory: str) -> None:
    """In the place of a tree that is only read."""


def _registered_objects(directory: str) -> int | None:
    """How many registered objects stock code saved there; None for a save of this library."""
    path = Path(directory)
    return None if Path(path, MANIFEST).exists() else len([*path.glob("custom_checkpoint_*.pkl")])


class AcceleratorCheckpoints:
    """``save_state`` and ``load_state`` of an accelerator, until ``close``. See ``install``."""

    def __init__(self, accelerator: Any, files: FilesOfTrainer) -> None:
        self.files = files
        self._accelerator = accelerator
        self._replaced = Replaced()
        self._stock_save, self._stock_load = accelerator.save_state, accelerator.load_state
        self._stock_end = accelerator.end_training
        self._replaced.put(accelerator, "save_state", self.save_state)
        self._replaced.put(accelerator, "load_state", self.load_state)
        self._replaced.put(accelerator, "end_training", self._end_training)

    @property
    def manager(self) -> CheckpointManager:
        return self.files.manager

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **options: Any,
    ) -> str:
        """Save as ``Accelerator.save_state`` does; returns the checkpoint's directory.

        With automatic naming, ``output_dir`` is ignored, as by Accelerate. Otherwise it is a step's
        directory in the root. Raises ``ConfigError`` for any other, and the errors of
        ``CheckpointManager.save``.
        """
        project = self._accelerator.project_configuration
        refuse_unknown_training(self._accelerator)
        if project.automatic_checkpoint_naming:
            step = int(self._accelerator.save_iteration)
        else:
            step = self._step_to_save(output_dir)
        before, saved = project.iteration, False
        write = partial(self._write, safe_serialization=safe_serialization, **options)
        try:
            saved = self.files.save(step, write)
        finally:
            project.iteration = before + saved  # of a failed save, some ranks have counted it
        return self.files.path(step)

    def _step_to_save(self, output_dir: str | os.PathLike[str] | None) -> int:
        step = None if output_dir is None else self.files.step_of(output_dir)
        if step is None:
            example = self.files.path(100)
            said = f"output_dir is {output_dir!r}: name a directory such as {example}"
            raise ConfigError(said, key="output_dir")
        return step

    def _write(self, directory: str, **options: Any) -> None:
        """Let Accelerate write this rank's files, without choosing and deleting directories."""
        project = self._accelerator.project_configuration
        automatic, project.automatic_checkpoint_naming = project.automatic_checkpoint_naming, False
        try:
            self._stock_save(directory, **options)
        finally:
            project.automatic_checkpoint_naming = automatic

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> int | None:
        """Verify a checkpoint and load it as ``Accelerator.load_state`` does; returns its step.

        By default, the newest one; None if there is no evidence of any. The next automatic name
        follows it. Stock saves that lack registered objects are passed over, with a ``RecoveryWarning``.
        A directory outside of the root is left to Accelerate, and None is returned.
        Raises the errors of ``CheckpointManager.restore``.
        """
        step = None
        if input_dir is not None:
            step = self.files.step_of(input_dir)
            if step is None:
                self._stock_load(os.fspath(input_dir), load_kwargs, **options)
                return None
        found = self.files.find(step)
        if found is not None and step is None and self._go_back(found):
            found = self.files.find()
        if found is None:
            return None
        self._warn_of_random_states(found)
        self._stock_load(found.directory, load_kwargs, **options)
        self._accelerator.project_configuration.iteration = found.step + 1
        return found.step

    def _go_back(self, found: Restored) -> bool:
        """Pass over stock saves that were cut off before their registered objects (collective).

        False where no earlier checkpoint has them all: Accelerate's own error then tells the counts.
        """
        from accelerate.utils import broadcast_object_list

        manager, registered = self.manager, len(self._accelerator._custom_objects)
        earlier = [step for step in manager.all_steps() if step <= found.step]
        have = {step: _registered_objects(self.files.path(step)) for step in earlier}
        whole = [step for step, count in have.items() if count is None or count >= registered]
        [target] = broadcast_object_list([max(whole, default=found.step)])
        if target == found.step or manager.config.resume == "strict":
            return False
        if manager.rank == 0:
            said = (
                f"step {found.step} has {have[found.step]} of the {registered} registered objects: "
                f"a stock save was cut off. It goes to quarantine, and step {target} is loaded"
            )
            warn_caller(RecoveryWarning(said))
        manager.rollback(target)
        return True

    def _warn_of_random_states(self, found: Restored) -> None:
        """Warn where stock code would go on with other random numbers, and only log it."""
        name = f"random_states_{self._accelerator.process_index}.pkl"
        if not Path(found.directory, name).exists():
            said = (
                f"step {found.step} has no {name}: it was saved by fewer ranks, or a stock save was "
                "cut off. The random numbers of this rank stay as they are"
            )
            warn_caller(ReshardWarning(said))

    def close(self) -> None:
        """Give the root back, and the accelerator its own methods. ``end_training`` calls it."""
        self._replaced.give_back()
        self.manager.close()

    def _end_training(self) -> None:
        self.close()
        self._stock_end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._replaced.give_back()
        self.manager.__exit__(kind, error, trace)


def install(
    accelerator: Any, root: str | os.PathLike[str] | None = None, **settings: Unpack[Settings]
) -> AcceleratorCheckpoints:
    """Let an ``Accelerator`` save and load through this library. Call it once it is made.

    ``root`` has the checkpoints, by default ``<project_dir>/checkpoints``, if Accelerate names them
    itself. ``settings`` are those of ``CheckpointManager``. ``total_limit`` becomes ``LatestN``,
    unless ``retention`` is given. With ``sync=False``, files are made durable and published while
    the training goes on; the next save, ``load_state`` and ``close`` wait for that.
    ``layout="hf"`` names directories ``checkpoint-100`` instead of ``checkpoint_100``.

    Raises ``ConfigError``, and the errors of ``CheckpointManager``.
    """
    require("accelerate", extra="accelerate")
    project = accelerator.project_configuration
    automatic = project.automatic_checkpoint_naming
    if project.save_on_each_node:
        said = "save_on_each_node: the nodes would write the same names into one checkpoint"
        raise ConfigError(said, key="save_on_each_node")
    refuse_unknown_training(accelerator)
    if automatic and settings.get("layout", "accelerate") != "accelerate":
        raise ConfigError("automatic_checkpoint_naming has the layout 'accelerate'", key="layout")
    if automatic and accelerator.project_dir is not None:
        own = os.path.join(accelerator.project_dir, "checkpoints")
        if root is not None and os.path.realpath(root) != os.path.realpath(own):
            raise ConfigError(
                f"Accelerate names the checkpoints, in {own}: give no root", key="root"
            )
        root = own
    if root is None:
        said = "give the root of the checkpoints, or ProjectConfiguration(project_dir=..., "
        raise ConfigError(f"{said}automatic_checkpoint_naming=True)", key="root")
    limit = KeepAll() if project.total_limit is None else LatestN(project.total_limit)
    files = FilesOfTrainer(root, "accelerate", limit, settings)
    return AcceleratorCheckpoints(accelerator, files)


def refuse_unknown_training(accelerator: Any) -> None:
    """Raise ``ConfigError`` for a kind of training whose files were not tried."""
    kind = str(accelerator.distributed_type).rpartition(".")[2].upper()
    if kind in _NOT_TRIED:
        said = f"{kind} saves files of its own, which were not tried: use its own saving"
        raise ConfigError(said, key="distributed_type")
