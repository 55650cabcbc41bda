"""Groups of Ray actors under a controller in the driver.

An actor of a group has two methods: one that calls ``GroupWorker.write(ticket, state)``, one that calls
``GroupWorker.poll(doomed)``; both return what those return. Everything else is here.

Rules: no answer is waited for without a deadline, and an actor that died is told to the controller as
soon as Ray says so. The driver imports no torch for this.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from ckptfsm.config import CheckpointConfig
from ckptfsm.controller import Controller, GroupPart
from ckptfsm.errors import ConfigError, describe
from ckptfsm.handle import SaveHandle
from ckptfsm.messages import AttemptId, Event, Failed
from ckptfsm.pump import Hook


class RayController(Controller):
    """The owner of a root in a Ray driver. ``groups`` are the actors of each group, in rank order.

    ``write`` and ``poll`` are the names of the actors' methods. An answer that does not come within
    ``answer_timeout_s`` seconds is not waited for any longer; what it would have said comes with a later
    one, or the save fails at its deadline. Raises what ``Controller`` raises.
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
        **settings: Any,
    ) -> None:
        self._actors = {name: list(actors) for name, actors in groups.items()}
        self._write, self._poll = write, poll
        self._answer_timeout_s = answer_timeout_s
        self._late: list[tuple[str, int, Any]] = []
        sizes = {name: len(actors) for name, actors in self._actors.items()}
        super().__init__(root, sizes, self._ask, config, hooks=hooks, **settings)

    def save(
        self,
        step: int,
        parts: Mapping[str, Any] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveHandle:
        """Begin a checkpoint of ``step`` and let every group write its share.

        ``parts`` are what the controller writes itself (bytes, ``FileTree``), and ``GroupPart`` where a
        group's part is not simply called like the group. Returns once the workers' data is owned by
        their writers. Raises what ``Controller.begin`` raises.
        """
        given = dict(parts or {})
        said = {part.group for part in given.values() if isinstance(part, GroupPart)}
        simple = {name: GroupPart(name) for name in self._actors if name not in said}
        save = self.begin(step, {**simple, **given}, metrics=metrics)
        calls = [
            (name, rank, getattr(actor, self._write).remote(ticket))
            for name, ticket in save.tickets.items()
            for rank, actor in enumerate(self._actors[name])
        ]
        for name, rank, call in calls:
            self.feed(self._answer(name, rank, call, save.tickets[name].of))
        return save.handle

    def replace(self, group: str, actors: Sequence[Any]) -> None:
        """Put new actors in the place of a group's, which are dead. Raises ``ConfigError``."""
        if len(actors) != len(self._actors[group]):
            raise ConfigError(
                f"group {group!r} has {len(self._actors[group])} ranks, not {len(actors)}"
            )
        self._late = [call for call in self._late if call[0] != group]
        self._actors[group] = list(actors)

    def _ask(self, doomed: tuple[AttemptId, ...]) -> list[Event]:
        late, self._late = self._late, []
        calls = [
            (name, rank, getattr(actor, self._poll).remote(doomed))
            for name, actors in self._actors.items()
            for rank, actor in enumerate(actors)
        ]
        events: list[Event] = []
        for name, rank, call in (*late, *calls):
            events += self._answer(name, rank, call, None)
        return events

    def _answer(self, name: str, rank: int, call: Any, of: AttemptId | None) -> Iterable[Event]:
        """What an actor returned. One that died is reported lost, one that raised has failed ``of``."""
        try:
            answer: Iterable[Event] = ray.get(call, timeout=self._answer_timeout_s)
        except GetTimeoutError:
            self._late.append((name, rank, call))
        except RayActorError as error:
            self.lost(name, [rank], describe(error).splitlines()[0])
        except RayTaskError as error:
            if of is None:
                raise
            number = self._first_rank[name] + rank
            return [Failed(of, "fork_failed", f"{name} {rank}: {describe(error.cause)}", number)]
        else:
            return answer
        return []
