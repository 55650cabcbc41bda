"""Broken roots, taken back to training in a terminal of 80 columns, by the commands it prints.

Each scenario types commands into a shell, parses the way out from the screen, and types it as it
stands there. The section of the runbook that the screen names has to tell of that command, too.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import termios
from dataclasses import dataclass
from pathlib import Path

import broken_roots
import pytest
from real_roots import real_root
from terminals import (
    COLUMNS,
    ESCAPE,
    PATIENCE_S,
    ROWS,
    Screen,
    at_terminal,
    shown,
    too_wide,
)

FIX = "ckptfsm doctor --fix"
COMMAND = re.compile(r"(?<![\w.])(?:ckptfsm|mv|kill) [^()\n]*[^()\s]")
NAME = "\x1b[31mred\x1b[2J\x07"


@dataclass(frozen=True)
class Scenario:
    """A fault as a reader meets it.

    ``code`` names its section, ``would`` is in the words of ``explain --resume`` before the repair.
    ``way_out`` are the commands that the screens print one after the other, ``step`` is the end.
    """

    code: str
    would: str
    way_out: tuple[str, ...]
    step: int


SCENARIOS = {
    "F17": Scenario("prune-interrupted", "[rule prune_was_cut_short]", (FIX,), 40),
    "F18": Scenario("tracker-unreadable", "the tracker is unreadable; rebuilt", (FIX,), 30),
    "F18-release": Scenario("tracker-disagrees", "the tracker says 'release'", (FIX,), 30),
    "F19": Scenario("checkpoint-missing", "falling back to 20", (FIX,), 20),
    "F19-files": Scenario("checkpoint-damaged", "weights is missing", (FIX,), 20),
    "F19-all": Scenario(
        "nothing-to-resume-from",
        "A start would be refused: there is evidence",
        ("ckptfsm quarantine restore 30.e1.a3",),
        30,
    ),
    "F20": Scenario(
        "journal-damaged",
        "A start would be refused: journal damaged",
        ("mv .ckptfsm/journal ../old-journal", FIX),
        30,
    ),
    "F20-torn": Scenario("owner-ended", "would resume from step 30", (), 30),
    "F21": Scenario(
        "checkpoint-damaged",
        "would resume from step 30",  # the contents are not read
        ("ckptfsm verify --all", "ckptfsm rollback 20"),
        20,
    ),
    "F21-cut": Scenario("checkpoint-damaged", "not 4864", (FIX,), 20),
    "F29": Scenario("processes-left", "would resume from step 30", (r"kill \d+",), 30),
}


def test_every_broken_root_has_a_scenario():
    assert set(SCENARIOS) == set(broken_roots.BROKEN)


@pytest.mark.damages_journal("damages roots as the faults say")
@pytest.mark.parametrize("fault", SCENARIOS)
def test_F17_F18_F19_F20_F21_F29_a_reader_gets_back_to_training(fault: str, tmp_path: Path):
    """Catches: a way out that is no command, or that does not lead out; a line that is too wide."""
    scenario, root = SCENARIOS[fault], tmp_path / "gpt"
    script = [sys.executable, broken_roots.__file__, fault, str(root)]
    subprocess.run(script, check=True, timeout=PATIENCE_S)
    with at_terminal(root) as person:
        screens = [person.type("ckptfsm doctor")]
        explained = person.type("ckptfsm explain --resume")
        assert scenario.would in explained.text
        for command in scenario.way_out:
            printed = printed_command(screens[-1])
            assert re.fullmatch(command, printed), screens[-1].text
            screens.append(person.type(printed))
            if not screens[-1].lines:  # not a command of the library
                screens.append(person.type("ckptfsm doctor"))
        pages = [page for each in screens for page in re.findall(r"see: (.+)", each.text)]
        assert pages[0] == f"ckptfsm runbook {scenario.code}"
        told = person.type(pages[0]).text
        for command in scenario.way_out:
            assert " ".join(command.split()[:2]).removesuffix(r" \d+") in told
        screens += [explained, person.type("ckptfsm doctor"), person.type("ckptfsm ls")]
        assert not re.search("^(broken|repaired by a start)", screens[-2].text, re.M)
        end = person.type("ckptfsm explain --resume")
        assert end.lines[0] == f"A start would resume from step {scenario.step}."
        for each in (*screens, end):
            assert ESCAPE not in each.raw
            assert too_wide(each.raw) == []
            assert each.lines == [line.rstrip() for line in each.raw.split("\r\n")][:-1]
    assert broken_roots.resumed(root) == (scenario.step, broken_roots.weights(scenario.step))


def printed_command(screen: Screen) -> str:
    """The first command that a screen tells the reader to type."""
    found = COMMAND.search(screen.text)
    assert found is not None, screen.text
    return found[0]


def test_the_doctor_asks_and_a_no_changes_nothing(tmp_path: Path):
    """Catches: a question that is not asked at a terminal, findings that are told twice."""
    root = tmp_path / "gpt"
    broken_roots.BROKEN["F18"](root)
    with at_terminal(root) as person:
        person.answer = "n"
        screen = person.type(FIX)
    assert screen.asked and screen.text.count("the tracker is empty") == 1
    assert (root / "latest_checkpointed_iteration.txt").read_text() == ""


@pytest.mark.parametrize("command", ["ckptfsm ls --watch 0.1", "ckptfsm log --follow"])
def test_ctrl_c_ends_a_command_that_goes_on_and_leaves_a_clean_terminal(command, tmp_path: Path):
    """Catches: a traceback after Ctrl-C, a cursor that stays hidden, a terminal without echo."""
    root = real_root(tmp_path / "gpt", 10)
    with at_terminal(root, "xterm") as person:
        before = termios.tcgetattr(person.shell.child_fd)
        begun = person.begin(command, "latest|closed the root in order")
        ended = person.interrupt()
        assert ended.status == 128 + signal.SIGINT
        assert "Traceback" not in ended.text and "Abort" not in ended.text
        assert (begun + ended.raw).count("\x1b[?25l") == (begun + ended.raw).count("\x1b[?25h")
        assert termios.tcgetattr(person.shell.child_fd) == before
        assert person.type("ckptfsm explain --resume").status == 0


def test_a_pipe_that_is_closed_early_ends_a_command_without_a_traceback(tmp_path: Path):
    root = real_root(tmp_path / "gpt", 10)
    with at_terminal(root) as person:
        first = person.type("ckptfsm log | head -1")
        assert first.raw.count("\r\n") == 1 and "epoch 1 begins" in first.text
        person.type("exec 3> >(:); wait $!")  # nothing reads from it any more
        for command in ("log", "ls", "doctor", "tree", "explain --resume"):
            assert person.type(f"ckptfsm {command} >&3").lines == []


def test_F30_names_with_escape_sequences_move_no_cursor(tmp_path: Path):
    """Catches: a name on disk that clears the screen of a reader, or colours it."""
    root = real_root(tmp_path / "gpt", 10, 20)
    (root / NAME).write_text("x")
    (root / ".ckptfsm/staging" / NAME).mkdir()
    (root / ".ckptfsm/quarantine" / NAME).mkdir()
    with at_terminal(root, "xterm") as person:
        for command in ("tree", "doctor", "quarantine ls", f"quarantine drop {NAME!r}"):
            screen = person.type(f"ckptfsm {command}")
            assert ESCAPE not in screen.raw and "\x07" not in screen.raw
            assert "[31mred" in screen.text


def test_the_list_that_is_watched_fits_a_terminal_that_was_made_smaller(tmp_path: Path):
    root = real_root(tmp_path / "gpt", *range(10, 310, 10))
    with at_terminal(root, "xterm") as person:
        person.shell.setwinsize(50, 120)
        assert "older ones" not in person.begin("ckptfsm ls --watch 0.1", "latest")
        person.shell.setwinsize(ROWS, COLUMNS)
        person.shell.expect(r"and \d+ older ones\r\n")
        person.shell.expect_exact("\x1b[2J")  # the next list begins
        person.shell.expect(r"and (\d+) older ones\r\n")
        screen = shown("\x1b[H" + person.shell.before + person.shell.after, ROWS)
        person.interrupt()
    assert screen[0].startswith(str(root)) and "STEP" in "".join(screen[:4])
    assert len(screen) == ROWS - 1 and "older ones" in screen[-1]
    assert [line.split()[0] for line in screen[-3:-1]] == ["290", "300"]


def test_the_shell_completes_commands(tmp_path: Path):
    """Catches: a script of completion that the shell cannot read, or that asks another program."""
    root = real_root(tmp_path / "gpt", 10)
    with at_terminal(root, "dumb", editing=True) as person:
        person.shell.sendline('eval "$(ckptfsm --show-completion)"; echo read $?')
        person.shell.expect_exact("read 0")
        person.shell.send("ckptfsm doc\t")
        person.shell.expect_exact("ckptfsm doctor")
        person.shell.sendline("")
        person.shell.expect_exact("nothing is wrong")
