"""The protocol of a copy: what each crash leaves, and whose a name is. The same on all places."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_runs import said
from copying import (
    Counted,
    Killed,
    carry,
    contents,
    copied,
    every_kind,
    is_committed,
    new_place,
    root_with,
    saved_again,
)
from real_roots import TREE, crashed, real_job

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.documents import JobRecord, JobState, encode
from ckptfsm.core.errors import ConfigError, DamagedRoot, PlaceFailed, PlaceInUse
from ckptfsm.core.jobs import COPY, Copy
from ckptfsm.core.layout import CLAIM, JOBS, MANIFEST, RUN, TRACKER, job_name
from ckptfsm.disk.durable import make_dirs, write_new
from ckptfsm.places.carry import carry as entry
from ckptfsm.places.carry import settings_of
from ckptfsm.places.carrying import Throttle
from ckptfsm.places.fetching import choose, copies_in
from ckptfsm.places.place import place_at
from ckptfsm.places.streamed import temporary_of
from ckptfsm.testing.harness import SimClock


@pytest.fixture
def root(tmp_path: Path):
    storage = root_with(tmp_path / "root", 10, 20)
    yield storage
    storage.close_root()


def directory(root, step: int) -> Path:
    return Path(root.root, f"iter_{step:07d}")


@every_kind
def test_a_copy_is_the_directory_byte_for_byte(root, place):
    """Catches: a file left out, another manifest, a tracker that goes back, files sent twice."""
    first = carry(place, root, 20)
    assert first.sent == first.files > 3
    assert copied(place, 20) == contents(directory(root, 20))
    assert place.read(TRACKER) == b"20\n"
    carry(place, root, 10)  # late
    assert place.read(TRACKER) == b"20\n"
    assert carry(place, root, 20).sent == 0


def test_killed_at_any_call_the_copy_is_whole_or_none_and_the_next_one_completes_it(root, place):
    """Catches: a manifest before its data, a claim that keeps its own attempt out."""
    spy = Counted(place)
    carry(spy, root, 10)
    calls = spy.calls
    assert calls[-2:] == ["create", "create"], "manifest, then tracker"
    for number in range(len(calls)):
        _forget(place)
        with pytest.raises(Killed):
            carry(Counted(place, number), root, 10)
        if is_committed(place, 10):
            assert copied(place, 10) == contents(directory(root, 10))
        carry(place, root, 10)
        assert copied(place, 10) == contents(directory(root, 10))
        assert place.read(TRACKER) == b"10\n"


def _forget(place) -> None:
    for name in place.names():
        for each in place.listed(name):
            place.remove(f"{name}/{each}")
    place.remove(TRACKER)


def test_a_file_in_a_directory_is_durable_before_it_has_its_name(tmp_path, monkeypatch):
    """Catches: a power loss that takes what a copy has, after its checkpoint was pruned."""
    calls: list[str] = []
    for name in ("fsync", "rename", "fsync_dir"):
        real = getattr(PosixStorage, name)
        monkeypatch.setattr(PosixStorage, name, _noted(calls, name, real))
    place = new_place(tmp_path / "place")
    place.put("x", iter([b"data"]), 4, "")
    assert calls[-3:] == ["fsync", "rename", "fsync_dir"]


def _noted(calls: list[str], name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        calls.append(name)
        return real(*arguments)

    return call


def test_a_killed_copy_goes_on_with_the_files_that_are_missing(root, place):
    """Catches: a copy that begins anew each time, and is never through."""
    with pytest.raises(Killed):
        carry(Counted(place, 6), root, 10)
    done = carry(place, root, 10)
    assert 0 < done.sent < done.files


def test_what_someone_removed_from_a_copy_is_sent_again(root, place):
    """Catches: a copy that is called done by its manifest, so that the last good files are pruned."""
    carry(place, root, 10)
    whole = copied(place, 10)
    place.remove("iter_0000010/__0_0.distcp")
    assert carry(place, root, 10).sent == 1
    assert copied(place, 10) == whole


@every_kind
def test_an_object_of_the_right_size_and_another_content_is_sent_again(root, place):
    """Catches: a file of an earlier attempt taken for this one's, by its size."""
    name = "iter_0000010/__0_0.distcp"
    good = directory(root, 10).joinpath("__0_0.distcp").read_bytes()
    with pytest.raises(Killed):
        carry(Counted(place, 3), root, 10)
    place.put(name, iter([b"x" * len(good)]), len(good), "xxh3_128:" + 32 * "0")
    place.put(f"{name}.tmp-1", iter([b"x"]), 1, "")  # of a killed carrier
    carry(place, root, 10)
    assert copied(place, 10) == contents(directory(root, 10))


def test_a_flipped_bit_on_the_local_disk_ends_the_copy_before_the_commit(root, place):
    """Catches: a damaged file that becomes a copy, which then is the only one."""
    shard = directory(root, 10) / "__0_0.distcp"
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    with pytest.raises(DamagedRoot, match="another content"):
        carry(place, root, 10)
    assert place.digest("iter_0000010/__0_0.distcp") is None
    assert not is_committed(place, 10)


@every_kind
def test_another_run_is_refused_and_changes_nothing(root, place, tmp_path):
    """Catches: two jobs with one prefix, whose files mix."""
    carry(place, root, 10)
    before = copied(place, 10)
    other = root_with(tmp_path / "other", 10, 30)
    for step in (10, 30):
        with pytest.raises(PlaceInUse, match="another run"):
            carry(place, other, step)
    assert copied(place, 10) == before
    assert place.names().count("iter_0000030") == 0
    other.close_root()


@every_kind
def test_a_later_attempt_takes_a_claim_over_that_was_never_committed(root, place):
    """Catches: a new machine that can never copy a step, because the dead one had begun to."""
    with pytest.raises(Killed):
        carry(Counted(place, 5), root, 20)
    old = place.read(f"iter_0000020/{CLAIM}")
    saved_again(Path(root.root), 20)
    carry(place, root, 20)
    assert copied(place, 20) == contents(directory(root, 20))
    assert place.read(f"iter_0000020/{CLAIM}") != old


@every_kind
def test_an_earlier_attempt_stops_once_a_later_one_has_the_claim(root, place):
    """Catches: a machine that was believed dead, and writes over the new one's files."""
    path = f"iter_0000020/{CLAIM}"

    class Overtaken(Counted):
        def put(self, name, pieces, size, digest):
            with self._turn:  # while the file is on its way
                late = self._place.read(path)
                later = json.dumps({**json.loads(late), "epoch": 9}).encode()
                assert later == late or self._place.replace(path, later, late)
            self._place.put(name, pieces, size, digest)

    with pytest.raises(PlaceInUse, match=r"of 20\.e9\.a2 by now"):
        carry(Overtaken(place), root, 20)
    assert list(copied(place, 20)) == []


def test_a_committed_copy_of_another_attempt_is_refused_with_the_way_out(root, place):
    """Catches: a copy of an abandoned branch written over without a word."""
    carry(place, root, 20)
    before = copied(place, 20)
    saved_again(Path(root.root), 20)
    with pytest.raises(PlaceInUse, match="remove .*iter_0000020"):
        carry(place, root, 20)
    assert copied(place, 20) == before


@every_kind
def test_a_copy_is_replaced_if_that_is_asked_for(root, place):
    """Catches: a copy of two attempts, a manifest whose files are being written over."""
    carry(place, root, 20)
    before = copied(place, 20)
    saved_again(Path(root.root), 20)
    after = contents(directory(root, 20))
    with pytest.raises(Killed):
        carry(Counted(place, 3), root, 20, replaces=True)  # the claim is this attempt's
    assert copied(place, 20) == before
    for number in (3, 4):  # the manifest is gone, a file is sent
        with pytest.raises(Killed):
            carry(Counted(place, number), root, 20, replaces=True)
        assert not is_committed(place, 20)
    carry(place, root, 20, replaces=True)
    assert copied(place, 20) == after


def test_a_directory_whose_claim_was_lost_while_it_was_replaced_is_ours(root, place):
    """Catches: a copy that is refused for ever, as a carrier died between two commands of HDFS."""
    with pytest.raises(Killed):
        carry(Counted(place, 5), root, 10)
    place.put(temporary_of(f"iter_0000010/{CLAIM}"), iter([b"half"]), 4, "")
    place.remove(f"iter_0000010/{CLAIM}")
    carry(place, root, 10)
    assert copied(place, 10) == contents(directory(root, 10))


def test_the_tracker_follows_the_later_attempt_also_to_a_smaller_step(root, place):
    """Catches: a tracker that names a step of an abandoned branch for ever."""
    carry(place, root, 20)
    saved_again(Path(root.root), 15)
    carry(place, root, 15)
    assert place.read(TRACKER) == b"15\n"


def test_after_a_rollback_the_tracker_names_the_step_in_use(root, place, tmp_path, capsys):
    """Catches: a new machine that resumes from the branch that was given up; a copy that an older disk,
    or another step than the one in use, passes over."""
    older = Path(shutil.copytree(root.root, tmp_path / "older"))
    job = real_job(Path(root.root))
    later = job.save(30, TREE)
    for step in (10, 20, 30):
        carry(place, root, step)
        assert choose(place, copies_in(place), None).step == step
    before = real_job(older)  # it knows nothing of 30
    carry(place, before.storage, 20)
    assert choose(place, copies_in(place), None).step == 30
    crashed(before)
    job.coordinator.rollback(20)
    for number in range(2):  # the mark is there, then the tracker
        with pytest.raises(Killed):
            carry(Counted(place, number), root, 20)
        assert choose(place, copies_in(place), None).step == 20
    assert (place.read(TRACKER), is_committed(place, 30)) == (b"20\n", True)
    carry(place, root, 10)
    assert place.read(TRACKER) == b"20\n"
    crashed(job)
    said(capsys, "quarantine", "restore", later, root.root)
    carry(place, root, 30)
    assert choose(place, copies_in(place), None).step == 30


def test_a_copy_that_is_committed_and_not_named_yet_is_the_latest(root, place):
    """Catches: a new machine that saves that step once more, and cannot copy it."""
    carry(place, root, 10)
    carry(place, root, 20)
    place.remove(TRACKER)
    place.create(TRACKER, b"10\n")
    assert choose(place, copies_in(place), None).step == 20


def test_a_server_that_ignores_conditions_is_refused_unless_one_job_alone_writes(root, place):
    """Catches: two jobs that overwrite each other's copies, without a word of the server."""

    class Careless(Counted):
        def create(self, name, data):
            self._place.put(name, iter([data]), len(data), "")
            return data

    with pytest.raises(ConfigError, match="sole_writer"):
        carry(Careless(place), root, 10)
    assert place.names() == [".ckptfsm"]
    carry(Careless(place), root, 10, sole_writer=True)
    assert is_committed(place, 10)


def test_a_saved_directory_that_lost_its_manifest_is_refused(root, place):
    """Catches: a copy that nothing can prove."""
    (directory(root, 10) / MANIFEST).unlink()
    with pytest.raises(DamagedRoot, match="no manifest"):
        carry(place, root, 10)


@pytest.mark.parametrize(
    "name", ["__0_0.distcp", ".attempt-10.e1.a1.5f", MANIFEST, "notes/from-me.txt"]
)
def test_objects_that_were_never_claimed_are_not_written_over(name, root, place):
    """Catches: an upload by hand, or the mirror of another tool, replaced without a word."""
    place.put(f"iter_0000010/{name}", iter([b"theirs"]), 6, "")
    with pytest.raises(
        PlaceInUse, match=r"iter_0000010 has .* never claimed.* Move .*iter_0000010"
    ):
        carry(place, root, 10)
    assert place.listed("iter_0000010") == {name: 6}
    place.remove(f"iter_0000010/{name}")
    carry(place, root, 10)
    assert is_committed(place, 10)


def test_a_claim_that_was_being_written_is_not_an_object(root, place):
    """Catches: a copy that is refused for ever, as its carrier was killed before its claim."""
    place.put(f"iter_0000010/{CLAIM}.tmp-1", iter([b"{"]), 1, "")
    carry(place, root, 10)
    assert copied(place, 10) == contents(directory(root, 10))


def test_the_job_says_in_a_line_what_is_wrong(root, tmp_path, monkeypatch):
    """Catches: a traceback in the place of the reason, a setting that is passed over."""
    monkeypatch.setenv(COPY, json.dumps({"to": f"{tmp_path}/no/such\0"}))
    path = str(directory(root, 10))
    for settings, words in (
        ({"to": "gopher://x"}, "no place for copies is known"),
        ({"to": "x", "limit": 3}, "limit"),
        ({"to": str(tmp_path / "root/iter_0000010/__0_0.distcp")}, "mounted"),
        ({"to": f"file://{tmp_path}/p"}, "mounted"),
    ):
        monkeypatch.setenv(COPY, json.dumps(settings))
        with pytest.raises(SystemExit) as ended:
            entry(path, 10, {})
        assert words in str(ended.value), ended.value
    (tmp_path / "p").mkdir()
    monkeypatch.setenv(COPY, json.dumps({"to": f"file://{tmp_path}/p", "limit_mb_s": 1000}))
    entry(path, 10, {})
    assert (tmp_path / "p" / RUN).exists()
    assert settings_of('{"to": "s3://b"}').sole_writer is False


def test_a_place_that_fails_is_never_taken_for_an_empty_one(root, place):
    """Catches: an error of the place that counts as "nothing is there"."""

    class Broken(Counted):
        def listed(self, name):
            raise PlaceFailed("no answer", place="here")

    with pytest.raises(PlaceFailed):
        carry(Broken(place), root, 10)
    assert not is_committed(place, 10)


def test_a_copy_into_a_root_is_refused(root, tmp_path):
    """Catches: claims and trackers written into the root of a job."""
    for path in (root.root, root_with(tmp_path / "other", 10).root):
        with pytest.raises(ConfigError, match="the root of a job"):
            carry(place_at(path), root, 10)
    assert not (directory(root, 10) / CLAIM).exists()


def test_a_limit_counts_all_bytes():
    """Catches: a limit for each file, a limit of another unit."""
    clock = SimClock()
    throttle = Throttle(2.0, clock)
    waits = []
    for size in (1_000_000, 3_000_000, 2_000_000):
        before = clock.now
        throttle.take(size)
        waits.append(clock.now - before)
    clock.sleep(100.0)  # an idle time is not made up for
    throttle.take(2_000_000)
    assert (waits, clock.now) == ([0.5, 1.5, 1.0], 1000.0 + 3.0 + 100.0 + 1.0)


def test_without_conditions_a_look_comes_first(root, place, tmp_path):
    """Catches: a promise of one writer that lets runs, one after the other, write over each other."""

    class Careless(Counted):
        """A server that ignores conditions."""

        def create(self, name, data):
            self._place.remove(name)
            return self._place.create(name, data)

    careless: Any = Careless(place)
    carry(careless, root, 10, sole_writer=True)
    before = copied(place, 10)
    other = root_with(tmp_path / "other", 10)
    with pytest.raises(PlaceInUse, match="another run"):
        carry(careless, other, 10, sole_writer=True)
    other.close_root()
    saved_again(Path(root.root), 20)
    place.replace(f"iter_0000010/{CLAIM}", b"{}", place.read(f"iter_0000010/{CLAIM}"))
    assert copied(place, 10) == before


def test_a_root_of_an_older_disk_says_so(root, place, tmp_path, capsys):
    """Catches: copies that count as done, and that no fetch would ever take."""
    carry(place, root, 10)
    older = tmp_path / "older"
    shutil.copytree(root.root, older)
    for _ in range(3):
        crashed(real_job(Path(root.root)))
    job = real_job(Path(root.root))
    job.save(30, TREE)
    carry(place, job.storage, 30)
    crashed(job)
    job = real_job(older)
    job.save(25, TREE)
    with pytest.raises(PlaceInUse, match="ckptfsm fetch"):
        carry(place, job.storage, 25)
    crashed(job)
    said(capsys, "fetch", place.where, older, "--step", 30)
    job = real_job(older)
    job.save(40, TREE)
    assert carry(place, job.storage, 40).sent
    crashed(job)
    assert place.read(TRACKER) == b"40\n"


def test_an_empty_place_that_had_copies_is_not_begun_anew(root, tmp_path, monkeypatch):
    """Catches: copies below a mount point, which count, and then the checkpoint is pruned."""
    settings = Copy(str(tmp_path / "place"))
    monkeypatch.setenv(COPY, settings.model_dump_json())
    new_place(tmp_path / "place")
    entry(str(directory(root, 10)), 10, {})
    done = JobRecord(step=10, epoch=1, attempt=1, job=settings.job.name, state=JobState.DONE)
    make_dirs(root, JOBS)
    write_new(root, job_name(done.of, done.job), encode(done))
    shutil.move(tmp_path / "place", tmp_path / "unmounted")
    (tmp_path / "place").mkdir()
    with pytest.raises(SystemExit, match="is it mounted"):
        entry(str(directory(root, 20)), 20, {})
    assert not list((tmp_path / "place").iterdir())
    assert is_committed(place_at(str(tmp_path / "unmounted")), 10)


@pytest.mark.parametrize("inside", ["copies", "iter_0000010/c"])
def test_a_place_in_a_root_is_refused(inside, root):
    """Catches: copies that go with the checkpoint that they are of."""
    Path(root.root, inside).mkdir()
    with pytest.raises(ConfigError, match="the root of a job"):
        carry(place_at(f"{root.root}/{inside}"), root, 20)
