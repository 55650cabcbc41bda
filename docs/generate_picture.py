"""Draw the rooms of ``ckptfsm/`` and the imports between them, for ``docs/architecture.md``.

The picture is made from the imports, and a test compares it with the page. An arrow that follows
from two others is left out. Modules at the top of the package (``errors``, ``ports``, ...) only
hand on names of a room, and are not drawn.

    python docs/generate_picture.py --write     write the picture into the page
    python docs/generate_picture.py --check     exit with 1 if the page shows another one
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- picture: python docs/generate_picture.py --write -->"
END = "<!-- end of picture -->"
ROOMS: Mapping[str, str] = MappingProxyType(
    {
        "core": "decides: table, ledger, recovery",
        "adapters": "reaches the machine: disk, processes, clock",
        "disk": "keeps the protocol on disk",
        "writers": "writes the shards",
        "coordinator": "journals, then acts; recovers",
        "ranks": "what a trainer calls",
        "megatron": "torch and megatron-core",
        "integrations": "trainers: Megatron-LM, verl, Ray",
        "views": "pictures for people",
        "testing": "public test kit",
        "demo": "ckptfsm demo",
        "cli": "the command line",
    }
)


def imports(package: Path) -> dict[str, set[str]]:
    """The rooms that each room imports from."""
    found: dict[str, set[str]] = {room: set() for room in ROOMS}
    for path in package.rglob("*.py"):
        room = path.relative_to(package).parts[0]
        if room not in found:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [node.module]
            pieces = [name.split(".") for name in names]
            found[room] |= {p[1] for p in pieces if len(p) > 1 and p[0] == "ckptfsm"} & set(ROOMS)
    return {room: others - {room} for room, others in found.items()}


def without_detours(graph: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """The same graph without the arrows that follow from others."""

    def reach(room: str) -> set[str]:
        return graph[room].union(*(reach(other) for other in graph[room]))

    return {
        room: sorted(other for other in others if not any(other in reach(o) for o in others))
        for room, others in graph.items()
    }


def picture(package: Path = ROOT / "ckptfsm") -> str:
    """The picture as Mermaid text."""
    lines = ["```mermaid", "flowchart BT"]
    lines += [f'    {room}["<b>{room}</b><br>{about}"]' for room, about in ROOMS.items()]
    for room, others in without_detours(imports(package)).items():
        lines += [f"    {other} --> {room}" for other in others]
    return "\n".join([*lines, "```"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the picture, or compare it. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python docs/generate_picture.py")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true")
    mode.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    if options.write:
        PAGE.write_text(f"{before}{BEGIN}\n{picture()}\n{END}{after}", encoding="utf-8")
        return 0
    fresh = rest.partition(END)[0].strip() == picture()
    if not fresh:
        sys.stderr.write("docs/architecture.md: run python docs/generate_picture.py --write\n")
    return 0 if fresh else 1


if __name__ == "__main__":
    sys.exit(main())
