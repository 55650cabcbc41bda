"""DCP's own format: DTensors, plain tensors, and values that can be pickled. See ``StateFormat``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ckptfsm.core.documents import FileEntry
from ckptfsm.core.errors import SaveRefused
from ckptfsm.core.formats import DCP
from ckptfsm.core.layout import join
from ckptfsm.core.parts import PerRank, Planned
from ckptfsm.core.ports import Storage
from ckptfsm.dcp.fast_load import Filled, Target, metadata_of
from ckptfsm.dcp.global_plan import DcpSummary, merge_plans
from ckptfsm.dcp.loading import METADATA, DcpReading
from ckptfsm.dcp.nested import flat
from ckptfsm.dcp.planning import DcpPlan, DcpPlans
from ckptfsm.dcp.read_back import StateReadBack
from ckptfsm.dcp.state_format import DriverOptions, Surveyed


class DcpStates:
    """The format of dicts and ``PerRank`` values without anything of another library."""

    format = DCP
    summary = DcpSummary

    def __init__(self, options: DriverOptions) -> None:
        self._rank, self._ranks = options.rank, options.ranks
        self._plans, self._read_back = DcpPlans(options.files), StateReadBack()
        # By absolute directory, from one call of a restore to the next. They end with it: the trainer
        # may change its dict, and ask again.
        self._planned: dict[str, DcpReading] = {}
        self._surveyed: dict[str, DcpReading] = {}

    def takes(self, value: Any) -> bool:
        return isinstance(value, (dict, PerRank))

    def directory(self, value: Any, usual: str) -> str:
        return usual

    def plan(self, part: str, value: Any) -> DcpPlan:
        self._planned.clear()  # of a restore that failed
        self._surveyed.clear()
        state = flat(part, value, self._rank, SaveRefused)
        self._read_back.check_state(part, state.values)
        return DcpPlan(self._plans.of(part, state, self._ranks), state, self._ranks)

    def merge(self, part: str, summaries: Mapping[int, Any]) -> Planned:
        return merge_plans(part, summaries, self._ranks)

    def targets(
        self,
        storage: Storage,
        location: str,
        directory: str,
        state: Any,
        entries: Mapping[str, FileEntry],
    ) -> Mapping[FileEntry, Sequence[Target]]:
        there = join(storage.absolute(location), directory)
        self._planned.pop(there, None)
        metadata = metadata_of(storage, location, entries.get(join(directory, METADATA)))
        if metadata is None:
            return {}
        reading = self._planned[there] = DcpReading("", state, there, self._rank, metadata)
        return reading.targets(directory, entries)

    def survey(self, part: str, state: Any, directory: str, droppable: Collection[str]) -> Surveyed:
        reading = self._planned.pop(directory, None)
        if reading is None or reading.state is not state:
            reading = DcpReading(part, state, directory, self._rank)
        self._surveyed[directory] = reading
        return reading.survey(part, droppable, self._ranks)

    def check(self, part: str, wanted: Sequence[Any], drop: Collection[str]) -> set[str]:
        return set().union(*wanted)

    def load(
        self, part: str, state: Any, directory: str, drop: set[str], full: Collection[Filled]
    ) -> Any:
        return self._surveyed.pop(directory).load(drop, full)
