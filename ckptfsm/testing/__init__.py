"""The testing kit: simulated storage and jobs, fault injection, strategies, checks for your parts.

Install it with ``ckptfsm[testing]`` (hypothesis, greenlet). Rules: production code never imports
this package; nothing here sleeps, and nothing needs torch.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import Any

_WHERE = MappingProxyType(
    {
        "assert_journal_conforms": "ckptfsm.testing.conformance",
        "assert_policy_sound": "ckptfsm.testing.checks",
        "assert_writer_sound": "ckptfsm.testing.checks",
        "check_root": "ckptfsm.testing.invariants",
        "simulate": "ckptfsm.testing.sim",
    }
)
__all__ = [
    "assert_journal_conforms",
    "assert_policy_sound",
    "assert_writer_sound",
    "check_root",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: some names need the extra."""
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'ckptfsm.testing' has no attribute {name!r}")
