"""A public report: the bug as a model, and the fate of the same history here.

``check`` is the whole procedure. The model with the old semantics must have a broken history. The
same model done right must have none in all its states. The library must end that very history with
its promises kept after every action.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proof.coverage import Coverage

from fieldbugs.model import Found, Model, search
from fieldbugs.player import Player


@dataclass(frozen=True)
class Report:
    """``play`` makes a fresh trainer (in a fresh directory); ``expect`` asserts how it must end.

    ``old`` is the model with the bug, ``mended`` the same one done right. ``verdict`` tells people
    the behaviour of the library.
    """

    name: str
    happened: str
    links: tuple[str, ...]
    old: Model[Any]
    mended: Model[Any]
    play: Callable[[Path], Player]
    expect: Callable[[Any], None]
    verdict: str
    aliases: tuple[str, ...] = ()


@dataclass
class Checked:
    """The result of a report. ``problem`` says why the library is not green; "" if it is."""

    report: Report
    old: Found
    mended: Found
    shown: list[str] = field(default_factory=list)
    problem: str = ""

    @property
    def problems(self) -> list[str]:
        """Everything that is not as it must be."""
        found = []
        if not self.old.broken:
            found.append(f"the old semantics is not red in {self.old.states} states")
        if self.mended.broken:
            history = " > ".join(map(str, self.mended.history))
            found.append(f"the mended model is red: {self.mended.broken} ({history})")
        if self.problem:
            found.append(f"ckptfsm is not green: {self.problem}")
        return found


def check(report: Report, coverage: Coverage) -> Checked:
    """Search both models, then let the library live through the history that was found."""
    checked = Checked(report, search(report.old), search(report.mended))
    with tempfile.TemporaryDirectory(prefix="ckptfsm-fieldbug-") as directory:
        player = report.play(Path(directory))
        player.coverage = coverage
        try:
            for action in checked.old.history:
                player.do(action)
                checked.shown.append(player.show())
                player.judge()
            report.expect(player)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit: whatever it is, the library is not green
            checked.problem = f"{type(error).__name__}: {error}"
        finally:
            player.close()
    return checked
