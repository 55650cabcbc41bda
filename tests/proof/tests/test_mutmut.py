"""The excuses of a survivor that the maintainer's mutation run accepts, and those that it does not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from house.source import MODULES, room
from proof import mutmut
from proof.survivors import (
    EXPLANATIONS,
    Change,
    Mutant,
    judge,
    phrases,
    read_explanations,
    read_mutants,
    words_only,
)

import ckptfsm

LIBRARY = Path(ckptfsm.__file__).parent

GENERATED = """
def x_keep__mutmut_orig(n: int) -> int:
    if n < 1:
        raise ConfigError("too few", n=n)
    return n

def x_keep__mutmut_1(n: int) -> int:
    if n <= 1:
        raise ConfigError("too few", n=n)
    return n

def x_keep__mutmut_2(n: int) -> int:
    if n < 1:
        raise ConfigError("TOO FEW", n=n)
    return n

class Policy:
    def xǁPolicyǁnumber__mutmut_orig(self) -> int:
        return keep(
            self.n,
            1,
        )

    def xǁPolicyǁnumber__mutmut_7(self) -> int:
        return keep(
            self.n,
            2,
        )
"""
BOUND = Change("keep", "if n < 1:", "if n <= 1:")
NAMES = [f"ckptfsm.core.retention.{name}" for name in ("x_keep__mutmut_1", "x_keep__mutmut_2")]
NUMBER = "ckptfsm.core.retention.xǁPolicyǁnumber__mutmut_7"


@pytest.fixture
def mutants() -> dict[str, Mutant]:
    return read_mutants("core/retention", GENERATED)


def test_a_mutant_is_known_by_its_change(mutants):
    """Catches: an explanation that moves to another mutant once mutmut numbers them anew."""
    assert {name: mutant.change for name, mutant in mutants.items()} == {
        NAMES[0]: BOUND,
        NAMES[1]: Change(
            "keep", 'raise ConfigError("too few", n=n)', 'raise ConfigError("TOO FEW", n=n)'
        ),
        NUMBER: Change("Policy.number", "1,", "2,"),
    }
    assert [mutant.words_only for mutant in mutants.values()] == [False, True, False]
    assert [line for line in mutants[NUMBER].lines if "2," in GENERATED.splitlines()[line - 1]]


def test_a_survivor_that_nothing_explains_is_red(mutants):
    """Catches: a gap in the tests that the command passes over."""
    for end in ("survived", "no tests", "suspicious", "not checked"):
        found = judge({NAMES[0]: end, NAMES[1]: end}, mutants, (), ())
        assert (found.unexplained, found.words, found.good) == ([NAMES[0]], [NAMES[1]], False)


def test_excuses_of_a_survivor(mutants):
    """Catches: a survivor that is red though it is explained, or is counted twice."""
    ends = {NAMES[0]: "survived", NAMES[1]: "killed", NUMBER: "survived"}
    found = judge(ends, mutants, [NUMBER], [BOUND])
    assert (found.killed, found.refused, found.explained) == ([NAMES[1]], [NUMBER], [NAMES[0]])
    assert found.good and not found.words and not found.stale


def test_an_explanation_covers_one_mutant(mutants):
    """Catches: the same change at another place of the function, which was not looked at."""
    ends = {"one": "survived", "two": "survived"}
    twice = dict.fromkeys(ends, mutants[NAMES[0]])
    assert judge(ends, twice, (), [BOUND]).unexplained == ["two"]
    assert judge(ends, twice, (), [BOUND, BOUND]).good


def test_an_explanation_that_explains_nothing_is_stale(mutants):
    """Catches: reasons for code that is gone, and for mutants that the tests kill by now."""
    gone = Change("keep", "if n < 9:", "if n <= 9:")
    found = judge({NAMES[0]: "killed"}, mutants, (), [BOUND, gone])
    assert found.stale == [BOUND, gone] and not found.good
    assert judge({NAMES[0]: "timeout"}, mutants, (), [BOUND]).good, "a busy machine is no news"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('raise SaveRefused("no", step=1)', 'raise SaveRefused("XXnoXX", step=1)'),
        ('raise ValueError("no" f"{n}")', 'raise ValueError("NO" f"{n}")'),
        (
            "raise SaveRefused(f\"{n}{'s' if n else 'z'}\")",
            "raise SaveRefused(f\"{n}{'S' if n else 'z'}\")",
        ),
        ('raise ValueError("a: " + "; ".join(n))', 'raise ValueError("a: " + "XX; XX".join(n))'),
        ('why = "old" if n else why', 'why = "OLD" if n else why'),
        ('why = why or "nobody"', 'why = why or "NOBODY"'),
        ('return Rejected(event, "late")', 'return Rejected(event, "LATE")'),
    ],
)
def test_words_for_people(old, new):
    """Catches: a wording that a human has to read an explanation for."""
    assert words_only(function(old), function(new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('raise SaveRefused("no", part="a")', 'raise SaveRefused("no", part="A")'),
        ('raise SaveRefused("no")', "raise SaveRefused(None)"),
        ('raise SaveRefused(f"{n}")', 'raise SaveRefused(f"{m}")'),
        ("raise SaveRefused(f\"{n['a']}\")", "raise SaveRefused(f\"{n['A']}\")"),
        ("raise ValueError(n.get('a'))", "raise ValueError(n.get('A'))"),
        ('why = "old" if n == "a" else why', 'why = "old" if n == "A" else why'),
        ('why = "old" if n else ""', 'why = "old" if n else "XXXX"'),
        ('why = n["a"]', 'why = n["A"]'),
        ('return {"a": n}', 'return {"A": n}'),
        ('return n == "a"', 'return n == "A"'),
        ('return Rejected("late", why)', 'return Rejected("LATE", why)'),
        ('return Withdrawn(of, "damaged", why)', 'return Withdrawn(of, "DAMAGED", why)'),
        ('name = "a"', 'name = "A"'),
        ('raise ValueError("a" * 2)', 'raise ValueError("a" * 3)'),
    ],
)
def test_texts_that_are_not_words_for_people(old, new):
    """Catches: a rule for words that lets off a key, a comparison, or the whole message."""
    assert not words_only(function(old), function(new))


def test_a_text_that_the_module_looks_for_is_no_wording():
    """Catches: a decision that hangs on a phrase of a text, which may then change unseen."""
    sought = phrases(ast.parse('late = any("lagged" in d.why or "x" in d.name for d in ds)'))
    assert sought == {"lagged"}
    old = function('why = "the journal lagged"')
    assert words_only(old, function('why = "XXthe journal laggedXX"'), sought)
    assert not words_only(old, function('why = "THE JOURNAL LAGGED"'), sought)


def function(line: str) -> ast.FunctionDef:
    return ast.parse(f"def f(n):\n    {line}").body[0]


def test_the_explanations_are_read():
    """Catches: a list of mutants that is taken for one, and an explanation that gives no reason."""
    text = '[[retention]]\nfunction = "keep"\nold = "if n < 1:"\nnew = {}\nwhy = "{}"\n'
    read = read_explanations("retention", text.format('["if n <= 1:", "if n < 2:"]', "why not"))
    assert read == [BOUND, Change("keep", "if n < 1:", "if n < 2:")]
    assert read_explanations("config", text.format('""', "why not")) == []
    for broken in (text.format('""', " "), text.replace("why =", "because =")):
        with pytest.raises(ValueError):
            read_explanations("retention", broken)


def functions_of(source: str) -> dict[str, str]:
    """The text of each function of a module by its name, as in an explanation, without line breaks."""
    tree = ast.parse(source)
    found = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    for kind in (n for n in tree.body if isinstance(n, ast.ClassDef)):
        found |= {f"{kind.name}.{n.name}": n for n in kind.body if isinstance(n, ast.FunctionDef)}
    lines = source.splitlines()
    return {
        name: " ".join(" ".join(lines[n.lineno - 1 : n.end_lineno]).split())
        for name, n in found.items()
    }


def test_every_pure_module_is_mutated_and_every_explanation_is_of_one():
    """Catches: a pure module that no mutant is made of, or a reason that is not read, or one of a
    line that its function has no more."""
    plain = {f"core/{name}.py" for name in ("__init__", "backoff", "formats", "ports", "requests")}
    core = {module.removesuffix(".py") for module in MODULES if room(module) == "core"} - {
        name.removesuffix(".py") for name in plain
    }
    assert set(mutmut.TESTS) == core | {"ranks/proposal"}
    text = EXPLANATIONS.read_text(encoding="utf-8")
    sections = set(re.findall(r"^\[\[(\w+)\]\]", text, re.M))
    assert sections <= {module.rpartition("/")[2] for module in mutmut.TESTS}
    for module in mutmut.TESTS:
        functions = functions_of((LIBRARY / f"{module}.py").read_text(encoding="utf-8"))
        for change in read_explanations(module, text):
            assert " ".join(change.old.split()) in functions[change.function], change
