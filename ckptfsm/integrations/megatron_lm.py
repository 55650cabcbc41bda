"""Megatron-LM's checkpoints, owned by managers instead of by ``iter_finalize_fn``.

``save_checkpoint`` still collects model, optimizer, RNG and arguments. A ``CheckpointManager``, one
for each directory, then saves the state that ``dist_checkpointing.save`` would receive. It writes the
tracker and deletes. Of the closures only those run that report to people, once the checkpoint is
tracked. Every method is collective.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import ckptfsm.megatron  # noqa: F401 first, to report a missing or old package

# isort: split
import megatron.core
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

from ckptfsm.adapters.notices import say, warn_caller
from ckptfsm.adapters.versions import TRIED
from ckptfsm.core.config import CheckpointConfig, Settings, config_of
from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import CkptFsmError, ConfigError, DamagedRoot, RecoveryWarning, describe
from ckptfsm.core.layout import MEGATRON
from ckptfsm.core.parts import OptionalPart
from ckptfsm.core.retention import EveryNSteps, KeepAll, LatestN, Policy
from ckptfsm.dcp.checkpoint_manager import CheckpointManager
from ckptfsm.disk.durable import lookup
from ckptfsm.disk.inspection import check_digests, check_sizes, read_manifest
from ckptfsm.integrations.queue import AsyncCallsQueue
from ckptfsm.integrations.replaced import Replaced
from ckptfsm.megatron.compat import cpu_devices
from ckptfsm.megatron.foreign import ready_part
from ckptfsm.megatron.states import refuse_newer, storage_at
from ckptfsm.ranks.handle import SaveHandle
from ckptfsm.ranks.participant import Hook
from ckptfsm.writers.plain_files import FileTree

if TYPE_CHECKING:
    from typing_extensions import Unpack

log = logging.getLogger("ckptfsm")
CONTENT_METADATA = "content_metadata"  # where Megatron's loader looks for it in the common state
REPORTS = frozenset({"onelogger_finalize_fn", "wandb_finalize_fn"})
Closure = Callable[[], None]
StateDict = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


def retain(save_retain_interval: int | None) -> Policy:
    """The policy of ``--save-retain-interval``: the last checkpoint and every multiple, or all
    without one.
    """
    if save_retain_interval is None:
        return KeepAll()
    return LatestN(1) | EveryNSteps(save_retain_interval)


@dataclass(slots=True)
class _Pending:
    """A save in flight, and the reports of this rank to run once it is tracked."""

    handle: SaveHandle
    reports: tuple[Closure, ...]


class MegatronLMCheckpoints:
    """The checkpoints below ``save_dir``, in Megatron-LM's layout, with its calls.

    ``save_retain_interval`` is Megatron-LM's. ``config`` or keyword arguments are those of
    ``CheckpointManager``, without ``layout``, and without ``retention`` beside an interval. ``hooks``
    are those of the manager of ``save_dir``.

    The root is opened at ``open`` or the first save; after ``terminate`` the next save opens it
    again. Call ``resumed`` after a load.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        *,
        save_retain_interval: int | None = None,
        hooks: Sequence[Hook] = (),
        config: CheckpointConfig | Mapping[str, Any] | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        self.save_dir = str(Path(save_dir).absolute())
        self._hooks = tuple(hooks)
        base = config_of(config, settings)
        own = "retention" in base.model_fields_set
        if "layout" in base.model_fields_set or (own and save_retain_interval is not None):
            raise ConfigError(
                "give retention or save_retain_interval, not both; the layout is Megatron's"
            )
        if base.saves_again:
            raise ConfigError("Megatron-LM decides when it saves: on_failure is 'raise' or 'warn'")
        policy = base.retention if own else retain(save_retain_interval)
        self._config = base.model_copy(update={"retention": policy})
        self._managers: dict[str, CheckpointManager] = {}
        forked = self._config.model_copy(update={"engine": "fork"})  # requests need the trainer
        self._queue = AsyncCallsQueue(config=forked)
        self._pending: list[_Pending] = []
        self._own: set[tuple[str, int]] = set()  # roots and iterations written by this run
        self._attached: list[torch.optim.Optimizer] = []

    def open(
        self, directory: str | os.PathLike[str] | None = None, *, non_persistent: bool = False
    ) -> CheckpointManager:
        """The manager of ``directory``, by default ``save_dir``; opens the root if needed.

        Call it before you load. With ``non_persistent``, only the last checkpoint is kept. Raises
        the errors of ``CheckpointManager``.
        """
        root = self._root_of(directory)
        if root not in self._managers:
            config, hooks = self._config, self._hooks
            if non_persistent:  # hooks, jobs and copies would mix two roots
                alone = {"on_tracked": (), "copies": (), "fetch_from": None}
                config, hooks = config.model_copy(update={"retention": LatestN(1), **alone}), ()
            manager = CheckpointManager(root, config, hooks=hooks)
            self._managers[root] = manager
            if self._attached:
                self._managers[root].expect_gate()
        return self._managers[root]

    def attach(self, optimizer: Any) -> None:
        """Call ``before_update`` before each step of an optimizer of megatron-core (local).

        Has an effect on state in host memory: the writer may read it until the next step. A second
        call with the same optimizer does nothing.
        """
        for each in torch_optimizers(optimizer):
            if not any(each is known for known in self._attached):
                each.register_step_pre_hook(self._before_step)
                self._attached.append(each)
        if self._attached:
            for manager in self._managers.values():
                manager.expect_gate()

    def before_update(self) -> None:
        """Wait until the saves in flight have read this rank's state (local)."""
        for manager in self._managers.values():
            manager.before_update()

    def _before_step(self, *_: Any) -> None:
        self.before_update()

    def _root_of(self, directory: str | os.PathLike[str] | None) -> str:
        return self.save_dir if directory is None else str(Path(directory).absolute())

    def resumed(self, iteration: int) -> None:
        """Tell which iteration of ``save_dir`` this run resumed from: it is not saved again."""
        self._own.add((self.save_dir, iteration))

    def warn_of_later(self, iteration: int) -> None:
        """Warn of a later checkpoint in ``save_dir``: saves up to that are refused."""
        latest = self.open().latest_step()
        if latest is not None and iteration < latest:
            warn_caller(
                RecoveryWarning(
                    f"this run begins from iteration {iteration}, but {self.save_dir} has {latest}: "
                    f"saves up to it will be refused. Go back with open().rollback({iteration}), "
                    "resume from it, or save elsewhere"
                )
            )

    def save(
        self,
        iteration: int,
        state_dict: StateDict,
        *,
        directory: str | os.PathLike[str] | None = None,
        content_metadata: Mapping[str, Any] | None = None,
        parts: Mapping[str, Any] | None = None,
        reports: Sequence[Closure] = (),
    ) -> SaveHandle:
        """Begin the checkpoint ``iter_<iteration>`` of a sharded state dict.

        ``state_dict`` may be a function that returns it.
        ``content_metadata`` is stored as ``dist_checkpointing.save`` does. ``parts`` are further
        parts beside the state, as in ``CheckpointManager.save``. ``reports`` run on this rank once
        the checkpoint is tracked; their exceptions are logged. An iteration that this run has saved
        or resumed from is skipped. Raises the errors of ``CheckpointManager.save``.
        """
        root = self._root_of(directory)
        if (root, iteration) in self._own and iteration in self.open(root).all_steps():
            said = f"step {iteration}: not saved again, it is saved already"
            say(log.warning, "step_saved_already", said, step=iteration)
            return SaveHandle(iteration)
        state = partial(with_metadata, state_dict, content_metadata)
        return self._begin(root, iteration, {**(parts or {}), "state": state}, reports)

    def schedule_async_save(self, async_request: Any, iteration: int | None = None) -> None:
        """Take a ready AsyncRequest for ``<save_dir>/iter_<iteration>``, and save it in place.

        ``async_request`` may be a function that makes the request. The request must have no
        closures that write the tracker or delete.
        Without ``iteration`` the request is only supervised, see ``AsyncCallsQueue``: nothing is
        tracked.
        """
        if iteration is None:
            self._queue.schedule_async_request(async_request)
        else:
            self._begin(self.save_dir, iteration, {"state": ready_part(async_request)}, ())

    def _begin(
        self, root: str, iteration: int, parts: Mapping[str, Any], reports: Sequence[Closure]
    ) -> SaveHandle:
        manager = self.open(root)
        with manager.undisturbed():  # a signal cannot lose a save that was begun
            handle = manager.save(iteration, parts=parts)
            self._pending.append(_Pending(handle, tuple(reports)))
            self._own.add((root, iteration))
        return handle

    def maybe_finalize_async_save(self, blocking: bool = False, terminate: bool = False) -> None:
        """Drive the saves in flight; call at every iteration.

        ``blocking`` waits until they are tracked. ``terminate`` gives the roots back, also after a
        failure. Raises the error of a failed save, on every rank.
        """
        try:
            self._drive(blocking)
        except CkptFsmError:  # on every rank
            if terminate:
                self._terminate()
            raise
        else:
            if terminate:
                self._terminate()
        finally:
            self._report()

    def _drive(self, blocking: bool) -> None:
        self._queue.maybe_finalize_async_calls(blocking=blocking)
        for manager in self._managers.values():
            if blocking:
                manager.wait_until_finished()
            else:
                manager.poll()

    def is_empty_async_queue(self) -> bool:
        """True if nothing is in flight; the same on all ranks (local)."""
        busy = any(not p.handle.done for p in self._pending)
        return not busy and self._queue.get_num_unfinalized_calls() == 0

    def abort(self) -> None:
        """Leave without the other ranks: a bounded wait for the writers, then they are killed.

        Recovery decides at the next ``open``.
        """
        self._queue.close(abort=True)
        while self._managers:
            self._managers.popitem()[1].abandon()
        self._pending = []

    def _terminate(self) -> None:
        """Close everything, even if closing one of them raises."""
        with contextlib.ExitStack() as ends:
            while self._managers:
                ends.callback(self._managers.popitem()[1].close)
            ends.callback(self._queue.close)  # the first

    def _report(self) -> None:
        over = [p for p in self._pending if p.handle.done]
        self._pending = [p for p in self._pending if not p.handle.done]
        for pending in over:
            if pending.handle.skipped or pending.handle.exception() is not None:
                continue
            for report in pending.reports:
                try:
                    report()
                except Exception:  # only a report for people; the checkpoint is tracked
                    step = pending.handle.step
                    said = f"step {step}: a report of a tracked checkpoint failed"
                    say(log.exception, "report_failed", said, step=step)


def torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers in an optimizer of megatron-core, which may chain and wrap them."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    chained = getattr(optimizer, "chained_optimizers", None) or ()
    inner = (*chained, getattr(optimizer, "optimizer", None))
    return [found for each in inner if each is not None for found in torch_optimizers(each)]


def with_metadata(
    state_dict: StateDict, content_metadata: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The state with the content metadata, as ``dist_checkpointing.save`` stores it."""
    state = dict(state_dict() if callable(state_dict) else state_dict)
    if content_metadata is not None:
        state[CONTENT_METADATA] = dict(content_metadata)
    return state


# ------------------------------------------------------------------------- under megatron.training


@dataclass(slots=True)
class CapturedSave:
    """The arguments of ``dist_checkpointing.save``, in the guise of the request that it returns."""

    state_dict: dict[str, Any]
    content_metadata: Mapping[str, Any] | None
    finalize_fns: list[Closure] = field(default_factory=list)

    def add_finalize_fn(self, closure: Closure) -> None:
        self.finalize_fns.append(closure)


class _CollectsAt(Protocol):
    """``directory`` is the step's while a stock ``save_checkpoint`` collects the state, else ""."""

    directory: str


class CapturingSaves:
    """Replaces the module ``dist_checkpointing`` inside a stock module ``checkpointing``."""

    def __init__(self, module: Any, saves: _CollectsAt) -> None:
        self._module = module
        self._saves = saves

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def save(
        self,
        sharded_state_dict: dict[str, Any],
        checkpoint_dir: str,
        sharded_strategy: Any = None,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        if str(checkpoint_dir) != self._saves.directory:
            given = (sharded_state_dict, checkpoint_dir, sharded_strategy, *arguments)
            return self._module.save(*given, **options)
        if hasattr(sharded_strategy, "apply_saving_parallelization"):
            with cpu_devices():
                shards, _ = save_preprocess(sharded_state_dict, validate_access_integrity=False)
                sharded_strategy.apply_saving_parallelization(shards)
        metadata = options.get(CONTENT_METADATA)
        return CapturedSave(sharded_state_dict, metadata)

    def load_common_state_dict(self, checkpoint_dir: str) -> Any:
        """Load the common state, which the trainer loads first; refuse a newer format before."""
        refuse_newer(Path(checkpoint_dir).name, str(checkpoint_dir))
        return self._module.load_common_state_dict(checkpoint_dir)

    def load(self, sharded_state_dict: Any, checkpoint_dir: str, *rest: Any, **options: Any) -> Any:
        """Load; ``--verify-integrity`` is satisfied by our manifest instead of a file of hashes."""
        refuse_newer(Path(checkpoint_dir).name, str(checkpoint_dir))
        if options.get("verify_integrity") and _verified(str(checkpoint_dir)):
            options["verify_integrity"] = False
        return self._module.load(sharded_state_dict, checkpoint_dir, *rest, **options)


def _optimizer_of(arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """The optimizer among the arguments of ``save_checkpoint`` behind the iteration."""
    return arguments[1] if len(arguments) > 1 else keywords.get("optimizer")


class _Patches:
    """The functions that replace those of ``megatron.training`` while it is installed.

    ``directory`` is the step's while stock's ``save_checkpoint`` collects the state, else "".
    """

    def __init__(self, checkpointing: Any, settings: Mapping[str, Any]) -> None:
        self.directory = ""
        self._captured: CapturedSave | None = None
        self._checkpointing = checkpointing
        self._settings = settings
        self._stock_save = checkpointing.save_checkpoint
        self._stock_load = checkpointing.load_checkpoint
        self._stock_ensure = checkpointing.ensure_directory_exists
        self._owner: MegatronLMCheckpoints | None = None

    @property
    def checkpoints(self) -> MegatronLMCheckpoints:
        """The checkpoints, made at first use: Megatron-LM's arguments exist then."""
        if self._owner is None:
            args = self._checkpointing.get_args()
            interval = getattr(args, "save_retain_interval", None)
            self._owner = MegatronLMCheckpoints(
                args.save, save_retain_interval=interval, **self._settings
            )
        return self._owner

    def save_checkpoint(self, iteration: int, *arguments: Any, **keywords: Any) -> None:
        args = self._checkpointing.get_args()
        non_persistent = keywords.get("non_persistent_ckpt", False)
        local = non_persistent and args.non_persistent_ckpt_type == "local"
        if keywords.get("release") or local:
            self._stock_save(iteration, *arguments, **keywords)
            return
        if not args.use_dist_ckpt or args.ckpt_format != "torch_dist":
            raise ConfigError("only ckpt_format torch_dist is saved here: uninstall, or choose it")
        if getattr(args, "dataloader_save", None) == args.save:
            raise ConfigError("--dataloader-save must be another directory than --save")
        root = _non_persistent_dir(args) if non_persistent else args.save
        manager = self.checkpoints.open(root, non_persistent=non_persistent)
        self.checkpoints.attach(_optimizer_of(arguments, keywords))
        stock = partial(self._stock_save, iteration, *arguments, **keywords)
        reports: list[Closure] = []
        collect = partial(self._collect, root, iteration, stock, reports)
        handle = self.checkpoints.save(
            iteration, collect, directory=root, parts=self._tokenizer(), reports=reports
        )
        if args.async_save:
            return
        if manager.config.on_failure == "warn":
            manager.wait_for(handle)
        goes_on = not handle.skipped and handle.blocked_by is None
        self.checkpoints.maybe_finalize_async_save(blocking=goes_on)

    def _collect(
        self, root: str, iteration: int, stock: Callable[[], Any], reports: list[Closure]
    ) -> dict[str, Any]:
        """The state as stock collects it; adds the closures for people to ``reports``."""
        args = self._checkpointing.get_args()
        self.directory = os.path.join(root, MEGATRON.published_name(iteration))
        asked, args.async_save = args.async_save, True  # a synchronous save would write the tracker
        try:
            stock()
        finally:
            args.async_save = asked  # args are saved with the state
            self.directory = ""
            captured, self._captured = self._captured, None
        if captured is None:
            raise ConfigError("save_checkpoint has not called dist_checkpointing.save: uninstall")
        fns = captured.finalize_fns
        reports += [c for c in fns if getattr(c, "__name__", "") in REPORTS]
        return with_metadata(captured.state_dict, captured.content_metadata)

    def _tokenizer(self) -> dict[str, Any]:
        """The files of the tokenizer, where the closure of the tracker would write them."""
        args = self._checkpointing.get_args()
        write = getattr(self._checkpointing, "save_tokenizer_assets", None)
        if write is None or not getattr(args, "save_tokenizer_assets", False):
            return {}
        if dist.get_rank() != 0:
            return {"tokenizer": None}  # written by another rank

        return {"tokenizer": OptionalPart(FileTree(partial(self._write_tokenizer, write)))}

    def _write_tokenizer(self, write: Callable[..., None], directory: str) -> None:
        """Write the tokenizer. Stock's function makes the directory ``tokenizer`` itself."""
        args = self._checkpointing.get_args()
        write(self._checkpointing.get_tokenizer(), args, str(Path(directory).parent))

    def load_checkpoint(self, *arguments: Any, **keywords: Any) -> Any:
        """Recover, then load: a written save is finished, and a torn tracker mended."""
        args = self._checkpointing.get_args()
        if not getattr(args, "save", None):
            return self._stock_load(*arguments, **keywords)
        self.checkpoints.open()
        loaded = self._stock_load(*arguments, **keywords)
        source = getattr(args, keywords.get("load_arg", "load"), None)
        if source and os.path.realpath(source) == os.path.realpath(args.save):
            self.checkpoints.resumed(loaded[0])
        self.checkpoints.warn_of_later(loaded[0])
        return loaded

    def ensure_directory_exists(self, filename: str, check_parent: bool = True) -> None:
        """Skip making the step's directory: it appears when it is complete, not before."""
        if check_parent or str(filename) != self.directory:
            self._stock_ensure(filename, check_parent)

    def cleanup_old_non_persistent_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        """Nothing: retention removes it, once the newer one is tracked."""

    def schedule_async_save(self, async_request: Any) -> None:
        if isinstance(async_request, CapturedSave):
            self._captured = async_request
        elif self.directory:  # its closures may be the checkpoint's, the tracker's too
            raise ConfigError("a request beside the checkpoint's own is not saved here: uninstall")
        else:
            self.checkpoints.schedule_async_save(async_request)

    def maybe_finalize_async_save(self, blocking: bool = False, terminate: bool = False) -> None:
        if self._owner is not None:
            self._owner.maybe_finalize_async_save(blocking, terminate)

    def is_empty_async_queue(self) -> bool:
        return self._owner is None or self._owner.is_empty_async_queue()

    def init_persistent_async_worker(self, *arguments: Any, **keywords: Any) -> None:
        """Nothing: the manager starts the writers."""

    def reset_persistent_async_worker(self, *arguments: Any, **keywords: Any) -> None:
        if self._owner is not None:
            self._owner.abort()


_IN_CHECKPOINTING = (
    "save_checkpoint",
    "load_checkpoint",
    "ensure_directory_exists",
    "cleanup_old_non_persistent_checkpoint",
)
_IN_ASYNC_UTILS = (
    "schedule_async_save",
    "maybe_finalize_async_save",
    "is_empty_async_queue",
    "init_persistent_async_worker",
    "reset_persistent_async_worker",
)
_SINCE_0_15 = frozenset({"reset_persistent_async_worker"})


class InstalledTraining:
    """The changes of ``install``. ``checkpoints`` exists once Megatron-LM is initialized."""

    def __init__(self, package: str, settings: Mapping[str, Any]) -> None:
        self._replaced = Replaced()
        checkpointing, async_utils, _ = map(
            partial(_trainers, package), ("checkpointing", "async_utils", "training")
        )
        _require(checkpointing, (*_IN_CHECKPOINTING, "dist_checkpointing", "get_args"))
        _require(async_utils, _IN_ASYNC_UTILS)
        if isinstance(getattr(async_utils, "_async_calls_queue", None), AsyncCallsQueue):
            raise ConfigError(
                f"{async_utils.__name__} holds a queue of ckptfsm, which this drop-in replaces: "
                "uninstall that one first"
            )
        stock = checkpointing.dist_checkpointing
        self._patches = _Patches(checkpointing, settings)
        for module, names in ((checkpointing, _IN_CHECKPOINTING), (async_utils, _IN_ASYNC_UTILS)):
            for name in names:
                if hasattr(module, name):
                    ours = getattr(self._patches, name)
                    self._replaced.put_everywhere(module.__name__, name, ours)
        self._replaced.put(
            checkpointing, "dist_checkpointing", CapturingSaves(stock, self._patches)
        )

    @property
    def checkpoints(self) -> MegatronLMCheckpoints:
        return self._patches.checkpoints

    def uninstall(self) -> None:
        """Undo the changes. Raises ``ConfigError`` while a save is in flight."""
        if not self._patches.is_empty_async_queue():
            raise ConfigError("a save is in flight: maybe_finalize_async_save(blocking=True) first")
        self._patches.maybe_finalize_async_save(blocking=True, terminate=True)
        self._replaced.give_back()

    def __enter__(self) -> InstalledTraining:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._patches.maybe_finalize_async_save(blocking=True, terminate=True)
        finally:
            self._patches.reset_persistent_async_worker()  # close what is still open
            self._replaced.give_back()


def install(package: str = "megatron.training", **settings: Any) -> InstalledTraining:
    """Let Megatron-LM save through this library. Call it before ``pretrain``.

    ``settings`` are those of ``MegatronLMCheckpoints``; ``save_dir`` and ``save_retain_interval``
    come from Megatron-LM's arguments. Use it as a context manager, or undo it by ``uninstall()``.
    """
    return InstalledTraining(package, settings)


def _trainers(package: str, name: str) -> Any:
    """A module of Megatron-LM's trainer. Raises ``ConfigError``."""
    try:
        return import_module(f"{package}.{name}")
    except ImportError as error:
        raise ConfigError(
            f"{package}.{name} cannot be imported beside megatron-core {_core()}: {describe(error)}. It "
            "is in the megatron-core package since 0.17, and in a clone of Megatron-LM, which must be "
            "on PYTHONPATH"
        ) from error


def _require(module: Any, names: Sequence[str]) -> None:
    """Refuse a trainer that lacks the functions of the tested versions."""
    missing = [n for n in names if not hasattr(module, n) and n not in _SINCE_0_15]
    if missing:
        raise ConfigError(
            f"{module.__name__} of megatron-core {_core()} has no {', '.join(missing)}, which install() "
            f"replaces or calls. Tried were {', '.join(TRIED['megatron-core'])}: use the trainer of one "
            "of them, or leave install() out and save with MegatronLMCheckpoints"
        )


def _core() -> str:
    return str(getattr(megatron.core, "__version__", "of an unknown version"))


def _verified(directory: str) -> bool:
    """Verify a checkpoint of this library (collective). Raises ``DamagedRoot``.

    False if it has a file of hashes for stock to verify, or no manifest.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    place = Path(directory).absolute()
    found: list[Any] = [_listed(place) if rank == 0 else None]
    dist.broadcast_object_list(found, src=0)
    files, problem = found[0]
    problem = problem or _damage(place, (files or ())[rank::world_size])
    problems: list[str] = [""] * world_size
    dist.all_gather_object(problems, problem)
    for problem in filter(None, problems):
        raise DamagedRoot(
            f"{directory} is damaged: {problem}. Resume from an older one: open().rollback(iteration)",
            file=directory,
        )
    return files is not None


def _listed(place: Path) -> tuple[Sequence[FileEntry] | None, str]:
    """The files in a checkpoint's manifest, or None if there is nothing to verify; and its fault."""
    try:
        with storage_at(place.parent) as storage:
            if lookup(storage, f"{place.name}/integrity.json") is not None:
                return None, ""
            manifest = read_manifest(storage, place.name)
    except (CkptFsmError, OSError) as error:  # the other ranks wait
        return None, describe(error)
    return (None if manifest is None else manifest.files), ""


def _damage(place: Path, files: Sequence[FileEntry]) -> str:
    name = place.name
    try:
        with storage_at(place.parent) as storage:
            return check_sizes(storage, name, files) or check_digests(storage, name, files)
    except (CkptFsmError, OSError) as error:  # the other ranks wait
        return describe(error)


def _non_persistent_dir(args: Any) -> str:
    """The directory of non-persistent checkpoints, as ``save_checkpoint`` finds it."""
    return str(args.non_persistent_global_ckpt_dir or os.path.join(args.save, "non_persistent"))
