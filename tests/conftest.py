"""Every journal that a test leaves behind is judged: it must be a legal trace (I11).

Judged are the journals of every ``SimDisk`` that is made while a test runs, at the latest when the
disk dies. So are those of every root below ``tmp_path`` and, at the end, below the directories of
module fixtures. A test that damages or invents a journal on purpose says so, with its reason:

    @pytest.mark.damages_journal("cuts a record in two")

Where several processes share the tests (``-n 2``), each one tells the first what it judged.
"""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import profiles
import pytest
from hypothesis import settings
from lanes import is_for_gate

from ckptfsm.testing.conformance import JournalViolation, check_segments, read_segments
from ckptfsm.testing.simfs import SimDisk, SimStorage

MARKER = "damages_journal"
_TOLD = ("journals", "transitions", "exempt_tests", "leftover")


def pytest_configure(config: pytest.Config) -> None:
    for name in ("CI", "BUILD_NUMBER"):  # with them, pytest compares MiB of bytes for minutes
        os.environ.pop(name, None)
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # as a shell starts a job in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not config.pluginmanager.hasplugin("warnings"):  # tests/integrations/run.py turns it off
        config.addinivalue_line(
            "markers", "filterwarnings(warning): of no effect without the plugin"
        )
    config.addinivalue_line("markers", f"{MARKER}(reason): its journals are not judged")
    config.pluginmanager.register(JournalWatch(config), "journal-watch")
    profiles.register()
    settings.load_profile("pr")  # the same examples every time


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests live to the end. No collection of garbage looks at them again: it takes long,
    and in a forked child it copies their pages."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


class JournalWatch:
    """Looks on while tests run. ``problems`` are the violations on disks of the running test."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.journals = self.transitions = self.exempt_tests = 0
        self.problems: list[str] = []
        self.leftover: list[str] = []  # found when no test could be blamed any more
        self.judging = False
        self.disks: weakref.WeakSet[SimDisk] = weakref.WeakSet()
        self._seen: set[int] = set()
        self._places: set[Path] = set()
        self._basetemp: Path | None = None
        self._undo = self._look_at_disks()

    def _look_at_disks(self) -> Any:
        """A disk is judged when it dies: a test may make thousands, none of them is kept alive."""
        watch, initialize = self, SimDisk.__init__

        def watched(disk: SimDisk, *arguments: Any, **keywords: Any) -> None:
            initialize(disk, *arguments, **keywords)
            if watch.judging:
                disk.judged = True  # type: ignore[attr-defined]
                watch.disks.add(disk)

        def dies(disk: SimDisk) -> None:
            if getattr(disk, "judged", False):
                watch.judge_disk(disk)

        patch = pytest.MonkeyPatch()
        patch.setattr(SimDisk, "__init__", watched)
        patch.setattr(SimDisk, "__del__", dies, raising=False)
        return patch.undo

    # ------------------------------------------------------------------------------ judging

    def judge_disk(self, disk: SimDisk) -> None:
        self._judge("a SimDisk", SimStorage(disk, "journal-watch"))

    def judge_place(self, place: Path) -> None:
        for directory, names, _ in os.walk(place):
            if ".ckptfsm" in names:
                self._judge(directory, directory)

    def _judge(self, what: str, root: Any) -> None:
        try:
            segments = read_segments(root)
            key = hash(frozenset(segments.items()))
            if not segments or key in self._seen:
                return
            self._seen.add(key)
            self.journals += 1
            self.transitions += check_segments(segments).transitions
        except (JournalViolation, OSError) as error:
            self.problems.append(f"{what}: {error}")

    # ---------------------------------------------------------------------------------- hooks

    @pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if is_for_gate(item.name):
                item.add_marker(pytest.mark.gate)
            for marker in item.iter_markers(MARKER):
                if len(marker.args) != 1 or not str(marker.args[0]).strip():
                    raise pytest.UsageError(f"{item.nodeid}: {MARKER} needs its reason")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.judging = item.get_closest_marker(MARKER) is None
        self.exempt_tests += not self.judging

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[Any]:
        self.problems.clear()
        result = yield
        place = getattr(item, "funcargs", {}).get("tmp_path")
        if place is not None:
            self._places.add(place)
            self._basetemp = place.parent
        if self.judging:
            for disk in list(self.disks):
                self.judge_disk(disk)
            if place is not None:
                self.judge_place(place)
            if self.problems:
                pytest.fail(
                    "\n".join(["I11: a journal is no legal trace", *self.problems[:5]]), False
                )
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.judging = False
        self._undo()
        self.problems.clear()
        if self._basetemp is not None:
            for place in set(self._basetemp.iterdir()) - self._places:
                if place.is_dir() and not place.is_symlink():
                    self.judge_place(place)
        self.leftover += self.problems
        told = getattr(self.config, "workeroutput", None)
        if told is not None:
            told["journals"] = [getattr(self, name) for name in _TOLD]
        if self.leftover and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """A process that shared the tests has ended. A process that died tells nothing: its test
        failed."""
        told = getattr(node, "workeroutput", {}).get("journals", ())
        for name, value in zip(_TOLD, told, strict=False):
            setattr(self, name, getattr(self, name) + value)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for problem in self.leftover:
            terminalreporter.write_line(f"I11: a journal is no legal trace: {problem}", red=True)
        terminalreporter.write_line(
            f"{self.journals} journals with {self.transitions} transitions judged legal; "
            f"{self.exempt_tests} tests damage theirs on purpose"
        )
