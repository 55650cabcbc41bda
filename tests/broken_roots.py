"""Broken roots, for readers who repair them: a job saved each of them, and a fault damaged it since.

    python tests/broken_roots.py F17 DIR     make DIR, which must not exist, and damage it
    python tests/broken_roots.py             list the faults

The faults have the numbers of specs/faults.md. The job needs no torch: its state is a single file.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parent), str(HERE)]

from fakes import fake_ports  # noqa: E402

from ckptfsm.core.config import make_config  # noqa: E402
from ckptfsm.core.layout import PRIVATE, TRACKER, TRASH  # noqa: E402
from ckptfsm.core.retention import LatestN  # noqa: E402
from ckptfsm.disk.setting_aside import Mover  # noqa: E402
from ckptfsm.ranks.manager import Manager  # noqa: E402

STEPS = (10, 20, 30)
LATE_S = 600  # seconds after which a process that was left behind ends by itself
_SEGMENT = f"{PRIVATE}/journal/000001.ndjson"
_LATE = "import sys, time; file = open(sys.argv[1], 'ab'); print(flush=True); time.sleep({})"


def weights(step: int) -> bytes:
    return b"weights of step %d\n" % step * 256


def _manager(root: Path, **settings: object) -> Manager:
    return Manager(fake_ports(root), make_config({"close_timeout_s": 60.0, **settings}))


def saved(root: Path) -> None:
    """A root whose job has ended in order."""
    with _manager(root) as manager:
        for step in STEPS:
            manager.save(step, parts={"weights": weights(step)}).wait()


def resumed(root: Path) -> tuple[int, bytes] | None:
    """Start the job: the step that it resumes from, and the state of that step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the start repairs
        with _manager(root) as manager:
            restored = manager.restore(parts={"weights": b""})
            return None if restored is None else (restored.step, restored.parts["weights"])


# ------------------------------------------------------------------- jobs that are killed


def _train_until_killed(root: Path) -> None:
    saved(root)
    _manager(root)
    os.kill(os.getpid(), signal.SIGKILL)


def _train_until_killed_in_a_prune(root: Path) -> None:
    """Die between the move of a checkpoint to the trash and its record in the journal."""
    saved(root)
    prune = Mover.prune

    def killed(*given: object, **more: object) -> None:
        prune(*given, **more)  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGKILL)

    with patch.object(Mover, "prune", killed):
        manager = _manager(root, retention=LatestN(2))
        manager.save(40, parts={"weights": weights(40)}).wait()


_KILLED: Mapping[str, Callable[[Path], None]] = MappingProxyType(
    {"killed": _train_until_killed, "killed-in-a-prune": _train_until_killed_in_a_prune}
)


def _killed(how: str, root: Path) -> None:
    """Run such a job in a process, and see it killed."""
    done = subprocess.run([sys.executable, __file__, how, str(root)], check=False)
    assert done.returncode == -signal.SIGKILL, done


# ----------------------------------------------------------------------------- the faults


def _prune_interrupted(root: Path) -> None:
    """Half of the files of step 10 are deleted, too."""
    _killed("killed-in-a-prune", root)
    (gone,) = (root / TRASH).iterdir()
    (gone / "weights").unlink()


def _tracker(text: str) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        saved(root)
        (root / TRACKER).write_text(text)

    return damage


def _directory_gone(root: Path) -> None:
    saved(root)
    shutil.rmtree(root / "iter_0000030")


def _files_gone(root: Path) -> None:
    saved(root)
    (root / "iter_0000030/weights").unlink()


def _quarantine_alone_is_whole(root: Path) -> None:
    """The job went back to step 20, and every step up to that lost its files since."""
    saved(root)
    with _manager(root) as manager:
        manager.rollback(20)
    for step in (10, 20):
        (root / f"iter_00000{step}/weights").unlink()


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def _journal_damaged(root: Path) -> None:
    saved(root)
    _flip(root / _SEGMENT, 300)


def _journal_torn(root: Path) -> None:
    """The end of a line, as a power loss leaves it."""
    _killed("killed", root)
    newest = root / PRIVATE / "journal/000002.ndjson"
    with newest.open("ab") as file:
        file.write(b'{"type":"transition","step":4')


def _bit_flipped(root: Path) -> None:
    saved(root)
    _flip(root / "iter_0000030/weights", 1000)


def _shard_cut(root: Path) -> None:
    saved(root)
    shard = root / "iter_0000030/weights"
    shard.write_bytes(shard.read_bytes()[:-1])


def _process_left(root: Path) -> None:
    """The job was killed, and a process still has a file of its last step open for writing."""
    _killed("killed", root)
    command = [sys.executable, "-c", _LATE.format(LATE_S), str(root / "iter_0000030/weights")]
    late = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert late.stdout is not None and late.stdout.readline() == b"\n"
    late.stdout.close()
    late.returncode = 0  # left behind on purpose: nobody waits for it


BROKEN: Mapping[str, Callable[[Path], None]] = MappingProxyType(
    {
        "F17": _prune_interrupted,
        "F18": _tracker(""),
        "F18-release": _tracker("release"),
        "F19": _directory_gone,
        "F19-files": _files_gone,
        "F19-all": _quarantine_alone_is_whole,
        "F20": _journal_damaged,
        "F20-torn": _journal_torn,
        "F21": _bit_flipped,
        "F21-cut": _shard_cut,
        "F29": _process_left,
    }
)


def main(arguments: list[str]) -> int:
    """Make a broken root. Returns the exit status."""
    if len(arguments) != 2 or arguments[0] not in {*BROKEN, *_KILLED}:
        print(__doc__, *BROKEN, sep="\n")
        return 2
    fault, root = arguments[0], Path(arguments[1]).resolve()
    if root.exists():
        print(f"{root} exists")
        return 2
    (BROKEN.get(fault) or _KILLED[fault])(root)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
