"""A hook that tells OpenTelemetry of each save: one span, and one child span for each state."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.context import Context

from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.lifecycle import State
from ckptfsm.core.notes import Meter, Note
from ckptfsm.integrations.metrics.measurements import EndedSave, Measurements


class CheckpointSpans(Meter):
    """Hook for rank 0: a trace for each save, made when the save has ended.

    ``tracer`` is one of opentelemetry-api, by default that of the global provider. Give its provider
    a ``BatchSpanProcessor``: a processor that exports at once would keep the trainer waiting.
    """

    def __init__(self, tracer: trace.Tracer | None = None) -> None:
        self._tracer = tracer or trace.get_tracer("ckptfsm")
        self._measurements = Measurements(0.0)

    def __call__(self, record: TransitionRecord) -> None:
        ended = self._measurements.take(record)
        if ended is not None and ended.states:
            self._tell(ended)

    def note(self, note: Note) -> None:
        self._measurements.note(note)

    def _tell(self, ended: EndedSave) -> None:
        record, states = ended.record, ended.states
        attributes: dict[str, str | int | float] = {
            "ckptfsm.step": record.step,
            "ckptfsm.attempt": str(record.of),
            "ckptfsm.bytes": record.shard_bytes,
        }
        if ended.stall_s is not None:
            attributes["ckptfsm.stall_seconds"] = ended.stall_s
        if record.reason:
            attributes["ckptfsm.reason"] = record.reason
        if record.rank is not None:
            attributes["ckptfsm.rank"] = record.rank
        whole = self._tracer.start_span(
            "ckptfsm.save",
            context=Context(),  # not a part of the training step that hears of its end
            attributes=attributes,
            start_time=_nanoseconds(states[0][1]),
        )
        inside = trace.set_span_in_context(whole, Context())
        for state, start, stop in states:
            part = self._tracer.start_span(
                f"ckptfsm.{state.value}",
                context=inside,
                start_time=_nanoseconds(start),
            )
            part.end(_nanoseconds(stop))
        if record.dest is not State.TRACKED:
            said = f"{record.dest.value}: {record.reason}: {record.detail}"
            whole.set_status(trace.Status(trace.StatusCode.ERROR, said))
        whole.end(_nanoseconds(states[-1][2]))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e6) * 1000
