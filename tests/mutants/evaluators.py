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
        why="retention keeps a step for a metric that a restart does not know",
    ),
    mutant(
        "metrics-are-forgotten-by-a-restart",
        "disk.journal:_replay",
        "replay_metrics(checkpoints, record, file, index)",
        "pass",
        breaks="I11",
        source="I11",
    ),
    mutant(
        "metrics-prune-before-the-latest-was-read",
        "coordinator.coordinator:Coordinator.record_metrics",
        "if not self.retention_waits():",
        "if True:",
        breaks="I2",
        source="I2",
        why="the last good checkpoint goes, and then the latest turns out to be damaged",
    ),
    mutant(
        "a-step-that-comes-again-is-known",
        "follow.evaluators:_Evaluator.hear",
        "if c.id not in self._known and c.step > self._floor",
        "if c.step not in {of.step for of in self._known} and c.step > self._floor",
        breaks="I2",
        source="order",
        why="the evaluator is silent until the job is beyond the step that it has seen",
    ),
    mutant(
        "a-step-above-the-tracker-is-given",
        "follow.evaluators:_up_to",
        "return [c for c in found if c.step == named or (c.step < named and c.state is State.TRACKED)]",
        "return found",
        breaks="I2",
        source="order",
        why="the files are moved away under the reader",
    ),
    mutant(
        "the-newest-is-passed-over-where-it-shows-late",
        "follow.evaluators:_Evaluator.waits_for",
        "return checkpoint.step == self._named",
        "return False",
        breaks="F9",
        source="F9",
    ),
    mutant(
        "a-reader-takes-another-runs-directory",
        "disk.reader_lease:ReaderLease.__enter__",
        "self._compare()",
        "pass",
        breaks="I2",
        source="review",
        why="both runs have one schedule, so their attempts have the same names",
    ),
    mutant(
        "a-lease-that-a-long-body-outlives",
        "follow.evaluators:_each",
        "held.enter_context(_renewed(lease, renew_s))",
        "pass",
        breaks="I7",
        source="F14",
        why="the step is pruned while it is evaluated",
    ),
    mutant(
        "a-lease-that-outlives-its-body",
        "follow.evaluators:_each",
        "held.push(lease)",
        "pass",
        breaks="I7",
        source="order",
        why="each step that was evaluated stays until its lease expires",
    ),
)
