"""Runs the tests that need other packages, or other versions of them: ``make test-integrations``.

Each version has a virtual environment of its own below ``build/integrations``, which borrows everything
else (torch, pytest) from the environment that runs this. A version that cannot be installed is an error.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / "build" / "integrations"
QUEUE = "tests/megatron/test_megatron_queue.py"
# Whole checkpoints need the library's own saves, which are made of megatron-core 0.16.
ALONE = ("-k", "not begun")
TARGETS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "megatron-core 0.13.1": (("--no-deps", "megatron-core==0.13.1"), (QUEUE, *ALONE)),
    "megatron-core 0.14.0": (("--no-deps", "megatron-core==0.14.0"), (QUEUE, *ALONE)),
    "megatron-core 0.15.0": (("--no-deps", "megatron-core==0.15.0"), (QUEUE, *ALONE)),
    "megatron-core 0.16.1": (("--no-deps", "megatron-core==0.16.1"), (QUEUE,)),
    "nvidia-resiliency-ext": (
        ("nvidia-resiliency-ext>=0.4.1",),
        ("tests/megatron/test_megatron_nvrx.py",),
    ),
    "ray": (("ray>=2.40",), ("tests/integrations/test_ray.py",)),
}


def prepare(name: str, packages: tuple[str, ...]) -> Path:
    """The python of the version's environment."""
    place = PLACE / name.replace(" ", "-")
    python = place / "bin" / "python"
    if not (place / ".installed").exists():
        venv.create(place, clear=True, with_pip=False)
        paths = {"base": str(place), "platbase": str(place)}
        site = Path(sysconfig.get_path("purelib", vars=paths))
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        subprocess.run([*pip, "--disable-pip-version-check", *packages], check=True)
        (place / ".installed").touch()
    return python


def run(name: str) -> bool:
    packages, tests = TARGETS[name]
    python = prepare(name, packages)
    print(f"=== {name}", flush=True)
    # The environment must exist for its test: with this it is not skipped.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CKPTFSM_NVRX": "1"}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:warnings", "-p", "no:cacheprovider"]
    return subprocess.run([*command, *tests], cwd=ROOT, env=environment).returncode == 0


def main(words: list[str]) -> int:
    """Run the targets whose names contain a word; all of them without words."""
    chosen = [name for name in TARGETS if not words or any(word in name for word in words)]
    failed = [name for name in chosen if not run(name)]
    print(f"{len(chosen)} targets, failed: {', '.join(failed) or 'none'}")
    return 1 if failed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
