"""The driver: turns a trainer's sharded state dicts into parts and back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import megatron.core
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from ckptfsm.adapters.posix_storage import opened_storage
from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import ConfigError, RestoreFailed
from ckptfsm.core.formats import FOREIGN, TORCH_DIST
from ckptfsm.core.parts import OptionalPart, PartSpec, PerRank, Planned, content_of
from ckptfsm.core.ports import Finalizer, PartFinisher, PartJob, Storage, Survey
from ckptfsm.dcp.blobs import Templates
from ckptfsm.dcp.device_copies import DeviceCopies
from ckptfsm.dcp.fast_load import FastLoad
from ckptfsm.dcp.gate import GatedMemory
from ckptfsm.dcp.images import Held
from ckptfsm.dcp.lone_make import no_collective
from ckptfsm.dcp.plain_values import digests_of
from ckptfsm.dcp.plan_exchange import PlanExchange, Summary
from ckptfsm.disk.stock import COMMON, COMMON_KEY, inspect_stock
from ckptfsm.megatron.compat import process_group
from ckptfsm.megatron.fast_load import load_parts, plan_fast_load
from ckptfsm.megatron.foreign import (
    ForeignPart,
    ForeignRequest,
    common_files,
    objects_in,
    stage_foreign,
)
from ckptfsm.megatron.image_part import stage_images
from ckptfsm.megatron.per_rank import with_objects
from ckptfsm.megatron.planning import PartDraft, Plans, merge_part
from ckptfsm.megatron.read_back import ReadBack, misfit_of
from ckptfsm.megatron.shardings import check_fit, check_shards, keys_of, metadata_of
from ckptfsm.megatron.torch_dist import COMMON_IN_SHARD, finish_part, keeps_common_in_shard
from ckptfsm.writers.plain_files import (
    bytes_of,
    digests_of_bytes,
    file_spec,
    provenance,
    stage_file,
)

_ROOT_PART = "state"
storage_at = opened_storage  # its name in the drop-ins


@dataclass(slots=True)
class MegatronDraft:
    """The planned save of one rank, see ``ports.Draft``."""

    specs: tuple[PartSpec, ...]
    in_place: bool
    summary: Summary
    expected_bytes: int
    digests: Mapping[str, Mapping[str, int]]
    driver: MegatronDriver
    plans: dict[str, PartDraft]
    values: Mapping[str, Any]
    foreign: list[ForeignPart] = field(default_factory=list)
    held: Held = field(default_factory=Held)

    def stage(
        self, location: str, specs: Sequence[PartSpec], planned: Mapping[str, Planned]
    ) -> tuple[PartJob, ...]:
        rank, read_back = self.driver.rank, self.driver.planner.read_back
        forked = any(spec.format.foreign for spec in specs)
        self.held.promised = self.driver.promise.storages()
        if self.driver.copies is not None and not forked:
            plans = [self.plans[spec.name] for spec in specs if spec.format.planned]
            values = (value for plan in plans for bucket in plan.buckets for _, value in bucket)
            self.held.device = self.driver.copies.new_copy(values)
        jobs: list[PartJob] = []
        for spec in specs:
            value = self.values[spec.name]
            if spec.format.planned:
                merged = planned[spec.name].metadata if rank == spec.first_rank else None
                part = stage_images(
                    spec,
                    self.plans[spec.name],
                    rank,
                    merged,
                    common_in_shard=self.driver.common_in_shard,
                    templates=self.driver.templates,
                    held=self.held,
                )
                jobs.append(part)
            elif spec.format.foreign:
                foreign = stage_foreign(spec, value, rank, location, self.foreign)
                if value.build is not None:  # made only now; a ready one was looked at before
                    check_request(read_back, spec.name, foreign.request.arguments, rank)
                self.foreign.append(foreign)
                jobs.append(foreign)
            else:
                with no_collective(spec, rank):
                    jobs.append(stage_file(spec, value, location, rank))
        if self.held.device is not None:
            self.held.device.start()
        return tuple(jobs)

    def changed(self) -> str:
        return self.held.changed()

    def let_go(self) -> None:
        self.plans, self.values = {}, {}
        self.held.clear()
        for part in self.foreign:
            part.request.let_go()

    def finalizers(self) -> list[Finalizer]:
        return [
            Finalizer(part.name, part.request.problem, part.request.finalize)
            for part in self.foreign
        ]


class MegatronDriver:
    """See ``ports.Driver``. ``files`` is the number of files of a rank per part.

    ``ranks``: the number of ranks that save together.
    ``common_in_shard``: write the state common to all ranks into a shard, as megatron-core does
    from 0.19 on. ``copies`` are those of an accelerator's state, for a writer that is not forked.
    ``promise`` tells the memory that such a writer may read after ``save``.
    """

    finishers: Mapping[str, PartFinisher] = MappingProxyType({TORCH_DIST.name: finish_part})

    def __init__(
        self,
        rank: int,
        files: int,
        *,
        ranks: int = 1,
        common_in_shard: bool = False,
        copies: DeviceCopies | None = None,
        promise: GatedMemory | None = None,
    ) -> None:
        self.rank, self._ranks = rank, ranks
        self.planner = Plans(files, common_in_shard)
        self.common_in_shard = common_in_shard
        self.templates = Templates()
        self.copies = copies
        self.promise = promise or GatedMemory()
        self._exchange = PlanExchange()

    def provenance(self) -> Mapping[str, str]:
        return provenance("ckptfsm", "torch", "megatron-core")

    def draft(self, parts: Mapping[str, Any]) -> MegatronDraft:
        specs = tuple(
            _spec_of(name, value, len(parts)) for name, value in parts.items() if value is not None
        )
        values = {name: content_of(value) for name, value in parts.items()}
        with process_group():
            plans = {
                spec.name: self.planner.draft(spec.name, with_objects(values[spec.name]))
                for spec in specs
                if spec.format.planned
            }
        ready = False
        for spec in specs:
            made = values[spec.name]
            if isinstance(made, ForeignRequest) and made.request is not None:
                check_request(
                    self.planner.read_back, spec.name, made.request.async_fn_args, self.rank
                )
                ready = True
        summary = self._exchange.summary_of({n: plan.summary for n, plan in plans.items()})
        digests: dict[str, Mapping[str, int]] = {}
        if self._ranks > 1:  # of the values that the others have to give too
            digests = {name: digests_of(plan.common) for name, plan in plans.items()}
            digests |= digests_of_bytes(values)
        expected = sum(plan.expected_bytes for plan in plans.values()) + bytes_of(values)
        return MegatronDraft(specs, ready, summary, expected, digests, self, plans, values)

    def accept(self) -> None:
        self._exchange.accept()

    def refuse(self) -> None:
        self._exchange.refuse()

    def merge(self, summaries: Sequence[Summary]) -> Mapping[str, Planned]:
        with process_group():
            return self._exchange.merge(summaries, merge_part)

    def survey(
        self, parts: Mapping[str, Any], directories: Mapping[str, str], droppable: Collection[str]
    ) -> Survey:
        absent: set[str] = set()
        shardings: dict[str, Any] = {}
        stored: dict[str, frozenset[str]] = {}
        for name, state in parts.items():
            if file_spec(name, state) is not None:
                continue
            refuse_newer(name, directories[name])
            with process_group():
                prepared, _, _ = load_preprocess(with_objects(state))
                sharded, _ = extract_sharded_base(prepared)
                values = list(nested_values(sharded))
                refuse_misfits(name, values)
                shardings[name] = [value.without_data() for value in values]
                if shardings[name] or self.rank == 0:
                    have = metadata_of(directories[name])
                    absent |= check_fit(name, shardings[name], have, droppable)
                    if self.rank == 0:
                        stored[name] = keys_of(have)
        return Survey(absent, shardings, stored)

    def check(self, surveys: Sequence[Survey], drop: set[str]) -> set[str]:
        unused: set[str] = set()
        for name in surveys[0].shardings:
            ranks = [[v for v in s.shardings[name] if v.key not in drop] for s in surveys]
            with process_group():
                check_shards(name, ranks, RestoreFailed)
            asked = {v.key for s in surveys for v in s.shardings[name]}
            unused |= surveys[0].stored[name] - asked
        return unused

    def plan_reading(
        self,
        storage: Storage,
        location: str,
        parts: Mapping[str, tuple[str, Any]],
        files: Sequence[FileEntry],
    ) -> FastLoad | None:
        with process_group():
            placed = {n: (where, with_objects(state)) for n, (where, state) in parts.items()}
            return plan_fast_load(storage, location, placed, files)

    def load(
        self, parts: Mapping[str, Any], directories: Mapping[str, str], drop: set[str]
    ) -> Mapping[str, Any]:
        return load_parts(parts, directories, drop)


def check_request(read_back: ReadBack, part: str, arguments: Any, rank: int) -> None:
    """Refuse a request of another maker if what it has pickled could not be loaded (local).

    Raises ``SaveRefused``.
    """
    common = common_files(arguments) if rank == 0 else ()
    read_back.check_made(part, objects_in(arguments), common)


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


def _spec_of(name: str, value: Any, count: int) -> PartSpec:
    """The spec of a part. A lone part sits at the root of the step's directory, as in Megatron-LM."""
    if isinstance(value, OptionalPart):
        return replace(_spec_of(name, value.content, count), optional=True)
    plain = file_spec(name, value)
    if plain is not None:
        return plain
    directory = "" if count == 1 or name == _ROOT_PART else name
    if isinstance(value, ForeignRequest):
        return PartSpec(name, FOREIGN.name, value.directory or directory)
    if isinstance(value, (dict, PerRank)):
        return PartSpec(name, TORCH_DIST.name, directory)
    raise ConfigError(
        f"part {name!r} is a {type(value).__name__}; give a sharded state dict, bytes, a FileTree, a "
        "PerRank or a ForeignRequest",
        part=name,
    )
