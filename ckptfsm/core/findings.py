"""Findings about a root, for ``ckptfsm doctor``: what is wrong, in plain words, and the way out. Pure.

Facts and decisions are those of a start, so a finding never promises another outcome.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType

from ckptfsm.core.documents import JobRecord, JobState
from ckptfsm.core.errors import DamagedRoot
from ckptfsm.core.evidence import Evidence, Owner, Ownership
from ckptfsm.core.jobs import turn
from ckptfsm.core.layout import JOURNAL, parse_aside, segment_name
from ckptfsm.core.ledger import Ledger
from ckptfsm.core.lifecycle import State
from ckptfsm.core.recovery import Plan
from ckptfsm.core.recovery_rules import Decision
from ckptfsm.core.rollback import Intent


class Severity(str, Enum):
    """How bad a finding is. ``BROKEN``: data is damaged, or a start would be refused."""

    BROKEN = "broken"
    REPAIRED = "repaired by a start"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding. ``code`` names its section in the runbook; ``remedy`` is a command or an advice."""

    code: str
    severity: Severity
    words: str
    remedy: str
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Situation:
    """The facts about a root that findings are made from.

    - ``decided``: the plan of a start, or the error with which it would be refused.
    - ``quarantined``, ``trashed``, ``fetching``: names of directories there.
    - ``processes``: processes of this host that have files of the root open, beside its owner.
    - ``forked``: processes of this host that a trainer forked, which have only its lock and journal.
    - ``free_bytes``: free on the disk.
    - ``newest_segment``: the epoch of the journal's newest file; 0 if there is none.
    - ``failed``: the saves of the newest run that failed since it tracked one, in words.
    - ``lost_segments``: files of the journal that are sealed, and gone.
    - ``strangers``: files in the directory of a tracked step that its manifest does not list, by step.
    - ``jobs``: the records of jobs. ``held``: the jobs that hold each step, and are not done.
    """

    ledger: Ledger
    evidence: Evidence
    intent: Intent
    owner: Owner
    decided: Plan | DamagedRoot
    quarantined: tuple[str, ...] = ()
    trashed: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()
    free_bytes: int | None = None
    lost_segments: tuple[str, ...] = ()
    strangers: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    forked: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    newest_segment: int = 0
    jobs: tuple[JobRecord, ...] = ()
    held: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    fetching: tuple[str, ...] = ()


_START = "start the job, or: ckptfsm doctor --fix"
_COMPLETE = "start the job: it completes the save, and doctor --fix cannot"
_FALL_BACK = "put a good copy back, or start the job, or: ckptfsm doctor --fix"
_PUT_BACK = "put a good copy back; begin again only if there is none"
_PUT_BACK_OR_RESTORE = "put a good copy back, or: ckptfsm quarantine restore {name}"
_AS_SAID = "do as the message says: nothing is lost, and no step has to be given up"
_BY_DAY = "look at .ckptfsm/quarantine when there is time: it may be the last copy"
_FETCH = "fetch it again: what is there counts; or see the runbook"
_MOVE_OUT = "look at it, then move it out of the root"
_MOVE_FILES_OUT = "move them out: the step takes them along when it is pruned"
_NAMED = 3  # of many files
_PUT_FILE_BACK = "put that file back before any start, if a copy has it; see the runbook"
_MEND = "mend what the error names, then see in ckptfsm ls that a step is tracked"
_MEND_JOB = "mend what the error names, then run the job for that step by hand"
_MEND_HELD = "mend what the error names: the job is tried again within an hour"
_NOT_MISSED = "run the job by hand; hold=True keeps the steps until it is done"
_BEHIND = "see in ckptfsm show what the job waits for; without an owner, for one"
_WAIT = "nothing now, the job lives: its next save and start repair this"
_ONLY_COPY = "keep the job alive until its next save: it has the only good copy"
# Nothing starts and nothing is repaired beside a living job.
_BESIDE_A_JOB = MappingProxyType({_START: _WAIT, _COMPLETE: _WAIT, _FALL_BACK: _WAIT})
_BROKEN, _REPAIRED, _NOTE = Severity.BROKEN, Severity.REPAIRED, Severity.NOTE

# For each rule of recovery: the code, the severity, and the way out.
BY_RULE: Mapping[str, tuple[str, Severity, str]] = MappingProxyType(
    {
        "journal_lags_behind_publishing": ("save-not-tracked", _REPAIRED, _START),
        "roll_forward": ("save-to-complete", _REPAIRED, _COMPLETE),
        "tracker_lags_behind_journal": ("save-not-tracked", _REPAIRED, _START),
        "staging_incomplete": ("save-interrupted", _REPAIRED, _START),
        "name_taken": ("save-interrupted", _REPAIRED, _START),
        "writers_died": ("save-interrupted", _REPAIRED, _START),
        "failed": ("save-interrupted", _REPAIRED, _START),
        "not_newer": ("save-interrupted", _REPAIRED, _START),
        "whole": ("save-not-tracked", _NOTE, ""),
        "prune_was_cut_short": ("prune-interrupted", _REPAIRED, _START),
        "prune_had_not_begun": ("prune-interrupted", _REPAIRED, _START),
        "damaged": ("checkpoint-damaged", _BROKEN, _FALL_BACK),
        "missing": ("checkpoint-missing", _BROKEN, _FALL_BACK),
        "left_in_the_trash": ("withdrawal-interrupted", _REPAIRED, _START),
        "left_at_its_name": ("withdrawal-interrupted", _REPAIRED, _START),
        "put_back": ("withdrawal-interrupted", _REPAIRED, _START),
        "moved_aside": ("withdrawal-interrupted", _NOTE, ""),
        "never_in_use": (
            "directory-newer-than-tracker",
            _BROKEN,
            "move it out of the root; to use it, see the runbook",
        ),
        "unknown_and_complete": ("directory-to-adopt", _REPAIRED, _START),
        "unknown": ("directory-unknown", _NOTE, _MOVE_OUT),
        "": ("name-unknown", _NOTE, _MOVE_OUT),
    }
)


def examine(facts: Situation) -> list[Finding]:
    """The findings about a root, the worst first. Nothing is wrong if there is none.

    While an owner lives, or may live on another host, saves in flight and prunes are left out: they
    are under way.
    """
    found = [
        *_of_the_cut(facts),
        *_of_the_plan(facts),
        *_of_the_tracker(facts),
        *_of_names(facts),
        *_of_the_host(facts),
        *_of_failures(facts),
        *_of_jobs(facts),
    ]
    if facts.owner.ownership is Ownership.LIVES:
        found = [
            replace(each, remedy=_BESIDE_A_JOB.get(each.remedy, each.remedy)) for each in found
        ]
    order = list(Severity)
    return sorted(found, key=lambda finding: order.index(finding.severity))


def _of_the_plan(facts: Situation) -> Iterator[Finding]:
    if isinstance(facts.decided, DamagedRoot):
        yield _of_refusal(facts.decided, facts)
        return
    if facts.intent.unfinished and not facts.owner.may_live:
        words = "a fresh start" if facts.intent.target is None else "a rollback"
        yield Finding("rollback-interrupted", _REPAIRED, f"{words} was interrupted", _START)
    for decision in facts.decided.decisions:
        code, severity, remedy = BY_RULE[decision.rule]
        repaired = severity is _REPAIRED or code == "name-unknown"
        under_way = facts.owner.may_live and repaired  # nothing is wrong then
        if not under_way and not _is_no_directory(facts, decision):
            words = f"{decision.subject}: {decision.why}; a start would say: {decision.result}"
            yield Finding(code, severity, words, remedy, decision.step)


def _is_no_directory(facts: Situation, decision: Decision) -> bool:
    """True for a link or a file that no journal explains: its name is told of by itself."""
    there = facts.evidence.published.get(decision.step) if decision.step is not None else None
    unknown = decision.rule in ("never_in_use", "unknown")
    return unknown and there is not None and there.found == "no_directory"


def _of_refusal(refused: DamagedRoot, facts: Situation) -> Finding:
    """A start would be refused. A rollback that cannot be completed must not end in a fresh start.

    Facts with evidence of checkpoints tell of a root where none of them can be used.
    """
    unfinished = facts.intent.unfinished
    hopeless = unfinished != "fresh" and "evidence" in refused.facts
    if unfinished and not hopeless:
        return Finding("rollback-refused", _BROKEN, refused.message, _AS_SAID)
    if facts.owner.ownership is Ownership.LIVES and "evidence" in refused.facts:
        why = "; ".join(refused.facts["evidence"])
        words = f"{facts.owner}, and no checkpoint is left that a start could resume from: {why}"
        return Finding("nothing-to-resume-from", _BROKEN, words, _ONLY_COPY)
    if facts.evidence.unnamed:
        return Finding("nothing-to-resume-from", _BROKEN, refused.message, _AS_SAID)
    aside = {of: name for name in facts.quarantined if (of := parse_aside(name)) is not None}
    if not aside:
        return Finding("nothing-to-resume-from", _BROKEN, refused.message, _PUT_BACK)
    newest = aside[max(aside, key=lambda of: (of.step, of.epoch, of.attempt))]
    remedy = _PUT_BACK_OR_RESTORE.format(name=newest)
    return Finding("nothing-to-resume-from", _BROKEN, refused.message, remedy)


def _of_the_cut(facts: Situation) -> Iterator[Finding]:
    """The newest owner's file of the journal is gone, as steps on disk show that nothing explains.

    An epoch alone is no sign: a start may be refused after it took one.
    """
    epoch = facts.owner.epoch
    if not 0 < facts.newest_segment < epoch or isinstance(facts.decided, DamagedRoot):
        return
    rules = {decision.rule for decision in facts.decided.decisions}
    if rules & {"missing", "never_in_use", "unknown_and_complete"}:
        file = f"{JOURNAL}/{segment_name(epoch)}"
        words = f"{file} is not there, and epoch {epoch} owned the root: its saves are not known"
        yield Finding("journal-cut", _BROKEN, words, _PUT_FILE_BACK)


def _of_failures(facts: Situation) -> Iterator[Finding]:
    """All saves of the newest run failed since its last tracked one. A single one may be chance."""
    if not facts.failed:
        return
    many, latest = len(facts.failed), facts.ledger.latest()
    since = f"since step {latest.step}, the latest" if latest is not None else "and none is tracked"
    words = f"{many} save{'s' if many > 1 else ''} failed {since}; the last was {facts.failed[-1]}"
    yield Finding("saves-failing", _BROKEN if many > 1 else _NOTE, words, _MEND)


def _of_jobs(facts: Situation) -> Iterator[Finding]:
    """The jobs that failed, were missed, or hold several steps: each once, with its newest step."""
    by_job: dict[tuple[str, JobState], list[JobRecord]] = {}
    for record in sorted(facts.jobs, key=lambda each: turn(each.of)):
        by_job.setdefault((record.job, record.state), []).append(record)
    for (job, state), records in sorted(by_job.items(), key=lambda each: each[0][0]):
        newest, many = records[-1], len(records)
        steps = f"{many} step{'s' if many > 1 else ''}, the last was step {newest.step}"
        if state is JobState.FAILED:
            held = any(job in jobs for jobs in facts.held.values())
            words = f"the job {job} failed for {steps}: {newest.reason}"
            remedy = _MEND_HELD if held else _MEND_JOB
            yield Finding("job-failed", _NOTE, words, remedy, newest.step)
        elif state is JobState.MISSED:
            words = f"the job {job} was missed for {steps}: {newest.reason}"
            yield Finding("job-missed", _NOTE, words, _NOT_MISSED, newest.step)
    for job in sorted({job for jobs in facts.held.values() for job in jobs}):
        steps_held = [step for step, jobs in facts.held.items() if job in jobs]
        if len(steps_held) > 1:  # one is that of the newest checkpoint, as a rule
            words = f"the job {job} holds {len(steps_held)} steps, from step {min(steps_held)} on"
            yield Finding("steps-held", _NOTE, words, _BEHIND, min(steps_held))


def _of_the_tracker(facts: Situation) -> Iterator[Finding]:
    """The tracker, compared with the journal: a start repairs it, unless it is refused."""
    if isinstance(facts.decided, DamagedRoot):
        return
    tracker, latest = facts.evidence.tracker, facts.ledger.latest()
    if tracker.found == "torn":
        words = (
            "the tracker is empty, torn, or no number: trainers without the library cannot start"
        )
        yield Finding("tracker-unreadable", _REPAIRED, words, _START)
    elif tracker.found == "missing" and latest is not None and not facts.intent.unfinished:
        words = f"the tracker is missing, and step {latest.step} is tracked by the journal"
        yield Finding("tracker-missing", _REPAIRED, words, _START, latest.step)
    elif tracker.found == "release" and latest is not None:
        words = f"the tracker says 'release', the journal's latest is step {latest.step}"
        yield Finding("tracker-disagrees", _REPAIRED, words, _START, latest.step)
    elif tracker.step is not None:
        yield from _of_named_step(facts, tracker.step, facts.decided.survivors)


def _of_named_step(facts: Situation, named: int, survivors: frozenset[int]) -> Iterator[Finding]:
    latest = facts.ledger.latest()
    if named not in survivors:
        words = f"the tracker names step {named}, which is no complete checkpoint"
        yield Finding("tracker-names-no-checkpoint", _BROKEN, words, _START, named)
    elif latest is not None and named < latest.step and not facts.intent.unfinished:
        words = f"the tracker names step {named}, the journal's latest is step {latest.step}"
        yield Finding("tracker-disagrees", _REPAIRED, words, _START, named)


def _of_names(facts: Situation) -> Iterator[Finding]:
    evidence = facts.evidence
    for step, there in sorted(evidence.published.items()):
        if there.found == "no_directory":
            words = f"{there.detail}, where a checkpoint's directory should be"
            yield Finding("name-not-a-directory", _BROKEN, words, _MOVE_OUT, step)
    for name in evidence.mounts:
        words = f"{name} is on another file system: nothing is moved or deleted there"
        yield Finding("directory-on-another-device", _NOTE, words, "unmount it, or leave it")
    for step, files in sorted(facts.strangers.items()):
        named = ", ".join(files[:_NAMED]) + (", ..." if len(files) > _NAMED else "")
        words = f"step {step}: {len(files)} {'files' if len(files) > 1 else 'file'}"
        words += f" in its directory, but not of this checkpoint: {named}"
        yield Finding("files-of-others", _NOTE, words, _MOVE_FILES_OUT, step)
    if facts.quarantined:
        words = f"{_names(facts.quarantined)} in quarantine: the library deletes nothing there"
        yield Finding("quarantine-in-use", _NOTE, words, _BY_DAY)
    if facts.trashed and facts.owner.ownership is not Ownership.LIVES:
        words = f"{_names(facts.trashed)} in the trash; a start deletes those given up"
        yield Finding("trash-in-use", _NOTE, words, "")
    if facts.fetching:
        words = f"{_names(facts.fetching)} half fetched, and nothing deletes them"
        yield Finding("fetch-cut-short", _NOTE, words, _FETCH)
    if facts.lost_segments:
        words = f"old files of the journal are gone: {', '.join(facts.lost_segments)}"
        yield Finding("journal-shortened", _REPAIRED, words, _START)


def _names(of: tuple[str, ...]) -> str:
    return f"{len(of)} name{'s' if len(of) > 1 else ''}"


def _of_the_host(facts: Situation) -> Iterator[Finding]:
    owner = facts.owner
    if owner.stopped:
        words = f"{owner}: it saves nothing, and no other job can start"
        remedy = f"let it go on: kill -CONT {owner.pid}, or end it: kill -9 {owner.pid}"
        yield Finding("owner-stopped", _BROKEN, words, remedy)
    if owner.ownership is Ownership.ENDED:
        words = f"{owner}: it crashed or was killed"
        yield Finding("owner-ended", _NOTE, words, "start the job")
    if owner.ownership is Ownership.ELSEWHERE:
        here = "container" if owner.in_container else "host"
        words = f"{owner}: this {here} cannot see whether it lives"
        yield Finding("owner-elsewhere", _NOTE, words, f"look for pid {owner.pid} on {owner.host}")
    if owner.ownership is not Ownership.LIVES:
        yield from _of_processes(facts)
    sizes = [c.shard_bytes for c in facts.ledger.in_state(State.TRACKED)]
    if facts.free_bytes is not None and sizes and facts.free_bytes < sizes[-1]:
        words = f"{facts.free_bytes} bytes are free, the latest checkpoint has {sizes[-1]}"
        yield Finding("disk-full", _BROKEN, words, "free space: the next save would be refused")


def _of_processes(facts: Situation) -> Iterator[Finding]:
    """Processes that write into the root. Those of a living job are its writers."""
    if facts.forked:
        words = (
            f"processes that a trainer forked still have its lock open: {'; '.join(facts.forked)}"
        )
        remedy = f"start the job; if their trainer is gone, end them: kill {_pids(facts.forked)}"
        yield Finding("processes-left", _NOTE, words, remedy)
    if not facts.processes:
        return
    words = f"processes have files of the root open for writing: {'; '.join(facts.processes)}"
    if facts.owner.ownership is Ownership.ELSEWHERE:
        remedy = "leave them alone if the owner lives, else end them before a start"
        yield Finding("processes-left", _NOTE, words, remedy)
        return
    remedy = f"look at each, then end them before a start: kill {_pids(facts.processes)}"
    yield Finding("processes-left", _BROKEN, words, remedy)


def _pids(processes: tuple[str, ...]) -> str:
    return " ".join(each.partition(" ")[0] for each in processes)
