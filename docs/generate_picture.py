"""Draw the subpackages of ``ckptfsm/`` and the imports between them, for ``docs/architecture.md``.

The picture is made from the imports, and a test compares it with the page. An arrow that follows
from two others is left out. Modules at the top of the package (``errors``, ``ports``, ...) only
hand on names of a subpackage, and are not drawn.

    python docs/generate_picture.py --write     write the picture into the page
    python docs/generate_picture.py --check     exit with 1 if the page shows another one
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- picture: python docs/generate_picture.py --write -->"
END = "<!-- end of picture -->"
SUBPACKAGES: Mapping[str, str] = MappingProxyType(
    {
        "core": "decides: table, ledger, recovery",
        "adapters": "reaches the machine: disk, processes, clock",
        "disk": "keeps the protocol on disk",
        "writers": "writes the shards",
        "coordinator": "journals, then acts; recovers",
        "places": "copies in other places: object stores, directories",
        "follow": "takes each tracked checkpoint: evaluators, jobs",
        "ranks": "what a trainer calls",
        "dcp": "state of torch: copies, memory, plans",
        "megatron": "megatron-core: plans, requests, loads",
        "integrations": "trainers: Megatron-LM, verl, Ray",
        "views": "pictures and lists",
        "testing": "public test kit",
        "demo": "ckptfsm demo",
        "cli": "the command line",
    }
)


@cache
def imports(package: Path) -> dict[str, set[str]]:
    """The subpackages that each subpackage imports from."""
    found: dict[str, set[str]] = {subpackage: set() for subpackage in SUBPACKAGES}
    for path in package.rglob("*.py"):
        subpackage = path.relative_to(package).parts[0]
        if subpackage not in found:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [node.module]
            pieces = [name.split(".") for name in names]
            found[subpackage] |= {p[1] for p in pieces if len(p) > 1 and p[0] == "ckptfsm"} & set(
                SUBPACKAGES
            )
    return {subpackage: others - {subpackage} for subpackage, others in found.items()}


def without_detours(graph: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """The same graph without the arrows that follow from others."""

    def reach(subpackage: str) -> set[str]:
        return graph[subpackage].union(*(reach(other) for other in graph[subpackage]))

    return {
        subpackage: sorted(other for other in others if not any(other in reach(o) for o in others))
        for subpackage, others in graph.items()
    }


def picture(package: Path = ROOT / "ckptfsm") -> str:
    """The picture as Mermaid text."""
    lines = ["```mermaid", "flowchart BT"]
    lines += [
        f'    {subpackage}["<b>{subpackage}</b><br>{about}"]'
        for subpackage, about in SUBPACKAGES.items()
    ]
    for subpackage, others in without_detours(imports(package)).items():
        lines += [f"    {other} --> {subpackage}" for other in others]
    return "\n".join([*lines, "```"])


def floors(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The subpackages from the ground up: each stands above every subpackage that it imports from."""

    def height(subpackage: str) -> int:
        return 1 + max((height(other) for other in graph[subpackage]), default=-1)

    heights = {subpackage: height(subpackage) for subpackage in graph}
    return [[r for r in graph if heights[r] == n] for n in range(1 + max(heights.values()))]


def drawing(package: Path = ROOT / "ckptfsm") -> str:
    """The picture as SVG, for pages that are shown without a Mermaid program."""
    graph = imports(package)
    rows = floors(graph)
    height = len(rows) * _FLOOR
    middle = {}
    for floor, subpackages in enumerate(rows):
        for place, subpackage in enumerate(subpackages):
            x = _WIDTH * (place + 0.5) / len(subpackages)
            middle[subpackage] = (x, height - _FLOOR * (floor + 0.5))
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}">', _STYLE]
    for subpackage, others in without_detours(graph).items():
        lines += [_arrow(middle[other], middle[subpackage]) for other in others]
    for subpackage, (x, y) in middle.items():
        lines += [
            f'<rect x="{x - _BOX / 2:.0f}" y="{y - 20:.0f}" width="{_BOX}" height="40" rx="4"/>',
            f'<text x="{x:.0f}" y="{y - 3:.0f}" class="name">{subpackage}</text>',
            f'<text x="{x:.0f}" y="{y + 12:.0f}">{SUBPACKAGES[subpackage]}</text>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


_WIDTH, _FLOOR, _BOX = 900, 70, 250
_STYLE = """<style>
  text { font: 11px sans-serif; text-anchor: middle; fill: #222 }
  .name { font-weight: bold; font-size: 12px }
  rect { fill: #fff; stroke: #0072b2 }
  path { fill: none; stroke: #777 }
  marker path { fill: #777; stroke: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #ddd } rect { fill: #0d1117; stroke: #56b4e9 } path { stroke: #999 }
    marker path { fill: #999 }
  }
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7"
 orient="auto"><path d="M0 0 8 4 0 8z"/></marker></defs>"""


def _arrow(below: tuple[float, float], above: tuple[float, float]) -> str:
    """A line from the top of a box to the foot of another one."""
    (x, y), (to_x, to_y) = (below[0], below[1] - 20), (above[0], above[1] + 20)
    bend = (y - to_y) / 2
    curve = f"C{x:.0f} {y - bend:.0f} {to_x:.0f} {to_y + bend:.0f} {to_x:.0f} {to_y:.0f}"
    return f'<path d="M{x:.0f} {y:.0f} {curve}" marker-end="url(#tip)"/>'


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
