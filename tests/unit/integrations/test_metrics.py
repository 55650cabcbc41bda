"""Hooks that tell metrics: the numbers are those of the records, and training is never disturbed."""

from __future__ import annotations

import json
import os

import pytest
from fakes import FakeDriver, fake_ports
from managers import QUICK, weights
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from prometheus_client import CollectorRegistry

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.core.config import make_config
from ckptfsm.core.documents import TransitionRecord
from ckptfsm.core.lifecycle import State
from ckptfsm.core.metrics import IN_TRAINER
from ckptfsm.core.notes import Refused, Stalled, Unpolled
from ckptfsm.integrations.metrics.json_lines import JsonLines
from ckptfsm.integrations.metrics.measurements import Measurements
from ckptfsm.integrations.metrics.prometheus import PrometheusMetrics
from ckptfsm.integrations.metrics.scalars import TensorBoardScalars, WandbScalars, scalars_of
from ckptfsm.integrations.metrics.spans import CheckpointSpans
from ckptfsm.ranks.manager import Manager

S = State
MINUTE = 1767225600.0  # 2026-01-01T00:00:00+00:00
LIFE = (S.ABSENT, S.REQUESTED, S.FORKED, S.SHARDS_WRITTEN, S.FINALIZED, S.TRACKED)


def record(step: int, source: State, dest: State, second: float | None, **fields: object):
    at = "" if second is None else f"2026-01-01T00:00:{second:06.3f}+00:00"
    return TransitionRecord(
        seq=0,
        step=step,
        epoch=1,
        attempt=1,
        event="x",
        source=source,
        dest=dest,
        at=at,
        shard_bytes=fields.pop("shard_bytes", 6000),
        **fields,
    )


def life(step: int, *seconds: float | None) -> list[TransitionRecord]:
    """The records of a save from its request on, as far as there are ``seconds``."""
    moves = zip(LIFE, LIFE[1:], seconds, strict=False)
    return [record(step, source, dest, second) for source, dest, second in moves]


def failed(step: int, second: float, source: State = S.FORKED) -> TransitionRecord:
    return record(step, source, S.FAILED, second, reason="writer_died", detail="killed", rank=3)


def told(hook, *facts) -> None:
    for fact in facts:
        hook(fact) if isinstance(fact, TransitionRecord) else hook.note(fact)


def shown(measurements: Measurements, now: float) -> dict[str, float]:
    return scalars_of(measurements.metrics(now))


class StoppedClock(SystemClock):
    """A wall clock that says ``at`` seconds after a full minute."""

    at = 0.0

    def unix(self) -> float:
        return MINUTE + self.at

    def wall(self) -> str:
        return "then"


# ------------------------------------------------------------------------------------ the numbers


def test_a_tracked_save_has_its_times_bytes_and_stall():
    """Catches: a time that is counted for the next state, a rate over the whole save."""
    found = Measurements(MINUTE)
    first, *rest, last = life(10, 1.0, 3.0, 4.0, 4.5, 4.75)
    for each in (first, *rest):
        assert found.take(each) is None
    assert found.note(Stalled(10, 0.25)) == ()
    assert found.note(Stalled(10, 0.5)) == ()
    ended = found.take(last)
    assert [(state, stop - start) for state, start, stop in ended.states] == [
        (S.REQUESTED, 2.0),
        (S.FORKED, 1.0),
        (S.SHARDS_WRITTEN, 0.5),
        (S.FINALIZED, 0.25),
    ]
    assert scalars_of(ended.metrics) == {
        "ckptfsm/latest_bytes": 6000,
        "ckptfsm/latest_bytes_per_second": 2000.0,
        "ckptfsm/latest_stall_seconds": 0.75,
        "ckptfsm/latest_state_seconds/requested": 2.0,
        "ckptfsm/latest_state_seconds/forked": 1.0,
        "ckptfsm/latest_state_seconds/shards_written": 0.5,
        "ckptfsm/latest_state_seconds/finalized": 0.25,
        "ckptfsm/saves_tracked_total": 1,
        "ckptfsm/stall_seconds_total": 0.75,
        "ckptfsm/unpolled_warnings_total": 0,
    }
    now = shown(found, MINUTE + 64.75)
    assert now["ckptfsm/latest_step"] == 10
    assert now["ckptfsm/latest_age_seconds"] == 60.0
    assert now["ckptfsm/latest_tracked_timestamp_seconds"] == MINUTE + 4.75


def test_failures_are_counted_by_reason_and_leave_the_latest():
    """Catches: a failed save that hides the age, or the size, of the tracked one before."""
    found = Measurements(MINUTE)
    told_of = [*life(10, 1, 2, 3, 4, 5), *life(20, 11, 12), failed(20, 13)]
    ended = [found.take(each) for each in told_of][-1]
    assert scalars_of(ended.metrics)["ckptfsm/save_failures_total/writer_died"] == 1
    assert "ckptfsm/latest_bytes" not in scalars_of(ended.metrics)
    found.take(failed(30, 20, S.REQUESTED))  # of the run before: its request was not seen
    now = shown(found, MINUTE + 25)
    assert now["ckptfsm/save_failures_total/writer_died"] == 2
    assert (now["ckptfsm/latest_step"], now["ckptfsm/latest_age_seconds"]) == (10, 20.0)


def test_a_trainer_without_a_tracked_save_has_the_age_of_its_start():
    """Catches: an alert that never fires in a job that cannot save at all."""
    now = shown(Measurements(MINUTE), MINUTE + 4000)
    assert now["ckptfsm/latest_age_seconds"] == 4000
    assert "ckptfsm/latest_step" not in now
    assert "ckptfsm/latest_tracked_timestamp_seconds" not in now


@pytest.mark.parametrize("seconds", [(5, 3, 4, 6, 6), (5, None, None, 6, None)])
def test_a_clock_that_steps_back_gives_no_negative_time(seconds):
    """Catches: a negative time, or a missing one that is taken for 1970."""
    found = Measurements(MINUTE)
    *_, ended = [found.take(each) for each in life(10, *seconds)]
    assert [stop - start for _, start, stop in ended.states] == [0, 0, 1, 0]
    assert shown(found, MINUTE + 7)["ckptfsm/latest_age_seconds"] == 1


def test_records_without_a_time_still_count():
    """Catches: a journal of another clock, at which a hook fails."""
    found = Measurements(MINUTE)
    *_, ended = [found.take(each) for each in life(10, *[None] * 5)]
    assert ended.states == ()
    now = shown(found, MINUTE + 9)
    assert now["ckptfsm/latest_step"] == 10 and now["ckptfsm/saves_tracked_total"] == 1
    assert not any(name.startswith("ckptfsm/latest_state") for name in now)


def test_an_adopted_checkpoint_is_no_save():
    found = Measurements(MINUTE)
    assert found.take(record(10, S.ABSENT, S.TRACKED, 1)) is None
    assert found.take(record(10, S.PRUNABLE, S.TRACKED, 1)) is None
    assert shown(found, MINUTE)["ckptfsm/saves_tracked_total"] == 0


def test_a_rollback_forgets_the_step_but_not_the_age():
    """Catches: a latest step that is in quarantine; an age that begins anew by a rollback."""
    found = Measurements(MINUTE)
    told_of = [*life(10, 1, 2, 3, 4, 5), record(9, S.TRACKED, S.QUARANTINED, 6)]
    for each in told_of:
        found.take(each)
    assert shown(found, MINUTE + 7)["ckptfsm/latest_step"] == 10
    found.take(record(10, S.TRACKED, S.QUARANTINED, 8))
    now = shown(found, MINUTE + 9)
    assert "ckptfsm/latest_step" not in now and "ckptfsm/latest_bytes" not in now
    assert now["ckptfsm/latest_age_seconds"] == 4


def test_a_save_that_is_withdrawn_in_flight_is_not_tracked():
    found = Measurements(MINUTE)
    records = [*life(10, 1, 2, 3, 4), record(10, S.FINALIZED, S.QUARANTINED, 5, reason="rollback")]
    *_, ended = [found.take(each) for each in records]
    assert ended.record.dest is S.QUARANTINED
    now = shown(found, MINUTE + 5)
    assert now["ckptfsm/saves_tracked_total"] == 0
    assert not any("failures" in name for name in now)


def test_notes_are_counted():
    """Catches: a refusal under the wrong kind, a stall of no save that is lost."""
    found = Measurements(MINUTE)
    assert found.note(Refused("no_room")) == found.note(Refused("no_room")) == ()
    found.note(Refused("step_exists"))
    found.note(Unpolled())
    told_now = scalars_of(found.note(Stalled(10, 1.5)))
    assert told_now == {"ckptfsm/latest_stall_seconds": 1.5, "ckptfsm/stall_seconds_total": 1.5}
    now = shown(found, MINUTE)
    assert now["ckptfsm/saves_refused_total/no_room"] == 2
    assert now["ckptfsm/saves_refused_total/step_exists"] == 1
    assert now["ckptfsm/unpolled_warnings_total"] == 1


# --------------------------------------------------------------------------------------- the hooks


def test_prometheus_shows_the_names_of_the_table(tmp_path):
    """Catches: a metric that the table does not have, an age that stands still between saves."""
    registry, clock = CollectorRegistry(), StoppedClock()
    hook = PrometheusMetrics(registry, root=tmp_path, clock=clock)
    told(hook, *life(10, 1, 2, 3, 4, 5), Stalled(10, 0.5), Refused("no_room"))
    told(hook, *life(20, 6, 7), failed(20, 8))
    names = {family.name for family in registry.collect()}
    assert names == {family.name for family in IN_TRAINER}
    values = {"reason": "writer_died"}
    assert registry.get_sample_value("ckptfsm_save_failures_total", values) == 1
    assert registry.get_sample_value("ckptfsm_free_bytes") > 0
    clock.at = 65.0
    assert registry.get_sample_value("ckptfsm_latest_age_seconds") == 60.0
    clock.at = 66.0
    assert registry.get_sample_value("ckptfsm_latest_age_seconds") == 61.0


def test_a_registry_refuses_a_second_hook_until_the_first_is_unregistered():
    """Catches: two series with one name, for which Prometheus refuses the whole scrape."""
    registry = CollectorRegistry(auto_describe=True)
    first = PrometheusMetrics(registry)
    with pytest.raises(ValueError, match="Duplicated"):
        PrometheusMetrics(registry)
    first.unregister()
    PrometheusMetrics(registry)


def test_a_root_that_is_gone_leaves_the_other_metrics(tmp_path, caplog):
    """Catches: a scrape that fails as a whole because the disk does."""
    registry = CollectorRegistry()
    told(PrometheusMetrics(registry, root=tmp_path / "gone"), *life(10, 1, 2, 3, 4, 5))
    assert registry.get_sample_value("ckptfsm_latest_step") == 10
    assert registry.get_sample_value("ckptfsm_free_bytes") is None
    assert {r.event for r in caplog.records} == {"free_space_not_known"}


@pytest.fixture
def exported():
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("train"), exporter.get_finished_spans


def test_a_save_is_a_span_with_a_child_for_each_state(exported):
    """Catches: a child in another trace, times of the training thread instead of the journal."""
    tracer, spans = exported
    hook = CheckpointSpans(tracer)
    with tracer.start_as_current_span("training step"):
        told(hook, *life(10, 1, 2, 3, 4)[:4], Stalled(10, 0.5), life(10, 1, 2, 3, 4, 5.5)[-1])
    whole = next(span for span in spans() if span.name == "ckptfsm.save")
    parts = [
        span for span in spans() if span.parent and span.parent.span_id == whole.context.span_id
    ]
    assert whole.parent is None and whole.status.status_code is StatusCode.UNSET
    assert dict(whole.attributes) == {
        "ckptfsm.step": 10,
        "ckptfsm.attempt": "10.e1.a1",
        "ckptfsm.bytes": 6000,
        "ckptfsm.stall_seconds": 0.5,
    }
    lasted = {span.name: (span.end_time - span.start_time) / 1e9 for span in parts}
    assert lasted == {
        "ckptfsm.requested": 1.0,
        "ckptfsm.forked": 1.0,
        "ckptfsm.shards_written": 1.0,
        "ckptfsm.finalized": 1.5,
    }
    assert {span.context.trace_id for span in parts} == {whole.context.trace_id}
    assert (whole.start_time, whole.end_time) == ((MINUTE + 1) * 1e9, (MINUTE + 5.5) * 1e9)


def test_a_failed_save_is_a_span_with_an_error(exported):
    """Catches: a failure that looks like a short save; the rank that failed is lost."""
    tracer, spans = exported
    told(CheckpointSpans(tracer), *life(10, 1, 2), failed(10, 3), failed(20, 4))
    assert [span.name for span in spans()] == [
        "ckptfsm.requested",
        "ckptfsm.forked",
        "ckptfsm.save",
    ]
    whole = spans()[-1]
    assert whole.status.status_code is StatusCode.ERROR
    assert whole.status.description == "failed: writer_died: killed"
    assert whole.attributes["ckptfsm.reason"] == "writer_died"
    assert whole.attributes["ckptfsm.rank"] == 3


class Board:
    """``add_scalar`` of a SummaryWriter."""

    def __init__(self) -> None:
        self.points: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.points.append((tag, value, step))


class Run:
    """A run of W&B: ``step`` may not lie behind, and a row grows until a later one begins."""

    def __init__(self) -> None:
        self.axes: dict[str, str] = {}
        self.row: dict[str, float] = {}
        self.rows: list[dict[str, float]] = []
        self.step = 0

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(
        self, data: dict[str, float], step: int | None = None, commit: bool | None = None
    ) -> None:
        if step is not None and step < self.step:
            return
        if step is not None and step > self.step:
            self._flush(step)
        self.row |= data
        if commit or (commit is None and step is None):
            self._flush(self.step + 1)

    def _flush(self, step: int) -> None:
        self.rows += [self.row] if self.row else []
        self.row, self.step = {}, step


def test_tensorboard_gets_a_point_at_the_step_of_the_checkpoint():
    """Catches: points at the step of the end, and one for each of two calls of a stall."""
    board = Board()
    told(TensorBoardScalars(board), *life(10, 1, 2, 3, 4), Stalled(10, 1.0), Stalled(10, 2.0))
    assert board.points == []
    hook = TensorBoardScalars(board)
    told(hook, *life(10, 1, 2, 3, 4), Stalled(10, 1.0), Stalled(10, 2.0))
    told(hook, life(10, 1, 2, 3, 4, 5)[-1], Stalled(15, 0.5))
    assert ("ckptfsm/latest_state_seconds/forked", 1.0, 10) in board.points
    stalls = [point for point in board.points if point[0] == "ckptfsm/latest_stall_seconds"]
    assert stalls == [("ckptfsm/latest_stall_seconds", 3.0, 10), (stalls[1][0], 0.5, 15)]


def test_wandb_keeps_a_save_that_is_tracked_later():
    """Catches: a step that lies behind, for which W&B drops the point; a step of the trainer used up."""
    run = Run()
    hook = WandbScalars(run)
    run.log({"loss": 1.0}, step=14)
    told(hook, *life(10, 1, 2, 3, 4, 5))
    run.log({"loss": 0.9}, step=15)
    told(hook, *life(20, 1, 2, 3, 4, 5))
    run.log({"accuracy": 0.8})
    assert run.axes == {"ckptfsm/*": "ckptfsm/step"}
    assert run.step == 16
    first, second = run.rows
    assert (first["loss"], first["ckptfsm/step"], first["ckptfsm/latest_bytes"]) == (1.0, 10, 6000)
    assert (second["loss"], second["ckptfsm/step"], second["accuracy"]) == (0.9, 20, 0.8)


def test_json_lines_tell_each_end_of_a_save(tmp_path):
    """Catches: a failure without its reason, a line that is lost at the end of the job."""
    file = tmp_path / "saves.jsonl"
    hook = JsonLines(file, clock=StoppedClock())
    told(hook, *life(10, 1, 2, 3, 4, 5), *life(20, 6, 7), failed(20, 8), Stalled(25, 0.5))
    assert hook.close()
    first, second, third = (json.loads(line) for line in file.read_text().splitlines())
    assert (first["step"], first["state"], first["attempt"]) == (10, "tracked", "10.e1.a1")
    assert first["metrics"]["ckptfsm_latest_state_seconds"]["forked"] == 1.0
    assert "reason" not in first
    assert (second["reason"], second["rank"], second["detail"]) == ("writer_died", 3, "killed")
    assert second["metrics"]["ckptfsm_save_failures_total"] == {"writer_died": 1}
    assert third == {
        "at": "then",
        "step": 25,
        "metrics": {"ckptfsm_latest_stall_seconds": 0.5, "ckptfsm_stall_seconds_total": 0.5},
    }


def test_a_disk_that_hangs_does_not_hold_the_trainer(tmp_path, caplog):
    """Catches: a queue that waits for the disk, or that grows without end."""
    file = tmp_path / "fifo"
    os.mkfifo(file)  # its opening waits for a reader
    hook = JsonLines(file, most_lines=2)
    for step in range(10):
        told(hook, Stalled(step, 0.5))
    assert not hook.close(timeout_s=0.0)
    assert {r.event for r in caplog.records} == {"metrics_dropped"}
    reader = os.open(file, os.O_RDWR)  # the disk answers again
    assert hook.close()
    lines = os.read(reader, 1 << 16).splitlines()
    os.close(reader)
    assert len(lines) < 10 and json.loads(lines[0])["step"] == 0


def test_a_line_that_cannot_be_written_is_logged(tmp_path, caplog):
    """Catches: a thread that ends at the first error of the disk."""
    file = tmp_path / "later" / "saves.jsonl"
    hook = JsonLines(file)
    told(hook, *life(10, 1, 2, 3, 4, 5))
    told(hook, Stalled(15, 0.5))
    assert hook.close()
    assert [r.event for r in caplog.records] == ["metrics_not_written"] * 2


# ------------------------------------------------------------------------------- in a real manager


def test_every_hook_in_a_job_that_saves_and_loses_a_writer(tmp_path, exported, caplog):
    """Catches: a hook that a record of production breaks. A broken hook is logged."""
    tracer, spans = exported
    registry, board, run = CollectorRegistry(), Board(), Run()
    lines = JsonLines(tmp_path / "saves.jsonl")
    hooks = [
        PrometheusMetrics(registry, root=tmp_path),
        CheckpointSpans(tracer),
        TensorBoardScalars(board),
        WandbScalars(run),
        lines,
    ]
    driver = FakeDriver()
    settings = {**QUICK, "on_failure": "warn", "poll_warning_steps": 100}
    manager = Manager(fake_ports(tmp_path / "root", driver=driver), make_config(settings), hooks)
    manager.save(10, weights(10)).wait()
    driver.before_write = lambda part, rank: os._exit(9)
    with pytest.warns(UserWarning, match="writer_died"):
        manager.save(20, weights(20))
        manager.wait_until_finished()
    manager.close()
    assert [r for r in caplog.records if getattr(r, "event", "") == "hook_failed"] == []
    value = registry.get_sample_value
    assert value("ckptfsm_latest_step") == 10 and value("ckptfsm_saves_tracked_total") == 1
    assert value("ckptfsm_save_failures_total", {"reason": "writer_died"}) == 1
    assert value("ckptfsm_latest_state_seconds", {"state": "finalized"}) >= 0
    assert value("ckptfsm_stall_seconds_total") > 0
    assert value("ckptfsm_latest_bytes") > 0
    assert [s.attributes["ckptfsm.step"] for s in spans() if s.name == "ckptfsm.save"] == [10, 20]
    assert {point[2] for point in board.points} == {10, 20}
    assert run.row["ckptfsm/step"] == 20
    assert lines.close()
    states = [json.loads(line)["state"] for line in (tmp_path / "saves.jsonl").open()]
    assert states == ["tracked", "failed"]


def test_a_sync_save_tells_its_stall_after_its_end(tmp_path):
    """Catches: the stall of a sync save, whose record comes before its call returns."""
    board = Board()
    config = make_config({**QUICK, "sync": True})
    manager = Manager(fake_ports(tmp_path / "root"), config, [TensorBoardScalars(board)])
    manager.save(10, weights(10))
    manager.close()
    stalls = [point for point in board.points if point[0] == "ckptfsm/latest_stall_seconds"]
    assert len(stalls) == 1 and stalls[0][1] > 0 and stalls[0][2] == 10
