"""Copies on real object stores: faults on the way, SIGKILL of the carrier, one that does not conform.

The tests of ``tests/unit/places`` run on the same servers, in the same target.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from cli_runs import ran, said
from copying import carry, contents, copied, is_committed, root_with
from s3_servers import (
    ACCOUNT,
    Azurite,
    Moto,
    Proxy,
    Rclone,
    comes_slowly,
    cuts,
    flips_a_bit,
    hangs,
    lacks_azurite,
    loses_the_answer,
    refuses,
    resets,
)

from ckptfsm.adapters.posix_storage import digest_of
from ckptfsm.core.documents import FileEntry, Manifest, Part, encode_sealed
from ckptfsm.core.errors import ConfigError, PlaceFailed
from ckptfsm.core.jobs import COPY, Copy
from ckptfsm.core.layout import CLAIM, MANIFEST, TRACKER
from ckptfsm.places import object_store
from ckptfsm.places.carry import copy_directory
from ckptfsm.places.place import place_at

pytestmark = pytest.mark.integration
SIZES = (20 << 20, (20 << 20) + 1, 5, 0)  # the first two have three parts


@pytest.fixture(scope="module")
def moto(tmp_path_factory):
    with Moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture
def proxy(moto, monkeypatch):
    with Proxy(moto.endpoint) as between:
        for name, value in between.environment.items():
            monkeypatch.setenv(name, value)
        yield between


@pytest.fixture
def url(moto, proxy) -> str:
    return moto.new_bucket() + "/runs/gpt"


@pytest.fixture
def impatient(monkeypatch):
    """A request without an answer ends after two seconds instead of two minutes."""
    monkeypatch.setattr(object_store, "_SILENCE_S", 2.0)


@pytest.fixture
def root(tmp_path: Path):
    storage = root_with(tmp_path / "root", 10, 20)
    yield storage
    storage.close_root()


def large_root(path: Path, *sizes: int) -> Path:
    """A root with a published step 10, whose files have these sizes. Returns that directory."""
    step = path / "iter_0000010"
    for directory in (path, step):
        (directory / ".ckptfsm").mkdir(parents=True)
    entries = []
    for number, size in enumerate(sizes):
        data = random.Random(number).randbytes(1 << 20) * (size >> 20) + bytes(size % (1 << 20))
        (step / f"__{number}_0.distcp").write_bytes(data)
        entries.append(FileEntry(name=f"__{number}_0.distcp", bytes=size, digest=digest_of(data)))
    manifest = Manifest(
        step=10, epoch=1, attempt=1, world_size=1, parts=(Part(name="state"),), files=tuple(entries)
    )
    (step / MANIFEST).write_bytes(encode_sealed(manifest))
    return step


@pytest.mark.parametrize(
    ("method", "path", "fault"),
    [
        ("PUT", "manifest.json", refuses(409, "ConditionalRequestConflict")),
        ("PUT", "claim.json", refuses(409, "ConditionalRequestConflict")),
        ("PUT", "manifest.json", loses_the_answer),
        ("PUT", "claim.json", loses_the_answer),
        ("PUT", "latest_checkpointed", loses_the_answer),
        ("PUT", "__0_0", refuses(500, "InternalError")),
        ("PUT", "__0_0", refuses(503, "SlowDown")),
        ("PUT", "__1_0", resets),
        ("GET", "manifest.json", refuses(500, "InternalError")),
        ("GET", "list-type", resets),
        ("HEAD", "__0_0", refuses(500, "")),
    ],
)
def test_a_fault_on_the_way_is_outlived(method, path, fault, root, url, proxy):
    """Catches: S3's 409 taken for an object that is there, a lost answer taken for another's object."""
    place = place_at(url)
    proxy.once(method, path, fault)
    carry(place, root, 10)
    assert not proxy.rules, "the fault was met"
    assert copied(place, 10) == contents(Path(root.root, "iter_0000010"))


@pytest.mark.parametrize(
    ("method", "path", "fault"),
    [
        ("POST", "uploads", resets),
        ("PUT", "partNumber=2", refuses(500, "InternalError")),
        ("PUT", "partNumber=2", resets),
        ("PUT", "partNumber=2", hangs),
        ("POST", "uploadId", loses_the_answer),
        ("POST", "uploadId", refuses(200, "InternalError")),
    ],
)
def test_a_fault_in_the_parts_of_a_large_file_is_outlived(
    method, path, fault, url, proxy, impatient
):
    """Catches: an object without one of its parts, an error that came with status 200."""
    place, data = place_at(url), random.Random(1).randbytes(20 << 20)
    proxy.once(method, path, fault)
    place.put("step/large", iter([data[: 9 << 20], data[9 << 20 :]]), len(data), digest_of(data))
    assert not proxy.rules, "the fault was met"
    assert b"".join(place.stream("step/large")) == data
    assert place.digest("step/large") == digest_of(data)


@pytest.mark.parametrize(("method", "path"), [("GET", "list-type"), ("PUT", "__0_0")])
def test_a_request_that_is_never_answered_is_sent_again(method, path, root, url, proxy, impatient):
    """Catches: a carrier that waits for ever."""
    place = place_at(url)
    proxy.once(method, path, hangs)
    carry(place, root, 10)
    assert not proxy.rules
    assert is_committed(place, 10)


def test_a_commit_that_is_never_answered_ends_and_the_next_attempt_commits(
    root, url, proxy, impatient
):
    """Catches: a manifest that is taken for written, or data that is sent twice."""
    place = place_at(url)
    proxy.once("PUT", "manifest.json", hangs)
    with pytest.raises(PlaceFailed, match=r"iter_0000010/.ckptfsm/manifest.json: create"):
        carry(place, root, 10)
    assert not is_committed(place, 10)
    assert carry(place, root, 10).sent == 0
    assert copied(place, 10) == contents(Path(root.root, "iter_0000010"))


def test_a_large_file_that_comes_slowly_but_surely_is_not_cut(url, proxy, impatient):
    """Catches: a limit for the whole answer, which no file above some size is ever within."""
    place, data = place_at(url), random.Random(1).randbytes(5 << 20)
    place.put("step/slow", iter([data]), len(data), digest_of(data))
    proxy.seen.clear()
    proxy.once("GET", "slow", comes_slowly)  # for longer than the silence that ends a request
    assert b"".join(place.stream("step/slow")) == data
    assert len(proxy.seen) == 1


@pytest.mark.parametrize("fault", [cuts, flips_a_bit, resets, refuses(500, "InternalError")])
def test_a_fault_on_the_way_back_is_outlived(fault, root, url, proxy, tmp_path, capsys):
    """Catches: half a file, or another bit, that becomes a checkpoint."""
    carry(place_at(url), root, 20)
    proxy.once("GET", "__0_0", fault)
    said(capsys, "fetch", url, tmp_path / "back")
    assert not proxy.rules
    assert contents(tmp_path / "back/iter_0000020") == contents(Path(root.root, "iter_0000020"))


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "ExpiredToken", "start the job again with new ones"),
        (400, "ExpiredToken", "start the job again with new ones"),
        (403, "InvalidAccessKeyId", "the right credentials"),
        (403, "RequestTimeTooSkewed", "the clock of this machine is wrong"),
        (400, "AuthorizationHeaderMalformed", "Set AWS_REGION"),
        (301, "PermanentRedirect", "Set AWS_REGION"),
        (403, "QuotaExceeded", "no room in the bucket"),
        (507, "XMinioStorageFull", "no room in the bucket"),
        (403, "AccessDenied", "403 AccessDenied: AccessDenied"),
        (401, "Unauthorized", "401 Unauthorized"),
    ],
)
def test_a_refusal_is_told_with_what_to_do(status, code, said, url, proxy):
    """Catches: a line of the store's structures, or of its address, without what the server said."""
    place = place_at(url)
    for method, call in (("PUT", partial(place.create, "a/b", b"c")), ("GET", place.names)):
        proxy.always(method, "", refuses(status, code))
        with pytest.raises(PlaceFailed, match=f"{place.where}/.*{said}"):
            call()


@pytest.mark.parametrize(("status", "code"), [(403, "ExpiredToken"), (403, "QuotaExceeded")])
def test_a_refusal_in_the_middle_loses_nothing_and_the_copy_goes_on_once_it_ends(
    status, code, root, url, proxy, tmp_path, capsys
):
    """Catches: a refusal that counts as "nothing there", files that are sent twice."""
    place = place_at(url)
    proxy.always("PUT", "__1_0", refuses(status, code))
    with pytest.raises(PlaceFailed, match=f"iter_0000020/__1_0.*{code}"):
        carry(place, root, 20)
    assert not is_committed(place, 20)
    assert {"__0_0.distcp"} == {each for each in place.listed("iter_0000020") if "distcp" in each}
    proxy.rules.clear()
    done = carry(place, root, 20)
    assert 0 < done.sent < done.files
    assert copied(place, 20) == contents(Path(root.root, "iter_0000020"))
    proxy.always("GET", "list-type|delimiter", refuses(status, code))
    ended, _, err = ran(capsys, "fetch", url, tmp_path / "back")
    assert (ended, "place_failed" in err, code in err) == (1, True, True), err
    assert not (tmp_path / "back").exists()


@pytest.fixture(scope="module")
def azurite(tmp_path_factory):
    if why := lacks_azurite():
        pytest.skip(why)
    with Azurite(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "fault", "attempts"),
    [
        ("manifest.json", loses_the_answer, 1),
        ("claim.json", loses_the_answer, 1),
        ("latest_checkpointed", loses_the_answer, 1),
        ("comp=block&", refuses(500, "InternalError"), 1),
        ("comp=block&", resets, 1),
        ("comp=blocklist", loses_the_answer, 2),  # its blocks are no longer there at the second try
    ],
)
def test_a_fault_of_azure_is_outlived(path, fault, attempts, azurite, tmp_path, monkeypatch):
    """Catches: a lost answer taken for another's object where the server is not S3."""
    step = large_root(tmp_path / "root", 20 << 20, 5)
    url = azurite.new_bucket() + "/runs/gpt"
    with Proxy(azurite.endpoint) as proxy:
        for name, value in azurite.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{proxy.endpoint}/{ACCOUNT}")
        proxy.once("PUT", path, fault)
        for left in reversed(range(attempts)):
            try:
                copy_directory(step, Copy(url))
            except PlaceFailed as error:
                assert left, error
        assert not proxy.rules
        assert copied(place_at(url), 10) == contents(step)
        assert place_at(url).read(TRACKER) == b"10\n"
        sent = [path for method, path in proxy.seen if method == "PUT" and "blocklist" in path]
        assert len(sent) <= 2, "the second attempt sends nothing again"


def test_a_bucket_that_does_not_exist_is_told(root, url, tmp_path, capsys):
    """Catches: "no copy" of a bucket whose name is wrong."""
    with pytest.raises(PlaceFailed, match="no-such-bucket"):
        carry(place_at("s3://no-such-bucket/run"), root, 10)
    with pytest.raises(PlaceFailed, match="NoSuchBucket"):  # it was removed in the meantime
        list(place_at("s3://no-such-bucket/run").stream("iter_0000010/__0_0.distcp"))
    for command in ("fetch", "ls", "verify"):
        more = (tmp_path / "back",) if command == "fetch" else ()
        status, _, err = ran(capsys, command, "s3://no-such-bucket/run", *more)
        assert (status, "no-such-bucket" in err) == (1, True), (command, err)


def test_a_server_that_ignores_conditions(root, tmp_path, monkeypatch, capsys):
    """Catches: rclone taken for a server on which two jobs are safe."""
    (tmp_path / "served").mkdir()
    with Rclone(tmp_path / "served") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        url = server.new_bucket() + "/run"
        with pytest.raises(ConfigError, match="sole_writer"):
            carry(place_at(url), root, 20)
        for step in (10, 20):
            carry(place_at(url), root, step, sole_writer=True, keep=1)
        assert carry(place_at(url), root, 20, sole_writer=True).sent == 0
        assert not place_at(url).listed("iter_0000010")
        said(capsys, "fetch", url, tmp_path / "back")
    assert contents(tmp_path / "back/iter_0000020") == contents(Path(root.root, "iter_0000020"))


CARRIER = """
import os, signal, sys
from ckptfsm.places import carry, object_store
real, when, name = object_store.obstore.put, sys.argv[2], sys.argv[3]
def put(store, path, *arguments, **options):
    if when == "before" and path.endswith(name): os.kill(os.getpid(), signal.SIGKILL)
    result = real(store, path, *arguments, **options)
    if when == "after" and path.endswith(name): os.kill(os.getpid(), signal.SIGKILL)
    return result
object_store.obstore.put = put
carry.carry(sys.argv[1], 10, {})
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


def carrier(
    step: Path, url: str, when: str = "", name: str = "", script: str = CARRIER, **settings: int
) -> subprocess.Popen:
    """A process that copies a directory, killed before or after the put of ``name``."""
    return subprocess.Popen(
        [sys.executable, "-c", script, str(step), when, name],
        env={**os.environ, COPY: json.dumps({"to": url, **settings})},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_carrier_killed_at_any_put_is_gone_on_with(url, tmp_path):
    """Catches: a copy that another process cannot complete, a manifest before its data."""
    step, place = large_root(tmp_path / "root", *SIZES), place_at(url)
    for name in ("probe", "run.json", "claim.json", "__2_0.distcp", "__0_0.distcp", MANIFEST):
        for when in ("before", "after"):
            assert carrier(step, url, when, name).wait(60) == -signal.SIGKILL, (when, name)
            assert is_committed(place, 10) == ((when, name) == ("after", MANIFEST))
    assert copied(place, 10) == contents(step)
    assert place.read(TRACKER) is None
    assert carrier(step, url).wait(60) == 0
    assert place.read(TRACKER) == b"10\n"


REMOVER = """
import os, signal, sys
from ckptfsm.places import carry, object_store
real, when, name = object_store.obstore.delete, sys.argv[2], sys.argv[3]
def delete(store, path):
    if when == "before" and path.endswith(name): os.kill(os.getpid(), signal.SIGKILL)
    real(store, path)
    if when == "after" and path.endswith(name): os.kill(os.getpid(), signal.SIGKILL)
object_store.obstore.delete = delete
carry.carry(sys.argv[1], 20, {})
"""


def test_a_removal_that_is_killed_at_any_object_is_ended_by_the_next_carrier(root, url):
    """Catches: a copy without its files, remains that nobody removes."""
    place = place_at(url)
    carry(place, root, 20)
    for when, name in (
        ("before", MANIFEST),
        ("after", MANIFEST),
        ("after", "__0_0.distcp"),
        ("before", CLAIM),
    ):
        carry(place, root, 10)
        killed = carrier(Path(root.root, "iter_0000020"), url, when, name, REMOVER, keep=1)
        assert killed.wait(60) == -signal.SIGKILL, (when, name)
        assert is_committed(place, 10) == (when == "before" and name == MANIFEST)
        assert CLAIM in place.listed("iter_0000010")
        if is_committed(place, 10):
            assert copied(place, 10) == contents(Path(root.root, "iter_0000010"))
        carry(place, root, 20, keep=1)
        assert not place.listed("iter_0000010")
    assert copied(place, 20) == contents(Path(root.root, "iter_0000020"))


def test_two_carriers_at_once_make_one_copy(url, tmp_path):
    """Catches: two machines that end each other's copy."""
    step = large_root(tmp_path / "root", *SIZES)
    both = [carrier(step, url) for _ in range(2)]
    assert [each.wait(120) for each in both] == [0, 0]
    assert copied(place_at(url), 10) == contents(step)


def test_the_carrier_takes_at_most_256_mib(url, tmp_path):
    """Catches: a whole file in memory."""
    step = large_root(tmp_path / "root", 200 << 20, 200 << 20)
    most, _ = carrier(step, url).communicate(timeout=120)
    assert int(most) < 256 << 10, f"{int(most) >> 10} MiB"


JOB = """
import json, os, sys
import torch
from ckptfsm import CheckpointManager, Copy, LatestN, TrainingState

root, last = sys.argv[1], int(sys.argv[2])
torch.manual_seed(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state = TrainingState(model, optimizer)
with CheckpointManager(root, retention=LatestN(2), save_interval_steps=1,
                       copies=[Copy(os.environ["PLACE"])], jobs_drain_s=600) as ckpts:
    begun, loss = state.restore(ckpts), torch.zeros(())
    for step in range(begun + 1, last + 1):
        x = torch.randn(4, 8)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ckpts.save(step, state.state_dict()).wait()
    print(json.dumps([begun, loss.item()]))
"""


def trained(root: Path, last: int, url: str) -> tuple[int, float]:
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(root), str(last)],
        env={**os.environ, "PLACE": url},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    begun, loss = json.loads(done.stdout.splitlines()[-1])
    return begun, loss


def test_a_job_goes_on_from_the_bucket_on_an_empty_machine(moto, url, tmp_path, capsys):
    """Catches: a copy that no start can use, other values, a job that begins at zero."""
    trained(tmp_path / "first", 3, url)
    assert is_committed(place_at(url), 3)
    said(capsys, "fetch", url, tmp_path / "second")
    begun, loss = trained(tmp_path / "second", 5, url)
    assert begun == 3
    assert loss == trained(tmp_path / "whole", 5, moto.new_bucket())[1]
    assert is_committed(place_at(url), 5), "the new machine copies on"


def test_after_a_rollback_a_new_machine_goes_on_from_the_step_in_use(url, tmp_path, capsys):
    """Catches: a place that names the branch which was given up until the next copy."""
    trained(tmp_path / "first", 3, url)
    said(capsys, "rollback", "2", "--yes", "-r", tmp_path / "first")
    assert trained(tmp_path / "first", 2, url)[0] == 2
    said(capsys, "fetch", url, tmp_path / "second")
    assert trained(tmp_path / "second", 2, url)[0] == 2


def test_what_another_program_saved_is_copied_by_the_job_and_resumed_from(
    moto, url, tmp_path, capsys
):
    """Catches: a run that was taken over, whose checkpoint is on one disk alone."""
    root = tmp_path / "first"
    trained(root, 3, moto.new_bucket())
    for ours in (root, root / "iter_0000002", root / "iter_0000003"):
        shutil.rmtree(ours / ".ckptfsm")  # as if torch had saved them without this library
    stock = contents(root / "iter_0000003")
    assert trained(root, 3, url)[0] == 3
    assert not (root / "iter_0000003" / MANIFEST).exists()
    assert [is_committed(place_at(url), step) for step in (2, 3)] == [True, True]
    shutil.rmtree(root)
    said(capsys, "fetch", url, tmp_path / "second")
    fetched = contents(tmp_path / "second/iter_0000003")
    assert {name: data for name, data in fetched.items() if name != MANIFEST} == stock
    assert trained(tmp_path / "second", 4, url)[0] == 3
    assert is_committed(place_at(url), 4)


def test_the_benchmark_of_copies_reports_its_figures(tmp_path):
    """Catches: a side that can put or get nothing any more; a copy that is lost. No time is asserted."""
    tiny = ("--bytes", "65536", "--pairs", "1", "--checkpoints", "2", "--dir", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--only", "places", "--json", *tiny],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = {figure["name"]: figure for figure in json.loads(done.stdout)["figures"]}
    for what in ("put", "get"):
        for side in ("plain copy", "ckptfsm, directory", "ckptfsm, S3", "boto3"):
            assert figures[f"{what}, {side}"]["median"] > 0
    assert "multistorageclient is not installed" in done.stderr
    judged = {name: figure for name, figure in figures.items() if figure["target"] is not None}
    assert len(judged) == 5
    assert all(figure["met"] for figure in judged.values()), judged
    assert not list(tmp_path.iterdir()), "left behind"
