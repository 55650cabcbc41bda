"""A rank of the demo's training job, started by torchrun. Also an example of a user's loop.

Run as a module: the scripts of a job that forks need a ``__main__`` guard.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")

import torch  # noqa: E402  torch and megatron-core warn while they are imported
import torch.distributed as dist  # noqa: E402

from ckptfsm import CheckpointManager, EveryNSteps, LatestN, SaveHandle  # noqa: E402
from ckptfsm.adapters.posix_storage import PosixStorage  # noqa: E402
from ckptfsm.core.ports import Storage  # noqa: E402
from ckptfsm.core.progress import progress_text  # noqa: E402
from ckptfsm.core.requests import RecoveryReport  # noqa: E402
from ckptfsm.demo.trainers import AnyTrainer, check_imports, make_trainer  # noqa: E402
from ckptfsm.testing.faults import FaultStorage, pause_at  # noqa: E402

BAR = 20
COLUMNS = 79


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--trainer", required=True)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--losses", type=Path, required=True)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--keep", type=int, default=2)
    parser.add_argument("--keep-every", type=int, default=20)
    parser.add_argument("--pause-step", type=int, default=0)
    parser.add_argument("--pause-rank", type=int, default=0)
    parser.add_argument("--fifos", type=Path)
    parser.add_argument("--pids", type=Path)
    return parser.parse_args(argv)


def train_uninterrupted(trainer: AnyTrainer, options: argparse.Namespace) -> None:
    """Train the same steps without any checkpoint, as the reference."""
    losses = {}
    for step in range(1, options.steps + 1):
        losses[step] = trainer.train_step().hex()
        show(step, options.steps, float.fromhex(losses[step]), "no checkpoints")
    record(options.losses, losses)


def train_with_checkpoints(trainer: AnyTrainer, options: argparse.Namespace) -> bool:
    """Train, saving every few steps. Returns True if a person stopped it before the end."""
    losses: dict[int, str] = {}
    save: SaveHandle | None = None
    show_saves()
    with CheckpointManager(
        options.root,
        retention=LatestN(options.keep) | EveryNSteps(options.keep_every),
        save_interval_steps=options.save_every,
        preemption_signals=("SIGINT", "SIGTERM"),
        exchange_every=1,
        progress="log",
        open_storage=_PausingStorage(options) if options.pause_step else None,
    ) as checkpoints:
        if checkpoints.rank == 0 and checkpoints.recovery is not None:
            print_recovery(checkpoints.recovery)
        restored = checkpoints.restore(trainer.sharded_state_dict())
        if restored is not None:
            trainer.load_state_dict(restored.state)
        start = restored.step if restored is not None else 0
        for step in range(start + 1, options.steps + 1):
            loss = trainer.train_step()
            losses[step] = loss.hex()
            if checkpoints.should_save(step, last=step == options.steps):
                metrics = {"loss": loss}
                save = checkpoints.save(step, trainer.sharded_state_dict(), metrics=metrics)
            checkpoints.poll()
            record(options.losses, losses)
            show(step, options.steps, loss, note_of(checkpoints.latest_step(), save))
            if checkpoints.preempted:
                return True
    return False


def print_recovery(report: RecoveryReport) -> None:
    """Print the decisions of opening the root, and their reasons."""
    where = f"resumes from step {report.latest_step}" if report.latest_step else "begins at zero"
    print(f"\nrecovery (epoch {report.epoch}, {report.seconds * 1000:.0f} ms): {where}")
    for decision in report.decisions:
        print(f"  {decision.subject}: {decision.last} -> {decision.result}: {decision.why}")
    for warning in report.warnings:
        print(f"  warning: {warning}")
    sys.stdout.flush()


def show_saves() -> None:
    """Print the library's log line about each save, over the bar."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(f"\r  %(message)-{COLUMNS - 2}s"))
    handler.addFilter(lambda record: getattr(record, "event", "") == "save_progress")
    library = logging.getLogger("ckptfsm")
    library.setLevel(logging.INFO)
    library.addHandler(handler)


def note_of(tracked: int | None, save: SaveHandle | None) -> str:
    """The save in flight and its progress, else the newest step that is tracked."""
    if save is None or save.done or save.progress is None:
        return f"tracked: {tracked}"
    return f"saving {save.step}: {progress_text(save.progress)}"


def show(step: int, steps: int, loss: float, note: str) -> None:
    """Draw the progress bar, on rank 0."""
    if dist.get_rank() != 0:
        return
    done = BAR * step // steps
    end = "\n" if step == steps else ""
    bar = "#" * done + "." * (BAR - done)
    line = f"  [{bar}] step {step}/{steps}  loss {loss:.4f}  {note}"
    print(f"\r{line:<{COLUMNS}}", end=end, flush=True)


def record(path: Path, losses: dict[int, str]) -> None:
    """Write the losses so far, in exact hexadecimal."""
    if dist.get_rank() == 0:
        path.write_text(json.dumps(losses))


class _PausingStorage:
    """Stops one rank's writer in the middle of a shard, so that the kill hits a known byte."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.root = options.root
        self.step = options.pause_step
        self.fifos = options.fifos
        self.rank = options.pause_rank

    def __call__(self, create: bool) -> Storage:
        storage = PosixStorage(self.root, create=create)
        if dist.get_rank() != self.rank:
            return storage
        reached, go = str(self.fifos / "reached"), str(self.fifos / "go")
        return FaultStorage(storage, before=pause_at(self.is_the_moment, reached, go))

    def is_the_moment(self, index: int, method: str, path: str) -> bool:
        shard = f"/{self.step}.e" in path and path.endswith("_1.distcp")
        return shard and method == "fsync"


def main(argv: list[str]) -> int:
    options = parse(argv)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.device_count() > int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    if options.pids is not None:
        (options.pids / str(dist.get_rank())).write_text(str(os.getpid()))
    trainer = make_trainer(options.trainer, options.tp, device)
    stopped = False
    if options.root is None:
        train_uninterrupted(trainer, options)
    else:
        stopped = train_with_checkpoints(trainer, options)
    check_imports(options.trainer)
    dist.destroy_process_group()
    return 130 if stopped else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
