"""Take the pictures of ``docs/screens``: ``ckptfsm ls --watch`` and ``ckptfsm timeline``.

The roots have 10 and 10,000 checkpoints of a made-up job without torch: a save every half hour, with
failures and crashes now and then. A root that was made before is used again. Needs Chromium, the
extra ``ckptfsm[test]``, and some ten minutes of processor time for 10,000 saves.

    python docs/screens.py [--roots DIR] [--out DIR] [--browser NAME]

The roots are made below build/screens, the pictures in docs/screens, unless told otherwise.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from functools import cache
from io import StringIO
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(HERE))

import pexpect  # noqa: E402
from rich._export_format import CONSOLE_SVG_FORMAT  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI  # noqa: E402
from rich.text import Text  # noqa: E402

from ckptfsm.adapters.identity import this_process  # noqa: E402
from ckptfsm.adapters.posix_storage import PosixStorage  # noqa: E402
from ckptfsm.core.retention import EveryNSteps, KeepAll, LatestN, Policy  # noqa: E402
from ckptfsm.testing.harness import FakeJob, SimClock  # noqa: E402

COUNTS = (10, 10_000)
SCHEMES = {"light": ("1", DEFAULT_TERMINAL_THEME), "dark": ("0", MONOKAI)}
INTERVAL_S = 1800.0
PAUSE_S = 4 * 3600.0  # from a crash to the next start
SIZE = (80, 24)  # of the terminal
HEIGHTS = {10: 460, 10_000: 400}  # of the page's upper part, which is 1200 wide
SCALE = 0.75
CLEAR = "\x1b[2J"
PATIENCE_S = 900.0


class WallClock(SimClock):
    """Time that passes only in ``sleep``, and that people can read."""

    def __init__(self, begin: float) -> None:
        self.now = begin

    def wall(self) -> str:
        when = datetime.fromtimestamp(self.now, timezone.utc)
        return when.isoformat(timespec="milliseconds")

    def unix(self) -> float:
        return self.now


class Hasty(PosixStorage):
    """A disk that makes nothing durable: a power loss may take these roots."""

    def fsync(self, handle: int) -> None:
        """Skip it."""

    def fsync_dir(self, path: str) -> None:
        """Skip it."""


def made_root(place: Path, count: int) -> Path:
    """A root with the life of ``count`` checkpoints, which ends about now."""
    root = place / f"root-{count}"
    finished = place / f"root-{count}.made"
    if not finished.exists():
        crashes = (count - 1) // _length(count)
        clock = WallClock(time.time() - count * INTERVAL_S - crashes * PAUSE_S)
        policy: Policy = LatestN(3) | EveryNSteps(500) if count <= 100 else KeepAll()
        for job, steps in _jobs(root, count, clock, policy):
            _train(job, steps, clock)
        finished.touch()
    return root


def _length(count: int) -> int:
    """The saves of a run of the job."""
    return max(6, count // 15)


def _jobs(
    root: Path, count: int, clock: WallClock, policy: Policy
) -> Iterator[tuple[FakeJob, range]]:
    """The runs of the job: all but the last one end with a crash."""
    length = _length(count)
    for first in range(1, count + 1, length):
        steps = range(first, min(first + length, count + 1))
        job = FakeJob(Hasty(root), ranks=1, identity=this_process(), clock=clock, retention=policy)
        job.open()
        yield job, steps
        if steps.stop > count:
            job.close()
        else:
            ownership, job.coordinator._ownership = job.coordinator._ownership, None
            assert ownership is not None
            ownership.release_lock_only()
            clock.sleep(PAUSE_S)
        job.storage.close_root()


def _train(job: FakeJob, steps: range, clock: WallClock) -> None:
    draw = random.Random(steps.start)
    for number in steps:
        began = clock.now
        of = job.request(100 * number)
        clock.sleep(draw.uniform(0.1, 0.4))
        job.fork(of)
        clock.sleep(draw.lognormvariate(3.2, 0.3))
        if draw.random() < (0.2 if len(steps) < 20 else 0.01) and number > steps.start:
            job.fail(of, draw.choice(["writer_died", "writer_hung"]))
        else:
            job.write(of, 0)
        clock.sleep(INTERVAL_S - (clock.now - began))


@cache
def watched(root: Path) -> str:
    """The screen of ``ckptfsm ls --watch`` on a terminal. The job is said to be on a host node03."""
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(HERE)}
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        environment.pop(name, None)
    command = ["-m", "ckptfsm.cli", "ls", "--watch", "2", "-r", str(root)]
    shell = pexpect.spawn(
        sys.executable,
        command,
        env=environment,
        dimensions=SIZE[::-1],
        timeout=PATIENCE_S,
        encoding="utf-8",
    )
    try:
        shell.expect_exact(CLEAR)
        shell.expect_exact(CLEAR)  # the next list begins: the first one is complete
        seen = str(shell.before)
    finally:
        shell.close(force=True)
    head, _, rows = seen.replace("\x1b[H", "").replace("\r\n", "\n").partition("\n\n")
    head = " ".join(head.split()).replace(str(root), "/data/runs/gpt")
    return f"{head.replace(f' on {this_process().host},', ' on node03,')}\n\n{rows}"


def listing(root: Path, scheme: str) -> str:
    """The screen of ``ckptfsm ls --watch`` as an SVG that asks no other host for a font."""
    console = Console(record=True, width=SIZE[0], file=StringIO(), force_terminal=True)
    console.print(Text.from_ansi(watched(root)))
    without_fonts = re.sub(r"(?s)@font-face {{.*?}}\s*|<!--.*?-->", "", CONSOLE_SVG_FORMAT)
    return console.export_svg(
        title="ckptfsm ls --watch 2",
        theme=SCHEMES[scheme][1],
        code_format=without_fonts,
        unique_id=f"ls-{scheme}",
    )


def timeline(root: Path, page: Path) -> None:
    command = [sys.executable, "-m", "ckptfsm.cli", "timeline", "-r", str(root), "-o", str(page)]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(HERE)}, check=True)


def photograph(browser: str, page: Path, picture: Path, scheme: str, height: int) -> None:
    """The upper part of a page, as a browser shows it to a reader who prefers this scheme."""
    command = [browser, "--headless=new", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--blink-settings=preferredColorScheme={SCHEMES[scheme][0]}"]
    command += [f"--force-device-scale-factor={SCALE}", "--disable-lcd-text"]
    command += [f"--user-data-dir={page.parent / 'browser'}", f"--window-size=1200,{height}"]
    command += ["--no-sandbox"] if os.geteuid() == 0 else []
    command += [f"--screenshot={picture}", page.resolve().as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the pictures. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python docs/screens.py")
    parser.add_argument("--roots", type=Path, default=HERE / "build/screens")
    parser.add_argument("--out", type=Path, default=HERE / "docs/screens")
    parser.add_argument("--browser", default="chromium")
    options = parser.parse_args(arguments)
    roots, out = options.roots.resolve(), options.out.resolve()
    for place in (roots, out):
        place.mkdir(parents=True, exist_ok=True)
    for count in COUNTS:
        root = made_root(roots, count)
        lives = roots / f"timeline-{count}.html"
        timeline(root, lives)
        for scheme in SCHEMES:
            picture = out / f"timeline-{count}-{scheme}.png"
            photograph(options.browser, lives, picture, scheme, HEIGHTS[count])
            drawn = out / f"ls-{count}-{scheme}.svg"
            drawn.write_text(listing(root, scheme), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
