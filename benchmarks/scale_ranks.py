"""Many simulated ranks in one process: they write their files, and send real messages.

    python -m benchmarks.scale_ranks ROOT RANKS

The process reads requests as pickles on standard input, and answers each with one message per rank
on standard output: eight bytes of length, then a pickle, as ``gather_object`` sends. Each rank has
one small shard and its receipt. A single sync stands for the fsyncs of all ranks.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import torch
import xxhash
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ckptfsm.adapters.posix_storage import DIGEST_PREFIX
from ckptfsm.core.documents import FileEntry, Receipt, encode_sealed
from ckptfsm.core.events import Event, ShardReported, WriterForked
from ckptfsm.core.layout import MEGATRON, PLANNED, planned_name, receipt_name
from ckptfsm.core.parts import AttemptId, PartSpec
from ckptfsm.ranks.proposal import Proposal

PART = PartSpec("state", "torch_dist")
_TENSOR = "layer.weight"
_ROWS = 4  # rows of the tensor that each rank has
_SHARD = b"\0" * 256
_LENGTH_BYTES = 8


def propose(root: Path, step: int, count: int) -> Iterator[Proposal]:
    """The proposals of all ranks for ``step``, without megatron-core's plans."""
    for _ in range(count):
        yield Proposal(step, count, (PART,), expected_bytes=len(_SHARD))


def fork(root: Path, of: AttemptId, count: int) -> Iterator[list[Event]]:
    """The reports of all ranks that their writers hold a copy."""
    for rank in range(count):
        yield [WriterForked(of, rank, count)]


def write(root: Path, of: AttemptId, count: int) -> Iterator[list[Event]]:
    """Write the files of all ranks; their reports that the shards are durable."""
    directory = root / MEGATRON.working_dir(of, False)
    (directory / receipt_name(PART.name, 0)).parent.mkdir(parents=True)
    (directory / PLANNED).mkdir()
    plan = _put(directory, planned_name(PART.name), _planned(count))
    for rank in range(count):
        shard = _put(directory, f"__{rank}_0.distcp", _SHARD)
        receipt = Receipt(
            step=of.step,
            epoch=of.epoch,
            attempt=of.attempt,
            part=PART.name,
            rank=rank,
            world_size=count,
            files=(shard,) if rank else (shard, plan),
            results=((_TENSOR, (rank * _ROWS,), None, shard.name, 0, len(_SHARD)),),
        )
        _put(directory, receipt_name(PART.name, rank), encode_sealed(receipt))
    os.sync()
    for rank in range(count):
        yield [ShardReported(of, PART.name, rank, count, len(_SHARD))]


def _put(directory: Path, name: str, data: bytes) -> FileEntry:
    fd = os.open(f"{directory}/{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    os.write(fd, data)
    os.close(fd)
    digest = DIGEST_PREFIX + xxhash.xxh3_128(data).hexdigest()
    return FileEntry(name=name, bytes=len(data), digest=digest)


def _planned(count: int) -> bytes:
    """The planned metadata of one tensor that all ranks share."""
    size = torch.Size((_ROWS,))
    chunks = [ChunkStorageMetadata(torch.Size((rank * _ROWS,)), size) for rank in range(count)]
    tensor = TensorStorageMetadata(
        TensorProperties(dtype=torch.float32), torch.Size((count * _ROWS,)), chunks
    )
    return pickle.dumps(Metadata({_TENSOR: tensor}))


ANSWERS: Mapping[str, Callable[[Path, Any, int], Iterator[Any]]] = MappingProxyType(
    {"propose": propose, "fork": fork, "write": write}
)


def receive(pipe: IO[bytes], count: int) -> Iterator[bytes]:
    """The messages of ``count`` ranks, as sent."""
    for _ in range(count):
        yield pipe.read(int.from_bytes(pipe.read(_LENGTH_BYTES), "little"))


def main(root: Path, count: int) -> None:
    """Answer until the input ends."""
    while True:
        try:
            name, argument = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        sent = [pickle.dumps(item) for item in ANSWERS[name](root, argument, count)]
        for message in sent:
            sys.stdout.buffer.write(len(message).to_bytes(_LENGTH_BYTES, "little") + message)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
