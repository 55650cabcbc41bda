"""The state of a root as metrics, read from disk without the trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptfsm.core.evidence import Ownership
from ckptfsm.core.lifecycle import State
from ckptfsm.disk.overview import Overview
from ckptfsm.views.reading import Life
from ckptfsm.views.timeline import parse_time, place


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: its name without the unit's total, its help, and a value for each set of labels."""

    name: str
    help: str
    values: tuple[tuple[Mapping[str, str], float], ...]
    counter: bool = False


def metrics_of(
    overview: Overview, lives: Sequence[Life], now: float, free_bytes: int
) -> list[Metric]:
    """The metrics of a root. ``now`` is in seconds since 1970."""
    found = [
        _plain("ckptfsm_free_bytes", "Free space on the disk of the root.", free_bytes),
        _plain(
            "ckptfsm_owner_alive",
            "1 if the owner of the root lives on this host.",
            overview.owner.ownership is Ownership.LIVES,
        ),
        _by_state(overview),
        _failures(lives),
        *_latest(overview, lives, now),
    ]
    return [metric for metric in found if metric.values]


def _plain(name: str, help_: str, value: float) -> Metric:
    return Metric(name, help_, (({}, float(value)),))


def _by_state(overview: Overview) -> Metric:
    count = Counter(c.state.value for c in overview.ledger.checkpoints.values())
    values = tuple(({"state": state}, float(n)) for state, n in sorted(count.items()))
    return Metric("ckptfsm_checkpoints", "Checkpoints of the journal, by state.", values)


def _failures(lives: Sequence[Life]) -> Metric:
    """Failed attempts in the segments that the journal still has."""
    count = Counter(life.reason for life in lives if _failed(life))
    values = tuple(({"reason": reason}, float(n)) for reason, n in sorted(count.items()))
    return Metric("ckptfsm_save_failures", "Failed saves, by reason.", values, counter=True)


def _failed(life: Life) -> bool:
    return any(entry.state is State.FAILED for entry in life.entered)


def _latest(overview: Overview, lives: Sequence[Life], now: float) -> Iterator[Metric]:
    latest = overview.ledger.latest()
    if latest is None:
        return
    yield _plain("ckptfsm_latest_step", "The newest tracked step.", latest.step)
    yield _plain("ckptfsm_latest_bytes", "Bytes of its shards.", latest.shard_bytes)
    life = next((life for life in lives if life.attempt == str(latest.id)), None)
    tracked = [entry for entry in life.entered if entry.state is State.TRACKED] if life else []
    when = parse_time(tracked[0].at) if tracked else None
    if life is None or when is None:
        return
    yield _plain("ckptfsm_latest_tracked_timestamp_seconds", "When it was tracked.", when)
    yield _plain("ckptfsm_latest_age_seconds", "Seconds since then.", max(0.0, now - when))
    spans = [(e.state, stop - start) for e, start, stop in place([life]).lanes[0].spans()]
    values = tuple(
        ({"state": state.value}, lasted) for state, lasted in spans if state is not State.TRACKED
    )
    yield Metric("ckptfsm_latest_state_seconds", "Time of its save in each state.", values)
