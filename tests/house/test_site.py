"""The documentation site: every page has its place, and the strict build finds broken links."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from cli_runs import said

from docs import generate_picture, generate_site, screens
from house.source import ROOT

SETTINGS = ROOT / "mkdocs.yml"
TIMEOUT_S = 120.0


def navigation() -> list[str]:
    """The pages that the navigation names, without anchors."""
    text = SETTINGS.read_text(encoding="utf-8").partition("\nnav:\n")[2]
    return re.findall(r"([\w./-]+\.md)(?:#[\w-]+)?$", text, re.M)


def test_the_navigation_names_every_page():
    """Catches: a new page that no reader of the site finds; a decision is found in the list of them."""
    listed = {"docs/decisions/", "specs/schemas/"}
    pages = {
        name
        for name in generate_site.pages()
        if name.endswith(generate_site.LIST) or not any(name.startswith(each) for each in listed)
    }
    assert set(navigation()) == pages


def test_a_code_block_of_the_site_has_no_mark():
    """Catches: a mark for the tests that the site takes for text, so that the block is none."""
    allowed = re.compile(r'```(?:\w+(?: title="[\w./-]+")?)?')
    begins = [
        line
        for text in generate_site.pages().values()
        for line in text.splitlines()
        if line.startswith("```")
    ]
    assert [line for line in begins if not allowed.fullmatch(line)] == []
    assert '```python title="train.py"' in begins and "```mermaid" not in begins


def test_a_page_is_changed_where_the_site_shows_it_in_another_way():
    """Catches: a link to a directory, which the site has not; a backslash that it would show."""
    changed = generate_site.for_the_site
    assert changed("see [all](decisions/).") == "see [all](decisions/contents.md)."
    assert changed("| `a \\| b` | a \\| b |") == "| `a | b` | a \\| b |"
    assert changed("`a \\| b`") == "`a \\| b`"


def test_the_margin_of_the_reference_has_short_names():
    """Catches: a name that the margin cuts off, as it does after some twenty letters."""
    text = generate_site.pages()["docs/reference/api.md"]
    assert '\n### <span class="of">CheckpointManager.</span>save\n' in text
    assert re.findall(r"^###+ [\w.]+$", text, re.M) == []


def test_the_drawing_has_every_subpackage_and_no_arrow_downward():
    """Catches: a subpackage that has no box, a box above a subpackage that imports it."""
    graph = generate_picture.imports(ROOT / "ckptfsm")
    floors = generate_picture.floors(graph)
    height = {
        subpackage: number
        for number, subpackages in enumerate(floors)
        for subpackage in subpackages
    }
    assert set(height) == set(generate_picture.SUBPACKAGES)
    assert all(
        height[subpackage] > height[other] for subpackage in graph for other in graph[subpackage]
    )
    drawn = generate_picture.drawing()
    assert all(f">{subpackage}</text>" in drawn for subpackage in height)


def test_a_second_build_leaves_no_old_page(tmp_path):
    """Catches: a page that was renamed, and stays on the site under its old name."""
    old = tmp_path / generate_site.SOURCE / "docs/old.md"
    old.parent.mkdir(parents=True)
    old.write_text("# Old\n")
    assert generate_site.main(["--root", str(tmp_path)]) == 0
    assert not old.exists() and (old.parent / "tutorial.md").exists()


def test_the_screenshots_show_a_root_with_a_past(tmp_path, capsys):
    """Catches: a made-up job that saves nothing, or in the future, and pictures of that."""
    root = screens.made_root(tmp_path, 10)
    rows = [line.split() for line in said(capsys, "ls", "-r", root).splitlines()[3:]]
    assert [row[0] for row in rows] == ["500", "700", "800", "1000"]
    assert [row[1] for row in rows] == ["tracked"] * 4 and rows[-1][-1] == "latest"
    assert all("0 ms" not in " ".join(row) for row in rows)
    shown = screens.listing(root, "dark")
    (style,) = set(re.findall(r'class="([\w-]+)"[^>]*>tracked</text>', shown))
    assert re.search(rf"\.{style} {{ fill: #(?!ffffff|c5c8c6)\w+", shown)
    assert "https://" not in shown and str(tmp_path) not in shown


@pytest.mark.skipif(find_spec("zensical") is None, reason="needs ckptfsm[docs], on Python 3.11")
@pytest.mark.parametrize(
    ("added", "found"),
    [
        ("", "No issues found"),
        ("\n[gone](gone.md)\n", "page does not exist"),
        ("\n[gone](errors.md#gone)\n", "anchor does not exist"),
    ],
    ids=["as it is", "a broken link", "a broken anchor"],
)
def test_the_site_is_built_strictly(added: str, found: str, tmp_path: Path):
    """Catches: a link that works in the repository alone, and a page that asks another host."""
    shutil.copy(SETTINGS, tmp_path)
    generate_site.write(tmp_path)
    with (tmp_path / generate_site.SOURCE / "docs/tutorial.md").open("a") as page:
        page.write(added)
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    said = done.stdout + done.stderr
    assert found in said, said
    assert (done.returncode == 0) == (not added)
    if not added:
        built = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("index.html")}
        assert {f"build/site/{place_of(name)}index.html" for name in generate_site.pages()} <= built
        pages = [path.read_text() for path in (tmp_path / "build/site").rglob("*.html")]
        assert [found for page in pages for found in re.findall(r'src="https?:[^"]*', page)] == []


def place_of(page: str) -> str:
    """The directory of the site that has this page."""
    name = page.removesuffix(".md")
    return name.removesuffix("README") if name.endswith("README") else f"{name}/"
