"""Groups of Ray actors under a controller in the driver.

An actor of a group has two methods: one that calls ``GroupWorker.write(ticket, state)``, one that calls
``GroupWorker.poll(doomed)``; both return what those return. Everything else is here.

Rules: no answer is waited for without a deadline, and an actor that died is told to the controller as
soon as Ray says so. The driver imports no torch for this.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayTaskError,
)

from ckptfsm.config import CheckpointConfig
from ckptfsm.controller import Controller
from ckptfsm.errors import ConfigError, describe
from ckptfsm.handle import SaveHandle
from ckptfsm.messages import AttemptId, Event, Failed
from ckptfsm.pump import Hook
from ckptfsm.tickets import GroupPart, Ticket

log = logging.getLogger("ckptfsm")


class RayController(Controller):
    """The owner of a root in a Ray driver. ``groups`` are the actors of each group, in rank order.

    ``write`` and ``poll`` are the names of the actors' methods. All answers together are waited for
    ``answer_timeout_s`` seconds; an actor that has not answered is asked nothing more until it has, and
    what it does not say fails the save at its deadline. Raises what ``Controller`` raises.
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
        self._calls: dict[tuple[str, int], Any] = {}  # calls that are not answered yet
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
        mixed = [n for n, v in given.items() if n in self._actors and not isinstance(v, GroupPart)]
        if mixed:
            raise ConfigError(f"{mixed[0]!r} is a group: its part is what its actors write")
        said = {part.group for part in given.values() if isinstance(part, GroupPart)}
        simple = {name: GroupPart(name) for name in self._actors if name not in said}
        save = self.begin(step, {**simple, **given}, metrics=metrics)
        calls = {
            (name, rank): getattr(actor, self._write).remote(ticket)
            for name, ticket in save.tickets.items()
            for rank, actor in enumerate(self._actors[name])
        }
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=self._answer_timeout_s)
        for (name, rank), call in calls.items():
            self.feed(self._answer(name, rank, call, save.tickets[name]))
        return save.handle

    def replace(self, group: str, actors: Sequence[Any]) -> None:
        """Put new actors in the place of a group's, which are dead. Raises ``ConfigError``."""
        if len(actors) != len(self._actors[group]):
            raise ConfigError(
                f"group {group!r} has {len(self._actors[group])} ranks, not {len(actors)}"
            )
        self._calls = {key: call for key, call in self._calls.items() if key[0] != group}
        self._actors[group] = list(actors)

    def _ask(self, doomed: tuple[AttemptId, ...]) -> Iterator[Event]:
        """Ask every actor that has answered before; one deadline for all answers together."""
        for name, actors in self._actors.items():
            for rank, actor in enumerate(actors):
                if (name, rank) not in self._calls:
                    self._calls[name, rank] = getattr(actor, self._poll).remote(doomed)
        calls = list(self._calls.values())
        ready, _ = ray.wait(calls, num_returns=len(calls), timeout=self._answer_timeout_s)
        answered = set(ready)
        for (name, rank), call in list(self._calls.items()):
            if call in answered:
                del self._calls[name, rank]
                yield from self._answer(name, rank, call, None)

    def _answer(self, name: str, rank: int, call: Any, ticket: Ticket | None) -> Iterable[Event]:
        """What an actor returned. One that died is reported lost; one that raised fails its save."""
        try:
            answer: Iterable[Event] = ray.get(call, timeout=0.0)
        except (GetTimeoutError, ActorUnavailableError) as error:
            log.warning("actor_silent", extra={"group": name, "rank": rank, "why": describe(error)})
        except RayActorError as error:
            self.lost(name, [rank], describe(error).splitlines()[0])
        except RayTaskError as error:
            why = f"{name} {rank}: {describe(error.cause or error)}"[:4000]
            log.warning("actor_raised", extra={"group": name, "rank": rank, "why": why})
            if ticket is not None:
                return [Failed(ticket.of, "fork_failed", why, ticket.first_rank + rank)]
        else:
            return answer
        return []
