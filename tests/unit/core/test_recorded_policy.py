"""The retention policy in the journal: its record, and the words of the rule that keeps a step."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

import pytest

from ckptfsm.core.documents import SegmentOpened, decode, encode
from ckptfsm.core.retention import (
    AllOf,
    AnyOf,
    BestN,
    CheckpointInfo,
    EveryNSeconds,
    EveryNSteps,
    KeepAll,
    LatestN,
    Policy,
    Steps,
    policy_of,
    record_of,
    rules_that_keep,
)

INFOS = tuple(
    CheckpointInfo(step, 10.0 * step, {"loss": 1.0 / step}) for step in (10, 20, 30, 40, 50)
)


class Mine(Policy):
    def preserve(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        raise AssertionError("its code is not called")


class Fewer(LatestN):
    """A subclass that decides otherwise."""


@pytest.mark.parametrize(
    "policy",
    [
        KeepAll(),
        LatestN(2),
        EveryNSteps(20),
        EveryNSeconds(300),
        BestN("loss", 2, "max"),
        Steps({30, 10}),
        AnyOf((LatestN(1), EveryNSteps(30))),
        AllOf((LatestN(3), AnyOf((Steps({10}), BestN("loss"))))),
    ],
)
def test_a_policy_of_this_library_is_read_back(policy):
    """Catches: a record that no version reads, or that means another policy."""
    opened = SegmentOpened(
        epoch=1,
        host="h",
        pid=1,
        at="",
        seals=(),
        run_seconds=0.0,
        retention=record_of(policy),
        checkpoints=(),
    )
    again = decode(SegmentOpened, encode(opened), "x")
    assert policy_of(again.retention) == policy


@pytest.mark.parametrize("policy", [Mine(), Fewer(2), LatestN(1) | Mine(), LatestN(1) & Fewer(2)])
def test_a_policy_of_another_class_is_not_read_back(policy):
    """Catches: a prune by the rule of a base class."""
    assert policy_of(record_of(policy)) is None


@pytest.mark.parametrize(
    ("policy", "record"),
    [
        (KeepAll(), {"keep_all": True}),
        (LatestN(2), {"latest_n": 2}),
        (EveryNSteps(20), {"every_n_steps": 20}),
        (EveryNSeconds(300), {"every_n_seconds": 300.0}),
        (BestN("loss"), {"best_n": {"metric": "loss", "n": 1, "mode": "min"}}),
        (Steps({30, 10}), {"steps": [10, 30]}),
        (LatestN(1) & Mine(), {"all_of": [{"latest_n": 1}, {"custom": "Mine"}]}),
        (LatestN(1) | Steps(()), {"any_of": [{"latest_n": 1}, {"steps": []}]}),
    ],
)
def test_the_form_of_a_record_stays(policy, record):
    """Catches: a journal that other versions read as another policy."""
    assert json.dumps(record_of(policy)) == json.dumps(record)


def test_a_long_list_is_recorded_by_its_class():
    """Catches: an opening that writes megabytes."""
    assert record_of(Steps(range(100_000))) == {"custom": "Steps"}


@pytest.mark.parametrize(
    ("policy", "wanted"),
    [
        (KeepAll(), {}),
        (LatestN(2), {40: "the latest 2", 50: "the latest 2"}),
        (
            LatestN(1) | EveryNSteps(25),
            {50: "the latest 1, every 25 steps"},
        ),
        (LatestN(1) | KeepAll(), {}),
        (EveryNSeconds(390), {10: "every 390 s of run time", 50: "every 390 s of run time"}),
        (BestN("loss"), {50: "the best 1 by loss (min)"}),
        (Steps({30}), {30: "named steps"}),
        (
            LatestN(2) & (EveryNSteps(40) | Steps({50})),
            {
                40: "(the latest 2 and (every 40 steps or named steps))",
                50: "(the latest 2 and (every 40 steps or named steps))",
            },
        ),
        (
            LatestN(1) | Mine() | (Fewer(3) & EveryNSteps(20)),
            {
                **dict.fromkeys((10, 20, 30, 40), "Mine or (Fewer and every 20 steps)"),
                50: "the latest 1",
            },
        ),
        (Mine(), dict.fromkeys((10, 20, 30, 40, 50), "Mine")),
    ],
)
def test_the_rules_that_keep_a_step_are_named(policy, wanted):
    """Catches: a rule that is named for a step that another one keeps."""
    assert rules_that_keep(record_of(policy), INFOS) == wanted


@pytest.mark.parametrize(
    "record",
    [{}, {"latest_n": "x"}, {"of_the_future": 3}, {"any_of": 5}, {"best_n": {"metric": []}}],
)
def test_a_record_that_means_nothing_here_is_no_policy(record):
    """Catches: a command that fails, or prunes, because of a record of another version."""
    assert policy_of(record) is None
    assert set(rules_that_keep(record, INFOS).values()) == set(record)
