"""The layer of interrupts: lines that a Ctrl-C once broke, struck one by one; and the bugs it can
see.

Each test names the bugs that it would catch. The jobs are those of ``proof.interrupts``, on a real
disk.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from proof.interrupts import ManagerJob, Site, once_each, place_of, sites_of, strike

from ckptfsm.ranks.coordinator_client import CoordinatorClient
from ckptfsm.ranks.handle import View
from ckptfsm.ranks.manager import Manager
from ckptfsm.ranks.participant import Participant
from ckptfsm.writers.rank_writer import RankWriter

Function = Callable[..., Any]
ASKING: Sequence[Function] = (
    CoordinatorClient.ask,
    CoordinatorClient._outcome,
    Manager._accept,
    CoordinatorClient.request,
    CoordinatorClient.together,
)
FORKING: Sequence[Function] = (Manager._plan_and_write, Participant.start_save, Participant.expect)
JUDGING: Sequence[Function] = (RankWriter.poll, RankWriter._ended, RankWriter._reports_of)
SENDING: Sequence[Function] = (Participant.exchange, CoordinatorClient.exchange)
TAKING: Sequence[Function] = (
    Participant.take_update,
    Participant._take,
    View.apply,
    Participant._on_tracked,
)


@pytest.fixture(scope="module")
def sites() -> list[Site]:
    return once_each(sites_of(ManagerJob, 1))


def lines_of(function: Function) -> set[tuple[str, int]]:
    lines, first = inspect.getsourcelines(function)
    file = place_of(inspect.getsourcefile(function) or "")
    return {(file, number) for number in range(first, first + len(lines))}


@pytest.mark.parametrize(
    "functions",
    [ASKING, FORKING, JUDGING, SENDING, TAKING],
    ids=["asking", "forking", "judging", "sending", "taking"],
)
def test_I10_a_job_goes_on_after_a_ctrl_c_at_each_line_of(
    functions: Sequence[Function], sites: list[Site]
):
    """Catches: a save that is in flight for good, since an interrupt lost an
    answer, a report, a writer's end, or the giving up of an accepted save."""
    wanted = set().union(*map(lines_of, functions))
    chosen = [site for site in sites if (site.file, site.line) in wanted]
    assert len(chosen) > len(functions), "each function is run by the job"
    reached = 0
    for site in chosen:
        _, struck, problem = strike(site)
        assert not problem, f"struck at {site}: {problem}"
        reached += struck
    assert reached > len(chosen) // 2, "a few depend on how fast a disk is"


def test_a_site_that_is_not_reached_is_said():
    """Catches: a layer that counts what it never struck."""
    _, struck, problem = strike(Site("save", "ckptfsm/ranks/participant.py", 1, 1))
    assert (struck, problem) == (False, "")
