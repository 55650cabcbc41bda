"""A hook that shows its metrics to Prometheus, by a registry of prometheus_client."""

from __future__ import annotations

import logging
import os

from prometheus_client import REGISTRY, CollectorRegistry

from ckptfsm.adapters.clock import SYSTEM
from ckptfsm.adapters.notices import say
from ckptfsm.adapters.prometheus import MetricCollector
from ckptfsm.core import metrics as names
from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.errors import describe
from ckptfsm.core.metrics import Metric
from ckptfsm.core.notes import Meter, Note
from ckptfsm.core.ports import Clock
from ckptfsm.integrations.metrics.measurements import Measurements

log = logging.getLogger("ckptfsm")


class PrometheusMetrics(Meter):
    """Hook: metrics in ``registry``, with the names of ``ckptfsm export``.

    A record costs the training thread no more than a few numbers; the rest is done at a scrape. With
    ``root``, each scrape asks the disk for its free space. Raises ``ValueError`` if the registry has
    these metrics already: ``unregister`` the first hook.
    """

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        *,
        root: str | os.PathLike[str] | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._measurements = Measurements(clock.unix())
        self._clock = clock
        self._root = None if root is None else os.fspath(root)
        self._registry = registry
        self._collector = MetricCollector(self._metrics, names.IN_TRAINER)
        registry.register(self._collector)

    def __call__(self, record: TransitionRecord) -> None:
        self._measurements.take(record)

    def note(self, note: Note) -> None:
        self._measurements.note(note)

    def unregister(self) -> None:
        """Take the metrics out of the registry."""
        self._registry.unregister(self._collector)

    def _metrics(self) -> list[Metric]:
        """All metrics, on the thread of a scrape."""
        return [*self._measurements.metrics(self._clock.unix()), *self._free()]

    def _free(self) -> list[Metric]:
        if self._root is None:
            return []
        try:
            found = os.statvfs(self._root)
        except OSError as error:  # the other metrics are as true without it
            said = f"the free space of {self._root} is not known: {describe(error)}"
            say(log.warning, "free_space_not_known", said, file=self._root, error=describe(error))
            return []
        return [names.FREE_BYTES.of(found.f_bavail * found.f_frsize)]
