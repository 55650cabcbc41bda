"""Runs the tests that need other packages, or other versions of them: ``make test-integrations``.

Each version has a virtual environment of its own below ``build/integrations``, which borrows everything
else (torch, pytest) from the environment that runs this. A version that cannot be installed is an error.
Megatron-LM's trainer is in no package: ``CKPTFSM_MEGATRON_LM`` names a clone, or its target is left out.
The newest of each is installed by the extra that users install. megatron-core before 0.16 needs NumPy 1.
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
TRAINING = "tests/megatron/test_megatron_training.py"
VERL = ("tests/integrations/test_verl.py", "tests/integrations/test_verl_ray.py")
MEGATRON_LM = "megatron-lm"
CLONE = os.environ.get("CKPTFSM_MEGATRON_LM", "")
# verl itself is installed without what it names, much of which is not imported here. This is what is,
# the same for both older releases.
VERL_NEEDS = (
    "ray>=2.40",
    "omegaconf",
    "hydra-core",
    "tensordict",
    "transformers<5",
    "accelerate",
    "codetiming",
    "datasets",
    "pandas",
    "torchdata",
    "peft",
    "pillow",
    "orjson",
    "cachetools",
    "msgspec",
    "pyzmq",
    "fastapi",
    "uvicorn",
    "dill",
    "aiohttp",
)
# What it imports and does not name: whoever serves a model has these.
VERL_UNNAMED = ("cachetools", "fastapi", "uvicorn")
PACKAGES: dict[str, tuple[tuple[str, ...], ...]] = {
    "megatron-core 0.13.1": (("--no-deps", "megatron-core==0.13.1", "numpy<2"),),
    "megatron-core 0.14.0": (("--no-deps", "megatron-core==0.14.0", "numpy<2"),),
    "megatron-core 0.15.0": (("--no-deps", "megatron-core==0.15.0", "numpy<2"),),
    "megatron-core 0.16.1": (("--no-deps", "megatron-core==0.16.1"),),
    "nvidia-resiliency-ext": ((f"{ROOT}[nvrx]", "nvidia-resiliency-ext==0.4.1"),),
    # What importing megatron.training needs. Of triton, the import is all: no CUDA comes with it.
    MEGATRON_LM: (("--no-deps", "regex", "pyyaml", "triton==3.4.0"),),
    "ray": ((f"{ROOT}[ray]", "ray==2.60.0"),),
    "verl 0.7.1": (VERL_NEEDS, ("--no-deps", "verl==0.7.1", "TransferQueue")),
    "verl 0.9.0": (VERL_NEEDS, ("--no-deps", "verl==0.9.0", "TransferQueue")),
    "verl 0.9.1": ((f"{ROOT}[verl]", "verl==0.9.1", *VERL_UNNAMED),),
}
TESTS: dict[str, tuple[str, ...]] = {
    "megatron-core 0.13.1": (QUEUE, TRAINING),
    "megatron-core 0.14.0": (QUEUE, TRAINING),
    "megatron-core 0.15.0": (QUEUE, TRAINING),
    "megatron-core 0.16.1": (QUEUE, TRAINING),
    "nvidia-resiliency-ext": ("tests/megatron/test_megatron_nvrx.py",),
    MEGATRON_LM: ("tests/integrations/test_megatron_lm.py",),
    "ray": ("tests/integrations/test_ray.py",),
    "verl 0.7.1": VERL,
    "verl 0.9.0": VERL,
    "verl 0.9.1": (*VERL, "tests/integrations/test_verl_mirror.py"),
}


def prepare(name: str) -> Path:
    """The python of the version's environment."""
    place = PLACE / name.replace(" ", "-")
    python = place / "bin" / "python"
    if not (place / ".installed").exists():
        venv.create(place, clear=True, with_pip=False)
        paths = {"base": str(place), "platbase": str(place)}
        site = Path(sysconfig.get_path("purelib", vars=paths))
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        for packages in PACKAGES[name]:
            subprocess.run([*pip, "--disable-pip-version-check", *packages], check=True)
        (place / ".installed").touch()
    return python


def run(name: str) -> bool:
    python = prepare(name)
    print(f"=== {name}", flush=True)
    # The environment must exist for its test: with this it is not skipped.
    places = [ROOT, ROOT / "tests/integrations"]
    extra = {}
    if name == MEGATRON_LM:
        clone = Path(CLONE).resolve()
        places = [clone, *places, ROOT / "tests/megatron"]
        # It would compile small functions when it first calls them: minutes on a CPU.
        extra = {"CKPTFSM_MEGATRON_LM": str(clone), "TORCHDYNAMO_DISABLE": "1"}
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "CKPTFSM_NVRX": "1",
        **extra,
    }
    command = [str(python), "-m", "pytest", "-q", "-p", "no:warnings", "-p", "no:cacheprovider"]
    return subprocess.run([*command, *TESTS[name]], cwd=ROOT, env=environment).returncode == 0


def main(words: list[str]) -> int:
    """Run the targets whose names contain a word; all of them without words."""
    chosen = [name for name in PACKAGES if not words or any(word in name for word in words)]
    if MEGATRON_LM in chosen and not CLONE:
        print(f"=== {MEGATRON_LM} is left out: CKPTFSM_MEGATRON_LM names no clone of it")
        chosen.remove(MEGATRON_LM)
    failed = [name for name in chosen if not run(name)]
    print(f"{len(chosen)} targets, failed: {', '.join(failed) or 'none'}")
    return 1 if failed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
