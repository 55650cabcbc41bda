"""torchtitan (0.3.0), released and unchanged, with checkpoints that ckptfsm drives.

``checkpoints`` is an override of torchtitan's: name it in ``--override.imports``, or call it with a
configuration. The checkpointer is torchtitan's own, with its rules of when to save and what. But the
three things that it does on the disk go through a ``CheckpointManager``: it saves by ``dcp_save``, loads
by ``dcp_load``, and purges.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from ckptfsm.adapters.versions import installed, judge, missing
from ckptfsm.core.config import CheckpointConfig, make_config
from ckptfsm.core.errors import ConfigError
from ckptfsm.core.layout import PRIVATE, TITAN
from ckptfsm.core.retention import KeepAll, LatestN
from ckptfsm.dcp.checkpoint_manager import CheckpointManager as Manager
from ckptfsm.disk.reader_lease import ReaderLease
from ckptfsm.ranks.handle import SaveHandle
from ckptfsm.writers.plain_files import FileTree

try:
    import torch.distributed as dist
    import tyro  # type: ignore[import-not-found]
    from torchtitan.components.checkpointer import (
        MODEL,
        OPTIMIZER,
        AsyncMode,
        BaseCheckpointManager,
        CheckpointManager,
    )
    from torchtitan.config.override import override
    from torchtitan.tools import filesystem
except ImportError as error:
    raise missing("torchtitan", error) from error

judge("torchtitan", installed("torchtitan"))

_WHEN = "torchtitan decides when it saves: set checkpoint.interval"
_OF_NOBODY: Mapping[str, str] = MappingProxyType(
    {
        "save_interval_steps": _WHEN,
        "save_steps": _WHEN,
        "save_interval_s": _WHEN,
        "preemption_signals": _WHEN,
        "end_of_allocation": _WHEN,
        "agree_when_idle": _WHEN,
        "exchange_every": "what ranks would exchange for (signals, times) has no effect here either",
        "layout": "torchtitan's steps are named step-N",
        "sync": "checkpoint.async_mode says whether a save is waited for",
        "common_state": "it is for states of megatron-core",
        "reshard_drops": "name what is to be left out in checkpoint.exclude_from_loading",
    }
)
"""Settings without effect under torchtitan, and why."""


class TitanCheckpoints(CheckpointManager):
    """torchtitan's checkpointer, over a ``CheckpointManager`` of this library.

    ``manager`` is None under ``load_only``: the folder may be another job's, and is only read.
    Construction, saves, loads and ``close`` are collective.
    """

    save_future: Any

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """Those of torchtitan, and ``settings`` of ``CheckpointManager`` (``hooks`` too).

        Raises ``ConfigError`` for a setting that does not exist, or has no effect here.
        """

        settings: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            if self.enable:
                _config_of(self)

    def __init__(self, config: Any, *, base_folder: str = "", **built: Any) -> None:
        self.manager: Manager | None = None
        self.handle: SaveHandle | None = None
        self._exact = True  # load the very step that is asked for
        # Stock's own way to save is left with nothing to do: no thread that purges, no further group.
        stock = replace(config, async_mode="disabled", keep_latest_k=0)
        super().__init__(stock, base_folder=base_folder, **built)
        if not self.enable or self.load_only:
            return
        if filesystem.is_remote(self.folder):
            raise ConfigError(
                f"checkpoint.folder {self.folder} is not on a file system: ckptfsm saves into a mounted "
                "directory. Give such a one, or leave the override out",
                key="folder",
            )
        hooks = config.settings.get("hooks", ())
        self.manager = Manager(self.folder, _config_of(config), hooks=hooks)
        self.manager.expect_gate()  # _maybe_wait_for_staging

    # ----------------------------------------------------------------------------------------- save

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        saved = bool(super()._save(curr_step, last_step))
        if saved and last_step and self.manager is not None and self.handle is not None:
            self.manager.wait_for(self.handle)
        return saved

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> None:
        """Begin the save of what torchtitan has collected for a step."""
        step = self._own_step(checkpoint_id)
        assert self.manager is not None and step is not None
        if to_hf:
            files = FileTree(partial(self._write_hf, state_dict), every_rank=True, directory="")
            self.handle = self.manager.save(step, parts={"hf": files})
        else:
            self.handle = self.manager.save(step, state_dict)
        self.save_future = self.handle  # so that _wait_for_saving is called

    def _write_hf(self, state_dict: dict[str, Any], directory: str) -> None:
        """Let all ranks write stock's safetensors into the directory of rank 0."""
        first = [directory]
        dist.broadcast_object_list(first, src=0)
        super().dcp_save(state_dict, first[0], AsyncMode.DISABLED, to_hf=True)

    def _maybe_wait_for_staging(self) -> None:
        if self.manager is not None:
            self.manager.before_update()
            self.manager.poll()

    def _wait_for_saving(self) -> None:
        self.save_future = None
        if self.manager is not None:
            self.manager.wait_until_finished()

    # ----------------------------------------------------------------------------------------- load

    def _load(self, step: int = -1) -> bool:
        newest = None if self.manager is None else self.manager.latest_step()
        if newest is not None and -1 < step < newest:
            raise ConfigError(
                f"checkpoint.load_step is {step}, and {self.folder} has {newest}: saves up to that "
                f"would be refused. Go back with `ckptfsm rollback {step} -r {self.folder}`, or give "
                "another checkpoint.folder, and this step as checkpoint.initial_load_path",
                key="load_step",
            )
        self._exact = step != -1
        return bool(super()._load(step))

    def _find_load_step(self, folder: str = "") -> int:
        if self.manager is None or folder:
            return int(super()._find_load_step(folder))
        newest = self.manager.latest_step()
        if newest is None:
            self.manager.restore({})  # raises if there is evidence of a checkpoint
        return -1 if newest is None else newest

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load what torchtitan asks for, verified if it is a step of this folder."""
        step = self._own_step(checkpoint_id)
        if step is None or self.manager is None:
            with self._kept(step):
                super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        exact = step if self._exact else None  # if the newest is damaged, the one before it
        some = OPTIMIZER not in state_dict or bool(self.exclude_from_loading)
        restored = self.manager.restore(state_dict, step=exact, partial=some)
        assert restored is not None
        self.states[MODEL].load_state_dict(restored.state)

    def _kept(self, step: int | None) -> AbstractContextManager[Any]:
        """A block in which another job does not delete a step of this folder."""
        if step is None or not Path(self.folder, PRIVATE).is_dir():
            return nullcontext()
        return ReaderLease(self.folder, step, layout=TITAN.name)

    def _own_step(self, checkpoint_id: str) -> int | None:
        """The step of a path, if it is one of this folder."""
        place = Path(checkpoint_id)
        return TITAN.parse_published(place.name) if place.parent == Path(self.folder) else None

    # ------------------------------------------------------------------------------------------ end

    def _close(self) -> None:
        """Finish the save in flight; after an error, which torchtitan raises again, only this rank's.

        The other ranks may not come.
        """
        if self.manager is None:
            return
        if sys.exc_info()[1] is None:
            self.manager.close()
        else:
            self.manager.abandon()

    def __del__(self) -> None:
        """Stock's closes, which is collective here."""
        manager = getattr(self, "manager", None)
        if manager is not None:
            manager.abandon()


def _config_of(config: TitanCheckpoints.Config) -> CheckpointConfig:
    """The configuration of the manager. Raises ``ConfigError``."""
    given = {name: value for name, value in config.settings.items() if name != "hooks"}
    for name in given:
        if name in _OF_NOBODY:
            raise ConfigError(f"{name} has no effect here: {_OF_NOBODY[name]}", key=name)
    if "retention" in given and config.keep_latest_k:
        raise ConfigError(
            f"retention and checkpoint.keep_latest_k={config.keep_latest_k} both say what to keep: set "
            "checkpoint.keep_latest_k to 0",
            key="retention",
        )
    kept = config.keep_latest_k
    made = make_config(
        {
            "retention": LatestN(kept) if kept else KeepAll(),
            **given,
            "layout": TITAN.name,
            "sync": config.async_mode == "disabled",
        }
    )
    if made.saves_again:
        raise ConfigError("torchtitan decides when it saves: on_failure is 'raise' or 'warn'")
    return made


@override(  # type: ignore[untyped-decorator]
    target=BaseCheckpointManager.Config, description="checkpoints that ckptfsm drives"
)
def checkpoints(config: Any, **settings: Any) -> TitanCheckpoints.Config:
    """The configuration of torchtitan's checkpointer, for checkpoints that ckptfsm drives.

    ``settings`` are those of ``CheckpointManager``, as ``on_failure="warn"``. Raises ``ConfigError``
    for one that has no effect here, or for the configuration of another checkpointer.
    """
    if type(config) is TitanCheckpoints.Config:
        return replace(config, settings={**config.settings, **settings})
    if type(config) is not CheckpointManager.Config:
        raise ConfigError(
            f"{type(config).__module__}.{type(config).__qualname__} is the configuration of another "
            "checkpointer, whose way to save ckptfsm does not know: give a CheckpointManager.Config of "
            "torchtitan",
            key="checkpoint",
        )
    same = {each.name: getattr(config, each.name) for each in fields(config)}
    return TitanCheckpoints.Config(**same, settings=settings)
