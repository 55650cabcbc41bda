"""Hypothesis profiles: ``pr`` is derandomized and quick, ``nightly`` and ``release`` search
further.

``pr`` gives the same examples every time, so that a red run is red again. The others keep their
failing examples in ``.hypothesis``.
"""

from __future__ import annotations

from types import MappingProxyType

from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.database import DirectoryBasedExampleDatabase

EXAMPLES = MappingProxyType({"pr": 100, "nightly": 1_000, "release": 3_000})
_PHASES = frozenset({Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink})


def profile(name: str, *, scale: float = 1.0, shrink: bool = True) -> settings:
    """The settings of ``pr``, ``nightly`` or ``release``.

    ``scale`` changes the number of examples; without ``shrink`` the first failure is reported as found.
    """
    kept = DirectoryBasedExampleDatabase(".hypothesis/examples")
    return settings(
        phases=_PHASES if shrink else _PHASES - {Phase.shrink},
        max_examples=max(1, int(EXAMPLES[name] * scale)),
        derandomize=name == "pr",
        database=None if name == "pr" else kept,
        deadline=None,
        print_blob=name != "pr",
        report_multiple_bugs=False,
        verbosity=Verbosity.normal,
        suppress_health_check=list(HealthCheck),
    )


def register() -> None:
    """Make the profiles known to Hypothesis; load one with ``settings.load_profile(name)``."""
    for name in EXAMPLES:
        settings.register_profile(name, profile(name))
