"""Mutants of the work with evaluators: metrics that come late, and the watch for new checkpoints."""

from __future__ import annotations

from mutants.loader import mutant

MUTANTS = (
    mutant(
        "measured-before-it-is-journaled",
        "coordinator.engine:Engine.record_metrics",
        "ledger = self.ledger.measured(of, metrics)",
        "ledger = self.ledger = self.ledger.measured(of, metrics)",
        breaks="I11",
        source="order",
        killers=("tests:metrics/metrics_that_the_disk_refuses_are_not_there",),
        why="retention keeps a step for a metric that a restart does not know",
    ),
    mutant(
        "metrics-are-forgotten-by-a-restart",
        "disk.journal:_replay",
        "_replay_metrics(checkpoints, record, file, index)",
        "pass",
        breaks="I11",
        source="I11",
        killers=("tests:metrics/a_checkpoint_that_validates_best_later_is_kept", "traces"),
    ),
    mutant(
        "metrics-prune-before-the-latest-was-read",
        "coordinator.coordinator:Coordinator.record_metrics",
        "if self._is_proven(self._engine.ledger.latest()):",
        "if True:",
        breaks="I2",
        source="I2",
        killers=("tests:metrics/metrics_prune_nothing_before_the_latest_was_read",),
        why="the last good checkpoint goes, and then the latest turns out to be damaged",
    ),
)
