"""A checkpoint that another program saved, and a start adopted: copied, fetched and resumed from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli_runs import said
from copying import Counted, Killed, carry, contents, copied, is_committed
from real_roots import TREE, crashed, real_job
from strangers import newer_files, torch_dist_files

from ckptfsm import CheckpointManager
from ckptfsm.core.documents import Manifest, decode
from ckptfsm.core.errors import DamagedRoot
from ckptfsm.core.layout import MANIFEST, TRACKER
from ckptfsm.core.lifecycle import State
from ckptfsm.core.ports import Unfit
from ckptfsm.places.fetching import choose, copies_in


def saved_by_torch(root: Path, *steps: int) -> None:
    """A run of a trainer that calls ``torch.distributed.checkpoint`` itself."""
    for step in steps:
        state = {"w": torch.full((64,), float(step)), "step": step}
        dcp.save(state, checkpoint_id=root / f"iter_{step:07d}", no_dist=True)
    (root / TRACKER).write_text(str(steps[-1]))


@pytest.fixture
def adopted(tmp_path: Path):
    """A job on the root of such a run."""
    root = tmp_path / "root"
    root.mkdir()
    saved_by_torch(root, 10, 20)
    job = real_job(root)
    assert [c.step for c in job.coordinator.ledger.in_state(State.TRACKED)] == [10, 20]
    yield job
    crashed(job)


def test_it_comes_back_on_an_empty_machine_and_is_resumed_from(
    adopted, url, place, tmp_path, capsys
):
    """Catches: a copy that no trainer can load, "latest" for the older one, a source that is written
    to, a copy that is sent again."""
    source = Path(adopted.storage.root)
    before = contents(source / "iter_0000020")
    for step in (20, 10):
        assert carry(place, adopted.storage, step).sent == 2
        assert carry(place, adopted.storage, step).sent == 0
    assert contents(source / "iter_0000020") == before
    assert {n: d for n, d in copied(place, 20).items() if n != MANIFEST} == before
    shutil.rmtree(source)
    back = tmp_path / "back"
    assert "the latest is step 20" in said(capsys, "fetch", url, back)
    loaded = {"w": torch.zeros(64), "step": 0}
    dcp.load(loaded, checkpoint_id=back / "iter_0000020", no_dist=True)
    assert (loaded["step"], loaded["w"].unique().tolist()) == (20, [20.0])
    with CheckpointManager(back) as ckpts:
        restored = ckpts.restore({"w": torch.zeros(64), "step": 0})
        assert restored is not None
        assert restored.state["w"].unique().tolist() == [20.0]
        ckpts.save(30, {"w": torch.zeros(64), "step": 30}).wait()
    capsys.readouterr()  # the trainer may have warned of its host
    assert "step 20: good" in said(capsys, "verify", "20", "-r", back)


@pytest.mark.parametrize("files", [torch_dist_files, newer_files])
def test_megatron_s_own_directories_are_copied_too(files, place, tmp_path):
    """Catches: a manifest that leaves common or metadata out."""
    step = tmp_path / "root/iter_0000010"
    step.mkdir(parents=True)
    for name, data in files().items():
        (step / name).write_bytes(data)
    (tmp_path / "root" / TRACKER).write_text("10")
    job = real_job(tmp_path / "root")
    carry(place, job.storage, 10)
    listed = choose(place, copies_in(place), None).manifest.files
    assert {entry.name: entry.bytes for entry in listed} == {n: len(d) for n, d in files().items()}
    crashed(job)


def test_a_copy_of_one_that_was_cut_short_goes_on(adopted, place):
    """Catches: a manifest that is another at each attempt, so that nothing can complete the copy."""
    with pytest.raises(Killed):
        carry(Counted(place, 4), adopted.storage, 20)
    assert carry(place, adopted.storage, 20).sent == 1
    data = place.read(f"iter_0000020/{MANIFEST}")
    found = decode(Manifest, data, MANIFEST)
    assert found.of == adopted.coordinator.ledger.at(20).id
    adopted.save(30, TREE)
    carry(place, adopted.storage, 30)
    assert choose(place, copies_in(place), None).step == 30


def test_an_older_one_that_is_adopted_late_is_not_the_latest(tmp_path, place):
    """Catches: a restart from an old checkpoint because somebody put it beside the newer ones; the copy
    of the newest removed for it."""
    root = tmp_path / "root"
    job = real_job(root)
    job.save(30, TREE)
    carry(place, job.storage, 30)
    crashed(job)
    saved_by_torch(root, 10, 20, 25)
    (root / TRACKER).write_text("30")
    job = real_job(root)
    assert job.coordinator.ledger.latest().step == 30
    assert carry(place, job.storage, 25, keep=1).sent == 0
    for step in (20, 25, 10):
        carry(place, job.storage, step)
        assert choose(place, copies_in(place), None).step == 30
        assert place.read(TRACKER) == b"30\n"
    assert [copy.step for copy in copies_in(place)] == [30, 25, 20, 10]
    carry(place, job.storage, 30, keep=2)
    assert [copy.step for copy in copies_in(place)] == [30, 25]
    crashed(job)


def test_a_change_while_it_is_copied_ends_the_copy(adopted, place):
    """Catches: files of two saves in a copy, for a stock trainer that still writes there."""
    shard = Path(adopted.storage.root, "iter_0000020/__0_0.distcp")

    class Late(Counted):
        def put(self, name, *arguments):
            self._place.put(name, *arguments)
            if name.endswith(".distcp"):
                shard.write_bytes(shard.read_bytes()[:-1] + b"?")

    with pytest.raises(DamagedRoot, match="changed while it was copied"):
        carry(Late(place), adopted.storage, 20)
    assert not is_committed(place, 20)


def test_one_that_no_manifest_can_describe_is_never_copied(adopted, place):
    """Catches: a copy that is not the directory, one that is tried for ever."""
    Path(adopted.storage.root, "iter_0000020/tokenizer").symlink_to("/etc")
    with pytest.raises(Unfit, match="iter_0000020/tokenizer is a symlink"):
        carry(place, adopted.storage, 20)
    assert place.names() == []
