"""Errands: requests of people, carried out in the same way on a live and a dead root."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from ckptfsm.core.documents import Asked, Errand
from ckptfsm.core.errors import ConfigError, SaveRefused, StorageError
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.lifecycle import State


class Servant(Protocol):
    """The methods of a coordinator that errands use."""

    @property
    def ledger(self) -> Ledger: ...

    def pin(self, step: int, reason: str) -> None: ...

    def unpin(self, step: int) -> None: ...

    def delete(self, step: int) -> None: ...

    def rollback(self, step: int) -> None: ...

    def given_up(self) -> list[int]: ...

    def retire(self) -> None: ...

    def retention_waits(self) -> str: ...

    def read_here(self) -> frozenset[int]: ...

    def kept_by(self, step: int) -> tuple[str, ...]: ...

    def drop(self, name: str) -> None: ...

    def record_metrics(self, step: int, metrics: Mapping[str, float]) -> None: ...


def carry_out(coordinator: Servant, asked: Asked) -> str:
    """Carry out a request. Returns what was done, in words. Raises the errors of the methods.

    Raises ``SaveRefused`` for a rollback below a step that this job restores from now.
    """
    if errand := _OF_THE_ROOT.get(asked.errand):
        return errand(coordinator, asked)
    if asked.step is None:
        raise ConfigError(f"{asked.errand} needs a step")
    return _AT_A_STEP[asked.errand](coordinator, asked, asked.step)


def _prune(coordinator: Servant, asked: Asked) -> str:
    """Apply the retention policy of the owner now. Raises ``SaveRefused`` if retention waits."""
    given_up = coordinator.given_up()
    if not given_up:
        return "retention keeps every checkpoint"
    named = ", ".join(map(str, given_up))
    if asked.dry:
        waits = coordinator.retention_waits()
        return f"would prune: {named}" + (f"; {waits}" if waits else "")
    coordinator.retire()
    left = {c.step for c in coordinator.ledger.in_state(State.TRACKED, State.PRUNABLE)}
    kept = [step for step in given_up if step in left]
    return f"pruned: {named}" + (f"; not yet: {', '.join(map(str, kept))}" if kept else "")


def _drop(coordinator: Servant, asked: Asked) -> str:
    if asked.name is None:
        raise ConfigError("drop needs a name in quarantine")
    coordinator.drop(asked.name)
    return f"{asked.name} will be deleted"


def _pin(coordinator: Servant, asked: Asked, step: int) -> str:
    coordinator.pin(step, asked.reason)
    return f"step {step} is pinned"


def _unpin(coordinator: Servant, asked: Asked, step: int) -> str:
    was_there = coordinator.ledger.at(step) is not None
    coordinator.unpin(step)
    said = f"step {step} is not pinned any more"
    if was_there and coordinator.ledger.at(step) is None:
        return f"{said}, and retention has given it up"
    waits = coordinator.retention_waits()
    return f"{said}; {waits}" if waits and step in coordinator.given_up() else said


def _prune_step(coordinator: Servant, asked: Asked, step: int) -> str:
    if not asked.dry:
        return prune_step(coordinator, step)
    if kept_by := coordinator.kept_by(step):
        return f"step {step} is kept by: {', '.join(kept_by)}"
    waits = coordinator.retention_waits()
    return f"would prune: {step}" + (f"; {waits}" if waits else "")


def prune_step(coordinator: Servant, step: int) -> str:
    """Delete a step. Raises ``StorageError`` if the disk puts that off."""
    coordinator.delete(step)
    if any(c.step == step for c in coordinator.ledger.in_state(State.PRUNABLE)):
        raise StorageError(f"step {step} is not removed yet: the disk refused", step=step)
    return f"pruned: {step}"


def _record_metrics(coordinator: Servant, asked: Asked, step: int) -> str:
    coordinator.record_metrics(step, asked.metrics)
    told = ", ".join(f"{name} {value:g}" for name, value in sorted(asked.metrics.items()))
    return f"step {step} has: {told}"


def _roll_back(coordinator: Servant, asked: Asked, step: int) -> str:
    later = [each for each in sorted(coordinator.read_here()) if each > step]
    if later:
        raise SaveRefused(f"the job reads step {later[-1]}: ask again after its restore", step=step)
    coordinator.rollback(step)
    return f"step {step} is the latest; later steps are in quarantine"


_OF_THE_ROOT: Mapping[Errand, Callable[[Servant, Asked], str]] = {"prune": _prune, "drop": _drop}
_AT_A_STEP: Mapping[Errand, Callable[[Servant, Asked, int], str]] = {
    "pin": _pin,
    "unpin": _unpin,
    "prune_step": _prune_step,
    "record_metrics": _record_metrics,
    "rollback": _roll_back,
}
