"""The cost of a plan in DCP's own format at rank 0, against the number of ranks.

    python -m benchmarks.scale_plans RANKS

Every rank has 2,500 parts of tensors that are divided among all ranks, as FSDP2 does, 20 tensors and 20
pickled values that all ranks have, and one of its own. Measured: the plan of a first save, that of the
next one, and ``.metadata`` from the receipts. The peer is torch's ``create_global_plan``.

Seconds are the processor time of rank 0. Messages of ranks and receipts are real bytes.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from benchmarks.measure import Figure
from ckptfsm.adapters.garbage import collection_paused
from ckptfsm.core.documents import Receipt, decode, encode_sealed
from ckptfsm.core.errors import SaveRefused
from ckptfsm.core.parts import PerRank
from ckptfsm.dcp.global_plan import merge_plans, summary_of
from ckptfsm.dcp.metadata import finish_dcp
from ckptfsm.dcp.nested import Flat, flat
from ckptfsm.dcp.plan_exchange import PlanExchange

RANKS = (16, 64, 256)
_ITEMS, _OTHERS = 2500, 20
_SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008), (32000, 4096), (4096,), (1024, 4096), (128,))
_TARGET_RANKS, _TARGET_S = 256, 2.0
_TIMEOUT_S = 600.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlanCost:
    """Seconds of processor time at rank 0, and bytes of a rank's message."""

    ranks: int
    first_s: float
    next_s: float
    finish_s: float
    torch_s: float
    sent_bytes: int
    metadata_bytes: int


def run(most: int) -> Iterator[Figure]:
    """Figures of each number of ranks up to ``most``, or of that one, each from a fresh process."""
    for ranks in [count for count in RANKS if count <= most] or [most]:
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.scale_plans", str(ranks)]
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=_TIMEOUT_S, check=True)
        cost = PlanCost(**json.loads(done.stdout))
        target = _TARGET_S if ranks == _TARGET_RANKS else None
        yield Figure(f"{ranks} ranks, DCP plan", "s", (cost.first_s,), target)
        yield Figure(f"{ranks} ranks, DCP plan, next save", "s", (cost.next_s,))
        yield Figure(f"{ranks} ranks, DCP .metadata", "s", (cost.finish_s,), target)
        yield Figure(f"{ranks} ranks, torch's plan", "s", (cost.torch_s,))
        yield Figure(f"{ranks} ranks, DCP plan of a rank", "bytes", (float(cost.sent_bytes),))
        yield Figure(
            f"{ranks} ranks, size of DCP .metadata", "bytes", (float(cost.metadata_bytes),)
        )


def items_of(rank: int, ranks: int) -> tuple[list[WriteItem], Flat]:
    """The items of a rank, and a state with their keys."""
    items = [_rows_of(number, rank, ranks) for number in range(_ITEMS)]
    whole = torch.Size((100_000,))
    start = torch.Size((0,))
    items += [_tensor(f"buffers.{number}", whole, start, whole) for number in range(_OTHERS)]
    keys = [f"loader.rank_{rank}", *(f"values.{number}" for number in range(_OTHERS))]
    items += [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in keys]
    given = {item.index.fqn: 0 for item in items if item.index.fqn != keys[0]}
    return items, flat("state", {**given, "loader": PerRank(0)}, rank, SaveRefused)


def _rows_of(number: int, rank: int, ranks: int) -> WriteItem:
    """A rank's rows of a tensor, as FSDP2 divides it."""
    length, *rest = _SHAPES[number % len(_SHAPES)]
    each = -(-length // ranks)
    first, last = min(rank * each, length), min((rank + 1) * each, length)
    at, sizes = torch.Size((first, *(0 for _ in rest))), torch.Size((last - first, *rest))
    key = f"model.layers.{number // 9}.block.part{number % 9}.weight"
    return _tensor(key, (length, *rest), at, sizes)


def _tensor(key: str, size: tuple[int, ...], at: torch.Size, sizes: torch.Size) -> WriteItem:
    data = TensorWriteData(ChunkStorageMetadata(at, sizes), TensorProperties(), torch.Size(size))
    kind = WriteItemType.TENSOR if sizes == data.size else WriteItemType.SHARD
    return WriteItem(MetadataIndex(key, at), kind, tensor_data=data)


def measure(ranks: int) -> PlanCost:
    """Plan a save twice, and finish it, in this process."""
    given = [items_of(rank, ranks) for rank in range(ranks)]
    plans = [{"state": summary_of(*each)} for each in given]
    exchanges = [PlanExchange() for _ in range(ranks)]

    def merged(messages: list[bytes]) -> Any:
        sent = [pickle.loads(message) for message in messages]
        return exchanges[0].merge(sent, lambda name, found: merge_plans(name, found, ranks))

    messages = [pickle.dumps(e.summary_of(plan)) for e, plan in zip(exchanges, plans, strict=True)]
    first_s, planned = _timed(lambda: merged(messages))
    for exchange in exchanges:
        exchange.accept()
    later = [pickle.dumps(e.summary_of(plan)) for e, plan in zip(exchanges, plans, strict=True)]
    next_s, _ = _timed(lambda: merged(later))
    shares = pickle.loads(planned["state"].shares)
    receipts = [
        _receipt(rank, ranks, items, zlib.decompress(shares[rank]))
        for rank, (items, _) in enumerate(given)
    ]

    def finished() -> int:
        results = [decode(Receipt, receipt, "").results for receipt in receipts]
        return sum(map(len, finish_dcp(planned["state"].metadata, results, "/").values()))

    finish_s, size = _timed(finished)
    theirs = [SavePlan(items, planner_data=state.mappings()) for items, state in given]
    torch_s, _ = _timed(lambda: DefaultSavePlanner().create_global_plan(theirs))
    return PlanCost(ranks, first_s, next_s, finish_s, torch_s, len(messages[-1]), size)


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    began = time.process_time()
    with collection_paused():
        made = work()
    return time.process_time() - began, made


def _receipt(rank: int, ranks: int, items: list[WriteItem], mask: bytes) -> bytes:
    rows = tuple(
        (
            item.index.fqn,
            None if item.index.offset is None else list(item.index.offset),
            None,
            f"__{rank}_0.distcp",
            4000 * number,
            4000,
        )
        for number, (item, is_own) in enumerate(zip(items, mask, strict=True))
        if is_own
    )
    receipt = Receipt(
        step=1,
        epoch=1,
        attempt=1,
        part="state",
        rank=rank,
        world_size=ranks,
        files=(),
        results=rows,
    )
    return encode_sealed(receipt)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(int(sys.argv[1])))))
