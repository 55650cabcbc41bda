"""A trainer in verl's driver with our checkpoints, made from a released trainer by ``install``.

A save is one checkpoint of all roles and of ``data.pt``. A synchronous save is an asynchronous one and
a wait; ``async_save`` of the actor decides, as in verl. A function that is called in every step of the
loop polls. A restart loads only a verified checkpoint, the one that the tracker names.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

from ckptfsm.adapters.notices import say, warn_caller
from ckptfsm.adapters.versions import installed, judge, missing
from ckptfsm.core.config import Verify
from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.errors import (
    ConfigError,
    DamagedRoot,
    PollMissingWarning,
    RankFailed,
    RankInterrupted,
    describe,
)
from ckptfsm.core.events import Event, Failed
from ckptfsm.core.jobs import Copy
from ckptfsm.core.layout import PRIVATE, TRACKER, TRACKER_BYTES, VERL, parse_tracker
from ckptfsm.core.parts import AttemptId
from ckptfsm.core.retention import KeepAll, LatestN, Policy
from ckptfsm.integrations.workers import Calls, RayCalls, WorkerCalls
from ckptfsm.ranks.controller import Controller, controller_config
from ckptfsm.ranks.participant import Hook
from ckptfsm.ranks.tickets import GroupPart, GroupSave, Ticket
from ckptfsm.writers.plain_files import FileTree

log = logging.getLogger("ckptfsm")
Trainer = TypeVar("Trainer")
_KNOWN = frozenset({"verl.trainer.ppo.ray_trainer", "verl.trainer.ppo.v1.trainer_base"})
_EVERY_STEP = "_start_profiling"  # called at every step of the loops of all released trainers
_COPIES_DRAIN_S = 3600.0  # verl itself copies while the save is called
_RAY_HANDLES = "ray.actor"  # where ``ray.remote`` subclasses the class, which is no trainer
_WORKER_SETTINGS = (
    "writer_files",
    "engine",
    "writer_nice",
    "read_twice",
    "common_state",
    "ranks_disagree",
    "effect_timeout_s",
    "exchange_timeout_s",
)
_WHEN = "verl decides when it saves, see its trainer.save_freq"
_OF_NOBODY: Mapping[str, str] = MappingProxyType(
    {
        "save_interval_steps": _WHEN,
        "save_steps": _WHEN,
        "save_interval_s": _WHEN,
        "preemption_signals": _WHEN,
        "end_of_allocation": _WHEN,
        "agree_when_idle": _WHEN,
        "exchange_every": _WHEN,
        "progress": "the workers write, and their driver does not see the bytes",
        "reshard_drops": "verl's own code loads, and leaves nothing out",
    }
)
"""Settings without effect under verl, and why."""


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of ``install``. ``settings`` and ``hooks`` are the controller's."""

    extra_parts: Callable[[Any], Mapping[str, Any]] | None = None
    calls: Calls = field(default_factory=RayCalls)
    settings: Mapping[str, Any] = field(default_factory=dict)
    hooks: Sequence[Hook] = ()


class Checkpoints:
    """The checkpoints of one verl trainer. The root is opened at first use: workers exist then."""

    def __init__(self, trainer: Any, options: Options) -> None:
        self._trainer = trainer
        self._options = options
        self._groups: dict[str, Any] = {}  # verl's worker groups, by role
        self._workers: WorkerCalls | None = None
        self._controller: Controller | None = None
        self._said = False
        self._ended = False
        self._to_tell: list[int] = []  # tracked steps that verl's callback still has to hear of

    @property
    def controller(self) -> Controller:
        """The controller that owns ``default_local_dir``."""
        if self._controller is None:
            self._open()
        assert self._controller is not None
        return self._controller

    @property
    def groups(self) -> dict[str, Any]:
        """verl's worker groups, by role."""
        if self._controller is None:
            self._open()
        return self._groups

    def _open(self) -> None:
        """Take the root, then put our manager into every worker."""
        trainer, options = self._trainer, self._options
        self._groups = self._make_groups()
        workers = {role: group.workers for role, group in self._groups.items()}
        self._workers = WorkerCalls(workers, self._calls())
        copies = copies_of(trainer.config, options.settings.get("copies", ()))
        settings = {
            "retention": self._policy(),
            "poll_warning_steps": 1,
            **({"jobs_drain_s": _COPIES_DRAIN_S} if copies else {}),
            **options.settings,
            "copies": copies,
            "layout": VERL.name,
        }
        root, sizes = root_of(trainer), self._workers.sizes
        hooks = [self._note, *options.hooks]
        try:
            controller = self._make_controller(root, sizes, hooks=hooks, **settings)
        except DamagedRoot as error:
            _refuse_stock_fsdp(root, error)
            raise
        try:
            theirs = {k: settings[k] for k in _WORKER_SETTINGS if k in settings}
            attaching = {role: (attach, role, root, theirs) for role in self._groups}
            self._workers.call_all(attaching, controller.config.effect_timeout_s)
        except BaseException:  # a Ctrl-C too: the root must be given back
            controller.abandon()
            raise
        self._controller = controller

    def _make_controller(self, root: str, sizes: Mapping[str, int], **settings: Any) -> Controller:
        return Controller(root, sizes, self._ask, **settings)

    @property
    def _has_critic(self) -> bool:
        return bool(getattr(self._trainer, "use_critic", False))

    def _make_groups(self) -> dict[str, Any]:
        """verl's worker groups, by the directory of their role."""
        critic = {"critic": self._trainer.critic_wg} if self._has_critic else {}
        return {"actor": self._trainer.actor_rollout_wg, **critic}

    def _calls(self) -> Calls:
        return self._options.calls

    def _policy(self) -> Policy:
        """The retention policy from verl's configuration; ``install`` may set another one."""
        return retention_of(self._trainer.config, critic=self._has_critic)

    def _is_async(self) -> bool:
        actor = self._trainer.config.actor_rollout_ref.actor
        return bool(actor.get("checkpoint", {}).get("async_save", False))

    def _ask(self, doomed: tuple[AttemptId, ...]) -> list[Event]:
        assert self._workers is not None
        questions = {role: (poll, role, doomed) for role in self._groups}
        return list(self._workers.poll(questions, 0.0, self.controller.lost))

    # ------------------------------------------------------------------------------------- saving

    def save(self) -> None:
        """Begin a checkpoint of the trainer's step; without ``async_save`` wait until it is tracked.

        Raises ``SaveFailed``, ``SaveRefused``, ``DeadlineExceeded``, and errors of verl's callback.
        """
        self.save_step(int(self._trainer.global_steps))

    def save_step(self, step: int) -> None:
        """Begin a checkpoint of ``step``, see ``save``."""
        parts = self._parts()
        begun: GroupSave | None = None
        try:
            begun = self.controller.begin(step, parts)
            for role, ticket in begun.tickets.items():
                if not self._write(role, ticket):
                    break
        except BaseException as error:  # a Ctrl-C too: the tickets are lost with it
            if begun is not None:
                self.controller.give_up(step, f"not every worker was called: {describe(error)}")
            raise
        if not self._is_async():
            self.controller.wait_for(begun.handle)
        self._tell()

    def _write(self, role: str, ticket: Ticket) -> bool:
        """Let a role's workers write; its ticket travels in place of ``hdfs_path``."""
        try:
            self.groups[role].save_checkpoint(
                ticket.directory, ticket, ticket.of.step, max_ckpt_to_keep=None
            )
        except (RankFailed, RankInterrupted):  # without a driver: all ranks leave
            raise
        except Exception as error:  # a dead worker, or a group that fell apart: the save failed
            why = f"the workers of {role!r}: {describe(error)}"
            said = f"step {ticket.of.step}: a save failed: {why}"
            say(log.exception, "workers_failed", said, step=ticket.of.step, role=role)
            self.controller.feed([Failed(ticket.of, "fork_failed", why, ticket.first_rank)])
            return False
        return True

    def _parts(self) -> dict[str, Any]:
        trainer, extra = self._trainer, self._options.extra_parts
        parts = self._group_parts()
        parts["data.pt"] = _dumped(trainer.train_dataloader.state_dict())
        parts.update(_transfer_queue(trainer))
        if extra is not None:
            parts.update(extra(trainer))
        return parts

    def _group_parts(self, directory: str | None = None) -> dict[str, Any]:
        """The parts that workers write; ``directory`` if it is not that of the role's name."""
        return {role: GroupPart(role, directory=directory) for role in self.groups}

    def poll(self, *, wait: bool = False) -> None:
        """Drive the saves in flight. Raises the error of a failed one under ``on_failure="raise"``."""
        controller = self.controller
        if wait:
            controller.wait_until_finished()
        else:
            controller.poll()
        self._tell()

    def _note(self, record: TransitionRecord) -> None:
        """The hook that notes a tracked step."""
        if record.acknowledges and record.step not in self._to_tell:
            self._to_tell.append(record.step)

    def _tell(self) -> None:
        """Call verl's ``checkpoint_callback`` (0.9.1) outside of the hook: its errors are raised."""
        trainer = self._trainer
        callback = getattr(trainer, "checkpoint_callback", None)
        while self._to_tell:
            step = self._to_tell.pop(0)
            if callback is not None and step in self.controller.all_steps():
                root = Path(trainer.config.trainer.default_local_dir)
                callback.on_save(
                    trainer=trainer,
                    global_step=step,
                    checkpoint_dir=str(root / VERL.published_name(step)),
                    async_save=False,  # the step is durable
                )

    # ------------------------------------------------------------------------------------- loading

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Verify and keep the latest checkpoint while verl loads, and make verl's tracker name it.

        Raises ``DamagedRoot``, and ``ConfigError`` if the load would end in refused saves.
        """
        with self.keeping(self.step_to_load()):
            yield

    def step_to_load(self) -> int | None:
        """The step of the root that verl is to load; None for the latest. Raises ``ConfigError``."""
        config, controller = self._trainer.config.trainer, self.controller
        latest = controller.latest_step()
        if config.resume_mode == "disable" and latest is not None:
            raise ConfigError(
                f"resume_mode=disable, but {config.default_local_dir} has step {latest}: give another "
                "directory, or resume",
                step=latest,
            )
        self._say_what_stays()
        asked, ours = _asked_step(config, self._path_counts(config))
        if asked is not None and latest is not None and asked < latest:
            back = f"go back with controller.rollback({asked}), or " if ours else ""
            raise ConfigError(
                f"resume_from_path is step {asked}, but {config.default_local_dir} has step {latest}: "
                f"{back}give another directory",
                step=latest,
            )
        return asked if ours else None

    @contextlib.contextmanager
    def keeping(self, step: int | None, verify: Verify | None = None) -> Iterator[None]:
        """Verify and keep ``step``, or the latest, while verl loads. See ``Controller.reading``."""
        config = self._trainer.config.trainer
        with self.controller.reading(step, verify=verify) as found, _no_remote(config):
            if found is not None:
                _require_tracker(Path(found.directory).parent, found.step)
            yield

    def _path_counts(self, config: Any) -> bool:
        """True if verl loads ``resume_from_path``."""
        return bool(config.resume_mode == "resume_path")

    def _say_what_stays(self) -> None:
        """Warn once that verl's workers never delete a loaded checkpoint."""
        if self._trainer.config.trainer.get("del_local_ckpt_after_load", False) and not self._said:
            self._said = True
            warn_caller(
                UserWarning(
                    "del_local_ckpt_after_load has no effect: what is in default_local_dir is deleted "
                    "by retention only"
                )
            )

    # ------------------------------------------------------------------------------------- the end

    def close(self) -> None:
        """Wait for saves and copies, and give the root back: also after an error, which is raised."""
        if self._controller is None or self._ended:
            return
        try:
            self.finish()
            self._controller.close()
        except BaseException:
            self.abandon()
            raise

    def finish(self) -> None:
        """Wait for the saves in flight, but not for their copies."""
        self.controller.wait_until_finished(self.controller.config.close_timeout_s)
        self._tell()

    def abandon(self) -> None:
        """Give the root back at once; the next start decides about saves, and goes on with copies."""
        self._ended = True  # a later close does nothing
        if self._controller is not None:
            self._controller.abandon()

    # --------------------------------------------------------------------- in place of the trainer's

    def bind(self) -> None:
        """Redirect the trainer's loop to this object. The trainer stays an object of verl's class."""
        trainer = self._trainer
        trainer.checkpoints = self
        trainer._save_checkpoint = self.save
        for name, ours in (("_load_checkpoint", self._load), (_EVERY_STEP, self._step)):
            if hasattr(trainer, name):
                setattr(trainer, name, partial(ours, getattr(trainer, name)))
        if hasattr(trainer, "fit"):
            trainer.fit = partial(self._fit, trainer.fit)

    def _load(self, stock: Callable[[], Any]) -> Any:
        with self.loading():
            return stock()

    def _step(self, stock: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Poll, then run the stock function, which every loop calls in every step."""
        self.poll()
        return stock(*arguments, **keywords)

    def _fit(self, stock: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Run verl's ``fit``; at its end nothing is in flight any more."""
        try:
            result = stock(*arguments, **keywords)
        except BaseException:
            self.abandon()
            raise
        if inspect.isawaitable(result):
            return self._fit_to_the_end(result)
        self.close()
        return result

    async def _fit_to_the_end(self, running: Awaitable[Any]) -> Any:
        try:
            result = await running
        except BaseException:
            self.abandon()
            raise
        self.close()
        return result


@dataclass(frozen=True, slots=True)
class _New:
    """``__new__`` of a trainer class: its objects get our checkpoints before ``__init__`` runs.

    ``saver`` is the class with the ``_save_checkpoint`` that ours replaces: an object with another
    is refused.
    """

    options: Options
    saver: type | None

    def __call__(self, kind: type, *arguments: Any, **keywords: Any) -> Any:
        own = _saver_of(kind)
        if any(base.__module__ == _RAY_HANDLES for base in kind.__mro__):
            return object.__new__(kind)
        if own is not self.saver:
            raise ConfigError(_own_way(kind, own))
        trainer: Any = object.__new__(kind)
        Checkpoints(trainer, self.options).bind()
        return trainer


def install_ppo(trainer: Trainer, options: Options) -> Trainer:
    """See ``install``, for a trainer that drives groups of workers."""
    base = trainer if isinstance(trainer, type) else type(trainer)
    saver = _saver_of(base)
    if (saver is None or saver.__module__ not in _KNOWN) and options.extra_parts is None:
        raise ConfigError(_own_way(base, saver))
    check_settings(options)
    if not hasattr(base, _EVERY_STEP):
        warn_caller(
            PollMissingWarning(
                f"nothing is known that {base.__name__} calls in every step: call "
                "trainer.checkpoints.poll() there, or no asynchronous save will be tracked in time"
            )
        )
    if isinstance(trainer, type):
        return cast(Trainer, subclass_of(base, __new__=staticmethod(_New(options, saver))))
    Checkpoints(trainer, options).bind()
    return trainer


def subclass_of(base: type, **names: Any) -> type:
    """A subclass of a trainer that looks like it, and has these checkpoints."""
    alike = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    return type(base.__name__, (base,), {**alike, "checkpoints": None, **names})


def check_settings(options: Options) -> None:
    """Check verl and the settings early: when the root is opened, a cluster was set up already."""
    judge("verl", installed("verl"))
    given = {name: value for name, value in options.settings.items() if name != "ports"}
    config = controller_config(None, {"layout": VERL.name, **given})
    for name in given:
        if name in _OF_NOBODY:
            raise ConfigError(f"{name} has no effect here: {_OF_NOBODY[name]}", key=name)
    if config.layout != VERL.name:
        raise ConfigError(f"verl's layout is {VERL.name!r}, not {config.layout!r}")
    if config.on_failure not in ("raise", "warn"):
        raise ConfigError("verl decides when it saves: on_failure is 'raise' or 'warn'")


def of_verl(name: str) -> Any:
    """A module of verl. Raises ``ConfigError``, which names the package to install."""
    try:
        return import_module(name)
    except ImportError as error:
        raise missing("verl", error) from error


def _saver_of(kind: type) -> type | None:
    """The class that defines ``_save_checkpoint`` for the objects of ``kind``."""
    return next((k for k in kind.__mro__ if "_save_checkpoint" in vars(k)), None)


def _own_way(kind: type, saver: type | None) -> str:
    where = saver.__module__ if saver is not None else "nowhere"
    return (
        f"{kind.__name__} saves in its own way ({where}), which ckptfsm does not know: install it "
        "itself, with extra_parts that return what it saves beside its roles and data.pt, if only an "
        "empty dict"
    )


# ------------------------------------------------------------------------- verl's configuration


def root_of(trainer: Any) -> str:
    """The directory of a verl trainer's checkpoints."""
    return str(Path(trainer.config.trainer.default_local_dir).absolute())


def retention_of(config: Any, *, critic: bool) -> Policy:
    """The policy for verl's counts: actor and critic of a step are kept or removed together.

    The larger one of two counts is used; no count (None, or not above 0) keeps all, as in verl.
    """
    trainer = config.trainer
    if trainer.get("remove_previous_ckpt_in_save", False):
        return LatestN(1)
    roles = ("actor", "critic") if critic else ("actor",)
    counts = [trainer.get(f"max_{role}_ckpt_to_keep", None) or 0 for role in roles]
    kept = 0 if min(counts) <= 0 else max(counts)
    if len(set(counts)) > 1:
        warn_caller(
            UserWarning(
                f"max_actor_ckpt_to_keep={counts[0]} and max_critic_ckpt_to_keep={counts[1]} cannot "
                f"both hold for a step with both: keeping {kept or 'all'}"
            )
        )
    return LatestN(kept) if kept else KeepAll()


def copies_of(config: Any, given: Sequence[Copy]) -> tuple[Copy, ...]:
    """The copies that were given, and one in verl's ``default_hdfs_dir``, a URL or a directory.

    verl writes there over an earlier run's step; ours takes the place of its own run's alone.
    """
    copies = tuple(map(Copy.model_validate, given))
    remote = config.trainer.default_hdfs_dir
    if not remote or remote in [copy.to for copy in copies]:
        return copies
    return (*copies, Copy(remote, replaces=True))


def _asked_step(config: Any, counts: bool) -> tuple[int | None, bool]:
    """The step of ``resume_from_path``, if ``counts``, and whether it is in this root."""
    if not counts:
        return None, False
    given = Path(config.resume_from_path)
    path = given.resolve()
    ours = path.parent == Path(config.default_local_dir).resolve()
    return VERL.parse_published(path.name if ours else given.name), ours


@contextlib.contextmanager
def _no_remote(config: Any) -> Iterator[None]:
    """Hide the remote directory while verl loads: with one, it refuses a local checkpoint."""
    remote = config.default_hdfs_dir
    config.default_hdfs_dir = None
    try:
        yield
    finally:
        config.default_hdfs_dir = remote


def _refuse_stock_fsdp(root: str, error: DamagedRoot) -> None:
    """Raise ``DamagedRoot`` with a remedy, if stock verl's FSDP wrote an unadoptable checkpoint."""
    shards = "model_world_size_*_rank_*.pt"
    found = [*Path(root).glob(f"*/{shards}"), *Path(root).glob(f"*/*/{shards}")]
    names = {path.relative_to(root).parts[0] for path in found}
    steps = [VERL.parse_published(name) for name in names if not Path(root, name, PRIVATE).exists()]
    latest = max((step for step in steps if step is not None), default=None)
    if latest is None:
        return
    path = f"{root}/{VERL.published_name(latest)}"
    raise DamagedRoot(
        f"{path} was written by verl with FSDP, without ckptfsm: nothing says whether it is whole, so "
        "it is not resumed from. Give another trainer.default_local_dir, and let verl load this one "
        f"once: trainer.resume_mode=resume_path trainer.resume_from_path={path}",
        step=latest,
        file=path,
    ) from error


def _require_tracker(root: Path, step: int) -> None:
    """Raise ``DamagedRoot`` unless the tracker, which verl follows, names the verified step."""
    with (root / TRACKER).open("rb") as file:
        named = parse_tracker(file.read(TRACKER_BYTES))
    if named != step:
        raise DamagedRoot(f"the tracker names {named!r}, not step {step}", file=TRACKER, step=step)


def _transfer_queue(trainer: Any) -> dict[str, Any]:
    """The queue of prompts in flight that verl's asynchronous modes (0.9) save with a checkpoint."""
    if getattr(trainer, "trainer_mode", "sync") == "sync":
        return {}
    owner = next(k for k in type(trainer).__mro__ if k.__module__ in _KNOWN)
    module = sys.modules[owner.__module__]
    supports = getattr(module, "_tq_supports_checkpoint", None)  # assumed in 0.9.1
    if supports is not None and not supports():
        return {}
    metadata = {"global_steps": trainer.global_steps}
    return {"transfer_queue": FileTree(partial(module.tq.save_checkpoint, metadata=metadata))}


def _dumped(state: Any) -> bytes:
    """The bytes of ``data.pt``, as verl writes it."""
    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


# ----------------------------------------------------------- called in a worker, which has torch


def attach(worker: Any, role: str, root: str, settings: Mapping[str, Any]) -> None:
    """See ``rank_manager.attach``."""
    from ckptfsm.integrations.verl.rank_manager import attach as attach_here

    attach_here(worker, role, root, settings)


def poll(worker: Any, role: str, doomed: tuple[AttemptId, ...]) -> list[Event]:
    """See ``rank_manager.poll``."""
    from ckptfsm.integrations.verl.rank_manager import poll as poll_here

    return poll_here(worker, role, doomed)
