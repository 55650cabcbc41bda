"""The planted bugs themselves: that they still fit the library, and that planting one works."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from mutants import anchors, exchange, warm
from mutants.catalogue import MUTANTS, by_name
from mutants.loader import Edit, Mutant, mutated_sources, read
from mutants.warm import Question
from proof import mutants as layer
from proof.catalogue import layers_of
from proof.layer import Budget

TESTS = Path(__file__).parents[2]
LIBRARY = TESTS.parent / "ckptfsm"
PROMISES = {f"I{number}" for number in range(1, 13)}
REPORTS = """verl #4253; verl #4638 / #4667; verl #4873; verl #5016; verl #6067 / #7363;
verl #7952, rllm #897; verl (open): other ranks delete; verl (open): gutted directory;
verl (open): restart forgets; verl (open): same step registered twice;
verl (open): keep=1 deletes itself; Megatron-Bridge #5184; Megatron-Bridge #5117;
Megatron-Bridge #3267; Megatron-LM #6970;
Megatron-core (results queue); Megatron-core (temporal caller); Megatron-LM (tracker);
Megatron-LM (non-persistent); SkyRL #2145; KempnerForge #102; NeMo #10228; Automodel #3390;
prime-rl #1763; metaseq #53; ferrosa #399"""

FSYNC = re.compile(r"^ +(?!def|#)[^\n\"]*(?<!def )\b(_?fsync\w*\().*$", re.MULTILINE)
ELSEWHERE = {
    "fsync_existing(self.storage, path)": "fsync_existing is made to do nothing",
    "fsync_existing(storage, path)": "the same, for what megatron-core wrote",
    "storage.fsync_dir(join(location, PLANNED))": "finalize does it again; lost before, the save fails",
    "_fsync_path(os.path.dirname(made))": "_fsync_path is made to do nothing",
    'self.storage.fsync_dir(parent_of(f"{directory}/{MANIFEST}"))': "put did it before any retry",
    "storage.fsync_dir(EPOCHS)": "remove_marker does it again, in the line before",
    "storage.fsync_dir(job.location)": "make_dirs does it again, in the next line",
    "fsync_tree_files(place, directory)": "of what Megatron-Bridge exported, which needs its packages",
    'fsync_existing(storage, f"{directory}/{name}")': "each call of fsync_tree_files is left out",
    "self.storage.fsync(handle)": "adopt_directory does it again, before the tracker names the step",
    "storage.fsync_dir(PRIVATE)": "of a renewed epoch; if a power loss takes it, the segment fences",
    "self._fsync_names(checkpoint, target)": "each of the two fsyncs in it is left out",
    "self._fsync_names(checkpoint, target, manifest)": "the same",
}  # the calls that no separate mutant leaves out, and why

# Orderings of specs/layout.md and recovery.md: the first, the second, and the mutant that turns
# them round.
ORDERINGS = {
    ("a record", "its command"): "effect-before-journal",
    ("a rank's fork", "its shard"): "a-shard-before-its-fork",
    ("shards are fsynced", "their receipt"): "shard-without-fsync",
    (
        "the others' receipts",
        "the first rank's, of a group",
    ): "a-group-is-completed-by-its-first-rank-alone",
    ("every receipt", "shards_written"): "published-before-all-shards",
    ("names are fsynced", "the manifest"): "staging-without-fsync",
    ("the manifest", "its published name"): "published-before-the-manifest",
    ("the published name is durable", "finalized"): "published-name-without-fsync",
    ("finalized", "the tracker"): "tracker-before-the-save",
    ("the tracker", "tracked, and its acknowledgement"): "acknowledged-before-the-tracker",
    ("a newer one is tracked", "prunable"): "the-latest-is-the-one-in-flight",
    ("prunable", "the move to the trash"): "pruned-before-prunable-is-journaled",
    ("pins and leases are read", "that move"): "prune-does-not-look-first",
    ("that move", "pins and leases are read again"): "prune-does-not-look-again",
    ("that move is durable", "the trash is emptied"): "trash-emptied-before-a-prune-is-decided",
    ("the trash is listed", "the epoch is checked"): "emptying-the-trash-is-not-fenced",
    ("what came back is durable", "reprieved"): "what-came-back-may-leave-again",
    ("the tracker moves away", "the move to quarantine"): "tracker-after-the-move-to-quarantine",
    ("a rollback is journaled", "the tracker"): "rollback-without-intent",
    ("a fresh start is journaled", "the tracker leaves"): "a-fresh-start-is-journaled-late",
    ("the tracker leaves", "a fresh start adopts"): "a-fresh-start-takes-the-tracker-away-last",
    ("what is adopted", "what is rolled forward"): "an-adoption-waits-for-nothing",
    ("withdrawals", "prunes"): "prunes-are-decided-before-withdrawals",
    ("a step's newer attempt", "its withdrawn one"): "the-older-attempt-of-a-step-goes-first",
    ("a segment is fsynced", "its seal"): "sealed-without-fsync",
    ("a reader's lease", "its look"): "reader-looks-before-its-lease",
    ("the load", "the lease is given back"): "lease-given-back-before-the-load",
    ("the latest was read", "anything is pruned"): "pruned-before-the-latest-was-read",
}


@pytest.mark.parametrize("planted", MUTANTS, ids=lambda m: m.name)
def test_every_mutant_still_fits_the_library(planted: Mutant) -> None:
    """Catches code that moved under a mutant: it would be planted nowhere, or in two places."""
    for module, source in mutated_sources(planted).items():
        compile(source, module, "exec")
        assert source != planted.edits[0].path.read_text() or len(planted.edits) > 1


def test_no_mutant_uses_a_name_that_is_not_there(tmp_path: Path) -> None:
    """Catches a mutant that dies of itself: its killer has not seen the broken promise."""
    for planted in MUTANTS:
        for module, source in mutated_sources(planted).items():
            (tmp_path / f"{planted.name}.{module}.py").write_text(source)
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--quiet"]
    done = subprocess.run(
        [*ruff, "--select=F821,F823", "--output-format=concise", tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_catalogue_breaks_every_promise_and_has_every_field_bug() -> None:
    """Catches a promise or a report that no layer was shown to see broken."""
    assert {m.breaks for m in MUTANTS} >= PROMISES
    sources = {m.source for m in MUTANTS}
    assert {" ".join(name.split()) for name in REPORTS.split(";")} <= sources
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 40
    assert all(re.fullmatch(r"[a-z0-9-]{1,50}", m.name) for m in MUTANTS)
    assert all(re.fullmatch(r"[IF]\d+", m.breaks) for m in MUTANTS)


def test_every_fsync_of_the_library_is_left_out_by_some_mutant() -> None:
    """Catches a new fsync that no mutant leaves out: nothing would show that it is needed."""
    left_out: dict[Path, list[range]] = {}
    for edit in (edit for planted in MUTANTS for edit in planted.edits):
        if edit.old.count("fsync") > edit.new.count("fsync"):
            left_out.setdefault(edit.path, []).append(range(*edit.span(edit.path.read_text())))
    for path in sorted(LIBRARY.rglob("*.py")):
        if {"testing", "demo"} & set(path.parts):
            continue
        text = path.read_text()
        for found in FSYNC.finditer(text):
            call = found[0].partition("  #")[0].strip()
            missing = not any(found.start(1) in span for span in left_out.get(path, ()))
            assert not missing or call in ELSEWHERE, f"{path.name}: {call}"


def test_every_ordering_of_the_protocol_is_turned_round_by_a_mutant() -> None:
    """Catches an ordering that no mutant turns round any more."""
    assert set(ORDERINGS.values()) <= {m.name for m in MUTANTS}
    assert len(set(ORDERINGS.values())) == len(ORDERINGS)


def test_the_map_names_what_kills_each_mutant() -> None:
    """Catches a mutant that nobody is asked about, and a killer that was renamed or has gone."""
    killers = layer.read_map()
    assert [*killers] == [m.name for m in MUTANTS], "python -m proof.mutants --map"
    gone = {(m, k) for m, each in killers.items() for k in each or [""] if not _is_there(k)}
    assert not gone, f"python -m proof.mutants --map --only {' '.join(m for m, _ in gone)}"


def _is_there(killer: str) -> bool:
    file, _, test = killer.partition("::")
    if not test:
        return killer.partition(":")[0] in layers_of("pr")
    path, (function, _, parameters) = TESTS.parent / file, test.partition("[")
    subject, slash, history = parameters.rstrip("]").partition("/")
    if slash and path.name == "test_histories.py":
        return f"== {history}\n" in (path.parent / f"{subject}.txt").read_text()
    return path.exists() and f"def {function}(" in path.read_text()


WRITTEN = """# Some.

== first-one: I2, Megatron-LM (tracker)
the second is lost
@ core.ledger:Ledger.post
- if one:
-     two()
+ pass
@ core.ledger:Ledger.latest
- three()

== second-one: F5, order
@ disk.durable:
- four
"""


def test_bugs_are_read_as_they_are_written(tmp_path: Path) -> None:
    """Catches a bug of which an edit is lost, or the indentation of its code."""
    (tmp_path / "some.txt").write_text(WRITTEN)
    edits = (
        Edit("core.ledger:Ledger.post", "if one:\n    two()", "pass"),
        Edit("core.ledger:Ledger.latest", "three()", ""),
    )
    assert [*read(tmp_path / "some.txt")] == [
        Mutant("first-one", "I2", "Megatron-LM (tracker)", edits, "the second is lost"),
        Mutant("second-one", "F5", "order", (Edit("disk.durable:", "four", ""),)),
    ]


def test_an_old_text_that_moved_is_an_error() -> None:
    """Catches a loader that plants nothing and lets the mutant survive, or be killed by chance."""
    gone = Mutant("x", "I1", "", (Edit("disk.durable:", "no such text", ""),))
    with pytest.raises(LookupError, match="0 times"):
        mutated_sources(gone)
    twice = Mutant("x", "I1", "", (Edit("disk.durable:", "storage.fsync_dir", ""),))
    with pytest.raises(LookupError, match="times in ckptfsm.disk.durable"):
        mutated_sources(twice)


SOURCE = """
LIMIT = 3


class Kept:
    def first(self):
        return call(
            self.one,  # a comment
            "a  b",
        )

    def second(self):
        if self.one:
            return call(self.one, "a b")
        return LIMIT
"""


@pytest.mark.parametrize(
    ("function", "old", "count"),
    [
        ("Kept.first", 'call(self.one, "a  b")', 1),
        ("Kept.first", 'call(self.one, "a b")', 0),  # a string is one word
        ("Kept", "call(self.one", 2),
        ("Kept.second", "if self.one:\n    return", 1),
        ("Kept.second", "self.on", 0),
        ("LIMIT", "3", 1),
    ],
)
def test_code_is_found_however_it_is_laid_out(function: str, old: str, count: int) -> None:
    """Catches a formatter that unroots mutants, and a mutant in another function than it says."""
    assert len(anchors.find(SOURCE, function, old)) == count


def test_the_replacement_of_code_is_indented_as_it_was() -> None:
    """Catches a planted bug that is a syntax error, or that is in another block."""
    [span] = anchors.find(SOURCE, "Kept.second", "return call(self.one, 'a b')".replace("'", '"'))
    changed = anchors.replace(SOURCE, span, "for one in self.one:\n    call(one)\nreturn 4")
    assert (
        "            for one in self.one:\n                call(one)\n            return 4\n"
        in changed
    )
    assert "            pass\n        return LIMIT" in anchors.replace(SOURCE, span, "")
    with pytest.raises(LookupError, match=r"there is no Kept\.third"):
        anchors.find(SOURCE, "Kept.third", "return")


def test_the_mutated_text_is_imported() -> None:
    """Catches cached byte code, or a finder that is asked too late."""
    script = """
import sys
from mutants.catalogue import by_name
from mutants.loader import install
install(by_name("names-may-climb-out"))
from ckptfsm.core.documents import FileEntry
print(FileEntry(name="../x", bytes=1).name)
try:
    install(by_name("names-may-climb-out"))
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=TESTS, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == [
        "../x",
        "ckptfsm was imported before the mutant was planted",
    ], done.stderr


BEFORE = "LIMIT = 3\nclass Kept:\n    kept = 1\n    def first(self, most=2):\n        return most\n"


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("return most", "return most + 1", ["first"]),
        ("return most", "return [lambda: most]", ["first"]),
        ("class", "\n\nclass", []),  # moved, and the same
        ("most=2", "most=1", None),
        ("LIMIT = 3", "LIMIT = 2", None),
        ("kept = 1", "kept = 2", None),
        ("    def", "    @property\n    def", None),
        ("def first", "def second", None),
    ],
)
def test_only_a_body_of_a_function_is_exchanged(
    old: str, new: str, changed: list[str] | None
) -> None:
    """Catches a mutant that is planted in part: a change that runs at the import is left out."""
    codes = [compile(text, "kept.py", "exec") for text in (BEFORE, BEFORE.replace(old, new))]
    try:
        assert [before.co_name for before, _ in exchange.changed_code(*codes)] == changed
    except exchange.CannotExchangeError:
        assert changed is None


MAKER = """
import functools
def wrapped(function):
    @functools.wraps(function)
    def inner():
        return function() + 1
    return inner
@wrapped
def one():
    return 1
"""


@pytest.mark.parametrize(
    ("old", "new", "returns"),
    [("return 1", "return 2", 3), ("function() + 1", "function() + 2", None)],
)
def test_a_function_behind_its_decorator_is_exchanged(
    old: str, new: str, returns: int | None
) -> None:
    """Catches a wrapper that goes on calling the old code, and one that was made by old code."""
    codes = [compile(text, "/made/maker.py", "exec") for text in (MAKER, MAKER.replace(old, new))]
    names: dict[str, Any] = {}
    exec(codes[0], names)
    pairs, living = exchange.changed_code(*codes), exchange.living_functions(Path("/made"))
    if returns is None:
        with pytest.raises(exchange.CannotExchangeError, match="when it was imported"):
            exchange.exchange(pairs, living)
    else:
        exchange.exchange(pairs, living)
        assert names["one"]() == returns


LAYER = """
import os, subprocess, sys, time
from ckptfsm.core.errors import Fenced
from ckptfsm.core.documents import FileEntry
from proof.layer import LayerResult, Violation
CLIMB = "from ckptfsm.core.documents import FileEntry; FileEntry(name='../x', bytes=1)"
def run(budget):
    {body}
    return LayerResult('pretended')
"""
CLIMBS = (
    "FileEntry(name='../x', bytes=1); assert subprocess.call([sys.executable, '-c', CLIMB]), 'both'"
)
ENDS = {  # what a layer does, and what it is taken for
    CLIMBS: "AssertionError: both",
    "assert False, 'torn'": "AssertionError: torn",
    "raise Fenced('late')": "Fenced: late [fenced] (stop this job; the newer one owns the root)",
    "return LayerResult('p', violations=[Violation('I4', 'half', '')])": "I4: half",
    "subprocess.Popen(['sleep', '987'], start_new_session=True)": "saw nothing",
    "raise NameError('x')": "NameError: x",
    "import no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    "os.abort()": "ended without an answer",
    "time.sleep(600)": "nothing in 1 s",
}


def write_layers(folder: Path, monkeypatch: pytest.MonkeyPatch, bodies: Iterable[str]) -> list[str]:
    (folder / "pretended").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    names = []
    for body in bodies:
        names.append(f"pretended.l{len(names)}")
        (folder / f"{names[-1].replace('.', '/')}.py").write_text(LAYER.format(body=body))
    return names


def test_only_a_finding_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a kill by accident: a layer that crashes, hangs or cannot be imported saw nothing.

    Also a mutant that a process of a layer does not get, and a process that is left.
    """
    layers = write_layers(tmp_path, monkeypatch, ENDS)
    others = [m.name for m in MUTANTS if m.edits[0].where.startswith("core.ledger:")]
    asked = dict(zip(["names-may-climb-out", *others], layers, strict=False))
    limits_s = dict.fromkeys(layers, 600.0) | {layers[-1]: 1.0}
    fates = warm.ask(Question({m: [k] for m, k in asked.items()}, 1, [], limits_s, 600.0))
    assert [f.get("saw", f["why"].partition(": ")[2]) for f in fates] == [*ENDS.values()]
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert b"sleep\x00987\x00" not in running


def test_a_survivor_and_a_red_killer_are_violations_and_a_kill_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a report that is green whatever happens; a mutant of the table that is not planted."""
    blind, red = write_layers(tmp_path, monkeypatch, ["pass", "raise Fenced('always')"])
    in_table, unseen, other = "prunable-from-finalized", "names-may-climb-out", "pruned-though-kept"
    killers = {**layer.read_map(), unseen: [blind], other: [red]}
    mutants = [by_name(name) for name in (in_table, unseen, other)]
    result = layer.run(Budget(processes=1), mutants, killers)
    assert result.explored == {"mutants": 3, "killed": 2}
    assert [v.promise for v in result.violations] == ["", by_name(unseen).breaks]
    assert f"{red} is red without a mutant: Fenced: always" in result.violations[0].what
    assert f"--map --only {unseen}" in result.violations[1].what
    assert result.kills == {"tests": 1, red: 1}


def test_the_map_is_renewed_where_it_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a search that finds no test, and one that loses the other entries."""
    monkeypatch.setattr(layer, "MAP", tmp_path / "kills.json")
    layer.MAP.write_text(
        '{"names-may-climb-out": ["tests/gone.py::test_x"], "two-in-flight": ["x"]}'
    )
    among = ["tests/unit/core/test_documents.py"]
    assert layer.renew_map([by_name("names-may-climb-out")], among, 1, print) == []
    killers = layer.read_map()
    assert [*killers] == ["two-in-flight", "names-may-climb-out"]  # as in the catalogue
    assert killers["two-in-flight"] == ["x"]
    assert killers["names-may-climb-out"][0].startswith(f"{among[0]}::test_")


def test_the_list_names_every_mutant(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a command line that no longer works."""
    assert layer.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [m.name for m in MUTANTS]
