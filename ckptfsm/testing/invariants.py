"""The judge of a root on disk. No decision of the library's is used to judge it.

``check_root`` looks at a root as a stock reader and as a sceptic would. Names on disk and the shape of
documents come from the specification, and are repeated here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import xxhash

from ckptfsm.core.layout import join
from ckptfsm.core.ports import Storage

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "/.ckptfsm/manifest.json"
LIMIT = 1 << 24

Attempt = tuple[int, int, int]  # step, epoch, attempt


class RootBroken(AssertionError):
    """A promise is broken on disk. The message begins with its number, ``I4: ...``."""


# ------------------------------------------------------------------------------------- the whole root


def check_root(
    storage: Storage,
    acknowledged: int | None,
    ignore: Collection[int] = (),
    *,
    in_place: bool = False,
) -> int | None:
    """Judge a root as a stock reader and as a sceptic. Returns the step the tracker names.

    ``ignore``: steps that a test has damaged on purpose. ``in_place``: the trainer fixed the path,
    so a directory without a manifest is still being written.

    Raises ``RootBroken`` if an acknowledged step regressed (I2), or any published directory is
    incomplete (I4). Also raised if the tracker names nothing complete once a step was acknowledged
    (I2).
    """
    names = storage.listdir("")
    unfinished: set[str] = set()
    for name in names:
        if name.startswith("iter_") and not is_step_of(name, ignore):
            if in_place and not has_manifest(storage, name):
                unfinished.add(name)
            else:
                check_directory(storage, name)
    tracked: int | None = None
    if TRACKER in names:
        text = storage.read(TRACKER, 100)
        if not text.strip().isdigit():
            raise RootBroken(f"I2: the tracker says {text!r}")
        tracked = int(text)
        there = name_of(tracked) in names and name_of(tracked) not in unfinished
        if not there and tracked not in ignore:
            raise RootBroken(f"I2: the tracker names {tracked}, which is not there")
    if acknowledged is not None and (tracked is None or tracked < acknowledged):
        raise RootBroken(f"I2: step {acknowledged} was acknowledged, the tracker says {tracked}")
    return tracked


def has_manifest(storage: Storage, name: str) -> bool:
    try:
        storage.stat(f"{name}{MANIFEST}")
    except OSError:
        return False
    return True


def check_directory(storage: Storage, name: str) -> Attempt:
    """Check that every listed file exists with its content, and every rank has a shard.

    Returns the attempt that the manifest names. Raises ``RootBroken``.
    """
    try:
        manifest = json.loads(storage.read(f"{name}{MANIFEST}", LIMIT))
    except (OSError, ValueError) as error:
        raise RootBroken(f"I4: {name} is published without a whole manifest: {error}") from error
    listed = {entry["name"]: entry for entry in manifest["files"]}
    foreign = {part["directory"] for part in manifest["parts"] if part["kind"] == "foreign"}
    for shard in _shards_of(manifest):
        if shard not in listed:
            raise RootBroken(f"I3: {name} lists no {shard}")
    for file, entry in listed.items():
        try:
            data = storage.read(f"{name}/{file}", LIMIT)
        except OSError as error:
            raise RootBroken(f"I4: {name}/{file} is not there: {error}") from error
        digest = f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"
        if len(data) != entry["bytes"] or digest != entry["digest"]:
            raise RootBroken(f"I3: {name}/{file} has not the content that was written")
        if file.endswith(".distcp") and file.rpartition("/")[0] not in foreign:
            _check_shard(name, file, data, manifest)
    return (manifest["step"], manifest["epoch"], manifest["attempt"])


def _shards_of(manifest: Mapping[str, Any]) -> list[str]:
    """The first shard of every rank of every part. The ranks of a group are numbered from 0."""
    shards = []
    for part in manifest["parts"]:
        if part["kind"] in ("file", "tree"):
            continue
        ranks = part["ranks"] or range(manifest["world_size"])
        numbers = range(len(ranks)) if part["kind"] == "report" else ranks
        shards += [join(part["directory"], f"__{number}_0.distcp") for number in numbers]
    return shards


def _check_shard(name: str, file: str, data: bytes, manifest: Mapping[str, Any]) -> None:
    """Raise ``RootBroken`` if a made-up shard names another attempt or rank (I5)."""
    attempt = f"{manifest['step']}.e{manifest['epoch']}.a{manifest['attempt']}"
    rank = file.rpartition("__")[2].partition("_")[0]
    if not data.startswith(f"{attempt} rank {rank} ".encode()):
        raise RootBroken(f"I5: {name}/{file} is of another attempt or rank: {data[:40]!r}")


def is_step_of(name: str, steps: Collection[int]) -> bool:
    digits = name.removeprefix("iter_")
    return digits.isdigit() and int(digits) in steps


def name_of(step: int) -> str:
    return f"iter_{step:07d}"
