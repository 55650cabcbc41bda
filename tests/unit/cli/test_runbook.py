"""``ckptfsm runbook``: what findings send their reader to, also where no repository is."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from cli_runs import ran, said

REPOSITORY = Path(__file__).resolve().parents[3]
PAGES = {page.name: page.read_text(encoding="utf-8") for page in REPOSITORY.glob("docs/runbook/*")}


def test_each_page_is_printed_whole(capsys):
    """Catches: a section that is cut, or another one than the finding's."""
    assert said(capsys, "runbook") == PAGES["README.md"]
    for name in ("broken.md", "repaired.md", "note.md"):
        beginning, *sections = PAGES[name].split("\n## ")
        printed = [said(capsys, "runbook", each.partition("\n")[0]) for each in sections]
        assert "\n".join([beginning, *printed]) == PAGES[name]


@pytest.mark.parametrize("code", ("no-such-code", "../cli", "disk-full.md", "README", "broken", ""))
def test_an_unknown_code_is_answered_with_those_that_there_are(code, capsys):
    status, out, err = ran(capsys, "runbook", code)
    assert (status, out) == (2, "") and "disk-full" in err


def test_a_wheel_has_the_pages(tmp_path):
    """Catches: findings that name pages which the installation at the cluster does not have."""
    source = tmp_path / "source"
    shutil.copytree(REPOSITORY / "docs/runbook", source / "docs/runbook")
    shutil.copytree(
        REPOSITORY / "ckptfsm",
        source / "ckptfsm",
        symlinks=True,
        ignore=lambda place, names: {name for name in names if name == "__pycache__"},
    )
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / name, source)
    build = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)], cwd=source, check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        there = {n: packed.read(n).decode() for n in packed.namelist() if "/runbook/" in n}
    assert there == {f"ckptfsm/runbook/{name}": text for name, text in PAGES.items()}
