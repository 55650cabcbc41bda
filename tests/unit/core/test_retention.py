"""Retention policies: exact examples, properties, and policies from plain data."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledgers import (
    checkpoint,
    ledger_of,
)

from ckptfsm.core.errors import (
    ConfigError,
)
from ckptfsm.core.lifecycle import State
from ckptfsm.core.retention import (
    POLICIES,
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
    describe_tracked,
    parse_policy,
)

quick = settings(max_examples=60, derandomize=True, deadline=None, database=None)


def infos(*steps: int) -> list[CheckpointInfo]:
    return [CheckpointInfo(step, float(step)) for step in steps]


def scored(**losses: float | None) -> list[CheckpointInfo]:
    return [
        CheckpointInfo(int(name[1:]), 0.0, {} if loss is None else {"loss": loss})
        for name, loss in losses.items()
    ]


def kept(policy: Policy, checkpoints: list[CheckpointInfo]) -> list[int]:
    return sorted(policy.preserve(checkpoints))


histories = (
    st.lists(st.integers(0, 1000), unique=True, max_size=12)
    .map(sorted)
    .map(lambda steps: [CheckpointInfo(s, s * 1.5, {"loss": math.sin(s)}) for s in steps])
)
policies = st.one_of(
    st.integers(0, 15).map(LatestN),
    st.integers(1, 50).map(EveryNSteps),
    st.floats(0.1, 500).map(EveryNSeconds),
    st.integers(0, 5).map(lambda n: BestN("loss", n, "max")),
    st.sets(st.integers(0, 1000), max_size=4).map(Steps),
    st.just(KeepAll()),
)


@given(policies, policies, histories)
@quick
def test_every_policy_preserves_a_subset_and_combines_as_sets(a, b, history):
    """Catches: invented steps; ``|`` or ``&`` swapped, or dropping what they should keep."""
    steps = {c.step for c in history}
    left, right = set(a.preserve(history)), set(b.preserve(history))
    assert left <= steps and right <= steps
    assert set((a | b).preserve(history)) == left | right
    assert set((a & b).preserve(history)) == left & right


@given(st.integers(0, 15), histories)
@quick
def test_latest_n_keeps_exactly_n_newest(n, history):
    """Catches: ``list[-0:]`` keeping everything, and n larger than the list."""
    assert kept(LatestN(n), history) == [c.step for c in history][max(0, len(history) - n) :]


@given(st.floats(0.5, 300), histories)
@quick
def test_every_n_seconds_keeps_the_oldest_and_spaces_the_rest(seconds, history):
    """Catches: kept ones closer than asked, or a gap in which one was due."""
    chosen = [c for c in history if c.step in EveryNSeconds(seconds).preserve(history)]
    assert chosen[:1] == history[:1]
    for one, two in zip(chosen, chosen[1:], strict=False):
        assert two.run_seconds >= one.run_seconds + seconds
        between = [c for c in history if one.step < c.step < two.step]
        assert all(c.run_seconds < one.run_seconds + seconds for c in between)


def test_exact_examples():
    """Catches: any policy doing something else than its one line says."""
    history = infos(0, 50, 100, 150, 200)
    assert kept(KeepAll(), history) == [0, 50, 100, 150, 200]
    assert kept(LatestN(2), history) == [150, 200]
    assert kept(LatestN(0), history) == []
    assert kept(LatestN(9), history) == [0, 50, 100, 150, 200]
    assert kept(EveryNSteps(100), history) == [0, 100, 200]
    assert kept(EveryNSeconds(100), history) == [0, 100, 200]
    assert kept(EveryNSeconds(101), history) == [0, 150]
    assert kept(Steps([50, 777]), history) == [50]
    assert kept(LatestN(1) | EveryNSteps(100), history) == [0, 100, 200]
    assert kept(LatestN(3) & EveryNSteps(100), history) == [100, 200]
    for policy in (KeepAll(), LatestN(3), EveryNSteps(2), EveryNSeconds(1), BestN("loss")):
        assert kept(policy, []) == []


def test_best_n_min_max_ties_and_count():
    """Catches: best taken for worst, or an older one winning a tie."""
    history = scored(s1=3.0, s2=1.0, s3=2.0, s4=1.0)
    assert kept(BestN("loss", 1), history) == [4]
    assert kept(BestN("loss", 2), history) == [2, 4]
    assert kept(BestN("loss", 1, "max"), history) == [1]
    assert kept(BestN("loss", 3, "max"), history) == [1, 3, 4]
    assert kept(BestN("loss", 0), history) == []
    assert kept(BestN("loss", 99), history) == [1, 2, 3, 4]


@pytest.mark.parametrize("mode", ["min", "max"])
def test_best_n_never_prefers_a_missing_or_nan_metric(mode):
    """Catches: NaN, which compares false with everything, chosen as the best."""
    history = scored(s1=math.nan, s2=5.0, s3=None, s4=math.nan)
    assert kept(BestN("loss", 1, mode), history) == [2]
    assert kept(BestN("loss", 4, mode), history) == [2]
    assert kept(BestN("accuracy", 4, mode), history) == []


def test_best_n_with_infinities():
    """Catches: an infinite loss chosen over a finite one."""
    history = scored(s1=math.inf, s2=5.0, s3=-math.inf)
    assert kept(BestN("loss", 1), history) == [3]
    assert kept(BestN("loss", 2), history) == [2, 3]
    assert kept(BestN("loss", 1, "max"), history) == [1]


def test_steps_keeps_the_given_ones_that_exist():
    """Catches: Steps inventing checkpoints, or being changed from outside."""
    steps = [1, 2]
    policy = Steps(steps)
    steps.append(3)
    assert kept(policy, infos(2, 3)) == [2]
    assert policy == Steps({2, 1})


def test_policies_are_values():
    """Catches: two equal policies that differ, or one that changes under way."""
    assert LatestN(2) == LatestN(2) and LatestN(2) != LatestN(3)
    with pytest.raises(FrozenInstanceError):
        LatestN(2).n = 0  # type: ignore[misc]
    assert LatestN(1) | KeepAll() == AnyOf((LatestN(1), KeepAll()))
    assert (LatestN(1) & KeepAll()) == AllOf((LatestN(1), KeepAll()))


def test_a_policy_without_preserve_says_so():
    """Catches: a half-written subclass that silently keeps nothing."""

    class Mine(Policy):
        pass

    with pytest.raises(TypeError, match="Mine does not define preserve"):
        Mine().preserve([])
    with pytest.raises(TypeError):
        (Mine() | KeepAll()).preserve(infos(1))


@pytest.mark.parametrize(
    "build",
    [
        lambda: LatestN(-1),
        lambda: LatestN(True),
        lambda: LatestN(1.0),
        lambda: LatestN("2"),
        lambda: EveryNSteps(0),
        lambda: EveryNSeconds(0),
        lambda: EveryNSeconds(-3),
        lambda: EveryNSeconds(math.nan),
        lambda: EveryNSeconds(math.inf),
        lambda: BestN("loss", -1),
        lambda: BestN("loss", 1, "median"),
    ],
)
def test_F28_a_policy_that_cannot_work_is_refused_at_construction(build):
    """Catches: a nonsense number that only shows when checkpoints are deleted."""
    with pytest.raises(ConfigError):
        build()


@pytest.mark.parametrize("cls", [LatestN, EveryNSteps, lambda n: BestN("loss", n)])
def test_a_refused_number_is_told_with_its_policy(cls):
    """Catches: a refusal of one of many policies in a configuration that does not say which."""
    name = getattr(cls, "__name__", "").replace("<lambda>", "BestN")
    with pytest.raises(ConfigError, match=rf"^{name} needs a whole number of at least \d, not -1"):
        cls(-1)


def test_describe_tracked_shows_only_tracked_oldest_first():
    """Catches: failed or unfinished attempts occupying a keep slot (I7)."""
    states = {30: State.TRACKED, 10: State.TRACKED, 20: State.FAILED, 40: State.FINALIZED}
    ledger = ledger_of(
        *(
            checkpoint(step, state, metrics=(("loss", step / 10),), run_seconds=step * 2.0)
            for step, state in states.items()
        )
    )
    assert describe_tracked(ledger) == (
        CheckpointInfo(10, 20.0, {"loss": 1.0}),
        CheckpointInfo(30, 60.0, {"loss": 3.0}),
    )


class Sorts(Policy):
    def preserve(self, checkpoints):
        checkpoints.sort(key=lambda c: c.metrics["loss"])
        return {c.step for c in checkpoints[:1]}


class Pops(Policy):
    def preserve(self, checkpoints):
        return {c.step for c in checkpoints if c.metrics.pop("loss") < 0}


@pytest.mark.parametrize("wrong", [Sorts(), Pops()], ids=["sorts", "pops"])
def test_I7_a_policy_cannot_change_the_view_of_the_policies_beside_it(wrong):
    """Catches: one list for all policies, which a wrong one sorts or empties: ``LatestN`` deletes the
    newest, ``BestN`` the best. A policy that raises keeps everything."""
    beside = LatestN(1) | BestN("loss", 1)
    history = scored(s1=3.0, s2=2.0, s3=1.0)
    for policy in (wrong | beside, wrong & beside):
        with pytest.raises((AttributeError, TypeError)):
            policy.preserve(history)
    assert history == scored(s1=3.0, s2=2.0, s3=1.0)
    tracked = describe_tracked(
        ledger_of(*(checkpoint(s, State.TRACKED, metrics=(("loss", 1.0),)) for s in (1, 2)))
    )
    with pytest.raises((AttributeError, TypeError)):
        wrong.preserve(tracked)
    assert kept(beside, tracked) == [2]


# ------------------------------------------------------------------------------- plain data


@pytest.mark.parametrize(
    ("value", "policy"),
    [
        ({"latest_n": 2}, LatestN(2)),
        ({"every_n_steps": 100}, EveryNSteps(100)),
        ({"every_n_seconds": 3600}, EveryNSeconds(3600)),
        ({"best_n": {"metric": "loss", "n": 3, "mode": "max"}}, BestN("loss", 3, "max")),
        ({"best_n": "loss"}, BestN("loss")),
        ({"steps": [1, 2]}, Steps([1, 2])),
        ({"keep_all": True}, KeepAll()),
        ({"keep_all": {}}, KeepAll()),
        ({"latest_n": 2, "every_n_steps": 10}, AnyOf((LatestN(2), EveryNSteps(10)))),
        ({"any_of": [{"latest_n": 2}, {"steps": [5]}]}, AnyOf((LatestN(2), Steps([5])))),
        ({"all_of": [{"latest_n": 2}, LatestN(3)]}, AllOf((LatestN(2), LatestN(3)))),
        (LatestN(4), LatestN(4)),
    ],
)
def test_parse_policy(value, policy):
    """Catches: a table read as another policy than it says."""
    assert parse_policy(value) == policy


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        [],
        "latest_n",
        {"newest_n": 2},
        {"latest_n": None},
        {"latest_n": -1},
        {"latest_n": {"count": 2}},
        {"latest_n": {}},
        {"best_n": {"n": 3}},
        {"best_n": {"metric": "loss", "mode": "best"}},
        {"steps": 5},
        {"every_n_seconds": "often"},
        {"keep_all": {"really": 1}},
        {"any_of": []},
        {"any_of": "latest_n"},
        {"any_of": {"latest_n": 2}},
        {"all_of": [{}]},
        {"all_of": [None]},
    ],
)
def test_F28_parse_policy_refuses_unknown_words(value):
    """Catches: a typo in the configuration that keeps, or deletes, other checkpoints than meant."""
    with pytest.raises(ConfigError):
        parse_policy(value)


def test_parse_policy_names_the_known_ones():
    """Catches: an error message that does not help to fix the call."""
    with pytest.raises(ConfigError) as caught:
        parse_policy({"latest": 2})
    assert all(name in str(caught.value) for name in POLICIES)


@pytest.mark.parametrize(
    "build",
    [
        lambda: EveryNSeconds("x"),
        lambda: Steps("12"),
        lambda: Steps(""),
        lambda: Steps([1, True]),
        lambda: Steps([1.5]),
        lambda: parse_policy({"any_of": "latest_n"}),
        lambda: parse_policy({"all_of": 2}),
        lambda: parse_policy({"keep_all": False}),
        lambda: parse_policy({"steps": "123"}),
    ],
    ids=["seconds", "text", "no text", "true", "half", "any_of", "all_of", "keep_all", "steps"],
)
def test_F28_text_and_false_are_no_policies(build):
    """Catches: text taken for a number or for a list of policies; keep_all = false that keeps all."""
    with pytest.raises(ConfigError):
        build()
