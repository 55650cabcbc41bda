"""What libraries of checkpoints do when something goes wrong: each runs the same small trainer.

``python -m benchmarks.guarantees`` runs the trainers of ``benchmarks/compared`` that can be imported,
kills them during saves, damages their newest checkpoint, and starts them again. It prints a table of
what the second start did. An outcome is judged by the steps and losses that the trainer prints: after a
restart they must be those of a run that never stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

COMPARED = Path(__file__).parent / "compared"
NEEDS = {
    "ckptfsm": "ckptfsm",
    "dcp": "torch.distributed.checkpoint",
    "torchtitan": "torchtitan.components.checkpoint",
    "lightning": "lightning",
    "orbax": "orbax.checkpoint",
}
STEPS, MORE = 10, 18  # of the first run, and of the second: saves at 5, 10, 15
ROUNDS = 20
KILL_WITHIN_S = 0.4  # of the step after which a save begins
TIMEOUT_S = 180
REPEATS = 1e-6  # relative: another number of threads adds in another order

Losses = dict[int, float]
_STEP = re.compile(r"^(?:iter_|step-|epoch=\d+-step=)?0*(\d+)(?:\.ckpt)?$")


class Trainer:
    """The trainer with a library's checkpoints below ``root``, started again and again."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self.root = name, root
        root.mkdir(parents=True, exist_ok=True)

    def run(self, last: int, limit_bytes: int = 0) -> tuple[int, Losses, str]:
        """Exit status, losses by step, and the end of what went to stderr."""
        process = self.start(last, limit_bytes)
        try:
            out, err = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return -1, {}, "hung"
        return process.returncode, losses_of(out), err.strip().rpartition("\n")[2]

    def start(self, last: int, limit_bytes: int = 0) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            str(COMPARED / f"with_{self.name}.py"),
            str(self.root),
            str(last),
        ]
        if limit_bytes:  # no file may grow beyond, as on a disk that is full
            command = ["prlimit", f"--fsize={limit_bytes}", *command]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"},
        )

    def kill_in_a_save(self, step: int, after_s: float) -> Losses:
        """Kill all of it, so long after it has printed ``step``."""
        process = self.start(MORE)
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if step in losses_of(line):
                break
        try:
            process.wait(after_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        rest, _ = process.communicate()
        return losses_of("".join(lines) + rest)


def losses_of(text: str) -> Losses:
    found = {}
    for line in text.splitlines():
        if line.startswith("["):
            step, loss = json.loads(line)
            found[step] = loss
    return found


def judged(ran: tuple[int, Losses, str], whole: Losses, least: int) -> str:
    """What a start did. ``least``: the newest step that was saved whole before, for certain."""
    code, losses, _ = ran
    if code:
        return "refuses to start"
    if not losses:
        return "from the newest"
    resumed = min(losses) - 1
    if not all(abs(loss - whole[step]) <= REPEATS * abs(loss) for step, loss in losses.items()):
        return "other values, without a word"
    if resumed == 0 and least:
        return "from zero"
    return "from the newest" if resumed >= least else "from an older one"


def newest_files(root: Path) -> list[Path]:
    """The files of the checkpoint with the highest step in its name, the largest first."""
    named = [
        (int(found[1]), path) for path in root.rglob("*") if (found := _STEP.search(path.name))
    ]
    step = max(step for step, _ in named)
    place = min((path for each, path in named if each == step), key=lambda path: len(path.parts))
    inside = [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()]
    return sorted(inside, key=lambda path: -path.stat().st_size)


def cut(root: Path) -> None:
    file = newest_files(root)[0]
    os.truncate(file, file.stat().st_size // 2)


def emptied(root: Path) -> None:
    """As after a power loss without fsync: the names are there, and the files are empty."""
    for file in newest_files(root):
        os.truncate(file, 0)


def overwritten(root: Path) -> None:
    file = newest_files(root)[0]
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(b"\x41" * 4096)


DAMAGES: Mapping[str, Callable[[Path], None]] = {
    "half a file": cut,
    "empty files": emptied,
    "4 KiB of other bytes": overwritten,
}


def kills(name: str, work: Path, whole: Losses, rounds: int) -> str:
    """Kill at a random moment after a save began, and start again, always on the same directory."""
    drawn, found = random.Random(7), Counter[str]()
    for number in range(rounds):
        root = work / f"kills-{number}"
        trainer = Trainer(name, root)
        trainer.run(STEPS)
        trainer.kill_in_a_save(15, drawn.uniform(0, KILL_WITHIN_S))
        found[judged(trainer.run(MORE), whole, STEPS)] += 1
        shutil.rmtree(root)
    return ", ".join(f"{count} {what}" for what, count in found.most_common())


def damaged(name: str, work: Path, whole: Losses, damage: str) -> str:
    root = work / damage.replace(" ", "-")
    trainer = Trainer(name, root)
    trainer.run(STEPS)
    DAMAGES[damage](root)
    return judged(trainer.run(MORE), whole, STEPS)


def together(name: str, work: Path, whole: Losses) -> str:
    """A second job on the directory of one that is alive, and stands still."""
    trainer = Trainer(name, work / "together")
    first = trainer.start(MORE)
    assert first.stdout is not None
    first.stdout.readline()
    os.killpg(first.pid, signal.SIGSTOP)
    second, _, _ = trainer.run(MORE)
    os.killpg(first.pid, signal.SIGCONT)
    first.communicate(timeout=TIMEOUT_S)
    return "refused" if second else "both write"


def full(name: str, work: Path, whole: Losses) -> str:
    """Saves that fail, as on a full disk, and a start with room again."""
    trainer = Trainer(name, work / "full")
    trainer.run(5)
    code, _, _ = trainer.run(MORE, limit_bytes=1 << 20)
    after = judged(trainer.run(MORE), whole, 5)
    return f"{'ends' if code else 'goes on'}; then {after}"


def row_of(name: str, work: Path, rounds: int) -> dict[str, str]:
    whole_run = Trainer(name, work / "whole").run(MORE)
    whole = whole_run[1]
    if set(whole) != set(range(1, MORE + 1)):
        raise RuntimeError(f"{name} does not train here: {whole_run[2]}")
    row = {"lines": str(lines_of(f"with_{name}") - lines_of("without"))}
    row["killed in a save"] = kills(name, work, whole, rounds)
    for damage in DAMAGES:
        row[damage] = damaged(name, work, whole, damage)
    row["two jobs"] = together(name, work, whole)
    row["disk full"] = full(name, work, whole)
    return row


def lines_of(name: str) -> int:
    """Lines of code, without the words at the top."""
    text = (COMPARED / f"{name}.py").read_text().split('"""', 2)[2]
    return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith("#"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NEEDS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args()
    rows = {}
    for name in asked.names:
        with tempfile.TemporaryDirectory(prefix="ckptfsm-compared-") as work:
            rows[name] = row_of(name, Path(work), asked.rounds)
        print(json.dumps({name: rows[name]}, indent=1), file=sys.stderr, flush=True)
    columns = list(next(iter(rows.values())))
    print("| |", " | ".join(rows), "|")
    print("|---" * (len(rows) + 1) + "|")
    for column in columns:
        print(f"| {column} |", " | ".join(row[column] for row in rows.values()), "|")


if __name__ == "__main__":
    main()
