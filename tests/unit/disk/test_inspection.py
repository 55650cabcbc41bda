"""Looking at a root: findings, files that are only reported, and that nothing is changed."""

from __future__ import annotations

import errno
import json
import random
from pathlib import Path
from unittest.mock import patch

import pytest
from ledgers import ledger_of

from ckptfsm.adapters.posix_storage import digest_of, opened_storage
from ckptfsm.core import layout
from ckptfsm.core.documents import (
    FileEntry,
    Manifest,
    Receipt,
    encode,
)
from ckptfsm.core.errors import (
    CkptFsmError,
    DamagedRoot,
    NewerSchema,
)
from ckptfsm.core.evidence import TrackerEvidence
from ckptfsm.core.keeping import Contents
from ckptfsm.core.layout import (
    MANIFEST,
    MEGATRON,
    RECEIPTS,
    STAGING,
    TRACKER,
    planned_name,
    receipt_name,
    staging_dir,
)
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.core.ports import RankJob
from ckptfsm.disk import durable
from ckptfsm.disk.durable import make_dirs, write_new
from ckptfsm.disk.inspection import (
    check_digests,
    check_extra_shards,
    check_sizes,
    contents_of,
    gather_evidence,
    inspect_published,
    inspect_staging,
    list_beside,
    read_manifest,
    read_tracker,
)
from ckptfsm.disk.receipts import CheckedReceipt, Receipts
from ckptfsm.testing.harness import FakeJob, FakePart, fake_content
from ckptfsm.testing.simfs import SimDisk, SimStorage
from ckptfsm.writers.rank_writer import write_rank

STEP = "iter_0000001"
OF = AttemptId(5, 1, 1)
WRITTEN = Checkpoint(OF, State.SHARDS_WRITTEN, (PartSpec("state"),), world_size=2)


@pytest.fixture
def disk() -> SimDisk:
    """A root with step 1, and a written attempt at step 5. The job's process is gone."""
    made = SimDisk()
    job = FakeJob(SimStorage(made, "job"))
    job.open()
    job.save(1)
    job.close()
    storage = SimStorage(made, "job")
    make_dirs(storage, staging_dir(OF))
    for rank in (0, 1):
        part = FakePart("state", "", rank, fake_content(OF, rank))
        write_rank(storage, RankJob(OF, rank, 2, staging_dir(OF), (part,)))
    made.kill("job")
    return made


def reader(disk: SimDisk) -> SimStorage:
    return SimStorage(disk, "reader")


def receipts_in(storage: SimStorage) -> Receipts:
    """The receipts of the attempt at step 5."""
    return Receipts(storage, staging_dir(OF), OF, WRITTEN.world_size)


def replace(disk: SimDisk, path: str, data: bytes | None) -> None:
    storage = SimStorage(disk, "vandal")
    if path in disk.snapshot():
        storage.unlink(path)
    if data is not None:
        disk.plant_file(path, data)


def entries(disk: SimDisk) -> tuple[FileEntry, ...]:
    found = read_manifest(reader(disk), STEP)
    assert found is not None
    return found.files


# -------------------------------------------------------------------------------- the tracker


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"100", TrackerEvidence("step", 100)),
        (b"100\n", TrackerEvidence("step", 100, by_us=True)),
        (b" 100 \n", TrackerEvidence("step", 100)),
        (b"0100\n", TrackerEvidence("step", 100)),
        (b"0", TrackerEvidence("step", 0)),
        (b"release\n", TrackerEvidence("release")),
        (b"", TrackerEvidence("torn")),
        (b"\n", TrackerEvidence("torn")),
        (b"10 0", TrackerEvidence("torn")),
        (b"1" * 300, TrackerEvidence("torn")),
        (b"1" * 16 + b" " * 300, TrackerEvidence("torn")),
        ("١٢".encode(), TrackerEvidence("torn")),
    ],
)
def test_F18_the_words_of_a_tracker(disk: SimDisk, content: bytes, expected: TrackerEvidence):
    """Catches: a torn tracker taken for a step, or a step for torn."""
    replace(disk, TRACKER, content)
    assert read_tracker(reader(disk)) == expected


def test_F18_no_tracker_and_a_tracker_that_is_no_file(disk: SimDisk):
    """F16. Catches: a link that is followed, a directory that ends in a traceback."""
    replace(disk, TRACKER, None)
    assert read_tracker(reader(disk)) == TrackerEvidence("missing")
    disk.plant_symlink(TRACKER, f"{STEP}/{MANIFEST}")
    assert read_tracker(reader(disk)) == TrackerEvidence("torn")
    SimStorage(disk, "vandal").unlink(TRACKER)
    disk.plant_mount(TRACKER, device=1)
    assert read_tracker(reader(disk)) == TrackerEvidence("torn")


# ---------------------------------------------------------------------------- contents in place


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ((), Contents.BARE),
        (("common.pt",), Contents.BARE),
        (("dist_ckpt/common.pt",), Contents.BARE),
        (("__0_0.distcp",), Contents.CUT_SHORT),
        (("common.pt", f"{RECEIPTS}/state/0.json"), Contents.CUT_SHORT),
        (("__0_0.distcp", "metadata.json.tmp-x.0"), Contents.CUT_SHORT),
        (("extra/data.bin", "tokens/0/a"), Contents.CUT_SHORT),
        (("metadata.json",), Contents.MORE),
        (("__0_0.distcp", ".metadata"), Contents.MORE),
        (("extra/other.bin",), Contents.MORE),
        (("mp_rank_00/model_optim_rng.pt",), Contents.MORE),
    ],
)
def test_I1_how_far_a_save_in_place_got(disk: SimDisk, files: tuple[str, ...], expected: Contents):
    """Catches: a file of another trainer that passes for the remains of a save that was cut short."""
    storage, name = SimStorage(disk, "job-2"), "iter_0000009"
    make_dirs(storage, name)
    for file in files:
        make_dirs(storage, f"{name}/{file}".rpartition("/")[0])
        write_new(storage, f"{name}/{file}", b"x")
    parts = (
        PartSpec("state"),
        PartSpec("data.bin", "file", "extra"),
        PartSpec("t", "tree", "tokens"),
    )
    begun = Checkpoint(AttemptId(9, 2, 1), State.FORKED, parts, world_size=2)
    assert contents_of(storage, name, begun) == expected


# ------------------------------------------------------------------------------ files and digests


def test_F21_a_whole_checkpoint_has_no_problem(disk: SimDisk):
    """Catches: a check that cries wolf, after which users no longer verify."""
    files = entries(disk)
    assert len(files) >= 6
    assert check_sizes(reader(disk), STEP, files) == ""
    assert check_digests(reader(disk), STEP, files) == ""
    assert check_extra_shards(reader(disk), STEP, files) == ""


def test_F21_every_single_file_is_looked_at(disk: SimDisk):
    """Catches: a file that no depth of verification covers: missing, short, long or flipped."""
    files = entries(disk)
    for entry in files:
        path = f"{STEP}/{entry.name}"
        data = disk.snapshot()[path]
        flipped = bytes([data[0] ^ 1]) + data[1:]
        for damage, by_size in ((None, 1), (data[:-1], 1), (data + b"x", 1), (flipped, 0)):
            replace(disk, path, damage)
            found = check_sizes(reader(disk), STEP, files)
            assert (entry.name in found) == bool(by_size)
            if damage is not None:
                assert entry.name in check_digests(reader(disk), STEP, files)
        replace(disk, path, data)
    assert check_digests(reader(disk), STEP, files) == ""


def test_F16_a_file_that_became_a_link_is_damage(disk: SimDisk):
    """Catches: a shard read through a link, from somewhere else."""
    SimStorage(disk, "vandal").rename(f"{STEP}/__0_0.distcp", "moved")
    disk.plant_symlink(f"{STEP}/__0_0.distcp", "../moved")
    assert "symlink" in check_sizes(reader(disk), STEP, entries(disk))
    assert inspect_published(reader(disk), MEGATRON, 1).found == "damaged"


def test_F21_an_extra_shard_is_found_and_other_files_are_not_ours(disk: SimDisk):
    """Catches: a stock loader that reads a shard of another save; a note that condemns one."""
    disk.plant_file(f"{STEP}/README", b"by a person")
    assert check_extra_shards(reader(disk), STEP, entries(disk)) == ""
    disk.plant_file(f"{STEP}/__7_0.distcp", b"of another save")
    assert "__7_0.distcp" in check_extra_shards(reader(disk), STEP, entries(disk))
    assert inspect_published(reader(disk), MEGATRON, 1).found == "damaged"


def test_F21_a_listing_judges_as_a_look_at_each_file_does(disk: SimDisk):
    """Catches: damage that only a look at the file itself would find, and a new file that is called
    missing because a network file system lists it late."""
    files = entries(disk)
    inner = {entry.name.rpartition("/")[0] for entry in files}
    seen = list_beside(reader(disk), STEP, [*files, *files, *files])  # as if each held many
    assert seen.keys() == inner and check_sizes(SimStorage(SimDisk(), "r"), STEP, files, seen) == ""
    assert check_sizes(reader(disk), STEP, files, dict.fromkeys(inner, {})) == ""
    for entry in files:
        path = f"{STEP}/{entry.name}"
        data = disk.snapshot()[path]
        for damage in (None, data + b"x"):
            replace(disk, path, damage)
            assert entry.name in inspect_published(reader(disk), MEGATRON, 1).detail
        replace(disk, path, data)
    assert inspect_published(reader(disk), MEGATRON, 1).found == "manifest"


# ----------------------------------------------------------------------------- published directories


def test_a_published_checkpoint_is_recognised(disk: SimDisk):
    """Catches: a good checkpoint taken for damaged, or for one without an attempt."""
    found = inspect_published(reader(disk), MEGATRON, 1)
    assert (found.found, found.of) == ("manifest", AttemptId(1, 1, 1))


@pytest.mark.parametrize("kind", ["nothing", "file", "symlink", "empty", "no_manifest"])
def test_I8_a_directory_that_is_no_checkpoint_is_unexplained(disk: SimDisk, kind: str):
    """F16. Catches: evidence explained away, or followed elsewhere."""
    if kind == "file":
        disk.plant_file("iter_0000007", b"?")
    elif kind == "symlink":
        disk.plant_symlink("iter_0000007", STEP)
    elif kind == "empty":
        disk.plant_mount("iter_0000007", device=1)
    elif kind == "no_manifest":
        make_dirs(SimStorage(disk, "vandal"), "iter_0000007")
        disk.plant_file("iter_0000007/__0_0.distcp", b"half")
    found = inspect_published(reader(disk), MEGATRON, 7)
    expected = "unexplained" if kind in ("empty", "no_manifest") else "no_directory"
    assert found.found == expected and "iter_0000007" in found.detail


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"step": 1}', b"\xff" * 50, b"[" * 100_000]
)
def test_F30_a_torn_manifest_is_damage(disk: SimDisk, content: bytes):
    """Catches: a traceback of the parser instead of a fallback."""
    replace(disk, f"{STEP}/{MANIFEST}", content)
    assert inspect_published(reader(disk), MEGATRON, 1).found == "damaged"


@pytest.mark.parametrize("kind", ["dir", "symlink"])
def test_F16_a_manifest_that_is_no_file_is_damage(disk: SimDisk, kind: str):
    """Catches: a manifest read through a link."""
    SimStorage(disk, "vandal").rename(f"{STEP}/{MANIFEST}", "manifest")
    if kind == "dir":
        disk.plant_mount(f"{STEP}/{MANIFEST}", device=1)
    else:
        disk.plant_symlink(f"{STEP}/{MANIFEST}", "../../manifest")
    assert inspect_published(reader(disk), MEGATRON, 1).found == "damaged"


def test_F21_a_manifest_of_another_step_is_damage(disk: SimDisk):
    """Catches: a renamed directory that resumes from the wrong step."""
    SimStorage(disk, "vandal").rename(STEP, "iter_0000009")
    found = inspect_published(reader(disk), MEGATRON, 9)
    assert found.found == "damaged" and "step 1" in found.detail


def test_F34_a_newer_manifest_stops_everything(disk: SimDisk):
    """Catches: a newer version's checkpoint called damaged and moved aside."""
    manifest = json.loads(disk.snapshot()[f"{STEP}/{MANIFEST}"]) | {"schema_version": 2}
    replace(disk, f"{STEP}/{MANIFEST}", json.dumps(manifest).encode())
    with pytest.raises(NewerSchema):
        inspect_published(reader(disk), MEGATRON, 1)
    with pytest.raises(NewerSchema):
        gather_evidence(reader(disk), MEGATRON, Ledger())


# ------------------------------------------------------------------------------ staging, receipts


@pytest.mark.parametrize(
    "gone",
    ["__0_0.distcp", "__1_0.distcp", receipt_name("state", 0), receipt_name("state", 1)]
    + [planned_name("state")],
)
def test_I3_an_attempt_with_anything_missing_is_not_complete(disk: SimDisk, gone: str):
    """Catches: half an attempt that is rolled forward."""
    replace(disk, f"{staging_dir(OF)}/{gone}", None)
    found = inspect_staging(reader(disk), MEGATRON, WRITTEN)
    assert not found.complete and gone.rpartition("/")[2].split(".")[0] in found.detail


def test_I3_an_attempt_whose_directory_is_gone(disk: SimDisk):
    """Catches: an error where "no" is the answer."""
    SimStorage(disk, "vandal").rename(staging_dir(OF), "moved")
    assert not inspect_staging(reader(disk), MEGATRON, WRITTEN).complete


def test_I6_a_foreign_attempt_is_never_rolled_forward(disk: SimDisk):
    """Catches: finalizers run by a process that does not have their queue."""
    foreign = Checkpoint(OF, State.SHARDS_WRITTEN, (PartSpec("state", "foreign"),), world_size=2)
    assert not inspect_staging(reader(disk), MEGATRON, foreign).complete


@pytest.mark.parametrize("field", ["step", "epoch", "attempt", "rank", "world_size", "part"])
def test_I5_a_receipt_of_something_else_does_not_count(disk: SimDisk, field: str):
    """Catches: a cross-wired receipt that completes an attempt."""
    path = f"{staging_dir(OF)}/{receipt_name('state', 1)}"
    receipt = json.loads(disk.snapshot()[path])
    del receipt["crc"]
    receipt[field] = "other" if field == "part" else receipt[field] + 1
    replace(disk, path, json.dumps(receipt).encode())
    with pytest.raises(DamagedRoot) as caught:
        receipts_in(reader(disk)).read("state", 1)
    assert caught.value.file == path and caught.value.rank == 1
    assert not inspect_staging(reader(disk), MEGATRON, WRITTEN).complete


# ------------------------------------------------------------------------------------ everything


def test_gather_changes_nothing_and_finds_everything(disk: SimDisk):
    """Catches: a look that repairs, sweeps or creates; a name that is overlooked."""
    for name in ("iter_5", "iter_+000005", "iter_0000005x", "iter_" + "9" * 60, "other"):
        disk.plant_mount(name, device=1)
    disk.plant_mount(f"{STAGING}/hostile..", device=1)
    disk.plant_mount(f"{STAGING}/9.e9.a9", device=1)
    before = disk.snapshot()
    found = gather_evidence(reader(disk), MEGATRON, ledger_of(WRITTEN))
    assert disk.snapshot() == before
    assert found.tracker == TrackerEvidence("step", 1, by_us=True)
    assert {step: e.found for step, e in found.published.items()} == {1: "manifest"}
    assert {of: e.complete for of, e in found.staging.items()} == {
        OF: True,
        AttemptId(9, 9, 9): False,
    }
    assert found.strays == (f"{STAGING}/hostile..",)


def test_gather_on_an_empty_root():
    """F33. Catches: an error on the very first start."""
    found = gather_evidence(SimStorage(SimDisk(), "reader"), MEGATRON, Ledger())
    assert (found.tracker.found, dict(found.published), dict(found.staging)) == ("missing", {}, {})


@pytest.mark.parametrize("name", ["ckpt_100", "release", "step-100", ""])
def test_I8_a_checkpoint_without_a_steps_name_is_found(name: str):
    """Catches: a start from zero beside a checkpoint of another loop, or inside of one."""
    disk = SimDisk()
    if name:
        make_dirs(SimStorage(disk, "other"), name)
    disk.plant_file(f"{name}/.metadata".lstrip("/"), b"whatever")
    (found,) = gather_evidence(reader(disk), MEGATRON, Ledger()).unnamed
    assert (name or "the root itself") in found
    assert ("layout='titan'" in found) == (name == "step-100")
    known = ledger_of(Checkpoint(OF, State.TRACKED, (PartSpec("state"),), 1))
    assert gather_evidence(reader(disk), MEGATRON, known).unnamed == ()


@pytest.mark.parametrize(
    ("file", "way"),
    [
        (
            "step_100/random_states_0.pkl",
            "checkpoint_100, and open the root with layout='accelerate'",
        ),
        ("best/trainer_state.json", "checkpoint-100, and open the root with layout='hf'"),
        ("checkpoint-7/optimizer.pt", "open the root with layout='hf'"),
        ("optimizer.pt", "give the directory above it"),
        ("checkpoints/last.ckpt", "load it once with the code that saved it"),
    ],
)
def test_I8_a_checkpoint_of_another_trainer_is_found(file: str, way: str):
    """Catches: a start from zero beside the state of a trainer that writes no ``.metadata``."""
    disk = SimDisk()
    directory, _, name = file.rpartition("/")
    if directory:
        make_dirs(SimStorage(disk, "other"), directory)
    disk.plant_file(file, b"whatever")
    (found,) = gather_evidence(reader(disk), MEGATRON, Ledger()).unnamed
    assert f"{directory or 'the root itself'} has a {name}" in found and way in found


def test_I8_what_else_lies_in_a_root_is_no_evidence(tmp_path: Path):
    """Catches: logs or an exported model that keep a job from its first start; a link that is followed;
    a directory of the administrator's."""
    for name in ("tensorboard", "wandb/run-1", "workspace/.metadata", "lost+found", "old.ckpt"):
        (tmp_path / "root" / name).mkdir(parents=True)
    for name in ("", "base", "export"):
        (tmp_path / "root" / name).mkdir(exist_ok=True)
        for file in ("model.safetensors", "pytorch_model.bin", "config.json", "training_args.bin"):
            (tmp_path / "root" / name / file).touch()
    (tmp_path / "root" / "trainer_state.json").touch()  # as Trainer.save_state() leaves it
    (tmp_path / "root" / "last.ckpt").touch()  # for ``integrations/lightning.py`` to decide about
    (tmp_path / "root" / "wandb" / "run-1" / ".metadata").touch()
    (tmp_path / "root" / "train.log").touch()
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / ".metadata").touch()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "else")
    with opened_storage(tmp_path / "root") as storage:
        listdir = storage.listdir

        def as_another_user(path: str):
            if path == "lost+found":
                raise PermissionError(errno.EACCES, "not for you")
            return listdir(path)

        with patch.object(storage, "listdir", as_another_user):
            assert gather_evidence(storage, MEGATRON, Ledger()).unnamed == ()


@pytest.mark.parametrize("seed", range(20))
def test_F30_random_damage_is_a_finding_not_a_crash(disk: SimDisk, seed: int):
    """Catches: an exception that is not ours, for whatever a disk can do to a file."""
    choose = random.Random(seed)
    files = sorted(p for p, v in disk.snapshot().items() if type(v) is bytes and "lock" not in p)
    for path in choose.sample(files, 4):
        data = bytearray(disk.snapshot()[path])
        for _ in range(3):
            if data:
                data[choose.randrange(len(data))] = choose.randrange(256)
        replace(disk, path, bytes(data[: choose.randrange(len(data) + 1)]))
    before = disk.snapshot()
    try:
        gather_evidence(reader(disk), MEGATRON, ledger_of(WRITTEN))
    except CkptFsmError:
        pass  # typed: a newer schema, by chance
    assert disk.snapshot() == before


def test_a_receipt_round_trip():
    """Catches: results or files that come back as something else, a digest of other bytes."""
    rows = (("weights", 0, None, "__0_0.distcp", 0, 10), ("rng", None, 3, "__0_0.distcp", 10, 5))
    files = (FileEntry(name="__0_0.distcp", bytes=15),)
    receipt = Receipt(
        step=5, epoch=1, attempt=1, part="state", rank=0, world_size=2, files=files, results=rows
    )
    disk = SimDisk()
    storage = SimStorage(disk, "p")
    make_dirs(storage, f"{staging_dir(OF)}/.ckptfsm/receipts/state")
    data, name = encode(receipt), receipt_name("state", 0)
    write_new(storage, f"{staging_dir(OF)}/{name}", data)
    entry = FileEntry(name=name, bytes=len(data), digest=digest_of(data))
    found = receipts_in(storage).read("state", 0)
    assert found == CheckedReceipt("state", 0, files, rows, "", entry)


def test_F33_a_save_that_has_only_begun_is_no_evidence(disk: SimDisk):
    """Catches: a first save in place, killed before its writers, that refuses the next start."""
    make_dirs(SimStorage(disk, "vandal"), "iter_0000007/model")
    disk.plant_file("iter_0000007/model/common.pt", b"half")
    make_dirs(SimStorage(disk, "vandal"), "iter_0000008")
    disk.plant_file("iter_0000008/common.pt", b"half")
    disk.plant_file("iter_0000008/__0_0.distcp", b"a shard")
    found = gather_evidence(reader(disk), MEGATRON, Ledger())
    assert "iter_0000007" in found.strays and 7 not in found.published
    assert found.published[8].found == "unexplained"
    known = ledger_of(Checkpoint(AttemptId(7, 1, 1), State.TRACKED, (PartSpec("state"),), 1))
    assert 7 in gather_evidence(reader(disk), MEGATRON, known).published


def test_F30_a_hostile_name_in_a_manifest_is_damage():
    """Catches: a configuration error out of looking at a directory: the root cannot be opened."""
    manifest = Manifest(step=10, epoch=1, attempt=1, world_size=1, parts=(), files=())
    hostile = encode(manifest).replace(b'"files":[]', b'"files":[{"name":"./x","bytes":1}]')
    storage = SimStorage(SimDisk())
    path = f"{layout.MEGATRON.published_name(10)}/{layout.MANIFEST}"
    durable.make_dirs(storage, durable.parent_of(path))
    durable.put(storage, path, hostile, tag="t")
    assert inspect_published(storage, layout.MEGATRON, 10).found == "damaged"
