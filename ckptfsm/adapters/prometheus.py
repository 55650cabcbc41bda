"""Metrics for prometheus_client: as families of a registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ckptfsm.core.metrics import Family, Metric

_PrometheusFamily = GaugeMetricFamily | CounterMetricFamily


class MetricCollector(Collector):
    """Asks ``metrics`` at each scrape. A registry refuses a second one of the same ``families``."""

    def __init__(
        self, metrics: Callable[[], Iterable[Metric]], families: Sequence[Family] = ()
    ) -> None:
        self._metrics = metrics
        self._families = families

    def describe(self) -> Iterator[_PrometheusFamily]:
        for family in self._families:
            yield _kind(family)(family.name, family.help)

    def collect(self) -> Iterator[_PrometheusFamily]:
        for metric in self._metrics():
            labels = list(metric.values[0][0])
            found = _kind(metric)(metric.name, metric.help, labels=labels)
            for values, value in metric.values:
                found.add_metric([values[label] for label in labels], value)
            yield found


def _kind(metric: Metric | Family) -> type[CounterMetricFamily] | type[GaugeMetricFamily]:
    return CounterMetricFamily if metric.counter else GaugeMetricFamily
