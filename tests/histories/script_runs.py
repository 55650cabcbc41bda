"""A job of a script: its process, the commands that wait for its calls, and the call that is swept."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptfsm.core.ports import FileStat
from ckptfsm.testing.faults import FaultStorage
from ckptfsm.testing.harness import FakeJob
from ckptfsm.testing.simfs import SimStorage

if TYPE_CHECKING:
    from script_story import Story


@dataclass
class Sweep:
    """A single run of a sweep: the call of the swept command at which it strikes."""

    index: int
    struck: bool = False


@dataclass
class Hook:
    """A command that waits for a call."""

    method: str
    path: str
    command: str
    after: bool
    skip: int
    times: int
    struck: bool = False

    def strikes(self, method: str, path: str, after: bool) -> bool:
        """True if this is the call that it waits for."""
        if self.times == 0 or after != self.after or not re.fullmatch(self.method, method):
            return False
        if not re.search(self.path, path):
            return False
        self.skip -= 1
        struck = self.skip < 0
        self.times -= struck
        self.struck = self.struck or struck
        return struck


@dataclass
class Run:
    """A job, its process, and the commands that wait for its calls."""

    name: str
    job: FakeJob
    hooks: list[Hook]
    of: Any = None


class Calls(FaultStorage):
    """Calls of one job. Hooks see also those that only look."""

    def __init__(self, story: Story, name: str, hooks: list[Hook]) -> None:
        super().__init__(SimStorage(story.disk, name))
        self.story, self.hooks = story, hooks
        self.before = lambda index, method, path: story.called(self, method, path, after=False)
        self.after = lambda index, method, path: story.called(self, method, path, after=True)

    def listdir(self, path: str) -> list[str]:
        self.story.called(self, "listdir", path, after=False)
        found = super().listdir(path)
        self.story.called(self, "listdir", path, after=True)
        return found

    def stat(self, path: str) -> FileStat:
        self.story.called(self, "stat", path, after=False)
        return super().stat(path)

    def read(self, path: str, limit: int, offset: int = 0) -> bytes:
        self.story.called(self, "read", path, after=False)
        return super().read(path, limit, offset)
