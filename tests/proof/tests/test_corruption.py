"""F15-F21, F30, F34: corrupted checkpoints are never restored, hostile input is refused by type.

The layers ``proof.corruption`` and ``proof.fuzz`` run by themselves; here are the cases that they
found, and that they can fail.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import random
import re
import signal
import tracemalloc
from collections.abc import Iterable

import pytest
from proof import corruption, fuzz
from proof.corruption import (
    LIVES,
    Bench,
    Corruption,
    Template,
    add_file,
    blow_up,
    flip,
    make_template,
)
from proof.fuzz import common_archive, written_metadata
from proof.layer import Budget, LayerResult

from ckptfsm.adapters import posix_storage as storage
from ckptfsm.core.layout import JOURNAL, MANIFEST, STAGING, planned_name
from ckptfsm.disk.stock import inspect_stock
from ckptfsm.testing.simfs import SimDisk, SimStorage

pytestmark = pytest.mark.damages_journal("corrupts journals, among other things")


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench([make_template(name) for name in LIVES])


def named(bench: Bench, name: str) -> Template:
    return next(template for template in bench.templates if template.name == name)


def flipped(template: Template, path: str, at: int, area: str) -> Corruption:
    data = bytearray(template.tree[path])
    data[at] ^= 1 << at % 8
    tree = {**template.tree, path: bytes(data)}
    return Corruption(f"flip {at} of", path, area, frozenset({30}), tree)


class Zero(random.Random):
    """The first of everything."""

    def randrange(self, *arguments: int) -> int:
        return arguments[0] if len(arguments) > 1 else 0


# -------------------------------------------------------------------------------------- corruption


@pytest.mark.parametrize(("matters", "again"), [(True, True), (True, False), (False, False)])
def test_F15_F21_only_strikes_count(bench: Bench, matters: bool, again: bool):
    """Catches: faults counted as exercised by a harmless change, or without a second save."""
    template = bench.templates[0]
    path = next(p for p in template.tree if p.startswith("iter_") and p.endswith(".distcp"))
    made = dataclasses.replace(flipped(template, path, 0, "checkpoint"), matters=matters)
    result = LayerResult("corruption")
    corruption._count_faults(result, made, saved_again=again)
    struck = {f"{number} x tracked" for number, yes in (("F21", matters), ("F15", again)) if yes}
    assert set(result.coverage.faults) == struck


def test_F21_a_flip_in_any_byte_of_a_manifest_is_found(bench: Bench):
    """Catches: a commit record that is believed whatever it says: another name or place of a part,
    other metrics, another writer."""
    template, path = named(bench, "only one"), f"iter_0000030/{MANIFEST}"
    for at in range(0, len(template.tree[path]), 7):
        assert bench.judged(template, flipped(template, path, at, "manifest")) == ""


@pytest.mark.parametrize(
    "file", [planned_name("state"), "receipts/state/0.json", "receipts/ema/1.json"]
)
def test_F30_a_damaged_attempt_is_not_rolled_forward(bench: Bench, file: str):
    """Catches: planned metadata or a receipt that is believed although a bit of it flipped; a root
    that cannot be opened any more because of it."""
    template = named(bench, "written")
    path = next(p for p in template.files if p.startswith(STAGING) and p.endswith(file))
    for at in range(0, len(template.tree[path]), 9 if "planned" in file else 4):
        assert bench.judged(template, flipped(template, path, at, "staging")) == ""


def test_F30_an_attempt_that_cannot_be_rolled_forward_is_cleaned_up(bench: Bench):
    """Catches: a failed roll forward whose dead writers are awaited until close() gives up."""
    template = named(bench, "written")
    path = next(p for p in template.files if p.startswith(STAGING) and p.endswith("__0_0.distcp"))
    corruption = add_file(template, path, random.Random(1))
    assert bench.judged(template, corruption) == ""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each read and digest takes from a real disk from now on."""
    made: list[int] = []
    read, digest = storage._read_up_to, storage._digest

    def counting_read(fd: int, limit: int, offset: int) -> bytes:
        data = read(fd, limit, offset)
        made.append(len(data))
        return data

    def counting_digest(fd: int) -> str:
        made.append(os.fstat(fd).st_size)
        return digest(fd)

    monkeypatch.setattr(storage, "_read_up_to", counting_read)
    monkeypatch.setattr(storage, "_digest", counting_digest)
    return made


def _one_of_each_kind(paths: Iterable[str]) -> list[str]:
    """Two ranks' shards, two segments, two epochs' holders are of one kind; the last one is taken."""
    return sorted({re.sub(r"[0-9a-f]+", "N", path): path for path in paths}.values())


@pytest.mark.parametrize("name", ["settled", "written", "published"])
def test_F30_a_huge_file_is_not_read(bench: Bench, name: str, taken: list[int]):
    """Catches: a sparse file of 20 GB, of any kind, that is read or digested until it is refused."""
    template = named(bench, name)
    for path in [*_one_of_each_kind(template.files), f"{JOURNAL}/000001.ndjson"]:
        taken.clear()
        assert bench.judged(template, blow_up(template, path, Zero()), real=True) == ""
        assert sum(taken) < 1 << 20, path


def test_F30_a_huge_manifest_costs_no_memory(bench: Bench):
    """Catches: one that is read up to a limit first: 2.3 GB of memory at an opening."""
    template = named(bench, "settled")
    corruption = blow_up(template, f"iter_0000030/{MANIFEST}", Zero())
    tracemalloc.start()
    try:
        assert bench.judged(template, corruption, real=True) == ""
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_only_who_hurries_does_without_megatron(bench: Bench, monkeypatch):
    """Catches: a gate that corrupts invented shards only, and mutants that wait for torch."""
    asked: list[bool] = []

    def make_bench(*, megatron: bool) -> Bench:
        asked.append(megatron)
        return Bench(bench.templates[:1], bench.templates[0] if megatron else None)

    monkeypatch.setattr(corruption, "make_bench", make_bench)
    monkeypatch.setattr(Bench, "trial", lambda self, seed: (nothing, ""))
    nothing = flip(bench.templates[0], f"iter_0000030/{MANIFEST}", Zero())
    runs = [corruption.run(Budget(stop_at_first=hurry)) for hurry in (False, True)]
    assert asked == [True, False]
    assert [run.explored["corruptions"] for run in runs] == [1200, 800]


def test_the_judge_of_corruptions_is_not_blind(bench: Bench):
    """Catches: a judge that finds everything in order: here the truth itself is another."""
    template = named(bench, "only one")
    lie = Template(template.name, template.tree, {30: {"x": b"other"}, 31: {}}, template.parts)
    assert "another content" in bench.control(lie)


def test_F20_a_corrupt_sealed_segment_is_refused(bench: Bench):
    """Catches: a sealed segment that is not looked at because the newest says enough."""
    template = named(bench, "settled")
    corruption = flip(template, f"{JOURNAL}/000001.ndjson", Zero())
    assert bench.judged(template, corruption) == ""
    assert bench.counts["refused: journal_corrupt"] >= 1


# -------------------------------------------------------------------------------------------- fuzz


def test_F30_the_death_of_the_interpreter_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    """Catches: a reader that kills the process, which the layer would take for an end in order."""

    def dies(data: bytes) -> None:
        faulthandler.disable()  # pytest's would dump a needless trace
        os.kill(os.getpid(), signal.SIGSEGV)

    target = fuzz.Target("pin", lambda rng: b"", dies)
    monkeypatch.setattr(fuzz, "TARGETS", {"pin": target})
    counts, problems = fuzz.run_in_child("pin", 3)
    assert counts["wrong"] == 1
    assert "died with -11" in problems[0][1]


# ------------------------------------------------------- a stock checkpoint of megatron-core 0.19


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        ({}, ""),
        (
            {"d/__0_1.distcp": bytes(200)},
            "__0_1.distcp: common_state/shard_0_1 is not an intact zip",
        ),
        ({"d/common.pt": b"older"}, "common.pt: beside common_state/shard_0_1 in __0_1.distcp"),
    ],
    ids=["whole", "gutted", "two"],
)
def test_F21_a_common_state_in_a_shard_is_looked_at(spoilt: dict[str, bytes], said: str):
    """Catches: a gutted shard taken for whole; and the common state of an older, interrupted save at the
    same step, which a loader would take."""
    disk = SimDisk()
    files = {
        "d/.metadata": written_metadata("shard"),
        "d/metadata.json": b'{"sharded_backend":"torch_dist"}',
        "d/__0_0.distcp": bytes(100),
        "d/__0_1.distcp": common_archive(),
    }
    SimStorage(disk, "writer").mkdir("d")
    for path, data in {**files, **spoilt}.items():
        disk.plant_file(path, data)
    verdict = inspect_stock(SimStorage(disk, "reader"), "d")
    assert verdict.acceptable is (said == "")
    assert verdict.reason.startswith(said)


# ------------------------------------------------------------- a stock checkpoint of DCP by itself


_RNG = b"fqnX\x0d\0\0\0rng/shard_0_1"  # where it is stored


def _spoilt(old: bytes, new: bytes) -> dict[str, bytes]:
    """The metadata, with the last ``old`` in it replaced."""
    before, _, after = written_metadata("none").rpartition(old)
    return {"d/.metadata": before + new + after}


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        ({}, ""),
        (
            _spoilt(b"fqnX\1\0\0\0w", b"fqnX\1\0\0\0v"),
            ".metadata: tensor 'w': (0, 0) is stored in no",
        ),
        (
            _spoilt(_RNG, _RNG.replace(b"1", b"2")),
            ".metadata: object 'rng/shard_0_1' is stored in no",
        ),
        (_spoilt(b"__0_0.distcp", b"../0_.distcp"), ".metadata: names the file '../0_.distcp'"),
        ({"d/__0_0.distcp": bytes(99)}, "__0_0.distcp: truncated"),
        ({"d/.metadata": written_metadata("file")}, "metadata.json: missing, and 'rng/shard_0_1'"),
        ({"d/common.pt": common_archive()}, "metadata.json: missing"),
        ({"d/.metadata.tmp": b""}, ".metadata.tmp: beside .metadata"),
    ],
    ids=["whole", "tensor", "object", "outside", "cut", "megatron", "common", "over another"],
)
def test_F21_a_checkpoint_of_dcp_is_looked_at(spoilt: dict[str, bytes], said: str):
    """Catches: a checkpoint with a hole taken for whole; one that leads to files elsewhere; the rest of
    a torch_dist directory, or of a save over it, that passes for one of DCP."""
    disk = SimDisk()
    files = {"d/.metadata": written_metadata("none"), "d/__0_0.distcp": bytes(100)}
    SimStorage(disk, "writer").mkdir("d")
    for path, data in {**files, **spoilt}.items():
        disk.plant_file(path, data)
    verdict = inspect_stock(SimStorage(disk, "reader"), "d")
    assert verdict.acceptable is (said == "")
    assert verdict.reason.startswith(said)
