"""Jobs that run after a checkpoint is tracked (``on_tracked``): settings, and all decisions about them.

Each job has a record for each checkpoint. One that waits or runs ends as done, failed or missed, so
no checkpoint is passed over silently. A job that holds its checkpoints takes all of them, however long
its queue is, and tries those again that failed: the steps stay until it is done.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ckptfsm.core.documents import JobName, JobRecord, JobState, first_problem
from ckptfsm.core.errors import ConfigError, shorten
from ckptfsm.core.events import UNUSABLE
from ckptfsm.core.lifecycle import Checkpoint, State
from ckptfsm.core.parts import AttemptId

KEPT_MISSED = 8  # records of checkpoints that are gone, for each job
REASON_LETTERS = 2000
_LONGEST_PAUSE_S = 3600.0
_ENDED = (JobState.DONE, JobState.FAILED, JobState.MISSED)
_NOT_CONFIGURED = "the job is no longer configured"
_PASSED_OVER = "newer checkpoints came before its turn"
_WITHDRAWN = "its checkpoint was withdrawn before its turn"
_PRUNED = "its checkpoint was pruned before its turn"
_INTERRUPTED = "its process was ended during the last attempt"
_ROLLED_BACK = "its checkpoint was rolled back afterwards"
_DAMAGED = "its checkpoint was damaged afterwards"
Key = tuple[AttemptId, str]
COPY = "CKPTFSM_COPY"
"""The variable with the ``Copy`` of a job, as JSON."""

Attempts = Annotated[int, Field(ge=1, le=100)]
Pause = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Limit = Annotated[float, Field(gt=0, le=1e8, allow_inf_nan=False)]
Every = Annotated[int, Field(ge=1)]
Queue = Annotated[int, Field(ge=1, le=1000)]


class Task(BaseModel):
    """What is done with each tracked checkpoint: how often it is tried, and for which. See ``Job``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: JobName
    attempts: Attempts = 3
    backoff_s: Pause = 30.0
    timeout_s: Limit = 3600.0
    every: Every = 1
    queue: Queue = 8
    hold: bool = False
    after_rollback: bool = False


class Job(Task):
    """A job that runs after a checkpoint is tracked, in a process beside the trainer.

    - ``name``: lower-case letters, digits, ``_`` and ``-``.
    - ``command``: ``"module:function"``, called with the path of the checkpoint, its step and its
      metrics; or the arguments of a program, in which ``{path}`` and ``{step}`` are replaced.
    - ``attempts``: the number of attempts, ``backoff_s`` the pause after the first; it doubles then.
    - ``timeout_s``: an attempt that takes longer is killed, and has failed.
    - ``every``: only steps that are multiples of it.
    - ``queue``: checkpoints that may wait; with 1 a slow job takes the newest.
    - ``hold``: no checkpoint is pruned before the job is done for it, and all of them wait. After
      ``attempts`` it goes on with the others, and comes back after the longest pause.
    - ``after_rollback``: after a rollback the job runs once more for the latest checkpoint that stayed
      and that it was done for. For a job that tells others which step is the latest.
    - ``environment``: variables of the process, beside the trainer's.

    Raises ``ConfigError`` for bad values.
    """

    command: str | tuple[str, ...]
    environment: Mapping[str, str] = {}

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            said = f"a job of on_tracked: {first_problem(error)}"
            raise ConfigError(said, key="on_tracked") from error

    @field_validator("command")
    @classmethod
    def _check_command(cls, command: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not isinstance(command, str):
            if not command or not command[0]:
                raise ValueError("a program needs a name")
            return command
        pieces = [word for half in command.split(":") for word in half.split(".")]
        if command.count(":") != 1 or not all(word.isidentifier() for word in pieces):
            raise ValueError(f"a function is named as 'module:function', not {command!r}")
        return command


class Copy(BaseModel):
    """Copies of tracked checkpoints in another place, which a job makes beside the trainer.

    - ``to``: an object store, such as ``s3://bucket/run``, or a directory, such as ``file:///mnt/run``.
    - ``every``: only steps that are multiples of it.
    - ``before_prune``: no checkpoint is pruned before it was copied, see ``hold`` of a ``Job``.
    - ``keep``: so many copies stay in the place, those of the latest attempts; None: all of them.
    - ``limit_mb_s``: megabytes a second, over all files.
    - ``sole_writer``: only this job ever writes to the place, so a server may be used that ignores
      conditional requests.
    - ``replaces``: after a rollback, a step that is saved again takes the place of its earlier copy.
    - ``name`` of the job: made from ``to`` if it is None, so that what was copied to one place does not
      count for another.
    - ``attempts``, ``backoff_s``, ``timeout_s`` and ``queue`` are those of a ``Job``. What was copied in
      an attempt counts in the next.

    Raises ``ConfigError`` for bad values.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    to: Annotated[str, Field(min_length=1)]
    every: Every = 1
    before_prune: bool = True
    keep: Annotated[int, Field(ge=1, strict=True)] | None = None
    limit_mb_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    sole_writer: bool = False
    replaces: bool = False
    name: JobName | None = None
    attempts: Attempts = 3
    backoff_s: Pause = 30.0
    timeout_s: Limit = 21_600.0
    queue: Queue = 8

    def __init__(self, to: str | None = None, **values: Any) -> None:
        given = values if to is None else {"to": to, **values}
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise ConfigError(f"a copy: {first_problem(error)}", key="copies") from error

    @property
    def job(self) -> Job:
        """The job that makes the copies."""
        return Job(
            name=self.name or f"copy-{hashlib.sha256(self.to.encode()).hexdigest()[:8]}",
            attempts=self.attempts,
            backoff_s=self.backoff_s,
            timeout_s=self.timeout_s,
            every=self.every,
            queue=self.queue,
            hold=self.before_prune,
            after_rollback=True,
            command="ckptfsm.places.carry:carry",
            environment={COPY: self.model_dump_json()},
        )


def with_placeholders(command: Sequence[str], path: str, step: int) -> list[str]:
    """The arguments of a program, with ``{path}`` and ``{step}`` replaced; other braces stay."""
    values = {"{path}": path, "{step}": str(step)}
    # In one pass: the path may have braces of its own.
    return [re.sub(r"\{(path|step)\}", lambda found: values[found[0]], word) for word in command]


@dataclass(frozen=True, slots=True)
class Settled:
    """The records to put, those to remove, and those that wait, in the order of their turns."""

    put: tuple[JobRecord, ...]
    removed: tuple[JobRecord, ...]
    waiting: tuple[JobRecord, ...]


def key_of(record: JobRecord) -> Key:
    return record.of, record.job


def settle(
    jobs: Sequence[Task],
    records: Iterable[JobRecord],
    checkpoints: Mapping[AttemptId, Checkpoint],
    busy: Collection[JobRecord] = (),
    saved: Collection[AttemptId] = (),
    *,
    epoch: int = 0,
) -> Settled:
    """Compare the records with the checkpoints of the ledger. ``busy`` are left as they are.

    ``saved``: attempts that were tracked at some time, and may be gone since. ``epoch``: the owner's. A
    new job begins with the newest that it found, and takes all that it saved since; one that holds takes
    all that are there.
    """
    before = {key_of(each): each for each in records}
    untouched = {key_of(each) for each in busy}
    configured = {job.name: job for job in jobs}
    after = {
        key: record
        if key in untouched
        else _fate(record, checkpoints.get(record.of), configured.get(record.job))
        for key, record in before.items()
    }
    for job in jobs:
        after |= {key_of(new): new for new in _new_ones(job, before, checkpoints, saved, epoch)}
        after |= {key_of(late): late for late in _too_many(job, after.values(), untouched)}
        if job.after_rollback:
            ended = [each for key, each in after.items() if key not in untouched]
            after |= {key_of(each): each for each in _once_more(job, ended, checkpoints)}
    for name in {job for _, job in after}:
        of_job = [each for each in after.values() if each.job == name]
        gone = [each for each in of_job if not is_there(checkpoints.get(each.of))]
        for record in _to_forget(gone, of_job):
            del after[key_of(record)]
    order = {job.name: number for number, job in enumerate(jobs)}
    waiting = [
        each
        for key, each in after.items()
        if each.state is JobState.WAITING
        and key not in untouched
        and _is_tracked(each, checkpoints)
    ]
    return Settled(
        tuple(each for key, each in after.items() if before.get(key) != each),
        tuple(each for key, each in before.items() if key not in after),
        tuple(sorted(waiting, key=lambda each: (turn(each.of), order[each.job]))),
    )


def turn(of: AttemptId) -> tuple[int, int, int]:
    """The place of an attempt in the order of requests: steps may come again after a rollback.

    The step decides only between adopted checkpoints, which nobody requested.
    """
    return of.epoch, of.attempt, of.step


def _fate(record: JobRecord, checkpoint: Checkpoint | None, job: Task | None) -> JobRecord:
    """The record as it is to be, now that its checkpoint is in this state, or gone."""
    if record.state in _ENDED:
        return record
    if checkpoint is None:
        return missed(record, _PRUNED)
    if not is_there(checkpoint):
        return missed(record, _WITHDRAWN)
    return record if job is not None else missed(record, _NOT_CONFIGURED)


def is_there(checkpoint: Checkpoint | None) -> bool:
    """True if a checkpoint has its place; a prunable one may become tracked again."""
    return checkpoint is not None and checkpoint.state in (State.TRACKED, State.PRUNABLE)


def _is_tracked(record: JobRecord, checkpoints: Mapping[AttemptId, Checkpoint]) -> bool:
    found = checkpoints.get(record.of)
    return found is not None and found.state is State.TRACKED


def _new_ones(
    job: Task,
    records: Mapping[Key, JobRecord],
    checkpoints: Mapping[AttemptId, Checkpoint],
    saved: Collection[AttemptId],
    epoch: int,
) -> list[JobRecord]:
    """Records for the checkpoints that were tracked after the job's last record, see ``settle``.

    Those that are gone by now are missed.
    """
    tracked = {of for of, checkpoint in checkpoints.items() if checkpoint.state is State.TRACKED}
    last = max((turn(of) for of, name in records if name == job.name), default=None)
    due = sorted((of for of in tracked.union(saved) if of.step % job.every == 0), key=turn)
    if last is not None:
        new = [of for of in due if turn(of) > last]
    else:
        ours = {of for of in saved if of.epoch == epoch}  # adopted ones are not among the saved
        found = [of for of in due if of in tracked and of not in ours]
        new = [*found[-1:], *(of for of in due if of in ours)]
    if job.hold:  # those from before it was configured, too
        new = [of for of in due if of in new or (of in tracked and (of, job.name) not in records)]
    return [_fate(first_record(of, job.name), checkpoints.get(of), job) for of in new]


def _once_more(
    job: Task, records: Iterable[JobRecord], checkpoints: Mapping[AttemptId, Checkpoint]
) -> list[JobRecord]:
    """The records that change after a rollback: the latest that stayed waits again, and what came back.

    Those that were withdrawn stay done, and their reason tells that they were counted. One that was
    withdrawn as damaged was not given up: what the job made of it is the latest.
    """
    latest = max((c.step for c in checkpoints.values() if is_there(c)), default=None)
    done = [each for each in records if each.job == job.name and each.state is JobState.DONE]
    stayed = [each for each in done if _is_tracked(each, checkpoints)]
    above = [each for each in done if not each.reason and latest is not None and each.step > latest]
    damaged = [each for each in above if _is_damaged(checkpoints.get(each.of))]
    seen = [
        _with(each, JobState.DONE, _DAMAGED if each in damaged else _ROLLED_BACK) for each in above
    ]
    again = [each for each in stayed if each.reason == _ROLLED_BACK]  # and back from quarantine
    if len(damaged) < len(above):
        again += sorted(stayed, key=lambda each: each.step)[-1:]
    return [*seen, *(first_record(each.of, job.name) for each in again)]


def _is_damaged(checkpoint: Checkpoint | None) -> bool:
    return checkpoint is not None and checkpoint.reason in UNUSABLE


def first_record(of: AttemptId, job: str, reason: str = "") -> JobRecord:
    """The record of a job that waits, and did not begin yet."""
    return JobRecord(
        step=of.step,
        epoch=of.epoch,
        attempt=of.attempt,
        job=job,
        state=JobState.WAITING,
        reason=reason,
    )


def _too_many(job: Task, records: Iterable[JobRecord], busy: Collection[Key]) -> list[JobRecord]:
    """The oldest of those that wait, missed, if more wait than the queue takes."""
    if job.hold:
        return []
    waiting = sorted(
        (
            each
            for each in records
            if each.job == job.name and each.state is JobState.WAITING and key_of(each) not in busy
        ),
        key=lambda each: turn(each.of),
    )
    return [missed(each, _PASSED_OVER) for each in waiting[: -job.queue]]


def _to_forget(gone: Sequence[JobRecord], records: Sequence[JobRecord]) -> list[JobRecord]:
    """The records of checkpoints that are gone, but for the job's newest and the last missed."""
    newest = max((turn(each.of) for each in records), default=None)
    lost = [each for each in gone if each.state is JobState.MISSED]
    shown = sorted(lost, key=lambda each: turn(each.of))[-KEPT_MISSED:]
    return [
        each
        for each in gone
        if each.state in _ENDED and turn(each.of) != newest and each not in shown
    ]


def begin_again(
    jobs: Sequence[Task],
    records: Iterable[JobRecord],
    checkpoints: Mapping[AttemptId, Checkpoint],
) -> list[JobRecord]:
    """The records that change when a new process begins: those that an earlier process left running.

    Such a job waits again, or has failed if that was its last attempt. One that holds its checkpoint
    waits again until it is done.
    """
    configured = {job.name: job for job in jobs}
    changed = []
    for record in records:
        job = configured.get(record.job)
        if job is not None and job.hold and _is_tracked(record, checkpoints):
            if record.state not in (JobState.DONE, JobState.WAITING):
                changed.append(waits_again(record))
            continue
        if record.state in _ENDED or job is None:
            continue
        if record.begun >= job.attempts:
            changed.append(_with(record, JobState.FAILED, record.reason or _INTERRUPTED))
        elif record.state is JobState.RUNNING:
            changed.append(waits_again(record))
    return changed


def waits_again(record: JobRecord) -> JobRecord:
    """The record of a job that did not end as done, and is to be tried again."""
    interrupted = record.state is JobState.RUNNING
    return _with(record, JobState.WAITING, _INTERRUPTED if interrupted else record.reason)


def begun(record: JobRecord) -> JobRecord:
    """The record when its next attempt begins."""
    fresh = _with(record, JobState.RUNNING, record.reason)
    return fresh.model_copy(update={"begun": record.begun + 1})


def given_back(record: JobRecord) -> JobRecord:
    """The record of an attempt that the trainer's orderly end broke off: that does not count."""
    left = max(0, record.begun - 1) if record.state is JobState.RUNNING else record.begun
    return _with(record, JobState.WAITING, record.reason).model_copy(update={"begun": left})


def after_attempt(record: JobRecord, job: Task, problem: str) -> JobRecord:
    """The record after an attempt that ended with ``problem``, "" for success."""
    if not problem:
        return _with(record, JobState.DONE, "")
    again = record.begun < job.attempts
    return _with(record, JobState.WAITING if again else JobState.FAILED, problem)


def missed(record: JobRecord, reason: str) -> JobRecord:
    return _with(record, JobState.MISSED, reason)


def pause_s(job: Task, attempts: int) -> float:
    """Seconds from a failed attempt to the next, after so many attempts."""
    longest = max(job.backoff_s, _LONGEST_PAUSE_S)
    if job.hold and attempts >= job.attempts:
        return longest
    return min(longest, job.backoff_s * 2.0 ** min(attempts - 1, 30))


def _with(record: JobRecord, state: JobState, reason: str) -> JobRecord:
    return record.model_copy(
        update={"state": state, "reason": shorten(reason, REASON_LETTERS), "at": ""}
    )
