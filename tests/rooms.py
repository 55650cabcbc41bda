"""The rooms of the library, and which modules decide without I/O."""

from __future__ import annotations

PURE = {
    "errors.py",
    "messages.py",
    "lifecycle.py",
    "ledger.py",
    "findings.py",
    "intent.py",
    "recovery.py",
    "retention.py",
    "layout.py",
    "documents.py",
    "ports.py",
    "config.py",
}
