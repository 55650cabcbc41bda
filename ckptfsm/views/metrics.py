"""The state of a root as metrics, read from disk without the trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from ckptfsm.core import metrics as names
from ckptfsm.core.documents import JobRecord
from ckptfsm.core.evidence import Ownership
from ckptfsm.core.lifecycle import State
from ckptfsm.core.metrics import Metric
from ckptfsm.core.parts import AttemptId
from ckptfsm.disk.overview import Overview
from ckptfsm.views.listing import AdoptedContents, JobLag
from ckptfsm.views.reading import Life
from ckptfsm.views.timeline import parse_time, place

# A root that nobody has opened, or whose owner cannot be read, is in none of these states.
_OWNER: Mapping[Ownership, str] = MappingProxyType(
    {
        Ownership.LIVES: "alive",
        Ownership.RELEASED: "closed",
        Ownership.ENDED: "crashed",
        Ownership.ELSEWHERE: "elsewhere",
    }
)


def metrics_of(
    overview: Overview,
    lives: Sequence[Life],
    now: float,
    free_bytes: int,
    jobs: Sequence[JobRecord] = (),
    adopted: Mapping[AttemptId, AdoptedContents] = MappingProxyType({}),
    lags: Sequence[JobLag] = (),
) -> list[Metric]:
    """The metrics of a root. ``now`` is in seconds since 1970.

    ``adopted``: what the directories of adopted checkpoints tell. ``lags``: those of jobs that hold.
    """
    states = Counter(c.state.value for c in overview.ledger.checkpoints.values())
    # Failed attempts in the segments that the journal still has.
    failed = [life for life in lives if State.FAILED in {entry.state for entry in life.entered}]
    found = [
        names.FREE_BYTES.of(free_bytes),
        names.OWNER_ALIVE.of(overview.owner.ownership is Ownership.LIVES),
        names.OWNER_STATE.each(
            {state: overview.owner.ownership is each for each, state in _OWNER.items()}
        ),
        names.CHECKPOINTS.each(states),
        names.FAILURES.each(Counter(life.reason for life in failed)),
        names.JOBS.each(Counter(job.state.value for job in jobs)),
        names.HELD.each({lag.job: len(lag.steps) for lag in lags}),
        names.HELD_AGE.each({lag.job: lag.oldest_s or 0.0 for lag in lags}),
        *_latest(overview, lives, now, adopted),
    ]
    return [metric for metric in found if metric.values]


def _latest(
    overview: Overview,
    lives: Sequence[Life],
    now: float,
    adopted: Mapping[AttemptId, AdoptedContents],
) -> Iterator[Metric]:
    latest = overview.ledger.latest()
    if latest is None:
        return
    told = adopted.get(latest.id)
    yield names.LATEST_STEP.of(latest.step)
    yield names.LATEST_BYTES.of(latest.shard_bytes if told is None else told.bytes)
    life = next((life for life in lives if life.attempt == str(latest.id)), None)
    tracked = [entry for entry in life.entered if entry.state is State.TRACKED] if life else []
    at = tracked[0].at if tracked else ""
    when = parse_time(told.written_at if told is not None and told.written_at else at)
    if life is None or when is None:
        return
    yield names.LATEST_TRACKED.of(when)
    yield names.LATEST_AGE.of(max(0.0, now - when))
    spans = place([life]).lanes[0].spans()
    lasted: dict[State, float] = {e.state: stop - start for e, start, stop in spans}
    lasted.pop(State.TRACKED, None)
    yield names.LATEST_STATES.each({state.value: seconds for state, seconds in lasted.items()})
    writing = names.seconds_of_writing(lasted)
    if writing > 0:
        yield names.LATEST_RATE.of(latest.shard_bytes / writing)
