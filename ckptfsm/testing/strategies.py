"""Hypothesis strategies for what a retention policy sees. Needs the extra ``ckptfsm[testing]``."""

from __future__ import annotations

from operator import itemgetter

from hypothesis import strategies as st

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
)

MAX_STEP = 12


def steps() -> st.SearchStrategy[int]:
    """A step, from 0 to 12."""
    return st.integers(0, MAX_STEP)


def policies() -> st.SearchStrategy[Policy]:
    """A retention policy, also one that keeps nothing, and combinations."""
    simple: st.SearchStrategy[Policy] = st.one_of(
        st.builds(LatestN, st.integers(0, 3)),
        st.builds(EveryNSteps, st.integers(1, 5)),
        st.builds(EveryNSeconds, st.floats(0.5, 50)),
        st.builds(BestN, st.just("loss"), st.integers(0, 2), st.sampled_from(("min", "max"))),
        st.builds(Steps, st.sets(steps(), max_size=3)),
        st.just(KeepAll()),
    )
    several = st.lists(simple, min_size=2, max_size=3).map(tuple)
    return st.one_of(simple, several.map(AnyOf), several.map(AllOf))


def checkpoint_infos(max_size: int = 6) -> st.SearchStrategy[list[CheckpointInfo]]:
    """Tracked checkpoints as a policy sees them: oldest first, run time growing with the step."""
    metrics = st.fixed_dictionaries({}, optional={"loss": st.floats(0, 9)})
    entry = st.tuples(steps(), metrics)
    entries = st.lists(entry, max_size=max_size, unique_by=itemgetter(0))
    return entries.map(
        lambda drawn: [
            CheckpointInfo(step, step * 10.0, found)
            for step, found in sorted(drawn, key=itemgetter(0))
        ]
    )
