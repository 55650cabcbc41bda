"""Which fault can strike in which state of a checkpoint: the pairs that a whole run must exercise.

The state is that of the checkpoint in flight, or of the newest one, when the fault struck; ``absent`` is
a root without any, also one whose newest journal has nothing left in flight or tracked. The marks:

    x   the run must exercise it, whatever its profile
    n   only the maintainers' profiles, nightly and release, must: they strike more of the calls
    =   it means the same as another pair of the fault: it may be struck, and is not counted
    .   it cannot happen: a run that strikes it is red, because this table is wrong then

``same`` and ``never`` are the reasons. These hold in every line, and are not repeated: a checkpoint that
is ``pruned``, ``discarded`` or ``quarantined`` leaves the root to the one before it, so its column says
the same as that one's state; and ``any`` are strikes at which no layer tells a state, because the root
holds none yet, or because it does not matter.

Damage by people and machines between two jobs (F16 to F21, F26, F30, F34) meets the remains of the
last job; in the states that are soon over, because the simulation aims at them. For F29 the
simulation has writers that live on while the next job starts, and judges that no start is refused
for them. Real processes (``megatron_kills``) show that such writers die and hold nothing; no
checkpoint's state matters there.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from ckptfsm.core.lifecycle import State


class Line(NamedTuple):
    """A fault: a mark for each of ``STATES``, and why ``=`` and ``.`` stand where they do."""

    marks: str
    same: str = ""
    never: str = ""


STATES = (
    *(s.value for s in (State.ABSENT, State.REQUESTED, State.FORKED, State.SHARDS_WRITTEN)),
    *(s.value for s in (State.FINALIZED, State.TRACKED, State.PRUNABLE, State.FAILED)),
    *(s.value for s in (State.PRUNED, State.DISCARDED, State.QUARANTINED)),
    "any",
)

# absent requested forked shards_written | finalized tracked prunable failed |
# pruned discarded quarantined | any
TABLE: MappingProxyType[str, Line] = MappingProxyType(
    {
        "F1": Line(
            "=xx= ===x === =",
            "its work is done, or its attempt is over: as failed, where none is awaited",
        ),
        "F2": Line("xxxx xxxx === ="),
        "F3": Line(
            "...x x... ... .",
            never="a manifest comes after all shards, and what is tracked has its tracker",
        ),
        "F4": Line("xxxx xxxx === ="),
        "F5": Line("xxxx xxxx === ="),
        "F6": Line("xxxx xxnx === ="),
        "F7": Line("xxxx xxxx === ="),
        "F8": Line("xxxx xxxx === ="),
        "F9": Line("xxxx xxxx === ="),
        "F10": Line(
            "=xx= ===x === =", "who reports to what is no longer awaited is as late as in failed"
        ),
        "F11": Line("xxxx =x=x === =", "all have reported, as in tracked"),
        "F12": Line("xxxx xxxx === ="),
        "F13": Line("xxxx xxxx === ="),
        "F14": Line("xxxx xxxx === ="),
        "F15": Line(
            "x=== =x=x === =",
            "what is in flight is F22's; one that may be deleted is still tracked",
        ),
        "F16": Line("xxxx xxxx === ="),
        "F17": Line(
            ".=== ==x= === =",
            "an older one is prunable meanwhile: as prunable",
            "nothing is there to delete",
        ),
        "F18": Line("xxxx xxxx === ="),
        "F19": Line("=xxx xxxx === =", "all that were tracked are withdrawn: as tracked"),
        "F20": Line("xxxx xxxx === ="),
        "F21": Line("=xxx xxxx === =", "all that were tracked are withdrawn: as tracked"),
        "F22": Line("=xxx x=== === =", "it is over, and this rank has not polled since"),
        "F23": Line(
            ".xx. ...x .=. .",
            "its attempt is over: as failed",
            "no part is written before the request, and none is left to write after all shards",
        ),
        "F24": Line("xxxx xxxx === ="),
        "F25": Line("=xxx x=== === =", "it is over, and this rank has not polled since"),
        "F26": Line("xxxx xxxx === ="),
        "F27": Line("xxxx xxxx === ="),
        "F28": Line(
            ".x.. .... ... .",
            never="who does not poll reports nothing, so its save stays requested",
        ),
        "F29": Line(
            "==x= ==== === x",
            "some of its writers are forked, or were when their attempt ended: as forked",
        ),
        "F30": Line("xxxx xxxx ==x x"),
        "F31": Line(
            "xx=x =x=x === =",
            "no call of a save is made there: a restore's, or those of the next save, are as in tracked",
        ),
        "F32": Line("xxxx xxxx === ="),
        "F33": Line("xxxx x==x === =", "tracked, and only its trainer does not know"),
        "F34": Line("xxxx xxxx === ="),
    }
)

_DEMANDED: Mapping[str, str] = MappingProxyType(
    {"sample": "", "pr": "x", "nightly": "xn", "release": "xn", "soak": ""}
)


def mark_of(fault: str, state: str) -> str:
    """The mark of a pair. Raises ``KeyError`` for a pair that the table does not have."""
    marks = TABLE[fault].marks.replace(" ", "")
    return dict(zip(STATES, marks, strict=True))[state]


def applicable(profile: str) -> tuple[str, ...]:
    """The pairs that a run of the profile must exercise (``F5 x forked``)."""
    pairs = ((fault, state) for fault in TABLE for state in STATES)
    return tuple(f"{f} x {s}" for f, s in pairs if mark_of(f, s) in _DEMANDED[profile])


def cannot_happen(pair: str) -> bool:
    """True if the table says that nothing strikes so, or if it does not know the pair."""
    fault, _, state = pair.partition(" x ")
    return fault not in TABLE or state not in STATES or mark_of(fault, state) == "."
