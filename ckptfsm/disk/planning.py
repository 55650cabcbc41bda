"""The plan of a start: the same for the start itself, and for the commands that foretell it."""

from __future__ import annotations

from ckptfsm.adapters.garbage import collection_paused
from ckptfsm.core.evidence import Evidence
from ckptfsm.core.recovery import Plan, Resume, plan
from ckptfsm.disk.journal import History


@collection_paused()
def plan_start(history: History, evidence: Evidence, epoch: int, resume: Resume) -> Plan:
    """Decide from everything that journal and disk tell. Raises ``DamagedRoot``, see ``plan``."""
    return plan(history.ledger, evidence, epoch, resume, intent=history.intent, lost=history.lost)
