"""Changes of a root by other programs: a stock trainer that saves a step."""

from __future__ import annotations

from proof.fuzz import _COMMON_SHARD, _CONFIG, common_archive, written_metadata

from ckptfsm.core.layout import MEGATRON, TRACKER
from ckptfsm.testing.simfs import SimDisk, SimStorage

SHARD = "__0_0.distcp"


def torch_dist_files() -> dict[str, bytes]:
    """A torch_dist directory as Megatron-core up to 0.18 leaves it."""
    return {
        ".metadata": written_metadata(),
        "metadata.json": _CONFIG,
        "common.pt": common_archive(),
        SHARD: bytes(100),
    }


def dcp_files() -> dict[str, bytes]:
    """A directory as ``torch.distributed.checkpoint`` leaves it."""
    return {".metadata": written_metadata("none"), SHARD: bytes(100)}


def newer_files() -> dict[str, bytes]:
    """A torch_dist directory as megatron-core 0.19 leaves it: the common state lies in a shard."""
    return {
        ".metadata": written_metadata("shard"),
        "metadata.json": _CONFIG,
        _COMMON_SHARD: common_archive(),
        SHARD: bytes(100),
    }


def stock_saves(
    disk: SimDisk,
    step: int,
    shard: bytes = bytes(100),
    *,
    tracked: bool = True,
    synced: bool = False,
    dcp: bool = False,
) -> None:
    """A stock trainer saves a step and, if ``tracked``, moves the tracker.

    The trainer fsyncs nothing by itself; ``synced``: the system has done so meanwhile. ``dcp``: it
    saves with DCP alone, not with Megatron-core.
    """
    storage, name = SimStorage(disk, "stock"), MEGATRON.published_name(step)
    if name not in storage.listdir(""):
        storage.mkdir(name)
    saved = (dcp_files() if dcp else torch_dist_files()) | {SHARD: shard}
    files = {f"{name}/{file}": data for file, data in saved.items()}
    if tracked:
        files[f"{TRACKER}.stock"] = b"%d" % step
        if f"{TRACKER}.stock" in storage.listdir(
            ""
        ):  # a power loss showed its rename at both names
            storage.unlink(f"{TRACKER}.stock")
    for path, data in files.items():
        handle = storage.open_exclusive(path)
        storage.write(handle, data)
        if synced:
            storage.fsync(handle)
        storage.close(handle)
    if tracked:
        storage.rename(f"{TRACKER}.stock", TRACKER)
    if synced:
        storage.fsync_dir(name)
        storage.fsync_dir("")
    disk.kill("stock")
