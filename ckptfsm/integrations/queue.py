"""``AsyncCallsQueue``: megatron-core's queue of async saves, with supervised writers.

Any AsyncRequest is taken by its field names: those of megatron-core and of nvidia-resiliency-ext,
also with tensors in shared memory. Each has a forked writer and a private results channel. Alone, the
queue gives supervision, isolation and deadlines. A request carries no step, root or parts, so journal,
receipts, tracker and retention need ``begin``. If a writer fails on one rank, every rank raises an
error, the request is dropped, and its finalizers never run.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from ckptfsm.adapters.fork import Child, fork_child
from ckptfsm.adapters.notices import say, warn_at_end
from ckptfsm.adapters.signals import OneCall, PosixDeferredSignals
from ckptfsm.adapters.versions import installed
from ckptfsm.core.backoff import pauses
from ckptfsm.core.config import CheckpointConfig, Settings, config_of, require_fork
from ckptfsm.core.errors import (
    CkptFsmError,
    ConfigError,
    SaveFailed,
    StepExistsError,
    WriterDied,
    describe,
)
from ckptfsm.core.layout import LAYOUTS
from ckptfsm.core.ports import Outcome, Transport
from ckptfsm.dcp.transport import transport_of
from ckptfsm.integrations.replaced import Replaced
from ckptfsm.megatron.foreign import (
    StagedRequest,
    forget_what_workers_have,
    make_request,
    ready_part,
    stage_request,
    taken_now,
)
from ckptfsm.ranks.handle import SaveHandle
from ckptfsm.writers.rank_writer import missed_deadline

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptfsm.dcp.checkpoint_manager import CheckpointManager

log = logging.getLogger("ckptfsm")
MEGATRON_BASE = "megatron.core.dist_checkpointing.strategies.base"
_TRAINER = ("megatron.training.async_utils", "_async_calls_queue")
_HOLDERS = ((MEGATRON_BASE, "async_calls"), _TRAINER)
_BURY_S = 0.05
Verdict = Literal["running", "failed", "written"]


@dataclass(slots=True)
class _QueuedCall:
    """A scheduled request on this rank. ``child`` is None where there is nothing to write."""

    index: int
    deadline: float
    request: StagedRequest | None = None
    child: Child | None = None
    payload: Any = None
    problem: SaveFailed | None = None

    def look(self) -> Verdict:
        """The state of this rank's writer (local, never blocks)."""
        if self.problem is None and self.child is not None:
            outcome = self.child.poll()
            if outcome is None and time.monotonic() < self.deadline:
                return "running"
            self._judge(outcome)
        if self.problem is None and self.request is not None:
            self.problem = self.request.problem()
        return "written" if self.problem is None else "failed"

    def _judge(self, outcome: Outcome | None) -> None:
        if outcome is None:
            where = self.child.whereabouts() if self.child is not None else ""
            self.problem = SaveFailed(missed_deadline(where), reason="writer_hung")
        elif outcome.succeeded:
            self.payload = outcome.payload
        elif outcome.error is None or outcome.error.kind == WriterDied.kind:
            self.problem = WriterDied(outcome.explain(), reason=WriterDied.kind)
        else:
            self.problem = SaveFailed(outcome.explain(), reason="writer_failed")


@dataclass(slots=True)
class _Filling:
    """A begun checkpoint, while its parts are being scheduled."""

    step: int
    manager: CheckpointManager
    directories: dict[str, str]
    parts: dict[str, Any] = field(default_factory=dict)
    indices: list[int] = field(default_factory=list)


def _fork(call: _QueuedCall, request: Any) -> None:
    """Stage the request of a call and fork its writer."""
    made = make_request(request) if callable(request) else request
    call.request = stage_request(f"call {call.index}", made)
    if call.request.function is not None:
        call.child = fork_child(call.request.run, keep=())
    call.request.let_go()


class AsyncCallsQueue:
    """Replaces ``megatron.core.dist_checkpointing.strategies.async_utils.AsyncCallsQueue``.

    Every method is collective: all ranks call it at the same point, with the same requests.

    - ``persistent`` is accepted and has no effect: each request has a writer that ends with it.
    - ``config`` or keyword arguments are those of ``CheckpointManager``. Alone, the queue uses
      ``writer_timeout_s`` (from schedule to the end of the writer) and ``exchange_timeout_s``.
    - ``manager`` is the manager that ``begin`` saves through; without it the queue opens one at the
      first ``begin``.
    """

    def __init__(
        self,
        persistent: bool = False,
        *,
        manager: CheckpointManager | None = None,
        config: CheckpointConfig | Mapping[str, Any] | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        self.persistent = persistent
        self._one_call = OneCall(PosixDeferredSignals)
        self._process: int | None = None  # owner of the calls: ranks may be forked after this
        self._config = require_fork(config_of(config, settings), "megatron-core's requests")
        self._transport: Transport | None = None
        self._calls: deque[_QueuedCall] = deque()
        self._dying: list[Child] = []
        self._last = -1
        self._finalized: list[int] = []
        self._manager = manager
        self._owned: CheckpointManager | None = None
        self._filling: _Filling | None = None
        self._saves: list[tuple[SaveHandle, list[int]]] = []
        # Kept apart: the warning at the end must hold no other object.
        self._numbers: set[int] = set()  # of the calls

    # ------------------------------------------------------------------------------------ schedule

    def schedule_async_request(self, async_request: Any) -> int:
        """Stage the request's tensors, fork its writer, and return the index of the call.

        After the return, tensors may change. A function is called for its request. Errors on this
        rank are raised on all ranks by ``maybe_finalize_async_calls``. After ``begin``, raises the
        errors of ``CheckpointManager.save``.
        """
        if self._filling is not None:
            self._last += 1
            self._fill(self._filling, async_request)
            return self._last
        with self._one_call.running():
            return self._schedule(async_request)

    def _schedule(self, async_request: Any) -> int:
        self._last += 1
        if self._transport is None:
            self._transport = transport_of(self._config)
        if self._process is None:
            self._process = os.getpid()
            warn_at_end(self, _never_finalized, self._numbers)
        call = _QueuedCall(self._last, time.monotonic() + self._config.writer_timeout_s)
        self._calls.append(call)
        self._numbers.add(call.index)
        try:
            _fork(call, async_request)
        except (KeyboardInterrupt, SystemExit):
            self._drop(self._take_call(last=True))
            raise
        except BaseException as error:  # also torch's; carried to the next exchange of all ranks
            why = describe(error)
            say(log.exception, "fork_failed", f"call {call.index}: {why}", call=call.index)
            call.problem = SaveFailed(why, reason="fork_failed")
        return call.index

    # ------------------------------------------------------------------------------------ finalize

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """Finalize the calls with finished writers on all ranks, in order; return their indices.

        ``blocking`` waits for all of them. ``no_dist`` looks at this rank only, as the stock queue
        does: each rank then finalizes, or raises, alone.

        Raises ``SaveFailed`` (``WriterDied`` if a writer was killed) with ``call`` and ``rank``, on
        every rank. That call is dropped. The next call of this method continues with the later
        ones, and returns the indices that were finalized before the error. Raises ``ConfigError``
        for ``no_dist`` while a begun checkpoint has unreturned indices: all ranks finalize it
        together.
        """
        if self._is_elsewhere():
            raise ConfigError("these calls are another process's, which forked this one")
        if no_dist and self._saves:
            step = self._saves[0][0].step
            raise ConfigError(
                f"step {step} was begun: call without no_dist, on all ranks", step=step
            )
        with self._one_call.running():
            self._bury()
            self._finalize_calls(blocking, no_dist)
        if not no_dist:
            self._drive_checkpoints(blocking)
        finalized, self._finalized = self._finalized, []
        return finalized

    def _finalize_calls(self, blocking: bool, no_dist: bool) -> None:
        while self._calls:
            verdict = self._verdict(self._calls[0], blocking, no_dist)
            if verdict == "running":
                break
            call = self._take_call()
            if verdict == "written":
                self._run_finalizers(call)
            problem = self._shared(call, no_dist)
            if problem is not None:
                self._drop(call)
                raise problem
            self._finalized.append(call.index)

    def _is_elsewhere(self) -> bool:
        """True in a process that was forked by the process with the calls."""
        return self._process not in (None, os.getpid())

    def _take_call(self, *, last: bool = False) -> _QueuedCall:
        call = self._calls.pop() if last else self._calls.popleft()
        self._numbers.discard(call.index)
        return call

    def get_num_unfinalized_calls(self) -> int:
        """The number of scheduled requests that are neither finalized nor dropped (local)."""
        filling = len(self._filling.indices) if self._filling is not None else 0
        return len(self._calls) + filling + sum(len(indices) for _, indices in self._saves)

    def close(self, abort: bool = False) -> None:
        """Finalize everything; with ``abort`` kill the writers instead, which is local.

        Raises the first failure, once everything has ended. The queue can be used again afterwards.
        Does nothing in a process that the trainer's code forks.
        """
        if self._is_elsewhere():
            return
        problem: CkptFsmError | None = None
        try:
            problem = None if abort else self._finish()
        except BaseException:  # a rank is gone, or the manager closed: no finalizer can run
            self.close(abort=True)
            raise
        while self._calls:
            self._drop(self._take_call())
        self._bury(_BURY_S)
        self._filling, self._saves = None, []
        owned, self._owned = self._owned, None
        transport, self._transport = self._transport, None
        try:
            if owned is not None and abort:
                owned.abandon()
            elif owned is not None:
                owned.close()
        finally:
            if transport is not None:
                transport.close()
        if problem is not None:
            raise problem

    def _finish(self) -> CkptFsmError | None:
        """Finalize all requests in flight. Returns the first failure."""
        problem: CkptFsmError | None = None
        try:
            self._refuse_unfinished()
        except ConfigError as error:
            problem, self._filling = error, None
        while self.get_num_unfinalized_calls():
            try:
                self.maybe_finalize_async_calls(blocking=True)
            except SaveFailed as error:
                problem = problem or error
        return problem

    def _verdict(self, call: _QueuedCall, blocking: bool, no_dist: bool) -> Verdict:
        """The state of the writers of all ranks. Bounded by the deadline of each writer.

        An interrupt of one rank is raised there, ``RankInterrupted`` elsewhere; the call stays.
        """
        exchange, during = partial(self._any, no_dist=no_dist), "waited for a writer"
        for pause in pauses():
            seen = call.look()
            flags = [seen == "running", seen == "failed"]
            running, failed = self._one_call.agree(exchange, flags, during)
            if failed:
                return "failed"
            if not running:
                return "written"
            if not blocking:
                break
            time.sleep(pause)
        return "running"

    def _run_finalizers(self, call: _QueuedCall) -> None:
        """Run the finalizers, once (I6). All ranks are here, since finalizers hold collectives."""
        assert call.request is not None
        try:
            call.request.finalize(call.payload)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # torch's CheckpointException is one
            said = f"call {call.index}: its finalizers failed"
            say(log.exception, "finalizers_failed", said, call=call.index)
            call.problem = SaveFailed(f"finalizers: {describe(error)}", reason="finalizers")
            call.problem.__cause__ = error

    def _shared(self, call: _QueuedCall, no_dist: bool) -> SaveFailed | None:
        """The error of a call on any rank, the same on all of them."""
        if not self._any([call.problem is not None], no_dist)[0]:
            return None
        transport = self._transport
        assert transport is not None
        found: tuple[int, SaveFailed | None] = (transport.rank, call.problem)
        if not no_dist:
            everyone = transport.gather(found) or [found]
            found = transport.broadcast(next((f for f in everyone if f[1] is not None), found))
        rank, problem = found
        assert problem is not None
        text = f"async call {call.index} failed on rank {rank}: {problem.message}"
        shared = type(problem)(text, call=call.index, rank=rank, **problem.facts)
        shared.__cause__ = call.problem.__cause__ if call.problem is not None else None
        return shared

    def _any(self, flags: list[bool], no_dist: bool) -> list[bool]:
        assert self._transport is not None, "made when the first request was scheduled"
        return flags if no_dist else self._transport.any_flags(flags)

    def _drop(self, call: _QueuedCall) -> None:
        """End the writer of a call that will not be finalized."""
        if call.child is not None and not call.child.kill(timeout_s=0.0):
            self._dying.append(call.child)

    def _bury(self, timeout_s: float = 0.0) -> None:
        """Reap the writers that were killed."""
        self._dying = [child for child in self._dying if not child.kill(timeout_s)]

    # ------------------------------------------------------------------------- whole checkpoints

    def begin(self, step: int, directory: str, parts: Mapping[str, str] | Iterable[str]) -> None:
        """Declare the next requests as the named parts of one checkpoint, in this order.

        Call it before the step's directory is made: the first call opens the root and judges its
        directories. ``directory`` is ``<root>/iter_0000100`` or ``<root>/global_step_100``.
        ``parts`` are names, or names with the directories inside the step for which the requests
        were made. By default a lone part is at the top, others under their names. The checkpoint is
        saved in place when the last part is scheduled: until then no tensor may change.

        Raises ``ConfigError``, ``StepExistsError``, and the errors of opening the root.
        """
        self._refuse_unfinished()
        named = dict(parts) if isinstance(parts, Mapping) else dict.fromkeys(parts, "")
        if not named:
            raise ConfigError("a checkpoint needs at least one part")
        manager = self._manager_at(step, os.path.normpath(directory))
        latest, busy = manager.latest_step(), manager.step_in_flight()
        if busy is not None and step <= busy:
            raise StepExistsError(f"step {busy} is in flight", step=step, in_flight=busy)
        if latest is not None and step <= latest:
            raise StepExistsError(f"step {latest} is tracked already", step=step, latest=latest)
        self._filling = _Filling(step, manager, named)

    def _manager_at(self, step: int, directory: str) -> CheckpointManager:
        """The manager of the root above ``directory``; opens it if there is none."""
        root, name = os.path.split(directory)
        layouts = [la.name for la in LAYOUTS.values() if la.published_name(step) == name]
        manager = self._manager or self._owned
        config = self._config if manager is None else manager.config
        if config.on_busy == "skip":
            raise ConfigError(
                "on_busy='skip' cannot be: a request that was made has to be written", key="on_busy"
            )
        if not layouts or (manager is not None and config.layout not in layouts):
            raise ConfigError(f"{name!r} is not the directory of step {step}", directory=directory)
        if manager is None:
            from ckptfsm.dcp.checkpoint_manager import (
                CheckpointManager,  # only for those who begin
            )

            config = config.model_copy(update={"layout": layouts[0]})
            self._owned = manager = CheckpointManager(root, config)
        if os.path.realpath(root) != os.path.realpath(manager._storage.root):
            raise ConfigError(
                f"{directory} is not below {manager._storage.root}", directory=directory
            )
        return manager

    def _fill(self, filling: _Filling, request: Any) -> None:
        """Take the next part; the last one begins the save."""
        name, directory = list(filling.directories.items())[len(filling.parts)]
        part = request if callable(request) else taken_now(request)
        filling.parts[name] = ready_part(part, directory)
        filling.indices.append(self._last)
        if len(filling.parts) < len(filling.directories):
            return
        self._filling = None
        handle = filling.manager.save(filling.step, parts=filling.parts)
        self._saves.append((handle, filling.indices))

    def _refuse_unfinished(self) -> None:
        if self._filling is not None:
            missing = list(self._filling.directories)[len(self._filling.parts) :]
            raise ConfigError(
                f"part {missing[0]!r} of step {self._filling.step} was not scheduled",
                step=self._filling.step,
                part=missing[0],
            )

    def _drive_checkpoints(self, blocking: bool) -> None:
        """Poll the manager, and note the saves that are now tracked."""
        manager = self._manager or self._owned
        if manager is None:
            return
        try:
            if blocking:
                manager.wait_until_finished()
            else:
                manager.poll()
        finally:
            for handle, indices in self._saves:
                if handle.done and not handle.skipped and handle.exception() is None:
                    self._finalized += indices
            self._saves = [save for save in self._saves if not save[0].done]


def _never_finalized(numbers: Collection[int]) -> str:
    """The warning at the end of a queue with unfinalized requests, or "" (F28)."""
    if not numbers:
        return ""
    calls = ", ".join(map(str, sorted(numbers)))
    return (
        f"calls {calls} were never finalized, and what they wrote cannot be loaded: call "
        "maybe_finalize_async_calls() in the loop, and close() at the end"
    )


class Installed:
    """A queue in the place of another one. As a context manager it closes the queue at the end."""

    def __init__(self, queue: AsyncCallsQueue, holder: Any, name: str) -> None:
        self.queue = queue
        self._holder, self._name = holder, name
        self._previous = getattr(holder, name)
        self._replaced = Replaced()
        self._replaced.put(holder, name, queue)
        if (getattr(holder, "__name__", ""), name) == _TRAINER:
            self._stay_through_pretrain(holder)
        forget_what_workers_have()

    def _stay_through_pretrain(self, trainer: Any) -> None:
        """Keep the queue in place through ``pretrain``, which sets a queue at its start and end."""
        reset = getattr(trainer, "reset_persistent_async_worker", None)  # since 0.15
        for name, ours in (
            ("reset_persistent_async_worker", partial(self._reset, reset)),
            ("init_persistent_async_worker", _none_needed),
        ):
            if hasattr(trainer, name):
                self._replaced.put_everywhere(_TRAINER[0], name, ours)

    def _reset(self, stock: Any, *arguments: Any, **keywords: Any) -> None:
        try:
            stock(*arguments, **keywords)  # closes this queue with abort
        finally:
            setattr(self._holder, self._name, self.queue)

    def uninstall(self) -> None:
        """Put the previous queue back.

        Raises ``ConfigError`` while calls are not finalized, or if another queue has replaced this
        one, which stays.
        """
        count = self.queue.get_num_unfinalized_calls()
        if count:
            raise ConfigError(f"{count} calls are not finalized: close the queue first")
        self._put_back()

    def _put_back(self) -> None:
        standing = getattr(self._holder, self._name)
        if standing is not self.queue and standing is not self._previous:
            raise ConfigError(
                f"{self._name} holds another queue by now ({_kind_of(standing)}), and is left as it is: "
                "uninstall what was installed last first"
            )
        self._replaced.give_back()
        forget_what_workers_have()

    def __enter__(self) -> AsyncCallsQueue:
        return self.queue

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.queue.close(abort=kind is not None)
        finally:
            self._put_back()


def _none_needed(*arguments: Any, **keywords: Any) -> None:
    """Replaces the start of a persistent worker: each request has a writer."""


def install(
    queue: AsyncCallsQueue | None = None, holder: Any = None, name: str | None = None
) -> Installed:
    """Put ``queue`` (by default a new one) in the place of another; ``uninstall()`` undoes it.

    The default place is Megatron-LM's queue: ``_async_calls_queue`` of
    ``megatron.training.async_utils``, once that is imported. Up to megatron-core 0.16 the place may
    be ``async_calls`` of ``megatron.core.dist_checkpointing.strategies.base``. ``queue`` stays
    there through ``pretrain``. For another trainer's queue, give the object or module ``holder``
    and the attribute ``name``.

    Raises ``ConfigError`` if there is no queue to replace, or it is one of ckptfsm's, or it has
    calls that are not finalized. Also raised under the drop-in for Megatron-LM, which uses no
    queue.
    """
    holder, name = _holder_of(holder, name)
    previous = getattr(holder, name)
    if isinstance(previous, AsyncCallsQueue):
        raise ConfigError(f"{name} holds a queue of ckptfsm already: uninstall that one first")
    schedule = getattr(holder, "schedule_async_save", None)
    if str(getattr(schedule, "__module__", "")).startswith("ckptfsm."):
        raise ConfigError(
            "the drop-in for Megatron-LM is installed, which uses no queue: choose one"
        )
    if previous is not None and previous.get_num_unfinalized_calls():
        raise ConfigError(f"{name} has calls that are not finalized: finalize them first")
    return Installed(AsyncCallsQueue() if queue is None else queue, holder, name)


def _holder_of(holder: Any, name: str | None) -> tuple[Any, str]:
    """The object and the attribute that hold the trainer's queue. Raises ``ConfigError``."""
    if holder is not None:
        if not hasattr(holder, name or "async_calls"):
            raise ConfigError(
                f"{holder!r} has no attribute {name!r}: name the one that holds the queue"
            )
        return holder, name or "async_calls"
    for module, attribute in _HOLDERS:
        found = _imported(module)
        if hasattr(found, name or attribute):
            return found, name or attribute
    version = installed("megatron-core")
    raise ConfigError(
        f"nothing holds a queue of async saves: megatron-core {version} has none of its own "
        "(strategies.base.async_calls, up to 0.16), and megatron.training.async_utils is not imported: "
        'call install() after importing it, or name the holder: install(queue, trainer, "its_queue")'
    )


def _imported(module: str) -> Any:
    """A module of megatron-core, or an imported one of the trainer; None if it is missing."""
    if module != MEGATRON_BASE:
        return sys.modules.get(module)
    with suppress(ModuleNotFoundError):  # from megatron-core 0.19 on
        return import_module(module)
    return None


def _kind_of(queue: Any) -> str:
    return f"{type(queue).__module__}.{type(queue).__qualname__}"
