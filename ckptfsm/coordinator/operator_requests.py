"""Operator requests, carried out in the same way on a live and a dead root."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptfsm.core.documents import Asked
from ckptfsm.core.errors import ConfigError, SaveRefused, StorageError
from ckptfsm.core.lifecycle import State

if TYPE_CHECKING:
    from ckptfsm.coordinator.coordinator import Coordinator


def carry_out(coordinator: Coordinator, asked: Asked) -> str:
    """Carry out a request. Returns what was done, in words. Raises the errors of the methods.

    Raises ``SaveRefused`` for a rollback below a step that this job restores from now.
    """
    step, dry = asked.step, asked.dry
    if asked.errand == "prune":
        return _prune(coordinator, dry=dry)
    if asked.errand == "drop":
        if asked.name is None:
            raise ConfigError("drop needs a name in quarantine")
        coordinator.discard_quarantined(asked.name)
        return f"{asked.name} will be deleted"
    if step is None:
        raise ConfigError(f"{asked.errand} needs a step")
    match asked.errand:
        case "pin":
            coordinator.pin(step, asked.reason)
            return f"step {step} is pinned"
        case "unpin":
            return _unpin(coordinator, step)
        case "prune_step":
            return _would_prune_step(coordinator, step) if dry else prune_step(coordinator, step)
        case "record_metrics":
            coordinator.record_metrics(step, asked.metrics)
            told = ", ".join(f"{name} {value:g}" for name, value in sorted(asked.metrics.items()))
            return f"step {step} has: {told}"
        case "rollback":
            return _roll_back(coordinator, step)


def _prune(coordinator: Coordinator, *, dry: bool) -> str:
    """Apply the retention policy of the owner now. Raises ``SaveRefused`` if retention waits."""
    to_prune = coordinator.steps_to_prune()
    if not to_prune:
        return "retention keeps every checkpoint"
    named = ", ".join(map(str, to_prune))
    if dry:
        return f"would prune: {named}{_unless_it_waits(coordinator)}"
    coordinator.apply_retention()
    left = {c.step for c in coordinator.ledger.in_state(State.TRACKED, State.PRUNABLE)}
    kept = [step for step in to_prune if step in left]
    return f"pruned: {named}" + (f"; not yet: {', '.join(map(str, kept))}" if kept else "")


def _unless_it_waits(coordinator: Coordinator) -> str:
    waits = coordinator.retention_waits()
    return f"; {waits}" if waits else ""


def _unpin(coordinator: Coordinator, step: int) -> str:
    was_there = coordinator.ledger.at(step) is not None
    coordinator.unpin(step)
    said = f"step {step} is not pinned any more"
    if was_there and coordinator.ledger.at(step) is None:
        return f"{said}, and retention has given it up"
    return said + (_unless_it_waits(coordinator) if step in coordinator.steps_to_prune() else "")


def _would_prune_step(coordinator: Coordinator, step: int) -> str:
    if kept_by := coordinator.kept_by(step):
        return f"step {step} is kept by: {', '.join(kept_by)}"
    return f"would prune: {step}{_unless_it_waits(coordinator)}"


def prune_step(coordinator: Coordinator, step: int) -> str:
    """Delete a step. Raises ``StorageError`` if the disk puts that off."""
    coordinator.delete(step)
    if any(c.step == step for c in coordinator.ledger.in_state(State.PRUNABLE)):
        raise StorageError(f"step {step} is not removed yet: the disk refused", step=step)
    return f"pruned: {step}"


def _roll_back(coordinator: Coordinator, step: int) -> str:
    later = [each for each in sorted(coordinator.read_here()) if each > step]
    if later:
        raise SaveRefused(f"the job reads step {later[-1]}: ask again after its restore", step=step)
    coordinator.rollback(step)
    return f"step {step} is the latest; later steps are in quarantine"
