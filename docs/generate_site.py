"""Collect the pages of the documentation site in ``build/site-source``; ``mkdocs.yml`` names them.

The tree there is that of the repository, so that a link between two pages is the same on both. These
things differ:

- The reference is added, made from the code.
- A directory of many pages gets a list of them, and a link to the directory leads to the list.
- Code blocks lose the marks that tests read. A Mermaid picture, which needs a program from another
  host, is drawn.
- The code in a table has no backslash before a bar.

Files of earlier builds are deleted.

    python docs/generate_site.py [--root DIR]    write below DIR (default: the repository)
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

HERE = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(HERE))

from docs import generate_picture, generate_reference  # noqa: E402

SOURCE = "build/site-source"
REFERENCE = "docs/reference"
SUBPACKAGES = "docs/subpackages.svg"
TAKEN = (
    "*.md",
    "docs/**/*.md",
    "docs/*.svg",
    "docs/*.css",
    "docs/screens/*",
    "specs/*.md",
    "specs/lifecycle.*",
    "specs/schemas/*",
)
LIST = "contents.md"
# Directories that pages link to, with the heading of their list.
LISTED: Mapping[str, str] = MappingProxyType(
    {"docs/decisions": "Decisions", "specs/schemas": "Schemas of the documents on disk"}
)
_FENCE = re.compile(r"^```(\w+) (?:run|run=job|file=(\S+))$", re.M)
_MERMAID = re.compile(r"^```mermaid\n.*?^```$", re.M | re.S)
_ROW = re.compile(r"^\|.*$", re.M)
_CODE = re.compile(r"`[^`]*`")
_MEMBER = re.compile(r"^(###+ )([\w.]+\.)(\w+)$", re.M)  # its last name stands in the margin
_DIRECTORY = re.compile(r"(\]\([\w./-]+/)\)")


def pages() -> dict[str, str]:
    """The text of every page, by its path in the site."""
    found = {name: for_the_site(read(name)) for name in taken() if name.endswith(".md")}
    for directory, heading in LISTED.items():
        found[f"{directory}/{LIST}"] = list_of(directory, heading)
    for name, text in generate_reference.pages("../").items():
        found[f"{REFERENCE}/{name}.md"] = _MEMBER.sub(r'\1<span class="of">\2</span>\3', text)
    return found


def taken() -> list[str]:
    """The files that are taken over from the repository, by their paths."""
    return sorted(str(path.relative_to(HERE)) for glob in TAKEN for path in HERE.glob(glob))


def read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def for_the_site(text: str) -> str:
    """A page in the form that the site shows as GitHub shows the page of the repository."""
    text = _FENCE.sub(_bare_fence, text)
    text = _MERMAID.sub(f"![The subpackages and their imports]({Path(SUBPACKAGES).name})", text)
    text = _ROW.sub(lambda row: _CODE.sub(_bare_bars, row[0]), text)
    return _DIRECTORY.sub(rf"\1{LIST})", text)


def _bare_fence(found: re.Match[str]) -> str:
    title = f' title="{found[2]}"' if found[2] else ""
    return f"```{found[1]}{title}"


def _bare_bars(found: re.Match[str]) -> str:
    return found[0].replace("\\|", "|")


def list_of(directory: str, heading: str) -> str:
    """A page that lists the files of a directory, each page by its title."""
    lines = [f"# {heading}", ""]
    for path in sorted((HERE / directory).iterdir()):
        title = path.name
        if path.suffix == ".md":
            title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{_escaped(title)}]({path.name})")
    return "\n".join(lines) + "\n"


def _escaped(title: str) -> str:
    return title.replace(".", "\\.", 1)  # "1. ..." would begin a list


def pictures() -> Iterator[str]:
    return (name for name in taken() if not name.endswith(".md"))


def write(root: Path) -> None:
    """Write all pages and pictures below ``root``, in place of those of an earlier build."""
    place = root / SOURCE
    if place.exists():
        shutil.rmtree(place)
    for name, text in pages().items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for name in pictures():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(HERE / name, path)
    (place / SUBPACKAGES).write_text(generate_picture.drawing(), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python docs/generate_site.py")
    parser.add_argument("--root", type=Path, default=HERE)
    write(parser.parse_args(arguments).root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
