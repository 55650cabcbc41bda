"""The testing kit: a simulated disk, fault injection, checks for your policies and parts.

Install it with ``ckptfsm[testing]`` (hypothesis). Nothing here sleeps, and nothing needs torch.
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
    }
)
__all__ = [
    "assert_journal_conforms",
    "assert_policy_sound",
    "assert_writer_sound",
    "check_root",
]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use: some names need the extra."""
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'ckptfsm.testing' has no attribute {name!r}")
