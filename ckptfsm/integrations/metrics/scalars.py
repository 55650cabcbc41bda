"""Hooks that write a point to a plot at the end of each save: TensorBoard, Weights & Biases.

Both writers are known by their methods alone; neither package is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.metrics import Metric
from ckptfsm.core.notes import Meter, Note, Stalled
from ckptfsm.integrations.metrics.measurements import Measurements


class ScalarWriter(Protocol):
    """The method of ``torch.utils.tensorboard.SummaryWriter`` that is called."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> Any: ...


class WandbRun(Protocol):
    """The methods of ``wandb.Run`` that are called."""

    def define_metric(self, name: str, *, step_metric: str) -> Any: ...

    def log(self, data: dict[str, Any], *, commit: bool) -> Any: ...


class _Points(Meter):
    """Base class: a point is the values of a save's end, or of a call that no save is in flight for."""

    def __init__(self) -> None:
        self._measurements = Measurements(0.0)

    def __call__(self, record: TransitionRecord) -> None:
        ended = self._measurements.take(record)
        if ended is not None:
            self._write(record.step, scalars_of(ended.metrics))

    def note(self, note: Note) -> None:
        metrics = self._measurements.note(note)
        if metrics and isinstance(note, Stalled):
            self._write(note.step, scalars_of(metrics))

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        raise NotImplementedError


class TensorBoardScalars(_Points):
    """Hook: the end of each save as points of ``add_scalar(tag, value, step)``."""

    def __init__(self, writer: ScalarWriter) -> None:
        super().__init__()
        self._writer = writer

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)


class WandbScalars(_Points):
    """Hook: the end of each save as one ``log`` of a run of Weights & Biases.

    A save is tracked some steps after its step. W&B ignores a ``step`` that lies behind, so the step
    is a value, ``ckptfsm/step``, which is defined as the axis of the others. The point joins the row
    that W&B has open.
    """

    def __init__(self, run: WandbRun) -> None:
        super().__init__()
        self._run = run
        run.define_metric("ckptfsm/*", step_metric="ckptfsm/step")

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"ckptfsm/step": step, **values}, commit=False)


def scalars_of(metrics: Iterable[Metric]) -> dict[str, float]:
    """The values by their tags: ``ckptfsm_latest_state_seconds{state="forked"}`` becomes
    ``ckptfsm/latest_state_seconds/forked``.
    """
    return {
        "/".join((metric.shown.replace("_", "/", 1), *labels.values())): value
        for metric in metrics
        for labels, value in metric.values
    }
