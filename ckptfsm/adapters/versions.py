"""The tested versions of the packages beside this library, and those that cannot work.

Nothing is pinned in ``pyproject.toml``: a trainer brings its torch and megatron-core. An untested
release series is used, with one warning; a series that is known not to work is refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

from ckptfsm.adapters.notices import no_warning_is_an_error
from ckptfsm.core.errors import ConfigError, UntriedVersionWarning, describe

TRIED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "torch": ("2.13.0", "2.14.1", "2.15.0"),
        "megatron-core": ("0.13.1", "0.14.0", "0.15.0", "0.16.1", "0.17.1", "0.18.2", "0.19.2"),
        "nvidia-resiliency-ext": ("0.4.1", "0.6.0", "0.7.0"),
        "ray": ("2.60.0",),
        "verl": ("0.7.1", "0.9.0", "0.9.1"),
        "torchtitan": ("0.3.0",),
        "lightning": ("2.6.6",),
        "megatron-bridge": ("0.6.2",),
        "accelerate": ("1.15.0",),
        "transformers": ("5.23.0",),
    }
)
OLDEST: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "torch": (2, 6),
        "megatron-core": (0, 13),
        "ray": (2, 40),
        "verl": (0, 7),
        "torchtitan": (0, 3),
        "lightning": (2, 6),
        "accelerate": (1, 15),
        "transformers": (5, 23),
    }
)
_MODULES = MappingProxyType({"megatron-core": "megatron.core"})
_INSIDE = MappingProxyType({"megatron-core": "megatron.core.dist_checkpointing"})  # is used first
_BESIDE = MappingProxyType({"megatron-core": ("nvidia-resiliency-ext",)})


def require(*packages: str, extra: str) -> None:
    """Import packages that the extra ``extra`` installs, and judge their versions.

    Raises ``ConfigError`` if one is missing, cannot be imported, or is too old. Warns once of a
    release series that was never tested.
    """
    for name in packages:
        try:
            with no_warning_is_an_error():
                module = import_module(_MODULES.get(name, name))
                import_module(_INSIDE.get(name, module.__name__))
        except ImportError as error:
            raise missing(extra, error) from error
        except Exception as error:  # megatron-core asserts the versions of packages beside it
            raise ConfigError(
                f"{name} {installed(name)} cannot be imported: {describe(error)}{_beside(name)}"
            ) from error
        judge(name, str(getattr(module, "__version__", "")))


def missing(extra: str, error: ImportError) -> ConfigError:
    """The error for a package of an extra that is missing or only half installed."""
    said = (
        f"{describe(error)}. What ckptfsm itself needs here comes with `pip install "
        f"'ckptfsm[{extra}]'`; what else is missing, install by its name"
    )
    module = (error.name or "").partition(".")[0]
    if module and installed(module) != "not installed":
        said += f"; {module} {installed(module)} is there and incomplete: install it anew"
    return ConfigError(said)


def judge(name: str, found: str) -> None:
    """Refuse a version that cannot work; warn of a release series that was never tested."""
    series = series_of(found)
    if series is None:
        return
    tried = TRIED[name]
    if series < OLDEST.get(name, (0, 0)):
        oldest = ".".join(map(str, OLDEST[name]))
        raise ConfigError(
            f"{name} {found} is too old: install {oldest} or newer; tried were {', '.join(tried)}"
        )
    if series not in [series_of(each) for each in tried]:
        with no_warning_is_an_error():
            warnings.warn(
                UntriedVersionWarning(
                    f"{name} {found} was never tried with ckptfsm; tried were {', '.join(tried)}"
                ),
                stacklevel=3,
            )


def series_of(found: str) -> tuple[int, int] | None:
    """The first two numbers of a version; None for text that is no version."""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


def installed(name: str) -> str:
    """The version of an installed package, or "not installed"."""
    try:
        return version(name)
    except PackageNotFoundError:  # also a package in a source tree
        return "not installed"


def _beside(name: str) -> str:
    """The installed versions of the packages that ``name`` depends on, for an error message."""
    found: list[Any] = [f"{each} is {installed(each)}" for each in _BESIDE.get(name, ())]
    return f" ({', '.join(found)}: install what it asks for, or uninstall it)" if found else ""
