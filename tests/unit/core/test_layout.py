"""Names on disk: a built name parses back, and a name that is not exactly ours is not taken for
ours."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptfsm.core import layout
from ckptfsm.core.parts import MAX_STEP, AttemptId

quick = settings(max_examples=100, derandomize=True, deadline=None, database=None)
steps = st.integers(0, MAX_STEP)
numbers = st.integers(1, 10**9 - 1)
attempts = st.builds(AttemptId, steps, numbers, numbers)
# Text near our names: digits of other scripts, signs, leading zeros, separators, newlines.
near = st.text(alphabet="0123456789٣²+-._ eaiter/\n\x00epoch-jsnd", max_size=24)


@given(steps, attempts, numbers)
@quick
def test_a_built_name_parses_back(step, of, epoch):
    """Catches: a checkpoint, attempt or epoch that a restart would not recognise."""
    assert layout.MEGATRON.parse_published(layout.MEGATRON.published_name(step)) == step
    assert layout.parse_attempt(str(of)) == of
    assert layout.parse_epoch(layout.epoch_name(epoch)) == epoch
    assert layout.parse_segment(layout.segment_name(epoch)) == epoch
    assert layout.parse_pin(layout.pin_name(step).rpartition("/")[2]) == step
    assert layout.parse_reader(f"{step}.{epoch}-77-abc.json") == step
    assert layout.parse_tracker(b"%d" % step) == step


@given(near)
@quick
def test_F30_whatever_parses_builds_the_same_text(text):
    """Catches: ``iter_5`` or ``iter_+0000005`` taken for a checkpoint."""
    for name in (text, f"iter_{text}", f"epoch-{text}", f"{text}.ndjson", f"{text}.e1.a1"):
        step = layout.MEGATRON.parse_published(name)
        assert step is None or layout.MEGATRON.published_name(step) == name
        of = layout.parse_attempt(name)
        assert of is None or str(of) == name
        epoch = layout.parse_epoch(name)
        assert epoch is None or layout.epoch_name(epoch) == name
        segment = layout.parse_segment(name)
        assert segment is None or layout.segment_name(segment) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "iter_",
        "iter_5",
        "iter_00000100",
        "iter_+000005",
        "iter_-000005",
        "iter_000005 ",
        "iter_0000005\n",
        "ITER_0000005",
        "iter_0000005.tmp-1",
        "iter_000000٣",
        "iter_000000²",
        "iter_" + "9" * 16,
        "iter_" + "9" * 5000,
        "release",
        "xiter_0000005",
    ],
)
def test_F30_names_that_are_no_checkpoints(name):
    """Catches: something a person left there treated as a checkpoint, or a crash on it."""
    assert layout.MEGATRON.parse_published(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "",
        "1.e1",
        "1.e1.a1.x",
        "01.e1.a1",
        "1.e01.a1",
        "1.e1.a1\n",
        "../1.e1.a1",
        "-1.e1.a1",
        "٣.e1.a1",
        f"{MAX_STEP + 1}.e1.a1",
        "9" * 400 + ".e1.a1",
    ],
)
def test_F30_names_that_are_no_attempts(name):
    """Catches: a foreign name in staging or trash taken for one of our attempts."""
    assert layout.parse_attempt(name) is None


def test_F30_other_names_that_are_not_ours():
    """Catches: junk beside epochs, segments, pins and leases that is read as one."""
    for name in ("epoch-1", "epoch-0000001", "epoch-", "epoch-000001.tmp-x", "take-000001"):
        assert layout.parse_epoch(name) is None, name
    for name in ("1.ndjson", "0000001.ndjson", "000001.ndjson.bak", "000001", ".ndjson"):
        assert layout.parse_segment(name) is None, name
    pins = ("5", ".json", "x.json", "-5.json", "٣.json", "0005.json", "9" * 16 + ".json")
    for name in (*pins, "9" * 17 + ".json", "5.json.tmp-1"):
        assert layout.parse_pin(name) is None, name
    for name in ("5.nonce", "x.nonce.json", ".json", "5.nonce.json.tmp-1"):
        assert layout.parse_reader(name) is None, name


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"100", 100),
        (b"100\n", 100),
        (b" 0000100 ", 100),
        (b"0", 0),
        (b"release", "release"),
        (b"release\n", "release"),
        (b"%d" % MAX_STEP, MAX_STEP),
        (b"%d" % (MAX_STEP + 1), None),
        (b"", None),
        (b"\n", None),
        (b"-1", None),
        (b"+1", None),
        (b"1.0", None),
        (b"1 2", None),
        (b"10\x00", None),
        (b"1\x1f", None),
        (b"\x1d1", None),
        (b"\xff\xfe", None),
        ("٣".encode(), None),
        (b"9" * 5000, None),
        (b"0" * 15 + b"7", 7),
        (b"0" * 16 + b"7", None),
        (b"X100X", None),
        (b"RELEASE", None),
    ],
)
def test_F18_the_possible_words_of_a_tracker(text, value):
    """Catches: a torn or hostile tracker read as a step, or a crash on a huge number."""
    assert layout.parse_tracker(text) == value


def test_paths_of_an_attempt():
    """Catches: staging, trash and quarantine mixed up, or an in-place save sent to staging."""
    of = AttemptId(100, 7, 2)
    assert layout.staging_dir(of) == ".ckptfsm/staging/100.e7.a2"
    assert layout.trash_dir(of) == ".ckptfsm/trash/100.e7.a2"
    assert layout.quarantine_dir(of) == ".ckptfsm/quarantine/100.e7.a2"
    assert layout.MEGATRON.working_dir(of, in_place=False) == layout.staging_dir(of)
    assert layout.MEGATRON.working_dir(of, in_place=True) == "iter_0000100"
    assert layout.receipt_name("state", 3) == ".ckptfsm/receipts/state/3.json"
    assert layout.planned_name("state") == ".ckptfsm/planned/state.bin"
    assert layout.MANIFEST == ".ckptfsm/manifest.json"
    assert layout.join("a", "", "b") == "a/b" and layout.join("", "") == ""


def test_every_parent_directory_comes_before_its_children():
    """Catches: a list of directories that cannot be created in order."""
    seen = {""}
    for directory in layout.DIRECTORIES:
        assert directory.rpartition("/")[0] in seen
        seen.add(directory)


@pytest.mark.parametrize("names", layout.LAYOUTS.values(), ids=str)
def test_the_greatest_step_has_a_name(names):
    """Catches: a bound that is off by one, so that a checkpoint is written and never found."""
    for step, parsed in ((MAX_STEP, MAX_STEP), (MAX_STEP + 1, None)):
        attempt = AttemptId(step, 1, 1)
        assert names.parse_published(names.published_name(step)) == parsed
        assert layout.parse_attempt(str(attempt)) == (attempt if parsed else None)
        assert layout.parse_pin(f"{step}.json") == parsed
        assert layout.parse_reader(f"{step}.reader.a.json") == parsed
        assert layout.parse_tracker(str(step).encode()) == parsed


def test_names_of_directories_that_were_moved_aside():
    """Catches: a directory that is discarded or left out taken for its step's directory, or deleted
    in its place."""
    of = AttemptId(100, 7, 2)
    assert layout.parse_aside("100.e7.a2") == layout.parse_aside("100.e7.a2.1") == of
    for name in ("", "100.e7.a2.", "100.e7.a2.x", "100.e7.a2.٣", "100.e7.a2.1.2", "100.e7.1"):
        assert layout.parse_aside(name) is None, name
    assert layout.begun_name(of) == ".ckptfsm/begun-100.e7.a2"
    assert layout.gone_dir(of) == ".ckptfsm/trash/gone-100.e7.a2"
    assert layout.left_out_name(of) == "part-100.e7.a2"
    given_up = (layout.gone_dir(of).rpartition("/")[2], layout.left_out_name(of))
    for name in given_up:
        assert layout.is_deletable(name) and layout.parse_aside(name) is None, name
    for name in ("100.e7.a2", "100.e7.a2.1", "GONE-100.e7.a2", "a-gone-100.e7.a2"):
        assert not layout.is_deletable(name), name
