"""All settings of a manager, in one frozen model: from keyword arguments, a dict or TOML.

Nothing reads the environment. Times are in seconds and end in ``_s``.
"""

from __future__ import annotations

import difflib
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ckptfsm.core.documents import first_problem
from ckptfsm.core.errors import ConfigError
from ckptfsm.core.jobs import Copy, Job
from ckptfsm.core.layout import LayoutName
from ckptfsm.core.preemption import unix_time
from ckptfsm.core.recovery import Resume
from ckptfsm.core.retention import KeepAll, Policy, parse_policy

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover  only on Python 3.10
    import tomli as tomllib

Seconds = Annotated[float, Field(gt=0, le=1e8, allow_inf_nan=False)]
"""At most three years: above 9e9 seconds clocks overflow."""
Steps = Annotated[int, Field(ge=1)]
Verify = Literal["none", "sizes", "digests"]
_WORDS = ("raise", "warn")


class Settings(TypedDict, total=False):
    """The fields of ``CheckpointConfig`` as keyword arguments, for editors and type checkers."""

    retention: Policy | Mapping[str, Any]
    save_interval_steps: int | None
    save_steps: Iterable[int]
    save_interval_s: float | None
    preemption_signals: Sequence[str]
    end_of_allocation: Callable[[], float | None] | float | None
    sync: bool
    on_failure: Literal["raise", "warn"] | int | str
    on_busy: Literal["wait", "skip", "raise"]
    ranks_disagree: Literal["warn", "refuse"]
    resume: Resume
    takeover: bool
    verify: Verify
    layout: LayoutName
    writer_files: int
    engine: Literal["auto", "eager", "gated", "fork"]
    writer_nice: int
    read_twice: bool
    progress: Literal["off", "auto", "log"]
    common_state: Literal["auto", "file"]
    reshard_drops: Sequence[str]
    agree_when_idle: bool
    exchange_every: int
    poll_warning_steps: int
    writer_timeout_s: float
    busy_timeout_s: float
    close_timeout_s: float
    exit_timeout_s: float
    effect_timeout_s: float
    exchange_timeout_s: float
    visibility_timeout_s: float
    reader_timeout_s: float
    on_tracked: Sequence[Job]
    copies: Sequence[Copy]
    fetch_from: str | None
    jobs_drain_s: float


# The ranks of a job would wait for each other in different exchanges if these differed.
_OF_ALL_RANKS = (
    "save_interval_steps",
    "save_steps",
    "sync",
    "on_failure",
    "on_busy",
    "ranks_disagree",
    "verify",
    "layout",
    "common_state",
    "reshard_drops",
    "exchange_every",
)
_AGREED = "save_interval_s, end_of_allocation, agree_when_idle or preemption_signals, given or not,"


class CheckpointConfig(BaseModel):
    """The configuration of a ``CheckpointManager``; each field describes itself.

    Raises ``ConfigError`` for bad values.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _as_config_error(error) from error

    retention: Policy = Field(
        default_factory=KeepAll,
        description="which tracked checkpoints to keep, see [retention](retention.md)",
    )
    save_interval_steps: Steps | None = Field(
        default=None, description="a save is due at every multiple of it; steps"
    )
    save_steps: frozenset[int] = Field(
        default=frozenset(), description="a save is due at these steps as well"
    )
    save_interval_s: Seconds | None = Field(
        default=None, description="a save is due when this much time has passed; seconds"
    )
    preemption_signals: tuple[str, ...] = Field(
        default=(), description="names of signals after which a save is due, such as `SIGTERM`"
    )
    end_of_allocation: Callable[[], float | None] | float | None = Field(
        default=None,
        description="Unix time of the end of the job, or a function that returns it, or None while it "
        "is not known: a last save is due early enough, see [preemption](preemption.md)",
    )
    sync: bool = Field(
        default=False, description="`save` waits until the checkpoint is tracked, failed or blocked"
    )
    on_failure: Literal["raise", "warn"] | Annotated[int, Field(ge=1, le=1000)] = Field(
        default="raise",
        description="a failed save raises, warns, or is tried again that many times in a row",
    )
    on_busy: Literal["wait", "skip", "raise"] = Field(
        default="wait", description="reaction of `save` to another save that is in flight"
    )
    ranks_disagree: Literal["warn", "refuse"] = Field(
        default="warn",
        description="reaction of `save` to plain values, bytes or file trees that differ by rank, of "
        "which one rank's is kept for all: a warning for each key, or a refused save, see "
        "[values of each rank](howto-plain-torch.md#values-of-each-rank)",
    )
    resume: Resume = Field(
        default="fallback", description="reaction of a start to a damaged or missing checkpoint"
    )
    takeover: bool = Field(
        default=False, description="take the root although the job that has it seems to live"
    )
    verify: Verify = Field(
        default="digests", description="depth of the check that `restore` makes before it loads"
    )
    layout: LayoutName = Field(
        default="megatron",
        description="names of steps: `megatron` (`iter_0000100`), `verl` (`global_step_100`), `titan` "
        "(`step-100`), `hf` (`checkpoint-100`) or `accelerate` (`checkpoint_100`)",
    )
    writer_files: Annotated[int, Field(ge=1, le=64)] = Field(
        default=2, description="files per rank and part"
    )
    engine: Literal["auto", "eager", "gated", "fork"] = Field(
        default="auto",
        description="how a save gets its copy of the state: the trainer copies it before `save` returns "
        "(`eager`), a writer process reads it before `before_update` returns (`gated`), or the writer "
        "is forked (`fork`), see [the write engine](engine.md)",
    )
    writer_nice: Annotated[int, Field(ge=0, le=19)] = Field(
        default=10,
        description="nice value of the writer process, which also writes at low priority",
    )
    read_twice: bool = Field(
        default=False,
        description="read the state of a gated save a second time, and fail the save if it differs: "
        "finds changes between the readings that torch does not count",
    )
    progress: Literal["off", "auto", "log"] = Field(
        default="off",
        description="rank 0 shows the save in flight: on a line of the terminal, if standard error is "
        "one and rich is installed, else in one log line at its end (`auto`), or in the log line alone "
        "(`log`), see [progress](engine.md#progress)",
    )
    common_state: Literal["auto", "file"] = Field(
        default="auto",
        description="place of the values that all ranks have in common: the one that the installed "
        "megatron-core uses (`auto`), or `common.pt` (`file`), which every megatron-core reads",
    )
    reshard_drops: tuple[str, ...] = Field(
        default=("rng_state",),
        description="keys of sharded objects that may be left out under another sharding; a value "
        "replaces the default, so name `rng_state` in it",
    )
    agree_when_idle: bool = Field(
        default=False,
        description="`poll` agrees also while nothing is in flight: `request_save` needs it",
    )
    exchange_every: Steps = Field(
        default=10, description="polls from one agreement to the next while nothing is in flight"
    )
    poll_warning_steps: Steps = Field(
        default=50,
        description="steps without a `poll`, while a save is in flight, after which a warning comes",
    )
    writer_timeout_s: Seconds = Field(
        default=1800.0, description="a writer that takes longer is killed; seconds"
    )
    busy_timeout_s: Seconds = Field(
        default=1800.0, description="longest wait of `save`, `wait`, `wait_until_finished`; seconds"
    )
    close_timeout_s: Seconds = Field(
        default=1800.0, description="longest wait of `close` for the save in flight; seconds"
    )
    exit_timeout_s: Seconds = Field(
        default=10.0,
        description="longest wait for this rank's writer when an exception ends the run; seconds",
    )
    effect_timeout_s: Seconds = Field(
        default=300.0, description="longest wait for one answer of the disk; seconds"
    )
    exchange_timeout_s: Seconds = Field(
        default=600.0, description="longest wait of the ranks for each other; seconds"
    )
    visibility_timeout_s: Seconds = Field(
        default=10.0,
        description="longest wait for a name that is not visible on this rank's host yet; seconds",
    )
    reader_timeout_s: Seconds = Field(
        default=600.0,
        description="a reader's lease that did not change for so long expires; seconds",
    )
    on_tracked: tuple[Job, ...] = Field(
        default=(),
        description="jobs that run after a checkpoint is tracked, see [jobs](on-tracked.md)",
    )
    copies: tuple[Copy, ...] = Field(
        default=(),
        description="places that get a copy of each tracked checkpoint, see [copies](howto-copies.md)",
    )
    fetch_from: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="a place with copies, from which a root without a checkpoint begins, see "
        "[copies](howto-copies.md#begin-from-a-copy)",
    )
    jobs_drain_s: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = Field(
        default=0.0,
        description="longest wait of `close` for jobs that wait or run, on rank 0; seconds",
    )

    @field_validator("on_failure", mode="before")
    @classmethod
    def _read_on_failure(cls, value: Any) -> Any:
        """``save_again(n)`` as text, for TOML; the function of that name gives the number."""
        found = re.fullmatch(r"save_again\((\d{1,4})\)", value) if isinstance(value, str) else None
        if isinstance(value, bool) or (
            isinstance(value, str) and not found and value not in _WORDS
        ):
            raise ConfigError(
                f"on_failure is 'raise', 'warn' or save_again(n), not {value!r}", key="on_failure"
            )
        return int(found[1]) if found else value

    @field_validator("preemption_signals", "save_steps", "reshard_drops", mode="before")
    @classmethod
    def _refuse_one(cls, value: Any, field: ValidationInfo) -> Any:
        """Refuse one value in the place of several."""
        if isinstance(value, (str, int)):
            name, one = field.field_name, getattr(value, "name", value)  # a signal's name
            raise ConfigError(f"{name} takes several values: give {name}=({one!r},)", key=name)
        return value

    @field_validator("preemption_signals")
    @classmethod
    def _check_signals(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in signal.Signals.__members__:
                raise ConfigError(f"{name!r} is not the name of a signal, such as 'SIGTERM'")
            if name in ("SIGKILL", "SIGSTOP"):
                raise ConfigError(f"no process can catch {name}: name another signal")
        return names

    @field_validator("end_of_allocation", mode="before")
    @classmethod
    def _check_end(cls, value: Any) -> Any:
        return value if value is None or callable(value) else unix_time(value)

    @field_validator("retention", mode="before")
    @classmethod
    def _read_retention(cls, value: Any) -> Policy:
        return parse_policy(value)

    @model_validator(mode="before")
    @classmethod
    def _suggest(cls, values: Any) -> Any:
        for key in values if isinstance(values, Mapping) else ():
            if key not in cls.model_fields:
                near = difflib.get_close_matches(str(key), cls.model_fields, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(f"unknown configuration key {key!r}{hint}", key=key)
        return values

    @model_validator(mode="after")
    def _check_jobs(self) -> CheckpointConfig:
        names = [job.name for job in self.jobs]
        if len(set(names)) < len(names):
            said = f"two jobs of on_tracked or copies have one name: {names}"
            raise ConfigError(said, key="on_tracked")
        return self

    @model_validator(mode="after")
    def _check_deadlines(self) -> CheckpointConfig:
        if self.effect_timeout_s >= self.exchange_timeout_s:
            raise ConfigError(
                "effect_timeout_s must be shorter than exchange_timeout_s: the other ranks wait in "
                "an exchange while the coordinator works"
            )
        return self

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All that runs after a checkpoint is tracked."""
        return (*self.on_tracked, *(copy.job for copy in self.copies))

    @property
    def holds(self) -> dict[str, int]:
        """The ``every`` of each job that holds its checkpoints, by name."""
        return {job.name: job.every for job in self.jobs if job.hold}

    @property
    def saves_again(self) -> int:
        """The number of retries of a failed save, each at a later step."""
        return self.on_failure if isinstance(self.on_failure, int) else 0

    @property
    def makes_saves_due(self) -> bool:
        """False if ``should_save`` is never true, but for the last step."""
        on_steps = self.save_interval_steps is not None or bool(self.save_steps)
        return on_steps or bool(self.saves_again) or self.needs_agreement

    @property
    def needs_agreement(self) -> bool:
        """True if a policy must be agreed among ranks while nothing is in flight."""
        timed = self.save_interval_s is not None or self.end_of_allocation is not None
        return self.agree_when_idle or timed or bool(self.preemption_signals)

    def of_all_ranks(self) -> dict[str, object]:
        """The settings that say which calls of a rank meet those of the others, by name."""
        return {name: getattr(self, name) for name in _OF_ALL_RANKS} | {
            _AGREED: self.needs_agreement
        }


def save_again(times: int) -> int:
    """The value of ``on_failure`` that saves again at the next step, at most ``times`` times."""
    if isinstance(times, bool) or not isinstance(times, int) or times < 1:
        raise ConfigError(f"save_again needs a whole number of at least 1, not {times!r}")
    return times


def make_config(values: Mapping[str, Any]) -> CheckpointConfig:
    """A configuration from plain values. Raises ``ConfigError``."""
    return CheckpointConfig(**values)


def config_of(
    config: CheckpointConfig | Mapping[str, Any] | None, settings: Mapping[str, Any]
) -> CheckpointConfig:
    """The configuration of a call that takes either one or keyword arguments."""
    if config is not None and settings:
        raise ConfigError("give either a config or keyword arguments")
    if isinstance(config, CheckpointConfig):
        return config
    return make_config(settings if config is None else config)


def _as_config_error(error: ValidationError) -> ConfigError:
    """The ``ConfigError`` that a validator raised, with its facts; any other error as a new one."""
    for problem in error.errors(include_url=False):
        cause = problem.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            return cause
    return ConfigError(f"configuration: {first_problem(error)}")


def load_config(path: str | Path, table: str = "ckptfsm") -> CheckpointConfig:
    """A configuration from a TOML file: its ``[ckptfsm]`` table, or the whole file without one.

    Raises ``ConfigError``, which names the file.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", file=str(path)) from error
    return make_config(values.get(table, values))


def require_fork(config: CheckpointConfig, savers: str) -> CheckpointConfig:
    """``config``, for ``savers`` that always fork. Raises ``ConfigError`` if it asks for an engine."""
    if config.engine not in ("auto", "fork"):
        said = f"{savers} are written by forked processes: engine={config.engine!r} has no effect"
        raise ConfigError(said, key="engine")
    return config
