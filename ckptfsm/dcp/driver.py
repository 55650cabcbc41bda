"""The driver of torch states: each part in the first format that takes its value, and plain files."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ckptfsm.adapters.garbage import collection_paused
from ckptfsm.adapters.notices import no_warning_is_an_error
from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import ConfigError, RestoreFailed
from ckptfsm.core.formats import DCP, TORCH_DIST, Format, stock_format
from ckptfsm.core.layout import join
from ckptfsm.core.parts import OptionalPart, PartSpec, Planned, content_of
from ckptfsm.core.ports import Finalizer, PartFinisher, PartJob, Storage, Survey
from ckptfsm.dcp.blobs import Templates
from ckptfsm.dcp.dcp_states import DcpStates
from ckptfsm.dcp.fast_load import FastLoad, Filled, Target, worth_reading
from ckptfsm.dcp.gate import GatedMemory
from ckptfsm.dcp.images import Held
from ckptfsm.dcp.lone_make import no_collective
from ckptfsm.dcp.metadata import finish_dcp, finish_torch_dist
from ckptfsm.dcp.plan_exchange import PlanExchange, Summary
from ckptfsm.dcp.state_format import DriverOptions, PartPlan, SavedFormat, Staging, StateFormat
from ckptfsm.dcp.torch_file import TorchFile, TorchFiles, load_torch_file
from ckptfsm.writers.plain_files import (
    bytes_of,
    digests_of_bytes,
    file_spec,
    load_file,
    provenance,
    stage_file,
)

ROOT_PART = "state"

# Megatron-core has values and formats of its own. They are loaded only where they may occur: in a
# process that has imported megatron-core, or for a checkpoint of that format.
MEGATRON_CORE = "megatron.core.dist_checkpointing.mapping"
_MARKS = (*TORCH_DIST.metadata, TORCH_DIST.common)  # files that tell a stored part's format


@dataclass(slots=True)
class StateDraft:
    """The planned save of one rank, see ``ports.Draft``."""

    specs: tuple[PartSpec, ...]
    in_place: bool
    summary: Summary
    expected_bytes: int
    digests: Mapping[str, Mapping[str, int]]
    driver: StateDriver
    plans: dict[str, PartPlan]
    values: Mapping[str, Any]
    held: Held = field(default_factory=Held)

    @no_warning_is_an_error()
    @collection_paused()
    def stage(
        self, location: str, specs: Sequence[PartSpec], planned: Mapping[str, Planned]
    ) -> tuple[PartJob, ...]:
        options, nothing = self.driver.options, Planned(b"")
        promise = self.driver.promise
        self.held.owners, self.held.promises_all = promise.owners(), promise.promises_all
        found = {
            spec.name: self.plans[spec.name].buckets(options.rank, planned.get(spec.name, nothing))
            for spec in specs
            if spec.name in self.plans
        }
        if options.copies is not None and not any(spec.format.foreign for spec in specs):
            values = (value for part in found.values() for bucket in part for _, value in bucket)
            self.held.device = options.copies.new_copy(values)
        jobs: list[PartJob] = []
        for spec in specs:
            if spec.name in self.plans:
                staging = Staging(
                    spec,
                    options.rank,
                    location,
                    planned.get(spec.name, nothing),
                    found[spec.name],
                    self.driver.templates,
                    self.held,
                    tuple(jobs),
                )
                jobs.append(self.plans[spec.name].stage(staging))
            else:
                with no_collective(spec, options.rank):
                    jobs.append(stage_file(spec, self.values[spec.name], location, options.rank))
        if self.held.device is not None:
            self.held.device.start()
        return tuple(jobs)

    def changed(self) -> str:
        return self.held.changed()

    def let_go(self) -> None:
        self.values = {}
        self.held.clear()
        for plan in self.plans.values():
            plan.let_go()

    def finalizers(self) -> list[Finalizer]:
        return [each for plan in self.plans.values() for each in plan.finalizers()]


class StateDriver:
    """See ``ports.Driver``."""

    finishers: Mapping[str, PartFinisher] = MappingProxyType(
        {DCP.name: finish_dcp, TORCH_DIST.name: finish_torch_dist}
    )

    def __init__(self, options: DriverOptions) -> None:
        self.options = options
        self.templates = Templates()
        self.promise = options.promise or GatedMemory()
        self._exchange = PlanExchange()
        self._states: list[StateFormat] = [DcpStates(options)]
        self._saving: list[SavedFormat] = [
            TorchFiles(self.templates),
            *self._states,
        ]  # in this order
        self._load_imported()

    def _load_imported(self) -> None:
        """Only a process that has imported megatron-core can have its values, or hear of them."""
        if MEGATRON_CORE in sys.modules:
            self._load_megatrons()

    @no_warning_is_an_error()  # as the import raises some
    def _load_megatrons(self) -> None:
        """Raises ``ConfigError`` if megatron-core is not installed, or too old."""
        if len(self._states) == 1:
            requests, states = import_module("ckptfsm.megatron.states").formats_of(self.options)
            self._saving[:0], self._states[:0] = [requests, states], [states]

    def provenance(self) -> Mapping[str, str]:
        core = ("megatron-core",) if MEGATRON_CORE in sys.modules else ()
        return provenance("ckptfsm", "torch", *core)

    # ---------------------------------------------------------------------------------------- save

    @no_warning_is_an_error()
    def draft(self, parts: Mapping[str, Any]) -> StateDraft:
        values = {name: content_of(value) for name, value in parts.items()}
        specs: list[PartSpec] = []
        plans: dict[str, PartPlan] = {}
        for name, value in values.items():
            if value is None:
                continue
            spec = file_spec(name, value)
            if spec is None:
                taking = self._taking(name, value)
                usual = "" if len(parts) == 1 or name == ROOT_PART else name
                spec = PartSpec(name, taking.format.name, taking.directory(value, usual))
                plans[name] = taking.plan(name, value)
            specs.append(replace(spec, optional=isinstance(parts[name], OptionalPart)))
        summary = self._exchange.summary_of(
            {name: plan.summary for name, plan in plans.items() if plan.summary is not None}
        )
        digests: dict[str, Mapping[str, int]] = {}
        if self.options.ranks > 1:  # of the values that the others have to give too
            digests = {name: plan.digests() for name, plan in plans.items()}
            digests |= digests_of_bytes(values)
        expected = sum(plan.expected_bytes for plan in plans.values()) + bytes_of(values)
        in_place = any(plan.in_place for plan in plans.values())
        return StateDraft(tuple(specs), in_place, summary, expected, digests, self, plans, values)

    def _taking(self, name: str, value: Any) -> SavedFormat:
        self._load_imported()
        found = next((each for each in self._saving if each.takes(value)), None)
        if found is None:
            raise ConfigError(
                f"part {name!r} is a {type(value).__name__}; give a state dict, bytes, a FileTree, a "
                "TorchFile, a PerRank or a ForeignRequest",
                part=name,
            )
        return found

    def accept(self) -> None:
        self._exchange.accept()

    def refuse(self) -> None:
        self._exchange.refuse()

    @no_warning_is_an_error()
    def merge(self, summaries: Sequence[Summary]) -> Mapping[str, Planned]:
        return self._exchange.merge(summaries, self._merge_part)

    def _merge_part(self, part: str, summaries: Mapping[int, Any]) -> Planned:
        self._load_imported()  # by the plans of others, if this rank gives no part
        first = next(iter(summaries.values()))
        [owner] = [each for each in self._states if each.summary is type(first)]
        return owner.merge(part, summaries)

    # ------------------------------------------------------------------------------------- restore

    @no_warning_is_an_error()
    def survey(
        self, parts: Mapping[str, Any], directories: Mapping[str, str], droppable: Collection[str]
    ) -> Survey:
        absent: set[str] = set()
        wanted: dict[str, Any] = {}
        stored: dict[str, frozenset[str]] = {}
        for name, state in parts.items():
            if isinstance(state, TorchFile) or file_spec(name, state) is not None:
                continue
            there = self._stored_in(name, directories[name])
            found = there.survey(name, state, directories[name], droppable)
            absent |= found.missing
            wanted[name] = (there.format.name, found.wanted)
            if self.options.rank == 0:
                stored[name] = found.stored
        return Survey(absent, wanted, stored)

    def _stored_in(self, part: str, directory: str) -> StateFormat:
        """The format in which a part lies in an absolute directory. Raises ``RestoreFailed``."""
        there = _format_there(name for name in _MARKS if Path(directory, name).exists())
        if there is None:
            raise RestoreFailed(
                f"part {part!r} has no {DCP.metadata[0]}, so there is no state to load",
                part=part,
                file=directory,
            )
        return self._reading(there)

    def _reading(self, stored: Format) -> StateFormat:
        if stored not in [each.format for each in self._states]:
            self._load_megatrons()
        [found] = [each for each in self._states if each.format is stored]
        return found

    @no_warning_is_an_error()
    def check(self, surveys: Sequence[Survey], drop: set[str]) -> set[str]:
        unused: set[str] = set()
        for name, (kind, _) in surveys[0].shardings.items():
            [there] = [each for each in self._states if each.format.name == kind]
            wanted = [survey.shardings[name][1] for survey in surveys]
            unused |= surveys[0].stored[name] - there.check(name, wanted, drop)
        return unused

    @no_warning_is_an_error()
    def plan_reading(
        self,
        storage: Storage,
        location: str,
        parts: Mapping[str, tuple[str, Any]],
        files: Sequence[FileEntry],
    ) -> FastLoad | None:
        entries = {entry.name: entry for entry in files}
        targets: dict[FileEntry, Sequence[Target]] = {}
        for directory, state in parts.values():
            there = _format_there(name for name in _MARKS if join(directory, name) in entries)
            if there is not None:
                found = self._reading(there)
                targets |= found.targets(storage, location, directory, state, entries)
        worth = worth_reading(targets)
        return FastLoad(storage, location, worth, self._load) if worth else None

    def load(
        self, parts: Mapping[str, Any], directories: Mapping[str, str], drop: set[str]
    ) -> Mapping[str, Any]:
        return self._load(parts, directories, drop, ())

    @no_warning_is_an_error()
    def _load(
        self,
        parts: Mapping[str, Any],
        directories: Mapping[str, str],
        drop: set[str],
        full: Collection[Filled],
    ) -> Mapping[str, Any]:
        """See ``ports.Driver.load``. Tensors whose memory is in ``full`` are filled already."""
        loaded = {}
        for name, state in parts.items():
            directory = directories[name]
            if isinstance(state, TorchFile):
                loaded[name] = load_torch_file(name, state, directory)
            elif file_spec(name, state) is not None:
                loaded[name] = load_file(name, state, directory)
            else:
                there = self._stored_in(name, directory)
                loaded[name] = there.load(name, state, directory, drop, full)
        return loaded


def _format_there(names: Iterable[str]) -> Format | None:
    """The format of a part with these of the marks; None if it has no metadata."""
    there = set(names)
    return stock_format(there) if there.issuperset(DCP.metadata) else None
