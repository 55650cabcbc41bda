"""The command of the job that copies each tracked checkpoint: ``ckptfsm.places.carry:carry``.

Its settings are JSON in the variable ``CKPTFSM_COPY``. An error ends the process with a line that names
place, object and what to do: the line is the reason of the job's attempt.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ckptfsm.adapters.posix_storage import opened_storage
from ckptfsm.core.documents import first_problem
from ckptfsm.core.errors import CkptFsmError, ConfigError, describe
from ckptfsm.places.carrying import Carrier, Throttle, run_of
from ckptfsm.places.place import place_at

SETTINGS = "CKPTFSM_COPY"


class CopySettings(BaseModel):
    """Where to copy to, and how: see ``Copy``.

    ``limit_mb_s``: megabytes a second, over all files. ``sole_writer``: only this job ever writes to
    the place, so a server may be used that ignores conditional requests. ``replaces``: after a
    rollback, a step that is saved again takes the place of its earlier copy.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: Annotated[str, Field(min_length=1)]
    limit_mb_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    sole_writer: bool = False
    replaces: bool = False


def carry(path: str, step: int, metrics: Mapping[str, float]) -> None:
    """Copy the published directory ``path``. The process ends with status 1 if it is not committed."""
    try:
        copy_directory(Path(path), settings_of(os.environ.get(SETTINGS, "")))
    except CkptFsmError as error:
        sys.exit(f"{error}")
    except OSError as error:
        sys.exit(describe(error))


def settings_of(text: str) -> CopySettings:
    """The settings in a variable. Raises ``ConfigError``."""
    try:
        return CopySettings.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(f"{SETTINGS}: {first_problem(error)}", key="copies") from error


def copy_directory(path: Path, settings: CopySettings) -> None:
    """Copy a published directory of a root. Raises as ``Carrier.carry``."""
    place = place_at(settings.url, create=True)
    with opened_storage(path.parent) as storage:
        carrier = Carrier(
            place,
            storage,
            run_of(storage),
            Throttle(settings.limit_mb_s),
            settings.sole_writer,
            settings.replaces,
        )
        carrier.carry(path.name)
