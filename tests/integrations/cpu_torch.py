"""Lets a CUDA build of torch be imported without CUDA's libraries: 0.6 GB to download instead of 3.

    python tests/integrations/cpu_torch.py SITE_PACKAGES

PyPI's torch for Linux on x86_64 is linked against some 2.5 GB of libraries that only a GPU needs.
For each missing library, one of the same name is compiled beside torch's libraries, with the
symbols that those look for. Each symbol is a function that returns 100, which is CUDA's "no
device", so that ``torch.cuda.is_available()`` is False. Needs gcc, readelf and nm. For tests on a
machine without a GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

_OF_CUDA = re.compile(r"lib(cu|nv|nccl)\w*")
_NO_DEVICE = "long {}(void) {{ return 100; }}\n"
# Symbols without a version do not name their library, but their prefix does.
_PREFIXES = {
    "nccl": "libnccl",
    "cuFile": "libcufile",
    "cusparseLt": "libcusparseLt",
    "curand": "libcurand",
    "nvshmem": "libnvshmem",
}
Wanted = dict[str, dict[str, set[str]]]  # library -> version of its symbols, "" for none -> symbols


def _lines(*command: str) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def missing_in(libraries: Path) -> set[str]:
    """The libraries of CUDA that torch's libraries need and that are not beside them."""
    found: set[str] = set()
    for library in libraries.glob("lib*.so"):
        for line in _lines("readelf", "-d", str(library)):
            needed = re.search(r"\(NEEDED\).*\[(.+)\]", line)
            if needed and _OF_CUDA.match(needed[1]) and not (libraries / needed[1]).exists():
                found.add(needed[1])
    return found - {"libcuda.so.1"}


def wanted_from(library: Path, missing: set[str], wanted: Wanted) -> None:
    """Add to ``wanted`` the symbols that a library looks for in the missing ones."""
    home: dict[str, str] = {}  # version of symbols -> the library that has it
    current = ""
    for line in _lines("readelf", "--version-info", "--wide", str(library)):
        if file := re.search(r"File: (\S+)", line):
            current = file[1]
        elif version := re.search(r"Name: (\S+)", line):
            home.setdefault(version[1], current)
    for line in _lines("nm", "-D", "--undefined-only", "--with-symbol-versions", str(library)):
        name, _, version = line.split()[-1].partition("@")
        if version:
            if home.get(version) in missing:
                wanted[home[version]][version].add(name)
            continue
        owner = next((lib for prefix, lib in _PREFIXES.items() if name.startswith(prefix)), None)
        for each in missing:
            if owner and re.match(rf"{owner}\b", each.replace("_", ".")):
                wanted[each][""].add(name)


def compile_stub(target: Path, symbols: dict[str, set[str]]) -> None:
    names = sorted({name for group in symbols.values() for name in group})
    versions = "".join(
        f"{version} {{ global: {' '.join(f'{name};' for name in sorted(group))} }};\n"
        for version, group in symbols.items()
        if version
    )
    with tempfile.TemporaryDirectory() as place:
        source, script = Path(place, "stub.c"), Path(place, "stub.map")
        source.write_text("".join(_NO_DEVICE.format(name) for name in names) or "int empty;\n")
        script.write_text(versions)
        more = [f"-Wl,--version-script={script}"] if versions else []
        command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{target.name}"]
        subprocess.run([*command, *more, "-o", str(target), str(source)], check=True)


def main(site_packages: str) -> None:
    libraries = Path(site_packages, "torch", "lib")
    missing = missing_in(libraries)
    wanted: Wanted = defaultdict(lambda: defaultdict(set))
    for library in sorted(libraries.glob("lib*.so")):
        wanted_from(library, missing, wanted)
    for name in sorted(missing):
        compile_stub(libraries / name, wanted[name])


if __name__ == "__main__":
    main(sys.argv[1])
