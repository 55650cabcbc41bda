"""The names of all metrics, in a trainer and in ``ckptfsm export``. A name that was released stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptfsm.core.lifecycle import State


def shown(name: str, counter: bool) -> str:
    """The name of a metric as Prometheus shows it."""
    return f"{name}_total" if counter else name


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: its name without ``_total``, its help, and a value for each set of labels."""

    name: str
    help: str
    values: tuple[tuple[Mapping[str, str], float], ...]
    counter: bool = False

    @property
    def shown(self) -> str:
        """The name as Prometheus shows it."""
        return shown(self.name, self.counter)


@dataclass(frozen=True, slots=True)
class Family:
    """The name and the meaning of a metric. ``label`` is the name of its label, or ""."""

    name: str
    help: str
    label: str = ""
    counter: bool = False

    @property
    def shown(self) -> str:
        """The name as Prometheus shows it."""
        return shown(self.name, self.counter)

    def of(self, value: float) -> Metric:
        """The metric with its only value."""
        return Metric(self.name, self.help, (({}, float(value)),), self.counter)

    def each(self, values: Mapping[str, float]) -> Metric:
        """The metric with a value for each value of its label."""
        rows = tuple(({self.label: key}, float(value)) for key, value in sorted(values.items()))
        return Metric(self.name, self.help, rows, self.counter)


def text_of(metrics: Sequence[Metric], common: Mapping[str, str]) -> str:
    """The text format of Prometheus, with the labels ``common`` at every value."""
    lines: list[str] = []
    for metric in metrics:
        kind = "counter" if metric.counter else "gauge"
        lines += [
            f"# HELP {metric.shown} {metric.help}",
            f"# TYPE {metric.shown} {kind}",
            *(
                f"{metric.shown}{_labels_of({**common, **labels})} {value!r}"
                for labels, value in metric.values
            ),
        ]
    return "".join(f"{line}\n" for line in lines)


def _labels_of(labels: Mapping[str, str]) -> str:
    told = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items())
    return f"{{{told}}}" if told else ""


_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})

LATEST_STEP = Family("ckptfsm_latest_step", "The newest tracked step.")
LATEST_BYTES = Family("ckptfsm_latest_bytes", "Bytes of its shards.")
LATEST_RATE = Family(
    "ckptfsm_latest_bytes_per_second",
    "Bytes of its shards, divided by the time from its request until all were durable.",
)
LATEST_TRACKED = Family("ckptfsm_latest_tracked_timestamp_seconds", "When it was tracked.")
LATEST_AGE = Family("ckptfsm_latest_age_seconds", "Seconds since then.")
LATEST_STATES = Family(
    "ckptfsm_latest_state_seconds", "Time of its save in each state.", label="state"
)
LATEST_STALL = Family(
    "ckptfsm_latest_stall_seconds", "Time that the newest save kept this rank's trainer waiting."
)
STALL = Family(
    "ckptfsm_stall_seconds", "Time that saves kept this rank's trainer waiting.", counter=True
)
TRACKED = Family("ckptfsm_saves_tracked", "Saves that were tracked.", counter=True)
FAILURES = Family("ckptfsm_save_failures", "Failed saves, by reason.", "reason", counter=True)
REFUSED = Family("ckptfsm_saves_refused", "Saves that were not accepted.", "kind", counter=True)
UNPOLLED = Family(
    "ckptfsm_unpolled_warnings",
    "Warnings that a save is in flight and poll() is not called.",
    counter=True,
)
FREE_BYTES = Family("ckptfsm_free_bytes", "Free space on the disk of the root.")
OWNER_ALIVE = Family("ckptfsm_owner_alive", "1 if the owner of the root lives on this host.")
OWNER_STATE = Family(
    "ckptfsm_owner_state",
    "1 for the state of the owner of the root: alive, closed, crashed or elsewhere.",
    "state",
)
CHECKPOINTS = Family("ckptfsm_checkpoints", "Checkpoints of the journal, by state.", "state")
JOBS = Family("ckptfsm_jobs", "Records of the jobs of on_tracked, by state.", "state")
HELD = Family(
    "ckptfsm_held_checkpoints", "Checkpoints that a job holds, as it is not done for them.", "job"
)
HELD_AGE = Family(
    "ckptfsm_held_oldest_seconds", "Seconds since the oldest of these was tracked.", "job"
)

_IN_BOTH = (
    LATEST_STEP,
    LATEST_BYTES,
    LATEST_RATE,
    LATEST_TRACKED,
    LATEST_AGE,
    LATEST_STATES,
    FAILURES,
    FREE_BYTES,
)
IN_EXPORT = (*_IN_BOTH, OWNER_ALIVE, OWNER_STATE, CHECKPOINTS, JOBS, HELD, HELD_AGE)
IN_TRAINER = (*_IN_BOTH, LATEST_STALL, STALL, TRACKED, REFUSED, UNPOLLED)


def seconds_of_writing(states: Mapping[State, float]) -> float:
    """The time from the request of a save until all of its shards were durable."""
    return states.get(State.REQUESTED, 0.0) + states.get(State.FORKED, 0.0)
