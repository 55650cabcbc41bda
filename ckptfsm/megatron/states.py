"""Megatron-core's formats: sharded state dicts as torch_dist, and requests of its queue."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megatron.core
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils._pytree import tree_map

from ckptfsm.adapters.posix_storage import opened_storage
from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import RestoreFailed
from ckptfsm.core.formats import FOREIGN, TORCH_DIST
from ckptfsm.core.parts import PerRank, Planned
from ckptfsm.core.ports import Finalizer, PartJob, Storage
from ckptfsm.dcp.fast_load import Filled, Target
from ckptfsm.dcp.images import Bucket, saved, to_host
from ckptfsm.dcp.plain_values import digests_of
from ckptfsm.dcp.state_format import (
    Beside,
    DriverOptions,
    SavedFormat,
    Staging,
    StateFormat,
    Surveyed,
    stage_images,
)
from ckptfsm.disk.stock import COMMON, COMMON_KEY, inspect_stock
from ckptfsm.megatron.compat import process_group
from ckptfsm.megatron.fast_load import load_part, targets_in
from ckptfsm.megatron.foreign import (
    ForeignPart,
    ForeignRequest,
    common_files,
    objects_in,
    stage_foreign,
)
from ckptfsm.megatron.per_rank import with_objects
from ckptfsm.megatron.planning import PartDraft, PartSummary, Plans, merge_part
from ckptfsm.megatron.read_back import ReadBack, misfit_of
from ckptfsm.megatron.shardings import check_fit, check_shards, keys_of, metadata_of
from ckptfsm.megatron.torch_dist import COMMON_IN_SHARD, keeps_common_in_shard

storage_at = opened_storage  # its name in the drop-ins


def formats_of(options: DriverOptions) -> tuple[SavedFormat, StateFormat]:
    """The formats of a rank: that of requests, which are read as the other one."""
    in_shard = options.common_state == "auto" and keeps_common_in_shard()
    plans = Plans(options.files, in_shard)
    requests = ForeignStates(options.rank, plans.read_back)
    return requests, TorchDistStates(options.rank, plans, in_shard)


def has_any(value: Any, *kinds: type) -> bool:
    """True for a nested state with a value of these types."""
    if isinstance(value, dict):
        return any(has_any(each, *kinds) for each in value.values())
    if isinstance(value, (list, tuple)):
        return any(has_any(each, *kinds) for each in value)
    return isinstance(value, kinds)


# ------------------------------------------------------------------------------------- torch_dist


@dataclass(slots=True)
class TorchDistPlan:
    """See ``PartPlan``. ``common_in_shard``: the state common to all ranks is an object in a shard."""

    draft: PartDraft | None
    common_in_shard: bool
    summary: PartSummary = field(init=False)
    expected_bytes: int = field(init=False)
    in_place: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        assert self.draft is not None
        self.summary, self.expected_bytes = self.draft.summary, self.draft.expected_bytes

    def digests(self) -> Mapping[str, int]:
        return digests_of(self._draft.common)

    def buckets(self, rank: int, planned: Planned) -> Sequence[Bucket]:
        return self._draft.buckets

    @property
    def _draft(self) -> PartDraft:
        assert self.draft is not None
        return self.draft

    def stage(self, staging: Staging) -> PartJob:
        if staging.rank != staging.spec.first_rank:
            return stage_images(staging)
        common = tree_map(to_host, self._draft.common)
        if not self.common_in_shard:
            return stage_images(staging, [Beside(COMMON, saved(common))])
        name = f"__{staging.rank}_{len(staging.buckets)}.distcp"
        content = saved([common])
        row = (COMMON_KEY, None, None, name, 0, len(content))
        return stage_images(staging, [Beside(name, content, [row])])

    def let_go(self) -> None:
        self.draft = None

    def finalizers(self) -> list[Finalizer]:
        return []


class TorchDistStates:
    """The format of sharded state dicts, see ``StateFormat``."""

    format = TORCH_DIST
    summary = PartSummary

    def __init__(self, rank: int, plans: Plans, common_in_shard: bool) -> None:
        self._rank, self._plans, self._common_in_shard = rank, plans, common_in_shard

    def takes(self, value: Any) -> bool:
        """A state without any tensor too: other ranks of the part may have sharded ones."""
        if not isinstance(value, dict):
            return isinstance(value, PerRank)
        return has_any(value, ShardedBase, LocalNonpersistentObject) or not has_any(
            value, Tensor, Stateful
        )

    def directory(self, value: Any, usual: str) -> str:
        return usual

    def plan(self, part: str, value: Any) -> TorchDistPlan:
        with process_group():
            draft = self._plans.draft(part, with_objects(value))
        return TorchDistPlan(draft, self._common_in_shard)

    def merge(self, part: str, summaries: Mapping[int, Any]) -> Planned:
        with process_group():
            return merge_part(part, summaries)

    def survey(self, part: str, state: Any, directory: str, droppable: Collection[str]) -> Surveyed:
        refuse_newer(part, directory)
        missing: set[str] = set()
        stored: frozenset[str] = frozenset()
        with process_group():
            prepared, _, _ = load_preprocess(with_objects(state))
            sharded, _ = extract_sharded_base(prepared)
            values = list(nested_values(sharded))
            refuse_misfits(part, values)
            wanted = [value.without_data() for value in values]
            if wanted or self._rank == 0:
                have = metadata_of(directory)
                missing = check_fit(part, wanted, have, droppable)
                stored = keys_of(have)
        return Surveyed(missing, wanted, stored)

    def check(self, part: str, wanted: Sequence[Any], drop: Collection[str]) -> set[str]:
        with process_group():
            kept = [[each for each in shards if each.key not in drop] for shards in wanted]
            check_shards(part, kept, RestoreFailed)
        return {each.key for shards in wanted for each in shards}

    def targets(
        self,
        storage: Storage,
        location: str,
        directory: str,
        state: Any,
        entries: Mapping[str, FileEntry],
    ) -> Mapping[FileEntry, Sequence[Target]]:
        with process_group():
            return targets_in(storage, location, directory, with_objects(state), entries)

    def load(
        self, part: str, state: Any, directory: str, drop: set[str], full: Collection[Filled]
    ) -> Any:
        return load_part(part, state, directory, drop, full)


def _has_common_in_shard(directory: Path) -> bool:
    if not (directory / ".metadata").exists() or (directory / COMMON).exists():
        return False
    with opened_storage(directory.parent) as storage:
        return COMMON_KEY in inspect_stock(storage, directory.name).object_keys


def refuse_newer(name: str, directory: str) -> None:
    """Refuse a part that only a newer megatron-core can read: this one would miss a ``common.pt``.

    Raises ``RestoreFailed``. Local, and the same on every rank that sees the directory.
    """
    if keeps_common_in_shard() or not _has_common_in_shard(Path(directory)):
        return
    first = ".".join(map(str, COMMON_IN_SHARD))
    raise RestoreFailed(
        f"part {name!r}: its common state lies in a shard, as megatron-core {first} and newer write it; "
        f"installed is {megatron.core.__version__}: install {first} or newer. Nothing was changed",
        part=name,
        file=directory,
    )


def refuse_misfits(name: str, values: Sequence[Any]) -> None:
    """Raise ``RestoreFailed`` if a tensor to be filled is not whole in this rank's memory (local)."""
    for value in values:
        said = "" if isinstance(value, ShardedObject) else misfit_of(value)  # replaced, not filled
        if said:
            raise RestoreFailed(
                f"part {name!r}: key {value.key!r}, of type {type(value.data).__name__}, cannot be "
                f"filled: {said}. Nothing was changed",
                part=name,
                key=value.key,
            )


# --------------------------------------------------------------------------------------- requests


@dataclass(slots=True)
class ForeignPlan:
    """See ``PartPlan``: a request that is ready, or the function that makes it."""

    request: ForeignRequest | None
    read_back: ReadBack
    part: ForeignPart | None = None
    summary: None = field(default=None, init=False)
    expected_bytes: int = field(default=0, init=False)
    in_place: bool = field(init=False)

    def __post_init__(self) -> None:
        assert self.request is not None
        self.in_place = self.request.request is not None

    def digests(self) -> Mapping[str, int]:
        return {}

    def buckets(self, rank: int, planned: Planned) -> Sequence[Bucket]:
        return ()

    def stage(self, staging: Staging) -> PartJob:
        assert self.request is not None
        spec, rank, before = staging.spec, staging.rank, staging.before
        others = [job for job in before if isinstance(job, ForeignPart)]
        self.part = stage_foreign(spec, self.request, rank, staging.location, others)
        if self.request.build is not None:  # made only now; a ready one was looked at before
            check_request(self.read_back, spec.name, self.part.request.arguments, rank)
        return self.part

    def let_go(self) -> None:
        self.request = None
        if self.part is not None:
            self.part.request.let_go()

    def finalizers(self) -> list[Finalizer]:
        if self.part is None:
            return []
        request = self.part.request
        return [Finalizer(self.part.name, request.problem, request.finalize)]


class ForeignStates:
    """The format of requests, see ``SavedFormat``."""

    format = FOREIGN

    def __init__(self, rank: int, read_back: ReadBack) -> None:
        self._rank, self._read_back = rank, read_back

    def takes(self, value: Any) -> bool:
        return isinstance(value, ForeignRequest)

    def directory(self, value: Any, usual: str) -> str:
        return value.directory or usual

    def plan(self, part: str, value: Any) -> ForeignPlan:
        if value.request is not None:
            check_request(self._read_back, part, value.request.async_fn_args, self._rank)
        return ForeignPlan(value, self._read_back)


def check_request(read_back: ReadBack, part: str, arguments: Any, rank: int) -> None:
    """Refuse a request of another maker if what it has pickled could not be loaded (local).

    Raises ``SaveRefused``.
    """
    common = common_files(arguments) if rank == 0 else ()
    read_back.check_made(part, objects_in(arguments), common)
