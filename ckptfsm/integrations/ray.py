"""Groups of Ray actors under a controller in the driver.

An actor of a group has two methods: one calls ``GroupWorker.write(ticket, state)``, the other
``GroupWorker.poll(doomed)``. Each returns the result of its call. This module does the rest.

The controller is told of a dead actor as soon as Ray reports it. The driver imports no torch for this.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptfsm.adapters.versions import judge, missing
from ckptfsm.core.config import CheckpointConfig, Settings
from ckptfsm.core.errors import ConfigError, describe
from ckptfsm.core.events import Event
from ckptfsm.core.parts import AttemptId
from ckptfsm.integrations.workers import RayCalls, WorkerCalls
from ckptfsm.ranks.controller import Controller
from ckptfsm.ranks.handle import SaveHandle
from ckptfsm.ranks.participant import Hook
from ckptfsm.ranks.tickets import GroupPart, GroupSave

if TYPE_CHECKING:
    from typing_extensions import Unpack

try:
    import ray
except ImportError as error:
    raise missing("ray", error) from error

judge("ray", ray.__version__)


class RayController(Controller):
    """The controller of a root in a Ray driver.

    ``groups`` are the actors of each group, in rank order.

    ``write`` and ``poll`` are the names of the actors' methods. All answers together are awaited
    for ``answer_timeout_s`` seconds; a silent actor is not polled again until it has answered. A
    late answer counts; a missing answer fails the save at its deadline. Raises the errors of
    ``Controller``, and ``ConfigError`` if an actor lacks a method.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        groups: Mapping[str, Sequence[Any]],
        config: CheckpointConfig | Mapping[str, Any] | None = None,
        *,
        write: str = "write",
        poll: str = "poll",
        answer_timeout_s: float = 60.0,
        hooks: Sequence[Hook] = (),
        **settings: Unpack[Settings],
    ) -> None:
        self._workers = WorkerCalls(groups, RayCalls())
        self._write, self._poll = write, poll
        self._answer_timeout_s = answer_timeout_s
        for name, actors in groups.items():
            self._check_methods(name, actors)
        super().__init__(root, self._workers.sizes, self._ask, config, hooks=hooks, **settings)

    def save(
        self,
        step: int,
        parts: Mapping[str, Any] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveHandle:
        """Begin a checkpoint of ``step`` and let every group write its share.

        ``parts`` are the parts that the controller writes itself (bytes, ``FileTree``). Add a
        ``GroupPart`` for a group whose part has another name than the group. Returns once the
        writers hold copies of the workers' data. Raises the errors of ``Controller.begin``.
        """
        given = dict(parts or {})
        said = {part.group for part in given.values() if isinstance(part, GroupPart)}
        simple = {name: GroupPart(name) for name in self._workers.groups if name not in said}
        save: GroupSave | None = None
        try:
            save = self.begin(step, {**simple, **given}, metrics=metrics)
            written = [
                self._workers.begin(name, rank, ticket, self._write, ticket)
                for name, ticket in save.tickets.items()
                for rank in range(ticket.size)
            ]
        except BaseException as error:  # a Ctrl-C too: an unwritten save must not block later ones
            if save is not None:
                self.give_up(step, f"not every actor was called: {describe(error)}")
            raise
        self.feed(self._workers.take(written, self._answer_timeout_s, self.lost))
        return save.handle

    def replace(self, group: str, actors: Sequence[Any]) -> None:
        """Replace the dead actors of a group by new ones: their unwritten shares fail.

        Raises ``ConfigError``.
        """
        size = self._workers.sizes.get(group, len(actors))
        if len(actors) != size:
            raise ConfigError(f"group {group!r} has {size} ranks, not {len(actors)}")
        self._check_methods(group, actors)
        self.lost(group, detail="replaced")
        self._workers.replace(group, actors)

    def _check_methods(self, group: str, actors: Sequence[Any]) -> None:
        for rank, actor in enumerate(actors):
            for method in (self._write, self._poll):
                if not hasattr(actor, method):
                    raise ConfigError(f"actor {rank} of {group!r} has no method {method!r}")

    def _ask(self, doomed: tuple[AttemptId, ...]) -> Iterator[Event]:
        questions = dict.fromkeys(self._workers.groups, (self._poll, doomed))
        return self._workers.poll(questions, self._answer_timeout_s, self.lost)
