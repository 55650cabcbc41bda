"""The demo: train, be killed in the middle of a save, recover, finish, and check every promise.

This process starts torchrun jobs and inspects the results; it trains nothing itself.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ckptfsm.adapters.identity import this_process
from ckptfsm.adapters.posix_storage import opened_storage
from ckptfsm.core.errors import ConfigError
from ckptfsm.core.layout import MEGATRON
from ckptfsm.core.retention import CheckpointInfo, EveryNSteps, LatestN
from ckptfsm.disk.inspection import read_tracker
from ckptfsm.disk.journal import entered_at
from ckptfsm.disk.overview import look
from ckptfsm.disk.ownership import open_root
from ckptfsm.testing.conformance import JournalViolation, assert_journal_conforms
from ckptfsm.views.listing import lines_of, rows_of
from ckptfsm.views.picture import render_html
from ckptfsm.views.reading import read_lives

_PAUSE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of the command line. Steps are optimizer steps; ``keep`` is LatestN's n.

    ``trainer`` is "megatron" or "fsdp2". The tensor-parallel size ``tp`` is 1 with "fsdp2".
    """

    trainer: str = "megatron"
    steps: int = 40
    ranks: int = 2
    tp: int = 2
    save_every: int = 5
    keep: int = 2
    root: Path | None = None

    def __post_init__(self) -> None:
        if min(self.steps, self.ranks, self.tp, self.save_every, self.keep) < 1:
            raise ConfigError("--steps, --ranks, --tp, --save-every and --keep must be at least 1")
        if self.trainer != "megatron" and self.tp > 1:
            raise ConfigError(f"--tp {self.tp} is for --trainer megatron, not {self.trainer}")
        if self.ranks % self.tp:
            raise ConfigError(f"--ranks {self.ranks} is not a multiple of --tp {self.tp}")
        if self.steps < 2 * self.save_every:
            raise ConfigError("--steps must leave room for two saves (2 x --save-every)")

    @property
    def keep_every(self) -> int:
        """The k of EveryNSteps(k): every third save."""
        return 3 * self.save_every

    @property
    def kill_step(self) -> int:
        """The step of the save that a rank is killed in: about half way, never the first one."""
        saves = self.steps // self.save_every
        return max(2, saves // 2) * self.save_every

    @property
    def kill_rank(self) -> int:
        """A rank that writes shards for sure: the last one of Megatron's first replica, or of all."""
        return (self.tp if self.trainer == "megatron" else self.ranks) - 1


class DemoFailed(AssertionError):
    """A promise did not hold."""


def run_demo(options: DemoOptions) -> int:
    """Run all of it. Returns the exit status; raises ``DemoFailed`` if a promise did not hold."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ckptfsm-demo-") as scratch_name:
        scratch = Path(scratch_name)
        root = _fresh_root(options)
        print(f"checkpoints in {root}")
        try:
            _train_and_crash(options, root, scratch)
        except KeyboardInterrupt:
            return _stopped(root)
        _check_losses(options, scratch)
    _check_stock_load(options, root)
    _check_directories(options, root)
    _check_journal(root)
    _report(root)
    print(f"done in {time.monotonic() - began:.0f} s")
    return 0


def _fresh_root(options: DemoOptions) -> Path:
    if options.root is None:
        root = Path("runs/demo").absolute()
        if root.is_dir():
            _remove(root)
        return root
    root = options.root.absolute()
    if root.is_dir() and any(root.iterdir()):
        raise ConfigError(f"{root} is not empty: the demo wants a root of its own", root=str(root))
    return root


def _remove(root: Path) -> None:
    """Remove an earlier demo's root. Raises ``RootBusy`` if a job lives on it."""
    with opened_storage(root) as storage:
        ownership = open_root(storage, this_process())
        try:
            shutil.rmtree(root)
        finally:
            ownership.release_lock_only()


def _train_and_crash(options: DemoOptions, root: Path, scratch: Path) -> None:
    print("\n1. an uninterrupted run, for comparison")
    _must_succeed(_start(options, ["--losses", str(scratch / "reference.json")]))
    common = [
        *("--root", str(root), "--save-every", str(options.save_every)),
        *("--keep", str(options.keep), "--keep-every", str(options.keep_every)),
    ]
    print(
        f"\n2. with async saves every {options.save_every} steps; one rank is SIGKILLed while the "
        f"writer of step {options.kill_step} is in the middle of its shards"
    )
    _run_and_kill(options, common, scratch)
    print("\n3. the same command again")
    _must_succeed(_start(options, [*common, "--losses", str(scratch / "second.json")]))


def _start(
    options: DemoOptions, arguments: Sequence[str], errors: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    command = ["--trainer", options.trainer, "--steps", str(options.steps)]
    command += ["--tp", str(options.tp), *arguments]
    return _torchrun(options.ranks, "ckptfsm.demo.trainer", command, errors)


def _torchrun(
    ranks: int, module: str, arguments: Sequence[str], errors: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = ["--nproc-per-node", str(ranks), "--master-addr", "127.0.0.1", "--master-port", port]
    command = [*launcher, *place, "-m", module, *arguments]
    return subprocess.Popen(command, env=environment, stderr=errors)


def _must_succeed(job: subprocess.Popen[bytes]) -> None:
    status = _wait(job)
    if status != 0:
        raise DemoFailed(f"the job ended with status {status}")


def _wait(job: subprocess.Popen[bytes]) -> int:
    """Wait for a job. Ctrl-C reaches the job too, which drains its saves and leaves by itself."""
    try:
        return job.wait()
    except KeyboardInterrupt:
        print("\nstopping: the job saves where it is and drains", flush=True)
        job.wait()
        raise


def _run_and_kill(options: DemoOptions, common: Sequence[str], scratch: Path) -> None:
    fifos, pids = scratch / "fifos", scratch / "pids"
    fifos.mkdir()
    pids.mkdir()
    os.mkfifo(fifos / "reached")
    os.mkfifo(fifos / "go")
    arguments = [
        *common,
        *("--losses", str(scratch / "first.json"), "--pids", str(pids)),
        *("--pause-step", str(options.kill_step), "--pause-rank", str(options.kill_rank)),
        *("--fifos", str(fifos)),
    ]
    errors = scratch / "stderr.txt"  # torchrun prints long tracebacks about the death we cause
    with errors.open("wb") as sink:
        job = _start(options, arguments, sink)
    try:
        _await_pause(fifos / "reached", job)
    except DemoFailed:
        print(errors.read_text(errors="replace"), file=sys.stderr)
        raise
    except KeyboardInterrupt:
        job.wait()
        raise
    rank = options.kill_rank
    victim = int((pids / str(rank)).read_text())
    os.kill(victim, signal.SIGKILL)
    status = _wait(job)
    print(f"\n  rank {rank} (pid {victim}) was SIGKILLed; the job ended ({status})")
    if status == 0:
        raise DemoFailed("the job should have died")


def _await_pause(reached: Path, job: subprocess.Popen[bytes]) -> None:
    """Wait until the writer reports that it is in the middle of a shard."""
    pipe = os.open(reached, os.O_RDONLY | os.O_NONBLOCK)
    deadline = time.monotonic() + _PAUSE_TIMEOUT_S
    try:
        while True:
            try:
                if os.read(pipe, 1):
                    return
            except BlockingIOError:
                pass  # a writer has opened it and not written yet
            if job.poll() is not None:
                raise DemoFailed(f"the job ended with {job.returncode} before it was killed")
            if time.monotonic() > deadline:
                job.kill()
                raise DemoFailed("the writer did not get to the middle of its shards")
            time.sleep(0.01)
    finally:
        os.close(pipe)


def _check_losses(options: DemoOptions, scratch: Path) -> None:
    print("\n4. checks")
    reference = json.loads((scratch / "reference.json").read_text())
    for name in ("first.json", "second.json"):
        losses = json.loads((scratch / name).read_text())
        wrong = [step for step, loss in losses.items() if reference[step] != loss]
        if wrong or not losses:
            raise DemoFailed(f"{name}: losses differ from the uninterrupted run at steps {wrong}")
        steps = f"{min(map(int, losses))} to {max(map(int, losses))}"
        print(f"  losses of steps {steps}: equal to the uninterrupted run's, bit for bit")


def _check_stock_load(options: DemoOptions, root: Path) -> None:
    with opened_storage(root) as storage:
        step = read_tracker(storage).step
    if step is None:
        raise DemoFailed("the tracker names no step")
    directory = str(root / f"iter_{step:07d}")
    arguments = [directory, options.trainer, str(options.tp)]
    _must_succeed(_torchrun(options.ranks, "ckptfsm.demo.verify", arguments))


def _check_directories(options: DemoOptions, root: Path) -> None:
    """Raise unless exactly the steps that retention promises are on disk."""
    steps = range(options.save_every, options.steps + 1, options.save_every)
    saved = [CheckpointInfo(step, 0.0) for step in steps]
    policy = LatestN(options.keep) | EveryNSteps(options.keep_every)
    expected = sorted(policy.preserve(saved))
    found = sorted(s for p in root.iterdir() if (s := MEGATRON.parse_published(p.name)) is not None)
    if found != expected:
        raise DemoFailed(f"on disk are steps {found}, retention promises {expected}")
    print(f"  on disk are exactly the steps that retention promises: {found}")


def _check_journal(root: Path) -> None:
    """Raise unless the specification allows every move of both runs (I11)."""
    try:
        judged = assert_journal_conforms(root)
    except JournalViolation as error:
        raise DemoFailed(f"the journal is no legal trace: {error}") from error
    print(
        f"  the journal is a legal trace of the specification: {judged.transitions} transitions in "
        f"{judged.segments} segments"
    )


def _report(root: Path) -> None:
    with opened_storage(root) as storage:
        overview, lives = look(storage), read_lives(storage)
        rows = rows_of(overview, entered_at(storage, overview.history), time.time())
    print("\n5. the checkpoints, as ckptfsm ls shows them\n")
    print("\n".join(lines_of(rows, shutil.get_terminal_size().columns)))
    picture = root / "lives.html"
    picture.write_text(render_html(lives, str(root)), encoding="utf-8")
    print(f"\nthe life of every checkpoint as a picture: file://{picture}")


def _stopped(root: Path) -> int:
    """Print the tracked step after Ctrl-C. Returns the exit status."""
    if (root / ".ckptfsm").is_dir():
        with opened_storage(root) as storage:
            print(f"\nstopped; the tracker names step {read_tracker(storage).step}")
    return 130
