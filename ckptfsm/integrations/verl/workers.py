"""verl's worker groups as a controller needs them: attached once, polled without waiting.

Rules:

- A worker answers its calls in order, and may be busy with a training step. A poll leaves a call
  with every worker and takes the answers since the last poll, without waiting.
- A dead worker is reported lost, once, and not called again. A worker with any other error is
  called again, and the reports of the others count.
- Functions are imported in the worker that runs them: the driver, which only names them, needs no
  torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ckptfsm.adapters.notices import say
from ckptfsm.core.errors import DeadlineExceeded, WriterDied, describe
from ckptfsm.core.events import Event
from ckptfsm.core.parts import AttemptId

log = logging.getLogger("ckptfsm")


class Calls(Protocol):
    """Calls of functions in a worker: ``function(worker, *arguments)``."""

    def submit(self, worker: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        """Begin a call. Calls to one worker are answered in their order."""
        ...

    def done(self, calls: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        """The answered calls; waits for all of ``calls``, at most ``timeout_s``."""
        ...

    def result(self, call: Any) -> Any:
        """The result of an answered call, or its error raised.

        ``WriterDied`` only if its worker is dead for good; after any other error it is called
        again.
        """
        ...


class RayCalls:
    """Calls to Ray actors, such as the ``workers`` of a verl worker group."""

    def submit(self, worker: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        return worker.__ray_call__.remote(function, *arguments)

    def done(self, calls: Sequence[Any], timeout_s: float) -> Sequence[Any]:
        import ray

        ready: Sequence[Any] = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)[0]
        return ready

    def result(self, call: Any) -> Any:
        import ray

        try:
            return ray.get(call)
        except ray.exceptions.ActorUnavailableError:  # a RayActorError too, but a temporary one
            raise
        except ray.exceptions.RayActorError as error:
            raise WriterDied(f"the worker is dead: {describe(error)}") from error


@dataclass(frozen=True, slots=True)
class Lost:
    """A dead worker: ``rank`` is its rank in the role."""

    role: str
    rank: int
    detail: str


@dataclass(slots=True)
class RoleGroups:
    """The worker groups of a job by role. ``lost`` are deaths not yet reported to the controller."""

    groups: Mapping[str, Any]
    calls: Calls
    lost: list[Lost] = field(default_factory=list)
    _dead: set[tuple[str, int]] = field(default_factory=set)
    _asked: dict[tuple[str, int], Any] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        return {role: len(group.workers) for role, group in self.groups.items()}

    def attach(self, root: str, settings: Mapping[str, Any], timeout_s: float) -> None:
        """Put our manager into every worker. Raises a worker's error, or ``DeadlineExceeded``."""
        begun = [
            self.calls.submit(worker, attach, role, root, dict(settings))
            for role, group in self.groups.items()
            for worker in group.workers
        ]
        if len(self.calls.done(begun, timeout_s)) < len(begun):
            raise DeadlineExceeded("verl's workers did not answer in time", timeout_s=timeout_s)
        for call in begun:
            self.calls.result(call)

    def poll(self, doomed: tuple[AttemptId, ...]) -> list[Event]:
        """The events that the workers have answered by now; polls them again."""
        events: list[Event] = []
        if self._asked:
            done = self.calls.done(list(self._asked.values()), 0.0)
            answered = [key for key, call in self._asked.items() if call in done]
            for key in answered:
                events += self._answer(key, self._asked.pop(key))
        for role, group in self.groups.items():
            for rank, worker in enumerate(group.workers):
                if (role, rank) not in self._dead and (role, rank) not in self._asked:
                    self._ask((role, rank), worker, doomed)
        return events

    def _ask(self, key: tuple[str, int], worker: Any, doomed: tuple[AttemptId, ...]) -> None:
        try:
            self._asked[key] = self.calls.submit(worker, poll, key[0], doomed)
        except Exception as error:  # one worker's: the others' reports are taken already
            _say_raised(key, error)

    def _answer(self, key: tuple[str, int], call: Any) -> list[Event]:
        try:
            events: list[Event] = self.calls.result(call)
        except WriterDied as error:
            self._dead.add(key)
            self.lost.append(Lost(*key, describe(error)))
            return []
        except Exception as error:  # one worker's: the others' reports are taken already
            _say_raised(key, error)
            return []
        return events


def _say_raised(key: tuple[str, int], error: Exception) -> None:
    (role, rank), why = key, describe(error)
    said = f"worker {rank} of {role!r} failed: {why}"
    say(log.warning, "worker_raised", said, role=role, rank=rank, why=why)


def attach(worker: Any, role: str, root: str, settings: Mapping[str, Any]) -> None:
    """Run in a worker: see ``rank_manager.attach``."""
    from ckptfsm.integrations.verl.rank_manager import attach as attach_here

    attach_here(worker, role, root, settings)


def poll(worker: Any, role: str, doomed: tuple[AttemptId, ...]) -> list[Event]:
    """Run in a worker: see ``rank_manager.poll``."""
    from ckptfsm.integrations.verl.rank_manager import poll as poll_here

    return poll_here(worker, role, doomed)
