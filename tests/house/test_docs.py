"""The user documentation: links resolve, tables are complete, snippets compile and the marked ones run.

A fenced block is marked in its first line: ``python run`` is executed without torch, ``python
run=job`` in one process with torch and a fresh working directory. The tutorial's test saves and
runs ``python file=NAME``. The other python blocks are compiled only.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from integrations.run import BEGIN, END, IN_A_CLONE, TARGETS, table
from proof.catalogue import LAYERS
from proof.faults import TABLE as FAULTS

import ckptfsm
from ckptfsm.adapters.versions import TRIED
from ckptfsm.core import metrics as metric_names
from ckptfsm.core.config import CheckpointConfig
from ckptfsm.testing import assert_journal_conforms
from docs import generate_picture
from docs import generate_reference as reference

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
SPECS = ROOT / "specs"
LINKED = [*PAGES, *sorted(SPECS.glob("*.md")), *sorted(ROOT.glob("*.md"))]
DECISIONS = sorted((DOCS / "decisions").glob("*.md"))
# Pages that send a reader into the code: a file, and the names in it that he is to look at.
GUIDES = [
    *DECISIONS,
    DOCS / "architecture.md",
    DOCS / "glossary.md",
    ROOT / "CONTRIBUTING.md",
]
MOST_WORDS = 30
# Made by a machine, or full of figures, or still to be written anew.
UNTIDY = {DOCS / "field-bugs.md"}
FENCE = re.compile(r"^```(\S*)(?: (\S+))?\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
PLACE = re.compile(r"`((?:\w+/)*\w+\.py)`((?:,? `[A-Za-z_][\w.]*`)*)")
TIMEOUT_S = 300.0


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> Iterator[tuple[str, str, str]]:
    """(language, mark, text) of each fenced block."""
    for found in FENCE.finditer(page.read_text(encoding="utf-8")):
        yield found[1], found[2] or "", found[3]


def marked(mark: str) -> list[tuple[str, str]]:
    """(page and number, text) of the blocks with this mark."""
    found = []
    for page in PAGES:
        texts = [text for language, m, text in blocks(page) if (language, m) == ("python", mark)]
        found += [(f"{name_of(page)}#{n}", text) for n, text in enumerate(texts, start=1)]
    return found


def anchors(page: Path) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.fixture(scope="module")
def text() -> str:
    """The reference."""
    return reference.reference_markdown()


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_internal_links_resolve(page):
    """Catches: a page that was renamed, a heading that is gone."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in LINK.findall(text):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), target


def places(page: Path) -> Iterator[tuple[str, str]]:
    """(file, name in it) of every place in the code that a page names; "" for a file alone."""
    for file, names in PLACE.findall(page.read_text(encoding="utf-8")):
        yield from ((file, name) for name in re.findall(r"`([\w.]+)`", names) or [""])


def defined_in(path: Path) -> set[str]:
    """The functions, classes, constants and members that a module defines, as people name them."""

    def names_of(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from names_of(node.body, f"{prefix}{node.name}.")
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (prefix + t.id for t in targets if isinstance(t, ast.Name))

    return set(names_of(ast.parse(path.read_text(encoding="utf-8")).body, ""))


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_a_guide_names_places_that_are_there(page):
    """Catches: a file or a function that was renamed, and a page that still sends people there."""
    found, missing = list(places(page)), []
    for file, name in found:
        anywhere = (ROOT / "tests").rglob(file) if file.startswith("test_") else ()
        places_of = (ROOT / "ckptfsm" / file, ROOT / file, *anywhere)
        path = next((p for p in places_of if p.is_file()), None)
        if path is None or (name and name not in defined_in(path)):
            missing.append((file, name))
    assert missing == []
    assert page in DECISIONS or len(found) >= 3


def test_every_fault_is_explained_and_tested():
    """Catches: a number in a test or a history that no page explains, a fault that none injects."""
    text = (SPECS / "faults.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| (F\d+) \|", text, re.M)
    assert told == [f"F{n}" for n in range(1, 35)] == list(FAULTS)
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    named = [name for text in sources for name in re.findall(r"def test_(\w+)", text)]
    tested = {number for name in named for number in re.findall(r"(?:^|_)(F\d+)(?=_)", name)}
    for path in (ROOT / "tests" / "histories").glob("*.txt"):
        comments = re.findall(r"^# .*", path.read_text(encoding="utf-8"), re.M)
        tested |= set(re.findall(r"\bF\d+\b", "\n".join(comments)))
    assert tested == set(told)


def test_the_picture_of_the_subpackages_is_that_of_the_imports(tmp_path, monkeypatch):
    """Catches: a picture that shows an older package, a subpackage that it leaves out."""
    folders = {path.parent.name for path in (ROOT / "ckptfsm").glob("*/__init__.py")}
    assert set(generate_picture.SUBPACKAGES) == folders
    assert generate_picture.main(["--check"]) == 0
    page = tmp_path / "architecture.md"
    text = generate_picture.PAGE.read_text()
    page.write_text(text.replace("    core --> adapters\n", ""))
    monkeypatch.setattr(generate_picture, "PAGE", page)
    assert generate_picture.main(["--check"]) == 1
    assert generate_picture.main(["--write"]) == 0
    assert page.read_text() == text


def test_the_readme_stays_short():
    """Catches: a first page that grows until it is too long to read."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100


def test_the_index_names_every_page():
    """Catches: a page without a link to it."""
    linked = {target.partition("#")[0] for target in LINK.findall((DOCS / "README.md").read_text())}
    pages = {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    assert pages - linked == set()


def sentences(page: Path) -> Iterator[str]:
    """The sentences of a page: of its paragraphs, its list items and the cells of its tables."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("", page.read_text(encoding="utf-8")), flags=re.S)
    pieces = [""]
    for line in text.split("\n"):
        begins = re.match(r"\s*([-*]|\d+\.) ", line)
        code = line.startswith("    ") and not pieces[-1]
        if line.startswith("|"):
            pieces += [*line.strip("|").split("|"), ""]
        elif not line.strip() or line.startswith("#") or code:
            pieces.append("")
        elif begins:
            pieces.append(line[begins.end() :])
        else:
            pieces[-1] += f" {line.strip()}"
    for piece in pieces:
        yield from re.split(r"(?<=[.!?])\s+(?=[A-Z`(])", piece.strip().replace("*", ""))


@pytest.mark.parametrize("page", [p for p in LINKED if p not in UNTIDY], ids=name_of)
def test_no_sentence_of_a_page_is_long(page):
    """Catches: a sentence that must be read twice."""
    found = []
    for sentence in sentences(page):
        read = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", sentence))
        words = re.findall(r"[\w'/.-]+", read)
        if len(words) > MOST_WORDS:
            found.append(sentence)
    assert found == []


def test_the_glossary_defines_a_word_once():
    """Catches: a word with two meanings, or an entry without a place in the code."""
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", text, re.M)
    entries = [row for row in rows if row[0] not in ("word", "---")]
    words = [word for row in entries for word in row[0].split(", ")]
    assert sorted(set(words)) == sorted(words)
    assert len(entries) > 30 and all("`" in where or "](" in where for _, _, where in entries)


def test_the_pages_that_readme_promises_exist():
    """Catches: tests that pass because there is nothing to test."""
    names = {p.name for p in DOCS.glob("*.md")}
    wanted = "README tutorial adopt retention failures errors versions protocol foreign glossary"
    assert names >= {f"{name}.md" for name in wanted.split()}


def test_every_error_has_advice():
    """Catches: an error that is new, or renamed, and that no page explains."""
    text = (DOCS / "errors.md").read_text(encoding="utf-8")
    section = text.partition("## Every error")[2].partition("\n## ")[0]
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in section.splitlines()]
    named = [row[0].strip("`") for row in rows if len(row) == 3 and row[0].startswith("`")]
    assert named == [error.__name__ for error in reference.error_classes()]
    assert all(row[2] for row in rows if len(row) == 3)


def test_the_deadlines_are_those_of_the_code():
    """Catches: a default that changed, a deadline that is not explained."""
    text = (DOCS / "failures.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `(\w+_s)` \| (\d+) s \|", text, re.M))
    fields = CheckpointConfig.model_fields
    real = {name: field.default for name, field in fields.items() if name.endswith("timeout_s")}
    assert {name: float(seconds) for name, seconds in told.items()} == real


def test_the_metrics_are_those_of_the_code():
    """Catches: a metric that was renamed, or that the page does not explain."""
    text = (DOCS / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(ckptfsm_\w+)` \| [^|]+ \| (?:`(\w+)`)? ?\| (\w+) \|", text, re.M)
    both = set(metric_names.IN_TRAINER) & set(metric_names.IN_EXPORT)
    real = {
        family.shown: (family.label, "both" if family in both else where)
        for where, families in (
            ("trainer", metric_names.IN_TRAINER),
            ("export", metric_names.IN_EXPORT),
        )
        for family in families
    }
    assert {name: (label, where) for name, label, where in rows} == real
    assert len(rows) == len(real)


@pytest.mark.parametrize("name", ["alerts.yml", "ckptfsm.json"])
def test_a_file_for_monitoring_asks_for_metrics_that_are_documented(name):
    """Catches: a rule or a panel that stays empty for ever, because its metric has another name."""
    text = (DOCS / "grafana" / name).read_text(encoding="utf-8")
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    if name.endswith(".json"):
        panels = json.loads(text)["panels"]
        text = "\n".join(target["expr"] for panel in panels for target in panel["targets"])
    asked = set(re.findall(r"\bckptfsm_\w+", text))
    assert len(asked) > 5
    assert asked <= set(re.findall(r"^\| `(ckptfsm_\w+)` \|", page, re.M))
    told = re.findall(r"^\| `(\w+)` \|", page.partition("| alert |")[2].partition("\n\n")[0], re.M)
    assert name.endswith(".json") or re.findall(r"- alert: (\w+)", text) == told
    linked = re.findall(r"\bdocs/[\w/.-]+\.md\b", text)
    assert [link for link in linked if not (ROOT / link).is_file()] == []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_takes_the_rules_and_fires_them(tmp_path):
    """Catches: a wrong expression, for which Prometheus refuses all rules, and an alert that is silent
    once the job has crashed.
    """
    for name in (DOCS / "grafana/alerts.yml", Path(__file__).with_name("alerts_test.yml")):
        shutil.copy(name, tmp_path)
    for asked in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        judged = subprocess.run(["promtool", *asked], capture_output=True, text=True, cwd=tmp_path)
        assert judged.returncode == 0, judged.stdout + judged.stderr


def test_every_setting_is_in_the_reference_with_its_meaning(text):
    """Catches: a new field without an explanation."""
    fields = CheckpointConfig.model_fields
    assert [name for name, field in fields.items() if not field.description] == []
    assert all(f"| `{name}` |" in text for name in fields)


def test_every_public_name_is_in_the_reference(text):
    """Catches: a public class without a docstring or a place."""
    for name in ckptfsm.__all__:
        section = text.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        assert re.search(r"^[A-Z].*\w", section, re.M), name


def described(text: str, title: str) -> bool:
    """Whether the reference has a sentence below this heading."""
    section = text.partition(f"\n{title}\n")[2].partition("\n### ")[0]
    return bool(re.search(r"^[A-Z`].*\w", section, re.M))


@pytest.mark.parametrize(
    ("package", "modules"),
    [("integrations", reference.INTEGRATIONS), ("testing", reference.KIT)],
    ids=["integrations", "testing"],
)
def test_every_drop_in_and_module_of_the_kit_is_in_the_reference(text, package, modules):
    """Catches: a trainer's author who has to read the source to learn what an entry takes."""
    names = [f"{module}.{name}" for module, names in modules.items() for name in names]
    missing = [n for n in names if not described(text, f"### ckptfsm.{package}.{n}")]
    assert missing == []


def test_every_module_of_the_kit_is_in_the_reference(text):
    """Catches: a page of the kit that sends its reader to signatures that are not there."""
    page = (DOCS / "testing.md").read_text(encoding="utf-8")
    told = re.findall(r"^\| `ckptfsm\.testing\.(\w+)` \|", page, re.M)
    assert len(told) >= 6
    for module in told:
        assert re.search(rf"^### ckptfsm\.testing\.{module}\b.*\n", text, re.M), module


def test_the_reference_is_built(tmp_path, text):
    """Catches: a generator that does not write the page, or that links to no page."""
    assert reference.main(["--root", str(tmp_path)]) == 0
    assert (tmp_path / "build/reference.md").read_text() == text
    linked = re.findall(r"\]\((\.\./[^)#]+)", text)
    assert linked and all((ROOT / "build" / name).resolve().exists() for name in linked)


def test_a_long_signature_has_a_line_for_each_parameter(text):
    """Catches: a comma inside of brackets that ends a line, a signature that the site cuts off."""
    section = text.partition("\n### CheckpointManager.save\n")[2].partition("```\n")[0]
    assert "\n    parts: Mapping[str, Any] | None = None,\n" in section
    assert section.rstrip().endswith(") -> SaveHandle")
    assert "\nbefore_update() -> None\n" in text
    for text in reference.pages("../").values():
        for _, _, shown in FENCE.findall(text):
            compile(f"def {shown.strip()}: ...", "reference", "exec")


def test_there_is_one_set_of_alerts():
    """Catches: a page with rules of its own, which differ from those of the file after a while."""
    written = [page.name for page in DOCS.rglob("*.md") if "- alert:" in page.read_text("utf-8")]
    assert written == [] and "grafana/alerts.yml" in (DOCS / "metrics.md").read_text("utf-8")


def test_the_summary_of_the_proof_names_every_layer():
    """Catches: a layer that was added or renamed, and that the page does not explain."""
    text = (DOCS / "proof.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| (\w+) \|", text.partition("## How")[0], re.M)
    assert sorted(named) == sorted(["layer", *LAYERS])
    assert len(text.splitlines()) <= 60


def test_the_reference_has_each_call_and_the_ranges_of_settings(text):
    """Catches: a method of a class beside torch that is left out; a range that no setting has."""
    for name in ("attach", "expect_gate", "share", "save", "rank", "recovery"):
        assert f"### CheckpointManager.{name}\n" in text
    kinds = {name: reference._kind(name) for name in ("jobs_drain_s", "writer_files", "on_tracked")}
    assert kinds == {
        "jobs_drain_s": "number from 0 to 1,000,000",
        "writer_files": "whole number from 1 to 64",
        "on_tracked": "list of `Job`",
    }


def test_the_reference_needs_no_torch():
    """Catches: a generator that imports what it describes."""
    code = (
        "import sys, docs.generate_reference as r; r.reference_markdown();"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_pages_of_decisions_are_numbered_without_gaps():
    """Catches: two pages with one number, a page without a decision."""
    for number, page in enumerate(DECISIONS, start=1):
        text = page.read_text(encoding="utf-8")
        assert page.name.startswith(f"{number:04d}-") and text.startswith(f"# {number}. ")
        assert re.search(r"^## .+\n\n\S", text, re.M), page.name


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_python_blocks_compile(page):
    """Catches: a typing error in a snippet that is not executed."""
    for language, _, text in blocks(page):
        if language == "python":
            compile(text, name_of(page), "exec")


@pytest.mark.parametrize(("name", "text"), marked("run"), ids=[n for n, _ in marked("run")])
def test_light_snippets_run(name, text, tmp_path, monkeypatch):
    """Catches: a snippet that is not true of the code."""
    monkeypatch.chdir(tmp_path)
    exec(compile(text, name, "exec"), {"__name__": "__main__"})


DRIVER = """
import json, multiprocessing, os, sys, traceback, warnings

warnings.filterwarnings("ignore", module=r"megatron\\\\.|torch\\\\.")


def main():
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # Stock code spawns this process, which imports torch anew.
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()
    results = {}
    for name, text in json.load(open(sys.argv[1])).items():
        place = os.path.join(sys.argv[2], name.replace("/", "_"))
        os.mkdir(place)
        os.chdir(place)
        try:
            exec(compile(text, name, "exec"), {"__name__": "__main__"})
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
    json.dump(results, open(sys.argv[3], "w"))


if __name__ == "__main__":
    main()
"""


FOLLOWED = """
import json, os, sys, threading

import ckptfsm, torch
from megatron.core.dist_checkpointing import ShardedTensor

base, here, calls = os.path.dirname(ckptfsm.__file__) + os.sep, os.getpid(), []


def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(base) and os.getpid() == here:
        calls.append((code.co_filename.removeprefix(base), code.co_name))


def state(step):
    return {"w": ShardedTensor.from_rank_offsets("w", torch.full((4,), float(step)))}


threading.setprofile(note)  # before the coordinator's thread begins
with ckptfsm.CheckpointManager("root", retention=ckptfsm.LatestN(1)) as ckpts:
    ckpts.save(1, state(1)).wait()
    del calls[:]
    sys.setprofile(note)
    ckpts.save(2, state(2)).wait()
    sys.setprofile(None)
    threading.setprofile(None)
    json.dump(calls, open("calls.json", "w"))
"""


TUTORIAL = """
import os, runpy, socket, sys
from megatron.core import parallel_state

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = str(probe.getsockname()[1])
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
for name, text in FILES.items():
    open(name, "w").write(text)
sys.path.insert(0, os.getcwd())
for steps in ("10", "20"):  # the second run resumes
    os.environ["STEPS"] = steps
    runpy.run_path("train.py", run_name="__main__")
    parallel_state.destroy_model_parallel()
own, sys.argv = sys.argv, ["elsewhere.py", "runs/tutorial/iter_0000020"]
runpy.run_path("elsewhere.py", run_name="__main__")
sys.argv = own
"""


def files_of_the_tutorial() -> dict[str, str]:
    marks = [(mark, text) for _, mark, text in blocks(DOCS / "tutorial.md")]
    return {m.removeprefix("file="): text for m, text in marks if m.startswith("file=")}


@pytest.fixture(scope="module")
def jobs_ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all job snippets ran, a save that is followed, and the tutorial on one rank.

    All of them in one process: torch and megatron-core are slow to import.
    """
    place = tmp_path_factory.mktemp("jobs")
    (place / "driver.py").write_text(DRIVER)
    tutorial = f"FILES = {files_of_the_tutorial()!r}\n{TUTORIAL}"
    snippets = {"followed": FOLLOWED, **dict(marked("run=job")), "tutorial": tutorial}
    (place / "snippets.json").write_text(json.dumps(snippets))
    files = [str(place / name) for name in ("driver.py", "snippets.json", ".", "results.json")]
    with (place / "output").open("wb") as output:
        subprocess.run(
            [sys.executable, *files], stdout=output, stderr=subprocess.STDOUT, timeout=TIMEOUT_S
        )
    assert (place / "results.json").exists(), (place / "output").read_text(errors="replace")[-4000:]
    return place


@pytest.mark.megatron
def test_job_snippets_run(jobs_ran: Path):
    """Catches: a snippet that is not true of the code."""
    results = json.loads((jobs_ran / "results.json").read_text())
    assert set(results) == {"followed", "tutorial", *(name for name, _ in marked("run=job"))}
    assert [problem for problem in results.values() if problem] == []
    printed = (jobs_ran / "output").read_text(errors="replace")
    assert "step 11 loss" in printed and "loaded step 20; next loss" in printed
    assert printed.count("step 1 loss") == 1, "the second run of the tutorial resumed"


@pytest.mark.megatron
def test_a_save_takes_the_steps_of_the_architecture_in_their_order(jobs_ran: Path):
    """Catches: a page about one save that tells of a way which saves do not take any more."""
    calls = [tuple(call) for call in json.loads((jobs_ran / "followed/calls.json").read_text())]
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([\w ]+) \| [^|]+ \| ([^|]+) \|$", text, re.M)
    assert [int(number) for number, *_ in rows] == list(range(1, 13))
    after = 0
    for number, where, code in rows:
        found = [
            (file, name.rpartition(".")[2])
            for file, names in PLACE.findall(code)
            for name in re.findall(r"`([\w.]+)`", names)
            if name.rpartition(".")[2].islower()  # no class, no table
        ]
        if where != "writers":  # they are other processes
            assert set(found) <= set(calls), f"step {number}"
            after = calls.index(found[0], after) + 1  # ValueError: not after the step before


def torchrun(place: Path, ranks: int, *arguments: str, **environment: str) -> subprocess.Popen:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", port]
    with (place / "output").open("wb") as output:
        return subprocess.Popen(
            [*launcher, *arguments],
            cwd=place,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )


def lines_of(place: Path) -> list[str]:
    return (place / "output").read_text(errors="replace").splitlines()


def await_words(place: Path, job: subprocess.Popen, words: str) -> str:
    """The rest of the line from ``words`` on. Ranks share the output: a line may begin in another."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and job.poll() is None:
        for line in lines_of(place):
            if words in line:
                return line[line.index(words) + len(words) :]
        time.sleep(0.05)
    raise AssertionError("\n".join(lines_of(place)[-40:]))


@pytest.mark.megatron
def test_the_tutorial(tmp_path):
    """The tutorial as a reader follows it: train, kill -9, look, train on, load with stock code."""
    for name, text in files_of_the_tutorial().items():
        (tmp_path / name).write_text(text)
    job = torchrun(tmp_path, 2, "train.py", STEPS="5000")
    try:
        rest = await_words(tmp_path, job, "rank 1 is pid ")
        victim = int(re.match(r"\d+", rest)[0])
        await_words(tmp_path, job, "step 34 ")
        os.kill(victim, signal.SIGKILL)
        assert job.wait(TIMEOUT_S) != 0
    finally:
        job.kill()
    tracker = tmp_path / "runs/tutorial/latest_checkpointed_iteration.txt"
    killed_at = int(tracker.read_text())
    assert killed_at >= 10

    again = torchrun(tmp_path, 2, "train.py", STEPS="60")
    assert again.wait(TIMEOUT_S) == 0, "\n".join(lines_of(tmp_path)[-40:])
    steps = [line.split() for line in lines_of(tmp_path) if line.startswith("step ")]
    assert int(steps[0][1]) in (killed_at + 1, killed_at + 11)  # a written save is rolled forward
    assert tracker.read_text().strip() == "60"
    names = sorted(p.name for p in (tmp_path / "runs/tutorial").glob("iter_*"))
    assert names == ["iter_0000050", "iter_0000060"]

    look = [sys.executable, "-m", "ckptfsm.cli", "log", "-r", "runs/tutorial"]
    shown = subprocess.run(look, cwd=tmp_path, capture_output=True, text=True, timeout=60).stdout
    assert re.search(r"step 60 .* is tracked: .*\[finalized -> tracked\]", shown), shown
    assert shown.count(" owns the root, with ") == 2
    assert shown.count("the owner closed the root in order") == 1
    judged = assert_journal_conforms(tmp_path / "runs/tutorial")  # the gate's stand-in for the demo
    assert judged.segments == 2 and judged.transitions > 20, judged

    job = torchrun(tmp_path, 1, "elsewhere.py", "runs/tutorial/iter_0000060")
    assert job.wait(TIMEOUT_S) == 0, "\n".join(lines_of(tmp_path)[-40:])
    assert any(line.startswith("loaded step 60; next loss") for line in lines_of(tmp_path))


def test_the_table_of_targets_is_that_of_the_last_run():
    """Catches: a page that names versions that were not run."""
    ran = json.loads((ROOT / "tests/integrations/ran.json").read_text())
    written = (DOCS / "versions.md").read_text().partition(BEGIN)[2].partition(END)[0].strip()
    assert written == table(ran)
    wanted = {each.name: list(each.tests) for each in TARGETS if each.name != IN_A_CLONE}
    run = {name: [test for test in found["tests"] if "/" in test] for name, found in ran.items()}
    assert {**run, **wanted} == run, (
        "a target that was changed since: make test-integrations WRITE=1"
    )
    for found in ran.values():
        for name, version in found["packages"].items():
            assert version.partition("+")[0] in TRIED[name], (name, version)
