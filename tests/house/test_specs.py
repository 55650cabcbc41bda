"""The specification is true: generated files are fresh, and the text shows the behaviour of the
code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter

from ckptfsm.core import recovery_rules
from ckptfsm.core.documents import RECORD, FileEntry, Holder, Manifest, Part, Pin, Receipt, encode
from ckptfsm.core.errors import JournalCorrupt
from ckptfsm.core.events import SaveRequested
from ckptfsm.core.lifecycle import TABLE, Row, State
from ckptfsm.core.recovery_rules import RULES
from ckptfsm.disk.journal import BLOCK_BYTES, RESERVE_BYTES, decode_line, parse_segment_bytes
from specs import generate as specs

REPO = Path(__file__).resolve().parents[2]
SPECS = REPO / "specs"
TEXTS = ("lifecycle.md", "journal-v1.md", "layout.md", "recovery.md")
FILES = (FileEntry(name="a/__0_0.distcp", bytes=3, digest="xxh3_128:" + "0" * 32),)
DOCUMENTS: dict[str, BaseModel] = {
    "manifest": Manifest(
        step=1, epoch=1, attempt=1, world_size=1, parts=(Part(name="state"),), files=FILES
    ),
    "receipt": Receipt(
        step=1,
        epoch=1,
        attempt=1,
        part="state",
        rank=0,
        world_size=1,
        files=FILES,
        results=(("w", [0], None, "a/__0_0.distcp", 0, 3),),
    ),
    "holder": Holder(epoch=1, host="h", pid=1, started="s", nonce="n"),
    "pin": Pin(step=1),
}


def read(name: str) -> str:
    return (SPECS / name).read_text(encoding="utf-8")


def cells(line: str) -> list[str]:
    return [cell.strip().strip("`") for cell in line.strip().strip("|").split(" | ")]


# ---------------------------------------------------------------------------------- generated files


@pytest.mark.parametrize("path", sorted(specs.generate()))
def test_generated_files_are_fresh(path: str) -> None:
    """Catches: a changed table or document whose specification was not written again."""
    assert (REPO / path).read_text(encoding="utf-8") == specs.generate()[path]


def test_check_tells_fresh_from_stale_and_extra(tmp_path: Path) -> None:
    """Catches: a --check that passes whatever is on disk."""
    root = ["--root", str(tmp_path)]
    assert specs.main(["--check", *root]) == 1
    assert specs.main(["--write", *root]) == 0
    assert specs.main(["--check", *root]) == 0
    extra = tmp_path / "specs/schemas/forgotten.json"
    shutil.copy(tmp_path / "specs/schemas/pin.json", extra)
    assert specs.stale(tmp_path) == ["specs/schemas/forgotten.json"]
    extra.unlink()
    (tmp_path / "specs/lifecycle.mmd").write_text("stateDiagram-v2\n")
    assert specs.stale(tmp_path) == ["specs/lifecycle.mmd"]
    assert specs.main(["--check", *root]) == 1


def test_generating_needs_no_torch() -> None:
    """Catches: an import that makes ``python specs/generate.py`` need a trainer's environment."""
    code = (
        "import sys, specs.generate; sys.exit(any(m in sys.modules for m in ('torch', 'megatron')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO, check=False).returncode == 0


# ------------------------------------------------------------------------------------------- table


def test_table_names_every_row_in_order() -> None:
    """Catches: a row, guard or command that is left out of the printed table."""
    printed = [cells(line) for line in read("lifecycle-table.md").splitlines()]
    rows = [line for line in printed if line[0].isdigit()]
    assert len(rows) == len(TABLE)
    for line, row in zip(rows, TABLE, strict=True):
        guard = row.guard.__name__ if row.guard else "-"
        command = row.command.__name__ if row.command else "-"
        assert line[1:3] == [row.source.value, row.event.name]
        assert re.match(r"[\w-]+", line[3])[0] == guard  # type: ignore[index]
        assert line[4:] == [row.dest.value, command]


def test_table_explains_each_guard_event_and_command() -> None:
    """Catches: a guard, event or command without a docstring, or a meaning that is not printed."""
    text = read("lifecycle-table.md")
    named = {row.guard for row in TABLE} | {row.event for row in TABLE} | {r.command for r in TABLE}
    for thing in named - {None}:
        meaning = (thing.__doc__ or "").split("\n")[0]
        assert meaning, thing
        assert meaning in text


@pytest.mark.parametrize("state", list(State), ids=lambda s: s.value)
def test_every_state_is_described_and_drawn(state: State) -> None:
    """Catches: a new state that text, table or drawings do not know."""
    assert f"| `{state.value}` |" in read("lifecycle.md").split("## Events")[0]
    assert f"`{state.value}`" in read("lifecycle-table.md")
    assert f">{state.value}</text>" in read("lifecycle.svg")
    assert state is State.ABSENT or re.search(rf"\b{state.value}\b", read("lifecycle.mmd"))


def test_mermaid_has_every_row() -> None:
    """Catches: a diagram that is not the table."""
    lines = [line.strip() for line in specs.diagram_mermaid().splitlines()]
    moves = [line for line in lines if "-->" in line and not line.endswith("--> [*]")]
    found = [re.match(r"(\S+) --> (\S+) : (\w+)", line).groups() for line in moves]  # type: ignore[union-attr]
    wanted = [(r.source.value, r.dest.value, r.event.name) for r in TABLE]
    assert [(a if a != "[*]" else "absent", b, c) for a, b, c in found] == wanted


def test_drawing_is_well_formed_and_labels_every_edge() -> None:
    """Catches: an SVG that no browser shows, or an edge drawn without its event."""
    root = ET.fromstring(specs.diagram_svg())
    space = "{http://www.w3.org/2000/svg}"
    texts = [t.text for t in root.iter(f"{space}text") if t.get("class") == "event"]
    edges = {(row.source, row.dest) for row in TABLE}
    drawn = [p for p in root.iter(f"{space}path") if "edge" in p.get("class", "")]
    assert len(drawn) == len(edges)
    for name in {row.event.name for row in TABLE}:
        wanted = len({(r.source, r.dest) for r in TABLE if r.event.name == name})
        assert texts.count(name) == wanted, name


def test_an_edge_without_a_place_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a new row that silently has no arrow."""
    odd = Row(State.PRUNED, SaveRequested, None, State.REQUESTED)
    monkeypatch.setattr(specs, "TABLE", (*TABLE, odd))
    with pytest.raises(KeyError):
        specs.diagram_svg()


# -------------------------------------------------------------------------------------------- text


@pytest.mark.parametrize("number", range(1, 13))
def test_every_promise_is_stated_with_its_mechanism(number: int) -> None:
    """Catches: a promise that is missing, or stated without the code that keeps it and the facts
    that it rests on."""
    text = read("lifecycle.md").split("## Promises")[1].split("\n## ")[0]
    found = re.search(rf"\*\*I{number}\. .*?(?=\n\*\*I|\Z)", text, re.DOTALL)
    assert found, f"I{number}"
    assert "\nKept by: " in found[0] and "\nRests on: " in found[0]


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_somewhere(name: str) -> None:
    """Catches: a link to a file that was renamed."""
    links = re.findall(r"\]\(([^)#]+)\)", read(name))
    assert links
    assert [link for link in links if not (SPECS / link).exists()] == []


def decisions() -> tuple[str, str]:
    """The table of decisions and the reasons below it."""
    section = read("recovery.md").split("## Decisions")[1].split("\n## ")[0]
    table, _, reasons = section.partition("Why each rule is as it is:")
    return table, reasons


def test_recovery_decides_about_every_state() -> None:
    """Catches: a state that a crash can leave and the decision table does not mention."""
    rows = [cells(line) for line in decisions()[0].splitlines() if line.startswith("| `")]
    left = set(State) - {State.PRUNED, State.DISCARDED}  # the ledger forgets these
    assert {state.value for state in left} == set(re.findall(r"\w+", " ".join(r[1] for r in rows)))
    assert [row[0] for row in rows] == [rule.name for rule in RULES]


def test_every_rule_of_recovery_has_a_meaning_and_a_reason() -> None:
    """Catches: a condition without a docstring, and a rule without a reason."""
    assert all(rule.when.__doc__ for rule in RULES)
    assert re.findall(r"^- \*\*`(\w+)`\*\* \S", decisions()[1], re.MULTILINE) == [
        rule.name for rule in RULES
    ]
    assert all(rule.name in (recovery_rules.__doc__ or "") for rule in RULES)


def test_the_numbered_rules_of_recovery_follow_each_other() -> None:
    """Catches: two rules of one number, and a reference to a rule that is not there."""
    text = read("recovery.md")
    numbers = [int(n) for n in re.findall(r"^- \*\*R(\d+)\.\*\*", text, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert {int(n) for n in re.findall(r"\bR(\d+)\b", text)} == set(numbers)


def test_a_table_without_its_marks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a rewritten text from which the generated table was lost without a word."""
    monkeypatch.setattr(specs, "_END", "<!-- nowhere -->")
    with pytest.raises(ValueError, match="lacks"):
        specs.recovery_markdown()


# ----------------------------------------------------------------------------------------- journal


def example() -> bytes:
    found = re.search(r"```ndjson\n(.*?)```", read("journal-v1.md"), re.DOTALL)
    assert found
    return found[1].encode()


def test_journal_example_is_written_and_read_by_the_code() -> None:
    """Catches: a line format that moved away from its specification."""
    data = example()
    assert data == specs.journal_example()
    segment = parse_segment_bytes(1, data + b"\n" * 100, "000001.ndjson")
    assert [record.type for record in segment.records] == ["segment_opened", "transition"]
    assert segment.end == len(data)
    sizes = [len(line) for line in data.splitlines(keepends=True)]
    assert f"first line is {sizes[0]} bytes" in read("journal-v1.md")
    assert f"the second {sizes[1]}." in read("journal-v1.md")


def test_torn_tail_and_corruption_are_told_apart_as_written() -> None:
    """Catches: a reader that reads past damage, or refuses a torn tail."""
    first, second = example().splitlines(keepends=True)
    torn = parse_segment_bytes(1, first + second[:-20] + b"\n" * 50, "f")
    assert len(torn.records) == 1 and torn.end == len(first)
    with pytest.raises(JournalCorrupt) as caught:
        parse_segment_bytes(1, first.replace(b"node-0", b"node-1") + second, "f")
    assert caught.value.offset == 0


def test_numbers_in_the_journal_text_are_the_codes() -> None:
    """Catches: a changed block or reserve."""
    text = read("journal-v1.md")
    assert f"blocks of {BLOCK_BYTES} bytes" in text
    assert f"and {RESERVE_BYTES} bytes more" in text


def test_every_record_type_is_in_the_text_and_the_schema() -> None:
    """Catches: a new record type that the specification does not know."""
    mapping = json.loads(read("schemas/journal-record.json"))["discriminator"]["mapping"]
    text = read("journal-v1.md").split("## Records")[1].split("\n## ")[0]
    assert set(mapping) == set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE))


# ----------------------------------------------------------------------------------------- schemas


NUMERIC = ("integer", "number")
KINDS: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}


def problems(value: Any, schema: dict[str, Any], whole: dict[str, Any]) -> list[str]:
    """A small structural check: references, unions, objects, arrays, types, constants."""
    if "$ref" in schema:
        return problems(value, whole["$defs"][schema["$ref"].rsplit("/", 1)[1]], whole)
    options = schema.get("anyOf") or schema.get("oneOf")
    if options:
        tried = [problems(value, option, whole) for option in options]
        return [] if [] in tried else [f"{value!r} fits none: {tried}"]
    kind = schema.get("type", "")
    if not isinstance(value, KINDS.get(kind, object)) or (kind in NUMERIC and value is True):
        return [f"{value!r} is no {kind}"]
    if "const" in schema and value != schema["const"]:
        return [f"{value!r} is not {schema['const']!r}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{value!r} is not in {schema['enum']}"]
    if kind == "array":
        return [p for v in value for p in problems(v, schema.get("items") or {}, whole)]
    if kind == "object" and "properties" in schema:
        known = schema["properties"]
        found = [f"{name} is missing" for name in schema.get("required", ()) if name not in value]
        if schema.get("additionalProperties") is False:
            found += [f"{name} is unknown" for name in value if name not in known]
        return found + [
            p for n, v in value.items() if n in known for p in problems(v, known[n], whole)
        ]
    return []


@pytest.mark.parametrize("name", sorted(DOCUMENTS))
def test_schemas_describe_real_documents(name: str) -> None:
    """Catches: a schema of another document than the written one, or one that lets anything pass."""
    schema = json.loads(read(f"schemas/{name}.json"))
    document = DOCUMENTS[name]
    value = json.loads(encode(document))
    assert problems(value, schema, schema) == []
    assert problems({**value, "surprise": 1}, schema, schema) == ["surprise is unknown"]
    required = schema["required"][0]
    assert problems({k: v for k, v in value.items() if k != required}, schema, schema)
    assert problems({**value, "schema_version": 2}, schema, schema)
    assert (
        TypeAdapter(type(document)).validate_json(encode(document)).model_dump_json()
        == encode(document).decode()
    )


def test_journal_schema_describes_real_lines() -> None:
    """Catches: a journal schema that does not fit a line as it is written."""
    schema = json.loads(read("schemas/journal-record.json"))
    for line in example().splitlines():
        body = decode_line(line)
        assert body is not None
        value = json.loads(body)
        assert problems(value, schema, schema) == []
        assert problems({**value, "type": "surprise"}, schema, schema)
        assert problems({k: v for k, v in value.items() if k != "epoch"}, schema, schema)
        assert RECORD.validate_json(body).type == value["type"]
