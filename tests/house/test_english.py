"""The words of docstrings and comments: short sentences about things that are named."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from house.source import ROOT

LIBRARY = "ckptfsm"
AROUND = ("tests", "specs", "benchmarks", "docs")  # rates and openers only

MAX_WORDS = 30
OPENERS = re.compile(r"(?:What|One|It|Of)\b")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
# "what" as a noun: at the start, or after a preposition, a conjunction or a verb that takes it.
NOUN_WHAT = re.compile(
    r"(?:^|[.:] |\b(?:of|for|by|in|with|from|to|and|or|but|than|is|are|see|say|tells?) )what\b",
    re.I,
)
OWN = re.compile(r"\bown\b", re.I)
PERSONS = re.compile(r"\b(?:somebody|nobody|whoever|whose|another's|anybody)\b", re.I)


class Text(NamedTuple):
    """A docstring, or a block of comments. ``place`` is its file and line."""

    place: str
    text: str

    def sentences(self) -> Iterator[str]:
        """Every paragraph and every item of a list ends a sentence."""
        for paragraph in re.split(r"\n\s*\n|\n\s*(?=[-*] )", self.text):
            yield from SENTENCE_END.split(" ".join(paragraph.split()).lstrip("-* "))


@cache
def texts(directory: str = LIBRARY) -> tuple[Text, ...]:
    files = sorted((ROOT / directory).rglob("*.py"))
    return tuple(text for file in files for text in (*docstrings(file), *comments(file)))


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


def rate(words: re.Pattern[str], directory: str) -> tuple[float, list[str]]:
    """How often ``words`` occur in 1,000 words, and where."""
    found = texts(directory)
    total = sum(len(re.findall(r"[A-Za-z']+", each.text)) for each in found)
    places = [each.place for each in found for _ in words.findall(" ".join(each.text.split()))]
    return 1000 * len(places) / total, places


def test_no_sentence_is_long():
    """Catches: a sentence that must be read twice."""
    found = [
        (each.place, len(sentence.split()))
        for each in texts()
        for sentence in each.sentences()
        if len(sentence.split()) > MAX_WORDS and "|" not in sentence
    ]
    assert found == []


@pytest.mark.parametrize("directory", [LIBRARY, *AROUND])
def test_no_sentence_begins_with_a_word_that_names_nothing(directory):
    """Catches: ``What is common``, ``One that died``, ``It lies``, ``Of two counts``."""
    found = [
        (each.place, sentence[:40])
        for each in texts(directory)
        for sentence in each.sentences()
        if OPENERS.match(sentence)
    ]
    assert found == []


@pytest.mark.parametrize("directory", [LIBRARY, *AROUND])
def test_what_stands_for_few_things(directory):
    """Catches: ``what`` where the thing has a name."""
    rare, found = rate(NOUN_WHAT, directory)
    assert rare <= 2, found


@pytest.mark.parametrize("directory", [LIBRARY, *AROUND])
def test_own_is_rare(directory):
    """Catches: ``its own`` where a possessive is enough."""
    rare, found = rate(OWN, directory)
    assert rare <= 1, found


@pytest.mark.parametrize(("directory", "limit"), [(LIBRARY, 1), *((each, 2) for each in AROUND)])
def test_persons_are_rare(directory, limit):
    """Catches: ``somebody`` and ``whose``, where a program, a rank or a user could be named."""
    rare, found = rate(PERSONS, directory)
    assert rare <= limit, found
