"""Megatron-Bridge's checkpoints: the class to name in ``CheckpointConfig(custom_manager_class=...)``.

Bridge's ``save_checkpoint`` still collects the state, as Megatron-LM's does, and its closure that writes
two trackers never runs. Bridge reads ``latest_train_state.pt`` before the tracker. There is one tracker
here, so that file is set aside once the root has a checkpoint that ckptfsm tracks. Bridge then reads the
tracker, and the counters from the step's own ``train_state.pt``.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import ckptfsm.megatron  # noqa: F401 first, to report a missing or old package

# isort: split
import torch
import torch.distributed as dist
from megatron.bridge.training import checkpointing

from ckptfsm.core.errors import CkptFsmError, ConfigError, StorageError, describe
from ckptfsm.core.layout import MEGATRON, QUARANTINE
from ckptfsm.core.retention import KeepAll, LatestN, Policy
from ckptfsm.disk.durable import lookup, move
from ckptfsm.integrations.megatron_lm import (
    CapturedSave,
    CapturingSaves,
    Closure,
    MegatronLMCheckpoints,
    with_metadata,
)
from ckptfsm.integrations.replaced import Replaced
from ckptfsm.megatron.states import storage_at
from ckptfsm.writers.plain_files import FileTree

POINTER = "latest_train_state.pt"
_REPORTS = frozenset(
    {"wandb_finalize_fn", "mlflow_finalize_fn", "comet_finalize_fn", "fire_callback"}
)
# What Bridge's functions get from the context of a save or a load.
_GIVEN = ("state", "model", "optimizer", "opt_param_scheduler", "pg_collection", "module_name")
_TO_SAVE = ("num_floating_point_operations_so_far", "train_data_iterator")
_TO_LOAD = ("strict", "skip_load_to_model_and_opt")
_FILES = ("train_state.pt", "run_config.yaml")


class BridgeCheckpoints:
    """Bridge's ``CheckpointManager``, by ckptfsm. Every method is collective.

    ``checkpoint_config`` is Bridge's: ``save``, ``async_save`` and ``most_recent_k`` mean what they
    meant. For settings of ``CheckpointManager``, name a subclass with ``settings``. Raises
    ``ConfigError`` for what is not saved here: other formats than ``torch_dist``, non-persistent
    checkpoints, and ``also_save_hf_checkpoint``.
    """

    settings: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __init__(self, checkpoint_config: Any) -> None:
        _refuse(checkpoint_config)
        self._config = checkpoint_config
        self._context = checkpointing.init_checkpointing_context(checkpoint_config)
        self._checkpoints: MegatronLMCheckpoints | None = None
        self.directory = ""  # see CapturingSaves
        self._captured: CapturedSave | None = None
        self._may_have_pointer = True
        if checkpoint_config.save is not None:  # recovers before Bridge looks for what to load
            self._set_pointer_aside()

    @property
    def checkpointing_context(self) -> dict[str, Any]:
        """What Bridge keeps between saves."""
        return self._context

    @property
    def checkpoints(self) -> MegatronLMCheckpoints:
        """The checkpoints below ``save``; made at first use."""
        if self._checkpoints is None:
            policy = policy_of(self._config.most_recent_k)
            settings = {"retention": policy, **self.settings}
            self._checkpoints = MegatronLMCheckpoints(self._config.save, **settings)
        return self._checkpoints

    def save(self, ctx: Any, callback_manager: Any = None) -> None:
        """Begin a checkpoint of ``ctx``; without ``async_save`` wait until it is tracked."""
        if ctx.non_persistent_ckpt:
            raise ConfigError(
                "a non-persistent checkpoint is not saved here: use the interval alone"
            )
        dataset = ctx.state.cfg.dataset
        if getattr(dataset, "dataloader_save", None) == self._config.save:
            raise ConfigError(
                "dataset.dataloader_save must be another directory than checkpoint.save"
            )
        iteration = ctx.state.train_state.step
        self.checkpoints.attach(ctx.optimizer)
        reports: list[Closure] = []
        collect = partial(self._collect, ctx, callback_manager, iteration, reports)
        parts = _files_of(ctx)
        handle = self.checkpoints.save(iteration, collect, parts=parts, reports=reports)
        if self._config.async_save:
            return
        manager = self.checkpoints.open()
        if manager.config.on_failure == "warn":
            manager.wait_for(handle)
        goes_on = not handle.skipped and handle.blocked_by is None
        self.checkpoints.maybe_finalize_async_save(blocking=goes_on)
        self._set_pointer_aside()

    def load(self, ctx: Any) -> tuple[int, int]:
        """Load as Bridge does: the iteration, and the floating point operations so far."""
        given = {name: getattr(ctx, name) for name in (*_GIVEN, *_TO_LOAD)}
        loaded: tuple[int, int] = checkpointing.load_checkpoint(
            checkpointing_context=self._context, **given
        )
        source, root = self._config.load, self._config.save
        if root is not None:
            if source and os.path.realpath(source) == os.path.realpath(root):
                self.checkpoints.resumed(loaded[0])
            self.checkpoints.warn_of_later(loaded[0])
        return loaded

    def finalize_async_saves(
        self, state: Any, blocking: bool = False, terminate: bool = False
    ) -> None:
        """Drive the saves in flight. Raises the error of a failed one, on every rank.

        ``terminate`` gives the root back, also after a failure.
        """
        if self._checkpoints is None:
            return
        with contextlib.ExitStack() as end:
            if terminate:
                end.callback(self.checkpoints.maybe_finalize_async_save, terminate=True)
            self.checkpoints.maybe_finalize_async_save(blocking)
            self._set_pointer_aside()

    # ------------------------------------------------------------------ while Bridge collects

    def _collect(
        self, ctx: Any, callbacks: Any, iteration: int, reports: list[Closure]
    ) -> dict[str, Any]:
        """The state as Bridge collects it; adds the closures for people to ``reports``."""
        self.directory = os.path.join(str(self._config.save), MEGATRON.published_name(iteration))
        asked, self._config.async_save = self._config.async_save, True  # else it writes trackers
        stock = Replaced()
        ours = CapturingSaves(checkpointing.dist_checkpointing, self)
        stock.put(checkpointing, "dist_checkpointing", ours)
        ensure = partial(self._ensure, checkpointing.ensure_directory_exists)
        stock.put(checkpointing, "ensure_directory_exists", ensure)
        stock.put(checkpointing, "schedule_async_save", self._schedule)
        stock.put(checkpointing, "is_empty_async_queue", lambda state: True)
        try:
            given = {name: getattr(ctx, name) for name in (*_GIVEN, *_TO_SAVE)}
            checkpointing.save_checkpoint(
                checkpointing_context=self._context, callback_manager=callbacks, **given
            )
        finally:
            stock.give_back()
            self._config.async_save = asked
            self.directory = ""
            captured, self._captured = self._captured, None
        if captured is None:
            raise ConfigError("Bridge's save_checkpoint has not called dist_checkpointing.save")
        fns = captured.finalize_fns
        reports += [each for each in fns if getattr(each, "__name__", "") in _REPORTS]
        return with_metadata(captured.state_dict, captured.content_metadata)

    def _ensure(self, stock: Callable[..., None], filename: str, check_parent: bool = True) -> None:
        """Skip making the step's directory: it appears when it is complete, not before."""
        if check_parent or str(filename) != self.directory:
            stock(filename, check_parent)

    def _schedule(self, state: Any, request: Any) -> None:
        if not isinstance(request, CapturedSave):
            raise ConfigError("a request beside the checkpoint's own is not saved here")
        self._captured = request

    def _set_pointer_aside(self) -> None:
        """Move Bridge's own tracker to quarantine, once ours names a checkpoint."""
        if not self._may_have_pointer:
            return
        manager = self.checkpoints.open()
        if manager.latest_step() is None:
            return
        told = [_moved_aside(self.checkpoints.save_dir) if manager.rank == 0 else ""]
        if dist.is_initialized():
            dist.broadcast_object_list(told, src=0)
        if told[0]:
            raise StorageError(
                f"{self.checkpoints.save_dir}/{POINTER} cannot be moved away: {told[0]}. Bridge would "
                "resume from the step in it: remove it",
                file=POINTER,
            )
        self._may_have_pointer = False


def _moved_aside(root: str) -> str:
    """Move Bridge's own tracker away; why that failed, or ""."""
    try:
        with storage_at(Path(root)) as storage:
            if lookup(storage, POINTER) is not None:
                move(storage, POINTER, f"{QUARANTINE}/{POINTER}")
    except (CkptFsmError, OSError) as error:  # the other ranks wait
        return describe(error)
    return ""


def policy_of(most_recent_k: int) -> Policy:
    """The policy of ``most_recent_k``: -1 keeps all. Raises ``ConfigError`` for 0."""
    if most_recent_k == 0:
        raise ConfigError("most_recent_k=0 would delete every checkpoint: use -1, or 1 and above")
    return KeepAll() if most_recent_k < 0 else LatestN(most_recent_k)


def _refuse(config: Any) -> None:
    """Refuse what is not saved here."""
    if config.ckpt_format != "torch_dist":
        raise ConfigError(f"ckpt_format {config.ckpt_format!r} is not saved here: use torch_dist")
    if config.non_persistent_save_interval is not None:
        raise ConfigError("non_persistent_save_interval is not saved here: leave it out")
    if config.also_save_hf_checkpoint:
        raise ConfigError("also_save_hf_checkpoint is not saved here: export after the training")
    policy_of(config.most_recent_k)
    if "://" in str(config.save):
        raise ConfigError(f"save={str(config.save)!r} is no directory: give a path that is mounted")


def _files_of(ctx: Any) -> dict[str, Any]:
    """The files that Bridge's closure would write into the step's directory; rank 0 gives them."""
    cfg = ctx.state.cfg
    tokenizer = getattr(cfg.dataset, "tokenizer", None) if cfg.dataset else None
    wanted = [*_FILES]
    if cfg.checkpoint.save_tokenizer_assets and tokenizer is not None:
        wanted.append("tokenizer")
    if dist.is_initialized() and dist.get_rank() != 0:
        return dict.fromkeys(wanted)  # written by another rank
    # Made while all ranks plan, so that they hear of an error.
    parts: dict[str, Any] = {_FILES[0]: partial(_counters, ctx), _FILES[1]: partial(_written, cfg)}
    if "tokenizer" in wanted:
        write = partial(_write_tokenizer, tokenizer, cfg.tokenizer)
        parts["tokenizer"] = FileTree(write)
    return parts


def _counters(ctx: Any) -> bytes:
    counters = ctx.state.train_state.state_dict()
    counters["floating_point_operations_so_far"] = torch.tensor(
        ctx.num_floating_point_operations_so_far, dtype=torch.float32
    )
    image = io.BytesIO()
    torch.save(counters, image)
    return image.getvalue()


def _written(cfg: Any) -> bytes:
    """The bytes of the file that a configuration writes."""
    with tempfile.TemporaryDirectory() as place:
        name = os.path.join(place, _FILES[1])
        cfg.to_yaml(name)
        return Path(name).read_bytes()


def _write_tokenizer(tokenizer: Any, config: Any, directory: str) -> None:
    """Write the tokenizer. Bridge's function makes the directory ``tokenizer`` itself."""
    checkpointing.save_tokenizer_assets(tokenizer, config, str(Path(directory).parent))
