"""Ledgers as a journal would leave them, and the files that may lie beside them on disk."""

from __future__ import annotations

from dataclasses import replace

from ckptfsm.core.evidence import Evidence, PublishedEvidence, StagingEvidence, TrackerEvidence
from ckptfsm.core.ledger import KnownCheckpoints, Ledger
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.parts import AttemptId, PartSpec

PARTS = (PartSpec("state"),)
MISSING = TrackerEvidence("missing")
TORN = TrackerEvidence("torn")


def at(step: int, epoch: int = 1, attempt: int = 1) -> AttemptId:
    return AttemptId(step, epoch, attempt)


def checkpoint(step: int, state: State, **fields) -> Checkpoint:
    """The first attempt at ``step``, by two ranks."""
    return Checkpoint(at(step), state, PARTS, 2, **fields)


def ledger_of(*checkpoints: Checkpoint, base: Ledger | None = None) -> Ledger:
    """``base`` with these checkpoints in it, each as it is."""
    base = base or Ledger()
    there = {**base.checkpoints, **{each.id: each for each in checkpoints}}
    return replace(base, checkpoints=KnownCheckpoints(there))


def names(step: int) -> TrackerEvidence:
    return TrackerEvidence("step", step)


def whole(step: int, of: AttemptId | None = None) -> PublishedEvidence:
    return PublishedEvidence(step, "manifest", of or at(step), run_seconds=step * 1.0)


def stock(step: int) -> PublishedEvidence:
    return PublishedEvidence(step, "stock")


def damaged(step: int) -> PublishedEvidence:
    return PublishedEvidence(step, "damaged", at(step), detail=f"shard of {step} is gutted")


def unexplained(step: int) -> PublishedEvidence:
    return PublishedEvidence(step, "unexplained", detail="no metadata")


def evidence(
    tracker: TrackerEvidence,
    *published: PublishedEvidence,
    staging: dict[AttemptId, StagingEvidence] | None = None,
    **fields,
) -> Evidence:
    return Evidence(tracker, {p.step: p for p in published}, staging or {}, **fields)
