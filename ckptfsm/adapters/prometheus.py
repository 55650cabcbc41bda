"""Metrics in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest

from ckptfsm.views.metrics import Metric

_Family = GaugeMetricFamily | CounterMetricFamily


def text_of(metrics: Sequence[Metric]) -> str:
    registry = CollectorRegistry()
    registry.register(_Collector(metrics))
    return generate_latest(registry).decode()


class _Collector:
    """Gives metrics that were read from disk to prometheus_client."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[_Family]:
        return [_family(metric) for metric in self._metrics]


def _family(metric: Metric) -> _Family:
    labels = list(metric.values[0][0])
    kind = CounterMetricFamily if metric.counter else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=labels)
    for values, value in metric.values:
        family.add_metric([values[label] for label in labels], value)
    return family
