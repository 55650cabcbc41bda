"""The rooms of the library, and which modules decide without I/O."""

from __future__ import annotations

PURE = {
    "core/errors.py",
    "core/events.py",
    "core/lifecycle.py",
    "core/ledger.py",
    "core/evidence.py",
    "core/rollback.py",
    "core/recovery.py",
    "core/retention.py",
    "core/layout.py",
    "core/documents.py",
    "core/ports.py",
    "core/config.py",
}
