"""Groups of Ray actors under a controller in the driver.

An actor of a group has two methods: one calls ``GroupWorker.write(ticket, state)``, the other
``GroupWorker.poll(doomed)``. Each returns the result of its call. This module does the rest.

Rules: every wait for an answer has a deadline, and the controller hears of a dead actor as soon as
Ray reports it. The driver imports no torch for this.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptfsm.adapters.notices import say
from ckptfsm.adapters.versions import judge, missing
from ckptfsm.core.config import CheckpointConfig, Settings
from ckptfsm.core.errors import ConfigError, describe
from ckptfsm.core.events import Event, Failed
from ckptfsm.core.parts import AttemptId
from ckptfsm.ranks.controller import Controller
from ckptfsm.ranks.handle import SaveHandle
from ckptfsm.ranks.participant import Hook
from ckptfsm.ranks.tickets import GroupPart, GroupSave, Ticket

if TYPE_CHECKING:
    from typing_extensions import Unpack

try:
    import ray
    from ray.exceptions import (
        ActorUnavailableError,
        GetTimeoutError,
        RayActorError,
        RayTaskError,
    )
except ImportError as error:
    raise missing("ray", error) from error

judge("ray", ray.__version__)
log = logging.getLogger("ckptfsm")


@dataclass(frozen=True, slots=True)
class _Call:
    """An unanswered call of an actor. ``ticket``: the share it was to write, None for a poll."""

    group: str
    rank: int
    ticket: Ticket | None


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
        self._actors = {name: list(actors) for name, actors in groups.items()}
        self._write, self._poll = write, poll
        self._answer_timeout_s = answer_timeout_s
        self._calls: dict[Any, _Call] = {}  # unanswered calls, by Ray's reference
        for name, actors in self._actors.items():
            self._check_methods(name, actors)
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

        ``parts`` are the parts that the controller writes itself (bytes, ``FileTree``). Add a
        ``GroupPart`` for a group whose part has another name than the group. Returns once the
        writers hold copies of the workers' data. Raises the errors of ``Controller.begin``.
        """
        given = dict(parts or {})
        said = {part.group for part in given.values() if isinstance(part, GroupPart)}
        simple = {name: GroupPart(name) for name in self._actors if name not in said}
        save: GroupSave | None = None
        try:
            save = self.begin(step, {**simple, **given}, metrics=metrics)
            written = [
                self._call(name, rank, self._write, ticket, ticket)
                for name, ticket in save.tickets.items()
                for rank in range(len(self._actors[name]))
            ]
        except BaseException as error:  # a Ctrl-C too: an unwritten save must not block later ones
            if save is not None:
                self.give_up(step, f"not every actor was called: {describe(error)}")
            raise
        self.feed(self._answers(written))
        return save.handle

    def replace(self, group: str, actors: Sequence[Any]) -> None:
        """Replace the dead actors of a group by new ones: their unwritten shares fail.

        Raises ``ConfigError``.
        """
        if group in self._actors and len(actors) != len(self._actors[group]):
            raise ConfigError(
                f"group {group!r} has {len(self._actors[group])} ranks, not {len(actors)}"
            )
        self._check_methods(group, actors)
        self.lost(group, detail="replaced")
        self._calls = {ref: call for ref, call in self._calls.items() if call.group != group}
        self._actors[group] = list(actors)

    def _check_methods(self, group: str, actors: Sequence[Any]) -> None:
        for rank, actor in enumerate(actors):
            for method in (self._write, self._poll):
                if not hasattr(actor, method):
                    raise ConfigError(f"actor {rank} of {group!r} has no method {method!r}")

    def _ask(self, doomed: tuple[AttemptId, ...]) -> Iterator[Event]:
        """Ask every actor that has answered before; one deadline for all answers together."""
        silent = {(call.group, call.rank) for call in self._calls.values()}
        for name, actors in self._actors.items():
            for rank in range(len(actors)):
                if (name, rank) not in silent:
                    self._call(name, rank, self._poll, doomed, None)
        yield from self._answers(list(self._calls))

    def _call(
        self, group: str, rank: int, method: str, argument: Any, ticket: Ticket | None
    ) -> Any:
        """Begin a call and return Ray's reference to its answer.

        ``ticket``: the save that fails with it.
        """
        ref = getattr(self._actors[group][rank], method).remote(argument)
        self._calls[ref] = _Call(group, rank, ticket)
        return ref

    def _answers(self, refs: Sequence[Any]) -> Iterator[Event]:
        """The answers to these calls that came in time; a later poll takes the rest."""
        ready, late = ray.wait(list(refs), num_returns=len(refs), timeout=self._answer_timeout_s)
        for ref in late:
            call = self._calls[ref]
            said = f"{call.group} {call.rank} does not answer yet"
            say(log.warning, "actor_silent", said, group=call.group, rank=call.rank)
        for ref in ready:
            call = self._calls.pop(ref)
            yield from self._answer(call.group, call.rank, ref, call.ticket)

    def _answer(self, name: str, rank: int, ref: Any, ticket: Ticket | None) -> Iterable[Event]:
        """The events that an actor returned.

        A dead actor is reported lost; an error fails the save.
        """
        try:
            answer: Iterable[Event] = ray.get(ref, timeout=0.0)
        except (GetTimeoutError, ActorUnavailableError) as error:
            why = describe(error)
            said = f"{name} {rank} does not answer: {why}"
            say(log.warning, "actor_silent", said, group=name, rank=rank, why=why)
        except RayActorError as error:
            self.lost(name, [rank], describe(error).splitlines()[0])
        except RayTaskError as error:
            why = f"{name} {rank}: {describe(error.cause or error)}"[:4000]
            say(
                log.warning,
                "actor_raised",
                f"an actor failed: {why}",
                group=name,
                rank=rank,
                why=why,
            )
            if ticket is not None:
                return [Failed(ticket.of, "fork_failed", why, ticket.first_rank + rank)]
        else:
            return answer
        return []
