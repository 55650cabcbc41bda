"""The command of the job that copies each tracked checkpoint: ``ckptfsm.places.carry:carry``.

Its settings are JSON in the variable ``CKPTFSM_COPY``. An error ends the process with a line that names
place, object and what to do: the line is the reason of the job's attempt.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from ckptfsm.adapters.posix_storage import opened_storage
from ckptfsm.core.documents import JobState, first_problem
from ckptfsm.core.errors import CkptFsmError, ConfigError, describe
from ckptfsm.core.jobs import COPY, Copy
from ckptfsm.disk.job_records import read_records
from ckptfsm.places.carrying import Carrier, Throttle, run_of
from ckptfsm.places.place import place_at


def carry(path: str, step: int, metrics: Mapping[str, float]) -> None:
    """Copy the published directory ``path``. The process ends with status 1 if it is not committed."""
    try:
        copy_directory(Path(path), settings_of(os.environ.get(COPY, "")))
    except CkptFsmError as error:
        sys.exit(f"{error}")
    except OSError as error:
        sys.exit(describe(error))


def settings_of(text: str) -> Copy:
    """The settings in a variable. Raises ``ConfigError``."""
    try:
        return Copy.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"{COPY}: {first_problem(error)}", key="copies") from error


def copy_directory(path: Path, settings: Copy) -> None:
    """Copy a published directory of a root. Raises as ``Carrier.carry``."""
    place = place_at(settings.to)
    name = settings.job.name
    with opened_storage(path.parent) as storage:
        returns = any(r.job == name and r.state is JobState.DONE for r in read_records(storage))
        carrier = Carrier(
            place,
            storage,
            run_of(storage),
            Throttle(settings.limit_mb_s),
            settings.sole_writer,
            settings.replaces,
            settings.keep,
            returns,
        )
        carrier.carry(path.name)
