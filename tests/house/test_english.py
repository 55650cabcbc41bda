"""Sentences in docstrings and comments are short enough to read once."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from house.source import ROOT

LIBRARY = "ckptfsm"

MAX_WORDS = 30
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


class Text(NamedTuple):
    """A docstring, or a block of comments. ``place`` is its file and line."""

    place: str
    text: str

    def sentences(self) -> Iterator[str]:
        """Every paragraph and every item of a list ends a sentence."""
        for paragraph in re.split(r"\n\s*\n|\n\s*(?=[-*] )", self.text):
            yield from SENTENCE_END.split(" ".join(paragraph.split()).lstrip("-* "))


def texts() -> Iterator[Text]:
    for file in sorted((ROOT / LIBRARY).rglob("*.py")):
        yield from docstrings(file)
        yield from comments(file)


def docstrings(file: Path) -> Iterator[Text]:
    """Every string that stands alone: also those below a constant or a field."""
    for node in ast.walk(ast.parse(file.read_text())):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield Text(f"{file.relative_to(ROOT)}:{node.lineno}", value.value)


def comments(file: Path) -> Iterator[Text]:
    """Comments on consecutive lines are one text, a comment beside code is another."""
    module = file.relative_to(ROOT)
    source = file.read_text()
    block: list[str] = []
    last = start = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        alone = not token.line[: token.start[1]].strip()
        if block and not (alone and token.start[0] == last + 1):
            yield Text(f"{module}:{start}", "\n".join(block))
            block = []
        start = start if block else token.start[0]
        block.append(token.string.lstrip("# "))
        last = token.start[0] if alone else 0
    if block:
        yield Text(f"{module}:{start}", "\n".join(block))


def test_no_sentence_is_long():
    """Catches: a sentence that must be read twice."""
    found = [
        (each.place, len(sentence.split()))
        for each in texts()
        for sentence in each.sentences()
        if len(sentence.split()) > MAX_WORDS and "|" not in sentence
    ]
    assert found == []
