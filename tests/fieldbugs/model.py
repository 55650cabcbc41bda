"""A tiny explorer for tiny models: the shortest history that breaks a promise, or none in all of it.

Rules: a model is finite and its states are frozen. An action is something a trainer or its
environment does (save, poll, SIGKILL), never an inner step of the software. So other software can
replay the same history. Breadth first: the first history found is a shortest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)
MAX_STATES = 50_000

PHRASES = MappingProxyType(
    {
        "save": "save step {step}",
        "train": "one more training step",
        "written": "the writers of {step} finish",
        "writer_dies": "SIGKILL to a writer of {step}",
        "no_space": "disk full under the writers of {step}",
        "no_quota": "the quota is used up",
        "held_open": "somebody holds a file of {step} open",
        "poll": "the trainer polls",
        "finalizes": "rank {rank} finalizes {step}",
        "place": "rank 0 on node {who[0]}, rank 1 on {who[1]}",
        "kill": "SIGKILL to the whole job",
        "kill_in_poll": "poll, and SIGKILL at the tracker",
        "power": "the power fails",
        "leave": "the trainer leaves in order",
        "retry": "training raises; retried in-process",
        "restart": "restart",
        "restart_at": "restart, asked for step {step}",
        "stock_saves": "megatron-core 0.19 saves step {step}",
        "adopts": "the trainer looks at step {step}",
        "saves": "step {step}, which ends an epoch, is saved",
        "resumes": "the next run resumes from it",
        "trains_an_epoch": "that run trains an epoch",
        "opens": "{who} begins to write",
        "writes": "{who} has written its bytes",
        "renames": "{who} has renamed",
    }
)


class Action(NamedTuple):
    """Something that a trainer or its environment does."""

    verb: str
    step: int | None = None
    rank: int | None = None
    who: str | tuple[str, ...] = ""

    def __str__(self) -> str:
        return PHRASES[self.verb].format(**self._asdict())


class Model(Protocol[S]):
    """The model that ``search`` explores. ``broken`` names the promise (``I2: ...``), or is "" if
    all hold."""

    def initial(self) -> S: ...

    def actions(self, state: S) -> Iterable[tuple[Action, S]]: ...

    def broken(self, state: S) -> str: ...

    def show(self, state: S) -> str: ...


@dataclass(frozen=True)
class Found:
    """The result of a search: a shortest history and the state after each action, or nothing in
    ``states``."""

    states: int
    history: tuple[Action, ...] = ()
    shown: tuple[str, ...] = ()
    broken: str = ""


def search(model: Model[S]) -> Found:
    """Look at every state of a model, nearest first; stop at the first broken one."""
    first = model.initial()
    came: dict[S, tuple[S, Action] | None] = {first: None}
    pending = deque([first])
    while pending:
        state = pending.popleft()
        broken = model.broken(state)
        if broken:
            return _trace(model, came, state, broken)
        for action, after in model.actions(state):
            if after not in came:
                came[after] = (state, action)
                pending.append(after)
        if len(came) > MAX_STATES:
            raise RuntimeError(f"{type(model).__name__} is not tiny: {len(came)} states")
    return Found(len(came))


def _trace(model: Model[S], came: dict[S, tuple[S, Action] | None], last: S, broken: str) -> Found:
    history: list[Action] = []
    shown: list[str] = []
    state = last
    while (step := came[state]) is not None:
        shown.append(model.show(state))
        state = step[0]
        history.append(step[1])
    return Found(len(came), tuple(reversed(history)), tuple(reversed(shown)), broken)
