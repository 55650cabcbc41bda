"""The checkpoints of transformers' ``Trainer``, on checkpoints of this library.

The trainer's own code writes the files of each rank, into the directory of the attempt. The library
makes them durable, publishes them with one rename, and deletes old checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ckptfsm.adapters.notices import warn_caller
from ckptfsm.adapters.versions import require
from ckptfsm.core.config import Settings
from ckptfsm.core.errors import ConfigError, RecoveryWarning, ReshardWarning
from ckptfsm.core.retention import CheckpointInfo, KeepAll, Policy
from ckptfsm.integrations.accelerate import FilesOfTrainer, refuse_unknown_training
from ckptfsm.integrations.replaced import Replaced

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptfsm.ranks.handle import Restored

BEST = "best_step"  # in the metrics of a checkpoint: the best step when it was saved
STATE = "trainer_state.json"
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizer_0")  # a file, or a directory of FSDP
_WHY = MappingProxyType(
    {
        "push_to_hub": "an upload reads a checkpoint while it moves. Use hub_strategy='end', or push "
        "with a job of on_tracked",
        "save_on_each_node": "the nodes would write the same names into one checkpoint",
        "enable_jit_checkpoint": "it writes into the directory of a checkpoint before its save",
        "hyperparameter_search": "each trial has checkpoints of its own: use stock saving",
    }
)


@dataclass(frozen=True)
class SaveTotalLimit(Policy):
    """``save_total_limit``: the ``n`` newest. The newest and the best one count among them.

    The best is the one that the newest checkpoint names in its metrics (``best_step``).
    """

    n: int

    def preserve(self, checkpoints: Sequence[CheckpointInfo]) -> set[int]:
        newest, steps = checkpoints[-1], [info.step for info in checkpoints]
        kept = {newest.step, int(newest.metrics.get(BEST, newest.step))} & {*steps}
        others = [step for step in steps if step not in kept]
        room = max(self.n - len(kept), 0)
        return kept | set(others[len(others) - room :])


class TrainerCheckpoints:
    """The checkpoints of one trainer. ``files`` is None while it does not train. See ``install``."""

    def __init__(self, trainer: Any, settings: Mapping[str, Any]) -> None:
        self.files: FilesOfTrainer | None = None
        self._trainer = trainer
        self._settings = settings
        self._limit: int | None = None
        self._before: str | None = None  # the best checkpoint before the last save
        self._installed = Replaced()
        self._stock_train, self._stock_save = trainer.train, trainer._save_checkpoint
        self._installed.put(trainer, "train", self.train)
        self._installed.put(trainer, "_save_checkpoint", self.save)
        self._stock_best = trainer._load_best_model
        self._installed.put(trainer, "_load_best_model", self.load_best)

    @property
    def _args(self) -> Any:
        return self._trainer.args

    def uninstall(self) -> None:
        """Give the trainer its own methods back. Not while it trains."""
        self._installed.give_back()

    # --------------------------------------------------------------------- in place of the trainer's

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **options: Any
    ) -> Any:
        """Train as ``Trainer.train`` does (collective).

        With True, from the newest checkpoint, verified, or from the start if there is no evidence of
        any. What rank 0 asks for counts on every rank. Raises ``ConfigError`` for a start that would
        save steps that are there already, and the errors of ``CheckpointManager``.
        """
        refuse_settings(self._trainer)
        limit = self._args.save_total_limit
        self._limit = limit
        policy = SaveTotalLimit(limit) if (limit or 0) > 0 else KeepAll()
        self.files = FilesOfTrainer(self._args.output_dir, "hf", policy, self._settings)
        try:
            with self.files.manager, _limit_of(self._args, None):
                asked = self._agreed(resume_from_checkpoint)
                begin = self._where_to_begin(self.files, asked)
                return self._stock_train(begin, *arguments, **options)
        finally:
            self.files = None

    def _agreed(self, asked: str | bool | None) -> str | bool | None:
        """Rank 0's answer: other hosts may see a checkpoint late, which the caller has looked for."""
        from accelerate.utils import broadcast_object_list

        agreed: list[str | bool | None] = broadcast_object_list([asked])
        return agreed[0]

    def _where_to_begin(self, files: FilesOfTrainer, asked: str | bool | None) -> str | bool | None:
        """The directory to resume from; what was asked for if that is none of this root's."""
        if asked is True:
            newest = files.find()
            return None if newest is None else self._looked_into(newest)
        latest = files.manager.latest_step()
        step = files.step_of(str(asked)) if asked else None
        if latest is not None and step != latest:
            raise ConfigError(
                f"resume_from_checkpoint is {asked!r}, and {files.root} has step {latest}: give True to "
                "resume from that, or the training another output_dir. To go back, call "
                f"`ckptfsm rollback` first",
                key="resume_from_checkpoint",
                step=latest,
            )
        found = files.find(step) if step is not None else None
        return asked if found is None else self._looked_into(found)

    def _looked_into(self, found: Restored) -> str:
        """The directory of a checkpoint; warns where stock code would begin anew and say nothing."""
        args, there = self._args, Path(found.directory)
        numbers = f"rng_state_{args.process_index}.pth" if args.world_size > 1 else "rng_state.pth"
        if not (there / numbers).exists():
            said = (
                f"{there.name} has no {numbers}: the random numbers of this rank stay as they are"
            )
            warn_caller(ReshardWarning(said))
        if not any((there / name).exists() for name in _OPTIMIZERS):
            said = f"{there.name} has no optimizer: its state and the learning rate begin anew"
            warn_caller(RecoveryWarning(said))
        return found.directory

    def save(self, model: Any, trial: Any = None) -> None:
        """Save as ``Trainer._save_checkpoint`` does (collective).

        With ``sync``, wait until it is tracked.
        """
        files, state = self.files, self._trainer.state
        if files is None or trial is not None:
            raise ConfigError("a checkpoint is saved inside of train(), and not for a trial")
        self._settle_best(files)
        before = self._before = state.best_model_checkpoint
        self._name_best(files)
        best = self._best_step(files)
        metrics = {} if best is None else {BEST: float(best)}
        saved = False
        try:
            write = partial(self._write, files, model)
            saved = files.save(state.global_step, write, metrics)
        finally:
            if not saved:
                self._take_back_best(state.global_step, before)

    def load_best(self) -> None:
        """Load as ``Trainer._load_best_model`` does, once no save is in flight (collective)."""
        if self.files is not None:
            self.files.manager.wait_until_finished()
            self._settle_best(self.files)
        if self._trainer.state.best_model_checkpoint is not None:
            self._stock_best()

    def _write(self, files: FilesOfTrainer, model: Any, directory: str) -> None:
        """Let the trainer write this rank's files into ``directory`` itself."""
        trainer, state = self._trainer, self._trainer.state
        inner = Path(directory, files.layout.published_name(state.global_step))
        moved = Replaced()
        moved.put(trainer, "_get_output_dir", lambda trial=None: directory)
        try:
            with _limit_of(self._args, self._limit):  # it is one of the values that are saved
                self._stock_save(model, None)
        finally:
            moved.give_back()
        self._name_best(files)
        if self._args.should_save:
            state.save_to_json(os.path.join(inner, STATE))
        if inner.is_dir():  # a rank may have nothing to write
            inner.rename(f"{directory}.whole").rename(directory)  # which is empty by now

    # ---------------------------------------------------------------------------- the best checkpoint

    def _name_best(self, files: FilesOfTrainer) -> None:
        """Name the best checkpoint by the path that it will have, also if this is the one."""
        state = self._trainer.state
        best = state.best_global_step
        if best and (best == state.global_step or best in files.manager.all_steps()):
            name = files.layout.published_name(best)
            state.best_model_checkpoint = os.path.join(self._args.output_dir, name)

    def _best_step(self, files: FilesOfTrainer) -> int | None:
        """The step of the best checkpoint. A better step may have been evaluated, and not saved."""
        path = self._trainer.state.best_model_checkpoint
        return None if path is None else files.step_of(path)

    def _settle_best(self, files: FilesOfTrainer) -> None:
        """Wait for the save in flight. If that of the best failed, the best before counts again."""
        files.settle()
        best, manager = self._best_step(files), files.manager
        if best is not None and best not in (*manager.all_steps(), manager.step_in_flight()):
            self._take_back_best(best, self._before)

    def _take_back_best(self, failed: int, before: str | None) -> None:
        """Let the best checkpoint be the one before a step that was not saved, with its metric."""
        state = self._trainer.state
        if before is not None and not Path(before, STATE).is_file():
            before = None
        state.best_model_checkpoint = before
        if state.best_global_step == failed:
            kind = type(state)
            saved = kind.load_from_json(os.path.join(before, STATE)) if before else kind()
            state.best_global_step, state.best_metric = saved.best_global_step, saved.best_metric


@contextmanager
def _limit_of(args: Any, limit: int | None) -> Iterator[None]:
    """Let ``save_total_limit`` be another one in the block. None: the trainer deletes nothing."""
    own, args.save_total_limit = args.save_total_limit, limit
    try:
        yield
    finally:
        args.save_total_limit = own


def install(trainer: Any, **settings: Unpack[Settings]) -> TrainerCheckpoints:
    """Let a ``Trainer`` save and resume through this library. Call it before ``train``.

    The root is ``args.output_dir``. ``settings`` are those of ``CheckpointManager``.
    ``save_total_limit`` counts as before, unless ``retention`` is given. With ``sync=False``, files are
    made durable and published while the training goes on. Raises ``ConfigError``.
    """
    require("accelerate", "transformers", extra="transformers")
    refuse_settings(trainer)
    if settings.get("layout", "hf") != "hf":
        raise ConfigError("Trainer names its checkpoints: the layout is 'hf'", key="layout")
    return TrainerCheckpoints(trainer, settings)


def refuse_settings(trainer: Any) -> None:
    """Raise ``ConfigError`` for arguments of a training that cannot be honoured."""
    args = trainer.args
    refuse_unknown_training(trainer.accelerator)
    refused = {
        "push_to_hub": args.push_to_hub and args.hub_strategy != "end",
        "save_on_each_node": args.save_on_each_node,
        "enable_jit_checkpoint": args.enable_jit_checkpoint,
        "hyperparameter_search": trainer.hp_search_backend is not None,
    }
    for name, asked in refused.items():
        if asked:
            raise ConfigError(f"{name}: {_WHY[name]}", key=name)
