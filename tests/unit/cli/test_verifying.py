"""``ckptfsm verify``: what it finds, what it reads, and its exit status."""

from __future__ import annotations

import json
import shutil
from typing import ClassVar

import pytest
from cli_runs import ran, said
from real_roots import TREE, real_job, real_root
from rich.progress import Progress
from strangers import dcp_files, newer_files, torch_dist_files

from ckptfsm.cli import bar
from ckptfsm.core.documents import FileEntry, Manifest, Part, encode_sealed
from ckptfsm.core.layout import MANIFEST
from ckptfsm.disk import verification

SHARD = "iter_0000020/__0_0.distcp"


@pytest.fixture
def root(tmp_path):
    return real_root(tmp_path, 10, 20, parts=TREE)


def test_verify_reads_the_latest_and_says_how_much(root, capsys):
    out = said(capsys, "verify", "-r", root)
    assert out.startswith("step 20: good, ") and "B read in" in out


def test_verify_all_reads_every_tracked_one_the_newest_first(root, capsys):
    out = said(capsys, "verify", "--all", "-r", root).splitlines()
    assert [line.split(":")[0] for line in out] == ["step 20", "step 10"]


def test_F21_each_file_with_another_content_is_named(root, capsys):
    for name in (SHARD, "iter_0000020/__1_0.distcp"):
        data = bytearray((root / name).read_bytes())
        data[100] ^= 1
        (root / name).write_bytes(data)
    status, out, _ = ran(capsys, "verify", "--all", "-r", root)
    assert status == 1
    assert "__0_0.distcp has another content" in out and "__1_0.distcp has another content" in out
    assert "step 10: good" in out


@pytest.mark.parametrize("damage", ("cut", "missing", "extra", "manifest"))
def test_F21_damage_of_names_and_sizes_is_found_without_reading(damage, root, capsys):
    if damage == "cut":
        (root / SHARD).write_bytes((root / SHARD).read_bytes()[:-1])
    elif damage == "missing":
        (root / SHARD).unlink()
    elif damage == "extra":
        shutil.copy(root / SHARD, root / "iter_0000020/__9_9.distcp")
    else:
        (root / "iter_0000020/.ckptfsm/manifest.json").write_text("{}")
    status, out, _ = ran(capsys, "verify", "--read-data-subset", "0%", "-r", root)
    assert status == 1 and "DAMAGED" in out


def test_F19_a_tracked_checkpoint_without_its_directory_is_damaged(root, capsys):
    """Catches: a missing latest checkpoint that is called gone by a prune, with status 0."""
    (root / "iter_0000020").rename(root.parent / "moved away")
    status, out, _ = ran(capsys, "verify", "-r", root)
    assert status == 1 and "DAMAGED" in out and "iter_0000020 is not there" in out


def test_another_runs_checkpoint_is_told(tmp_path, capsys):
    """Catches: a directory from the backup of another run called good, because both runs have one
    schedule, so that its attempt has the same name."""
    for root in ("mine", "other"):
        job = real_job(tmp_path / root)
        for step in (10, 20):
            job.save(step, TREE)
        job.close()
    shutil.rmtree(tmp_path / "mine/iter_0000020")
    (tmp_path / "other/iter_0000020").rename(tmp_path / "mine/iter_0000020")
    for words in (("verify", "20"), ("doctor",)):
        status, out, _ = ran(capsys, *words, "-r", tmp_path / "mine")
        assert status == 1 and "its manifest is not the one that the journal recorded" in out
    assert "good" in said(capsys, "verify", "10", "-r", tmp_path / "mine")


@pytest.mark.parametrize("step", [10, 20], ids=["pruned", "saved again"])
def test_a_checkpoint_that_goes_while_it_is_verified_is_not_judged(
    step, tmp_path, capsys, monkeypatch
):
    """Catches: a good checkpoint called another run's, because it took the place of the one that the
    journal knew a moment ago."""
    job = real_job(tmp_path)
    for each in (10, 20):
        job.save(each, TREE)
    looked, before = verification.read_commit, job.coordinator.ledger.at(step)

    def after_a_change(storage, name):
        if job.coordinator.ledger.at(step) == before and step == 10:
            job.coordinator.delete(10)
        elif job.coordinator.ledger.at(step) == before:
            job.coordinator.rollback(10)
            job.save(20, TREE)
        return looked(storage, name)

    monkeypatch.setattr(verification, "read_commit", after_a_change)
    assert "gone from its name meanwhile" in said(capsys, "verify", str(step), "-r", tmp_path)
    job.close()


@pytest.mark.parametrize(
    ("damaged", "arguments", "way_out"),
    [
        ((20,), ("--all",), "start the job, or: ckptfsm rollback 10"),
        ((20,), (), "see which one is good: ckptfsm verify --all"),
        ((10,), ("10",), "nothing now, if the latest is good: ckptfsm verify 20"),
        ((10, 20), ("--all",), "put a good copy back: no checkpoint of this root is good"),
    ],
)
def test_the_way_out_stands_below_a_damaged_step(damaged, arguments, way_out, root, capsys):
    """Catches: a rollback to a step that was not read, or that is damaged, too."""
    for step in damaged:
        shard = root / f"iter_00000{step}/__0_0.distcp"
        shard.write_bytes(shard.read_bytes()[::-1])
    out = ran(capsys, "verify", *arguments, "-r", root)[1].splitlines()
    assert out[-2:] == [f"    do: {way_out}", "    see: ckptfsm runbook checkpoint-damaged"]


def test_a_subset_reads_less_than_everything(root, capsys):
    whole, part = (
        json.loads(said(capsys, "verify", "--json", "--read-data-subset", share, "-r", root))[0]
        for share in ("100%", "1%")
    )
    assert 0 < part["bytes_read"] < whole["bytes_read"]
    assert whole["problems"] == [] and whole["files"] == part["files"]


def test_metadata_that_no_stock_loader_takes_is_found(tmp_path, capsys):
    """The metadata of the fake job is made up: to a stock loader it is damaged."""
    root = real_root(tmp_path, 10)
    status, out, _ = ran(capsys, "verify", "-r", root)
    assert status == 1 and "a stock loader would refuse part 'state'" in out


@pytest.mark.parametrize(
    ("kind", "length", "reason"),
    (
        ("dcp", 100, ""),
        ("dcp", 99, "part 'state': __0_0.distcp: truncated"),
        ("torch_dist", 100, "part 'state': metadata.json: missing"),
    ),
)
def test_a_part_is_judged_by_the_format_that_its_manifest_names(
    kind, length, reason, tmp_path, capsys
):
    """Catches: a part of DCP that nobody looks into, or is taken for Megatron's by the names of its
    keys; a part of Megatron's without its metadata that passes for one of DCP."""
    place, names = tmp_path / "iter_0000040", (".metadata", "__0_0.distcp")
    data = dict(zip(names, (torch_dist_files()[".metadata"], bytes(length)), strict=True))
    files = tuple(FileEntry(name=name, bytes=len(data[name])) for name in names)
    manifest = Manifest(
        step=40,
        epoch=1,
        attempt=1,
        world_size=1,
        parts=(Part(name="state", kind=kind),),
        files=files,
    )
    (place / ".ckptfsm").mkdir(parents=True)
    for name, content in {**data, MANIFEST: encode_sealed(manifest)}.items():
        (place / name).write_bytes(content)
    status, out, _ = ran(capsys, "verify", place)
    assert (status, reason in out) == (int(bool(reason)), True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    (
        (("30",), "step 30 is not tracked"),
        (("10", "--all"), "give a step, or --all"),
        (("--read-data-subset", "ten"), "no percentage"),
        (("--read-data-subset", "200%"), "no percentage"),
    ),
)
def test_bad_calls_are_told(arguments, words, root, capsys):
    status, out, err = ran(capsys, "verify", *arguments, "-r", root)
    assert (status, out) == (2, "") and words in err


@pytest.mark.parametrize("which", [(), ("--all",)], ids=["latest", "all"])
def test_a_root_without_a_tracked_checkpoint_has_nothing_to_verify(which, tmp_path, capsys):
    """Catches: a check of nothing that ends like a good one."""
    real_root(tmp_path)
    status, _, err = ran(capsys, "verify", *which, "-r", tmp_path)
    assert status == 2 and "no checkpoint of this root is tracked" in err


class Bars(Progress):
    """Keeps the state of each bar at its end."""

    ended: ClassVar[list[tuple[str, float, float | None]]] = []

    def remove_task(self, task_id):
        task = self._tasks[task_id]
        self.ended.append((task.description, task.completed, task.total))
        super().remove_task(task_id)


def test_a_bar_on_a_terminal_reaches_its_end_for_each_step(root, capsys, monkeypatch):
    """Catches: a bar that stands still, counts another total, or stays on the screen."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(bar, "Progress", Bars)
    monkeypatch.setattr(Bars, "ended", [])
    status, _, err = ran(capsys, "verify", "--all", "-r", root)
    assert status == 0 and "\x1b[" in err
    sizes = {step: _bytes_of(root / f"iter_00000{step}") for step in (20, 10)}
    assert Bars.ended == [(f"step {step}", size, size) for step, size in sizes.items()]


def _bytes_of(directory) -> int:
    """The bytes of all files that the manifest names."""
    manifest = json.loads((directory / ".ckptfsm/manifest.json").read_text())
    return sum((directory / file["name"]).stat().st_size for file in manifest["files"])


def test_without_a_manifest_the_form_alone_is_judged(tmp_path, capsys):
    """Catches: 'good' of a stock trainer's checkpoint, as if its content had been compared."""
    root = real_root(tmp_path, 10, parts=TREE)
    stock = root / "iter_0000040"
    stock.mkdir()
    for name, data in newer_files().items():
        (stock / name).write_bytes(data)
    said(capsys, "adopt", "iter_0000040", "-r", root)
    told = said(capsys, "verify", "-r", root)
    assert told == "step 40: good in form, 4 files; without a manifest no digest is known\n"


@pytest.mark.parametrize("name", ("iter_0000020", "kept for the paper", "7"))
def test_a_copy_far_from_its_root_is_judged_by_its_manifest(name, root, tmp_path, capsys):
    """Catches: a copy that nobody can verify before the original is deleted."""
    copy = shutil.copytree(root / "iter_0000020", tmp_path / "archive" / name)
    shutil.rmtree(root / ".ckptfsm")
    before = sorted(copy.rglob("*"))
    assert said(capsys, "verify", copy).startswith(f"{name}: good, ")
    (verdict,) = json.loads(said(capsys, "verify", "--json", copy))
    assert (verdict["step"], verdict["problems"]) == (20, [])
    data = bytearray((copy / "__0_0.distcp").read_bytes())
    data[100] ^= 1
    (copy / "__0_0.distcp").write_bytes(data)
    status, out, _ = ran(capsys, "verify", copy)
    assert status == 1 and "__0_0.distcp has another content" in out
    (copy / ".ckptfsm/manifest.json").write_text("{")
    assert ran(capsys, "verify", copy)[0] == 1
    assert sorted(copy.rglob("*")) == before


@pytest.mark.parametrize(("files", "number"), ((newer_files, 4), (dcp_files, 2)))
def test_a_copy_of_stock_code_is_judged_in_its_form(files, number, tmp_path, capsys):
    stock = tmp_path / "iter_0000040"
    stock.mkdir()
    for name, data in files().items():
        (stock / name).write_bytes(data)
    assert said(capsys, "verify", stock).startswith(f"iter_0000040: good in form, {number} files")
    (stock / ".metadata").unlink()
    assert ran(capsys, "verify", stock)[0] == 1


@pytest.mark.damages_journal("flips a bit of a record")
def test_with_a_damaged_journal_the_checkpoints_are_judged_all_the_same(root, capsys):
    """Catches: a person without a journal who cannot learn which checkpoints are good."""
    segment = root / ".ckptfsm/journal/000001.ndjson"
    data = bytearray(segment.read_bytes())
    data[200] ^= 1
    segment.write_bytes(data)
    status, out, err = ran(capsys, "verify", "--all", "-r", root)
    lines = out.splitlines()
    assert (status, err) == (1, "") and "000001.ndjson" in lines[0]
    assert [line[:13] for line in lines[1:3]] == ["step 20: good", "step 10: good"]
    assert lines[3:] == ["    do: ckptfsm doctor", "    see: ckptfsm runbook journal-damaged"]
    assert ran(capsys, "verify", "30", "-r", root)[0] == 2
    _, _, err = ran(capsys, "ls", "-r", root)
    assert "ckptfsm verify --all" in err and "ckptfsm doctor" in err


@pytest.mark.damages_journal("deletes the journal")
def test_without_a_journal_the_checkpoints_are_judged_all_the_same(root, capsys):
    """Catches: a check of nothing that succeeds, and a damaged step that the next start adopts."""
    shutil.rmtree(root / ".ckptfsm/journal")
    assert said(capsys, "verify", "--all", "-r", root).startswith("there is no journal: judged is ")
    shard = root / "iter_0000020/__0_0.distcp"
    shard.write_bytes(bytes(reversed(shard.read_bytes())))
    status, out, _ = ran(capsys, "verify", "--all", "-r", root)
    assert status == 1 and "step 20: DAMAGED" in out and "step 10: good" in out
    assert "move iter_0000020 out of the root" in out
    assert ran(capsys, "verify", "20", "-r", root)[0] == 1


def test_files_of_strangers_in_a_checkpoint_are_told(root, capsys):
    """Catches: an export that a person put into a checkpoint, which a prune deletes with it."""
    (root / "iter_0000020/notes.txt").write_text("mine")
    (root / "iter_0000020/hf").mkdir()
    (root / "iter_0000020/hf/config.json").write_text("{}")
    out = said(capsys, "verify", "-r", root)
    assert "  not of this checkpoint: hf/config.json\n" in out
    assert "  not of this checkpoint: notes.txt\n" in out
    assert "  not of this checkpoint: notes.txt\n" in said(capsys, "show", "20", "-r", root)
