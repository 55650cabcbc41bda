"""The kit for trainers' authors: sound policies and writers pass, wrong ones are caught."""

from __future__ import annotations

import itertools

import pytest

from ckptfsm.core.documents import FileEntry
from ckptfsm.core.ports import PartJob, Written
from ckptfsm.core.retention import AnyOf, BestN, EveryNSteps, LatestN, Policy
from ckptfsm.testing import checks
from ckptfsm.testing.checks import Unsound, assert_policy_sound, assert_writer_sound
from ckptfsm.testing.harness import FakePart
from ckptfsm.writers.rank_writer import FilePart
from ckptfsm.writers.shard_file import ShardFile


@pytest.mark.parametrize(
    "policy", [LatestN(0), LatestN(2), AnyOf((EveryNSteps(4), BestN("loss", 1)))], ids=repr
)
def test_the_librarys_policies_are_sound(policy):
    assert_policy_sound(policy, examples=50)


def test_a_policy_that_keeps_the_steps_its_author_means():
    """Catches: an answer that is looked at twice: the second time, a generator is empty."""

    class Lazy(Policy):
        def preserve(self, checkpoints):
            return (c.step for c in checkpoints if c.step % 2 == 0)

    assert_policy_sound(Lazy(), keeps=lambda cs: {c.step for c in cs if c.step % 4 == 0})
    assert_policy_sound(Lazy(), keeps=lambda cs: [c.step for c in cs if c.step % 2 == 0])


def wrong_policies():
    answers = itertools.count()

    def changes(checkpoints):
        checkpoints.clear()
        return set()

    return {
        "raises": (lambda cs: [cs[0].step], "IndexError"),
        "stranger": (lambda cs: {10**6}, "which are not there"),
        "lazy stranger": (lambda cs: (s for s in (10**6,)), "which are not there"),
        "changes": (changes, "it raised AttributeError"),
        "changes metrics": (lambda cs: {c.step for c in cs if c.metrics.pop("loss", 0)}, "raised"),
        "fickle": (lambda cs: {c.step for c in cs if next(answers) % 2}, "asked twice"),
        "forgets": (lambda cs: {c.step for c in cs[:-1]}, "and not"),
    }


@pytest.mark.parametrize("name", wrong_policies())
def test_a_wrong_policy_is_caught(name):
    preserve, said = wrong_policies()[name]

    class Wrong(Policy):
        def preserve(self, checkpoints):
            return preserve(checkpoints)

    with pytest.raises(Unsound, match=said):
        assert_policy_sound(Wrong(), keeps=lambda cs: {c.step for c in cs[-1:]}, examples=50)


def test_the_librarys_writers_are_sound():
    assert assert_writer_sound(FilePart("data", "data.bin", b"cursor" * 100)) > 5
    assert assert_writer_sound(FakePart("state", "", 0, b"x" * 2000)) > 10


class Careless(PartJob):
    """A part that writes one file, wrongly in one of several ways."""

    name = "extra"
    directory = ""

    def __init__(self, how: str) -> None:
        self.how = how

    def write(self, storage, location):
        path = f"{location}/extra.bin"
        if self.how == "always fails":
            raise OSError("it does not even try")
        if self.how == "no fsync":
            handle = storage.open_exclusive(path)
            storage.write(handle, b"x" * 1000)
            storage.close(handle)
            return Written((FileEntry(name="extra.bin", bytes=1000, digest=storage.digest(path)),))
        shard = ShardFile(storage, path)
        shard.write(b"x" * 1000)
        try:
            entry = shard.close_durably("extra.bin")
        except OSError:
            if self.how != "hides an error":
                raise
            entry = FileEntry(name="extra.bin", bytes=1000, digest=storage.digest(path))
        if self.how == "does not list":
            other = ShardFile(storage, f"{location}/notes.txt")
            other.write(b"hello")
            other.close_durably("notes.txt")
        if self.how == "wrong size":
            entry = FileEntry(name="extra.bin", bytes=999, digest=entry.digest)
        return Written((entry,))


def test_a_careful_writer_is_sound():
    assert_writer_sound(Careless("not"))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("no fsync", "after a power loss|lost its content"),
        ("hides an error", "its call"),
        ("does not list", "is in no receipt"),
        ("wrong size", "sound disk|lost its content"),
        ("always fails", "failed on a sound disk: .*does not even try"),
    ],
)
def test_a_careless_writer_is_caught(how, said):
    with pytest.raises(Unsound, match=said):
        assert_writer_sound(Careless(how))


class Named(PartJob):
    """A part of one file with this name; with ``results`` it stands for a torch_dist part."""

    name = "extra"
    directory = ""

    def __init__(self, file: str, results: tuple = (), digest: bool = True) -> None:
        self.file, self.results, self.digest = file, results, digest

    def write(self, storage, location):
        shard = ShardFile(storage, f"{location}/{self.file}")
        shard.write(b"content")
        entry = shard.close_durably(self.file)
        if not self.digest:
            entry = FileEntry(name=entry.name, bytes=entry.bytes)
        return Written((entry,), self.results)


@pytest.mark.parametrize("file", ["bpe.tmp-final.json", "metadata.json", ".metadata", "common.pt"])
def test_I3_a_writer_whose_file_would_not_stay_is_caught(file):
    """Catches: a part that is called sound, though its file is swept away or replaced when the save
    is finished."""
    with pytest.raises(Unsound, match="swept away|writes such a file"):
        assert_writer_sound(Named(file))


def test_a_writer_may_leave_the_digest_out_and_torch_dist_has_its_common_state():
    """Catches: a check that is too strict."""
    assert_writer_sound(Named("data.bin", digest=False))
    assert_writer_sound(Named("common.pt", results=((0, 7),)))


def test_a_writer_that_leaves_no_receipt_is_caught(monkeypatch):
    monkeypatch.setattr(checks, "write_rank", lambda storage, job: None)
    with pytest.raises(Unsound, match="no receipt"):
        assert_writer_sound(Careless("not"))
