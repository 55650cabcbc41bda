"""Lives read back from journals, and drawn: the records that count, the picture, and that nothing
escapes."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from roots import read_segments

from ckptfsm.adapters.posix_storage import PosixStorage
from ckptfsm.core.documents import (
    CheckpointRecord,
    Part,
    Seal,
    SegmentClosed,
    SegmentOpened,
    TransitionRecord,
)
from ckptfsm.core.errors import JournalCorrupt
from ckptfsm.core.layout import JOURNAL, PRIVATE, segment_name
from ckptfsm.core.lifecycle import State
from ckptfsm.disk.journal import JournalWriter, encode_line
from ckptfsm.views import picture
from ckptfsm.views.axis import Axis
from ckptfsm.views.picture import render_html
from ckptfsm.views.reading import read_lives
from ckptfsm.views.timeline import describe_end, place

pytestmark = pytest.mark.damages_journal("journals made by hand, record by record")

S = State
ZERO = datetime(2026, 1, 1, tzinfo=timezone.utc)
HOSTILE = "</title><script>alert('x')</script>\x1b[31m & \"quoted\""
GOOD = (
    (S.REQUESTED, "save_requested", 0.0),
    (S.FORKED, "writer_forked", 0.25),
    (S.SHARDS_WRITTEN, "shard_reported", 1.0),
    (S.FINALIZED, "published", 1.5),
    (S.TRACKED, "tracker_written", 1.75),
)
WORDS = ("step", "attempt", "requested", "forked", "written", "finalized", "tracked")
GONE = ((S.PRUNABLE, "superseded", 0.0), (S.PRUNED, "removed", 0.5))


def at(seconds: float) -> str:
    return (ZERO + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


class Journal:
    """Writes the segments of a root as a manager would, at the times it is told."""

    def __init__(self, root: Path) -> None:
        self.storage = PosixStorage(root)
        for directory in (PRIVATE, JOURNAL):
            self.storage.mkdir(directory)
        self.states: dict[tuple[int, int, int], State] = {}
        self.seq = 0

    def begin(self, epoch: int, when: float, snapshot: tuple[CheckpointRecord, ...] = ()) -> None:
        segments = read_segments(self.storage)
        seals = tuple(Seal(epoch=s.epoch, bytes=s.end, crc32=s.crc32) for s in segments)
        self.epoch = epoch
        self.writer = JournalWriter(self.storage, epoch)
        opened = SegmentOpened(
            epoch=epoch,
            host="h",
            pid=1,
            at=at(when),
            seals=seals,
            run_seconds=0.0,
            checkpoints=snapshot,
        )
        self.writer.open(opened)

    def move(self, of: tuple[int, int, int], dest: State, event: str, when: str, **more) -> None:
        source = self.states.get(of, S.ABSENT)
        created = None
        if source is S.ABSENT:
            adopted = event == "adopted"
            created = record(of, dest, provenance="adopted" if adopted else "saved")
        self.states[of] = dest
        self.writer.append(
            TransitionRecord(
                seq=self.seq,
                step=of[0],
                epoch=of[1],
                attempt=of[2],
                event=event,
                source=source,
                dest=dest,
                at=when,
                created=created,
                **more,
            )
        )
        self.seq += 1

    def walk(self, of: tuple[int, int, int], moves, begin: float, **more) -> None:
        for dest, event, after in moves:
            self.move(of, dest, event, at(begin + after), **more)

    def close(self, when: float) -> None:
        self.writer.append(SegmentClosed(run_seconds=1.0, at=at(when)))
        self.writer.close()


def record(of: tuple[int, int, int], state: State, **more) -> CheckpointRecord:
    step, epoch, attempt = of
    return CheckpointRecord(
        step=step,
        epoch=epoch,
        attempt=attempt,
        state=state,
        parts=(Part(name="state"),),
        world_size=1,
        **more,
    )


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "root")


@pytest.fixture
def crashed(journal: Journal) -> Journal:
    """Epoch 1: step 10 saved, pruned after step 20; step 30 dies. Epoch 2 discards it, saves 40."""
    journal.begin(1, 0.0)
    journal.walk((10, 1, 1), GOOD, 10.0, shard_bytes=3 << 20)
    journal.walk((20, 1, 2), GOOD, 20.0, shard_bytes=3 << 29)
    journal.walk((10, 1, 1), GONE, 22.0)
    journal.walk((30, 1, 3), GOOD[:2], 30.0)
    left = (record((20, 1, 2), S.TRACKED), record((30, 1, 3), S.FORKED))
    journal.begin(2, 90.0, left)
    lost = {"reason": "process_lost", "detail": HOSTILE}
    journal.walk((30, 1, 3), ((S.FAILED, "failed", 0.0),), 90.25, **lost)
    journal.walk((30, 1, 3), ((S.DISCARDED, "cleaned", 0.0),), 90.5)
    journal.walk((40, 2, 1), GOOD, 100.0)
    journal.close(110.0)
    return journal


class WellFormed(HTMLParser):
    """Fails on a tag that is closed out of order; keeps texts by element, and every attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self.open[-1], data))


def parse(page: str) -> WellFormed:
    parser = WellFormed()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def texts(page: str, tag: str) -> list[str]:
    return [text for element, text in parse(page).texts if element == tag]


# ------------------------------------------------------------------------------------------- reading


def test_a_whole_life_is_read_with_every_state_and_its_time(crashed):
    """Catches: a state, time, size or order lost between journal and life."""
    lives = read_lives(crashed.storage)
    assert [life.attempt for life in lives] == ["10.e1.a1", "20.e1.a2", "30.e1.a3", "40.e2.a1"]
    first = lives[0]
    assert [entry.state for entry in first.entered] == [move[0] for move in (*GOOD, *GONE)]
    assert [entry.at for entry in first.entered] == [
        *(at(10.0 + move[2]) for move in GOOD),
        *(at(22.0 + move[2]) for move in GONE),
    ]
    assert (first.step, first.shard_bytes, first.end) == (10, 3 << 20, S.PRUNED)
    assert describe_end(first) == "pruned"
    assert describe_end(lives[1]) == "tracked (kept)"


def test_a_failed_life_spans_two_epochs_and_says_why(crashed):
    """Catches: the snapshot of a newer epoch beginning a second life, or a reason lost at the end."""
    life = read_lives(crashed.storage)[2]
    entered = [(entry.state, entry.epoch) for entry in life.entered]
    assert entered == [(S.REQUESTED, 1), (S.FORKED, 1), (S.FAILED, 2), (S.DISCARDED, 2)]
    assert (life.reason, life.detail) == ("process_lost", HOSTILE)
    assert describe_end(life) == "discarded: process_lost"


def test_runs_say_when_each_epoch_began_and_whether_it_was_closed(crashed):
    """Catches: a crash shown as an orderly end."""
    runs = read_lives(crashed.storage)[0].resumed
    assert [(r.epoch, r.opened, r.last, r.closed) for r in runs] == [
        (1, at(0.0), at(30.25), False),
        (2, at(90.0), at(110.0), True),
    ]


def test_records_of_a_zombie_after_the_seal_are_not_shown(crashed):
    """Catches: a segment read to its end instead of to its seal."""
    before = read_lives(crashed.storage)
    file = Path(crashed.storage.root) / JOURNAL / segment_name(1)
    data = file.read_bytes()
    late = TransitionRecord(
        seq=99,
        step=30,
        epoch=1,
        attempt=3,
        event="shard_reported",
        source=S.FORKED,
        dest=S.SHARDS_WRITTEN,
        at=at(95.0),
    )
    end = len(data.rstrip(b"\n")) + 1
    file.write_bytes(data[:end] + b"torn, then\n" + encode_line(late))
    assert read_lives(crashed.storage) == before
    assert "shards_written (step 30" not in render_html(before)


def test_a_change_before_the_seal_is_corruption(crashed):
    """Catches: a rewritten history drawn as if it were the true one."""
    file = Path(crashed.storage.root) / JOURNAL / segment_name(1)
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(JournalCorrupt):
        read_lives(crashed.storage)


def test_a_segment_that_never_began_does_not_count(crashed):
    """Catches: an empty newest segment hiding the history before it."""
    before = read_lives(crashed.storage)
    (Path(crashed.storage.root) / JOURNAL / segment_name(3)).write_bytes(b"\n\n")
    assert read_lives(crashed.storage) == before


def test_a_reprieve_an_adoption_and_a_directory_that_was_moved_away(journal):
    """Catches: a second tracked time lost, an adopted one shown as saved, a vanished one as kept."""
    journal.begin(1, 0.0)
    journal.move((5, 1, 1), S.TRACKED, "adopted", at(1.0))
    journal.move((5, 1, 1), S.PRUNABLE, "superseded", at(2.0))
    journal.move((5, 1, 1), S.TRACKED, "reprieved", at(3.0))
    journal.close(4.0)
    (life,) = read_lives(journal.storage)
    assert [entry.state for entry in life.entered] == [S.TRACKED, S.PRUNABLE, S.TRACKED]
    assert describe_end(life) == "tracked (kept, adopted)"
    journal.begin(2, 9.0)
    (life,) = read_lives(journal.storage)
    assert life.left == at(9.0)
    assert describe_end(life) == "tracked, then moved away, adopted"
    parse(render_html((life,)))


def test_a_life_known_only_from_a_snapshot_is_shown(journal):
    """Catches: the picture of a root without its first segments that leaves out a kept checkpoint."""
    journal.begin(7, 0.0, (record((5, 3, 1), S.TRACKED, shard_bytes=8),))
    (life,) = read_lives(journal.storage)
    assert (life.attempt, life.end, life.shard_bytes) == ("5.e3.a1", S.TRACKED, 8)
    assert life.entered[0].at == at(0.0)


# ------------------------------------------------------------------------------------------- drawing


def test_the_page_is_well_formed_and_loads_nothing(crashed):
    """Catches: an unclosed element, a script, or anything fetched from elsewhere."""
    page = render_html(read_lives(crashed.storage))
    parser = parse(page)
    tags = {tag for tag, _ in parser.seen}
    assert "svg" in tags
    assert not tags & {"script", "link", "img", "iframe", "image", "use"}
    assert not {"src", "href", "onload"} & {key for _, attrs in parser.seen for key in attrs}
    assert "url(" not in page and "@import" not in page


def test_the_halves_of_the_page_can_stand_in_a_column(crashed):
    """Catches: letters of 5 pixels on a screen of 80 columns; a half whose lanes tell no step; halves
    side by side with lanes at different heights."""
    page = render_html(read_lives(crashed.storage))
    halves = re.findall(r"(?s)<svg.*?</svg>", page.rpartition('class="halves"')[2])
    boxes = [[*map(int, re.findall(r'viewBox="(.*?)"', half)[0].split())] for half in halves]
    assert boxes[0][3] == boxes[1][3]
    assert all(12 * 624 / width > 9 for _, _, width, _ in boxes), "of 12 pixels, in 80 columns"
    for half, wanted in zip(halves, (">step 10<", ">10<"), strict=True):
        assert wanted in half
    grow = [int(n) for n in re.findall(r"flex:(\d+) 1", page)]
    assert grow == [width for _, _, width, _ in boxes], "else their lanes drift apart"


def test_hostile_text_is_escaped_everywhere(crashed):
    """Catches: a reason or detail of the journal that becomes markup."""
    lives = tuple(
        replace(life, reason=HOSTILE, detail=HOSTILE, attempt=HOSTILE)
        for life in read_lives(crashed.storage)
    )
    page = render_html(lives)
    assert "<script" not in page
    assert "\x1b" not in page
    assert any("<script>alert('x')</script>" in text for text in texts(page, "title"))


def test_the_page_shows_lanes_states_restarts_and_the_crash(crashed):
    """Catches: a lane, a state's times, an epoch line or the mark of the crash missing."""
    crashed.begin(3, 110.0, (record((20, 1, 2), S.TRACKED), record((40, 2, 1), S.TRACKED)))
    page = render_html(read_lives(crashed.storage))
    shown = texts(page, "text")
    for wanted in ("step 10", "step 40", "epoch 1", "epoch 2", "discarded: process_lost"):
        assert wanted in shown
    titles = texts(page, "title")
    forked = f"forked (step 10, attempt 10.e1.a1)\nfrom +10.250 s ({at(10.25)}, epoch 1)"
    assert f"{forked}\nfor 750 ms" in titles
    assert any(t.startswith("tracked (step 20") and "for 88.2 s so far" in t for t in titles)
    assert any(t.startswith("epoch 1 ended without closing") for t in titles)
    assert any(t.startswith("epoch 2 was closed") for t in titles)
    assert len(crash_marks(page)) == 1


def test_every_bar_lies_inside_its_panel_and_can_be_seen(journal):
    """Catches: a state too short to see, or one drawn over the text beside the panel."""
    journal.begin(1, 0.0)
    journal.walk((1, 1, 1), GOOD, 1.0)
    journal.walk((2, 1, 2), GOOD, 5000.0)
    seen = parse(render_html(read_lives(journal.storage))).seen
    bars = [a for tag, a in seen if tag == "rect" and a.get("class") == "bar" and a["y"] != "1"]
    edges = [(float(a["x"]), float(a["x"]) + float(a["width"])) for a in bars]
    whole, alone = (188, 766), (806, 1140)  # the two panels, in pixels
    for left, right in edges:
        panel, least = (whole, 2.98) if left < 780 else (alone, 0.98)
        assert right - left >= least
        assert left >= panel[0] and right <= panel[1] + 0.02
    assert len(edges) == 2 * 2 * len(GOOD)


def test_the_page_names_its_root_and_the_time_of_day(journal):
    """Catches: a page that nobody can lay beside the log of the cluster, or take for another run's."""
    journal.begin(1, 0.0)
    for number, begin in enumerate((10.0, 90000.0), start=1):
        journal.walk((number, 1, number), GOOD, begin)
    page = render_html(read_lives(journal.storage), "/data/<gpt>")
    assert texts(page, "h1") == ["Lives of the checkpoints of /data/<gpt>"]
    assert "Lives of the checkpoints of /data/<gpt>" in texts(page, "title")
    shown = texts(page, "text")
    clock = [text for text in shown if re.fullmatch(r"\d\d:\d\d:\d\d", text)]
    dates = [text for text in shown if re.fullmatch(r"\d{4}-\d\d-\d\d", text)]
    assert len(clock) >= 2 and clock[0] == at(0.0)[11:19]
    assert (
        dates == sorted(set(dates)) and dates[0] == at(0.0)[:10] and dates[-1] == at(90000.0)[:10]
    )


def test_a_long_idle_time_is_cut_and_says_how_long_it_was(journal):
    """Catches: a night between two saves that squeezes the saves into nothing."""
    journal.begin(1, 0.0)
    for number, begin in enumerate((10.0, 20.0, 30.0, 36030.0), start=1):
        journal.walk((number, 1, number), GOOD, begin)
    page = render_html(read_lives(journal.storage))
    assert "10.0 h" in texts(page, "text")
    bars = [a for _, a in parse(page).seen if a.get("class") == "bar" and a["y"] != "1"]
    starts = [float(a["x"]) for a in bars if a["y"] == bars[0]["y"]]
    assert max(x for x in starts if x < 767) - min(starts) > 10


def test_the_picture_begins_with_the_first_attempt_drawn(crashed, monkeypatch):
    """Catches: older attempts and epochs that are not drawn, and press all bars to the right."""
    monkeypatch.setattr(picture, "_MAX_LANES", 1)
    page = render_html(read_lives(crashed.storage))
    shown = texts(page, "text")
    assert f"time since {at(100.0)}" in shown and "2 s" in shown and "10 s" in shown
    assert "epoch 2" in shown and "epoch 1" not in shown
    assert any("3 older attempts are not drawn" in text for text in texts(page, "p"))
    bars = [a for _, a in parse(page).seen if a.get("class") == "bar" and a["y"] != "1"]
    assert float(bars[0]["x"]) == 188


@pytest.mark.parametrize(
    ("length", "first", "last"),
    [
        (0.01, "0 s", "0.01 s"),
        (1.0, "0 s", "1 s"),
        (100.0, "0 s", "90 s"),
        (3600.0, "0 min", "60 min"),
        (9 * 3600.0, "0 h", "9 h"),
        (20.8 * 86400, "0 d", "20 d"),
        (2e11, "0 d", "2000000 d"),
    ],
)
def test_ticks_are_round_times_in_a_unit_that_fits(length, first, last):
    """Catches: days that are counted in seconds, a step that no unit has, too few ticks."""
    ticks = Axis((0.0, length), (188.0, 766.0)).ticks()
    assert (ticks[0], ticks[-1][1]) == ((188.0, first, 0.0), last)
    assert 4 <= len(ticks) <= 10
    counts = [float(label.split()[0]) for _, label, _ in ticks]
    assert counts == pytest.approx([n * counts[1] for n in range(len(ticks))])


def boxes(page: str, class_: str) -> list[tuple[str, float, float, float]]:
    """The texts of a class with their left end, right end and baseline, in pixels, about."""
    parser = parse(page)
    words = iter(texts(page, "text"))
    found = []
    for tag, attributes in parser.seen:
        if tag == "text" and (text := next(words)) and attributes["class"] == class_:
            x, length = float(attributes["x"]), 6.2 * len(text)
            left = x - length / 2 if "mid" in class_ else x
            found.append((text, left, left + length, float(attributes["y"])))
    return found


def test_no_label_lies_over_another_one(journal):
    """Catches: the length of an idle time over a tick, a crash over an epoch, a name in the bars."""
    epochs, number = range(7, 12), 2340
    for epoch in epochs:
        begin = (epoch - 7) * 1_203_400.0
        journal.begin(epoch, begin, ())
        for begin in (begin, begin + 3600, begin + 7200):
            number += 1
            journal.walk((number, epoch, number), GOOD, begin)
    page = render_html(read_lives(journal.storage))
    found = sorted((y, left, right) for _, left, right, y in boxes(page, "dim mid") if left < 780)
    assert all(a[0] < b[0] or a[2] <= b[1] for a, b in pairwise(found))
    labels = [text for text, *_ in boxes(page, "dim mid")]
    assert labels.count("13.8 d") == len(epochs) - 1 and "0 h" in labels
    names = [box for box in boxes(page, "dim") if box[0].startswith("e11.")]
    assert [name for name, *_ in names] == ["e11.a2353", "e11.a2354", "e11.a2355"]
    assert all(right < 188 for _, _, right, _ in names)
    (epoch_line,) = {y for text, _, _, y in boxes(page, "dim") if text.startswith("epoch")}
    marks = {str(a["transform"]).rstrip(")").rpartition(",")[2] for a in crash_marks(page)}
    assert marks and all(float(y) - 5 > epoch_line for y in marks)


def crash_marks(page: str) -> list[dict[str, str | None]]:
    """The attributes of the crash marks, which stand above the lanes."""
    bad = [a for _, a in parse(page).seen if a.get("class") == "mark bad"]
    return [a for a in bad if ",46)" in str(a["transform"])]


def test_missing_or_backward_times_never_make_a_negative_width(journal):
    """Catches: a clock that stepped back, or a record without a time, breaking the page."""
    journal.begin(1, 100.0)
    journal.move((1, 1, 1), S.REQUESTED, "save_requested", at(101.0))
    journal.move((1, 1, 1), S.FORKED, "writer_forked", "")
    journal.move((1, 1, 1), S.SHARDS_WRITTEN, "shard_reported", at(50.0))
    lives = read_lives(journal.storage)
    widths = [float(a["width"]) for tag, a in parse(render_html(lives)).seen if tag == "rect"]
    assert min(widths) >= 0
    assert place(lives).lanes[0].times == (1.0, 1.0, 1.0)


def test_no_lives_are_said_in_words(journal):
    """Catches: a root without checkpoints raising instead of a sentence."""
    assert read_lives(journal.storage) == ()
    journal.begin(1, 0.0)
    assert read_lives(journal.storage) == ()
    assert "no checkpoints" in render_html(())
    parse(render_html(()))
