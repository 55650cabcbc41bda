"""Checkpoints of Lightning's ``Trainer``, by a callback in the place of its ``ModelCheckpoint``.

When a save is due is Lightning's decision, by the triggers of ``ModelCheckpoint``. Names, the tracker
and deletion are the manager's. A checkpoint has what Lightning itself would save, under names that
stock Lightning loads: ``lightning.ckpt``, or under ``ModelParallelStrategy`` a directory of DCP with
``meta.pt``. The part ``ranks`` has each rank's random numbers and its place in the data.

Lightning calls every method on all ranks. It loads by itself, after all ranks have verified the files.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal
from weakref import proxy

import torch

from ckptfsm.adapters.versions import judge, missing
from ckptfsm.core.config import Settings, config_of
from ckptfsm.core.errors import ConfigError
from ckptfsm.core.layout import LAYOUTS
from ckptfsm.core.parts import PerRank
from ckptfsm.core.retention import BestN, KeepAll, LatestN, Policy
from ckptfsm.dcp.checkpoint_manager import CheckpointManager
from ckptfsm.dcp.torch_file import TorchFile
from ckptfsm.dcp.training_state import random_state, set_random_state
from ckptfsm.follow.evaluators import checkpoints
from ckptfsm.integrations.replaced import Replaced
from ckptfsm.ranks.participant import Hook

if TYPE_CHECKING:
    from typing_extensions import Unpack

try:
    import lightning
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
    from lightning.pytorch.plugins.environments import SLURMEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy
    from lightning.pytorch.strategies.strategy import Strategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.exceptions import SIGTERMException
except ImportError as error:
    raise missing("lightning", error) from error

judge("lightning", lightning.__version__)

FILE = "lightning.ckpt"
RANKS = "ranks"
_META = "meta.pt"  # where Lightning looks for what is not sharded
_RANDOM = "rng_state"  # a key that another number of ranks may leave out, see ``reshard_drops``

# Arguments of ModelCheckpoint that have no place here, and settings that have another name.
_REFUSED = MappingProxyType(
    {
        "dirpath": "the first argument is the root",
        "filename": "a step's directory has the name of the setting `layout`",
        "save_last": "leave it out: ckpt_path='last' takes the newest tracked checkpoint",
        "save_weights_only": "leave it out: a run cannot go on from weights alone; for a file with "
        "weights call trainer.save_checkpoint(path, weights_only=True) with a path outside of the root",
        "auto_insert_metric_name": "leave it out: metrics are kept beside a step, not in its name",
        "enable_version_counter": "leave it out: a step is saved once",
        "agree_when_idle": "leave it out: the ranks agree on a SIGTERM at any step",
        "verbose": "leave it out: ckptfsm logs each step of a save",
        "save_interval_steps": "call it every_n_train_steps",
        "save_interval_s": "call it train_time_interval",
    }
)


class LightningCheckpoints(ModelCheckpoint):
    """The checkpoints below ``root``: ``Trainer(callbacks=[LightningCheckpoints("runs/gpt")])``.

    Resume with ``trainer.fit(model, ckpt_path="last")``, also at the first start. The run then goes on
    bit for bit, with the random numbers of every rank, and with the data where it was. To begin at step
    zero beside newer checkpoints is a ``ConfigError``.

    - ``monitor``, ``mode``, ``every_n_train_steps``, ``train_time_interval``, ``every_n_epochs`` and
      ``save_on_train_epoch_end`` are those of ``ModelCheckpoint``. With ``monitor`` too, each save
      that is due is made: which ones stay is the retention's decision.
    - ``save_top_k`` is short for a ``retention``. With ``monitor``, k keeps the newest and the k best.
      Without it, 1 keeps the newest. By default, and with -1, all stay.
    - A SIGTERM to any rank saves first, and then ends ``fit`` on all of them, after a batch that all
      ranks agree on. ``save_on_exception`` saves after any exception, in a job of one rank.
    - With ``accumulate_grad_batches``, a save that is due before the optimizer steps waits for it.
    - ``weights_only``: as in ``trainer.fit(weights_only=...)``. A save refuses what could not be loaded
      so. Give False in both places if you trust the files.
    - ``attach``: promise that nothing but the optimizers' steps changes the weights while ``fit``
      runs, so that a save copies nothing. Callbacks that average or clamp them break it.
    - ``hooks`` and all further keyword arguments are those of ``CheckpointManager``.

    While ``fit`` runs, ``ckpts`` is the manager. Raises ``ConfigError`` for an argument of
    ``ModelCheckpoint`` that means nothing here; when ``fit`` begins, for a strategy or plugin that
    saves in its own way.
    """

    _defer_save_until_validation: bool

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int | None = None,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        save_on_exception: bool = False,
        weights_only: bool | None = None,
        attach: bool = False,
        hooks: Sequence[Hook] = (),
        **settings: Unpack[Settings],
    ) -> None:
        for name in settings:
            if name in _REFUSED:
                raise ConfigError(f"{name}: {_REFUSED[name]}", key=name)
        if save_top_k is not None:
            if "retention" in settings:
                raise ConfigError("save_top_k and retention: give one of them", key="save_top_k")
            settings["retention"] = retain(save_top_k, monitor, mode)
        settings["agree_when_idle"] = True  # on a SIGTERM
        super().__init__(
            dirpath=os.fspath(root),
            monitor=monitor,
            mode=mode,
            save_top_k=-1,
            every_n_train_steps=every_n_train_steps,
            train_time_interval=train_time_interval,
            every_n_epochs=every_n_epochs,
            save_on_train_epoch_end=save_on_train_epoch_end,
            save_on_exception=save_on_exception,
        )
        self._config, self._hooks = config_of(None, settings), tuple(hooks)
        self._weights_only, self._attach = weights_only, attach
        self.ckpts: CheckpointManager | None = None
        self._replaced = Replaced()
        self._resumed: Mapping[str, Any] | None = None  # this rank's place in the loaded checkpoint
        self._epoch: Any = None  # the random numbers from which the epoch's iterator was made
        self._first: Any = None  # those before the first batch after a resume
        # ckpt_path is "last"; no save now; one was due meanwhile; this rank got a SIGTERM
        self._wants_last = self._holds = self._is_due = self._sigterm = False
        self._noted: int | None = None

    # --------------------------------------------------------------------------- begin and end

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Open the root, for ``fit`` alone (collective)."""
        if not _drives(trainer):
            return
        _refuse_others(trainer, self)
        super().setup(trainer, pl_module, stage)
        self.ckpts = CheckpointManager(str(self.dirpath), self._config, hooks=self._hooks)
        self._is_due = self._holds = self._defer_save_until_validation = self._sigterm = False
        fit_loop, connector = trainer.fit_loop, trainer._checkpoint_connector
        put = self._replaced.put
        put(trainer._signal_connector, "_sigterm_notifier_fn", self._on_sigterm)
        put(connector, "resume_start", partial(self._resume, trainer, connector.resume_start))
        first, each = fit_loop._load_combined_loader_states, fit_loop.epoch_loop.on_run_start
        put(
            fit_loop, "_load_combined_loader_states", partial(self._first_iterator, fit_loop, first)
        )
        put(fit_loop.epoch_loop, "on_run_start", partial(self._next_iterator, each))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Go to the place in the data; with ``attach``, let the optimizers wait for a writer."""
        super().on_train_start(trainer, pl_module)
        if self.ckpts is None:
            return
        latest = self.ckpts.latest_step()
        if latest is not None and trainer.global_step < latest:
            raise ConfigError(
                f"the training begins at step {trainer.global_step}, and {self.dirpath} has "
                f"checkpoints up to step {latest}: call fit(ckpt_path='last'), or go back with "
                f"`ckptfsm rollback {trainer.global_step} -r {self.dirpath}`, or choose another root",
                step=trainer.global_step,
                file=str(self.dirpath),
            )
        self._go_to_place(trainer)
        for optimizer in trainer.optimizers if self._attach else ():
            self.ckpts.attach(optimizer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait until the last save is tracked, and give the root back."""
        self._close(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close after a ``fit`` that had nothing to train."""
        self._close(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save if all ranks end here together, and leave."""
        self._wants_last = self._holds = False
        if self.ckpts is None:
            return
        together = isinstance(exception, SIGTERMException)  # see _heed_sigterm
        try:
            wanted = (together or self.save_on_exception) and trainer.optimizers
            if wanted and not self._should_skip_saving_checkpoint(trainer):
                self._save(trainer, self._monitor_candidates(trainer))
            if wanted:
                self._close(trainer)
        finally:
            self._let_go()

    def _close(self, trainer: Any) -> None:
        if self.ckpts is None:
            return
        try:
            self.ckpts.wait_until_finished()
            self._note_tracked(trainer)
            self.ckpts.close()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Leave: after ``close`` nothing is left to do, otherwise without the other ranks."""
        ckpts, self.ckpts = self.ckpts, None
        self._replaced.give_back()
        self._resumed, self._noted = None, None
        if ckpts is not None:
            ckpts.abandon()

    # --------------------------------------------------------------------------------- resume

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        """What ``ckpt_path="last"`` stands for: in ``fit`` the root, whose latest step is loaded."""
        root = str(self.dirpath)
        if _drives(trainer) and self.ckpts is None:  # else see _elsewhere
            self._wants_last = True  # whichever file Lightning takes for the newest
            Path(root).mkdir(parents=True, exist_ok=True)  # else Lightning asks for save_last
            return {root}
        if self.ckpts is None and Path(root).is_dir():
            for lease in checkpoints(root, newest_only=True, timeout_s=0):
                return {_loadable(Path(lease.path))}
        return super()._find_last_checkpoints(trainer)

    def _resume(
        self,
        trainer: Any,
        stock: Callable[..., None],
        checkpoint_path: Any = None,
        weights_only: bool | None = None,
    ) -> None:
        """Verify what is in our root, and let Lightning load it. Other paths are Lightning's."""
        assert self.ckpts is not None
        wants_last, self._wants_last = self._wants_last, False
        step = -1 if wants_last else self._step_of(checkpoint_path)
        if step is None and checkpoint_path is not None:
            stock(checkpoint_path, weights_only=weights_only)
            return
        wanted, restored = {RANKS: {_RANDOM: PerRank(None)}}, None
        if step is not None:
            restored = self.ckpts.restore(parts=wanted, step=step if step >= 0 else None)
        if restored is None:  # the first start, or the first with ours
            other = self._elsewhere(trainer, wants_last=step is not None)
            stock(other, weights_only=weights_only)
            return
        self._resumed = restored.parts[RANKS].get(_RANDOM)
        self._last_global_step_saved = restored.step
        stock(_loadable(Path(restored.directory)), weights_only=weights_only)

    def _elsewhere(self, trainer: Any, *, wants_last: bool) -> str | None:
        """The last file of Lightning's own to begin from, as the root has no step; None for zero.

        Raises ``ConfigError`` for zero beside files of Lightning's in the root (collective).
        """
        assert self.ckpts is not None
        last, file = None, ""
        if trainer.is_global_zero:  # other ranks may see other files
            if self.ckpts.latest_step() is None and trainer.global_step == 0:
                file = max(map(str, Path(str(self.dirpath)).glob("*.ckpt")), default="")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # at a first start there is none
                parse = partial(trainer._checkpoint_connector._parse_ckpt_path, trainer.state.fn)
                last = parse("last", True, True) if wants_last else None
        last, file = trainer.strategy.broadcast((last, file))
        if file and last is None:
            raise ConfigError(
                f"the training begins at zero, and {self.dirpath} has files of Lightning's: give once "
                f"ckpt_path={file!r}, or that of another file, or choose another root",
                file=file,
            )
        return last

    def _step_of(self, path: Any) -> int | None:
        """The step that a path in our root means, -1 for the latest; None for any other path."""
        root = Path(str(self.dirpath))
        if path is None or "://" in str(path):
            return None
        place = Path(os.path.realpath(path))
        if place == root:
            return -1
        if root not in place.parents:
            return None
        name = place.relative_to(root).parts[0]
        found = LAYOUTS[self._config.layout].parse_published(name)
        if found is None:
            raise ConfigError(
                f"ckpt_path {path} is in the root {root}, and no checkpoint of it: give 'last', or the "
                "directory of a step",
                file=str(path),
            )
        return found

    def _first_iterator(self, fit_loop: Any, stock: Callable[[], None]) -> None:
        """Right before the first iterator over the data: let it be that of the loaded checkpoint."""
        place, loader = self._resumed, fit_loop._combined_loader
        if place is not None and place["loaders"]:
            fit_loop._combined_loader_states_to_load = []  # rank 0's
            loader._load_state_dicts(place["loaders"])
        stock()
        if place is not None:
            set_random_state(place["epoch"])
        self._epoch = random_state()

    def _go_to_place(self, trainer: Any) -> None:
        """Pass over the batches of the epoch that were trained."""
        place, fetcher = self._resumed, trainer.fit_loop._data_fetcher
        if place is None:
            return
        self._first = random_state() if place["over"] else place["random"]
        if not place["loaders"] and not isinstance(fetcher, _DataLoaderIterDataFetcher):
            for _ in range(place["batches"]):
                next(fetcher)
                fetcher.fetched -= 1  # Lightning adds them

    def _next_iterator(self, stock: Callable[[Any], None], data_fetcher: Any) -> None:
        """Where Lightning makes the iterator of an epoch, unless it is there."""
        place, iterator, now = self._resumed, data_fetcher.combined_loader._iterator, random_state()
        begin = now if place is None else place["random"]
        set_random_state(begin)
        stock(data_fetcher)
        if data_fetcher.combined_loader._iterator is iterator:
            set_random_state(now)
        else:
            self._epoch, self._first = begin, random_state()
        if place is not None:
            fetch = partial(self._first_fetch, data_fetcher, data_fetcher._start_profiler)
            data_fetcher._start_profiler = fetch

    def _first_fetch(self, data_fetcher: Any, stock: Callable[[], None]) -> None:
        """Right before the first batch after a resume. Lightning may have validated once more."""
        set_random_state(self._first)
        self._resumed, data_fetcher._start_profiler = None, stock
        stock()

    # ----------------------------------------------------------------------------------- save

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Poll, and save if a save is due. Before a validation, it waits for the end of that."""
        if self.ckpts is None:
            return
        self.ckpts.poll()
        self._note_tracked(trainer)
        self._holds = self._validates(trainer) or trainer.fit_loop.epoch_loop._should_accumulate()
        if pl_module.automatic_optimization:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        elif self._every_n_train_steps and not trainer.global_step % self._every_n_train_steps:
            self._save_if_new(trainer)
        if self._is_due or self.ckpts.should_save(trainer.global_step):
            self._save_if_new(trainer)
        self._heed_sigterm(trainer)
        self._holds = False

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Save what was due before the validation, or what is due now."""
        if self.ckpts is None or trainer.sanity_checking:
            return
        self._holds = trainer.fit_loop.epoch_loop._should_accumulate()
        if self._is_due or self._defer_save_until_validation:
            self._defer_save_until_validation = False
            self._save_if_new(trainer)
        super().on_validation_end(trainer, pl_module)
        self._heed_sigterm(trainer)
        self._holds = False

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """See ``ModelCheckpoint``. What is still due is saved: another validation did not come."""
        if self.ckpts is None:
            return
        super().on_train_epoch_end(trainer, pl_module)
        if self._is_due or self._defer_save_until_validation:
            self._defer_save_until_validation = False
            self._save_if_new(trainer)

    def _validates(self, trainer: Any) -> bool:
        """Whether a validation follows this batch (collective, if that is decided by the time)."""
        loop = trainer.fit_loop
        follows = loop.epoch_loop._should_check_val_fx(loop._data_fetcher)
        if trainer._val_check_time_interval is not None:
            follows = trainer.strategy.broadcast(follows)
        return bool(follows and sum(trainer.num_val_batches))

    def _on_sigterm(self, *_: Any) -> None:
        """In the place of Lightning's handler, whose broadcast would meet other collective calls."""
        self._sigterm = True
        if self.ckpts is not None:
            self.ckpts.request_save()

    def _heed_sigterm(self, trainer: Any) -> None:
        """Let Lightning end ``fit``, on all ranks, if one got a SIGTERM (collective)."""
        if self._holds or not (self.ckpts and (self.ckpts.preempted or self.ckpts.world_size == 1)):
            return
        if trainer.strategy.reduce_boolean_decision(self._sigterm, all=False):
            trainer._signal_connector.received_sigterm = True

    def _save_if_new(self, trainer: Any) -> None:
        if not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))

    def _save_monitor_checkpoint(self, trainer: Any, monitor_candidates: dict[str, Any]) -> None:
        self._save(trainer, monitor_candidates)

    def _save_none_monitor_checkpoint(
        self, trainer: Any, monitor_candidates: dict[str, Any]
    ) -> None:
        self._save(trainer, monitor_candidates)

    def _save(self, trainer: Any, found: Mapping[str, Any]) -> None:
        """Begin a checkpoint of this step (collective)."""
        assert self.ckpts is not None
        self._is_due = self._holds
        if self._holds:  # a resumed run repeats no validation, and has no gradients of before
            return
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        parts = self._parts(trainer, checkpoint)
        parts[RANKS] = {_RANDOM: PerRank(self._place(trainer))}
        metrics = {
            name: float(value)
            for name, value in found.items()
            if name not in ("epoch", "step") and torch.as_tensor(value).numel() == 1
        }
        step = trainer.global_step
        handle = self.ckpts.save(step, parts=parts, metrics=metrics)
        if not handle.skipped:
            self._last_global_step_saved = step

    def _parts(self, trainer: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """What Lightning's strategy would write, by the names under which it looks for it."""
        first = trainer.is_global_zero
        if not _is_sharded(trainer.strategy):
            file = TorchFile(checkpoint, weights_only=self._weights_only)
            return {FILE: file if first else None}
        state = {"state_dict": checkpoint.pop("state_dict")}
        for number, each in enumerate(checkpoint.pop("optimizer_states", ())):
            state[f"optimizer_{number}"] = each
        file = TorchFile(checkpoint, weights_only=self._weights_only)
        return {"state": state, _META: file if first else None}

    def _place(self, trainer: Any) -> dict[str, Any]:
        """This rank's random numbers and place in the data, in values that torch can load.

        ``epoch``: the random numbers from which the iterator is made. ``batches`` of it were trained.
        ``random``: those to go on with then. ``over``: first, the next epoch's iterator is made.
        """
        loop = trainer.fit_loop
        progress, now = loop.epoch_loop.batch_progress, random_state()
        trained = progress.current.processed
        over = trained > 0 and (progress.is_last_batch or trained >= trainer.num_training_batches)
        return {
            "epoch": now if over else self._epoch,
            "batches": 0 if over else trained,
            "random": now,
            "over": over,
            "loaders": loop._combined_loader._state_dicts(),
        }

    # -------------------------------------------------------------------- what Lightning reads

    def _note_tracked(self, trainer: Any) -> None:
        """Let ``ckpt_path="best"``, loggers and others find what is tracked (collective)."""
        assert self.ckpts is not None
        latest = self.ckpts.latest_step()
        if latest is None or latest == self._noted:
            return
        self._noted = latest
        self.last_model_path = self._last_checkpoint_saved = _loadable(self.ckpts.path(latest))
        best = latest
        if self.monitor is not None:
            best = self.ckpts.best_step(self.monitor, self.mode) or latest
            score = self.ckpts.metrics(best).get(self.monitor)
            self.best_model_score = self.current_score = (
                None if score is None else torch.tensor(score)
            )
        self.best_model_path = _loadable(self.ckpts.path(best))
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(proxy(self))

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the root knows its checkpoints."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing up."""


def retain(save_top_k: int, monitor: str | None, mode: Literal["min", "max"]) -> Policy:
    """The policy that stands for ``save_top_k``. Raises ``ConfigError`` if there is none."""
    if save_top_k == -1:
        return KeepAll()
    if save_top_k < 1 or (monitor is None and save_top_k > 1):
        raise ConfigError(
            f"save_top_k={save_top_k} with monitor={monitor!r} keeps nothing to resume from, or has no "
            "order: give -1, 1, a number with a monitor, or a retention",
            key="save_top_k",
        )
    newest = LatestN(1)
    return newest if monitor is None else newest | BestN(monitor, save_top_k, mode)


def _drives(trainer: Any) -> bool:
    return trainer.state.fn == TrainerFn.FITTING and not trainer.fast_dev_run


def _is_sharded(strategy: Any) -> bool:
    return isinstance(strategy, ModelParallelStrategy) and strategy._save_distributed_checkpoint


def _loadable(directory: Path) -> str:
    """The path by which Lightning loads the checkpoint in a directory."""
    sharded = (directory / _META).is_file()
    return str(directory if sharded else directory / FILE)


def _refuse_others(trainer: Any, own: LightningCheckpoints) -> None:
    """Raise ``ConfigError`` for what would save in another way, or by itself."""
    strategy, root = trainer.strategy, Path(str(own.dirpath))
    saves = type(strategy).save_checkpoint
    if saves not in (Strategy.save_checkpoint, ModelParallelStrategy.save_checkpoint):
        raise ConfigError(
            f"{type(strategy).__name__} saves in its own way: use one device, DDPStrategy, or "
            "ModelParallelStrategy, or leave ckptfsm out"
        )
    if type(strategy.checkpoint_io) is not TorchCheckpointIO:
        raise ConfigError(
            f"{type(strategy.checkpoint_io).__name__} would not be called: leave the plugin out; "
            "ckptfsm writes asynchronously by itself"
        )
    environment = trainer._accelerator_connector.cluster_environment
    if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
        raise ConfigError(
            "SLURM's auto-requeue saves a file of its own, and resumes from it: give "
            "plugins=[SLURMEnvironment(auto_requeue=False)], and preemption_signals=['SIGUSR1']"
        )
    if own.save_on_exception and trainer.world_size > 1:
        raise ConfigError(
            "save_on_exception: one rank's exception cannot save for all of them; leave it out. After a "
            "SIGTERM all ranks save anyway",
            key="save_on_exception",
        )
    if isinstance(getattr(trainer.lightning_module, "saved_models", None), dict):
        raise ConfigError(
            "the module's saved_models would not be used: checkpoints have the weights after the step; "
            "rename the attribute"
        )
    for other in trainer.checkpoint_callbacks:
        place = getattr(other, "dirpath", None)
        if other is not own and place and root in (p := Path(os.path.realpath(place)), *p.parents):
            raise ConfigError(
                f"{type(other).__name__} writes and deletes in the root {root}: give it a dirpath "
                "elsewhere, or leave it out",
                file=str(place),
            )
