"""verl's SFT trainer (``verl.trainer.sft_trainer``), Megatron or FSDP engine, with our checkpoints.

Run as a module, it is verl's program, with the same words on the command line: ``torchrun ... -m
ckptfsm.integrations.verl.sft``. Every rank writes its share by verl's manager, see ``rank_manager``, and
rank 0 drives, see ``trainer``. A checkpoint is ``global_step_N`` with the engine's files, ``data_R.pt``
of data-parallel ranks, and ``lora_train_meta.json``. Every training batch polls first.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, cast

import ckptfsm.megatron  # noqa: F401 first, to report a missing or old package

# isort: split
import torch

from ckptfsm.adapters.local_transport import LocalTransport
from ckptfsm.adapters.posix_storage import OpenPosix
from ckptfsm.coordinator.coordinator import Coordinator
from ckptfsm.core.errors import ConfigError
from ckptfsm.core.ports import Storage
from ckptfsm.core.retention import KeepAll, LatestN, Policy
from ckptfsm.dcp.transport import transport_of
from ckptfsm.integrations.verl.rank_manager import detach
from ckptfsm.integrations.verl.ranks import InsideCall, Ranks, is_within_an_epoch
from ckptfsm.integrations.verl.trainer import (
    Checkpoints,
    Options,
    Trainer,
    check_settings,
    of_verl,
    root_of,
    subclass_of,
)
from ckptfsm.integrations.workers import Calls
from ckptfsm.ranks.controller import Controller, controller_config
from ckptfsm.ranks.restoring import Restorer
from ckptfsm.ranks.tickets import Ticket
from ckptfsm.ranks.wiring import system_ports
from ckptfsm.writers.plain_files import FilesDriver

_ROLE = "engine"


class Rank:
    """A rank of the trainer: its engine, and the files that verl's handler writes beside it.

    ``storage`` is this rank's view of the root while all ranks verify a checkpoint.
    """

    def __init__(self, handler: Any) -> None:
        self.handler = handler
        self.engine = handler.engine
        self.storage: Storage | None = None

    def close(self) -> None:
        """Let go of the root."""
        storage, self.storage = self.storage, None
        if storage is not None:
            storage.close_root()

    def beside(self, directory: str) -> None:
        """Write the position in the data, and the settings of a LoRA adapter, as verl does."""
        handler = self.handler
        if handler.rank == 0 and handler.lora_train_meta is not None:
            meta = json.dumps(handler.lora_train_meta, ensure_ascii=False, indent=4)
            Path(directory, "lora_train_meta.json").write_text(meta, encoding="utf-8")
        if handler.is_mp_src_rank_with_outputs:
            state = handler.train_dataloader.state_dict()
            torch.save(state, Path(directory, f"data_{handler.dp_rank}.pt"))


class Group:
    """The ranks in the form of a verl worker group, as far as rank 0 needs it."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.workers = ranks.workers

    def save_checkpoint(
        self, directory: str, ticket: Ticket, step: int, max_ckpt_to_keep: None = None
    ) -> None:
        self._ranks.everywhere(_save, directory, ticket, step)


def _save(rank: Rank, directory: str, ticket: Ticket, step: int) -> None:
    """Let verl's engine load its offloaded state, call our manager, and offload again."""
    rank.engine.save_checkpoint(local_path=directory, hdfs_path=ticket, global_step=step)


def _open(rank: Rank, root: str) -> None:
    rank.storage = OpenPosix(root)(False)


class RootOfSft(Checkpoints):
    """The checkpoints at rank 0: of a trainer with one role, at the top of a step's directory."""

    def __init__(self, trainer: Any, options: Options, ranks: Ranks) -> None:
        super().__init__(trainer, options)
        self._ranks = ranks

    def _make_groups(self) -> dict[str, Any]:
        return {_ROLE: Group(self._ranks)}

    def _calls(self) -> Calls:
        return self._ranks

    def _make_controller(self, root: str, sizes: Mapping[str, int], **settings: Any) -> Controller:
        """A controller with waits that an interrupt ends, but not inside a call of all ranks."""
        ports = settings.pop("ports", None)
        if ports is None:
            ports = system_ports(LocalTransport(), FilesDriver(), OpenPosix(root))
        ports = replace(ports, defer_signals=partial(InsideCall, self._ranks.calls))
        return Controller(root, sizes, self._ask, ports=ports, **settings)

    def _policy(self) -> Policy:
        kept = self._trainer.config.trainer.get("max_ckpt_to_keep", None) or 0
        return LatestN(kept) if kept > 0 else KeepAll()

    def _is_async(self) -> bool:
        return bool(self._trainer.config.checkpoint.get("async_save", False))

    def _parts(self) -> dict[str, Any]:
        return self._group_parts(directory="")

    def _path_counts(self, config: Any) -> bool:
        """True if ``resume_from_path`` is used: in this trainer ``auto`` takes a path, too."""
        return config.resume_mode != "disable" and config.get("resume_from_path") is not None


class SftCheckpoints:
    """The checkpoints of one SFT trainer, in every rank. Every method is collective.

    ``driver`` is at rank 0, None elsewhere.
    """

    def __init__(self, trainer: Any, options: Options) -> None:
        self._handler = trainer.ckpt_handler
        self._root = root_of(trainer)
        settings = {name: value for name, value in options.settings.items() if name != "ports"}
        self._config = controller_config(None, settings)
        transport = transport_of(self._config)
        self._ranks = Ranks(transport, Rank(self._handler))
        leads = transport.rank == 0
        self.driver = RootOfSft(trainer, options, self._ranks) if leads else None

    def save(self, step: int) -> None:
        """Begin a checkpoint; without ``checkpoint.async_save`` wait until it is tracked."""
        self._together(lambda driver: driver.save_step(step))

    def poll(self, *, wait: bool = False) -> None:
        """Drive the saves in flight; with ``wait``, until none is. Raises the error of a failed one."""
        self._together(lambda driver: driver.poll(wait=wait))

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Keep the step while verl loads, verified by all ranks. See ``Checkpoints.loading``."""
        with contextlib.ExitStack() as kept:
            with self._ranks.calls.running(), self._verified() as step:
                self._together(lambda driver: kept.enter_context(driver.keeping(step, "none")))
            yield  # nothing is deleted before the next save, which waits for every rank

    @contextlib.contextmanager
    def _verified(self) -> Iterator[int | None]:
        """The step to load, verified by all ranks, and kept in the block; None if there is none."""
        here, transport = self._ranks.here, self._ranks.transport
        step = self._together(lambda driver: driver.step_to_load())
        try:
            self._ranks.together(lambda: self._ranks.everywhere(_open, self._root))
            ports = system_ports(transport, FilesDriver(), OpenPosix(self._root))
            calls = self._ranks.calls
            located = Restorer(ports, here.storage, self._config, self._ask, calls).choose(step)
            try:
                yield located.step if located is not None else None
            finally:
                if located is not None:
                    self._ask(Coordinator.release, located.lease)
        finally:
            here.close()

    def _ask(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """The coordinator's answer, or its error, on every rank. See ``restoring.Restorer``."""
        return self._together(lambda driver: driver.controller._agree(work, *arguments))

    def close(self) -> None:
        """Wait for the saves in flight; rank 0 also for copies, before it gives the root back."""
        try:
            self._together(lambda driver: driver.finish())
        except BaseException:
            self.abandon()
            raise
        detach(self._ranks.here, _ROLE)
        self._ranks.transport.close()
        if self.driver is not None:
            self.driver.close()

    def abandon(self) -> None:
        """Leave without the other ranks: the next start decides about saves in flight (local)."""
        if self.driver is not None:
            self.driver.abandon()

    def _together(self, work: Callable[[RootOfSft], Any]) -> Any:
        """Run ``work`` with rank 0's driver; every rank returns its result or raises its error."""
        return self._ranks.together(partial(work, cast(RootOfSft, self.driver)))  # called at rank 0

    # -------------------------------------------------------------------- in place of verl's handler

    def bind(self, client: Any) -> None:
        """Redirect verl's handler, and its training client in every batch, to this object."""
        handler = self._handler
        handler.save_checkpoint = self.save
        handler.load_checkpoint = partial(self._load, handler.load_checkpoint)
        handler._load_dataloader_state = partial(self._load_data, handler._load_dataloader_state)
        client.train_batch = partial(self._step, client.train_batch)

    def _load(self, stock: Callable[[], int]) -> int:
        with self.loading():
            return stock()

    def _load_data(self, stock: Callable[[str], None], checkpoint_path: str) -> None:
        """Load the data loader's state, unless its epoch is over."""
        handler = self._handler
        if is_within_an_epoch(handler.resume_global_step, len(handler.train_dataloader)):
            stock(checkpoint_path)

    def _step(self, stock: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        self.poll()
        return stock(*arguments, **keywords)


def install_sft(kind: Trainer, options: Options) -> Trainer:
    """A subclass of verl's SFT trainer with our checkpoints. Raises ``ConfigError``."""
    if not isinstance(kind, type):
        raise ConfigError("this trainer has loaded already: install its class")
    check_settings(options)
    if not all(hasattr(kind, name) for name in ("_build_ckpt_handler", "fit")):
        raise ConfigError(f"this verl's {kind.__name__} builds no checkpoint handler")
    if options.extra_parts is not None:
        raise ConfigError("a checkpoint of the SFT trainer has no extra_parts")
    subclass = subclass_of(
        kind,
        _build_ckpt_handler=partialmethod(_build_handler, kind, options),
        fit=partialmethod(_fit, kind),
    )
    return cast(Trainer, subclass)


def _build_handler(trainer: Any, kind: Any, options: Options) -> None:
    kind._build_ckpt_handler(trainer)
    trainer.checkpoints = SftCheckpoints(trainer, options)
    trainer.checkpoints.bind(trainer.training_client)


def _fit(trainer: Any, kind: Any) -> Any:
    """Run verl's ``fit``; at its end nothing is in flight any more."""
    try:
        result = kind.fit(trainer)
    except BaseException:
        trainer.checkpoints.abandon()
        raise
    trainer.checkpoints.close()
    return result


def main() -> None:
    """Run verl's ``main`` with these checkpoints. Raises ``ConfigError`` if verl is not installed."""
    module = of_verl("verl.trainer.sft_trainer")
    module.SFTTrainer = install_sft(module.SFTTrainer, Options())
    module.main()


if __name__ == "__main__":
    main()
