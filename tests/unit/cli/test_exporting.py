"""``timeline``, ``trace`` and ``export``: files for other tools."""

from __future__ import annotations

import json
import os

import pytest
from cli_runs import ran, said
from prometheus_client.parser import text_string_to_metric_families
from real_roots import crashed, real_job, real_root

from ckptfsm.adapters.clock import SystemClock
from ckptfsm.adapters.identity import this_process
from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core import metrics as names
from ckptfsm.core.documents import JobRecord, JobState
from ckptfsm.core.layout import TRACKER
from ckptfsm.core.retention import LatestN
from ckptfsm.follow.jobs import JobRecords
from ckptfsm.testing.harness import FakeJob


def test_the_timeline_is_one_page_of_all_attempts(tmp_path, capsys):
    root = real_root(tmp_path / "root", 10, 20)
    page = tmp_path / "lives.html"
    assert "2 attempts" in said(capsys, "timeline", "-r", root, "-o", page)
    assert "20.e1.a2" in page.read_text()
    assert list(tmp_path.iterdir()) in ([root, page], [page, root])


def test_a_file_among_the_library_s_is_refused(tmp_path, capsys):
    root = real_root(tmp_path / "root", 10)
    status, _, err = ran(capsys, "timeline", "-r", root, "-o", root / ".ckptfsm/lives.html")
    assert status == 2 and "among the files of the library" in err


@pytest.mark.parametrize(
    "name", (TRACKER, "iter_0000010/lives.html", "iter_0000010/.ckptfsm/manifest.json")
)
def test_I2_a_page_over_the_tracker_or_into_a_checkpoint_is_refused(name, tmp_path, capsys):
    root = real_root(tmp_path / "root", 10)
    before = (root / TRACKER).read_text()
    status, _, err = ran(capsys, "timeline", "-o", root / name, "-r", root)
    assert status == 2 and "among the files of the library" in err
    assert (root / TRACKER).read_text() == before
    said(capsys, "timeline", "-o", root / "lives.html", "-r", root)


def test_the_trace_has_a_slice_for_each_state(tmp_path, capsys):
    root = real_root(tmp_path / "root", 10, 20, 30, retention=LatestN(2))
    file = tmp_path / "trace.json"
    told = said(capsys, "trace", "-r", root)
    assert "all moves are rows of the table" in told and list(tmp_path.iterdir()) == [root]
    assert said(capsys, "trace", "-r", root, "-o", file) == told
    events = json.loads(file.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    first = next(tid for tid, name in names.items() if name.startswith("step 10 "))
    slices = [e["name"] for e in events if e["ph"] == "X" and e["tid"] == first]
    assert slices == [
        "requested",
        "forked",
        "shards_written",
        "finalized",
        "tracked",
        "prunable",
        "pruned",
    ]
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in events if e["ph"] == "X")


@pytest.mark.damages_journal("flips a bit of a record")
def test_a_journal_that_is_no_legal_trace_has_status_1(tmp_path, capsys):
    root = real_root(tmp_path, 10, 20)
    segment = root / ".ckptfsm/journal/000001.ndjson"
    segment.write_bytes(segment.read_bytes().replace(b"tracker_written", b"tracker_writteN", 1))
    status, _, err = ran(capsys, "trace", "-r", root)
    assert status == 1 and "000001.ndjson" in err


def parsed(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The values of each metric, with their labels but for that of the root."""
    return {
        family.name: [
            ({name: label for name, label in sample.labels.items() if name != "root"}, sample.value)
            for sample in family.samples
        ]
        for family in text_string_to_metric_families(text)
    }


def test_export_tells_the_latest_its_age_and_the_failures(tmp_path, capsys):
    job = real_job(tmp_path)
    job.save(10)
    of = job.request(20)
    job.fork(of)
    job.fail(of)
    job.close()
    found = parsed(said(capsys, "export", "--prometheus", "-r", tmp_path))
    assert found["ckptfsm_latest_step"] == [({}, 10.0)]
    assert 0 <= found["ckptfsm_latest_age_seconds"][0][1] < 600
    assert found["ckptfsm_save_failures"] == [({"reason": "writer_died"}, 1.0)]
    assert found["ckptfsm_owner_alive"] == [({}, 0.0)]
    assert ({"state": "tracked"}, 1.0) in found["ckptfsm_checkpoints"]
    states = {labels["state"] for labels, _ in found["ckptfsm_latest_state_seconds"]}
    assert states == {"requested", "forked", "shards_written", "finalized"}


def test_export_of_a_root_without_a_checkpoint_has_no_age(tmp_path, capsys):
    job = real_job(tmp_path)
    job.fork(job.request(10))
    crashed(job)
    found = parsed(said(capsys, "export", "--prometheus", "-r", tmp_path))
    assert "ckptfsm_latest_age_seconds" not in found and "ckptfsm_free_bytes" in found


def test_export_writes_a_whole_file(tmp_path, capsys):
    root, file = real_root(tmp_path / "root", 10), tmp_path / "ckptfsm.prom"
    said(capsys, "export", "--prometheus", "-r", root, "-o", file)
    assert "ckptfsm_latest_step" in parsed(file.read_text())


def test_export_needs_a_format(tmp_path, capsys):
    real_root(tmp_path, 10)
    assert ran(capsys, "export", "-r", tmp_path)[0] == 2


@pytest.mark.parametrize("name", ("latest_checkpointed_iteration.txt", "iter_0000010/__0_0.distcp"))
def test_an_output_never_replaces_a_file_that_a_start_reads(name, tmp_path, capsys):
    """Catches: metrics in the place of the tracker, or of a shard."""
    root = real_root(tmp_path, 10)
    before = (root / name).read_bytes()
    status, _, err = ran(capsys, "export", "--prometheus", "-r", root, "-o", root / name)
    assert status == 2 and "among the files of the library" in err
    assert (root / name).read_bytes() == before


def test_a_pipe_is_written_to_and_not_replaced(tmp_path, capsys):
    """Catches: ``-o /dev/null`` that makes a file of the device, called by root."""
    root, pipe = real_root(tmp_path / "root", 10), tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    said(capsys, "export", "--prometheus", "-r", root, "-o", pipe)
    assert pipe.is_fifo()
    assert "ckptfsm_latest_step" in parsed(os.read(reader, 1 << 16).decode())
    os.close(reader)


def test_a_failed_output_leaves_nothing(tmp_path, capsys):
    root, place = real_root(tmp_path / "root", 10), tmp_path / "directory"
    place.mkdir()
    for output in (place, "/", ""):
        status, _, err = ran(capsys, "timeline", "-r", root, "-o", output)
        assert status == 1 and "IsADirectoryError" in err
    assert sorted(tmp_path.iterdir()) == [place, root]


def test_jobs_are_counted_by_state(tmp_path, capsys):
    """Catches: uploads that fail for weeks, and no alert."""
    storage = PosixStorage(str(real_root(tmp_path, 10, 20)))
    records_of_jobs = JobRecords(storage)
    records_of_jobs.begin()
    for step, name, state in ((10, "a", "FAILED"), (10, "b", "DONE"), (20, "a", "FAILED")):
        record = JobRecord(step=step, epoch=1, attempt=1, job=name, state=JobState[state])
        records_of_jobs.put(record)
    storage.close_root()
    text = said(capsys, "export", "--prometheus", "-r", tmp_path)
    (jobs,) = [f for f in text_string_to_metric_families(text) if f.name == "ckptfsm_jobs"]
    found = {sample.labels["state"]: sample.value for sample in jobs.samples}
    assert found == {"done": 1, "failed": 2}


def test_the_text_is_read_as_prometheus_reads_it():
    """Catches: a name of a state or a reason, from a newer journal, that breaks all metrics."""
    family = names.Family("ckptfsm_save_failures", "Failed.", "reason", counter=True)
    odd = {'a"b': 1.0, "c\\n": 2.0, "d\ne": 3e20}
    text = names.text_of([family.each(odd), names.LATEST_STEP.of(40)], {})
    found = parsed(text)
    assert {labels["reason"]: value for labels, value in found["ckptfsm_save_failures"]} == odd
    assert found["ckptfsm_latest_step"] == [({}, 40.0)]


def test_two_roots_on_a_host_are_told_apart(tmp_path, capsys):
    """Catches: the second root, which a node exporter drops for its labels are those of the first."""
    text = ""
    for name in ("a", 'b"'):
        text += said(capsys, "export", "--prometheus", "-r", real_root(tmp_path / name, 10))
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert len({(s.name, *sorted(s.labels.items())) for s in samples}) == len(samples)
    assert {s.labels["root"] for s in samples} == {f"{tmp_path}/a", f'{tmp_path}/b"'}


@pytest.mark.parametrize("state", ("alive", "closed", "crashed", "elsewhere", ""))
def test_the_state_of_the_owner_is_one_of_four(state, tmp_path, capsys):
    """Catches: a job that crashed, which looks like one that came to its end."""
    host = {"host": "elsewhere"} if state == "elsewhere" else {}
    job = FakeJob(
        PosixStorage(tmp_path), identity=this_process()._replace(**host), clock=SystemClock()
    )
    job.open()
    job.save(10)
    if state == "closed":
        job.close()
    elif state in ("crashed", "elsewhere"):
        crashed(job)
    elif not state:
        (tmp_path / ".ckptfsm/epochs/epoch-000001").write_text("torn")
    found = parsed(said(capsys, "export", "--prometheus", "-r", tmp_path))["ckptfsm_owner_state"]
    states = {labels["state"]: value for labels, value in found}
    assert set(states) == {"alive", "closed", "crashed", "elsewhere"}
    assert [name for name, value in states.items() if value] == ([state] if state else [])
    if state == "alive":
        job.close()
