"""The public API as a typed trainer uses it. Checked by ``mypy --strict``, never executed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import ckptfsm
from ckptfsm import (
    AllOf,
    AnyOf,
    BestN,
    CheckpointConfig,
    CheckpointInfo,
    CheckpointManager,
    EveryNSeconds,
    EveryNSteps,
    ForeignRequest,
    KeepAll,
    LatestN,
    Policy,
    Restored,
    SaveHandle,
    State,
    Steps,
    TransitionRecord,
    load_config,
)
from ckptfsm.core.errors import (
    CkptFsmError,
    DeadlineExceeded,
    SaveFailed,
    SaveRefused,
    StepNotFoundError,
)


class KeepPrimes(Policy):
    def preserve(self, checkpoints: Sequence[CheckpointInfo]) -> Collection[int]:
        return {c.step for c in checkpoints if c.step in (2, 3, 5) and c.metrics.get("loss", 0) < 1}


def on_transition(record: TransitionRecord) -> None:
    step: int = record.step
    dest: State = record.dest
    print(step, dest.value, record.reason, record.at)


def configure(path: Path) -> CheckpointConfig:
    kept: Policy = LatestN(3) | EveryNSteps(1000) & EveryNSeconds(3600.0)
    every: list[Policy] = [KeepAll(), Steps([1, 2]), BestN("loss", 2, "max"), KeepPrimes()]
    policy = AnyOf((kept, AllOf(tuple(every))))
    config = CheckpointConfig(
        retention=policy,
        save_interval_steps=100,
        save_steps=frozenset({1}),
        save_interval_s=600.0,
        preemption_signals=("SIGTERM",),
        on_failure=3,
        on_busy="skip",
        resume="strict",
        verify="sizes",
    )
    return config if config.sync else load_config(path, table="ckptfsm")


def train(root: Path, state: dict[str, Any], steps: int) -> None:
    with CheckpointManager(root, configure(root / "run.toml"), hooks=[on_transition]) as manager:
        restored: Restored | None = manager.restore(state)
        first: int = restored.step + 1 if restored is not None else 0
        for step in range(first, steps):
            if manager.should_save(step):
                handle: SaveHandle = manager.save(step, state, metrics={"loss": 0.5})
                watch(handle)
            manager.poll()
        manager.wait_until_finished(timeout_s=60.0)


def watch(handle: SaveHandle) -> State | None:
    error: CkptFsmError | None = handle.exception()
    if handle.skipped or handle.done or error is not None:
        return handle.state
    blocked_by: CkptFsmError | None = handle.blocked_by
    print(blocked_by)
    try:
        return handle.wait(timeout_s=5.0).state
    except SaveFailed as failed:
        kind: str = failed.kind
        print(kind, failed.advice, failed.facts)
    except DeadlineExceeded:
        pass
    return None


def several_parts(manager: CheckpointManager, request: object, parts: Mapping[str, Any]) -> None:
    try:
        manager.save(
            7, parts={**parts, "notes.txt": b"hello", "optimizer": ForeignRequest(request=request)}
        )
    except SaveRefused:
        manager.request_save()
    found: Restored | None = manager.restore(parts=parts, step=7)
    if found is not None:
        names: dict[str, Any] = found.parts
        dropped: tuple[str, ...] = found.dropped
        unused: tuple[str, ...] = found.unused
        directory: str = found.directory
        print(names, dropped, unused, directory, found.state)


def look_after(manager: CheckpointManager) -> list[int]:
    latest: int | None = manager.latest_step()
    said: str = manager.explain(7)
    print(said)
    if latest is not None:
        manager.record_metrics(latest, {"accuracy": 0.7})
        manager.pin(latest, "the good one")
        manager.unpin(latest)
    try:
        manager.delete(1)
        manager.rollback(2)
    except StepNotFoundError:
        manager.abandon()
    report = manager.recovery
    if report is not None and report.latest_step is None:
        print(report.epoch, report.decisions, report.warnings, report.seconds)
    preempted: bool = manager.preempted
    size: tuple[int, int] = (manager.rank, manager.world_size)
    steps: list[int] = manager.all_steps()
    best: int | None = manager.best_step("accuracy", "max")
    if best is not None:
        measured: dict[str, float] = manager.metrics(best)
        where: Path = manager.path(best)
        print(measured, where)
    manager.close()
    return steps if not preempted else [*steps, *size]


def evaluate(root: Path) -> list[tuple[str, str]]:
    with ckptfsm.wait_for_new_checkpoint(root, after=40, timeout_s=5.0) as lease:
        last: str = lease.attempt
    return [(each.attempt, each.path) for each in ckptfsm.checkpoints(root, last, newest_only=True)]


def keyword_settings(root: str) -> CheckpointManager:
    return ckptfsm.CheckpointManager(root, save_interval_steps=10, on_busy="raise")


def misspelt_settings(root: str) -> CheckpointManager:
    return CheckpointManager(root, save_interval_step=10)  # type: ignore[call-arg]


def a_setting_of_another_kind(root: str) -> CheckpointManager:
    return CheckpointManager(root, on_busy="ignore")  # type: ignore[arg-type]
